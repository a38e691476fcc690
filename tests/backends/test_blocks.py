"""A GGUF file's own blocks: repacked without loss, right, and the same bits for a row whatever shares its pass."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from outrider.backends import Part, ops
from outrider.backends.cpu import blocks, native, quantise as quant
from outrider.backends.cpu.blocks import KINDS, BlockTransformer, repack
from outrider.backends.loaded_weights import output_product, output_rows
from outrider.backends.rows import Rows
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.engine.cache import Plane
from outrider.errors import ModelError
from outrider.llm import build_engine
from outrider.models.config import ModelConfig
from outrider.types import SamplingParams, Sequence

from support.native_builds import BUILDS, COMPILER, EQUAL, Use
from support.product_program import EMULATED, block_problem, build, int8_problem, run
from support.random_blocks import RandomBlocks, StoredEmbedding, block_config, floats, random_blocks

LENGTH = 64
MODELS = {
    "small": (block_config(96, tied=True), ("Q4_0", "Q4_1", "Q8_0")),
    "super": (block_config(256, qkv_bias=True), ("Q4_K", "Q5_K", "Q6_K")),
    "q8": (block_config(64, qk_norm=True, architecture="qwen3"), ("Q8_0",)),
}
NATIVE = [pytest.param(name, marks=[] if COMPILER else pytest.mark.skip(reason="no C compiler")) for name in BUILDS]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _model(name: str) -> BlockTransformer:
    config, kinds = MODELS[name]
    weights = RandomBlocks(config, *kinds)
    assert not blocks.reason_against(weights, config)
    return BlockTransformer(config, weights, blocks.repacked(config, weights))


def _plane(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Plane:
    plane = Plane(config.layers, LENGTH, config.kv_heads, config.head_dim, dtype, torch.device("cpu"))
    for tensor in (*plane.k, *plane.v):
        tensor.fill_(float("nan"))  # reading a slot that nobody wrote shows
    return plane


def _chain(tokens: Tensor, start: int, stop: int) -> Rows:
    """Positions start..stop-1 of one sequence, in the slots of the same numbers."""
    at = torch.arange(start, stop)
    table = torch.arange(LENGTH, dtype=torch.int32)[None].contiguous()
    return Rows(tokens[start:stop], at, at, torch.zeros(stop - start).int(), (at + 1).int(), table, None, at - start)


def _tokens(config: ModelConfig, n: int) -> Tensor:
    return torch.randint(config.vocab_size, (n,), generator=torch.Generator().manual_seed(n))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)) and not bool(a.isnan().any())


# ------------------------------------------------------------ numbers


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@needs_compiler
def test_no_bit_is_lost(use_backend: Use, kind: str) -> None:
    """Every weight, read back from its piece, is the float that the `gguf` package reads from the file."""
    use_backend("tuned")
    config = block_config(256, tied=True)
    weights = RandomBlocks(config, kind)
    model = BlockTransformer(config, weights, blocks.repacked(config, weights))
    tokens = torch.arange(config.vocab_size)[:LENGTH]
    both = frozenset({0})
    part = Part(stop=1, skip_attention=both, skip_mlp=both, head=False)
    read = model.forward(_chain(tokens, 0, LENGTH), _plane(config), part, taps=(0,)).hidden[0]
    assert torch.equal(read, weights.get("embed_tokens.weight", torch.float32)[:LENGTH])


@pytest.mark.parametrize("kind", blocks.STORED)
@needs_compiler
def test_rows_of_an_embedding_that_stays_in_its_file(use_backend: Use, kind: str) -> None:
    """The floats that the `gguf` package reads, without a copy of the embedding in memory."""
    use_backend("tuned")
    config = block_config(256)
    weights = StoredEmbedding(config, kind)
    model = BlockTransformer(config, weights, blocks.repacked(config, weights))
    tokens, both = torch.arange(config.vocab_size)[-LENGTH:], frozenset({0})
    part = Part(stop=1, skip_attention=both, skip_mlp=both, head=False)
    read = model.forward(_chain(tokens, 0, LENGTH), _plane(config), part, taps=(0,)).hidden[0]
    assert torch.equal(read, weights.rows("embed_tokens.weight", tokens))
    with pytest.raises(IndexError):
        model.forward(_chain(tokens + 11, 0, LENGTH), _plane(config), part)


@needs_compiler
def test_rows_of_a_type_that_kernels_do_not_read(use_backend: Use) -> None:
    use_backend("tuned")
    config = block_config(256)
    weights = StoredEmbedding(config, "Q5_0")
    model = BlockTransformer(config, weights, blocks.repacked(config, weights))
    tokens, both = torch.arange(9), frozenset({0})
    part = Part(stop=1, skip_attention=both, skip_mlp=both, head=False)
    read = model.forward(_chain(tokens, 0, 9), _plane(config), part, taps=(0,)).hidden[0]
    assert torch.equal(read, weights.rows("embed_tokens.weight", tokens).bfloat16().float())


@pytest.mark.parametrize("kind", KINDS)
def test_repacking_only_moves_bits(kind: str) -> None:
    raw = random_blocks(kind, 32, 512, 1)
    pieces = repack(raw, kind)
    assert pieces.shape[0] == 2
    assert torch.equal(pieces[1:], repack(raw[16:], kind))  # pieces are independent
    extra = {"Q4_K": 4, "Q5_K": 4, "Q6_K": 2}.get(kind, 0)  # six-bit scales take a byte each; two bytes of padding
    assert pieces.numel() == raw.numel() + extra * 32 * 2


def test_units_of_neighbours_alternate() -> None:
    """Two pieces that make a block of 32 outputs are read as one stream, across the matrices of a product too."""
    raw = [(random_blocks("Q8_0", outputs, 64, seed), "Q8_0") for seed, outputs in enumerate((48, 16, 32, 16))]
    tensors = blocks.joined("qkv", raw[:3])
    table = blocks.table_of(tensors, "qkv").tolist()
    places = [table[i : i + 3] for i in range(0, len(table), 3)]
    unit, whole = 544, 2 * 544
    first, second, third = (tensors[f"qkv.{i}.Q8_0"].data_ptr() for i in range(3))
    kind = KINDS.index("Q8_0")
    assert places[:4] == [
        [first, kind, 2 * unit], [first + unit, kind, 2 * unit], [first + 2 * whole, kind, unit], [second, kind, unit],
    ]  # fmt: skip
    assert places[4:] == [[third, kind, 2 * unit], [third + unit, kind, 2 * unit]]
    pieces = torch.cat([repack(*matrix) for matrix in raw[:3]]).view(6, 2, unit)  # [piece, unit, bytes]
    memory = tensors["qkv.0.Q8_0"].flatten().split(unit)
    assert all(torch.equal(memory[i], pieces[i % 2, i // 2]) for i in range(4))
    assert torch.equal(torch.stack(memory[4:]), pieces[2])
    gates = blocks.joined("gate_up", [raw[1], (random_blocks("Q4_0", 16, 64, 9), "Q4_0")])  # two types: none alike
    steps = blocks.table_of(gates, "gate_up").tolist()[2::3]
    assert steps == [unit, 288]


@pytest.mark.parametrize("backend_name", NATIVE)
@pytest.mark.parametrize("name", MODELS)
def test_close_to_the_float_model(use_backend: Use, backend_name: str, name: str) -> None:
    use_backend(backend_name)
    config, kinds = MODELS[name]
    rows = _chain(_tokens(config, 30), 0, 30)
    reference = Transformer(config, RandomBlocks(config, *kinds), torch.float32).forward(rows, _plane(config)).logits
    ours = _model(name).forward(rows, _plane(config)).logits
    likeness = torch.cosine_similarity(ours, reference, dim=1)  # [T]
    assert likeness.median() > 0.995
    assert likeness.min() > 0.9


@pytest.mark.parametrize("kind", KINDS)
@needs_compiler
def test_a_product_is_what_it_says(use_backend: Use, kind: str) -> None:
    """The output product of given rows, in float64: no rounding but that of rows to bytes, by unit."""
    use_backend("tuned")
    config = block_config(512, tied=True)
    weights = RandomBlocks(config, kind)
    model = BlockTransformer(config, weights, blocks.repacked(config, weights))
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(1))
    x[:, 7] *= 50
    rows = _chain(_tokens(config, 9), 0, 9)
    ours = model.forward(rows, _plane(config), Part(start=config.layers), x).logits
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + config.norm_eps) * model.tensors["norm"]
    units = normed.view(9, -1, 256 if kind in blocks.SUPER else 32).double()
    scale = units.abs().amax(2, keepdim=True) / 127
    rounded = ((units / scale).round() * scale).view(9, 512)
    expected = rounded @ weights.get("embed_tokens.weight", torch.float64).T
    assert torch.allclose(ours.double(), expected, rtol=0, atol=2e-3 * float(expected.abs().max()))
    assert (ours - expected).abs().median() < 1e-5 * expected.abs().max()


@needs_compiler
def test_numbers_that_are_none_stay_visible(use_backend: Use) -> None:
    use_backend("tuned")
    for name, (config, _) in MODELS.items():
        model, x = _model(name), torch.randn(3, config.hidden_size)
        rows, part = _chain(_tokens(config, 3), 0, 3), Part(start=config.layers)
        for bad in (float("nan"), float("inf")):
            x[1, 5] = bad
            logits = model.forward(rows, _plane(config), part, x).logits
            assert logits[1].isnan().all()
            assert not logits[[0, 2]].isnan().any()
        assert not model.forward(rows, _plane(config), part, x.zero_()).logits.isnan().any()


# ------------------------------------------------------------ the same bits


@pytest.mark.parametrize("backend_name", NATIVE)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_ignores_its_neighbours(use_backend: Use, backend_name: str, name: str) -> None:
    use_backend(backend_name)
    config, total = MODELS[name][0], 50
    model, tokens = _model(name), _tokens(config, total)
    plane = _plane(config)
    alone = torch.cat([model.forward(_chain(tokens, t, t + 1), plane).logits for t in range(total)])
    for threads, size in ((1, 2), (1, 3), (1, 50), (2, 4), (2, 5), (2, 8), (2, 17), (3, 13), (2, 49)):
        torch.set_num_threads(threads)
        plane = _plane(config)
        chunks = [_chain(tokens, t, min(t + size, total)) for t in range(0, total, size)]
        assert _same(torch.cat([model.forward(rows, plane).logits for rows in chunks]), alone), (threads, size)


@pytest.mark.parametrize("backend_name", NATIVE)
def test_kv_of_16_bits_keeps_a_row_s_bits(use_backend: Use, backend_name: str) -> None:
    use_backend(backend_name)
    config, total = MODELS["super"][0], 40
    model, tokens, plane = _model("super"), _tokens(config, total), _plane(MODELS["super"][0], torch.float16)
    alone = torch.cat([model.forward(_chain(tokens, t, t + 1), plane).logits for t in range(total)])
    for threads, size in ((1, 40), (2, 3), (2, 8), (3, 13)):
        torch.set_num_threads(threads)
        plane = _plane(config, torch.float16)
        chunks = [_chain(tokens, t, min(t + size, total)) for t in range(0, total, size)]
        assert _same(torch.cat([model.forward(rows, plane).logits for rows in chunks]), alone), (threads, size)
    exact = model.forward(_chain(tokens, 0, total), _plane(config)).logits
    assert torch.cosine_similarity(alone, exact, dim=1).min() > 0.99


@pytest.mark.parametrize("backend_name", EQUAL)
@pytest.mark.parametrize("name", MODELS)
def test_avx2_and_avx512_agree_in_every_logit(
    use_avx512: Callable[[], None], use_backend: Use, backend_name: str, name: str
) -> None:
    """The whole decoder, in passes of one and of several rows, with K and V of 32 and of 16 bits."""
    use_avx512()
    config = MODELS[name][0]
    tokens = _tokens(config, 30)

    def logits(dtype: torch.dtype) -> Tensor:
        model, plane = _model(name), _plane(config, dtype)
        passes = [_chain(tokens, start, stop) for start, stop in ((0, 17), (17, 18), (18, 26), (26, 30))]
        return torch.cat([model.forward(rows, plane).logits for rows in passes])

    expected = {dtype: logits(dtype) for dtype in (torch.float32, torch.float16)}
    use_backend(backend_name)
    assert all(_same(logits(dtype), wanted) for dtype, wanted in expected.items())


@pytest.mark.parametrize("name", MODELS)
def test_plain_c_agrees_in_every_product(use_avx512: Callable[[], None], use_backend: Use, name: str) -> None:
    """Its vectors are shorter, so that sums of floats may differ in the last bit (native/vectors.h). Products may not,
    for equal inputs: the squares of these have one sum in every order, so their norms are equal."""
    use_avx512()
    config = MODELS[name][0]
    x = torch.randint(2, (9, config.hidden_size), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    rows, part = _chain(_tokens(config, 9), 0, 9), Part(start=config.layers)
    expected = _model(name).forward(rows, _plane(config), part, x).logits
    use_backend("narrowest")
    assert _same(_model(name).forward(rows, _plane(config), part, x).logits, expected)


@needs_compiler
def test_threads_of_our_own(use_backend: Use, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without OpenMP (macOS, Windows) a pass starts its own threads: the same bits, however many."""
    use_backend("tuned")
    config = MODELS["small"][0]
    model, rows = _model("small"), _chain(_tokens(config, 9), 0, 9)
    expected = model.forward(rows, _plane(config)).logits
    monkeypatch.setenv("CC", f"{COMPILER} -DOWN_THREADS")
    monkeypatch.setattr(native, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in native.FLAGS))
    loaded = native.load(tmp_path)
    assert loaded.kernels is not None, loaded.reason
    monkeypatch.setattr(ops, "_loaded", lambda: loaded)
    model = _model("small")
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for _ in range(3):
            assert _same(model.forward(rows, _plane(config)).logits, expected), threads


@needs_compiler
def test_parts_and_fewer_ids(use_backend: Use) -> None:
    use_backend("tuned")
    config = MODELS["super"][0]
    model, rows = _model("super"), _chain(_tokens(config, 9), 0, 9)
    whole, plane = model.forward(rows, _plane(config), taps=(0,)), _plane(config)
    first = model.forward(rows, plane, Part(stop=1, head=False), taps=(0,))
    rest = model.forward(rows, plane, Part(start=1, vocab=40), x=first.hidden[0])
    assert _same(first.hidden[0], whole.hidden[0])
    assert _same(rest.logits, whole.logits[:, :40])
    with pytest.raises(IndexError):
        model.forward(dataclasses.replace(rows, tokens=rows.tokens + 10**6), _plane(config))


@needs_compiler
def test_passes_leave_the_layers_that_are_kept_in_the_slots_of_their_rows(use_backend: Use) -> None:
    use_backend("tuned")
    config = MODELS["super"][0]
    tokens, model, plane = _tokens(config, 9), _model("super"), _plane(config)
    assert model.keeps_streams
    model.forward(_chain(tokens, 0, 2), plane)
    rows = _chain(tokens, 2, 9)
    shown = model.forward(rows, plane, taps=(0, 1)).hidden
    plane.keep_streams((1,), config.hidden_size, torch.float32)
    plane.streams[1].fill_(7.0)
    assert not model.forward(rows, plane).hidden
    assert _same(plane.streams[1][rows.slots], shown[1])
    assert (plane.streams[1][:2] == 7).all()
    assert (plane.streams[1][9:] == 7).all()
    plane.keep_streams((0,), config.hidden_size, torch.float32)  # one more, later
    model.forward(rows, plane)
    assert _same(plane.streams[0][rows.slots], shown[0])


@needs_compiler
def test_the_logits_of_few_rows_have_the_same_memory_in_every_pass(use_backend: Use) -> None:
    use_backend("tuned")
    model, logits = _model("super"), list[torch.Tensor]()
    engine = build_engine(model, Config(drafter="ngram", k=3))
    engine.listeners = (SimpleNamespace(observe=lambda step: logits.append(step.output.logits), reads_logits=True),)
    engine.add(Sequence(1, [5, 6, 7, 5, 6], SamplingParams(max_tokens=20)))
    while engine.busy:
        engine.step()
    assert len({each.shape for each in logits}) > 1
    assert len({each.data_ptr() for each in logits}) == 1
    rows, plane = _chain(torch.tensor([5, 6]), 0, 2), _plane(MODELS["super"][0])
    own = model.forward(rows, plane).logits
    assert model.forward(rows, plane).logits.data_ptr() != own.data_ptr()  # whoever asks keeps what he gets


def _problems() -> Iterator[tuple[str, bytes, int]]:
    """A product in every type and for many numbers of rows, with outliers among the inputs."""
    for rows in (1, 2, 3, 4, 5, 8, 10, 13):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
        x[:, 100] *= 40
        for kind in KINDS:
            raw = random_blocks(kind, 48, 512, rows)
            yield kind, block_problem(blocks.joined("x", [(raw, kind)])[f"x.0.{kind}"], kind, 48, x), rows
        for outliers, inputs in ((0, 512), (8, 512), (4, 500)):  # the last: odd numbers of steps
            weight, part = floats(random_blocks("Q8_0", 40, 512, rows), "Q8_0")[:, :inputs], x[:, :inputs].contiguous()
            yield "int8", int8_problem(quant.quantise(weight, None, part.abs().amax(0), outliers), part), rows


def _compare(reference: list[str], others: dict[str, list[str]]) -> None:
    for kind, problem, rows in _problems():
        expected, _ = run(reference, problem, rows)
        for isa, command in others.items():
            result, built_for = run(command, problem, rows)
            assert built_for == isa
            assert _same(result, expected), (isa, kind, rows)


@needs_compiler
@pytest.mark.slow  # builds four programs
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 instructions")
def test_every_x86_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    """VNNI is emulated where the machine has none: its branches are compiled, its instructions are plain C."""
    assert COMPILER is not None
    flags = {
        "plain C": "-march=x86-64",
        "AVX2": "-march=x86-64-v3",
        "AVX-VNNI": EMULATED + "256",
        "VNNI": EMULATED + "512",
    }
    programs = {isa: [str(build(tmp_path / isa, COMPILER, flag))] for isa, flag in flags.items()}
    _compare(programs.pop("plain C"), programs)


@needs_compiler
@pytest.mark.arm
def test_arm_gives_the_same_bits(tmp_path: Path) -> None:
    """With and without dot products and products of matrices, under qemu-user. A processor without them must not meet
    such an instruction."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user")
    assert COMPILER is not None
    reference = [str(build(tmp_path / "here", COMPILER, ""))]
    plain = build(tmp_path / "plain", compiler, "-static -march=armv8-a")
    dot = build(tmp_path / "dot", compiler, "-static -march=armv8.2-a+dotprod")
    i8mm = build(tmp_path / "i8mm", compiler, "-static -march=armv8.2-a+dotprod+i8mm")
    _compare(reference, {
        "plain C": [emulator, "-cpu", "cortex-a57", str(plain)],
        "dotprod": [emulator, "-cpu", "neoverse-n1", str(dot)],
        "i8mm": [emulator, "-cpu", "max", str(i8mm)],
    })  # fmt: skip
    for kind, problem, rows in _problems():
        if rows == len(native.SIGNS):  # as many as a library is checked with: it finds out that i8mm is missing
            done = subprocess.run([emulator, "-cpu", "neoverse-n1", str(i8mm)], input=problem, capture_output=True)
            assert -done.returncode == signal.SIGILL, kind


# ------------------------------------------------------------ which files


def test_what_cannot_run_as_it_is_says_why() -> None:
    config = block_config(256)
    assert "GGUF" in blocks.reason_against(object(), config)
    assert "type F16" in blocks.reason_against(RandomBlocks(config, "Q4_K", "F16"), config)
    assert "mixes" in blocks.reason_against(RandomBlocks(config, "Q4_K", "Q8_0"), config)
    odd = dataclasses.replace(config, head_dim=20, rotary_dim=20)
    assert "multiple of 16" in blocks.reason_against(RandomBlocks(odd, "Q4_K"), odd)
    assert not blocks.runs(RandomBlocks(config, "F16"), config)


VARIANTS: dict[str, dict[str, object]] = {
    "gemma2": {"post_norm": True, "embedding_scale": 16.0, "activation": "gelu_tanh"},
    "capped scores": {"score_cap": 50.0},
    "capped logits": {"logit_cap": 30.0},
    "granite": {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.125, "score_scale": 0.015},
    "scaled scores": {"score_scale": 0.5},
    "olmo2": {"pre_norm": False, "post_norm": True, "qk_norm": True, "whole_qk_norm": True},
    "two ropes": {"local_rope_theta": 100.0},
    "experts": {"experts": 4, "experts_used": 2, "expert_size": 256},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_that_differ_from_llamas_are_refused(variant: str) -> None:
    config = block_config(256, **VARIANTS[variant])
    assert "differ from Llama's" in blocks.reason_against(RandomBlocks(config, "Q4_K"), config)
    assert not blocks.runs(RandomBlocks(config, "Q4_K"), config)


@needs_compiler
def test_a_trained_head_reads_the_output_matrix(use_backend: Use) -> None:
    """Heads that share the target's output product get its rows in eight bits, or as floats."""
    use_backend("tuned")
    for name in ("small", "super"):  # tied and not
        model, (config, _) = _model(name), MODELS[name]
        matrix = "embed_tokens.weight" if config.tied else "lm_head.weight"
        exact = model.weights.get(matrix, torch.float32)
        ids = torch.tensor([5, 1])
        torch.testing.assert_close(output_rows(model, ids).float(), exact[ids], rtol=1e-2, atol=0)
        x = torch.randn(4, config.hidden_size, generator=torch.Generator().manual_seed(3))
        for dtype in (torch.int8, torch.float32):
            ours = output_product(model, dtype)(x)
            assert torch.cosine_similarity(ours, x @ exact.T, dim=1).min() > 0.99


def test_without_kernels_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_loaded", lambda: native.Native(None, "no C compiler"))
    config = block_config(256)
    weights = RandomBlocks(config, "Q4_K")
    assert not blocks.runs(weights, config)
    with pytest.raises(ModelError, match=r"no C compiler.*int8"):
        BlockTransformer(config, weights, {})


def test_the_repacked_file_is_kept_and_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    config = block_config(256)
    tensors = blocks.repacked(config, RandomBlocks(config, "Q4_K"))

    def stored() -> quant.Tensors:
        return quant.stored("name", tensors.items, tmp_path).tensors

    first, again = stored(), stored()
    assert first.keys() == again.keys() == tensors.keys()
    assert all(torch.equal(first[name], tensors[name]) and torch.equal(again[name], tensors[name]) for name in tensors)
    del first, again
    (file,) = tmp_path.glob("*.weights")
    damaged = bytearray(file.read_bytes())
    damaged[-100] ^= 1
    file.unlink()
    file.write_bytes(damaged)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in stored().items())
