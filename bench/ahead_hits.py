"""Drafting ahead, counted: how often the next draft was ready, by number of forks, in real rounds of the engine.

    python bench/ahead_hits.py [--prompts 16] [--tokens 64] [--k 3] [--temperatures 0,1] [--skip 10,12,14,16,18]

Published results (bench/results/2026-11-15-ahead-hits-NAME.json; NAME and command):

    head     python bench/ahead_hits.py --only head --prompts 10 --tokens 64
    small    python bench/ahead_hits.py --only small --prompts 8 --tokens 64
    reject   python bench/ahead_hits.py --only reject --prompts 6 --tokens 64

For the target's trained head, and for a small model (the target with some layers skipped), `ahead` ranks the same
number of forks at every position in every round. Counted is the rank of the target's own token: after a rejection and
at the end of a draft, with the target's noise in the ranking and without. The first forks of each position are grown
and become the next draft on a hit, as most of 8 forks would; on a miss the next draft is made just in time. The hit
rate of 8 forks, spread by the geometric rule, follows from the counts. `reject` runs the rule of that name with
Saguaro's C from 1 down and 8 forks.

Nothing is timed, so a busy machine does not matter (late rounds are reported). Texts are compared with plain decoding.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider import LLM, SamplingParams
from outrider.drafters.ahead import drafter as ahead_module
from outrider.drafters.ahead.drafter import Ahead
from outrider.drafters.ahead.forks import Forker
from outrider.drafters.ahead.shared_queue import SharedQueue
from outrider.drafters.ahead.statistics import AheadStatistics, MissCurve, fan_out, length_probabilities
from outrider.measure.environment import environment
from outrider.models.prompts import bundled

WIDEST, GROWN = 16, 2  # forks at every position, and how many of them are grown
SHOWN = (1, 2, 3, 4, 6, 8, 12, 16)
USUAL = 8  # forks of a sequence by default
SHARES = (1.0, 0.5, 0.25, 0.0)


class Counting(AheadStatistics):
    """Statistics without decay, with the same number of forks at every position."""

    def __init__(self) -> None:
        super().__init__()
        for curve in (self.inside, self.end):
            curve.DECAY = 1.0

    def forks(self, length: int, many: int) -> list[int]:
        return [many] * (length + 1)


@contextmanager
def sparing() -> Iterator[None]:
    """Within this context only the first forks of every position are grown; the others are only ranked."""
    deepen, find = Forker._deepen, SharedQueue.find

    def first_only(self: Forker, growing: list[Any]) -> None:
        grown: dict[tuple[int, int], int] = defaultdict(int)
        some = []
        for plan, branch in growing:
            grown[plan.lane, branch.accepted] += 1
            if grown[plan.lane, branch.accepted] <= GROWN:
                some.append((plan, branch))
            else:
                branch.chain.append(0)
                branch.survival.append(0.0)
                branch.q.append(None)
        deepen(self, some)

    def found(queue: SharedQueue, outcome: Any) -> tuple[int | None, int | None, int]:
        row, rank, forks = find(queue, outcome)
        return row if rank is not None and rank <= GROWN else None, rank, forks

    Forker._deepen, SharedQueue.find = first_only, found  # type: ignore[method-assign]
    try:
        yield
    finally:
        Forker._deepen, SharedQueue.find = deepen, find  # type: ignore[method-assign]


def run(base: LLM, prompts: list[list[int]], given: argparse.Namespace, temperature: float, **options: Any) -> Any:
    """All prompts, one after the other: the counts, and the number of texts that differ from plain decoding."""
    forks = options.pop("forks", WIDEST)
    llm = base.using(
        drafter="ahead",
        k=given.k,
        ahead_always=True,
        ahead_fallback="",
        ahead_forks=forks,
        ahead_depth=given.k,
        **options,
    )
    drafter: Any = llm.engine.drafter
    assert isinstance(drafter, Ahead)
    if options.get("rule", "match") == "match":
        drafter.statistics = Counting()
    accepted = reached = emitted = steps = differ = 0
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=given.tokens, ignore_eos=True)
        (out,) = llm.generate([prompt], params)
        if options.get("rule", "match") == "match":
            differ += out.token_ids != base.generate([prompt], params)[0].token_ids
        accepted, reached = accepted + out.stats.accepted, reached + out.stats.reached
        emitted, steps = emitted + out.stats.emitted, steps + out.stats.steps
    facts = llm.drafting["ahead"]
    drafter.host.close()
    counted = {"hits_by_outcome": facts["hits_by_outcome"], "late": facts["late"], "deaths": facts["deaths"]}
    counted |= {"differ": differ, "alpha": accepted / max(reached, 1), "tau": emitted / steps, "steps": steps}
    return drafter.statistics, counted | {"hit_rate": facts["hit_rate"], "just_in_time": facts["just_in_time"]}


def figures(statistics: AheadStatistics, counted: dict[str, Any], k: int) -> dict[str, Any]:
    curves = {"end": statistics.end, "rejection": statistics.inside}
    likely = length_probabilities(counted["alpha"], k)
    spread = fan_out(likely, USUAL, statistics.inside.law, statistics.end.law)
    hits = [_hits(statistics.end if i == k else statistics.inside, forks) for i, forks in enumerate(spread)]
    usual = sum(p * hit for p, hit in zip(likely, hits, strict=True))
    return (
        counted
        | {"usual_forks": spread, "usual_hit_rate": round(usual, 4)}
        | {
            name: {
                "hits": dict(zip(range(1, WIDEST + 1), curve.hit_rates(), strict=False)),
                "c": round(curve.law.c, 4),
                "r": round(curve.law.r, 4),
                "outcomes": round(curve.tried[0]),
            }
            for name, curve in curves.items()
        }
    )


def _hits(curve: MissCurve, forks: int) -> float:
    return 1 - curve.rate(forks) if forks else 0.0


def show(name: str, temperature: float, facts: dict[str, Any]) -> None:
    print(
        f"\n{name}, temperature {temperature:g}: α {facts['alpha']:.3f}, τ {facts['tau']:.2f}, {facts['differ']} texts "
        f"differ, {facts['late']} rounds late; with {USUAL} forks {facts['usual_hit_rate']:.0%} {facts['usual_forks']}"
    )
    print(f"{'':12}" + "".join(f"{f:>7}" for f in SHOWN) + "       c      r  outcomes")
    for position in ("end", "rejection"):
        found = facts[position]
        cells = "".join(f"{found['hits'].get(f, float('nan')):7.3f}" for f in SHOWN)
        print(f"{position:12}{cells}  {found['c']:6.3f} {found['r']:6.3f}  {found['outcomes']}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--skip", default="10,12,14,16,18", help="layers that the small model skips")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--only", choices=("head", "small", "reject"))
    return parser.parse_args()


def main() -> None:
    given = parsed()
    ahead_module.MIN_DEADLINE = ahead_module.MAX_DEADLINE = 30.0  # nothing is timed here
    base = LLM(given.model, drafter="off", dtype=given.dtype, device="cpu", threads=1, max_length=1024)
    texts = bundled()[:: max(1, len(bundled()) // given.prompts)][: given.prompts]
    prompts = [base.tokenizer.encode_chat([{"role": "user", "content": p.text}]) for p in texts]
    small = {"draft_model": base.target, "skip_layers": [int(number) for number in given.skip.split(",") if number]}
    ways = {name: options for name, options in {"head": {}, "small": small}.items() if given.only in (None, name)}
    facts: dict[str, Any] = {"bench": "ahead_hits", "command": " ".join(["python", *sys.argv]), "model": base.name}
    facts |= {"dtype": base.dtype, "k": given.k, "skip_layers": small["skip_layers"], "environment": environment()}
    facts["curves"], facts["saguaro"] = [], []
    for name, options in ways.items():
        for temperature in map(float, given.temperatures.split(",")):
            for noise in (True, False) if temperature else (True,):
                with sparing():
                    found = run(base, prompts, given, temperature, ahead_noise=noise, **options)
                counted = figures(*found, given.k)
                show(name if noise else f"{name}, ranked without noise", temperature, counted)
                facts["curves"].append({"drafter": name, "temperature": temperature, "noise": noise} | counted)
    if given.only in (None, "reject"):
        print(f"\nrule reject, the small model, temperature 1, {USUAL} forks")
        for share in SHARES:
            _, counted = run(base, prompts, given, 1.0, rule="reject", ahead_c=share, forks=USUAL, **small)
            print(f"C = {share:<5g} α {counted['alpha']:.3f}, τ {counted['tau']:.2f}, hits {counted['hit_rate']:.1%}")
            facts["saguaro"].append({"c": share} | counted)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
