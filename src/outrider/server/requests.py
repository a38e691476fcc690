"""Requests: the schema, and its translation to prompts, sampling parameters and speculation.

The schema has OpenAI's fields, vLLM's usual extensions and `speculation`. An unknown field is an error: nothing that
could change the text is ignored. What the library refuses becomes a 400 with its message. Nothing that a request names
is opened: `model` is compared with the served name, and messages are data for the model's own chat template.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import OutriderError
from ..models.tool_calls import for_template
from ..params import SamplingParams
from .errors import ApiError, bad_request
from .messages import EngineLink, Facts
from .settings import Limits
from .tools import ToolUse, checked_messages, tool_use

SAME = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "seed",
    "min_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "learn",
)  # fmt: skip  # fields with the same name and meaning in SamplingParams
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions
Id = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=1 << 22)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]  # of a function, or a kind of text
MAX_TOOLS = 128


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Speculation(StrictModel):
    """Speculation for this request. It changes speed, never text."""

    enabled: bool | None = Field(None, description="false: plain decoding")
    drafter: str | None = Field(None, max_length=64, description="one that GET /v1/drafters lists; off: plain decoding")
    k: int | None = Field(None, ge=0, le=64, description="maximum drafted tokens per step")
    kind: Name | None = Field(None, description="the kind of text: acceptance is watched, and drafters learn, by kind")
    trace: Literal["off", "summary", "full"] | None = Field(
        None, description="adds the step's trace lines to each chunk of a stream, as `trace`"
    )


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="accepted, without effect")


class TextPart(StrictModel):
    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(max_length=1024)]


class WithContent(StrictModel):
    content: Content | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""


class Prediction(WithContent):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: Content


class IgnoredFields(StrictModel):
    """Accepted for compatibility."""

    user: str | None = Field(None, description="without effect")
    metadata: dict[str, Any] | None = Field(None, description="without effect")
    store: bool | None = Field(None, description="without effect: nothing is stored")
    service_tier: str | None = Field(None, description="without effect")
    safety_identifier: str | None = Field(None, description="without effect")
    prompt_cache_key: str | None = Field(None, description="without effect: prefixes are shared by themselves")


class CommonFields(IgnoredFields):
    """Fields of every request that is answered by text."""

    model: str | None = Field(None, max_length=256)
    temperature: float | None = Field(None, ge=0, le=100, description="default 1; 0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=10**9)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="the same seed gives the same text, whatever the load"
    )
    stop: str | list[str] | None = None
    stream: bool | None = None
    speculation: Speculation | None = None
    timeout: float | None = Field(None, gt=0, description="deadline in seconds, queueing included")


class SamplingFields(CommonFields):
    """Fields of chats and completions."""

    repetition_penalty: float | None = Field(None, ge=0.001, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    bad_words: list[str] | None = None
    max_tokens: int | None = Field(None, ge=1, le=10**9)
    min_tokens: int | None = Field(None, ge=0, le=10**9)
    stop_token_ids: list[Id] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=1024)
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="adds the token ids of prompt and answer")
    learn: bool | None = Field(None, description="false: the drafter learns nothing from this request")
    response_format: dict[str, Any] | None = Field(None, description="OpenAI's json_object or json_schema")
    guided_regex: str | None = Field(None, max_length=4096, description="a regular expression that the text must match")
    guided_grammar: str | None = Field(None, max_length=65_536, description="a grammar in Lark's notation")
    prediction: Prediction | None = Field(None, description="the expected answer; its tokens are drafted")


class Function(StrictModel):
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of type object; none: no arguments")
    strict: bool | None = Field(None, description="true: schema keywords that are not supported are an error")


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    name: Name


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(StrictModel):
    name: Name
    arguments: Text


class ToolCall(StrictModel):
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="of a streamed delta; without effect")


class Message(WithContent):
    """One message. Further fields of OpenAI's answers may be sent back if they are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatRequest(SamplingFields):
    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=10**9)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call; default true")


class CompletionRequest(SamplingFields):
    prompt: Text | list[Text] | list[Id] | list[list[Id]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class TokenizeRequest(StrictModel):
    """vLLM's fields: a prompt, or messages and the tools that the chat template lists."""

    model: str | None = Field(None, max_length=256)
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool = Field(True, description="BOS before a prompt, where the model's texts begin with it")
    add_generation_prompt: bool = Field(True, description="what precedes the assistant's answer, after messages")


class DetokenizeRequest(StrictModel):
    model: str | None = Field(None, max_length=256)
    tokens: list[Id] = Field(max_length=1 << 20)


@dataclass(frozen=True)
class Conversation:
    """For a chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    raw: bool = False  # a plain text, which is continued in mid-sentence


@dataclass(frozen=True)
class ParsedRequest:
    prompts: list[Prompt]
    params: SamplingParams
    drafter: str = ""  # one part of a composite drafter; empty: the server's own
    plain_reason: str = ""  # why it is decoded without drafts; empty: it is not
    max_draft_tokens: int | None = None  # per step
    trace_level: str = "off"  # of the trace in its stream
    tools: ToolUse | None = None  # how its answers call tools

    def drafter_name(self, facts: Facts) -> str:
        return facts.drafter_of(not self.plain_reason, self.drafter)


class RequestParser:
    """Parses requests for one model under one set of limits, and tokenises them.

    What only the engine can check (guides, whether a prompt fits) it refuses later, in the same form.
    """

    def __init__(self, engine: EngineLink, name: str, limits: Limits, any_name: bool = False) -> None:
        """`any_name`: requests for models of other names are answered too."""
        self.engine, self.name, self.limits, self.any_name = engine, name, limits, any_name

    def parse(self, request: ChatRequest | CompletionRequest) -> ParsedRequest:
        self._check_model(request.model)
        tools = self._tools(request)
        prompts = self._prompts(request, offered=tools is not None)
        self._check_limits(request, len(prompts) * (request.n or 1))
        options = request.speculation or Speculation()
        if options.trace not in (None, "off") and not request.stream:
            raise bad_request("A trace is sent with a stream's chunks: set stream to true.", "speculation.trace")
        values = {name: value for name in SAME if (value := getattr(request, name)) is not None}
        values["temperature"] = 1.0 if request.temperature is None else request.temperature
        values["max_tokens"] = self._max_tokens(request)
        values |= _logprobs(request) | self._logit_bias(request) | _guide(request, tools)
        if options.kind is not None:
            values["kind"] = options.kind
        if request.prediction is not None:
            values["prediction"] = self.engine.tokenizer.encode_answer(request.prediction.text)
        try:
            params, encoded = SamplingParams(**values), [self._encode(prompt) for prompt in prompts]
        except OutriderError as error:
            raise bad_request(str(error)) from error
        self._check_lengths(encoded)
        drafter, plain_reason = self._drafter(options)
        return ParsedRequest(encoded, params, drafter, plain_reason, options.k, options.trace or "off", tools)

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        """The token ids of a prompt or of messages, as a request with them would have."""
        self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("Give a prompt or messages, and not both.", "prompt")
        try:
            if request.messages is not None:
                conversation = Conversation([_message(each) for each in request.messages], _plain(request.tools))
                return self._encode_chat(conversation, request.add_generation_prompt)
            tokenizer = self.engine.tokenizer
            encode = tokenizer.encode_prompt if request.add_special_tokens else tokenizer.encode
            ids: list[int] = encode(request.prompt)
            return ids
        except OutriderError as error:
            raise bad_request(str(error)) from error

    def detokenize(self, request: DetokenizeRequest) -> str:
        """The text of token ids, control tokens included."""
        self._check_model(request.model)
        vocabulary = self.engine.facts.vocabulary
        if max(request.tokens, default=0) >= vocabulary:
            raise bad_request(f"A token is outside the vocabulary of {vocabulary} ids.", "tokens")
        return str(self.engine.tokenizer.decode(request.tokens, skip_special=False))

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.name) and not self.any_name:
            message = (
                f"There is no such model here: this server has '{self.name}'. With --any-model-name it answers all."
            )
            raise ApiError(404, message, "model_not_found", "model")

    def _tools(self, request: ChatRequest | CompletionRequest) -> ToolUse | None:
        if not isinstance(request, ChatRequest):
            return None
        choice = request.tool_choice
        try:
            return tool_use(
                _plain(request.tools), choice.model_dump() if isinstance(choice, NamedTool) else choice,
                request.parallel_tool_calls is not False, self.engine.tokenizer, request.response_format,
            )  # fmt: skip
        except OutriderError as error:  # the template's form is not known
            raise bad_request(str(error), "tools") from error

    def _prompts(self, request: ChatRequest | CompletionRequest, offered: bool) -> list[Any]:
        """Texts, token ids or conversations. `offered`: the chat template lists the tools."""
        if isinstance(request, ChatRequest):
            messages = [_message(message) for message in request.messages]
            return [Conversation(messages, _plain(request.tools) if offered else [])]
        prompt: Any = request.prompt
        single = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        return [prompt] if single else list(prompt)

    def _encode(self, prompt: Any) -> Prompt:
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str):
            return Prompt(tokenizer.encode_prompt(prompt), raw=True)
        if not isinstance(prompt, Conversation):
            return Prompt(list(prompt))
        return Prompt(self._encode_chat(prompt))

    def _encode_chat(self, conversation: Conversation, generation_prompt: bool = True) -> list[int]:
        messages, tools = checked_messages(conversation.messages), conversation.tools
        tokenizer = self.engine.tokenizer
        options: dict[str, Any] = {"add_generation_prompt": generation_prompt}
        if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
            messages, options["tools"] = for_template(messages, tools, tokenizer.chat_template)
        ids: list[int] = tokenizer.encode_chat(messages, **options)
        return ids

    def _check_lengths(self, prompts: list[Prompt]) -> None:
        longest, limit = max((len(prompt.ids) for prompt in prompts), default=0), self.limits.prompt_tokens
        if limit is not None and longest > limit:
            message = f"The prompt has {longest} tokens, but this server takes at most {limit}."
            raise bad_request(message, code="context_length_exceeded")

    def _check_limits(self, request: SamplingFields, answers: int) -> None:
        limits = self.limits
        if answers > limits.answers:
            raise bad_request(f"{answers} answers are requested; this server's limit is {limits.answers}.", "n")
        for name in ("stop", "bad_words"):
            value = getattr(request, name)
            strings = [value] if isinstance(value, str) else value or []
            if len(strings) > limits.stops or any(len(text) > limits.stop_length for text in strings):
                most = f"{limits.stops} strings of {limits.stop_length} characters"
                raise bad_request(f"{name} holds more than this server takes: at most {most}.", name)

    def _max_tokens(self, request: ChatRequest | CompletionRequest) -> int:
        limit, least = self.limits.max_tokens, request.min_tokens or 0
        requested, default = request.max_tokens, max(min(COMPLETION_TOKENS, limit), least)
        if isinstance(request, ChatRequest):
            requested, default = request.max_completion_tokens or requested, limit
        if (requested or 0) > limit:
            raise bad_request(f"max_tokens is {requested}; this server's limit is {limit}.", "max_tokens")
        length = requested or default
        if least > length:
            raise bad_request(f"min_tokens is more than the limit of {length} tokens.", "min_tokens")
        return length

    def _logit_bias(self, request: SamplingFields) -> dict[str, Any]:
        if not request.logit_bias:
            return {}
        if len(request.logit_bias) > self.limits.biases:
            raise bad_request(f"logit_bias has more than {self.limits.biases} entries.", "logit_bias")
        vocabulary = self.engine.facts.vocabulary
        if not all(key.isascii() and key.isdigit() and int(key[:12]) < vocabulary for key in request.logit_bias):
            raise bad_request(f"A key of logit_bias is not a token id from 0 to {vocabulary - 1}.", "logit_bias")
        return {"logit_bias": {int(key): value for key, value in request.logit_bias.items()}}

    def _drafter(self, options: Speculation) -> tuple[str, str]:
        """The part of a composite drafter that is requested, or empty; why nothing is drafted, or empty."""
        own, names = self.engine.facts.drafter, self.engine.facts.drafters
        if options.drafter is not None and options.drafter not in names:
            raise bad_request(f"This server's drafters are: {', '.join(names)}.", "speculation.drafter")
        if own == "off":
            return "", "the server runs without a drafter"
        if options.enabled is False or options.drafter == "off" or options.k == 0:
            return "", "the request switched speculation off"
        return options.drafter if options.drafter not in (None, own) else "", ""


def _guide(request: SamplingFields, tools: ToolUse | None) -> dict[str, Any]:
    """`response_format`, `guided_regex`, `guided_grammar` or tools. The engine compiles it before the answer begins."""
    guided = {"regex": request.guided_regex, "grammar": request.guided_grammar}
    forms = [{name: value} for name, value in guided.items() if value is not None]
    if tools is not None:  # its guide has the response format inside
        forms.append(tools.guide)
    elif request.response_format is not None:
        forms.append(request.response_format)
    if len(forms) > 1:
        names = "tools" if tools is not None else "response_format"
        raise bad_request(f"Only one of {names}, guided_regex and guided_grammar may be given.")
    return {"guide": forms[0]} if forms else {}


def _message(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role  # what chat templates call it
    optional = {"name": message.name, "tool_call_id": message.tool_call_id, "tool_calls": _plain(message.tool_calls)}
    return {"role": role, "content": message.text} | {name: value for name, value in optional.items() if value}


def _plain(models: Iterable[BaseModel] | None) -> list[dict[str, Any]]:
    """As JSON values, without what was not given."""
    return [model.model_dump(exclude_none=True, exclude={"index"}) for model in models or ()]


def _logprobs(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    if isinstance(request, CompletionRequest):
        return {} if request.logprobs is None else {"logprobs": request.logprobs}
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    return {"logprobs": request.top_logprobs or 0} if request.logprobs else {}
