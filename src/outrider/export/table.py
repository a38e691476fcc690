"""How many tokens to draft at which batch size: a table from an acceptance rate and the measured cost of passes.

In a batch every sequence brings its own drafts into one pass, so rows become dear before acceptance becomes better:
the larger the batch, the fewer are worth their place. Costs are those of Outrider's own passes on the machine that was
tuned; another engine's differ, but where a pass stops being bound by memory is the machine's, not the engine's.
"""

from __future__ import annotations

from typing import Any

from ..control.costs import Costs
from ..errors import ConfigError
from ..measure.statistics import expected_tokens

Range = tuple[int, int, int]  # from this batch size to that one: K
MARGIN = 1.02  # a K that promises less than this over plain decoding is not worth its place


def best_k(alpha: float, costs: Costs, sequences: int, most: int, draft: float = 0.0) -> int:
    """The K with the most expected tokens per second for each of so many sequences; 0 is plain decoding."""

    def speed(k: int) -> float:
        return expected_tokens(alpha, k) / (costs(sequences * (k + 1), sequences) + k * draft)

    found = max(range(most + 1), key=speed)
    return found if speed(found) > MARGIN * speed(0) else 0


def k_by_batch(alpha: float, costs: Costs, most: int, batches: int, draft: float = 0.0) -> list[Range]:
    """Ranges of batch sizes from 1 to `batches`, K never rising with the batch."""
    ranges: list[Range] = []
    limit = most
    for sequences in range(1, batches + 1):
        limit = best_k(alpha, costs, sequences, limit, draft)
        if ranges and ranges[-1][2] == limit:
            ranges[-1] = (ranges[-1][0], sequences, limit)
        else:
            ranges.append((sequences, sequences, limit))
    return ranges


def from_profile(profile: dict[str, Any], most: int, batches: int) -> list[Range]:
    """The table that a profile's own measurements give; none where it has no costs or no acceptance rate."""
    costs, alpha = costs_of(profile), profile.get("measured", {}).get("alpha")
    if costs is None or not alpha or most < 1:
        return []
    return k_by_batch(float(alpha), costs, most, batches, draft_seconds(profile, costs))


def costs_of(profile: dict[str, Any]) -> Costs | None:
    """Seconds of a pass by (sequences, rows), as `outrider tune` noted them under `costs`."""
    noted = profile.get("costs")
    if not noted:
        return None
    try:
        seconds = {_pair(name): float(value) for name, value in noted.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"The profile's costs are damaged ({error}); tune again.") from error
    return Costs(seconds)


def draft_seconds(profile: dict[str, Any], costs: Costs) -> float:
    """What a drafted token took: what a step took beyond its pass, in the clock of the costs."""
    found, k = profile.get("measured", {}), profile.get("k")
    try:
        tau, speed, plain = (float(found[name]) for name in ("tau", "tok_s", "plain_tok_s"))
        scale = costs(1) * plain  # a plain step is one pass and its overhead
        return max((tau / speed) * scale - costs(k + 1), 0.0) / k if isinstance(k, int) and k else 0.0
    except (KeyError, TypeError, ZeroDivisionError):
        return 0.0


def _pair(name: str) -> tuple[int, int]:
    sequences, rows = (int(part) for part in name.split(","))
    return sequences, rows
