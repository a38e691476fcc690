"""An engine from its parts: the one place where they meet."""

from __future__ import annotations

from typing import Any

from .cache import Cache
from .config import Config
from .control import Adaptive, Controller, Costs, Fixed
from .drafters import Workspace, make
from .engine import Engine, Listener
from .models import Model
from .profile import CostFile, target_costs
from .runners.eager import Eager
from .scheduler import Scheduler

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
    cache = Cache(config.slots_for(length), config.max_batch + _KEPT_PREFIXES, length)
    plane = cache.add_plane(*model.plane_shape)
    drafter = make(config.drafter, Workspace(model, cache, plane, config.options, tokenizer))
    controller: Controller
    if drafter.name == "off":
        controller = Fixed(0)
    elif config.k == "auto":
        known = (costs or CostFile()).get(lambda: target_costs(model, cache, plane))
        controller = Adaptive(Costs(known), name=drafter.name)
    else:
        controller = Fixed(int(config.k))
    scheduler = Scheduler(cache, plane, config.max_batch, config.max_rows)
    runner = Eager(model, plane)
    return Engine(runner, cache, drafter, controller, scheduler, model.config.vocab_size, listeners)
