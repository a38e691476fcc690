"""From logits to choices: the target's own decision at every node, and nothing else.

The promise: a choice is a pure function of (logits, parameters, seed, position, the tokens before it). It does not
depend on drafts, batches, threads or earlier calls, so plain and speculative decoding make the same choices. A guide
has the last word about what may be chosen; top-k, top-p and min-p then filter what it leaves.

At temperature 0 the choice is the argmax, lowest id first on ties. Above it, the choice is
`argmax(logits / T + g)` with Gumbel noise g hashed from (seed, position, token): an exact draw from the softmax
that everybody who knows the seed can repeat, drafters included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ConfigError
from ..types import Sequence, TokenLogprob

# What a random number is for. Numbers for different purposes are independent.
CHOICE, DRAFT, COIN, RESIDUAL = range(4)

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # splitmix64's constants
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# The largest g that a 32-bit uniform can give: no token further below the leader than this can win.
_REACH = 14.0  # P(noise > 14) is 8e-7; guesses may miss what the target's choice must not
_HIGHEST_NOISE = -math.log(-math.log(1 - 0.5 / 2**32))


# ---------------------------------------------------------------- keyed randomness


def key(seed: int, position: int, purpose: int, round: int = 0) -> int:
    """64 well-mixed bits for one place in one sequence's stream of randomness."""
    state = seed & _MASK
    for word in (purpose, round, position):
        state = _mix((state ^ (word & _MASK)) + _STEP)
    return state


def uniform(key: int) -> float:
    """A number in (0, 1); never 0, never 1."""
    return ((_mix(key + _STEP) >> 32) + 0.5) / 2**32


def gumbel(key: int | Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise for each of these tokens. tokens [C] int64 -> [C] float64, the same for a token in any company.

    Many keys at once are [R, 1] int64, each with its 64 bits, and give [R, C].
    """
    z = tokens * _signed(_STEP) + (key if isinstance(key, Tensor) else _signed(key))
    z = (z ^ _shift(z, 30)) * _signed(_MIX[0])
    z = (z ^ _shift(z, 27)) * _signed(_MIX[1])
    bits = _shift(z ^ _shift(z, 31), 32)  # [C] 32 uniform bits
    return -torch.log(-torch.log((bits.double() + 0.5) / 2**32))


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MIX[0]) & _MASK
    z = ((z ^ (z >> 27)) * _MIX[1]) & _MASK
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    """The int64 with these 64 bits: torch has no unsigned arithmetic, but its products wrap the same way."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> by) & ((1 << (64 - by)) - 1)


# ---------------------------------------------------------------- what the parameters do to logits


def adjust(logits: Tensor, seq: Sequence, emitted: list[int]) -> Tensor:
    """Bias, penalties and bans that hold after seq.tokens + emitted. logits [V] -> [V], a copy if anything changes."""
    params = seq.params
    if not adjusts(seq):
        return logits
    logits = logits.clone()
    for token, bias in params.logit_bias.items():
        if 0 <= token < logits.shape[-1]:
            logits[token] += bias
    _penalise(logits, seq, emitted)
    if len(seq.tokens) - seq.prompt_len + len(emitted) < params.min_tokens:
        logits[[end for end in sorted(seq.ends) if end < logits.shape[-1]]] = -math.inf
    history = seq.tokens + emitted if seq.bad_words else []
    for *before, last in seq.bad_words:
        if not before or history[-len(before) :] == before:
            logits[last] = -math.inf
    return logits


def adjusts(seq: Sequence) -> bool:
    """Whether the logits themselves change with what was said before: bias, penalties, bans, a guide."""
    p = seq.params
    return bool(
        p.logit_bias
        or seq.matcher is not None
        or p.min_tokens
        or seq.bad_words
        or p.repetition_penalty != 1
        or p.presence_penalty
        or p.frequency_penalty
    )


def _penalise(logits: Tensor, seq: Sequence, emitted: list[int]) -> None:
    """Repetition counts prompt and output, as in transformers; presence and frequency only output, as at OpenAI."""
    params = seq.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(seq.tokens) | set(emitted)))
        value = logits[seen]
        logits[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = seq.generated + emitted
        ids, counts = torch.unique(torch.tensor(output, dtype=torch.long), return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)


def candidates(logits: Tensor, seq: Sequence) -> tuple[Tensor, Tensor]:
    """What temperature, top-k, top-p and min-p leave over: ids [C] ascending, their logits / T [C] float64."""
    params = seq.params
    scores = logits.double() / params.temperature  # [V]
    if 0 < params.top_k < scores.numel():
        ids = torch.nonzero(scores >= torch.topk(scores, params.top_k).values[-1]).flatten()
    else:
        ids = torch.nonzero(scores > -math.inf).flatten()
    if not ids.numel():
        raise ConfigError(
            "The parameters ban every token, so none can be chosen; ban fewer by logit_bias or bad_words."
        )
    scores = scores[ids]
    if params.top_p < 1:
        ordered, order = torch.sort(scores, descending=True, stable=True)
        mass = torch.softmax(ordered, 0).cumsum(0)
        enough = int((mass < params.top_p).sum()) + 1  # the smallest set with that much mass
        kept = order[:enough].sort().values
        ids, scores = ids[kept], scores[kept]
    if params.min_p > 0:
        kept = torch.nonzero(scores >= scores.max() + math.log(params.min_p)).flatten()
        ids, scores = ids[kept], scores[kept]
    return ids, scores


# ---------------------------------------------------------------- choices


def choose(logits: Tensor, seq: Sequence, emitted: list[int]) -> int:
    """The token that comes after seq.tokens + emitted; -1 where its guide leaves none. logits [V]."""
    logits, position = adjust(logits, seq, emitted), len(seq.tokens) + len(emitted)
    if seq.matcher is None:
        return _choose(logits, seq, position)
    said = seq.generated + emitted
    if not _filters(seq) and bool(logits.max() > -math.inf):
        token = _choose(logits, seq, position)
        if seq.matcher.allows(said, token):  # the best of all is the best of those that are allowed: no need of a mask
            return token
    logits = _masked(logits, seq.matcher.mask(said))
    return _choose(logits, seq, position) if bool(logits.max() > -math.inf) else -1


def _choose(logits: Tensor, seq: Sequence, position: int) -> int:
    """The choice among all of these, as they are. logits [V]."""
    if seq.params.greedy:
        return int(logits.argmax())
    ids, scores = candidates(logits, seq)
    place = key(seq.seed, position, CHOICE)
    leader = int(scores.argmax())
    # A token can only win if even the highest possible noise would lift it over the leader: hash no others.
    floor = scores[leader] + gumbel(place, ids[leader : leader + 1])[0] - _HIGHEST_NOISE
    hopeful = torch.nonzero(scores >= floor).flatten()
    ids, scores = ids[hopeful], scores[hopeful]
    return int(ids[(scores + gumbel(place, ids)).argmax()])


def _filters(seq: Sequence) -> bool:
    """Whether what is left to choose from depends on all of it together."""
    p = seq.params
    return not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)


def _masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """What is not allowed ([V] bool) cannot be chosen. logits [V] -> [V]; a draft model may have padded V otherwise."""
    padding = logits.shape[-1] - allowed.shape[-1]
    if padding:
        allowed = torch.nn.functional.pad(allowed, (0, padding))
    return logits.masked_fill(~allowed.to(logits.device), -math.inf)


def ranked(logits: Tensor, seq: Sequence, emitted: list[int], width: int, spare: int = 0) -> list[tuple[int, float]]:
    """The `width` likeliest choices under this seed's noise, best first, with a confidence each: for drafting trees.

    A drafter that ranks by *noised* scores proposes what the target, under the same noise, is likely to choose. Up to
    `spare` more follow where they are found on the way: no noise is hashed for their sake.
    """
    logits = _guess_within(adjust(logits, seq, emitted), seq, emitted)
    if seq.params.greedy:
        confidence, ids = torch.softmax(logits.float(), -1).topk(min(width + spare, logits.shape[-1]))
    else:
        names, scores = _hopeful(logits, seq, width)
        noised = scores + gumbel(key(seq.seed, len(seq.tokens) + len(emitted), CHOICE), names)
        confidence, order = torch.softmax(noised, 0).topk(min(width + spare, names.numel()))
        ids = names[order]
    return list(zip(ids.tolist(), confidence.tolist(), strict=True))


def _guess_within(logits: Tensor, seq: Sequence, emitted: list[int]) -> Tensor:
    """What the guide allows after a guessed path; where that is nothing, the guess is lost anyway. logits [V] -> [V]"""
    if seq.matcher is None:
        return logits
    masked = _masked(logits, seq.matcher.mask(seq.generated + emitted, guess=True))
    return masked if bool(masked.max() > -math.inf) else logits


def _hopeful(logits: Tensor, seq: Sequence, width: int) -> tuple[Tensor, Tensor]:
    """The candidates that a guess looks at: ids [C], their logits / T [C]. Where nothing is filtered, no others are."""
    if not _filters(seq):
        near = torch.nonzero(logits >= logits.max() - _REACH * seq.params.temperature).flatten()
        if near.numel() >= width:
            return near, logits[near].double() / seq.params.temperature
    return _within_reach(*candidates(logits, seq), width)


def _within_reach(names: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The candidates [C] that noise can bring to the front but once in a million times; noise for all takes longest."""
    near = scores >= scores.max() - _REACH
    return (names[near], scores[near]) if int(near.sum()) >= width else (names, scores)


def law(logits: Tensor, seq: Sequence, emitted: list[int]) -> Tensor:
    """The distribution that `choose` draws from. [V] float64; one-hot at temperature 0; all zeros: nothing to say."""
    logits = adjust(logits, seq, emitted)
    p = torch.zeros(logits.shape[-1], dtype=torch.float64)
    if seq.matcher is not None:
        logits = _masked(logits, seq.matcher.mask(seq.generated + emitted))
        if not bool(logits.max() > -math.inf):
            return p
    if seq.params.greedy:
        p[logits.argmax()] = 1
    else:
        ids, scores = candidates(logits, seq)
        p[ids] = torch.softmax(scores, 0)
    return p


def draw(p: Tensor, key: int) -> int:
    """One token from the weights p [V], decided by the key alone; -1 if there are none."""
    ids = torch.nonzero(p > 0).flatten()
    if not ids.numel():
        return -1
    return int(ids[(torch.log(p[ids].double()) + gumbel(key, ids)).argmax()])


def logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """log p of a token under the raw logits [V], with the `top` likeliest beside it."""
    logp = torch.log_softmax(logits.float().cpu(), -1)
    values, ids = logp.topk(min(top, logp.numel()))
    return TokenLogprob(token, float(logp[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))


@dataclass
class Target:
    """The target's voice over one sequence's rows: row 0 is the root, row i+1 is node i."""

    seq: Sequence
    logits: Tensor  # [n+1, V]
    choices: list[int]  # [n+1] what was chosen at each row for the whole step at once; -1: nothing yet

    def choose(self, row: int, emitted: list[int]) -> int:
        chosen = self.choices[row]
        return chosen if chosen >= 0 else choose(self.logits[row].cpu(), self.seq, emitted)

    def law(self, row: int, emitted: list[int]) -> Tensor:
        return law(self.logits[row].cpu(), self.seq, emitted)


@dataclass
class Dice:
    """Keyed randomness for the rules that need coins: never the same number twice in one sequence.

    Keys hold the root's position as the round. A step may throw coins for positions it does not reach in the end
    (`block` looks at all of them); the next step must not see those numbers again.
    """

    seq: Sequence
    flips: dict[int, bool] = field(default_factory=dict)  # what fell, for the trace
    draws: dict[int, int] = field(default_factory=dict)

    def flip(self, place: int, chance: float) -> bool:
        """True with this chance; one coin for each place (depth in the tree)."""
        fell = uniform(key(self.seq.seed, place, COIN, len(self.seq.tokens))) < chance
        self.flips[place] = fell
        return fell

    def draw(self, place: int, p: Tensor) -> int:
        """One token from the weights p [V]."""
        token = draw(p, key(self.seq.seed, place, RESIDUAL, len(self.seq.tokens)))
        self.draws[place] = token
        return token


def widened(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits of the first ids alone [R, N] as those of all [R, V]: the others are as unlikely as can be said.

    Not -inf: where something else forbids all of the first ids, there must be something left to choose.
    """
    missing = vocabulary - logits.shape[-1]
    return logits if not missing else torch.nn.functional.pad(logits, (0, missing), value=-1e30)
