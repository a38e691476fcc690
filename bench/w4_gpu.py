"""Weights of four to eight bits on one GPU: are the kernels right, what does a product cost, and what a pass?

    python bench/w4_gpu.py                                   # 7.04B and Qwen2.5-Coder-1.5B shapes, random weights
    python bench/w4_gpu.py --qwen qwen2.5-coder-1.5b-q4_k_m.gguf
    python bench/w4_gpu.py --sections passes --pass-rows 1,4,16

1. `kernels`: every kind of weight, 1 to 130 rows: the error against float64, and whether a row has the same bits alone
   and among others. `fields` are CUDA kernels, `packed` triton's.
2. `products`: µs for each shape of the two models by rows, beside bfloat16's; weights come from memory.
3. `passes`: a captured pass of 1, 4, 16 and 64 rows, the checkpoint's own bits against bfloat16.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from outrider.backends import WHOLE
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import Graphs, PassShape, RecordedPass
from outrider.backends.cuda.kernels import fields, matmul
from outrider.backends.cuda.kernels.fields import Tiled
from outrider.backends.cuda.kernels.packed import PackedProduct
from outrider.backends.cuda.packing import PackedTransformer, pack_blocks, pack_groups
from outrider.backends.cuda.state import DEPTHS, DeviceState
from outrider.backends.transformer import Transformer
from outrider.engine.cache import Cache
from outrider.models.config import SILU, ModelConfig
from outrider.models.precision import GGUF, INT4
from outrider.models.quantised import Grouped
from w4 import Random, RandomFile, Rounded, random_blocks

DEVICE = "cuda"
BLOCKS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
GROUPED = ("int4", "int4b", "int8", "fp8")
COUNTS = (1, 4, 16, 64, 512)  # rows of products
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 130)
SEVEN = ModelConfig(
    architecture="llama", vocab_size=49152, hidden_size=4608, layers=30, heads=36, kv_heads=12, head_dim=64,
    intermediate_size=13824, norm_eps=1e-5, rope_theta=1e5, context_length=2048, tied=False,
)  # fmt: skip
QWEN = ModelConfig(
    architecture="qwen2", vocab_size=151936, hidden_size=1536, layers=28, heads=12, kv_heads=2, head_dim=128,
    intermediate_size=8960, norm_eps=1e-6, rope_theta=1e6, context_length=2048, tied=False, qkv_bias=True,
)  # fmt: skip
MODELS = {"7b": SEVEN, "qwen": QWEN}


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


def exact_weight(kind: str, outputs: int, inputs: int) -> tuple[Any, Tensor]:
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


# ---------------------------------------------------------------- kernels


def kernels(options: argparse.Namespace) -> dict[str, Any]:
    """Errors against float64, and bits by the number of rows."""
    found: dict[str, Any] = {}
    print("kind   kernel  product  gated    bits of a row")
    for kind in options.kinds:
        w, values = exact_weight(kind, 192, 1792)
        x = torch.randn(max(ROWS), 1792, generator=dice(5), device=DEVICE).bfloat16()
        product, kernel = PackedProduct([w]), "fields" if isinstance(w, Tiled) else "packed"
        if kernel == "packed":  # rounds a weight to the type of the rows, as a product of floats reads it
            values = values.to(torch.bfloat16).double()
        exact = x.double() @ values.T
        error = float((product(x).total().double() - exact).norm() / exact.norm())
        gate, up = exact.chunk(2, 1)
        gated = torch.nn.functional.silu(gate) * up
        gated_error = float((product.gated(x).double() - gated).norm() / gated.norm())
        different = [n for n in ROWS if not _same(product, x, n)]
        good = error < 1e-4 and gated_error < 5e-3 and not different
        found[kind] = {"kernel": kernel, "error": error, "gated_error": gated_error, "good": good}
        found[kind]["rows_that_differ"] = different
        bits = f"DIFFER at {different}" if different else "equal"
        print(f"{kind:6} {kernel:7} {error:.1e}  {gated_error:.1e}  {bits}", flush=True)
    return found


def _same(product: PackedProduct, x: Tensor, n: int) -> bool:
    """Whether n rows from somewhere have the bits that they have among all."""
    start = (7 * n) % (x.shape[0] - n + 1)
    rows = x[start : start + n].contiguous()
    parts = torch.equal(product(rows).parts, product(x).parts[:, start : start + n])
    return parts and torch.equal(product.gated(rows), product.gated(x)[start : start + n])


# ---------------------------------------------------------------- products


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


def products(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds by shape and rows, and bfloat16's."""
    found: dict[str, Any] = {}
    print(f"µs of a product by rows {options.counts}, and × bfloat16; TB/s of its bytes at the fewest rows")
    for shape in SHAPES:
        made = [PackedProduct([random_weight(shape)])]
        size = sum(tensor.nbytes for tensor in vars(made[0].weights[0]).values() if isinstance(tensor, Tensor))
        while len(made) * size < 240e6 and len(made) < 32:  # none stays in a cache until its next use
            made.append(PackedProduct([random_weight(shape)]))
        rows = {n: torch.randn(n, shape.inputs, device=DEVICE).bfloat16() for n in options.counts}
        floats = _bf16(shape, rows)
        found[shape.name] = {"kind": shape.kind, "bytes": size, "bf16_us": {n: 1e6 * s for n, s in floats.items()}}
        fields.prepare(made[0].variants(SILU if shape.gated else None), torch.device(DEVICE, 0))
        own = {n: seconds(partial(_each, made, x, shape.gated), 5) / len(made) for n, x in rows.items()}
        found[shape.name]["us"] = {n: 1e6 * s for n, s in own.items()}
        shown = " ".join(f"{1e6 * s:7.1f}" for s in own.values())
        ratios = " ".join(f"{floats[n] / s:.2f} ×" for n, s in own.items())
        print(f"{shape.name:13} {type(made[0].weights[0]).__name__:6} {shape.kind:5} {size / 1e6:6.1f} MB {shown}   "
              f"{size / own[options.counts[0]] / 1e12:.2f} TB/s   {ratios}", flush=True)  # fmt: skip
        del made
        gc.collect()
        torch.cuda.empty_cache()
    return found


def random_weight(shape: Shape) -> Any:
    if shape.kind in BLOCKS:
        return pack_blocks(random_blocks(shape.kind, shape.outputs, shape.inputs, dice()), shape.kind)
    draw = torch.randint(0, 256, (shape.outputs, shape.inputs), generator=dice(), device=DEVICE, dtype=torch.uint8)
    scale = torch.full((shape.outputs, shape.inputs // 128), 0.01, device=DEVICE)
    if shape.kind == "int8":
        return pack_groups(Grouped(draw.view(torch.int8), scale, None, 128))
    return pack_groups(Grouped(draw & 15, scale.to(torch.float16), None, 128, 4))


def _each(products: list[Any], x: Tensor, gated: bool) -> None:
    for product in products:
        product.gated(x) if gated else product(x)


def _bf16(shape: Shape, rows: dict[int, Tensor]) -> dict[int, float]:
    """Seconds of the product of floats."""
    weight = torch.randn(shape.outputs, shape.inputs, device=DEVICE, dtype=torch.bfloat16)
    copies = max(1, min(8, int(240e6 / weight.nbytes)))
    products = [matmul.Product(weight.clone()) for _ in range(copies)]

    return {n: seconds(partial(_each, products, x, shape.gated), 5) / copies for n, x in rows.items()}


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


def passes(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in options.models:
        config = MODELS[name]
        low, own = low_bits(name, config)
        if name == "qwen" and options.qwen:
            from outrider.models.checkpoint import open_checkpoint

            checkpoint = open_checkpoint(options.qwen)
            config, low = checkpoint.config, checkpoint.weights
        model: Any = _floats(config)
        timed: dict[str, Any] = {"bf16": pass_seconds(model, options.pass_rows)}
        _show(name, "bf16", timed)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        model = PackedTransformer(config, low, own, DEVICE, 512)
        timed[own] = pass_seconds(model, options.pass_rows)
        _show(name, own, timed)
        found[name] = timed
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _show(name: str, form: str, timed: dict[str, Any]) -> None:
    shown = " ".join(f"{n}: {1e3 * s:.3f} ms" for n, s in timed[form].items())
    ratios = " ".join(f"{n}: {timed['bf16'][n] / s:.2f} ×" for n, s in timed[form].items())
    print(f"{name:5} {form:5} {shown}   {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qwen", type=Path, help="Qwen2.5-Coder-1.5B, Q4_K_M; default: random blocks of its types")
    split = lambda text: tuple(part for part in text.split(",") if part)  # noqa: E731
    whole = lambda text: tuple(int(part) for part in split(text))  # noqa: E731
    parser.add_argument("--sections", type=split, default=("kernels", "products", "passes"))
    parser.add_argument("--kinds", type=split, default=(*BLOCKS, *GROUPED), help="of the kernels")
    parser.add_argument("--models", type=split, default=tuple(MODELS), help="of the passes")
    parser.add_argument("--counts", type=whole, default=COUNTS, help="rows of products")
    parser.add_argument("--pass-rows", type=whole, default=(1, 4, 16, 64))
    options = parser.parse_args()
    begin = time.perf_counter()
    facts: dict[str, Any] = {"bench": "w4_gpu", "command": " ".join(["python", *sys.argv])}
    facts |= {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    sections = {
        "kernels": partial(kernels, options),
        "products": partial(products, options),
        "passes": partial(passes, options),
    }
    for section in options.sections:
        facts[section] = attempt(section, sections[section], begin)
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
