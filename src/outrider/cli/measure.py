"""`outrider bench | bench serve | doctor | cost | tune`: the commands that measure.

The library measures and `show` prints. Results go to standard output, progress to standard error.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

from ..errors import ConfigError, OutriderError
from .common import note, print_json, progress_bar, read_prompts, require_folder, write_page
from .options import ApiKey, DrafterName, Drafters, Json, Prompts, TargetOptions, Temperature, parse_k

if TYPE_CHECKING:
    from ..llm import LLM
    from ..measure.bench import Bench, BenchPlan, EncodedPrompt
    from ..measure.statistics import Setup
    from ..models.prompts import Prompt

Ks = Annotated[list[str] | None, Option("--k", help="Drafted tokens per step. Repeatable. Default: auto.")]
Limit = Annotated[int, Option(min=1, help="Use N prompts, in turn from each kind of text.")]
Tokens = Annotated[int, Option("--max-tokens", "-n", min=2, help="The most tokens to generate for each prompt.")]
Rounds = Annotated[int, Option(min=1, help="Measure everything N times.")]
SWEEP = range(1, 17)
SEVERAL, WAIT = 9, 15.0  # rounds of `doctor` and `cost`, at most, and seconds: single rounds are off by a tenth


def bench(
    context: typer.Context,
    options: TargetOptions,
    drafter: Drafters = None,
    k: Ks = None,
    prompts: Prompts = None,
    category: Annotated[
        list[str] | None, Option("--category", "-c", help="Use only this kind of text. Repeatable.")
    ] = None,
    limit: Limit = 14,
    max_tokens: Tokens = 96,
    rounds: Rounds = 3,
    temperature: Temperature = 0.0,
    seed: Annotated[int, Option(help="The seed of sampling and of the confidence intervals.")] = 0,
    sweep_k: Annotated[bool, Option("--sweep-k", help="Also measure the first drafter with K = 1 to 16.")] = False,
    html: Annotated[Path | None, Option(help="Write a self-contained HTML report to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the speedup over plain decoding by drafter and kind of text. Into a pipe, the last line is JSON."""
    if context.invoked_subcommand is not None:
        return
    from ..measure.bench import BenchPlan, encode_prompts
    from ..measure.report import html as report
    from . import show

    llm = options.load()
    workload = encode_prompts(llm, _pick(prompts, category, limit))
    setups = _setups(llm, drafter, k)
    require_folder(html)
    result = _measure(llm, workload, setups, BenchPlan(max_tokens, rounds, temperature, seed), sweep_k)
    if html is not None:
        write_page(html, report(result))
    _print(result, as_json, show.bench)
    if html is not None:
        note(f"Wrote {html}; open it in any browser.")
    if result["divergences"] and llm.config.rule == "match":
        raise typer.Exit(1)


def bench_serve(
    server: Annotated[str, Option(help="The address of any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: Annotated[str | None, Option("--model", "-m", help="The model's name. Default: the first listed.")] = None,
    requests: Annotated[int, Option(min=1, help="Send N requests in total.")] = 32,
    concurrency: Annotated[int, Option(min=1, help="Requests at once. Ignored with --rate.")] = 8,
    rate: Annotated[float | None, Option(min=0.001, help="Requests per second on average, at random times.")] = None,
    max_tokens: Tokens = 64,
    temperature: Temperature = 0.0,
    seed: Annotated[int, Option(help="The seed of arrival times. Request i samples with seed + i.")] = 0,
    prompts: Prompts = None,
    body: Annotated[str | None, Option(help="Fields to add to every request: '{\"top_p\": 0.9}'.")] = None,
    as_json: Json = False,
) -> None:
    """Load-test a server: latency percentiles, throughput, acceptance. Into a pipe, the last line is JSON."""
    from ..measure.client import Server
    from ..measure.load_generator import LoadPlan, run, summary
    from . import show

    client = Server(server, api_key)
    name = model or next(iter(client.models()), None)
    texts = [prompt.text for prompt in read_prompts(prompts)]
    plan = LoadPlan(texts, requests, concurrency, rate, max_tokens, temperature, seed, name, _json_object(body))
    result = {"server": server, "model": name, "concurrency": concurrency, "rate": rate} | summary(run(client, plan))
    _print(result, as_json, show.load_test)
    if result["failed"]:
        raise typer.Exit(1)


def _print(result: dict[str, Any], as_json: bool, show: Callable[[Console, dict[str, Any]], None]) -> None:
    """A table; with --json or into a pipe also, as the last line, the numbers behind it."""
    console = Console()
    if not as_json:
        show(console, result)
    if as_json or not console.is_terminal:
        print_json(result)


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OutriderError("--body is not a JSON object.")
    return value


def doctor(
    options: TargetOptions,
    drafter: DrafterName = None,
    head: Annotated[str | None, Option(help="Examine this head: a folder, a GGUF file, or a name on the hub.")] = None,
    limit: Limit = 7,
    max_tokens: Tokens = 64,
    as_json: Json = False,
) -> None:
    """Report whether speculation pays on this machine and why, what to change, and what is broken."""
    from ..measure.bench import BenchPlan, encode_prompts
    from ..measure.doctor import KS, advise, examine
    from . import show

    if head is not None and drafter not in (None, "head"):
        raise ConfigError(f"--head examines a head, but --drafter is {drafter}: leave one of them out.")
    llm = options.load(drafter=drafter if head is None else "head", head=head)
    with progress_bar() as progress:
        plan = BenchPlan(max_tokens, SEVERAL, most_seconds=WAIT)
        facts = examine(llm, encode_prompts(llm, _pick(None, None, limit)), plan, progress)
    findings = advise(facts)
    if not as_json:
        show.doctor(Console(), facts, findings)
        return
    result = asdict(facts) | {"folder": str(facts.folder), "kept_in": str(facts.kept_in)}
    result |= {"findings": [asdict(each) for each in findings], "break_even": {k: facts.break_even(k) for k in KS}}
    print_json(result)


def cost(
    price_per_hour: Annotated[float, Option(help="The price of an hour of this machine.")],
    options: TargetOptions,
    currency: Annotated[str, Option(help="The currency to print.")] = "USD",
    from_: Annotated[Path | None, Option("--from", help="Read measurements from `outrider bench` output.")] = None,
    drafter: Drafters = None,
    k: Ks = None,
    limit: Limit = 7,
    max_tokens: Tokens = 64,
    as_json: Json = False,
) -> None:
    """Print the price of a million tokens with and without speculation, by kind of text."""
    from ..measure.bench import BenchPlan, encode_prompts
    from ..measure.cost import bills, rows_from
    from . import show

    if not price_per_hour > 0:
        raise ConfigError(f"--price-per-hour is {price_per_hour:g}, but it must be more than 0.")
    if from_ is not None:
        rows = rows_from(from_)
    else:
        llm = options.load()
        setups, workload = _setups(llm, drafter, k), encode_prompts(llm, _pick(None, None, limit))
        rows = _measure(llm, workload, setups, BenchPlan(max_tokens, SEVERAL, most_seconds=2 * WAIT))["rows"]
    priced = bills(rows, price_per_hour)
    if as_json:
        listed = [asdict(bill) | {"saving_percent": bill.saving_percent} for bill in priced]
        print_json({"price_per_hour": price_per_hour, "currency": currency, "rows": listed})
    else:
        show.cost(Console(), priced, currency)


def tune(
    options: TargetOptions,
    drafter: Drafters = None,
    prompts: Prompts = None,
    out: Annotated[Path, Option("--out", "-o", help="The profile to write.")] = Path("profile.json"),
    budget_minutes: Annotated[float, Option(help="Stop after about this long.")] = 5.0,
    limit: Limit = 7,
    max_tokens: Tokens = 64,
    rounds: Rounds = 2,
    resume: Annotated[bool, Option("--resume", help="Continue from the layer-skip set in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Find the drafter, K, tree shape and layer-skip set for your prompts. Ctrl-C keeps the best so far."""
    from ..measure.bench import BenchPlan, encode_prompts
    from ..measure.tune import Tuner, candidates, keep_skip, skip_from
    from ..models.tuning_profile import read_profile, save_profile
    from . import show

    require_folder(out)
    start = skip_from(read_profile(out)) if resume else None
    llm = options.load()
    setups = candidates(llm, _drafter_names(llm, drafter, tuning=True))
    tuner = Tuner(
        llm, encode_prompts(llm, _pick(prompts, None, limit)), BenchPlan(max_tokens, rounds), 60 * budget_minutes
    )
    with progress_bar() as progress:
        outcome = tuner.run(setups, progress, start)
    if not outcome.rows and outcome.search is None:
        raise OutriderError("Interrupted before anything was measured: no profile was written.")
    profile = _profile(llm, outcome)
    save_profile(out, profile)
    skip_file = keep_skip(llm, outcome)
    if as_json:
        print_json(profile)
    else:
        show.tune(Console(), outcome)
        note(f"Written to {out}; use it with --profile {out} or LLM(profile=…).")
        if skip_file is not None:
            note(f"The skip set is stored in {skip_file}; --drafter layerskip finds it there.")
    if outcome.interrupted:
        raise typer.Exit(130)


# ---------------------------------------------------------------- what the commands share


def _pick(path: Path | None, categories: list[str] | None, limit: int) -> list[Prompt]:
    """Prompts with alternating categories, so that any number of them is mixed."""
    from itertools import zip_longest

    prompts = read_prompts(path)
    present = list(dict.fromkeys(prompt.category for prompt in prompts))
    for name in categories or ():
        if name not in present:
            raise ConfigError(f"There is no text of the kind '{name}'. Choose one of: {', '.join(present)}.")
    groups = [[prompt for prompt in prompts if prompt.category == name] for name in categories or present]
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None][:limit]


def _drafter_names(llm: LLM, drafters: list[str] | None, tuning: bool = False) -> list[str]:
    """The named drafters. Without names: for tuning, all that need no options; otherwise the model's own."""
    from ..drafters import lookup, names

    every = [name for name in names() if name != "off"]
    if drafters and drafters != ["all"]:
        return [lookup(name).name for name in dict.fromkeys(drafters)]
    if tuning:
        return [name for name in every if not lookup(name).traits.trial(llm.target)]
    return every if drafters else [llm.config.drafter_name]


def _setups(llm: LLM, drafters: list[str] | None, ks: list[str] | None) -> list[Setup]:
    from ..measure.bench import make_setup

    widths = [parse_k(k) for k in ks or ["auto"]]
    return [make_setup(llm, name, k) for name in _drafter_names(llm, drafters) for k in widths]


def _measure(
    llm: LLM, work: list[EncodedPrompt], setups: list[Setup], plan: BenchPlan, sweep: bool = False
) -> dict[str, Any]:
    from ..measure.bench import make_setup, measure, result

    swept = [make_setup(llm, setups[0].drafter, k) for k in ("auto", *SWEEP)] if sweep else []
    share = len(setups) / (len(setups) + len(swept))
    begin = time.perf_counter()
    with progress_bar() as progress:
        bench = measure(llm, work, setups, plan, lambda what, done: progress(what, share * done))
        by_k: Bench | None = None
        if swept:
            by_k = measure(llm, work, swept, plan, lambda what, done: progress(what, share + (1 - share) * done))
    measured = result(bench, by_k) | {"seconds": time.perf_counter() - begin}
    return measured | {"command": shlex.join(["outrider", *sys.argv[1:]]), "baseline": "the same with --drafter off"}


def _profile(llm: LLM, outcome: Any) -> dict[str, Any]:
    from ..measure.bench import batch_costs
    from ..measure.environment import environment
    from ..measure.statistics import json_options
    from ..measure.tune import profile_of

    here = environment()
    facts = {"model": llm.name, "dtype": llm.dtype, "device": llm.device, "gpus": here["gpus"]}
    facts |= {"machine": here["machine"], "cpu": here["cpu"], "costs": batch_costs(llm)}
    chosen = profile_of(outcome)
    return facts | chosen | {"options": json_options(chosen["options"]), "seconds": outcome.seconds}
