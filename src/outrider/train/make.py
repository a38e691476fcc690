"""A student of each kind from a recipe, and how it is written when it has learnt.

Promise: `write` leaves a folder that `models.head` or `open_checkpoint` reads. It knows recipes, nets and formats, not
how they are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..models.checkpoint import Checkpoint
from ..models.speculators import HeadConfig, read_head, target_hash, target_ids, write_head
from .answers import Answer
from .distil import Distilled, cut_from, write_model
from .exits import ExitNet, Exits
from .features import TargetNet, default_taps
from .net import EAGLE3, HeadNet
from .objectives import Blocks, Eagle, Student
from .vocabulary import choose

if TYPE_CHECKING:
    from .recipe import Recipe

EXIT = "exit"
_LAYERS = 4  # of a distilled model
_SPECIALS = 64


@dataclass(frozen=True)
class Made:
    """A student, what is said about it, and how it becomes a folder."""

    student: Student
    facts: dict[str, Any]
    write: Callable[[str], None]  # takes the card


def make_head(
    recipe: Recipe, checkpoint: Checkpoint, target: TargetNet, answers: list[Answer], device: torch.device
) -> Made:
    """EAGLE-3, a block drafter, or an early exit's adapter."""
    before = None if recipe.start_from is None else read_head(recipe.start_from)
    vocabulary = choose(answers, checkpoint.config.vocab_size, recipe.draft_vocab, _specials(checkpoint))
    config = head_config(recipe, checkpoint, len(vocabulary.ids))
    student = _student(recipe, config, vocabulary.ids, target, device)
    net = student.net
    if before is not None:
        _go_on_from(net, config, *before)
    shares = {"coverage": vocabulary.coverage, "held_coverage": vocabulary.held_coverage}
    facts = {"vocabulary": {"size": len(vocabulary.ids)} | shares, "taps": list(config.taps), "layers": config.layers}

    def write(card: str) -> None:
        write_head(recipe.out, config, {name: _stored(t, recipe.store) for name, t in net.state_dict().items()}, card)

    return Made(student, facts, write)


def _student(recipe: Recipe, config: HeadConfig, ids: Tensor, target: TargetNet, device: torch.device) -> Student:
    """A net that knows what the target lends it, and what it is to learn. ids [draft_vocab]."""
    if config.kind == EXIT:
        return Exits(ExitNet(config, ids, target).to(device), target, recipe.k, recipe.soft)  # type: ignore[arg-type]
    net = HeadNet.from_target(target, config, ids, recipe.seed).to(device)
    return (Eagle if config.kind == EAGLE3 else Blocks)(net, target, recipe.k, recipe.soft)


def _go_on_from(net: nn.Module, config: HeadConfig, its: HeadConfig, tensors: dict[str, Tensor]) -> None:
    """Begin with the weights of another head of the same target; words that it does not know begin as the target's."""
    if its != config:
        names = [name for name, value in vars(its).items() if getattr(config, name) != value]
        raise ConfigError(f"--start-from names a head of another shape: its {' and '.join(names)} differ.")
    found = dict(tensors)
    if "d2t" in found:
        mine = net.state_dict()
        theirs, ids = target_ids(found["d2t"].cpu()), target_ids(mine["d2t"].cpu())  # [D] each, ascending
        place = torch.searchsorted(theirs, ids).clamp(max=len(theirs) - 1)
        shared = theirs[place] == ids
        rows = mine["lm_head.weight"].cpu().float()
        rows[shared] = found["lm_head.weight"].float()[place[shared]]
        found |= {"lm_head.weight": rows, "d2t": mine["d2t"], "t2d": mine["t2d"]}
    net.load_state_dict(found)


def make_model(
    recipe: Recipe, checkpoint: Checkpoint, target: TargetNet, answers: list[Answer], device: torch.device
) -> Made:
    """A small standalone model."""
    layers = recipe.layers or min(_LAYERS, checkpoint.config.layers)
    net = cut_from(checkpoint.config, checkpoint.weights, layers, recipe.train_embedding, device)

    def write(card: str) -> None:
        write_model(recipe.out, net, checkpoint.tokenizer, card, dtype_of(recipe.store))

    return Made(Distilled(net, target, recipe.k, recipe.soft), {"layers": layers}, write)


def head_config(recipe: Recipe, checkpoint: Checkpoint, draft_vocab: int) -> HeadConfig:
    c = checkpoint.config
    taps = tuple(sorted(recipe.taps)) or default_taps(c.layers)
    if recipe.kind == EXIT:
        taps = (_exit_layer(recipe, c.layers) - 1,)
    if not all(0 <= tap < c.layers for tap in taps):
        raise ConfigError(f"--taps names a layer that the target does not have: it has 0 to {c.layers - 1}.")
    hidden = recipe.hidden_size or c.hidden_size
    kv_heads = max(1, c.kv_heads * hidden // c.hidden_size)  # a narrow head has fewer of the same size
    return HeadConfig(
        kind=recipe.kind,
        hidden_size=hidden,
        target_hidden_size=c.hidden_size,
        intermediate_size=recipe.intermediate or c.intermediate_size * hidden // c.hidden_size,
        heads=c.heads * kv_heads // c.kv_heads,
        kv_heads=kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        draft_vocab_size=draft_vocab,
        taps=taps,
        layers=recipe.layers or 1,
        block=recipe.k,
        norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        context_length=c.context_length,
        target_hash=target_hash(c, checkpoint.weights),
        target_name=checkpoint.name,
    )


def _exit_layer(recipe: Recipe, layers: int) -> int:
    """How many of the target's layers run before the exit: a quarter of them, unless said otherwise."""
    wanted = recipe.exit_layer or max(1, layers // 4)
    if not 1 <= wanted < layers:
        raise ConfigError(f"--exit-layer is {wanted}, but it must be a number from 1 to {layers - 1} for this target.")
    return wanted


def _specials(checkpoint: Checkpoint) -> list[int]:
    """Ids that end or structure a text: a drafter that cannot say them never finishes one."""
    tokenizer = checkpoint.tokenizer
    special = [i for i in tokenizer.vocabulary.values() if tokenizer.is_special(i)]
    few = special if len(special) <= _SPECIALS else []  # some vocabularies reserve hundreds that nobody says
    return few + list(checkpoint.config.eos_ids)


def _stored(tensor: Tensor, name: str) -> Tensor:
    """Matrices in the type they are kept in; norms and tables of ids as they are."""
    return tensor.to(dtype_of(name)) if tensor.is_floating_point() and tensor.dim() > 1 else tensor


def dtype_of(name: str) -> torch.dtype:
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in known:
        raise ConfigError(f"There is no --store '{name}'. Choose one of: {', '.join(known)}.")
    return known[name]
