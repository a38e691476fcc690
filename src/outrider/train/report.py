"""What is written about a trained drafter: the model card (Markdown) and the report (HTML).

Both are made from the result of the training run alone.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import Any

from ..measure.plots import Axes, Point, Series, lines
from ..measure.report import facts_table, figure, page, table
from .loop import ALL

Json = dict[str, Any]
_MOST_POINTS = 16  # of a curve: each has its own label below the plot
_HEAD_USE = "--drafter head --set head=THIS_FOLDER"
_USE = {
    "eagle3": _HEAD_USE,
    "block": _HEAD_USE,
    "exit": "--drafter exit --set adapter=THIS_FOLDER",
    "model": "--drafter model --draft-model THIS_FOLDER",
}
_DESCRIPTION = {
    "eagle3": "an EAGLE-3 head: one layer on fused features of the target, drafting token after token",
    "block": "a block drafter: mask rows after the target's last features, filled in by one pass",
    "exit": "an early exit: a small adapter that predicts from the target's first layers, which verification then need "
    "not run again",
    "model": "a small standalone model: a few layers of the target, distilled from the whole of it",
}


def model_card(result: Json) -> str:
    """Markdown with Hugging Face's header."""
    target = result["target"]
    parts = [
        f"---\nlibrary_name: outrider\nbase_model: {target['name']}\ntags:\n- speculative-decoding\n- drafter\n---",
        f"# A drafter for {target['name']}",
        f"It is {_DESCRIPTION[result['kind']]}. It works with this target only (hash `{target['hash']}`) and changes "
        "the speed of its text, never the text.",
        f"```\noutrider generate --model TARGET {_USE[result['kind']]}\n```",
        "## How well it drafts",
        f"Greedy chains on the answers to {result['held_answers']:,} held-out prompts, which were not trained on. τ is "
        "tokens per target pass, the target's own included; α is how often a drafted token is right once the ones "
        "before it were.",
        _acceptance_table(result["evaluations"][-1]["kinds"]),
        "## How it was made",
        _training_facts(result),
        "Prompts (the answers are the target's own):",
        "\n".join(f"- {d['file']}: {d['prompts']:,} prompts, sha256 `{d['sha256']}`" for d in result["data"]),
        f"```\n{result['recipe']['command']}\n```",
        "## Licence",
        "The weights were made from the target and its own answers: the target's licence applies to them.",
    ]
    return "\n\n".join(parts) + "\n"


def _acceptance_table(kinds: Json) -> str:
    deepest = max((len(k["alpha_by_position"]) for k in kinds.values()), default=0)
    rows = [["kind of text", "τ", *(f"α {i + 1}" for i in range(deepest))], ["---"] * (deepest + 2)]
    for name, kind in kinds.items():
        alphas = [f"{alpha:.2f}" for alpha in kind["alpha_by_position"]]
        rows.append([name, f"{kind['tau']:.2f}", *alphas, *["–"] * (deepest - len(alphas))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _training_facts(result: Json) -> str:
    recipe, vocabulary = result["recipe"], result.get("vocabulary")
    facts = [
        f"- {result['answers']:,} answers, {result['answer_tokens']:,} tokens, at most {recipe['max_tokens']} each",
        f"- {result['steps']:,} steps over {result['tokens']:,} tokens in {result['seconds']:,.0f} s "
        f"({result['tok_s']:,.0f} tokens/s) on {result['device']}",
        f"- learning rate {recipe['lr']:g}, {recipe['batch_tokens']:,} tokens a batch, seed {recipe['seed']}",
        f"- {result['parameters']:,} trained parameters",
    ]
    if "as_trained" in result:
        facts.append(
            f"- stored in {recipe['store']}; the table is of the stored weights, before them τ was "
            f"{result['as_trained']:.2f}"
        )
    if vocabulary:
        facts.append(
            f"- draft vocabulary of {vocabulary['size']:,} ids: {vocabulary['coverage']:.1%} of the training answers' "
            f"tokens, {vocabulary['held_coverage']:.1%} of the held-out ones'"
        )
    if result.get("taps"):
        facts.append(f"- features after the target's layers {', '.join(map(str, result['taps']))} (counted from 0)")
    return "\n".join(facts)


# ---------------------------------------------------------------- HTML


def html_report(result: Json) -> str:
    """One page: curves, the numbers behind them, and how the run was made."""
    title = f"A drafter for {result['target']['name']}: {result['kind']}"
    parts = [f"<h1>{escape(title)}</h1>", _summary(result), _loss(result), _tau(result), _alpha(result), _speed(result)]
    facts = result["recipe"] | {"target": result["target"], "data": result["data"], "device": result["device"]}
    return page(title, [*parts, facts_table(facts | result.get("environment", {}))])


def _summary(result: Json) -> str:
    first, last = (result["evaluations"][i]["kinds"][ALL] for i in (0, -1))
    return (
        f"<p>{result['steps']:,} steps over {result['tokens']:,} tokens in {result['seconds']:,.0f} s. Held-out τ went "
        f"from {first['tau']:.2f} to {last['tau']:.2f} tokens per target pass.</p>"
    )


def _loss(result: Json) -> str:
    note = "KL from the target's distribution, averaged over the positions of a draft; each point is a mean."
    axes = Axes("Loss", "step", "divergence from the target")
    return _curve(result, axes, "loss", note, ("step", "loss", "lr", "tokens"))


def _speed(result: Json) -> str:
    axes = Axes("Training speed", "step", "tokens per second since the start")
    return _curve(result, axes, "tok_s", "Evaluations and checkpoints included.", ("step", "tok_s"), 7)


def _curve(result: Json, axes: Axes, name: str, note: str, columns: tuple[str, ...], colour: int = 0) -> str:
    rows = result["losses"]
    series = Series(axes.title.lower(), thinned([(r["step"], r[name]) for r in rows]), colour)
    return figure(axes.title, lines(axes, [series]), note, table(columns, rows))


def _tau(result: Json) -> str:
    every = result["evaluations"]
    kinds = list(every[0]["kinds"])
    rows = [{"step": e["step"], "kind": kind, "tau": e["kinds"][kind]["tau"]} for e in every for kind in kinds]
    series = [Series(k, thinned([(r["step"], r["tau"]) for r in rows if r["kind"] == k])) for k in kinds]
    axes = Axes("Tokens per target pass on held-out answers", "step", "τ", level=1.0)
    return figure(axes.title, lines(axes, series), _legend(kinds), table(("step", "kind", "tau"), rows))


def _alpha(result: Json) -> str:
    every = result["evaluations"]
    shown = {"before": every[0], "half way": every[len(every) // 2], "at the end": every[-1]}
    alphas = {when: e["kinds"][ALL]["alpha_by_position"] for when, e in shown.items()}
    rows = [{"when": when, "position": i, "alpha": alpha} for when in alphas for i, alpha in enumerate(alphas[when], 1)]
    series = [Series(when, [Point(i, alpha) for i, alpha in enumerate(alphas[when], 1)]) for when in alphas]
    axes = Axes("Acceptance by position", "position in the draft", "α, once reached", percent=True)
    return figure(axes.title, lines(axes, series), _legend(list(shown)), table(("when", "position", "alpha"), rows))


def _legend(names: list[str]) -> str:
    colours = ("blue", "orange", "green", "purple", "ochre", "light blue", "violet", "grey")
    return "Lines: " + ", ".join(f"{name} ({colours[i % 8]})" for i, name in enumerate(names)) + "."


def thinned(points: list[tuple[float, float]]) -> list[Point]:
    """At most sixteen points: means over equal shares of a long curve, each at its share's end."""
    if len(points) <= _MOST_POINTS:
        return [Point(x, y) for x, y in points]
    edges = [round(i * len(points) / _MOST_POINTS) for i in range(_MOST_POINTS + 1)]
    shares = [points[a:b] for a, b in pairwise(edges)]
    return [Point(share[-1][0], sum(y for _, y in share) / len(share)) for share in shares]
