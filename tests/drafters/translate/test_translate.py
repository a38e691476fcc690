"""A draft model with another tokenizer: the text is the target's, and a good draft model is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Core, models

from outrider import LLM, SamplingParams
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.drafters.translate.rollout import IntersectionRollout, RetokenisedRollout
from outrider.engine.step import Engine
from outrider.errors import ConfigError
from outrider.llm import build_engine
from outrider.models.tokenizer import Tokenizer
from outrider.testing import check_drafter
from outrider.types import Sequence, Step

from support import alphabets, tiny

MODES = ("tli", "slem")
TARGET = alphabets.byte_level(alphabets.PROSE + alphabets.CODE)
DRAFTS = {
    "byte level": lambda: alphabets.byte_level(alphabets.CODE, 320),
    "sentence piece": lambda: alphabets.sentence_piece(),
    "words": lambda: alphabets.words(),
    "spaced": lambda: alphabets.byte_level(alphabets.PROSE, 290, prefix=True),
}


@cache
def target() -> Transformer:
    return alphabets.model(TARGET, seed=1, padding=3)


@cache
def draft(name: str) -> tuple[Transformer, Tokenizer]:
    tokenizer = DRAFTS[name]()
    return alphabets.model(tokenizer, seed=2, padding=5), tokenizer


def options(name: str, **more: Any) -> dict[str, Any]:
    model, words = draft(name)
    return {"draft_model": model, "draft_tokenizer": words} | more


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams, rule: str = "match") -> list[Sequence]:
    seqs = [Sequence(i, ids, params, 7 + i, frozenset({1}), rule=rule) for i, ids in enumerate(prompts, start=1)]
    for seq in seqs:
        engine.add(seq)
    while engine.busy:
        engine.step()
        engine.cache.check()
        if getattr(engine.drafter, "translated", None):
            engine.drafter.translated.cache.check()
    assert not any(seq.stats.failures for seq in seqs), engine.failures
    assert not engine.failures
    return seqs


def recorded(engine: Engine) -> list[Step]:
    """Every step from now on."""
    steps: list[Step] = []
    engine.listeners = [type("Listener", (), {"observe": lambda self, step: steps.append(step)})()]
    return steps


def generated(seqs: list[Sequence]) -> list[list[int]]:
    return [seq.generated for seq in seqs]


def engine(k: int = 4, model: Transformer | None = None, **given: Any) -> Engine:
    drafter = "model" if "draft_model" in given else "off"
    own = {name: given.pop(name) for name in ("max_length", "cache_tokens", "max_batch") if name in given}
    return build_engine(model or target(), Config(drafter=drafter, k=k, options=given, **own), TARGET)


PROMPTS = [TARGET.encode(text) for text in ("the quick brown fox", "def add(a, b):\n    return", "你好 the 世")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_the_targets_own(name: str, mode: str, temperature: float) -> None:
    """Random models: they emit half characters and control tokens."""
    params = SamplingParams(temperature=temperature, max_tokens=16, top_p=0.95)
    speculative = run(engine(**options(name, translate=mode)), PROMPTS, params)
    assert generated(speculative) == generated(run(engine(), PROMPTS, params))
    assert name == "words" or sum(seq.stats.drafted for seq in speculative) > 0


@pytest.mark.parametrize("mode", MODES)
def test_it_is_a_drafter_like_any_other(mode: str) -> None:
    """Batches, preemption, chunks, shared prefixes; calls that are skipped, repeated and broken."""
    name = {"tli": "byte level", "slem": "sentence piece"}[mode]
    assert check_drafter("model", options(name, translate=mode), target(), tokens=6, tokenizer=TARGET) > 400


@pytest.mark.parametrize("rule", ["reject", "block"])
@pytest.mark.parametrize("mode", MODES)
def test_rules_that_want_q(rule: str, mode: str) -> None:
    """tli reports the q over the target's ids that it drew from; slem reports none."""
    one = engine(**options("byte level", translate=mode))
    seen = recorded(one)
    run(one, PROMPTS, SamplingParams(temperature=1.0, max_tokens=16), rule)
    trees = [tree for step in seen for tree in step.draft.trees if tree.tokens]
    assert trees
    assert all((tree.q is None) == (mode == "slem") for tree in trees)
    for tree in trees:
        if tree.q is not None:
            assert tree.q.shape == (len(tree.tokens), target().config.vocab_size)
            assert all(q[token] > 0 for q, token in zip(tree.q, tree.tokens, strict=True))
            assert torch.allclose(tree.q.sum(1), torch.ones(len(tree.tokens), dtype=torch.float64))


# ------------------------------------------------------------ a good draft model is accepted


@cache
def twin(blur: float = 0.0) -> tuple[Transformer, Tokenizer]:
    """The target itself, but for the order of its ids and more padding."""
    words, order = alphabets.shuffled(TARGET)
    return alphabets.rearranged(TARGET, order, padding=9, blur=blur), words


@cache
def plain_target() -> Transformer:
    return alphabets.model(TARGET, seed=1)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_model_with_other_ids_is_always_right(temperature: float) -> None:
    model, words = twin()
    params = SamplingParams(temperature=temperature, max_tokens=30)
    one = engine(5, plain_target(), draft_model=model, draft_tokenizer=words)
    seqs = run(one, PROMPTS, params)
    assert isinstance(one.drafter.translated, IntersectionRollout)  # chosen automatically
    assert all(seq.stats.alpha == 1 and (seq.stats.tau or 0) > 3 for seq in seqs)
    assert generated(seqs) == generated(run(engine(model=plain_target()), PROMPTS, params))


@pytest.mark.parametrize(("temperature", "tree"), [(0.0, False), (0.9, False), (0.9, True)])
def test_a_weaker_one_is_accepted_as_often_as_with_common_ids(temperature: float, tree: bool) -> None:
    """Not about as often: the very same drafts."""
    model, words = twin(blur=0.1)
    params = SamplingParams(temperature=temperature, max_tokens=30)
    foreign = engine(4, plain_target(), draft_model=model, draft_tokenizer=words, tree=tree)
    common = engine(4, plain_target(), draft_model=alphabets.model(TARGET, seed=1, blur=0.1), tree=tree)
    counts = [
        [(seq.stats.drafted, seq.stats.reached, seq.stats.accepted) for seq in run(e, PROMPTS, params)]
        for e in (foreign, common)
    ]
    assert counts[0] == counts[1]
    assert sum(accepted for _, _, accepted in counts[0]) > 20


def test_drafted_work_is_kept_and_only_new_tokens_are_fed() -> None:
    """What was accepted is not fed again: a step feeds the bonus token and the last node, which was not fed yet."""
    model, words = twin()
    one = engine(4, plain_target(), draft_model=model, draft_tokenizer=words)
    fed: list[int] = []
    forward = model.forward
    model.forward = lambda rows, *rest, **more: (fed.append(rows.count), forward(rows, *rest, **more))[1]
    try:
        run(one, [PROMPTS[0]], SamplingParams(max_tokens=25))
    finally:
        del model.forward
    assert max(fed[1:]) <= 2
    assert fed[0] == len(PROMPTS[0])


def test_slem_encodes_the_draft_in_target_tokens() -> None:
    """A draft model that knows the answer by heart, in its own tokens."""
    text = "def add(a, b):\n    return a + b\nfor i in range(10):\n    print(i)\n" * 2
    words = alphabets.sentence_piece()
    drafting, ids = Parrot(words, [1, *words.encode(text)]), TARGET.encode(text)
    speaker = Parrot(TARGET, ids)
    one = engine(4, speaker, draft_model=drafting, draft_tokenizer=words, translate="slem")
    (seq,) = run(one, [ids[:12]], SamplingParams(max_tokens=len(ids) - 12))
    assert seq.generated == ids[12:]
    assert seq.stats.alpha is not None
    assert seq.stats.alpha > 0.9
    assert (seq.stats.tau or 0) > 3


class Parrot(Transformer):
    """Emits one text, token by token, by position."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int]) -> None:
        config = alphabets.config_of(tokenizer.vocab_size, 256)
        super().__init__(config, alphabets.RandomWeights(config, 1), torch.float64)
        self.ids = [*ids, *[0] * config.context_length]

    def forward(self, rows: Any, *rest: Any, **more: Any) -> Any:
        output = super().forward(rows, *rest, **more)
        if not output.logits.numel():
            return output
        logits = torch.zeros(output.logits.shape)
        for row, at in enumerate(rows.positions[rows.want].tolist()):
            logits[row, self.ids[at + 1]] = 50
        return replace(output, logits=logits)


# ------------------------------------------------------------ little room


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_model_reads_the_end_of_a_text_that_is_too_long_for_it(mode: str) -> None:
    words = DRAFTS["byte level"]()
    short = alphabets.model(words, seed=2, context=24)
    params = SamplingParams(max_tokens=30)
    one = engine(draft_model=short, draft_tokenizer=words, translate=mode)
    seen = recorded(one)
    assert generated(run(one, PROMPTS, params)) == generated(run(engine(), PROMPTS, params))
    late = [tree.tokens for step in seen[-15:] for tree in step.draft.trees]
    assert sum(map(len, late)) > 20  # to the end


@pytest.mark.parametrize("mode", MODES)
def test_when_slots_run_short_the_least_recently_used_sequence_is_evicted(mode: str) -> None:
    """More sequences than lines and slots, and `end` is never called."""
    params, small = SamplingParams(max_tokens=5), {"max_length": 48, "cache_tokens": 112, "max_batch": 2}
    one = engine(**options("byte level", translate=mode), **small)
    one.drafter.end = lambda seq: None
    many = PROMPTS * 12
    seqs = run(one, many, params)
    assert generated(seqs) == generated(run(engine(**small), many, params))
    assert all(seq.stats.drafted for seq in seqs)


# ------------------------------------------------------------ as users meet it


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    home = tmp_path_factory.mktemp("models")
    return tiny.save(home / "target"), tiny.save(home / "other", texts=("zwölf Boxkämpfer jagen Viktor",) * 3, seed=2)


@pytest.mark.parametrize("mode", ["auto", "tli"])
def test_the_mode_is_chosen_and_reported(folders: tuple[Path, Path], mode: str) -> None:
    big, small = folders
    llm = LLM(big, drafter="model", draft_model=str(small), translate=mode, k=3, dtype="float32")
    params = SamplingParams(max_tokens=16)
    result = llm.generate("one two", params)[0]
    assert result.token_ids == llm.using(drafter="off").generate("one two", params)[0].token_ids
    facts = llm.drafting["model"]
    assert facts["translate"] == ("slem" if mode == "auto" else "tli")
    assert facts["draft_model"] == "other"
    assert 256 < facts["shared_tokens"] < 300
    assert 0.8 < facts["target_share"] < 0.9
    assert result.stats.drafted > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_model_with_nothing_in_common_drafts_nothing(mode: str) -> None:
    words = Tokenizer(Core(models.WordLevel({"<unk>": 0}, unk_token="<unk>")))
    words._core.add_special_tokens(["<unk>"])
    given = {"draft_model": alphabets.model(words, padding=7), "draft_tokenizer": Tokenizer(words._core)}
    params = SamplingParams(temperature=0.9, max_tokens=6)
    seqs = run(engine(**given, translate=mode), PROMPTS, params)
    assert generated(seqs) == generated(run(engine(), PROMPTS, params))
    assert not any(seq.stats.drafted for seq in seqs)


def test_with_few_common_tokens_text_is_retokenised() -> None:
    assert isinstance(engine(**options("words")).drafter.translated, RetokenisedRollout)
    assert isinstance(engine(**options("words", translate="tli")).drafter.translated, IntersectionRollout)


def test_errors_are_sentences() -> None:
    with pytest.raises(ConfigError, match=r"draft_tokenizer=…"):
        engine(draft_model=draft("words")[0])
    with pytest.raises(ConfigError, match=r"Choose one of: auto, tli, slem"):
        engine(**options("words", translate="latin"))


def test_padding_alone_needs_no_translation() -> None:
    """Fewer rows than the target has: the same ids, in the target's own slots. After padding nothing is drafted."""
    few = engine(draft_model=plain_target(), draft_tokenizer=TARGET)
    assert few.drafter.translated is None
    assert few.drafter.padded
    params = SamplingParams(max_tokens=20)
    padding = [*PROMPTS[0], target().config.vocab_size - 1]
    seqs = run(few, [PROMPTS[0]], params) + run(few, [padding], params)
    alone = run(engine(), [PROMPTS[0]], params) + run(engine(), [padding], params)
    assert generated(seqs) == generated(alone)
    assert seqs[0].stats.drafted
    assert not seqs[1].stats.drafted
