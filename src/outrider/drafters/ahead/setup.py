"""Which model drafts ahead, and where it runs: in a process, a thread or a second CUDA stream.

A file is read by a process. A model object runs in a thread, and a model on the target's own GPU in a thread with a
CUDA stream of its own, because two processes would take turns on the GPU. A trained head reads the target's hidden
states, so it stays in the target's process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from ...backends import Model
from ...backends.loaded_weights import weight_bytes
from ...backends.machine import choose_device, usable_cores
from ...errors import ConfigError
from .. import Drafter, Workspace, lookup, names
from ..model import SmallModel, load_draft_model, opened
from .forks import Forker
from .shared_queue import QueueSizes
from .worker import ProcessHost, ThreadHost, WorkerHost, build_forker

ROWS_PER_LANE = 24  # outcomes of a response for each sequence, on average at most
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class DraftSource:
    """Who drafts, and where."""

    host: WorkerHost
    features: Any = None  # the target's hidden states, for a head
    taps: tuple[int, ...] = ()
    inline: Drafter | None = None  # the same model in the engine's own stream, for drafts just in time


def draft_source(space: Workspace) -> DraftSource:
    """The draft model from the options, else the head that was given or belongs to the target."""
    if os.name == "nt":
        raise ConfigError(
            "Drafting ahead needs pipes that can be waited for, which Windows lacks: choose --drafter auto."
        )
    model = space.option("draft_model", "assistant_model", default=None)
    if model is None:
        return _head(space)
    if space.target.encoder:
        raise ConfigError("The drafter 'ahead' does not give a source to its draft model's encoder; use 'model'.")
    in_memory = not isinstance(model, str) and hasattr(model, "forward")
    device = model.device if in_memory else choose_device(str(space.option("draft_device", default="cpu")))
    in_thread = in_memory or shares_gpu(device, space.target.device)
    kind = space.option("ahead_place", default="thread" if in_thread else "process")
    if kind not in ("process", "thread"):
        raise ConfigError(f"There is no ahead_place '{kind}'; choose process or thread.")
    if kind == "thread":
        return _thread(space, device)
    if in_memory:
        raise ConfigError("A process reads its draft model from a file: give draft_model=PATH, or ahead_place=thread.")
    return _process(space, str(model))


def _spec(space: Workspace) -> dict[str, Any]:
    """What `worker.build_forker` needs, in JSON types."""
    return {
        "slots": space.cache.slots,
        "lanes": space.cache.table.shape[0],
        "length": space.cache.length,
        "vocabulary": space.target.config.vocab_size,
        "skip_layers": sorted({int(number) for number in space.option("skip_layers", default=())}),
        "target_noise": bool(space.option("ahead_noise", default=True)),
    }


def _process(space: Workspace, model: str) -> DraftSource:
    checkpoint, spec = opened(space, model), _spec(space)
    threads = 1 if space.target.device.type == "cpu" else max(usable_cores() // 2, 1)
    spec |= {
        "model": model,
        "dtype": str(space.option("draft_dtype", default="auto")),
        "device": str(space.option("draft_device", default="cpu")),
        "threads": number_option(space, "ahead_threads", threads, 1, 1024),
        "length": min(space.cache.length, checkpoint.config.context_length),
    }
    return DraftSource(ProcessHost(_sizes(space), spec))


def _thread(space: Workspace, device: torch.device) -> DraftSource:
    model: Model = load_draft_model(replace(space, options=space.options | {"draft_device": str(device)}))
    spec, inline = _spec(space), None
    host = _thread_host(space, partial(build_forker, model, spec), model)
    if not spec["skip_layers"] and model.config.vocab_size == spec["vocabulary"]:  # else `model` drafts differently
        inline = SmallModel(replace(space, options=space.options | {"tree": False, "draft_model": model}))
    return DraftSource(host, inline=inline)


def _head(space: Workspace) -> DraftSource:
    head_applies = lookup("head").traits.auto if "head" in names() else None
    if head_applies is None or not head_applies(space):
        raise ConfigError(
            "The drafter 'ahead' needs a draft model or a trained head, and no head comes along for this model: give "
            "--draft-model PATH (or draft_model=…), or a head's folder with --set head=PATH."
        )
    if space.option("ahead_place", default="thread") != "thread":
        raise ConfigError("A head reads the target's hidden states in the target's own process: leave ahead_place out.")
    from .head_forks import HeadForker, head_source

    head, features, taps, inline = head_source(space)
    spec = _spec(space)

    def make() -> Forker:
        forker = HeadForker(head, spec["slots"], spec["lanes"], spec["length"], features)
        forker.target_noise = spec["target_noise"]
        return forker

    return DraftSource(_thread_host(space, make, head), features, taps, inline)


def _thread_host(space: Workspace, make: Callable[[], Forker], model: Any) -> WorkerHost:
    host = ThreadHost(_sizes(space), make, model.device)
    host.queue["bytes"][0] = weight_bytes(model, excluding=space.target)
    return host


def trial_options(target: Model) -> dict[str, Any]:
    """Options that work for any target: its eagle3 head if there is one, else the target as its own draft model."""
    if "head" in names():
        from .head_forks import eagle_head

        if (folder := eagle_head(target)) is not None:
            return {"head": folder}
    return {"draft_model": target}


def shares_gpu(one: torch.device, other: torch.device) -> bool:
    """Whether both are the same GPU; `cuda` means the first."""
    return one.type == other.type == "cuda" and (one.index or 0) == (other.index or 0)


def _sizes(space: Workspace) -> QueueSizes:
    lanes = space.cache.table.shape[0]
    return QueueSizes(lanes, space.cache.length, lanes * ROWS_PER_LANE)


def number_option(space: Workspace, name: str, default: Number, low: int, high: int) -> Number:
    """An option of the default's type; an int is also a float."""
    value, whole = space.option(name, default=default), isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
        kind = "whole number" if whole else "number"
        raise ConfigError(f"{name} is {value!r}, but it must be a {kind} from {low} to {high}.")
    return type(default)(value)
