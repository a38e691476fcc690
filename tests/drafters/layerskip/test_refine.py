"""Refining the skip set while serving: no text changes, its share of the time is kept, and better sets are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import ConfigError, SamplingParams
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.drafters.layerskip.refine import WINDOW, Refinement, Trial
from outrider.drafters.layerskip.search import NOTE, ScoredText, Skip, expected_speedup
from outrider.engine.step import Engine
from outrider.llm import build_engine
from outrider.models.tuning_profile import note, noted
from outrider.testing import check_drafter
from outrider.types import Sequence

from support.toys import toy


class Uneven(RandomWeights):
    """Layers 1, 2 and 3 add next to nothing: a set without them agrees with the model, one without layer 4 does not."""

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        weight = super().get(name, dtype)
        quiet = name.startswith(("layers.1.", "layers.2.", "layers.3."))
        return weight * 0.01 if quiet and name.endswith(("o_proj.weight", "down_proj.weight")) else weight


TARGET = Transformer(toy_config(6), Uneven(toy_config(6), 3), torch.float64)
INNER = [1, 2, 3, 4]


def engine(target: Any = TARGET, **options: Any) -> Engine:
    return build_engine(target, Config(drafter="layerskip", k=3, options=options))


def refinement(one: Engine) -> Refinement:
    found = one.drafter.refinement  # type: ignore[attr-defined]
    assert isinstance(found, Refinement)
    return found


def run(one: Engine, tokens: int = 300, temperature: float = 15.0, seed: int = 7) -> Sequence:
    params = SamplingParams(max_tokens=tokens, temperature=temperature)
    seq = Sequence(seed, [1, 2, 3, seed], params, seed=seed)
    one.add(seq)
    while one.busy:
        one.step()
    assert not one.failures
    return seq


def test_comparing_changes_no_text() -> None:
    assert check_drafter("layerskip", {"skip_layers": [1], "refine": 0.5}, toy(), tokens=24)


@pytest.mark.slow
def test_comparing_in_a_cascade_changes_no_text() -> None:
    assert check_drafter("cascade", {"cascade": "exit,layerskip", "exit_layer": 1, "refine": 0.5}, toy(), tokens=36)


@pytest.mark.parametrize("temperature", [0.0, 15.0])
def test_the_whole_model_would_have_drafted_its_own_text(temperature: float) -> None:
    one = engine(skip_layers=INNER)
    seq = Sequence(1, [1, 2, 3], SamplingParams(max_tokens=60, temperature=temperature), seed=5)
    one.add(seq)
    while len(seq.tokens) < 50:
        one.step()
    found = refinement(one)
    stop = found._stop(seq)
    before = [k.clone() for k in found.space.plane.k]
    slots = one.cache.next_free(WINDOW)
    rows = found._rows(seq, range(stop - WINDOW, stop), slots)
    assert found._hits(seq, rows, Skip()) == WINDOW
    if temperature:
        assert found._hits(seq, rows, Skip(frozenset(INNER), frozenset(INNER))) < WINDOW
    assert found._hits(seq, rows, Skip(frozenset({1, 2}), frozenset({1, 3}))) > WINDOW // 2
    taken = [slot for row in one.cache.rows.values() for slot in (*row.slots, *row.spare)]
    assert set(slots).isdisjoint(taken)
    for old, new in zip(before, found.space.plane.k, strict=True):
        assert torch.equal(old[taken], new[taken])


class FixedCost:
    """Draft costs where every skipped block saves the same."""

    whole = 1.0

    def __call__(self, skip: Skip) -> float:
        return 1.0 - 0.08 * len(skip.blocks)


@pytest.mark.slow
def test_better_sets_are_adopted_within_the_share_of_the_time() -> None:
    one = engine(skip_mlp=[4], refine=0.5)
    found = refinement(one)
    found.draft_cost = FixedCost()  # type: ignore[assignment]
    first, text = found.skip, ScoredText(TARGET, [([1, 2, 3, i], run(plain(), 60, seed=i).generated) for i in range(4)])
    for seed in range(6):
        seq = run(one, seed=seed)
        assert found.spent <= 0.5 * found.step_seconds + found.last
    assert found.adopted

    def speed(skip: Skip) -> float:
        return expected_speedup(text.agreement(skip), FixedCost()(skip), lambda rows: 1 + 0.05 * (rows - 1))[0]

    assert speed(found.skip) > speed(first)
    assert one.drafter.rollout.part == found.skip.part  # type: ignore[attr-defined]
    assert seq.generated == run(plain(), seed=seed).generated
    assert not found.compared  # ended sequences are dropped


def test_short_answers_are_compared_too() -> None:
    one = engine(skip_layers=INNER, refine=0.5)
    found = refinement(one)
    found.draft_cost = FixedCost()  # type: ignore[assignment]
    found.last = 1e-9  # there is time
    seen = []
    for seed in range(3):
        seq = run(one, tokens=20, seed=seed)
        assert seq.generated == run(plain(), tokens=20, seed=seed).generated
        seen.append(found.spent)
    assert 0 < seen[0] <= seen[1] <= seen[2]
    assert not found.compared


def plain() -> Engine:
    return build_engine(TARGET, Config(drafter="off"))


def test_a_neighbour_must_be_clearly_better() -> None:
    found = refinement(engine(skip_layers=INNER))
    found.draft_cost = FixedCost()  # type: ignore[assignment]
    used, other = found.skip, Skip(frozenset({1, 2, 3}), frozenset({1, 2, 3, 4}))

    def decide(positions: int, current: int, hits: int) -> Trial:
        found.skip, found.trial = used, Trial(other, positions, current, hits)
        before = found.trial
        found._decide(before)
        return before

    early = decide(32, 20, 22)
    assert found.trial is early  # undecided
    assert decide(32, 30, 10) is not found.trial  # clearly worse: dropped
    assert found.skip == used
    decide(96, 60, 61)
    assert found.skip == used
    decide(96, 60, 80)
    assert found.skip == other
    assert found.adopted == 1


def test_it_can_be_switched_off() -> None:
    assert engine(refine=False).drafter.refinement is None  # type: ignore[attr-defined]
    assert engine(refine=0).drafter.refinement is None  # type: ignore[attr-defined]
    assert refinement(engine(refine=True)).share == 0.02
    with pytest.raises(ConfigError, match="share of the time"):
        engine(refine=2)


def test_a_searched_set_is_loaded_for_its_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("outrider.models.tuning_profile.cache_folder", lambda: tmp_path)
    target: Any = toy(seed=3, layers=6)
    target.identity = lambda: "abc"
    default = refinement(engine(target)).skip
    assert noted(NOTE, "abc") == {}
    path = note(NOTE, "abc", {"skip_attention": [2, 3], "skip_mlp": [4]})
    searched = Skip(frozenset({2, 3}), frozenset({4}))
    assert refinement(engine(target)).skip == searched != default
    assert refinement(engine(target, skip_mlp=[1])).skip == Skip(mlp=frozenset({1}))  # options win
    assert refinement(engine()).skip == default  # another target
    for damage in ("{", "[]", '{"outrider_profile": 1}', path.read_text().replace("[4]", "[44]")):
        path.write_text(damage)
        assert refinement(engine(target)).skip == default
