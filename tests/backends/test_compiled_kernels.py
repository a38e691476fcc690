"""Kernels that tests run in triton's interpreter are programs for a GPU, too.

Those of `fused` and `wide` are not here: the interpreter runs stand-ins for inline assembly and descriptors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROUNDS = ["every_source", "plain_rounds", "along_the_paths_of_trees", "penalties_bias", "lookups"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "wanted", "kernels"),
    [
        ("test_rounds.py", ROUNDS, {"_lay_out", "_attend", "_product", "_add_norm", "_rope_store"}),
        ("test_packed.py", ["exact"], {"_packed"}),
        ("test_gpu_encoder_decoders.py", ["rounds_say"], {"_attend", "_add_norm"}),
    ],
)
def test_the_compiler_accepts_what_the_interpreter_runs(
    file: str, wanted: list[str], kernels: set[str], tmp_path: Path
) -> None:
    """Trees in rounds ran in the interpreter and did not compile: a local name was also that of an argument."""
    launches = tmp_path / "launches.json"
    paths = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
    environment = os.environ | {"OUTRIDER_LAUNCHES": str(launches), "PYTHONPATH": paths}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "support.launches",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
    ]
    subprocess.run(
        [*command, *(["-k", " or ".join(wanted)] if wanted else []), str(HERE / file)],
        env=environment, cwd=HERE.parents[1], check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    made = subprocess.run(
        [sys.executable, "-m", "support.launches", str(launches)],
        env=environment, cwd=HERE.parents[1], check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(made.stdout.splitlines()[-1])
    assert found["failed"] == {}
    assert kernels <= set(found["kernels"])
