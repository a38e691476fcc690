"""Layers for further tokens inside checkpoints (MTP): the drafts of transformers' own classes, token by token, through
the command line; and what is wrong with such a checkpoint, in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.backends import ops
from outrider.cli.app import app
from outrider.config import from_speculative_config
from outrider.drafters import Workspace
from outrider.drafters.head.drafter import open_head
from outrider.engine.cache import Cache
from outrider.engine.trace import read
from outrider.errors import ConfigError, OutriderError
from outrider.models.checkpoint import open_checkpoint
from outrider.models.library import describe
from outrider.models.mtp import find_mtp
from outrider.models.weights import expected

from support.head_scores import scored
from support.mtp_checkpoints import Reference, as_gguf, write

K = 6
KINDS = ("glm", "mimo")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder: Path = tmp_path_factory.mktemp("mtp") / request.param
    return folder, write(folder, request.param)


def test_it_drafts_what_transformers_own_layer_drafts(checkpoint: tuple[Path, Reference], tmp_path: Path) -> None:
    """Every step's chain of six, through the command line; which output it continues from is found by trial."""
    folder, reference = checkpoint
    trace = tmp_path / "run.jsonl"
    arguments = ["generate", "the quick brown fox", "-m", str(folder), "--dtype", "float32", "--raw", "--k", str(K)]
    arguments += ["--drafter", "head", "--set", "head=mtp", "--set", "stop_below=0"]
    done = CliRunner().invoke(app, [*arguments, "-n", "12", "--trace", str(trace), "--json"])
    assert done.exit_code == 0, done.output
    recorded, compared = read(trace), 0
    text = [*recorded.header["prompt"], *json.loads(done.stdout)["token_ids"]]
    llm = LLM(folder, dtype="float32", drafter="head", head="mtp", device="cpu")
    reference.normed = llm.engine.drafter.rollout.head.config.norm_output  # type: ignore[attr-defined]
    for step in recorded.lines:
        drafted = [node[0] for node in step["nodes"]]
        assert not step.get("failure")
        assert drafted == reference.draft(text[: step["at"]], K)[: len(drafted)]
        compared += len(drafted)
    assert compared >= 3 * K


def test_the_reference_would_notice(checkpoint: tuple[Path, Reference]) -> None:
    """The other output to continue from, and the other order of state and token, draft something else."""
    _, reference = checkpoint
    texts = [[(seed * i * i + 31 * i) % 300 for i in range(1, 9)] for seed in (3, 5, 11)]
    right = [reference.draft(text, 4) for text in texts]
    other = [Reference(reference.module, reference.layer, not reference.normed).draft(text, 4) for text in texts]
    assert right != other
    assert [chain[0] for chain in right] == [chain[0] for chain in other]
    config = reference.layer.config
    config.mtp_hidden_states_first = not config.mtp_hidden_states_first
    assert [chain[0] for chain in right] != [reference.draft(text, 1)[0] for text in texts]
    config.mtp_hidden_states_first = not config.mtp_hidden_states_first


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_it_never_changes_the_text(checkpoint: tuple[Path, Reference], dtype: str, tree: bool) -> None:
    plain = LLM(checkpoint[0], drafter="off", dtype=dtype, device="cpu")
    llm = plain.using(drafter="head", head="mtp", tree=tree, k=5)
    params = SamplingParams(max_tokens=10, temperature=0.7, seed=4, ignore_eos=True)
    prompts = ["the quick brown fox", "def add(a, b):", "one two"]
    answers = [[result.token_ids for result in each.generate(prompts, params)] for each in (plain, llm)]
    assert answers[0] == answers[1]
    assert not llm.engine.failures


def scores(folder: Path, **options: Any) -> torch.Tensor:
    loaded = LLM(folder, drafter="off", dtype="float32", device="cpu")
    space = Workspace(loaded.target, Cache(64, 2, 64), loaded.engine.target.plane, {"head": "mtp"} | options)
    return scored(open_head(space).head)


def test_eight_bits_say_nearly_what_floats_say(checkpoint: tuple[Path, Reference]) -> None:
    floats = scores(checkpoint[0])
    assert (scores(checkpoint[0], draft_dtype="int8") - floats).norm() < 0.1 * floats.norm()


@pytest.mark.slow  # in the interpreter
def test_a_gpus_kernels_say_the_same(checkpoint: tuple[Path, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    floats = scores(checkpoint[0])
    monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    torch.testing.assert_close(scores(checkpoint[0]), floats, rtol=2e-3, atol=2e-3)


@pytest.mark.one_in(2)
def test_it_is_found_by_itself(
    checkpoint: tuple[Path, Reference], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an option, by `auto`, by the doctor and by the list of models."""
    folder, _ = checkpoint
    llm = LLM(folder, dtype="float32", device="cpu", drafter="head", k=3)
    assert "own layer for further tokens (MTP)" in llm.drafting["head"]["format"]
    assert llm.drafting["head"]["reading"].startswith("Of 2 readings of the file the best one")
    assert "head" in llm.using(drafter="auto").drafting
    entry = describe(str(folder), folder)
    assert entry.about.endswith("built-in, with a layer for further tokens (MTP)")
    monkeypatch.setattr("outrider.models.library.entries", lambda: [entry])
    listed = CliRunner().invoke(app, ["models", "--json"])
    assert json.loads(listed.stdout)["models"][0]["head"] == "mtp"
    arguments = [
        "doctor",
        "-m",
        str(folder),
        "--head",
        "mtp",
        "--dtype",
        "float32",
        "--limit",
        "1",
        "-n",
        "4",
        "--json",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    says = [finding["text"] for finding in json.loads(done.stdout)["findings"]]
    assert any("The drafter is the target's own layer for further tokens (MTP)" in text for text in says)
    for method in ("mtp", "mimo_mtp", "glm4_moe_mtp"):
        given = {"method": method, "model": str(folder), "num_speculative_tokens": 3}
        assert from_speculative_config(given) == {"drafter": "head", "head": "mtp", "k": 3}


def test_a_gguf_file_has_the_same_layer(tmp_path: Path) -> None:
    """llama.cpp's names: the block counts as a layer, and what is around it has names of its own."""
    write(tmp_path / "folder", "glm")
    as_gguf(tmp_path / "folder", tmp_path / "model.gguf")
    layers = []
    for path in (tmp_path / "folder", tmp_path / "model.gguf"):
        opened = open_checkpoint(path)
        assert opened.config.layers == 3
        layer = find_mtp(opened.weights, opened.config)
        assert layer is not None
        layer.check()
        layers.append(layer)
    first, second = layers
    for part in range(4):
        assert torch.equal(first.own(part, torch.float32), second.own(part, torch.float32))
    for name in expected(first.config):
        if name.startswith("layers.0."):
            assert torch.equal(first.block.get(name, torch.float32), second.block.get(name, torch.float32)), name


# ------------------------------------------------------------ what is wrong


BROKEN = {
    "missing": "'layers.3.mlp.experts.up_proj.weight' is missing",
    "no norm": "'layers.3.shared_head.norm.weight' is missing",
    "misshapen": "'layers.3.eh_proj.weight' has the shape [32, 63] instead of [32, 64]",
    "block": "'layers.3.self_attn.o_proj.weight' has the shape [32, 31] instead of [32, 32]",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_damaged_layer_is_named_and_the_target_runs_without_it(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "glm")
    tensors = load_file(folder / "model.safetensors")
    at = "model.layers.3."
    if what == "missing":
        del tensors[f"{at}mlp.experts.4.up_proj.weight"]
    elif what == "no norm":
        del tensors[f"{at}shared_head.norm.weight"]
    else:
        name = f"{at}eh_proj.weight" if what == "misshapen" else f"{at}self_attn.o_proj.weight"
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    llm = LLM(folder, dtype="float32", device="cpu", drafter="auto", k=2)
    assert "head" not in llm.drafting
    for head in ({"head": "mtp"}, {}):
        with pytest.raises(OutriderError) as error:
            llm.using(drafter="head", **head)
        message = str(error.value)
        assert BROKEN[what] in message
        assert message.endswith("download the model again, or choose another drafter.")
    assert len(llm.generate("one two", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_a_target_without_such_a_layer_says_so(tmp_path: Path) -> None:
    """A configuration that promises one and a file that has none."""
    write(tmp_path / "model", "mimo")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "mtp" not in name}
    save_file(kept, tmp_path / "model" / "model.safetensors")
    llm = LLM(tmp_path / "model", dtype="float32", device="cpu", drafter="suffix", k=2)
    with pytest.raises(ConfigError, match=r"this target has no layer for further tokens \(MTP\): choose another"):
        llm.using(drafter="head", head="mtp")
    with pytest.raises(ConfigError, match="needs a trained head"):
        llm.using(drafter="head")
