"""Outrider on one GPU: the memory floor, plain decoding, speculation, batches, and transformers for comparison.

    python bench/gpu.py --model 7b --sections floor,plain,spec --small SmolLM2.gguf --out 7b.json

Published results (bench/results/2026-11-15-gpu-NAME.json; NAME and options after `python bench/gpu.py --model 7b
--small smollm2.gguf`):

    7b-spec       --sections floor,plain,spec --tokens 192 --rounds 2 --k 8,12 --section-seconds 70 --out spec.json
    7b-timeline   --sections timeline --only "plain,model K=8,auto" --batches 1,16,64 --tokens 96
                  --timeline timeline.svg --out timeline.json
    7b-batch      --sections batch --tokens 96 --batch-rounds 1 --section-seconds 85 --out batch.json
    7b-spec-hf    --sections batch,spec,hf --tokens 192 --rounds 2 --k 8,12 --batch-rounds 2 --section-seconds 80
                  --hf-tokens 64 --hf-prompts 2 --hf-rounds 1 --out batch.json
    7b-verify     --sections batch,verify --tokens 128 --batch-rounds 2 --section-seconds 80 --verify-tokens 6000
                  --out b.json
    7b-head       --head src/outrider/drafters/head/shipped/smollm2-135m-instruct --sections spec --tokens 128
                  --rounds 2 --k 8
                  --only "suffix,auto,head chain,head K=6,head tree of 24" --section-seconds 80 --out spec-head.json
    30b           (--model 30b) --sections floor,plain --tokens 64 --rounds 1 --section-seconds 30 --out 30b.json
    11b           (--model 11b --small opus-mt-en-fr) --prompts sources.jsonl --length 512 --sections spec,verify,plain
                  --tokens 128 --per-category 2 --rounds 1 --k 8,12 --alphas .6,.7,.8 --alpha-k 4 --only model,spoiled
                  --verify-tokens 2000 --verify-length 96 --verify-drafters model,ngram,auto --verify-slots 8
                  --out 11b.json

Every result has its full command under `command`. `--model` is smollm2, 7b or 30b (SmolLM2 widened without changing its
function, `twin.py`), 7b-w4 (with the layers rounded to four bits, `w4.py`; give `--dtype auto`), 11b (opus-mt, an
encoder–decoder, widened; `bench/translate.py` says where it is found), a folder or a .gguf file. No network is needed:
`--small` is SmolLM2 as a .gguf file or a folder, or the folder of opus-mt.
`then` begins further sections of the same loaded model, with the options before it and its own: `--sections never then
--sections loop --only auto`. A section that is run again has a number behind its name.
Each section stops after `--section-seconds` with what it has, and so do all of them when the process is asked to end
(SIGTERM, as by `timeout`); a section that fails is reported and does not stop the others. All contenders share one
counter: `tok_s` is tokens after the first ÷ time from the first to the last, `request_tok_s` all tokens ÷ the whole
request. `stages_s` has what the start spends on single works (compiling kernels), each with its begin and its end. The
last line is one JSON object; `--out` has it after every section.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import twin
from gpu_common import Lab, folder_or_name, sweep_up
from gpu_floor import floor_section, plain_section
from gpu_head import head_section
from gpu_hf import hf_section
from gpu_loop import loop_section
from gpu_never import never_section
from gpu_spec import batch_section, spec_section
from gpu_timeline import timeline_section
from gpu_verify import verify_section
from outrider import OutriderError
from outrider.measure.environment import environment
from outrider.models.stages import listening

SECTIONS: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "floor": floor_section,
    "plain": plain_section,
    "spec": spec_section,
    "batch": batch_section,
    "hf": hf_section,
    "verify": verify_section,
    "head": head_section,
    "timeline": timeline_section,
    "loop": loop_section,
    "never": never_section,
}


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sections", default=",".join(SECTIONS))
    add("--model", default="7b", type=folder_or_name, help="smollm2, 7b, 7b-w4 (with --dtype auto), 30b, 11b, …")
    add("--small", help="SmolLM2: a .gguf file or a folder (default: Outrider's cache); for 11b the folder of opus-mt")
    add("--draft-model", help="default: what was widened for 7b, 30b and 11b, none for others")
    add("--head", type=Path, help="the folder of a trained head; for 7b and 30b a head of SmolLM2")
    add("--wide-head", action="store_true", help="widen the head with the twin, instead of keeping it narrow")
    add("--device", default="cuda")
    add("--dtype", default="bfloat16")
    add("--length", type=int, default=2048, help="tokens of the longest prompt and answer together")
    add("--tokens", type=int, default=256)
    add("--prompts", type=Path, help="JSONL; default: the bundled ones and three that repeat their prompt")
    add("--per-category", type=int, default=1, help="prompts per category in plain and spec")
    add("--rounds", type=int, default=3)
    add("--temperature", type=float, default=0.0, help="of plain, spec and head")
    add("--k", default="4,6,8,10,12", help="spec: fixed K of the draft model, suffix and ngram")
    add("--alphas", default="", help="spec: the draft model with spoiled tokens, at these acceptance rates")
    add("--alpha-k", default="auto", help="K of those, as 4,auto")
    add(
        "--only",
        default="",
        help="spec, loop, timeline, never: contenders beside plain, by prefixes of their names, as head,auto",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="plain and spec: exactly --tokens tokens (batch and hf always do)",
    )
    add("--batches", default="1,4,16,64")
    add("--never-rounds", default="", help="never: rounds for each of --batches, as 3,2,1,1; default: --rounds for all")
    add("--batch-rounds", type=int, default=3)
    add("--hf-tokens", type=int, default=128)
    add("--hf-prompts", type=int, default=3)
    add("--hf-rounds", type=int, default=2)
    add("--hf-k", type=int, default=8, help="K of our draft model beside transformers' assisted generation")
    add("--verify-tokens", type=int, default=20_000)
    add("--verify-length", type=int, default=256, help="longest answer")
    add("--verify-k", type=int, default=8)
    add("--verify-drafters", default="", help="of them, as model,auto; default: all that the model has")
    add("--verify-slots", type=int, default=32, help="sequences of the mixed batch")
    add("--timeline", type=Path, help="where to write the SVG of rounds")
    add("--section-seconds", type=float, default=240.0)
    add("--seed", type=int, default=1)
    add("--out", type=Path)
    options = parser.parse_args(given)
    options.names = [name for name in options.sections.split(",") if name]
    unknown = [name for name in options.names if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]}; choose from {','.join(SECTIONS)}")
    return options


def hardware(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers", "outrider", "numpy"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    if device == "cpu":
        return facts | {"device": environment()["cpu"]}
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = (
            subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0].strip()
        )
    except (OSError, subprocess.SubprocessError):
        driver = ""
    memory = torch.cuda.get_device_properties(0).total_memory
    return facts | {"device": torch.cuda.get_device_name(0), "driver": driver or None, "cuda": torch.version.cuda,
                    "memory_bytes": memory, "cpu": environment()["cpu"]}  # fmt: skip


def measure(lab: Lab, name: str) -> dict[str, Any]:
    """Run one section; an exception becomes its result."""
    lab.console.rule(name)
    lab.start(lab.options.section_seconds)
    begin = time.perf_counter()
    try:
        found = SECTIONS[name](lab)
    except Exception as error:
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())
        lab.table(f"{name} failed", ("why",), [(message[:400].replace("[", "\\["),)])
        found = {"failed": message}
    sweep_up()
    return found | {"section_s": time.perf_counter() - begin}


def finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plans(given: list[str]) -> list[argparse.Namespace]:
    """The options of each group of sections; later ones begin with those of the first."""
    ends = [i for i, word in enumerate(given) if word == "then"]
    first, *more = [given[a + 1 : b] for a, b in pairwise([-1, *ends, len(given)])]
    return [arguments(first), *(arguments(first + group) for group in more)]


def main() -> None:
    options, *later = plans(sys.argv[1:])
    console = Console(width=150)
    if options.device != "cpu" and not torch.cuda.is_available():
        console.print("There is no GPU here that torch can use; try --device cpu with a small model.")
        sys.exit(1)
    begin = time.perf_counter()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("outrider.cuda").setLevel(
        logging.INFO
    )  # why kernels are compiled one after the other, if they are
    stages: dict[str, list[float]] = {}
    try:
        with listening(lambda name, _: stages.setdefault(name, []).append(time.perf_counter() - begin)):
            lab = Lab(options, console)
    except (OutriderError, ValueError) as error:
        console.print(str(error), markup=False)
        sys.exit(1)
    facts: dict[str, Any] = {
        "bench": "gpu", "command": " ".join(["python", *sys.argv]), "model": lab.checkpoint.name,
        "parameters": twin.parameters(lab.checkpoint.config), "dtype": lab.llm.dtype, "seed": options.seed,
        "tokens": options.tokens, "prompts": str(options.prompts or "bundled"), "hardware": hardware(options.device),
        "load_s": time.perf_counter() - begin, "stages_s": {name: [at[0], at[-1]] for name, at in stages.items()},
        "sections": lab.results,
    }  # fmt: skip
    lab.say(
        f"{lab.checkpoint.name}, {lab.llm.dtype}, on {facts['hardware']['device']}; ready in {facts['load_s']:.1f} s"
    )
    signal.signal(signal.SIGTERM, lambda *_: lab.end())
    for plan, name in [(each, name) for each in [options, *later] for name in each.names]:
        if not lab.ended:
            lab.use(plan)
            repeated = sum(known.split()[0] == name for known in lab.results)
            lab.results[f"{name} {repeated + 1}" if repeated else name] = measure(lab, name)
            if options.out:
                options.out.write_text(json.dumps(finite(facts), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(finite(facts)))


if __name__ == "__main__":
    main()
