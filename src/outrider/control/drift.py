"""Has a drafter gone stale? A change-point test on acceptance, by drafter and kind of text.

The test is a self-starting CUSUM: each block of requests is compared with all blocks since the last change, in units of
their own spread, so that neither a level nor a threshold has to be known beforehand; small deviations that go on add up
until chance no longer explains them. Without a change it alarms about once in ten thousand blocks.

Promise: it keeps rates and counts, no text and no tokens; requests with `learn=False` are not counted. It listens to
steps; it changes nothing and knows neither models nor drafters.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..models.paths import cache_folder, write_quietly
from ..types import REJECTED, Listener, Step

BLOCK = 48  # nodes that a block has at least; it ends with a request, because one request's nodes are of a kind
WARM = 24  # blocks before anything is said
SLACK = 0.5  # standard deviations that are let pass
LIMIT = 8.0  # standard deviations, added up, that are not chance
_CLIP = 3.0  # of one block: a single strange request is no change
_TINY = 0.02  # the least spread that is believed
_CHANGES = 8  # that are remembered
_OPEN = 256  # requests whose end nobody has told us
_PAUSE = 60.0  # seconds between two notes on disk
DEFAULT = "text"  # the kind of requests that say none


@dataclass(frozen=True)
class Change:
    """Acceptance is no longer what it was."""

    block: int  # when it was noticed
    before: float
    after: float
    at: float  # seconds since 1970

    @property
    def fell(self) -> bool:
        return self.after < self.before


@dataclass
class Watch:
    """One drafter on one kind of text."""

    blocks: int = 0
    count: int = 0  # blocks since the last change
    mean: float = 0.0  # of them
    squares: float = 0.0  # summed squared deviations from it
    low: float = 0.0  # evidence of a fall
    high: float = 0.0  # and of a rise
    since_low: list[float] = field(default_factory=list)  # blocks since the evidence began to grow
    since_high: list[float] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @property
    def stale(self) -> Change | None:
        """The last fall, unless acceptance has risen to nearly what it was since then."""
        falls = [change for change in self.changes if change.fell]
        if not falls or (self.count and self.mean >= 0.5 * (falls[-1].before + falls[-1].after)):
            return None
        return falls[-1]

    def add(self, value: float, now: float = 0.0) -> Change | None:
        """One more block's acceptance; a change, if that makes one certain."""
        self.blocks += 1
        if self.count >= WARM:
            spread = max(math.sqrt(self.squares / (self.count - 1)), _TINY)
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
        apart = value - self.mean
        self.mean += apart / self.count
        self.squares += apart * (value - self.mean)


class Monitor(Listener):
    """A listener that keeps a watch for each drafter and kind, and a note of them on disk if it has a name."""

    reads_logits = False

    def __init__(self, *names: str) -> None:
        place = re.sub(r"[^\w.-]+", "_", "-".join(names))
        self.path = cache_folder() / "drift" / f"{place}.json" if names else None
        self.watches: dict[tuple[str, str], Watch] = read(self.path)
        self._open: dict[int, dict[tuple[str, str], list[int]]] = {}  # request -> accepted and reached nodes
        self._block: dict[tuple[str, str], list[int]] = {}
        self._kept = time.time()

    def observe(self, step: Step) -> None:
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            seq = turn.seq
            if verdict is not None and tree.tokens and seq.params.learn:
                tally = self._open.setdefault(seq.id, {}).setdefault(
                    (tree.source or "drafter", seq.params.kind or DEFAULT), [0, 0]
                )
                tally[0] += len(verdict.path)
                tally[1] += len(verdict.path) + (REJECTED in verdict.fates)
            if seq.done and seq.id in self._open:
                self._close(seq.id)
        while len(self._open) > _OPEN:
            self._close(next(iter(self._open)))

    def _close(self, name: int) -> None:
        for key, (accepted, reached) in self._open.pop(name).items():
            block = self._block.setdefault(key, [0, 0])
            block[0], block[1] = block[0] + accepted, block[1] + reached
            if block[1] >= BLOCK:
                self._block[key], now = [0, 0], time.time()
                change = self.watches.setdefault(key, Watch()).add(block[0] / block[1], now)
                if change is not None or now - self._kept > _PAUSE:
                    self.keep()

    def keep(self) -> None:
        """Write what is known, for `outrider doctor` and for the next run."""
        if self.path is not None and self.watches:
            self._kept = time.time()
            facts = {f"{drafter}|{kind}": asdict(watch) for (drafter, kind), watch in self.watches.items()}
            write_quietly(self.path, json.dumps({"outrider_drift": 1, "watches": facts}))

    def as_json(self) -> list[dict[str, Any]]:
        """For statistics and metrics: acceptance now, and whether it has fallen."""
        return [
            {
                "drafter": drafter,
                "kind": kind,
                "blocks": watch.blocks,
                "alpha": watch.mean if watch.count else None,
                "changes": [asdict(change) for change in watch.changes],
                "stale": watch.stale is not None,
            }
            for (drafter, kind), watch in sorted(self.watches.items())
        ]

    def sentences(self) -> list[str]:
        return [*sentences(self.watches.items())]


def sentences(watches: Iterable[tuple[tuple[str, str], Watch]]) -> Iterable[str]:
    """What has gone stale, in words."""
    for (drafter, kind), watch in watches:
        if (fall := watch.stale) is not None:
            yield (
                f"The drafter {drafter} has gone stale on '{kind}': its acceptance fell from {fall.before:.0%} to "
                f"{fall.after:.0%} ({watch.blocks - fall.block} blocks of requests ago). If it is a trained one, "
                f"let it learn (--learn), or train it on newer text (`outrider train`)."
            )


def read(path: Path | None) -> dict[tuple[str, str], Watch]:
    """What an earlier run has noted; nothing, if there is nothing or it is damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path else {}
        watches = {}
        for name, facts in known.get("watches", {}).items():
            drafter, _, kind = name.partition("|")
            changes = [Change(**change) for change in facts.pop("changes")]
            watches[drafter, kind] = Watch(**facts, changes=changes)
        return watches
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}
