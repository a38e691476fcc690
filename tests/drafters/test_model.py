"""A draft model whose chains are one native call, with all or some of its output rows, behind an encoder or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import SamplingParams
from outrider.backends import Model, Part, ops
from outrider.backends.cpu import quantise as quant
from outrider.backends.cpu.int8 import Int8Decoder, Int8Transformer
from outrider.backends.rows import rows_of
from outrider.backends.toy import RandomWeights
from outrider.config import Config
from outrider.drafters._rollout import Rollout
from outrider.drafters.model import ShortListRollout
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.models.config import ModelConfig
from outrider.testing import check_drafter
from outrider.types import Sequence

from support.pairs import Bench, V as VOCABULARY, pair, source, text

NATIVE = pytest.mark.skipif(ops._loaded().kernels is None, reason="needs a C compiler")
BARTS = ["bart", "bart scaled", "marian", "marian banned", "marian apart"]
SHORT = torch.tensor([0, 3, 5, 6, 7, 10, 12, 20, 21, 22, 40, 41, 60, 61, 62, 63, 70, 71, 72, 73, 80, 81, 82, 85])


def rounded(case: str, blur: float = 0.0) -> Int8Decoder:
    _, config, weights = pair(case, blur)
    return Int8Decoder(config, quant.calibrated(config, weights, source(80)), 80)


def llama() -> Int8Transformer:
    config = ModelConfig(
        architecture="llama", vocab_size=VOCABULARY, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8,
        intermediate_size=48, norm_eps=1e-5, rope_theta=1e4, context_length=80, tied=True,
    )  # fmt: skip
    return Int8Transformer(config, quant.calibrated(config, RandomWeights(config, seed=3), list(range(40))), 80)


def logits_after(model: Any, tokens: list[int], read: list[int]) -> Tensor:
    """Of the next token, by one pass over the whole text in a cache of its own."""
    cache = Cache(128, 1, 80, source_length=model.source_length)
    plane, seq = cache.add_plane(*model.plane_shape), Sequence(1, tokens, source=read)
    cache.open(seq)
    cache.reserve(seq, len(tokens), 0)
    batch = BatchBuilder(cache)
    batch.pending(seq, 0, len(tokens), want=True)
    logits: Tensor = model.forward(rows_of(batch), plane).logits[0]
    return logits


def reference(model: Any, tokens: list[int], read: list[int], k: int) -> tuple[list[int], list[float]]:
    """The likeliest tokens one after the other, each by a pass over the whole text, and their survival."""
    drafted, survival = list[int](), [1.0]
    for _ in range(k):
        shares = torch.softmax(logits_after(model, tokens + drafted, read).double(), -1)
        best = int(shares.argmax())
        survival.append(survival[-1] * float(shares[best]))
        drafted.append(best if model.draft_ids is None else int(model.draft_ids[best]))
    return drafted, survival[1:]


def drafts(model: Model, texts: list[tuple[list[int], list[int]]], k: int, held: int = 0) -> list[Any]:
    """Trees for all texts in one call; the plane holds the first `held` tokens of each already."""
    cache = Cache(512, len(texts), 80, source_length=model.source_length)
    plane, seqs = cache.add_plane(*model.plane_shape), []
    for i, (tokens, read) in enumerate(texts):
        seqs.append(Sequence(i, tokens, SamplingParams(temperature=0), source=read))
        cache.open(seqs[-1])
        cache.reserve(seqs[-1], len(tokens), k)
        if held:
            batch = BatchBuilder(cache)
            batch.pending(seqs[-1], 0, held, want=False)
            model.forward(rows_of(batch), plane, Part(head=False))
            plane.advance(i, held)
    rollout = Rollout(model, cache, plane) if model.draft_ids is None else ShortListRollout(model, cache, plane)
    assert rollout._drafts_at_once(seqs)
    return list(rollout.chains(seqs, [k] * len(seqs)).trees)


@NATIVE
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("case", [*BARTS, "llama"])
def test_one_call_drafts_the_tokens_of_single_passes(case: str, short: bool) -> None:
    """Two texts with sources of their own, from the first token on or after some that the plane holds."""
    model: Any = llama() if case == "llama" else rounded(case)
    if short:
        assert model.shorten(SHORT) == (case != "llama")
    pairs = [(text(17), source(30)), (text(6), source(9, salt=5))]
    pairs = [(tokens, []) for tokens, _ in pairs] if case == "llama" else pairs
    for held in (0, 5):
        for tree, (tokens, read) in zip(drafts(model, pairs, 4, held), pairs, strict=True):
            wanted, survival = reference(model, tokens, read, 4)
            assert tree.tokens == wanted
            assert tree.survival == pytest.approx(survival, rel=1e-3)


@NATIVE
@pytest.mark.parametrize("case", BARTS)
def test_the_native_pass_computes_what_single_operations_compute(case: str) -> None:
    """With parts of the layers, skipped ones and taps."""
    native, plain = rounded(case), rounded(case)
    plain.native = None
    assert native.native is not None
    skips = Part(skip_attention=frozenset({1}), skip_mlp=frozenset({0}))
    for part in (Part(), skips, Part(start=1), Part(stop=1, head=False), Part(vocab=40)):
        outs = []
        for model in (native, plain):
            bench = Bench(model, text(), source())
            x = torch.sin(torch.arange(37 * 32.0)).view(37, 32) if part.start else None
            outs.append(model.forward(bench.rows((bench.seq, 0, 37)), bench.plane, part, x, taps=(0, 1)))
        ours, theirs = outs
        torch.testing.assert_close(ours.logits, theirs.logits, atol=2e-2, rtol=2e-2)
        assert ours.hidden.keys() == theirs.hidden.keys()
        for layer, stream in ours.hidden.items():
            torch.testing.assert_close(stream, theirs.hidden[layer], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("case", ["marian", "marian banned", "t5"])
def test_a_short_list_has_the_same_scores(case: str) -> None:
    whole, short = rounded(case), rounded(case)
    assert short.shorten(SHORT)
    wanted = Bench(whole, text(), source()).logits()[:, SHORT]
    assert torch.equal(Bench(short, text(), source()).logits(), wanted)


@pytest.mark.parametrize("case", ["marian", "bart", "t5"])
def test_a_short_list_changes_no_text(case: str) -> None:
    small = rounded(case, blur=0.1)
    small.shorten(SHORT)
    assert check_drafter("model", {"draft_model": small}, rounded(case), tokens=12)


def test_an_encoder_that_is_shared_reads_each_source_once() -> None:
    """Whoever comes first; and again after many others."""
    target, small = rounded("marian"), rounded("marian", blur=0.1)
    small.reader.share(target.reader)
    read: list[list[int]] = []
    states = target.reader.network.forward
    target.reader.network.forward = lambda rows, *more, **named: (
        read.append(rows.tokens.tolist()) or states(rows, *more, **named)
    )
    first = Bench(small, text(9), source()).logits()
    assert torch.equal(Bench(target, text(9), source()).logits(), Bench(rounded("marian"), text(9), source()).logits())
    assert read == [source()]
    for salt in range(200):
        target.reader._shared_states([source(30, salt=salt + 1)])
    assert sum(map(len, target.reader.recent or ())) <= 4096
    assert torch.equal(Bench(small, text(9), source()).logits(), first)


def test_speculation_with_a_shared_encoder() -> None:
    """The engine reads sources before it drafts: nobody reads one twice."""
    from outrider.llm import build_engine

    target, small = rounded("marian"), rounded("marian", blur=0.1)
    small.reader.share(target.reader)
    texts = []
    for config in (Config(drafter="off"), Config(drafter="model", k=3, options={"draft_model": small})):
        engine, seqs = build_engine(target, config), []
        for i, prompt in enumerate((source(9), source(30, salt=3))):
            start = target.opening(prompt)
            params = SamplingParams(max_tokens=20, temperature=0)
            seqs.append(Sequence(i, start.tokens, params, source=start.source))
            engine.add(seqs[-1])
        while engine.busy:
            step = engine.step()
            assert step is None or ("encode" in step.clock) == (step.index == 0)
        texts.append([seq.generated for seq in seqs])
        if config.drafter != "off":
            assert sum(seq.stats.drafted for seq in seqs) > 0
            assert not engine.failures
    assert texts[0] == texts[1]
