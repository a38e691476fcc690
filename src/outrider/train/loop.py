"""The training loop: AdamW with a cosine schedule, clipped gradients, evaluations, checkpoints.

On a CPU, a run that was killed at any moment and resumed ends with bit-identical weights. A checkpoint is complete or
absent. The loop knows an objective's loss and hits, not what kind of drafter it trains.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError, OutriderError
from .batches import Batch, Batches
from .generation import Progress, Stop, Stopped
from .objectives import Objective

ALL = "all"  # kinds of text together
Json = dict[str, Any]


@dataclass(frozen=True)
class Schedule:
    """The length of a run, its learning rate, and how often it saves, evaluates and logs (in steps)."""

    steps: int
    lr: float = 3e-4
    warmup: float = 0.03  # share of the steps
    floor: float = 0.02  # share of the rate that remains at the end
    clip: float = 1.0
    save_every: int = 200
    evaluate_every: int = 200
    log_every: int = 10
    compile: bool = False

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.lr * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))

    def due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.steps


class TrainingLoop:
    """One training run. `losses` and `evaluations` grow as they are measured."""

    def __init__(
        self, objective: Objective[Any], schedule: Schedule, batches: Batches, held: list[Batch], file: Path
    ) -> None:
        self.objective, self.schedule, self.batches, self.held, self.file = objective, schedule, batches, held, file
        self.parameters = [p for p in objective.net.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=schedule.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=self.cuda or None
        )
        self._loss: Callable[[Batch], Tensor] = objective.loss
        if schedule.compile:
            self._loss = torch.compile(objective.loss, dynamic=True)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.losses: list[Json] = []
        self.evaluations: list[Json] = []
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)  # since the last entry in `losses`
        self._start, self._seconds_before = time.perf_counter(), 0.0

    def run(self, progress: Progress | None = None, stop: Stop = lambda: False) -> None:
        """Train to the last step. When `stop` returns True, write a checkpoint and raise `Stopped`."""
        schedule = self.schedule
        self._start, self._seconds_before = time.perf_counter(), self.seconds
        if self.step == 0:
            self.evaluate()
        stream = self.batches.after(self.step)
        while self.step < schedule.steps:
            self._train_step(next(stream))
            if schedule.due(self.step, schedule.log_every):
                self._log(progress)
            if schedule.due(self.step, schedule.evaluate_every):
                self.evaluate()
            stopping = stop()
            if schedule.due(self.step, schedule.save_every) or stopping:
                self.save()
            if stopping and self.step < schedule.steps:
                raise Stopped(f"Stopped after {self.step} of {schedule.steps} steps.")

    def _train_step(self, batch: Batch) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        self.objective.net.train()
        with self._precision():
            loss = self._loss(batch.to(self.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.schedule.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._loss_sum += loss.detach()
        self.step, self.tokens = self.step + 1, self.tokens + batch.count

    def _log(self, progress: Progress | None) -> None:
        count = self.step - (self.losses[-1]["step"] if self.losses else 0)
        loss = float(self._loss_sum) / max(count, 1)  # the only place where the host waits for the device
        self._loss_sum.zero_()
        if not math.isfinite(loss):
            raise ModelError(f"The loss is {loss} at step {self.step}; try again with a lower --lr.")
        self.seconds = self._elapsed()
        speed = self.tokens / max(self.seconds, 1e-9)
        rate = self.schedule.rate(self.step - 1)
        self.losses.append({"step": self.step, "loss": loss, "lr": rate, "tokens": self.tokens, "tok_s": speed})
        if progress is not None:
            steps = self.schedule.steps
            left = self.seconds / self.step * (steps - self.step)
            tau = self.evaluations[-1]["kinds"][ALL]["tau"] if self.evaluations else 1.0
            text = f"step {self.step:,}/{steps:,}, loss {loss:.3f}, τ {tau:.2f}, {speed:,.0f} tok/s"
            progress(f"{text}, {left:,.0f} s left", self.step / steps)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Measure acceptance on the held-out answers."""
        self.objective.net.eval()
        with self._precision():
            kinds = evaluate(lambda batch: self.objective.hits(batch.to(self.device)), self.held)
        self.evaluations.append({"step": self.step, "kinds": {kind: a.as_json() for kind, a in kinds.items()}})

    def _precision(self) -> AbstractContextManager[Any]:
        if self.cuda:
            return torch.autocast("cuda", dtype=torch.bfloat16)
        dtype = self.objective.precision
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def _elapsed(self) -> float:
        """Seconds of training, those before the run was resumed included."""
        return self._seconds_before + time.perf_counter() - self._start

    # ------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Write a checkpoint; a kill while writing leaves the previous one."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "net": self.objective.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self._elapsed(),
            "sum": self._loss_sum,
            "losses": self.losses,
            "evaluations": self.evaluations,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if self.cuda else None,
        }
        unfinished = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        with open(unfinished, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.file)

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        if not self.file.exists():
            return
        try:
            state = torch.load(self.file, map_location="cpu", weights_only=True)
            self.objective.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (pickle.UnpicklingError, RuntimeError, LookupError, ValueError, EOFError, OSError) as error:
            raise OutriderError(
                f"{self.file} does not belong to this training run ({error}). Delete it to start again, or give the "
                "options that it was made with."
            ) from error
        for name in ("step", "tokens", "seconds", "losses", "evaluations"):
            setattr(self, name, state[name])
        self._loss_sum.copy_(state["sum"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None and self.cuda:
            torch.cuda.set_rng_state(state["random_cuda"], self.device)


# ---------------------------------------------------------------- acceptance on held-out answers


@dataclass
class Acceptance:
    """What greedy chains of drafts would have gained on held-out answers, for one kind of text.

    Counts by position are those of chains from every row. τ is that of a walk through the answers, as in decoding.
    """

    reached: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)
    steps: int = 0  # of the walk
    emitted: int = 0

    @property
    def tau(self) -> float:
        """Tokens per target pass, bonus included."""
        return self.emitted / self.steps if self.steps else 1.0

    def count(self, hits: Tensor) -> None:
        """hits [n-1, K] of one sequence: 1, 0, or -1 where there is nothing to predict."""
        right_so_far = torch.ones_like(hits[:, 0], dtype=torch.bool)
        for j in range(hits.shape[1]):
            if len(self.reached) == j:
                self.reached.append(0)
                self.accepted.append(0)
            reached = right_so_far & (hits[:, j] >= 0)
            right_so_far = reached & (hits[:, j] == 1)
            self.reached[j] += int(reached.sum())
            self.accepted[j] += int(right_so_far.sum())
        self._walk((hits == 1).long().cumprod(1).sum(1).tolist(), (hits[:, 0] >= 0).nonzero().flatten().tolist())

    def _walk(self, runs: list[int], roots: list[int]) -> None:
        """runs [n-1]: how many drafts are right from each row."""
        row, end = (roots[0], roots[-1] + 1) if roots else (0, 0)
        while row < end:
            emitted = min(runs[row] + 1, end - row)
            self.steps, self.emitted, row = self.steps + 1, self.emitted + emitted, row + emitted

    def as_json(self) -> Json:
        """`alpha_by_position` is the share of drafted tokens that are right once the ones before them were."""
        by_position = [a / r for a, r in zip(self.accepted, self.reached, strict=True) if r]
        alpha = sum(self.accepted) / max(sum(self.reached), 1)
        return {"alpha_by_position": by_position, "alpha": alpha, "tau": self.tau, "tokens": self.emitted}


def evaluate(hits: Callable[[Batch], Tensor], batches: Iterable[Batch]) -> dict[str, Acceptance]:
    """By kind of text; `all` comes first."""
    kinds = {ALL: Acceptance()}
    for batch in batches:
        for sequence, kind in zip(hits(batch).cpu(), batch.kinds, strict=True):
            kinds[ALL].count(sequence)
            kinds.setdefault(kind, Acceptance()).count(sequence)
    return kinds
