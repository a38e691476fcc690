"""`outrider chat`: a conversation in the terminal, with a model in this process or with an OpenAI-compatible server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from rich.console import Console
from typer import Option

from ..errors import OutriderError
from .common import load_model, note
from .generate import Look, Plain, Seed, ShowRejected, StreamedAnswer
from .options import ApiKey, EngineOptions, MaxTokens, Temperature, arguments, sampling_params

if TYPE_CHECKING:
    from ..llm import LLM
    from ..types import SamplingParams

Messages = list[dict[str, Any]]
HELP = """\
/reset      forget the conversation so far
/stats      tokens, passes and speed of the conversation
/save FILE  write the conversation as JSON
/help       this list
/exit       leave; Ctrl-D does too. Ctrl-C ends an answer that is being written."""


def chat(
    options: EngineOptions,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 512,
    system: Annotated[str | None, Option(help="The system message at the start of the conversation.")] = None,
    server: Annotated[str | None, Option(help="Chat with the model of an OpenAI-compatible server.")] = None,
    api_key: ApiKey = None,
    show_rejected: ShowRejected = False,
    plain: Plain = False,
) -> None:
    """Chat with the model. /help lists what can be typed besides messages; Ctrl-D leaves."""
    given = options.arguments()
    partner: Partner
    if server is not None:
        partner = ServerPartner(server, api_key, arguments(temperature=temperature, max_tokens=max_tokens, seed=seed))
    else:
        params = sampling_params(given, temperature=temperature, seed=seed, max_tokens=max_tokens)
        llm = load_model(options.model, options.with_learning(given))
        partner = LocalPartner(llm, params, Look(plain, show_rejected), options)
    Conversation(partner, system).run()


class Partner(Protocol):
    """The model that answers."""

    name: str

    def answer(self, messages: Messages) -> str:
        """Print the answer as it arrives; return it."""
        ...

    def stats(self) -> str: ...


class Conversation:
    """Reads messages and commands, and keeps the conversation."""

    def __init__(self, partner: Partner, system: str | None) -> None:
        self.partner, self.opening = partner, [{"role": "system", "content": system}] if system else []
        self.messages: Messages = list(self.opening)

    def run(self) -> None:
        note(f"{self.partner.name}. /help lists commands, Ctrl-D leaves.", style="dim")
        for line in typed_lines():
            if line.startswith("/"):
                if not self.command(*line[1:].split(maxsplit=1)):
                    return
            elif line:
                self.say(line)

    def say(self, line: str) -> None:
        messages = [*self.messages, {"role": "user", "content": line}]
        if reply := self.partner.answer(messages):
            self.messages = [*messages, {"role": "assistant", "content": reply}]

    def command(self, name: str = "", argument: str = "") -> bool:
        """Run a command. False: leave."""
        if name in ("exit", "quit", "bye"):
            return False
        if name == "reset":
            self.messages = list(self.opening)
            note("The conversation starts anew.")
        elif name == "stats":
            note(self.partner.stats())
        elif name == "save":
            self.save(argument)
        else:
            note(HELP if name == "help" else f"There is no command /{name}.\n{HELP}")
        return True

    def save(self, argument: str) -> None:
        path = Path(argument or "chat.json").expanduser()
        try:
            path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            note(f"Wrote {len(self.messages)} messages to {path}.")
        except OSError as error:
            note(f"{path} cannot be written: {error.strerror or error}.", style="red")


def typed_lines() -> Iterator[str]:
    """What the user types, with editing and history where the terminal has them."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it from now on
    while True:
        try:
            yield input("\nyou: ").strip()
        except (EOFError, KeyboardInterrupt):
            print()  # the shell's prompt belongs on a line of its own
            return
        except UnicodeDecodeError:
            note("That was no UTF-8 text.", style="red")


class LocalPartner:
    """A model in this process."""

    def __init__(self, llm: LLM, params: SamplingParams, look: Look, options: EngineOptions) -> None:
        self.llm, self.params, self.look, self.options = llm, params, look, options
        self.name = f"{llm.name}, {llm.dtype}, drafter {llm.config.drafter_name}"
        self.tokens = self.passes = 0
        self.seconds = 0.0

    def answer(self, messages: Messages) -> str:
        try:
            answer = StreamedAnswer(self.llm, self.llm.tokenizer.encode_chat(messages), self.params, self.look)
            answer.run()
        except OutriderError as error:  # the conversation may have become too long
            note(f"{error} /reset starts anew.", style="red")
            return ""
        if not self.look.plain:
            answer.print_summary()
        stats = answer.seq.stats
        self.tokens, self.passes = self.tokens + stats.emitted, self.passes + stats.passes
        self.seconds += answer.seconds
        self.options.save_learnt(self.llm)
        return answer.text

    def stats(self) -> str:
        return _stats(self.tokens, self.seconds, f" with {self.passes} passes of the target")


class ServerPartner:
    """The first model of a server."""

    def __init__(self, url: str, key: str | None, params: dict[str, Any]) -> None:
        from ..measure.client import Server

        self.server, self.params = Server(url, key), params
        self.model = next(iter(self.server.models()), None)
        self.name = f"{self.model} at {url}"
        self.tokens, self.seconds = 0, 0.0

    def answer(self, messages: Messages) -> str:
        from ..measure.client import text_of

        console, text, timings = Console(highlight=False), "", dict[str, Any]()
        begin = time.perf_counter()
        with suppress(KeyboardInterrupt):
            for _, chunk in self.server.chat({"model": self.model, "messages": messages, **self.params}):
                text, timings = text + text_of(chunk), chunk.get("timings") or timings
                console.print(text_of(chunk), end="", markup=False, soft_wrap=True)
        console.print()
        self.seconds += time.perf_counter() - begin
        self.tokens += timings.get("predicted_n") or 0
        if timings:
            speed = f"{timings.get('predicted_n')} tokens, {timings.get('predicted_per_second') or 0.0:.1f} tokens/s"
            accepted, drafted = timings.get("draft_n_accepted") or 0, timings.get("draft_n") or 0
            note(f"{speed}, {accepted} of {drafted} drafted tokens accepted", style="dim")
        return text

    def stats(self) -> str:
        return _stats(self.tokens, self.seconds)


def _stats(tokens: int, seconds: float, tail: str = "") -> str:
    speed = f", {tokens / seconds:.1f} tokens/s" if seconds else ""
    return f"{tokens} tokens in {seconds:.1f} s{speed}{tail}."
