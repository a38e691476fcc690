"""A load generator for any OpenAI-compatible server: arrivals, latencies, throughput, acceptance where it is reported.

Every request has its own thread, so that a slow response delays no arrival. Times are the client's: TTFT from sending
to the first chunk with text, TPOT = (end − first) ÷ (tokens − 1), because a chunk may hold several accepted tokens.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .client import RemoteError, Response, Server, text_of

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class LoadPlan:
    """Requests and their arrivals: `rate` per second (Poisson), or None for `concurrency` requests at a time."""

    prompts: list[str]
    requests: int = 32
    concurrency: int = 8
    rate: float | None = None
    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    model: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # merged into every request body

    def body(self, i: int) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": self.prompts[i % len(self.prompts)]}]}
        body |= {"max_tokens": self.tokens, "temperature": self.temperature, "seed": self.seed + i}
        body |= {"stream_options": {"include_usage": True}, **self.extra}
        return body | ({"model": self.model} if self.model else {})


@dataclass
class Sample:
    """One request as its client saw it. Times are seconds since the load began."""

    sent: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)  # seconds between chunks
    response: Response = field(default_factory=Response)
    error: str = ""


def run(server: Server, plan: LoadPlan) -> list[Sample]:
    """Send all requests; returns when the last response has ended."""
    free = threading.Semaphore(plan.requests if plan.rate else plan.concurrency)
    samples = [Sample() for _ in range(plan.requests)]
    zero, threads = time.perf_counter(), []
    for i, due in enumerate(_arrivals(plan)):
        time.sleep(max(zero + due - time.perf_counter(), 0.0))
        free.acquire()
        thread = threading.Thread(target=_request, args=(server, plan.body(i), samples[i], zero, free), daemon=True)
        threads.append(thread)
        thread.start()
    for thread in threads:
        thread.join()
    return samples


def _arrivals(plan: LoadPlan) -> Iterator[float]:
    dice, now = random.Random(plan.seed), 0.0
    for _ in range(plan.requests):
        yield now
        now += dice.expovariate(plan.rate) if plan.rate else 0.0


def _request(server: Server, body: dict[str, Any], sample: Sample, zero: float, free: threading.Semaphore) -> None:
    sample.sent, latest = time.perf_counter() - zero, 0.0
    try:
        for at, chunk in server.chat(body):
            sample.response.add(chunk)
            if text_of(chunk):
                sample.first = sample.first or at - zero
                sample.gaps += [at - latest] if latest else []
                latest = at
    except RemoteError as error:
        sample.error = str(error)
    finally:
        sample.ended = time.perf_counter() - zero
        free.release()


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Percentiles in milliseconds, throughput in tokens and requests per second of the whole run."""
    good = [s for s in samples if not s.error and s.first]
    seconds = max((s.ended for s in samples), default=0.0) - min((s.sent for s in samples), default=0.0)
    tokens, drafted, accepted = (sum(getattr(s.response, n) for s in good) for n in ("tokens", "drafted", "accepted"))
    return {
        "requests": len(samples),
        "failed": sum(bool(s.error) for s in samples),
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
        "requests_per_second": round(len(good) / seconds, 3) if seconds else 0.0,
        "ttft_ms": percentiles([s.first - s.sent for s in good]),
        "tpot_ms": percentiles([(s.ended - s.first) / (n - 1) for s in good if (n := s.response.tokens) > 1]),
        "between_chunks_ms": percentiles([gap for s in good for gap in s.gaps]),
        "e2e_ms": percentiles([s.ended - s.sent for s in good]),
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "draft_tokens": drafted,
        "errors": sorted({s.error for s in samples if s.error})[:5],
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Mean and nearest-rank percentiles in milliseconds."""
    if not seconds:
        return {}
    ranked = sorted(seconds)
    at = {f"p{p}": ranked[min(len(ranked) - 1, max(0, -(-len(ranked) * p // 100) - 1))] for p in PERCENTILES}
    return {name: round(1e3 * value, 2) for name, value in ({"mean": sum(ranked) / len(ranked)} | at).items()}
