"""Every choice of a training run, checked, and as the command line that repeats it."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..models.config import ModelConfig
from ..models.speculators import DTYPES, STORES, HeadConfig
from .decoder import default_taps
from .networks import BLOCK, EAGLE3, EXIT

Json = dict[str, Any]
MODEL = "model"
KINDS = (EAGLE3, BLOCK, EXIT, MODEL)
ON_DISK = -1  # instead of a number of answers: those that are in the file
_WITHOUT_EFFECT = (
    "out", "answers_file", "resume", "device", "prompts", "exclude", "save_every", "evaluate_every", "html", "batch",
    "workers",
)  # fmt: skip  # on the weights; these may differ when a run is resumed
_PLAIN_OPTIONS = (
    "device", "dtype", "answers", "max_tokens", "steps", "tokens", "batch_tokens", "lr", "seed", "layers",
    "intermediate", "hidden_size", "exit_layer", "draft_vocab", "unroll", "block", "anchors", "store",
    "save_every", "evaluate_every",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The options of `outrider train`; 0 means the default that depends on the kind or the target."""

    target: str | None
    prompts: tuple[Path, ...]
    out: Path
    kind: str = EAGLE3
    exclude: tuple[Path, ...] = ()  # files whose prompts are not trained on
    device: str = "auto"
    dtype: str = "auto"  # of the target while it answers
    answers: int = 0  # 0: one for each prompt; ON_DISK: only what the file has
    answers_file: Path | None = None  # None: in the output's training folder
    max_tokens: int = 512
    batch: int = 0  # answers generated at a time
    workers: int = 1  # processes that generate them
    steps: int = 0
    tokens: int = 0  # instead of steps
    batch_tokens: int = 8192
    lr: float = 5e-4
    seed: int = 0
    layers: int = 0  # 1 for heads and adapters, 4 for a model
    intermediate: int = 0  # the target's
    hidden_size: int = 0  # the target's; less makes a narrow head with its own embedding
    taps: tuple[int, ...] = ()  # a low, a middle and a high layer
    exit_layer: int = 0  # kind=exit: layers of the target that run; a quarter of them
    draft_vocab: int = 16_384  # of heads, and of a smaller decoder behind an encoder
    unroll: int = 6
    block: int = 8
    anchors: int = 32
    start_from: Path | None = None  # another head of the same shape
    soft: bool = True
    freeze_output: bool = False  # heads: the output rows stay the target's own and are not stored
    train_embedding: bool = False  # kind=model
    store: str = "bfloat16"  # form of the written matrices: one of STORES
    save_every: int = 200
    evaluate_every: int = 200
    compile: bool = False
    resume: bool = False
    html: Path | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"There is no kind '{self.kind}'. Choose one of: {', '.join(KINDS)}.")
        if self.kind == EAGLE3 and self.layers > 1:
            raise ConfigError("An EAGLE-3 head has one layer; for more, choose --kind block or --kind model.")
        if self.kind == EXIT and self.taps:
            raise ConfigError("An early exit reads one layer: choose it with --exit-layer instead of --tap.")
        if self.hidden_size and self.kind not in (EAGLE3, BLOCK):
            raise ConfigError("--hidden-size makes a narrow head: it belongs to --kind eagle3 or block.")
        if self.freeze_output and (self.kind not in (EAGLE3, BLOCK) or self.hidden_size):
            raise ConfigError("--freeze-output belongs to a head as wide as its target (--kind eagle3 or block).")
        if self.kind != EXIT and self.exit_layer:
            raise ConfigError("--exit-layer belongs to --kind exit.")
        if not self.prompts:
            raise ConfigError("There is nothing to train on: give files with --prompts.")
        stores = tuple(DTYPES) if self.kind == MODEL else STORES
        if self.store not in stores:
            raise ConfigError(f"There is no --store '{self.store}' for this kind. Choose one of: {', '.join(stores)}.")

    @property
    def folder(self) -> Path:
        """Where the run keeps its state."""
        return self.out / "training"

    @property
    def k(self) -> int:
        """Tokens of one draft."""
        return self.block if self.kind == BLOCK else self.unroll

    @property
    def target_name(self) -> str | None:
        """A model's name, or the last part of its path."""
        return Path(self.target).name if self.target and Path(self.target).exists() else self.target

    def facts(self) -> Json:
        """What decides the result, with the names of files instead of their paths; for the card and for `resume`."""
        facts = {name: value for name, value in asdict(self).items() if name not in (*_WITHOUT_EFFECT, "start_from")}
        facts |= {"prompts": [p.name for p in self.prompts], "exclude": [p.name for p in self.exclude]}
        facts |= {"start_from": self.start_from.name if self.start_from else None, "target": self.target_name}
        plain: Json = json.loads(json.dumps(facts))
        return plain | {"command": self.command()}

    def command(self) -> str:
        """The command line, with the names of files instead of their paths."""
        arguments = ["outrider", "train", "--kind", self.kind, "--out", self.out.name]
        arguments += ["--model", self.target_name] if self.target_name else []
        for name, values in {"prompts": self.prompts, "exclude": self.exclude, "tap": self.taps}.items():
            arguments += [argument for value in values for argument in (f"--{name}", Path(str(value)).name)]
        arguments += ["--start-from", self.start_from.name] if self.start_from else []
        arguments += ["--hard"] if not self.soft else []
        for name, field in Recipe.__dataclass_fields__.items():
            value, option = getattr(self, name), f"--{name.replace('_', '-')}" if name != "tokens" else "--train-tokens"
            if value is True and name not in ("soft", "resume"):
                arguments.append(option)
            elif name in _PLAIN_OPTIONS and value != field.default:
                arguments += [option, str(value)]
        return shlex.join(arguments)

    def head_config(self, c: ModelConfig, draft_vocab: int, target_hash: str, target_name: str) -> HeadConfig:
        """The shape of a head or an exit's adapter for this target."""
        taps = tuple(sorted(self.taps)) or default_taps(c.layers)
        if self.kind == EXIT:
            exit_layer = self.exit_layer or max(1, c.layers // 4)
            if exit_layer >= c.layers:
                raise ConfigError(f"--exit-layer is {exit_layer}, but this target needs 1 to {c.layers - 1}.")
            taps = (exit_layer - 1,)
        if not all(0 <= tap < c.layers for tap in taps):
            raise ConfigError(f"--taps names a layer that the target does not have: it has 0 to {c.layers - 1}.")
        hidden = self.hidden_size or c.hidden_size
        kv_heads = max(1, c.kv_heads * hidden // c.hidden_size)  # a narrow head has fewer heads of the same size
        return HeadConfig(
            kind=self.kind,
            hidden_size=hidden,
            target_hidden_size=c.hidden_size,
            intermediate_size=self.intermediate or c.intermediate_size * hidden // c.hidden_size,
            heads=c.heads * kv_heads // c.kv_heads,
            kv_heads=kv_heads,
            head_dim=c.head_dim,
            vocab_size=c.vocab_size,
            draft_vocab_size=draft_vocab,
            taps=taps,
            layers=self.layers or 1,
            block=self.k,
            norm_eps=c.norm_eps,
            rope_theta=c.rope_theta,
            context_length=c.context_length,
            target_hash=target_hash,
            target_name=target_name,
            own_output=not self.freeze_output,
        )
