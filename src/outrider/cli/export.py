"""`outrider export` and `outrider deploy ray`: give a drafter to another engine. Files are read; no model is run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from ..errors import OutriderError
from .common import print_json, progress_bar
from .options import Json, Model, Profile, ServedName, arguments

_DRAFTER_HELP = "A drafter's folder, or auto, head, model, layerskip, ngram, suffix or off."
Drafter = Annotated[str | None, Option("--drafter", "-d", help=_DRAFTER_HELP)]
FixedK = Annotated[int | None, Option("--k", min=1, max=64, help="Drafted tokens. Default: the profile's.")]


def export(
    to: Annotated[str, Option("--to", help="vllm, sglang or llamacpp.")],
    out: Annotated[Path, Option(help="The folder to write.")],
    drafter: Drafter = None,
    profile: Profile = None,
    model: Model = None,
    k: FixedK = None,
    skip_layers: Annotated[str | None, Option(help="Draft with the target less these layers: 10,11,14.")] = None,
    dtype: Annotated[str, Option(help="Write weights in bfloat16, float16 or float32.")] = "bfloat16",
    name: ServedName = None,
    copy_target: Annotated[
        bool, Option("--copy-target", help="Write the target even if the engine can read the original.")
    ] = False,
    force: Annotated[bool, Option("--force", help="Write into a folder that is not empty.")] = False,
    as_json: Json = False,
) -> None:
    """Write a drafter and its tuning for another engine: files, configuration and the exact command line."""
    from ..export.write import ExportOptions, export as write

    checkpoint, plan = _plan(model, drafter, profile, k, skip_layers)
    with progress_bar() as progress:
        facts = write(checkpoint, plan, ExportOptions(to, out, dtype, name, copy_target, force), progress)
    if as_json:
        print_json(facts)
        return
    lines = [
        f"Written to {escape(str(out))}: README.md, export.json, serve.sh.",
        f"Drafter: {facts['drafter']['kind']}; K = {facts['k']} ({facts['k_from']}).",
        f"[dim]{escape(shlex.join(facts['command']))}[/dim]",
        *map(escape, facts["notes"]),
    ]
    for line in lines:
        Console().print(line, highlight=False, soft_wrap=True)


def _plan(
    target: str | None, drafter: str | None, profile: Path | None, k: int | None, skip_layers: str | None = None
) -> tuple[Any, Any]:
    """The target's checkpoint, and the drafter with its K."""
    from ..export.plan import make_plan
    from ..models.checkpoint import open_checkpoint
    from ..models.tuning_profile import read_profile

    tuned = read_profile(profile) if profile is not None else {}
    if skip_layers is not None:
        tuned = {**tuned, "options": {**tuned.get("options", {}), "skip_layers": _numbers(skip_layers)}}
        drafter = drafter or "layerskip"
    checkpoint = open_checkpoint(target)
    return checkpoint, make_plan(checkpoint, drafter, tuned, k)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise OutriderError(f"--skip-layers is '{text}', but it must be numbers with commas: 10,11,14.") from None


def deploy_ray(
    out: Annotated[Path, Option(help="The YAML file to write, for `serve run` or `serve deploy`.")],
    drafter: Drafter = None,
    profile: Profile = None,
    model: Model = None,
    k: FixedK = None,
    exported: Annotated[Path | None, Option("--export", help="A folder of `outrider export` on all nodes.")] = None,
    name: ServedName = None,
    min_replicas: Annotated[int, Option(min=0, help="Replicas that always run.")] = 1,
    max_replicas: Annotated[int, Option(min=1, help="Replicas under load.")] = 4,
    ongoing: Annotated[int, Option(min=1, help="Autoscale for N running requests per replica.")] = 16,
    tensor_parallel: Annotated[int, Option(min=1, help="Split each layer over N GPUs.")] = 1,
    pipeline_parallel: Annotated[int, Option(min=1, help="Split the layers into N groups of GPUs.")] = 1,
    accelerator: Annotated[str | None, Option(help="The GPU, as Ray names it: H100, A100-80G, L4.")] = None,
    cpu: Annotated[bool, Option("--cpu", help="Run replicas without GPUs, on vLLM's CPU build.")] = False,
    max_length: Annotated[int | None, Option(min=1, help="The most tokens of prompt and answer.")] = None,
    vllm_set: Annotated[list[str] | None, Option("--engine", help="Set an argument of vLLM. Repeatable.")] = None,
) -> None:
    """Write a Ray Serve LLM application: vLLM with this drafter, replicated and autoscaled."""
    from ..export.ray import Scale, application, from_export, to_yaml

    scale = Scale(
        min_replicas, max_replicas, ongoing, tensor_parallel, pipeline_parallel, accelerator, cpu, max_length,
        arguments(vllm_set)
    )  # fmt: skip
    if exported is not None:
        facts = from_export(exported)
    else:
        facts = _ray_facts(*_plan(model, drafter, profile, k))
    out.write_text(to_yaml(application(facts, scale, name)), encoding="utf-8")
    typer.echo(f"Written to {out}; start it on the cluster with: serve run {shlex.quote(str(out))}")


def _ray_facts(checkpoint: Any, plan: Any) -> dict[str, Any]:
    """The application without an exported folder: only files that Ray's nodes can find themselves."""
    from ..export.engines import vllm_speculative_config
    from ..models.speculators import in_blocks

    encoded = plan.kind == "head" and plan.folder is not None and in_blocks(plan.folder)
    if not checkpoint.path.is_dir() or plan.kind == "layerskip" or encoded:
        raise OutriderError(
            "Ray's nodes need the target and the drafter in vLLM's formats: run `outrider export --to vllm --out DIR` "
            "into a folder that all nodes see, and give it with --export DIR."
        )
    return {
        "model": checkpoint.name,
        "served_model_name": checkpoint.name,
        "target": str(checkpoint.path.resolve()),
        "speculative_config": vllm_speculative_config(plan, plan.folder and plan.folder.resolve()),
    }
