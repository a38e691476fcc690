"""`outrider generate`: stream an answer, print what it cost, compare it with plain decoding, record it on request."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from ..errors import ConfigError, OutriderError
from .common import encode_prompt, load_model, note, print_json, stderr
from .options import EngineOptions, Json, MaxTokens, Temperature, arguments, sampling_params

if TYPE_CHECKING:
    from ..engine.trace import Recorder
    from ..llm import LLM
    from ..measure.statistics import BenchRow
    from ..types import SamplingParams, Sequence

ShowRejected = Annotated[bool, Option("--show-rejected", help="Strike out rejected drafts within the text.")]
Plain = Annotated[bool, Option("--plain", help="Print the text alone, as it is: no colours, no wrapping, no summary.")]
Seed = Annotated[int | None, Option(help="The random seed. The same seed gives the same text with every drafter.")]


def generate(
    prompt: Annotated[str, Argument(metavar="PROMPT", help="The user's message. - reads standard input.")],
    options: EngineOptions,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 256,
    stop: Annotated[list[str] | None, Option(help="End the text before this string. Repeatable.")] = None,
    json_schema: Annotated[Path | None, Option(help="A JSON schema file that the answer must satisfy.")] = None,
    regex: Annotated[str | None, Option(help="A regular expression that the whole answer must match.")] = None,
    grammar: Annotated[Path | None, Option(help="A Lark grammar file that the answer must follow.")] = None,
    prediction: Annotated[Path | None, Option(help="A file with the expected answer, which is drafted.")] = None,
    raw: Annotated[bool, Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    compare: Annotated[bool, Option("--compare", help="Decode again without drafts, and compare.")] = False,
    trace: Annotated[Path | None, Option(help="Record every step in this JSONL file.")] = None,
    show_rejected: ShowRejected = False,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Generate an answer with speculation. Text streams to standard output, the summary goes to standard error."""
    prompt = _read_stdin() if prompt == "-" else prompt
    given = options.arguments()
    guide = arguments(json=_read(json_schema), regex=regex, grammar=_read(grammar))
    own = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens, "stop": tuple(stop or ())}
    params = sampling_params(given, guide=guide or None, prediction=_read(prediction), **own)
    with _recorder(trace) as recorder:
        llm = load_model(options.model, options.with_learning(given), recorder)
        ids = encode_prompt(llm, prompt, raw)
        _write_header(llm, recorder, ids, params)
        # A string keeps its leading space when it is continued; a chat is passed as ids.
        as_text = raw or llm.tokenizer.chat_template is None
        answer = StreamedAnswer(llm, prompt if as_text else ids, params, Look(plain, show_rejected, quiet=as_json))
        answer.run()
        options.save_learnt(llm)
        race = plain_run = None
        try:
            if compare and answer.ended:
                race = race_of(llm, ids, replace(params, seed=answer.seq.seed, n=1))
                plain_run = _run_plain(llm, ids, params, answer) if recorder else None
        finally:
            _write_footer(llm, recorder, answer.seq, plain_run)
    if as_json:
        print_json(answer.as_json(race))
    elif not plain:
        answer.print_summary(race)
    if answer.interrupted:
        raise typer.Exit(130)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"Standard input is no UTF-8 text: byte {error.start} cannot be read.") from error


def _read(path: Path | None) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path is not None else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}.") from error


# ---------------------------------------------------------------- one answer


@dataclass(frozen=True)
class Look:
    """How an answer is printed."""

    plain: bool = False  # the text alone, as it is
    show_rejected: bool = False
    quiet: bool = False  # not at all


class StreamedAnswer:
    """One answer, printed as it is generated and timed. Ctrl-C ends it and keeps its statistics."""

    def __init__(self, llm: LLM, prompt: str | list[int], params: SamplingParams, look: Look) -> None:
        self.llm, self.prompt, self.params, self.look = llm, prompt, params, look
        self.text, self.seconds, self.interrupted = "", 0.0, False

    def run(self) -> None:
        from ..types import ACCEPTED, BONUS, REJECTED
        from . import show

        console = Console(highlight=False)
        shown = show.AnswerText(console, self.look.plain)
        if not (shown.plain or self.look.quiet or console.no_color):
            fates = (ACCEPTED, BONUS, REJECTED) if self.look.show_rejected else (ACCEPTED, BONUS)
            console.print(show.legend(*fates), end="\n\n")
        begin = time.perf_counter()
        try:
            for piece in self.llm.stream(self.prompt, self.params):
                self.text += piece.text
                if not self.look.quiet:
                    struck = piece.rejected[:1] if self.look.show_rejected and not console.no_color else []
                    shown.add(piece, self.llm.tokenizer.decode(struck) if struck else "")
        except KeyboardInterrupt:
            self.interrupted = True
        self.seconds = time.perf_counter() - begin
        self.seq: Sequence = self.llm.last
        if not self.look.quiet:
            shown.finish()

    @property
    def ended(self) -> bool:
        return not self.interrupted and bool(self.seq.generated)

    def print_summary(self, race: BenchRow | None = None) -> None:
        from . import show

        if self.interrupted:
            note("Interrupted; this is what was measured until then.", style="yellow")
        stderr.print()
        stderr.print(show.summary(self.seq.stats, self.seconds, self.llm.config.drafter_name, race))
        if (learning := self.llm.learning) is not None:
            stderr.print(show.learning_line(learning))
        if (ahead := self.llm.drafting.get("ahead")) is not None:
            stderr.print(show.ahead_line(ahead))
        if (translation := self.llm.drafting.get("model")) is not None:
            stderr.print(show.translation_line(translation))
        for sentence in self.llm.drift.sentences():
            stderr.print(f"[yellow]{sentence}[/yellow]")
        if not self.llm.exact and self.llm.config.drafter_name != "off":
            from ..measure.doctor import NOT_EXACT

            stderr.print(f"[yellow]{NOT_EXACT}[/yellow]")

    def as_json(self, race: BenchRow | None) -> dict[str, Any]:
        seq, stats, llm = self.seq, self.seq.stats, self.llm
        result: dict[str, Any] = {
            "text": self.text,
            "token_ids": seq.generated,
            "origins": seq.origins,
            "finish_reason": "interrupted" if self.interrupted else seq.finish,
            "tokens": len(seq.generated),
            "prompt_tokens": seq.prompt_len,
            "seconds": self.seconds,
            "tokens_per_second": len(seq.generated) / self.seconds if self.seconds else 0.0,
            "seconds_by_phase": stats.seconds,
            "drafter": llm.config.drafter_name,
            "k": llm.config.k,
            "why": stats.why,
            "seed": seq.seed,
            "temperature": seq.params.temperature,
            "model": llm.name,
            "dtype": llm.dtype,
            "device": llm.device,
        }
        counts = ("steps", "passes", "drafted", "reached", "accepted", "alpha", "alpha_by_position", "tau")
        result |= {name: getattr(stats, name) for name in counts}
        if llm.learning is not None:
            result["learning"] = llm.learning
        if drafting := llm.drafting:
            result["drafting"] = drafting
        if drift := llm.drift.as_json():
            result["drift"] = drift
        if seq.prediction is not None:
            result["accepted_prediction_tokens"] = stats.accepted_prediction_tokens
            result["rejected_prediction_tokens"] = stats.rejected_prediction_tokens
        if seq.params.logprobs is not None:
            result["logprobs"] = [lp._asdict() for lp in seq.logprobs]
        if race is not None:
            result |= {"plain_tokens_per_second": race.plain_tok_s, "plain_same_text": not race.divergences}
            result |= {"decoding_tokens_per_second": race.tok_s, "runs": race.rounds}
            result |= {"speedup": race.speedup, "speedup_request": race.speedup_total}
        return result


@dataclass(frozen=True)
class PlainRun:
    """The same prompt and seed decoded without drafts. Traces store these fields by name."""

    tokens: int
    seconds: float
    us: list[list[int]]  # [start, duration] of each pass, in microseconds
    same: bool  # whether its token ids equal the speculative ones


def race_of(llm: LLM, ids: list[int], params: SamplingParams) -> BenchRow:
    """The same request with and without drafts, several times in turn."""
    from ..measure.bench import race

    with stderr.status("Comparing with plain decoding …") if stderr.is_terminal else nullcontext():
        row = race(llm, ids, params)
    if row.divergences and llm.config.rule == "match":
        note("The plain text differs: please run `outrider verify` and report its result.", style="red")
    return row


def _run_plain(llm: LLM, ids: list[int], params: SamplingParams, answer: StreamedAnswer) -> PlainRun:
    """Decode the same prompt without drafts once more, with the time of each pass, for the trace's readers."""
    from ..engine.trace import Passes

    passes = Passes()
    sibling = llm.using(drafter="off", recorder=passes)
    begin = time.perf_counter()
    (plain,) = sibling.generate([ids], replace(params, seed=answer.seq.seed, n=1))
    seconds = time.perf_counter() - begin
    same = plain.token_ids == answer.seq.generated
    return PlainRun(len(plain.token_ids), seconds, passes.us, same)


# ---------------------------------------------------------------- traces


@contextmanager
def _recorder(path: Path | None) -> Iterator[Recorder | None]:
    if path is None:
        yield None
        return
    from ..engine.trace import Recorder

    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise OutriderError(f"The trace cannot be written to {path}: {error}.") from error
    try:
        yield Recorder("full", file)
    finally:
        with suppress(OSError):  # what could not be written is still in its buffer
            file.close()


def _write_header(llm: LLM, recorder: Recorder | None, ids: list[int], params: SamplingParams) -> None:
    if recorder is not None:
        facts = {"model": llm.name, "dtype": llm.dtype, "drafter": llm.config.drafter_name, "k": llm.config.k}
        facts |= {"device": llm.device}
        text = llm.tokenizer.decode(ids, skip_special=False)
        recorder.header(**facts, rule=llm.config.rule, temperature=params.temperature, prompt=ids, prompt_text=text)


def _write_footer(llm: LLM, recorder: Recorder | None, seq: Sequence, plain: PlainRun | None) -> None:
    if recorder is None or recorder.level == "off":
        return
    from ..engine.trace import read, tokens_of

    path = Path(recorder.file.name) if recorder.file else None
    drafted = set().union(*map(tokens_of, read(path).lines)) if path else set()
    facts: dict[str, Any] = {"drafting": llm.drafting} if llm.drafting else {}
    facts["texts"] = llm.texts_of(seq)
    if llm.learning is not None:
        facts["learning"] = llm.learning
    if plain is not None:
        facts["plain"] = asdict(plain)
    pieces = {token: llm.tokenizer.decode([token], skip_special=False) for token in {*seq.tokens, *drafted}}
    recorder.footer(pieces=pieces, finish=seq.finish, seed=seq.seed, seconds=seq.stats.seconds, **facts)
