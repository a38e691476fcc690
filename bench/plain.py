"""Plain decoding, Outrider against transformers' generate: the same weights, prompts and number of tokens, interleaved.

    python bench/plain.py [--dtype bfloat16] [--rounds 3] [--tokens 64]

Published results (bench/results/2026-11-15-plain-bfloat16.json and -plain-float32.json):

    python bench/plain.py --dtype bfloat16 --rounds 3 --tokens 48
    python bench/plain.py --dtype float32 --rounds 3 --tokens 48

Ratios are per prompt and round, both sides one after the other. Neither side drafts. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import transformers

import outrider
from hf import in_transformers
from outrider import LLM, SamplingParams
from outrider.backends.machine import cpu_name
from outrider.models.checkpoint import open_checkpoint
from outrider.models.prompts import bundled


def seconds(run: Callable[[], int], tokens: int) -> float:
    """Seconds per token; raises where a side generates another number of tokens."""
    begin = time.perf_counter()
    made = run()
    took = time.perf_counter() - begin
    assert made == tokens, f"{made} tokens instead of {tokens}"
    return took / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()

    llm = LLM(drafter="off", dtype=options.dtype)
    model = in_transformers(open_checkpoint(None), getattr(torch, options.dtype))
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    rows, same = [], 0
    for prompt in bundled()[: options.prompts]:
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        texts: list[list[int]] = []
        other: list[list[int]] = []

        def run_outrider(ids: list[int] = ids, texts: list[list[int]] = texts) -> int:
            texts.append(llm.using(drafter="off").generate([ids], params)[0].token_ids)
            return len(texts[-1])

        def hf(ids: list[int] = ids, other: list[list[int]] = other) -> int:
            given = torch.tensor([ids])
            exact = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "do_sample": False}
            out = model.generate(given, attention_mask=torch.ones_like(given), pad_token_id=0, **exact)
            other.append(out[0, len(ids) :].tolist())
            return len(other[-1])

        run_outrider(), hf()  # the first call of each pays for lazy initialisation
        for _ in range(options.rounds):
            a, b = seconds(run_outrider, options.tokens), seconds(hf, options.tokens)
            rows.append((a, b))
            print(
                f"{prompt.category:<10} outrider {1 / a:6.1f} tok/s   transformers {1 / b:6.1f} tok/s   {b / a:4.2f} x"
            )
        same += texts[-1] == other[-1]
    ratio = statistics.median(b / a for a, b in rows)
    print(f"median of {len(rows)}: {ratio:.2f} x; {same} of {options.prompts} texts equal to transformers'")
    result = {
        "bench": "plain",
        "command": f"python bench/plain.py --dtype {options.dtype} --rounds {options.rounds} --tokens {options.tokens}",
        "model": llm.name,
        "dtype": options.dtype,
        "tok_s": statistics.median(1 / a for a, _ in rows),
        "transformers_tok_s": statistics.median(1 / b for _, b in rows),
        "ratio": ratio,
        "ratio_low": min(b / a for a, b in rows),
        "texts_equal": f"{same}/{options.prompts}",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": {"outrider": outrider.__version__, "torch": torch.__version__, "python": platform.python_version()}
        | {"transformers": transformers.__version__},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
