"""Tools with OpenAI's own package against `outrider serve`: a call, its result, and the answer.

    pip install openai && outrider serve &
    python examples/tools.py

Arguments match their schema with every model; whether a call makes sense depends on the model.
"""

from __future__ import annotations

import json
import os
from datetime import date

from openai import OpenAI

url = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000/v1")
client = OpenAI(base_url=url, api_key=os.environ.get("OUTRIDER_API_KEY", "none"))
model = client.models.list().data[0].id
number = {"type": "integer", "minimum": 1, "maximum": 31}
schema = {
    "type": "object",
    "properties": {"year": {"type": "integer"}, "month": {"enum": list(range(1, 13))}, "day": number},
    "required": ["year", "month", "day"],
    "additionalProperties": False,
}
weekday = {
    "type": "function",
    "function": {"name": "weekday", "description": "The weekday of a date.", "parameters": schema},
}
messages = [{"role": "user", "content": "Which weekday was 20 July 1969?"}]

reply = client.chat.completions.create(
    model=model, messages=messages, tools=[weekday], tool_choice="required", parallel_tool_calls=False, temperature=0
)
message = reply.choices[0].message
values = json.loads(message.tool_calls[0].function.arguments)
passes = reply.metrics["speculative_decoding"]["target_passes"]
print("call:", values, f"({reply.usage.completion_tokens} tokens in {passes} passes)")
try:
    result = date(**values).strftime("%A")
except ValueError as error:  # a schema cannot know how long a month is
    result = str(error)
messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result}]
reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=48)
print("result:", result)
print("answer:", reply.choices[0].message.content)
