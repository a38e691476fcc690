"""The law that a drafted token is drawn from, under the rules that ask for it: short enough to travel, and tilted.

`reject` and `block` keep the target's distribution whatever q is, as long as it is the q that the token was really
drawn from. So q may be made to suit: only its likeliest tokens stay (ids and chances instead of a vector of the
vocabulary's size), and Saguaro's sampling (arXiv 2603.03251) gives those that outcomes are prepared for less than
their share, C of it. Where the target rejects, it then draws one of them more often (max(p - q, 0) grows), and its next
draft is ready; the price is acceptance. With C = 1 nothing is tilted.

Pure functions of q; who draws, and what came of it, is unknown here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SHORT = 64  # tokens of a law


class Tilt(NamedTuple):
    """Saguaro's sampling: the `forks` likeliest tokens keep this share of their chances."""

    forks: int = 0
    share: float = 1.0


STRAIGHT = Tilt()


class Law(NamedTuple):
    """Chances of a few tokens; all others have none."""

    ids: Tensor  # [M] likeliest first
    chances: Tensor  # [M] float64, sum 1

    def spread(self, vocabulary: int) -> Tensor:
        """Over all ids. [V]"""
        return torch.zeros(vocabulary, dtype=torch.float64).scatter_(0, self.ids, self.chances)


def drawn_from(q: Tensor, tilt: Tilt = STRAIGHT, most: int = SHORT) -> Law:
    """What is really drawn from where the drafter believes q [V]: its `most` likeliest tokens, tilted."""
    chances, ids = q.topk(min(most, q.shape[-1]))
    shares = torch.ones_like(chances)
    shares[: tilt.forks] = tilt.share
    kept = chances * shares
    if not bool(kept.sum() > 0):  # all of it is prepared for: nothing to make room for
        kept = chances
    whole = int((q > 0).sum()) <= most and tilt.share == 1
    return Law(ids, kept if whole else kept / kept.sum())
