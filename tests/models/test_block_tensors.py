"""Matrices in GGUF's blocks: what the format says, nearer than plain rounding, nearest where inputs are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings, strategies as st

from outrider.errors import ModelError
from outrider.models.blocks import FORMATS, BlockTensor, UnreadBlocks, block_size, encode, narrowed


def weights(seed: int, rows: int = 24, inputs: int = 512, tail: float = 1.0) -> torch.Tensor:
    """[rows, inputs] with rows of different sizes, and tails that are heavier than a bell's."""
    dice = np.random.default_rng(seed)
    return torch.from_numpy(dice.standard_t(3 * tail + 1, (rows, inputs)) * dice.random((rows, 1))).float()


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.integers(0, 2**32 - 1))
def test_a_block_is_no_further_than_the_usual_rounding(kind: str, seed: int) -> None:
    w = weights(seed)
    ours = encode(w, kind)
    assert ours.shape == w.shape
    assert ours.raw.shape == (24, 512 // block_size(kind)[0] * block_size(kind)[1])
    error = (ours.float() - w).square().sum()
    usual = GGMLQuantizationType[kind if kind != "Q4_K" else "Q4_1"]  # the package writes no Q4_K; this has more bits
    theirs = torch.from_numpy(quants.dequantize(quants.quantize(w.numpy(), usual), usual))
    assert error <= (theirs - w).square().sum() * (1.25 if kind == "Q4_K" else 1.001)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.integers(0, 2**32 - 1))
def test_known_inputs_make_products_nearer(kind: str, seed: int) -> None:
    """Inputs that go together, of different sizes, one of them enormous."""
    dice = torch.Generator().manual_seed(seed % 1000)
    mix, sizes = torch.randn(256, 256, generator=dice) / 16, torch.rand(256, generator=dice) + 0.2
    x = torch.randn(1500, 256, generator=dice) @ (mix + torch.eye(256)) * sizes
    x[:, 5] *= 100
    w = weights(seed, inputs=256, tail=5)
    plain, fed = encode(w, kind), encode(w, kind, x.T @ x / len(x))
    far, near = ((x @ (each.float() - w).T).square().sum() for each in (plain, fed))
    assert near < far
    assert fed.float().isfinite().all()


def test_zeros_and_equal_numbers_are_exact() -> None:
    w = torch.zeros(3, 256)
    w[1] = 0.75
    for kind in FORMATS:
        assert torch.equal(encode(w[:1], kind).float(), w[:1])
        assert torch.allclose(encode(w, kind).float(), w, rtol=2e-3)


def test_inputs_that_never_occur_do_no_harm() -> None:
    w, moments = weights(3, inputs=256), torch.zeros(256, 256)
    moments[:8, :8] = torch.eye(8)
    for kind in FORMATS:
        assert (encode(w, kind, moments).float()[:, :8] - w[:, :8]).norm() < 0.2 * w[:, :8].norm()


def test_what_is_not_in_whole_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="3 x 40 numbers is not in whole blocks of 32"):
        encode(torch.zeros(3, 40), "Q4_0")
    with pytest.raises(ModelError, match="blocks of 256, as Q4_K needs"):
        encode(torch.zeros(3, 64), "Q4_K")
    for raw in (torch.zeros(3, 17, dtype=torch.uint8), torch.zeros(3, 18), torch.zeros(18, dtype=torch.uint8)):
        with pytest.raises(ModelError, match="w is not in whole blocks of Q4_0"):
            BlockTensor.checked(raw, "Q4_0", "w")


def test_blocks_are_narrowed_when_their_bytes_are_used() -> None:
    wide, reads = encode(weights(1), "Q8_0"), list[int]()

    def read() -> torch.Tensor:
        reads.append(1)
        return wide.raw

    narrow = narrowed(UnreadBlocks(read, "Q8_0", wide.shape), "Q4_K")
    assert (narrow.kind, narrow.shape, reads) == ("Q4_K", wide.shape, [])
    assert torch.equal(narrow.raw, encode(wide.float(), "Q4_K").raw)
    assert reads == [1]


@pytest.mark.parametrize(("kind", "inputs"), [("Q4_0", 512), ("Q4_K", 512), ("Q8_0", 96)])
def test_blocks_that_are_as_small_or_no_whole_ones_stay(kind: str, inputs: int) -> None:
    tensor = encode(weights(1, inputs=inputs), kind)
    assert narrowed(tensor, "Q4_K") is tensor
