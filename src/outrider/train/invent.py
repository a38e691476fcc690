"""Prompts that the target invents: shown where a user begins to speak, an instructed model goes on as users do.

Promise: prompt n depends only on the target, the seed and n, so a run that was stopped goes on where it was; what did
not come to an end, and what was invented before, is left out. It knows chat templates; what becomes of the prompts
is not its business.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import OutriderError
from ..models.checkpoint import open_checkpoint
from ..models.speculators import target_hash
from ..models.tokenizer import Tokenizer
from .answers import Asked, Order, Progress, Store, spoken
from .asking import Answering, ask
from .loop import Stopped
from .pool import absorb_parts
from .questions import Question

KIND = "invented"
_LEAST = 3  # tokens of a prompt
_MARK = "outrider"  # stands for the user's words while the place where they begin is looked for


@dataclass(frozen=True)
class Opening(Order):
    """The same question every time: what would a user say?"""

    def prompt(self, tokenizer: Tokenizer, question: Question) -> list[int]:
        return opening(tokenizer)


@dataclass(frozen=True)
class Invention:
    """What is wanted, of whom, and how."""

    out: Path
    count: int
    target: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    max_tokens: int = 160
    batch: int = 8
    workers: int = 1
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 0.95


def opening(tokenizer: Tokenizer) -> list[int]:
    """The chat template up to where the user's words begin."""
    if tokenizer.chat_template is None:
        raise OutriderError("This model has no chat template, so it does not know where a user would begin to speak.")
    whole = tokenizer.encode_chat([{"role": "user", "content": _MARK}])
    begin = tokenizer.decode(whole, skip_special=False).find(_MARK)
    lengths = [len(tokenizer.decode(whole[:n], skip_special=False)) for n in range(len(whole))]
    found = whole[: max((n for n, length in enumerate(lengths) if length <= begin), default=0)]
    if not found:
        raise OutriderError("This model's chat template shows nothing before a user's words, so it cannot invent any.")
    return found


def invent(wish: Invention, progress: Progress | None = None, stop: Callable[[], bool] = lambda: False) -> int:
    """Write the prompts; returns how many there are."""
    checkpoint = open_checkpoint(wish.target)
    order = Opening(wish.count, wish.max_tokens, wish.seed, wish.batch, top_p=wish.top_p)
    opening(checkpoint.tokenizer)  # refuse early
    facts = {"target": target_hash(checkpoint.config, checkpoint.weights), "seed": wish.seed, "top_p": wish.top_p}
    store = Store(wish.out.with_name(f"{wish.out.name}.unfinished"), facts | {"temperature": wish.temperature})
    absorb_parts(store)
    known = store.numbers()
    nothing = Question("", KIND, False)
    wanted: list[Asked] = [(n, nothing, wish.temperature) for n in range(wish.count) if n not in known]
    job = Answering(wish.target, wish.dtype, wish.device, order, wish.workers)
    ask(job, wanted, store, spoken(progress, len(known), wish.count), stop)
    if stop():
        raise Stopped("Stopped while prompts were being invented.")
    ends = checkpoint.tokenizer.eos_ids | checkpoint.config.eos_ids
    said = [a.answer for a in store.read() if a.number < wish.count and a.answer and a.answer[-1] in ends]
    texts = [checkpoint.tokenizer.decode(ids[:-1]).strip() for ids in said if len(ids) > _LEAST]
    prompts = [text for text in dict.fromkeys(texts) if text]
    with open(wish.out, "w", encoding="utf-8") as file:
        for text in prompts:
            file.write(json.dumps({"category": KIND, "turns": [text]}, ensure_ascii=False) + "\n")
    store.path.unlink()
    return len(prompts)
