"""Predicted outputs: what is predicted is drafted, whichever drafter is at work, and the text stays the target's."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from outrider import LLM, ConfigError, Draft, Drafter, SamplingParams, chain, drafters
from outrider.drafters import DraftRequest, lookup
from outrider.engine.request_drafts import Prediction

from support import tiny

PROMPTS = ["the quick brown fox", "def add(a, b):", "one two three one two three one two"]
HEATS: dict[str, dict[str, Any]] = {"greedy": {}, "warm": {"temperature": 0.8, "seed": 7}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny.save(tmp_path_factory.mktemp("tiny")), drafter="ngram", dtype="float32", k=7)


def plain_ids(llm: LLM, params: SamplingParams, prompt: str = PROMPTS[0]) -> list[int]:
    return llm.generate(prompt, params, speculate=False)[0].token_ids


def drafting(llm: LLM, name: str) -> LLM:
    return llm.using(drafter=name, **({"k": 7} | lookup(name).traits.trial(llm.target)))


# ---------------------------------------------------------------- with every drafter


@pytest.mark.parametrize("heat", HEATS)
@pytest.mark.parametrize("name", [name for name in drafters.names() if name != "off"])
def test_what_comes_true_is_accepted_whoever_drafts(llm: LLM, name: str, heat: str) -> None:
    params = SamplingParams(max_tokens=48, ignore_eos=True, **HEATS[heat])
    ids = plain_ids(llm, params)
    (result,) = drafting(llm, name).generate(PROMPTS[0], replace(params, prediction=ids))
    assert result.token_ids == ids
    assert (result.stats.accepted_prediction_tokens, result.stats.rejected_prediction_tokens) == (48, 0)
    assert result.stats.alpha == 1.0
    assert result.stats.steps == math.ceil(48 / 8)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("heat", HEATS)
@pytest.mark.parametrize("name", [*drafters.names()])
def test_an_edit_costs_little_and_garbage_nothing_but_a_row(llm: LLM, name: str, heat: str) -> None:
    params = SamplingParams(max_tokens=48, ignore_eos=True, **HEATS[heat])
    ids, dice = plain_ids(llm, params), random.Random(5)
    speculative = drafting(llm, name)
    edited = [*ids[:12], 77, 78, *ids[14:30], *ids[33:], 79, 80]  # two others, three missing, two too many
    garbage = [dice.randrange(4, 250) for _ in range(60)]
    predictions = (edited, garbage, [], ids[20:], ids + ids, [10**6] * 5)
    each = [replace(params, prediction=prediction) for prediction in predictions]
    for prediction, result in zip(predictions, speculative.generate(PROMPTS[:1] * len(each), each), strict=True):
        assert result.token_ids == ids
        assert result.stats.accepted_prediction_tokens + result.stats.rejected_prediction_tokens == len(prediction)
        assert not result.stats.failures
    if name != "off":
        (result,) = speculative.generate(PROMPTS[0], replace(params, prediction=edited))
        assert 36 <= result.stats.accepted_prediction_tokens <= 45
        assert result.stats.accepted >= 30
        assert result.stats.steps <= 18


def test_a_batch_in_which_some_predict(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3)
    each = [plain_ids(llm, params, prompt) for prompt in PROMPTS]
    each_params = [
        replace(params, prediction=each[0]),
        params,
        replace(params, prediction=each[0]),
    ]  # the last one's is wrong
    for changes in ({}, {"cache_tokens": 150, "max_length": 80}, {"max_rows": 7}, {"k": "auto"}):
        results = llm.using(drafter="auto", **({"k": 7} | changes)).generate(PROMPTS, each_params)
        assert [result.token_ids for result in results] == each
        assert results[0].stats.rejected_prediction_tokens == 0
        assert results[1].stats.accepted_prediction_tokens == results[1].stats.rejected_prediction_tokens == 0


class Dear(Drafter):
    """Takes long, and is never right."""

    name = "dear"
    calls = 0

    def draft(self, request: DraftRequest) -> Draft:
        budget = request.budgets
        Dear.calls += 1
        time.sleep(0.02)
        return Draft.pack(chain([3] * k, [0.9] * k, source=self.name) for k in budget)


def test_a_drafter_that_is_not_worth_asking_does_not_stand_in_the_way(llm: LLM) -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    speculative, ids = llm.using(drafter=Dear, k="auto"), plain_ids(llm, params)
    speculative.generate(PROMPTS[0], params)  # its cost is learnt
    (tired,), before = speculative.generate(PROMPTS[0], params), Dear.calls
    (result,) = speculative.generate(PROMPTS[0], replace(params, prediction=ids))
    assert (tired.token_ids, result.token_ids) == (ids, ids)
    assert result.stats.steps < 25 < 80 < tired.stats.steps
    assert Dear.calls - before <= 3
    guided = SamplingParams(max_tokens=40, guide={"regex": "QZXJKVW#{20}"})
    (forced,) = speculative.generate(PROMPTS[0], guided)
    assert forced.token_ids == plain_ids(llm, guided)
    assert forced.stats.steps < 10


def test_a_text_is_a_prediction_too(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30)
    (plain,) = llm.generate(PROMPTS[1], params, speculate=False)
    (result,) = llm.generate(PROMPTS[1], replace(params, prediction=plain.text))
    assert result.token_ids == plain.token_ids
    predicted = len(llm.tokenizer.encode(plain.text))
    stats = result.stats
    assert stats.accepted_prediction_tokens + stats.rejected_prediction_tokens == predicted
    with pytest.raises(ConfigError, match="negative"):
        SamplingParams(prediction=[3, -1])
    with pytest.raises(ConfigError, match="wrong type"):
        SamplingParams(prediction=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_other_rules_take_predictions(llm: LLM, rule: str) -> None:
    params = SamplingParams(max_tokens=30)
    ids = plain_ids(llm, params)
    (result,) = llm.using(drafter="suffix", k=7, rule=rule).generate(PROMPTS[0], replace(params, prediction=ids))
    assert (result.token_ids, result.stats.rejected_prediction_tokens) == (ids, 0)


def test_a_guide_and_a_prediction(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, guide={"regex": "QZX [a-z]{8} JKV [a-z]{8} #"})
    ids = plain_ids(llm, params)
    whole = llm.generate(PROMPTS[0], replace(params, prediction=ids))[0]
    assert (whole.token_ids, whole.stats.alpha) == (ids, 1.0)
    forbidden = llm.generate(PROMPTS[0], replace(params, prediction="QZX the quick brown fox"))[0]
    assert forbidden.token_ids == ids


# ---------------------------------------------------------------- finding the position again


def following(predicted: str, answer: str) -> Prediction:
    return Prediction([*predicted.encode()]).advance([*answer.encode()])


def ahead(prediction: Prediction) -> str:
    return bytes(prediction.ahead(4)).decode()


@pytest.mark.parametrize(
    ("answer", "next_"),
    [
        ("", "the "),
        ("the quick", " bro"),
        ("the slow brown", " fox"),  # another word
        ("the brown", " fox"),  # a word less
        ("the very quick brown", " fox"),  # a word more
        ("THE quick", " bro"),  # other letters
        ("xyz", ""),  # nothing to be found
        ("the quick brown fox jumps. Again: the quick", " bro"),  # from the start again
    ],
)
def test_it_finds_its_place_again(answer: str, next_: str) -> None:
    assert ahead(following("the quick brown fox jumps", answer)) == next_


def test_what_came_true_is_counted_once() -> None:
    assert following("abcdef", "abcdef").matched == 6
    assert following("abcdef", "abcdefabcdef").matched == 6
    assert following("abcdef", "abXdef").matched == 5
    assert following("abcdef", "").matched == 0
    assert following("", "abc").matched == 0


@settings(max_examples=200, deadline=None)
@given(predicted=st.lists(st.integers(0, 3), max_size=40), answer=st.lists(st.integers(0, 3), max_size=60))
def test_its_place_is_always_one_that_the_answer_leads_to(predicted: list[int], answer: list[int]) -> None:
    prediction = Prediction(predicted)
    for i, token in enumerate(answer, start=1):
        prediction.advance([token])
        position, run = prediction.position, prediction.run
        if position is not None:
            assert 1 <= run <= min(position, i)
            assert predicted[position - run : position] == answer[i - run : i]
            assert len(prediction.ahead(5)) <= 5
        assert 0 <= prediction.matched <= min(len(predicted), i + 6 * i)


def test_a_long_and_repetitive_prediction_is_quick() -> None:
    prediction = Prediction([1, 1, 1, 2] * 25_000)
    prediction.advance([1, 1, 3] * 2_000)
    assert prediction.matched < 10_000
