"""An engine from its parts: the one place where they meet."""

from __future__ import annotations

from typing import Any

import torch

from .backends import Model, device_of
from .backends.cpu.eager import Eager
from .backends.cpu.early_exit import Begun
from .backends.pass_costs import CostFile, target_costs
from .config import Config
from .control.adaptive import Adaptive, Controller, Costs, Fixed
from .control.aligned import Aligned
from .drafters import Drafter, Market, Workspace, make
from .engine.cache import Cache, Plane
from .engine.scheduler import Scheduler
from .engine.step import Engine, Listener

_WARM_ROWS = 16  # of one pass: what one sequence and its draft need
_KEPT_PREFIXES = 32  # finished sequences whose K/V stays readable until slots run short


def build_engine(
    model: Model,
    config: Config,
    tokenizer: Any = None,
    listeners: tuple[Listener, ...] = (),
    costs: CostFile | None = None,
) -> Engine:
    """Cache, runner, drafter, controller and scheduler around a target. What `costs` knows is not measured again."""
    length = config.length_for(model.config.context_length)
    device = device_of(model)
    cache = Cache(config.slots_for(length), config.max_batch + _KEPT_PREFIXES, length, device)
    plane = cache.add_plane(*model.plane_shape)
    graphs = _Graphs(cache, config.max_batch, home=device)
    begins = getattr(model, "open", True)  # one that is not taken apart runs whole, always
    runner = graphs(model, plane) or Eager(model, plane, Begun(model, cache, plane) if begins else None)
    begun = getattr(runner, "begun", None)  # captured passes always run whole

    def market() -> Market | None:
        """The prices of whichever controller is at work: it is made after the drafter, and may be replaced."""
        return getattr(engine.controller, "now", None)

    shown = any(getattr(listener, "reads_guesses", False) for listener in listeners)
    space = Workspace(model, cache, plane, config.options, tokenizer, graphs, market, begun, shown)
    drafter = make(config.drafter, space)
    controller = make_controller(model, runner, cache, drafter, config, costs)
    if hasattr(runner, "warm"):
        runner.warm(max(_WARM_ROWS, config.max_batch))  # the first answers should not wait for it
    scheduler = Scheduler(cache, plane, config.max_batch, config.max_rows)
    engine = Engine(runner, cache, drafter, controller, scheduler, model.config.vocab_size, listeners)
    return engine


def make_controller(
    model: Model, runner: Any, cache: Cache, drafter: Drafter, config: Config, costs: CostFile | None
) -> Controller:
    """One that has seen nothing yet."""
    controller = _controller(model, runner, cache, drafter, config, costs)
    block = getattr(model, "block", 1)
    aligned: Any = Aligned(controller, block)
    found: Controller = controller if block == 1 else aligned
    return found


def _controller(
    model: Model, runner: Any, cache: Cache, drafter: Drafter, config: Config, costs: CostFile | None
) -> Controller:
    if drafter.name == "off":
        return Fixed(0)
    if config.k != "auto":
        return Fixed(int(config.k))
    counts = _sequences(config.max_batch)
    known = (costs or CostFile()).get(lambda: target_costs(runner, cache, counts), counts)
    padded = device_of(model).type == "cuda"
    return adaptive(Costs(known, padded), drafter)


def adaptive(costs: Costs, drafter: Drafter) -> Adaptive:
    """The controller of a drafter, told how that one works."""
    name, paced, frugal, glances = drafter.name, drafter.paced, drafter.frugal, drafter.glances
    return Adaptive(costs, name=name, paced=paced, frugal=frugal, glances=glances, way=lambda: drafter.way)


def _sequences(most: int) -> tuple[int, ...]:
    """Batch sizes whose passes are measured. Every sequence reads its own context, and rows that are free for one (on a
    GPU) are not for many."""
    return tuple(2**i for i in range(most.bit_length()))


class _Graphs:
    """Captured passes for every model that lives on a GPU, one desk for each; None for the others."""

    def __init__(self, cache: Cache, batch: int, home: torch.device) -> None:
        self.cache, self.batch, self.home = cache, batch, home
        self.desks: dict[tuple[torch.device, int], Any] = {}

    def __call__(self, model: Model, plane: Plane, cache: Cache | None = None) -> Any:
        """A plane lies in the engine's own cache unless its owner says otherwise."""
        device, cache = device_of(model), cache or self.cache
        if device.type != "cuda":
            return None
        from .backends.cuda.graphs import Graphs  # needs triton, which is not installed everywhere
        from .backends.cuda.state import Desk

        own, at = cache is self.cache, (device, id(cache))
        if at not in self.desks:
            clock = None if own else self.desks.get((device, id(self.cache)))
            self.desks[at] = Desk(cache, device, self.batch, home=own and device == self.home, clock=clock)
        return Graphs(model, plane, self.desks[at])
