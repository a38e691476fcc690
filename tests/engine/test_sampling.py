"""Choices are draws from the right law, and the same draws for every holder of the seed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from outrider.backends import ops
from outrider.backends.toy import RandomWeights, toy
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.engine.sampling import (
    CHOICE,
    COIN,
    KeyedRandom,
    adjust,
    candidates,
    choose,
    distribution,
    draw,
    filters,
    gumbel,
    key,
    log_probabilities,
    ranked,
    uniform,
)
from outrider.errors import ConfigError
from outrider.llm import build_engine
from outrider.types import Output, SamplingParams, Sequence

from support.examples import examples

V = 16


def sequence(tokens: tuple[int, ...] = (1, 2, 3), seed: int = 0, prompt: int = 3, **params: object) -> Sequence:
    seq = Sequence(1, list(tokens), SamplingParams(**params), seed=seed, ends=frozenset({0}))
    seq.prompt_len = prompt
    return seq


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 2


def test_noise_is_a_pure_function_of_its_key() -> None:
    noise_key = key(7, 100, CHOICE)
    every = gumbel(noise_key, torch.arange(V))
    assert torch.equal(gumbel(noise_key, torch.tensor([5])), every[5:6])
    assert torch.equal(gumbel(noise_key, torch.tensor([9, 2])), every[[9, 2]])
    assert not torch.equal(gumbel(key(7, 101, CHOICE), torch.arange(V)), every)
    assert not torch.equal(gumbel(key(8, 100, CHOICE), torch.arange(V)), every)
    assert not torch.equal(gumbel(key(7, 100, COIN), torch.arange(V)), every)


@examples(120)
@given(st.integers(1, 700), st.integers(-(2**63), 2**63 - 1), st.sampled_from([0.02, 0.3, 0.8, 1.0, 3.0, 90.0]))
def test_a_backends_own_choices_are_the_same(width: int, seed: int, temperature: float) -> None:
    """A kernel that looks at few logarithms chooses what comparing all noised scores does; ties go to the first."""
    rows = 3 * torch.randn(4, width, generator=torch.Generator().manual_seed(seed % 2**63))
    rows[1] = rows[1].round()  # ties
    rows[2, 1:] = -math.inf
    seq = sequence(seed=seed, temperature=temperature)
    keys = [key(seed, len(seq.tokens), CHOICE)] * 4
    chosen = ops.choose(rows, rows.argmax(-1).tolist(), keys, [temperature] * 3 + [0.0])
    if chosen is None:
        pytest.skip("there are no native kernels here")
    assert chosen == [*(choose(row, seq, []) for row in rows[:3]), int(rows[3].argmax())]


@pytest.mark.parametrize(
    ("params", "known"),
    [
        ({"temperature": 0.8}, True), ({}, True), ({"top_p": 0.9}, True),
        ({"temperature": 0.8, "top_p": 0.9}, False), ({"temperature": 0.8, "logit_bias": {3: 1.0}}, False),
    ],
)  # fmt: skip
def test_the_backend_chooses_where_temperature_and_noise_decide(params: dict[str, object], known: bool) -> None:
    """Judging then costs a table lookup; it took half as long as the passes."""
    if ops.choose(torch.zeros(1, 2), [0], [1], [1.0]) is None:
        pytest.skip("there are no native kernels here")
    outputs: list[Output] = []
    config = toy().config
    model = Transformer(config, RandomWeights(config, 1), torch.float32)
    engine = build_engine(model, Config(drafter="ngram", k=3))
    launch = engine.target.launch

    def seen(*arguments: Any) -> Any:
        pending = launch(*arguments)
        return SimpleNamespace(wait=lambda: outputs.append(pending.wait()) or outputs[-1])

    engine.target.launch = seen
    engine.add(Sequence(1, [1, 2, 3, 1, 2], SamplingParams(max_tokens=12, **params), seed=5))
    while engine.busy:
        engine.step()
    assert all((choice >= 0) == known for output in outputs for choice in output.choices)


def test_noise_is_gumbel() -> None:
    noise = gumbel(key(1, 1, CHOICE), torch.arange(200_000))
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    assert torch.isfinite(noise).all()


def test_coins_are_uniform_and_independent_of_neighbours() -> None:
    coins = torch.tensor([uniform(key(3, i, COIN)) for i in range(20_000)], dtype=torch.float64)
    assert abs(float(coins.mean()) - 0.5) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([coins[1:], coins[:-1]]))[0, 1])) < 0.02
    assert 0 < float(coins.min()) < float(coins.max()) < 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.9}])
def test_choices_follow_the_law(params: dict) -> None:
    """A chi-square test with a fixed seed: deterministic, and far from its threshold when the law is right."""
    z, n = logits(3), 4_000
    seq, chosen = sequence(temperature=0.9, **params), list[int]()
    p = distribution(z, seq, [])
    for seq.seed in range(n):
        chosen.append(choose(z, seq, []))
    counts = torch.bincount(torch.tensor(chosen), minlength=V).double()
    assert counts[p == 0].sum() == 0
    kept = p > 5 / n
    chi = float((((counts - n * p) ** 2) / (n * p))[kept].sum())
    df = int(kept.sum()) - 1
    assert chi < df + 5 * math.sqrt(2 * max(df, 1))


@given(seed=st.integers(0, 2**40), scale=st.floats(0.1, 20), temperature=st.floats(0.05, 5))
@settings(max_examples=200, deadline=None)
def test_hashing_only_the_hopeful_changes_nothing(seed: int, scale: float, temperature: float) -> None:
    """`choose` leaves out tokens that cannot win; the full argmax must agree."""
    z = torch.randn(300, generator=torch.Generator().manual_seed(seed % 2**31)) * scale
    seq = sequence(seed=seed, temperature=temperature)
    ids, scores = candidates(z, seq)
    full = int(ids[(scores + gumbel(key(seed, 3, CHOICE), ids)).argmax()])
    assert choose(z, seq, []) == full


def test_ranked_leads_with_the_choice() -> None:
    for seed in range(50):
        for temperature in (0.0, 0.7, 1.5):
            seq = sequence(seed=seed, temperature=temperature)
            order = ranked(logits(seed), seq, [4], 5)
            assert order[0][0] == choose(logits(seed), seq, [4])
            assert len({token for token, _ in order}) == 5
            assert [c for _, c in order] == sorted((c for _, c in order), reverse=True)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_spare_choices_change_nothing_about_the_first(temperature: float) -> None:
    for seed in range(20):
        seq = sequence(seed=seed, temperature=temperature)
        best, more = ranked(8 * logits(seed), seq, [4], 2), ranked(8 * logits(seed), seq, [4], 2, spare=3)
        assert more[:2] == best
        assert 2 <= len(more) <= 5
        assert [share for _, share in more] == sorted((share for _, share in more), reverse=True)


def test_ties_go_to_the_lowest_id() -> None:
    flat = torch.zeros(V)
    assert choose(flat, sequence(), []) == 0
    assert int(flat.max(-1).indices) == 0


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    z = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    ids, _ = candidates(z, sequence(temperature=1.0, top_p=0.8))
    assert ids.tolist() == [0, 1]
    ids, _ = candidates(z, sequence(temperature=1.0, top_p=0.81))
    assert ids.tolist() == [0, 1, 2]


def test_min_p_is_relative_to_the_likeliest() -> None:
    z = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    ids, _ = candidates(z, sequence(temperature=1.0, min_p=0.31))
    assert ids.tolist() == [0, 1]


def test_repetition_penalty_is_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    z = logits(5)
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[1, 2, 3, 9]]), z[None].clone())[0]
    assert torch.allclose(adjust(z, sequence(repetition_penalty=1.4), [9]), expected)


def test_presence_and_frequency_count_output_only() -> None:
    z = torch.zeros(V)
    seq = sequence((1, 2, 5, 5), prompt=2, presence_penalty=0.5, frequency_penalty=0.25)
    changed = adjust(z, seq, [5, 6])
    assert changed[5] == -(0.5 + 0.25 * 3)
    assert changed[6] == -(0.5 + 0.25)
    assert changed[1] == changed[2] == 0
    assert z.abs().sum() == 0  # the target's own logits stay as they are


def test_min_tokens_and_bad_words_ban() -> None:
    seq = sequence(min_tokens=2)
    assert adjust(logits(), seq, [4])[0] == -math.inf
    assert adjust(logits(), seq, [4, 4])[0] > -math.inf
    seq.bad_words = ((7,), (4, 8))
    assert adjust(logits(), seq, [4])[7] == adjust(logits(), seq, [4])[8] == -math.inf
    assert adjust(logits(), seq, [5])[8] > -math.inf


def test_dice_never_repeat_a_number_between_steps() -> None:
    seq = sequence()
    first = [uniform_of(seq, depth) for depth in range(5)]
    seq.tokens.append(4)
    second = [uniform_of(seq, depth) for depth in range(5)]
    assert not set(first) & set(second)


def uniform_of(seq: Sequence, depth: int) -> float:
    """The coin's number, found by bisection through the public verb."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if KeyedRandom(seq).flip(depth, middle) else (middle, high)
    return round(low, 9)


def test_draw_follows_its_weights() -> None:
    p = torch.tensor([0.0, 1.0, 3.0, 0.0])
    counts = [0] * 4
    for i in range(4000):
        counts[draw(p, key(1, i, COIN))] += 1
    assert counts[0] == counts[3] == 0
    assert abs(counts[2] / 4000 - 0.75) < 0.03


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": -1}, {"temperature": math.nan}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": -0.1}, {"n": 0}),
        *({"max_tokens": 0}, {"repetition_penalty": 0}, {"stop": [""]}, {"seed": 2**63}, {"logprobs": -1}),
    ],
)
def test_wrong_parameters_are_a_sentence(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=r"must be|empty"):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 2.5}, {"temperature": None}, {"n": True}, {"logit_bias": {1: math.nan}}]
)
def test_wrong_types_are_a_sentence(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=r"must be|not a number"):
        SamplingParams(**wrong)


def test_end_tokens_beyond_the_vocabulary_do_no_harm() -> None:
    seq = sequence(min_tokens=2)
    seq.ends = frozenset({0, V + 5})
    assert adjust(logits(), seq, [])[0] == -math.inf


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.8}, False),
        ({"temperature": 0.8, "top_k": 5}, True),
        ({"temperature": 0.8, "top_p": 0.9}, True),
        ({"temperature": 0.8, "min_p": 0.1}, True),
        ({"temperature": 0.8, "repetition_penalty": 1.2}, False),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.1}, False),  # at temperature 0 the best token is always left
    ],
)
def test_filters_look_at_more_than_noise_and_temperature(params: dict[str, float], expected: bool) -> None:
    assert filters(Sequence(1, [1], SamplingParams(**params))) is expected


def test_log_probabilities_of_a_row_do_not_depend_on_others() -> None:
    """Under the raw logits, the likeliest first and of equal ones the lowest id; the same bits alone and in a batch."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    logits[1, 7] = logits[1, 250] = logits[1, 20] = 9.0
    logits[2, :] = 0.0
    logits[3, 5:] = -math.inf
    tokens = torch.tensor([4, 250, 3, 9, 0])
    ids, values = log_probabilities(logits, tokens, 4)
    assert ids[:, 0].tolist() == tokens.tolist()
    assert ids[1, 1:4].tolist() == [7, 20, 250]
    assert ids[2, 1:].tolist() == [0, 1, 2, 3]
    exact = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(values, exact.gather(1, ids).float(), rtol=1e-6, atol=1e-9)
    assert torch.equal(exact.topk(4).values.float(), exact.gather(1, ids[:, 1:]).float())
    for i in range(5):
        alone = log_probabilities(logits[i : i + 1], tokens[i : i + 1], 4)
        assert torch.equal(alone[0][0], ids[i])
        assert torch.equal(alone[1][0], values[i])
