"""Quantised checkpoints in safetensors, each against a packer written here from the format's definition.

Fields, zero points and scales are drawn, packed with numpy, written, read and compared bit for bit: a value is
(field - zero point) * scale, and scales are powers of two, so that it is exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.backends.cpu import quantise as quant
from outrider.errors import ConfigError, ModelError
from outrider.models.checkpoint import open_checkpoint
from outrider.models.precision import stored_in
from outrider.models.quantised import QuantisedWeights
from outrider.models.weights import Safetensors

from support.tiny import save

Array = np.ndarray[Any, Any]
MODULE = "layers.0.mlp.up_proj"


class Drawn:
    """Fields [N, K], zero points and scales [N, G] of one weight, and its values by the definition."""

    def __init__(self, outputs: int, inputs: int, group: int, bits: int = 4, zero: int | None = None, seed: int = 1):
        draw = np.random.default_rng(seed)
        self.index = np.arange(inputs) // group
        groups = -(-inputs // group)
        self.q = draw.integers(0, 1 << bits, (outputs, inputs))
        self.q[0, :2] = 0, (1 << bits) - 1
        self.zero = draw.integers(0, 1 << bits, (outputs, groups)) if zero is None else np.full((outputs, groups), zero)
        if zero is None:
            self.zero[0, 0], self.zero[-1, -1] = 0, (1 << bits) - 1
        self.scale = 2.0 ** draw.integers(-8, 0, (outputs, groups))
        self.bits = bits

    def ordered(self, seed: int = 2) -> Drawn:
        """Inputs belong to groups in random order, as with desc_act."""
        self.index = np.random.default_rng(seed).permutation(self.index)
        return self

    @property
    def values(self) -> Array:
        return (self.q - self.zero[:, self.index]) * self.scale[:, self.index]


def words(fields: Array, bits: int) -> torch.Tensor:
    """[..., n] -> int32 [..., ceil(n * bits / 32)], lowest bits first."""
    each = 32 // bits
    padded = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, -fields.shape[-1] % each)])
    lanes = padded.reshape(*padded.shape[:-1], -1, each).astype(np.uint64)
    packed = sum(lanes[..., i] << np.uint64(bits * i) for i in range(each))
    return torch.from_numpy(np.ascontiguousarray(packed).astype(np.uint32).view(np.int32))


def halves(scale: Array, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(scale)).to(dtype)


# ------------------------------------------------------------ packers


def awq(w: Drawn) -> dict[str, torch.Tensor]:
    """Along the outputs; nibble j of a word is its column [0, 2, 4, 6, 1, 3, 5, 7][j]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(rows: Array) -> torch.Tensor:  # [rows, N]
        return words(rows.reshape(rows.shape[0], -1, 8)[..., order].reshape(rows.shape), 4)

    return {"qweight": packed(w.q.T), "qzeros": packed(w.zero.T), "scales": halves(w.scale.T)}


def gptq(w: Drawn, minus: int = 1) -> dict[str, torch.Tensor]:
    """Weights along the inputs, zero points (minus one in version 1) along the outputs."""
    stored = (w.zero - minus) & ((1 << w.bits) - 1)
    return {
        "qweight": words(w.q, w.bits).T.contiguous(),
        "qzeros": words(stored.T, w.bits),
        "scales": halves(w.scale.T),
        "g_idx": torch.from_numpy(w.index.astype(np.int32)),
    }


def compressed(w: Drawn, zeros: str = "packed", index: bool = False) -> dict[str, torch.Tensor]:
    """Fields are q - 2^(bits - 1), stored with that added again; so are zero points, packed along the outputs."""
    parts = {
        "weight_packed": words(w.q, w.bits),
        "weight_scale": halves(w.scale, torch.bfloat16),
        "weight_shape": torch.tensor(w.q.shape),
    }
    if zeros == "packed":
        parts["weight_zero_point"] = words(w.zero.T, w.bits).T.contiguous()
    elif zeros == "whole":
        parts["weight_zero_point"] = torch.from_numpy((w.zero - (1 << (w.bits - 1))).astype(np.int8))
    if index:
        parts["weight_g_idx"] = torch.from_numpy(w.index.astype(np.int32))
    return parts


def settings(method: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": method, "bits": 4, "group_size": 128, **more}


def groups(bits: int = 4, size: int | None = 128, kind: str = "int", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "group_size": size, **more}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def opened(folder: Path, parts: dict[str, torch.Tensor], config: dict[str, Any]) -> QuantisedWeights:
    folder.mkdir(exist_ok=True)
    save_file({f"model.{MODULE}.{name}": part.contiguous() for name, part in parts.items()}, folder / "m.safetensors")
    return QuantisedWeights(Safetensors([folder / "m.safetensors"]), config, folder)


def check(weights: QuantisedWeights, values: Array) -> None:
    name = f"{MODULE}.weight"
    assert weights.names() == {name}
    assert weights.shape(name) == values.shape
    assert np.array_equal(weights.get(name, torch.float64).numpy(), values)
    assert weights.get(name, torch.bfloat16).dtype == torch.bfloat16


SIZES = [(16, 64, 32), (24, 48, 32), (8, 40, 128), (40, 384, 128)]  # outputs, inputs, group: some do not divide


@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
def test_awq(outputs: int, inputs: int, group: int, tmp_path: Path) -> None:
    w = Drawn(outputs, inputs, group)
    weights = opened(tmp_path, awq(w), settings("awq", group_size=group, version="gemm"))
    check(weights, w.values)
    assert weights.stored_in == "int4"


@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("order", [False, True])
def test_gptq(outputs: int, inputs: int, group: int, version: str, order: bool, tmp_path: Path) -> None:
    w = Drawn(outputs, inputs, group)
    w = w.ordered() if order else w
    parts = gptq(w, minus=int(version == "gptq"))
    weights = opened(tmp_path, parts, settings("gptq", group_size=group, desc_act=order, checkpoint_format=version))
    check(weights, w.values)
    grouped = weights.grouped(f"{MODULE}.weight")
    assert grouped is not None
    assert (grouped.order is not None) == (order and inputs > group)


@pytest.mark.parametrize("zero", [None, 128])
def test_gptq_in_eight_bits(zero: int | None, tmp_path: Path) -> None:
    w = Drawn(16, 64, 32, 8, zero)
    weights = opened(tmp_path, gptq(w), settings("gptq", bits=8, group_size=32))
    check(weights, w.values)
    assert weights.stored_in == "int8"


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("minus", [0, 1])
def test_gptq_whose_label_lies(label: str, minus: int, tmp_path: Path) -> None:
    """A symmetric file's zero points are 8: stored as 7 by version 1, as 8 by version 2, whatever it says."""
    w = Drawn(8, 64, 32, zero=8)
    weights = opened(tmp_path, gptq(w, minus), settings("gptq", group_size=32, sym=True, checkpoint_format=label))
    check(weights, w.values)


def test_gptq_with_one_group_and_with_groups_of_several_sizes(tmp_path: Path) -> None:
    w = Drawn(8, 64, 64)
    check(opened(tmp_path / "a", gptq(w), settings("gptq", group_size=-1)), w.values)
    w = Drawn(8, 64, 32)
    w.index = np.array([0] * 20 + [1] * 44)
    weights = opened(tmp_path / "b", gptq(w), settings("gptq", group_size=32, desc_act=True))
    check(weights, w.values)


@pytest.mark.parametrize(("outputs", "inputs", "group"), [*SIZES, (13, 37, 8), (5, 70, 32)])
@pytest.mark.parametrize("zeros", ["none", "packed", "whole"])
def test_compressed_tensors(outputs: int, inputs: int, group: int, zeros: str, tmp_path: Path) -> None:
    w = Drawn(outputs, inputs, group, zero=8 if zeros == "none" else None)
    check(opened(tmp_path, compressed(w, zeros), groups(size=group)), w.values)


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_with_an_order_and_in_eight_bits(bits: int, tmp_path: Path) -> None:
    w = Drawn(16, 96, 32, bits, zero=1 << (bits - 1)).ordered()
    check(opened(tmp_path / "a", compressed(w, "none", index=True), groups(bits, 32)), w.values)
    w = Drawn(16, 96, 96, bits, zero=1 << (bits - 1))  # one scale for each output
    parts = compressed(w, "none") | {"weight_g_idx": torch.full((96,), -1, dtype=torch.int32)}
    check(opened(tmp_path / "b", parts, groups(bits, None)), w.values)


def eight(kind: str, outputs: int, inputs: int) -> tuple[torch.Tensor, Array]:
    raw = np.random.default_rng(3).integers(0, 256, (outputs, inputs)).astype(np.uint8)
    if kind == "int":
        return torch.from_numpy(raw).view(torch.int8), raw.view(np.int8).astype(np.float64)
    raw[(raw & 127) == 127] = 3
    sign, exponent, mantissa = raw >> 7, (raw >> 3) & 15, raw & 7  # e4m3: no infinity, bias 7
    small, normal = mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7)
    return torch.from_numpy(raw).view(torch.float8_e4m3fn), np.where(sign, -1, 1) * np.where(exponent, normal, small)


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("strategy", ["tensor", "one", "channel", "column", "group"])
def test_whole_weights_in_eight_bits(kind: str, strategy: str, tmp_path: Path) -> None:
    values, exact = eight(kind, 10, 72)
    scale = 2.0 ** np.random.default_rng(4).integers(-8, 0, (10, 3))
    forms = {"tensor": scale[0, 0], "one": scale[0, :1], "channel": scale[:, 0], "column": scale[:, :1], "group": scale}
    wide = {"tensor": np.full((10, 72), scale[0, 0]), "one": np.full((10, 72), scale[0, 0])}
    wide |= dict.fromkeys(("channel", "column"), scale[:, :1].repeat(72, 1)) | {"group": scale.repeat(24, 1)}
    parts = {"weight": values, "weight_scale": halves(np.array(forms[strategy])), "input_scale": torch.ones(1)}
    weights = opened(tmp_path, parts, groups(8, 24 if strategy == "group" else None, kind))
    check(weights, exact * wide[strategy])
    assert weights.stored_in == ("int8" if kind == "int" else "fp8")


@pytest.mark.parametrize(("outputs", "inputs"), [(256, 128), (130, 200), (5, 7)])
def test_fp8_in_blocks(outputs: int, inputs: int, tmp_path: Path) -> None:
    """A factor for each block of 128 × 128, the last ones smaller; its name says inverse, but it multiplies."""
    values, exact = eight("float", outputs, inputs)
    scale = 2.0 ** np.random.default_rng(4).integers(-8, 0, (-(-outputs // 128), -(-inputs // 128)))
    wide = scale.repeat(128, 0)[:outputs].repeat(128, 1)[:, :inputs]
    parts = {"weight": values, "weight_scale_inv": halves(scale, torch.float32)}
    check(opened(tmp_path, parts, {"quant_method": "fp8", "weight_block_size": [128, 128]}), exact * wide)


# ------------------------------------------------------------ what is refused

W = Drawn(16, 64, 32)
NOT_A_NUMBER = torch.full((16, 64), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
REFUSED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "bits": (gptq(W), settings("gptq", bits=3, group_size=32), "3 bits.*GGUF"),
    "version": (awq(W), settings("awq", version="gemv_fast"), "gemv_fast.*gemm"),
    "group size": (awq(W), settings("awq", group_size=64), "scales|qzeros.*download"),
    "strange group size": (awq(W), settings("awq", group_size="many"), "group_size"),
    "no zero points": ({k: v for k, v in awq(W).items() if k != "qzeros"}, settings("awq", group_size=32), "no qzeros"),
    "no scales": ({k: v for k, v in gptq(W).items() if k != "scales"}, settings("gptq", group_size=32), "no scales"),
    "awq as gptq": (awq(W), settings("gptq", group_size=32), "shape.*download"),
    "an index outside": (
        gptq(W) | {"g_idx": torch.arange(64, dtype=torch.int32)}, settings("gptq", group_size=32, desc_act=True),
        "indices that are not 64 numbers from 0 to 1",
    ),
    "a short index": (
        gptq(W) | {"g_idx": torch.zeros(63, dtype=torch.int32)}, settings("gptq", group_size=32, desc_act=True),
        r"g_idx of the shape \[63\]",
    ),
    "infinite scales": (
        gptq(W) | {"scales": torch.full((2, 16), torch.inf)}, settings("gptq", group_size=32), "scales that are not"
    ),
    "words": (compressed(W) | {"weight_shape": torch.tensor([16, 80])}, groups(size=32), "do not hold 16 × 80"),
    "groups": (compressed(W), groups(size=16), "2 groups of 16 for 64"),
    "zero points": (
        compressed(W) | {"weight_zero_point": torch.zeros(3, 3, dtype=torch.int32)}, groups(size=32), "zero points"
    ),
    "two bits": (compressed(W), groups(2, 32), "2 bits"),
    "four-bit floats": (compressed(W), groups(4, 32, "float"), "float"),
    "values": ({"weight": NOT_A_NUMBER, "weight_scale": torch.ones(1)}, {"quant_method": "fp8"}, "not numbers"),
    "scales of blocks": (
        {"weight": torch.ones(16, 64).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(3, 5)},
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, r"scales of the shape \[3, 5\]",
    ),
    "floats": ({"weight": torch.ones(4, 4)}, {"quant_method": "fp8"}, "labelled as quantised"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_together_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    parts, config, words = REFUSED[case]
    with pytest.raises(ModelError, match=words) as caught:
        opened(tmp_path, {k: v.clone() for k, v in parts.items()}, config).get(f"{MODULE}.weight", torch.float32)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------ whole models


def quantised_folder(folder: Path, pack: Callable[[Drawn], dict[str, torch.Tensor]], config: dict[str, Any]) -> Path:
    """A tiny model whose layers' products are quantised, and read as what they stand for."""
    save(folder)
    tensors, exact = load_file(folder / "model.safetensors"), {}
    for i, name in enumerate([n for n in tensors if n.endswith("_proj.weight")]):
        outputs, inputs = tensors.pop(name).shape
        w = Drawn(outputs, inputs, 16, zero=8 if config.get("sym") else None, seed=i)
        w.scale = 2.0 ** (w.scale.clip(max=0.5) * 2 - 6).round()
        tensors |= {name.replace("weight", part): tensor.contiguous() for part, tensor in pack(w).items()}
        exact[name.removeprefix("model.")] = w.values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"quantization_config": config}))
    weights = open_checkpoint(folder).weights
    for name, values in exact.items():
        assert np.array_equal(weights.get(name, torch.float64).numpy(), values)
    return folder


FORMS: dict[str, tuple[Callable[[Drawn], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "awq": (awq, settings("awq", group_size=16)),
    "gptq": (lambda w: gptq(w.ordered()), settings("gptq", group_size=16, desc_act=True)),
    "compressed": (compressed, groups(size=16)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_dequantised_on_a_cpu_and_says_so(form: str, tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path, *FORMS[form])
    assert stored_in(open_checkpoint(folder).weights) == "int4"
    with LLM(folder, device="cpu", dtype="float32", drafter="suffix") as llm:
        assert llm.dtype == "float32"
        assert llm.backend == "The checkpoint's int4 weights are dequantised to float32."
        assert llm.generate(["the quick brown fox"], SamplingParams(max_tokens=4, temperature=0))[0].token_ids
    with pytest.raises(ConfigError, match="CPU has no kernels for int4"):
        LLM(folder, device="cpu", dtype="int4")
    with pytest.raises(ConfigError, match="is not stored in fp8"):
        LLM(folder, device="cpu", dtype="fp8")


def test_int8_weights_are_not_rounded_again_on_a_cpu(tmp_path: Path) -> None:
    """The layers keep the file's bytes and scales, whatever the largest of them is; only the head is rounded."""

    def pack(w: Drawn) -> dict[str, torch.Tensor]:
        w.q = w.q.clip(3, 11)
        w.zero[:] = 8
        w.scale[:] = w.scale[:, :1]
        weight = torch.from_numpy((w.q - 8).astype(np.int8))
        return {"weight": weight, "weight_scale": halves(w.scale[:, :1], torch.float32)}

    folder = quantised_folder(tmp_path, pack, groups(8, None))
    with LLM(folder, device="cpu", dtype="int8", drafter="off") as llm:
        assert llm.backend.startswith("The checkpoint's int8 weights are used as they are")
        target: Any = llm.target
        down = target.tensors["layers.1.down.weight"]  # [blocks, K/4, 32, 4], + 128
        stored = open_checkpoint(folder).weights.grouped("layers.1.mlp.down_proj.weight")
        ours = down.transpose(1, 2).reshape(-1, down.shape[1] * 4)[:32, :48].int() - 128
        assert torch.equal(ours, stored.values.int())
        assert torch.equal(target.tensors["layers.1.down.scale"][:32], stored.scale[:, 0])
        assert llm.generate(["the quick"], SamplingParams(max_tokens=3))[0].token_ids
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = -128  # kernels take magnitudes up to 127
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert quant.own_scales(open_checkpoint(folder).weights, ["layers.1.mlp.down_proj.weight"]) is None


def test_a_folder_whose_label_is_missing(tmp_path: Path) -> None:
    folder = quantised_folder(tmp_path, *FORMS["awq"])
    data = json.loads((folder / "config.json").read_text())
    del data["quantization_config"]
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match=r"has no tensor.*quantised"):
        open_checkpoint(folder)
