"""A trained head on the target's own features (EAGLE, a block of masks, MTP, Medusa, an MLP speculator).

The head is a folder that `outrider train` wrote for this target, or that somebody has published for it, or a layer of
the target's own checkpoint (MTP). It reads hidden
states that verification computes anyway, so it needs a layer or two where a draft model needs many. Its K/V lives in
the target's slots. Missed features cost acceptance, never correctness.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch

from ...backends import Model
from ...backends.cpu.blocks import BlockTransformer
from ...backends.cpu.quantise import FORMAT
from ...backends.loaded_weights import (
    embedding_of,
    is_embedding,
    is_output_matrix,
    output_norm,
    output_product,
    output_rows,
    row_reader,
    weight_bytes,
)
from ...backends.rows import rows_of
from ...backends.transformers.mtp import mtp_of_folder
from ...control.costs import Line
from ...engine.cache import Plane
from ...errors import ConfigError, ModelError
from ...models.blocks import narrowed
from ...models.paths import cache_folder
from ...models.published import PerPositionConfig, PublishedHead, Reading, head_folder, is_own, read_published
from ...models.speculators import (
    CONFIG,
    DFLASH,
    EAGLE1,
    MTP,
    HeadConfig,
    HeadTensors,
    random_head,
    read_config,
    target_ids,
)
from ...types import Draft, Sequence, Step, Tree
from .. import Drafter, DraftRequest, Forecast, Memory, Prices, Traits, Workspace, register
from .._learning.options import OPTIONS
from .._trained import insist_on_target, precision
from .dflash import DFlashHead, DFlashRollout
from .features import CommittedRows, FeatureCache, HeadBatch, ObservedFeatures, StreamFeatures
from .learning import HeadLearning
from .mtp import mtp_head, mtp_readings
from .network import Head, read_head
from .per_position import PerPositionHead, PerPositionRollout
from .readings import choose_reading
from .rollout import HeadRollout
from .vocabulary import LearntVocabulary

SHIPPED = Path(__file__).parent / "shipped"
HEADS = ("eagle3", "block")  # kinds; the adapter of an early exit is not a head
INITIAL_FLOOR = 0.3  # before a pass was timed: a first chain that is too long would make the drafter look expensive
SCRATCH = -2_000_000  # id of the sequence whose passes are timed at the start
SCRATCH_ROWS, SCRATCH_PASSES = 64, 4
PACKING = 2  # of a head's products in the cache; a change makes old files be built again
PROMPT = 32  # tokens that a head has not read, from which on they are a prompt
OUTPUT = "Q4_K"  # of output rows from a target in larger blocks: they are most of what a drafted token reads
ROWS = 2  # the cost of one more row is averaged over this many: the next one may begin a new tile


class Pace:
    """When a chain is long enough, from the cost of one more token and one more row and its chance of survival.

    Stopping early changes the length of a chain, never its tokens.
    """

    def __init__(self, fixed: float | None = None) -> None:
        self.fixed = fixed  # the option stop_below
        self.drafts = Line()  # seconds of a draft by its passes
        self.confidence = 0.6  # mean probability of a token after the first

    @property
    def seconds(self) -> float | None:
        """What one more token costs."""
        return self.drafts.slope if self.drafts.n else None

    def floors(self, prices: Prices | None, longest: int, sequences: int = 1) -> list[float]:
        """The survival that the last of 1, 2, … tokens must have for the next one to be worth its pass and its row.

        The first rows may be free and later ones dear, so that each length has its own floor.
        """
        if self.fixed is not None:
            return [self.fixed]
        if prices is None:
            return [0.0]
        seconds = self.seconds
        if seconds is None:
            return [INITIAL_FLOOR]
        drafting, confidence = prices.speed * seconds, max(self.confidence, 0.05)
        rows = list[float]()  # price of 1, 2, … rows for each sequence, as far as it may be paid
        while len(rows) < longest + ROWS and (not rows or rows[-1] * sequences <= prices.limit):
            rows.append(prices.price(sequences * (len(rows) + 1)) / sequences)
        costs = (drafting + (after - now) / ROWS for now, after in zip(rows, rows[ROWS:], strict=False))
        floors = [min(cost / confidence, 1.0) for cost in costs]
        return floors if len(floors) == longest else [*floors, 1.0]

    def observe(self, step: Step, passes: int) -> None:
        """Time the passes of this step's draft; steps that also read a prompt are left out."""
        if passes and not any(turn.feed > 1 for turn in step.turns):
            self.drafts.add(passes, step.clock["draft"])

    def drafted(self, tree: Tree) -> None:
        """Update the mean confidence with the tokens after the first: each node's first child is its likeliest."""
        survival, parents = tree.survival or [], {-1}
        for parent, after in zip(tree.parents, survival, strict=False):
            if parent not in parents and survival[parent] > 0:
                self.confidence += 0.02 * (after / survival[parent] - self.confidence)
            parents.add(parent)


ROUND_TREE = {"width": 5, "depth": 6}  # in rounds, where a level costs what a token of a chain does


@register("head")
class TrainedHead(Drafter):
    """Options: head (a folder, a GGUF file, mtp, or a loaded Head), draft_dtype, stop_below (the survival at which a
    chain ends), tree, tree_width, tree_depth, learn_vocabulary (draft what the text uses and training did not; by
    default on a CPU), learn (the head itself learns from what the target emits), learn_phrases (so does a memory beside
    it; CPU), learn_correction (train the head's correction; by default on a GPU), learn_from, learn_every,
    learn_cap_ms, learn_share, learn_rate."""

    traits = Traits(
        options=(
            *("head", "draft_dtype", "stop_below", "tree", "tree_width", "tree_depth"),
            *("learn_vocabulary", "learn_phrases", "learn_correction", *OPTIONS),
        ),
        auto=lambda workspace: configured_head(workspace) is not None,
        trial=lambda target: _trial(target),
    )

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        loaded = open_head(space)
        head, self.about = loaded.head, loaded
        config = head.config
        plane = space.cache.add_plane(*head.plane_shape, device=head.device)
        model: Any = head  # it runs as a model does, over rows and a plane
        attends = not isinstance(head, PerPositionHead)
        passes: Any = space.passes(model, plane) if attends else None
        self.features: FeatureCache
        graphs: Any = None
        taps = tuple[int, ...]()
        observes = passes is None and (attends or head.device.type != "cuda")
        if observes and not space.target.keeps_streams:
            taps = config.taps
            self.features = ObservedFeatures(taps)
        else:  # the target's passes leave their hidden states in the plane: no taps are needed
            dtype = torch.float32 if observes else head.compute  # that of the passes' residual stream
            space.plane.keep_streams(config.taps, config.target_hidden_size, dtype)
            self.features = StreamFeatures(config.taps, space.cache, space.plane)
        if passes is not None:
            from .captured import HeadGraphs  # these need triton
            from .dflash_captured import BlockGraphs

            graphs = (BlockGraphs if config.kind == DFLASH else HeadGraphs)(passes, space.plane, "head")
        self.rollout: HeadRollout | PerPositionRollout
        if isinstance(head, PerPositionHead):
            self.rollout = PerPositionRollout(head, space.cache, plane, self.features)
        elif isinstance(head, DFlashHead):
            self.rollout = DFlashRollout(head, space.cache, plane, self.features, graphs)
        else:
            self.rollout = HeadRollout(head, space.cache, plane, self.features, graphs)
        self.rollout.record_guesses = space.record_guesses
        shape = space.option("tree", default=None)
        self.tree, self.tree_in_rounds = bool(shape), shape is None or bool(shape)  # there its rows are cheap
        block = not isinstance(config, PerPositionConfig) and config.parallel
        self.width = int(space.option("tree_width", default=8 if block else 3))  # a block's branches cost nothing
        self.depth = int(space.option("tree_depth", default=config.block))
        width, depth = (int(space.option(f"tree_{side}", default=n)) for side, n in ROUND_TREE.items())
        self.shape_in_rounds = (width, depth)
        floor = space.option("stop_below", default=None)
        self.pace = Pace(None if floor is None else float(floor))
        unread = graphs is not None and not self.tree
        self.traits = replace(
            self.traits,
            taps=taps,
            watches=bool(taps),
            unread=unread,
            self_limiting=head.device.type == "cpu" and not (self.tree or unread),
            backlog=partial(_backlog, plane),  # traits that refer to `self` would keep it beyond its last user
            forecast=self._forecast(),
            memory=partial(_memory, self.rollout, space.target),
        )
        self.reads = False  # whether the latest draft read a prompt: its seconds are no token's
        self.unread: Any = None  # the device's drafts, where its rounds make them
        self.learning = self._learning(head)
        follows = head.device.type == "cpu" or self.learning is not None  # alone it has not been timed on a GPU
        self.vocabulary = learnt_vocabulary(space, head) if space.option("learn_vocabulary", default=follows) else None

    def _learning(self, head: Head | PerPositionHead) -> HeadLearning | None:
        """What learns, with the option `learn`, or with weights to start from."""
        space, rollout = self.space, self.rollout
        if not space.option("learn", default=False) and space.option("learn_from", default=None) is None:
            return None
        learns = isinstance(head, Head) and head.config.kind in HEADS
        if not isinstance(head, Head) or not learns or not isinstance(rollout, HeadRollout):
            raise ConfigError(f"{self.about.format} cannot learn while it serves: leave learn out.")
        learning = HeadLearning(head, rollout, space)
        self.traits = replace(self.traits, learning=learning, watches=True)
        return learning

    def record(self, rounds: Any) -> None:
        heads = self.rollout.graphs
        if heads is None or heads.head.config.parallel:
            return
        from .rounds import HeadRounds, fits  # need triton

        tree = self.tree_in_rounds and fits(*self.shape_in_rounds)
        if tree or not self.tree:
            shape = self.shape_in_rounds if tree else ()
            rounds.drafts, self.unread = HeadRounds(rounds, heads, *shape), rounds.state.unread
            self.traits = self.traits.in_rounds(rounds.calls)

    def draft(self, request: DraftRequest) -> Draft:
        self.rollout.passes_run = 0
        self.reads = any(_backlog(self.rollout.plane, seq) > PROMPT for seq in request.seqs)
        if self.vocabulary is not None:
            for seq in request.seqs:
                self.vocabulary.follow(seq)
        if self.learning is not None:
            self.learning.choose(request.seqs)
        if request.in_round:
            return request.asked(self.unread, self.name)
        seqs, budgets = request.seqs, request.budgets
        ready = [i for i, seq in enumerate(seqs) if budgets[i] > 0 and self._ready(seq)]

        def roll(part: DraftRequest) -> Draft:
            draft = self._roll(part)
            for tree in draft.trees:
                self.pace.drafted(tree)
            if self.learning is not None:
                self.learning.proposed(part.seqs, [tree.tokens if tree.is_chain else [] for tree in draft.trees])
            return draft

        return request.answer(ready, roll)

    def notes(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"format": self.about.format, "trained_for": self.about.head.config.target_name}
        facts |= {"learnt_tokens": len(self.vocabulary.learnt)} if self.vocabulary is not None else {}
        return {self.name: facts | {"reading": self.about.reading}}

    def _forecast(self) -> Forecast | None:
        """Its acceptance as its folder states it, and the seconds of its passes, measured with scratch tokens."""
        rollout, cache = self.rollout, self.space.cache
        if not isinstance(rollout, HeadRollout) or not rollout.head.config.acceptance:
            return None
        survival = tuple(accumulate(rollout.head.config.acceptance, mul))
        if rollout.head.device.type != "cpu":  # there the recorded passes are timed
            return Forecast(survival)
        seq = Sequence(SCRATCH, [1] * min(SCRATCH_ROWS, cache.length - 2))
        cache.open(seq)
        try:
            if not cache.reserve(seq, len(seq.tokens), 1):
                return None
            shapes = (len(seq.tokens) - 1, 1), (1, 1), (1, 2)  # the first writes what the others read
            long, short, further = (_seconds(rollout.committed, seq, *shape) for shape in shapes)
        finally:
            cache.free(seq)
        for tokens, seconds in ((1, short), (2, further)):
            self.pace.drafts.add(tokens, seconds)
        more = sum(chance for chance in survival if chance > INITIAL_FLOOR)
        return Forecast(survival, self.pace.drafts(1 + more), max(long - short, 0.0) / len(seq.tokens))

    def observe(self, step: Step) -> None:
        if self.rollout.passes_run and not self.reads:
            self.pace.observe(step, self.rollout.passes_run)
        self.rollout.passes_run = 0
        self.features.observe(step)
        self.features.retain(self.space.cache.rows.keys())
        if self.learning is not None:
            self.learning.observe(step)
            if self.learning.due != self.traits.overlaps:
                self.traits = replace(self.traits, overlaps=self.learning.due and not self.rollout.graphs)

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        if self.learning is not None:
            self.learning.work()

    def begin(self, seq: Sequence) -> None:
        if self.vocabulary is not None:
            self.vocabulary.begin(seq)

    def inherit(self, old: Drafter) -> None:
        if isinstance(old, TrainedHead) and old.vocabulary is not None and self.vocabulary is not None:
            self.vocabulary.see(old.vocabulary.learnt)
        if isinstance(old, TrainedHead) and old.learning is not None and self.learning is not None:
            self.learning.inherit(old.learning)

    def end(self, seq: Sequence) -> None:
        self.features.drop(seq.id)
        if self.vocabulary is not None:
            self.vocabulary.end(seq)
        if self.learning is not None:
            self.learning.end(seq)

    def _ready(self, seq: Sequence) -> bool:
        """Whether the target has read all but the last token, and the feature of the last but one is there."""
        last = len(seq.tokens) - 2
        return last >= 0 and self.space.plane.holds(seq.id) > last and self.features.has(seq.id, last)

    def _roll(self, request: DraftRequest) -> Draft:
        self.rollout.stop_below = request.stop_below
        if self.tree and all(seq.rule == "match" for seq in request.seqs):
            return self.rollout.trees(request.seqs, request.budgets, self.width, self.depth)
        prices = request.prices if self.traits.self_limiting else None
        self.rollout.floors = self.pace.floors(prices, max(request.budgets), len(request.seqs))
        if isinstance(self.rollout, HeadRollout):
            self.rollout.others_above = math.inf if prices is None else prices.price(ROWS) / ROWS
        return self.rollout.chains(request.seqs, request.budgets)


def _backlog(plane: Plane, seq: Sequence) -> int:
    """Tokens that the head has not read yet."""
    return len(seq.tokens) - plane.holds(seq.id)


def _memory(rollout: Any, target: Model) -> Memory:
    return Memory(weight_bytes(rollout.head, excluding=target), rollout.plane.bytes)


def _seconds(committed: CommittedRows, seq: Sequence, rows: int, tokens: int) -> float:
    """Of drafting tokens after the last rows of a sequence, the fastest of some: other work only adds time."""
    head, plane, batch, last = committed.head, committed.plane, HeadBatch(committed.cache), len(seq.tokens) - 1
    batch.committed(seq, last - rows, last, want=True)
    slots, states = [batch.scratch(seq, range(tokens - 1))], committed.blank.new_zeros(rows, committed.blank.shape[1])
    seconds = []
    for _ in range(SCRATCH_PASSES):
        begin = time.perf_counter()
        if head.drafts_chains:
            head.chains(rows_of(batch), plane, states, slots, [tokens], (0.0,))
        else:
            for _ in range(tokens):
                head.read(rows_of(batch), plane, states)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


# ------------------------------------------------------------ which head


def head_for(target: Any) -> Path | None:
    """The folder of a head for this target, found by the target's hash: the user's first, then the shipped ones.

    Only configurations are read. A folder that cannot be read is ignored.
    """
    identity = target.identity()
    if identity is None:
        return None
    for parent in (cache_folder() / "heads", SHIPPED):
        for path in sorted(parent.glob(f"*/{CONFIG}")):
            try:
                config = read_config(path.parent)
            except ModelError:
                continue
            if config.kind in HEADS and config.target_hash == identity:
                return path.parent
    return None


def configured_head(space: Workspace) -> Any:
    """The option `head`, else the head that belongs to the target, else the target's own layer (`mtp`) if it is whole;
    None if there is none, or with `head=none`."""
    option = space.option("head", default=None)
    if option is not None:
        return None if option == "none" else option
    own = space.target.mtp
    return head_for(space.target) or (MTP if own is not None and not own.problem() else None)


@dataclass(frozen=True)
class OpenedHead:
    """A head in memory, and what its folder is."""

    head: Head | PerPositionHead
    format: str = "a head that `outrider train` has written"
    reading: str = ""  # which conventions were found by trial, in a sentence


def load_head(space: Workspace) -> Head:
    """The configured head, in memory, for those who run it themselves: it has attention and K/V."""
    head = open_head(space).head
    if isinstance(head, PerPositionHead):
        raise ConfigError(f"A {head.config.kind} head can be used with --drafter head only.")
    return head


def open_head(space: Workspace) -> OpenedHead:
    """The configured head, in memory."""
    head, target = configured_head(space), space.target
    if head is None and target.mtp is not None:
        target.mtp.check()
    if head is None:
        raise ConfigError(
            "The drafter 'head' needs a trained head, and none is shipped for this model: give its folder with "
            "--set head=PATH (or head=…), or make one with `outrider train`."
        )
    if head == MTP:
        return _own_layer(space)
    if isinstance(head, str | Path):
        return _read(head_folder(head), space)
    if not isinstance(head, Head):
        raise ConfigError(f"head is {head!r}, but it must be a folder or a Head.")
    insist_on_target(head.config, target, "that was given")
    if head.device != target.device:
        raise ConfigError(f"The head that was given is on {head.device}, its target on {target.device}.")
    return OpenedHead(head)


def _own_layer(space: Workspace) -> OpenedHead:
    """The layer for further tokens of the target's own checkpoint."""
    layer, target = space.target.mtp, space.target
    if layer is None:
        why = "has no layer for further tokens (MTP)"
        if not target.has_layers:
            why = "runs through transformers, and no layer for further tokens (MTP) was found beside it"
        raise ConfigError(f"head is mtp, but this target {why}: choose another drafter, or give a head's folder.")
    readings = mtp_readings(layer, target)
    first = readings[0].config
    assert isinstance(first, HeadConfig)
    loaded = mtp_head(layer, first, target, _precision(space), space.cache.length)
    head, tried = choose_reading(loaded, readings, space, MTP)
    about = f"the target's own layer for further tokens (MTP), in {layer.layout.format}"
    return OpenedHead(head, about, tried.sentence(readings))


def _precision(space: Workspace) -> torch.dtype:
    dtype = precision(space)
    if dtype is torch.int8 and space.target.device.type != "cpu":
        raise ConfigError("A head in int8 runs on a CPU only so far: choose draft_dtype bfloat16, or auto.")
    return dtype


def _read(folder: Path, space: Workspace) -> OpenedHead:
    """The head in a folder, ours or a published one."""
    target, dtype = space.target, _precision(space)
    if is_own(folder):
        config, tensors = read_head(folder)
        published = PublishedHead(OpenedHead.format, (Reading(config),), tensors)
    else:
        published = read_published(folder, target.config)
    first = published.readings[0].config
    insist_on_target(first, target, str(folder))
    if first.kind == "exit":
        raise ConfigError(f"{folder} is an early exit's adapter: use it with --drafter exit --set adapter={folder}.")
    if isinstance(first, PerPositionConfig):
        norm = output_norm(target)
        return OpenedHead(PerPositionHead(first, published.tensors, norm, dtype, target.device), published.format)
    stored_as = f"head-{_fingerprint(folder)}"
    if first.kind == MTP:
        layer = mtp_of_folder(published.tensors, target, str(folder))
        head: Head = mtp_head(layer, first, target, dtype, space.cache.length)
    else:
        head = _with_target(first, published.tensors, space, dtype, stored_as)
    head, tried = choose_reading(head, published.readings, space, stored_as)
    return OpenedHead(head, published.format, tried.sentence(published.readings))


def _with_target(
    config: HeadConfig, tensors: HeadTensors, space: Workspace, dtype: torch.dtype, stored_as: str
) -> Head:
    """A head with what it takes from its target: the embedding, and perhaps the last norm and the output matrix."""
    target = space.target
    if config.normed:
        tensors = tensors | {"feature_norm.weight": output_norm(target)}
    config, tensors = _without_copies(config, tensors, target)
    tensors = with_output_rows(config, tensors, target)
    output = None if "lm_head.weight" in tensors else output_product(target, dtype)
    device, own = target.device, tensors.get("embed_tokens.weight")
    in_blocks = dtype is torch.int8 and isinstance(target, BlockTransformer) and own is None
    if in_blocks and config.kind not in (EAGLE1, DFLASH):  # native code reads single rows of them
        return Head(config, tensors, target, dtype, device, space.cache.length, stored_as, output)
    embedding = embedding_of(target)
    if config.kind == DFLASH:
        return DFlashHead(config, tensors, embedding, dtype, device, space.cache.length, output)
    return Head(config, tensors, embedding, dtype, device, space.cache.length, stored_as, output)


def _without_copies(config: HeadConfig, tensors: HeadTensors, target: Model) -> tuple[HeadConfig, HeadTensors]:
    """Without the target's own embedding and output matrix, which many files hold a copy of: these are shared."""
    copies = set[str]()
    if not config.narrow:
        if is_embedding(tensors.get("embed_tokens.weight"), target):
            copies, config = copies | {"embed_tokens.weight"}, replace(config, own_embedding=False)
        if config.draft_vocab_size == config.vocab_size and is_output_matrix(tensors.get("lm_head.weight"), target):
            copies, config = copies | {"lm_head.weight"}, replace(config, own_output=False)
    return config, {name: tensor for name, tensor in tensors.items() if name not in copies}


def with_output_rows(config: HeadConfig, tensors: HeadTensors, target: Model) -> HeadTensors:
    """The head's tensors with the target's output rows of its draft vocabulary, where its file has none."""
    if config.own_output or config.draft_vocab_size == config.vocab_size:
        return tensors
    ids = target_ids(tensors["d2t"])
    if isinstance(target, BlockTransformer):
        return tensors | {"lm_head.weight": narrowed(target.output_blocks(ids), OUTPUT)}
    return tensors | {"lm_head.weight": output_rows(target, ids)}  # [D, H]


def learnt_vocabulary(space: Workspace, head: Head | PerPositionHead) -> LearntVocabulary | None:
    """What lets the vocabulary of a head with the target's output rows follow the text; None for other heads.

    Rows that were trained with a head have left the target's space: beside them the target's own score too high.
    """
    if not isinstance(head, Head) or head.config.own_output or head.config.draft_vocab_size == head.config.vocab_size:
        return None
    rows = row_reader(space.target)
    if rows is None:
        return None
    known: LearntVocabulary | None = head.vocabulary  # a head may serve several engines
    head.vocabulary = known or LearntVocabulary(head, rows, space.target.config.eos_ids)
    return head.vocabulary  # type: ignore[no-any-return]


def _fingerprint(folder: Path) -> str:
    """What its quantised weights are kept under: names, sizes and times of its files, and the kernels' format."""
    held = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in held]
    return hashlib.sha256(repr((FORMAT, PACKING, files)).encode()).hexdigest()[:24]


def _trial(target: Model) -> dict[str, Any]:
    """The target's own head, or an untrained one, which shows everything but acceptance."""
    if (folder := head_for(target)) is not None:
        return {"head": str(folder)}
    config, tensors = random_head(target.config)
    return {"head": Head(config, tensors, embedding_of(target), target.compute, target.device)}
