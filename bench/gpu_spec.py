"""Speculation against plain decoding of the same prompts: by drafter for one sequence, and by batch size."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

from gpu_common import Lab, pass_costs, shown, sweep_up
from gpu_race import Contender, Run, contender, crowded, device_seconds, figures, race, run
from gpu_spoiled import Spoiled
from outrider import SamplingParams
from outrider.measure.bench import EncodedPrompt

FREE = ("suffix", "ngram", "auto")
WAVES = 3  # requests per slot of a batch


def spec_section(lab: Lab) -> dict[str, Any]:
    prompts, contenders = lab.sample(), all_contenders(lab)
    rounds = race(lab, contenders, prompts, lab.options.tokens, lab.options.rounds)
    plain = contenders[0]
    found: dict[str, Any] = {"whole_rounds": rounds, "prompts": len(plain.indices), "contenders": {}}
    costs = pass_costs(lab.llm)
    for c in contenders:
        found["contenders"][c.name] = figures(c, plain) | {"by_kind": by_kind(c, plain, prompts)}
        if c.name.startswith(("model", "head")):
            found["contenders"][c.name] |= ideal(c, costs)
    show(lab, found)
    return found


Entry = tuple[str, Any, int | str, dict[str, Any]]  # name, drafter, K, options


def all_contenders(lab: Lab) -> list[Contender]:
    """Plain decoding and the selected contenders; each engine takes memory, and time to capture graphs."""
    ks = [int(k) for k in lab.options.k.split(",") if k]
    entries: list[Entry] = [(name, name, "auto", {}) for name in FREE]
    entries.append(("auto, no head", "auto", "auto", {"auto": list(FREE[:2])}))
    entries += [(f"{name} K={k}", name, k, {}) for name in FREE[:2] for k in ks]
    if lab.draft is not None:
        entries += [(f"model K={k}", "model", k, {}) for k in ks] + [("model auto", "model", "auto", {})]
        for alpha in [float(a) for a in lab.options.alphas.split(",") if a]:
            for k in lab.options.alpha_k.split(","):
                name, fixed = f"spoiled α={alpha:g}", k != "auto"
                entry = (f"{name} K={k}" if fixed else name, Spoiled, int(k) if fixed else k, {"spoil": 1 - alpha})
                entries.append(entry)
    if lab.options.head:
        entries += with_head(lab)
    wanted = tuple(name for name in lab.options.only.split(",") if name) or ("",)
    found = [contender(lab, name, who, k, **more) for name, who, k, more in entries if name.startswith(wanted)]
    return [contender(lab, "plain", "off"), *found]


def with_head(lab: Lab) -> list[Entry]:
    chain = {"tree": False}
    found: list[Entry] = [("head chain", "head", "auto", chain), *((f"head K={k}", "head", k, chain) for k in (6, 8))]
    found.append(("head auto", "head", "auto", {}))
    shapes = {
        "": ("auto", 6, 6),
        " of 16": (16, 4, 6),
        " of 24": (24, 5, 6),
        " of 32": (32, 4, 8),
        " of 48": (48, 8, 7),
    }
    for name, (nodes, width, depth) in shapes.items():
        shape = {"tree": True, "tree_width": width, "tree_depth": depth}
        found.append((f"head tree{name}", "head", nodes, shape))
    return [*found, ("auto, head", "auto", "auto", {"head": lab.head})]


def by_kind(c: Contender, plain: Contender, prompts: list[EncodedPrompt]) -> dict[str, dict[str, float | None]]:
    kinds: dict[str, list[int]] = defaultdict(list)
    for q in c.indices:
        kinds[prompts[q].category].append(q)
    return {
        k: {
            "tok_s": c.over(of),
            "ratio": c.ratio(plain, of),
            "request_ratio": c.whole(of) / plain.whole(of),
            "tau": c.tau_of(of),
        }
        for k, of in kinds.items()
    }


def ideal(c: Contender, costs: dict[tuple[int, int], float]) -> dict[str, Any]:
    """τ ÷ (t_draft + t_verify), the speed of a loop without gaps, and the fraction of it that is reached.

    By the device's clock where the engine reports it. By the host's clock the two phases are an upper bound of the
    device's time, so that the fraction shows only what is lost outside them.
    """
    steps = [step for q in c.indices for r in c.runs[q] for step in [s for s in r.steps if s.emitted][1:-1]]
    if not steps or c.tau is None:
        return {}
    found: dict[str, Any] = {}
    tau = sum(sum(step.emitted.values()) for step in steps) / len(steps)
    parts = {phase: [device_seconds(step, phase) for step in steps] for phase in ("draft", "verify")}
    by_device = all(s is not None for taken in parts.values() for s in taken)
    for phase, taken in parts.items():
        seconds = [s for s in taken if s is not None] if by_device else [step.clock[phase] for step in steps]
        found[f"t_{phase}_s"] = sum(seconds) / len(seconds)
        found[f"t_{phase}_median_s"] = median(seconds)
    rate, reached = tau / (found["t_draft_s"] + found["t_verify_s"]), c.over(c.indices)
    found |= {"clock": "device" if by_device else "host", "steady_tau": tau, "ideal_tok_s": rate}
    found |= {f"t_{name}_s": sum(s.clock.get(name, 0.0) for s in steps) / len(steps) for name in ("host", "record")}
    found["fraction_of_ideal"] = reached / rate if reached else None
    if isinstance(c.k, int):
        found["t_verify_alone_s"] = costs.get((1, c.k + 1))
    return found


def show(lab: Lab, found: dict[str, Any]) -> None:
    rows = found["contenders"]
    kinds = list(rows["plain"]["by_kind"])
    lab.table(
        f"One sequence, T = {lab.options.temperature:g}, {found['prompts']} prompts, {found['whole_rounds']} rounds",
        ("contender", "tok/s", "median", "requests", "× plain", "τ", "α", "recorded ms", "other texts"),
        [
            (name, r["tok_s"], r["median_tok_s"], r["request_tok_s"], r.get("ratio"), r["tau"], r["alpha"],
             r["record_s"] * 1e3, f"{r['divergent_texts']} of {r['texts']}" if "texts" in r else "")
            for name, r in rows.items()
        ],
    )  # fmt: skip
    lab.table(
        "By kind of prompt: tok/s (× plain, τ)",
        ("contender", *kinds),
        [(name, *(both(r["by_kind"].get(kind, {}), name == "plain") for kind in kinds)) for name, r in rows.items()],
    )
    measured = [(name, r) for name, r in rows.items() if "ideal_tok_s" in r]
    if measured:
        lab.table(
            "The loop against τ ÷ (t_draft + t_verify)",
            ("contender", "clock", "draft ms", "verify ms", "host ms", "record ms", "τ", "ideal tok/s", "reached"),
            [
                (name, r["clock"], *(r[f"t_{part}_s"] * 1e3 for part in ("draft", "verify", "host", "record")),
                 r["steady_tau"], r["ideal_tok_s"], f"{r['fraction_of_ideal'] or 0:.1%}")
                for name, r in measured
            ],
        )  # fmt: skip


def both(of: dict[str, float | None], plain: bool) -> str:
    return shown(of.get("tok_s")) + ("" if plain else f" ({shown(of.get('ratio'))}, {shown(of.get('tau'))})")


# ---------------------------------------------------------------- batches


def batch_section(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in (int(b) for b in lab.options.batches.split(",")):
        if lab.late:
            found[str(size)] = {"skipped": "the section's time was up"}
            continue
        found[str(size)] = one_size(lab, size)
        sweep_up()
    lab.table(
        f"Throughput while all slots are taken, tokens per second, {lab.options.tokens} tokens each",
        ("sequences", "contender", "tok/s", "prompts included", "× plain", "τ", "other texts"),
        [
            (str(size), name, r["tok_s"], r["request_tok_s"], r.get("ratio"), r["tau"], r.get("divergent_texts"))
            for size, by_name in found.items()
            for name, r in by_name.items()
            if name != "skipped"
        ],
    )
    return found


def one_size(lab: Lab, size: int) -> dict[str, Any]:
    prompts = [q.ids for q in lab.crowd(WAVES * size)]  # a finished request is replaced
    params = SamplingParams(max_tokens=lab.options.tokens, ignore_eos=True)
    slots = size * (max(map(len, prompts)) + lab.options.tokens + 80)
    names = ["off", *(["model"] if lab.draft is not None else []), "suffix", "auto"]
    engines = {name: lab.using(name, batch=size, tokens=slots) for name in names}
    for llm in engines.values():  # graphs are captured for full batches and for batches whose members change
        run(llm, prompts, params)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(lab.options.batch_rounds):
        if lab.late and number:
            break
        for name in names if number % 2 == 0 else names[::-1]:
            runs[name].append(run(engines[name], prompts, params))
    return {("plain" if name == "off" else name): batch_figures(runs[name], runs["off"], size) for name in names}


def batch_figures(runs: list[Run], plain: list[Run], size: int) -> dict[str, Any]:
    steps = sum(s.steps for r in runs for s in r.stats)
    found = {
        "tok_s": rate(runs, size),
        "request_tok_s": median(r.speed.tokens / r.speed.seconds for r in runs),
        "tau": sum(s.emitted for r in runs for s in r.stats) / steps if steps else None,
        "rounds": len(runs),
        "why": runs[-1].stats[0].why,
        "preempted": sum(s.preempted for r in runs for s in r.stats),
    }
    if runs is not plain:
        plain_rate = median(r.speed.tokens / r.speed.seconds for r in plain)
        own, base = rate(runs, size), rate(plain, size)
        found |= {"ratio": own / base, "request_ratio": found["request_tok_s"] / plain_rate}
        found["divergent_texts"] = sum(a != b for a, b in zip(runs[0].ids, plain[0].ids, strict=True))
    return found


def rate(runs: list[Run], size: int) -> float:
    """Tokens per second while every slot of the batch is taken."""
    return median(tokens / seconds for tokens, seconds in (crowded(r.marks, size) for r in runs))
