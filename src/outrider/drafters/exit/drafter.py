"""The target drafts for itself with its first layers only, and does not run them again (LayerSkip, Kangaroo).

The first layers write exactly what the target would write: their K/V stays, and the verifying pass continues from their
states. So each layer runs once for each token; only the last drafted token runs its first layers in the verifying pass.
A backend that runs whole passes computes them again, with the same text.

Tokens are predicted by a small adapter that `outrider train --kind exit` made for this target, or by the target's own
head, which only checkpoints trained to exit early do well. Nothing is kept between steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends import Model, Part, Passes, ResumableLayers, ops
from ...backends.cpu.eager import first_states
from ...backends.linear import linear, packs, summed
from ...backends.loaded_weights import weight_bytes
from ...backends.rows import Rows, rows_of
from ...engine.batch import BatchBuilder
from ...engine.cache import Plane
from ...errors import ConfigError
from ...models.speculators import HeadConfig, HeadTensors, block_name, check_head, read_head, target_ids
from ...types import Draft, Sequence
from .. import Drafter, DraftRequest, Memory, Traits, Workspace, register
from .._rollout import DraftVocabularyRollout, Growth
from .._trained import DraftVocabulary, insist_on_target, precision


class _Block(NamedTuple):
    norm: Tensor  # [H]
    gate_up: Any  # products, as `linear` makes them
    down: Any


class Exit(DraftVocabulary):
    """Scores of the next token from the residual stream after the first layers.

    The adapter's blocks have no attention. Its output is the target's norm and head, or a trained one over a reduced
    vocabulary: on small models the output is most of the cost. Promise: a row's scores are the same bits whichever
    rows share its pass, as in `transformer`. It knows neither sequences nor K/V.
    """

    def __init__(
        self, layers: int, target: Model, adapter: tuple[HeadConfig, dict[str, Tensor]] | None, dtype: torch.dtype
    ) -> None:
        """layers: how many of the target's run; adapter: None for the target's own head alone."""
        self.layers, self.target, self.compute, self.device = layers, target, dtype, target.device
        self.stream = torch.promote_types(dtype, torch.float32)
        self.eps, self.vocab_size = target.config.norm_eps, target.config.vocab_size
        self.blocks: list[_Block] = []
        self.ids = torch.arange(self.vocab_size)  # [D]
        self.head: Any = None
        self._no_plane = Plane(1, 1, 1, 1, torch.float32, self.device)  # for passes without layers
        if adapter is not None:
            self._load(*adapter)

    def _load(self, config: HeadConfig, tensors: HeadTensors) -> None:
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
        """The stream after the first layers [T, H] -> scores over the draft vocabulary [T, D]."""
        x = x.to(self.stream, copy=True)
        delta = None
        for block in self.blocks:
            h = ops.add_norm(x, delta, block.norm, self.eps, self.compute)
            delta = block.down(block.gate_up.gated(h))
        if self.head is not None:
            h = ops.add_norm(x, delta, self.norm, self.eps, self.compute)
            return summed(self.head(h)).to(self.stream)
        return self._target_head(x if delta is None else x + summed(delta))

    def spread(self, scores: Tensor) -> Tensor:
        return scores if self.head is None else super().spread(scores)

    def _target_head(self, x: Tensor) -> Tensor:
        """The target's norm and head over these rows, without any of its layers: [T, V]."""
        last, every = self.target.config.layers, torch.arange(x.shape[0], device=self.device)
        none = torch.zeros_like(every)
        table = torch.zeros(1, 1, dtype=torch.int32, device=self.device)
        rows = Rows(none, none, none, none, none, table, None, every)
        return self.target.forward(rows, self._no_plane, Part(start=last), x).logits


class ScratchLayers:
    """The first layers where the verifying pass runs them again: what they write is scratch."""

    def __init__(self, space: Workspace, passes: Passes | None) -> None:
        self.space, self.passes = space, passes
        self.layers = 0
        self.drafted: dict[int, list[int]] = {}  # sequence -> tokens after its last one

    def roots(self, seqs: list[Sequence], layers: int) -> Tensor:
        self.layers, self.drafted = layers, {seq.id: [] for seq in seqs}
        packed = BatchBuilder(self.space.cache)
        for seq in seqs:
            packed.pending(seq, len(seq.tokens) - 1, len(seq.tokens), want=False)
        return self._run(packed)

    def nodes(self, seqs: list[Sequence], tokens: list[int]) -> Tensor:
        packed = BatchBuilder(self.space.cache)
        for seq, token in zip(seqs, tokens, strict=True):
            chain = self.drafted[seq.id]
            chain.append(token)
            packed.nodes(seq, chain, list(range(-1, len(chain) - 1)), [len(chain) - 1], range(len(chain)))
        return self._run(packed)

    def _run(self, packed: BatchBuilder) -> Tensor:
        if self.passes is not None:
            return self.passes.states(packed, self.layers)
        return first_states(self.space.target, rows_of(packed), self.space.plane, self.layers)  # [B, H]


class ExitRollout(DraftVocabularyRollout):
    """Chains from the first layers and an exit."""

    keeps_kv = False

    def __init__(self, exit: Exit, space: Workspace, first: ResumableLayers) -> None:
        super().__init__(exit, space.target, space.cache, space.plane, source="exit")
        self.exit, self.first = exit, first

    def _feed(self, seqs: list[Sequence]) -> Tensor:
        return self.exit.scores(self.first.roots(seqs, self.exit.layers)).cpu()  # [B, D]

    def _run(self, batch: list[tuple[Growth, list[int]]]) -> Tensor:
        """One more node of each chain. [B, D]"""
        for growth, nodes in batch:
            growth.spare |= {node: len(growth.spare) for node in nodes}
        tokens = [growth.tokens[node] for growth, nodes in batch for node in nodes]
        return self.exit.scores(self.first.nodes([growth.seq for growth, _ in batch], tokens)).cpu()


@register("exit")
class EarlyExit(Drafter):
    """Options: adapter (a folder), exit_layer (how many layers run), exit_reuse (false: verify from the first layer),
    draft_dtype."""

    traits = Traits(
        options=("adapter", "exit_layer", "exit_reuse", "draft_dtype"),
        needs_layers=True,
        auto=lambda workspace: workspace.option("adapter", default=None) is not None,
        trial=lambda target: {"exit_layer": max(1, target.config.layers // 2)},  # the target's head: low acceptance
    )

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.exit = _load(space)
        reused = space.first_layers if space.option("exit_reuse", default=True) else None
        first = reused or ScratchLayers(space, space.passes(space.target, space.plane))
        self.rollout = ExitRollout(self.exit, space, first)
        self.rollout.record_guesses = space.record_guesses
        memory = lambda: Memory(weight_bytes(self.exit, excluding=space.target))  # noqa: E731  K/V is the target's own
        self.traits = replace(self.traits, memory=memory)

    def draft(self, request: DraftRequest) -> Draft:
        # Drafting reads the target's K/V, which is incomplete while a prompt is pending.
        ready = [
            i
            for i, seq in enumerate(request.seqs)
            if request.budgets[i] and self.space.plane.holds(seq.id) == len(seq.tokens) - 1
        ]
        self.rollout.stop_below = request.stop_below
        return request.answer(ready, lambda part: self.rollout.chains(part.seqs, part.budgets))


def _load(space: Workspace) -> Exit:
    folder = space.option("adapter", default=None)
    layers = space.option("exit_layer", default=None)
    adapter = None
    if folder is not None:
        if not isinstance(folder, str | Path):
            raise ConfigError(f"adapter is {folder!r}, but it must be the folder that `outrider train` wrote.")
        adapter = read_head(folder)
        config = adapter[0]
        if config.kind != "exit":
            raise ConfigError(f"{folder} is a head, not an early exit's adapter: use it with --drafter head.")
        insist_on_target(config, space.target, str(folder))
        trained = config.taps[0] + 1
        if layers not in (None, trained):
            raise ConfigError(f"The adapter {folder} exits after {trained} layers, not after {layers}: omit one.")
        layers = trained
    if layers is None:
        raise ConfigError(
            "The drafter 'exit' needs a trained adapter (--set adapter=FOLDER; `outrider train --kind exit` makes one) "
            "or, for a checkpoint that was trained to exit early, how many layers to run (--set exit_layer=E)."
        )
    most = space.target.config.layers
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < most:
        raise ConfigError(f"exit_layer is {layers!r}, but it must be a number from 1 to {most - 1}.")
    dtype = precision(space)
    if not dtype.is_floating_point:  # an int8 target: the shortest floats whose products are row-invariant here
        dtype = torch.bfloat16 if packs(torch.empty(1, 1, dtype=torch.bfloat16)) else torch.float32
    return Exit(layers, space.target, adapter, dtype)
