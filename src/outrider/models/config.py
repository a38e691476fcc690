"""A model's sizes and rope parameters, read from a Hugging Face `config.json` and written back to one.

Promise: a `ModelConfig` describes a decoder that the built-in backend runs exactly; every other variant is refused here
with a message. Rope frequencies equal those of `transformers` (Hugging Face files) and llama.cpp (GGUF).
It knows configuration values; it knows neither weights nor text. `gguf_file` reads the same from GGUF headers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MISREAD, ModelError

SUPPORTED = (
    "Llama 2 and 3, SmolLM2 and 3, Mistral, Qwen2 and 2.5, Qwen3 (dense), Gemma 2 and 3 (text), Phi-3 and 4, "
    "Granite 3, OLMo 2, GLM-4 and 4.5, MiMo, Mixtral, Qwen3-MoE, gpt-oss, T5, BART and Marian"
)
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3", "phi3", "granite", "olmo2", "glm4",
    "mixtral", "qwen3_moe", "gpt_oss", "glm4_moe",
)  # fmt: skip
_TYPES = {  # other names of a family
    "gemma3_text": "gemma3", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "glm4moe": "glm4_moe", "mimo": "qwen2",
}  # fmt: skip
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe")
SILU, GELU = "silu", "gelu_tanh"
RELU, ERF_GELU = "relu", "gelu"
CLAMPED = "clamped_silu"  # gpt-oss: gate and up are limited to 7, then (up + 1) * gate * sigmoid(1.702 gate)
_ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU, "gelu_new": GELU}
QUANTISED = ("awq", "gptq", "compressed-tensors", "fp8")  # methods that `quantised` reads
LEARNED, SINUSOIDAL = "learned", "sinusoidal"
MAX_LAYERS = 10_000  # a damaged count must not exhaust the memory
_NOPE_INTERVAL = 4  # SmolLM3: every fourth layer has no rope; GGUF has no key for it, llama.cpp hard-codes it too


class UnsupportedModel(ModelError):
    """A model that may be valid but that the built-in decoder does not run."""


# ------------------------------------------------------------ rope


@dataclass(frozen=True)
class RopeScaling:
    """How rope's frequencies are scaled for long contexts."""

    kind: str  # linear, llama3, yarn, factors, longrope
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # yarn, longrope: cos and sin are multiplied by it
    factors: tuple[float, ...] = ()  # factors: one divisor per frequency, as GGUF's rope_freqs.weight has them
    long_factors: tuple[float, ...] = ()  # longrope: the divisors of a context longer than the original one

    def apply(self, plain: Tensor, theta: float, length: int) -> Tensor:
        """Scale the unscaled frequencies [rotary_dim/2] float64 for sequences of up to `length` positions.

        longrope's divisors depend on the length; they are those of the longest sequence, so that no row changes.
        """
        if self.kind == "linear":
            return plain / self.factor
        if self.kind in ("factors", "longrope"):
            chosen = self.long_factors if self.kind == "longrope" and length > self.original_context else self.factors
            return plain / torch.tensor(chosen, dtype=torch.float64)
        return _llama3(plain, self) if self.kind == "llama3" else _yarn(plain, self, theta)


def _llama3(plain: Tensor, s: RopeScaling) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated."""
    turns = s.original_context * plain / (2 * math.pi)  # [rotary_dim/2] turns within the original context
    blend = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return plain * (blend + (1 - blend) / s.factor)


def _yarn(plain: Tensor, s: RopeScaling, theta: float) -> Tensor:
    """As llama3, with the interpolation linear in the pair's index (arXiv 2309.00071)."""
    dim = 2 * len(plain)

    def index_of(turns: float) -> float:
        return dim * math.log(s.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(s.beta_fast), index_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * ((1 - ramp) + ramp / s.factor)


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None, length: int = 0) -> Tensor:
    """Angle per position of each of dim/2 rotated pairs: [dim/2] float64."""
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return scaling.apply(plain, theta, length) if scaling else plain


def hf_rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """One dictionary from both spellings: transformers 5's rope_parameters, and rope_theta beside rope_scaling."""
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    rope = dict(rope.get("full_attention", rope)) if isinstance(rope, dict) else {}
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if rope.get(key) is None and data.get(key) is not None:
            rope[key] = data[key]
    return {key: value for key, value in rope.items() if value is not None}


def rope_scaling(rope: Mapping[str, Any], context: int) -> RopeScaling | None:
    """The scaling that `rope_parameters` describe, for a model of `context` positions; None: unscaled."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = int(rope.get("original_max_position_embeddings") or 0)
    if kind == "default":
        return None
    factor = float(rope.get("factor") or (context / original if original else 1.0))
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "llama3":
        low, high = float(rope.get("low_freq_factor", 1.0)), float(rope.get("high_freq_factor", 4.0))
        return RopeScaling("llama3", factor, original or 8192, low_freq_factor=low, high_freq_factor=high)
    if kind in ("longrope", "su"):
        return longrope(rope, context, original or context)
    if kind != "yarn":
        known = "linear, llama3, yarn and longrope"
        raise UnsupportedModel(f"The model's rope scaling '{kind}' is not supported; Outrider knows {known}.")
    return RopeScaling(
        "yarn", factor, original or context, truncate=bool(rope.get("truncate", True)),
        beta_fast=float(rope.get("beta_fast") or 32), beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=yarn_attention(rope, factor),
    )  # fmt: skip


def longrope(rope: Mapping[str, Any], context: int, original: int) -> RopeScaling:
    """Phi-3's: a divisor for each frequency, one list for short contexts and one for long ones."""
    factor = float(rope.get("factor") or context / original)
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (tuple(float(f) for f in rope[name]) for name in ("short_factor", "long_factor"))
    return RopeScaling(
        "longrope", factor, original, attention_factor=float(attention), factors=short, long_factors=long
    )


def yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    """What yarn multiplies cos and sin by: as configured, else derived from the factor."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(float(rope["mscale"])) / mscale(float(rope["mscale_all_dim"]))
    return mscale(1.0)


def scaled_context(context: int, scaling: RopeScaling | None) -> int:
    """The model's positions. Files with yarn often give the unscaled length."""
    if scaling is None or scaling.kind != "yarn":
        return context
    return max(context, int(scaling.original_context * scaling.factor))


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and variants of a decoder. Defaults are Llama's."""

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
    activation: str = SILU
    pre_norm: bool = True  # attention and MLP read the normed stream
    post_norm: bool = False  # what attention and MLP add to the stream is normed
    whole_qk_norm: bool = False  # q and k are normed as whole vectors, not head by head
    local_rope_theta: float = 0.0  # the unscaled rope base of layers with a window; 0: that of the others
    score_scale: float = 0.0  # of q·k; 0: head_dim^-½
    score_cap: float = 0.0  # q·k becomes cap * tanh(q·k / cap); 0: as it is
    logit_cap: float = 0.0  # the same for logits
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add to the stream
    logit_scale: float = 1.0
    experts: int = 0  # MLPs of a layer, of which each row uses a few; 0: an ordinary MLP
    experts_used: int = 0
    expert_size: int = 0  # the intermediate size of one
    normalise_experts: bool = True  # the shares of a row's experts add up to one
    dense_layers: frozenset[int] = frozenset()  # with an ordinary MLP, where others have experts
    expert_bias: bool = False  # of router and experts
    corrected_router: bool = False  # shares are sigmoids; a learnt correction takes part in the choice of experts only
    expert_scale: float = 1.0  # of what a row's experts add
    shared_size: int = 0  # the intermediate size of an MLP that every row uses beside its experts; 0: none
    sinks: bool = False  # each head of attention has a score that takes its share of the weights and adds nothing
    layer_norm: bool = False  # norms subtract the mean and add a bias
    stream_norm: bool = False  # the stream is normed after each addition to it; blocks read it, and the head too
    gated: bool = True  # the MLP multiplies the activated gate with `up`; False: it activates `up`
    mlp_bias: bool = False
    positions: str = ""  # of LEARNED or SINUSOIDAL embeddings that are added to those of tokens
    embedding_norm: bool = False
    distance_buckets: int = 0  # of the distances whose score biases each head has learnt; 0: none
    distance_limit: int = 128  # all larger distances share a bucket
    banned: tuple[int, ...] = ()  # ids that are never emitted
    head_bias: bool = False
    encoder: ModelConfig | None = None  # it reads the prompt; each layer attends to its output
    starts: tuple[int, ...] = ()  # with an encoder: the tokens that a text starts with

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotary_dim", self.rotary_dim or self.head_dim)
        sizes = (self.vocab_size, self.hidden_size, self.layers, self.heads, self.kv_heads, self.head_dim)
        if min(*sizes, self.intermediate_size, self.context_length) <= 0:
            raise ModelError("The model's configuration has a size that is not positive; download the model again.")
        scaling = self.rope_scaling
        lists = (scaling.factors, scaling.long_factors) if scaling else ()
        if self.experts and not (0 < self.experts_used <= self.experts and self.expert_size > 0):
            raise ModelError(
                f"The model's configuration uses {self.experts_used} of {self.experts} experts; download it again."
            )
        fits = self.heads % self.kv_heads == 0 and self.rotary_dim % 2 == 0 and 0 < self.rotary_dim <= self.head_dim
        if not fits or any(each and len(each) != self.rotary_dim // 2 for each in lists):
            raise ModelError(
                f"The model's configuration does not fit together ({self.heads} heads, {self.kv_heads} key/value "
                f"heads, {self.rotary_dim} of {self.head_dim} dimensions rotated); download the model again."
            )

    @property
    def attention_factor(self) -> float:
        """The factor on rope's cos and sin: 1 except for yarn and longrope."""
        return self.rope_scaling.attention_factor if self.rope_scaling else 1.0

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    def window(self, layer: int) -> int:
        """The sliding window of a layer in positions; 0: none."""
        return self.sliding_window if layer in self.window_layers else 0

    @property
    def llama_like(self) -> bool:
        """Whether a layer computes what a Llama's does, q/k norms, biases, windows and partial rope included."""
        names = (
            "activation", "pre_norm", "post_norm", "whole_qk_norm", "local_rope_theta", "score_cap", "logit_cap",
            "embedding_scale", "residual_scale", "logit_scale", "experts", "sinks", "layer_norm", "stream_norm",
            "gated", "mlp_bias", "positions", "embedding_norm", "distance_buckets", "banned", "head_bias", "encoder",
        )  # fmt: skip
        defaults = {name: type(self).__dataclass_fields__[name].default for name in names}
        usual = self.attention_scale == self.head_dim**-0.5
        return usual and all(getattr(self, name) == default for name, default in defaults.items())

    @property
    def attention_scale(self) -> float:
        """The factor on q·k."""
        return self.score_scale or float(self.head_dim**-0.5)

    def inverse_frequencies(self, length: int = 0) -> Tensor:
        """Angle per position of each rotated pair, scaling included: [rotary_dim/2] float64.

        length: positions of the longest sequence; 0: the model's own.
        """
        length = length or self.context_length
        return inverse_frequencies(self.rotary_dim, self.rope_theta, self.rope_scaling, length)


def supported(architecture: object) -> str:
    """The family of an architecture, if the built-in decoder runs it."""
    family = _TYPES.get(str(architecture), architecture)
    if family not in FAMILIES:
        name = "of unknown type" if architecture is None else architecture
        raise UnsupportedModel(f"The architecture '{name}' is not supported; Outrider runs {SUPPORTED}.")
    return str(family)


def from_hf(data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From `config.json`, and `generation_config.json`, which may name more end tokens."""
    try:
        return _from_hf(data, generation or {})
    except MISREAD as error:
        raise ModelError(f"The model's config.json is not as it should be ({error}); download it again.") from error


_HEAD_DIMS = {"qwen3": 128, "gemma2": 256, "gemma3": 256, "glm4": 128, "gpt_oss": 64}  # where a file names none
_THETAS = {"smollm3": 2e6, "gemma3": 1e6, "gpt_oss": 150_000.0}
_TIED = ("smollm3", "gemma2", "gemma3")


def _from_hf(data: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    family = supported(data.get("model_type"))
    if isinstance(data.get("text_config"), dict):  # the text half of a model that also reads pictures
        data = {**data, **{name: value for name, value in data["text_config"].items() if value is not None}}
    _refuse_variants(data, family)
    layers, heads = integer(data, "num_hidden_layers", most=MAX_LAYERS), integer(data, "num_attention_heads")
    hidden, context = integer(data, "hidden_size"), integer(data, "max_position_embeddings", 2048)
    head_dim = integer(data, "head_dim", _HEAD_DIMS.get(family, hidden // max(heads, 1)))
    rope = hf_rope(data)
    scaling = rope_scaling(rope, context)
    window, window_layers = _hf_window(data, family, layers)
    biased = bool(data.get("attention_bias", family == "gpt_oss")) and family not in ("mistral", "mixtral", "phi3")
    partial = float(rope.get("partial_rotary_factor", 0.5 if family in ("glm4", "glm4_moe") else 1.0))
    return ModelConfig(
        architecture=family, vocab_size=integer(data, "vocab_size"), hidden_size=hidden, layers=layers, heads=heads,
        kv_heads=integer(data, "num_key_value_heads", 8 if family in ("mistral", "mixtral", "gpt_oss") else heads),
        head_dim=head_dim,
        intermediate_size=integer(data, "intermediate_size"), norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", _THETAS.get(family, 1e4))), rotary_dim=int(head_dim * partial),
        context_length=scaled_context(context, scaling), rope_scaling=scaling,
        no_rope_layers=no_rope_layers(layers, data) if family == "smollm3" else frozenset(),
        tied=bool(data.get("tie_word_embeddings", family in _TIED)),
        qkv_bias=biased or family == "qwen2", o_bias=biased and family not in ("glm4", "glm4_moe", "qwen2"),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3", "olmo2") or bool(data.get("use_qk_norm")),
        sliding_window=window if window_layers else 0, window_layers=window_layers,
        bos_id=next(iter(token_ids(data.get("bos_token_id"))), None),
        eos_ids=token_ids(data.get("eos_token_id")) | token_ids(generation.get("eos_token_id")),
        activation=_activation(data, family), **_variants(data, family, hidden), **_experts(data, family, layers),
    )  # fmt: skip


def _experts(data: Mapping[str, Any], family: str, layers: int) -> dict[str, Any]:
    """Mixtral's experts are as wide as its MLP would be; Qwen's layers may have an ordinary MLP."""
    if family in ("mixtral", "gpt_oss"):
        many, few = (8, 2) if family == "mixtral" else (32, 4)
        used = data.get("num_experts_per_tok") or data.get("experts_per_token") or few
        return {
            "experts": integer(data, "num_local_experts", many), "experts_used": used,
            "expert_size": integer(data, "intermediate_size"), "expert_bias": family == "gpt_oss",
        }  # fmt: skip
    if family == "glm4_moe":
        return _corrected_experts(data, layers)
    if family != "qwen3_moe":
        return {}
    every, dense = integer(data, "decoder_sparse_step", 1), data.get("mlp_only_layers") or ()
    count = data.get("num_experts") or data.get("num_local_experts")
    return {
        "experts": integer({"num_experts": count}, "num_experts", 128),
        "experts_used": integer(data, "num_experts_per_tok", 8),
        "expert_size": integer(data, "moe_intermediate_size", 768),
        "normalise_experts": bool(data.get("norm_topk_prob", False)),
        "dense_layers": frozenset(i for i in range(layers) if i in dense or (i + 1) % max(every, 1)),
    }


def _corrected_experts(data: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """GLM-4.5's: the first layers have an ordinary MLP; in the others every row uses a shared expert too."""
    if (data.get("n_group") or 1, data.get("topk_group") or 1) != (1, 1):
        raise UnsupportedModel("The model chooses groups of experts first (n_group), which is not supported.")
    count = data.get("n_routed_experts") or data.get("num_local_experts")
    size = integer(data, "moe_intermediate_size", 1408)
    return {
        "experts": integer({"n_routed_experts": count}, "n_routed_experts", 128),
        "experts_used": integer(data, "num_experts_per_tok", 8), "expert_size": size,
        "normalise_experts": bool(data.get("norm_topk_prob", True)), "corrected_router": True,
        "expert_scale": float(data.get("routed_scaling_factor", 1.0)),
        "shared_size": size * integer(data, "n_shared_experts", 1),
        "dense_layers": frozenset(range(min(integer(data, "first_k_dense_replace", 1), layers))),
    }  # fmt: skip


def _variants(data: Mapping[str, Any], family: str, hidden: int) -> dict[str, Any]:
    """What distinguishes a family's layers from a Llama's."""
    if family == "granite":
        return {
            "score_scale": float(data.get("attention_multiplier", 1.0)),
            "embedding_scale": float(data.get("embedding_multiplier", 1.0)),
            "residual_scale": float(data.get("residual_multiplier", 1.0)),
            "logit_scale": 1 / float(data.get("logits_scaling", 1.0)),
        }
    if family not in ("gemma2", "gemma3"):
        return dict(FAMILY_TRAITS.get(family, {}))
    scale = float(data.get("query_pre_attn_scalar", 256)) ** -0.5
    local = _local_theta(data) if family == "gemma3" else 0.0
    return gemma(hidden, data) | {"score_scale": scale, "local_rope_theta": local}


FAMILY_TRAITS: dict[str, dict[str, Any]] = {  # of every model of a family, whatever its file says
    "olmo2": {"pre_norm": False, "post_norm": True, "whole_qk_norm": True},
    "glm4": {"post_norm": True},
    "gpt_oss": {"sinks": True},
}


def gemma(hidden: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """What all Gemmas share; Hugging Face and GGUF give the caps the same names."""
    names = {"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
    caps = {field: float(data.get(name) or 0.0) for field, name in names.items()}
    return {"post_norm": True, "embedding_scale": math.sqrt(hidden)} | caps


def _local_theta(data: Mapping[str, Any]) -> float:
    """The rope base of Gemma 3's layers with a window."""
    rope = data.get("rope_parameters") or {}
    local = rope.get("sliding_attention") or {}
    return float(local.get("rope_theta") or data.get("rope_local_base_freq") or 10_000.0)


def _activation(data: Mapping[str, Any], family: str) -> str:
    if family == "gpt_oss":
        if (data.get("swiglu_limit", 7.0), data.get("swiglu_alpha", 1.702)) != (7.0, 1.702):
            raise UnsupportedModel("The model limits its gates otherwise than gpt-oss does, which is not supported.")
        return CLAMPED
    name = data.get("hidden_activation") or data.get("hidden_act", "silu")
    if str(data.get("model_type")).startswith("gemma") and name == "gelu":  # files from before the key was split
        name = "gelu_pytorch_tanh"
    return known_activation(name, _ACTIVATIONS)


def known_activation(name: Any, known: Mapping[str, str]) -> str:
    """Outrider's name of an activation; known: Hugging Face's names of those that a family may have."""
    if name not in known:
        raise UnsupportedModel(f"The model's activation '{name}' is not supported; Outrider runs {', '.join(known)}.")
    return known[name]


def _refuse_variants(data: Mapping[str, Any], family: str) -> None:
    if data.get("mlp_bias"):
        raise UnsupportedModel("The model's MLP has biases (mlp_bias), which Outrider does not support.")
    if data.get("use_bidirectional_attention"):
        raise UnsupportedModel("The model's attention looks ahead (use_bidirectional_attention): it embeds texts.")
    if family not in EXPERTS and int(data.get("num_experts") or data.get("num_local_experts") or 0) > 1:
        raise UnsupportedModel("The model is a mixture of experts, which is not supported; use a dense model.")
    if quantised := data.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        if (family, method) != ("gpt_oss", "mxfp4") and method not in QUANTISED:
            raise ModelError(
                f"The model's weights are quantised ({method}), which is not supported in safetensors; use the "
                f"original model, a GGUF file of it, or one of: {', '.join(QUANTISED)}."
            )


def integer(data: Mapping[str, Any], key: str, default: int | None = None, most: int = 1 << 31) -> int:
    """data[key] as an integer up to `most`; a missing or wrong value is a ModelError."""
    value = data.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value > most:
        what = "has no" if value is None else f"has a strange value ({value!r}) for"
        raise ModelError(f"The model's configuration {what} '{key}'; download the model again.")
    return value


def token_ids(value: Any) -> frozenset[int]:
    """The ids in a configuration value: one, a list, or none."""
    values = value if isinstance(value, list | tuple) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def no_rope_layers(layers: int, data: Mapping[str, Any]) -> frozenset[int]:
    flags = data.get("no_rope_layers")  # 1 is a layer WITH rope
    if flags:
        return frozenset(i for i, flag in enumerate(flags[:layers]) if not flag)
    every = integer(data, "no_rope_layer_interval", _NOPE_INTERVAL)
    return frozenset(range(every - 1, layers, every))


def _hf_window(data: Mapping[str, Any], family: str, layers: int) -> tuple[int, frozenset[int]]:
    window = data.get("sliding_window") or 0
    always = ("mistral", "mixtral", "phi3", "gemma2", "gemma3", "gpt_oss")
    if family in ("llama", "granite", "olmo2", "glm4", "glm4_moe") or not window:
        return 0, frozenset()
    if family not in always and not data.get("use_sliding_window", False):
        return 0, frozenset()
    kinds = data.get("layer_types")
    if kinds and family not in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        return window, frozenset(i for i, kind in enumerate(kinds[:layers]) if kind == "sliding_attention")
    if family == "smollm3":
        return window, no_rope_layers(layers, data)
    if family in _WINDOW_PATTERNS:
        return window, window_pattern(family, layers, data.get("sliding_window_pattern"))
    first = 0 if family in (*always, "qwen3_moe") else integer(data, "max_window_layers", 28)
    return window, frozenset(range(first, layers))


_WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt_oss": 2}  # every so many layers one reads the whole context


def window_pattern(family: str, layers: int, every: int | None = None) -> frozenset[int]:
    """The layers with a window, of a family that has them in turn."""
    every = every or _WINDOW_PATTERNS[family]
    return frozenset(i for i in range(layers) if (i + 1) % every)


# ------------------------------------------------------------ back to config.json

_SAME_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rope_theta")
_HF_NAMES = dict.fromkeys(_SAME_NAMES) | {
    "num_hidden_layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
    "rms_norm_eps": "norm_eps", "max_position_embeddings": "context_length",
}  # fmt: skip
_CLASS_NAMES = {"smollm3": "SmolLM3", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "llama": "Llama"}


def to_hf(sizes: Any) -> dict[str, Any]:
    """Sizes under Hugging Face's names, as `from_hf` reads them. sizes: a `ModelConfig`, or a head's configuration."""
    return {name: getattr(sizes, field or name) for name, field in _HF_NAMES.items()} | {"hidden_act": "silu"}


def hf_config(c: ModelConfig) -> dict[str, Any]:
    """A `config.json` that `from_hf` reads back as the same configuration."""
    if c.architecture not in _CLASS_NAMES:
        raise ModelError(f"A model of the family {c.architecture} cannot be written as a Hugging Face folder yet.")
    data: dict[str, Any] = {
        "architectures": [f"{_CLASS_NAMES[c.architecture]}ForCausalLM"],
        "model_type": c.architecture,
        "tie_word_embeddings": c.tied,
        "attention_bias": c.o_bias,
        "bos_token_id": c.bos_id,
        "eos_token_id": sorted(c.eos_ids),
    } | to_hf(c)
    if c.rotary_dim != c.head_dim:
        data["partial_rotary_factor"] = c.rotary_dim / c.head_dim
    if c.no_rope_layers:
        data["no_rope_layers"] = [int(i not in c.no_rope_layers) for i in range(c.layers)]
    if c.window_layers:
        kinds = ["sliding_attention" if i in c.window_layers else "full_attention" for i in range(c.layers)]
        data |= {"sliding_window": c.sliding_window, "use_sliding_window": True, "layer_types": kinds}
    if c.rope_scaling is not None:
        data["rope_scaling"] = _hf_scaling(c.rope_scaling)
    return data


def _hf_scaling(s: RopeScaling) -> dict[str, Any]:
    if s.kind == "factors":
        raise ModelError(
            "The target's rope is scaled by a table that only GGUF files have, so it cannot be written as a Hugging "
            "Face folder; give the target in Hugging Face layout, or train --kind eagle3."
        )
    common = {"rope_type": s.kind, "factor": s.factor}
    if s.kind == "linear":
        return common
    common |= {"original_max_position_embeddings": s.original_context}
    if s.kind == "llama3":
        return common | {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    own = {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
    return common | own | {"attention_factor": s.attention_factor}
