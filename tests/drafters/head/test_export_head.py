"""Trained heads for other engines: found for their target, and read by the package `speculators`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider import ConfigError
from outrider.cli.app import app
from outrider.config import from_speculative_config
from outrider.export.engines import vllm_speculative_config
from outrider.export.plan import ExportPlan, make_plan
from outrider.models.checkpoint import open_checkpoint
from outrider.models.speculators import random_head, read_head, target_hash, write_head

from support import tiny


def test_a_plan_finds_the_head_of_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    target = open_checkpoint(tiny.save(tmp_path / "target"))
    with pytest.raises(ConfigError, match="which head is meant"):
        make_plan(target, "head", {}, None)
    config, tensors = random_head(target.config, hash=target_hash(target.config, target.weights))
    folder = tmp_path / "home" / "heads" / "own"
    write_head(folder, config, tensors)
    for drafter in ("head", "auto", None):
        plan = make_plan(target, drafter, {}, None)
        assert (plan.kind, plan.folder, plan.k) == ("head", folder, config.block)
    other = open_checkpoint(tiny.save(tmp_path / "other", seed=9))
    assert make_plan(other, "auto", {}, None).kind == "suffix"


def test_our_own_reader_understands_vllms_configuration() -> None:
    spec = vllm_speculative_config(ExportPlan("head", 5, k_by_batch=[(1, 4, 5), (5, 64, 2)]), Path("drafter"))
    assert from_speculative_config(spec) == {"drafter": "head", "head": "drafter", "k": 5}


@pytest.mark.speculators
def test_speculators_reads_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reader finds every weight under its own names, and nothing that it does not know."""
    speculators = pytest.importorskip("speculators")
    arguments = ["export", "--to", "vllm", "--out", str(tmp_path), "--drafter", "head", "--dtype", "float32"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    monkeypatch.chdir(tmp_path)  # the verifier is a relative path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = speculators.SpeculatorModelConfig.from_pretrained("drafter")
    exported, tensors = read_head(tmp_path / "drafter")
    assert config.draft_vocab_size == exported.draft_vocab_size
    assert config.eagle_aux_hidden_state_layer_ids == [tap + 1 for tap in exported.taps]
    assert config.speculators_config.verifier.name_or_path == "target"
    model: Any = speculators.SpeculatorModel.from_pretrained("drafter")
    read = {name.replace("layers.0.", "midlayer."): value for name, value in model.state_dict().items()}
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor.to(read[name].dtype)), name  # it reads in 16 bits
