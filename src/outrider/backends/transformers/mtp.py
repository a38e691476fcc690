"""A checkpoint's layer for further tokens (MTP) beside a target that transformers runs.

Its block is one layer of the target's own class, with the weights from the target's folder. Its K/V, or whatever the
class keeps in their place, lie in a plane, so that they follow the tokens as those of every other drafter; a row
attends to the committed slots of its line and to its drafted ancestors.
Promise: nothing is loaded before every name and shape is checked; what is wrong is said in a sentence. Errors here cost
acceptance, so passes have any shape. It knows a layer's class, rows and planes, not what is drafted.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.cache import Plane
from ...errors import ModelError, first_line
from ...models.config import ModelConfig
from ...models.foreign import ForeignWeights
from ...models.mtp import FOREIGN, SPECULATORS, MtpLayer, Shapes, StoredMtp, stored_mtp
from ...models.tokenizer import read_json
from ...models.weights import InMemory
from ...types import Output
from .. import WHOLE, Part, PlaneShape
from ..rows import Rows

_ONE_LAYER: dict[str, dict[str, Any]] = {  # settings with which layer 0 is the block that such a layer has
    "deepseek_v3": {"first_k_dense_replace": 0},
    "qwen3_next": {"layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1},
}
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # how configurations count them
_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")  # in memory: all experts side by side


def foreign_mtp(weights: ForeignWeights, config: ModelConfig, module: Any) -> tuple[ForeignMtpLayer | None, str]:
    """The layer in the folder of a loaded module, if there is one that is known; why a promised one is not used."""
    if weights.module is not None:  # nothing says which folder it came from
        return None, ""
    stated = _stated(weights)
    if (stored := stored_mtp(weights, config)) is not None:
        return ForeignMtpLayer(stored, _with_eps(config, module), module, weights), ""
    if not stated:
        return None, ""
    if config.architecture in FOREIGN:
        return None, "Its configuration promises layers for further tokens (MTP), but its files have none."
    known = " and ".join(FOREIGN)
    return None, f"Its own layers for further tokens (MTP) are not used: beside transformers those of {known} are."


def mtp_of_folder(tensors: dict[str, Tensor], target: Any, where: str) -> PublishedMtpLayer:
    """The layer of a head in the speculators format, beside a target of its family."""
    stored = StoredMtp(SPECULATORS, InMemory(tensors), target.config.layers)
    layer = PublishedMtpLayer(stored, _with_eps(target.config, target.module), target.module, None)
    if wrong := layer.wrong():
        raise ModelError(f"The head {where} cannot be used: {wrong}.")
    return layer


def _with_eps(config: ModelConfig, module: Any) -> ModelConfig:
    return replace(config, norm_eps=float(module.config.get_text_config(decoder=True).rms_norm_eps))


def _stated(weights: ForeignWeights) -> int | None:
    """How many such layers config.json says there are; None: it does not say."""
    data = read_json(weights.folder / "config.json")
    text = data.get("text_config")
    named = {**data, **text} if isinstance(text, dict) else data
    return next((named[name] for name in _COUNTS if isinstance(named.get(name), int)), None)


@dataclass(frozen=True)
class ForeignMtpLayer(MtpLayer):
    """Its block is a layer of transformers' class for the target."""

    module: Any  # the target
    weights: Any  # `ForeignWeights`; None: the layer is not from the target's folder

    def wrong(self) -> str:
        stated, has = _stated(self.weights), self.stored.count()
        if stated is not None and stated != has:
            return f"config.json says that there are {stated}, but the files have {has}"
        if read_json(self.weights.folder / "config.json").get("quantization_config"):
            return "its weights are quantised, and beside transformers only floats are read"
        return super().wrong()

    def block_shapes(self) -> tuple[Any, Shapes]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in self._empty.state_dict().items():
            shapes |= self._stored_shapes(name, tuple(tensor.shape))
        return self.stored.tensors, shapes

    def block(self, dtype: torch.dtype) -> ForeignBlock:
        """The block with its weights, where the target's are."""
        self.check()
        layer, get = copy.deepcopy(self._empty), self.stored.tensors.get
        exact = dict(layer.named_buffers())  # a router's correction stays in float32
        loaded = {}
        for name, tensor in layer.state_dict().items():
            shape = tuple(tensor.shape)
            parts = [get(n, torch.float32 if name in exact else dtype) for n in self._stored_shapes(name, shape)]
            loaded[name] = torch.cat(parts).reshape(shape)
        layer.load_state_dict(loaded, assign=True)
        rotary = type(self.module.get_decoder().rotary_emb)(config=self._settings)
        place = self.module.get_input_embeddings().weight.device
        return ForeignBlock(layer.eval().to(place), rotary.to(place), self.config.hidden_size, dtype)

    @cached_property
    def _settings(self) -> Any:
        """Of a model with this block only. Experts run one after the other, each for all of its rows."""
        settings = copy.deepcopy(self.module.config.get_text_config(decoder=True))
        settings.num_hidden_layers = 1
        for name, value in _ONE_LAYER[self.config.architecture].items():
            setattr(settings, name, value)
        settings._attn_implementation = settings._experts_implementation = "eager"
        return settings

    @cached_property
    def _empty(self) -> nn.Module:
        """The block without weights."""
        with torch.device("meta"):
            layer: nn.Module = type(self.module.get_decoder().layers[-1])(self._settings, 0)
        return layer

    def _stored_shapes(self, name: str, shape: tuple[int, ...]) -> Shapes:
        """The stored tensors that, one after the other, are a tensor of the block: files have one for each expert."""
        at, joined = self.stored.at + self.layout.block, _EXPERTS.fullmatch(name)
        if joined is None or self.stored.tensors.has(at + name):
            return {at + name: shape}
        experts, rows, columns = shape
        parts = {"down_proj": rows} if joined[2] == "down_proj" else {"gate_proj": rows // 2, "up_proj": rows // 2}
        each = ((f"{at}{joined[1]}{i}.{part}.weight", part) for i in range(experts) for part in parts)
        return {stored: (parts[part], columns) for stored, part in each}


class PublishedMtpLayer(ForeignMtpLayer):
    """Its tensors, and nothing else, are in a folder of their own."""

    def wrong(self) -> str:
        known = {*self.block_shapes()[1], *(self.stored.name(part) for part in range(4))}
        unknown = sorted(self.stored.tensors.names() - known)
        return MtpLayer.wrong(self) or (f"such a layer has no tensor '{unknown[0]}'" if unknown else "")


class ForeignBlock:
    """A layer of a transformers model over rows and a plane, where the built-in decoder has a `Transformer`."""

    cos = torch.empty(0)  # its rope has no table

    def __init__(self, layer: nn.Module, rotary: nn.Module, width: int, dtype: torch.dtype) -> None:
        self.layer, self.rotary, self.dtype, self.place = layer, rotary, dtype, next(layer.parameters()).device
        kept = _Shapes()
        try:
            with torch.inference_mode():
                x = torch.zeros(1, width, dtype=dtype, device=self.place)
                self._call(x, torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, dtype=dtype), kept)
        except Exception as error:  # another version of transformers can raise anything
            raise ModelError(f"transformers cannot run {type(layer).__name__} alone: {first_line(error)}.") from error
        self.plane_shape = PlaneShape(1, kept.heads, max(kept.widths), dtype)

    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        """One pass over inputs x [T, H]; each tap is the output [T, H]. Both are with the weights, rows on a CPU."""
        assert x is not None
        plane.count_pass()
        out = torch.empty_like(x)
        for line in rows.lines.unique():
            chosen = (rows.lines == line).nonzero()[:, 0]  # [n] rows of one sequence
            held, seen = _keys(rows, chosen, int(line))
            mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill(~seen, torch.finfo(self.dtype).min)
            slots, here = _Slots(plane, rows.slots[chosen], held), chosen.to(self.place)
            out[here] = self._call(x[here], rows.positions[chosen], mask, slots)
        return Output(x.new_empty(0, 0), dict.fromkeys(taps, out))

    def _call(self, x: Tensor, positions: Tensor, mask: Tensor, kept: Any) -> Tensor:
        """Outputs [n, H] of rows x [n, H] of one sequence; mask [n, keys] is added to scores."""
        x, at, mask = x[None], positions[None].to(self.place), mask[None, None].to(self.place)
        output = self.layer(
            x, attention_mask=mask, position_ids=at, past_key_values=kept, position_embeddings=self.rotary(x, at)
        )
        states: Tensor = (output[0] if isinstance(output, tuple) else output)[0]
        return states


def _keys(rows: Rows, chosen: Tensor, line: int) -> tuple[Tensor, Tensor]:
    """The slots [keys] that some of these rows [n] of a line attend to, and which of them each row does [n, keys]."""
    context = rows.context[chosen]  # [n]
    held = rows.table[line, : int(context.max())].long()
    seen = torch.arange(len(held)) < context[:, None]
    if rows.ancestors is None:
        return held, seen
    tails = rows.ancestors[chosen].long()  # [n, D]
    drafted = tails[tails >= 0].unique()  # [m]
    return torch.cat([held, drafted]), torch.cat([seen, (tails[:, :, None] == drafted).any(1)], 1)


class _Slots:
    """What a layer takes for a cache: new entries go to their rows' slots, and those of all keys come back.

    A layer keeps two kinds of entries, K and V or what it makes them from; they may differ in width.
    """

    def __init__(self, plane: Plane, slots: Tensor, held: Tensor) -> None:
        self.kinds, self.slots, self.held = (plane.k[0], plane.v[0]), slots, held

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """keys, values [1, heads, n, d] each; d may differ."""
        first, second = (self._update(*pair) for pair in zip(self.kinds, (keys, values), strict=True))
        return first, second

    def _update(self, kind: Tensor, new: Tensor) -> Tensor:
        wide = new.shape[-1]
        kind[self.slots, :, :wide] = new[0].transpose(0, 1).to(kind)
        return kind[self.held, :, :wide].transpose(0, 1)[None].to(new)  # [1, heads, keys, d]


class _Shapes:
    """Takes the place of a cache once, to learn what a layer keeps of a token."""

    heads, widths = 1, (1, 1)

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.heads, self.widths = keys.shape[1], (keys.shape[-1], values.shape[-1])
        return keys, values
