"""Never slower, on a GPU: whole requests with each drafter against plain decoding, by batch size and kind of text.

Two of the drafters are adversaries: always wrong and sure of it, at once or after a while. Every slot of a batch has a
request of one kind of text; contenders take turns, each with the memory of earlier kinds that a server would have. A
request's text is the same with every contender, so its seconds are compared one by one: a cell is the median over its
requests and rounds. `batch` compares the time until the last one has ended, which is its slowest member's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median
from typing import Any

from gpu_common import Lab, sweep_up
from gpu_race import Run, run, settled
from outrider import LLM, Draft, SamplingParams
from outrider.drafters import Drafter, DraftRequest, Traits
from outrider.measure.bench import EncodedPrompt
from outrider.types import chain

LEAST = 0.98  # of plain decoding


class Wrong(Drafter):
    """Claims to be right 99 times of 100, and never is but by accident."""

    name = "always wrong"
    traits = Traits(dry=True, late=True)
    seconds = 0.0  # of a call

    def draft(self, request: DraftRequest) -> Draft:
        time.sleep(self.seconds)
        return Draft.pack(
            self._chain(seq.tokens, budget) for seq, budget in zip(request.seqs, request.budgets, strict=True)
        )

    def _chain(self, tokens: list[int], budget: int) -> Any:
        vocabulary = self.space.target.config.vocab_size
        guesses = [(7919 * (len(tokens) + i) + tokens[-1] + 1) % vocabulary for i in range(budget)]
        return chain(guesses, [0.99 ** (i + 1) for i in range(budget)], source=self.name)


class WrongAndSlow(Wrong):
    """The same after two milliseconds: half of a pass."""

    name = "wrong and slow"
    seconds = 0.002


def never_section(lab: Lab) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    sizes = [int(b) for b in lab.options.batches.split(",")]
    rounds = [int(r) for r in lab.options.never_rounds.split(",") if r] or [lab.options.rounds] * len(sizes)
    kinds: dict[str, list[EncodedPrompt]] = defaultdict(list)
    for question in lab.questions:
        kinds[question.category].append(question)
    longest = max(len(q.ids) for q in lab.questions) + lab.options.tokens + 96
    engines = {
        name: lab.using(who, batch=max(sizes), tokens=max(sizes) * longest, **more)
        for name, (who, more) in contenders(lab).items()
    }
    with settled():
        for size, count in zip(sizes, rounds, strict=True):
            if not lab.late:
                crowds = {kind: [q.ids for q in lab.crowd(size, of)] for kind, of in kinds.items()}
                cells += one_size(lab, size, count, engines, crowds)
    sweep_up()
    cells.sort(key=lambda each: each["ratio"])
    below = [cell for cell in cells if cell["ratio"] < LEAST]
    lab.table(
        f"Whole requests, × plain: the lowest of {len(cells)} cells; {len(below)} are below {LEAST}",
        ("sequences", "drafter", "kind", "× plain", "batch", "τ", "other texts", "why"),
        [
            (
                str(c["sequences"]),
                c["drafter"],
                c["kind"],
                c["ratio"],
                c["batch"],
                c["tau"],
                c["divergent"],
                c["why"][:60],
            )
            for c in cells[:24]
        ],
    )
    return {"cells": cells, "lowest": cells[0]["ratio"] if cells else None, "below": len(below)}


def contenders(lab: Lab) -> dict[str, tuple[Any, dict[str, Any]]]:
    found: dict[str, tuple[Any, dict[str, Any]]] = {"plain": ("off", {})}
    found |= {name: (name, {}) for name in ("suffix", "ngram", "auto")}
    if lab.options.head:
        found |= {"head": ("head", {}), "auto, head": ("auto", {"head": lab.head})}
    if lab.draft is not None:
        found["model"] = ("model", {})
    found |= {"always wrong": (Wrong, {}), "wrong and slow": (WrongAndSlow, {})}
    wanted = tuple(name for name in lab.options.only.split(",") if name) or ("",)
    return {name: how for name, how in found.items() if name.startswith(("plain", *wanted))}


def one_size(
    lab: Lab, size: int, rounds: int, engines: dict[str, LLM], crowds: dict[str, list[list[int]]]
) -> list[dict[str, Any]]:
    params = SamplingParams(max_tokens=lab.options.tokens)
    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for number in range(rounds):
        for kind, crowd in crowds.items():
            if not lab.late:  # all contenders of a kind, or none
                for name in list(engines) if number % 2 else list(engines)[::-1]:
                    runs[name, kind].append(run(engines[name], crowd, params))
    return [cell(size, name, kind, runs) for name, kind in runs if name != "plain"]


def ends(run: Run) -> list[float]:
    """When each request of a batch ended, in the order of their ids, since all were sent."""
    last: dict[int, float] = {}
    for end, emitted in run.marks:
        last |= dict.fromkeys(emitted, end)
    return [end - run.begin for _, end in sorted(last.items())]


def cell(size: int, name: str, kind: str, runs: dict[tuple[str, str], list[Run]]) -> dict[str, Any]:
    own, plain = runs[name, kind], runs["plain", kind]
    pairs = [pair for r, p in zip(own, plain, strict=False) for pair in zip(ends(p), ends(r), strict=True)]
    steps = sum(s.steps for r in own for s in r.stats)
    return {
        "sequences": size, "drafter": name, "kind": kind, "rounds": len(own),
        "ratio": median(before / after for before, after in pairs),
        "lowest": min(before / after for before, after in pairs),
        "batch": median(r.speed.seconds for r in plain) / median(r.speed.seconds for r in own),
        "tok_s": median(r.speed.tokens / r.speed.seconds for r in own),
        "tau": sum(s.emitted for r in own for s in r.stats) / max(steps, 1),
        "divergent": sum(a != b for r in own for a, b in zip(r.ids, plain[0].ids, strict=True)),
        "why": own[-1].stats[0].why,
    }  # fmt: skip
