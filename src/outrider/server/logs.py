"""The log: one JSON object per line on standard error, without anybody's text unless that was asked for."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, TextIO

from ..llm import LLM
from ..types import Step
from .job import Answer

log = logging.getLogger("outrider.server")


class JsonLines(logging.Formatter):
    """`log.info("event", extra={"facts": {…}})`; a traceback goes to the log, and nowhere else."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        line |= {"event": record.getMessage(), **getattr(record, "facts", {})}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to(file: TextIO, level: int = logging.INFO) -> None:
    """Send this server's log, and uvicorn's, there."""
    handler = logging.StreamHandler(file)
    handler.setFormatter(JsonLines())
    for name in ("outrider.server", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "outrider.server" else logging.WARNING)


class Journal:
    """One line for every answer that ends: sizes, times and what speculation did."""

    def __init__(self, llm: LLM, with_text: bool = False) -> None:
        self.llm, self.with_text = llm, with_text

    def observed(self, step: Step) -> None:
        pass

    def ended(self, answer: Answer) -> None:
        job, seq = answer.job, answer.seq
        facts: dict[str, Any] = {
            "id": job.id,
            "client": job.client,
            "index": answer.index,
            "finish": answer.finish,
            "prompt_tokens": seq.prompt_len,
            "tokens": len(seq.generated),
            "reused": seq.stats.reused,
            "drafted": seq.stats.drafted,
            "accepted": seq.stats.accepted,
            "passes": seq.stats.passes,
            "failures": seq.stats.failures,
            "queued_s": _span(job.arrived, answer.started or answer.ended),
            "first_s": _span(job.arrived, answer.first),
            "seconds": _span(job.arrived, answer.ended or time.monotonic()),
        }
        if self.with_text:
            decode = self.llm.tokenizer.decode
            facts |= {"prompt": decode(seq.tokens[: seq.prompt_len]), "text": decode(seq.generated)}
        log.info("answer", extra={"facts": facts})


def _span(begin: float, end: float) -> float | None:
    return round(end - begin, 4) if end else None
