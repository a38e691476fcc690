"""Four-bit weights on one GPU: are the kernels right, which tiles are fastest, and what is a pass?

    python bench/w4_gpu.py                                   # 7.04B and Qwen2.5-Coder-1.5B shapes, random weights
    python bench/w4_gpu.py --qwen qwen2.5-coder-1.5b-q4_k_m.gguf --seconds 150

1. `kernels`: every kind of weight, 1 to 130 rows, compiled for this card: the error against float64, and whether a row
   has the same bits alone and among others.
2. `tiles`: seconds of a product for each candidate of `packed.Tiling`, beside bfloat16's; weights come from memory.
3. `passes`: a captured pass of 1, 4, 16 and 64 rows, four bits against bfloat16, with the best tiles.
Kernels are compiled by as many processes as there are cores. Sections stop in time; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from outrider.backends import WHOLE
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import Graphs, PassShape, RecordedPass
from outrider.backends.cuda.kernels import matmul, packed
from outrider.backends.cuda.kernels.packed import SCHEMES, Packed, PackedProduct, Tiling
from outrider.backends.cuda.packing import PackedTransformer, pack_blocks, pack_groups
from outrider.backends.cuda.state import DEPTHS, DeviceState
from outrider.backends.transformer import Transformer
from outrider.engine.cache import Cache
from outrider.models.config import ModelConfig
from outrider.models.precision import GGUF, INT4
from outrider.models.quantised import Grouped
from w4 import Random, RandomFile, Rounded, random_blocks

DEVICE = "cuda"
BLOCKS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
GROUPED = ("int4", "int4b", "int8", "fp8")
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 130)
SEVEN = ModelConfig(
    architecture="llama", vocab_size=49152, hidden_size=4608, layers=30, heads=36, kv_heads=12, head_dim=64,
    intermediate_size=13824, norm_eps=1e-5, rope_theta=1e5, context_length=2048, tied=False,
)  # fmt: skip
QWEN = ModelConfig(
    architecture="qwen2", vocab_size=151936, hidden_size=1536, layers=28, heads=12, kv_heads=2, head_dim=128,
    intermediate_size=8960, norm_eps=1e-6, rope_theta=1e6, context_length=2048, tied=False, qkv_bias=True,
)  # fmt: skip
CANDIDATES = [
    Tiling(32, 4, 3), Tiling(32, 4, 2), Tiling(32, 4, 3, registers=128), Tiling(32, 4, 2, registers=128),
    Tiling(32, 2, 3), Tiling(32, 2, 2, registers=128), Tiling(32, 8, 2), Tiling(32, 8, 2, registers=128),
    Tiling(16, 4, 3), Tiling(16, 8, 2), Tiling(64, 2, 3), Tiling(64, 4, 2),
]  # fmt: skip
WIDE = [Tiling(32, 4, 3, rows=32), Tiling(32, 4, 3, rows=64), Tiling(64, 2, 3, rows=32)]  # for 64 rows
PROGRAMS = ((2.0, 1), (4.0, 1))  # for each processor; steps of a slice, at least
MODELS = {"7b": SEVEN, "qwen": QWEN}
_TABLE = dict(packed.TILINGS)


@dataclass(frozen=True)
class Shape:
    """A weight of a model."""

    name: str
    kind: str
    outputs: int
    inputs: int
    gated: bool = False


SHAPES = [
    Shape("7b gate_up", "int4", 27648, 4608, True), Shape("7b down", "int4", 4608, 13824),
    Shape("7b qkv", "int4", 3840, 4608), Shape("qwen gate_up", "Q4_K", 17920, 1536, True),
    Shape("qwen down", "Q4_K", 1536, 8960), Shape("qwen qkv", "Q4_K", 2048, 1536),
    Shape("qwen down 6", "Q6_K", 1536, 8960), Shape("qwen head", "Q6_K", 151936, 1536),
    Shape("8 bits", "int8", 4608, 13824),
]  # fmt: skip


def dice(seed: int = 1) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def random_words(shape: Shape) -> Packed:
    """A weight with random fields: enough to time it."""
    s = SCHEMES[shape.kind]
    steps, group = (
        -(-shape.inputs // s.step),
        0 if s.infos else 128 if s.bits == 4 else -(-shape.inputs // s.step) * s.step,
    )
    wide, rows = steps * s.plane, steps * s.infos if s.infos else steps * s.step // group + 1
    words = torch.randint(-(1 << 31), 1 << 31, (shape.outputs, wide), dtype=torch.int32, device=DEVICE)
    high = None
    if s.extra:
        kind = torch.uint8 if s.extra == 1 else torch.int16
        high = torch.randint(0, 256, (shape.outputs, wide), device=DEVICE).to(kind)
    info = torch.full((rows, shape.outputs), 0x00082000, dtype=torch.int32, device=DEVICE)
    return Packed(shape.kind, words, high, info, shape.inputs, group)


def exact_weight(kind: str, outputs: int, inputs: int) -> tuple[Packed, Tensor]:
    """A random weight as the kernel reads it, and its values [N, K] float64."""
    if kind in BLOCKS:
        raw = random_blocks(kind, outputs, inputs, dice())
        return pack_blocks(raw, kind), values_of(kind, raw)
    draw = torch.randint(0, 256, (outputs, inputs), generator=dice(), device=DEVICE).to(torch.uint8)
    scale = torch.rand((outputs, -(-inputs // 128)), generator=dice(2), device=DEVICE) * 0.05 + 0.01
    if kind == "fp8":
        draw[(draw & 127) == 127] = 0
        w = Grouped(draw.view(torch.float8_e4m3fn), scale, None, 128)
    elif kind == "int8":
        w = Grouped(draw.view(torch.int8), scale, None, 128)
    else:
        zero = torch.randint(0, 16, scale.shape, generator=dice(3), device=DEVICE)
        w = Grouped(draw & 15, scale.to(torch.float16 if kind == "int4" else torch.bfloat16), zero, 128, 4)
    return pack_groups(w), w.floats(torch.float64)


def values_of(kind: str, raw: Tensor) -> Tensor:
    """GGUF's blocks by their definition, element by element, in float64."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
    b = raw.view(raw.shape[0], -1, size)
    byte = b.long()

    def half(at: int) -> Tensor:
        return b[..., at : at + 2].contiguous().view(torch.float16).double()  # [N, U, 1]

    if kind == "Q8_0":
        return (half(0) * b[..., 2:].contiguous().view(torch.int8).double()).flatten(1)
    if kind in ("Q4_0", "Q4_1"):
        first = 2 if kind == "Q4_0" else 4
        q = torch.cat([byte[..., first:] % 16, byte[..., first:] // 16], -1).double()
        return (half(0) * (q - 8) if kind == "Q4_0" else half(0) * q + half(2)).flatten(1)
    made = torch.empty(*b.shape[:2], 256, dtype=torch.float64, device=raw.device)
    for i in range(256):
        made[..., i] = _k_value(kind, b, byte, half, i)
    return made.flatten(1)


def _k_value(kind: str, b: Tensor, byte: Tensor, half: Callable[[int], Tensor], i: int) -> Tensor:
    """Weight i of every super-block [N, U]."""
    if kind == "Q6_K":
        part, column, quarter = i // 128, i % 32, i % 128 // 32
        low = byte[..., 64 * part + column + 32 * (quarter % 2)]
        low = low % 16 if quarter < 2 else low // 16
        top = (byte[..., 128 + 32 * part + column] >> (2 * quarter)) % 4
        scale = b[..., 192 + i // 16].view(torch.int8).double()
        return half(208)[..., 0] * scale * (low + 16 * top - 32).double()
    j, first = i // 32, 16 if kind == "Q4_K" else 48
    q = byte[..., first + 32 * (j // 2) + i % 32]
    q = q % 16 if j % 2 == 0 else q // 16
    if kind == "Q5_K":
        q = q + 16 * ((byte[..., 16 + i % 32] >> j) % 2)
    if j < 4:
        scale, least = byte[..., 4 + j] % 64, byte[..., 8 + j] % 64
    else:
        scale = byte[..., 8 + j] % 16 + 16 * (byte[..., j] // 64)
        least = byte[..., 8 + j] // 16 + 16 * (byte[..., 4 + j] // 64)
    return half(0)[..., 0] * (scale * q).double() - half(2)[..., 0] * least.double()


# ---------------------------------------------------------------- compiling


def compile_share(jobs: list[tuple[Any, ...]]) -> int:
    """Run some kernels once, so that they are in the cache of all processes."""
    torch.cuda.init()
    for job in jobs:
        try:
            if isinstance(job[0], str):  # a model's other kernels
                name, form, tilings = job
                packed.TILINGS.clear()
                packed.TILINGS.update(tilings)
                one = replace(MODELS[name], layers=2)
                weights, own = low_bits(name, one)
                pass_seconds(PackedTransformer(one, weights, own, DEVICE, 512) if form else _floats(one), repeats=6)
            else:
                shape, tiling, rows = job
                x = torch.zeros(rows, shape.inputs, dtype=torch.bfloat16, device=DEVICE)
                run(random_words(shape), shape, tiling, x)
        except Exception as error:  # a tile that the card cannot hold; the main process reports it
            print(f"compiling {job}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    torch.cuda.synchronize()
    return len(jobs)


def run(w: Packed, shape: Shape, tiling: Tiling, x: Tensor) -> Tensor:
    """The product with these tiles; parts as `PackedProduct` would choose them."""
    packed.TILINGS[w.kind] = tiling
    if shape.gated:
        out = torch.empty((1, x.shape[0], w.outputs // 2), dtype=x.dtype, device=DEVICE)
    else:
        parts = packed.splits([w], matmul.processors(x.device))
        out = torch.empty((parts, x.shape[0], w.outputs), dtype=torch.float32, device=DEVICE)
    packed.packed_product(x, w, tiling, out, 0, shape.gated)
    return out


def small_jobs(kinds: tuple[str, ...], tilings: dict[str, Tiling]) -> list[tuple[Any, ...]]:
    """Every tile of rows that `kernels` and the passes use."""
    return [
        (Shape("", kind, 192, 768, gated), tilings.get(kind, packed.DEFAULT), rows)
        for kind in kinds
        for gated in (False, True)
        for rows in (8, 16)
    ]


def all_jobs() -> list[tuple[Any, ...]]:
    """The sections' kernels, each once: those of a shape differ by whether its slices have as many steps."""
    wanted: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for shape in SHAPES:
        steps = -(-shape.inputs // SCHEMES[shape.kind].step)
        for tiling in _candidates(shape):
            packed.TILINGS[shape.kind] = tiling
            stub: Any = SimpleNamespace(kind=shape.kind, outputs=shape.outputs, steps=steps)
            parts = 1 if shape.gated else packed.splits([stub], matmul.processors(torch.device(DEVICE, 0)))
            whole = steps % parts == 0 and steps // parts % tiling.slices == 0
            for rows in (64,) if tiling.rows > 16 else (8, 16):
                key = (shape.kind, shape.gated, replace(tiling, programs=0, steps=0), rows, whole)
                wanted[key] = (shape, tiling, rows)
    packed.TILINGS.clear()
    packed.TILINGS.update(_TABLE)
    models = [(name, form, _TABLE) for name in MODELS for form in (False, True)]
    return [*models, *wanted.values(), *small_jobs((*BLOCKS, *GROUPED), _TABLE)]


def best_jobs(kinds: tuple[str, ...], chosen: dict[str, Tiling]) -> list[tuple[Any, ...]]:
    return [*((name, True, chosen) for name in MODELS), *small_jobs(kinds, chosen)]


def compile_all(every: list[tuple[Any, ...]]) -> dict[str, Any]:
    begin, workers = time.perf_counter(), min(14, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        done = sum(pool.map(compile_share, [every[i::workers] for i in range(workers)]))
    print(f"{done} compiled by {workers} processes in {time.perf_counter() - begin:.0f} s")
    return {"kernels": done, "processes": workers, "s": time.perf_counter() - begin}


# ---------------------------------------------------------------- kernels


def kernels(kinds: tuple[str, ...] = (*BLOCKS, *GROUPED)) -> dict[str, Any]:
    """Errors against float64, and bits by the number of rows, with the tiles of `packed.TILINGS`."""
    found: dict[str, Any] = {}
    print("kind   tiles              product  gated    bits of a row")
    for kind in kinds:
        w, values = exact_weight(kind, 192, 768)
        x = torch.randn(max(ROWS), 768, generator=dice(5), device=DEVICE).bfloat16()
        product = PackedProduct([w])
        exact = x.double() @ values.to(torch.bfloat16).double().T
        error = float((product(x).total().double() - exact).norm() / exact.norm())
        gate, up = exact.chunk(2, 1)
        gated = torch.nn.functional.silu(gate) * up
        gated_error = float((product.gated(x).double() - gated).norm() / gated.norm())
        different = [n for n in ROWS if not _same(product, x, n)]
        good = error < 1e-4 and gated_error < 5e-3 and not different
        found[kind] = {"error": error, "gated_error": gated_error, "rows_that_differ": different, "good": good}
        tiles = packed.tiling_of(w)
        print(f"{kind:6} {tiles.outputs:4}/{tiles.slices}/{tiles.stages:<10} {error:.1e}  {gated_error:.1e}  "
              f"{'equal' if not different else f'DIFFER at {different}'}")  # fmt: skip
    return found


def _same(product: PackedProduct, x: Tensor, n: int) -> bool:
    """Whether n rows from somewhere have the bits that they have among all."""
    start = (7 * n) % (x.shape[0] - n + 1)
    rows = x[start : start + n].contiguous()
    parts = torch.equal(product(rows).parts, product(x).parts[:, start : start + n])
    return parts and torch.equal(product.gated(rows), product.gated(x)[start : start + n])


def instructions() -> dict[str, Any]:
    """Whether the two kinds of matrix instructions (four warps: wgmma; two: mma) give the same bits in one order."""
    x = torch.randn(40, 4608, generator=dice(7), device=DEVICE).bfloat16()
    w = torch.randn(640, 4608, generator=dice(8), device=DEVICE).bfloat16()
    made = [matmul.product(x, w, matmul.Tiling(64, 1, stages=3, warps=warps)) for warps in (4, 2)]
    found = {"equal": torch.equal(*made), "largest": float((made[0] - made[1]).abs().max())}
    print(f"wgmma and mma give equal bits: {found}")
    return found


# ---------------------------------------------------------------- tiles


def seconds(work: Callable[[], Any], repeats: int = 9) -> float:
    """Median seconds of captured work."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    taken = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return median(taken[1:])


def tiles(until: float) -> dict[str, Any]:
    """Microseconds of every candidate for every shape, at 1 and 16 rows; and the best tiling of each kind."""
    table: list[dict[str, Any]] = []
    print("µs of a product; TB/s of its bytes at one row")
    for shape in SHAPES:
        weights = [random_words(shape)]
        size = sum(t.nbytes for t in (weights[0].words, weights[0].info, weights[0].high) if t is not None)
        while len(weights) * size < 240e6 and len(weights) < 32:  # none stays in a cache until its next use
            weights.append(replace(weights[0], words=weights[0].words.clone()))
        rows = {n: torch.randn(n, shape.inputs, device=DEVICE).bfloat16() for n in (1, 4, 16, 64)}
        floats = _bf16(shape, rows)
        print(f"{shape.name:13} {shape.kind:5} {size / 1e6:6.1f} MB   bf16 " +
              " ".join(f"{n}: {1e6 * s:.1f}" for n, s in floats.items()))  # fmt: skip
        if shape.kind == "int8":
            plain = _bf16(shape, rows, True)
            print("    int8 as floats lie: " + " ".join(f"{n}: {1e6 * s:.1f}" for n, s in plain.items()))
        for tiling in _candidates(shape):
            if time.perf_counter() > until:
                return {"table": table, "unfinished": shape.name}
            entry: dict[str, Any] = {"shape": shape.name, "kind": shape.kind, **asdict(tiling), "bf16": floats}
            name = f"{tiling.outputs:3}/{tiling.slices}/{tiling.stages}/{tiling.registers or '-':<3} r{tiling.rows}"
            try:
                counts = (64,) if tiling.rows > 16 else (1, 4, 16, 64)
                entry |= {f"s{n}": product_seconds(weights, shape, tiling, rows[n]) for n in counts}
            except Exception as error:
                entry["failed"] = f"{type(error).__name__}: {str(error)[:160]}"
                print(f"    {name} {entry['failed'][:100]}")
                continue
            table.append(entry)
            times = " ".join(f"{1e6 * entry[key]:8.1f}" for key in ("s1", "s4", "s16", "s64") if key in entry)
            ratios = " ".join(f"{floats[n] / entry[f's{n}']:.2f} ×" for n in (1, 16, 64) if f"s{n}" in entry)
            speed = f"{size / entry['s1'] / 1e12:.2f} TB/s" if "s1" in entry else ""
            print(f"    {name} ×{tiling.programs:<4} {times}   {speed}   {ratios}", flush=True)
        del weights
        gc.collect()
        torch.cuda.empty_cache()
    return {"table": table}


def product_seconds(weights: list[Packed], shape: Shape, tiling: Tiling, x: Tensor) -> float:
    return seconds(lambda: [run(w, shape, tiling, x) for w in weights]) / len(weights)


def _candidates(shape: Shape) -> Iterator[Tiling]:
    split = not shape.gated and shape.outputs < 20_000
    for tiling in (*CANDIDATES, *(WIDE if shape.kind == "int4" else ())):
        for programs, steps in PROGRAMS if split else PROGRAMS[:1]:
            yield replace(tiling, programs=programs, steps=steps)


def _bf16(shape: Shape, rows: dict[int, Tensor], eight_bits: bool = False) -> dict[int, float]:
    """Seconds of the product of floats; or of int8 weights in the order of floats."""
    weight = torch.randn(shape.outputs, shape.inputs, device=DEVICE, dtype=torch.bfloat16)
    copies = max(1, min(8, int(240e6 / weight.nbytes)))
    products = [matmul.Product(weight.clone(), None, eight_bits) for _ in range(copies)]

    def work(x: Tensor) -> None:
        for product in products:
            product.gated(x) if shape.gated else product(x)

    return {n: seconds(lambda x=x: work(x), 5) / copies for n, x in rows.items()}


def best(table: list[dict[str, Any]]) -> dict[str, Tiling]:
    """For each kind the tiling with the least time over its shapes at 1 and 16 rows, by bfloat16's time."""
    kinds: dict[str, dict[Tiling, dict[str, float]]] = {}
    for e in table:
        if "s1" not in e:
            continue
        tiling = Tiling(**{name: e[name] for name in asdict(Tiling())})
        cost = e["s1"] / e["bf16"][1] + e["s16"] / e["bf16"][16]
        fixed = e["shape"].endswith(("gate_up", "head"))  # not split, whatever `programs` is
        for programs, steps in PROGRAMS if fixed else ((tiling.programs, tiling.steps),):
            kinds.setdefault(e["kind"], {}).setdefault(replace(tiling, programs=programs, steps=steps), {})[
                e["shape"]
            ] = cost
    found = {}
    for kind, options in kinds.items():
        most = max(map(len, options.values()))
        whole = {tiling: sum(costs.values()) for tiling, costs in options.items() if len(costs) == most}
        found[kind] = min(whole, key=lambda tiling: whole[tiling])
        print(f"best for {kind}: {found[kind]}")
    return found


# ---------------------------------------------------------------- passes


def pass_seconds(model: Any, rows: tuple[int, ...] = (1, 4, 16, 64), repeats: int = 30) -> dict[int, float]:
    """Seconds of a captured pass over padding rows, by their number."""
    device = torch.device("cuda", torch.cuda.current_device())
    cache = Cache(4096, 64, 512, device)
    plane = cache.add_plane(*model.plane_shape)
    state = DeviceState(cache, Driver(device), 64)
    graphs, found = Graphs(model, plane, state), {}
    for n in rows:
        recorded = RecordedPass(graphs, PassShape(n, n, DEPTHS[0], False, WHOLE, ()))
        taken = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            recorded.recording.replay()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        found[n] = median(taken[5:])
    return found


def low_bits(name: str, config: ModelConfig) -> tuple[Any, str]:
    return (Rounded(Random(config)), INT4) if name == "7b" else (RandomFile(config), GGUF)


def _floats(config: ModelConfig) -> Transformer:
    return Transformer(config, Random(config), torch.bfloat16, DEVICE, 512)


def passes(options: argparse.Namespace, chosen: dict[str, Tiling]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, config in MODELS.items():
        low, own = low_bits(name, config)
        if name == "qwen" and options.qwen:
            from outrider.models.checkpoint import open_checkpoint

            checkpoint = open_checkpoint(options.qwen)
            config, low = checkpoint.config, checkpoint.weights
        timed: dict[str, dict[int, float]] = {}
        for form in ("bf16", "default tiles", "best tiles"):
            packed.TILINGS.clear()
            packed.TILINGS.update(chosen if form == "best tiles" else _TABLE)
            model: Any = _floats(config) if form == "bf16" else PackedTransformer(config, low, own, DEVICE, 512)
            timed[form] = pass_seconds(model)
            ratios = " ".join(f"{n}: {timed['bf16'][n] / s:.2f} ×" for n, s in timed[form].items())
            shown = " ".join(f"{n}: {1e3 * s:.3f} ms" for n, s in timed[form].items())
            print(f"{name:5} {form:14} {shown}   {ratios}", flush=True)
            del model
            gc.collect()
            torch.cuda.empty_cache()
        found[name] = timed
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qwen", type=Path, help="Qwen2.5-Coder-1.5B, Q4_K_M; default: random blocks of its types")
    parser.add_argument("--seconds", type=float, default=140.0, help="for everything")
    options = parser.parse_args()
    begin = time.perf_counter()
    facts: dict[str, Any] = {"bench": "w4_gpu", "command": " ".join(["python", *sys.argv])}
    facts |= {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    facts["compile"] = attempt("compile", lambda: compile_all(all_jobs()), begin)
    facts["kernels"] = attempt("kernels", kernels, begin)
    facts["instructions"] = attempt("instructions", instructions, begin)
    facts["tiles"] = attempt("tiles", lambda: tiles(begin + 0.6 * options.seconds), begin)
    chosen: dict[str, Tiling] = {}
    facts["best"] = attempt("best tiles", lambda: chosen.update(best(facts["tiles"]["table"])) or {}, begin)
    facts["best"] |= {kind: asdict(tiling) for kind, tiling in chosen.items()}
    packed.TILINGS.clear()
    packed.TILINGS.update(_TABLE | chosen)
    kinds = tuple(kind for kind in chosen if chosen[kind] != packed.DEFAULT)
    facts["compile_best"] = attempt("compile", lambda: compile_all(best_jobs(kinds, chosen)), begin)
    facts["kernels_best"] = attempt("kernels with the best tiles", lambda: kernels(kinds), begin)
    facts["passes"] = attempt("passes", lambda: passes(options, chosen), begin)
    print(json.dumps(facts | {"s": time.perf_counter() - begin}))


def attempt(name: str, section: Callable[[], dict[str, Any]], begin: float) -> dict[str, Any]:
    print(f"---- {name} ({time.perf_counter() - begin:.0f} s)", flush=True)
    try:
        return section()
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:400]}


if __name__ == "__main__":
    main()
