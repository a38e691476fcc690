"""Learning while serving: acceptance over a stream of code and then creative writing, with learning on and off.

    python bench/online.py [--prompts 1000] [--tokens 96] [--k 3] [--device cuda] [--head FOLDER] [--svg FILE]

Published results (bench/results/2026-11-15-online-NAME.json; NAME and command):

    2000        python bench/online.py --data data --prompts 1000 --bins 8 --tokens 32 --k 3 --threads 1
                --only frozen,learning --head none --svg online.svg
    cost        python bench/online.py --prompts 100 --bins 2 --tokens 32 --k 3 --threads 1 --head none
    smollm2     python bench/online.py --data data --prompts 60 --bins 5 --tokens 72 --threads 1 --dtype int8
                --svg online.svg
    qwen-head   python bench/online.py --model qwen.gguf --head shipped --domain german=german.jsonl:500
                --domain legal=legal.jsonl:500 --domain codebase=codebase.jsonl:500
                --domain code=code_alpaca_2k.json:150
                --bins 5 --tokens 40 --k 3 --only frozen,learning
    phrases-…   pieces of less than a minute each, alone on the machine (2026-11-18; each file has its commands)
    two-kinds   python bench/online.py --device cpu --dtype int8 --threads 1 --prompts 150 --bins 5 --tokens 32 --k 3
                --only frozen,learning --head none --svg online.svg

Four engines answer every prompt in turn, in a changing order: plain decoding; the drafter frozen; the same drafter
learning; and plain decoding with learning but without drafts (K = 0), which shows the cost of learning. Ids are
compared. `--only frozen,learning` leaves out the other two, which halves the time of a long stream and gives no cost.
With `--head` the drafter is that head (`shipped`: the model's own): chains, frozen without anything learnt, and
learning its correction and its vocabulary, each domain as a kind of its own, so that each begins with the bare head.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.measure.environment import environment
from outrider.measure.plots import Axes, Point, Series, lines
from outrider.train.prompts import read_file

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DOMAINS = {"code": ("code_alpaca_2k.json", "gpteacher_codegen.json"), "writing": ("gpteacher_roleplay.json",)}
PLAIN, FROZEN, LEARNING, WATCHING = "plain", "frozen", "learning", "plain, learning"
COLOURS = ("#888888", "#3366cc")


@dataclass
class Bin:
    """A section of the stream."""

    domain: str
    prompts: int = 0
    tokens: int = 0
    held_out: bool = False
    accepted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    reached: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    emitted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def alpha(self, name: str) -> float:
        return self.accepted[name] / max(self.reached[name], 1)

    def tau(self, name: str) -> float:
        return self.emitted[name] / max(self.steps[name], 1)


def texts(args: argparse.Namespace, domain: str) -> tuple[list[str], list[str]]:
    """The first prompts of a domain, from its files in order, and those held out: the last ones."""
    count = args.counts.get(domain, args.prompts)
    found = [prompt.text[:800] for name in args.domains[domain] for prompt in read_file(args.data / name)]
    if len(found) < args.skip + count + args.held_out:
        sys.exit(f"There are only {len(found)} prompts of {domain}: give --prompts {len(found)} or fewer.")
    return found[args.skip : args.skip + count], found[len(found) - args.held_out :]


def engines(args: argparse.Namespace) -> dict[str, LLM]:
    base = LLM(args.model, drafter="off", dtype=args.dtype, device=args.device, threads=args.threads, max_length=1024)
    options: dict[str, Any] = {"drafter": "online", "learn_share": args.share, "learn_cap_ms": args.cap_ms}
    options |= {"head": args.head} if args.head not in (None, "shipped") else {}
    trained = args.head not in (None, "none")
    options |= {"drafter": "head", "tree": False} if trained else {}
    bare = {"learn_vocabulary": False} if trained else {}
    options |= {} if args.phrases else {"learn_phrases": False}
    options |= {"learn_correction": True} if args.correction else {}
    known = {"learn_from": str(args.learn_from)} if args.learn_from else {}
    made = {
        PLAIN: lambda: base,
        FROZEN: lambda: base.using(k=args.k, **options, **bare, learn=False),
        LEARNING: lambda: base.using(k=args.k, **options, **known, learn=True),
        WATCHING: lambda: base.using(k=0, **options, learn=True),
    }
    return {name: make() for name, make in made.items() if not args.only or name in args.only.split(",")}


def ask(llm: LLM, prompts: list[list[int]], params: SamplingParams, into: Bin, name: str) -> list[list[int]]:
    begin = time.perf_counter()
    outs = llm.generate(prompts, params)
    into.seconds[name] += time.perf_counter() - begin
    for stats in (out.stats for out in outs):
        into.accepted[name] += stats.accepted
        into.reached[name] += stats.reached
        into.emitted[name] += stats.emitted
        into.steps[name] += stats.steps
    return [out.token_ids for out in outs]


def stream(args: argparse.Namespace, llms: dict[str, LLM], console: Console) -> tuple[list[Bin], int]:
    """Run all prompts; returns the bins, and how many answers differ from those of the first engine."""
    bins: list[Bin] = []
    differ = 0
    for domain in args.domains:
        prompts, held_out = texts(args, domain)
        per_bin = max(1, len(prompts) // args.bins)
        for number in range(0, per_bin * args.bins, per_bin):
            last = number + 2 * per_bin > len(prompts)
            bins.append(Bin(domain))
            differ += section(args, llms, prompts[number : None if last else number + per_bin], bins)
            _say(console, bins[-1])
        if held_out:
            bins.append(Bin(domain, held_out=True))
            differ += section(args, llms, held_out, bins, learn=False)
            _say(console, bins[-1])
    return bins, differ


def section(args: argparse.Namespace, llms: dict[str, LLM], texts: list[str], bins: list[Bin], **more: Any) -> int:
    """Let every engine answer these prompts, --batch at a time; returns how many answers differ."""
    into, first, differ = bins[-1], next(iter(llms)), 0
    into.tokens = bins[-2].tokens if len(bins) > 1 else 0
    tokenizer = llms[first].tokenizer
    for number in range(0, len(texts), args.batch):
        chats = [[{"role": "user", "content": text}] for text in texts[number : number + args.batch]]
        ids = [tokenizer.encode_chat(chat) for chat in chats]
        params = SamplingParams(
            max_tokens=args.tokens, temperature=args.temperature, seed=number, kind=into.domain, **more
        )
        turn = number // args.batch
        order = sorted(llms, key=lambda name: (list(llms).index(name) + turn) % len(llms))
        answers = {name: ask(llms[name], ids, params, into, name) for name in order}
        for each in answers.values():
            differ += sum(one != other for one, other in zip(each, answers[first], strict=True))
        into.tokens += sum(map(len, answers[first]))
        into.prompts += len(ids)
    return differ


def _say(console: Console, b: Bin) -> None:
    which = "held out" if b.held_out else f"{b.tokens} tokens"
    console.print(f"{b.domain}, {which}: α {b.alpha(FROZEN):.3f} frozen, {b.alpha(LEARNING):.3f} learning")


def table(bins: list[Bin]) -> Table:
    shown = Table(box=box.SIMPLE)
    for name in ("domain", "tokens seen", "α frozen", "α learning", "gain", "τ frozen", "τ learning"):
        shown.add_column(name, justify="left" if name == "domain" else "right")
    for b in bins:
        frozen, learning = b.alpha(FROZEN), b.alpha(LEARNING)
        row = (f"{frozen:.3f}", f"{learning:.3f}", f"{learning - frozen:+.3f}")
        shown.add_row(
            f"{b.domain}, held out" if b.held_out else b.domain,
            str(b.tokens),
            *row,
            f"{b.tau(FROZEN):.2f}",
            f"{b.tau(LEARNING):.2f}",
        )
    return shown


def plot(bins: list[Bin]) -> str:
    """A self-contained figure, colours included."""
    axes = Axes("Acceptance against tokens seen", "thousands of tokens seen", "α")
    series = [
        Series(name, [Point(round(b.tokens / 1000, 1), b.alpha(name)) for b in bins]) for name in (FROZEN, LEARNING)
    ]
    css = "text{font:12px sans-serif;fill:#555}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}"
    css += "".join(f".line.s{i}{{stroke:{c}}}.dot.s{i}{{fill:{c}}}" for i, c in enumerate(COLOURS))
    head, rest = lines(axes, series).split(">", 1)
    key = "".join(
        f'<text x="70" y="{26 + 16 * i}" style="fill:{c}">{name}</text>'
        for i, (c, name) in enumerate(zip(COLOURS, (FROZEN, LEARNING), strict=True))
    )
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{css}</style>{key}{rest}'


def summary(bins: list[Bin], llms: dict[str, LLM], domains: Iterable[str]) -> dict[str, Any]:
    """By domain: α overall and in the last bin; and the cost of learning."""
    result: dict[str, Any] = {}
    for domain in domains:
        own = [b for b in bins if b.domain == domain and not b.held_out]
        reached = {n: sum(b.reached[n] for b in own) for n in (FROZEN, LEARNING)}
        alpha = {n: sum(b.accepted[n] for b in own) / max(reached[n], 1) for n in reached}
        result[domain] = {"alpha": alpha, "gain": alpha[LEARNING] - alpha[FROZEN]}
        result[domain] |= {"first": own[0].alpha(LEARNING), "last": own[-1].alpha(LEARNING)}
        result[domain]["gain_last"] = own[-1].alpha(LEARNING) - own[-1].alpha(FROZEN)
        result[domain]["speed"] = sum(b.seconds[FROZEN] for b in own) / sum(b.seconds[LEARNING] for b in own)
        result[domain]["speed_last"] = own[-1].seconds[FROZEN] / own[-1].seconds[LEARNING]
        result[domain]["held_out"] = {
            n: b.alpha(n) for b in bins if b.domain == domain and b.held_out for n in (FROZEN, LEARNING)
        }
    seconds = {n: sum(b.seconds[n] for b in bins) for n in llms}
    result["seconds"] = seconds
    if {PLAIN, WATCHING} <= set(llms):
        result["overhead_of_plain"] = seconds[WATCHING] / seconds[PLAIN] - 1
    result["learning"] = {n: llms[n].learning for n in (LEARNING, WATCHING) if n in llms}
    result["drift"] = llms[LEARNING].drift.as_json()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1000, help="of each domain")
    parser.add_argument("--domain", action="append", default=[], help="NAME=FILE.jsonl[:COUNT], instead of both")
    parser.add_argument("--bins", type=int, default=6, help="of each domain")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--model", default=None)
    parser.add_argument("--head", default=None, help="a trained head's folder, or shipped; default: untrained")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--share", type=float, default=0.04, help="share of serving time that may be spent on learning")
    parser.add_argument("--cap-ms", type=float, default=10.0)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--batch", type=int, default=1, help="prompts that are answered together")
    parser.add_argument("--skip", type=int, default=0, help="prompts of each domain to leave out at its start")
    parser.add_argument("--held-out", type=int, default=0, help="prompts from the end of each file, without learning")
    parser.add_argument("--no-phrases", dest="phrases", action="store_false", help="without a head's memory")
    parser.add_argument("--correction", action="store_true", help="train a head's correction on a CPU too")
    parser.add_argument("--learn-from", type=Path, default=None, help="a folder that --learn-to wrote")
    parser.add_argument("--learn-to", type=Path, default=None, help="save what was learnt")
    parser.add_argument("--only", default="", help=f"engines, by name; {FROZEN} and {LEARNING} must be among them")
    parser.add_argument("--svg", type=Path, default=None)
    args = parser.parse_args()
    pairs = [each.split("=", 1) for each in args.domain]
    args.domains = {name: (file.partition(":")[0],) for name, file in pairs} or DOMAINS
    args.counts = {name: int(file.partition(":")[2]) for name, file in pairs if ":" in file}
    console = Console(stderr=True)
    llms = engines(args)
    bins, differ = stream(args, llms, console)
    one = llms[LEARNING]
    facts = summary(bins, llms, args.domains) | {"divergent_answers": differ, "model": one.name, "dtype": one.dtype}
    facts |= {"device": one.device, "environment": environment(), "command": sys.argv}
    facts["arguments"] = {n: str(v) if isinstance(v, Path) else v for n, v in vars(args).items()}
    facts["bins"] = [
        {
            "domain": b.domain,
            "held_out": b.held_out,
            "prompts": b.prompts,
            "tokens": b.tokens,
            FROZEN: b.alpha(FROZEN),
            LEARNING: b.alpha(LEARNING),
        }
        | {"tau": {n: b.tau(n) for n in (FROZEN, LEARNING)}, "seconds": dict(b.seconds), "emitted": dict(b.emitted)}
        for b in bins
    ]
    if args.learn_to:
        one.save_learnt(args.learn_to)
    if args.svg:
        args.svg.write_text(plot(bins), encoding="utf-8")
    out = Console()
    out.print(table(bins))
    for domain in args.domains:
        out.print(
            f"{domain}: α {facts[domain]['gain']:+.3f} over all of it, {facts[domain]['gain_last']:+.3f} at its end; "
            f"speed {facts[domain]['speed']:.3f} × frozen, {facts[domain]['speed_last']:.3f} at its end"
        )
    wall, own = (max(each[name] for each in facts["learning"].values()) * 1e3 for name in ("slowest", "busiest"))
    if "overhead_of_plain" in facts:
        out.print(f"learning costs {facts['overhead_of_plain']:+.1%} of plain serving")
    out.print(
        f"the slowest step of learning took {wall:.1f} ms ({own:.1f} ms of its own) of {args.cap_ms:g} ms allowed; "
        f"{differ} answers differed from those of {next(iter(llms))}"
    )
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
