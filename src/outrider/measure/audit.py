"""The losslessness audit of a running server: the same requests with and without speculation.

It compares what a client can see: the text, and token ids where the server returns them. The plain side is, in this
order: a second server without speculation, where one is given; Outrider's own request field
`speculation: {"enabled": false}`; the same server again, which shows only whether it repeats itself, as the report
says. Requests go one at a time by default, because batching changes the numerics of most engines; `concurrency` sends
several at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import OutriderError
from .client import RemoteError, Response, Server
from .statistics import first_difference

NO_SPECULATION = {"speculation": {"enabled": False}}
RETURN_IDS = {"return_token_ids": True}  # vLLM's name, and ours
REFUSED = (400, 422)  # HTTP status of a field that the server does not take
CONTEXT = 40  # characters shown on either side of a divergence
REQUEST_SWITCH, SECOND_SERVER, SAME_SERVER = "request switch", "second server", "the same server twice"


@dataclass(frozen=True)
class AuditPlan:
    prompts: list[str]
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 64
    seed: int = 1000
    concurrency: int = 1

    def body(self, temperature: float, i: int) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": self.prompts[i]}], "temperature": temperature}
        return body | {"max_tokens": self.max_tokens, "seed": self.seed + i}


@dataclass(frozen=True)
class TextDivergence:
    """The first difference between two responses."""

    prompt: int
    temperature: float
    position: int  # in characters, or in tokens where ids are known
    unit: str
    before: str  # the common text up to there
    plain: str
    speculative: str


@dataclass
class Audit:
    """The result."""

    server: str
    reference: str  # REQUEST_SWITCH, SECOND_SERVER or SAME_SERVER
    plain_server: str
    model: str | None
    compared: int = 0  # responses
    compared_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    divergences: list[TextDivergence] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def proves(self) -> bool:
        """Whether speculation was off on one side."""
        return self.reference != SAME_SERVER

    def as_json(self) -> dict[str, Any]:
        alpha = self.accepted / self.drafted if self.drafted else None
        return asdict(self) | {"acceptance_rate": alpha, "proves_losslessness": self.proves}

    def count(self, i: int, temperature: float, plain: Response, speculative: Response) -> None:
        self.compared += 1
        self.compared_tokens += max(plain.tokens, speculative.tokens)
        self.drafted += speculative.drafted
        self.accepted += speculative.accepted
        divergence = compare(i, temperature, plain, speculative)
        if divergence is not None:
            self.divergences.append(divergence)


@dataclass(frozen=True)
class ServerProbe:
    """How a server can be compared with plain decoding."""

    reference: str  # REQUEST_SWITCH, SECOND_SERVER or SAME_SERVER
    model: str | None
    plain_model: str | None
    is_outrider: bool  # it takes Outrider's own request fields
    extra: dict[str, Any]  # fields that both sides take


def probe(server: Server, plain: Server | None, model: str | None) -> ServerProbe:
    """Find the servers' models and the request fields that they take, with responses of one token."""
    name = model or _first_model(server)
    switch = _has_switch(server, name)
    reference = SECOND_SERVER if plain is not None else REQUEST_SWITCH if switch else SAME_SERVER
    plain_name = name if plain is None or model is not None else _first_model(plain)
    sides = [(server, name), *([(plain, plain_name)] if plain is not None else [])]
    ids = all(_accepts_ids(side, side_model) for side, side_model in sides)
    return ServerProbe(reference, name, plain_name, switch, dict(RETURN_IDS) if ids else {})


def _has_switch(server: Server, model: str | None) -> bool:
    """Whether a request can switch speculation off: Outrider's server refuses a drafter that does not exist.

    A server that ignores unknown fields would speculate both times, and the comparison would prove nothing.
    """
    error = _probe_error(server, model, {"speculation": {"drafter": "no drafter is called so"}})
    return error is not None and error.status in REFUSED and "drafter" in str(error)


def _accepts_ids(server: Server, model: str | None) -> bool:
    """Whether a request for token ids is answered at all; the ids themselves are looked for in each response."""
    error = _probe_error(server, model, RETURN_IDS)
    if error is not None and error.status not in REFUSED:
        raise error
    return error is None


def _probe_error(server: Server, model: str | None, fields: dict[str, Any]) -> RemoteError | None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    try:
        request(server, body | _model_field(model) | fields)
    except RemoteError as error:
        return error
    return None


def run(
    server: Server,
    plain: Server | None,
    probed: ServerProbe,
    plan: AuditPlan,
    progress: Callable[[str, float], None] = lambda what, done: None,
) -> Audit:
    """Send every prompt at every temperature to both sides and compare."""
    reference = plain or server
    plain_fields = _model_field(probed.plain_model) | (NO_SPECULATION if probed.reference == REQUEST_SWITCH else {})
    audit = Audit(server.url, probed.reference, reference.url, probed.model)
    cases = [(t, i) for t in plan.temperatures for i in range(len(plan.prompts))]
    lock, done = threading.Lock(), [0]

    def both(case: tuple[float, int]) -> None:
        temperature, i = case
        body, failure = plan.body(temperature, i) | probed.extra, ""
        try:
            speculative = request(server, body | _model_field(probed.model))
            expected = request(reference, body | plain_fields)
        except RemoteError as error:
            failure = f"prompt {i + 1}, temperature {temperature:g}: {error}"
        with lock:
            if failure:
                audit.failures.append(failure)
            else:
                audit.count(i, temperature, expected, speculative)
            done[0] += 1
            progress(f"temperature {temperature:g}: {len(audit.divergences)} divergences", done[0] / len(cases))

    with ThreadPoolExecutor(plan.concurrency) as pool:
        list(pool.map(both, cases))
    audit.divergences.sort(key=lambda d: (d.temperature, d.prompt))
    return audit


def request(server: Server, body: dict[str, Any]) -> Response:
    """One streamed response, complete."""
    response = Response()
    for _, chunk in server.chat(body | {"stream_options": {"include_usage": True}}):
        response.add(chunk)
    return response


def compare(prompt: int, temperature: float, plain: Response, speculative: Response) -> TextDivergence | None:
    """The first difference: by token ids if both sides have them, else by characters. A shorter response differs."""
    by_ids = bool(plain.ids and speculative.ids)
    a, b = (plain.ids, speculative.ids) if by_ids else (plain.text, speculative.text)
    if a == b and plain.text == speculative.text and plain.finish == speculative.finish:
        return None
    same = first_difference(plain.text, speculative.text)
    shown = (side.text[same : same + CONTEXT] or f"(ends: {side.finish})" for side in (plain, speculative))
    before = plain.text[max(same - CONTEXT, 0) : same]
    unit = "token" if by_ids else "character"
    return TextDivergence(prompt, temperature, first_difference(a, b), unit, before, *shown)


def _model_field(model: str | None) -> dict[str, Any]:
    return {"model": model} if model else {}


def _first_model(server: Server) -> str | None:
    names = server.models()
    if not names:
        raise OutriderError(f"The server at {server.url} lists no model; name one with --model.")
    return names[0]
