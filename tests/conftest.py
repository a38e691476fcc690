"""One thread per test process: the suite runs several processes, and idle OpenMP threads spin."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
