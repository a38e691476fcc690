"""A pass over few rows on a GPU, kernel by kernel, for variants of its layers.

Weights are random and shapes are those of the models named, so that nothing has to be on disk: a pass takes the same
time for any weights. Every pass is one captured graph and ends with a greedy choice. `--check qwen` compares bits: rows
alone, in small passes and in one wide pass.

    python bench/gpu_layers.py --models qwen --variants separate,fused,early --rows 1,16 --profile
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from outrider.backends.cuda import layers as gpu_layers
from outrider.backends.cuda.graphs import SAMPLING
from outrider.backends.cuda.kernels import attend_few, attention, elementwise, fused, matmul, sampling
from outrider.backends.cuda.kernels.launching import EARLY, LAUNCH
from outrider.backends.rows import Rows
from outrider.backends.toy import RandomWeights
from outrider.backends.transformer import Transformer
from outrider.engine.cache import Cache
from outrider.models.config import ModelConfig

DEVICE, DTYPE = "cuda", torch.bfloat16
FLOOR = 3.79e12  # bytes a second that a large product of one row reaches


def config(hidden: int, inner: int, layers: int, heads: int, kv: int, dim: int, vocab: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, layers=layers,
        heads=heads, kv_heads=kv, head_dim=dim, norm_eps=1e-6, rope_theta=10_000.0, tied=tied, context_length=2048,
        eos_ids=frozenset({0}),
    )  # fmt: skip


MODELS = {
    "smollm2": config(576, 1536, 30, 9, 3, 64, 49152, True),
    "qwen": config(1536, 8960, 28, 12, 2, 128, 151936, True),
    "twin": config(4608, 13824, 30, 36, 12, 64, 49152, False),
}
BIASED = {"qwen"}
# name -> settings: whether layers are fused (None: by default), what starts early, constants of `fused`
VARIANTS: dict[str, dict[str, Any]] = {
    "separate": {"fused": False, "early": frozenset()},
    "separate-early": {"fused": False},
    **{
        f"separate-but-{name}": {"fused": False, "early": EARLY - {name}}
        for name in ("attend", "norm", "product", "rope")
    },
    "separate-ahead-0": {"fused": False, "AHEAD": 0},
    "separate-ahead-16": {"fused": False, "AHEAD": 16},
    "fused": {"early": frozenset()},
    "early": {},
    "default": {"fused": None},  # as the model would run
    "default-attend-triton": {"fused": None, "FEW": False},
    **{
        f"early-but-{name}": {"early": EARLY - {name}}
        for name in ("activated", "added", "attend", "product", "rotated")
    },
    "depth-8": {"DEPTH": 8},
    "attend-triton": {"FEW": False},
    "separate-attend-triton": {"fused": False, "FEW": False},
    "small-8": {"MOST_ROWS": 8},
    "small-0": {"MOST_ROWS": 0},
    "gate-whole": {"SLICED_GATES": 0},
    "gate-sliced": {"SLICED_GATES": 1 << 20},
    "gate-12": {"GATE_DEPTH": 12},
    "gate-6": {"GATE_DEPTH": 6},
    "gate-w8": {"GATE_WARPS": 8},
    "gate-w2": {"GATE_WARPS": 2},
    "gate-w1": {"GATE_WARPS": 1},
    "gate-w1-12": {"GATE_WARPS": 1, "GATE_DEPTH": 12},
    "gate-w1-16": {"GATE_WARPS": 1, "GATE_DEPTH": 16},
}


class DeviceWeights(RandomWeights):
    """Random weights, drawn on the device, with biases for q, k and v if the model has them."""

    def __init__(self, config: ModelConfig, biased: bool) -> None:
        super().__init__(config, 1)
        self.biased = biased

    def has(self, name: str) -> bool:
        return super().has(name) or (self.biased and name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")))

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        shape = self._shape(name)
        if name.endswith(".bias"):
            return torch.randn(shape[0], dtype=dtype, device=DEVICE)
        if len(shape) == 1:
            return torch.rand(shape, dtype=dtype, device=DEVICE) + 0.5
        return torch.randn(shape, dtype=dtype, device=DEVICE) / shape[1] ** 0.5


class Scene:
    """A model and one sequence of random tokens."""

    def __init__(self, name: str, length: int) -> None:
        torch.manual_seed(1)
        config = replace(MODELS[name], context_length=length)
        self.prepare(Transformer(config, DeviceWeights(config, name in BIASED), DTYPE, DEVICE), length)

    def prepare(self, model: Transformer, length: int) -> None:
        self.model, self.config, self.length = model, model.config, length
        self.default, self.fused = self.model.fused, gpu_layers.suits(self.model)
        device = self.model.device
        self.plane = Cache(length, 1, length, device).add_plane(*self.model.plane_shape)
        for plane in (*self.plane.k, *self.plane.v):
            plane.normal_()
        self.tokens = torch.randint(0, self.config.vocab_size, (length,), device=device)
        self.table = torch.arange(length, dtype=torch.int32, device=device)[None].contiguous()
        self.scratch = attention.Scratch(64, self.config.heads, self.config.head_dim, length, device)

    def rows(self, start: int, count: int) -> Rows:
        """Tokens start to start + count of the sequence."""
        device, most = self.model.device, attention.rows_per_block(self.config.heads, self.config.kv_heads)
        info = [[i, min(most, count - i), 0, self.length, start + i + 1, 0, 0, 0] for i in range(0, count, most)]
        tail = torch.zeros(len(info), 16, dtype=torch.int32, device=device)
        blocks = attention.Blocks(torch.tensor(info, dtype=torch.int32, device=device), tail, self.table, self.scratch)
        at = torch.arange(start, start + count, device=device)
        want = torch.arange(count, device=device)
        return Rows(self.tokens[at].clone(), at, at.clone(), at, at, self.table, None, want, blocks=blocks)

    def work(self, count: int, context: int) -> Callable[[], Tensor]:
        rows = self.rows(context, count)
        laws = sampling.Laws(*(torch.zeros(count, dtype=t, device=DEVICE) for t in SAMPLING.values()))

        def go() -> Tensor:
            logits = self.model.forward(rows, self.plane).logits
            return sampling.choose(logits, laws, False)[0]

        return go


def captured(go: Callable[[], Any]) -> Any:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        go()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        graph.result = go()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def milliseconds(graph: Any, seconds: float) -> float:
    """The median of as many replays as fit."""
    taken: list[float] = []
    start = time.perf_counter()
    for _ in range(3):
        graph.replay()
    while len(taken) < 10 or (time.perf_counter() - start < seconds and len(taken) < 300):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return median(taken)


def use(scene: Scene, variant: dict[str, Any]) -> None:
    defaults = {"DEPTH": 12, "GATE_DEPTH": 8, "GATE_WARPS": 4, "SLICED_GATES": 2048}
    for name, value in defaults.items():
        setattr(fused, name, variant.get(name, value))
    matmul.AHEAD = variant.get("AHEAD", 8)
    attend_few.USE.on = variant.get("FEW", True)
    LAUNCH.early = variant.get("early", EARLY)
    model = scene.model
    wanted = variant.get("fused", True)
    wanted = scene.default is not None if wanted is None else wanted
    model.fused = gpu_layers.FusedLayers(model) if wanted and scene.fused else None
    if model.fused is not None:
        model.fused.most_rows = variant.get("MOST_ROWS", 16)


def profile(graph: Any) -> list[tuple[str, int, float]]:
    """Kernels of one replay: name, count, µs each."""
    from torch.profiler import ProfilerActivity, profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        spent[event.name[:60]].append(event.device_time)
    rows = [(name, len(times), sum(times) / len(times)) for name, times in spent.items()]
    return sorted(rows, key=lambda row: -row[1] * row[2])


# ------------------------------------------------------------ bits


def different(a: Tensor, b: Tensor) -> float:
    return float((a != b).float().mean())


def packed(x: Tensor) -> Tensor:
    """Rows as small kernels read them."""
    return elementwise.add_gain(x.float(), None, torch.ones(x.shape[1], device=DEVICE), 0.0, DTYPE, packs=True)[0]


def product_bits(name: str) -> dict[str, float]:
    """Shares of sums that differ: instructions of a warp group against those of a warp, and against `fused`."""
    c = MODELS[name]
    found = {}
    for ins, outs in ((c.hidden_size, c.hidden_size), (c.intermediate_size, c.hidden_size)):
        slices = fused.slices(outs, ins)
        x, w = (torch.randn(n, ins, dtype=DTYPE, device=DEVICE) for n in (16, outs))
        parts = slices.parts
        wide = matmul.Parts(matmul.product(x.repeat(16, 1), w, matmul.Tiling(64, parts, 5))).total()[:16]
        narrow = matmul.Parts(matmul.product(x, w, matmul.Tiling(64, parts, 5))).total()
        warp = matmul.Parts(matmul.product(x, w, matmul.Tiling(32, parts, 3))).total()
        ours, one = torch.zeros(16, outs, device=DEVICE), torch.zeros(1, outs, device=DEVICE)
        fused.added(packed(x), w, None, slices, ours, None)
        fused.added(packed(x[3:4]), w, None, slices, one, None)
        exact = x.double() @ w.double().T
        found |= {
            f"{ins} wide-narrow": different(wide, narrow), f"{ins} warp-narrow": different(warp, narrow),
            f"{ins} fused-narrow": different(ours, narrow), f"{ins} fused-warp": different(ours, warp),
            f"{ins} fused one-sixteen": different(one, ours[3:4]),
            f"{ins} error fused": float((ours.double() - exact).norm() / exact.norm()),
            f"{ins} error narrow": float((narrow.double() - exact).norm() / exact.norm()),
        }  # fmt: skip
    return found


def pass_bits(scene: Scene, count: int = 60) -> dict[str, float]:
    """Shares of logits and of K/V that differ between one wide pass and small ones."""
    wide = scene.model.forward(scene.rows(0, count), scene.plane).logits.clone()
    planes = [plane[:count].clone() for plane in (*scene.plane.k, *scene.plane.v)]
    found: dict[str, float] = {}
    for sizes in ((1,), (3, 8), (16,), (9, 1, 17), (60,)):
        attend_few.USE.on = sizes != (60,)  # triton's attention in the last ones
        for plane in (*scene.plane.k, *scene.plane.v):
            plane.fill_(float("nan"))
        logits, start, turn = [], 0, 0
        while start < count:
            n = min(sizes[turn % len(sizes)], count - start)
            logits.append(scene.model.forward(scene.rows(start, n), scene.plane).logits.clone())
            start, turn = start + n, turn + 1
        again = [plane[:count] for plane in (*scene.plane.k, *scene.plane.v)]
        found[f"logits {sizes}"] = different(torch.cat(logits), wide)
        found[f"planes {sizes}"] = max(different(a, b) for a, b in zip(again, planes, strict=True))
    attend_few.USE.on = True
    return found


def replay_bits(scene: Scene) -> dict[str, float]:
    """Shares of logits of recorded passes, whose kernels start early, that differ from those of single launches."""
    found = {}
    for plane in (*scene.plane.k, *scene.plane.v):
        plane.normal_()
    for count in (1, 16):
        rows = scene.rows(128, count)
        single = scene.model.forward(rows, scene.plane).logits.clone()
        graph = captured(lambda rows=rows: scene.model.forward(rows, scene.plane).logits)
        found[f"replayed {count}"] = 0.0
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            found[f"replayed {count}"] = max(found[f"replayed {count}"], different(graph.result, single))
    return found


# ------------------------------------------------------------ the program


def floor_ms(scene: Scene) -> float:
    c = scene.config
    layer = c.hidden_size * (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.hidden_size * c.intermediate_size
    return 2 * (c.layers * layer + c.vocab_size * c.hidden_size) / FLOOR * 1e3


def timings(scene: Scene, options: argparse.Namespace) -> dict[str, Any]:
    graphs, found = {}, {}
    for variant in options.variants:
        use(scene, VARIANTS[variant])
        for rows in options.rows:
            try:
                graphs[variant, rows] = captured(scene.work(rows, options.context))
            except Exception as error:  # one variant must not take the others with it
                print(f"{variant} with {rows} rows: {error}"[:400], flush=True)
    best: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(options.rounds):  # in turn, so that a slow moment of the card meets all variants
        for key, graph in graphs.items():
            best[key].append(milliseconds(graph, options.seconds))
    floor = floor_ms(scene)
    for variant in options.variants:
        times = {rows: min(best[variant, rows]) for rows in options.rows if (variant, rows) in best}
        if not times:
            continue
        found[variant] = {str(rows): round(ms, 4) for rows, ms in times.items()}
        first = next(iter(times.values()))
        shown = "  ".join(f"{rows}: {ms:.3f}" for rows, ms in times.items())
        last = list(times.values())[-1]
        print(f"  {variant:22} {shown} ms; floor {floor / first:5.1%}; last ÷ first {last / first:.3f}", flush=True)
    if options.profile:
        for variant in options.profile:
            for rows in (1, 16):
                if (variant, rows) in graphs:
                    found[f"kernels {variant} {rows}"] = kernels = profile(graphs[variant, rows])[:10]
                    print(f"  kernels of {variant}, {rows} rows")
                    for name, count, each in kernels:
                        print(f"    {name:60} {count:5} × {each:7.2f} µs")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    parser.add_argument("--models", type=split, default=list(MODELS))
    parser.add_argument("--variants", type=split, default=["separate", "fused", "early"])
    parser.add_argument("--rows", type=lambda text: [int(n) for n in split(text)], default=[1, 4, 8, 16])
    parser.add_argument("--context", type=int, default=128, help="tokens before the rows")
    parser.add_argument("--seconds", type=float, default=0.15, help="for each variant, number of rows and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", type=split, default=[], help="variants whose kernels are listed")
    parser.add_argument("--check", type=split, default=[], help="models whose bits are compared")
    parser.add_argument("--compile", action="store_true", help="only compile: several such processes run side by side")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.models:
        start = time.perf_counter()
        scene = Scene(name, 2048)
        if options.compile:
            for variant in options.variants:
                use(scene, VARIANTS[variant])
                for rows in (1, 16):
                    scene.work(rows, options.context)()
            if name in options.check:
                use(scene, VARIANTS["early"])
                pass_bits(scene)
            continue
        print(
            f"{name}: floor {floor_ms(scene):.3f} ms, fused layers by default: {scene.default is not None}", flush=True
        )
        found = results[name] = timings(scene, options)
        if name in options.check:
            found["agrees"] = gpu_layers.FusedLayers(scene.model).agrees()
            c = scene.config
            shape = attend_few.Heads(c.heads, c.kv_heads, c.head_dim)
            found["attention agrees"] = attention.few_agree(shape, scene.model.device)
            print(f"  layers agree: {found['agrees']}, attention agrees: {found['attention agrees']}", flush=True)
            use(scene, VARIANTS["early"])
            found["bits"] = product_bits(name) | pass_bits(scene) | replay_bits(scene)
            print("  bits that differ:", {k: f"{v:.2g}" for k, v in found["bits"].items()}, flush=True)
        print(f"  {time.perf_counter() - start:.1f} s", flush=True)
        del scene
        torch.cuda.empty_cache()
    print(json.dumps({"device": torch.cuda.get_device_name(), "context": options.context, "ms": results}))


if __name__ == "__main__":
    main()
