"""The fastest setup for the user's own prompts: a race within a time budget.

Drafters, K, tree shapes and a searched layer-skip set start together. After each round over the prompts the slower half
drops out; the last few run until the rounds or the budget are used up. An interrupt at any moment keeps what has been
measured. It knows setups and prompts; the command line writes the tuning profile and the table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..control.costs import PassCosts
from ..drafters import lookup
from ..drafters.layerskip.search import NOTE, SHORTLISTS, DraftCost, ScoredSkip, ScoredText, Search, Skip
from ..errors import ConfigError, OutriderError
from ..llm import LLM
from ..models.tuning_profile import note
from .bench import PLAIN, Bench, BenchPlan, Clock, EncodedPrompt, Progress, fresh, make_setup, pass_costs, warm_up
from .statistics import ALL, BenchRow, Setup, bench_row

KS: tuple[int | str, ...] = ("auto", 2, 4, 8)
TREES = ((2, 4), (3, 4), (3, 6))  # width and depth
FINALISTS = 3
SEARCH_SHARE = 0.3  # of the budget, for the layer-skip search
LAYERSKIP = "layerskip"
GUESSES = 3  # of one reduced pass, verified together
_KEYS = ("speedup", "ci_low", "ci_high", "speedup_total", "tok_s", "plain_tok_s", "tau", "alpha", "tokens", "rounds")

Answers = list[tuple[list[int], list[int]]]  # the ids of a prompt and of the target's answer


@dataclass(frozen=True)
class TuneResult:
    """The outcome of the race; `best` is None when nothing is clearly faster than plain decoding."""

    best: BenchRow | None
    rows: list[BenchRow]  # best first
    by_category: list[BenchRow]  # of the best
    search: ScoredSkip | None
    tried: int  # layer-skip sets
    interrupted: bool
    seconds: float


def candidates(llm: LLM, drafters: list[str]) -> list[Setup]:
    """Every drafter with several K, and as a tree where it can draft one; the layer-skip sets come later."""
    setups = []
    for name in drafters:
        options, takes = make_setup(llm, name, "auto").options, lookup(name).traits.options or ()
        trees: list[dict[str, Any]] = [{"tree": True}] if "tree" in takes else []
        if "tree_width" in takes:
            trees = [{"tree": True, "tree_width": width, "tree_depth": depth} for width, depth in TREES]
        setups += [Setup(name, k, options) for k in KS]
        setups += [Setup(name, "auto", options | tree) for tree in trees]
    return setups


class Tuner:
    """Runs the race. `budget` is in seconds."""

    def __init__(
        self, llm: LLM, prompts: list[EncodedPrompt], plan: BenchPlan, budget: float, clock: Clock = time.monotonic
    ) -> None:
        self.llm, self.plan, self.budget, self.clock = llm, plan, budget, clock
        self.started = clock()
        self.bench = Bench(llm, prompts, plan)
        self.search: Search | None = None
        self.interrupted = False

    def run(self, setups: list[Setup], progress: Progress, start: Skip | None = None) -> TuneResult:
        """Race these setups; a layer-skip set is searched first, from `start` on, where that drafter takes part."""
        try:
            warm_up(self.bench)
            setups = self._buildable(setups)
            if any(setup.drafter == LAYERSKIP for setup in setups):
                setups = setups + self._searched(progress, start)
            self._race(setups, progress)
        except KeyboardInterrupt:
            self.interrupted = True
        return self._result()

    def _buildable(self, setups: list[Setup]) -> list[Setup]:
        """The setups whose drafter can be made; a draft model may be missing, for instance."""
        buildable, reason = [], "none was named."
        for setup in setups:
            try:
                fresh(self.llm, setup)
                buildable.append(setup)
            except OutriderError as error:
                reason = str(error)
        if not buildable:
            raise ConfigError(f"None of these drafters can run here: {reason}")
        return buildable

    def _race(self, setups: list[Setup], progress: Progress) -> None:
        for number in range(max(self.plan.rounds, 1) + _halvings(len(setups))):
            for prompt in range(len(self.bench.prompts)):
                what = f"round {number + 1}: {len(setups)} setups"
                self.bench.round(setups, number, lambda _, __, w=what: progress(w, self._used), [prompt])  # type: ignore[misc]
                if self.clock() - self.started >= self.budget:
                    return
            setups = self._faster_half(setups)

    def _faster_half(self, setups: list[Setup]) -> list[Setup]:
        if len(setups) <= FINALISTS:
            return setups
        speeds = {setup.label: self._row(setup.label).speedup or 0.0 for setup in setups}
        return sorted(setups, key=lambda setup: -speeds[setup.label])[: _half(len(setups))]

    def _row(self, label: str) -> BenchRow:
        return bench_row(self.bench.setups[label], ALL, self.bench.pairs[label], self.plan.seed)

    @property
    def _used(self) -> float:
        """The share of the budget."""
        return min((self.clock() - self.started) / self.budget, 1.0) if self.budget else 1.0

    def _result(self) -> TuneResult:
        """Only setups with the most runs can win: one fast prompt is not enough."""
        rows = [self._row(label) for label in self.bench.pairs]
        most = max((r.prompts * r.rounds for r in rows), default=0)
        rows.sort(key=lambda r: (r.prompts * r.rounds < most, -(r.speedup or 0.0)))
        best = rows[0] if rows and clearly_faster(rows[0]) else None
        kinds = [] if best is None else [r for r in self.bench.rows() if _label(r) == _label(best)]
        search = self.search.best if self.search else None
        tried = len(self.search.agreements) if self.search else 0
        return TuneResult(best, rows, kinds, search, tried, self.interrupted, self.clock() - self.started)

    def _searched(self, progress: Progress, start: Skip | None) -> list[Setup]:
        """Setups with the best set found within its share of the budget, scored on the target's own text."""
        self.search = skip_search(self.llm, self._answers(progress), start, self.plan.seed)
        if self.search is None:
            return []
        end = self.clock() + SEARCH_SHARE * max(self.budget - (self.clock() - self.started), 0.0)
        found = self.search.run(lambda: self.clock() >= end, lambda search: self._report(search, progress))
        bush = {"tree": True, "tree_width": GUESSES, "tree_depth": 1}  # a pass is expensive: verify its best guesses
        variants: list[tuple[int | str, dict[str, Any]]] = [("auto", {}), (found.k, {}), (GUESSES, bush)]
        return [Setup(LAYERSKIP, k, found.skip.options | tree) for k, tree in variants]

    def _answers(self, progress: Progress) -> Answers:
        answers = []
        for i, prompt in enumerate(self.bench.prompts):
            answers.append((prompt.ids, self.bench.run(i, PLAIN).ids))
            progress("plain answers, for the layer-skip search", self._used)
            if self._used > SEARCH_SHARE:
                break
        return answers

    def _report(self, search: Search, progress: Progress) -> None:
        if best := search.best:
            found = f"best skips {len(best.skip.blocks)}: {best.speedup:.2f} × expected"
            progress(f"{len(search.agreements)} skip sets, {found}", self._used)


def scored_text(llm: LLM, answers: Answers) -> ScoredText:
    """The target's answers in a cache on its device: layer-skip sets are scored on them."""
    if llm.target.device.type != "cuda":
        return ScoredText(llm.target, answers)
    from ..backends.cuda.graphs import UncapturedPasses  # needs triton, which is not installed everywhere

    return ScoredText(llm.target, answers, device=UncapturedPasses)


def skip_search(llm: LLM, answers: Answers, start: Skip | None = None, seed: int = 0) -> Search | None:
    """A search for the best layer-skip set; None where there are no layers to skip or no text to score on."""
    text, layers = scored_text(llm, answers), llm.target.config.layers
    if not text.positions or layers < 2:
        return None
    # Measured now, as the cost of a draft is: only their ratio counts.
    costs = PassCosts(pass_costs(llm), padded=text.device is not None)
    # Captured drafts are timed as they are drafted; on a CPU a drafted token takes a share of a plain pass.
    vocabulary = llm.target.config.vocab_size if text.device is None else 0
    draft_cost = DraftCost(text.seconds, layers, vocabulary, None if text.device is not None else costs(1))
    shortlists = [n for n in SHORTLISTS if n < vocabulary]
    return Search(layers, text.agreement, draft_cost, costs, start, seed, text.seeds(), shortlists)


def clearly_faster(row: BenchRow) -> bool:
    """Drafts were accepted, and the interval (or a margin, where there is none) lies above plain decoding."""
    if not row.accepted or row.speedup is None:
        return False
    return row.speedup > 1.03 if row.ci_low is None else row.ci_low > 1.0


def _label(row: BenchRow) -> str:
    return Setup(row.drafter, row.k, row.options).label


def _half(setups: int) -> int:
    return max(FINALISTS, (setups + 1) // 2)


def _halvings(setups: int) -> int:
    """Rounds until only the finalists are left."""
    return 0 if setups <= FINALISTS else 1 + _halvings(_half(setups))


# ---------------------------------------------------------------- the tuning profile


def profile_of(result: TuneResult) -> dict[str, Any]:
    """The tuning profile except for model and machine; it names plain decoding where nothing was faster."""
    best, found = result.best, result.search
    profile: dict[str, Any] = {"drafter": "off", "k": 0, "options": {}, "measured": {"speedup": 1.0}}
    if best is not None:
        profile = {"drafter": best.drafter, "k": best.k, "options": best.options}
        profile["measured"] = {name: getattr(best, name) for name in _KEYS}
        profile["by_category"] = {r.category: r.speedup for r in result.by_category}
    return profile if found is None else profile | {"skip_search": _search_facts(result, found)}


def _search_facts(result: TuneResult, found: ScoredSkip) -> dict[str, Any]:
    facts = {"tried": result.tried, "agreement": found.agreement, "expected_speedup": found.speedup, "k": found.k}
    return facts | found.skip.options


def keep_skip(llm: LLM, result: TuneResult) -> Path | None:
    """Store the searched set under the target's hash, where the drafter looks for it; returns the file's path."""
    identity = llm.target.identity()
    if result.search is None or identity is None:
        return None
    return note(NOTE, identity, _search_facts(result, result.search) | {"model": llm.name})


def skip_from(profile: dict[str, Any]) -> Skip | None:
    """The set that an earlier search ended with, to resume from."""
    search = profile.get("skip_search")
    if not isinstance(search, dict):
        return None
    try:
        attention, mlp = (frozenset(int(i) for i in search[name]) for name in ("skip_attention", "skip_mlp"))
        return Skip(attention, mlp, search.get("draft_vocab"))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("The profile's skip_search is damaged; tune again without --resume.") from error
