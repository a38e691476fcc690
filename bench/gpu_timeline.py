"""Rounds on one clock: what the host does, what the device does, and where the device is idle. Numbers and an SVG.

The device's times are those of the events around each round's recordings, the host's are those of its calls: `issue`
plans and starts a round, `wait` waits for the oldest one, `read` is what follows (verdicts, statistics, listeners).
Both clocks start at the same moment, to within the microseconds in which the host sees that an event has happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from gpu_common import Lab, sweep_up
from gpu_loop import KINDS
from gpu_race import forget
from outrider import LLM, SamplingParams
from outrider.measure.plots import ticks

SHOWN = 12  # rounds of a panel
COLOURS = {
    "issue": "#2a78d6", "read": "#8a63c9", "wait": "#e4e2dc", "draft": "#e08a2c", "verify": "#1baf7a", "other": "#777",
    "gap": "#d0342c",
}  # fmt: skip
Span = tuple[str, float, float]  # what, begin, end in seconds


@dataclass
class Round:
    """One round: the host's spans, the device's, and whether every sequence decoded in it."""

    sequences: int
    steady: bool
    host: list[Span] = field(default_factory=list)
    device: list[Span] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)  # phases of the device, until they are read

    @property
    def begin(self) -> float:
        return min(begin for _, begin, _ in self.device)

    @property
    def end(self) -> float:
        return max(end for _, _, end in self.device)


class Lanes:
    """Records the rounds of an engine within this context."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.rounds = engine, list[Round]()
        self._flying: dict[int, Round] = {}  # by the flight's pending round

    def __enter__(self) -> Lanes:
        driver = self.engine.target.rounds.state.driver
        self.origin = driver.event()
        self.origin.record(driver.stream)
        self.origin.synchronize()
        self.zero = time.perf_counter()
        issue, collect = self.engine._issue, self.engine._collect
        self.engine._issue, self.engine._collect = lambda: self._issue(issue), lambda: self._collect(collect)
        return self

    def __exit__(self, *_: object) -> None:
        del self.engine._issue, self.engine._collect  # the class has its own
        for each in self.rounds:
            for phase, start, end, _ in each.events:
                begin, stop = (self.origin.elapsed_time(event) / 1e3 for event in (start, end))
                each.device.append((phase if phase in COLOURS else "other", begin, stop))

    def now(self) -> float:
        return time.perf_counter() - self.zero

    def _issue(self, issue: Callable[[], bool]) -> bool:
        begin = self.now()
        if not issue():
            return False
        flight = self.engine.flights[-1]
        steady = flight.batch is None and all(turn.feed == 1 and turn.whole for turn in flight.turns)
        made = Round(len(flight.turns), steady, [("issue", begin, self.now())])
        made.events = list(getattr(flight.pending, "phases", ()))
        self._flying[id(flight.pending)] = made
        return True

    def _collect(self, collect: Callable[[], Any]) -> Any:
        pending = self.engine.flights[0].pending
        made, wait, begin = self._flying.pop(id(pending)), pending.wait, self.now()
        waited = begin

        def timed() -> Any:
            nonlocal waited
            results = wait()
            waited = self.now()
            return results

        pending.wait = timed
        done = collect()
        made.host += [("wait", begin, waited), ("read", waited, self.now())]
        self.rounds.append(made)
        return done


def timeline_section(lab: Lab) -> dict[str, Any]:
    found, panels = {}, []
    wanted = tuple(name for name in lab.options.only.split(",") if name) or ("plain",)
    for size in (int(b) for b in lab.options.batches.split(",")):
        for name, drafter, k, more in KINDS:
            missing = (drafter == "model" and lab.draft is None) or (drafter == "head" and not lab.options.head)
            if lab.late or missing or not name.startswith(wanted):
                continue
            rounds = steady(lab, size, lab.using(drafter, k, batch=size, tokens=slots(lab, size), **more))
            found[f"{size} {name}"] = figures(rounds)
            panels.append((f"{name}, {size} sequences", rounds[-SHOWN:]))
            sweep_up()
    lab.table(
        "Rounds: medians in ms, and shares of the time",
        ("sequences, drafter", "round", "device", "gap", "gap share", "host busy", "report lies", "rounds"),
        [(name, *(r[key] for key in FIGURES), r["rounds"]) for name, r in found.items()],
    )
    if lab.options.timeline:
        Path(lab.options.timeline).write_text(svg(panels, lab.checkpoint.name), encoding="utf-8")
        found["plot"] = str(lab.options.timeline)
    return found


FIGURES = ("round_ms", "device_ms", "gap_ms", "gap_share", "host_busy", "report_ms")


def slots(lab: Lab, size: int) -> int:
    return size * (max(len(q.ids) for q in lab.crowd(size)) + lab.options.tokens + 160)


def steady(lab: Lab, size: int, llm: LLM) -> list[Round]:
    """Rounds of a second run, after everything is recorded, in which every sequence decodes."""
    if llm.engine.target.rounds is None:
        raise ValueError("rounds run on a GPU only; give --device cuda")
    prompts = [q.ids for q in lab.crowd(size)]
    params = SamplingParams(max_tokens=lab.options.tokens, ignore_eos=True)
    llm.generate(prompts, params)
    forget(llm)
    with Lanes(llm.engine) as lanes:
        llm.generate(prompts, params)
    most = max(each.sequences for each in lanes.rounds)
    kept = [each for each in lanes.rounds if each.steady and each.sequences == most and each.device]
    if len(kept) < SHOWN:
        raise ValueError(f"only {len(kept)} rounds had all {most} sequences decoding; give more --tokens")
    return kept[: 2 * len(kept) // 3 + SHOWN]  # without the last ones, in which texts end


def figures(rounds: list[Round]) -> dict[str, Any]:
    pairs = list(pairwise(rounds))
    gaps = [max(later.begin - before.end, 0.0) for before, later in pairs]
    span, lasts = rounds[-1].end - rounds[0].end, [later.end - before.end for before, later in pairs]
    busy = sum(end - begin for each in rounds[1:] for name, begin, end in each.host if name != "wait")
    device = [sum(end - begin for _, begin, end in each.device) for each in rounds]
    # From the end of a round's kernels to the moment in which the host has its report.
    report = [next(end for name, _, end in each.host if name == "wait") - each.end for each in rounds]
    return {
        "round_ms": 1e3 * median(lasts), "device_ms": 1e3 * median(device), "gap_ms": 1e3 * median(gaps),
        "gap_share": sum(gaps) / span if span else None, "longest_gap_ms": 1e3 * max(gaps),
        "host_busy": busy / span if span else None, "report_ms": 1e3 * median(report), "rounds": len(rounds),
    }  # fmt: skip


# ------------------------------------------------------------ the picture

WIDE, LEFT, PANEL, LANE = 940, 64, 112, 26  # pixels


def svg(panels: list[tuple[str, list[Round]]], title: str) -> str:
    """One panel for each drafter and batch: the host's lane above the device's, as a self-contained SVG."""
    tall = 50 + PANEL * len(panels)
    marks = [f'<text x="{LEFT}" y="18" font-size="13">Rounds of {escape(title)}: host and device on one clock</text>']
    for i, (name, colour) in enumerate(COLOURS.items()):
        marks.append(f'<rect x="{LEFT + 84 * i}" y="26" width="10" height="10" fill="{colour}"/>')
        marks.append(f'<text x="{LEFT + 84 * i + 15}" y="35">{name}</text>')
    for i, (name, rounds) in enumerate(panels):
        marks += panel(name, rounds, 50 + PANEL * i)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {tall}" font-family="sans-serif" '
    ground = f'<rect width="{WIDE}" height="{tall}" fill="#fff"/>'
    return "\n".join([head + 'font-size="11">', f"<title>{escape(title)}</title>", ground, *marks, "</svg>"]) + "\n"


def panel(name: str, rounds: list[Round], top: float) -> list[str]:
    begin = rounds[0].begin
    span = max(rounds[-1].end - begin, 1e-9)
    scale = (WIDE - LEFT - 16) / span
    gaps: list[Span] = [("gap", a.end, b.begin) for a, b in pairwise(rounds) if b.begin > a.end]
    lanes = {"host": [s for each in rounds for s in each.host], "device": [s for each in rounds for s in each.device]}
    lanes["device"] += gaps
    marks = [f'<text x="{LEFT}" y="{top + 12}">{escape(name)}</text>']
    for lane, (label, spans) in enumerate(lanes.items()):
        y = top + 18 + lane * (LANE + 4)
        marks.append(f'<text x="{LEFT - 6}" y="{y + LANE / 2 + 4}" text-anchor="end">{label}</text>')
        for what, start, end in spans:
            left, right = max(start - begin, 0.0) * scale, min(end - begin, span) * scale
            if right > left:
                box = f'x="{LEFT + left:.2f}" y="{y}" width="{right - left:.2f}" height="{LANE}" stroke="#fff"'
                note = f"{what}: {1e3 * (end - start):.3f} ms"
                marks.append(f'<rect {box} stroke-width=".4" fill="{COLOURS[what]}"><title>{note}</title></rect>')
    axis = top + 18 + 2 * (LANE + 4)
    for value in ticks(1e3 * span):
        x = LEFT + value / 1e3 * scale
        marks.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + 18}" y2="{axis}" stroke="#8884"/>')
        marks.append(f'<text x="{x:.1f}" y="{axis + 11}" text-anchor="middle">{value:g} ms</text>')
    return marks
