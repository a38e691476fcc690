"""Serving with and without speculation at several concurrencies, and concurrent clients against sequential ones.

    python bench/serve_speed.py --prompts spec_bench.jsonl [--concurrency 1 8 64] [--rounds 3] [--tokens 48]

Published results (bench/results/2026-11-15-serve-speed-smollm2.json and, with --rounds 2, -serve-speed-after-smollm2):

    python bench/serve_speed.py --prompts spec_bench_question.jsonl --concurrency 1 8 64 --rounds 3 --tokens 48

Two servers of the same model, one with a drafter and one without, get the same prompts in turns, and each goes first
equally often. Every round has its own prompts, so that a drafter's memory does not hold the same answer. The machine
may be busy, so ratios are of pairs of runs in direct succession, by wall time and by the processor time of each server.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outrider.measure.client import RemoteError, Server
from outrider.measure.environment import environment
from outrider.measure.load_generator import LoadPlan, run, summary
from outrider.models.prompts import from_file

DRAFTERS = {"auto": 8911, "off": 8912}  # and their ports
ENOUGH = 1600  # characters of a prompt: longer ones would measure prefill


def start(drafter: str, plan: argparse.Namespace) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "outrider", "serve", "-d", drafter, "--port", str(DRAFTERS[drafter])]
    program += [
        "--max-batch",
        str(plan.max_batch),
        "--set",
        "max_length=2048",
        *(["-m", plan.model] if plan.model else []),
    ]
    return subprocess.Popen(
        program, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )


def ready(server: Server) -> bool:
    try:
        return bool(server.models())
    except RemoteError:
        return False


def cpu(process: subprocess.Popen[bytes]) -> float:
    """Processor seconds of a server so far, over all threads of its processes (Linux)."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in (process.pid, *children)]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def measure(plan: argparse.Namespace, texts: list[str], processes: dict[str, Any]) -> list[dict[str, Any]]:
    servers = {drafter: Server(f"http://127.0.0.1:{port}") for drafter, port in DRAFTERS.items()}
    while not all(map(ready, servers.values())):
        time.sleep(0.5)
    rows, used = [], 0
    for turn in range(plan.rounds):
        for many in plan.concurrency:
            count = max(many, plan.requests)
            prompts = [texts[(used + i) % len(texts)] for i in range(count)]
            used += count
            order = list(servers)[:: 1 if turn % 2 else -1]
            row: dict[str, Any] = {"concurrency": many, "round": turn}
            for drafter in order:
                before = cpu(processes[drafter])
                samples = run(servers[drafter], LoadPlan(prompts, count, many, tokens=plan.tokens))
                row[drafter] = summary(samples) | {"cpu_seconds": cpu(processes[drafter]) - before}
                row[drafter]["text"] = [sample.response.text for sample in samples]
            row["same_text"] = row["auto"].pop("text") == row["off"].pop("text")
            row["ratio"] = row["auto"]["tokens_per_second"] / row["off"]["tokens_per_second"]
            row["cpu_ratio"] = row["off"]["cpu_seconds"] / row["auto"]["cpu_seconds"]  # the same tokens in both
            rows.append(row)
            speeds = {drafter: row[drafter]["tokens_per_second"] for drafter in servers}
            print(
                many,
                turn,
                speeds,
                round(row["ratio"], 3),
                round(row["cpu_ratio"], 3),
                row["same_text"],
                row["auto"]["errors"],
                file=sys.stderr,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--model")
    plan = parser.parse_args()
    texts = [prompt.text for prompt in from_file(plan.prompts) if len(prompt.text) < ENOUGH]
    processes = {drafter: start(drafter, plan) for drafter in DRAFTERS}
    try:
        rows = measure(plan, texts, processes)
    finally:
        for process in processes.values():
            process.terminate()
            process.wait()
    print("| clients | plain tok/s | speculative tok/s | ratio | by processor time | the same text |")
    print("|---|---|---|---|---|---|")
    for many in plan.concurrency:
        chosen = [row for row in rows if row["concurrency"] == many]
        plain, fast = (statistics.median(row[d]["tokens_per_second"] for row in chosen) for d in ("off", "auto"))
        ratio, by_cpu = (statistics.median(row[name] for row in chosen) for name in ("ratio", "cpu_ratio"))
        same = all(row["same_text"] for row in chosen)
        print(f"| {many} | {plain:.0f} | {fast:.0f} | {ratio:.2f} | {by_cpu:.2f} | {same} |")
    facts = {name: str(value) if isinstance(value, Path) else value for name, value in vars(plan).items()}
    print(json.dumps({"rows": rows, "plan": facts, "environment": environment()}))


if __name__ == "__main__":
    main()
