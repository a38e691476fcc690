"""A whole chain in one native call: the same tokens and survival as by a pass for each depth, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.backends.cpu import native
from outrider.backends.rows import rows_of
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.drafters import DraftRequest
from outrider.drafters.head import features
from outrider.drafters.head.drafter import SHIPPED, Pace
from outrider.drafters.head.features import CommittedRows, HeadBatch, ObservedFeatures, Piece, StreamFeatures
from outrider.drafters.head.network import Chain, Head, read_head
from outrider.drafters.head.rollout import HeadRollout, with_others
from outrider.engine.cache import Cache
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.types import SamplingParams, Sequence, Tree

from support.head_rig import Rig, shown_to

pytestmark = pytest.mark.skipif(native.load().kernels is None, reason="there is no compiler")
SHAPE = replace(toy_config(), tied=True, context_length=256)
TARGET = Transformer(SHAPE, RandomWeights(SHAPE, 1), torch.float32)
WIDE = Transformer(wide := replace(SHAPE, heads=4, kv_heads=2, head_dim=16), RandomWeights(wide, 1), torch.float32)
VARIANTS: dict[str, dict[str, Any]] = {
    "as trained": {},
    "two layers": {"layers": 2},
    "all ids": {"vocabulary": 48},
    "normed output, scaled": {"norm_output": True, "logit_scale": 0.37},
    "normed first, head norms": {"norm_before_residual": True, "qk_norm": True, "qkv_bias": True},
    "fused in torch": {"fc_bias": True, "fc_norm": True},
    "with a window": {"windows": (5,)},
}


def head_of(target: Transformer = TARGET, **variant: Any) -> Head:
    return Head(*random_head(target.config, **variant), target.embedding.to(torch.bfloat16), torch.int8)


def step_by_step(patch: pytest.MonkeyPatch) -> None:
    """A pass for each depth instead of one call."""
    patch.setattr(HeadRollout, "_drafts_natively", lambda *_: False)


def drafts(head: Head, sequences: int = 1, k: int = 8, target: Transformer = TARGET, **options: Any) -> list[Tree]:
    """What is drafted at every step of these texts, whose rooms differ."""
    torch.manual_seed(0)
    engine, heard = build_engine(target, Config(drafter="head", k=k, options={"head": head} | options)), []
    engine.listeners = (SimpleNamespace(observe=lambda step: heard.extend(step.draft.trees), reads_logits=False),)
    for i in range(sequences):
        tokens = [(7 * j + 5 * i + 1) % 48 for j in range(4 + 9 * i)]
        engine.add(Sequence(i, tokens, SamplingParams(max_tokens=12 + 5 * i)))
    while engine.busy:
        engine.step()
    assert not engine.failures
    return heard


def both(patch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> tuple[list[Tree], list[Tree]]:
    """In one call, and step by step."""
    made = arguments[0]
    at_once = drafts(made(), *arguments[1:], **options)
    with patch.context() as patched:
        step_by_step(patched)
        return at_once, drafts(made(), *arguments[1:], **options)


@pytest.mark.parametrize("target", [TARGET, WIDE], ids=["queries end within a block", "queries end with a block"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_drafts_what_passes_do(variant: str, target: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, stepped = both(monkeypatch, lambda: head_of(target, **VARIANTS[variant]), 1, target=target)
    assert at_once == stepped
    assert max(len(tree.tokens) for tree in at_once) == 8


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("sequences", [1, 3])
def test_budgets_of_every_length(k: int, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, stepped = both(monkeypatch, head_of, sequences, k)
    assert at_once == stepped
    assert max(len(tree.tokens) for tree in at_once) == k


@pytest.mark.parametrize("floor", [0.003, 0.02, 0.1, 1.0])
@pytest.mark.parametrize("sequences", [1, 3])
def test_chains_end_at_the_floor(floor: float, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, stepped = both(monkeypatch, head_of, sequences, stop_below=floor)
    assert at_once == stepped
    assert len({len(tree.tokens) for tree in at_once if tree.tokens}) > 1 or floor == 1.0


@pytest.mark.parametrize("sequences", [1, 3])
def test_every_length_has_a_floor_of_its_own(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    floors = [0.0, 0.02, 0.003, 1.0]
    monkeypatch.setattr(Pace, "floors", lambda *_: floors)
    at_once, stepped = both(monkeypatch, head_of, sequences)
    assert at_once == stepped
    for tree in at_once:
        passed = [claim >= floor for claim, floor in zip(tree.survival or (), floors, strict=False)]
        assert all(passed[:-1])
    assert {len(tree.tokens) for tree in at_once} >= {2, 4}


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafts(head_of(), 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert drafts(head_of(), 3) == expected


@pytest.mark.parametrize("sequences", [1, 3])
def test_with_a_vocabulary_that_follows_the_text(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[Head] = []

    def made() -> Head:
        config, tensors = random_head(SHAPE, vocabulary=24, own_output=False)
        rows = TARGET.embedding[torch.arange(24) * 2]
        tensors["lm_head.weight"] = 0.01 * rows
        heads.append(Head(config, tensors, TARGET.embedding.to(torch.bfloat16), torch.int8))
        return heads[-1]

    at_once, stepped = both(monkeypatch, made, sequences)
    assert at_once == stepped
    assert all(head._other_rows is not None for head in heads)
    assert sequences == 1 or any(token % 2 for tree in at_once for token in tree.tokens)  # learnt ones are drafted


def test_prompts_are_read_in_pieces_or_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafts(head_of(), 3)
    for chunk in (1, 3, 8):
        monkeypatch.setattr(features, "CHUNK", chunk)
        assert drafts(head_of(), 3) == expected
        with monkeypatch.context() as patch:
            step_by_step(patch)
            patch.setattr(features, "_FEW", 2)
            assert drafts(head_of(), 3) == expected


@pytest.mark.parametrize(("kind", "layers"), [("eagle3", 1), ("eagle3", 2), ("block", 1), ("block", 3)])
@pytest.mark.parametrize("target", [TARGET, WIDE], ids=["queries end within a block", "queries end with a block"])
def test_rows_that_are_only_kept_are_what_others_read(kind: str, layers: int, target: Transformer) -> None:
    head, tokens = head_of(target, kind=kind, layers=layers), [(7 * i + 3) % 48 for i in range(21)]
    shown = shown_to(head, 20)
    whole, apart = Rig(head, tokens), Rig(head, tokens)
    expected = whole.read(0, 20, shown)[0][15:]
    packed = HeadBatch(apart.cache)
    packed.committed(apart.seq, 0, 15)
    head.keep(rows_of(packed), apart.plane, shown[:15])
    assert torch.equal(apart.read(15, 20, shown)[0], expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_where_more_than_the_likeliest_token_is_needed_passes_draft(temperature: float) -> None:
    """Alternatives for a trace, and noise: what they need of a pass stays on the host."""
    head = head_of()
    params = SamplingParams(max_tokens=12, temperature=temperature)
    for record in (False, True):
        engine = build_engine(TARGET, Config(drafter="head", k=4, options={"head": head}))
        rollout = engine.drafter.rollout  # type: ignore[attr-defined]
        rollout.record_guesses = record
        seq = Sequence(1, [5, 6, 7, 8], params, seed=3)
        assert rollout._drafts_natively([seq]) == (temperature == 0 and not record)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sequences", [1, 3])
def test_the_second_likeliest_tokens_come_with_a_chain(
    sequences: int, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is what a pass of that depth ranks second, with its probability times the survival of the ones before."""
    drafted: list[Chain] = []
    ranked: dict[int, list[Any]] = {}
    at_once, choices = CommittedRows.chains, HeadRollout._choices

    def kept(rows: CommittedRows, *arguments: Any) -> list[Chain]:
        drafted.extend(found := at_once(rows, *arguments))
        return found

    def two(rollout: HeadRollout, growth: Any, node: int, logits: torch.Tensor, width: int) -> Any:
        found = choices(rollout, growth, node, logits, 2)
        ranked.setdefault(id(growth), []).append((growth, found))
        return found[:width]

    with monkeypatch.context() as patch:
        patch.setattr(CommittedRows, "chains", kept)
        drafts(head_of(**VARIANTS[variant]), sequences, 4)
    with monkeypatch.context() as patch:
        step_by_step(patch)
        patch.setattr(HeadRollout, "_choices", two)
        drafts(head_of(**VARIANTS[variant]), sequences, 4)
    assert len(drafted) == len(ranked) > 5
    for chain, levels in zip(drafted, ranked.values(), strict=True):
        before = [1.0, *chain.survival]
        assert chain.tokens == [found[0][0] for _, found in levels]
        assert chain.others == [found[1][0] for _, found in levels]
        shares = [found[1][1] * s for (_, found), s in zip(levels, before, strict=False)]
        assert chain.others_survival == pytest.approx(shares, rel=1e-4)


def test_a_chain_and_its_second_likeliest_tokens_are_one_tree() -> None:
    drafted = Chain([1, 2, 3], [0.9, 0.4, 0.3], [4, 5, 6], [0.05, 0.35, 0.1])
    assert with_others(drafted, 0.1, 16) == Tree([1, 2, 5, 3, 6], [-1, 0, 0, 1, 1], [0.9, 0.4, 0.35, 0.3, 0.1])
    assert with_others(drafted, 0.0, 4) == Tree([1, 2, 5, 3], [-1, 0, 0, 1], [0.9, 0.4, 0.35, 0.3])
    certain = Chain([1, 2], [1.0, 1.0], [4, 5], [0.0, 1.0])
    assert with_others(certain, 0.5, 16) == Tree([1, 2, 5], [-1, 0, 0], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(("row", "guided", "branches"), [(0.01, False, True), (0.01, True, False), (1.0, False, False)])
def test_second_likeliest_tokens_are_drafted_where_a_row_is_cheap(row: float, guided: bool, branches: bool) -> None:
    """A fixed K stays a chain, and so does what a guide continues."""
    engine = build_engine(TARGET, Config(drafter="head", options={"head": head_of()}))
    seq = Sequence(1, [5, 6, 7, 8], SamplingParams(max_tokens=12))
    engine.add(seq)
    engine.step()
    assert engine.cache.reserve(seq, len(seq.tokens), 6)
    seq.matcher = SimpleNamespace() if guided else None  # type: ignore[assignment]
    prices = SimpleNamespace(speed=1.0, limit=9.0, price=lambda rows: row * rows)
    (tree,) = engine.drafter.draft(DraftRequest([seq], [6], prices)).trees
    assert tree.tokens
    assert tree.is_chain != branches
    assert engine.drafter.draft(DraftRequest([seq], [6])).trees[0].is_chain


@pytest.mark.parametrize("budget", [0, 9, 300])
def test_what_is_out_of_range_is_an_error(budget: int) -> None:
    state = Rig(head_of(), list(range(12)))
    packed = HeadBatch(state.cache)
    packed.committed(state.seq, 0, 11, want=True)
    slots = [1 << 30] * budget if budget < 100 else [0] * budget
    with pytest.raises(IndexError, match="out of range"):
        state.head.chains(rows_of(packed), state.plane, shown_to(state.head, 11), [slots], [budget], (0.0,))


@pytest.mark.parametrize("rows", [1, 2, 3, 11])
@pytest.mark.parametrize("variant", ["as trained", "two layers"])
def test_hidden_states_are_read_where_passes_left_them(variant: str, rows: int) -> None:
    state = Rig(head_of(**VARIANTS[variant]), list(range(12)))
    head, plane, config = state.head, state.plane, state.head.config
    assert head.reads_slots
    assert not head_of(**VARIANTS["fused in torch"]).reads_slots
    packed, shown = HeadBatch(state.cache), shown_to(head, 11)[11 - rows :]  # [rows, taps * H]
    packed.committed(state.seq, 11 - rows, 11, want=True)
    plane.keep_streams(config.taps, config.target_hidden_size, torch.float32)
    for tap, part in zip(config.taps, shown.chunk(len(config.taps), 1), strict=True):
        plane.streams[tap].fill_(torch.nan)
        plane.streams[tap][packed.slots] = part
    left = StreamFeatures(config.taps, state.cache, plane)
    rest = [packed.scratch(state.seq, range(2))], [3], (0.0,)
    assert left.in_slots
    expected = head.chains(rows_of(packed), plane, shown, *rest)
    assert head.chains(rows_of(packed), plane, left.in_slots, *rest) == expected


def test_the_shipped_head_of_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are in blocks of four bits. Embeddings and features are invented: only equality is asked."""
    config, tensors = read_head(SHIPPED / "smollm2-135m-instruct")
    noise = torch.Generator().manual_seed(1)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=noise).to(torch.bfloat16)
    head, length = Head(config, tensors, embedding, torch.int8, length=256), 90
    cache, seen = Cache(256, 4, 256), ObservedFeatures(config.taps)
    plane = cache.add_plane(*head.plane_shape)
    rollout = HeadRollout(head, cache, plane, seen)
    seqs = [Sequence(i, [(97 * j + i) % 4096 for j in range(length - 30 * i)]) for i in range(2)]
    for seq in seqs:
        cache.open(seq)
        assert cache.reserve(seq, len(seq.tokens), 9)
    shown = {seq.id: shown_to(head, len(seq.tokens)) for seq in seqs}

    def chains(those: list[Sequence], budgets: list[int], floor: float) -> list[Tree]:
        for seq in those:
            plane.advance(seq.id, 0)
            seen.pieces[seq.id] = [Piece(0, len(seq.tokens), 0, shown[seq.id].chunk(3, 1))]
        rollout.stop_below = floor
        return list(rollout.chains(those, budgets).trees)

    cases = [(seqs[:1], [k], 0.0) for k in range(1, 9)]
    cases += [(seqs, [3, 7], 0.0), (seqs, [8, 8], 1e-4), (seqs, [2, 8], 0.9)]
    at_once = [chains(*case) for case in cases]
    with monkeypatch.context() as patch:
        step_by_step(patch)
        assert [chains(*case) for case in cases] == at_once
