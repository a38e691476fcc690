"""Who drafts and how much, read off a folder, a name or a profile: what every engine is then told in its own words.

Promise: what cannot be handed over is refused here in a sentence, before anything is written. It knows drafters and
profiles; it knows no engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..drafters.head.find import head_for
from ..errors import ConfigError
from ..models.checkpoint import Checkpoint
from ..models.speculators import read_config, target_hash
from .table import Range, best_k, costs_of, draft_seconds, from_profile

K = 5  # where nobody has measured anything
K_MOST = 16  # in a table
BATCHES = 64  # the last range holds for larger ones too
LOOKUPS = ("ngram", "suffix")  # drafters without weights
INLINE = {"ahead": "model"}  # drafts in parallel here, in line elsewhere


@dataclass(frozen=True)
class Handover:
    """A drafter that goes elsewhere."""

    kind: str  # head, model, layerskip, ngram, suffix or off
    k: int
    folder: Path | None = None  # of a head or a model
    table: list[Range] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    why_k: str = ""


def read(checkpoint: Checkpoint, drafter: str | None, profile: dict[str, Any], k: int | None) -> Handover:
    """What is asked for by name or folder, else what the profile found best; options given by hand come from it too."""
    options = dict(profile.get("options", {}))
    kind, folder = _who(checkpoint, drafter or str(profile.get("drafter", "auto")), options)
    if kind == "head" and folder is not None:
        _insist_on_head(folder, checkpoint)
    if kind == "layerskip":
        options = _skips(profile, options)
    if kind == "off":
        return Handover("off", 0, why_k="nothing is drafted")
    k, why = _how_much(profile, k, kind, folder)
    table = from_profile(profile, min(max(k, 1), K_MOST), BATCHES) if _tuned_for(profile, kind) else []
    return Handover(kind, k, folder, table, options, why)


# ------------------------------------------------------------ who drafts


def _who(checkpoint: Checkpoint, name: str, options: dict[str, Any]) -> tuple[str, Path | None]:
    path = Path(name).expanduser()
    if path.is_dir():
        return ("head" if _is_head(path) else "model"), path
    name = INLINE.get(name, name)
    if name == "auto":
        found = head_for(_Identity(checkpoint))
        return ("head", found) if found is not None and read_config(found).kind == "eagle3" else ("suffix", None)
    if name in LOOKUPS or name in ("layerskip", "off"):
        return name, None
    if name in ("head", "model"):
        return name, _named_folder(checkpoint, name, options)
    raise ConfigError(
        f"The drafter '{name}' is neither a folder nor one that another engine can run; give a trained head's or a "
        f"draft model's folder, or one of: auto, head, model, layerskip, {', '.join(LOOKUPS)}, off."
    )


def _named_folder(checkpoint: Checkpoint, name: str, options: dict[str, Any]) -> Path:
    """The folder that a profile's options name, or the head that goes with the target."""
    keys = ("head",) if name == "head" else ("draft_model", "assistant_model")
    given = next((options[key] for key in keys if options.get(key)), None)
    if given is None and name == "head":
        given = head_for(_Identity(checkpoint))
    if given is None or not Path(str(given)).expanduser().is_dir():
        what = "head" if name == "head" else "draft model"
        raise ConfigError(f"It is not said which {what} is meant, or its folder is gone; give it with --drafter DIR.")
    return Path(str(given)).expanduser()


class _Identity:
    """An open checkpoint as the finder of heads asks for it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def identity(self) -> str:
        return target_hash(self._checkpoint.config, self._checkpoint.weights)


def _is_head(folder: Path) -> bool:
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no drafter: its config.json cannot be read ({error}).") from error
    return isinstance(data, dict) and "speculators_model_type" in data


def _insist_on_head(folder: Path, checkpoint: Checkpoint) -> None:
    config = read_config(folder)
    if config.kind != "eagle3":
        raise ConfigError(
            f"{folder} is a head of the kind '{config.kind}', which no other engine runs as it was trained; "
            "`outrider train --kind eagle3` or `--kind model` make drafters that others run."
        )
    if config.target_hash and config.target_hash != _Identity(checkpoint).identity():
        raise ConfigError(f"The head {folder} was trained for another target than {checkpoint.name}; give --target.")


def _skips(profile: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The set of blocks that is left out: the profile's choice, or what its search found."""
    found = {**profile.get("skip_search", {}), **options}
    both = [int(i) for i in found.get("skip_layers", ())]
    sets = {name: sorted({*both, *(int(i) for i in found.get(name, ()))}) for name in ("skip_attention", "skip_mlp")}
    if not any(sets.values()):
        raise ConfigError(
            "A layer-skip set is wanted, but the profile has none: run `outrider tune --drafter layerskip --out FILE`, "
            "or give --skip-layers."
        )
    return sets


# ------------------------------------------------------------ how much


def _tuned_for(profile: dict[str, Any], kind: str) -> bool:
    """Whether what the profile measured is this drafter's; `auto` was several, this one among them."""
    name = str(profile.get("drafter", ""))
    return name == "auto" or INLINE.get(name, name) == kind


def _how_much(profile: dict[str, Any], k: int | None, kind: str, folder: Path | None) -> tuple[int, str]:
    """K and where it comes from: asked for, tuned, reckoned from what was measured, trained for, or a habit."""
    if k is not None:
        return k, "as asked for"
    searched = profile.get("skip_search", {}).get("k")
    if kind == "layerskip" and isinstance(searched, int) and searched > 0:
        return searched, "what the search for this set found best"
    found: tuple[int, str] | None = None
    if _tuned_for(profile, kind):
        tuned = profile.get("k")
        found = (tuned, "tuned") if isinstance(tuned, int) and tuned > 0 else _reckoned(profile)
    return found or _trained(kind, folder) or (K, "a habit: nothing was measured for this drafter")


def _reckoned(profile: dict[str, Any]) -> tuple[int, str] | None:
    costs, alpha = costs_of(profile), profile.get("measured", {}).get("alpha")
    if costs is None or not alpha:
        return None
    best = best_k(float(alpha), costs, 1, K_MOST, draft_seconds(profile, costs))
    return (best, "reckoned from the profile's acceptance and costs") if best else None


def _trained(kind: str, folder: Path | None) -> tuple[int, str] | None:
    return (read_config(folder).block, "what the head was trained for") if kind == "head" and folder else None
