"""Layer skipping: the sets that the search finds, the speedup it expects, and the measured speedup over plain decoding.

    python bench/skips.py [--model FILE] [--data PROMPTS.jsonl] [--search-seconds 240] [--tokens 48] [--svg FILE]

Published results (bench/results/2026-11-15-skips-NAME.json; NAME and command):

    smollm2    python bench/skips.py --search-seconds 240 --tokens 64 --prompts 8 --rounds 3 --k auto,1,2,3
               --trees 3x1,3x2 --threads 1 --svg skips-smollm2.svg
    7b         python bench/skips.py --model 7b --small smollm2.gguf --device cuda --search-seconds 25 --tokens 96
               --prompts 6 --rounds 1 --k auto,1,3 --svg skips-7b.svg
    refined    python bench/skips.py --refine 0.02,0.2 --stream 100 --tokens 72 --search-seconds 0
               --data spec_bench_question.jsonl --threads 1
    qwen2.5-coder-1.5b    python bench/skips.py --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --data mbpp.jsonl
               --search-seconds 480 --tokens 48 --prompts 8 --rounds 2 --k auto,1,2,3 --trees 3x1 --threads 1
               --svg skips-qwen2.5-coder-1.5b.svg

First the search of `outrider tune`, on the target's own answers to some prompts. Then a race on *other* prompts; every
contender answers each prompt once per round, in rotating order: plain decoding; the set that was found, with several K
and K auto, with the whole head where the search would read a part of it, and on a CPU as small trees; and the default
set that is used without a search. Ids are compared. × plain counts tokens after the first, each prompt by its median
over rounds (on a CPU with --threads 1 by that thread's CPU time, which other processes do not affect). t_draft is the
median of a drafted token and t_verify that of a pass (by the device's clock on a GPU). `expected` is the search's
estimate. `--refine` instead serves a stream of prompts from the default set, with each of these shares of the time for
refining it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gpu_common import TWINS
from outrider import LLM, SamplingParams
from outrider.drafters.layerskip.drafter import middle_layers
from outrider.drafters.layerskip.search import STEPS, ScoredSkip, Search, Skip
from outrider.measure.bench import EncodedPrompt, encode_prompts
from outrider.measure.environment import environment
from outrider.measure.plots import Axes, Point, Series, lines
from outrider.measure.statistics import ALL, BenchRow, Pair, Setup, TimedRun, bench_row
from outrider.measure.tune import scored_text, skip_from, skip_search
from outrider.models.checkpoint import open_checkpoint
from outrider.models.prompts import bundled, from_file

PLAIN = "plain"
SKIPPER = "layerskip"
STYLE = (
    "<style>.line{fill:none;stroke-width:2}.s0{stroke:#3366cc}.s1{stroke:#cc6633}.dot.s0{fill:#3366cc}"
    ".dot.s1{fill:#cc6633}.grid{stroke:#ddd}.level{stroke:#888;stroke-dasharray:4}"
    ".label{font:11px sans-serif;fill:#444}</style>"
    '<text class="label" x="70" y="232" style="fill:#3366cc">agreement</text>'
    '<text class="label" x="70" y="248" style="fill:#cc6633">expected speed, × plain</text>'
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the search


def answers(llm: LLM, prompts: list[EncodedPrompt], tokens: int) -> list[tuple[list[int], list[int]]]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [(q.ids, llm.generate([q.ids], params)[0].token_ids) for q in prompts]


def searched(
    llm: LLM, prompts: list[EncodedPrompt], seconds: float, start: Skip | None
) -> tuple[Search, dict[str, Any]]:
    """Run the search for this many seconds; returns it with its figures."""
    begin = time.perf_counter()
    search = skip_search(llm, answers(llm, prompts, 256 // len(prompts) + 1), start)
    assert search is not None, "this model has no layers to skip"
    ready, shown = time.perf_counter(), [0.0]

    def progress(s: Search) -> None:
        now = time.perf_counter() - ready
        if s.best is not None and (now - shown[0] > 10 or now >= seconds):
            shown[0] = now
            best = f"{s.best.speedup:.3f} × expected {described(s.best)}"
            say(f"{now:5.0f} s: {len(s.agreements)} sets, the best: {best}")

    search.run(lambda: time.perf_counter() - ready >= seconds, progress)
    spent = time.perf_counter() - ready
    tried = len(search.agreements)
    facts = {"prompts": len(prompts), "tried": tried, "seconds": spent, "getting_ready_s": ready - begin}
    return search, facts | {"seconds_a_set": spent / tried}


def described(found: ScoredSkip) -> str:
    ids = "all" if found.skip.vocab is None else f"the first {found.skip.vocab}"
    return f"(K = {found.k}, {len(found.skip.blocks)} blocks skipped, {ids} ids, agrees {found.agreement:.3f})"


def as_json(search: Search, found: ScoredSkip) -> dict[str, Any]:
    own = {"time_left_out": search.skipped_share(found.skip), "blocks": len(found.skip.blocks), "k": found.k}
    return own | {"agreement": found.agreement, "expected": found.speedup} | found.skip.options


def frontier(search: Search) -> list[ScoredSkip]:
    """The fastest set for every share of skipped time, smallest share first."""
    return [search.fastest[step] for step in sorted(search.fastest)]


def plot(search: Search, name: str) -> str:
    best = frontier(search)
    at = [round(100 * round(STEPS * search.skipped_share(found.skip)) / STEPS) for found in best]
    series = [
        Series("agreement", [Point(x, found.agreement) for x, found in zip(at, best, strict=True)]),
        Series("expected × plain", [Point(x, found.speedup) for x, found in zip(at, best, strict=True)]),
    ]
    title = f"{name}: agreement (blue) and expected speed (orange), by skipped time"
    drawn = lines(Axes(title, "% of a drafted token's time skipped", "agreement, × plain", level=1.0), series)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "<title>", STYLE + "<title>", 1
    )


# ---------------------------------------------------------------- the race


class Watch:
    """A listener: seconds of a drafted token and of a pass, in decoding steps."""

    reads_logits = reads_guesses = False

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"draft": [], "verify": []}
        self.on = False

    def observe(self, step: Any) -> None:
        if not self.on or any(turn.feed > 1 or not turn.whole for turn in step.turns):
            return
        taken = {phase: step.output.seconds.get(phase, step.clock[phase]) for phase in self.seconds}
        depth = max(passes(tree.parents) for tree in step.draft.trees)
        if depth:
            self.seconds["draft"].append(taken["draft"] / depth)
        self.seconds["verify"].append(taken["verify"])

    def milliseconds(self, phase: str) -> float | None:
        return 1e3 * statistics.median(self.seconds[phase]) if self.seconds[phase] else None


def clock_of(llm: LLM) -> Callable[[], float]:
    """The CPU time of a single thread, which other processes do not affect; wall time otherwise."""
    alone = llm.device == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def passes(parents: list[int]) -> int:
    """The depth of a tree, which is the number of draft passes."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


@dataclass
class Contender:
    name: str
    setup: Setup
    llm: LLM
    watch: Watch = field(default_factory=Watch)
    runs: dict[tuple[int, int], TimedRun] = field(default_factory=dict)  # by prompt and round

    def __post_init__(self) -> None:
        self.llm.engine.listeners = (*self.llm.engine.listeners, self.watch)

    def answer(self, ids: list[int], tokens: int) -> TimedRun:
        """As in a server: the controller keeps its statistics, but no K/V is reused."""
        self.llm.engine.cache.drop_retired()
        gc.collect()
        clock = clock_of(self.llm)
        begin, first = clock(), None
        for _ in self.llm.stream(ids, SamplingParams(max_tokens=tokens, ignore_eos=True)):
            first = clock() if first is None else first
        end = clock()
        first = end if first is None else first
        return TimedRun(self.llm.last.generated, first - begin, end - first, self.llm.last.stats)


def contenders(base: LLM, found: ScoredSkip, given: argparse.Namespace) -> list[Contender]:
    best, unsearched = found.skip.options, {"skip_layers": sorted(middle_layers(base.target.config.layers))}
    ks: list[Any] = [k if k == "auto" else int(k) for k in given.k.split(",")]
    ks += [] if found.k in ks else [found.k]
    fixed = max((k for k in ks if k != "auto" and k <= 3), default=found.k)
    setups = {f"found, K {k}": Setup(SKIPPER, k, best) for k in ks}
    if found.skip.vocab is not None:
        setups[f"all ids, K {found.k}"] = Setup(SKIPPER, found.k, replace(found.skip, vocab=None).options)
    for width, depth in [map(int, shape.split("x")) for shape in given.trees.split(",") if shape]:
        shape = {"tree": True, "tree_width": width, "tree_depth": depth}
        setups[f"found, tree {width} × {depth}"] = Setup(SKIPPER, width * depth, best | shape)
    setups |= {f"unsearched, K {k}": Setup(SKIPPER, k, unsearched) for k in ("auto", fixed)}
    made = [Contender(PLAIN, Setup("off", 0), base.using(drafter="off"))]
    for name, s in setups.items():
        made.append(Contender(name, s, base.using(drafter=s.drafter, k=s.k, refine=False, **s.options)))
    return made


def race(entered: list[Contender], prompts: list[EncodedPrompt], tokens: int, rounds: int) -> None:
    """All contenders on every prompt, after an untimed run of the first prompts that captures graphs."""
    for c in entered:
        for prompt in prompts[:2]:
            c.answer(prompt.ids, tokens)
        c.watch.on = True
    for number in range(rounds):
        for i, prompt in enumerate(prompts):
            turn = (number * len(prompts) + i) % len(entered)
            for c in entered[turn:] + entered[:turn]:
                c.runs[i, number] = c.answer(prompt.ids, tokens)
            say(f"round {number + 1}, prompt {i + 1} of {len(prompts)}")


def summed_up(c: Contender, plain: Contender, prompts: list[EncodedPrompt]) -> dict[str, Any]:
    pairs = [Pair(i, prompts[i].category, n, plain.runs[i, n], answer) for (i, n), answer in c.runs.items()]
    r: BenchRow = bench_row(c.setup, ALL, pairs)
    names = ("speedup", "ci_low", "ci_high", "tok_s", "tau", "alpha", "alpha_by_position", "drafted", "divergences")
    kinds = {p.category: [q for q in pairs if q.category == p.category] for p in pairs}
    memory = c.llm.engine.drafter.traits.memory()
    return {name: getattr(r, name) for name in names} | {
        "k": c.setup.k,
        "t_draft_ms": c.watch.milliseconds("draft"),
        "t_verify_ms": c.watch.milliseconds("verify"),
        "added_memory_bytes": memory.weights + memory.kv,
        "failures": r.failures,
        "why": r.why,
        "by_kind": {}
        if len(kinds) < 2
        else {kind: bench_row(c.setup, kind, some).speedup for kind, some in kinds.items()},
    }


def show(rows: dict[str, dict[str, Any]]) -> None:
    names = ("× plain", "tok/s", "τ", "α", "t_draft", "t_verify", "memory", "diverged")
    print(f"{'':20}" + "".join(f"{name:>10}" for name in names))
    for name, r in rows.items():
        values = (r["speedup"], r["tok_s"], r["tau"], r["alpha"], r["t_draft_ms"], r["t_verify_ms"])
        cells = "".join(f"{'–':>10}" if value is None else f"{value:10.3f}" for value in values)
        print(f"{name:20}{cells}{r['added_memory_bytes']:10}{r['divergences']:10}")


# ---------------------------------------------------------------- refined while serving


def refined(base: LLM, prompts: list[EncodedPrompt], search: Search, share: float, given: argparse.Namespace) -> Any:
    """Serve a stream of prompts from the default set on; the refined set is scored on the search's text."""
    layers = sorted(middle_layers(base.target.config.layers))
    llm = base.using(drafter=SKIPPER, k=given.refine_k, refine=share, skip_layers=layers)
    drafter: Any = llm.engine.drafter
    first, stats = drafter.refinement.skip, []
    begin = time.perf_counter()
    for prompt in prompts:
        llm.engine.cache.drop_retired()
        params = SamplingParams(max_tokens=given.tokens, ignore_eos=True)
        stats.append(llm.generate([prompt.ids], params)[0].stats)
    taken, third = time.perf_counter() - begin, max(1, len(stats) // 3)
    alphas = [sum(s.accepted for s in some) / sum(s.reached for s in some) for some in (stats[:third], stats[-third:])]
    r = drafter.refinement
    sets = {when: as_json(search, search.score(skip)) for when, skip in (("first", first), ("last", r.skip))}
    facts = {"share": share, "prompts": len(prompts), "seconds": taken, "looking_s": r.spent, "adopted": r.adopted}
    return facts | {"alpha_first_third": alphas[0], "alpha_last_third": alphas[1]} | sets


# ---------------------------------------------------------------- command line


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="a folder, a .gguf file, 7b or 30b (SmolLM2 widened, twin.py); default: SmolLM2")
    add("--small", help="SmolLM2, for the twins")
    add("--device", default="cpu")
    add("--dtype", default="auto", help="default: int8 on a CPU, bfloat16 on a GPU")
    add("--threads", type=int)
    add("--data", type=Path, help="prompts as JSONL; default: the bundled ones")
    add("--search-seconds", type=float, default=120.0)
    add("--start", type=Path, help="an earlier result: the search starts with its best set")
    add("--search-prompts", type=int, default=8)
    add("--tokens", type=int, default=96)
    add("--prompts", type=int, default=8, help="in the race, different from those of the search")
    add("--rounds", type=int, default=2, help="0: no race")
    add("--k", default="auto,3,5")
    add("--trees", help="width x depth, several with commas; default: 3x1,3x2 on a CPU, none on a GPU")
    add("--refine", default="", help="shares of the time for refining a set while serving, instead of the race")
    add("--refine-k", type=int, default=1)
    add("--stream", type=int, default=100, help="prompts that are served then")
    add("--svg", type=Path)
    given = parser.parse_args()
    if given.device != "cpu" and given.dtype == "auto":
        given.dtype = "bfloat16"
    given.trees = ("3x1,3x2" if given.device == "cpu" else "") if given.trees is None else given.trees
    return given


def opened(given: argparse.Namespace) -> LLM:
    target = given.model
    if target in TWINS:
        target = TWINS[target](open_checkpoint(given.small), device=given.device, seed=1)
    own = {"dtype": given.dtype, "device": given.device, "threads": given.threads}
    return LLM(target, drafter="off", max_length=1024, max_batch=1, **own)


def command() -> str:
    """The command line without the folders of this machine."""
    return " ".join(["python", *(re.sub(r"^\S*/(?!skips\.py)", "", word) for word in sys.argv)])


def told_of(base: LLM, search: Search, facts: dict[str, Any], elsewhere: float) -> dict[str, Any]:
    """The search's results, printed and for the JSON line."""
    best, every = search.best, frozenset(range(base.target.config.layers))
    assert best is not None
    print(f"{base.name}, {base.dtype}, {base.device}: {len(search.agreements)} sets in {facts['seconds']:.0f} s")
    for each in frontier(search):
        skipped = search.skipped_share(each.skip)
        print(f"  {skipped:4.0%} of the time skipped: {each.speedup:.3f} × expected {described(each)}")
    print(
        f"best: {best.skip.options}, {best.speedup:.3f} × expected {described(best)}; agrees {elsewhere:.3f} elsewhere"
    )
    return facts | {
        "best": as_json(search, best),
        "agreement_on_the_race_text": elsewhere,
        "plain_ms": 1e3 * search.pass_cost(1),
        "draft_ms_nothing_left_out": 1e3 * search.draft_cost(Skip()),
        "attention_share": search.skipped_share(Skip(attention=every)),
        "mlp_share": search.skipped_share(Skip(mlp=every)),
        "head_share": search.skipped_share(Skip(vocab=1)),
        "rows_ms": {rows: 1e3 * search.pass_cost(rows) for rows in (1, 2, 3, 4, 6, 8, 12, 16)},
        "frontier": [as_json(search, each) for each in frontier(search)],
    }


def main() -> None:
    given = parsed()
    base = opened(given)
    every = encode_prompts(base, from_file(given.data) if given.data else bundled())
    prompts, others = every[: given.prompts], every[given.prompts :]
    start = skip_from({"skip_search": json.loads(given.start.read_text())["search"]["best"]}) if given.start else None
    search, facts = searched(base, others[: given.search_prompts], given.search_seconds, start)
    assert search.best is not None
    elsewhere = scored_text(base, answers(base, prompts, 256 // len(prompts) + 1)).agreement(search.best.skip)
    result: dict[str, Any] = {"bench": "skips", "command": command(), "model": base.name, "dtype": base.dtype}
    result |= {"device": base.device, "clock": clock_of(base).__name__, "layers": base.target.config.layers}
    result["search"] = told_of(base, search, facts, elsewhere)
    if given.svg:
        given.svg.write_text(plot(search, base.name), encoding="utf-8")
    if given.refine:
        streamed = (others * given.stream)[: given.stream]
        result["refined"] = [refined(base, streamed, search, float(s), given) for s in given.refine.split(",")]
        print(json.dumps(result["refined"], indent=1))
    elif given.rounds:
        entered = contenders(base, search.best, given)
        race(entered, prompts, given.tokens, given.rounds)
        result |= {"prompts": len(prompts), "tokens": given.tokens, "rounds": given.rounds}
        result["contenders"] = {c.name: summed_up(c, entered[0], prompts) for c in entered}
        show(result["contenders"])
    where = {name: value for name, value in environment().items() if name not in ("machine", "platform")}
    print(json.dumps(result | {"environment": where}))


if __name__ == "__main__":
    main()
