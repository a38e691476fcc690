"""Tiny models of architectures that the built-in decoder does not support, with random weights.

The weights are scaled so that texts vary: a random model with tied embeddings only repeats itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from support import tiny

transformers.logging.set_verbosity_error()

CAUSAL = ("gpt2", "gpt_neox", "phi", "gemma2", "opt", "mixtral", "qwen2_moe", "bloom", "mamba")
TWO_SIDED = ("t5", "bart", "marian")
_BOTH = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_COMMON = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
_PAIRS = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 256,
    "decoder_start_token_id": 2, "forced_eos_token_id": None, "forced_bos_token_id": None,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "tie_word_embeddings": False},
    "gpt_neox": _COMMON,
    "phi": _COMMON,
    "gemma2": _COMMON | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 24, "num_hidden_layers": 4},
    "opt": _COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": _COMMON | {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2_moe": _COMMON | {
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1,
    },
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "tie_word_embeddings": False},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "tie_word_embeddings": False},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 2,
           "tie_word_embeddings": False},
    "bart": _PAIRS,
    "marian": _PAIRS | {"decoder_vocab_size": 300},
}  # fmt: skip


def module(kind: str, seed: int = 1, blur: float = 0.0, dtype: torch.dtype = torch.float32) -> Any:
    """A model of this kind; with blur, a weaker copy of the one with the same seed."""
    config = transformers.AutoConfig.for_model(kind, **_BOTH | _OWN[kind])
    auto = transformers.AutoModelForSeq2SeqLM if kind in TWO_SIDED else transformers.AutoModelForCausalLM
    made = auto.from_config(config).eval()
    exact, other = (torch.Generator().manual_seed(seed + i) for i in (0, 1000))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1:
                embedding = any(part in name for part in ("embed", "wte", "shared"))
                scale = 1.0 if embedding else 1.3 / weight.shape[-1] ** 0.5
                drawn = torch.randn(weight.shape, generator=exact)
                drawn = (1 - blur) * drawn + blur * torch.randn(weight.shape, generator=other)
                weight.copy_(drawn * scale)
    return made.to(dtype)


def tokenizer() -> Any:
    """The models' tokenizer, as a transformers object."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|im_start|>", "padding_side": "left"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer(), **names)


def save(folder: Path, kind: str, seed: int = 1, blur: float = 0.0) -> Path:
    """Write a whole folder with transformers."""
    module(kind, seed, blur).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
