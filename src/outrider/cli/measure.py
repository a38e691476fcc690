"""The commands that measure: `outrider bench | doctor | cost | tune`.

They register themselves with the command line when it is imported, read options, and hand over: measuring is the
library's, words and tables are `show_measure`'s. Results go to standard output, progress to standard error.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import ConfigError, OutriderError
from .app import Debug, Device, DraftDevice, Dtype, Json, Model, Set, _load, _progress, _sentences, app, errors
from .options import arguments

if TYPE_CHECKING:
    from ..llm import LLM
    from ..measure.bench import Bench, BenchPlan as Plan, EncodedPrompt as Question
    from ..measure.statistics import Setup
    from ..models.prompts import Prompt

Drafters = Annotated[
    list[str] | None, typer.Option("--drafter", "-d", help="Who drafts; may be repeated; all: every one there is.")
]
Ks = Annotated[list[str] | None, typer.Option("--k", help="Drafted tokens per step, or auto; may be repeated.")]
Prompts = Annotated[Path | None, typer.Option(help="JSONL in Spec-Bench's form; default: the bundled ones.")]
Category = Annotated[list[str] | None, typer.Option("--category", "-c", help="Only these kinds of text.")]
Limit = Annotated[int, typer.Option(min=1, help="How many prompts, kinds of text alternating.")]
Tokens = Annotated[int, typer.Option("--tokens", "-n", min=2, help="The longest answer.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often everything is measured.")]
SWEEP = range(1, 17)
bench_app = typer.Typer()
app.add_typer(bench_app, name="bench")


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model: Model = None,
    drafter: Drafters = None,
    k: Ks = None,
    dtype: Dtype = "auto",
    device: Device = None,
    draft_device: DraftDevice = None,
    prompts: Prompts = None,
    category: Category = None,
    limit: Limit = 14,
    tokens: Tokens = 96,
    rounds: Rounds = 3,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For sampling and for the intervals.")] = 0,
    sweep_k: Annotated[
        bool, typer.Option("--sweep-k", help="Also measure K = 1 to 16 with the first drafter.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report to this file.")] = None,
    set_: Set = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the speedup over plain decoding, by drafter and kind of text; ends with one JSON line."""
    if context.invoked_subcommand is not None:
        return
    with _sentences(debug):
        from ..measure.bench import BenchPlan as Plan, encode_prompts as questions

        llm = _target(model, dtype, device, set_, draft_device)
        asked = questions(llm, _pick(prompts, category, limit))
        setups = _setups(llm, drafter, k or ["auto"])
        plan = Plan(tokens, rounds, temperature, seed)
        _insist_on_folder(html)
        result = _measured(llm, asked, setups, plan, sweep_k)
        if html is not None:
            _write_page(html, result)
        if not as_json:
            from . import show_measure

            show_measure.bench(Console(), result)
        typer.echo(json.dumps(result, ensure_ascii=False))
        if result["divergences"] and llm.config.rule == "match":
            raise typer.Exit(1)


@app.command()
def doctor(
    model: Model = None,
    dtype: Dtype = "auto",
    device: Device = None,
    drafter: Annotated[str | None, typer.Option("--drafter", "-d", help="Who drafts; default: auto.")] = None,
    limit: Limit = 7,
    tokens: Tokens = 64,
    set_: Set = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say in plain words whether speculation pays here, why, what to change, and what is wrong if anything is."""
    with _sentences(debug):
        from dataclasses import asdict

        from ..measure.bench import BenchPlan as Plan, encode_prompts as questions
        from ..measure.doctor import KS, advise, examine
        from . import show_measure

        llm = _target(model, dtype, device, set_, drafter=drafter)
        with _progress() as progress:
            facts = examine(llm, questions(llm, _pick(None, None, limit)), Plan(tokens, rounds=1), progress)
        findings = advise(facts)
        if not as_json:
            show_measure.doctor(Console(), facts, findings)
            return
        words = {"findings": [asdict(each) for each in findings], "break_even": {k: facts.break_even(k) for k in KS}}
        typer.echo(
            json.dumps(
                asdict(facts) | words | {"folder": str(facts.folder), "kept_in": str(facts.kept_in)}, ensure_ascii=False
            )
        )


@app.command()
def cost(
    price_per_hour: Annotated[float, typer.Option(help="What an hour of this machine costs.")],
    currency: Annotated[str, typer.Option(help="How prices are called.")] = "USD",
    from_: Annotated[Path | None, typer.Option("--from", help="What `outrider bench` wrote; default: measure.")] = None,
    model: Model = None,
    drafter: Drafters = None,
    k: Ks = None,
    dtype: Dtype = "auto",
    device: Device = None,
    limit: Limit = 7,
    tokens: Tokens = 64,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a million tokens costs with and without speculation, per kind of text."""
    with _sentences(debug):
        from dataclasses import asdict

        from ..measure.bench import BenchPlan as Plan, encode_prompts as questions
        from ..measure.cost import bills, rows_from
        from . import show_measure

        if not price_per_hour > 0:
            raise ConfigError(f"--price-per-hour is {price_per_hour:g}, but it must be more than 0.")
        if from_ is not None:
            rows = rows_from(from_)
        else:
            llm = _target(model, dtype, device)
            setups, asked = _setups(llm, drafter, k or ["auto"]), questions(llm, _pick(None, None, limit))
            rows = _measured(llm, asked, setups, Plan(tokens, rounds=1), False)["rows"]
        found = bills(rows, price_per_hour)
        if as_json:
            listed = [asdict(bill) | {"saving_percent": bill.saving_percent} for bill in found]
            typer.echo(json.dumps({"price_per_hour": price_per_hour, "currency": currency, "rows": listed}))
        else:
            show_measure.cost(Console(), found, currency)


@app.command()
def tune(
    model: Model = None,
    drafter: Drafters = None,
    dtype: Dtype = "auto",
    device: Device = None,
    draft_device: DraftDevice = None,
    prompts: Prompts = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the profile goes.")] = Path("profile.json"),
    budget_minutes: Annotated[float, typer.Option(help="Stop after about this long.")] = 5.0,
    limit: Limit = 7,
    tokens: Tokens = 64,
    rounds: Rounds = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the layer-skip set in --out.")] = False,
    set_: Set = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the drafter, K, tree shape and layer-skip set that suit your prompts; Ctrl-C keeps the best so far."""
    with _sentences(debug):
        from ..measure.bench import BenchPlan as Plan, encode_prompts as questions
        from ..measure.tune import Tuner, candidates, keep_skip, skip_from
        from ..models.tuning_profile import read_profile, save_profile
        from . import show_measure

        _insist_on_folder(out)
        start = skip_from(read_profile(out)) if resume else None
        llm = _target(model, dtype, device, set_, draft_device)
        setups = candidates(llm, _names(llm, drafter, worth_trying=True))
        tuner = Tuner(llm, questions(llm, _pick(prompts, None, limit)), Plan(tokens, rounds), 60 * budget_minutes)
        with _progress() as progress:
            outcome = tuner.run(setups, progress, start)
        if not outcome.rows and outcome.search is None:
            raise OutriderError("Interrupted before anything was measured: no profile was written.")
        profile = _profile(llm, outcome)
        save_profile(out, profile)
        where = keep_skip(llm, outcome)
        if as_json:
            typer.echo(json.dumps(profile, ensure_ascii=False))
        else:
            show_measure.tune(Console(), outcome)
            errors.print(f"Written to {out}; use it with --profile {out} or LLM(profile=…).", soft_wrap=True)
            if where is not None:
                errors.print(f"The skip set is noted in {where}; --drafter layerskip finds it there.", soft_wrap=True)
        if outcome.interrupted:
            raise typer.Exit(130)


# ---------------------------------------------------------------- what the commands share


def _target(
    model: str | None,
    dtype: str | None,
    device: str | None,
    set_: list[str] | None = None,
    draft_device: str | None = None,
    drafter: str | None = None,
) -> LLM:
    """The target with the default drafter or this; --set's pairs are kept for whichever drafter is measured."""
    from ..config import Config

    return _load(
        model, arguments(drafter or str(Config().drafter), None, "auto", dtype, set_, device, draft_device), None
    )


def _pick(path: Path | None, categories: list[str] | None, limit: int) -> list[Prompt]:
    """Prompts, kinds of text alternating, so that any number of them is mixed."""
    from itertools import zip_longest

    from ..models.prompts import bundled, from_file

    every = from_file(path) if path else bundled()
    kinds = list(dict.fromkeys(p.category for p in every))
    for name in categories or ():
        if name not in kinds:
            raise ConfigError(f"There is no text of the kind '{name}'. Choose one of: {', '.join(kinds)}.")
    groups = [[p for p in every if p.category == kind] for kind in categories or kinds]
    return [p for row in zip_longest(*groups) for p in row if p is not None][:limit]


def _names(llm: LLM, drafters: list[str] | None, worth_trying: bool = False) -> list[str]:
    """Those that were named; else all that run without being told more, or the default one."""
    from ..drafters import lookup, names

    every = [name for name in names() if name != "off"]
    if drafters and drafters != ["all"]:
        return [lookup(name).name for name in dict.fromkeys(drafters)]
    if worth_trying:
        return [name for name in every if not lookup(name).traits.trial(llm.target)]
    return every if drafters else [llm.config.drafter_name]


def _setups(llm: LLM, drafters: list[str] | None, ks: list[str]) -> list[Setup]:
    from ..measure.bench import make_setup as setup

    widths = [arguments("off", None, k, "auto", None)["k"] for k in ks]
    return [setup(llm, name, k) for name in _names(llm, drafters) for k in widths]


def _measured(llm: LLM, asked: list[Question], setups: list[Setup], plan: Plan, sweep: bool) -> dict[str, Any]:
    from ..measure.bench import measure, result

    swept = _sweep_setups(llm, setups[0]) if sweep else []
    share = len(setups) / (len(setups) + len(swept))
    begin = time.perf_counter()
    with _progress() as progress:
        bench = measure(llm, asked, setups, plan, lambda what, done: progress(what, share * done))
        wider: Bench | None = None
        if swept:
            wider = measure(llm, asked, swept, plan, lambda what, done: progress(what, share + (1 - share) * done))
    found = result(bench, wider) | {"seconds": time.perf_counter() - begin}
    return found | {"command": shlex.join(["outrider", *sys.argv[1:]]), "baseline": "the same with --drafter off"}


def _sweep_setups(llm: LLM, first: Setup) -> list[Setup]:
    """K = 1 to 16, and auto among them: is it as good as the best fixed one?"""
    from ..measure.bench import make_setup as setup

    return [setup(llm, first.drafter, k) for k in ("auto", *SWEEP)]


def _profile(llm: LLM, outcome: Any) -> dict[str, Any]:
    from ..measure.bench import batch_costs
    from ..measure.environment import environment
    from ..measure.statistics import json_options as plain
    from ..measure.tune import profile_of

    here = environment()
    facts = {"model": llm.name, "dtype": llm.dtype, "device": llm.device, "gpus": here["gpus"]}
    facts |= {"machine": here["machine"], "cpu": here["cpu"], "costs": batch_costs(llm)}
    chosen = profile_of(outcome)
    return facts | chosen | {"options": plain(chosen["options"]), "seconds": outcome.seconds}


def _insist_on_folder(path: Path | None) -> None:
    """Before minutes are spent: can the file be written at all?"""
    if path is not None and not path.expanduser().absolute().parent.is_dir():
        raise OutriderError(f"{path} cannot be written: its folder does not exist.")


def _write_page(path: Path, result: dict[str, Any]) -> None:
    from ..measure.report import html

    try:
        path.write_text(html(result), encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"The report cannot be written to {path}: {error}.") from error
