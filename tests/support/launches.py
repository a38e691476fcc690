"""A pytest plugin that notes which kernels tests launch in triton's interpreter, with the types of their arguments.

    OUTRIDER_LAUNCHES=launches.json pytest -p support.launches …
    python -m support.launches launches.json          # without the interpreter: are they programs for a GPU?

The interpreter runs Python: it accepts what a compiler refuses, as a name that is a pointer first and numbers later.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

TYPES = {
    torch.float32: "fp32", torch.float16: "bf16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip  # the interpreter's half is bfloat16's stand-in
seen: dict[str, dict[str, Any]] = {}


def noted(value: Any) -> Any:
    """A type, or a value that may be a constant."""
    if isinstance(value, torch.Tensor):
        return {"type": "*" + TYPES[value.dtype]}
    kind = "i1" if isinstance(value, bool) else "i32" if isinstance(value, int) else "fp32"
    return {"type": kind, "value": value}


def pytest_configure() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def recording(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        known = inspect.signature(self.fn).parameters
        given = inspect.signature(self.fn).bind(*args, **{k: v for k, v in kwargs.items() if k in known})
        launch = {"module": self.fn.__module__, "name": self.fn.__name__}
        launch["arguments"] = {name: noted(value) for name, value in given.arguments.items()}
        seen.setdefault(_key(launch, self.fn), launch)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = recording


def _key(launch: dict[str, Any], function: Any) -> str:
    """Two launches are one if their types and constants are equal."""
    constants = {name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)}
    each = {name: a if name in constants else a["type"] for name, a in launch["arguments"].items()}
    return json.dumps([launch["module"], launch["name"], each], sort_keys=True, default=str)


def pytest_sessionfinish() -> None:
    Path(os.environ["OUTRIDER_LAUNCHES"]).write_text(json.dumps(list(seen.values()), default=str), encoding="utf-8")


def compile_one(launch: dict[str, Any]) -> None:
    """Through triton's front end, where names and types are checked."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    function: Any = getattr(importlib.import_module(launch["module"]), launch["name"])
    constants = {p.name for p in function.params if p.is_constexpr}
    arguments = launch["arguments"]
    signature = {name: "constexpr" if name in constants else a["type"] for name, a in arguments.items()}
    values = {(function.arg_names.index(name),): arguments[name]["value"] for name in constants & arguments.keys()}
    source, target = ASTSource(function, signature, constexprs=values), GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options({})
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


def main() -> None:
    launches = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    failed = {}
    for launch in launches:
        try:
            compile_one(launch)
        except Exception as error:
            failed[f"{launch['module']}.{launch['name']}"] = f"{type(error).__name__}: {error}"
    print(json.dumps({"kernels": sorted({launch["name"] for launch in launches}), "failed": failed}))


if __name__ == "__main__":
    main()
