"""The losslessness promise, measured: plain and speculative decoding of the same prompts, compared id by id.

`measure` reports tokens compared, divergences, and at each divergence the margin, the gap between the target's two
highest scores there. A near-tie that fell the other way has a tiny margin; a broken cache has a large one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..drafters import names, suits
from ..llm import LLM, Completion
from ..types import SamplingParams
from .bench import make_setup
from .statistics import first_difference

SEED = 1000  # of the first prompt; each has one more
END = -1  # in place of a token id where one text is over


@dataclass
class TokenDivergence:
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
    failures: int = 0  # steps in which the drafter, or a member of it, raised
    first_failure: str = ""
    divergences: list[TokenDivergence] = field(default_factory=list)

    @property
    def alpha(self) -> float | None:
        return self.accepted / self.reached if self.reached else None

    def count(self, expected: Completion, actual: Completion) -> None:
        self.compared_tokens += max(len(expected.token_ids), len(actual.token_ids))
        for name in ("steps", "accepted", "reached", "failures"):
            setattr(self, name, getattr(self, name) + getattr(actual.stats, name))


@dataclass
class VerifyReport:
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

    @property
    def failures(self) -> int:
        return sum(bool(t.first_failure) for t in self.tallies)

    def as_json(self) -> dict[str, Any]:
        counts: dict[str, Any] = {"compared_tokens": self.compared_tokens, "divergences": self.divergences}
        counts["per_drafter"] = [asdict(t) | {"alpha": t.alpha} for t in self.tallies]
        return counts | {"model": self.model, "dtype": self.dtype, "device": self.device, "rule": self.rule}


def measure(
    llm: LLM,
    prompts: list[list[int]],
    drafters: list[str] | None = None,
    temperatures: tuple[float, ...] = (0.0, 0.8),
    max_tokens: int = 64,
    progress: Callable[[str, float], None] = lambda what, done: None,
) -> VerifyReport:
    """Every drafter at every temperature, batched, against plain decoding of one prompt at a time."""
    drafters = drafters or [name for name in names() if name != "off" and suits(name, llm.target)]
    report = VerifyReport(llm.name, llm.dtype, llm.config.rule, llm.device)
    runs = len(temperatures) * (1 + len(drafters))
    plain = llm.using(drafter="off", max_batch=1)
    for t in temperatures:
        params = [SamplingParams(temperature=t, seed=SEED + i, max_tokens=max_tokens) for i in range(len(prompts))]
        progress(f"plain, temperature {t:g}", len(report.tallies) / runs)
        expected = [out.outputs[0] for out in plain.generate(prompts, params)]
        for name in drafters:
            progress(f"{name}, temperature {t:g}", (len(report.tallies) + 1) / runs)
            setup = make_setup(llm, name, 5 if llm.config.k == "auto" else llm.config.k)
            candidate = llm.using(drafter=name, k=setup.k, **setup.options)
            actual = [out.outputs[0] for out in candidate.generate(prompts, params)]
            report.tallies.append(tally := Tally(name, t, first_failure=next(iter(candidate.engine.failures), "")))
            for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
                tally.count(a, b)
                if a.token_ids != b.token_ids:
                    tally.divergences.append(_divergence(plain, i, prompts[i], params[i], (a.token_ids, b.token_ids)))
    progress("done", 1.0)
    return report


def _divergence(
    plain: LLM, i: int, prompt: list[int], params: SamplingParams, answers: tuple[list[int], list[int]]
) -> TokenDivergence:
    at = first_difference(*answers)
    one, other = (ids[at] if at < len(ids) else END for ids in answers)
    return TokenDivergence(i, at, one, other, _margin(plain, prompt + answers[0][:at], params))


def _margin(plain: LLM, tokens: list[int], params: SamplingParams) -> float:
    next_token = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=1, logprobs=2)
    (out,) = plain.generate([tokens], next_token)
    (first, second) = out.outputs[0].logprobs[0].top  # type: ignore[index]
    return first[1] - second[1]
