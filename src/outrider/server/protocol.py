"""What a request may say: OpenAI's fields, the usual ones beside them, and `speculation`.

Nothing is ignored that would change the text: a field that is not understood is an error, not a silence. Ranges that
depend on the server's limits or on the model are checked in `asked`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Id = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=1 << 22)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Speculation(Strict):
    """How this request is sped up. It changes speed, never text."""

    enabled: bool | None = Field(None, description="false: plain decoding")
    drafter: str | None = Field(
        None, max_length=64, description="one of those that GET /v1/drafters lists; off: plain decoding"
    )
    k: int | None = Field(None, ge=0, le=64, description="at most so many drafted tokens per step")
    trace: Literal["off", "summary", "full"] | None = Field(
        None, description="each chunk of a stream carries the trace's lines of its step, in `trace`"
    )


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="understood, and not done")


class Part(Strict):
    type: Literal["text"]
    text: Text


class Predicted(Strict):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: Text | Annotated[list[Part], Field(max_length=1024)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Sampling(Strict):
    """What both endpoints share."""

    model: str | None = Field(None, max_length=256)
    temperature: float | None = Field(None, ge=0, le=100, description="1 unless said; 0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=10**9)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.001, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    bad_words: list[str] | None = None
    seed: int | None = Field(None, ge=0, lt=2**62, description="the same seed gives the same text, whatever the load")
    max_tokens: int | None = Field(None, ge=1, le=10**9)
    min_tokens: int | None = Field(None, ge=0, le=10**9)
    stop: str | list[str] | None = None
    stop_token_ids: list[Id] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="the ids of prompt and answer, beside the text")
    speculation: Speculation | None = None
    learn: bool | None = Field(None, description="false: the drafter learns nothing from this request")
    timeout: float | None = Field(None, gt=0, description="seconds after which nobody needs the answer any more")
    response_format: dict[str, Any] | None = Field(None, description="json_object or json_schema, as at OpenAI")
    guided_regex: str | None = Field(None, max_length=4096, description="the text must match it")
    guided_grammar: str | None = Field(None, max_length=65_536, description="in Lark's notation")
    prediction: Predicted | None = Field(None, description="what the answer is expected to be: it is drafted")
    # Said for others' sake: they change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Message(Strict):
    """One turn of a conversation. What other servers' answers carry beside it may be sent back if it is empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[Part], Field(max_length=1024)] | None = None
    name: str | None = Field(None, max_length=256)
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=10**9)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="not understood: must be empty")
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(Sampling):
    prompt: Text | list[Text] | list[Id] | list[list[Id]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
