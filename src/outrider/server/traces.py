"""Recorded answers in a folder: what was drafted and what became of it, one file each, the oldest making room.

Traces hold what was said, as ids. They are off unless a folder is given. A disk that is full or gone costs traces,
never an answer: files are written by a thread of their own, and what cannot be written is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from ..engine.trace import VERSION, Line, Recorder
from ..errors import OutriderError
from ..llm import LLM
from ..types import Step
from .job import Answer

log = logging.getLogger("outrider.server")
LINES = 4096  # steps of one answer that are recorded
UNWRITTEN = 64  # answers that may wait for the disk
NAME = re.compile(r"[\w-]{1,80}")  # what a trace may be called: never a path


class _Lines(Recorder):
    """A recorder that hands each sequence's lines to whoever ends it."""

    def __init__(self) -> None:
        super().__init__("summary")
        self.by_sequence: dict[int, list[Line]] = {}

    def _put(self, line: Line) -> None:
        lines = self.by_sequence.setdefault(line["seq"], [])
        if len(lines) < LINES:
            lines.append(line)


class Traces:
    """A bounded folder of them. `problem` says why the latest one could not be kept."""

    def __init__(self, folder: Path, most_bytes: int, llm: LLM) -> None:
        self.folder, self.most_bytes, self.llm = folder, most_bytes, llm
        self.dropped, self.problem = 0, ""
        self._recorder = _Lines()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="traces")
        self._lock, self._pending = Lock(), 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        except OSError as error:
            raise OutriderError(f"The trace folder {folder} cannot be used: {error}.") from error
        self._sizes: OrderedDict[str, int] = OrderedDict((path.stem, path.stat().st_size) for path in files)

    # ------------------------------------------------------------ on the engine's thread

    def observed(self, step: Step) -> None:
        self._recorder.observe(step)

    def ended(self, answer: Answer) -> None:
        lines = self._recorder.by_sequence.pop(answer.seq.id, [])
        facts: Line = {"model": self.llm.name, "drafter": self.llm.drafter_of(answer.seq), "rule": answer.seq.rule}
        facts |= {"prompt_tokens": answer.seq.prompt_len, "seed": answer.seq.seed}
        header: Line = {"outrider_trace": VERSION, "level": "summary", "dtype": self.llm.dtype, **facts}
        footer = {"end": True, "finish": answer.finish, "emitted": len(answer.seq.generated)}
        with self._lock:
            if self._pending >= UNWRITTEN:
                self.dropped += 1
                return
            self._pending += 1
        self._writer.submit(self._keep, f"{answer.job.id}-{answer.index}", [header, *lines, footer])

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    # ------------------------------------------------------------ on the writer's thread

    def _keep(self, name: str, lines: list[Line]) -> None:
        try:
            data = "".join(json.dumps(line) + "\n" for line in lines).encode()
            if len(data) <= self.most_bytes:
                self._write(name, data)
        except OSError as error:
            (self.folder / f"{name}.jsonl").unlink(missing_ok=True)
            self.dropped += 1
            if not self.problem:
                log.warning("traces_cannot_be_written", extra={"facts": {"why": str(error)}})
            self.problem = str(error)
        finally:
            with self._lock:
                self._pending -= 1

    def _write(self, name: str, data: bytes) -> None:
        with self._lock:
            while self._sizes and sum(self._sizes.values()) + len(data) > self.most_bytes:
                oldest, _ = self._sizes.popitem(last=False)
                (self.folder / f"{oldest}.jsonl").unlink(missing_ok=True)
        (self.folder / f"{name}.jsonl").write_bytes(data)
        self.problem = ""
        with self._lock:
            self._sizes[name] = len(data)

    # ------------------------------------------------------------ for readers

    def names(self) -> list[str]:
        """The newest first."""
        with self._lock:
            return [*reversed(self._sizes)]

    def read(self, name: str) -> bytes | None:
        """A trace as it was written; None where there is none of that name."""
        with self._lock:
            known = NAME.fullmatch(name) is not None and name in self._sizes
        try:
            return (self.folder / f"{name}.jsonl").read_bytes() if known else None
        except OSError:
            return None
