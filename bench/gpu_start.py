"""Seconds of a first start on a GPU by stage, with kernels compiled side by side and one after the other.

    python bench/gpu_start.py MODEL [--drafter auto] [--threads 16 1]

Each start is a process with empty caches; then the same again with what it has cached. MODEL is a folder or a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def start(model: str, drafter: str) -> None:
    """Start an engine here, and print its stages and the hash of an answer."""
    began = time.perf_counter()
    from outrider import LLM
    from outrider.models.stages import listening

    stages: dict[str, list[float]] = {}

    def note(name: str, share: float) -> None:
        stages.setdefault(name, []).append(time.perf_counter())

    imported = time.perf_counter()
    with listening(note):
        llm = LLM(model, drafter=drafter)
    ended = time.perf_counter()
    (result,) = llm.generate("def fibonacci(n):", max_tokens=48, temperature=0.0)
    seconds = {"import": imported - began, "LLM": ended - imported, "first answer": time.perf_counter() - ended}
    seconds |= {f"of that: {name}": times[-1] - times[0] for name, times in stages.items()}
    print(json.dumps({name: round(value, 2) for name, value in seconds.items()} | {"text": result.text[-20:]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=str)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--threads", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        start(options.model, options.drafter)
        return
    command = [sys.executable, __file__, options.model, "--drafter", options.drafter, "--here"]
    for threads in options.threads:
        with tempfile.TemporaryDirectory() as folder:
            places = {"TRITON_CACHE_DIR": str(Path(folder) / "triton"), "OUTRIDER_HOME": str(Path(folder) / "home")}
            for kind in ("first", "second"):
                print(f"{threads} threads, {kind} start: ", end="", flush=True)
                subprocess.run(
                    command, env=os.environ | places | {"OUTRIDER_COMPILE_THREADS": str(threads)}, check=True
                )


if __name__ == "__main__":
    main()
