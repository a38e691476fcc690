"""Convert a llama2.c model into a folder in Hugging Face layout, with the tokenizer of a GGUF file.

    python bench/llama2c.py stories15M.bin --tokenizer tinyllama.gguf --out stories15M

The format: seven int32 (dim, hidden, layers, heads, kv_heads, vocabulary, length; a negative vocabulary means that the
output has its own matrix), then float32 tensors, each kind for all layers in a row. llama2.c rotates neighbouring pairs
of queries and keys; Hugging Face rotates halves, so their rows are permuted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.checkpoint import open_checkpoint


class Reader:
    """Reads float32 tensors in sequence."""

    def __init__(self, data: bytes) -> None:
        self.numbers, self.at = np.frombuffer(data, dtype="<f4"), 0

    def take(self, *shape: int) -> Tensor:
        size = int(np.prod(shape))
        if self.at + size > len(self.numbers):
            raise ModelError("The file ends before its last tensor: it is truncated, or has another format.")
        taken = torch.from_numpy(self.numbers[self.at : self.at + size].copy()).view(shape)
        self.at += size
        return taken


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head: pairs (0, 1), (2, 3), … become halves (0, 2, …), (1, 3, …). [heads * d, H]"""
    d = weight.shape[0] // heads
    return weight.view(heads, d // 2, 2, -1).transpose(1, 2).reshape(weight.shape).contiguous()


def convert(data: bytes) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The configuration and the tensors, under Hugging Face's names."""
    dim, hidden, layers, heads, kv_heads, vocabulary, length = np.frombuffer(data[:28], dtype="<i4").tolist()
    tied, vocabulary, kv = vocabulary > 0, abs(vocabulary), dim // heads * kv_heads
    read = Reader(data[28:])
    tensors = {"model.embed_tokens.weight": read.take(vocabulary, dim)}
    kinds = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }
    turned = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}
    for name, shape in kinds.items():
        for i, weight in enumerate(read.take(layers, *shape)):
            tensors[f"model.layers.{i}.{name}.weight"] = halves(weight, turned[name]) if name in turned else weight
    tensors["model.norm.weight"] = read.take(dim)
    if not tied:
        read.take(length, dim // heads)  # cosines and sines, which are not needed
        tensors["lm_head.weight"] = read.take(vocabulary, dim)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": dim,
        "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": length, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip
    return config, {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", required=True, help="a model with the same tokenizer: a folder or a .gguf file")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    config, tensors = convert(given.file.read_bytes())
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, given.out / "model.safetensors", metadata={"format": "pt"})
    open_checkpoint(given.tokenizer).tokenizer.save(given.out)
    print(f"{given.out}: {sum(t.numel() for t in tensors.values()) / 1e6:.1f} million weights.")


if __name__ == "__main__":
    main()
