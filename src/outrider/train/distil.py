"""A standalone small model: a few layers of the target, taught to say what the whole of it says.

Promise: what is written is a folder in Hugging Face layout with the target's own tokenizer, which every engine can use
as a plain draft model. It knows layers and files; steps are the loop's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ModelError
from ..models.config import ModelConfig, to_hf
from ..models.rope import RopeScaling
from ..models.transformer import WeightSource
from .batches import Batch
from .features import TargetNet
from .objectives import Student, diagonal, spread
from .teacher import Teacher, divergence, listen, repeat

if TYPE_CHECKING:
    from ..models.tokenizer import Tokenizer


class Distilled(Student):
    """A small model under the target's eye. Its logits at p+1 speak about t_{p+2}, as a head's row p does."""

    net: TargetNet

    def __init__(self, net: TargetNet, target: TargetNet, k: int, soft: bool = True) -> None:
        self.net, self.target, self.k, self.soft = net, target, k, soft

    def importance(self, position: int) -> float:
        return 1.0

    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        with torch.no_grad():
            teacher = self._teacher(batch)
        found = divergence(teacher, self._logits(self.net, batch))
        return [(found, torch.ones_like(found))]

    def _teacher(self, batch: Batch) -> Teacher:
        return listen(self._logits(self.target, batch)) if self.soft else repeat(_said(batch))

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        right = spread(self._logits(self.net, batch).argmax(-1) == _said(batch), batch)
        return diagonal([right] * self.k, batch)

    def _logits(self, net: TargetNet, batch: Batch) -> Tensor:
        """[M, V]"""
        return net.logits(net(batch.tokens)[1][:, 1:].flatten(0, 1)[batch.rows])


def _said(batch: Batch) -> Tensor:
    """[M] t_{p+2}"""
    return batch.tokens[:, 1:].roll(-1, 1).flatten()[batch.rows]


def cut_from(
    config: ModelConfig, weights: WeightSource, layers: int, train_embedding: bool, device: torch.device | str
) -> TargetNet:
    """`layers` of the target's layers, evenly chosen, first and last among them; float32, to be trained.

    The embedding, and a head of its own, stay as they are unless `train_embedding`: they are most of a small model.
    """
    if not 1 <= layers <= config.layers:
        raise ModelError(f"--layers is {layers}, but the target has {config.layers}.")
    chosen = chosen_layers(config.layers, layers)
    small = cut_config(config, chosen)
    net = TargetNet.load(small, _Cut(weights, chosen), torch.float32, device).requires_grad_(True)
    net.embed_tokens.requires_grad_(train_embedding)
    if net.lm_head is not None:
        net.lm_head.requires_grad_(train_embedding)
    return net


def chosen_layers(whole: int, layers: int) -> list[int]:
    """The last one alone, or evenly from the first to the last."""
    return [round(i * (whole - 1) / (layers - 1)) for i in range(layers)] if layers > 1 else [whole - 1]


def cut_config(config: ModelConfig, chosen: list[int]) -> ModelConfig:
    places = list(enumerate(chosen))
    windows = frozenset(new for new, old in places if old in config.window_layers)
    return replace(
        config,
        layers=len(chosen),
        no_rope_layers=frozenset(new for new, old in places if old in config.no_rope_layers),
        window_layers=windows,
        sliding_window=config.sliding_window if windows else 0,
    )


class _Cut:
    """The target's weights under the small model's names."""

    def __init__(self, weights: WeightSource, chosen: list[int]) -> None:
        self.weights, self.chosen = weights, chosen

    def _name(self, name: str) -> str:
        if not name.startswith("layers."):
            return name
        _, layer, rest = name.split(".", 2)
        return f"layers.{self.chosen[int(layer)]}.{rest}"

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.weights.get(self._name(name), dtype).clone()  # never the target's own memory

    def has(self, name: str) -> bool:
        return self.weights.has(self._name(name))


# ---------------------------------------------------------------- the folder


def write_model(folder: Path, net: TargetNet, tokenizer: Tokenizer, card: str, dtype: torch.dtype) -> None:
    """config.json last: a folder that has one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": value.detach().to("cpu", dtype).contiguous()
        for name, value in net.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    settings = hf_config(net.config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def hf_config(c: ModelConfig) -> dict[str, Any]:
    """What `models.config.from_hf` reads back as the same configuration."""
    names = {"smollm3": "SmolLM3", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "llama": "Llama"}
    found: dict[str, Any] = {
        "architectures": [f"{names[c.architecture]}ForCausalLM"],
        "model_type": c.architecture,
        "tie_word_embeddings": c.tied,
        "attention_bias": c.o_bias,
        "bos_token_id": c.bos_id,
        "eos_token_id": sorted(c.eos_ids),
    } | to_hf(c)
    if c.rotary_dim != c.head_dim:
        found["partial_rotary_factor"] = c.rotary_dim / c.head_dim
    if c.no_rope_layers:
        found["no_rope_layers"] = [int(i not in c.no_rope_layers) for i in range(c.layers)]
    if c.window_layers:
        kinds = ["sliding_attention" if i in c.window_layers else "full_attention" for i in range(c.layers)]
        found |= {"sliding_window": c.sliding_window, "use_sliding_window": True, "layer_types": kinds}
    if c.rope_scaling is not None:
        found["rope_scaling"] = _scaling(c.rope_scaling)
    return found


def _scaling(s: RopeScaling) -> dict[str, Any]:
    if s.kind == "factors":
        raise ModelError(
            "The target's rope is stretched by a table that only GGUF files have, so no Hugging Face folder can be "
            "made from it; give the target in Hugging Face layout, or train --kind eagle3."
        )
    common = {"rope_type": s.kind, "factor": s.factor}
    if s.kind == "linear":
        return common
    common |= {"original_max_position_embeddings": s.original_context}
    if s.kind == "llama3":
        return common | {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    own = {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
    return common | own | {"attention_factor": s.attention_factor}
