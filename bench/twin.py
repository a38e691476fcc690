"""A widened copy ("twin") of a small model with the same function: the cost of a large model, with real text.

    large = seven(open_checkpoint())          # SmolLM2 as a model of 7.04B parameters: 13.6 GB read per pass
    large = scaled(open_checkpoint(), 4)      # four times as wide in everything

The residual stream is padded with dimensions that stay exactly zero, and heads and neurons are added whose outputs are
exactly zero. Weights are random wherever their inputs are zero, so a pass reads and multiplies as much as the large
model's would; the function, and so the text and every drafter's acceptance, is the small model's.

          real columns   padded columns
    real  [   real     |     random    ]        rows: outputs, columns: inputs; the same for products that read the
    extra [   zero     |     random    ]        stream (q, k, v, gate, up, head) and that write it (o, down)

A layer norm subtracts the mean, which padding would change, so an encoder–decoder is widened by repetition
(`repeated`): every dimension of the stream, every head and every neuron is there several times, with the same value,
and a product that reads them takes a share of its weights from each. The shares are powers of two and add up to one, so
that rounding is the only difference.

    large = eleven(open_checkpoint("opus-mt-en-fr"))   # Marian as a model of 11B parameters, the size of T5-XXL

A trained head of the small model becomes one of the large model in the same way, with the same drafts: as wide as the
large model (`widen_head`), or as narrow as before with its own embedding (`narrow_head`).

Nothing is stored: each tensor is made on request, on its device, and is the same each time.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from outrider.backends.toy import hash_of
from outrider.backends.transformer import WeightSource
from outrider.models.checkpoint import Checkpoint
from outrider.models.config import ModelConfig
from outrider.models.speculators import HeadConfig, shapes
from outrider.models.weights import Weights, expected

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class Widened(Weights):
    """The weights of a small model inside those of a large one."""

    def __init__(
        self, source: WeightSource, small: ModelConfig, large: ModelConfig, device: str | torch.device, seed: int
    ) -> None:
        _insist(small, large)
        self.source, self.small, self.large = source, small, large
        self.device, self.seed = torch.device(device), seed
        self._shapes = expected(large)

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        origin = EMBEDDING if name == HEAD and self.small.tied else name
        real = self.source.get(origin, torch.promote_types(dtype, torch.float32)).to(self.device)
        if name == EMBEDDING or name.endswith(".bias"):
            made = torch.zeros(self.shape(name), dtype=dtype, device=self.device)
        else:
            made = self._noise(name, dtype, float(real.square().mean().sqrt()))
        if real.dim() == 2:
            rows, columns = real.shape
            made[rows:, :columns] = 0  # extra outputs must not depend on real inputs
            made[:rows, :columns] = real.to(dtype)
        else:
            made[: real.shape[0]] = (real * self._gain(name)).to(dtype)
        return made

    def _gain(self, name: str) -> float:
        """A norm takes the mean over d' squares of which d are not zero: its gains compensate."""
        return 1.0 if name.endswith(".bias") else (self.small.hidden_size / self.large.hidden_size) ** 0.5

    def _noise(self, name: str, dtype: torch.dtype, scale: float) -> Tensor:
        dice = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + hash_of(name))
        return torch.randn(self.shape(name), generator=dice, dtype=dtype, device=self.device).mul_(scale)


def _insist(small: ModelConfig, large: ModelConfig) -> None:
    """Raise where the function would change."""
    if small.heads * large.kv_heads != large.heads * small.kv_heads:
        raise ValueError(
            f"{small.heads} heads on {small.kv_heads} key/value heads cannot become {large.heads} on {large.kv_heads}: "
            "each key/value head must serve as many heads as before."
        )
    for size in ("hidden_size", "intermediate_size", "heads", "kv_heads"):
        if getattr(large, size) < getattr(small, size):
            raise ValueError(f"{size} would shrink from {getattr(small, size)} to {getattr(large, size)}.")
    if small.qk_norm:
        raise ValueError("The norms of q and k share their epsilon with the others; such a model cannot be widened.")


def widened(
    checkpoint: Checkpoint,
    hidden: int = 4608,
    intermediate: int = 13824,
    heads: int = 36,
    kv_heads: int = 12,
    device: str | torch.device = "cuda",
    seed: int = 1,
) -> Checkpoint:
    """The same function at another size: layers, head dimension and text stay; the output head is untied."""
    small = checkpoint.config
    large = replace(
        small,
        hidden_size=hidden,
        intermediate_size=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        norm_eps=small.norm_eps * small.hidden_size / hidden,  # it is added to a mean that is smaller by this factor
        tied=False,
    )
    weights = Widened(checkpoint.weights, small, large, device, seed)
    return replace(checkpoint, name=f"{checkpoint.name}-as-{size_of(large)}", config=large, weights=weights)


def scaled(
    checkpoint: Checkpoint,
    factor: int,
    neurons: int | None = None,
    heads: int | None = None,
    device: str | torch.device = "cuda",
    seed: int = 1,
) -> Checkpoint:
    """`factor` times the residual stream; other factors for the feed-forward part and the heads where given."""
    c, more = checkpoint.config, heads or factor
    return widened(
        checkpoint,
        hidden=c.hidden_size * factor,
        intermediate=c.intermediate_size * (neurons or factor),
        heads=c.heads * more,
        kv_heads=c.kv_heads * more,
        device=device,
        seed=seed,
    )


def seven(checkpoint: Checkpoint, device: str | torch.device = "cuda", seed: int = 1) -> Checkpoint:
    """SmolLM2-135M as 7.04B: hidden 4608, intermediate 13824, 36 heads, 12 key/value heads."""
    return scaled(checkpoint, 8, neurons=9, heads=4, device=device, seed=seed)


def thirty(checkpoint: Checkpoint, device: str | torch.device = "cuda", seed: int = 1) -> Checkpoint:
    """SmolLM2-135M as 27B: hidden 9216, intermediate 27648, 72 heads, 24 key/value heads."""
    return scaled(checkpoint, 16, neurons=18, heads=8, device=device, seed=seed)


class Repeated(Weights):
    """The weights of a small model in a large one, in which everything is repeated."""

    def __init__(self, source: WeightSource, large: ModelConfig, device: str | torch.device) -> None:
        self.source, self.large, self.device = source, expected(large), device

    def names(self) -> frozenset[str]:
        return frozenset(self.large)

    def has(self, name: str) -> bool:
        return name in self.large

    def shape(self, name: str) -> tuple[int, ...]:
        return self.large[name]

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        real = self.source.get(name, dtype).to(self.device)
        times = [wide // narrow for wide, narrow in zip(self.shape(name), real.shape, strict=True)]
        made = real.repeat(times)
        if real.dim() == 2 and not _is_table(name):
            made *= shares(times[1], dtype, self.device).repeat_interleave(real.shape[1])
        return made


def _is_table(name: str) -> bool:
    """Whether a matrix is looked up, not multiplied by."""
    return "embed_" in name or "distance_bias" in name


def shares(copies: int, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """So many powers of two [copies] that add up to one."""
    made = [1.0]
    while len(made) < copies:
        largest = max(made)
        made.remove(largest)
        made += [largest / 2] * 2
    return torch.tensor(made, dtype=dtype, device=device)


def repeated(
    checkpoint: Checkpoint, factor: int, neurons: int | None = None, device: str | torch.device = "cuda", seed: int = 1
) -> Checkpoint:
    """`factor` times the residual stream and the heads; another factor for the feed-forward part where given. Nothing
    in it is random."""
    small = checkpoint.config

    def larger(c: ModelConfig) -> ModelConfig:
        grown = {name: getattr(c, name) * factor for name in ("hidden_size", "heads", "kv_heads")}
        return replace(c, **grown, intermediate_size=c.intermediate_size * (neurons or factor))

    large = larger(small)
    if small.encoder is not None:
        large = replace(large, encoder=larger(small.encoder))
    weights = Repeated(checkpoint.weights, large, device)
    return replace(checkpoint, name=f"{checkpoint.name}-as-{size_of(large)}", config=large, weights=weights)


def eleven(checkpoint: Checkpoint, device: str | torch.device = "cuda", seed: int = 1) -> Checkpoint:
    """Marian (opus-mt) as 11.1B: hidden 8192, intermediate 24576, 128 heads; a pass of its decoder reads 5.3B of it."""
    return repeated(checkpoint, 16, neurons=12, device=device, seed=seed)


def widen_head(
    config: HeadConfig,
    tensors: dict[str, Tensor],
    small: ModelConfig,
    large: ModelConfig,
    device: str | torch.device = "cuda",
    seed: int = 1,
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The head of a small target for its twin, with every size grown as the target's; the drafts are the same.

    The twin's streams are the small target's with zeros behind them, and so are the head's own.
    """
    wide = replace(
        config,
        hidden_size=large.hidden_size,
        target_hidden_size=large.hidden_size,
        intermediate_size=config.intermediate_size * large.intermediate_size // small.intermediate_size,
        heads=config.heads * large.heads // small.heads,
        kv_heads=config.kv_heads * large.kv_heads // small.kv_heads,
        norm_eps=config.norm_eps * small.hidden_size / large.hidden_size,
        target_hash="",
    )
    made, gain = {}, (small.hidden_size / large.hidden_size) ** 0.5
    for name, shape in shapes(wide).items():
        real = tensors[name].to(device)
        if name in ("d2t", "t2d"):
            made[name] = real
        elif real.dim() == 1:
            made[name] = torch.zeros(shape, device=device)  # float32: a gain must not be rounded twice
            made[name][: real.shape[0]] = real * (gain if name.endswith("norm.weight") else 1.0)
        else:
            beside = {"fc.weight": len(config.taps)}.get(name, 2 if _reads_two(name) else 1)
            dice = torch.Generator(device).manual_seed(seed * 1_000_003 + hash_of(name))
            noise = torch.randn(shape, generator=dice, dtype=real.dtype, device=device)
            made[name] = _inside(real, noise.mul_(float(real.float().square().mean().sqrt())), beside)
    return wide, made


def narrow_head(
    config: HeadConfig,
    tensors: dict[str, Tensor],
    embedding: Tensor,  # [V, H] the small target's
    large: ModelConfig,
    device: str | torch.device = "cuda",
    seed: int = 1,
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The head of a small target for its twin, as narrow as before: only its inputs are wider."""
    shape = replace(config, target_hidden_size=large.hidden_size, target_hash="")
    made = {name: tensor.to(device) for name, tensor in tensors.items()}
    real = made["fc.weight"]
    dice = torch.Generator(device).manual_seed(seed * 1_000_003 + hash_of("fc.weight"))
    noise = torch.randn(shapes(shape)["fc.weight"], generator=dice, dtype=real.dtype, device=device)
    made["fc.weight"] = _inside(real, noise.mul_(float(real.float().square().mean().sqrt())), len(config.taps))
    return shape, made | {"embed_tokens.weight": embedding.to(device)}


def _reads_two(name: str) -> bool:
    """Whether a product reads the token beside the feature."""
    return name.startswith("midlayer.self_attn.") and not name.endswith("o_proj.weight")


def _inside(real: Tensor, noise: Tensor, beside: int) -> Tensor:
    """A weight [r, c] in a larger one [R, C] whose inputs are several streams side by side, each padded with zeros."""
    rows, (outs, ins) = real.shape[0], noise.shape
    parts, real = noise.view(outs, beside, ins // beside), real.view(rows, beside, -1)
    parts[rows:, :, : real.shape[2]] = 0  # extra outputs must not depend on real inputs
    parts[:rows, :, : real.shape[2]] = real
    return noise


def parameters(config: ModelConfig) -> int:
    return sum(prod(shape) for shape in expected(config).values())


def size_of(config: ModelConfig) -> str:
    count = parameters(config)
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count / 1e6:.2f}M"
