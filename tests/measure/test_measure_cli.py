"""bench, doctor, cost and tune: one JSON line, findings that follow from the numbers, profiles that load again."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from outrider import LLM, ConfigError, OutriderError
from outrider.backends.loaded_weights import pass_bytes
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.cli.app import app
from outrider.cli.show import winner
from outrider.drafters.layerskip.search import Skip
from outrider.measure.bench import BenchPlan, EncodedPrompt
from outrider.measure.cost import bills, per_million, rows_from
from outrider.measure.doctor import (
    GOOD,
    HINT,
    WRONG,
    CategoryResult,
    Facts,
    MemoryUse,
    advise,
    folder_state,
    memory_speed,
    reading,
    room,
    verdict,
    versions_trouble,
    why,
)
from outrider.measure.statistics import Setup, TimedRun
from outrider.measure.tune import (
    FINALISTS,
    Tuner,
    TuneResult,
    _halvings,
    candidates,
    clearly_faster,
    profile_of,
    skip_from,
)
from outrider.models.tuning_profile import load_profile, read_profile, save_profile
from outrider.models.weights import expected

from support import tiny

ROW = {"drafter", "category", "tokens", "seconds", "tok_s", "plain_tok_s", "speedup", "tau", "alpha"}
QUICK = ("--limit", 2, "--max-tokens", 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("measure") / "tiny", context=4096)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", drafter="off")


def invoke(*arguments: object) -> Result:
    env = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"}
    return CliRunner(env=env).invoke(app, [str(a) for a in arguments])


def measure(folder: Path, command: str, *arguments: object) -> Result:
    return invoke(command, "-m", folder, "--dtype", "float32", *arguments)


def last(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.stderr
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return out


def fails(done: Result, *words: str) -> None:
    assert done.exit_code == 1
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in " ".join(done.stderr.split())


# ---------------------------------------------------------------- bench


def test_bench_prints_a_table_and_ends_with_one_json_line(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    arguments = (*QUICK, "--rounds", 1, "-d", "suffix", "-d", "layerskip", "--k", 2, "--html", page)
    done = measure(folder, "bench", *arguments)
    out = last(done)
    assert all(row.keys() >= ROW for row in out["rows"])
    assert [(r["drafter"], r["category"]) for r in out["rows"]] == [
        (d, c) for d in ("suffix", "layerskip") for c in ("code", "maths", "all")
    ]
    for word in ("suffix", "layerskip", "code", "maths", "speedup", "identical text"):
        assert word in done.stdout
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    only = measure(folder, "bench", *arguments, "--json")
    assert only.stdout.count("\n") == 1
    assert last(only)["compared_tokens"] == out["compared_tokens"]


@pytest.mark.slow
def test_bench_sweeps_k(folder: Path) -> None:
    done = measure(folder, "bench", "--limit", 1, "--max-tokens", 4, "--rounds", 1, "-d", "ngram", "--sweep-k")
    out = last(done)
    assert [row["k"] for row in out["sweep"]] == ["auto", *range(1, 17)]
    assert "speedup against K" in done.stdout
    if out["knee"]:  # nothing to time in one-token answers
        assert 1 <= out["knee"]["enough_k"] <= 16


def test_bench_reads_prompts_and_kinds_alternate(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    kinds = ("a", "a", "a", "b", "b")
    lines = [json.dumps({"turns": [f"text {i}"], "category": kind}) for i, kind in enumerate(kinds)]
    file.write_text("\n".join(lines))
    out = last(measure(folder, "bench", "--prompts", file, "--limit", 3, "--max-tokens", 3, "--rounds", 1, "--json"))
    assert [(r["category"], r["prompts"]) for r in out["rows"]] == [("a", 2), ("b", 1), ("all", 3)]
    out = last(measure(folder, "bench", "--prompts", file, "-c", "b", "--max-tokens", 3, "--rounds", 1, "--json"))
    assert [(r["category"], r["prompts"]) for r in out["rows"]] == [("b", 2), ("all", 2)]


def test_bench_mistakes_are_sentences(folder: Path, tmp_path: Path) -> None:
    fails(measure(folder, "bench", "-c", "poetry"), "no text of the kind 'poetry'", "creative")
    fails(measure(folder, "bench", "-d", "nobody"), "no drafter called 'nobody'")
    fails(measure(folder, "bench", "--k", "many"), "'auto' or a whole number")
    fails(measure(folder, "bench", "--html", tmp_path / "no" / "r.html"), "folder does not exist")
    fails(measure(folder, "bench", "--prompts", tmp_path / "none"), "cannot be read")
    assert measure(folder, "bench", "--limit", 0).exit_code == 2


# ---------------------------------------------------------------- doctor: findings follow from numbers

HEALTHY = {"kernels": "native (AVX512, 2 threads)", "threads": 2, "cores": 2, "load": 0.5, "amx": False, "omp": {}}
FACTS = Facts(
    "m", "int8", ("float32", "bfloat16", "int8"), True, "suffix",
    {1: 0.010, 2: 0.011, 5: 0.014, 9: 0.018, 16: 0.026},
    [CategoryResult("code", 0.8, 1.6), CategoryResult("creative", 0.2, 1.01)], CategoryResult("all", 0.6, 1.3),
    HEALTHY, Path("/tmp"), None, 50.0,
)  # fmt: skip


def texts(facts: Facts, level: str) -> str:
    return "\n".join(finding.text for finding in advise(facts) if finding.level == level)


def test_a_healthy_machine_where_it_pays() -> None:
    assert texts(FACTS, HINT) == texts(FACTS, WRONG) == ""
    good = texts(FACTS, GOOD)
    assert "Speculation pays here: 1.30 ×" in good
    assert "code 1.60 ×, creative 1.01 ×" in good
    assert "5 rows costs 1.40 ×" in good
    assert "bit-identical" in good
    assert FACTS.break_even(4) == pytest.approx(0.288, abs=0.002)  # 1 + a + a² + a³ + a⁴ = 1.4


def test_how_long_a_sequence_may_be() -> None:
    assert room(FACTS) == ""
    facts = replace(FACTS, context=131_072, length=27_000, slots=27_064, memory=[MemoryUse("target", 1, 3_600_000_000)])
    assert room(facts) == (
        "A sequence may have 27,000 tokens, of the model's 131,072; K and V of 27,064 tokens, those of all sequences "
        "together, take 3.60 GB."
    )
    more = room(replace(facts, length=131_072, gpu_free=2_000_000_000))
    assert "the model's whole context" in more
    assert more.endswith("2.0 GB of the GPU are free beside them.")


def test_what_a_pass_reads_and_its_floor() -> None:
    assert reading(FACTS) == ""
    facts = replace(FACTS, pass_bytes=900_000_000, memory_speed=3e12, dtype="gguf", costs={1: 0.0008})
    assert reading(facts) == (
        "A pass reads 0.90 GB of weights in gguf: at least 0.30 ms at the 3,000 GB/s of a copy here; "
        "one row takes 0.80 ms."
    )
    assert memory_speed(torch.device("cpu")) > 1e8


@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_a_pass_are_those_of_its_products(tied: bool) -> None:
    config = replace(toy_config(2), tied=tied)
    model = Transformer(config, RandomWeights(config, 1), torch.float64)
    weights = sum(prod(shape) for shape in expected(config).values())
    looked_up = 0 if tied else config.vocab_size * config.hidden_size
    assert pass_bytes(model) == 8 * (weights - looked_up)


def test_a_loss_on_one_kind_of_text_is_no_tick() -> None:
    lost = replace(FACTS, kinds=[CategoryResult("code", 0.8, 1.6), CategoryResult("creative", 0.2, 0.93)])
    assert "Speculation pays here: 1.30 ×" in texts(lost, HINT)
    assert "But it lost on creative 0.93 ×." in texts(lost, HINT)
    assert "pays here" not in texts(lost, GOOD)


def test_a_drafter_that_fails_is_reported() -> None:
    broken = replace(FACTS, failures=7, failure="the drafter failed (mine: KeyError: 'x'): plain decoding")
    assert "The drafter suffix failed in 7 steps: the drafter failed (mine: KeyError: 'x')" in texts(broken, WRONG)


def test_drafting_ahead_is_reported() -> None:
    miss = {"rejection": {"c": 0.8, "r": 0.5}, "end": {"c": 0.6, "r": 0.6}}
    ahead = {"place": "thread", "hit_rate": 0.62, "hidden_seconds": 1.5, "exposed_seconds": 0.25, "miss": miss}
    ahead |= {
        "pays": False,
        "why": "70 tokens/s drafting ahead, 80 just in time: just in time is kept",
        "controller": "",
    }
    hint = texts(replace(FACTS, ahead=ahead), HINT)
    for words in (
        "in a thread: 62%",
        "0.80 F^-0.50 (rejection)",
        "0.60 F^-0.60 (end)",
        "1.50 s",
        "0.25 s not",
        "80 just",
    ):
        assert words in hint
    assert "62%" in texts(replace(FACTS, ahead=ahead | {"pays": True}), GOOD)
    idle = ahead | {"hit_rate": None, "controller": "no draft pays here"}
    assert "Nothing was drafted ahead: no draft pays here." in texts(replace(FACTS, ahead=idle), HINT)


def test_where_it_loses_and_why() -> None:
    steep = replace(FACTS, costs={1: 0.01, 2: 0.02, 5: 0.06, 9: 0.1}, overall=CategoryResult("all", 0.5, 0.8))
    assert verdict(steep).level == WRONG
    assert "loses here: 0.80 ×" in verdict(steep).text
    assert "cannot pay even if all of them are accepted" in why(steep).text
    timid = replace(FACTS, overall=CategoryResult("all", 0.1, 0.99))
    assert "no difference" in verdict(timid).text
    assert "It pays on code: 1.60 ×" in verdict(timid).text
    assert "reaches only 10%" in why(timid).text
    assert "better drafter" in texts(timid, HINT)
    silent = replace(FACTS, overall=CategoryResult("all", None, None), kinds=[])
    assert "too short" in verdict(silent).text
    assert "found nothing to draft" in why(silent).text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"kernels": "torch (no compiler was found)"},
            "(no compiler was found), so passes are slow: install a C compiler",
        ),
        ({"threads": 8}, "8 threads share 2 cores"),
        ({"threads": 1, "omp": {"OMP_NUM_THREADS": "1"}}, "because OMP_NUM_THREADS is 1"),
        ({"omp": {"OMP_WAIT_POLICY": "PASSIVE"}}, "OMP_WAIT_POLICY=passive"),
        ({"load": 4.7}, "busy (load 4.7 on 2 cores)"),
        ({"amx": True, "isa_cap": "AVX512_CORE_BF16"}, "oneDNN is kept to AVX512_CORE_BF16"),
    ],
)
def test_what_to_change(change: dict[str, Any], words: str) -> None:
    assert words in texts(replace(FACTS, environment=HEALTHY | change), HINT)


def test_dtype_and_installation() -> None:
    assert "bfloat16 or auto" in texts(replace(FACTS, dtype="float32"), HINT)
    assert "try --dtype int8" in texts(replace(FACTS, dtype="bfloat16"), HINT)
    assert texts(replace(FACTS, dtype="bfloat16", dtypes=("bfloat16",)), HINT) == ""
    broken = replace(FACTS, exact=False, folder_trouble="Read-only file system", disk_gb=0.3, versions_trouble=["old."])
    wrong = texts(broken, WRONG)
    for words in ("old.", "Read-only file system", "OUTRIDER_HOME", "Only 0.3 GB", "outrider verify"):
        assert words in wrong
    assert "in order" not in texts(broken, GOOD)


def test_stale_pass_costs() -> None:
    table = Path("/x/costs.json")
    assert "costs" not in texts(replace(FACTS, kept=FACTS.costs, kept_in=table), HINT)
    double = {rows: 2 * seconds for rows, seconds in FACTS.costs.items()}
    assert texts(replace(FACTS, kept=double, kept_in=table), HINT) == ""  # slower all over changes no decision
    bent = FACTS.costs | {5: 0.03}
    assert "differ by 114%" in texts(replace(FACTS, kept=bent, kept_in=table), HINT)
    assert "delete /x/costs.json" in texts(replace(FACTS, kept=bent, kept_in=table), HINT)


def test_folders_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trouble, free = folder_state(tmp_path / "new")
    assert trouble is None
    assert free
    (tmp_path / "file").write_text("")
    assert folder_state(tmp_path / "file" / "below")[0]
    required = ["torch>=99.0", "numpy>=1.0", "nothing-like-this>=1", 'pytest>=99; extra == "test"']
    monkeypatch.setattr("outrider.measure.doctor.requires", lambda name: required)
    found = versions_trouble()
    assert len(found) == 2
    assert "needs at least 99.0" in found[0]
    assert "nothing-like-this is not installed" in found[1]


def test_doctor_runs(folder: Path) -> None:
    done = measure(folder, "doctor", *QUICK)
    assert done.exit_code == 0, done.stderr
    for words in ("What a pass over n rows costs", "K = 4:", "code", "maths", "█", "Memory of the target", "nothing"):
        assert words in done.stdout
    out = last(measure(folder, "doctor", *QUICK, "--json", "--set", "exit_layer=1"))
    assert next(each for each in out["memory"] if each["name"] == "exit")["kv"] == 0
    assert out.keys() >= {"costs", "break_even", "kinds", "overall", "findings", "exact", "environment"}
    assert all(finding["level"] in (GOOD, HINT, WRONG) for finding in out["findings"])


# ---------------------------------------------------------------- cost


def test_a_million_tokens_by_hand(tmp_path: Path) -> None:
    assert per_million(3.6, 100) == pytest.approx(10.0)
    rows = [{"drafter": "suffix", "category": "code", "tok_s": 200.0, "plain_tok_s": 100.0}]
    (bill,) = bills([*rows, rows[0] | {"tok_s": None}], 3.6)
    assert (bill.plain, bill.speculative) == (pytest.approx(10.0), pytest.approx(5.0))
    assert bill.saving_percent == pytest.approx(50.0)
    file = tmp_path / "bench.txt"
    file.write_text("a table\n" + json.dumps({"rows": rows}) + "\n")
    assert rows_from(file) == rows
    indented = tmp_path / "result.json"
    indented.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    assert rows_from(indented) == rows
    out = last(invoke("cost", "--price-per-hour", 3.6, "--from", file, "--currency", "EUR", "--json"))
    assert (out["currency"], out["rows"][0]["saving_percent"]) == ("EUR", pytest.approx(50.0))
    shown = invoke("cost", "--price-per-hour", 3.6, "--from", file, "--currency", "EUR").stdout
    assert "10.000" in shown
    assert "+50%" in shown
    assert "EUR" in shown


def test_cost_measures_and_refuses(folder: Path, tmp_path: Path) -> None:
    out = last(measure(folder, "cost", "--price-per-hour", 1, *QUICK, "--json"))
    assert {"code", "maths", "all"} >= {row["category"] for row in out["rows"]}
    fails(invoke("cost", "--price-per-hour", 0), "more than 0")
    (tmp_path / "x").write_text("no json")
    fails(invoke("cost", "--price-per-hour", 1, "--from", tmp_path / "x"), "outrider bench --json")
    fails(invoke("cost", "--price-per-hour", 1, "--from", tmp_path / "y"), "cannot be read")


# ---------------------------------------------------------------- tune and profiles


def test_profiles_are_llm_arguments(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    facts = {"model": "m", "dtype": "float32", "drafter": "layerskip", "k": 3, "options": {"skip_mlp": [1]}}
    save_profile(path, facts)
    assert load_profile(path) == {"drafter": "layerskip", "k": 3, "dtype": "float32", "skip_mlp": [1]}
    llm = LLM(folder, **load_profile(path))
    assert (llm.config.drafter_name, llm.config.k, llm.config.options) == ("layerskip", 3, {"skip_mlp": [1]})
    for content in ("{", "[]", "{}", '{"outrider_profile": 99}', '{"outrider_profile": 1, "options": [1]}'):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"\.$"):
            load_profile(path)
    with pytest.raises(OutriderError, match="cannot be read"):
        load_profile(tmp_path / "missing")
    with pytest.raises(OutriderError, match="cannot be written"):
        save_profile(tmp_path / "no" / "p.json", {})


def test_candidates_cover_k_and_trees_where_they_exist(llm: LLM) -> None:
    setups = candidates(llm, ["suffix", "ngram", "layerskip"])
    assert {s.k for s in setups if s.drafter == "ngram"} == {"auto", 2, 4, 8}
    assert not any("tree" in s.options for s in setups if s.drafter == "ngram")
    assert sum("tree" in s.options for s in setups if s.drafter == "suffix") == 1
    assert sum("tree_width" in s.options for s in setups if s.drafter == "layerskip") == 3
    assert len({s.label for s in setups}) == len(setups)


def prompts(llm: LLM) -> list[EncodedPrompt]:
    return [EncodedPrompt(llm.tokenizer.encode_prompt(t), c) for t, c in (("one two one two", "a"), ("the fox", "b"))]


def test_the_slower_half_drops_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.measure.bench import Bench
    from outrider.types import Stats

    ran: list[int | str] = []

    def run(self: Bench, index: int, setup: Setup) -> TimedRun:
        if setup.drafter == "off":
            return TimedRun(list(range(9)), 0.1, 8.0, Stats(steps=9, emitted=9))
        ran.append(setup.k)
        return TimedRun(list(range(9)), 0.1, 8.0 / int(setup.k), Stats(steps=3, emitted=9, reached=8, accepted=6))

    monkeypatch.setattr(Bench, "run", run)
    tuner = Tuner(llm, prompts(llm), BenchPlan(8, rounds=2), budget=1e9)
    result = tuner.run([Setup("suffix", k) for k in range(1, 9)], lambda what, done: None)
    assert _halvings(8) == 2
    assert [ran.count(k) for k in range(1, 9)] == [2, 2, 2, 2, 4, 8, 8, 8]
    assert result.best is not None
    assert (result.best.k, result.best.speedup) == (8, pytest.approx(8.0))
    assert len([r for r in result.rows if r.rounds == 4]) == FINALISTS
    assert [r.category for r in result.by_category] == ["a", "b", "all"]
    profile = profile_of(result)
    assert (profile["drafter"], profile["k"], profile["by_category"]["a"]) == ("suffix", 8, pytest.approx(8.0))
    slow = result.rows[-1]
    assert not clearly_faster(replace(slow, ci_low=0.99))
    assert not clearly_faster(replace(slow, accepted=0, speedup=1.3, ci_low=1.2))  # luck, not drafting


def test_time_runs_out_and_interrupts_keep_the_best(llm: LLM) -> None:
    clock = iter(range(10**6))
    tuner = Tuner(llm, prompts(llm), BenchPlan(4, rounds=3), budget=3.0, clock=lambda: float(next(clock)))
    result = tuner.run([Setup("suffix", 2), Setup("ngram", 2)], lambda what, done: None)
    assert {r.prompts * r.rounds for r in result.rows} == {1}  # one prompt, and the budget was gone

    def interrupt(what: str, done: float) -> None:
        raise KeyboardInterrupt

    result = Tuner(llm, prompts(llm), BenchPlan(4), 1e9).run([Setup("suffix", 2)], interrupt)
    assert result.interrupted
    assert len(result.rows) == 1

    def interrupt_search(what: str, done: float) -> None:
        if "skip sets" in what:
            raise KeyboardInterrupt

    result = Tuner(llm, prompts(llm), BenchPlan(4), 1e9).run([Setup("layerskip", 2)], interrupt_search)
    assert (result.rows, result.interrupted) == ([], True)
    assert result.search is not None
    assert skip_from(profile_of(result)) == result.search.skip  # enough to resume from
    assert "--resume" in winner(result)
    with pytest.raises(ConfigError, match="None of these drafters can run here"):
        Tuner(llm, prompts(llm), BenchPlan(4), 1e9).run([Setup("layerskip", 2, {"skip_layers": [99]})], interrupt)


def test_nothing_clearly_faster_means_off() -> None:
    profile = profile_of(TuneResult(None, [], [], None, 0, False, 1.0))
    assert (profile["drafter"], profile["k"], profile["options"]) == ("off", 0, {})
    assert skip_from(profile) is None
    assert skip_from({"skip_search": {"skip_attention": [1], "skip_mlp": [2]}}) == Skip(frozenset({1}), frozenset({2}))
    with pytest.raises(ConfigError, match="damaged"):
        skip_from({"skip_search": {}})


@pytest.mark.slow
def test_tune_writes_a_profile_that_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.tuning_profile.cache_folder", lambda: tmp_path)
    out = tmp_path / "p.json"
    arguments = ("--limit", 1, "-n", 6, "--rounds", 1, "--budget-minutes", 0.05, "--out", out, "-d", "layerskip")
    done = measure(folder, "tune", *arguments)
    assert done.exit_code == 0, done.stderr
    for words in ("layerskip", "Layer skipping:", "speedup"):
        assert words in done.stdout
    profile = read_profile(out)
    assert profile.keys() >= {"model", "dtype", "machine", "drafter", "k", "options", "measured", "skip_search"}
    LLM(folder, **load_profile(out))
    assert "--drafter layerskip finds it there" in " ".join(done.stderr.split())
    drafter: Any = LLM(folder, drafter="layerskip").engine.drafter
    assert drafter.refinement.skip == skip_from(profile)  # found by itself
    costs = profile["costs"]  # from which `outrider export` reckons K by batch size
    assert {"1,1", "1,2", "2,2"} <= set(costs)
    assert all(seconds > 0 for seconds in costs.values())
    again = measure(folder, "tune", *arguments, "--resume", "--json")
    assert last(again)["skip_search"]["tried"] >= 1
    fails(measure(folder, "tune", "--out", tmp_path / "no" / "p.json"), "folder does not exist")


@pytest.mark.slow
@pytest.mark.real
def test_real_weights(tmp_path: Path) -> None:
    quick = ("--limit", 1, "--max-tokens", 8, "--json")
    out = last(invoke("bench", "--rounds", 1, *quick))
    assert out["divergences"] == []
    assert last(invoke("doctor", *quick))["findings"]


def test_a_stale_drafter() -> None:
    text = "The drafter online has gone stale on 'code'."
    assert text in texts(replace(FACTS, drift=(text,)), HINT)
