"""Who asks the target: one process, or several on the same device.

Promise: the same answers either way. It knows the engine's sizes and the shares of a crowd; what is asked is the
order's business, how it is kept the store's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.machine import prepare
from ..models.checkpoint import open_checkpoint
from .answers import Asked, Counted, Order, Store, generate
from .pool import together

_MOST_SLOTS = 3_000_000  # K/V places while answers are generated


@dataclass(frozen=True)
class Answering:
    """Lets the target answer with Outrider's own batched engine, here or in another process."""

    target: str | None
    dtype: str
    device: str
    order: Order
    share: int  # processes that use the device at the same time

    def __call__(
        self, wanted: list[Asked], queue: Iterable[Asked], store: Store, counted: Counted, stop: Callable[[], bool]
    ) -> None:
        from ..llm import LLM

        prepare()
        checkpoint, batch = open_checkpoint(self.target), self.order.batch
        longest = max(len(self.order.prompt(checkpoint.tokenizer, q)) for _, q, _ in wanted)
        length = min(checkpoint.config.context_length, longest + self.order.max_tokens)
        sizes: dict[str, Any] = {"max_length": length, "max_batch": batch}
        sizes["cache_tokens"] = min(batch * length, _MOST_SLOTS // self.share)
        sizes["max_rows"] = max(512, 2 * batch)  # a pass has room for every answer, and for new prompts
        llm = LLM(checkpoint, drafter="off", dtype=self.dtype, device=self.device, **sizes)
        generate(llm, queue, self.order, store, counted, stop)
        del llm  # its caches are most of the memory, and it knows itself: only the collector frees them
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()


def ask(job: Answering, wanted: list[Asked], store: Store, counted: Counted, stop: Callable[[], bool]) -> None:
    """Add these answers to the store. `stop` ends it between two steps; nothing is lost."""
    if not wanted:
        return
    if job.share > 1:
        together(job, wanted, store, job.share, counted, stop)
    else:
        job(wanted, wanted, store, counted, stop)
