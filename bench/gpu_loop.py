"""The loop itself: seconds of a round by the wall's clock against those of its kernels, by batch size and drafter.

A ratio of 1 means that the host is never waited for. Rounds in which prompts are read or sequences end are left out.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

from gpu_common import Lab, sweep_up
from gpu_race import Run, run
from outrider import SamplingParams

TREE = {"tree": True, "tree_width": 5, "tree_depth": 6}
KINDS: list[tuple[str, str, int | str, dict[str, Any]]] = [
    ("plain", "off", 0, {}), ("ngram K=4", "ngram", 4, {}), ("auto", "auto", "auto", {}),
    ("model K=8", "model", 8, {}), ("model auto", "model", "auto", {}),
    ("head K=6", "head", 6, {"tree": False}), ("head tree of 24", "head", 24, TREE), ("head auto", "head", "auto", {}),
]  # fmt: skip


def loop_section(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    wanted = tuple(name for name in lab.options.only.split(",") if name) or ("",)
    for size in (int(b) for b in lab.options.batches.split(",")):
        for name, drafter, k, more in KINDS:
            missing = (drafter == "model" and lab.draft is None) or (drafter == "head" and not lab.options.head)
            if lab.late or missing or not name.startswith(("plain", *wanted)):
                continue
            found[f"{size} {name}"] = measure(lab, size, drafter, k, more)
            sweep_up()
    lab.table(
        "A round by the wall's clock and by the device's, ms",
        ("sequences, drafter", "tok/s", "wall", "device", "wall / device", "τ", "rounds"),
        [
            (name, r["tok_s"], r["wall_ms"], r["device_ms"], r["ratio"], r["tau"], r["rounds"])
            for name, r in found.items()
        ],
    )
    return found


def measure(lab: Lab, size: int, drafter: str, k: int | str, more: dict[str, Any]) -> dict[str, Any]:
    prompts = [q.ids for q in lab.crowd(size)]
    params = SamplingParams(max_tokens=lab.options.tokens, ignore_eos=True)
    slots = size * (max(map(len, prompts)) + lab.options.tokens + 160)
    llm = lab.using(drafter, k, batch=size, tokens=slots, **more)
    run(llm, prompts, params)  # records the graphs
    return figures(run(llm, prompts, params), size)


def figures(done: Run, size: int) -> dict[str, Any]:
    """Medians over the rounds in which every sequence decodes."""
    most = max(len(step.emitted) for step in done.steps)
    full = [i for i, step in enumerate(done.steps) if len(step.emitted) >= 0.9 * most]
    walls, devices, emitted = [], [], 0
    for before, i in pairwise(full):
        step = done.steps[i]
        if before + 1 == i and "read" not in step.device and "record" not in step.device:
            walls.append(step.end - done.steps[before].end)
            devices.append(sum(step.device.get(phase, 0.0) for phase in ("draft", "verify")))
            emitted += sum(step.emitted.values())
    if not walls:
        return {"tok_s": None, "wall_ms": None, "device_ms": None, "ratio": None, "tau": None, "rounds": 0}
    wall, device = median(walls), median(devices)
    found = {"tok_s": emitted / sum(walls), "wall_ms": wall * 1e3, "device_ms": device * 1e3}
    found |= {"ratio": sum(walls) / sum(devices), "median_ratio": wall / device}
    return found | {"tau": emitted / most / len(walls), "rounds": len(walls), "sequences": most}
