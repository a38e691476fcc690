"""A benchmark as one HTML page: plots, the numbers behind them, where and how they were measured.

The page is self-contained (no script, font, style or picture from elsewhere), follows the reader's light or dark
setting, and has every plot as a table too. It is made from the JSON of `outrider bench` alone. `page`, `figure`,
`table` and `facts_table` serve other reports too.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..types import ACCEPTED, BONUS, PRUNED, REJECTED, UNREACHED
from .plots import Axes, Point, Series, lines, stacks, whiskers
from .statistics import ALL

Json = dict[str, Any]
NEUTRAL = 7  # the colour of series that belong to no drafter
WORDS = {
    ACCEPTED: "accepted from the draft",
    BONUS: "the target's own",
    REJECTED: "rejected draft",
    UNREACHED: "never reached",
    PRUNED: "pruned",
}
_FATES = {"accepted": WORDS[ACCEPTED], "rejected": WORDS[REJECTED], "unreached": WORDS[UNREACHED]}

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --paper: #ffffff; --rule: #d8dee4; --level: #8a5a00;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b0559a; --c4: #a07a00; --c5: #3d8fc6; --c6: #6b4fb3;
  --c7: #555555; --accepted: #1a7f37; --rejected: #cf222e; --unreached: #9aa3ab; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa7b3; --paper: #10151b; --rule: #2d3640;
  --level: #e3b341; --c0: #58b0e8; --c1: #f2995c; --c2: #3fcf9e; --c3: #dd8fc9; --c4: #e0bd45; --c5: #8ccbf2;
  --c6: #ad97ea; --c7: #b8b8b8; --accepted: #3fb950; --rejected: #f85149; --unreached: #6e7781; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 52rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 0 0 .3rem; } figcaption { color: var(--soft); }
figure { margin: 2rem 0; } figcaption { font-size: .92rem; } svg { width: 100%; height: auto; }
.label { font: 12px system-ui, sans-serif; fill: var(--soft); } .grid { stroke: var(--rule); }
.level { stroke: var(--level); stroke-dasharray: 5 4; stroke-width: 1.5; } .line { fill: none; stroke-width: 2; }
.span { stroke-width: 2; } .dot { stroke: none; }
rect.accepted { fill: var(--accepted); } rect.rejected { fill: var(--rejected); }
rect.unreached { fill: var(--unreached); }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; margin: .6rem 0; }
ul.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .4em; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td:first-child, th.word, td.word { text-align: left; } .wide { overflow-x: auto; }
code { overflow-wrap: anywhere; } .bad { color: var(--rejected); font-weight: 600; }
"""


def _colours() -> str:
    """The same colour for a series as a line, as a dot and in the legend."""
    rules = [
        f".line.s{i}, .span.s{i} {{ stroke: var(--c{i}); }} .dot.s{i} {{ fill: var(--c{i}); }}"
        f" i.s{i} {{ background: var(--c{i}); }}"
        for i in range(8)
    ]
    return "\n".join(rules + [f"i.{kind} {{ background: var(--{kind}); }}" for kind in _FATES])


def html(result: Json) -> str:
    """The page for the result of `outrider bench --json`."""
    title = f"Outrider: {result['model']}, {result['dtype']}"
    parts = (_divergences, _legend, _speedups, _positions, _fates, _sweep, _costs, _provenance)
    return page(title, [f"<h1>{escape(title)}</h1>", *(part(result) for part in parts)])


# ---------------------------------------------------------------- the parts of the page


def _divergences(result: Json) -> str:
    count = len(result["divergences"])
    if not count:
        return f"<p>{result['compared_tokens']} tokens compared: speculative and plain text are identical.</p>"
    return f'<p class="bad">{count} answers differ from plain decoding. Run <code>outrider verify</code>.</p>'


def _legend(result: Json) -> str:
    """The one legend: drafters and fates keep their colours on the whole page."""
    items = [f'<li><i class="s{i % 8}"></i>{escape(name)}</li>' for i, name in enumerate(_names(result))]
    items += [f'<li><i class="{kind}"></i>{escape(word)}</li>' for kind, word in _FATES.items()]
    return f'<ul class="legend" aria-label="Legend">{"".join(items)}</ul>'


def _speedups(result: Json) -> str:
    rows = result["rows"]
    groups = list(dict.fromkeys(row["category"] for row in rows))
    groups.sort(key=lambda name: name == ALL)
    series = [
        Series(name, [_point(groups.index(r["category"]), r) for r in rows if _name(r) == name and r["speedup"]])
        for name in _names(result)
    ]
    axes = Axes("Speedup over plain decoding by kind of text", "", "times plain speed", level=1.0)
    columns = "drafter k category tokens tok_s plain_tok_s speedup ci_low ci_high speedup_total speedup_without_loops"
    columns += " loops tau alpha"
    note = "Dots: medians over rounds, summed over prompts. Bars: 95% bootstrap intervals. Dashed: plain decoding."
    return figure(axes.title, whiskers(axes, groups, series), note, table(columns.split(), rows))


def _positions(result: Json) -> str:
    """α at each depth of the draft."""
    rows = {_name(r): r for r in result["rows"] if r["category"] == ALL and r["alpha_by_position"]}
    if not rows:
        return ""
    alphas = {name: rows[name]["alpha_by_position"] if name in rows else [] for name in _names(result)}
    series = [Series(name, [Point(i, alpha) for i, alpha in enumerate(alphas[name], 1)]) for name in alphas]
    axes = Axes("Acceptance by position", "position in the draft", "α, once reached", percent=True)
    listed = [{"drafter": s.name, "position": int(p.x), "alpha": p.y} for s in series for p in s.points]
    note = "How often the target agrees with a drafted token that it reaches."
    return figure(axes.title, lines(axes, series), note, table(("drafter", "position", "alpha"), listed))


def _fates(result: Json) -> str:
    listed = []
    for r in result["rows"]:
        if r["drafted"]:
            counts = (r["accepted"], r["reached"] - r["accepted"], r["drafted"] - r["reached"])
            shares = {kind: count / r["drafted"] for kind, count in zip(_FATES, counts, strict=True)}
            listed.append({"drafter": _name(r), "category": r["category"], "drafted": r["drafted"]} | shares)
    if not listed:
        return ""
    bars = [(f"{r['category']}, {r['drafter']}", {kind: r[kind] for kind in _FATES}) for r in listed]
    axes = Axes("Fates of drafted tokens", "", "")
    columns = ("drafter", "category", "drafted", *_FATES)
    return figure(axes.title, stacks(axes, bars, _FATES), "Shares of all drafted tokens.", table(columns, listed))


def _sweep(result: Json) -> str:
    swept = [r for r in result.get("sweep") or [] if r["speedup"]]
    rows = [r for r in swept if r["k"] != "auto"]
    if not rows:
        return ""
    names = list(dict.fromkeys(r["drafter"] for r in rows))
    series = [Series(name, [_point(float(r["k"]), r) for r in rows if r["drafter"] == name]) for name in names]
    axes = Axes("Speedup against K", "K, drafted tokens per step", "times plain speed", level=1.0)
    knee = result.get("knee")
    note = f"Fastest at K = {knee['best_k']}; K = {knee['enough_k']} loses at most 2% against it." if knee else ""
    note += "".join(f" With K auto it is {r['speedup']:.2f}." for r in swept if r["k"] == "auto")
    columns = ("drafter", "k", "speedup", "ci_low", "ci_high", "tau", "alpha")
    return figure(axes.title, lines(axes, series), note, table(columns, swept))


def _costs(result: Json) -> str:
    costs = sorted((int(rows), seconds) for rows, seconds in result["costs"].items())
    listed = [{"rows": n, "ms": 1000 * s, "times one row": s / costs[0][1]} for n, s in costs]
    axes = Axes("Cost of a target pass", "rows in the pass", "milliseconds")
    drawn = lines(axes, [Series("target", [Point(r["rows"], r["ms"]) for r in listed], NEUTRAL)])
    note = "A draft of K tokens is verified by a pass over K + 1 rows: the flatter this line, the more it pays."
    return figure(axes.title, drawn, note, table(("rows", "ms", "times one row"), listed))


def _provenance(result: Json) -> str:
    names = ("command", "baseline", "tokens", "rounds", "temperature", "seed", "seconds")
    return facts_table({name: result[name] for name in names} | result["environment"])


def _point(x: float, row: Json) -> Point:
    return Point(x, row["speedup"], row["ci_low"], row["ci_high"])


_TITLES = {
    "category": "text", "k": "K", "tok_s": "tokens/s", "plain_tok_s": "plain", "speedup": "decoding ×",
    "ci_low": "95% from", "ci_high": "to", "speedup_total": "request ×", "speedup_without_loops": "without loops ×",
    "loops": "looping answers", "tau": "τ", "alpha": "α", "isa_cap": "oneDNN capped at", "omp": "OpenMP settings",
    "cuda": "CUDA", "gpus": "GPUs", "no_gpu": "why no GPU", "auto_device": "default device", "amx": "AMX",
    "tokens": "tokens of an answer, at most", "ms": "milliseconds",
}  # fmt: skip  # names of JSON fields for readers


def _name(row: Json) -> str:
    return f"{row['drafter']}, K {row['k']}"


def _names(result: Json) -> list[str]:
    return list(dict.fromkeys(_name(row) for row in result["rows"]))


# ---------------------------------------------------------------- pieces of any report


def page(title: str, parts: list[str]) -> str:
    """HTML parts as one self-contained page; empty ones are left out."""
    head = f'<meta charset="utf-8"/><meta name="viewport" content="width=device-width"/><title>{escape(title)}</title>'
    head += f"<style>{_STYLE}{_colours()}</style>"
    body = "\n".join(part for part in parts if part)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def figure(title: str, svg: str, note: str, numbers: str) -> str:
    """A plot with a caption, and its numbers as a table that opens."""
    numbers = f'<details><summary>The numbers</summary><div class="wide">{numbers}</div></details>'
    return f"<figure><h2>{escape(title)}</h2>{svg}<figcaption>{escape(note)}</figcaption>{numbers}</figure>"


def table(columns: Sequence[str], rows: list[Json]) -> str:
    """Rows by column names."""
    head = "".join(f'<th scope="col">{escape(_TITLES.get(c, c))}</th>' for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_cell(row[c]))}</td>" for c in columns) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts_table(facts: Json) -> str:
    """Names and values, one under the other."""
    cells = "".join(
        f'<tr><th scope="row" class="word">{escape(_TITLES.get(name, str(name)))}</th>'
        f'<td class="word"><code>{escape(_text(value))}</code></td></tr>'
        for name, value in facts.items()
    )
    return f'<section><h2>Where and how</h2><div class="wide"><table>{cells}</table></div></section>'


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _text(value: Any) -> str:
    """A value as text; a dash for none."""
    if value is None or value in ({}, [], ""):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return "; ".join(map(_text, value)) if isinstance(value, list | tuple) else _cell(value)
