"""The price of a million tokens, with and without speculation, from measured speeds and the price of a machine hour.

It knows rows of a benchmark and one price; it does not know currencies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, OutriderError


@dataclass(frozen=True)
class Bill:
    """One drafter on one category; `plain` and `speculative` are prices of a million tokens."""

    drafter: str
    k: int | str
    category: str
    tok_s: float
    plain_tok_s: float
    plain: float
    speculative: float

    @property
    def saving_percent(self) -> float:
        return 100 * (1 - self.speculative / self.plain)


def per_million(price_per_hour: float, tokens_per_second: float) -> float:
    return price_per_hour / 3600 / tokens_per_second * 1e6


def bills(rows: list[dict[str, Any]], price_per_hour: float) -> list[Bill]:
    """A bill for every row that has both speeds."""
    if not price_per_hour > 0:
        raise ConfigError(f"--price-per-hour is {price_per_hour:g}, but it must be more than 0.")
    speeds = [(row, row["tok_s"], row["plain_tok_s"]) for row in rows if row["tok_s"] and row["plain_tok_s"]]
    return [
        Bill(
            row["drafter"], row.get("k", "auto"), row["category"], speed, plain_speed,
            plain=per_million(price_per_hour, plain_speed), speculative=per_million(price_per_hour, speed),
        )
        for row, speed, plain_speed in speeds
    ]  # fmt: skip


def rows_from(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a benchmark's JSON: all of the file, as in bench/results, or its last line, below a table."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"The benchmark in {path} cannot be read: {error}.") from error
    try:
        rows = json.loads(text if text.startswith("{") else text.splitlines()[-1])["rows"]
        return [dict(row) for row in rows if {"drafter", "category", "tok_s", "plain_tok_s"} <= set(row)]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise OutriderError(f"{path} does not end with a line that `outrider bench --json` wrote.") from error
