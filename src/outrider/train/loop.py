"""The loop: AdamW under a cosine, clipped gradients, checkpoints, curves.

Promise: on a CPU a run that was killed at any moment and resumed ends with the same weights, bit for bit, as one that
was not; a checkpoint is whole or not there. It knows a student's loss and hits, not what the student is.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError, OutriderError
from .batches import Batch, Batches
from .evaluate import ALL, Acceptance, evaluate
from .objectives import Student

Progress = Callable[[str, float], None]
Json = dict[str, Any]


class Stopped(OutriderError):
    """Somebody asked to stop; what was done so far is on disk."""


@dataclass(frozen=True)
class Plan:
    """How long and how fast."""

    steps: int
    lr: float = 3e-4
    warmup: float = 0.03  # share of the steps
    floor: float = 0.02  # share of the rate that remains at the end
    clip: float = 1.0
    decay: float = 0.0
    save_every: int = 200
    evaluate_every: int = 200
    log_every: int = 10
    compile: bool = False

    def rate(self, step: int) -> float:
        """The learning rate of the step-th step, counted from 0."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.lr * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


class Loop:
    """One training run. `history` grows: losses and evaluations, as they were measured."""

    def __init__(self, student: Student, plan: Plan, batches: Batches, held: list[Batch], file: Path) -> None:
        self.student, self.plan, self.batches, self.held, self.file = student, plan, batches, held, file
        self.trained = [p for p in student.net.parameters() if p.requires_grad]
        self.device = self.trained[0].device
        cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.decay, fused=cuda or None
        )
        self._loss: Callable[[Batch], Tensor] = student.loss
        if plan.compile:
            self._loss = torch.compile(student.loss, dynamic=True)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.losses: list[Json] = []
        self.evaluations: list[Json] = []
        self._sum = torch.zeros((), dtype=torch.float64, device=self.device)  # of losses since the last entry
        self._begin, self._from = time.perf_counter(), 0.0

    # ------------------------------------------------------------ the run

    def run(self, progress: Progress | None = None, stop: Callable[[], bool] = lambda: False) -> None:
        """To the last step. When `stop` says so, a checkpoint is written and `Stopped` is raised."""
        self._begin, self._from = time.perf_counter(), self.seconds
        if self.step == 0:
            self._evaluate()
        stream = self.batches.after(self.step)
        while self.step < self.plan.steps:
            self._learn(next(stream))
            if self.step % self.plan.log_every == 0 or self.step == self.plan.steps:
                self._log(progress)
            if self.step % self.plan.evaluate_every == 0 or self.step == self.plan.steps:
                self._evaluate()
            asked = stop()
            if self.step % self.plan.save_every == 0 or self.step == self.plan.steps or asked:
                self.save()
            if asked and self.step < self.plan.steps:
                raise Stopped(f"Stopped after {self.step} of {self.plan.steps} steps.")

    def _learn(self, batch: Batch) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(self.step)
        self.student.net.train()
        with self._precision():
            loss = self._loss(batch.to(self.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._sum += loss.detach()
        self.step, self.tokens = self.step + 1, self.tokens + batch.count

    def _log(self, progress: Progress | None) -> None:
        count = self.step - (self.losses[-1]["step"] if self.losses else 0)
        loss = float(self._sum) / max(count, 1)  # the only place where the host waits for the device
        self._sum.zero_()
        if not math.isfinite(loss):
            raise ModelError(f"The loss is {loss} at step {self.step}; try again with a lower --lr.")
        self.seconds = self._from + time.perf_counter() - self._begin
        speed = self.tokens / max(self.seconds, 1e-9)
        rate = self.plan.rate(self.step - 1)
        self.losses.append({"step": self.step, "loss": loss, "lr": rate, "tokens": self.tokens, "tok_s": speed})
        if progress is not None:
            left = self.seconds / self.step * (self.plan.steps - self.step)
            last = self.evaluations[-1]["kinds"][ALL]["tau"] if self.evaluations else 1.0
            words = f"step {self.step:,}/{self.plan.steps:,}, loss {loss:.3f}, τ {last:.2f}, {speed:,.0f} tok/s"
            progress(f"{words}, {left:,.0f} s left", self.step / self.plan.steps)

    def _evaluate(self) -> None:
        found = self.measure()
        self.evaluations.append({"step": self.step, "kinds": {kind: a.as_json() for kind, a in found.items()}})

    @torch.no_grad()
    def measure(self) -> dict[str, Acceptance]:
        """Acceptance on the held-out answers, as the net is now."""
        self.student.net.eval()
        with self._precision():
            return evaluate(lambda batch: self.student.hits(batch.to(self.device)), self.held)

    def _precision(self) -> AbstractContextManager[Any]:
        cuda = self.device.type == "cuda"
        return torch.autocast("cuda", dtype=torch.bfloat16) if cuda else nullcontext()

    # ------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Whole or not at all: a kill while writing leaves the one before."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "net": self.student.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self._from + time.perf_counter() - self._begin,
            "sum": self._sum,
            "losses": self.losses,
            "evaluations": self.evaluations,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        unfinished = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        with open(unfinished, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.file)

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one."""
        if not self.file.exists():
            return False
        try:
            state = torch.load(self.file, map_location="cpu", weights_only=True)
            self.student.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (pickle.UnpicklingError, RuntimeError, LookupError, ValueError, EOFError, OSError) as error:
            raise OutriderError(
                f"{self.file} does not belong to this training ({error}). Delete it to start again, or give the "
                "options it was made with."
            ) from error
        for name in ("step", "tokens", "seconds", "losses", "evaluations"):
            setattr(self, name, state[name])
        self._sum.copy_(state["sum"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"], self.device)
        return True
