"""Drafting ahead: hit rate against fan-out, and tokens per second beside plain and ordinary speculative decoding.

    python bench/ahead.py [--draft-model DIR] [--skip 12,14,16] [--tokens 64] [--prompts 8] [--threads 1] [--k 3]

Published results (bench/results/2026-11-15-ahead-NAME.json; NAME and command):

    curve-smollm2    python bench/ahead.py --prompts 24 --tokens 64 --threads 1 --only curve
    validated-int8   python bench/ahead.py --model smollm2 --k 3 --threads 1 --prompts 4 --tokens 64 --only race
                     --temperatures 0,1
    gpu-stream0      python bench/ahead.py --small smollm2.gguf --device cuda --only race --k 5 --tokens 96 --warm-up 1
                     --timeline stream0.svg --model 7b --draft-model smollm2.gguf --draft-device cuda --prompts 6
                     --temperatures 0
    gpu-cores7       the same with --draft-device cpu --draft-dtype int8 --ahead-threads 6
    gpu-head7        the same with --head FOLDER (the shipped head) instead of a draft model

With --device cuda --draft-device cuda the drafter runs in a second stream of the target's GPU (--place process: in
another process).

The curve: the target answers prompts at each temperature; a draft model reads the answers and ranks the target's
tokens, with the target's noise and without. `end` is how often the token is among the first F. `rejection` is the same
where the drafted token (the first of the noised ranking) was wrong, with that token left out. These are hit rates of
forks, because the text before an outcome is the target's own.

The race: each prompt goes in turn to plain decoding, ordinary speculation with the same drafter, and `ahead` (always,
and where its controller decides), after --warm-up untimed rounds. Ids are compared. `tok_s` is of whole requests,
`decode_tok_s` of decoding steps alone (no prompts, no captures). Without --draft-model the target drafts for itself
with layers skipped (--skip). The projection of bench/ahead_sim.py from the race's own times is printed beside the
measurement; --timeline draws a few steps. The last line is one JSON object, which bench/ahead_sim.py reads; with --only
curve its `setting` holds CPU times of passes and the curve's hit rates, as if every thread had its own core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import ahead_sim
import ahead_timeline
import twin
from ahead_watch import Watch
from gpu_common import TWINS
from outrider import LLM, SamplingParams
from outrider.backends import Part
from outrider.backends.load import load_model
from outrider.backends.loaded_weights import embedding_of
from outrider.drafters.ahead.forks import Forker, ForkPlan, likeliest
from outrider.drafters.ahead.statistics import MissCurve, PowerLaw
from outrider.drafters.head.network import Head, read_head
from outrider.engine.sampling import ranked
from outrider.measure.environment import environment
from outrider.models.checkpoint import open_checkpoint
from outrider.models.prompts import bundled
from outrider.types import Sequence

WIDEST = 16
SHOWN = (1, 2, 3, 4, 6, 8, 12, 16)
SECONDS = ("window", "beside", "ahead_host", "wake", "first", "first_idle", "deeper", "deeper_idle", "jit")
PLAIN, ORDINARY, AHEAD, CHOOSES = "plain", "ordinary", "ahead", "ahead, by itself"


# ---------------------------------------------------------------- the curve


class Ranks:
    """Ranks of the target's tokens in a draft model's ranking."""

    def __init__(self) -> None:
        self.end, self.inside = MissCurve(PowerLaw(0.5, 0.5)), MissCurve(PowerLaw(0.7, 0.4))
        for curve in (self.end, self.inside):
            curve.DECAY = 1.0  # all outcomes have the same weight

    def add(self, order: list[int], drafted: int, token: int) -> None:
        self.end.add(_place(order, token), WIDEST)
        if token != drafted:
            self.inside.add(_place([t for t in order if t != drafted], token), WIDEST)

    def as_json(self) -> dict[str, Any]:
        curves = {"end": self.end, "rejection": self.inside}
        return {
            name: {
                "hits": dict(zip(range(1, WIDEST + 1), curve.hit_rates(), strict=False)),
                "c": round(curve.law.c, 4),
                "r": round(curve.law.r, 4),
                "outcomes": round(curve.tried[0]),
            }
            for name, curve in curves.items()
        }


def _place(order: list[int], token: int) -> int | None:
    return order.index(token) + 1 if token in order else None


def curve(forker: Forker, llm: LLM, prompts: list[list[int]], given: argparse.Namespace, temperature: float) -> Any:
    """α of the drafter and the hit rates of both rankings, over the target's own answers."""
    rankings, right, seen = {"noised": Ranks(), "plain": Ranks()}, 0, 0
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=min(given.tokens, 64), ignore_eos=True)
        (answer,) = llm.generate([prompt], params)
        seq = Sequence(number, prompt, params, seed=number)
        plan = ForkPlan(seq, answer.token_ids, [])
        forker.open(seq)
        forker.cache.reserve(seq, len(prompt), len(plan.trunk))
        logits = forker.read_trunks([plan])  # [1 + tokens, V]
        for i, token in enumerate(answer.token_ids):
            before = answer.token_ids[:i]
            noised = [t for t, _ in ranked(logits[i], seq, before, WIDEST + 1)]
            rankings["noised"].add(noised, noised[0], token)
            rankings["plain"].add([t for t, _ in likeliest(logits[i], seq, before, WIDEST + 1)], noised[0], token)
            right, seen = right + (token == noised[0]), seen + 1
        forker.close(seq)
    return {"temperature": temperature, "alpha": right / seen} | {
        name: ranks.as_json() for name, ranks in rankings.items()
    }


def show_curve(facts: dict[str, Any]) -> None:
    print(f"\ntemperature {facts['temperature']:g}, α = {facts['alpha']:.3f}; hit rate by forks, miss(F) = c F^-r")
    print(f"{'':22}" + "".join(f"{f:>7}" for f in SHOWN) + "       c      r")
    for ranking in ("noised", "plain"):
        for name, found in facts[ranking].items():
            cells = "".join(f"{found['hits'].get(f, float('nan')):7.3f}" for f in SHOWN)
            print(f"{ranking + ', ' + name:22}{cells}  {found['c']:6.3f} {found['r']:6.3f}")


# ---------------------------------------------------------------- the race


def head_for(base: LLM, given: argparse.Namespace) -> Head:
    """A new copy of the --head for one engine; for a twin it is widened too."""
    config, tensors = read_head(given.head)
    target: Any = base.target
    if config.hidden_size < target.config.hidden_size:
        small = open_checkpoint(given.small).config
        config, tensors = twin.widen_head(config, tensors, small, target.config, given.device, 1)
    dtype = target.compute
    return Head(config, tensors, embedding_of(target), dtype, target.device, 1024)


def head_engines(base: LLM, given: argparse.Namespace) -> dict[str, LLM]:
    """The engines of the race with a trained head, which drafts ahead in a thread or in a second stream."""
    own: dict[str, Any] = {"ahead_forks": given.forks, "ahead_fallback": given.fallback}
    k: Any = given.k
    return {
        PLAIN: base,
        ORDINARY: base.using(drafter="head", k=k, head=head_for(base, given)),
        AHEAD: base.using(drafter="ahead", k=k, ahead_always=True, head=head_for(base, given), **own),
        CHOOSES: base.using(drafter="ahead", k="auto", head=head_for(base, given), **own),
    }


def engines(base: LLM, given: argparse.Namespace) -> dict[str, LLM]:
    own = {"draft_model": given.draft_model or given.model or "smollm2", "skip_layers": given.skip}
    own |= {"draft_device": given.draft_device, "draft_dtype": given.draft_dtype, "ahead_forks": given.forks}
    own |= {"ahead_threads": given.ahead_threads, "ahead_fallback": given.fallback}
    own |= {"ahead_place": given.place} if given.place else {}
    if given.draft_model:
        kind = {"draft_dtype": given.draft_dtype} if base.device == "cpu" else {}  # on a GPU the default
        ordinary = base.using(drafter="model", k=given.k, draft_model=given.draft_model, **kind)
    else:
        ordinary = base.using(drafter="layerskip", k=given.k, skip_layers=given.skip, refine=False)
    k: Any = given.k
    return {
        PLAIN: base,
        ORDINARY: ordinary,
        AHEAD: base.using(drafter="ahead", k=k, ahead_always=True, **own),
        CHOOSES: base.using(drafter="ahead", k="auto", **own),
    }


def race(
    llms: dict[str, LLM], prompts: list[list[int]], given: argparse.Namespace, temperature: float
) -> dict[str, Any]:
    for _ in range(given.warm_up):
        rounds(llms, prompts, given, temperature)
    watches = {name: Watch(llm) for name, llm in llms.items()}
    for name, llm in llms.items():
        llm.engine.listeners = (*llm.engine.listeners, watches[name])
    seconds, counts, differ = rounds(llms, prompts * given.rounds, given, temperature)
    rows = {
        name: {
            "tok_s": counts[name][0] / seconds[name],
            "tau": counts[name][0] / counts[name][1],
            "drafting": llms[name].drafting.get("ahead"),
            "why": llms[name].engine.controller.why,
        }
        | watches[name].facts()
        for name in llms
    }
    rows[AHEAD]["ahead"] = watches[AHEAD].ahead()
    found = {"temperature": temperature, "differ": differ, "rows": rows}
    if given.timeline:
        path = Path(given.timeline)
        path = path.with_name(f"{path.stem}-t{temperature:g}{path.suffix}") if "," in given.temperatures else path
        path.write_text(
            ahead_timeline.svg(watches[AHEAD].steps, f"{given.model or 'smollm2'}, ahead"), encoding="utf-8"
        )
    return found | {"setting": setting(rows, given)}


def rounds(
    llms: dict[str, LLM], prompts: list[list[int]], given: argparse.Namespace, temperature: float
) -> tuple[dict[str, float], dict[str, list[int]], int]:
    """Seconds, [tokens, steps] of each engine, and the number of answers that differ from plain decoding."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, list[int]] = {name: [0, 0] for name in llms}
    differ = 0
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=given.tokens, ignore_eos=True)
        order = sorted(llms, key=lambda name, n=number: (list(llms).index(name) + n) % len(llms))
        answers = {}
        for name in order:
            llms[name].engine.cache.drop_retired()
            begin = time.perf_counter()
            (out,) = llms[name].generate([prompt], params)
            seconds[name] += time.perf_counter() - begin
            counts[name][0] += out.stats.emitted
            counts[name][1] += out.stats.steps
            answers[name] = out.token_ids
        differ += sum(ids != answers[PLAIN] for ids in answers.values())
    return seconds, counts, differ


def show_race(facts: dict[str, Any]) -> None:
    print(f"\ntemperature {facts['temperature']:g}; {facts['differ']} answers differ from plain decoding")
    for name, row in facts["rows"].items():
        text = f"{name:18} {row['tok_s']:7.1f} tokens/s, decoding {row['decode_tok_s']:7.1f}  τ {row['tau']:.2f}"
        text += "".join(f"  {part} {1e3 * row[part]:.2f}" for part in ("verify", "draft", "host")) + " ms a step"
        if (d := row["drafting"]) is not None:
            text += f"\n{'':18} hits {d['hit_rate'] or 0:.0%}, {d['hidden_seconds']:.1f} s hidden,"
            text += f" {d['exposed_seconds']:.1f} s exposed, {d['just_in_time_seconds']:.1f} s just in time; {d['why']}"
        print(text)
    row = facts["rows"][AHEAD]["ahead"]
    times = ", ".join(f"{name} {1e3 * row[name]:.2f}" for name in SECONDS if row[name])
    rates = ", ".join(f"{name} {row[name]:.3g}" for name in ("hit_end", "hit_inside", "ready", "jits"))
    print(f"ahead, milliseconds: {times}; {rates}; depths {row['depths']}")


def setting(rows: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """The input of bench/ahead_sim.py: means of the race, and its hit rates."""
    ordinary, found = rows[ORDINARY], rows[AHEAD]["ahead"]
    kept = {name: found[name] for name in found if name not in ("jits", "outcomes", "ready", "waited")}
    found.pop("samples")  # they are in the setting
    return kept | {
        "verify": ordinary["verify"],
        "draft": ordinary["draft_depth"],
        "host": ordinary["host"],
        "plain_verify": rows[PLAIN]["verify"],
        "plain_host": rows[PLAIN]["host"],
        "alpha": ordinary["alpha"],
        "ahead_alpha": rows[AHEAD]["alpha"],
        "k": given.k,
        "depth": given.k,
        "tokens": given.tokens,
        "slow": max(found["beside"] / ordinary["verify"], 1.0) if found["beside"] else 1.0,
    }


# ---------------------------------------------------------------- CPU times of passes


def cpu_times(forker: Forker, prompt: list[int], k: int, forks: int) -> dict[str, float]:
    """Fastest CPU seconds of 15: a pass over k + 1 rows, the same with forks, one depth of them, a depth of one row."""
    seq, best = Sequence(0, prompt, SamplingParams(max_tokens=64)), defaultdict(lambda: float("inf"))
    forker.open(seq)
    forker.cache.reserve(seq, len(prompt), k)
    spread = [forks // (k + 1) + (i < forks % (k + 1)) for i in range(k + 1)]
    for _ in range(15):
        rounds = {"first": (prompt[-k:], spread), "draft": ([], [1])}
        marks = [time.process_time()]
        forker.read_trunks([ForkPlan(seq, prompt[-k:], [])])
        marks.append(time.process_time())
        best["pass"] = min(best["pass"], marks[1] - marks[0])
        for name, (trunk, given) in rounds.items():
            marks = [time.process_time()]
            marks += [time.process_time() for _ in forker.grow([ForkPlan(seq, trunk, given)], 2)]
            best[name] = min(best[name], marks[1] - marks[0])
            best[f"{name}, deeper"] = min(best[f"{name}, deeper"], marks[3] - marks[2])
    forker.close(seq)
    return dict(best)


def free_setting(
    given: argparse.Namespace, base: LLM, forker: Forker, prompt: list[int], curves: Any
) -> dict[str, Any]:
    """The input of bench/ahead_sim.py as if every thread had its own core, which a busy machine cannot show."""
    target = cpu_times(Forker(base.target, 4096, 8, 1024), prompt, given.k, given.forks)
    draft = cpu_times(forker, prompt, given.k, given.forks)
    forks = str(max(given.forks // (given.k + 1), 1))
    hits = {name: curves["noised"][name]["hits"][int(forks)] for name in ("end", "rejection")}
    own = {"verify": target["pass"], "draft": draft["draft, deeper"], "first": draft["first"]}
    own |= {"deeper": draft["first, deeper"], "alpha": curves["alpha"], "k": given.k, "depth": given.k}
    return own | {"hit_end": hits["end"], "hit_inside": hits["rejection"], "slow": 1.0}


# ---------------------------------------------------------------- command line


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a .gguf file, 7b or 30b (SmolLM2 widened, twin.py)")
    parser.add_argument("--small", help="SmolLM2, for the twins")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draft-model")
    parser.add_argument("--head", help="the folder of a trained head, which drafts; only the race is run")
    parser.add_argument("--place", choices=("process", "thread"), help="where the draft model runs")
    parser.add_argument("--draft-device", default="cpu")
    parser.add_argument("--draft-dtype", default="auto")
    parser.add_argument("--skip", help="layers that the draft model skips; default: every other of the middle third")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=1, help="untimed rounds of all prompts")
    parser.add_argument("--timeline", help="an SVG of a few steps of `ahead`")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--forks", type=int, default=8)
    parser.add_argument("--fallback", default="", help="drafters to try on a miss, before the draft model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ahead-threads", type=int, default=1)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--only", choices=("curve", "race"))
    return parser.parse_args()


def main() -> None:
    given = parsed()
    target = given.model
    if given.model in TWINS:  # SmolLM2 widened: the cost of a large model, and text that SmolLM2 can draft
        small = open_checkpoint(given.small)
        target = TWINS[given.model](small, device=given.device, seed=1)
        given.draft_model = given.draft_model or str(small.path)
    base = LLM(target, drafter="off", dtype=given.dtype, device=given.device, threads=given.threads, max_length=1024)
    layers = base.target.config.layers
    middle = "" if given.draft_model else ",".join(map(str, range(layers // 3, 2 * layers // 3, 2)))
    given.skip = [int(number) for number in (middle if given.skip is None else given.skip).split(",") if number]
    texts = bundled()[:: max(1, len(bundled()) // given.prompts)][: given.prompts]
    prompts = [base.tokenizer.encode_chat([{"role": "user", "content": p.text}]) for p in texts]
    temperatures = [float(t) for t in given.temperatures.split(",")]
    facts: dict[str, Any] = {"bench": "ahead", "command": " ".join(["python", *sys.argv]), "model": base.name}
    facts |= {"dtype": base.dtype, "device": base.device, "skip_layers": given.skip, "environment": environment()}
    if given.only != "race" and not given.head:
        checkpoint = open_checkpoint(given.draft_model or given.model)
        skip = frozenset(given.skip)
        model = load_model(checkpoint, given.draft_dtype, 1024)
        forker = Forker(model, 4096, 8, 1024, Part(skip_attention=skip, skip_mlp=skip))
        facts["curves"] = [curve(forker, base, prompts, given, t) for t in temperatures]
        for found in facts["curves"]:
            show_curve(found)
        facts["setting"] = free_setting(given, base, forker, prompts[0], facts["curves"][0])
        print(
            "\nCPU milliseconds:",
            {n: round(1e3 * facts["setting"][n], 2) for n in ("verify", "draft", "first", "deeper")},
        )
    if given.only != "curve":
        facts["race"] = []
        for temperature in temperatures:
            llms = head_engines(base, given) if given.head else engines(base, given)
            for name in (AHEAD, CHOOSES):
                drafter: Any = llms[name].engine.drafter
                if not drafter.host.wait_ready(300):
                    sys.exit(f"The draft model's process did not start: {drafter.host.trouble}")
            facts["race"].append(race(llms, prompts, given, temperature))
            show_race(facts["race"][-1])
            latest = facts["race"][-1]
            latest["projection"] = ahead_sim.held(ahead_sim.setting_of(latest["setting"]), latest)
            latest["projection"].pop("setting")
            ahead_sim.show(latest["projection"])
            for name in (AHEAD, CHOOSES):
                llms[name].engine.drafter.host.close()
        facts["setting"] = facts["race"][0]["setting"]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
