"""Lines: what a device keeps of each sequence while rounds continue it.

A line holds a sequence's numbers (length, sampling parameters, draft …), tokens and draft, and where it has bias or
penalties the counts of its tokens and its bias. Promise: `join` writes a whole line, so that nothing of its last owner
is left; from then on only rounds change it. It knows neither rows nor passes.
"""

from __future__ import annotations

from collections import Counter
from math import inf

import torch
from torch import Tensor

from ...engine.sampling import adjusts
from ...types import Sequence
from .kernels import adjusting, rounds as kernels
from .kernels.rounds import COLUMNS, DRAFT, MOST_ENDS
from .state import F32, F64, I32, I64, DeviceState

HIGHEST = torch.finfo(F32).max
LAW = {
    kernels.TEMPERATURE: "temperature", kernels.TOP_P: "top_p", kernels.MIN_P: "min_p",
    kernels.REPETITION: "repetition_penalty", kernels.PRESENCE: "presence_penalty",
    kernels.FREQUENCY: "frequency_penalty",
}  # fmt: skip  # columns that are floats


class Lines:
    """The device's state of every sequence, one line each; the last line is padding."""

    def __init__(self, state: DeviceState, vocabulary: int) -> None:
        self.vocabulary, (count, length) = vocabulary, state.table.shape
        device, pinned = state.device, state.device.type == "cuda"
        self.numbers = torch.zeros(count, COLUMNS, dtype=I64, device=device)
        self.tokens = torch.zeros(count, length, dtype=I32, device=device)
        self.draft = torch.zeros(count, DRAFT, dtype=I32, device=device)
        self.parents = torch.zeros(count, DRAFT, dtype=I32, device=device)  # of a tree's nodes
        self.survival = torch.zeros(count, DRAFT, dtype=F32, device=device)  # that a recorded tree claims
        self.padding, self.driver = count - 1, state.driver
        self.driver.poison([self.numbers[:-1], *(each[:-1] for each in self._contents)])
        self.counts = self.bias = torch.zeros(0, 0)  # [lines, V] of sequences that adjust logits, from the first on
        # Where a joining sequence is written for the copy; a line's part is reused only by the line's next owner.
        self._numbers = torch.zeros(count, COLUMNS, dtype=I64, pin_memory=pinned)
        self._tokens = torch.zeros(count, length, dtype=I32, pin_memory=pinned)
        # The same memory: numpy writes a few numbers faster.
        self._arrays = [each.numpy() for each in (self._numbers, self._numbers.view(F64), self._tokens)]

    @property
    def _contents(self) -> tuple[Tensor, ...]:
        """What a line has besides its numbers."""
        return self.tokens, self.draft, self.parents, self.survival

    def join(self, seq: Sequence, line: int, held: int, read: int) -> None:
        """Copy a sequence to its line. held, read: leading tokens in the target's and the draft model's plane."""
        params, count = seq.params, len(seq.tokens)
        ends = sorted(seq.ends)[:MOST_ENDS]  # the host knows the others
        whole = [count, held, seq.prompt_len + params.limit, 1, seq.seed, 0, params.top_k, 0, 0, 0, 0, 0, read]
        whole += [0, 0, 0, seq.prompt_len + params.min_tokens, adjusts(seq)]
        self.driver.poison(each[line] for each in self._contents)
        self._arrays[0][line] = whole + ends + [-1] * (MOST_ENDS - len(ends))
        self._arrays[1][line, [*LAW]] = [getattr(params, name) for name in LAW.values()]
        self._arrays[2][line, :count] = seq.tokens
        if adjusts(seq):
            self._adjust(seq, line)
        self.numbers[line].copy_(self._numbers[line], non_blocking=True)
        self.tokens[line, :count].copy_(self._tokens[line, :count], non_blocking=True)

    def add_adjustments(self) -> None:
        """Make room for counts and bias, which most servers never need."""
        if not self.counts.numel():
            shape, device = (self.padding + 1, self.vocabulary), self.numbers.device
            self.counts, self.bias = (torch.zeros(shape, dtype=dtype, device=device) for dtype in (I32, F32))

    def _adjust(self, seq: Sequence, line: int) -> None:
        self.add_adjustments()
        counts = Counter(dict.fromkeys(seq.tokens[: seq.prompt_len], adjusting.PROMPT)) + Counter(seq.generated)
        for kept, values in ((self.counts[line], counts), (self.bias[line], bias_of(seq, self.vocabulary))):
            ids, new = torch.tensor([*values], dtype=I64), torch.tensor([*values.values()], dtype=kept.dtype)
            if kept.is_cuda:  # so that the copy does not wait for the rounds in flight
                ids, new = (each.pin_memory().to(kept.device, non_blocking=True) for each in (ids, new))
            kept.zero_().index_copy_(0, ids, new)


def bias_of(seq: Sequence, vocabulary: int) -> dict[int, float]:
    """What is added to the logits of single tokens: bias, and -inf for bad words of one token."""
    bias = {token: value for token, value in seq.params.logit_bias.items() if 0 <= token < vocabulary}
    return bias | {word[0]: -inf for word in seq.bad_words if len(word) == 1}


def is_adjusted_here(seq: Sequence, vocabulary: int) -> bool:
    """Whether the device's kernels can adjust this sequence's logits, with something left to choose."""
    params, bias = seq.params, bias_of(seq, vocabulary).values()
    hosted = seq.matcher is not None or params.logits_processors or any(len(word) > 1 for word in seq.bad_words)
    known = not params.min_tokens or len(seq.ends) <= MOST_ENDS
    left = vocabulary - sum(value < -HIGHEST for value in bias) - len(seq.ends) > 0
    return not hosted and known and left and max(bias, default=0.0) <= HIGHEST
