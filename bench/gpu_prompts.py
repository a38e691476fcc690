"""Prompts on a GPU: products of many rows beside cuBLAS, attention beside torch's, time to the first token, exactness.

python bench/gpu_prompts.py --sections products,attention,prompt,exact
python bench/gpu_prompts.py --sections sweep          # candidates for tiles, when a card or triton is new
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.kernels import attention, matmul, wide
from outrider.backends.cuda.kernels.attention import Blocks, Scratch, Tile
from outrider.backends.cuda.kernels.wide import Tiles
from outrider.backends.cuda.rounds import Rounds
from outrider.backends.toy import hash_of
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.engine.request_drafts import Prediction
from outrider.engine.step import Engine
from outrider.llm import build_engine
from outrider.models.config import ModelConfig
from outrider.models.weights import expected
from outrider.params import SamplingParams
from outrider.types import Sequence

SHAPES = {  # name -> outputs, inputs, gated
    "7b qkv": (3840, 4608, False), "7b out": (4608, 2304, False), "7b gate_up": (27648, 4608, True),
    "7b down": (4608, 13824, False),
    "qwen qkv": (2048, 1536, False), "qwen out": (1536, 1536, False), "qwen gate_up": (17920, 1536, True),
    "qwen down": (1536, 8960, False),
}  # fmt: skip
ROWS = (64, 256, 512, 2048, 8192)
LENGTHS = (2048, 8192, 32768)
IDS = itertools.count(1)
HEADS = {"7b": (36, 12, 64), "qwen": (12, 2, 128)}  # query heads, key heads, dimension
CANDIDATES = [
    Tiles(128, 128, registers=128), Tiles(128, 128), Tiles(128, 128, stages=4), Tiles(128, 128, step=128),
    Tiles(128, 128, registers=128, group=16), Tiles(128, 128, False), Tiles(128, 256, False, 4),
]  # fmt: skip
GATED = [Tiles(128, 128), Tiles(128, 128, stages=4), Tiles(128, 64), Tiles(128, 128, group=4)]
ATTENTION = [
    Tile(64, 4, 2, 168), Tile(64, 4, 3, 168), Tile(64, 4, 2), Tile(64, 4, 2, 152), Tile(128, 8, 3), Tile(128, 8, 2),
    Tile(64, 8, 2),
]  # fmt: skip


def seconds(run: Callable[[], Any], budget: float = 0.02) -> float:
    """Seconds of a call on the device, without the host's: recorded a few times in a row, and replayed."""
    run()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), 4
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    graph.replay()
    taken: list[float] = []
    until = time.perf_counter() + budget
    while len(taken) < 3 or (time.perf_counter() < until and len(taken) < 20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / times)
    return sorted(taken)[len(taken) // 2]


def operands(name: str, rows: int) -> tuple[Tensor, Tensor]:
    outs, ins, _ = SHAPES[name]
    torch.manual_seed(rows)
    x, w = torch.randn(rows, ins, device="cuda"), torch.randn(outs, ins, device="cuda") / ins**0.5
    return x.to(torch.bfloat16), w.to(torch.bfloat16)


def run_tiles(x: Tensor, w: Tensor, gated: bool, tiles: Tiles) -> Tensor:
    splits = 1 if gated else tiling(w, gated).splits
    return wide.wide_product(x, w, splits, matmul.split_of(w.shape[1], splits), tiles, gated=gated)


def tiling(w: Tensor, gated: bool) -> matmul.Tiling:
    return matmul.tiling(w.shape[0], w.shape[1], matmul.processors(w.device))


def summed(parts: Tensor) -> Tensor:
    return matmul.Parts(parts).total()


def sweep_products(report: dict[str, Any]) -> None:
    for name, (_, _, gated) in SHAPES.items():
        for rows in ROWS:
            x, w = operands(name, rows)
            own = tiling(w, gated)
            if gated:
                own = matmul.Tiling(own.outputs, 1, own.stages)
            few = [matmul.product(x[i : i + 16].contiguous(), w, own, gated=gated) for i in (0, rows - 16)]
            found: dict[str, Any] = {"cublas": seconds(lambda x=x, w=w: x @ w.T)}
            found["few"] = seconds(lambda x=x, w=w, own=own, g=gated: matmul.product(x, w, own, gated=g))
            for tiles in GATED if gated else CANDIDATES:
                try:
                    out = run_tiles(x, w, gated, tiles)
                    bits = [out[:16], out[-16:]] if gated else [out[:, :16], out[:, -16:]]
                    same = all(
                        torch.equal(a, b) if gated else torch.equal(summed(a), summed(b))
                        for a, b in zip(bits, few, strict=True)
                    )
                    took = seconds(lambda x=x, w=w, g=gated, t=tiles: run_tiles(x, w, g, t))
                    found[str(astuple(tiles))] = took if same else [took, "OTHER BITS"]
                except Exception as error:  # a candidate that does not fit
                    found[str(astuple(tiles))] = f"{type(error).__name__}: {error}"[:80]
            report[f"{name} {rows}"] = {
                key: round(1e6 * value, 1) if isinstance(value, float) else value for key, value in found.items()
            }
            print(name, rows, report[f"{name} {rows}"], file=sys.stderr, flush=True)


def scene(shape: str, rows: int, context: int, prompts: bool = False) -> tuple[Tensor, Tensor, Tensor, Blocks]:
    """The last rows of a prompt in scattered slots."""
    heads, kv_heads, dim = HEADS[shape]
    torch.manual_seed(1)
    q = torch.randn(rows, heads, dim, device="cuda").to(torch.bfloat16)
    k, v = (torch.randn(context + 1, kv_heads, dim, device="cuda").to(torch.bfloat16) for _ in range(2))
    table = torch.randperm(context, device="cuda", dtype=torch.int32)[None]
    per, before = attention.rows_per_block(heads, kv_heads), context - rows
    blocks = [[i, min(per, rows - i), 0, context, before + i + 1, 0, 0, 0] for i in range(0, rows, per)]
    info = torch.tensor(blocks, dtype=torch.int32, device="cuda")
    tail = torch.zeros(len(blocks), 1, dtype=torch.int32, device="cuda")
    return q, k, v, Blocks(info, tail, table, Scratch(16, heads, dim, context, torch.device("cuda")), prompts=prompts)


def sdpa(shape: str, rows: int) -> float:
    """Seconds of torch's own attention, causal, over as many keys as rows."""
    heads, kv_heads, dim = HEADS[shape]
    q = torch.randn(1, heads, rows, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, kv_heads, rows, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def sweep_attention(report: dict[str, Any]) -> None:
    for shape, (_, _, dim) in HEADS.items():
        for rows, context in ((2048, 2048), (8192, 8192), (2048, 32768)):
            found: dict[str, Any] = {}
            if rows == context:
                found["sdpa"] = sdpa(shape, rows)
            few = scene(shape, rows, context)
            alike = attention.attend(*few, dim**-0.5)
            if context <= 2048:
                found["few"] = seconds(lambda few=few, dim=dim: attention.attend(*few, dim**-0.5))
            for how in ATTENTION:
                set_tile(how)
                many = scene(shape, rows, context, prompts=True)

                def run(many: Any = many, dim: int = dim) -> Tensor:
                    return attention.attend(*many, dim**-0.5)

                try:
                    same = torch.equal(run(), alike)
                    took = seconds(run)
                    found[str(astuple(how))] = took if same else [took, "OTHER BITS"]
                except Exception as error:  # a candidate that does not fit
                    found[str(astuple(how))] = f"{type(error).__name__}: {error}"[:80]
            report[f"{shape} {rows} of {context}"] = {
                key: round(1e6 * value, 1) if isinstance(value, float) else value for key, value in found.items()
            }
            print(shape, rows, context, report[f"{shape} {rows} of {context}"], file=sys.stderr, flush=True)


def candidates() -> list[Callable[[], Any]]:
    """What compiles the kernels of a sweep."""
    matmul.tiles_for = lambda *given: None  # type: ignore[assignment]
    work: list[Callable[[], Any]] = []
    x = torch.randn(128, 512, device="cuda").to(torch.bfloat16)
    for gated, several in ((False, CANDIDATES), (True, GATED)):
        for tiles in several:
            work.append(lambda t=tiles, g=gated: wide.wide_product(x, weight(512), 1 if g else 2, 256, t, gated=g))
        for rows in (16, 64, 256):
            few = torch.randn(rows, 512, device="cuda").to(torch.bfloat16)
            own = matmul.Tiling(64, 1, 5)
            work.append(lambda f=few, o=own, g=gated: matmul.product(f, weight(512), o, gated=g))
    for shape, (_, _, dim) in HEADS.items():
        few_rows = scene(shape, 128, 2048)
        work.append(lambda m=few_rows, d=dim: attention.attend(*m, d**-0.5))
        for how in ATTENTION:
            work.append(partial(_compile_attention, scene(shape, 128, 2048, prompts=True), how, dim))
    return work


def chosen() -> list[Callable[[], Any]]:
    """What compiles the kernels of the other sections: a model of one layer runs everything."""
    work: list[Callable[[], Any]] = []
    for rows in (16, 64, 256):
        for name in ("7b down", "7b gate_up", "qwen qkv"):
            work.append(partial(_run_product, name, rows))
    for shape, (_, _, dim) in HEADS.items():
        many = scene(shape, 128, 2048, prompts=True)
        work.append(lambda m=many, d=dim: attention.attend(*m, d**-0.5))
    seven.layers = 1
    for length, more in ((2048, {}), (2300, {}), (64, {}), (300, {"drafter": "ngram", "k": 8, "prompt_rows": 1000})):
        settings = {"drafter": "off", "k": 0} | more
        work.append(lambda length=length, how=settings: answer(engine_of(**how), text(length), 40))
    return work


def _run_product(name: str, rows: int) -> None:
    x, w = operands(name, rows)
    layer = matmul.Product(w)
    layer.gated(x) if SHAPES[name][2] else layer(x)


def compile_some(kind: str, part: int, parts: int) -> None:
    """Compile what is number part, part + parts, …: the results are cached."""
    for one in {"candidates": candidates, "chosen": chosen}[kind]()[part::parts]:
        try:
            one()
        except Exception as error:
            print(f"{type(error).__name__}: {error}"[:200], file=sys.stderr)


def compile_all(kind: str) -> float:
    """Compile in as many processes as a machine with a GPU has cores; returns the seconds."""
    start, count = time.perf_counter(), 14
    workers = [
        subprocess.Popen([sys.executable, __file__, "--compile", kind, str(i), str(count)]) for i in range(count)
    ]
    for worker in workers:
        worker.wait(60)
    return round(time.perf_counter() - start, 1)


def set_tile(how: Tile) -> None:
    attention.tile_of = lambda dim, memory: how  # type: ignore[assignment]


def _compile_attention(many: Any, how: Tile, dim: int) -> None:
    set_tile(how)
    attention.attend(*many, dim**-0.5)


def weight(outs: int) -> Tensor:
    return torch.randn(outs, 512, device="cuda").to(torch.bfloat16)


def sweep(report: dict[str, Any]) -> None:
    """Times of all candidates, in microseconds, and whether they have the bits of a few rows."""
    matmul.tiles_for = lambda *given: None  # type: ignore[assignment]
    report["compile_s"] = compile_all("candidates")
    sweep_attention(report.setdefault("attention_us", {}))
    sweep_products(report.setdefault("products_us", {}))


# ------------------------------------------------------------ the chosen tiles


def products(report: dict[str, Any]) -> None:
    """Microseconds of a layer's products as passes run them, beside cuBLAS."""
    for name, (_, _, gated) in SHAPES.items():
        for rows in ROWS:
            x, w = operands(name, rows)
            layer = matmul.Product(w)
            run = layer.gated if gated else layer
            ours, theirs = [], []
            for _ in range(3):  # in turn: the clock follows the temperature
                ours.append(seconds(lambda run=run, x=x: run(x)))
                theirs.append(seconds(lambda x=x, w=w: x @ w.T))
            few = run(x[:16].contiguous())
            same = torch.equal(few, run(x)[:16]) if gated else torch.equal(few.total(), run(x).total()[:16])
            best, cublas = sorted(ours)[1], sorted(theirs)[1]
            report[f"{name} {rows}"] = {
                "us": round(1e6 * best, 1), "cublas_us": round(1e6 * cublas, 1), "same_bits": same
            }  # fmt: skip
    for model in ("7b", "qwen"):
        for rows in ROWS:
            layer_of = [report[f"{name} {rows}"] for name in SHAPES if name.startswith(model)]
            ours_us, cublas_us = (sum(each[key] for each in layer_of) for key in ("us", "cublas_us"))
            report[f"{model} {rows}, a layer over cuBLAS"] = round(ours_us / cublas_us, 3)


def attentions(report: dict[str, Any]) -> None:
    """Microseconds of a layer's attention, beside torch's own (contiguous keys, causal)."""
    for shape, (_, _, dim) in HEADS.items():
        for rows, context in ((2048, 2048), (8192, 8192), (2048, 32768)):
            many = scene(shape, rows, context, prompts=True)
            found = {"us": seconds(lambda many=many, dim=dim: attention.attend(*many, dim**-0.5))}
            if rows == context:
                found["sdpa_us"] = sdpa(shape, rows)
            report[f"{shape} {rows} of {context}"] = {key: round(1e6 * value, 1) for key, value in found.items()}
        for context in (512, 2048, 8192, 32768):
            one = scene(shape, 1, context)
            taken = seconds(lambda one=one, dim=dim: attention.attend(*one, dim**-0.5))
            report[f"{shape} 1 of {context}"] = {"us": round(1e6 * taken, 1)}


# ------------------------------------------------------------ whole prompts


class Invented:
    """Random weights on the GPU, drawn by name."""

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = expected(config)

    def has(self, name: str) -> bool:
        return name in self.shapes

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device="cuda")
        torch.manual_seed(hash_of(name) % 1_000_003)
        return torch.randn(shape, dtype=dtype, device="cuda") / shape[-1] ** 0.5


class Seven:
    """A decoder of the 7.04B twin's shape for 40k positions."""

    layers = 30

    @cached_property
    def model(self) -> Transformer:
        config = ModelConfig(
            architecture="llama", vocab_size=49152, hidden_size=4608, intermediate_size=13824, layers=self.layers,
            heads=36, kv_heads=12, head_dim=64, norm_eps=1e-5, rope_theta=1e5, context_length=40960, tied=False,
        )  # fmt: skip
        return Transformer(config, Invented(config), torch.bfloat16, "cuda", config.context_length)


seven = Seven()


def engine_of(batch: int = 1, **settings: Any) -> Engine:
    """An engine that records a round when it is first needed, and holds the prompts of this file."""
    return build_engine(seven.model, Config(max_batch=batch, cache_tokens=36864, max_length=36000, **settings))


def answer(engine: Engine, tokens: list[int], count: int, expected: list[int] | None = None) -> tuple[Sequence, float]:
    """The answer of so many tokens, and its seconds. expected: what the request itself drafts."""
    seq = Sequence(next(IDS), tokens, SamplingParams(max_tokens=count, ignore_eos=True))
    seq.prediction = Prediction(list(expected)) if expected else None
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.add(seq)
    while not seq.done:
        engine.step()
    taken = time.perf_counter() - start
    engine.cache.drop_retired()
    return seq, taken


def text(length: int) -> list[int]:
    """Tokens that come in phrases, so that lookups find some."""
    dice = random.Random(length)
    phrases = [[dice.randrange(49152) for _ in range(12)] for _ in range(200)]
    return [token for _ in range(length // 12 + 1) for token in dice.choice(phrases)][:length]


def own_prompt(report: dict[str, Any]) -> None:
    """Seconds to the first token."""
    engine = engine_of(drafter="off", k=0)
    for length in LENGTHS:
        answer(engine, text(length), 1)  # records
        report[f"{length}"] = {"s": sorted(answer(engine, text(length), 1)[1] for _ in range(3))[1]}


def prompt(report: dict[str, Any]) -> None:
    """Seconds to the first token, ours and transformers'."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    own_prompt(report)
    with torch.device("cuda"):
        theirs = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=49152, hidden_size=4608, intermediate_size=13824, num_hidden_layers=30,
                num_attention_heads=36, num_key_value_heads=12, head_dim=64,
                max_position_embeddings=40960, tie_word_embeddings=False,
            ),
            dtype=torch.bfloat16, attn_implementation="sdpa",
        )  # fmt: skip
    for length in LENGTHS:
        ids = torch.tensor([text(length)], device="cuda")
        taken = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        report[f"{length}"] |= {"transformers_s": sorted(taken)[1]}


def chunks(report: dict[str, Any]) -> None:
    """Seconds to the first token by the rows of a chunk."""
    for rows in (1024, 2048, 4096, 8192):
        engine, found = engine_of(drafter="off", k=0, prompt_rows=rows), {}
        for length in LENGTHS:
            answer(engine, text(length), 1)  # records
            found[length] = round(min(answer(engine, text(length), 1)[1] for _ in range(2)), 4)
        report[f"{rows}"] = found
        del engine


def kernels(report: dict[str, Any]) -> None:
    """Milliseconds of a prompt's kernels, by name."""
    from torch.profiler import ProfilerActivity, profile

    engine = engine_of(drafter="off", k=0)
    for length in LENGTHS:
        answer(engine, text(length), 1)  # records
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            answer(engine, text(length), 1)
        spent = {event.key[:40]: event.self_device_time_total / 1e3 for event in profiled.key_averages()}
        ordered = sorted(spent.items(), key=lambda item: -item[1])[:10]
        report[f"{length}"] = {name: round(each, 2) for name, each in ordered}


def beside(report: dict[str, Any]) -> None:
    """Milliseconds between the tokens of a stream, alone and while a prompt of 32,768 tokens is read beside it."""
    engine = engine_of(2, drafter="off", k=0)
    _, _ = stream_beside(engine), engine.cache.drop_retired()  # records
    gaps, report["prompt_s"] = stream_beside(engine)
    for name, each in gaps.items():
        ordered = sorted(each[3:])
        report[name] = {"median_ms": round(ordered[len(ordered) // 2], 2), "longest_ms": round(ordered[-1], 2)}


def stream_beside(engine: Engine) -> tuple[dict[str, list[float]], float]:
    """The gaps between a stream's tokens before and after a long prompt arrives, and the prompt's seconds."""
    gaps: dict[str, list[float]] = {"alone": [], "beside": []}
    stream = Sequence(next(IDS), text(100), SamplingParams(max_tokens=400, ignore_eos=True))
    long = Sequence(next(IDS), text(LENGTHS[-1]), SamplingParams(max_tokens=1, ignore_eos=True))
    engine.add(stream)
    last = started = time.perf_counter()
    seen = 0
    while not long.done:
        engine.step()
        if len(stream.generated) > seen:
            now, seen = time.perf_counter(), len(stream.generated)
            gaps["alone" if long not in engine.scheduler.running else "beside"].append(1e3 * (now - last))
            last = now
            if seen == 100:
                engine.add(long)
                started = now
    engine.cancel(stream)
    return gaps, round(time.perf_counter() - started, 3)


def exact(report: dict[str, Any]) -> None:
    """32,768 tokens in chunks of several sizes: the same K and V, the same text with and without drafts."""
    tokens, found = text(LENGTHS[-1]), []
    for settings in (
        {"drafter": "off", "k": 0}, {"drafter": "off", "k": 0, "max_rows": 512, "prompt_rows": 512},
        {"drafter": "ngram", "k": 8, "prompt_rows": 1000}, {"drafter": "suffix", "k": 8},
        {"drafter": "ngram", "k": 8, "prompt_rows": 8192},
    ):  # fmt: skip
        engine = engine_of(**settings)
        kept: list[Tensor] = []
        drop = engine.cache.drop_retired

        def keep(engine: Engine = engine, kept: list[Tensor] = kept, drop: Callable[[], None] = drop) -> None:
            slots = next(iter(engine.cache.retired.values())).slots[: len(tokens)]
            plane = engine.target.plane
            kept += [kv[slots].clone() for kv in (plane.k[0], plane.k[15], plane.v[29])]
            drop()

        engine.cache.drop_retired = keep  # type: ignore[method-assign]
        guess = found[0][0] if len(found) == 4 else None  # a draft that is right
        seq, taken = answer(engine, tokens, 64, guess)
        found.append((seq.generated, kept))
        name = " ".join(str(value) for value in settings.values())
        report[name] = {
            "text": seq.generated == found[0][0], "seconds": round(taken, 3), "accepted": seq.stats.accepted,
            "kv_bits": all(torch.equal(a, b) for a, b in zip(kept, found[0][1], strict=True)),
        }  # fmt: skip
        del engine


SECTIONS = {
    "products": products, "attention": attentions, "prompt": prompt, "own_prompt": own_prompt,
    "chunks": chunks, "kernels": kernels, "beside": beside, "exact": exact, "sweep": sweep,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sections", default="products,attention,prompt,kernels,beside,exact")
    parser.add_argument("--compile", nargs=3)
    parser.add_argument("--compiled", action="store_true", help="kernels have been compiled before, by --compile")
    options = parser.parse_args()
    Graphs.warm = Rounds.warm = lambda *given: None  # type: ignore[assignment,method-assign]
    if options.compile:
        kind, part, parts = options.compile
        compile_some(kind, int(part), int(parts))
        return
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    sections = options.sections.split(",")
    report["compile_s"] = 0.0 if sections == ["sweep"] or options.compiled else compile_all("chosen")
    for section in sections:
        start = time.perf_counter()
        SECTIONS[section](report.setdefault(section, {}))
        report[section]["took_s"] = round(time.perf_counter() - start, 1)
        print(section, json.dumps(report[section]), file=sys.stderr, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
