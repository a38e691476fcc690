"""A target from a checkpoint, in the dtype that was asked for, or in the one that this machine runs fastest.

`auto` measures: one layer of the model's own shape, with random weights, in every dtype that loses nothing the file
has. A file that is quantised itself (most GGUF files) may become int8; float weights stay float. The result is
remembered for this machine and this shape.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..engine.batch import BatchBuilder
from ..engine.cache import Cache
from ..errors import ConfigError
from ..models.checkpoint import Checkpoint
from ..models.config import ModelConfig
from ..models.foreign import ForeignWeights
from ..models.gguf_file import GGUFWeights
from ..models.paths import cache_folder, write_quietly
from ..models.speculators import target_hash
from ..types import Sequence
from . import Model
from .cpu import quantise as quant
from .cpu.int8 import Int8Transformer
from .machine import fingerprint
from .rows import rows_of
from .toy import RandomWeights
from .transformer import Transformer

AUTO, INT8 = "auto", "int8"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
ROWS = (1, 4, 8)  # what decoding and verification run


def load_model(
    checkpoint: Checkpoint,
    dtype: str,
    length: int,
    progress: quant.Progress | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """The model in memory, for positions up to `length`. `identity()` tells whose heads go with it."""
    if isinstance(checkpoint.weights, ForeignWeights):
        from .transformers.model import load_foreign

        return load_foreign(checkpoint.weights, checkpoint.config, dtype, torch.device(device))
    model: Any = _load(checkpoint, dtype, length, progress, torch.device(device))
    model.identity = partial(target_hash, checkpoint.config, checkpoint.weights)  # read only when somebody asks
    loaded: Model = model
    return loaded


def _load(
    checkpoint: Checkpoint, dtype: str, length: int, progress: quant.Progress | None, device: torch.device
) -> Model:
    if device.type == "cuda":
        return _on_gpu(checkpoint, dtype, length, device)
    dtype = fastest(checkpoint) if dtype == AUTO else dtype
    if dtype == INT8:
        return Int8Transformer.open(checkpoint, length, progress=progress)
    return Transformer(checkpoint.config, checkpoint.weights, DTYPES[dtype], length=length)


def _on_gpu(checkpoint: Checkpoint, dtype: str, length: int, device: torch.device) -> Model:
    """bfloat16 unless asked otherwise; int8 means weights only: they are what a GPU spends its time reading."""
    if dtype == "float64":
        raise ConfigError("float64 runs on the CPU only; choose --device cpu, or --dtype float32.")
    compute = torch.bfloat16 if dtype in (AUTO, INT8) else DTYPES[dtype]
    return Transformer(checkpoint.config, checkpoint.weights, compute, device, length, eight_bits=dtype == INT8)


def fastest(checkpoint: Checkpoint) -> str:
    """The quickest dtype that loses nothing, measured once per machine and shape."""
    config = checkpoint.config
    names = ["float32", "bfloat16"] if _computes_in_bfloat16() else ["float32"]
    if isinstance(checkpoint.weights, GGUFWeights) and checkpoint.weights.quantised:
        names.append(INT8)
    shape = (config.hidden_size, config.intermediate_size, config.heads, config.kv_heads, config.head_dim)
    note = cache_folder() / "profiles" / f"dtype-{fingerprint()}-{torch.get_num_threads()}-{hash_of(shape, names)}.json"
    seconds = _remembered(note) or {name: _layer_seconds(config, name) for name in names}
    write_quietly(note, json.dumps(seconds))
    return min(seconds, key=lambda name: seconds[name])


def hash_of(*facts: object) -> str:
    import hashlib

    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def _remembered(note: Path) -> dict[str, float] | None:
    try:
        known = json.loads(note.read_text())
        return {str(name): float(seconds) for name, seconds in known.items()} or None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _computes_in_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _layer_seconds(config: ModelConfig, dtype: str) -> float:
    """Seconds of passes over a few row counts through layers of this shape: enough of them to leave the caches."""
    weights_per_layer = 3 * config.hidden_size * config.intermediate_size
    layers = max(1, min(config.layers, 40_000_000 // weights_per_layer))
    one = replace(
        config, layers=layers, vocab_size=64, tied=True, context_length=64, qkv_bias=False, o_bias=False, qk_norm=False
    )
    weights = RandomWeights(one, seed=1)
    if dtype == INT8:
        model: Model = Int8Transformer(one, quant.calibrated(one, weights, list(range(32))), 64)
    else:
        model = Transformer(one, weights, DTYPES[dtype], length=64)
    cache = Cache(64, 2, 32)
    plane = cache.add_plane(*model.plane_shape)
    seq = Sequence(1, list(range(1, 21)))
    cache.open(seq)
    cache.reserve(seq, 20, 0)

    def run(rows: int) -> None:
        packed = BatchBuilder(cache)
        packed.pending(seq, 0, rows, want=True)
        model.forward(rows_of(packed), plane)

    return sum(_median(run, rows) for rows in ROWS)


def _median(run: Callable[[int], None], rows: int, repeats: int = 9) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run(rows)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
