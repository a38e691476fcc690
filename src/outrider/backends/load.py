"""Loads a model from a checkpoint in a given precision, or in the best one of this machine.

On a GPU `auto` is the checkpoint's own precision, or bfloat16; a GGUF file's blocks are dequantised to bfloat16, which
was faster there (`--dtype gguf` keeps them). On a CPU it times layers of the model's own shape in every precision that
the file allows: a GGUF file runs in its own blocks (`gguf`) or becomes int8; other quantised files are dequantised, and
the description says so; float weights stay float. The result is stored for this machine and this shape.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import partial
from typing import Any

import torch

from ..engine.batch import BatchBuilder
from ..engine.cache import Cache
from ..errors import ConfigError
from ..models.checkpoint import Checkpoint
from ..models.config import ModelConfig
from ..models.foreign import ForeignWeights
from ..models.mtp import find_mtp
from ..models.paths import cache_folder, write_quietly
from ..models.precision import AUTO, FLOATS, GGUF, INT8, OWN, stored_in
from ..models.speculators import target_hash
from ..models.stages import stage
from ..types import Sequence
from . import Model, ops
from .cpu import blocks, native, quantise as quant
from .cpu.blocks import BlockTransformer
from .cpu.int8 import Int8Transformer, open_int8
from .linear import packs
from .machine import fingerprint, is_overloaded
from .pass_costs import read_seconds
from .rows import rows_of
from .toy import RandomWeights
from .transformer import Transformer

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOATS}
KV_DTYPES = {"float32": torch.float32, "float16": torch.float16}
ROWS = (1, 4, 8)  # of the timed passes, as in decoding and verification
PASSES = 9  # of each
CLEARLY = 1.25  # times slower than the fastest that the file's own precision may be: it was 1.35 faster or no different
_EVICTING = 1 << 27  # bytes that are written before each of them, so that no cache holds weights


def load_model(
    checkpoint: Checkpoint,
    dtype: str,
    length: int,
    device: torch.device | str = "cpu",
    kv_dtype: str = AUTO,
) -> Model:
    """The model in memory, for positions up to `length`. Its `identity()` reads the weights' hash when called.

    kv_dtype: of K and V on a CPU, a key of `KV_DTYPES`; auto: 16 bits beside quantised weights, else as computed.
    """
    config, weights, on_gpu = checkpoint.config, checkpoint.weights, torch.device(device).type == "cuda"
    if kv_dtype != AUTO and (isinstance(weights, ForeignWeights) or on_gpu):
        raise ConfigError(f"K and V in {kv_dtype} are for Outrider's own decoder on a CPU; leave --kv-dtype out.")
    if isinstance(weights, ForeignWeights):
        from .transformers.model import load_foreign

        return load_foreign(weights, config, dtype, torch.device(device))
    own = stored_in(weights)
    if dtype in OWN and dtype != own:
        raise ConfigError(f"{checkpoint.path} is not stored in {dtype}; leave --dtype out, or choose bfloat16 or int8.")
    if on_gpu:
        model: Any = _on_gpu(checkpoint, dtype, length, device)
    else:
        model = _on_cpu(checkpoint, dtype, kv_dtype, length)
    model.identity, model.mtp = partial(target_hash, config, weights), find_mtp(weights, config)
    loaded: Model = model
    return loaded


def _on_gpu(checkpoint: Checkpoint, dtype: str, length: int, device: torch.device | str) -> Any:
    """On a GPU int8 is weight-only: a pass spends its time reading weights."""
    config, weights, own = checkpoint.config, checkpoint.weights, stored_in(checkpoint.weights)
    if dtype == "float64":
        raise ConfigError("float64 runs on the CPU only; choose --device cpu, or --dtype float32.")
    kept = dtype == own or (dtype == AUTO and own not in ("", GGUF))  # bfloat16 was faster than GGUF's blocks
    if kept:
        from .cuda.packing import PackedTransformer

        return PackedTransformer(config, weights, own, device, length)
    compute = torch.bfloat16 if dtype in (AUTO, INT8) else DTYPES[dtype]
    model = Transformer(config, weights, compute, device, length, int8=dtype == INT8)
    if own == GGUF and dtype == AUTO:
        model.description = "The file's blocks are dequantised to bfloat16; --dtype gguf keeps them."
    elif own and dtype == INT8:
        model.description = f"The checkpoint's {own} weights are rounded again to int8, as requested."
    return model


def _on_cpu(checkpoint: Checkpoint, dtype: str, kv_dtype: str, length: int) -> Any:
    config, weights, own = checkpoint.config, checkpoint.weights, stored_in(checkpoint.weights)
    timed = compared(checkpoint) if dtype == AUTO else {}
    chosen = _fastest(timed, own) if timed else dtype
    if chosen == GGUF:
        model: Any = BlockTransformer.open(checkpoint, length)
    elif chosen == INT8:
        model = open_int8(checkpoint, length)
    elif chosen in OWN:
        raise ConfigError(f"A CPU has no kernels for {chosen} weights; leave --dtype out to have them dequantised.")
    else:
        model = Transformer(config, weights, DTYPES[chosen], length=length)
    small = chosen in (GGUF, INT8) and ops._loaded().kernels is not None  # torch would convert whole contexts
    model.kv_dtype = KV_DTYPES[kv_dtype] if kv_dtype != AUTO else torch.float16 if small else None
    if len(timed) > 1:
        model.description = f"{_chosen(chosen, timed)} {model.description}"
    model.description = f"{_kept(own, chosen)} {model.description}".strip()
    return model


def _fastest(timed: dict[str, float], own: str) -> str:
    """The file's own precision unless another one is clearly faster: a start beside other work is to choose the same
    weights, and so the same text, as one on a machine left alone."""
    fastest = min(timed, key=lambda name: timed[name])
    return own if own in timed and timed[own] < CLEARLY * timed[fastest] else fastest


def _kept(own: str, chosen: str) -> str:
    """A sentence about how a CPU uses a quantised checkpoint's weights; empty where there is nothing to say."""
    if own in ("", chosen):
        kept = "The checkpoint's int8 weights are used as they are; its output matrix is rounded to int8."
        return kept if own == INT8 else ""
    if chosen == INT8:
        return f"The checkpoint's {own} weights are rounded again to int8."
    return f"The checkpoint's {own} weights are dequantised to {chosen}."


def _chosen(dtype: str, timed: dict[str, float]) -> str:
    others = ", ".join(f"{1e3 * timed[name]:.1f} in {name}" for name in timed if name != dtype)
    rows = ", ".join(map(str, ROWS))
    own = f"{1e3 * timed[dtype]:.1f} ms"
    return f"dtype auto is {dtype} here: passes of {rows} rows through some of it take {own}, {others}."


def compared(checkpoint: Checkpoint) -> dict[str, float]:
    """Seconds of passes in every dtype that keeps the file's precision, timed once per machine and shape."""
    config = checkpoint.config
    names = ["float32", "bfloat16"] if packs(torch.empty(0, dtype=torch.bfloat16)) else ["float32"]
    shape: tuple[object, ...] = (config.hidden_size, config.intermediate_size, config.heads, config.kv_heads)
    shape += (config.head_dim,)
    own = stored_in(checkpoint.weights)
    if own in (GGUF, INT8):
        names.append(INT8)
        if own == GGUF and blocks.runs(checkpoint.weights, config):
            names = [INT8, GGUF]  # floats read several times the bytes
            shape += (blocks.FORMAT, checkpoint.weights.kind("layers.0.mlp.up_proj.weight"))
    key = hashlib.sha256(repr((config.vocab_size, config.layers, shape, names)).encode()).hexdigest()[:12]
    names_of_file = ("dtype", fingerprint(), native.version(), str(torch.get_num_threads()), key)
    file = cache_folder() / "profiles" / f"{'-'.join(names_of_file)}.json"
    seconds: dict[str, float] = read_seconds(file) or {}
    if not seconds:
        with stage("Comparing precisions") as done:
            for i, name in enumerate(names):
                seconds[name] = _layer_seconds(config, checkpoint.weights, name)
                done((i + 1) / len(names))
        if not is_overloaded():
            write_quietly(file, json.dumps(seconds))
    return seconds


def _layer_seconds(config: ModelConfig, file: Any, dtype: str) -> float:
    """Seconds of passes with `ROWS` rows through layers of this shape and their share of the output matrix. No cache
    holds their weights, as in a model of many layers. The fastest of some: other work only adds time."""
    weights_per_layer = 3 * config.hidden_size * config.intermediate_size
    layers = max(1, min(config.layers, 40_000_000 // weights_per_layer))
    vocabulary = max(64, config.vocab_size * layers // config.layers)
    one = ModelConfig(
        architecture="llama", vocab_size=vocabulary, hidden_size=config.hidden_size, layers=layers, heads=config.heads,
        kv_heads=config.kv_heads, head_dim=config.head_dim, intermediate_size=config.intermediate_size,
        norm_eps=config.norm_eps, rope_theta=config.rope_theta, context_length=64, tied=config.tied,
    )  # fmt: skip
    weights = RandomWeights(one, seed=1)
    if dtype == GGUF:
        model: Model = BlockTransformer(one, file, blocks.repacked(one, file), 64)
    elif dtype == INT8:
        model = Int8Transformer(one, quant.calibrated(one, weights, list(range(32))), 64)
    else:
        model = Transformer(one, weights, DTYPES[dtype], length=64)
    cache = Cache(64, 2, 32)
    plane = cache.add_plane(*model.plane_shape)
    seq = Sequence(1, list(range(1, 21)))
    cache.open(seq)
    cache.reserve(seq, 20, 0)

    other = torch.zeros(_EVICTING // 4)

    def seconds(rows: int) -> float:
        other.add_(1.0)
        start = time.perf_counter()
        batch = BatchBuilder(cache)
        batch.pending(seq, 0, rows, want=True)
        batch.want = list(range(rows))
        model.forward(rows_of(batch), plane)
        return time.perf_counter() - start

    return sum(min(seconds(rows) for _ in range(PASSES)) for rows in ROWS)
