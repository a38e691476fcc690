"""`outrider train` and `outrider invent`: make a drafter for a model, and prompts to train it on.

Ctrl-C once stops after the current step with everything on disk; twice stops at once and loses little.
"""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Option

from .common import note, print_json, progress_bar, require_folder
from .options import Device, Dtype, Json, Model

if TYPE_CHECKING:
    from ..train.recipe import Recipe

_LOG_SECONDS = 20.0  # between two progress lines where standard error is no terminal
StopAfter = Annotated[float, Option(min=0.0, help="Stop after this time, as Ctrl-C does. 0: never.")]


# Those of `train` that --help lists; --help-all has the rest.
SHOWN = ("prompts", "out", "model", "kind", "answers", "train_tokens", "device", "resume", "stop_after", "html")


def train(
    prompts: Annotated[list[Path], Option(help="A file of prompts: JSONL or a JSON list. Repeatable.")],
    out: Annotated[Path, Option(help="The drafter's folder, to write.")],
    model: Model = None,
    kind: Annotated[str, Option(help="eagle3, block, exit (an early exit) or model (a small model).")] = "eagle3",
    exclude: Annotated[list[Path] | None, Option(help="A file of prompts to leave out. Repeatable.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    answers: Annotated[int, Option(min=-1, help="Answers to train on. 0: one per prompt; -1: those on disk.")] = 0,
    answers_file: Annotated[Path | None, Option(help="Keep answers here, to share them between trainings.")] = None,
    max_tokens: Annotated[int, Option(min=2, help="The most tokens of an answer.")] = 512,
    batch: Annotated[int, Option(min=0, help="Answers at a time. 0: 8 on a CPU, 256 on a GPU.")] = 0,
    workers: Annotated[int, Option(min=1, help="Processes that generate answers. Small models need more.")] = 1,
    steps: Annotated[int, Option(min=0, help="Training steps. 0: as --train-tokens says.")] = 0,
    train_tokens: Annotated[int, Option(min=0, help="Training tokens. 0: three times the answers.")] = 0,
    batch_tokens: Annotated[int, Option(min=32, help="Tokens of one training step.")] = 8192,
    lr: Annotated[float, Option(min=0.0, help="The highest learning rate.")] = 5e-4,
    seed: Annotated[int, Option(min=0, help="The random seed. The same seed gives the same drafter.")] = 0,
    layers: Annotated[int, Option(min=0, help="Layers. 0: 1; for a model 4, behind an encoder 1.")] = 0,
    exit_layer: Annotated[int, Option(min=0, help="Layers before the exit. 0: a quarter of them.")] = 0,
    intermediate: Annotated[int, Option(min=0, help="Width of a head's MLP. 0: the target's.")] = 0,
    hidden_size: Annotated[int, Option(min=0, help="Width of a head. 0: the target's. Narrower is faster.")] = 0,
    tap: Annotated[list[int] | None, Option(help="A layer whose features the head reads. Repeatable.")] = None,
    draft_vocab: Annotated[int, Option(min=0, help="Draft only the N most frequent tokens. 0: all.")] = 16_384,
    unroll: Annotated[int, Option(min=1, max=16, help="Train eagle3 for chains of N tokens.")] = 6,
    block: Annotated[int, Option(min=2, max=32, help="Tokens of a block.")] = 8,
    anchors: Annotated[int, Option(min=1, help="Blocks trained in each sequence.")] = 32,
    start_from: Annotated[Path | None, Option(help="Start from the weights of this head.")] = None,
    hard: Annotated[bool, Option("--hard", help="Train on tokens, not on the target's distribution.")] = False,
    freeze_output: Annotated[
        bool, Option("--freeze-output", help="Keep the target's output rows; the head's file needs none.")
    ] = False,
    train_embedding: Annotated[bool, Option("--train-embedding", help="Train --kind model's embedding.")] = False,
    store: Annotated[str, Option(help="Write weights in bfloat16, float32, q8_0, q4_1, q4_0 or q4_k.")] = "bfloat16",
    save_every: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 200,
    evaluate_every: Annotated[int, Option(min=1, help="Steps between evaluations.")] = 200,
    compile: Annotated[bool, Option("--compile", help="Compile the training step, on a GPU.")] = False,
    resume: Annotated[bool, Option("--resume", help="Continue the training in --out.")] = False,
    stop_after: StopAfter = 0.0,
    html: Annotated[Path | None, Option(help="Write the training curves to this HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """Train a drafter for a model on the model's own answers: generate, train, evaluate, write a folder."""
    choices = dict(locals())
    choices |= {"target": choices.pop("model"), "tokens": choices.pop("train_tokens")}
    for name in ("as_json", "stop_after"):
        choices.pop(name)
    choices |= {"prompts": tuple(prompts), "exclude": tuple(exclude or ()), "taps": tuple(choices.pop("tap") or ())}
    choices |= {"device": device or "auto", "dtype": dtype or "auto", "soft": not choices.pop("hard")}
    from ..train.recipe import Recipe
    from ..train.run import train as make

    recipe = Recipe(**choices)
    require_folder(html)
    with _resumable(), _stop_request(stop_after) as stop, progress_bar(_LOG_SECONDS) as progress:
        result = make(recipe, progress, stop)
    if not as_json:
        _show(Console(), result, recipe)
    if as_json or not sys.stdout.isatty():
        print_json(_without_curves(result))


def invent(
    out: Annotated[Path, Option(help="The JSONL file to write, for --prompts of `outrider train`.")],
    count: Annotated[int, Option(min=1, help="Try N prompts; those that do not end are dropped.")] = 1000,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    max_tokens: Annotated[int, Option(min=4, help="The most tokens of a prompt.")] = 160,
    batch: Annotated[int, Option(min=1, help="Prompts at a time.")] = 32,
    workers: Annotated[int, Option(min=1, help="Processes. Small models on a GPU need more.")] = 1,
    seed: Annotated[int, Option(min=0, help="The random seed. The same seed gives the same prompts.")] = 0,
    stop_after: StopAfter = 0.0,
) -> None:
    """Let a chat model write training prompts, by continuing its chat template where the user would begin."""
    from ..backends.machine import choose_device
    from ..train.prompts import Invention, invent as make

    chosen = str(choose_device(device or "auto"))
    plan = Invention(out, count, model, chosen, dtype or "auto", max_tokens, batch, workers, seed)
    with _resumable(), _stop_request(stop_after) as stop, progress_bar(_LOG_SECONDS) as progress:
        written = make(plan, progress, stop)
    typer.echo(f"{written} prompts in {out}.")


@contextmanager
def _resumable() -> Iterator[None]:
    """After a requested stop, print the command that continues, and exit with code 130."""
    from ..train.generation import Stopped

    try:
        yield
    except Stopped as reason:
        note(f"\n{reason} Nothing is lost; continue with:")
        args = [arg for arg in sys.argv[1:] if arg != "--resume"]
        note(shlex.join(["outrider", *args, *(["--resume"] if "train" in args else [])]))
        raise typer.Exit(130) from None


@contextmanager
def _stop_request(seconds: float) -> Iterator[Callable[[], bool]]:
    """Yields a function that is true after the first Ctrl-C, or after so many seconds (0: never)."""
    requested, begin = False, time.monotonic()

    def on_interrupt(number: int, frame: Any) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        note("\nStopping after this step; press Ctrl-C again to stop at once.")

    main_thread = threading.current_thread() is threading.main_thread()  # only that one may handle signals
    before = signal.signal(signal.SIGINT, on_interrupt) if main_thread else None
    try:
        yield lambda: requested or 0 < seconds < time.monotonic() - begin
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, before)


def _show(console: Console, result: dict[str, Any], recipe: Recipe) -> None:
    kinds = result["evaluations"][-1]["kinds"]
    depth = max(len(each["alpha_by_position"]) for each in kinds.values())
    table = Table(title=f"Held-out acceptance of {escape(str(recipe.out))}")
    for name in ("kind of text", "τ", *(f"α {i + 1}" for i in range(depth))):
        table.add_column(name, justify="left" if name == "kind of text" else "right")
    for kind, each in kinds.items():
        alphas = [f"{alpha:.2f}" for alpha in each["alpha_by_position"]]
        table.add_row(escape(kind), f"{each['tau']:.2f}", *alphas, *["–"] * (depth - len(alphas)))
    console.print(table)
    before = result["evaluations"][0]["kinds"]["all"]["tau"]
    speed = f"{result['tok_s']:,.0f} tokens/s, {result['steps']:,} steps"
    console.print(f"τ was {before:.2f} before training; {speed}. The card is in {escape(str(recipe.out))}/README.md.")


def _without_curves(result: dict[str, Any]) -> dict[str, Any]:
    first, last = result["evaluations"][0], result["evaluations"][-1]
    kept = {name: value for name, value in result.items() if name not in ("losses", "evaluations", "environment")}
    return kept | {"loss": result["losses"][-1]["loss"], "before": first["kinds"]["all"], "kinds": last["kinds"]}
