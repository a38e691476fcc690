"""Choices on a GPU equal those of `engine.sampling`. Without a GPU the kernels run in triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import NamedTuple

import pytest
import torch

from outrider.engine import sampling
from outrider.types import SamplingParams, Sequence

from support.kernels import DEVICE, GPU  # before triton

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from outrider.backends.cuda.kernels import sampling as gpu_sampling  # noqa: E402 - its kernels are what triton's mode makes of them

# numpy, in the interpreter, warns of inf - inf even where the result is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Laws, _key, _gumbel = gpu_sampling.Laws, gpu_sampling._key, gpu_sampling._gumbel
V, BLOCK = 203, 64  # the last block is not full
FILTERS = [
    *({"top_k": 1}, {"top_k": 7}, {"top_k": V - 1}, {"top_k": V}, {"top_k": 10 * V}),
    *({"top_p": 1e-9}, {"top_p": 0.3}, {"top_p": 0.95}, {"min_p": 0.02}, {"min_p": 0.5}, {"min_p": 1.0}),
    *({"top_k": 20, "top_p": 0.8}, {"top_k": 20, "min_p": 0.1}, {"top_p": 0.9, "min_p": 0.05}),
    *({"top_k": 50, "top_p": 0.5, "min_p": 0.01}, {"top_k": 5, "top_p": 0.99, "min_p": 0.3}, {}),
]


class Row(NamedTuple):
    """One row to choose for."""

    logits: torch.Tensor  # [V]
    seed: int = 0
    position: int = 3
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def seq(self) -> Sequence:
        names = ("temperature", "top_k", "top_p", "min_p")
        seq = Sequence(1, [], SamplingParams(**{name: getattr(self, name) for name in names}), seed=self.seed)
        seq.tokens = range(self.position)  # type: ignore[assignment]  # only its length is read
        return seq


def laws(rows: list[Row]) -> Laws:
    real = ("temperature", "top_p", "min_p")
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in fields(Laws)}
    kinds = {name: torch.float64 if name in real else torch.int64 for name in columns}
    return Laws(**{name: torch.tensor(column, dtype=kinds[name], device=DEVICE) for name, column in columns.items()})


def chosen(rows: list[Row], filtered: bool, block: int = BLOCK) -> list[torch.Tensor]:
    logits = torch.stack([row.logits for row in rows]).to(DEVICE)
    return [out.cpu() for out in gpu_sampling.choose(logits, laws(rows), filtered, block)]


def check(rows: list[Row], filtered: bool, block: int = BLOCK) -> None:
    """Every row's choice, highest logit and confidence equal those of `engine.sampling`."""
    choices, highest, confidence = chosen(rows, filtered, block)
    assert choices.tolist() == [sampling.choose(row.logits, row.seq, []) for row in rows]
    assert highest.tolist() == [float(row.logits.max()) for row in rows]
    expected = [sampling.ranked(row.logits, row.seq, [], 1)[0][1] for row in rows]
    assert confidence.tolist() == pytest.approx(expected, rel=1e-3)  # on the host, only what noise can reach counts


def noise(seed: int, scale: float = 3.0, size: int = V) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


@triton.jit
def _probe(seed, position, keys, noises, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row, tokens = tl.program_id(0), tl.arange(0, BLOCK)
    key = _key(tl.load(seed + row), tl.load(position + row))
    tl.store(keys + row, key.to(tl.int64))
    tl.store(noises + row * BLOCK + tokens, _gumbel(key, tokens + 200_000))


def test_the_hash_is_that_of_sampling() -> None:
    places = [(0, 0), (1, 2), (7, 10**6), (2**63 - 1, 2**40), (2**62 + 12345, 2**31 + 1)]
    seed, position = torch.tensor(places, device=DEVICE).T.contiguous()
    keys = torch.empty_like(seed)
    noises = torch.empty(len(places), 256, dtype=torch.float64, device=DEVICE)
    _probe[(len(places),)](seed, position, keys, noises, 256)
    expected = [sampling.key(*place, sampling.CHOICE) for place in places]
    assert keys.tolist() == [sampling._signed(key) for key in expected]
    tokens = torch.arange(200_000, 200_256)
    wanted = torch.stack([sampling.gumbel(key, tokens) for key in expected])
    # Another library's logarithm may round its last bit differently; another hash would be far off.
    torch.testing.assert_close(noises.cpu(), wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("block", [32, 256])
def test_choices_are_those_of_sampling(filtered: bool, block: int) -> None:
    rows = [
        Row(noise(i, scale), seed, position, temperature)
        for i, (seed, position) in enumerate([(0, 1), (5, 77), (2**63 - 1, 131_072), (2**40 + 3, 2**33)])
        for temperature, scale in ((0.0, 3.0), (0.1, 0.5), (0.8, 8.0), (1.0, 3.0), (1.0, 0.1), (100.0, 8.0))
    ]
    check(rows, filtered, block)


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.3])
def test_filters_are_those_of_sampling(temperature: float) -> None:
    rows = [
        Row(noise(i, scale), 100 + i, 10 + i, temperature, **params)
        for i, params in enumerate(FILTERS)
        for scale in (0.5, 4.0)
    ]
    check(rows, True)


def test_filters_among_equals_are_those_of_sampling() -> None:
    """Scores in steps of 1/2: most floors fall among many equals, where the lowest ids come first."""
    steps = [(noise(i, 1.0) * 2).round() / 2 for i in range(2)]
    check([Row(z, seed, 9, 0.9, **params) for params in FILTERS for seed, z in enumerate(steps)], True)


def test_candidates_are_those_of_sampling() -> None:
    """Not only the choice: floor and tie leave exactly the same candidates."""
    rows = [
        Row((noise(i, 1.5) * sharp).round() / sharp, 0, 0, 0.7, **params)
        for i, params in enumerate(FILTERS)
        for sharp in (2, 1000)
    ]
    rows.append(Row(torch.zeros(256)[:V], 0, 0, 1.0))
    logits = torch.stack([row.logits for row in rows]).to(DEVICE)
    floor, tie = (part.cpu() for part in gpu_sampling.floors(logits, laws(rows)))
    for i, row in enumerate(rows):
        scores = row.logits.double() / row.temperature
        kept = (scores > floor[i]) | ((scores == floor[i]) & (torch.arange(V) <= tie[i]))
        assert torch.nonzero(kept).flatten().tolist() == sampling.candidates(row.logits, row.seq)[0].tolist()


def test_a_nucleus_among_equals_takes_the_lowest_ids() -> None:
    flat = Row(torch.zeros(64), top_p=0.25, temperature=1.0)
    floor, tie = gpu_sampling.floors(flat.logits[None].to(DEVICE), laws([flat]))
    assert (floor.item(), tie.item()) == (0.0, 15)
    check([flat._replace(seed=seed) for seed in range(8)], True)


def test_ties_go_to_the_lowest_id() -> None:
    flat, late = torch.zeros(V), torch.zeros(V)
    late[[70, 130, 200]] = 1
    choices, _, confidence = chosen([Row(flat), Row(late)], False)
    assert choices.tolist() == [0, 70]
    assert confidence[0] == pytest.approx(1 / V)
    infinite = noise(1)
    infinite[[40, 90]] = math.inf  # infinite scores stay equal under noise
    rows = [Row(infinite), Row(infinite, temperature=1.0), Row(infinite, temperature=1.0, top_p=0.4, min_p=0.1)]
    assert chosen(rows, True)[0].tolist() == [40, 40, 40]
    check([Row(flat, seed, 3, 0.8) for seed in range(10)], False)


def test_impossible_tokens_are_never_chosen() -> None:
    few = torch.full((V,), -math.inf)
    few[[64, 150, 202]] = torch.tensor([0.0, 0.5, 1.0])
    rows = [Row(few, seed, 3, 2.0, **params) for seed in range(4) for params in ({}, *FILTERS[1:12:2])]
    check([*rows, Row(few)], True)
    check([Row(few, seed, 3, 2.0) for seed in range(10)], False)


@pytest.mark.parametrize("filtered", [False, True])
def test_broken_rows_are_reported_and_do_not_affect_others(filtered: bool) -> None:
    broken, nothing, fine = noise(1), torch.full((V,), -math.inf), Row(noise(2), 4, 5, 0.9)
    broken[150] = math.nan
    sick = [Row(z, 1, 2, t, top_p=0.9, top_k=5) for z in (broken, nothing) for t in (0.0, 1.0)]
    choices, highest, confidence = chosen([*sick, fine], filtered)
    assert highest[:2].isnan().all()
    assert highest[2:4].tolist() == [-math.inf, -math.inf]
    assert ((choices >= 0) & (choices < V)).all()  # always a valid id, so that a lookup cannot fail
    assert choices[4] == sampling.choose(fine.logits, fine.seq, [])
    assert not confidence[2:].isnan().any()


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = [Row(noise(i, 2.0), i, 20 + i, 0.3 * (i % 4), **params) for i, params in enumerate(FILTERS[5:])]
    together = chosen(rows, True)
    for i, row in enumerate(rows):
        assert all(torch.equal(alone[0], every[i]) for alone, every in zip(chosen([row], True), together, strict=True))
    plain = [row._replace(top_k=0, top_p=1.0, min_p=0.0) for row in rows]
    for fast, careful in zip(chosen(plain, False), chosen(plain, True), strict=True):
        assert torch.equal(fast, careful)


@pytest.mark.parametrize("filtered", [False, True])
def test_rows_at_any_stride(filtered: bool) -> None:
    rows = [Row(noise(i), i, 7, 0.5 * i, top_k=9 if filtered else 0) for i in range(4)]
    wide = torch.full((8, V + 13), math.nan, device=DEVICE)
    wide[::2, :V] = torch.stack([row.logits for row in rows]).to(DEVICE)
    apart = gpu_sampling.choose(wide[::2, :V], laws(rows), filtered, BLOCK)
    for one, other in zip(apart, chosen(rows, filtered), strict=True):
        assert torch.equal(one.cpu(), other)
    with pytest.raises(ValueError, match="contiguous"):
        gpu_sampling.choose(wide.T, laws(rows), filtered, BLOCK)


@pytest.mark.skipif(not GPU, reason="only a GPU has graphs")
@pytest.mark.parametrize("size", [1, 3, 130])
def test_a_captured_graph_reads_the_laws_of_the_moment(size: int) -> None:
    rows = [Row(noise(i, size=151_936), i, 7, 0.5 * (i % 3), **FILTERS[i % len(FILTERS)]) for i in range(size)]
    logits, law = torch.stack([row.logits for row in rows]).to(DEVICE), laws(rows)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for filtered in (False, True):
            gpu_sampling.choose(logits, law, filtered)
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fast, careful = gpu_sampling.choose(logits, law, False), gpu_sampling.choose(logits, law, True)
    for _ in range(3):
        law.position.add_(1)
        graph.replay()
        rows = [row._replace(position=row.position + 1) for row in rows]
        plain = [row._replace(top_k=0, top_p=1.0, min_p=0.0) for row in rows]
        assert careful[0].tolist() == [sampling.choose(row.logits, row.seq, []) for row in rows]
        assert fast[0].tolist() == [sampling.choose(row.logits, row.seq, []) for row in plain]
