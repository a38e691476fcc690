"""What a round costs the host: the engine's Python over rounds that take no time, and the message that reports them.

    python bench/host_rounds.py [--sequences 64] [--drafter off] [--rounds 100]

The device is invented: recordings do nothing, and each report says that every sequence emitted one token. What is left
is the host's own work for a round (pick, budget, draft, start, read, commit, publish) and, in the second figure, the
message to the HTTP side and its bytes. Figures are processor time of the engine's thread, the fastest of five batches
of rounds: on a busy machine the clock measures the others. To compare two versions, run them alternately with
PYTHONPATH set. The last line is one JSON object.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: there is no GPU

import argparse
import gc
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from outrider.backends import ops
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.rounds import PendingRound, Rounds
from outrider.backends.cuda.state import DeviceState
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.control.adaptive import Adaptive, Fixed
from outrider.control.costs import PassCosts
from outrider.drafters import Workspace, make
from outrider.engine.cache import Cache
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.measure.environment import environment
from outrider.server.host import EngineHost, Entry
from outrider.server.links import frame
from outrider.types import SamplingParams, Sequence

CPU, LENGTH, PROMPT = torch.device("cpu"), 2048, 40
COSTS = {(1, 1): 0.0017, (64, 64): 0.002, (64, 128): 0.0024, (64, 512): 0.006}  # seconds of passes


class Nothing(Driver):
    """Records work and never runs it."""

    def record(self, work: Callable[[], Any]) -> Any:
        return SimpleNamespace(replay=lambda: None)


class InventedRound(PendingRound):
    """Reports one token for every sequence."""

    lengths_so_far: ClassVar[dict[int, int]] = {}
    seconds: ClassVar[dict[str, float]] = {"verify": 0.0017}

    def wait(self) -> Any:
        for i, turn in enumerate(self.turns):
            length = self.lengths_so_far.get(turn.seq.id, turn.seq.prompt_len)
            self.report[i, :9] = 0
            self.report[i, 0], self.report[i, 4], self.report[i, 8] = length, turn.whole, length * 7 % 40 + 3
            self.lengths_so_far[turn.seq.id] = length + turn.whole
        return super().wait()


class Reporter(EngineHost):
    """The host's step and message, without its thread."""

    def __init__(self, engine: Engine, send: Callable[[Any], Any]) -> None:
        self.llm: Any = SimpleNamespace(engine=engine)
        self.send, self._running, self._changed = send, {}, threading.Condition()


def build(plan: argparse.Namespace) -> Engine:
    config = replace(toy_config(1, context=LENGTH), heads=2, kv_heads=1)
    target = Transformer(config, RandomWeights(config, 1), torch.float32, CPU)
    cache = Cache(plan.sequences * 512, plan.sequences + 8, LENGTH, CPU)
    plane = cache.add_plane(*target.plane_shape)
    state = DeviceState(cache, Nothing(CPU), plan.sequences)
    runner = Graphs(target, plane, state)
    runner.rounds = Rounds(runner)
    space = Workspace(target, cache, plane, {}, None, lambda model, plane: Graphs(model, plane, state))  # type: ignore
    plain = plan.drafter == "off"
    controller = Fixed(0) if plain else Adaptive(PassCosts(COSTS), 31, plan.drafter)
    drafter, scheduler = make(plan.drafter, space), Scheduler(cache, plane, plan.sequences, 512)
    return Engine(runner, cache, drafter, controller, scheduler, config.vocab_size)


def seconds_of(work: Callable[[], Any], rounds: int) -> float:
    """Of the thread's processor time, per call: the fastest fifth."""
    fastest = []
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(rounds // 5):
            work()
        fastest.append((time.thread_time() - begin) / (rounds // 5))
    return min(fastest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--drafter", default="off")
    parser.add_argument("--rounds", type=int, default=100)
    plan = parser.parse_args()
    ops.on_gpu = lambda tensor: True
    from outrider.backends.cuda import rounds

    rounds.PendingRound = InventedRound  # type: ignore[misc]
    torch.set_num_threads(1)
    engine, size = build(plan), list[int]()
    host = Reporter(engine, lambda message: size.append(len(frame(message))))
    for i in range(plan.sequences):
        tokens = [(i * 13 + j * 7) % 40 + 3 for j in range(PROMPT)]
        seq = Sequence(i + 1, tokens, SamplingParams(max_tokens=LENGTH - PROMPT), seed=i)
        engine.add(seq)
        host._running[seq.id] = Entry(1, seq, None)
    for _ in range(20):
        engine.step()
    gc.collect()
    gc.disable()
    found = {"round_ms": 1e3 * seconds_of(engine.step, plan.rounds)}
    found["round_with_message_ms"] = 1e3 * seconds_of(host._step, plan.rounds)
    for name, value in found.items():
        print(f"{name:24} {value:.3f}")
    print(json.dumps(found | {"message_bytes": size[-1], "plan": vars(plan), "environment": environment()}))


if __name__ == "__main__":
    main()
