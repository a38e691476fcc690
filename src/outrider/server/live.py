"""A request's own trace, told while it happens: `"speculation": {"trace": "full"}` in a streamed request.

The engine's thread only notes what a step was (a copy of a few rows); lines are worked out by whoever tells them.
A tape hears one sequence and no other, so nobody's text can be in somebody else's trace. What waits to be told is
bounded: of a client that reads too slowly the target's thoughts are dropped first, which lines then lack.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from ..engine.trace import VERSION, Line, Note, tokens_of
from ..llm import LLM
from ..types import Sequence, Step
from .job import Answer, Words
from .parsed import Asked

ROWS = 64  # rows of logits that may wait to be told, for one answer


class Tape:
    """What one sequence does, step by step. Written by the engine's thread, read by whoever tells it."""

    def __init__(self, seq: Sequence, level: str) -> None:
        self.level = level
        seq.shows_logits = level == "full"
        self.own = 0.0  # seconds of the engine's thread that noting has taken
        self._lock, self._waiting = threading.Lock(), 0

    def note(self, step: Step, i: int) -> Note | None:
        """This step of the i-th sequence; None while its prompt is still read."""
        verdict = step.verdicts[i]
        if verdict is None:
            return None
        begin = time.perf_counter()
        full = self.level == "full" and self._waiting < ROWS
        note = Note(step, i, verdict, full, keep=True, own=self.own)
        with self._lock:
            self._waiting += note.rows
        self.own += time.perf_counter() - begin
        return note

    def line(self, note: Note) -> Line:
        with self._lock:
            self._waiting -= note.rows
        return note.line()


class Script:
    """The lines of one answer, as a trace file has them: a header, steps with their texts, a footer."""

    def __init__(self, llm: LLM, asked: Asked, answer: Answer) -> None:
        self.llm, self.asked, self.answer = llm, asked, answer
        self.counts = {"steps": 0, "drafted": 0, "accepted": 0, "emitted": 0}
        self.known: set[int] = set()  # tokens whose text has been told

    def lines(self, words: Words) -> list[Line]:
        """What is new with these words. Working out what the target thought takes a while: not for an event loop."""
        lines = [] if self.known else [self._header()]
        if words.note is not None and self.answer.tape is not None:
            lines.append(self._step(self.answer.tape.line(words.note), words.texts))
        if words.finish is not None:
            lines.append(self._footer(words.finish))
        return lines

    def _header(self) -> Line:
        llm, seq, asked = self.llm, self.answer.seq, self.asked
        prompt = seq.tokens[: seq.prompt_len]
        facts: Line = {"outrider_trace": VERSION, "level": asked.trace, "model": llm.name, "dtype": llm.dtype}
        facts |= {"device": llm.device, "drafter": llm.drafter_of(seq), "k": llm.config.k, "rule": seq.rule}
        facts |= {"temperature": seq.params.temperature, "seed": seq.seed, "prompt": prompt}
        text = llm.tokenizer.decode(prompt, skip_special=False)
        return facts | {"prompt_text": text, "pieces": self._pieces(prompt)}

    def _step(self, line: Line, texts: list[str]) -> Line:
        nodes, emitted = line["nodes"], line["emitted"]
        told = [len(nodes), sum(node[4] == "a" for node in nodes), len(emitted)]
        for name, more in zip(self.counts, (1, *told), strict=True):
            self.counts[name] += more
        # Which number the engine gave it, and how many others there are, is nobody's business.
        return line | {"seq": self.answer.index, "texts": texts, "pieces": self._pieces(sorted(tokens_of(line)))}

    def _footer(self, finish: str) -> Line:
        stats = self.answer.seq.stats
        facts: dict[str, Any] = {"finish": finish, "seed": self.answer.seq.seed, "seconds": stats.seconds}
        return {"end": True, **self.counts, **facts}

    def _pieces(self, tokens: Iterable[int]) -> dict[int, str]:
        """The texts of those tokens that have not been named yet."""
        fresh = set(tokens) - self.known
        self.known |= fresh
        return {token: self.llm.tokenizer.decode([token], skip_special=False) for token in fresh}
