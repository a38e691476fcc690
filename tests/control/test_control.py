"""How much is drafted in a batch: more while rows are free, less when they are not, and never so much that it costs.

A simulation without models: passes cost what a formula says, drafts are accepted with a given probability, and the
controller sees only clocks and verdicts. Its decisions are valued by expectation, so that luck plays no part.
"""

from __future__ import annotations

import random
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.backends.pass_costs import EACH, EDGE, MOST_ROWS, ROWS
from outrider.control.adaptive import Adaptive
from outrider.control.costs import Line, PassCosts
from outrider.drafters import Forecast, Traits
from outrider.drafters._expectation import expected_tokens
from outrider.types import Draft, SamplingParams, Sequence, Tree, Turn, Verdict, chain

COUNTS = (1, 2, 4, 8, 16, 32, 64)
K_MAX = 16

Time = Callable[[int, int], float]  # (sequences, rows in all) -> seconds


def slope(sequences: int, rows: int) -> float:
    """Free up to 16 rows, then every 16 rows take as long as the first."""
    return 0.005 * max(1.0, rows / 16)


def gentle(sequences: int, rows: int) -> float:
    """The same with memory to read for every sequence, and rows that are cheap up to more of them."""
    return 0.005 * (1 + 0.01 * sequences + max(0, rows - 16) / 100)


def stairs(sequences: int, rows: int) -> float:
    """Passes are padded to a bucket: free up to its edge, then a jump."""
    padded = next(edge for edge in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048) if rows <= edge)
    return 0.005 * (0.8 + 0.2 * padded / 16)


def measured(time: Time) -> PassCosts:
    """At the points that `backends.pass_costs` measures."""
    each = {s: (*ROWS, EDGE) if s == 1 else EACH for s in COUNTS}
    return PassCosts({(s, s * r): time(s, s * r) for s in COUNTS for r in each[s] if s * r <= MOST_ROWS})


@dataclass
class World:
    """A target, a drafter and a batch that never ends."""

    time: Time
    alpha: float | Callable[[int], float]
    price: float  # of one depth, in plain passes of one sequence
    batch: int
    claims: bool = False  # does the drafter claim survival?
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.seqs = [Sequence(i, [1], SamplingParams(max_tokens=10**6)) for i in range(self.batch)]
        self.requested = self.kept = 0
        self.slower = 1.0  # contexts grow

    def chance(self, seq: Sequence) -> float:
        return self.alpha(seq.id) if callable(self.alpha) else self.alpha

    def step(self, controller: Adaptive) -> tuple[float, float]:
        """One step; its expected tokens, and its seconds."""
        turns = controller.budget([Turn(seq, 1, True) for seq in self.seqs], Traits())
        drafted = controller.prune(turns, Draft.pack(map(self._tree, turns)))
        rows = self.batch + sum(len(tree.tokens) for tree in drafted.trees)
        depth = max(turn.budget for turn in turns)
        clock = {
            "draft": 1e-6 + depth * self.price * self.time(1, 1),
            "verify": self.slower * self.time(self.batch, rows),
            "judge": 0.0,
        }
        verdicts = [self._verdict(turn, tree) for turn, tree in zip(turns, drafted.trees, strict=True)]
        step: Any = SimpleNamespace(
            turns=turns,
            draft=drafted,
            rows=rows,
            draft_rows=[len(tree.tokens) for tree in drafted.trees],
            in_round=False,
            partial=False,
            untaken=[None] * self.batch,
            verdicts=verdicts,
            clock=clock,
        )
        controller.observe(step)
        self.requested, self.kept = sum(turn.budget for turn in turns), rows - self.batch
        pairs = zip(turns, drafted.trees, strict=True)
        tokens = sum(expected_tokens(self.chance(turn.seq), len(tree.tokens)) for turn, tree in pairs)
        return tokens, sum(clock.values())

    def _tree(self, turn: Turn) -> Tree:
        claims = [self.chance(turn.seq) ** i for i in range(1, turn.budget + 1)] if self.claims else None
        return chain(range(turn.budget), survival=claims)

    def _verdict(self, turn: Turn, tree: Tree) -> Verdict:
        n = len(tree.tokens)
        hits = next((i for i in range(n) if self.dice.random() >= self.chance(turn.seq)), n)
        fates = "a" * hits + ("r" + "u" * (n - hits - 1) if hits < n else "")
        return Verdict(list(range(hits)), [1] * (hits + 1), fates)

    def speed(self, controller: Adaptive, steps: int) -> float:
        """Tokens per second over so many steps."""
        tokens, seconds = (sum(each) for each in zip(*(self.step(controller) for _ in range(steps)), strict=True))
        return tokens / seconds

    def fixed(self, k: int) -> float:
        """Tokens per second with K drafted for every sequence in every step."""
        assert not callable(self.alpha)
        seconds = self.slower * self.time(self.batch, self.batch * (k + 1)) + k * self.price * self.time(1, 1)
        return self.batch * expected_tokens(self.alpha, k) / seconds


def warmed(world: World, costs: PassCosts | None = None) -> Adaptive:
    controller = Adaptive(costs or measured(world.time), K_MAX)
    world.speed(controller, 60 + 240 // world.batch)
    return controller


def long_enough(batch: int) -> int:
    return 100 + 800 // batch


# ---------------------------------------------------------------- never slower

ALPHAS = (0.0, 0.2, 0.5, 0.8, 0.98)


def compare(world: World) -> None:
    speed = world.speed(warmed(world), long_enough(world.batch))
    assert speed >= 0.97 * world.fixed(0), f"α {world.alpha}: {speed / world.fixed(0):.3f} × plain"
    best = max(map(world.fixed, range(K_MAX + 1)))
    assert speed >= 0.95 * best, f"α {world.alpha}: {speed / best:.3f} × the best fixed K"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("price", [0.0, 0.05, 0.15])
@pytest.mark.parametrize("batch", COUNTS)
def test_it_is_never_slower_than_plain_and_near_the_best_fixed_k(batch: int, price: float) -> None:
    for alpha in ALPHAS:
        compare(World(slope, alpha, price, batch, claims=price == 0.05))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("price", [0.0, 0.15])
@pytest.mark.parametrize("batch", [2, 8, 24])  # 24 lies between two that are measured
def test_also_where_rows_stay_cheap_for_longer(batch: int, price: float, claims: bool) -> None:
    for alpha in ALPHAS:
        compare(World(gentle, alpha, price, batch, claims))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("price", [0.0, 0.15])
@pytest.mark.parametrize("batch", [1, 4, 16, 32])
def test_also_where_costs_are_stairs(batch: int, price: float, claims: bool) -> None:
    for alpha in ALPHAS:
        compare(World(stairs, alpha, price, batch, claims))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("time", [slope, stairs])
@pytest.mark.parametrize("batch", [3, 12, 24, 48, 63])
def test_a_batch_between_those_that_were_measured_is_no_slower_either(batch: int, time: Time) -> None:
    for alpha in ALPHAS:
        world = World(time, alpha, 0.05, batch)
        assert world.speed(warmed(world), long_enough(batch)) >= 0.97 * world.fixed(0)


@pytest.mark.parametrize("price", [0.0, 0.1])
def test_a_batch_drafts_less_the_larger_it_is(price: float) -> None:
    kept = []
    for batch in COUNTS:
        world = World(slope, 0.9, price, batch)
        controller, total = warmed(world), 0
        for _ in range(40):
            world.step(controller)
            total += world.kept
        kept.append(total / 40 / batch)
    assert kept[0] > 4
    assert kept[-1] < 0.1
    assert kept == sorted(kept, reverse=True)


# ---------------------------------------------------------------- when things change


def test_growing_contexts_do_not_make_rows_look_free() -> None:
    """Only plain passes are seen, and they get slower: that says nothing about what a draft would cost."""
    world = World(slope, 0.8, 0.05, 32)
    controller = warmed(world)
    tokens = seconds = 0.0
    for _ in range(400):
        world.slower *= 1.003
        now = world.step(controller)
        tokens, seconds = tokens + now[0] * world.slower, seconds + now[1]
    assert tokens / seconds >= 0.97 * World(slope, 0.8, 0.05, 32).fixed(0)


@pytest.mark.parametrize("price", [0.0, 0.1])
def test_a_batch_that_shrinks_drafts_again_and_one_that_grows_stops(price: float) -> None:
    world, few = World(slope, 0.9, price, 64), World(slope, 0.9, price, 1)
    controller = warmed(world)
    assert world.kept == 0
    few.speed(controller, 60)
    assert few.speed(controller, 100) > 2 * few.fixed(0)
    world.speed(controller, 20)
    assert world.speed(controller, 100) >= 0.97 * world.fixed(0)


@pytest.mark.parametrize("price", [0.0, 0.1])
def test_drafts_are_made_only_for_sequences_that_accept_them(price: float) -> None:
    world = World(gentle, lambda name: 0.95 if name % 4 == 0 else 0.0, price, 16)
    controller = warmed(world)
    turns = controller.budget([Turn(seq, 1, True) for seq in world.seqs], Traits())
    kept = controller.prune(turns, Draft.pack(map(world._tree, turns)))
    sizes = [len(tree.tokens) for tree in kept.trees]
    assert min(sizes[::4]) >= 3
    assert sum(map(bool, sizes)) <= 4 + Adaptive.PROBED
    assert world.speed(controller, 150) > 1.2 * world.batch / gentle(16, 16)


def test_new_sequences_are_probed_together_and_rarely() -> None:
    """Sequences arrive at different times; a probe of any of them slows the whole batch down."""
    world = World(gentle, 0.0, 0.15, 32)
    controller, requested = warmed(world), 0
    for step in range(300):
        controller.end(world.seqs[step % 32])
        world.seqs[step % 32] = Sequence(1000 + step, [1], SamplingParams(max_tokens=10**6))
        world.step(controller)
        requested += world.requested > 0
    assert 1 <= requested <= 30  # of 300


def test_a_drafter_whose_claims_are_never_worth_verifying_is_used_no_longer() -> None:
    world = World(slope, 0.0, 0.1, 1, claims=True)
    controller, requested = Adaptive(measured(slope)), 0
    for _ in range(100):
        world.step(controller)
        requested += world.requested > 0
    assert requested < 30


def test_reading_a_prompt_does_not_count_as_the_cost_of_drafting() -> None:
    controller = Adaptive(measured(slope))
    seq = Sequence(1, [1] * 9, SamplingParams(max_tokens=99))
    for feed, seconds, price in ((8, 1.0, None), (1, 0.001, 0.001)):
        turns = controller.budget([Turn(seq, feed, True)], Traits(backlog=lambda seq: 1))  # the rest has been read
        drafted = controller.prune(turns, Draft.pack([chain(range(turns[0].budget))]))
        rows = feed + len(drafted.trees[0].tokens)
        step: Any = SimpleNamespace(
            turns=turns, draft=drafted, rows=rows, draft_rows=[rows - feed], in_round=False, untaken=[None],
            verdicts=[Verdict([], [1], "r" + "u" * 3)], partial=False,
            clock={"draft": seconds, "verify": 0.005, "judge": 0.0},
        )  # fmt: skip
        controller.observe(step)
        calls = controller.drafting[""]
        assert not calls.count if price is None else calls.line(1)(1) == pytest.approx(price)


def test_a_drafter_that_reads_nothing_is_paid_for_one_first_call() -> None:
    """Its first call was taken for the reading of a prompt, so that it was tried again at any price."""
    world = World(slope, 0.0, 0.5, 1)
    controller = Adaptive(measured(slope))
    requested = 0
    for _ in range(24):
        world.step(controller)
        requested += world.requested > 0
    assert requested == 1


def test_requests_in_vain_leave_something_for_drafts() -> None:
    """Searches that found nothing took all of the credit, and a head that would have paid was never called again."""
    controller, asked = Adaptive(measured(slope)), 0
    seq = Sequence(1, [1] * 9, SamplingParams(max_tokens=9999))
    for _ in range(400):
        turns = controller.budget([Turn(seq, 1, True)], Traits(weighs_cost=True))
        asked += turns[0].budget > 0
        step: Any = SimpleNamespace(
            turns=turns, draft=Draft.pack([chain([])]), rows=1, draft_rows=[0], in_round=False, untaken=[None],
            verdicts=[Verdict([], [1], "")], partial=False,
            clock={"draft": 0.0001 * (turns[0].budget > 0), "verify": 0.005, "judge": 0.0},
        )  # fmt: skip
        controller.observe(step)
    assert (
        100 < asked < 230
    )  # each costs two hundredths of a token: the share of 400 and what is left of the first half
    assert controller.credit.tokens > 0.2


def one_step(controller: Adaptive, turns: list[Turn], hits: int, draft: float) -> Any:
    """A step of one sequence in which the first nodes of its draft, which took so many seconds, are right."""
    k = turns[0].budget
    fates = "a" * hits + ("r" + "u" * (k - hits - 1) if hits < k else "")
    return SimpleNamespace(
        turns=turns, draft=Draft.pack([chain([2] * k)]), rows=1 + k, draft_rows=[k], in_round=True, untaken=[None],
        verdicts=[Verdict(list(range(hits)), [2] * (hits + 1), fates)], partial=False,
        clock={"draft": draft * (k > 0), "verify": 0.005, "judge": 0.0},
    )  # fmt: skip


FIXED_CALL = 0.004  # seconds, whatever is drafted: a tree that a device draws beside passes of 0.005


def with_a_tree() -> tuple[Adaptive, Traits, list[Turn]]:
    controller = Adaptive(measured(slope))
    calls = tuple((1, k, FIXED_CALL) for k in (1, 16))
    traits = Traits(forecast=Forecast((0.6, 0.4, 0.25, 0.15), calls=calls))
    return controller, traits, [Turn(Sequence(1, [1] * 9, SamplingParams(max_tokens=9999)), 1, True)]


def test_a_trial_is_of_the_draft_that_loses_least() -> None:
    """A trial of one node, from a drafter that takes as long for sixteen, could not even pay if it was right: on a GPU
    five of them spent what a head had gained, and half of an answer was plain that a tree made 1.8 x faster."""
    controller, traits, plain = with_a_tree()
    tried = []
    for _ in range(600):
        turns = controller.budget(plain, traits)
        if "is tried" in controller.why and turns[0].budget:
            tried.append(turns[0].budget)
        controller.observe(one_step(controller, turns, 0, FIXED_CALL))  # always wrong
    assert tried
    assert min(tried) > 1


def test_a_pause_that_began_before_a_verdict_was_read_ends_with_it() -> None:
    """With two steps in flight the credit seemed gone, and fifty steps were plain although the latest draft had gained
    five tokens."""
    controller, traits, plain = with_a_tree()
    first = controller.budget(plain, traits)
    assert first[0].budget > 1
    controller.credit.tokens = -0.3  # as far as the steps that were read say
    assert traits.forecast is not None
    silent = replace(traits, forecast=traits.forecast._replace(survival=()))  # its maker has stated nothing
    assert controller.budget(plain, silent)[0].budget == 0
    assert controller.pause > 10
    controller.observe(one_step(controller, first, first[0].budget, FIXED_CALL))  # all were right
    assert controller.budget(plain, traits)[0].budget > 1


def test_a_long_prompt_costs_what_the_lengths_before_it_say() -> None:
    """Most of the first call for a short prompt is not reading; a long one does not cost that many times as much."""
    controller, reads = Adaptive(measured(slope)), Traits(backlog=lambda seq: 1)  # what a pass adds

    def first_call(seq_id: int, tokens: int, seconds: float) -> Sequence:
        seq = Sequence(seq_id, [1] * tokens, SamplingParams(max_tokens=99))
        for feed, draft in ((1, seconds), (1, 0.001), (1, 0.001)):
            turns = controller.budget([Turn(seq, feed, True)], reads)
            turns = [turn.allow(max(turn.budget, 1)) for turn in turns]
            step: Any = SimpleNamespace(
                turns=turns, draft=Draft.pack([chain([3])]), rows=2, draft_rows=[1], in_round=False, untaken=[None],
                verdicts=[Verdict([0], [3, 1], "a")], partial=False,
                clock={"draft": draft, "verify": 0.005, "judge": 0.0},
            )  # fmt: skip
            controller.observe(step)
        return seq

    for number, tokens in enumerate((40, 60, 90)):
        first_call(number, tokens, 0.002 + 1e-6 * tokens)
        controller.end(Sequence(number, [1], SamplingParams()))
    controller.credit.tokens = 9.0
    long = Sequence(9, [1] * 1000, SamplingParams(max_tokens=99))
    assert controller.budget([Turn(long, 1, True)], reads)[0].budget > 0
    controller.reading = Line()
    controller.reading.add(60, 0.06)  # a millisecond for each token: two hundred passes
    assert controller.budget([Turn(long, 1, True)], reads)[0].budget == 0


def test_the_reason_is_given_in_words() -> None:
    world = World(slope, 0.9, 0.1, 64)
    controller = warmed(world)
    assert controller.why.startswith("64 sequences: the drafter is not used: ")
    assert "even a certain draft would lose" in controller.why
    wrong = warmed(World(gentle, 0.0, 0.15, 4)).why
    assert wrong.startswith("4 sequences: the drafter is not used: ")
    assert "break-even here is " in wrong
    assert wrong.endswith("plain decoding until that changes")
    few = World(slope, 0.9, 0.1, 2)
    assert "2 sequences: " in warmed(few).why
    assert "tokens expected" in warmed(few).why


# ---------------------------------------------------------------- costs of sequences and rows


def test_costs_are_linear_in_rows_and_in_sequences() -> None:
    costs = PassCosts({(1, 1): 1.0, (1, 5): 2.0, (4, 4): 2.0, (4, 8): 4.0, (4, 16): 4.0})
    assert costs(3) == pytest.approx(1.5)
    assert costs(9) == pytest.approx(3.0)
    assert costs(6, 4) == pytest.approx(3.0)
    assert costs(30, 4) == pytest.approx(4.0)
    assert costs(4, 2) == pytest.approx(2 / 3 * 1.25 + 1 / 3 * 4.0)  # one with two rows, four with eight
    assert costs(8, 64) == costs(8, 4)  # more were not measured
    assert PassCosts({1: 1.0, 5: 2.0})(3, 8) == pytest.approx(1.5)  # measured for one sequence only


def test_plans_expect_a_stair_after_every_measured_size() -> None:
    costs = PassCosts({(1, 1): 1.0, (1, 5): 2.0, (4, 4): 2.0, (4, 8): 4.0, (4, 16): 5.0})
    planned = partial(costs, planned=True)
    assert [planned(rows, 4) for rows in range(4, 19)] == [2.0, *[4.0] * 4, *[5.0] * 8, 6.0, 6.0]  # and after the last
    assert [planned(rows, 1) for rows in range(1, 5)] == [costs(rows) for rows in range(1, 5)]  # one sequence as ever
    assert planned(4, 2) == pytest.approx(costs(4, 2))  # between one sequence and four with eight rows
    assert costs(3, 2) < planned(3, 2) < planned(5, 2) < costs(8, 2)
    alone = PassCosts({1: 1.0, 9: 2.0})
    assert [alone(rows, 4, planned=True) for rows in range(10)] == [alone(rows) for rows in range(10)]


def test_more_rows_never_cost_less() -> None:
    costs = PassCosts({(2, 2): 3.0, (2, 4): 2.0, (2, 8): 5.0, (8, 8): 4.0, (8, 16): 3.9})
    for sequences in (1, 2, 3, 5, 8, 9):
        line = [costs(rows, sequences) for rows in range(sequences, 40)]
        assert line == sorted(line)


def test_the_first_plain_passes_correct_costs_of_another_time() -> None:
    costs = PassCosts({1: 0.010, 8: 0.012})
    for _ in range(6):
        costs.refine(1, 0.007)  # the memory is faster now
    assert costs(1) < 0.0075  # with the usual rate it would be 0.0088
    for _ in range(50):
        costs.refine(1, 0.007)
    costs.refine(1, 0.010)  # one slow pass among many does little
    assert costs(1) < 0.0074


def test_costs_follow_the_passes_of_a_sequence_count() -> None:
    costs = measured(slope)
    for _ in range(300):
        costs.refine(32, 0.03, sequences=32)  # three times as long as was measured
    assert costs(32, 32) == pytest.approx(0.03, rel=0.02)
    assert costs(64, 32) == pytest.approx(2 * costs(32, 32))  # the shape stays
    for _ in range(300):
        costs.refine(64, 0.1, sequences=32)
    assert costs(64, 32) == pytest.approx(0.1, rel=0.02)
    assert costs(64, 32) > 2.2 * costs(32, 32)  # drafts cost more than was measured, and plain passes less so
    assert costs(1) < 0.008


def test_what_every_pass_after_a_draft_takes_longer_is_not_the_price_of_a_row() -> None:
    """Caches are cold after a draft: 0.2 ms for opus-mt, which were charged to each of eight rows."""
    costs = PassCosts({1: 0.80, 2: 0.85, 9: 1.2})
    for _ in range(200):
        for rows, measured in ((2, 0.85), (3, 0.9), (5, 1.0)):
            costs.refine(rows, measured + 0.2)
    assert costs(1) == pytest.approx(0.8)
    assert costs(2) == pytest.approx(1.05, rel=0.01)
    assert costs(9) == pytest.approx(1.4, rel=0.02)


def test_a_padded_pass_between_two_sizes_is_no_error() -> None:
    """A pass of 72 rows takes as long as one of 96, which says nothing about 192 more."""
    costs = PassCosts({(64, 64): 4.6, (64, 128): 5.9, (64, 256): 8.8})
    for _ in range(9):
        costs.refine(72, 5.6, sequences=64)
    assert costs(256, 64) == pytest.approx(8.8)
    for _ in range(9):
        costs.refine(72, 6.5, sequences=64)  # more than the next size takes
    assert costs(256, 64) > 9.0


def test_a_cached_cost_takes_microseconds() -> None:
    costs = measured(gentle)
    costs(1000, 37)
    assert min(timeit.repeat(lambda: costs(500, 37), number=10_000, repeat=5)) < 10_000 * 5e-6


def test_a_free_drafter_is_not_used_where_even_a_certain_draft_would_lose() -> None:
    """Rows that cost as much as a token gains: a batch that fills the machine."""
    controller = Adaptive(PassCosts({rows: 0.001 * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)}))
    for k in (4, 16):
        controller.drafting[""].add(8, k, 1e-6)
    turns = [Turn(Sequence(i, [1]), 1, whole=True) for i in range(8)]
    assert not any(each.budget for each in controller.budget(turns, Traits()))
    assert "even a certain draft" in controller.why
    controller.credit.tokens = 30.0  # whatever was gained: nothing could be learnt from a trial
    assert not any(each.budget for each in controller.budget(turns, Traits()))


def test_a_pass_with_drafts_that_is_faster_than_a_plain_one_corrects_the_plain_cost() -> None:
    """Where every pass has a draft no plain one is seen; an estimate that is too high would make all drafts free."""
    costs = PassCosts({1: 0.0043, 2: 0.0043, 32: 0.0046})
    for _ in range(60):
        costs.refine(32, 0.0042)
    assert costs(1) < 0.00425
    assert costs(32) >= costs(1)


def long_reader(tokens: int) -> tuple[Adaptive, list[Turn]]:
    """64 sequences of a drafter that is always right, four of which it has read: that took a pass."""
    costs = {1: 0.004, 64: 0.0045, 128: 0.006, 256: 0.0075, 1024: 0.016}
    controller = Adaptive(PassCosts({(n, rows): costs[rows] for n in (1, 64) for rows in costs if rows >= n}))
    for k in (1, 4, 1, 4):
        controller.drafting[""].add(64, k, 0.001 * k)
    for _ in range(200):
        controller.overall.add(chain([1] * 8), "a" * 8)
    seqs = [Sequence(i, [1] * 100, SamplingParams(max_tokens=tokens)) for i in range(64)]
    controller.asked = {0, 1, 2, 3}
    controller.reading.add(400, 0.004)
    return controller, [Turn(seq, 1, True) for seq in seqs]


def test_prompts_are_read_for_the_steps_that_are_left_and_not_for_the_tokens() -> None:
    """With 47 sequences that had 13 tokens left a draft model read all prompts, in the time of 13 passes, for three
    steps with drafts: 0.84 × plain decoding on an H200."""
    for tokens, reads in ((13, False), (2000, True)):
        controller, turns = long_reader(tokens)
        controller.credit.admit(64, stated=False)
        controller.credit.tokens = 4000.0
        budgets = [turn.budget for turn in controller.budget(turns, Traits())]
        assert (sum(map(bool, budgets)) > 4) == reads, (tokens, budgets, controller.why)


def test_where_reading_costs_too_much_nothing_is_tried_again_and_again() -> None:
    """Acceptance and costs were known; four sequences were tried in each of forty rounds, each a third longer."""
    controller, turns = long_reader(13)
    controller.budget(turns, Traits())  # admits them
    controller.credit.tokens = 4000.0
    assert not any(turn.budget for turn in controller.budget(turns, Traits()))
    assert "reading the prompts" in controller.why


def test_a_round_with_sequences_that_have_ended_teaches_no_costs() -> None:
    """Passes for 46 sequences and their drafts were taken for those of the three that were left, and one sequence was
    never drafted for again."""
    controller = Adaptive(measured(slope))
    seq = Sequence(1, [1] * 9, SamplingParams(max_tokens=99))
    before = [controller.costs(rows) for rows in (1, 2, 8)]
    for _ in range(50):
        step: Any = SimpleNamespace(
            turns=[Turn(seq, 1, True, 1)], draft=Draft.pack([chain([3])]), rows=2, draft_rows=[1], in_round=True,
            untaken=[None], verdicts=[Verdict([0], [3, 1], "a")], partial=True,
            clock={"draft": 0.5, "verify": 0.5, "judge": 0.0},
        )  # fmt: skip
        controller.observe(step)
    assert [controller.costs(rows) for rows in (1, 2, 8)] == before
    assert controller.drafting[""].count == 0
