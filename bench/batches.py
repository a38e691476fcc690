"""Speculation against plain decoding in batches, by processor time, without a server.

    python bench/batches.py [--prompts FILE.jsonl] [--batches 1 2 4 8 16 32 64] [--rounds 3] [--tokens 48]

Published result (bench/results/2026-11-15-batches-smollm2.json):

    python bench/batches.py --prompts spec_bench_question.jsonl --rounds 3 --seed 3 --batches 4 8 16

Two engines of one target, one with a drafter and one without, decode the same prompts side by side: the engine with
fewer tokens makes the next step, so that both see the same machine load. A finished request is replaced by the next
one, as in a server, and the engines are kept from batch size to batch size. Seconds are processor time of this process;
a ratio above 1 means that speculation needs less of it for the same tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.measure.environment import environment
from outrider.models.prompts import bundled, from_file
from outrider.types import Sequence

ENOUGH = 1600  # characters of a prompt: longer ones would measure prefill


class Side:
    """One engine on a round's prompts, at most `slots` at a time."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.seconds, self.tokens, self.steps, self.slots = 0.0, 0, 0, 0
        self.waiting: list[Sequence] = []
        self.seqs: list[Sequence] = []

    def begin(self, prompts: list[list[int]], params: SamplingParams, slots: int) -> None:
        self.seqs = [seq for prompt in prompts for seq in self.llm.prepare(prompt, params)]
        self.waiting, self.slots, self.seconds, self.tokens, self.steps = list(self.seqs), slots, 0.0, 0, 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or self.llm.engine.busy

    def step(self) -> None:
        """Fill the free slots and make one step."""
        engine = self.llm.engine
        begin = time.process_time()
        while self.waiting and len(engine.scheduler.running) + len(engine.scheduler.waiting) < self.slots:
            engine.add(self.waiting.pop(0))
        step = engine.step()
        self.seconds += time.process_time() - begin
        self.steps += 1
        self.tokens += sum(len(verdict.tokens) for verdict in step.verdicts if verdict is not None)


def measure(sides: dict[str, Side], prompts: list[list[int]], params: SamplingParams, slots: int) -> dict[str, Any]:
    for side in sides.values():
        side.begin(prompts, params, slots)
    while busy := [side for side in sides.values() if side.busy]:
        min(busy, key=lambda side: side.tokens).step()
    fast, plain = sides["fast"], sides["plain"]
    stats = [seq.stats for seq in fast.seqs]
    return {
        "batch": slots,
        "ratio": plain.seconds / fast.seconds,
        "tokens": fast.tokens,
        "steps": {name: side.steps for name, side in sides.items()},
        "seconds": {name: round(side.seconds, 4) for name, side in sides.items()},
        "drafted": sum(s.drafted for s in stats),
        "accepted": sum(s.accepted for s in stats),
        "same_text": [s.generated for s in fast.seqs] == [s.generated for s in plain.seqs],
        "why": fast.seqs[-1].stats.why,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=8, help="per round, at least; else two per slot")
    parser.add_argument("--seed", type=int, default=1, help="for the order of prompts")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the drafter")
    plan = parser.parse_args()
    options = dict(pair.split("=", 1) for pair in plan.set)
    most = max(plan.batches)
    llm = LLM(plan.model, drafter=plan.drafter, max_batch=most, max_length=2048, **options)
    sides = {"fast": Side(llm), "plain": Side(llm.using(drafter="off"))}
    texts = [prompt.text for prompt in (from_file(plan.prompts) if plan.prompts else bundled())]
    texts = [text for text in texts if len(text) < ENOUGH]
    random.Random(plan.seed).shuffle(texts)
    ids = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    params, used, rows = SamplingParams(max_tokens=plan.tokens), 0, []
    for number in range(plan.rounds):
        for batch in plan.batches:
            count = max(plan.requests, 2 * batch)
            prompts = [ids[(used + i) % len(ids)] for i in range(count)]
            used += count
            row = measure(sides, prompts, params, batch)
            rows.append(row | {"round": number})
            print(f"{batch:>3} {row['ratio']:.3f}  {row['steps']} drafted {row['drafted']} accepted {row['accepted']} "
                  f"{row['why']}", file=sys.stderr)  # fmt: skip
    print("| batch | ratio by processor time (median) | lowest, highest | accepted of drafted | the same text |")
    print("|---|---|---|---|---|")
    for batch in plan.batches:
        chosen = [row for row in rows if row["batch"] == batch]
        ratios = [row["ratio"] for row in chosen]
        drafted, accepted = (sum(row[name] for row in chosen) for name in ("drafted", "accepted"))
        print(f"| {batch} | {statistics.median(ratios):.3f} | {min(ratios):.3f}, {max(ratios):.3f} "
              f"| {accepted} of {drafted} | {all(row['same_text'] for row in chosen)} |")  # fmt: skip
    facts = {name: str(value) if isinstance(value, Path) else value for name, value in vars(plan).items()}
    print(json.dumps({"rows": rows, "plan": facts, "environment": environment()}))


if __name__ == "__main__":
    main()
