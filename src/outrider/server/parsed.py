"""A request in the library's words: prompts, sampling parameters, and how far it may be sped up.

Whatever the library refuses becomes a problem with its sentence. No path, template or model of a request is ever
opened: its model is compared with the one name that is served, its messages are data for the model's own template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import OutriderError
from ..llm import LLM, Messages
from ..types import SamplingParams, Sequence
from .problems import Problem, refused
from .protocol import ChatRequest, CompletionRequest, Sampling, Speculation
from .settings import Limits

SAME = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "seed",
    "min_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "learn",
)  # fmt: skip  # fields that have the same name and meaning in the library
SHORT = 16  # tokens of a plain completion for which nobody said a number, as at OpenAI


@dataclass(frozen=True)
class Asked:
    """What a request comes down to. `plain` says why it is decoded without drafts; empty where it is not."""

    prompts: list[Any]  # each a text, its ids or messages
    params: SamplingParams
    only: str = ""  # who drafts for it, where it is one of several that work together here
    plain: str = ""
    most_drafted: int | None = None
    trace: str = "off"  # what is told of its steps

    def sequences(self, llm: LLM) -> list[Sequence]:
        """All answers, those to one prompt together."""
        try:
            every = [llm.prepare(p, self.params, not self.plain, self.most_drafted, self.only) for p in self.prompts]
        except OutriderError as error:
            raise refused(str(error)) from error
        return [seq for seqs in every for seq in seqs]


class Reading:
    """How requests are read for one model under one set of limits."""

    def __init__(self, llm: LLM, name: str, limits: Limits) -> None:
        self.llm, self.name, self.limits = llm, name, limits

    def __call__(self, request: ChatRequest | CompletionRequest) -> Asked:
        if request.model not in (None, self.name):
            words = f"There is no model of that name here; this server has '{self.name}'."
            raise Problem(404, words, "model_not_found", "model")
        prompts = _prompts(request)
        self._within(request, len(prompts) * (request.n or 1))
        wish = request.speculation or Speculation()
        if wish.trace not in (None, "off") and not request.stream:
            raise refused("The trace is told while it happens: it needs stream to be true.", "speculation.trace")
        given = {name: value for name in SAME if (value := getattr(request, name)) is not None}
        given["temperature"] = 1.0 if request.temperature is None else request.temperature
        given |= self._length(request) | _logprobs(request) | self._bias(request) | self._guided(request)
        try:
            params = SamplingParams(**given)
        except OutriderError as error:
            raise refused(str(error)) from error
        only, plain = self._drafting(wish)
        return Asked(prompts, params, only, plain, wish.k, wish.trace or "off")

    def _within(self, request: Sampling, answers: int) -> None:
        limits = self.limits
        if answers > limits.answers:
            raise refused(f"{answers} answers are asked for, but {limits.answers} is the most here.", "n")
        for name in ("stop", "bad_words"):
            value = getattr(request, name)
            words = [value] if isinstance(value, str) else value or []
            if len(words) > limits.stops or any(len(word) > limits.stop_length for word in words):
                most = f"{limits.stops} strings of {limits.stop_length} characters"
                raise refused(f"{name} holds more than this server takes: at most {most}.", name)

    def _length(self, request: ChatRequest | CompletionRequest) -> dict[str, Any]:
        chat = isinstance(request, ChatRequest)
        said = (request.max_completion_tokens if isinstance(request, ChatRequest) else None) or request.max_tokens
        most = self.limits.max_tokens
        if (said or 0) > most:
            raise refused(f"max_tokens is {said}, but this server gives at most {most}.", "max_tokens")
        length = said or (most if chat else max(min(SHORT, most), request.min_tokens or 0))
        if (request.min_tokens or 0) > length:
            raise refused(f"min_tokens is more than the {length} tokens that there may be.", "min_tokens")
        return {"max_tokens": length}

    def _bias(self, request: Sampling) -> dict[str, Any]:
        if not request.logit_bias:
            return {}
        if len(request.logit_bias) > self.limits.biases:
            raise refused(f"logit_bias has more than {self.limits.biases} entries.", "logit_bias")
        vocabulary = self.llm.target.config.vocab_size
        if not all(key.isascii() and key.isdigit() and int(key[:12]) < vocabulary for key in request.logit_bias):
            raise refused(f"A key of logit_bias is not a token id from 0 to {vocabulary - 1}.", "logit_bias")
        return {"logit_bias": {int(key): value for key, value in request.logit_bias.items()}}

    def _drafting(self, wish: Speculation) -> tuple[str, str]:
        """The one drafter that is asked for, where it is one of several; why nobody drafts, where nobody does."""
        own, known = self.llm.config.drafter_name, self.llm.drafters
        if wish.drafter is not None and wish.drafter not in known:
            words = f"A request to this server may name one of these drafters, and no other: {', '.join(known)}."
            raise refused(words, "speculation.drafter")
        if own == "off":
            return "", "the server runs without a drafter"
        if wish.enabled is False or wish.drafter == "off" or wish.k == 0:
            return "", "the request switched speculation off"
        return wish.drafter if wish.drafter not in (None, own) else "", ""

    def _guided(self, request: Sampling) -> dict[str, Any]:
        """The one place where `response_format` and `prediction` become sampling parameters."""
        found: dict[str, Any] = {}
        wishes = {"regex": request.guided_regex, "grammar": request.guided_grammar}
        forms = [{name: value} for name, value in wishes.items() if value is not None]
        if request.response_format is not None:
            forms.append(request.response_format)
        if len(forms) > 1:
            raise refused("Only one of response_format, guided_regex and guided_grammar can be followed at a time.")
        if forms:
            try:  # compiled here, so that a form that cannot be followed is refused before anything runs
                found["guide"] = forms[0] if self.llm.guide_for(forms[0]) is not None else None
            except OutriderError as error:
                raise refused(str(error), "response_format" if request.response_format else None) from error
        if request.prediction is not None:
            found["prediction"] = request.prediction.text
        return found


def _prompts(request: ChatRequest | CompletionRequest) -> list[Any]:
    if isinstance(request, ChatRequest):
        return [_messages(request)]
    prompt: Any = request.prompt
    one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    return [prompt] if one else list(prompt)


def _messages(request: ChatRequest) -> Messages:
    """As templates know them: OpenAI's 'developer' is what they call 'system'."""
    return [
        {"role": "system" if m.role == "developer" else m.role, "content": m.text}
        | ({"name": m.name} if m.name else {})
        for m in request.messages
    ]


def _logprobs(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    if isinstance(request, CompletionRequest):
        return {} if request.logprobs is None else {"logprobs": request.logprobs}
    if request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs needs logprobs to be true.", "top_logprobs")
    return {"logprobs": request.top_logprobs or 0} if request.logprobs else {}
