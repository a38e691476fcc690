"""GGUF files: header, configuration, weights and tokenizer, under Hugging Face's names.

Promise: every length is checked against the file before it is used, so a truncated or damaged file gives a ModelError,
never garbage; every type that the `gguf` package can dequantise is read; the tokenizer gives the ids that the model was
trained with, and an unknown pre-tokenizer is refused. It knows llama.cpp's conventions (names, order of rows).
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from ..errors import ModelError, first_line
from . import config as configs
from .config import ModelConfig, RopeScaling, integer, token_ids
from .precision import GGUF as GGUF_BLOCKS
from .weights import Weights

_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}  # GGUF's number -> numpy's name
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_MAX_ARRAY = 1 << 22  # no vocabulary is longer: a damaged count must not exhaust the memory
_AT_ONCE = 1 << 20  # weights that a thread dequantises together: temporaries are several times as large
_THREADS = min(os.cpu_count() or 1, 8)


class _Damaged(Exception):
    """The header contradicts itself or the file's length."""


_LENGTH = struct.Struct("<Q")  # of a string


class _Cursor:
    """Reads a header sequentially, never past the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.offset, self.size = data, 0, len(data)

    def take(self, count: int) -> int:
        """Advance by count bytes; returns where they begin."""
        start, self.offset = self.offset, self.offset + count
        if self.offset > self.size:
            raise _Damaged("it ends within its header")
        return start

    def number(self, code: str) -> int:
        return int(struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0])

    def string(self) -> str:
        start = self.take(self.number("Q"))
        return self.data[start : self.offset].decode("utf-8")

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has a hundred thousand of them, read at every start."""
        data, offset, size, length_at, found = self.data, self.offset, self.size, _LENGTH.unpack_from, []
        for _ in range(count):
            start = offset + _LENGTH.size
            if start > size:
                raise _Damaged("it ends within its header")
            offset = start + length_at(data, offset)[0]
            if offset > size:
                raise _Damaged("it ends within its header")
            found.append(data[start:offset].decode("utf-8"))
        self.offset = offset
        return found

    def value(self, kind: int) -> Any:
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        return self.array(kind, 1)[0]

    def array(self, kind: int, count: int) -> list[Any]:
        if count > _MAX_ARRAY:
            raise _Damaged(f"its header has an array of {count:,} values")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise _Damaged(f"its header has a value of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(count * dtype.itemsize)
        return list(np.frombuffer(self.data[start : self.offset], dtype).tolist())


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]  # torch's order: rows first
    kind: GGMLQuantizationType
    start: int  # within the data section
    size: int  # bytes


class GGUF:
    """An open GGUF file: `metadata` by key, `tensors` by llama.cpp's names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ModelError(f"{path} is not a GGUF file, or it is incomplete; download it again.")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
        try:
            self._parse()
        except (_Damaged, UnicodeDecodeError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"{path} is incomplete or damaged ({error}); delete it and download it again.") from error
        if int(self.metadata.get("split.count") or 0) > 1:
            raise ModelError(f"{path} is one part of several; join them with llama.cpp's `llama-gguf-split --merge`.")

    def _parse(self) -> None:
        cursor = _Cursor(self._data)
        cursor.take(4)
        if (version := cursor.number("I")) not in (2, 3):
            raise _Damaged(f"its format version is {version}; 2 and 3 are supported")
        tensors, pairs = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"))
        self.tensors: dict[str, _Entry] = dict(_entry(cursor) for _ in range(tensors))
        alignment = int(self.metadata.get("general.alignment") or _ALIGNMENT)
        self._base = -(-cursor.offset // alignment) * alignment
        needed = self._base + max((e.start + e.size for e in self.tensors.values()), default=0)
        if needed > cursor.size:
            raise _Damaged(f"it has {cursor.size:,} of {needed:,} bytes")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def array(self, name: str, rows: npt.NDArray[np.int64] | slice | None = None) -> npt.NDArray[np.float32]:
        """A tensor, or some of its rows, dequantised to float32, in stored order; the result owns its memory."""
        entry, raw = self._find(name), self.raw(name)
        try:
            values = quants.dequantize(raw if rows is None else raw[rows], entry.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path} has tensors of type {entry.kind.name}, which cannot be read; "
                "use a file of another type, such as Q8_0, Q4_K_M or F16."
            ) from error
        return np.array(values, dtype=np.float32, copy=not values.flags.writeable)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, in its stored order: [..., bytes of a row], mapped."""
        entry = self._find(name)
        flat = np.frombuffer(self._data, np.uint8, entry.size, self._base + entry.start)
        return flat.reshape(*entry.shape[:-1], -1)

    def forget_vocabulary(self) -> None:
        """Drop the header's long arrays: a tokenizer that was made from them has its own copy."""
        for name in ("tokens", "merges", "scores", "token_type", "precompiled_charsmap"):
            self.metadata.pop(f"tokenizer.ggml.{name}", None)
        self.release()

    def release(self) -> None:
        """Pages that were read stay in the system's cache, but no longer count as this process's memory."""
        if sys.platform != "win32":
            self._data.madvise(mmap.MADV_DONTNEED)

    def _find(self, name: str) -> _Entry:
        if name not in self.tensors:
            raise ModelError(f"{self.path} has no tensor '{name}'; it is not a language model that Outrider runs.")
        return self.tensors[name]


def _entry(cursor: _Cursor) -> tuple[str, _Entry]:
    name, dims = cursor.string(), cursor.number("I")
    if not 1 <= dims <= 4:
        raise _Damaged(f"the tensor '{name}' has {dims} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(dims)]))
    kind = GGMLQuantizationType(cursor.number("I"))  # ValueError for an unknown type
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise _Damaged(f"the tensor '{name}' has rows of {shape[-1]} values, not a multiple of {block}")
    return name, _Entry(shape, kind, cursor.number("Q"), prod(shape) // block * block_bytes)


# ------------------------------------------------------------ configuration

_CONTROL = 3  # a token's type
# End tokens that llama.cpp recognises by their text, because GGUF names only one of them by id.
_END_TEXTS = {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"}
_END_TEXTS |= {"<|return|>", "<|call|>"}


def gguf_config(file: GGUF) -> ModelConfig:
    """The configuration in a header. Biases, q/k norms and a tied head follow from which tensors the file has."""
    named = str(file.metadata.get("general.architecture"))
    if named == "t5encoder":
        raise configs.UnsupportedModel("The file holds only the encoder of a T5, which reads texts and writes none.")
    family = configs.supported(file.metadata.get("general.architecture"))
    own = {k[len(named) + 1 :]: v for k, v in file.metadata.items() if k.startswith(named + ".")}
    if own.get("expert_count") and family == "llama":
        family = "mixtral"
    if own.get("expert_count") and family not in configs.EXPERTS:
        raise ModelError(f"A mixture of experts of the architecture '{named}' is not supported; use a dense model.")
    heads, hidden = integer(own, "attention.head_count"), integer(own, "embedding_length")
    head_dim = integer(own, "attention.key_length", hidden // max(heads, 1))
    context = integer(own, "context_length")
    layers = integer(own, "block_count", most=configs.MAX_LAYERS) - integer(own, "nextn_predict_layers", 0)
    scaling = gguf_rope_scaling(own, file)
    window, window_layers = _window(own, family, layers)
    tensors = file.tensors
    return ModelConfig(
        architecture=family, vocab_size=file.shape("token_embd.weight")[0], hidden_size=hidden, layers=layers,
        heads=heads, kv_heads=integer(own, "attention.head_count_kv", heads), head_dim=head_dim,
        intermediate_size=integer(own, "feed_forward_length"),
        norm_eps=float(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=float(own.get("rope.freq_base", 1e4)), rotary_dim=integer(own, "rope.dimension_count", head_dim),
        context_length=configs.scaled_context(context, scaling), rope_scaling=scaling,
        no_rope_layers=configs.no_rope_layers(layers, {}) if family == "smollm3" else frozenset(),
        tied="output.weight" not in tensors, qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors, qk_norm="blk.0.attn_q_norm.weight" in tensors,
        sliding_window=window, window_layers=window_layers,
        bos_id=next(iter(token_ids(file.metadata.get("tokenizer.ggml.bos_token_id"))), None),
        eos_ids=gguf_eos_ids(file.metadata), **_experts(own, family, layers),
        **_variants(own, family, hidden, heads, head_dim, layers),
    )  # fmt: skip


def _experts(own: Mapping[str, Any], family: str, layers: int) -> dict[str, Any]:
    """Except for GLM-4.5, llama.cpp always normalises the shares of a row's experts in the families read here."""
    if not own.get("expert_count"):
        return {}
    size = integer(own, "expert_feed_forward_length", integer(own, "feed_forward_length", 0))
    count, used = integer(own, "expert_count"), integer(own, "expert_used_count")
    found = {"experts": count, "experts_used": used, "expert_size": size, "expert_bias": family == "gpt_oss"}
    if family != "glm4_moe":
        return found
    if integer(own, "expert_gating_func", 2) != 2 or integer(own, "expert_group_count", 1) > 1:
        raise ModelError("The file's router is not the one of GLM-4.5; use a file of the original model.")
    dense = min(integer(own, "leading_dense_block_count", 0), layers)
    return found | {
        "normalise_experts": bool(own.get("expert_weights_norm", True)), "corrected_router": True,
        "expert_scale": float(own.get("expert_weights_scale") or 1.0),
        "shared_size": size * integer(own, "expert_shared_count", 0), "dense_layers": frozenset(range(dense)),
    }  # fmt: skip


def _window(own: Mapping[str, Any], family: str, layers: int) -> tuple[int, frozenset[int]]:
    """Mistral 0.1 is a `llama` with a window in every layer; Gemmas and gpt-oss have them in turn."""
    window = integer(own, "attention.sliding_window", 0)
    if not window or family not in ("llama", "mixtral", "gemma2", "gemma3", "gpt_oss"):
        return 0, frozenset()
    in_turn = family not in ("llama", "mixtral")
    return window, configs.window_pattern(family, layers) if in_turn else frozenset(range(layers))


def _variants(
    own: Mapping[str, Any], family: str, hidden: int, heads: int, head_dim: int, layers: int
) -> dict[str, Any]:
    """What distinguishes a family's layers from a Llama's. GGUF has no key for Gemma's scale of scores."""
    if family == "granite":
        return {
            "score_scale": float(own.get("attention.scale") or 0.0),
            "embedding_scale": float(own.get("embedding_scale") or 1.0),
            "residual_scale": float(own.get("residual_scale") or 1.0),
            "logit_scale": 1 / float(own.get("logit_scale") or 1.0),
        }
    if family not in ("gemma2", "gemma3"):
        traits = configs.FAMILY_TRAITS.get(family, {})
        return traits | ({"activation": configs.CLAMPED} if family == "gpt_oss" else {})
    largest = (family, layers) in (("gemma2", 46), ("gemma3", 62))  # the 27B models, as llama.cpp tells them
    local = float(own.get("rope.freq_base_swa") or 10_000.0) if family == "gemma3" else 0.0
    scale = (hidden // heads if largest else head_dim) ** -0.5
    own_values = {"score_scale": scale, "local_rope_theta": local, "activation": configs.GELU}
    return configs.gemma(hidden, own) | own_values


def gguf_rope_scaling(own: Mapping[str, Any], file: GGUF) -> RopeScaling | None:
    kind = str(own.get("rope.scaling.type", "linear" if own.get("rope.scale_linear") else "none"))
    factor = float(own.get("rope.scaling.factor") or own.get("rope.scale_linear") or 1.0)
    if "rope_factors_short.weight" in file.tensors:
        return _long_factors(own, file)
    if "rope_freqs.weight" in file.tensors:  # llama3's scaling, already computed by the converter
        linear = factor if kind == "linear" else 1.0
        return RopeScaling("factors", factors=tuple(f * linear for f in file.array("rope_freqs.weight").tolist()))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    original = int(own.get("rope.scaling.original_context_length") or own.get("context_length") or 0)
    attention = float(own.get("rope.scaling.attn_factor", 1.0)) * configs.yarn_attention({}, factor)
    rope = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    rope["truncate"] = str(file.metadata.get("general.architecture")) != "gpt-oss"
    betas = {key: own.get(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    return configs.rope_scaling(rope | betas | {"attention_factor": attention}, original)


def _long_factors(own: Mapping[str, Any], file: GGUF) -> RopeScaling:
    """Phi-3's: both lists of divisors are tensors."""
    context = integer(own, "context_length")
    original = int(own.get("rope.scaling.original_context_length") or context)
    rope: dict[str, Any] = {
        f"{name}_factor": file.array(f"rope_factors_{name}.weight").tolist() for name in ("short", "long")
    }
    rope["attention_factor"] = own.get("rope.scaling.attn_factor")
    return configs.longrope(rope, context, original)


def gguf_eos_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Every token that ends a text: those named by id, and control tokens known by their text."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type"))
    typed = enumerate(zip(tokens, types, strict=False))
    return token_ids(named) | frozenset(i for i, (text, type_) in typed if type_ == _CONTROL and text in _END_TEXTS)


def t5_in_hf_words(file: GGUF) -> dict[str, Any]:
    """The configuration of a T5 or Flan-T5, as its config.json has it.

    llama.cpp has no keys for what it takes from the tensors: gates, and an output matrix of its own. T5's distances
    have their usual limit there.
    """
    own = {k.removeprefix("t5."): v for k, v in file.metadata.items() if k.startswith("t5.")}
    if "dec.blk.1.attn_rel_b.weight" in file.tensors or "enc.blk.1.attn_rel_b.weight" in file.tensors:
        raise configs.UnsupportedModel(
            "Each layer of the model has a bias by distance of its own (UMT5): not supported."
        )
    layers, heads = integer(own, "block_count", most=configs.MAX_LAYERS), integer(own, "attention.head_count")
    hidden, token = integer(own, "embedding_length"), file.metadata.get
    return {
        "model_type": "t5", "vocab_size": file.shape("token_embd.weight")[0], "d_model": hidden, "num_heads": heads,
        "d_kv": integer(own, "attention.key_length", hidden // max(heads, 1)),
        "d_ff": integer(own, "feed_forward_length"), "num_layers": layers,
        "num_decoder_layers": integer(own, "decoder_block_count", layers),
        "layer_norm_epsilon": float(own.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "n_positions": integer(own, "context_length", 512),
        "relative_attention_num_buckets": integer(own, "attention.relative_buckets_count"),
        "feed_forward_proj": "gated-gelu" if "dec.blk.0.ffn_gate.weight" in file.tensors else "relu",
        "tie_word_embeddings": _is_tied(file), "decoder_start_token_id": own.get("decoder_start_token_id"),
        "pad_token_id": token("tokenizer.ggml.padding_token_id"), "eos_token_id": token("tokenizer.ggml.eos_token_id"),
    }  # fmt: skip


def _is_tied(file: GGUF) -> bool:
    """Whether a T5 writes with its embedding. Files have that matrix twice where the original did, rounded or not."""
    if "output.weight" not in file.tensors:
        return True
    shapes = {file.shape(name) for name in ("output.weight", "token_embd.weight")}
    if len(shapes) > 1:
        return False
    output, embedding = (file.array(name, slice(0, 64)) for name in ("output.weight", "token_embd.weight"))
    return bool(np.linalg.norm(output - embedding) < 0.3 * np.linalg.norm(embedding))


# ------------------------------------------------------------ weights

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_qkv": "self_attn.qkv_proj", "post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm",
    "ffn_gate_inp": "mlp.router", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "attn_sinks": "self_attn.sinks",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj", "exp_probs_b": "mlp.correction",
}  # fmt: skip
_OF_PAIRS = {  # of an encoder–decoder's layers, besides
    "attn_o": "self_attn.o_proj", "cross_attn_norm": "cross_attention_layernorm", "cross_attn_q": "cross_attn.q_proj",
    "cross_attn_k": "cross_attn.k_proj", "cross_attn_v": "cross_attn.v_proj", "cross_attn_o": "cross_attn.o_proj",
}  # fmt: skip
_NEXTN = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}  # MTP
_GGUF_TOP, _GGUF_BLOCK = ({hf: name for name, hf in table.items()} for table in (_TOP, _BLOCK))
# llama.cpp rotates neighbours (2i, 2i+1) in these, Hugging Face halves (i, i + d/2).
_PERMUTED = ("llama", "smollm3", "granite", "mixtral")


class GGUFWeights(Weights):
    """The tensors of a GGUF file under Hugging Face names, with Hugging Face's order of rows."""

    def __init__(self, file: GGUF, config: ModelConfig) -> None:
        self._file, self._config = file, config
        self._names = {hf: name for name in file.tensors if (hf := hf_name(name)) is not None}
        if config.encoder is not None and "embed_tokens.weight" in self._names:  # one matrix for both, or for all three
            shared = self._names["embed_tokens.weight"]
            self._names = {"encoder.embed_tokens.weight": shared, "lm_head.weight": shared} | self._names
        if config.architecture in _PERMUTED and config.rotary_dim != config.head_dim:
            raise ModelError(f"{file.path} rotates only a part of each head, which is not supported in such files.")

    @property
    def quantised(self) -> bool:
        """Whether some tensor is stored with less precision than F16."""
        whole = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
        return any(entry.kind not in whole for entry in self._file.tensors.values())

    @property
    def stored_in(self) -> str:
        return GGUF_BLOCKS if self.quantised else ""

    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._names[name])

    def kind(self, name: str) -> str:
        """The type of a tensor's values, such as "F32" or "Q4_K"."""
        return self._file.tensors[self._names[name]].kind.name

    def blocks(self, name: str) -> Tensor:
        """A tensor's quantised rows as they are stored: [rows, bytes] uint8, in Hugging Face's order."""
        raw = torch.from_numpy(self._file.raw(self._names[name]).copy())
        self._file.release()
        return reorder_rows(name, raw, self._config, to_gguf=False)

    def mapped(self, name: str) -> npt.NDArray[np.uint8]:
        """The rows of an embedding or output matrix as they are stored, in the file's own memory: [rows, bytes]."""
        return self._file.raw(self._names[name])

    def block_rows(self, name: str, ids: Tensor) -> Tensor:
        """Some rows of an embedding or output matrix as they are stored, [n, bytes] uint8; no others are copied."""
        raw = torch.from_numpy(self._file.raw(self._names[name])[ids.cpu().numpy()])
        self._file.release()
        return raw

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Some rows of an embedding or output matrix, [n, columns] float32, without reading the others."""
        return torch.from_numpy(self._file.array(self._names[name], ids.cpu().numpy()))

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        """Dequantised in parts by a few threads: no more than these parts is in memory in floats."""
        shape, stored = self.shape(name), self._names[name]
        with torch.inference_mode(False):  # that mode is this thread's: others may not write to tensors made in it
            tensor = torch.empty(shape, dtype=dtype)
        step = max(1, _AT_ONCE // prod(shape[1:])) if len(shape) > 1 else shape[0]

        def dequantise(start: int) -> None:
            rows = slice(start, start + step) if step < shape[0] else None
            tensor[start : start + step] = torch.from_numpy(self._file.array(stored, rows))

        starts = range(0, shape[0], step)
        if len(starts) == 1:
            dequantise(0)
        else:
            with ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(dequantise, starts))  # raises what a thread raises
        self._file.release()
        return reorder_rows(name, tensor, self._config, to_gguf=False)


def reorder_rows(name: str, tensor: Tensor, config: ModelConfig, to_gguf: bool) -> Tensor:
    """Reorder the rows of q and k within each head: i in the first half <-> 2i, i in the second half <-> 2i + 1."""
    part = name.rsplit(".", 2)[-2]
    if part not in ("q_proj", "k_proj") or config.architecture not in _PERMUTED:
        return tensor
    heads, half = config.heads if part == "q_proj" else config.kv_heads, config.head_dim // 2
    split = (2, half) if to_gguf else (half, 2)
    return tensor.view(heads, *split, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def hf_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `layers.3.self_attn.q_proj.weight`; None for a tensor that the decoder does not use."""
    half, _, rest = name.partition(".")
    if half in ("enc", "dec"):
        return _pair_name("encoder." if half == "enc" else "", rest.split("."))
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    if len(parts) == 5 and parts[0] == "blk" and parts[2] == "nextn" and parts[3] in _NEXTN:
        return f"layers.{parts[1]}.{_NEXTN[parts[3]]}.{parts[4]}"
    return None


def _pair_name(half: str, parts: list[str]) -> str | None:
    """The name of a T5's tensor: `half`, and `blk.3.attn_o.weight` in parts. All layers share the first one's bias."""
    if parts[:-1] == ["output_norm"]:
        return f"{half}norm.{parts[-1]}"
    if parts[:-1] == ["blk", "0", "attn_rel_b"]:
        return f"{half}distance_bias.{parts[-1]}"
    part = (_BLOCK | _OF_PAIRS).get(parts[2]) if len(parts) == 4 else None
    return None if part is None else f"{half}layers.{parts[1]}.{part}.{parts[3]}"


def gguf_name(name: str) -> str:
    """`layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"blk.{layer}.{_GGUF_BLOCK[part]}.{kind}"
    return f"{_GGUF_TOP[stem]}.{kind}"


# ------------------------------------------------------------ tokenizer

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORTENED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")  # llama.cpp's, for files that name none

# The name in `tokenizer.ggml.pre` -> the expressions that split text into words, applied one after another.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_O200K,),
    "default": _DEFAULT,
}
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}  # a word that is a token is not built by merges


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The `tokenizers` tokenizer that a header describes: byte-level BPE (`gpt2`) or SentencePiece-BPE (`llama`)."""
    kind, tokens = metadata.get(_KEY + "model"), metadata.get(_KEY + "tokens")
    if not kind or not tokens:
        raise ModelError("The GGUF file has no tokenizer in it; use a file converted with its vocabulary.")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"The GGUF file's tokenizer is of the kind '{kind}'; Outrider reads 'gpt2' and 'llama'.")
    types: list[int] = metadata.get(_KEY + "token_type") or [_NORMAL] * len(tokens)
    try:
        core = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    except ModelError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exceptions for a vocabulary that does not fit together
        raise ModelError(
            f"The GGUF file's tokenizer is damaged ({first_line(error)}); download the file again."
        ) from error
    # Control tokens are special; user-defined ones are matched in any text before it is split into words.
    typed = list(zip(tokens, types, strict=False))
    special = [token for token, kind in typed if kind in (_UNKNOWN, _CONTROL)]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == _USER_DEFINED])
    return core


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether texts begin with the BOS token; where the header does not say, as llama.cpp decides."""
    value = metadata.get(_KEY + "add_bos_token")
    default = metadata.get(_KEY + "model") == "llama" or _split_name(metadata) in _WHOLE_WORDS
    return default if value is None else bool(value)


def _split_name(metadata: Mapping[str, Any]) -> str:
    """The pre-tokenizer's name; in old files it follows from the architecture."""
    name = metadata.get(_KEY + "pre")
    if name:
        return str(name)
    if str(metadata.get("general.architecture")).startswith("qwen"):
        return "qwen2"
    return "llama-bpe" if len(metadata.get(_KEY + "tokens", ())) == 128_256 else "default"


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    name = _split_name(metadata)
    if name not in _SPLITS:
        raise ModelError(
            f"The GGUF file's tokenizer has the pre-tokenizer '{name}', which is not known; use the model's "
            f"Hugging Face folder instead, or a file with one of {', '.join(sorted(_SPLITS))}."
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.partition(" ")[::2]) for merge in metadata.get(_KEY + "merges") or []]
    core = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS))
    if name == "qwen2":
        core.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[name]]
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece-BPE merges the pair whose union scores best: a BPE whose merges are ranked by score."""
    scores: list[float] = metadata.get(_KEY + "scores") or [-float(i) for i in range(len(tokens))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = next((t for t, kind in zip(tokens, types, strict=False) if kind == _UNKNOWN), None)
    # Every way to make a normal token of two others, best score first.
    ranked = sorted(
        (-scores[i], vocabulary[left], vocabulary[right], left, right)
        for token, i in vocabulary.items()
        if types[i] == _NORMAL
        for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        if left in vocabulary and right in vocabulary
    )
    merges = [(left, right) for *_, left, right in ranked]
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get(_KEY + "add_space_prefix")
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix is None or prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    core.normalizer, core.decoder = normalizers.Sequence(spaces), decoders.Sequence(ends)
    return core
