"""The `outrider` program: every command is registered here.

With --json, standard output is one JSON object. Exit codes: 0 success, 1 an error or a divergence, 2 wrong usage, 130
interrupted.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable
from typing import Annotated

import typer

from .cache import cache_clear, cache_list
from .chat import chat
from .demo import demo
from .drafter import drafter_encode, drafter_forget, drafter_list, drafter_save, drafter_show
from .export import deploy_ray, export
from .generate import generate
from .measure import bench, bench_serve, cost, doctor, tune
from .models import fetch, models
from .options import Command, Group, command
from .serve import serve
from .trace import explain, trace_html, trace_show
from .train import SHOWN, invent, train
from .verify import verify

app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Lossless speculative decoding: a drafter proposes tokens, and the target keeps only those it would produce."""


def _group(name: str, help: str, **commands: Callable[..., None]) -> None:
    group = typer.Typer(cls=Group, no_args_is_help=True, help=help)
    for subcommand, function in commands.items():
        group.command(subcommand, cls=Command)(command(function))
    app.add_typer(group, name=name)


for function in (demo, generate, chat, verify, serve, fetch, models, doctor, cost, tune, invent, export, explain):
    app.command(cls=Command)(command(function))
app.command(cls=Command)(command(train, SHOWN))
bench_app = typer.Typer(cls=Group, invoke_without_command=True)
bench_app.callback()(command(bench))
bench_app.command("serve", cls=Command)(command(bench_serve))
app.add_typer(bench_app, name="bench")
_group("trace", "Show recorded runs.", show=trace_show, html=trace_html)
_group(
    "drafter", "List, show, save or delete what was learnt; store a head in fewer bits.",
    list=drafter_list, show=drafter_show, save=drafter_save, forget=drafter_forget, encode=drafter_encode,
)  # fmt: skip
_group("cache", "Show or delete what is kept on disk.", list=cache_list, clear=cache_clear)
_group("deploy", "Write the files that a cluster deploys from.", ray=deploy_ray)


def main() -> None:
    """The console script."""
    atexit.register(gc.freeze)  # at the end nothing need be searched for cycles, which takes 0.2 s once torch is there
    app()
