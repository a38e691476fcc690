"""Scheduling: no sequence is lost or starves, and long prompts do not stall others."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from outrider.config import Config
from outrider.control.adaptive import Adaptive, Fixed
from outrider.control.costs import PassCosts
from outrider.drafters import Traits
from outrider.errors import ConfigError
from outrider.llm import build_engine
from outrider.types import ACCEPTED, REJECTED, Draft, SamplingParams, Sequence, Turn, Verdict, chain

from support.toys import toy

TARGET = toy()


def engine_with(**config: object):
    return build_engine(TARGET, Config(drafter="ngram", k=3, **config))


def sequences(n: int, prompt: int = 10, tokens: int = 30) -> list[Sequence]:
    params = SamplingParams(max_tokens=tokens)
    return [Sequence(i, [(i + j) % 40 + 1 for j in range(prompt)], params) for i in range(n)]


def finish(engine, seqs: list[Sequence]) -> None:
    for seq in seqs:
        engine.add(seq)
    for _ in range(5000):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("a sequence starves")


def test_preemption_happens_and_loses_nothing() -> None:
    seqs = sequences(4)
    engine = engine_with(cache_tokens=110, max_length=45)
    finish(engine, seqs)
    assert sum(seq.stats.preempted for seq in seqs) > 0
    assert all(len(seq.generated) == 30 for seq in seqs)
    assert not engine.cache.rows


def test_a_long_prompt_does_not_stall_a_running_text() -> None:
    engine = engine_with(max_rows=16)
    short, long = sequences(1)[0], Sequence(9, [3] * 200, SamplingParams(max_tokens=5))
    engine.add(short)
    engine.step()
    engine.add(long)
    before = len(short.generated)
    for _ in range(5):
        engine.step()
        assert len(short.generated) > before  # every step moves it on
        before = len(short.generated)
    assert long.generated == []


def test_more_requests_than_places_wait_their_turn() -> None:
    seqs = sequences(7, tokens=8)
    engine = engine_with(max_batch=2)
    finish(engine, seqs)
    assert all(seq.finish == "length" for seq in seqs)


def test_a_cancelled_sequence_frees_its_slots_at_once() -> None:
    engine = engine_with()
    (seq,) = sequences(1)
    engine.add(seq)
    engine.step()
    engine.cancel(seq)
    assert seq.finish == "cancelled"
    assert seq.id not in engine.cache.rows
    assert not engine.busy
    engine.cancel(seq)  # twice does no harm
    engine.cache.check()


def test_a_waiting_sequence_can_be_cancelled() -> None:
    engine = engine_with(max_batch=1)
    first, second = sequences(2)
    finish_later = [first, second]
    for seq in finish_later:
        engine.add(seq)
    engine.step()
    engine.cancel(second)
    finish(engine, [])
    assert len(first.generated) == 30
    assert second.generated == []


def test_prompts_are_fed_in_large_chunks_where_nobody_waits() -> None:
    """Beside a running text a chunk is small, and the text moves on with every step."""
    engine = engine_with(max_rows=16, prompt_rows=64)
    first, second = (Sequence(i, [3 + i] * 150, SamplingParams(max_tokens=20)) for i in (8, 9))
    engine.add(first)
    engine.step()
    assert engine.target.plane.holds(8) == 64
    while not first.generated:
        engine.step()
    engine.add(second)
    held, before = 0, len(first.generated)
    for _ in range(5):
        engine.step()
        assert 0 < engine.target.plane.holds(9) - held <= 15
        assert len(first.generated) > before
        held, before = engine.target.plane.holds(9), len(first.generated)


@given(
    context=st.integers(1, 200_000), source=st.sampled_from([0, 512]), slot=st.integers(1, 200_000),
    room=st.integers(0, 10**11), length=st.none() | st.integers(1, 300_000), tokens=st.none() | st.integers(1, 10**6),
)  # fmt: skip
def test_a_cache_holds_one_sequence_and_never_more_than_the_memory(
    context: int, source: int, slot: int, room: int, length: int | None, tokens: int | None
) -> None:
    config = Config(max_length=length, cache_tokens=tokens)
    try:
        longest, slots = config.cache_size(context, source, slot, room)
    except ConfigError:
        return
    assert slots * slot <= room
    assert slots >= longest + source + 64
    assert longest <= context
    assert length in (None, longest)
    assert slots >= (tokens or 0)


def test_a_context_is_the_models_own_or_what_the_gpu_has_room_for() -> None:
    plenty, config = 10**12, Config()
    assert config.cache_size(131_072, 0, 100_000, None) == (8192, 4 * 8192)  # a CPU
    assert config.cache_size(131_072, 0, 100_000, plenty) == (131_072, 4 * 131_072)
    assert config.cache_size(131_072, 0, 100_000, 20 * 10**9) == (131_072, 200_000)
    assert config.cache_size(131_072, 0, 100_000, 5 * 10**9) == (50_000 - 64, 50_000)
    assert Config(cache_tokens=20_064).cache_size(131_072, 0, 100_000, plenty) == (20_000, 20_064)
    assert Config(cache_tokens=512).cache_size(131_072, 0, 100_000, plenty) == (8192, 8256)
    for asked in ({"max_length": 60_000}, {"cache_tokens": 60_000}):
        with pytest.raises(
            ConfigError, match=r"take 6\.0 GB, but the GPU has 5\.0 GB .* which is 50,000 tokens; lower "
        ):
            Config(**asked).cache_size(131_072, 0, 100_000, 5 * 10**9)
    with pytest.raises(ConfigError, match="lower max_length, or free memory"):
        config.cache_size(131_072, 0, 100_000, 10**7)


def test_max_length_beyond_the_context_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="context has 512"):
        engine_with(max_length=1000)


# ---------------------------------------------------------------- how much is drafted


def turn(room: int = 50, whole: bool = True) -> Turn:
    return Turn(Sequence(1, [1, 2], SamplingParams(max_tokens=room)), feed=1, whole=whole)


def test_fixed_leaves_room_for_the_bonus() -> None:
    assert Fixed(5).budget([turn()], Traits())[0].budget == 5
    assert Fixed(5).budget([turn(room=3)], Traits())[0].budget == 2
    assert Fixed(5).budget([turn(whole=False)], Traits())[0].budget == 0
    off = turn()
    off.seq.speculate = False
    assert Fixed(5).budget([off], Traits())[0].budget == 0


def pruned(controller: Adaptive, claims: list[float], rule: str = "match") -> int:
    """How many nodes of a chain with these claims are kept."""
    controller.credit.tokens = 100.0  # nothing is risky,
    (now,) = controller.budget([turn()], Traits())
    now.seq.rule = rule
    (tree,) = controller.prune([now], Draft.pack([chain(range(1, len(claims) + 1), survival=claims)])).trees
    return len(tree.tokens)


def taught(costs: PassCosts, claim: float, hits: float, name: str = "suffix") -> Adaptive:
    """A controller that has seen many nodes with this claim, of which this share was accepted."""
    controller = Adaptive(costs, name=name)
    tree = chain([1], survival=[claim])
    for i in range(300):
        hit = (i * 7 % 100) < hits * 100
        verdict = Verdict([0] if hit else [], [1], ACCEPTED if hit else REJECTED)
        controller.overall.add(tree, verdict.fates)
    return controller


FLAT = {1: 10.0, 2: 10.1, 16: 11.0, 32: 12.0}
STEEP = {1: 10.0, 2: 16.0, 32: 196.0}


def test_adaptive_keeps_much_where_rows_are_free() -> None:
    assert pruned(Adaptive(PassCosts(FLAT)), [0.9**i for i in range(1, 17)]) == 16


def test_adaptive_keeps_only_what_is_worth_its_row() -> None:
    controller = Adaptive(PassCosts(STEEP))
    assert pruned(controller, [0.9, 0.8, 0.5, 0.2]) == 2  # a row costs 60% of a pass
    assert pruned(controller, [0.4, 0.3]) == 0
    assert "break-even here is 60%" in controller.why


def test_adaptive_believes_experience_more_than_claims() -> None:
    assert pruned(taught(PassCosts(STEEP), claim=0.95, hits=0.1), [0.95]) == 0
    assert pruned(taught(PassCosts(STEEP), claim=0.4, hits=0.9), [0.4]) == 1


def drafting(controller: Adaptive, seconds: float) -> None:
    """The drafter's calls take this long for each token."""
    for k in (1, 4):
        controller.drafting[""].add(1, k, seconds * k)


def test_adaptive_without_sequences() -> None:
    """Where steps are in flight, it may be that no sequence takes a turn."""
    controller = taught(PassCosts(FLAT), claim=0.5, hits=0.0)
    for credit in (1.0, 0.0, -1.0):
        controller.credit.tokens = credit
        assert controller.budget([], Traits()) == []
        assert len(controller.budget([turn()], Traits())) == 1


def test_adaptive_does_not_ask_a_slow_drafter_that_is_wrong() -> None:
    controller = taught(PassCosts(FLAT), claim=0.5, hits=0.0)
    drafting(controller, 5.0)
    budgets = [controller.budget([turn()], Traits())[0].budget for _ in range(200)]
    assert not any(budgets)
    controller.credit.tokens = 4.0  # enough for a trial, which may cost a quarter of it
    budgets = [controller.budget([turn()], Traits())[0].budget for _ in range(Adaptive.MAX_PAUSE + 1)]
    assert next(filter(None, budgets)) == 1


def test_adaptive_asks_a_slow_drafter_that_is_right() -> None:
    controller = taught(PassCosts(FLAT), claim=0.9, hits=0.9)
    drafting(controller, 1.0)
    assert (
        controller.budget([turn()], Traits())[0].budget > 4
    )  # verdicts have shown it: credit is for what is not known


def test_a_drawn_token_is_never_discarded_for_its_own_value() -> None:
    """Under `reject`, what is kept must not change with the last token's own chance."""
    for last in (0.001, 0.3, 0.79):
        assert pruned(Adaptive(PassCosts(STEEP)), [0.9, 0.8, last], rule="reject") == 3
    assert pruned(Adaptive(PassCosts(STEEP)), [0.9, 0.8, 0.001], rule="match") == 2


def test_costs_lie_on_straight_lines_and_follow_what_happens() -> None:
    costs = PassCosts({1: 10.0, 4: 16.0})
    assert costs(2) == pytest.approx(12.0)
    assert costs(7) == pytest.approx(22.0)
    for _ in range(300):
        costs.refine(4, 20.0)
    assert costs(4) == pytest.approx(20.0, rel=0.02)
    assert costs(1) == 10.0  # the rows cost more, not the pass
    for _ in range(300):
        costs.refine(1, 12.0)
    assert costs(4) == pytest.approx(24.0, rel=0.02)  # what makes a plain pass slower makes all slower


def test_an_empty_prompt_is_refused_and_nothing_waits_for_it() -> None:
    """Without a token there is no row whose logits could choose the first one: such a text would never end."""
    engine = engine_with()
    with pytest.raises(ConfigError, match="The prompt is empty"):
        engine.add(Sequence(1, []))
    assert not engine.busy
