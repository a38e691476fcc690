"""Which shape should a head have? Several are trained side by side on the same batches, then compared by speed.

    python bench/head_shapes.py --model MODEL --answers-file FILE [--seconds 90] [--steps 400]
                                --shape 4096x16384 --shape 8960x32768f …

A shape is the width of its MLP x its draft vocabulary; `f` freezes the output rows at the target's. The target runs
once for each batch, so that four shapes take little longer than two. Then each head is evaluated on held-out answers (τ
of greedy chains of K), and its weights are counted: those that a pass reads, and those that its file needs. `speed` is
τ ÷ (1 + K · c), where c is the share of the target's weights that the head's are: what a chain brings where memory is
the limit. Answers must be on disk (`outrider train` makes them). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.backends.machine import choose_device
from outrider.models.checkpoint import open_checkpoint
from outrider.models.speculators import target_hash
from outrider.train.answers import AnswerStore
from outrider.train.batches import Batches, choose_vocabulary, held_out_batches
from outrider.train.decoder import TargetNet
from outrider.train.loop import ALL, Schedule, TrainingLoop, evaluate
from outrider.train.networks import HeadNet
from outrider.train.objectives import EagleObjective
from outrider.train.recipe import Recipe


@dataclass(frozen=True)
class Shape:
    """The width of the MLP and the draft vocabulary of a head."""

    name: str

    @property
    def frozen(self) -> bool:
        return self.name.endswith("f")

    @property
    def sizes(self) -> tuple[int, int]:
        width, vocabulary = self.name.removesuffix("f").split("x")
        return int(width), int(vocabulary)


class Remembering(TargetNet):
    """A target that returns the result of its last call when it is asked for the same batch again."""

    last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def forward(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        if self.last is None or self.last[0] is not tokens:
            self.last = (tokens, super().forward(tokens, taps))
        return self.last[1]


def main() -> None:
    options = arguments()
    device = choose_device(options.device)
    checkpoint = open_checkpoint(options.model)
    header = json.loads(options.answers_file.open(encoding="utf-8").readline())
    header.pop("format")
    if header["target"] != target_hash(checkpoint.config, checkpoint.weights):
        raise SystemExit(f"{options.answers_file} holds the answers of another target.")
    answers = AnswerStore(options.answers_file, header).read()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = TargetNet.load(checkpoint.config, checkpoint.weights, dtype, device)
    target.__class__ = Remembering
    longest = checkpoint.config.context_length
    batches = Batches([a for a in answers if not a.held], options.batch_tokens, longest, 0)
    held = held_out_batches(answers, options.batch_tokens, longest)
    schedule = Schedule(options.steps, options.lr)
    loops = {}
    for shape in map(Shape, options.shape):
        width, size = shape.sizes
        ids = choose_vocabulary(answers, checkpoint.config.vocab_size, size, list(checkpoint.config.eos_ids))
        recipe = Recipe(options.model, (Path("-"),), Path("-"), intermediate=width, freeze_output=shape.frozen)
        config = recipe.head_config(checkpoint.config, len(ids.ids), header["target"], checkpoint.name)
        net = HeadNet.from_target(target, config, ids.ids, 0).to(device)
        objective = EagleObjective(net, target, options.unroll)
        loops[shape] = (TrainingLoop(objective, schedule, batches, held, Path("-")), ids)
    step, seconds = train(loops, batches, options)
    rows = [facts(shape, loop, ids, target) for shape, (loop, ids) in loops.items()]
    show(rows, options.k)
    training = {"steps": step, "seconds": seconds, "answers": len(answers), "unroll": options.unroll, "lr": options.lr}
    print(json.dumps({"bench": "head_shapes", "model": checkpoint.name, "training": training, "shapes": rows}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--answers-file", type=Path, required=True)
    add("--shape", action="append", required=True)
    add("--steps", type=int, default=400, help="of the schedule; training ends earlier when --seconds are over")
    add("--seconds", type=float, default=1e9)
    add("--batch-tokens", type=int, default=16_384)
    add("--unroll", type=int, default=5)
    add("--lr", type=float, default=6e-4)
    add("--k", type=int, default=5, help="tokens of a chain")
    add("--device", default="auto")
    return parser.parse_args()


def train(loops: dict[Shape, Any], batches: Batches, options: argparse.Namespace) -> tuple[int, float]:
    """Every head takes each step; returns steps and seconds."""
    begin, stream, step = time.perf_counter(), batches.after(0), 0
    while step < options.steps and time.perf_counter() - begin < options.seconds:
        batch = next(stream).to(next(iter(loops.values()))[0].device)
        for loop, _ in loops.values():
            loop._train_step(batch)
        step += 1
        if step % 50 == 0:
            taken = time.perf_counter() - begin
            losses = ", ".join(f"{shape.name} {float(loop._loss_sum) / 50:.3f}" for shape, (loop, _) in loops.items())
            for loop, _ in loops.values():
                loop._loss_sum.zero_()
            print(f"step {step:,}, {taken:.0f} s, loss: {losses}", flush=True)
    return step, time.perf_counter() - begin


@torch.no_grad()
def facts(shape: Shape, loop: TrainingLoop, ids: Any, target: TargetNet) -> dict[str, Any]:
    net = loop.objective.net.eval()
    with loop._precision():
        found = evaluate(lambda batch: loop.objective.hits(batch.to(loop.device)), loop.held)
    read = sum(p.numel() for p in net.parameters() if p.dim() > 1)
    stored = sum(p.numel() for p in net.parameters() if p.dim() > 1 and p.requires_grad)
    whole = sum(p.numel() for name, p in target.named_parameters() if p.dim() > 1 and not name.startswith("embed"))
    return {
        "shape": shape.name,
        "read": read,
        "stored": stored,
        "share_of_target": read / whole,
        "coverage": ids.held_coverage,
        "kinds": {kind: each.as_json() for kind, each in found.items()},
    }


def show(rows: list[dict[str, Any]], k: int) -> None:
    print(f"{'shape':>14} {'read M':>8} {'stored M':>9} {'cover':>6} {'tau':>6} {'speed':>6}  alpha by position")
    for row in rows:
        every = row["kinds"][ALL]
        row["speed"] = every["tau"] / (1 + k * row["share_of_target"])
        alphas = " ".join(f"{a:.2f}" for a in every["alpha_by_position"])
        print(
            f"{row['shape']:>14} {row['read'] / 1e6:8.1f} {row['stored'] / 1e6:9.1f} {row['coverage']:6.3f} "
            f"{every['tau']:6.2f} {row['speed']:6.2f}  {alphas}"
        )


if __name__ == "__main__":
    main()
