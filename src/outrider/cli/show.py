"""What a run looks like in a terminal: one legend, the same colours everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..engine.trace import Line, Trace
from ..models.detokenizer import Piece
from ..types import ACCEPTED, BONUS, PRUNED, REJECTED, UNREACHED, Stats

if TYPE_CHECKING:
    from ..measure.verify import VerifyReport as Report

# The one place where fates get their colours. rich honours NO_COLOR and dumb terminals.
STYLES = {
    ACCEPTED: "green",
    BONUS: "bold cyan",
    REJECTED: "red strike",
    UNREACHED: "dim strike",
    PRUNED: "dim",
}
WORDS = {
    ACCEPTED: "accepted from the draft",
    BONUS: "the target's own",
    REJECTED: "rejected draft",
    UNREACHED: "never reached",
    PRUNED: "pruned",
}


def legend(*fates: str) -> Text:
    line = Text()
    for fate in fates or (ACCEPTED, BONUS, REJECTED):
        line.append(WORDS[fate], STYLES[fate]).append("   ")
    return line


def piece(console: Console, piece: Piece) -> None:
    """Print one step's text as it arrives, tinted by origin."""
    if not console.is_terminal:  # a file gets the text itself; rich would expand its tabs
        console.file.write(piece.text)
        console.file.flush()
        return
    for text, origin in zip(piece.texts, piece.origins, strict=True):
        console.print(Text(text, STYLES[origin]), end="", soft_wrap=True)


def ghosts(console: Console, tokens: list[str]) -> None:
    """Drafted words that the target refused, struck out where they would have stood."""
    for token in tokens:
        if token.strip():
            console.print(Text(token.strip("\n"), STYLES[REJECTED]), end="", soft_wrap=True)


def summary(stats: Stats, seconds: float, drafter: str, plain: tuple[float, bool] | None = None) -> Table:
    """Tokens/s, passes, τ and α; beside it, if it was measured, the plain speed and whether its text was the same."""
    speed = stats.emitted / seconds if seconds else 0.0
    table = Table.grid(padding=(0, 2))
    table.add_row("tokens", f"{stats.emitted} in {seconds:.2f} s", f"[bold]{speed:.1f} tokens/s[/bold]")
    table.add_row("passes", str(stats.passes), f"τ = {stats.tau or 0:.2f} tokens per pass with a verdict")
    if stats.reached:
        detail = f"α = {stats.alpha:.0%} of {stats.reached} reached, {stats.drafted} drafted"
        table.add_row(f"drafter {drafter}", f"{stats.accepted} accepted", detail)
    else:
        table.add_row(f"drafter {drafter}", "nothing drafted", stats.why)
    if predicted := stats.accepted_prediction_tokens + stats.rejected_prediction_tokens:
        table.add_row("prediction", f"{stats.accepted_prediction_tokens} came true", f"of {predicted} predicted tokens")
    if plain is not None:
        says = "the same text" if plain[1] else "[red]another text[/red]"
        table.add_row(
            "plain", f"{plain[0]:.1f} tokens/s", f"[bold]{speed / plain[0]:.2f} x[/bold] the plain speed, {says}"
        )
    if stats.failures:
        table.add_row("[red]drafter failed[/red]", f"{stats.failures} times", "the text went on without it")
    return table


def learning_line(facts: dict[str, Any]) -> str:
    """How learning goes, in one line."""
    text = f"learning {facts['state']}: {facts['updates']} updates from {facts['records']} verified tokens"
    text += f", {facts['seconds'] * 1e3:.0f} ms in all, {facts['slowest'] * 1e3:.1f} ms at most in one step"
    return text + (f" ({facts['why']})" if facts["why"] else "")


def ahead_line(facts: dict[str, Any]) -> str:
    """What drafting ahead brought, in one line."""
    rate = facts["hit_rate"]
    text = "ahead: nothing was prepared" if rate is None else f"ahead: {rate:.0%} of outcomes were prepared for"
    if rate is not None:
        laws = ", ".join(f"{law['c']:.2f} F^-{law['r']:.2f} ({place})" for place, law in facts["miss"].items())
        text += f" (F forks miss {laws})"
    text += f", {facts['hidden_seconds'] * 1e3:.0f} ms of drafting hidden, {facts['exposed_seconds'] * 1e3:.0f} ms not"
    return f"{text}; {facts['just_in_time']} drafts just in time, {facts['fallbacks']} by fallback ({facts['why']})"


def translation_line(facts: dict[str, Any]) -> str:
    """What is done about a draft model with another tokenizer, in one line."""
    how = {"tli": "only what both have is drafted (TLI)", "slem": "what it drafts is spelled anew (SLEM)"}
    text = f"The draft model {facts['draft_model']} has another tokenizer: {facts['shared_tokens']:,} tokens in common"
    share = f"{facts['target_share']:.0%} of the target's and {facts['draft_share']:.0%} of its own"
    return f"{text}, {share}; {how[facts['translate']]}."


def steps(console: Console, trace: Trace, limit: int | None = None) -> None:
    """A recorded run, one line per step: what was drafted, what became of it, what it cost."""
    known: dict[str, str] = trace.footer.get("pieces") or {}
    pieces = {int(k): v for k, v in known.items()}
    console.print(legend(ACCEPTED, BONUS, REJECTED, UNREACHED))
    for line in trace.lines[:limit]:
        console.print(_step(line, pieces), soft_wrap=True, highlight=False)
    if trace.footer:
        n, drafted, accepted = (trace.footer[k] for k in ("steps", "drafted", "accepted"))
        tau = trace.footer["emitted"] / n if n else 0
        console.print(f"{n} steps, {drafted} drafted, {accepted} accepted, τ = {tau:.2f}", style="bold")


def _step(line: Line, pieces: dict[int, str]) -> Text:
    us = line["us"]
    text = Text(f"{line['step']:>5} · {line['seq']} @{line['at']:<5} ", "dim")
    text.append(f"draft {us['draft'][1] / 1000:6.2f} ms  verify {us['verify'][1] / 1000:7.2f} ms  ", "dim")
    for token, _, _, _, fate in line["nodes"]:
        text.append(_shown(token, pieces), STYLES[fate])
        text.append("·", "dim")
    accepted = sum(node[4] == ACCEPTED for node in line["nodes"])
    if len(line["emitted"]) > accepted:
        text.append(" → ", "dim").append(_shown(line["emitted"][-1], pieces), STYLES[BONUS])
    return text


def _shown(token: int, pieces: dict[int, str]) -> str:
    return repr(pieces[token])[1:-1] if token in pieces else f"#{token}"


def report(console: Console, report: Report) -> None:
    """What `verify` found: a table, each divergence, one sentence."""
    table = Table("drafter", "temperature", "tokens compared", "accepted", "divergences")
    for t in report.tallies:
        share = "–" if t.alpha is None else f"{t.alpha:.0%}"
        mark = "[green]0[/green]" if not t.divergences else f"[red]{len(t.divergences)}[/red]"
        table.add_row(t.drafter, f"{t.temperature:g}", str(t.compared_tokens), share, mark)
    console.print(table)
    for t in report.tallies:
        for d in t.divergences:
            console.print(
                f"{t.drafter}, temperature {t.temperature:g}, prompt {d.prompt}: differs at token {d.position}, "
                f"where the target's margin is {d.margin:.4f}"
            )
    verdict = "identical text" if not report.divergences else f"{report.divergences} divergences"
    where = f"{report.model}, {report.dtype}, {report.device}, rule {report.rule}"
    console.print(f"{where}: {report.compared_tokens} tokens, {verdict}.")
