"""The best way to speculate for somebody's own prompts: a race of setups within a time budget.

Drafters, K, tree shapes and a searched layer-skip set start together. After each round over the prompts the slower half
drops out; the last few run until the rounds or the minutes are used up. It may be interrupted at any moment: what was
measured until then decides. It knows setups and prompts; writing the profile and the table is the command line's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..control.adaptive import Costs
from ..drafters import lookup
from ..drafters.layerskip.search import NOTE, SHORTLISTS, Found, Price, Search, Skip, Text
from ..errors import ConfigError, OutriderError
from ..llm import LLM
from ..models.tuning_profile import note
from .bench import Bench, Plan, Progress, Question, fresh, pass_costs, setup, warm_up
from .speeds import ALL, Row, Setup, row

KS: tuple[int | str, ...] = ("auto", 2, 4, 8)
SHAPES = ((2, 4), (3, 4), (3, 6))  # width and depth of a tree
FINALISTS = 3
SEARCH_SHARE = 0.3  # of the minutes, for the layer-skip search
SKIPPER = "layerskip"
BUSH = 3  # guesses of one reduced pass that are verified together


@dataclass(frozen=True)
class Outcome:
    """What the race found; `best` is None when nothing is clearly faster than plain decoding."""

    best: Row | None
    rows: list[Row]  # best first
    by_category: list[Row]  # the best one's
    search: Found | None
    tried: int  # layer-skip sets
    interrupted: bool
    seconds: float


def candidates(llm: LLM, drafters: list[str]) -> list[Setup]:
    """Every drafter with several K, and as a tree where it can grow one; the layer-skip sets come later."""
    setups = []
    for name in drafters:
        cls, own = lookup(name), setup(llm, name, "auto").options
        setups += [Setup(name, k, own) for k in KS]
        takes = cls.traits.options or ()
        if "tree_width" in takes:
            shapes = [{"tree": True, "tree_width": width, "tree_depth": depth} for width, depth in SHAPES]
        else:
            shapes = [{"tree": True}] if "tree" in takes else []
        setups += [Setup(name, "auto", own | shape) for shape in shapes]
    return setups


class Tuner:
    """Runs the race. `clock` gives seconds."""

    def __init__(
        self,
        llm: LLM,
        questions: list[Question],
        plan: Plan,
        budget: float,  # seconds
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.llm, self.plan, self.budget, self.clock = llm, plan, budget, clock
        self.begin = clock()
        self.bench = Bench(llm, questions, plan)
        self.search: Search | None = None
        self.interrupted = False

    def run(self, setups: list[Setup], progress: Progress, start: Skip | None = None) -> Outcome:
        """Race these; where a layer-skipping drafter is among them, its set is searched first."""
        try:
            warm_up(self.bench)
            setups = self._buildable(setups)
            if any(each.drafter == SKIPPER for each in setups):
                setups = setups + self._searched(progress, start)
            self._race(setups, progress)
        except KeyboardInterrupt:
            self.interrupted = True
        return self._outcome()

    # ------------------------------------------------------------ the race

    def _race(self, setups: list[Setup], progress: Progress) -> None:
        for number in range(max(self.plan.rounds, 1) + _halvings(len(setups))):
            for question in range(len(self.bench.questions)):
                what = f"round {number + 1}: {len(setups)} setups"
                self.bench.round(setups, number, lambda _, __, w=what: progress(w, self._used), [question])  # type: ignore[misc]
                if self.over:
                    return
            setups = self._faster_half(setups)

    def _faster_half(self, setups: list[Setup]) -> list[Setup]:
        if len(setups) <= FINALISTS:
            return setups
        speeds = {each.label: self._row(each.label).speedup or 0.0 for each in setups}
        order = sorted(setups, key=lambda each: -speeds[each.label])
        return order[: max(FINALISTS, (len(setups) + 1) // 2)]

    def _buildable(self, setups: list[Setup]) -> list[Setup]:
        """Without those whose drafter lacks something (a draft model, say), unless nothing is left."""
        able, trouble = [], ""
        for each in setups:
            try:
                fresh(self.llm, each)
                able.append(each)
            except OutriderError as error:
                trouble = str(error)
        if not able:
            raise ConfigError(f"None of these drafters can run here: {trouble or 'none was named.'}")
        return able

    # ------------------------------------------------------------ the layer-skip set

    def _searched(self, progress: Progress, start: Skip | None) -> list[Setup]:
        """The best set that the share of the time finds, as setups; the model's own text is what it is scored on."""
        self.search = skip_search(self.llm, self._answers(progress), start, self.plan.seed)
        if self.search is None:
            return []
        end = self.clock() + SEARCH_SHARE * max(self.budget - (self.clock() - self.begin), 0.0)
        found = self.search.run(lambda: self.clock() >= end, lambda search: self._say(search, progress))
        options = found.skip.options
        guesses = {"tree": True, "tree_width": BUSH, "tree_depth": 1}  # a pass is dear: all that it says may be right
        return [
            Setup(SKIPPER, "auto", options),
            Setup(SKIPPER, found.k, options),
            Setup(SKIPPER, BUSH, options | guesses),
        ]

    def _answers(self, progress: Progress) -> list[tuple[list[int], list[int]]]:
        plain, found = Setup("off", 0), []
        for i, question in enumerate(self.bench.questions):
            found.append((question.ids, self.bench.answer(i, plain).ids))
            progress("plain answers, for the layer-skip search", self._used)
            if self._used > SEARCH_SHARE:
                break
        return found

    def _say(self, search: Search, progress: Progress) -> None:
        best = search.best
        if best is not None:
            size = len(best.skip.blocks)
            progress(f"{len(search.known)} skip sets, best skips {size}: {best.speedup:.2f} × expected", self._used)

    # ------------------------------------------------------------ the end

    @property
    def _used(self) -> float:
        return min((self.clock() - self.begin) / self.budget, 1.0) if self.budget else 1.0

    @property
    def over(self) -> bool:
        return self.clock() - self.begin >= self.budget

    def _row(self, label: str) -> Row:
        return row(self.bench.setups[label], ALL, self.bench.pairs[label], self.plan.seed)

    def _outcome(self) -> Outcome:
        """Only those that ran as long as anybody can win: a lucky first prompt is no victory."""
        rows = [self._row(label) for label in self.bench.pairs]
        longest = max((r.prompts * r.rounds for r in rows), default=0)
        rows.sort(key=lambda r: (-(r.prompts * r.rounds == longest), -(r.speedup or 0.0)))
        best = rows[0] if rows and clearly_faster(rows[0]) else None
        kinds: list[Row] = []
        if best is not None:
            label = Setup(best.drafter, best.k, best.options).label
            kinds = [r for r in self.bench.rows() if Setup(r.drafter, r.k, r.options).label == label]
        search = self.search.best if self.search else None
        tried = len(self.search.known) if self.search else 0
        return Outcome(best, rows, kinds, search, tried, self.interrupted, self.clock() - self.begin)


def laid_out(llm: LLM, answers: list[tuple[list[int], list[int]]]) -> Text:
    """What the target said, where it lives: sets can be scored on it."""
    if llm.target.device.type != "cuda":
        return Text(llm.target, answers)
    from ..backends.cuda.uncaptured import UncapturedPasses  # needs triton, which is not installed everywhere

    return Text(llm.target, answers, device=UncapturedPasses)


def skip_search(
    llm: LLM, answers: list[tuple[list[int], list[int]]], start: Skip | None = None, seed: int = 0
) -> Search | None:
    """A search for the best set on what the target said; None where there is nothing to leave out, or nothing said."""
    text, layers = laid_out(llm, answers), llm.target.config.layers
    if not text.positions or layers < 2:
        return None
    costs = Costs(pass_costs(llm), padded=text.device is not None)  # now, as the price of a draft: their ratio counts
    # A recorded draft's passes are timed as they are drafted; on a CPU a pass is a pass.
    vocabulary = llm.target.config.vocab_size if text.device is None else 0
    price = Price(text.seconds, layers, vocabulary, None if text.device is not None else costs(1))
    shortlists = [n for n in SHORTLISTS if n < vocabulary]
    return Search(layers, text.agreement, price, costs, start, seed, text.seeds(), shortlists)


def clearly_faster(row: Row) -> bool:
    """Not by luck: something was accepted, and the interval (or a margin, where there is none) lies above plain."""
    if not row.accepted or row.speedup is None:
        return False
    return row.speedup > 1.03 if row.ci_low is None else row.ci_low > 1.0


def _halvings(setups: int) -> int:
    """Rounds until only the finalists are left."""
    count = 0
    while setups > FINALISTS:
        setups, count = max(FINALISTS, (setups + 1) // 2), count + 1
    return count


def profile_of(outcome: Outcome) -> dict[str, Any]:
    """What the profile file says beyond model and machine; plain decoding where nothing was faster."""
    best, found = outcome.best, outcome.search
    chosen: dict[str, Any] = {"drafter": "off", "k": 0, "options": {}, "measured": {"speedup": 1.0}}
    if best is not None:
        chosen = {"drafter": best.drafter, "k": best.k, "options": best.options}
        chosen["measured"] = {name: getattr(best, name) for name in _MEASURED}
        chosen["by_category"] = {r.category: r.speedup for r in outcome.by_category}
    if found is not None:
        sets = {"tried": outcome.tried, "agreement": found.agreement, "expected_speedup": found.speedup}
        chosen["skip_search"] = sets | {"k": found.k} | found.skip.options
    return chosen


def keep_skip(llm: LLM, outcome: Outcome) -> Path | None:
    """Note the searched set under the target's hash, where the drafter finds it; returns where, if there is one."""
    identity = llm.target.identity()
    if outcome.search is None or identity is None:
        return None
    facts: dict[str, Any] = dict(outcome.search.skip.options)
    facts |= {"k": outcome.search.k, "agreement": outcome.search.agreement, "tried": outcome.tried}
    return note(NOTE, identity, facts | {"expected_speedup": outcome.search.speedup, "model": llm.name})


_MEASURED = (
    "speedup",
    "ci_low",
    "ci_high",
    "speedup_total",
    "tok_s",
    "plain_tok_s",
    "tau",
    "alpha",
    "tokens",
    "rounds",
)


def skip_from(profile: dict[str, Any]) -> Skip | None:
    """The set an earlier search ended with, to go on from."""
    sets = profile.get("skip_search")
    if not isinstance(sets, dict):
        return None
    try:
        attention, mlp = (frozenset(int(i) for i in sets[name]) for name in ("skip_attention", "skip_mlp"))
        return Skip(attention, mlp, sets.get("draft_vocab"))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("The profile's skip_search is damaged; tune again without --resume.") from error
