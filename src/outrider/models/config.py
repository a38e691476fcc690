"""A model's shape: what a `config.json` or a GGUF header says, checked and named once.

Promise: a `ModelConfig` describes a decoder that Outrider runs exactly; anything it would run wrongly is refused
here, in a sentence. This file reads headers; it knows neither weights nor text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..errors import ModelError
from .rope import RopeScaling, gguf_scaling, hf_parameters, hf_scaling, stretched

if TYPE_CHECKING:
    from .gguf_file import GGUF

SUPPORTED = "Llama 2 and 3, SmolLM2 and 3, Mistral, Qwen2 and 2.5, and Qwen3 (dense)"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_NOPE_INTERVAL = 4  # SmolLM3: every fourth layer has no rope; GGUF has no key for it, llama.cpp hard-codes it too
_MOST_LAYERS = 10_000  # a damaged count must not fill the memory
# Kinds of end tokens that llama.cpp knows by their text, because GGUF names only one of them by number.
_END_PIECES = {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"}


class Unknown(ModelError):
    """A model that may be sound, but not one that the built-in decoder runs."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know about its shape."""

    architecture: str  # one of FAMILIES
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    context_length: int
    rotary_dim: int = 0  # 0 becomes head_dim: every dimension is rotated
    rope_scaling: RopeScaling | None = None
    no_rope_layers: frozenset[int] = frozenset()
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0  # 0 is none; a row sees itself and the sliding_window - 1 positions before it
    window_layers: frozenset[int] = frozenset()  # the layers that have the window
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotary_dim", self.rotary_dim or self.head_dim)
        sizes = (self.vocab_size, self.hidden_size, self.layers, self.heads, self.kv_heads, self.head_dim)
        if min(*sizes, self.intermediate_size, self.context_length) <= 0:
            raise ModelError("The model's configuration has a size that is not positive; download the model again.")
        factors = self.rope_scaling.factors if self.rope_scaling else ()
        fits = self.heads % self.kv_heads == 0 and self.rotary_dim % 2 == 0 and 0 < self.rotary_dim <= self.head_dim
        if not fits or (factors and len(factors) != self.rotary_dim // 2):
            raise ModelError(
                f"The model's configuration does not fit together ({self.heads} heads, {self.kv_heads} key/value "
                f"heads, {self.rotary_dim} of {self.head_dim} dimensions rotated); download the model again."
            )

    @property
    def attention_factor(self) -> float:
        """What rope's cos and sin are multiplied by: 1 except for yarn."""
        return self.rope_scaling.attention_factor if self.rope_scaling else 1.0

    def window(self, layer: int) -> int:
        """The sliding window of a layer, 0 when it sees everything."""
        return self.sliding_window if layer in self.window_layers else 0

    def inverse_frequencies(self) -> Tensor:
        """Angle per position of each rotated pair, scaling included: [rotary_dim/2] float64."""
        steps = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
        plain = self.rope_theta**-steps  # [rotary_dim/2]
        return self.rope_scaling.apply(plain, self.rope_theta) if self.rope_scaling else plain


def _known(architecture: str) -> str:
    if architecture not in FAMILIES:
        raise Unknown(f"The architecture '{architecture}' is not supported; Outrider runs {SUPPORTED}.")
    return architecture


# --- Hugging Face -------------------------------------------------------------------------------------------------


def from_hf(data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From `config.json`, and `generation_config.json`, which may name more end tokens."""
    try:
        return _from_hf(data, generation or {})
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"The model's config.json is not as it should be ({error}); download it again.") from error


def _from_hf(data: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    family = _known(str(data.get("model_type", "of unknown type")))
    _refuse_variants(data)
    layers, heads = _int(data, "num_hidden_layers", most=_MOST_LAYERS), _int(data, "num_attention_heads")
    hidden, context = _int(data, "hidden_size"), _int(data, "max_position_embeddings", 2048)
    head_dim = _int(data, "head_dim", 128 if family == "qwen3" else hidden // max(heads, 1))
    rope = hf_parameters(data)
    scaling = hf_scaling(rope, data, context)
    window, window_layers = _hf_window(data, family, layers)
    biased = bool(data.get("attention_bias", False)) and family != "mistral"
    return ModelConfig(
        architecture=family,
        vocab_size=_int(data, "vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_int(data, "num_key_value_heads", 8 if family == "mistral" else heads),
        head_dim=head_dim,
        intermediate_size=_int(data, "intermediate_size"),
        norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", 2e6 if family == "smollm3" else 1e4)),
        rotary_dim=int(head_dim * float(rope.get("partial_rotary_factor", 1.0))),
        context_length=stretched(context, scaling),
        rope_scaling=scaling,
        no_rope_layers=_hf_no_rope(data, layers) if family == "smollm3" else frozenset(),
        tied=bool(data.get("tie_word_embeddings", family == "smollm3")),
        qkv_bias=biased or family == "qwen2",
        o_bias=biased,
        qk_norm=family == "qwen3",
        sliding_window=window if window_layers else 0,
        window_layers=window_layers,
        bos_id=next(iter(_ids(data.get("bos_token_id"))), None),
        eos_ids=_ids(data.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
    )


def _refuse_variants(data: Mapping[str, Any]) -> None:
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise Unknown(f"The model's activation '{activation}' is not supported; Outrider runs models with silu.")
    if data.get("mlp_bias"):
        raise Unknown("The model's feed-forward layers have biases (mlp_bias), which Outrider does not support.")
    if int(data.get("num_experts") or data.get("num_local_experts") or 0) > 1:
        raise Unknown("The model is a mixture of experts, which is not supported; use a dense model.")
    quantised = data.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise ModelError(
            f"The model's weights are quantised ({method}), which is not supported in safetensors; "
            "use the original model, or a GGUF file of it."
        )


def _int(data: Mapping[str, Any], key: str, default: int | None = None, most: int = 1 << 31) -> int:
    value = data.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value > most:
        what = "has no" if value is None else f"has a strange value ({value!r}) for"
        raise ModelError(f"The model's configuration {what} '{key}'; download the model again.")
    return value


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def _hf_no_rope(data: Mapping[str, Any], layers: int) -> frozenset[int]:
    flags = data.get("no_rope_layers")  # 1 is a layer WITH rope
    if flags:
        return frozenset(i for i, flag in enumerate(flags[:layers]) if not flag)
    every = _int(data, "no_rope_layer_interval", _NOPE_INTERVAL)
    return frozenset(range(every - 1, layers, every))


def _hf_window(data: Mapping[str, Any], family: str, layers: int) -> tuple[int, frozenset[int]]:
    window = data.get("sliding_window") or 0
    if family == "llama" or not window or (family != "mistral" and not data.get("use_sliding_window", False)):
        return 0, frozenset()
    kinds = data.get("layer_types")
    if kinds and family != "mistral":
        return window, frozenset(i for i, kind in enumerate(kinds[:layers]) if kind == "sliding_attention")
    if family == "smollm3":
        return window, _hf_no_rope(data, layers)
    first = 0 if family == "mistral" else _int(data, "max_window_layers", 28)
    return window, frozenset(range(first, layers))


# --- GGUF ---------------------------------------------------------------------------------------------------------


def from_gguf(file: GGUF) -> ModelConfig:
    """From a GGUF header. Biases, q/k norms and the tied head show in which tensors the file has."""
    family = _known(str(file.metadata.get("general.architecture", "of unknown type")))
    own = {k[len(family) + 1 :]: v for k, v in file.metadata.items() if k.startswith(family + ".")}
    if own.get("expert_count"):
        raise ModelError("The model is a mixture of experts, which is not supported; use a dense model.")
    heads, hidden = _int(own, "attention.head_count"), _int(own, "embedding_length")
    head_dim = _int(own, "attention.key_length", hidden // max(heads, 1))
    layers, context = _int(own, "block_count", most=_MOST_LAYERS), _int(own, "context_length")
    scaling = gguf_scaling(own, file)
    window = _int(own, "attention.sliding_window", 0) if family == "llama" else 0  # Mistral 0.1; others ignore the key
    return ModelConfig(
        architecture=family,
        vocab_size=file.shape("token_embd.weight")[0],
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_int(own, "attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=_int(own, "feed_forward_length"),
        norm_eps=float(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=float(own.get("rope.freq_base", 1e4)),
        rotary_dim=_int(own, "rope.dimension_count", head_dim),
        context_length=stretched(context, scaling),
        rope_scaling=scaling,
        no_rope_layers=_hf_no_rope({}, layers) if family == "smollm3" else frozenset(),
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=window,
        window_layers=frozenset(range(layers)) if window else frozenset(),
        bos_id=next(iter(_ids(file.metadata.get("tokenizer.ggml.bos_token_id"))), None),
        eos_ids=gguf_eos_ids(file.metadata),
    )


def gguf_eos_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Every token that ends a text: those named by number, and control tokens known by their text."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    pieces = enumerate(zip(metadata.get("tokenizer.ggml.tokens") or [], kinds, strict=False))
    return _ids(named) | frozenset(i for i, (piece, kind) in pieces if kind == 3 and piece in _END_PIECES)


class Sizes(Protocol):
    """What every decoder of the Llama family has, whole models and heads alike."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...


def to_hf(c: Sizes) -> dict[str, Any]:
    """Sizes under Hugging Face's names, as `from_hf` reads them."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.context_length,
    }
