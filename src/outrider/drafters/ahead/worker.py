"""Who prepares: a loop that reads requests from a mailbox and publishes answers, one depth at a time.

A request that comes while another is being worked on replaces it: the old one is left after the pass at hand. The loop
ends when the engine closes its end of the pipe, in whatever way the engine ended, so nobody is left behind.

    python -m outrider.drafters.ahead.worker FD JSON   # as `place.Process` starts it: shared memory, and what to load
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...backends import Model, Part
from ...backends.cuda.capture import Driver
from ...types import Sequence
from .forks import Forker, Plan
from .laws import Tilt
from .shared_queue import DEPTH, Bell, Mail, Sizes, write_law


@dataclass
class Known:
    """A line as it was read last."""

    edition: int
    seq: Sequence


@dataclass
class Worker:
    """Answers requests with a draft model."""

    mail: Mail
    forker: Forker
    lines: dict[int, Known] = field(default_factory=dict)

    def serve(self, ears: Bell, mouth: Bell) -> None:
        """Until nobody is there to ask."""
        mail, done = self.mail, 0
        self.forker.beat = self._beat
        mail["bytes"][1] = self.forker.plane.bytes
        mail["ready"][0] = 1
        mouth.ring()
        while ears.heard(None):
            number = mail.one("number")
            if number != done:
                done = number
                self._answer(number, mouth)

    def _beat(self) -> None:
        self.mail["beat"][0] += 1

    def _answer(self, number: int, mouth: Bell) -> None:
        mail, begin = self.mail, time.perf_counter()
        mail["published"][0] = -1
        mail["answered"][0] = number
        self._tidy()
        depth, (forks, share) = min(mail.one("depth"), DEPTH), mail["tilt"].tolist()
        self.forker.tilt = Tilt(int(forks), share)
        plans = [plan for line in np.flatnonzero(mail["asked"] >= 0) if (plan := self._plan(int(line))) is not None]
        first, mail["times"][0] = 0.0, begin
        for deep in self.forker.grow(plans, depth):
            mail["times"][deep + 1] = now = time.perf_counter()
            seconds = now - begin
            first = first if deep else seconds
            mail["seconds"][:] = seconds, first, (seconds - first) / max(deep, 1)
            self._publish(plans, deep)
            mouth.ring()
            if mail.one("number") != number:
                return

    def _publish(self, plans: list[Plan], deep: int) -> None:
        mail, row = self.mail, 0
        for plan in plans:
            for branch in plan.branches:
                if row == mail.sizes.rows:
                    break
                write_law(mail, row, deep, branch.laws[deep])
                if not deep:
                    mail["keys"][row] = plan.line, branch.accepted, branch.token
                    mail["odds"][row] = branch.odds
                else:
                    mail["chains"][row, deep - 1] = branch.chain[-1]
                    mail["survival"][row, deep - 1] = branch.survival[-1]
                row += 1
        mail["count"][0], mail["recorded"][0] = row, self.forker.recorded
        mail["published"][0] = deep

    # ------------------------------------------------------------ texts

    def _plan(self, line: int) -> Plan | None:
        mail = self.mail
        seq, asked = self._read(line), int(mail["asked"][line])
        if seq is None or not seq.tokens:
            return None
        trunk, forks = mail["trunk"][line, :asked].tolist(), mail["forks"][line, : asked + 1].tolist()
        return Plan(seq, trunk, forks, line, now=bool(mail.one("now")))

    def _read(self, line: int) -> Sequence | None:
        """The line's text, brought up to date."""
        mail, known = self.mail, self.lines.get(line)
        edition, length = int(mail["edition"][line]), int(mail["length"][line])
        if known is None or known.edition != edition or length < len(known.seq.tokens):
            self._drop(line)
            try:
                told = pickle.loads(mail["settings"][line].tobytes())
            except Exception:  # read in the middle of a write: the next request finds it whole
                return None
            known = self.lines[line] = Known(edition, Sequence(id=line, tokens=[], **told))
            known.seq.tokens = mail["tokens"][line, :length].tolist()
            self.forker.open(known.seq, int(mail["owner"][line]))
        else:
            self.forker.extend(known.seq, mail["tokens"][line, len(known.seq.tokens) : length].tolist())
        return known.seq

    def _tidy(self) -> None:
        for line in [line for line in self.lines if self.mail["owner"][line] < 0]:
            self._drop(line)

    def _drop(self, line: int) -> None:
        known = self.lines.pop(line, None)
        if known is not None:
            self.forker.close(known.seq)


def settings_of(seq: Sequence) -> bytes:
    """What of a request a drafter must know, beside its tokens."""
    names = ("params", "seed", "ends", "bad_words", "rule", "prompt_len")
    return pickle.dumps({name: getattr(seq, name) for name in names})


# ---------------------------------------------------------------- a process of its own


def load(spec: dict[str, Any]) -> Forker:
    """The draft model as a process finds it: from its file."""
    from ...backends.load import load_model
    from ...backends.machine import choose_device, prepare
    from ...models.checkpoint import open_checkpoint

    prepare()
    model = load_model(
        open_checkpoint(spec["model"]), spec["dtype"], spec["length"], device=choose_device(spec["device"])
    )
    skip = frozenset(spec["skip_layers"])
    part = Part(skip_attention=skip, skip_mlp=skip)
    forker = Forker(model, spec["slots"], spec["lines"], spec["length"], part, spec["vocabulary"])
    forker.noised = bool(spec.get("noised", True))
    capture(forker, model, spec["lines"])
    return forker


def capture(forker: Forker, model: Model, lines: int) -> None:
    """Captured passes where the model lives on a GPU, in whichever stream is current; recorded before anybody waits."""
    if model.device.type != "cuda":
        return
    from ...backends.cuda.graphs import Graphs  # needs triton, which is not installed everywhere
    from ...backends.cuda.state import DeviceState

    forker.passes = Graphs(model, forker.plane, DeviceState(forker.cache, Driver(model.device), lines))
    forker.rehearse()


def main(memory: int, spec: dict[str, Any], build: Callable[[dict[str, Any]], Forker] = load) -> None:
    import torch

    from ...backends.loaded_weights import weight_bytes

    mouth = Bell(os.dup(1))
    os.dup2(2, 1)  # whatever libraries print must not ring the bell
    torch.set_num_threads(spec["threads"])
    mail = Mail(Sizes(*spec["sizes"]), mmap.mmap(memory, Sizes(*spec["sizes"]).bytes))
    forker = build(spec)
    mail["bytes"][0] = weight_bytes(forker.model)
    Worker(mail, forker).serve(Bell(0), mouth)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
