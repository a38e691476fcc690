"""A stat-logger plug-in: vLLM's speculation under Outrider's metric names, on vLLM's own /metrics.

Metrics that vLLM does not provide are absent: why nothing was drafted, the time of drafting, the break-even.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.v1.metrics.loggers import AggregateStatLoggerBase


class SpeculationMetrics(AggregateStatLoggerBase):  # type: ignore[misc]  # vLLM is not type-checked
    """One instance for all engines of a server."""

    _registered: ClassVar[list[Any]] = []

    def __init__(self, vllm_config: Any, engine_indexes: Sequence[int] = (0,)) -> None:
        while self._registered:  # the names belong to the latest server of the process
            REGISTRY.unregister(self._registered.pop())
        self._name = str(vllm_config.model_config.served_model_name)
        self.drafts = self._new(Counter, "spec_decode_num_drafts", "Drafts that were verified")
        self.draft_tokens = self._new(Counter, "spec_decode_num_draft_tokens", "Drafted tokens")
        self.accepted = self._new(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self.accepted_at = self._new(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted drafted tokens by position", ["position"]
        )
        self.k = self._new(Gauge, "spec_decode_k", "Drafted tokens per sequence in the latest pass")
        self.enabled = self._new(Gauge, "spec_decode_enabled", "1 where this server has a drafter")
        self.tokens = self._new(Counter, "generation_tokens", "Emitted tokens")
        self.running = self._new(Gauge, "num_requests_running", "Answers in the batch")
        self.waiting = self._new(Gauge, "num_requests_waiting", "Answers in the queue")
        for engine in engine_indexes:
            self.enabled.labels(self._name, str(engine)).set(vllm_config.speculative_config is not None)

    def _new(self, kind: Any, name: str, help: str, more: Sequence[str] = ()) -> Any:
        metric = kind(f"outrider:{name}", help, ["model_name", "engine", *more])
        self._registered.append(metric)
        return metric

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        labels = (self._name, str(engine_idx))
        if iteration_stats is not None:
            self.tokens.labels(*labels).inc(iteration_stats.num_generation_tokens)
        if scheduler_stats is None:
            return
        self.running.labels(*labels).set(scheduler_stats.num_running_reqs)
        self.waiting.labels(*labels).set(scheduler_stats.num_waiting_reqs)
        stats = scheduler_stats.spec_decoding_stats
        if stats is None or not stats.num_drafts:
            return
        self.drafts.labels(*labels).inc(stats.num_drafts)
        self.draft_tokens.labels(*labels).inc(stats.num_draft_tokens)
        self.accepted.labels(*labels).inc(stats.num_accepted_tokens)
        self.k.labels(*labels).set(stats.num_draft_tokens / stats.num_drafts)
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            self.accepted_at.labels(*labels, str(position)).inc(count)

    def log_engine_initialized(self) -> None:
        """Logs nothing; the configuration is at /v1/outrider/doctor."""
