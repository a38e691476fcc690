"""Engines of a toy target with a head that learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.drafters.head.drafter import TrainedHead, with_output_rows
from outrider.drafters.head.learning import HeadLearning
from outrider.drafters.head.network import Head
from outrider.engine.step import Engine
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.types import SamplingParams, Sequence

CONFIG = replace(toy_config(), tied=True)
TARGET = Transformer(CONFIG, RandomWeights(CONFIG, 1), torch.float32)
EAGER = {
    "learn": True,
    "learn_correction": True,
    "learn_every": 1,
    "learn_share": 1e9,
    "learn_cap_ms": 1e6,
}  # learn as much as possible


def head(dtype: torch.dtype = torch.float32, device: Any = "cpu", size: int = 40, kind: str = "eagle3") -> Head:
    """A head with the target's output rows."""
    config, tensors = random_head(TARGET.config, kind, vocabulary=size)
    config = replace(config, own_output=False)
    del tensors["lm_head.weight"]
    tensors = with_output_rows(config, tensors, TARGET)
    return Head(config, tensors, TARGET.embedding.to(device), dtype, device, 128)


def engine_of(k: int = 3, **options: Any) -> Engine:
    return build_engine(TARGET, Config(drafter="head", k=k, options=EAGER | {"head": head()} | options))


def learning_of(engine: Engine) -> HeadLearning:
    assert isinstance(engine.drafter, TrainedHead)
    assert engine.drafter.learning is not None
    return engine.drafter.learning


def ask(engine: Engine, prompt: list[int], name: int = 0, **params: Any) -> Sequence:
    seq = Sequence(name, prompt, SamplingParams(**{"max_tokens": 40} | params), seed=name)
    engine.add(seq)
    while engine.busy:
        engine.step()
    return seq


def alpha(engine: Engine, prompts: list[list[int]], start: int = 0, **params: Any) -> float:
    seqs = [ask(engine, prompt, start + i, **params) for i, prompt in enumerate(prompts)]
    return sum(s.stats.accepted for s in seqs) / sum(s.stats.reached for s in seqs)


def stream(count: int) -> list[list[int]]:
    """Prompts of one kind: a few beginnings that come again and again."""
    return [[1 + i % 5, 7, 3 + i % 5, 9, 2] for i in range(count)]
