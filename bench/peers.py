"""Outrider against transformers, llama.cpp and vLLM: one interleaved run on one machine.

    python bench/peers.py [--model FILE.gguf] [--prompts FILE.jsonl] [--limit 14] [--tokens 96] [--rounds 3]
                          [--python llamacpp=/path/to/venv/bin/python] [--only NAME …]

Published results (bench/results/2026-11-15-peers-smollm2.json and -peers-qwen2.5-coder-1.5b.json):

    python bench/peers.py --limit 7 --tokens 64 --rounds 2 --python llamacpp=PYTHON
    python bench/peers.py --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --limit 7 --tokens 64 --rounds 2
                          --only outrider --only "outrider plain" --only llama.cpp --only "llama.cpp lookup"
                          --python llamacpp=PYTHON

Each contender is a process of its own (`worker.py`) that waits for its turn; prompts go round the contenders, so that
machine load affects all of them. All get the same prompt ids and the same number of greedy tokens. llama-cpp-python is
built with -DGGML_NATIVE=OFF and the AVX-512 options on where AMX faults. The last line is one JSON object: medians over
prompts and rounds of decoding speed (after the first token) and of whole requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.backends.machine import cpu_name
from outrider.models.checkpoint import open_checkpoint
from outrider.models.prompts import bundled, from_file

CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "outrider": ("outrider", {"drafter": "auto", "k": "auto"}),
    "outrider plain": ("outrider", {"drafter": "off"}),
    "llama.cpp": ("llamacpp", {}),
    "llama.cpp lookup": ("llamacpp", {"prompt_lookup": 2}),
    "transformers": ("transformers", {"dtype": "float32"}),
    "transformers bf16": ("transformers", {"dtype": "bfloat16"}),
    "transformers lookup": ("transformers", {"dtype": "float32", "prompt_lookup_num_tokens": 5}),
    "vllm": ("vllm", {}),
    "vllm ngram": (
        "vllm",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
    ),
}


@dataclass
class Contender:
    name: str
    process: subprocess.Popen[str]
    facts: dict[str, Any]
    decode: list[float] = field(default_factory=list)  # tokens per second after the first token
    total: list[float] = field(default_factory=list)

    def ask(self, ids: list[int], tokens: int) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"ids": ids, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return read(self.process)

    def race(self, ids: list[int], tokens: int) -> list[int]:
        result = self.ask(ids, tokens)
        assert len(result["ids"]) == tokens, f"{self.name} made {len(result['ids'])} tokens instead of {tokens}"
        self.total.append(tokens / result["seconds"])
        if result["first"] is not None:
            self.decode.append((tokens - 1) / (result["seconds"] - result["first"]))
        new: list[int] = result["ids"]
        return new


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout
    for line in process.stdout:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise RuntimeError("the process ended")


def start(name: str, model: str, dtype: str, pythons: dict[str, str]) -> Contender | None:
    engine, options = CONTENDERS[name]
    if engine == "outrider":
        options = options | {"dtype": dtype}
    worker = Path(__file__).with_name("worker.py")
    command = [pythons.get(engine, sys.executable), str(worker), engine, model, json.dumps(options)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        return Contender(name, process, read(process))
    except RuntimeError:
        error = (process.stderr.read() if process.stderr else "").strip().splitlines()
        print(f"{name}: not available ({error[-1] if error else 'no output'})", file=sys.stderr)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto", help="Outrider's")
    parser.add_argument("--only", action="append", help="only these contenders")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    options = parser.parse_args()

    checkpoint = open_checkpoint(options.model)
    pythons = dict(pair.split("=", 1) for pair in options.python)
    names = options.only or list(CONTENDERS)
    started = [start(name, str(checkpoint.path), options.dtype, pythons) for name in names]
    contenders = [c for c in started if c is not None]
    prompts = (from_file(options.prompts) if options.prompts else bundled())[: options.limit]
    ids = [checkpoint.tokenizer.encode_chat([{"role": "user", "content": p.text}]) for p in prompts]
    for c in contenders:
        c.ask(ids[0], 8)  # the first request pays for lazy initialisation

    same = 0
    for number in range(options.rounds):
        for prompt, given in zip(prompts, ids, strict=True):
            texts = {c.name: c.race(given, options.tokens) for c in contenders}
            speeds = "  ".join(f"{c.name} {c.total[-1]:.1f}" for c in contenders)
            print(f"{number + 1} {prompt.category:<12} {speeds}", flush=True)
            same += texts.get("outrider") == texts.get("outrider plain")
    table = {
        c.name: {
            "tok_s": statistics.median(c.total),
            "decode_tok_s": statistics.median(c.decode) if c.decode else None,
            "mean_tok_s": statistics.harmonic_mean(c.total),
            **c.facts,
        }
        for c in contenders
    }
    for name, row in sorted(table.items(), key=lambda item: -item[1]["tok_s"]):
        print(f"{name:<22} {row['tok_s']:7.1f} tok/s (median)  {row['mean_tok_s']:7.1f} over all")
    runs = len(prompts) * options.rounds
    print(json.dumps({"bench": "peers", "command": " ".join(["python", *sys.argv]), "model": checkpoint.name,
                      "runs": runs, "tokens": options.tokens, "identical_to_plain": f"{same}/{runs}",
                      "cpu": cpu_name(), "contenders": table}))  # fmt: skip
    for c in contenders:
        c.process.kill()


if __name__ == "__main__":
    main()
