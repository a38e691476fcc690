"""A draft model: a smaller model drafts chains or trees; a different tokenizer is translated automatically.

With the target's vocabulary its K/V lives in a plane over the target's slots, so acceptance, preemption and prefix
reuse need no code here: before each draft the plane is brought up to date. A smaller decoder that was trained for an
encoder–decoder reads with the target's encoder and drafts a short list of tokens (`models.encoder_decoder.DraftFacts`).
With another vocabulary a model drafts in slots of its own, and its drafts are translated (`translate/`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backends import Model, Part
from ..backends.loaded_weights import weight_bytes
from ..backends.machine import choose_device
from ..backends.rows import rows_of
from ..engine.batch import BatchBuilder
from ..engine.cache import Cache, Plane
from ..errors import ConfigError
from ..models.encoder_decoder import DraftFacts
from ..models.precision import NAMES
from ..types import Draft, Sequence
from . import Drafter, DraftRequest, Forecast, Memory, Traits, Workspace, register
from ._rollout import DraftVocabularyRollout, Rollout, draft_vocab
from ._trained import DraftVocabulary
from .translate.alignment import same_vocabulary, tokenizer_of
from .translate.rollout import TOKENS_PER_TARGET_TOKEN, TranslatedRollout, make_rollout

if TYPE_CHECKING:
    from ..models.checkpoint import Checkpoint


SCRATCH = -3_000_000  # id of the sequence that passes are timed with
SCRATCH_CALLS = 3
FORESEEN = (1, 4)  # tokens of the drafts that are timed


@register("model")
class SmallModel(Drafter):
    """Options: draft_model (a path, a name or a model), draft_tokenizer (of a model in memory), translate (auto, tli,
    slem), draft_dtype, draft_device, draft_vocab (draft only the first so many ids, which are the frequent ones), tree,
    tree_width, tree_depth, stop_below (end a draft where its survival is below that; K is then the most)."""

    traits = Traits(
        options=(
            "draft_model", "assistant_model", "draft_tokenizer", "assistant_tokenizer", "translate", "draft_dtype",
            "draft_device", "draft_vocab", "tree", "tree_width", "tree_depth", "stop_below",
        ),
        auto=lambda workspace: workspace.option("draft_model", "assistant_model", default=None) is not None,
        trial=lambda target: {"draft_model": target},  # always accepted, never faster: enough for a trial run
    )  # fmt: skip

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.model, tokenizer, self.model_name, facts = _draft_model(space)
        self.acceptance = facts.acceptance
        _fit_to_target(self.model, facts, space)
        self.translated: TranslatedRollout | None = None
        if _needs_translation(self.model, tokenizer, space):
            if self.model.encoder:
                raise ConfigError(
                    f"The draft model {self.model_name} has an encoder and another vocabulary than the target, and its "
                    "source cannot be translated; choose a draft model with the same tokenizer."
                )
            self.translated = make_rollout(self.model, space, tokenizer)
            self.rollout: Rollout = self.translated
        else:
            plane = space.cache.add_plane(*self.model.plane_shape, device=self.model.device)
            passes = space.passes(self.model, plane)
            if self.model.draft_ids is not None:
                self.rollout = ShortListRollout(self.model, space.cache, plane)
            else:
                part = Part(vocab=draft_vocab(space, self.model.config.vocab_size))
                self.rollout = Rollout(self.model, space.cache, plane, part, source="model", passes=passes)
        self.padded = self.model.config.vocab_size < space.target.config.vocab_size
        self.rollout.record_guesses = space.record_guesses
        self.unread: Any = None  # the device's drafts, where its rounds make them
        self.tree = bool(space.option("tree", default=False))
        self.floor = float(space.option("stop_below", default=0.0))
        self.width = int(space.option("tree_width", default=3))
        self.depth = int(space.option("tree_depth", default=5))
        self.traits = replace(
            self.traits,
            unread=self.rollout.recorded is not None and not self.tree,
            backlog=self._backlog,
            memory=lambda: Memory(weight_bytes(self.model, excluding=space.target), self.rollout.plane.bytes),
            forecast=self._forecast() if self.model.drafts_chains and self.translated is None else None,
        )

    def _forecast(self) -> Forecast | None:
        """Its acceptance as its folder states it, and the seconds of its calls, measured with a scratch token. They
        bring its weights into memory, too: the first draft of a text would seem slower than it is."""
        cache, seq, calls = self.space.cache, Sequence(SCRATCH, [1]), list[tuple[int, int, float]]()
        cache.open(seq)
        try:
            if not cache.reserve(seq, 1, max(FORESEEN)):
                return None
            for tokens in FORESEEN:
                calls.append((1, tokens, min(self._call_seconds(seq, tokens) for _ in range(SCRATCH_CALLS))))
        finally:
            cache.free(seq)
        survival = tuple(accumulate(self.acceptance, mul))
        return Forecast(survival, calls[-1][2], 0.0, tuple(calls)) if survival else None

    def _call_seconds(self, seq: Sequence, tokens: int) -> float:
        begin = time.perf_counter()
        self.rollout.chains([seq], [tokens])
        return time.perf_counter() - begin

    def record(self, rounds: Any) -> None:
        if self.traits.unread and not self.padded:
            self.unread = rounds.draft_with(
                self.model, self.rollout.plane, self.rollout.part, self.rollout.again, self.name
            )
            self.traits = self.traits.in_rounds(rounds.calls)

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budgets = request.seqs, request.budgets
        if request.in_round:
            return request.asked(self.unread, self.name)
        self.rollout.stop_below = max(request.stop_below, self.floor)
        tree = self.tree and all(seq.rule == "match" for seq in seqs)
        if self.translated is not None:
            return self.translated.propose(seqs, budgets, self.width if tree else 0, self.depth)
        if self.padded and any(max(seq.tokens) >= self.model.config.vocab_size for seq in seqs):
            return Draft.empty(len(seqs))  # the target emitted padding, which the draft model has no row for
        rollout = self.rollout
        return rollout.trees(seqs, budgets, self.width, self.depth) if tree else rollout.chains(seqs, budgets)

    def _backlog(self, seq: Sequence) -> int:
        return len(seq.tokens) - self.rollout.plane.holds(seq.id)

    def end(self, seq: Sequence) -> None:
        if self.translated is not None:
            self.translated.sequences.end(seq)

    def notes(self) -> dict[str, Any]:
        return {} if self.translated is None else {"model": {"draft_model": self.model_name} | self.translated.facts()}


class _ShortList(DraftVocabulary):
    def __init__(self, model: Model) -> None:
        assert model.draft_ids is not None
        self.ids, self.vocab_size = model.draft_ids, model.config.vocab_size


class ShortListRollout(DraftVocabularyRollout):
    """A model that has the output rows of some ids only."""

    def __init__(self, model: Model, cache: Cache, plane: Plane) -> None:
        super().__init__(_ShortList(model), model, cache, plane, source="model")

    def _forward(self, packed: BatchBuilder, part: Part) -> Tensor:
        return self.model.forward(rows_of(packed), self.plane, part).logits


def load_draft_model(space: Workspace) -> Model:
    """The draft model of the options, for a drafter that cannot translate: it must have the target's vocabulary."""
    model, tokenizer, name, _ = _draft_model(space)
    if tokenizer is None:
        _check_sizes(model, space)
    else:
        _check_vocabulary(name, tokenizer, space)
    return model


def opened(space: Workspace, wanted: str | Path) -> Checkpoint:
    """A draft model's checkpoint with the target's vocabulary; its weights are not read yet."""
    from ..models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(wanted)
    _check_vocabulary(checkpoint.name, checkpoint.tokenizer, space)
    return checkpoint


def _draft_model(space: Workspace) -> tuple[Model, Any, str, DraftFacts]:
    """The draft model, its tokenizer (None if unknown), its name, and what its folder says about it."""
    wanted = space.option("draft_model", "assistant_model", default=None)
    if wanted is None:
        raise ConfigError("The drafter 'model' needs a draft model: give --draft-model PATH (or draft_model=…).")
    tokenizer = space.option("draft_tokenizer", "assistant_tokenizer", default=None)
    tokenizer = None if tokenizer is None else tokenizer_of(tokenizer)
    if not isinstance(wanted, str) and hasattr(wanted, "forward"):
        return wanted, tokenizer, "in memory", DraftFacts()
    from ..backends.load import load_model  # heavy, and only needed for files
    from ..models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(wanted)
    target = space.target
    usual = target.dtype if (target.dtype, target.device.type) == (torch.int8, "cpu") else target.compute
    dtype = str(space.option("draft_dtype", default=usual)).removeprefix("torch.")
    if dtype not in NAMES:
        raise ConfigError(f"There is no draft_dtype '{dtype}'. Choose one of: {', '.join(NAMES)}.")
    device = choose_device(str(space.option("draft_device", default=space.target.device)))
    length = space.cache.length
    tokenizer = tokenizer or checkpoint.tokenizer
    if space.tokenizer is not None and not same_vocabulary(tokenizer, space.tokenizer):
        length = min(TOKENS_PER_TARGET_TOKEN * length, checkpoint.config.context_length)
    loaded: Any = load_model(checkpoint, dtype, length, device=device)
    facts = DraftFacts.of(checkpoint.path, checkpoint.config.vocab_size)
    return loaded.as_drafter(), tokenizer, checkpoint.name, facts


def _fit_to_target(model: Model, facts: DraftFacts, space: Workspace) -> None:
    """A smaller decoder of this target reads with the target's encoder, and on a CPU drafts from its short list."""
    target, host = space.target, torch.device("cpu")
    alike = model.device == target.device == host and model.dtype == target.dtype
    if not alike or model.reader is None or target.reader is None:
        return
    if facts.target_hash is not None and facts.target_hash == target.identity():
        model.reader.share(target.reader)
    if facts.draft_ids and not int(space.option("draft_vocab", default=0)):
        model.shorten(torch.tensor(facts.draft_ids))


def _needs_translation(model: Model, tokenizer: Any, space: Workspace) -> bool:
    """Whether the vocabularies differ, or the draft model has ids that the target has no row for."""
    if tokenizer is None or space.tokenizer is None:
        _check_sizes(model, space)
        return False
    more = model.config.vocab_size > space.target.config.vocab_size
    return more or not same_vocabulary(tokenizer, space.tokenizer)


def _check_vocabulary(name: str, tokenizer: Any, space: Workspace) -> None:
    if space.tokenizer is None or same_vocabulary(tokenizer, space.tokenizer):
        return
    own, target = tokenizer.vocabulary, space.tokenizer.vocabulary
    differ = sum(target.get(piece) != i for piece, i in own.items())
    raise ConfigError(
        f"The draft model {name} has another vocabulary than the target ({len(own)} and {len(target)} pieces, {differ} "
        f"of them different), which only --drafter model can translate. Use that, or a draft model with the same "
        f"tokenizer."
    )


def _check_sizes(model: Model, space: Workspace) -> None:
    own, target = model.config.vocab_size, space.target.config.vocab_size
    if own != target:
        raise ConfigError(
            f"The draft model has {own} token ids and the target {target}: their vocabularies differ. Give the draft "
            f"model's tokenizer (draft_tokenizer=…), or a draft model with the same one."
        )
