"""A processor with AMX must give exact rows, one that faults on it must just work, and nobody should have to know."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from outrider.backends import machine
from outrider.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx512f", "amx_tile"}))


def child(monkeypatch: pytest.MonkeyPatch, survives: bool) -> list[int]:
    """The probe's children live or die; the list counts them."""
    calls: list[int] = []

    def probe() -> bool:
        calls.append(1)
        return survives

    monkeypatch.setattr(machine, "_child_survives", probe)
    return calls


def test_amx_is_never_used_for_exact_rows() -> None:
    machine.prepare()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"


def test_a_fault_caps_onednn_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = child(monkeypatch, survives=False)
    machine.prepare_faulty()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    machine.prepare_faulty()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert len(calls) == 1


def test_working_amx_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, survives=True)
    machine.prepare_faulty()
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


PREPARE = pytest.mark.parametrize("name", ["prepare", "prepare_faulty"])


@PREPARE
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = child(monkeypatch, survives=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    getattr(machine, name)()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "DEFAULT"
    assert not calls


@PREPARE
def test_without_amx_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx2"}))
    calls = child(monkeypatch, survives=False)
    getattr(machine, name)()
    assert not calls
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products")
def test_the_probe_itself_runs_here() -> None:
    """The real child, with the cap that we would set: it must survive on any machine that runs these tests."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = machine._CAP
    try:
        assert machine._child_survives()
    finally:
        del os.environ["ONEDNN_MAX_CPU_ISA"]


def test_a_child_that_is_killed_has_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not machine._child_survives()


def test_a_full_gpu_is_a_sentence() -> None:
    expected = "^The weights do not fit into the GPU's memory; lower max_length"
    with pytest.raises(ConfigError, match=expected), machine.memory_sentence("The weights"):
        raise torch.OutOfMemoryError
