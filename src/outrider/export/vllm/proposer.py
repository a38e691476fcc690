"""Outrider's drafters that need no weights, as proposer classes for vLLM (`method: custom_class`).

    --speculative-config '{"method": "custom_class", "model": "outrider.export.vllm.proposer.SuffixProposer", …}'

Promise: whatever happens here costs speed, never text: vLLM verifies what is proposed, and an error becomes an empty
proposal. The drafter's options are `additional_config["outrider"]`. vLLM passes token ids only: there are no trees, no
survival-based budgets and no measured costs, so K is fixed.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...drafters import DraftRequest, Workspace, make
from ...engine.request_drafts import propose as draft_for
from ...types import Sequence, Turn
from .rows import Rows

log = logging.getLogger("outrider.vllm")


class Proposer:
    """What vLLM builds with its configuration and asks once per step."""

    drafter_name: ClassVar[str] = ""

    def __init__(self, vllm_config: Any) -> None:
        self.k = int(vllm_config.speculative_config.num_speculative_tokens)
        self.length = int(vllm_config.model_config.max_model_len)
        options = dict((vllm_config.additional_config or {}).get("outrider", {}))
        nothing: Any = None  # lookups lean on no target
        self.drafter = make(self.drafter_name, Workspace(nothing, nothing, nothing, options | {"tree": False}))
        self.rows = Rows(_ends(vllm_config.model_config), self.drafter.begin, self.drafter.end)
        self._warned = False

    def load_model(self, target_model: Any) -> None:
        """Lookups have no weights; vLLM's CPU build asks every proposer to load some."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.integer],
        token_ids_cpu: npt.NDArray[np.integer],
        **_: Any,
    ) -> list[list[int]]:
        """At most K tokens to follow each row. Rows of prompts that are still being read have sampled nothing."""
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:  # a drafter must never take the engine down
            if not self._warned:
                log.exception("The drafter '%s' failed; the text goes on without drafts.", self.drafter_name)
            self._warned = True
            return [[] for _ in sampled_token_ids]

    def _propose(
        self, sampled: list[list[int]], lengths: npt.NDArray[np.integer], ids: npt.NDArray[np.integer]
    ) -> list[list[int]]:
        texts = [ids[i, : int(lengths[i])] for i in range(len(sampled))]
        followed = self.rows.follow(texts, [len(new) for new in sampled])
        asking = [i for i, seq in enumerate(followed) if seq is not None and sampled[i]]
        turns = [self._turn(followed[i]) for i in asking]
        drafts: list[list[int]] = [[] for _ in sampled]
        request = DraftRequest([turn.seq for turn in turns], [turn.budget for turn in turns])
        for i, tree in zip(asking, draft_for(self.drafter, turns, request).trees, strict=True):
            drafts[i] = list(tree.tokens)[: self.k]
        return drafts

    def _turn(self, seq: Sequence | None) -> Turn:
        assert seq is not None
        room = max(min(self.k, self.length - len(seq.tokens) - 1), 0)
        return Turn(seq, feed=0, whole=True, budget=room)

    def expect(self, key: str, tokens: list[int]) -> None:
        """The answer to the prompt of this name is expected to be so."""
        self.rows.expected.put(key, tokens)


class NGramProposer(Proposer):
    """`ngram`: what followed the latest earlier occurrence of the last few tokens."""

    drafter_name = "ngram"


class SuffixProposer(Proposer):
    """`suffix`: the same by vote of all places, in finished answers of other requests too."""

    drafter_name = "suffix"


def _ends(model_config: Any) -> frozenset[int]:
    """Ids that end a text, as far as the model's configuration tells."""
    given = getattr(getattr(model_config, "hf_config", None), "eos_token_id", None)
    ids = given if isinstance(given, list) else [given]
    return frozenset(int(i) for i in ids if i is not None)
