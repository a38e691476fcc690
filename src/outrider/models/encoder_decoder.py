"""T5, BART and Marian: their configuration as a decoder with an encoder, and their tensors under Outrider's names.

Promise: as `config` and `weights` give for decoders. A variant whose numbers would differ from those of transformers is
refused here with a message. It knows names and configuration values; it does not know how a layer runs.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MISREAD, ModelError, first_line
from .config import (
    ERF_GELU,
    GELU,
    LEARNED,
    MAX_LAYERS,
    RELU,
    SILU,
    SINUSOIDAL,
    ModelConfig,
    UnsupportedModel,
    from_hf,
    integer,
    known_activation,
    token_ids,
)
from .paths import write_json
from .tokenizer import read_json
from .weights import InMemory, Safetensors, Source, Weights, adapted, expected, find_safetensors, save_tensors

ENCODER_DECODERS = ("t5", "bart", "marian")
_ACTIVATIONS = {"relu": RELU, "gelu": ERF_GELU, "gelu_new": GELU, "silu": SILU, "swish": SILU}
_T5_LENGTH = 2048  # positions of a source and of a text; the model itself sets no limit
DRAFT_FACTS = "draft.json"  # in the folder of a smaller decoder that was trained for a target
_POSITION_OFFSET = 2  # BART's position 0 is the third row of its table


def model_config(data: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From `config.json` and `generation_config.json`, with or without an encoder."""
    if data.get("model_type") not in ENCODER_DECODERS:
        return from_hf(data, generation)
    try:
        return _encoder_decoder(data, generation or {})
    except MISREAD as error:
        raise ModelError(f"The model's config.json is not as it should be ({error}); download it again.") from error


def _encoder_decoder(data: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    if data.get("is_encoder_decoder") is False:
        raise UnsupportedModel("The model is one half of an encoder–decoder, which is not supported.")
    if data.get("quantization_config"):
        raise UnsupportedModel("The model's weights are quantised, which is not supported for encoder–decoders.")
    sizes = _t5(data) if data["model_type"] == "t5" else _bart(data)
    encoder, decoder = (ModelConfig(**common) for common in sizes)
    banned = [word[0] for word in _setting("bad_words_ids", generation, data) or () if len(word) == 1]
    banned += _setting("suppress_tokens", generation, data) or ()
    return replace(
        decoder,
        encoder=encoder,
        starts=_starts(data, generation),
        banned=tuple(sorted({token for token in banned if 0 <= token < decoder.vocab_size})),
        bos_id=next(iter(token_ids(data.get("bos_token_id"))), None),
        eos_ids=token_ids(data.get("eos_token_id")) | token_ids(generation.get("eos_token_id")),
    )


def _setting(name: str, *places: Mapping[str, Any]) -> Any:
    """The first value that is not null."""
    return next((value for place in places if (value := place.get(name)) is not None), None)


def _starts(data: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    found = (_setting(name, generation, data) for name in names)
    start = next((value for value in found if isinstance(value, int)), None)
    if start is None:
        raise ModelError("The model does not say how its answers begin: set decoder_start_token_id in its config.")
    forced = _setting("forced_bos_token_id", generation, data)
    return (start,) if forced is None else (start, int(forced))


def _t5(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """No positions, but a bias by distance; RMS norms; scores are not scaled."""
    hidden, heads = integer(data, "d_model"), integer(data, "num_heads")
    layers = integer(data, "num_layers", most=MAX_LAYERS)
    gate, _, name = str(data.get("feed_forward_proj", "relu")).rpartition("-")
    # Version 1.1 has an output matrix of its own and does not scale its input; transformers 5 writes that by name.
    own_head = data.get("tie_word_embeddings") is False
    scaled = bool(data.get("scale_decoder_outputs", not own_head))
    common = {
        "architecture": "t5", "vocab_size": integer(data, "vocab_size"), "hidden_size": hidden, "heads": heads,
        "kv_heads": heads, "head_dim": integer(data, "d_kv", hidden // max(heads, 1)),
        "intermediate_size": integer(data, "d_ff"), "norm_eps": float(data.get("layer_norm_epsilon", 1e-6)),
        "rope_theta": 1e4, "context_length": max(int(data.get("n_positions") or 0), _T5_LENGTH), "score_scale": 1.0,
        "activation": GELU if (gate, name) == ("gated", "gelu") else known_activation(name, _ACTIVATIONS),
        "gated": bool(gate),
        "distance_buckets": integer(data, "relative_attention_num_buckets", 32),
        "distance_limit": integer(data, "relative_attention_max_distance", 128),
    }  # fmt: skip
    deep = integer(data, "num_decoder_layers", layers, most=MAX_LAYERS)
    # A file may have an output matrix of its own or not, whatever its configuration says: the weights tell.
    decoder = common | {"tied": False, "logit_scale": hidden**-0.5 if scaled else 1.0}
    return _layers(common | {"tied": True}, layers), _layers(decoder, deep)


def _bart(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """BART and Marian: embedded positions, layer norms on the stream, biases everywhere."""
    family, hidden = str(data["model_type"]), integer(data, "d_model")
    for key in ("normalize_before", "add_final_layer_norm"):
        if data.get(key):
            raise UnsupportedModel(f"The model's norms are placed otherwise ({key}), which is not supported.")
    bart = family == "bart"
    common = {
        "architecture": family, "hidden_size": hidden, "norm_eps": 1e-5, "rope_theta": 1e4,
        "context_length": integer(data, "max_position_embeddings", 1024), "qkv_bias": True, "o_bias": True,
        "activation": known_activation(data.get("activation_function", "gelu"), _ACTIVATIONS), "gated": False,
        "mlp_bias": True, "layer_norm": True, "stream_norm": True, "positions": LEARNED if bart else SINUSOIDAL,
        "embedding_norm": bart, "embedding_scale": math.sqrt(hidden) if data.get("scale_embedding") else 1.0,
    }  # fmt: skip
    words = integer(data, "vocab_size")
    halves = []
    for half, vocabulary in (("encoder", words), ("decoder", data.get("decoder_vocab_size") or words)):
        heads = integer(data, f"{half}_attention_heads", 16)
        sizes = {
            "vocab_size": vocabulary, "heads": heads, "kv_heads": heads, "head_dim": hidden // max(heads, 1),
            "intermediate_size": integer(data, f"{half}_ffn_dim", 4096), "tied": half == "encoder",
        }  # fmt: skip
        halves.append(_layers(common | sizes, integer(data, f"{half}_layers", 12, most=MAX_LAYERS)))
    halves[1]["head_bias"] = True
    return halves[0], halves[1]


def _layers(common: dict[str, Any], layers: int) -> dict[str, Any]:
    """Of so many layers, none of which rotates."""
    return common | {"layers": layers, "no_rope_layers": frozenset(range(layers))}


# ------------------------------------------------------------ tensors

_T5_NAMES = {
    "input_layernorm": "layer.0.layer_norm", "self_attn": "layer.0.SelfAttention",
    "cross_attention_layernorm": "layer.1.layer_norm", "cross_attn": "layer.1.EncDecAttention",
    "post_attention_layernorm": "layer.{mlp}.layer_norm", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "mlp": "layer.{mlp}.DenseReluDense", "gate_proj": "wi_0", "up_proj": "{up}", "down_proj": "wo",
}  # fmt: skip
_BART_NAMES = {
    "input_layernorm": "self_attn_layer_norm", "cross_attention_layernorm": "encoder_attn_layer_norm",
    "cross_attn": "encoder_attn", "post_attention_layernorm": "final_layer_norm", "o_proj": "out_proj",
    "up_proj": "fc1", "down_proj": "fc2",
}  # fmt: skip


class EncoderDecoderWeights(Weights):
    """The tensors of an encoder–decoder under Outrider's names; the encoder's begin with `encoder.`.

    source: its own names, without the leading `model.`. Matrices that several names share are stored under any of them;
    sinusoidal positions are computed.
    """

    def __init__(self, source: Any, config: ModelConfig) -> None:
        self.source, self.config = source, config
        stored = source.names()
        self._stored = {
            name: found
            for name in expected(config)
            if (found := next((one for one in self._candidates(name) if one in stored), None)) is not None
        }
        self._computed = {
            name for name in expected(config) if name not in self._stored and self._default(name) is not None
        }

    def _candidates(self, name: str) -> list[str]:
        """Where a tensor may be stored, the likeliest first."""
        half, rest = ("encoder", name[8:]) if name.startswith("encoder.") else ("decoder", name)
        own = f"{half}.embed_tokens.weight"
        if rest == "embed_tokens.weight":
            return [own, "shared.weight"] + ["lm_head.weight"] * (half == "decoder")
        if rest == "lm_head.weight":
            return [rest, "decoder.embed_tokens.weight", "shared.weight"]
        if rest == "lm_head.bias":
            return ["final_logits_bias"]
        if rest.startswith("layers."):
            return [f"{half}.{self._layer_name(rest, half)}"]
        if self.config.architecture == "t5":
            bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            return [f"{half}.{bias if rest.startswith('distance') else rest.replace('norm', 'final_layer_norm')}"]
        return [f"{half}.{rest.replace('embed_norm', 'layernorm_embedding')}"]

    def _layer_name(self, name: str, half: str) -> str:
        _, number, *parts = name.split(".")
        *parts, end = parts
        if self.config.architecture != "t5":
            parts = [_BART_NAMES.get(part, part) for part in parts if part != "mlp"]
            return ".".join(["layers", number, *parts, end])
        places = {"mlp": "2" if half == "decoder" else "1", "up": "wi_1" if self.config.gated else "wi"}
        parts = [_T5_NAMES[part].format(**places) for part in parts]
        return ".".join(["block", number, *parts, end])

    def _default(self, name: str) -> Tensor | None:
        """A tensor that files leave out."""
        if self.config.positions == SINUSOIDAL and name.endswith("embed_positions.weight"):
            return sinusoids(*expected(self.config)[name])
        return torch.zeros(self.config.vocab_size) if name == "lm_head.bias" else None

    def names(self) -> frozenset[str]:
        return frozenset(self._stored) | self._computed

    def has(self, name: str) -> bool:
        return name in self._stored or name in self._computed

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._computed:
            return expected(self.config)[name]
        first, *rest = self.source.shape(self._stored[name])
        if name == "lm_head.bias":
            return tuple(rest)
        return first - self._offset(name), *rest

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        if name in self._computed:
            default = self._default(name)
            assert default is not None
            return default.to(dtype)
        tensor: Tensor = self.source.get(self._stored[name], dtype)
        return tensor[0] if name == "lm_head.bias" else tensor[self._offset(name) :]

    def _offset(self, name: str) -> int:
        learned = self.config.positions == LEARNED and name.endswith("embed_positions.weight")
        return _POSITION_OFFSET if learned else 0


def sinusoids(length: int, width: int) -> Tensor:
    """Marian's positions [length, width]: sines of all frequencies, then their cosines."""
    inverse = 10000.0 ** -(2 * (torch.arange(width, dtype=torch.float64) // 2) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * inverse  # [length, width]
    return torch.cat([angles[:, 0::2].sin(), angles[:, 1::2].cos()], 1).to(torch.float32)


def _unpickled(path: Path) -> InMemory:
    """A `pytorch_model.bin`. Only tensors are read: nothing in the file is run."""
    try:
        loaded = torch.load(str(path), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, TypeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        why = first_line(error)
        raise ModelError(f"{path} is damaged, or holds more than tensors ({why}); download it again.") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ModelError(f"{path} holds more than tensors; download it again.")
    return InMemory(loaded)


def folder_tensors(folder: Path, config: ModelConfig) -> Any:
    """The tensors of a folder under their own names. Encoder–decoders are often published as one pickle."""
    pickled = folder / "pytorch_model.bin"
    if config.encoder is not None and pickled.is_file() and not any(folder.glob("*.safetensors")):
        return _unpickled(pickled)
    return Safetensors(find_safetensors(folder))


def named_weights(source: Any, config: ModelConfig) -> Any:
    """Weights in Hugging Face's form under Outrider's names."""
    return adapted(source, config) if config.encoder is None else EncoderDecoderWeights(source, config)


# ------------------------------------------------------------ writing


def write_encoder_decoder(
    folder: Path,
    origin: Path,
    config: ModelConfig,
    source: Source,
    tokenizer: Any,
    dtype: torch.dtype,
    card: str = "",
    drafts: Mapping[str, Any] | None = None,
) -> None:
    """Write a model with another number of decoder layers than the one in `origin`, which it is a part of.

    source: its tensors under Outrider's names. drafts: what `DraftFacts` reads. config.json is last: a folder that has
    one is complete.
    """
    data, family = read_json(origin / "config.json"), config.architecture
    data |= {("num_decoder_layers" if family == "t5" else "decoder_layers"): config.layers}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", _stored_tensors(config, source, dtype))
    tokenizer.save(folder)
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")
    if drafts is not None:
        write_json(folder / DRAFT_FACTS, drafts)
    if generation := read_json(origin / "generation_config.json"):
        write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", data | {"torch_dtype": str(dtype).removeprefix("torch.")})


@dataclass(frozen=True)
class DraftFacts:
    """What a smaller decoder's folder says beside the model's own files."""

    target_hash: str | None = None  # of the model whose encoder it reads
    draft_ids: tuple[int, ...] = ()  # what it can draft, ascending; empty: every token
    acceptance: tuple[float, ...] = ()  # by depth, as its training measured it; empty: unknown

    @classmethod
    def of(cls, folder: Path, vocabulary: int) -> DraftFacts:
        """Of a folder; nothing is known of one without the file."""
        if not (folder / DRAFT_FACTS).is_file():
            return cls()
        data = read_json(folder / DRAFT_FACTS)
        ids = data.get("draft_ids") or ()
        known = all(isinstance(i, int) and 0 <= i < vocabulary for i in ids)
        if not known or list(ids) != sorted(set(ids)):
            raise ModelError(f"{folder / DRAFT_FACTS} does not fit the model: draft_ids are not ascending token ids.")
        return cls(data.get("target_hash"), tuple(ids), tuple(map(float, data.get("acceptance") or ())))


def _stored_tensors(config: ModelConfig, source: Source, dtype: torch.dtype) -> dict[str, Tensor]:
    """Under the family's own names. A matrix that is there several times is stored once, as `shared`."""
    names, stored = EncoderDecoderWeights(InMemory({}), config), dict[str, Tensor]()
    shared = source.get("embed_tokens.weight", dtype)
    for name in expected(config):
        tensor = source.get(name, dtype).contiguous()
        if name.endswith(("embed_tokens.weight", "lm_head.weight")) and torch.equal(tensor, shared):
            continue
        if name.endswith("embed_positions.weight"):
            if config.positions == SINUSOIDAL:
                continue
            tensor = torch.cat([tensor.new_zeros(_POSITION_OFFSET, tensor.shape[1]), tensor])
        own = names._candidates(name)[0]
        inside = config.architecture != "t5" and own != "final_logits_bias" and own != "lm_head.weight"
        stored[f"model.{own}" if inside else own] = tensor[None] if name == "lm_head.bias" else tensor
    prefix = "" if config.architecture == "t5" else "model."
    return stored | {f"{prefix}shared.weight": shared.contiguous()}
