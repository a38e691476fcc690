"""An export plan in each engine's own options: its speculative configuration and the exact command line.

Options are those of vLLM 0.32, SGLang 0.5.18 and llama.cpp since it renamed `--draft-max`. Only vLLM's were run here.
This module knows option names; it writes no files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from .plan import ExportPlan

PROPOSER = "outrider.export.vllm.proposer"
PROPOSER_CLASSES = {"ngram": "NGramProposer", "suffix": "SuffixProposer"}  # Outrider's drafters inside vLLM
NGRAM_SIZES = {"prompt_lookup_max": ("ngram_max", 4), "prompt_lookup_min": ("ngram_min", 2)}  # our names and defaults
_NOT_RUN = "This command line follows the engine's documentation; it was not run when this version was made."

Json = dict[str, Any]


@dataclass(frozen=True)
class EngineCommand:
    command: list[str]
    speculative_config: Json  # the same as a program would pass it
    files: Json = field(default_factory=dict)  # name -> JSON content that the command refers to
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExportPaths:
    """Where target and drafter are, and the name under which the model is served."""

    target: PurePath
    drafter: PurePath | None
    name: str
    port: int = 8000
    dtype: str = "auto"


def vllm(plan: ExportPlan, paths: ExportPaths) -> EngineCommand:
    spec = vllm_speculative_config(plan, paths.drafter)
    command = ["vllm", "serve", str(paths.target), "--served-model-name", paths.name, "--dtype", paths.dtype]
    command += ["--port", str(paths.port)]
    notes = []
    if spec:
        command += ["--speculative-config", json.dumps(spec)]
    if spec.get("method") == "suffix":
        notes.append(
            "vLLM's own suffix decoding needs arctic-inference; `outrider serve --engine vllm` uses Outrider's."
        )
    if plan.k_by_batch:
        notes.append("vLLM ignores K by batch size under data parallelism and uses num_speculative_tokens.")
    return EngineCommand(command, spec, notes=notes)


def vllm_speculative_config(plan: ExportPlan, drafter: PurePath | None, own_lookups: bool = False) -> Json:
    """vLLM's `speculative_config`. With `own_lookups`, n-gram and suffix drafts come from Outrider's drafters."""
    if plan.kind == "off":
        return {}
    spec: Json = {"num_speculative_tokens": max(plan.k, 1)}
    if plan.kind == "head":
        spec |= {"method": "eagle3", "model": str(drafter)}
    elif plan.kind in ("model", "layerskip"):
        spec |= {"method": "draft_model", "model": str(drafter)}
    elif own_lookups:  # vLLM does not tell a proposer class the K of a batch size
        return spec | {"method": "custom_class", "model": f"{PROPOSER}.{PROPOSER_CLASSES[plan.kind]}"}
    elif plan.kind == "ngram":
        spec["method"] = "ngram"
        for name, (own_name, default) in NGRAM_SIZES.items():
            spec[name] = plan.options.get(name, plan.options.get(own_name, default))
    else:
        least = plan.options.get("suffix_min_survival", plan.options.get("suffix_decoding_min_token_prob", 0.1))
        spec |= {"method": "suffix", "suffix_decoding_min_token_prob": least}
    if plan.k_by_batch:
        spec["num_speculative_tokens_per_batch_size"] = [list(batch_range) for batch_range in plan.k_by_batch]
    return spec


def sglang(plan: ExportPlan, paths: ExportPaths) -> EngineCommand:
    command = ["python", "-m", "sglang.launch_server", "--model-path", str(paths.target)]
    command += ["--served-model-name", paths.name, "--port", str(paths.port)]
    spec, files, notes = Json(), Json(), [_NOT_RUN]
    if plan.kind in ("head", "model", "layerskip"):
        spec["speculative_algorithm"] = "EAGLE3" if plan.kind == "head" else "STANDALONE"
        spec["speculative_draft_model_path"] = str(paths.drafter)
        spec |= {"speculative_num_steps": plan.k, "speculative_eagle_topk": 1}
        spec["speculative_num_draft_tokens"] = plan.k + 1  # SGLang counts the root
    elif plan.kind in PROPOSER_CLASSES:
        spec |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": plan.k + 1}
    flags = dict(spec)
    if plan.k_by_batch and plan.kind == "head":
        files["adaptive.json"] = {str(low): {"candidate_steps": [k]} for low, _, k in plan.k_by_batch}
        flags |= {"speculative_adaptive": True, "speculative_adaptive_config": "adaptive.json"}
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if plan.kind == "suffix":
        notes.append("SGLang has no suffix decoding under that name; its NGRAM keeps a trie of earlier text.")
    return EngineCommand(command, spec, files, notes)


def llamacpp(plan: ExportPlan, paths: ExportPaths) -> EngineCommand:
    command = ["llama-server", "-m", str(paths.target), "--alias", paths.name, "--port", str(paths.port), "--jinja"]
    spec: Json = {}
    notes = [_NOT_RUN]
    if plan.kind in ("model", "layerskip"):
        spec = {"model-draft": str(paths.drafter), "spec-draft-n-max": plan.k}
    elif plan.kind == "head":
        spec = {"model-draft": str(paths.drafter), "spec-type": "draft-eagle3", "spec-draft-n-max": plan.k}
        notes.append(
            "The head is exported as a folder: convert it with llama.cpp's own convert_hf_to_gguf.py "
            "(--target-model-dir: the target's Hugging Face folder), and name the result after -md."
        )
    elif plan.kind in PROPOSER_CLASSES:
        spec = {"spec-type": "ngram-mod" if plan.kind == "suffix" else "ngram-simple", "spec-draft-n-max": plan.k}
    if plan.k_by_batch:
        notes.append("llama.cpp has no table of K by batch size; the K of one sequence is used.")
    for name, value in spec.items():
        command += [f"--{name}", str(value)]
    return EngineCommand(command, spec, notes=notes)


ENGINES = {"vllm": vllm, "sglang": sglang, "llamacpp": llamacpp}
