"""Structured output: which tokens may come next, so that a text has the form it was asked to have.

    guide = guide_for({"type": "json_schema", "json_schema": {"schema": {…}}}, tokenizer)
    seq.matcher = guide.matcher()          # one for each sequence; `SamplingParams(guide=…)` does all of this

The promise: what is allowed is a function of the generated tokens alone. A matcher keeps a grammar's state for speed,
as a cache keeps K/V, and reconciles it to the tokens it is asked about; drafts, batches and preemption leave no trace
in it. Compiling is done once for each content and tokenizer, within limits. It knows tokens and grammars (by
llguidance); it knows neither logits nor drafts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from ...errors import ConfigError
from ...types import common_prefix
from .formats import GRAMMAR, JSON_SCHEMA, Format, format_of

KEPT = 64  # compiled guides of a tokenizer that are remembered


def _limits() -> LLParserLimits:
    """What compiling and each step may cost: about a tenth of a second, and a hundredth."""
    return LLParserLimits(
        initial_lexer_fuel=2_000_000,
        step_lexer_fuel=150_000,
        step_max_items=10_000,
        max_items_in_row=500,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # what was asked for does not belong into a log
    )


def guide_for(
    asked: Mapping[str, Any] | Format | None,
    tokenizer: Any,
    vocabulary: int | None = None,
    ends: frozenset[int] = frozenset(),
) -> Guide | None:
    """The guide for a form (see `formats`); None where any text will do.

    `vocabulary` is how many tokens the model has, where that is more than its tokenizer has; `ends` are tokens that end
    a text besides the tokenizer's own.
    """
    form = format_of(asked)
    if form is None:
        return None
    with _LOCK:
        shelf = _SHELVES.get(tokenizer)
        if shelf is None:
            shelf = _SHELVES[tokenizer] = {}
        size = max(vocabulary or 0, tokenizer.vocab_size)
        ends = frozenset(end for end in tokenizer.eos_ids | ends if end < size)
        if (size, ends) not in shelf:
            shelf[size, ends] = Press(tokenizer, size, ends)
        return shelf[size, ends].guide(form)


class Press:
    """Compiles forms for one vocabulary, each once."""

    def __init__(self, tokenizer: Any, size: int, ends: frozenset[int]) -> None:
        if not ends:
            raise ConfigError("The model has no end token, so a guided text could not end; give it an eos token.")
        self.size, self.ends = size, ends
        self.end = tokenizer.eos_id if tokenizer.eos_id in ends else min(ends)  # the one to expect
        self.tokens = LLTokenizer(_Words(tokenizer, size, ends), eos_token=sorted(ends))
        self.known: OrderedDict[Format, Guide] = OrderedDict()

    def guide(self, form: Format) -> Guide:
        if form not in self.known:
            self.known[form] = Guide(form, self)
            if len(self.known) > KEPT:
                self.known.popitem(last=False)
        self.known.move_to_end(form)
        return self.known[form]


class Guide:
    """A form, compiled for one vocabulary."""

    def __init__(self, form: Format, press: Press) -> None:
        self.form, self.size, self.ends, self.end = form, press.size, press.ends, press.end
        self._tokens = press.tokens
        try:
            self.pristine = self.fresh()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"The {form.kind} cannot be understood: {error}.") from error
        if self.pristine.is_error():
            why = self.pristine.get_error().partition("\n<")[0].strip()
            raise ConfigError(f"The {form.kind} cannot be used as a guide: {why[:400]}")
        if not State(self, self.fresh()).mask([]).any():
            raise ConfigError(f"The {form.kind} allows no text at all; loosen it.")

    def fresh(self) -> LLMatcher:
        """The grammar at its beginning, sharing nothing: copies share what they have built, and its limits."""
        return LLMatcher(self._tokens, _grammar(self.form), log_level=0, limits=_limits())

    def matcher(self) -> Walk:
        """For one sequence. What its judge may still build must not depend on what others have built."""
        return Walk(State(self, self.fresh()), State(self, self.pristine.deep_copy()))


class Walk:
    """What a guide allows one sequence (`types.Matcher`): the judge's own state, and another one for guesses."""

    def __init__(self, judge: State, scout: State) -> None:
        self.judge, self.scout = judge, scout

    def allows(self, said: list[int], token: int) -> bool:
        return self.judge.at(said) and self.judge.follow([token]) == 1

    def mask(self, said: list[int], guess: bool = False) -> Tensor:
        """[V] bool"""
        return (self.scout if guess else self.judge).mask(said)

    def complete(self, said: list[int]) -> bool:
        return self.judge.complete(said)

    def follow(self, said: list[int], tokens: list[int]) -> int:
        if not tokens or not self.scout.at(said):
            return 0
        return self.scout.follow(tokens)

    def forced(self, said: list[int], most: int) -> list[int]:
        """Tokens that are the only ones allowed, or spell bytes that are the only ones allowed."""
        tokens: list[int] = []
        while len(tokens) < most and self.scout.at(said + tokens):
            more = self.scout.only_way()
            if not more:
                break
            tokens += more
            if tokens[-1] in self.scout.guide.ends:
                break
        return tokens[:most]


class State:
    """A grammar's state after some tokens; asked about others, it goes back to where they part and on from there."""

    def __init__(self, guide: Guide, grammar: LLMatcher) -> None:
        self.guide, self.grammar = guide, grammar
        self.said: list[int] = []  # what the grammar has consumed

    def at(self, said: list[int]) -> bool:
        """Go there; False if the guide does not allow this text, or if it has ended before."""
        shared = common_prefix(self.said, said)
        if not self.guide.ends.isdisjoint(said[shared:]):
            return False
        if self.grammar.is_error() or (shared < len(self.said) and not self._back(len(self.said) - shared)):
            self.grammar, self.said, shared = self.guide.fresh(), [], 0
        if shared < len(said):
            rest = said[shared:]
            self.said = self.said + rest[: self.grammar.try_consume_tokens(rest)]
        return len(self.said) == len(said) and not self.grammar.is_error()

    def _back(self, count: int) -> bool:
        self.said = self.said[: len(self.said) - count]
        return bool(self.grammar.rollback(count))

    def mask(self, said: list[int]) -> Tensor:
        """[V] bool; nothing after a text that is not allowed, nor where the grammar gives up."""
        nothing = torch.zeros(self.guide.size, dtype=torch.bool)
        if not self.at(said):
            return nothing
        bits = np.frombuffer(self.grammar.compute_bitmask(), np.uint8)
        if self.grammar.is_error():
            return nothing
        allowed = torch.from_numpy(np.unpackbits(bits, count=self.guide.size, bitorder="little")).bool()
        if not self.grammar.is_accepting():
            allowed[list(self.guide.ends)] = False
        return allowed

    def complete(self, said: list[int]) -> bool:
        """Whether the text may end here, or has."""
        ends = self.guide.ends
        whole = next((i for i, token in enumerate(said) if token in ends), len(said))
        return self.at(said[:whole]) and bool(self.grammar.is_accepting())

    def follow(self, tokens: list[int]) -> int:
        """How many of these may come next, where it stands; an end only where the text is complete."""
        words = next((i for i, token in enumerate(tokens) if token in self.guide.ends), len(tokens))
        valid = int(self.grammar.validate_tokens(tokens[:words])) if words else 0
        if valid == len(tokens) or valid < words:
            return valid
        return valid + self.complete(self.said + tokens[:words])

    def only_way(self) -> list[int]:
        """What must come next, where it stands: the end of a complete text, or bytes without an alternative."""
        if self.grammar.is_accepting():
            return [self.guide.end] if self.grammar.is_stopped() else []
        tokens: list[int] = self.grammar.compute_ff_tokens()
        if tokens or not self.grammar.compute_ff_bytes():
            return tokens
        allowed = self.mask(self.said).nonzero().flatten()
        return allowed.tolist() if allowed.numel() == 1 else []


def _grammar(form: Format) -> str:
    if form.kind == JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(
            form.text,
            # Written as most models write it, on one line: one way to write it means more tokens that are forced, and
            # no model can lose itself in blanks.
            overrides={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
                "coerce_one_of": True,
                "lenient": form.lenient,
            },
        )
    if form.kind == GRAMMAR:
        return LLMatcher.grammar_from_lark(form.text)
    return LLMatcher.grammar_from_regex(form.text)


class _Words(TokenizerWrapper):
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Any, size: int, ends: frozenset[int]) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = min(ends), tokenizer.bos_id
        spelled = [tokenizer.id_to_bytes(token) for token in range(size)]
        silent = {token for token in range(size) if tokenizer.is_special(token) or not spelled[token]}
        self.special_token_ids = sorted(silent | ends)  # no text ever allows these by itself
        self.tokens = [word or b"<nothing %d>" % token for token, word in enumerate(spelled)]
        self._tokenizer = proxy(tokenizer)  # or what is remembered for a tokenizer would keep it for ever

    def __call__(self, text: str | bytes) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))
        return ids


_LOCK = threading.Lock()
_SHELVES: WeakKeyDictionary[Any, dict[tuple[int, frozenset[int]], Press]] = WeakKeyDictionary()
