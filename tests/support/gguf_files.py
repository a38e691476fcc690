"""GGUF files of tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

V, H, LAYERS, HEADS, KV, INTER = 320, 32, 3, 4, 2, 64


TEXTS = ["the quick brown fox jumps over the lazy dog", "def f(x):\n    return x + 1\n", "naïve café 123"] * 4


SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "intermediate_size": INTER,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


FAMILIES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "smollm3": transformers.SmolLM3Config,
}


def tiny_model(family: str, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    extra = {"head_dim": 16} if family == "qwen3" else {}
    config = FAMILIES[family](**(SIZES | extra | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # else they are all ones and zeros, and a mix-up would not show
            torch.nn.init.normal_(parameter)
    return model


def tiny_tokenizer() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=V, show_progress=False, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
        ),
    )
    return core


def state(model: torch.nn.Module, tied: bool) -> dict[str, torch.Tensor]:
    named = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in named.items() if not (tied and name == "lm_head.weight")}


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of these models."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def write_gguf(path: Path, family: str, kind: Kind = Kind.F32, tied: bool = False, **keys: object) -> torch.nn.Module:
    """A tiny model as llama.cpp's converter would write it, with the names of the gguf package's own table."""
    model = tiny_model(family, tie_word_embeddings=tied)
    writer = gguf.GGUFWriter(str(path), family)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == family), LAYERS)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(H)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    if family == "qwen3":
        writer.add_key_length(16)
        writer.add_value_length(16)
    for key, value in keys.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    add_vocabulary(writer)
    for name, tensor in state(model, tied).items():
        data = tensor.numpy()
        if family in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            data = permuted(data, HEADS if "q_proj" in name else KV)
        full = name if name.startswith("lm_head") else f"model.{name}"
        target = names.get_name(full, try_suffixes=(".weight", ".bias"))
        assert target is not None
        how = kind if data.ndim == 2 else Kind.F32
        writer.add_tensor(target, gguf.quants.quantize(data, how), raw_dtype=how)
    finish(writer)
    return model


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    core = json.loads(tiny_tokenizer().to_str())
    tokens = sorted(core["model"]["vocab"], key=core["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in ("<s>", "</s>") else 1 for t in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in core["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
