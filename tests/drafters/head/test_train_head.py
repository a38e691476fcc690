"""Heads that `outrider train` made, used by the drafter: the same logits, the same text, the evaluated acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import OutriderError
from outrider.backends.toy import toy
from outrider.drafters.head.network import Head
from outrider.engine.cache import Cache
from outrider.models.speculators import read_head
from outrider.train.run import train
from outrider.types import Sequence

from support.training import head_net, home, packed, recipe, speaks  # noqa: F401  (`home` is a fixture)


def expected_tau(result: dict[str, Any]) -> float:
    """τ of real decoding: the evaluated walk, and one pass for each prompt, which emits the first token."""
    walk, held = result["evaluations"][-1]["kinds"]["all"], result["held_answers"]
    return (walk["tokens"] + held) / (walk["tokens"] / walk["tau"] + held)


@pytest.mark.parametrize(("kind", "layers"), [("eagle3", 1), ("block", 1), ("block", 2)])
def test_the_trained_network_and_the_drafting_one_agree(kind: str, layers: int) -> None:
    net, config, tensors = head_net(kind, layers)
    assert net.state_dict().keys() == tensors.keys()
    target = toy()
    head = Head(config, tensors, target.embedding, torch.float64)
    tokens, cache = torch.randint(48, (13,)), Cache(64, 2, 64)
    plane = cache.add_plane(*head.plane_shape)
    taps = [torch.randn(12, 32).double() for _ in range(3)]
    rows = packed(cache, Sequence(1, tokens[1:].tolist()))
    logits, outputs = head.forward(rows, plane, head.fuse(taps))
    e, all_taps = target.embedding[tokens[1:]][None], torch.cat(taps, 1)[None]
    output = next(net.unroll(e, all_taps, 1)) if kind == "eagle3" else net.anchored(e, all_taps, torch.tensor([[0]]))[0]
    torch.testing.assert_close(output[0], outputs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(net.logits(output)[0], logits[:, net.ids], atol=1e-5, rtol=1e-5)
    assert bool(torch.isinf(logits[:, ~net.t2d]).all())


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_trained_head_drafts_as_well_as_evaluated(home: Path, tmp_path: Path, kind: str) -> None:  # noqa: F811
    result = train(recipe(home, tmp_path / "head", kind=kind, steps=80))
    plain, texts = speaks(home, drafter="off")
    tau, same = speaks(home, drafter="head", head=str(tmp_path / "head"), k=4)
    assert plain == 1.0
    assert same == texts
    assert tau == pytest.approx(expected_tau(result))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "int8"])
def test_a_narrow_head_learns_too(home: Path, tmp_path: Path, dtype: str) -> None:  # noqa: F811
    """Half as wide as its target, with its own embedding; its int8 form drafts nearly the same."""
    result = train(recipe(home, tmp_path / "narrow", steps=100, hidden_size=16))
    before, after = (result["evaluations"][at]["kinds"]["all"]["tau"] for at in (0, -1))
    assert after > before + 0.5
    config, tensors = read_head(tmp_path / "narrow")
    assert (config.hidden_size, config.target_hidden_size) == (16, 32)
    assert tensors["embed_tokens.weight"].shape == (config.vocab_size, 16)
    _, texts = speaks(home, drafter="off")
    tau, same = speaks(home, drafter="head", head=str(tmp_path / "narrow"), k=4, draft_dtype=dtype)
    assert same == texts
    assert tau == pytest.approx(expected_tau(result), rel=0.0 if dtype == "float32" else 0.1)
    with pytest.raises(OutriderError, match="--hidden-size makes a narrow head"):
        recipe(home, tmp_path / "model", kind="model", hidden_size=16)
