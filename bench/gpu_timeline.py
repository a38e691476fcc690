"""The time of a step: draft, verify, and the gap in which the device is idle. Numbers and an SVG."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gpu_common import Lab
from gpu_race import Heard, Watch, device_seconds
from outrider import LLM, SamplingParams
from outrider.measure.plots import ticks

SKIP, STEPS = 6, 30  # steps until the loop is steady, and how many are shown
COLOURS = {"draft": "#2a78d6", "verify": "#1baf7a", "gap": "#c9c7c1"}


@dataclass(frozen=True)
class Bar:
    """One step: seconds since the end of the step before, and the phases within them."""

    draft: float
    verify: float
    wall: float
    device: bool  # by the device's clock

    @property
    def gap(self) -> float:
        return max(0.0, self.wall - self.draft - self.verify)


def timeline_section(lab: Lab) -> dict[str, Any]:
    drafter = "model" if lab.draft is not None else "suffix"
    llm = lab.using(drafter, lab.options.timeline_k)
    steps = steady(lab, llm)
    bars = [bar(before, step) for before, step in pairwise(steps)][-STEPS:]
    phases = sorted({name for step in steps for name in step.clock})
    found: dict[str, Any] = {
        "drafter": drafter, "k": lab.options.timeline_k, "steps": len(bars),
        "clock": "device" if bars[0].device else "host",
        "median_s": {n: median(getattr(b, n) for b in bars) for n in ("draft", "verify", "gap", "wall")},
        "gap_share": sum(b.gap for b in bars) / sum(b.wall for b in bars),
        "host_median_s": {p: median(s.clock.get(p, 0.0) for s in steps[1:]) for p in phases},
        "emitted_per_step": sum(sum(s.emitted.values()) for s in steps[1:]) / max(1, len(steps) - 1),
        "bars_s": [[b.draft, b.verify, b.gap] for b in bars],
    }  # fmt: skip
    found["busy_s"] = busy(lab, llm)
    if lab.options.timeline:
        title = f"{drafter}, K={lab.options.timeline_k}: {lab.checkpoint.name}, {found['clock']} clock"
        Path(lab.options.timeline).write_text(svg(bars, title), encoding="utf-8")
        found["plot"] = str(lab.options.timeline)
    rows = [(name, seconds * 1e3) for name, seconds in found["median_s"].items()]
    rows += [(f"host: {name}", seconds * 1e3) for name, seconds in found["host_median_s"].items()]
    rows.append(("device busy, by the profiler", None if found["busy_s"] is None else found["busy_s"] * 1e3))
    lab.table(f"A step of {drafter}, K={lab.options.timeline_k}: medians of {len(bars)}, {found['clock']} clock",
              ("", "ms"), rows)  # fmt: skip
    lab.say(f"{found['gap_share']:.1%} of the time is outside draft and verify")
    return found


def steady(lab: Lab, llm: LLM) -> list[Heard]:
    """The steps of a second request, after everything is captured, without its first few."""
    prompt, steps = lab.sample()[0].ids, []
    for _ in range(2):
        with Watch(llm.engine) as watch:
            llm.generate([prompt], long(lab))
        steps = [step for step in watch.steps if step.emitted]
    kept = steps[min(SKIP, len(steps) // 3) : -1]
    if len(kept) < 2:
        raise ValueError(f"the answer was only {len(steps)} steps long; give a larger --length")
    return kept[: STEPS + 1]


def long(lab: Lab) -> SamplingParams:
    """Tokens that are enough for all steps if every draft is accepted."""
    wanted = (SKIP + STEPS + 4) * (lab.options.timeline_k + 1)
    return SamplingParams(max_tokens=max(wanted, lab.options.tokens), ignore_eos=True)


def bar(before: Heard, step: Heard) -> Bar:
    draft, verify = device_seconds(step, "draft"), device_seconds(step, "verify")
    if draft is not None and verify is not None:
        return Bar(draft, verify, step.end - before.end, True)
    return Bar(step.clock.get("draft", 0.0), step.clock.get("verify", 0.0), step.end - before.end, False)


def busy(lab: Lab, llm: LLM) -> float | None:
    """Seconds per step in which the GPU ran anything, by the profiler, independent of the engine's clocks."""
    if lab.device == "cpu":
        return None
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    seen = {"steps": 0}

    def each(n: int) -> None:
        if n == SKIP:
            profiler.start()
        elif SKIP < n <= SKIP + STEPS // 2:
            seen["steps"] += 1
            if n == SKIP + STEPS // 2:
                profiler.stop()

    try:
        with Watch(llm.engine, each):
            llm.generate([lab.sample()[0].ids], long(lab))
        if 0 < seen["steps"] < STEPS // 2:
            profiler.stop()
        cuda = torch.autograd.DeviceType.CUDA
        spans = [e.time_range for e in profiler.events() or [] if e.device_type == cuda]
    except Exception as error:
        lab.say(f"the profiler cannot be used here: {error}")
        return None
    return covered([(s.start, s.end) for s in spans]) / 1e6 / seen["steps"] if spans and seen["steps"] else None


def covered(spans: list[tuple[float, float]]) -> float:
    """Total length of the spans, overlaps counted once."""
    reach, length = float("-inf"), 0.0
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return length


def svg(bars: list[Bar], title: str) -> str:
    """Stacked bars, one per step, as a self-contained SVG."""
    wide, tall, left, top, bottom = 760, 320, 56, 44, 40
    high = max(b.wall for b in bars) * 1e3 * 1.05
    step, scale = (wide - left - 16) / len(bars), (tall - top - bottom) / high
    marks = [f'<text x="{left}" y="18" font-size="13">{escape(title)}</text>']
    for i, (name, colour) in enumerate(COLOURS.items()):
        marks.append(f'<rect x="{left + 90 * i}" y="26" width="10" height="10" fill="{colour}"/>')
        marks.append(f'<text x="{left + 90 * i + 15}" y="35">{name}</text>')
    for value in ticks(high):
        y = tall - bottom - value * scale
        marks.append(f'<line x1="{left}" x2="{wide - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        marks.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for i, b in enumerate(bars):
        y = float(tall - bottom)
        for name, colour in COLOURS.items():
            size = getattr(b, name) * 1e3
            y -= size * scale
            box = f'x="{left + i * step + 1:.1f}" y="{y:.1f}" width="{step - 2:.1f}" height="{size * scale:.1f}"'
            marks.append(f'<rect {box} fill="{colour}"><title>step {i + 1}, {name}: {size:.3f} ms</title></rect>')
    marks.append(f'<text x="{(left + wide) / 2}" y="{tall - 12}" text-anchor="middle">steps of one sequence</text>')
    marks.append(f'<text x="14" y="{tall / 2}" text-anchor="middle" transform="rotate(-90 14 {tall / 2})">ms</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" font-family="sans-serif" font-size="11">'
    )
    ground = f'<rect width="{wide}" height="{tall}" fill="#fff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *marks, "</svg>"]) + "\n"
