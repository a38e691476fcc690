"""How a request wants its text: what shapes the target's choice, where the text ends, and what is brought along.

It knows numbers and names; what they mean to logits is `sampling`'s business, what a guide allows `guides`'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError


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
    seed: int | None = None  # None draws a fresh one; the seed used is always reported
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None  # how many alternatives to report beside each token
    learn: bool = True  # False: this request teaches the drafter nothing and leaves no trace in its statistics
    kind: str = ""  # the caller's word for this kind of text: acceptance is watched by it
    guide: Mapping[str, Any] | None = None  # a form that the text must have: response_format, {"regex": …}, …
    prediction: str | tuple[int, ...] | None = None  # what the answer is expected to be, as text or token ids

    def __post_init__(self) -> None:
        try:
            self._normalise()
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"A sampling parameter has the wrong type: {error}.") from error
        for name, kind, low, high in _RANGES:
            value: Any = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            fits = isinstance(value, kind) and not isinstance(value, bool)
            if not fits or not low <= value <= high:  # NaN is never within
                wanted = "a whole number" if kind is int else "a number"
                raise ConfigError(f"{name} is {value!r}, but it must be {wanted} between {low:g} and {high:g}.")
        if "" in self.stop:
            raise ConfigError("A stop string is empty; give at least one character or leave it out.")
        if isinstance(self.prediction, tuple) and min(self.prediction, default=0) < 0:
            raise ConfigError("A predicted token id is negative; give a text, or ids of the model's vocabulary.")
        if any(math.isnan(bias) for bias in self.logit_bias.values()):
            raise ConfigError("A logit bias is not a number; every value must be one, from -100 to 100 usually.")

    def _normalise(self) -> None:
        """One form for every field that may be spelled in several."""
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", {int(k): float(v) for k, v in (self.logit_bias or {}).items()})
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", tuple(int(i) for i in self.prediction))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)  # -1 is how vLLM spells "off"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """True when the choice is the bare argmax of the logits: nothing has to be processed."""
        return self.greedy and not (
            self.logit_bias
            or self.guide
            or self.bad_words
            or self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )


_NUMBER = (int, float)
_RANGES: tuple[tuple[str, type | tuple[type, ...], float, float], ...] = (
    ("temperature", _NUMBER, 0.0, 100.0),
    ("top_k", int, 0, 10**9),
    ("top_p", _NUMBER, 1e-9, 1.0),
    ("min_p", _NUMBER, 0.0, 1.0),
    ("repetition_penalty", _NUMBER, 1e-3, 100.0),
    ("presence_penalty", _NUMBER, -100.0, 100.0),
    ("frequency_penalty", _NUMBER, -100.0, 100.0),
    ("seed", int, 0, 2**63 - 1),
    ("max_tokens", int, 1, 10**9),
    ("min_tokens", int, 0, 10**9),
    ("n", int, 1, 1024),
    ("logprobs", int, 0, 1000),
)
