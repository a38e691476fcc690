"""LiteLLM against `outrider serve`: it needs nothing but the base URL.

pip install litellm && outrider serve &
python examples/with_litellm.py
"""

from __future__ import annotations

import json
import os

import litellm

url = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000/v1")
key = os.environ.get("OUTRIDER_API_KEY", "none")
model = os.environ.get("OUTRIDER_MODEL", "SmolLM2-135M-Instruct.Q4_1")  # GET /v1/models has the name
options = {"model": f"openai/{model}", "api_base": url, "api_key": key, "temperature": 0, "max_tokens": 48}
rivers = [{"role": "user", "content": "Name three rivers."}]
numbers = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
add = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": numbers}}

print("text:", litellm.completion(messages=rivers, **options).choices[0].message.content)
stream = litellm.completion(messages=rivers, stream=True, **options)
print("stream:", "".join(chunk.choices[0].delta.content or "" for chunk in stream))

question = [{"role": "user", "content": "What is 19 plus 23?"}]
reply = litellm.completion(messages=question, tools=[add], tool_choice="required", parallel_tool_calls=False, **options)
call = reply.choices[0].message.tool_calls[0]
values = json.loads(call.function.arguments)
print("tool:", values, "gives", values["a"] + values["b"])
