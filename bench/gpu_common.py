"""Shared by the sections of `gpu.py`: the model under test, its prompts, the time left, tables.

Everything that depends on Outrider's API is in `open_llm`, `Lab.using` and `pass_costs`.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import twin
import w4
from outrider import LLM
from outrider.backends.loaded_weights import embedding_of
from outrider.backends.pass_costs import target_costs
from outrider.drafters.head.drafter import with_output_rows
from outrider.drafters.head.network import Head, HeadConfig, read_head
from outrider.measure.bench import EncodedPrompt, encode_prompts
from outrider.models.checkpoint import Checkpoint, open_checkpoint
from outrider.models.config import ModelConfig
from outrider.models.prompts import Prompt, bundled, from_file

TWINS = {
    "7b": twin.seven,
    "30b": twin.thirty,
    "11b": twin.eleven,
    "7b-w4": lambda small, **how: w4.rounded(twin.seven(small, **how)),
}
REMEMBERING = (
    "suffix",
    "auto",
)  # drafters that learn from finished requests start without that memory
FERRY = (
    "The ferry to the island leaves at nine in the morning and at four in the afternoon. The crossing takes fifty "
    "minutes, and the last boat back leaves at seven in the evening. A return ticket costs eighteen euros, and "
    "children under six travel free. Dogs are welcome on the upper deck. In winter the ferry runs only on Saturdays "
    "and Sundays, and it does not run at all when the wind is stronger than force eight."
)
LIBRARY = (
    "The library is open from ten to six on weekdays and from ten to two on Saturdays. A card costs ten euros a year, "
    "and nothing for students. Books may be kept for four weeks, films for one week. Whoever is late pays twenty cents "
    "for each day and each book. The reading room on the second floor is quiet, and telephones stay outside."
)
REPEATS = [  # answers that nearly repeat the prompt, beside the bundled categories `edit` and `summarise`
    Prompt(f"Repeat the following text word for word:\n\n{FERRY}", "extract"),
    Prompt(f"Extract every sentence of this text, unchanged:\n\n{LIBRARY}", "extract"),
    Prompt(f"Answer with quotes from the text only. When is it open, and what does it cost?\n\n{LIBRARY}", "extract"),
]


# ---------------------------------------------------------------- the model under test


def open_llm(model: Any, device: str, **arguments: Any) -> LLM:
    """Open a target; `device` is left out on a CPU."""
    return LLM(model, **arguments) if device == "cpu" else LLM(model, device=device, **arguments)


class Lab:
    """One target in memory, its draft model, the prompts, and the time left."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console, self.device = options, console, str(options.device)
        self.results: dict[str, Any] = {}  # of the sections so far
        self._until, self.ended = float("inf"), False
        small = open_checkpoint(options.small) if options.model in (*TWINS, "smollm2") else None
        self.small, self.checkpoint = small, self._target(small)
        given: Any = self.checkpoint if options.model in TWINS else str(self.checkpoint.path)
        self.draft: Any = options.draft_model or (str(small.path) if small and options.model in TWINS else None)
        self.length = min(options.length, self.checkpoint.config.context_length)
        settings = {"drafter": "off", "dtype": options.dtype, "max_batch": 1, "max_length": self.length}
        self.llm = open_llm(given, self.device, **settings)
        self.questions = self._questions()

    def _target(self, small: Checkpoint | None) -> Checkpoint:
        if small is None:
            return open_checkpoint(self.options.model)
        make = TWINS.get(self.options.model)
        return small if make is None else make(small, device=self.device, seed=self.options.seed)

    def _questions(self) -> list[EncodedPrompt]:
        """Every prompt as ids, cut so that the answer fits."""
        given = from_file(self.options.prompts) if self.options.prompts else bundled()
        prompts = given + [p for p in REPEATS if not self.options.prompts]
        room = max(8, self.length - max(self.options.tokens, self.options.hf_tokens) - 32)
        return [EncodedPrompt(q.ids[-room:], q.category) for q in encode_prompts(self.llm, prompts)]

    def use(self, options: argparse.Namespace) -> None:
        """Other options for the same model: prompts, tokens, contenders."""
        if options is not self.options:
            self.options = options
            self.questions = self._questions()

    def sample(self) -> list[EncodedPrompt]:
        """The first few prompts of each category."""
        seen: dict[str, int] = defaultdict(int)
        kept = []
        for question in self.questions:
            seen[question.category] += 1
            if seen[question.category] <= self.options.per_category:
                kept.append(question)
        return kept

    def crowd(self, n: int, of: list[EncodedPrompt] | None = None) -> list[EncodedPrompt]:
        """n different prompts; where there are too few, copies are numbered."""
        questions, found = of or self.questions, []
        for i in range(n):
            q, lap = questions[i % len(questions)], i // len(questions)
            mark = self.llm.tokenizer.encode(f"{lap}. ") if lap else []
            found.append(EncodedPrompt(q.ids[: len(q.ids) // 2] + mark + q.ids[len(q.ids) // 2 :], q.category))
        return found

    def using(self, drafter: Any, k: int | str = "auto", batch: int = 1, tokens: int = 0, **more: Any) -> LLM:
        """The same target with another drafter; `tokens` is the number of K/V slots that the batch needs."""
        more |= {"suffix_shared_tokens": 0} if drafter in REMEMBERING else {}
        if drafter == "model" or "spoil" in more:
            more["draft_model"] = self.draft
        if drafter == "head":
            more.setdefault("head", self.head)
        if tokens:
            more["cache_tokens"] = tokens
        llm = self.llm.using(drafter=drafter, k=0 if drafter == "off" else k, max_batch=batch, **more)
        loaded = getattr(llm.engine.drafter, "model", None)
        if (drafter == "model" or "spoil" in more) and hasattr(loaded, "forward"):
            self.draft = loaded  # the next engine does not read it again
        return llm

    @cached_property
    def head(self) -> Head:
        """The trained head of `--head`; for a twin it is a head of SmolLM2, narrow or widened."""
        return self.make_head(*read_head(self.options.head))

    def make_head(self, config: HeadConfig, tensors: dict[str, torch.Tensor]) -> Head:
        large = self.checkpoint.config
        if self.small is not None and config.hidden_size < large.hidden_size:
            if self.options.wide_head:
                config, tensors = twin.widen_head(
                    config, tensors, self.small.config, large, self.device, self.options.seed
                )
            else:
                table = self.small.weights.get(twin.EMBEDDING, torch.bfloat16)  # [V, H]
                config, tensors = twin.narrow_head(config, tensors, table, large, self.device, self.options.seed)
        target: Any = self.llm.target
        tensors = with_output_rows(config, tensors, target)
        return Head(config, tensors, embedding_of(target), target.compute, target.device, self.length)

    # ------------------------------------------------------------ time

    def start(self, seconds: float) -> None:
        self._until = time.perf_counter() + seconds

    def end(self) -> None:
        """No section begins any more, and the present one reports what it has."""
        self.ended = True

    @property
    def late(self) -> bool:
        return self.ended or time.perf_counter() > self._until

    # ------------------------------------------------------------ tables

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
        table = Table(*columns, box=box.SIMPLE, title=title, title_justify="left")
        for row in rows:
            table.add_row(*[cell if isinstance(cell, str) else shown(cell) for cell in row])
        self.console.print(table)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def sweep_up() -> None:
    """Free the memory of dropped engines, which are cyclic and large."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def read_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that a pass reads: all of them once, except an embedding that is not also the head."""
    looked_up = 0 if config.tied else config.vocab_size * config.hidden_size
    return (twin.parameters(config) - looked_up) * dtype.itemsize


def pass_costs(llm: LLM, sequences: tuple[int, ...] = (1,)) -> dict[tuple[int, int], float]:
    """Seconds of a target pass by (sequences, rows of all of them together)."""
    measure: Any = target_costs
    if "sequences" in inspect.signature(measure).parameters:
        found: dict[tuple[int, int], float] = measure(llm.engine.target, llm.engine.cache, sequences=sequences)
        return found
    return {(1, n): s for n, s in measure(llm.target, llm.engine.cache, llm.engine.target.plane).items()}


def folder_or_name(text: str) -> str:
    return text if text in (*TWINS, "smollm2") else str(Path(text).expanduser())
