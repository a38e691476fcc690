"""Suffix matching: drafts what followed earlier occurrences of the current context, in this and other requests.

It drafts a chain (or, with `tree`, a best-first tree) with a survival for every node; time and memory per token are
bounded. Earlier occurrences are searched in the request's own tokens, in the text that it is made from (`seq.source`)
and in the finished responses of all requests of the engine; they vote on the next token, weighted by the length of the
match. Without a match the draft is empty. It uses no model. `suffix_shared_tokens=0` keeps requests apart.

Why neither a suffix tree nor an automaton: both keep exact counts for every depth, at the price of a chain of updates
per token and of memory for contexts that never return. A draft needs only the latest few positions that match the end
of the text. So positions are indexed under the hash of their last 1, 2 and 4 tokens, in chains from the latest
backwards (as in deflate), and match lengths and counts are read off the text itself.
"""

from __future__ import annotations

import math
from array import array
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ..errors import ConfigError
from ..types import Draft, Sequence, Tree, chain
from . import Drafter, DraftRequest, Traits, Workspace, register

GRAMS = (4, 2, 1)  # n-gram sizes under which a position is indexed; longest first, so that the best matches come first
MAX_MATCHES = 12  # in each text, the latest ones; more were not better
MAX_LENGTH = 16  # tokens of a match that are compared
GAIN = 2.0  # a match that is one token longer has twice the weight
SHARED_WEIGHT = 0.1  # weight of a match in another request's response, relative to one in the request itself
DOUBT = 2.7  # weight of "another token": DOUBT / m ** 1.25 of a match when the longest match has m tokens, as measured
SEPARATOR = -1  # ends a response among others; no token is negative, so no match and no draft crosses it
MAX_REQUESTS = 4096  # kept at once; only a caller that never calls `end` reaches this bound


@register("suffix")
class Suffix(Drafter):
    """Options: `suffix_min_survival` (0.1) ends a path that is unlikely to be reached, `tree` (False) lets it branch,
    `suffix_shared_tokens` (200000) bounds the finished responses kept; vLLM's `suffix_decoding_min_token_prob`."""

    traits = Traits(
        options=("suffix_min_survival", "suffix_decoding_min_token_prob", "suffix_shared_tokens", "tree"),
        dry=True, late=True, watches=False,
        auto=lambda workspace: True,
    )  # fmt: skip

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self._floor = float(space.option("suffix_min_survival", "suffix_decoding_min_token_prob", default=0.1))
        if not 0 <= self._floor <= 1:
            raise ConfigError(f"suffix_min_survival is {self._floor:g}, but it is a probability: choose from 0 to 1.")
        self._branching = bool(space.option("tree", default=False))
        self._requests: dict[int, IndexedText] = {}
        self._shared = SharedResponses(int(space.option("suffix_shared_tokens", default=200_000)))

    def begin(self, seq: Sequence) -> None:
        if seq.id not in self._requests:
            self._open(seq)  # its tokens are indexed with the first draft

    def draft(self, request: DraftRequest) -> Draft:
        floor, pairs = max(self._floor, request.stop_below), zip(request.seqs, request.budgets, strict=True)
        return Draft.pack(self._draft(seq, budget, floor) for seq, budget in pairs)

    def end(self, seq: Sequence) -> None:
        """Share the response, unless the request forbids it; a repeated `end` shares nothing."""
        if self._requests.pop(seq.id, None) is not None and seq.params.learn:
            self._shared.add(seq.generated)

    def _draft(self, seq: Sequence, budget: int, floor: float) -> Tree:
        if budget <= 0:
            return chain([])
        own = self._synced(seq)
        matches = own.matches(seq.tokens, budget)
        if own.source is not None:
            matches += own.source.matches(seq.tokens, budget)
        for text in self._shared.texts:
            if text.tokens:
                matches += text.matches(seq.tokens, budget, shared=True)
        matches.sort(key=lambda match: -match.length)  # stable: of equal lengths, the request's own come first
        source = f"{self.name}:shared" if matches and matches[0].shared else self.name
        draft = best_tree if self._branching else best_chain
        return draft(matches, budget, floor, seq.ends)._replace(source=source)

    def _synced(self, seq: Sequence) -> IndexedText:
        """The request's text, up to date with its tokens, which are the truth."""
        text = self._requests.get(seq.id)
        if text is None or not text.sync(seq.tokens):
            text = self._open(seq)
            text.sync(seq.tokens)
        return text

    def _open(self, seq: Sequence) -> IndexedText:
        text = self._requests[seq.id] = IndexedText()
        if seq.source:
            text.source = IndexedText()
            text.source.tokens += [*seq.source, SEPARATOR]  # what follows its end is unknown
        if len(self._requests) > MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]
        return text


class Match(NamedTuple):
    """A position whose preceding tokens equal the end of the current text."""

    length: int  # how many of them
    weight: float
    ahead: list[int]  # the tokens that follow the position
    shared: bool  # in another request's response


class IndexedText:
    """Tokens, and for each size n in GRAMS a chain through all positions that follow the same n tokens, latest first.

    Indexing is deferred until matches are wanted: a text that is never drafted from costs nothing.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.source: IndexedText | None = None  # the text that this one is made from
        self._origin: list[int] | None = None  # the sequence's own list, which only grows
        # Keys are hashes, not tokens: that halves the memory, and every match is measured anyway.
        self._latest: list[dict[int, int]] = [{} for _ in GRAMS]
        self._earlier = [array("i") for _ in GRAMS]  # [position] the one before it in its chain; -1 ends the chain

    def sync(self, tokens: list[int]) -> bool:
        """Append what a sequence has added; False when this text is not a prefix of its tokens."""
        held = len(self.tokens)
        # A list that only grows is identified by itself and its last tokens; any other is compared as a whole.
        since = max(held - 8, 0) if tokens is self._origin else 0
        if tokens[since:held] != self.tokens[since:]:
            return False
        self._origin = tokens
        self.tokens += tokens[held:]
        return True

    def matches(self, tokens: list[int], budget: int, shared: bool = False) -> list[Match]:
        """The latest MAX_MATCHES positions after the last 4 of these tokens; if there are fewer, the last 2 or 1."""
        self._index()
        weight = SHARED_WEIGHT if shared else 1.0
        matches: dict[int, Match] = {}
        for n, latest, earlier in zip(GRAMS, self._latest, self._earlier, strict=True):
            position = latest.get(hash(tuple(tokens[-n:])), -1)
            while position >= 0 and len(matches) < MAX_MATCHES:
                if position not in matches and (length := self._match_length(position, tokens)) >= n:
                    matches[position] = Match(length, weight * GAIN**length, self._ahead(position, budget), shared)
                position = earlier[position]
        return list(matches.values())

    def _index(self) -> None:
        """A position is indexed once a token stands there, so the end of the text never finds itself."""
        tokens = self.tokens
        if len(self._earlier[0]) == len(tokens):
            return
        for n, latest, earlier in zip(GRAMS, self._latest, self._earlier, strict=True):
            for position in range(len(earlier), len(tokens)):
                key = hash(tuple(tokens[max(position - n, 0) : position]))
                earlier.append(latest.get(key, -1))
                latest[key] = position

    def _match_length(self, position: int, tokens: list[int]) -> int:
        """How many tokens before the position equal the last ones. Most differ soon, so no slices are made."""
        own, length, most = self.tokens, 0, min(position, len(tokens), MAX_LENGTH)
        while length < most and own[position - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _ahead(self, position: int, budget: int) -> list[int]:
        """The tokens from the position on. At the end of the text they continue into themselves, as in `ngram`."""
        ahead = self.tokens[position : position + budget]
        return ahead if len(ahead) == budget else (ahead * (budget // len(ahead) + 1))[:budget]


class SharedResponses:
    """Finished responses in two generations of half the limit: when the younger is full, the older is dropped."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2  # tokens
        self.texts = [IndexedText(), IndexedText()]  # younger, older

    def add(self, response: list[int]) -> None:
        response = response[-(self._half - 1) :] if self._half > 1 else []
        if not response:
            return
        if len(self.texts[0].tokens) + len(response) >= self._half:
            self.texts = [IndexedText(), self.texts[0]]
        self.texts[0].tokens += [*response, SEPARATOR]


def best_chain(matches: list[Match], budget: int, floor: float, ends: frozenset[int]) -> Tree:
    """The likeliest token, then the likeliest after it: `best_tree` without branches and without a heap."""
    tokens: list[int] = []
    survival: list[float] = []
    alive, group = 1.0, matches
    while group and len(tokens) < budget:
        depth = len(tokens)
        votes: dict[int, float] = {}
        for match in group:
            token = match.ahead[depth]
            votes[token] = votes.get(token, 0.0) + match.weight
        votes.pop(SEPARATOR, None)
        if not votes:
            break
        best = max(votes, key=votes.__getitem__)
        alive *= votes[best] / (sum(votes.values()) + doubt(group, depth))
        if alive < floor:
            break
        tokens.append(best)
        survival.append(alive)
        group = [] if best in ends else [match for match in group if match.ahead[depth] == best]
    return chain(tokens, survival)


def best_tree(matches: list[Match], budget: int, floor: float, ends: frozenset[int]) -> Tree:
    """At most `budget` nodes, likeliest first. A child is never likelier than its parent, so parents come first."""
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    heap: list[tuple[float, int, int, int, int, list[Match]]] = []
    node, alive, depth, group = -1, 1.0, 0, matches
    order = count()  # of equally likely nodes, the first found is taken
    while len(tokens) < budget:
        for share, token, part in children(group, depth):
            if alive * share >= floor:
                heappush(heap, (-alive * share, next(order), token, node, depth + 1, part))
        if not heap:
            break
        minus, _, token, parent, depth, group = heappop(heap)
        node, alive = len(tokens), -minus
        tokens.append(token)
        parents.append(parent)
        survival.append(alive)
        if token in ends:
            group = []
    return Tree(tokens, parents, survival)


def children(group: list[Match], depth: int) -> list[tuple[float, int, list[Match]]]:
    """The tokens of these matches at this depth, likeliest first: (probability, token, its matches)."""
    if not group:
        return []
    parts: dict[int, list[Match]] = {}
    for match in group:
        parts.setdefault(match.ahead[depth], []).append(match)
    parts.pop(SEPARATOR, None)
    votes = {token: sum(match.weight for match in part) for token, part in parts.items()}
    total = sum(votes.values()) + doubt(group, depth)
    return sorted(((votes[token] / total, token, part) for token, part in parts.items()), key=lambda p: -p[0])


def doubt(group: list[Match], depth: int) -> float:
    """The weight of a token that follows none of these matches, which come longest first."""
    matching = group[0].length + depth
    return DOUBT * GAIN ** group[0].length / math.pow(matching, 1.25)
