"""A training as one HTML page: its curves, the numbers behind them, and how it was done.

Promise: made from the result's JSON alone; what is not in there is not on the page. It knows no nets.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import Any

from ..measure.plots import Axes, Point, Series, lines
from ..measure.report import facts_table, figure, page, table
from .evaluate import ALL

Json = dict[str, Any]
_POINTS = 16  # of a curve: each has its own label below the plot


def html(result: Json) -> str:
    """The page for what `outrider train` found."""
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
    rows = result["losses"]
    axes = Axes("Loss", "step", "divergence from the target")
    drawn = lines(axes, [Series("loss", thinned([(r["step"], r["loss"]) for r in rows]))])
    note = "KL from the target's distribution, averaged over the positions of a draft; each point is a mean."
    return figure(axes.title, drawn, note, table(("step", "loss", "lr", "tokens"), rows))


def _tau(result: Json) -> str:
    rows = [
        {"step": e["step"], "kind": kind, "tau": found["tau"]}
        for e in result["evaluations"]
        for kind, found in e["kinds"].items()
    ]
    kinds = list(dict.fromkeys(r["kind"] for r in rows))
    series = [Series(k, thinned([(r["step"], r["tau"]) for r in rows if r["kind"] == k])) for k in kinds]
    axes = Axes("Tokens per target pass on held-out answers", "step", "τ", level=1.0)
    return figure(axes.title, lines(axes, series), _legend(kinds), table(("step", "kind", "tau"), rows))


def _alpha(result: Json) -> str:
    every = result["evaluations"]
    shown = {"before": every[0], "half way": every[len(every) // 2], "at the end": every[-1]}
    rows = [
        {"when": when, "position": i + 1, "alpha": alpha}
        for when, e in shown.items()
        for i, alpha in enumerate(e["kinds"][ALL]["alpha_by_position"])
    ]
    series = [
        Series(when, [Point(r["position"], r["alpha"]) for r in rows if r["when"] == when], i)
        for i, when in enumerate(shown)
    ]
    axes = Axes("Acceptance by position", "position in the draft", "α, once reached", percent=True)
    return figure(axes.title, lines(axes, series), _legend(list(shown)), table(("when", "position", "alpha"), rows))


def _speed(result: Json) -> str:
    rows = result["losses"]
    axes = Axes("Training speed", "step", "tokens per second since the start")
    drawn = lines(axes, [Series("speed", thinned([(r["step"], r["tok_s"]) for r in rows]), 7)])
    return figure(axes.title, drawn, "Evaluations and checkpoints included.", table(("step", "tok_s"), rows))


def _legend(names: list[str]) -> str:
    colours = ("blue", "orange", "green", "purple", "ochre", "light blue", "violet", "grey")
    return "Lines: " + ", ".join(f"{name} ({colours[i % 8]})" for i, name in enumerate(names)) + "."


def thinned(points: list[tuple[float, float]]) -> list[Point]:
    """At most sixteen points: means over equal shares of a long curve, each at its share's end."""
    if len(points) <= _POINTS:
        return [Point(x, y) for x, y in points]
    edges = [round(i * len(points) / _POINTS) for i in range(_POINTS + 1)]
    shares = [points[a:b] for a, b in pairwise(edges)]
    return [Point(share[-1][0], sum(y for _, y in share) / len(share)) for share in shares]
