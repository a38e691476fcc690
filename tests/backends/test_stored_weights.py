"""Weights that are made once: in bounded memory, whole or not at all, and from memory where nothing can be written."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.backends import ops
from outrider.backends.cpu import blocks, quantise as quant
from outrider.backends.cpu.blocks import BlockTransformer
from outrider.backends.cpu.int8 import open_int8
from outrider.backends.toy import RandomWeights, toy_config
from outrider.models.stages import listening

from support.random_blocks import RandomBlocks, block_config

COUNT = 20


def _tensor(i: int) -> Tensor:
    types = (torch.uint8, torch.int8, torch.int64, torch.float32, torch.bfloat16)
    return (torch.arange(1000 + i) % 100).to(types[i % len(types)])


class _Alive:
    """Counts the tensors that pass through and still exist."""

    def __init__(self) -> None:
        self.refs: list[Any] = []
        self.most = 0

    def through(self, tensors: quant.NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.refs.append(weakref.ref(tensor))
            self.most = max(self.most, sum(ref() is not None for ref in self.refs))
            pair = name, tensor
            del name, tensor
            yield pair
            del pair


def _made() -> Iterator[tuple[str, Tensor]]:
    for i in range(COUNT):
        yield f"layers.{i}", _tensor(i)


def _check(tensors: quant.Tensors) -> None:
    assert list(tensors) == [f"layers.{i}" for i in range(COUNT)]
    for i, tensor in enumerate(tensors.values()):
        assert tensor.dtype is _tensor(i).dtype
        assert torch.equal(tensor, _tensor(i))
        assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("kept", [True, False])
def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, kept: bool) -> None:
    alive, folder = _Alive(), tmp_path / "kept"
    if not kept:
        folder.touch()  # a file: there cannot be a folder
    tensors, trouble = quant.stored("name", lambda: alive.through(_made()), folder)
    _check(tensors)
    assert (trouble == "") is kept
    assert alive.most == 1


def test_the_two_builders_keep_no_tensor() -> None:
    config, weights = block_config(256), RandomBlocks(block_config(256), "Q4_K", "Q6_K")
    alive = _Alive()
    names = [name for name, _ in alive.through(blocks.repacking(config, weights))]
    assert names == list(blocks.repacked(config, weights))
    assert alive.most <= 4  # pieces of q, k and v, and the one that this loop still holds
    toy, alive = toy_config(1), _Alive()
    names = [name for name, _ in alive.through(quant.calibrate(toy, RandomWeights(toy, 1), [1, 2, 3]))]
    assert names == list(quant.calibrated(toy, RandomWeights(toy, 1), [1, 2, 3]))
    assert alive.most <= 3  # one that the loop holds, and the last norm, which the model needs at the end


def test_whoever_takes_the_tensors_is_not_in_inference_mode() -> None:
    config = toy_config(1)
    for _ in quant.calibrate(config, RandomWeights(config, 1), [1, 2, 3]):
        assert not torch.is_inference_mode_enabled()


def test_weights_are_rounded_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, largest = torch.randn(200, 60), torch.randn(200), torch.rand(60)
    weight[3] = 0
    weight[70, 5] = float("nan")
    for gated, scale in ((False, None), (True, None), (False, torch.rand(200) + 0.1)):
        monkeypatch.setattr(quant, "_AT_ONCE", 1 << 30)
        whole = quant.quantise(weight, bias, largest, 8, gated, scale).named("x")
        monkeypatch.setattr(quant, "_AT_ONCE", 64 * 60)
        parts = quant.quantise(weight, bias, largest, 8, gated, scale).named("x")
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[n].nan_to_num(7), parts[n].nan_to_num(7)) for n in whole)


class _Full:
    """A file on a disk with room for so many writes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> None:
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.file.write(data)

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


@pytest.mark.parametrize("room", [0, COUNT // 2, COUNT])  # the last: all but the list of tensors
def test_a_full_disk_is_a_sentence_and_the_model_runs_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    opened = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda handle, mode: _Full(opened(handle, mode), room))
    tensors, trouble = quant.stored("name", _made, tmp_path)
    _check(tensors)
    assert trouble == (
        f"The weights cannot be kept in {tmp_path} (No space left on device), so every start prepares them anew."
    )
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_an_interruption_leaves_nothing_half_made(tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[str, Tensor]]:
        for i, pair in enumerate(_made()):
            if i == COUNT // 2:
                raise KeyboardInterrupt
            yield pair

    with pytest.raises(KeyboardInterrupt):
        quant.stored("name", interrupted, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    killed, other = tmp_path / "name.abc.part", tmp_path / "other.abc.part"
    killed.write_bytes(b"half")
    other.write_bytes(b"of another model, which may be building now")
    _check(quant.stored("name", _made, tmp_path).tensors)
    assert not killed.exists()
    assert other.exists()
    _check(quant.stored("name", lambda: pytest.fail("built again"), tmp_path).tensors)


def test_every_damaged_byte_of_the_list_is_noticed(tmp_path: Path) -> None:
    quant.stored("name", _made, tmp_path)
    (path,) = tmp_path.glob("*.weights")
    good, builds = path.read_bytes(), []

    def build() -> quant.NamedTensors:
        builds.append(1)
        return _made()

    for at in (*range(-12, 0), -13, -40, -500):
        damaged = bytearray(good)
        damaged[at] ^= 0x80
        path.write_bytes(damaged)
        _check(quant.stored("name", build, tmp_path).tensors)
    assert len(builds) == 15
    assert path.read_bytes() == good


@pytest.mark.skipif(ops._loaded().kernels is None, reason="no native kernels")
def test_models_say_that_their_weights_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "model.gguf").touch()
    config, seen = block_config(256), []
    checkpoint: Any = SimpleNamespace(
        config=config, weights=RandomBlocks(config, "Q4_K"), path=tmp_path / "model.gguf",
        tokenizer=SimpleNamespace(encode=lambda text: [1, 2, 3]),
    )  # fmt: skip
    with listening(lambda name, share: seen.append((name, share))):
        model: Any = BlockTransformer.open(checkpoint, folder=tmp_path / "file")
        assert "cannot be kept" in model.description
        assert BlockTransformer.open(checkpoint, folder=tmp_path / "kept").description == ""
        assert "cannot be kept" in open_int8(checkpoint, folder=tmp_path / "file").description
    assert {("Repacking the weights", 0.0), ("Repacking the weights", 1.0)} <= set(seen)
    assert {("Quantising the weights", 0.0), ("Quantising the weights", 1.0)} <= set(seen)
