"""Outrider: lossless speculative decoding. A drafter proposes tokens; the target emits what it would emit alone."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, ModelError, OutriderError

# OpenMP threads spin while they wait, and on a busy machine they take the core that another thread needs: a pass of
# 17 ms took 190 ms beside one busy process, and 45 ms with this short spin, which costs an idle machine nothing
# (docs/log/). OpenMP reads the variable when torch is imported; a policy that the user has set is kept.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

try:
    __version__ = version("outrider")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0.1.0"

if TYPE_CHECKING:
    from .drafters import Drafter, DraftRequest, Traits, register
    from .export.accelerate import Accelerated, accelerate
    from .llm import LLM, Completion, Result
    from .models.detokenizer import Piece
    from .server.async_llm import AsyncLLM
    from .types import Draft, SamplingParams, Tree, chain

_HOMES = {
    "LLM": "llm", "AsyncLLM": "server.async_llm", "Completion": "llm", "Result": "llm", "Piece": "models.detokenizer",
    "SamplingParams": "params", "Draft": "types", "Tree": "types", "chain": "types", "Drafter": "drafters",
    "register": "drafters", "DraftRequest": "drafters", "Traits": "drafters",
    "accelerate": "export.accelerate", "Accelerated": "export.accelerate",
}  # fmt: skip
__all__ = [
    "LLM", "Accelerated", "AsyncLLM", "Completion", "ConfigError", "Draft", "DraftRequest", "Drafter", "ModelError",
    "OutriderError", "Piece", "Result", "SamplingParams", "Traits", "Tree", "__version__", "accelerate", "chain",
    "register",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import torch only when something needs it: `outrider --help` should not take seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute '{name}'")
    from importlib import import_module

    try:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if name != "AsyncLLM":
            raise
        text = f"AsyncLLM needs {error.name}, which is not installed: pip install 'outrider[serve]'."
        raise ModuleNotFoundError(text, name=error.name) from error
