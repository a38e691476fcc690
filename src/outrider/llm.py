"""Text in, text out: the library's front door.

    llm = LLM()                                          # or LLM("path/or/name", drafter="auto", k="auto")
    out = llm.generate(["Once upon a time"], SamplingParams(temperature=0.8, seed=7))
    for piece in llm.stream("Once upon a time"): print(piece.text, end="")

`generate` continues raw text, `chat` applies the model's template. Everything below the text is the engine's.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence as Listing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .backends import Model
from .backends.cpu.eager import Eager, FirstLayers
from .backends.machine import choose_device, device_name, prepare
from .backends.pass_costs import CostFile, target_costs
from .config import Config, config_from, from_hugging_face, from_speculative_config
from .control import Controller
from .control.adaptive import Adaptive, Fixed
from .control.aligned import BlockAligned
from .control.costs import Costs
from .control.drift import Monitor
from .drafters import Drafter, Workspace, about, make
from .engine.cache import Cache, Plane
from .engine.prediction import Prediction
from .engine.scheduler import Scheduler
from .engine.step import Engine
from .engine.trace import Recorder
from .errors import ConfigError
from .models.detokenizer import Detokenizer, Piece
from .models.tuning_profile import load_profile
from .types import ACCEPTED, Listener, SamplingParams, Sequence, Stats, Step, TokenLogprob

if TYPE_CHECKING:
    from .engine.guides.matcher import Guide
    from .models.checkpoint import Checkpoint

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Completion:
    """One answer."""

    text: str
    token_ids: list[int]
    finish_reason: str
    origins: str  # one letter per token: a (accepted) or b (bonus)
    stats: Stats
    seed: int
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Result:
    """All answers to one prompt; what a single answer has is reachable directly."""

    prompt: str
    prompt_token_ids: list[int]
    outputs: list[Completion]

    def __getattr__(self, name: str) -> Any:
        if name in Completion.__dataclass_fields__:
            return getattr(self.outputs[0], name)
        raise AttributeError(name)


class LLM(Listener):
    """A target with a drafter. Hugging Face's and vLLM's argument names are understood too."""

    reads_logits = False  # as a listener of its own engine

    def __init__(
        self,
        model: str | Path | Checkpoint | None = None,
        *,
        speculative_config: str | dict[str, Any] | None = None,
        profile: str | Path | None = None,  # what `outrider tune` found; explicit arguments win over it
        threads: int | None = None,
        recorder: Recorder | None = None,
        **arguments: Any,  # drafter, k, rule, dtype, device, max_length, …; anything else goes to the drafter
    ) -> None:
        if speculative_config is not None:
            arguments |= from_speculative_config(speculative_config)
        if profile is not None:
            arguments = load_profile(profile) | arguments
        config = config_from(from_hugging_face(arguments))
        prepare()  # before the first product of this process
        if threads is not None:
            torch.set_num_threads(threads)
        from .backends.load import load_model
        from .models.checkpoint import open_checkpoint

        device = choose_device(config.device)  # before anything is fetched
        checkpoint = open_checkpoint(model)
        length = config.length_for(checkpoint.config.context_length)
        target = load_model(checkpoint, config.dtype, length, device=device)
        where = [] if device.type == "cpu" else [device_name(device)]
        where += [] if target.has_layers else ["transformers"]
        self.costs = CostFile(checkpoint.name, str(target.dtype), *where)
        self.drift = Monitor(checkpoint.name)
        self._assemble(checkpoint.name, target, checkpoint.tokenizer, config, recorder)

    def _assemble(self, name: str, target: Any, tokenizer: Any, config: Config, recorder: Recorder | None) -> None:
        self.name, self.tokenizer, self.config = name, tokenizer, config
        self.target: Model = target
        self.recorder = recorder or Recorder()
        self._ids = itertools.count(1)
        self._rejected: dict[int, list[int]] = {}
        self._engine()

    def _engine(self) -> None:
        listeners = (self, self.recorder, self.drift)
        self.engine = build_engine(self.target, self.config, self.tokenizer, listeners, self.costs)

    def using(self, recorder: Recorder | None = None, **changes: Any) -> LLM:
        """The same target in memory with another drafter, K or rule."""
        sibling = LLM.__new__(LLM)
        sibling.costs, sibling.drift = self.costs, Monitor()  # what is tried out is not what is served
        old = {name: getattr(self.config, name) for name in Config.__dataclass_fields__ if name != "options"}
        new = from_hugging_face(changes)
        if "drafter" not in new:
            old |= self.config.options  # they are the drafter's: another one starts without them
        config = config_from(old | new)
        sibling._assemble(self.name, self.target, self.tokenizer, config, recorder)
        return sibling

    def forget(self) -> None:
        """As if nothing had been asked yet, but for what a drafter remembers: for fair comparisons.

        Prompts' K/V and what the controller has learnt are dropped. What took long to set up stays.
        """
        engine = self.engine
        engine.cache.drop_retired()
        engine.controller = make_controller(
            self.target, engine.target, engine.cache, engine.drafter, self.config, self.costs
        )

    @property
    def dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Where the target runs: cpu, cuda:0, …"""
        return str(self.target.weights_device or self.target.device)

    @property
    def backend(self) -> str:
        """Who runs the target, in a sentence, where that is not the built-in decoder; else nothing."""
        return self.target.description

    @property
    def drafters(self) -> dict[str, str]:
        """Who may draft for a sequence, each with a sentence: the drafter, those that work together in it, and off."""
        own = self.config.drafter_name
        told = {own: about(self.config.drafter)} | {name: about(name) for name in self.engine.drafter.traits.members}
        return told | {"off": about("off")}

    def drafter_of(self, seq: Sequence) -> str:
        """Who drafts for this sequence; off where nobody does."""
        return seq.only or self.config.drafter_name if seq.speculate else "off"

    @property
    def drafting(self) -> dict[str, Any]:
        """What the drafter tells about its own work, by name; most tell nothing."""
        return self.engine.drafter.notes()

    # ------------------------------------------------------------ a drafter that learns

    @property
    def learning(self) -> dict[str, Any] | None:
        """How learning goes: state, reason, counts and times; None where the drafter does not learn."""
        learning = self.engine.drafter.traits.learning
        return None if learning is None else learning.report()

    def save_learnt(self, folder: str | Path) -> None:
        """Keep what the drafter has learnt; `LLM(drafter="online", learn_from=folder)` continues from it."""
        learning = self.engine.drafter.traits.learning
        if learning is None:
            raise ConfigError(f"The drafter '{self.config.drafter_name}' learns nothing: use drafter 'online'.")
        learning.save(folder, model=self.name)

    # ------------------------------------------------------------ the public verbs

    def generate(
        self,
        prompts: str | list[int] | Listing[str | list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        speculate: bool = True,
    ) -> list[Result]:
        """Continue each prompt; all of them run as one batch. `speculate=False` is plain decoding of the same text."""
        one: Any = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))  # a text, or its ids
        asked: list[Any] = [prompts] if one else list(prompts)
        each = params if isinstance(params, list) else [params or SamplingParams()] * len(asked)
        if len(each) != len(asked):
            raise ConfigError(f"There are {len(asked)} prompts but {len(each)} sampling parameters.")
        ids = [self._encode(prompt) for prompt in asked]
        raw = [isinstance(prompt, str) for prompt in asked]
        batch = [self._sequences(i, p, speculate, r) for i, p, r in zip(ids, each, raw, strict=True)]
        self._run([seq for seqs in batch for seq in seqs])
        return [
            Result(prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt), i, [*map(self.close, seqs)])
            for prompt, i, seqs in zip(asked, ids, batch, strict=True)
        ]

    def chat(
        self, messages: Messages | list[Messages], params: SamplingParams | None = None, speculate: bool = True
    ) -> list[Result]:
        """Answer a conversation, or several, under the model's chat template."""
        several: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        return self.generate([self.tokenizer.encode_chat(m) for m in several], params, speculate)

    def stream(
        self, prompt: str | list[int] | Messages, params: SamplingParams | None = None, speculate: bool = True
    ) -> Iterator[Piece]:
        """Continue a prompt (or answer messages), one piece per step. Leaving the loop cancels the request."""
        (seq,) = self.prepare(prompt, replace(params or SamplingParams(), n=1), speculate)
        return self._pieces(seq)

    def _pieces(self, seq: Sequence) -> Iterator[Piece]:
        self.last = seq  # what was measured outlives an interrupted loop
        reader, said = _reader(seq), 0
        self.engine.add(seq)
        try:
            while not seq.done or len(seq.origins) > said:
                if len(seq.origins) == said:  # else another stream's step has brought us on already
                    self.engine.step()
                if seq.done:
                    reader.finish()
                if len(seq.origins) > said:
                    texts, ids, origins = reader.texts[said:], seq.generated[said:], seq.origins[said:]
                    said += len(origins)  # before the loop's body runs: more may be said meanwhile
                    yield Piece("".join(texts), ids, origins, texts, self._rejected.pop(seq.id, []))
        except GeneratorExit:
            self.engine.cancel(seq)
            raise
        except BaseException:
            self.restart()
            raise
        finally:
            self._rejected.pop(seq.id, None)

    def guide_for(self, asked: Mapping[str, Any] | None) -> Guide | None:
        """A guide compiled for this model, as `SamplingParams(guide=asked)` will use it; a sentence if it cannot be."""
        if asked is None:
            return None
        from .engine.guides.matcher import guide_for

        return guide_for(asked, self.tokenizer, self.target.config.vocab_size, self._eos)

    # ------------------------------------------------------------ for whoever drives the engine himself

    def prepare(
        self,
        prompt: str | list[int] | Messages,
        params: SamplingParams,
        speculate: bool = True,
        most_drafted: int | None = None,
        only: str = "",
    ) -> list[Sequence]:
        """The sequences that answer a prompt, not under way yet: `engine.add` them, and `close` each in the end.

        `only` is one of the drafters that work together here (`drafters`), to hear no other.
        """
        asked: Any = prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            asked = self.tokenizer.encode_chat(prompt)
        seqs = self._sequences(self._encode(asked), params, speculate, isinstance(asked, str))
        for seq in seqs:
            seq.most_drafted, seq.only = most_drafted, only
        return seqs

    # ------------------------------------------------------------ inside

    @property
    def _eos(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_ids | self.target.config.eos_ids)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        ids: list[int] = self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        room = self.engine.cache.length
        if not ids:
            raise ConfigError("The prompt is empty; give at least one word.")
        if len(self.target.opening(ids).tokens) >= room:
            raise ConfigError(
                f"The prompt has {len(ids)} tokens, but only {room} fit, the answer included. Shorten the prompt"
                + (", or raise max_length." if room < self.target.config.context_length else ".")
            )
        if not all(0 <= i < self.target.config.vocab_size for i in ids):
            raise ConfigError(f"A prompt token is outside the vocabulary of {self.target.config.vocab_size} ids.")
        return ids

    def _sequences(self, ids: list[int], params: SamplingParams, speculate: bool, raw: bool) -> list[Sequence]:
        """One sequence for each of the n answers; the j-th has seed + j."""
        seed = params.seed if params.seed is not None else secrets.randbits(31)
        tokens, source = self.target.opening(ids)
        fits = replace(params, max_tokens=min(params.max_tokens, self.engine.cache.length - len(tokens)))
        seqs = [self._sequence(tokens, fits, seed + j) for j in range(params.n)]
        for seq in seqs:
            seq.speculate, seq.source = speculate, source
            # Raw text is continued in mid-sentence: a first space belongs to it. A text with a source begins anew.
            seq.watch = Detokenizer(self.tokenizer.stream(continuing=raw and not source), fits, seq.ends)
        return seqs

    def _sequence(self, ids: list[int], params: SamplingParams, seed: int) -> Sequence:
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        seq = Sequence(next(self._ids), list(ids), params, seed, ends, self._bad_words(params), self.config.rule)
        if (guide := self.guide_for(params.guide)) is not None:
            seq.matcher = guide.matcher()
        if params.prediction:
            text = params.prediction
            seq.prediction = Prediction(self.tokenizer.encode(text) if isinstance(text, str) else list(text))
        return seq

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each banned word as it is spelled at the start of a text and after a space."""
        spelled = {tuple(self.tokenizer.encode(s)) for word in params.bad_words for s in (word, " " + word.lstrip())}
        return tuple(sorted(ids for ids in spelled if ids))

    def _run(self, seqs: Iterable[Sequence]) -> None:
        try:
            for seq in seqs:
                self.engine.add(seq)
            while self.engine.busy:
                self.engine.step()
        except BaseException:
            self.restart()
            raise

    def restart(self) -> None:
        """An interrupted step may have left anything: cancel what was under way, and start clean."""
        for seq in (*self.engine.scheduler.running, *self.engine.scheduler.waiting):
            seq.finish = seq.finish or "cancelled"
        self._rejected.clear()
        old = self.engine.drafter
        self._engine()
        self.engine.drafter.inherit(old)

    def give_up_drafter(self, why: str) -> None:
        """The drafter does not come back from a call: a new engine without one. What was under way may be added again:
        tokens are the truth, so it goes on with the same text."""
        self.config = replace(self.config, drafter="off", options={})
        self._engine()
        self.engine.controller.why = why

    def close(self, seq: Sequence) -> Completion:
        """What a sequence has said, ended or cancelled; nothing about it is remembered here afterwards."""
        reader = _reader(seq)
        reader.finish()
        self._rejected.pop(seq.id, None)
        logprobs = seq.logprobs if seq.params.logprobs is not None else None
        return Completion(
            "".join(reader.texts), seq.generated, seq.finish or "", seq.origins, seq.stats, seq.seed, logprobs
        )

    def texts_of(self, seq: Sequence) -> list[str]:
        """The text that each generated token released; joined, they are what was said."""
        return list(_reader(seq).texts)

    def observe(self, step: Step) -> None:
        """The engine's listener: remembers what was drafted in vain, for whoever shows it."""
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None:
                vain = [t for t, fate in zip(tree.tokens, verdict.fates, strict=True) if fate != ACCEPTED]
                self._rejected[turn.seq.id] = vain


def _reader(seq: Sequence) -> Detokenizer:
    assert isinstance(seq.watch, Detokenizer)
    return seq.watch


# ------------------------------------------------------------ an engine from its parts

_WARM_ROWS = 16  # rows of passes that are captured beforehand: what one sequence and its draft need
_KEPT_PREFIXES = 32  # finished sequences whose K/V stays readable until slots run short


def build_engine(
    model: Model,
    config: Config,
    tokenizer: Any = None,
    listeners: tuple[Listener, ...] = (),
    costs: CostFile | None = None,
) -> Engine:
    """Cache, runner, drafter, controller and scheduler around a target. What `costs` knows is not measured again."""
    length = config.length_for(model.config.context_length)
    cache = Cache(config.slots_for(length), config.max_batch + _KEPT_PREFIXES, length, model.device)
    plane = cache.add_plane(*model.plane_shape)
    passes = CapturedPasses(cache, config.max_batch, home=model.device)
    captured = passes(model, plane)  # these always run whole
    first_layers = FirstLayers(model, cache, plane) if captured is None and model.has_layers else None
    runner = captured or Eager(model, plane, first_layers)
    guesses = any(listener.reads_guesses for listener in listeners)
    drafter = make(
        config.drafter, Workspace(model, cache, plane, config.options, tokenizer, passes, first_layers, guesses)
    )
    controller = make_controller(model, runner, cache, drafter, config, costs)
    if captured is not None:
        captured.warm(max(_WARM_ROWS, config.max_batch))  # the first answers should not wait for it
    scheduler = Scheduler(cache, plane, config.max_batch, config.max_rows)
    return Engine(runner, cache, drafter, controller, scheduler, model.config.vocab_size, listeners)


def make_controller(
    model: Model, runner: Any, cache: Cache, drafter: Drafter, config: Config, costs: CostFile | None
) -> Controller:
    """A controller that has seen nothing yet."""
    controller: Controller
    if drafter.name == "off" or config.k != "auto":
        controller = Fixed(0 if drafter.name == "off" else int(config.k))
    else:
        counts = tuple(2**i for i in range(config.max_batch.bit_length()))  # batch sizes whose passes are measured
        known = (costs or CostFile()).get(lambda: target_costs(runner, cache, counts), counts)
        controller = Adaptive(Costs(known, padded=model.device.type == "cuda"), name=drafter.name)
    return controller if model.block == 1 else BlockAligned(controller, model.block)


class CapturedPasses:
    """Captured passes for every model that lives on a GPU, one device state for each device and cache; None for the
    others."""

    def __init__(self, cache: Cache, batch: int, home: torch.device) -> None:
        self.cache, self.batch, self.home = cache, batch, home
        self.states: dict[tuple[torch.device, int], Any] = {}

    def __call__(self, model: Model, plane: Plane, cache: Cache | None = None) -> Any:
        """A plane lies in the engine's own cache unless its owner says otherwise."""
        device, cache = model.device, cache or self.cache
        if device.type != "cuda":
            return None
        from .backends.cuda.capture import Driver
        from .backends.cuda.graphs import Graphs  # needs triton, which is not installed everywhere
        from .backends.cuda.state import DeviceState

        own, at = cache is self.cache, (device, id(cache))
        if at not in self.states:
            clock = None if own else self.states.get((device, id(self.cache)))
            home = own and device == self.home
            self.states[at] = DeviceState(cache, Driver(device), self.batch, home, clock)
        return Graphs(model, plane, self.states[at])
