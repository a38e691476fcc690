"""OpenAI's own package against `outrider serve`: streaming, logprobs, and what Outrider adds.

    pip install openai && outrider serve &
    python examples/openai_client.py

Both answers below are the same text.
"""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=os.environ.get("OUTRIDER_API_KEY", "none"))
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Name three rivers, one per line."}]

stream = client.chat.completions.create(model=model, messages=messages, seed=7, max_tokens=64, stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

plain = client.chat.completions.create(
    model=model, messages=messages, seed=7, max_tokens=64, logprobs=True, extra_body={"speculation": {"enabled": False}}
)
print(plain.choices[0].message.content)  # the same text, decoded token by token
print(plain.metrics["speculative_decoding"]["reason"])
print(min(plain.choices[0].logprobs.content, key=lambda entry: entry.logprob).token, "was the least likely token")
