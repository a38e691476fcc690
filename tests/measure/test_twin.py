"""The widened twin of a small model is the same function at another size."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.backends.rows import rows_of
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.llm import build_engine
from outrider.models.checkpoint import Checkpoint
from outrider.models.config import ModelConfig
from outrider.models.speculators import random_head
from outrider.models.weights import check
from outrider.types import SamplingParams, Sequence

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import twin

from support.pairs import Bench, ours, pair, source, text

LARGE = {"hidden": 72, "intermediate": 100, "heads": 8, "kv_heads": 4, "device": "cpu"}


class Uneven(RandomWeights):
    """Norm gains that differ from dimension to dimension, and biases where the configuration has them."""

    def has(self, name: str) -> bool:
        biased = self.config.qkv_bias and name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
        return super().has(name) or biased or (self.config.o_bias and name.endswith("o_proj.bias"))

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = super().get(name, dtype)
        if name.endswith(".bias"):
            return super().get(name.replace("bias", "weight"), dtype)[:, 0]
        return tensor if tensor.dim() == 2 else tensor * torch.linspace(0.5, 1.5, tensor.shape[0], dtype=dtype)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "biased": {"qkv_bias": True, "o_bias": True},
    "a large epsilon": {"norm_eps": 0.3},
    "window": {"sliding_window": 5, "window_layers": frozenset({1})},
}


def checkpoint(case: str = "plain") -> Checkpoint:
    config = replace(toy_config(), **CASES[case])
    nobody: Any = None
    return Checkpoint("toy", Path("toy"), config, Uneven(config, 3), nobody)  # type: ignore[arg-type]


def model(given: Checkpoint) -> Transformer:
    return Transformer(given.config, given.weights, torch.float64)


def logits(given: Transformer, tokens: list[int]) -> Tensor:
    cache = Cache(64, 2, 48)
    plane = cache.add_plane(*given.plane_shape)
    seq = Sequence(1, tokens)
    cache.open(seq)
    assert cache.reserve(seq, len(tokens), 0)
    packed = BatchBuilder(cache)
    packed.pending(seq, 0, len(tokens), want=False)
    packed.want = list(range(len(tokens)))
    return given.forward(rows_of(packed), plane).logits  # [T, V]


def greedy(given: Transformer, tokens: list[int], **settings: Any) -> Sequence:
    engine = build_engine(given, Config(max_length=96, **settings))
    seq = Sequence(1, tokens, SamplingParams(max_tokens=40))
    engine.add(seq)
    while engine.busy:
        engine.step()
    return seq


def tokens(config: ModelConfig, n: int = 30) -> list[int]:
    return torch.randint(config.vocab_size, (n,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_original(case: str) -> None:
    small = checkpoint(case)
    large = twin.widened(small, **LARGE)
    asked = tokens(small.config)
    wanted = logits(model(small), asked)
    assert wanted.std() > 0.5  # there is something to compare
    torch.testing.assert_close(logits(model(large), asked), wanted, atol=1e-9, rtol=1e-9)


def test_greedy_text_is_the_same_and_the_original_drafts_it_all() -> None:
    small = checkpoint()
    ours, theirs = model(small), model(twin.widened(small, **LARGE))
    asked = tokens(small.config, 7)
    wanted = greedy(ours, asked, drafter="off")
    assert greedy(theirs, asked, drafter="off").generated == wanted.generated
    drafted = greedy(theirs, asked, drafter="model", k=4, options={"draft_model": ours})
    assert drafted.generated == wanted.generated
    assert drafted.stats.alpha == 1


def test_padded_dimensions_stay_exactly_zero() -> None:
    """Random weights meet nothing but zeros: other ones change no bit."""
    small = checkpoint("tied")
    large = twin.widened(small, **LARGE)
    asked = tokens(small.config)
    other = replace(large, weights=twin.Widened(small.weights, small.config, large.config, "cpu", seed=9))
    assert not torch.equal(
        other.weights.get("norm.weight", torch.float64), large.weights.get("norm.weight", torch.float64)
    )
    assert torch.equal(logits(model(other), asked), logits(model(large), asked))


def test_tensors_have_the_shapes_of_the_large_model_and_are_random_where_they_may_be() -> None:
    small = checkpoint()
    large = twin.widened(small, **LARGE)
    check(large.weights, large.config, Path("toy"))
    for name in sorted(large.weights.names()):
        got = large.weights.get(name, torch.float64)
        assert tuple(got.shape) == large.weights.shape(name)
        assert torch.equal(got, large.weights.get(name, torch.float64))  # the same each time
        if got.dim() == 2 and name != "embed_tokens.weight":
            assert (got[:, small.weights.get(name, torch.float64).shape[1] :] != 0).all()
    assert (large.weights.get("embed_tokens.weight", torch.float64)[:, 32:] == 0).all()
    assert large.weights.get("norm.weight", torch.bfloat16).dtype == torch.bfloat16


def test_the_sizes_that_are_measured_with() -> None:
    config = replace(toy_config(), hidden_size=576, layers=30, heads=9, kv_heads=3, head_dim=64, rotary_dim=64)
    config = replace(config, intermediate_size=1536, vocab_size=49152, tied=True)
    small = replace(checkpoint(), config=config)
    seven, thirty = twin.seven(small, device="cpu"), twin.thirty(small, device="cpu")
    assert seven.name == "toy-as-7.04B"
    assert (seven.config.hidden_size, seven.config.intermediate_size) == (4608, 13824)
    assert (seven.config.heads, seven.config.kv_heads, seven.config.tied) == (36, 12, False)
    assert (thirty.config.hidden_size, thirty.config.intermediate_size) == (9216, 27648)
    assert (thirty.config.heads, thirty.config.kv_heads) == (72, 24)
    assert twin.widened(small, device="cpu").config == seven.config
    assert twin.scaled(checkpoint(), 3, device="cpu").config.hidden_size == 96


@pytest.mark.parametrize("sizes", [{"kv_heads": 2}, {"hidden": 16}, {"intermediate": 40}, {"heads": 2, "kv_heads": 1}])
def test_what_cannot_be_widened_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must serve|would shrink"):
        twin.widened(checkpoint(), **(LARGE | sizes))


def drafts(target: Transformer, head: Any, asked: list[int], **options: Any) -> list[Any]:
    """Every tree of an answer, with its chances."""
    engine = build_engine(target, Config(max_length=96, drafter="head", k=5, options={"head": head} | options))
    seq, found = Sequence(1, asked, SamplingParams(max_tokens=24)), []
    engine.add(seq)
    while engine.busy:
        step = engine.step()
        assert not step.failure
        found += [(tree.tokens, tree.parents, tree.survival) for tree in step.draft.trees]
    return found


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_narrow_head_drafts_the_same(kind: str) -> None:
    Head = pytest.importorskip("outrider.drafters.head.network").Head  # noqa: N806
    small = checkpoint("a large epsilon")
    large = twin.widened(small, **LARGE)
    config, tensors = random_head(small.config, kind, layers=1 if kind == "eagle3" else 2)
    tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    ours, theirs = model(small), model(large)
    narrow, narrowed = twin.narrow_head(config, tensors, ours.embedding, large.config, "cpu")
    assert (narrow.hidden_size, narrow.target_hidden_size, narrow.narrow) == (32, 72, True)
    asked = tokens(small.config, 9)
    for options in ({}, {"tree": True}):
        mine = drafts(ours, Head(config, tensors, ours.embedding, torch.float64), asked, **options)
        wanted = drafts(theirs, Head(narrow, narrowed, theirs.embedding, torch.float64), asked, **options)
        assert [tree[:2] for tree in wanted] == [tree[:2] for tree in mine]
        chances = [chance for tree in mine for chance in tree[2] or ()]
        assert [chance for tree in wanted for chance in tree[2] or ()] == pytest.approx(chances, rel=1e-5)
        assert len({token for tree in mine for token in tree[0]}) > 5  # there is something to compare


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_widened_head_drafts_the_same(kind: str) -> None:
    Head = pytest.importorskip("outrider.drafters.head.network").Head  # noqa: N806
    small = checkpoint("a large epsilon")
    large = twin.widened(small, **LARGE)
    config, tensors = random_head(small.config, kind, layers=1 if kind == "eagle3" else 2)
    config = replace(config, norm_eps=0.2)
    tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    wide, widened = twin.widen_head(config, tensors, small.config, large.config, "cpu")
    assert (wide.hidden_size, wide.heads, wide.kv_heads, wide.intermediate_size) == (72, 8, 4, 133)
    assert (widened["fc.weight"].view(72, 3, 72)[32:, :, :32] == 0).all()
    assert (widened["fc.weight"].view(72, 3, 72)[:, :, 32:] != 0).all()
    asked = tokens(small.config, 9)
    ours, theirs = model(small), model(large)
    for options in ({}, {"tree": True}):
        mine = drafts(ours, Head(config, tensors, ours.embedding, torch.float64), asked, **options)
        wanted = drafts(theirs, Head(wide, widened, theirs.embedding, torch.float64), asked, **options)
        assert [tree[:2] for tree in wanted] == [tree[:2] for tree in mine]
        chances = [chance for tree in mine for chance in tree[2] or ()]
        assert [chance for tree in wanted for chance in tree[2] or ()] == pytest.approx(chances, rel=1e-5)
        assert len({token for tree in mine for token in tree[0]}) > 5  # there is something to compare


@pytest.mark.parametrize("case", ["marian", "t5 gated, not scaled", "bart"])
@pytest.mark.one_in(3)
def test_a_repeated_pair_is_the_same_function(case: str) -> None:
    """Three copies of every head, five of every neuron; shares are powers of two."""
    nobody: Any = None
    _, config, weights = pair(case)
    small = Checkpoint("pair", Path("pair"), config, weights, nobody)
    large = twin.repeated(small, 3, neurons=5, device="cpu")
    check(large.weights, large.config, Path("large"))
    assert large.config.encoder is not None
    assert large.config.encoder.hidden_size == large.config.hidden_size == 3 * config.hidden_size
    wide = Transformer(large.config, large.weights, torch.float32, length=80)
    wanted, got = (Bench(model, text(), source()).logits() for model in (ours(case, torch.float32), wide))
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)
    for copies in (1, 3, 12, 16):
        made = twin.shares(copies, torch.bfloat16, "cpu").double()
        assert len(made) == copies
        assert made.sum() == 1
        assert (made.log2() % 1 == 0).all()
