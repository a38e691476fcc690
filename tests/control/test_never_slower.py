"""Never slower on a device that hides the host's work: the real engine in an invented time.

The device is a clock: a pass takes what it took on an H200 (7B, bfloat16), starts when the one before it has ended, and
chooses the next token of a given text. Host work takes invented, fixed times. No result depends on the machine.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.control.adaptive import Adaptive
from outrider.control.pass_costs import PassCosts
from outrider.drafters import Drafter, DraftRequest, Traits
from outrider.drafters.auto import TAPS_OFF_AFTER, TAPS_ON_AFTER, Auto
from outrider.types import Draft, SamplingParams, Sequence, Turn, chain

from support.invented_time import MILLISECONDS, Run, auto_with
from support.kernels import GPU

pytestmark = pytest.mark.skipif(GPU, reason="an invented device is enough")


@pytest.mark.parametrize("drafter", ["suffix", "auto"])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_new_text_is_not_slower(batch: int, drafter: str) -> None:
    plain = Run("off", batch, "fresh").speed()
    run = Run(drafter, batch, "fresh")
    assert run.speed() > 0.97 * plain, run.engine.controller.why


@pytest.mark.parametrize(("batch", "least"), [(1, 2.5), (4, 2.0), (16, 1.3), (64, 0.97)])
def test_repeated_text_is_faster(batch: int, least: float) -> None:
    plain = Run("off", batch, "echo").speed()
    assert Run("suffix", batch, "echo").speed() > least * plain


GOOD = [
    (1, 0.99, 3.5),
    (4, 0.99, 3.0),
    (16, 0.99, 2.0),
    (32, 0.99, 1.4),
    (64, 0.99, 1.05),
    (1, 0.8, 1.7),
    (16, 0.8, 1.2),
]
USELESS = [(batch, right, 0.97) for batch in (1, 4, 16, 64) for right in (0.0, 0.3)]
UNSURE = [(16, 0.6, 0.95), (32, 0.7, 0.9), (64, 0.8, 0.97)]  # near break-even: the cost of trials in 256 tokens


@pytest.mark.parametrize(("batch", "right", "least"), [*GOOD, *USELESS, *UNSURE])
def test_a_draft_model_pays_or_is_not_used(batch: int, right: float, least: float) -> None:
    plain = Run("off", batch, "fresh").speed()
    run = Run("model", batch, "fresh", right)
    assert run.speed() > least * plain, run.engine.controller.why


def test_plain_passes_follow_each_other_without_a_gap() -> None:
    run = Run("off", 16, "fresh")
    assert run.speed() > 0.93 * 16 / (MILLISECONDS[16] * 1e-3)  # prompts and the last sequences take the rest


# ------------------------------------------------------------ work where nothing is drafted: counts, not times


def full_batch(batch: int) -> tuple[Adaptive, list[Turn]]:
    """A controller whose batch fills the machine: one more row costs as much as a token gains."""
    controller = Adaptive(PassCosts({rows: 0.001 * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128)}))
    controller.mode.draft_node.value = controller.mode.draft_call.value = 1e-6
    return controller, [Turn(Sequence(i, [1]), 1, whole=True) for i in range(batch)]


@pytest.mark.parametrize("batch", [8, 64])
def test_a_step_that_drafts_nothing_computes_no_prices(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(PassCosts, "table", lambda self, rows, sequences=1: made.append(rows) or [])
    controller, turns = full_batch(batch)
    for _ in range(100):
        assert controller.budget(turns, Traits(weighs_cost=True)) is turns  # the same objects
        assert controller.prune(turns, Draft.empty(batch)).trees
    assert not made
    assert "even a certain draft would lose" in controller.why


class CountingDrafter(Drafter):
    """A drafter with a state, which counts the tokens that it has to read for a draft."""

    name = "head"

    def __init__(self) -> None:
        super().__init__(None)
        self.read: dict[int, int] = {}
        self.calls = self.total = 0

    def backlog(self, seq: Sequence) -> int:
        return len(seq.tokens) - self.read.get(seq.id, 0)

    def draft(self, request: DraftRequest) -> Draft:
        seqs = request.seqs
        self.calls += 1
        for seq in seqs:
            self.total += self.backlog(seq)
            self.read[seq.id] = len(seq.tokens)
        return Draft.pack(chain([1], survival=[0.3]) for _ in seqs)


def run_steps(auto: Auto, batch: int, steps: int, prompt: int = 100, row: float = 0.8) -> None:
    """Sequences of 50 tokens, one after the other. Reading takes 60 µs a token, a call 1 ms."""
    drafter: Any = auto.costly[0]
    prices: Any = SimpleNamespace(speed=700.0, price=lambda rows: row * rows)  # a row costs so many tokens
    seqs = [Sequence(i, [1] * prompt, SamplingParams(max_tokens=50)) for i in range(batch)]
    for step in range(steps):
        before = drafter.total
        auto.draft(DraftRequest(seqs, [4] * batch, prices))
        seconds = 1e-3 * bool(auto.calls) + 60e-6 * (drafter.total - before)
        for i, seq in enumerate(seqs):
            seq.tokens.append(1)
            if seq.room == 0:
                auto.end(seq)
                seqs[i] = Sequence(seq.id + batch, [1] * prompt, SamplingParams(max_tokens=50))
        turns = [Turn(seq, 1, True) for seq in seqs]
        observed: Any = SimpleNamespace(turns=turns, clock={"draft": seconds}, verdicts=[None] * batch, index=step)
        observed.draft = Draft.empty(batch)
        auto.observe(observed)


@pytest.mark.parametrize("batch", [4, 8, 64])
def test_trials_of_a_head_that_cannot_pay_have_a_bounded_cost(batch: int) -> None:
    """Where rows are expensive, trials cost less than 3 % of the tokens."""
    drafter = CountingDrafter()
    auto = auto_with(drafter)
    run_steps(auto, batch, 2000)
    assert drafter.calls  # it was tried
    spent = 700.0 * (1e-3 * drafter.calls + 60e-6 * drafter.total)  # tokens
    assert spent < 0.03 * 2000 * batch


def test_no_features_are_kept_for_an_unused_head_until_the_batch_shrinks() -> None:
    drafter = CountingDrafter()
    auto = auto_with(drafter)
    run_steps(auto, 8, TAPS_OFF_AFTER + 2)
    assert auto.traits.taps == ()  # nothing is copied
    run_steps(auto, 4, 1)
    assert auto.traits.taps == (1, 2)  # a smaller batch
    run_steps(auto, 8, 1)
    assert auto.traits.taps == ()  # still known,
    shown = 0
    for _ in range(TAPS_ON_AFTER + TAPS_OFF_AFTER):
        run_steps(auto, 8, 1)
        shown += auto.traits.taps == (1, 2)
    assert 0 < shown <= 4 * TAPS_OFF_AFTER  # and tried again after a long while
    run_steps(auto, 8, 2, row=0.0)
    assert auto.traits.taps == (1, 2)  # rows cost nothing any more
