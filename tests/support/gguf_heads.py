"""Heads in GGUF files, named as llama.cpp's converter and its models name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from support.gguf_files import finish, permuted

TOP = {"fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd", "d2t": "d2t"}
TOP |= {"input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm"}
TOP |= {f"markov_head.markov_w{i}": f"markov_w{i}" for i in (1, 2)} | {"confidence_head.proj": "conf_proj"}
BLOCK = {
    "hidden_norm": "attn_norm_2", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def stored_name(name: str) -> str:
    """`midlayer.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    stem, dot, field = name.rpartition(".") if "." in name else (name, "", "")
    stem = stem.replace("midlayer.", "layers.0.")
    if stem.startswith("layers."):
        _, number, part = stem.split(".", 2)
        return f"blk.{number}.{BLOCK[part]}.{field}"
    return f"{TOP[stem]}{dot}{field}"


def write_gguf_head(
    path: Path, arch: str, sizes: dict[str, Any], tensors: dict[str, Tensor], kind: Kind = Kind.F32, **keys: Any
) -> Path:
    """sizes: the layers' configuration in Hugging Face's words. keys: of the file, `__` for a dot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(sizes["rms_norm_eps"])
    writer.add_rope_freq_base(sizes["rope_theta"])
    writer.add_vocab_size(sizes["vocab_size"])
    for key, value in keys.items():
        name = key.replace("__", ".") if key.startswith("tokenizer__") else f"{arch}.{key.replace('__', '.')}"
        of = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value), of)
    for name, tensor in tensors.items():
        if name in ("t2d",):
            continue
        data = tensor.numpy()
        if name == "d2t":
            writer.add_tensor("d2t", data + np.arange(len(data)), raw_dtype=Kind.I64)
            continue
        if arch == "eagle3" and name.endswith(("q_proj.weight", "k_proj.weight")):
            data = permuted(data, sizes["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        how = kind if data.ndim == 2 else Kind.F32
        writer.add_tensor(stored_name(name), gguf.quants.quantize(np.ascontiguousarray(data), how), raw_dtype=how)
    finish(writer)
    return path
