"""From the command line's options to the library's arguments: numbers, name=value pairs, JSON values.

It knows how things are spelled on a command line; what they mean is `Config`'s and `SamplingParams`' business.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from .types import SamplingParams


def arguments(
    drafter: str, draft_model: str | None, k: str, dtype: str, pairs: list[str] | None, spec: str | None
) -> dict[str, Any]:
    """What `LLM` is given, and in it what `sampling` will take out again."""
    given: dict[str, Any] = {"drafter": drafter, "dtype": dtype, "k": "auto" if k == "auto" else _number(k, "--k")}
    if draft_model is not None:
        given["draft_model"] = draft_model
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes name=value, but got '{pair}'.")
        given[name.strip().replace("-", "_")] = _value(value.strip())
    if spec is not None:
        given["speculative_config"] = spec
    return given


def _value(text: str) -> Any:
    """true, 5, 0.9, [1, 2] and {"a": 1} as JSON has them; anything else is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is '{text}', but it must be 'auto' or a whole number.") from None


def sampling(given: dict[str, Any], **own: Any) -> SamplingParams:
    """SamplingParams from the command's own options and whatever --set says about sampling."""
    from .types import SamplingParams

    known = SamplingParams.__dataclass_fields__
    for name in [name for name in given if name in known]:
        own[name] = given.pop(name)
    try:
        return SamplingParams(**own)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"A sampling parameter has the wrong type: {error}.") from error
