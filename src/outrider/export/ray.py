"""A Ray Serve application file: vLLM with an exported drafter, in autoscaled replicas.

The file is valid under Ray's own schema (`ServeDeploySchema`), its arguments under Ray Serve LLM's (`LLMConfig`).
Writing it needs neither Ray nor a YAML package.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError

IMPORT_PATH = "ray.serve.llm:build_openai_app"
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "4"}  # GiB; vLLM's CPU build takes most of the memory otherwise


@dataclass(frozen=True)
class Scale:
    """The number of replicas, and the resources of each."""

    least: int = 1
    most: int = 4
    ongoing: int = 16  # requests in progress per replica that autoscaling aims at
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    accelerator: str | None = None
    cpu: bool = False
    max_length: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of vLLM

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ConfigError(f"{self.least} replicas at least and {self.most} at most contradict each other.")
        if self.cpu and self.accelerator:
            raise ConfigError("--cpu and --accelerator contradict each other.")


def from_export(folder: Path) -> dict[str, Any]:
    """The export.json of `outrider export --to vllm`, with absolute paths."""
    folder = folder.expanduser().resolve()
    try:
        facts: dict[str, Any] = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} is no exported folder ({error}); `outrider export --out DIR` writes one."
        ) from error
    if facts.get("engine") != "vllm":
        raise ConfigError(f"{folder} was exported for {facts.get('engine')}, and Ray Serve LLM runs vLLM.")
    spec = dict(facts["speculative_config"])
    if facts["drafter"]["path"] is not None:
        spec["model"] = str(folder / facts["drafter"]["path"])
    return facts | {"target": str(folder / facts["target"]), "speculative_config": spec}


def application(facts: dict[str, Any], scale: Scale, name: str | None = None) -> dict[str, Any]:
    """The whole file as plain values."""
    engine: dict[str, Any] = {"speculative_config": facts["speculative_config"]} if facts["speculative_config"] else {}
    if scale.tensor_parallel > 1:
        engine["tensor_parallel_size"] = scale.tensor_parallel
    if scale.pipeline_parallel > 1:
        engine["pipeline_parallel_size"] = scale.pipeline_parallel
    if scale.max_length is not None:
        engine["max_model_len"] = scale.max_length
    model: dict[str, Any] = {
        "model_loading_config": {
            "model_id": name or facts["served_model_name"],
            "model_source": facts["target"],
        },
        "deployment_config": {
            "autoscaling_config": {
                "min_replicas": scale.least,
                "max_replicas": scale.most,
                "target_ongoing_requests": scale.ongoing,
            },
            "max_ongoing_requests": 4 * scale.ongoing,
        },
        "engine_kwargs": engine | ({"dtype": "float32"} if scale.cpu else {}) | scale.engine,
        "log_engine_metrics": True,
    }
    if scale.accelerator:
        model["accelerator_type"] = scale.accelerator
    if scale.cpu:
        model["placement_group_config"] = {"bundles": [{"CPU": 1}]}
        model["runtime_env"] = {"env_vars": CPU_ENVIRONMENT}
    arguments: dict[str, Any] = {"llm_configs": [model]}
    if scale.cpu:  # a replica takes two processors: beside it the front would wait for a third for ever
        arguments["ingress_deployment_config"] = {"ray_actor_options": {"num_cpus": 0}}
    app = {"name": "outrider", "route_prefix": "/", "import_path": IMPORT_PATH, "args": arguments}
    return {"applications": [app]}


def to_yaml(value: Any) -> str:
    """Plain values as block-style YAML; strings are written as JSON, which YAML reads."""
    header = "# Ray Serve LLM application, written by `outrider deploy ray`."
    return "".join(f"{line}\n" for line in (header, *_lines(value)))


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for key, item in value.items() for line in _entry(key, item)]
    if isinstance(value, list) and value:
        items = (_lines(item) for item in value)
        return [line for first, *rest in items for line in (f"- {first}", *(f"  {each}" for each in rest))]
    return [json.dumps(value)]


def _entry(key: str, item: Any) -> list[str]:
    """A key with its value, on one line where the value is a scalar or empty. Keys that YAML might not read as strings
    are quoted."""
    if not re.fullmatch(r"[a-z]+_[a-z_]+|applications|args|name|method|model|dtype", key):
        key = json.dumps(key)
    if isinstance(item, dict | list) and item:
        return [f"{key}:", *(f"  {line}" for line in _lines(item))]
    return [f"{key}: {json.dumps(item)}"]
