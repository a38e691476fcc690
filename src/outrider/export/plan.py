"""The export plan: which drafter another engine runs, and how many tokens (K) it drafts at which batch size.

It is made from a folder, a drafter's name or a tuning profile. What cannot be exported is refused here, before anything
is written. This module knows drafters and profiles, no engine. Every sequence of a batch adds its drafts to one pass,
so K falls with the batch size; pass costs are those of Outrider's own passes on the tuned machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from .. import drafters
from ..control.costs import PassCosts
from ..drafters._expectation import expected_tokens
from ..errors import ConfigError
from ..models.checkpoint import Checkpoint
from ..models.foreign import ForeignWeights
from ..models.speculators import read_config, target_hash

DEFAULT_K = 5
MOST_K = 16  # in a table
MOST_BATCH = 64  # the last range of a table holds for larger batches too
LOOKUPS = ("ngram", "suffix")  # drafters without weights
EQUIVALENTS = {"ahead": "model"}  # drafts in parallel here, in line elsewhere
MARGIN = 1.02  # least expected speedup over plain decoding

Json = dict[str, Any]
BatchRange = tuple[int, int, int]  # first batch size, last batch size, K


@dataclass(frozen=True)
class ExportPlan:
    kind: str  # head, model, layerskip, ngram, suffix or off
    k: int
    folder: Path | None = None  # of a head or a model
    k_by_batch: list[BatchRange] = field(default_factory=list)
    options: Json = field(default_factory=dict)
    k_reason: str = ""


def make_plan(checkpoint: Checkpoint, drafter: str | None, profile: Json, k: int | None) -> ExportPlan:
    """The drafter by name or folder, else the profile's; its options come from the profile in either case."""
    options = dict(profile.get("options", {}))
    kind, folder = _find_drafter(checkpoint, drafter or str(profile.get("drafter", "auto")), options)
    if kind == "off":
        return ExportPlan("off", 0, k_reason="nothing is drafted")
    if kind == "head" and folder is not None:
        _check_head(folder, checkpoint)
    if kind == "layerskip":
        options = _skip_sets(profile, options)
    measured = measured_in(profile) if _tuned_for(profile, kind) else None
    k, reason = (k, "as given") if k is not None else _choose_k(profile, kind, folder, measured)
    table = k_by_batch(measured, min(max(k, 1), MOST_K), MOST_BATCH) if measured else []
    return ExportPlan(kind, k, folder, table, options, reason)


def _find_drafter(checkpoint: Checkpoint, name: str, options: Json) -> tuple[str, Path | None]:
    """The kind of drafter, and its folder where it has weights."""
    path = Path(name).expanduser()
    if path.is_dir():
        return ("head" if _is_head(path) else "model"), path
    name = EQUIVALENTS.get(name, name)
    if name == "auto":
        head = head_folder(checkpoint)
        return ("head", head) if head is not None and read_config(head).kind == "eagle3" else ("suffix", None)
    if name in (*LOOKUPS, "layerskip", "off"):
        return name, None
    if name in ("head", "model"):
        keys = ("head",) if name == "head" else ("draft_model", "assistant_model")
        folder = next((options[key] for key in keys if options.get(key)), None)
        if folder is None and name == "head":
            folder = head_folder(checkpoint)
        if folder is None or not Path(str(folder)).expanduser().is_dir():
            what = "head" if name == "head" else "draft model"
            raise ConfigError(f"It is not clear which {what} is meant, or its folder is gone; give --drafter DIR.")
        return name, Path(str(folder)).expanduser()
    raise ConfigError(
        f"The drafter '{name}' is neither a folder nor one that another engine can run; give a trained head's or a "
        f"draft model's folder, or one of: auto, head, model, layerskip, {', '.join(LOOKUPS)}, off."
    )


def head_folder(checkpoint: Checkpoint) -> Path | None:
    """The folder of a trained head for this target, if there is one."""
    if "head" not in drafters.names() or isinstance(checkpoint.weights, ForeignWeights):
        return None
    from ..drafters.head import head_for

    return head_for(SimpleNamespace(identity=lambda: target_hash(checkpoint.config, checkpoint.weights)))


def _is_head(folder: Path) -> bool:
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no drafter: its config.json cannot be read ({error}).") from error
    return isinstance(data, dict) and "speculators_model_type" in data


def _check_head(folder: Path, checkpoint: Checkpoint) -> None:
    config = read_config(folder)
    if config.kind != "eagle3":
        raise ConfigError(
            f"{folder} is a head of the kind '{config.kind}', which no other engine runs as it was trained; "
            "`outrider train --kind eagle3` or `--kind model` make drafters that others run."
        )
    if config.target_hash and config.target_hash != target_hash(checkpoint.config, checkpoint.weights):
        raise ConfigError(f"The head {folder} was trained for another target than {checkpoint.name}; give --model.")


def _skip_sets(profile: Json, options: Json) -> Json:
    """The blocks that are left out: from the options, else from the profile's search."""
    source = {**profile.get("skip_search", {}), **options}
    both = [int(i) for i in source.get("skip_layers", ())]
    sets = {name: sorted({*both, *(int(i) for i in source.get(name, ()))}) for name in ("skip_attention", "skip_mlp")}
    if not any(sets.values()):
        raise ConfigError(
            "The drafter 'layerskip' needs a set of layers, but the profile has none: run `outrider tune --drafter "
            "layerskip --out FILE`, or give --skip-layers."
        )
    return sets


def _tuned_for(profile: Json, kind: str) -> bool:
    """Whether the profile's measurements are this drafter's; `auto` includes it."""
    name = str(profile.get("drafter", ""))
    return name == "auto" or EQUIVALENTS.get(name, name) == kind


def _choose_k(profile: Json, kind: str, folder: Path | None, measured: Measured | None) -> tuple[int, str]:
    """K and its source: searched, tuned, computed from measurements, trained for, or the default."""
    searched, tuned = profile.get("skip_search", {}).get("k"), profile.get("k")
    if kind == "layerskip" and isinstance(searched, int) and searched > 0:
        return searched, "what the search for this set found best"
    if _tuned_for(profile, kind) and isinstance(tuned, int) and tuned > 0:
        return tuned, "tuned"
    if measured and (best := best_k(measured, 1, MOST_K)):
        return best, "computed from the profile's acceptance and pass costs"
    if kind == "head" and folder is not None:
        return read_config(folder).block, "what the head was trained for"
    return DEFAULT_K, "a default: nothing was measured for this drafter"


class Measured(NamedTuple):
    """What K is computed from."""

    alpha: float
    costs: PassCosts  # seconds of a pass
    draft: float = 0.0  # seconds per drafted token


def best_k(measured: Measured, sequences: int, most: int) -> int:
    """The K up to `most` with the most expected tokens per second; 0 is plain decoding."""
    alpha, costs, draft = measured

    def speed(k: int) -> float:
        return expected_tokens(alpha, k) / (costs(sequences * (k + 1), sequences) + k * draft)

    best = max(range(most + 1), key=speed)
    return best if speed(best) > MARGIN * speed(0) else 0


def k_by_batch(measured: Measured, most: int, batches: int) -> list[BatchRange]:
    """Ranges of batch sizes from 1 to `batches`; K never rises with the batch."""
    ranges: list[BatchRange] = []
    k = most
    for sequences in range(1, batches + 1):
        k = best_k(measured, sequences, k)
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], sequences, k)
        else:
            ranges.append((sequences, sequences, k))
    return ranges


def measured_in(profile: Json) -> Measured | None:
    """What `outrider tune` measured, if it did; its pass costs are named "sequences,rows"."""
    figures, k = profile.get("measured", {}), profile.get("k")
    if not profile.get("costs") or not figures.get("alpha"):
        return None
    try:
        pairs = {name: name.split(",") for name in profile["costs"]}
        costs = PassCosts({(int(s), int(rows)): float(profile["costs"][name]) for name, (s, rows) in pairs.items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"The profile's costs are damaged ({error}); tune again.") from error
    draft = 0.0
    if isinstance(k, int) and k and all(figures.get(name) for name in ("tau", "tok_s", "plain_tok_s")):
        scale = costs(1) * figures["plain_tok_s"]  # to the clock of the costs: a plain step is one pass and overhead
        draft = max(figures["tau"] / figures["tok_s"] * scale - costs(k + 1), 0.0) / k
    return Measured(float(figures["alpha"]), costs, draft)
