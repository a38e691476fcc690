"""Trained heads: the time of a draft as a chain and as a tree, and the speedup.

Without `--head` untrained heads of both kinds are used: their drafts are wrong, but cost as much as trained ones.
Drafting is timed by the device's clock from the first kernel of a draft to the last; copying a tree to the host and
everything else between passes is in `step`, by the host's clock.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from gpu_common import Lab
from gpu_race import Contender, contender, device_seconds, figures, race
from outrider.drafters.head.network import Head
from outrider.models.speculators import random_head

KS = (4, 8)


def head_section(lab: Lab) -> dict[str, Any]:
    heads = (
        {lab.head.config.kind: lab.head} if lab.options.head else {k: untrained(lab, k) for k in ("eagle3", "block")}
    )
    plain = contender(lab, "plain", "off")
    contenders = [plain]
    for kind, head in heads.items():
        contenders += [contender(lab, f"{kind} chain K={k}", "head", k, head=head) for k in KS]
        contenders.append(contender(lab, f"{kind} tree K={KS[-1]}", "head", KS[-1], head=head, tree=True))
        contenders.append(contender(lab, f"{kind} auto", "head", head=head))
    prompts = lab.sample()
    rounds = race(lab, contenders, prompts, lab.options.tokens, lab.options.rounds)
    found = {c.name: figures(c, plain) | phases(c) for c in contenders}
    lab.table(
        f"Heads, one sequence, greedy, {len(plain.indices)} prompts, {rounds} whole rounds",
        ("contender", "draft ms", "verify ms", "step ms", "tok/s", "× plain", "τ", "α", "other texts"),
        [
            (name, *(r[f"{phase}_ms"] for phase in ("draft", "verify", "step")), r["tok_s"], r.get("ratio"), r["tau"],
             r["alpha"], r.get("divergent_texts"))
            for name, r in found.items()
        ],
    )  # fmt: skip
    return {"whole_rounds": rounds, "contenders": found}


def untrained(lab: Lab, kind: str) -> Head:
    return lab.make_head(*random_head(lab.checkpoint.config, kind, vocabulary=16_384))


def phases(c: Contender) -> dict[str, float | None]:
    """Median milliseconds of the phases of a step, without the first steps of a request."""
    steps = [step for q in c.indices for r in c.runs[q] for step in [s for s in r.steps if s.emitted][1:-1]]
    found: dict[str, float | None] = {}
    for phase in ("draft", "verify"):
        taken = [s for s in (device_seconds(step, phase) for step in steps) if s]
        found[f"{phase}_ms"] = 1e3 * median(taken) if taken else None
    found["step_ms"] = 1e3 * median(step.end - step.begin for step in steps) if steps else None
    return found
