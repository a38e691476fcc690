"""A load generator for any OpenAI-compatible server: arrivals, latencies, throughput, and acceptance where it is told.

Every request is a thread, so that a slow answer delays nobody's arrival. Times are the client's own: TTFT from sending
to the first chunk with text, TPOT = (end − first) ÷ (tokens − 1), as a speculated chunk holds several tokens.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .client import RemoteError, Server, text_of

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class LoadPlan:
    """What is asked and how fast. `rate` is arrivals per second (Poisson); None: as soon as a place is free."""

    prompts: list[str]
    requests: int = 32
    concurrency: int = 8
    rate: float | None = None
    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    model: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # goes into every body as it is

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
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)  # between chunks
    drafted: int = 0
    accepted: int = 0
    text: str = ""
    error: str = ""


def run(server: Server, plan: LoadPlan) -> list[Sample]:
    """Ask everything; returns when the last answer has ended."""
    places = threading.Semaphore(plan.requests if plan.rate else plan.concurrency)
    samples = [Sample() for _ in range(plan.requests)]
    zero, threads = time.perf_counter(), []
    for i, due in enumerate(_arrivals(plan)):
        time.sleep(max(zero + due - time.perf_counter(), 0.0))
        places.acquire()
        thread = threading.Thread(target=_one, args=(server, plan.body(i), samples[i], zero, places), daemon=True)
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


def _one(server: Server, body: dict[str, Any], sample: Sample, zero: float, places: threading.Semaphore) -> None:
    sample.sent, latest = time.perf_counter() - zero, 0.0
    try:
        for at, chunk in server.chat(body):
            if text := text_of(chunk):
                sample.text += text
                sample.first = sample.first or at - zero
                sample.gaps += [at - latest] if latest else []
                latest = at
            sample.tokens = (chunk.get("usage") or {}).get("completion_tokens", sample.tokens)
            timings = chunk.get("timings") or {}
            sample.drafted += timings.get("draft_n") or 0
            sample.accepted += timings.get("draft_n_accepted") or 0
    except RemoteError as error:
        sample.error = str(error)
    finally:
        sample.ended = time.perf_counter() - zero
        places.release()


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Percentiles in milliseconds, throughput in tokens and answers per second of the whole run."""
    well = [s for s in samples if not s.error and s.first]
    seconds = max((s.ended for s in samples), default=0.0) - min((s.sent for s in samples), default=0.0)
    tokens = sum(s.tokens for s in well)
    drafted, accepted = sum(s.drafted for s in well), sum(s.accepted for s in well)
    return {
        "requests": len(samples),
        "failed": sum(bool(s.error) for s in samples),
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
        "requests_per_second": round(len(well) / seconds, 3) if seconds else 0.0,
        "ttft_ms": _percentiles([s.first - s.sent for s in well]),
        "tpot_ms": _percentiles([(s.ended - s.first) / (s.tokens - 1) for s in well if s.tokens > 1]),
        "between_chunks_ms": _percentiles([gap for s in well for gap in s.gaps]),
        "e2e_ms": _percentiles([s.ended - s.sent for s in well]),
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "draft_tokens": drafted,
        "errors": sorted({s.error for s in samples if s.error})[:5],
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """The nearest rank, and the mean."""
    if not seconds:
        return {}
    ranked = sorted(seconds)
    at = {f"p{p}": ranked[min(len(ranked) - 1, max(0, -(-len(ranked) * p // 100) - 1))] for p in PERCENTILES}
    return {name: round(1e3 * value, 2) for name, value in ({"mean": sum(ranked) / len(ranked)} | at).items()}
