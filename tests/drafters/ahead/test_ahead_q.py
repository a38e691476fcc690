"""Drafting ahead under `reject` and `block`: the distribution of the text is exactly the target's, for every q.

Distributions are enumerated as in test_verify, with the q that `ahead` samples from (truncated and tilted). The q that
the engine receives is compared with the draft model itself, and a planted bug shows that the check can fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from outrider import SamplingParams
from outrider.backends.rows import rows_of
from outrider.config import Config
from outrider.drafters.ahead.forks import NO_TILT, Tilt, draft_distribution
from outrider.drafters.ahead.shared_queue import QueueSizes, SharedQueue
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.engine.judge import RULES
from outrider.engine.sampling import DRAFT, distribution, draw, key
from outrider.engine.step import Engine
from outrider.errors import ConfigError
from outrider.llm import build_engine
from outrider.testing import Scenario, decode
from outrider.types import Sequence, Step, Tree, chain

from support.laws import Drafting, Toy, V, worst_error
from support.toys import toy

TARGET, DRAFTER = toy(), toy(blur=0.1)
TILTS = [Tilt(1, 0.0), Tilt(1, 0.5), Tilt(2, 0.25), NO_TILT]


# ---------------------------------------------------------------- the distribution of the text


def drafting(tilt: Tilt, support: int, true_q: bool = True) -> Drafting:
    """Every chain with its probability under the adapted q; with true_q=False the judge gets the model's own q."""

    def drafts(toy: Toy, k: int) -> Iterator[tuple[Tree, float]]:
        for tokens in itertools.product(range(V), repeat=k):
            bare = torch.stack([toy.q(tokens[:i]) for i in range(k)])  # [k, V]
            real = torch.stack([draft_distribution(q, tilt, support).dense(V) for q in bare])
            probability = float(torch.stack([real[i, token] for i, token in enumerate(tokens)]).prod())
            if probability > 0:
                yield chain(tokens, q=real if true_q else bare), probability

    return drafts


@pytest.mark.parametrize("support", [2, V])
@pytest.mark.parametrize("tilt", TILTS, ids=str)
@pytest.mark.parametrize("rule", ["reject", "block"])
def test_the_distribution_is_the_targets(rule: str, tilt: Tilt, support: int) -> None:
    assert worst_error(RULES[rule], drafting(tilt, support), ks=(1, 2)) < 1e-12


def test_a_judge_with_another_q_is_detected() -> None:
    assert worst_error(RULES["reject"], drafting(Tilt(1, 0.25), V, true_q=False), ks=(1, 2)) > 0.01


def test_q_is_truncated_and_tilted() -> None:
    q = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    assert torch.equal(draft_distribution(q).dense(4), q)  # nothing is truncated: the very same numbers
    expected = torch.tensor([0.0, 0.2, 0.0, 0.3], dtype=torch.float64) / 0.5
    assert torch.allclose(draft_distribution(q, Tilt(1, 0.5), support=2).dense(4), expected, atol=1e-15)
    sure = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert torch.equal(draft_distribution(sure, Tilt(2, 0.0)).dense(4), sure)  # no other token


def test_a_tilt_trades_acceptance_for_hits() -> None:
    """After a rejection the target's token has a fork more often, and rejections are more frequent."""
    generator, rates = torch.Generator().manual_seed(1), {}
    for share in (1.0, 0.25):
        accepted = hits = rejected = 0.0
        for _ in range(200):
            scores = 2 * torch.randn(12, generator=generator, dtype=torch.float64)
            blurred = scores + 0.5 * torch.randn(12, generator=generator, dtype=torch.float64)
            p, q = torch.softmax(scores, 0), torch.softmax(blurred, 0)
            drawn, forks = draft_distribution(q, Tilt(2, share)).dense(12), q.topk(3).indices.tolist()
            residual = torch.clamp(p - drawn, min=0)
            for token in range(12):
                lost = float(drawn[token] - torch.minimum(p, drawn)[token])  # sampled and rejected
                ready = [fork for fork in forks if fork != token][:2]
                hits += lost * float(residual[ready].sum() / residual.sum())
                rejected += lost
            accepted += float(torch.minimum(p, drawn).sum())
        rates[share] = hits / rejected, accepted
    assert rates[0.25][0] > rates[1.0][0] + 0.1, rates
    assert rates[0.25][1] < rates[1.0][1], rates


def test_q_crosses_the_shared_queue() -> None:
    sizes = QueueSizes(1, 4, 2)
    queue = SharedQueue(sizes, bytearray(sizes.bytes))
    q = torch.softmax(torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), 0)
    long, short = draft_distribution(q), draft_distribution(torch.tensor([0.0, 0.25, 0.75], dtype=torch.float64))
    queue.write_q(1, 0, long)
    queue.write_q(1, 1, long)
    queue.write_q(1, 1, short)  # overwrites all of the longer one
    queue.write_q(1, 2, None)
    dense = queue.read_q(1, range(3), 100)
    assert torch.equal(dense[0], long.dense(100))
    assert torch.equal(dense[1], short.dense(100))
    assert not dense[2].any()


# ---------------------------------------------------------------- in the engine


class Listener:
    reads_logits = reads_guesses = False

    def __init__(self) -> None:
        self.drafts: list[tuple[Sequence, list[int], Tree]] = []

    def observe(self, step: Step) -> None:
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None and tree.tokens:
                self.drafts.append((turn.seq, turn.seq.tokens[: len(turn.seq.tokens) - len(verdict.tokens)], tree))


def engine_with(rule: str, listeners: tuple[Listener, ...] = (), **options: object) -> Engine:
    options = {"draft_model": DRAFTER, "ahead_fallback": "", "ahead_always": True, "ahead_wait": 5} | options
    engine = build_engine(TARGET, Config(drafter="ahead", k=4, rule=rule, options=options), listeners=listeners)
    assert engine.drafter.host.wait_ready(30)
    return engine


def logits_after(text: list[int], seq: Sequence) -> torch.Tensor:
    """The draft model's logits after a text, from a fresh pass. [V]"""
    cache, fresh = Cache(256, 2, 256), Sequence(1, text, seq.params, seed=seq.seed)
    plane = cache.add_plane(*DRAFTER.plane_shape)
    cache.open(fresh)
    cache.reserve(fresh, len(text), 0)
    batch = BatchBuilder(cache)
    batch.pending(fresh, 0, len(text), want=True)
    return DRAFTER.forward(rows_of(batch), plane).logits[0].float()


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_engine_receives_the_q_that_was_sampled_from(share: float) -> None:
    listener, params = Listener(), SamplingParams(temperature=2.0, max_tokens=30)
    engine = engine_with("reject", (listener,), ahead_c=share)
    decode(engine, Scenario("x", batch=2), params, "reject")
    sources = {tree.source for _, _, tree in listener.drafts}
    assert sources == {"ahead", "ahead:now"}
    for seq, text, tree in listener.drafts[::3]:
        assert tree.q is not None
        for i, token in enumerate(tree.tokens):
            before = Sequence(1, text, params, seed=seq.seed, prompt_len=seq.prompt_len)
            q = distribution(logits_after([*text, *tree.tokens[:i]], seq), before, tree.tokens[:i])
            expected = draft_distribution(q, Tilt(2, share)).dense(q.shape[0])  # 8 forks over 5 outcomes
            assert torch.allclose(tree.q[i], expected, atol=1e-6)
            assert token == draw(tree.q[i], key(seq.seed, i, DRAFT, len(text)))


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_the_same_text_whatever_was_ready(rule: str) -> None:
    """Prepared or just in time, with many forks or few: the same samples, so the same text from the same seed."""
    params, scenario, texts = SamplingParams(temperature=2.0, max_tokens=20), Scenario("x", batch=2), []
    for ahead, forks, fallback in ((True, 16, ""), (False, 8, ""), (True, 2, "suffix,ngram")):
        engine = engine_with(rule, ahead_forks=forks, ahead_fallback=fallback)
        engine.drafter.profitability.ahead = ahead
        texts.append(decode(engine, scenario, params, rule))
        facts = engine.drafter.notes()["ahead"]
        assert (facts["hit_rate"] is not None) == ahead
        assert facts["just_in_time"] > 0
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("c", [-0.1, 1.5, "half", True])
def test_c_is_a_share(c: object) -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        engine_with("reject", ahead_c=c)
