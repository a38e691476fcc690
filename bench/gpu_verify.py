"""The losslessness promise, measured: plain decoding against speculation, alone and in a mixed batch, id by id.

Plain texts are made one request at a time, those of the mixed batch in batches of GROUP, which are compared with
single ones first. The mixed batch has other prompts, lengths, endings and temperatures beside each sequence, more
requests than slots (so that members change), and plain decoding takes part in it too: sequences that share a pass must
not change each other's text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gpu_common import Lab
from gpu_race import forget
from outrider import LLM, SamplingParams
from outrider.measure.verify import TokenDivergence

DRAFTERS = ("model", "head", "suffix", "ngram", "auto")
PER_SLOT = 2.25  # requests that share a slot of the mixed batch
ALONE = 8  # requests of a lap that run one at a time
GROUP = 8  # that are decoded together for the mixed batch's plain texts


@dataclass
class Cell:
    """One drafter in one setting."""

    drafter: str
    setting: str
    compared: int = 0
    texts: int = 0
    steps: int = 0
    accepted: int = 0
    reached: int = 0
    failures: int = 0
    divergences: list[TokenDivergence] = field(default_factory=list)


Request = tuple[list[int], SamplingParams]


def verify_section(lab: Lab) -> dict[str, Any]:
    has = {"model": lab.draft is not None, "head": bool(lab.options.head)}
    chosen = lab.options.verify_drafters.split(",") if lab.options.verify_drafters else DRAFTERS
    drafters, slots = [name for name in chosen if has.get(name, True)], lab.options.verify_slots
    crowd = round(slots * PER_SLOT)
    ks = {name: "auto" if name == "auto" else lab.options.verify_k for name in ("off", *drafters)}
    alone = {name: lab.using(name, ks[name]) for name in drafters}
    widest = max(len(q.ids) for q in lab.questions) + lab.options.verify_length + 80
    crowded = {n: lab.using(n, ks[n], slots, slots * widest) for n in ("off", *drafters)}
    plain, group = lab.using("off"), {"off": lab.using("off", 0, GROUP, GROUP * widest)}
    settings = {"T=0": (alone, (0.0,)), "T=0.8": (alone, (0.8,)), f"batch of {GROUP}, T mixed": (group, (0.0, 0.8))}
    settings[f"batch of {slots}, T mixed"] = (crowded, (0.0, 0.8))
    cells = {(n, s): Cell("plain" if n == "off" else n, s) for s, (llms, _) in settings.items() for n in llms}
    lap = 0
    while total(cells) < lab.options.verify_tokens and not lab.late:
        for setting, (llms, temperatures) in settings.items():
            if lab.late:
                break
            sent = requests(lab, lap, temperatures, crowd if llms is crowded else ALONE)
            single = [[request] for request in sent]
            expected = answers(group["off"], sent) if llms is crowded else [answers(plain, one)[0] for one in single]
            for name, llm in llms.items():
                if not lab.late:
                    batches = single if llms is alone else [sent]
                    compare(cells[name, setting], llm, plain, batches, expected)
        lap += 1
    return report(lab, list(cells.values()))


def requests(lab: Lab, lap: int, temperatures: tuple[float, ...], n: int) -> list[Request]:
    """Prompts that are new in this lap, with several answer lengths and a seed for each."""
    prompts, longest = lab.crowd((lap + 1) * n)[lap * n :], lab.options.verify_length
    found = []
    for i, prompt in enumerate(prompts):
        length = longest - (i % 4) * longest // 8
        temperature = temperatures[i % len(temperatures)]
        seed = lab.options.seed * 100_000 + lap * n + i
        found.append((prompt.ids, SamplingParams(temperature=temperature, seed=seed, max_tokens=length)))
    return found


def answers(llm: LLM, sent: list[Request], into: Cell | None = None) -> list[list[int]]:
    forget(llm)
    outputs = [r.outputs[0] for r in llm.generate([ids for ids, _ in sent], [params for _, params in sent])]
    for out in outputs if into is not None else []:
        assert into is not None
        into.steps += out.stats.steps
        into.accepted += out.stats.accepted
        into.reached += out.stats.reached
        into.failures += out.stats.failures
    return [out.token_ids for out in outputs]


def compare(cell: Cell, llm: LLM, plain: LLM, batches: list[list[Request]], expected: list[list[int]]) -> None:
    sent = [request for batch in batches for request in batch]
    actual = [ids for batch in batches for ids in answers(llm, batch, cell)]
    for request, wanted, got in zip(sent, expected, actual, strict=True):
        cell.compared += max(len(wanted), len(got))
        cell.texts += 1
        if wanted != got:
            pairs = zip(wanted, got, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(got)))
            a, b = (ids[at] if at < len(ids) else -1 for ids in (wanted, got))
            cell.divergences.append(TokenDivergence(cell.texts - 1, at, a, b, margin(plain, request, wanted[:at])))


def margin(plain: LLM, request: Request, before: list[int]) -> float:
    """The gap between the target's two highest logits where the texts differ; NaN where it is unavailable."""
    ids, params = request
    if plain.target.encoder:  # the ids are the source's: the text cannot be continued there
        return float("nan")
    try:
        one = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=1, logprobs=2)
        (out,) = plain.generate([ids + before], one)
        first, second = out.outputs[0].logprobs[0].top[:2]  # type: ignore[index]
    except Exception:
        return float("nan")
    return float(first[1] - second[1])


def total(cells: dict[tuple[str, str], Cell]) -> int:
    return sum(cell.compared for cell in cells.values())


def report(lab: Lab, cells: list[Cell]) -> dict[str, Any]:
    compared, wrong = sum(c.compared for c in cells), sum(len(c.divergences) for c in cells)
    lab.table(
        f"Plain alone against speculation, K={lab.options.verify_k}, {lab.llm.dtype}",
        ("drafter", "setting", "tokens compared", "texts", "divergences", "margins", "α", "drafter failed"),
        [
            (c.drafter, c.setting, c.compared, c.texts, len(c.divergences),
             " ".join(f"{d.margin:.2g}" for d in c.divergences[:6]), c.accepted / c.reached if c.reached else None,
             c.failures)
            for c in cells
        ],
    )  # fmt: skip
    lab.say(f"{compared:,} tokens compared, {wrong} divergences")
    return {"compared_tokens": compared, "divergences": wrong, "k": lab.options.verify_k,
            "cells": [asdict(c) for c in cells]}  # fmt: skip
