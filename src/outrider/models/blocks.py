"""Matrices of trained drafters in GGUF's blocks: four or eight bits for a weight, a scale for 32 or 256 of them.

`encode` chooses each block's numbers by least squares; `BlockTensor` is a matrix that stays encoded until somebody needs
floats. Promise: a decoded matrix is what the format says, bit for bit, on every machine. It knows numbers, not what they
are weights of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from ..errors import ModelError

SIZES = {"Q8_0": (32, 34), "Q4_1": (32, 20), "Q4_0": (32, 18), "Q4_K": (256, 144)}  # inputs and bytes of a block
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # ranges that are tried: clipping the largest weight may pay
_CHUNK = 1 << 18  # weights that are encoded at once


@dataclass(frozen=True)
class BlockTensor:
    """A matrix [N, K] in blocks; it has what readers of weights use of a tensor."""

    raw: Tensor  # [N, bytes] uint8, as in a GGUF file
    kind: str  # a key of SIZES

    @staticmethod
    def checked(raw: Tensor, kind: str, name: str) -> BlockTensor:
        """Of bytes from a file; raises for anything but whole blocks."""
        if raw.dtype is not torch.uint8 or raw.dim() != 2 or raw.shape[1] % SIZES[kind][1]:
            raise ModelError(f"{name} is not in whole blocks of {kind}; get the file again.")
        return BlockTensor(raw, kind)

    @property
    def shape(self) -> torch.Size:
        inputs, size = SIZES[self.kind]
        return torch.Size((self.raw.shape[0], self.raw.shape[1] // size * inputs))

    def to(self, *where: torch.device | torch.dtype | str) -> Tensor:
        """In floats, with the arguments of `Tensor.to`."""
        return self.float().to(*where)

    def float(self) -> Tensor:
        values = quants.dequantize(self.raw.numpy(), GGMLQuantizationType[self.kind])
        return torch.from_numpy(values)


def encode(weight: Tensor, kind: str) -> BlockTensor:
    """Floats [N, K] in blocks of this kind; K must be whole blocks."""
    inputs, _ = SIZES[kind]
    if weight.dim() != 2 or weight.shape[1] % inputs:
        shape = " x ".join(map(str, weight.shape))
        raise ModelError(
            f"A tensor of {shape} values does not divide into {kind}'s blocks of {inputs}; choose another."
        )
    rows = weight.detach().cpu().float().split(max(1, _CHUNK // weight.shape[1]))
    parts = [_ENCODERS[kind](part.reshape(-1, inputs)).view(part.shape[0], -1) for part in rows]
    return BlockTensor(torch.cat(parts).contiguous(), kind)


def _halves(x: Tensor) -> Tensor:
    """[...] -> [..., 2]: the bytes of 16-bit floats."""
    return x.half()[..., None].view(torch.uint8)


def _nibbles(q: Tensor) -> Tensor:
    """[..., 2n] numbers below 16 -> [..., n]: the first half is low."""
    low, high = q.to(torch.uint8).chunk(2, -1)
    return low | high << 4


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _q8_0(w: Tensor) -> Tensor:
    d = (w.abs().amax(-1) / 127).half().float()
    q = (w * _inverse(d)[:, None]).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([_halves(d), q.view(torch.uint8)], -1)


def _q4_0(w: Tensor) -> Tensor:
    """w = d (q - 8); the largest weight decides which side has eight levels."""
    extreme = w.gather(-1, w.abs().argmax(-1, keepdim=True))[:, 0] / -8
    best, least = extreme, torch.full_like(extreme, torch.inf)
    for share in _SHRINK:
        levels = (w * _inverse(share * extreme)[:, None]).round().clamp(-8, 7)
        d = (w * levels).sum(-1) * _inverse(levels.square().sum(-1))
        error = (w - d[:, None] * levels).square().sum(-1)
        best, least = torch.where(error < least, d, best), torch.minimum(error, least)
    d = best.half().float()
    q = (w * _inverse(d)[:, None]).round().clamp(-8, 7) + 8
    return torch.cat([_halves(d), _nibbles(q)], -1)


def _lines(w: Tensor, below_zero: bool = False) -> tuple[Tensor, Tensor]:
    """d and m [..] for which d q + m, q < 16, is nearest to w [.., n]; `below_zero`: m must not be positive."""
    low, high = w.amin(-1), w.amax(-1)
    if below_zero:
        low = low.clamp(max=0)
    d, m, least = (high - low) / 15, low, torch.full_like(low, torch.inf)
    for share in _SHRINK:
        step, first = share * (high - low) / 15, low + (1 - share) / 2 * (high - low)
        if below_zero:
            first = first.clamp(max=0)
        q = ((w - first[..., None]) * _inverse(step)[..., None]).round().clamp(0, 15)
        mean, average = q.mean(-1, keepdim=True), w.mean(-1, keepdim=True)
        slope = ((q - mean) * (w - average)).sum(-1) * _inverse((q - mean).square().sum(-1))
        start = average[..., 0] - slope * mean[..., 0]
        if below_zero:
            through_zero = (q * w).sum(-1) * _inverse(q.square().sum(-1))
            slope, start = torch.where(start > 0, through_zero, slope), start.clamp(max=0)
        error = (w - slope[..., None] * q - start[..., None]).square().sum(-1)
        better = (error < least) & (slope > 0)
        d, m = torch.where(better, slope, d), torch.where(better, start, m)
        least = torch.where(better, error, least)
    return d, m


def _q4_1(w: Tensor) -> Tensor:
    d, m = (x.half().float() for x in _lines(w))
    q = ((w - m[:, None]) * _inverse(d)[:, None]).round().clamp(0, 15)
    return torch.cat([_halves(d), _halves(m), _nibbles(q)], -1)


def _q4_k(w: Tensor) -> Tensor:
    """w = d scale q - dmin least: eight sub-blocks, with six bits for each scale and each least value."""
    w = w.view(-1, 8, 32)
    steps, starts = _lines(w, below_zero=True)  # [B, 8]
    d, dmin = ((x.amax(-1) / 63).half().float() for x in (steps, -starts))  # [B]
    scale = (steps * _inverse(d)[:, None]).round().clamp(0, 63)
    least = (-starts * _inverse(dmin)[:, None]).round().clamp(0, 63)
    step, start = d[:, None] * scale, dmin[:, None] * least
    q = ((w + start[..., None]) * _inverse(step)[..., None]).round().clamp(0, 15)
    packed = _six_bits(scale.to(torch.uint8), least.to(torch.uint8))
    return torch.cat([_halves(d), _halves(dmin), packed, _nibbles(q.view(-1, 4, 64)).flatten(1)], -1)


def _six_bits(scale: Tensor, least: Tensor) -> Tensor:
    """[B, 8] twice -> [B, 12]: the last four of each have their upper two bits above the first four."""
    lower = scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4
    first, second = (x[:, :4] | x[:, 4:] >> 4 << 6 for x in (scale, least))
    return torch.cat([first, second, lower], -1)


_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _q8_0, "Q4_1": _q4_1, "Q4_0": _q4_0, "Q4_K": _q4_k}
