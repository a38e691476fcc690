"""Weights in int8: their format, the calibration of a model, and the file of its quantised weights.

A weight is scale[n] * w with a signed byte w, one scale per output. A row of inputs is scale * q with signed bytes
too, except for a few inputs of each product (outliers, found by running some text through the float model), whose q has
two bytes: they would otherwise leave the other inputs only a few levels. `quantise_rows` defines this in torch;
native/int8.h does the same.

The promise: layers are read, calibrated and freed one by one, so that a model need not fit into memory in float. The
file is made once; a damaged or unfinished one is made again, and two processes may open it at once. It knows the names
of weights and the order in which kernels read them; it does not know planes or passes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor

from ...models.config import ModelConfig
from ...models.paths import cache_folder
from .. import Part, ops
from ..encoder import Encoder
from ..machine import return_free_memory
from ..rows import Rows, Sources
from ..transformer import Loader, Prefixed, Transformer, WeightSource, vectors
from .memory import arena

FORMAT = 2  # of the file; a change makes old files be built again
OUTPUTS = 32  # of a block of packed weights, as in native/int8.h
HALF = OUTPUTS // 2
_MOST_OUTLIERS = 64
PRODUCTS = ("qkv", "out", "gate_up", "down")
CROSS = {"cross_q": "qkv", "cross_kv": "qkv", "cross_out": "out"}  # of attention to a source; outliers as those of …
ENCODER = "encoder."  # how the names of an encoder's tensors begin
NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
PARTS = ("weight", "high", "scale", "outliers")  # of a product, besides its bias
Tensors = dict[str, Tensor]
NamedTensors = Iterable[tuple[str, Tensor]]
_AT_ONCE = 1 << 22  # weights that are rounded together: temporaries are several times as large
_TYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
_STORED_TYPES = {str(dtype): dtype for dtype in _TYPES}
_DAMAGED = (OSError, ValueError, KeyError)  # of a file
_SLAB = 1 << 24  # bytes of memory for tensors whose sizes are not known beforehand


@dataclass(frozen=True)
class Settings:
    """What determines the quantised weights."""

    # One input in so many of each product is an outlier, 64 at most. Measured on SmolLM2: `down` and `qkv` lose the
    # most without them. Each outlier adds one byte to every output's weights.
    qkv: int = 18
    out: int = 72
    gate_up: int = 36
    down: int = 24
    head: int = 72
    calibration: int = 512  # tokens of text

    def outliers(self, name: str, inputs: int) -> int:
        """Outliers of a product, such as "head" or "layers.3.qkv": a multiple of 4."""
        kind = kind_of(name)
        share: int = getattr(self, CROSS.get(kind, kind))
        return min(_MOST_OUTLIERS, -(-inputs // share // 4) * 4) if share else 0


DEFAULT = Settings()


@dataclass(frozen=True)
class Quantised:
    """One product's weights, packed."""

    weight: Tensor  # [blocks, inputs/4, 32, 4] uint8: w + 128
    high: Tensor  # [blocks, outliers/4, 32, 4] uint8: the outliers' columns again, for their high bytes
    scale: Tensor  # [blocks * 32]
    bias: Tensor | None  # [blocks * 32]
    outliers: Tensor  # [O] int64: which inputs have two bytes
    outputs: int  # of a gated pair: gates and ups, padded to whole blocks
    inputs: int

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of these outputs as floats [n, inputs]; not for a gated pair."""
        lanes = self.weight.shape[2]
        whole = self.weight[ids // lanes, :, ids % lanes].flatten(1)[:, : self.inputs]  # [n, inputs] uint8
        return (whole.float() - 128) * self.scale[ids, None]

    def only(self, ids: Tensor) -> Quantised:
        """The product with these outputs alone [n]; not for a gated pair."""
        padding = (0, -len(ids) % OUTPUTS)
        block, lane = ids // OUTPUTS, ids % OUTPUTS
        weight, high = (_blocks(part[block, :, lane].flatten(1).short() - 128) for part in (self.weight, self.high))
        bias = None if self.bias is None else F.pad(self.bias[ids], padding)
        scale = F.pad(self.scale[ids], padding)
        return Quantised(weight, high, scale, bias, self.outliers, len(ids), self.inputs)

    def named(self, name: str) -> Tensors:
        """Its tensors under the product's name, as they are stored."""
        parts = {part: getattr(self, part) for part in (*PARTS, "bias")}
        return {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}


def quantise(
    weight: Tensor,
    bias: Tensor | None,
    largest: Tensor,
    outliers: int,
    gated: bool = False,
    scale: Tensor | None = None,
) -> Quantised:
    """weight [N, K] and bias [N] floats; largest [K]: each input's magnitude. gated: the first half are gates.

    scale [N]: of weights that are whole multiples of it, up to 127, and so not rounded; None: from the largest weight.
    """
    if gated:
        weight, bias = interleave(weight), None if bias is None else interleave(bias)
        scale = None if scale is None else interleave(scale)
    outputs, inputs = weight.shape
    count = min(outliers, _MOST_OUTLIERS, inputs // 4 * 4)
    strong = largest.argsort(descending=True, stable=True)[:count].sort().values  # [O]
    blocks, scales = -(-outputs // OUTPUTS), []
    packed, high = (torch.empty(blocks, -(-n // 4), OUTPUTS, 4, dtype=torch.uint8) for n in (inputs, count))
    step = max(1, _AT_ONCE // (OUTPUTS * inputs))  # blocks
    for at in range(0, blocks, step):
        rows = slice(at * OUTPUTS, (at + step) * OUTPUTS)
        whole, own = _rounded(weight[rows], None if scale is None else scale[rows])
        packed[at : at + step], high[at : at + step] = _blocks(whole), _blocks(whole[:, strong])
        scales.append(own)
    padding = (0, -outputs % OUTPUTS)
    bias = None if bias is None else F.pad(bias.float(), padding)
    return Quantised(packed, high, F.pad(torch.cat(scales), padding), bias, strong, outputs, inputs)


def _rounded(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Multiples [n, K] int16 of the scales, and the scales [n]; None: from the largest weight of each row."""
    if scale is None:
        scale = weight.abs().amax(1) / 127  # [n]; a NaN in a row makes its scale NaN, and so its results
    scale = torch.where(scale == 0, 1, scale)
    return (weight / scale[:, None]).round().nan_to_num(0).clamp(-127, 127).to(torch.int16), scale.float()


def _blocks(whole: Tensor) -> Tensor:
    """[N, K] -> [blocks, ceil(K/4), 32, 4], as kernels read them."""
    padded = F.pad(whole, (0, -whole.shape[1] % 4, 0, -whole.shape[0] % OUTPUTS))
    outputs, inputs = padded.shape
    blocks = (padded + 128).to(torch.uint8).view(outputs // OUTPUTS, OUTPUTS, inputs // 4, 4)
    return blocks.transpose(1, 2).contiguous()


def interleave(both: Tensor) -> Tensor:
    """[2I, ...] gates then ups -> [ceil(I/16) * 32, ...]: 16 gates, their 16 ups, and so on; padded with zeros."""
    gate, up = both.chunk(2)
    padding = [0, 0] * (both.dim() - 1) + [0, -gate.shape[0] % HALF]
    pairs = [F.pad(x, padding).view(-1, HALF, *both.shape[1:]) for x in (gate, up)]  # [I/16, 16, ...] each
    return torch.stack(pairs, 1).reshape(-1, *both.shape[1:])


def quantise_rows(x: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K] -> highs [T, O], lows [T, K] int8, scale [T]: x is about scale * (lows, + 256 highs at outliers)."""
    rest = x.clone()
    rest[:, outliers] = 0
    strong = x[:, outliers]  # [T, O]
    few = strong.abs().amax(1) / 32639 if outliers.numel() else x.new_zeros(x.shape[0])
    scale = torch.maximum(rest.abs().amax(1) / 127, few)  # [T]
    inverse = torch.where(scale > 1e-30, 1 / scale, 0)[:, None]
    lows = (rest * inverse).nan_to_num(0, 0, 0).round().to(torch.int32)
    whole = (strong * inverse).nan_to_num(0, 0, 0).round().to(torch.int32)
    highs = (whole + 128) >> 8
    lows[:, outliers] = whole - 256 * highs
    return highs.to(torch.int8), lows.to(torch.int8), scale + (x * 0).sum(1)


def calibrated(config: ModelConfig, weights: WeightSource, ids: list[int], settings: Settings = DEFAULT) -> Tensors:
    """All that `calibrate` yields, in memory."""
    return dict(calibrate(config, weights, ids, settings))


def calibrate(
    config: ModelConfig,
    weights: WeightSource,
    ids: list[int],
    settings: Settings = DEFAULT,
    progress: Callable[[float], None] = lambda share: None,
) -> NamedTensors:
    """Every tensor of the quantised model with its name, layer by layer; none is kept here. `ids`: the tokens of a text
    that determine the outliers; where there is an encoder, it reads them too."""
    ids = ids[: settings.calibration]
    deep = 0 if config.encoder is None else config.encoder.layers
    states = None
    if config.encoder is not None:
        encoder = _Calibration(config.encoder, Prefixed(weights, ENCODER), ids, settings, bidirectional=True)
        for i in range(deep):
            yield from ((f"{ENCODER}{name}", tensor) for name, tensor in encoder.taken())
            encoder.layer(i)
            progress((i + 1) / (deep + config.layers + 1))
        yield from ((f"{ENCODER}{name}", tensor) for name, tensor in encoder.taken())
        states = encoder.closing()
    run = _Calibration(config, weights, [*config.starts, *ids], settings, states)
    for i in range(config.layers):
        yield from run.taken()
        run.layer(i)
        progress((deep + i + 1) / (deep + config.layers + 1))
    yield from run.taken()
    run.head()
    yield from run.taken()


class _Calibration:
    """Runs a text through the float model, layer by layer, and quantises each layer from its inputs.

    Inference mode is set in each method: set around a `yield` it would hold for whoever takes the tensors.
    """

    @torch.inference_mode()
    def __init__(
        self, config: ModelConfig, weights: WeightSource, ids: list[int], settings: Settings,
        states: Tensor | None = None, bidirectional: bool = False,
    ) -> None:  # fmt: skip
        """states [m, H]: the encoder's output; bidirectional: this is an encoder."""
        self.config, self.source, self.settings, self.states = config, weights, settings, states
        self.tensors: Tensors = {"embedding": weights.get("embed_tokens.weight", torch.bfloat16).contiguous()}
        tokens = torch.tensor((ids or [0])[: config.context_length])
        n, m, order = len(tokens), 0 if states is None else len(states), torch.arange(len(tokens))
        line, table = torch.zeros(n, dtype=torch.long), order[None].int().contiguous()
        self.source_slots = torch.arange(n, n + m)
        sources = None if states is None else Sources(self.source_slots[None].int(), [m] * n, {})
        context = torch.full((n,), n) if bidirectional else order + 1
        self.rows = Rows(tokens, order, order, line, context, table, None, order, sources=sources)
        self.model = Transformer.without_weights(config, n)
        load = self._load({})
        self.tensors |= {name: load.norm(name).contiguous() for name in vectors(config)}
        self.model.embedding = self.tensors["embedding"]
        self.model.add_vectors(self.tensors, n, bidirectional)
        self.x = self.model.embed(tokens, order)  # [n, H]
        del self.model.embedding  # it need not be in memory while layers are
        self.plane: Any = _OneLayer(n + m, config)

    def taken(self) -> Iterator[tuple[str, Tensor]]:
        """What was quantised since the last call, with its name; each is forgotten before it is handed over."""
        while self.tensors:
            name = next(iter(self.tensors))
            yield name, self.tensors.pop(name)

    @torch.inference_mode()
    def closing(self) -> Tensor:
        """The states [n, H] after the last layer and its norm."""
        return self.model.closing(self.x, None)

    def _load(self, products: dict[str, _Recorded]) -> _Recording:
        cpu = torch.device("cpu")
        return _Recording(self.config, self.source, torch.float32, torch.float32, cpu, False, products)

    @torch.inference_mode()
    def layer(self, i: int) -> None:
        products: dict[str, _Recorded] = {}
        self.model.layers = {i: self._load(products).layer(i)}
        self.plane.clear()
        if self.states is not None:
            Encoder(None, self.model.layers).project(
                i, self.states, self.plane.k[i], self.plane.v[i], self.source_slots
            )
        one = Part(start=i, stop=i + 1, head=False)
        self.x = self.model.forward(self.rows, self.plane, one, self.x, taps=(i,)).hidden[i]
        layer = self.model.layers[i]
        norms = {name: getattr(layer, name) for name in (*NORMS, "sinks")}
        if layer.head_norms is not None:
            norms |= {"q_norm": layer.head_norms[0], "k_norm": layer.head_norms[1]}
        if layer.cross is not None:
            norms["cross_norm"] = layer.cross.norm
        self.tensors |= {f"layers.{i}.{name}": norm.contiguous() for name, norm in norms.items() if norm is not None}
        if layer.experts is not None:
            names = ["router.weight"] + ["router.bias"] * self.config.expert_bias
            for name in names + ["correction.bias"] * self.config.corrected_router:
                self.tensors[f"layers.{i}.{name}"] = self.source.get(f"layers.{i}.mlp.{name}", torch.float32)
        for name, product in products.items():
            self._quantise(name, product.weight, product.bias, product.largest, product.scale)
        self.model.layers = {}  # two layers in float are never in memory together

    @torch.inference_mode()
    def head(self) -> None:
        h = self.closing()  # [n, H]
        weight = self.source.get("embed_tokens.weight" if self.config.tied else "lm_head.weight", torch.float32)
        self._quantise("head", weight, self._load({}).head_bias(), h.abs().amax(0))

    def _quantise(
        self, key: str, weight: Tensor, bias: Tensor | None, largest: Tensor, scale: Tensor | None = None
    ) -> None:
        outliers = self.settings.outliers(key, weight.shape[1])
        gated = kind_of(key) == "gate_up" and self.config.llama_like
        self.tensors |= quantise(weight, bias, largest, outliers, gated, scale).named(key)


class _OneLayer:
    """The K/V of whichever layer runs."""

    def __init__(self, rows: int, config: ModelConfig) -> None:
        shape = (rows, config.kv_heads, config.head_dim)
        self.k: dict[int, Tensor] = defaultdict(lambda: torch.empty(shape))
        self.v: dict[int, Tensor] = defaultdict(lambda: torch.empty(shape))
        self.streams: Tensors = {}

    def clear(self) -> None:
        self.k.clear()
        self.v.clear()

    def count_pass(self) -> None:
        """It belongs to no cache."""


@dataclass
class _Recorded:
    """A product in float that remembers how large its inputs were."""

    weight: Tensor  # [N, K]
    bias: Tensor | None
    largest: Tensor  # [K]
    scale: Tensor | None = None  # [N] of a checkpoint's own int8

    def __call__(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        return ops.gate_mul(self(x), activation)


@dataclass(frozen=True)
class _Recording(Loader):
    """Loads layers whose products are recorded, under the names of their quantised weights."""

    products: dict[str, _Recorded]

    def fused_product(self, name: str, sources: list[str], bias: Tensor | None) -> Any:
        product = super().fused_product(name, sources, bias)
        product.scale = own_scales(self.source, sources)
        return product

    def product(self, name: str, weight: Tensor, bias: Tensor | None) -> _Recorded:
        self.products[name] = _Recorded(weight, bias, torch.zeros(weight.shape[1]))
        return self.products[name]


def own_scales(source: Any, names: list[str]) -> Tensor | None:
    """[N] scales of weights that a checkpoint stores in int8, one for each output; None: others, or one has -128."""
    if not hasattr(source, "grouped"):
        return None
    weights = [source.grouped(name) for name in names]
    for w in weights:
        whole = w is not None and w.values.dtype == torch.int8 and w.scale.shape[1] == 1
        if not whole or w.order is not None or int(w.values.min()) < -127:
            return None
    return torch.cat([w.scale[:, 0].float() for w in weights])


def kind_of(name: str) -> str:
    """`layers.3.down` and `layers.3.down.7` (of an expert) -> `down`."""
    return next(part for part in reversed(name.split(".")) if not part.isdigit())


def product(tensors: Tensors, name: str, config: ModelConfig) -> Quantised:
    """One product of a model, by its name: "head", "layers.3.qkv" or "layers.3.down.7" of an expert."""
    weight, high, scale, strong = (tensors[f"{name}.{part}"] for part in PARTS)
    return Quantised(weight, high, scale, tensors.get(f"{name}.bias"), strong, *shape(name, config))


def _middle(name: str, c: ModelConfig) -> int:
    """The intermediate size of a product's MLP: of an expert, of the one that rows share, or of an ordinary one."""
    if name[-1].isdigit():
        return c.expert_size
    _, layer, *_ = (*name.split("."), "", "")
    return c.shared_size if layer.isdigit() and c.has_experts(int(layer)) else c.intermediate_size


def shape(name: str, c: ModelConfig) -> tuple[int, int]:
    """Outputs and inputs of a product, such as "head" or "layers.3.qkv"."""
    inner, middle = c.heads * c.head_dim, _middle(name, c)
    pair = -(-middle // HALF) * OUTPUTS if c.llama_like else 2 * middle if c.gated else middle
    kv = 2 * c.kv_heads * c.head_dim
    return {
        "qkv": (inner + kv, c.hidden_size),
        "out": (c.hidden_size, inner),
        "cross_q": (inner, c.hidden_size),
        "cross_kv": (kv, c.hidden_size),
        "cross_out": (c.hidden_size, inner),
        "gate_up": (pair, c.hidden_size),
        "down": (c.hidden_size, middle),
        "head": (c.vocab_size, c.hidden_size),
    }[kind_of(name)]


# ------------------------------------------------------------ on disk


def folder(name: str) -> Path:
    """Of our cache."""
    return cache_folder() / name


def identity(path: Path, config: ModelConfig, settings: object = DEFAULT) -> str:
    """A hash of everything that determines the bytes: names, sizes and times of the model's files, and the settings."""
    files = [path] if path.is_file() else sorted((*path.glob("*.safetensors"), *path.glob("*.bin")))
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    # Frozen sets are sorted: their order changes from process to process.
    values = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in vars(config).items()}
    return hashlib.sha256(repr((FORMAT, facts, sorted(values.items()), settings)).encode()).hexdigest()[:24]


class Stored(NamedTuple):
    """Weights that are made once."""

    tensors: Tensors
    trouble: str = ""  # a sentence: why they could not be kept on disk


def stored(name: str, build: Callable[[], NamedTensors], folder: Path | None = None) -> Stored:
    """The tensors stored under this name; made and stored first if the file is missing or damaged.

    What `build` yields is written at once and read when all of it is on disk, so that the first start needs no more
    memory than later ones. Where it cannot be written, it is made again and stays in memory.
    """
    folder = folder or cache_folder() / "int8"
    path = folder / f"{name}.weights"
    with suppress(*_DAMAGED):
        return Stored(_read(path))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path) as alone:
            with suppress(*_DAMAGED):
                return Stored(_read(path))  # another process has built it meanwhile
            if alone:
                _remove_unfinished(path)
            _write(path, build())
        return_free_memory()  # what building leaves behind would stand beside the weights
        return Stored(_read(path))
    except _DAMAGED as error:
        why = getattr(error, "strerror", None) or error
        trouble = f"The weights cannot be kept in {folder} ({why}), so every start prepares them anew."
    return Stored(in_arenas(build()), trouble)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether other processes wait meanwhile: on a file system without locks each one builds."""
    lock = FileLock(path.with_suffix(".lock"))
    with suppress(NotImplementedError, OSError):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _remove_unfinished(path: Path) -> None:
    """What processes that were killed left behind; nobody else may be writing."""
    for part in path.parent.glob(f"{path.stem}.*.part"):
        with suppress(OSError):
            part.unlink()


class _Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    dtype: str  # a key of `_STORED_TYPES`
    shape: list[int]
    checksum: int

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * _STORED_TYPES[self.dtype].itemsize


def _write(path: Path, tensors: NamedTensors) -> None:
    """The tensors' bytes one after the other, then the list of them: nothing has to be known before it is written. The
    file has its name when it is whole."""
    handle, unfinished = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            entries = []
            for name, tensor in tensors:
                flat = tensor.contiguous().reshape(-1).view(torch.uint8)
                file.write(flat.numpy().data)
                entries.append(_Entry(name, str(tensor.dtype), list(tensor.shape), _checksum(flat)))
                del tensor, flat  # before the next one is made
            index = json.dumps(entries).encode()
            file.write(index + len(index).to_bytes(8, "little") + zlib.crc32(index).to_bytes(4, "little"))
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _read(path: Path) -> Tensors:
    """Read straight into the arena: while a mapping is copied, both are resident."""
    tensors: Tensors = {}
    with path.open("rb") as file:
        entries = _entries(file)
        for entry, place in zip(entries, _places([entry.size for entry in entries]), strict=True):
            if file.readinto(place.numpy().data) != entry.size or _checksum(place) != entry.checksum:
                raise ValueError(f"{path} is damaged")
            tensors[entry.name] = place.view(_STORED_TYPES[entry.dtype]).view(entry.shape)
    return tensors


def _entries(file: BinaryIO) -> list[_Entry]:
    """What is in the file, which is then at its start."""
    end = file.seek(-12, os.SEEK_END)
    length, check = (int.from_bytes(file.read(size), "little") for size in (8, 4))
    file.seek(max(0, end - length))
    index = file.read(min(length, end))
    if len(index) != length or zlib.crc32(index) != check:
        raise ValueError("the index is damaged")
    file.seek(0)
    return [_Entry(*entry) for entry in json.loads(index)]


def _checksum(flat: Tensor) -> int:
    """Of bytes: their sum as 64-bit numbers, modulo 2^64. In one thread, which is as fast as reading them is: beside a
    busy process torch's threads took a second to be woken for a file's tensors."""
    values, whole = flat.numpy(), flat.numel() // 8 * 8
    return int(values[:whole].view(np.int64).sum()) + int(values[whole:].sum())


def in_arenas(tensors: NamedTensors) -> Tensors:
    """Copies in few allocations; no more than one tensor is in memory twice."""
    placed: Tensors = {}
    room = torch.empty(0, dtype=torch.uint8)
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        room = room if size <= room.numel() else arena(max(size, _SLAB))
        placed[name] = room[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        room = room[-(-size // 64) * 64 :]
        del tensor  # before the next one is made
    return placed


def _places(sizes: list[int]) -> list[Tensor]:
    """So many bytes each, in one allocation, each aligned to a cache line, in huge pages where the system has them."""
    starts = list(accumulate((-(-size // 64) * 64 for size in sizes), initial=0))
    memory = arena(starts[-1])
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
