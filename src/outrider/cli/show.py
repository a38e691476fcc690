"""How runs and measurements look in a terminal: one legend, the same colours everywhere, tables and text bars.

It prints what it is given and measures nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..measure.report import WORDS
from ..measure.statistics import ALL, BenchRow, is_noise
from ..types import ACCEPTED, BONUS, PRUNED, REJECTED, UNREACHED, Stats

if TYPE_CHECKING:
    from ..engine.trace import Line, Trace
    from ..measure.cost import Bill
    from ..measure.doctor import Facts, Finding, MemoryUse
    from ..measure.tune import TuneResult
    from ..measure.verify import VerifyReport
    from ..models.detokenizer import Piece

_WORDS = re.compile(r"\s|[^\s\u1100-\uffff]+|\S")  # a space, a word, or one character of a script without spaces
# The colour of every fate. rich honours NO_COLOR and dumb terminals; where there are none, marks stand around a token.
STYLES = {ACCEPTED: "green", BONUS: "bold cyan", REJECTED: "red strike", UNREACHED: "dim strike", PRUNED: "dim"}
MARKS = {ACCEPTED: ("", ""), BONUS: ("", ""), REJECTED: ("~", "~"), UNREACHED: ("?", "?"), PRUNED: ("(", ")")}
BAR = 32  # characters of the longest text bar


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


# ---------------------------------------------------------------- a run


def legend(*fates: str, marked: bool = False) -> Text:
    """The colours of these fates; `marked`: the characters around a token instead, where there are no colours."""
    line = Text()
    for fate in fates:
        before, after = MARKS[fate] if marked else ("", "")
        line.append(f"{before}{WORDS[fate]}{after}", STYLES[fate]).append("   ")
    return line


class AnswerText:
    """An answer as it arrives, coloured by origin, with no word split at the margin.

    A word is printed when it is whole, so that the text lags behind by one. A file gets the text itself, as does a
    terminal that asks for it (`plain`): rich would expand tabs, and wrapped lines are copied with their breaks.
    """

    def __init__(self, console: Console, plain: bool = False) -> None:
        self.console, self.plain = console, plain or not console.is_terminal
        self._word: list[tuple[str, str]] = []  # what has arrived of it, with styles
        self._column = 0

    def add(self, piece: Piece, rejected: str = "") -> None:
        """One step's text, and a rejected token to strike out in the place where it would have stood."""
        if self.plain:
            self.console.file.write(piece.text)
            self.console.file.flush()
            return
        for text, origin in zip(piece.texts, piece.origins, strict=True):
            self._add(text, STYLES[origin])
        if rejected.strip():
            self._add(rejected.strip(), STYLES[REJECTED])

    def finish(self) -> None:
        """Print the last word, and end the line."""
        self._end_word()
        self.console.file.write("\n")
        self.console.file.flush()

    def _add(self, text: str, style: str) -> None:
        for part in _WORDS.findall(text):
            if part.isspace():
                self._end_word()
                self._space(part)
            else:
                self._word.append((part, style))
                if cell_len(part) > len(part):  # a script without spaces: a line may end after every character
                    self._end_word()

    def _space(self, character: str) -> None:
        """A space that meets the margin becomes the end of the line."""
        width = 8 - self._column % 8 if character == "\t" else 1
        if character == "\n" or self._column + width >= self.console.width:
            self.console.print()
            self._column = 0
        else:
            self.console.print(" " * width, end="")
            self._column += width

    def _end_word(self) -> None:
        length = sum(cell_len(text) for text, _ in self._word)
        if self._column and self._column + length > self.console.width:
            self.console.print()
            self._column = 0
        for text, style in self._word:
            self.console.print(Text(text, style), end="", soft_wrap=True)
        self._column += length
        if self._column > self.console.width:  # a word that is longer than a line
            self._column %= self.console.width
        self._word.clear()


def summary(stats: Stats, seconds: float, drafter: str, race: BenchRow | None = None) -> Table:
    """Tokens/s, passes, τ and α. `race` compares the same request with plain decoding."""
    speed = stats.emitted / seconds if seconds else 0.0
    table = Table.grid(padding=(0, 2))
    table.add_row("tokens", f"{stats.emitted} in {seconds:.2f} s", f"[bold]{speed:.1f} tokens/s[/bold]")
    table.add_row("passes", str(stats.passes), f"τ = {stats.tau or 0:.2f} tokens per verification pass")
    if stats.reached:
        detail = f"α = {stats.alpha:.0%} of {stats.reached} reached, {stats.drafted} drafted"
        table.add_row(f"drafter {drafter}", f"{stats.accepted} accepted", detail)
    else:
        table.add_row(f"drafter {drafter}", "nothing drafted", stats.why)
    if predicted := stats.accepted_prediction_tokens + stats.rejected_prediction_tokens:
        table.add_row("prediction", f"{stats.accepted_prediction_tokens} accepted", f"of {predicted} predicted tokens")
    if race is not None:
        text = "[red]different text[/red]" if race.divergences else "the same text"
        speeds = f"{number(race.tok_s, 1)} tokens/s, plain {number(race.plain_tok_s, 1)}"
        table.add_row("decoding", speeds, f"[bold]{factor(race.speedup)}[/bold] plain, {text}")
        table.add_row("whole request", f"median of {race.rounds} runs", f"{factor(race.speedup_total)} plain")
        if is_noise(race.speedup, race.tau):
            table.add_row("", "[yellow]more than τ allows:[/yellow]", "[yellow]this machine was disturbed[/yellow]")
    if stats.failures:
        table.add_row("[red]drafter failed[/red]", f"{stats.failures} times", "the text continued without it")
    return table


def learning_line(facts: dict[str, Any]) -> str:
    """State and cost of online learning."""
    text = f"learning {facts['state']}: {facts['updates']} updates from {facts['records']} verified tokens"
    text += f", {facts['seconds'] * 1e3:.0f} ms in total, at most {facts['slowest'] * 1e3:.1f} ms in one step"
    return text + (f" ({facts['why']})" if facts["why"] else "")


def ahead_line(facts: dict[str, Any]) -> str:
    """Hit rate of drafting ahead, and how much drafting time it hid. F is the number of forks."""
    rate = facts["hit_rate"]
    text = "ahead: nothing was prepared" if rate is None else f"ahead: {rate:.0%} of outcomes were prepared for"
    if rate is not None:
        laws = ", ".join(f"{law['c']:.2f} F^-{law['r']:.2f} ({outcome})" for outcome, law in facts["miss"].items())
        text += f" (F forks miss {laws})"
    text += f", {facts['hidden_seconds'] * 1e3:.0f} ms of drafting hidden, {facts['exposed_seconds'] * 1e3:.0f} ms not"
    return f"{text}; {facts['just_in_time']} drafts just in time, {facts['fallbacks']} by fallback ({facts['why']})"


def translation_line(facts: dict[str, Any]) -> str:
    """How drafts of a model with another tokenizer are translated."""
    how = {"tli": "only shared tokens are drafted (TLI)", "slem": "its drafts are retokenised (SLEM)"}
    text = f"The draft model {facts['draft_model']} has another tokenizer: {facts['shared_tokens']:,} shared tokens"
    share = f"{facts['target_share']:.0%} of the target's and {facts['draft_share']:.0%} of its own"
    return f"{text}, {share}; {how[facts['translate']]}."


def trace(console: Console, trace: Trace, limit: int | None = None) -> None:
    """A recorded run, one line per step: its drafts with their fates, its times, and the target's own token."""
    stored: dict[str, str] = trace.footer.get("pieces") or {}
    pieces = {int(token): text for token, text in stored.items()}
    marked = console.no_color or not console.is_terminal
    console.print(legend(ACCEPTED, BONUS, REJECTED, UNREACHED, marked=marked))
    for line in trace.lines[:limit]:
        console.print(_step(line, pieces, marked), soft_wrap=True, highlight=False)
    if trace.footer:
        n, drafted, accepted = (trace.footer[name] for name in ("steps", "drafted", "accepted"))
        tau = trace.footer["emitted"] / n if n else 0
        console.print(f"{n} steps, {drafted} drafted, {accepted} accepted, τ = {tau:.2f}", style="bold")


def _step(line: Line, pieces: dict[int, str], marked: bool) -> Text:
    def shown(token: int, fate: str = BONUS) -> str:
        before, after = MARKS[fate] if marked else ("", "")
        return before + (repr(pieces[token])[1:-1] if token in pieces else f"#{token}") + after

    us = line["us"]
    text = Text(f"{line['step']:>5} · {line['seq']} @{line['at']:<5} ", "dim")
    text.append(f"draft {us['draft'][1] / 1000:6.2f} ms  verify {us['verify'][1] / 1000:7.2f} ms  ", "dim")
    for token, _, _, _, fate in line["nodes"]:
        text.append(shown(token, fate), STYLES[fate]).append("·", "dim")
    accepted = sum(node[4] == ACCEPTED for node in line["nodes"])
    if len(line["emitted"]) > accepted:
        text.append(" → ", "dim").append(shown(line["emitted"][-1]), STYLES[BONUS])
    return text


def verification(console: Console, report: VerifyReport) -> None:
    """A table by drafter and temperature, each divergence, and one sentence."""
    table = Table("drafter", "temperature", "tokens compared", "accepted", "failed steps", "divergences")
    for t in report.tallies:
        mark = "[green]0[/green]" if not t.divergences else f"[red]{len(t.divergences)}[/red]"
        failed = f"[red]{t.failures}[/red]" if t.first_failure else "0"
        table.add_row(t.drafter, f"{t.temperature:g}", str(t.compared_tokens), _share(t.alpha), failed, mark)
    console.print(table)
    for t in report.tallies:
        for d in t.divergences:
            console.print(
                f"{t.drafter}, temperature {t.temperature:g}, prompt {d.prompt}: differs at token {d.position}, "
                f"where the target's margin is {d.margin:.4f}"
            )
    for t in report.tallies:
        if t.first_failure:
            reason = escape(t.first_failure)
            console.print(f"[red]The drafter {t.drafter} failed[/red] ({reason}). The text was not affected.")
    verdict = "identical text" if not report.divergences else f"{report.divergences} divergences"
    setting = f"{report.model}, {report.dtype}, {report.device}, rule {report.rule}"
    console.print(f"{setting}: {report.compared_tokens} tokens, {verdict}.")


# ---------------------------------------------------------------- bench


def bench(console: Console, result: dict[str, Any]) -> None:
    """Each drafter by kind of text, the sweep over K if there is one, and whether the texts agree."""
    setups = list(dict.fromkeys((r["drafter"], r["k"], str(r["options"])) for r in result["rows"]))
    for setup in setups:
        rows = [r for r in result["rows"] if (r["drafter"], r["k"], str(r["options"])) == setup]
        console.print(_bench_table(rows))
    if any(is_noise(r["speedup"], r["tau"]) for r in result["rows"]):
        _line(console, "[yellow]*[/yellow] more than τ allows: this machine was disturbed, measure again.")
    for r in result["rows"]:
        if r["category"] == ALL and r["alpha_by_position"]:
            listed = "  ".join(f"{i}: {alpha:.0%}" for i, alpha in enumerate(r["alpha_by_position"], start=1))
            _line(console, f"{r['drafter']}, K {r['k']}, α by position:  {listed}")
    if result["sweep"]:
        _sweep(console, result["sweep"], result["knee"])
    for d in result["divergences"]:
        position = f"prompt {d['prompt']} ({escape(d['category'])}), token {d['position']}"
        console.print(f"[red]{d['drafter']}, K {d['k']}: the text differs from plain decoding at {position}.[/red]")
    if not result["divergences"]:
        console.print(f"{result['compared_tokens']} tokens compared: identical text.")


def _bench_table(rows: list[dict[str, Any]]) -> Table:
    """One drafter by kind of text. Speedups are of decoding, of the whole request, and without looping answers."""
    title = f"{rows[0]['drafter']}, K {rows[0]['k']}: times the speed of plain decoding"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    table.add_column("text")
    loops = any(r.get("loops") for r in rows)
    for name in ("tokens/s", "plain", "decoding (95%)", "request", *(["without loops"] if loops else []), "τ", "α"):
        table.add_column(name, justify="right")
    for r in rows:
        cells = [number(r["tok_s"], 1), number(r["plain_tok_s"], 1), _speedup(r), factor(r.get("speedup_total"))]
        if loops:
            left_out = f" (of {r['prompts'] - r['loops']})" if r["loops"] else ""
            cells.append(factor(r["speedup_without_loops"]) + left_out)
        cells += [number(r["tau"]), _share(r["alpha"])]
        table.add_row(r["category"], *cells, style="bold" if r["category"] == ALL else "")
    return table


def _sweep(console: Console, rows: list[dict[str, Any]], knee: dict[str, int] | None) -> None:
    top = max((r["speedup"] or 0.0 for r in rows), default=1.0)
    table = Table("K", "", "speedup (95%)", "τ", "α", box=box.SIMPLE, title=f"{rows[0]['drafter']}: speedup against K")
    for r in rows:
        bar = "█" * round(BAR * (r["speedup"] or 0.0) / top)
        table.add_row(str(r["k"]), bar, _speedup(r), number(r["tau"]), _share(r["alpha"]))
    console.print(table)
    if knee:
        console.print(f"Fastest at K = {knee['best_k']}; K = {knee['enough_k']} loses at most 2% against it.")


def load_test(console: Console, result: dict[str, Any]) -> None:
    table = Table("milliseconds", "mean", "p50", "p90", "p99", box=box.SIMPLE)
    labels = {"ttft_ms": "time to first token", "tpot_ms": "time per output token"}
    for name, label in (labels | {"between_chunks_ms": "between chunks", "e2e_ms": "end to end"}).items():
        table.add_row(label, *(f"{result[name].get(key, 0.0):.1f}" for key in ("mean", "p50", "p90", "p99")))
    console.print(table)
    rate = result["acceptance_rate"]
    accepted = f", {rate:.0%} of {result['draft_tokens']} drafted tokens accepted" if rate is not None else ""
    speed = f"{result['tokens']} tokens in {result['seconds']} s: {result['tokens_per_second']} tokens/s"
    _line(console, f"{speed}, {result['failed']} of {result['requests']} requests failed{accepted}")
    for sentence in result["errors"]:
        console.print(f"[red]{escape(sentence)}[/red]", soft_wrap=True)


# ---------------------------------------------------------------- doctor, cost, tune


def doctor(console: Console, facts: Facts, findings: list[Finding]) -> None:
    """Costs by rows, break-even acceptance, acceptance by kind of text, memory, and the findings."""
    from ..measure.doctor import GOOD, HINT, KS, LOSS, WRONG, reading, room

    console.print(f"[bold]{escape(facts.model)}[/bold], {facts.dtype}, {escape(_hardware(facts))}", soft_wrap=True)
    if facts.backend:
        _line(console, escape(facts.backend))
    if read := reading(facts):
        _line(console, escape(read))
    _line(console, escape(_default_device(facts)) + "\n")
    console.print("What a pass over n rows costs (a draft of K tokens needs K + 1):")
    top = max(facts.costs.values())
    for rows, seconds in sorted(facts.costs.items()):
        bar = "█" * max(1, round(BAR * seconds / top))
        console.print(f"{rows:>5} {1000 * seconds:8.2f} ms {seconds / facts.costs[1]:5.2f} × {bar}", highlight=False)
    console.print()
    for k in KS:
        alpha = facts.break_even(k)
        _line(console, f"K = {k}: " + ("never pays here" if alpha is None else f"pays from α = {alpha:.0%} on"))
    table = Table("text", "α", "decoding", "request", title=f"{facts.drafter}, K auto: times the plain speed")
    for kind in [*facts.kinds, facts.overall]:
        lost = "red" if (kind.speedup or 1.0) < LOSS else ""
        table.add_row(kind.category, _share(kind.alpha), factor(kind.speedup), factor(kind.request), style=lost)
    console.print(table)
    if facts.memory:
        _memory(console, facts.memory)
    if long := room(facts):
        _line(console, escape(long) + "\n")
    marks = {GOOD: "[green]✓[/green]", HINT: "[yellow]→[/yellow]", WRONG: "[red]✗[/red]"}
    for finding in findings:
        _line(console, f"{marks[finding.level]} {escape(finding.text)}")


def _memory(console: Console, additions: list[MemoryUse]) -> None:
    """The target's memory, then what each drafter adds to it."""

    def sizes(each: MemoryUse) -> str:
        return f"{each.weights / 1e6:,.1f} MB of weights, {each.kv / 1e6:,.1f} MB for K/V"

    target, *drafters = additions
    _line(console, f"Memory of the target: {sizes(target)}. Drafters add:")
    for each in drafters:
        if each.weights + each.kv:
            _line(console, f"  {each.name}: {sizes(each)}")
    if free := ", ".join(each.name for each in drafters if not each.weights + each.kv):
        _line(console, f"  {free}: nothing")


def _hardware(facts: Facts) -> str:
    """The CPU and its kernels, or the GPU with its runner and driver versions."""
    env = facts.environment
    if not facts.on_gpu:
        return f"{env.get('cpu', 'cpu')}, {env.get('kernels')}"
    gpu = facts.gpu or {}
    name = f"{gpu.get('name', 'GPU')} ({facts.device}, {gpu.get('memory_gb', 0):.0f} GB)"
    versions = env.get("versions", {})
    parts = (("driver", env.get("driver")), ("CUDA", env.get("cuda")), ("triton", versions.get("triton")))
    return ", ".join([name, facts.runner, *(f"{what} {version}" for what, version in parts if version)])


def _default_device(facts: Facts) -> str:
    """What `--device auto` means here, and why."""
    auto, reason = facts.environment.get("auto_device", "cpu"), facts.environment.get("no_gpu")
    if reason:
        return f"--device auto means {auto} here: {reason}."
    gpus = len(facts.environment.get("gpus", []))
    return f"--device auto means {auto} here, the first of {gpus} GPU(s) that torch sees."


def cost(console: Console, bills: list[Bill], currency: str) -> None:
    title = f"A million decoded tokens, in {escape(currency)}"
    table = Table("drafter", "K", "text", "plain", "speculative", "saving", title=title)
    for bill in bills:
        prices = (f"{bill.plain:.3f}", f"{bill.speculative:.3f}", f"{bill.saving_percent:+.0f}%")
        style = "bold" if bill.category == ALL else ""
        table.add_row(bill.drafter, str(bill.k), bill.category, *prices, style=style)
    console.print(table)


def tune(console: Console, outcome: TuneResult, most: int = 12) -> None:
    """The measured configurations, the best layer-skip set, and the winner in a sentence."""
    table = Table("drafter", "K", "options", "runs", "speedup (95%)", "τ", "α", box=box.SIMPLE)
    for row in outcome.rows[:most]:
        options = ", ".join(f"{name}={value}" for name, value in row.options.items()) or "–"
        runs, style = str(row.prompts * row.rounds), "bold" if row is outcome.best else ""
        cells = (row.drafter, str(row.k), escape(options), runs, _speedup(vars(row)))
        table.add_row(*cells, number(row.tau), _share(row.alpha), style=style)
    if outcome.rows:
        console.print(table)
    if outcome.search is not None:
        best = outcome.search
        sets = f"attention {sorted(best.skip.attention)} and MLPs {sorted(best.skip.mlp)}"
        sets += f", drafts only the first {best.skip.vocab:,} ids" if best.skip.vocab else ""
        estimate = f"agrees {best.agreement:.0%} of the time; the estimate is {best.speedup:.2f} × at K = {best.k}"
        text = f"Layer skipping: {outcome.tried} sets scored; the best skips {sets}, and {estimate}."
        if best.speedup <= 1:
            text += " No set is expected to pay here, so K auto will not draft with it."
        _line(console, escape(text))
    console.print(f"[bold]{escape(winner(outcome))}[/bold]", soft_wrap=True)


def winner(outcome: TuneResult) -> str:
    best = outcome.best
    if not outcome.rows:
        return "Nothing was timed yet; `outrider tune --resume` continues from this set."
    if best is None:
        return "Nothing was clearly faster than plain decoding on these prompts: the profile switches speculation off."
    extra = "".join(f", {name} {value}" for name, value in best.options.items())
    return f"Best: {best.drafter}, K {best.k}{extra}: {best.speedup:.2f} × plain decoding."


# ---------------------------------------------------------------- table cells


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def factor(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ×"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _speedup(row: dict[str, Any]) -> str:
    """The speedup, and its confidence interval if there is one. A star: more than τ allows."""
    interval = "" if row["ci_low"] is None else f" ({row['ci_low']:.2f}–{row['ci_high']:.2f})"
    return ("*" if is_noise(row["speedup"], row["tau"]) else "") + factor(row["speedup"]) + interval
