"""Draft what followed before: the places where the text stood as it stands now vote on what comes next.

It promises a chain (or, with `tree`, a best-first tree) with a survival for every node, in time and memory that are
bounded per token. It learns from the request itself, the text that it is made from (`seq.source`) and from responses
that other requests finished; it knows nothing of models, and a response that nobody has seen anything like gets an
empty tree. Responses are shared by all requests of an engine: `suffix_shared_tokens=0` keeps strangers apart.

Why neither a suffix tree nor an automaton: both keep exact counts for every depth and pay for it with a chain of
updates per token, and with most of their memory for contexts that never come back. A draft needs only the latest few
places that agree with the end of the text, so places are filed under their last 1, 2 and 4 tokens in chains from the
latest backwards (as deflate does), and the match lengths and the counts are read off the text itself.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ..errors import ConfigError
from ..types import Draft, Sequence, Tree, chain
from . import Drafter, DraftRequest, Traits, Workspace, register

GRAMS = (4, 2, 1)  # sizes under which a place is filed; longest first, so that the best matches are found first
PLACES = 12  # places that vote, at most, in each text: the latest are the best, more were not better
LONGEST = 16  # a match is not followed back further than this
GAIN = 2.0  # a match that is one token longer has twice the vote
STRANGER = 0.1  # the vote of a place in another request's response, against 1 in the request itself
DOUBT = 1.5  # votes for "something else": DOUBT / m of a vote when the longest match has m tokens
BORDER = -1  # ends a response among others; no token is negative, so no match and no draft crosses it
KEPT = 4096  # requests remembered at once; only a caller that forgets `end` ever meets this bound


@register("suffix")
class Suffix(Drafter):
    """Options: `suffix_min_survival` (0.1) ends a path that is unlikely to be reached, `tree` (False) lets it branch,
    `suffix_shared_tokens` (200000) bounds what is remembered of finished responses. vLLM's
    `suffix_decoding_min_token_prob` works too."""

    traits = Traits(
        options=("suffix_min_survival", "suffix_decoding_min_token_prob", "suffix_shared_tokens", "tree"), dry=True,
        auto=lambda workspace: True,
    )  # fmt: skip

    def __init__(self, space: Workspace) -> None:
        self._floor = float(space.option("suffix_min_survival", "suffix_decoding_min_token_prob", default=0.1))
        if not 0 <= self._floor <= 1:
            raise ConfigError(f"suffix_min_survival is {self._floor:g}, but it is a chance: choose from 0 to 1.")
        self._branching = bool(space.option("tree", default=False))
        self._requests: dict[int, Text] = {}
        self._shared = Shared(int(space.option("suffix_shared_tokens", default=200_000)))

    def begin(self, seq: Sequence) -> None:
        """Remember that it has come; its text is read when somebody wants a draft."""
        if seq.id not in self._requests:
            self._remember(seq)

    def draft(self, request: DraftRequest) -> Draft:
        floor, pairs = max(self._floor, request.stop_below), zip(request.seqs, request.budgets, strict=True)
        return Draft.pack(self._draft(seq, budget, floor) for seq, budget in pairs)

    def end(self, seq: Sequence) -> None:
        """Hand the response to all, unless nothing is to be learnt from it; a second `end` finds nothing to give."""
        if self._requests.pop(seq.id, None) is not None and seq.params.learn:
            self._shared.add(seq.generated)

    def _draft(self, seq: Sequence, room: int, floor: float) -> Tree:
        if room <= 0:
            return chain([])
        text = self._read(seq)
        voters = text.voters(seq.tokens, room)
        if text.source is not None:
            voters += text.source.voters(seq.tokens, room)
        for text in self._shared.texts:
            voters += text.voters(seq.tokens, room, shared=True)
        voters.sort(key=lambda voter: -voter.length)  # stable: of equals, our own come first
        source = f"{self.name}:shared" if voters and voters[0].shared else self.name
        tree = grow(voters, room, floor, seq.ends) if self._branching else follow(voters, room, floor, seq.ends)
        return tree._replace(source=source)

    def _read(self, seq: Sequence) -> Text:
        """The request's text, up to date with its tokens, which are the truth."""
        text = self._requests.get(seq.id)
        if text is None or not text.follow(seq.tokens):
            text = self._remember(seq)
            text.follow(seq.tokens)
        return text

    def _remember(self, seq: Sequence) -> Text:
        text = self._requests[seq.id] = Text()
        if seq.source:
            text.source = Text()
            text.source.extend([*seq.source, BORDER])  # what follows its end is not known
        if len(self._requests) > KEPT:
            del self._requests[next(iter(self._requests))]
        return text


class Voter(NamedTuple):
    """A place where the text once stood as it stands now."""

    length: int  # how many tokens before the place equal the end of the text
    weight: float
    ahead: list[int]  # what came next there
    shared: bool  # in another request's response


class Text:
    """Tokens, and for each size in GRAMS a chain through all places that follow the same n tokens, latest first.

    Places are filed when somebody looks for one: a text that nobody drafts from costs nothing.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.source: Text | None = None  # the text that this one is made from
        self._origin: list[int] | None = None  # the sequence's own list, which only grows
        # Filed under a hash, not under the tokens: it takes half the memory, and every match is measured anyway.
        self._latest: list[dict[int, int]] = [{} for _ in GRAMS]
        self._earlier = [array("i") for _ in GRAMS]  # [place] the place before it in its chain; -1 ends the chain

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens

    def _file(self) -> None:
        """A place is filed when something follows it, so the end of the text never finds itself."""
        tokens = self.tokens
        for n, latest, earlier in zip(GRAMS, self._latest, self._earlier, strict=True):
            for place in range(len(earlier), len(tokens)):
                key = hash(tuple(tokens[max(place - n, 0) : place]))
                earlier.append(latest.get(key, -1))
                latest[key] = place

    def follow(self, tokens: list[int]) -> bool:
        """Bring this text up to date with a sequence's tokens; False when it is not the beginning of them."""
        known = len(self.tokens)
        # A list that only grows is known by itself and by where we stopped; any other is compared.
        since = max(known - 8, 0) if tokens is self._origin else 0
        if tokens[since:known] != self.tokens[since:]:
            return False
        self._origin = tokens
        self.extend(tokens[known:])
        return True

    def voters(self, tokens: list[int], room: int, shared: bool = False) -> list[Voter]:
        """The latest PLACES that agree with the last 4 tokens; if there are fewer, with the last 2; with the last."""
        self._file()
        vote = STRANGER if shared else 1.0
        found: dict[int, Voter] = {}
        for n, latest, earlier in zip(GRAMS, self._latest, self._earlier, strict=True):
            place = latest.get(hash(tuple(tokens[-n:])), -1)
            while place >= 0 and len(found) < PLACES:
                if place not in found and (length := self._match(place, tokens)) >= n:
                    found[place] = Voter(length, vote * GAIN**length, self._ahead(place, room), shared)
                place = earlier[place]
        return list(found.values())

    def _match(self, place: int, tokens: list[int]) -> int:
        """How many tokens before the place equal the last ones. Most differ soon: no slices are made for them."""
        mine, length, most = self.tokens, 0, min(place, len(tokens), LONGEST)
        while length < most and mine[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _ahead(self, place: int, room: int) -> list[int]:
        """What came next. Where the text ends it goes on into itself: after "abab" comes "abab"."""
        ahead = self.tokens[place : place + room]
        return ahead if len(ahead) == room else (ahead * (room // len(ahead) + 1))[:room]


class Shared:
    """Finished responses in two generations of half the limit: when the younger is full, the older is dropped."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self.texts = [Text(), Text()]  # younger, older

    def add(self, response: list[int]) -> None:
        response = response[-(self._half - 1) :] if self._half > 1 else []
        if not response:
            return
        if len(self.texts[0].tokens) + len(response) >= self._half:
            self.texts = [Text(), self.texts[0]]
        self.texts[0].extend([*response, BORDER])


def follow(voters: list[Voter], room: int, floor: float, ends: frozenset[int]) -> Tree:
    """The likeliest token, then the likeliest after it: what `grow` finds where nothing may branch, and no heap."""
    tokens: list[int] = []
    survival: list[float] = []
    alive, group = 1.0, voters
    while group and len(tokens) < room:
        depth = len(tokens)
        votes: dict[int, float] = {}
        for voter in group:
            token = voter.ahead[depth]
            votes[token] = votes.get(token, 0.0) + voter.weight
        votes.pop(BORDER, None)
        if not votes:
            break
        best = max(votes, key=votes.__getitem__)
        alive *= votes[best] / (sum(votes.values()) + doubt(group, depth))
        if alive < floor:
            break
        tokens.append(best)
        survival.append(alive)
        group = [] if best in ends else [voter for voter in group if voter.ahead[depth] == best]
    return chain(tokens, survival)


def doubt(group: list[Voter], depth: int) -> float:
    """Votes for something that nobody says; the voters come sorted."""
    return DOUBT * GAIN ** group[0].length / (group[0].length + depth)


def grow(voters: list[Voter], room: int, floor: float, ends: frozenset[int]) -> Tree:
    """At most `room` nodes, likeliest first. A child is never likelier than its parent, so parents precede children."""
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    heap: list[tuple[float, int, int, int, int, list[Voter]]] = []
    node, alive, depth, group = -1, 1.0, 0, voters
    order = count()  # of equals, the one that was found first
    while len(tokens) < room:
        for share, token, part in split(group, depth):
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
            group = []  # nothing follows an end
    return Tree(tokens, parents, survival)


def split(group: list[Voter], depth: int) -> list[tuple[float, int, list[Voter]]]:
    """What these voters say at this depth, likeliest first: (share of the votes, token, who said so)."""
    if not group:
        return []
    parts: dict[int, list[Voter]] = {}
    for voter in group:
        parts.setdefault(voter.ahead[depth], []).append(voter)
    parts.pop(BORDER, None)
    votes = {token: sum(voter.weight for voter in part) for token, part in parts.items()}
    total = sum(votes.values()) + doubt(group, depth)
    return sorted(((votes[token] / total, token, part) for token, part in parts.items()), key=lambda p: -p[0])
