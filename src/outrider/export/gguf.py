"""Draft models for llama.cpp: a GGUF file of some of a target's layers, or of a small model with its tokenizer.

Tensors of a GGUF target are copied bit for bit, with their quantisation; only blocks that must add nothing are written
as zeros. A small model in Hugging Face layout becomes 16-bit floats under the target file's header (tokenizer, chat
template) with its own sizes. Naming conventions are in `models.gguf_file`.
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
from ..models.weights import expected, kept_layers

_WRITTEN_BY_LIBRARY = ("GGUF.", "general.architecture")


def write_kept(source: Path, to: Path, skip_attention: Iterable[int], skip_mlp: Iterable[int]) -> None:
    """The layers of a GGUF target that remain when these blocks do not run."""
    whole = open_checkpoint(source)
    if whole.config.architecture == "smollm3":
        raise ConfigError(
            "llama.cpp derives SmolLM3's layers without rope from their numbers, so a part of it cannot be a model "
            "there; export to vllm or sglang, or distil a draft model."
        )
    config, kept = kept_layers(whole.config, whole.weights, skip_attention, skip_mlp)
    reader, writer = GGUFReader(source), GGUFWriter(to, whole.config.architecture)
    _header(reader, writer, {f"{whole.config.architecture}.block_count": config.layers})
    raw = {tensor.name: tensor for tensor in reader.tensors}
    others = set(raw) - {gguf_name(name) for name in expected(whole.config)}
    for name in sorted(others):  # tensors of no layer, such as rope factors
        if not name.startswith("blk."):
            writer.add_tensor(name, raw[name].data, raw_dtype=raw[name].tensor_type)
    for name, shape in expected(config).items():
        if kept.zeroed(name):
            dtype = np.float16 if len(shape) > 1 else np.float32
            writer.add_tensor(gguf_name(name), np.zeros(shape, dtype=dtype))
        else:
            original = raw[gguf_name(kept.origin(name))]
            writer.add_tensor(gguf_name(name), original.data, raw_dtype=original.tensor_type)
    _close(writer)


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
    """A model's shape under llama.cpp's names."""
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


def _header(reader: GGUFReader, writer: GGUFWriter, changed: dict[str, Any]) -> None:
    """The header of another file with these values changed or added."""
    for name, field in reader.fields.items():
        if name.startswith(_WRITTEN_BY_LIBRARY) or name in changed or name == "general.file_type":
            continue
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    for name, value in changed.items():
        known = reader.fields.get(name)
        kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
        writer.add_key_value(name, value, known.types[0] if known is not None else kind)


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
