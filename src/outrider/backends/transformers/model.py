"""Any transformers model behind our protocol, causal or encoder-decoder: slower than the built-in decoder, as exact.

transformers' kernels are not row-invariant: a row's bits change with the number of rows in its pass, with its place
among them and with the length of the keys. So none of these ever changes. Positions are divided into blocks, and a row
is always computed at the same place of a pass over its whole block, after the same context; what does not exist yet is
filler, which nobody before it can see. Where the blocks lie depends on the prompt's length alone: PROMPT positions
each as long as they are within it, then a few. Plain decoding, verification, prefill and recomputation run the very
same passes with other fillers, so a row's logits are the same bits in all of them. Mixtures of experts are asked for
the one form in which a row does not share its products with others. What a model really does is probed when it is
loaded: without a cache that can be trusted, passes read the whole text; where rows depend on later ones, a block is
one token, and drafts save nothing.

It knows the rows of a pass and whose they are; it does not know what is drafted or why.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...engine.cache import Plane
from ...errors import ConfigError, ModelError
from ...models.config import ModelConfig
from ...types import Batch, Output, Sequence
from .. import WHOLE, Model, Opening, Part, PlaneShape
from ..rows import Rows
from .layers import find_layers, tapped, without
from .states import Grid, Source, States, can_be_cut, copied, cut, empty

ROWS = {"cpu": 8, "cuda": 16}  # of a block: what one pass computes, and so the most that one pass can verify
PROMPT = 128  # rows of a block within the prompt
_SOURCES, _LINES = 64, 256  # encoded texts, and drafts under way, that are remembered
_FEED = 512  # rows of a drafter's pass
_LIKENESS = 0.05  # of the logits' spread: how far a trusted cache may be from the whole text read again


class Path(NamedTuple):
    """One chain of tokens from the start of a sequence, and which rows of the pass lie on it."""

    seq: Sequence
    tokens: list[int]
    rows: list[tuple[int, int]]  # (position, row)
    drafted: bool  # some of them are not committed


class Line(NamedTuple):
    """A draft under way: what its state stands for."""

    source: Source
    tokens: list[int]
    state: Any


class HFModel(Model):
    """A transformers module as a `Model`. Rows come in and logits go out on the CPU, wherever the module lives."""

    has_layers = False
    exact = True  # by the form of its passes

    def __init__(self, module: Any, config: ModelConfig, why: str, starts: tuple[int, ...] = ()) -> None:
        self.module, self.config, self.starts = module.eval(), config, starts
        self.weights_device = torch.device(module.device)
        self.dtype = self.compute = module.dtype
        self.encoder = bool(module.config.is_encoder_decoder)
        self.source_room = _source_room(module.config)
        self.never = _never(module, config.vocab_size)
        self.layers = find_layers(module, config.layers)
        self._room = 0  # tokens that are remembered: as many as there are slots
        self.loose = False  # True: it drafts only, and may run whatever shape is cheapest
        self._lock = threading.RLock()  # one pass at a time: layers are swapped and tapped
        self._encoded: OrderedDict[Source, Any] = OrderedDict()
        self._lines: OrderedDict[tuple[int, frozenset[int]], Line] = OrderedDict()
        self._separate_experts()
        self.block, self.cached = min(ROWS.get(self.weights_device.type, 8), config.context_length), True
        self._probe()
        self.states = States()
        self.description = f"{why} {self._manner()}"

    @property
    def plane_shape(self) -> PlaneShape:
        """A plane holds ids: what the model remembers is kept by its tokens, and slots only say which those are."""
        return PlaneShape(1, 1, 1, torch.int32)

    @property
    def embedding(self) -> Tensor:
        table: Tensor = self.module.get_input_embeddings().weight.detach()  # [V, H]
        return table.to(self.device)

    def as_drafter(self) -> HFModel:
        """The same weights for drafting only: passes of whatever shape is cheapest."""
        twin = HFModel.__new__(HFModel)
        twin.__dict__ |= self.__dict__ | {"loose": self.cached, "_lines": OrderedDict(), "states": States()}
        return twin

    def opening(self, ids: list[int]) -> Opening:
        """Where an answer to these ids begins: after them, or afresh with them as source, where there is an encoder."""
        if not self.encoder:
            return Opening(ids, [])
        if self.source_room is not None and len(ids) > self.source_room:
            raise ConfigError(
                f"The text has {len(ids)} tokens, but this model's encoder reads at most {self.source_room}; "
                "shorten it, or give it in parts."
            )
        return Opening(list(self.starts), ids)

    # ------------------------------------------------------------ the protocol

    @torch.inference_mode()
    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        plane.count_pass()
        if x is not None or part.start or part.stop not in (None, self.config.layers) or rows.batch is None:
            raise ModelError("A model that transformers runs can only run whole; choose a drafter that needs no more.")
        absent = part.skip_attention & part.skip_mlp
        if (taps or absent) and self.layers is None:
            raise ModelError("The layers of this model cannot be told apart: none can be listened to or left out.")
        with self._lock:
            return self._forward(rows.batch, plane, absent, taps, part.head)

    def _forward(
        self, packed: Batch, plane: Plane, absent: frozenset[int], taps: tuple[int, ...], head: bool
    ) -> Output:
        ids = plane.k[0].view(-1)  # [S]
        ids[packed.slots] = torch.tensor(packed.tokens, dtype=ids.dtype)
        self._room = len(ids)
        needed = set(range(len(packed.tokens))) if taps else set(packed.want)
        spoken: dict[int, Tensor] = {}
        heard: dict[int, dict[int, Tensor]] = {tap: {} for tap in taps}
        for path in _paths(packed, ids):
            wanted = [(position, row) for position, row in path.rows if row in needed]
            run = self._draft if absent or self.loose else self._blocks
            run(path, wanted, absent, (spoken, heard))
        hidden = {tap: torch.stack([found[i] for i in range(len(packed.tokens))]) for tap, found in heard.items()}
        if not head or not packed.want:
            return Output(torch.zeros(0, self.config.vocab_size), hidden)
        return Output(torch.stack([spoken[i] for i in packed.want]), hidden)

    def _blocks(self, path: Path, wanted: list[tuple[int, int]], absent: frozenset[int], found: Any) -> None:
        """Whole blocks, each at its own place: the passes whose bits are the promise."""
        source, tokens = tuple(path.seq.source), path.tokens
        first = min((position for position, _ in wanted), default=len(tokens))
        grid = self._grid(path.seq)
        at, state = self.states.longest(source, tokens, first, grid)
        while at < len(tokens):
            stop = min(grid(at), self.config.context_length)
            here = [(position - at, row) for position, row in wanted if at <= position < stop]
            whole = stop <= len(tokens)
            if not whole and not here:
                return
            state = self._block(tokens, at, stop, source, state, here, found)
            if whole and state is not None and stop == grid(at):
                self.states.put(source, tokens[:stop], state, self._room, grid)
            at = stop

    def _grid(self, seq: Sequence) -> Grid:
        """Where a sequence's blocks end."""
        prompt = seq.prompt_len // PROMPT * PROMPT if self.cached else 0
        return lambda at: at + (PROMPT if at < prompt else self.block)

    def _block(
        self, tokens: list[int], at: int, stop: int, source: Source, state: Any, here: list[tuple[int, int]], found: Any
    ) -> Any:
        """One block's pass; the state after it. The last tokens are filler where the text is not that long."""
        chunk = tokens[at:stop] + [0] * max(stop - len(tokens), 0)
        if not self.cached:
            self._pass(tokens[:at] + chunk, source, None, frozenset(), [(at + i, row) for i, row in here], found)
            return None
        after = empty(self.encoder) if state is None else copied(state)
        self._pass(chunk, source, after, frozenset(), here, found)
        if state is None and self.encoder and at == 0:
            self.states.put(source, [], cut(after, 0), self._room, int)  # what comes from the source is computed once
        return after

    def _draft(self, path: Path, wanted: list[tuple[int, int]], absent: frozenset[int], found: Any) -> None:
        """Only what is new, in one pass. A draft with layers left out leans on the whole model's states."""
        source, tokens, key = tuple(path.seq.source), path.tokens, (path.seq.id, absent)
        first = min((position for position, _ in wanted), default=len(tokens))
        if not self.cached:
            self._pass(tokens, source, None, absent, wanted, found)
            return
        line, at, state = self._lines.pop(key, None), 0, None
        if line is not None and line.source == source and (path.drafted or not absent):
            at = min(_common(line.tokens, tokens), first)
            state = cut(line.state, at)
        elif absent:
            at, state = self.states.longest(source, tokens, first, self._grid(path.seq))
        state = empty(self.encoder) if state is None else copied(state)
        while at < len(tokens):
            stop = min(at + _FEED, len(tokens))
            here = [(position - at, row) for position, row in wanted if at <= position < stop]
            self._pass(tokens[at:stop], source, state, absent, here, found)
            at = stop
        self._lines[key] = Line(source, tokens, state)
        while len(self._lines) > 1 and (len(self._lines) > _LINES or _held(self._lines.values()) > self._room):
            self._lines.popitem(last=False)

    def _pass(
        self, tokens: list[int], source: Source, state: Any, absent: frozenset[int], here: Iterable[Any], found: Any
    ) -> None:
        """One pass of the module; what the rows `here` (place in the pass, row) say goes to `found`."""
        spoken, heard = found
        logits, hidden = self._call(tokens, source, state, absent, tuple(heard))
        for i, row in here:
            spoken[row] = logits[i]
            for tap, states in hidden.items():
                heard[tap][row] = states[i]

    @torch.inference_mode()
    def _call(
        self, tokens: list[int], source: Source, state: Any, absent: frozenset[int] = frozenset(), taps: Any = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """transformers' own pass over these tokens after a state, which it brings up to date: logits [T, V]."""
        given: dict[str, Any] = {"return_dict": True, "use_cache": state is not None}
        given["decoder_input_ids" if self.encoder else "input_ids"] = torch.tensor([tokens], device=self.weights_device)
        if self.encoder:
            given["encoder_outputs"] = self._read(source)
        if state is not None:
            given["past_key_values"] = state
        with without(self.layers, absent), tapped(self.layers, taps) as hidden:
            logits = self.module(**given).logits[0]  # [T, V]
        if self.never:
            logits[:, self.never] = -torch.inf
        floats = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(self.device, floats), {tap: seen.to(self.device) for tap, seen in hidden.items()}

    def _read(self, source: Source) -> Any:
        """What the encoder makes of a source, once for all passes."""
        source = source or self.starts[:1]
        if source not in self._encoded:
            ids = torch.tensor([source], device=self.weights_device)
            self._encoded[source] = self.module.get_encoder()(input_ids=ids, return_dict=True)
            if len(self._encoded) > _SOURCES:
                self._encoded.popitem(last=False)
        self._encoded.move_to_end(source)
        return self._encoded[source]

    # ------------------------------------------------------------ what it can be trusted with

    def _separate_experts(self) -> None:
        """Experts in the form that runs each row on its own; others sort rows by expert, so shapes depend on all."""
        can = getattr(self.module, "_can_set_experts_implementation", None)
        if can is not None and can():
            self.module.set_experts_implementation("batched_mm")

    @torch.inference_mode()
    def _probe(self) -> None:
        """Whether its cache does what the whole text does, and whether rows are free of what comes after them."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(self.config.vocab_size, (2 * self.block,), generator=generator).tolist()
        others = [torch.randint(self.config.vocab_size, (self.block,), generator=generator).tolist() for _ in range(4)]
        self.cached = 2 * self.block <= self.config.context_length and self._cache_works(ids)
        state = empty(self.encoder) if self.cached else None
        if state is not None:
            self._call(ids[: self.block], (), state)
        for keep, other in zip((1, self.block // 4, self.block // 2, self.block - 1), others, strict=True):
            first, second = (
                self._call(chunk, (), None if state is None else copied(state))[0][:keep]  # [keep, V]
                for chunk in (ids[-self.block :], ids[-self.block :][:keep] + other[keep:])
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
            return False  # whatever it keeps between passes, it is not this
        said = whole.isfinite()  # what is never said is as far below as anything
        near = bool((whole - parts)[said].abs().mean() <= _LIKENESS * whole[said].std())
        return near and can_be_cut(state) and state.get_seq_length() == len(ids)

    def _manner(self) -> str:
        words = f"Passes have {self.block} rows, so that text does not depend on drafts."
        if not self.cached:
            words += " It keeps nothing between passes that could be cut, so each pass reads the whole text again."
        if self.block == 1:
            words = "Its rows depend on those after them, so each token takes a pass and drafts save nothing."
        return words


def _paths(packed: Batch, ids: Tensor) -> Iterable[Path]:
    """The pass as chains: one for each sequence, and one for each leaf where drafts branch. Each row is on one."""
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
            mine = [row for row in rows if row in left and end[: len(tails[row])] == tails[row]]
            left -= set(mine)
            yield Path(seq, seq.tokens[:base] + end, [(packed.positions[row], row) for row in mine], bool(end))


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _held(lines: Iterable[Line]) -> int:
    return sum(len(line.tokens) for line in lines)


def _source_room(config: Any) -> int | None:
    """The longest source, where positions are counted; None where only distances are."""
    relative = hasattr(config, "relative_attention_num_buckets")
    return None if relative else getattr(config, "max_position_embeddings", None)


def _never(module: Any, vocabulary: int) -> list[int]:
    """Tokens that, as its makers say, it must never say."""
    settings = getattr(module, "generation_config", None)
    words = getattr(settings, "bad_words_ids", None) or ()
    banned = [*(word[0] for word in words if len(word) == 1), *(getattr(settings, "suppress_tokens", None) or ())]
    return sorted({token for token in banned if 0 <= token < vocabulary})
