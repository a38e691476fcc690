"""One thread per test process (several run at once, and idle OpenMP threads spin), and a registry that stays clean."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch

from outrider import drafters

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Drafters that a test registers are forgotten after it: others ask for every registered one."""
    known = set(drafters.names())
    yield
    for name in set(drafters._REGISTRY) - known:
        del drafters._REGISTRY[name]
