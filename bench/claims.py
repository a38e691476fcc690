"""The "never slower" claim and the choice of K: plain decoding, `auto`, fixed K, and drafters that are always wrong.

    python bench/claims.py [--prompts FILE.jsonl] [--per-category 2] [--tokens 96] [--rounds 3] [--k 1,2,4,8]

Published result (bench/results/2026-11-15-claims-int8.json):

    python bench/claims.py --prompts spec_bench_question.jsonl --per-category 2 --tokens 96 --rounds 2
                           --k 1,2,3,4,5,6,8,10,12

All contenders run each prompt one after the other, in an order that changes from prompt to prompt, each with fresh
drafters. Times are of whole requests, prefill included; each is the median over the rounds. Speedups are ratios of
total seconds, overall and by category. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from outrider import LLM, Draft, Drafter, SamplingParams, chain
from outrider.backends.machine import cpu_name
from outrider.drafters import DraftRequest
from outrider.models.prompts import Prompt, bundled, from_file
from outrider.types import Sequence


class Wrong(Drafter):
    """Drafts wrong tokens with full confidence."""

    name = "wrong"

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budget = request.seqs, request.budgets
        return Draft.pack(chain([self._other(s)] * k, survival=[0.99] * k) for s, k in zip(seqs, budget, strict=True))

    def _other(self, seq: Sequence) -> int:
        """A token that does not follow: the one before it, shifted."""
        return (seq.tokens[-1] * 7919 + 13) % self.space.target.config.vocab_size


class SlowAndWrong(Wrong):
    """The same, and takes two milliseconds."""

    name = "slow and wrong"

    def draft(self, request: DraftRequest) -> Draft:
        time.sleep(0.002)
        return super().draft(request)


def sample(prompts: list[Prompt], per_category: int) -> list[Prompt]:
    """The first few prompts of each category, in order."""
    seen: dict[str, int] = defaultdict(int)
    kept = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= per_category:
            kept.append(prompt)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", default="1,2,3,4,6,8,12")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    llm = LLM(options.model, drafter="off", dtype=options.dtype)
    contenders: dict[str, dict[str, object]] = {"plain": {"drafter": "off"}, "auto": {"drafter": "auto", "k": "auto"}}
    contenders |= {f"K={k}": {"drafter": "auto", "k": int(k)} for k in options.k.split(",") if k}
    contenders |= {d.name: {"drafter": d, "k": "auto"} for d in (Wrong, SlowAndWrong)}
    prompts = sample(from_file(options.prompts) if options.prompts else bundled(), options.per_category)
    params = SamplingParams(max_tokens=options.tokens)
    seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)  # by contender, category and prompt
    tokens, steps, divergences, order = 0, defaultdict(int), 0, list(contenders)
    dice = random.Random(1)
    llm.using(drafter="auto")  # measures the pass costs once, for all
    for number in range(options.rounds):
        for place, prompt in enumerate(prompts):
            ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])[-1500:]
            dice.shuffle(order)
            texts = {}
            for name in order:
                engine = llm.using(**contenders[name])
                begin = time.perf_counter()
                (out,) = engine.generate([ids], params)
                seconds[name, prompt.category, place].append(time.perf_counter() - begin)
                steps[name] += out.stats.steps
                texts[name] = out.token_ids
            tokens += len(texts["plain"])
            divergences += sum(text != texts["plain"] for text in texts.values())
            print(f"{number + 1} {prompt.category}", file=sys.stderr)

    categories = list(dict.fromkeys(p.category for p in prompts))
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for (name, category, _), each in seconds.items():
        spent[name, category] += statistics.median(each)
    total = {name: sum(spent[name, c] for c in categories) for name in contenders}
    tokens //= options.rounds  # of one round
    rows = []
    print(f"{'':<16}" + "".join(f"{c[:12]:>13}" for c in [*categories, "all"]) + f"{'τ':>7}")
    for name in contenders:
        by = {c: spent["plain", c] / spent[name, c] for c in categories} | {"all": total["plain"] / total[name]}
        tau = options.rounds * tokens / steps[name]
        rows.append({"contender": name, "speedup": by, "tok_s": tokens / total[name], "tau": tau})
        print(f"{name:<16}" + "".join(f"{x:>13.3f}" for x in by.values()) + f"{tau:>7.2f}")
    print(f"{tokens} tokens each, {divergences} divergences, plain {tokens / total['plain']:.1f} tok/s, {llm.dtype}")
    facts = {"bench": "claims", "command": " ".join(["python", *sys.argv]), "model": llm.name, "dtype": llm.dtype}
    print(json.dumps(facts | {"cpu": cpu_name(), "tokens": tokens, "divergences": divergences, "rows": rows}))


if __name__ == "__main__":
    main()
