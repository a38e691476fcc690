"""The promise, measured: plain and speculative decoding of the same prompts, compared id by id.

`measure` reports what it finds, good or bad: tokens compared, divergences, and at each divergence the margin, the gap
between the two highest scores of the target there. A near-tie that fell the other way has a tiny margin; a broken cache
has a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..drafters import lookup, names, suits
from ..llm import LLM, Completion
from ..types import SamplingParams

Prompt = list[int]


@dataclass
class Divergence:
    prompt: int
    position: int  # in the answer
    plain: int  # token ids
    speculative: int
    margin: float  # between the target's two highest logits there


@dataclass
class Tally:
    """One drafter at one temperature."""

    drafter: str
    temperature: float
    compared_tokens: int = 0
    steps: int = 0
    accepted: int = 0
    reached: int = 0
    failures: int = 0  # times the drafter raised
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def alpha(self) -> float | None:
        return self.accepted / self.reached if self.reached else None


@dataclass
class Report:
    model: str
    dtype: str
    rule: str
    device: str = "cpu"
    tallies: list[Tally] = field(default_factory=list)

    @property
    def compared_tokens(self) -> int:
        return sum(t.compared_tokens for t in self.tallies)

    @property
    def divergences(self) -> int:
        return sum(len(t.divergences) for t in self.tallies)

    def as_json(self) -> dict[str, Any]:
        return {
            "compared_tokens": self.compared_tokens,
            "divergences": self.divergences,
            "per_drafter": [asdict(t) | {"alpha": t.alpha} for t in self.tallies],
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "rule": self.rule,
        }


def measure(
    llm: LLM,
    prompts: list[Prompt],
    drafters: list[str] | None = None,
    temperatures: tuple[float, ...] = (0.0, 0.8),
    max_tokens: int = 64,
    progress: Callable[[str, float], None] = lambda what, done: None,
) -> Report:
    """Every drafter at every temperature against plain decoding, one prompt at a time and then batched."""
    drafters = drafters or [name for name in names() if name != "off" and suits(name, llm.target)]
    report = Report(llm.name, llm.dtype, llm.config.rule, llm.device)
    runs = len(temperatures) * (1 + len(drafters))
    plain = llm.using(drafter="off", max_batch=1)
    for t in temperatures:
        params = [SamplingParams(temperature=t, seed=1000 + i, max_tokens=max_tokens) for i in range(len(prompts))]
        progress(f"plain, temperature {t:g}", len(report.tallies) / runs)
        expected = [out.outputs[0] for out in plain.generate(prompts, params)]
        for name in drafters:
            progress(f"{name}, temperature {t:g}", (len(report.tallies) + 1) / runs)
            options = lookup(name).traits.trial(llm.target) | llm.config.options
            candidate = llm.using(drafter=name, k=5 if llm.config.k == "auto" else llm.config.k, **options)
            said = [out.outputs[0] for out in candidate.generate(prompts, params)]
            report.tallies.append(_tally(name, t, expected, said))
            report.tallies[-1].divergences = [*_divergences(plain, prompts, params, expected, said)]
    progress("done", 1.0)
    return report


def _tally(name: str, temperature: float, expected: list[Completion], said: list[Completion]) -> Tally:
    tally = Tally(name, temperature)
    for a, b in zip(expected, said, strict=True):
        tally.compared_tokens += max(len(a.token_ids), len(b.token_ids))
        tally.steps += b.stats.steps
        tally.accepted += b.stats.accepted
        tally.reached += b.stats.reached
        tally.failures += b.stats.failures
    return tally


def _divergences(
    plain: LLM, prompts: list[Prompt], params: list[SamplingParams], expected: list[Completion], said: list[Completion]
) -> Iterator[Divergence]:
    for i, (a, b) in enumerate(zip(expected, said, strict=True)):
        if a.token_ids == b.token_ids:
            continue
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        at = next((j for j, (x, y) in enumerate(pairs) if x != y), min(len(a.token_ids), len(b.token_ids)))
        ours, theirs = (ids[at] if at < len(ids) else -1 for ids in (a.token_ids, b.token_ids))
        yield Divergence(i, at, ours, theirs, _margin(plain, prompts[i] + a.token_ids[:at], params[i]))


def _margin(plain: LLM, tokens: Prompt, params: SamplingParams) -> float:
    one = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=1, logprobs=2)
    (out,) = plain.generate([tokens], one)
    (first, second) = out.outputs[0].logprobs[0].top  # type: ignore[index]
    return first[1] - second[1]
