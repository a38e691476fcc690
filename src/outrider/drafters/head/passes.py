"""The recorded passes of a trained head: reading a prompt, a chain token by token, a block of masks at once.

They all begin with the same first pass over packed rows: true rows, whose features lie in their own slots, and masks.
It knows a head through `Heads.run`; which rows to feed, and what becomes of the tokens, is decided there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...backends.cuda.capture import Field, PinnedBuffer, fill_padded
from ...backends.cuda.graphs import SAMPLING, fill_rows, fill_sampling, group_rows
from ...backends.cuda.kernels import elementwise, sampling
from ...backends.cuda.kernels.sampling import Laws
from ...backends.cuda.state import DEPTHS, F32, F64, I32, I64, PATCH
from ...engine.batch import BatchBuilder
from ...engine.sampling import CHOICE, gumbel, key
from ...types import Sequence

if TYPE_CHECKING:
    from .recorded import Heads, Ranking

PIECES = 32  # of a row whose highest numbers are looked for


@dataclass(frozen=True)
class HeadShape:
    """Everything that a recording depends on."""

    kind: str
    rows: int  # of the first pass
    wanted: int  # rows of it that choose: one for each sequence, or one for each position of a block
    length: int = 0  # passes of a chain, levels of a tree
    width: int = 0  # of a tree
    drawn: bool = False  # whether some row's law is more than a chain (filters) or a tree (noise) can leave out

    def holds(self, other: HeadShape, cheap: int) -> bool:
        """Whether that one can be padded to this one, at a bearable price."""
        same = (self.kind, self.width) == (other.kind, other.width)
        same = same and (self.length == other.length or (self.kind == "chain" and self.length > other.length))
        fits = other.rows <= self.rows and other.wanted <= self.wanted and other.drawn <= self.drawn
        return same and fits and self.wanted <= 4 * other.wanted and self.rows <= max(cheap, other.rows)


class First(ABC):
    """The first pass. `more` says what else travels in its form, `_work` what comes after it."""

    def __init__(self, heads: Heads, shape: HeadShape) -> None:
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

    def fill(self, packed: BatchBuilder | None, seqs: list[Sequence], lengths: list[int]) -> None:
        """The numbers of these rows (or of none); lengths[i] tokens are drafted for each sequence."""
        a = self.form.next()
        fill_rows(
            a, packed, [] if packed is None else group_rows(packed, self.heads.graphs.rows_per_block), self.heads.state
        )
        fill_padded(a["masked"], [] if packed is None else [bool(tail) for tail in packed.tails], False)
        self._fill_more(a, seqs, lengths)

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        """What `more` has named; nothing, where it names nothing."""
        return

    @abstractmethod
    def _work(self) -> None:
        """What is recorded: the first pass, and what comes after it."""

    def _first(self) -> tuple[Tensor, Tensor]:
        """Scores of the wanted rows [R, D] and every row's output [T, H]."""
        d, heads, state = self.form.device, self.heads, self.heads.state
        tokens = elementwise.start_pass(d["tokens"], state.unread, d["place"], d["slot"], state.table)  # [T]
        at = d["slots"].clamp(max=state.padding)  # [T] a mask has no feature, and its slot no stream
        features = heads.head.fuse([stream[at] for stream in heads.streams])  # [T, H]
        masked = d["masked"] if heads.head.masks else None
        return heads.run(tokens, d["positions"], d["slots"], d["want"], d["info"], d["tail"], features, masked)

    def _logits(self, scores: Tensor) -> Tensor:
        """Scores [R, D] as logits over the target's ids [R, V]."""
        wide = scores.new_full((scores.shape[0], self.heads.head.config.vocab_size), -torch.inf)
        return wide.index_copy_(1, self.heads.ids, scores)


class Reading(First):
    """True rows, and nothing else."""

    def _work(self) -> None:
        self._first()


class Masks(First):
    """A block: all positions in one pass, and a choice for each."""

    def more(self) -> dict[str, Field]:
        return {name: (dtype, (self.shape.wanted,)) for name, dtype in SAMPLING.items()}

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        speakers, positions = each_position(seqs, lengths)
        fill_sampling(a, speakers, positions)

    def _work(self) -> None:
        d, at = self.form.device, self.heads.at
        scores, _ = self._first()
        tokens, _, _ = sampling.choose(
            self._logits(scores), Laws(*(d[name] for name in SAMPLING)), self.shape.drawn
        )  # [R]
        self.heads.state.unread[at : at + self.shape.wanted].copy_(tokens)


class Chain(First):
    """Pass after pass, each feeding the token that the one before has chosen, with that one's output as its feature."""

    def more(self) -> dict[str, Field]:
        b, k = self.shape.wanted, self.shape.length
        fields: dict[str, Field] = {"later_info": (I32, (k, b, 8)), "later_positions": (I64, (k, b))}
        return fields | {name: (dtype, (k, b) if name == "position" else (b,)) for name, dtype in SAMPLING.items()}

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        """Pass j feeds guess j - 1, which stands at position n - 2 + j and sees the true rows and j guesses."""
        b, k = len(seqs), self.shape.length
        for name in ("later_info", "later_positions", "position"):
            a[name].fill(0)
        n, budget = np.array([len(seq.tokens) for seq in seqs], dtype=np.int64), np.array(lengths, dtype=np.int64)
        fill_sampling(a | {"position": a["position"][0]}, seqs, n)
        j, lines = np.arange(k)[:, None], lines_of(self.heads, seqs)  # [K, 1], [B]
        a["position"][:, :b] = n + j
        fill_guesses(a["later_info"][:, :b], a["later_positions"][:, :b], self.heads, j, n, lines)
        a["later_info"][:, :b, 1] = (j >= 1) & (j < budget)  # what lies beyond a budget is computed in vain

    def _work(self) -> None:
        d, heads, b = self.form.device, self.heads, self.shape.wanted
        slots, tail, every = heads.columns[:, :b], heads.tails[:b], heads.every[:b]  # [PLACES, B], [B, PLACES], [B]
        scores, outputs = self._first()
        outputs, tokens = outputs[d["want"]], self._choose(scores, 0)  # [B, H], [B]
        for j in range(1, self.shape.length):
            where = (d["later_positions"][j], slots[j - 1], every, d["later_info"][j], tail)
            scores, outputs = heads.run(tokens, *where, outputs)
            tokens = self._choose(scores, j)

    def _choose(self, scores: Tensor, j: int) -> Tensor:
        """Everybody's token j [B], which is left among the unread. scores [B, D]."""
        d, b, at = self.form.device, self.shape.wanted, self.heads.at
        law = Laws(*(d[name][j] if name == "position" else d[name] for name in SAMPLING))
        tokens, _, _ = sampling.choose(self._logits(scores), law, self.shape.drawn)
        self.heads.state.unread[at + j * b : at + (j + 1) * b].copy_(tokens)
        return tokens


class Rankings(First):
    """A block's likeliest tokens at each position, brought back."""

    def __init__(self, heads: Heads, shape: HeadShape) -> None:
        r, w = shape.wanted, shape.width
        self.reply = PinnedBuffer(heads.state.driver, {"tokens": (I64, (r, w)), "chances": (F32, (r, w))})
        super().__init__(heads, shape)

    def more(self) -> dict[str, Field]:
        return {"key": (I64, (self.shape.wanted,)), "temperature": (F64, (self.shape.wanted,))}

    def _fill_more(self, a: dict[str, Any], seqs: list[Sequence], lengths: list[int]) -> None:
        speakers, positions = each_position(seqs, lengths)
        fill_noise(a, speakers, positions)

    def _work(self) -> None:
        d = self.form.device
        scores, _ = self._first()
        noise = (d["key"], d["temperature"]) if self.shape.drawn else None
        tokens, chances = likeliest(scores, self.heads.ids, self.shape.width, noise)  # [R, w]
        self.reply.device["tokens"].copy_(tokens)
        self.reply.device["chances"].copy_(chances)

    def read(self, rows: int) -> list[Ranking]:
        """Wait for the first rows' rankings. What has no chance is left out, but for the best."""
        a = received(self.reply, self.heads)
        pairs = (list(zip(*row, strict=True)) for row in zip(a["tokens"].tolist(), a["chances"].tolist(), strict=True))
        return [
            [some[0], *(one for one in some[1:] if one[1] > 0)] for some, _ in zip(pairs, range(rows), strict=False)
        ]


# ------------------------------------------------------------ what several of them need


def likeliest(scores: Tensor, ids: Tensor, width: int, noise: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """As `sampling.ranked` for every row: tokens [R, w] and their chances [R, w], best first.

    scores [R, D], ids [D]; noise: each row's key [R] int64 and temperature [R] float64, 0 is greedy.
    """
    if noise is not None:
        keys, heat = noise[0][:, None], noise[1][:, None]  # [R, 1]
        noised = scores.double() / torch.where(heat > 0, heat, 1.0)  # [R, D]
        scores = noised + torch.where(heat > 0, gumbel(keys, ids), 0.0)
    chances, place = highest(torch.softmax(scores, -1), width)
    return ids[place], chances


def highest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As topk: the values [R, n] and where they are [R, n], best first. rows [R, D]

    A row is one block's work on a GPU: 50 µs for 16,384 numbers. So the best of each piece are found first.
    """
    length = rows.shape[-1] // PIECES
    if count > length // 2 or rows.shape[-1] % PIECES:
        values, place = rows.topk(count)
        return values, place
    some, at = rows.view(-1, length).topk(count, sorted=False)  # [R * PIECES, n]
    values, order = some.view(rows.shape[0], -1).topk(count)  # [R, n] among n of each piece
    place = at.view(rows.shape[0], -1).gather(1, order)
    return values, place + order // count * length


def each_position(seqs: list[Sequence], lengths: list[int]) -> tuple[list[Sequence], list[int]]:
    """Who chooses at each wanted row of a block, and for which position."""
    pairs = [(seq, len(seq.tokens) + j) for seq, k in zip(seqs, lengths, strict=True) for j in range(k)]
    return [seq for seq, _ in pairs], [position for _, position in pairs]


def fill_noise(a: dict[str, Any], speakers: list[Sequence], positions: list[int]) -> None:
    """Each row's key, bit by bit, and its temperature."""
    keys = [key(seq.seed, p, CHOICE) for seq, p in zip(speakers, positions, strict=True)]
    fill_padded(a["key"].view(np.uint64), np.array(keys, dtype=np.uint64), 0)
    fill_padded(a["temperature"], [seq.params.temperature for seq in speakers], 0)


def fill_guesses(info: Any, positions: Any, heads: Heads, depth: Any, n: Any, lines: Any) -> None:
    """Rows that stand `depth` after the last true one, one to a block: info [..., B, 8], positions [..., B].

    Where a text ends, nothing lies beyond the table's length: such rows are in vain, and must only not go astray.
    """
    length = heads.state.cache.length
    positions[...] = np.clip(n - 2 + depth, 0, length - 1)
    columns = (np.arange(info.shape[-2]), 1, lines, n - 1, np.minimum(n - 1 + depth, length))
    for column, values in enumerate(columns):
        info[..., column] = values


def lines_of(heads: Heads, seqs: list[Sequence]) -> Any:
    """Each sequence's line in the table, [B]."""
    return np.array([heads.state.cache.rows[seq.id].line for seq in seqs], dtype=np.int64)


def received(reply: PinnedBuffer, heads: Heads) -> dict[str, Any]:
    """What a replay has left in its reply, once it is over."""
    arrays = reply.next()
    reply.receive()
    end = heads.state.driver.event()
    end.record(heads.state.driver.stream)
    end.synchronize()
    return arrays
