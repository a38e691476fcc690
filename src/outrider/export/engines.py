"""A handover in each engine's own words: its speculative configuration and the exact command line.

Options are those of vLLM 0.32, SGLang 0.5.18 and llama.cpp since it renamed `--draft-max`. Only vLLM's were run here.
Paths are given by whoever writes the folder. It knows spelling; what is handed over was decided elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from ..errors import ConfigError
from .plan import Handover

PROPOSER = "outrider.export.vllm.proposer"  # the module whose classes draft inside vLLM
CLASSES = {"ngram": "NGramProposer", "suffix": "SuffixProposer"}
LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}  # what our own n-gram drafter looks for
_ARCTIC = (
    "vLLM's own suffix decoding needs the package arctic-inference; "
    "Outrider's runs with `outrider serve --engine vllm`."
)
_NOT_RUN = "This command line follows the engine's documentation; it was not run when this version was made."


@dataclass(frozen=True)
class Told:
    """What an engine is told."""

    words: list[str]  # the command line
    configuration: dict[str, Any]  # speculation alone, as a program would pass it
    files: dict[str, Any] = field(default_factory=dict)  # name -> JSON content that the command line refers to
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Places:
    """Where things lie, and what requests call the model."""

    target: PurePath
    drafter: PurePath | None
    name: str
    port: int = 8000
    dtype: str = "auto"


def vllm(given: Handover, places: Places) -> Told:
    spec = vllm_configuration(given, places.drafter)
    words = ["vllm", "serve", str(places.target), "--served-model-name", places.name, "--dtype", places.dtype]
    words += ["--port", str(places.port)]
    notes = []
    if spec:
        words += ["--speculative-config", json.dumps(spec)]
    if spec.get("method") == "suffix":
        notes.append(_ARCTIC)
    if given.table:
        notes.append(
            "vLLM drops the table of K by batch size under data parallelism, and then uses num_speculative_tokens."
        )
    return Told(words, spec, notes=notes)


def vllm_configuration(given: Handover, drafter: PurePath | None, ours: bool = False) -> dict[str, Any]:
    """vLLM's `speculative_config`; `ours`: n-gram and suffix drafts come from Outrider's own drafters."""
    if given.kind == "off":
        return {}
    spec: dict[str, Any] = {"num_speculative_tokens": max(given.k, 1)}
    if given.kind == "head":
        spec |= {"method": "eagle3", "model": str(drafter)}
    elif given.kind in ("model", "layerskip"):
        spec |= {"method": "draft_model", "model": str(drafter)}
    elif ours:
        spec |= {"method": "custom_class", "model": f"{PROPOSER}.{CLASSES[given.kind]}"}
    elif given.kind == "ngram":
        spec |= {"method": "ngram"} | lookup_sizes(given.options)
    else:
        floor = given.options.get("suffix_min_survival", given.options.get("suffix_decoding_min_token_prob", 0.1))
        spec |= {"method": "suffix", "suffix_decoding_min_token_prob": floor}
    # A proposer class is not told how many tokens this batch size may have.
    if given.table and spec["method"] != "custom_class":
        spec["num_speculative_tokens_per_batch_size"] = [list(each) for each in given.table]
    return spec


def lookup_sizes(options: dict[str, Any]) -> dict[str, Any]:
    """The sizes of n-grams, by either name."""
    ours = {"prompt_lookup_max": "ngram_max", "prompt_lookup_min": "ngram_min"}
    return {name: options.get(name, options.get(ours[name], LOOKUP[name])) for name in LOOKUP}


def sglang(given: Handover, places: Places) -> Told:
    words = ["python", "-m", "sglang.launch_server", "--model-path", str(places.target)]
    words += ["--served-model-name", places.name, "--port", str(places.port)]
    spec: dict[str, Any] = {}
    files: dict[str, Any] = {}
    if given.kind in ("head", "model", "layerskip"):
        spec["speculative_algorithm"] = "EAGLE3" if given.kind == "head" else "STANDALONE"
        spec["speculative_draft_model_path"] = str(places.drafter)
        spec |= {"speculative_num_steps": given.k, "speculative_eagle_topk": 1}
        spec["speculative_num_draft_tokens"] = given.k + 1  # the root counts there
    elif given.kind in CLASSES:
        spec |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": given.k + 1}
    notes = [_NOT_RUN]
    flags = dict(spec)
    if given.table and given.kind == "head":
        file = "adaptive.json"
        files[file] = {str(low): {"candidate_steps": [k]} for low, _, k in given.table}
        flags |= {"speculative_adaptive": True, "speculative_adaptive_config": file}
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if given.kind == "suffix":
        notes.append("SGLang has no suffix decoding under that name; its NGRAM keeps a trie of what was said.")
    return Told(words, spec, files, notes)


def llamacpp(given: Handover, places: Places) -> Told:
    words = ["llama-server", "-m", str(places.target), "--alias", places.name, "--port", str(places.port), "--jinja"]
    spec: dict[str, Any] = {}
    notes = [_NOT_RUN]
    if given.kind in ("model", "layerskip"):
        spec = {"model-draft": str(places.drafter), "spec-draft-n-max": given.k}
    elif given.kind == "head":
        spec = {"model-draft": str(places.drafter), "spec-type": "draft-eagle3", "spec-draft-n-max": given.k}
        notes.append(
            "The head is handed over as a folder: convert it with llama.cpp's own convert_hf_to_gguf.py "
            "(--target-model-dir: the target's Hugging Face folder), and name the result after -md."
        )
    elif given.kind in CLASSES:
        spec = {"spec-type": "ngram-mod" if given.kind == "suffix" else "ngram-simple", "spec-draft-n-max": given.k}
    if given.table:
        notes.append("llama.cpp has no table of K by batch size; the K of one sequence is used.")
    for name, value in spec.items():
        words += [f"--{name}", str(value)]
    return Told(words, spec, notes=notes)


ENGINES: dict[str, Callable[[Handover, Places], Told]] = {"vllm": vllm, "sglang": sglang, "llamacpp": llamacpp}


def engine(name: str) -> Callable[[Handover, Places], Told]:
    if name not in ENGINES:
        raise ConfigError(f"There is no engine '{name}' to export to; choose one of: {', '.join(ENGINES)}.")
    return ENGINES[name]
