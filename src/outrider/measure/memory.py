"""What each drafter adds to the memory that the target takes anyway: weights, and places for K/V.

Drafters are made beside a cache of a few slots, asked, and let go: nothing is run, and the engine stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.weigh import weigh
from ..drafters import Workspace, make, names
from ..engine.cache import Cache
from ..errors import OutriderError
from ..llm import LLM

_SLOTS = 64  # of the trial; K/V grows with them


@dataclass(frozen=True)
class Addition:
    """Bytes."""

    name: str
    weights: int
    kv: int  # for as many slots as the engine has


def target_memory(llm: LLM) -> Addition:
    """The target's own."""
    return Addition("target", weigh(llm.target), llm.engine.target.plane.bytes)


def additions(llm: LLM) -> list[Addition]:
    """Every drafter that runs with the options that were given; the others lack something."""
    found = []
    for name in names():
        cache = Cache(_SLOTS, 1, llm.engine.cache.length, llm.engine.cache.device)
        plane = cache.add_plane(*llm.target.plane_shape)
        try:
            drafter = make(name, Workspace(llm.target, cache, plane, llm.config.options, llm.tokenizer))
        except OutriderError:
            continue
        memory = drafter.traits.memory()
        found.append(Addition(name, memory.weights, memory.kv * llm.engine.cache.slots // _SLOTS))
    return found
