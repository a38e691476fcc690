"""vLLM's speculation under Outrider's names, on vLLM's own /metrics: one dashboard for both engines.

A stat-logger plug-in: vLLM hands it each step's counts. What vLLM does not tell (why nothing was drafted, what drafting
took, the break-even) is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

LABELS = ["model_name", "engine"]


class SpeculationMetrics(AggregateStatLoggerBase):  # type: ignore[misc]  # vLLM is no part of what is type-checked
    """One for a server, whatever the number of its engines."""

    _registered: ClassVar[list[Any]] = []

    def __init__(self, vllm_config: Any, engine_indexes: Sequence[int] = (0,)) -> None:
        while self._registered:  # a second server in one process takes the names over
            REGISTRY.unregister(self._registered.pop())
        self._name = vllm_config.model_config.served_model_name
        self._engines = list(engine_indexes)
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
        for engine in self._engines:
            self.enabled.labels(*self._values(engine)).set(vllm_config.speculative_config is not None)

    def _new(self, kind: Any, name: str, help: str, more: Sequence[str] = ()) -> Any:
        made = kind(f"outrider:{name}", help, [*LABELS, *more])
        self._registered.append(made)
        return made

    def _values(self, engine: int) -> tuple[str, str]:
        return str(self._name), str(engine)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        labels = self._values(engine_idx)
        if iteration_stats is not None:
            self.tokens.labels(*labels).inc(iteration_stats.num_generation_tokens)
        if scheduler_stats is None:
            return
        self.running.labels(*labels).set(scheduler_stats.num_running_reqs)
        self.waiting.labels(*labels).set(scheduler_stats.num_waiting_reqs)
        found = scheduler_stats.spec_decoding_stats
        if found is None or not found.num_drafts:
            return
        self.drafts.labels(*labels).inc(found.num_drafts)
        self.draft_tokens.labels(*labels).inc(found.num_draft_tokens)
        self.accepted.labels(*labels).inc(found.num_accepted_tokens)
        self.k.labels(*labels).set(found.num_draft_tokens / found.num_drafts)
        for position, count in enumerate(found.num_accepted_tokens_per_pos):
            self.accepted_at.labels(*labels, str(position)).inc(count)

    def log_engine_initialized(self) -> None:
        """Nothing to say: what is configured stands at /v1/outrider/doctor."""
