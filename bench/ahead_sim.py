"""The speed of drafting ahead from measured times and hit rates: a *projection*, not a measurement.

    python bench/ahead_sim.py --verify 4 --draft 0.7 --first 0.9 --deeper 0.8 --alpha 0.8 --hit-end 0.9 --hit-inside 0.5
    python bench/ahead_sim.py --from bench/results/2026-11-15-ahead-validated-int8.json   # a result of bench/ahead.py

Times are milliseconds: `verify` of the target's pass alone; `slow` the factor by which it is slower while a drafter
shares its device (1 with two devices); `draft` of one depth of a draft just in time; `first` until a round's forks are
known; `deeper` of one more depth of all forks. A step verifies; then it takes what was prepared (and waits for what is
not ready), or on a miss drafts K depths just in time. A race gives more (`Setting`): host time, the drafter's speed
while the target is idle, the time of a miss, α by depth. Plain decoding, ordinary speculation and ahead on one device
are then compared with the same race's measurements: `validated` means that all three are within 10 %. The figures for
two devices are projections only. tests/drafters/ahead/test_ahead_sim.py compares the simulator with the real engine in
simulated time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

NEAR = 0.10  # relative error of a projection that counts as validated


@dataclass(frozen=True)
class Setting:
    """Seconds, probabilities and lengths; a None is derived from the rest."""

    verify: float
    draft: float
    first: float
    deeper: float
    alpha: float | tuple[float, ...]  # probability that a drafted token is accepted, by depth where that is known
    hit_end: float  # probability that the token after a whole draft was prepared
    hit_inside: float  # probability that the token at a rejection was
    k: int = 5  # tokens drafted just in time
    depth: int = 5  # tokens prepared for every outcome
    slow: float = 1.0
    # From a race only.
    tokens: int = 0  # length of an answer, whose last drafts are shorter; 0: endless
    plain_verify: float | None = None  # a pass over one row
    plain_host: float = 0.0  # of a step, without draft, pass and waiting
    host: float = 0.0  # the same where a draft is made just in time
    ahead_host: float = 0.0  # the same where it is made ahead
    ahead_alpha: tuple[float, ...] | None = None
    window: float | None = None  # from a pass's launch to its verdict, while the drafter runs too
    beside: float | None = None  # of that, the pass
    wake: float = 0.0  # until the drafter starts
    first_idle: float | None = None  # the same as `first` and `deeper`, while the target is idle
    deeper_idle: float | None = None
    jit: float | None = None  # a draft just in time by the ahead drafter, including what it had to finish first
    depths: tuple[tuple[int, int], ...] = ()  # how often each depth was prepared
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)  # single times, by the name of their mean

    @property
    def passes(self) -> float:
        """From launch to verdict while the drafter runs."""
        return self.slow * self.verify if self.window is None else self.window

    def chance(self, depth: int, ahead: bool = False) -> float:
        alpha = self.alpha if not ahead or self.ahead_alpha is None else self.ahead_alpha
        if isinstance(alpha, int | float):
            return float(alpha)
        return alpha[min(depth, len(alpha) - 1)] if alpha else 0.0

    def apart(self, fast: bool = False) -> Setting:
        """The drafter on its own device, without mutual slowdown. `fast`: a device as fast as the one that makes
        ordinary drafts."""
        launching = 0.0 if self.window is None or self.beside is None else max(self.window - self.beside, 0.0)
        alone = self.deeper if self.deeper_idle is None else min(self.deeper_idle, self.deeper)
        first = self.first if self.first_idle is None else min(self.wake + self.first_idle, self.first)
        if fast:
            first, alone = self.wake + self.draft, self.draft
        return replace(
            self, slow=1.0, window=self.verify + launching, first=first, first_idle=None, deeper=alone,
            deeper_idle=None, jit=self.wake + self.k * self.draft, depths=(), samples={},
        )  # fmt: skip


def plain(s: Setting) -> float:
    """Tokens per second without any draft."""
    return 1 / ((s.verify if s.plain_verify is None else s.plain_verify) + s.plain_host)


class Text:
    """Simulated answers in sequence: how much of a draft is accepted, and how much may be drafted."""

    def __init__(self, s: Setting, seed: int, ahead: bool) -> None:
        self.s, self.dice, self.ahead = s, random.Random(seed), ahead
        self.emitted = self.steps = 0
        self.left = s.tokens - 1  # the prompt's pass gives the first token

    @property
    def room(self) -> int:
        return min(self.s.k, self.left - 1) if self.s.tokens else self.s.k

    def step(self, length: int) -> int:
        """Verify a draft of this length; returns how many tokens are accepted."""
        accepted = 0
        while accepted < length and self.dice.random() < self.s.chance(accepted, self.ahead):
            accepted += 1
        self.emitted, self.steps, self.left = self.emitted + accepted + 1, self.steps + 1, self.left - accepted - 1
        return accepted

    def ended(self) -> bool:
        """Whether the answer is complete; if so, the next one starts."""
        over = bool(self.s.tokens) and self.left <= 0
        if over:
            self.left = self.s.tokens - 1
        return over


def ordinary(s: Setting, steps: int = 20_000, seed: int = 1) -> float:
    """Tokens per second of drafting K tokens, then verifying them."""
    text, seconds, over = Text(s, seed, False), 0.0, False
    while text.steps < steps or (s.tokens and not over):
        seconds += text.room * s.draft + s.verify + s.host
        text.step(text.room)
        over = text.ended()
    return text.emitted / seconds


def done(s: Setting, depth: int) -> float:
    """Seconds from the launch of the target's pass until this many depths are ready."""
    return moments(s, depth, s.passes, lambda name: getattr(s, name))[-1]


def moments(s: Setting, depth: int, window: float, take: Callable[[str], float | None]) -> list[float]:
    """When the forks are known and each depth is ready. Work that starts before the verdict runs beside the target."""
    at, found = 0.0, list[float]()
    for name in ("first", *["deeper"] * depth):
        alone = take(f"{name}_idle") if at >= window else None
        at += (take(name) or 0.0) if alone is None else alone
        found.append(at)
    return found


def ahead(s: Setting, steps: int = 12_000, seed: int = 1) -> dict[str, float]:
    """Tokens per second with the next round drafted during verification; hit rate; share of drafting that is hidden."""
    text, seconds, hits, exposed, busy = Text(s, seed, True), 0.0, list[bool](), 0.0, 0.0
    pick = text.dice
    every, weights = ([d for d, _ in s.depths], [n for _, n in s.depths]) if s.depths else ([s.depth], [1])
    length, first = s.k, True

    def take(name: str) -> float | None:
        """A random measured value: where the later of two events counts, means are too optimistic."""
        some = s.samples.get(name)
        usual: float | None = getattr(s, name)
        return pick.choice(some) if some else usual

    def miss() -> float:
        return take("jit") or s.k * s.draft

    while text.steps < steps or (s.tokens and not first):
        if first and s.tokens:  # prepared while the prompt was read
            hits.append(hit := pick.random() < s.hit_end)
            length = min(pick.choices(every, weights)[0] if hit else s.k, text.room)
            seconds += 0.0 if hit else miss()
        accepted = text.step(length)
        depth, window = pick.choices(every, weights)[0], take("window") or s.passes
        seconds += window + s.ahead_host
        first = text.ended()
        if first:
            continue
        hits.append(hit := pick.random() < (s.hit_end if accepted == length else s.hit_inside))
        work = moments(s, depth if hit else 0, window, take)[-1]
        wait = max(work - window - s.ahead_host, 0.0)
        length = min(depth if hit else s.k, text.room)
        seconds += wait + (0.0 if hit else miss())
        exposed, busy = exposed + wait, busy + work
    hidden, tau = 1 - exposed / busy if busy else 0.0, text.emitted / text.steps
    return {"tok_s": text.emitted / seconds, "hit_rate": sum(hits) / len(hits), "hidden": hidden, "tau": tau}


def table(one: Setting) -> list[dict[str, Any]]:
    """Plain, ordinary and ahead; ahead on one device (with the measured slowdown) and on two (without)."""
    rows: list[dict[str, Any]] = [
        {"what": "plain", "tok_s": plain(one)},
        {"what": "ordinary speculation", "tok_s": ordinary(one)},
    ]
    measured = [] if not one.depths else [one]  # the depth of the race, or else the best depth
    two = [("two devices", one.apart(), [])]
    if one.window is not None:
        two.append(("two devices, fast passes", one.apart(fast=True), []))
    for what, setting, given in (("one device", one, measured), *two):
        settings = given or [replace(setting, depth=depth, depths=()) for depth in range(1, setting.k + 1)]
        every = [{"depth": each.depth, **ahead(each)} for each in settings]
        rows.append({"what": f"ahead, {what} (projection)", **max(every, key=lambda row: row["tok_s"])})
    return rows


def held(setting: Setting, race: dict[str, Any] | None) -> dict[str, Any]:
    """The projections, beside the race's measurements where there are any."""
    rows, validated = table(setting), None
    if race is not None and all("decode_tok_s" in row for row in race["rows"].values()):
        for row, name in zip(rows, ("plain", "ordinary", "ahead"), strict=False):
            row["measured"] = race["rows"][name]["decode_tok_s"]
            row["error"] = row["tok_s"] / row["measured"] - 1
        validated = all(abs(row["error"]) <= NEAR for row in rows if "error" in row)
    where = None if race is None else race["temperature"]
    return {"temperature": where, "validated": validated, "setting": asdict(setting), "rows": rows}


def show(found: dict[str, Any]) -> None:
    if found["temperature"] is not None:
        print(f"\nprojections, temperature {found['temperature']:g}, tokens/s of decoding")
    for row in found["rows"]:
        more = f"  hit rate {row['hit_rate']:.0%}, depth {row['depth']}" if "hit_rate" in row else ""
        if "measured" in row:
            more = f"  measured {row['measured']:8.1f} ({row['error']:+.1%}){more}"
        plain_speed = found["rows"][0]["tok_s"]
        print(f"{row['what']:46} {row['tok_s']:8.1f} tokens/s  {row['tok_s'] / plain_speed:.2f} x plain{more}")
    verdicts = {True: f"within {NEAR:.0%} of the measurement", False: f"NOT within {NEAR:.0%} of the measurement"}
    print(f"validated: {verdicts.get(found['validated'], 'there is no measurement to compare with')}")


def setting_of(data: dict[str, Any]) -> Setting:
    """The setting from a result of bench/ahead.py; older files have fewer fields."""
    known = {each.name for each in fields(Setting)}
    if unknown := sorted(set(data) - known):
        sys.exit(f"The setting has {', '.join(unknown)}, which this simulator does not know: measure it again.")
    lists = {name: tuple(map(tuple, value)) if name == "depths" else tuple(value) for name, value in data.items()
             if isinstance(value, list)}  # fmt: skip
    return Setting(**data | lists)


def measured(path: Path) -> list[tuple[Setting, dict[str, Any] | None]]:
    """The races in a result of bench/ahead.py: the last line of its output."""
    facts = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    races = [race for race in facts.get("race", ()) if "setting" in race]
    if races:
        return [(setting_of(race["setting"]), race) for race in races]
    print("This file is too old: its races lack the times of a step that validation needs.")
    return [(setting_of(facts["setting"]), None)]


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
        settings = measured(given.source)
    else:
        times = [getattr(given, name) for name in ("verify", "draft", "first", "deeper")]
        rates = [given.alpha, given.hit_end, given.hit_inside]
        if None in times or None in rates:
            sys.exit("Give --from FILE, or all of --verify --draft --first --deeper --alpha --hit-end --hit-inside.")
        made = Setting(*(t * 1e-3 for t in times), *rates, k=given.k, depth=given.k, slow=given.slow)
        settings = [(made, None)]
    found = [held(setting, race) for setting, race in settings]
    for each in found:
        show(each)
    print(json.dumps({"bench": "ahead_sim", "projection": True, "races": found}))


if __name__ == "__main__":
    main()
