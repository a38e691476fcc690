"""Heads in GGUF files, as llama.cpp's converter writes them: EAGLE-3, DFlash and DSpark.

Promise: `gguf_head` gives what the same head's folder in the speculators format would hold, which states every
convention; matrices are dequantised. It knows keys and names of these files; `published` checks that the parts fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from ..errors import MISREAD, ModelError
from .config import RopeScaling
from .gguf_file import GGUF, gguf_rope_scaling, hf_name

EAGLE3, DFLASH = "eagle3", "dflash"  # values of `general.architecture`
_NAMES = {
    EAGLE3: {"enc.output_norm.weight": "input_norm.weight", "blk.0.attn_norm_2.weight": "layers.0.hidden_norm.weight"},
    DFLASH: {"enc.output_norm.weight": "hidden_norm.weight"}
    | {f"markov_w{i}.weight": f"markov_head.markov_w{i}.weight" for i in (1, 2)},
}
_UNUSED = re.compile(r"rope_freqs\.weight|conf_proj\..*")
_INTEGERS = {Kind.I32: torch.int32, Kind.I64: torch.int64}


@dataclass(frozen=True)
class GGUFHead:
    """A head's configuration in the words of the speculators format, and its tensors under EAGLE's names."""

    data: dict[str, Any]
    tensors: dict[str, Tensor]
    scaling: RopeScaling | None


def is_gguf_head(path: Path) -> bool:
    """Whether a file holds a head rather than a model."""
    if path.suffix.lower() != ".gguf" or not path.is_file():
        return False
    try:
        return str(GGUF(path).metadata.get("general.architecture")) in _NAMES
    except ModelError:
        return False


def gguf_alone(path: Path) -> Path:
    """The GGUF file of a folder that has one and no configuration; other paths as they are."""
    files = [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else path


def gguf_head(path: Path) -> GGUFHead:
    """The head in a file; one of another kind, or without a key that is needed, is refused in a sentence."""
    file = GGUF(path)
    kind = str(file.metadata.get("general.architecture"))
    if kind not in _NAMES:
        raise ModelError(f"{path} is not a trained head but '{kind}' (a whole model goes with --draft-model).")
    own = {k.removeprefix(f"{kind}."): v for k, v in file.metadata.items() if k.startswith(f"{kind}.")}
    try:
        layer, scaling = _layer(own, file), gguf_rope_scaling(own, file)
        named = {name: stored for stored in file.tensors if (name := _name(stored, kind))}
        tensors = {name: _tensor(file, stored) for name, stored in named.items()}
        if kind == EAGLE3:
            tensors = {name: _in_halves(name, tensor, layer) for name, tensor in tensors.items()}
        data = _facts(kind, own, file.metadata, tensors) | {"transformer_layer_config": layer}
    except (*MISREAD, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ModelError(f"{path} is not as a head of its kind has it ({problem}); get the head again.") from error
    return GGUFHead(data, tensors, scaling)


def _facts(
    kind: str, own: Mapping[str, Any], metadata: Mapping[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """What is not about its layers. Layers of the target are named by their inputs, as in the speculators format."""
    taps = [int(i) for i in own["target_layers" if "target_layers" in own else "extract_layers"]]
    drafted = len(tensors["d2t"]) if "d2t" in tensors else None
    data = {"draft_vocab_size": drafted, "target_hidden_size": own.get("target_hidden_size")}
    if kind == EAGLE3:
        return data | {
            "speculators_model_type": EAGLE3, "eagle_aux_hidden_state_layer_ids": taps,
            "norm_before_residual": bool(own.get("norm_before_residual", False)),
        }  # fmt: skip
    markov = "markov_head.markov_w1.weight" in tensors
    return data | {
        "speculators_model_type": "dspark" if markov else DFLASH, "aux_hidden_state_layer_ids": taps,
        "block_size": int(own["block_size"]), "mask_token_id": metadata.get("tokenizer.ggml.mask_token_id"),
        "sample_from_anchor": own.get("sample_from_anchor"),
    }  # fmt: skip


def _layer(own: Mapping[str, Any], file: GGUF) -> dict[str, Any]:
    """The sizes of its layers, in Hugging Face's words."""
    layers, heads = int(own["block_count"]), int(own["attention.head_count"])
    known = own.get("vocab_size") or len(file.metadata.get("tokenizer.ggml.tokens") or ())
    data: dict[str, Any] = {
        "hidden_size": int(own["embedding_length"]), "intermediate_size": int(own["feed_forward_length"]),
        "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": int(known),
        "num_key_value_heads": int(own.get("attention.head_count_kv") or heads),
        "rms_norm_eps": float(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(own.get("rope.freq_base", 10_000.0)),
        "max_position_embeddings": int(own.get("context_length") or 2048),
    }  # fmt: skip
    if head_dim := own.get("attention.key_length") or own.get("rope.dimension_count"):
        data["head_dim"] = int(head_dim)
    pattern = own.get("attention.sliding_window_pattern")
    if own.get("attention.sliding_window") and isinstance(pattern, list):
        data["sliding_window"] = int(own["attention.sliding_window"])
        data["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern[:layers]]
    return data


def _name(stored: str, kind: str) -> str | None:
    """Under EAGLE's names; None for what is not needed. What is not known keeps its name, and is refused by it."""
    if _UNUSED.fullmatch(stored):
        return None
    return _NAMES[kind].get(stored) or hf_name(stored) or stored


def _tensor(file: GGUF, stored: str) -> Tensor:
    entry = file.tensors[stored]
    integer = _INTEGERS.get(entry.kind)
    if integer is None:
        return torch.from_numpy(file.array(stored))
    values = torch.from_numpy(file.raw(stored).copy()).view(integer).reshape(entry.shape).long()
    return values - torch.arange(len(values)) if stored == "d2t" else values  # target ids here, differences elsewhere


def _in_halves(name: str, tensor: Tensor, layer: Mapping[str, Any]) -> Tensor:
    """q and k as Hugging Face rotates them: each head's halves instead of neighbours."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(part)
    if heads is None:
        return tensor
    each = tensor.reshape(layer[heads], -1, 2, *tensor.shape[1:])  # [heads, d / 2, 2, …]
    return each.transpose(1, 2).reshape(tensor.shape)
