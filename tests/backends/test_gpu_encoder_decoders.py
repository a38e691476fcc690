"""T5, BART and Marian by a GPU's kernels: the numbers of `transformers`, the same bits in passes of any size, and
rounds that say what plain decoding says, whatever is drafted.

Without a GPU the same code runs uncaptured, with its kernels in triton's interpreter; what nobody has written is
poisoned.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from outrider.backends import ops
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.kernels import attention, elementwise, matmul
from outrider.backends.cuda.packing import PackedTransformer
from outrider.backends.cuda.state import DeviceState
from outrider.backends.rows import Rows
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache, Plane
from outrider.engine.step import Engine
from outrider.llm import build_engine
from outrider.models.checkpoint import open_checkpoint
from outrider.models.precision import GGUF
from outrider.models.weights import LayerSubset
from outrider.params import SamplingParams
from outrider.types import Sequence

from support.device_engine import device_engine, padded_plane
from support.gguf_t5 import write_t5
from support.kernels import DEVICE, GPU, HALF, exact_products as exact_products, ordered_products as ordered_products
from support.pairs import CASES, TINY, ours, pair, source, text, their_logits

F32 = torch.float32
LONG = 37 if GPU else 4  # tokens of a text
SOURCE = 30 if GPU else 5


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)


def on_device(case: str, blur: float = 0.0) -> Transformer:
    return ours(case, F32, blur, str(DEVICE))


class DeviceBench:
    """A model with a cache and graphs of its own, fed by hand."""

    def __init__(self, model: Transformer, source_length: int = 96) -> None:
        self.cache = Cache(300, 4, 80, DEVICE, source_length)
        self.cache._free = self.cache._free[::2] + self.cache._free[1::2]  # neighbours do not lie side by side
        self.state = DeviceState(self.cache, Driver(DEVICE, poisons=True), 4)
        self.graphs = Graphs(model, self.plane(model), self.state)

    def plane(self, model: Transformer) -> Plane:
        return padded_plane(self.cache, model)

    def add(self, number: int, tokens: list[int], sources: list[int], spare: int = 0) -> Sequence:
        seq = Sequence(number, tokens, source=sources)
        self.cache.open(seq)
        assert self.cache.reserve(seq, len(tokens), spare)
        return seq

    def logits(self, *pieces: tuple[Sequence, int, int]) -> Tensor:
        batch = BatchBuilder(self.cache)
        for seq, start, stop in pieces:
            batch.pending(seq, start, stop, want=False)
        batch.want = list(range(batch.count))
        return self.graphs.logits(batch).cpu()

    def chunks(self, seq: Sequence, chunk: int = 1000) -> Tensor:
        n = len(seq.tokens)
        return torch.cat([self.logits((seq, at, min(at + chunk, n))) for at in range(0, n, min(chunk, n))])


# ------------------------------------------------------------ kernels


def test_attention_to_sources_and_with_a_bias_by_distance() -> None:
    """Sources of no, few and many tokens; a bias across spans; the same bits however the work is split."""
    heads, dim, lengths, rows = 2, 16, [0, 5, 300], 6
    drawn = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(n, heads, dim, generator=drawn).to(DEVICE) for n in (rows, 400, 400))
    table = torch.randperm(400, generator=drawn)[:300].int().repeat(3, 1).to(DEVICE)
    bias = torch.randn(heads, 700, generator=drawn).to(DEVICE), torch.arange(320, 320 + rows, device=DEVICE)
    lines = torch.tensor([0, 1, 1, 2, 2, 2], device=DEVICE)
    context = torch.tensor(lengths, device=DEVICE)[lines]
    none = torch.empty(0, dtype=torch.long, device=DEVICE)
    each = Rows(none, none, none, lines, context, table, None, none)
    info = torch.zeros(4, 8, dtype=torch.int32)  # the last block is padding
    info[:3, :3] = torch.tensor([[0, 1, 0], [1, 2, 1], [3, 3, 2]])
    tail, counts = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.tensor(lengths, dtype=torch.int32)
    for added in (None, bias):
        made = []
        for most in (1, rows):  # rows of the scratch: whether a row's keys are shared between programs
            scratch = attention.Scratch(most, heads, dim, 300, DEVICE)
            blocks = attention.Blocks(info.to(DEVICE), tail, table, scratch, counts.to(DEVICE))
            made.append(attention.attend(q, k, v, blocks, 0.3, bias=added))
        wanted = ops._attend_torch(
            *(x.cpu() for x in (q, k, v)), on_cpu(each), 0.3, F32, 0, 0.0, None, added_cpu(added)
        )
        torch.testing.assert_close(made[0].cpu(), wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(made[0], made[1])
        assert (made[0][0] == 0).all()


def on_cpu(rows: Rows) -> Rows:
    return replace(rows, lines=rows.lines.cpu(), context=rows.context.cpu(), table=rows.table.cpu())


def added_cpu(bias: ops.Bias | None) -> ops.Bias | None:
    return None if bias is None else (bias[0].cpu(), bias[1].cpu())


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("paired", [True, False])
def test_activations(activation: str, paired: bool) -> None:
    parts = torch.randn(2, 3, 14, device=DEVICE) * 4
    x = matmul.Parts(parts, torch.randn(14, device=DEVICE))
    got = matmul.activate(x, activation, paired, F32)
    gate, up = x.total().chunk(2, 1) if paired else (x.total(), 1.0)
    torch.testing.assert_close(got, ops.gated(gate, up, activation), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [12, 1000])
def test_norms_of_the_stream(width: int) -> None:
    """The norm of x + delta becomes x, bit for bit what is returned; a layer norm has a gain and a bias."""
    x, parts = torch.randn(3, width, device=DEVICE), matmul.Parts(torch.randn(2, 3, width, device=DEVICE))
    gain = torch.randn(2, width, device=DEVICE)
    total = x + parts.total()
    wanted = torch.nn.functional.layer_norm(total, (width,), gain[0], gain[1], 1e-5)
    kept = x.clone()
    torch.testing.assert_close(elementwise.add_norm(kept, parts, gain, 1e-5, F32), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(kept, total)
    assert torch.equal(elementwise.add_norm(x, parts, gain, 1e-5, F32, stream=True), x)
    torch.testing.assert_close(x, wanted, atol=1e-5, rtol=1e-5)


OTHER_CASES = [pytest.param(case, marks=pytest.mark.slow) for case in ("tiny marian", *CASES)]


@pytest.mark.parametrize("case", ["tiny t5", *OTHER_CASES])
def test_logits_are_those_of_transformers_and_rows_are_independent(case: str, exact_products: None) -> None:
    """One row a pass, many, and beside a sequence with another source: the same bits."""
    theirs, config, _ = pair(case)
    wanted = their_logits(theirs, source(SOURCE), text(LONG))
    open_ = [i for i in range(config.vocab_size) if i not in config.banned]
    bench = DeviceBench(on_device(case))
    whole = bench.chunks(bench.add(1, text(LONG), source(SOURCE)))
    torch.testing.assert_close(whole[:, open_], wanted[:, open_], atol=2e-4, rtol=2e-4)
    assert (whole[:, list(config.banned)] == -torch.inf).all()
    bench = DeviceBench(on_device(case))
    assert torch.equal(bench.chunks(bench.add(1, text(LONG), source(SOURCE)), 1), whole)
    bench = DeviceBench(on_device(case))
    one, other = bench.add(1, text(LONG), source(SOURCE)), bench.add(2, text(3), source(4, salt=5))
    assert torch.equal(bench.logits((other, 0, 3), (one, 0, LONG))[3:], whole)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tiny marian", "tiny t5"])
def test_rounded_weights_are_near(case: str) -> None:
    """int8 on a GPU: encoder, cross-attention and decoder; on a GPU bfloat16 as well."""
    theirs, config, weights = pair(case)
    wanted = their_logits(theirs, source(SOURCE), text(LONG))
    for dtype, int8 in [(F32, True)] + [(HALF, True), (HALF, False)] * GPU:
        bench = DeviceBench(Transformer(config, weights, dtype, DEVICE, 80, int8=int8))
        got = bench.chunks(bench.add(1, text(LONG), source(SOURCE)))
        assert torch.cosine_similarity(got, wanted, dim=1).median() > 0.97


@pytest.mark.parametrize("kind", [Kind.Q8_0, pytest.param(Kind.Q4_0, marks=pytest.mark.slow)])
def test_a_t5_files_own_blocks(kind: Kind, tmp_path: Path, ordered_products: None) -> None:
    """Encoder, cross-attention and decoder read the blocks of a GGUF file as what they stand for."""
    checkpoint = open_checkpoint(write_t5(tmp_path / "model.gguf", pair("blocks t5")[0], kind))
    config, weights = checkpoint.config, checkpoint.weights
    bench = DeviceBench(Transformer(config, weights, F32, DEVICE, 80))
    wanted = bench.chunks(bench.add(1, text(LONG), source(SOURCE)))
    packed = PackedTransformer(config, weights, GGUF, DEVICE, 80, F32)
    assert packed.description.endswith("in the checkpoint's own precision (gguf).")
    bench = DeviceBench(packed)
    whole = bench.chunks(bench.add(1, text(LONG), source(SOURCE)))
    torch.testing.assert_close(whole, wanted, atol=2e-3, rtol=2e-3)
    bench = DeviceBench(packed)
    assert torch.equal(bench.chunks(bench.add(1, text(LONG), source(SOURCE)), 1), whole)


@pytest.mark.slow
def test_without_sources_rows_attend_to_nothing() -> None:
    """A draft model with an encoder beside a target whose sources are elsewhere: drafts are poor, nothing fails."""
    _, config, weights = pair("tiny t5")
    bench = DeviceBench(on_device("tiny t5"), source_length=0)
    silent = LayerSubset(weights, [0])
    silent._zeroed = {"cross_attn.o_proj": frozenset({0})}
    got = bench.chunks(bench.add(1, text(LONG), []))
    wanted = DeviceBench(Transformer(config, silent, F32, DEVICE, 80))
    torch.testing.assert_close(got, wanted.chunks(wanted.add(1, text(LONG), source(SOURCE))), atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------ rounds

SOURCES = [source(5), source(9, salt=3)] + [source(24, salt=7), source(3)] * GPU
TOKENS = 24 if GPU else 5


def engine(case: str, drafter: str, rounds: bool = True, **options: Any) -> Engine:
    cache = Cache(600, 8, 80, DEVICE, source_length=96)
    return device_engine(on_device(case), cache, drafter, 0 if drafter == "off" else 3, rounds, **options)


def texts(engine: Engine, **params: Any) -> tuple[list[list[int]], int]:
    """What is said about each source, and how many drafted tokens of it were accepted."""
    seqs, target = [], engine.target.model  # type: ignore[attr-defined]
    for i, ids in enumerate(SOURCES):
        start = target.opening(ids)
        law = SamplingParams(max_tokens=TOKENS + i, ignore_eos=True, **params)
        seqs.append(Sequence(i + 1, start.tokens, law, source=start.source, seed=40 + i))
        engine.add(seqs[-1])
    accepted = 0
    while engine.busy:
        step = engine.step()
        assert not step.failure, step.failure
        engine.cache.check()
        accepted += sum(len(verdict.path) for verdict in step.verdicts if verdict is not None)
    assert not engine.failures
    return [seq.generated for seq in seqs], accepted


def plain(case: str, **params: Any) -> list[list[int]]:
    """The target alone, without rounds. The interpreter is slow: instead of it the CPU's own decoder."""
    if GPU:
        return texts(engine(case, "off", rounds=False), **params)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "on_gpu", lambda tensor: tensor.is_cuda)
        return texts(build_engine(ours(case, F32), Config(drafter="off", max_length=80)), **params)[0]


EVERYDAY = [("tiny marian", "model")]
OTHERS = [(case, drafter) for case in (*TINY, "bart start", "t5") for drafter in ("off", "ngram", "suffix", "model")]


@pytest.mark.parametrize(
    ("case", "drafter"), [*EVERYDAY, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_rounds_say_what_plain_decoding_says(case: str, drafter: str) -> None:
    options = {"draft_model": on_device(case, 0.05)} if drafter == "model" else {}
    said, accepted = texts(engine(case, drafter, **options))
    assert said == plain(case)
    assert accepted or drafter != "model"
