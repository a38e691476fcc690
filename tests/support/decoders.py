"""Tiny random models of transformers, and the same weights in the built-in decoder, fed by hand."""

from __future__ import annotations

import copy
import functools
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from outrider.backends import WHOLE, Part
from outrider.backends.rows import Rows, rows_of
from outrider.backends.transformer import Transformer
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache, Plane
from outrider.models import config as configs
from outrider.models.tokenizer import read_json
from outrider.models.weights import Safetensors, adapted, check, find_safetensors
from outrider.types import Sequence

V, LAYERS, LENGTH = 96, 3, 44
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
CLASSES: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "smollm3": transformers.SmolLM3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
    "granite": transformers.GraniteConfig,
    "olmo2": transformers.Olmo2Config,
    "glm4": transformers.Glm4Config,
    "mixtral": transformers.MixtralConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "gpt_oss": transformers.GptOssConfig,
    "glm4_moe": transformers.Glm4MoeConfig,
}
CASES: dict[str, tuple[str, dict[str, object]]] = {}  # name -> family and options; test files add theirs


@functools.cache
def pair(case: str) -> tuple[Any, configs.ModelConfig, Any]:
    """A random model of transformers, and what Outrider reads of it from the files that transformers wrote."""
    family, changes = CASES[case]
    torch.manual_seed(len(case))
    config = CLASSES[family](**copy.deepcopy(SIZES | changes))  # transformers writes into what it is given
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in theirs.named_parameters():
        # Small and all alike, as they come, nothing that is mixed up would show.
        gain = "norm" in name and family not in ("gemma2", "gemma3")  # Gemma's are stored minus one
        torch.nn.init.normal_(parameter, mean=float(gain), std=0.2)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    home = tempfile.TemporaryDirectory(prefix="outrider-tiny-")
    folder = Path(home.name)
    theirs.save_pretrained(folder)
    ours = configs.from_hf(read_json(folder / "config.json"))
    weights = adapted(Safetensors(find_safetensors(folder)), ours)
    weights.home = home  # goes when they go
    check(weights, ours, folder)
    return theirs, ours, weights


@functools.cache
def ours(case: str, dtype: torch.dtype, length: int | None = None) -> Transformer:
    _, config, weights = pair(case)
    return Transformer(config, weights, dtype, length=length)


@functools.cache
def doubled(case: str) -> Any:
    """transformers in float64, with the two things that it computes in float32 in any model done in float64 too."""
    theirs, config, _ = pair(case)
    theirs = copy.deepcopy(theirs).double()

    def norm(module: Any, x: Tensor) -> Tensor:
        gemma = type(module).__name__.startswith("Gemma")
        eps = module.eps if gemma else module.variance_epsilon
        return (gemma + module.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def rotary(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        local = layer_type == "sliding_attention" and config.local_rope_theta > 0
        here = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None) if local else config
        angles = position_ids[..., None].double() * here.inverse_frequencies(position_ids.shape[-1])  # [1, T, r/2]
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * here.attention_factor, angles.sin() * here.attention_factor

    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(norm, module)
    theirs.model.rotary_emb.forward = rotary
    return theirs


def text(length: int = LENGTH) -> list[int]:
    return [(i * i + 3 * i + 7) % V for i in range(length)]


def their_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]  # [T, V]


class Bench:
    """A model with a cache of its own, fed by hand."""

    def __init__(self, model: Transformer, tokens: list[int], spare: int = 0) -> None:
        self.model, self.cache = model, Cache(128, 4, 96)
        # Slots out of order: nothing may lean on neighbouring positions lying side by side.
        self.cache._free = self.cache._free[::2] + self.cache._free[1::2]
        self.plane: Plane = self.cache.add_plane(*model.plane_shape)
        self.seq = Sequence(1, tokens)
        self.cache.open(self.seq)
        assert self.cache.reserve(self.seq, len(tokens), spare)

    def rows(self, start: int, stop: int) -> Rows:
        packed = BatchBuilder(self.cache)
        packed.pending(self.seq, start, stop, want=False)
        packed.want = list(range(stop - start))
        return rows_of(packed)

    def logits(self, chunk: int = 10**9, part: Part = WHOLE) -> Tensor:
        n = len(self.seq.tokens)
        starts = range(0, n, min(chunk, n))
        return torch.cat([self.model.forward(self.rows(i, min(i + chunk, n)), self.plane, part).logits for i in starts])


def on_device(rows: Rows, config: Any, device: torch.device) -> Rows:
    """The rows of one line, each a block of its own."""
    from outrider.backends.cuda.kernels.attention import Blocks, Scratch

    count = rows.count
    info = torch.zeros(count, 8, dtype=torch.int32)
    for column, values in enumerate((torch.arange(count), torch.ones(count), rows.lines, rows.context, rows.context)):
        info[:, column] = values
    table = rows.table.to(device, torch.int32).contiguous()
    scratch = Scratch(256, config.heads, config.head_dim, table.shape[1], device)
    blocks = Blocks(info.to(device), torch.zeros(count, 16, dtype=torch.int32, device=device), table, scratch)
    tokens, positions, slots, want = (t.to(device) for t in (rows.tokens, rows.positions, rows.slots, rows.want))
    return Rows(tokens, positions, slots, slots, slots, table, None, want, blocks=blocks)


def device_logits(model: Transformer, tokens: list[int], *bounds: int) -> Tensor:
    """Logits of a text that is fed to a GPU's kernels in pieces with these bounds. [T, V]"""
    bench = Bench(model, tokens)
    rows = [on_device(bench.rows(a, b), model.config, model.device) for a, b in pairwise(bounds)]
    return torch.cat([model.forward(piece, bench.plane).logits for piece in rows]).cpu()
