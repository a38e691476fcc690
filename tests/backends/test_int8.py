"""Eight bits: right, the same bits for a row whatever shares its pass, and kept on disk without blind trust."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from outrider.backends import WHOLE, Part
from outrider.backends.cpu import quantise as quant
from outrider.backends.cpu.int8 import Int8Transformer, TorchPass, TorchProduct, open_int8
from outrider.backends.rows import Rows
from outrider.backends.toy import RandomWeights
from outrider.backends.transformer import Transformer
from outrider.engine.cache import Plane
from outrider.models.config import ModelConfig

from support.native_builds import EQUAL, Use

LENGTH = 64


# ------------------------------------------------------------ tiny models of every family


class Weights(RandomWeights):
    """With biases, norms that are not all one, and a few inputs that are much larger than the others."""

    def has(self, name: str) -> bool:
        if name.endswith(".bias"):
            part = name.split(".")[-2]
            return self.config.o_bias if part == "o_proj" else self.config.qkv_bias and part[1:] == "_proj"
        return super().has(name)

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        draw = torch.Generator().manual_seed(sum(map(ord, name)))
        if name.endswith(".bias"):
            return torch.randn(self._shape(name)[0], generator=draw).to(dtype)
        tensor = super().get(name, torch.float64)
        if tensor.dim() == 1:
            of_heads = name.split(".")[-2] in ("q_norm", "k_norm")
            size = self.config.head_dim if of_heads else tensor.shape[0]
            tensor = 1 + 0.3 * torch.rand(size, generator=draw, dtype=torch.float64)
            tensor[3] *= 1 if of_heads else 10
        return tensor.to(dtype)


def _config(family: str, **changes: object) -> ModelConfig:
    base = ModelConfig(
        architecture=family,
        vocab_size=75,
        hidden_size=44,
        layers=3,
        heads=6,
        kv_heads=2,
        head_dim=10,
        intermediate_size=54,
        norm_eps=1e-6,
        rope_theta=10_000.0,
        context_length=LENGTH,
    )
    return dataclasses.replace(base, rotary_dim=0, **changes)  # type: ignore[arg-type]


FAMILIES = {
    "llama": _config("llama", tied=True),
    "mistral": _config("mistral", sliding_window=5, window_layers=frozenset({1, 2})),
    "qwen2": _config("qwen2", qkv_bias=True, hidden_size=37, heads=4, kv_heads=1, head_dim=8, intermediate_size=33),
    "qwen3": _config("qwen3", qk_norm=True, head_dim=16, tied=True, vocab_size=64),
    "smollm3": _config("smollm3", no_rope_layers=frozenset({1}), qkv_bias=True, o_bias=True, hidden_size=64),
}


def _tensors(config: ModelConfig, seed: int = 1, **shares: int) -> quant.Tensors:
    ids = [i % config.vocab_size for i in range(3, 40, 2)]
    return quant.in_arenas(quant.calibrate(config, Weights(config, seed), ids, quant.Settings(**shares)))


def _plane(config: ModelConfig, slots: int = LENGTH) -> Plane:
    plane = Plane(config.layers, slots, config.kv_heads, config.head_dim, torch.float32, torch.device("cpu"))
    for tensor in (*plane.k, *plane.v):
        tensor.fill_(float("nan"))  # reading a slot that nobody wrote shows
    return plane


def _tokens(config: ModelConfig, n: int) -> Tensor:
    return torch.randint(config.vocab_size, (n,), generator=torch.Generator().manual_seed(n))


def _chain(tokens: Tensor, start: int, stop: int) -> Rows:
    """Positions start..stop-1 of one sequence, in the slots of the same numbers."""
    at = torch.arange(start, stop)
    table = torch.arange(LENGTH, dtype=torch.int32)[None].contiguous()
    line, every = torch.zeros(stop - start, dtype=torch.int32), torch.arange(stop - start)
    return Rows(tokens[start:stop], at, at, line, (at + 1).int(), table, None, every)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)) and not bool(a.isnan().any())


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------ numbers


def _exact(q: quant.Quantised, x: Tensor) -> Tensor:
    """The product of quantised rows with quantised weights, in float64: no rounding but the quantisation itself."""
    highs, lows, scale = quant.quantise_rows(x, q.outliers)
    whole = lows.double()
    whole[:, q.outliers] += 256 * highs.double()
    flat = q.weight.transpose(1, 2).reshape(q.scale.shape[0], -1).double() - 128
    weight = flat[: q.outputs, : q.inputs] * q.scale[: q.outputs, None].double()
    y = (whole * scale[:, None].double()) @ weight.T
    return y if q.bias is None else y + q.bias[: q.outputs].double()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 20), st.integers(4, 150), st.integers(1, 70), st.sampled_from([0, 4, 8, 20]), st.booleans())
def test_a_product_is_what_it_says(rows: int, inputs: int, outputs: int, outliers: int, bias: bool) -> None:
    draw = torch.Generator().manual_seed(inputs * 1000 + outputs)
    weight, x = torch.randn(outputs, inputs, generator=draw), torch.randn(rows, inputs, generator=draw)
    x[:, 1] *= 300
    b = torch.randn(outputs, generator=draw) if bias else None
    q = quant.quantise(weight, b, x.abs().amax(0), outliers)
    y = TorchProduct.of(q)(x)
    assert torch.allclose(y.double(), _exact(q, x), rtol=2e-6, atol=2e-5 * float(x.abs().max()))
    error = (y - F.linear(x, weight, b)).abs().amax(1) / x.norm(dim=1) / weight.norm(dim=1).max()
    assert error.max() < (0.02 if 0 < outliers < inputs else 0.2)


def _alike(ours: Tensor, floats: Tensor) -> None:
    likeness = torch.cosine_similarity(ours, floats, dim=1)  # [T]; attention may tip over in a row of random weights
    assert likeness.median() > 0.99
    assert likeness.quantile(0.1) > 0.9


@pytest.mark.parametrize("family", FAMILIES)
def test_close_to_the_float_model(backend: str, family: str) -> None:
    config = FAMILIES[family]
    rows = _chain(_tokens(config, 30), 0, 30)
    floats = Transformer(config, Weights(config, 1), torch.float32).forward(rows, _plane(config)).logits
    ours = Int8Transformer(config, _tensors(config)).forward(rows, _plane(config)).logits
    assert ours.shape == floats.shape
    _alike(ours, floats)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_agrees_with_torch_and_with_a_simulation(
    backend: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer from the same stream: a whole pass may differ where a number lies between two bytes."""
    if backend == "torch":
        pytest.skip("compared with itself")
    config = FAMILIES[family]
    tensors = _tensors(config)
    model = Int8Transformer(config, tensors)
    rows = _chain(_tokens(config, 24), 0, 24)
    x = model.forward(rows, _plane(config), taps=(0, 1)).hidden
    for run in (TorchPass(model), _simulation(model)):
        for layer in range(config.layers):
            part, begin = Part(layer, layer + 1), None if layer == 0 else x[layer - 1]
            ours = model.forward(rows, _plane(config), part, begin, (layer,))
            theirs = run(rows, _plane(config), part, begin, (layer,))
            for a, b in ((ours.hidden[layer], theirs.hidden[layer]), (ours.logits, theirs.logits)):
                off = (a - b).abs() / b.abs().max()
                assert off.median() < 1e-5
                assert off.max() < 2e-2  # one byte rounded the other way


def _simulation(model: Int8Transformer) -> TorchPass:
    """The torch pass with products in float64."""
    run = TorchPass(model)
    products = {name: quant.product(model.tensors, name, model.config) for name in run.products}

    def product(q: quant.Quantised, gated: bool) -> Callable[[Tensor], Tensor]:
        order = torch.arange(q.outputs)
        if gated:
            order = order.view(-1, 2, quant.HALF).transpose(0, 1).reshape(-1)
        return lambda x: _exact(q, x)[:, order].float()

    run.products = {name: product(q, name.endswith("gate_up")) for name, q in products.items()}  # type: ignore[misc]
    return run


def test_numbers_that_are_none_stay_visible(backend: str) -> None:
    config = FAMILIES["llama"]
    model = Int8Transformer(config, _tensors(config))
    rows, x = _chain(_tokens(config, 3), 0, 3), torch.randn(3, config.hidden_size)
    part = Part(start=config.layers)
    for bad in (float("nan"), float("inf")):
        x[1, 5] = bad
        output = model.forward(rows, _plane(config), part, x)
        assert output.logits[1].isnan().all()
        assert not output.logits[[0, 2]].isnan().any()
        assert not output.highest or [number != number for number in output.highest] == [False, True, False]
    x.zero_()
    assert not model.forward(rows, _plane(config), part, x).logits.isnan().any()


@pytest.mark.parametrize("vocabulary", [30, 2048, 5000])
def test_a_native_pass_finds_each_rows_largest_logit(vocabulary: int) -> None:
    config = _config("llama", vocab_size=vocabulary)
    tensors = _tensors(config)
    tensors["head.scale"][vocabulary // 2 :] *= 0  # ties, and nothing larger behind them
    model, total = Int8Transformer(config, tensors), 9
    if model.native is None:
        pytest.skip("no native kernels here")
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        output = model.forward(_chain(_tokens(config, total), 0, total), _plane(config))
        highest, leaders = output.logits.max(-1)
        assert output.highest == highest.tolist()
        assert output.leaders == leaders.tolist()
    output = model.forward(_chain(_tokens(config, total), 0, total), _plane(config), Part(head=False))
    assert output.highest == output.leaders == []


# ------------------------------------------------------------ the same bits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_ignores_its_neighbours(backend: str, family: str) -> None:
    config, total = FAMILIES[family], 12 if backend == "torch" else 40
    model, tokens = Int8Transformer(config, _tensors(config)), _tokens(config, total)
    plane = _plane(config)
    alone = torch.cat([model.forward(_chain(tokens, t, t + 1), plane).logits for t in range(total)])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for size in range(1, total + 1) if threads == 2 else (3, total):
            plane = _plane(config)
            chunks = [_chain(tokens, t, min(t + size, total)) for t in range(0, total, size)]
            assert _same(torch.cat([model.forward(rows, plane).logits for rows in chunks]), alone), (threads, size)


@pytest.mark.parametrize("backend_name", EQUAL)
@pytest.mark.parametrize("family", FAMILIES)
def test_avx2_and_avx512_agree_in_every_logit(
    use_avx512: Callable[[], None], use_backend: Use, backend_name: str, family: str
) -> None:
    """The whole decoder, in passes of one and of several rows."""
    use_avx512()
    config = FAMILIES[family]
    tensors, tokens = _tensors(config), _tokens(config, 30)

    def logits() -> Tensor:
        model, plane = Int8Transformer(config, tensors), _plane(config)
        passes = [_chain(tokens, start, stop) for start, stop in ((0, 17), (17, 18), (18, 26), (26, 30))]
        return torch.cat([model.forward(rows, plane).logits for rows in passes])

    expected = logits()
    use_backend(backend_name)
    assert _same(logits(), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_c_agrees_in_every_product(use_avx512: Callable[[], None], use_backend: Use, family: str) -> None:
    """Its vectors are shorter, so that sums of floats may differ in the last bit (native/vectors.h). Products may not,
    for equal inputs: the squares of these have one sum in every order, so their norms are equal."""
    use_avx512()
    config = FAMILIES[family]
    tensors, rows, part = _tensors(config), _chain(_tokens(config, 9), 0, 9), Part(start=config.layers)
    x = torch.randint(2, (9, config.hidden_size), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    expected = Int8Transformer(config, tensors).forward(rows, _plane(config), part, x).logits
    use_backend("narrowest")
    assert _same(Int8Transformer(config, tensors).forward(rows, _plane(config), part, x).logits, expected)


def test_a_drafted_row_is_the_row_that_plain_decoding_runs(backend: str) -> None:
    config = FAMILIES["qwen3"]
    model, tokens = Int8Transformer(config, _tensors(config)), _tokens(config, 14)
    plain = model.forward(_chain(tokens, 0, 14), _plane(config)).logits
    plane = _plane(config)
    model.forward(_chain(tokens, 0, 10), plane)
    # Nodes 0..3 are the text itself in slots 40.., nodes 4..5 another branch after node 0 in slots 50..
    chain, slots = list(range(40, 44)), [40, 41, 42, 43, 50, 51]
    tails = [chain[:1], chain[:2], chain[:3], chain, [40, 50], [40, 50, 51]]
    ancestors = torch.tensor([tail + [-1] * (4 - len(tail)) for tail in tails], dtype=torch.int32)
    positions = torch.tensor([9 + len(tail) for tail in tails])
    other = (tokens[11:13] + 1) % config.vocab_size
    rows = Rows(
        torch.cat([tokens[10:14], other]),
        positions,
        torch.tensor(slots),
        torch.zeros(6, dtype=torch.int32),
        torch.full((6,), 10, dtype=torch.int32),
        torch.arange(LENGTH, dtype=torch.int32)[None].contiguous(),
        ancestors,
        torch.tensor([3, 0, 1, 2]),
    )
    torch.set_num_threads(2)
    assert _same(model.forward(rows, plane).logits, plain[[13, 10, 11, 12]])


def test_parts_taps_and_resuming(backend: str) -> None:
    config = FAMILIES["smollm3"]
    model, rows = Int8Transformer(config, _tensors(config)), _chain(_tokens(config, 9), 0, 9)
    whole = model.forward(rows, _plane(config), taps=(0, 2))
    plane = _plane(config)
    first = model.forward(rows, plane, Part(stop=1, head=False), taps=(0, 2))
    assert list(first.hidden) == [0]
    assert first.logits.numel() == 0
    rest = model.forward(rows, plane, Part(start=1), x=first.hidden[0], taps=(2,))
    assert _same(first.hidden[0], whole.hidden[0])
    assert _same(rest.logits, whole.logits)
    assert _same(rest.hidden[2], whole.hidden[2])
    few = dataclasses.replace(rows, want=torch.tensor([8, 2]))
    assert _same(model.forward(few, _plane(config)).logits, whole.logits[[8, 2]])
    assert model.forward(dataclasses.replace(rows, want=few.want[:0]), _plane(config)).logits.shape == (0, 75)


@pytest.mark.parametrize("skip", ["attention", "mlp", "both"])
def test_skipping_is_what_transformer_does(backend: str, skip: str) -> None:
    config = FAMILIES["llama"]
    skips = frozenset({1}) if skip != "both" else frozenset({0, 1})
    attention, mlp = skips if skip != "mlp" else frozenset(), skips if skip != "attention" else frozenset()
    part, rows = Part(skip_attention=attention, skip_mlp=mlp), _chain(_tokens(config, 9), 0, 9)
    ours_plane, plane = _plane(config), _plane(config)
    ours = Int8Transformer(config, _tensors(config)).forward(rows, ours_plane, part).logits
    floats = Transformer(config, Weights(config, 1), torch.float32).forward(rows, plane, part).logits
    _alike(ours, floats)
    for i in range(config.layers):
        assert bool(ours_plane.k[i].isnan().all()) == bool(plane.k[i].isnan().all()) == (i in attention)


def test_what_is_out_of_range_is_an_error() -> None:
    config = FAMILIES["llama"]
    model, rows = Int8Transformer(config, _tensors(config)), _chain(_tokens(config, 4), 0, 4)
    for field in ("tokens", "positions", "slots", "want"):
        for bad in (-LENGTH * 9, 10**6):
            wrong = getattr(rows, field).clone()
            wrong[2] = bad
            with pytest.raises(IndexError):
                model.forward(dataclasses.replace(rows, **{field: wrong}), _plane(config))


# ------------------------------------------------------------ on disk


def _equal(a: quant.Tensors, b: quant.Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_was_made_is_used_again_and_what_was_damaged_is_not(tmp_path: Path) -> None:
    config, builds = FAMILIES["qwen2"], []

    def build() -> quant.NamedTensors:
        builds.append(1)
        return quant.calibrate(config, Weights(config, 1), [1, 2, 3])

    first = quant.stored("name", build, tmp_path).tensors
    assert _equal(quant.stored("name", build, tmp_path).tensors, first)
    assert len(builds) == 1
    (path,) = tmp_path.glob("*.weights")
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-100] ^= 64
    for bad in (good[:-50], b"", good[:6], bytes(flipped), b"x" * 100):
        path.write_bytes(bad)
        before = len(builds)
        assert _equal(quant.stored("name", build, tmp_path).tensors, first)
        assert len(builds) == before + 1
    assert path.read_bytes() == good
    assert not list(tmp_path.glob("*.part"))


def test_no_place_to_keep_it_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = FAMILIES["llama"]
    tensors, trouble = quant.stored("name", _tensors(config).items, tmp_path / "file" / "int8")
    assert _equal(tensors, _tensors(config))
    assert str(tmp_path) in trouble


def test_identity_follows_files_and_settings(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    config = FAMILIES["mistral"]
    names = {quant.identity(file, config), quant.identity(file, config, quant.Settings(down=0))}
    names.add(quant.identity(file, FAMILIES["qwen2"]))
    file.write_bytes(b"three")
    names.add(quant.identity(file, config))
    assert len(names) == 4
    assert quant.identity(file, config) == quant.identity(file, dataclasses.replace(config))


# ------------------------------------------------------------ the real model


@pytest.mark.slow
@pytest.mark.real
def test_perplexity_of_the_default_model() -> None:
    from outrider.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint()
    ids = checkpoint.tokenizer.encode((Path(__file__).parents[2] / "LICENSE").read_text())[:384]

    def perplexity(model: Transformer | Int8Transformer) -> float:
        n, c = len(ids), checkpoint.config
        plane = Plane(c.layers, n, c.kv_heads, c.head_dim, torch.float32, torch.device("cpu"))
        at = torch.arange(n)
        line, table = torch.zeros(n, dtype=torch.int32), at[None].int().contiguous()
        rows = Rows(torch.tensor(ids), at, at, line, (at + 1).int(), table, None, at)
        return math.exp(F.cross_entropy(model.forward(rows, plane, WHOLE).logits[:-1], rows.tokens[1:]))

    ours = open_int8(checkpoint, 512)
    floats = perplexity(Transformer(checkpoint.config, checkpoint.weights, torch.bfloat16, length=512))
    assert perplexity(ours) < 1.015 * floats
