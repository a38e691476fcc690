"""What drafters with trained weights share: whose weights they are, and in which precision they run.

It knows configurations and targets; it does not know what a drafter computes.
"""

from __future__ import annotations

import torch

from ..backends import Model
from ..errors import ConfigError
from ..models.speculators import HeadConfig
from . import Workspace

_DTYPES = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def precision(space: Workspace) -> torch.dtype:
    """In which a trained drafter computes: draft_dtype, or what the target computes in."""
    name = str(space.option("draft_dtype", default="auto")).removeprefix("torch.")
    if name not in (*_DTYPES, "auto"):
        raise ConfigError(f"There is no draft_dtype '{name}' for a head. Choose one of: auto, {', '.join(_DTYPES)}.")
    return space.target.compute if name == "auto" else _DTYPES[name]


def insist_on_target(config: HeadConfig, target: Model, name: str) -> None:
    """Weights that were trained for another target would only guess wrong: refuse them."""
    for what, expected, actual in (
        ("a hidden size of", config.target_hidden_size, target.config.hidden_size),
        ("a vocabulary of", config.vocab_size, target.config.vocab_size),
    ):
        if expected != actual:
            raise ConfigError(_refusal(config, name, f"its target has {what} {expected}, this one of {actual}"))
    layers = target.config.layers
    if max(config.taps) >= layers:
        raise ConfigError(_refusal(config, name, f"it reads layer {max(config.taps)}, but this target has {layers}"))
    identity = target.identity()
    if config.target_hash and identity is not None and identity != config.target_hash:
        why = f"its target's hash is {config.target_hash}, this one's is {identity}"
        raise ConfigError(_refusal(config, name, why))


def _refusal(config: HeadConfig, name: str, why: str) -> str:
    target = f" ({config.target_name})" if config.target_name else ""
    return (
        f"The head {name} was trained for another target{target}: {why}. Choose a head of this target, or make one "
        f"with `outrider train`."
    )
