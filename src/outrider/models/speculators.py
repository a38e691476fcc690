"""A trained head or exit adapter as a folder: `config.json` in the speculators format, EAGLE-3's tensor names.

`read_head` returns complete and consistent tensors or raises; what `write_head` wrote is read back as the same numbers.
Matrices may be stored in blocks of four or eight bits (`models.blocks`): bytes, under their name and the kind of block.
`target_hash` identifies the target of a head, whatever the format of the target's files. This module knows names,
shapes and files, not what a head computes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..errors import MISREAD, ModelError
from .blocks import FORMATS, BlockTensor, block_size, encode
from .config import ModelConfig, RopeScaling, to_hf
from .paths import write_atomically
from .weights import save_tensors

KINDS = {"eagle3": "eagle3", "block": "peagle", "exit": "exit"}  # Outrider's -> speculators', which has no exit
EAGLE3 = "eagle3"  # continues from its own outputs, token by token
EAGLE1 = "eagle1"  # EAGLE-1, EAGLE-2, HASS and MTP in folders: read from what others have published, never written
MTP = "mtp"  # a layer of the target's own checkpoint, or one of its class
DFLASH = "dflash"  # DFlash, DFlash2, DSpark, Domino and XPress: read, never written
FORMAT = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
FIRST, SPECULATORS_FIRST = "midlayer.", "layers.0."  # the first layer in EAGLE's naming, and in speculators'
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
STORES = (*DTYPES, *(kind.lower() for kind in FORMATS))  # of a head's matrices on disk
GATED, RECURRENT = "gated", "rnn"  # variants of DSpark's term for the token before
MARKOV_PARTS = {GATED: "gate_proj", RECURRENT: "joint_proj"}  # and what they have besides
PREFIX_STATE = "prefix_gru.weight_hh_l0"  # a Domino drafter has it
_MOST_LAYERS = 16
_LARGEST = 1 << 24  # size of anything: a damaged one must not exhaust the memory
Shapes = dict[str, tuple[int, ...]]
HeadTensors = dict[str, Any]  # tensors; matrices may be a BlockTensor


class TensorSource(Protocol):
    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head or exit adapter, and its target."""

    kind: str  # eagle3, block, eagle1, mtp, dflash or exit
    hidden_size: int  # the target's, or less: a narrow head has its own embedding
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    taps: tuple[int, ...]  # layers of the target after which its residual stream is read
    layers: int = 1
    block: int = 6  # tokens of a draft in training
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    context_length: int = 2048
    target_hash: str = ""  # empty: any target
    target_name: str = ""
    target_hidden_size: int = 0  # 0: the same as the head's
    own_output: bool = True  # False: its output rows are the target's, and not in its file
    acceptance: tuple[float, ...] = field(default=(), compare=False)  # measured, by position, given the ones before
    # Variants that others have published. `outrider train` makes none of them.
    rope_scaling: RopeScaling | None = None
    windows: tuple[int, ...] = ()  # sliding window of each layer in rows, 0: none; empty: none has one
    own_embedding: bool = False  # it embeds tokens itself, although the target's embedding would fit
    fc_norm: bool = False  # each tapped state has a norm of its own before they are fused
    norm_before_fc: bool = False  # one norm over all tapped states
    fc_bias: bool = False
    norm_before_residual: bool = False  # the residual stream begins with the normed feature
    norm_output: bool = False  # drafted tokens continue from the normed output
    qk_norm: bool = False
    qkv_bias: bool = False
    logit_scale: float = 1.0
    normed: bool = False  # the target's last state is read after its last norm; in eagle3 it is the feature, without fc
    target_norm_eps: float = 1e-5  # of that norm
    layernorms: bool = False  # eagle1: of the token, of what attention reads and of the output
    state_norm: bool = False  # eagle1: of the target's state, or of the output that it continues from
    mask_token: int = 0  # dflash: whose embedding a mask has, unless the file has one
    own_mask: bool = False
    causal: bool = False  # dflash: a row of a block sees those before it only, in every layer
    anchored: bool = False  # dflash: a block's first row predicts too, and each row the token after its own position
    markov: int = 0  # dflash: the width of the term for the token before; 0: there is none
    markov_kind: str = ""  # dflash: a key of MARKOV_PARTS; empty: a term for the token before alone
    prefix_state: int = 0  # dflash: the width of a state over the tokens so far, which corrects scores; 0: none
    prefix_inner: int = 0  # the width within that correction
    prefix_from: int = 0  # the first token of a draft that it corrects
    two_sided: bool = False  # dflash: in layers with windows, too, rows see their whole block, which windows include
    conv: int = 0  # dflash: rows that convolutions around attention and MLP read; 0: there are none
    conv_group: int = 1  # channels that share what a row adds to a convolution's weights
    selector: int = 0  # dflash: the width of a choice among candidates by the token before; 0: there is none
    selector_top: int = 0  # how many candidates
    refiner: int = 0  # dflash: the width of a correction of whole blocks by their likeliest tokens; 0: there is none
    refiner_inner: int = 0  # the width within that correction
    refiner_passes: int = 0  # how often it is made
    embedding_scale: float = 1.0  # dflash: of the block's tokens and masks
    logit_cap: float = 0.0  # dflash: scores s become cap * tanh(s / cap); 0: they stay

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))
        object.__setattr__(self, "acceptance", tuple(min(max(float(a), 0.0), 1.0) for a in self.acceptance))
        object.__setattr__(self, "target_hidden_size", self.target_hidden_size or self.hidden_size)
        if self.kind not in (*KINDS, EAGLE1, MTP, DFLASH):
            raise ModelError(f"A head of the kind '{self.kind}' is not known; there are: {', '.join(KINDS)}.")
        sizes = (self.hidden_size, self.intermediate_size, self.heads, self.kv_heads, self.head_dim, self.vocab_size)
        fits = min(*sizes, self.draft_vocab_size, self.block, self.context_length, self.layers) > 0
        fits = fits and max(*sizes, self.prefix_state, self.prefix_inner) < _LARGEST and self.prefix_from >= 0
        fits = fits and 0 <= self.norm_eps < math.inf and 0 < self.rope_theta < math.inf
        fits = fits and (self.prefix_inner > 0 if self.prefix_state else self.prefix_state == 0)
        later = (self.conv, self.selector, self.selector_top, self.refiner, self.refiner_inner, self.refiner_passes)
        fits = fits and 0 <= min(later) <= max(later) < _LARGEST and self.conv_group > 0
        fits = fits and self.hidden_size % self.conv_group == 0
        fits = fits and bool(self.selector) <= self.selector_top <= self.draft_vocab_size
        fits = fits and 0 <= self.logit_cap < math.inf and -math.inf < self.embedding_scale < math.inf
        fits = fits and self.heads % max(self.kv_heads, 1) == 0 and self.head_dim % 2 == 0
        fits = fits and self.draft_vocab_size <= self.vocab_size and self.layers <= _MOST_LAYERS
        fits = fits and not (self.normed and self.narrow)
        if not fits or (self.windows and len(self.windows) != self.layers):
            raise ModelError("The head's configuration does not fit together; make the head again.")
        if self.kind == "exit" and self.narrow:
            raise ModelError("An early exit is as wide as its target.")
        if self.kind == "exit" and len(self.taps) != 1:
            raise ModelError(f"An early exit reads one layer of its target, not {list(self.taps)}.")
        if not self.taps or min(self.taps) < 0 or len(set(self.taps)) < len(self.taps):
            raise ModelError(f"A head reads different layers of its target, counted from 0, not {list(self.taps)}.")

    @property
    def parallel(self) -> bool:
        """Whether all tokens of a draft come from one pass, instead of each continuing from the one before."""
        return self.kind in ("block", DFLASH)

    @property
    def block_rows(self) -> int:
        """Rows of a block: a mask for each token of a draft behind the last token; if anchored, the first mask less."""
        return self.block + (not self.anchored)

    @property
    def narrow(self) -> bool:
        """Whether it embeds tokens itself, because the target's embedding does not fit."""
        return self.hidden_size != self.target_hidden_size

    def window(self, layer: int) -> int:
        """The sliding window of a layer in rows; 0: none."""
        return self.windows[layer] if self.windows else 0


def shapes(c: HeadConfig) -> Shapes:
    """The names and shapes of all tensors."""
    if c.kind == "exit":
        return _exit_shapes(c)
    h = c.hidden_size
    named = _input_shapes(c)
    if c.narrow or c.own_embedding:
        named["embed_tokens.weight"] = (c.vocab_size, h)
    for i in range(c.layers):
        layer = _layer(c, 2 * h if i == 0 and c.kind not in (EAGLE1, DFLASH) else h)
        if i == 0 and c.kind == EAGLE1 and not c.layernorms:
            del layer["input_layernorm.weight"]
        named |= {f"{layer_name(i)}.{name}": shape for name, shape in layer.items()}
    named |= _output_shapes(c)
    if c.kind == "block":
        named |= {"mask_embedding": (h,), "mask_hidden": (h,)}
    if c.own_mask:
        named["mask_embedding"] = (h,)
    if c.markov:
        named["markov_head.markov_w1.weight"] = (c.vocab_size, c.markov)
        named["markov_head.markov_w2.weight"] = (c.draft_vocab_size, c.markov)
    if c.markov_kind:
        part, r = f"markov_head.{MARKOV_PARTS[c.markov_kind]}", c.markov
        rows, inputs = (r, h + r) if c.markov_kind == GATED else (3 * r, 2 * r + h)
        named |= {f"{part}.weight": (rows, inputs), f"{part}.bias": (rows,)}
    if c.prefix_state:
        named["prefix_gru.weight_ih_l0"] = (3 * c.prefix_state, h)
        named[PREFIX_STATE] = (3 * c.prefix_state, c.prefix_state)
        named["embed_proj.0.weight"] = (c.prefix_inner, h + c.prefix_state)
        named["embed_proj.2.weight"] = (c.draft_vocab_size, c.prefix_inner)
    for name in (convolution_name(i, part) for i in range(c.layers * (c.conv > 0)) for part in ("attention", "mlp")):
        named[f"{name}.base_kernel"] = (2, c.conv, h)
        named[f"{name}.kernel_projection.weight"] = (2 * c.conv * (h // c.conv_group), h)
    if c.selector:
        named["candidate_selector.predecessor_codebook"] = (c.vocab_size, c.selector)
        named["candidate_selector.successor_codebook"] = (c.draft_vocab_size, c.selector)
        named["candidate_selector.hidden_projection.weight"] = (c.selector, h)
    return named | (_refiner_shapes(c) if c.refiner else {})


def _refiner_shapes(c: HeadConfig) -> Shapes:
    r, inner, rows = c.refiner, c.refiner_inner, c.block_rows
    parts = {"token_embed": (c.vocab_size, r), "down_h": (r, c.hidden_size), "down_g": (r, c.hidden_size)}
    parts |= {"in_proj": (r, 3 * r), "mlp_gate": (inner, r), "mlp_up": (inner, r), "mlp_down": (r, inner)}
    named: Shapes = {f"refiner_head.{n}.weight": shape for n, shape in parts.items()}
    return named | {"refiner_head.readout.weight": (c.draft_vocab_size, r), "refiner_head.mix_l": (r, rows, rows)}


def _input_shapes(c: HeadConfig) -> Shapes:
    """What makes the first layer's input from the target's states and a token."""
    h, wide = c.hidden_size, c.target_hidden_size
    named: Shapes = {}
    if c.kind == EAGLE1 or not c.normed:
        named["fc.weight"] = (h, 2 * h if c.kind == EAGLE1 else len(c.taps) * wide)
    if c.kind != EAGLE1:
        named["midlayer.hidden_norm.weight"] = (h,)
    if c.normed:
        named["feature_norm.weight"] = (wide,)
    if c.layernorms:
        named["embedding_layernorm.weight"] = (h,)
    if c.state_norm:
        named["hidden_layernorm.weight"] = (h,)
    if c.fc_bias:
        named["fc.bias"] = (h,)
    if c.fc_norm:
        named |= {f"fc_norm.{i}.weight": (wide,) for i in range(len(c.taps))}
    if c.norm_before_fc:
        named["input_norm.weight"] = (len(c.taps) * wide,)
    return named


def _exit_shapes(c: HeadConfig) -> Shapes:
    """An adapter with the whole vocabulary uses the target's output layer."""
    h, wide = c.hidden_size, c.intermediate_size
    named: Shapes = {}
    for i in range(c.layers):
        block = block_name(i)
        named |= {f"{block}.norm.weight": (h,), f"{block}.mlp.down_proj.weight": (h, wide)}
        named |= {f"{block}.mlp.{name}_proj.weight": (wide, h) for name in ("gate", "up")}
    return named | _output_shapes(c) if c.draft_vocab_size < c.vocab_size else named


def _output_shapes(c: HeadConfig) -> Shapes:
    draft, h = c.draft_vocab_size, c.hidden_size
    named: Shapes = {} if c.kind == EAGLE1 and not c.layernorms else {"norm.weight": (h,)}
    if c.own_output:
        named["lm_head.weight"] = (draft, h)
    return named | {"d2t": (draft,), "t2d": (c.vocab_size,)}


def block_name(i: int) -> str:
    """The i-th block of an adapter."""
    return f"blocks.{i}"


def layer_name(i: int) -> str:
    """The first layer is EAGLE-3's, with two inputs; the others are ordinary decoder layers."""
    return "midlayer" if i == 0 else f"layers.{i}"


def convolution_name(i: int, part: str) -> str:
    """DFlash2's around the attention or mlp of the i-th layer."""
    return f"{layer_name(i)}.{part}_conv"


def _layer(c: HeadConfig, inputs: int) -> Shapes:
    h, wide, q, kv = c.hidden_size, c.intermediate_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = {"q": (q, inputs), "k": (kv, inputs), "v": (kv, inputs), "o": (h, q)}
    mlp = {"gate": (wide, h), "up": (wide, h), "down": (h, wide)}
    named: Shapes = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    named |= {f"self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    if c.qkv_bias:
        named |= {f"self_attn.{name}_proj.bias": attention[name][:1] for name in "qkv"}
    if c.qk_norm:
        named |= {f"self_attn.{name}_norm.weight": (c.head_dim,) for name in "qk"}
    return named | {f"mlp.{name}_proj.weight": shape for name, shape in mlp.items()}


def check_head(config: HeadConfig, tensors: HeadTensors, where: str) -> None:
    """Raise for a missing tensor, a wrong shape, or a draft vocabulary outside the target's."""
    check_shapes(tensors, shapes(config), where)
    if "d2t" not in shapes(config):
        return
    ids = target_ids(tensors["d2t"])
    if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size or ids.unique().numel() < ids.numel():
        raise ModelError(f"The draft vocabulary of {where} (d2t) names ids outside the target's, or one twice.")


def check_shapes(tensors: Mapping[str, Any], needed: Shapes, where: str) -> None:
    """Raise for a missing tensor or a wrong shape."""
    for name, shape in needed.items():
        if name not in tensors:
            raise ModelError(f"{where} has no tensor '{name}', which its configuration needs; get the head again.")
        if tuple(tensors[name].shape) != shape:
            actual = list(tensors[name].shape)
            raise ModelError(f"In {where} the tensor '{name}' has the shape {actual} instead of {list(shape)}.")


def target_ids(d2t: Tensor) -> Tensor:
    """The target's id of each draft id, [D] int64, from their differences [D]."""
    return torch.arange(d2t.shape[0], device=d2t.device) + d2t.long()


def stored_as(tensors: HeadTensors, store: str, moments: Mapping[str, Tensor] | None = None) -> HeadTensors:
    """The same tensors with their matrices in one of STORES; vectors stay as they are.

    moments: of the matrices' inputs, for `encode`. A matrix that is not in whole blocks of 256 gets those of 32,
    one that is not in whole blocks of 32 bfloat16.
    """
    if store not in STORES:
        raise ModelError(f"There is no --store '{store}'. Choose one of: {', '.join(STORES)}.")
    named: HeadTensors = dict(decoded(tensors, torch.float32))
    for name, tensor in named.items():
        if not tensor.is_floating_point() or tensor.dim() < 2:
            continue
        wanted = () if store in DTYPES else (store.upper(), "Q4_1")
        kind = next((kind for kind in wanted if tensor.shape[1] % block_size(kind)[0] == 0), None)
        if kind is None:
            named[name] = tensor.to(DTYPES.get(store, torch.bfloat16))
        else:
            named[name] = encode(tensor, kind, (moments or {}).get(name))
    return named


def decoded(tensors: HeadTensors, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """All of them as tensors; those in blocks become floats of this dtype."""
    return {name: tensor.to(dtype) if isinstance(tensor, BlockTensor) else tensor for name, tensor in tensors.items()}


def write_head(folder: str | Path, config: HeadConfig, tensors: HeadTensors, card: str = "") -> None:
    """Weights first, then the configuration: a folder with a configuration is complete."""
    folder = Path(folder)
    check_head(config, tensors, "The head")
    folder.mkdir(parents=True, exist_ok=True)
    named = {name: tensors[name] for name in shapes(config)}
    kept = {name: t.detach().cpu().contiguous() for name, t in named.items() if not isinstance(t, BlockTensor)}
    if "d2t" in kept:
        kept |= {"d2t": kept["d2t"].long(), "t2d": kept["t2d"].bool()}
    kept |= {f"{name}.{t.kind}": t.raw for name, t in named.items() if isinstance(t, BlockTensor)}
    save_tensors(folder / f"{WEIGHTS}.new", kept)
    os.replace(folder / f"{WEIGHTS}.new", folder / WEIGHTS)
    if card:
        (folder / CARD).write_text(card, encoding="utf-8")
    write_atomically(folder / CONFIG, json.dumps(_to_json(config), indent=2) + "\n")


def read_head(folder: str | Path) -> tuple[HeadConfig, HeadTensors]:
    """A head's configuration and its tensors, with EAGLE's names. Blocks stay as they are stored."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ModelError(f"There is no folder {folder}; a head is a folder that `outrider train` has written.")
    config = read_config(folder)
    try:
        tensors: HeadTensors = load_file(str(folder / WEIGHTS))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{folder / WEIGHTS} is missing or damaged ({error}); make the head again.") from error
    for name in [name for name in tensors if name.rpartition(".")[2] in FORMATS]:
        stem, _, kind = name.rpartition(".")
        tensors[stem] = BlockTensor.checked(tensors.pop(name), kind, f"{folder / WEIGHTS}: {stem}")
    for name in [name for name in tensors if name.startswith(SPECULATORS_FIRST)]:
        tensors[FIRST + name.removeprefix(SPECULATORS_FIRST)] = tensors.pop(name)
    check_head(config, tensors, str(folder))
    return config, {name: tensors[name] for name in shapes(config)}


def in_blocks(folder: Path) -> bool:
    """Whether matrices of a head are stored in blocks, which other engines do not read."""
    try:
        with safe_open(str(folder / WEIGHTS), framework="pt") as file:
            return any(name.rpartition(".")[2] in FORMATS for name in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError):
        return False


def read_json(folder: Path) -> dict[str, Any]:
    """A head's config.json, as it is."""
    try:
        data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} is not a trained head: its {CONFIG} cannot be read ({error}).") from error
    if not isinstance(data, dict):
        raise ModelError(f"{folder} is not a trained head: its {CONFIG} is no JSON object.")
    return data


def read_config(folder: Path) -> HeadConfig:
    """A head's configuration, without its weights."""
    data = read_json(folder)
    own = data.get("outrider")
    if not isinstance(own, dict) or "kind" not in own:
        raise ModelError(f"{folder} is not a trained head (a whole model goes with --draft-model).")
    if own.get("format") != FORMAT:
        problem = f"The head {folder} has the format {own.get('format')!r}, and this Outrider reads format {FORMAT}"
        raise ModelError(f"{problem}; update Outrider, or make the head again.")
    try:
        return _from_json(data, own)
    except MISREAD as error:
        raise ModelError(f"{folder / CONFIG} is damaged ({type(error).__name__}: {error}).") from error


def _from_json(data: dict[str, Any], own: dict[str, Any]) -> HeadConfig:
    layer, verifier = data["transformer_layer_config"], data["speculators_config"]["verifier"]
    if data.get("norm_before_residual"):
        raise ModelError("The head's residual is taken after its norm (norm_before_residual), which is not supported.")
    return HeadConfig(
        kind=str(own["kind"]),
        hidden_size=int(layer["hidden_size"]),
        intermediate_size=int(layer["intermediate_size"]),
        heads=int(layer["num_attention_heads"]),
        kv_heads=int(layer["num_key_value_heads"]),
        head_dim=int(layer["head_dim"]),
        vocab_size=int(layer["vocab_size"]),
        draft_vocab_size=int(data["draft_vocab_size"]),
        taps=tuple(int(i) - 1 for i in data["eagle_aux_hidden_state_layer_ids"]),
        layers=int(layer["num_hidden_layers"]),
        block=int(own["block"]),
        norm_eps=float(layer["rms_norm_eps"]),
        rope_theta=float(layer["rope_theta"]),
        context_length=int(layer["max_position_embeddings"]),
        target_hash=str(own.get("target_hash") or ""),
        target_name=str(verifier.get("name_or_path") or ""),
        target_hidden_size=int(data.get("target_hidden_size") or 0),
        own_output=bool(own.get("own_output", True)),
        acceptance=tuple(own.get("acceptance") or ()),
    )


def _to_json(c: HeadConfig) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": c.block}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    own: dict[str, Any] = {"kind": c.kind, "block": c.block, "target_hash": c.target_hash, "format": FORMAT}
    own |= {"acceptance": [round(rate, 3) for rate in c.acceptance]} if c.acceptance else {}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": KINDS[c.kind],
        "speculators_version": "0.7.0",
        "draft_vocab_size": c.draft_vocab_size,
        "norm_before_residual": False,
        "target_hidden_size": c.target_hidden_size if c.narrow else None,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in c.taps],  # a layer's input is the one before's output
        "transformer_layer_config": {"model_type": "llama"} | to_hf(c),
        "speculators_config": {
            "algorithm": KINDS[c.kind],
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": c.target_name, "architectures": ["LlamaForCausalLM"]},
        },
        "outrider": own if c.own_output else own | {"own_output": False},
    }


def target_hash(config: ModelConfig, weights: TensorSource) -> str:
    """16 hex digits from the target's shape and norms, which are the same in every file format and quantisation.

    Where all norms are equal, as in an untrained model, some weights of a projection are added, to three digits.
    """
    c = config
    facts = (c.hidden_size, c.layers, c.heads, c.kv_heads, c.head_dim, c.intermediate_size, c.vocab_size)
    digest = hashlib.sha256(repr(facts).encode())
    first = "input_layernorm" if c.pre_norm else "attention_post_norm"
    last = [] if c.stream_norm else ["norm.weight"]
    names = [*last, *(f"layers.{i}.{first}.weight" for i in range(c.layers))]
    norms = torch.cat([weights.get(name, torch.float32).flatten() for name in names])  # [(layers + 1) H]
    digest.update(norms.bfloat16().view(torch.int16).cpu().numpy().tobytes())
    if bool((norms == norms[0]).all()):
        rows = weights.get(f"layers.{c.layers // 2}.self_attn.q_proj.weight", torch.float32)[:4].flatten()  # [4 H]
        digest.update(",".join(f"{value:.2e}" for value in rows.tolist()).encode())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------ untrained


def random_head(
    config: ModelConfig, kind: str = "eagle3", seed: int = 1, layers: int = 1, vocabulary: int = 0, hash: str = "",
    **variant: Any,
) -> tuple[HeadConfig, dict[str, Tensor]]:  # fmt: skip
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
        **variant,
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
