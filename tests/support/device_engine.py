"""An engine whose loop runs on the device: on a GPU, or the same code uncaptured in triton's interpreter.

Everything that nobody has written is poisoned (`capture.Driver`): a round that reads it would say something else, or
fail.
"""

from __future__ import annotations

from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.rounds import Rounds
from outrider.backends.cuda.state import DeviceState
from outrider.backends.transformer import Transformer
from outrider.control.adaptive import Fixed
from outrider.drafters import Drafter, Workspace, make
from outrider.engine.cache import Cache, Plane
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.types import SamplingParams, Sequence

from support.kernels import DEVICE, GPU, Unhurried  # before anything that imports triton


def padded_plane(cache: Cache, model: Transformer) -> Plane:
    """A CPU's planes have no slot for padding."""
    cache.slots += not GPU
    plane = cache.add_plane(*model.plane_shape)
    cache.slots -= not GPU
    return plane


def device_engine(
    target: Transformer,
    cache: Cache,
    drafter: str | type[Drafter] = "off",
    k: int = 0,
    rounds: bool = True,
    rows: int = 16,
    **options: object,
) -> Engine:
    """Up to four sequences and `rows` rows in a pass; rounds=False: with the host between passes."""
    plane = padded_plane(cache, target)
    state = DeviceState(cache, Driver(DEVICE, poisons=True), 4)
    runner = Graphs(target, plane, state)
    runner.rounds = Rounds(runner) if rounds else None
    cache.slots += not GPU
    space = Workspace(target, cache, plane, options, None, lambda m, p: Graphs(m, p, state))  # type: ignore[arg-type]
    made = make(drafter, space)
    cache.slots -= not GPU
    built = Engine(runner, cache, made, Fixed(k), Scheduler(cache, plane, 4, rows), target.config.vocab_size)
    built.pace = Unhurried()
    return built


def run_all(engine: Engine, params: list[SamplingParams], prompts: list[list[int]]) -> list[list[int]]:
    """The answers to these prompts in one batch, with every step and the cache checked."""
    seqs = [Sequence(i + 1, prompt, p, seed=40 + i) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]
    for seq in seqs:
        engine.add(seq)
    while engine.busy:
        step = engine.step()
        assert not step.failure, step.failure
        engine.cache.check()
    assert not engine.failures
    return [seq.generated for seq in seqs]
