"""The commands that hand over: `outrider export` and `outrider deploy`.

They read options, open the target's files (no model is run), and hand over to `export`.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import OutriderError
from .app import Debug, Json, Profile, _progress, _sentences, app
from .options import arguments

Drafter = Annotated[
    str | None,
    typer.Option("--drafter", "-d", help="A folder, or auto, head, model, layerskip, ngram, suffix, off."),
]
Target = Annotated[str | None, typer.Option(help="A folder, a .gguf file or a hub name. Default: SmolLM2-135M.")]
KTokens = Annotated[int | None, typer.Option("--k", min=1, max=64, help="Drafted tokens; default: the profile's.")]
Skip = Annotated[str | None, typer.Option("--skip-layers", help="Of layerskip: layers left out, as 10,11,14.")]
Name = Annotated[str | None, typer.Option("--served-model-name", help="What requests call the model.")]

deploy_app = typer.Typer(help="Write files that other systems deploy from.", no_args_is_help=True)
app.add_typer(deploy_app, name="deploy")


@app.command()
def export(
    to: Annotated[str, typer.Option("--to", help="vllm, sglang or llamacpp.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    drafter: Drafter = None,
    profile: Profile = None,
    target: Target = None,
    k: KTokens = None,
    skip_layers: Skip = None,
    dtype: Annotated[str, typer.Option(help="Of weights that are written: bfloat16, float16 or float32.")] = "bfloat16",
    name: Name = None,
    copy_target: Annotated[
        bool, typer.Option("--copy-target", help="Write the target even if the engine can read the original.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Hand a drafter and its tuning to another engine: files, configuration, and the exact command line."""
    with _sentences(debug):
        from ..export.write import ExportOptions, export as write

        checkpoint, given = handover(target, drafter, profile, k, skip_layers)
        with _progress() as progress:
            facts = write(checkpoint, given, ExportOptions(to, out, dtype, name, copy_target, force), progress)
        if as_json:
            typer.echo(json.dumps(facts))
        else:
            _show(Console(), out, facts)


def handover(
    target: str | None, drafter: str | None, profile: Path | None, k: int | None, skip_layers: str | None
) -> tuple[Any, Any]:
    """The open target, and who drafts for it how much."""
    from ..export.plan import make_plan
    from ..models.checkpoint import open_checkpoint
    from ..models.tuning_profile import read_profile

    found = read_profile(profile) if profile is not None else {}
    if skip_layers is not None:
        found = {**found, "options": {**found.get("options", {}), "skip_layers": _numbers(skip_layers)}}
        drafter = drafter or "layerskip"
    checkpoint = open_checkpoint(target)
    return checkpoint, make_plan(checkpoint, drafter, found, k)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise OutriderError(f"--skip-layers is '{text}', but it must be numbers with commas: 10,11,14.") from None


def _show(console: Console, out: Path, facts: dict[str, Any]) -> None:
    console.print(f"Written to {escape(str(out))}: README.md, export.json, serve.sh.", highlight=False, soft_wrap=True)
    kind = facts["drafter"]["kind"]
    console.print(f"Drafter: {kind}; K = {facts['k']} ({facts['k_from']}).", highlight=False, soft_wrap=True)
    console.print(f"[dim]{escape(shlex.join(facts['command']))}[/dim]", soft_wrap=True, highlight=False)
    for note in facts["notes"]:
        console.print(escape(note), soft_wrap=True, highlight=False)


@deploy_app.command("ray")
def deploy_ray(
    out: Annotated[Path, typer.Option(help="The YAML file to write, for `serve run` or `serve deploy`.")],
    drafter: Drafter = None,
    profile: Profile = None,
    target: Target = None,
    k: KTokens = None,
    exported: Annotated[
        Path | None, typer.Option("--export", help="A folder of `outrider export --to vllm`, as all nodes see it.")
    ] = None,
    name: Name = None,
    min_replicas: Annotated[int, typer.Option(min=0, help="Replicas that always run.")] = 1,
    max_replicas: Annotated[int, typer.Option(min=1, help="Replicas under load.")] = 4,
    ongoing: Annotated[int, typer.Option(min=1, help="Requests under way per replica that autoscaling aims at.")] = 16,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that share each layer.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1, help="Groups of layers, on GPUs or nodes of their own.")] = 1,
    accelerator: Annotated[str | None, typer.Option(help="Ray's name of a GPU: H100, A100-80G, L4, …")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Replicas without GPUs (vLLM's CPU build).")] = False,
    max_length: Annotated[int | None, typer.Option(min=1, help="Prompt and answer together.")] = None,
    engine: Annotated[list[str] | None, typer.Option("--engine", help="vLLM's argument, as name=value.")] = None,
    debug: Debug = False,
) -> None:
    """Write a Ray Serve LLM application: vLLM with this drafter, replicated and autoscaled."""
    with _sentences(debug):
        from ..export.ray import Scale, application, from_export, to_yaml

        scale = Scale(
            min_replicas, max_replicas, ongoing, tensor_parallel, pipeline_parallel, accelerator, cpu, max_length,
            arguments(None, None, None, None, engine),
        )  # fmt: skip
        if exported is not None:
            facts = from_export(exported)
        else:
            facts = _ray_facts(*handover(target, drafter, profile, k, None))
        out.write_text(to_yaml(application(facts, scale, name)), encoding="utf-8")
        typer.echo(f"Written to {out}; start it on the cluster with: serve run {shlex.quote(str(out))}")


def _ray_facts(checkpoint: Any, given: Any) -> dict[str, Any]:
    """Without an exported folder, only what Ray's nodes can find themselves can be named."""
    from ..export.engines import vllm_speculative_config

    if not checkpoint.path.is_dir() or given.kind == "layerskip":
        raise OutriderError(
            "Ray's nodes need the target and the drafter in vLLM's formats: run `outrider export --to vllm --out DIR` "
            "into a folder that all nodes see, and give it with --export DIR."
        )
    return {
        "model": checkpoint.name,
        "served_model_name": checkpoint.name,
        "target": str(checkpoint.path.resolve()),
        "speculative_config": vllm_speculative_config(given, given.folder and given.folder.resolve()),
    }
