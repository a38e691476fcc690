"""What the HTTP side of the server sustains: 64 streams out of an invented engine that steps at a fixed pace.

    python bench/serve_front.py [--streams 64] [--round-ms 3] [--tokens 1] [--seconds 10] [--engine process]

The engine's steps take no work: each gives every sequence `--tokens` random tokens and sleeps until the next one is
due, so that whatever is slow is HTTP and text. `--engine process` is what `outrider serve` runs; `thread` is an engine
in memory, which shares the interpreter lock. The load generator is a process of its own, which parses nothing but the
`data:` of a chunk; on two cores it takes one of them. Times between chunks are per stream, as they arrive there. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import selectors
import socket
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import uvicorn

from outrider import LLM
from outrider.measure.environment import environment
from outrider.measure.load_generator import percentiles
from outrider.server.app import make_app
from outrider.server.settings import Limits, Settings
from outrider.types import Batch, Draft, Output, Sequence, Step, Turn, Verdict

from support import tiny


class InventedEngine:
    """Steps at a fixed pace; everything but the steps is a real engine's."""

    def __init__(self, real: Any, round_seconds: float, tokens: int, vocabulary: int) -> None:
        self.real, self.pace, self.tokens = real, round_seconds, tokens
        self.running: list[Sequence] = []
        self.due, self.index, self.dice = 0.0, 0, random.Random(1)
        self.vocabulary = range(40, vocabulary)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def add(self, seq: Sequence) -> None:
        self.running.append(seq)

    def cancel(self, seq: Sequence) -> None:
        seq.finish = seq.finish or "cancelled"
        if seq in self.running:
            self.running.remove(seq)

    def step(self) -> Step:
        turns = [Turn(seq, 1, True) for seq in self.running]
        draft = Draft.empty(len(turns))
        verdicts = []
        for turn, tree in zip(turns, draft.trees, strict=True):
            verdict = Verdict([], self.dice.choices(self.vocabulary, k=self.tokens), "")
            verdicts.append(turn.seq.extend(verdict, tree))
            turn.seq.stats.count(tree, verdicts[-1])
        self.running = [seq for seq in self.running if not seq.done]
        now = time.perf_counter()
        self.due = max(self.due + self.pace, now - self.pace)
        time.sleep(max(self.due - now, 0.0))
        self.index += 1
        clock = {"verify": self.pace}
        nothing: Any = None
        return Step(self.index, turns, draft, Batch(nothing), Output(nothing), verdicts, clock, clock, [], [])


def build(folder: str, plan: argparse.Namespace) -> LLM:
    llm = LLM(folder, drafter="off", dtype="float32", max_batch=plan.streams, max_length=None, cache_tokens=65_536)
    invented: Any = InventedEngine(llm.engine, plan.round_ms / 1e3, plan.tokens, llm.target.config.vocab_size)
    llm._engine = invented
    return llm


def generate_load(port: int, plan: argparse.Namespace, results: Any) -> None:
    """All streams in one loop; puts one dictionary into `results`."""
    body = {"messages": [{"role": "user", "content": "the fox"}], "stream": True, "ignore_eos": True, "temperature": 0}
    body |= {"max_tokens": 30_000}
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    latest: dict[socket.socket, float] = {}
    for _ in range(plan.streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + data)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        latest[connection] = 0.0
    begin = time.perf_counter() + plan.warm_up
    end, gaps, chunks, size, ended = begin + plan.seconds, [], 0, 0, 0
    own = time.process_time()
    results.put("started")
    counting = False
    while (now := time.perf_counter()) < end:
        if not counting and now >= begin:
            counting, own = True, time.process_time()
            results.put("counting")
        for key, _ in selector.select(0.1):
            connection: Any = key.fileobj
            received = connection.recv(1 << 16)
            if not received or b"[DONE]" in received:
                selector.unregister(connection)
                ended += 1
                continue
            if b'"choices"' in received:
                at, before = time.perf_counter(), latest[connection]
                latest[connection] = at
                if counting:
                    chunks += received.count(b'"choices"')
                    size += len(received)
                    gaps += [at - before] if before else []
    results.put("done")
    cpu = (time.process_time() - own) / plan.seconds
    results.put({"chunks_per_second": chunks / plan.seconds, "gaps": gaps, "bytes": size, "ended": ended, "cpu": cpu})


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def generated(application: Any) -> float:
    lines = application.service.metrics.text().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("outrider:generation_tokens_total"))


def engine_of(folder: str, plan: argparse.Namespace) -> Any:
    if plan.engine == "thread":
        return build(folder, plan)
    from outrider.server.links import EngineProcess

    return EngineProcess(partial(build, folder, plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--round-ms", type=float, default=3.0)
    parser.add_argument("--tokens", type=int, default=1, help="of each sequence per step")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=2.0)
    parser.add_argument("--engine", choices=("process", "thread"), default="process")
    plan = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny.save(Path(folder), context=32_768)
        engine = engine_of(folder, plan)
        limits = Limits(queue=4 * plan.streams, max_tokens=32_000)
        application = make_app(engine, Settings(limits=limits))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(application.asgi, port=port, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        context = multiprocessing.get_context("spawn")
        results: Any = context.Queue()
        child = context.Process(target=generate_load, args=(port, plan, results))
        child.start()
        while results.get() != "counting":
            pass
        tokens, cpu, begin = generated(application), processor_seconds(os.getpid()), time.perf_counter()
        while results.get() != "done":
            pass
        seconds = time.perf_counter() - begin
        tokens, cpu = generated(application) - tokens, processor_seconds(os.getpid()) - cpu
        found = results.get()
        child.join()
        server.should_exit = True
        thread.join()
    gaps = percentiles(found.pop("gaps"))
    wanted = plan.streams * plan.tokens / plan.round_ms * 1e3 if plan.round_ms else None
    result = {
        "engine": plan.engine, "wanted_tokens_per_second": wanted, "tokens_per_second": tokens / seconds,
        "chunks_per_second": found["chunks_per_second"], "between_chunks_ms": gaps, "streams_ended": found["ended"],
        "http_process_cpu": cpu / seconds, "load_generator_cpu": found["cpu"],
        "tokens_per_http_cpu_second": tokens / cpu,
    }  # fmt: skip
    for name, value in result.items():
        print(f"{name:28} {value}")
    print(json.dumps(result | {"plan": vars(plan), "environment": environment()}))


if __name__ == "__main__":
    main()
