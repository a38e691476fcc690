"""A few steps of drafting ahead as an SVG timeline: the target's passes, and drafting that was hidden or waited for."""

from __future__ import annotations

from html import escape
from itertools import pairwise

from ahead_watch import StepTimes

SHOWN = 6  # steps
COLOURS = {
    "the target's pass": "#1baf7a",
    "drafting, hidden": "#2a78d6",
    "drafting, waited for": "#e07b39",
    "just in time": "#b04a9d",
    "the host": "#c9c7c1",
}
LANES = ("target", "drafter", "engine")
Piece = tuple[int, float, float, str, str]  # lane, begin, end, kind, title


def svg(steps: list[StepTimes], title: str) -> str:
    """Three lanes (target, drafter, engine thread) against milliseconds."""
    shown = window(steps)
    if len(shown) < 2:
        return '<svg xmlns="http://www.w3.org/2000/svg"/>\n'
    zero, end = shown[0].passing[0], shown[-1].passing[0]
    parts = [piece for before, step in pairwise(shown) for piece in pieces(before, step)]
    wide, left, top, tall = 900, 64, 56, 34
    scale = (wide - left - 16) / (end - zero)
    marks = [f'<text x="{left}" y="18" font-size="13">{escape(title)}</text>']
    for i, (kind, colour) in enumerate(COLOURS.items()):
        marks.append(f'<rect x="{left + 150 * i}" y="28" width="10" height="10" fill="{colour}"/>')
        marks.append(f'<text x="{left + 150 * i + 15}" y="37">{kind}</text>')
    for lane, name in enumerate(LANES):
        marks.append(f'<text x="{left - 8}" y="{top + lane * tall + 18}" text-anchor="end">{name}</text>')
    for lane, begin, stop, kind, tip in parts:
        begin, stop = max(begin, zero), min(stop, end)
        if stop > begin:
            box = f'x="{left + (begin - zero) * scale:.1f}" width="{max((stop - begin) * scale - 0.5, 0.5):.1f}"'
            box += f' y="{top + lane * tall + 4}" height="{tall - 10}" fill="{COLOURS[kind]}"'
            marks.append(f"<rect {box}><title>{tip}: {1e3 * (stop - begin):.2f} ms</title></rect>")
    foot, milliseconds = top + len(LANES) * tall, 1e3 * (end - zero)
    marks.append(f'<text x="{left}" y="{foot + 14}">0</text>')
    marks.append(f'<text x="{wide - 16}" y="{foot + 14}" text-anchor="end">{milliseconds:.1f} ms</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {foot + 24}" font-family="sans-serif" '
        f'font-size="11"><rect width="{wide}" height="{foot + 24}" fill="#fff"/>'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *marks, "</svg>"]) + "\n"


def window(steps: list[StepTimes]) -> list[StepTimes]:
    """Consecutive decoding steps from the middle of the run, with a drafting round in each if possible."""
    runs = [steps[i : i + SHOWN + 1] for i in range(len(steps) - SHOWN)]
    runs = [run for run in runs if all(step.decoding for step in run)]
    full = [run for run in runs if all(step.rounds for step in run[1:])] or runs
    return full[len(full) // 2] if full else []


def pieces(before: StepTimes, step: StepTimes) -> list[Piece]:
    """From the launch of one pass to the launch of the next."""
    verdict = before.passing[1]
    found: list[Piece] = [(0, *before.passing, "the target's pass", f"a pass over {before.drafted + 1} rows")]
    found.append((2, verdict, step.passing[0], "the host", "verdict, bookkeeping, launch"))
    for r in step.rounds:
        names = ["the first pass", *(f"depth {i}" for i in range(1, len(r.times)))]
        for name, begin, end in zip(names, r.times, r.times[1:], strict=False):
            if r.just_in_time:
                found.append((1, begin, end, "just in time", name))
            else:
                found.append((1, begin, min(end, r.waited[0]), "drafting, hidden", name))
                found.append((1, max(begin, r.waited[0]), end, "drafting, waited for", name))
        found.append((2, *r.waited, "just in time" if r.just_in_time else "drafting, waited for", "waiting"))
    return found
