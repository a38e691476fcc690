"""LlamaIndex against `outrider serve`: it needs nothing but the base URL.

pip install llama-index-llms-openai-like && outrider serve &
python examples/with_llama_index.py
"""

from __future__ import annotations

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000/v1")
key = os.environ.get("OUTRIDER_API_KEY", "none")
model = os.environ.get("OUTRIDER_MODEL", "SmolLM2-135M-Instruct.Q4_1")  # GET /v1/models has the name
llm = OpenAILike(
    api_base=url, api_key=key, model=model, is_chat_model=True, is_function_calling_model=True, temperature=0,
    max_tokens=48,
)  # fmt: skip


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


question = ChatMessage(role="user", content="What is 19 plus 23?")
print("text:", llm.complete("Name three rivers.").text)
print("stream:", "".join(part.delta or "" for part in llm.stream_chat([question])))
response = llm.predict_and_call([FunctionTool.from_defaults(add)], "What is 19 plus 23?", tool_required=True)
print("tool:", response.sources[0].raw_input["kwargs"], "gives", response.response)
