"""A trained EAGLE-3 head as other engines read it.

vLLM reads the folder that `outrider train` writes as it is. The package `speculators` reads its configuration, but
calls the first layer `layers.0` where EAGLE says `midlayer`; vLLM knows both names, so what is written here has the
former. The verifier's name becomes the exported target's, because `vllm serve FOLDER` starts that one. SGLang reads
EAGLE's own flat form, and counts the layers that are read by their outputs where the speculators format counts inputs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ..errors import ConfigError
from ..models.config import to_hf
from ..models.speculators import CARD, CONFIG, FIRST, SPECULATORS_FIRST, WEIGHTS, read_head


def write_for_vllm(folder: Path, to: Path, target: str) -> None:
    """The speculators format, whole."""
    _, tensors = read_head(folder)  # complete, or refused
    data = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    data["speculators_config"]["verifier"]["name_or_path"] = target
    _write(folder, to, data, {_as_speculators(name): tensor for name, tensor in tensors.items()})


def write_for_sglang(folder: Path, to: Path, target: str) -> None:
    """EAGLE's own form: one flat configuration, the same tensors."""
    config, tensors = read_head(folder)
    if len(config.taps) != 3:
        raise ConfigError(f"SGLang reads three layers of a target, and the head {folder} reads {len(config.taps)}.")
    data = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} | to_hf(config)
    data |= {"draft_vocab_size": config.draft_vocab_size, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    data["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(config.taps)}
    _write(folder, to, data, tensors)


def _as_speculators(name: str) -> str:
    return SPECULATORS_FIRST + name.removeprefix(FIRST) if name.startswith(FIRST) else name


def _write(folder: Path, to: Path, data: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Weights first: a folder with a configuration is complete."""
    to.mkdir(parents=True, exist_ok=True)
    save_file(tensors, to / WEIGHTS, metadata={"format": "pt"})
    (to / WEIGHTS).chmod(0o644)  # safetensors writes for the owner alone
    if (folder / CARD).is_file():
        shutil.copyfile(folder / CARD, to / CARD)
    (to / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
