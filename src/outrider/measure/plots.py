"""Small plots as inline SVG: whiskers, lines, stacked bars. Numbers in, a string out.

Colours are CSS classes (`s0` … `s7` for series, fates by their own names), so that the page decides them for light and
dark. Every mark has a title for the pointer and the whole figure one for screen readers. It knows no benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 56, 16, 12, 44
WIDTH, HEIGHT = 760, 300
Scale = Callable[[float], float]


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
    colour: int | None = None  # 0 to 7; None: by its place


@dataclass(frozen=True)
class Axes:
    """What stands beside a plot, and a level worth a line of its own."""

    title: str
    x: str
    y: str
    level: float | None = None
    percent: bool = False


def whiskers(axes: Axes, groups: Sequence[str], series: Sequence[Series]) -> str:
    """A dot with its interval for each series in each group; Point.x is the group's number."""
    up = _upwards(axes, series)
    step = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    marks = [_frame(axes, up)]
    for i, name in enumerate(groups):
        marks.append(_label(LEFT + step * (i + 0.5), HEIGHT - BOTTOM + 18, name))
    for n, each in enumerate(series):
        shift = (n - (len(series) - 1) / 2) * min(16.0, step / (len(series) + 1))
        for point in each.points:
            marks.append(
                _whisker(LEFT + step * (point.x + 0.5) + shift, point, up, n, f"{each.name}, {groups[int(point.x)]}")
            )
    return _svg(axes, marks)


def lines(axes: Axes, series: Sequence[Series]) -> str:
    """A line for each series, with whiskers where intervals are known."""
    up = _upwards(axes, series)
    xs = [p.x for s in series for p in s.points] or [0.0]
    low, high = min(xs), max(max(xs), min(xs) + 1)

    def along(x: float) -> float:
        return LEFT + 12 + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT - 24)

    marks = [_frame(axes, up)]
    for x in sorted(set(xs)):
        marks.append(_label(along(x), HEIGHT - BOTTOM + 18, f"{x:g}"))
    for n, each in enumerate(series):
        shade = n if each.colour is None else each.colour
        path = " ".join(f"{along(p.x):.1f},{up(p.y):.1f}" for p in each.points)
        marks.append(f'<polyline class="line s{shade % 8}" points="{path}"/>')
        marks += [_whisker(along(p.x), p, up, shade, f"{each.name}, {axes.x} {p.x:g}") for p in each.points]
    return _svg(axes, marks)


def stacks(axes: Axes, bars: Sequence[tuple[str, dict[str, float]]], words: dict[str, str]) -> str:
    """A horizontal bar per entry, split by class; `words` gives each class its meaning. Shares add up to 1."""
    high, left = 26, 150
    tall = TOP + high * len(bars) + BOTTOM
    marks = []
    for i, (name, shares) in enumerate(bars):
        at, y = float(left), TOP + high * i
        marks.append(f'<text class="label" x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for kind, share in shares.items():
            width = share * (WIDTH - left - RIGHT)
            title = f"<title>{escape(name)}: {share:.0%} {escape(words[kind])}</title>"
            marks.append(
                f'<rect class="{kind}" x="{at:.1f}" y="{y}" width="{width:.1f}" height="{high - 8}">{title}</rect>'
            )
            at += width
    for share in (0, 0.25, 0.5, 0.75, 1):
        marks.append(_label(left + share * (WIDTH - left - RIGHT), tall - BOTTOM + 16, f"{share:.0%}"))
    return _svg(axes, marks, tall)


# ---------------------------------------------------------------- pieces


def _svg(axes: Axes, marks: list[str], tall: int = HEIGHT) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {tall}" role="img" aria-label="{escape(axes.title)}">'
    return "\n".join([head, f"<title>{escape(axes.title)}</title>", *marks, "</svg>"])


def _upwards(axes: Axes, series: Sequence[Series]) -> Scale:
    """Values to heights, from 0 or just below the lowest to just above the highest."""
    values = [v for s in series for p in s.points for v in (p.y, p.low, p.high) if v is not None]
    values += [] if axes.level is None else [axes.level]
    top = 1.0 if axes.percent else max(values, default=1.0) * 1.08 or 1.0
    scale = (HEIGHT - TOP - BOTTOM) / top
    return lambda value: HEIGHT - BOTTOM - value * scale


def _frame(axes: Axes, up: Scale) -> str:
    """Grid lines at round values, both axes' names, and the level."""
    top = (HEIGHT - BOTTOM - TOP) / (up(0) - up(1))
    marks = []
    for value in ticks(top):
        y = up(value)
        text = f"{value:.0%}" if axes.percent else f"{value:g}"
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text class="label" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    if axes.level is not None:
        y = up(axes.level)
        marks.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    marks.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, axes.x))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    marks.append(f'<text class="label" x="14" y="{middle}" text-anchor="middle" {turned}>{escape(axes.y)}</text>')
    return "\n".join(marks)


def ticks(top: float) -> list[float]:
    """A few round numbers from 0 to top."""
    raw = max(top, 1e-12) / 6
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * n for n in (1, 2, 5, 10) if size * n >= raw)
    return [round(i * step, 12) for i in range(int(top / step + 1e-9) + 1)]


def _label(x: float, y: float, text: str) -> str:
    return f'<text class="label" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


def _whisker(x: float, point: Point, up: Scale, n: int, name: str) -> str:
    mark = f'<circle class="dot s{n % 8}" cx="{x:.1f}" cy="{up(point.y):.1f}" r="4"/>'
    span = ""
    if point.low is not None and point.high is not None:
        span = f" ({point.low:.3g} to {point.high:.3g})"
        ends = f'y1="{up(point.low):.1f}" y2="{up(point.high):.1f}"'
        mark = f'<line class="span s{n % 8}" x1="{x:.1f}" x2="{x:.1f}" {ends}/>' + mark
    return f"<g><title>{escape(name)}: {point.y:.3g}{span}</title>{mark}</g>"
