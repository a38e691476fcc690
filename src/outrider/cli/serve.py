"""The commands about serving: `outrider serve`, `outrider bench serve`, and `outrider chat --server`.

They read options and hand over. `serve` needs the extra of that name; the other two talk to any OpenAI-compatible
server and need nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import OutriderError
from .app import (
    Debug,
    Device,
    DraftDevice,
    DrafterName,
    DraftModel,
    Dtype,
    Json,
    K,
    Learn,
    LearnFrom,
    LearnTo,
    Model,
    Profile,
    Set,
    SpecConfig,
    Temperature,
    _load,
    _questions,
    _sentences,
    app,
    errors,
)  # fmt: skip
from .fleet import serve_elsewhere
from .learning import Teaching
from .measure import Prompts, bench_app
from .options import arguments, from_elsewhere

Key = Annotated[
    list[str] | None,
    typer.Option(envvar="OUTRIDER_API_KEY", help="Only with this key; may be repeated.", show_envvar=True),
]
EngineName = Annotated[str, typer.Option(help="outrider, or vllm: its server with our drafter.")]
EngineArgs = Annotated[
    list[str] | None, typer.Option(help="An option of vLLM's own: --engine-arg=--tensor-parallel-size=2.")
]


Patience = Annotated[
    float, typer.Option(help="Seconds after which a drafter that hangs is left behind; answers go on without it.")
]


@app.command()
def serve(
    context: typer.Context,
    model: Model = None,
    drafter: DrafterName = None,
    draft_model: DraftModel = None,
    k: K = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_device: DraftDevice = None,
    host: Annotated[str, typer.Option(help="Where to listen. Anything but this machine needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    api_key: Key = None,
    open_: Annotated[bool, typer.Option("--open", help="Let everybody ask who reaches the port.")] = False,
    name: Annotated[str | None, typer.Option("--served-model-name", help="What requests call the model.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Answers under way at once.")] = 16,
    max_queue: Annotated[int, typer.Option(min=0, help="Answers that may wait; beyond it: 429.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer a request may ask for.")] = 4096,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="The longest prompt, in tokens.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take, waiting included.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds that answers may go on after SIGTERM.")] = 30.0,
    drafter_timeout: Patience = 30.0,
    origin: Annotated[list[str] | None, typer.Option(help="A web page that may ask; may be repeated.")] = None,
    traces: Annotated[Path | None, typer.Option(help="Record answers in this folder; read them at /traces.")] = None,
    traces_mb: Annotated[int, typer.Option(min=1, help="The most that folder may hold.")] = 64,
    log_text: Annotated[bool, typer.Option("--log-text", help="Prompts and answers in the log too.")] = False,
    set_: Set = None,
    learn: Learn = None,
    learn_from: LearnFrom = None,
    learn_to: LearnTo = None,
    speculative_config: SpecConfig = None,
    profile: Profile = None,
    engine: EngineName = "outrider",
    engine_arg: EngineArgs = None,
    debug: Debug = False,
) -> None:
    """Serve the model over HTTP as OpenAI does, with speculation, and the page. The log is JSON on standard error."""
    with _sentences(debug):
        if engine != "outrider":
            serve_elsewhere(context)
            return
        parts = _server_parts()
        given = {"max_batch": max_batch} | arguments(drafter, draft_model, k, dtype, set_, device, draft_device)
        given |= from_elsewhere(speculative_config, profile)
        limits = parts.Limits(
            prompt_tokens=max_prompt, max_tokens=max_tokens, answers=max(min(16, max_batch + max_queue), 1),
            queue=max_queue, seconds=timeout,
        )  # fmt: skip
        settings = parts.Settings(
            host=host, port=port, keys=tuple(api_key or ()), open=open_, name=name, origins=tuple(origin or ()),
            traces=traces, traces_bytes=traces_mb << 20, log_text=log_text, drain_seconds=drain, limits=limits,
            drafter_seconds=drafter_timeout,
        )  # fmt: skip
        teaching = Teaching(learn, learn_from, learn_to)
        llm = _load(model, teaching.asked(given, model), None)
        parts.log_to(sys.stderr)
        application = parts.make_app(llm, settings)
        _announce(application.service.name, llm, f"http://{host}:{port}")
        parts.serve(application)
        teaching.keep(llm)


def _announce(name: str, llm: Any, where: str) -> None:
    words = f"{name} ({llm.dtype}, {llm.device}, drafter {llm.config.drafter_name})"
    errors.print(f"Serving {words} at {where}/v1; the page is {where}/", highlight=False, soft_wrap=True)


def _server_parts() -> Any:
    """The server's modules, or a sentence where what they need is not installed."""
    try:
        from types import SimpleNamespace

        from ..server.app import make_app, serve as listen
        from ..server.settings import Limits, Settings
        from ..server.telemetry import log_to
    except ImportError as error:
        words = f"`outrider serve` needs packages that are not installed ({error.name}): pip install 'outrider[serve]'."
        raise OutriderError(words) from error
    return SimpleNamespace(make_app=make_app, serve=listen, log_to=log_to, Limits=Limits, Settings=Settings)


@bench_app.command("serve")
def bench_serve(
    server: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="The key it wants.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Default: the first it lists.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many in all.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="How many at once, without --rate.")] = 8,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Arrivals per second, at random times.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=2, help="The longest answer.")] = 64,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and of the first request; each has one more.")] = 0,
    prompts: Prompts = None,
    body: Annotated[str | None, typer.Option(help="More for every body, as JSON: '{\"speculation\": …}'.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Put a server under load: latency percentiles, throughput, acceptance if it tells; ends with one JSON line."""
    with _sentences(debug):
        from ..measure.client import Server
        from ..measure.load_generator import LoadPlan, run, summary
        from ..models.prompts import bundled, from_file

        there = Server(server, api_key)
        names = there.models()
        texts = [prompt.text for prompt in (from_file(prompts) if prompts else bundled())]
        plan = LoadPlan(
            texts,
            requests,
            concurrency,
            rate,
            tokens,
            temperature,
            seed,
            model or next(iter(names), None),
            _object(body),
        )
        result = {"server": server, "model": plan.model, "concurrency": concurrency, "rate": rate}
        result |= summary(run(there, plan))
        if not as_json:
            _show_load(Console(), result)
        typer.echo(json.dumps(result))
        if result["failed"]:
            raise typer.Exit(1)


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OutriderError("--body is not a JSON object.")
    return value


def _show_load(console: Console, result: dict[str, Any]) -> None:
    table = Table("milliseconds", "mean", "p50", "p90", "p99", box=box.SIMPLE)
    words = {"ttft_ms": "to the first token", "tpot_ms": "per token after it", "between_chunks_ms": "between chunks"}
    for name, what in (words | {"e2e_ms": "in all"}).items():
        table.add_row(what, *(f"{result[name].get(key, 0.0):.1f}" for key in ("mean", "p50", "p90", "p99")))
    console.print(table)
    rate = result["acceptance_rate"]
    accepted = f", {rate:.0%} of {result['draft_tokens']} drafted tokens accepted" if rate is not None else ""
    console.print(
        f"{result['tokens']} tokens in {result['seconds']} s: {result['tokens_per_second']} tokens/s, "
        f"{result['failed']} of {result['requests']} requests failed{accepted}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    for sentence in result["errors"]:
        console.print(f"[red]{sentence}[/red]", soft_wrap=True)


def talk(server: str, key: str | None, system: str | None, asked: dict[str, Any]) -> None:
    """`outrider chat --server`: a conversation with a model that runs elsewhere."""
    from ..measure.client import Server, text_of

    there, console = Server(server, key), Console(highlight=False)
    model = next(iter(there.models()), None)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for said in _questions():
        messages.append({"role": "user", "content": said})
        text, last = "", dict[str, Any]()
        for _, chunk in there.chat({"model": model, "messages": messages, **asked}):
            text, last = text + text_of(chunk), chunk.get("timings") or last
            console.print(text_of(chunk), end="", markup=False)
        console.print()
        if last:
            speed, drafted = last.get("predicted_per_second") or 0.0, last.get("draft_n") or 0
            words = f"{last.get('predicted_n')} tokens, {speed:.1f} tokens/s"
            errors.print(f"[dim]{words}, {last.get('draft_n_accepted') or 0} of {drafted} drafted accepted[/dim]")
        messages.append({"role": "assistant", "content": text})
