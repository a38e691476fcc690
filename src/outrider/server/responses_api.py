"""OpenAI's Responses in their plain form: text and function calls, whole or as events, without stored state.

A request becomes a chat request, so that everything about prompts, tools and sampling is the same there. The answer is
a list of items: a message, then function calls. What needs state (`previous_response_id`, `background`) or another
kind of tool is refused.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ..models.tool_calls import AnswerPart, CallReader
from .errors import ApiError, bad_request
from .jobs import Delta, Job
from .messages import EngineLink
from .requests import MAX_TOOLS, ChatRequest, CommonFields, Name, StrictModel, Text
from .responses import measured
from .validation import validation_error

Json = dict[str, Any]
_CHAT_FIELDS = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "speculation", "timeout", "stream",
                "parallel_tool_calls", "user")  # fmt: skip  # the same there
Nothing = Annotated[list[Any], Field(max_length=0)]


class TextItem(StrictModel):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class MessageItem(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextItem], Field(max_length=1024)]
    id: str | None = None
    status: str | None = None
    phase: None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class CallItem(StrictModel):
    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: Name
    arguments: Text
    id: str | None = None
    status: str | None = None


class ResultItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: Text | Annotated[list[TextItem], Field(max_length=1024)]
    id: str | None = None
    status: str | None = None

    @property
    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedFunction(StrictModel):
    type: Literal["function"]
    name: Name


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Json | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    format: TextFormat | None = None
    verbosity: None = None


class ResponsesRequest(CommonFields):
    input: Text | Annotated[list[MessageItem | CallItem | ResultItem], Field(min_length=1, max_length=4096)]
    instructions: Text | None = Field(None, description="a system message before the input")
    max_output_tokens: int | None = Field(None, ge=1, le=10**9)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = Field(None, description="its `format` is that of response_format, without nesting")
    include: Nothing | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    reasoning: None = None

    def as_chat(self) -> ChatRequest:
        """The chat request with the same meaning."""
        if self.speculation is not None and self.speculation.trace not in (None, "off"):
            raise bad_request("A trace is sent by /v1/chat/completions only.", "speculation.trace")
        body: Json = {name: getattr(self, name) for name in _CHAT_FIELDS}
        body |= {"messages": self._messages(), "max_tokens": self.max_output_tokens}
        if self.tools:
            body["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ]
        body["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, NamedFunction):
            body["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.text is not None and self.text.format is not None:
            body["response_format"] = self._response_format(self.text.format)
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:  # what several items add up to
            raise validation_error([dict(each) | {"loc": ("body", *each["loc"])} for each in error.errors()]) from error

    def _response_format(self, form: TextFormat) -> Json:
        if form.type != "json_schema":
            return {"type": form.type}
        inner = {"name": form.name, "schema": form.schema_, "strict": form.strict}
        return {"type": "json_schema", "json_schema": {key: value for key, value in inner.items() if value is not None}}

    def _messages(self) -> list[Json]:
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, CallItem):
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
            elif isinstance(item, ResultItem):
                messages.append({"role": "tool", "content": item.text, "tool_call_id": item.call_id})
            else:
                messages.append({"role": item.role, "content": item.text})
        return messages


@dataclass
class ItemBuilder:
    """Builds the response of one request: the items so far, and the events that they give."""

    engine: EngineLink
    model: str
    job: Job
    request: ResponsesRequest
    created: int = field(default_factory=lambda: int(time.time()))
    items: list[Json] = field(default_factory=list)
    status: str = "in_progress"
    _number: int = 0  # of the next event
    _reader: CallReader | None = field(init=False)

    def __post_init__(self) -> None:
        tools = self.job.request.tools
        self._reader = None if tools is None else CallReader(tools.form)

    def whole(self, deltas: list[Delta]) -> Json:
        self._advance(deltas[0])
        return self._response()

    def begin(self) -> bytes:
        events = [self._event(f"response.{name}", response=self._response()) for name in ("created", "in_progress")]
        return b"".join(events)

    def event(self, delta: Delta) -> bytes:
        return b"".join(self._advance(delta))

    def end(self) -> bytes:
        return self._event(f"response.{self.status}", response=self._response())

    def failed(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _advance(self, delta: Delta) -> list[bytes]:
        """Add what is new to the items; returns the events of it."""
        part = AnswerPart(delta.text) if self._reader is None else self._reader.push(delta.text)
        if delta.finish and self._reader is not None:
            part.content += self._reader.finish().content
        events = self._add_text(part.content) if part.content else []
        for call in part.calls:
            events += self._open_call(call.id, call.name) if call.id else []
            events += self._add_arguments(call.arguments) if call.arguments else []
        if delta.finish:
            whole = delta.finish == "stop" and not (self._reader is not None and self._reader.unfinished)
            self.status = "completed" if whole else "incomplete"
            events += self._close(self.status)
        return events

    def _add_text(self, text: str) -> list[bytes]:
        events: list[bytes] = []
        if not self.items:
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events = self._open({"type": "message", "id": self._id("msg"), "role": "assistant", "content": []})
            events.append(self._event("response.content_part.added", content_index=0, part=part))
            self.items[-1]["content"].append(part)
        self.items[-1]["content"][0]["text"] += text
        return [*events, self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[])]

    def _open_call(self, id: str, name: str) -> list[bytes]:
        closed = self._close()
        item = {"type": "function_call", "id": self._id("fc"), "call_id": id, "name": name, "arguments": ""}
        return closed + self._open(item)

    def _add_arguments(self, text: str) -> list[bytes]:
        self.items[-1]["arguments"] += text
        return [self._event("response.function_call_arguments.delta", delta=text)]

    def _open(self, item: Json) -> list[bytes]:
        self.items.append(item | {"status": "in_progress"})
        return [self._event("response.output_item.added", item=self.items[-1])]

    def _close(self, status: str = "completed") -> list[bytes]:
        """End the last item, if it is open."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            events = [
                self._event("response.output_text.done", content_index=0, text=part["text"], logprobs=[]),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        else:
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **arguments)]
        return [*events, self._event("response.output_item.done", item=item)]

    def _event(self, kind: str, **content: Any) -> bytes:
        """One event; those of an item name it."""
        data: Json = {"type": kind, "sequence_number": self._number}
        if self.items and "response" not in content and kind != "error":
            data["output_index"] = len(self.items) - 1
            data |= {} if "item" in content else {"item_id": self.items[-1]["id"]}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data | content, separators=(',', ':'))}\n\n".encode()

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self.job.id.partition('-')[2]}{len(self.items)}"

    def _response(self) -> Json:
        request, ended = self.request, self.status != "in_progress"
        choice = request.tool_choice
        response: Json = {
            "id": self.job.id, "object": "response", "created_at": self.created, "status": self.status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "instructions": request.instructions, "max_output_tokens": request.max_output_tokens, "model": self.model,
            "output": self.items, "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None, "store": False, "metadata": request.metadata or {}, "truncation": "disabled",
            "temperature": self.job.request.params.temperature, "top_p": self.job.request.params.top_p,
            "text": {"format": self._format()}, "tools": [tool.model_dump() for tool in request.tools or ()],
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "usage": self._usage() if ended else None,
        }  # fmt: skip
        if ended:
            response |= measured(self.engine.facts, self.job.request, self.job.choices)
            response["seed"] = self.job.choices[0].seed
        return response

    def _format(self) -> Json:
        form = self.request.text.format if self.request.text is not None else None
        return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)

    def _usage(self) -> Json:
        (choice,) = self.job.choices
        read, written = len(choice.prompt), len(choice.tokens)
        return {
            "input_tokens": read, "input_tokens_details": {"cached_tokens": choice.stats.reused},
            "output_tokens": written, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + written,
        }  # fmt: skip
