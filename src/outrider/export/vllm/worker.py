"""Predictions on their way from vLLM's front end to the proposer, under the hash of the prompt they belong to."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import numpy as np

MOST_PENDING = 256  # predictions that wait for their request; the oldest are dropped


class WorkerExtension:
    """vLLM's `worker_extension_cls`: mixed into its worker and called through `collective_rpc`, on every node."""

    model_runner: Any

    def outrider_add_prediction(self, key: str, tokens: list[int]) -> bool:
        """Pass a prediction to this worker's proposer; False where it has none that takes predictions."""
        add = getattr(getattr(self.model_runner, "drafter", None), "add_prediction", None)
        if add is None:
            return False
        add(key, list(tokens))
        return True


class PendingPredictions:
    """Predicted tokens by the key of their prompt; each is taken once."""

    def __init__(self, most: int = MOST_PENDING) -> None:
        self._most = most
        self._by_key: OrderedDict[str, list[int]] = OrderedDict()

    def put(self, key: str, tokens: list[int]) -> None:
        self._by_key[key] = tokens
        self._by_key.move_to_end(key)
        while len(self._by_key) > self._most:
            self._by_key.popitem(last=False)

    def take(self, prompt: list[int]) -> list[int] | None:
        return self._by_key.pop(prompt_key(prompt), None) if self._by_key else None


def prompt_key(prompt: list[int]) -> str:
    """The same in every process."""
    return hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes()).hexdigest()
