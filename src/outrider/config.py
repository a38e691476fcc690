"""The configuration of an engine, checked, and its translation from vLLM's and Hugging Face's argument names."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .drafters import Drafter, check_options, lookup
from .engine.judge import RULES
from .errors import ConfigError
from .models.precision import ALIASES, NAMES

KV_DTYPES = {"auto": "auto", "float16": "float16", "fp16": "float16", "float32": "float32", "fp32": "float32"}

CPU_LENGTH = 8192  # positions on a CPU, unless more are requested
GPU_PROMPT_ROWS = 2048  # products of so many rows take nearly all of a GPU's arithmetic
LEAST_LENGTH = 512  # tokens of a sequence: less memory than for that is too little to start with
DRAFT_SLOTS = 64  # of a sequence's draft


@dataclass(frozen=True)
class Config:
    """How to build an engine around a target."""

    drafter: str | type[Drafter] = "auto"  # a name from the registry, or a class
    k: int | str = "auto"  # drafted tokens per step, or "auto"
    rule: str = "match"
    dtype: str = "auto"
    kv_dtype: str = "auto"  # of K and V on a CPU: float16 beside quantised weights, else float32
    device: str = "auto"  # auto, cpu, cuda, cuda:1, …
    max_length: int | None = None  # prompt and answer together; None: the model's context, on a CPU at most 8192
    max_batch: int = 8
    max_rows: int = 512  # of one pass: longer prompts are fed in chunks of this many
    prompt_rows: int | None = None  # the same where no sequence waits for a token; None: 2048 on a GPU, else max_rows
    cache_tokens: int | None = None  # K/V slots; None: four sequences of full length, or what the GPU has room for
    options: dict[str, Any] = field(default_factory=dict)  # of the drafter

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"There is no rule '{self.rule}'. Choose one of: {', '.join(RULES)}.")
        if self.k != "auto" and not (isinstance(self.k, int) and 0 <= self.k <= 64):
            raise ConfigError(f"k is {self.k!r}, but it must be 'auto' or a number from 0 to 64.")
        if self.dtype not in ALIASES:
            raise ConfigError(f"There is no dtype '{self.dtype}'. Choose one of: {', '.join(NAMES)}.")
        object.__setattr__(self, "dtype", ALIASES[self.dtype])
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"There is no kv_dtype '{self.kv_dtype}'. Choose one of: auto, float16, float32.")
        object.__setattr__(self, "kv_dtype", KV_DTYPES[self.kv_dtype])
        for name in ("max_batch", "max_rows", "prompt_rows", "max_length", "cache_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}, but it must be a whole number of at least 1.")

    @property
    def drafter_name(self) -> str:
        return lookup(self.drafter).name

    def length_for(self, context: int, gpu: bool) -> int:
        """The maximum length of a sequence, in tokens, unless memory ends before it."""
        if self.max_length is not None and self.max_length > context:
            raise ConfigError(f"max_length is {self.max_length}, but the model's context has {context} positions.")
        return self.max_length or (context if gpu else min(context, CPU_LENGTH))

    def cache_size(self, context: int, source: int, slot_bytes: int, room: int | None) -> tuple[int, int]:
        """The maximum length of a sequence and the K/V slots: at least one such sequence with its source and draft.

        slot_bytes: K and V of one token. room: a GPU's bytes for K and V; None: a CPU's memory is not counted.
        """
        length, beside = self.length_for(context, room is not None), source + DRAFT_SLOTS
        if self.max_length is None and self.cache_tokens is not None:  # no longer than what is asked for
            length = min(length, max(self.cache_tokens - beside, CPU_LENGTH))
        slots = max(4 * (length + source) if self.cache_tokens is None else self.cache_tokens, length + beside)
        if room is None:
            return length, slots
        fits = room // slot_bytes
        if (self.cache_tokens or 0) > fits:
            raise ConfigError(_too_many("cache_tokens", slots, slot_bytes, room))
        if length + beside > fits and (self.max_length is not None or fits < LEAST_LENGTH + beside):
            raise ConfigError(_too_many("max_length", length + beside, slot_bytes, room))
        return min(length, fits - beside), min(slots, fits)

    def prompt_rows_for(self, gpu: bool) -> int:
        """Rows of a pass in which no sequence waits for a token."""
        return max(self.prompt_rows or (GPU_PROMPT_ROWS if gpu else 0), self.max_rows)


def _too_many(name: str, slots: int, slot_bytes: int, room: int) -> str:
    return (
        f"K and V of {slots:,} tokens take {slots * slot_bytes / 1e9:.1f} GB, but the GPU has {room / 1e9:.1f} GB for "
        f"them beside the weights, which is {room // slot_bytes:,} tokens; lower {name}, or free memory on the GPU."
    )


_VLLM_METHODS = {"draft_model": "model", "ngram": "ngram", "suffix": "suffix", "ngram_gpu": "ngram"}
_VLLM_METHODS |= dict.fromkeys(("eagle", "eagle3", "dflash", "dspark", "medusa", "mlp_speculator"), "head")
# A layer of the target's own checkpoint, unless `model` is a head.
_VLLM_MTP = ("mtp", "mimo_mtp", "glm4_moe_mtp", "deepseek_mtp", "qwen3_next_mtp")
_VLLM_METHODS |= dict.fromkeys(_VLLM_MTP, "head")
_VLLM_RULES = {"standard": "reject", "block": "block"}
_VLLM_IGNORED = (  # vLLM's devices, kernels and limits; here the controller and the file decide
    "draft_tensor_parallel_size", "tensor_parallel_size", "quantization", "moe_backend", "attention_backend",
    "kv_cache_dtype", "max_model_len", "code_revision", "enforce_eager", "disable_padded_drafter_batch",
    "disable_eagle_block_drop", "use_local_argmax_reduction", "use_heterogeneous_vocab", "parallel_drafting",
    "num_speculative_tokens_per_batch_size", "draft_load_config", "draft_sample_method", "disable_by_batch_size",
    "disable_logprobs", "disable_mqa_scorer", "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor", "target_model_config", "target_parallel_config", "draft_model_config",
    "draft_parallel_config",
)  # fmt: skip
_HUGGING_FACE = (
    "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "num_assistant_tokens", "device_map",
)  # fmt: skip


_RENAMED = {  # theirs: ours
    "torch_dtype": "dtype", "max_model_len": "max_length", "max_num_seqs": "max_batch", "kv_cache_dtype": "kv_dtype",
}  # fmt: skip


def from_speculative_config(text: str | dict[str, Any]) -> dict[str, Any]:
    """vLLM's `speculative_config`, as JSON or a dictionary, translated to arguments of `LLM`.

    vLLM's settings of devices, kernels and limits are ignored; a key that vLLM does not have is refused by its name.
    """
    try:
        given = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ConfigError(f"The speculative configuration is not a JSON object: {error}.") from error
    if not isinstance(given, dict):
        raise ConfigError(f"The speculative configuration is not a JSON object, but {given!r}.")
    config = dict(given)
    model, revision = config.pop("model", None), config.pop("revision", None)
    method = config.pop("method", None) or _vllm_method(model)
    if not isinstance(method, str) or method not in _VLLM_METHODS:
        raise ConfigError(f"The speculative method '{method}' is not supported; use: {', '.join(_VLLM_METHODS)}.")
    drafter = _VLLM_METHODS[method]
    arguments: dict[str, Any] = {"drafter": drafter}
    if method in _VLLM_MTP and not _is_head(model):
        arguments["head"] = "mtp"
    elif model is not None:
        name = f"{model}@{revision}" if revision and not Path(model).exists() else model
        arguments["head" if drafter == "head" else "draft_model"] = name
    if "num_speculative_tokens" in config:
        arguments["k"] = config.pop("num_speculative_tokens")
    if (rule := config.pop("rejection_sample_method", None)) is not None:
        if not isinstance(rule, str) or rule not in _VLLM_RULES:
            raise ConfigError(f"The rejection_sample_method '{rule}' of the speculative configuration is not lossless.")
        arguments["rule"] = _VLLM_RULES[rule]
    options = lookup(drafter).traits.options or ()
    for name in config:
        if name not in options and name not in _VLLM_IGNORED:
            near = difflib.get_close_matches(name, [*options, *_VLLM_IGNORED, "num_speculative_tokens", "method"], 1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"The speculative configuration has a key '{name}', which is not known.{hint}")
    return arguments | {name: value for name, value in config.items() if name in options}


def _vllm_method(model: Any) -> str:
    """As vLLM finds it: from the folder, where one is given."""
    return "ngram" if model is None else "eagle3" if _is_head(model) else "draft_model"


def _is_head(model: Any) -> bool:
    from .models.published import is_head

    return model is not None and is_head(Path(str(model)).expanduser())


def from_hugging_face(arguments: dict[str, Any]) -> dict[str, Any]:
    """Translate `assistant_model`, `prompt_lookup_num_tokens`, `torch_dtype` and so on; other arguments stay."""
    arguments = {_RENAMED.get(name, name): value for name, value in arguments.items()}
    if "dtype" in arguments:
        arguments["dtype"] = str(arguments["dtype"]).removeprefix("torch.")
    hf = {name: arguments.get(name) for name in _HUGGING_FACE}
    translated = {name: value for name, value in arguments.items() if name not in _HUGGING_FACE}
    if hf["assistant_model"] is not None:
        translated |= {"drafter": "model", "draft_model": hf["assistant_model"]}
    if hf["prompt_lookup_num_tokens"] is not None:
        translated |= {"drafter": "ngram", "k": hf["prompt_lookup_num_tokens"]}
    if hf["assistant_early_exit"] is not None:
        translated |= {"drafter": "exit", "exit_layer": hf["assistant_early_exit"]}
    if hf["num_assistant_tokens"] is not None:
        translated["k"] = hf["num_assistant_tokens"]
    devices = hf["device_map"]
    if isinstance(devices, str):
        translated["device"] = devices
    elif devices is not None:
        unknown = sorted(set(devices) - {"target", "drafter", ""})
        if unknown:
            raise ConfigError(f"device_map names '{unknown[0]}', but only 'target' and 'drafter' can be placed.")
        translated["device"] = str(devices.get("target", devices.get("", "auto")))
        if "drafter" in devices:
            translated["draft_device"] = str(devices["drafter"])
    return translated


def config_from(arguments: dict[str, Any]) -> Config:
    """A Config from keyword arguments; those it does not have are the drafter's options."""
    names = {f.name for f in fields(Config)} - {"options"}
    own = {name: value for name, value in arguments.items() if name in names}
    config = Config(**own, options={name: value for name, value in arguments.items() if name not in names})
    check_options(config.drafter, config.options)
    return config
