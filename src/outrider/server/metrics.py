"""Numbers for Prometheus, under the names that others' dashboards know, with our prefix.

`outrider:spec_decode_…` are vLLM's names; the current K, the break-even α and fallbacks by reason are ours. Counted on
the engine's thread, read when somebody scrapes. Labels are few and fixed: no request can make a new one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from ..types import Step
from .job import Answer

if TYPE_CHECKING:
    from .worker import Worker

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
DEEPEST = 64  # positions that are told apart
OFTEN = 1.0  # seconds between two looks at the controller's prices

# The controller gives its reasons in words, with numbers in them; these are the kinds of them.
REASONS = (
    ("did not come back", "drafter_hangs"),
    ("switched off", "switched_off"),
    ("break-even", "below_break_even"),
    ("rests", "drafter_rests"),
    ("nothing to propose", "nothing_to_propose"),
    ("prompts fill", "prompts_fill_the_pass"),
)


def reason_of(why: str) -> str:
    return next((name for words, name in REASONS if words in why), "other")


class Metrics:
    """One server's counters, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._looked = 0.0
        counter, gauge = self._counter, self._gauge
        self.drafts = counter("spec_decode_num_drafts", "Drafts that were verified")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self.accepted_at = self._family(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted drafted tokens by position", "position"
        )
        self.fallbacks = self._family(
            Counter, "spec_decode_fallback", "Passes with verdicts but without a draft, by reason", "reason"
        )
        self.failures = counter("spec_decode_drafter_failures", "Steps in which the drafter raised")
        self.draft_seconds = counter("spec_decode_draft_seconds", "Seconds spent drafting")
        self.verify_seconds = counter("spec_decode_verify_seconds", "Seconds spent in the target's passes")
        self.k = gauge("spec_decode_k", "Drafted tokens per sequence in the latest pass")
        self.break_even = gauge("spec_decode_breakeven_acceptance", "How likely a drafted token must be to pay")
        self.enabled = gauge("spec_decode_enabled", "1 where this server has a drafter")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended answers")
        self.reused_tokens = counter("prompt_tokens_cached", "Prompt tokens whose K/V was there already")
        self.tokens = counter("generation_tokens", "Emitted tokens")
        self.steps = counter("iterations", "Steps of the engine")
        self.preemptions = counter("num_preemptions", "Answers that had to give their slots back for a while")
        self.ends = self._family(Counter, "request_success", "Answers by how they ended", "finished_reason")
        self.refusals = self._family(Counter, "requests_refused", "Requests that got an error, by status", "status")
        self.first = self._histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self.between = self._histogram("inter_token_latency_seconds", "Between two chunks of one answer", TOKEN_SECONDS)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "An answer's mean time per token after the first", TOKEN_SECONDS
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end", SECONDS)
        self.queued = self._histogram("request_queue_time_seconds", "From arrival to a place in the batch", SECONDS)
        self._latest: dict[int, float] = {}  # sequence -> when it last said something

    def watch(self, worker: Worker) -> None:
        """Read what is under way off the worker whenever somebody asks."""
        self._worker = worker
        self._gauge("num_requests_running", "Answers in the batch").set_function(lambda: worker.running)
        self._gauge("num_requests_waiting", "Answers in the queue").set_function(lambda: worker.waiting)
        usage = self._gauge("kv_cache_usage_perc", "Slots in use; 1 is all of them")
        usage.set_function(self._usage)
        self.enabled.set(worker.llm.config.drafter_name != "off")

    def _usage(self) -> float:
        cache = self._worker.llm.engine.cache  # asked for each time: a restart replaces it
        return 1 - cache.available / cache.slots

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # ------------------------------------------------------------ on the engine's thread

    def observed(self, step: Step) -> None:
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
            for depth in range(min(len(verdict.path), DEEPEST)):
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
        if now - self._looked > OFTEN:
            self._look_at_prices(now)

    def _look_at_prices(self, now: float) -> None:
        self._looked = now
        prices = getattr(self._worker.llm.engine.controller, "now", None)
        if prices is not None:
            self.break_even.set(prices.break_even(max(prices.sequences, 1)))

    def ended(self, answer: Answer) -> None:
        stats, job = answer.seq.stats, answer.job
        self._latest.pop(answer.seq.id, None)
        self.ends.labels(finished_reason=answer.finish or "other", **self._labels).inc()
        self.prompt_tokens.inc(answer.seq.prompt_len)
        self.reused_tokens.inc(stats.reused)
        self.preemptions.inc(stats.preempted)
        self.whole.observe(answer.ended - job.arrived)
        if answer.started:
            self.queued.observe(answer.started - job.arrived)
        if answer.first:
            self.first.observe(answer.first - job.arrived)
            more = len(answer.seq.generated) - 1
            if more > 0:
                self.per_token.observe((answer.latest - answer.first) / more)

    def refused(self, status: int) -> None:
        self.refusals.labels(status=str(status), **self._labels).inc()

    # ------------------------------------------------------------ making them

    def _family(self, kind: type[MetricWrapperBase], name: str, help: str, label: str) -> Any:
        return kind(f"outrider:{name}", help, [*self._labels, label], registry=self.registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"outrider:{name}", help, [*self._labels], registry=self.registry).labels(**self._labels)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"outrider:{name}", help, [*self._labels], registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"outrider:{name}", help, [*self._labels], registry=self.registry, buckets=buckets)
        return family.labels(**self._labels)
