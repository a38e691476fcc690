"""A draft vocabulary that follows the text: acceptance of a head with it and without, by kind of text.

    python bench/vocabulary.py --model MODEL --domain NAME=FILE.jsonl … [--head FOLDER] [--prompts 14] [--k 3]

Each kind of text begins with fresh drafters. Both answer the same prompts, one after the other; texts are compared.
Prompts of three kinds that the shipped heads were not trained on: `bench/domain_prompts.py`. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.train.prompts import read_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--head")
    parser.add_argument("--domain", action="append", required=True, help="NAME=FILE.jsonl; repeatable")
    parser.add_argument("--prompts", type=int, default=14, help="of each kind")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--k", type=int, default=3)
    options = parser.parse_args()
    base = LLM(options.model, drafter="off", max_length=1024)
    given: dict[str, Any] = {"head": options.head} if options.head else {}
    rows, differ = [], 0
    for name, file in (each.split("=", 1) for each in options.domain):
        prompts = [prompt.text[:700] for prompt in read_file(Path(file))][: options.prompts]
        texts = {}
        for learns in (False, True):
            llm = base.using(drafter="head", k=options.k, learn_vocabulary=learns, **given)
            row, texts[learns] = answers(llm, prompts, options.tokens)
            drafter: Any = llm.engine.drafter
            learnt = len(drafter.vocabulary.learnt) if learns and drafter.vocabulary is not None else 0
            rows.append({"kind": name, "learns": learns, "learnt": learnt} | row)
            print(
                f"{name:>12} {'learning' if learns else 'frozen':>9}: α {row['alpha']:.3f}, τ {row['tau']:.2f}",
                flush=True,
            )
        differ += sum(a != b for a, b in zip(texts[False], texts[True], strict=True))
    command = " ".join(["python", *sys.argv])
    print(json.dumps({"bench": "vocabulary", "command": command, "model": base.name, "differ": differ, "rows": rows}))


def answers(llm: LLM, prompts: list[str], tokens: int) -> tuple[dict[str, float], list[list[int]]]:
    """Acceptance and seconds over all prompts, and the answers' ids."""
    begin, stats, texts = time.perf_counter(), [], []
    for prompt in prompts:
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        (out,) = llm.generate([ids], SamplingParams(max_tokens=tokens))
        stats.append(out.stats)
        texts.append(out.token_ids)
    reached, steps = sum(s.reached for s in stats), sum(s.steps for s in stats)
    alpha, tau = sum(s.accepted for s in stats) / max(reached, 1), sum(s.emitted for s in stats) / max(steps, 1)
    return {"alpha": alpha, "tau": tau, "seconds": time.perf_counter() - begin}, texts


if __name__ == "__main__":
    main()
