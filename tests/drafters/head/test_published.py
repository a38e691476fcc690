"""Drafters that others have published: each format drafts what an independent reference drafts, token by token, through
the command line; what a file does not say is found by trial; what is wrong is refused in a sentence."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer
from typer.testing import CliRunner

from outrider import LLM
from outrider.backends import ops
from outrider.cli.app import app
from outrider.config import from_speculative_config
from outrider.drafters import Workspace
from outrider.drafters.head import drafter as head_drafter
from outrider.drafters.head.dflash import DFlashHead
from outrider.drafters.head.drafter import open_head
from outrider.drafters.head.readings import BLOCK_EVERY, TOKENS, Trial, Tried
from outrider.engine.cache import Cache
from outrider.engine.trace import read
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.models.checkpoint import open_checkpoint
from outrider.models.library import describe
from outrider.models.prompts import bundled
from outrider.models.published import read_published
from outrider.models.speculators import WEIGHTS, random_head, target_hash, write_head
from outrider.types import SamplingParams

from support import tiny
from support.gguf_heads import write_gguf_head
from support.head_scores import block_scores, scored
from support.lies import lies
from support.reference_heads import DFlash, Eagle1, Eagle3, Llama, Medusa, MlpSpeculator, Mtp, NormedEagle1

LAYERS, V, H, D, K = 8, 300, 32, 40, 6
SEED = torch.Generator()
PREFIX = {"projector_type": "domino", "gru_hidden_dim": 12, "emb_dim": 10, "pure_draft_prefix_len": 1}
SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 6}
REFINER = {"xpress_rank": 8, "xpress_mlp_ratio": 2, "num_jacobi_passes": 3}
Config = dict[str, Any]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last norm matters: states before and after it differ by more than a factor."""
    folder = tiny.save(tmp_path_factory.mktemp("published") / "target", layers=LAYERS)
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] *= torch.linspace(2, 0.5, H)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def llama(target: Path) -> Llama:
    return Llama(target)


@pytest.fixture(scope="module")
def plain(target: Path) -> LLM:
    return LLM(target, drafter="off", dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


# ------------------------------------------------------------ made-up heads


def sizes(hidden: int = H, **more: Any) -> Config:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": 40, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "vocab_size": V, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "max_position_embeddings": 64, "num_hidden_layers": 1, "rope_theta": 10000.0,
    } | more  # fmt: skip


def drawn(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> Tensors:
    """Weights large enough that the layers matter; norms around one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = noise * 2 / shape[-1] ** 0.5 if len(shape) > 1 else noise * 0.3 + (1 if "norm" in name else 0)
    return tensors


def layer(c: Config, at: str, inputs: int, first_norm: bool = True) -> dict[str, tuple[int, ...]]:
    h, wide, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    named: dict[str, tuple[int, ...]] = {f"{at}.post_attention_layernorm.weight": (h,)}
    named |= {f"{at}.input_layernorm.weight": (h,)} if first_norm else {}
    for name, shape in {"q": (q, inputs), "k": (kv, inputs), "v": (kv, inputs), "o": (h, q)}.items():
        named[f"{at}.self_attn.{name}_proj.weight"] = shape
    for name, shape in {"gate": (wide, h), "up": (wide, h), "down": (h, wide)}.items():
        named[f"{at}.mlp.{name}_proj.weight"] = shape
    return named


def eagle3(c: Config, draft: int = D, embedding: bool = False, taps: int = 3, **more: tuple[int, ...]) -> Tensors:
    h = c["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, taps * H), "midlayer.hidden_norm.weight": (h,)}
    shapes |= layer(c, "midlayer", 2 * h) | {"norm.weight": (h,), "lm_head.weight": (draft, h)}
    for i in range(1, c["num_hidden_layers"]):
        shapes |= layer(c, f"layers.{i}", h)
    if embedding or h != H:
        shapes["embed_tokens.weight"] = (V, h)
    tensors = drawn(shapes | {name.replace("__", "."): shape for name, shape in more.items()})
    if draft < V:
        ids = torch.arange(draft) * V // draft
        known = torch.zeros(V, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(draft), "t2d": known}
    return tensors


def saved(folder: Path, config: Config, tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def numbers(tensors: Tensors) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def speculators_format(c: Config, tensors: Tensors, taps: list[int], kind: str = "eagle3", **more: Any) -> Config:
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
    proposal = {"proposal_type": "greedy", "speculative_tokens": K}
    verifier = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": kind, "speculators_version": "0.7.0",
        "draft_vocab_size": D, "eagle_aux_hidden_state_layer_ids": taps, "transformer_layer_config": c,
        "speculators_config": {"algorithm": kind, "proposal_methods": [proposal], "verifier": verifier},
    } | more  # fmt: skip


def specforge(llama: Llama, to: Path) -> Any:
    """Layer ids that can only be outputs: the first is 0."""
    c = sizes()
    tensors = eagle3(c)
    taps = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 7]}
    flat = c | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": D, "eagle_config": taps}
    saved(to, flat, tensors)
    return Eagle3(llama, numbers(tensors), c, [1, 4, 8])


def original(llama: Llama, to: Path) -> Any:
    """SafeAILab's: pickled, no head_dim, no layer ids."""
    c = sizes(head_dim=8)
    tensors = eagle3(c)
    flat = {name: value for name, value in c.items() if name != "head_dim"}
    saved(to, flat | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": D}, tensors, "pytorch_model.bin")
    return Eagle3(llama, numbers(tensors), c, [2, 4, 5])


def angelslim(llama: Llama, to: Path) -> Any:
    """Whole vocabulary, own embedding, a flag for tied weights that is not true, ids that can only be boundaries."""
    c = sizes()
    tensors = eagle3(c, V, embedding=True)
    flat = c | {"architectures": ["Eagle3LlamaForCausalLM"], "tie_word_embeddings": True}
    saved(to, flat | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}}, tensors)
    return Eagle3(llama, numbers(tensors), c, [2, 4, 8])


def nvidia(llama: Llama, to: Path) -> Any:
    """A narrow head with one norm over all tapped states."""
    c = sizes(24)
    tensors = eagle3(c, input_norm__weight=(3 * H,))
    own = {"eagle_aux_hidden_state_layer_ids": [2, 4, 8], "norm_before_fc": True, "use_aux_hidden_state": True}
    flat = c | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": D, "target_hidden_size": H}
    saved(to, flat | {"eagle_config": own}, tensors)
    return Eagle3(llama, numbers(tensors), c, [2, 4, 8])


def eagle31(llama: Llama, to: Path) -> Any:
    """Each tapped state has a norm; drafts continue from the normed output; the output matrix is the target's."""
    c = sizes()
    tensors = eagle3(c, **{f"fc_norm__{i}__weight": (H,) for i in range(3)})
    del tensors["lm_head.weight"], tensors["d2t"], tensors["t2d"]
    flat = c | {"architectures": ["LlamaForCausalLMEagle3"], "norm_output": True}
    saved(to, flat, tensors)
    return Eagle3(llama, numbers(tensors), c, [2, 4, 5], norm_output=True)


def speculators(llama: Llama, to: Path) -> Any:
    c = sizes()
    tensors = eagle3(c)
    reference = Eagle3(llama, numbers(tensors), c, [2, 4, 5], norm_before_residual=True)
    saved(to, speculators_format(c, tensors, [2, 4, 5], norm_before_residual=True), tensors)
    return reference


def speculators_deep(llama: Llama, to: Path) -> Any:
    """Two layers, the second with a sliding window; norms of q and k; biases; rope's base in transformers 5's words."""
    layers = ("midlayer", "layers__1")
    more = {f"{at}__self_attn__{n}_norm__weight": (6,) for at in layers for n in "qk"}
    more |= {f"{at}__self_attn__{n}_proj__bias": ((24 if n == "q" else 12),) for at in layers for n in "qkv"}
    c = sizes(num_hidden_layers=2)
    tensors = eagle3(c, **more)
    reference = Eagle3(llama, numbers(tensors), c | {"rope_theta": 5e5}, [2, 4, 5], windows=[0, 5])
    stated = {name: value for name, value in c.items() if name != "rope_theta"}
    stated |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "sliding_window": 5}
    stated |= {"layer_types": ["full_attention", "sliding_attention"], "model_type": "qwen3"}
    saved(to, speculators_format(stated, tensors, [2, 4, 5], norm_before_residual=False), tensors)
    return reference


def peagle(llama: Llama, to: Path) -> Any:
    c = sizes(num_hidden_layers=2)
    tensors = eagle3(c, embedding=True, mask_hidden=(1, 1, 3 * H))
    reference = Eagle3(llama, numbers(tensors), c, [2, 4, 5], mask=7)
    saved(to, speculators_format(c, tensors, [2, 4, 5], "peagle", mask_token_id=7), tensors)
    return reference


def peagle_flat(llama: Llama, to: Path) -> Any:
    """SpecForge's, with the token of the masks beside its other settings, and the whole vocabulary."""
    c = sizes(num_hidden_layers=2)
    tensors = eagle3(c, V, embedding=True, mask_hidden=(1, 1, 3 * H))
    reference = Eagle3(llama, numbers(tensors), c, [1, 4, 8], mask=7)
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}
    saved(to, c | {"architectures": ["PEagleDraftModel"], "eagle_config": taps, "mask_token_id": 7}, tensors)
    return reference


def eagle1(llama: Llama, to: Path, bias: bool = True) -> Any:
    c = sizes()
    shapes = {"fc.weight": (H, 2 * H)} | layer(c, "midlayer", H, first_norm=False)
    tensors = drawn(shapes | ({"fc.bias": (H,)} if bias else {}))
    reference = Eagle1(llama, numbers(tensors), c, [8])
    stored = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if bias:  # most carry a copy of the target's embedding
        stored["embed_tokens.weight"] = torch.from_numpy(llama.w["embed_tokens.weight"]).float()
    saved(to, c | {"architectures": ["LlamaForCausalLM"]}, stored, "pytorch_model.bin" if bias else "model.safetensors")
    return reference


def eagle1_speculators(llama: Llama, to: Path) -> Any:
    """The same head under the names of the speculators format, which leaves embedding and output to the target."""
    reference = eagle1(llama, to, bias=False)
    data, tensors = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
    stored = {n.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): t for n, t in tensors.items()}
    layer_config = {name: value for name, value in data.items() if name not in ("architectures", "num_hidden_layers")}
    own = {"layernorms": False, "fusion_bias": False, "architectures": ["EagleSpeculator", "LlamaDecoderLayer"]}
    saved(to, speculators_format(layer_config, stored, [], "eagle") | own, stored)
    return reference


def eagle1_layernorms(llama: Llama, to: Path) -> Any:
    """With a norm of the token, one before attention and one before the output."""
    c = sizes()
    shapes = {"fusion_fc.weight": (H, 2 * H), "fusion_fc.bias": (H,)} | layer(c, "transformer", H)
    tensors = drawn(shapes | {f"{name}_layernorm.weight": (H,) for name in ("embedding", "pre_lm_head")})
    saved(to, speculators_format(c, tensors, [], "eagle", layernorms=True, fusion_bias=True), tensors)
    return NormedEagle1(llama, numbers(tensors), c, [8])


def mtp(llama: Llama, to: Path, whole: bool = False) -> Any:
    """A layer of Qwen3's kind, whose configuration is the target's; whole: with an embedding and an output matrix."""
    c, at = sizes(model_type="qwen3", num_hidden_layers=LAYERS), "mtp_layers.0"
    shapes = {f"{at}.input_proj.weight": (H, 2 * H)} | layer(c, at, H)
    shapes |= {f"{at}.{name}_layernorm.weight": (H,) for name in ("token", "hidden", "final")}
    shapes |= {f"{at}.self_attn.{name}_norm.weight": (6,) for name in "qk"}
    shapes |= {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)} if whole else {}
    tensors = drawn(shapes)
    own = {"architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1}
    saved(to, speculators_format(c, tensors, [], "mtp") | own, tensors)
    return Mtp(llama, numbers(tensors), c, [8])


def last_state(llama: Llama, to: Path) -> Any:
    """NVIDIA's without taps: the target's last state is the feature."""
    c = sizes()
    tensors = eagle3(c)
    del tensors["fc.weight"]
    own = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [], "use_last_layernorm": True}
    flat = c | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": D, "eagle_config": own}
    saved(to, flat, tensors)
    return Eagle3(llama, numbers(tensors), c, [8])


def medusa(llama: Llama, to: Path, vllm: bool = False) -> Any:
    """The configuration names two heads, the file has six."""
    draft = D if vllm else V
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(K):
        shapes |= {f"{i}.0.linear.weight": (H, H), f"{i}.0.linear.bias": (H,), f"{i}.1.weight": (draft, H)}
    tensors, config = drawn(shapes), {"medusa_num_heads": 2, "medusa_num_layers": 1, "vocab_size": V}
    if not vllm:
        saved(to, config, tensors, "medusa_lm_head.pt")
        return Medusa(llama, numbers(tensors), K, 1)
    tensors["token_map"] = torch.arange(draft) * 7
    stored = {f"lm_heads.{n[0]}.weight": t for n, t in tensors.items() if n.endswith(".1.weight")}
    stored |= {f"blocks.{n[0]}.layers.0.{n.split('.')[-1]}": t for n, t in tensors.items() if "linear" in n}
    saved(to, config, stored | {"token_map": tensors["token_map"]})
    return Medusa(llama, numbers(tensors), K, 1)


def mlp(llama: Llama, to: Path, tied: bool = False) -> Any:
    inner, shapes = 24, dict[str, tuple[int, ...]]()
    for i in range(K):
        own = {"emb": (V, inner), "proj": (inner, inner if i else H), "head": (V, inner), "ln": (inner,)}
        kept = ("proj",) if i == 1 else () if i else tuple(own)
        shapes |= {f"speculator.{n}.{i}.weight": shape for n, shape in own.items() if not tied or n in kept}
        shapes |= {f"speculator.ln.{i}.bias": (inner,)} if not tied or i == 0 else {}
    tensors = drawn(shapes)
    config = {"model_type": "mlp_speculator", "n_predict": K, "emb_dim": H, "inner_dim": inner, "vocab_size": V}
    saved(to, config | {"tie_weights": tied, "scale_input": tied}, tensors)
    return MlpSpeculator(llama, numbers(tensors), K, tied, tied)


def dflash(llama: Llama, to: Path, block: int = K + 1, loud: bool = True, **own: Any) -> Any:
    """z-lab's: layer ids name outputs; embedding and output matrix are the target's; norms of q and k. It is stated
    whether the first row predicts, unless that is None: weights are random, so that a trial would find either."""
    own = {"sample_from_anchor": False} | own
    layers = len(own.get("layer_types", "three"))
    c = sizes(num_hidden_layers=layers, model_type="qwen3", rope_theta=5e5)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(layers):
        shapes |= layer(c, f"layers.{i}", H) | {f"layers.{i}.self_attn.{n}_norm.weight": (6,) for n in "qk"}
    if rank := own.pop("markov", 0):
        shapes |= {"markov_head.markov_w1.weight": (V, rank), "markov_head.markov_w2.weight": (V, rank)}
        shapes |= {"confidence_head.proj.weight": (1, H), "confidence_head.proj.bias": (1,)}
        joint = {"gated": ("gate_proj", rank, H + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + H)}
        if kind := own.pop("markov_kind", ""):
            part, rows, inputs = joint[kind]
            shapes |= {f"markov_head.{part}.weight": (rows, inputs), f"markov_head.{part}.bias": (rows,)}
    if domino := own.pop("domino", None):
        state, inner = domino["gru_hidden_dim"], domino["emb_dim"]
        shapes |= {"prefix_gru.weight_ih_l0": (3 * state, H), "prefix_gru.weight_hh_l0": (3 * state, state)}
        shapes |= {"embed_proj.0.weight": (inner, H + state), "embed_proj.2.weight": (V, inner)}
    if later := own.pop("dflash2", None):
        taps, groups, wide = later["conv_kernel_size"], H // later["conv_group_size"], later["selector_rank"]
        for name in (f"layers.{i}.{part}_conv" for i in range(layers) for part in ("attention", "mlp")):
            shapes[f"{name}.base_kernel"] = (2, taps, H)
            shapes[f"{name}.kernel_projection.weight"] = (2 * taps * groups, H)
        shapes |= {f"candidate_selector.{side}_codebook": (V, wide) for side in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (wide, H)
    if refiner := own.pop("xpress", None):
        wide = refiner["xpress_rank"]
        inner = wide * refiner["xpress_mlp_ratio"]
        parts = {"token_embed": (V, wide), "down_h": (wide, H), "down_g": (wide, H), "in_proj": (wide, 3 * wide)}
        parts |= {"mlp_gate": (inner, wide), "mlp_up": (inner, wide), "mlp_down": (wide, inner), "readout": (V, wide)}
        shapes |= {f"refiner_head.{name}.weight": shape for name, shape in parts.items()}
        shapes["refiner_head.mix_l"] = (wide, block, block)
    tensors = drawn(shapes)
    last = ("o_proj.weight", "markov_w2.weight", "prefix_gru.weight_ih_l0", "embed_proj.2.weight", "readout.weight")
    for name in tensors if loud else ():  # masks are all alike: what they see has to matter
        if name.endswith(last):
            tensors[name] *= 8
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] *= 4
    kinds = own.get("layer_types") or []
    windows = [own["sliding_window"] if kind == "sliding_attention" else 0 for kind in kinds]
    causal = own.get("dflash_config", {}).get("causal", False)
    flags = {"windows": windows or None, "causal": causal, "anchored": own.get("sample_from_anchor")}
    flags |= {"corrected_from": domino["pure_draft_prefix_len"]} if domino else {}
    flags |= {"passes": refiner["num_jacobi_passes"]} if refiner else {}
    flags |= {"two_sided": own.get("is_causal") is False} | ({"top": later["selector_top_k"]} if later else {})
    keys = {"output_multiplier": "scale", "final_logit_softcapping": "cap", "input_embedding_scale": "embedding_scale"}
    flags |= {keys[key]: value for key, value in (later or {}).items() if key in keys}
    reference = DFlash(llama, numbers(tensors), c, [1, 4, 8], block=block, mask=9, **flags)
    names = {"DSparkDraftModel": rank, "DominoDraftModel": domino, "DFlash2DraftModel": later, "DFlashDraftModel": 1}
    kind = next(name for name, present in names.items() if present)
    flat = c | {"architectures": [kind], "block_size": block}
    ids = {"mask_token_id": 9, "target_layer_ids": [0, 3, 7]} | own.pop("dflash_config", {}) | (domino or later or {})
    stated = {name: value for name, value in own.items() if value is not None}
    saved(to, flat | {"num_target_layers": LAYERS, "dflash_config": ids} | stated, tensors)
    if refiner:
        as_speculators(to, "xpress", **refiner)
    return reference


def domino(llama: Llama, to: Path, shifted: bool = True, start: int = 1, architecture: str = "") -> Any:
    """SpecForge's: `shift_label` says whether the first row predicts; the first `start` tokens are not corrected."""
    own = PREFIX | {"pure_draft_prefix_len": start}
    reference = dflash(llama, to, K + (not shifted), sample_from_anchor=shifted, domino=own)
    data = json.loads((to / "config.json").read_text())
    data["dflash_config"]["shift_label"] = data.pop("sample_from_anchor")
    data["architectures"] = [architecture] if architecture else data["architectures"]
    (to / "config.json").write_text(json.dumps(data))
    return reference


def dflash_speculators(llama: Llama, to: Path) -> Any:
    """Boundaries, a reduced vocabulary, a mask of its own; a block that is longer than the draft."""
    reference = dflash(llama, to, block=9)
    data, tensors = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
    ids, mask = torch.arange(D) * V // D, torch.randn(H, generator=SEED.manual_seed(8))
    tensors["d2t"] = ids - torch.arange(D)
    torch.save(mask[None], to / "mask_embedding.pt")
    layer_config = {n: v for n, v in data.items() if n not in ("architectures", "dflash_config", "block_size")}
    own = {"block_size": 9, "aux_hidden_state_layer_ids": [1, 4, 8], "mask_token_id": 9}
    saved(to, speculators_format(layer_config, tensors, [], "dflash") | own, tensors)
    return DFlash(llama, numbers(tensors | {"mask_embedding": mask}), reference.sizes, [1, 4, 8], block=9, mask=9)


def in_gguf(kind: Kind, llama: Llama, to: Path, hidden: int = 24) -> Any:
    """llama.cpp's file of a narrow EAGLE-3 head with one norm over all taps: layers are named by their inputs."""
    c = sizes(hidden, intermediate_size=64, num_attention_heads=4, head_dim=8) if hidden == H else sizes(hidden)
    tensors = eagle3(c, input_norm__weight=(3 * H,))
    keys = {"target_layers": [2, 4, 8], "target_hidden_size": H, "norm_before_residual": True, "norm_before_fc": True}
    write_gguf_head(to / "head.gguf", "eagle3", c, tensors, kind, **keys)
    return Eagle3(llama, numbers(tensors), c, [2, 4, 8], norm_before_residual=True)


def dspark(llama: Llama, to: Path) -> Any:
    """DeepSeek's: all in one configuration, with copies of the target's embedding and output matrix."""
    reference = dflash(llama, to, K, markov=5, sample_from_anchor=True)
    data, tensors = json.loads((to / "config.json").read_text()), load_file(to / WEIGHTS)
    data["architectures"] = ["Qwen3DSparkModel"]
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.from_numpy(llama.w[name]).float()
    saved(to, data | data.pop("dflash_config"), tensors)
    return reference


def dflash_in_gguf(llama: Llama, to: Path, **own: Any) -> Any:
    """A block drafter's, with sliding layers, and a term for the token before."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    reference = dflash(llama, to / "folder", K, layer_types=kinds, sliding_window=6, sample_from_anchor=True, **own)
    data, tensors = json.loads((to / "folder" / "config.json").read_text()), load_file(to / "folder" / WEIGHTS)
    keys = {"target_layers": [1, 4, 8], "block_size": K, "sample_from_anchor": True, "attention__sliding_window": 6}
    keys |= {"attention__sliding_window_pattern": [True, False, True], "tokenizer__ggml__mask_token_id": 9}
    write_gguf_head(to / "head.gguf", "dflash", data, tensors, **keys)
    return reference


def dflash_sliding(llama: Llama, to: Path) -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return dflash(llama, to, layer_types=kinds, sliding_window=6)


def dflash2(llama: Llama, to: Path, **own: Any) -> Any:
    """z-lab's, with layers that slide and see the whole block, a limit of scores, and its target's scales."""
    own = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "is_causal": False} | own
    scales = {"output_multiplier": 0.5, "final_logit_softcapping": 30.0, "input_embedding_scale": 12.0}
    return dflash(llama, to, dflash2=SELECTOR | scales, **own)


def dflash2_speculators(llama: Llama, to: Path, **own: Any) -> Any:
    """The same words beside the layers' sizes; sliding layers see the whole block unless it says otherwise."""
    kinds = ["sliding_attention", "sliding_attention"]
    reference = dflash(llama, to, layer_types=kinds, sliding_window=4, dflash2=SELECTOR, is_causal=False)
    as_speculators(to, "dflash2", **SELECTOR)
    return reference


def xpress(llama: Llama, to: Path, passes: int = 3, anchored: bool = False, draft: int = V) -> Any:
    """Fewer passes than places: what is drafted is not what tokens in order would be."""
    words = REFINER | {"num_jacobi_passes": passes}
    reference = dflash(llama, to, K + (not anchored), sample_from_anchor=anchored, xpress=words)
    if draft == V:
        return reference
    data, tensors = json.loads((to / "config.json").read_text()), load_file(to / WEIGHTS)
    tensors["refiner_head.readout.weight"] = tensors["refiner_head.readout.weight"][:draft].contiguous()
    tensors["d2t"] = torch.arange(draft) * V // draft - torch.arange(draft)
    saved(to, data | {"draft_vocab_size": draft}, tensors)
    return DFlash(llama, numbers(tensors), reference.sizes, [1, 4, 8], **reference.flags)


def xpress_released(llama: Llama, to: Path) -> Any:
    """Its authors': one flat configuration, other names."""
    reference = xpress(llama, to, 2)
    data, tensors = json.loads((to / "config.json").read_text()), load_file(to / WEIGHTS)
    names = {"token_embed.weight": "w1.weight", "readout.weight": "w2.weight", "mix_l": "mix.L"}
    names |= {f"mlp_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    for name in [name for name in tensors if name.startswith("refiner_head.")]:
        part = name.removeprefix("refiner_head.")
        tensors[f"xpress_head.{names.get(part, part)}"] = tensors.pop(name)
    flat = data["transformer_layer_config"] | {"architectures": ["Qwen3XPressModel"], "num_target_layers": LAYERS}
    flat |= {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 3, 7]}, "sample_from_anchor": False}
    own = {"block_size": K + 1, "xpress_rank": 8, "xpress_mlp_hidden": 16, "xpress_num_passes": 2}
    saved(to, flat | own, tensors)
    return reference


def as_speculators(to: Path, kind: str, **own: Any) -> None:
    """The block drafter in a folder as speculators writes it: layer ids are boundaries."""
    data, tensors = json.loads((to / "config.json").read_text()), load_file(to / WEIGHTS)
    top = {"aux_hidden_state_layer_ids": [1, 4, 8], "mask_token_id": 9, "draft_vocab_size": V}
    top |= {name: data.pop(name) for name in ("block_size", "sample_from_anchor")}
    layers = {n: v for n, v in data.items() if n not in ("architectures", "dflash_config", "is_causal")}
    saved(to, speculators_format(layers, tensors, [], kind) | top | own, tensors)


FORMATS: dict[str, Callable[[Llama, Path], Any]] = {
    "dflash": dflash, "dflash_speculators": dflash_speculators, "dflash_sliding": dflash_sliding,
    "dflash_causal": lambda llama, to: dflash(llama, to, dflash_config={"causal": True}),
    "dspark": dspark, "domino": domino, "dflash2": dflash2, "dflash2_speculators": dflash2_speculators,
    "dflash2_causal": lambda llama, to: dflash2(llama, to, is_causal=None),
    "xpress": xpress, "xpress_released": xpress_released,
    "xpress_anchored": lambda llama, to: xpress(llama, to, K + 3, anchored=True, draft=D),
    "dspark_gated": lambda llama, to: dflash(llama, to, K, markov=5, markov_kind="gated", sample_from_anchor=True),
    "dspark_rnn": lambda llama, to: dflash(
        llama, to, markov=5, markov_kind="rnn", sample_from_anchor=False, dflash_config={"markov_head_type": "rnn"}
    ),
    "domino_unshifted": lambda llama, to: domino(llama, to, False, 0, "DFlashDraftModel"),
    "dspark_unanchored": lambda llama, to: dflash(llama, to, markov=5, sample_from_anchor=False),
    "dflash_anchored": lambda llama, to: dflash(llama, to, K, sample_from_anchor=True),
    "specforge": specforge, "original": original, "angelslim": angelslim, "nvidia": nvidia, "eagle3.1": eagle31,
    "speculators": speculators, "speculators_deep": speculators_deep, "peagle": peagle, "peagle_flat": peagle_flat,
    "eagle1": eagle1, "eagle1_without_bias": lambda llama, to: eagle1(llama, to, bias=False),
    "eagle1_speculators": eagle1_speculators, "eagle1_layernorms": eagle1_layernorms, "last_state": last_state,
    "mtp": mtp, "mtp_whole": lambda llama, to: mtp(llama, to, whole=True),
    "gguf": lambda llama, to: in_gguf(Kind.F32, llama, to), "gguf_dflash": dflash_in_gguf,
    "gguf_dspark": lambda llama, to: dflash_in_gguf(llama, to, markov=5),
    "medusa": medusa, "medusa_vllm": lambda llama, to: medusa(llama, to, vllm=True),
    "mlp": mlp, "mlp_tied": lambda llama, to: mlp(llama, to, tied=True),
}  # fmt: skip


_STATES = [{"normed": normed} for normed in (True, False)]
READINGS: dict[str, list[dict[str, bool]]] = {  # what a file does not say; of other formats above there is one reading
    "eagle1_layernorms": [state | {"norm_output": out} for state in _STATES for out in (True, False)],
    "mtp": [state | {"norm_output": True} for state in _STATES],
}
READINGS["mtp_whole"] = READINGS["mtp"]
CASES = [(name, reading) for name in FORMATS for reading in range(len(READINGS.get(name, [{}])))]


# ------------------------------------------------------------ each format


def head_at(folder: Path) -> str:
    """What a user names: the folder, or the GGUF file in it."""
    file = folder / "head.gguf"
    return str(file if file.is_file() else folder)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("name", "reading"), CASES)
def test_a_format_drafts_what_its_definition_says(
    name: str, reading: int, llama: Llama, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step's chain of six, through the command line; under each reading of what a file does not say."""
    reference, trace = FORMATS[name](llama, tmp_path / "head"), tmp_path / "run.jsonl"
    flags = READINGS.get(name, [{}])

    def choose(head: Any, readings: tuple[Any, ...], *_: Any) -> tuple[Any, Tried]:
        assert len(readings) == len(flags)
        return head.read_as(readings[reading].config) if len(flags) > 1 else head, Tried(reading)

    monkeypatch.setattr(head_drafter, "choose_reading", choose)
    if flags[reading]:
        reference.flags |= flags[reading]
    arguments = ["generate", "the quick brown fox", "-m", str(target), "--dtype", "float32", "--raw", "--k", str(K)]
    arguments += ["--drafter", "head", "--set", f"head={head_at(tmp_path / 'head')}", "--set", "stop_below=0"]
    done = CliRunner().invoke(app, [*arguments, "-n", "12", "--trace", str(trace), "--json"])
    assert done.exit_code == 0, done.output
    recorded = read(trace)
    text, compared = [*recorded.header["prompt"], *json.loads(done.stdout)["token_ids"]], 0
    for step in recorded.lines:
        drafted = [node[0] for node in step["nodes"]]
        assert not step.get("failure")
        assert drafted == reference.draft(text[: step["at"]], K)[: len(drafted)]
        compared += len(drafted)
    assert compared >= 3 * K


def test_the_reference_would_notice(llama: Llama, tmp_path: Path) -> None:
    """Another tap, a swapped input, a draft vocabulary without its offsets: none of them drafts the same."""
    texts = [[(seed * i * i + 31 * i) % V for i in range(1, 7)] for seed in (3, 5, 11, 17, 23, 29)]
    right = specforge(llama, tmp_path / "head")
    swapped = specforge(llama, tmp_path / "head")
    for name in ("q", "k", "v"):
        at = f"midlayer.self_attn.{name}_proj.weight"
        swapped.w[at] = swapped.w[at].reshape(-1, 2, H)[:, ::-1].reshape(-1, 2 * H)
    other_taps, other_ids = specforge(llama, tmp_path / "head"), specforge(llama, tmp_path / "head")
    other_taps.boundaries, other_ids.ids = [2, 4, 8], other_ids.ids * 0 + range(D)
    drafts = [[reference.draft(text, 2) for text in texts] for reference in (right, swapped, other_taps, other_ids)]
    assert all(drafts[0] != draft for draft in drafts[1:])
    assert len({tuple(draft) for draft in drafts[0]}) > 3


@pytest.mark.one_in(13)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", FORMATS)
def test_no_format_changes_the_text(
    name: str, dtype: str, tree: bool, llama: Llama, target: Path, tmp_path: Path
) -> None:
    """A sampled batch, chains and trees, and with eight-bit weights."""
    FORMATS[name](llama, tmp_path / "head")
    plain = LLM(target, drafter="off", dtype=dtype, device="cpu")
    llm = plain.using(drafter="head", head=head_at(tmp_path / "head"), tree=tree, k=5)
    params = SamplingParams(max_tokens=10, temperature=0.7, seed=4, ignore_eos=True)
    prompts = ["the quick brown fox", "def add(a, b):", "one two"]
    answers = [[result.token_ids for result in each.generate(prompts, params)] for each in (plain, llm)]
    assert answers[0] == answers[1]
    assert not llm.engine.failures


NATIVE = (
    "specforge", "nvidia", "eagle3.1", "speculators", "speculators_deep", "peagle", "eagle1", "eagle1_layernorms",
    "last_state", "mtp",
)  # fmt: skip


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", NATIVE)
def test_eight_bits_say_nearly_what_floats_say(name: str, llama: Llama, target: Path, tmp_path: Path) -> None:
    """Every variant of a head with attention: native code, torch's products, and floats."""
    FORMATS[name](llama, tmp_path / "head")
    loaded = LLM(target, drafter="off", dtype="float32", device="cpu")
    scores = []
    for dtype, native in (("float32", True), ("int8", True), ("int8", False)):
        llm = loaded.using(drafter="head", head=str(tmp_path / "head"), draft_dtype=dtype)
        head: Any = llm.engine.drafter.rollout.head
        head.native = head.native if native else None
        scores.append(scored(head))
    floats, quick, slow = scores
    assert (quick - slow).norm() < 0.05 * slow.norm()  # a byte may fall to the other side
    assert (quick - floats).norm() < 0.1 * floats.norm()


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", NATIVE)
def test_a_gpus_kernels_run_every_variant(
    name: str, llama: Llama, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    FORMATS[name](llama, tmp_path / "head")
    loaded = LLM(target, drafter="off", dtype="float32", device="cpu")
    space = Workspace(loaded.target, Cache(64, 2, 64), loaded.engine.target.plane, {"head": str(tmp_path / "head")})
    here = scored(open_head(space).head)
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    there = scored(open_head(space).head)
    torch.testing.assert_close(there, here, rtol=2e-3, atol=2e-3)


def opened(loaded: LLM, folder: Path, **options: Any) -> Any:
    given = {"head": str(folder)} | options
    return open_head(Workspace(loaded.target, Cache(64, 2, 64), loaded.engine.target.plane, given)).head


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("window", "own"),
    [
        *[(0, {}), (6, {}), (0, {"domino": PREFIX}), (0, {"xpress": REFINER | {"num_jacobi_passes": 1}})],
        (6, {"dflash2": SELECTOR | {"selector_top_k": V}, "is_causal": False}),
    ],
)
def test_blocks_in_eight_bits_and_on_a_gpus_kernels(
    window: int, own: Config, llama: Llama, plain: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["sliding_attention" if window else "full_attention", "full_attention"]
    dflash(llama, tmp_path / "head", loud=False, layer_types=kinds, sliding_window=window or None, **own)
    floats = block_scores(opened(plain, tmp_path / "head"))
    rounded = block_scores(opened(plain, tmp_path / "head", draft_dtype="int8"))
    assert (rounded - floats).norm() < (0.2 if "dflash2" in own else 0.1) * floats.norm()  # of weights made by products
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    torch.testing.assert_close(block_scores(opened(plain, tmp_path / "head")), floats, rtol=2e-3, atol=2e-3)


def test_the_reference_of_blocks_is_transformers_own(llama: Llama, tmp_path: Path) -> None:
    """transformers has one assistant of this kind, whose layers all look both ways."""
    module = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    reference = dflash(llama, tmp_path / "head")
    c = reference.sizes
    config = module.MuseGlimmerAssistantConfig(
        hidden_size=H, intermediate_size=c["intermediate_size"], num_hidden_layers=c["num_hidden_layers"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5, vocab_size=V,
        target_layer_ids=[0, 3, 7], block_size=K + 1, mask_token_id=9, max_position_embeddings=64,
        layer_types=["full_attention"] * c["num_hidden_layers"],
        rope_parameters={"rope_type": "default", "rope_theta": c["rope_theta"]},
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = module.MuseGlimmerAssistantModel(config).double().eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): torch.tensor(tensor) for name, tensor in reference.w.items()})
    tokens = [(13 * i + 5) % V for i in range(9)]
    states = [np.concatenate([row[b] for b in (1, 4, 8)]) for row in llama.states(tokens[:-1])]
    block = np.stack([reference.embedding[tokens[-1]], *[reference.mask] * K])
    with torch.inference_mode():
        got = theirs(torch.tensor(block)[None], torch.tensor(np.stack(states))[None]).last_hidden_state[0]
    np.testing.assert_allclose(got.numpy(), np.stack(reference.hidden(tokens)), rtol=1e-5, atol=1e-5)


def test_the_reference_of_blocks_would_notice(llama: Llama, tmp_path: Path) -> None:
    """Rows that see less, another mask, another tap, another token before: none of them drafts the same."""
    right, text = FORMATS["dspark"](llama, tmp_path / "head"), [(31 * i * i + 3) % V for i in range(1, 9)]
    chain = right.draft(text, K)
    for change in ({"causal": True}, {"windows": [3, 3, 3, 3, 3]}):
        assert DFlash(llama, right.w, right.sizes, [1, 4, 8], **right.flags | change).draft(text, K) != chain
    assert DFlash(llama, right.w, right.sizes, [1, 4, 8], **right.flags | {"mask": 10}).draft(text, K) != chain
    assert DFlash(llama, right.w, right.sizes, [2, 4, 8], **right.flags).draft(text, K) != chain
    right.w["markov_head.markov_w2.weight"] *= 0
    assert right.draft(text, K) != chain


def test_the_reference_of_prefixes_is_torchs_and_would_notice(llama: Llama, tmp_path: Path) -> None:
    """Domino's state is torch's own GRU; another state, another place to begin or no correction drafts otherwise."""
    right, text = domino(llama, tmp_path / "head"), [(31 * i * i + 3) % V for i in range(1, 9)]
    unit = torch.nn.GRU(H, 12, bias=False, dtype=torch.float64)
    unit.load_state_dict({name: torch.tensor(right.w[f"prefix_gru.{name}"]) for name in unit.state_dict()})
    _, state = unit(torch.tensor(right.embedding[text[:4]]))
    np.testing.assert_allclose(right.prefix(text[:4]), state[0].detach().numpy(), rtol=1e-9)
    chain = right.draft(text, K)
    for name in ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.2.weight"):
        other = DFlash(llama, right.w | {name: -right.w[name]}, right.sizes, [1, 4, 8], **right.flags)
        assert other.draft(text, K) != chain
    later = DFlash(llama, right.w, right.sizes, [1, 4, 8], **right.flags | {"corrected_from": 2})
    assert later.draft(text, K) != chain
    for kind, part in (("dspark_gated", "gate_proj"), ("dspark_rnn", "joint_proj")):
        right, name = FORMATS[kind](llama, tmp_path / kind), f"markov_head.{part}.weight"
        other = DFlash(llama, right.w | {name: -right.w[name]}, right.sizes, [1, 4, 8], **right.flags)
        assert other.draft(text, K) != right.draft(text, K)


def test_the_reference_of_mtp_is_transformers_own(llama: Llama, tmp_path: Path) -> None:
    """transformers' class of such layers, around its Qwen3 layer."""
    reference, tokens = mtp(llama, tmp_path / "head"), [(13 * i + 5) % V for i in range(6)]
    config: Any = transformers.Qwen3Config(**reference.sizes | {"num_hidden_layers": 1}, attn_implementation="eager")
    model = transformers.AutoModel.from_config(config)
    theirs = MtpLayer(config, type(model.layers[0]), type(model.norm), 0).double().eval()
    names = dict(zip(reference.names, ("enorm", "hnorm", "eh_proj", "mtp_block", "post_norm"), strict=True))
    stored = {}
    for name, tensor in reference.w.items():
        ours = max((known for known in names if name.startswith(known)), key=len)
        stored[names[ours] + name.removeprefix(ours)] = torch.tensor(tensor)
    theirs.load_state_dict(stored)
    rows, attentions = [row[-1] for row in llama.states(tokens[:-1])], reference.attentions()
    reference.flags["norm_output"] = True
    expected = [reference.row(attentions, tokens[p + 1], state, p)[1] for p, state in enumerate(rows)]
    given = [torch.tensor(np.stack(each))[None] for each in ([reference.embedding[t] for t in tokens[1:]], rows)]
    positions, mask = (
        torch.arange(len(rows))[None],
        torch.full((len(rows),) * 2, -torch.inf).triu(1)[None, None].double(),
    )
    with torch.inference_mode():
        rope = model.rotary_emb(given[0], positions)
        got = theirs(*given, rope, mask, position_ids=positions, past_key_values=None)[0]
    np.testing.assert_allclose(got.numpy(), np.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", READINGS)
def test_the_reference_of_layers_would_notice(name: str, llama: Llama, tmp_path: Path) -> None:
    """Each other reading, and the other order of token and state, draft something else."""
    texts = [[(seed * i * i + 31 * i) % V for i in range(1, 7)] for seed in (3, 5, 11)]
    reference, drafts = FORMATS[name](llama, tmp_path / "head"), []
    for flags in READINGS[name]:
        reference.flags |= flags
        drafts.append([reference.draft(text, 4) for text in texts])
    product = f"{reference.names[2]}.weight"
    reference.w[product] = np.roll(reference.w[product], H, 1)
    drafts.append([reference.draft(text, 4) for text in texts])
    assert all(one != other for i, one in enumerate(drafts) for other in drafts[:i])


@pytest.mark.parametrize("name", READINGS)
@pytest.mark.parametrize("normed", [True, False])
def test_which_state_a_layer_reads_is_found_by_trial(
    name: str, normed: bool, llama: Llama, plain: LLM, tmp_path: Path
) -> None:
    """Where the target's choices are what the reference drafts, that reading of the state agrees most often."""
    reference, text = FORMATS[name](llama, tmp_path / "head"), [(31 * i * i + 7 * i) % V for i in range(1, 19)]
    reference.flags |= {"normed": normed, "norm_output": True}
    space = Workspace(plain.target, Cache(64, 2, 64), plain.engine.target.plane, {"head": str(tmp_path / "head")})
    head, readings = open_head(space).head, read_published(tmp_path / "head", plain.target.config).readings
    trial, configs = Trial(space, text, [LAYERS - 1]), [reading.config for reading in readings]
    for at in range(1, len(text)):
        trial.choices[at] = reference.draft(text[: at + 1], 1)[0]
    shares = {config: trial.agreement(head.read_as(config)) for config in configs}  # type: ignore[union-attr, arg-type]
    assert {config.normed for config in configs if shares[config] == max(shares.values())} == {normed}  # type: ignore[union-attr]
    assert max(shares.values()) >= (len(text) - 1) / (2 * len(text) - 3)


def test_the_reference_of_convolutions_and_candidates_would_notice(llama: Llama, tmp_path: Path) -> None:
    """Each part of DFlash2 decides: other weights, candidates, limits or windows draft otherwise."""
    right, starts = dflash2(llama, tmp_path / "head"), (31, 7, 57)
    texts = [[(n * i * i + 3) % V for i in range(1, 9)] for n in starts]
    chains = [right.draft(text, K) for text in texts]
    for name in right.w:
        if "_conv." in name or "selector" in name:
            other = DFlash(llama, right.w | {name: -right.w[name]}, right.sizes, [1, 4, 8], **right.flags)
            assert [other.draft(text, K) for text in texts] != chains, name
    for change in ({"top": 1}, {"cap": 0.0}, {"scale": 1.0}, {"embedding_scale": 1.0}, {"two_sided": False}):
        other = DFlash(llama, right.w, right.sizes, [1, 4, 8], **right.flags | change)
        assert [other.draft(text, K) for text in texts] != chains, change


def test_the_reference_of_passes_would_notice(llama: Llama, tmp_path: Path) -> None:
    """Each part of XPress decides, and so do its passes, until they are as many as places."""
    right, text = xpress(llama, tmp_path / "head"), [(57 * i * i + 3) % V for i in range(1, 9)]
    chain = right.draft(text, K)
    for name in right.w:
        if "refiner_head" in name:
            other = DFlash(llama, right.w | {name: -right.w[name]}, right.sizes, [1, 4, 8], **right.flags)
            assert other.draft(text, K) != chain, name
    by = {n: DFlash(llama, right.w, right.sizes, [1, 4, 8], **right.flags | {"passes": n}) for n in (0, 2, K, K + 1)}
    chains = {n: other.draft(text, K) for n, other in by.items()}
    assert chain not in (chains[0], chains[2], chains[K])
    assert chains[K] == chains[K + 1]
    assert right.draft([*text[:-2], 5, text[-1]], K) != chain, "the token before the last one is read"


def test_our_own_head_is_read_as_a_foreign_one(target: Path, tmp_path: Path) -> None:
    """The same acceptance from our folder, from one for SGLang and from one for vLLM, whose origin is struck out."""
    own = tmp_path / "home" / "heads" / "own"
    checkpoint = open_checkpoint(target)
    config, tensors = random_head(checkpoint.config, hash=target_hash(checkpoint.config, checkpoint.weights))
    write_head(own, config, tensors)
    plain = LLM(target, drafter="off", dtype="float32", device="cpu")
    folders = [own]
    for engine in ("sglang", "vllm"):
        arguments = ["-m", str(target), "--to", engine, "--out", str(tmp_path / engine), "--drafter", "head"]
        done = CliRunner().invoke(app, ["export", *arguments])
        assert done.exit_code == 0, done.output
        folders.append(tmp_path / engine / "drafter")
        data = json.loads((folders[-1] / "config.json").read_text())
        data.pop("outrider", None)
        (folders[-1] / "config.json").write_text(json.dumps(data))
    drafted, scores = [], []
    for folder in folders:
        llm = plain.using(drafter="head", head=str(folder), k=4, stop_below=0.0)
        scores.append(scored(llm.engine.drafter.rollout.head))  # type: ignore[attr-defined]
        (result,) = llm.generate("the lazy dog", SamplingParams(max_tokens=30, ignore_eos=True))
        drafted.append((result.stats.tau, result.stats.drafted, result.token_ids))
    assert drafted[0] == drafted[1] == drafted[2]
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


# ------------------------------------------------------------ what a file does not say


def fitted(llama: Llama, text: list[int], boundaries: list[int], normed: bool, tensors: Tensors) -> Tensors:
    """A head without attention and MLP whose fused states lead to the target's own choices in this text."""
    states = llama.states(text)
    joined = torch.tensor(np.array([np.concatenate([row[b] for b in boundaries]) for row in states[:-1]]))
    wanted = torch.randn(V, H, dtype=torch.float64, generator=SEED.manual_seed(1))
    choices = [llama.choice(row[-1]) for row in states[1:]]
    hidden = tensors["midlayer.hidden_norm.weight"].double()
    goal = wanted[choices] / (hidden if normed else 1.0)
    tensors["fc.weight"] = torch.linalg.lstsq(joined, goal).solution.T.float().contiguous()
    tensors |= {"norm.weight": torch.ones(H), "lm_head.weight": wanted.float()}
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name] = torch.zeros_like(tensors[name])
    return tensors


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", ["outputs", "inputs", "residual after", "residual before"])
def test_what_a_file_leaves_open_is_found_by_trial(
    case: str, llama: Llama, target: Path, plain: LLM, tmp_path: Path
) -> None:
    tokenizer = open_checkpoint(target).tokenizer
    text = [i for prompt in bundled() for i in tokenizer.encode(prompt.text + "\n\n")][:TOKENS]
    c, after = sizes(), case == "residual after"
    tensors = eagle3(c, V)
    tensors["midlayer.hidden_norm.weight"] = torch.where(torch.arange(H) % 2 == 0, 3.0, -0.5)
    tensors = fitted(llama, text, [3, 5, 7] if case == "outputs" else [2, 4, 6], after, tensors)
    if "residual" in case:
        config = speculators_format(c, tensors, [2, 4, 6], draft_vocab_size=V)
        says = f"the residual begins {'after' if after else 'before'} the norm"
    else:
        taps = {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
        config, says = c | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": taps}, f"whose {case} are read"
    saved(tmp_path / "head", config, tensors)
    reading = plain.using(drafter="head", head=str(tmp_path / "head"), k=2).drafting["head"]["reading"]
    assert says in reading
    assert reading.startswith("Of 2 readings of the file the best one agrees with the target in")
    (remembered,) = (tmp_path / "home" / "readings").iterdir()
    known = json.loads(remembered.read_text())
    assert max(known["agreement"]) > 1.3 * min(known["agreement"])
    remembered.write_text(json.dumps(known | {"agreement": [0.25, 0.75]}))
    llm = plain.using(drafter="head", head=str(tmp_path / "head"), k=2)
    assert "75%" in llm.drafting["head"]["reading"]  # without another trial
    remembered.write_text("{")  # a damaged memory is made again
    assert llm.using(k=3).drafting["head"]["reading"] == reading


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("stated", [True, False])
def test_whether_a_blocks_first_row_predicts_is_found_by_trial(
    anchored: bool, stated: bool, llama: Llama, target: Path, plain: LLM, tmp_path: Path
) -> None:
    """A block drafter without attention: its first row knows the last token, its masks know the likeliest choice."""
    tokenizer = open_checkpoint(target).tokenizer
    text = [i for prompt in bundled() for i in tokenizer.encode(prompt.text + "\n\n")][:TOKENS]
    choices = [llama.choice(row[-1]) for row in llama.states(text)]
    dflash(llama, tmp_path / "head", K + (not anchored), sample_from_anchor=anchored if stated else None)
    data, tensors = json.loads((tmp_path / "head" / "config.json").read_text()), {}
    for name, tensor in load_file(tmp_path / "head" / "model.safetensors").items():
        tensors[name] = tensor * (not name.endswith(("o_proj.weight", "down_proj.weight")))
    embedding = torch.randn(V, H, generator=SEED.manual_seed(4))
    output, usual = torch.zeros(V, H), max(set(choices), key=choices.count)
    for token, choice in zip(text, choices, strict=True):
        output[choice if anchored else (choice + 1) % V] += embedding[token] / embedding[token].norm() ** 2
    mask = torch.randn(H, generator=SEED.manual_seed(5))
    output[(usual + 1) % V if anchored else usual] += 9 * mask
    tensors |= {"norm.weight": torch.ones(H), "embed_tokens.weight": embedding, "lm_head.weight": output}
    saved(tmp_path / "head", data, tensors | {"mask_embedding": mask})
    llm = plain.using(drafter="head", head=str(tmp_path / "head"), k=2)
    head, reading = llm.engine.drafter.rollout.head, llm.drafting["head"].get("reading", "")  # type: ignore[attr-defined]
    assert head.config.anchored == anchored
    assert head.config.block == K
    assert reading == "" if stated else f"first row predicts {'too' if anchored else 'nothing'}" in reading


def test_copies_of_the_target_are_shared_with_it(llama: Llama, plain: LLM, tmp_path: Path) -> None:
    dspark(llama, tmp_path / "head")
    head = plain.using(drafter="head", head=str(tmp_path / "head")).engine.drafter.rollout.head  # type: ignore[attr-defined]
    target: Any = plain.target
    assert head.shares_output
    assert head.embedding.data_ptr() == target.embedding.data_ptr()
    tensors = load_file(tmp_path / "head" / WEIGHTS)
    tensors["lm_head.weight"][61] += 1
    save_file(tensors, tmp_path / "head" / WEIGHTS)
    head = plain.using(drafter="head", head=str(tmp_path / "head")).engine.drafter.rollout.head  # type: ignore[attr-defined]
    assert not head.shares_output


@pytest.mark.parametrize("anchored", [True, False])
def test_blocks_are_tried_behind_the_texts_own_tokens(anchored: bool, llama: Llama, plain: LLM, tmp_path: Path) -> None:
    """Where the target's choices are what the reference drafts there, a trial finds full agreement."""
    reference = dflash(llama, tmp_path / "head", K, sample_from_anchor=anchored)
    space = Workspace(plain.target, Cache(64, 2, 64), plain.engine.target.plane, {"head": str(tmp_path / "head")})
    head, text = open_head(space).head, [(31 * i * i + 7 * i) % V for i in range(1, 19)]
    assert isinstance(head, DFlashHead)
    trial = Trial(space, text, sorted(head.config.taps))
    for at in range(1, len(text) - 2, BLOCK_EVERY):
        trial.choices[at : at + 2] = torch.tensor(reference.draft(text[: at + 1], 2))
    assert trial.agreement(head) == 1
    trial.choices[5] = (trial.choices[5] + 1) % V
    assert trial.agreement(head) == 7 / 8


def test_which_reading_of_a_block_is_the_likeliest(llama: Llama, plain: LLM, tmp_path: Path) -> None:
    for markov, anchored in ((5, True), (0, False)):
        dflash(llama, tmp_path / str(markov), K, markov=markov, sample_from_anchor=None)
        readings = read_published(tmp_path / str(markov), plain.target.config).readings
        assert [reading.config.anchored for reading in readings] == [anchored, not anchored]  # type: ignore[union-attr]
        assert [reading.config.block for reading in readings] == [K - (not anchored), K - anchored]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("speculators", "an EAGLE-3 head"), ("mtp", "an MTP head"), ("dflash2_speculators", "a DFlash2 drafter"),
        ("xpress", "an XPress drafter"),
    ],
)  # fmt: skip
def test_the_doctor_says_what_a_head_is(name: str, what: str, llama: Llama, target: Path, tmp_path: Path) -> None:
    FORMATS[name](llama, tmp_path / "head")
    arguments = ["doctor", "-m", str(target), "--head", str(tmp_path / "head"), "--dtype", "float32"]
    done = CliRunner().invoke(app, [*arguments, "--limit", "1", "-n", "4", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["head"]["format"] == f"{what} in the speculators format"
    assert ("the target's states are read" in facts["head"]["reading"]) == (name == "mtp")
    says = [finding["text"] for finding in facts["findings"]]
    assert any("trained for some/target; it fits this target." in text for text in says)
    both = CliRunner().invoke(app, [*arguments, "--drafter", "suffix"])
    assert both.exit_code == 1
    assert "leave one of them out" in both.output


def test_a_file_of_llama_cpp_is_named_like_a_folder(llama: Llama, target: Path, plain: LLM, tmp_path: Path) -> None:
    """Rounded to eight bits; by its own name or its folder's, in vLLM's configuration, and listed as a head."""
    in_gguf(Kind.Q8_0, llama, tmp_path / "head", hidden=32)
    file = tmp_path / "head" / "head.gguf"
    arguments = ["doctor", "-m", str(target), "--head", str(file), "--dtype", "float32"]
    done = CliRunner().invoke(app, [*arguments, "--limit", "1", "-n", "4", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["head"]["format"] == "an EAGLE-3 head in a GGUF file"
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    said = [plain.using(drafter="head", head=str(at), k=3).generate("one", params) for at in (file, file.parent)]
    assert said[0][0].token_ids == said[1][0].token_ids == plain.generate("one", params)[0].token_ids
    assert said[0][0].stats.drafted
    for at in (file, file.parent):
        assert from_speculative_config({"model": str(at)}) == {"drafter": "head", "head": str(at)}
    assert (describe("it", file).kind, describe("it", file.parent).about) == ("head", "eagle3 head in a GGUF file")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target_layers": [2, 4, 9]}, "reads layer 8, but this target has 8"),
        ({"target_layers": [2, 4]}, "names 2 layers of its target"),
        ({"target_layers": "2, 4, 8"}, "is not as a head of its kind has it"),
        ({"target_hidden_size": 24}, "reads 4 of them"),
        ({"arch": "dflash"}, "is not as a head of its kind has it (KeyError: 'block_size')"),
        ({"arch": "llama"}, "is not a trained head but 'llama' (a whole model goes with --draft-model)"),
        ({"attn_sinks": True}, "midlayer.self_attn.sinks.weight' that no head known"),
        ({"cut": True}, "incomplete or damaged"),
        ({"missing": True}, "no tensor 'midlayer.mlp.up_proj.weight'"),
    ],
)
def test_a_file_of_llama_cpp_with_one_thing_wrong(
    change: dict[str, Any], says: str, llama: Llama, plain: LLM, tmp_path: Path
) -> None:
    c, file = sizes(24), tmp_path / "head.gguf"
    tensors = eagle3(c)
    keys = {"target_layers": [2, 4, 8], "target_hidden_size": H} | change
    arch, cut, missing, sinks = (keys.pop(name, None) for name in ("arch", "cut", "missing", "attn_sinks"))
    if missing:
        del tensors["midlayer.mlp.up_proj.weight"]
    if sinks:
        tensors["midlayer.self_attn.sinks.weight"] = torch.zeros(4)
    write_gguf_head(file, arch or "eagle3", c, tensors, **keys)
    if cut:
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OutriderError) as error:
        plain.using(drafter="head", head=str(file))
    assert says in str(error.value)
    assert str(error.value).endswith(".")
    assert str(file) in str(error.value)


# ------------------------------------------------------------ what is wrong


def broken(llama: Llama, to: Path, what: str) -> None:
    """A folder of SpecForge's kind with one thing wrong."""
    specforge(llama, to)
    data, tensors = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
    if what == "missing":
        del tensors["midlayer.mlp.up_proj.weight"]
    elif what == "misshapen":
        data["intermediate_size"] = 41
    elif what == "unknown tensor":
        tensors["adapter.weight"] = torch.zeros(2)
    elif what == "no offsets":
        del tensors["d2t"]
    elif what == "offsets":
        tensors["d2t"] = tensors["d2t"] + 200
    elif what == "other width":
        data["hidden_size"] = 24
    elif what == "other vocabulary":
        data["vocab_size"] = 301
    elif what == "deeper":
        data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 14, 28]
    elif what == "fewer taps":
        data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 3]
    elif what == "activation":
        data["hidden_act"] = "gelu"
    elif what == "quantised":
        tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    elif what == "last state":
        data["eagle_config"]["use_aux_hidden_state"] = False
    elif what == "sizes":
        data["num_attention_heads"] = "four"
    elif what == "heads":
        data["num_attention_heads"] = 0
    elif what == "immense":
        data["vocab_size"] = 1 << 40
    elif what == "rope":
        data["rope_theta"] = -1
    elif what == "kind":
        data["architectures"] = ["DFlashLinearDraftModel"]
    elif what == "algorithm":
        data["speculators_model_type"] = "eagle0"
    elif what == "later algorithm":
        data["speculators_model_type"] = "eagle9"
    elif what == "norms":
        eagle1_speculators(llama, to)
        data, tensors = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
        tensors["embedding_layernorm.weight"] = torch.ones(H)
    elif what == "whole model":
        data = {"model_type": "llama", "num_hidden_layers": 12}
    saved(to, data, tensors)
    if what == "truncated":
        whole = (to / "model.safetensors").read_bytes()
        (to / "model.safetensors").write_bytes(whole[:-50])
    elif what == "no weights":
        (to / "model.safetensors").unlink()
    elif what == "no json":
        (to / "config.json").write_text("[")
    elif what == "code":
        (to / "model.safetensors").unlink()
        torch.save({"fc.weight": Path()}, to / "pytorch_model.bin")


BROKEN = {
    "missing": "no tensor 'midlayer.mlp.up_proj.weight'", "misshapen": "shape", "unknown tensor": "adapter.weight",
    "no offsets": "no tensor 'd2t'", "offsets": "draft vocabulary", "other width": "'fc.weight' has the shape",
    "other vocabulary": "vocabulary of 301, this one of 300", "deeper": "reads layer 28, but this target has 8",
    "fewer taps": "names 2 layers of its target, but its fc.weight reads 3", "activation": "activation 'gelu'",
    "quantised": "quantised weights", "last state": "has 'fc.weight'", "sizes": "config.json",
    "heads": "fit together", "kind": "DFlash linear", "algorithm": "'eagle0' drafter", "whole model": "--draft-model",
    "immense": "fit together", "rope": "fit together",
    "truncated": "damaged", "no weights": "no .safetensors", "no json": "cannot be read", "code": "more than tensors",
    "later algorithm": "'eagle9' drafter", "norms": "'embedding_layernorm.weight' that no head known",
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_reported_in_a_sentence(what: str, llama: Llama, plain: LLM, tmp_path: Path) -> None:
    broken(llama, tmp_path / "head", what)
    with pytest.raises(OutriderError) as error:
        plain.using(drafter="head", head=str(tmp_path / "head"))
    message = str(error.value)
    assert BROKEN[what] in message
    assert message.endswith(".")
    assert "\n" not in message
    assert str(tmp_path / "head") in message or what in ("activation", "heads", "immense", "rope")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("gguf")])
def test_a_configuration_that_lies_is_a_sentence_or_a_head(name: str, llama: Llama, plain: LLM, tmp_path: Path) -> None:
    FORMATS[name](llama, tmp_path / "head")
    refused, file = list[str](), tmp_path / "head" / "config.json"
    for data in lies(json.loads(file.read_text())):
        file.write_text(json.dumps(data))
        try:
            read_published(tmp_path / "head", plain.target.config)
        except ModelError as error:
            refused.append(str(error))
    assert refused
    assert not [message for message in refused if "\n" in message or not message.endswith(".")]


AT = "mtp_layers.0."
SPOILT_LAYERS: dict[str, tuple[str, dict[str, Tensor | None], dict[str, Any], str]] = {
    "no norm": ("mtp", {f"{AT}final_layernorm.weight": None}, {}, "no tensor 'norm.weight'"),
    "no norms of heads": ("mtp", {f"{AT}self_attn.{n}_norm.weight": None for n in "qk"}, {},
                          "no tensor 'midlayer.self_attn.q_norm.weight'"),
    "misshapen": ("mtp", {f"{AT}input_proj.weight": torch.zeros(H, H)}, {}, "'fc.weight' has the shape [32, 32]"),
    "second layer": ("mtp", {"mtp_layers.1.input_proj.weight": torch.zeros(H, H)}, {},
                     "'mtp_layers.1.input_proj.weight' that no head known"),
    "bias": ("mtp", {f"{AT}self_attn.o_proj.bias": torch.zeros(H)}, {}, "o_proj.bias' that no head known"),
    "other kind": ("mtp", {}, {"model_type": "qwen3_next"}, "kind 'qwen3_next'; those are read of qwen3, and"),
    "other vocabulary": ("mtp", {}, {"vocab_size": 301}, "vocabulary of 301, this one of 300"),
    "other width": ("mtp", {}, {"hidden_size": 24}, "has the shape"),
    "no input norm": ("eagle1_layernorms", {"transformer.input_layernorm.weight": None}, {},
                      "no tensor 'midlayer.input_layernorm.weight'"),
    "no last norm": ("eagle1_layernorms", {"pre_lm_head_layernorm.weight": None}, {}, "no tensor 'norm.weight'"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT_LAYERS)
def test_layers_in_the_speculators_format_are_checked_too(what: str, llama: Llama, plain: LLM, tmp_path: Path) -> None:
    name, changes, settings, says = SPOILT_LAYERS[what]
    FORMATS[name](llama, tmp_path)
    data, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / WEIGHTS)
    data["transformer_layer_config"] |= settings
    saved(tmp_path, data, {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None})
    with pytest.raises(OutriderError) as error:
        plain.using(drafter="head", head=str(tmp_path))
    message = str(error.value)
    assert says in message
    assert str(tmp_path) in message
    assert message.endswith(".")
    assert "\n" not in message


def spoilt_per_position(llama: Llama, to: Path, what: str) -> None:
    (mlp if what.startswith("mlp") else medusa)(llama, to)
    if what == "medusa gap":
        tensors = torch.load(to / "medusa_lm_head.pt", weights_only=True)
        del tensors["2.0.linear.weight"]
        torch.save(tensors, to / "medusa_lm_head.pt")
    elif what == "medusa other":
        torch.save({"0.weight": torch.zeros(2)}, to / "medusa_lm_head.pt")
    else:
        data = json.loads((to / "config.json").read_text())
        data |= {"mlp width": {"emb_dim": 48}, "mlp length": {"n_predict": 0}, "mlp shape": {"inner_dim": 12}}[what]
        (to / "config.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("medusa gap", "no tensor 'blocks.2.0.weight'"),
        ("medusa other", "'0.weight' that no Medusa head has"),
        ("mlp width", "'proj.0.weight' has the shape"),
        ("mlp length", "n_predict"),
        ("mlp shape", "has the shape"),
    ],
)
def test_heads_without_attention_are_checked_too(
    what: str, says: str, llama: Llama, plain: LLM, tmp_path: Path
) -> None:
    spoilt_per_position(llama, tmp_path / "head", what)
    with pytest.raises(OutriderError, match=says):
        plain.using(drafter="head", head=str(tmp_path / "head"))


def spoilt_block(llama: Llama, to: Path, what: str) -> None:
    """A DFlash or P-EAGLE folder with one thing wrong."""
    kinds = ("peagle", "dspark", "domino", "dflash2_speculators", "xpress")
    FORMATS[next((kind for kind in kinds if what.startswith(kind.split("_")[0])), "dflash")](llama, to)
    data, tensors = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
    own = data.get("dflash_config", {})
    changes = {"dflash2 taps": {"conv_kernel_size": 2}, "dflash2 groups": {"conv_group_size": 5},
               "dflash2 rank": {"selector_rank": 6}, "dflash2 none": {"selector_top_k": 0},
               "dflash2 crowd": {"selector_top_k": V + 1}, "dflash2 word": {"conv_group_size": "few"},
               "dflash2 words": {"draft_vocab_size": D}, "xpress backwards": {"num_jacobi_passes": -1},
               "xpress rank": {"xpress_rank": 7}, "xpress ratio": {"xpress_mlp_ratio": 4},
               "xpress block": {"block_size": K}, "xpress word": {"num_jacobi_passes": "few"}}  # fmt: skip
    if what in changes:
        data |= changes[what]
    elif what == "dflash2 lost":
        del tensors["candidate_selector.hidden_projection.weight"]
    elif what == "xpress lost":
        del tensors["refiner_head.mix_l"]
    elif what == "xpress backbone":
        tensors["layers.0.mlp_conv.base_kernel"] = torch.zeros(2, 3, H)
    elif what == "dflash2 kernel":
        tensors["layers.1.mlp_conv.base_kernel"] = torch.zeros(2, 3, H - 1)
    elif what.endswith("gap") and what != "domino gap":
        del tensors["layers.1.mlp.up_proj.weight"]
    elif what == "dspark gated":
        tensors["markov_head.gate_proj.weight"] = torch.zeros(2, 2)
        tensors["markov_head.gate_proj.bias"] = torch.zeros(5)
    elif what == "dspark other":
        data["markov_head_type"] = "fir"
    elif what == "dspark without":
        data["markov_head_type"] = "rnn"
    elif what == "dspark rank":
        tensors["markov_head.markov_w2.weight"] = torch.zeros(V, 4)
    elif what == "domino gap":
        del tensors["prefix_gru.weight_hh_l0"]
    elif what == "domino state":
        own["gru_hidden_dim"] = 11
    elif what == "domino silent":
        del own["emb_dim"]
    elif what == "domino before":
        own["pure_draft_prefix_len"] = -1
    elif what == "peagle width":
        tensors["mask_hidden"] = torch.zeros(1, 1, 2 * H)
    elif what == "peagle mask":
        tensors.pop("mask_hidden")
    elif what == "peagle token":
        data["mask_token_id"] = V
    elif what == "no mask":
        del own["mask_token_id"]
    elif what == "mask outside":
        own["mask_token_id"] = V
    elif what == "fewer taps":
        own["target_layer_ids"] = [0, 3]
    elif what == "deeper":
        own["target_layer_ids"] = [0, 3, 28]
    else:
        data |= {"sizes": {"head_dim": 8}, "other target": {"num_target_layers": 36}, "other vocabulary": {
            "vocab_size": 299}, "block": {"block_size": 1},
            "width": {"hidden_size": 24}, "word": {"block_size": "nine"}}[what]  # fmt: skip
    saved(to, data, tensors)


SPOILT = {
    "dflash gap": "no tensor 'layers.1.mlp.up_proj.weight'", "dspark gap": "no tensor 'layers.1.mlp.up_proj.weight'",
    "dspark gated": "'markov_head.gate_proj.weight' has the shape [2, 2]", "dspark other": "kind 'fir'",
    "dspark without": "no tensor 'markov_head.joint_proj.weight'", "dspark rank": "has the shape [300, 4]",
    "domino gap": "no tensor 'prefix_gru.weight_hh_l0'", "domino state": "has the shape [36, 32] instead of [33, 32]",
    "domino silent": "KeyError: 'emb_dim'", "domino before": "fit together",
    "dflash2 gap": "no tensor 'layers.1.mlp.up_proj.weight'",
    "dflash2 taps": "has the shape [2, 3, 32] instead of [2, 2, 32]", "dflash2 groups": "fit together",
    "dflash2 rank": "'candidate_selector.predecessor_codebook' has the shape [300, 5] instead of [300, 6]",
    "dflash2 none": "fit together", "dflash2 crowd": "fit together", "dflash2 word": "ValueError",
    "dflash2 words": "no tensor 'd2t'", "dflash2 lost": "no tensor 'candidate_selector.hidden_projection.weight'",
    "dflash2 kernel": "'layers.1.mlp_conv.base_kernel' has the shape [2, 3, 31]",
    "xpress backwards": "fit together", "xpress word": "ValueError", "xpress lost": "no tensor 'refiner_head.mix_l'",
    "xpress rank": "'refiner_head.token_embed.weight' has the shape [300, 8] instead of [300, 7]",
    "xpress ratio": "'refiner_head.mlp_gate.weight' has the shape [16, 8] instead of [32, 8]",
    "xpress block": "'refiner_head.mix_l' has the shape [8, 7, 7] instead of [8, 6, 6]",
    "xpress backbone": "'midlayer.mlp_conv.base_kernel' that no head known",
    "peagle gap": "no tensor 'layers.1.mlp.up_proj.weight'", "peagle width": "'mask_hidden' has the shape",
    "peagle mask": "without 'mask_hidden'", "peagle token": "mask_token_id", "no mask": "(mask_token_id)",
    "mask outside": "the mask 300", "fewer taps": "names 2 layers of its target, but its fc.weight reads 3",
    "deeper": "reads layer 28, but this target has 8", "sizes": "has the shape", "other target": "36 layers",
    "other vocabulary": "vocabulary of 299, this one of 300", "block": "blocks of 1",
    "width": "names 3 layers of its target, but its fc.weight reads 4", "word": "config.json",
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", SPOILT)
def test_blocks_are_checked_too(what: str, llama: Llama, plain: LLM, tmp_path: Path) -> None:
    spoilt_block(llama, tmp_path / "head", what)
    with pytest.raises(OutriderError) as error:
        plain.using(drafter="head", head=str(tmp_path / "head"))
    message = str(error.value)
    assert SPOILT[what] in message
    assert str(tmp_path / "head") in message or "fit together" in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("name", ["specforge", "eagle1", "medusa", "mlp", "dflash2", "speculators", "gguf"])
def test_a_head_in_place_of_a_model_is_named(name: str, llama: Llama, plain: LLM, tmp_path: Path) -> None:
    FORMATS[name](llama, tmp_path / "head")
    at = head_at(tmp_path / "head")
    with pytest.raises(ModelError, match=f"{at} is a trained head, not a whole model: use it .* --set head={at}."):
        plain.using(drafter="model", draft_model=at)


def test_what_cannot_use_them_says_so(llama: Llama, plain: LLM, tmp_path: Path) -> None:
    medusa(llama, tmp_path / "medusa")
    eagle1(llama, tmp_path / "eagle1")
    with pytest.raises(ConfigError, match="--drafter head only"):
        plain.using(drafter="ahead", head=str(tmp_path / "medusa"))
    dflash(llama, tmp_path / "dflash")
    with pytest.raises(ConfigError, match="cannot continue from its own guesses"):
        plain.using(drafter="ahead", head=str(tmp_path / "dflash"))
    for name in ("medusa", "eagle1", "dflash"):
        with pytest.raises(ConfigError, match="cannot learn while it serves"):
            plain.using(drafter="online", head=str(tmp_path / name))


# ------------------------------------------------------------ vLLM's words


def test_vllms_configuration_is_taken_as_it_is(llama: Llama, target: Path, tmp_path: Path) -> None:
    speculators(llama, tmp_path / "head")
    given = {"model": str(tmp_path / "head"), "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    for method in (
        {},
        {"method": "eagle3"},
        {"method": "eagle"},
        {"method": "mtp"},
    ):  # without a method, the folder tells it
        found = from_speculative_config(given | method)
        assert found == {"drafter": "head", "head": str(tmp_path / "head"), "k": 3}
    assert from_speculative_config({"model": str(target)}) == {"drafter": "model", "draft_model": str(target)}
    assert from_speculative_config({"method": "medusa", "model": "a/b", "revision": "v1"})["head"] == "a/b@v1"
    llm = LLM(target, dtype="float32", speculative_config=given)
    assert (llm.config.drafter_name, llm.config.k) == ("head", 3)


@pytest.mark.parametrize("name", ["speculators", "gguf", "mlp", "domino_unshifted"])
def test_vllms_configuration_on_the_command_line(name: str, llama: Llama, target: Path, tmp_path: Path) -> None:
    """The folder alone, without a method: the text of plain decoding, with drafts."""
    FORMATS[name](llama, tmp_path / "head")
    given = json.dumps({"model": head_at(tmp_path / "head"), "num_speculative_tokens": 4})
    arguments = ["generate", "one two", "-m", str(target), "--dtype", "float32", "--raw", "-n", "12", "--json"]
    plain, drafted = (
        CliRunner().invoke(app, [*arguments, *more])
        for more in (["--drafter", "off"], ["--speculative-config", given, "--set", "stop_below=0"])
    )
    assert (plain.exit_code, drafted.exit_code) == (0, 0), drafted.output
    texts = [json.loads(done.stdout) for done in (plain, drafted)]
    assert texts[0]["token_ids"] == texts[1]["token_ids"]
    assert texts[1]["drafted"] > 12


def test_any_value_in_vllms_configuration_is_a_sentence_or_taken(llama: Llama, plain: LLM, tmp_path: Path) -> None:
    specforge(llama, tmp_path / "head")
    head = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    for given in (head | {"rejection_sample_method": "standard"}, {"method": "ngram", "prompt_lookup_max": 4}):
        for changed in lies(given):
            with contextlib.suppress(OutriderError):
                plain.using(**from_speculative_config(changed))
    for text in ("[1]", "5", "null", '"x"', '{"method":'):
        with pytest.raises(ConfigError, match="is not a JSON object"):
            from_speculative_config(text)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"method": "eagle3", "model": "x", "num_speculative_token": 3},
            "'num_speculative_token'.*num_speculative_tok",
        ),
        ({"method": "ngram", "zzz": 1}, "key 'zzz', which is not known"),
        ({"method": "suffix", "rejection_sample_method": "synthetic"}, "not lossless"),
        ({"method": "ernie_mtp"}, "ernie_mtp.*not supported"),
    ],
)
def test_what_vllm_does_not_have_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_speculative_config(given)
