"""The transformers-style `generate` for a model in memory, with several tokens per pass.

    fast = outrider.accelerate(model, tokenizer)
    ids = fast.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=64, do_sample=True)

Names, defaults and shapes are Hugging Face's. The input is a tensor of ids with its mask. The output is a tensor of ids
padded on the right, with the prompt in front (with an encoder: the decoder's first token). What speculation cannot
keep, or what is not implemented, is refused with an error. All other attributes are the model's own; `llm` is the same
model as an `outrider.LLM`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..llm import LLM, Result
from ..models.foreign import ForeignWeights
from ..types import SamplingParams

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SPECULATION = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "num_assistant_tokens")
_SUPPORTED = (
    *_SAMPLING, *_SPECULATION, "do_sample", "max_new_tokens", "max_length", "min_new_tokens", "num_return_sequences",
    "eos_token_id", "pad_token_id", "num_beams",
)  # fmt: skip
_IGNORED = ("use_cache", "tokenizer", "token_type_ids")  # they change nothing
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}  # others: auto
_ASSISTANT_LENGTH = 8192  # most positions of an assistant
_DEFAULT_NEW_TOKENS = 20  # Hugging Face's


def accelerate(model: Any, tokenizer: Any, *, backend: str = "auto", **arguments: Any) -> Accelerated:
    """A model in memory with a drafter. `backend`: auto, outrider (packed copies) or transformers (shared weights).

    `arguments` are those of `LLM`: drafter, k, draft_model, assistant_model, prompt_lookup_num_tokens, …
    """
    from ..models.checkpoint import in_memory

    checkpoint, reason = in_memory(model, tokenizer, backend)
    arguments = _load_assistant(arguments, tokenizer, backend)
    shared = isinstance(checkpoint.weights, ForeignWeights)  # transformers runs the module where it is
    arguments.setdefault("dtype", "auto" if shared else _DTYPES.get(model.dtype, "auto"))
    arguments.setdefault("device", str(model.device))
    llm = LLM(checkpoint, **(_early_exit(arguments, checkpoint.config.layers) if shared else arguments))
    return Accelerated(model, tokenizer, llm, backend, llm.backend or reason)


class Accelerated:
    """A model with another `generate`. `results` are those of the last call: acceptance, seeds, texts."""

    def __init__(self, model: Any, tokenizer: Any, llm: LLM, backend: str, backend_reason: str) -> None:
        self.model, self.tokenizer, self.llm, self.backend_reason = model, tokenizer, llm, backend_reason
        self._backend = backend
        self._llm_by_drafter: dict[tuple[Any, ...], LLM] = {}
        self.results: list[Result] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: Any = None,
        streamer: Any = None,
        seed: int | None = None,
        speculate: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """As the model's own `generate`; `seed` makes sampling repeatable, `speculate=False` is plain decoding."""
        ids = inputs if inputs is not None else input_ids
        if ids is None or ids.dim() != 2:
            raise ConfigError("Give input_ids as a tensor of shape [batch, length], as a tokenizer returns them.")
        settings = self._settings(generation_config, kwargs)
        prompts = _unpadded(ids, attention_mask)
        llm = self._llm_for(settings)
        params = [self._params(settings, prompt, seed) for prompt in prompts]
        if streamer is not None:
            if len(prompts) != 1 or params[0].n != 1:
                raise ConfigError("A streamer takes one text: give one prompt, and num_return_sequences=1.")
            return self._stream(llm, ids, prompts[0], params[0], streamer, speculate)
        self.results = llm.generate(prompts, params, speculate)
        rows = [ids[i] for i, result in enumerate(self.results) for _ in result.outputs]
        answers = [output.token_ids for result in self.results for output in result.outputs]
        return self._tensor(rows, answers, settings)

    def _settings(self, config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The generation_config, or the model's, overridden by the arguments of the call."""
        used = [name for name, value in kwargs.items() if value is not None and value is not False]
        unknown = sorted(set(used) - {*_SUPPORTED, *_IGNORED})
        if unknown:
            raise ConfigError(f"generate does not support '{unknown[0]}' here, but {', '.join(_SUPPORTED)}.")
        if (kwargs.get("num_beams") or 1) > 1:
            raise ConfigError("Beam search is not supported: leave num_beams out, or call model.generate.")
        base = config or getattr(self.model, "generation_config", None)
        settings = {name: value for name in _SUPPORTED if (value := getattr(base, name, None)) is not None}
        if settings.pop("num_beams", 1) > 1:
            warnings.warn("The generation_config asks for beams; this is ignored, as with num_beams=1.", stacklevel=3)
        return settings | {name: value for name, value in kwargs.items() if value is not None}

    def _params(self, settings: dict[str, Any], prompt: list[int], seed: int | None) -> SamplingParams:
        """Our sampling parameters. Without do_sample, generation is greedy whatever the temperature."""
        params: dict[str, Any] = {name: settings[name] for name in _SAMPLING if name in settings}
        if settings.get("do_sample", False):
            params = {"temperature": 1.0, "top_k": 50} | params
        else:
            params = {"repetition_penalty": params.get("repetition_penalty", 1.0)}
        start = len(self.llm.target.opening(prompt).tokens)
        most = settings.get("max_new_tokens") or settings.get("max_length", start + _DEFAULT_NEW_TOKENS) - start
        if most < 1:
            raise ConfigError(f"The prompt has {start} tokens and max_length is {start + most}: no room for an answer.")
        ends = settings.get("eos_token_id")
        if ends is not None:  # instead of the model's own
            params |= {"stop_token_ids": tuple(ends if isinstance(ends, list) else [ends]), "ignore_eos": True}
        params |= {"min_tokens": settings.get("min_new_tokens", 0), "n": settings.get("num_return_sequences", 1)}
        return SamplingParams(**params, max_tokens=most, seed=seed)

    def _llm_for(self, settings: dict[str, Any]) -> LLM:
        """An LLM with the drafter that this call names, made once; `llm` where it names none."""
        named = {name: settings[name] for name in _SPECULATION if settings.get(name) is not None}
        if not named.keys() - {"num_assistant_tokens"}:
            return self.llm
        key = tuple((name, id(value) if name == "assistant_model" else value) for name, value in sorted(named.items()))
        if key not in self._llm_by_drafter:
            changes = _load_assistant(named, self.tokenizer, self._backend)
            if not self.llm.target.has_layers:
                changes = _early_exit(changes, self.llm.target.config.layers)
            self._llm_by_drafter[key] = self.llm.using(**changes)
        return self._llm_by_drafter[key]

    def _stream(
        self, llm: LLM, ids: Tensor, prompt: list[int], params: SamplingParams, streamer: Any, speculate: bool
    ) -> Tensor:
        """Tokens reach the streamer as they are emitted, the prompt first, as in Hugging Face."""
        streamer.put(ids.cpu() if not self._has_encoder else torch.tensor([llm.target.opening(prompt).tokens]))
        tokens: list[int] = []
        for piece in llm.stream(prompt, params, speculate):
            tokens += piece.token_ids
            for token in piece.token_ids:
                streamer.put(torch.tensor([token]))
        streamer.end()
        return self._tensor([ids[0]], [tokens], {})

    @property
    def _has_encoder(self) -> bool:
        return self.llm.target.encoder

    def _tensor(self, prompts: list[Tensor], answers: list[list[int]], settings: dict[str, Any]) -> Tensor:
        """[sequences, length]: each prompt as it was given, its answer, and padding."""
        pad = self._pad_id(settings.get("pad_token_id"))
        longest = max(map(len, answers))
        rows = [answer + [pad] * (longest - len(answer)) for answer in answers]
        new = torch.tensor(rows, dtype=prompts[0].dtype, device=prompts[0].device)  # [sequences, new]
        if self._has_encoder:
            return torch.cat([new.new_tensor(self.llm.target.starts).expand(len(rows), -1), new], dim=1)
        return torch.cat([torch.stack(prompts), new], dim=1)

    def _pad_id(self, given: int | None) -> int:
        """As given, else the first padding id, else the first end id, of tokenizer and configurations; else 0."""
        sources = (self.tokenizer, getattr(self.model, "generation_config", None), self.model.config)
        ids = [given, *(getattr(source, n, None) for n in ("pad_token_id", "eos_token_id") for source in sources)]
        flat = [i for value in ids for i in (value if isinstance(value, list | tuple) else [value])]
        return next((int(i) for i in flat if isinstance(i, int)), 0)


def _load_assistant(arguments: dict[str, Any], tokenizer: Any, backend: str) -> dict[str, Any]:
    """The arguments with an assistant that is a torch module loaded as a draft model; names and paths stay."""
    loaded = dict(arguments)
    for name in ("assistant_model", "draft_model"):
        module: Any = arguments.get(name)
        if isinstance(arguments.get(name), torch.nn.Module):
            from ..backends.load import load_model
            from ..models.checkpoint import in_memory

            checkpoint, _ = in_memory(module, tokenizer, backend)
            length = min(checkpoint.config.context_length, _ASSISTANT_LENGTH)
            model: Any = load_model(checkpoint, _DTYPES.get(module.dtype, "auto"), length, device=module.device)
            loaded[name] = model.as_drafter()
    return loaded


def _early_exit(arguments: dict[str, Any], layers: int) -> dict[str, Any]:
    """The early exit of a model that transformers runs is a draft without the layers after it."""
    rest = dict(arguments)
    exit_layer = rest.pop("assistant_early_exit", None)
    if exit_layer is not None:
        rest |= {"drafter": "layerskip", "skip_layers": list(range(int(exit_layer), layers))}
    return rest


def _unpadded(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The prompts without their padding, on whichever side it was."""
    mask = torch.ones_like(ids) if mask is None else mask
    return [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
