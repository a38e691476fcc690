"""The quality of a dtype, and of another engine with the same file: perplexity of a text over the same windows.

    python bench/perplexity.py TEXT_FILE [--model FILE] [--dtype gguf --dtype gguf+float32 …] [--windows 8]
                               [--engine llamacpp] [--python llamacpp=/path/to/venv/bin/python]

Published results (bench/results/):

    python bench/perplexity.py HELDOUT.txt --windows 16                                   2026-11-15-perplexity-smollm2
    python bench/perplexity.py HELDOUT.txt --windows 16 --dtype float32 --dtype int8 --dtype gguf    …-smollm2-gguf

`gguf+float32` is dtype gguf with K and V in float32. Windows have 512 tokens, each with an empty context; every engine
gets the ids that Outrider's tokenizer makes of the text. Engines run one after the other, each in a process of its own
(`worker.py`). Log-probabilities are taken in float32 or more. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from outrider.models.checkpoint import open_checkpoint
from peers import CONTENDERS, LLAMA, Contender, start_worker

WINDOW = 512


def perplexity(worker: Contender, windows: list[list[int]]) -> float:
    begin, loss = time.monotonic(), 0.0
    for number, ids in enumerate(windows, start=1):
        loss += worker.ask(ids=ids)["loss"]
        so_far = math.exp(loss / number / (WINDOW - 1))
        print(f"{worker.name} {number} {so_far:.4f} {time.monotonic() - begin:.0f} s", file=sys.stderr)
    worker.process.kill()
    return so_far


def engines(options: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: the worker's engine and its options."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in options.dtype or ([] if options.engine else ["bfloat16", "int8"]):
        dtype, _, kv = name.partition("+")
        found[name] = "outrider", {"drafter": "off", "dtype": dtype, "kv_dtype": kv or "auto"}
    for name in options.engine:
        found[name] = name, dict(CONTENDERS["transformers"][1]) if name == "transformers" else {"logits_all": True}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", action="append", help="Outrider's, with +float16 or +float32 for K and V")
    parser.add_argument("--engine", action="append", default=[], choices=("llamacpp", "transformers"))
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    ids = checkpoint.tokenizer.encode(options.text.read_text(encoding="utf-8"))
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW, WINDOW)][: options.windows]
    pythons = {"llamacpp": str(LLAMA)} | dict(pair.split("=", 1) for pair in options.python)
    found: dict[str, float] = {}
    for name, (engine, given) in engines(options).items():
        worker = start_worker(name, engine, str(checkpoint.path), given, pythons)
        if worker is not None:
            found[name] = perplexity(worker, windows)
    first = next(iter(found.values()))
    for name, value in found.items():
        print(f"{name:<14} {value:8.4f}  {100 * (value / first - 1):+.3f} %")
    facts = {"bench": "perplexity", "command": " ".join(["python", *sys.argv]), "model": checkpoint.name}
    print(json.dumps(facts | {"tokens": WINDOW * len(windows), "perplexity": found}))


if __name__ == "__main__":
    main()
