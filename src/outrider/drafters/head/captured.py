"""Drafts of a trained head, each as one captured graph: its input, all of its passes, and every choice of a token.

Features are not copied: the target's passes leave their hidden states in the slots of their rows (`Plane.streams`), and
a committed row reads its feature from the slot it is fed to. Drafted rows live in scratch slots behind the cache, one
lane of slots for each sequence of a draft; committed rows replace them after verification.

Chains stay on the device (*unread*). Trees and rankings are read back in one copy. `HeadGraphs` chooses and fills a
pass; the passes are below it. It knows a head, its plane and the cache; the caller tells which rows the plane lacks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ...backends.cuda.capture import Field, PinnedBuffer, fill_padded
from ...backends.cuda.graphs import (
    CHEAP_ROWS,
    LENGTHS,
    SAMPLING,
    Graphs,
    fill_rows,
    fill_sampling,
    group_rows,
    padded_size,
)
from ...backends.cuda.kernels import elementwise, sampling
from ...backends.cuda.kernels.attention import Blocks
from ...backends.cuda.kernels.sampling import Laws
from ...backends.cuda.state import DEPTHS, F32, F64, I32, I64, PATCH, lanes_for
from ...backends.rows import Rows
from ...engine.cache import Plane
from ...engine.sampling import CHOICE, adjusts, filters, gumbel, key
from ...types import Draft, Sequence, Tree
from .._rollout import Ranking
from .features import HeadBatch

LANE = DEPTHS[-1]  # scratch slots of one sequence's drafted rows
FEEDS = (16, 32, 64, 128, 256, 512)  # sizes of a first pass in rows: fewer cost as much as the smallest
READINGS = (64, 512)  # sizes of a pass that only reads: prompts have all lengths, and each size is captured separately
STEPS = (4, 8, 16, 32, 64)  # lengths of chains that are captured after the first one
CAPTURE_COST = 400  # capturing a pass takes the host about as long as this many replays: a head's passes are short
FEW = 16  # committed rows of a sequence that are fed with the draft; more are read before it
PIECES = 32  # parts of a row in which the highest values are searched separately


@dataclass(frozen=True)
class HeadShape:
    """Everything that a captured pass depends on."""

    kind: str
    rows: int  # of the first pass
    wanted: int  # rows of it that choose: one for each sequence, or one for each position of a block
    length: int = 0  # passes of a chain, levels of a tree
    width: int = 0  # of a tree
    drawn: bool = False  # some row has filters (chains) or noise (trees), which the pass otherwise leaves out

    def holds(self, other: HeadShape, cheap: int) -> bool:
        """Whether the other shape can be padded to this one, at an acceptable cost."""
        same = (self.kind, self.width) == (other.kind, other.width)
        same = same and (self.length == other.length or (self.kind == "chain" and self.length > other.length))
        fits = other.rows <= self.rows and other.wanted <= self.wanted and other.drawn <= self.drawn
        return same and fits and self.wanted <= 4 * other.wanted and self.rows <= max(cheap, other.rows)


class GrownTree(NamedTuple):
    """All nodes of one tree, as `types.Tree` has them."""

    tokens: list[int]
    parents: list[int]
    survival: list[float]


class HeadGraphs:
    """Captured drafts of one head over its plane."""

    def __init__(self, graphs: Graphs, target_plane: Plane, source: str) -> None:
        self.graphs, self.state, self.source = graphs, graphs.state, source
        self.head = cast(Any, graphs.model)
        self.streams = [target_plane.streams[tap] for tap in self.head.config.taps]  # [S, H] each
        self.at = self.state.claim()  # of its tokens among the unread
        first, device = graphs.plane.add_scratch(self.state.lanes * LANE), self.state.device
        self.lanes = first + torch.arange(self.state.lanes * LANE, device=device).view(-1, LANE)  # [lanes, LANE]
        self.tails, self.columns = self.lanes.int(), self.lanes.T.contiguous()  # [lanes, LANE], [LANE, lanes]
        self.slots: list[list[int]] = self.lanes.tolist()  # the same on the host
        self.every = torch.arange(self.state.lanes * LANE, device=device)  # row numbers
        self.ids: Tensor = self.head.device_ids  # [D]
        self.outputs: Tensor | None = None  # [S, H] every row's output, in its slot
        self.captured: dict[HeadShape, HeadPass] = {}
        self.misses: dict[HeadShape, int] = {}

    def suits(self, seqs: list[Sequence]) -> bool:
        """Whether a captured chain can replace one that reads scores on the host."""
        return all(seq.rule == "match" and not adjusts(seq) for seq in seqs)

    def suits_trees(self, seqs: list[Sequence], width: int, depth: int) -> bool:
        """The same for trees: captured rankings apply temperature and noise, but no filters."""
        fits = self.head.config.parallel or (depth - 1) * width <= LANE
        return fits and self.suits(seqs) and not any(filters(seq) for seq in seqs)

    # ------------------------------------------------------------ the drafts

    def chains(self, seqs: list[Sequence], starts: list[int], budget: list[int]) -> Draft:
        """budget[i] tokens after each sequence, whose committed rows from starts[i] on the plane lacks."""
        starts, filtered = self._read_ahead(seqs, starts), any(filters(seq) for seq in seqs)
        budget = [min(k, LENGTHS[-1]) for k in budget]
        draft = self._block if self.head.config.parallel else self._chain
        indices = draft(seqs, starts, budget, filtered)
        trees = (Tree([-1 - at for at in one], list(range(-1, len(one) - 1)), source=self.source) for one in indices)
        return Draft.pack(trees, self.state.unread)

    def _chain(self, seqs: list[Sequence], starts: list[int], budget: list[int], filtered: bool) -> list[list[int]]:
        """The index of each sequence's tokens among the unread."""
        packed = self._rows(seqs, starts)
        longest = next(n for n in LENGTHS if n >= max(budget))
        shape = HeadShape("chain", feed_size(len(packed.tokens)), lanes_for(len(seqs)), longest, drawn=filtered)
        step = self._pass(shape, ChainPass)
        step.fill(packed, seqs, budget)
        share = max(budget) / step.shape.length  # a longer one may replace a shape that is not captured yet
        self.state.replay("draft", step.recording, step.form, min(share, 1.0))
        return [[self.at + j * step.shape.wanted + i for j in range(k)] for i, k in enumerate(budget)]

    def _block(self, seqs: list[Sequence], starts: list[int], budget: list[int], filtered: bool) -> list[list[int]]:
        packed = self._rows(seqs, starts, budget)
        shape = HeadShape("masks", feed_size(len(packed.tokens)), padded_size(len(packed.want)), drawn=filtered)
        self._replay(shape, MaskPass, packed, seqs, budget)
        at = iter(range(self.at, self.at + len(packed.want)))
        return [[next(at) for _ in range(k)] for k in budget]

    def rankings(self, seqs: list[Sequence], starts: list[int], lengths: list[int], width: int) -> list[list[Ranking]]:
        """A block's likeliest tokens at each of a sequence's next lengths[i] positions."""
        packed = self._rows(seqs, self._read_ahead(seqs, starts), lengths)
        drawn, width = any(not seq.params.greedy for seq in seqs), min(width, self.ids.shape[0])
        shape = HeadShape(
            "rankings", feed_size(len(packed.tokens)), padded_size(len(packed.want)), width=width, drawn=drawn
        )
        rows = iter(self._replay(shape, RankingPass, packed, seqs, lengths).read(len(packed.want)))
        return [[next(rows) for _ in range(k)] for k in lengths]

    def trees(self, seqs: list[Sequence], starts: list[int], width: int, depth: int) -> list[GrownTree]:
        """All nodes of each sequence's tree, in the order of their numbers."""
        packed = self._rows(seqs, self._read_ahead(seqs, starts))
        drawn, width = any(not seq.params.greedy for seq in seqs), min(width, self.ids.shape[0])
        shape = HeadShape("tree", feed_size(len(packed.tokens)), lanes_for(len(seqs)), depth, width, drawn)
        return self._replay(shape, TreePass, packed, seqs, []).read(len(seqs))

    # ------------------------------------------------------------ rows

    def _read_ahead(self, seqs: list[Sequence], starts: list[int]) -> list[int]:
        """Feed a prompt's committed rows, all but the last one; returns where each sequence's draft begins."""
        packed, after = HeadBatch(self.state.cache), []
        for seq, start in zip(seqs, starts, strict=True):
            stop = len(seq.tokens) - 2
            if stop + 1 - start <= FEW:
                after.append(start)
                continue
            while start < stop:
                end = min(stop, start + FEEDS[-1] - len(packed.tokens))
                packed.committed(seq, start, end)
                start = end
                if len(packed.tokens) == FEEDS[-1]:
                    self._read(packed)
                    packed = HeadBatch(self.state.cache)
            after.append(stop)
        if packed.tokens:
            self._read(packed)
        return after

    def _read(self, packed: HeadBatch) -> None:
        size = next((n for n in READINGS if n >= len(packed.tokens)), feed_size(len(packed.tokens)))
        self._replay(HeadShape("reading", size, 0), ReadingPass, packed, [], [], phase="read")

    def _rows(self, seqs: list[Sequence], starts: list[int], lengths: list[int] | None = None) -> HeadBatch:
        """Committed rows, and behind them masks in the sequence's lane, so that lengths[i] rows are wanted."""
        packed = HeadBatch(self.state.cache)
        for i, (seq, start) in enumerate(zip(seqs, starts, strict=True)):
            packed.committed(seq, start, len(seq.tokens) - 1, want=True)
            if lengths is not None:
                packed.masks(seq, lengths[i] - 1, self.slots[i])
        return packed

    # ------------------------------------------------------------ running

    def run(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, want: Tensor, info: Tensor, tail: Tensor,
        features: Tensor, masked: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Scores of the wanted rows [R, D] and every row's output [T, H]. tokens … [T], want [R], features [T, H]."""
        blocks = Blocks(info, tail, self.state.table, self.state.scratch(self.head))
        rows = Rows(tokens, positions, slots, slots, slots, self.state.table, None, want, blocks=blocks)
        scores, outputs = self.head.scores(rows, self.graphs.plane, features, masked)
        if self.outputs is not None:
            self.outputs.index_copy_(0, slots, outputs.to(self.outputs.dtype))
        return scores, outputs

    def logits(self, scores: Tensor) -> Tensor:
        """Scores [R, D] as logits over the target's ids [R, V]."""
        wide = scores.new_full((scores.shape[0], self.head.config.vocab_size), -torch.inf)
        return wide.index_copy_(1, self.ids, scores)

    def keep_outputs(self) -> None:
        """From now on passes leave every row's output in its slot; call it before any is captured."""
        slots, width = self.graphs.plane.k[0].shape[0], self.head.config.hidden_size
        self.outputs = torch.zeros(slots, width, dtype=self.head.compute, device=self.state.device)

    def _replay(
        self, shape: HeadShape, kind: type[Kind], packed: HeadBatch, seqs: list[Sequence], lengths: list[int],
        phase: str = "draft",
    ) -> Kind:  # fmt: skip
        step = self._pass(shape, kind)
        step.fill(packed, seqs, lengths)
        self.state.replay(phase, step.recording, step.form)
        return step

    def _pass(self, shape: HeadShape, kind: type[Kind]) -> Kind:
        """The pass of this shape; or a larger one, until its idle work has cost as much as capturing would."""
        if shape not in self.captured:
            self.misses[shape] = misses = self.misses.get(shape, 0) + 1
            larger = [other for other in self.captured if other.holds(shape, CHEAP_ROWS)]
            nearest = min(larger, key=lambda other: (other.length, other.rows, other.wanted), default=None)
            if nearest is None:
                shape = self._with_room(shape)
            elif misses * (nearest.length - shape.length) <= CAPTURE_COST * max(shape.length, 1):
                shape = nearest
            if shape not in self.captured:
                self.captured[shape] = kind(self, shape)
        return cast(Kind, self.captured[shape])

    def _with_room(self, shape: HeadShape) -> HeadShape:
        """The first chain is captured as requested: it may stay the only one. Later ones are captured longer, because
        the controller will try other lengths."""
        if shape.kind != "chain" or not any(other.kind == "chain" for other in self.captured):
            return shape
        return replace(shape, length=next(n for n in STEPS if n >= shape.length))


def feed_size(rows: int) -> int:
    """The number of rows that a first pass is padded to."""
    return next((size for size in FEEDS if size >= rows), padded_size(rows))


# ------------------------------------------------------------ the passes


class HeadPass(ABC):
    """A first pass over packed rows: committed rows, whose features are in their own slots, and masks.

    `more` names further inputs, `_work` continues after the first pass.
    """

    def __init__(self, heads: HeadGraphs, shape: HeadShape) -> None:
        self.heads, self.shape = heads, shape
        t, state = shape.rows, heads.state
        deep = next(depth for depth in DEPTHS if depth >= min(heads.head.config.block, DEPTHS[-1]))
        fields: dict[str, Field] = dict.fromkeys(("tokens", "positions", "slots"), (I64, (t,)))
        fields |= {"info": (I32, (t, 8)), "tail": (I32, (t, deep)), "want": (I64, (shape.wanted,))}
        fields |= {"masked": (torch.bool, (t,)), "place": (I64, (PATCH,)), "slot": (I32, (PATCH,))}
        self.form = PinnedBuffer(state.driver, fields | self.more())
        self.fill(None, [], [])
        self.form.send()
        self.recording = state.record(self._work)

    def more(self) -> dict[str, Field]:
        return {}

    def fill(self, packed: HeadBatch | None, seqs: list[Sequence], lengths: list[int]) -> None:
        """Write these rows (or none) to the form; lengths[i] tokens are drafted for each sequence."""
        a = self.form.next()
        fill_rows(
            a, packed, [] if packed is None else group_rows(packed, self.heads.graphs.rows_per_block), self.heads.state
        )
        fill_padded(a["masked"], [] if packed is None else packed.masked, False)
        self._fill_more(a, seqs, lengths)

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        """Write what `more` has named."""
        return

    @abstractmethod
    def _work(self) -> None:
        """What is captured: the first pass, and what follows it."""

    @property
    def choices(self) -> int:
        """Rows whose scores `_scores` returns."""
        return self.shape.wanted

    def _scores(self) -> Tensor:
        """Scores of every row that chooses [R, D]."""
        return self._first()[0]

    def _positions(self, seqs: list[Sequence], lengths: list[int]) -> tuple[list[Sequence], list[int]]:
        """The sequence and the position of each row that chooses."""
        pairs = [(seq, len(seq.tokens) + j) for seq, k in zip(seqs, lengths, strict=True) for j in range(k)]
        return [seq for seq, _ in pairs], [position for _, position in pairs]

    def _first(self) -> tuple[Tensor, Tensor]:
        """Scores of the wanted rows [R, D] and every row's output [T, H]."""
        d, heads, state = self.form.device, self.heads, self.heads.state
        tokens = elementwise.start_pass(d["tokens"], state.unread, d["place"], d["slot"], state.table)  # [T]
        at = d["slots"].clamp(max=state.padding)  # [T] a mask's slot has no stream; its feature is not used
        features = heads.head.fuse([stream[at] for stream in heads.streams])  # [T, H]
        masked = d["masked"] if heads.head.masks else None
        return heads.run(tokens, d["positions"], d["slots"], d["want"], d["info"], d["tail"], features, masked)


Kind = TypeVar("Kind", bound=HeadPass)


class ReadingPass(HeadPass):
    """Committed rows only."""

    def _work(self) -> None:
        self._first()


class MaskPass(HeadPass):
    """A block: all positions in one pass, and a choice for each."""

    def more(self) -> dict[str, Field]:
        return super().more() | {name: (dtype, (self.choices,)) for name, dtype in SAMPLING.items()}

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        super()._fill_more(a, seqs, lengths)
        fill_sampling(a, *self._positions(seqs, lengths))

    def _work(self) -> None:
        at, scores = self.heads.at, self._scores()
        tokens = self._chosen(scores, [self.form.device[name] for name in SAMPLING])  # [R]
        self.heads.state.unread[at : at + self.choices].copy_(tokens)

    def _chosen(self, scores: Tensor, laws: list[Tensor]) -> Tensor:
        """A token for each row of scores [R, D]; laws: the columns of SAMPLING, [R] each."""
        tokens, _, _ = sampling.choose(self.heads.logits(scores), Laws(*laws), self.shape.drawn)
        return tokens


class ChainPass(HeadPass):
    """Pass after pass: each feeds the token that the previous one chose, with that one's output as its feature."""

    def more(self) -> dict[str, Field]:
        b, k = self.shape.wanted, self.shape.length
        fields: dict[str, Field] = {"later_info": (I32, (k, b, 8)), "later_positions": (I64, (k, b))}
        return fields | {name: (dtype, (k, b) if name == "position" else (b,)) for name, dtype in SAMPLING.items()}

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        """Pass j feeds drafted token j - 1 at position n - 2 + j; it sees the committed rows and j drafted ones."""
        b, k = len(seqs), self.shape.length
        for name in ("later_info", "later_positions", "position"):
            a[name].fill(0)
        n, budget = np.array([len(seq.tokens) for seq in seqs], dtype=np.int64), np.array(lengths, dtype=np.int64)
        fill_sampling(a | {"position": a["position"][0]}, seqs, n)
        j, lines = np.arange(k)[:, None], lines_of(self.heads, seqs)  # [K, 1], [B]
        a["position"][:, :b] = n + j
        fill_drafted(a["later_info"][:, :b], a["later_positions"][:, :b], self.heads, j, n, lines)
        a["later_info"][:, :b, 1] = (j >= 1) & (j < budget)  # rows beyond a budget are not computed

    def _work(self) -> None:
        d, heads, b = self.form.device, self.heads, self.shape.wanted
        slots, tail, every = heads.columns[:, :b], heads.tails[:b], heads.every[:b]  # [LANE, B], [B, LANE], [B]
        scores, outputs = self._first()
        outputs, tokens = outputs[d["want"]], self._choose(scores, 0)  # [B, H], [B]
        for j in range(1, self.shape.length):
            where = (d["later_positions"][j], slots[j - 1], every, d["later_info"][j], tail)
            scores, outputs = heads.run(tokens, *where, outputs)
            tokens = self._choose(scores, j)

    def _choose(self, scores: Tensor, j: int) -> Tensor:
        """Every sequence's token j [B], also written to the unread. scores [B, D]."""
        d, b, at = self.form.device, self.shape.wanted, self.heads.at
        law = Laws(*(d[name][j] if name == "position" else d[name] for name in SAMPLING))
        tokens, _, _ = sampling.choose(self.heads.logits(scores), law, self.shape.drawn)
        self.heads.state.unread[at + j * b : at + (j + 1) * b].copy_(tokens)
        return tokens


class RankingPass(HeadPass):
    """A block's likeliest tokens at each position, read back."""

    def __init__(self, heads: HeadGraphs, shape: HeadShape) -> None:
        self.heads, self.shape = heads, shape
        size = (self.choices, shape.width)
        self.reply = PinnedBuffer(heads.state.driver, {"tokens": (I64, size), "probabilities": (F32, size)})
        super().__init__(heads, shape)

    def more(self) -> dict[str, Field]:
        return super().more() | {"key": (I64, (self.choices,)), "temperature": (F64, (self.choices,))}

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        super()._fill_more(a, seqs, lengths)
        fill_noise(a, *self._positions(seqs, lengths))

    def _work(self) -> None:
        d = self.form.device
        noise = (d["key"], d["temperature"]) if self.shape.drawn else None
        tokens, probabilities = likeliest(self._scores(), self.heads.ids, self.shape.width, noise)  # [R, w]
        self.reply.device["tokens"].copy_(tokens)
        self.reply.device["probabilities"].copy_(probabilities)

    def read(self, rows: int) -> list[Ranking]:
        """Wait for the first rows' rankings. Tokens of probability 0 are left out, except the best one."""
        a = received(self.reply, self.heads)
        columns = zip(a["tokens"][:rows].tolist(), a["probabilities"][:rows].tolist(), strict=True)
        rankings = [list(zip(*row, strict=True)) for row in columns]
        return [[best, *(choice for choice in rest if choice[1] > 0)] for best, *rest in rankings]


class Level(NamedTuple):
    """The newest nodes of a tree, M for each of B sequences, and the fed nodes that are their parents."""

    tokens: Tensor  # [B, M]
    survival: Tensor  # [B, M] float64
    outputs: Tensor  # [B, w, H] of the parents
    tails: Tensor  # [B, w, s] int32 slots of the parents and their ancestors, root's child first


class TreePass(HeadPass):
    """A tree, level by level: which nodes are fed, and which rows they see, is decided on the device.

    Each level's w likeliest nodes are fed, each with its parent's output as its feature and seeing its own ancestors,
    and get w children. Nodes are numbered as they are added, so that the host only picks the best of them:

        0 … w-1 after the root, then w² for each level: w children of each fed node, in the order of their numbers.

    The node of rank r that is fed at level s lives in scratch slot (s - 1) w + r of its sequence's lane.
    """

    def __init__(self, heads: HeadGraphs, shape: HeadShape) -> None:
        nodes = (shape.wanted, shape.width + (shape.length - 1) * shape.width**2)
        self.reply = PinnedBuffer(
            heads.state.driver, {"tokens": (I64, nodes), "parents": (I64, nodes), "survival": (F64, nodes)}
        )
        super().__init__(heads, shape)

    def more(self) -> dict[str, Field]:
        b, w, d = self.shape.wanted, self.shape.width, self.shape.length
        fields: dict[str, Field] = {"later_info": (I32, (d, b * w, 8)), "later_positions": (I64, (d, b * w))}
        return fields | {"key": (I64, (d, b)), "temperature": (F64, (b,))}

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        b, w, d = len(seqs), self.shape.width, self.shape.length
        for name in ("later_info", "later_positions"):
            a[name].fill(0)
        tokens = [len(seq.tokens) for seq in seqs]
        for level, keys in enumerate(a["key"]):  # all nodes of a level have the same position
            fill_noise(a | {"key": keys}, seqs, [n + level for n in tokens])
        n, lines = np.repeat(np.array(tokens, dtype=np.int64), w), np.repeat(lines_of(self.heads, seqs), w)  # [B * w]
        info, positions = a["later_info"][:, : b * w], a["later_positions"][:, : b * w]
        fill_drafted(info, positions, self.heads, np.arange(d)[:, None], n, lines)

    def _work(self) -> None:
        b, w = self.shape.wanted, self.shape.width
        scores, outputs = self._first()
        tokens, probabilities = self._ranked(scores, 0)  # [B, w]
        root = outputs[self.form.device["want"]][:, None].expand(b, w, -1)  # [B, w, H]
        level = Level(tokens, probabilities, root, torch.empty(b, w, 0, dtype=I32, device=tokens.device))
        self._write(0, level, torch.full_like(tokens, -1))
        for s in range(1, self.shape.length):
            fed = level.survival.topk(w).indices.sort().values  # [B, w] the likeliest, in the order of their numbers
            start = 0 if s == 1 else w + (s - 2) * w * w  # the number of the level's first node
            level = self._grow(level, fed, s)
            self._write(w + (s - 1) * w * w, level, each_times(start + fed, w))

    def _grow(self, level: Level, fed: Tensor, s: int) -> Level:
        """Feed these nodes of the last level [B, w]; their children are the next one."""
        d, heads, (b, w) = self.form.device, self.heads, fed.shape
        parents = fed if s == 1 else fed // w  # [B, w] rank of each one's parent among those fed before
        features = level.outputs.gather(1, parents[..., None].expand(b, w, level.outputs.shape[2]))  # [B, w, H]
        slots = heads.lanes[:b, (s - 1) * w : s * w]  # [B, w]
        ancestors = level.tails.gather(1, parents[..., None].expand(b, w, s - 1))  # [B, w, s - 1]
        tails = torch.cat([ancestors, slots[..., None].int()], 2)  # [B, w, s]
        deep = next(depth for depth in DEPTHS if depth >= s)
        padded = torch.nn.functional.pad(tails, (0, deep - s)).view(b * w, deep)
        tokens, every = level.tokens.gather(1, fed).view(-1), heads.every[: b * w]  # [B * w]
        where = (d["later_positions"][s], slots.reshape(-1), every, d["later_info"][s], padded)
        scores, outputs = heads.run(tokens, *where, features.reshape(b * w, -1))
        children, probabilities = self._ranked(scores, s)  # [B * w, w]
        survival = probabilities.view(b, w, w) * level.survival.gather(1, fed)[..., None]
        return Level(children.view(b, w * w), survival.view(b, w * w), outputs.view(b, w, -1), tails)

    def _ranked(self, scores: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Tokens [R, w] and probabilities [R, w] float64 after these nodes, R / B for each sequence. scores [R, D]."""
        d, each = self.form.device, scores.shape[0] // self.shape.wanted
        noise = None
        if self.shape.drawn:
            noise = (each_times(d["key"][level], each), each_times(d["temperature"], each))
        tokens, probabilities = likeliest(scores, self.heads.ids, self.shape.width, noise)
        return tokens, probabilities.double()

    def _write(self, at: int, level: Level, parents: Tensor) -> None:
        """These nodes have the numbers from `at` on. parents [B, M]."""
        for name, values in (("tokens", level.tokens), ("parents", parents), ("survival", level.survival)):
            self.reply.device[name][:, at : at + values.shape[1]].copy_(values)

    def read(self, sequences: int) -> list[GrownTree]:
        """Wait for the first sequences' trees."""
        a = received(self.reply, self.heads)
        columns = (a[name][:sequences].tolist() for name in GrownTree._fields)
        return [GrownTree(*tree) for tree in zip(*columns, strict=True)]


# ------------------------------------------------------------ shared by the passes


def likeliest(scores: Tensor, ids: Tensor, width: int, noise: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """As `sampling.ranked` for every row: tokens [R, w] and their probabilities [R, w], best first.

    scores [R, D], ids [D]; noise: each row's key [R] int64 and temperature [R] float64, 0 is greedy.
    """
    if noise is not None:
        keys, heat = noise[0][:, None], noise[1][:, None]  # [R, 1]
        noised = scores.double() / torch.where(heat > 0, heat, 1.0)  # [R, D]
        scores = noised + torch.where(heat > 0, gumbel(keys, ids), 0.0)
    probabilities, index = highest(torch.softmax(scores, -1), width)
    return ids[index], probabilities


def highest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As topk: the values [R, n] and their indices [R, n], best first. rows [R, D]

    On a GPU one block handles a row: 50 µs for 16,384 values. So the best of each piece are searched first.
    """
    length = rows.shape[-1] // PIECES
    if count > length // 2 or rows.shape[-1] % PIECES:
        values, index = rows.topk(count)
        return values, index
    best, at = rows.view(-1, length).topk(count, sorted=False)  # [R * PIECES, n]
    values, order = best.view(rows.shape[0], -1).topk(count)  # [R, n] among n of each piece
    index = at.view(rows.shape[0], -1).gather(1, order)
    return values, index + order // count * length


def fill_noise(a: dict[str, Any], seqs: list[Sequence], positions: list[int]) -> None:
    """Each row's key, as the bits of an int64, and its temperature."""
    keys = [key(seq.seed, p, CHOICE) for seq, p in zip(seqs, positions, strict=True)]
    fill_padded(a["key"].view(np.uint64), np.array(keys, dtype=np.uint64), 0)
    fill_padded(a["temperature"], [seq.params.temperature for seq in seqs], 0)


def fill_drafted(info: Any, positions: Any, heads: HeadGraphs, depth: Any, n: Any, lines: Any) -> None:
    """Rows `depth` after the last committed one, one to a block: info [..., B, 8], positions [..., B].

    Rows beyond the table's length are clipped into it: their results are not used.
    """
    length = heads.state.cache.length
    positions[...] = np.clip(n - 2 + depth, 0, length - 1)
    columns = (np.arange(info.shape[-2]), 1, lines, n - 1, np.minimum(n - 1 + depth, length))
    for column, values in enumerate(columns):
        info[..., column] = values


def lines_of(heads: HeadGraphs, seqs: list[Sequence]) -> Any:
    """Each sequence's line in the table, [B]."""
    return np.array([heads.state.cache.rows[seq.id].line for seq in seqs], dtype=np.int64)


def received(reply: PinnedBuffer, heads: HeadGraphs) -> dict[str, Any]:
    """What a replay has written to its reply, once it is complete."""
    arrays, end = heads.state.receive(reply)
    end.synchronize()
    return arrays


def each_times(values: Tensor, times: int) -> Tensor:
    """[..., N] -> [..., N * times]. `repeat_interleave` may read values on the host, which a graph cannot."""
    return values[..., None].expand(*values.shape, times).flatten(-2)
