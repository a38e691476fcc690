"""Quantised checkpoints in safetensors: AWQ, GPTQ, compressed-tensors and FP8, read without rounding.

Promise: a weight's value is (field - zero point) * scale, with the file's own fields, zero points and scales; floats
are made of them in float32 and rounded once. Whatever does not fit together (shapes, group indices, a label that
contradicts the tensors) is a ModelError before the weight is used. A module is quantised if the file has its quantised
tensors: lists of exceptions in the configuration are not needed. It knows file formats; it does not know kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from .precision import FP8, INT4, INT8
from .weights import Safetensors, Weights

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column 8c + i of a word is its nibble _AWQ_ORDER[i]
_PARTS = {  # what a quantised module has instead of a plain weight, by method
    "awq": ("qweight", "qzeros", "scales"), "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight", "input_scale",
        "input_zero_point",
    ),
    "fp8": ("weight", "weight_scale_inv", "weight_scale", "input_scale"),
}  # fmt: skip
_WIDE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Grouped:
    """A weight [N, K]: input i of output n is (values[n, i] - zero[n, i // group]) * scale[n, i // group]."""

    values: Tensor  # [N, K] uint8 (fields of `bits` bits), int8 or float8_e4m3fn
    scale: Tensor  # [N, G] float16, bfloat16 or float32
    zero: Tensor | None  # [N, G] whole numbers; None: 0, or half the range of unsigned fields
    group: int  # inputs of a group; the last one may have fewer
    bits: int = 8
    order: Tensor | None = None  # [K]: column i is the model's input order[i]; None: i

    def to(self, device: torch.device) -> Grouped:
        zero = None if self.zero is None else self.zero.to(device)
        return replace(self, values=self.values.to(device), scale=self.scale.to(device), zero=zero)

    def rows(self, select: Callable[[Tensor], Tensor]) -> Grouped:
        """Some outputs, or all of them in another order."""
        zero = None if self.zero is None else select(self.zero)
        values = self.values
        values = select(values.view(torch.uint8)).view(values.dtype) if _is_fp8(values) else select(values)
        return replace(self, values=values, scale=select(self.scale), zero=zero)

    def floats(self, dtype: torch.dtype) -> Tensor:
        """[N, K], in the model's order of inputs."""
        index = torch.arange(self.values.shape[1], device=self.values.device) // self.group
        whole = self.values.float()
        if self.zero is not None:
            whole = whole - self.zero.float()[:, index]
        elif self.values.dtype == torch.uint8:
            whole = whole - (1 << (self.bits - 1))
        made = (whole * self.scale.float()[:, index]).to(dtype)
        if self.order is None:
            return made
        return torch.empty_like(made).index_copy_(1, self.order.to(made.device), made)


def _is_fp8(values: Tensor) -> bool:
    return values.dtype == torch.float8_e4m3fn


class QuantisedWeights(Weights):
    """A quantised checkpoint's tensors by Hugging Face's names: `get` dequantises, `grouped` gives them as they are."""

    def __init__(self, source: Safetensors, settings: Mapping[str, Any], path: Path) -> None:
        self._source, self._path = source, path
        self._settings, self._method = settings, str(settings["quant_method"])  # one of `config.QUANTISED`
        self._read = _READERS[self._method]
        parts = _PARTS[self._method]
        modules: dict[str, set[str]] = {}
        for name in source.names():
            module, _, part = name.rpartition(".")
            if part in parts:
                modules.setdefault(module, set()).add(part)
        self._modules = {module: found for module, found in modules.items() if self._quantised(module, found)}
        hidden = {f"{module}.{part}" for module, found in self._modules.items() for part in found}
        self._names = (source.names() - hidden) | {f"{module}.weight" for module in self._modules}
        if not self._modules:
            raise ModelError(
                f"{path} is labelled as quantised ({self._method}), but has no tensor of that kind; its config.json "
                "belongs to another model, download it again."
            )

    def _quantised(self, module: str, found: set[str]) -> bool:
        if found & {"qweight", "weight_packed"}:
            return True
        scaled = found & {"weight_scale", "weight_scale_inv"}
        return "weight" in found and bool(scaled) and self._source.raw(f"{module}.weight").dtype not in _WIDE

    @property
    def quantised(self) -> bool:
        return True

    @property
    def stored_in(self) -> str:
        """int4, int8 or fp8: what most of its products are stored in."""
        first = self._grouped(min(self._modules))
        return FP8 if _is_fp8(first.values) else INT8 if first.bits == 8 else INT4

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        module = name.removesuffix(".weight")
        if module not in self._modules:
            return self._source.shape(name)
        return self._read(self, module, True)  # type: ignore[no-any-return]

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        weight = self.grouped(name)
        return self._source.get(name, dtype) if weight is None else weight.floats(dtype)

    def grouped(self, name: str) -> Grouped | None:
        """A weight as it is stored; None if it is not quantised."""
        module = name.removesuffix(".weight")
        return self._grouped(module) if module in self._modules else None

    def _grouped(self, module: str) -> Grouped:
        weight: Grouped = self._read(self, module, False)
        if not bool(torch.isfinite(weight.scale.float()).all()):
            raise self.damaged(module, "has scales that are not numbers")
        return weight

    def part(self, module: str, part: str, optional: bool = False) -> Tensor | None:
        name = f"{module}.{part}"
        if self._source.has(name):
            return self._source.raw(name)
        if optional:
            return None
        raise self.damaged(module, f"has no {part}")

    def needed(self, module: str, part: str, *shape: int | None) -> Tensor:
        """A part of this shape; None: any size."""
        tensor = self.part(module, part)
        assert tensor is not None
        fits = len(shape) == tensor.dim() and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
        if not fits:
            wanted = [n or "…" for n in shape]
            raise self.damaged(module, f"has {part} of the shape {list(tensor.shape)} where {wanted} belongs")
        return tensor

    def damaged(self, module: str, what: str) -> ModelError:
        return ModelError(
            f"In {self._path} the quantised weight '{module}' {what} ({self._method}); the file is damaged or labelled "
            "wrongly, download it again."
        )

    def setting(self, *names: str, default: Any = None) -> Any:
        return next((self._settings[name] for name in names if self._settings.get(name) is not None), default)

    def scheme(self, module: str) -> Mapping[str, Any]:
        """compressed-tensors: how the weights of a module are stored, by the group that names it or its class."""
        groups = self._settings.get("config_groups") or {}
        known = [group for group in groups.values() if isinstance(group, Mapping)]
        named = [group for group in known if any(_names(target, module) for target in group.get("targets") or ())]
        chosen = (named or known or [{}])[0]
        weights: Mapping[str, Any] = chosen.get("weights") or {}
        return weights

    def block(self, module: str) -> tuple[int, int] | None:
        """Rows and columns of a block with one scale."""
        size = self.setting("weight_block_size")
        if size is None and self._method == "compressed-tensors":
            size = self.scheme(module).get("block_structure")
        fits = isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)
        return (size[0], size[1]) if fits and size is not None else None


def _names(target: object, module: str) -> bool:
    """Whether a target of compressed-tensors names this module: by an expression, or by its end."""
    if not isinstance(target, str):
        return False
    if target.startswith("re:"):
        with suppress(re.error):
            return re.match(target[3:], module) is not None or re.match(target[3:], f"model.{module}") is not None
        return False
    return module == target or module.endswith(f".{target}") or f"model.{module}" == target


# ------------------------------------------------------------ fields in words


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] -> uint8 [..., W * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _bits(weights: QuantisedWeights, allowed: tuple[int, ...]) -> int:
    bits = weights.setting("bits", "w_bit", default=4)
    if bits not in allowed:
        raise ModelError(
            f"The model's weights have {bits} bits ({weights._method}), which is not supported; use one with "
            f"{' or '.join(map(str, allowed))} bits, or a GGUF file."
        )
    return int(bits)


def _group(weights: QuantisedWeights, inputs: int) -> int:
    size = weights.setting("group_size", "q_group_size", default=128)
    if not isinstance(size, int) or isinstance(size, bool) or size == 0 or size < -1:
        raise ModelError(f"{weights._path} has a strange group_size ({size!r}); download it again.")
    return inputs if size == -1 or size > inputs else size


# ------------------------------------------------------------ AWQ


def _awq(weights: QuantisedWeights, module: str, shape: bool) -> Any:
    """qweight [K, N/8], qzeros [G, N/8], scales [G, N]; nibbles in AWQ's own order along N."""
    version = str(weights.setting("version", default="gemm")).lower()
    if version != "gemm":
        raise ModelError(f"{weights._path} is AWQ of the version '{version}'; only 'gemm' is read, use such a file.")
    bits = _bits(weights, (4,))
    words = weights.needed(module, "qweight", None, None)
    inputs, outputs = words.shape[0], words.shape[1] * 32 // bits
    if shape:
        return outputs, inputs
    group = _group(weights, inputs)
    groups = -(-inputs // group)
    zeros = weights.needed(module, "qzeros", groups, words.shape[1])
    scale = weights.needed(module, "scales", groups, outputs)
    return Grouped(_awq_natural(words), scale.T.contiguous(), _awq_natural(zeros), group, bits)


def _awq_natural(words: Tensor) -> Tensor:
    """[rows, N/8] -> [N, rows]"""
    columns: Tensor = unpack(words, 4).unflatten(-1, (-1, 8))[..., torch.tensor(_AWQ_ORDER)]
    return columns.flatten(-2).T.contiguous()


# ------------------------------------------------------------ GPTQ


def _gptq(weights: QuantisedWeights, module: str, shape: bool) -> Any:
    """qweight [K * bits/32, N] packed along K, qzeros [G, N * bits/32] along N, scales [G, N], g_idx [K]."""
    bits = _bits(weights, (4, 8))
    words = weights.needed(module, "qweight", None, None)
    inputs, outputs = words.shape[0] * 32 // bits, words.shape[1]
    if shape:
        return outputs, inputs
    values = unpack(words.T.contiguous(), bits)  # [N, K]
    group = _group(weights, inputs)
    groups = -(-inputs // group)
    scale = weights.needed(module, "scales", groups, outputs).T.contiguous()
    stored = weights.needed(module, "qzeros", groups, -(-outputs * bits // 32))
    zero = _gptq_zeros(weights, unpack(stored, bits)[:, :outputs].T.contiguous(), bits)
    made = _made(values, scale, zero, group, bits)
    if weights.setting("desc_act", default=False):
        return _by_group(weights, module, made, weights.needed(module, "g_idx", inputs))
    return made


def _gptq_zeros(weights: QuantisedWeights, stored: Tensor, bits: int) -> Tensor:
    """Version 1 stores them minus one. Labels are wrong sometimes: half the range, as symmetric files have, tells."""
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    second = str(weights.setting("checkpoint_format", default="gptq")).lower() == "gptq_v2"
    if weights.setting("sym", default=False):
        second = second if not bool((stored == stored[0, 0]).all()) else int(stored[0, 0]) == half
    return stored if second else (stored + 1) & mask


def _by_group(weights: QuantisedWeights, module: str, w: Grouped, index: Tensor) -> Grouped:
    """Inputs sorted by their group (`desc_act`, `actorder`), so that groups are contiguous. index [K]"""
    inputs, groups = w.values.shape[1], w.scale.shape[1]
    if index.shape != (inputs,) or int(index.min()) < 0 or int(index.max()) >= groups:
        raise weights.damaged(module, f"has group indices that are not {inputs} numbers from 0 to {groups - 1}")
    index, plain = index.long(), torch.arange(inputs) // w.group
    if torch.equal(index, plain):
        return w
    order = index.argsort(stable=True)
    if torch.equal(index[order], plain):
        return replace(w, values=w.values[:, order].contiguous(), order=order)
    zero = None if w.zero is None else w.zero[:, index].contiguous()
    return replace(w, scale=w.scale[:, index].contiguous(), zero=zero, group=1)  # groups of several sizes


def _made(values: Tensor, scale: Tensor, zero: Tensor | None, group: int, bits: int) -> Grouped:
    """Fields with their zero points; those in the middle of the range are left out."""
    if zero is not None and not bool((zero == 1 << (bits - 1)).all()):
        return Grouped(values, scale, zero, group, bits)
    return Grouped((values ^ 128).view(torch.int8) if bits == 8 else values, scale, None, group, bits)


# ------------------------------------------------------------ compressed-tensors and FP8


def _compressed(weights: QuantisedWeights, module: str, shape: bool) -> Any:
    """`weight_packed` [N, K * bits/32] along K with scales [N, G], or a whole `weight`."""
    if weights.part(module, "weight_packed", optional=True) is None:
        return _whole(weights, module, shape)
    scheme = weights.scheme(module)
    bits = scheme.get("num_bits")
    if scheme.get("type", "int") != "int" or bits not in (4, 8):
        raise ModelError(
            f"{weights._path} has packed weights of {bits} bits and type {scheme.get('type')!r}, which are not "
            "supported; use one with 4 or 8 bits, or a GGUF file."
        )
    words, sizes = weights.needed(module, "weight_packed", None, None), weights.needed(module, "weight_shape", 2)
    outputs, inputs = int(sizes[0]), int(sizes[1])
    if words.shape != (outputs, -(-inputs * bits // 32)):
        raise weights.damaged(module, f"has {list(words.shape)} words, which do not hold {outputs} × {inputs} values")
    if shape:
        return outputs, inputs
    scale = weights.needed(module, "weight_scale", outputs, None)
    groups = scale.shape[1]
    group = inputs if groups == 1 else int(scheme.get("group_size") or 0)
    if group <= 0 or -(-inputs // group) != groups:
        raise weights.damaged(module, f"has {groups} groups of {group} for {inputs} inputs")
    zero = _compressed_zeros(weights, module, outputs, groups, bits)
    made = _made(unpack(words, bits)[:, :inputs].contiguous(), scale, zero, group, bits)
    index = weights.part(module, "weight_g_idx", optional=True)
    used = index is not None and index.numel() > 0 and int(index.min()) >= 0  # -1: it is not used
    return _by_group(weights, module, made, index) if used and index is not None else made


def _compressed_zeros(weights: QuantisedWeights, module: str, outputs: int, groups: int, bits: int) -> Tensor | None:
    """[N, G] as fields are stored, + half the range: packed along N, or whole in old files."""
    stored = weights.part(module, "weight_zero_point", optional=True)
    if stored is None:
        return None
    half = 1 << (bits - 1)
    if stored.dtype == torch.int8 and stored.shape == (outputs, groups):
        return (stored.int() + half).to(torch.uint8)
    if stored.dtype != torch.int32 or stored.shape != (-(-outputs * bits // 32), groups):
        raise weights.damaged(module, f"has zero points of the shape {list(stored.shape)}")
    return unpack(stored.T.contiguous(), bits)[:, :outputs].T.contiguous()


def _whole(weights: QuantisedWeights, module: str, shape: bool) -> Any:
    """`weight` [N, K] in int8 or FP8, with one scale, one for each output, for each group, or for each block."""
    values = weights.needed(module, "weight", None, None)
    outputs, inputs = values.shape
    if shape:
        return outputs, inputs
    if values.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise weights.damaged(module, f"is stored as {values.dtype}, not as int8 or float8_e4m3fn")
    if _is_fp8(values) and bool(((values.view(torch.uint8) & 127) == 127).any()):
        raise weights.damaged(module, "has values that are not numbers")
    zero = weights.part(module, "weight_zero_point", optional=True)
    if zero is not None and bool((zero != 0).any()):
        raise ModelError(f"{weights._path} has 8-bit weights with zero points, which are not supported.")
    inverse = weights.part(module, "weight_scale_inv", optional=True)  # a factor, whatever its name says
    scale = weights.part(module, "weight_scale") if inverse is None else inverse
    assert scale is not None
    scale, group = _spread(weights, module, scale, outputs, inputs)
    return Grouped(values, scale, None, group, 8)


def _spread(weights: QuantisedWeights, module: str, scale: Tensor, outputs: int, inputs: int) -> tuple[Tensor, int]:
    """Scales for each output and group of inputs [N, G], and the size of a group."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1).contiguous(), inputs
    if scale.numel() == outputs and scale.shape[0] == outputs:
        return scale.reshape(outputs, 1), inputs
    block = weights.block(module)
    if block is not None:
        rows, columns = block
        if scale.shape == (-(-outputs // rows), -(-inputs // columns)):
            return scale.repeat_interleave(rows, 0)[:outputs].contiguous(), columns
    group = weights.scheme(module).get("group_size") if weights._method == "compressed-tensors" else None
    if group and scale.shape == (outputs, -(-inputs // group)):
        return scale.contiguous(), int(group)
    raise weights.damaged(module, f"has scales of the shape {list(scale.shape)} for {outputs} × {inputs} values")


_READERS: dict[str, Callable[[QuantisedWeights, str, bool], Any]] = {
    "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "fp8": _whole,
}  # fmt: skip
