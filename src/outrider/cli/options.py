"""Command-line options: their types and help, their translation into library arguments, and how typer sees a command.

It knows how parameters are spelled; `Config` and `SamplingParams` check what they mean.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Container
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from ..errors import ConfigError, OutriderError
from ..models.precision import MEANING
from .common import load_model, model_name, note, readable_errors, without_colours

if TYPE_CHECKING:
    from ..llm import LLM
    from ..types import SamplingParams

Model = Annotated[
    str | None, Option("--model", "-m", help="A folder, a .gguf file or a hub name. Default: SmolLM2-135M.")
]
Dtype = Annotated[str | None, Option(help=MEANING)]
KvDtype = Annotated[
    str | None, Option(help="Of K and V on a CPU: float16 or float32. Default: float16 beside gguf and int8.")
]
Device = Annotated[str | None, Option(help="cpu, cuda, cuda:1 and so on. Default: auto, a GPU if there is one.")]
DraftDevice = Annotated[str | None, Option(help="Where the draft model runs. Default: on the target's device.")]
Set = Annotated[list[str] | None, Option("--set", "-s", help="Any other parameter, such as top_p=0.9. Repeatable.")]
_DRAFTER_HELP = "auto (the default), suffix, ngram, model, head, off, …; or FILE.py:CLASS, one of your own."
DrafterName = Annotated[str | None, Option("--drafter", "-d", help=_DRAFTER_HELP)]
Drafters = Annotated[list[str] | None, Option("--drafter", "-d", help="A drafter to measure, or all. Repeatable.")]
K = Annotated[str | None, Option("--k", help="Drafted tokens per step. Default: auto, chosen in every step.")]
Profile = Annotated[Path | None, Option(help="A profile of `outrider tune`. Options on the command line override it.")]
Prompts = Annotated[Path | None, Option(help="JSONL prompts in Spec-Bench's format. Default: the bundled ones.")]
Temperature = Annotated[float, Option("--temperature", "-t", help="The sampling temperature. 0 is greedy.")]
MaxTokens = Annotated[int, Option("--max-tokens", "-n", help="The most tokens to generate.")]
ApiKey = Annotated[str | None, Option(envvar="OUTRIDER_API_KEY", help="The API key that the server requires.")]
ServedName = Annotated[str | None, Option("--served-model-name", help="The model's name in requests.")]
Json = Annotated[bool, Option("--json", help="Print exactly one JSON object on standard output.")]


def arguments(pairs: list[str] | None = None, **options: Any) -> dict[str, Any]:
    """Keyword arguments: the options that have a value, then the NAME=VALUE pairs. Values are JSON or else strings."""
    given = {name: value for name, value in options.items() if value is not None}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"Parameters are given as NAME=VALUE, but this is '{pair}'.")
        try:
            parsed = json.loads(value.strip())
        except ValueError:
            parsed = value.strip()
        given[name.strip().replace("-", "_")] = parsed
    return given


def parse_k(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--k is '{text}', but it must be 'auto' or a whole number.") from None


def sampling_params(given: dict[str, Any], **options: Any) -> SamplingParams:
    """The command's own options and the sampling parameters in `given`, which are removed from it."""
    from ..types import SamplingParams

    for name in given.keys() & SamplingParams.__dataclass_fields__.keys():
        options[name] = given.pop(name)
    try:
        return SamplingParams(**options)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"A sampling parameter has the wrong type: {error}.") from error


@dataclass(frozen=True)
class TargetOptions:
    """Options of every command that loads a model."""

    model: Model = None
    dtype: Dtype = None
    kv_dtype: KvDtype = None
    device: Device = None
    draft_device: DraftDevice = None
    set_: Set = None

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments of `LLM`, and the sampling parameters among the --set pairs."""
        own = {"dtype": self.dtype, "kv_dtype": self.kv_dtype, "device": self.device}
        return arguments(self.set_, **own, draft_device=self.draft_device, **more)

    def load(self, **more: Any) -> LLM:
        return load_model(self.model, self.arguments(**more))


@dataclass(frozen=True)
class EngineOptions(TargetOptions):
    """Options of the commands that answer: the drafter, where it is configured, and whether it learns.

    Learnt weights are written to disk only with --learn or --learn-to; `outrider drafter forget` removes them.
    """

    drafter: DrafterName = None
    draft_model: Annotated[str | None, Option(help="The draft model of --drafter model or --drafter ahead.")] = None
    k: K = None
    learn: Annotated[bool | None, Option("--learn/--no-learn", help="Let the drafter learn online, and keep it.")] = (
        None
    )
    learn_from: Annotated[Path | None, Option(help="Start from these learnt weights. Default: those kept.")] = None
    learn_to: Annotated[Path | None, Option(help="Keep learnt weights in this folder, not in the cache.")] = None
    speculative_config: Annotated[str | None, Option(help='vLLM\'s JSON, such as \'{"method": "ngram"}\'.')] = None
    profile: Profile = None

    def arguments(self, **more: Any) -> dict[str, Any]:
        k = None if self.k is None else parse_k(self.k)
        given = super().arguments(drafter=self.drafter, draft_model=self.draft_model, k=k, **more)
        return given | arguments(speculative_config=self.speculative_config, profile=self.profile)

    @property
    def learns(self) -> bool:
        return self.learn is True or (self.learn is None and self.learn_to is not None)

    def with_learning(self, given: dict[str, Any]) -> dict[str, Any]:
        """`given` and what --learn, --learn-from and --learn-to add to it."""
        if self.learn is None and self.learn_from is None and self.learn_to is None:
            return given
        if self.learn is False and self.learn_to is not None:
            raise ConfigError("--no-learn and --learn-to contradict each other: leave one out.")
        if given.get("drafter") not in (None, "online", "head", "auto"):
            if self.learn is False and self.learn_from is None:
                return given  # it does not learn anyway
            drafter = given["drafter"]
            raise ConfigError(
                f"The drafter '{drafter}' cannot learn: leave --drafter out, or choose online, head or auto."
            )
        from ..drafters._learning import store  # loads torch

        source = self.learn_from
        if source is None and self.learns and self.learn_to is None:
            kept = store.kept_folder(model_name(self.model), given)
            source = kept if (kept / store.FACTS).exists() else None
        drafter = "online" if given.get("drafter") is None else given["drafter"]
        return given | arguments(drafter=drafter, learn=self.learns, learn_from=source and str(source))

    def save_learnt(self, llm: LLM) -> None:
        """Write the drafter's weights, if it learns, and its record of acceptance."""
        llm.drift.save()
        if self.learns and llm.learning is not None:
            from ..drafters._learning import store

            try:
                llm.save_learnt(self.learn_to or store.kept_folder(llm.name, llm.config.options))
            except OutriderError as error:  # the answer has been given; a full disk costs what was learnt
                note(f"What was learnt is not kept: {error}", style="yellow")


# ---------------------------------------------------------------- how typer sees a command

_METAVARS: dict[Any, str] = {
    str: "TEXT", int: "N", float: "NUMBER", Path: "PATH", bool: "",
    "host": "ADDRESS", "device": "DEVICE", "draft_device": "DEVICE", "dtype": "DTYPE", "store": "DTYPE", "to": "ENGINE",
    "body": "JSON", "speculative_config": "JSON", "api_key": "KEY", "kind": "KIND", "tap": "LAYER", "k": "N",
    "skip_layers": "LAYERS", "budget_minutes": "MINUTES", "model": "MODEL", "draft_model": "MODEL", "target": "MODEL",
    "accelerator": "NAME", "category": "NAME", "currency": "NAME", "drafter": "NAME", "engine": "NAME", "name": "NAME",
    "set_": "NAME=VALUE", "vllm_set": "NAME=VALUE", "engine_arg": "OPTION", "regex": "PATTERN",
    "price_per_hour": "PRICE", "drain": "SECONDS", "drafter_timeout": "SECONDS", "stop_after": "SECONDS",
    "timeout": "SECONDS", "temperature": "T", "origin": "URL", "plain_server": "URL", "server": "URL",
}  # fmt: skip


_PANELS = {
    "Model": ("model", "dtype", "kv_dtype", "device", "draft_device", "set_"),
    "Drafting": (
        "drafter", "draft_model", "k", "learn", "learn_from", "learn_to", "speculative_config", "profile", "sweep_k",
    ),
    "Text": (
        "temperature", "seed", "max_tokens", "stop", "json_schema", "regex", "grammar", "prediction", "raw", "system",
    ),
    "Output": (
        "compare", "trace", "show_rejected", "plain", "html", "as_json", "no_color", "debug", "help_all", "log_text",
    ),
}  # fmt: skip  # groups of options in --help; others are under Options
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names}


def command(function: Callable[..., None], shown: Container[str] | None = None) -> Callable[..., None]:
    """The function as typer registers it: errors are sentences, options are grouped and have readable metavars.

    A parameter whose type is a dataclass becomes one option for each of its fields. With `shown`, --help lists only
    these and --help-all every option.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            parameters += [_parameter(field.name, field.default, types[field.name]) for field in fields(groups[name])]
        else:
            parameters.append(_parameter(name, parameter.default, hints[name]))
    if shown is not None:
        for parameter in parameters:
            get_args(parameter.annotation)[1].hidden = parameter.name not in shown
        every = Option("--help-all", is_eager=True, callback=_help_all, help="Show every option and exit.")
        parameters.append(_parameter("help_all", False, Annotated[bool, every]))
    no_color = Option("--no-color", help="Print without colours, as with NO_COLOR=1 in the environment.")
    parameters.append(_parameter("no_color", False, Annotated[bool, no_color]))
    debug_option = Option("--debug", help="Show the traceback of an error.")
    parameters.append(_parameter("debug", False, Annotated[bool, debug_option]))

    @wraps(function)
    def run(debug: bool, no_color: bool, help_all: bool = False, **values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        with without_colours() if no_color else nullcontext(), readable_errors(debug):
            function(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(name: str, default: Any, hint: Any) -> inspect.Parameter:
    if get_origin(hint) is Annotated:
        whole, shared = get_args(hint)
        kind, info = whole, copy(shared)  # commands share options, and may hide them
        while get_args(kind):  # list[str] | None -> str
            kind = get_args(kind)[0]
        named = name.upper() if isinstance(info, ArgumentInfo) else _METAVARS.get(name)
        info.metavar = info.metavar or named or _METAVARS[kind]
        info.rich_help_panel = _PANEL_OF.get(name)
        hint = Annotated[whole, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _help_all(context: typer.Context, requested: bool) -> None:
    if requested:
        for param in context.command.params:
            param.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


class _PlainHelp:
    """Help without Python types and ranges, which typer shows whatever the metavar is."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: ""
            elif param.metavar is None:
                param.metavar = ""
            param._get_number_range_help_str = lambda: None
            if param.name == "help":
                param.rich_help_panel = "Output"
        return params


class Command(_PlainHelp, TyperCommand):
    """A command with plain help."""


class Group(_PlainHelp, TyperGroup):
    """A group of commands with plain help."""
