"""The quality of a dtype: perplexity of held-out text, every dtype over the same windows.

    python bench/perplexity.py TEXT_FILE [--model FILE] [--dtype float32 --dtype int8] [--windows 8]

Published result (bench/results/2026-11-15-perplexity-smollm2.json):

    python bench/perplexity.py HELDOUT.txt --windows 16

Windows have 512 tokens, each with an empty context. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from outrider.backends.load import load_model
from outrider.backends.rows import rows_of
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.models.checkpoint import open_checkpoint
from outrider.types import Sequence

WINDOW = 512


def perplexity(model: object, windows: list[list[int]]) -> float:
    cache = Cache(WINDOW, 2, WINDOW)
    plane = cache.add_plane(*model.plane_shape)
    loss, count = 0.0, 0
    for number, ids in enumerate(windows):
        seq = Sequence(number, ids)
        cache.open(seq)
        cache.reserve(seq, len(ids), 0)
        packed = BatchBuilder(cache)
        packed.pending(seq, 0, len(ids), want=False)
        packed.want = list(range(len(ids)))
        logp = torch.log_softmax(model.forward(rows_of(packed), plane).logits.float(), -1)  # [T, V]
        loss -= float(logp[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum())
        count += len(ids) - 1
        cache.free(seq)
    return math.exp(loss / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    ids = checkpoint.tokenizer.encode(options.text.read_text(encoding="utf-8"))
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW, WINDOW)][: options.windows]
    found = {d: perplexity(load_model(checkpoint, d, WINDOW), windows) for d in options.dtype or ["bfloat16", "int8"]}
    first = next(iter(found.values()))
    for dtype, value in found.items():
        print(f"{dtype:<10} {value:8.3f}  {100 * (value / first - 1):+.2f} %")
    facts = {"bench": "perplexity", "command": " ".join(["python", *sys.argv]), "model": checkpoint.name}
    print(json.dumps(facts | {"tokens": WINDOW * len(windows), "perplexity": found}))


if __name__ == "__main__":
    main()
