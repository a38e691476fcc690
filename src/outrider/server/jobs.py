"""A request on its way through the engine, as the HTTP side sees it: its choices, their text, their listeners.

Everything here runs on the event loop. A choice collects what the engine reports; the request's coroutine takes what is
new whenever it comes round to it, so that a slow client gets longer chunks and delays nobody.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from ..engine.request_drafts import Prediction
from ..engine.trace import cut_line
from ..models.detokenizer import Detokenizer
from ..types import ACCEPTED, BONUS, Stats, TokenLogprob
from .errors import ApiError
from .messages import Accepted, Facts, Line, Progress
from .requests import ParsedRequest

BROKEN_OFF = ("cancelled", "error")  # how a choice finishes that did not end by itself


@dataclass(slots=True)
class Delta:
    """What was added to one choice since the last delta. The last one has `finish`."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]  # empty unless requested
    finish: str | None  # stop or length; None while it goes on
    texts: list[str]  # the text that each token released; joined, they are `text`
    lines: list[Line]  # of its trace, where that is requested
    origins: str = ""  # one letter per token: accepted from the draft, or the target's own bonus


class EventQueue:
    """The news of one job, filled and read on the loop that it was created on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._choices: dict[Choice, None] = {}  # with news, in order
        self._error: ApiError | None = None  # after which there is no more
        self._reader: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, news: Choice | ApiError) -> None:
        if isinstance(news, ApiError):
            self._error = news
        else:
            self._choices[news] = None
        self._wake()

    async def get(self, seconds: float) -> Delta | ApiError | None:
        """What is new in one choice, all of it; None if there is nothing within `seconds`."""
        due = 0.0 if self._choices else self._loop.time() + seconds
        while not self._choices and self._error is None:
            if self._loop.time() >= due:
                return None
            if self._timer is None or self._timer.when() > due:  # one timer for many waits: most end with news
                self._arm(due)
            self._reader = self._loop.create_future()
            await self._reader
        if not self._choices:
            return self._error
        choice = next(iter(self._choices))
        del self._choices[choice]
        return choice.take()

    def close(self) -> None:
        """Nobody will read any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, due: float) -> None:
        self.close()
        self._timer = self._loop.call_at(due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(eq=False)
class Choice:
    """One of a job's answers, as in OpenAI's `choices`. Times are `time.monotonic`; 0: not yet."""

    job: Job
    index: int
    prompt: list[int]
    reader: Detokenizer
    prediction: Prediction | None = None
    traced: bool = False
    seq: int = 0  # its number in the engine, once accepted
    seed: int = 0
    stats: Stats = field(default_factory=Stats)
    tokens: list[int] = field(default_factory=list)
    origins: str = ""  # one letter per token
    logprobs: list[TokenLogprob] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)  # that were not taken yet
    taken: int = 0  # tokens in the deltas so far
    started: float = 0.0  # admitted to the batch
    first: float = 0.0  # first token
    latest: float = 0.0  # latest token
    ended: float = 0.0
    finish: str = ""  # stop, length, cancelled, error

    def advance(self, tokens: list[int], progress: Progress, i: int) -> int:
        """Take over a verdict: the i-th of a step. Returns how many of its tokens belong to the text.

        This is the one place where a stop string cuts: ids, text, logprobs, statistics and trace end with the same
        token.
        """
        kept, seq = self.reader.extend(tokens), self.seq
        whole = kept == len(tokens)
        if not whole:
            tokens = tokens[:kept]
        self.tokens += tokens
        if progress.logprobs and seq in progress.logprobs:
            self.logprobs += progress.logprobs[seq][:kept]
        accepted = walked = 0
        if drafted := progress.drafted[i]:
            accepted, rejected = min(progress.accepted[i], kept), progress.rejected_at[i]
            walked = accepted + (rejected >= 0 and (whole or rejected < kept))
        self.origins += ACCEPTED * accepted + BONUS * (kept - accepted)
        self.stats.add(drafted, accepted, kept, walked)
        if self.prediction is not None:
            matched = self.prediction.advance(tokens).matched
            self.stats.accepted_prediction_tokens = matched
            self.stats.rejected_prediction_tokens = len(self.prediction.tokens) - matched
        if self.reader.stopped:
            self.finish = "stop"
        elif seq in progress.ended:
            self.finish = progress.ended[seq]
        return kept

    def trace(self, progress: Progress, kept: int) -> Line | None:
        """The line of this step, cut where the text is."""
        line = progress.lines.get(self.seq)
        if line is None:
            return None
        line = cut_line(line, kept)
        if self.finish:
            line["finish"] = self.finish
        if self.traced:
            self.lines.append(line)
        return line

    def take(self) -> Delta:
        """What is new since the last call."""
        texts, taken, lines = self.reader.texts, self.taken, self.lines
        self.taken = len(self.tokens)
        if lines:
            self.lines = []
        new = texts[taken:]
        finish = None if self.finish in BROKEN_OFF or not self.ended else self.finish
        return Delta(
            self.index, "".join(new), self.tokens[taken:], self.logprobs[taken:], finish, new, lines,
            self.origins[taken:],
        )  # fmt: skip


@dataclass(eq=False)
class Job:
    """One HTTP request. `client` is its key in the fair queue; `streams`: deltas as they come, not only at the end."""

    id: str
    client: str
    streams: bool
    request: ParsedRequest
    facts: Facts
    tokenizer: Any
    arrived: float = field(default_factory=time.monotonic)
    events: EventQueue = field(default_factory=EventQueue)
    number: int = 0  # in messages
    choices: list[Choice] = field(init=False)
    accepted: asyncio.Future[None] = field(init=False)  # or the error that its client gets

    def __post_init__(self) -> None:
        self.accepted = asyncio.get_running_loop().create_future()
        params, several = self.request.params, self.request.prompts
        prompts = [prompt for prompt in several for _ in range(params.n)]
        expected = params.prediction if isinstance(params.prediction, tuple) else ()
        self.choices = [
            Choice(self, i, prompt.ids, self._reader(prompt.raw), Prediction(list(expected)) if expected else None,
                   self.request.trace_level != "off")
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip

    def open(self, accepted: Accepted) -> None:
        """The engine has accepted it."""
        for choice, seq, seed in zip(self.choices, accepted.seqs, accepted.seeds, strict=True):
            choice.seq, choice.seed = seq, seed
            if accepted.openings is not None:  # an encoder reads the prompt, and the answer starts anew
                choice.prompt, choice.reader = accepted.openings[choice.index], self._reader(raw=False)
        if not self.accepted.done():
            self.accepted.set_result(None)

    def fail(self, error: ApiError) -> None:
        if self.accepted.done():
            self.events.put(error)
        else:
            self.accepted.set_exception(error)

    def _reader(self, raw: bool) -> Detokenizer:
        # Raw text is continued in mid-sentence: a first space belongs to it.
        params = self.request.params
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.facts.ends)
        shown = frozenset() if self.request.tools is None else self.request.tools.shown
        return Detokenizer(self.tokenizer.stream(continuing=raw, shown=shown), params, ends)


@dataclass(slots=True)
class StepReport:
    """One step for listeners, after the cut at stop strings. Columns have one entry per choice with a verdict."""

    progress: Progress
    choices: list[Choice] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    lines: list[tuple[Choice, Line]] = field(default_factory=list)


class Listener:
    """Called after each step and when a choice has ended. What it raises is only logged."""

    def on_step(self, step: StepReport) -> None: ...

    def on_end(self, choice: Choice) -> None: ...
