"""What whoever runs the server decides once: where it listens, who may ask, and how much."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for; beyond it the answer is an error, never a smaller answer."""

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0  # a body that takes longer to arrive is not waited for
    prompt_tokens: int | None = None  # None: what fits into the context
    max_tokens: int = 4096
    answers: int = 16  # prompts times n
    stops: int = 8  # stop strings, and bad words
    stop_length: int = 256
    biases: int = 1024
    queue: int = 128  # answers that may wait for a place in the batch
    seconds: float = 600.0  # the longest a request may take, waiting included

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0 and name != "queue":
                raise ConfigError(f"The limit {name} is {value}, but it must be more than 0.")


@dataclass(frozen=True)
class Settings:
    """How a server is run. Without keys everybody who reaches the port may ask, so only this machine can."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    open: bool = False  # no key, and yet not only on this machine: it has to be said
    name: str | None = None  # what the model is called here; None: its own name
    origins: tuple[str, ...] = ()  # web pages that may ask from a browser
    traces: Path | None = None  # None: nothing is recorded
    traces_bytes: int = 64 << 20
    log_text: bool = False  # prompts and answers in the log
    drain_seconds: float = 30.0  # how long answers may go on after the signal to stop
    drafter_seconds: float = 30.0  # a drafter that does not come back from a call by then is left behind
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.keys and not self.open and self.host not in LOOPBACK:
            raise ConfigError(
                f"Without a key anybody who reaches {self.host}:{self.port} could use this server. Give --api-key, "
                "or say --open if that is what you want."
            )
        if self.drafter_seconds <= 0:
            raise ConfigError(f"A drafter cannot answer within {self.drafter_seconds:g} s: give it more than 0.")
        if any(len(key) < 8 for key in self.keys):
            raise ConfigError("An API key is shorter than 8 characters; it would be guessed. Use a longer one.")
        if self.traces is not None and not self.keys:
            raise ConfigError("Traces hold what was said, so they can be read only with a key: give --api-key too.")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names this server answers to; any where empty. A page in a browser must not reach it by renaming itself."""
        return LOOPBACK if not (self.keys or self.open) else ()
