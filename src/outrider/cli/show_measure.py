"""How measurements look in a terminal: tables and small text plots. It prints what it is given and measures nothing."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..measure.cost import Bill
from ..measure.doctor import GOOD, HINT, KS, WRONG, Facts, Finding, MemoryUse as Addition
from ..measure.statistics import ALL
from ..measure.tune import TuneResult as Outcome

_MARKS = {GOOD: "[green]✓[/green]", HINT: "[yellow]→[/yellow]", WRONG: "[red]✗[/red]"}
BAR = 32  # characters


def bench(console: Console, result: dict[str, Any]) -> None:
    """Each drafter by kind of text; then the sweep over K, if there was one; then whether the texts agreed."""
    several = len({(r["drafter"], r["k"], str(r["options"])) for r in result["rows"]}) > 1
    table = Table("drafter", "K", "text", "tokens/s", "plain", "speedup (95%)", "τ", "α", box=box.SIMPLE)
    for r in result["rows"]:
        style = "bold" if r["category"] == ALL else ""
        speed = (number(r["tok_s"], 1), number(r["plain_tok_s"], 1), gain(r), number(r["tau"]), share(r["alpha"]))
        table.add_row(
            r["drafter"], str(r["k"]), r["category"], *speed, style=style, end_section=several and r["category"] == ALL
        )
    console.print(table)
    for r in result["rows"]:
        if r["category"] == ALL and r["alpha_by_position"]:
            listed = "  ".join(f"{i}: {alpha:.0%}" for i, alpha in enumerate(r["alpha_by_position"], start=1))
            console.print(f"{r['drafter']}, K {r['k']}, α by position:  {listed}", highlight=False, soft_wrap=True)
    if result["sweep"]:
        sweep(console, result["sweep"], result["knee"])
    divergences(console, result)


def sweep(console: Console, rows: list[dict[str, Any]], knee: dict[str, int] | None) -> None:
    top = max((r["speedup"] or 0.0 for r in rows), default=1.0)
    table = Table("K", "", "speedup (95%)", "τ", "α", box=box.SIMPLE, title=f"{rows[0]['drafter']}: speedup against K")
    for r in rows:
        bar = "█" * round(BAR * (r["speedup"] or 0.0) / top)
        table.add_row(str(r["k"]), bar, gain(r), number(r["tau"]), share(r["alpha"]))
    console.print(table)
    if knee:
        console.print(f"Fastest at K = {knee['best_k']}; K = {knee['enough_k']} loses at most 2% against it.")


def divergences(console: Console, result: dict[str, Any]) -> None:
    if not result["divergences"]:
        console.print(f"{result['compared_tokens']} tokens compared: identical text.")
        return
    for d in result["divergences"]:
        where = f"prompt {d['prompt']} ({escape(d['category'])}), token {d['position']}"
        console.print(f"[red]{d['drafter']}, K {d['k']}: the text differs from plain decoding at {where}.[/red]")


def doctor(console: Console, facts: Facts, findings: list[Finding]) -> None:
    """Costs by rows, break-even, acceptance by kind of text, then the findings in words."""
    console.print(f"[bold]{escape(facts.model)}[/bold], {facts.dtype}, {escape(where(facts))}", soft_wrap=True)
    if facts.backend:
        console.print(escape(facts.backend), highlight=False, soft_wrap=True)
    console.print(escape(default_device(facts)) + "\n", highlight=False, soft_wrap=True)
    console.print("What a pass over n rows costs (a draft of K tokens needs K + 1):")
    top = max(facts.costs.values())
    for rows, seconds in sorted(facts.costs.items()):
        bar = "█" * max(1, round(BAR * seconds / top))
        console.print(f"{rows:>5} {1000 * seconds:8.2f} ms {seconds / facts.costs[1]:5.2f} × {bar}", highlight=False)
    console.print()
    for k in KS:
        need = facts.break_even(k)
        console.print(
            f"K = {k}: " + ("never pays here" if need is None else f"pays from α = {need:.0%} on"), highlight=False
        )
    table = Table("text", "α", "speedup", title=f"{facts.drafter}, K auto")
    for kind in [*facts.kinds, facts.overall]:
        table.add_row(kind.category, share(kind.alpha), factor(kind.speedup))
    console.print(table)
    if facts.memory:
        memory(console, facts.memory)
    for finding in findings:
        console.print(f"{_MARKS[finding.level]} {escape(finding.text)}", highlight=False, soft_wrap=True)


def memory(console: Console, additions: list[Addition]) -> None:
    """The target first, then what each drafter adds to it."""
    target, *drafters = additions
    console.print(
        f"Memory of the target: {megabytes(target.weights)} of weights, {megabytes(target.kv)} for K/V. Drafters add:",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    free = ", ".join(each.name for each in drafters if not each.weights + each.kv)
    for each in drafters:
        if each.weights + each.kv:
            console.print(
                f"  {each.name}: {megabytes(each.weights)} of weights, {megabytes(each.kv)} for K/V", highlight=False
            )
    if free:
        console.print(f"  {free}: nothing", highlight=False, soft_wrap=True)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def where(facts: Facts) -> str:
    """What runs the passes: the CPU's kernels, or the GPU with what drives it."""
    env = facts.environment
    if not facts.on_gpu:
        return f"{env.get('cpu', 'cpu')}, {env.get('kernels')}"
    gpu = facts.gpu or {}
    name = f"{gpu.get('name', 'GPU')} ({facts.device}, {gpu.get('memory_gb', 0):.0f} GB)"
    versions = env.get("versions", {})
    parts = (("driver", env.get("driver")), ("CUDA", env.get("cuda")), ("triton", versions.get("triton")))
    return ", ".join([name, facts.runner, *(f"{what} {version}" for what, version in parts if version)])


def default_device(facts: Facts) -> str:
    """What `--device auto` means here, and why."""
    auto, reason = facts.environment.get("auto_device", "cpu"), facts.environment.get("no_gpu")
    others = len(facts.environment.get("gpus", []))
    if reason:
        return f"--device auto means {auto} here: {reason}."
    return f"--device auto means {auto} here, the first of {others} GPU(s) that torch sees."


def cost(console: Console, bills: list[Bill], currency: str) -> None:
    table = Table(
        "drafter", "K", "text", "plain", "speculative", "saving", title=f"A million tokens, in {escape(currency)}"
    )
    for bill in bills:
        style = "bold" if bill.category == ALL else ""
        prices = (f"{bill.plain:.3f}", f"{bill.speculative:.3f}", f"{bill.saving_percent:+.0f}%")
        table.add_row(bill.drafter, str(bill.k), bill.category, *prices, style=style)
    console.print(table)


def tune(console: Console, outcome: Outcome, most: int = 12) -> None:
    """The race's table, the layer-skip set, and the winner in a sentence."""
    table = Table("drafter", "K", "options", "runs", "speedup (95%)", "τ", "α", box=box.SIMPLE)
    for row in outcome.rows[:most]:
        options = ", ".join(f"{name}={value}" for name, value in row.options.items()) or "–"
        runs, style = str(row.prompts * row.rounds), "bold" if row is outcome.best else ""
        cells = (row.drafter, str(row.k), escape(options), runs, gain(vars(row)))
        table.add_row(*cells, number(row.tau), share(row.alpha), style=style)
    if outcome.rows:
        console.print(table)
    if outcome.search is not None:
        best = outcome.search
        sets = f"attention {sorted(best.skip.attention)} and MLPs {sorted(best.skip.mlp)}"
        sets += f", drafts only the first {best.skip.vocab:,} ids" if best.skip.vocab else ""
        promise = f"agrees {best.agreement:.0%} of the time and promises {best.speedup:.2f} × at K = {best.k}"
        said = f"Layer skipping: {outcome.tried} sets scored; the best leaves out {sets}, {promise}."
        if best.speedup <= 1:
            said += " No set pays here: drafting with it is expected to lose, and K auto will leave it alone."
        console.print(escape(said), highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(winner(outcome))}[/bold]", soft_wrap=True)


def winner(outcome: Outcome) -> str:
    best = outcome.best
    if not outcome.rows:
        return "Nothing was timed yet; `outrider tune --resume` goes on from this set."
    if best is None:
        return "Nothing was clearly faster than plain decoding on these prompts: the profile switches speculation off."
    extra = "".join(f", {name} {value}" for name, value in best.options.items())
    return f"Best: {best.drafter}, K {best.k}{extra}: {best.speedup:.2f} × plain decoding."


# ---------------------------------------------------------------- cells


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def factor(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ×"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def gain(row: dict[str, Any]) -> str:
    """The speedup with its interval, where there is one."""
    span = "" if row["ci_low"] is None else f" ({row['ci_low']:.2f}–{row['ci_high']:.2f})"
    return factor(row["speedup"]) + span
