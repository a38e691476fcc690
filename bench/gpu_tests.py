"""The tests whose kernels run on the card that they find. What failed is known even if the run is cut off.

    python bench/gpu_tests.py [--workers 4] [TEST ...]

Without tests, those of the files that import `support.kernels`. After SIGTERM or Ctrl-C it reports what it has. The
last line is one JSON object: counts, the names of tests that failed, with their errors, and the slowest ones. The exit
status is pytest's: 0 if all ran and passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent / "tests"
IMPORT = "from support.kernels import"
SLOWEST = 10


class Results:
    """A pytest plugin that counts tests and keeps what failed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.begin = time.perf_counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failed[report.nodeid] = error(report.longrepr)
            print(f"FAILED {report.nodeid}: {self.failed[report.nodeid]}", flush=True)

    def facts(self, status: int) -> dict[str, Any]:
        slowest = {name: round(seconds, 1) for name, seconds in self.seconds.most_common(SLOWEST)}
        whole = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        return {
            "bench": "gpu-tests", "device": device(), "whole": whole, **self.counts, "failures": self.failed,
            "seconds": round(time.perf_counter() - self.begin, 1), "slowest": slowest,
        }  # fmt: skip


def error(trace: Any) -> str:
    """The first line of what was raised."""
    crash = getattr(trace, "reprcrash", None)
    return str(trace if crash is None else crash.message).strip().partition("\n")[0]


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none: kernels were interpreted"


def gpu_tests() -> list[str]:
    return [str(file) for file in sorted(TESTS.rglob("test_*.py")) if IMPORT in file.read_text()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="TEST")
    parser.add_argument("--workers", type=int, default=4, help="processes, where pytest-xdist is installed")
    options = parser.parse_args()
    results, workers = Results(), list[str]()
    if options.workers > 1 and importlib.util.find_spec("xdist") is not None:
        workers = ["-n", str(options.workers), "--dist", "loadfile"]

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    status = int(pytest.main(["--tb=short", *workers, *(options.tests or gpu_tests())], plugins=[results]))
    print(json.dumps(results.facts(status)))
    return status


if __name__ == "__main__":
    sys.exit(main())
