"""A span of OpenTelemetry for every answer, where its API is installed (`pip install 'outrider[otel]'`).

Where spans go is decided by whoever configures OpenTelemetry; without that they cost nothing. They hold sizes and
times, never text.
"""

from __future__ import annotations

import time
from typing import Any

from ..types import Step
from .job import Answer


class Spans:
    """Written when an answer has ended, with the times it had."""

    def __init__(self, tracer: Any, model: str) -> None:
        self.tracer, self.model = tracer, model

    def observed(self, step: Step) -> None:
        pass

    def ended(self, answer: Answer) -> None:
        seq, job = answer.seq, answer.job
        zero = time.time_ns() - time.monotonic_ns()
        facts = {
            "gen_ai.operation.name": "text_completion" if job.id.startswith("cmpl") else "chat",
            "gen_ai.request.model": self.model,
            "gen_ai.response.id": job.id,
            "gen_ai.response.finish_reasons": [answer.finish],
            "gen_ai.usage.input_tokens": seq.prompt_len,
            "gen_ai.usage.output_tokens": len(seq.generated),
            "outrider.drafted": seq.stats.drafted,
            "outrider.accepted": seq.stats.accepted,
        }
        span = self.tracer.start_span("answer", start_time=zero + int(1e9 * job.arrived), attributes=facts)
        for name, at in (("started", answer.started), ("first_token", answer.first)):
            if at:
                span.add_event(name, timestamp=zero + int(1e9 * at))
        span.end(end_time=zero + int(1e9 * answer.ended))


def spans_for(model: str) -> list[Spans]:
    """One writer of spans, or none where nobody could read them."""
    try:
        from opentelemetry import trace
    except ImportError:
        return []
    return [Spans(trace.get_tracer("outrider"), model)]
