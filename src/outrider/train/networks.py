"""The trainable drafters: heads (EAGLE-3 and block) and the adapter of an early exit.

A `state_dict` has exactly the tensor names of the drafter's file, and logits equal those of the network that drafts, up
to rounding. Weights start from the target's where they fit. Losses are in `objectives`.

Head row p reads token t_{p+1} and a feature of position p, and predicts t_{p+2}; a sequence of n tokens has L = n - 1
rows. B sequences, H hidden size, h heads of d dimensions, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..models.config import inverse_frequencies
from ..models.speculators import HeadConfig, HeadTensors, decoded, target_ids
from .decoder import Attention, DecoderLayer, LayerSizes, Mlp, RmsNorm, Rope, TargetNet, attend, linear, rotary, widened

EAGLE3, BLOCK, EXIT = "eagle3", "block", "exit"


def _sizes(c: HeadConfig) -> LayerSizes:
    return LayerSizes(c.hidden_size, c.intermediate_size, c.heads, c.kv_heads, c.head_dim, c.norm_eps)


class DrafterNet(nn.Module):
    """A network that predicts the ids of a draft vocabulary."""

    d2t: Tensor  # [D] target id - draft id
    t2d: Tensor  # [V] whether a target id is in the draft vocabulary

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config

    def _set_vocabulary(self, ids: Tensor) -> None:
        """ids [D]: target ids, ascending."""
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(self.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True))

    @property
    def ids(self) -> Tensor:
        """[D] the target id of each draft id"""
        return target_ids(self.d2t)

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [..., H] -> [..., D]"""
        raise NotImplementedError


# ---------------------------------------------------------------- heads


class FirstLayer(nn.Module):
    """The layer that reads token and feature side by side."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.hidden_norm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = Attention(sizes, 2 * sizes.hidden)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.mlp = Mlp(sizes)

    def split(self, e: Tensor, f: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings and features [B, L, H] -> q, k, v [B, h, L, d]"""
        return self.self_attn.split(torch.cat([self.input_layernorm(e), self.hidden_norm(f)], -1), rope)

    def finish(self, f: Tensor, mixed: Tensor) -> Tensor:
        """Features [B, L, H] and the output of attention [B, h, L, d] -> the layer's output [B, L, H]"""
        r = f + self.self_attn.join(mixed)
        return r + self.mlp(self.post_attention_layernorm(r))  # type: ignore[no-any-return]


class HeadNet(DrafterNet):
    """A head of either kind. The target embeds the tokens, except for a narrow head, which has its own embedding."""

    def __init__(self, config: HeadConfig, ids: Tensor) -> None:
        """ids [D]: the target ids of the draft vocabulary, ascending."""
        super().__init__(config)
        hidden, sizes = config.hidden_size, _sizes(config)
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, hidden, bias=False)
        if config.narrow:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.midlayer = FirstLayer(sizes)
        self.norm = RmsNorm(hidden, config.norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False).requires_grad_(config.own_output)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(sizes) for i in range(1, config.layers)})
        if config.kind == BLOCK:
            self.mask_embedding = nn.Parameter(torch.zeros(hidden))  # [H]
            self.mask_hidden = nn.Parameter(torch.zeros(hidden))  # [H]
        self._set_vocabulary(ids)

    @staticmethod
    def from_target(target: TargetNet, config: HeadConfig, ids: Tensor, seed: int = 0) -> HeadNet:
        """A head that starts from the target's last layers, its norm and its output rows."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            net = HeadNet(config, ids)
            if not config.narrow:  # weights of another width do not fit
                _initialise_head(net, target)
        return net

    def embed(self, tokens: Tensor, target: TargetNet) -> Tensor:
        """tokens [B, L] -> [B, L, H]"""
        return widened(self.embed_tokens(tokens)) if self.config.narrow else target.embed(tokens)

    def fuse(self, taps: Tensor) -> Tensor:
        """taps [B, L, taps * the target's H] -> features [B, L, H] in at least float32: the residual starts here"""
        return widened(linear(self.fc, taps))

    def logits(self, x: Tensor) -> Tensor:
        return linear(self.lm_head, self.norm(x))

    def unroll(self, e: Tensor, taps: Tensor, steps: int) -> Iterator[Tensor]:
        """EAGLE-3: outputs [B, L, H] of steps 0, 1, …, as in drafting: step i reads i features of the head's own.

        e [B, L, H] embeds t_{p+1} in row p; taps [B, L, taps*H]. In step i, row p is the i-th row drafted after the
        true row p - i: its feature is step i-1's output of row p - 1, and it attends to the true rows 0..p-i and to
        the rows p-i+1..p of the steps 1..i, which are one diagonal. Rows p < i are undefined.
        """
        f = self.fuse(taps)
        rope = self._rope(torch.arange(e.shape[1], device=e.device)[None], f.dtype)
        past: list[tuple[Tensor, Tensor]] = []
        for i in range(steps):
            q, k, v = self.midlayer.split(e, f, rope)
            past.append((k, v))
            a = self.midlayer.finish(f, attend(q, k, v, None) if i == 0 else _attend_diagonal(q, past))
            yield a
            f = torch.cat([torch.zeros_like(a[:, :1]), a[:, :-1]], 1)

    def anchored(self, e: Tensor, taps: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Block: outputs of all true rows [B, L, H], and of block - 1 mask rows after each anchor [B, A, block-1, H].

        e [B, L, H], taps [B, L, taps*H], anchors [B, A]: the true rows from which blocks start. The j-th mask row of
        an anchor has its position + j; it attends to the true rows up to the anchor and to its block up to itself.
        """
        batch, length = e.shape[:2]
        width, many = self.config.block - 1, anchors.shape[1]
        masked = (batch, many * width, e.shape[2])
        e = torch.cat([e, self.mask_embedding.to(e.dtype).expand(masked)], 1)  # [B, L + A*(K-1), H]
        f = self.fuse(taps)
        f = torch.cat([f, self.mask_hidden.to(f.dtype).expand(masked)], 1)
        later = anchors[:, :, None] + torch.arange(1, width + 1, device=e.device)  # [B, A, K-1]
        positions = torch.cat([torch.arange(length, device=e.device).expand(batch, -1), later.flatten(1)], 1)
        rope, mask = self._rope(positions, f.dtype), _anchor_mask(anchors, length, width)
        q, k, v = self.midlayer.split(e, f, rope)
        a = self.midlayer.finish(f, attend(q, k, v, mask))
        for layer in self.layers.values():
            a = layer(a, rope, mask)
        return a[:, :length], a[:, length:].unflatten(1, (many, width))

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """cos and sin of positions [B or 1, L], in at least float32."""
        frequencies = inverse_frequencies(self.config.head_dim, self.config.rope_theta, None)
        return rotary(positions, frequencies, 1.0, torch.promote_types(dtype, torch.float32))


def _attend_diagonal(q: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of step i = len(past) - 1: q [B, h, L, d] -> [B, h, L, d]. past[j] are step j's keys and values."""
    i, length, scale = len(past) - 1, q.shape[2], q.shape[3] ** -0.5
    k, v = past[0]
    own = [(_shift_down(k_j, i - j), _shift_down(v_j, i - j)) for j, (k_j, v_j) in enumerate(past) if j]
    rows = torch.arange(length, device=q.device)
    hidden = rows[None] > rows[:, None] - i  # [L, L] true rows after p - i
    true = (q @ k.transpose(2, 3)).masked_fill(hidden, float("-inf"))  # [B, h, L, L]
    drafted = [(q * k_j).sum(-1, keepdim=True) for k_j, _ in own]  # i of [B, h, L, 1]
    weights = (torch.cat([true, *(d.to(true.dtype) for d in drafted)], -1) * scale).softmax(-1).to(v.dtype)
    mixed: Tensor = weights[..., :length] @ v
    for j, (_, v_j) in enumerate(own):
        mixed = mixed + weights[..., length + j, None] * v_j
    return mixed


def _shift_down(x: Tensor, rows: int) -> Tensor:
    """x [B, h, L, d] with row p moved to row p + rows; zeros come in."""
    return torch.cat([torch.zeros_like(x[:, :, :rows]), x[:, :, : x.shape[2] - rows]], 2) if rows else x


def _anchor_mask(anchors: Tensor, length: int, width: int) -> Tensor:
    """Which row attends to which [B, 1, T, T]: L true rows, then `width` mask rows for each of the anchors [B, A]."""
    batch, many = anchors.shape
    device = anchors.device
    rows = torch.arange(length, device=device)
    true = (rows[None] <= rows[:, None]).expand(batch, -1, -1)  # [B, L, L]
    blank = torch.zeros(batch, length, many * width, dtype=torch.bool, device=device)
    back = (rows[None, None] <= anchors[:, :, None]).repeat_interleave(width, 1)  # [B, A*width, L]
    own = torch.arange(many * width, device=device)
    same = own[:, None] // width == own[None] // width
    inner = (same & (own[None] <= own[:, None])).expand(batch, -1, -1)  # [B, A*width, A*width]
    return torch.cat([torch.cat([true, blank], 2), torch.cat([back, inner], 2)], 1)[:, None]


# ---------------------------------------------------------------- early exit


class ResidualMlp(nn.Module):
    """A decoder layer without attention."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(_sizes(config))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]"""
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class ExitNet(DrafterNet):
    """Blocks after the target's first layers, then an output layer: its own for a reduced vocabulary, or the target's.

    It starts as the target's own exit: blocks in the shape of the target's last layers that add nothing yet.
    """

    def __init__(self, config: HeadConfig, ids: Tensor, target: TargetNet) -> None:
        """ids [D]: the target ids of the draft vocabulary, ascending."""
        super().__init__(config)
        self._target = (target,)  # in a tuple, so that its weights are not this module's
        self.blocks = nn.ModuleList(ResidualMlp(config) for _ in range(config.layers))
        self.reduced = config.draft_vocab_size < config.vocab_size
        if self.reduced:
            self.norm = RmsNorm(config.hidden_size, config.norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self._set_vocabulary(ids)
        with torch.no_grad():
            _initialise_exit(self, target, ids)

    @property
    def ids(self) -> Tensor:
        device = next(self.blocks.parameters()).device
        return super().ids if self.reduced else torch.arange(self.config.draft_vocab_size, device=device)

    def logits(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.reduced:
            return linear(self.lm_head, self.norm(x))
        target = self._target[0]
        return target.logits(target.norm(x))


# ---------------------------------------------------------------- initial weights


def _initialise_head(net: HeadNet, target: TargetNet) -> None:
    hidden, taps = net.config.hidden_size, len(net.config.taps)
    net.fc.weight.copy_(torch.eye(hidden).repeat(1, taps) / taps)  # the average of the tapped layers
    sources = _last_layers(target, net.config.layers)
    first = net.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(first.self_attn, name).weight
        _copy_overlap(weight[:, hidden:], getattr(sources[0].self_attn, name).weight)
        weight[:, :hidden] = torch.randn_like(weight[:, :hidden]) * 0.02  # the token's half has no counterpart
    first.hidden_norm.weight.copy_(sources[0].input_layernorm.weight)
    _copy_after_attention(first, sources[0])
    for layer, source in zip(net.layers.values(), sources[1:], strict=False):
        assert isinstance(layer, DecoderLayer)
        for name in ("q_proj", "k_proj", "v_proj"):
            _copy_overlap(getattr(layer.self_attn, name).weight, getattr(source.self_attn, name).weight)
        layer.input_layernorm.weight.copy_(source.input_layernorm.weight)
        _copy_after_attention(layer, source)
    net.norm.weight.copy_(target.norm.weight)
    _copy_output_rows(net.lm_head, target, net.ids)
    if net.config.kind == BLOCK:
        net.mask_embedding.copy_(target.embed_tokens.weight.float().mean(0).cpu() + 0.02 * torch.randn(hidden))
        net.mask_hidden.copy_(0.5 * torch.randn(hidden))  # not near 0, where a norm's slope is steep


def _initialise_exit(net: ExitNet, target: TargetNet, ids: Tensor) -> None:
    blocks = [block for block in net.blocks if isinstance(block, ResidualMlp)]
    for block, source in zip(blocks, _last_layers(target, len(blocks)), strict=False):
        block.norm.weight.copy_(source.post_attention_layernorm.weight)
        for name in ("gate_proj", "up_proj"):
            _copy_overlap(getattr(block.mlp, name).weight, getattr(source.mlp, name).weight)
    for block in blocks:
        block.mlp.down_proj.weight.zero_()
    if net.reduced:
        net.norm.weight.copy_(target.norm.weight)
        _copy_output_rows(net.lm_head, target, ids)


def _last_layers(target: TargetNet, count: int) -> list[DecoderLayer]:
    return [layer for layer in target.layers if isinstance(layer, DecoderLayer)][-count:]


def _copy_output_rows(layer: nn.Linear, target: TargetNet, ids: Tensor) -> None:
    table = target.output_table  # [V, H]
    layer.weight.copy_(table[ids.to(table.device)])


def _copy_after_attention(layer: FirstLayer | DecoderLayer, source: DecoderLayer) -> None:
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    _copy_overlap(layer.self_attn.o_proj.weight, source.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy_overlap(getattr(layer.mlp, name).weight, getattr(source.mlp, name).weight)


def _copy_overlap(weight: Tensor, source: Tensor) -> None:
    """Copy the part of the source that fits; where the weight is larger it keeps its values."""
    rows, columns = min(source.shape[0], weight.shape[0]), min(source.shape[1], weight.shape[1])
    weight[:rows, :columns] = source[:rows, :columns]


def load_start(net: nn.Module, config: HeadConfig, start: HeadConfig, tensors: HeadTensors) -> None:
    """Load the weights of another head of the same shape. Output rows of ids that it lacks stay the target's."""
    names = [name for name, value in vars(start).items() if getattr(config, name) != value and name != "acceptance"]
    if names:
        raise ConfigError(f"--start-from is a head of another shape: {' and '.join(names)} differ.")
    loaded = decoded(tensors, torch.float32)
    if "d2t" in loaded:
        state = net.state_dict()
        start_ids, ids = target_ids(loaded["d2t"].cpu()), target_ids(state["d2t"].cpu())  # [D] each, ascending
        index = torch.searchsorted(start_ids, ids).clamp(max=len(start_ids) - 1)
        shared = start_ids[index] == ids
        rows = state["lm_head.weight"].cpu().float()
        if start.own_output:
            rows[shared] = loaded["lm_head.weight"].float()[index[shared]]
        loaded |= {"lm_head.weight": rows, "d2t": state["d2t"], "t2d": state["t2d"]}
    net.load_state_dict(loaded)
