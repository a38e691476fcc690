"""When to go on, and whom to ask: chains end where the next token would not pay, and `auto` asks a costly drafter where
it is expected to bring more than it takes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.control.acceptance import AcceptanceStats
from outrider.control.adaptive import Adaptive
from outrider.control.costs import PassCosts
from outrider.drafters import Drafter, DraftRequest, Traits, Workspace
from outrider.drafters.auto import FIRST_PAUSE, Auto, CostStatistics, Trust, settled, value
from outrider.engine.cache import Cache
from outrider.types import Draft, SamplingParams, Sequence, Tree, Turn, Verdict, chain

from support.toys import toy

TARGET = toy()


def priced(speed: float = 200.0, row: float = 0.05) -> Any:
    return SimpleNamespace(speed=speed, limit=math.inf, price=lambda more: row * more)


# ------------------------------------------------------------ whom auto asks


class Fixed(Drafter):
    """Drafts a chain with a fixed survival."""

    def __init__(self, name: str, survival: list[float]) -> None:
        self.name = name  # type: ignore[misc]
        self.survival, self.calls = survival, 0

    def draft(self, request: DraftRequest) -> Draft:
        seqs = request.seqs
        self.calls += 1
        return Draft.pack(chain(range(len(self.survival)), survival=list(self.survival)) for _ in seqs)


def auto_of(free: list[float], costly: list[float], prices: Any = None) -> tuple[Auto, Fixed]:
    cache = Cache(64, 2, 64)
    plane = cache.add_plane(*TARGET.plane_shape)
    auto = Auto(Workspace(TARGET, cache, plane))
    auto.prices = prices
    slow = Fixed("head", costly)
    auto.free, auto.costly = [Fixed("suffix", free)], [slow]
    auto.drafters = [*auto.free, *auto.costly]
    auto.costs["head"] = timed(0.001, 0.0, claims=[*costly, 0.0])  # it drafts no more
    return auto, slow


def timed(call: float, token: float, **more: Any) -> CostStatistics:
    """A drafter whose calls take so many seconds, and so many more for each token."""
    stats = CostStatistics(**more)
    for k in (1, 4):
        stats.calls.add(1, k, call + k * token)
    return stats


SEQ = Sequence(1, [1, 2, 3])
SURE, WEAK, GOOD, POOR = [0.95, 0.93, 0.9, 0.88], [0.3, 0.1], [0.8, 0.6, 0.45], [0.1]


@pytest.mark.parametrize(
    ("free", "trust", "costly", "speed", "called"),
    [
        ([], 0.8, GOOD, 200, True),  # no free proposal
        ([], 0.8, POOR, 200, False),  # a call costs 0.2 tokens and gains 0.08
        ([], 0.8, POOR, 20, True),  # here it costs 0.02
        (SURE, 1.0, GOOD, 200, False),  # a likely match needs no head
        (SURE, 0.1, GOOD, 200, True),  # a match of a drafter that was often wrong does
        (WEAK, 0.8, GOOD, 200, True),  # so does a weak match
        (WEAK, 0.8, GOOD, 2000, False),  # unless a call is expensive
        (GOOD, 1.0, GOOD, 200, False),  # equally good: the free one
    ],
)
def test_auto_calls_where_it_pays(
    free: list[float], trust: float, costly: list[float], speed: float, called: bool
) -> None:
    auto, slow = auto_of(free, costly, priced(speed, row=0.0))
    auto.trust[1, "suffix"] = Trust(1.0, trust)
    (tree,) = auto.draft(DraftRequest([SEQ], [8], auto.prices)).trees
    assert bool(slow.calls) is called
    assert (tree.source == "head") is called


def test_the_better_proposal_is_taken_whichever_drafter_was_called() -> None:
    auto, slow = auto_of(WEAK, GOOD, priced())
    slow.survival = POOR  # less than its usual claims
    (tree,) = auto.draft(DraftRequest([SEQ], [8], auto.prices)).trees
    assert slow.calls == 1
    assert tree.source == "suffix"


def test_with_fixed_k_only_claims_count() -> None:
    for free, called in (([], True), (WEAK, True), (SURE, False)):
        auto, slow = auto_of(free, GOOD)
        auto.draft(DraftRequest([SEQ], [8], auto.prices))
        assert bool(slow.calls) is called


def test_a_batch_shares_the_cost_of_a_call() -> None:
    claims = [0.15]  # 0.12 tokens each, against 0.2 for a call
    one, slow = auto_of([], claims, priced(row=0.0))
    one.draft(DraftRequest([SEQ], [8], one.prices))
    assert not slow.calls
    two, slow = auto_of([], claims, priced(row=0.0))
    two.draft(DraftRequest([SEQ, Sequence(2, [1])], [8, 8], two.prices))
    assert slow.calls == 1


def test_a_drafter_that_was_wrong_is_tried_again_with_backoff() -> None:
    auto, slow = auto_of([], GOOD, priced())
    auto.trust[1, "head"] = Trust(50.0, 0.5)
    calls = []
    for step in range(200):
        before = slow.calls
        auto.draft(DraftRequest([SEQ], [8], auto.prices))
        calls += [step] * (slow.calls - before)
    assert calls == [FIRST_PAUSE - 1, 3 * FIRST_PAUSE - 1, 7 * FIRST_PAUSE - 1]


def test_a_free_proposal_needs_no_trial() -> None:
    auto, slow = auto_of(SURE, GOOD, priced())
    auto.trust[1, "head"] = Trust(50.0, 0.5)
    for _ in range(100):
        auto.draft(DraftRequest([SEQ], [8], auto.prices))
    assert not slow.calls


def test_auto_measures_the_cost_of_a_call_with_the_steps_clock() -> None:
    auto, _ = auto_of([], GOOD, priced())
    auto.draft(DraftRequest([SEQ], [8], auto.prices))
    step: Any = SimpleNamespace(turns=[Turn(SEQ, 1, True)], clock={"draft": 0.002}, verdicts=[None], in_round=False)
    step.draft = Draft.pack([chain([])])
    auto.observe(step)
    cost = auto.costs["head"].call_cost(1, 3)
    assert 0.001 < cost < 0.0015
    auto.observe(step)  # no call since: the cost decays
    assert auto.costs["head"].call_cost(1, 3) == pytest.approx(0.99 * cost)


def test_an_unread_draft_is_scored_only_where_it_was_verified() -> None:
    auto, _ = auto_of([], GOOD, priced())
    unread, verdict = chain([-1, -2], source="head"), Verdict([0], [7, 8], "ar")
    for verified, scored in ((chain([7, 9], source="suffix"), False), (chain([], source="head"), False)):
        auto._score(SEQ, "head", unread, verdict.tokens, verified, verdict)
        assert bool(auto.costs["head"].outcomes.added) is scored
    auto._score(SEQ, "head", unread, verdict.tokens, chain([7, 9], source="head"), verdict)
    assert auto.costs["head"].outcomes.added == 1
    survival = auto.costs["head"].expected_survival(2)
    assert survival[0] > 0.5 > survival[1] / survival[0]  # the first came true, the second did not


@pytest.mark.parametrize("claims", [False, True])
def test_the_length_of_a_draft(claims: bool) -> None:
    """The more a token costs, the shorter."""
    lengths = []
    for seconds in (0.0, 0.0002, 0.002):
        auto, slow = auto_of([], GOOD, priced(500, row=0.0))
        stats = auto.costs["head"] = timed(1e-6, seconds, claims=[0.8])
        for _ in range(0 if claims else 50):
            stats.outcomes.add(chain([1, 2], source="head"), "ar")
            stats.outcomes.add(chain([1, 2], source="head"), "aa")
        lengths.append(auto._length(slow, 32, 1))
    assert lengths[0] > 16 > lengths[1] > lengths[2] == 1
    auto.costs["head"] = CostStatistics()
    assert auto._length(slow, 32, 1) == 2  # the first time
    slow.traits = replace(slow.traits, self_limiting=True)
    assert auto._length(slow, 32, 1) == 32


def test_value_is_that_of_the_best_prefix() -> None:
    assert value([0.9, 0.5, 0.1], 1.0, lambda rows: 0.3 * rows) == pytest.approx(0.8)
    assert value([0.9, 0.5], 0.5, lambda rows: 0.0) == pytest.approx(0.7)
    assert value([0.2], 1.0, lambda rows: 1.0 * rows) == 0.0


def test_only_claims_whose_outcome_is_known_are_scored() -> None:
    tree = chain([1, 2, 3, 4], survival=[0.9, 0.8, 0.7, 0.6])
    assert settled(tree, [1, 2], 2) == [0.9, 0.8]  # it agrees so far; the rest is unknown
    assert settled(tree, [1, 9], 1) == [0.9, 0.8, 0.7, 0.6]  # it was rejected, and so was all beyond
    branches = Tree([1, 5, 2], [-1, -1, 0], [0.5, 0.3, 0.2])
    assert settled(branches, [1], 1) == [0.5, 0.3]


def test_mean_claims_count_missing_depths_as_zero() -> None:
    stats = CostStatistics(claims=[0.5, 0.5])
    for _ in range(200):
        stats.add_claims([0.8], 2)
    assert stats.claims == pytest.approx([0.8, 0.0], abs=0.01)
    stats = CostStatistics()
    for _ in range(200):
        stats.add_claims([0.9, 0.81], 2)  # it was asked for no more
    assert stats.expected_survival(4) == pytest.approx([0.9, 0.81, 0.729, 0.6561], abs=0.01)


# ------------------------------------------------------------ the controller

COSTS = {1: 0.005, 2: 0.0051, 8: 0.007, 32: 0.02}


def turn() -> Turn:
    return Turn(Sequence(1, [1, 2], SamplingParams(max_tokens=50)), feed=1, whole=True)


def controller_with(call: float, token: float) -> Adaptive:
    """A controller that knows what a draft call costs, and may lose something."""
    controller = Adaptive(PassCosts(COSTS))
    for k in (1, 4):
        controller.drafting[""].add(1, k, call + k * token)
    controller.credit.admit(1, stated=False)
    controller.credit.tokens = 8.0
    return controller


def test_a_paced_drafter_is_asked_for_all_there_is_room_for() -> None:
    paced, other = Traits(self_limiting=True), Traits()
    assert controller_with(0.001, 0.0).budget([turn()], paced)[0].budget == 16
    assert 0 < controller_with(0.0, 0.001).budget([turn()], other)[0].budget < 16
    assert controller_with(0.02, 0.0).budget([turn()], paced)[0].budget <= 1  # four passes for a draft


def test_a_frugal_drafter_is_asked_every_time_while_it_has_credit() -> None:
    controller = controller_with(0.02, 0.0)
    assert controller.budget([turn()], Traits(weighs_cost=True))[0].budget == controller.k_max
    controller.credit.tokens = -1.0
    assert controller.budget([turn()], Traits(weighs_cost=True))[0].budget == 0
    assert "paused" in controller.why


def test_prices_are_those_of_the_step_at_hand() -> None:
    controller = Adaptive(PassCosts(COSTS))
    controller.budget([turn()], Traits())
    assert controller.prices.speed == pytest.approx(200)
    assert controller.prices.price(7) == pytest.approx(0.4)
    controller.lead = 2.0
    assert controller.prices.speed == pytest.approx(200)  # the same step
    controller.budget([turn()], Traits())
    assert controller.prices.speed == pytest.approx(400)


def test_whose_claims_came_true_is_kept_apart() -> None:
    known = AcceptanceStats()
    for _ in range(100):
        known.add(chain([1], survival=[0.7], source="suffix"), "r")
        known.add(chain([1], survival=[0.7], source="head"), "a")
    assert known.survival(0.7, "suffix") < 0.1
    assert known.survival(0.7, "head") > 0.9
    assert known.survival(0.7, "model") == 0.7


def test_a_chain_is_cut_where_its_survival_no_longer_pays() -> None:
    kept = []
    for claims in ([0.9, 0.85, 0.8, 0.75], [0.9, 0.85, 0.02, 0.01], [0.02, 0.01, 0.01, 0.01]):
        controller = Adaptive(PassCosts(COSTS))
        controller.credit.tokens = 1.0
        turns = controller.budget([turn()], Traits(self_limiting=True))
        (tree,) = controller.prune(turns, Draft.pack([chain([1, 2, 3, 4], survival=claims, source="head")])).trees
        kept.append(len(tree.tokens))
    assert kept == [4, 2, 0]
