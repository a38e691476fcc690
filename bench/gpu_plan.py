"""Every GPU claim in one go: the scripts beside this one in the order of what matters most, each with its time.

    python bench/gpu_plan.py --small SmolLM2.gguf --qwen qwen2.5-coder-1.5b-q4_k_m.gguf --prompts FILE.jsonl --out DIR

A card is often lent for minutes only: steps begin while `--minutes` last, one after the other, and each is asked to end
(SIGTERM) when its own time is up, after which it reports what it has. `--list` names the steps with their seconds and
runs nothing; `--only qwen,twin` runs these, so that the same command continues on another day. DIR/STEP.json is what a
step measured, DIR/STEP.log what it printed. Prompts should be ones that nothing was tuned on.

| step | shows |
|---|---|
| qwen, twin | rounds by the host's and the device's clock; never slower; drafters by kind of text; exactness |
| serve-twin, serve-smollm2 | 64 streams over HTTP |
| layers, w4, prompts | passes of few rows, weights of four bits, prompts beside cuBLAS |
| tests | the tests that use a GPU: which of them fail |
| twin-w4 | speculation and exactness with weights of four bits |
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parent / "src" / "outrider" / "drafters" / "head" / "shipped"
GRACE = 45.0  # seconds from the request to end until a step is killed: a section may be in the middle of a run
VERIFY = "--sections verify --verify-length 96 --verify-slots 64"


@dataclass(frozen=True)
class Step:
    name: str
    seconds: float
    words: list[str]  # the script and its options

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(HERE / self.words[0]), *self.words[1:]]


def steps(options: argparse.Namespace) -> list[Step]:
    """In the order in which they run: what the most claims stand on comes first."""
    small, qwen, out = str(options.small), str(options.qwen), Path(options.out)
    prompts = ["--prompts", str(options.prompts)]
    race = "--sections spec --rounds 3 --tokens 128"
    loop = "--sections loop --batches 1,4,16,64 --tokens 96"
    timeline = "--sections timeline --batches 1,16,64 --tokens 64 --only plain,model,auto"

    def gpu(name: str, seconds: float, model: list[str], *groups: str) -> Step:
        sections = " then ".join(groups).split()
        return Step(name, seconds, ["gpu.py", *model, *prompts, "--out", str(out / f"{name}.json"), *sections])

    def serve(model: str, drafter: str) -> Step:
        words = f"serve_gpu.py --model {model} --drafter {drafter} --streams 64 --waves 3".split()
        return Step(f"serve-{model}", 100, [*words, "--small", small, *prompts])

    twin = ["--small", small, "--head", str(SHIPPED / "smollm2-135m-instruct")]
    never = "--sections never --batches 64,16,4,1 --never-rounds 1,1,1,3 --tokens 64"
    return [
        gpu(
            "qwen", 430, ["--model", qwen, "--head", str(SHIPPED / "qwen2.5-coder-1.5b-instruct")],
            f"{loop} --only plain,auto,head --section-seconds 50",
            f"{race} --k 8 --only auto,suffix,ngram,head --section-seconds 110",
            f"{never} --only suffix,ngram,auto,head,always,wrong --section-seconds 130",
            f"{VERIFY} --verify-tokens 100000 --section-seconds 100",
        ),
        gpu(
            "twin", 500, ["--model", "7b", *twin],
            f"{loop} --only plain,auto,head,model --section-seconds 70",
            f"{never} --section-seconds 150",
            f"{VERIFY} --verify-tokens 100000 --section-seconds 100",
            f"{race} --k 8,12 --only model,head --section-seconds 70",
            f"{timeline} --timeline {out / 'timeline.svg'}",
        ),
        serve("7b", "auto"),
        serve("smollm2", "off"),
        Step("layers", 90, ["gpu_layers.py", "--variants", "default", "--rows", "1,4,16"]),
        Step("w4", 100, ["w4_gpu.py", "--qwen", qwen, "--sections", "passes"]),
        Step("prompts", 110, ["gpu_prompts.py", "--sections", "own_prompt,products"]),
        Step("tests", 300, ["gpu_tests.py"]),
        gpu(
            "twin-w4", 240, ["--model", "7b-w4", *twin, "--dtype", "auto"],
            "--sections loop --batches 1,4,16 --tokens 96 --only plain,auto,head --section-seconds 60",
            f"{VERIFY} --verify-tokens 50000 --section-seconds 80",
        ),
    ]  # fmt: skip


def run(step: Step, out: Path, seconds: float) -> str:
    """Run a step for so many seconds at most; how it ended, in a word."""
    log, result = out / f"{step.name}.log", out / f"{step.name}.json"
    with log.open("w") as printed:
        process = subprocess.Popen(step.command, stdout=printed, stderr=subprocess.STDOUT, cwd=HERE.parent)
        ended = "ended"
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            ended = "stopped"
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if not result.exists() and (found := last_object(log.read_text(errors="replace"))) is not None:
        result.write_text(json.dumps(found, indent=1) + "\n")
    return ended if result.exists() else "failed"


def last_object(printed: str) -> object | None:
    """The JSON object in the last line that is one."""
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)  # type: ignore[no-any-return]
            except ValueError:
                continue
    return None


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--small", type=Path, required=True, help="SmolLM2 as a .gguf file or a folder")
    add("--qwen", type=Path, required=True, help="Qwen2.5-Coder-1.5B-Instruct as a .gguf file or a folder")
    add("--prompts", type=Path, required=True, help="JSONL in Spec-Bench's form")
    add("--out", type=Path, required=True)
    add("--minutes", type=float, default=30.0, help="no step begins after these, and none runs beyond them")
    add("--only", default="", help="steps, as qwen,serve-7b")
    add("--list", action="store_true", help="name the steps and their commands, and run nothing")
    options = parser.parse_args(given)
    known = [step.name for step in steps(options)]
    options.names = options.only.split(",") if options.only else known
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no step {unknown[0]}; choose from {','.join(known)}")
    return options


def main() -> None:
    options = arguments(sys.argv[1:])
    begin, options.out = time.perf_counter(), options.out.resolve()
    wanted = [step for step in steps(options) if step.name in options.names]
    if options.list:
        for step in wanted:
            print(f"{step.name}, {step.seconds:.0f} s: python {' '.join(map(str, step.command[1:]))}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    ended: dict[str, str] = {}
    for step in wanted:
        left = 60 * options.minutes - (time.perf_counter() - begin) - GRACE
        if left <= 0:
            ended[step.name] = "not begun"
            continue
        start = time.perf_counter()
        ended[step.name] = run(step, options.out, min(step.seconds, left))
        print(f"{step.name}: {ended[step.name]} after {time.perf_counter() - start:.0f} s", flush=True)
        if ended[step.name] == "failed":
            print("\n".join((options.out / f"{step.name}.log").read_text(errors="replace").splitlines()[-12:]))
    print(json.dumps({"bench": "gpu_plan", "steps": ended, "command": " ".join(["python", *sys.argv])}))


if __name__ == "__main__":
    main()
