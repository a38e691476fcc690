"""LangChain against `outrider serve`: it needs nothing but the base URL.

pip install langchain-openai && outrider serve &
python examples/with_langchain.py
"""

from __future__ import annotations

import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000/v1")
key = os.environ.get("OUTRIDER_API_KEY", "none")
model = os.environ.get("OUTRIDER_MODEL", "SmolLM2-135M-Instruct.Q4_1")  # GET /v1/models has the name
llm = ChatOpenAI(base_url=url, api_key=key, model=model, temperature=0, max_tokens=48)


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


class River(BaseModel):
    """A river and the country where it ends."""

    name: str
    country: str


print("text:", llm.invoke("Name three rivers.").content)
print("stream:", "".join(chunk.content for chunk in llm.stream("Name three rivers.")))

question = HumanMessage("What is 19 plus 23?")
call = llm.bind_tools([add], tool_choice="any", parallel_tool_calls=False).invoke([question])
result = add.invoke(call.tool_calls[0])
print("tool:", call.tool_calls[0]["args"], "gives", result.content)
answer = llm.invoke([question, call, ToolMessage(result.content, tool_call_id=call.tool_calls[0]["id"])])
print("answer:", answer.content)

print("object:", llm.with_structured_output(River, method="json_schema").invoke("Describe the Danube."))
