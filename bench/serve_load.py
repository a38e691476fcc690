"""A server under load for minutes: mixed lengths, clients that disconnect, every finished stream compared by ids.

    python bench/serve_load.py [--seconds 180] [--streams 64] [--leave 0.33] [--max-batch 16] [--model FILE]

Published result (bench/results/2026-11-15-serve-load-smollm2.json):

    python bench/serve_load.py --seconds 180 --streams 64

The server runs in this process on a real port, its clients in another one. A pool of requests is first answered by
plain decoding, one at a time, through the library; under load every finished stream must have the same ids. Then the
cache is checked slot by slot. Memory is sampled every ten seconds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from outrider import LLM, SamplingParams
from outrider.measure.client import RemoteError, Server
from outrider.measure.environment import environment
from outrider.measure.load_generator import percentiles
from outrider.models.prompts import bundled
from outrider.server.app import make_app
from outrider.server.settings import Limits, Settings

Body = dict[str, Any]


def pool(size: int, longest: int) -> list[Body]:
    """Requests of many lengths, greedy and not, with and without speculation."""
    dice, texts = random.Random(5), [prompt.text for prompt in bundled()]
    return [
        {
            "messages": [{"role": "user", "content": texts[i % len(texts)]}],
            "max_tokens": dice.choice((4, 16, 48, longest)),
            "temperature": (0.0, 0.8)[i % 2],
            "seed": i,
            "return_token_ids": True,
            "speculation": ({}, {}, {"enabled": False}, {"k": 2})[i % 4],
        }
        for i in range(size)
    ]


def alone(llm: LLM, bodies: list[Body]) -> list[list[int]]:
    plain, every = llm.using(drafter="off"), []
    for body in bodies:
        params = SamplingParams(temperature=body["temperature"], seed=body["seed"], max_tokens=body["max_tokens"])
        every.append(plain.chat(body["messages"], params)[0].token_ids)
    return every


def client(url: str, bodies: list[Body], expected: list[list[int]], plan: argparse.Namespace, results: Any) -> None:
    """The process of all clients; puts one dictionary into `results`."""
    end, lock = time.monotonic() + plan.seconds, threading.Lock()
    counts: dict[str, Any] = {"ended": 0, "left": 0, "wrong": [], "errors": [], "tokens": 0, "gaps": []}

    def stream(number: int) -> None:
        dice = random.Random(number)
        while time.monotonic() < end:
            i = dice.randrange(len(bodies))
            leave = dice.randint(0, bodies[i]["max_tokens"] // 4) if dice.random() < plan.leave else None
            found, gaps, latest = [], [], 0.0
            outcome = "ended"
            try:
                for n, (at, chunk) in enumerate(Server(url).chat(bodies[i])):
                    gaps += [at - latest] if latest else []
                    latest = at
                    found += [token for choice in chunk["choices"] for token in choice["token_ids"]]
                    if n == leave:
                        outcome = "left"
                        break
            except RemoteError as error:
                outcome = str(error)
            with lock:
                counts["tokens"] += len(found)
                counts["gaps"] += gaps
                if outcome in ("ended", "left"):
                    counts[outcome] += 1
                    same = found == expected[i] if outcome == "ended" else found == expected[i][: len(found)]
                    counts["wrong"] += [] if same else [i]
                else:
                    counts["errors"].append(outcome)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(plan.streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(counts)


def memory() -> float:
    """Resident megabytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--leave", type=float, default=0.33)
    parser.add_argument("--pool", type=int, default=48)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--model")
    plan = parser.parse_args()

    llm = LLM(plan.model, max_batch=plan.max_batch, max_length=1024)
    bodies = pool(plan.pool, plan.longest)
    print(f"{plan.pool} requests alone …", file=sys.stderr)
    expected = alone(llm, bodies)
    application = make_app(llm, Settings(limits=Limits(queue=4 * plan.streams)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(application.asgi, port=port, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)

    print(f"{plan.streams} streams for {plan.seconds:g} s …", file=sys.stderr)
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    url = f"http://127.0.0.1:{port}"
    child = context.Process(target=client, args=(url, bodies, expected, plan, results))
    child.start()
    sampled, counts = [memory()], None
    while counts is None:
        try:
            counts = results.get(timeout=10)
        except Exception:
            sampled.append(memory())
    child.join()
    worker = application.service.worker
    while worker.running or worker.waiting:
        time.sleep(0.05)
    llm.engine.cache.check()
    server.should_exit = True
    thread.join()
    gaps = counts.pop("gaps")
    settled = sampled[len(sampled) // 3 :]
    result = {k: len(v) if isinstance(v, list) else v for k, v in counts.items()} | {
        "first_errors": sorted(set(counts["errors"]))[:3],
        "tokens_per_second": round(counts["tokens"] / plan.seconds, 1),
        "between_chunks_ms": percentiles(gaps),
        "cache": "clean",
        "memory_mb": {"first": round(sampled[0]), "settled": round(settled[0]), "last": round(sampled[-1])},
        "plan": vars(plan),
        "environment": environment(),
    }
    print(f"{result['ended']} streams finished, {result['left']} were dropped, {result['wrong']} were wrong, "
          f"{result['errors']} failed; between chunks p99 {result['between_chunks_ms'].get('p99')} ms; "
          f"memory {result['memory_mb']} MB; the cache is clean")  # fmt: skip
    print(json.dumps(result))
    if counts["wrong"] or counts["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
