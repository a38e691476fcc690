"""The command line: `outrider generate | chat | verify | trace`, and what the other `cli_` files add.

It sees the library's front door and traces, nothing below. With --json, standard output is exactly one JSON object;
everything for people goes to standard error then. Errors are sentences; --debug shows where they come from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ConfigError, OutriderError
from .learning import Teaching
from .options import arguments, brought, from_elsewhere, sampling

if TYPE_CHECKING:
    from ..engine.trace import Recorder
    from ..llm import LLM
    from ..types import SamplingParams, Sequence
    from .answer import Plain

app = typer.Typer(
    help="Lossless speculative decoding: a drafter rides ahead, the target keeps only what it would have said itself.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
trace_app = typer.Typer(help="Look at recorded runs.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
errors = Console(stderr=True)

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="A folder, a .gguf file or a hub name. Default: SmolLM2-135M.")
]
DrafterName = Annotated[
    str | None, typer.Option("--drafter", "-d", help="Who drafts: auto (the default), suffix, ngram, model, ahead, …")
]
DraftModel = Annotated[str | None, typer.Option(help="The draft model of --drafter model (any tokenizer) or ahead.")]
K = Annotated[str | None, typer.Option("--k", help="Drafted tokens per step: a number, or auto (the default).")]
Dtype = Annotated[str | None, typer.Option(help="auto (the fastest here, the default), int8, bfloat16 or float32.")]
Device = Annotated[str | None, typer.Option(help="auto (a GPU if there is one, the default), cpu, cuda, cuda:1, …")]
DraftDevice = Annotated[str | None, typer.Option(help="Where the draft model runs. Default: beside the target.")]
Profile = Annotated[Path | None, typer.Option(help="What `outrider tune` wrote; options given here win over it.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text, with any drafter.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="The longest answer.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Any other parameter, as name=value: top_p=0.9, tree=true, ngram_max=5, …"),
]
JsonSchema = Annotated[Path | None, typer.Option(help="A file with a JSON schema that the answer must fit.")]
Regex = Annotated[str | None, typer.Option(help="A regular expression that the whole answer must match.")]
Grammar = Annotated[Path | None, typer.Option(help="A file with a Lark grammar that the answer must follow.")]
Prediction = Annotated[Path | None, typer.Option(help="A file with what the answer is expected to be: it is drafted.")]
Learn = Annotated[
    bool | None,
    typer.Option("--learn/--no-learn", help="Let the drafter learn from what is verified, and keep what it learnt."),
]
LearnFrom = Annotated[Path | None, typer.Option(help="Go on with what was learnt before; default: what is kept.")]
LearnTo = Annotated[Path | None, typer.Option(help="Keep what is learnt in this folder instead.")]
SpecConfig = Annotated[str | None, typer.Option("--speculative-config", help="vLLM's JSON, as it is.")]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """Lossless speculative decoding: a drafter rides ahead, the target keeps only what it would have said itself."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads standard input.")],
    model: Model = None,
    drafter: DrafterName = None,
    draft_model: DraftModel = None,
    k: K = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_device: DraftDevice = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 256,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; may be repeated.")] = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    prediction: Prediction = None,
    set_: Set = None,
    learn: Learn = None,
    learn_from: LearnFrom = None,
    learn_to: LearnTo = None,
    speculative_config: SpecConfig = None,
    profile: Profile = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Then measure plain decoding of the same prompt.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Record the run to this JSONL file.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Generate text with speculation on, streaming, and say what it cost."""
    with _sentences(debug):
        prompt = sys.stdin.read() if prompt == "-" else prompt
        given = arguments(drafter, draft_model, k, dtype, set_, device, draft_device)
        given |= from_elsewhere(speculative_config, profile)
        own = brought(json_schema, regex, grammar, prediction)
        own |= {"temperature": temperature, "seed": seed, "max_tokens": max_tokens, "stop": tuple(stop or ())}
        params = sampling(given, **own)
        from .answer import Run, plain_run

        with _recorder(trace) as recorder:
            teaching = Teaching(learn, learn_from, learn_to)
            llm = _load(model, teaching.asked(given, model), recorder)
            ids = _prompt_ids(llm, prompt, raw)
            _header(llm, recorder, ids, params)
            # As a text it is continued, its first space included; as ids it is answered.
            run = Run(llm, prompt if raw or llm.tokenizer.chat_template is None else ids, params, quiet=as_json)
            run.go()
            teaching.keep(llm)
            plain = None
            try:
                plain = plain_run(llm, ids, params, run) if compare else None
            finally:
                _footer(llm, recorder, run.seq, plain)
        if as_json:
            print(json.dumps(run.as_json(plain), ensure_ascii=False))
        else:
            run.print_summary(plain)
        if run.interrupted:
            raise typer.Exit(130)


@app.command()
def chat(
    model: Model = None,
    drafter: DrafterName = None,
    draft_model: DraftModel = None,
    k: K = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_device: DraftDevice = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 512,
    system: Annotated[str | None, typer.Option(help="What the assistant is told first.")] = None,
    set_: Set = None,
    learn: Learn = None,
    learn_from: LearnFrom = None,
    learn_to: LearnTo = None,
    speculative_config: SpecConfig = None,
    profile: Profile = None,
    server: Annotated[str | None, typer.Option(help="Talk to the model that this server has instead.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="The key that server wants.")] = None,
    debug: Debug = False,
) -> None:
    """Talk to the model; the drafter learns from what was said. An empty line or Ctrl-D leaves."""
    with _sentences(debug):
        if server is not None:
            asked = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
            cli_serve.talk(server, api_key, system, {name: value for name, value in asked.items() if value is not None})
            return
        given = arguments(drafter, draft_model, k, dtype, set_, device, draft_device)
        given |= from_elsewhere(speculative_config, profile)
        params = sampling(given, temperature=temperature, seed=seed, max_tokens=max_tokens)
        from .answer import Run

        teaching = Teaching(learn, learn_from, learn_to)
        llm = _load(model, teaching.asked(given, model), None)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for said in _questions():
            messages.append({"role": "user", "content": said})
            run = Run(llm, llm.tokenizer.encode_chat(messages), params)
            run.go()
            run.print_summary(None)
            messages.append({"role": "assistant", "content": run.text})
            teaching.keep(llm)


@app.command()
def verify(
    model: Model = None,
    drafter: Annotated[list[str] | None, typer.Option("--drafter", "-d", help="Only these; default: all.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    draft_device: DraftDevice = None,
    k: K = "5",
    limit: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 20,
    max_tokens: MaxTokens = 64,
    temperature: Annotated[list[float] | None, typer.Option("--temperature", "-t", help="Default: 0 and 0.8.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL in Spec-Bench's form; default: the bundled ones.")] = None,
    set_: Set = None,
    server: Annotated[str | None, typer.Option(help="Audit this server instead, whatever engine it runs.")] = None,
    plain_server: Annotated[str | None, typer.Option(help="The same model without speculation, to compare.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="The key they want.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once, of --server.")] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the promise: speculative text against plain text, token by token, for every drafter."""
    with _sentences(debug):
        if server is not None:
            asked = (temperature, limit, max_tokens, prompts, model, concurrency)
            cli_fleet.audit_server(server, plain_server, api_key, *asked, as_json)
            return
        from ..measure.verify import measure
        from ..models.prompts import bundled, from_file
        from . import show

        given = arguments("off", None, k, dtype, set_, device, draft_device)
        llm = _load(model, given, None)
        texts = [p.text for p in (from_file(prompts) if prompts else bundled())[:limit]]
        ids = [_prompt_ids(llm, text, raw=llm.tokenizer.chat_template is None) for text in texts]
        temperatures = tuple(temperature or (0.0, 0.8))
        with _progress() as progress:
            report = measure(llm, ids, drafter, temperatures, max_tokens, progress)
        if as_json:
            print(json.dumps(report.as_json()))
        else:
            show.report(Console(), report)
        if report.divergences and llm.config.rule == "match":
            raise typer.Exit(1)


@trace_app.command("show")
def trace_show(
    file: Annotated[Path, typer.Argument(help="A JSONL file that `generate --trace` wrote.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first steps.")] = None,
    debug: Debug = False,
) -> None:
    """Print a recorded run step by step: accepted, rejected and never reached drafts, and the bonus."""
    with _sentences(debug):
        from ..engine.trace import read
        from .show import steps

        try:
            steps(Console(), read(file), limit)
        except (KeyError, TypeError, ValueError) as error:
            raise OutriderError(f"{file} is damaged: a line is not as Outrider writes it ({error}).") from error


def main() -> None:
    """The console script."""
    app()


def _questions() -> Iterator[str]:
    console = Console()
    while True:
        try:
            said = console.input("\n[bold]you:[/bold] ").strip()
        except (EOFError, KeyboardInterrupt):
            said = ""
        if not said:
            return
        yield said


# ---------------------------------------------------------------- what a command needs


def _load(model: str | None, given: dict[str, Any], recorder: Recorder | None) -> LLM:
    from ..llm import LLM

    given = dict(given)
    with errors.status("Loading the model …", spinner="dots") if errors.is_terminal else _nothing():
        from ..models.checkpoint import open_checkpoint

        if model is None:
            open_checkpoint(None)  # fetches with its own progress bar
        try:
            llm = LLM(model, recorder=recorder, **given)
        except OutriderError:
            raise
        except (TypeError, ValueError) as error:  # --set takes anything; only its reader knows what it should be
            raise ConfigError(f"A parameter has the wrong type or value: {error}.") from error
    if llm.backend:
        errors.print(escape(llm.backend), style="dim", highlight=False, soft_wrap=True)
    return llm


def _prompt_ids(llm: LLM, prompt: str, raw: bool) -> list[int]:
    if raw or llm.tokenizer.chat_template is None:
        ids: list[int] = llm.tokenizer.encode_prompt(prompt)
        return ids
    if not prompt.strip():
        raise ConfigError("The prompt is empty; give at least one word.")
    chat: list[int] = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return chat


# ---------------------------------------------------------------- traces, progress, errors


@contextmanager
def _recorder(path: Path | None) -> Iterator[Recorder | None]:
    if path is None:
        yield None
        return
    from ..engine.trace import Recorder

    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise OutriderError(f"The trace cannot be written to {path}: {error}.") from error
    with file:
        yield Recorder("full", file)


def _header(llm: LLM, recorder: Recorder | None, ids: list[int], params: SamplingParams) -> None:
    if recorder is not None:
        facts = {"model": llm.name, "dtype": llm.dtype, "drafter": llm.config.drafter_name, "k": llm.config.k}
        facts |= {"device": llm.device}
        text = llm.tokenizer.decode(ids, skip_special=False)
        recorder.header(**facts, rule=llm.config.rule, temperature=params.temperature, prompt=ids, prompt_text=text)


def _footer(llm: LLM, recorder: Recorder | None, seq: Sequence, plain: Plain | None) -> None:
    if recorder is not None:
        from ..engine.trace import read, tokens_of

        path = Path(recorder.file.name) if recorder.file else None
        drafted = set().union(*map(tokens_of, read(path).lines)) if path else set()
        pieces = {t: llm.tokenizer.decode([t], skip_special=False) for t in {*seq.tokens, *drafted}}
        told: dict[str, Any] = {"drafting": llm.drafting} if llm.drafting else {}
        told["texts"] = llm.texts_of(seq)
        if llm.learning is not None:
            told["learning"] = llm.learning
        if plain is not None:
            told["plain"] = asdict(plain)
        recorder.footer(pieces=pieces, finish=seq.finish, seed=seq.seed, seconds=seq.stats.seconds, **told)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, done: bar.update(task, description=what, completed=done)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _sentences(debug: bool) -> Iterator[None]:
    """Errors that users can repair are printed as the sentence they are; --debug lets them through."""
    try:
        yield
    except OutriderError as error:
        if debug:
            raise
        errors.print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        errors.print("\nInterrupted.")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # `outrider … | head`
        raise typer.Exit(0) from None


from . import (  # noqa: E402 - they register their commands
    drafter as cli_drafter,  # noqa: F401
    export as cli_export,  # noqa: F401
    fleet as cli_fleet,
    measure as cli_measure,  # noqa: F401
    page as cli_page,  # noqa: F401
    serve as cli_serve,
    train as cli_train,  # noqa: F401
)
