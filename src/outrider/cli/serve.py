"""`outrider serve`: Outrider's own server, or vLLM's server with Outrider's drafter (`--engine vllm`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ..errors import ConfigError, OutriderError
from .common import load_model, note
from .options import EngineOptions, ServedName, arguments, parse_k


@dataclass(frozen=True)
class ServerOptions:
    """Options of the HTTP server. Times are in seconds."""

    host: Annotated[str, Option(help="The address to listen on. Others need --api-key or --open.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="The port to listen on. 0 takes any free one.")] = 8000
    api_key: Annotated[
        list[str] | None, Option(envvar="OUTRIDER_API_KEY", help="Accept only requests with this key. Repeatable.")
    ] = None
    open_: Annotated[bool, Option("--open", help="Accept requests from everybody who reaches the port.")] = False
    name: ServedName = None
    any_model_name: Annotated[bool, Option("--any-model-name", help="Answer requests for any model's name.")] = False
    max_batch: Annotated[int, Option(min=1, help="Decode at most N requests at once.")] = 16
    max_queue: Annotated[int, Option(min=0, help="Let N more requests wait. Others get status 429.")] = 128
    max_tokens: Annotated[int, Option(min=1, help="The most tokens that a request may generate.")] = 4096
    max_prompt: Annotated[int | None, Option(min=1, help="The most tokens that a prompt may have.")] = None
    timeout: Annotated[float, Option(help="End a request after this time, waiting included.")] = 600.0
    drain: Annotated[float, Option(help="Let running requests finish for this long after SIGTERM.")] = 30.0
    drafter_timeout: Annotated[float, Option(help="Continue without a drafter that hangs for this long.")] = 30.0
    origin: Annotated[list[str] | None, Option(help="Allow web pages of this origin. Repeatable.")] = None
    traces: Annotated[Path | None, Option(help="Record requests in this folder; /traces lists them.")] = None
    traces_mb: Annotated[int, Option(min=1, help="The largest size of that folder, in megabytes.")] = 64
    log_text: Annotated[bool, Option("--log-text", help="Log prompts and answers too.")] = False


def serve(
    context: typer.Context,
    options: EngineOptions,
    server: ServerOptions,
    engine: Annotated[str, Option(help="outrider, or vllm for vLLM's server with Outrider's drafter.")] = "outrider",
    engine_arg: Annotated[
        list[str] | None, Option(help="An option for vLLM: --engine-arg=--tensor-parallel-size=2. Repeatable.")
    ] = None,
) -> None:
    """Serve the model over OpenAI's HTTP API, with a web page at /. The log is JSON on standard error."""
    if engine == "vllm":
        _serve_with_vllm(context, options, server, tuple(engine_arg or ()))
        return
    if engine != "outrider":
        raise ConfigError(f"There is no engine '{engine}' to serve with; choose outrider or vllm.")
    try:
        from ..server.app import bind, host_options, make_app, serve as listen
        from ..server.links import EngineProcess
        from ..server.settings import Limits, Settings
        from ..server.telemetry import log_to
    except ImportError as error:
        text = f"`outrider serve` needs {error.name}, which is not installed: pip install -e '.[serve]' in a clone."
        raise OutriderError(text) from error
    limits = Limits(
        prompt_tokens=server.max_prompt, max_tokens=server.max_tokens, queue=server.max_queue, seconds=server.timeout,
        answers=max(min(16, server.max_batch + server.max_queue), 1),
    )  # fmt: skip
    settings = Settings(
        host=server.host, port=server.port, keys=tuple(server.api_key or ()), open=server.open_, name=server.name,
        any_name=server.any_model_name, origins=tuple(server.origin or ()), traces=server.traces,
        traces_bytes=server.traces_mb << 20, log_text=server.log_text, drain_seconds=server.drain, limits=limits,
        drafter_seconds=server.drafter_timeout,
    )  # fmt: skip
    given = {"max_batch": server.max_batch} | options.arguments()
    reserved = bind(server.host, server.port)
    log_to(sys.stderr)
    build = partial(load_model, options.model, options.with_learning(given))
    with EngineProcess(build, host_options(settings), options.save_learnt) as process:
        application, facts = make_app(process, settings), process.facts
        host = f"[{server.host}]" if ":" in server.host else server.host
        address = f"http://{host}:{reserved.getsockname()[1]}"
        model = f"{application.service.name} ({facts.dtype}, {facts.device}, drafter {facts.drafter})"
        note(f"Serving {model} at {address}/v1; the page is {address}/")
        listen(application, reserved, note)


# Options of `outrider serve` that vLLM's server does not have.
_OUTRIDER_ONLY = (
    "max_queue", "max_tokens", "max_prompt", "timeout", "drain", "origin", "traces", "traces_mb", "log_text", "learn",
    "learn_from", "learn_to", "draft_device", "device", "speculative_config"
)  # fmt: skip


def _serve_with_vllm(
    context: typer.Context, options: EngineOptions, server: ServerOptions, engine_args: tuple[str, ...]
) -> None:
    for name in _OUTRIDER_ONLY:
        if _was_given(context, name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is Outrider's own server's; vLLM's options go with --engine-arg.")
    from ..export.plan import make_plan
    from ..export.vllm.launch import LaunchOptions, launch_command, require_vllm, start
    from ..models.checkpoint import open_checkpoint
    from ..models.tuning_profile import read_profile
    from ..server.settings import Settings

    keys = tuple(server.api_key or ())
    Settings(host=server.host, port=server.port, keys=keys, open=server.open_)  # checks the keys
    require_vllm(note)
    k = None if options.k is None else parse_k(options.k)
    given = arguments(options.set_, drafter=options.drafter, k=k)
    k, drafter = given.pop("k", None), given.pop("drafter", None)
    profile = read_profile(options.profile) if options.profile is not None else {}
    profile = {**profile, "options": {**profile.get("options", {}), **given}}
    checkpoint = open_checkpoint(options.model)
    batch = server.max_batch if _was_given(context, "max_batch") else None
    launch = LaunchOptions(server.host, server.port, keys, server.name, batch, options.dtype or "auto", engine_args)
    plan = make_plan(checkpoint, options.draft_model or drafter, profile, None if k == "auto" else k)
    ready = launch_command(checkpoint, plan, launch, note)
    address = f"http://{server.host}:{server.port}/v1"
    note(f"Serving {checkpoint.name} with vLLM (drafter {plan.kind}, K {plan.k}) at {address}")
    start(ready)


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")
