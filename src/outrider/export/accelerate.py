"""For people who have a transformers model in memory: the same `generate`, several tokens per pass.

    fast = outrider.accelerate(model, tokenizer)
    ids = fast.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=64, do_sample=True)

Names, defaults and shapes are Hugging Face's: what goes in is a tensor of ids with its mask, what comes out is a tensor
of ids with the prompt in front (with an encoder: with the decoder's first token in front), padded on the right. What
cannot be kept under speculation, or is not there, is a sentence and not a silent difference. Everything that is not
`generate` is the model's own; `llm` is the library's front door with the same weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..llm import LLM, Result
from ..types import SamplingParams

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SPECULATION = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "num_assistant_tokens")
_UNDERSTOOD = (
    *_SAMPLING, *_SPECULATION, "do_sample", "max_new_tokens", "max_length", "min_new_tokens", "num_return_sequences",
    "eos_token_id", "pad_token_id", "num_beams",
)  # fmt: skip
_WITHOUT_MEANING = ("use_cache", "tokenizer", "token_type_ids")  # nothing would come out differently
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}  # others: what is fastest
_LONGEST = 8192  # positions of an assistant
_TOKENS = 20  # new ones, where nobody says how many: Hugging Face's own default


def accelerate(model: Any, tokenizer: Any, *, backend: str = "auto", **arguments: Any) -> Accelerated:
    """A model in memory with a drafter. `backend`: auto, outrider (packed copies) or transformers (shared weights).

    `arguments` are those of `LLM`: drafter, k, draft_model, assistant_model, prompt_lookup_num_tokens, …
    """
    from ..models.checkpoint import in_memory
    from ..models.foreign import ForeignWeights

    checkpoint, said = in_memory(model, tokenizer, backend)
    given = _with_assistant(arguments, tokenizer, backend)
    shared = isinstance(checkpoint.weights, ForeignWeights)  # transformers runs it, where it is and as it is
    given.setdefault("dtype", "auto" if shared or model.dtype not in _DTYPES else _DTYPES[model.dtype])
    given.setdefault("device", str(model.device))
    llm = LLM(checkpoint, **(_early_exit(given, checkpoint.config.layers) if shared else given))
    return Accelerated(model, tokenizer, llm, backend, llm.backend or said)


class Accelerated:
    """A model as it was, but for `generate`."""

    def __init__(self, model: Any, tokenizer: Any, llm: LLM, backend: str, said: str) -> None:
        self.model, self.tokenizer, self.llm, self.said = model, tokenizer, llm, said
        self._backend = backend
        self._siblings: dict[tuple[Any, ...], LLM] = {}
        self.results: list[Result] = []  # of the last call: acceptance, seeds, texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.model(*given, **named)

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
        **given: Any,
    ) -> Tensor:
        """As the model's own `generate`; `seed` makes sampling repeatable, `speculate=False` is plain decoding."""
        ids = inputs if inputs is not None else input_ids
        if ids is None or ids.dim() != 2:
            raise ConfigError("Give input_ids as a tensor of shape [batch, length], as a tokenizer returns them.")
        asked = self._settings(generation_config, given)
        prompts = _unpadded(ids, attention_mask)
        llm = self._llm(asked)
        params = [self._params(asked, prompt, seed) for prompt in prompts]
        if streamer is not None:
            return self._streamed(llm, ids, prompts, params, streamer, speculate)
        self.results = llm.generate(prompts, params, speculate)
        many = [ids[i] for i, result in enumerate(self.results) for _ in result.outputs]
        said = [answer.token_ids for result in self.results for answer in result.outputs]
        return self._tensor(ids, many, said, asked)

    # ------------------------------------------------------------ what was asked

    def _settings(self, config: Any, given: dict[str, Any]) -> dict[str, Any]:
        """The model's own settings, those of a configuration, and this call's, the last word last."""
        said = [name for name, value in given.items() if value is not None and value is not False]
        wrong = sorted(set(said) - {*_UNDERSTOOD, *_WITHOUT_MEANING})
        if wrong:
            raise ConfigError(f"generate does not understand '{wrong[0]}' here, but {', '.join(_UNDERSTOOD)}.")
        if (given.get("num_beams") or 1) > 1:
            raise ConfigError("Beams are not searched under speculation: leave num_beams out, or call model.generate.")
        base = config or getattr(self.model, "generation_config", None)
        asked = {name: value for name in _UNDERSTOOD if (value := getattr(base, name, None)) is not None}
        if asked.pop("num_beams", 1) > 1:
            warnings.warn(
                "The model's generation_config asks for beams; one text is followed here, as with num_beams=1.",
                stacklevel=3,
            )
        return asked | {name: value for name, value in given.items() if value is not None}

    def _params(self, asked: dict[str, Any], prompt: list[int], seed: int | None) -> SamplingParams:
        """In our words. Whoever does not sample is greedy, whatever the temperature says."""
        own = {name: asked[name] for name in _SAMPLING if name in asked}
        if not asked.get("do_sample", False):
            own = {"repetition_penalty": own.get("repetition_penalty", 1.0)}
        else:
            own = {"temperature": 1.0, "top_k": 50} | own
        start = len(self.llm.target.opening(prompt).tokens)
        most = asked.get("max_new_tokens") or (asked["max_length"] - start if "max_length" in asked else _TOKENS)
        if most < 1:
            raise ConfigError(f"The prompt has {start} tokens and max_length is {start + most}: nothing can be said.")
        ends = asked.get("eos_token_id")
        more: dict[str, Any] = {}
        if ends is not None:  # these, and no others
            more = {"stop_token_ids": tuple(ends if isinstance(ends, list) else [ends]), "ignore_eos": True}
        n = asked.get("num_return_sequences", 1)
        return SamplingParams(**own, **more, max_tokens=most, min_tokens=asked.get("min_new_tokens", 0), seed=seed, n=n)

    def _llm(self, asked: dict[str, Any]) -> LLM:
        """The drafter that this call asks for, made once."""
        wish = {name: asked[name] for name in _SPECULATION if asked.get(name) is not None}
        speculating = wish.keys() - {"num_assistant_tokens"}
        if not speculating:
            return self.llm
        key = tuple((name, id(value) if name == "assistant_model" else value) for name, value in sorted(wish.items()))
        if key not in self._siblings:
            changes = _with_assistant(wish, self.tokenizer, self._backend)
            whole = not self.llm.target.has_layers
            changes = _early_exit(changes, self.llm.target.config.layers) if whole else changes
            self._siblings[key] = self.llm.using(**changes)
        return self._siblings[key]

    # ------------------------------------------------------------ what is said

    def _streamed(
        self,
        llm: LLM,
        ids: Tensor,
        prompts: list[list[int]],
        params: list[SamplingParams],
        streamer: Any,
        speculate: bool,
    ) -> Tensor:
        """Tokens reach the streamer as they are emitted, the prompt first, as Hugging Face does it."""
        if len(prompts) != 1 or params[0].n != 1:
            raise ConfigError("A streamer hears one text at a time: give one prompt, and num_return_sequences=1.")
        streamer.put(ids.cpu() if not self._two_sided else torch.tensor([llm.target.opening(prompts[0]).tokens]))
        said: list[int] = []
        for piece in llm.stream(prompts[0], params[0], speculate):
            said += piece.token_ids
            for token in piece.token_ids:
                streamer.put(torch.tensor([token]))
        streamer.end()
        return self._tensor(ids, [ids[0]], [said], {})

    @property
    def _two_sided(self) -> bool:
        return self.llm.target.encoder

    def _tensor(self, ids: Tensor, prompts: list[Tensor], said: list[list[int]], asked: dict[str, Any]) -> Tensor:
        """[sequences, length]: each prompt as it was given, its answer, and padding."""
        pad = asked.get("pad_token_id")
        pad = self._padding() if pad is None else pad
        longest = max(map(len, said))
        rows = [torch.tensor(answer + [pad] * (longest - len(answer)), dtype=ids.dtype) for answer in said]
        answers = torch.stack(rows).to(ids.device)  # [sequences, new]
        if self._two_sided:
            start = torch.tensor(self.llm.target.starts, dtype=ids.dtype, device=ids.device)
            return torch.cat([start.expand(len(rows), -1), answers], dim=1)
        return torch.cat([torch.stack(prompts), answers], dim=1)

    def _padding(self) -> int:
        places = (self.tokenizer, getattr(self.model, "generation_config", None), self.model.config)
        found = [getattr(place, "pad_token_id", None) for place in places]
        ends = [getattr(place, "eos_token_id", None) for place in places]
        return next((int(i) for i in (*found, *_flat(ends)) if isinstance(i, int)), 0)


def _with_assistant(given: dict[str, Any], tokenizer: Any, backend: str) -> dict[str, Any]:
    """An assistant that is a module becomes a draft model of ours: a path or a name stays what it is."""
    asked = dict(given)
    for name in ("assistant_model", "draft_model"):
        module: Any = asked.get(name)
        if isinstance(asked.get(name), torch.nn.Module):
            from ..backends.load import load_model
            from ..models.checkpoint import in_memory

            checkpoint, _ = in_memory(module, tokenizer, backend)
            dtype, length = _DTYPES.get(module.dtype, "auto"), min(checkpoint.config.context_length, _LONGEST)
            loaded: Any = load_model(checkpoint, dtype, length, device=module.device)
            asked[name] = loaded.as_drafter()
    return asked


def _early_exit(asked: dict[str, Any], layers: int) -> dict[str, Any]:
    """An early exit of a model that transformers runs is a draft without the layers after it."""
    exit_layer = asked.get("assistant_early_exit")
    if exit_layer is None:
        return asked
    rest = {name: value for name, value in asked.items() if name != "assistant_early_exit"}
    return rest | {"drafter": "layerskip", "skip_layers": list(range(int(exit_layer), layers))}


def _unpadded(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The prompts without their padding, on whichever side it was."""
    if mask is None:
        return [list(map(int, row)) for row in ids.tolist()]
    pairs = zip(ids.tolist(), mask.tolist(), strict=True)
    return [[int(token) for token, real in zip(row, kept, strict=True) if real] for row, kept in pairs]


def _flat(values: Iterable[Any]) -> list[Any]:
    return [v for value in values for v in (value if isinstance(value, list | tuple) else [value])]
