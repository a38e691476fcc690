"""Tiny random encoder–decoders of transformers, and the same weights in the built-in decoder, fed by hand."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor

from outrider.backends import WHOLE, Part
from outrider.backends.rows import Rows, rows_of
from outrider.backends.transformer import Transformer
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.models.config import ModelConfig
from outrider.models.encoder_decoder import model_config, named_weights
from outrider.models.weights import InMemory
from outrider.types import Sequence

V = 96
_IDS = {"vocab_size": V, "bos_token_id": 3, "eos_token_id": 0, "pad_token_id": 2, "decoder_start_token_id": 2}
_IDS |= {"forced_eos_token_id": None, "forced_bos_token_id": None}
_T5 = {"d_model": 32, "d_kv": 12, "d_ff": 40, "num_layers": 3, "num_heads": 4}
_T5 |= {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 20}
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 96,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", _T5),
    "t5 gated, not scaled": ("t5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5 silu": ("t5", _T5 | {"feed_forward_proj": "gated-silu", "num_decoder_layers": 2}),
    "t5 gelu": ("t5", _T5 | {"feed_forward_proj": "gelu_new", "d_kv": 8, "relative_attention_num_buckets": 32}),
    "bart": ("bart", _BART | {"tie_word_embeddings": False}),
    "bart scaled": ("bart", _BART | {"scale_embedding": True, "activation_function": "relu"}),
    "bart start": ("bart", _BART | {"forced_bos_token_id": 7, "decoder_layers": 2, "encoder_layers": 3}),
    "marian": (
        "marian",
        _BART | {"activation_function": "swish", "scale_embedding": True, "tie_word_embeddings": False},
    ),
    "marian banned": ("marian", _BART | {"activation_function": "relu", "bad_words_ids": [[2], [11], [4, 5]]}),
    "marian apart": (
        "marian",
        _BART | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": V - 7, "vocab_size": V},
    ),
}

_ONE = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1}
_ONE |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "activation_function": "swish"}
TINY: dict[str, tuple[str, dict[str, Any]]] = {  # for triton's interpreter
    "tiny marian": ("marian", _BART | _ONE | {"scale_embedding": True}),
    "tiny t5": (
        "t5",
        _T5 | {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "feed_forward_proj": "gated-gelu"},
    ),
    "blocks t5": (  # of 32 weights; distances as in every GGUF file
        "t5",
        _T5
        | {
            "d_ff": 64,
            "d_kv": 16,
            "num_layers": 1,
            "num_heads": 2,
            "feed_forward_proj": "gated-gelu",
            "relative_attention_max_distance": 128,
        },
    ),
}

_FACTORS = {"q_proj.weight": 3.0, "out_proj.weight": 0.5, "fc2.weight": 0.5, "final_logits": 0.3}


@functools.cache
def pair(case: str, blur: float = 0.0) -> tuple[Any, ModelConfig, Any]:
    """A random model of transformers, and what Outrider reads of it; with blur, a weaker copy."""
    family, changes = (CASES | TINY)[case]
    torch.manual_seed(len(case))
    config = transformers.AutoConfig.for_model(family, **_IDS | changes)
    theirs = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    drawn, other = (torch.Generator().manual_seed(len(case) + i) for i in (0, 1000))
    with torch.no_grad():
        for name, weight in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if "embed_positions" in name and family == "marian":
                continue  # computed
            noise = torch.randn(weight.shape, generator=drawn)
            noise = (1 - blur) * noise + blur * torch.randn(weight.shape, generator=other)
            wide = weight.dim() > 1 and not any(part in name for part in ("embed", "shared", "bias"))
            scale = 1.5 / weight.shape[-1] ** 0.5 if wide else 1.0 if weight.dim() > 1 else 0.2
            scale *= 0.3 if "shared" in name or "embed_tokens" in name else 1.0  # else a text repeats its last token
            scale *= 0.3 if name.endswith(".q.weight") else 1.0  # T5 does not scale scores: its weights are smaller
            # Rows must not drift towards their common mean: sharp attention, and little is added by each block.
            scale *= next((by for part, by in _FACTORS.items() if part in name), 1.0)
            weight.copy_(noise * scale + float("norm" in name and name.endswith("weight")))
    ours = model_config(theirs.config.to_dict(), theirs.generation_config.to_dict())
    return theirs, ours, named_weights(InMemory(theirs.state_dict()), ours)


@functools.cache
def ours(case: str, dtype: torch.dtype, blur: float = 0.0, device: str = "cpu") -> Transformer:
    _, config, weights = pair(case, blur)
    return Transformer(config, weights, dtype, device, length=80)


def source(length: int = 30, salt: int = 0) -> list[int]:
    return [(i * i + 5 * i + 11 + salt) % (V - 8) for i in range(length)]


def text(length: int = 37) -> list[int]:
    return [(i * i + 3 * i + 7) % (V - 8) for i in range(length)]


def their_logits(model: Any, sources: list[int], tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([sources]), decoder_input_ids=torch.tensor([tokens]))
        return out.logits[0]  # [T, V]


class Bench:
    """A model with a cache of its own, fed by hand."""

    def __init__(self, model: Transformer, tokens: list[int], sources: list[int], spare: int = 0) -> None:
        self.model, self.cache = model, Cache(300, 4, 80, source_length=96)
        self.cache._free = self.cache._free[::2] + self.cache._free[1::2]  # neighbours do not lie side by side
        self.plane = self.cache.add_plane(*model.plane_shape)
        self.seq = self.add(1, tokens, sources, spare)

    def add(self, number: int, tokens: list[int], sources: list[int], spare: int = 0) -> Sequence:
        seq = Sequence(number, tokens, source=sources)
        self.cache.open(seq)
        assert self.cache.reserve(seq, len(tokens), spare)
        return seq

    def rows(self, *pieces: tuple[Sequence, int, int]) -> Rows:
        packed = BatchBuilder(self.cache)
        for seq, start, stop in pieces:
            packed.pending(seq, start, stop, want=False)
        packed.want = list(range(packed.count))
        return rows_of(packed)

    def logits(self, chunk: int = 10**9, part: Part = WHOLE) -> Tensor:
        n = len(self.seq.tokens)
        pieces = ((self.seq, i, min(i + chunk, n)) for i in range(0, n, min(chunk, n)))
        return torch.cat([self.model.forward(self.rows(piece), self.plane, part).logits for piece in pieces])
