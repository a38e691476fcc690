"""What is measured: Prometheus metrics, and a log line and an OpenTelemetry span for every choice that ends.

Metrics have vLLM's names with our prefix; the current K, the break-even acceptance and fallbacks by reason are our own.
Labels are few and fixed; only the kinds of text that requests name (`speculation.kind`) become labels, at most
`_drift.KINDS` of them. The log is one JSON object per line. It contains text only if that
is configured; spans never do. Spans need the `otel` extra and go where OpenTelemetry is configured to send them.
"""

from __future__ import annotations

import json
import logging
import time
from bisect import bisect_left
from collections import Counter as Counting
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .jobs import Choice, Listener, StepReport
from .messages import EngineLink
from .worker import Worker

log = logging.getLogger("outrider.server")
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
MAX_POSITION = 64  # deepest position with a label of its own
LEARNING = {  # numbers of `LLM.learning`
    "records": "Verified tokens that were learnt from",
    "updates": "Updates of the trained weights",
    "rollbacks": "Trained weights that were given up because they were worse",
    "seconds": "CPU seconds spent learning",
    "phrases": "Contexts that a head's memory knows",
    "phrases_proposed": "Verified tokens that the memory drafted in the place of a head's",
    "phrases_accepted": "Those of them that were accepted",
}

# Part of the reason for a step's draft (a sentence with numbers) -> label of a step in which nothing was drafted.
REASONS = (
    ("did not come back", "drafter_hangs"),
    ("drafter failed", "drafter_failed"),
    ("switched off", "switched_off"),
    ("break-even", "below_break_even"),
    ("paused", "drafter_rests"),
    ("asked now and then", "drafter_rests"),
    ("prompts fill", "prompts_fill_the_pass"),
    ("drafts are planned", "host_has_no_time"),
    ("even a certain draft", "rows_too_expensive"),
    ("nothing to propose", "nothing_to_propose"),
    ("K is fixed", "nothing_to_propose"),  # it was asked, and these sentences say for how much
    ("is tried", "nothing_to_propose"),
    ("tokens expected", "nothing_to_propose"),
)


def reason_of(why: str) -> str:
    return next((label for part, label in REASONS if part in why), "other")


class Metrics(Listener):
    """One server's metrics, in their own registry."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._latest: dict[int, float] = {}  # sequence -> time of its latest chunk
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
        self.between = StepHistogram("outrider:inter_token_latency_seconds", "Between two chunks", self._labels)
        self.registry.register(self.between)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first", buckets=TOKEN_SECONDS
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end", buckets=SECONDS)
        self.queued = histogram("request_queue_time_seconds", "From arrival to admission", buckets=SECONDS)

    def attach(self, worker: Worker) -> None:
        """Read running, waiting and cache use from this worker at each scrape."""
        gauge = partial(self._metric, Gauge)
        gauge("num_requests_running", "Answers in the batch").set_function(lambda: worker.running)
        gauge("num_requests_waiting", "Answers in the queue").set_function(lambda: worker.waiting)
        gauge("kv_cache_usage_perc", "Used share of the slots, 0 to 1").set_function(lambda: worker.stats.cache_usage)
        self.break_even.set_function(lambda: worker.stats.break_even or 0.0)
        self.enabled.set(worker.engine.facts.drafter != "off")
        self.registry.register(DraftQuality(worker, self._labels))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def count_error(self, status: int) -> None:
        self.errors.labels(status=str(status), **self._labels).inc()

    def on_step(self, step: StepReport) -> None:
        progress, drafted = step.progress, sum(step.drafted)
        if progress.counted:
            self.steps.inc()
            self.draft_seconds.inc(progress.clock.get("draft", 0.0))
            self.verify_seconds.inc(progress.clock.get("verify", 0.0))
            self.failures.inc(progress.failed)
        if not step.choices:
            return
        self.tokens.inc(sum(step.emitted))
        self.k.set(drafted / len(step.choices))
        if drafted:
            self.drafts.inc(sum(count > 0 for count in step.drafted))
            self.draft_tokens.inc(drafted)
            self._count_accepted(step.accepted)
        else:
            self.fallbacks.labels(reason=reason_of(progress.why), **self._labels).inc()
        now, latest = time.monotonic(), self._latest
        times = Counting(latest.get(choice.seq) for choice in step.choices)  # most are the time of the last step
        latest.update(dict.fromkeys([choice.seq for choice in step.choices], now))
        for before, count in times.items():
            if before is not None:
                self.between.observe(now - before, count)

    def _count_accepted(self, accepted: list[int]) -> None:
        self.accepted_tokens.inc(sum(accepted))
        for depth in range(min(max(accepted), MAX_POSITION)):
            count = sum(length > depth for length in accepted)
            self.accepted_at.labels(position=str(depth), **self._labels).inc(count)

    def on_end(self, choice: Choice) -> None:
        stats, job = choice.stats, choice.job
        self._latest.pop(choice.seq, None)
        self.ends.labels(finished_reason=choice.finish or "other", **self._labels).inc()
        self.prompt_tokens.inc(len(choice.prompt))
        self.cached_tokens.inc(stats.reused)
        self.preemptions.inc(stats.preempted)
        self.whole.observe(choice.ended - job.arrived)
        if choice.started:
            self.queued.observe(choice.started - job.arrived)
        if choice.first:
            self.first.observe(choice.first - job.arrived)
            more = len(choice.tokens) - 1
            if more > 0:
                self.per_token.observe((choice.latest - choice.first) / more)

    def _metric(self, kind: type[MetricWrapperBase], name: str, help: str, label: str = "", **options: Any) -> Any:
        """A metric with this server's labels; with a further `label` its children are not chosen yet."""
        labels = [*self._labels, *([label] if label else [])]
        family = kind(f"outrider:{name}", help, labels, registry=self.registry, **options)
        return family if label else family.labels(**self._labels)


class StepHistogram(Collector):
    """A histogram over TOKEN_SECONDS that takes many equal values at once: those of one step."""

    def __init__(self, name: str, help: str, labels: dict[str, str]) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._counts, self._sum = [0] * (len(TOKEN_SECONDS) + 1), 0.0

    def observe(self, seconds: float, count: int) -> None:
        self._counts[bisect_left(TOKEN_SECONDS, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        bounds = [*map(floatToGoString, TOKEN_SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family


class DraftQuality(Collector):
    """Acceptance by drafter and kind of text, whether it has fallen, and what a learning drafter has learnt."""

    def __init__(self, worker: Worker, labels: dict[str, str]) -> None:
        self.worker, self.labels = worker, labels

    def collect(self) -> Iterator[GaugeMetricFamily]:
        watched = [each for each in self.worker.stats.drift if each["alpha"] is not None]
        yield self._by_kind("acceptance_rate", "Mean acceptance since the last change", watched, lambda d: d["alpha"])
        yield self._by_kind("acceptance_stale", "1 after a fall without recovery", watched, lambda d: d["stale"])
        yield self._by_kind("acceptance_changes", "Changes found, the latest 8", watched, lambda d: len(d["changes"]))
        learning = self.worker.stats.learning or {}
        for name, help in LEARNING.items():
            family = GaugeMetricFamily(f"outrider:learning_{name}", help, labels=list(self.labels))
            if name in learning:
                family.add_metric(list(self.labels.values()), float(learning[name]))
            yield family

    def _by_kind(
        self, name: str, help: str, watched: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"outrider:spec_decode_{name}", help, labels=[*self.labels, "drafter", "kind"])
        for each in watched:
            family.add_metric([*self.labels.values(), each["drafter"], each["kind"]], float(value(each)))
        return family


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
    def __init__(self, engine: EngineLink, with_text: bool = False) -> None:
        self.engine, self.with_text = engine, with_text

    def on_end(self, choice: Choice) -> None:
        job, stats = choice.job, choice.stats
        fields: dict[str, Any] = {
            "id": job.id,
            "client": job.client,
            "index": choice.index,
            "finish": choice.finish,
            "prompt_tokens": len(choice.prompt),
            "tokens": len(choice.tokens),
            **{name: getattr(stats, name) for name in ("reused", "drafted", "accepted", "passes", "failures")},
            "queued_s": round((choice.started or choice.ended) - job.arrived, 4),
            "first_s": round(choice.first - job.arrived, 4) if choice.first else None,
            "seconds": round(choice.ended - job.arrived, 4),
        }
        if self.with_text:
            decode = self.engine.tokenizer.decode
            fields |= {"prompt": decode(choice.prompt), "text": decode(choice.tokens)}
        log.info("answer", extra={"fields": fields})


class Spans(Listener):
    def __init__(self, tracer: Any, model: str) -> None:
        self.tracer, self.model = tracer, model

    def on_end(self, choice: Choice) -> None:
        job = choice.job
        epoch = time.time_ns() - time.monotonic_ns()
        attributes = {
            "gen_ai.operation.name": "text_completion" if job.id.startswith("cmpl") else "chat",
            "gen_ai.request.model": self.model,
            "gen_ai.response.id": job.id,
            "gen_ai.response.finish_reasons": [choice.finish],
            "gen_ai.usage.input_tokens": len(choice.prompt),
            "gen_ai.usage.output_tokens": len(choice.tokens),
            "outrider.drafted": choice.stats.drafted,
            "outrider.accepted": choice.stats.accepted,
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
