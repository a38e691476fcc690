"""Heads in eight bits: what native code says is what torch says, a row ignores its neighbours, and no text changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.backends import ops
from outrider.backends.cpu import native, quantise as quant
from outrider.backends.cpu.int8 import Int8Transformer
from outrider.backends.toy import RandomWeights, toy_config
from outrider.config import Config
from outrider.drafters.head.network import Head, write_head
from outrider.errors import ConfigError
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.testing import SCENARIOS, check_drafter, decode
from outrider.types import SamplingParams

from support.head_rig import Rig, shown_to
from support.toys import reference, toy

TARGET = toy()
EMBEDDING = TARGET.embedding.to(torch.bfloat16)  # [V, H] as native code reads it
KINDS = [("eagle3", 1), ("block", 1), ("block", 3)]
needs_native = pytest.mark.skipif(native.load().kernels is None, reason="there is no compiler")


def head_of(kind: str, layers: int, dtype: torch.dtype = torch.int8, **more: Any) -> Head:
    return Head(*random_head(TARGET.config, kind, layers=layers, **more), EMBEDDING, dtype)


TOKENS = [(7 * i + 3) % 48 for i in range(21)]


@needs_native
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_native_code_says_what_torch_says(kind: tuple[str, int]) -> None:
    head, shown = head_of(*kind), shown_to(head_of(*kind), 20)
    masks = 5 if kind[0] == "block" else 0
    native_scores, native_outputs = Rig(head, TOKENS).read(0, 20, shown, masks)
    head.native = None
    scores, outputs = Rig(head, TOKENS).read(0, 20, shown, masks)
    assert (native_scores - scores).abs().max() < 0.02 * scores.abs().max()  # a byte may fall to the other side
    assert (native_outputs - outputs).abs().max() < 0.02 * outputs.abs().max()
    assert (native_scores - scores).abs().median() < 1e-4


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_ignores_its_neighbours(kind: tuple[str, int], compiled: bool) -> None:
    head = head_of(*kind)
    if not compiled:
        head.native = None
    shown, whole, pieces = shown_to(head, 20), Rig(head, TOKENS), Rig(head, TOKENS)
    scores, outputs = whole.read(0, 20, shown)
    steps = [pieces.read(a, b, shown) for a, b in ((0, 1), (1, 9), (9, 10), (10, 20))]
    assert torch.equal(torch.cat([step[0] for step in steps]), scores)
    assert torch.equal(torch.cat([step[1] for step in steps]), outputs)


def test_it_agrees_with_floats() -> None:
    """Where the best word leads by a tenth at least. Random scores are the hardest: nearly all of them are close."""
    config = replace(toy_config(), hidden_size=192, heads=6, kv_heads=2, head_dim=32, vocab_size=4096)
    shape, tensors = random_head(config, vocabulary=2048)
    embedding = torch.randn(4096, 192, generator=torch.Generator().manual_seed(5))
    eight, whole = (Head(shape, tensors, embedding, dtype) for dtype in (torch.int8, torch.float32))
    tokens = [(97 * i) % 4096 for i in range(81)]
    said, expected = (Rig(head, tokens).read(0, 80, shown_to(head, 80))[0] for head in (eight, whole))
    best, second = torch.softmax(expected, -1).topk(2).values.unbind(1)  # [80] each
    clear = best > 1.1 * second
    agrees = said.argmax(1) == expected.argmax(1)
    assert clear.sum() > 40
    assert agrees[clear].float().mean() >= 0.97
    assert (said - expected).norm() < 0.05 * expected.norm()


def test_what_is_shown_keeps_its_small_numbers_beside_large_ones() -> None:
    head = head_of("eagle3", 1)
    whole, shown = head_of("eagle3", 1, torch.float32), shown_to(head, 20)
    fused, expected = head.fuse([shown]), whole.fuse([shown])
    assert (fused - expected).norm() < 0.02 * expected.norm()
    assert bool(head.fuse([shown * torch.nan]).isnan().all())


@needs_native
def test_what_is_out_of_range_is_an_error() -> None:
    for kind, token in (("eagle3", 48), ("eagle3", -1), ("block", 48), ("block", -2)):
        state = Rig(head_of(kind, 1), [*TOKENS[:5], token])
        with pytest.raises(IndexError, match="out of range"):
            state.read(0, 5, shown_to(state.head, 5))


# ------------------------------------------------------------ the text


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        (("eagle3", 1), False),
        (("block", 3), True),
        pytest.param(("eagle3", 1), True, marks=pytest.mark.slow),
        pytest.param(("block", 1), False, marks=pytest.mark.slow),
        pytest.param(("block", 1), True, marks=pytest.mark.slow),
        pytest.param(("block", 3), False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_head_in_eight_bits_changes_the_text(kind: tuple[str, int], tree: bool) -> None:
    assert check_drafter("head", {"head": head_of(*kind), "tree": tree}, TARGET, tokens=16)


@pytest.mark.parametrize("drafter", ["head", "auto"])
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_beside_a_target_in_eight_bits_a_head_is_too(kind: str, drafter: str, tmp_path: Path) -> None:
    config = toy_config()
    target: Any = Int8Transformer(config, quant.calibrated(config, RandomWeights(config, 1), list(range(40))))
    write_head(tmp_path, *random_head(config, kind))
    engine = build_engine(target, Config(drafter=drafter, k=4, options={"head": str(tmp_path)}))
    inner: Any = engine.drafter if drafter == "head" else engine.drafter.drafters[-1]  # type: ignore[attr-defined]
    assert inner.rollout.head.int8
    params = SamplingParams(max_tokens=30)
    assert decode(engine, SCENARIOS[1], params) == reference(target, SCENARIOS[1], params)
    assert not engine.failures


def test_eight_bits_can_be_asked_for(tmp_path: Path) -> None:
    write_head(tmp_path, *random_head(TARGET.config))
    for wish, eight in (("int8", True), ("float32", False), ("auto", False)):
        options = {"head": str(tmp_path), "draft_dtype": wish}
        drafter: Any = build_engine(TARGET, Config(drafter="head", options=options)).drafter
        assert drafter.rollout.head.int8 is eight
    with pytest.raises(ConfigError, match="no draft_dtype 'int4'"):
        build_engine(TARGET, Config(drafter="head", options={"head": str(tmp_path), "draft_dtype": "int4"}))


# ------------------------------------------------------------ the largest, and how sure it is


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("width", [1, 15, 16, 100, 5000])
def test_the_largest_ones_share_is_its_softmax(width: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(ops, "_loaded", lambda: native.Native(None, "a test wants torch"))
    scores = 3 * torch.randn(4, width, generator=torch.Generator().manual_seed(width))  # [4, V]
    place, share = ops.top_shares(scores)
    expected = torch.softmax(scores.double(), -1).max(-1)
    assert torch.equal(place, expected.indices)
    assert torch.allclose(share.double(), expected.values, rtol=1e-5)
