"""A chain in LangChain's manner, without LangChain: prompt | model | parser, over `outrider serve`.

    pip install openai && outrider serve &
    python examples/chain.py

With LangChain itself: `ChatOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", model=…)` is all there is to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openai import OpenAI


class Link:
    """Something that takes one value and gives another; `|` puts two of them in a row."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self.run = run

    def __or__(self, after: Link) -> Link:
        return Link(lambda value: after.run(self.run(value)))


client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
name = client.models.list().data[0].id


def answer(messages: list[dict[str, str]]) -> str:
    done = client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=64)
    return done.choices[0].message.content or ""


prompt = Link(lambda topic: [{"role": "user", "content": f"List three facts about {topic}, one per line."}])
model = Link(answer)
lines = Link(lambda text: [line.strip(" -*0123456789.") for line in text.splitlines() if line.strip()])

for fact in (prompt | model | lines).run("bridges"):
    print("•", fact)
