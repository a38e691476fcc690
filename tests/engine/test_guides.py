"""Structured output under speculation: the text has the form that was requested, and is the plain text, bit for bit."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from outrider import LLM, ConfigError, Draft, Drafter, SamplingParams, drafters
from outrider.drafters import DraftRequest, lookup
from outrider.engine.guides import GrammarState, format_of, guide_for
from outrider.engine.sampling import ranked
from outrider.engine.trace import Recorder, Trace, recorded, replay
from outrider.types import Sequence, Tree

from support import tiny
from support.examples import examples

PROMPTS = ["the quick brown fox", "def add(a, b):", "one two three one two three one two"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["fox", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    "json": {"type": "json_object"},
    "regex": {"regex": r"(the|one|def) [a-z]{2,9}( [0-9]{1,3}){6,}!"},
    "grammar": {"grammar": 'start: item ("," item){6,} "."\nitem: /[a-z]{1,5}/ "=" /[0-9]{1,4}/\n'},
}
WARM = {"temperature": 0.8, "seed": 7}
HEATS: dict[str, dict[str, Any]] = {"greedy": {}, "warm": WARM}
SPELLED = "QZX[0-9]JKVW####"  # one way to spell it: the tiny tokenizer has merged none of these


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny.save(tmp_path_factory.mktemp("tiny")), drafter="suffix", dtype="float32", k=5)


PLAIN: dict[str, list[list[int]]] = {}  # by parameters: plain text does not depend on the drafter


def alone(llm: LLM, params: SamplingParams) -> list[list[int]]:
    if (key := repr(params)) not in PLAIN:
        PLAIN[key] = [llm.generate(prompt, params, speculate=False)[0].token_ids for prompt in PROMPTS]
    return PLAIN[key]


def with_drafter(llm: LLM, name: str, **changes: Any) -> LLM:
    options = lookup(name).traits.trial(llm.target)
    return llm.using(drafter=name, **({"k": 5} | options | changes))


# ---------------------------------------------------------------- the same text


@pytest.mark.one_in(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", drafters.names())
def test_guided_text_is_the_targets(llm: LLM, name: str, form: str) -> None:
    params = [SamplingParams(max_tokens=32, guide=FORMS[form], **heat) for heat in HEATS.values()]
    expected = [text for each in params for text in alone(llm, each)]
    speculative = with_drafter(llm, name)
    together = speculative.generate(PROMPTS * len(params), [each for each in params for _ in PROMPTS])
    assert [result.token_ids for result in together] == expected
    assert speculative.generate(PROMPTS[-1], params[-1])[0].token_ids == expected[-1]
    assert not speculative.engine.failures
    assert all(result.stats.failures == 0 for result in together)
    speculative.engine.cache.check()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("changes", [{"cache_tokens": 150, "max_length": 80}, {"max_rows": 7}, {"k": "auto"}], ids=str)
@pytest.mark.parametrize("heat", HEATS)
@pytest.mark.parametrize("form", FORMS)
def test_preempted_chunked_and_paced(llm: LLM, form: str, heat: str, changes: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, guide=FORMS[form], **HEATS[heat])
    speculative = with_drafter(llm, "auto", **changes)
    together = speculative.generate(PROMPTS * 2, params)
    assert [result.token_ids for result in together] == alone(llm, params) * 2
    if "cache_tokens" in changes:
        assert sum(result.stats.preempted for result in together) > 0


def test_trees_and_guided_beside_unguided(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=40, guide=FORMS[form], **WARM) for form in FORMS]
    each += [SamplingParams(max_tokens=40, **WARM)] * 2
    prompts = PROMPTS * 2
    expected = [llm.generate(p, one, speculate=False)[0].token_ids for p, one in zip(prompts, each, strict=True)]
    for options in ({"drafter": "suffix"}, {"drafter": "model", "draft_model": llm.target}):
        results = llm.using(k=8, tree=True, **options).generate(prompts, each)
        assert [result.token_ids for result in results] == expected


class Nonsense(Drafter):
    """Forests of whatever, ends included."""

    name = "nonsense"

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budget = request.seqs, request.budgets
        dice = random.Random(len(seqs[0].tokens))
        shapes = [
            Tree([dice.randrange(250) for _ in range(k)], [dice.randrange(-1, i) if i else -1 for i in range(k)])
            for k in budget
        ]
        return Draft.pack(Tree([1] * len(t.tokens), t.parents) if dice.random() < 0.3 else t for t in shapes)


@pytest.mark.parametrize("form", FORMS)
def test_an_adversary_cannot_change_it(llm: LLM, form: str) -> None:
    params = SamplingParams(max_tokens=40, guide=FORMS[form], **WARM)
    results = llm.using(drafter=Nonsense, k=6).generate(PROMPTS, params)
    assert [result.token_ids for result in results] == alone(llm, params)


@pytest.mark.parametrize("rule", ["reject", "block"])
@pytest.mark.parametrize("name", ["suffix", "model"])
def test_other_rules_keep_to_the_guide(llm: LLM, name: str, rule: str) -> None:
    speculative = with_drafter(llm, name, rule=rule)
    greedy = SamplingParams(max_tokens=40, guide=FORMS["regex"])
    assert [result.token_ids for result in speculative.generate(PROMPTS, greedy)] == alone(llm, greedy)
    for seed in range(5):
        (result,) = speculative.generate(PROMPTS[0], replace(greedy, temperature=1.0, seed=seed, max_tokens=120))
        if result.finish_reason == "stop":
            assert re.fullmatch(FORMS["regex"]["regex"], result.text)


# ---------------------------------------------------------------- the form


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Just enough of JSON schema for the schemas below."""
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        valid = isinstance(value, dict) and value.keys() == schema["properties"].keys()
        return valid and all(fits(inner, value[name]) for name, inner in schema["properties"].items())
    if schema["type"] == "array":
        many = isinstance(value, list) and len(value) <= schema.get("maxItems", 10**9)
        return many and all(fits(schema["items"], inner) for inner in value)
    if schema["type"] == "integer":
        within = schema.get("minimum", -(10**30)), schema.get("maximum", 10**30)
        return type(value) is int and within[0] <= value <= within[1]
    if schema["type"] == "string":
        return isinstance(value, str) and len(value) <= schema.get("maxLength", 10**9)
    return isinstance(value, {"boolean": bool, "null": type(None)}[schema["type"]])


def test_a_schema_is_kept(llm: LLM) -> None:
    ended = 0
    for seed in range(12):
        params = SamplingParams(temperature=0.8, seed=seed, max_tokens=120, guide=FORMS["schema"])
        (result,) = llm.generate(PROMPTS[seed % 3], params)
        if result.finish_reason == "stop":
            ended += 1
            assert fits(PERSON, json.loads(result.text)), result.text
    assert ended > 6


LETTERS = st.sampled_from(["a", "the", "fox", "7", "é", r"\.", " ", "[a-f]", "[0-9]", r"\w", "[^x]"])
PATTERNS = st.recursive(
    LETTERS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: f"({'|'.join(several)})"),
        st.tuples(inner, st.sampled_from(["?", "+", "{1,3}", "{2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@examples(60)
@given(pattern=PATTERNS, seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 1.0]))
def test_any_pattern_is_matched_and_drafts_change_nothing(
    llm: LLM, pattern: str, seed: int, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=40, guide={"regex": pattern})
    try:
        (plain,) = llm.generate(PROMPTS[0], params, speculate=False)
    except ConfigError:  # llguidance panics on a few patterns, which are refused in a sentence
        return
    (speculative,) = llm.generate(PROMPTS[0], params)
    assert (speculative.token_ids, speculative.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert speculative.finish_reason in ("stop", "length")
    if speculative.finish_reason == "stop":
        assert re.fullmatch(pattern, speculative.text, re.DOTALL), (pattern, speculative.text)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    small = st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": 4},
            {"type": "integer", "minimum": -5, "maximum": 99},
            {"enum": ["red", "green", 3, None]},
        ]
    )
    names = st.lists(st.sampled_from(["a", "b", "name", "x y", "ü"]), max_size=3, unique=True)

    def nest(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        arrays = inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2})
        objects = names.flatmap(lambda keys: st.tuples(*[inner] * len(keys)).map(lambda values: _object(keys, values)))
        return st.one_of(arrays, objects)

    return st.recursive(small, nest, max_leaves=5)


def _object(keys: list[str], values: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    properties = dict(zip(keys, values, strict=True))
    return {"type": "object", "properties": properties, "required": keys, "additionalProperties": False}


@examples(60)
@given(schema=schemas(), seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 0.8]))
def test_any_schema_is_kept_and_drafts_change_nothing(
    llm: LLM, schema: dict[str, Any], seed: int, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=90, guide={"json": schema})
    (plain,) = llm.generate(PROMPTS[1], params, speculate=False)
    (speculative,) = llm.generate(PROMPTS[1], params)
    assert (speculative.token_ids, speculative.finish_reason) == (plain.token_ids, plain.finish_reason)
    if speculative.finish_reason == "stop":
        assert fits(schema, json.loads(speculative.text)), (schema, speculative.text)


# ---------------------------------------------------------------- forced tokens


@pytest.mark.parametrize("name", ["suffix", "ngram", "auto", "model", "cascade"])
def test_what_has_no_alternative_is_free_and_always_accepted(llm: LLM, name: str) -> None:
    params = SamplingParams(max_tokens=40, guide={"regex": SPELLED})
    (plain,) = llm.generate(PROMPTS[0], params, speculate=False)
    lines = Recorder("summary")
    speculative = with_drafter(llm, name, k=8, recorder=lines)
    (result,) = speculative.generate(PROMPTS[0], params)
    assert result.token_ids == plain.token_ids
    assert re.fullmatch(SPELLED, result.text)
    forced = [node for line in lines.lines if line["source"] == "forced" for node in line["nodes"]]
    assert all(node[4] == "a" for node in forced)
    assert forced or name == "model"  # whose drafts hold what is forced, and go on
    assert result.stats.alpha == 1.0
    assert result.stats.steps <= 3  # QZX and the digit; JKVW#### and a bonus, which is the end; perhaps the end
    assert result.origins.count("a") >= len(plain.token_ids) - 3


def test_the_end_of_a_complete_text_is_forced(llm: LLM) -> None:
    matcher = llm.guide_for({"regex": "QZ"}).matcher()
    generated = llm.tokenizer.encode("QZ")
    (eos,) = llm.tokenizer.eos_ids
    assert matcher.forced([], 9) == [*generated, eos]
    assert matcher.forced([], 2) == generated
    assert matcher.forced(generated, 9) == [eos]
    assert matcher.forced([*generated, eos], 9) == []


# ---------------------------------------------------------------- what may follow is a function of the generated tokens


@pytest.mark.parametrize("form", FORMS)
def test_a_matcher_has_no_memory(llm: LLM, form: str) -> None:
    """Asked in any order, about texts that are allowed and others, it answers as a fresh one does."""
    guide, dice = llm.guide_for(FORMS[form]), random.Random(3)
    walked, texts = guide.matcher(), [[]]
    for _ in range(150):
        generated = list(dice.choice(texts))
        if dice.random() < 0.1:
            generated = [*generated[: dice.randrange(len(generated) + 1)], dice.randrange(250)]
        allowed = walked.mask(generated, guess=dice.random() < 0.3)
        fresh = GrammarState(guide, guide.new_grammar()).mask(generated)
        assert torch.equal(allowed, fresh)
        assert walked.complete(generated) == GrammarState(guide, guide.new_grammar()).complete(generated)
        token = dice.randrange(allowed.numel())
        assert walked.allows(generated, token) == bool(allowed[token])
        walked.forced(generated, 5)
        if allowed.any():
            token = int(dice.choice(allowed.nonzero().flatten().tolist()))
            assert walked.allows(generated, token)
            assert walked.follow(generated, [token]) == 1
            texts.append([*generated, token])


def test_a_draft_model_with_other_padding_is_guided_too(llm: LLM) -> None:
    seq = Sequence(1, [5, 6], matcher=llm.guide_for({"regex": "QZ"}).matcher())
    (q,) = llm.tokenizer.encode("Q")
    size = llm.target.config.vocab_size
    for rows in (size, size + 7, size - 1):
        assert [token for token, chance in ranked(torch.randn(rows), seq, [], 3) if chance > 0] == [q]


def test_a_guide_that_exceeds_its_limits_does_so_at_the_same_place_every_time(llm: LLM) -> None:
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=1, guide={"regex": "(.*a.{200}b|.*c.{200}d)+"})
    every = [llm.generate(PROMPTS[0], params, speculate=i % 2 == 0)[0] for i in range(4)]
    assert len({tuple(result.token_ids) for result in every}) == 1
    assert {result.finish_reason for result in every} <= {"guide", "length"}
    speculative = with_drafter(llm, "model", k=8).generate(PROMPTS[0], params)[0]
    assert speculative.token_ids == every[0].token_ids


def test_guides_are_compiled_once(llm: LLM) -> None:
    again = json.loads(json.dumps(FORMS["schema"]))
    assert llm.guide_for(FORMS["schema"]) is llm.guide_for(again)
    assert llm.guide_for(FORMS["schema"]) is not llm.guide_for(FORMS["json"])
    assert llm.guide_for({"type": "text"}) is None
    assert guide_for(None, llm.tokenizer) is None


# ---------------------------------------------------------------- together with everything else


def both(llm: LLM, params: SamplingParams) -> Any:
    """Plain and speculative agree; returns the result."""
    (plain,) = llm.generate(PROMPTS[0], params, speculate=False)
    (speculative,) = llm.generate(PROMPTS[0], params)
    for name in ("token_ids", "finish_reason", "text"):
        assert getattr(speculative, name) == getattr(plain, name)
    return speculative


def test_the_end_comes_when_the_guide_is_complete_and_not_before(llm: LLM) -> None:
    (eos,) = llm.tokenizer.eos_ids
    pushed = SamplingParams(max_tokens=40, logit_bias={eos: 100.0}, guide={"regex": "QZ+"})
    result = both(llm, pushed)
    assert (result.text, result.finish_reason, result.token_ids[-1]) == ("QZ", "stop", eos)
    held = both(llm, replace(pushed, logit_bias={eos: -100.0}, guide={"regex": "QZ"}))
    assert (held.text, held.token_ids[-1]) == ("QZ", eos)  # nothing else is allowed


def test_a_complete_text_ends_though_more_was_wanted(llm: LLM) -> None:
    (eos,) = llm.tokenizer.eos_ids
    short = both(llm, SamplingParams(max_tokens=40, min_tokens=20, guide={"regex": "QZ"}))
    assert (short.text, short.finish_reason) == ("QZ", "stop")
    assert eos not in short.token_ids
    longer = both(llm, SamplingParams(max_tokens=40, min_tokens=8, guide={"regex": "QZ+"}))
    assert len(longer.token_ids) >= 8
    ignored = both(llm, SamplingParams(max_tokens=40, ignore_eos=True, guide={"regex": "QZ"}))
    assert (ignored.text, ignored.finish_reason) == ("QZ", "stop")


@pytest.mark.parametrize("heat", [*HEATS.values(), {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 5}], ids=str)
def test_where_nothing_is_allowed_the_text_ends(llm: LLM, heat: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, bad_words=("Z",), guide={"regex": "QQZ"}, **heat)
    result = both(llm, params)
    assert (result.text, result.finish_reason) == ("QQ", "guide")
    nothing = both(llm, replace(params, guide={"regex": "ZQ"}))
    assert (nothing.text, nothing.token_ids, nothing.finish_reason) == ("", [], "guide")
    assert "".join(piece.text for piece in llm.stream(PROMPTS[0], params)) == "QQ"
    for rule in ("reject", "block"):
        (other,) = with_drafter(llm, "suffix", rule=rule).generate(PROMPTS[0], params)
        assert (other.text, other.finish_reason) == ("QQ", "guide")


def test_stop_strings_penalties_filters_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, guide={"regex": r"[a-z]{3},[a-z]{3},[a-z]{3}"})
    stopped = both(llm, replace(params, stop=","))
    assert (len(stopped.text), stopped.finish_reason) == (3, "stop")
    hot = replace(params, temperature=1.2, seed=4, top_k=3, top_p=0.8, min_p=0.05, repetition_penalty=1.4)
    assert re.fullmatch(params.guide["regex"], both(llm, hot).text)
    biased = replace(params, logit_bias={llm.tokenizer.encode("z")[0]: 50.0}, frequency_penalty=0.5)
    assert re.fullmatch(params.guide["regex"], both(llm, biased).text)
    listed = both(llm, replace(params, logprobs=2))
    assert len(listed.logprobs) == len(listed.token_ids)


def test_several_answers_and_a_stream(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=9, n=3, max_tokens=40, guide=FORMS["regex"])
    (result,) = llm.generate(PROMPTS[0], params)
    for j, output in enumerate(result.outputs):
        one = replace(params, n=1, seed=9 + j)
        assert llm.generate(PROMPTS[0], one, speculate=False)[0].token_ids == output.token_ids
        assert "".join(piece.text for piece in llm.stream(PROMPTS[0], one)) == output.text


@pytest.mark.parametrize("guide", [{"regex": "QQZ"}, FORMS["schema"]], ids=str)
def test_a_guided_run_replays_from_its_trace(llm: LLM, guide: dict[str, Any]) -> None:
    recorder = Recorder("full")
    speculative = llm.using(recorder=recorder, drafter="suffix", k=5)
    speculative.generate(PROMPTS, SamplingParams(max_tokens=40, bad_words=("Z",), guide=guide))
    trace = Trace.of(recorder.lines)
    assert replay(trace) == recorded(trace)


# ---------------------------------------------------------------- what is refused


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


ALTERNATIVES = {"anyOf": [{"type": "object", "properties": {f"a{j}": {"type": "string"}}} for j in range(9)]}
HOSTILE = {
    "deep": ({"json": nested(100)}, "deeper than"),
    "very deep": ({"json": nested(5000)}, "deeper than"),
    "deep text": ({"json": "[" * 50_000}, "not JSON|deeper"),
    "wide": ({"json": {"enum": list(range(5000))}}, "more than 4096 parts"),
    "long": ({"json": {"const": "x" * 70_000}}, "longer than"),
    "explosive": ({"json": {"allOf": [ALTERNATIVES] * 9}}, "cannot be used"),
    "remote": ({"json": {"$ref": "http://example.com/x.json"}}, "cannot be used"),
    "file": ({"json": {"$ref": "file:///etc/passwd"}}, "cannot be used"),
    "endless": ({"json": {"$ref": "#"}}, "no text at all|cannot be used"),
    "contradiction": ({"json": {"type": "string", "pattern": "^a$", "minLength": 5}}, "cannot be used|no text"),
    "inner pattern": ({"json": {"type": "string", "pattern": "(a{1,1000}){1,1000}"}}, "repetitions"),
    "long pattern": ({"regex": "a" * 2000}, "longer than 1024"),
    "many counts": ({"regex": "(a{1,50}b{1,50}){1,200}"}, "repetitions"),
    "counting": ({"regex": "((a{99}){99}){99}"}, "repetitions"),
    "huge count": ({"regex": "a{99999999999999999999}"}, "repetitions"),
    "broken": ({"regex": "(a"}, "cannot be used"),
    "look-around": ({"regex": "(?=a)b"}, "cannot be used"),
    "empty": ({"regex": ""}, "at least one character"),
    "not a text": ({"regex": 5}, "not a text"),
    "broken grammar": ({"grammar": "start: missing"}, "cannot be used"),
    "no rule": ({"grammar": " "}, "at least one rule"),
    "long grammar": ({"grammar": "start: " + '"a" ' * 30_000}, "longer than"),
    "two at once": ({"regex": "a", "grammar": 'start: "a"'}, "one thing"),
    "nothing": ({}, "one thing"),
    "unknown type": ({"type": "xml"}, "no response format"),
    "no schema": ({"type": "json_schema"}, "needs"),
    "not an object": ("json", "must be an object"),
    "strict": ({"type": "json_schema", "json_schema": {"strict": True, "schema": {"not": {}}}}, "cannot be used"),
    "list": ({"json": [1]}, "not an object"),
    "nan": ({"json": {"const": float("nan")}}, "not JSON"),
    "no choices": ({"choice": []}, "list of texts"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_what_cannot_be_a_guide_is_refused_with_a_sentence(llm: LLM, case: str) -> None:
    spec, sentence = HOSTILE[case]
    with pytest.raises(ConfigError, match=sentence) as caught:
        llm.generate(PROMPTS[0], SamplingParams(guide=spec))
    assert len(str(caught.value)) < 600
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))  # nothing is broken afterwards


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]{1,64}@[a-z]{1,255}\.[a-z]{2,24}",
        r"([0-9]{1,3}\.){3}[0-9]{1,3}",
        r"\{9999999\}",
        r"[{99999}]{3}",
        "(a{9}|b)*",
    ],
)
def test_ordinary_counts_are_fine(llm: LLM, pattern: str) -> None:
    assert llm.guide_for({"regex": pattern}) is not None


def test_a_schema_brings_no_settings_of_its_own(llm: LLM) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": "[a-z]*"}}
    assert llm.guide_for({"json": schema}) is llm.guide_for({"type": "json_object"})


def test_everybodys_spelling(llm: LLM) -> None:
    assert format_of({"guided_regex": "a+"}) == format_of({"regex": "a+"})
    assert format_of({"guided_json": '{"type": "object"}'}) == format_of({"type": "json_object"})
    assert format_of({"guided_grammar": 'start: "a"'}) == format_of({"grammar": 'start: "a"'})
    loose = {"type": "json_schema", "json_schema": {"schema": {"type": "null", "not": {}}}}
    assert both(llm, SamplingParams(guide=loose)).text == "null"  # not strict: what is not understood is passed over
    chosen = both(llm, SamplingParams(guide={"guided_choice": ['say "yes"', "no\\pe", "the fox"]})).text
    assert chosen in ('say "yes"', "no\\pe", "the fox")


# ---------------------------------------------------------------- real weights


@pytest.mark.real
@pytest.mark.parametrize("heat", HEATS)
def test_real_json_with_and_without_speculation(heat: str) -> None:
    real = LLM(drafter="auto", dtype="auto", max_length=512)
    messages = [{"role": "user", "content": "Describe Maria, a doctor of 34 who likes hiking and chess, as JSON."}]
    schema = PERSON | {"properties": PERSON["properties"] | {"name": {"type": "string", "maxLength": 40}}}
    params = SamplingParams(max_tokens=120, guide={"guided_json": schema}, **HEATS[heat])
    (plain,) = real.chat(messages, params, speculate=False)
    (speculative,) = real.chat(messages, params)
    assert speculative.token_ids == plain.token_ids
    assert speculative.finish_reason == "stop"
    assert json.loads(speculative.text).keys() == PERSON["properties"].keys()
    assert speculative.stats.tau > 1.3  # what is forced costs no pass
