"""A trained head: plain decoding, `auto` without the head, the head alone, and the head with the free drafters.

    python bench/heads.py --head DIR [--head DIR …] [--prompts FILE.jsonl] [--per-category 2] [--tokens 96]
                          [--rounds 2] [--temperature 0] [--k auto] [--only NAME,NAME]

Published results (bench/results/2026-11-15-heads-NAME.json; NAME and options after `python bench/heads.py --head
src/outrider/drafters/head/shipped/smollm2-135m-instruct --prompts spec_bench_question.jsonl`):

    int8           --per-category 2 --tokens 128 --rounds 2 --only auto,head,auto+head
    int8-k8-long   --per-category 2 --tokens 384 --rounds 1 --k 8 --only head
    int8-k8-t1     --per-category 2 --tokens 96 --rounds 1 --k 8 --only head --temperature 1

All contenders run each prompt one after the other, in an order that changes from prompt to prompt, each with fresh
drafters. Times are of whole requests, prefill included. Speedups are ratios of total seconds, overall and by category;
τ is emitted tokens per verdict, α accepted ÷ reached, by position. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from claims import sample
from outrider import LLM, SamplingParams
from outrider.backends.machine import cpu_name
from outrider.models.prompts import Prompt, bundled, from_file
from outrider.types import Stats


@dataclass
class Tally:
    """Counts and times of one contender over all prompts."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by category
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reached: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)
    drafted: int = 0

    def add(self, category: str, seconds: float, stats: Stats) -> None:
        self.seconds[category] += seconds
        self.tokens[category] += stats.emitted
        self.steps[category] += stats.steps
        self.drafted += stats.drafted
        for phase, spent in stats.seconds.items():
            self.phases[phase] += spent
        for totals, counts in ((self.reached, stats.reached_at), (self.accepted, stats.accepted_at)):
            totals += [0] * (len(counts) - len(totals))
            for i, count in enumerate(counts):
                totals[i] += count

    def tau(self, category: str | None = None) -> float:
        keys = [category] if category else list(self.tokens)
        return sum(self.tokens[c] for c in keys) / max(sum(self.steps[c] for c in keys), 1)

    def facts(self, plain: Tally) -> dict[str, Any]:
        total, steps = sum(self.seconds.values()), max(sum(self.steps.values()), 1)
        return {
            "speedup": sum(plain.seconds.values()) / total,
            "by_category": {c: plain.seconds[c] / s for c, s in self.seconds.items()},
            "tok_s": sum(self.tokens.values()) / total,
            "tau": self.tau(),
            "tau_by_category": {c: self.tau(c) for c in self.tokens},
            "alpha": sum(self.accepted) / max(sum(self.reached), 1),
            "alpha_by_position": [a / r for a, r in zip(self.accepted, self.reached, strict=True) if r],
            "drafted_per_step": self.drafted / steps,
            "ms_per_step": {phase: 1e3 * spent / steps for phase, spent in self.phases.items()},
        }


def contenders(heads: list[str], k: str) -> dict[str, dict[str, Any]]:
    """The arguments of `LLM.using`, by name of contender."""
    many: dict[str, dict[str, Any]] = {"plain": {"drafter": "off"}, "auto": {"drafter": "auto", "head": "none", "k": k}}
    for head in heads:
        name = f" {Path(head).name}" if len(heads) > 1 else ""
        many[f"head{name}"] = {"drafter": "head", "head": head, "k": k}
        many[f"auto+head{name}"] = {"drafter": "auto", "head": head, "k": k}
        many[f"cascade{name}"] = {"drafter": "cascade", "cascade": "suffix,head", "head": head, "k": k}
    return many


def race(
    llm: LLM, settings: dict[str, dict[str, Any]], prompts: list[Prompt], params: SamplingParams, rounds: int
) -> tuple[dict[str, Tally], int]:
    """Every contender's tally, and the number of texts that differ from plain decoding."""
    tallies, differ, order, dice = {name: Tally() for name in settings}, 0, list(settings), random.Random(1)
    for number in range(rounds):
        for prompt in prompts:
            ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])[-1500:]
            dice.shuffle(order)
            texts = {}
            for name in order:
                engine = llm.using(**settings[name])
                begin = time.perf_counter()
                (out,) = engine.generate([ids], params)
                tallies[name].add(prompt.category, time.perf_counter() - begin, out.stats)
                texts[name] = out.token_ids
            differ += sum(text != texts["plain"] for text in texts.values())
            print(f"{number + 1} {prompt.category}", file=sys.stderr)
    return tallies, differ


def show(facts: dict[str, dict[str, Any]]) -> None:
    categories = list(facts["plain"]["by_category"])
    print(f"{'':<16}" + "".join(f"{c[:12]:>13}" for c in [*categories, "all"]) + f"{'τ':>7}{'α':>6}  α by position")
    for name, row in facts.items():
        ratios = [row["by_category"][c] for c in categories] + [row["speedup"]]
        alphas = " ".join(f"{a:.2f}" for a in row["alpha_by_position"][:8])
        tail = f"{row['tau']:>7.2f}{row['alpha']:>6.2f}  {alphas}"
        print(f"{name:<16}" + "".join(f"{ratio:>13.3f}" for ratio in ratios) + tail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", action="append", required=True, help="the folder of a head; may be repeated")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--k", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", default="", help="contenders to run beside plain, by name")
    options = parser.parse_args()

    llm = LLM(options.model, drafter="off", dtype=options.dtype)
    k = options.k if options.k == "auto" else int(options.k)
    settings = contenders(options.head, k)
    wanted = options.only.split(",") if options.only else list(settings)
    settings = {name: each for name, each in settings.items() if name in ("plain", *wanted)}
    prompts = sample(from_file(options.prompts) if options.prompts else bundled(), options.per_category)
    params = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=1)
    for each in settings.values():  # measures the pass costs and reads every head once
        llm.using(**each)
    tallies, differ = race(llm, settings, prompts, params, options.rounds)
    facts = {name: tally.facts(tallies["plain"]) for name, tally in tallies.items()}
    show(facts)
    tokens = sum(tallies["plain"].tokens.values())
    print(f"{tokens} tokens each, {differ} divergences, plain {facts['plain']['tok_s']:.1f} tok/s, {llm.dtype}")
    where = {"bench": "heads", "command": " ".join(["python", *sys.argv]), "model": llm.name, "dtype": llm.dtype}
    print(json.dumps(where | {"cpu": cpu_name(), "tokens": tokens, "divergences": differ, "contenders": facts}))


if __name__ == "__main__":
    main()
