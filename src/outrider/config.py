"""Every choice of a run in one frozen record; what follows from them is computed once, here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from .drafters import Drafter, check_options, lookup
from .engine.judge import RULES
from .errors import ConfigError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}  # other names for
DTYPES |= {name: name for name in ("auto", "int8", "bfloat16", "float32", "float64")}


@dataclass(frozen=True)
class Config:
    """How to build an engine around a target."""

    drafter: str | type[Drafter] = "auto"  # a name from the registry, or a class
    k: int | str = "auto"  # drafted tokens per step, or "auto"
    rule: str = "match"
    dtype: str = "auto"
    device: str = "auto"  # auto, cpu, cuda, cuda:1, …
    max_length: int | None = None  # prompt and answer together; None: the model's context, at most 8192
    max_batch: int = 8
    max_rows: int = 512  # rows of one pass: longer prompts are fed in chunks of this many
    cache_tokens: int | None = None  # K/V places in all; None: room for several full sequences
    options: dict[str, Any] = field(default_factory=dict)  # the drafter's own

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"There is no rule '{self.rule}'. Choose one of: {', '.join(RULES)}.")
        if self.k != "auto" and not (isinstance(self.k, int) and 0 <= self.k <= 64):
            raise ConfigError(f"k is {self.k!r}, but it must be 'auto' or a number from 0 to 64.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"There is no dtype '{self.dtype}'. Choose one of: auto, int8, bfloat16, float32.")
        object.__setattr__(self, "dtype", DTYPES[self.dtype])
        for name in ("max_batch", "max_rows", "max_length", "cache_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}, but it must be a whole number of at least 1.")

    @property
    def drafter_name(self) -> str:
        return lookup(self.drafter).name

    def length_for(self, context: int) -> int:
        """The longest sequence that will be served."""
        if self.max_length is not None and self.max_length > context:
            raise ConfigError(f"max_length is {self.max_length}, but the model's context has {context} positions.")
        return self.max_length or min(context, 8192)

    def slots_for(self, length: int) -> int:
        """K/V places: never fewer than one full sequence with its draft needs."""
        wanted = self.cache_tokens if self.cache_tokens is not None else 4 * length
        return max(wanted, length + 64)


# Where others' names lead: vLLM's speculative configuration and Hugging Face's generate arguments.
_VLLM_METHODS = {"draft_model": "model", "ngram": "ngram", "suffix": "suffix", "ngram_gpu": "ngram", "eagle3": "head"}

_HUGGING_FACE = (
    "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "num_assistant_tokens", "device_map",
)  # fmt: skip


def from_speculative_config(text: str | dict[str, Any]) -> dict[str, Any]:
    """vLLM's `speculative_config`, as JSON or a dictionary, in our words: arguments for `LLM`."""
    try:
        given = dict(json.loads(text)) if isinstance(text, str) else dict(text)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"The speculative configuration is not a JSON object: {error}.") from error
    model = given.pop("model", None)
    method = given.pop("method", "draft_model" if model else "ngram")
    if not isinstance(method, str) or method not in _VLLM_METHODS:
        raise ConfigError(f"The speculative method '{method}' is not known here; use: {', '.join(_VLLM_METHODS)}.")
    arguments: dict[str, Any] = {"drafter": _VLLM_METHODS[method]}
    if model is not None:
        arguments["head" if method == "eagle3" else "draft_model"] = model
    if "num_speculative_tokens" in given:
        arguments["k"] = given.pop("num_speculative_tokens")
    if "rejection_sample_method" in given:
        arguments["rule"] = {"standard": "reject", "block": "block"}.get(given.pop("rejection_sample_method"), "match")
    # The rest of vLLM's keys (parallelism, quantisation, …) say nothing about what is drafted here.
    takes = lookup(arguments["drafter"]).traits.options or ()
    return arguments | {name: value for name, value in given.items() if name in takes}


def from_hugging_face(arguments: dict[str, Any]) -> dict[str, Any]:
    """`assistant_model`, `assistant_early_exit`, `prompt_lookup_num_tokens` and so on in our words; the rest stays."""
    given = dict(arguments)
    if given.get("assistant_model") is not None:
        given |= {"drafter": "model", "draft_model": given["assistant_model"]}
    if given.get("prompt_lookup_num_tokens") is not None:
        given |= {"drafter": "ngram", "k": given["prompt_lookup_num_tokens"]}
    if given.get("assistant_early_exit") is not None:
        given |= {"drafter": "exit", "exit_layer": given["assistant_early_exit"]}
    if given.get("num_assistant_tokens") is not None:
        given["k"] = given["num_assistant_tokens"]
    places = given.get("device_map")
    if isinstance(places, str):
        given["device"] = places
    elif places is not None:
        unknown = sorted(set(places) - {"target", "drafter", ""})
        if unknown:
            raise ConfigError(
                f"device_map names '{unknown[0]}', but only 'target' and 'drafter' have a place of their own."
            )
        given |= {"device": str(places.get("target", places.get("", "auto")))}
        if "drafter" in places:
            given["draft_device"] = str(places["drafter"])
    for name in _HUGGING_FACE:
        given.pop(name, None)
    return given


def config_from(arguments: dict[str, Any]) -> Config:
    """A Config from loose arguments; what it does not know goes to the drafter as options."""
    known = {f.name for f in fields(Config)} - {"options"}
    own = {name: value for name, value in arguments.items() if name in known}
    config = Config(**own, options={n: v for n, v in arguments.items() if n not in known})
    check_options(config.drafter, config.options)
    return config
