"""What is measured: Prometheus metrics, and a log line and an OpenTelemetry span for every choice that ends.

Metrics have vLLM's names with our prefix; the current K, the break-even acceptance and fallbacks by reason are our own.
Labels are few and fixed: no request can create one. The log is one JSON object per line. It contains text only if that
is configured; spans never do. Spans need the `otel` extra and go where OpenTelemetry is configured to send them.
"""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from ..llm import LLM
from ..types import Step
from .jobs import Choice, Listener
from .worker import Worker

log = logging.getLogger("outrider.server")
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
MAX_POSITION = 64  # deepest position with a label of its own
PRICE_INTERVAL = 1.0  # seconds between two reads of the controller's break-even

# Part of the controller's reason (a sentence with numbers) -> label.
REASONS = (
    ("did not come back", "drafter_hangs"),
    ("switched off", "switched_off"),
    ("break-even", "below_break_even"),
    ("paused", "drafter_rests"),
    ("nothing to propose", "nothing_to_propose"),
    ("prompts fill", "prompts_fill_the_pass"),
    ("even a certain draft", "rows_too_expensive"),
)


def reason_of(why: str) -> str:
    return next((label for part, label in REASONS if part in why), "other")


class Metrics(Listener):
    """One server's metrics, in their own registry."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._latest: dict[int, float] = {}  # sequence id -> time of its latest chunk
        self._prices_read = 0.0
        counter, gauge, histogram = (partial(self._metric, kind) for kind in (Counter, Gauge, Histogram))
        self.drafts = counter("spec_decode_num_drafts", "Verified drafts")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Accepted drafted tokens")
        self.accepted_at = counter("spec_decode_num_accepted_tokens_per_pos", "The same by position", "position")
        self.fallbacks = counter("spec_decode_fallback", "Decoding passes without a draft, by reason", "reason")
        self.failures = counter("spec_decode_drafter_failures", "Steps in which the drafter raised")
        self.draft_seconds = counter("spec_decode_draft_seconds", "Seconds spent drafting")
        self.verify_seconds = counter("spec_decode_verify_seconds", "Seconds spent in target passes")
        self.k = gauge("spec_decode_k", "Drafted tokens per sequence in the latest pass")
        self.break_even = gauge("spec_decode_breakeven_acceptance", "Acceptance at which a drafted token pays")
        self.enabled = gauge("spec_decode_enabled", "1 if this server has a drafter")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended answers")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens with reused K/V")
        self.tokens = counter("generation_tokens", "Emitted tokens")
        self.steps = counter("iterations", "Engine steps")
        self.preemptions = counter("num_preemptions", "Preemptions")
        self.ends = counter("request_success", "Answers by finish reason", "finished_reason")
        self.errors = counter("requests_refused", "Requests that got an error, by status", "status")
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token", buckets=SECONDS)
        self.between = histogram("inter_token_latency_seconds", "Between two chunks", buckets=TOKEN_SECONDS)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", buckets=TOKEN_SECONDS
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end", buckets=SECONDS)
        self.queued = histogram("request_queue_time_seconds", "From arrival to admission", buckets=SECONDS)

    def attach(self, worker: Worker) -> None:
        """Read running, waiting and cache use from this worker at each scrape."""
        self._worker, gauge = worker, partial(self._metric, Gauge)
        gauge("num_requests_running", "Answers in the batch").set_function(lambda: worker.running)
        gauge("num_requests_waiting", "Answers in the queue").set_function(lambda: worker.waiting)
        gauge("kv_cache_usage_perc", "Used share of the slots, 0 to 1").set_function(self._cache_usage)
        self.enabled.set(worker.llm.config.drafter_name != "off")

    def _cache_usage(self) -> float:
        cache = self._worker.llm.engine.cache  # not kept: a restart replaces it
        return 1 - cache.available / cache.slots

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def count_error(self, status: int) -> None:
        self.errors.labels(status=str(status), **self._labels).inc()

    def on_step(self, step: Step) -> None:
        self.steps.inc()
        self.draft_seconds.inc(step.clock.get("draft", 0.0))
        self.verify_seconds.inc(step.clock.get("verify", 0.0))
        self.failures.inc(bool(step.failure))
        now, drafted, verdicts = time.monotonic(), 0, 0
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is None:
                continue
            verdicts += 1
            drafted += len(tree.tokens)
            self.drafts.inc(bool(tree.tokens))
            self.accepted_tokens.inc(len(verdict.path))
            self.tokens.inc(len(verdict.tokens))
            for depth in range(min(len(verdict.path), MAX_POSITION)):
                self.accepted_at.labels(position=str(depth), **self._labels).inc()
            before = self._latest.get(turn.seq.id)
            self._latest[turn.seq.id] = now
            if before is not None:
                self.between.observe(now - before)
        self.draft_tokens.inc(drafted)
        if verdicts:
            self.k.set(drafted / verdicts)
            if not drafted:
                self.fallbacks.labels(reason=reason_of(step.why), **self._labels).inc()
        if now - self._prices_read > PRICE_INTERVAL:
            self._prices_read = now
            prices = self._worker.llm.engine.controller.prices
            if prices is not None and step.turns:
                self.break_even.set(max(prices.price(len(step.turns)) / len(step.turns), 0.0))

    def on_end(self, choice: Choice) -> None:
        stats, job = choice.seq.stats, choice.job
        self._latest.pop(choice.seq.id, None)
        self.ends.labels(finished_reason=choice.finish or "other", **self._labels).inc()
        self.prompt_tokens.inc(choice.seq.prompt_len)
        self.cached_tokens.inc(stats.reused)
        self.preemptions.inc(stats.preempted)
        self.whole.observe(choice.ended - job.arrived)
        if choice.started:
            self.queued.observe(choice.started - job.arrived)
        if choice.first:
            self.first.observe(choice.first - job.arrived)
            more = len(choice.seq.generated) - 1
            if more > 0:
                self.per_token.observe((choice.latest - choice.first) / more)

    def _metric(self, kind: type[MetricWrapperBase], name: str, help: str, label: str = "", **options: Any) -> Any:
        """A metric with this server's labels; with a further `label` its children are not chosen yet."""
        labels = [*self._labels, *([label] if label else [])]
        family = kind(f"outrider:{name}", help, labels, registry=self.registry, **options)
        return family if label else family.labels(**self._labels)


class JsonFormatter(logging.Formatter):
    """For `log.info("event", extra={"fields": {…}})`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        line |= {"event": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to(file: TextIO, level: int = logging.INFO) -> None:
    """Send this server's log, and uvicorn's warnings, to a file."""
    handler = logging.StreamHandler(file)
    handler.setFormatter(JsonFormatter())
    for name in ("outrider.server", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "outrider.server" else logging.WARNING)


class RequestLog(Listener):
    def __init__(self, llm: LLM, with_text: bool = False) -> None:
        self.llm, self.with_text = llm, with_text

    def on_end(self, choice: Choice) -> None:
        job, seq = choice.job, choice.seq
        fields: dict[str, Any] = {
            "id": job.id,
            "client": job.client,
            "index": choice.index,
            "finish": choice.finish,
            "prompt_tokens": seq.prompt_len,
            "tokens": len(seq.generated),
            **{name: getattr(seq.stats, name) for name in ("reused", "drafted", "accepted", "passes", "failures")},
            "queued_s": round((choice.started or choice.ended) - job.arrived, 4),
            "first_s": round(choice.first - job.arrived, 4) if choice.first else None,
            "seconds": round(choice.ended - job.arrived, 4),
        }
        if self.with_text:
            decode = self.llm.tokenizer.decode
            fields |= {"prompt": decode(seq.tokens[: seq.prompt_len]), "text": decode(seq.generated)}
        log.info("answer", extra={"fields": fields})


class Spans(Listener):
    def __init__(self, tracer: Any, model: str) -> None:
        self.tracer, self.model = tracer, model

    def on_end(self, choice: Choice) -> None:
        seq, job = choice.seq, choice.job
        epoch = time.time_ns() - time.monotonic_ns()
        attributes = {
            "gen_ai.operation.name": "text_completion" if job.id.startswith("cmpl") else "chat",
            "gen_ai.request.model": self.model,
            "gen_ai.response.id": job.id,
            "gen_ai.response.finish_reasons": [choice.finish],
            "gen_ai.usage.input_tokens": seq.prompt_len,
            "gen_ai.usage.output_tokens": len(seq.generated),
            "outrider.drafted": seq.stats.drafted,
            "outrider.accepted": seq.stats.accepted,
        }
        span = self.tracer.start_span("answer", start_time=epoch + int(1e9 * job.arrived), attributes=attributes)
        for name, at in (("started", choice.started), ("first_token", choice.first)):
            if at:
                span.add_event(name, timestamp=epoch + int(1e9 * at))
        span.end(end_time=epoch + int(1e9 * choice.ended))


def spans_for(model: str) -> list[Spans]:
    """One listener that writes spans; none where OpenTelemetry is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return []
    return [Spans(trace.get_tracer("outrider"), model)]
