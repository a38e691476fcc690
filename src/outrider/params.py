"""The parameters of a request, checked: sampling, where the text ends, its guide and its prediction.

This module knows numbers and names; `engine.sampling` applies them to logits, `engine.guides` compiles guides.
"""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeVar

from .errors import ConfigError

T = TypeVar("T")
OTHER_NAMES = {  # transformers', vLLM's and OpenAI's names of fields
    "max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "min_new_tokens": "min_tokens",
    "num_return_sequences": "n", "stop_strings": "stop", "eos_token_id": "stop_token_ids", "response_format": "guide",
    "logits_processor": "logits_processors", "random_seed": "seed",
}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """How the target chooses its next token, and when it stops. Every field means the same with and without drafts."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    seed: int | None = None  # None (or vLLM's -1) draws one; the seed used is always reported
    max_tokens: int | None = 256  # None: to the end of the context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None  # alternatives to report beside each token
    learn: bool = True  # False: drafters learn nothing from this request, and their statistics do not count it
    kind: str = ""  # the caller's label for this kind of text: acceptance is monitored, and learnt weights kept, by it
    guide: Mapping[str, Any] | None = None  # the form of the text: response_format, {"regex": …}, …
    prediction: str | tuple[int, ...] | None = None  # the expected answer, as text or token ids
    # Each takes the generated ids and the target's logits [V], a copy, and returns the logits to choose from.
    logits_processors: tuple[Callable[[list[int], Any], Any], ...] = ()

    def __new__(cls, *values: Any, **fields: Any) -> Self:
        """Refuse an unknown field, with a hint where it has another name here."""
        if unknown := fields.keys() - cls.__dataclass_fields__.keys():
            raise ConfigError(f"SamplingParams has no field '{min(unknown)}'.{_hint(min(unknown))}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        try:
            self._normalise()
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"A sampling parameter has the wrong type: {error}.") from error
        for name, kind, low, high in _RANGES:
            value: Any = getattr(self, name)
            if value is None and name in ("seed", "logprobs", "max_tokens"):
                continue
            fits = isinstance(value, kind) and not isinstance(value, bool)
            if not fits or not low <= value <= high:  # False for NaN
                number = "a whole number" if kind is int else "a number"
                raise ConfigError(f"{name} is {value!r}, but it must be {number} between {low} and {high}.")
        if "" in self.stop:
            raise ConfigError("A stop string is empty; give at least one character or leave it out.")
        if isinstance(self.prediction, tuple) and min(self.prediction, default=0) < 0:
            raise ConfigError("A predicted token id is negative; give a text, or ids of the model's vocabulary.")
        if any(math.isnan(bias) for bias in self.logit_bias.values()):
            raise ConfigError("A logit bias is not a number; every value must be one, from -100 to 100 usually.")

    def _normalise(self) -> None:
        """Convert each field that has several spellings to one."""
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors or ()))
        if not all(map(callable, self.logits_processors)):
            raise TypeError("a logits processor is a function of the generated ids and the logits")
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", {int(k): float(v) for k, v in (self.logit_bias or {}).items()})
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", tuple(int(i) for i in self.prediction))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)  # -1 is "off" in vLLM
        object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)

    @property
    def limit(self) -> int:
        """The most tokens that may be emitted."""
        return NO_LIMIT if self.max_tokens is None else self.max_tokens

    def seeds(self) -> list[int]:
        """One seed for each of the n answers: the j-th is seed + j, in 64 bits."""
        first = secrets.randbits(31) if self.seed is None else self.seed
        return [(first + j + 2**63) % 2**64 - 2**63 for j in range(self.n)]

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def adjusts_logits(self) -> bool:
        """Whether bias, penalties, min_tokens or a function change the logits."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(self.logit_bias or self.min_tokens or penalties or self.logits_processors)

    @cached_property
    def plain(self) -> bool:
        """True when the choice is the argmax of the unchanged logits."""
        return self.greedy and not (self.adjusts_logits or self.guide or self.bad_words)


NO_LIMIT = 10**9
_NUMBER = (int, float)
_RANGES: tuple[tuple[str, type | tuple[type, ...], float, float], ...] = (
    ("temperature", _NUMBER, 0.0, 100.0),
    ("top_k", int, 0, 10**9),
    ("top_p", _NUMBER, 1e-9, 1.0),
    ("min_p", _NUMBER, 0.0, 1.0),
    ("repetition_penalty", _NUMBER, 1e-3, 100.0),
    ("presence_penalty", _NUMBER, -100.0, 100.0),
    ("frequency_penalty", _NUMBER, -100.0, 100.0),
    ("seed", int, -(2**63), 2**63 - 1),
    ("max_tokens", int, 1, NO_LIMIT),
    ("min_tokens", int, 0, 10**9),
    ("n", int, 1, 1024),
    ("logprobs", int, 0, 1000),
)


def sampling_params(params: T, names: Mapping[str, Any]) -> T | SamplingParams:
    """`params`, or instead of it the fields in `names`, also by transformers' names. ConfigError for both."""
    if not names:
        return params
    if params is not None:
        raise ConfigError(f"Give {', '.join(sorted(names))} in SamplingParams, or no SamplingParams.")
    sampled = names.get("do_sample")
    given = {OTHER_NAMES.get(name, name): value for name, value in names.items() if name != "do_sample"}
    if unknown := given.keys() - SamplingParams.__dataclass_fields__.keys():
        raise ConfigError(f"There is no argument '{min(unknown)}'.{_hint(min(unknown))}")
    if isinstance(given.get("stop_token_ids"), int):
        given["stop_token_ids"] = (given["stop_token_ids"],)
    if sampled is False:
        given["temperature"] = 0.0
    elif sampled:
        given.setdefault("temperature", 1.0)
    return SamplingParams(**given)


def _hint(name: str) -> str:
    fields = [*SamplingParams.__dataclass_fields__]
    close = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, fields, 1)), None)
    if name == "do_sample":
        return " Set temperature: 0 is greedy."
    return f" Call it {close}." if close else f" It has: {', '.join(fields)}."
