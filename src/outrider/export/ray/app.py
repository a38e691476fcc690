"""A Ray Serve application file: vLLM with an exported drafter, in replicas that grow with the load.

Promise: what is written is read by Ray's own schema (`ServeDeploySchema`), and its arguments by Ray Serve LLM's
(`LLMConfig`); the tests ask both. It knows Ray's names, and needs neither Ray nor a YAML package to write them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError

IMPORT_PATH = "ray.serve.llm:build_openai_app"
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "4"}  # GiB; vLLM's CPU build takes most of the memory otherwise


@dataclass(frozen=True)
class Scale:
    """How many replicas there are, and what each is made of."""

    least: int = 1
    most: int = 4
    ongoing: int = 16  # requests under way per replica that autoscaling aims at
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    accelerator: str | None = None
    cpu: bool = False
    max_length: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)  # vLLM's arguments, as they are

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ConfigError(f"{self.least} replicas at least and {self.most} at most contradict each other.")
        if self.cpu and self.accelerator:
            raise ConfigError("--cpu and --accelerator contradict each other.")


def from_export(folder: Path) -> dict[str, Any]:
    """What `outrider export --to vllm` wrote, with paths that hold wherever the folder is mounted."""
    folder = folder.expanduser().resolve()
    try:
        facts: dict[str, Any] = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} is not an exported folder: `outrider export --out DIR` writes one ({error})."
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
    for key, value in (
        ("tensor_parallel_size", scale.tensor_parallel),
        ("pipeline_parallel_size", scale.pipeline_parallel),
    ):
        engine |= {key: value} if value > 1 else {}
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
    app = {"name": "outrider", "route_prefix": "/", "import_path": IMPORT_PATH, "args": {"llm_configs": [model]}}
    return {"applications": [app]}


def to_yaml(value: Any) -> str:
    """Plain values as block-style YAML; strings are written as JSON, which YAML reads as it is."""
    return "# Ray Serve LLM application, written by `outrider deploy ray`.\n" + "".join(
        f"{line}\n" for line in _lines(value)
    )


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for key, item in value.items() for line in _entry(_key(str(key)), item)]
    if isinstance(value, list) and value:
        return [line for item in value for line in _item(_lines(item))]
    return [json.dumps(value)]


def _entry(key: str, item: Any) -> list[str]:
    """A key and what belongs to it: on the same line where that is a single value or an empty one."""
    if isinstance(item, dict | list) and item:
        return [f"{key}:", *(f"  {line}" for line in _lines(item))]
    return [f"{key}: {json.dumps(item)}"]


def _item(lines: list[str]) -> list[str]:
    return [f"- {lines[0]}", *(f"  {line}" for line in lines[1:])]


def _key(key: str) -> str:
    """Bare where nobody could take it for anything but a word."""
    return key if re.fullmatch(r"[a-z]+_[a-z_]+|applications|args|name|method|model|dtype", key) else json.dumps(key)
