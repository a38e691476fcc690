"""Small plots as inline SVG: whiskers, lines, bars, stacked bars. Numbers in, a string out.

Colours are CSS classes (`s0` … `s7` for series, fates by their own names), so that the page defines them for light and
dark. Every mark has a title for the pointer and the whole figure one for screen readers. It knows no benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

LEFT, RIGHT, TOP, BOTTOM = 56, 16, 12, 44
WIDTH, HEIGHT = 760, 300
CHARACTER = 6.6  # width of one in a label
Scale = Callable[[float], float]  # a value to pixels from the top


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None  # of y
    high: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: int | None = None  # 0 to 7; None: by its index


@dataclass(frozen=True)
class Axes:
    """Labels, and a level with a dashed line of its own."""

    title: str
    x: str
    y: str
    level: float | None = None
    percent: bool = False


def whiskers(axes: Axes, groups: Sequence[str], series: Sequence[Series]) -> str:
    """A dot with its interval for each series in each group; Point.x is the group's index."""
    y = _scale(axes, series)
    step = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    marks = [_frame(axes, y)]
    line = max(int(step / CHARACTER), 4)  # characters that fit under a group
    for i, name in enumerate(groups):
        for n, part in enumerate(wrap(name, line)[:2]):  # there is room for two lines
            marks.append(_label(LEFT + step * (i + 0.5), HEIGHT - BOTTOM + 18 + 14 * n, part))
    for n, each in enumerate(series):
        shift = (n - (len(series) - 1) / 2) * min(16.0, step / (len(series) + 1))
        for point in each.points:
            x, title = LEFT + step * (point.x + 0.5) + shift, f"{each.name}, {groups[int(point.x)]}"
            marks.append(_whisker(x, point, y, n, title))
    return _svg(axes, marks)


def lines(axes: Axes, series: Sequence[Series]) -> str:
    """A line for each series, with whiskers where intervals are known."""
    y = _scale(axes, series)
    xs = [p.x for s in series for p in s.points] or [0.0]
    low, high = min(xs), max(max(xs), min(xs) + 1)

    def x(value: float) -> float:
        return LEFT + 12 + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT - 24)

    marks = [_frame(axes, y)]
    marks += [_label(x(value), HEIGHT - BOTTOM + 18, f"{value:g}") for value in sorted(set(xs))]
    for n, each in enumerate(series):
        shade = n if each.colour is None else each.colour
        path = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in each.points)
        marks.append(f'<polyline class="line s{shade % 8}" points="{path}"/>')
        marks += [_whisker(x(p.x), p, y, shade, f"{each.name}, {axes.x} {p.x:g}") for p in each.points]
    return _svg(axes, marks)


def bars(axes: Axes, groups: Sequence[str], series: Sequence[Series]) -> str:
    """Horizontal bars with their values, one for each series in each group; Point.x is the group's index.

    The names of series stand above them, in the colours of their bars."""
    bar, gap, above = 13, 9, 30
    left = 16 + math.ceil(CHARACTER * max(len(name) for name in groups))
    each = bar * len(series) + gap
    height, foot = above + each * len(groups) + BOTTOM, above + each * len(groups)
    values = [point.y for part in series for point in part.points] + [axes.level or 0.0]
    scale = (WIDTH - left - 48) / max(values)
    marks, x = list[str](), float(left)
    for n, part in enumerate(series):
        marks.append(f'<rect class="bar s{n}" x="{x:.1f}" y="8" width="10" height="10"/>')
        marks.append(f'<text class="label" x="{x + 15:.1f}" y="17">{escape(part.name)}</text>')
        x += 15 + CHARACTER * len(part.name) + 18
    for value in ticks(max(values)):
        marks.append(_upright("grid", left + value * scale, above, foot))
        marks.append(_label(left + value * scale, foot + 16, f"{value:g}"))
    for i, name in enumerate(groups):
        middle = above + each * i + (each - gap) / 2 + 4
        marks.append(f'<text class="label" x="{left - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>')
    for n, part in enumerate(series):
        for point in part.points:
            y, width = above + each * int(point.x) + bar * n, point.y * scale
            title = f"<title>{escape(part.name)}, {escape(groups[int(point.x)])}: {point.y:.3g}</title>"
            box = f'x="{left}" y="{y}" width="{width:.1f}" height="{bar - 2}"'
            marks.append(f'<rect class="bar s{n}" {box}>{title}</rect>')
            marks.append(f'<text class="value" x="{left + width + 4:.1f}" y="{y + 9}">{point.y:.2f}</text>')
    if axes.level is not None:
        marks.append(_upright("level", left + axes.level * scale, above, foot))
    marks.append(_label((left + WIDTH) / 2, height - 8, axes.x))
    return _svg(axes, marks, height)


def stacks(axes: Axes, bars: Sequence[tuple[str, dict[str, float]]], words: dict[str, str]) -> str:
    """A horizontal bar per entry, split by class; `words` describes each class. Shares add up to 1."""
    bar, left = 26, 16 + math.ceil(CHARACTER * max(len(name) for name, _ in bars))  # wide enough for every name
    height = TOP + bar * len(bars) + BOTTOM
    marks = []
    for i, (name, shares) in enumerate(bars):
        x, y = float(left), TOP + bar * i
        marks.append(f'<text class="label" x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for kind, share in shares.items():
            width = share * (WIDTH - left - RIGHT)
            title = f"<title>{escape(name)}: {share:.0%} {escape(words[kind])}</title>"
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{bar - 8}"'
            marks.append(f'<rect class="{kind}" {box}>{title}</rect>')
            x += width
    for share in (0, 0.25, 0.5, 0.75, 1):
        marks.append(_label(left + share * (WIDTH - left - RIGHT), height - BOTTOM + 16, f"{share:.0%}"))
    return _svg(axes, marks, height)


def ticks(top: float) -> list[float]:
    """A few round numbers from 0 to top."""
    raw = max(top, 1e-12) / 6
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * n for n in (1, 2, 5, 10) if size * n >= raw)
    return [round(i * step, 12) for i in range(int(top / step + 1e-9) + 1)]


def _svg(axes: Axes, marks: list[str], height: int = HEIGHT) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(axes.title)}">'
    return "\n".join([head, f"<title>{escape(axes.title)}</title>", *marks, "</svg>"])


def _scale(axes: Axes, series: Sequence[Series]) -> Scale:
    """From 0 to just above the highest value, or to 100%."""
    values = [v for s in series for p in s.points for v in (p.y, p.low, p.high) if v is not None]
    values += [] if axes.level is None else [axes.level]
    top = 1.0 if axes.percent else max(values, default=1.0) * 1.08 or 1.0
    scale = (HEIGHT - TOP - BOTTOM) / top
    return lambda value: HEIGHT - BOTTOM - value * scale


def _frame(axes: Axes, y: Scale) -> str:
    """Grid lines at round values, the names of both axes, and the level."""
    marks = []
    for value in ticks((HEIGHT - BOTTOM - TOP) / (y(0) - y(1))):
        text = f"{value:.0%}" if axes.percent else f"{value:g}"
        marks.append(_rule("grid", y(value)))
        marks.append(f'<text class="label" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{text}</text>')
    if axes.level is not None:
        marks.append(_rule("level", y(axes.level)))
    marks.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, axes.x))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    marks.append(f'<text class="label" x="14" y="{middle}" text-anchor="middle" {turned}>{escape(axes.y)}</text>')
    return "\n".join(marks)


def _rule(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _upright(kind: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'


def _label(x: float, y: float, text: str) -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


def _whisker(x: float, point: Point, y: Scale, n: int, name: str) -> str:
    mark = f'<circle class="dot s{n % 8}" cx="{x:.1f}" cy="{y(point.y):.1f}" r="4"/>'
    span = ""
    if point.low is not None and point.high is not None:
        span = f" ({point.low:.3g} to {point.high:.3g})"
        ends = f'y1="{y(point.low):.1f}" y2="{y(point.high):.1f}"'
        mark = f'<line class="span s{n % 8}" x1="{x:.1f}" x2="{x:.1f}" {ends}/>' + mark
    return f"<g><title>{escape(name)}: {point.y:.3g}{span}</title>{mark}</g>"
