"""Traces of requests: streamed to their own client as they happen, and recorded in a bounded folder.

A streamed trace (`"speculation": {"trace": "full"}`) holds one choice's steps and no other's. Recorded traces contain
token ids and are off unless a folder is given. A full or missing disk costs traces, never an answer: another thread
writes the files, and what cannot be written is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Lock

from ..engine.trace import VERSION, tokens_of
from ..errors import OutriderError
from .jobs import Choice, Delta, Listener, StepReport
from .messages import EngineLink, Line
from .requests import ParsedRequest

log = logging.getLogger("outrider.server")
MAX_STEPS = 4096  # recorded per choice
MAX_UNWRITTEN = 64  # choices that may wait for the disk
NAME = re.compile(r"[\w-]{1,80}")  # a trace's name is never a path


class TraceStream:
    """The trace of one choice, as lines of a trace file: a header, steps with their texts, a footer."""

    def __init__(self, engine: EngineLink, request: ParsedRequest, choice: Choice) -> None:
        self.engine, self.request, self.choice = engine, request, choice
        self.counts = {"steps": 0, "drafted": 0, "accepted": 0, "emitted": 0}
        self.named: set[int] = set()  # tokens whose text has been sent

    def lines(self, delta: Delta) -> list[Line]:
        """The lines that belong to this delta."""
        lines = [] if self.named else [self._header()]
        texts = iter(delta.texts)
        lines += [self._step(line, [*islice(texts, len(line["emitted"]))]) for line in delta.lines]
        if delta.finish is not None:
            end = {"finish": delta.finish, "seed": self.choice.seed, "seconds": self.choice.stats.seconds}
            lines.append({"end": True, **self.counts, **end})
        return lines

    def _header(self) -> Line:
        facts, prompt, request = self.engine.facts, self.choice.prompt, self.request
        header: Line = {"outrider_trace": VERSION, "level": request.trace_level, "model": facts.name}
        header |= {"dtype": facts.dtype, "device": facts.device, "drafter": request.drafter_name(facts), "k": facts.k}
        header |= {"rule": facts.rule, "temperature": request.params.temperature, "seed": self.choice.seed}
        header["prompt"] = prompt
        text = self.engine.tokenizer.decode(prompt, skip_special=False)
        return header | {"prompt_text": text, "pieces": self._pieces(prompt)}

    def _step(self, line: Line, texts: list[str]) -> Line:
        nodes, emitted = line["nodes"], line["emitted"]
        more = (1, len(nodes), sum(node[4] == "a" for node in nodes), len(emitted))
        for name, count in zip(self.counts, more, strict=True):
            self.counts[name] += count
        # The engine's own sequence number would tell how many other requests there are.
        return line | {"seq": self.choice.index, "texts": texts, "pieces": self._pieces(sorted(tokens_of(line)))}

    def _pieces(self, tokens: Iterable[int]) -> dict[int, str]:
        """The texts of those tokens that have not been sent yet."""
        new = set(tokens) - self.named
        self.named |= new
        return {token: self.engine.tokenizer.decode([token], skip_special=False) for token in new}


def _summary(line: Line) -> Line:
    """A line of any level without the target's view."""
    kept = {name: value for name, value in line.items() if name not in ("chose", "guesses", "noise")}
    return kept | {"nodes": [[*node[:3], None, node[4]] for node in line["nodes"]]}


class TraceStore(Listener):
    """A folder with one file per choice, at most `max_bytes`; the oldest are deleted. `problem`: the last failure."""

    def __init__(self, folder: Path, max_bytes: int, engine: EngineLink) -> None:
        self.folder, self.max_bytes, self.engine = folder, max_bytes, engine
        self.dropped, self.problem = 0, ""
        self._lines: dict[Choice, list[Line]] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="traces")
        self._lock, self._unwritten = Lock(), 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        except OSError as error:
            raise OutriderError(f"The trace folder {folder} cannot be used: {error}.") from error
        self._sizes: OrderedDict[str, int] = OrderedDict((path.stem, path.stat().st_size) for path in files)

    def on_step(self, step: StepReport) -> None:
        for choice, line in step.lines:
            lines = self._lines.setdefault(choice, [])
            if len(lines) < MAX_STEPS:
                lines.append(_summary(line))

    def on_end(self, choice: Choice) -> None:
        facts, lines = self.engine.facts, self._lines.pop(choice, [])
        header: Line = {"outrider_trace": VERSION, "level": "summary", "dtype": facts.dtype, "model": facts.name}
        header |= {"drafter": choice.job.request.drafter_name(facts), "rule": facts.rule}
        header |= {"prompt_tokens": len(choice.prompt), "seed": choice.seed}
        footer = {"end": True, "finish": choice.finish, "emitted": len(choice.tokens)}
        with self._lock:
            if self._unwritten >= MAX_UNWRITTEN:
                self.dropped += 1
                return
            self._unwritten += 1
        self._writer.submit(self._save, f"{choice.job.id}-{choice.index}", [header, *lines, footer])

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def names(self) -> list[str]:
        """The newest first."""
        with self._lock:
            return [*reversed(self._sizes)]

    def read(self, name: str) -> bytes | None:
        """A trace as it was written; None if there is none of that name."""
        with self._lock:
            exists = NAME.fullmatch(name) is not None and name in self._sizes
        try:
            return self._path(name).read_bytes() if exists else None
        except OSError:
            return None

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def _save(self, name: str, lines: list[Line]) -> None:  # on the writer's thread
        try:
            data = "".join(json.dumps(line) + "\n" for line in lines).encode()
            if len(data) <= self.max_bytes:
                self._write(name, data)
        except OSError as error:
            self._path(name).unlink(missing_ok=True)
            self.dropped += 1
            if not self.problem:
                log.warning("traces_cannot_be_written", extra={"fields": {"why": str(error)}})
            self.problem = str(error)
        finally:
            with self._lock:
                self._unwritten -= 1

    def _write(self, name: str, data: bytes) -> None:
        with self._lock:
            while self._sizes and sum(self._sizes.values()) + len(data) > self.max_bytes:
                oldest, _ = self._sizes.popitem(last=False)
                self._path(oldest).unlink(missing_ok=True)
        self._path(name).write_bytes(data)
        self.problem = ""
        with self._lock:
            self._sizes[name] = len(data)
