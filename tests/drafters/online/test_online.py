"""A drafter that learns: whatever happens in an update the text stays the same, and acceptance rises."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.backends.loaded_weights import output_norm, output_rows
from outrider.config import Config
from outrider.drafters._learning import learner as learning, store
from outrider.drafters._learning.adapter import FrozenOutput, Labels, Mix, copied, loss
from outrider.drafters._learning.buffer import Records, Ring, VerifiedNodes, likeliest
from outrider.drafters._learning.learner import Learner, LearningPlan
from outrider.drafters.online.drafter import Online
from outrider.drafters.online.tap import Tap
from outrider.engine.step import Engine
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.llm import build_engine
from outrider.testing import SCENARIOS, decode
from outrider.types import SamplingParams, Sequence

from support.learning_heads import EAGER, alpha, ask, stream
from support.toys import reference, toy

TARGET = toy()
ALONE = SCENARIOS[0]


def engine_of(k: int = 3, **options: Any) -> Engine:
    return build_engine(TARGET, Config(drafter="online", k=k, options=EAGER | options))


def drafter_of(engine: Engine) -> Online:
    assert isinstance(engine.drafter, Online)
    return engine.drafter


# ------------------------------------------------------------ the text


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_rules_that_read_q_get_it(rule: str) -> None:
    engine = build_engine(TARGET, Config(drafter="online", k=3, rule=rule, options=EAGER))
    decode(engine, ALONE, SamplingParams(temperature=0.9, max_tokens=20), rule)
    assert not engine.failures
    assert drafter_of(engine).learner.report.updates == 0 or drafter_of(engine).learner.report.failures == 0


def test_the_target_is_left_alone() -> None:
    before = [TARGET.embedding.clone(), TARGET.norm.clone(), TARGET.layers[0].mlp_norm.clone()]
    engine = engine_of()
    alpha(engine, stream(10))
    assert drafter_of(engine).learner.report.updates > 5
    for old, new in zip(before, [TARGET.embedding, TARGET.norm, TARGET.layers[0].mlp_norm], strict=True):
        assert torch.equal(old, new)


# ------------------------------------------------------------ learning


@pytest.fixture(scope="module")
def taught() -> Engine:
    """An engine that has learnt a while."""
    engine = engine_of()
    alpha(engine, stream(25))
    return engine


def test_acceptance_rises(taught: Engine) -> None:
    late, never = alpha(taught, stream(10), 100), alpha(engine_of(learn=False), stream(10), 100)
    assert late > never + 0.2, (late, never)
    assert drafter_of(taught).learner.report.failures == 0


def test_plain_passes_teach_a_tap() -> None:
    engine = engine_of(k=0)
    for i, prompt in enumerate(stream(10)):
        ask(engine, prompt, i)
    report = drafter_of(engine).learner.report
    assert report.updates > 0
    assert report.records > 0


def test_what_is_recorded_is_what_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[VerifiedNodes] = []
    monkeypatch.setattr(Learner, "add", lambda self, seen: heard.append(seen))
    engine = engine_of(k=4)
    seqs = [ask(engine, prompt, i) for i, prompt in enumerate(stream(8))]
    drafted = [(d, a) for seen in heard for d, a in zip(seen.drafted, seen.accepted, strict=True) if d >= 0]
    assert len(drafted) == sum(seq.stats.reached for seq in seqs)  # never beyond the first reject
    assert sum(a for _, a in drafted) == sum(seq.stats.accepted for seq in seqs)
    for seen in heard:  # the teacher of a greedy node that was accepted says just that
        for row, (token, accepted) in enumerate(zip(seen.drafted, seen.accepted, strict=True)):
            assert token < 0 or (int(seen.logits[row].argmax()) == token) == accepted


def test_a_request_may_opt_out() -> None:
    engine = engine_of()
    for i, prompt in enumerate(stream(10)):
        ask(engine, prompt, i, learn=False)
    learner = drafter_of(engine).learner
    assert (learner.report.records, learner.report.updates, len(learner.ring), len(learner.inbox)) == (0, 0, 0, 0)


def test_a_batch_of_both_kinds_learns_from_one() -> None:
    heard: list[int] = []
    engine = engine_of()
    add = drafter_of(engine).learner.add
    drafter_of(engine).learner.add = lambda seen: (heard.append(seen.size), add(seen))[1]  # type: ignore[method-assign]
    seqs = [Sequence(i, p, SamplingParams(max_tokens=20, learn=i == 0), seed=i) for i, p in enumerate(stream(2))]
    for seq in seqs:
        engine.add(seq)
    while engine.busy:
        engine.step()
    asked = seqs[0].stats
    assert asked.reached <= sum(heard) <= asked.reached + asked.steps  # a step without a draft teaches one token


# ------------------------------------------------------------ when things go wrong


def failing(fault: str) -> Callable[..., Any]:
    def broken(scores: torch.Tensor, *rest: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no memory left")
        if fault == "slow":
            time.sleep(0.002)
            return scores.sum() * 0
        return scores.sum() * math.nan

    return broken


@pytest.mark.parametrize("fault", ["raises", "nan", "slow"])
def test_a_bad_update_changes_no_text_and_rolls_back(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "loss", failing(fault))
    params = SamplingParams(max_tokens=40)
    engine = engine_of(**({"learn_cap_ms": 1.0} if fault == "slow" else {}))
    drafter = drafter_of(engine)
    before = copied(drafter.learner.live)
    for _ in range(4):
        assert decode(engine, ALONE, params) == reference(TARGET, ALONE, params)
    report = drafter.learner.report
    if fault != "slow":
        assert (report.state, report.failures, report.rollbacks) == ("stopped", 3, 3)
        assert "3 updates in a row" in report.why
        assert all(torch.equal(before[name], weight) for name, weight in drafter.learner.live.items())
    assert drafter.report()["why"] == report.why
    assert not engine.failures


def test_learning_goes_on_after_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = learning.loss, iter(range(10**9))
    monkeypatch.setattr(learning, "loss", lambda *a: failing("raises")(*a) if next(calls) % 40 == 9 else real(*a))
    engine = engine_of()
    alpha(engine, stream(16))
    report = drafter_of(engine).learner.report
    assert report.state == "on"
    assert report.failures > 0
    assert report.updates > 10
    assert "no memory left" in report.why


def test_an_interrupted_update_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    alpha(engine, stream(10))
    learner, real = drafter_of(engine).learner, learning.loss
    best = learner.weights()

    def interrupted(*_: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(learning, "loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        alpha(engine, stream(20), 100)
    monkeypatch.setattr(learning, "loss", real)
    assert all(torch.equal(best[name], weight.detach()) for name, weight in learner.trained.items())
    again = engine_of()
    again.drafter.inherit(engine.drafter)  # as `LLM` does when it starts over
    learner.swap()
    assert drafter_of(again).learner is learner
    assert ask(again, stream(1)[0]).tokens == ask(engine_of(learn=False), stream(1)[0]).tokens
    assert drafter_of(again).learner.report.state == "on"


def learner_with(plan: LearningPlan, clock: Callable[[], float] = time.perf_counter) -> Learner:
    """One that has seen enough, over a table of its own."""
    torch.manual_seed(0)
    table = torch.randn(32, 16)
    frozen = FrozenOutput.of(table, torch.arange(32), 40, torch.ones(16), 1e-6, None)
    made = Learner(frozen, frozen.initial(8), plan, clock, clock)
    for _ in range(20):
        made.add(
            VerifiedNodes([*torch.randn(4, 16)], [0] * 4, [1, 2, 3, -1], [True, False, True, False], torch.randn(4, 40))
        )
        made._take()
    made.account(1e9)
    return made


def hits(made: Learner) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the latest records the trained weights get right, and which what drafts. [n] each"""
    looking = made._hits(made.ring.latest(80))
    while True:
        try:
            next(looking)
        except StopIteration as end:
            return end.value


def test_the_cap_is_kept_by_the_clock() -> None:
    now = 0.0

    def clock() -> float:
        return now

    made = learner_with(LearningPlan(every=1, cap=0.0025, slice=4, batch=64, judge_every=2), clock)
    advance, spans = made._advance, []

    def slow() -> None:
        nonlocal now
        advance()
        now += 0.001  # every slice takes a millisecond

    made._advance = slow  # type: ignore[method-assign]
    for _ in range(800):
        made.waiting, begin = 1, now
        made.work()
        spans.append(now - begin)
    assert max(spans) <= 0.0025
    assert max(spans) == made.report.slowest
    assert made.report.updates > 10


def test_a_slice_that_does_not_fit_is_made_smaller_and_then_learning_stops() -> None:
    now = 0.0
    made = learner_with(LearningPlan(every=1, cap=0.001, slice=16), lambda: now)
    advance = made._advance

    def slow() -> None:
        nonlocal now
        advance()
        now += 0.5

    made._advance = slow  # type: ignore[method-assign]
    for _ in range(2000):
        made.waiting = 1
        made.work()
    assert made.slice == 4
    assert made.report.state == "stopped"
    assert "raise learn_cap_ms" in made.report.why


def test_the_share_of_time_is_kept() -> None:
    made = learner_with(LearningPlan(every=1, share=0.1))
    made.report.seconds, made.waiting = 1e8 + 0.1, 1
    assert not made.due
    made.account(2.0)
    assert made.due


def test_weights_that_got_worse_go_back() -> None:
    made = learner_with(LearningPlan(every=1, judge_every=1, share=1e9, cap=1e9))
    records = made.ring.latest(80)
    w = made.frozen.scores(made.live, records.state, records.previous, made.frozen.table).argmax(-1)  # [n]
    made.ring.fields.top_ids[: len(w), 0] = w  # what drafts is right
    with torch.no_grad():
        made.trained["state"].neg_()
    ours, theirs = hits(made)
    made._compare(ours, theirs)
    assert made.report.rollbacks == 1
    assert made.report.why == "acceptance fell"
    assert torch.equal(made.trained["state"].detach(), made.live["state"])


# ------------------------------------------------------------ the pieces


def test_rewards_have_the_right_sign() -> None:
    for accepted, rises in ((True, True), (False, False)):
        scores = torch.zeros(1, 3, requires_grad=True)
        p = torch.full((1, 3), 1 / 3)
        one = Labels(p, torch.ones(1), torch.tensor([1]), torch.tensor([accepted]), torch.tensor([0]))
        loss(scores, one, Mix(0.0, 0.0, 1.0, 0.0), baseline=0.5).backward()  # type: ignore[no-untyped-call]
        assert scores.grad is not None
        assert (float(scores.grad[0, 1]) < 0) == rises  # descent goes the other way


def test_everything_that_is_trained_can_learn() -> None:
    made = learner_with(LearningPlan())
    records = made.ring.latest(32)
    candidates = made.frozen.candidates(records, made.plan.top)
    for _ in range(2):  # the factor behind the zero one moves in the second step
        said = made.frozen.scores(made.trained, records.state, records.previous, candidates.rows)
        loss(said, candidates.labels(records, made.plan.schedule.temperature), made.plan.schedule.at(0), 0.5).backward()
        made.optimiser.step()
    assert all(w.grad is not None and bool(w.grad.abs().sum() > 0) for w in made.trained.values())


@pytest.mark.parametrize("size", [48, 8192, 49152, 5000])
def test_the_likeliest_are_found(size: int) -> None:
    logits = torch.randn(3, size)
    ids, values = likeliest(logits, 16)
    best = logits.topk(16)
    assert torch.equal(values, best.values)
    assert torch.equal(logits.gather(1, ids), best.values)


def test_the_ring_is_bounded() -> None:
    ring = Ring(8, 4, torch.zeros(1), top=2)
    for i in range(20):
        one = torch.full((1,), i)
        ring.add(Records(torch.full((1, 4), float(i)), one, one, one > 0, one[:, None].repeat(1, 2), torch.ones(1, 2)))
    assert len(ring) == 8
    assert ring.latest(3).previous.tolist() == [17, 18, 19]
    assert set(ring.fields.previous.tolist()) == set(range(12, 20))


# ------------------------------------------------------------ kept, loaded, switched off


def test_what_was_learnt_is_kept_and_loaded(taught: Engine, tmp_path: Path) -> None:
    drafter_of(taught).save(tmp_path / "learnt", model="toy")
    facts = store.facts_of(tmp_path / "learnt")
    assert facts["model"] == "toy"
    assert facts["learning"]["updates"] > 0
    loaded, fresh = engine_of(learn=False, learn_from=tmp_path / "learnt"), engine_of(learn=False)
    assert alpha(loaded, stream(10)) > alpha(fresh, stream(10)) + 0.1
    assert drafter_of(loaded).report()["state"] == "off"
    assert drafter_of(loaded).report()["records"] == 0
    drafter_of(taught).save(tmp_path / "learnt", model="toy")  # again: it is replaced


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    drafter_of(engine_of()).save(tmp_path / "learnt")
    with pytest.raises(ModelError, match="another drafter"):
        engine_of(learn_from=tmp_path / "learnt", draft_vocab=20)
    with pytest.raises(OutriderError, match="holds no learnt weights"):
        engine_of(learn_from=tmp_path / "nowhere")
    (tmp_path / "learnt" / store.WEIGHTS).write_bytes(b"no")
    with pytest.raises(ModelError, match="cannot be read"):
        engine_of(learn_from=tmp_path / "learnt")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutriderError, match="other files"):
        drafter_of(engine_of()).save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_nothing_on_disk_tells_of_requests(taught: Engine, tmp_path: Path) -> None:
    drafter_of(taught).save(tmp_path / "learnt")
    assert {each.name for each in (tmp_path / "learnt").iterdir()} == {store.WEIGHTS, store.FACTS}
    frozen = drafter_of(taught).frozen
    weights = store.load(tmp_path / "learnt", frozen, frozen.initial(64))
    assert weights.keys() == {"state", "token", "norm", "gate", "down", "up"}


@pytest.mark.parametrize("option", ["learn_every", "learn_cap_ms", "learn_share", "learn_rate"])
def test_numbers_are_checked(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        engine_of(**{option: -1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_fresh_tap_says_what_the_target_said(dtype: torch.dtype) -> None:
    """Its table was once cut down to whole numbers beside a target in eight bits."""
    ids = torch.arange(0, TARGET.config.vocab_size, 2)
    target = toy(dtype=torch.float64)
    tap = Tap(target, ids, dtype)
    fresh = tap.frozen.initial(4)
    tap.live = lambda: fresh
    state = torch.randn(64, TARGET.config.hidden_size, generator=torch.Generator().manual_seed(1))  # [n, H]
    scores, _ = tap.guess(state, [1] * 64)
    unit = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + TARGET.config.norm_eps)
    exact = (unit * output_norm(target)) @ output_rows(target, ids).T
    torch.testing.assert_close(
        scores.double(), exact, rtol=0, atol=float(exact.abs().max()) * (1e-5 if dtype.is_floating_point else 0.03)
    )


def test_only_what_was_right_more_often_drafts() -> None:
    """Updates alone change nothing that drafts: a comparison on unseen records does."""
    made = learner_with(LearningPlan(every=1, judge_every=1, share=1e9, cap=1e9))
    before = copied(made.live)
    truth = made.frozen.scores(made.trained, *made.ring.latest(80)[:2], made.frozen.table).argmax(-1)  # [n]
    made.ring.fields.top_ids[: len(truth), 0] = truth
    with torch.no_grad():
        made.live["state"].neg_()  # what drafts is wrong now, what is trained is right
    made._compare(*hits(made))
    made.swap()
    assert torch.equal(made.live["state"], before["state"])
    again = copied(made.live)
    made._compare(*hits(made))  # as good as: nothing changes hands
    assert made._ready is None
    assert all(torch.equal(again[name], made.live[name]) for name in again)


def test_the_latest_records_are_not_learnt_from() -> None:
    ring = Ring(8, 4, torch.zeros(1))
    for i in range(13):  # once around and on
        numbers = torch.full((1,), i)
        ring.add(
            Records(
                torch.full((1, 4), float(i)),
                numbers,
                numbers,
                numbers > 0,
                numbers[:, None].repeat(1, ring.top),
                torch.zeros(1, ring.top),
            )
        )
    dice = torch.Generator().manual_seed(0)
    assert set(ring.sample(200, dice, 3).drafted.tolist()) == {5, 6, 7, 8, 9}
    assert set(ring.sample(200, dice).drafted.tolist()) == {5, 6, 7, 8, 9, 10, 11, 12}
    assert set(ring.sample(200, dice, 8).drafted.tolist()) == {5, 6, 7, 8, 9, 10, 11, 12}


def test_a_comparison_that_does_not_fit_is_cut_smaller() -> None:
    now = 0.0
    made = learner_with(LearningPlan(every=1, cap=0.0025, slice=4, batch=16, judge_every=1), lambda: now)
    advance, spans = made._advance, []

    def slow() -> None:
        nonlocal now
        judging = made._next == "judge"
        advance()
        now += 1e-5 * made.judge_rows if judging else 0.0005  # it looks at all words

    made._advance = slow  # type: ignore[method-assign]
    for _ in range(400):
        made.waiting, begin = 1, now
        made.work()
        spans.append(now - begin)
    assert made.judge_rows == 64
    assert max(spans[100:]) <= 0.0025
    assert made.report.updates > 10
