"""The options of drafters that learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import ConfigError
from .. import Workspace
from .learner import LearningPlan

OPTIONS = ("learn", "learn_from", "learn_every", "learn_cap_ms", "learn_share", "learn_rate")


def plan_of(space: Workspace, plan: LearningPlan) -> LearningPlan:
    """A plan with what the options of this workspace change."""
    if space.target.device.type == "cuda":
        plan = replace(plan, slice=plan.batch)  # slices do not block a step there
    return replace(
        plan,
        every=_positive(space, "learn_every", plan.every, int),
        cap=_positive(space, "learn_cap_ms", plan.cap * 1e3, float) / 1e3,
        share=_positive(space, "learn_share", plan.share, float),
        rate=_positive(space, "learn_rate", plan.rate, float),
        rank=min(plan.rank, 2 * space.target.config.hidden_size),
    )


def _positive(space: Workspace, name: str, default: Any, kind: Any) -> Any:
    value = space.option(name, default=default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{name} is {value!r}, but it must be a number above 0.")
    return kind(value)
