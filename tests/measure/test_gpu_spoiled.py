"""A draft model that is spoiled on the device: acceptance falls, texts stay."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from outrider.backends import ops

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from gpu_spoiled import Spoiled
from outrider.backends.transformer import Transformer
from outrider.drafters import Drafter
from outrider.engine.cache import Cache
from outrider.engine.step import Engine
from outrider.params import SamplingParams
from outrider.types import ACCEPTED, REJECTED, Sequence

from support.device_engine import device_engine
from support.kernels import DEVICE, GPU
from support.pairs import ours, source


def tiny() -> Transformer:
    return ours("tiny marian", torch.float32, 0.0, str(DEVICE))


def counted(engine: Engine) -> tuple[list[list[int]], int, int]:
    """Texts of two sources, and how many drafted tokens were accepted and how many reached."""
    seqs, model = [], engine.target.model  # type: ignore[attr-defined]
    for number, ids in enumerate((source(5), source(9, salt=3))):
        start = model.opening(ids)
        law = SamplingParams(max_tokens=12, ignore_eos=True)
        seqs.append(Sequence(number + 1, start.tokens, law, source=start.source))
        engine.add(seqs[-1])
    accepted = reached = 0
    while engine.busy:
        step = engine.step()
        assert not step.failure, step.failure
        for verdict in step.verdicts:
            if verdict is not None:
                accepted += len(verdict.path)
                reached += sum(fate in (ACCEPTED, REJECTED) for fate in verdict.fates)
    assert not engine.failures
    return [seq.generated for seq in seqs], accepted, reached


def test_spoiled_tokens_are_rejected_and_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)

    def texts(drafter: str | type[Drafter], **options: object) -> tuple[list[list[int]], int, int]:
        cache, k = Cache(600, 8, 80, DEVICE, source_length=96), 0 if drafter == "off" else 3
        return counted(device_engine(tiny(), cache, drafter, k, True, **options))

    plain, *_ = texts("off")
    whole, accepted, reached = texts("model", draft_model=tiny())
    spoiled, fewer, tried = texts(Spoiled, draft_model=tiny(), spoil=0.4)
    assert plain == whole == spoiled
    assert accepted == reached
    assert 0 < fewer < tried
