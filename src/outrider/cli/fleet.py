"""What the command line does with servers that are not ours: `serve --engine vllm`, `verify --server`.

It reads options and hands over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ConfigError
from .app import _progress, errors
from .options import arguments

# Options of `outrider serve` that vLLM's server has no use for.
_OURS = {
    "max_queue": "--max-queue", "max_tokens": "--max-tokens", "max_prompt": "--max-prompt",
    "timeout": "--timeout", "drain": "--drain", "origin": "--origin", "traces": "--traces", "traces_mb": "--traces-mb",
    "log_text": "--log-text", "learn": "--learn", "learn_from": "--learn-from", "learn_to": "--learn-to",
    "draft_device": "--draft-device", "device": "--device", "speculative_config": "--speculative-config",
}  # fmt: skip
SHOWN = 5  # divergences in words


def serve_elsewhere(context: typer.Context) -> None:
    """`outrider serve --engine vllm`."""
    given = context.params
    if given["engine"] != "vllm":
        raise ConfigError(f"There is no engine '{given['engine']}' to serve with; choose outrider or vllm.")
    for name, option in _OURS.items():
        if _was_given(context, name):
            raise ConfigError(f"{option} is Outrider's own server's; vLLM's options go with --engine-arg.")
    from ..export.plan import make_plan
    from ..export.vllm.launch import LaunchOptions, launch_command, require_vllm, start
    from ..models.checkpoint import open_checkpoint
    from ..models.tuning_profile import read_profile
    from ..server.settings import Settings

    keys = tuple(given["api_key"] or ())
    Settings(host=given["host"], port=given["port"], keys=keys, open=given["open_"])  # the same rules about keys
    require_vllm(_say)
    own = arguments(given["drafter"], None, given["k"], None, given["set_"])
    profile = read_profile(given["profile"]) if given["profile"] is not None else {}
    k, drafter = own.pop("k", None), own.pop("drafter", None)
    profile = {**profile, "options": {**profile.get("options", {}), **own}}
    checkpoint = open_checkpoint(given["model"])
    wish = LaunchOptions(
        given["host"],
        given["port"],
        keys,
        given["name"],
        given["max_batch"] if _was_given(context, "max_batch") else None,
        given["dtype"] or "auto",
        tuple(given["engine_arg"] or ()),
    )
    who = make_plan(checkpoint, given["draft_model"] or drafter, profile, None if k == "auto" else k)
    ready = launch_command(checkpoint, who, wish, _say)
    _say(f"Serving {checkpoint.name} with vLLM (drafter {who.kind}, K {who.k}) at http://{wish.host}:{wish.port}/v1")
    start(ready)


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _say(words: str) -> None:
    errors.print(words, highlight=False, soft_wrap=True, markup=False)


# ---------------------------------------------------------------- verify --server


def audit_server(
    server: str,
    plain_server: str | None,
    key: str | None,
    temperatures: list[float] | None,
    limit: int,
    max_tokens: int,
    prompts: Path | None,
    model: str | None,
    concurrency: int,
    as_json: bool,
) -> None:
    """`outrider verify --server`: exit code 1 for divergences or failures, 3 where nothing could be proved."""
    from ..measure.audit import Plan, probed, run
    from ..measure.client import Server
    from ..models.prompts import bundled, from_file

    there = Server(server, key)
    plain = None if plain_server is None else Server(plain_server, key)
    texts = [prompt.text for prompt in (from_file(prompts) if prompts else bundled())[:limit]]
    way = probed(there, plain, model)
    # Only Outrider's own choice depends on the seed alone: others may be lossless in law and still say another thing.
    default = (0.0, 0.8) if way.ours else (0.0,)
    plan = Plan(texts, tuple(temperatures or default), max_tokens, concurrency=concurrency)
    with _progress() as progress:
        found = run(there, plain, way, plan, progress)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        _show_audit(Console(), found, plan)
    if found.divergences or found.failures:
        raise typer.Exit(1)
    if not found.proves:
        raise typer.Exit(3)


_WAYS = {
    "request switch": "Plain text: the same server, with speculation switched off in the request.",
    "second server": "Plain text: the server at {plain}.",
    "the same server twice": "This server has no switch for speculation and no second server was given: it was asked "
    "twice, which shows only whether it repeats itself. Give --plain-server to learn more.",
}


def _show_audit(console: Console, found: Any, plan: Any) -> None:
    def say(words: str) -> None:
        console.print(words, soft_wrap=True, highlight=False)

    say(_WAYS[found.reference].format(plain=escape(found.plain_server)))
    for d in found.divergences[:SHOWN]:
        say(f"\n[red]prompt {d.prompt + 1}[/red], temperature {d.temperature:g}, {d.unit} {d.position}:")
        say(f"  both        …{escape(repr(d.before))}\n  plain       {escape(repr(d.plain))}")
        say(f"  speculative {escape(repr(d.speculative))}")
    if len(found.divergences) > SHOWN:
        say(f"… and {len(found.divergences) - SHOWN} more; --json has them all.")
    for sentence in found.failures[:SHOWN]:
        say(f"[red]{escape(sentence)}[/red]")
    drafted = (
        f"{found.accepted} of {found.drafted} drafted tokens accepted" if found.drafted else "it told of no drafts"
    )
    say(f"\n{found.compared} answers, {found.compared_tokens} tokens, {len(found.divergences)} divergences; {drafted}.")
    if found.divergences and any(plan.temperatures) and found.reference != "request switch":
        say("Above temperature 0 an engine can keep the target's law and still say another thing with the same seed.")
