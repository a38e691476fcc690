"""What drafters with trained weights share: the draft vocabulary, the target check and the precision.

It knows configurations and targets, not what a drafter computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import Model
from ..errors import ConfigError
from ..models.published import PerPositionConfig
from ..models.speculators import HeadConfig
from . import Workspace

_DTYPES = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class DraftVocabulary:
    """A network that scores a reduced vocabulary of D ids."""

    ids: Tensor  # [D] the target's id of each draft id
    vocab_size: int  # V, the target's

    def spread(self, scores: Tensor) -> Tensor:
        """Scores [..., D] as logits over the target's ids [..., V]; -inf where there is no draft id."""
        logits = scores.new_full((*scores.shape[:-1], self.vocab_size), -torch.inf)
        logits[..., self.ids.to(scores.device)] = scores
        return logits


def precision(space: Workspace) -> torch.dtype:
    """The dtype a trained drafter computes in: draft_dtype, or the target's."""
    name = str(space.option("draft_dtype", default="auto")).removeprefix("torch.")
    if name not in (*_DTYPES, "auto"):
        raise ConfigError(f"There is no draft_dtype '{name}' for a head. Choose one of: auto, {', '.join(_DTYPES)}.")
    return space.target.compute if name == "auto" else _DTYPES[name]


def insist_on_target(config: HeadConfig | PerPositionConfig, target: Model, name: str) -> None:
    """Refuse weights that were trained for another target: their drafts would be wrong."""
    sizes = target.config
    reason = ""
    if config.target_hidden_size != sizes.hidden_size:
        reason = f"its target has a hidden size of {config.target_hidden_size}, this one of {sizes.hidden_size}"
    elif config.vocab_size != sizes.vocab_size:
        reason = f"its target has a vocabulary of {config.vocab_size}, this one of {sizes.vocab_size}"
    elif not 0 <= min(config.taps) <= max(config.taps) < sizes.layers:
        outside = max(config.taps) if max(config.taps) >= sizes.layers else min(config.taps)
        reason = f"it reads layer {outside}, but this target has {sizes.layers}"
    elif config.target_hash and (identity := target.identity()) not in (None, config.target_hash):
        reason = f"its target's hash is {config.target_hash}, this one's is {identity}"
    if reason:
        trained_for = f" ({config.target_name})" if config.target_name else ""
        raise ConfigError(
            f"The head {name} was trained for another target{trained_for}: {reason}. Choose a head of this target, or "
            f"make one with `outrider train`."
        )
