"""The target drafts for itself with its first layers only, and need not run them again (LayerSkip, Kangaroo).

What the first layers write is exactly what the target would write: their K/V stays, and the pass that verifies goes on
from the states that they left behind. So each layer runs once for each token, whoever asked for it. Only the last
drafted token, from which nobody guesses, runs its first layers in that pass. A runner that insists on whole passes
computes them again; the text is the same.

A guess is a small adapter's that `outrider train --kind exit` made for this target, or the target's own head, which
only checkpoints trained to exit early do well. It keeps nothing of its own between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...backends import Passes, ResumableLayers
from ...backends.cpu.eager import first_states
from ...backends.linear import packs
from ...backends.loaded_weights import weight_bytes
from ...backends.rows import rows_of
from ...engine.batch import BatchBuilder
from ...errors import ConfigError
from ...models.speculators import read_head
from ...types import Draft, Sequence
from .. import Drafter, DraftRequest, Memory, Traits, Workspace, register
from .._rollout import DraftVocabularyRollout, Growth
from .._trained import insist_on_target, precision
from .network import Exit


class Alone:
    """The first layers where the verifying pass will run them again: what they write is scratch."""

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
    """Chains from the first layers and an exit. Verification writes the K/V: nothing is claimed here."""

    def __init__(self, exit: Exit, space: Workspace, first: ResumableLayers) -> None:
        super().__init__(exit, space.target, space.cache, space.plane, source="exit")
        self.exit, self.first = exit, first

    def _feed(self, seqs: list[Sequence]) -> Tensor:
        return self._scores(self.first.roots(seqs, self.exit.layers))

    def _run(self, batch: list[tuple[Growth, list[int]]]) -> Tensor:
        """One more node of each chain. [B, D]"""
        for growth, nodes in batch:
            growth.places |= {node: len(growth.places) for node in nodes}
        tokens = [growth.tokens[node] for growth, nodes in batch for node in nodes]
        return self._scores(self.first.nodes([growth.seq for growth, _ in batch], tokens))

    def _scores(self, states: Tensor) -> Tensor:
        return self.exit.scores(states).cpu()  # [B, D]

    def _hold(self, seq: Sequence, tokens: int) -> None:
        pass

    def _keep(self, seq: Sequence, nodes: Iterable[int]) -> None:
        pass


@register("exit")
class EarlyExit(Drafter):
    """Options: adapter (a folder), exit_layer (how many layers run), exit_reuse (false: verify from the start)."""

    traits = Traits(
        options=("adapter", "exit_layer", "exit_reuse", "draft_dtype"),
        needs_layers=True,
        auto=lambda workspace: workspace.option("adapter", default=None) is not None,
        trial=lambda target: {"exit_layer": max(1, target.config.layers // 2)},  # its own head: poor guesses
    )

    def __init__(self, space: Workspace) -> None:
        self.space, self.exit = space, _load(space)
        reused = space.first_layers if space.option("exit_reuse", default=True) else None
        first = reused or Alone(space, space.passes(space.target, space.plane))
        self.rollout = ExitRollout(self.exit, space, first)
        self.rollout.shown = space.record_guesses
        memory = lambda: Memory(weight_bytes(self.exit, excluding=space.target))  # noqa: E731  K/V is the target's own
        self.traits = replace(self.traits, memory=memory)

    def draft(self, request: DraftRequest) -> Draft:
        # Drafting reads the target's K/V: while a prompt is pending there is none to read.
        ready = [i for i, seq in enumerate(request.seqs) if request.budgets[i] and self._held(seq)]
        self.rollout.stop_below = request.stop_below
        return request.answer(ready, lambda part: self.rollout.chains(part.seqs, part.budgets))

    def _held(self, seq: Sequence) -> bool:
        return bool(self.space.plane.holds(seq.id) == len(seq.tokens) - 1)


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
        mine = config.taps[0] + 1
        if layers not in (None, mine):
            raise ConfigError(f"The adapter {folder} exits after {mine} layers, not after {layers}: leave one out.")
        layers = mine
    if layers is None:
        raise ConfigError(
            "The drafter 'exit' needs a trained adapter (--set adapter=FOLDER; `outrider train --kind exit` makes one) "
            "or, for a checkpoint that was trained to exit early, how many layers to run (--set exit_layer=E)."
        )
    most = space.target.config.layers
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < most:
        raise ConfigError(f"exit_layer is {layers!r}, but it must be a number from 1 to {most - 1}.")
    return Exit(layers, space.target, adapter, _floats(precision(space)))


def _floats(dtype: torch.dtype) -> torch.dtype:
    """Beside a target in eight bits, the shortest floats that are exact by row here."""
    if dtype.is_floating_point:
        return dtype
    return torch.bfloat16 if packs(torch.empty(1, 1, dtype=torch.bfloat16)) else torch.float32
