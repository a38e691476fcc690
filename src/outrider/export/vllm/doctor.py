"""What speculation does in a running vLLM, in sentences: from counters alone, without running anything.

It knows numbers; whoever asks knows where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import BELOW, LEAST

FEW = 50  # drafts below which nothing is concluded
SELDOM = 0.1  # of the drafts reach a position: it costs rows and brings little


@dataclass(frozen=True)
class Counts:
    """Since the server started."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted: float = 0.0
    accepted_at: list[float] = field(default_factory=list)

    @staticmethod
    def read(samples: Mapping[tuple[str, str], float]) -> Counts:
        """From (metric, position) -> value; the position is empty where there is none."""
        name = "outrider:spec_decode_num_"
        by_position = {int(p): v for (n, p), v in samples.items() if n == f"{name}accepted_tokens_per_pos_total" and p}
        return Counts(
            samples.get((f"{name}drafts_total", ""), 0.0),
            samples.get((f"{name}draft_tokens_total", ""), 0.0),
            samples.get((f"{name}accepted_tokens_total", ""), 0.0),
            [by_position[p] for p in sorted(by_position)],
        )


def report(counts: Counts, method: str, k: int, version: str) -> dict[str, Any]:
    """Figures for programs and findings for people."""
    found: dict[str, Any] = {"engine": "vllm", "version": version, "method": method, "k": k}
    found |= {"drafts": counts.drafts, "draft_tokens": counts.draft_tokens, "accepted_tokens": counts.accepted}
    if counts.drafts and counts.draft_tokens:
        found["acceptance_rate"] = round(counts.accepted / counts.draft_tokens, 4)
        found["mean_acceptance_length"] = round(1 + counts.accepted / counts.drafts, 4)
        found["reached_by_position"] = [round(c / counts.drafts, 4) for c in counts.accepted_at]
    return found | {"findings": findings(counts, method, k, version)}


def findings(counts: Counts, method: str, k: int, version: str) -> list[str]:
    said = [words] if (words := outside(version)) else []
    if method == "none":
        return [*said, "No drafter is configured: every token costs a pass."]
    if counts.drafts < FEW:
        return [*said, f"Only {counts.drafts:.0f} drafts so far: ask again after more requests."]
    useful = sum(c / counts.drafts >= SELDOM for c in counts.accepted_at)
    if useful < len(counts.accepted_at):
        said.append(
            f"Fewer than one draft in ten gets beyond {useful} tokens, but {k} are drafted: "
            + (f"try --k {useful}." if useful else "another drafter, or none, would be faster.")
        )
    elif counts.accepted_at and counts.accepted_at[-1] / counts.drafts > 0.6:
        said.append(f"Most drafts are accepted to their end: try a larger --k than {k}.")
    return said or ["Nothing looks wrong. Whether it pays, only a comparison tells: `outrider bench serve` on both."]


def outside(version: str) -> str:
    """A sentence where vLLM is not one of the versions that were tested."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if LEAST <= numbers < BELOW:
        return ""
    least, below = (".".join(map(str, each)) for each in (LEAST, BELOW))
    return f"vLLM is {version}; Outrider was tested with {least} up to, but not including, {below}."
