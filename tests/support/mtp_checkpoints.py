"""Tiny checkpoints with a layer for further tokens, written as published, and transformers' own classes as reference.

`reference.draft` computes every row of the text again for each token, without any cache.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from outrider.models.checkpoint import open_checkpoint

from support import tiny
from support.gguf_files import add_vocabulary, finish

SIZES = {
    "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GLM = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 8, "use_qk_norm": True,
    "routed_scaling_factor": 1.5, "attention_bias": True, "num_mtp_layers": 1,
}  # fmt: skip
AROUND = {
    "glm": ("model.layers.3.", {"post_norm": "shared_head.norm"}),
    "mimo": (
        "model.mtp_layers.0.",
        {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
         "post_norm": "final_layernorm"},
    ),
}  # fmt: skip


class Reference:
    """A target and its layer, both transformers'."""

    def __init__(self, module: Any, layer: MtpLayer, normed: bool = True) -> None:
        self.module, self.layer, self.normed = module, layer, normed

    @torch.inference_mode()
    def outputs(self, tokens: list[int], states: Tensor) -> Tensor:
        """Of rows with these tokens and states [T, H], before the last norm: [T, H]."""
        base, n = self.module.model, len(tokens)
        positions = torch.arange(n)[None]
        embedded = base.embed_tokens(torch.tensor([tokens]))
        norm, self.layer.post_norm = self.layer.post_norm, torch.nn.Identity()
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        out = self.layer(
            embedded, states[None], base.rotary_emb(embedded, positions), mask, position_ids=positions,
            past_key_values=None,
        )  # fmt: skip
        self.layer.post_norm = norm
        return out[0]

    @torch.inference_mode()
    def draft(self, tokens: list[int], k: int) -> list[int]:
        states = self.module.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]  # after the last norm
        fed, chain = tokens[1:], list[int]()
        while len(chain) < k:
            out = self.outputs(fed, states)[-1]
            normed = self.layer.post_norm(out)
            chain.append(int(self.module.lm_head(normed).argmax()))
            fed, states = [*fed, chain[-1]], torch.cat([states, (normed if self.normed else out)[None]])
        return chain


def drawn(module: torch.nn.Module, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point() and "inv_freq" not in name:
                noise = torch.randn(tensor.shape, generator=dice)
                wide = 1.5 / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 0.2
                tensor.copy_(noise * (1.0 if "embed" in name or "lm_head" in name else wide) + ("norm" in name))


def published(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of transformers' layer as checkpoints have it: a tensor for each expert."""
    name = name.removeprefix("mtp_block.")
    if name.endswith("experts.gate_up_proj"):
        stem, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
        parts = [("gate", tensor[:, :half]), ("up", tensor[:, half:])]
    elif name.endswith("experts.down_proj"):
        stem, parts = name.removesuffix("down_proj"), [("down", tensor)]
    else:
        return {name: tensor}
    return {f"{stem}{i}.{part}_proj.weight": one.clone() for part, each in parts for i, one in enumerate(each)}


def write(folder: Path, kind: str, normed: bool = True) -> Reference:
    """A checkpoint in a folder: `glm` (GLM-4.5) or `mimo`."""
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = transformers.Glm4MoeConfig(**SIZES, **GLM) if kind == "glm" else transformers.Qwen2Config(**SIZES)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    deeper = copy.deepcopy(module.config)
    deeper.num_hidden_layers, deeper.first_k_dense_replace = 1, 0
    deeper.mtp_hidden_states_first = kind == "mimo"
    block = type(module.model.layers[-1])
    layer = MtpLayer(deeper, block, type(module.model.norm), 0).eval()
    drawn(module.eval(), 1)
    drawn(layer, 2)
    module.save_pretrained(folder)
    at, names = AROUND[kind]
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in layer.state_dict().items():
        first, _, rest = name.partition(".")
        name = f"{names.get(first, first)}.{rest}" if first in names or first != "mtp_block" else name
        tensors |= {at + part: one.clone() for part, one in published(name, tensor).items()}
    save_file(tensors, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    data |= {"model_type": "mimo", "attention_bias": True} if kind == "mimo" else {}
    (folder / "config.json").write_text(json.dumps(data))
    tokenizer_files(folder)
    return Reference(module, layer, normed)


def tokenizer_files(folder: Path) -> None:
    tiny.tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def as_gguf(folder: Path, path: Path) -> None:
    """The folder's GLM-4.5 as llama.cpp's converter writes it; the vocabulary is another one."""
    config = open_checkpoint(folder).config
    writer = gguf.GGUFWriter(str(path), "glm4moe")
    writer.add_block_count(config.layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_leading_dense_block_count(len(config.dense_layers))
    writer.add_expert_count(config.experts)
    writer.add_expert_used_count(config.experts_used)
    writer.add_expert_shared_count(config.shared_size // config.expert_size)
    writer.add_expert_feed_forward_length(config.expert_size)
    writer.add_expert_weights_scale(config.expert_scale)
    add_vocabulary(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, config.layers + 1)
    for name, tensor in stacked(load_file(folder / "model.safetensors")).items():
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, tensor.numpy())
    finish(writer)


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All experts' tensors of a kind side by side."""
    found: dict[str, Any] = {}
    for name, tensor in sorted(tensors.items()):
        each = re.fullmatch(r"(.*\.experts\.)\d+\.(.*)", name)
        if each is None:
            found[name] = tensor
        else:
            found.setdefault(each[1] + each[2], []).append(tensor)
    return {name: torch.stack(one) if isinstance(one, list) else one for name, one in found.items()}
