"""Outrider against llama.cpp, transformers and vLLM: one interleaved run on one machine.

    python bench/peers.py [--model FILE.gguf] [--prompts FILE.jsonl] [--per-kind 1] [--longest 512] [--tokens 96]
                          [--rounds 3] [--rows 1,8,16] [--only NAME …] [--python ENGINE=PYTHON …]
                          [--journal FILE.jsonl] [--minutes 11] [--short]

llama.cpp needs an environment of its own: `make .venv-llamacpp/.installed`, or `--python llamacpp=PYTHON` for another.
Prompts of nine kinds and more: Spec-Bench's file has thirteen, the bundled prompts seven.

Each contender is a process of its own (`worker.py`) that waits for its turn. Prompts go round them, in an order
that changes from prompt to prompt, so that machine load affects all of them. All get the same prompt ids and the same
number of greedy tokens. Between prompts the speed of reading memory is measured; bytes of a pass are those of all
matrices in the file, and the quotient is the most passes a second that this machine can make of it. At the end of each
round passes over `--rows` rows are timed, in turn, with the logits of every row.

Every measurement is written to the journal. With the same options the run continues from it: after `--minutes` the
script stops, prints what it has, and is called again. The last line is one JSON object: medians over prompts and rounds
of decoding speed (after the first token) and of whole requests, ratios to llama.cpp's best mode, passes by rows, and
resident memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from claims import sample
from outrider.backends.machine import cpu_name, load_average
from outrider.models.checkpoint import Checkpoint, open_checkpoint
from outrider.models.prompts import bundled, from_file

CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "outrider plain": ("outrider", {"drafter": "off"}),
    "outrider auto": ("outrider", {"drafter": "auto", "k": "auto"}),
    "outrider auto, no head": ("outrider", {"drafter": "auto", "k": "auto", "auto": "suffix,ngram"}),
    "outrider suffix": ("outrider", {"drafter": "suffix", "k": "auto"}),
    "llama.cpp": ("llamacpp", {}),
    "llama.cpp lookup": ("llamacpp", {"prompt_lookup": 2}),
    "llama.cpp lookup 10": ("llamacpp", {"prompt_lookup": 10}),
    "transformers": ("transformers", {"dtype": "float32"}),
    "transformers bf16": ("transformers", {"dtype": "bfloat16"}),
    "transformers lookup": ("transformers", {"dtype": "float32", "prompt_lookup_num_tokens": 5}),
    "vllm": ("vllm", {}),
    "vllm ngram": (
        "vllm",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
    ),
}
USUAL = [name for name in CONTENDERS if not name.startswith("vllm") and name != "transformers lookup"]
ROWS_BY = ("outrider plain", "llama.cpp lookup")  # whose passes by rows are timed; the latter computes all logits
MEMORY, BEST = "memory", "llama.cpp"
CONTEXT, PASSES = 128, 5  # tokens before the timed rows; passes of each number of rows in a round
LLAMA = Path(".venv-llamacpp/bin/python")


@dataclass
class Contender:
    name: str
    process: subprocess.Popen[str]
    facts: dict[str, Any]
    memory: dict[str, float] | None = None  # after texts, before passes over rows, which keep a cache of their own

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return read(self.process)

    def generate(self, ids: list[int], tokens: int) -> dict[str, Any]:
        result = self.ask(ids=ids, tokens=tokens)
        assert len(result["ids"]) == tokens, f"{self.name} made {len(result['ids'])} tokens instead of {tokens}"
        first = result["first"]
        decode = None if first is None else (tokens - 1) / (result["seconds"] - first)
        return {"tok_s": tokens / result["seconds"], "decode_tok_s": decode, "ids": result["ids"]}

    def resident(self) -> dict[str, float]:
        """Gigabytes: now and at most, its own and of mapped files. Empty where the system does not tell (not Linux)."""
        names = {"VmRSS": "now", "VmHWM": "most", "RssAnon": "own", "RssFile": "files"}
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return {}
        fields = dict(line.split(":", 1) for line in lines)
        return {name: round(int(fields[key].split()[0]) * 1024 / 1e9, 3) for key, name in names.items()}


class Journal:
    """Measurements on disk, one JSON object a line; the first line has the options they were made with."""

    def __init__(self, path: Path | None, plan: dict[str, Any], minutes: float) -> None:
        self.path, self.end, self.records = path, time.monotonic() + 60 * minutes, {}
        self.new = 0
        if path is None:
            return
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if lines and json.loads(lines[0]) != plan:
            sys.exit(f"{path} was made with other options: give them again, or another --journal.")
        for line in lines[1:]:
            record = json.loads(line)
            self.records[tuple(record["key"])] = record
        if not lines:
            path.write_text(json.dumps(plan) + "\n", encoding="utf-8")

    def has_time(self) -> bool:
        return time.monotonic() < self.end

    def measured(self, measure: Callable[[], dict[str, Any]], *key: object) -> dict[str, Any]:
        """What is known under this key; measured first if nothing is. Raises TimeoutError when time is up."""
        if key not in self.records:
            if not self.has_time():
                raise TimeoutError
            record = {"key": list(key), **measure()}
            self.records[key], self.new = record, self.new + 1
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
        return self.records[key]

    def all(self, what: str) -> Iterator[dict[str, Any]]:
        return (record for key, record in self.records.items() if key[0] == what)


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout
    for line in process.stdout:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise RuntimeError("the process ended")


def start(name: str, model: str, pythons: dict[str, str], **options: Any) -> Contender | None:
    engine, own = (MEMORY, {}) if name == MEMORY else CONTENDERS[name]
    return start_worker(name, engine, model, own | options if engine == "outrider" else own, pythons)


def start_worker(
    name: str, engine: str, model: str, options: dict[str, Any], pythons: dict[str, str]
) -> Contender | None:
    """None, and a line that says why, if it does not start."""
    worker = Path(__file__).with_name("worker.py")
    command = [pythons.get(engine, sys.executable), str(worker), engine, model, json.dumps(options)]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        print(f"{name}: not available ({error})", file=sys.stderr)
        return None
    try:
        return Contender(name, process, read(process))
    except RuntimeError:
        lines = (process.stderr.read() if process.stderr else "").strip().splitlines()
        print(f"{name}: not available ({lines[-1] if lines else 'no output'})", file=sys.stderr)
        return None


def bytes_of_pass(checkpoint: Checkpoint) -> int:
    """Of all matrices in the file, each read once; an input embedding of its own is read by rows and not counted."""
    config, weights, total = checkpoint.config, checkpoint.weights, 0
    for name in weights.names():
        if name.endswith(".bias") or "norm" in name or (name == "embed_tokens.weight" and not config.tied):
            continue
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[weights.kind(name)]]
        rows, columns = weights.shape(name)
        total += rows * columns // block * size
    return total


# ------------------------------------------------------------ the run


def race(
    contenders: list[Contender],
    memory: Contender | None,
    prompts: list[tuple[str, list[int]]],
    options: Any,
    journal: Journal,
) -> None:
    """Rounds of all prompts by all contenders. Raises TimeoutError when time is up."""
    warm: set[str] = set()

    def generate(contender: Contender, ids: list[int]) -> dict[str, Any]:
        if contender.name not in warm:
            contender.ask(ids=ids[:16], tokens=8)  # the first request pays for lazy initialisation
            warm.add(contender.name)
        return contender.generate(ids, options.tokens)

    for number in range(options.rounds):
        for place, (kind, ids) in enumerate(prompts):
            shift = (place + number) % len(contenders)
            speeds = []
            for c in contenders[shift:] + contenders[:shift]:
                got = journal.measured(lambda c=c, ids=ids: generate(c, ids), "text", number, place, kind, c.name)
                speeds.append(f"{c.name} {got['tok_s']:.1f}")
            if memory is not None:
                journal.measured(memory.ask, MEMORY, number, place)
            print(f"{number + 1} {kind:<15} {'  '.join(sorted(speeds))}", flush=True)
        for c in contenders:
            c.memory = c.memory or c.resident()
        time_rows(contenders, max((ids for _, ids in prompts), key=len), number, options.rows, journal)


def time_rows(contenders: list[Contender], ids: list[int], number: int, rows: list[int], journal: Journal) -> None:
    chosen, ids = [c for c in contenders if c.name in ROWS_BY], (ids * CONTEXT)[: CONTEXT + max(rows, default=0)]
    for again in range(-1, PASSES):  # the first is not kept: it fills the context
        for n in rows:
            for c in chosen:
                if again < 0:
                    if ("rows", number, PASSES - 1, n, c.name) not in journal.records and journal.has_time():
                        c.ask(ids=ids, rows=n)
                    continue
                journal.measured(lambda c=c, n=n: c.ask(ids=ids, rows=n), "rows", number, again, n, c.name)


# ------------------------------------------------------------ the result


def median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def summary(contenders: list[Contender], journal: Journal, pass_bytes: int) -> dict[str, Any]:
    texts, rows = list(journal.all("text")), list(journal.all("rows"))
    speeds = [record["bytes_per_second"] for record in journal.all(MEMORY)]
    limit = statistics.median(speeds) / pass_bytes if speeds else None
    table: dict[str, Any] = {}
    for c in contenders:
        own = [r for r in texts if r["key"][-1] == c.name]
        counts = sorted({r["key"][3] for r in rows if r["key"][-1] == c.name})
        passes = {n: median([r["seconds"] for r in rows if r["key"][3:] == [n, c.name]]) for n in counts}
        row = {"tok_s": median([r["tok_s"] for r in own]), "decode_tok_s": median([r["decode_tok_s"] for r in own])}
        decode = row["decode_tok_s"]
        table[c.name] = row | {
            "runs": len(own), "of_memory_limit": decode / limit if decode and limit else None, "pass_seconds": passes,
            "rows_to_one": {n: s / passes[1] for n, s in passes.items() if s and passes.get(1)},
            "by_kind": by_kind(own), "resident_gb": c.memory or c.resident(), **c.facts,
        }  # fmt: skip
    return {
        "read_gb_s": median([s / 1e9 for s in speeds]), "pass_bytes": pass_bytes, "memory_limit_passes_s": limit,
        "to_best_llama_cpp": ratios(table), "contenders": table,
    }  # fmt: skip


def by_kind(records: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Medians of decoding and of whole requests."""
    kinds = defaultdict(list)
    for record in records:
        kinds[record["key"][3]].append(record)
    return {
        kind: [median([r["decode_tok_s"] for r in some]), median([r["tok_s"] for r in some])]
        for kind, some in kinds.items()
    }


def ratios(table: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Each contender's medians by the best of llama.cpp's modes, decoding and whole requests."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for measure in ("decode_tok_s", "tok_s"):
        best = max((row[measure] or 0 for name, row in table.items() if name.startswith(BEST)), default=0)
        for name, row in table.items():
            if best and row[measure]:
                found[name][measure] = row[measure] / best
    return dict(found)


def same_text(journal: Journal) -> tuple[int, int]:
    """How many speculative texts of Outrider equal its plain text, and of how many."""
    texts = {tuple(r["key"][1:]): r["ids"] for r in journal.all("text")}
    pairs = [(ids, texts.get((*key[:-1], "outrider plain"))) for key, ids in texts.items()
             if key[-1].startswith("outrider ") and key[-1] != "outrider plain"]  # fmt: skip
    known = [ids == plain for ids, plain in pairs if plain is not None]
    return sum(known), len(known)


def show(result: dict[str, Any]) -> None:
    if result["memory_limit_passes_s"]:
        print(f"memory reads {result['read_gb_s']:.1f} GB/s; a pass reads {result['pass_bytes'] / 1e9:.3f} GB: "
              f"at most {result['memory_limit_passes_s']:.1f} passes a second")  # fmt: skip
    print(f"{'':<22}{'decoding':>9}{'× llama':>9}{'of limit':>9}{'requests':>10}{'× llama':>9}{'GB':>7}   rows to one")
    for name, row in sorted(result["contenders"].items(), key=lambda item: -(item[1]["tok_s"] or 0)):
        ratio = result["to_best_llama_cpp"].get(name, {})
        cells = (row["decode_tok_s"], ratio.get("decode_tok_s"), row["of_memory_limit"], row["tok_s"],
                 ratio.get("tok_s"), row["resident_gb"].get("most"))  # fmt: skip
        widths, digits = (9, 9, 9, 10, 9, 7), (1, 2, 2, 1, 2, 2)
        line = "".join(
            f"{'–' if x is None else format(x, f'.{d}f'):>{w}}" for x, w, d in zip(cells, widths, digits, strict=True)
        )
        print(f"{name:<22}{line}   " + "  ".join(f"{n}: {x:.2f}" for n, x in row["rows_to_one"].items()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--per-kind", type=int, default=1, help="prompts of each kind")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt at most: its end is kept")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",") if n], default=[1, 8, 16])
    parser.add_argument("--dtype", default="auto", help="Outrider's")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="only these contenders")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--journal", type=Path, help="where measurements are kept, to continue after an interruption")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many, with what there is")
    parser.add_argument("--short", action="store_true", help="a smoke run: two prompts, 8 tokens, one round")
    options = parser.parse_args()
    if options.short:
        options.tokens, options.rounds, options.longest = 8, 1, 48
    return options


def main() -> None:
    options = parse()
    checkpoint = open_checkpoint(options.model)
    pythons = {"llamacpp": str(LLAMA)} if LLAMA.exists() else {}
    pythons |= dict(pair.split("=", 1) for pair in options.python)
    chosen = sample(from_file(options.prompts) if options.prompts else bundled(), options.per_kind)
    chosen = chosen[:2] if options.short else chosen
    encoded = [checkpoint.tokenizer.encode_chat([{"role": "user", "content": p.text}]) for p in chosen]
    prompts = [(p.category, ids[-options.longest :]) for p, ids in zip(chosen, encoded, strict=True)]
    names = options.only or USUAL
    plan = {
        "model": checkpoint.name,
        "prompts": prompts,
        "tokens": options.tokens,
        "rows": options.rows,
        "dtype": options.dtype,
    }
    journal = Journal(options.journal, json.loads(json.dumps(plan)), options.minutes)
    started = [start(name, str(checkpoint.path), pythons, dtype=options.dtype) for name in names]
    contenders = [c for c in started if c is not None]
    memory = start(MEMORY, "", pythons)
    complete = True
    try:
        race(contenders, memory, prompts, options, journal)
    except (TimeoutError, KeyboardInterrupt):
        complete = False
        print("Stopped before the end: the same command with the same --journal continues.", file=sys.stderr)
    result = summary(contenders, journal, bytes_of_pass(checkpoint))
    for c in [*contenders, *([memory] if memory else [])]:
        c.process.kill()
    show(result)
    same, of = same_text(journal)
    print(json.dumps({"bench": "peers", "command": " ".join(["python", *sys.argv]), "model": checkpoint.name,
                      "complete": complete, "kinds": len({kind for kind, _ in prompts}), "tokens": options.tokens,
                      "rounds": options.rounds, "identical_to_plain": f"{same}/{of}", "cpu": cpu_name(),
                      "load_average": load_average(), **result}))  # fmt: skip


if __name__ == "__main__":
    main()
