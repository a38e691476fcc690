"""The conformance kit notices a drafter that fails, and failures of members are visible but harmless."""

from __future__ import annotations

import logging

import pytest

from outrider.config import Config
from outrider.drafters import Drafter, DraftRequest, lookup
from outrider.llm import build_engine
from outrider.testing import Scenario, check_drafter, prompts, reference
from outrider.types import Draft, SamplingParams, Sequence, Tree, chain

from support.toys import toy

PARAMS = SamplingParams(max_tokens=20)


class Raises(Drafter):
    name = "raises"

    def draft(self, request: DraftRequest) -> Draft:
        raise KeyError("no such table")


class WrongType(Drafter):
    name = "wrong-type"

    def draft(self, request: DraftRequest) -> Draft:
        return [[3] for _ in request.seqs]  # type: ignore[return-value]


class TokensAsText(Drafter):
    name = "tokens-as-text"

    def draft(self, request: DraftRequest) -> Draft:
        return Draft.pack(Tree(["the"], [-1]) for _ in request.seqs)  # type: ignore[list-item]


class Sometimes(Drafter):
    """Fails in every second request."""

    name = "sometimes"
    calls = 0

    def draft(self, request: DraftRequest) -> Draft:
        self.calls += 1
        if self.calls % 2:
            raise RuntimeError("not now")
        return Draft.pack(chain([3]) for _ in request.seqs)


class OutOfVocabulary(Drafter):
    name = "out-of-vocabulary"

    def draft(self, request: DraftRequest) -> Draft:
        return Draft.pack(chain([999_999]) for _ in request.seqs)


class Silent(Drafter):
    name = "silent"

    def draft(self, request: DraftRequest) -> Draft:
        return Draft.empty(len(request.seqs))


@pytest.mark.parametrize(
    ("drafter", "failure"),
    [
        (Raises, "raises: KeyError: 'no such table'"),
        (WrongType, "wrong-type: TypeError: draft() returned a value of type list, but it must return a Draft"),
        (OutOfVocabulary, "out-of-vocabulary: ValueError: node 0 of a drafted tree has token 999999 and parent -1"),
        (TokensAsText, "tokens-as-text: TypeError"),
    ],
)
def test_a_drafter_that_always_fails_is_refused(drafter: type[Drafter], failure: str) -> None:
    with pytest.raises(AssertionError, match=rf"'{drafter.name}' failed in every one of \d+ draft requests") as caught:
        check_drafter(drafter, target=toy(), tokens=8)
    assert f"The first failure: {failure}" in str(caught.value)


@pytest.mark.parametrize("drafter", [Silent, Sometimes, "off"])
def test_a_drafter_that_proposes_nothing_or_fails_sometimes_passes(drafter: str | type[Drafter]) -> None:
    assert check_drafter(drafter, target=toy(), tokens=8) > 0


@pytest.mark.parametrize("wrapper", ["cascade", "auto"])
def test_a_failing_member_is_counted_and_logged_once(
    wrapper: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Drafter, request: DraftRequest) -> Draft:
        raise RuntimeError("broken inside")

    monkeypatch.setattr(lookup("suffix"), "draft", broken)
    target, scenario, failure = toy(), Scenario("alone", batch=1), "suffix: RuntimeError: broken inside"
    engine = build_engine(target, Config(drafter=wrapper, k=5, options={wrapper: ["suffix", "ngram"]}))
    seq = Sequence(1, prompts(1)[0], PARAMS, seed=1000, ends=frozenset({0}))
    with caplog.at_level(logging.WARNING, logger="outrider.engine"):
        engine.add(seq)
        while engine.busy:
            engine.step()
    assert [seq.generated] == reference(target, scenario, PARAMS)
    assert dict(engine.failures) == {failure: seq.stats.failures}
    assert seq.stats.failures > 1
    assert seq.stats.drafted > 0  # the other member goes on
    logged = [record.getMessage() for record in caplog.records if record.name == "outrider.engine"]
    assert len(logged) == 1
    assert failure in logged[0]


def test_failures_with_changing_messages_are_counted_as_one_kind() -> None:
    class Changing(Drafter):
        name = "changing"
        calls = 0

        def draft(self, request: DraftRequest) -> Draft:
            Changing.calls += 1
            raise ValueError(f"call {Changing.calls}")

    engine = build_engine(toy(), Config(drafter=Changing, k=3))
    engine.add(Sequence(1, [1, 2, 3], SamplingParams(max_tokens=12)))
    while engine.busy:
        engine.step()
    assert dict(engine.failures) == {"changing: ValueError: call 1": Changing.calls}
