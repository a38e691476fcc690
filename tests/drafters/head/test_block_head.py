"""Heads in blocks of four and eight bits: their files, and passes that multiply by the stored numbers as they are."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.backends.cpu import native
from outrider.backends.cpu.blocks import BlockLinear, BlockTransformer, repacked
from outrider.backends.toy import toy_config
from outrider.config import Config
from outrider.drafters.head.network import Head, read_head, write_head
from outrider.errors import ModelError
from outrider.llm import build_engine
from outrider.models.blocks import BlockTensor
from outrider.models.speculators import HeadConfig, decoded, in_blocks, random_head, stored_as, target_ids
from outrider.testing import check_drafter
from outrider.types import SamplingParams, Sequence

from support.head_rig import Rig, shown_to
from support.random_blocks import RandomBlocks, block_config
from support.toys import toy

STORES = ["q8_0", "q4_1", "q4_0", "q4_k"]
WIDE = replace(toy_config(), hidden_size=256, intermediate_size=256, heads=4, kv_heads=2, head_dim=64, vocab_size=640)
EMBEDDING = torch.randn(640, 256, generator=torch.Generator().manual_seed(5))
needs_native = pytest.mark.skipif(native.load().kernels is None, reason="there is no compiler")


@cache
def small(store: str, kind: str = "eagle3") -> tuple[HeadConfig, dict[str, Any]]:
    config, tensors = random_head(WIDE, kind, vocabulary=96, layers=1 if kind == "eagle3" else 2)
    return config, stored_as(tensors, store)


@pytest.mark.parametrize("store", STORES)
def test_what_is_written_in_blocks_is_read(store: str, tmp_path: Path) -> None:
    config, tensors = small(store)
    write_head(tmp_path, config, tensors)
    again, same = read_head(tmp_path)
    assert again == config
    for name, tensor in tensors.items():
        blocks = isinstance(tensor, BlockTensor)
        assert blocks == (tensor.to(torch.float32).dim() == 2)
        assert same[name].kind == tensor.kind if blocks else True
        assert torch.equal(same[name].raw, tensor.raw) if blocks else torch.equal(same[name], tensor)


def test_a_head_in_blocks_states_its_acceptance_and_is_recognised(tmp_path: Path) -> None:
    config, tensors = small("q4_0")
    write_head(tmp_path / "blocks", replace(config, acceptance=(0.68149, 0.7)), tensors)
    write_head(tmp_path / "floats", config, decoded(tensors))
    assert in_blocks(tmp_path / "blocks")
    assert not in_blocks(tmp_path / "floats")
    assert not in_blocks(tmp_path / "nowhere")
    again, _ = read_head(tmp_path / "blocks")
    assert again == config  # it is no part of the shape
    assert again.acceptance == (0.681, 0.7)


def test_a_spoilt_block_is_refused(tmp_path: Path) -> None:
    write_head(tmp_path, *small("q4_0"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"fc.weight.Q4_0": tensors["fc.weight.Q4_0"][:, :-1].contiguous()}, file)
    with pytest.raises(ModelError, match=r"fc\.weight is not in whole blocks of Q4_0"):
        read_head(tmp_path)
    save_file(tensors | {"fc.weight.Q4_0": tensors["fc.weight.Q4_0"][:, :-18].contiguous()}, file)
    with pytest.raises(ModelError, match=r"fc\.weight.* has the shape \[256, 736\] instead of \[256, 768\]"):
        read_head(tmp_path)


@needs_native
@pytest.mark.parametrize("kind", ["eagle3", "block"])
@pytest.mark.parametrize("store", STORES)
def test_native_code_multiplies_by_what_is_stored(store: str, kind: str) -> None:
    """Against the same numbers in float32: only the rows are rounded, to eight bits, the target's states to sixteen."""
    config, tensors = small(store, kind)
    head, floats = (
        Head(config, t, EMBEDDING, d) for t, d in ((tensors, torch.int8), (decoded(tensors), torch.float32))
    )
    assert isinstance(head.fc, BlockLinear)
    assert isinstance(head.layers[0].gate_up, BlockLinear)
    tokens, masks = [(97 * i) % 640 for i in range(41)], 5 if kind == "block" else 0
    (scores, outputs), (expected, states) = (
        Rig(each, tokens).read(0, 40, shown_to(each, 40), masks) for each in (head, floats)
    )
    assert (scores - expected).norm() < 0.03 * expected.norm()
    assert (outputs - states).norm() < 0.03 * states.norm()


@needs_native
@pytest.mark.parametrize("store", STORES)
def test_a_row_ignores_its_neighbours_and_threads(store: str) -> None:
    config, tensors = small(store)
    head, tokens = Head(config, tensors, EMBEDDING, torch.int8), [(97 * i) % 640 for i in range(21)]
    shown, whole, pieces = shown_to(head, 20), Rig(head, tokens), Rig(head, tokens)
    scores, outputs = whole.read(0, 20, shown)
    threads = torch.get_num_threads()
    try:
        steps = []
        for count, (a, b) in enumerate(((0, 1), (1, 9), (9, 10), (10, 20)), start=1):
            torch.set_num_threads(1 + count % 3)
            steps.append(pieces.read(a, b, shown))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat([step[0] for step in steps]), scores)
    assert torch.equal(torch.cat([step[1] for step in steps]), outputs)
    assert bool(Rig(head, tokens).read(0, 20, shown * torch.nan)[0].isnan().all())


def test_without_kernels_blocks_become_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.backends import ops

    config, tensors = small("q4_1")
    tokens = [(97 * i) % 640 for i in range(21)]
    expected = Rig(Head(config, tensors, EMBEDDING, torch.float32), tokens)
    shown = shown_to(expected.head, 20)
    monkeypatch.setattr(ops, "_loaded", lambda: native.Native(None, "none here"))
    scores, _ = Rig(Head(config, tensors, EMBEDDING, torch.int8), tokens).read(0, 20, shown)
    floats, _ = expected.read(0, 20, shown)
    assert (scores - floats).norm() < 0.05 * floats.norm()


@pytest.mark.slow
def test_no_head_in_blocks_changes_the_text(tmp_path: Path) -> None:
    target = toy()
    config, tensors = random_head(target.config)
    write_head(tmp_path, config, stored_as(tensors, "q4_1"))
    assert check_drafter("head", {"head": str(tmp_path), "draft_dtype": "int8"}, target, tokens=16)


@needs_native
@pytest.mark.parametrize("tied", [True, False])
def test_beside_a_gguf_file_a_head_reads_its_embedding_and_output_rows(tmp_path: Path, tied: bool) -> None:
    """As they are: no copy in floats; a head without output rows multiplies by the file's own. An embedding that is
    not the output matrix too stays in the file."""
    shape, weights = block_config(96, tied=tied), RandomBlocks(block_config(96, tied=tied), "Q4_1", "Q8_0")
    target: Any = BlockTransformer(shape, weights, repacked(shape, weights))
    config, tensors = random_head(target.config, vocabulary=60)
    bare = replace(config, own_output=False)
    write_head(tmp_path, bare, stored_as({n: t for n, t in tensors.items() if n != "lm_head.weight"}, "q8_0"))
    engine = build_engine(target, Config(drafter="head", k=3, options={"head": str(tmp_path)}))
    head: Any = engine.drafter.rollout.head  # type: ignore[attr-defined]
    assert head.embedding is target
    assert "embedding" not in vars(target), "the whole embedding was read"
    assert isinstance(head.head, BlockLinear)
    output = "embed_tokens.weight" if tied else "lm_head.weight"
    rows = weights.get(output, torch.float32)[target_ids(tensors["d2t"])]
    x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(1))
    assert (head.head(x) - x @ rows.T).norm() < 0.02 * (x @ rows.T).norm()
    same = decoded(read_head(tmp_path)[1]) | {"lm_head.weight": rows}
    floats = Head(config, same, target.embedding, torch.float32)
    tokens = [(97 * i) % shape.vocab_size for i in range(21)]
    (scores, _), (expected, _) = (Rig(each, tokens).read(0, 20, shown_to(each, 20)) for each in (head, floats))
    assert (scores - expected).norm() < 0.04 * expected.norm()


@needs_native
def test_what_is_on_disk_is_not_read_again_and_nothing_outlives_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cycles of references would keep K, V and the head's weights until the garbage collector runs."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    shape, weights, read = block_config(96, tied=True), RandomBlocks(block_config(96, tied=True), "Q4_1", "Q8_0"), []
    rows_of_file = RandomBlocks.block_rows
    monkeypatch.setattr(RandomBlocks, "block_rows", lambda *given: read.append(given) or rows_of_file(*given))
    target: Any = BlockTransformer(shape, weights, repacked(shape, weights))
    config, tensors = random_head(target.config, vocabulary=60)
    bare = replace(config, own_output=False)
    write_head(tmp_path / "head", bare, stored_as({n: t for n, t in tensors.items() if n != "lm_head.weight"}, "q8_0"))
    for drafter in ("head", "auto"):
        engine: Any = build_engine(target, Config(drafter=drafter, k=3, options={"head": str(tmp_path / "head")}))
        assert len(read) == 1
        seq = Sequence(1, [1, 2, 3, 4], SamplingParams(max_tokens=8))
        engine.add(seq)
        gc.collect()
        gc.disable()
        try:
            while not seq.done:
                engine.step()
            member = engine.drafter if drafter == "head" else engine.drafter.drafters[-1]
            assert member.vocabulary is not None
            parts = (engine, engine.cache, engine.drafter, member, member.rollout.head, member.rollout.head.native)
            alive = [weakref.ref(part) for part in parts]
            del engine, parts, member
            assert [ref() for ref in alive] == [None] * len(alive)
        finally:
            gc.enable()
