"""`outrider demo`: three answers worth reading, each compared with plain decoding, and a table of their speeds."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from .common import encode_prompt, load_model, note, print_json, stderr
from .generate import Look, StreamedAnswer, race_of
from .options import EngineOptions, Json, MaxTokens, sampling_params

PROMPTS = {
    "an edit": (
        "Rewrite this function with type hints and a docstring, and keep the rest as it is:\n\n"
        "def area(width, height):\n    if width < 0 or height < 0:\n"
        "        raise ValueError('sides must not be negative')\n    return width * height"
    ),
    "an explanation": "Explain in a short paragraph why the sky is blue.",
    "a piece of code": "Write a Python function that checks whether a word is a palindrome, with a docstring.",
}


def demo(options: EngineOptions, max_tokens: MaxTokens = 96, as_json: Json = False) -> None:
    """Generate an edit, an explanation and a piece of code, and compare the speed of each with plain decoding."""
    from ..measure.statistics import is_noise
    from .show import factor, number

    given = options.arguments()
    params = sampling_params(given, max_tokens=max_tokens)
    llm = load_model(options.model, options.with_learning(given))
    rows = {}
    for name, prompt in PROMPTS.items():
        ids = encode_prompt(llm, prompt)
        if not as_json:
            Console(highlight=False).print(f"[bold]{name}[/bold]  [dim]{prompt}[/dim]\n", markup=True)
        answer = StreamedAnswer(llm, ids, params, Look(quiet=as_json))
        answer.run()
        stderr.print()
        if not answer.ended:
            return
        rows[name] = race_of(llm, ids, params)
    if as_json:
        print_json({name: vars(row) for name, row in rows.items()})
        return
    table = Table(
        title=f"{llm.name}, {llm.dtype}, {llm.device}: times plain decoding",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("text")
    for title in ("tokens/s", "plain", "decoding", "request", "τ"):
        table.add_column(title, justify="right")
    for name, row in rows.items():
        mark = "*" if is_noise(row.speedup, row.tau) else ""
        cells = (number(row.tok_s, 1), number(row.plain_tok_s, 1), mark + factor(row.speedup))
        table.add_row(name, *cells, factor(row.speedup_total), number(row.tau))
    Console().print(table)
    worst = min(rows, key=lambda name: rows[name].speedup or 1.0)
    differ = any(row.divergences for row in rows.values())
    same = "TEXTS DIFFER" if differ else "every text is that of plain decoding"
    note(f"Least for {worst}: {factor(rows[worst].speedup)}; {same}. Medians of {rows[worst].rounds} runs each.")
    if any(is_noise(row.speedup, row.tau) for row in rows.values()):
        note("* more than τ allows: this machine was disturbed, run it again.")
