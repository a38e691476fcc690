"""What a vLLM worker learns to hear: predictions, on their way from the front end to the proposer.

Given to vLLM as `worker_extension_cls`; called through `collective_rpc`, so it works over processes and nodes.
"""

from __future__ import annotations

from typing import Any


class Expecting:
    """Mixed into vLLM's worker; only the workers that draft have a proposer."""

    model_runner: Any

    def outrider_expect(self, key: str, tokens: list[int]) -> bool:
        """Pass a prediction on; False where nobody here drafts from one."""
        expect = getattr(getattr(self.model_runner, "drafter", None), "expect", None)
        if expect is None:
            return False
        expect(key, list(tokens))
        return True
