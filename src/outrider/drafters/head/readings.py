"""Which reading of a published head is right: each one is tried on a short text, and the result is remembered.

Files of one kind follow different conventions without saying which (`models.published`). A wrong reading never changes
the text, but it costs most of the acceptance. So the target reads a text once, and every reading predicts each of its
tokens from the target's own states, and the token after from its own output; the reading that agrees with the target's
choices most often is kept. It knows passes and counts, not file formats.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...backends import WHOLE
from ...backends.rows import rows_of
from ...engine.cache import Cache, Plane
from ...models.paths import cache_folder, write_quietly
from ...models.prompts import bundled
from ...models.published import Reading
from ...models.speculators import HeadConfig
from ...models.stages import stage
from ...types import Sequence
from .. import Workspace
from .dflash import Block, DFlashHead, score_blocks
from .features import HeadBatch
from .network import Head

TOKENS = 96  # of the text
BLOCK_EVERY = 4  # tokens of it: where a block drafter is tried


@dataclass(frozen=True)
class Tried:
    """How often each reading agreed with the target's choice; `chosen` is kept."""

    chosen: int
    agreement: tuple[float, ...] = ()  # empty: there was nothing to choose from, or no text to try it on

    def sentence(self, readings: tuple[Reading, ...]) -> str:
        """What was found; empty where nothing was tried."""
        if len(self.agreement) != len(readings) or len(readings) < 2:
            return ""
        others = ", ".join(f"{share:.0%}" for i, share in enumerate(self.agreement) if i != self.chosen)
        what = readings[self.chosen].assumes or "everything is as the file says"
        best = f"agrees with the target in {self.agreement[self.chosen]:.0%} of a text, others in {others}"
        return f"Of {len(readings)} readings of the file the best one {best}: {what}."


def choose_reading(head: Head, readings: tuple[Reading, ...], space: Workspace, name: str) -> tuple[Head, Tried]:
    """The head under the best reading. name: under which the result is remembered for this target."""
    if len(readings) < 2:
        return head, Tried(0)
    file = cache_folder() / "readings" / f"{_key(name, readings, space)}.json"
    tried = _remembered(file, len(readings))
    if tried is None:
        text = _text(space)
        if len(text) < 8:
            return head, Tried(0)
        with stage("Comparing readings of the head") as done:
            trial = Trial(space, text, sorted({tap for reading in readings for tap in reading.config.taps}))
            agreement = []
            for i, reading in enumerate(readings):
                assert isinstance(reading.config, HeadConfig)
                agreement.append(trial.agreement(head.read_as(reading.config)))
                done((i + 1) / len(readings))
        tried = Tried(max(range(len(readings)), key=lambda i: (agreement[i], -i)), tuple(agreement))
        write_quietly(file, json.dumps({"chosen": tried.chosen, "agreement": tried.agreement}))
    config = readings[tried.chosen].config
    assert isinstance(config, HeadConfig)
    return head.read_as(config), tried


def _key(name: str, readings: tuple[Reading, ...], space: Workspace) -> str:
    identity = space.target.identity() or repr(space.target.config)
    return hashlib.sha256(repr((name, readings, identity)).encode()).hexdigest()[:24]


def _remembered(file: Path, count: int) -> Tried | None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        tried = Tried(int(data["chosen"]), tuple(float(share) for share in data["agreement"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tried if 0 <= tried.chosen < count == len(tried.agreement) else None


def _text(space: Workspace) -> list[int]:
    """Tokens of the bundled prompts, as many as a trial needs and a sequence may have."""
    if space.tokenizer is None:
        return []
    limit, ids = min(TOKENS, space.cache.length - 2), list[int]()
    for prompt in bundled():
        ids += space.tokenizer.encode(prompt.text + "\n\n")
        if len(ids) >= limit:
            break
    return [i for i in ids if i < space.target.config.vocab_size][:limit]


class Trial:
    """A text that the target has read, with its choices and the states that it left behind."""

    def __init__(self, space: Workspace, text: list[int], taps: list[int]) -> None:
        n, device = len(text), space.target.device
        self.cache = Cache(2 * n + 64, 2, 2 * n, device)
        plane = self.cache.add_plane(*space.target.plane_shape)
        self.seq = Sequence(1, text)
        self.cache.open(self.seq)
        self.cache.reserve(self.seq, n, n)
        batch = HeadBatch(self.cache)
        batch.pending(self.seq, 0, n, want=False)
        batch.want = list(range(n))
        passes = space.passes(space.target, plane, self.cache)
        if passes is None:
            output = space.target.forward(rows_of(batch), plane, taps=tuple(taps))
            logits, self.hidden = output.logits, output.hidden
        else:
            logits = passes.logits(batch, WHOLE).clone()
            self.hidden = {tap: passes.states(batch, tap + 1).clone() for tap in taps}
        self.choices: Tensor = logits.argmax(-1).cpu()  # [n]

    def agreement(self, head: Head) -> float:
        """The share of the text's tokens that a head predicts as the target does, one and two positions ahead."""
        model: Any = head
        plane = self.cache.add_plane(*model.plane_shape)
        blocks = self._blocks(head, plane) if isinstance(head, DFlashHead) else []
        rows, n = HeadBatch(self.cache), len(self.seq.tokens)
        rows.committed(self.seq, 0, n - 1)
        rows.want = list(range(n - 1))
        hidden = torch.cat([self.hidden[tap] for tap in head.config.taps], 1)[: n - 1].to(head.device, head.stream)
        scores, outputs = head.read(rows_of(rows), plane, hidden)
        if isinstance(head, DFlashHead):
            return self._agreement_of_blocks(head, plane, blocks)
        right = int((self._tokens(head, scores) == self.choices[1:]).sum())
        if head.config.parallel:
            return right / (n - 1)
        later, spare = HeadBatch(self.cache), self.cache.rows[self.seq.id].spare
        for p in range(n - 2):  # each row continues from the output of one committed row
            later._add(self.seq, self.seq.tokens[p + 2], p + 1, spare[p], p + 1, [spare[p]])
        later.want = list(range(n - 2))
        scores, _ = head.scores(rows_of(later), plane, outputs[: n - 2])
        return (right + int((self._tokens(head, scores) == self.choices[2:]).sum())) / (2 * n - 3)

    def _blocks(self, head: DFlashHead, plane: Plane) -> list[Block]:
        """Blocks behind some of the text's tokens, in slots that are added to an empty plane."""
        size, places = head.config.block_rows, range(1, len(self.seq.tokens) - 2, BLOCK_EVERY)
        first = plane.add_scratch(len(places) * size)
        return [
            Block(self.seq, at, list(range(first + i * size, first + i * size + size))) for i, at in enumerate(places)
        ]

    def _agreement_of_blocks(self, head: DFlashHead, plane: Plane, blocks: list[Block]) -> float:
        """The same for the first two tokens of each block."""
        right, text = 0, self.seq.tokens
        for (_, at, _), (scores, hidden) in zip(blocks, score_blocks(head, blocks, self.cache, plane), strict=True):
            given = torch.stack(list(head.in_order(scores[:2], hidden, text[at], text[at + 1 : at + 2])))
            right += int((self._tokens(head, given) == self.choices[at : at + len(given)]).sum())
        return right / (2 * len(blocks))

    def _tokens(self, head: Head, scores: Tensor) -> Tensor:
        return head.ids[scores.argmax(-1).cpu()]
