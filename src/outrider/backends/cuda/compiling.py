"""Kernels are compiled side by side, before the work that launches them runs.

Triton compiles a kernel where it is first launched: one after the other, on one core. A rehearsal goes through work
without running it. A launch only hands its kernel to a pool of threads (triton's passes, ptxas and NVRTC leave Python's
lock to others); an operation of torch only tells the shape of its result. So work must not depend on what a tensor
holds; checks that do, and run once, are `live`.

Promise: a rehearsal changes no result and never fails. What it has not compiled is compiled at its first launch, as
without it. OUTRIDER_COMPILE_THREADS is the number of threads; 1 switches rehearsals off. It knows kernels and threads,
neither models nor recordings.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ...models.stages import stage

log = logging.getLogger("outrider.cuda")
MOST_THREADS = 16
KNOWN = 0.05  # seconds; a kernel that is ready sooner was on disk
IDLE = 0.3  # seconds without a kernel to compile, after which all of them are taken to be on disk
_ONE = Lock()  # one rehearsal at a time in the process: another engine compiles at its first launches
_current: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


def threads() -> int:
    """How many kernels are compiled at a time."""
    given = os.environ.get("OUTRIDER_COMPILE_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(given) if given.isdecimal() else min(cores, MOST_THREADS)


def rehearses() -> bool:
    """Whether this thread is in a rehearsal: nothing may be launched."""
    return _current.get() is not None


@contextmanager
def live() -> Iterator[None]:
    """What is inside runs, in a rehearsal too."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def ahead(key: Any, build: Callable[[], Any]) -> bool:
    """In a rehearsal: let the pool build this, once for each key. False elsewhere."""
    rehearsal = _current.get()
    if rehearsal is not None:
        rehearsal.build(key, build)
    return rehearsal is not None


@contextmanager
def rehearsal(device: torch.device) -> Iterator[Rehearsal | None]:
    """Yields what rehearses work for this device; at the end its kernels are compiled. None where that is impossible
    or switched off."""
    count = threads()
    if count < 2 or not _ONE.acquire(blocking=False):
        yield None
        return
    try:
        made = _made(device, count)
        if made is None:
            yield None
            return
        with made:
            yield made
    finally:
        _ONE.release()


def _made(device: torch.device, count: int) -> Rehearsal | None:
    try:
        return Rehearsal(device, count)
    except Exception as error:  # another triton: its way to compile in threads is no stable interface
        log.info("kernels are compiled one after the other: %s", error)
        return None


class Rehearsal:
    """Goes through work and compiles its kernels in threads."""

    def __init__(self, device: torch.device, count: int) -> None:
        from triton import AsyncCompileMode
        from triton.runtime._async_compile import active_mode
        from triton.runtime.jit import JITFunction

        self.device, self._mode, self._function = device, active_mode, JITFunction
        use = None
        if device.type == "cuda":  # of a pool's thread it is the first card
            use = partial(torch.cuda.set_device, torch.cuda.current_device() if device.index is None else device)
        self.pool = ThreadPoolExecutor(count, "compile", use)
        self._kernels = _kernels_of(AsyncCompileMode)(self)
        self._builds: dict[Any, Future[Any]] = {}
        self._functions: set[Any] = set()  # that have been launched
        self._over = False
        self._latest = time.perf_counter()  # when something was last being compiled

    def __enter__(self) -> Rehearsal:
        self._run, run, current = self._function.run, self._function.run, self

        def only_compiled(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if _current.get() is not current:
                return run(function, *args, grid=grid, warmup=warmup, **kwargs)
            return current._compile(function, partial(run, function, *args, grid=grid, warmup=True, **kwargs))

        self._function.run = only_compiled
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._function.run = self._run
        try:
            if kind is None:
                self._wait()
        finally:
            self.pool.shutdown(cancel_futures=True)
            self._settle(quiet=kind is not None)

    def __call__(self, work: Callable[[], Any]) -> None:
        """Go through this work, unless the kernels of the works before it were all on disk."""
        if self._over:
            return
        try:
            with self._watched():
                work()
        except Exception as error:  # work itself shows the error, if it is one, when it runs
            log.info("the remaining kernels are compiled one after the other: %s: %s", type(error).__name__, error)
            self._over = True
        now = time.perf_counter()
        self._latest = now if any(not future.done() for future in self._futures()) else self._latest
        self._over = self._over or now - self._latest > IDLE

    @contextmanager
    def _watched(self) -> Iterator[None]:
        token = _current.set(self)
        try:
            with ExitStack() as stack:
                stack.enter_context(_Shapes())  # type: ignore[no-untyped-call]
                if self.device.type == "cuda":
                    stack.enter_context(torch.cuda.device(self.device))
                yield
        finally:
            _current.reset(token)

    def build(self, key: Any, build: Callable[[], Any]) -> None:
        if key not in self._builds:
            self._builds[key] = self.pool.submit(self.timed, build)

    def timed(self, build: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        made = build()
        end = time.perf_counter()
        self._latest = end if end - start > KNOWN else self._latest
        return made

    def _compile(self, function: Any, compile_only: Callable[[], Any]) -> Any:
        self._functions.add(function)
        token = self._mode.set(self._kernels)
        try:
            return compile_only()
        finally:
            self._mode.reset(token)

    def _futures(self) -> list[Future[Any]]:
        return [*self._builds.values(), *self._kernels.raw_futures]

    def _wait(self) -> None:
        """Until everything is compiled."""
        futures = self._futures()
        if all(future.done() for future in futures):
            return
        with stage("Compiling kernels") as done:
            for count, _ in enumerate(as_completed(futures), 1):
                done(count / len(futures))

    def _settle(self, quiet: bool) -> None:
        """Triton finds the kernels that were compiled, and compiles the others when they are launched."""
        failed: list[BaseException] = [error for error in map(_settled, self._kernels.results) if error is not None]
        built = [future for future in self._builds.values() if future.done() and not future.cancelled()]
        failed += [error for future in built if (error := future.exception()) is not None]
        for function in self._functions:
            for cache, *_ in function.device_caches.values():
                for key in [key for key, kernel in cache.items() if isinstance(kernel, self._kernels.pending)]:
                    del cache[key]
        if failed and not quiet:
            log.warning("%d kernels are compiled again, one after the other: %s", len(failed), failed[0])


def _settled(result: tuple[Any, Callable[[Any], None]]) -> Exception | None:
    """Put a compiled kernel where triton looks for it; or the error."""
    pending, put = result
    try:
        put(pending.result())
    except Exception as error:
        return error
    return None


def _kernels_of(base: Any) -> Any:
    """Triton's class for compiling in threads, with what it lacks."""
    from triton.runtime._async_compile import FutureKernel

    class Kernels(base):  # type: ignore[misc]
        pending = FutureKernel

        def __init__(self, rehearsal: Rehearsal) -> None:
            super().__init__(rehearsal.pool, ignore_errors=True)
            self.rehearsal = rehearsal
            self.results: list[tuple[Any, Callable[[Any], None]]] = []  # with what puts each where triton looks for it

        def submit(self, key: Any, compile_fn: Any, finalize_fn: Any, *more: Any) -> Any:
            kernel = super().submit(
                key, partial(_loaded, partial(self.rehearsal.timed, compile_fn)), finalize_fn, *more
            )
            finalize_fn(kernel)  # the next launch finds it there: it is not looked up again
            self.results.append((kernel, finalize_fn))
            return kernel

    return Kernels


def _loaded(compile_kernel: Callable[[], Any]) -> Any:
    """The kernel, on the card: some versions of triton build its launcher for that with a C compiler."""
    kernel = compile_kernel()
    with suppress(Exception):  # what is wrong with it is said where it is launched
        _ = kernel.run
    return kernel


class _Shapes(TorchDispatchMode):
    """Torch's operations have results of the right shape and with any contents."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        device = next((each.device for each in tensors if each.device.type != "cpu"), None)
        if _current.get() is None or device is None or func.is_view:  # what makes tensors runs, too
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return _written(func, args, kwargs)
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else device
        if target.type == "cpu":
            raise NotImplementedError(f"{func} copies to the host, which is not rehearsed")
        result = func(*tree_map(_as_shape, args), **tree_map(_as_shape, kwargs))
        return tree_map(partial(_as_tensor, target), result)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns that writes to its arguments."""
    written = args[0] if args and isinstance(args[0], Tensor) else None
    if not func._schema.name.endswith("_") or written is None or written.device.type == "cpu":
        raise NotImplementedError(f"{func} is not rehearsed")
    return written


def _as_shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _as_tensor(device: torch.device, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
