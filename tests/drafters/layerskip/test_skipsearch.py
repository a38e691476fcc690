"""The layer-skip search: its scoring pass agrees with the drafter's passes, and it finds planted sets."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from outrider import LLM, ConfigError, SamplingParams
from outrider.backends import WHOLE, Part
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.control.costs import PassCosts
from outrider.drafters.layerskip.search import (
    KINDS,
    SEED_SHARE,
    SWEEPS,
    DraftCost,
    ScoredSkip,
    ScoredText,
    Search,
    Skip,
    expected_speedup,
    neighbour,
    seeds,
)
from outrider.llm import build_engine
from outrider.measure.bench import pass_costs
from outrider.models.prompts import bundled
from outrider.testing import check_drafter
from outrider.types import Sequence

from support.toys import toy

PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9], [11, 12, 13, 14, 15, 16, 17])


def generate(model: Transformer, prompt: list[int], tokens: int = 20) -> list[int]:
    engine = build_engine(model, Config(drafter="off"))
    seq = Sequence(1, prompt, SamplingParams(max_tokens=tokens))
    engine.add(seq)
    while engine.busy:
        engine.step()
    return seq.generated


@pytest.fixture(scope="module")
def model() -> Transformer:
    return toy(seed=3, layers=6)


@pytest.fixture(scope="module")
def answers(model: Transformer) -> list[tuple[list[int], list[int]]]:
    return [(prompt, generate(model, prompt)) for prompt in PROMPTS]


def test_the_full_model_chooses_its_own_text_again(model: Transformer, answers: list) -> None:
    text = ScoredText(model, answers)
    assert text.positions == 3 * 19
    assert text.choices.tolist() == [token for _, answer in answers for token in answer[1:]]
    assert text.agreement(Skip()) == (57 + 1) / (57 + 2)


def test_scoring_leaves_no_trace(model: Transformer, answers: list) -> None:
    text = ScoredText(model, answers)
    skip = Skip(frozenset({2, 3}), frozenset({1}))
    first = text.agreement(skip)
    text.agreement(Skip(mlp=frozenset(range(6))))
    assert text.agreement(skip) == first
    assert torch.equal(text._run(WHOLE), text.choices)


def test_agreement_is_the_drafters_acceptance_at_the_first_position(model: Transformer, answers: list) -> None:
    """One parallel pass measures what drafting one token at a time achieves."""
    skip = Skip(frozenset({2}), frozenset({3}))
    accepted = reached = 0
    for prompt, answer in answers:
        engine = build_engine(model, Config(drafter="layerskip", k=1, options=dict(skip.options)))
        seq = Sequence(1, prompt, SamplingParams(max_tokens=len(answer)))
        engine.add(seq)
        while engine.busy:
            engine.step()
        assert seq.generated == answer
        accepted, reached = accepted + seq.stats.accepted, reached + seq.stats.reached
    assert ScoredText(model, answers).agreement(skip) == pytest.approx(accepted / reached, abs=0.15)


def test_long_and_short_answers(model: Transformer, answers: list) -> None:
    assert ScoredText(model, answers, most=12).positions == 12
    assert ScoredText(model, [([1, 2], [3])]).positions == 0  # nothing follows a single token
    assert ScoredText(model, []).positions == 0


def test_cost_falls_with_every_block(monkeypatch: pytest.MonkeyPatch, model: Transformer, answers: list) -> None:
    text = ScoredText(model, answers)
    monkeypatch.setattr(text, "seconds", lambda part: 10 - 0.5 * len(part.skip_attention) - len(part.skip_mlp))
    cost = DraftCost(text.seconds, 6)
    assert (cost.whole, cost.attention, cost.mlp) == (10, 0.5, 1.0)
    assert cost(Skip(frozenset({1, 2}), frozenset({3}))) == 8.0


def test_a_cost_is_the_fastest_of_passes_in_turns_scaled_to_a_plain_pass() -> None:
    timed: list[str] = []

    def seconds(part: Part) -> float:
        kind = "attention" if part.skip_attention else "mlp" if part.skip_mlp else "head" if part.vocab else "whole"
        timed.append(kind)
        busy = 3.0 if len(timed) < 4 * (SWEEPS - 1) else 0.0  # only the last sweep is undisturbed
        return {"whole": 8.0, "attention": 6.0, "mlp": 2.0, "head": 7.4}[kind] + busy

    cost = DraftCost(seconds, 4, vocabulary=400, plain=4.0)
    assert timed == ["whole", "attention", "mlp", "head"] * SWEEPS
    assert (cost.whole, cost.attention, cost.mlp) == (4.0, 0.25, 0.75)
    assert cost(Skip(mlp=frozenset({1}), vocab=100)) == pytest.approx(4.0 - 0.75 - 0.3)
    assert cost(Skip(vocab=400)) == 4.0


def test_a_shortlist_is_found_where_it_pays() -> None:
    """Half of the cost is the head, and only the first 64 ids are ever chosen."""
    blocks = frozenset({("mlp", 2), ("mlp", 3)})

    def agreement(skip: Skip) -> float:
        missing = 0.3 if skip.vocab is not None and skip.vocab < 64 else 0.0
        return 0.9 - missing - 0.2 * len(skip.blocks ^ blocks)

    cost = lambda skip: 1.0 - 0.05 * len(skip.blocks) - (0.5 * (1 - skip.vocab / 256) if skip.vocab else 0)  # noqa: E731
    seeds_given = [Skip(mlp=frozenset({2})), Skip(mlp=frozenset({2, 3}))]
    one = Search(6, agreement, cost, lambda rows: 1.0, seeds=seeds_given, shortlists=[32, 64, 128])
    found = one.run(lambda: len(one.agreements) > 12)
    assert (found.skip.vocab, found.skip.blocks) == (64, blocks)
    assert found.skip.options == {"skip_attention": [], "skip_mlp": [2, 3], "draft_vocab": 64}
    assert found.skip.part.vocab == 64


@pytest.mark.parametrize("kind", ["int8", "float64"])
def test_the_first_ids_alone_are_the_same_bits(kind: str, folder: Path) -> None:
    llm = LLM(folder, drafter="off", dtype=kind) if kind == "int8" else None
    target = toy(seed=3, layers=3) if llm is None else llm.target
    text = ScoredText(target, [([1, 2, 3], [4, 5, 6, 7])])
    whole = target.forward(text.rows, text.plane).logits
    for ids in (1, 33, target.config.vocab_size):
        some = target.forward(text.rows, text.plane, Part(vocab=ids)).logits
        assert some.shape == (3, ids)
        assert torch.equal(some, whole[:, :ids])


def test_a_drafter_with_a_shortlist_changes_no_text() -> None:
    assert check_drafter("layerskip", {"skip_layers": [1], "draft_vocab": 20, "refine": 0.5}, toy(), tokens=16)
    with pytest.raises(ConfigError, match="draft_vocab"):
        build_engine(toy(layers=3), Config(drafter="layerskip", k=2, options={"draft_vocab": 10**9}))


class Quiet(RandomWeights):
    """Layers 2, 3 and 5 add next to nothing."""

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        weight = super().get(name, dtype)
        quiet = name.startswith(("layers.2.", "layers.3.", "layers.5."))
        return weight * 0.001 if quiet and name.endswith(("o_proj.weight", "down_proj.weight")) else weight


def test_seeds_skip_the_least_important_layers() -> None:
    config = toy_config(8)
    target = Transformer(config, Quiet(config, 3), torch.float64)
    text = ScoredText(target, [(prompt, generate(target, prompt)) for prompt in PROMPTS])
    found = list(text.seeds())
    most = round(SEED_SHARE * 8)
    assert len(found) == 3 * most
    for kind, number in zip(KINDS, range(3), strict=True):
        own = found[number * most : (number + 1) * most]
        assert [len(skip.attention | skip.mlp) for skip in own] == list(range(1, most + 1))
        assert all(bool(skip.attention) == ("attention" in KINDS[kind]) for skip in own)
        assert all(bool(skip.mlp) == ("mlp" in KINDS[kind]) for skip in own)
        assert all((skip.attention | skip.mlp).isdisjoint({0, 7}) for skip in own)
        for skip in own[:3]:
            assert skip.attention | skip.mlp <= {2, 3, 5}
            assert text.agreement(skip) > 0.9
    assert torch.equal(text._run(WHOLE), text.choices)  # computing them leaves no trace


def test_seeds_by_hand() -> None:
    """A state of two numbers. Layer 1 rotates it and layer 2 rotates it back: together they are not missed."""
    turns = {0: 0.0, 1: 1.0, 2: -1.0, 3: 0.3, 4: 0.0}

    def run(layer: int, x: torch.Tensor | None, skipped: frozenset[str]) -> torch.Tensor:
        angle = torch.tensor(turns[layer])
        x = torch.tensor([[1.0, 0.0]]) if x is None else x
        return x @ torch.stack([torch.stack([angle.cos(), angle.sin()]), torch.stack([-angle.sin(), angle.cos()])])

    assert list(seeds(run, 5, "layer", 3)) == [(3,), (1, 2), (1, 2, 3)]


def test_a_large_set_is_reached_though_small_ones_lie_before_it() -> None:
    """Small sets are nearly as fast as none, and those in between are slower: a seed leads to the best."""
    wanted = frozenset((kind, i) for kind in ("attention", "mlp") for i in range(3, 13))

    def agreement(skip: Skip) -> float:
        near = len(skip.blocks & wanted) / len(wanted)
        return max(0.98 ** len(skip.blocks) if len(skip.blocks) < 4 else 0.3, 0.95 * near if near > 0.8 else 0)

    cost = lambda skip: 1.0 - 0.035 * len(skip.blocks)  # noqa: E731
    seed = Skip.of(sorted(wanted)[:-3])
    one = Search(16, agreement, cost, lambda rows: 1.0 + 0.05 * rows, seeds=[seed])
    found = one.run(lambda: len(one.agreements) >= 1500)
    assert found.skip.blocks >= wanted
    assert found.speedup > one.score(seed).speedup > 1


def test_whole_layers_move_together() -> None:
    blocks = [(kind, i) for kind in ("attention", "mlp") for i in range(1, 5)]
    rng = random.Random(1)
    skip = Skip(frozenset({1, 2}), frozenset({1, 2}))
    for _ in range(40):
        other = neighbour(skip, blocks, rng, layers=True)
        assert other.attention == other.mlp
        assert len(other.blocks ^ skip.blocks) in (2, 4)


def test_expected_speedup_by_hand() -> None:
    speed, k = expected_speedup(1.0, draft_cost=0.1, pass_cost=lambda rows: 1.0, max_k=4)
    assert (speed, k) == (pytest.approx(5 / 1.4), 4)
    speed, k = expected_speedup(0.0, draft_cost=0.1, pass_cost=lambda rows: 1.0)
    assert (speed, k) == (pytest.approx(1 / 1.1), 1)


GOOD = {("attention", 2), ("attention", 4), ("mlp", 3), ("mlp", 6)}  # blocks that are not missed


def planted(skip: Skip) -> float:
    return 0.97 ** len(skip.blocks & GOOD) * 0.6 ** len(skip.blocks - GOOD)


def search(**extra: object) -> Search:
    cost = lambda skip: 1.0 - 0.08 * len(skip.blocks)  # noqa: E731
    return Search(8, planted, cost, lambda rows: 1.0 + 0.02 * rows, **extra)  # type: ignore[arg-type]


def test_the_planted_set_is_found_and_the_ends_are_kept() -> None:
    one = search()
    assert one.run(lambda: False).skip.blocks == GOOD
    assert all(0 not in s.attention | s.mlp and 7 not in s.attention | s.mlp for s in one.agreements)
    assert one.best == search().run(lambda: False)  # the same seed, the same search


def test_it_stops_at_the_deadline_and_best_is_always_valid() -> None:
    one, seen = search(), []
    found = one.run(lambda: len(one.agreements) >= 3, lambda s: seen.append(s.best))
    assert (len(one.agreements), len(seen)) == (3, 3)
    assert isinstance(found, ScoredSkip)
    speeds = [best.speedup for best in seen]
    assert speeds == sorted(speeds)


def test_an_interrupted_search_keeps_its_best_and_resumes_from_it() -> None:
    one = search()

    def interrupt(s: Search) -> None:
        if len(s.agreements) == 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.run(lambda: False, interrupt)
    assert one.best is not None
    again = search(start=one.best.skip)
    assert again.run(lambda: True) == one.best  # the first score is where it stopped


def test_options_are_the_drafters(model: Transformer) -> None:
    skip = Skip.of([("mlp", 3), ("attention", 2), ("attention", 1)])
    assert skip.options == {"skip_attention": [1, 2], "skip_mlp": [3]}
    build_engine(model, Config(drafter="layerskip", k=2, options=dict(skip.options)))


@pytest.mark.real
def test_real_weights() -> None:
    llm = LLM(drafter="off", max_length=512)
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": bundled()[0].text}])
    (out,) = llm.generate([ids], SamplingParams(max_tokens=8))
    text = ScoredText(llm.target, [(ids, out.token_ids)])
    assert text.choices.tolist() == out.token_ids[1:]
    layers = llm.target.config.layers
    one = Search(layers, text.agreement, DraftCost(text.seconds, layers), PassCosts(pass_costs(llm)))
    assert one.run(lambda: len(one.agreements) >= 4).agreement <= 8 / 9
