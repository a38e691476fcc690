"""What is said back: OpenAI's objects, whole or in chunks, with what speculation did beside them.

It writes dictionaries; how they travel is `stream`'s and `routes`' business.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ..engine.trace import Line
from ..llm import LLM
from ..types import TokenLogprob
from .job import Answer, Job, Words
from .parsed import Asked

LOWEST = -9999.0  # what OpenAI says for a token that cannot be
Json = dict[str, Any]


@dataclass
class Told:
    """All that one answer has said."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None

    def add(self, words: Words) -> None:
        self.text += words.text
        self.tokens += words.tokens
        self.logprobs += words.logprobs
        self.finish = words.finish


@dataclass
class Letter:
    """One request's answer paper: which model, which ids, what was asked to be told."""

    llm: LLM
    model: str
    job: Job
    asked: Asked
    with_ids: bool
    kind: str = "chat.completion"
    created: int = field(default_factory=lambda: int(time.time()))
    begun: dict[int, int] = field(default_factory=dict)  # answer -> characters said so far

    # ------------------------------------------------------------ whole

    def whole(self, told: list[Told]) -> Json:
        choices = [self._choice(i, each) for i, each in enumerate(told)]
        return self._head(self.kind) | {"choices": choices, "usage": self.usage(), **self._measured(self.job.answers)}

    def _choice(self, index: int, told: Told) -> Json:
        said: Json = {"message": {"role": "assistant", "content": told.text, "refusal": None}}
        if self.kind == "text_completion":
            said = {"text": told.text}
        choice = {
            "index": index,
            **said,
            "logprobs": self._logprobs(index, told.logprobs),
            "finish_reason": told.finish,
        }
        return choice | self._ids(index, told.tokens, first=True)

    # ------------------------------------------------------------ in chunks

    def chunk(self, words: Words, trace: list[Line] | None = None) -> Json:
        first = words.index not in self.begun
        delta: Json = {"role": "assistant"} if first else {}
        said: Json = {"delta": delta | {"content": words.text}}
        if self.kind == "text_completion":
            said = {"text": words.text}
        choice = {"index": words.index, **said, "logprobs": self._logprobs(words.index, words.logprobs)}
        choice |= {"finish_reason": words.finish} | self._ids(words.index, words.tokens, first)
        measured = self._measured([self.job.answers[words.index]]) if words.finish else {}
        told = {} if trace is None else {"trace": trace}
        return self._head(self._chunk_kind) | {"choices": [choice], **measured, **told}

    def usage_chunk(self) -> Json:
        return self._head(self._chunk_kind) | {"choices": [], "usage": self.usage()}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat.completion" else self.kind

    # ------------------------------------------------------------ the parts of both

    def _head(self, kind: str) -> Json:
        mark = f"outrider-{self.llm.dtype}"  # the same text for the same seed holds among equals of this
        seed = self.job.answers[0].seq.seed
        head = {"id": self.job.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": mark, "seed": seed}

    def _ids(self, index: int, tokens: list[int], first: bool) -> Json:
        if not self.with_ids:
            return {}
        seq = self.job.answers[index].seq
        return {"token_ids": tokens} | ({"prompt_token_ids": seq.tokens[: seq.prompt_len]} if first else {})

    def usage(self) -> Json:
        n = self.asked.params.n
        prompts = [answer.seq for answer in self.job.answers[::n]]  # a prompt counts once, however many answers it has
        prompt = sum(seq.prompt_len for seq in prompts)
        said = sum(answer.told for answer in self.job.answers)
        reused = sum(seq.stats.reused for seq in prompts)
        usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
        stats = [answer.seq.stats for answer in self.job.answers]
        kept = sum(each.accepted_prediction_tokens for each in stats)
        lost = sum(each.rejected_prediction_tokens for each in stats)
        predicted = {"accepted_prediction_tokens": kept, "rejected_prediction_tokens": lost}
        return usage | {"prompt_tokens_details": {"cached_tokens": reused}, "completion_tokens_details": predicted}

    def _logprobs(self, index: int, entries: list[TokenLogprob]) -> Json | None:
        start = self.begun.setdefault(index, 0)
        if self.asked.params.logprobs is None:
            return None
        piece = self.llm.tokenizer.id_to_piece
        if self.kind == "chat.completion":
            return {"content": [self._entry(each) for each in entries], "refusal": None}
        offsets = []
        for entry in entries:
            offsets.append(start)
            start += len(piece(entry.token))
        self.begun[index] = start
        return {
            "tokens": [piece(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [{piece(token): _finite(value) for token, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _entry(self, entry: TokenLogprob) -> Json:
        top = [self._token(token, value) for token, value in entry.top]
        return self._token(entry.token, entry.logprob) | {"top_logprobs": top}

    def _token(self, token: int, value: float) -> Json:
        tokenizer = self.llm.tokenizer
        return {
            "token": tokenizer.id_to_piece(token),
            "logprob": _finite(value),
            "bytes": list(tokenizer.id_to_bytes(token)),
        }

    def _measured(self, answers: list[Answer]) -> Json:
        return {
            "metrics": {"speculative_decoding": _speculation(self.llm, self.asked, answers)},
            "timings": _timings(answers),
        }


def _finite(value: float) -> float:
    return max(value, LOWEST)


def _speculation(llm: LLM, asked: Asked, answers: list[Answer]) -> Json:
    """vLLM's names, and ours for what it has none: who drafts, whether at all, and the reason."""
    every = [answer.seq.stats for answer in answers]
    drafts, drafted = sum(s.drafts for s in every), sum(s.drafted for s in every)
    accepted, reached = sum(s.accepted for s in every), sum(s.reached for s in every)
    deepest = max((len(s.accepted_at) for s in every), default=0)
    depths = [sum(s.accepted_at[d] for s in every if d < len(s.accepted_at)) for d in range(deepest)]
    passed = [drafts, *depths, 0]  # steps that accepted at least 0, 1, 2, … drafted tokens
    return {
        "enabled": not asked.plain,
        "drafter": llm.drafter_of(answers[0].seq),
        "reason": asked.plain or every[0].why,
        "num_spec_tokens": llm.config.k if isinstance(llm.config.k, int) else asked.most_drafted,
        "num_spec_steps": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "acceptance_histogram": [passed[i] - passed[i + 1] for i in range(deepest + 1)],
        "alpha": accepted / reached if reached else None,
        "target_passes": sum(s.passes for s in every),
        "drafter_failures": sum(s.failures for s in every),
    }


def _timings(answers: list[Answer]) -> Json:
    """llama.cpp's names. Over several answers: from the first to start to the last to end."""
    started, first = min(a.started for a in answers), min(a.first for a in answers)
    said = sum(a.told for a in answers)
    fed = sum(a.seq.prompt_len - a.seq.stats.reused for a in answers)
    prompt, predicted = max(first - started, 0.0), max(max(a.latest for a in answers) - first, 0.0)
    return {
        "queue_ms": round(1e3 * (started - answers[0].job.arrived), 3),
        "prompt_n": fed,
        "prompt_ms": round(1e3 * prompt, 3),
        "prompt_per_second": round(fed / prompt, 3) if prompt else None,
        "predicted_n": said,
        "predicted_ms": round(1e3 * predicted, 3),
        "predicted_per_second": round((said - 1) / predicted, 3) if predicted else None,
        "draft_n": sum(a.seq.stats.drafted for a in answers),
        "draft_n_accepted": sum(a.seq.stats.accepted for a in answers),
    }
