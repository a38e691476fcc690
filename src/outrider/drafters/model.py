"""A smaller model, drafting chains or trees in a plane of its own.

With the target's vocabulary its K/V lives in the target's slots, so acceptance, preemption and prefix reuse need no
code here: before each draft the plane is asked what it lacks, and that is fed. With another vocabulary what it says is
translated (`_translate.py`), in slots of its own; that is found out here, not asked for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import Model
from ..backends.machine import choose_device
from ..backends.weigh import weigh
from ..errors import ConfigError
from ..types import Draft, Sequence
from . import Drafter, DraftRequest, Memory, Traits, Workspace, register
from ._rollout import Rollout
from .translate.alignment import same_words, tokenizer_of
from .translate.rollout import LONGER, Translated, facts, translated

if TYPE_CHECKING:
    from ..models.checkpoint import Checkpoint

DTYPES = ("auto", "int8", "bfloat16", "float32", "float64")


@register("model")
class SmallModel(Drafter):
    """Options: draft_model (a path, a name or a model), draft_tokenizer (of a model in memory), translate (auto, tli,
    slem), draft_dtype, draft_device, tree, tree_width, tree_depth."""

    traits = Traits(
        options=(
            "draft_model", "assistant_model", "draft_tokenizer", "assistant_tokenizer", "translate", "draft_dtype",
            "draft_device", "tree", "tree_width", "tree_depth",
        ),
        auto=lambda workspace: workspace.option("draft_model", "assistant_model", default=None) is not None,
        trial=lambda target: {"draft_model": target},  # its own drafter: always right, never worth it, a fair trial
    )  # fmt: skip

    def __init__(self, space: Workspace) -> None:
        self.model, words, self.model_name = _draft_model(space)
        self.translated: Translated | None = None
        if _needs_translation(self.model, words, space):
            self.translated = translated(self.model, space, words)
            self.rollout: Rollout = self.translated
        else:
            plane = space.cache.add_plane(*self.model.plane_shape, device=self.model.device)
            passes = space.passes(self.model, plane)
            self.rollout = Rollout(self.model, space.cache, plane, source="model", passes=passes)
        self.padded = self.model.config.vocab_size < space.target.config.vocab_size
        self.rollout.record_guesses = space.record_guesses
        self.tree = bool(space.option("tree", default=False))
        self.width = int(space.option("tree_width", default=3))
        self.depth = int(space.option("tree_depth", default=5))
        self.traits = replace(
            self.traits,
            unread=self.rollout.recorded is not None and not self.tree,
            memory=lambda: Memory(weigh(self.model, beside=space.target), self.rollout.plane.bytes),
        )

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budget = request.seqs, request.budgets
        self.rollout.stop_below = request.stop_below
        tree = self.tree and all(seq.rule == "match" for seq in seqs)
        if self.translated is not None:
            return self.translated.propose(seqs, budget, self.width if tree else 0, self.depth)
        if self.padded and any(max(seq.tokens) >= self.model.config.vocab_size for seq in seqs):
            return Draft.empty(len(seqs))  # the target emitted padding, which the draft model has no row for
        if tree:
            return self.rollout.trees(seqs, budget, self.width, self.depth)
        return self.rollout.chains(seqs, budget)

    def backlog(self, seq: Sequence) -> int:
        return len(seq.tokens) - self.rollout.plane.holds(seq.id)

    def end(self, seq: Sequence) -> None:
        if self.translated is not None:
            self.translated.shadows.end(seq)

    def notes(self) -> dict[str, Any]:
        return {} if self.translated is None else {"model": {"draft_model": self.model_name} | facts(self.translated)}


def load_draft_model(space: Workspace) -> Model:
    """The model that was asked for, or given as it is, if it speaks the target's ids."""
    model, words, name = _draft_model(space)
    if words is not None and space.tokenizer is not None and not same_words(words, space.tokenizer):
        raise _other_words(name, words, space.tokenizer)
    if words is None and model.config.vocab_size != space.target.config.vocab_size:
        raise _unknown_words(model.config.vocab_size, space.target.config.vocab_size)
    return model


def _draft_model(space: Workspace) -> tuple[Model, Any, str]:
    """The model, its tokenizer where that is known, and its name."""
    wanted = space.option("draft_model", "assistant_model", default=None)
    if wanted is None:
        raise ConfigError("The drafter 'model' needs a draft model: give --draft-model PATH (or draft_model=…).")
    words = space.option("draft_tokenizer", "assistant_tokenizer", default=None)
    words = None if words is None else tokenizer_of(words)
    if not isinstance(wanted, str) and hasattr(wanted, "forward"):
        return wanted, words, "in memory"
    from ..backends.load import load_model  # heavy, and only needed for files
    from ..models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(wanted)
    same = space.target.compute  # what the target computes in, if its weights are int8
    wish = str(space.option("draft_dtype", default=same)).removeprefix("torch.")
    if wish not in DTYPES:
        raise ConfigError(f"There is no draft_dtype '{wish}'. Choose one of: {', '.join(DTYPES)}.")
    device = choose_device(str(space.option("draft_device", default=space.target.device)))
    length = space.cache.length
    words = words or checkpoint.tokenizer
    if space.tokenizer is not None and not same_words(words, space.tokenizer):
        length = min(LONGER * length, checkpoint.config.context_length)  # the same text may be more tokens
    loaded: Any = load_model(checkpoint, wish, length, device=device)
    draft_model: Model = loaded.as_drafter()
    return draft_model, words, checkpoint.name


def opened(space: Workspace, wanted: str | Path) -> Checkpoint:
    """A draft model's file, once it is clear that it speaks the target's ids; its weights are not read yet."""
    from ..models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(wanted)
    if space.tokenizer is not None and not same_words(checkpoint.tokenizer, space.tokenizer):
        raise _other_words(checkpoint.name, checkpoint.tokenizer, space.tokenizer)
    return checkpoint


def _needs_translation(model: Model, words: Any, space: Workspace) -> bool:
    """Whether the two have different ids for the same words, or ids that the other has no row for."""
    ours, theirs = model.config.vocab_size, space.target.config.vocab_size
    if words is None or space.tokenizer is None:
        if ours != theirs:
            raise _unknown_words(ours, theirs)
        return False
    return ours > theirs or not same_words(words, space.tokenizer)


def _other_words(name: str, ours: Any, theirs: Any) -> ConfigError:
    a, b = ours.vocabulary, theirs.vocabulary
    differ = sum(b.get(piece) != i for piece, i in a.items())
    return ConfigError(
        f"The draft model {name} has another vocabulary than the target ({len(a)} and {len(b)} pieces, {differ} of "
        f"them different), which only --drafter model can translate. Use that, or a draft model with the same "
        f"tokenizer."
    )


def _unknown_words(ours: int, theirs: int) -> ConfigError:
    return ConfigError(
        f"The draft model has {ours} token ids and the target {theirs}: their vocabularies differ. Give the draft "
        f"model's tokenizer (draft_tokenizer=…), or a draft model with the same one."
    )
