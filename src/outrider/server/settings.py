"""Server configuration, fixed at start: address, access, limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """Limits per request. A request beyond one gets an error; it is never silently shortened."""

    body_bytes: int = 4 << 20
    body_seconds: float = 30.0  # time for the body to arrive
    prompt_tokens: int | None = None  # None: the model's context length
    max_tokens: int = 4096
    answers: int = 16  # prompts times n
    stops: int = 8  # stop strings, and bad words
    stop_length: int = 256  # characters
    biases: int = 1024
    queue: int = 128  # answers waiting for a batch slot
    seconds: float = 600.0  # from arrival to the last token, queueing included

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0 and name != "queue":
                raise ConfigError(f"The limit {name} is {value}, but it must be more than 0.")


@dataclass(frozen=True)
class Settings:
    """Without API keys anyone who reaches the port may use it, so it listens on loopback only unless `open`."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    open: bool = False  # allow a non-loopback host without a key
    name: str | None = None  # served model name; None: the model's own
    any_name: bool = False  # answer requests for models of other names too
    origins: tuple[str, ...] = ()  # CORS
    traces: Path | None = None  # None: nothing is recorded
    traces_bytes: int = 64 << 20
    log_text: bool = False  # log prompts and answers
    drain_seconds: float = 30.0  # time for running answers to end after SIGTERM
    drafter_seconds: float = 30.0  # a drafter call that takes longer is abandoned
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.keys and not self.open and self.host not in LOOPBACK:
            raise ConfigError(
                f"Without a key anyone who reaches {self.host}:{self.port} could use this server. Give --api-key, "
                "or --open to allow that."
            )
        if self.drafter_seconds <= 0:
            raise ConfigError(f"The drafter timeout is {self.drafter_seconds:g} s, but it must be more than 0.")
        if any(len(key) < 8 for key in self.keys):
            raise ConfigError("An API key is shorter than 8 characters and could be guessed. Use a longer one.")
        if self.traces is not None and not self.keys:
            raise ConfigError("Traces contain users' tokens, so they are served only with a key: give --api-key too.")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Accepted Host headers; empty: any. Stops DNS rebinding from a browser where there is no key."""
        return LOOPBACK if not (self.keys or self.open) else ()
