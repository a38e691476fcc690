"""Tiny checkpoints of families that transformers runs, with a layer for further tokens as published, and what that
layer drafts by definition: plain products, row after row and expert after expert, all of the text again for each token.

Only the target is a class of transformers; its states and its output matrix are what the layer is given.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.mtp_checkpoints import SIZES, drawn, tokenizer_files

THETA, EPS = 500.0, 1e-6
COMMON = {"rms_norm_eps": EPS, "rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
DEEPSEEK = SIZES | COMMON | {
    "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 10, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5, "first_k_dense_replace": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN = SIZES | COMMON | {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 14,
}  # fmt: skip
QWEN["rope_parameters"] = {**QWEN["rope_parameters"], "partial_rotary_factor": 0.25}  # type: ignore[dict-item]
H = SIZES["hidden_size"]
PARTS = ("gate", "up", "down")


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def turned(pairs: Tensor, positions: Tensor) -> Tensor:
    """Pairs of numbers [n, heads, d / 2, 2], turned by their positions."""
    wide = 2 * pairs.shape[2]
    speed = THETA ** (-torch.arange(0, wide, 2) / wide)  # [d / 2]
    angle = positions[:, None, None] * speed
    a, b = pairs.unbind(-1)
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k [n, heads, d], v [n, heads, e] -> [n, heads, e]; each row sees itself and those before."""
    rows = []
    for i in range(len(q)):
        scores = (q[i][None] * k[: i + 1]).sum(-1) / math.sqrt(q.shape[-1])  # [i + 1, heads]
        rows.append((scores.softmax(0)[..., None] * v[: i + 1]).sum(0))
    return torch.stack(rows)


class Layer:
    """The layer's tensors by their names, without what all begin with."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], gain: float) -> None:
        """gain: what norms add to their weights."""
        dice = torch.Generator().manual_seed(2)
        self.tensors = {name: torch.randn(shape, generator=dice) for name, shape in shapes.items()}
        for name, tensor in self.tensors.items():
            tensor *= 1.5 / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 0.2
            if "norm" in name:
                tensor += 1 - gain
        self.gain = gain

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self[name] + self.gain)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up, down = (self[f"{name}.{part}_proj"] for part in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))


def mlp_shapes(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}_proj.weight": (size, H) for part in ("gate", "up")} | {
        f"{name}.down_proj.weight": (H, size)
    }


class DeepSeek(Layer):
    """DeepSeek-V3: keys and values from one small vector a token, rope on a part of its own; experts in groups."""

    at, around = "model.layers.3.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")

    def __init__(self) -> None:
        c: Any = DEEPSEEK
        heads, rank, rope = c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
        qk = c["qk_nope_head_dim"] + rope
        wide = {
            "enorm": (H,), "hnorm": (H,), "eh_proj": (H, 2 * H), "shared_head.norm": (H,), "input_layernorm": (H,),
            "post_attention_layernorm": (H,), "self_attn.q_a_proj": (c["q_lora_rank"], H),
            "self_attn.q_a_layernorm": (c["q_lora_rank"],), "self_attn.q_b_proj": (heads * qk, c["q_lora_rank"]),
            "self_attn.kv_a_proj_with_mqa": (rank + rope, H), "self_attn.kv_a_layernorm": (rank,),
            "self_attn.kv_b_proj": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank),
            "self_attn.o_proj": (H, heads * c["v_head_dim"]), "mlp.gate": (c["n_routed_experts"], H),
        }  # fmt: skip
        shapes = {f"{name}.weight": shape for name, shape in wide.items()}
        shapes["mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for name in ("shared_experts", *(f"experts.{i}" for i in range(c["n_routed_experts"]))):
            shapes |= mlp_shapes(f"mlp.{name}", c["moe_intermediate_size"])
        super().__init__(shapes, 0.0)
        self.c = c

    def attention(self, x: Tensor) -> Tensor:
        n, nope, rank, at = len(x), self.c["qk_nope_head_dim"], self.c["kv_lora_rank"], torch.arange(len(x))
        q = self.norm("self_attn.q_a_layernorm", x @ self["self_attn.q_a_proj"].T) @ self["self_attn.q_b_proj"].T
        q = q.view(n, self.c["num_attention_heads"], -1)
        both = x @ self["self_attn.kv_a_proj_with_mqa"].T  # [n, rank + rope]
        small = self.norm("self_attn.kv_a_layernorm", both[:, :rank])
        kv = (small @ self["self_attn.kv_b_proj"].T).view(n, self.c["num_attention_heads"], -1)
        shared = turned(both[:, None, rank:].unflatten(-1, (-1, 2)), at).flatten(-2)  # [n, 1, rope]
        q = torch.cat([q[..., :nope], turned(q[..., nope:].unflatten(-1, (-1, 2)), at).flatten(-2)], -1)
        k = torch.cat([kv[..., :nope], shared.expand(-1, kv.shape[1], -1)], -1)
        return attended(q, k, kv[..., nope:]).flatten(1) @ self["self_attn.o_proj"].T

    def experts(self, x: Tensor) -> Tensor:
        """Of one row [H]."""
        scores = (self["mlp.gate"] @ x).sigmoid()  # [E]
        ranked, each = scores + self.tensors["mlp.gate.e_score_correction_bias"], len(scores) // self.c["n_group"]
        groups = [ranked[i : i + each].topk(2).values.sum().item() for i in range(0, len(scores), each)]
        best = sorted(range(len(groups)), key=lambda i: -groups[i])[: self.c["topk_group"]]
        allowed = [i for i in range(len(scores)) if i // each in best]
        chosen = sorted(allowed, key=lambda i: -ranked[i].item())[: self.c["num_experts_per_tok"]]
        total = sum(scores[i] for i in chosen)
        parts = [scores[i] / total * self.mlp(f"mlp.experts.{i}", x) for i in chosen]
        return self.c["routed_scaling_factor"] * torch.stack(parts).sum(0) + self.mlp("mlp.shared_experts", x)


class Qwen(Layer):
    """Qwen3-Next: a gate for each number that attention returns, rope on a quarter of a head, a gated shared expert."""

    at, around = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")

    def __init__(self) -> None:
        c: Any = QWEN
        heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        wide = {
            "self_attn.q_proj": (heads * 2 * d, H), "self_attn.k_proj": (kv * d, H), "self_attn.v_proj": (kv * d, H),
            "self_attn.o_proj": (H, heads * d), "self_attn.q_norm": (d,), "self_attn.k_norm": (d,),
            "input_layernorm": (H,), "post_attention_layernorm": (H,), "mlp.gate": (c["num_experts"], H),
            "mlp.shared_expert_gate": (1, H),
        }  # fmt: skip
        shapes = {f"layers.0.{name}.weight": shape for name, shape in wide.items()}
        shapes |= {f"{name}.weight": (H, 2 * H) if name == "fc" else (H,) for name in self.around}
        shapes |= mlp_shapes("layers.0.mlp.shared_expert", c["shared_expert_intermediate_size"])
        for i in range(c["num_experts"]):
            shapes |= mlp_shapes(f"layers.0.mlp.experts.{i}", c["moe_intermediate_size"])
        super().__init__(shapes, 1.0)
        self.c = c

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name if name in self.around else f"layers.0.{name}")

    def attention(self, x: Tensor) -> Tensor:
        n, d, heads, kv = len(x), self.c["head_dim"], self.c["num_attention_heads"], self.c["num_key_value_heads"]
        q, gate = (x @ self["self_attn.q_proj"].T).view(n, heads, 2, d).unbind(2)
        k, v = ((x @ self[f"self_attn.{name}_proj"].T).view(n, kv, d) for name in "kv")
        q, k = (self._placed(self.norm(f"self_attn.{name}_norm", y)) for name, y in (("q", q), ("k", k)))
        k, v = (torch.stack([y[:, i // (heads // kv)] for i in range(heads)], 1) for y in (k, v))
        return (attended(q, k, v) * gate.sigmoid()).flatten(1) @ self["self_attn.o_proj"].T

    def _placed(self, x: Tensor) -> Tensor:
        """A head's first quarter turned by position: its number i is paired with the one half of that quarter on."""
        turning = x.shape[-1] // 4
        pairs = x[..., :turning].unflatten(-1, (2, -1)).transpose(-1, -2)
        done = turned(pairs, torch.arange(len(x))).transpose(-1, -2).flatten(-2)
        return torch.cat([done, x[..., turning:]], -1)

    def experts(self, x: Tensor) -> Tensor:
        """Of one row [H]."""
        chances = (self["mlp.gate"] @ x).softmax(0)
        chosen = chances.topk(self.c["num_experts_per_tok"]).indices.tolist()
        total = sum(chances[i] for i in chosen)
        routed = torch.stack([chances[i] / total * self.mlp(f"mlp.experts.{i}", x) for i in chosen]).sum(0)
        return routed + (self["mlp.shared_expert_gate"] @ x).sigmoid() * self.mlp("mlp.shared_expert", x)


class Reference:
    """What the layer beside a target drafts."""

    def __init__(
        self, module: Any, layer: DeepSeek | Qwen, normed: bool = True, state_first: bool = False, raw: bool = False
    ) -> None:
        """normed: drafts continue from the output after its norm; raw: the target's states are those before its own."""
        self.module, self.layer, self.normed, self.state_first, self.raw = module, layer, normed, state_first, raw

    @torch.inference_mode()
    def outputs(self, tokens: list[int], states: Tensor) -> Tensor:
        """Of rows with these tokens and states [n, H], before the last norm: [n, H]."""
        e, h, fc, _ = self.layer.around
        token = self.layer.norm(e, self.module.get_input_embeddings().weight[tokens])
        state = self.layer.norm(h, states)
        x = torch.cat([state, token] if self.state_first else [token, state], -1) @ self.layer[fc].T
        x = x + self.layer.attention(self.layer.norm("input_layernorm", x))
        rows = self.layer.norm("post_attention_layernorm", x)
        return x + torch.stack([self.layer.experts(row) for row in rows])

    def _states(self, tokens: list[int]) -> Tensor:
        """Of the target, after its last norm or before it."""
        seen: list[Tensor] = []
        hook = self.module.model.norm.register_forward_hook(
            lambda _, given, normed: seen.append(given[0] if self.raw else normed)
        )
        self.module.model(torch.tensor([tokens]))
        hook.remove()
        return seen[0][0]

    def normed_outputs(self, tokens: list[int], states: Tensor) -> Tensor:
        return self.layer.norm(self.layer.around[3], self.outputs(tokens, states))

    @torch.inference_mode()
    def draft(self, tokens: list[int], k: int) -> list[int]:
        states = self._states(tokens[:-1])
        fed, chain = tokens[1:], list[int]()
        while len(chain) < k:
            out = self.outputs(fed, states)[-1]
            normed = self.layer.norm(self.layer.around[3], out)
            chain.append(int((self.module.lm_head.weight @ normed).argmax()))
            fed, states = [*fed, chain[-1]], torch.cat([states, (normed if self.normed else out)[None]])
        return chain


def publish(folder: Path, layer: Qwen, target: Path, **settings: Any) -> None:
    """The layer alone in the speculators format: all experts side by side, and the target's configuration."""
    theirs = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    around = dict(zip(layer.around, theirs, strict=True))
    stacks = {part: [layer[f"mlp.experts.{i}.{part}_proj"] for i in range(layer.c["num_experts"])] for part in PARTS}
    gate, up, down = (torch.stack(stacks[part]) for part in PARTS)  # [experts, rows, columns] each
    tensors = {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}
    for name, tensor in layer.tensors.items():
        if "experts." not in name:
            stem = name.removesuffix(".weight")
            tensors[f"{around.get(stem, stem.removeprefix('layers.0.'))}.weight"] = tensor
    folder.mkdir()
    save_file({f"mtp_layers.0.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    verifier = json.loads((target / "config.json").read_text()) | settings
    data = {"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "transformer_layer_config": verifier}
    (folder / "config.json").write_text(json.dumps(data))


SMALL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")  # how what a block adds ends


def agree(module: Any, layer: DeepSeek | Qwen) -> None:
    """Let both choose by the last token alone, nearly: blocks add little, and the layer's product passes it on."""
    e, _, fc, last = (f"{name}.weight" for name in layer.around)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *layer.tensors.items()):
            if name.endswith(SMALL) or name == fc:
                tensor *= 0.02
        layer.tensors[e].fill_(1 - layer.gain)
        layer.tensors[fc][:, :H] += torch.eye(H)
        layer.tensors[last].copy_(module.model.norm.weight)


def write(folder: Path, kind: str, agreeing: bool = False) -> Reference:
    """A checkpoint in a folder: `deepseek` (DeepSeek-V3) or `qwen` (Qwen3-Next); agreeing: most drafts are right."""
    layer: DeepSeek | Qwen = DeepSeek() if kind == "deepseek" else Qwen()
    config: Any = transformers.DeepseekV3Config if kind == "deepseek" else transformers.Qwen3NextConfig
    module: Any = transformers.AutoModelForCausalLM.from_config(config(**layer.c), dtype=torch.float32)
    module.set_experts_implementation("eager")  # others want sizes that are multiples of 16 bytes
    drawn(module.eval(), 1)
    if agreeing:
        agree(module, layer)
    module.save_pretrained(folder)
    added = dict(layer.tensors)
    if kind == "deepseek":  # its files have copies of what is the target's
        added["embed_tokens.weight"] = module.get_input_embeddings().weight.detach().clone()
        added["shared_head.head.weight"] = module.lm_head.weight.detach().clone()
    edit(folder, {layer.at + name: tensor for name, tensor in added.items()})
    tokenizer_files(folder)
    return Reference(module, layer)


def edit(folder: Path, tensors: dict[str, Tensor | None], **settings: Any) -> None:
    """Add these tensors to a folder's file, or remove those that are None, and change its configuration."""
    kept: dict[str, Tensor | None] = dict(load_file(folder / "model.safetensors")) | tensors
    whole = {name: tensor for name, tensor in kept.items() if tensor is not None}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(data))
