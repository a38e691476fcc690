"""Draft models for llama.cpp: a GGUF file of some of a target's layers, or of a small model with the target's words.

Promise: tensors of a GGUF target are copied bit for bit, quantised as they are; only what has to be silent is written
anew, as zeros. A small model in Hugging Face layout becomes 16-bit floats under the target file's own header
(tokenizer, template), with its own sizes. It knows files; `models.gguf_file` knows their conventions.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from ..errors import ConfigError, ModelError
from ..models.checkpoint import Checkpoint, open_checkpoint
from ..models.config import ModelConfig
from ..models.gguf_file import GGUF, gguf_name, reorder_rows
from ..models.weights import LayerSubset, expected, kept_layers

_WRITERS_OWN = ("GGUF.", "general.architecture")


def write_kept(source: Path, to: Path, skip_attention: Iterable[int], skip_mlp: Iterable[int]) -> None:
    """The layers of a GGUF target that are left when these blocks do not run."""
    whole = open_checkpoint(source)
    if whole.config.architecture == "smollm3":
        raise ConfigError(
            "llama.cpp counts SmolLM3's layers without rope by itself, so no part of it can be a model there; "
            "export to vllm or sglang, or distil a draft model."
        )
    config, kept = kept_layers(whole.config, whole.weights, skip_attention, skip_mlp)
    reader, writer = GGUFReader(source), GGUFWriter(to, whole.config.architecture)
    _header(reader, writer, {f"{whole.config.architecture}.block_count": config.layers})
    raw = {tensor.name: tensor for tensor in reader.tensors}
    rest = set(raw) - {gguf_name(name) for name in expected(whole.config)}
    for name in sorted(rest):  # what belongs to no layer, such as rope's factors
        if not name.startswith("blk."):
            writer.add_tensor(name, raw[name].data, raw_dtype=raw[name].tensor_type)
    for name, shape in expected(config).items():
        _copy(writer, raw, kept, name, shape)
    _close(writer)


def _copy(writer: GGUFWriter, raw: dict[str, Any], kept: LayerSubset, name: str, shape: tuple[int, ...]) -> None:
    if kept.zeroed(name):
        writer.add_tensor(gguf_name(name), np.zeros(shape, dtype=np.float16 if len(shape) > 1 else np.float32))
        return
    original = raw[gguf_name(kept.origin(name))]
    writer.add_tensor(gguf_name(name), original.data, raw_dtype=original.tensor_type)


def write_model(small: Checkpoint, target: Path, to: Path) -> None:
    """A small model with the target's tokenizer; one that is a GGUF file already is copied."""
    if small.path.suffix.lower() == ".gguf":
        shutil.copyfile(small.path, to)
        return
    c = small.config
    if str(GGUF(target).metadata.get("general.architecture")) != c.architecture:
        raise ConfigError(
            f"The draft model is of the architecture {c.architecture} and the target's file of another, whose header "
            "does not fit; convert the draft model with llama.cpp's convert_hf_to_gguf.py."
        )
    reader, writer = GGUFReader(target), GGUFWriter(to, c.architecture)
    _header(reader, writer, _sizes(c))
    for name in expected(c):
        tensor = reorder_rows(name, small.weights.get(name, torch.float32), c, to_gguf=True)
        dtype = np.float16 if tensor.dim() > 1 else np.float32  # llama.cpp wants norms and biases in float32
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor.numpy().astype(dtype)))
    _close(writer)


def _sizes(c: ModelConfig) -> dict[str, Any]:
    """What the header says of a model's shape, under llama.cpp's names."""
    if c.rope_scaling is not None or c.rotary_dim != c.head_dim:
        raise ModelError("The draft model's rope is stretched or partial; convert it with llama.cpp's own script.")
    named = {
        "block_count": c.layers,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        "rope.freq_base": c.rope_theta,
        "rope.dimension_count": c.rotary_dim,
        "context_length": c.context_length,
    }
    return {f"{c.architecture}.{name}": value for name, value in named.items()}


def _header(reader: GGUFReader, writer: GGUFWriter, own: dict[str, Any]) -> None:
    """The other file's header with these values changed or added."""
    for name, field in reader.fields.items():
        if name.startswith(_WRITERS_OWN) or name in own or name == "general.file_type":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub)
    for name, value in own.items():
        known = reader.fields.get(name)
        kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
        writer.add_key_value(name, value, known.types[0] if known is not None else kind)


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
