"""Drafters that others have published: what a folder holds, as a configuration and tensors under our names.

It reads EAGLE-3 (SafeAILab, SpecForge, NVIDIA, AngelSlim), the speculators format (eagle3, peagle, dflash, mtp, …),
DFlash, DFlash2, DSpark, Domino and XPress, EAGLE-1 and 2, Medusa and MLP speculators. Promise: `read_published` returns
complete and consistent tensors or raises a sentence that names what is wrong; pickled weights are read without running
what is in them. Files of the same kind follow different conventions without saying which: then there are several
readings, the likeliest first, and `drafters.head` tries them. It knows names, shapes and conventions, not what a head
computes.
"""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import MISREAD, ModelError, first_line
from .config import ModelConfig, hf_rope, rope_scaling
from .fetch import HUB_NAME, hub_model
from .gguf_head import gguf_alone, gguf_head, is_gguf_head
from .speculators import (
    CONFIG,
    DFLASH,
    EAGLE1,
    FIRST,
    MARKOV_PARTS,
    MTP,
    PREFIX_STATE,
    SPECULATORS_FIRST,
    HeadConfig,
    HeadTensors,
    Shapes,
    check_head,
    check_shapes,
    read_json,
    shapes,
    target_ids,
)
from .weights import find_safetensors

MEDUSA, MLP = "medusa", "mlp"
PARTS = {MEDUSA: "medusa_num_heads", MLP: "n_predict"}  # where their configurations count the tokens of a draft
_FLAT = {
    "LlamaForCausalLMEagle3": "SpecForge's and NVIDIA's layout", "Eagle3LlamaForCausalLM": "AngelSlim's layout",
    "PEagleDraftModel": "SpecForge's layout",
}  # fmt: skip
_BLOCKS = {
    "DFlashDraftModel": "a DFlash drafter", "dflash": "a DFlash drafter in the speculators format",
    "DSparkDraftModel": "a DSpark drafter", "Qwen3DSparkModel": "a DSpark drafter",
    "dspark": "a DSpark drafter in the speculators format", "DominoDraftModel": "a Domino drafter",
    "DFlash2DraftModel": "a DFlash2 drafter", "dflash2": "a DFlash2 drafter in the speculators format",
    "xpress": "an XPress drafter in the speculators format", "Qwen3XPressModel": "an XPress drafter",
}  # fmt: skip
_REFUSED = {"DFlashLinearDraftModel": "DFlash linear"}
_DFLASH2, _XPRESS = ("dflash2", "DFlash2DraftModel"), ("xpress", "Qwen3XPressModel")
_REFINER_NAMES = {  # those of XPress's authors: speculators'
    "w1.weight": "token_embed.weight", "w2.weight": "readout.weight", "mix.L": "mix_l",
    **{f"mlp.{part}_proj.weight": f"mlp_{part}.weight" for part in ("gate", "up", "down")},
}  # fmt: skip
_PARALLEL = "PEagleDraftModel"  # SpecForge's P-EAGLE
_LONGEST_BLOCK = 64  # as many as there are scratch slots for one sequence on a GPU
_PICKLES = ("pytorch_model*.bin", "medusa_lm_head.pt", "*.bin", "*.pt")
_IGNORED = re.compile(r"(verifier_.*|.*rotary_emb\..*|t2d)")  # copies of the target's weights, and what can be derived
_LAYER_NAMES = (  # of speculators' EAGLE-1 and MTP
    ("fusion_fc.", "fc."), ("transformer.", SPECULATORS_FIRST), ("pre_lm_head_layernorm.", "norm."),
    ("mtp_layers.0.input_proj.", "fc."), ("mtp_layers.0.token_layernorm.", "embedding_layernorm."),
    ("mtp_layers.0.hidden_layernorm.", "hidden_layernorm."), ("mtp_layers.0.final_layernorm.", "norm."),
    ("mtp_layers.0.", SPECULATORS_FIRST),
)  # fmt: skip
_OLD_FC_NORMS = {"aux_norm_low": 0, "aux_norm_mid": 1, "aux_norm_high": 2}
_MEDUSA_NAMES = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), "blocks.{}.{}.{}"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), "blocks.{}.{}.{}"),
    (re.compile(r"(\d+)\.\d+\.weight"), "lm_heads.{}.weight"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), "lm_heads.{}.weight"),
)


@dataclass(frozen=True)
class PerPositionConfig:
    """The shape of a Medusa head or an MLP speculator: one small network for each position of a draft."""

    kind: str  # medusa or mlp
    vocab_size: int  # the target's
    draft_vocab_size: int
    target_hidden_size: int
    block: int  # tokens of a draft
    taps: tuple[int, ...]  # the target's last layer
    layers: int = 1  # medusa: blocks of each position
    scale_input: bool = False  # mlp
    target_norm_eps: float = 1e-5
    target_hash: str = ""
    target_name: str = ""


@dataclass(frozen=True)
class Reading:
    """One way to understand a folder."""

    config: HeadConfig | PerPositionConfig
    assumes: str = ""  # what it assumes where the file says nothing


Choice = tuple[dict[str, Any], str]  # changes of a configuration, and what they assume
_STATES: list[Choice] = [
    ({"normed": normed}, f"the target's states are read {where} its last norm")
    for normed, where in ((True, "after"), (False, "before"))
]
_OUTPUTS: list[Choice] = [
    ({"norm_output": normed}, f"drafts continue from the output {where} its norm")
    for normed, where in ((True, "after"), (False, "before"))
]


@dataclass(frozen=True)
class PublishedHead:
    """A folder that somebody else has written."""

    format: str  # for people
    readings: tuple[Reading, ...]  # the likeliest first
    tensors: HeadTensors


def head_folder(name: str | Path) -> Path:
    """The folder of a head: a local one, or one of the hub, which is downloaded on first use; or a GGUF file."""
    folder = gguf_alone(Path(name).expanduser())
    if folder.is_file() and folder.suffix.lower() == ".gguf":
        return folder
    if not folder.is_dir() and isinstance(name, str) and HUB_NAME.fullmatch(name):
        return gguf_alone(hub_model(name, pickles=True))
    if not folder.is_dir():
        raise ModelError(f"There is no folder {folder}; a head is a folder with a config.json, or a name on the hub.")
    return folder


def is_own(folder: Path) -> bool:
    """Whether `outrider train` has written this folder."""
    return not folder.is_file() and isinstance(read_json(folder).get("outrider"), dict)


def is_head(folder: Path) -> bool:
    """Whether a folder or file holds a drafter that needs its target's hidden states, rather than a whole model."""
    if (file := gguf_alone(folder)).is_file():
        return is_gguf_head(file)
    try:
        data = read_json(folder)
        return "outrider" in data or _kind(data, folder, None) is not None
    except ModelError:
        return False


def read_published(folder: Path, target: ModelConfig) -> PublishedHead:
    """The head in a folder, as it would fit this target; `_trained.insist_on_target` tells whether it does."""
    if folder.is_file():
        return _read_gguf(folder, target)
    data = read_json(folder)
    for name in _kind_names(data):
        if name in _REFUSED:
            raise ModelError(f"{folder} is a {_REFUSED[name]} drafter, which Outrider does not run.")
    tensors = _load(folder)
    kind = _kind(data, folder, tensors)
    if kind is None:
        raise ModelError(f"{folder} is not a trained head (a whole model goes with --draft-model).")
    try:
        return _READERS[kind](data, tensors, target, str(folder))
    except MISREAD as error:
        problem = f"{type(error).__name__}: {error}"
        raise ModelError(f"{folder / CONFIG} is not as a head of its kind has it ({problem}).") from error


def _read_gguf(path: Path, target: ModelConfig) -> PublishedHead:
    """The head in a GGUF file: its file in the words of the speculators format."""
    stored = gguf_head(path)
    try:
        reader = _READERS["speculators" if stored.data["speculators_model_type"] == "eagle3" else DFLASH]
        read = reader(stored.data, _renamed(stored.tensors), target, str(path))
    except MISREAD as error:
        problem = f"{type(error).__name__}: {error}"
        raise ModelError(f"{path} is not as a head of its kind has it ({problem}).") from error
    configs = [(reading, reading.config) for reading in read.readings]
    scaled = tuple(
        replace(reading, config=replace(config, rope_scaling=stored.scaling))
        for reading, config in configs
        if isinstance(config, HeadConfig)
    )
    return replace(read, format=read.format.replace("the speculators format", "a GGUF file"), readings=scaled)


def _architectures(data: Mapping[str, Any]) -> list[str]:
    names = data.get("architectures") or []
    return [str(name) for name in names] if isinstance(names, list) else []


def _kind_names(data: Mapping[str, Any]) -> list[str]:
    """What a configuration calls its head."""
    return [str(data.get("speculators_model_type")), *_architectures(data)]


def _kind(data: Mapping[str, Any], folder: Path, tensors: Mapping[str, Tensor] | None) -> str | None:
    """Which reader understands a folder; None: it is no head. The tensors decide between EAGLE-1 and a whole model."""
    if any(name in _BLOCKS for name in _kind_names(data)):
        return DFLASH
    if data.get("speculators_model_type") is not None:
        return "speculators"
    if any(name in _FLAT for name in _architectures(data)) or "eagle_config" in data:
        return "eagle3"
    if PARTS[MEDUSA] in data:
        return MEDUSA
    if data.get("model_type") == "mlp_speculator":
        return MLP
    if data.get("num_hidden_layers") == 1 and data.get("draft_vocab_size"):
        return "eagle3"
    if data.get("model_type") == "llama" and data.get("num_hidden_layers") == 1:
        names = _load(folder) if tensors is None else tensors
        return EAGLE1 if "fc.weight" in names else None
    return None


# ------------------------------------------------------------ tensors


def _load(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder; pickles are read by torch's restricted reader, which runs no code."""
    pickles = next((found for pattern in _PICKLES if (found := sorted(folder.glob(pattern)))), [])
    if pickles and not next(folder.glob("*.safetensors"), None):
        return _unpickled(pickles)
    tensors: dict[str, Tensor] = {}
    for path in find_safetensors(folder):
        try:
            tensors |= load_file(str(path))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is missing or damaged ({error}); get the head again.") from error
    if (mask := folder / "mask_embedding.pt").is_file():  # of a block drafter, beside its weights
        for tensor in _unpickled([mask], alone=True).values():
            tensors["mask_embedding"] = tensor.flatten()
    return _renamed(tensors)


def _unpickled(paths: list[Path], alone: bool = False) -> dict[str, Tensor]:
    """The tensors of some files; `alone`: a file may hold one without a name."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            held = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
            tensors |= {path.stem: held} if alone and isinstance(held, Tensor) else held
        except (OSError, RuntimeError, ValueError, TypeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            why = first_line(error)
            raise ModelError(f"{path} is damaged, or holds more than tensors ({why}); get the head again.") from error
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{paths[0]} holds more than tensors; get the head again.")
    return _renamed(tensors)


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {re.sub(r"^(model|speculator|medusa_heads?)\.", "", name): tensor for name, tensor in tensors.items()}


def _eagle_names(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Under EAGLE's names, without what is not needed to run."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(SPECULATORS_FIRST):
            name = FIRST + name.removeprefix(SPECULATORS_FIRST)
        old = _OLD_FC_NORMS.get(name.removesuffix(".weight"))
        name = name if old is None else f"fc_norm.{old}.weight"
        if not _IGNORED.fullmatch(name):
            if not tensor.is_floating_point() and name not in ("d2t", "mask_token_id"):
                raise ModelError(f"{where} has quantised weights ('{name}'), which Outrider does not read in a head.")
            named[name] = tensor
    return named


def _complete(reading: HeadConfig, tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """With the draft vocabulary made explicit; raises for what is missing, misshapen or not understood."""
    named, known = dict(tensors), torch.zeros(reading.vocab_size, dtype=torch.bool)
    if "d2t" not in named and reading.draft_vocab_size == reading.vocab_size:
        named["d2t"] = torch.zeros(reading.vocab_size, dtype=torch.long)
    if "d2t" in named:
        ids = target_ids(named["d2t"])
        known[ids[(ids >= 0) & (ids < reading.vocab_size)]] = True
    named["t2d"] = known
    if reading.normed:
        named["feature_norm.weight"] = torch.ones(reading.target_hidden_size)  # the target's, which the caller knows
    check_head(reading, named, where)
    needed = shapes(reading)
    unknown = sorted(set(named) - set(needed))
    if unknown:
        raise ModelError(f"{where} has a tensor '{unknown[0]}' that no head known to Outrider has, so it is not run.")
    return {name: named[name] for name in needed}


# ------------------------------------------------------------ EAGLE-3


def _flat(data: Mapping[str, Any], tensors: dict[str, Tensor], target: ModelConfig, where: str) -> PublishedHead:
    """One flat configuration, as EAGLE, SpecForge, NVIDIA and AngelSlim write it."""
    own, kind = data.get("eagle_config") or {}, "an EAGLE-3 head"
    layout = next((_FLAT[name] for name in _architectures(data) if name in _FLAT), "EAGLE's own layout")
    named = _eagle_names(tensors, where)
    base = _eagle3(dict(data) | own, named)
    if _PARALLEL in _architectures(data):
        kind, (base, named) = "a P-EAGLE head", _parallel(dict(data) | own, base, named, where)
    ids = own.get("eagle_aux_hidden_state_layer_ids") or data.get("eagle_aux_hidden_state_layer_ids")
    if own.get("use_aux_hidden_state") is False:
        if "fc.weight" in named:
            raise ModelError(f"{where} reads the last state only (use_aux_hidden_state: false), but has 'fc.weight'.")
        base = replace(base, taps=(target.layers - 1,), normed=True, target_norm_eps=target.norm_eps)
    possible = [(base.taps, "")] if base.normed else _flat_taps(ids, target.layers, where)
    choices: list[list[Choice]] = [
        [({"taps": taps}, note) for taps, note in possible],
        [({}, "")],
        [({}, "")],
    ]
    if base.rope_theta != 10_000.0:  # trainers have ignored what they wrote
        choices[1].append(({"rope_theta": 10_000.0}, f"rope's base is 10000 instead of {base.rope_theta:g}"))
    if base.norm_output and not base.fc_norm:  # one trainer writes it always, and norms for the logits only
        choices[2].append(_OUTPUTS[1])
    tensors = _complete(base, named, where)
    return PublishedHead(f"{kind} in {layout}", _readings(base, choices, where), tensors)


def _readings(base: HeadConfig, choices: list[list[Choice]], where: str) -> tuple[Reading, ...]:
    """Every combination, the first of each list first."""
    readings = []
    for some in itertools.product(*choices):
        changes = {name: value for fields, _ in some for name, value in fields.items()}
        if len(taps := changes.get("taps", base.taps)) != len(base.taps):
            named = f"{len(taps)} layers of its target"
            raise ModelError(f"{where} names {named}, but its fc.weight reads {len(base.taps)} of them.")
        readings.append(Reading(replace(base, **changes), "; ".join(note for _, note in some if note)))
    return tuple(readings)


def _flat_taps(ids: Any, layers: int, where: str) -> list[tuple[tuple[int, ...], str]]:
    """Which layers are tapped, by their outputs, the likeliest reading first. Ids name inputs or outputs of layers."""
    if not ids:
        return [(_default_taps(layers, where), "")]
    listed = [int(i) for i in ids]
    outputs = (tuple(listed), f"layer ids {listed} name the layers whose outputs are read")
    inputs = (tuple(i - 1 for i in listed), f"layer ids {listed} name the layers whose inputs are read")
    order = [outputs, inputs] if listed[0] <= 1 else [inputs, outputs]
    return [each for each in order if min(each[0]) >= 0 and max(each[0]) < layers] or order[:1]


def _default_taps(layers: int, where: str) -> tuple[int, ...]:
    """EAGLE-3's: after the first two layers, before the middle one, before the last three."""
    taps = tuple(b - 1 for b in (2, layers // 2, layers - 3))
    if len(set(taps)) < 3 or min(taps) < 0:
        raise ModelError(f"{where} does not say which layers it reads, and a target of {layers} layers has no default.")
    return taps


def _speculators(data: Mapping[str, Any], tensors: dict[str, Tensor], target: ModelConfig, where: str) -> PublishedHead:
    """The speculators format: the layer's sizes are in `transformer_layer_config`, layer ids are boundaries."""
    algorithm = str(data["speculators_model_type"])
    if algorithm in ("eagle", "mtp"):
        return _layer_in_speculators(data, tensors, target, where)
    if algorithm not in ("eagle3", "peagle"):
        known = "eagle, eagle3, peagle, mtp, dflash, dflash2, dspark and xpress"
        raise ModelError(f"{where} is a '{algorithm}' drafter in the speculators format; {known} are read.")
    named = _eagle_names(tensors, where)
    base = _eagle3(dict(data["transformer_layer_config"]) | _top_level(data), named)
    ids = data.get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(int(i) - 1 for i in ids) if ids else _default_taps(target.layers, where)
    methods = (data.get("speculators_config") or {}).get("proposal_methods") or [{}]
    block = int(methods[0].get("speculative_tokens") or base.block)
    base = replace(base, block=block, target_name=_verifier(data))
    if algorithm == "peagle":
        base, named = _parallel(data, base, named, where)
    order: list[Choice] = [({"taps": taps}, "")]
    if data.get("norm_before_residual") is None and algorithm == "eagle3":  # engines and trainers differ in the default
        order = [({"taps": taps, "norm_before_residual": True}, "the residual begins after the norm")]
        order.append(({"taps": taps, "norm_before_residual": False}, "the residual begins before the norm"))
    name = {"eagle3": "an EAGLE-3 head", "peagle": "a P-EAGLE head"}[algorithm]
    tensors = _complete(base, named, where)
    return PublishedHead(f"{name} in the speculators format", _readings(base, [order], where), tensors)


def _verifier(data: Mapping[str, Any]) -> str:
    """The name of the target; empty if it is not stated."""
    verifier = (data.get("speculators_config") or {}).get("verifier") or {}
    return str(verifier.get("name_or_path") or "")


def _layer_in_speculators(
    data: Mapping[str, Any], tensors: dict[str, Tensor], target: ModelConfig, where: str
) -> PublishedHead:
    """EAGLE-1, 2 and HASS under names of their own, with norms around the layer or without; MTP has these and one of
    the target's state, of which trainers read the one before the target's last norm, engines the one after it."""
    flat, mtp = dict(data["transformer_layer_config"]), data["speculators_model_type"] == "mtp"
    if mtp and flat.get("model_type") != "qwen3":
        return _foreign_layer(flat, tensors, target, where)
    for theirs, ours in _LAYER_NAMES:
        tensors = {ours + n.removeprefix(theirs) if n.startswith(theirs) else n: t for n, t in tensors.items()}
    named = _eagle_names(tensors, where) if mtp else _without_output(tensors, where)
    norms = mtp or bool(data.get("layernorms"))
    base = replace(
        _one_layer(flat | {"num_hidden_layers": 1}, named, target), layernorms=norms, norm_output=norms,
        state_norm=mtp, qk_norm=mtp, own_output="lm_head.weight" in named, target_name=_verifier(data),
    )  # fmt: skip
    choices = [_STATES, *([] if mtp else [_OUTPUTS])] if norms else []
    name = f"an {'MTP' if mtp else 'EAGLE-1'} head in the speculators format"
    return PublishedHead(name, _readings(base, choices, where), _complete(base, named, where))


def _foreign_layer(
    flat: Mapping[str, Any], tensors: dict[str, Tensor], target: ModelConfig, where: str
) -> PublishedHead:
    """MTP with a layer of Qwen3-Next's class, beside such a target; names and shapes are checked where the class is."""
    kind, known = flat.get("model_type"), "qwen3, and of qwen3_next beside such a target"
    if kind != "qwen3_next" or target.architecture != kind:
        raise ModelError(f"{where} is an MTP drafter with a layer of the kind '{kind}'; those are read of {known}.")
    base = replace(_one_layer(dict(flat) | {"num_hidden_layers": 1}, {}, target), kind=MTP, norm_output=True)
    readings = _readings(base, [_STATES], where)
    return PublishedHead("an MTP head in the speculators format", readings, _eagle_names(tensors, where))


def _top_level(data: Mapping[str, Any]) -> dict[str, Any]:
    names = ("draft_vocab_size", "target_hidden_size", "norm_output", "norm_before_residual", "logit_scale")
    return {name: data[name] for name in names if data.get(name) is not None}


def _parallel(
    data: Mapping[str, Any], base: HeadConfig, named: dict[str, Tensor], where: str
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """P-EAGLE as a block of masks: a mask's embedding is that of a token, and its states are fused once, here."""
    token = next((data[n] for n in ("mask_token_id", "pard_token", "ptd_token_id") if data.get(n) is not None), None)
    hidden = named.pop("mask_hidden", None)
    if token is None or hidden is None or "embed_tokens.weight" not in named:
        lacks = "mask_token_id" if token is None else "mask_hidden" if hidden is None else "embed_tokens.weight"
        raise ModelError(f"{where} is a P-EAGLE head without '{lacks}', so that its masks are unknown.")
    fused_width, known = named["fc.weight"].shape[-1], named["embed_tokens.weight"].shape[0]
    if hidden.numel() != fused_width or not 0 <= int(token) < known:
        shown = f"'mask_hidden' has the shape {list(hidden.shape)}, and its mask_token_id is {token}"
        raise ModelError(
            f"In {where} the tensor {shown}: its fc.weight reads {fused_width} numbers, of {known} tokens."
        )
    states = hidden.float().reshape(1, -1)  # [1, taps * H]
    if base.fc_norm:
        parts = states.chunk(len(base.taps), 1)
        weights = [named[f"fc_norm.{i}.weight"].float() for i in range(len(parts))]
        states = torch.cat([_rms(part, w, base.norm_eps) for part, w in zip(parts, weights, strict=True)], 1)
    if base.norm_before_fc:
        states = _rms(states, named["input_norm.weight"].float(), base.norm_eps)
    fused = states @ named["fc.weight"].float().T  # [1, h]
    masks = {"mask_hidden": fused[0], "mask_embedding": named["embed_tokens.weight"][int(token)].float()}
    return replace(base, kind="block"), named | masks


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _eagle3(data: Mapping[str, Any], named: dict[str, Tensor]) -> HeadConfig:
    """What both layouts share. Tensors, not flags, tell which optional parts there are."""
    h, heads = int(data["hidden_size"]), int(data["num_attention_heads"])
    wide, layers = int(data.get("target_hidden_size") or h), int(data.get("num_hidden_layers") or 1)
    fused = named["fc.weight"].shape[1] if "fc.weight" in named else 3 * wide
    return HeadConfig(
        kind="eagle3", hidden_size=h, draft_vocab_size=int(data.get("draft_vocab_size") or data["vocab_size"]),
        taps=tuple(range(max(fused // wide, 1))),  # as many as `fc` reads; which ones, the caller knows
        target_hidden_size=wide, **_layer_sizes(data, heads, h), layers=layers, windows=_windows(data, layers),
        own_embedding="embed_tokens.weight" in named, own_output="lm_head.weight" in named,
        fc_norm="fc_norm.0.weight" in named, norm_before_fc="input_norm.weight" in named, fc_bias="fc.bias" in named,
        norm_before_residual=bool(data.get("norm_before_residual")), norm_output=bool(data.get("norm_output")),
        qk_norm=f"{FIRST}self_attn.q_norm.weight" in named, qkv_bias=f"{FIRST}self_attn.q_proj.bias" in named,
        logit_scale=float(data.get("logit_scale") or 1.0),
    )  # fmt: skip


def _layer_sizes(data: Mapping[str, Any], heads: int, hidden: int) -> dict[str, Any]:
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"The head's activation '{activation}' is not supported; Outrider runs silu.")
    rope, context = hf_rope(data), int(data.get("max_position_embeddings") or 2048)
    return {
        "heads": heads, "kv_heads": int(data.get("num_key_value_heads") or heads),
        "head_dim": int(data.get("head_dim") or hidden // heads), "vocab_size": int(data["vocab_size"]),
        "intermediate_size": int(data["intermediate_size"]), "norm_eps": float(data.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta", 10_000.0)), "rope_scaling": rope_scaling(rope, context),
        "context_length": context,
    }  # fmt: skip


def _windows(data: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    kinds, window = data.get("layer_types"), int(data.get("sliding_window") or 0)
    if not window or not kinds or "sliding_attention" not in kinds[:layers]:
        return ()
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


# ------------------------------------------------------------ blocks


def _dflash(data: Mapping[str, Any], tensors: dict[str, Tensor], target: ModelConfig, where: str) -> PublishedHead:
    """DFlash, DFlash2, DSpark, Domino and XPress, as z-lab and SpecForge write them (layer ids name outputs) or
    speculators (boundaries)."""
    kind = next(name for name in _kind_names(data) if name in _BLOCKS)
    nested = data.get("transformer_layer_config")
    own = dict(data.get("dflash_config") or data.get("dspark_config") or {})
    sizes = dict(data) | (dict(nested) if nested else {}) | own
    named = {_block_name(name): tensor for name, tensor in _eagle_names(tensors, where).items()}
    if "hidden_norm.weight" in named:
        named[f"{FIRST}hidden_norm.weight"] = named.pop("hidden_norm.weight")
    named = {name: tensor for name, tensor in named.items() if not name.startswith("confidence_head.")}
    mask, size = sizes.get("mask_token_id"), int(sizes.get("block_size") or 16)
    if mask is None and "mask_embedding" not in named:
        raise ModelError(f"{where} does not say which token its masks are (mask_token_id).")
    vocabulary = int(sizes["vocab_size"])
    if not 2 <= size <= _LONGEST_BLOCK or not 0 <= int(mask or 0) < vocabulary:
        raise ModelError(f"{where} has blocks of {size} tokens with the mask {mask}, which is no block drafter.")
    base = _eagle3(sizes, named)
    markov = named.get("markov_head.markov_w1.weight")
    base = replace(
        base, kind=DFLASH, mask_token=int(mask or 0), own_mask="mask_embedding" in named,
        causal=bool(sizes.get("causal") or sizes.get("is_causal")), markov=0 if markov is None else markov.shape[-1],
        norm_before_residual=False, norm_output=False, **_prefix_state(kind, sizes, named),
        markov_kind=_markov_kind(sizes, named, where), **_scales(sizes), **_variant(kind, sizes),
        **_both_sides(kind, sizes, size, base.windows), target_name=_verifier(data),
        taps=_block_taps(data, own, nested is not None, len(base.taps), target, where),
    )  # fmt: skip
    readings = _block_readings(base, size, sizes.get("sample_from_anchor", sizes.get("shift_label")))
    first = readings[0].config
    assert isinstance(first, HeadConfig)
    name = _BLOCKS["DominoDraftModel" if first.prefix_state else kind]
    return PublishedHead(name, readings, _complete(first, named, where))


def _block_name(name: str) -> str:
    """Under speculators' names."""
    prefix, _, part = name.partition(".")
    if prefix == "xpress_head":
        return f"refiner_head.{_REFINER_NAMES.get(part, part)}"
    return part if prefix == "logit_head" else name


def _markov_kind(sizes: Mapping[str, Any], named: Mapping[str, Tensor], where: str) -> str:
    """Which variant of DSpark's term a file has, as it says or as its tensors show."""
    found = next((kind for kind, part in MARKOV_PARTS.items() if f"markov_head.{part}.weight" in named), "")
    kind = str(sizes.get("markov_head_type") or found).lower()
    if kind in ("", "none", "vanilla") or "markov_head.markov_w1.weight" not in named:
        return ""
    if kind not in MARKOV_PARTS:
        raise ModelError(f"{where} has a term of the kind '{kind}' for the token before, which Outrider does not run.")
    return kind


def _prefix_state(kind: str, sizes: Mapping[str, Any], named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Domino's state over the tokens so far; its files may have DFlash's architecture, with a projector."""
    if "Domino" not in kind and sizes.get("projector_type") != "domino" and PREFIX_STATE not in named:
        return {}
    state, inner = int(sizes["gru_hidden_dim"]), int(sizes["emb_dim"])
    return {"prefix_state": state, "prefix_inner": inner, "prefix_from": int(sizes.get("pure_draft_prefix_len") or 0)}


def _variant(kind: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """DFlash2's convolutions and selector, XPress's refiner."""
    if kind in _DFLASH2:
        keys = {"conv": ("conv_kernel_size", 2), "conv_group": ("conv_group_size", 16)}
        keys |= {"selector": ("selector_rank", 256), "selector_top": ("selector_top_k", 16)}
        return {name: int(sizes.get(key, default)) for name, (key, default) in keys.items()}
    if kind not in _XPRESS:
        return {}
    rank = int(sizes.get("xpress_rank", 256))
    inner = sizes.get("xpress_mlp_hidden", rank * int(sizes.get("xpress_mlp_ratio", 2)))
    passes = sizes.get("xpress_num_passes", sizes.get("num_jacobi_passes", 6))
    return {"refiner": rank, "refiner_inner": int(inner), "refiner_passes": int(passes)}


def _both_sides(kind: str, sizes: Mapping[str, Any], size: int, windows: tuple[int, ...]) -> dict[str, Any]:
    """Whether rows of layers with windows see their whole block, and the windows with it: theirs begin at its first
    row."""
    both = sizes.get("sliding_window_non_causal")
    if both is None:
        both = kind == "dflash2" or sizes.get("is_causal") is False
    return {"two_sided": True, "windows": tuple(w and w + size for w in windows)} if both else {}


def _scales(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What z-lab's files state of the target's embedding and scores."""
    keys = {"logit_scale": ("output_multiplier", 1.0), "logit_cap": ("final_logit_softcapping", 0.0)}
    keys |= {"embedding_scale": ("input_embedding_scale", 1.0)}
    return {name: float(sizes[key] or default) for name, (key, default) in keys.items() if key in sizes}


def _block_readings(base: HeadConfig, size: int, anchored: bool | None) -> tuple[Reading, ...]:
    """Whether a block's first row predicts the first token of a draft. Where a file does not say, in DSpark's it does,
    and in DFlash's it does not; some of DFlash's kind are trained like DSpark's."""
    notes = {True: "a block's first row predicts too", False: "a block's first row predicts nothing"}
    order = [base.markov > 0, not base.markov] if anchored is None else [bool(anchored)]
    noted = [(first, notes[first] if anchored is None else "") for first in order]
    return tuple(Reading(replace(base, anchored=first, block=size - (not first)), note) for first, note in noted)


def _block_taps(
    data: Mapping[str, Any], own: Mapping[str, Any], boundaries: bool, count: int, target: ModelConfig, where: str
) -> tuple[int, ...]:
    """Which layers are tapped, by their outputs. Without a list they are spread from the second to the last but two."""
    deep = int(data.get("num_target_layers") or own.get("num_target_layers") or target.layers)
    if deep != target.layers:
        raise ModelError(f"{where} was trained for a target of {deep} layers, but this one has {target.layers}.")
    ids = data.get("aux_hidden_state_layer_ids") if boundaries else own.get("target_layer_ids")
    ids = ids or data.get("target_layer_ids")
    if ids:
        taps = tuple(int(i) - boundaries for i in ids)
    else:
        taps = tuple(round(1 + i * (deep - 4) / max(count - 1, 1)) for i in range(count)) if count > 1 else (deep // 2,)
    if len(taps) != count:
        raise ModelError(f"{where} names {len(taps)} layers of its target, but its fc.weight reads {count} of them.")
    return taps


# ------------------------------------------------------------ the others


def _eagle1(data: Mapping[str, Any], tensors: dict[str, Tensor], target: ModelConfig, where: str) -> PublishedHead:
    """EAGLE-1 and 2, HASS: the target's last state after its norm, and the target's output matrix."""
    named = _without_output(tensors, where)
    config = _one_layer(data, named, target)
    return PublishedHead("an EAGLE-1 head", (Reading(config),), _complete(config, named, where))


def _without_output(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    return {name: t for name, t in _eagle_names(tensors, where).items() if name not in ("lm_head.weight", "d2t")}


def _one_layer(data: Mapping[str, Any], named: dict[str, Tensor], target: ModelConfig) -> HeadConfig:
    h, heads, vocabulary = int(data["hidden_size"]), int(data["num_attention_heads"]), int(data["vocab_size"])
    return HeadConfig(
        kind=EAGLE1, hidden_size=h, draft_vocab_size=vocabulary, taps=(target.layers - 1,),
        **_layer_sizes(data, heads, h), layers=int(data["num_hidden_layers"]),
        own_embedding="embed_tokens.weight" in named, own_output=False, fc_bias="fc.bias" in named,
        qkv_bias=f"{FIRST}self_attn.q_proj.bias" in named, normed=True, target_norm_eps=target.norm_eps,
    )  # fmt: skip


def _medusa(data: Mapping[str, Any], tensors: dict[str, Tensor], target: ModelConfig, where: str) -> PublishedHead:
    """Tensors are counted: published configurations name fewer heads than their files have."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = next(((form, m) for pattern, form in _MEDUSA_NAMES if (m := pattern.fullmatch(name))), None)
        if found is None and name != "token_map":
            raise ModelError(f"{where} has a tensor '{name}' that no Medusa head has, so it is not run.")
        named[name if found is None else found[0].format(*found[1].groups())] = tensor
    positions = sum(name.startswith("lm_heads.") for name in named)
    layers = len({name.split(".")[2] for name in named if name.startswith("blocks.0.")})
    if not positions or not layers:
        raise ModelError(f"{where} has no Medusa heads: tensors like '0.0.linear.weight' and '0.1.weight' are missing.")
    wide, hidden = named["lm_heads.0.weight"].shape if named["lm_heads.0.weight"].ndim == 2 else (0, 0)
    needed: Shapes = {f"lm_heads.{i}.weight": (wide, hidden) for i in range(positions)}
    for i, j in itertools.product(range(positions), range(layers)):
        needed[f"blocks.{i}.{j}.weight"] = (hidden, hidden)
        if f"blocks.0.{j}.bias" in named:
            needed[f"blocks.{i}.{j}.bias"] = (hidden,)
    check_shapes(named, needed, where)
    ids = named.get("token_map", torch.arange(wide)).long()
    known = int(data.get("vocab_size") or (target.vocab_size if "token_map" in named else wide))
    _check_ids(ids, wide, known, where)
    config = PerPositionConfig(
        MEDUSA, known, wide, hidden, positions, (target.layers - 1,), layers,
        target_norm_eps=target.norm_eps, target_name=str(data.get("base_model_name_or_path") or ""),
    )  # fmt: skip
    return PublishedHead("a Medusa head", (Reading(config),), named | {"ids": ids})


def _mlp(data: Mapping[str, Any], tensors: dict[str, Tensor], target: ModelConfig, where: str) -> PublishedHead:
    """IBM's MLP speculators; with tied weights a file has only the first of each."""
    positions, wide = int(data["n_predict"]), int(data["emb_dim"])
    inner, vocabulary = int(data.get("inner_dim") or wide), int(data["vocab_size"])
    if not 0 < positions <= 64:
        raise ModelError(f"{where} drafts {positions} tokens (n_predict), which is no MLP speculator.")
    needed: Shapes = {}
    for i in range(positions):
        needed |= {f"emb.{i}.weight": (vocabulary, inner), f"proj.{i}.weight": (inner, inner if i else wide)}
        needed |= {f"head.{i}.weight": (vocabulary, inner), f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
    unknown = sorted(set(tensors) - set(needed))
    if unknown:
        raise ModelError(f"{where} has a tensor '{unknown[0]}' that no MLP speculator has, so it is not run.")
    named: dict[str, Tensor] = {}
    for name in needed:
        part, number, field = name.split(".")
        stored = [f"{part}.{j}.{field}" for j in range(int(number), -1, -1)]
        if found := [other for other in stored if other in tensors]:
            named[name] = tensors[found[0]]
    check_shapes(named, needed, where)
    config = PerPositionConfig(
        MLP, vocabulary, vocabulary, wide, positions, (target.layers - 1,),
        scale_input=bool(data.get("scale_input", False)), target_norm_eps=target.norm_eps,
    )  # fmt: skip
    return PublishedHead("an MLP speculator", (Reading(config),), named | {"ids": torch.arange(vocabulary)})


def _check_ids(ids: Tensor, count: int, vocabulary: int, where: str) -> None:
    fits = ids.shape == (count,) and ids.unique().numel() == count
    if not fits or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ModelError(f"The draft vocabulary of {where} (token_map) names ids outside the target's, or one twice.")


_READERS = {
    "eagle3": _flat, "speculators": _speculators, DFLASH: _dflash, EAGLE1: _eagle1, MEDUSA: _medusa, MLP: _mlp,
}  # fmt: skip
