"""The losslessness audit of a server that is not in this process: the same requests with and without speculation.

What is compared is what a client can see: the text, and token ids where the server tells them. Servers differ in how
speculation can be switched off. Outrider's own takes `speculation: {"enabled": false}` in a request; for others, a
second server without speculation is the reference; failing both, a server is compared with itself, which measures only
whether it says the same thing twice, and the report says so. Requests go one at a time, so that batching, which changes
the numbers of most engines, is no excuse; `concurrency` asks many at once, as users do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import OutriderError
from .client import RemoteError, Server, text_of

Progress = Callable[[str, float], None]
OFF = {"speculation": {"enabled": False}}
IDS = {"return_token_ids": True}  # vLLM's name, and ours
AROUND = 40  # characters shown on either side of a divergence
SWITCH, SECOND, ITSELF = "request switch", "second server", "the same server twice"


@dataclass(frozen=True)
class Plan:
    """What is asked."""

    prompts: list[str]
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 64
    seed: int = 1000
    concurrency: int = 1


@dataclass(frozen=True)
class Answer:
    """What a client saw of one answer."""

    text: str
    finish: str
    tokens: int
    drafted: int = 0
    accepted: int = 0
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Divergence:
    """Where two answers part."""

    prompt: int
    temperature: float
    position: int  # in characters, or in tokens where ids are known
    unit: str
    before: str  # what both say up to there
    plain: str
    speculative: str


@dataclass
class Audit:
    """What was found."""

    server: str
    reference: str  # how the plain text was had
    plain_server: str
    model: str | None
    compared: int = 0  # answers
    compared_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def proves(self) -> bool:
        """Whether speculation was really switched off on one side."""
        return self.reference != ITSELF

    @property
    def alpha(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"acceptance_rate": self.alpha, "proves_losslessness": self.proves}


@dataclass(frozen=True)
class Way:
    """How this server can be compared."""

    reference: str  # SWITCH, SECOND or ITSELF
    model: str | None
    plain_model: str | None
    ours: bool  # it takes Outrider's own request fields
    extra: dict[str, Any]  # fields that both sides take


def probed(server: Server, plain: Server | None, model: str | None) -> Way:
    """Ask the servers who they are and what they take, with answers of one token."""
    name = model or _first_model(server)
    switch = _takes_switch(server, name)
    reference = SECOND if plain is not None else SWITCH if switch else ITSELF
    plain_name = name if plain is None or model is not None else _first_model(plain)
    pairs = [(server, name), *([(plain, plain_name)] if plain is not None else [])]
    ids = all(_takes(one, called, IDS) for one, called in pairs)
    return Way(reference, name, plain_name, switch, dict(IDS) if ids else {})


def _takes_switch(server: Server, model: str | None) -> bool:
    """Whether a request can switch speculation off: ours refuses a drafter that it does not have.

    A server that ignores what it does not know would speculate both times, and the comparison would prove nothing.
    """
    try:
        ask(server, _short(model) | {"speculation": {"drafter": "no drafter is called so"}})
    except RemoteError as error:
        return error.status in (400, 422) and "drafter" in str(error)
    return False


def _takes(server: Server, model: str | None, field: dict[str, Any]) -> bool:
    """Whether a request with this field is answered; ids are looked for in the answers themselves."""
    try:
        ask(server, _short(model) | field)
    except RemoteError as error:
        if error.status not in (400, 422):
            raise
        return False
    return True


def _short(model: str | None) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1} | _named(model)


def run(
    server: Server, plain: Server | None, way: Way, plan: Plan, progress: Progress = lambda what, done: None
) -> Audit:
    """Ask everything twice and compare."""
    other = plain or server
    audit = Audit(server.url, way.reference, other.url, way.model)
    wishes = [(t, i) for t in plan.temperatures for i in range(len(plan.prompts))]
    lock, done = threading.Lock(), [0]

    def both(wish: tuple[float, int]) -> None:
        temperature, i = wish
        body = _body(plan, temperature, i) | way.extra
        try:
            said = ask(server, body | _named(way.model))
            expected = ask(other, body | _named(way.plain_model) | (OFF if way.reference == SWITCH else {}))
        except RemoteError as error:
            with lock:
                audit.failures.append(f"prompt {i + 1}, temperature {temperature:g}: {error}")
        else:
            with lock:
                _count(audit, i, temperature, expected, said)
        with lock:
            done[0] += 1
            progress(f"temperature {temperature:g}: {len(audit.divergences)} divergences", done[0] / len(wishes))

    with ThreadPoolExecutor(plan.concurrency) as pool:
        list(pool.map(both, wishes))
    audit.divergences.sort(key=lambda d: (d.temperature, d.prompt))
    return audit


def ask(server: Server, body: dict[str, Any]) -> Answer:
    """One answer, streamed."""
    text, finish, tokens, drafted, accepted = "", "", 0, 0, 0
    ids: list[int] = []
    for _, chunk in server.chat(body | {"stream_options": {"include_usage": True}}):
        text += text_of(chunk)
        choice = (chunk.get("choices") or [{}])[0]
        finish = choice.get("finish_reason") or finish
        ids += choice.get("token_ids") or []
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        timings = chunk.get("timings") or {}
        found = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
        drafted += timings.get("draft_n") or found.get("num_draft_tokens") or 0
        accepted += timings.get("draft_n_accepted") or found.get("num_accepted_draft_tokens") or 0
    return Answer(text, finish, tokens, drafted, accepted, tuple(ids) or None)


def compare(prompt: int, temperature: float, plain: Answer, said: Answer) -> Divergence | None:
    """Where they part: by token ids if both sides have them, else by characters. One that ends early parts too."""
    a: Any = plain.ids if plain.ids and said.ids else plain.text
    b: Any = said.ids if plain.ids and said.ids else said.text
    if a == b and plain.text == said.text and plain.finish == said.finish:
        return None
    unit = "token" if a is plain.ids else "character"
    at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    same = next(_differ(plain.text, said.text))
    return Divergence(
        prompt,
        temperature,
        at,
        unit,
        plain.text[max(same - AROUND, 0) : same],
        plain.text[same : same + AROUND] or f"(ends: {plain.finish})",
        said.text[same : same + AROUND] or f"(ends: {said.finish})",
    )


def _differ(a: str, b: str) -> Iterator[int]:
    yield from (j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    yield min(len(a), len(b))


def _count(audit: Audit, i: int, temperature: float, expected: Answer, said: Answer) -> None:
    audit.compared += 1
    audit.compared_tokens += max(expected.tokens, said.tokens)
    audit.drafted += said.drafted
    audit.accepted += said.accepted
    found = compare(i, temperature, expected, said)
    if found is not None:
        audit.divergences.append(found)


def _body(plan: Plan, temperature: float, i: int) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": plan.prompts[i]}], "temperature": temperature}
    return body | {"max_tokens": plan.max_tokens, "seed": plan.seed + i}


def _named(model: str | None) -> dict[str, Any]:
    return {"model": model} if model else {}


def _first_model(server: Server) -> str | None:
    names = server.models()
    if not names:
        raise OutriderError(f"The server at {server.url} lists no model; name one with --model.")
    return names[0]
