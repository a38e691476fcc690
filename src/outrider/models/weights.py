"""Weights by name: read from safetensors, checked, reduced to some layers, written as a Hugging Face folder.

Promise: a `Weights` gives a tensor under its Hugging Face name without the leading `model.`, whatever file it comes
from; files are memory-mapped, and a pickle is never opened here. `check` raises a ModelError for what does not fit the
configuration. `write_folder` makes a folder from which `open_checkpoint`, transformers and other engines read the same
function. It knows names, shapes and files; it does not know what a layer computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ModelError
from .config import ModelConfig, hf_config
from .paths import write_json

SHARD_BYTES = 4 << 30
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_ATTENTION_OUT, _MLP_OUT = "self_attn.o_proj", "mlp.down_proj"


class Source(Protocol):
    """Tensors by name."""

    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def has(self, name: str) -> bool: ...


class Weights(Source, Protocol):
    """A lazy mapping from names such as `layers.3.mlp.gate_proj.weight` to tensors."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def has(self, name: str) -> bool:
        return name in self.names()


def stored_name(name: str) -> str:
    """The name of a tensor in a Hugging Face file."""
    return name if name.startswith("lm_head") else f"model.{name}"


def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this shape has, with its shape."""
    wide = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, wide)}
    if not config.stream_norm:
        shapes |= _norm("norm", config)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, wide)
    if config.head_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    if config.positions:
        shapes["embed_positions.weight"] = (config.context_length, wide)
    if config.embedding_norm:
        shapes |= _norm("embed_norm", config)
    if config.distance_buckets:
        shapes["distance_bias.weight"] = (config.distance_buckets, config.heads)
    for i in range(config.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer(config, i).items()}
    if config.encoder is not None:
        shapes |= {f"encoder.{name}": shape for name, shape in expected(config.encoder).items()}
    return shapes


def _norm(name: str, c: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{end}": (c.hidden_size,) for end in (("weight", "bias") if c.layer_norm else ("weight",))}


def _attention(name: str, c: ModelConfig) -> dict[str, tuple[int, ...]]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{n}.weight": (r, c.hidden_size) for n, r in rows.items()}
    shapes |= {f"{name}.{n}.bias": (r,) for n, r in rows.items() if c.qkv_bias}
    shapes[f"{name}.o_proj.weight"] = (c.hidden_size, q)
    if c.o_bias:
        shapes[f"{name}.o_proj.bias"] = (c.hidden_size,)
    return shapes


def _layer(c: ModelConfig, i: int) -> dict[str, tuple[int, ...]]:
    shapes = _attention("self_attn", c)
    if c.encoder is not None:
        shapes |= _attention("cross_attn", c) | _norm("cross_attention_layernorm", c)
    if c.qk_norm:
        wide = (c.heads * c.head_dim, c.kv_heads * c.head_dim) if c.whole_qk_norm else (c.head_dim, c.head_dim)
        shapes |= {f"self_attn.{n}_norm.weight": (size,) for n, size in zip("qk", wide, strict=True)}
    if c.sinks:
        shapes["self_attn.sinks.weight"] = (c.heads,)
    norms = ["input_layernorm", "post_attention_layernorm"] if c.pre_norm else []
    norms += ["attention_post_norm", "mlp_post_norm"] if c.post_norm else []
    for name in norms:
        shapes |= _norm(name, c)
    if c.has_experts(i):
        each = (c.experts, c.expert_size, c.hidden_size)
        shapes |= {f"mlp.experts.{n}.weight": each for n in ("gate_proj", "up_proj")}
        shapes["mlp.experts.down_proj.weight"] = (c.experts, c.hidden_size, c.expert_size)
        if c.expert_bias:
            shapes |= {f"mlp.experts.{n}.bias": each[:2] for n in ("gate_proj", "up_proj")}
            shapes |= {"mlp.experts.down_proj.bias": (c.experts, c.hidden_size), "mlp.router.bias": (c.experts,)}
        if c.corrected_router:
            shapes["mlp.correction.bias"] = (c.experts,)
        if c.shared_size:
            shapes |= {
                f"mlp.shared_experts.{n}.weight": (c.shared_size, c.hidden_size) for n in ("gate_proj", "up_proj")
            }
            shapes["mlp.shared_experts.down_proj.weight"] = (c.hidden_size, c.shared_size)
        return shapes | {"mlp.router.weight": (c.experts, c.hidden_size)}
    names = ("gate_proj", "up_proj") if c.gated else ("up_proj",)
    shapes |= {f"mlp.{n}.weight": (c.intermediate_size, c.hidden_size) for n in names}
    shapes["mlp.down_proj.weight"] = (c.hidden_size, c.intermediate_size)
    if c.mlp_bias:
        shapes |= {f"mlp.{n}.bias": (c.intermediate_size,) for n in names}
        shapes["mlp.down_proj.bias"] = (c.hidden_size,)
    return shapes


def check(weights: Weights, config: ModelConfig, path: Path) -> None:
    """Raise a ModelError for a missing tensor or one of another shape."""
    shapes = expected(config)
    missing = sorted(shapes.keys() - weights.names())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        packed = any(name.endswith((".qweight", ".weight_packed")) for name in weights.names())
        why = "; its weights are quantised, but config.json has no quantization_config" if packed else ""
        raise ModelError(
            f"{path} has no tensor '{missing[0]}'{more}, which its configuration asks for{why}; download the model "
            "again."
        )
    for name, shape in shapes.items():
        if weights.shape(name) != shape:
            raise ModelError(
                f"In {path} the tensor '{name}' has the shape {list(weights.shape(name))} where the configuration "
                f"asks for {list(shape)}; the files belong to different models, download them again."
            )


class Safetensors(Weights):
    """One or many safetensors files, memory-mapped as long as this object lives."""

    def __init__(self, files: list[Path]) -> None:
        self._entries: dict[str, tuple[Any, str]] = {}  # name -> (open file, the name in that file)
        for path in files:
            handle = _open(path)
            self._entries |= {name.removeprefix("model."): (handle, name) for name in handle.keys()}  # noqa: SIM118

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def has(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        handle, stored = self._entries[name]
        return tuple(handle.get_slice(stored).get_shape())

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.raw(name).to(dtype)

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        handle, stored = self._entries[name]
        tensor: Tensor = handle.get_tensor(stored)
        return tensor


class InMemory(Weights):
    """Loaded tensors: a transformers module's state, or the content of a pickle."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.tensors[name].detach().to("cpu", dtype)


# ------------------------------------------------------------ families that name or store their weights otherwise

_GEMMA = {
    "post_attention_layernorm": "attention_post_norm", "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_post_norm",
}  # fmt: skip
_RENAMED = {  # Hugging Face's part of a layer -> Outrider's: Llama's names, and two for the norms of what is added
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "olmo2": {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"},
    "mixtral": {"block_sparse_moe.gate": "mlp.router", "mlp.gate": "mlp.router"},
    "qwen3_moe": {"mlp.gate": "mlp.router"},
    "glm4_moe": {"mlp.gate": "mlp.router"},
    "gpt_oss": {"self_attn": "self_attn.sinks"},  # its name has no ending
    "glm4": {"post_self_attn_layernorm": "attention_post_norm", "post_mlp_layernorm": "mlp_post_norm"},
}
_IN_GGUF = {  # llama.cpp names it after its place
    family: {"attention_post_norm": "post_attention_layernorm"} for family in ("gpt_oss", "glm4_moe")
}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_FUSED_QKV, _FUSED_MLP = ("phi3",), ("phi3", "glm4")
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.")


class FamilyWeights(Weights):
    """A family's tensors under Outrider's names: renamed, cut out of joined ones, q and k in Llama's order of rows.

    source: its own names, of a Hugging Face file without the leading `model.`, or of a GGUF file as `gguf_file` names
    them (`in_gguf`), whose norms have Gemma's one added already.
    """

    def __init__(self, source: Any, config: ModelConfig, in_gguf: bool = False) -> None:
        self.source, self.config, self.in_gguf = source, config, in_gguf
        stored = {_without_prefix(name): name for name in source.names()}
        renamed = _IN_GGUF.get(config.architecture, {}) if in_gguf else _RENAMED.get(config.architecture, {})
        stored = {_with_ending(_renamed(name, renamed)): own for name, own in stored.items()}
        self._stored: dict[str, tuple[str, slice]] = {}
        self._stacked: dict[str, list[str]] = {}  # of experts that have a tensor each
        for name in expected(config):
            if ".mlp.experts." in name and self._find_experts(name, stored):
                continue
            named, rows = self._cut(name)
            if named in stored:
                self._stored[name] = (stored[named], rows)

    @property
    def quantised(self) -> bool:
        return bool(getattr(self.source, "quantised", False))

    @property
    def stored_in(self) -> str:
        return str(getattr(self.source, "stored_in", ""))

    def _find_experts(self, name: str, stored: dict[str, str]) -> bool:
        """Where a stack of experts [E, ...] is: a tensor for each expert, or gates and ups side by side."""
        c, (layer, part, end) = self.config, _split(name)
        kind = part.rpartition(".")[2]
        forms = (f"mlp.experts.{{}}.{kind}", f"block_sparse_moe.experts.{{}}.{_MIXTRAL[kind]}")
        for form in forms:
            each = [f"{layer}{form.format(i)}{end}" for i in range(c.experts)]
            if all(one in stored for one in each):
                self._stacked[name] = [stored[one] for one in each]
                return True
        joined = "gate_up_proj" if kind != "down_proj" else "down_proj"
        if f"{layer}mlp.experts.{joined}" not in stored:
            return False
        cut = {"gate_proj": slice(0, c.expert_size), "up_proj": slice(c.expert_size, 2 * c.expert_size)}
        self._stored[name] = (stored[f"{layer}mlp.experts.{joined}"], cut.get(kind, slice(None)))
        return True

    def names(self) -> frozenset[str]:
        return frozenset(self._stored) | frozenset(self._stacked)

    def has(self, name: str) -> bool:
        return name in self._stored or name in self._stacked

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._stacked:
            return len(self._stacked[name]), *self.source.shape(self._stacked[name][0])
        stored, rows = self._stored[name]
        if ".mlp.experts." in name:
            count, first, *rest = self.source.shape(stored)
            return count, len(range(*rows.indices(first))), *rest
        first, *rest = self.source.shape(stored)
        return len(range(*rows.indices(first))), *rest

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        if name in self._stacked:
            return torch.stack([self.source.get(one, dtype) for one in self._stacked[name]])
        stored, _ = self._stored[name]
        gain = self.config.architecture.startswith("gemma") and name.endswith("norm.weight") and not self.in_gguf
        tensor = self._rows(name, self.source.get(stored, torch.float32 if gain else dtype))
        return (tensor + 1.0).to(dtype) if gain else tensor  # Gemma's files have it minus one

    def kind(self, name: str) -> str:
        """As `GGUFWeights.kind`, of a GGUF file."""
        return str(self.source.kind(self._stored[name][0]))

    def blocks(self, name: str) -> Tensor:
        """As `GGUFWeights.blocks`, of a GGUF file."""
        return self._rows(name, self.source.blocks(self._stored[name][0]))

    def mapped(self, name: str) -> Any:
        """As `GGUFWeights.mapped`, of a GGUF file."""
        stored, rows = self._stored[name]
        return self.source.mapped(stored)[rows]

    def block_rows(self, name: str, ids: Tensor) -> Tensor:
        """As `GGUFWeights.block_rows`, of a GGUF file."""
        rows: Tensor = self.source.block_rows(self._stored[name][0], ids)
        return rows

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """As `GGUFWeights.rows`, of a GGUF file."""
        rows: Tensor = self.source.rows(self._stored[name][0], ids)
        return rows

    def grouped(self, name: str) -> Any:
        """As `QuantisedWeights.grouped`, of a quantised checkpoint."""
        if name not in self._stored or not hasattr(self.source, "grouped"):
            return None
        weight = self.source.grouped(self._stored[name][0])
        return None if weight is None else weight.rows(lambda tensor: self._rows(name, tensor))

    def _rows(self, name: str, stored: Tensor) -> Tensor:
        """A tensor's rows, in Llama's order, from the tensor that holds them."""
        rows = self._stored[name][1]
        if ".mlp.experts." in name:
            return stored[:, rows]
        if self.config.architecture == "glm4" and _split(name)[1] in ("self_attn.q_proj", "self_attn.k_proj"):
            return halves(stored[rows], self.config.head_dim, self.config.rotary_dim)
        return stored[rows]

    def _cut(self, name: str) -> tuple[str, slice]:
        """The name of the tensor that holds this one, and its rows there."""
        c, (layer, part, end) = self.config, _split(name)
        q, kv, wide = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.intermediate_size
        if (
            c.architecture in _FUSED_QKV
            and part.startswith("self_attn.")
            and part[10:] in ("q_proj", "k_proj", "v_proj")
        ):
            bounds = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}[part[10:]]
            return f"{layer}self_attn.qkv_proj{end}", slice(*bounds)
        if c.architecture in _FUSED_MLP and part in ("mlp.gate_proj", "mlp.up_proj"):
            joined = "mlp.up_proj" if self.in_gguf else "mlp.gate_up_proj"
            return f"{layer}{joined}{end}", slice(0, wide) if part == "mlp.gate_proj" else slice(wide, 2 * wide)
        return name, slice(None)


def adapted(source: Any, config: ModelConfig, in_gguf: bool = False) -> Any:
    """The weights under Outrider's names, which most families have already."""
    own = config.architecture in ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")
    if config.architecture == "gpt_oss" and not in_gguf:
        return GptOssWeights(source, config)
    return source if own else FamilyWeights(source, config, in_gguf)


class GptOssWeights(FamilyWeights):
    """gpt-oss in Hugging Face's form: gates and ups of all experts alternate, in four bits (MXFP4) or as floats."""

    def _find_experts(self, name: str, stored: dict[str, str]) -> bool:
        layer, part, end = _split(name)
        stem = f"{layer}mlp.experts.{'down_proj' if 'down' in part else 'gate_up_proj'}"
        stem = f"{stem}_bias" if end == ".bias" else f"{stem}_blocks" if f"{stem}_blocks" in stored else stem
        if stem in stored:
            self._stored[name] = (stored[stem], slice(None))
        return True

    def shape(self, name: str) -> tuple[int, ...]:
        if ".mlp.experts." not in name:
            return super().shape(name)
        stored, _ = self._stored[name]
        first, *rest = self.source.shape(stored)
        if stored.endswith("_blocks"):  # [E, N, K / 32, 16] bytes
            rest = [rest[0], 32 * rest[1]]
        elif name.endswith(".weight"):
            rest = rest[::-1]
        return first, rest[0] if ".down_proj" in name else rest[0] // 2, *rest[1:]

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        if ".mlp.experts." not in name:
            return super().get(name, dtype)
        stored, _ = self._stored[name]
        if stored.endswith("_blocks"):
            scales = self.source.get(stored.removesuffix("blocks") + "scales", torch.uint8)
            both = mxfp4(self.source.get(stored, torch.uint8), scales, dtype)
        else:
            both = self.source.get(stored, dtype)
            both = both.transpose(1, 2).contiguous() if name.endswith(".weight") else both
        return both if ".down_proj" in name else both[:, ".up_proj" in name :: 2].contiguous()


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Four-bit floats [..., K / 32, 16] bytes with an exponent for each 32 [..., K / 32] -> [..., K].

    The low half of a byte is the first of two neighbours.
    """
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32)
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [..., K / 32, 32]
    values = torch.ldexp(table[pairs.long()], scales[..., None].int() - 127)
    return values.flatten(-2).to(dtype)


def halves(rows: Tensor, head_dim: int, rotary: int) -> Tensor:
    """Rows [heads * d, ...] whose neighbours are rotated together -> rows whose halves are, within each head."""
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    turned = heads[:, :rotary].unflatten(1, (rotary // 2, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, heads[:, rotary:]], 1).reshape(rows.shape)


def _without_prefix(name: str) -> str:
    """The text half of a model that also reads pictures has its own prefix."""
    return next((name.removeprefix(prefix) for prefix in _TEXT_PREFIXES if name.startswith(prefix)), name)


def _with_ending(name: str) -> str:
    """Two vectors have names of their own in Hugging Face's files, where others end in `weight` or `bias`."""
    name = name.replace("sinks.sinks", "sinks.weight")
    return name.replace("mlp.router.e_score_correction_bias", "mlp.correction.bias")


def _renamed(name: str, names: dict[str, str]) -> str:
    layer, part, end = _split(name)
    return f"{layer}{names.get(part, part)}{end}"


def _split(name: str) -> tuple[str, str, str]:
    """`layers.3.self_attn.q_proj.weight` -> ("layers.3.", "self_attn.q_proj", ".weight")."""
    stem, dot, end = name.rpartition(".")
    if not name.startswith("layers."):
        return "", stem, dot + end
    _, number, *parts = stem.split(".", 2)
    if not parts:  # a joined tensor without an ending
        return f"layers.{number}.", end, ""
    return f"layers.{number}.", parts[0], dot + end


def _open(path: Path) -> Any:
    """safetensors checks the header and that the file is exactly as long as the header says."""
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; download the model again.") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{path} is incomplete or damaged and cannot be read ({error}); delete it and download it again."
        ) from error


def find_safetensors(folder: Path) -> list[Path]:
    """The files of a folder in Hugging Face layout: by its index, or the single file, or all there are."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return _indexed(index)
    if single.is_file():
        return [single]
    # Some folders also hold Mistral's own format, with other names for the same tensors.
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter")))
    if files:
        return files
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise ModelError(
            f"{folder} has weights only as pickle files (.bin or .pt), which can run code and are never loaded; "
            "convert them to safetensors, for example with transformers' save_pretrained."
        )
    raise ModelError(f"{folder} has no .safetensors file; download the model's weights into it.")


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read ({error}); delete it and download it again.") from error
    for name in names:
        if Path(name).name != name:  # no path out of the folder
            raise ModelError(f"{index} names '{name}', which is not a file of its own folder; download it again.")
    return [index.parent / name for name in names]


def cut_config(config: ModelConfig, chosen: list[int]) -> ModelConfig:
    """The configuration of a model that has only these layers."""
    pairs = list(enumerate(chosen))
    windows = frozenset(new for new, old in pairs if old in config.window_layers)
    return replace(
        config,
        layers=len(chosen),
        no_rope_layers=frozenset(new for new, old in pairs if old in config.no_rope_layers),
        dense_layers=frozenset(new for new, old in pairs if old in config.dense_layers),
        window_layers=windows,
        sliding_window=config.sliding_window if windows else 0,
    )


class LayerSubset:
    """The weights of some layers under a smaller model's names; a skipped block of a remaining layer becomes zeros.

    A layer adds the outputs of its attention and of its MLP to the residual stream, and each ends in one product. With
    that product's weight and bias at zero, the block adds nothing, as if it were skipped.
    """

    def __init__(
        self, source: Source, layers: list[int], no_attention: Iterable[int] = (), no_mlp: Iterable[int] = ()
    ) -> None:
        self.source, self.layers = source, layers
        self._zeroed = {_ATTENTION_OUT: frozenset(no_attention), _MLP_OUT: frozenset(no_mlp)}

    def origin(self, name: str) -> str:
        """The name in the whole model of a tensor of the smaller one."""
        if not name.startswith("layers."):
            return name
        _, layer, rest = name.split(".", 2)
        return f"layers.{self.layers[int(layer)]}.{rest}"

    def zeroed(self, name: str) -> bool:
        """Whether a tensor is all zeros because its block is skipped."""
        if not name.startswith("layers."):
            return False
        _, layer, rest = name.split(".", 2)
        return self.layers[int(layer)] in self._zeroed.get(rest.rpartition(".")[0], ())

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self.source.get(self.origin(name), dtype).clone()  # never the target's own memory
        return torch.zeros_like(tensor) if self.zeroed(name) else tensor

    def has(self, name: str) -> bool:
        return self.source.has(self.origin(name))


def kept_layers(
    config: ModelConfig, source: Source, skip_attention: Iterable[int], skip_mlp: Iterable[int]
) -> tuple[ModelConfig, LayerSubset]:
    """The model without these blocks; a layer that loses both blocks is dropped."""
    attention, mlp = frozenset(skip_attention), frozenset(skip_mlp)
    for number in attention | mlp:
        if not 0 <= number < config.layers:
            raise ModelError(f"Layer {number} cannot be skipped: the target's layers are 0 to {config.layers - 1}.")
    layers = [i for i in range(config.layers) if i not in attention & mlp]
    if not layers:
        raise ModelError("A model without any layer cannot be written; skip fewer of them.")
    return cut_config(config, layers), LayerSubset(source, layers, attention, mlp)


# ------------------------------------------------------------ a folder


def write_folder(
    folder: Path, config: ModelConfig, source: Source, tokenizer: Any, dtype: torch.dtype, card: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Write weights and tokenizer, then config.json: a folder that has one is complete."""
    settings = hf_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}  # raises before the long copy
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, config, source, dtype, shard_bytes)
    tokenizer.save(folder)
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")
    generation = {"bos_token_id": config.bos_id, "eos_token_id": sorted(config.eos_ids)}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", settings)


def _write_weights(folder: Path, config: ModelConfig, source: Source, dtype: torch.dtype, most: int) -> None:
    """Write one file, or several and an index; at most one of them is in memory."""
    shards = _shards(config, dtype.itemsize, most)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {stored_name(name): source.get(name, dtype).cpu().contiguous() for name in names}
        save_tensors(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """As a safetensors file that others may read; the library makes files for their owner alone."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _shards(config: ModelConfig, item_bytes: int, most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in expected(config).items():
        tensor_bytes = item_bytes * torch.Size(shape).numel()
        if shards[-1] and size + tensor_bytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor_bytes
    return shards
