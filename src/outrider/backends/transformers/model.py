"""Any transformers model, causal or encoder-decoder, behind the `Model` protocol: slower than the built-in decoder.

Promise: the same exactness. transformers' kernels are not row-invariant: a row's bits change with the number of rows in
its pass, with its index among them and with the length of the keys. So none of these ever changes: positions are
divided into blocks, whose bounds depend on the prompt's length alone, and a row is always computed at the same index of
a pass over its whole block, after the same context. Rows that do not exist yet are filler tokens, which no earlier row
attends to. So plain decoding, verification, prefill and recomputation compute the same bits. What a model supports is
probed when it is loaded: without a usable cache, passes read the whole text; where rows depend on later ones, a block
is one token, and drafts save nothing.

It knows the rows of a pass and their sequences; it does not know what is drafted or why.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...engine.cache import Plane
from ...errors import ConfigError, ModelError, first_line
from ...models.config import ModelConfig
from ...models.foreign import LOCAL, ForeignWeights
from ...types import Batch, Output, Sequence, common_prefix
from .. import WHOLE, Model, Part, PlaneShape
from ..rows import Rows
from .mtp import foreign_mtp
from .prefix_cache import Grid, PrefixCache, Source, can_truncate, copied, empty, truncated

ROWS = {"cpu": 8, "cuda": 16}  # of a block: what one pass computes, and so the most that one pass can verify
PROMPT = 128  # rows of a block within the prompt
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_MAX_SOURCES, _MAX_DRAFTS = 64, 256  # encoder outputs and draft states that are kept
_DRAFT_ROWS = 512  # of a drafter's pass
_CACHE_TOLERANCE = 0.05  # of the logits' spread: the largest mean difference between cached and uncached passes


def load_foreign(weights: ForeignWeights, config: ModelConfig, dtype: str, device: torch.device) -> HFModel:
    """The model behind a foreign checkpoint, loaded from its folder unless its module is in memory already."""
    module = weights.module if weights.module is not None else _read(weights, dtype, device)
    layer, unused = foreign_mtp(weights, config, module)
    model: Any = HFModel(module, config, f"{weights.reason} {unused}".strip(), _start_tokens(module))
    model.identity, model.mtp = lambda: _identity(module), layer
    loaded: HFModel = model
    return loaded


def _read(weights: ForeignWeights, dtype: str, device: torch.device) -> Any:
    import transformers

    if dtype not in ("auto", *_DTYPES):
        raise ConfigError(f"{weights.reason} It cannot run in {dtype}; choose dtype float32 or bfloat16.")
    # On a CPU float32, which represents every file exactly.
    wanted = _DTYPES.get(dtype) or ("auto" if device.type == "cuda" else torch.float32)
    config = transformers.AutoConfig.from_pretrained(weights.folder, **LOCAL)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    bars: Any = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    try:
        if not sys.stderr.isatty():
            bars.disable_progress_bar()
        module: Any = kind.from_pretrained(weights.folder, dtype=wanted, **LOCAL)
    except Exception as error:  # a broken folder can raise anything
        raise ModelError(f"transformers cannot load {weights.folder}: {first_line(error)}.") from error
    finally:
        if shown:
            bars.enable_progress_bar()
    return module.to(device)


def _identity(module: Any) -> str:
    """16 hex digits that identify a model: a hash of its configuration and a sample of its weights."""
    digest = hashlib.sha256(module.config.to_json_string(use_diff=False).encode())
    for name, weight in sorted(module.named_parameters())[::8]:
        sample = weight.detach().flatten()[:16].to("cpu", torch.float32)
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _start_tokens(module: Any) -> tuple[int, ...]:
    """The tokens that a decoder's text begins with; none for a model without an encoder."""
    if not module.config.is_encoder_decoder:
        return ()
    start = _setting(module, "decoder_start_token_id", "bos_token_id", "pad_token_id")
    if start is None:
        raise ModelError("The model does not say how its answers begin: set decoder_start_token_id in its config.")
    forced = _setting(module, "forced_bos_token_id")
    return (start,) if forced is None else (start, forced)


def _setting(module: Any, *names: str) -> int | None:
    """The first integer among these settings, the generation configuration before the model's."""
    configs = (getattr(module, "generation_config", None), module.config)
    values = (getattr(config, name, None) for name in names for config in configs)
    return next((value for value in values if isinstance(value, int)), None)


class Chain(NamedTuple):
    """One chain of tokens from the start of a sequence, and the rows of the pass that lie on it."""

    seq: Sequence
    tokens: list[int]
    rows: list[tuple[int, int]]  # (position, row)
    drafted: bool  # some of the tokens are not committed


class DraftState(NamedTuple):
    """The cache of a draft, and the tokens it holds."""

    source: Source
    tokens: list[int]
    state: Any


RowIndices = list[tuple[int, int]]  # (position in the chain or index in the pass, row)
RowOutputs = tuple[dict[int, Tensor], dict[int, dict[int, Tensor]]]  # logits by row; hidden states by tap and row


class HFModel(Model):
    """A transformers module as a `Model`. Rows and logits are on the CPU, wherever the module is."""

    has_layers = False
    exact = True  # by the form of its passes
    plane_shape = PlaneShape(1, 1, 1, torch.int32)  # token ids, by which K/V states are found

    def __init__(self, module: Any, config: ModelConfig, reason: str, starts: tuple[int, ...] = ()) -> None:
        self.module, self.config, self.starts = module.eval(), config, starts
        self.weights_device = torch.device(module.device)
        self.dtype: torch.dtype = module.dtype
        self.compute = self.dtype
        self.encoder = bool(module.config.is_encoder_decoder)
        relative = hasattr(module.config, "relative_attention_num_buckets")  # positions: the encoder has no limit
        self.max_source = None if relative else getattr(module.config, "max_position_embeddings", None)
        self.banned = _banned_tokens(module, config.vocab_size)
        self.layers = find_layers(module, config.layers)
        self._capacity = 0  # tokens that caches may hold: as many as there are slots
        self.loose = False  # True: it drafts only, and may run passes of any shape
        self._lock = threading.RLock()  # one pass at a time: layers are replaced and hooked
        self._encoded: OrderedDict[Source, Any] = OrderedDict()
        self._drafts: OrderedDict[tuple[int, frozenset[int]], DraftState] = OrderedDict()
        self._separate_experts()
        self.block, self.cached = min(ROWS.get(self.weights_device.type, 8), config.context_length), True
        self._probe()
        self.prefixes = PrefixCache()
        self.description = f"{reason} {self._description()}"

    @property
    def embedding(self) -> Tensor:
        table: Tensor = self.module.get_input_embeddings().weight.detach()  # [V, H]
        return table.to(self.device)

    def as_drafter(self) -> HFModel:
        """The same weights for drafting only: passes of any shape."""
        twin = HFModel.__new__(HFModel)
        twin.__dict__ |= self.__dict__ | {"loose": self.cached, "_drafts": OrderedDict(), "prefixes": PrefixCache()}
        return twin

    @torch.inference_mode()
    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        plane.count_pass()
        if x is not None or part.start or part.stop not in (None, self.config.layers) or rows.batch is None:
            raise ModelError("A model that transformers runs can only run whole; choose another drafter.")
        skipped = part.skip_attention & part.skip_mlp
        if (taps or skipped) and self.layers is None:
            raise ModelError("The layers of this model cannot be found, so none can be tapped or skipped.")
        with self._lock:
            return self._forward(rows.batch, plane, skipped, taps, part.head)

    def _forward(
        self, packed: Batch, plane: Plane, skipped: frozenset[int], taps: tuple[int, ...], head: bool
    ) -> Output:
        ids = plane.k[0].view(-1)  # [S]
        ids[packed.slots] = torch.tensor(packed.tokens, dtype=ids.dtype)
        self._capacity = len(ids)
        needed = set(range(len(packed.tokens))) if taps else set(packed.want)
        logits: dict[int, Tensor] = {}
        hidden: dict[int, dict[int, Tensor]] = {tap: {} for tap in taps}
        for chain in _chains(packed, ids):
            wanted = [(position, row) for position, row in chain.rows if row in needed]
            run = self._draft if skipped or self.loose else self._blocks
            run(chain, wanted, skipped, (logits, hidden))
        states = {tap: torch.stack([rows[i] for i in range(len(packed.tokens))]) for tap, rows in hidden.items()}
        if not head or not packed.want:
            return Output(torch.zeros(0, self.config.vocab_size), states)
        return Output(torch.stack([logits[i] for i in packed.want]), states)

    def _blocks(self, chain: Chain, wanted: RowIndices, skipped: frozenset[int], outputs: RowOutputs) -> None:
        """Whole blocks, each within its own bounds: the passes whose bits are the promise."""
        source, tokens = tuple(chain.seq.source), chain.tokens
        first = min((position for position, _ in wanted), default=len(tokens))
        grid = self._grid(chain.seq)
        start, state = self.prefixes.longest(source, tokens, first, grid)
        while start < len(tokens):
            stop = min(grid(start), self.config.context_length)
            here = [(position - start, row) for position, row in wanted if start <= position < stop]
            if stop > len(tokens) and not here:
                return
            block = tokens[start:stop] + [0] * (stop - len(tokens))  # beyond the end of the text, filler
            if self.cached:
                before, state = state, empty(self.encoder) if state is None else copied(state)
                self._pass(block, source, state, frozenset(), here, outputs)
                if before is None and self.encoder:  # cross-attention's K/V are computed once per source
                    self.prefixes.put(source, [], truncated(state, 0), self._capacity, int)
                if stop <= len(tokens) and stop == grid(start):
                    self.prefixes.put(source, tokens[:stop], state, self._capacity, grid)
            else:
                here = [(start + i, row) for i, row in here]
                self._pass(tokens[:start] + block, source, None, frozenset(), here, outputs)
            start = stop

    def _grid(self, seq: Sequence) -> Grid:
        """Where a sequence's blocks end."""
        prompt = seq.prompt_len // PROMPT * PROMPT if self.cached else 0
        return lambda start: start + (PROMPT if start < prompt else self.block)

    def _draft(self, chain: Chain, wanted: RowIndices, skipped: frozenset[int], outputs: RowOutputs) -> None:
        """Only new tokens, in one pass. A draft that skips layers starts from the whole model's states."""
        source, tokens, key = tuple(chain.seq.source), chain.tokens, (chain.seq.id, skipped)
        first = min((position for position, _ in wanted), default=len(tokens))
        if not self.cached:
            self._pass(tokens, source, None, skipped, wanted, outputs)
            return
        draft, start, state = self._drafts.pop(key, None), 0, None
        if draft is not None and draft.source == source and (chain.drafted or not skipped):
            start = min(common_prefix(draft.tokens, tokens), first)
            state = truncated(draft.state, start)
        elif skipped:
            start, state = self.prefixes.longest(source, tokens, first, self._grid(chain.seq))
        state = empty(self.encoder) if state is None else copied(state)
        while start < len(tokens):
            stop = min(start + _DRAFT_ROWS, len(tokens))
            here = [(position - start, row) for position, row in wanted if start <= position < stop]
            self._pass(tokens[start:stop], source, state, skipped, here, outputs)
            start = stop
        self._drafts[key] = DraftState(source, tokens, state)
        tokens_held = sum(len(each.tokens) for each in self._drafts.values())
        while len(self._drafts) > 1 and (len(self._drafts) > _MAX_DRAFTS or tokens_held > self._capacity):
            tokens_held -= len(self._drafts.popitem(last=False)[1].tokens)

    def _pass(
        self, tokens: list[int], source: Source, state: Any, skipped: frozenset[int], here: RowIndices,
        outputs: RowOutputs,
    ) -> None:  # fmt: skip
        """One pass of the module. Logits and hidden states of `here` (index in the pass, row) go to `outputs`."""
        logits, hidden = outputs
        new_logits, new_hidden = self._call(tokens, source, state, skipped, tuple(hidden))
        for i, row in here:
            logits[row] = new_logits[i]
            for tap, states in new_hidden.items():
                hidden[tap][row] = states[i]

    @torch.inference_mode()
    def _call(
        self, tokens: list[int], source: Source, state: Any, skipped: frozenset[int] = frozenset(), taps: Any = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """transformers' pass over these tokens after a state, which it updates: logits [T, V], tapped states [T, H]."""
        arguments: dict[str, Any] = {"return_dict": True, "use_cache": state is not None}
        ids = torch.tensor([tokens], device=self.weights_device)
        arguments["decoder_input_ids" if self.encoder else "input_ids"] = ids
        if self.encoder:
            arguments["encoder_outputs"] = self._encode(source)
        if state is not None:
            arguments["past_key_values"] = state
        with _skipping(self.layers, skipped), _tapped(self.layers, taps) as hidden:
            logits = self.module(**arguments).logits[0]  # [T, V]
        if self.banned:
            logits[:, self.banned] = -torch.inf
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(self.device, dtype), {tap: states.to(self.device) for tap, states in hidden.items()}

    def _encode(self, source: Source) -> Any:
        """The encoder's output for a source, computed once for all passes."""
        source = source or self.starts[:1]
        if source not in self._encoded:
            ids = torch.tensor([source], device=self.weights_device)
            self._encoded[source] = self.module.get_encoder()(input_ids=ids, return_dict=True)
            if len(self._encoded) > _MAX_SOURCES:
                self._encoded.popitem(last=False)
        self._encoded.move_to_end(source)
        return self._encoded[source]

    def _separate_experts(self) -> None:
        """Choose the form of experts that runs each row on its own; others sort rows by expert, so shapes vary."""
        selectable = getattr(self.module, "_can_set_experts_implementation", None)
        if selectable is not None and selectable():
            self.module.set_experts_implementation("batched_mm")

    @torch.inference_mode()
    def _probe(self) -> None:
        """Find out whether its cache agrees with passes over the whole text, and whether rows ignore later rows."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(self.config.vocab_size, (2 * self.block,), generator=generator).tolist()
        others = [torch.randint(self.config.vocab_size, (self.block,), generator=generator).tolist() for _ in range(4)]
        self.cached = 2 * self.block <= self.config.context_length and self._cache_works(ids)
        state = empty(self.encoder) if self.cached else None
        if state is not None:
            self._call(ids[: self.block], (), state)
        for keep, other in zip((1, self.block // 4, self.block // 2, self.block - 1), others, strict=True):
            first, second = (
                self._call(block, (), None if state is None else copied(state))[0][:keep]  # [keep, V]
                for block in (ids[-self.block :], ids[-self.block :][:keep] + other[keep:])
            )
            if not torch.equal(first, second):
                self.block = 1
                return

    def _cache_works(self, ids: list[int]) -> bool:
        whole = self._call(ids, (), None)[0][self.block :]  # [block, V]
        state = empty(self.encoder)
        try:
            self._call(ids[: self.block], (), state)
            parts = self._call(ids[self.block :], (), state)[0]
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            return False  # its state is of another kind
        finite = whole.isfinite()  # banned tokens are -inf in both
        near = bool((whole - parts)[finite].abs().mean() <= _CACHE_TOLERANCE * whole[finite].std())
        return near and can_truncate(state) and state.get_seq_length() == len(ids)

    def _description(self) -> str:
        if self.block == 1:
            return "Its rows depend on later rows, so each token takes a pass and drafts save nothing."
        text = f"Passes have {self.block} rows, so that text does not depend on drafts."
        again = " Its cache cannot be truncated, so each pass reads the whole text again."
        return text if self.cached else text + again


def _chains(packed: Batch, ids: Tensor) -> Iterable[Chain]:
    """The pass as chains: one per sequence, or one per leaf where a draft branches. Each row is on exactly one."""
    groups: dict[int, list[int]] = {}
    for row, seq in enumerate(packed.owners):
        groups.setdefault(id(seq), []).append(row)
    for rows in groups.values():
        seq, base = packed.owners[rows[0]], max(packed.context[row] for row in rows)
        tails = {row: ids[packed.tails[row]].tolist() if packed.tails[row] else [] for row in rows}
        ends: list[list[int]] = []
        for tail in sorted(tails.values(), key=len, reverse=True):
            if not any(end[: len(tail)] == tail for end in ends):
                ends.append(tail)
        left = set(rows)
        for end in ends:
            own = [row for row in rows if row in left and end[: len(tails[row])] == tails[row]]
            left -= set(own)
            yield Chain(seq, seq.tokens[:base] + end, [(packed.positions[row], row) for row in own], bool(end))


def _banned_tokens(module: Any, vocabulary: int) -> list[int]:
    """Tokens that the generation configuration forbids."""
    settings = getattr(module, "generation_config", None)
    words = getattr(settings, "bad_words_ids", None) or ()
    banned = [*(word[0] for word in words if len(word) == 1), *(getattr(settings, "suppress_tokens", None) or ())]
    return sorted({token for token in banned if 0 <= token < vocabulary})


# ------------------------------------------------------------ a module's layers


def find_layers(module: Any, count: int) -> nn.ModuleList | None:
    """The decoder's layers: the list of as many modules as the configuration has layers. None if there is none."""
    decoder = module.get_decoder() if hasattr(module, "get_decoder") else module
    for part in (decoder if decoder is not None else module).modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    return None


@contextmanager
def _tapped(layers: nn.ModuleList | None, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Collects the outputs of these layers in the pass that runs meanwhile: layer -> [T, H]."""
    hidden: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for tap in taps:
            assert layers is not None

            def store(layer: Any, inputs: Any, output: Any, tap: int = tap) -> None:
                hidden[tap] = (output[0] if isinstance(output, tuple) else output)[0].float()

            stack.callback(layers[tap].register_forward_hook(store).remove)
        yield hidden


class _SkippedLayer(nn.Module):
    """Replaces a layer: returns its input, with the extra outputs of the last layer that ran."""

    def __init__(self, layer: nn.Module, last: dict[str, Any]) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not as a submodule: it must not be found twice
        object.__setattr__(self, "last", last)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "layer"), name)  # models read attributes of their layers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        output = self.last.get("output")
        return (states, *output[1:]) if isinstance(output, tuple) else states


@contextmanager
def _skipping(layers: nn.ModuleList | None, skipped: frozenset[int]) -> Iterator[None]:
    """Skips these layers meanwhile. The first layer always runs, because the cache counts its tokens there."""
    skipped = skipped - {0}
    if layers is None or not skipped:
        yield
        return
    last: dict[str, Any] = {}
    with ExitStack() as stack:
        for i, layer in enumerate(list(layers)):
            if i in skipped:
                stack.callback(layers.__setitem__, i, layer)
                layers[i] = _SkippedLayer(layer, last)
            else:
                hook = layer.register_forward_hook(lambda layer, inputs, output: last.update(output=output))
                stack.callback(hook.remove)
        yield
