"""Exports to other engines: the same function in a folder, the right options, refusals before anything is written."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from typer.testing import CliRunner

from outrider.backends import WHOLE, Part
from outrider.backends.rows import rows_of
from outrider.backends.toy import RandomWeights
from outrider.backends.transformer import Transformer
from outrider.cli.app import app
from outrider.control.costs import PassCosts
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.errors import ConfigError, ModelError
from outrider.export.engines import ExportPaths, llamacpp, sglang, vllm, vllm_speculative_config
from outrider.export.plan import ExportPlan, Measured, best_k, k_by_batch, make_plan, measured_in
from outrider.export.ray import Scale, application, to_yaml
from outrider.models.checkpoint import Checkpoint, open_checkpoint
from outrider.models.gguf_file import gguf_name, reorder_rows
from outrider.models.speculators import random_head, read_head, target_hash, write_head
from outrider.models.tuning_profile import save_profile
from outrider.models.weights import Weights, expected, kept_layers, write_folder
from outrider.types import Sequence

from support import tiny
from support.gguf_files import write_gguf

TEXT = [3, 17, 5, 99, 42, 8, 250, 11, 12, 13]
run = CliRunner().invoke


class Random(Weights):
    """A toy's weights, listed as a file's are."""

    def __init__(self, config: Any) -> None:
        self._config, self._source = config, RandomWeights(config, 3)

    def names(self) -> frozenset[str]:
        return frozenset(expected(self._config))

    def shape(self, name: str) -> tuple[int, ...]:
        return expected(self._config)[name]

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._source.get(name, dtype)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A target of six layers in a folder, with a tokenizer."""
    folder = tiny.save(tmp_path_factory.mktemp("target"))
    opened = open_checkpoint(folder)
    deep = replace(opened.config, layers=6)
    six = tmp_path_factory.mktemp("six")
    write_folder(six, deep, Random(deep), opened.tokenizer, torch.float32)
    return open_checkpoint(six)


@pytest.fixture(scope="module")
def head(small: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    config, tensors = random_head(small.config, hash=target_hash(small.config, small.weights))
    write_head(folder, config, tensors)
    return folder


def logits(model: Checkpoint, part: Part = WHOLE, tokens: list[int] = TEXT) -> Tensor:
    """[T, V] of a text in one pass."""
    net = Transformer(model.config, model.weights, torch.float32)
    cache = Cache(64, 1, 64)
    plane = cache.add_plane(*net.plane_shape)
    seq = Sequence(0, tokens)
    cache.open(seq)
    cache.reserve(seq, len(tokens), 0)
    packed = BatchBuilder(cache)
    packed.pending(seq, 0, len(tokens), want=True)
    packed.want = list(range(len(tokens)))
    return net.forward(rows_of(packed), plane, part).logits


def transformers_logits(folder: Path, tokens: list[int] = TEXT) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


# ---------------------------------------------------------------- folders


def test_a_folder_is_the_same_model_for_us_and_for_transformers(small: Checkpoint, tmp_path: Path) -> None:
    write_folder(tmp_path, small.config, small.weights, small.tokenizer, torch.float32, shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    again = open_checkpoint(tmp_path)
    assert again.config == small.config
    assert torch.equal(logits(again), logits(small))
    assert torch.allclose(transformers_logits(tmp_path), logits(small), atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "the quick brown fox"}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        small.tokenizer.render_chat(messages)
    )
    assert tokenizer("the quick brown fox", add_special_tokens=False)["input_ids"] == small.tokenizer.encode(
        "the quick brown fox"
    )


@pytest.mark.parametrize(
    ("attention", "mlp", "layers"), [([2], [2], 5), ([0, 5], [0, 1, 5], 4), ([1, 3], [2], 6), ([], [], 6)]
)
def test_a_layer_skip_set_becomes_a_model_of_the_kept_layers(
    small: Checkpoint, tmp_path: Path, attention: list[int], mlp: list[int], layers: int
) -> None:
    """The same logits as the whole model's with these blocks left out, in the folder and in transformers."""
    config, weights = kept_layers(small.config, small.weights, attention, mlp)
    write_folder(tmp_path, config, weights, small.tokenizer, torch.float32)
    part = Part(skip_attention=frozenset(attention), skip_mlp=frozenset(mlp))
    assert open_checkpoint(tmp_path).config.layers == layers
    expected_logits = logits(small, part)
    assert torch.allclose(logits(open_checkpoint(tmp_path)), expected_logits, atol=1e-5)
    assert torch.allclose(transformers_logits(tmp_path), expected_logits, atol=1e-4)
    if attention or mlp:
        assert not torch.allclose(expected_logits, logits(small), atol=1e-3)


def test_layers_that_are_not_there_cannot_be_skipped(small: Checkpoint) -> None:
    with pytest.raises(ModelError, match=r"Layer 6 .* 0 to 5"):
        kept_layers(small.config, small.weights, [6], [])
    every = range(6)
    with pytest.raises(ModelError, match="without any layer"):
        kept_layers(small.config, small.weights, every, every)


# ---------------------------------------------------------------- GGUF


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_kept_layers_of_a_gguf_file_are_copied_as_they_are(tmp_path: Path, family: str) -> None:
    from outrider.export import gguf as gguf_out

    write_gguf(tmp_path / "whole.gguf", family, gguf.GGMLQuantizationType.Q8_0)
    whole = open_checkpoint(tmp_path / "whole.gguf")
    gguf_out.write_kept(tmp_path / "whole.gguf", tmp_path / "part.gguf", [0, 1], [1])
    part = open_checkpoint(tmp_path / "part.gguf")
    assert part.config == replace(whole.config, layers=whole.config.layers - 1)
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "part.gguf").tensors}
    assert kinds["blk.0.ffn_up.weight"] == gguf.GGMLQuantizationType.Q8_0
    assert torch.equal(
        part.weights.get("layers.1.self_attn.q_proj.weight", torch.float32),
        whole.weights.get("layers.2.self_attn.q_proj.weight", torch.float32),
    )
    skipped = Part(skip_attention=frozenset({0, 1}), skip_mlp=frozenset({1}))
    tokens = [3, 17, 5, 60, 42]
    assert torch.allclose(logits(part, tokens=tokens), logits(whole, skipped, tokens), atol=1e-5)
    assert part.tokenizer.encode("the lazy dog") == whole.tokenizer.encode("the lazy dog")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_small_model_becomes_a_gguf_file_with_the_targets_tokenizer(tmp_path: Path, family: str) -> None:
    from outrider.export import gguf as gguf_out

    write_gguf(tmp_path / "target.gguf", family)
    target = open_checkpoint(tmp_path / "target.gguf")
    config, weights = kept_layers(target.config, target.weights, [1], [1])
    write_folder(tmp_path / "small", config, weights, target.tokenizer, torch.float32)
    gguf_out.write_model(open_checkpoint(tmp_path / "small"), tmp_path / "target.gguf", tmp_path / "small.gguf")
    made = open_checkpoint(tmp_path / "small.gguf")
    assert made.config.layers == config.layers
    assert made.tokenizer.vocabulary == target.tokenizer.vocabulary
    tokens = [3, 17, 5, 60, 42]
    assert torch.allclose(
        logits(made, tokens=tokens), logits(open_checkpoint(tmp_path / "small"), tokens=tokens), atol=3e-2
    )


def test_names_and_the_order_of_rows_go_back_and_forth(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama")
    opened = open_checkpoint(tmp_path / "a.gguf")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    for name in expected(opened.config):
        there = reorder_rows(name, opened.weights.get(name, torch.float32), opened.config, to_gguf=True)
        assert torch.equal(there, torch.from_numpy(reader[gguf_name(name)].data.copy())), name


# ---------------------------------------------------------------- K


def flat(sequences: int, rows: int) -> float:
    """Passes that cost the same up to 16 rows, and grow from there."""
    return 1.0 + 0.05 * max(rows - 16, 0) + 0.001 * rows


COSTS = {(s, s * each): flat(s, s * each) for s in (1, 2, 4, 8, 16, 32, 64) for each in (1, 2, 3, 5, 9, 17)}


def test_k_falls_as_the_batch_grows() -> None:
    table = k_by_batch(Measured(0.7, PassCosts(COSTS)), 8, 64)
    assert [low for low, _, _ in table] == [1, *(high + 1 for _, high, _ in table[:-1])]
    assert table[-1][1] == 64
    ks = [k for _, _, k in table]
    assert ks == sorted(ks, reverse=True)
    assert ks[0] == 8
    assert ks[-1] == 0
    brute = max(range(9), key=lambda k: sum(0.7**i for i in range(k + 1)) / flat(2, 2 * (k + 1)))
    assert best_k(Measured(0.7, PassCosts(COSTS)), 2, 8) == brute


def test_a_drafter_that_is_never_right_gets_no_k() -> None:
    assert k_by_batch(Measured(0.01, PassCosts(COSTS)), 8, 16) == [(1, 16, 0)]
    assert best_k(Measured(0.9, PassCosts(COSTS), draft=2.0), 1, 8) == 0


def profile(**more: Any) -> dict[str, Any]:
    costs = {f"{s},{rows}": seconds for (s, rows), seconds in COSTS.items()}
    measured = {"alpha": 0.7, "tau": 2.9, "tok_s": 2.9, "plain_tok_s": 1.0}
    return {"drafter": "ngram", "k": 4, "options": {"ngram_max": 3}, "measured": measured, "costs": costs} | more


def test_a_profile_gives_a_table_only_with_what_was_measured(small: Checkpoint) -> None:
    measured = measured_in(profile())
    assert measured is not None
    low, _, k = k_by_batch(measured, 4, 64)[0]
    assert (low, k) == (1, 4)
    for nothing in ({"costs": {}}, {"measured": {}}):
        assert measured_in(profile(**nothing)) is None
        assert make_plan(small, None, profile(**nothing), None).k_by_batch == []
    with pytest.raises(ConfigError, match="costs are damaged"):
        measured_in(profile(costs={"one": 1}))


# ---------------------------------------------------------------- the plan


def test_the_drafter_is_found_by_folder_name_and_profile(small: Checkpoint, head: Path, tmp_path: Path) -> None:
    plan = make_plan(small, str(head), {}, None)
    assert (plan.kind, plan.folder, plan.k) == ("head", head, read_head(head)[0].block)
    assert make_plan(small, str(small.path), {}, 3).kind == "model"
    plan = make_plan(small, None, profile(), None)
    assert (plan.kind, plan.k, plan.k_reason, plan.options) == ("ngram", 4, "tuned", {"ngram_max": 3})
    assert plan.k_by_batch[0][2] == 4
    assert make_plan(small, None, profile(k="auto"), None).k_reason.startswith("computed")
    assert make_plan(small, "auto", {}, None).kind == "suffix"  # no head goes with this target
    assert make_plan(small, "off", profile(), None) == ExportPlan("off", 0, k_reason="nothing is drafted")
    other = make_plan(small, "suffix", profile(), None)  # what was measured is another drafter's
    assert (other.k, other.k_by_batch) == (5, [])
    assert other.k_reason.startswith("a default")
    skips = make_plan(small, "layerskip", {"skip_search": {"skip_attention": [2], "skip_mlp": [1, 2], "k": 3}}, None)
    assert skips.options == {"skip_attention": [2], "skip_mlp": [1, 2]}
    assert (skips.k, skips.k_reason) == (3, "what the search for this set found best")
    assert make_plan(small, None, {"drafter": "ahead", "options": {"draft_model": str(small.path)}}, 2).kind == "model"


def test_what_cannot_be_exported_is_refused(small: Checkpoint, head: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder"):
        make_plan(small, "online", {}, None)
    with pytest.raises(ConfigError, match="profile has none"):
        make_plan(small, "layerskip", {}, None)
    with pytest.raises(ConfigError, match="which draft model"):
        make_plan(small, "model", {}, None)
    config, tensors = random_head(small.config, "block")
    write_head(tmp_path / "block", config, tensors)
    with pytest.raises(ConfigError, match="kind 'block'"):
        make_plan(small, str(tmp_path / "block"), {}, None)
    other = open_checkpoint(tiny.save(tmp_path / "other", seed=9))
    with pytest.raises(ConfigError, match="another target"):
        make_plan(other, str(head), {}, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no drafter"):
        make_plan(small, str(tmp_path / "empty"), {}, None)


# ---------------------------------------------------------------- engines

PATHS = ExportPaths(Path("target"), Path("drafter"), "m")


def test_vllms_configuration_is_what_our_own_reader_understands() -> None:
    """Out and in again: `--speculative-config` takes what is written."""
    from outrider.config import from_speculative_config

    table = [(1, 4, 5), (5, 64, 2)]
    spec = vllm(ExportPlan("head", 5, k_by_batch=table), PATHS).speculative_config
    assert spec["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 64, 2]]
    spec = vllm(ExportPlan("layerskip", 3), PATHS).speculative_config
    assert from_speculative_config(spec) == {"drafter": "model", "draft_model": "drafter", "k": 3}
    spec = vllm(ExportPlan("ngram", 4, options={"ngram_max": 3}), PATHS).speculative_config
    assert from_speculative_config(spec) == {"drafter": "ngram", "k": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    made = vllm(ExportPlan("suffix", 4), PATHS)
    assert made.speculative_config["method"] == "suffix"
    assert "arctic" in made.notes[0]
    assert vllm(ExportPlan("off", 0), PATHS).speculative_config == {}
    assert "--speculative-config" not in vllm(ExportPlan("off", 0), PATHS).command


def test_inside_vllm_our_own_drafters_are_proposer_classes() -> None:
    import importlib

    for kind in ("ngram", "suffix"):
        spec = vllm_speculative_config(ExportPlan(kind, 4, k_by_batch=[(1, 64, 4)]), None, own_lookups=True)
        assert spec["method"] == "custom_class"
        assert "num_speculative_tokens_per_batch_size" not in spec  # vLLM does not pass it to a proposer class
        module, _, name = spec["model"].rpartition(".")
        assert getattr(importlib.import_module(module), name).drafter_name == kind


def test_sglang_counts_the_root_and_takes_a_table_for_heads() -> None:
    made = sglang(ExportPlan("head", 3, k_by_batch=[(1, 4, 3), (5, 64, 1)]), PATHS)
    command = " ".join(made.command)
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path drafter --speculative-num-steps 3" in command
    assert "--speculative-num-draft-tokens 4" in command
    assert made.files == {"adaptive.json": {"1": {"candidate_steps": [3]}, "5": {"candidate_steps": [1]}}}
    assert "STANDALONE" in sglang(ExportPlan("model", 3), PATHS).command
    assert "NGRAM" in sglang(ExportPlan("ngram", 3), PATHS).command


def test_llamacpp_takes_draft_models_and_lookups() -> None:
    command = llamacpp(ExportPlan("model", 3), PATHS).command
    assert command[command.index("--model-draft") + 1] == "drafter"
    assert command[command.index("--spec-draft-n-max") + 1] == "3"
    assert "ngram-simple" in llamacpp(ExportPlan("ngram", 3), PATHS).command


# ---------------------------------------------------------------- the command


def exported(*arguments: str) -> dict[str, Any]:
    done = run(app, ["export", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_head_goes_to_vllm_and_sglang(small: Checkpoint, head: Path, tmp_path: Path) -> None:
    there = ["--model", str(small.path), "--drafter", str(head)]
    facts = exported("--to", "vllm", "--out", str(tmp_path / "v"), "--copy-target", "--dtype", "float32", *there)
    assert facts == json.loads((tmp_path / "v" / "export.json").read_text())
    assert torch.equal(logits(open_checkpoint(tmp_path / "v" / "target")), logits(small))
    config, tensors = read_head(tmp_path / "v" / "drafter")
    before, weights = read_head(head)
    assert replace(config, target_name="") == replace(before, target_name="")
    assert config.target_name == "target"
    with safe_open(tmp_path / "v" / "drafter" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "layers.0.self_attn.q_proj.weight" in names  # as `speculators` calls it
    assert not any(name.startswith("midlayer") for name in names)
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    exported("--to", "sglang", "--out", str(tmp_path / "s"), *there)
    flat_config = json.loads((tmp_path / "s" / "drafter" / "config.json").read_text())
    assert flat_config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert flat_config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(before.taps)  # by their outputs


def test_the_script_runs_the_command_in_its_own_folder(small: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    facts = exported("--to", "vllm", "--out", str(out), "--model", str(small.path), "--skip-layers", "2,3", "--k", "3")
    assert facts["drafter"] == {"kind": "layerskip", "path": "drafter"}
    assert open_checkpoint(out / "drafter").config.layers == 4
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "vllm").write_text('#!/bin/sh\npwd\nfor word in "$@"; do echo "$word"; done\n')
    (fake / "vllm").chmod(0o755)
    done = subprocess.run(
        [out / "serve.sh", "--more"], capture_output=True, text=True, env={"PATH": f"{fake}:/usr/bin:/bin"}, check=True
    )
    folder, *arguments = done.stdout.splitlines()
    assert folder == str(out)
    assert arguments == [*facts["command"][1:], "--more"]
    spec = json.loads(arguments[arguments.index("--speculative-config") + 1])
    assert spec == {"num_speculative_tokens": 3, "method": "draft_model", "model": "drafter"}
    assert "outrider verify --server" in (out / "README.md").read_text()


def test_a_draft_model_goes_to_llamacpp(tmp_path: Path) -> None:
    write_gguf(tmp_path / "target.gguf", "llama")
    target = open_checkpoint(tmp_path / "target.gguf")
    config, weights = kept_layers(target.config, target.weights, [1], [1])
    write_folder(tmp_path / "small", config, weights, target.tokenizer, torch.float32)
    there = ["--model", str(tmp_path / "target.gguf"), "--to", "llamacpp"]
    facts = exported(*there, "--drafter", str(tmp_path / "small"), "--out", str(tmp_path / "m"))
    assert facts["drafter"]["path"] == "drafter.gguf"
    assert open_checkpoint(tmp_path / "m" / "drafter.gguf").config.layers == 2
    exported(*there, "--skip-layers", "1", "--out", str(tmp_path / "l"))
    assert open_checkpoint(tmp_path / "l" / "drafter.gguf").config.layers == 2


def test_the_command_refuses_in_sentences(small: Checkpoint, tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        done = run(app, ["export", "--model", str(small.path), *arguments])
        assert done.exit_code == 1
        assert not (tmp_path / "x" / "export.json").exists()
        return done.output

    out = ["--out", str(tmp_path / "x")]
    assert "no engine 'tgi'" in error("--to", "tgi", *out)
    assert "GGUF" in error("--to", "llamacpp", "--drafter", "ngram", *out)
    assert "no dtype 'int4'" in error("--to", "vllm", "--dtype", "int4", "--drafter", "ngram", *out)
    (tmp_path / "x").mkdir(exist_ok=True)
    (tmp_path / "x" / "other.txt").write_text("x")
    assert "not empty" in error("--to", "vllm", "--drafter", "ngram", *out)
    assert "numbers with commas" in error("--to", "vllm", "--skip-layers", "a", *out)


def test_a_profile_is_exported_whole(small: Checkpoint, tmp_path: Path) -> None:
    save_profile(tmp_path / "p.json", profile())
    there = ["--model", str(small.path), "--profile", str(tmp_path / "p.json")]
    facts = exported("--to", "vllm", "--out", str(tmp_path / "x"), *there)
    assert (facts["k"], facts["k_from"]) == (4, "tuned")
    assert facts["speculative_config"]["num_speculative_tokens_per_batch_size"] == facts["k_by_batch_size"]
    assert facts["k_by_batch_size"][0][0] == 1
    assert "| sequences in the batch |" in (tmp_path / "x" / "README.md").read_text()


# ---------------------------------------------------------------- Ray


def test_the_ray_file_names_what_was_exported(small: Checkpoint, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    where = str(tmp_path / "x")
    exported("--to", "vllm", "--out", where, "--model", str(small.path), "--skip-layers", "2", "--copy-target")
    file = tmp_path / "app.yaml"
    arguments = ["deploy", "ray", "--out", str(file), "--export", where, "--max-replicas", "8", "--accelerator", "L4"]
    done = run(app, [*arguments, "--engine", "enforce_eager=true"])
    assert done.exit_code == 0, done.output
    (one,) = yaml.safe_load(file.read_text())["applications"]
    assert one["import_path"] == "ray.serve.llm:build_openai_app"
    (model,) = one["args"]["llm_configs"]
    assert model["model_loading_config"]["model_source"] == f"{where}/target"
    assert model["engine_kwargs"]["speculative_config"]["model"] == f"{where}/drafter"
    assert model["deployment_config"]["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 8,
        "target_ongoing_requests": 16,
    }
    assert model["accelerator_type"] == "L4"
    assert model["engine_kwargs"]["enforce_eager"] is True


def test_the_ray_file_without_an_export_names_only_what_nodes_can_find(small: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    arguments = ["deploy", "ray", "--out", str(file), "--model", str(small.path)]
    assert run(app, [*arguments, "--drafter", "ngram"]).exit_code == 0
    assert '"ngram"' in file.read_text()
    write_gguf(tmp_path / "t.gguf", "llama")
    done = run(app, ["deploy", "ray", "--out", str(file), "--model", str(tmp_path / "t.gguf"), "--drafter", "ngram"])
    assert done.exit_code == 1
    assert "outrider export --to vllm" in re.sub(r"\s+", " ", done.output)
    with pytest.raises(ConfigError, match="contradict"):
        Scale(least=3, most=2)


def test_yaml_is_written_without_a_package() -> None:
    yaml = pytest.importorskip("yaml")
    odd = {
        "a": [],
        "b": {},
        "c": [1, [2, {"d": 'x: "y" #z'}], "ü\n"],
        "on": None,
        "e": [{"f": True}, {"g": {"h": 1.5}}],
    }
    assert yaml.safe_load(to_yaml(odd)) == odd
    facts = {"served_model_name": "m", "target": "/t", "speculative_config": {}}
    written = application(facts, Scale(tensor_parallel=2, cpu=True, max_length=99))
    assert yaml.safe_load(to_yaml(written)) == written
    engine = written["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"]
    assert engine == {"tensor_parallel_size": 2, "max_model_len": 99, "dtype": "float32"}
