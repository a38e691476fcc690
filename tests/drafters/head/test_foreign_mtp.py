"""Layers for further tokens (MTP) of DeepSeek-V3 and Qwen3-Next beside a target that transformers runs: the drafts that
their definition gives, token by token; the same text as plain decoding; and what is wrong with such a checkpoint, in a
sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.cli.app import app
from outrider.config import Config, from_speculative_config
from outrider.drafters import Workspace
from outrider.drafters.head import drafter as head_drafter
from outrider.drafters.head.drafter import open_head
from outrider.drafters.head.readings import Tried
from outrider.engine.cache import Cache
from outrider.engine.trace import Recorder, read
from outrider.errors import ConfigError, OutriderError
from outrider.llm import build_engine
from outrider.models.library import describe
from outrider.testing import check_drafter
from outrider.types import Sequence

from support.foreign_mtp import DEEPSEEK, Qwen, Reference, edit, publish, write
from support.head_scores import scored
from support.mtp_checkpoints import SIZES, drawn, tokenizer_files

K = 6
KINDS = ("deepseek", "qwen")
PROMPTS = ["the quick brown fox", "def add(a, b):", "one two"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder: Path = tmp_path_factory.mktemp("mtp") / request.param
    return folder, write(folder, request.param)


@pytest.fixture(scope="module", params=KINDS)
def agreeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose layer is right most of the time."""
    folder: Path = tmp_path_factory.mktemp("agreeing") / request.param
    write(folder, request.param, agreeing=True)
    return folder


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "device": "cpu"} | options)


def assert_drafts(recorded: Any, text: list[int], definition: Reference) -> None:
    """Every recorded step drafted what the definition drafts there, as a rule chains of K."""
    lengths = []
    for step in recorded.lines:
        drafted = [node[0] for node in step["nodes"]]
        assert not step.get("failure")
        assert drafted == definition.draft(text[: step["at"]], len(drafted))
        lengths.append(len(drafted))
    assert max(lengths) == K
    assert sum(lengths) >= 4 * K


@pytest.mark.parametrize(("normed", "prompt"), [(True, PROMPTS[0]), (False, ", ".join(6 * PROMPTS))])
def test_it_drafts_what_its_definition_drafts(
    checkpoint: tuple[Path, Reference], normed: bool, prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step's chain, of six where a block of the target's passes has room, through the command line; each of the
    two outputs that drafted tokens may continue from, after a short and a long prompt."""
    folder, reference = checkpoint
    reading = int(not normed)
    monkeypatch.setattr(
        head_drafter, "choose_reading", lambda head, all, *_: (head.read_as(all[reading].config), Tried(reading))
    )
    trace = tmp_path / "run.jsonl"
    arguments = ["generate", prompt, "-m", str(folder), "--dtype", "float32", "--raw", "--k", str(K)]
    arguments += ["--drafter", "head", "--set", "stop_below=0", "-n", "14", "--trace", str(trace), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    recorded = read(trace)
    text = [*recorded.header["prompt"], *json.loads(done.stdout)["token_ids"]]
    assert (len(recorded.header["prompt"]) > 100) == (prompt != PROMPTS[0])
    definition = Reference(reference.module, reference.layer, normed)
    assert_drafts(recorded, text, definition)


def test_each_sequence_of_a_batch_gets_its_own_drafts(checkpoint: tuple[Path, Reference]) -> None:
    folder, reference = checkpoint
    recorder, options = Recorder("summary"), {"head": "mtp", "stop_below": 0.0}
    target = opened(folder, drafter="off").target
    engine = build_engine(target, Config(drafter="head", k=4, options=options), listeners=(recorder,))
    params = SamplingParams(max_tokens=6)
    seqs = [Sequence(i, [3 + i, 9, 27, 81 - i, 5 * i, *range(4 * i)], params, 7) for i in range(3)]
    for seq in seqs:
        engine.add(seq)
    while engine.busy:
        engine.step()
    drafted = [(line["seq"], line["at"], [node[0] for node in line["nodes"]]) for line in recorder.lines]
    assert {seq for seq, _, tokens in drafted if tokens} == {0, 1, 2}
    for seq, at, tokens in drafted:
        assert tokens == reference.draft(seqs[seq].tokens[:at], len(tokens))


def test_every_row_of_a_pass_has_the_scores_of_the_definition(checkpoint: tuple[Path, Reference]) -> None:
    """Ten rows with the target's states, and one that continues from the last of them."""
    folder, reference = checkpoint
    loaded = opened(folder, drafter="off")
    head = open_head(Workspace(loaded.target, Cache(64, 2, 64), loaded.engine.target.plane, {"head": "mtp"})).head
    states = torch.randn(10, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
    tokens = [*((13 * i + 5) % SIZES["vocab_size"] for i in range(1, 11)), 17]
    with torch.inference_mode():
        states = reference.module.model.norm(states)
        first = reference.normed_outputs(tokens[:-1], states)
        expected = reference.normed_outputs(tokens, torch.cat([states, first[-1:]])) @ reference.module.lm_head.weight.T
    torch.testing.assert_close(scored(head), expected, rtol=1e-4, atol=1e-4)


def test_the_definition_would_notice(checkpoint: tuple[Path, Reference]) -> None:
    """The other output to continue from, and the other order of state and token, draft something else."""
    _, right = checkpoint
    texts = [[(seed * i * i + 31 * i) % 300 for i in range(1, 9)] for seed in (3, 5, 11)]
    chains = [right.draft(text, 4) for text in texts]
    other = [Reference(right.module, right.layer, not right.normed).draft(text, 4) for text in texts]
    assert chains != other
    assert [chain[0] for chain in chains] == [chain[0] for chain in other]
    swapped = [Reference(right.module, right.layer, state_first=True).draft(text, 1)[0] for text in texts]
    assert [chain[0] for chain in chains] != swapped


@pytest.mark.parametrize(("tree", "dtype"), [(False, "float32"), (True, "float32"), (False, "bfloat16")])
def test_it_never_changes_the_text(agreeing: Path, tree: bool, dtype: str) -> None:
    """Though most of its tokens are accepted."""
    plain = opened(agreeing, drafter="off", dtype=dtype)
    llm = plain.using(drafter="head", tree=tree, k=5, stop_below=0.0)
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=4, ignore_eos=True)
        answers = [each.generate(PROMPTS, params) for each in (plain, llm)]
        assert [result.token_ids for result in answers[0]] == [result.token_ids for result in answers[1]]
        assert sum(result.stats.accepted for result in answers[1]) > 12
    assert not llm.engine.failures


def test_no_mishap_changes_the_text(agreeing: Path) -> None:
    target = opened(agreeing, drafter="off").target
    assert check_drafter("head", {"head": "mtp", "stop_below": 0.0}, target, tokens=7)


def test_it_is_found_by_itself(checkpoint: tuple[Path, Reference]) -> None:
    """Without an option, by `auto`, by the list of models and by vLLM's names."""
    folder, _ = checkpoint
    llm = opened(folder, drafter="head", k=3)
    assert "own layer for further tokens (MTP)" in llm.drafting["head"]["format"]
    assert llm.drafting["head"]["reading"].startswith("Of 2 readings of the file the best one")
    assert "head" in llm.using(drafter="auto").drafting
    assert describe(str(folder), folder).about.endswith("through transformers, with a layer for further tokens (MTP)")
    for method in ("deepseek_mtp", "qwen3_next_mtp"):
        given = {"method": method, "model": str(folder), "num_speculative_tokens": 3}
        assert from_speculative_config(given) == {"drafter": "head", "head": "mtp", "k": 3}


# ------------------------------------------------------------ trained further, in a folder of its own


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Reference]:
    """A Qwen3-Next, another layer for it in the speculators format, and what that layer drafts."""
    target, head = (tmp_path_factory.mktemp("alone") / name for name in ("target", "head"))
    reference = write(target, "qwen")
    assert isinstance(reference.layer, Qwen)
    for tensor in reference.layer.tensors.values():
        tensor += 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():  # states before and after the last norm differ by more than a factor
        reference.module.model.norm.weight.copy_(torch.linspace(-0.5, 1, SIZES["hidden_size"]))
    edit(target, {"model.norm.weight": reference.module.model.norm.weight.detach().clone()})
    publish(head, reference.layer, target)
    return target, head, reference


@pytest.mark.parametrize("raw", [False, True])
def test_a_layer_in_a_folder_of_its_own_drafts_what_its_definition_drafts(
    alone: tuple[Path, Path, Reference], raw: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of either state of the target, through the command line; the text is that of plain decoding."""
    target, head, reference = alone
    monkeypatch.setattr(
        head_drafter, "choose_reading", lambda head, all, *_: (head.read_as(all[raw].config), Tried(raw))
    )
    trace = tmp_path / "run.jsonl"
    arguments = ["generate", PROMPTS[0], "-m", str(target), "--dtype", "float32", "--raw", "-n", "14", "--json"]
    plain = CliRunner().invoke(app, [*arguments, "--drafter", "off"])
    arguments += ["--k", str(K), "--drafter", "head", "--set", f"head={head}", "--set", "stop_below=0"]
    done = CliRunner().invoke(app, [*arguments, "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]
    recorded = read(trace)
    text = [*recorded.header["prompt"], *json.loads(done.stdout)["token_ids"]]
    definition = Reference(reference.module, reference.layer, raw=raw)
    assert_drafts(recorded, text, definition)
    other = Reference(reference.module, reference.layer, raw=not raw)
    assert other.draft(text, K) != definition.draft(text, K)


def test_which_state_it_reads_is_tried(alone: tuple[Path, Path, Reference]) -> None:
    target, head, _ = alone
    drafting = opened(target, drafter="head", head=str(head), k=3).drafting["head"]
    assert drafting["format"] == "an MTP head in the speculators format"
    assert drafting["reading"].startswith("Of 2 readings of the file the best one")
    assert "the target's states are read" in drafting["reading"]


SPOILT: dict[str, tuple[dict[str, torch.Tensor | None], dict[str, Any], str]] = {
    "missing": ({"mtp_layers.0.mlp.gate.weight": None}, {}, "its tensor 'mtp_layers.0.mlp.gate.weight' is missing"),
    "misshapen": ({"mtp_layers.0.input_proj.weight": torch.zeros(32, 63)}, {},
                  "its tensor 'mtp_layers.0.input_proj.weight' has the shape [32, 63] instead of [32, 64]"),
    "unknown": ({"mtp_layers.1.input_proj.weight": torch.zeros(32, 64)}, {},
                "such a layer has no tensor 'mtp_layers.1.input_proj.weight'"),
    "other vocabulary": ({}, {"vocab_size": 321}, "vocabulary of 321, this one of 320"),
    "other kind": ({}, {"model_type": "qwen3_5_text"}, "layer of the kind 'qwen3_5_text'"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_wrong_with_such_a_folder_is_named(
    what: str, alone: tuple[Path, Path, Reference], tmp_path: Path
) -> None:
    target, _, reference = alone
    changes, settings, says = SPOILT[what]
    assert isinstance(reference.layer, Qwen)
    publish(tmp_path / "head", reference.layer, target, **settings)
    edit(tmp_path / "head", changes)
    with pytest.raises(OutriderError) as error:
        opened(target, drafter="head", head=str(tmp_path / "head"))
    message = str(error.value)
    assert says in message
    assert str(tmp_path / "head") in message
    assert message.endswith(".")
    assert "\n" not in message


# ------------------------------------------------------------ what is wrong


BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "missing": ("deepseek", {"model.layers.3.mlp.experts.4.up_proj.weight": None},
                "its tensor 'layers.3.mlp.experts.4.up_proj.weight' is missing"),
    "no correction": ("deepseek", {"model.layers.3.mlp.gate.e_score_correction_bias": None},
                      "its tensor 'layers.3.mlp.gate.e_score_correction_bias' is missing"),
    "no norm": ("qwen", {"mtp.norm.weight": None}, "its tensor 'mtp.norm.weight' is missing"),
    "no product": ("deepseek", {"model.layers.3.eh_proj.weight": None},
                   "its tensor 'layers.3.eh_proj.weight' is missing"),
    "misshapen": ("qwen", {"mtp.fc.weight": torch.zeros(32, 63)},
                  "its tensor 'mtp.fc.weight' has the shape [32, 63] instead of [32, 64]"),
    "block": ("qwen", {"mtp.layers.0.self_attn.q_proj.weight": torch.zeros(64, 32)},
              "its tensor 'mtp.layers.0.self_attn.q_proj.weight' has the shape [64, 32] instead of [128, 32]"),
    "two promised": ("deepseek", {"num_nextn_predict_layers": 2},
                     "config.json says that there are 2, but the files have 1"),
    "a layer less": ("deepseek", {"num_hidden_layers": 2}, "config.json says that there are 1, but the files have 2"),
    "none promised": ("qwen", {"mtp_num_hidden_layers": 0}, "config.json says that there are 0, but the files have 1"),
    "quantised": ("qwen", {"quantization_config": {"quant_method": "fp8"}},
                  "its weights are quantised, and beside transformers only floats are read"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_damaged_layer_is_named_and_the_target_runs_without_it(what: str, tmp_path: Path) -> None:
    kind, changes, says = BROKEN[what]
    write(tmp_path / "model", kind)
    llm = opened(tmp_path / "model", drafter="off")
    named = {name: change for name, change in changes.items() if "." in name}
    edit(tmp_path / "model", named, **{name: change for name, change in changes.items() if "." not in name})
    if what != "quantised":  # transformers would want kernels for it
        llm = opened(tmp_path / "model", drafter="auto", k=2)
    assert "head" not in llm.using(drafter="auto", k=2).drafting
    for head in ({"head": "mtp"}, {}):
        with pytest.raises(OutriderError) as error:
            llm.using(drafter="head", **head)
        assert f"(MTP) cannot be used: {says}; " in str(error.value)
        assert str(error.value).endswith("download the model again, or choose another drafter.")
    assert len(llm.generate("one two", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_eight_bits_are_refused(checkpoint: tuple[Path, Reference]) -> None:
    with pytest.raises(ConfigError, match="in floats beside a target that transformers runs: leave draft_dtype out"):
        opened(checkpoint[0], drafter="head", draft_dtype="int8")


@pytest.mark.parametrize("known", [True, False])
def test_a_promise_without_a_layer(known: bool, tmp_path: Path) -> None:
    """Of a family whose layers are known, and of one that has another form of them."""
    config: Any = transformers.DeepseekV3Config(**DEEPSEEK)
    if not known:
        config = transformers.GPT2Config(vocab_size=SIZES["vocab_size"], n_embd=32, n_layer=2, n_head=4)
    module: Any = transformers.AutoModelForCausalLM.from_config(config)
    drawn(module, 1)
    module.save_pretrained(tmp_path)
    edit(tmp_path, {}, num_nextn_predict_layers=1)
    tokenizer_files(tmp_path)
    llm = opened(tmp_path, drafter="off")
    files = "Its configuration promises layers for further tokens (MTP), but its files have none."
    others = "Its own layers for further tokens (MTP) are not used: beside transformers those of deepseek_v3 and "
    assert (files if known else others) in llm.backend
    with pytest.raises(ConfigError, match=r"transformers, and no layer for further tokens \(MTP\) was found beside it"):
        llm.using(drafter="head", head="mtp")
