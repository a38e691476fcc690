"""`LLM`: generate text from prompts, streams and chats.

    llm = LLM()                                          # or LLM("path/or/name", drafter="auto", k="auto")
    out = llm.generate(["Once upon a time"], SamplingParams(temperature=0.8, seed=7))
    for piece in llm.stream("Once upon a time"): print(piece.text, end="")

`generate` continues raw text, `chat` applies the model's template. This module turns text into sequences and back, and
builds an engine from its parts; the engine does the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence as Listing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch

from .backends import Model
from .backends.cpu.eager import Eager, FirstLayers
from .backends.machine import (
    choose_device,
    device_name,
    kv_room,
    memory_sentence,
    prepare,
    return_free_memory,
    thread_settings,
)
from .backends.pass_costs import CostFile, target_costs
from .config import Config, config_from, from_hugging_face, from_speculative_config
from .control import Controller
from .control.adaptive import Adaptive, Fixed
from .drafters import Drafter, Workspace, about, make
from .drafters._drift import Monitor
from .engine.cache import Cache, Plane
from .engine.request_drafts import Prediction
from .engine.scheduler import Scheduler
from .engine.shared import SharedEngine, StepLock
from .engine.step import Engine
from .engine.trace import Recorder
from .errors import ConfigError
from .models.detokenizer import Detokenizer, Piece
from .models.results import Completion as Completion, Result as Result
from .models.tuning_profile import load_profile
from .params import sampling_params
from .types import ACCEPTED, Listener, SamplingParams, Sequence, Step

if TYPE_CHECKING:
    from .engine.guides import Guide
    from .models.checkpoint import Checkpoint

Messages = list[dict[str, Any]]


class LLM:
    """A target with a drafter. Argument names of Hugging Face and vLLM work too.

    Several threads may call it at once: their prompts run in one batch. `with LLM() as llm:` closes it at the end.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint | None = None,
        *,
        speculative_config: str | dict[str, Any] | None = None,
        profile: str | Path | None = None,  # a file of `outrider tune`; explicit arguments override it
        threads: int | None = None,
        recorder: Recorder | None = None,
        **arguments: Any,  # drafter, k, rule, dtype, device, max_length, …; anything else goes to the drafter
    ) -> None:
        if speculative_config is not None:
            arguments |= from_speculative_config(speculative_config)
        if profile is not None:
            arguments = load_profile(profile) | arguments
        config = config_from(from_hugging_face(arguments))
        prepare()  # before the first matrix product of this process
        if threads is not None:
            torch.set_num_threads(threads)
        from .backends.load import load_model
        from .models.checkpoint import open_checkpoint

        device = choose_device(config.device)  # fails before anything is downloaded
        checkpoint = open_checkpoint(model)
        length = config.length_for(checkpoint.config.context_length, device.type == "cuda")
        with memory_sentence("The weights"):
            target = load_model(checkpoint, config.dtype, length, device, config.kv_dtype)
        variant = [] if device.type == "cpu" else [device_name(device)]
        variant += [] if target.has_layers else ["transformers"]
        self.costs = CostFile(checkpoint.name, target.precision, *variant)
        self.drift = Monitor(checkpoint.name)
        self._lock = StepLock(thread_settings(target.device))
        self._assemble(checkpoint.name, target, checkpoint.tokenizer, config, recorder)
        return_free_memory()

    @classmethod
    def from_pretrained(cls, model: str | Path | None = None, **arguments: Any) -> LLM:
        """As `LLM(model, …)`, under Hugging Face's name."""
        return cls(model, **arguments)

    def _assemble(self, name: str, target: Any, tokenizer: Any, config: Config, recorder: Recorder | None) -> None:
        self.name, self.tokenizer, self.config = name, tokenizer, config
        self.target: Model = target
        self.recorder = recorder or Recorder()
        self._ids = itertools.count(1)
        self._rejected = _Rejected()
        self._build_engine()
        self._shared = SharedEngine(proxy(self), self._lock)  # only this object's methods use it

    def _build_engine(self) -> None:
        listeners = (self._rejected, self.recorder, self.drift)
        with memory_sentence("K and V, the drafter and recorded passes"):
            built = build_engine(self.target, self.config, self.tokenizer, listeners, self.costs)
        self._engine: Engine | None = built

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ConfigError("This LLM is closed; make another one.")
        return self._engine

    def using(self, recorder: Recorder | None = None, **changes: Any) -> LLM:
        """The same target in memory with another drafter, K or rule."""
        sibling = LLM.__new__(LLM)
        sibling.costs, sibling.drift = self.costs, Monitor()  # trials do not count as drift of what is served
        sibling._lock = self._lock
        old, new = {**vars(self.config)}, from_hugging_face(changes)
        options = old.pop("options")
        if "drafter" not in new:  # another drafter starts without this one's options
            old |= options
        sibling._assemble(self.name, self.target, self.tokenizer, config_from(old | new), recorder)
        return_free_memory()
        return sibling

    def close(self) -> None:
        """Cancel what is running, and give back memory and the drafter's processes. Closing twice does nothing."""
        if self._engine is not None:
            self._shared.cancel((*self.engine.scheduler.running, *self.engine.scheduler.waiting))
            del self.target
            self._engine = None
            return_free_memory()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def forget(self) -> None:
        """Drop cached prefixes and the controller's statistics, for fair comparisons. The drafter's memory stays."""
        e = self.engine
        e.cache.drop_retired()
        e.controller = make_controller(self.target, e.target, e.cache, e.drafter, self.config, self.costs)

    @property
    def dtype(self) -> str:
        return self.target.precision

    @property
    def exact(self) -> bool:
        """Whether a row's logits are the same bits whichever rows share its pass."""
        return bool(getattr(self.target, "exact", False))

    @property
    def device(self) -> str:
        """The target's device: cpu, cuda:0, …"""
        return str(self.target.weights_device or self.target.device)

    @property
    def backend(self) -> str:
        """A sentence about what runs the target; empty where there was no choice."""
        return self.target.description

    @property
    def drafters(self) -> dict[str, str]:
        """The drafters that a sequence may use, each with a sentence: the drafter itself, its members, and off."""
        members = {name: about(name) for name in self.engine.drafter.traits.members}
        return {self.config.drafter_name: about(self.config.drafter)} | members | {"off": about("off")}

    def drafter_of(self, seq: Sequence) -> str:
        """The name of the drafter of this sequence."""
        return seq.only or self.config.drafter_name if seq.speculate else "off"

    @property
    def drafting(self) -> dict[str, Any]:
        """The drafter's notes on its own work, by drafter name; empty for most."""
        return self.engine.drafter.notes()

    @property
    def learning(self) -> dict[str, Any] | None:
        """The state of online learning: state, reason, counts and times; None if the drafter does not learn."""
        learning = self.engine.drafter.traits.learning
        return None if learning is None else learning.report()

    def save_learnt(self, folder: str | Path) -> None:
        """Save what the drafter has learnt; the same drafter with `learn_from=folder` continues from it."""
        learning = self.engine.drafter.traits.learning
        if learning is None:
            name = self.config.drafter_name
            raise ConfigError(f"The drafter '{name}' learns nothing: use 'online', or a head with learn=True.")
        learning.save(folder, model=self.name)

    # ------------------------------------------------------------ text

    def generate(
        self,
        prompts: str | list[int] | Listing[str | list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
        speculate: bool = True,
        **names: Any,
    ) -> list[Result]:
        """Continue each prompt; all of them run as one batch. `speculate=False` is plain decoding of the same text.

        Instead of `params`, its fields may be given here, also by transformers' names (`max_new_tokens`, …).
        """
        several, params = _several(prompts), sampling_params(params, names)
        each = params if isinstance(params, list) else [params or SamplingParams()] * len(several)
        if not all(isinstance(one, SamplingParams) for one in each):
            wrong = next(type(one).__name__ for one in each if not isinstance(one, SamplingParams))
            raise ConfigError(f"The second argument is SamplingParams, or a list of them, but this is of type {wrong}.")
        if len(each) != len(several):
            raise ConfigError(f"There are {len(several)} prompts but {len(each)} sampling parameters.")
        ids = [self.encode(prompt) for prompt in several]
        raw = [isinstance(prompt, str) for prompt in several]
        batch = [self._sequences(i, p, speculate, r) for i, p, r in zip(ids, each, raw, strict=True)]
        self._shared.run([seq for seqs in batch for seq in seqs])
        return [
            Result(
                prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt), i, [*map(self.completion, seqs)]
            )
            for prompt, i, seqs in zip(several, ids, batch, strict=True)
        ]

    def chat(
        self,
        messages: Messages | list[Messages],
        params: SamplingParams | None = None,
        speculate: bool = True,
        **names: Any,
    ) -> list[Result]:
        """Answer a conversation, or several, under the model's chat template."""
        several: list[Any] = messages if messages and isinstance(messages[0], list) else [messages]
        ids = [self.tokenizer.encode_chat(check_messages(m)) for m in several]
        return self.generate(ids, params, speculate, **names)

    def __call__(self, inputs: Any, return_full_text: bool = True, **names: Any) -> list[Any]:
        """As transformers' text-generation pipeline: a text, messages or a list of either to `generated_text`."""
        chat = bool(inputs) and isinstance(inputs, list) and not isinstance(inputs[0], str)
        results = self.chat(inputs, **names) if chat else self.generate(inputs, **names)
        single = isinstance(inputs, str) or (chat and isinstance(inputs[0], dict))
        several = [inputs] if single else inputs
        answers = [
            [
                {"generated_text": _full_text(given, out.text) if return_full_text else out.text}
                for out in result.outputs
            ]
            for given, result in zip(several, results, strict=True)
        ]
        return answers[0] if single else answers

    def stream(
        self,
        prompt: str | list[int] | Messages,
        params: SamplingParams | None = None,
        speculate: bool = True,
        **names: Any,
    ) -> Iterator[Piece]:
        """Continue a prompt (or answer messages), one piece per step. Leaving the loop cancels the request."""
        params = sampling_params(params, names) or SamplingParams()
        (seq,) = self.prepare(prompt, replace(params, n=1), speculate)
        return self._pieces(seq)

    def _pieces(self, seq: Sequence) -> Iterator[Piece]:
        self.last = seq  # its statistics outlive an interrupted loop
        detokenizer, sent, ended = _detokenizer(seq), 0, False

        def unsent() -> tuple[Piece, bool] | None:
            """What was not sent yet, and whether it is the last; between steps."""
            if seq.done:
                detokenizer.finish()
            texts, ids, origins = detokenizer.texts[sent:], seq.generated[sent:], seq.origins[sent:]
            if not (seq.done or origins):
                return None
            return Piece("".join(texts), ids, origins, texts, self._rejected.pop(seq.id, [])), seq.done

        self._shared.add([seq])
        try:
            while not ended:
                piece, ended = self._shared.wait([seq], unsent)
                sent += len(piece.origins)
                if piece.origins:
                    yield piece
        finally:
            self._shared.cancel([seq])  # where the loop was left
            self._rejected.pop(seq.id, None)

    def guide_for(self, spec: Mapping[str, Any] | None) -> Guide | None:
        """The guide of `SamplingParams(guide=spec)`, compiled for this model; ConfigError if it is not valid."""
        if spec is None:
            return None
        from .engine.guides import guide_for  # llguidance is imported only where a guide is used

        return guide_for(spec, self.tokenizer, self.target.config.vocab_size, self._eos)

    # ------------------------------------------------------------ for callers that drive the engine themselves

    def prepare(
        self,
        prompt: str | list[int] | Messages,
        params: SamplingParams,
        speculate: bool = True,
        most_drafted: int | None = None,
        only: str = "",
    ) -> list[Sequence]:
        """The sequences of a prompt: `engine.add` them, and take the `completion` of each at its end.

        `most_drafted` limits the budget of a step; `only` names the one of `drafters` that drafts.
        """
        text: Any = prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            text = self.tokenizer.encode_chat(check_messages(prompt))
        seqs = self._sequences(self.encode(text), params, speculate, isinstance(text, str))
        for seq in seqs:
            seq.most_drafted, seq.only = most_drafted, only
        return seqs

    @property
    def _eos(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_ids | self.target.config.eos_ids)

    def encode(self, prompt: str | list[int]) -> list[int]:
        """The token ids of a prompt; ConfigError if it is none, or does not fit."""
        prompt = _checked(prompt)
        ids: list[int] = self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        room = self.engine.cache.length
        if not ids:
            raise ConfigError("The prompt is empty; give at least one token.")
        if len(self.target.opening(ids).tokens) >= room:
            raise ConfigError(
                f"The prompt has {len(ids)} tokens, but only {room} fit, the answer included. Shorten the prompt"
                + self._why_no_longer(room)
            )
        if not all(0 <= i < self.target.config.vocab_size for i in ids):
            raise ConfigError(f"A prompt token is outside the vocabulary of {self.target.config.vocab_size} ids.")
        return ids

    def _why_no_longer(self, room: int) -> str:
        """How to allow longer sequences, as the end of a sentence."""
        if room >= self.target.config.context_length:
            return "."
        if self.config.max_length is None and self.target.device.type == "cuda":
            return ": the GPU has no memory for K and V of more beside the weights (see `outrider doctor`)."
        return ", or raise max_length."

    def _sequences(self, ids: list[int], params: SamplingParams, speculate: bool, raw: bool) -> list[Sequence]:
        """One sequence for each of the n answers."""
        tokens, source = self.target.opening(ids)
        params = replace(params, max_tokens=min(params.limit, self.engine.cache.length - len(tokens)))
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        bad_words, guide, expected = self._bad_words(params), self.guide_for(params.guide), params.prediction
        if isinstance(expected, str):
            expected = tuple(self.tokenizer.encode_answer(expected))
        seqs = []
        for seed in params.seeds():
            seq = Sequence(next(self._ids), tokens, params, seed, ends, bad_words, self.config.rule, speculate)
            seq.source = source
            # Raw text is continued in mid-sentence: a first space belongs to it. A text with a source starts anew.
            seq.on_token = Detokenizer(self.tokenizer.stream(continuing=raw and not source), params, ends)
            seq.matcher = None if guide is None else guide.matcher()
            seq.prediction = Prediction(list(expected)) if expected else None
            seqs.append(seq)
        return seqs

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of each banned word, at the start of a text and after a space."""
        starts = [start for word in params.bad_words for start in (word, " " + word.lstrip())]
        spelled = {tuple(self.tokenizer.encode_answer(start)) for start in starts}
        return tuple(sorted(ids for ids in spelled if ids))

    def restart(self, keep: Listing[Sequence] = ()) -> None:
        """After a step that did not end the engine's state is unknown: build a new one.

        What was running is cancelled, except `keep`: tokens are the truth, so the text of those goes on as it was.
        """
        old, kept = self.engine, {seq.id for seq in keep}
        for seq in (*old.scheduler.running, *old.scheduler.waiting):
            if seq.id not in kept:
                seq.finish = seq.finish or "cancelled"
                self._rejected.pop(seq.id, None)
        self._build_engine()
        self.engine.drafter.inherit(old.drafter)
        for seq in keep:
            self.engine.add(seq)

    def give_up_drafter(self, why: str) -> None:
        """Replace a drafter that hangs by an engine without one. Running sequences may be added to it again: tokens are
        the truth, so their text stays the same."""
        self.config = replace(self.config, drafter="off", options={})
        self._build_engine()
        self.engine.controller.why = why

    def completion(self, seq: Sequence) -> Completion:
        """The answer of a sequence that has ended or was cancelled; nothing about it is kept here afterwards."""
        detokenizer = _detokenizer(seq)
        detokenizer.finish()
        self._rejected.pop(seq.id, None)
        texts, logprobs = list(detokenizer.texts), seq.logprobs if seq.params.logprobs is not None else None
        finish = seq.finish or ""
        return Completion("".join(texts), seq.generated, finish, seq.origins, seq.stats, seq.seed, logprobs, texts)

    def texts_of(self, seq: Sequence) -> list[str]:
        """The text that each generated token released; joined, they are the answer."""
        return list(_detokenizer(seq).texts)


class _Rejected(dict[int, list[int]], Listener):
    """The drafted tokens of a sequence's last step that were not accepted, by its id, for `Piece.rejected`.

    The engine knows this and not the `LLM`, whose memory is free as soon as nobody refers to it.
    """

    reads_logits = False

    def observe(self, step: Step) -> None:
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None and turn.seq.on_token is not None:  # else its text is somebody else's
                fates = zip(tree.tokens, verdict.fates, strict=True)
                self[turn.seq.id] = [token for token, fate in fates if fate != ACCEPTED]


def _several(prompts: Any) -> list[Any]:
    """A list of prompts from one or several: a text, or token ids."""
    if isinstance(prompts, str) or (isinstance(prompts, Listing) and prompts and isinstance(prompts[0], int)):
        return [_checked(prompts)]
    if not isinstance(prompts, Listing):
        _checked(prompts)
    return [_checked(prompt) for prompt in prompts]


def _checked(prompt: Any) -> Any:
    """Refuse what is no prompt."""
    if isinstance(prompt, (bytes, bytearray)):
        raise ConfigError("A prompt is a text or a list of token ids, but this one is bytes: decode it first.")
    if isinstance(prompt, str) or (isinstance(prompt, Listing) and all(type(i) is int for i in prompt)):
        return prompt
    if isinstance(prompt, Listing) and prompt and isinstance(prompt[0], dict):
        raise ConfigError("These are messages: pass them to `chat`, which applies the model's template.")
    raise ConfigError(f"A prompt is a text or a list of token ids, but this one is {prompt!r:.60}.")


def _full_text(given: str | Messages, text: str) -> Any:
    """A prompt and its answer, or a conversation with it."""
    return given + text if isinstance(given, str) else [*given, {"role": "assistant", "content": text}]


def check_messages(messages: Any) -> Messages:
    """Refuse what is no conversation."""
    if isinstance(messages, str):
        raise ConfigError(
            "`chat` takes messages, such as [{'role': 'user', 'content': 'Hello'}]; `generate` takes text."
        )
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"`chat` takes a list of messages with at least one, but this is {messages!r:.60}.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or message.get("content") is None:
            raise ConfigError(f"A message is a dict with 'role' and 'content', but this one is {message!r:.60}.")
    return messages


def _detokenizer(seq: Sequence) -> Detokenizer:
    assert isinstance(seq.on_token, Detokenizer)
    return seq.on_token


# ------------------------------------------------------------ an engine from its parts

_WARM_ROWS = 16  # passes of up to so many rows are captured beforehand: one sequence and its draft
_KEPT_PREFIXES = 32  # finished sequences whose K/V stays readable until slots run short


def build_engine(
    model: Model,
    config: Config,
    tokenizer: Any = None,
    listeners: tuple[Listener, ...] = (),
    costs: CostFile | None = None,
) -> Engine:
    """Cache, runner, drafter, controller and scheduler around a target. Costs in `costs` are not measured again."""
    gpu, lines = model.device.type == "cuda", config.max_batch + _KEPT_PREFIXES
    room = kv_room(model.device) if gpu else None
    sizes = model.config.context_length, model.source_length, model.plane_shape.slot_bytes, room
    length, slots = config.cache_size(*sizes)
    cache = Cache(slots, lines, length, model.device, model.source_length)
    plane = cache.add_plane(*model.plane_shape)
    passes = CapturedPasses(cache, config.max_batch, home=model.device)
    captured = passes(model, plane)
    if captured is not None:
        from .backends.cuda.rounds import Rounds

        captured.rounds = Rounds(captured)
    first_layers = FirstLayers(model, cache, plane) if captured is None and model.has_layers else None
    runner = captured or Eager(model, plane, first_layers)
    guesses = any(listener.reads_guesses for listener in listeners)
    workspace = Workspace(model, cache, plane, config.options, tokenizer, passes, first_layers, guesses)
    drafter = make(config.drafter, workspace)
    controller = make_controller(model, runner, cache, drafter, config, costs)
    prompt_rows = config.prompt_rows_for(gpu)
    scheduler = Scheduler(cache, plane, config.max_batch, config.max_rows, prompt_rows)
    engine = Engine(runner, cache, drafter, controller, scheduler, model.config.vocab_size, listeners)
    if captured is not None:  # else the first answers would wait for it
        with captured.state.together():
            captured.warm(max(_WARM_ROWS, config.max_batch))
            captured.rounds.warm(prompt_rows)  # with what the drafter has recorded
        captured.rounds.time_drafts()
    return engine


def make_controller(
    model: Model, runner: Any, cache: Cache, drafter: Drafter, config: Config, costs: CostFile | None
) -> Controller:
    """A controller without statistics."""
    controller: Controller
    if drafter.name == "off" or config.k != "auto":
        controller = Fixed(0 if drafter.name == "off" else int(config.k), model.block)
    else:
        counts = tuple(2**i for i in range(config.max_batch.bit_length()))  # batch sizes whose passes are measured
        gpu = model.device.type == "cuda"
        known = (costs or CostFile()).refined(lambda: target_costs(runner, cache, counts), counts, padded=gpu)
        longest = 31 if gpu else 16  # nodes of a draft: with its root a pass of 32 rows, nearly as cheap as one
        controller = Adaptive(known, longest, drafter.name, model.block)
    return controller


class CapturedPasses:
    """Captured passes (CUDA graphs) for models on a GPU, with one device state for each device and cache."""

    def __init__(self, cache: Cache, batch: int, home: torch.device) -> None:
        self.cache, self.batch, self.home = cache, batch, home
        self.states: dict[tuple[torch.device, int], Any] = {}

    def __call__(self, model: Model, plane: Plane, cache: Cache | None = None) -> Any:
        """None for a model that is not on a GPU. `cache` holds the plane; None: the engine's own."""
        device, cache = model.device, cache or self.cache
        if device.type != "cuda":
            return None
        from .backends.cuda.capture import Driver
        from .backends.cuda.graphs import Graphs  # needs triton, which is not installed everywhere
        from .backends.cuda.state import DeviceState

        own, key = cache is self.cache, (device, id(cache))
        if key not in self.states:
            clock = None if own else self.states.get((device, id(self.cache)))
            home = own and device == self.home
            self.states[key] = DeviceState(cache, Driver(device), self.batch, home, clock)
        return Graphs(model, plane, self.states[key])
