"""From the command line's options to the library's arguments: numbers, name=value pairs, JSON values.

It knows how things are spelled on a command line; what they mean is `Config`'s and `SamplingParams`' business.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..types import SamplingParams


def arguments(
    drafter: str | None,
    draft_model: str | None,
    k: str | None,
    dtype: str | None,
    pairs: list[str] | None,
    device: str | None = None,
    draft_device: str | None = None,
) -> dict[str, Any]:
    """What `LLM` is given, and in it what `sampling` will take out again; what was not said is not in it."""
    said = {"drafter": drafter, "draft_model": draft_model, "dtype": dtype, "k": _number(k, "--k")}
    said |= {"device": device, "draft_device": draft_device}
    given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes name=value, but got '{pair}'.")
        given[name.strip().replace("-", "_")] = _value(value.strip())
    return given


def from_elsewhere(speculative_config: str | None, profile: Path | None) -> dict[str, Any]:
    """What others have decided: vLLM's configuration, or a profile of ours."""
    said = {"speculative_config": speculative_config, "profile": profile}
    return {name: value for name, value in said.items() if value is not None}


def brought(
    json_schema: Path | None, regex: str | None, grammar: Path | None, prediction: Path | None
) -> dict[str, Any]:
    """What a request brings along: the form its text must have, and what the text is expected to be."""
    said = {"json": json_schema and _text(json_schema), "regex": regex, "grammar": grammar and _text(grammar)}
    guide = {name: value for name, value in said.items() if value is not None}
    own: dict[str, Any] = {"guide": guide} if guide else {}
    return own if prediction is None else own | {"prediction": _text(prediction)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}.") from error


def _value(text: str) -> Any:
    """true, 5, 0.9, [1, 2] and {"a": 1} as JSON has them; anything else is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number(text: str | None, name: str) -> int | str | None:
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is '{text}', but it must be 'auto' or a whole number.") from None


def sampling(given: dict[str, Any], **own: Any) -> SamplingParams:
    """SamplingParams from the command's own options and whatever --set says about sampling."""
    from ..types import SamplingParams

    known = SamplingParams.__dataclass_fields__
    for name in [name for name in given if name in known]:
        own[name] = given.pop(name)
    try:
        return SamplingParams(**own)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"A sampling parameter has the wrong type: {error}.") from error
