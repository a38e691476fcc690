"""A change-point test on acceptance, by drafter and kind of text: has a drafter gone stale?

The test is a self-starting CUSUM. Each block of requests is compared with all blocks since the last change, in units of
their standard deviation; small deviations that persist add up. Without a change it alarms about once in 10,000 blocks.
It stores rates and counts, no text and no tokens; requests with `learn=False` are not counted.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..models.paths import cache_folder, write_quietly
from ..types import REJECTED, Listener, Step

BLOCK = 48  # least nodes of a block; blocks consist of whole requests, because the nodes of one request are correlated
WARM = 24  # blocks before the first alarm
SLACK = 0.5  # standard deviations of a block that are ignored
LIMIT = 8.0  # summed standard deviations that raise an alarm
_CLIP = 3.0  # largest deviation of one block, so that a single unusual request is no change
_LEAST_SPREAD = 0.02  # lower bound of the standard deviation
_CHANGES = 8  # stored changes
_OPEN = 256  # requests without a known end
_SAVE_INTERVAL = 60.0  # seconds
DEFAULT, OTHER = "text", "other"  # the kind of requests that name none, and of those beyond KINDS
KINDS = 32  # kinds of text that are watched apart: a client's labels must not fill the memory


@dataclass(frozen=True)
class Change:
    block: int  # in which it was detected
    before: float
    after: float
    at: float  # seconds since 1970

    @property
    def fell(self) -> bool:
        return self.after < self.before


@dataclass
class ChangeDetector:
    """The test for one drafter and one kind of text."""

    blocks: int = 0
    count: int = 0  # blocks since the last change
    mean: float = 0.0  # acceptance in them
    squares: float = 0.0  # summed squared deviations from the mean
    low: float = 0.0  # evidence of a fall, in standard deviations
    high: float = 0.0  # evidence of a rise
    since_low: list[float] = field(default_factory=list)  # blocks since the evidence was last zero
    since_high: list[float] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @property
    def stale(self) -> Change | None:
        """The last fall, unless acceptance has recovered by at least half of it."""
        falls = [change for change in self.changes if change.fell]
        if not falls or (self.count and self.mean >= 0.5 * (falls[-1].before + falls[-1].after)):
            return None
        return falls[-1]

    def add(self, value: float, now: float = 0.0) -> Change | None:
        """Adds the acceptance of a block; returns the change that it reveals, if any."""
        self.blocks += 1
        if self.count >= WARM:
            spread = max(math.sqrt(self.squares / (self.count - 1)), _LEAST_SPREAD)
            z = (value - self.mean) / (spread * math.sqrt(1 + 1 / self.count))
            z = min(max(z, -_CLIP), _CLIP)
            self.low, self.high = max(0.0, self.low - z - SLACK), max(0.0, self.high + z - SLACK)
            self.since_low = [*self.since_low, value] if self.low else []
            self.since_high = [*self.since_high, value] if self.high else []
            if max(self.low, self.high) > LIMIT:
                return self._change(self.since_low if self.low > self.high else self.since_high, now)
        self._count(value)
        return None

    def _change(self, since: list[float], now: float) -> Change:
        change = Change(self.blocks, self.mean, sum(since) / len(since), now)
        self.changes = [*self.changes, change][-_CHANGES:]
        self.count, self.mean, self.squares, self.low, self.high = 0, 0.0, 0.0, 0.0, 0.0
        self.since_low, self.since_high = [], []
        for value in since:
            self._count(value)
        return change

    def _count(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)


class Monitor(Listener):
    """A listener with a detector for each (drafter, kind). With names, its state is kept in a file."""

    reads_logits = False

    def __init__(self, *names: str) -> None:
        file = re.sub(r"[^\w.-]+", "_", "-".join(names)) + ".json"
        self.path = cache_folder() / "drift" / file if names else None
        self.detectors = read(self.path)
        self._open: dict[int, dict[tuple[str, str], list[int]]] = {}  # request -> accepted and reached nodes
        self._block: dict[tuple[str, str], list[int]] = {}
        self._kinds = {DEFAULT, OTHER, *(kind for _, kind in self.detectors)}
        self._saved = time.time()

    def observe(self, step: Step) -> None:
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            seq = turn.seq
            if verdict is not None and tree.tokens and seq.params.learn:
                key = (tree.source or "drafter", self._kind(seq.params.kind or DEFAULT))
                tally = self._open.setdefault(seq.id, {}).setdefault(key, [0, 0])
                tally[0] += len(verdict.path)
                tally[1] += len(verdict.path) + (REJECTED in verdict.fates)
            if seq.done and seq.id in self._open:
                self._close(seq.id)
        while len(self._open) > _OPEN:
            self._close(next(iter(self._open)))

    def _kind(self, name: str) -> str:
        """The kind that this name counts for."""
        if name not in self._kinds and len(self._kinds) >= KINDS:
            return OTHER
        self._kinds.add(name)
        return name

    def _close(self, seq_id: int) -> None:
        for key, (accepted, reached) in self._open.pop(seq_id).items():
            block = self._block.setdefault(key, [0, 0])
            block[0], block[1] = block[0] + accepted, block[1] + reached
            if block[1] >= BLOCK:
                self._block[key], now = [0, 0], time.time()
                change = self.detectors.setdefault(key, ChangeDetector()).add(block[0] / block[1], now)
                if change is not None or now - self._saved > _SAVE_INTERVAL:
                    self.save()

    def save(self) -> None:
        """For `outrider doctor` and for the next run."""
        if self.path is not None and self.detectors:
            self._saved = time.time()
            states = {f"{drafter}|{kind}": asdict(detector) for (drafter, kind), detector in self.detectors.items()}
            write_quietly(self.path, json.dumps({"outrider_drift": 1, "watches": states}))

    def as_json(self) -> list[dict[str, Any]]:
        """For statistics and metrics."""
        return [
            {
                "drafter": drafter,
                "kind": kind,
                "blocks": detector.blocks,
                "alpha": detector.mean if detector.count else None,
                "changes": [asdict(change) for change in detector.changes],
                "stale": detector.stale is not None,
            }
            for (drafter, kind), detector in sorted(self.detectors.items())
        ]

    def sentences(self) -> list[str]:
        """One for each drafter and kind of text whose acceptance has fallen."""
        return [
            f"The drafter {drafter} has gone stale on '{kind}': its acceptance fell from {fall.before:.0%} to "
            f"{fall.after:.0%} ({detector.blocks - fall.block} blocks of requests ago). If it is a trained one, "
            f"let it learn (--learn), or train it on newer text (`outrider train`)."
            for (drafter, kind), detector in self.detectors.items()
            if (fall := detector.stale) is not None
        ]


def read(path: Path | None) -> dict[tuple[str, str], ChangeDetector]:
    """The state that an earlier run saved; empty if there is none or it is damaged."""
    try:
        states = json.loads(path.read_text(encoding="utf-8")).get("watches", {}) if path else {}
        detectors = {}
        for name, state in states.items():
            drafter, _, kind = name.partition("|")
            changes = [Change(**change) for change in state.pop("changes")]
            detectors[drafter, kind] = ChangeDetector(**state, changes=changes)
        return detectors
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}
