"""Where `ahead` drafts, and with what: a draft model in a process, in a thread or in a stream of its own, or a head.

A file goes to a process, a model object to a thread, and a model on the target's own GPU to a thread with a CUDA stream
of its own, so that both work side by side there (two processes would take turns). A trained head reads what the target
saw, so it stays in the target's process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...backends import Model, Part
from ...backends.loaded_weights import weight_bytes
from ...backends.machine import choose_device
from ...errors import ConfigError
from .. import Drafter, Workspace, lookup, names
from ..model import SmallModel, load_draft_model, opened
from .forks import Forker
from .shared_queue import Sizes
from .worker import capture
from .worker_host import Place, Process, Thread

ROWS = 24  # outcomes of an answer for each line of the table, at most


@dataclass(frozen=True)
class Post:
    """Who drafts, and where."""

    place: Place
    features: Any = None  # what a head is shown of the target
    taps: tuple[int, ...] = ()
    own: Drafter | None = None  # the same drafter in the engine's own stream, for drafts just in time

    @property
    def repeats(self) -> bool:
        """Whether what is prepared is what would be drafted just in time; a head would know more then."""
        return self.features is None


def posted(space: Workspace) -> Post:
    """A draft model if one was asked for, else the head that was asked for or belongs to the target."""
    wanted = space.option("draft_model", "assistant_model", default=None)
    if wanted is None:
        return _head(space)
    in_memory = not isinstance(wanted, str) and hasattr(wanted, "forward")
    device = wanted.device if in_memory else choose_device(str(space.option("draft_device", default="cpu")))
    here = in_memory or shares_gpu(device, space.target.device)
    kind = space.option("ahead_place", default="thread" if here else "process")
    if kind not in ("process", "thread"):
        raise ConfigError(f"There is no ahead_place '{kind}'; choose process or thread.")
    if kind == "thread":
        return _thread(space, device)
    if in_memory:
        raise ConfigError("A process reads its draft model from a file: give draft_model=PATH, or ahead_place=thread.")
    return Post(_process(space, str(wanted)))


def _process(space: Workspace, wanted: str) -> Place:
    checkpoint, sizes = opened(space, wanted), _sizes(space)
    spec = {
        "model": wanted, "dtype": str(space.option("draft_dtype", default="auto")),
        "device": str(space.option("draft_device", default="cpu")), "threads": _threads(space),
        "slots": space.cache.slots, "lines": sizes.lines, "skip_layers": sorted(_skipped(space)),
        "length": min(sizes.length, checkpoint.config.context_length), "noised": _noised(space),
        "vocabulary": space.target.config.vocab_size,
    }  # fmt: skip
    return Process(sizes, spec)


def _thread(space: Workspace, device: torch.device) -> Post:
    model: Model = load_draft_model(replace(space, options=space.options | {"draft_device": str(device)}))
    sizes, skip, noised = _sizes(space), _skipped(space), _noised(space)
    part, slots, vocabulary = (
        Part(skip_attention=skip, skip_mlp=skip),
        space.cache.slots,
        space.target.config.vocab_size,
    )

    def make() -> Forker:
        forker = Forker(model, slots, sizes.lines, sizes.length, part, vocabulary)
        forker.noised = noised
        capture(forker, model, sizes.lines)
        return forker

    place = _weighed(Thread(sizes, make, model.device), space, model)
    plain = not skip and model.config.vocab_size == vocabulary  # what the drafter `model` makes of it is the same
    return Post(place, own=SmallModel(_given(space, draft_model=model)) if plain else None)


def _given(space: Workspace, **options: Any) -> Workspace:
    """For the same drafter where it drafts chains just in time: it is in memory already."""
    return replace(space, options=space.options | {"tree": False} | options)


def _head(space: Workspace) -> Post:
    """A trained head, where the drafter `head` exists."""
    if not has_head(space):
        raise ConfigError(
            "The drafter 'ahead' needs a draft model or a trained head, and no head comes along for this model: give "
            "--draft-model PATH (or draft_model=…), or a head's folder with --set head=PATH."
        )
    if space.option("ahead_place", default="thread") != "thread":
        raise ConfigError("A head reads the target's hidden states in the target's own process: leave ahead_place out.")
    from .head_forks import HeadForker, head_source

    head, features, taps, own = head_source(space)
    sizes, slots, noised = _sizes(space), space.cache.slots, _noised(space)

    def make() -> Forker:
        forker = HeadForker(head, slots, sizes.lines, sizes.length, features)
        forker.noised = noised
        return forker

    return Post(_weighed(Thread(sizes, make, head.device), space, head), features, taps, own)


def has_head(space: Workspace) -> bool:
    uses_head = lookup("head").traits.auto if "head" in names() else None
    return uses_head is not None and uses_head(space)


def trial_options(target: Model) -> dict[str, Any]:
    """With the head that belongs to this target if it can draft ahead; else the target is its own draft model."""
    if "head" in names():
        from .head_forks import eagle_head

        if (folder := eagle_head(target)) is not None:
            return {"head": folder}
    return {"draft_model": target}


def shares_gpu(one: torch.device, other: torch.device) -> bool:
    """Whether both are the same GPU; `cuda` is its first."""
    return one.type == other.type == "cuda" and (one.index or 0) == (other.index or 0)


def _weighed(place: Place, space: Workspace, model: Any) -> Place:
    place.mail["bytes"][0] = weight_bytes(model, excluding=space.target)
    return place


def _sizes(space: Workspace) -> Sizes:
    lines = space.cache.table.shape[0]
    return Sizes(lines, space.cache.length, lines * ROWS)


def _skipped(space: Workspace) -> frozenset[int]:
    return frozenset(int(number) for number in space.option("skip_layers", default=()))


def _noised(space: Workspace) -> bool:
    return bool(space.option("ahead_noise", default=True))


def _threads(space: Workspace) -> int:
    """Beside a target on the CPU one core, beside one on a GPU half of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return whole(space, "ahead_threads", 1 if space.target.device.type == "cpu" else max(cores // 2, 1), 1, 1024)


def whole(space: Workspace, name: str, default: int, low: int, high: int) -> int:
    value = space.option(name, default=default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}, but it must be a whole number from {low} to {high}.")
    return value


def share(space: Workspace, name: str) -> float:
    """A number from 0 to 1; 1 where nothing was said."""
    value = space.option(name, default=1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value!r}, but it must be a number from 0 to 1.")
    return float(value)
