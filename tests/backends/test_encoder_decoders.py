"""T5, BART and Marian in the built-in decoder: the numbers and texts of `transformers`, in every precision, in passes
of any size, with drafts and with neighbours that have other sources."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider import LLM, SamplingParams
from outrider.backends import Part
from outrider.backends.cpu import quantise as quant
from outrider.backends.cpu.int8 import Int8Decoder, open_int8
from outrider.backends.encoder import distance_bias
from outrider.backends.rows import rows_of
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.drafters.layerskip.search import ScoredText, Skip
from outrider.engine.batch import BatchBuilder
from outrider.errors import ConfigError, ModelError
from outrider.llm import build_engine
from outrider.models.checkpoint import in_memory, open_checkpoint
from outrider.models.config import UnsupportedModel
from outrider.models.encoder_decoder import model_config, sinusoids
from outrider.models.foreign import adapt_tokenizer
from outrider.models.weights import check
from outrider.testing import check_drafter
from outrider.types import Sequence

from support import foreign
from support.pairs import CASES, Bench, ours, pair, source, text, their_logits

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@functools.cache
def rounded(case: str) -> Int8Decoder:
    _, config, weights = pair(case)
    return Int8Decoder(config, quant.calibrated(config, weights, source(80)), 80)


def models(case: str) -> list[Transformer]:
    return [ours(case, F32), ours(case, BF16), rounded(case)]


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("case", CASES)
def test_float32_logits_are_those_of_transformers(case: str) -> None:
    theirs, config, weights = pair(case)
    check(weights, config, Path(case))
    wanted = their_logits(theirs, source(), text())
    assert wanted.std(0).mean() > 0.05  # rows differ: there is something to compare
    open_ = [i for i in range(config.vocab_size) if i not in config.banned]
    for chunk in (100, 7, 1):
        got = Bench(ours(case, F32), text(), source()).logits(chunk)
        torch.testing.assert_close(got[:, open_], wanted[:, open_], atol=2e-4, rtol=2e-4)
        assert (got[:, list(config.banned)] == -torch.inf).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_float64_logits_are_those_of_transformers(case: str) -> None:
    theirs, config, _ = pair(case)
    wanted = their_logits(theirs.double(), source(), text())
    theirs.float()
    open_ = [i for i in range(config.vocab_size) if i not in config.banned]
    got = Bench(ours(case, F64), text(), source()).logits(7)
    near = 1e-4 if config.architecture == "t5" else 1e-6  # T5's norms are float32 there in any model, as are sinusoids
    torch.testing.assert_close(got[:, open_], wanted[:, open_], atol=near, rtol=near)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_passes_of_any_size_drafts_and_neighbours_give_the_same_bits(case: str) -> None:
    """Chunks of every size; a tree of two branches; another sequence, with a source of its own, in the same pass."""
    for model in models(case):
        whole = Bench(model, text(), source()).logits()
        for chunk in (1, 5, 16):
            assert torch.equal(Bench(model, text(), source()).logits(chunk), whole)
        root, tokens, parents = text(23), [5, 6, 5, 7, 8, 9], [-1, -1, 0, 1, 2, 3]
        bench = Bench(model, root, source(), spare=len(tokens))
        packed = BatchBuilder(bench.cache)
        packed.pending(bench.seq, 0, len(root), want=True)
        packed.nodes(bench.seq, tokens, parents, range(6), range(6))
        drafted = model.forward(rows_of(packed), bench.plane).logits
        for node, path in {4: [5, 5, 8], 5: [6, 7, 9]}.items():
            assert torch.equal(drafted[1 + node], Bench(model, root + path, source()).logits(chunk=1)[-1])
        bench = Bench(model, text(), source())
        other = bench.add(2, text(20), source(11, salt=5))
        both = model.forward(bench.rows((other, 0, 20), (bench.seq, 0, 37)), bench.plane).logits
        assert torch.equal(both[20:], whole)
        assert torch.equal(both[:20], Bench(model, text(20), source(11, salt=5)).logits())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_and_int8_are_near(case: str) -> None:
    _, config, _ = pair(case)
    open_ = [i for i in range(config.vocab_size) if i not in config.banned]
    exact = Bench(ours(case, F64), text(), source()).logits()[:, open_]
    for model, least in ((ours(case, BF16), 0.995), (rounded(case), 0.97)):
        got = Bench(model, text(), source()).logits()
        assert got.dtype == F32
        likeness = torch.cosine_similarity(got[:, open_].double(), exact, dim=1)
        assert likeness.median() > least, model.dtype
        assert (got[:, list(config.banned)] == -torch.inf).all()


def test_parts_of_the_layers_and_taps() -> None:
    """A part resumes to the same bits; a skipped layer has neither of its attentions."""
    for case in ("t5", "marian"):
        model = ours(case, F32)
        bench = Bench(model, text(), source())
        rows = bench.rows((bench.seq, 0, 37))
        out = model.forward(rows, bench.plane, taps=(0, 1, 2))
        for cut in (1, 2):
            first = model.forward(rows, bench.plane, Part(stop=cut, head=False), taps=(cut - 1,))
            again = model.forward(rows, bench.plane, Part(start=cut), x=first.hidden[cut - 1])
            assert torch.equal(again.logits, out.logits)
        without = Part(skip_attention=frozenset({1}), skip_mlp=frozenset({1}))
        tapped = model.forward(rows, bench.plane, without, taps=(0, 1)).hidden
        assert torch.equal(tapped[0], tapped[1])


def test_a_source_is_read_once_shared_and_read_again_after_eviction() -> None:
    model = ours("marian", F32)
    assert model.reader is not None
    read: list[int] = []
    states = model.reader.states
    model.reader.states = lambda sources: read.extend(map(len, sources)) or states(sources)  # type: ignore[method-assign]
    try:
        bench = Bench(model, text(9), source())
        whole = bench.logits(chunk=2)
        twin = bench.add(2, text(9), source())
        assert bench.cache.rows[2].source == bench.cache.rows[1].source
        assert torch.equal(model.forward(bench.rows((twin, 0, 9)), bench.plane).logits, whole)
        assert read == [30]
        bench.cache.free(twin)
        bench.cache.check()
        assert bench.plane.has_source(bench.cache.rows[1].source[0])
        bench.cache.free(bench.seq)
        bench.cache.check()
        bench.seq = bench.add(3, text(9), source())
        assert torch.equal(bench.logits(), whole)
        assert read == [30, 30]
    finally:
        del model.reader.states  # the method again


def generated(model: Transformer, prompts: list[list[int]], config: Config, tokens: int = 24) -> list[list[int]]:
    engine, seqs = build_engine(model, config), []
    for i, prompt in enumerate(prompts):
        start = model.opening(prompt)
        params = SamplingParams(max_tokens=tokens, temperature=0)
        seqs.append(Sequence(i, start.tokens, params, source=start.source, ends=frozenset({0})))
        engine.add(seqs[-1])
    while engine.busy:
        engine.step()
        engine.cache.check()
    return [seq.generated for seq in seqs]


@pytest.mark.one_in(4, 1)
@pytest.mark.parametrize("case", CASES)
def test_float32_texts_are_those_of_transformers(case: str) -> None:
    """Greedy, a batch of sources, without and with drafts of a weaker model with an encoder of its own."""
    theirs, _, _ = pair(case)
    prompts = [source(9), source(30, salt=3), source(4, salt=7)]
    settings = {"max_new_tokens": 24, "do_sample": False, "num_beams": 1}
    wanted = []
    for prompt in prompts:
        ids = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
        wanted.append(ids[0, len(ours(case, F32).starts) :].tolist())
    model, small = ours(case, F32), ours(case, F32, blur=0.1)
    assert generated(model, prompts, Config(drafter="off")) == wanted
    options = {"draft_model": small}
    assert generated(model, prompts, Config(drafter="model", k=4, options=options)) == wanted
    crowded = Config(drafter="suffix", k=3, max_batch=2, cache_tokens=200, max_length=60)
    assert generated(model, prompts * 3, crowded) == wanted * 3


@pytest.mark.parametrize(
    ("drafter", "options"),
    [("layerskip", {"skip_mlp": [1]}), ("model", {"draft_model": "marian"}), ("exit", None), ("suffix", {})],
)
@pytest.mark.parametrize("case", ["marian", "t5 gated, not scaled", "bart"])
@pytest.mark.one_in(11, 1)
def test_no_drafter_changes_a_text(case: str, drafter: str, options: dict[str, Any] | None) -> None:
    """Batches, prefix reuse, preemption and failures."""
    if drafter == "model":
        options = {"draft_model": ours(case, F32, blur=0.1)}
    assert check_drafter(drafter, options, ours(case, F32), tokens=10)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_no_drafter_changes_a_text_in_any_precision(case: str, kind: int) -> None:
    model = models(case)[kind]
    assert check_drafter("layerskip", {"skip_layers": [1]}, model, tokens=16)
    assert check_drafter("model", {"draft_model": ours(case, F32, blur=0.1)}, model, tokens=16)
    assert check_drafter("ngram", {}, model, tokens=16)


# ------------------------------------------------------------ parts


@pytest.mark.parametrize(("buckets", "limit"), [(32, 128), (12, 20), (8, 16)])
@pytest.mark.parametrize("both_ways", [False, True])
def test_distances_are_biased_as_in_transformers(buckets: int, limit: int, both_ways: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    weight, length = torch.randn(buckets, 4), 200
    config: Any = type("C", (), {"distance_buckets": buckets, "distance_limit": limit})
    table = distance_bias(weight, config, length, both_ways)
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    index = T5Attention._relative_position_bucket(key - query, both_ways, buckets, limit)
    shift = query - key + (length - 1 if both_ways else 0)
    seen = torch.ones_like(index, dtype=torch.bool) if both_ways else key <= query
    assert torch.equal(table.T[shift.clamp(min=0)][seen], weight[index][seen])


def test_sinusoids_are_marians() -> None:
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    theirs = MarianSinusoidalPositionalEmbedding(40, 24)
    assert torch.equal(sinusoids(40, 24), theirs.create_weight())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"normalize_before": True}, "norms are placed otherwise"),
        ({"activation_function": "tanh"}, "activation 'tanh'"),
        ({"is_encoder_decoder": False}, "one half"),
    ],
)
def test_variants_that_would_differ_go_to_transformers(change: dict[str, Any], why: str) -> None:
    data = pair("marian")[0].config.to_dict()
    with pytest.raises(UnsupportedModel, match=why):
        model_config(data | change)


def test_broken_configurations_are_one_sentence() -> None:
    data = pair("bart")[0].config.to_dict()
    nothing = dict.fromkeys(("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    for change, why in (({"d_model": "wide"}, "strange value"), (nothing, "does not say how its answers begin")):
        with pytest.raises(ModelError, match=why):
            model_config(data | change)


# ------------------------------------------------------------ folders


@pytest.mark.parametrize("kind", foreign.TWO_SIDED)
def test_a_folder_runs_in_the_built_in_decoder(kind: str, tmp_path: Path) -> None:
    """From safetensors and from a pickle of tensors; the numbers of the files that transformers wrote."""
    foreign.save(tmp_path, kind)
    checkpoint = open_checkpoint(tmp_path)
    model = Transformer(checkpoint.config, checkpoint.weights, F32, length=80)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    wanted = their_logits(theirs, source(), text())
    torch.testing.assert_close(Bench(model, text(), source()).logits(), wanted, atol=3e-4, rtol=3e-4)
    llm = LLM(tmp_path, drafter="layerskip", k=3, dtype="float32", device="cpu")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert not llm.backend
    assert llm.generate("the quick brown fox", params)[0].token_ids == (
        llm.using(drafter="off").generate("the quick brown fox", params)[0].token_ids
    )
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    unpickled = open_checkpoint(tmp_path)
    for name in checkpoint.weights.names():
        assert torch.equal(unpickled.weights.get(name, F32), checkpoint.weights.get(name, F32)), name
    (tmp_path / "pytorch_model.bin").write_bytes(b"no tensors at all")
    with pytest.raises(ModelError, match="is damaged, or holds more than tensors"):
        open_checkpoint(tmp_path)


def test_int8_weights_are_those_of_the_folder(tmp_path: Path) -> None:
    """Two models of one shape, as pickles and in memory, do not share a file of quantised weights."""
    texts = []
    for seed in (1, 2):
        module, folder = foreign.module("marian", seed), tmp_path / str(seed)
        foreign.save(folder, "marian", seed)
        torch.save(module.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        opened, held = open_checkpoint(folder), in_memory(module, foreign.tokenizer())[0]
        for checkpoint in (opened, held):
            model = open_int8(checkpoint, 80, folder=tmp_path / "cache")
            texts.append(Bench(model, text(), source()).logits())
    for other in (1, 2):
        assert not torch.equal(texts[0], texts[1 + other])


def test_a_folder_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign.save(tmp_path, "bart")
    with_it = open_checkpoint(tmp_path).tokenizer.encode_prompt("the quick brown fox")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert open_checkpoint(tmp_path).tokenizer.encode_prompt("the quick brown fox") == with_it
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.json, and transformers"):
        open_checkpoint(tmp_path)


def test_what_is_not_understood_still_runs_through_transformers(tmp_path: Path) -> None:
    foreign.save(tmp_path, "marian")
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"activation_function": "tanh"}))
    assert LLM(tmp_path, drafter="off", device="cpu").backend.startswith("transformers runs")


def test_skip_sets_are_scored_with_their_sources() -> None:
    """The full model agrees with itself, and its choices are those of the answer."""
    model = ours("marian", F32)
    prompts = [source(9), source(30, salt=3)]
    answers = list(zip(prompts, generated(model, prompts, Config(drafter="off")), strict=True))
    scored = ScoredText(model, answers)
    assert scored.choices.tolist() == [token for _, answer in answers for token in answer[1:]]
    assert scored.agreement(Skip()) == (scored.positions + 1) / (scored.positions + 2)
    assert scored.seconds(Part()) > 0


def test_what_drafters_cannot_do_with_an_encoder_is_one_sentence() -> None:
    model = ours("marian", F32)
    with pytest.raises(ConfigError, match="does not give a source to its draft model's encoder"):
        build_engine(model, Config(drafter="ahead", options={"draft_model": model}))
    other = foreign.tokenizer()
    other.add_tokens(["another"])
    options = {"draft_model": model, "draft_tokenizer": other}
    with pytest.raises(ConfigError, match="its source cannot be translated"):
        build_engine(model, Config(drafter="model", options=options), adapt_tokenizer(foreign.tokenizer()))


def test_a_source_that_is_too_long_is_refused(tmp_path: Path) -> None:
    llm = LLM(foreign.save(tmp_path, "bart"), drafter="off", dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="encoder reads at most 256"):
        llm.generate([list(range(5, 270))])
