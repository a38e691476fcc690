"""A smaller model with the target's vocabulary, drafting chains or trees in a plane of its own.

Its K/V lives in the target's slots, so acceptance, preemption and prefix reuse need no code here: before each draft
the plane is asked what it lacks, and that is fed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..machine import choose_device
from ..models import Model, device_of
from ..models.weigh import weigh
from ..types import Draft, Sequence, Step
from . import Drafter, Memory, Workspace, register
from ._rollout import Rollout

if TYPE_CHECKING:
    from ..models.checkpoint import Checkpoint

DTYPES = ("auto", "int8", "bfloat16", "float32", "float64")


@register("model")
class SmallModel(Drafter):
    """Options: draft_model (a path, a name or a model), draft_dtype, draft_device, tree, tree_width, tree_depth."""

    takes = ("draft_model", "assistant_model", "draft_dtype", "draft_device", "tree", "tree_width", "tree_depth")

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.model = load_draft_model(space)
        shape = self.model.plane_shape
        plane = space.cache.add_plane(*shape, device=device_of(self.model))
        self.rollout = Rollout(self.model, space.cache, plane, source="model", passes=space.passes(self.model, plane))
        self.tree = bool(space.option("tree", default=False))
        self.width = int(space.option("tree_width", default=3))
        self.depth = int(space.option("tree_depth", default=5))

    @property
    def added_memory(self) -> Memory:
        return Memory(weigh(self.model, beside=self.space.target), self.rollout.plane.bytes)

    @classmethod
    def trial_options(cls, target: Model) -> dict[str, Any]:
        return {"draft_model": target}  # the target as its own drafter: always right, never worth it, a fair trial

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        self.rollout.stop_below = self.stop_below
        if self.tree and all(seq.rule == "match" for seq in seqs):
            return self.rollout.trees(seqs, budget, self.width, self.depth)
        return self.rollout.chains(seqs, budget)

    def observe(self, step: Step) -> None:
        """Nothing to do: tokens are the truth, and the plane reconciles to them at the next draft."""


def load_draft_model(space: Workspace) -> Model:
    """The model that was asked for, or given as it is."""
    wanted = space.option("draft_model", "assistant_model", default=None)
    if wanted is None:
        raise ConfigError("The drafter 'model' needs a draft model: give --draft-model PATH (or draft_model=…).")
    if not isinstance(wanted, str) and hasattr(wanted, "forward"):
        model: Model = wanted
        _same_size(model.config.vocab_size, space.target.config.vocab_size)
        return model
    from ..models.load import load_model  # heavy, and only needed for files

    checkpoint = opened(space, wanted)
    same = getattr(space.target, "compute", space.target.dtype)  # what the target computes in, if its weights are int8
    wish = str(space.option("draft_dtype", default=same)).removeprefix("torch.")
    if wish not in DTYPES:
        raise ConfigError(f"There is no draft_dtype '{wish}'. Choose one of: {', '.join(DTYPES)}.")
    device = choose_device(str(space.option("draft_device", default=device_of(space.target))))
    loaded: Any = load_model(checkpoint, wish, space.cache.length, device=device)
    draft_model: Model = loaded.as_drafter() if hasattr(loaded, "as_drafter") else loaded
    return draft_model


def opened(space: Workspace, wanted: str | Path) -> Checkpoint:
    """A draft model's file, once it is clear that it speaks the target's ids; its weights are not read yet."""
    from ..models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(wanted)
    if space.tokenizer is not None:
        _same_vocabulary(checkpoint.tokenizer, space.tokenizer, checkpoint.name)
    return checkpoint


def _same_vocabulary(ours: Any, theirs: Any, name: str) -> None:
    """Ids must mean the same on both sides; sizes may differ by padding, which no tokenizer produces."""
    a, b = ours.vocabulary, theirs.vocabulary
    differ = sum(b.get(piece) != i for piece, i in a.items())
    if differ or len(a) != len(b):
        raise ConfigError(
            f"The draft model {name} has another vocabulary than the target ({len(a)} and {len(b)} pieces, {differ} of "
            f"them different), so its token ids mean something else. Choose a draft model with the same tokenizer, or "
            f"a drafter that needs no model: --drafter suffix."
        )


def _same_size(ours: int, theirs: int) -> None:
    if ours != theirs:
        raise ConfigError(
            f"The draft model has {ours} token ids and the target {theirs}: their vocabularies differ. Choose a draft "
            f"model with the same tokenizer."
        )
