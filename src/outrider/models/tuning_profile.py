"""Tuning profiles: the settings that `outrider tune` measured as best, for `LLM(profile=…)` and `--profile`.

A profile is a JSON object: model, dtype, machine, drafter, k, options and measurements. It is tuned for the machine it
was made on, and valid on others. What was measured about a target itself (which of its blocks can be skipped) is also
kept in the cache folder under the target's hash, where drafters look it up. It knows names, not their meaning.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError, OutriderError
from .paths import cache_folder, write_atomically, write_quietly

VERSION = 1
_KINDS: dict[str, tuple[type, ...]] = {"drafter": (str,), "k": (int, str), "options": (dict,), "dtype": (str,)}


def load_profile(path: Path | str) -> dict[str, Any]:
    """A profile as arguments of `LLM`: drafter, k, dtype and the drafter's options."""
    profile = read_profile(path)
    options: dict[str, Any] = dict(profile.get("options", {}))
    return options | {name: profile[name] for name in ("drafter", "k", "dtype") if name in profile}


def read_profile(path: Path | str) -> dict[str, Any]:
    """The whole profile, measurements included."""
    try:
        profile = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"The profile {path} cannot be read: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a profile: it is not JSON ({error}).") from error
    if not isinstance(profile, dict) or "outrider_profile" not in profile:
        raise ConfigError(f"{path} is not a profile: `outrider tune --out FILE` writes one.")
    if (version := profile["outrider_profile"]) != VERSION:
        raise ConfigError(f"{path} has version {version} of profiles; this Outrider reads {VERSION}.")
    for name, kinds in _KINDS.items():
        if name in profile and (not isinstance(profile[name], kinds) or isinstance(profile[name], bool)):
            raise ConfigError(f"The profile {path} has {name} = {profile[name]!r}, which cannot be right; tune again.")
    return profile


def save_profile(path: Path | str, facts: dict[str, Any]) -> None:
    """Write a profile atomically."""
    try:
        write_atomically(Path(path), json.dumps({"outrider_profile": VERSION} | facts, indent=2) + "\n")
    except OSError as error:
        raise OutriderError(f"The profile cannot be written to {path}: {error}.") from error


def note(what: str, target_hash: str, facts: dict[str, Any]) -> Path:
    """Keep measurements of a target for later runs; returns the file's path."""
    path = _note_path(what, target_hash)
    write_quietly(path, json.dumps({"outrider_profile": VERSION, "target_hash": target_hash} | facts) + "\n")
    return path


def noted(what: str, target_hash: str) -> dict[str, Any]:
    """The measurements that `note` kept of a target; empty if there are none or they cannot be read."""
    try:
        facts = json.loads(_note_path(what, target_hash).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    valid = isinstance(facts, dict) and facts.get("outrider_profile") == VERSION
    return facts if valid and facts.get("target_hash") == target_hash else {}


def _note_path(what: str, target_hash: str) -> Path:
    return cache_folder() / "profiles" / f"{what}-{target_hash}.json"
