"""Ways to an engine: in this process, on a thread, or in a process of its own behind a socket.

Both carry the same messages to and from the same host. A process shares no interpreter lock with the HTTP side: the
engine's loop never waits for text, and text never waits for a step. Either side notices at once when the other is gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import OutriderError
from ..llm import LLM
from .host import EngineHost, HostOptions, facts_of
from .messages import Command, Facts, Failed, Message, Ready, Stop

log = logging.getLogger("outrider.server")
BUFFER = 1 << 20  # bytes of a socket's buffer: the steps of seconds
_LENGTH = struct.Struct("!I")


class LocalEngine:
    """An engine on a thread of this process."""

    def __init__(self, llm: LLM, options: HostOptions | None = None) -> None:
        self.llm, self.tokenizer = llm, llm.tokenizer
        self.facts = facts_of(llm)
        self.host = EngineHost(llm, self._send, options)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def connect(self, receive: Callable[[list[Message]], None], lost: Callable[[str], None]) -> None:
        self._loop, self._receive = asyncio.get_running_loop(), receive
        self.host.start()
        threading.Thread(target=self._serve, name="commands", daemon=True).start()

    def post(self, command: Command) -> None:
        self._commands.put(command)

    def join(self, seconds: float) -> None:
        self.host.join(seconds)

    def _serve(self) -> None:
        command: Command | None = None
        while not isinstance(command, Stop):
            command = self._commands.get()
            self.host.handle(command)

    def _send(self, message: Message) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is interested
            self._loop.call_soon_threadsafe(self._receive, [message])


class EngineProcess:
    """An engine in a process of its own. Made before the HTTP side listens: it returns when the model is loaded.

    It ends after `Stop`, when this process dies, and at the end of a `with`.
    `build` makes the engine's `LLM` and `finish` is called with it at the end, both there; both are pickled.
    """

    def __init__(
        self, build: Callable[[], LLM], options: HostOptions | None = None, finish: Callable[[LLM], None] | None = None
    ) -> None:
        self._socket, engine_end = socket.socketpair()
        for end in (self._socket, engine_end):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        arguments = (engine_end, build, options, finish, log.isEnabledFor(logging.INFO) and not log.propagate)
        self.process = multiprocessing.get_context("spawn").Process(
            target=_engine_main, args=arguments, name="outrider-engine"
        )
        self._frames, self._unsent = Frames(), bytearray()
        try:
            with _ignored_signals():  # the engine inherits that: it ends when it is told to, or left alone
                self.process.start()
            engine_end.close()
            self.facts, self.tokenizer = self._wait_until_ready()
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    def _wait_until_ready(self) -> tuple[Facts, Any]:
        while data := self._socket.recv(BUFFER):
            for message in self._frames.add(data):
                if isinstance(message, Failed):
                    raise OutriderError(message.message)
                assert isinstance(message, Ready)
                return message.facts, message.tokenizer
        raise OutriderError(f"The engine's process ended while the model was loaded ({self._exit()}).")

    def connect(self, receive: Callable[[list[Message]], None], lost: Callable[[str], None]) -> None:
        self._loop, self._receive, self._lost = asyncio.get_running_loop(), receive, lost
        self._stopping = False
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._readable)

    def post(self, command: Command) -> None:
        self._stopping = self._stopping or isinstance(command, Stop)
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += frame(command)

    def join(self, seconds: float) -> None:
        self.process.join(seconds)
        self._kill()

    def _flush(self) -> None:
        """Send what the socket takes now, and the rest when it takes more."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:  # it is gone; the reader says so
            self._unsent.clear()
        self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(BUFFER)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._receive(self._frames.add(data))
            return
        self._loop.remove_reader(self._socket)
        if not self._stopping:
            self._lost(f"The engine's process ended unexpectedly ({self._exit()}): start the server again.")

    def _exit(self) -> str:
        """How the process ended, in words."""
        self.process.join(0.2)
        code = self.process.exitcode
        if code is None:
            return "it closed its connection"
        return f"exit status {code}" if code >= 0 else f"signal {-code}, {signal.Signals(-code).name}"

    def _kill(self) -> None:
        if self.process.pid is not None and self.process.exitcode is None:
            self.process.kill()
            self.process.join()


# ------------------------------------------------------------ messages over a socket


def frame(message: Command | Message) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Messages out of a stream of bytes. The other end is a process that we started, or that started us."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> list[Any]:
        """The messages that these bytes complete."""
        buffer, messages, at = self._buffer, [], 0
        buffer += data
        while len(buffer) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(buffer, at)[0]
            if len(buffer) < end:
                break
            messages.append(pickle.loads(memoryview(buffer)[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]
        return messages


class Outbox:
    """Sends from several threads, none of which ever waits: what the socket does not take at once, a thread sends."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._unsent = end, deque[bytes]()
        self._changed = threading.Condition()
        threading.Thread(target=self._flush, name="outbox", daemon=True).start()

    def send(self, message: Message) -> None:
        data = frame(message)
        with self._changed, suppress(OSError):  # the other end is gone: the reader ends this process
            if sys.platform != "win32" and not self._unsent:  # Windows cannot send without waiting: the thread does
                with suppress(BlockingIOError):
                    data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            if data:
                self._unsent.append(data)
                self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Until everything is sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unsent, seconds)

    def _flush(self) -> None:
        with suppress(OSError):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._unsent))
                    data = self._unsent[0]  # stays first, so that nobody overtakes it
                self._socket.sendall(data)
                with self._changed:
                    self._unsent.popleft()
                    self._changed.notify_all()


# ------------------------------------------------------------ the engine's process


@contextmanager
def _ignored_signals() -> Iterator[None]:
    """A terminal's SIGINT and a service's SIGTERM reach both processes; the HTTP side drains, then says stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _engine_main(
    end: socket.socket,
    build: Callable[[], LLM],
    options: HostOptions | None,
    finish: Callable[[LLM], None] | None,
    logs: bool,
) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, name="parent", daemon=True).start()
    if logs:
        from .telemetry import log_to

        log_to(sys.stderr)
    outbox = Outbox(end)
    try:
        llm = build()
    except OutriderError as error:
        outbox.send(Failed(None, 500, str(error)))
        outbox.wait(1.0)
        return
    gc.collect()
    gc.freeze()  # the model's objects stay: a full collection would stop rounds for a tenth of a second
    outbox.send(Ready(facts_of(llm), llm.tokenizer))
    host = EngineHost(llm, outbox.send, options)
    host.start()
    _serve(end, host)
    if host.join(60.0) and finish is not None:
        finish(llm)
    outbox.wait(1.0)


def _serve(end: socket.socket, host: EngineHost) -> None:
    """Hand commands to the host until `Stop`. The parent's death ends this process from another thread."""
    frames = Frames()
    while data := end.recv(BUFFER):
        for command in frames.add(data):
            host.handle(command)
            if isinstance(command, Stop):
                return
    os._exit(1)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
