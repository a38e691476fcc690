"""GGUF files: the header as Python values, the tensors as torch's, under Hugging Face names.

Promise: every length is checked against the file before it is believed, so that a truncated or damaged file gives a
sentence and never garbage; every type that the `gguf` package can dequantise is read. This file knows llama.cpp's
conventions (names, the order of rows within a head); it does not know what the metadata means for a model.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from ..errors import ModelError
from .config import ModelConfig
from .weights import Weights

_INTEGERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 10: "<u8", 11: "<i8"}
_SCALARS = _INTEGERS | {6: "<f4", 7: "?", 12: "<f8"}  # GGUF's number of a type -> numpy's name
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_LONGEST = 1 << 22  # no vocabulary is longer: a damaged count must not fill the memory


class _Damaged(Exception):
    """The header contradicts itself or the file's length."""


class _Cursor:
    """Reads a header from front to back, never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.size = data, 0, len(data)

    def take(self, count: int) -> int:
        """Move over count bytes; returns where they begin."""
        start, self.at = self.at, self.at + count
        if self.at > self.size:
            raise _Damaged("it ends within its header")
        return start

    def number(self, code: str) -> int:
        return int(struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0])

    def string(self) -> str:
        start = self.take(self.number("Q"))
        return self.data[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        return self.numbers(kind, 1)[0]

    def array(self, kind: int, count: int) -> list[Any]:
        if count > _LONGEST:
            raise _Damaged(f"its header has an array of {count:,} values")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return self.numbers(kind, count)

    def numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise _Damaged(f"its header has a value of unknown type {kind}")
        if count == 0:
            return []
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).tolist()
        return values


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]  # torch's order: rows first
    kind: GGMLQuantizationType
    start: int  # within the data section
    size: int  # bytes


class GGUF:
    """An open GGUF file: `metadata` by key, `tensors` by llama.cpp's names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        try:
            self._parse()
        except (_Damaged, UnicodeDecodeError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"{path} is incomplete or damaged ({error}); delete it and download it again.") from error
        if int(self.metadata.get("split.count") or 0) > 1:
            raise ModelError(f"{path} is one part of several; join them with llama.cpp's `llama-gguf-split --merge`.")

    def _parse(self) -> None:
        cursor = _Cursor(self._data)
        cursor.take(4)
        version = cursor.number("I")
        if version not in (2, 3):
            raise _Damaged(f"its format version reads {version}, where 2 and 3 are known")
        tensors, pairs = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"))
        self.tensors: dict[str, _Entry] = dict(_entry(cursor) for _ in range(tensors))
        alignment = int(self.metadata.get("general.alignment") or _ALIGNMENT)
        self._base = -(-cursor.at // alignment) * alignment
        needed = self._base + max((e.start + e.size for e in self.tensors.values()), default=0)
        if needed > cursor.size:
            raise _Damaged(f"it has {cursor.size:,} of {needed:,} bytes")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor dequantised to float32, in its stored order; the result owns its memory."""
        entry = self._find(name)
        raw = np.frombuffer(self._data, np.uint8, entry.size, self._base + entry.start)
        try:
            values = quants.dequantize(raw.reshape(*entry.shape[:-1], -1), entry.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path} has tensors of type {entry.kind.name}, which cannot be read; "
                "use a file of another type, such as Q8_0, Q4_K_M or F16."
            ) from error
        return np.array(values, dtype=np.float32, copy=not values.flags.writeable)

    def _find(self, name: str) -> _Entry:
        if name not in self.tensors:
            raise ModelError(f"{self.path} has no tensor '{name}'; it is not a language model that Outrider runs.")
        return self.tensors[name]


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file, or it is incomplete; download it again.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error


def _entry(cursor: _Cursor) -> tuple[str, _Entry]:
    name, dims = cursor.string(), cursor.number("I")
    if not 1 <= dims <= 4:
        raise _Damaged(f"the tensor '{name}' has {dims} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(dims)]))
    kind = GGMLQuantizationType(cursor.number("I"))  # a ValueError for a number that nobody knows
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise _Damaged(f"the tensor '{name}' has rows of {shape[-1]} values, not a multiple of {block}")
    return name, _Entry(shape, kind, cursor.number("Q"), prod(shape) // block * block_bytes)


# --- weights ------------------------------------------------------------------------------------------------------

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PERMUTED = ("llama", "smollm3")  # llama.cpp rotates neighbours (2i, 2i+1) in these, Hugging Face halves (i, i + d/2)


class GGUFWeights(Weights):
    """The tensors of a GGUF file under Hugging Face names, with Hugging Face's order of rows."""

    def __init__(self, file: GGUF, config: ModelConfig) -> None:
        self._file, self._config = file, config
        self._names = {ours: theirs for theirs in file.tensors if (ours := _rename(theirs)) is not None}
        if config.architecture in _PERMUTED and config.rotary_dim != config.head_dim:
            raise ModelError(f"{file.path} rotates only a part of each head, which is not supported in such files.")

    @property
    def quantised(self) -> bool:
        """Whether the file has lost precision already."""
        whole = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
        return any(entry.kind not in whole for entry in self._file.tensors.values())

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._names[name])

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = torch.from_numpy(self._file.array(self._names[name]))
        return self._in_halves(name, tensor).to(dtype)

    def _in_halves(self, name: str, tensor: Tensor) -> Tensor:
        """Undo the permutation of q and k: within a head, row 2i goes to i and row 2i + 1 to i + d/2."""
        part = name.rsplit(".", 2)[-2]
        if part not in ("q_proj", "k_proj") or self._config.architecture not in _PERMUTED:
            return tensor
        heads = self._config.heads if part == "q_proj" else self._config.kv_heads
        pairs = tensor.view(heads, self._config.head_dim // 2, 2, *tensor.shape[1:])  # [heads, d/2, 2, ...]
        return pairs.transpose(1, 2).reshape(tensor.shape)


def _rename(theirs: str) -> str | None:
    """`blk.3.attn_q.weight` -> `layers.3.self_attn.q_proj.weight`; None for what is no weight of ours."""
    parts = theirs.split(".")
    if len(parts) == 2 and parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    return None


# --- the way back ---------------------------------------------------------------------------------------------------


def their_name(ours: str) -> str:
    """`layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem, _, kind = ours.rpartition(".")
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"blk.{layer}.{next(theirs for theirs, name in _BLOCK.items() if name == part)}.{kind}"
    return f"{next(theirs for theirs, name in _TOP.items() if name == stem)}.{kind}"


def in_pairs(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """As llama.cpp keeps q and k, which rotates neighbours where Hugging Face rotates halves: undoes `_in_halves`."""
    part = name.rsplit(".", 2)[-2]
    if part not in ("q_proj", "k_proj") or config.architecture not in _PERMUTED:
        return tensor
    heads = config.heads if part == "q_proj" else config.kv_heads
    halves = tensor.view(heads, 2, config.head_dim // 2, *tensor.shape[1:])  # [heads, 2, d/2, ...]
    return halves.transpose(1, 2).reshape(tensor.shape)
