"""A trained head in fewer bits: its matrices in blocks, rounded for the inputs that they really get.

Promise: what `encode_folder` reports is the acceptance of the tensors that it wrote. It knows networks and answers, not
block formats (`models.blocks`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..backends.machine import choose_device, prepare
from ..errors import ConfigError, ModelError
from ..models.checkpoint import open_checkpoint
from ..models.speculators import (
    CARD,
    DTYPES,
    WEIGHTS,
    HeadConfig,
    HeadTensors,
    decoded,
    read_head,
    shapes,
    stored_as,
    target_hash,
    target_ids,
    write_head,
)
from .answers import Answer
from .batches import Batch, held_out_batches
from .decoder import TargetNet
from .loop import ALL, Acceptance, evaluate
from .networks import load_start
from .objectives import Objective, head_objective

CALIBRATION = 32_768  # tokens of answers whose inputs are averaged
_BATCH = 8192  # tokens
Json = dict[str, Any]


def encoded(objective: Objective[Any], config: HeadConfig, store: str, batches: Iterable[Batch]) -> HeadTensors:
    """The network's tensors as they are to be stored. It computes with these numbers from now on."""
    named = {name: tensor for name, tensor in objective.net.state_dict().items() if name in shapes(config)}
    moments = {} if store in DTYPES else input_moments(objective, batches)
    tensors = stored_as(named, store, moments)
    objective.net.load_state_dict(decoded(tensors, torch.float32), strict=False)  # output rows may be the target's
    return tensors


@torch.no_grad()
def input_moments(objective: Objective[Any], batches: Iterable[Batch]) -> dict[str, Tensor]:
    """The mean of xᵀx over the inputs x of each product while drafting these texts, by the name of its weight."""
    sums: dict[str, Tensor] = {}
    rows: dict[str, int] = defaultdict(int)
    device, tokens = next(objective.net.parameters()).device, 0
    for batch in batches:
        with _inputs_of(objective.net, sums, rows, batch):
            objective.hits(batch.to(device))
        tokens += batch.count
        if tokens >= CALIBRATION:
            break
    return {name: total / max(rows[name], 1) for name, total in sums.items()}


@contextmanager
def _inputs_of(net: nn.Module, sums: dict[str, Tensor], rows: dict[str, int], batch: Batch) -> Iterator[None]:
    """Adds up xᵀx of every product; padding is left out where rows are those of the batch."""
    inside = torch.arange(batch.tokens.shape[1] - 1) < (batch.lengths - 1)[:, None]  # [B, n-1]

    def watch(name: str) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            same = x.dim() == 3 and x.shape[:2] == inside.shape
            flat = (x[inside.to(x.device)] if same else x.flatten(0, -2)).float()
            sums[name] = sums.get(name, 0) + flat.T @ flat
            rows[name] += flat.shape[0]

        return add

    products = {f"{name}.weight": module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in products.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ------------------------------------------------------------ a folder


@dataclass(frozen=True)
class EncodingOptions:
    folder: Path
    out: Path
    store: str
    answers: Path  # of `outrider train`: those that were held out measure, the others are calibrated with
    target: str | None = None
    device: str = "auto"


def encode_folder(options: EncodingOptions) -> Json:
    """Write a head or an exit adapter with another --store; returns its size, and acceptance before and after."""
    prepare()
    config, tensors = read_head(options.folder)
    checkpoint, device = open_checkpoint(options.target), choose_device(options.device)
    if config.target_hash and target_hash(checkpoint.config, checkpoint.weights) != config.target_hash:
        raise ConfigError(f"{options.folder} was made for another target than {checkpoint.name}; give it with --model.")
    answers = _read(options.answers)
    used, held = ([a for a in answers if a.held is measured] for measured in (False, True))
    held = held or used[::8]
    used = [a for a in used if a not in held]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = TargetNet.load(checkpoint.config, checkpoint.weights, dtype, device)
    objective = _objective(config, tensors, target, device)
    before = _acceptance(objective, held)
    stored = encoded(objective, config, options.store, _batches(used))
    after = _acceptance(objective, held)
    card = options.folder / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    config = replace(config, acceptance=after[ALL]["alpha_by_position"])
    write_head(options.out, config, stored, text + _card_section(options.store, before, after) if text else "")
    size = (options.out / WEIGHTS).stat().st_size
    return {"store": options.store, "bytes": size, "before": before, "after": after, "held_answers": len(held)}


def _read(path: Path) -> list[Answer]:
    """The answers of a training run, without the file's header."""
    try:
        with open(path, encoding="utf-8") as file:
            answers = [Answer(**line) for line in map(json.loads, file) if "answer" in line]
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{path} does not hold answers of `outrider train` ({error}): give its answers.jsonl."
        ) from error
    if len(answers) < 2:
        raise ModelError(f"{path} holds {len(answers)} answers; at least two are needed.")
    return answers


def _batches(answers: list[Answer]) -> list[Batch]:
    return held_out_batches([Answer(**vars(a) | {"held": True}) for a in answers], _BATCH, _BATCH)


def _acceptance(objective: Objective[Any], answers: list[Answer]) -> Json:
    device = next(objective.net.parameters()).device
    kinds: dict[str, Acceptance] = evaluate(lambda batch: objective.hits(batch.to(device)), _batches(answers))
    return {kind: acceptance.as_json() for kind, acceptance in kinds.items()}


def _objective(config: HeadConfig, tensors: HeadTensors, target: TargetNet, device: torch.device) -> Objective[Any]:
    ids = target_ids(tensors["d2t"]) if "d2t" in tensors else torch.arange(config.vocab_size)
    objective = head_objective(config, ids, target, device, config.block)
    load_start(objective.net, config, config, tensors)
    return objective


def _card_section(store: str, before: Json, after: Json) -> str:
    rows = [("as trained", before[ALL]), (f"as stored ({store})", after[ALL])]
    lines = [
        f"| {name} | {a['tau']:.2f} | {' '.join(f'{x:.3f}' for x in a['alpha_by_position'])} |" for name, a in rows
    ]
    return "\n".join(
        [
            f"\n## Stored in {store}\n",
            "Acceptance of the same greedy chains before and after encoding (`outrider drafter encode`):\n",
            "| weights | τ | α by position |",
            "|---|---|---|",
            *lines,
            "",
        ]
    )
