"""Early-exit reuse: time of drafting and verifying with the first layers run once (reused), and run twice.

    python bench/exit.py [--model FILE] [--adapter FOLDER | --exit-layer 4 --exit-layer 8] [--k 4] [--tokens 96]

Published results (bench/results/2026-11-15-exit-adapter.json and -exit-adapter-batch8.json):

    python bench/exit.py --adapter exit8 --k 3 --tokens 64
    python bench/exit.py --adapter exit8 --k 3 --tokens 48 --batch 8

Prompts, tokens and drafts are the same; only whether verification reuses the layers that drafting has computed
differs. The two modes alternate round by round, and each goes first equally often. t_verify and t_draft are
milliseconds of the median step. Reuse saves the first layers of every row except the last drafted token: little where
rows are nearly free, more the larger the batch. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from outrider import LLM, SamplingParams
from outrider.measure.environment import environment
from outrider.models.prompts import bundled

MODES = {"reused": True, "again": False}


class Watch:
    """A listener: phases of steps with drafts (of any step in plain decoding), in milliseconds."""

    reads_logits = reads_guesses = False

    def __init__(self) -> None:
        self.draft: list[float] = []
        self.verify: list[float] = []

    def observe(self, step: Any) -> None:
        if all(turn.feed == 1 and turn.whole for turn in step.turns) and len(step.turns) > 0:
            self.draft.append(1000 * step.clock["draft"])
            self.verify.append(1000 * step.clock["verify"])


def run(llm: LLM, texts: list[str], tokens: int) -> tuple[Watch, list[list[int]], float, float]:
    """One batch: steps, texts, τ and tokens per second."""
    watch = Watch()
    llm.engine.listeners = (*llm.engine.listeners[:2], watch)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.forget()
    results = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    emitted, steps = (sum(getattr(r.stats, name) for r in results) for name in ("emitted", "steps"))
    seconds = sum(watch.draft) + sum(watch.verify)
    return watch, [r.token_ids for r in results], emitted / steps, 1000 * emitted / seconds


def compare(base: LLM, options: dict[str, Any], given: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    llms = {mode: base.using(drafter="exit", k=given.k, exit_reuse=reuse, **options) for mode, reuse in MODES.items()}
    llms["plain"] = base.using(drafter="off")
    steps: dict[str, dict[str, list[float]]] = {
        mode: {"draft": [], "verify": [], "tau": [], "tok_s": []} for mode in llms
    }
    expected: dict[str, list[list[int]]] = {}
    for number in range(given.rounds + 1):
        for mode in list(llms)[:: 1 if number % 2 else -1]:
            watch, ids, tau, speed = run(llms[mode], texts, given.tokens)
            assert expected.setdefault("text", ids) == ids, "the text differs"
            if number:  # the first round warms up
                steps[mode]["draft"] += watch.draft
                steps[mode]["verify"] += watch.verify
                steps[mode]["tau"].append(tau)
                steps[mode]["tok_s"].append(speed)
    rows = {mode: {name: statistics.median(values) for name, values in each.items()} for mode, each in steps.items()}
    return options | {"rows": rows, "verify_ratio": rows["reused"]["verify"] / rows["again"]["verify"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--adapter")
    parser.add_argument("--exit-layer", type=int, action="append")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    base = LLM(given.model, dtype=given.dtype, device="cpu", drafter="off", max_batch=given.batch)
    layers = base.target.config.layers
    exits = [{"exit_layer": e} for e in given.exit_layer or (layers // 8, layers // 4, layers // 2)]
    texts = [p.text for p in bundled()[:: max(1, len(bundled()) // given.batch)][: given.batch]]
    results = [
        compare(base, options, given, texts) for options in ([{"adapter": given.adapter}] if given.adapter else exits)
    ]
    print(f"{base.name}, {base.dtype}, {layers} layers, K = {given.k}, {given.batch} sequences; ms of the median step")
    widths = {"exit": 8, "t_draft": 8, "t_verify": 9, "again": 8, "ratio": 6, "tau": 5, "tok/s": 7}
    print(" ".join(f"{name:>{width}}" for name, width in widths.items()), "  again   plain")
    for r in results:
        reused, again, plain = (r["rows"][mode] for mode in ("reused", "again", "plain"))
        times = f"{reused['draft']:8.2f} {reused['verify']:9.2f} {again['verify']:8.2f} {r['verify_ratio']:6.2f}"
        speeds = f"{reused['tau']:5.2f} {reused['tok_s']:7.1f} {again['tok_s']:7.1f} {plain['tok_s']:7.1f}"
        print(f"{r.get('exit_layer', 'adapter')!s:>8} {times} {speeds}")
    facts = {"bench": "exit", "command": " ".join(["python", *sys.argv]), "model": base.name, "dtype": base.dtype}
    facts |= {"k": given.k, "batch": given.batch, "same_text": True}
    print(json.dumps(facts | {"results": results, "environment": environment()}))


if __name__ == "__main__":
    main()
