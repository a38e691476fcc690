"""A target with a draft model, with equal or different tokenizers, against plain decoding of the same target.

    python bench/pairs.py TARGET DRAFT [--prompts HumanEval.jsonl] [--limit 10] [--tokens 64] [--k 4,auto]
                          [--way tli --way slem] [--temperature 0] [--rounds 1] [--chat]

Published results (bench/results/2026-11-15-pairs-NAME.json; NAME and command):

    qwen1.5b-smollm2        python bench/pairs.py qwen.gguf SmolLM2-135M-Instruct.Q4_1.gguf --prompts HumanEval.jsonl
                            --limit 10 --tokens 64 --k 5 --way tli --way slem --dtype int8 --draft-dtype int8
    tinyllama-stories15m    python bench/pairs.py tinyllama.gguf stories15M --prompts stories.jsonl --limit 6
                            --tokens 64 --k 2,4 --dtype int8 --draft-dtype float32

Every prompt goes to all contenders in turn, in an order that changes from prompt to prompt, and nothing is remembered
between requests. Times are of whole requests, prefill included: wall time, and CPU time of this process, which is
steadier on a busy machine. Speedups are ratios of sums; `spread` is the lowest, median and highest ratio of single
prompts. `--way` has no effect where the tokenizers are the same. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.backends.machine import cpu_name
from outrider.models.prompts import bundled, from_file


@dataclass
class Contender:
    """One decoding method and its times."""

    llm: LLM
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("reached", "accepted", "emitted", "steps"), 0)
    )
    texts: list[list[int]] = field(default_factory=list)
    drafting: float = 0.0

    def run(self, ids: list[int], params: SamplingParams) -> None:
        self.llm.forget()
        if (translated := getattr(self.llm.engine.drafter, "translated", None)) is not None:
            translated.cache.drop_retired()
        clock, cpu = time.perf_counter(), time.process_time()
        (out,) = self.llm.generate([ids], params)
        self.seconds.append(time.perf_counter() - clock)
        self.cpu.append(time.process_time() - cpu)
        self.texts.append(out.token_ids)
        self.drafting += out.stats.seconds.get("draft", 0.0)
        for name in self.counts:
            self.counts[name] += getattr(out.stats, name)

    def row(self, plain: Contender) -> dict[str, Any]:
        c, tokens = self.counts, sum(map(len, self.texts))
        return {
            "alpha": c["accepted"] / c["reached"] if c["reached"] else None,
            "tau": c["emitted"] / c["steps"],
            "speedup": sum(plain.seconds) / sum(self.seconds),
            "spread": spread(plain.seconds, self.seconds),
            "cpu_speedup": sum(plain.cpu) / sum(self.cpu),
            "cpu_spread": spread(plain.cpu, self.cpu),
            "tok_s": tokens / sum(self.seconds),
            "drafting_share": self.drafting / sum(self.seconds),
            "identical": sum(a == b for a, b in zip(self.texts, plain.texts, strict=True)),
            "drafting": self.llm.drafting,
        }


def spread(plain: list[float], own: list[float]) -> list[float]:
    """The lowest, median and highest ratio."""
    ratios = [a / b for a, b in zip(plain, own, strict=True)]
    return [round(f(ratios), 3) for f in (min, statistics.median, max)]


def prompt_ids(llm: LLM, options: argparse.Namespace) -> list[list[int]]:
    prompts = from_file(options.prompts) if options.prompts else bundled()
    texts = [prompt.text for prompt in prompts[: options.limit]]
    if options.chat:
        return [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    return [llm.tokenizer.encode_prompt(text) for text in texts]


def contenders(llm: LLM, options: argparse.Namespace) -> dict[str, Contender]:
    found = {"plain": Contender(llm)}
    for way in options.way or ["auto"]:
        for k in options.k.split(","):
            given = {"draft_model": options.draft, "translate": way, "k": k if k == "auto" else int(k)}
            given |= {"draft_dtype": options.draft_dtype} if options.draft_dtype else {}
            found[f"{way} k={k}"] = Contender(llm.using(drafter="model", **given))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--k", default="4")
    parser.add_argument("--way", action="append", choices=("auto", "tli", "slem"))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-dtype")
    parser.add_argument("--chat", action="store_true", help="under the target's chat template")
    options = parser.parse_args()

    llm = LLM(options.target, drafter="off", dtype=options.dtype, max_length=2048)
    every, prompts = contenders(llm, options), prompt_ids(llm, options)
    params = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=7)
    dice, order = random.Random(1), list(every)
    for one in every.values():  # the first pass is slower
        one.llm.generate([prompts[0]], SamplingParams(max_tokens=4))
    for number in range(options.rounds):
        for at, ids in enumerate(prompts):
            dice.shuffle(order)
            for name in order:
                every[name].run(ids, params)
            print(f"round {number + 1}, prompt {at + 1} of {len(prompts)}", file=sys.stderr)

    rows = {name: one.row(every["plain"]) for name, one in every.items()}
    print(f"{'':<14}{'α':>7}{'τ':>7}{'speed':>8}{'CPU':>8}{'tok/s':>8}  identical")
    for name, row in rows.items():
        alpha = "–" if row["alpha"] is None else f"{row['alpha']:.3f}"
        print(f"{name:<14}{alpha:>7}{row['tau']:>7.2f}{row['speedup']:>8.2f}{row['cpu_speedup']:>8.2f}", end="")
        print(f"{row['tok_s']:>8.1f}  {row['identical']}/{len(every['plain'].texts)}")
    names = [Path(word).name if "/" in word else word for word in sys.argv]
    facts = {"bench": "pairs", "command": " ".join(["python", "bench/pairs.py", *names[1:]]), "target": llm.name}
    facts |= {"dtype": llm.dtype, "cpu": cpu_name(), "prompts": len(prompts), "tokens": options.tokens}
    print(json.dumps(facts | {"temperature": options.temperature, "rows": rows}))


if __name__ == "__main__":
    main()
