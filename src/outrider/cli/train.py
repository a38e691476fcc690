"""The command that makes drafters: `outrider train`.

It registers itself with the command line when it is imported, reads options, and hands over to `train.run`. Ctrl-C
once ends after the step under way, with everything on disk; twice ends at once, and little is lost.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import OutriderError
from .app import Debug, Device, Dtype, Json, _progress, _sentences, app, errors

if TYPE_CHECKING:
    from ..train.recipe import Recipe

_SPEAK = 20.0  # seconds between two lines where there is no terminal to draw a bar on
Files = Annotated[list[Path], typer.Option(help="Prompts: JSONL or a JSON list; may be repeated.")]


@app.command()
def train(
    prompts: Files,
    out: Annotated[Path, typer.Option(help="The drafter's folder.")],
    target: Annotated[str | None, typer.Option(help="Whose drafter; default: SmolLM2-135M.")] = None,
    kind: Annotated[
        str, typer.Option(help="eagle3, block, exit (after a few layers), or model (a small one of its own).")
    ] = "eagle3",
    exclude: Annotated[list[Path] | None, typer.Option(help="Files whose prompts are not trained on.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    answers: Annotated[int, typer.Option(min=-1, help="How many; 0: one for each prompt; -1: those on disk.")] = 0,
    answers_file: Annotated[Path | None, typer.Option(help="Where answers are kept; trainings may share it.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="The longest answer.")] = 512,
    batch: Annotated[int, typer.Option(min=0, help="Answers at a time; 0: 8 on a CPU, 256 on a GPU.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that generate answers; more for small targets.")] = 1,
    steps: Annotated[int, typer.Option(min=0, help="Training steps; 0: by --tokens.")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="Training tokens; 0: three times over the answers.")] = 0,
    batch_tokens: Annotated[int, typer.Option(min=32, help="Tokens of one step.")] = 8192,
    lr: Annotated[float, typer.Option(min=0.0, help="The highest learning rate.")] = 5e-4,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same drafter.")] = 0,
    layers: Annotated[int, typer.Option(min=0, help="0: 1 for heads and adapters, 4 for a model.")] = 0,
    exit_layer: Annotated[int, typer.Option(min=0, help="Layers before the exit; 0: a quarter of them.")] = 0,
    intermediate: Annotated[int, typer.Option(min=0, help="Width of a head's MLP; 0: the target's.")] = 0,
    hidden_size: Annotated[
        int, typer.Option(min=0, help="Width of a head; 0: the target's. Less: quicker, with its own embedding.")
    ] = 0,
    tap: Annotated[list[int] | None, typer.Option(help="Layers whose features are read; may be repeated.")] = None,
    draft_vocab: Annotated[int, typer.Option(min=0, help="Most frequent ids that can be drafted; 0: all.")] = 16_384,
    unroll: Annotated[int, typer.Option(min=1, max=16, help="Tokens of a chain that eagle3 is trained for.")] = 6,
    block: Annotated[int, typer.Option(min=2, max=32, help="Tokens of a block.")] = 8,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks trained in each sequence.")] = 32,
    start_from: Annotated[Path | None, typer.Option(help="Begin with the weights of this head.")] = None,
    hard: Annotated[bool, typer.Option("--hard", help="Learn the tokens, not the target's distribution.")] = False,
    train_embedding: Annotated[bool, typer.Option("--train-embedding", help="Of --kind model.")] = False,
    store: Annotated[str, typer.Option(help="How weights are written: bfloat16 or float32.")] = "bfloat16",
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 200,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the step (GPU).")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the training in --out.")] = False,
    stop_after: Annotated[float, typer.Option(min=0.0, help="Seconds after which to stop as Ctrl-C does.")] = 0.0,
    html: Annotated[Path | None, typer.Option(help="Write the curves to this file.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a drafter for a model from its own answers: generate, train, evaluate, write a folder."""
    given = dict(locals())
    for name in ("as_json", "debug", "stop_after"):
        given.pop(name)
    given |= {"prompts": tuple(prompts), "exclude": tuple(exclude or ()), "taps": tuple(given.pop("tap") or ())}
    given["soft"] = not given.pop("hard")
    with _sentences(debug):
        from ..train.recipe import Recipe

        _run(Recipe(**given), stop_after, as_json)


@app.command()
def invent(
    out: Annotated[Path, typer.Option(help="Where the prompts go: JSONL, for --prompts of `outrider train`.")],
    count: Annotated[int, typer.Option(min=1, help="How many are tried; some do not come to an end.")] = 1000,
    target: Annotated[str | None, typer.Option(help="Who invents; default: SmolLM2-135M.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_tokens: Annotated[int, typer.Option(min=4, help="The longest prompt.")] = 160,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 32,
    workers: Annotated[int, typer.Option(min=1, help="Processes; more for small targets on a GPU.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same prompts.")] = 0,
    stop_after: Annotated[float, typer.Option(min=0.0, help="Seconds after which to stop as Ctrl-C does.")] = 0.0,
    debug: Debug = False,
) -> None:
    """Let a chat model write its own training prompts: it goes on where a user would begin to speak."""
    with _sentences(debug):
        from ..backends.machine import choose_device
        from ..train.prompts import Invention, invent as make

        where = str(choose_device(device or "auto"))
        wish = Invention(out, count, target, where, dtype or "auto", max_tokens, batch, workers, seed)
        with _stopped(), _asked_to_stop(stop_after) as stop, _progress() as bar:
            found = make(wish, _spoken(bar), stop)
        typer.echo(f"{found} prompts in {out}.")


@contextmanager
def _stopped() -> Iterator[None]:
    """A wish to stop is no failure: say how to go on."""
    from ..train.generation import Stopped

    try:
        yield
    except Stopped as reason:
        errors.print(f"\n{escape(str(reason))} Nothing is lost; go on with:", soft_wrap=True)
        errors.print(escape(_again()), soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None


def _run(recipe: Recipe, seconds: float, as_json: bool) -> None:
    from ..train.run import train as make

    if recipe.html is not None and not recipe.html.expanduser().absolute().parent.is_dir():
        raise OutriderError(f"{recipe.html} cannot be written: its folder does not exist.")
    with _stopped(), _asked_to_stop(seconds) as stop, _progress() as bar:
        result = make(recipe, _spoken(bar), stop)
    if not as_json:
        _show(Console(), result, recipe)
    typer.echo(json.dumps(_brief(result), ensure_ascii=False))


def _again() -> str:
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return shlex.join(["outrider", *words, *(["--resume"] if "train" in words else [])])


@contextmanager
def _asked_to_stop(seconds: float) -> Iterator[Callable[[], bool]]:
    """Ctrl-C once is a wish, twice an order. So many seconds (0: no end) are a wish, too."""
    asked, begin = [False], time.monotonic()

    def heard(number: int, frame: Any) -> None:
        if asked[0]:
            raise KeyboardInterrupt
        asked[0] = True
        errors.print("\nStopping after this step; once more to stop at once.")

    try:
        before = signal.signal(signal.SIGINT, heard)
    except ValueError:  # not the main thread: whoever runs us handles signals
        yield lambda: 0 < seconds < time.monotonic() - begin
        return
    try:
        yield lambda: asked[0] or 0 < seconds < time.monotonic() - begin
    finally:
        signal.signal(signal.SIGINT, before)


def _spoken(bar: Callable[[str, float], None]) -> Callable[[str, float], None]:
    """The bar where there is a terminal; elsewhere a line now and then."""
    last = [time.monotonic()]

    def say(what: str, done: float) -> None:
        bar(what, done)
        if not errors.is_terminal and (time.monotonic() - last[0] > _SPEAK or done >= 1.0):
            last[0] = time.monotonic()
            errors.print(escape(what), soft_wrap=True, highlight=False)

    return say


def _show(console: Console, result: dict[str, Any], recipe: Recipe) -> None:
    kinds = result["evaluations"][-1]["kinds"]
    deep = max(len(found["alpha_by_position"]) for found in kinds.values())
    shown = Table(title=f"Held-out acceptance of {escape(str(recipe.out))}")
    for name in ("kind of text", "τ", *(f"α {i + 1}" for i in range(deep))):
        shown.add_column(name, justify="left" if name == "kind of text" else "right")
    for kind, found in kinds.items():
        alphas = [f"{alpha:.2f}" for alpha in found["alpha_by_position"]]
        shown.add_row(escape(kind), f"{found['tau']:.2f}", *alphas, *["–"] * (deep - len(alphas)))
    console.print(shown)
    before = result["evaluations"][0]["kinds"]["all"]["tau"]
    speed = f"{result['tok_s']:,.0f} tokens/s, {result['steps']:,} steps"
    console.print(f"τ was {before:.2f} before training; {speed}. The card is in {escape(str(recipe.out))}/README.md.")


def _brief(result: dict[str, Any]) -> dict[str, Any]:
    """The result without its curves, for programs."""
    first, last = result["evaluations"][0], result["evaluations"][-1]
    left = {name: value for name, value in result.items() if name not in ("losses", "evaluations", "environment")}
    return left | {"loss": result["losses"][-1]["loss"], "before": first["kinds"]["all"], "kinds": last["kinds"]}
