"""The controller's rules, each cell a whole run in invented time: × plain decoding, and the share of the best fixed K.

    python bench/controller.py [--only head] [--out FILE.json] [--beside EARLIER.json]

The engine and the controller are the real ones; passes and drafts take what a table says
(`tests/support/emulation.py`), so nothing depends on the machine that runs it and two runs give the same figures. A
cell is a machine, a number of sequences, a drafter and texts; it is run with K auto and, unless `--beside` has them
already, with fixed K. `rounds` are cells whose steps are observed one step late and whose drafts are never pruned, as
in a GPU's rounds.

Printed for each group of cells: the mean of × plain (logarithmic), of the share of the best fixed K (plain decoding is
one of them), the lowest cell, and how many are below .98. `--beside` names the cells that differ by more than 2 %. Use
it before and after a change of a rule; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.emulation import MACHINES, OTHERS, AutoWith, Emulation, Nature  # noqa: E402

PROMPT, DIFFERS = 60, 0.02
KS = (1, 2, 4, 8, 16)
STATED = (0.7, 0.5, 0.36, 0.26, 0.19, 0.14)


@dataclass(frozen=True)
class Cell:
    group: str
    machine: str
    batch: int
    drafter: str | Nature | AutoWith
    kind: str = "fresh"  # `echo` repeats a phrase with 3 % of its tokens replaced
    answers: int = 0  # more than run at once
    tokens: int = 160
    rounds: bool = False

    @property
    def name(self) -> str:
        how = f"{self.kind}, {self.tokens} tokens" + (f", {self.answers} answers" if self.answers else "")
        return f"{self.group}: {self.machine}, {self.batch}, {self.drafter}, {how}{', rounds' * self.rounds}"

    @property
    def setting(self) -> tuple[Any, ...]:
        """Of plain decoding beside it."""
        return self.machine, self.batch, self.kind, self.answers, self.tokens


def cells() -> Iterator[Cell]:
    machines, batches = [*MACHINES, *OTHERS], (1, 4, 16, 64)
    for machine in machines:
        late = machine in ("flat", "stairs")  # rounds are a GPU's
        one = (MACHINES | OTHERS)[machine](1, 1)
        reading = {"read": 0.0015 * one}
        for batch in batches:
            for drafter in ("suffix", "ngram", "auto"):
                yield from (Cell("host drafters", machine, batch, drafter, kind) for kind in ("fresh", "echo"))
            for slow in (0.01, 0.5):
                yield Cell("always wrong", machine, batch, Nature(0.0, call=slow * one, claim=0.99))
            for right in (0.0, 0.3, 0.6, 0.8, 0.9, 0.99):
                for depth, sequence in ((0.19, 0.0), (0.06, 0.002)):
                    costs = {"depth": depth * one, "sequence": sequence * one}
                    model = Nature(right, **costs, **reading)
                    yield Cell("draft models", machine, batch, model)
                    yield Cell(
                        "draft models", machine, batch, Nature(right, **costs, **reading, timed=True), rounds=late
                    )
            for right in (0.3, 0.6, 0.8):
                costs = {"call": 0.05 * one, "depth": 0.02 * one}
                head = Nature(right, **costs, claim=right)
                yield Cell("heads", machine, batch, head)
                yield Cell("auto with a head", machine, batch, AutoWith(head))
                stated = Nature(right, **costs, timed=True, stated=STATED)
                yield Cell("stated heads", machine, batch, stated, rounds=late)
            for right in (0.3, 0.99):
                model = Nature(right, depth=0.12 * one, sequence=0.004 * one, **reading)
                yield Cell("auto with a draft model", machine, batch, AutoWith(model))
        for right in (0.3, 0.7):
            for tokens, answers in ((24, 16), (64, 8)):
                model = Nature(right, depth=0.19 * one, **reading)
                yield Cell("short answers", machine, 1, model, answers=answers, tokens=tokens)
                head = Nature(right, call=0.05 * one, depth=0.02 * one, claim=right)
                yield Cell("short answers", machine, 1, AutoWith(head), answers=answers, tokens=tokens)
    for easy in (0.1, 0.45, 0.7):
        costs = {"call": 0.25e-3, "depth": 0.35e-3, "read": 0.09e-3}
        head = Nature(
            0.0, **costs, claim=0.5, self_limiting=True, easy=easy, late=True, stated=(0.65, 0.44, 0.31, 0.22)
        )
        for drafter in (head, AutoWith(head)):
            for answers in (1, 12):
                yield Cell("a head on a CPU", "avx2", 1, drafter, answers=answers, tokens=128)
        wrong = replace(head, easy=None, claim=easy)  # its claims and what is stated of it are lies
        for answers in (1, 12):
            yield Cell("a lying head", "avx2", 1, AutoWith(wrong), answers=answers, tokens=128)


@cache
def texts(kind: str, count: int, length: int) -> list[list[int]]:
    dice = random.Random(count)
    if kind == "fresh":
        return [[dice.randrange(40_000) for _ in range(length)] for _ in range(count)]
    made = []
    for _ in range(count):
        phrase = [dice.randrange(40_000) for _ in range(40)]
        whole = phrase * (length // len(phrase) + 1)
        made.append([t if dice.random() < 0.97 else dice.randrange(40_000) for t in whole[:length]])
    return made


def seconds(cell: Cell, k: int | None, drafter: str | None = None) -> float:
    some = texts(cell.kind, max(cell.batch, cell.answers), PROMPT + cell.tokens)
    made = Emulation(cell.machine, drafter or cell.drafter, some, [PROMPT] * len(some), k, cell.batch)
    if cell.rounds and k is None:
        as_in_rounds(made)
    return made.seconds()


def as_in_rounds(made: Emulation) -> None:
    """Steps are observed one step late, and what was drafted is verified."""
    controller: Any = made.engine.controller
    observe, late = controller.observe, list[Any]()

    def later(step: Any) -> None:
        late.append(step)
        if len(late) > 1:
            observe(late.pop(0))

    controller.observe, controller.prune = later, lambda turns, draft: draft


def measured(job: tuple[Cell, int | None, str | None]) -> float:
    return seconds(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="groups whose name contains this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--beside", type=Path, help="an earlier result of this script")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    chosen = [cell for cell in cells() if options.only in cell.group]
    known = json.loads(options.beside.read_text())["cells"] if options.beside else {}
    missing = [cell for cell in chosen if cell.name not in known]
    fixed = [(cell, k, None) for cell in missing for k in KS]
    settings = {cell.setting: cell for cell in missing}
    plain = [(cell, 0, "off") for cell in settings.values()]
    jobs: list[tuple[Cell, int | None, str | None]] = [(cell, None, None) for cell in chosen]
    jobs += fixed + plain
    with ProcessPoolExecutor(options.workers) as pool:
        taken = dict(zip([(job[0].name, job[1]) for job in jobs], pool.map(measured, jobs, chunksize=4), strict=True))
    plain_of = {cell.setting: taken[cell.name, 0] for cell, _, _ in plain}
    found = dict[str, dict[str, float]]()
    for cell in chosen:
        then = known.get(cell.name)
        plain_seconds = then["plain"] if then else plain_of[cell.setting]
        best = then["best"] if then else min(plain_seconds, *(taken[cell.name, k] for k in KS))
        auto = taken[cell.name, None]
        found[cell.name] = {"plain": plain_seconds, "best": best, "auto": auto}
    show(found)
    if known:
        differ(found, known)
    version = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE)
    result = {"bench": "controller", "version": version.stdout.strip(), "summary": summary(found.values())}
    if options.out:
        options.out.write_text(json.dumps(result | {"cells": found}) + "\n")
    print(json.dumps(result | {"command": " ".join(["python", *sys.argv])}))


def summary(some: Any) -> dict[str, float]:
    ratios = [each["plain"] / each["auto"] for each in some]
    shares = [each["best"] / each["auto"] for each in some]
    return {
        "cells": len(ratios),
        "mean": round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4),
        "share": round(math.exp(sum(map(math.log, shares)) / len(shares)), 4),
        "lowest": round(min(ratios), 4),
        "lowest_share": round(min(shares), 4),
        "below_98": sum(ratio < 0.98 for ratio in ratios),
    }


def show(found: dict[str, dict[str, float]]) -> None:
    groups = defaultdict[str, list[dict[str, float]]](list)
    for name, cell in found.items():
        groups[name.partition(":")[0]].append(cell)
    print(f"{'':26} cells   × plain   of the best K   lowest   lowest share   below .98")
    for name, some in [*groups.items(), ("all", list(found.values()))]:
        s = summary(some)
        print(
            f"{name:26} {s['cells']:5.0f} {s['mean']:9.4f} {s['share']:15.4f} {s['lowest']:8.3f} "
            f"{s['lowest_share']:14.3f} {s['below_98']:11.0f}"
        )


def differ(found: dict[str, dict[str, float]], known: dict[str, dict[str, float]]) -> None:
    changes = [(known[name]["auto"] / cell["auto"], name) for name, cell in found.items() if name in known]
    for ratio, name in sorted(changes):
        if abs(math.log(ratio)) > DIFFERS:
            cell = found[name]
            print(f"{ratio:.3f} × as fast: {cell['plain'] / cell['auto']:.3f} × plain, {name}")


if __name__ == "__main__":
    main()
