"""The decoder on a CPU with a GGUF file's own blocks: its four to eight bits are repacked, never rounded again.

The promise: `repack` loses no bit, and a row's logits are the same bits whichever rows share its pass, for every number
of rows and threads and for every instruction set (see native/blocks.h). The repacked file is made once. It knows block
formats and the names of weights; it does not know sequences, drafts or text. It needs the native kernels: without them
the int8 decoder runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ...engine.cache import Plane
from ...errors import ModelError
from ...models.blocks import BlockTensor, UnreadBlocks
from ...models.config import ModelConfig
from ...models.gguf_file import GGUFWeights
from ...models.stages import stage
from ...models.weights import FamilyWeights
from ...types import Output
from .. import WHOLE, Model, Part, PlaneShape, ops
from ..rows import Rows
from ..transformer import rope_tables
from . import native, quantise as quant
from .int8 import NativePass, NativeProduct, Words
from .quantise import HALF, OUTPUTS, PRODUCTS, NamedTensors, Tensors

if TYPE_CHECKING:
    from ...models.checkpoint import Checkpoint

FORMAT = 3  # of the repacked file; a change makes old files be built again
KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # in the order of native/blocks.h
STORED = (*KINDS, "F16", "BF16", "F32")  # types whose single rows kernels read from the file
SUPER = ("Q4_K", "Q5_K", "Q6_K")  # units of 256 inputs; the others have 32
LANES = 16  # outputs of a piece
GATED = "gate_up"  # how the name of a gated pair ends
_CHUNK = 1 << 22  # weights that are repacked at once
_PAIRED = 256  # pieces that are paired at once
Bytes = npt.NDArray[Any]  # uint8
Fours = npt.NDArray[np.uint32]
FileWeights: TypeAlias = GGUFWeights | FamilyWeights  # of a GGUF file
_SOURCES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}  # fmt: skip


# ------------------------------------------------------------ repacking


def repack(raw: Tensor, kind: str) -> Tensor:
    """Rows of GGUF blocks [N, bytes] -> pieces of 16 rows [ceil(N/16), bytes], in the order of native/blocks.h."""
    if padding := -raw.shape[0] % LANES:
        raw = F.pad(raw, (0, 0, 0, padding))
    rows = raw.view(-1, LANES, raw.shape[1])  # [P, 16, bytes]
    step = max(1, _CHUNK // (2 * LANES * raw.shape[1]))
    pieces = torch.empty(0, dtype=torch.uint8)
    for start in range(0, rows.shape[0], step):
        chunk = torch.from_numpy(_pieces(rows[start : start + step].numpy(), kind))
        if not start:
            pieces = torch.empty(rows.shape[0], chunk.shape[1], dtype=torch.uint8)
        pieces[start : start + step] = chunk
    return pieces


def _pieces(raw: Bytes, kind: str) -> Bytes:
    """[P, 16, bytes] -> [P, bytes]: the fields of each unit, one after the other."""
    units = raw.reshape(*raw.shape[:2], -1, _BYTES[kind]).swapaxes(1, 2)  # [P, U, 16, bytes of a block]
    fields = [field.reshape(*units.shape[:2], -1) for field in _FIELDS[kind](units)]
    return np.ascontiguousarray(np.concatenate(fields, -1).reshape(raw.shape[0], -1))


def _fours(values: Bytes) -> Fours:
    """Four bytes in a word, [..., n] -> [..., n/4]: numpy's loops over four bytes each take several times as long."""
    return np.ascontiguousarray(values).view(np.uint32)


def _lines(values: Bytes, steps: int, bits: int) -> Bytes:
    """[P, U, 16, n] -> [P, U, n/(4 steps), 64]: a byte holds `bits` bits of each of so many steps, lowest first."""
    split = _fours(values).reshape(*values.shape[:3], -1, steps)  # [P, U, 16, lines, steps]
    packed = split[..., 0]
    for s in range(1, steps):
        packed = packed | split[..., s] << np.uint32(bits * s)  # no byte's bits reach the next one
    return np.ascontiguousarray(packed.swapaxes(2, 3)).view(np.uint8)


def _halves(qs: Bytes) -> Bytes:
    """Nibbles in GGUF's order: the low ones of some bytes, then the high ones. [..., n] -> [..., 2n]"""
    words, low = _fours(qs), np.uint32(0x0F0F0F0F)
    return np.concatenate([words & low, words >> np.uint32(4) & low], -1).view(np.uint8)


def _pairs(values: Bytes) -> Bytes:
    """[P, U, 16, n] -> [P, U, n/2, 16, 2]"""
    return values.reshape(*values.shape[:3], -1, 2).swapaxes(2, 3)


def _q4_0(b: Bytes) -> Iterator[Bytes]:
    yield b[..., :2]
    yield _lines(_halves(b[..., 2:]), 2, 4)


def _q4_1(b: Bytes) -> Iterator[Bytes]:
    yield b[..., :2]
    yield b[..., 2:4]
    yield _lines(_halves(b[..., 4:]), 2, 4)


def _q8_0(b: Bytes) -> Iterator[Bytes]:
    yield b[..., :2]
    yield _lines(b[..., 2:] ^ 0x80, 1, 8)


def _q4_k(b: Bytes, at: int = 16) -> Iterator[Bytes]:
    """`at`: where the nibbles begin."""
    yield b[..., :2]
    yield b[..., 2:4]
    q = b[..., 4:16]  # 6 bits each: 8 scales and 8 minima
    top = q[..., :8] >> 6 << 4
    scales = np.concatenate([q[..., :4] & 63, (q[..., 8:] & 15) | top[..., :4]], -1)
    minima = np.concatenate([q[..., 4:8] & 63, (q[..., 8:] >> 4) | top[..., 4:]], -1)
    yield scales.swapaxes(2, 3)  # [P, U, 8, 16]
    yield _pairs(minima)
    yield _lines(_halves(b[..., at:].reshape(*b.shape[:3], 4, 32)).reshape(*b.shape[:3], 256), 2, 4)


def _q5_k(b: Bytes) -> Iterator[Bytes]:
    yield from _q4_k(b, 48)
    fifth = (b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [P, U, 16, 8, 32]
    yield _lines(fifth.reshape(*b.shape[:3], 256), 8, 1)


def _q6_k(b: Bytes) -> Iterator[Bytes]:
    low, high = b[..., :128].reshape(*b.shape[:3], 2, 64), b[..., 128:192].reshape(*b.shape[:3], 2, 1, 32)
    twos = (high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3  # [P, U, 16, 2, 4, 32]
    yield b[..., 208:210]
    yield np.zeros_like(b[..., 208:210])  # so that the nibbles begin with a cache line
    yield _pairs(b[..., 192:208])
    yield _lines(_halves(low).reshape(*b.shape[:3], 256), 2, 4)
    yield _lines(twos.reshape(*b.shape[:3], 256), 4, 2)


_FIELDS = dict(zip(KINDS, (_q4_0, _q4_1, _q8_0, _q4_k, _q5_k, _q6_k), strict=True))
_BYTES = dict(zip(KINDS, (18, 20, 34, 144, 176, 210), strict=True))  # of a block in the file
_UNIT = dict(zip(KINDS, (288, 320, 544, 2368, 2880, 3392), strict=True))  # bytes of a unit of a piece


# ------------------------------------------------------------ a model's products


def reason_against(weights: object, config: ModelConfig) -> str:
    """Why the blocks of a model's file cannot be used as they are; empty if they can."""
    if not isinstance(getattr(weights, "source", weights), GGUFWeights):
        return "the weights are not those of a GGUF file"
    assert isinstance(weights, FileWeights)
    if not config.llama_like:  # the one native call knows no other layers
        return f"layers of the family {config.architecture} differ from Llama's"
    for i in range(config.layers):
        for name in PRODUCTS:
            kinds = {weights.kind(source) for source in _sources(name, i)}
            if not kinds.issubset(KINDS):
                return f"layer {i} has blocks of type {min(kinds.difference(KINDS))}"
            if 0 < len(kinds.intersection(SUPER)) < len(kinds):
                return f"layer {i} mixes blocks of 32 and of 256 inputs in one product"
    head = weights.kind(_head(config))
    if head not in KINDS:
        return f"the output matrix has type {head}"
    if config.head_dim % LANES:
        return f"heads have {config.head_dim} values, not a multiple of {LANES}"
    return ""


def runs(weights: object, config: ModelConfig) -> bool:
    """Whether a model's file can run as it is, on this machine."""
    return not reason_against(weights, config) and ops._loaded().kernels is not None


def _sources(name: str, layer: int) -> list[str]:
    return [f"layers.{layer}.{source}.weight" for source in _SOURCES[name]]


def _head(config: ModelConfig) -> str:
    return "embed_tokens.weight" if config.tied else "lm_head.weight"


def repacked(config: ModelConfig, weights: FileWeights) -> Tensors:
    """All that `repacking` yields, in memory."""
    return dict(repacking(config, weights))


def repacking(config: ModelConfig, weights: FileWeights) -> NamedTensors:
    """Every tensor of the model with its name, product by product; none is kept here. A product's pieces are
    `PRODUCT.0.KIND`, `PRODUCT.1.KIND`, ... in order."""
    with stage("Repacking the weights") as done:
        for i in range(config.layers):
            at = f"layers.{i}."
            for name in PRODUCTS:
                yield from _product(weights, f"{at}{name}", _sources(name, i)).items()
            norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
            if config.qk_norm:
                norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
            yield from ((f"{at}{key}", weights.get(f"{at}{n}.weight", torch.float32)) for key, n in norms.items())
            done((i + 1) / (config.layers + 1))
        yield from _product(weights, "head", [_head(config)], config.vocab_size).items()
        yield "norm", weights.get("norm.weight", torch.float32)


def _product(weights: FileWeights, key: str, sources: list[str], most: int | None = None) -> Tensors:
    """most: rows that are used, if not all."""
    tensors = joined(key, [(weights.blocks(source)[:most], weights.kind(source)) for source in sources])
    biases = [source.replace(".weight", ".bias") for source in sources]
    if weights.has(biases[0]):
        bias = torch.cat([weights.get(bias, torch.float32) for bias in biases])
        bias = quant.interleave(bias) if key.endswith(GATED) else bias
        tensors[f"{key}.bias"] = F.pad(bias, (0, -bias.shape[0] % OUTPUTS))
    return tensors


def joined(key: str, matrices: list[tuple[Tensor, str]]) -> Tensors:
    """The pieces of one product from its matrices, each with its kind."""
    kinds, parts = [kind for _, kind in matrices], [repack(raw, kind) for raw, kind in matrices]
    if key.endswith(GATED) and kinds[0] == kinds[1]:  # 16 gates, their 16 ups, and so on
        parts, kinds = [torch.stack(parts, 1).flatten(0, 1)], kinds[:1]
    if not (key.endswith(GATED) and len(parts) == 2):  # gates and ups of two kinds alternate: no neighbours are alike
        before = [sum(part.shape[0] for part in parts[:i]) for i in range(len(parts))]
        parts = [_side_by_side(*given) for given in zip(parts, kinds, before, strict=True)]
    return {f"{key}.{i}.{kind}": part for i, (kind, part) in enumerate(zip(kinds, parts, strict=True))}


def _side_by_side(pieces: Tensor, kind: str, before: int) -> Tensor:
    """pieces [P, bytes], changed: where two make a block of 32 outputs, their units alternate: kernels read one stream.

    before: pieces of the product before these.
    """
    (first, last), units = _pairs_of(pieces.shape[0], before), pieces.shape[1] // _UNIT[kind]
    for start in range(first, last, _PAIRED):
        some = pieces[start : min(start + _PAIRED, last)]
        some.copy_(some.view(-1, 2, units, _UNIT[kind]).transpose(1, 2).reshape(some.shape))
    return pieces


def _pairs_of(count: int, before: int) -> tuple[int, int]:
    """The first and the end of those pieces of a matrix that are in pairs."""
    first = min(before % 2, count)
    return first, first + (count - first) // 2 * 2


def table_of(tensors: Tensors, key: str) -> array[int]:
    """Of each of a product's pieces, in order: its address, its place in KINDS, the bytes from a unit to the next."""
    parts = [
        (tensors[name], kind)
        for i in range(len(_SOURCES["qkv"]))
        for kind in KINDS
        if (name := f"{key}.{i}.{kind}") in tensors
    ]
    if key.endswith(GATED) and len(parts) == 2:  # of two types
        listed = [list(_places(part, kind, range(0))) for part, kind in parts]
        return array("q", [number for pair in zip(*listed, strict=True) for place in pair for number in place])
    table, before = array("q"), 0
    for part, kind in parts:
        for place in _places(part, kind, range(*_pairs_of(part.shape[0], before))):
            table.extend(place)
        before += part.shape[0]
    return table


def _places(pieces: Tensor, kind: str, paired: range) -> Iterator[tuple[int, int, int]]:
    """The entries of `table_of` for the pieces of one matrix [P, bytes], of which some are in pairs."""
    base, (count, size), unit = pieces.data_ptr(), pieces.shape, _UNIT[kind]
    for i in range(count):
        second = i in paired and (i - paired.start) % 2
        address = base + (i - 1) * size + unit if second else base + i * size
        yield address, KINDS.index(kind), 2 * unit if i in paired else unit


class BlockLinear(NativeProduct):
    """A product whose weights are pieces, called like `linear.Linear`."""

    def __init__(self, tensors: Tensors, key: str, outputs: int, inputs: int, kernels: native.Kernels) -> None:
        """outputs: of a gated pair, gates and ups padded to whole pieces."""
        bias, self.table = tensors.get(f"{key}.bias"), table_of(tensors, key)
        fields = (0, 0, 0, *ops.addresses_of(bias), 0, outputs, inputs, 0, self.table.buffer_info()[0])
        super().__init__(fields, kernels, [tensors[name] for name in tensors if name.startswith(f"{key}.")], bias)


# ------------------------------------------------------------ the decoder


class BlockTransformer(Model):
    """A causal decoder; all state between passes is in the plane. The residual stream is float32."""

    dtype = compute = torch.int8  # of rows; weights have the file's types
    exact = True
    precision = "gguf"
    keeps_streams = True

    def __init__(self, config: ModelConfig, weights: FileWeights, tensors: Tensors, length: int | None = None) -> None:
        """tensors: as made by `repacked`; length: positions of the longest sequence."""
        kernels = ops._loaded().kernels
        if kernels is None:
            raise ModelError(
                f"A GGUF file's own blocks need the native kernels ({ops._loaded().reason}); choose --dtype int8."
            )
        self.config, self.weights, self.tensors = config, weights, tensors
        self.cos, self.sin = rope_tables(config, length or config.context_length, torch.float32, self.device)
        self._native = BlockPass(self, kernels)

    @classmethod
    def open(cls, checkpoint: Checkpoint, length: int | None = None, folder: Path | None = None) -> BlockTransformer:
        """From a GGUF file, or from its repacked form in `folder` (default: our cache)."""
        config, weights = checkpoint.config, checkpoint.weights
        if reason := reason_against(weights, config):
            raise ModelError(f"{checkpoint.path} cannot run as it is: {reason}; choose --dtype int8.")
        assert isinstance(weights, FileWeights)
        name = quant.identity(checkpoint.path, config, (FORMAT, KINDS))
        tensors, trouble = quant.stored(name, lambda: repacking(config, weights), folder or quant.folder("blocks"))
        model = cls(config, weights, tensors, length)
        model.description = trouble
        return model

    @property
    def plane_shape(self) -> PlaneShape:
        kv = self.kv_dtype or torch.float32
        return PlaneShape(self.config.layers, self.config.kv_heads, self.config.head_dim, kv)

    @cached_property
    def embedding(self) -> Tensor:
        """[V, H] bfloat16, for whoever cannot read single rows, as native passes do."""
        return self.weights.get("embed_tokens.weight", torch.bfloat16)

    @property
    def words(self) -> Words:
        """Where the embedding is; this model keeps it."""
        return self._native.words

    def output_rows(self, ids: Tensor) -> Tensor:
        """Rows of the output matrix [D, H]."""
        return self.weights.rows(_head(self.config), ids)

    def output_blocks(self, ids: Tensor) -> BlockTensor:
        """The same as they are in the file, which are read when they are used."""
        name, shape = _head(self.config), (len(ids), self.config.hidden_size)
        return UnreadBlocks(partial(self.weights.block_rows, name, ids), self.weights.kind(name), shape)

    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        plane.count_pass()
        return self._native(rows, plane, part, x, taps)


class BlockPass(NativePass):
    """The addresses of all pieces."""

    def __init__(self, model: BlockTransformer, kernels: native.Kernels) -> None:
        self._tables: dict[str, int] = {}
        self.weights = model.weights
        super().__init__(model, kernels)

    def _product(self, name: str, outputs: int | None = None) -> tuple[int, ...]:
        bias = self.tensors.get(f"{name}.bias")
        whole, inputs = quant.shape(name, self.config)
        return (0, 0, 0, *ops.addresses_of(bias), 0, outputs or whole, inputs, 0, self._table(name))

    def _words(self) -> Words:
        return self.words

    @cached_property
    def words(self) -> Words:
        """An embedding that is not the output matrix too stays in the file: a pass reads a few of its rows."""
        if self.config.tied:
            return Words(pieces=self._table("head"))
        name = "embed_tokens.weight"
        if (kind := self.weights.kind(name)) not in STORED:
            self._held.append(whole := self.weights.get(name, torch.bfloat16).contiguous())  # [V, H]
            return Words(whole.data_ptr())
        self._held.append(rows := self.weights.mapped(name))  # [V, bytes]
        return Words(0, 0, rows.ctypes.data, rows.strides[0], STORED.index(kind))

    def _table(self, name: str) -> int:
        """The address of a product's pieces, as in native/blocks.h."""
        if name not in self._tables:
            self._tables[name] = self._keep(table_of(self.tensors, name).tobytes())
        return self._tables[name]


assert HALF == LANES  # gates and ups alternate by pieces
