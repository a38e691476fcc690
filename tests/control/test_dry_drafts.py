"""Dry drafts, made while a pass runs that was started without a draft, on an invented device."""

from __future__ import annotations

import random

import pytest

from outrider.control.adaptive import Adaptive
from outrider.control.pass_costs import PassCosts
from outrider.drafters import DraftRequest, Traits
from outrider.drafters.suffix import Suffix
from outrider.types import Draft, SamplingParams, Sequence, Turn, chain

from support.invented_time import TOKENS, Run, auto_with
from support.kernels import GPU

pytestmark = pytest.mark.skipif(GPU, reason="an invented device is enough")


class Steps(Run):
    """One text that is new for `fresh` tokens and then repeats itself, with the time of each step."""

    def __init__(self, drafter: str, fresh: int) -> None:
        super().__init__(drafter, 1, "fresh")
        rnd = random.Random(3)
        tokens = [rnd.randrange(40_000) for _ in range(40 + fresh)]
        self.texts = {1: (tokens + tokens * 8)[: 40 + TOKENS + 80]}
        self.seqs = [Sequence(1, tokens[:40], SamplingParams(max_tokens=TOKENS, ignore_eos=True))]
        self.moments: list[tuple[int, float]] = []  # (tokens, seconds)

    def answer(self) -> None:
        (seq,) = self.seqs
        self.engine.add(seq)
        while self.engine.busy:
            self.engine.step()
            self.moments.append((len(seq.generated), self.world.now))
        assert seq.generated == self.texts[1][40 : 40 + TOKENS]

    def seconds(self, first: int, last: int) -> float:
        """From one number of tokens to another."""
        at = dict(reversed(self.moments))
        return at[last] - at[first]


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "cascade"])
def test_new_text_takes_no_longer_and_repetition_is_detected_at_once(drafter: str) -> None:
    plain, run = Steps("off", fresh=160), Steps(drafter, fresh=160)
    plain.answer()
    run.answer()
    assert run.seconds(1, 100) < 1.01 * plain.seconds(1, 100)  # a fifth more if passes waited for the host
    drafted = next(tokens for tokens, _ in run.moments if tokens > 165)
    assert drafted > 166  # the text repeats itself from token 160 on
    assert run.world.now < 0.8 * plain.world.now


def test_a_dry_draft_that_fails_costs_nothing_but_itself() -> None:
    run = Steps("suffix", fresh=160)
    draft = run.engine.drafter.draft

    def fails_dry(request: DraftRequest) -> Draft:
        if request.dry:
            raise ValueError("no dry drafts")
        return draft(request)

    run.engine.drafter.draft = fails_dry  # type: ignore[method-assign]
    run.answer()
    assert [*run.engine.failures] == ["dry draft: ValueError: no dry drafts"]


DRY = Traits(dry=True)


def paused(batch: int) -> tuple[Adaptive, list[Turn]]:
    """A controller in a pause, in a step whose pass was started without a draft."""
    controller = Adaptive(PassCosts({(n, rows): 0.004 for n in (1, 16) for rows in (n, 64 * n)}))
    turns = [Turn(Sequence(i, [1, 2, 3]), 1, whole=True) for i in range(batch)]
    controller.mode.draft_node.value = controller.mode.draft_call.value = 1e-6
    controller.mode.backoff.pipelined, controller.mode.backoff.left = True, 100
    for _ in range(2):
        controller.budget(turns, DRY)
    return controller, turns


def test_dry_drafts_are_made_only_while_a_pass_runs() -> None:
    controller, turns = paused(1)
    assert [turn.budget for turn in controller.dry_turns(turns)] == [controller.k_max]
    controller.mode.backoff.left = 0
    controller.budget(turns, DRY)  # a real request
    assert not controller.dry_turns(turns)
    assert not Adaptive(controller.costs).dry_turns(turns)


def test_dry_drafts_are_made_for_all_of_a_small_batch_and_none_of_a_large_one() -> None:
    controller, turns = paused(Adaptive.DRY_BATCH)
    assert [turn.seq.id for turn in controller.dry_turns(turns)] == list(range(Adaptive.DRY_BATCH))
    controller, turns = paused(Adaptive.DRY_BATCH + 1)
    assert not controller.dry_turns(turns)


@pytest.mark.parametrize(("chance", "waits"), [(0.95, True), (0.05, False)])
def test_the_next_pass_waits_for_a_draft_that_is_expected_to_pay(chance: float, waits: bool) -> None:
    controller, turns = paused(1)
    for hidden, seconds in ((True, 0.0), (False, 0.001)):
        controller.mode.backoff.add_host_time(1, hidden, seconds)
    dry = controller.dry_turns(turns)
    controller.observe_dry(dry, Draft.pack([chain([5, 6], survival=[chance, chance**2])]))
    assert controller.steady is not waits
    assert any(turn.budget for turn in controller.budget(turns, DRY)) is waits


def test_after_an_empty_draft_the_next_pass_does_not_wait() -> None:
    controller, turns = paused(1)
    controller.mode.backoff.left = 0
    requested = controller.budget(turns, DRY)
    assert requested[0].budget
    assert not controller.steady
    controller.prune(requested, Draft.empty(1))
    assert controller.steady  # the next pass starts at once
    assert not any(turn.budget for turn in controller.budget(turns, DRY))
    assert controller.dry_turns(turns)


def test_auto_makes_dry_drafts_with_free_drafters_and_counts_the_steps_of_the_others() -> None:
    class Costly(Suffix):
        name = "head"

        def draft(self, request: DraftRequest) -> Draft:
            raise AssertionError("it costs passes")

    class Free(Suffix):
        def draft(self, request: DraftRequest) -> Draft:
            seqs = request.seqs
            return Draft.pack([chain([7], survival=[0.9]) if seq.id else chain([]) for seq in seqs])

    auto = auto_with(Costly.__new__(Costly))
    auto.free = [Free.__new__(Free)]
    seqs = [Sequence(i, [1, 2]) for i in range(2)]
    draft = auto.draft(DraftRequest(seqs, [4, 4], dry=True))
    assert [tree.tokens for tree in draft.trees] == [[], [7]]
    assert (auto.backoffs[0, "head"].idle, auto.backoffs[1, "head"].idle) == (1, 0)
