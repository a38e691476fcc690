"""All of a training in order: questions, answers, vocabulary, steps, folder, card, report.

Promise: the same recipe on the same machine gives the same drafter, however often it was interrupted; a folder that has
a `config.json` is a finished drafter. What is needed to go on lies in its `training` folder. It prints nothing.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..backends.machine import choose_device, device_name, prepare
from ..errors import ConfigError, OutriderError
from ..measure.environment import environment
from ..models.checkpoint import Checkpoint, open_checkpoint
from ..models.speculators import target_hash
from .answers import Answer, Order, Store, digest, missing, spoken
from .asking import Answering, ask
from .batches import Batches
from .card import card
from .evaluate import held_out
from .features import TargetNet
from .loop import Loop, Plan, Stopped
from .make import Made, make_head, make_model
from .pool import absorb_parts
from .questions import Question, read_file, read_questions
from .report import html

Json = dict[str, Any]
Progress = Callable[[str, float], None]
KINDS = ("eagle3", "block", "exit", "model")
ON_DISK = -1  # instead of a number of answers: those that are there
_EPOCHS = 3  # when neither steps nor tokens are given
_FREE = (
    "out",
    "answers_file",
    "resume",
    "device",
    "prompts",
    "exclude",
    "save_every",
    "evaluate_every",
    "html",
    "batch",
    "workers",
)

_TYPED = (
    "device", "dtype", "answers", "max_tokens", "steps", "tokens", "batch_tokens", "lr", "seed", "layers",
    "intermediate", "hidden_size", "exit_layer", "draft_vocab", "unroll", "block", "anchors", "store",
    "save_every", "evaluate_every",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Every choice of a training; 0 means: the usual."""

    target: str | None
    prompts: tuple[Path, ...]
    out: Path
    kind: str = "eagle3"
    exclude: tuple[Path, ...] = ()  # files whose prompts are not trained on
    device: str = "auto"
    dtype: str = "auto"  # in which the target answers
    answers: int = 0  # 0: one for each prompt; ON_DISK: no more than there are
    answers_file: Path | None = None  # where they are kept; None: in the output's training folder
    max_tokens: int = 512
    batch: int = 0  # answers at a time
    workers: int = 1  # processes that generate them
    steps: int = 0
    tokens: int = 0  # instead of steps
    batch_tokens: int = 8192
    lr: float = 5e-4
    seed: int = 0
    layers: int = 0  # 1 for heads and adapters, 4 for a model
    intermediate: int = 0  # the target's
    hidden_size: int = 0  # the target's; less makes a narrow head with an embedding of its own
    taps: tuple[int, ...] = ()  # a low, a middle and a high layer
    exit_layer: int = 0  # kind=exit: layers of the target that run; a quarter of them
    draft_vocab: int = 16_384
    unroll: int = 6
    block: int = 8
    anchors: int = 32
    start_from: Path | None = None  # another head of the same shape
    soft: bool = True
    train_embedding: bool = False  # kind=model
    store: str = "bfloat16"  # in which the drafter is written
    save_every: int = 200
    evaluate_every: int = 200
    compile: bool = False
    resume: bool = False
    html: Path | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"There is no kind '{self.kind}'. Choose one of: {', '.join(KINDS)}.")
        if self.kind == "eagle3" and self.layers > 1:
            raise ConfigError("An EAGLE-3 head has one layer; for more, choose --kind block or --kind model.")
        if self.kind == "exit" and self.taps:
            raise ConfigError("An early exit reads one layer: choose it with --exit-layer instead of --tap.")
        if self.hidden_size and self.kind not in ("eagle3", "block"):
            raise ConfigError("--hidden-size makes a narrow head: it belongs to --kind eagle3 or block.")
        if self.kind != "exit" and self.exit_layer:
            raise ConfigError("--exit-layer belongs to --kind exit.")
        if not self.prompts:
            raise ConfigError("There is nothing to train on: give files with --prompts.")

    @property
    def folder(self) -> Path:
        """Where the training keeps its state."""
        return self.out / "training"

    @property
    def k(self) -> int:
        """Tokens of one draft."""
        return self.block if self.kind == "block" else self.unroll

    @property
    def target_name(self) -> str | None:
        """A model's name, or the last part of its path."""
        return Path(self.target).name if self.target and Path(self.target).exists() else self.target

    def facts(self) -> Json:
        """What decides the result, for people and for `resume`: files by name, not by place."""
        found = {name: value for name, value in asdict(self).items() if name not in (*_FREE, "start_from")}
        files: Json = {"prompts": [p.name for p in self.prompts], "exclude": [p.name for p in self.exclude]}
        files["start_from"] = self.start_from.name if self.start_from else None
        plain: Json = json.loads(json.dumps(found | files | {"target": self.target_name}))
        return plain | {"command": self.command()}

    def command(self) -> str:
        """As it would be typed, with the names of files only."""
        words = ["outrider", "train", "--kind", self.kind, "--out", self.out.name]
        words += ["--target", self.target_name] if self.target_name else []
        for name, values in {"prompts": self.prompts, "exclude": self.exclude, "tap": self.taps}.items():
            words += [word for value in values for word in (f"--{name}", Path(str(value)).name)]
        words += ["--start-from", self.start_from.name] if self.start_from else []
        words += ["--hard"] if not self.soft else []
        for name, field in Recipe.__dataclass_fields__.items():
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is True and name not in ("soft", "resume"):
                words.append(option)
            elif name in _TYPED and value != field.default:
                words += [option, str(value)]
        return shlex.join(words)


def train(recipe: Recipe, progress: Progress | None = None, stop: Callable[[], bool] = lambda: False) -> Json:
    """Make the drafter; returns what the report shows. `stop` is asked now and then: then `Stopped` is raised."""
    prepare()
    device = choose_device(recipe.device)
    checkpoint = open_checkpoint(recipe.target)
    questions = read_questions(recipe.prompts, recipe.exclude, recipe.seed)
    _agree(recipe, checkpoint)
    answers = collect(recipe, checkpoint, questions, device, progress, stop)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = TargetNet.load(checkpoint.config, checkpoint.weights, dtype, device)
    made = (make_model if recipe.kind == "model" else make_head)(recipe, checkpoint, target, answers, device)
    loop = _loop(recipe, made, checkpoint, answers)
    if recipe.resume:
        loop.resume()
    loop.run(progress, stop)
    result = _result(recipe, checkpoint, made, loop, answers)
    made.write(card(result))
    (recipe.folder / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")
    if recipe.html is not None:
        recipe.html.write_text(html(result), encoding="utf-8")
    return result


# ---------------------------------------------------------------- the parts


def _agree(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """A folder belongs to one training: another one is not mixed into it, and one under way is not forgotten."""
    note = recipe.folder / "recipe.json"
    facts = recipe.facts() | {"target_hash": target_hash(checkpoint.config, checkpoint.weights)}
    for name in ("command", "target"):  # they tell where things lie, not what they are
        facts.pop(name)
    if (recipe.folder / "checkpoint.pt").exists() and not recipe.resume:
        raise OutriderError(
            f"{recipe.out} already holds a training. Go on with it by --resume, or choose another --out, or delete "
            f"{recipe.folder}."
        )
    if recipe.resume and note.exists():
        known = json.loads(note.read_text(encoding="utf-8"))
        other = sorted(name for name in facts if known.get(name) != facts[name])
        if other:
            raise OutriderError(
                f"The training in {recipe.out} was started with another {' and '.join(other)}; give the same options "
                "to go on with it, or another --out."
            )
    recipe.folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def collect(
    recipe: Recipe,
    checkpoint: Checkpoint,
    questions: list[Question],
    device: torch.device,
    progress: Progress | None,
    stop: Callable[[], bool],
) -> list[Answer]:
    """The target's answers: those on disk, and the ones that are still missing there."""
    batch = recipe.batch or (256 if device.type == "cuda" else 8)
    order = Order(recipe.answers, recipe.max_tokens, recipe.seed, batch)
    facts = {"target": target_hash(checkpoint.config, checkpoint.weights), "prompts": digest(questions)}
    store = Store(
        recipe.answers_file or recipe.folder / "answers.jsonl",
        facts | {"max_tokens": recipe.max_tokens, "seed": recipe.seed, "sampled": order.sampled},
    )
    absorb_parts(store)
    known = store.numbers()
    if recipe.answers == ON_DISK:
        return store.read()
    lacking = missing(questions, order, known)
    if lacking:
        job = Answering(recipe.target, recipe.dtype, str(device), order, recipe.workers)
        ask(job, lacking, store, spoken(progress, len(known), len(known) + len(lacking)), stop)
    if stop():
        raise Stopped("Stopped while the target was answering.")
    wanted = {n for n, _, _ in missing(questions, order, set())}
    return [a for a in store.read() if a.number in wanted]


def _loop(recipe: Recipe, made: Made, checkpoint: Checkpoint, answers: list[Answer]) -> Loop:
    longest = checkpoint.config.context_length
    anchors = recipe.anchors if recipe.kind == "block" else 0
    trained = [a for a in answers if not a.held]
    batches = Batches(trained, recipe.batch_tokens, longest, recipe.seed, anchors)
    if not batches.items:
        raise OutriderError("No answer has two tokens, so there is nothing to learn; raise --max-tokens.")
    tokens = recipe.tokens or _EPOCHS * sum(a.length for a in batches.items)
    steps = recipe.steps or max(1, -(-tokens // recipe.batch_tokens))
    plan = Plan(
        steps, recipe.lr, save_every=recipe.save_every, evaluate_every=recipe.evaluate_every, compile=recipe.compile
    )
    held = held_out(answers, recipe.batch_tokens, longest)
    return Loop(made.student, plan, batches, held, recipe.folder / "checkpoint.pt")


def _result(recipe: Recipe, checkpoint: Checkpoint, made: Made, loop: Loop, answers: list[Answer]) -> Json:
    where = device_name(loop.device) if loop.device.type == "cuda" else "cpu"
    return {
        "kind": recipe.kind,
        "target": {"name": checkpoint.name, "hash": target_hash(checkpoint.config, checkpoint.weights)},
        "recipe": recipe.facts(),
        "data": [_data(path) for path in recipe.prompts],
        "answers": len(answers),
        "answer_tokens": sum(len(a.answer) for a in answers),
        "held_answers": sum(a.held for a in answers),
        "steps": loop.step,
        "tokens": loop.tokens,
        "seconds": loop.seconds,
        "tok_s": loop.tokens / max(loop.seconds, 1e-9),
        "parameters": sum(p.numel() for p in loop.trained),
        "device": where,
        "losses": loop.losses,
        "evaluations": loop.evaluations,
        "environment": environment(),
    } | made.facts


def _data(path: Path) -> Json:
    sha = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return {"file": path.name, "prompts": len(read_file(path)), "sha256": sha}
