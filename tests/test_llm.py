"""Text in, text out: the library as users call it, on a tiny model and on the default model's real weights."""

from __future__ import annotations

import gc
import itertools
import math
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider import LLM, ConfigError, Draft, Drafter, ModelError, OutriderError, SamplingParams, chain, register
from outrider.backends.rows import rows_of
from outrider.backends.toy import toy
from outrider.drafters import DraftRequest
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.models.detokenizer import Detokenizer
from outrider.types import Sequence

from support import tiny

PROMPTS = ["the quick brown fox", "def add(a, b):", "one two three one two three one two"]
WARM = SamplingParams(temperature=0.8, seed=7, max_tokens=32)


class Prophet(Drafter):
    """An oracle (`future`), so that whole blocks are accepted."""

    name = "prophet"

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budget = request.seqs, request.budgets
        future = self.space.options["future"]
        return Draft.pack(chain(future[len(s.generated) :][:k]) for s, k in zip(seqs, budget, strict=True))


@pytest.fixture(scope="module")
def real() -> LLM:
    """The default model; short contexts, so that its cache is small."""
    return LLM(drafter="suffix", dtype="auto", k=4, max_length=512)


def plain_ids(llm: LLM, prompt: str, params: SamplingParams) -> list[int]:
    return llm.generate(prompt, params, speculate=False)[0].token_ids


def prophet(llm: LLM, prompt: str, params: SamplingParams, k: int = 8) -> LLM:
    return llm.using(drafter=Prophet, k=k, future=plain_ids(llm, prompt, params))


# ---------------------------------------------------------------- asking


def test_a_text_a_list_ids_and_mixtures(llm: LLM) -> None:
    ids = llm.tokenizer.encode_prompt(PROMPTS[0])
    texts = [llm.generate(form, WARM) for form in (PROMPTS[0], [PROMPTS[0]], [ids], ids)]
    assert [len(results) for results in texts] == [1, 1, 1, 1]
    assert len({tuple(results[0].token_ids) for results in texts}) == 1
    result = texts[0][0]
    assert (result.prompt, result.prompt_token_ids) == (PROMPTS[0], ids)
    assert result.text == llm.tokenizer.decode(result.token_ids)
    assert (result.finish_reason, len(result.token_ids), result.seed) == ("length", 32, 7)
    mixed = llm.generate([PROMPTS[1], ids], WARM)
    assert mixed[1].token_ids == result.token_ids
    assert ids == llm.tokenizer.encode_prompt(PROMPTS[0])  # the caller's list does not grow
    assert llm.generate([]) == []


def test_a_batch_keeps_its_order_and_its_texts(llm: LLM) -> None:
    many = PROMPTS * 4  # more than max_batch
    each = [SamplingParams(temperature=0.8, seed=i, max_tokens=5 + i, ignore_eos=True) for i in range(len(many))]
    together = llm.generate(many, each)
    assert [r.prompt for r in together] == many
    assert [len(r.token_ids) for r in together] == [5 + i for i in range(len(many))]
    for result, prompt, params in zip(together, many, each, strict=True):
        assert llm.generate(prompt, params)[0].token_ids == result.token_ids


def test_several_answers_have_seeds_of_their_own(llm: LLM) -> None:
    (result,) = llm.generate(PROMPTS[0], SamplingParams(temperature=3.0, seed=100, n=3, max_tokens=16))
    assert [o.seed for o in result.outputs] == [100, 101, 102]
    assert len({o.text for o in result.outputs}) == 3
    for j, output in enumerate(result.outputs):
        alone = llm.generate(PROMPTS[0], SamplingParams(temperature=3.0, seed=100 + j, max_tokens=16))
        assert alone[0].token_ids == output.token_ids
    assert result.text == result.outputs[0].text
    with pytest.raises(AttributeError):
        _ = result.nonsense


def test_a_seed_is_a_text_and_no_seed_is_reported(llm: LLM) -> None:
    hot = SamplingParams(temperature=1.5, max_tokens=16)
    first, second = llm.generate([PROMPTS[0]] * 2, hot)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    again = llm.generate(PROMPTS[0], SamplingParams(temperature=1.5, max_tokens=16, seed=first.seed))
    assert again[0].token_ids == first.token_ids
    greedy = [llm.generate(PROMPTS[0], SamplingParams(seed=s, max_tokens=16))[0].token_ids for s in (1, 2)]
    assert greedy[0] == greedy[1]


def test_chat_is_the_template_and_nothing_else(llm: LLM) -> None:
    messages = [{"role": "user", "content": "one two"}]
    (answer,) = llm.chat(messages, WARM)
    assert answer.prompt_token_ids == llm.tokenizer.encode_chat(messages)
    assert answer.token_ids == llm.generate([llm.tokenizer.encode_chat(messages)], WARM)[0].token_ids
    assert [r.token_ids for r in llm.chat([messages, messages], WARM)] == [answer.token_ids] * 2
    assert "".join(p.text for p in llm.stream(messages, WARM)) == answer.text


def test_parameters_must_be_as_many_as_prompts(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="3 prompts but 2"):
        llm.generate(PROMPTS, [WARM, WARM])


# ---------------------------------------------------------------- where a text ends


def test_max_tokens_cuts_inside_an_accepted_block(llm: LLM) -> None:
    ahead = prophet(llm, PROMPTS[0], WARM)
    for n in (1, 2, 5, 9, 10, 11):
        (result,) = ahead.generate(PROMPTS[0], SamplingParams(temperature=0.8, seed=7, max_tokens=n))
        assert result.token_ids == plain_ids(llm, PROMPTS[0], WARM)[:n]
        assert (result.finish_reason, len(result.origins)) == ("length", n)
        assert result.stats.steps == math.ceil(n / 9)


@pytest.mark.parametrize("speculate", [True, False])
def test_a_stop_token_inside_an_accepted_block(llm: LLM, speculate: bool) -> None:
    ids = plain_ids(llm, PROMPTS[0], WARM)
    at = next(i for i in range(3, 8) if ids.index(ids[i]) == i)
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=32, stop_token_ids=[ids[at]])
    (result,) = prophet(llm, PROMPTS[0], WARM).generate(PROMPTS[0], params, speculate)
    assert result.token_ids == ids[: at + 1]
    assert result.finish_reason == "stop"
    assert result.text == llm.tokenizer.decode(ids[:at])  # an end token has no text
    if speculate:
        assert result.origins == "a" * (at + 1)  # it was drafted, and nothing came after it
        assert result.stats.steps == 1
        assert result.stats.accepted == result.stats.reached == at + 1


def test_eos_ends_a_text_unless_it_is_ignored(llm: LLM) -> None:
    (eos,) = llm.tokenizer.eos_ids
    push = {eos: 100.0}
    for speculate in (True, False):
        (ended,) = llm.generate(PROMPTS[0], SamplingParams(logit_bias=push, max_tokens=8), speculate)
        assert (ended.token_ids, ended.text, ended.finish_reason) == ([eos], "", "stop")
        ignored = SamplingParams(logit_bias=push, max_tokens=8, ignore_eos=True)
        (went_on,) = llm.generate(PROMPTS[0], ignored, speculate)
        assert (went_on.token_ids, went_on.text, went_on.finish_reason) == ([eos] * 8, "", "length")
        (held,) = llm.generate(PROMPTS[0], SamplingParams(logit_bias=push, max_tokens=8, min_tokens=5), speculate)
        assert eos not in held.token_ids[:5]
        assert held.token_ids[5:] == [eos]


def spanning_stop(llm: LLM, prompt: str, params: SamplingParams) -> tuple[str, str]:
    """A string that no single token holds, in the middle of a known text; and the text before it."""
    ids = plain_ids(llm, prompt, params)
    text, texts = llm.tokenizer.decode(ids), [llm.tokenizer.decode([i]) for i in ids]
    for i in range(4, len(ids) - 4):
        stop = texts[i][-2:] + texts[i + 1][:2]
        if len(stop) > 2 and text.find(stop) > 4 and not any(stop in t for t in texts):
            return stop, text[: text.find(stop)]
    raise AssertionError("no such string in this text")


@pytest.mark.parametrize("k", [0, 1, 4, 12])
def test_a_stop_string_across_tokens(llm: LLM, k: int) -> None:
    stop, before = spanning_stop(llm, PROMPTS[0], WARM)
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=32, stop=stop)
    ahead = prophet(llm, PROMPTS[0], WARM, k)
    (result,) = ahead.generate(PROMPTS[0], params)
    assert (result.text, result.finish_reason) == (before, "stop")
    seen = ""
    for piece in ahead.stream(PROMPTS[0], params):
        seen += piece.text
        assert before.startswith(seen)  # nothing of the stop string ever leaks
    assert seen == before
    assert llm.tokenizer.decode(result.token_ids).endswith(stop) or stop in llm.tokenizer.decode(result.token_ids)
    two = SamplingParams(temperature=0.8, seed=7, max_tokens=32, stop=("not in there", stop))
    assert ahead.generate(PROMPTS[0], two)[0].text == before


def test_text_that_only_may_begin_a_stop_string_comes_out_later(llm: LLM) -> None:
    ids = plain_ids(llm, PROMPTS[0], WARM)
    text = llm.tokenizer.decode(ids)
    for size in (1, 2, 5):
        never = tuple(text[i : i + size] + "\x00" for i in range(len(text)))  # every beginning, no end
        params = SamplingParams(temperature=0.8, seed=7, max_tokens=32, stop=never)
        assert llm.generate(PROMPTS[0], params)[0].text == text
        assert "".join(p.text for p in llm.stream(PROMPTS[0], params)) == text
    held = Detokenizer(llm.tokenizer.stream(), SamplingParams(stop=(text + "!",)), frozenset())
    for token in ids:
        assert not held(token)
    assert "".join(held.texts) == ""
    held.finish()
    assert "".join(held.texts) == text


def test_the_earliest_of_several_stop_strings_counts(llm: LLM) -> None:
    text = llm.tokenizer.decode(plain_ids(llm, PROMPTS[0], WARM))
    late, early = text[20:24], text[8:12]
    places = {s: text.find(s) for s in (late, early)}
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=32, stop=(late, early))
    assert llm.generate(PROMPTS[0], params)[0].text == text[: min(places.values())]


def test_min_tokens_hold_a_stop_string_off(llm: LLM) -> None:
    ids = plain_ids(llm, PROMPTS[0], WARM)
    stop = llm.tokenizer.decode(ids[:1])
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=32, stop=stop, min_tokens=4)
    (result,) = llm.generate(PROMPTS[0], params)
    assert result.text.startswith(stop)
    assert len(result.token_ids) >= 4


def test_the_context_bounds_an_answer(folder: Path) -> None:
    short = LLM(folder, dtype="float32", k=4, max_length=24)
    room = 24 - len(short.tokenizer.encode_prompt(PROMPTS[0]))
    (result,) = short.generate(PROMPTS[0], SamplingParams(max_tokens=500, ignore_eos=True))
    assert (len(result.token_ids), result.finish_reason) == (room, "length")


# ---------------------------------------------------------------- reported statistics


def test_logprobs_are_the_targets(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=16, logprobs=3)
    for speculate in (True, False):
        (result,) = prophet(llm, PROMPTS[0], params).generate(PROMPTS[0], params, speculate)
        assert len(result.logprobs) == len(result.token_ids)
        wanted = torch.log_softmax(logits_of(llm, result.prompt_token_ids + result.token_ids), -1)
        for i, (token, given) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            row = wanted[len(result.prompt_token_ids) - 1 + i]
            assert given.token == token
            assert given.logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert [t for t, _ in given.top] == row.topk(3).indices.tolist()
            assert [v for _, v in given.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)
    assert llm.generate(PROMPTS[0], WARM)[0].logprobs is None


def logits_of(llm: LLM, tokens: list[int]) -> torch.Tensor:
    cache = Cache(len(tokens) + 1, 1, len(tokens) + 1)
    plane = cache.add_plane(*llm.target.plane_shape)
    seq = Sequence(1, tokens)
    cache.open(seq)
    cache.reserve(seq, len(tokens), 0)
    packed = BatchBuilder(cache)
    packed.pending(seq, 0, len(tokens), want=False)
    packed.want = list(range(len(tokens)))
    return llm.target.forward(rows_of(packed), plane).logits


def test_bad_words_never_appear(llm: LLM) -> None:
    ids = plain_ids(llm, PROMPTS[0], SamplingParams(max_tokens=24))
    one, two = llm.tokenizer.decode(ids[3:4]), llm.tokenizer.decode(ids[5:7])  # a word of one token, one of two
    params = SamplingParams(max_tokens=24, bad_words=(one, two))
    (result,) = llm.generate(PROMPTS[0], params)
    assert result.token_ids != ids
    assert result.token_ids == plain_ids(llm, PROMPTS[0], params)
    for ids in llm._bad_words(params):
        assert not any(tuple(result.token_ids[i : i + len(ids)]) == ids for i in range(len(result.token_ids)))


def test_stats_add_up(llm: LLM) -> None:
    (result,) = prophet(llm, PROMPTS[0], WARM, k=4).generate(PROMPTS[0], WARM)
    stats = result.stats
    assert stats.accepted == result.origins.count("a")
    assert stats.emitted == len(result.token_ids) == len(result.origins) == 32
    assert (stats.steps, stats.passes) == (7, 7)  # five tokens a step
    assert stats.alpha == stats.accepted / stats.reached == 1.0
    assert stats.tau == 32 / 7
    assert stats.alpha_by_position == [1.0] * 4
    assert set(stats.seconds) == {"draft", "verify", "overlap", "judge"}
    assert all(seconds >= 0 for seconds in stats.seconds.values())
    assert stats.failures == 0
    (plain,) = llm.generate(PROMPTS[0], WARM, speculate=False)
    assert (plain.stats.alpha, plain.stats.tau, plain.stats.alpha_by_position) == (None, 1.0, [])
    assert (plain.stats.steps, plain.stats.drafted, plain.origins) == (32, 0, "b" * 32)


def test_a_failing_drafter_costs_only_speed(llm: LLM) -> None:
    class Broken(Drafter):
        name = "broken"

        def draft(self, request: DraftRequest) -> Draft:
            raise ZeroDivisionError("oops")

    (result,) = llm.using(drafter=Broken, k=3).generate(PROMPTS[0], WARM)
    assert result.token_ids == plain_ids(llm, PROMPTS[0], WARM)
    assert result.stats.failures > 0


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("k", [0, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_pieces_add_up_to_the_text(llm: LLM, temperature: float, k: int) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=32)
    ahead = prophet(llm, PROMPTS[1], params, k)
    pieces = list(ahead.stream(PROMPTS[1], params))
    (result,) = ahead.generate(PROMPTS[1], params)
    assert "".join(p.text for p in pieces) == result.text
    assert [i for p in pieces for i in p.token_ids] == result.token_ids
    assert "".join(p.origins for p in pieces) == result.origins
    for piece in pieces:
        assert "".join(piece.texts) == piece.text
        assert len(piece.texts) == len(piece.token_ids) == len(piece.origins)
        assert piece.rejected == []
    assert sum(p.origins.count("a") for p in pieces) == ahead.last.stats.accepted
    assert len(pieces) == ahead.last.stats.steps


def test_pieces_name_what_was_drafted_in_vain(llm: LLM) -> None:
    class Wrong(Drafter):
        name = "wrong"

        def draft(self, request: DraftRequest) -> Draft:
            seqs, budget = request.seqs, request.budgets
            return Draft.pack(chain([seq.tokens[-1]] * k) for seq, k in zip(seqs, budget, strict=True))

    pieces = list(llm.using(drafter=Wrong, k=2).stream(PROMPTS[0], SamplingParams(max_tokens=6)))
    assert any(p.rejected for p in pieces)
    for piece in pieces:
        assert len(piece.rejected) + piece.origins.count("a") <= 2


def test_half_characters_are_never_shown(llm: LLM) -> None:
    core = llm.tokenizer
    ids = core.encode("naïve €5 😀!")
    reader = Detokenizer(core.stream(continuing=True), SamplingParams(stop="zzz"), frozenset())
    for token in ids:
        reader(token)
        assert "\ufffd" not in "".join(reader.texts)
    reader.finish()
    assert "".join(reader.texts) == "naïve €5 😀!"
    cut = Detokenizer(core.stream(continuing=True), SamplingParams(), frozenset())
    for token in core.encode("😀")[:-1]:
        cut(token)
    cut.finish()
    assert "".join(cut.texts) == "\ufffd"


class Counting:
    """A decoder that counts how often it is called."""

    def __init__(self, stream: object) -> None:
        self.stream, self.pushed = stream, 0

    def push(self, ids: list[int]) -> str:
        self.pushed += len(ids)
        return self.stream.push(ids)

    def flush(self) -> str:
        return self.stream.flush()


@pytest.mark.parametrize("text", ["naïve €5 😀!", "one two three", "the quick brown fox\n\n  jumps"])
def test_text_is_decoded_when_somebody_asks_unless_it_may_end_the_text(llm: LLM, text: str) -> None:
    ids, end = llm.tokenizer.encode(text), 1
    ids = [*ids[:3], end, *ids[3:]]

    def reader(**params: object) -> tuple[Detokenizer, Counting]:
        decoder = Counting(llm.tokenizer.stream(continuing=True))
        return Detokenizer(decoder, SamplingParams(**params), frozenset({end})), decoder

    lazy, decoder = reader()
    eager, watched = reader()
    careful, watching = reader(stop="\x00\x00")  # never generated, but searched
    for i, token in enumerate(ids):
        assert lazy(token) is eager(token) is careful(token) is False
        assert decoder.pushed == 0  # nothing was read yet
        assert len(eager.texts) == i + 1
        assert watched.pushed == watching.pushed == i + 1 - (i >= 3)  # an end token has no text
    assert lazy.texts == eager.texts == careful.texts
    assert decoder.pushed == len(ids) - 1
    for each in (lazy, eager, careful):
        each.finish()
    assert lazy.texts == eager.texts == careful.texts
    assert "".join(lazy.texts) == text
    assert lazy.texts[3] == ""


def test_a_lazy_reader_may_be_asked_at_any_time(llm: LLM) -> None:
    ids = llm.tokenizer.encode("naïve one two €5 😀 three")
    whole = Detokenizer(llm.tokenizer.stream(continuing=True), SamplingParams(), frozenset())
    for token in ids:
        whole(token)
    for stride in (1, 2, 3, 5):
        reader = Detokenizer(llm.tokenizer.stream(continuing=True), SamplingParams(), frozenset())
        for i, token in enumerate(ids):
            reader(token)
            if i % stride == 0:
                assert reader.texts == whole.texts[: i + 1]
        assert reader.texts == whole.texts


def test_leaving_a_stream_frees_everything(llm: LLM) -> None:
    quiet = llm.using(k=3)
    cache = quiet.engine.cache
    for piece in quiet.stream(PROMPTS[0], WARM):
        assert piece.token_ids
        assert quiet.engine.busy
        break
    assert not quiet.engine.busy
    assert not cache.rows
    assert cache.available == cache.slots
    cache.check()
    assert quiet.last.finish == "cancelled"
    stream = quiet.stream(PROMPTS[0], WARM)
    next(stream)
    stream.close()
    assert not quiet.engine.busy
    assert not quiet._rejected
    quiet.stream(PROMPTS[0], WARM)  # never started: nothing runs
    assert not quiet.engine.busy
    assert quiet.generate(PROMPTS[0], WARM)[0].token_ids == plain_ids(llm, PROMPTS[0], WARM)


@pytest.mark.parametrize("lengths", [(20, 20), (5, 30), (30, 5)])
def test_interleaved_streams_do_not_meet(llm: LLM, lengths: tuple[int, int]) -> None:
    each = [SamplingParams(temperature=0.8, seed=i, max_tokens=n) for i, n in enumerate(lengths)]
    expected = [llm.generate(PROMPTS[i], each[i])[0] for i in (0, 1)]
    streams = [llm.stream(PROMPTS[i], each[i]) for i in (0, 1)]
    pieces = list(itertools.zip_longest(*streams))
    for i in (0, 1):
        own = [pair[i] for pair in pieces if pair[i] is not None]
        assert "".join(p.text for p in own) == expected[i].text
        assert [t for p in own for t in p.token_ids] == expected[i].token_ids
    assert not llm.engine.busy
    llm.engine.cache.check()


def test_generate_in_the_middle_of_a_stream(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], WARM)[0]
    stream = llm.stream(PROMPTS[0], WARM)
    text = next(stream).text
    assert llm.generate(PROMPTS[1], WARM)[0].token_ids == plain_ids(llm.using(), PROMPTS[1], WARM)
    assert text + "".join(p.text for p in stream) == expected.text


# ---------------------------------------------------------------- argument names


def test_names_of_hugging_face(llm: LLM, folder: Path) -> None:
    lookup = LLM(folder, dtype="float32", prompt_lookup_num_tokens=3)
    assert (lookup.config.drafter_name, lookup.config.k) == ("ngram", 3)
    assisted = LLM(folder, dtype="float32", assistant_model=str(folder), num_assistant_tokens=2)
    assert (assisted.config.drafter_name, assisted.config.k) == ("model", 2)
    in_memory = LLM(folder, dtype="float32", assistant_model=llm.target, k=2)
    for each in (lookup, assisted, in_memory):
        assert each.generate(PROMPTS, WARM)[2].token_ids == plain_ids(llm, PROMPTS[2], WARM)
    (result,) = assisted.generate(PROMPTS[0], WARM)
    assert result.stats.alpha == 1.0  # the target's own copy is always right


def test_vllms_speculative_config(folder: Path) -> None:
    as_json = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    ngram = LLM(folder, dtype="float32", speculative_config=as_json)
    assert (ngram.config.drafter_name, ngram.config.k) == ("ngram", 5)
    assert ngram.engine.drafter._sizes == range(3, 0, -1)
    model = LLM(folder, dtype="float32", speculative_config={"model": str(folder), "num_speculative_tokens": 2})
    assert (model.config.drafter_name, model.config.k) == ("model", 2)
    block = {"method": "suffix", "num_speculative_tokens": 2, "rejection_sample_method": "block"}
    assert LLM(folder, dtype="float32", speculative_config=block).config.rule == "block"
    for bad in ("{", "[1]", '{"method": "mtp9"}'):
        with pytest.raises(ConfigError, match="speculative"):
            LLM(folder, speculative_config=bad)


def test_using_keeps_what_is_not_changed(llm: LLM) -> None:
    assisted = llm.using(drafter="model", draft_model=llm.target, k=2)
    wider = assisted.using(k=5)
    assert (wider.config.drafter_name, wider.config.k, wider.target) == ("model", 5, llm.target)
    other = assisted.using(drafter="ngram")
    assert (other.config.drafter_name, other.config.k, other.config.options) == ("ngram", 2, {})


def test_plug_in_drafters(llm: LLM) -> None:
    @register("parrot")
    class Parrot(Drafter):
        """Says the last two tokens again."""

        def draft(self, request: DraftRequest) -> Draft:
            seqs, budget = request.seqs, request.budgets
            return Draft.pack(chain((s.tokens[-2:] * k)[:k]) for s, k in zip(seqs, budget, strict=True))

    try:
        for method in ("parrot", Parrot):
            (result,) = llm.using(drafter=method, k=3).generate(PROMPTS[0], WARM)
            assert result.token_ids == plain_ids(llm, PROMPTS[0], WARM)
            assert result.stats.drafted > 0
    finally:
        from outrider import drafters

        del drafters._REGISTRY["parrot"]


def test_a_second_request_reuses_the_first_ones_prefix(llm: LLM) -> None:
    fresh = llm.using(k=4)
    first, second = (fresh.generate(PROMPTS[0], WARM)[0] for _ in range(2))
    assert (first.stats.reused, second.stats.reused) == (0, len(first.prompt_token_ids) - 1)
    assert first.token_ids == second.token_ids
    longer = first.prompt_token_ids + first.token_ids
    (third,) = fresh.generate([longer], WARM)
    assert third.stats.reused == len(longer) - 1
    assert third.token_ids == plain_ids(llm.using(), longer, WARM)


# ---------------------------------------------------------------- what goes wrong is a sentence


BAD_PARAMS = [
    {"temperature": -1},
    {"temperature": 101},
    {"temperature": math.nan},
    {"top_p": 0},
    {"top_p": math.nan},
    {"min_p": 1.5},
    {"repetition_penalty": 0},
    {"presence_penalty": math.inf},
    {"max_tokens": 0},
    {"min_tokens": -1},
    {"n": 0},
    {"seed": -(2**63) - 1},
    {"logprobs": -1},
    {"stop": ""},
]


@pytest.mark.parametrize("bad", BAD_PARAMS, ids=str)
def test_bad_sampling_parameters(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**bad)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda llm: llm.generate(None), "A prompt is a text or a list of token ids, but this one is None."),
        (lambda llm: llm.generate(3.5), "this one is 3.5"),
        (lambda llm: llm.generate([None]), "this one is None"),
        (lambda llm: llm.generate(b"abc"), "this one is bytes: decode it first"),
        (lambda llm: llm.generate([{"role": "user", "content": "x"}]), "this one is {"),
        (lambda llm: llm.chat("hello"), "`chat` takes messages"),
        (lambda llm: llm.chat([]), "at least one"),
        (lambda llm: llm.chat([{"role": "user"}]), "A message is a dict with 'role' and 'content'"),
        (lambda llm: llm.generate("one", {"max_tokens": 3}), "The second argument is SamplingParams"),
        (lambda llm: llm.stream(None), "this one is None"),
    ],
)
def test_wrong_calls_are_sentences(llm: LLM, call: Callable[[LLM], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        call(llm)


def test_seeds_at_the_ends_of_their_range_and_no_limit(llm: LLM) -> None:
    """The j-th answer has seed + j in 64 bits, and its own seed repeats it."""
    for seed in (2**63 - 1, -(2**63), 2**63 - 2, 0):
        params = SamplingParams(temperature=1.0, seed=seed, n=3, max_tokens=8)
        for answer in llm.generate(PROMPTS[0], params)[0].outputs:
            assert -(2**63) <= answer.seed < 2**63
            (again,) = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=answer.seed, max_tokens=8))
            assert again.token_ids == answer.token_ids
    assert SamplingParams(seed=-1).seed is None  # vLLM's "any"
    whole = llm.using(max_length=64).generate(PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert (whole.finish_reason, len(whole.prompt_token_ids) + len(whole.token_ids)) == ("length", 64)


BAD_CONFIGS = [
    ({"drafter": "nobody"}, "no drafter called 'nobody'"),
    ({"k": -1}, "k is -1"),
    ({"k": 65}, "k is 65"),
    ({"k": "many"}, "k is 'many'"),
    ({"rule": "maybe"}, "no rule 'maybe'"),
    ({"dtype": "int3"}, "no dtype 'int3'"),
    ({"kv_dtype": "int3"}, "no kv_dtype 'int3'"),
    ({"kv_cache_dtype": "fp8"}, "no kv_dtype 'fp8'"),
    ({"max_length": 100_000}, "max_length is 100000"),
    ({"max_batch": 0}, "max_batch is 0"),
    ({"drafter": "model"}, "needs a draft model"),
    ({"drafter": "cascade", "cascade": ["cascade"]}, "cascade"),
    ({"drafter": "ngram", "ngram_max": 1, "ngram_min": 3}, "ngram_min"),
    ({"drafter": "layerskip", "skip_layers": [9]}, "Layer 9"),
    ({"drafter": "model", "draft_model": "/no/such/draft"}, "/no/such/draft"),
]


@pytest.mark.parametrize(("bad", "sentence"), BAD_CONFIGS, ids=str)
def test_bad_configurations(folder: Path, bad: dict[str, object], sentence: str) -> None:
    with pytest.raises(OutriderError, match=sentence):
        LLM(folder, **({"dtype": "float32"} | bad))


def test_a_draft_model_with_another_vocabulary(llm: LLM, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", texts=("zwölf Boxkämpfer jagen Viktor",) * 3)
    translated = llm.using(drafter="model", draft_model=str(other), k=3)
    params = SamplingParams(max_tokens=8)
    assert translated.generate("one", params)[0].token_ids == llm.generate("one", params)[0].token_ids
    with pytest.raises(ConfigError, match="vocabularies differ"):
        llm.using(drafter="model", draft_model=toy())


def test_prompts_that_cannot_be_answered(llm: LLM) -> None:
    room = llm.engine.cache.length
    with pytest.raises(ConfigError, match=rf"{room} tokens, but only {room} fit"):
        llm.generate([[5] * room])
    assert len(llm.generate([[5] * (room - 1)])[0].token_ids) == 1
    with pytest.raises(ConfigError, match="empty"):
        llm.generate([[]])
    for outside in (-1, 10**6):
        with pytest.raises(ConfigError, match="vocabulary"):
            llm.generate([[5, outside]])
    with pytest.raises(ConfigError, match="empty"):
        llm.stream([])


def test_models_that_are_not_there() -> None:
    for name in ("/no/such/folder", "nonsense", "./x.gguf"):
        with pytest.raises(ModelError, match=name.lstrip("./")):
            LLM(name)


def test_nan_weights_are_a_sentence_and_the_llm_says_it_again(tmp_path: Path) -> None:
    sick = LLM(tiny.save(tmp_path, poison="model.norm.weight"), dtype="float32", k=2)
    for _ in range(2):
        with pytest.raises(ModelError, match="NaN"):
            sick.generate(PROMPTS[0])
    with pytest.raises(ModelError, match="NaN"):
        list(sick.stream(PROMPTS[0]))
    assert not sick.engine.busy


@pytest.mark.parametrize("drafter", ["off", "suffix", "auto", "cascade"])
@pytest.mark.parametrize("closed", [True, False])
def test_memory_is_free_with_the_last_reference(llm: LLM, drafter: str, closed: bool) -> None:
    """K and V of a sibling would else stay until the garbage collector runs, which does not know how large they are."""
    gc.collect()
    gc.disable()
    try:
        sibling = llm.using(drafter=drafter)
        sibling.generate("Once upon a time", SamplingParams(max_tokens=4))
        engine = sibling.engine
        alive = [weakref.ref(part) for part in (sibling, engine, engine.cache, engine.drafter, engine.controller)]
        if closed:
            sibling.close()
        del sibling, engine
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_ctrl_c_leaves_a_usable_llm(llm: LLM, method: str) -> None:
    class Impatient(Drafter):
        """The user loses patience in the third step, once."""

        name = "impatient"
        left = 3

        def draft(self, request: DraftRequest) -> Draft:
            seqs = request.seqs
            Impatient.left -= 1
            if Impatient.left == 0:
                raise KeyboardInterrupt
            return Draft.empty(len(seqs))

    interrupted = llm.using(drafter=Impatient, k=2)
    other = interrupted.stream(PROMPTS[1], WARM)
    first = next(other)
    with pytest.raises(KeyboardInterrupt):
        interrupted.generate(PROMPTS, WARM) if method == "generate" else list(interrupted.stream(PROMPTS[0], WARM))
    assert interrupted.generate(PROMPTS[0], WARM)[0].token_ids == plain_ids(llm, PROMPTS[0], WARM)
    whole = first.token_ids + [t for p in other for t in p.token_ids]  # what was not interrupted goes on
    assert whole == plain_ids(llm, PROMPTS[1], WARM)
    assert not interrupted.engine.busy


# ---------------------------------------------------------------- the default model


REAL_PROMPTS = ["def add(a, b):", "The capital of France is", "one two three one two three one two"] * 2
REAL_PARAMS = [SamplingParams(temperature=0.8 * (i > 2), seed=5, max_tokens=12) for i in range(6)]
DRAFTERS = ["suffix", "ngram", "layerskip", "model"]


@pytest.mark.real
def test_real_text_is_sensible_and_streams(real: LLM) -> None:
    params = SamplingParams(max_tokens=12)
    (result,) = real.generate("The capital of France is", params)
    assert "Paris" in result.text
    assert result.text.startswith(" ")  # a continuation begins with its space
    assert "".join(p.text for p in real.stream("The capital of France is", params)) == result.text


@pytest.mark.real
def test_real_chat_ends_by_itself_inside_an_accepted_block(real: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello in one short sentence."}]
    (result,) = real.chat(messages, SamplingParams(max_tokens=48), speculate=False)
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] in real.tokenizer.eos_ids
    assert "<|im_end|>" not in result.text
    ahead = real.using(drafter=Prophet, k=16, future=result.token_ids + [5] * 16)
    (same,) = ahead.chat(messages, SamplingParams(max_tokens=48))
    assert (same.token_ids, same.text, same.finish_reason) == (result.token_ids, result.text, "stop")
    assert same.origins[-1] == ("b" if len(same.token_ids) % 17 == 0 else "a")
    assert same.stats.steps == math.ceil(len(same.token_ids) / 17)


@pytest.mark.real
def test_real_stop_strings_and_bad_words(real: LLM) -> None:
    prompt, params = REAL_PROMPTS[1], SamplingParams(max_tokens=16)
    text = real.tokenizer.decode(plain_ids(real, prompt, params))
    stop = text[9:13]
    (result,) = real.generate(prompt, SamplingParams(max_tokens=16, stop=stop))
    assert result.text == text[: text.find(stop)]
    assert result.finish_reason == "stop"
    (banned,) = real.generate(prompt, SamplingParams(max_tokens=16, bad_words=("Paris",)))
    assert "Paris" not in banned.text


@pytest.mark.real
def test_real_prefixes_are_reused(real: LLM) -> None:
    fresh, params = real.using(), SamplingParams(max_tokens=8, temperature=0.8, seed=1)
    first, second = (fresh.chat([{"role": "user", "content": "Count to five."}], params)[0] for _ in range(2))
    assert second.stats.reused == len(first.prompt_token_ids) - 1
    assert first.token_ids == second.token_ids


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def exact(request: pytest.FixtureRequest, real: LLM) -> LLM:
    llm = real if real.dtype == request.param else LLM(dtype=request.param, k=4, max_length=512)
    if not llm.target.exact:
        pytest.skip(f"this machine has no row-invariant products in {request.param}")
    return llm


@pytest.fixture(scope="module")
def spoken(exact: LLM) -> list[list[int]]:
    """The target alone, one request at a time."""
    return [r.token_ids for r in exact.using(drafter="off", max_batch=1).generate(REAL_PROMPTS, REAL_PARAMS)]


@pytest.mark.real
@pytest.mark.parametrize("name", DRAFTERS)
def test_real_drafters_change_nothing(exact: LLM, spoken: list[list[int]], name: str) -> None:
    options = {"draft_model": exact.target} if name == "model" else {}
    results = exact.using(drafter=name, k=3, **options).generate(REAL_PROMPTS, REAL_PARAMS)
    assert [r.token_ids for r in results] == spoken
    if name == "model":
        assert all(r.stats.alpha == 1.0 for r in results)


@pytest.mark.real
@pytest.mark.parametrize("changes", [{"max_batch": 8}, {"max_rows": 3}], ids=str)
def test_real_batches_and_chunks_change_nothing(exact: LLM, spoken: list[list[int]], changes: dict[str, int]) -> None:
    batched = exact.using(drafter="suffix", k=3, **changes)
    assert [r.token_ids for r in batched.generate(REAL_PROMPTS, REAL_PARAMS)] == spoken


def test_a_misspelt_option_is_a_sentence(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no option 'ngram_maxx'.*'ngram_max'"):
        LLM(folder, drafter="ngram", ngram_maxx=3)


def test_banning_every_token_is_a_sentence(llm: LLM) -> None:
    bias = dict.fromkeys(range(llm.target.config.vocab_size), float("-inf"))
    with pytest.raises(ConfigError, match="ban every token"):
        llm.generate("one", SamplingParams(temperature=1.0, logit_bias=bias))
