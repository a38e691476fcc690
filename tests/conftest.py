"""One thread per test process (several run at once, and idle OpenMP threads spin), and a registry that stays clean.

A tiny model that many files use (`folder`, `llm`), and a browser (`page`, `seen`: see browser.py).

On a machine with a GPU the same tests run there; on one without, its kernels run in triton's interpreter.
"""

from __future__ import annotations

import gc
import os
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # where a test wants several, they share busy cores

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton; see kernels.py

from outrider import LLM, drafters
from outrider.backends.machine import prepare

from support import everyday, examples, tiny  # noqa: F401 - profiles exist before the command line chooses one

pytest_plugins = ("support.browser", "support.native_builds", "support.pages", "pytester")
torch.set_num_threads(1)
prepare()  # before the first product of any test, as an LLM does in a process of its own


@pytest.hookimpl(tryfirst=True)  # before the command line's -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Large matrices are thinned every day; n has no factor in common with their sides, so each value occurs."""
    seen: Counter[str] = Counter()
    for item in items:
        if everyday.is_left_out(item.nodeid):
            item.add_marker(pytest.mark.slow)
        for mark in item.iter_markers("one_in"):
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0] not in (mark.args[1:] or (0,)):
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


def pytest_collection_finish() -> None:
    """Modules stay until the end: looking through them took most of the time of those who collect garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Drafters that a test registers are forgotten after it: others ask for every registered one."""
    known = set(drafters.names())
    yield
    for name in set(drafters._REGISTRY) - known:
        del drafters._REGISTRY[name]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's files; nobody writes there."""
    return tiny.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """The tiny model with a drafter that finds something; one for each file of tests, for it remembers."""
    return LLM(folder, drafter="suffix", dtype="float32", k=4)
