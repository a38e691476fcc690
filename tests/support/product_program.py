"""The kernels' products as a program (products.c), built for any instruction set and run, emulated if need be."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.backends.cpu import native
from outrider.backends.cpu.blocks import KINDS
from outrider.backends.cpu.quantise import Quantised

HERE = Path(__file__).parent
EMULATED = f"-march=x86-64-v3 -include {HERE / 'emulated.h'} -DEMULATE="


def build(path: Path, compiler: str, flags: str) -> Path:
    sources = ["-I", str(Path(native.__file__).parent), str(HERE / "products.c")]
    options = ["-O1", "-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    options += ["-Wno-psabi", "-Wno-unused-function", "-Wno-unknown-pragmas"]
    subprocess.run([*compiler.split(), *options, *flags.split(), *sources, "-o", str(path), "-lm"], check=True)
    return path


def block_problem(pieces: Tensor, kind: str, outputs: int, x: Tensor) -> bytes:
    """x [rows, inputs] times repacked pieces."""
    head = np.array([KINDS.index(kind), x.shape[1], outputs, x.shape[0], 0])
    return head.tobytes() + pieces.numpy().tobytes() + x.numpy().tobytes()


def int8_problem(q: Quantised, x: Tensor) -> bytes:
    head = np.array([-1, q.inputs, q.outputs, x.shape[0], q.outliers.shape[0]])
    parts = [q.weight, q.high, q.scale, q.outliers, x]
    return head.tobytes() + b"".join(part.contiguous().numpy().tobytes() for part in parts)


def run(command: list[str], problem: bytes, rows: int) -> tuple[Tensor, str]:
    """The results [rows, outputs], and the instruction set that the program was built for."""
    done = subprocess.run(command, input=problem, capture_output=True, check=True)
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(rows, -1), done.stderr.decode().strip()
