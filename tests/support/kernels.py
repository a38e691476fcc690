"""The device of triton kernels in tests: a GPU if there is one, else triton's interpreter on the CPU.

Import this before anything that imports triton. Without triton the importing tests are skipped.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.rounds import HostPace

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter cannot multiply bfloat16


def _rows_are_independent() -> bool:
    """Whether a row of a product has the same bits alone and among many: the interpreter multiplies with numpy, whose
    library promises that on some CPUs only."""
    x, w = np.random.default_rng(1).standard_normal((2, 192, 192), dtype=np.float32)
    return all(
        (x[:n] @ w == (x @ w)[:n]).all() and (w[:64] @ x.T[:, :n] == (w[:64] @ x.T)[:, :n]).all()
        for n in (1, 7, 16, 33, 64)
    )


row_invariant = pytest.mark.skipif(
    not GPU and not _rows_are_independent(), reason="numpy's products depend on the rows"
)


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply row by row, so that a row's bits do not depend on the others on any CPU."""
    if not GPU:

        def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
            rows = [row @ b.data for row in a.data.astype(d.data.dtype)]
            return interpreter.TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter add one input after the other: an element's bits depend on the order of its own sum alone,
    as on tensor cores, and neither on the tile's size nor on which factor is the left one."""
    if not GPU:

        def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
            left, right, total = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype), d.data.copy()
            for k in range(left.shape[-1]):
                total += left[..., :, k, None] * right[..., k, None, :]
            return interpreter.TensorHandle(total, d.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
if not GPU:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_and_mend(tensor: Any, scope: Any) -> None:
        """numpy 2.4 converts arrays of one element to numbers only explicitly, which the interpreter does not do."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_and_mend
    _patch_language, _patched = interpreter._patch_lang, set[int]()

    class _Permanent:
        def restore(self) -> None:
            """Everything here is interpreted: nobody needs the language as it was."""

    def _patch_once(function: Any) -> _Permanent:
        """The interpreter looks at hundreds of members again for every call of a function by a kernel, which took a
        quarter of its time."""
        if (module := id(function.__globals__)) not in _patched:
            _patched.add(module)
            _patch_language(function)
        return _Permanent()

    _types, _numpy_type = dict[int, Any](), interpreter._get_np_dtype

    def _numpy_type_once(kind: Any) -> Any:
        """The interpreter makes a dictionary of all types for every question."""
        scalar = kind.scalar
        if (known := _types.get(id(scalar))) is None or known[0] is not scalar:
            known = _types[id(scalar)] = (scalar, _numpy_type(scalar))
        return known[1]

    interpreter._patch_lang, interpreter._get_np_dtype = _patch_once, _numpy_type_once


class Unhurried(HostPace):
    """Drafts are planned however long that takes: in the interpreter the host is never in time."""

    plans = True

    def affordable(self, wanted: list[int]) -> list[int]:
        return wanted
