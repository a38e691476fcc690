"""What drafting ahead would bring, from measured times and hit rates: a *projection*, not a measurement.

    python bench/ahead_sim.py --verify 4 --draft 0.7 --first 0.9 --deeper 0.8 --alpha 0.8 --hit-end 0.9 --hit-inside 0.5
    python bench/ahead_sim.py --from bench/results/ahead.json      # what bench/ahead.py measured

Times are milliseconds: `verify` of the target's pass alone, `slow` how many times longer it takes while somebody drafts
beside it (one device; with two it is 1), `draft` of one depth of a draft just in time, `first` until a round's forks
are known, `deeper` of one more depth of all of them. A step is: verify; then either what was prepared (waiting for what
is not ready), or, on a miss, K depths just in time; that the pass of a stale round must end first is not counted.
tests/test_ahead_sim.py holds it against the real engine in invented time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Seconds, chances and lengths."""

    verify: float
    draft: float
    first: float
    deeper: float
    alpha: float  # that a drafted token is accepted
    hit_end: float  # that the token after a whole draft was prepared for
    hit_inside: float  # that the token at a rejection was
    k: int = 5  # tokens drafted just in time
    depth: int = 5  # tokens prepared for every outcome
    slow: float = 1.0


def plain(s: Setting) -> float:
    """Tokens per second without any draft."""
    return 1 / s.verify


def ordinary(s: Setting) -> float:
    """Tokens per second of drafting K tokens, then verifying them: Σ αⁱ tokens a step."""
    return sum(s.alpha**i for i in range(s.k + 1)) / (s.verify + s.k * s.draft)


def ahead(s: Setting, steps: int = 20_000, seed: int = 1) -> dict[str, float]:
    """Tokens per second with the next round drafted while this one is verified; hit rate; share of hidden drafting."""
    dice, seconds, tokens, hits, exposed, busy = random.Random(seed), 0.0, 0, 0, 0.0, 0.0
    length, passes = s.k, s.slow * s.verify
    for _ in range(steps):
        accepted = 0
        while accepted < length and dice.random() < s.alpha:
            accepted += 1
        tokens += accepted + 1
        seconds += passes
        wait = max(s.first - passes, 0.0)  # until it is known which outcomes were prepared for
        if dice.random() < (s.hit_end if accepted == length else s.hit_inside):
            wait = max(s.first + s.depth * s.deeper - passes, 0.0)
            length, hits, busy = s.depth, hits + 1, busy + s.first + s.depth * s.deeper
        else:
            seconds += s.k * s.draft
            length, busy = s.k, busy + s.first
        seconds += wait
        exposed += wait
    return {"tok_s": tokens / seconds, "hit_rate": hits / steps, "hidden": 1 - exposed / busy, "tau": tokens / steps}


def table(one: Setting) -> list[dict[str, Any]]:
    """Plain, ordinary and ahead; ahead on one device (as slow as measured) and on two (nobody slows anybody)."""
    rows: list[dict[str, Any]] = [
        {"what": "plain", "tok_s": plain(one)},
        {"what": "ordinary speculation", "tok_s": ordinary(one)},
    ]
    for what, setting in (("ahead, one device", one), ("ahead, two devices", replace(one, slow=1.0))):
        every = [{"depth": depth, **ahead(replace(setting, depth=depth))} for depth in range(1, setting.k + 1)]
        rows.append({"what": f"{what} (projection)", **max(every, key=lambda row: row["tok_s"])})
    return rows


def measured(path: Path) -> Setting:
    """The setting that bench/ahead.py wrote: the last line of its output."""
    facts = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    return Setting(**facts["setting"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path)
    for name in ("verify", "draft", "first", "deeper"):
        parser.add_argument(f"--{name}", type=float, help="milliseconds")
    for name in ("alpha", "hit-end", "hit-inside"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--slow", type=float, default=1.0)
    given = parser.parse_args()
    if given.source:
        setting = measured(given.source)
    else:
        times = [getattr(given, name) for name in ("verify", "draft", "first", "deeper")]
        rates = [given.alpha, given.hit_end, given.hit_inside]
        if None in times or None in rates:
            sys.exit("Give --from FILE, or all of --verify --draft --first --deeper --alpha --hit-end --hit-inside.")
        setting = Setting(*(t * 1e-3 for t in times), *rates, k=given.k, depth=given.k, slow=given.slow)
    rows = table(setting)
    for row in rows:
        more = f"  hit rate {row['hit_rate']:.0%}, depth {row['depth']}" if "hit_rate" in row else ""
        print(f"{row['what']:34} {row['tok_s']:8.1f} tokens/s  {row['tok_s'] / rows[0]['tok_s']:.2f} x plain{more}")
    print(json.dumps({"bench": "ahead_sim", "projection": True, "setting": asdict(setting), "rows": rows}))


if __name__ == "__main__":
    main()
