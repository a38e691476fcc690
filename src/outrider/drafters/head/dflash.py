"""Block drafters of the DFlash kind: every token of a draft in one pass, from masks that see each other.

The target's states at committed positions, fused and normed, are the context: every layer makes keys and values of them
directly, once. A block is the last committed token and masks behind it, at their own positions; its rows attend to the
context and to the whole block (in causal layers: to the rows before them), and a mask predicts the token of its own
position; in an anchored block every row, the first one too, predicts the token after its own. DSpark adds a term for
the token before, Domino one for all tokens of the block so far, DFlash2 chooses among a few candidates by the token
before: so tokens are chosen from left to right. DFlash2 also puts convolutions around attention and MLP. XPress
corrects all places at once, in passes. Block rows live in scratch slots that no sequence owns; where a sequence reaches
its greatest length, a block is cut. It knows rows, planes and states, not files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Listing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...backends import ops
from ...backends.cpu.int8 import Int8Linear, int8_product
from ...backends.cpu.quantise import NamedTensors
from ...backends.linear import summed
from ...backends.rows import Rows, rows_of
from ...engine.batch import BatchBuilder
from ...engine.cache import Cache, Plane
from ...models.speculators import (
    GATED,
    MARKOV_PARTS,
    PREFIX_STATE,
    RECURRENT,
    HeadConfig,
    HeadTensors,
    convolution_name,
)
from ...types import Sequence
from .features import FeatureCache
from .network import Head
from .rollout import HeadRollout

if TYPE_CHECKING:
    from .dflash_captured import BlockGraphs


class Term:
    """A correction of a block's scores. This one corrects nothing."""

    in_order = False  # whether scores depend on the tokens chosen before, from left to right

    def __init__(self, head: DFlashHead) -> None:
        self.compute, self.stream = head.compute, head.stream

    def whole(self, scores: Tensor, hidden: Tensor, last: Tensor) -> Tensor:
        """Scores [b, n, D] of whole blocks, before any token of them is chosen.

        hidden [b, s, H]: all of their rows; last [b, 2]: the tokens before the first row and at it.
        """
        return scores

    def step(
        self, scores: Tensor, hidden: Tensor, before: Tensor, state: Tensor | None, place: int
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Scores [R, D] of the token at this place of a draft, and the state [R, s] for the next one.

        hidden [R, H]: the rows that the scores come from; before [R]: the tokens before; state: None at place 0.
        """
        return scores, state

    def _run(self, product: Any, *parts: Tensor) -> Tensor:
        """A product of these parts side by side, [R, n]."""
        return summed(product(torch.cat([part.to(self.compute) for part in parts], 1))).to(self.stream)

    def _nothing(self, tokens: Tensor, width: int) -> Tensor:
        return torch.zeros(len(tokens), width, dtype=self.stream, device=tokens.device)


class PairTerm(Term):
    """DSpark's: a term for the token before, as it is, gated by the block's row, or from a state that reads both."""

    in_order = True

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head)
        first, second = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
        self.first: Tensor = head._tensors[first].to(head.device, head.compute)  # [V, r]
        self.second, self.kind = head._product("markov", second), head.config.markov_kind  # [D, r]
        part = MARKOV_PARTS.get(self.kind)
        self.joint = head._product("markov_joint", f"markov_head.{part}.weight") if part else None

    def step(
        self, scores: Tensor, hidden: Tensor, before: Tensor, state: Tensor | None, place: int
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        seen = self.first[before].to(self.stream)  # [R, r]
        if self.kind == GATED:
            seen = seen * torch.sigmoid(self._run(self.joint, hidden, seen))
        elif self.kind == RECURRENT:
            state = self._nothing(before, seen.shape[1]) if state is None else state
            keep, candidate, shown = self._run(self.joint, state, seen, hidden).chunk(3, 1)  # [R, r] each
            state, seen = torch.lerp(torch.tanh(candidate), state, torch.sigmoid(keep)), torch.tanh(shown)
        return scores + self._run(self.second, seen).to(scores.dtype), state


class PrefixTerm(Term):
    """Domino's: a gated recurrent unit reads the block's tokens so far, and corrects scores beside the block's row."""

    in_order = True

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head)
        self.embedding, self.width, self.start = head.embedding, head.config.prefix_state, head.config.prefix_from
        self.inputs = head._product("prefix_inputs", "prefix_gru.weight_ih_l0")  # [3 s, H]
        self.again = head._product("prefix_again", PREFIX_STATE)  # [3 s, s]
        self.inner = head._product("prefix_inner", "embed_proj.0.weight")  # [e, H + s]
        self.outer = head._product("prefix_outer", "embed_proj.2.weight")  # [D, e]

    def step(
        self, scores: Tensor, hidden: Tensor, before: Tensor, state: Tensor | None, place: int
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        state = self._nothing(before, self.width) if state is None else state
        new = self._run(self.inputs, self.embedding[before]).chunk(3, 1)  # [R, s] each: reset, keep, candidate
        old = self._run(self.again, state).chunk(3, 1)
        reset, keep = torch.sigmoid(new[0] + old[0]), torch.sigmoid(new[1] + old[1])
        state = torch.lerp(torch.tanh(new[2] + reset * old[2]), state, keep)
        if place < self.start:
            return scores, state
        inner = torch.nn.functional.silu(self._run(self.inner, hidden, state))  # [R, e]
        return scores + self._run(self.outer, inner).to(scores.dtype), state


class SelectorTerm(Term):
    """DFlash2's: of the likeliest tokens by the block alone, each one's score grows by how it follows the token before,
    seen by the block's row; there are no others."""

    in_order = True

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head)
        tables = (f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))
        self.before, self.after = (head._tensors[name].to(head.device) for name in tables)  # [V, r], [D, r]
        self.context = head._product("selector", "candidate_selector.hidden_projection.weight")  # [r, H]
        self.candidates = head.config.selector_top

    def step(
        self, scores: Tensor, hidden: Tensor, before: Tensor, state: Tensor | None, place: int
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        best, index = scores.topk(self.candidates)  # [R, k]
        seen = self.before[before].to(self.stream) * self._run(self.context, hidden)  # [R, r]
        follows = (self.after[index].to(self.stream) * seen[:, None]).sum(-1)  # [R, k]
        none = torch.full_like(scores, -torch.inf)
        return none.scatter(1, index, best + follows.to(scores.dtype)), state


class RefinerTerm(Term):
    """XPress's: places are corrected by the tokens before them in the block, as the last pass guessed them. So passes
    settle one place after the other, at least; what is chosen in the end changes nothing."""

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head)
        at, products = "refiner_head", ("down_h", "down_g", "in_proj", "mlp_down", "readout")
        named = (head._product(f"refiner_{name}", f"{at}.{name}.weight") for name in products)
        self.row, self.mean, self.joint, self.down, self.readout = named  # [r, H] twice, [r, 3r], [r, i], [D, r]
        self.gate_up = head._product("refiner_gate_up", f"{at}.mlp_gate.weight", f"{at}.mlp_up.weight")  # [2 i, r]
        self.tokens: Tensor = head._tensors[f"{at}.token_embed.weight"].to(head.device)  # [V, r]
        mix: Tensor = head._tensors[f"{at}.mix_l"].to(head.device, self.stream).tril()  # [r, s, s]
        self.mix = mix.permute(1, 2, 0).contiguous()  # [s, s, r] what a row takes from those up to it
        self.ids, self.passes = head.device_ids, head.config.refiner_passes

    def whole(self, scores: Tensor, hidden: Tensor, last: Tensor) -> Tensor:
        (b, s, _), n = hidden.shape, scores.shape[1]
        mean = self._run(self.mean, hidden.to(self.stream).mean(1))[:, None].expand(b, s, -1)  # [b, s, r]
        row = self._run(self.row, hidden.flatten(0, 1)).view(b, s, -1)
        shown, known, first = torch.cat([row, mean], 2).flatten(0, 1), last[:, n - s - 1 :], scores
        for _ in range(min(self.passes, n)):  # after n of them nothing changes
            before = torch.cat([known, self.ids[scores.argmax(-1)][:, :-1]], 1)  # [b, s]
            scores = first + self._corrections(before, shown)[:, s - n :].to(first.dtype)
        return scores

    def _corrections(self, before: Tensor, shown: Tensor) -> Tensor:
        """Of all rows' scores [b, s, D]; before [b, s]: the tokens before them; shown [b s, 2 r]: rows and means."""
        s = before.shape[1]
        x = self._run(self.joint, shown, self.tokens[before].flatten(0, 1)).view(*before.shape, -1)  # [b, s, r]
        x = (x + (self.mix[:s, :s] * x[:, None]).sum(2)).flatten(0, 1)
        x = x + self._run(self.down, self.gate_up.gated(x.to(self.compute)))
        return self._run(self.readout, x).view(*before.shape, -1)


class Convolution:
    """DFlash2's, on both sides of attention or an MLP: each channel of a row takes in its own in the rows before it in
    the block, by weights of the layer and, for each group of channels, what the row itself adds to them."""

    def __init__(self, head: DFlashHead, at: str) -> None:
        weights: Tensor = head._tensors[f"{at}.base_kernel"].to(head.device, head.stream)  # [2, k, H]
        self.weights = weights.unflatten(2, (-1, head.config.conv_group))  # [2, k, groups, H / groups]
        self.own = head._product(at, f"{at}.kernel_projection.weight")  # [2 k groups, H]

    def __call__(self, h: Tensor, places: Tensor, inner: Callable[[Tensor], Any]) -> Tensor:
        """What `inner` adds to the stream for normed rows h [T, H], between both convolutions [T, H].

        places [T]: each row's in its block.
        """
        own = summed(self.own(h)).to(self.weights.dtype).view(-1, *self.weights.shape[:3], 1)  # [T, 2, k, groups, 1]
        ahead, behind = (self.weights + own).unbind(1)  # [T, k, groups, H / groups]
        return _convolved(summed(inner(_convolved(h, ahead, places).to(h.dtype))), behind, places)


def _convolved(x: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Rows x [T, H], each with those before it in its block, by its weights [T, k, groups, H / groups]."""
    x = x.to(weights.dtype).view_as(weights[:, 0])
    total = weights[:, 0] * x
    for back in range(1, weights.shape[1]):
        there = (places >= back)[:, None, None]
        total = total + weights[:, back] * torch.where(there, x.roll(back, 0), 0.0)
    return total.flatten(1)


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
        self._tensors = tensors
        terms: list[tuple[int, type[Term]]] = [
            (config.markov, PairTerm), (config.prefix_state, PrefixTerm), (config.selector, SelectorTerm),
            (config.refiner, RefinerTerm),
        ]  # fmt: skip
        self.term = next((term for width, term in terms if width), Term)(self)
        names = [[convolution_name(i, part) for part in ("attention", "mlp")] for i in range(config.layers)]
        self.convolutions = [[Convolution(self, name) if config.conv else None for name in pair] for pair in names]
        self._tensors = {}

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
    def blocks(self, rows: Rows, causal: Rows, plane: Plane, places: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the wanted rows [R, D], and all rows after the last norm [T, H].

        causal: the same rows, seeing only those before them; places [T]: each row's in its block, the first one's is 0.
        """
        rows, causal, places, c = self._on_device(rows), self._on_device(causal), places.to(self.device), self.config
        x = torch.where(places[:, None] > 0, self.mask, self.embedding[rows.tokens]).to(self.stream)
        x = x if c.embedding_scale == 1.0 else x * c.embedding_scale
        rope = (self.cos[rows.positions], self.sin[rows.positions])
        delta: Any = None
        for i, layer in enumerate(self.layers):
            seen = causal if c.causal or (c.window(i) and not c.two_sided) else rows
            attend = partial(self._attention, i, rows=seen, kv=(plane.k[i], plane.v[i]), rope=rope)
            around, beside = self.convolutions[i]
            x, delta = self._sublayer(x, delta, layer.attention_norm, around, places, attend)
            x, delta = self._sublayer(x, delta, layer.mlp_norm, beside, places, partial(_mlp, layer))
        h = ops.add_norm(x, delta, self.norm, c.norm_eps, self.compute)
        scores = summed(self.head(h[rows.want])).to(self.stream) * c.logit_scale
        return scores if not c.logit_cap else c.logit_cap * torch.tanh(scores / c.logit_cap), h

    def _sublayer(
        self, x: Tensor, delta: Any, norm: Tensor, convolution: Convolution | None, places: Tensor,
        inner: Callable[[Tensor], Any],
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """The stream [T, H] after its last delta, and what a sublayer adds to it next."""
        h = ops.add_norm(x, delta, norm, self.config.norm_eps, self.compute)
        return (x, inner(h)) if convolution is None else (x + convolution(h, places, inner), None)

    @torch.inference_mode()
    def in_order(self, scores: Tensor, hidden: Tensor, last: int, chosen: Listing[int]) -> Iterator[Tensor]:
        """A block's scores at each place [D], given the tokens before: `last`, and those chosen, which the caller adds
        between places. scores [n, D] on the host, hidden [n, H]."""
        state: Tensor | None = None
        for place, row in enumerate(scores):
            if self.term.in_order:
                before = torch.tensor([chosen[-1] if place else last], device=self.device)
                shown = row[None].to(self.device)
                given, state = self.term.step(shown, hidden[place, None], before, state, place)
                row = given[0].cpu()
            yield row


def _mlp(layer: Any, h: Tensor) -> Any:
    """Of normed rows h [T, H]."""
    return layer.down(layer.gate_up.gated(h))


class Block(NamedTuple):
    """Rows behind a sequence's tokens up to a position, whose K/V lies in these slots."""

    seq: Sequence
    at: int  # of its first row, which has the sequence's token there
    slots: list[int]


@torch.inference_mode()
def score_blocks(head: DFlashHead, blocks: list[Block], cache: Cache, plane: Plane) -> list[tuple[Tensor, Tensor]]:
    """Scores of the tokens that each block predicts, [n, D] each, on the host, and their rows [n, H], from one pass."""
    rows, causal, anchored = BatchBuilder(cache), BatchBuilder(cache), head.config.anchored
    for seq, at, slots in blocks:
        for j, slot in enumerate(slots):
            token = seq.tokens[at] if j == 0 else 0
            rows._add(seq, token, at + j, slot, at, slots)
            causal._add(seq, token, at + j, slot, at, slots[: j + 1])
    places = torch.cat([torch.arange(len(block.slots)) for block in blocks])  # [T]
    rows.want = causal.want = (places >= (not anchored)).nonzero().flatten().tolist()
    scores, hidden = head.blocks(rows_of(rows), rows_of(causal), plane, places)
    sizes, found = [len(block.slots) for block in blocks], list[tuple[Tensor, Tensor]]()
    parts = zip(blocks, scores.split([size - (not anchored) for size in sizes]), hidden.split(sizes), strict=True)
    for block, own, states in parts:
        last = torch.tensor([block.seq.tokens[block.at - 1 : block.at + 1]], device=head.device)  # [1, 2]
        whole = head.term.whole(own[None], states[None], last)[0]
        found.append((whole.cpu(), states[len(states) - len(own) :]))
    return found


class DFlashRollout(HeadRollout):
    """Chains and trees of such a head: always whole blocks, as in training, of which a draft takes the beginning."""

    def __init__(
        self, head: DFlashHead, cache: Cache, plane: Plane, features: FeatureCache, graphs: BlockGraphs | None = None
    ) -> None:
        super().__init__(head, cache, plane, features, graphs)
        self.drafter, self.size, self.in_order = head, head.config.block_rows, head.term.in_order
        self.hidden: dict[int, Tensor] = {}  # sequence -> [n, H] its block's rows after the last norm
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
        scored = score_blocks(self.drafter, blocks, self.cache, self.plane)
        self.hidden = {seq.id: hidden for seq, (_, hidden) in zip(seqs, scored, strict=True)}
        return [scores[:k] for (scores, _), k in zip(scored, lengths, strict=True)]

    def _in_order(self, rows: Tensor, seq: Sequence, chosen: list[int]) -> Iterator[Tensor]:
        return self.drafter.in_order(rows, self.hidden[seq.id], seq.tokens[-1], chosen)
