"""One thread per test process (several run at once, and idle OpenMP threads spin), and a registry that stays clean.

On a machine with a GPU the same tests run there; on one without, its kernels run in triton's interpreter.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton; see kernels.py

from outrider import drafters

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Drafters that a test registers are forgotten after it: others ask for every registered one."""
    known = set(drafters.names())
    yield
    for name in set(drafters._REGISTRY) - known:
        del drafters._REGISTRY[name]
