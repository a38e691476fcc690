"""The small operations are right, and a row's bits do not depend on its neighbours or on the number of threads."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from outrider.backends import linear as linear_module, machine, ops
from outrider.backends.rows import Rows
from outrider.models.config import CLAMPED, ERF_GELU, RELU, SILU

from support.native_builds import Use

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
SHAPES = [(9, 3, 64), (12, 2, 128), (32, 8, 64), (4, 4, 32), (3, 1, 80), (6, 2, 36), (50, 1, 64), (2, 2, 256)]


# ------------------------------------------------------------ what the tests share


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take most of a test's time: only some tests want several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


class Case:
    """Rows over a few lines, with planes whose unused slots are NaN: reading one of them shows."""

    def __init__(
        self,
        lengths: list[int],
        rows: list[tuple[int, int, int]],
        shape: tuple[int, int, int],
        dtype: torch.dtype = F32,
    ) -> None:
        """lengths: of the lines; rows: (line, context, number of ancestors)."""
        (self.heads, self.kv_heads, d), deepest = shape, max(own for _, _, own in rows)
        slots = sum(lengths) + sum(own for _, _, own in rows) + 5
        shuffled = torch.randperm(slots, generator=torch.Generator().manual_seed(7)).tolist()
        table = torch.full((len(lengths), max(lengths)), shuffled.pop(), dtype=torch.int32)
        for line, length in enumerate(lengths):
            table[line, :length] = torch.tensor([shuffled.pop() for _ in range(length)], dtype=torch.int32)
        self.lists: list[list[int]] = []  # [T] the keys of each row
        ancestors = torch.full((len(rows), deepest + 1), -1, dtype=torch.int32)
        for t, (line, context, own) in enumerate(rows):
            drafted = [shuffled.pop() for _ in range(own)]
            ancestors[t, :own] = torch.tensor(drafted, dtype=torch.int32)
            self.lists.append(table[line, :context].tolist() + drafted)
        used = sorted({slot for keys in self.lists for slot in keys})
        self.k, self.v = (torch.full((slots, self.kv_heads, d), float("nan"), dtype=dtype) for _ in range(2))
        self.k[used] = _random(len(used), self.kv_heads, d, seed=1, dtype=dtype)
        self.v[used] = _random(len(used), self.kv_heads, d, seed=2, dtype=dtype)
        self.q = _random(len(rows), self.heads, d, seed=3, dtype=dtype)
        self.lines = torch.tensor([line for line, _, _ in rows])
        self.context = torch.tensor([context for _, context, _ in rows])
        self.table, self.ancestors = table, ancestors if deepest else None

    def run(
        self, pick: list[int] | None = None, dtype: torch.dtype = F32, window: int = 0, cap: float = 0.0,
        sinks: Tensor | None = None, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        pick = list(range(len(self.lists))) if pick is None else pick
        none = torch.zeros(0, dtype=torch.long)
        ancestors = None if self.ancestors is None else self.ancestors[pick]
        rows = Rows(none, none, none, self.lines[pick], self.context[pick], self.table, ancestors, none)
        added = None if bias is None else (bias, torch.tensor([len(self.lists[t]) - 1 for t in pick]))
        scale = self.q.shape[-1] ** -0.5
        return ops.attend(self.q[pick], self.k, self.v, rows, scale, dtype, window, cap, sinks, added)

    def reference(
        self, window: int = 0, cap: float = 0.0, sinks: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        out = []
        for q, keys in zip(self.q.double(), self.lists, strict=True):
            keys = keys[-window:] if window else keys
            k, v = (x[keys].double().repeat_interleave(self.heads // self.kv_heads, 1) for x in (self.k, self.v))
            scores = torch.einsum("hd,nhd->hn", q, k).mul(q.shape[-1] ** -0.5)
            scores = cap * (scores / cap).tanh() if cap else scores
            scores = scores if bias is None else scores + bias.double()[:, : len(keys)].flip(1)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            p = scores.softmax(-1)[:, : len(keys)]
            out.append(torch.einsum("hn,nhd->hd", p, v).flatten())
        return torch.stack(out)


def _mixed(shape: tuple[int, int, int], count: int, dtype: torch.dtype = F32) -> Case:
    """Pending rows of a prompt, drafted nodes of a second line, single rows of a third; some lists outgrow a block."""
    prompt = [(0, 250 + i, 0) for i in range(count // 2)]
    nodes = [(1, 40, i % 4) for i in range(count // 4)]
    rest = [(2, 1 + 37 * i, 0) for i in range(count - len(prompt) - len(nodes))]
    lengths = [max((context for line, context, _ in prompt + nodes + rest if line == i), default=1) for i in range(3)]
    return Case(lengths, prompt + nodes + rest, shape, dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    whole = torch.int16 if a.dtype is BF16 else torch.int32
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole)) and not bool(torch.isnan(a).any())


# ------------------------------------------------------------ planes of 16 bits


@pytest.mark.parametrize("shape", [(9, 3, 64), (12, 2, 128), (3, 1, 80), (6, 2, 36)], ids=str)
@pytest.mark.parametrize("window", [0, 30])
def test_planes_of_16_bits_change_storage_only(backend: str, shape: tuple[int, int, int], window: int) -> None:
    """The same bits as with planes of 32 bits that hold the same numbers: so all else is proved for both."""
    if backend == "torch":
        pytest.skip("torch rounds q as well")
    case = _mixed(shape, 24)
    case.k, case.v = case.k.half(), case.v.half()
    small = case.run(window=window)
    case.k, case.v = case.k.float(), case.v.float()
    assert _same(small, case.run(window=window))


def test_every_number_of_16_bits_is_read_and_written(backend: str) -> None:
    """Reading: all finite patterns. Writing: to nearest, ties to even; what is too large becomes the largest."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = patterns.where(patterns.isfinite(), 0).view(1024, 1, 64)  # [S, 1, d]
    none, each = torch.zeros(0, dtype=torch.long), torch.arange(1024)
    rows = Rows(none, none, none, each, torch.ones(1024).long(), each[:, None].int().contiguous(), None, none)
    q = torch.zeros(1024, 1, 64, dtype=F32 if backend != "torch" else torch.float16)
    read = ops.attend(q, torch.zeros_like(values), values, rows, 1.0, F32)
    assert torch.equal(read, values.float().view(1024, 64))
    halfway = values.float() + (values.float() - values.float().roll(1, 2)) / 2  # ties, and numbers in between
    noise = _random(1024, 1, 64, seed=5) * torch.logspace(-9, 5, 64)
    k, v = (torch.empty(1024, 1, 64, dtype=torch.float16) for _ in range(2))
    flat = torch.cat([torch.zeros(1024, 64), halfway.view(1024, 64), noise.view(1024, 64)], 1)
    flat[5, 70], flat[5, 150] = float("nan"), float("nan")
    ops.rope_store(flat, torch.zeros(1024, 0), torch.zeros(1024, 0), k, v, each, 1, 1)
    for written, wanted in ((k, halfway), (v, noise)):
        limit = wanted.clamp(-65504, 65504) if backend != "torch" else wanted
        wanted = limit.half()
        different = written.view(torch.int16) != wanted.view(torch.int16)
        different[5] = False
        assert not different.any()
    assert k[5, 0, 6].isnan()
    assert v[5, 0, 22].isnan()


# ------------------------------------------------------------ attention


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, torch.float16], ids=str)
def test_attend_has_the_same_bits_with_avx2_and_avx512(
    use_avx512: Callable[[], None], use_backend: Use, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Registers of 512 bits hold two vectors: keys in pairs, values in pairs, one row and many."""
    use_avx512()
    case = _mixed(shape, 24)
    case.k, case.v = case.k.to(dtype), case.v.to(dtype)

    def results() -> list[Tensor]:
        single = [case.run([t]) for t in (0, 12, 18)]
        return [*single, case.run(), case.run(window=30), case.run(cap=2.0)]

    wide = results()
    use_backend("narrow")
    assert all(_same(a, b) for a, b in zip(wide, results(), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [0, 30])
def test_attend_is_right(backend: str, shape: tuple[int, int, int], window: int) -> None:
    case = _mixed(shape, 24)
    expected = case.reference(window)
    assert (case.run(window=window).double() - expected).abs().max() < 2e-6
    assert (case.run(dtype=BF16, window=window).double() - expected).abs().max() < 2e-2


@pytest.mark.parametrize(("cap", "sunk"), [(1.5, False), (0.0, True), (0.7, True)])
def test_limited_scores_and_sinks(backend: str, cap: float, sunk: bool) -> None:
    """Right, and the same alone, among many and in every division of the work."""
    shape, count = (6, 2, 36), 12
    case, sinks = _mixed(shape, count), torch.linspace(-2, 3, 6) if sunk else None
    out = case.run(window=100, cap=cap, sinks=sinks)
    assert (out.double() - case.reference(100, cap, sinks)).abs().max() < 3e-6
    for threads in (1, 3):
        torch.set_num_threads(threads)
        alone = torch.cat([case.run([t], window=100, cap=cap, sinks=sinks) for t in range(count)])
        assert _same(alone, out)


@pytest.mark.parametrize("window", [0, 100])
def test_distances_change_scores(backend: str, window: int) -> None:
    """Right for pending rows and drafted nodes, in several blocks of keys, and the same alone and among many."""
    count = 12
    case, bias = _mixed((6, 2, 36), count), _random(6, 300, seed=9)
    out = case.run(window=window, bias=bias)
    assert (out.double() - case.reference(window, bias=bias)).abs().max() < 3e-6
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert _same(torch.cat([case.run([t], window=window, bias=bias) for t in range(count)]), out)


@pytest.mark.parametrize(("shape", "window"), [((9, 3, 64), 0), ((6, 2, 36), 100)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_attend_of_a_row_ignores_its_neighbours(
    backend: str, shape: tuple[int, int, int], window: int, dtype: torch.dtype
) -> None:
    total = 12 if backend == "torch" else 40
    case = _mixed(shape, total)
    alone = torch.cat([case.run([t], dtype, window) for t in range(total)])
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (total,) if backend == "torch" else range(1, total + 1):
            assert _same(case.run(list(range(count)), dtype, window), alone[:count])
        assert _same(case.run(shuffled, dtype, window), alone[shuffled])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attend_is_the_same_in_every_division_of_the_work(shape: tuple[int, int, int], use_backend: Use) -> None:
    use_backend("tuned")
    case = Case([1500], [(0, 1100 + i, 0) for i in range(100)], shape)  # several blocks; tiles with ragged ends
    expected = case.run()
    for threads, pick in [(2, range(100)), (3, range(100)), (2, [70]), (3, range(20, 23)), (7, range(5, 50))]:
        torch.set_num_threads(threads)
        assert _same(case.run(list(pick)), expected[list(pick)])


def test_a_drafted_row_equals_the_committed_one(backend: str) -> None:
    """The same keys, once as ancestors and once in the table: acceptance must not change a bit."""
    drafted = Case([700], [(0, 500, own) for own in range(0, 40, 13)], (9, 3, 64))
    for t, keys in enumerate(drafted.lists):
        none, line = torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        table = torch.tensor([keys], dtype=torch.int32)
        rows = Rows(none, none, none, line, torch.tensor([len(keys)]), table, None, none)
        committed = ops.attend(drafted.q[t : t + 1], drafted.k, drafted.v, rows, 0.125, F32)
        assert _same(committed, drafted.run()[t : t + 1])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_attend_on_random_rows(data: st.DataObject, use_backend: Use) -> None:
    use_backend("tuned")
    group, kv_heads, d = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 3), st.sampled_from([4, 16, 40, 64])))
    lengths = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=3))
    rows = []
    for _ in range(data.draw(st.integers(1, 12))):
        line = data.draw(st.integers(0, len(lengths) - 1))
        rows.append((line, data.draw(st.integers(1, lengths[line])), data.draw(st.integers(0, 5))))
    case = Case(lengths, rows, (group * kv_heads, kv_heads, d))
    window = data.draw(st.sampled_from([0, 1, 16, 300]))
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    together = case.run(window=window)
    assert (together.double() - case.reference(window)).abs().max() < 3e-6
    assert _same(torch.cat([case.run([t], window=window) for t in range(len(rows))]), together)


def test_attend_survives_extreme_scores(backend: str) -> None:
    case = _mixed((4, 2, 64), 16)
    case.q *= 200  # scores of hundreds: most weights are exactly zero
    assert (case.run().double() - case.reference()).abs().max() < 1e-4


def test_attend_passes_nan_on_to_its_own_row_only(backend: str) -> None:
    case = _mixed((4, 2, 64), 16)
    before = case.run()
    case.q[3, 1, 5] = float("nan")
    after = case.run()
    assert torch.isnan(after[3, 64:128]).all()
    others = [t for t in range(16) if t != 3]
    assert _same(after[others], before[others])


def test_attend_does_not_depend_on_a_threads_mode(backend: str) -> None:
    """Threads that flush denormals compute what the others do."""
    case = _mixed((9, 3, 64), 20)
    case.v *= 1e-38
    torch.set_num_threads(2)
    expected = case.run()
    torch.set_flush_denormal(True)
    try:
        same = backend == "torch" or _same(case.run(), expected)
    finally:
        torch.set_flush_denormal(False)
    assert same


def test_attend_in_float64_falls_back(backend: str) -> None:
    case = _mixed((6, 2, 64), 12, F64)
    assert (case.run(dtype=F64) - case.reference()).abs().max() < 1e-13


# ------------------------------------------------------------ norm, activation, rope


def _norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("width", [576, 1536, 50, 7])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_add_norm(backend: str, width: int, dtype: torch.dtype) -> None:
    x, delta, weight = _random(40, width), _random(40, width, seed=1, dtype=dtype), _random(width, seed=2)
    total = x + delta
    expected = _norm_reference(total, weight, 1e-5)
    together = x.clone()
    out = ops.add_norm(together, delta, weight, 1e-5, dtype)
    assert out.dtype is dtype
    assert torch.equal(together, total)
    assert (out.double() - expected).abs().max() < (1e-5 if dtype is F32 else 4e-2)
    assert _same(ops.add_norm(together, None, weight, 1e-5, dtype), out)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (1, 2, 17, 40):
            assert _same(ops.add_norm(x[:count].clone(), delta[:count], weight, 1e-5, dtype), out[:count])
            assert _same(ops.add_norm(x[-count:].clone(), delta[-count:], weight, 1e-5, dtype), out[-count:])


def test_add_norm_updates_a_view(backend: str) -> None:
    wide, weight = _random(5, 200), torch.ones(100)
    expected = wide[:, :100] + 1
    ops.add_norm(wide[:, :100], torch.ones(5, 100), weight, 1e-5, F32)
    assert torch.equal(wide[:, :100], expected)


def test_add_norm_in_float64(backend: str) -> None:
    x, weight = _random(3, 64, dtype=F64), _random(64, seed=1, dtype=F64)
    assert (ops.add_norm(x, None, weight, 1e-6, F64) - _norm_reference(x, weight, 1e-6)).abs().max() < 1e-14


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [576, 100, 3, 20_000])
def test_layer_norm(backend: str, width: int, dtype: torch.dtype) -> None:
    x, delta, weight = _random(9, width) + 3, _random(9, width, seed=1), _random(2, width, seed=2)
    wanted = torch.nn.functional.layer_norm((x + delta).double(), (width,), *weight.double(), 1e-5)
    out = ops.add_norm(stream := x.clone(), delta, weight, 1e-5, dtype)
    assert torch.equal(stream, x + delta)
    assert (out.double() - wanted).abs().max() < (1e-5 if dtype is F32 else 4e-2)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 4):
            assert _same(ops.add_norm(x[:count].clone(), delta[:count], weight, 1e-5, dtype), out[:count])


@pytest.mark.parametrize("activation", [activation for activation in ops.ACTIVATIONS if activation != CLAMPED])
def test_activations_without_a_gate(backend: str, activation: str) -> None:
    x = _random(5, 200) * 4
    out = ops.gate_mul(x, activation, paired=False)
    assert _same(out, ops.gate_mul(torch.cat([x, torch.ones_like(x)], 1), activation))
    for t in range(5):
        assert _same(ops.gate_mul(x[t : t + 1], activation, paired=False), out[t : t + 1])


@pytest.mark.parametrize("width", [1536, 100, 3])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_gate_mul(backend: str, width: int, dtype: torch.dtype, activation: str) -> None:
    gate_up = _random(40, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, 1)
    out = ops.gate_mul(gate_up, activation)
    assert out.dtype is dtype
    wanted = gate * gate.sigmoid() if activation == SILU else torch.nn.functional.gelu(gate, approximate="tanh")
    if activation in (RELU, ERF_GELU):
        wanted = gate.relu() if activation == RELU else torch.nn.functional.gelu(gate)
    if activation == CLAMPED:
        gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
        wanted = gate * (1.702 * gate).sigmoid()
    assert torch.allclose(out.double(), wanted * up, rtol=4e-6 if dtype is F32 else 8e-3, atol=2e-7)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (1, 2, 17, 40):
            assert _same(ops.gate_mul(gate_up[:count], activation), out[:count])
            assert _same(ops.gate_mul(gate_up[-count:], activation), out[-count:])


def test_logits_are_limited_row_by_row() -> None:
    logits = _random(7, 40_003) * 20
    out = ops.soft_cap(logits, 5.0)
    assert torch.allclose(out.double(), 5 * (logits.double() / 5).tanh(), atol=1e-6)
    for count in (1, 2, 5):
        assert _same(ops.soft_cap(logits[:count], 5.0), out[:count])


def test_gate_mul_over_the_whole_range(backend: str) -> None:
    gate = torch.cat([torch.linspace(-87, 90, 20001), torch.tensor([-1e4, -100.0, 0.0, 1e4])])
    out = ops.gate_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0].double()
    expected = gate.double() * gate.double().sigmoid()
    assert ((out - expected).abs() <= 6e-7 * expected.abs() + 1e-37).all()


@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 2, 80), (3, 1, 36)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("turning", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_store(
    backend: str, shape: tuple[int, int, int], dtype: torch.dtype, turning: float, normed: bool
) -> None:
    (heads, kv_heads, d), stream = shape, F64 if dtype is F64 else F32
    count, half = 30, int(d * turning) // 2
    qkv = _random(count, (heads + 2 * kv_heads) * d, dtype=dtype)
    angles = _random(count, half, seed=1, dtype=stream)
    slots = torch.randperm(50, generator=torch.Generator().manual_seed(0))[:count]
    norms = (_random(d, seed=2, dtype=stream), _random(d, seed=3, dtype=stream), 1e-6) if normed else None

    def run(pick: slice) -> tuple[Tensor, Tensor, Tensor]:
        k, v = torch.zeros(50, kv_heads, d, dtype=stream), torch.zeros(50, kv_heads, d, dtype=stream)
        cos, sin = angles.cos()[pick], angles.sin()[pick]
        q = ops.rope_store(qkv[pick], cos, sin, k, v, slots[pick], heads, kv_heads, norms)
        assert int((v.flatten(1) != 0).any(1).sum()) == len(slots[pick])  # nothing else is written
        return q, k[slots[pick]], v[slots[pick]]

    q, k, v = run(slice(None))
    x = qkv.double().reshape(count, -1, d)
    assert (q.shape, q.dtype) == ((count, heads, d), stream)
    assert torch.equal(v.double(), x[:, heads + kv_heads :])
    weights = (norms[0], norms[1]) if norms else (None, None)
    for got, expected, weight in ((q, x[:, :heads], weights[0]), (k, x[:, heads : heads + kv_heads], weights[1])):
        expected = expected if weight is None else _norm_reference(expected, weight, 1e-6)
        cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
        first, second = expected[..., :half], expected[..., half : 2 * half]
        turned = [first * cos - second * sin, second * cos + first * sin, expected[..., 2 * half :]]
        assert (got.double() - torch.cat(turned, -1)).abs().max() < 3e-6
    if dtype is not F64:
        for threads, pick in [(1, slice(0, 1)), (2, slice(7, 9)), (3, slice(13, 30)), (2, slice(29, 30))]:
            torch.set_num_threads(threads)
            assert all(_same(part, whole[pick]) for part, whole in zip(run(pick), (q, k, v), strict=True))


def test_no_rows_at_all(backend: str) -> None:
    none, k = torch.zeros(0, dtype=torch.long), torch.zeros(4, 1, 8)
    rows = Rows(none, none, none, none, none, torch.zeros(1, 4, dtype=torch.int32), None, none)
    assert ops.attend(torch.zeros(0, 2, 8), k, k, rows, 1.0, F32).shape == (0, 16)
    assert ops.gate_mul(torch.zeros(0, 8)).shape == (0, 4)
    assert ops.add_norm(torch.zeros(0, 8), None, torch.ones(8), 1e-5, F32).shape == (0, 8)
    assert ops.rope_store(torch.zeros(0, 32), torch.zeros(0, 4), torch.zeros(0, 4), k, k, none, 2, 1).shape == (0, 2, 8)


@pytest.mark.parametrize("width", [1, 5, 16, 48, 49152, 151_937])
def test_top_is_the_first_largest(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(-9, 9, (5, width), generator=generator).float()  # many ties
    highest, place = ops.top(logits)
    for row in range(5):
        best = logits[row].max()
        assert highest[row] == best
        assert int(place[row]) == int((logits[row] == best).nonzero()[0])


def test_top_of_a_row_with_nan_is_nan() -> None:
    logits = torch.randn(4, 100)
    logits[1, 37] = logits[2, 99] = math.nan
    logits[3] = -math.inf
    highest, place = ops.top(logits)
    assert highest.isnan().tolist() == [False, True, True, False]
    assert int(place[3]) == 0


# ------------------------------------------------------------ products


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 36), (7, 3), (300, 2050), (16, 1)])
def test_products_of_any_number_of_rows(
    backend: str, dtype: torch.dtype, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right, with and without a bias; the same bits for every number of rows, threads and outputs."""
    if backend == "torch":
        pytest.skip("oneDNN's products are in test_transformer.py")
    monkeypatch.setattr(linear_module, "packs", lambda weight: False)  # else oneDNN has bfloat16 on some processors
    shapes = ((outputs, inputs), (outputs,), (33, inputs))
    weight, bias, x = (_random(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    for added in (None, bias):
        product = linear_module.linear(weight, added)
        assert isinstance(product, linear_module.NativeLinear)
        assert product.exact
        whole = product(x)
        assert whole.dtype is dtype
        wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
        near = 1e-5 if dtype is F32 else 1e-2
        assert torch.allclose(whole.double(), wanted, rtol=near, atol=near * inputs**0.5)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for count in (1, 2, 3, 5, 6, 7, 13, 25, 32):
                assert _same(product(x[:count]), whole[:count])
                assert _same(product(x[-count:]), whole[-count:])
            assert _same(product.first(x, outputs // 2 + 1), whole[:, : outputs // 2 + 1])


EXACT_ROWS = """
import torch
from outrider.backends.linear import linear

random = torch.Generator().manual_seed(3)
for outputs, inputs in ((960, 576), (576, 1536), (2048, 1536)):
    weight, x = (torch.randn(n, inputs, generator=random).bfloat16() for n in (outputs, 160))
    product = linear(weight)
    assert product.exact
    whole = product(x)
    for count in (1, 2, 4, 15, 16, 31, 33, 48, 64, 65, 100):
        assert torch.equal(product(x[:count]), whole[:count]), (outputs, inputs, count)
print(type(product).__name__)
"""


@pytest.mark.parametrize("isa", ["", "DEFAULT"])
def test_large_products_in_bfloat16_are_exact_whatever_the_processor_has(isa: str) -> None:
    """With AMX oneDNN gave a row other bits from 33 rows on, and batches gave other texts than plain decoding."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported() and ops._kernels() is None:
        pytest.skip("there are no exact products in bfloat16 on this machine")
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    environment |= {"ONEDNN_MAX_CPU_ISA": isa} if isa else {}
    before = "" if isa else "from outrider.backends.machine import prepare\nprepare()\n"
    command = [sys.executable, "-c", before + EXACT_ROWS]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode != -signal.SIGILL or isa, "oneDNN used an instruction that faults here"
    if child.returncode != -signal.SIGILL:  # the user has asked for AMX on a machine where it faults
        assert child.returncode == 0, child.stderr
        assert isa or "amx_tile" not in machine.cpu_flags() or child.stdout.strip() == "Linear"


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 40), st.integers(1, 30), st.integers(0, 3))
def test_products_of_any_shape(outputs: int, inputs: int, rows: int, seed: int) -> None:
    weight, x = _random(outputs, inputs, seed=seed), _random(rows, inputs, seed=seed + 9)
    product = linear_module.linear(weight)
    assert torch.allclose(product(x).double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    assert _same(product(x[rows // 2 :]), product(x)[rows // 2 :]) or not product.exact


def test_a_product_with_minus_infinity_in_its_bias(backend: str) -> None:
    """So banned tokens are never chosen."""
    bias = torch.tensor([0.0, -torch.inf, 1.0])
    out = linear_module.linear(_random(3, 8), bias)(_random(2, 8, seed=1))
    assert out.isneginf().tolist() == [[False, True, False]] * 2
