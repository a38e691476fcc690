"""Block drafters of the DFlash kind: every token of a draft in one pass, from masks that see each other.

The target's states at committed positions, fused and normed, are the context: every layer makes keys and values of them
directly, once. A block is the last committed token and masks behind it, at their own positions; its rows attend to the
context and to the whole block (in causal layers: to the rows before them), and a mask predicts the token of its own
position; in an anchored block every row, the first one too, predicts the token after its own. DSpark adds a term for
the token before, so that tokens are chosen from left to right. Block rows live in scratch slots that no sequence owns;
where a sequence reaches its greatest length, a block is cut. It knows rows, planes and states, not files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...backends import ops
from ...backends.cpu.int8 import Int8Linear, int8_product
from ...backends.cpu.quantise import NamedTensors
from ...backends.linear import linear, summed
from ...backends.rows import Rows, rows_of
from ...engine.batch import BatchBuilder
from ...engine.cache import Cache, Plane
from ...models.speculators import HeadConfig, HeadTensors
from ...types import Sequence
from .features import FeatureCache
from .network import Head
from .rollout import HeadRollout

if TYPE_CHECKING:
    from .dflash_captured import BlockGraphs


class DFlashHead(Head):
    """Layers over a context of fused states. Its only state between passes is the context's K/V in the plane."""

    def __init__(
        self, config: HeadConfig, tensors: HeadTensors, embedding: Any, dtype: torch.dtype, device: torch.device,
        length: int, output: Any,
    ) -> None:  # fmt: skip
        """length: number of positions. output: the target's product, if it has none."""
        super().__init__(config, tensors, embedding, dtype, device, length, None, output)
        if isinstance(self.head, Int8Linear):
            self.head = int8_product(self.head.packed)
        own = tensors.get("mask_embedding")
        table = self.embedding
        self.mask = table[config.mask_token] if own is None else own.to(self.device)  # [H]
        pair = [
            tensors[f"markov_head.markov_w{i}.weight"].to(self.device, self.compute) for i in (1, 2) if config.markov
        ]
        self.markov: tuple[Tensor, Any] | None = (pair[0], linear(pair[1])) if pair else None  # [V, r], product [D, r]

    def _prepare(self, length: int) -> None:
        """Rope; there is no native call for such a pass."""
        self.cos, self.sin = self._rope(length)
        self.native = None

    def _quantised(self) -> NamedTensors:
        return ()  # `_product` quantises each weight itself

    def _product(self, key: str, *names: str) -> Any:
        if not self.int8:
            return super()._product(key, *names)
        weight = torch.cat([self._tensors[name].float() for name in names])
        rounded = Int8Linear.of(weight, bias=self._bias(names))
        return rounded if key == "fc" else int8_product(rounded.packed)

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """The states of all taps side by side [T, taps * H]: `scores` fuses them."""
        return torch.cat(taps, 1)

    def read(self, rows: Rows, plane: Plane, hidden: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.scores(rows, plane, hidden)

    @torch.inference_mode()
    def scores(self, rows: Rows, plane: Plane, hidden: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Write the context's K/V of these rows from the target's states [T, taps * H]. There is nothing to score."""
        rows, c = self._on_device(rows), self.config
        context = ops.add_norm(
            self._fc(self._normed(hidden)), None, self.hidden_norm, c.norm_eps, self.compute
        )  # [T, H]
        rope = (self.cos[rows.positions], self.sin[rows.positions])
        for i, layer in enumerate(self.layers):
            kv = (plane.k[i], plane.v[i])
            ops.rope_store(layer.qkv(context), *rope, *kv, rows.slots, c.heads, c.kv_heads, layer.head_norms)
        return context.new_zeros(0, c.draft_vocab_size), context

    @torch.inference_mode()
    def blocks(self, rows: Rows, causal: Rows, plane: Plane, masked: Tensor) -> Tensor:
        """Scores of the wanted rows [R, D]. causal: the same rows, seeing only those before them; masked [T]."""
        rows, causal, c = self._on_device(rows), self._on_device(causal), self.config
        x = torch.where(masked.to(self.device)[:, None], self.mask, self.embedding[rows.tokens]).to(self.stream)
        rope, eps = (self.cos[rows.positions], self.sin[rows.positions]), c.norm_eps
        delta: Any = None
        for i, layer in enumerate(self.layers):
            seen = causal if c.causal or c.window(i) else rows
            h = ops.add_norm(x, delta, layer.attention_norm, eps, self.compute)
            delta = self._attention(i, h, seen, (plane.k[i], plane.v[i]), rope)
            delta = layer.down(layer.gate_up.gated(ops.add_norm(x, delta, layer.mlp_norm, eps, self.compute)))
        h = ops.add_norm(x, delta, self.norm, eps, self.compute)[rows.want]
        return summed(self.head(h)).to(self.stream) * c.logit_scale

    @torch.inference_mode()
    def after(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Scores [R, D] given the tokens before [R], on the head's device."""
        if self.markov is None:
            return scores
        first, second = self.markov
        return scores + summed(second(first[tokens])).to(scores.dtype)


class Block(NamedTuple):
    """Rows behind a sequence's tokens up to a position, whose K/V lies in these slots."""

    seq: Sequence
    at: int  # of its first row, which has the sequence's token there
    slots: list[int]


def score_blocks(head: DFlashHead, blocks: list[Block], cache: Cache, plane: Plane) -> list[Tensor]:
    """Scores of the tokens that each block predicts, [its rows, D] each, on the host, from one pass."""
    rows, causal, anchored = BatchBuilder(cache), BatchBuilder(cache), head.config.anchored
    for seq, at, slots in blocks:
        for j, slot in enumerate(slots):
            token = seq.tokens[at] if j == 0 else 0
            rows._add(seq, token, at + j, slot, at, slots)
            causal._add(seq, token, at + j, slot, at, slots[: j + 1])
    masked = torch.cat([torch.arange(len(block.slots)) > 0 for block in blocks])  # [T]
    rows.want = causal.want = list(range(len(masked))) if anchored else masked.nonzero().flatten().tolist()
    scores = head.blocks(rows_of(rows), rows_of(causal), plane, masked).cpu()
    return list(scores.split([len(block.slots) - (not anchored) for block in blocks]))


class DFlashRollout(HeadRollout):
    """Chains and trees of such a head: always whole blocks, as in training, of which a draft takes the beginning."""

    def __init__(
        self, head: DFlashHead, cache: Cache, plane: Plane, features: FeatureCache, graphs: BlockGraphs | None = None
    ) -> None:
        super().__init__(head, cache, plane, features, graphs)
        self.drafter, self.size, self.in_order = head, head.config.block_rows, head.markov is not None
        if graphs is None:
            first = plane.add_scratch(cache.table.shape[0] * self.size)
            starts = range(first, first + cache.table.shape[0] * self.size, self.size)
            self.slots = [list(range(start, start + self.size)) for start in starts]
        else:
            self.slots = graphs.slots

    def _blocks(self, seqs: list[Sequence], lengths: list[int]) -> list[Tensor]:
        self._forward_committed(seqs, [0] * len(seqs))
        self.passes_run += 1
        blocks = list[Block]()
        for seq, lane in zip(seqs, self.slots, strict=False):
            at = len(seq.tokens) - 1
            blocks.append(Block(seq, at, lane[: min(self.size, self.cache.length - at)]))
        scores = score_blocks(self.drafter, blocks, self.cache, self.plane)
        return [one[:k] for one, k in zip(scores, lengths, strict=True)]

    def _after(self, row: Tensor, token: int) -> Tensor:
        if self.drafter.markov is None:
            return row
        device = self.drafter.device
        return self.drafter.after(row[None].to(device), torch.tensor([token], device=device))[0].cpu()
