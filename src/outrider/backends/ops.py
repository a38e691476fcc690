"""The small operations of a decoder pass, exact by row: norm, rope, attention, gated activation.

The promise: a row's result is the same bits whichever rows share the call and however many threads run it. Native
kernels (float32 and bfloat16 on a CPU) and those of `cuda` keep it by a fixed order of operations; the torch versions
(any type, any device, slow) by giving each row to calls whose shapes depend on that row alone. The choice between them
depends on types and devices only, never on the number of rows.

It knows rows and planes; it does not know layers, weights' names or sequences. Nothing here records gradients.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ..models.config import CLAMPED, ERF_GELU, GELU, RELU, SILU
from ..models.stages import stage
from .cpu import native
from .rows import Rows

_FLOATS = (torch.float32, torch.bfloat16)
_PLANES = (torch.float32, torch.float16)
_CHUNK = 16384  # torch splits longer calls between threads, and the bits would depend on their number
ACTIVATIONS = (SILU, GELU, CLAMPED, RELU, ERF_GELU)  # their numbers in kernels
Norms = tuple[Tensor, Tensor, float]  # q_weight [d], k_weight [d], eps
Bias = tuple[Tensor, Tensor]  # [heads, D] float32, and shift [T]: a row adds column shift - j to the score of its key j


def backend() -> str:
    """The implementation that runs these operations on a CPU, for diagnostics."""
    kernels = _loaded().kernels
    if kernels is None:
        return f"torch ({_loaded().reason})"
    threads = torch.get_num_threads() if kernels.threaded else 1
    return f"native ({kernels.isa}, {threads} thread{'s' * (threads > 1)})"


def embed(
    tokens: Tensor, table: Tensor, scale: float, dtype: torch.dtype, positions: Tensor | None, added: Tensor | None
) -> Tensor:
    """table[tokens] * scale, [T, H] of `dtype` (on a GPU float32), with added[positions] where positions are embedded
    too."""
    if on_gpu(table):
        return _gpu("elementwise").embed(tokens, table, scale, positions, added)  # type: ignore[no-any-return]
    x = table[tokens].to(dtype)
    x = x if scale == 1.0 else x * scale
    return x if added is None else x + added[positions]


def add_norm(x: Tensor, delta: Any, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x += delta in place; returns rms_norm(x) * weight, or the layer norm of x.

    x [T, H] float32 or float64; delta [T, H] or None (on a GPU unsummed `Parts`); weight [H], or gain and bias of a
    layer norm [2, H]; the result [T, H] is of `dtype`.
    """
    if on_gpu(x):
        return _gpu("elementwise").add_norm(x, delta, weight, eps, dtype)  # type: ignore[no-any-return]
    kernels = _kernels(x, weight) if dtype in _FLOATS and (delta is None or _plain(delta)) else None
    if kernels is None:
        return _add_norm_torch(x, delta, weight, eps, dtype)
    stream, weight = x.contiguous(), weight.contiguous()
    delta = None if delta is None else delta.contiguous()
    out = torch.empty_like(stream, dtype=dtype)  # [T, H]
    gain, bias = (weight, None) if weight.dim() == 1 else weight
    addresses = addresses_of(stream, delta, gain, bias, out)
    halved = delta is not None and delta.dtype is torch.bfloat16
    kernels.add_norm(*addresses, *x.shape, eps, halved, dtype is torch.bfloat16, torch.get_num_threads())
    if stream is not x:
        x.copy_(stream)
    return out


def norm_stream(x: Tensor, delta: Any, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x + delta, normed as in `add_norm`, becomes x; returns it in `dtype`."""
    if on_gpu(x):
        return _gpu("elementwise").add_norm(x, delta, weight, eps, dtype, stream=True)  # type: ignore[no-any-return]
    normed = add_norm(x, delta, weight, eps, x.dtype)
    x.copy_(normed)
    return normed.to(dtype)


def heads_of(q: Any, k_plane: Tensor, v_plane: Tensor, heads: int) -> Tensor:
    """A product's result as queries [T, heads, d] in the planes' type."""
    if on_gpu(k_plane):
        return _gpu("elementwise").heads_of(q, k_plane, v_plane, heads)  # type: ignore[no-any-return]
    queries: Tensor = q.to(k_plane.dtype).view(-1, heads, k_plane.shape[2])
    return queries


def rope_store(
    qkv: Any, cos: Tensor, sin: Tensor, k_plane: Tensor, v_plane: Tensor, slots: Tensor,
    heads: int, kv_heads: int, norms: Norms | None = None,
) -> Tensor:  # fmt: skip
    """Rotate q and k to their positions, write k and v to their slots; returns q [T, heads, d]: float32, or in the
    planes' type where torch or a GPU runs it.

    qkv [T, (heads + 2 kv_heads) d]; cos, sin [T, r/2]: the first r of d dimensions are rotated; slots [T];
    planes [S, kv_heads, d]. With `norms`, each head of q and k is normed before it is rotated.
    """
    if on_gpu(k_plane):
        return _gpu("elementwise").rope_store(qkv, cos, sin, k_plane, v_plane, slots, heads, kv_heads, norms)  # type: ignore[no-any-return]
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    kernels = _kernels(cos, sin, q_norm, k_norm) if _plain(qkv) and _native_planes(k_plane, v_plane) else None
    if kernels is None:
        return _rope_store_torch(qkv, cos, sin, k_plane, v_plane, slots, heads, kv_heads, norms)
    qkv, cos, sin, slots = qkv.contiguous(), cos.contiguous(), sin.contiguous(), contiguous(slots, torch.int64)
    rows, d = qkv.shape[0], k_plane.shape[2]
    q = torch.empty(rows, heads, d)  # [T, heads, d]
    planes = (plane_address(k_plane), plane_address(v_plane))
    addresses = (*addresses_of(qkv, cos, sin, q), *planes, *addresses_of(slots, q_norm, k_norm))
    bf16, threads = qkv.dtype is torch.bfloat16, torch.get_num_threads()
    kernels.rope_store(*addresses, rows, heads, kv_heads, d, cos.shape[1], eps, bf16, threads)
    return q


def keep_stream(x: Tensor, delta: Any, kept: Tensor, slots: Tensor) -> None:
    """x += delta in place, on a GPU; the result is also written to each row's slot of `kept`.

    x [T, H] float32; delta unsummed `Parts` or None; kept [S, H]; slots [T].
    """
    _gpu("elementwise").keep_stream(x, delta, kept, slots)


def attend(
    q: Tensor, k_plane: Tensor, v_plane: Tensor, rows: Rows, scale: float, dtype: torch.dtype, window: int = 0,
    cap: float = 0.0, sinks: Tensor | None = None, bias: Bias | None = None,
) -> Tensor:  # fmt: skip
    """Each row attends to its line's first `context` slots, then to its drafted ancestors: [T, heads * d] of `dtype`.

    q [T, heads, d]; planes [S, kv_heads, d]. window > 0: only the last `window` keys of that list. cap > 0: scores s
    become cap * tanh(s / cap). sinks [heads]: a score of each head that takes its share of weights and adds nothing.
    bias: what the distance to a key adds to its score.
    """
    if on_gpu(q):
        return _gpu("attention").attend(q, k_plane, v_plane, rows.blocks, scale, window, cap, sinks, bias)  # type: ignore[no-any-return]
    added, shift = bias or (None, None)
    kernels = _kernels(q, sinks, added) if dtype in _FLOATS and _native_planes(k_plane, v_plane) else None
    if kernels is None:
        return _attend_torch(q, k_plane, v_plane, rows, scale, dtype, window, cap, sinks, bias)
    q, table, ancestors = q.contiguous(), contiguous(rows.table, torch.int32), rows.ancestors
    lines, context = contiguous(rows.lines, torch.int64), contiguous(rows.context, torch.int64)
    ancestors = None if ancestors is None else contiguous(ancestors, torch.int32)
    depth = 0 if ancestors is None else ancestors.shape[1]
    count, heads, d = q.shape
    out = q.new_empty(count, heads * d, dtype=dtype)  # [T, heads * d]
    planes = (plane_address(k_plane), plane_address(v_plane))
    shift = None if shift is None else contiguous(shift, torch.int64)
    rest = addresses_of(table, lines, context, ancestors, sinks, added, shift, out)
    addresses = (q.data_ptr(), *planes, *rest)
    sizes = (table.shape[1], depth, count, heads, k_plane.shape[1], d, window)
    stride = 0 if added is None else added.shape[1]
    kernels.attend(*addresses, *sizes, scale, cap, stride, dtype is torch.bfloat16, torch.get_num_threads())
    return out


def activate(x: Any, activation: str, dtype: torch.dtype) -> Tensor:
    """activation(x) [T, I] of a product's result: on a GPU unsummed `Parts`, which become `dtype`."""
    if not isinstance(x, Tensor):
        return _gpu("matmul").activate(x, activation, False, dtype)  # type: ignore[no-any-return]
    return gate_mul(x, activation, paired=False)


def gate_mul(gate_up: Tensor, activation: str = SILU, paired: bool = True) -> Tensor:
    """activation(gate) * up [T, I] from [T, 2I], gate first, computed in float32 (in float64 for float64).

    Not paired: activation(x) of [T, I].
    """
    kernels = _kernels() if _plain(gate_up) else None
    if kernels is None:
        return _gate_mul_torch(gate_up, activation, paired)
    gate_up, bf16 = gate_up.contiguous(), gate_up.dtype is torch.bfloat16
    rows, width = gate_up.shape[0], gate_up.shape[1] // (1 + paired)
    out = gate_up.new_empty(rows, width)  # [T, I]
    sizes = (rows, width, bf16, ACTIVATIONS.index(activation), paired, torch.get_num_threads())
    kernels.gate_mul(gate_up.data_ptr(), out.data_ptr(), *sizes)
    return out


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), [R, V] as it came."""
    if on_gpu(logits):
        return cap * torch.tanh(logits / cap)
    out = torch.empty_like(logits)
    for row, capped in zip(logits, out, strict=True):
        for start in range(0, row.shape[0], _CHUNK):
            piece = slice(start, start + _CHUNK)
            capped[piece] = cap * torch.tanh(row[piece] / cap)
    return out


def as_delta(total: Tensor) -> Any:
    """A summed result [T, out] as `add_norm` and `rope_store` take what a product returns."""
    return _gpu("matmul").Parts(total[None]) if on_gpu(total) else total


def fused_layers(model: Any) -> Any:
    """The layers of a `Transformer` on a GPU with fewer kernels (`cuda.layers`), or None where they do not suit it."""
    return importlib.import_module(".cuda.layers", __package__).prepared(model)


def top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest value [R] and its first index [R], from [R, V]. A NaN makes its row NaN."""
    highest, index, _ = _top(logits, shares=False)
    return highest, index


def top_shares(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of each row's largest value [R], and its softmax probability [R], from [R, V]."""
    _, index, share = _top(logits, shares=True)
    return index, share


def _top(logits: Tensor, shares: bool) -> tuple[Tensor, Tensor, Tensor]:
    kernels = _kernels() if logits.dtype is torch.float32 and logits.device.type == "cpu" else None
    if kernels is None:
        highest, index = logits.max(-1)
        return highest, index, 1 / (logits - highest[..., None]).exp().sum(-1) if shares else highest
    logits = logits.contiguous()
    rows, width = logits.shape
    highest, share, index = logits.new_empty(rows), logits.new_empty(rows), torch.empty(rows, dtype=torch.long)
    addresses = addresses_of(logits, highest, index, share if shares else None)
    kernels.top(*addresses, rows, width, torch.get_num_threads())
    return highest, index, share


def choose(logits: Tensor, leaders: list[int], keys: list[int], temperatures: list[float]) -> list[int] | None:
    """The index of the largest logit / T + noise in each row of [R, V], as `engine.sampling.choose` finds it.

    leaders [R]: the first index of each row's largest logit, which stays where T is 0. keys: 64 bits of noise each.
    None where there is no kernel for it.
    """
    kernels = _kernels() if logits.dtype is torch.float32 and logits.device.type == "cpu" else None
    if kernels is None:
        return None
    logits, chosen = logits.contiguous(), torch.tensor(leaders)
    packed = torch.tensor([key - (key >> 63 << 64) for key in keys])  # [R] int64
    each = torch.tensor(temperatures, dtype=torch.float64)  # [R]
    kernels.choose(*addresses_of(logits, packed, each, chosen), *logits.shape, torch.get_num_threads())
    found: list[int] = chosen.tolist()
    return found


# ------------------------------------------------------------ choosing an implementation


def on_gpu(tensor: Tensor) -> bool:
    """Whether our GPU kernels run operations on this tensor."""
    return tensor.is_cuda


@functools.cache
def _gpu(name: str) -> Any:
    """A module of GPU kernels, imported on first use: triton is not installed everywhere."""
    return importlib.import_module(f".cuda.kernels.{name}", __package__)


@functools.cache
def _loaded() -> native.Native:
    native.announce = stage
    return native.load()


def _kernels(*tensors: Tensor | None) -> native.Kernels | None:
    """The native kernels, if they are available and all of these tensors are float32 on the CPU."""
    for tensor in tensors:
        if tensor is not None and (tensor.dtype is not torch.float32 or not tensor.is_cpu):
            return None
    return _loaded().kernels


def _plain(tensor: Tensor) -> bool:
    return tensor.dtype in _FLOATS and tensor.is_cpu


def _native_planes(*planes: Tensor) -> bool:
    """Planes are read and written in place: whether they are contiguous does not depend on the rows."""
    return all(p.dtype in _PLANES and p.is_cpu and p.is_contiguous() and p.dtype is planes[0].dtype for p in planes)


def plane_address(plane: Tensor) -> int:
    """Where a plane's data starts, for a native call: odd where its values have 16 bits (native/vectors.h)."""
    return plane.data_ptr() + (plane.dtype is torch.float16)


def addresses_of(*tensors: Tensor | None) -> list[int]:
    """Where each tensor's data starts, for a native call; 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def contiguous(indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, of this type, on the CPU. Tested first: a conversion that does nothing takes microseconds."""
    return indices.contiguous() if indices.dtype is dtype and indices.is_cpu else indices.to("cpu", dtype).contiguous()


# ------------------------------------------------------------ the same in torch, row by row


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rms_norm(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    """row [n] of float32 or float64, weight [n]. Squares are summed in chunks that no thread count divides further."""
    first, *others = (row * row).split(_CHUNK)
    total = first.sum()
    for chunk in others:
        total = total + chunk.sum()
    return row * torch.rsqrt(total / row.shape[0] + eps) * weight


def _layer_norm(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    """row [n], gain and bias [2, n]; summed as in `_rms_norm`."""
    first, *others = row.split(_CHUNK)
    total = first.sum()
    for chunk in others:
        total = total + chunk.sum()
    return _rms_norm(row - total / row.shape[0], weight[0], eps) + weight[1]


def _add_norm_torch(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    if delta is not None:
        x += delta
    out = torch.empty(x.shape, dtype=dtype, device=x.device)  # [T, H]
    norm = _rms_norm if weight.dim() == 1 else _layer_norm
    for t, row in enumerate(x):
        out[t] = norm(row, weight, eps)
    return out


def _rope_store_torch(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_plane: Tensor, v_plane: Tensor, slots: Tensor,
    heads: int, kv_heads: int, norms: Norms | None,
) -> Tensor:  # fmt: skip
    rows, d, half = qkv.shape[0], k_plane.shape[-1], cos.shape[1]
    x = qkv.to(_wide(k_plane.dtype)).reshape(rows, heads + 2 * kv_heads, d).clone()  # [T, heads + 2 kv_heads, d]
    qk = x[:, : heads + kv_heads]  # [T, heads + kv_heads, d], a view: v stays as it is
    if norms:
        weights = [norms[0]] * heads + [norms[1]] * kv_heads
        for row in qk:
            for head, weight in zip(row, weights, strict=True):
                head.copy_(_rms_norm(head, weight, norms[2]))
    # Elementwise products and sums are rounded alike in any call: no need to go row by row.
    first, second = qk[..., :half].clone(), qk[..., half : 2 * half].clone()  # [T, heads + kv_heads, r/2]
    qk[..., :half] = first * cos[:, None] - second * sin[:, None]
    qk[..., half : 2 * half] = second * cos[:, None] + first * sin[:, None]
    x = x.to(k_plane.dtype)
    k_plane[slots], v_plane[slots] = x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    return x[:, :heads].contiguous()


def _attend_torch(
    q: Tensor, k_plane: Tensor, v_plane: Tensor, rows: Rows, scale: float, dtype: torch.dtype, window: int, cap: float,
    sinks: Tensor | None, bias: Bias | None,
) -> Tensor:  # fmt: skip
    count, heads, d = q.shape
    out = torch.empty((count, heads * d), dtype=dtype, device=q.device)  # [T, heads * d]
    for t, (line, context) in enumerate(zip(rows.lines.tolist(), rows.context.tolist(), strict=True)):
        keys = rows.table[line, :context].long()  # [n] slots, in order
        if rows.ancestors is not None:
            own = rows.ancestors[t].long()
            keys = torch.cat([keys, own[(own < 0).cumsum(0) == 0]])
        distances = None
        if bias is not None:
            distances = bias[0][:, int(bias[1][t]) - torch.arange(len(keys))]  # [heads, n]
            distances = distances[:, -window:] if window > 0 else distances
        keys = keys[-window:] if window > 0 else keys
        out[t] = _attend_row(q[t], k_plane[keys], v_plane[keys], scale, cap, sinks, distances).reshape(-1)
    return out


def _attend_row(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float = 0.0, sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [heads, d]; k, v [n, kv_heads, d]; bias [heads, n]; returns [heads, d]. No matrix products: BLAS depends on
    threads."""
    wide, (heads, d), (n, kv_heads, _) = _wide(q.dtype), q.shape, k.shape
    if not n:
        return torch.zeros((heads, d), dtype=wide, device=q.device)
    grouped = (q.to(wide) * scale).reshape(1, kv_heads, heads // kv_heads, d)
    scores = (grouped * k.to(wide)[:, :, None]).sum(-1)  # [n, kv_heads, group]
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if bias is not None:
        scores = scores + bias.to(wide).view(kv_heads, -1, n).permute(2, 0, 1)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide).view(1, kv_heads, -1)])
    weights = torch.softmax(scores.permute(1, 2, 0).contiguous(), -1)[..., :n]  # [kv_heads, group, n]
    values = v.to(wide).permute(1, 2, 0).contiguous()  # [kv_heads, d, n]
    return (weights[:, :, None] * values[:, None]).sum(-1).reshape(heads, d)


def _gate_mul_torch(gate_up: Tensor, activation: str, paired: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // (1 + paired)
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)  # [T, I]
    for t, row in enumerate(gate_up.to(_wide(gate_up.dtype))):
        for start in range(0, width, _CHUNK):
            stop = min(start + _CHUNK, width)
            gate, up = row[start:stop], row[width + start : width + stop] if paired else 1.0  # [n] each
            out[t, start:stop] = gated(gate, up, activation)
    return out


def gated(gate: Tensor, up: Tensor | float, activation: str) -> Tensor:
    """activation(gate) * up in torch: mostly g * sigmoid(s) * up, where s is g or twice gelu's inner polynomial."""
    if activation == RELU:
        return torch.nn.functional.relu(gate) * up
    if activation == ERF_GELU:
        return 0.5 * gate * torch.erfc(gate * -(0.5**0.5)) * up
    if activation == GELU:
        return gate * torch.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate**3)) * up
    if activation == CLAMPED:
        gate, up = gate.clamp(max=7.0), torch.as_tensor(up).clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return torch.nn.functional.silu(gate) * up
