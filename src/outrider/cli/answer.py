"""One streamed answer on the command line: printed as it comes, measured, and robust against Ctrl-C."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from ..engine.trace import Passes
from ..llm import LLM
from ..types import SamplingParams, Sequence
from .show import ahead_line, ghosts, learning_line, legend, piece, summary, translation_line

errors = Console(stderr=True)


class Run:
    """One streamed answer: printed as it comes, measured, and robust against Ctrl-C."""

    def __init__(self, llm: LLM, asked: str | list[int], params: SamplingParams, quiet: bool = False) -> None:
        self.llm, self.asked, self.params, self.quiet = llm, asked, params, quiet
        self.console = Console(highlight=False)
        self.text, self.seconds, self.interrupted = "", 0.0, False

    def go(self) -> None:
        if self.console.is_terminal and not self.quiet:
            self.console.print(legend(), end="\n\n")
        begin = time.perf_counter()
        try:
            for part in self.llm.stream(self.asked, self.params):
                self.text += part.text
                if self.quiet:
                    continue
                piece(self.console, part)
                if self.console.is_terminal and not self.console.no_color:
                    ghosts(self.console, [self.llm.tokenizer.decode([t]) for t in part.rejected[:1]])
        except KeyboardInterrupt:
            self.interrupted = True
        self.seconds = time.perf_counter() - begin
        self.seq: Sequence = self.llm.last
        if not self.quiet:
            self.console.print()

    def print_summary(self, plain: Plain | None) -> None:
        if self.interrupted:
            errors.print("[yellow]Interrupted; this is what was measured until then.[/yellow]")
        errors.print()
        beside = None if plain is None else (plain.speed, plain.same)
        errors.print(summary(self.seq.stats, self.seconds, self.llm.config.drafter_name, beside))
        if (learning := self.llm.learning) is not None:
            errors.print(learning_line(learning))
        if (ahead := self.llm.drafting.get("ahead")) is not None:
            errors.print(ahead_line(ahead))
        if (words := self.llm.drafting.get("model")) is not None:
            errors.print(translation_line(words))
        for sentence in self.llm.drift.sentences():
            errors.print(f"[yellow]{sentence}[/yellow]")

    def as_json(self, plain: Plain | None) -> dict[str, Any]:
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
            "steps": stats.steps,
            "passes": stats.passes,
            "drafted": stats.drafted,
            "reached": stats.reached,
            "accepted": stats.accepted,
            "alpha": stats.alpha,
            "alpha_by_position": stats.alpha_by_position,
            "tau": stats.tau,
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
        beside = {} if plain is None else {"plain_tokens_per_second": plain.speed, "plain_same_text": plain.same}
        return result | beside


@dataclass(frozen=True)
class Plain:
    """The same prompt and seed without drafts: what it took, and when each of its passes ran."""

    tokens: int
    seconds: float
    us: list[list[int]]  # [start, duration] of each pass
    same: bool  # whether it said the very same tokens

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def plain_run(llm: LLM, ids: list[int], params: SamplingParams, run: Run) -> Plain | None:
    """The same text without drafts, in the same process; None if nothing was said."""
    if run.interrupted or not run.seq.generated:
        return None
    passes = Passes()
    sibling = llm.using(drafter="off", recorder=passes)
    begin = time.perf_counter()
    (plain,) = sibling.generate([ids], replace(params, seed=run.seq.seed, n=1))
    seconds = time.perf_counter() - begin
    same = plain.token_ids == run.seq.generated
    if not same and llm.config.rule == "match":
        errors.print("[red]The plain text differs: please run `outrider verify` and report what it says.[/red]")
    return Plain(len(plain.token_ids), seconds, passes.us, same)
