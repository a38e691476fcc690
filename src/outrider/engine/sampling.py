"""From logits to choices: the target's own decision at every node.

Promise: a choice is a pure function of (logits, parameters, seed, position, the tokens before it). It does not depend
on drafts, batches, threads or earlier calls, so plain and speculative decoding make the same choices. A guide masks the
adjusted logits; top-k, top-p and min-p then filter what it leaves.

At temperature 0 the choice is the argmax, lowest id first on ties. Above it, the choice is `argmax(logits / T + g)`
with Gumbel noise g hashed from (seed, position, token): an exact draw from the softmax that anyone with the seed can
repeat, drafters included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ConfigError
from ..types import Output, Sequence, TokenLogprob

# The purpose of a random number. Numbers for different purposes are independent.
CHOICE, DRAFT, COIN, RESIDUAL = range(4)

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # splitmix64's constants
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_HIGHEST_NOISE = -math.log(-math.log(1 - 0.5 / 2**32))  # the largest g that a 32-bit uniform can give
_LIKELY_NOISE = 14.0  # P(g > 14) is 8e-7: enough for a guess, not for the target's choice


# ---------------------------------------------------------------- keyed randomness


def key(seed: int, position: int, purpose: int, round: int = 0) -> int:
    """A 64-bit hash key for one use of a sequence's randomness."""
    state = seed & _MASK
    for word in (purpose, round, position):
        state = _mix((state ^ (word & _MASK)) + _STEP)
    return state


def uniform(key: int) -> float:
    """A number in (0, 1); never 0, never 1."""
    return ((_mix(key + _STEP) >> 32) + 0.5) / 2**32


def gumbel(key: int | Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise by token: tokens [C] int64 -> [C] float64. Keys [R, 1] int64 give [R, C]."""
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


def _processed(logits: Tensor, seq: Sequence, emitted: list[int]) -> Tensor:
    """The target's adjusted logits [V] after the request's own logits processors. Drafters do not call those."""
    for process in seq.params.logits_processors:
        shape = logits.shape
        try:
            logits = process(seq.generated + emitted, logits)
        except Exception as error:
            raise ConfigError(f"A logits processor failed: {type(error).__name__}: {error}.") from error
        if not isinstance(logits, Tensor) or logits.shape != shape:
            raise ConfigError(f"A logits processor must return a tensor of {shape[0]} logits.")
    return logits


def adjusts(seq: Sequence) -> bool:
    """Whether the logits are changed before anything is chosen: bias, penalties, bans, a guide."""
    return seq.params.adjusts_logits or seq.matcher is not None or bool(seq.bad_words)


def filters(seq: Sequence) -> bool:
    """Whether a choice looks at more than noise and temperature: top-k, top-p or min-p."""
    p = seq.params
    return not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)


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
    """What top-k, top-p and min-p keep: ids [C] ascending, their logits / T [C] float64."""
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
    """The token after seq.tokens + emitted; -1 where the guide allows none. logits [V]."""
    logits, position = _processed(adjust(logits, seq, emitted), seq, emitted), len(seq.tokens) + len(emitted)
    if seq.matcher is None:
        return _choose(logits, seq, position)
    generated = seq.generated + emitted
    if not filters(seq) and bool(logits.max() > -math.inf):
        token = _choose(logits, seq, position)
        if seq.matcher.allows(generated, token):  # the best of all is also the best of the allowed: no mask is needed
            return token
    logits = _masked(logits, seq.matcher.mask(generated))
    return _choose(logits, seq, position) if bool(logits.max() > -math.inf) else -1


def _choose(logits: Tensor, seq: Sequence, position: int) -> int:
    """The choice among adjusted logits [V]."""
    if seq.params.greedy:
        return int(logits.argmax())
    ids, scores = candidates(logits, seq)
    noise_key = key(seq.seed, position, CHOICE)
    leader = int(scores.argmax())
    # A token can win only if the highest possible noise lifts it over the leader: no others are hashed.
    floor = scores[leader] + gumbel(noise_key, ids[leader : leader + 1])[0] - _HIGHEST_NOISE
    reachable = torch.nonzero(scores >= floor).flatten()
    ids, scores = ids[reachable], scores[reachable]
    return int(ids[(scores + gumbel(noise_key, ids)).argmax()])


def _masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """-inf where not allowed. logits [V], allowed [V'] bool -> [V]; a draft model may pad its vocabulary further."""
    padding = logits.shape[-1] - allowed.shape[-1]
    if padding:
        allowed = torch.nn.functional.pad(allowed, (0, padding))
    return logits.masked_fill(~allowed.to(logits.device), -math.inf)


def ranked(logits: Tensor, seq: Sequence, emitted: list[int], width: int, spare: int = 0) -> list[tuple[int, float]]:
    """The `width` likeliest choices under this seed's noise, best first, with a confidence each: for drafting trees.

    A drafter that ranks by *noised* scores proposes what the target, under the same noise, is likely to choose. Up to
    `spare` more follow where they cost no further noise.
    """
    logits = adjust(logits, seq, emitted)  # [V]
    if seq.matcher is not None:
        masked = _masked(logits, seq.matcher.mask(seq.generated + emitted, guess=True))
        if bool(masked.max() > -math.inf):  # else the guess is lost anyway
            logits = masked
    if seq.params.greedy:
        confidence, ids = torch.softmax(logits.float(), -1).topk(min(width + spare, logits.shape[-1]))
    else:
        candidate_ids, scores = _likely_candidates(logits, seq, width)
        noised = scores + gumbel(key(seq.seed, len(seq.tokens) + len(emitted), CHOICE), candidate_ids)
        confidence, order = torch.softmax(noised, 0).topk(min(width + spare, candidate_ids.numel()))
        ids = candidate_ids[order]
    return list(zip(ids.tolist(), confidence.tolist(), strict=True))


def _likely_candidates(logits: Tensor, seq: Sequence, width: int) -> tuple[Tensor, Tensor]:
    """The candidates within reach of likely noise, or all if those are fewer than `width`: ids [C], logits / T [C].

    Hashing noise for a whole vocabulary would take longest.
    """
    if not filters(seq):
        near = torch.nonzero(logits >= logits.max() - _LIKELY_NOISE * seq.params.temperature).flatten()
        if near.numel() >= width:
            return near, logits[near].double() / seq.params.temperature
    ids, scores = candidates(logits, seq)
    near = scores >= scores.max() - _LIKELY_NOISE
    return (ids[near], scores[near]) if int(near.sum()) >= width else (ids, scores)


def distribution(logits: Tensor, seq: Sequence, emitted: list[int]) -> Tensor:
    """The distribution that `choose` draws from: [V] float64; one-hot at temperature 0; zeros if nothing is allowed."""
    logits = _processed(adjust(logits, seq, emitted), seq, emitted)
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
    """One token from the weights p [V], decided by the key alone; -1 if all are zero."""
    ids = torch.nonzero(p > 0).flatten()
    if not ids.numel():
        return -1
    return int(ids[(torch.log(p[ids].double()) + gumbel(key, ids)).argmax()])


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Each row's token and its `top` likeliest: ids [R, 1 + top], log p of them under the raw logits, float32.

    logits [R, V], tokens [R]. Of equal logits the lowest id comes first. A row's bits do not depend on other rows:
    integers are compared and summed, in any order with the same result.
    """
    vocabulary, bits = logits.shape[-1], logits.float().contiguous().view(torch.int32).long()  # [R, V]
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    behind = torch.arange(vocabulary - 1, -1, -1, device=logits.device)
    best = vocabulary - 1 - (rising * 2**31 + behind).topk(min(top, vocabulary)).values % 2**31
    ids = torch.cat([tokens[:, None], best], 1)
    highest = logits.amax(-1, keepdim=True).double()
    unit = 2.0 ** (62 - (vocabulary - 1).bit_length())  # so that V tokens of weight 1 do not overflow
    weight = (torch.exp(logits.double() - highest) * unit).round().long().sum(-1, keepdim=True)
    total = highest + torch.log(weight.double() / unit)  # [R, 1] log of the sum of exp
    return ids, (logits.gather(1, ids).double() - total).float()


def token_logprobs(ids: list[list[int]], values: list[list[float]], top: int) -> list[TokenLogprob]:
    """Rows of `log_probabilities`, with the first `top` alternatives of each."""
    return [
        TokenLogprob(token, own, list(zip(best[:top], beside[:top], strict=True)))
        for (token, *best), (own, *beside) in zip(ids, values, strict=True)
    ]


@dataclass
class Target:
    """The target over one sequence's rows (`judge.TargetRows`)."""

    seq: Sequence
    output: Output  # of the whole step
    first: int  # the sequence's first row in it

    def choose(self, row: int, emitted: list[int]) -> int:
        chosen = self.output.choices[self.first + row]  # by the backend for the whole step at once; -1: not yet
        return chosen if chosen >= 0 else choose(self.output.logits[self.first + row].cpu(), self.seq, emitted)

    def distribution(self, row: int, emitted: list[int]) -> Tensor:
        return distribution(self.output.logits[self.first + row].cpu(), self.seq, emitted)

    def logits(self, rows: list[int]) -> Tensor:
        """Of some of its rows [n, V]."""
        return self.output.logits[[self.first + row for row in rows]]


@dataclass
class KeyedRandom:
    """Randomness for the rules that draw (`judge.RandomSource`): never the same number twice in one sequence.

    Keys hold the root's position as the round. A step may flip coins for depths that it does not reach in the end
    (`block` looks at all of them); the next step must not see those numbers again.
    """

    seq: Sequence
    flips: dict[int, bool] = field(default_factory=dict)  # results, for the trace
    draws: dict[int, int] = field(default_factory=dict)

    def flip(self, depth: int, chance: float) -> bool:
        self.flips[depth] = uniform(key(self.seq.seed, depth, COIN, len(self.seq.tokens))) < chance
        return self.flips[depth]

    def draw(self, depth: int, p: Tensor) -> int:
        self.draws[depth] = draw(p, key(self.seq.seed, depth, RESIDUAL, len(self.seq.tokens)))
        return self.draws[depth]


def widened(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits of the first N ids [R, N] padded to the whole vocabulary [R, V].

    The padding is -1e30, not -inf: where the parameters ban all of the first ids, something must be left to choose.
    """
    missing = vocabulary - logits.shape[-1]
    return logits if not missing else torch.nn.functional.pad(logits, (0, missing), value=-1e30)
