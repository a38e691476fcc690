"""Quantised weights in the order of `kernels.packed`, and the decoder that runs them on a GPU.

Promise: packing loses no bit: every scale, zero point and field of the file is in the packed weight, so that it stands
for the file's own numbers. What the kernel has no scheme for is dequantised to the type of the rows, and `description`
says so. It knows file formats and the names of weights; it does not know sequences, drafts or text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.config import ModelConfig
from ...models.precision import GGUF
from ...models.quantised import Grouped
from ..transformer import Loader, Transformer, WeightSource
from . import nvrtc
from .kernels.fields import Tiled, Variant, fits, prepare, tiled
from .kernels.packed import SCHEMES, Packed, PackedProduct

_BLOCK = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176)}
_BLOCK["Q6_K"] = (256, 210)  # inputs and bytes of a block in the file
_CHUNK = 1 << 26  # weights that are unpacked at once


# ------------------------------------------------------------ fields into words


def _laid_out(compute: torch.dtype, kind: str, fields: Tensor, info: Tensor, group: int = 0) -> Packed | Tiled:
    """For rows of type `compute` and the fastest kernel that there is. Other arguments: `_packed`."""
    if compute == torch.bfloat16 and nvrtc.available(fields.device) and fits(kind, fields.shape[1], group):
        return tiled(kind, fields, info, group)
    return _packed(kind, fields, info, group)


def _packed(kind: str, fields: Tensor, info: Tensor, group: int = 0) -> Packed:
    """fields [N, K] uint8; info [N, words] int32, of every step, or of every group."""
    s, (outputs, inputs) = SCHEMES[kind], fields.shape
    planes = F.pad(fields, (0, -inputs % s.step)).view(outputs, -1, s.planes, s.plane)
    low = torch.zeros(planes[:, :, 0].shape, dtype=torch.int32, device=fields.device)
    for j in range(s.planes):
        low |= (planes[:, :, j].int() & ((1 << s.bits) - 1)) << (s.bits * j)
    high = None
    if s.extra:
        tops = torch.zeros_like(low)
        for j in range(s.planes):
            tops |= (planes[:, :, j].int() >> s.bits) << s.high_place(j)
        high = tops.to(torch.uint8 if s.extra == 1 else torch.int16).flatten(1)
    return Packed(kind, low.flatten(1), high, info.T.contiguous(), inputs, group)


def _in_chunks(make: Callable[[Tensor], Any], rows: Tensor, inputs: int) -> Packed | Tiled:
    """Packs some outputs at a time: unpacked fields take eight times the memory of their file."""
    first, *rest = [make(chunk) for chunk in rows.split(max(1, _CHUNK // inputs // 64) * 64)]
    made: Packed | Tiled = first.joined(*rest) if rest else first
    return made


# ------------------------------------------------------------ GGUF's blocks


def pack_blocks(raw: Tensor, kind: str, compute: torch.dtype = torch.bfloat16) -> Packed | Tiled:
    """Rows of GGUF blocks [N, bytes] of a kind in `SCHEMES`, for products with rows of type `compute`."""
    inputs, size = _BLOCK[kind]
    return _in_chunks(lambda rows: _pack_rows(rows, kind, compute), raw, raw.shape[1] // size * inputs)


def _pack_rows(raw: Tensor, kind: str, compute: torch.dtype) -> Packed | Tiled:
    blocks = raw.view(raw.shape[0], -1, _BLOCK[kind][1])  # [N, U, bytes]
    fields, info = _UNPACK[kind](blocks)  # [N, U, ...] uint8 both
    fields, scheme = fields.flatten(1), SCHEMES[kind]
    steps = -(-fields.shape[1] // scheme.step)
    info = info.flatten(1)
    info = F.pad(info, (0, 4 * steps * scheme.infos - info.shape[1])).contiguous().view(torch.int32)
    return _laid_out(compute, kind, fields, info)


def _halves(qs: Tensor) -> Tensor:
    """Nibbles in GGUF's order: the low ones of some bytes, then the high ones. [..., n] -> [..., 2n]"""
    return torch.cat([qs & 15, qs >> 4], -1)


def _q4_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return _halves(b[..., 2:]), b[..., :2]


def _q4_1(b: Tensor) -> tuple[Tensor, Tensor]:
    return _halves(b[..., 4:]), b[..., :4]


def _q8_0(b: Tensor) -> tuple[Tensor, Tensor]:
    return b[..., 2:] ^ 128, b[..., :2]


def _q4_k(b: Tensor, at: int = 16) -> tuple[Tensor, Tensor]:
    """at: where the nibbles begin. Scales and minima have six bits each in the file, and a byte here."""
    q = b[..., 4:16]
    top = q[..., :8] >> 6 << 4
    scales = torch.cat([q[..., :4] & 63, (q[..., 8:] & 15) | top[..., :4]], -1)
    minima = torch.cat([q[..., 4:8] & 63, (q[..., 8:] >> 4) | top[..., 4:]], -1)
    fields = _halves(b[..., at:].unflatten(-1, (4, 32))).flatten(-2)
    return fields, torch.cat([b[..., :4], scales, minima], -1)


def _q5_k(b: Tensor) -> tuple[Tensor, Tensor]:
    low, info = _q4_k(b, 48)
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    fifth = (b[..., None, 16:48] >> shifts) & 1  # [N, U, 8, 32]
    return low | (fifth.flatten(-2) << 4), info


def _q6_k(b: Tensor) -> tuple[Tensor, Tensor]:
    low, high = b[..., :128].unflatten(-1, (2, 64)), b[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)[:, None]
    twos = (high >> shifts) & 3  # [N, U, 2, 4, 32]
    fields = _halves(low).flatten(-2) | (twos.flatten(-3) << 4)
    scale = F.pad(b[..., None, 208:210].expand(*b.shape[:-1], 2, 2), (0, 2))  # of each half of a block
    return fields, torch.cat([scale, (b[..., 192:208] ^ 128).unflatten(-1, (2, 8))], -1)


_UNPACK: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


# ------------------------------------------------------------ fields with a scale for each group of inputs


def grouped_kind(w: Grouped) -> str:
    """The scheme of a weight; empty where there is none."""
    inputs = w.values.shape[1]
    if w.group < inputs and w.group % SCHEMES["int4"].plane:
        return ""
    if w.values.dtype == torch.float8_e4m3fn:
        return "fp8"
    if w.bits == 8:
        return "int8" if w.zero is None else ""
    if w.bits != 4:
        return ""
    return {torch.float16: "int4", torch.bfloat16: "int4b"}.get(w.scale.dtype, "")


def pack_groups(w: Grouped, compute: torch.dtype = torch.bfloat16) -> Packed | Tiled:
    """A weight whose `grouped_kind` is not empty, in the order of its inputs."""
    kind, inputs = grouped_kind(w), w.values.shape[1]
    s = SCHEMES[kind]
    group = w.group if w.group < inputs else -(-inputs // s.step) * s.step  # one group: that of every padded input
    if s.bits == 8:
        info = w.scale.float().contiguous().view(torch.int32)
    else:
        zero = torch.full_like(w.scale, 8, dtype=torch.int32) if w.zero is None else w.zero.int()
        info = (w.scale.contiguous().view(torch.int16).int() & 0xFFFF) | (zero << 16)
    groups = -(-inputs // s.step) * s.step // group + 1  # a padded step may begin another group
    info = F.pad(info, (0, max(0, groups - info.shape[1])))
    fields = w.values.view(torch.uint8) if w.values.dtype != torch.int8 else (w.values.view(torch.uint8) ^ 128)
    return _laid_out(compute, kind, fields, info, group)


# ------------------------------------------------------------ the decoder


@dataclass(frozen=True)
class PackedLoader(Loader):
    """Loads products in the checkpoint's own precision. `floats` collects the names of those that have none, `variants`
    the kernels that the others need."""

    precision: str
    floats: list[str]
    variants: set[Variant]

    def fused_product(self, name: str, sources: list[str], bias: Tensor | None) -> Any:
        packed = [self.packed(source) for source in sources]
        orders = [order for _, order in packed if order is not None]
        alike = len(orders) in (0, len(packed)) and all(torch.equal(orders[0], order) for order in orders[1:])
        if alike and all(weight is not None for weight, _ in packed):
            weights = [w for w, _ in packed if w is not None]
            product = PackedProduct(weights, bias, orders[0] if orders else None)
            self.variants.update(product.variants(self.config.activation if name.endswith("gate_up") else None))
            return product
        self.floats.append(name)
        return super().fused_product(name, sources, bias)

    def head(self, embedding: Tensor) -> Any:
        weight, order = self.packed("embed_tokens.weight" if self.config.tied else "lm_head.weight")
        if weight is not None and order is None:
            product = PackedProduct([weight])
            self.variants.update(product.variants(None))
            return product
        return super().head(embedding)

    def mixture(self, layer: str) -> dict[str, Any]:
        self.floats.append(f"{layer}.experts")
        return super().mixture(layer)

    def packed(self, name: str) -> tuple[Packed | Tiled | None, Tensor | None]:
        """A weight and the order of its inputs, if the kernel has a scheme for it."""
        source: Any = self.source
        if self.precision != GGUF:
            grouped = source.grouped(name)
            if grouped is None or not grouped_kind(grouped):
                return None, None
            order = None if grouped.order is None else grouped.order.to(self.device)
            return pack_groups(grouped.to(self.device), self.dtype), order
        if source.kind(name) not in _BLOCK:
            return None, None
        return pack_blocks(source.blocks(name).to(self.device), source.kind(name), self.dtype), None


class PackedTransformer(Transformer):
    """The decoder with weights in a checkpoint's own precision; rows and K/V are bfloat16."""

    precision = ""  # its name, as in `models.precision`

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        precision: str,
        device: torch.device | str = "cuda",
        length: int | None = None,
        compute: torch.dtype = torch.bfloat16,
    ) -> None:
        self.precision, self._floats, self._variants = precision, list[str](), set[Variant]()
        super().__init__(config, weights, compute, device, length)
        if self._variants:
            prepare(self._variants, self.device)
        self.dtype = torch.uint8
        self.description = f"The weights are read in the checkpoint's own precision ({precision})."
        if self._floats:
            names = f"{self._floats[0]} and {len(self._floats) - 1} more" if self._floats[1:] else self._floats[0]
            self.description += f" {names} have no kernel of that kind and were dequantised to {compute}."

    def loader(self, weights: WeightSource, int8: bool) -> Loader:
        return PackedLoader(
            self.config,
            weights,
            self.compute,
            self.stream,
            self.device,
            int8,
            self.precision,
            self._floats,
            self._variants,
        )
