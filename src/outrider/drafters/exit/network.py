"""An early exit: what the target would say if it had to speak after its first layers.

A small adapter (blocks without attention: the layers below have looked around already) moves the stream to where the
output expects it. The output is the target's own norm and head, or a trained one over a reduced vocabulary, which on
small models is most of what a guess costs. Without an adapter, the target's own head speaks at once, which only
checkpoints trained for it (LayerSkip) do well.

The promise: a row's scores are the same bits whichever rows share its pass, as in `transformer`. It keeps nothing
between passes and knows neither sequences nor K/V.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends import Model, Part, ops
from ...backends.linear import linear, summed
from ...backends.rows import Rows
from ...engine.cache import Plane
from ...models.speculators import HeadConfig, block_name, check_head, target_ids


class _Block(NamedTuple):
    norm: Tensor  # [H]
    gate_up: Any  # products, as `linear` makes them
    down: Any


class Exit:
    """Scores of the next token from the stream after the first layers."""

    def __init__(
        self, layers: int, target: Model, adapter: tuple[HeadConfig, dict[str, Tensor]] | None, dtype: torch.dtype
    ) -> None:
        """layers: how many of the target's run; adapter: None for the target's own head alone."""
        self.layers, self.target, self.compute, self.device = layers, target, dtype, target.device
        self.stream = torch.promote_types(dtype, torch.float32)
        self.eps = target.config.norm_eps
        self.blocks: list[_Block] = []
        self.ids = torch.arange(target.config.vocab_size)  # [D]
        self.head: Any = None
        self._nowhere = Plane(1, 1, 1, 1, torch.float32, self.device)  # where no layer runs, no K/V is read
        if adapter is not None:
            self._adopt(*adapter)

    def _adopt(self, config: HeadConfig, tensors: dict[str, Tensor]) -> None:
        check_head(config, tensors, "The adapter")

        def product(*names: str) -> Any:
            return linear(torch.cat([tensors[name].to(self.device, self.compute) for name in names]))

        for i in range(config.layers):
            at = block_name(i)
            norm = tensors[f"{at}.norm.weight"].to(self.device, self.stream)
            pair = product(f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight")
            self.blocks.append(_Block(norm, pair, product(f"{at}.mlp.down_proj.weight")))
        if config.draft_vocab_size < config.vocab_size:
            self.norm = tensors["norm.weight"].to(self.device, self.stream)  # [H]
            self.head = product("lm_head.weight")
            self.ids = target_ids(tensors["d2t"].cpu())

    @torch.inference_mode()
    def scores(self, x: Tensor) -> Tensor:
        """The stream after the first layers [T, H] -> scores over the drafted vocabulary [T, D]."""
        x = x.to(self.stream, copy=True)
        delta = None
        for block in self.blocks:
            h = ops.add_norm(x, delta, block.norm, self.eps, self.compute)
            delta = block.down(block.gate_up.gated(h))
        if self.head is not None:
            h = ops.add_norm(x, delta, self.norm, self.eps, self.compute)
            return summed(self.head(h)).to(self.stream)
        return self._own_head(x if delta is None else x + summed(delta))

    def spread(self, scores: Tensor) -> Tensor:
        """Scores over the drafted vocabulary [..., D] as logits over the target's [..., V]."""
        if self.head is None:
            return scores
        logits = scores.new_full((*scores.shape[:-1], self.target.config.vocab_size), -torch.inf)
        logits[..., self.ids.to(scores.device)] = scores
        return logits

    def _own_head(self, x: Tensor) -> Tensor:
        """The target's norm and head over these rows, without any of its layers: [T, V]."""
        last, every = self.target.config.layers, torch.arange(x.shape[0], device=self.device)
        none = torch.zeros_like(every)
        table = torch.zeros(1, 1, dtype=torch.int32, device=self.device)
        rows = Rows(none, none, none, none, none, table, None, every)
        return self.target.forward(rows, self._nowhere, Part(start=last), x).logits
