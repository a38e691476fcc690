"""A draft vocabulary that follows the text: learnt tokens score as if the head had been made with them, and nothing but
speed depends on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from outrider.backends import ops
from outrider.backends.loaded_weights import output_rows
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.drafters.head.drafter import with_output_rows
from outrider.drafters.head.network import Head, HeadConfig, OtherRows
from outrider.drafters.head.vocabulary import LearntVocabulary
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.testing import SCENARIOS, check_drafter, decode
from outrider.types import SamplingParams

from support.head_scores import PROMPT, run
from support.kernels import DEVICE, GPU  # before anything that imports triton
from support.toys import reference

CONFIG = replace(toy_config(), tied=True)
TARGET = Transformer(CONFIG, RandomWeights(CONFIG, 1), torch.float32)
SIZE = 24  # draft ids


def shared_head(ids: Tensor, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Head:
    """A head with these draft ids [D] and the target's output rows."""
    config, tensors = random_head(TARGET.config, vocabulary=SIZE)
    config = replace(config, own_output=False)
    del tensors["lm_head.weight"]
    tensors["d2t"] = ids - torch.arange(SIZE)
    tensors["t2d"] = torch.zeros(TARGET.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    tensors = with_output_rows(config, tensors, TARGET)
    return Head(config, tensors, TARGET.embedding.to(device), dtype, device, 64)


def spread(head: Head, device: Any = "cpu") -> Tensor:
    """Logits [R, V] of one text."""
    features = torch.randn(len(PROMPT) - 1, 32, generator=torch.Generator().manual_seed(5)).to(device)
    return head.spread(run(head, features, [], 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_learnt_tokens_score_as_if_trained_with(dtype: torch.dtype) -> None:
    before, places, new = torch.arange(SIZE), torch.tensor([3, 20, 21]), torch.tensor([40, 30, 45])
    after = before.clone()
    after[places] = new
    head = shared_head(before, dtype)
    head.replace_ids(places, new, output_rows(TARGET, new))
    head.replace_ids(places[:1], new[:1], output_rows(TARGET, new[:1]))  # again, in place
    order = after.argsort()  # a file's ids ascend
    expected = shared_head(after[order], dtype)
    assert head.ids.tolist() == after.tolist()
    # Learnt rows stay floats beside rows of eight bits.
    near = {"rtol": 0.05, "atol": 0.4} if dtype is torch.int8 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(spread(head), spread(expected), **near)


def test_the_same_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before, places, new = torch.arange(SIZE), torch.tensor([3, 20]), torch.tensor([40, 30])
    after = before.clone()
    after[places] = new
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    head = shared_head(before, device=DEVICE)
    head.replace_ids(places, new, output_rows(TARGET, new))
    assert torch.equal(head.device_ids.cpu(), after)
    assert torch.equal(spread(head, DEVICE), spread(shared_head(after, device=DEVICE), DEVICE))


class Places(Head):
    """The ids of a head, without its network."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = torch.tensor(ids)
        self.rows: dict[int, float] = {}

    def replace_ids(self, places: Tensor, ids: Tensor, rows: Tensor) -> None:
        self.ids[places] = ids
        self.rows |= zip(places.tolist(), rows[:, 0].tolist(), strict=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=12), max_size=12), st.sets(st.integers(0, 31), max_size=3))
def test_places_and_tokens_stay_one_to_one(texts: list[list[int]], kept: set[int]) -> None:
    head = Places(list(range(32)))
    vocabulary = LearntVocabulary(head, lambda ids: ids[:, None].float(), kept)
    for text in texts:
        new = set(text) - set(vocabulary.known)
        vocabulary.see(text)
        ids = head.ids.tolist()
        assert len(set(ids)) == 32
        assert set(ids) == set(vocabulary.known)
        assert kept <= set(ids)
        assert len(vocabulary.learnt) <= 4
        assert {token: ids[place] for token, place in vocabulary.learnt.items()} == {t: t for t in vocabulary.learnt}
        assert all(head.rows[place] == token for token, place in vocabulary.learnt.items())
        assert len(set(text)) > 4 or new <= set(vocabulary.known)  # what was new can be drafted


@pytest.mark.parametrize("compiled", [True, False])
def test_rows_beside_packed_weights_grow_and_are_replaced(compiled: bool) -> None:
    rows, weight = OtherRows(4, ops._loaded().kernels if compiled else None), torch.randn(200, 4)
    for start in range(0, 200, 50):
        rows.put(list(range(start, start + 50)), weight[start : start + 50])
    rows.put([7], 2 * weight[7:8])
    weight[7] *= 2
    scores, normed = torch.zeros(3, 300), torch.randn(3, 4)
    rows.score(normed, scores)
    torch.testing.assert_close(scores[:, :200], normed @ weight.T)
    assert not scores[:, 200:].any()


@pytest.mark.parametrize("learn", [True, False])
def test_a_request_teaches_its_tokens_unless_it_may_not(learn: bool) -> None:
    head = shared_head(torch.arange(SIZE))
    engine = build_engine(TARGET, Config(drafter="head", k=3, options={"head": head}))
    params = SamplingParams(max_tokens=20, learn=learn)
    assert decode(engine, SCENARIOS[1], params) == reference(TARGET, SCENARIOS[1], params)
    learnt = engine.drafter.vocabulary.learnt  # type: ignore[attr-defined]
    assert bool(learnt) == learn
    assert head.config.draft_vocab_size == len(set(head.ids.tolist())) == SIZE


def test_no_text_changes() -> None:
    assert check_drafter("head", {"head": shared_head(torch.arange(SIZE))}, TARGET, tokens=8)


def test_only_heads_with_the_targets_rows_learn_tokens() -> None:
    own: HeadConfig
    own, tensors = random_head(TARGET.config, vocabulary=SIZE)
    made = build_engine(
        TARGET, Config(drafter="head", options={"head": Head(own, tensors, TARGET.embedding, TARGET.compute)})
    )
    assert made.drafter.vocabulary is None  # type: ignore[attr-defined]
    off = Config(drafter="head", options={"head": shared_head(torch.arange(SIZE)), "learn_vocabulary": False})
    assert build_engine(TARGET, off).drafter.vocabulary is None  # type: ignore[attr-defined]
