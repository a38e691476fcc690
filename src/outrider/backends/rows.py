"""The tensors of a pass, made from a batch when a model reads them. Captured passes take the batch's lists instead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engine.cache import Plane
from ..types import Batch


@dataclass(frozen=True)
class Sources:
    """The sources that the rows of a pass read, where a model has an encoder."""

    table: Tensor  # [lines, length] int32: slots of a line's source
    each: list[int]  # [T] tokens of each row's source
    ids: dict[int, list[int]]  # line -> the source

    @property
    def lengths(self) -> Tensor:
        """[T] as `each`"""
        return torch.tensor(self.each)

    def unread(self, plane: Plane) -> list[tuple[list[int], Tensor]]:
        """The ids and the slots of each that the plane does not hold yet."""
        firsts = self.table.numpy()
        new = ((line, ids) for line, ids in self.ids.items() if ids and not plane.has_source(firsts.item(line, 0)))
        return [(ids, self.table[line, : len(ids)]) for line, ids in new]

    def at(self, rows: Tensor) -> Sources:
        """Those of some rows [n]."""
        return replace(self, each=[self.each[i] for i in rows.tolist()])


@dataclass(frozen=True)
class Rows:
    """The input of a model's pass: T rows, one token each."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T] root position + depth for nodes
    slots: Tensor  # [T] where each row's K/V goes
    lines: Tensor  # [T] the sequence's line in the table
    context: Tensor  # [T] how many table entries of its line a row reads: itself included for pending rows
    table: Tensor  # [lines, length] int32, slot of each committed position
    ancestors: Tensor | None  # [T, D] int32 slots of drafted ancestors, self last, then -1; None: no drafts
    want: Tensor  # [R] rows whose logits are needed
    blocks: Any = None  # the rows grouped for GPU kernels: `kernels.attention.Blocks`
    batch: Batch | None = None  # the same as lists, where the rows were made from a batch
    sources: Sources | None = None

    @property
    def count(self) -> int:
        """T"""
        return self.tokens.shape[0]

    @property
    def on_sources(self) -> Rows:
        """Rows that attend to their sources instead of their texts; to nothing, where there are none."""
        if self.blocks is not None:
            return replace(self, blocks=self.blocks.on_sources)
        s, lines = self.sources, self.lines.long()
        context, table = (torch.zeros_like(lines), self.table) if s is None else (s.lengths, s.table)
        return Rows(self.tokens, self.positions, self.slots, lines, context, table, None, self.want)


class _LazyRows(Rows):
    """Rows whose tensors are made on first use: kernels that read the batch's lists never use them."""

    def __init__(self, batch: Batch) -> None:
        # The other fields come from __getattr__.
        self.__dict__.update(batch=batch, blocks=None, sources=None if batch.sources is None else _sources(batch))

    @property
    def count(self) -> int:
        assert self.batch is not None
        return self.batch.count

    def __getattr__(self, name: str) -> Any:
        if name not in Rows.__dataclass_fields__:
            raise AttributeError(name)
        b = self.__dict__["batch"]
        depth = max(map(len, b.tails), default=0)
        padded = [tail + [-1] * (depth - len(tail)) for tail in b.tails] if depth else None
        tokens, positions, slots = torch.tensor((b.tokens, b.positions, b.slots), dtype=torch.long)
        lines, context = torch.tensor((b.lines, b.context), dtype=torch.int32)
        ancestors = None if padded is None else torch.tensor(padded, dtype=torch.int32)  # [T, D]
        want = torch.tensor(b.want, dtype=torch.long)
        self.__dict__.update(
            tokens=tokens, positions=positions, slots=slots, lines=lines, context=context,
            table=b.table, ancestors=ancestors, want=want,
        )  # fmt: skip
        return self.__dict__[name]


def _sources(batch: Batch) -> Sources:
    assert batch.sources is not None
    ids = {line: seq.source for line, seq in zip(batch.lines, batch.owners, strict=True)}
    return Sources(batch.sources, [len(seq.source) for seq in batch.owners], ids)


def rows_of(batch: Batch) -> Rows:
    """The tensors of a batch."""
    return _LazyRows(batch)
