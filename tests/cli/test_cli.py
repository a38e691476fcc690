"""generate, chat, verify and trace: JSON output, colours, exit codes, and one sentence for every error."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import assume, given, strategies as st
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from outrider import Draft, Drafter, drafters, register
from outrider.cli.app import app, main
from outrider.cli.show import AnswerText, summary
from outrider.drafters import DraftRequest
from outrider.engine.trace import read, recorded, replay
from outrider.errors import ModelError
from outrider.measure.statistics import BenchRow, Pair, Setup, TimedRun, bench_row
from outrider.models import checkpoint
from outrider.models.detokenizer import Piece
from outrider.models.gguf_file import GGUF
from outrider.types import Stats

from support import tiny
from support.examples import examples
from support.gguf_files import write_gguf

PROGRAM = [sys.executable, "-c", "from outrider.cli.app import main; main()"]
FIELDS = {
    "text", "token_ids", "finish_reason", "tokens", "seconds", "tokens_per_second", "steps", "drafted", "reached",
    "accepted", "alpha", "tau", "drafter", "k", "seed", "temperature", "model", "dtype",
}  # fmt: skip
FAST = ["--dtype", "float32", "--k", "4", "--drafter", "suffix"]
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])(?:;\d+)*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("cli") / "tiny", context=4096)


def invoke(*arguments: object, stdin: str | bytes | None = None, **env: str | None) -> Result:
    """Runs in this process, because loading torch takes longer than the tests."""
    plain = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": "xterm-256color", "COLUMNS": "120"}
    return CliRunner(env=plain | env).invoke(app, [str(a) for a in arguments], input=stdin)


def generate(folder: Path, *arguments: object, stdin: str | None = None, **env: str | None) -> Result:
    return invoke("generate", "-m", folder, *FAST, *arguments, stdin=stdin, **env)


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return kept | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color"} | changes


def one_object(stdout: str) -> dict:
    assert stdout.endswith("\n")
    assert stdout.count("\n") == 1
    return json.loads(stdout)


# ---------------------------------------------------------------- generate


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_json_is_one_object_with_all_fields(folder: Path, temperature: str) -> None:
    done = generate(folder, "the quick", "--json", "-n", 24, "-t", temperature, "--seed", 5)
    assert (done.exit_code, done.stderr) == (0, "")
    out = one_object(done.stdout)
    assert out.keys() >= FIELDS
    assert out["tokens"] == len(out["token_ids"]) == len(out["origins"])
    assert out["accepted"] == out["origins"].count("a") <= out["reached"] <= out["drafted"]
    assert out["tau"] == pytest.approx(out["tokens"] / out["steps"])
    assert (out["seed"], out["temperature"], out["drafter"], out["k"]) == (5, float(temperature), "suffix", 4)
    assert (out["model"], out["dtype"], out["finish_reason"]) == ("tiny", "float32", "length")
    assert set(out["seconds_by_phase"]) == {"draft", "verify", "overlap", "judge"}
    again = one_object(
        generate(folder, "the quick", "--json", "-n", 24, "-t", temperature, "--seed", 5, "--k", 0).stdout
    )
    assert (again["token_ids"], again["text"]) == (out["token_ids"], out["text"])


def test_k_auto_measures_first(folder: Path) -> None:
    out = one_object(invoke("generate", "one two", "-m", folder, "--json", "-n", 24, "--dtype", "float32").stdout)
    assert out["k"] == "auto"
    assert out["why"]


def test_text_goes_to_standard_output_and_numbers_to_standard_error(folder: Path) -> None:
    out = one_object(generate(folder, "one two", "--json", "-n", 16).stdout)
    done = generate(folder, "one two", "-n", 16)
    assert done.exit_code == 0
    assert done.stdout == out["text"] + "\n"
    for word in ("tokens/s", "passes", "τ", "drafter suffix"):
        assert word in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def a_piece(*texts: str) -> Piece:
    return Piece("".join(texts), [0] * len(texts), ("ab" * len(texts))[: len(texts)], list(texts), [])


@pytest.mark.parametrize("terminal", [False, True])
def test_a_pipe_and_plain_get_the_text_as_it_is(terminal: bool) -> None:
    piece = a_piece("\tif x:\n", "\n\n", "[bold]no markup[/bold]", "  ", "z" * 300, "😀\r\n")
    file = io.StringIO(newline="")
    AnswerText(Console(file=file, width=40, force_terminal=terminal), plain=terminal).add(piece)
    assert file.getvalue() == piece.text


def in_terminal(width: int, pieces: list[Piece], rejected: str = "") -> str:
    """What is left on a terminal's lines, without colours."""
    file = io.StringIO(newline="")
    text = AnswerText(Console(file=file, width=width, force_terminal=True, highlight=False))
    for piece in pieces:
        text.add(piece, rejected)
    text.finish()
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())


SYLLABLES = st.text(st.sampled_from("ab\u00e9\u2019-.,"), min_size=1, max_size=4)
TOKENS = st.lists(st.tuples(st.sampled_from(["", " ", " ", "\n", "  "]), SYLLABLES).map("".join), max_size=40)


@examples(200)
@given(st.integers(8, 40), st.lists(TOKENS, max_size=4))
def test_no_word_is_split_at_the_margin(width: int, steps: list[list[str]]) -> None:
    """Words arrive in pieces; the lines have the same words, and none is longer than the terminal."""
    text = "".join(token for step in steps for token in step)
    assume(max(map(len, text.split()), default=0) <= width)  # a terminal splits longer ones
    shown = in_terminal(width, [a_piece(*step) for step in steps])
    assert shown.split() == text.split()
    assert all(len(line) <= width for line in shown.split("\n"))


def test_a_script_without_spaces_is_wrapped_and_rejected_drafts_are_outside_the_text() -> None:
    shown = in_terminal(10, [a_piece("中文没有空格所以可以在任何地方换行")])
    assert shown.replace("\n", "") == "中文没有空格所以可以在任何地方换行"
    assert max(map(cell_len, shown.split("\n"))) <= 10
    assert in_terminal(40, [a_piece("one", " two")]) == "one two\n"
    assert in_terminal(40, [a_piece("one", " two")], rejected=" three") == "one twothree\n"


def test_standard_input_raw_and_stop(folder: Path) -> None:
    typed = one_object(generate(folder, "-", "--json", "-n", 8, stdin="the quick").stdout)
    given = one_object(generate(folder, "the quick", "--json", "-n", 8).stdout)
    assert typed["token_ids"] == given["token_ids"]
    raw = one_object(generate(folder, "the quick", "--json", "-n", 16, "--raw").stdout)
    assert raw["prompt_tokens"] < given["prompt_tokens"]  # no template around it
    stop = raw["text"][6:9]
    cut = one_object(generate(folder, "the quick", "--json", "-n", 16, "--raw", "--stop", stop).stdout)
    assert (cut["text"], cut["finish_reason"]) == (raw["text"][: raw["text"].find(stop)], "stop")


def test_set_takes_any_parameter(folder: Path) -> None:
    pairs = [
        "top_p=0.9",
        "ignore-eos=true",
        "logprobs=2",
        'logit_bias={"300": -5, "68": 5000}',
        "tree=true",
        "max_rows=7",
    ]
    done = generate(folder, "one", "--json", "-n", 6, "-t", "0.8", "--seed", 1, *(x for p in pairs for x in ("-s", p)))
    out = one_object(done.stdout)
    assert out["token_ids"] == [68] * 6
    assert [lp["token"] for lp in out["logprobs"]] == [68] * 6
    assert len(out["logprobs"][0]["top"]) == 2


def test_speculative_config_and_draft_models(folder: Path) -> None:
    plain = one_object(generate(folder, "one two", "--json", "-n", 16, "--drafter", "off").stdout)
    vllm = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}')
    for extra, drafter, k in (
        (vllm, "ngram", 3),
        (("-d", "model", "--draft-model", folder), "model", 4),
        (("-d", "cascade"), "cascade", 4),
    ):
        out = one_object(generate(folder, "one two", "--json", "-n", 16, *extra).stdout)
        assert (out["drafter"], out["k"], out["token_ids"]) == (drafter, k, plain["token_ids"])


def test_compare_measures_plain_decoding_beside_it(folder: Path) -> None:
    out = one_object(generate(folder, "one two", "--json", "-n", 16, "--compare").stdout)
    assert out["plain_tokens_per_second"] > 0
    done = generate(folder, "one two", "-n", 16, "--compare")
    assert re.search(r"\d × plain, the same text", done.stderr)
    assert re.search(r"whole request +median of 3 runs", done.stderr)
    assert "differs" not in done.stderr
    assert out["plain_same_text"] is True
    assert out["speedup"] == out["decoding_tokens_per_second"] / out["plain_tokens_per_second"]


def printed(race: BenchRow) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(summary(Stats(steps=2, emitted=4, accepted=2, reached=2, drafted=2), 1.0, "suffix", race))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def race_of(ids: list[int], plain_ids: list[int], speed: float) -> BenchRow:
    """One answer in two steps, that is τ = 2 and a half for five tokens."""
    plain = TimedRun(plain_ids, 1.0, 4.0, Stats())
    fast = TimedRun(ids, 1.0, 4.0 / speed, Stats(steps=2, emitted=5, accepted=3, reached=3, drafted=3))
    return bench_row(Setup("suffix"), "all", [Pair(0, "all", 0, plain, fast)])


def test_a_text_that_differs_is_not_called_the_same() -> None:
    assert "2.00 × plain, the same text" in printed(race_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 2.0))
    assert "2.00 × plain, different text" in printed(race_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], 2.0))
    assert "1.67 × plain" in printed(race_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 2.0))  # (1 + 4) / (1 + 2)


def test_a_speedup_that_drafts_cannot_have_brought_is_called_noise() -> None:
    assert "more than τ allows" not in printed(race_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 2.5))
    assert "more than τ allows" in printed(race_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 2.6))


def test_a_full_disk_ends_the_trace_and_not_the_answer(folder: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    whole = generate(folder, "one two", "-n", 16, "--plain").stdout
    done = generate(folder, "one two", "-n", 16, "--plain", "--trace", "/dev/full")
    assert (done.exit_code, done.stdout) == (0, whole)


def test_standard_input_must_be_text(folder: Path) -> None:
    done = invoke("generate", "-", "-m", folder, *FAST, stdin=b"abc\xff")
    assert done.exit_code == 1
    assert "Standard input is no UTF-8 text: byte 3 cannot be read." in done.stderr


OWN_DRAFTER = """
from outrider import Draft, Drafter, chain

class Echo(Drafter):
    def draft(self, request):
        return Draft.pack(chain(seq.tokens[-2:][:budget]) for seq, budget in zip(request.seqs, request.budgets))

class Broken(Drafter):
    def draft(self, request):
        raise LookupError("no table")
"""


def test_a_drafter_in_one_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN_DRAFTER)
    out = one_object(generate(folder, "one two", "--json", "-n", 16, "-d", f"{file}:Echo").stdout)
    plain = one_object(generate(folder, "one two", "--json", "-n", 16, "-d", "off").stdout)
    assert out["drafter"] == "Echo"
    assert out["drafted"] > 0
    assert out["token_ids"] == plain["token_ids"]
    broken = generate(folder, "one two", "-n", 16, "-d", f"{file}:Broken")
    assert "drafter failed" in broken.stderr
    told = " ".join(broken.stderr.split())
    assert "the drafter failed (Broken: LookupError: no table): plain decoding" in told
    for place, sentence in {
        f"{file}:Nobody": "There is no class Nobody in",
        f"{tmp_path}/none.py:X": "There is no file",
        "json:JSONDecoder": "JSONDecoder is no drafter",
        "no_such_module:X": "cannot be loaded: ModuleNotFoundError",
    }.items():
        done = generate(folder, "one two", "-d", place)
        assert done.exit_code == 1
        assert sentence in done.stderr.replace("\n", " ")


# ---------------------------------------------------------------- chat


def test_chat_until_the_input_ends(folder: Path) -> None:
    done = invoke("chat", "-m", folder, *FAST, "-n", 6, "--system", "be brief", stdin="one\n\ntwo\n")
    assert done.exit_code == 0
    assert "drafter suffix. /help lists commands, Ctrl-D leaves." in done.stderr
    assert done.stderr.count("tokens/s") == 2  # the empty line did nothing
    assert done.stdout.endswith("\n")
    assert invoke("chat", "-m", folder, *FAST, stdin="").exit_code == 0


def test_commands_of_a_chat(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    typed = f"one\n/stats\n/save {file}\n/reset\n/nonsense\ntwo\n/save {file}.2\n/save /no/such/folder\n/exit\nthree\n"
    done = invoke("chat", "-m", folder, *FAST, "-n", 6, "--system", "be brief", stdin=typed)
    assert done.exit_code == 0
    first, second = (json.loads(Path(name).read_text()) for name in (file, f"{file}.2"))
    assert [m["role"] for m in first] == [m["role"] for m in second] == ["system", "user", "assistant"]
    assert (first[1]["content"], second[1]["content"]) == ("one", "two")  # the second conversation knows nothing
    assert re.search(r"6 tokens in \d+\.\d s, .* passes of the target", done.stderr)
    assert "There is no command /nonsense." in done.stderr
    assert "/no/such/folder cannot be written: No such file or directory." in done.stderr
    assert done.stderr.count("drafter suffix  ") == 2  # /exit left before the third message


# ---------------------------------------------------------------- verify


def test_verify_measures_every_drafter(folder: Path) -> None:
    done = invoke("verify", "-m", folder, "--dtype", "float32", "--limit", 2, "--max-tokens", 8, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    report = one_object(done.stdout)
    assert report["divergences"] == 0
    tallies = {(t["drafter"], t["temperature"]): t for t in report["per_drafter"]}
    assert tallies.keys() == {(n, t) for n in drafters.names() if n != "off" for t in (0.0, 0.8)}
    assert report["compared_tokens"] == sum(t["compared_tokens"] for t in tallies.values()) > 0
    assert all(t["failures"] == 0 and t["divergences"] == [] for t in tallies.values())
    assert tallies["model", 0.8]["alpha"] == 1.0


@pytest.fixture
def cheat() -> Iterator[str]:
    @register("cheat")
    class Cheat(Drafter):
        """Changes generated tokens, as only a broken engine would."""

        def draft(self, request: DraftRequest) -> Draft:
            seqs = request.seqs
            for seq in seqs:
                if len(seq.generated) == 3:
                    seq.tokens[-1] = 68 if seq.tokens[-1] != 68 else 69
            return Draft.empty(len(seqs))

    yield "cheat"
    del drafters._REGISTRY["cheat"]


def test_verify_finds_a_divergence(folder: Path, cheat: str) -> None:
    arguments = ("verify", "-m", folder, "-d", cheat, "--dtype", "float32", "--limit", 2, "-n", 8, "-t", 0)
    done = invoke(*arguments, "--json")
    assert done.exit_code == 1
    report = one_object(done.stdout)
    assert report["divergences"] == 2
    (tally,) = report["per_drafter"]
    for divergence in tally["divergences"]:
        assert divergence["position"] == 2
        assert divergence["speculative"] in (68, 69)
        assert divergence["margin"] > 0
    shown = invoke(*arguments)
    assert shown.exit_code == 1
    assert "differs at token 2" in shown.stdout
    assert "2 divergences" in shown.stdout


def test_verify_reads_a_prompt_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["one two"], "category": "a"}\n{"prompt": "three"}\n')
    done = invoke("verify", "-m", folder, "-d", "suffix", "--dtype", "float32", "-n", 6, "--prompts", file)
    assert done.exit_code == 0
    assert "identical text" in done.stdout
    file.write_text("not json\n")
    fails(invoke("verify", "-m", folder, "--prompts", file), "not a prompt")


# ---------------------------------------------------------------- traces


@pytest.fixture(scope="module")
def trace(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    assert generate(folder, "one two", "-n", 24, "--trace", path, "--set", "ignore_eos=true").exit_code == 0
    return path


def test_a_trace_can_be_shown_and_replayed(trace: Path) -> None:
    recording = read(trace)
    assert replay(recording) == recorded(recording)
    assert sum(len(line["emitted"]) for line in recording.lines) == 24
    shown = invoke("trace", "show", trace)
    assert shown.exit_code == 0
    assert shown.stdout.count(" ms  verify ") == len(recording.lines) == recording.footer["steps"]
    assert f"{recording.footer['steps']} steps" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert invoke("trace", "show", trace, "--limit", 3).stdout.count(" ms  verify ") == 3
    assert COLOUR.search(invoke("trace", "show", trace, FORCE_COLOR="1").stdout)


def test_a_trace_that_was_cut_off_is_shown_up_to_there(trace: Path, tmp_path: Path) -> None:
    lines = trace.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(lines[:5]) + lines[5][:40])
    shown = invoke("trace", "show", cut)
    assert shown.exit_code == 0
    assert shown.stdout.count(" ms  verify ") == 4


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    for name, content in (("text", b"hello\n"), ("json", b'{"a": 1}\n'), ("empty", b""), ("binary", bytes(range(256)))):
        (tmp_path / name).write_bytes(content)
        fails(invoke("trace", "show", tmp_path / name), "trace")
    for line in ('{"outrider_trace": "x"}', '{"outrider_trace": 1}\n{}', '{"outrider_trace": 1}\n{"end": true}'):
        (tmp_path / "damaged").write_text(line + "\n")
        done = invoke("trace", "show", tmp_path / "damaged")
        assert done.exit_code == 1
        assert "is damaged" in done.stderr
    fails(invoke("trace", "show", tmp_path / "missing"), "cannot be read")
    fails(invoke("trace", "show", tmp_path), "cannot be read")


def test_a_trace_needs_an_existing_folder(folder: Path, tmp_path: Path) -> None:
    fails(generate(folder, "one", "--trace", tmp_path / "no" / "such" / "folder.jsonl"), "cannot be written")


# ---------------------------------------------------------------- bad input


def fails(done: Result, *words: str) -> None:
    """One sentence on standard error, nothing on standard output, no traceback, an exit status."""
    assert done.exit_code == 1, (done.exit_code, done.exception, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("Error: "), done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.rstrip().endswith((".", ")"))
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--k", "many"], "--k"),
        (["--k", "99"], "k is 99"),
        (["--k", "-1"], "k is -1"),
        (["--dtype", "int3"], "int3"),
        (["-d", "nobody"], "nobody"),
        (["-d", "model"], "--draft-model"),
        (["-t", "-1"], "temperature"),
        (["-t", "nan"], "temperature"),
        (["-n", "0"], "max_tokens"),
        (["--seed", str(2**63)], "seed"),
        (["--stop", ""], "stop string"),
        (["--set", "top_p"], "NAME=VALUE"),
        (["--set", "top_p=2"], "top_p"),
        (["--set", "top_p=high"], "must be a number"),
        (["--set", "logit_bias=[1]"], "wrong type"),
        (["--set", 'logit_bias={"a": 1}'], "wrong type"),
        (["--set", "rule=maybe"], "maybe"),
        (["--set", "max_batch=several"], "whole number"),
        (["--set", "max_length=9999999"], "max_length"),
        (["-d", "ngram", "--set", "ngram_max=x"], "cannot be built"),
        (["-d", "layerskip", "--set", "skip_layers=[99]"], "Layer 99"),
        (["--speculative-config", "{"], "not a JSON object"),
        (["--speculative-config", '{"method": "magic"}'], "magic"),
    ],
    ids=str,
)
def test_invalid_parameters(folder: Path, arguments: list[str], word: str) -> None:
    fails(generate(folder, "one two", *arguments), word)


def test_prompts_that_cannot_be_answered(folder: Path) -> None:
    fails(generate(folder, "word " * 5000), "only 4096 fit")
    fails(generate(folder, "one two three four", "--set", "max_length=9"), "only 9 fit", "raise max_length")
    fails(generate(folder, "  "), "prompt is empty")
    fails(generate(folder, "-", stdin=""), "prompt is empty")


def test_models_that_cannot_be_opened(folder: Path, tmp_path: Path) -> None:
    fails(invoke("generate", "hi", "-m", "/no/such/model"), "/no/such/model")
    fails(invoke("generate", "hi", "-m", "nonsense"), "no model 'nonsense'")
    for half in (b"", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 12, 30) + struct.pack("<Q", 20) + b"general.arch"):
        (tmp_path / "half.gguf").write_bytes(half)
        fails(invoke("generate", "hi", "-m", tmp_path / "half.gguf"), "half.gguf")
    cut = tiny.save(tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    fails(generate(cut, "hi"), "model.safetensors", "download it again")
    mute = tiny.save(tmp_path / "mute")
    (mute / "tokenizer.json").unlink()
    fails(generate(mute, "hi"), "tokenizer.json")


def test_a_draft_model_with_another_vocabulary(folder: Path, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", texts=("zwölf Boxkämpfer jagen Viktor",) * 3)
    translated = generate(folder, "one", "-d", "model", "--draft-model", other)
    assert translated.exit_code == 0
    assert "has another tokenizer" in translated.stderr
    assert "its drafts are retokenised (SLEM)" in " ".join(translated.stderr.split())
    assert translated.stdout == generate(folder, "one", "-d", "off").stdout
    fails(generate(folder, "one", "-d", "model", "--draft-model", "/no/such/draft"), "/no/such/draft")


@pytest.mark.parametrize("poison", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_nan_logits(tmp_path: Path, poison: str) -> None:
    fails(generate(tiny.save(tmp_path, poison=poison), "one two", "--json"), "NaN", "float32")


def test_usage_errors_are_short() -> None:
    for arguments in (["generate"], ["generate", "hi", "--no-such-option"], ["fly"], ["generate", "hi", "-n", "few"]):
        done = invoke(*arguments)
        assert done.exit_code == 2
        assert "Traceback" not in done.stderr
        assert done.stderr


# ---------------------------------------------------------------- as a program of its own


def test_help_is_fast_because_torch_is_not_loaded() -> None:
    code = (
        "import sys; from outrider.cli.app import app\n"
        "for a in (['--help'], ['generate', '--help'], ['trace', '--help']): app(a, standalone_mode=False)\n"
        "print(sorted(m for m in ('torch', 'numpy', 'tokenizers', 'transformers') if m in sys.modules))"
    )
    seconds = []
    for _ in range(3):
        begin = os.times()
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
        )
        end = os.times()  # what the processor did: others may be using the machine
        seconds.append(end.children_user + end.children_system - begin.children_user - begin.children_system)
    assert done.stdout.splitlines()[-1] == "[]"
    for word in ("generate", "chat", "verify", "trace"):
        assert word in done.stdout
    assert min(seconds) < 1.5


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception leaves the program, so that Python shows it."""
    monkeypatch.setattr(sys, "argv", ["outrider", "generate", "hi", "-m", "/no/such/model", "--debug"])
    with pytest.raises(ModelError):
        main()


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_ctrl_c_ends_cleanly_with_the_summary(tmp_path: Path) -> None:
    folder, trace = tiny.save(tmp_path / "long", context=30_000), tmp_path / "trace.jsonl"
    command = [*PROGRAM, "generate", "one two", "-m", str(folder), "--dtype", "float32", "--k", "2", "-n", "29000"]
    command += ["--set", "ignore_eos=true", "--set", "max_length=29500", "--trace", str(trace)]
    reset = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731 - the parent may ignore it
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), preexec_fn=reset
    ) as child:
        first = os.read(child.stdout.fileno(), 1)
        child.send_signal(signal.SIGINT)
        rest, errors = child.communicate(timeout=30)
    assert first + rest
    stderr = errors.decode()
    assert child.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "Interrupted" in stderr
    assert "tokens/s" in stderr
    assert read(trace).footer["steps"] > 0


def in_a_terminal(command: list[str], **env: str) -> str:
    """The output of a program whose input and outputs are a terminal."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment(**env)) as child:
        os.close(slave)
        output = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            output += part
        assert child.wait(30) == 0, output
    os.close(master)
    return output.decode()


def test_colours_in_a_terminal(folder: Path) -> None:
    command = [*PROGRAM, "generate", "one two", "-m", str(folder), *FAST, "-n", "24", "--set", "ignore_eos=true"]
    bright = in_a_terminal(command)
    for word in ("accepted from the draft", "the target's own", "tokens/s"):
        assert word in bright
    assert "rejected draft" not in bright
    struck = generate(folder, "one two", "-n", 24, "--set", "ignore_eos=true", "--show-rejected", FORCE_COLOR="1")
    assert "rejected draft" in struck.stdout
    assert "\x1b[32m" in bright  # accepted
    assert "\x1b[1;36m" in bright  # the target's own


def test_colours_when_they_are_forced_and_none_with_no_color(folder: Path) -> None:
    bright = generate(folder, "one two", "-n", 16, FORCE_COLOR="1")
    assert COLOUR.search(bright.stdout)
    plain = generate(folder, "one two", "-n", 16, FORCE_COLOR="1", NO_COLOR="1")
    assert "accepted from the draft" not in plain.stdout  # a legend of colours that are not there
    assert not COLOUR.search(plain.stdout + plain.stderr)
    plain = generate(folder, "one two", "-n", 16, "--no-color", FORCE_COLOR="1")
    assert not COLOUR.search(plain.stdout + plain.stderr)
    forced = generate(folder, "one two", "-n", 16, "--json", FORCE_COLOR="1")
    assert "\x1b" not in forced.stdout
    one_object(forced.stdout)


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    command = [*PROGRAM, "generate", "one two", "-m", str(folder), *FAST, "-n", "400", "--set", "ignore_eos=true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as child:
        os.read(child.stdout.fileno(), 1)
        child.stdout.close()
        errors = child.stderr.read().decode()
    assert "Traceback" not in errors
    assert child.returncode == 0, errors


def test_generate_imports_only_what_it_uses(folder: Path) -> None:
    """Every start of the program pays for what it imports."""
    code = "import sys; from outrider.cli.app import app; app(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
    arguments = ["generate", "-m", str(folder), *FAST, "-n", "1", "--json", "hi"]
    child = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, env=environment()
    )
    modules = set(child.stdout.splitlines()[-1].split())
    assert {"torch", "outrider.llm"} <= modules
    others = {"transformers", "triton", "fastapi", "uvicorn", "llguidance", "huggingface_hub", "outrider.train"}
    others |= {"outrider.server", "outrider.export", "outrider.measure.bench", "outrider.backends.cuda.graphs"}
    assert not modules & others


def test_the_default_model_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a vocabulary takes as long as reading the weights."""
    write_gguf(tmp_path / "tiny.gguf", "llama")
    opened: list[Path] = []
    monkeypatch.setattr(checkpoint, "default_model", lambda: tmp_path / "tiny.gguf")
    monkeypatch.setattr(checkpoint, "GGUF", lambda path: opened.append(path) or GGUF(path))
    done = invoke("generate", "the quick", *FAST, "-n", 1, "--json", "--raw")
    assert done.exit_code == 0, done.stderr
    assert opened == [tmp_path / "tiny.gguf"]


# ---------------------------------------------------------------- the default model


@pytest.mark.real
def test_the_default_model_by_default() -> None:
    done = invoke("generate", "Say hello.", "--json", "-n", 8, "--k", 3, "--set", "max_length=256")
    out = one_object(done.stdout)
    assert done.exit_code == 0
    assert "smollm2" in out["model"].lower()
    assert out["tokens"] <= 8


@pytest.mark.real
def test_verify_on_the_default_model() -> None:
    some = ("-d", "suffix", "-d", "model")  # the others are compared in test_llm
    done = invoke("verify", *some, "--limit", 2, "--max-tokens", 8, "--json", "--set", "max_length=1024")
    report = one_object(done.stdout)
    assert (done.exit_code, report["divergences"]) == (0, 0)
    assert report["compared_tokens"] == 64


# ---------------------------------------------------------------- guides and predictions


def test_a_schema_a_regex_a_grammar_and_a_prediction(folder: Path, tmp_path: Path) -> None:
    schema, grammar, text = tmp_path / "schema.json", tmp_path / "rules.lark", tmp_path / "text.txt"
    schema.write_text('{"enum": ["fox", "dog"]}')
    grammar.write_text('start: "QZ" /[0-9]{3}/')
    out = one_object(generate(folder, "the fox", "--json", "--json-schema", schema).stdout)
    assert (json.loads(out["text"]) in ("fox", "dog"), out["finish_reason"]) == (True, "stop")
    out = one_object(generate(folder, "the fox", "--json", "--grammar", grammar).stdout)
    assert re.fullmatch("QZ[0-9]{3}", out["text"])
    out = one_object(generate(folder, "the fox", "--json", "--regex", "[a-z]{9}", "--compare").stdout)
    assert re.fullmatch("[a-z]{9}", out["text"])
    plain = one_object(generate(folder, "the fox", "--json", "--raw", "-n", 20, "-d", "off").stdout)
    text.write_text(plain["text"])
    out = one_object(generate(folder, "the fox", "--json", "--raw", "-n", 20, "--prediction", text).stdout)
    assert out["token_ids"] == plain["token_ids"]
    assert out["accepted_prediction_tokens"] > 0
    shown = generate(folder, "the fox", "--raw", "-n", 20, "--prediction", text)
    assert "predicted tokens" in shown.stderr


def test_invalid_guides_are_sentences(folder: Path, tmp_path: Path) -> None:
    for option, value, sentence in (
        ("--json-schema", tmp_path / "nowhere.json", "cannot be read"),
        ("--regex", "(a", "cannot be used"),
        ("--prediction", tmp_path, "cannot be read"),
    ):
        result = generate(folder, "the fox", option, value)
        assert result.exit_code == 1
        assert sentence in result.stderr
        assert "Traceback" not in result.stderr
    both = generate(folder, "the fox", "--regex", "a", "--grammar", __file__)
    assert (both.exit_code, "one thing" in both.stderr) == (1, True)


def test_the_demo_compares_three_answers(folder: Path) -> None:
    done = invoke("demo", "-m", folder, *FAST, "-n", 12)
    assert done.exit_code == 0
    for name in ("an edit", "an explanation", "a piece of code"):
        assert re.search(rf"{name} +[\d.]+ +[\d.]+ +\*?[\d.]+ × +[\d.]+ ×", done.stdout), done.stdout
    assert re.search(
        r"Least for .*; every text is that of plain decoding\. Medians of 3 runs each\.", " ".join(done.stderr.split())
    )
