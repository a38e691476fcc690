"""A trained head as a folder: `config.json` in the speculators format, `model.safetensors` with EAGLE-3's names.

Promise: what `read_head` returns is complete and fits together, or it is refused in a sentence; what `write_head` wrote
is read back as the same numbers. `target_hash` tells whose head it is, in whatever format the target's files are.
This file knows names, shapes and files; it does not know what a head computes.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ModelError
from .config import ModelConfig, to_hf

KINDS = {"eagle3": "eagle3", "block": "peagle", "exit": "exit"}  # ours -> speculators'; an exit is only ours
FORMAT = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
_MOST_LAYERS = 16


class Named(Protocol):
    """The target's tensors by name."""

    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head, and whose it is."""

    kind: str  # eagle3, block or exit
    hidden_size: int  # the target's, or less: a narrow head has an embedding of its own
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    taps: tuple[int, ...]  # layers of the target after which its residual stream is read
    layers: int = 1
    block: int = 6  # tokens that it was trained to draft
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    context_length: int = 2048
    target_hash: str = ""  # empty: of no target in particular
    target_name: str = ""
    target_hidden_size: int = 0  # 0: the same as the head's

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))
        object.__setattr__(self, "target_hidden_size", self.target_hidden_size or self.hidden_size)
        if self.kind not in KINDS:
            raise ModelError(f"A head of the kind '{self.kind}' is not known; there are: {', '.join(KINDS)}.")
        sizes = (self.hidden_size, self.intermediate_size, self.heads, self.kv_heads, self.head_dim, self.vocab_size)
        fits = min(*sizes, self.draft_vocab_size, self.block, self.context_length, self.layers) > 0
        fits = fits and self.heads % max(self.kv_heads, 1) == 0 and self.head_dim % 2 == 0
        fits = fits and self.draft_vocab_size <= self.vocab_size and self.layers <= _MOST_LAYERS
        if not fits or (self.kind == "eagle3" and self.layers != 1):
            raise ModelError("The head's configuration does not fit together; make the head again.")
        if self.kind == "exit" and self.narrow:
            raise ModelError("An early exit is as wide as its target.")
        if self.kind == "exit" and len(self.taps) != 1:
            raise ModelError(f"An early exit reads one layer of its target, not {list(self.taps)}.")
        if not self.taps or min(self.taps) < 0 or len(set(self.taps)) < len(self.taps):
            raise ModelError(f"A head reads different layers of its target, counted from 0, not {list(self.taps)}.")

    @property
    def narrow(self) -> bool:
        """Whether it embeds tokens itself, because the target's embedding does not fit."""
        return self.hidden_size != self.target_hidden_size


def shapes(c: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head of this shape has, with its shape."""
    if c.kind == "exit":
        return _exit_shapes(c)
    h = c.hidden_size
    seen = len(c.taps) * c.target_hidden_size
    named: dict[str, tuple[int, ...]] = {"fc.weight": (h, seen), "midlayer.hidden_norm.weight": (h,)}
    if c.narrow:
        named["embed_tokens.weight"] = (c.vocab_size, h)
    for i in range(c.layers):
        named |= {f"{layer_name(i)}.{name}": shape for name, shape in _layer(c, 2 * h if i == 0 else h).items()}
    named |= {"norm.weight": (h,), "lm_head.weight": (c.draft_vocab_size, h)}
    named |= {"d2t": (c.draft_vocab_size,), "t2d": (c.vocab_size,)}
    if c.kind == "block":
        named |= {"mask_embedding": (h,), "mask_hidden": (h,)}
    return named


def _exit_shapes(c: HeadConfig) -> dict[str, tuple[int, ...]]:
    """An adapter's: with the whole vocabulary, the target's own head speaks."""
    h, wide = c.hidden_size, c.intermediate_size
    named: dict[str, tuple[int, ...]] = {}
    for i in range(c.layers):
        at = block_name(i)
        named |= {f"{at}.norm.weight": (h,), f"{at}.mlp.down_proj.weight": (h, wide)}
        named |= {f"{at}.mlp.{name}_proj.weight": (wide, h) for name in ("gate", "up")}
    if c.draft_vocab_size < c.vocab_size:
        named |= {"norm.weight": (h,), "lm_head.weight": (c.draft_vocab_size, h)}
        named |= {"d2t": (c.draft_vocab_size,), "t2d": (c.vocab_size,)}
    return named


def block_name(i: int) -> str:
    """A block of an adapter."""
    return f"blocks.{i}"


FIRST, SPECULATORS_FIRST = "midlayer.", "layers.0."  # EAGLE's own name for the first layer, and speculators'


def _as_eagle(name: str) -> str:
    return FIRST + name.removeprefix(SPECULATORS_FIRST) if name.startswith(SPECULATORS_FIRST) else name


def layer_name(i: int) -> str:
    """The first layer is EAGLE-3's, with two inputs; the others are ordinary ones."""
    return "midlayer" if i == 0 else f"layers.{i}"


def _layer(c: HeadConfig, inputs: int) -> dict[str, tuple[int, ...]]:
    h, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    return {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, inputs),
        "self_attn.k_proj.weight": (kv, inputs),
        "self_attn.v_proj.weight": (kv, inputs),
        "self_attn.o_proj.weight": (h, q),
        "mlp.gate_proj.weight": (c.intermediate_size, h),
        "mlp.up_proj.weight": (c.intermediate_size, h),
        "mlp.down_proj.weight": (h, c.intermediate_size),
    }


def check_head(config: HeadConfig, tensors: dict[str, Tensor], where: str) -> None:
    """A missing tensor, one of another shape, or a vocabulary that leads nowhere is found here."""
    for name, shape in shapes(config).items():
        if name not in tensors:
            raise ModelError(f"{where} has no tensor '{name}', which its configuration asks for; make the head again.")
        if tuple(tensors[name].shape) != shape:
            raise ModelError(
                f"In {where} the tensor '{name}' has the shape {list(tensors[name].shape)} where its configuration "
                f"asks for {list(shape)}; make the head again."
            )
    if "d2t" not in shapes(config):
        return
    ids = target_ids(tensors["d2t"])
    if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size or ids.unique().numel() < ids.numel():
        raise ModelError(f"The draft vocabulary of {where} (d2t) names ids outside the target's, or one twice.")


def target_ids(d2t: Tensor) -> Tensor:
    """The target's id of each draft id, [D] int64, from their differences [D]."""
    return torch.arange(d2t.shape[0], device=d2t.device) + d2t.long()


# ------------------------------------------------------------ the folder


def write_head(folder: str | Path, config: HeadConfig, tensors: dict[str, Tensor], card: str = "") -> None:
    """Weights first, then the configuration: a folder that has one is complete."""
    folder = Path(folder)
    check_head(config, tensors, "The head")
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensors[name].detach().cpu().contiguous() for name in shapes(config)}
    if "d2t" in kept:
        kept |= {"d2t": kept["d2t"].long(), "t2d": kept["t2d"].bool()}
    save_file(kept, str(folder / f"{WEIGHTS}.new"), metadata={"format": "pt"})
    (folder / f"{WEIGHTS}.new").chmod(0o644)  # safetensors writes for the owner alone, and heads are passed on
    os.replace(folder / f"{WEIGHTS}.new", folder / WEIGHTS)
    if card:
        (folder / CARD).write_text(card, encoding="utf-8")
    (folder / f"{CONFIG}.new").write_text(json.dumps(_to_json(config), indent=2) + "\n", encoding="utf-8")
    os.replace(folder / f"{CONFIG}.new", folder / CONFIG)


def read_head(folder: str | Path) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head's shape and its tensors, as they are in the file."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ModelError(f"There is no folder {folder}; a head is a folder that `outrider train` has written.")
    config = read_config(folder)
    try:
        tensors = load_file(str(folder / WEIGHTS))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{folder / WEIGHTS} is missing or damaged ({error}); make the head again.") from error
    tensors = {_as_eagle(name): tensor for name, tensor in tensors.items()}
    check_head(config, tensors, str(folder))
    return config, {name: tensors[name] for name in shapes(config)}


def read_config(folder: Path) -> HeadConfig:
    """A head's shape, and whose it is, without its weights."""
    path = folder / CONFIG
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} is not a trained head: its {CONFIG} cannot be read ({error}).") from error
    ours = data.get("outrider") if isinstance(data, dict) else None
    if not isinstance(ours, dict) or "kind" not in ours:
        raise ModelError(
            f"{folder} is not a trained head: its {CONFIG} does not say so (a whole model goes with --draft-model)."
        )
    if ours.get("format") != FORMAT:
        raise ModelError(
            f"The head {folder} has the format {ours.get('format')!r}, and this version of Outrider reads format "
            f"{FORMAT}; update Outrider, or make the head again."
        )
    try:
        return _from_json(data, ours)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ModelError(f"{path} is not as it should be ({type(error).__name__}: {error}).") from error


def _from_json(data: dict[str, Any], ours: dict[str, Any]) -> HeadConfig:
    layer, verifier = data["transformer_layer_config"], data["speculators_config"]["verifier"]
    if data.get("norm_before_residual"):
        raise ModelError("The head's residual is taken after its norm (norm_before_residual), which is not supported.")
    return HeadConfig(
        kind=str(ours["kind"]),
        hidden_size=int(layer["hidden_size"]),
        intermediate_size=int(layer["intermediate_size"]),
        heads=int(layer["num_attention_heads"]),
        kv_heads=int(layer["num_key_value_heads"]),
        head_dim=int(layer["head_dim"]),
        vocab_size=int(layer["vocab_size"]),
        draft_vocab_size=int(data["draft_vocab_size"]),
        taps=tuple(int(i) - 1 for i in data["eagle_aux_hidden_state_layer_ids"]),
        layers=int(layer["num_hidden_layers"]),
        block=int(ours["block"]),
        norm_eps=float(layer["rms_norm_eps"]),
        rope_theta=float(layer["rope_theta"]),
        context_length=int(layer["max_position_embeddings"]),
        target_hash=str(ours.get("target_hash") or ""),
        target_name=str(verifier.get("name_or_path") or ""),
        target_hidden_size=int(data.get("target_hidden_size") or 0),
    )


def _to_json(c: HeadConfig) -> dict[str, Any]:
    layer = {"model_type": "llama"} | to_hf(c)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": c.block,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": KINDS[c.kind],
        "speculators_version": "0.7.0",
        "draft_vocab_size": c.draft_vocab_size,
        "norm_before_residual": False,
        "target_hidden_size": c.target_hidden_size if c.narrow else None,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in c.taps],  # a layer's input is the one before's output
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": KINDS[c.kind],
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": c.target_name, "architectures": ["LlamaForCausalLM"]},
        },
        "outrider": {"kind": c.kind, "block": c.block, "target_hash": c.target_hash, "format": FORMAT},
    }


# ------------------------------------------------------------ whose head it is


def target_hash(config: ModelConfig, weights: Named) -> str:
    """16 hex digits of a target: its shape and its norms, which every file format and quantisation leaves as they are.

    So a head for a model goes with its GGUF files too. Norms that say nothing (all ones, as in an untrained model) are
    helped out by a layer's first projections, to three digits.
    """
    c, middle = config, config.layers // 2
    facts = (c.hidden_size, c.layers, c.heads, c.kv_heads, c.head_dim, c.intermediate_size, c.vocab_size)
    digest = hashlib.sha256(repr(facts).encode())
    names = ["norm.weight", *(f"layers.{i}.input_layernorm.weight" for i in range(c.layers))]
    norms = torch.cat([weights.get(name, torch.float32).flatten() for name in names])  # [(layers + 1) H]
    digest.update(norms.bfloat16().view(torch.int16).cpu().numpy().tobytes())
    if bool((norms == norms[0]).all()):
        rows = weights.get(f"layers.{middle}.self_attn.q_proj.weight", torch.float32)[:4].flatten()  # [4 H]
        digest.update(",".join(f"{value:.2e}" for value in rows.tolist()).encode())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------ untrained


def random_head(
    config: ModelConfig, kind: str = "eagle3", seed: int = 1, layers: int = 1, vocabulary: int = 0, hash: str = ""
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """An untrained head for a target of this shape, its vocabulary spread evenly over the target's."""
    vocabulary, half = vocabulary or min(config.vocab_size * 3 // 4, 4096), config.layers // 2
    shape = HeadConfig(
        kind=kind,
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=vocabulary,
        taps=(max(half, 1) - 1,) if kind == "exit" else tuple(sorted({0, half, config.layers - 1})),
        layers=layers,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        context_length=config.context_length,
        target_hash=hash,
    )
    ids = torch.arange(vocabulary) * config.vocab_size // vocabulary  # [D]
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[ids] = True
    tensors: dict[str, Tensor] = {"d2t": ids - torch.arange(vocabulary), "t2d": known}
    tensors = {name: tensor for name, tensor in tensors.items() if name in shapes(shape)}
    generator = torch.Generator().manual_seed(seed)
    for name, size in shapes(shape).items():
        if name not in tensors:
            noise = torch.randn(size, generator=generator)
            tensors[name] = noise * 1.5 / size[1] ** 0.5 if len(size) > 1 else 1 + 0.1 * noise
    return shape, tensors
