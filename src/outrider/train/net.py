"""The head as a trainable module: EAGLE-3 unrolled over its own outputs, and the block drafter with anchors.

Promise: `state_dict` has exactly the names of the drafter's file, and a row's logits equal those of `models.head`. A
head row p has the token t_{p+1} and a feature of position p, and predicts t_{p+2}; so a sequence of n tokens has
L = n - 1 rows. The target's embedding is not the head's: whoever calls brings embedded rows, which a narrow head embeds
itself (`embed`). It knows no losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..models.speculators import HeadConfig
from .blocks import Attention, Block, Mlp, Norm, Sizes, angles, attend, product

if TYPE_CHECKING:
    from .features import TargetNet

EAGLE3, BLOCK = "eagle3", "block"
KeyValues = list[tuple[Tensor, Tensor]]


class First(nn.Module):
    """The layer that reads token and feature side by side."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = Norm(sizes.hidden, sizes.eps)
        self.hidden_norm = Norm(sizes.hidden, sizes.eps)
        self.self_attn = Attention(sizes, 2 * sizes.hidden)
        self.post_attention_layernorm = Norm(sizes.hidden, sizes.eps)
        self.mlp = Mlp(sizes)

    def split(self, e: Tensor, f: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings and features [B, L, H] -> q, k, v [B, h, L, d]"""
        return self.self_attn.split(torch.cat([self.input_layernorm(e), self.hidden_norm(f)], -1), rope)

    def finish(self, f: Tensor, mixed: Tensor) -> Tensor:
        """Features [B, L, H] and what attention found [B, h, L, d] -> the layer's output [B, L, H]"""
        r = f + self.self_attn.join(mixed)
        return r + self.mlp(self.post_attention_layernorm(r))  # type: ignore[no-any-return]


class HeadNet(nn.Module):
    """Both kinds of head."""

    d2t: Tensor  # [draft_vocab] target id - draft id
    t2d: Tensor  # [vocab] whether a target id is in the draft vocabulary

    def __init__(self, config: HeadConfig, ids: Tensor) -> None:
        """ids [draft_vocab]: the draft vocabulary's target ids, ascending."""
        super().__init__()
        self.config, hidden, sizes = config, config.hidden_size, sizes_of(config)
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, hidden, bias=False)
        if config.narrow:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.midlayer = First(sizes)
        self.norm = Norm(hidden, config.norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.layers = nn.ModuleDict({str(i): Block(sizes) for i in range(1, config.layers)})
        if config.kind == BLOCK:
            self.mask_embedding = nn.Parameter(torch.zeros(hidden))  # [H]
            self.mask_hidden = nn.Parameter(torch.zeros(hidden))  # [H]
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True))

    @staticmethod
    def from_target(target: TargetNet, config: HeadConfig, ids: Tensor, seed: int = 0) -> HeadNet:
        """A head that starts from what the target knows: its last layers, its norm, its own rows of the output."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            net = HeadNet(config, ids)
            if not config.narrow:  # one of another width has nothing to take over
                _begin(net, target)
        return net

    @property
    def ids(self) -> Tensor:
        """[draft_vocab] the target id of each draft id"""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def embed(self, tokens: Tensor, target: TargetNet) -> Tensor:
        """tokens [B, L] -> [B, L, H], by the target's table or, in a narrow head, by its own."""
        if not self.config.narrow:
            return target.embed(tokens)
        found: Tensor = self.embed_tokens(tokens)
        return found

    def fuse(self, taps: Tensor) -> Tensor:
        """taps [B, L, taps * the target's H] -> features [B, L, H], at least float32: the residual starts here"""
        f = product(self.fc, taps)
        return f.to(torch.promote_types(f.dtype, torch.float32))

    def logits(self, a: Tensor) -> Tensor:
        """Outputs [..., H] -> [..., draft_vocab]"""
        return product(self.lm_head, self.norm(a))

    # ------------------------------------------------------------ eagle3

    def unroll(self, e: Tensor, taps: Tensor, steps: int) -> Iterator[Tensor]:
        """Outputs [B, L, H] of steps 0, 1, …, as in drafting: step i sees i features of the head's own making.

        e [B, L, H] embeds t_{p+1} in row p; taps [B, L, taps*H]. In step i, row p stands for the i-th row that is
        drafted after the true row p - i: its feature is step i-1's output of row p - 1, and it attends to the true
        rows 0..p-i and to the rows p-i+1..p of the steps 1..i, which are one diagonal. Rows p < i mean nothing.
        """
        f = self.fuse(taps)
        rope = self._rope(torch.arange(e.shape[1], device=e.device)[None], f.dtype)
        past: KeyValues = []
        for i in range(steps):
            q, k, v = self.midlayer.split(e, f, rope)
            past.append((k, v))
            a = self.midlayer.finish(f, attend(q, k, v, None) if i == 0 else _diagonal(q, past))
            yield a
            f = torch.cat([torch.zeros_like(a[:, :1]), a[:, :-1]], 1)

    # ------------------------------------------------------------ block

    def anchored(self, e: Tensor, taps: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all true rows [B, L, H], and of block - 1 mask rows after each anchor [B, A, block-1, H].

        e [B, L, H], taps [B, L, taps*H], anchors [B, A]: the true rows from which blocks start. The j-th mask row of
        an anchor stands at its position + j; it sees the true rows up to the anchor and its block up to itself.
        """
        batch, length = e.shape[:2]
        width, many = self.config.block - 1, anchors.shape[1]
        masked = (batch, many * width, e.shape[2])
        e = torch.cat([e, self.mask_embedding.to(e.dtype).expand(masked)], 1)  # [B, L + A*(K-1), H]
        f = self.fuse(taps)
        f = torch.cat([f, self.mask_hidden.to(f.dtype).expand(masked)], 1)
        later = anchors[:, :, None] + torch.arange(1, width + 1, device=e.device)  # [B, A, K-1]
        where = torch.cat([torch.arange(length, device=e.device).expand(batch, -1), later.flatten(1)], 1)
        rope, mask = self._rope(where, f.dtype), anchor_mask(anchors, length, width)
        q, k, v = self.midlayer.split(e, f, rope)
        a = self.midlayer.finish(f, attend(q, k, v, mask))
        for layer in self.layers.values():
            a = layer(a, rope, mask)
        return a[:, :length], a[:, length:].unflatten(1, (many, width))

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for positions [B or 1, L]; never narrower than float32."""
        dim = self.config.head_dim
        steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        wide = torch.promote_types(dtype, torch.float32)
        return angles(positions, self.config.rope_theta**-steps, 1.0, wide)


def sizes_of(c: HeadConfig) -> Sizes:
    return Sizes(c.hidden_size, c.intermediate_size, c.heads, c.kv_heads, c.head_dim, c.norm_eps)


def _diagonal(q: Tensor, past: KeyValues) -> Tensor:
    """Attention of step i = len(past) - 1: q [B, h, L, d] -> [B, h, L, d]. past[j] are step j's keys and values."""
    i, length, scale = len(past) - 1, q.shape[2], q.shape[3] ** -0.5
    k, v = past[0]
    own = [(_down(k_j, i - j), _down(v_j, i - j)) for j, (k_j, v_j) in enumerate(past) if j]
    rows = torch.arange(length, device=q.device)
    hidden = rows[None] > rows[:, None] - i  # [L, L] true rows after p - i
    true = (q @ k.transpose(2, 3)).masked_fill(hidden, float("-inf"))  # [B, h, L, L]
    drafted = [(q * k_j).sum(-1, keepdim=True) for k_j, _ in own]  # i of [B, h, L, 1]
    weights = (torch.cat([true, *(d.to(true.dtype) for d in drafted)], -1) * scale).softmax(-1).to(v.dtype)
    mixed: Tensor = weights[..., :length] @ v
    for j, (_, v_j) in enumerate(own):
        mixed = mixed + weights[..., length + j, None] * v_j
    return mixed


def _down(x: Tensor, rows: int) -> Tensor:
    """x [B, h, L, d] with row p moved to row p + rows; zeros come in."""
    return torch.cat([torch.zeros_like(x[:, :, :rows]), x[:, :, : x.shape[2] - rows]], 2) if rows else x


def anchor_mask(anchors: Tensor, length: int, width: int) -> Tensor:
    """Who sees whom [B, 1, T, T] among the L true rows, then `width` mask rows for each of the anchors [B, A]."""
    batch, many = anchors.shape
    device = anchors.device
    at = torch.arange(length, device=device)
    true = (at[None] <= at[:, None]).expand(batch, -1, -1)  # [B, L, L]
    blank = torch.zeros(batch, length, many * width, dtype=torch.bool, device=device)
    back = (at[None, None] <= anchors[:, :, None]).repeat_interleave(width, 1)  # [B, A*width, L]
    own = torch.arange(many * width, device=device)
    same = own[:, None] // width == own[None] // width
    inner = (same & (own[None] <= own[:, None])).expand(batch, -1, -1)  # [B, A*width, A*width]
    return torch.cat([torch.cat([true, blank], 2), torch.cat([back, inner], 2)], 1)[:, None]


# ---------------------------------------------------------------- initial values


def _begin(net: HeadNet, target: TargetNet) -> None:
    hidden, taps = net.config.hidden_size, len(net.config.taps)
    net.fc.weight.copy_(torch.eye(hidden).repeat(1, taps) / taps)  # the average of the tapped layers
    layers = [layer for layer in target.layers if isinstance(layer, Block)][-net.config.layers :]
    first, mid = layers[0], net.midlayer
    for mine, its in _pairs(mid, first):
        mine[:, hidden:] = fit(its, mine[:, hidden:])
        mine[:, :hidden] = torch.randn_like(mine[:, :hidden]) * 0.02  # what to make of the token is to be learnt
    mid.hidden_norm.weight.copy_(first.input_layernorm.weight)
    _adopt(mid, first)
    for layer, its_layer in zip(net.layers.values(), layers[1:], strict=False):
        assert isinstance(layer, Block)
        for mine, its in _pairs(layer, its_layer):
            mine.copy_(fit(its, mine))
        layer.input_layernorm.weight.copy_(its_layer.input_layernorm.weight)
        _adopt(layer, its_layer)
    net.norm.weight.copy_(target.norm.weight)
    table = target.embed_tokens.weight if target.lm_head is None else target.lm_head.weight  # [V, H]
    net.lm_head.weight.copy_(table[net.ids.to(table.device)])
    if net.config.kind == BLOCK:
        net.mask_embedding.copy_(target.embed_tokens.weight.float().mean(0).cpu() + 0.02 * torch.randn(hidden))
        net.mask_hidden.copy_(0.5 * torch.randn(hidden))  # not near 0, where a norm's slope is steep


def _pairs(mine: First | Block, its: Block) -> list[tuple[Tensor, Tensor]]:
    names = ("q_proj", "k_proj", "v_proj")
    return [(getattr(mine.self_attn, n).weight, getattr(its.self_attn, n).weight) for n in names]


def _adopt(mine: First | Block, its: Block) -> None:
    """Everything behind the attention."""
    mine.post_attention_layernorm.weight.copy_(its.post_attention_layernorm.weight)
    mine.self_attn.o_proj.weight.copy_(fit(its.self_attn.o_proj.weight, mine.self_attn.o_proj.weight))
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(mine.mlp, name).weight
        weight.copy_(fit(getattr(its.mlp, name).weight, weight))


def fit(its: Tensor, mine: Tensor) -> Tensor:
    """The part of the target's weight that mine has room for; where mine is larger it keeps what it has."""
    out = mine.clone()
    rows, columns = min(its.shape[0], mine.shape[0]), min(its.shape[1], mine.shape[1])
    out[:rows, :columns] = its[:rows, :columns]
    return out
