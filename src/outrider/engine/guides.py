"""Structured output: JSON schemas, regular expressions and grammars as the set of tokens that may come next.

    guide = guide_for({"type": "json_schema", "json_schema": {"schema": {…}}}, tokenizer)
    seq.matcher = guide.matcher()          # one for each sequence; `SamplingParams(guide=…)` does all of this

Promise: a guided text has the requested form, with and without speculation, because the set of allowed tokens is a
function of the generated tokens alone. A matcher caches a grammar's state and reconciles it to the tokens it is called
with; drafts, batches and preemption leave no trace in it. Each form is compiled once per tokenizer, within limits.
This module knows tokens and grammars (through llguidance); it sees neither logits nor drafts.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, proxy

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from ..errors import ConfigError
from ..types import common_prefix

# ---------------------------------------------------------------- the requested form
#
#    {"type": "json_object"}                                                        OpenAI's response_format
#    {"type": "json_schema", "json_schema": {"schema": {…}, "strict": true}}
#    {"regex": "…"}   {"grammar": "…"} (Lark)   {"json": {…}}   {"choice": ["a", "b"]}
#    the same four as guided_regex, guided_grammar, guided_json, guided_choice      vLLM's names
#
# Schemas and patterns are untrusted input: every size has a limit, checked before anything is compiled.

MAX_CHARACTERS = 64 * 1024  # of a schema or a grammar
MAX_DEPTH = 24  # nesting of a schema
MAX_PARTS = 4096  # values in a schema, at all depths
MAX_PATTERN = 1024  # characters of a regular expression
MAX_REPEATS = 10_000  # counted repetitions in one, nested ones multiplied
MAX_CHOICES = 1024

JSON_SCHEMA, REGEX, GRAMMAR = "json schema", "regex", "grammar"
_SPELLINGS = ("regex", "grammar", "json", "choice")
_PARTS = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+),?(\d*)\}|.)", re.DOTALL)  # an escape, a class, a count


class Format(NamedTuple):
    """A requested form, normalised: equal contents are equal."""

    kind: str  # JSON_SCHEMA, REGEX or GRAMMAR
    text: str
    lenient: bool = False  # unsupported schema keywords are ignored instead of refused


def format_of(spec: Mapping[str, Any] | None) -> Format | None:
    """The form that a request specifies; None where any text is allowed."""
    if spec is None:
        return None
    if not isinstance(spec, Mapping):
        raise ConfigError('A guide must be an object, such as {"type": "json_object"} or {"regex": "[a-z]+"}.')
    named = {name: spec[key] for name in _SPELLINGS for key in (name, f"guided_{name}") if spec.get(key) is not None}
    if len(named) + ("type" in spec) != 1:
        names = ", ".join(_SPELLINGS)
        raise ConfigError(f"A guide needs one thing: a 'type' (text, json_object, json_schema), or one of {names}.")
    if "type" in spec:
        return _response_format(spec)
    ((name, value),) = named.items()
    if name == "json":
        return _schema(value)
    return {"choice": _choice, "regex": _regex, "grammar": _grammar}[name](value)


def _response_format(spec: Mapping[str, Any]) -> Format | None:
    kind = spec.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema({"type": "object"})
    if kind != "json_schema":
        raise ConfigError(f"There is no response format '{kind}'. Choose one of: text, json_object, json_schema.")
    inner = spec.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        raise ConfigError('A response format of type json_schema needs {"json_schema": {"schema": {…}}}.')
    return _schema(inner["schema"], lenient=not inner.get("strict"))


def _schema(schema: Any, lenient: bool = False) -> Format:
    """A JSON schema, as an object or as text."""
    try:
        if isinstance(schema, str):
            _require(len(schema) <= MAX_CHARACTERS, f"The JSON schema is longer than {MAX_CHARACTERS} characters")
            schema = json.loads(schema)
        _require(isinstance(schema, Mapping), "The JSON schema is not an object", "give one such as {'type': 'object'}")
        _check_parts(schema)  # before json.dumps, which recurses
        # "x-guidance" would change llguidance's settings.
        text = json.dumps({k: v for k, v in schema.items() if k != "x-guidance"}, ensure_ascii=False, allow_nan=False)
    except ConfigError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"The JSON schema is not JSON: {error}.") from error
    _require(len(text) <= MAX_CHARACTERS, f"The JSON schema is longer than {MAX_CHARACTERS} characters")
    return Format(JSON_SCHEMA, text, lenient)


def schema_term(schema: Any, lenient: bool = False) -> str:
    """A JSON schema as a term of a Lark grammar: `start: "<a>" TERM "</a>"`. ConfigError if it cannot be used."""
    return _term(_schema(schema, lenient))


def format_term(spec: Mapping[str, Any] | None) -> str:
    """A response format as such a term; empty where any text is allowed."""
    form = None if spec is None else _response_format(spec)
    return "" if form is None else _term(form)


def _term(form: Format) -> str:
    wrong, problems = LLMatcher.validate_grammar_with_warnings(_source(form), limits=_limits())
    if wrong:
        raise ConfigError(f"The JSON schema cannot be used as a guide: {_reason(problems[0])}")
    return "%json " + json.dumps(json.loads(form.text) | {"x-guidance": _ONE_LINE | {"lenient": form.lenient}})


def _check_parts(schema: Any) -> None:
    for count, (depth, key, value) in enumerate(_walk(schema), start=1):
        _require(depth <= MAX_DEPTH, f"The JSON schema is nested deeper than {MAX_DEPTH} levels", "flatten it")
        _require(count <= MAX_PARTS, f"The JSON schema has more than {MAX_PARTS} parts")
        if key == "pattern" and isinstance(value, str):
            _check_pattern(value)
        elif key == "patternProperties" and isinstance(value, Mapping):
            for pattern in value:
                _check_pattern(str(pattern))


def _walk(schema: Any) -> Iterator[tuple[int, str, Any]]:
    """Every value in a schema, with its depth and its key, outermost first."""
    stack: list[tuple[int, str, Any]] = [(1, "", schema)]
    while stack:
        depth, key, value = stack.pop()
        yield depth, key, value
        if isinstance(value, Mapping):
            stack += [(depth + 1, str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list | tuple):
            stack += [(depth + 1, "", inner) for inner in value]


def _regex(pattern: Any) -> Format:
    _require(isinstance(pattern, str) and pattern, "The regular expression is not a text of at least one character")
    _check_pattern(pattern)
    return Format(REGEX, pattern)


def _check_pattern(pattern: str) -> None:
    _require(len(pattern) <= MAX_PATTERN, f"A regular expression is longer than {MAX_PATTERN} characters")
    counts = f"A regular expression counts up to more than {MAX_REPEATS} repetitions"
    _require(_expanded_size(pattern) <= MAX_REPEATS, counts, "use + or *")


def _expanded_size(pattern: str) -> int:
    """The size of a pattern with its counted repetitions written out; nested ones multiply."""
    sizes, last = [0], 0  # of each open group so far; of the latest part in the innermost
    for part, low, high in _PARTS.findall(pattern):
        if part == "(":
            sizes, last = [*sizes, 0], 0
            continue
        if part == ")" and len(sizes) > 1:
            last = sizes.pop()
        elif low or high:  # the latest part is repeated; one repetition is counted already
            more = last * (max(int(low[:9] or 0), int(high[:9] or 0), 1) - 1)
            sizes[-1], last = sizes[-1] + more, last + more
            continue
        else:
            last = 1
        sizes[-1] += last
    return sum(sizes)


def _grammar(text: Any) -> Format:
    _require(isinstance(text, str) and text.strip(), "The grammar is not a text of at least one rule")
    _require(len(text) <= MAX_CHARACTERS, f"The grammar is longer than {MAX_CHARACTERS} characters")
    return Format(GRAMMAR, text)


def _choice(choices: Any) -> Format:
    several = isinstance(choices, list | tuple) and choices and all(isinstance(c, str) and c for c in choices)
    _require(several, "The choices are not a list of texts", 'give one such as ["yes", "no"]')
    _require(len(choices) <= MAX_CHOICES, f"There are more than {MAX_CHOICES} choices")
    return _grammar("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(choices)))


def _require(condition: Any, problem: str, remedy: str = "make it smaller") -> None:
    if not condition:
        raise ConfigError(f"{problem}; {remedy}.")


# ---------------------------------------------------------------- compiling

CACHED_GUIDES = 64  # compiled guides kept per tokenizer
# One spelling, on one line, as most models write it: more tokens are forced, and no model loops on whitespace.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


def _limits() -> LLParserLimits:
    """About 0.1 s for compiling and 0.01 s for each step."""
    return LLParserLimits(
        initial_lexer_fuel=2_000_000,
        step_lexer_fuel=150_000,
        step_max_items=10_000,
        max_items_in_row=500,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,  # the request's content does not belong in a log
    )


def _source(form: Format) -> str:
    """A form in llguidance's own notation."""
    if form.kind == GRAMMAR:
        return LLMatcher.grammar_from_lark(form.text)
    if form.kind == REGEX:
        return LLMatcher.grammar_from_regex(form.text)
    overrides: Any = _ONE_LINE | {"lenient": form.lenient}
    return LLMatcher.grammar_from_json_schema(form.text, overrides=overrides)


def _reason(error: str) -> str:
    """llguidance's error on one line, without the grammar that it repeats."""
    return " ".join(error.partition("\n<")[0].split())[:400]


def guide_for(
    spec: Mapping[str, Any] | None, tokenizer: Any, vocabulary: int | None = None, ends: frozenset[int] = frozenset()
) -> Guide | None:
    """The compiled guide for a form; None where any text is allowed.

    `vocabulary` is the model's vocabulary size, where that exceeds its tokenizer's; `ends` are end tokens besides the
    tokenizer's own.
    """
    form = format_of(spec)
    if form is None:
        return None
    with _LOCK:
        compilers = _COMPILERS.setdefault(tokenizer, {})
        size = max(vocabulary or 0, tokenizer.vocab_size)
        ends = frozenset(end for end in tokenizer.eos_ids | ends if end < size)
        if (size, ends) not in compilers:
            compilers[size, ends] = Compiler(tokenizer, size, ends)
        return compilers[size, ends].guide(form)


class Compiler:
    """Compiles forms for one vocabulary, each once; the least recently used are dropped."""

    def __init__(self, tokenizer: Any, size: int, ends: frozenset[int]) -> None:
        if not ends:
            raise ConfigError("The model has no end token, so a guided text could not end; give it an eos token.")
        self.size, self.ends = size, ends
        self.eos = tokenizer.eos_id if tokenizer.eos_id in ends else min(ends)  # the end token that is drafted
        self.tokens = LLTokenizer(_TokenizerView(tokenizer, size, ends), eos_token=sorted(ends))
        self.guides: OrderedDict[Format, Guide] = OrderedDict()

    def guide(self, form: Format) -> Guide:
        if form not in self.guides:
            self.guides[form] = Guide(form, self)
            if len(self.guides) > CACHED_GUIDES:
                self.guides.popitem(last=False)
        self.guides.move_to_end(form)
        return self.guides[form]


class _TokenizerView(TokenizerWrapper):
    """A tokenizer with the interface that llguidance expects."""

    def __init__(self, tokenizer: Any, size: int, ends: frozenset[int]) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = min(ends), tokenizer.bos_id
        spelled = [tokenizer.id_to_bytes(token) for token in range(size)]
        silent = {token for token in range(size) if tokenizer.is_special(token) or not spelled[token]}
        self.special_token_ids = sorted(silent | ends)  # no grammar matches these as text
        self.tokens = [text or b"<nothing %d>" % token for token, text in enumerate(spelled)]
        self._tokenizer = proxy(tokenizer)  # a strong reference would keep its entry in `_COMPILERS` alive

    def __call__(self, text: str | bytes) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))
        return ids


_LOCK = threading.Lock()
_COMPILERS: WeakKeyDictionary[Any, dict[tuple[int, frozenset[int]], Compiler]] = WeakKeyDictionary()


class Guide:
    """A form compiled for one vocabulary."""

    def __init__(self, form: Format, compiler: Compiler) -> None:
        self.form, self.size, self.ends, self.eos = form, compiler.size, compiler.ends, compiler.eos
        self._tokens = compiler.tokens
        try:
            self._start = self.new_grammar()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"The {form.kind} cannot be understood: {error}.") from error
        if self._start.is_error():
            raise ConfigError(f"The {form.kind} cannot be used as a guide: {_reason(self._start.get_error())}")
        if not GrammarState(self, self.new_grammar()).mask([]).any():
            raise ConfigError(f"The {form.kind} allows no text at all; loosen it.")

    def new_grammar(self) -> LLMatcher:
        """The grammar at its start. Copies of an LLMatcher share lexer states and their limit; a new one does not."""
        return LLMatcher(self._tokens, _source(self.form), log_level=0, limits=_limits())

    def matcher(self) -> GuideMatcher:
        """For one sequence. The judge's grammar is new: its limits must not depend on what other requests used up."""
        return GuideMatcher(GrammarState(self, self.new_grammar()), GrammarState(self, self._start.deep_copy()))


# ---------------------------------------------------------------- matching


class GuideMatcher:
    """A guide applied to one sequence (`types.Matcher`), with separate states for the judge and for drafting."""

    def __init__(self, judge: GrammarState, drafting: GrammarState) -> None:
        self.judge, self.drafting = judge, drafting

    def allows(self, generated: list[int], token: int) -> bool:
        return self.judge.move_to(generated) and self.judge.follow([token]) == 1

    def mask(self, generated: list[int], guess: bool = False) -> Tensor:
        """[V] bool"""
        return (self.drafting if guess else self.judge).mask(generated)

    def complete(self, generated: list[int]) -> bool:
        return self.judge.complete(generated)

    def follow(self, generated: list[int], tokens: list[int]) -> int:
        return self.drafting.follow(tokens) if tokens and self.drafting.move_to(generated) else 0

    def forced(self, generated: list[int], most: int) -> list[int]:
        """Tokens that are the only ones allowed, or spell bytes that are the only ones allowed."""
        tokens: list[int] = []
        while len(tokens) < most and self.drafting.move_to(generated + tokens):
            more = self.drafting.forced()
            tokens += more
            if not more or tokens[-1] in self.drafting.guide.ends:
                break
        return tokens[:most]


class GrammarState:
    """A grammar's state after some tokens. For other tokens it rolls back to their common prefix and goes on there."""

    def __init__(self, guide: Guide, grammar: LLMatcher) -> None:
        self.guide, self.grammar = guide, grammar
        self.consumed: list[int] = []

    def move_to(self, generated: list[int]) -> bool:
        """Consume exactly these tokens; False if the guide forbids this text, or if it contains an end token."""
        shared = common_prefix(self.consumed, generated)
        if not self.guide.ends.isdisjoint(generated[shared:]):
            return False
        if self.grammar.is_error() or (shared < len(self.consumed) and not self._roll_back(shared)):
            self.grammar, self.consumed, shared = self.guide.new_grammar(), [], 0
        if shared < len(generated):
            more = generated[shared:]
            self.consumed = self.consumed + more[: self.grammar.try_consume_tokens(more)]
        return len(self.consumed) == len(generated) and not self.grammar.is_error()

    def _roll_back(self, length: int) -> bool:
        count = len(self.consumed) - length
        self.consumed = self.consumed[:length]
        return bool(self.grammar.rollback(count))

    def mask(self, generated: list[int]) -> Tensor:
        """[V] bool; all False after a forbidden text, and where the grammar exceeds its limits."""
        nothing = torch.zeros(self.guide.size, dtype=torch.bool)
        if not self.move_to(generated):
            return nothing
        bits = np.frombuffer(self.grammar.compute_bitmask(), np.uint8)
        if self.grammar.is_error():
            return nothing
        allowed = torch.from_numpy(np.unpackbits(bits, count=self.guide.size, bitorder="little")).bool()
        if not self.grammar.is_accepting():
            allowed[list(self.guide.ends)] = False
        return allowed

    def complete(self, generated: list[int]) -> bool:
        """Whether the text may end here, or has ended."""
        return self.move_to(generated[: self._first_end(generated)]) and bool(self.grammar.is_accepting())

    def follow(self, tokens: list[int]) -> int:
        """How many of these tokens may come next; an end token only where the text is complete."""
        end = self._first_end(tokens)
        valid = int(self.grammar.validate_tokens(tokens[:end])) if end else 0
        if valid == len(tokens) or valid < end:
            return valid
        return valid + self.complete(self.consumed + tokens[:end])

    def _first_end(self, tokens: list[int]) -> int:
        return next((i for i, token in enumerate(tokens) if token in self.guide.ends), len(tokens))

    def forced(self) -> list[int]:
        """The tokens that must come next: the end of a complete text, or bytes without an alternative."""
        if self.grammar.is_accepting():
            return [self.guide.eos] if self.grammar.is_stopped() else []
        tokens: list[int] = self.grammar.compute_ff_tokens()
        if tokens or not self.grammar.compute_ff_bytes():
            return tokens
        allowed = self.mask(self.consumed).nonzero().flatten()
        return allowed.tolist() if allowed.numel() == 1 else []
