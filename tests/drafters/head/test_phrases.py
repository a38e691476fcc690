"""The memory beside a head: what followed is remembered, the better of two is chosen, nobody else's prompt is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.config import Config
from outrider.drafters._learning import store
from outrider.drafters.head import phrases
from outrider.drafters.head.phrases import Contexts, PhraseMemory, Phrases, Record, contexts_of
from outrider.errors import ModelError
from outrider.llm import build_engine
from outrider.testing import SCENARIOS, check_drafter, decode
from outrider.types import SamplingParams, Sequence

from support.learning_heads import EAGER, TARGET, alpha, ask, engine_of, head, learning_of, stream
from support.toys import reference

ONLY = {"learn_correction": False}


def read(contexts: Contexts, *tokens: int) -> Contexts:
    for at in range(1, len(tokens)):
        contexts.learn(contexts_of(tokens, at), tokens[at])
    return contexts


def expects(contexts: Contexts, *tokens: int) -> int | None:
    guess = contexts.guess(contexts_of(tokens, len(tokens)))
    return None if guess is None else guess.token


def memory(learns: bool = True) -> PhraseMemory:
    return PhraseMemory(lambda seq: seq.params.kind, lambda seq: learns)


def serve(memory: PhraseMemory, seq: Sequence, emitted: list[int], head_says: int) -> list[int]:
    """Draft one token at a time, each followed by one emitted token; returns what was drafted."""
    drafted = []
    for token in emitted:
        drafted.append(memory.choose(seq, [], head_says, 0.3)[0])
        seq.tokens.append(token)
        memory.observe(seq)
    memory.end(seq)
    return drafted


# ------------------------------------------------------------ contexts


def test_the_longest_context_decides() -> None:
    contexts = read(read(Contexts(), 1, 2, 3, 4), 9, 2, 3, 5)
    assert expects(contexts, 1, 2, 3) == 4
    assert expects(contexts, 9, 2, 3) == 5
    assert expects(contexts, 7, 7) is None
    assert expects(contexts) is None


def test_the_majority_stays_and_a_change_is_followed() -> None:
    contexts = Contexts()
    for follower in (4, 4, 4, 5):
        read(contexts, 2, 3, follower)
    assert expects(contexts, 2, 3) == 4
    for _ in range(phrases._WEIGHT):
        read(contexts, 2, 3, 5)
    assert expects(contexts, 2, 3) == 5


def test_token_zero_is_a_token() -> None:
    assert expects(read(Contexts(), 0, 0, 0), 0, 0) == 0


def test_the_oldest_contexts_are_dropped() -> None:
    contexts = Contexts(most=20)
    for start in range(100, 200):
        read(contexts, start, start + 1, start + 2)
        read(contexts, 1, 2, 3)  # what is used stays
    assert len(contexts) <= 2 * 20 + 4
    assert expects(contexts, 1, 2) == 3
    assert expects(contexts, 100, 101) is None


# ------------------------------------------------------------ the choice


def test_it_speaks_after_it_was_right_more_often_than_the_head() -> None:
    made = memory()
    drafted = serve(made, Sequence(1, [1, 2, 3, 4] * 3), [1, 2, 3, 4] * 10, head_says=50)
    assert drafted[0] == 50
    assert drafted[-4:] == [1, 2, 3, 4]


def test_where_the_head_is_right_the_head_is_heard() -> None:
    made = memory()
    serve(made, Sequence(1, [1, 2, 3, 4] * 3), [1, 2, 3, 4] * 3, head_says=50)
    for number in range(2, 60):  # what followed before does no longer
        drafted = serve(made, Sequence(number, [1, 2, 3, 4] * 3), [50], head_says=50)
    assert drafted == [50]


def test_a_head_that_is_certain_and_right_is_not_questioned() -> None:
    made = memory()
    made.kinds[""] = Phrases(read(Contexts(), 1, 2, 3))
    for number in range(40):
        seq = Sequence(number, [1, 2])
        made.choose(seq, [], 50, 0.99)
        assert not made.readings[number].nodes[0].guesses
        seq.tokens.append(50)
        made.observe(seq)


def test_a_head_that_is_certain_and_wrong_is() -> None:
    made = memory()
    for number in range(60):
        seq = Sequence(number, [1, 2])
        drafted, _ = made.choose(seq, [], 50, 0.99)
        seq.tokens.append(3)
        made.observe(seq)
    assert drafted == 3


def test_a_chain_stands_until_the_memory_knows_better() -> None:
    made = memory()
    made.kinds[""] = Phrases(read(Contexts(), 1, 2, 3))
    assert made.agrees(Sequence(1, [1, 2]), [50, 51], [0.3, 0.1])
    for record in range(400):
        made.kinds[""].records[record] = Record(memory=9.0, head=1.0, cases=10.0)
    assert not made.agrees(Sequence(2, [1, 2]), [50, 51], [0.3, 0.1])
    assert made.agrees(Sequence(3, [1, 2]), [3, 51], [0.3, 0.1])


def test_evidence_fades() -> None:
    record = Record()
    for _ in range(2000):
        record.add(True, False)
    assert record.trusted
    for _ in range(200):
        record.add(False, True)
    assert not record.trusted


def test_a_prompt_is_used_for_its_own_request_only() -> None:
    made = memory()
    serve(made, Sequence(1, [1, 2, 3, 4] * 3), [1, 2, 3, 4] * 3, head_says=50)
    serve(made, Sequence(2, [21, 22, 23, 24]), [30], head_says=50)
    assert expects(made.kinds[""].contexts, 21, 22) is None
    assert expects(made.kinds[""].contexts, 1, 2) == 3  # which was emitted
    assert not made.readings


def test_a_request_that_does_not_learn_leaves_nothing() -> None:
    made = memory(learns=False)
    serve(made, Sequence(1, [1, 2, 3, 4] * 3), [1, 2, 3, 4] * 3, head_says=50)
    assert not made.kinds


# ------------------------------------------------------------ in an engine


def test_a_head_with_a_memory_changes_no_text() -> None:
    assert check_drafter("head", EAGER | ONLY | {"head": head()}, TARGET, tokens=6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_whatever_it_remembers_the_text_is_the_same(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "trusted", True)
    engine, params = engine_of(k=4, **ONLY), SamplingParams(max_tokens=24, temperature=temperature)
    for _ in range(3):
        assert decode(engine, SCENARIOS[1], params) == reference(TARGET, SCENARIOS[1], params)
    assert learning_of(engine).report()["phrases_proposed"] > 0


def test_what_comes_again_is_drafted() -> None:
    learns, frozen = engine_of(**ONLY), engine_of(learn=False)
    alpha(learns, stream(10))
    late, never = alpha(learns, stream(10), 100), alpha(frozen, stream(10), 100)
    assert late > never + 0.3, (late, never)
    facts = learning_of(learns).report()
    assert facts["phrases"] > 0
    assert facts["phrases_accepted"] > 0


def test_a_native_chain_is_drafted_again_where_the_memory_knows_better() -> None:
    whole = Config(drafter="head", k=3, options=EAGER | ONLY | {"head": head(torch.int8)})
    engine = build_engine(TARGET, whole)
    for _ in range(3):
        params = SamplingParams(max_tokens=24)
        assert decode(engine, SCENARIOS[1], params) == reference(TARGET, SCENARIOS[1], params)
    assert learning_of(engine).report()["phrases_accepted"] > 0
    assert not engine.failures


def test_it_can_be_switched_off() -> None:
    assert learning_of(engine_of(learn_phrases=False)).memory is None


def test_kinds_are_saved_loaded_and_forgotten(tmp_path: Path) -> None:
    engine = engine_of(**ONLY)
    alpha(engine, stream(10), kind="code")
    ask(engine, [5, 6, 7], 50, kind="letters")
    learning_of(engine).save(tmp_path / "kept")
    again = engine_of(learn=False, learn_from=str(tmp_path / "kept"))
    frozen = engine_of(learn=False)
    assert alpha(again, stream(5), kind="code") > alpha(frozen, stream(5), kind="code") + 0.3
    store.forget_kind(tmp_path / "kept", "code")
    assert set(store.load_phrases(tmp_path / "kept")) == {"letters"}


def test_only_what_was_confirmed_is_written() -> None:
    made = Phrases(read(read(read(Contexts(), 1, 2, 3), 1, 2, 3), 7, 8, 9))
    loaded = Phrases.of(made.as_tensors())
    assert expects(loaded.contexts, 1, 2) == 3
    assert expects(loaded.contexts, 7, 8) is None
    assert Phrases.of(Phrases().as_tensors()).records == {}


def test_a_folder_without_phrases_is_read(tmp_path: Path) -> None:
    learning = learning_of(engine_of(learn_phrases=False))
    learning.save(tmp_path / "kept")
    assert learning_of(engine_of(learn_from=str(tmp_path / "kept"))).memory is not None


def test_damaged_phrases_are_named(tmp_path: Path) -> None:
    engine = engine_of(**ONLY)
    ask(engine, [5, 6, 7])
    learning_of(engine).save(tmp_path / "kept")
    (tmp_path / "kept" / store.PHRASES).write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot be read"):
        engine_of(learn_from=str(tmp_path / "kept"))


def test_a_restarted_engine_remembers() -> None:
    old, new = engine_of(**ONLY), engine_of(**ONLY)
    ask(old, [5, 6, 7])
    new.drafter.inherit(old.drafter)
    assert learning_of(new).memory.kinds is learning_of(old).memory.kinds  # type: ignore[union-attr]
