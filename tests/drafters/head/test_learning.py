"""A trained head that learns: no text changes, its correction is the same however it is applied, worse weights never
stay, kinds of text are kept apart, and a request may opt out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.backends import ops
from outrider.backends.loaded_weights import output_rows
from outrider.config import Config
from outrider.drafters._learning import store
from outrider.drafters.head.learning import KINDS, HeadLearning
from outrider.drafters.head.network import Head, folded
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.testing import SCENARIOS, check_drafter, decode
from outrider.types import SamplingParams, Sequence

from support.head_scores import PROMPT, run
from support.kernels import DEVICE, GPU  # before anything that imports triton
from support.learning_heads import EAGER, TARGET, alpha, ask, engine_of, head, learning_of, stream
from support.toys import reference


def noise(learning: HeadLearning, size: float = 0.3) -> dict[str, torch.Tensor]:
    """Weights that change drafts."""
    torch.manual_seed(3)
    return {name: w + size * torch.randn_like(w) for name, w in learning.output.initial(8).items()}


# ------------------------------------------------------------ the text


def test_a_learning_head_changes_no_text() -> None:
    assert check_drafter("head", EAGER | {"head": head()}, TARGET, tokens=6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_whatever_it_has_learnt_the_text_is_the_same(temperature: float) -> None:
    engine = engine_of(k=4)
    learning = learning_of(engine)
    learner = learning.learners[""]
    params = SamplingParams(max_tokens=24, temperature=temperature)
    for size in (0.0, 0.3, 30.0, float("nan")):
        learner.live, learner.differs = noise(learning, size), True
        assert decode(engine, SCENARIOS[1], params) == reference(TARGET, SCENARIOS[1], params)


# ------------------------------------------------------------ the correction


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_correction_is_what_its_definition_says(dtype: torch.dtype) -> None:
    net, features = head(dtype), torch.randn(len(PROMPT) - 1, 32, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    down, up = torch.randn(4, 32) * 0.2, torch.randn(32, 4) * 0.2
    bare = run(net, features, [], 2)
    net.correction = (down, torch.zeros_like(up))
    near = {"rtol": 0.0, "atol": float(bare.abs().max()) * (0.03 if dtype is torch.int8 else 1e-5)}
    torch.testing.assert_close(run(net, features, [], 2), bare, **near)
    net.correction = (down, up)
    expected = head()
    expected.head = torch.nn.Linear(32, 40, bias=False).requires_grad_(False)
    expected.head.weight.copy_(folded(output_rows(TARGET, expected.ids), (down, up)))
    torch.testing.assert_close(run(net, features, [], 2), run(expected, features, [], 2), **near)


def test_on_a_gpu_it_is_folded_into_the_rows_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.randn(len(PROMPT) - 1, 32, generator=torch.Generator().manual_seed(5))
    down, up = torch.randn(4, 32) * 0.2, torch.randn(32, 4) * 0.2
    here = head()
    bare = run(here, features, [], 2)
    here.correction = (down, up)
    corrected = run(here, features, [], 2)
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    there, features = head(device=DEVICE), features.to(DEVICE)
    address = there.head.weight.data_ptr()
    there.fold_output_rows((down.to(DEVICE), up.to(DEVICE)))
    torch.testing.assert_close(run(there, features, [], 2), corrected, rtol=1e-3, atol=1e-3)
    places, old, new = torch.tensor([3, 20]), there.ids[[3, 20]].clone(), torch.tensor([1, 2])
    there.replace_ids(places, new, output_rows(TARGET, new))  # the vocabulary follows the text meanwhile
    there.fold_output_rows(None)
    there.replace_ids(places, old, output_rows(TARGET, old))
    torch.testing.assert_close(run(there, features, [], 2), bare, rtol=1e-4, atol=1e-4)
    assert there.head.weight.data_ptr() == address


# ------------------------------------------------------------ learning


def test_what_is_recorded_is_what_was_emitted() -> None:
    engine, heard = engine_of(k=4, learn_phrases=False), list[Any]()
    learner = learning_of(engine).learners[""]
    learner.add = heard.append  # type: ignore[method-assign]
    seqs = [ask(engine, prompt, i) for i, prompt in enumerate(stream(6))]
    assert sum(nodes.accepted.count(True) for nodes in heard) == sum(seq.stats.accepted for seq in seqs)
    for nodes in heard:
        records = nodes.records([nodes], 8)
        assert records.top_ids[:, 0].tolist() == nodes.labels
        assert [guess == label for guess, label in zip(nodes.drafted, nodes.labels, strict=True)] == nodes.accepted
        best = nodes.ids[torch.stack(nodes.scores).argmax(-1)].tolist()
        assert all(guess in (-1, top) for guess, top in zip(nodes.drafted, best, strict=True))


@pytest.mark.slow
def test_a_head_learns() -> None:
    learns, frozen = engine_of(), engine_of(learn=False)
    alpha(learns, stream(60))
    late, never = alpha(learns, stream(20), 100), alpha(frozen, stream(20), 100)
    assert late > never + 0.1, (late, never)


def test_weights_that_suit_the_text_less_than_the_bare_head_are_switched_off() -> None:
    engine = engine_of()
    learning = learning_of(engine)
    learner = learning.learners[""]
    alpha(engine, stream(4))
    learner.live, learner.differs, learner.unchanged = noise(learning), True, False
    wrong, right = torch.zeros(64, dtype=torch.bool), torch.ones(64, dtype=torch.bool)
    for _ in range(8):  # however good it was before
        learner._compare(wrong, wrong, right)
    learner.swap()
    assert not learner.differs
    assert "does not suit the recent text" in learner.report.why
    learning.choose([Sequence(1, [1, 2])])
    assert learning.output.head.correction is None


def test_while_nothing_is_gained_less_time_is_spent() -> None:
    learner = learning_of(engine_of()).learners[""]
    same = torch.ones(64, dtype=torch.bool)
    for _ in range(20):
        learner._compare(same, same)
    assert learner.share == learner.plan.share / 8
    learner._compare(same, ~same)
    assert learner.share == learner.plan.share


def test_a_request_may_opt_out() -> None:
    engine = engine_of()
    alpha(engine, stream(6), learn=False, kind="secret")
    learning = learning_of(engine)
    (learner,) = learning.learners.values()
    assert (learner.report.records, learner.report.updates, len(learner.inbox)) == (0, 0, 0)
    assert not learning.proposals


# ------------------------------------------------------------ kinds of text


def test_kinds_of_text_are_kept_apart() -> None:
    engine = engine_of()
    learning = learning_of(engine)
    for i, prompt in enumerate(stream(8)):
        ask(engine, prompt, i, kind=("law", "code")[i % 2])
    assert set(learning.learners) == {"", "law", "code"}
    assert learning.learners[""].report.records == 0
    law, code = learning.learners["law"], learning.learners["code"]
    law.live, law.differs = noise(learning), True
    learning.choose([Sequence(1, [1], SamplingParams(kind="law"))])
    assert learning.active is law.live
    learning.choose([Sequence(1, [1], SamplingParams(kind=kind)) for kind in ("law", "code")])
    assert learning.active is None
    assert learning.report()["records"] == law.report.records + code.report.records
    for i in range(3 * KINDS):
        learning.learner_of(Sequence(1, [1], SamplingParams(kind=f"kind-{i}")))
    assert len(learning.learners) <= KINDS + 1


def test_what_was_learnt_is_saved_loaded_and_forgotten_by_kind(tmp_path: Path) -> None:
    engine = engine_of()
    learning = learning_of(engine)
    for kind in ("law", "code"):
        learning.learner_of(Sequence(1, [1], SamplingParams(kind=kind)))
    rank = learning.plan.rank
    for kind, learner in learning.learners.items():
        learner.live = {name: w + len(kind) for name, w in learning.output.initial(rank).items()}
    learning.save(tmp_path / "learnt", model="toy")
    facts = store.facts_of(tmp_path / "learnt")
    assert facts["kinds"] == ["", "code", "law"]
    again = learning_of(engine_of(learn_from=str(tmp_path / "learnt"), learn=False))
    for kind, learner in learning.learners.items():
        assert torch.equal(again.learners[kind].live["down"], learner.live["down"])
        assert again.learners[kind].differs == bool(kind)
    store.forget_kind(tmp_path / "learnt", "law")
    assert set(learning_of(engine_of(learn_from=str(tmp_path / "learnt"))).learners) == {"", "code"}
    with pytest.raises(OutriderError, match=r"Nothing has been learnt of the kind 'law'; .* code"):
        store.forget_kind(tmp_path / "learnt", "law")
    with pytest.raises(ModelError, match="belong to another drafter"):
        engine_of(head=head(size=44), learn_from=str(tmp_path / "learnt"))


def test_a_restarted_engine_goes_on() -> None:
    old, new = engine_of(), engine_of()
    alpha(old, stream(4))
    new.drafter.inherit(old.drafter)
    assert learning_of(new).learners is learning_of(old).learners
    assert learning_of(new).learners[""].frozen is learning_of(new).output


def test_heads_that_cannot_learn_say_so() -> None:
    config, tensors = random_head(TARGET.config, "block")
    with pytest.raises(ConfigError, match="cannot learn while it serves"):
        engine_of(head=Head(config, tensors, TARGET.embedding, TARGET.compute))


def test_online_with_a_head_is_that_head_learning() -> None:
    engine = build_engine(TARGET, Config(drafter="online", k=3, options={"head": head()}))
    assert learning_of(engine).on
