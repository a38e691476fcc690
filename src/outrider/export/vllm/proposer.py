"""Outrider's drafters without weights as proposer classes for vLLM (`method: custom_class`).

    --speculative-config '{"method": "custom_class", "model": "outrider.export.vllm.proposer.SuffixProposer", …}'

Nothing here can change the text: vLLM verifies what is proposed, and an error becomes an empty proposal. The drafter's
options are `additional_config["outrider"]`. vLLM passes token ids only, so there are no trees, no survival-based
budgets and no measured costs: K is fixed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...drafters import DraftRequest, Workspace, make
from ...engine.request_drafts import Prediction, propose as draft_for
from ...types import Sequence, Turn
from .worker import PendingPredictions

log = logging.getLogger("outrider.vllm")
Tokens = npt.NDArray[np.integer]
_FIRST, _LAST = 16, 48  # tokens that are compared at either end of a text


class Proposer:
    """vLLM builds it with its configuration and calls `propose` once per step."""

    drafter_name: ClassVar[str] = ""

    def __init__(self, vllm_config: Any) -> None:
        self.k = int(vllm_config.speculative_config.num_speculative_tokens)
        self.length = int(vllm_config.model_config.max_model_len)
        options = dict((vllm_config.additional_config or {}).get("outrider", {}))
        nothing: Any = None  # lookups use neither target nor cache
        self.drafter = make(self.drafter_name, Workspace(nothing, nothing, nothing, options | {"tree": False}))
        self.rows = RowTracker(_end_ids(vllm_config.model_config), self.drafter.begin, self.drafter.end)
        self._warned = False

    def load_model(self, target_model: Any) -> None:
        """Lookups have no weights; vLLM's CPU build calls this on every proposer."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Tokens, token_ids_cpu: Tokens, **_: Any
    ) -> list[list[int]]:
        """At most K tokens for each row. A row whose prompt is still being read has no sampled token and no draft."""
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:  # a drafter must never stop the engine
            if not self._warned:
                log.exception("The drafter '%s' failed; generation continues without drafts.", self.drafter_name)
            self._warned = True
            return [[] for _ in sampled_token_ids]

    def _propose(self, sampled: list[list[int]], lengths: Tokens, ids: Tokens) -> list[list[int]]:
        texts = [ids[i, : int(lengths[i])] for i in range(len(sampled))]
        sequences = self.rows.follow(texts, [len(new) for new in sampled])
        drafting = [(i, seq) for i, seq in enumerate(sequences) if seq is not None and sampled[i]]
        room = [max(min(self.k, self.length - len(seq.tokens) - 1), 0) for _, seq in drafting]
        turns = [Turn(seq, feed=0, whole=True, budget=k) for (_, seq), k in zip(drafting, room, strict=True)]
        request, drafts = DraftRequest([seq for _, seq in drafting], room), [list[int]() for _ in sampled]
        for (i, _), tree in zip(drafting, draft_for(self.drafter, turns, request).trees, strict=True):
            drafts[i] = list(tree.tokens)[: self.k]
        return drafts

    def add_prediction(self, key: str, tokens: list[int]) -> None:
        """The predicted answer to the prompt with this key."""
        self.rows.predictions.put(key, tokens)


class NGramProposer(Proposer):
    """`ngram`: what followed the latest earlier occurrence of the last few tokens."""

    drafter_name = "ngram"


class SuffixProposer(Proposer):
    """`suffix`: the same by vote of all occurrences, in finished answers of other requests too."""

    drafter_name = "suffix"


def _end_ids(model_config: Any) -> frozenset[int]:
    """Ids that end a text, as far as the model's configuration tells."""
    ids = getattr(getattr(model_config, "hf_config", None), "eos_token_id", None)
    return frozenset(int(i) for i in (ids if isinstance(ids, list) else [ids]) if i is not None)


class RowTracker:
    """Which row of vLLM's batch is which sequence: vLLM passes rows of tokens without request ids.

    Rows move when requests leave. A text only grows, so a row is recognised by its earlier tokens; where two rows are
    equal so far, it does not matter which is which. A sequence that is no longer in the batch has ended, or was
    preempted and is then a new sequence when it returns.
    """

    def __init__(
        self, end_ids: frozenset[int], on_begin: Callable[[Sequence], None], on_end: Callable[[Sequence], None]
    ) -> None:
        self._end_ids, self._on_begin, self._on_end = end_ids, on_begin, on_end
        self._rows: list[Sequence | None] = []
        self._next_id = 0
        self.predictions = PendingPredictions()

    def follow(self, texts: list[Tokens], new: list[int]) -> list[Sequence | None]:
        """The sequence of each row, up to date; None for a row that has not generated anything yet.

        texts[i] is all of row i, prompt first; the last new[i] of its tokens were generated in this step.
        """
        unclaimed = {seq.id: seq for seq in self._rows if seq is not None}
        rows = [self._claim(unclaimed, i, text[: len(text) - new[i]]) for i, text in enumerate(texts)]
        for seq in unclaimed.values():
            self._on_end(seq)
        for i, text in enumerate(texts):
            row = rows[i]
            if row is None and new[i]:
                row = rows[i] = self._begin(text[: len(text) - new[i]])
            if row is not None:
                _extend(row, text)
        self._rows = rows
        return list(rows)

    def _claim(self, unclaimed: dict[int, Sequence], i: int, past: Tokens) -> Sequence | None:
        """The running sequence whose tokens are this row's past: most often the one that was in this row.

        All of its past: a new request may begin with a whole earlier conversation.
        """
        before = self._rows[i] if i < len(self._rows) else None
        if before is not None and before.id in unclaimed and _ends_match(before.tokens, past):
            return unclaimed.pop(before.id)
        for seq in unclaimed.values():
            if _ends_match(seq.tokens, past) and np.array_equal(seq.tokens, past):
                return unclaimed.pop(seq.id)
        return None

    def _begin(self, prompt: Tokens) -> Sequence:
        seq = Sequence(self._next_id, prompt.tolist(), ends=self._end_ids)
        self._next_id += 1
        predicted = self.predictions.take(seq.tokens)
        seq.prediction = None if predicted is None else Prediction(predicted)
        self._on_begin(seq)
        return seq


def _ends_match(tokens: list[int], past: Tokens) -> bool:
    """Whether length and both ends are equal; prompts are long."""
    n = len(tokens)
    if n != len(past):
        return False
    first, last = past[:_FIRST].tolist(), past[max(n - _LAST, 0) :].tolist()
    return bool(tokens[:_FIRST] == first and tokens[-_LAST:] == last)


def _extend(seq: Sequence, text: Tokens) -> None:
    new = text[len(seq.tokens) :].tolist()
    seq.tokens.extend(new)
    if seq.prediction is not None:
        seq.prediction.advance(new)
