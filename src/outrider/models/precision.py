"""The names of precisions, for CPU and GPU alike: what `--dtype` accepts, and what a checkpoint is stored in.

Promise: a precision has one name wherever it is chosen, loaded or reported. `auto` keeps what the checkpoint has:
where a device has no kernel for that, weights are dequantised, which changes no value that they stand for, and the
model's `description` says so. Only `int8` may round weights, when it is asked for by name or when `auto` on a CPU says
that it did. It knows names; it does not know how anything is stored.
"""

from __future__ import annotations

AUTO, GGUF, INT4, FP8, INT8 = "auto", "gguf", "int4", "fp8", "int8"
FLOATS = ("bfloat16", "float32", "float64")  # torch's names
OWN = (GGUF, INT4, FP8)  # only for checkpoints that are stored so
NAMES = (AUTO, *OWN, INT8, *FLOATS)
ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"} | {name: name for name in NAMES}
MEANING = "gguf, int4 or fp8 (as in the file), int8, bfloat16 or float32. Default: auto, the file's own or the fastest."


def stored_in(weights: object) -> str:
    """What a checkpoint's products are stored in: gguf, int4, fp8 or int8; empty where they are floats."""
    return str(getattr(weights, "stored_in", ""))
