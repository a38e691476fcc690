"""The int8 head on a CPU: all of its layers in one native call.

Promise: a row's scores are the same bits whichever rows share its pass, as in `int8`. Weights are quantised as they are
read, without calibration and outliers: errors cost acceptance only. The target's hidden states do have outliers, so
`fc` reads them with 16 bits. Without a compiler, `EightBits` products do the same in torch.
It knows rows and planes, not sequences or drafts.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends import ops
from ...backends.cpu import native
from ...backends.cpu.int8 import Addresses
from ...backends.rows import Rows
from ...engine.cache import Plane

if TYPE_CHECKING:
    from .network import Head

_FIELDS = ("tokens", "positions", "slots", "lines", "context", "want")  # of rows, in the order of pass.h


class NativeHead(Addresses):
    """`Head.scores` in native code. Holds the addresses of all weights, in the order of native/pass.h."""

    def __init__(self, head: Head, kernels: native.Kernels) -> None:
        embedding = head.embedding.to(torch.bfloat16).contiguous()  # [V, H], the target's own where it is int8
        super().__init__(head, embedding)
        self.kernels, self.layers, self.width = kernels, head.config.layers, head.config.hidden_size
        self.outputs = head.config.draft_vocab_size
        self._model = self._pack(head, embedding)

    def __call__(
        self, rows: Rows, plane: Plane, features: Tensor, masked: Tensor | None, fused: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Scores of the wanted rows [R, D], and every row's output [T, H].

        features [T, H]; with `fused` false, hidden states [T, taps * H].
        """
        lists, table = _lists(rows)
        if masked is not None:
            lists[0] = [-1 if mask else token for mask, token in zip(masked.tolist(), lists[0], strict=True)]
        count, wanted = len(lists[0]), len(lists[5])
        flat = array("q", [number for numbers in lists for number in numbers])
        pointers = [flat.buffer_info()[0] + 8 * count * i for i in range(6)]
        depth, tails = _tails(rows)
        features = features.to(torch.float32).contiguous()
        scores, outputs = torch.empty(wanted, self.outputs), torch.empty(count, self.width)
        taps = array("q", [0] * (self.layers - 1) + [outputs.data_ptr()])
        self.kernels.int8_pass(
            self._model,
            *pointers,
            table.data_ptr(),
            0 if tails is None else tails.buffer_info()[0],
            features.data_ptr() if fused else 0,
            0 if fused else features.data_ptr(),
            self._addresses(plane),
            scores.data_ptr() if wanted else 0,
            taps.buffer_info()[0],
            0,
            table.shape[1],
            depth,
            plane.k[0].shape[0],
            count,
            wanted,
            0,
            self.layers,
            torch.get_num_threads(),
        )
        return scores, outputs

    def _pack(self, head: Head, embedding: Tensor) -> int:
        c = head.config
        layers = b"".join(self._pack_layer(layer) for layer in head.layers)
        masks = [mask.data_ptr() for mask in head.masks] or [0, 0]
        sizes = (c.hidden_size, c.heads, c.kv_heads, c.head_dim, head.cos.shape[1], c.intermediate_size, self.outputs)
        fields = (
            self._keep(layers),
            *(tensor.data_ptr() for tensor in (head.norm, embedding, head.cos, head.sin)),
            *self._linear(head.head.packed),
            *(*sizes, head.cos.shape[0], c.norm_eps),
            *(head.hidden_norm.data_ptr(), *masks, c.vocab_size, *self._linear(head.fc.packed)),
        )
        return self._keep(struct.pack(native.MODEL, *fields))

    def _pack_layer(self, layer: Any) -> bytes:
        norms = (layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr(), 0, 0)
        products = (layer.qkv, layer.out, layer.gate_up, layer.down)
        linears = [field for product in products for field in self._linear(product.packed)]
        return struct.pack(native.LAYER, *norms, *linears, True, 0)


def _lists(rows: Rows) -> tuple[list[list[int]], Tensor]:
    """The rows' fields as lists, and the table of slots. Rows of a batch have the lists already."""
    batch = rows.batch
    if batch is None:
        return [getattr(rows, name).tolist() for name in _FIELDS], ops._whole(rows.table, torch.int32)
    return [getattr(batch, name) for name in _FIELDS], ops._whole(batch.table, torch.int32)


def _tails(rows: Rows) -> tuple[int, array[int] | None]:
    """Drafted ancestors' slots: the number of columns, and [T, columns] padded with -1."""
    if rows.batch is None:
        tails = [] if rows.ancestors is None else rows.ancestors.tolist()
    else:
        tails = rows.batch.tails
    depth = max(map(len, tails), default=0)
    if not depth:
        return 0, None
    return depth, array("i", [slot for tail in tails for slot in (*tail, *[-1] * (depth - len(tail)))])
