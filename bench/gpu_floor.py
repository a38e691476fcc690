"""Memory bandwidth, the floor it sets for a pass, and how near plain decoding comes to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from gpu_common import Lab, pass_costs, sweep_up
from gpu_race import contender, figures, race
from outrider.backends.loaded_weights import pass_bytes

ROWS = (1, 2, 4, 8, 16, 32)
PRODUCT_ROWS = (1, 4, 8, 16, 32, 64)
SEQUENCES = (1, 4, 16, 64)
IN, OUT, WEIGHTS = 4096, 14336, 16  # 16 weights of 117 MB each: none stays in a cache until its next use


def timed(go: Callable[[], object], device: str, repeats: int = 9) -> float:
    """Median seconds; on a GPU by the device's clock."""
    taken = []
    go()
    for _ in range(repeats):
        if device == "cpu":
            begin = time.perf_counter()
            go()
            taken.append(time.perf_counter() - begin)
            continue
        begin_at, end_at = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin_at.record()
        go()
        end_at.record()
        torch.cuda.synchronize()
        taken.append(begin_at.elapsed_time(end_at) / 1e3)
    return median(taken)


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a copy, reads and writes together."""
    size = 1 << 26 if device == "cpu" else 4 << 30
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device)


def product_seconds(device: str, rows: int) -> float:
    """A bf16 product of that many rows inside a captured graph, its weights read from memory each time."""
    weights = [torch.randn(OUT, IN, dtype=torch.bfloat16, device=device) for _ in range(WEIGHTS)]
    x = torch.randn(rows, IN, dtype=torch.bfloat16, device=device)
    F.linear(x, weights[0])  # cuBLAS initialises outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            F.linear(x, weight)
    return timed(graph.replay, device) / WEIGHTS


def floor(lab: Lab) -> dict[str, Any]:
    """Bandwidths, and the lower bound of a pass in seconds; measured once."""
    if "floor_s" in lab.results.get("floor", {}):
        known: dict[str, Any] = lab.results["floor"]
        return known
    found: dict[str, Any] = {"copy_bytes_s": copy_bandwidth(lab.device)}
    best = found["copy_bytes_s"]
    if lab.device != "cpu":
        found["product_s"] = {rows: product_seconds(lab.device, rows) for rows in PRODUCT_ROWS}
        best = found["product_bytes_s"] = IN * OUT * 2 / found["product_s"][1]
    found["weight_bytes"] = pass_bytes(lab.llm.target)
    found["floor_s"] = found["weight_bytes"] / best
    found["floor_tok_s"] = 1 / found["floor_s"]
    sweep_up()
    return found


def floor_section(lab: Lab) -> dict[str, Any]:
    found = dict(floor(lab))
    lab.say(f"copy {found['copy_bytes_s'] / 1e12:.2f} TB/s" + (
        f", a bf16 product with {IN}×{OUT} weights {found['product_bytes_s'] / 1e12:.2f} TB/s (1 row)"
        if "product_bytes_s" in found else "; without a GPU the floor is that of the copy"
    ))  # fmt: skip
    lab.say(f"{found['weight_bytes'] / 1e9:.2f} GB of weights a pass: "
            f"floor {found['floor_s'] * 1e3:.3f} ms, {found['floor_tok_s']:.1f} tok/s")  # fmt: skip
    if "product_s" in found:
        rows = [(n, s * 1e6, IN * OUT * 2 / s / 1e12) for n, s in found["product_s"].items()]
        lab.table("One product", ("rows", "µs", "TB/s"), rows)
    wide = max(SEQUENCES) if lab.device != "cpu" else 1
    costs = pass_costs(lab.using("off", batch=wide, tokens=wide * 128 if wide > 1 else 0), SEQUENCES)
    found["pass_s"] = {str(n): {str(r): s for (m, r), s in sorted(costs.items()) if m == n} for n, _ in costs}
    shown = [(n, costs[1, n] * 1e3, found["floor_s"] / costs[1, n]) for n in ROWS if (1, n) in costs]
    lab.table("t(n): a target pass, one sequence", ("rows", "ms", "floor ÷ t"),
              [(n, ms, f"{share:.1%}") for n, ms, share in shown])  # fmt: skip
    if (1, 16) in costs:
        found["t16_over_t1"] = costs[1, 16] / costs[1, 1]
        lab.say(f"t(16) ÷ t(1) = {found['t16_over_t1']:.3f}")
    several = [(m, r, s * 1e3) for (m, r), s in sorted(costs.items()) if m > 1]
    if several:
        lab.table("t(n): several sequences", ("sequences", "rows in all", "ms"), several)
    return found


def plain_section(lab: Lab) -> dict[str, Any]:
    plain = contender(lab, "plain", "off")
    rounds = race(lab, [plain], lab.sample(), lab.options.tokens, lab.options.rounds)
    found = figures(plain)
    limit = floor(lab)["floor_tok_s"]
    found |= {"floor_tok_s": limit, "share_of_floor": (found["tok_s"] or 0) / limit, "whole_rounds": rounds}
    lab.table(
        "Plain decoding, one sequence",
        ("tok/s", "median of prompts", "whole requests", "floor", "of the floor"),
        [
            (
                *(found[name] for name in ("tok_s", "median_tok_s", "request_tok_s")),
                limit,
                f"{found['share_of_floor']:.1%}",
            )
        ],
    )
    return found
