"""Guided and predicted text: plain decoding and drafters under the same grammars, with the texts compared.

    python bench/guides.py [--model M] [--rounds 2] [--tokens 160] [--temperature 0]

Published result (bench/results/2026-11-15-guides-smollm2.json):

    OMP_NUM_THREADS=2 python bench/guides.py

Contenders run each request in turn, each time with a drafter without memory. Times are of whole requests, prefill
included. In `predicted` the request has a prediction of its answer with every tenth word changed. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

from outrider import LLM, SamplingParams
from outrider.backends.machine import cpu_name

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"type": "string", "maxLength": 40},
        "married": {"type": "boolean"},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue", "black"]}, "maxItems": 3},
    },
    "required": ["name", "age", "occupation", "married", "favourite_colours"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": RECORD, "minItems": 3, "maxItems": 3}
PEOPLE = "Maria, a doctor of 34 who likes blue", "Tom, a retired baker of 71", "Ines, 19, who studies law"
STORY = "Write a short story about a lighthouse keeper and a storm."


def requests(tokens: int, temperature: float) -> list[tuple[str, str, SamplingParams]]:
    """Category, prompt, parameters."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=11)
    cases = [
        ("one record", f"Describe {who}, as JSON.", replace(params, guide={"guided_json": RECORD})) for who in PEOPLE
    ]
    many = f"Describe these people as a JSON list: {'; '.join(PEOPLE)}."
    cases.append(("three records", many, replace(params, guide={"guided_json": LIST})))
    verdict = {"regex": "Verdict: (yes|no|unknown)\\nConfidence: (high|medium|low)\\nReason: [A-Za-z ,]{20,120}\\."}
    cases += [("regex", q, replace(params, guide=verdict)) for q in ("Is water wet?", "Is the moon made of cheese?")]
    cases += [("predicted", STORY, replace(params, prediction="")), ("not predicted", STORY, params)]
    return cases


def edited(text: str) -> str:
    """The text with every tenth word replaced."""
    words = text.split(" ")
    return " ".join("another" if i % 10 == 9 else word for i, word in enumerate(words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    base = LLM(given.model, drafter="off", max_length=1024)
    names = (
        "off",
        "prediction",
        "suffix",
        "auto",
    )  # drafts only what is forced here
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    tokens, steps = (defaultdict(lambda: defaultdict(int)) for _ in range(2))
    facts: dict[str, Any] = {"model": base.name, "dtype": base.dtype, "cpu": cpu_name(), "differ": 0}
    facts |= {"accepted": 0, "reached": 0}
    cases = requests(given.tokens, given.temperature)
    for turn, (kind, question, params) in enumerate(cases * given.rounds):
        messages = [{"role": "user", "content": question}]
        (plain,) = base.chat(messages, params)
        if params.prediction is not None:
            params = replace(params, prediction=edited(plain.text))
        for name in names[turn % 4 :] + names[: turn % 4]:
            llm = base.using(drafter=name)
            llm.generate("Once upon a time", SamplingParams(max_tokens=8))
            begin = time.perf_counter()
            (answer,) = llm.chat(messages, params)
            seconds[kind][name] += time.perf_counter() - begin
            tokens[kind][name] += len(answer.token_ids)
            steps[kind][name] += answer.stats.steps
            facts["differ"] += answer.token_ids != plain.token_ids
            if name == "prediction" and params.guide:
                facts["accepted"] += answer.stats.accepted
                facts["reached"] += answer.stats.reached
    facts["kinds"] = {
        kind: {
            name: {
                "tok_s": round(tokens[kind][name] / seconds[kind][name], 1),
                "speedup": round(seconds[kind]["off"] / seconds[kind][name], 2),
                "tau": round(tokens[kind][name] / steps[kind][name], 2),
            }
            for name in names
        }
        for kind in seconds
    }
    for kind, row in facts["kinds"].items():
        cells = (f"{name} {f['tok_s']:.0f}/s x{f['speedup']:.2f} τ {f['tau']:.2f}" for name, f in row.items())
        print(f"{kind:15}", *(f"{cell:32}" for cell in cells))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
