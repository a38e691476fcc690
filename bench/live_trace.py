"""The cost of a request's trace: a stream without one, with `summary` and with `full`, and a neighbour in the batch.

    python bench/live_trace.py --rounds 15

Runs are interleaved, so that machine load is the same for each. Tokens per second are the server's own (`timings`). The
last line is one JSON object with the medians of the ratios against no trace. No result of it is published.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import httpx

from outrider import LLM

from support.serving import listening

PROMPT = "Write a function in Python that parses a CSV file without the csv module, and explain it."
LEVELS = ("off", "summary", "full")


def ask(address: str, level: str, tokens: int) -> float:
    """Tokens per second after the first token."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0.7, "seed": 5}
    body |= {"max_tokens": tokens, "ignore_eos": True, "stream": True, "learn": False, "speculation": {"trace": level}}
    last: dict[str, Any] = {}
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line[6:])
    return float(last["timings"]["predicted_per_second"])


def beside(address: str, level: str, tokens: int) -> float:
    """The speed of a stream without a trace while another one has a trace."""
    other = threading.Thread(target=ask, args=(address, level, tokens))
    other.start()
    speed = ask(address, "off", tokens)
    other.join()
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--k", type=int, default=5, help="fixed, so that every round does the same work")
    options = parser.parse_args()
    own: dict[str, list[float]] = {level: [] for level in LEVELS}
    near: dict[str, list[float]] = {level: [] for level in LEVELS}
    with listening(LLM(k=options.k, max_length=1024)) as (address, _):
        ask(address, "full", 16)
        for at in range(options.rounds):
            for level in LEVELS[at % 3 :] + LEVELS[: at % 3]:
                own[level].append(ask(address, level, options.tokens))
                near[level].append(beside(address, level, options.tokens))
            print(f"round {at + 1}:", *(f"{level} {own[level][-1]:.0f}" for level in LEVELS), file=sys.stderr)
    ratios = {name: against_none(speeds) for name, speeds in (("own", own), ("neighbour", near))}
    print(json.dumps({"rounds": options.rounds, "tokens": options.tokens, "k": options.k, "speed_ratio": ratios}))


def against_none(speeds: dict[str, list[float]]) -> dict[str, float]:
    pairs = {level: zip(speeds[level], speeds["off"], strict=True) for level in LEVELS}
    return {level: round(median(traced / none for traced, none in each), 3) for level, each in pairs.items()}


if __name__ == "__main__":
    main()
