"""From a model's name to configuration and weights: what was saved is read back, and bad files are ModelErrors."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.errors import ModelError
from outrider.models import checkpoint, gguf_file
from outrider.models.checkpoint import Checkpoint, open_checkpoint
from outrider.models.config import ModelConfig, from_hf
from outrider.models.gguf_file import GGUF, gguf_config

from support.gguf_files import (
    FAMILIES,
    HEADS,
    INTER,
    LAYERS,
    SIZES,
    H,
    V,
    finish,
    state,
    tiny_model,
    tiny_tokenizer,
    write_gguf,
)
from support.lies import lies


def save_tokenizer(folder: Path) -> None:
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))


def save_folder(folder: Path, family: str = "llama", shard: str = "1GB", **changes: object) -> torch.nn.Module:
    model = tiny_model(family, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder)
    return model


def assert_same_rope(ours: ModelConfig, model: torch.nn.Module) -> None:
    rotary = model.model.rotary_emb
    torch.testing.assert_close(ours.inverse_frequencies().float(), rotary.inv_freq, rtol=1e-5, atol=0)
    assert ours.attention_factor == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "30KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_folder_round_trip(tmp_path: Path, family: str, shard: str, tied: bool) -> None:
    model = save_folder(tmp_path, family, shard, tie_word_embeddings=tied)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "30KB")
    opened = open_checkpoint(tmp_path)
    wanted = state(model, tied)
    assert opened.weights.names() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(opened.weights.get(name, torch.float32), tensor)
        assert opened.weights.get(name, torch.bfloat16).dtype == torch.bfloat16
    c = opened.config
    assert (c.architecture, c.vocab_size, c.hidden_size, c.layers, c.heads, c.kv_heads) == (family, V, H, 3, 4, 2)
    assert (c.tied, c.head_dim) == (tied, 16 if family == "qwen3" else 8)
    assert (c.qkv_bias, c.qk_norm, c.o_bias) == (family == "qwen2", family == "qwen3", False)
    assert (c.norm_eps, c.context_length, c.bos_id, c.eos_ids) == (1e-6, 128, 0, frozenset({1}))
    assert_same_rope(c, model)


def test_biases_of_llama(tmp_path: Path) -> None:
    save_folder(tmp_path, "llama", attention_bias=True)
    config = open_checkpoint(tmp_path).config
    assert config.qkv_bias
    assert config.o_bias


@pytest.mark.parametrize("old_spelling", [False, True])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16, "truncate": False},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.7},
    ],
)
def test_rope_scaling_as_transformers(scaling: dict[str, float], old_spelling: bool) -> None:
    rope = scaling | {"rope_theta": 5e5}
    if scaling["rope_type"] in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = 64
    data = SIZES | {"hidden_size": 256, "model_type": "llama"}
    reference = transformers.LlamaConfig(**(data | {"rope_parameters": dict(rope)}))
    if old_spelling:
        data |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope["rope_type"]}}
    else:
        data["rope_parameters"] = rope
    ours = from_hf(data)
    if scaling["rope_type"] == "default":
        steps = torch.arange(0, 64, 2, dtype=torch.float64) / 64
        wanted, factor = 5e5**-steps, 1.0
    else:
        wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference)
    torch.testing.assert_close(ours.inverse_frequencies(), wanted.double(), rtol=1e-5, atol=0)
    assert ours.attention_factor == pytest.approx(factor)
    assert ours.context_length == (256 if (scaling["rope_type"], scaling.get("factor")) == ("yarn", 4.0) else 128)


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("llama", {"sliding_window": 16}, [0, 0, 0]),
        ("mistral", {"sliding_window": 16}, [16, 16, 16]),
        ("mistral", {"sliding_window": None}, [0, 0, 0]),
        ("qwen2", {"sliding_window": 16}, [0, 0, 0]),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, [0, 16, 16]),
        (
            "qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] + ["full_attention"] * 2,
            },
            [8, 0, 0],
        ),
    ],
)
def test_sliding_windows(family: str, changes: dict[str, object], windows: list[int]) -> None:
    for data in (SIZES | {"model_type": family} | changes, FAMILIES[family](**(SIZES | changes)).to_dict()):
        config = from_hf(data)
        assert [config.window(i) for i in range(LAYERS)] == windows


def test_smollm3_has_layers_without_rope() -> None:
    data = SIZES | {"model_type": "smollm3", "num_hidden_layers": 9}
    assert from_hf(data).no_rope_layers == {3, 7}
    assert from_hf(data | {"no_rope_layers": [1, 0, 1, 1, 1, 1, 1, 1, 0]}).no_rope_layers == {1, 8}


def test_generation_config_adds_end_tokens() -> None:
    data = SIZES | {"model_type": "llama"}
    assert from_hf(data, {"eos_token_id": [5, 7]}).eos_ids == {1, 5, 7}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox.*Qwen3"),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes.*GGUF.*gptq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
        ({"hidden_size": None}, "hidden_size.*again"),
        ({"hidden_size": "big"}, "hidden_size.*again"),
        ({"num_key_value_heads": 3}, "fit together"),
        ({"num_hidden_layers": 0}, "not positive"),
        ({"rms_norm_eps": "small"}, "config.json"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        from_hf(SIZES | {"model_type": "llama"} | change)


# --- GGUF ---------------------------------------------------------------------------------------------------------

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_round_trip(tmp_path: Path, family: str, tied: bool) -> None:
    path = tmp_path / "tiny.gguf"
    model = write_gguf(path, family, tied=tied)
    opened = open_checkpoint(path)
    wanted = state(model, tied)
    assert opened.weights.names() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(opened.weights.get(name, torch.float32), tensor), name
    c = opened.config
    assert (c.architecture, c.vocab_size, c.head_dim, c.tied) == (family, V, 16 if family == "qwen3" else 8, tied)
    assert (c.qkv_bias, c.qk_norm, c.eos_ids) == (family == "qwen2", family == "qwen3", frozenset({1}))
    assert c.no_rope_layers == from_hf(model.config.to_dict()).no_rope_layers
    assert opened.name == "tiny"


@pytest.mark.parametrize(("kind", "error"), [(Kind.F16, 1e-4), (Kind.BF16, 1e-3), (Kind.Q8_0, 1e-3), (Kind.Q4_0, 2e-2)])
def test_gguf_types(tmp_path: Path, kind: Kind, error: float) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama", kind)
    weights = open_checkpoint(tmp_path / "tiny.gguf").weights
    for name, tensor in state(model, tied=False).items():
        assert (weights.get(name, torch.float32) - tensor).abs().max() < error, name


@pytest.mark.parametrize("inference", [False, True])  # models are quantised in inference mode
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0])
def test_gguf_tensors_are_the_same_in_parts(
    tmp_path: Path, kind: Kind, inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", kind)
    weights: Any = open_checkpoint(tmp_path / "tiny.gguf").weights
    whole = {name: weights.get(name, torch.bfloat16) for name in weights.names()}
    monkeypatch.setattr(gguf_file, "_AT_ONCE", 7 * 32)  # rows of 32 and of 64
    with torch.inference_mode(inference):
        for name, tensor in whole.items():
            assert torch.equal(weights.get(name, torch.bfloat16), tensor)
    some = torch.tensor([300, 2, 2, 17])
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(weights.block_rows(name, some), weights.blocks(name)[some])


def test_gguf_rope_keys_and_window(tmp_path: Path) -> None:
    keys = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    write_gguf(tmp_path / "a.gguf", "llama", **keys, llama__attention__sliding_window=16)
    ours = open_checkpoint(tmp_path / "a.gguf").config
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
    same = from_hf(SIZES | {"model_type": "llama", "rope_parameters": rope})
    assert torch.equal(ours.inverse_frequencies(), same.inverse_frequencies())
    assert (ours.attention_factor, ours.context_length) == (pytest.approx(same.attention_factor), 512)
    assert [ours.window(i) for i in range(LAYERS)] == [16] * LAYERS


def test_gguf_llama3_factors(tmp_path: Path) -> None:
    path, factors = tmp_path / "a.gguf", np.array([1, 2, 4, 8], dtype=np.float32)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("rope_freqs.weight", factors)
    writer.add_tensor("token_embd.weight", np.zeros((V, H), dtype=np.float32))
    for add, value in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, H),
        (writer.add_feed_forward_length, INTER),
        (writer.add_head_count, HEADS),
    ):
        add(value)
    finish(writer)
    ours = gguf_config(GGUF(path)).inverse_frequencies()
    plain = 1e4 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(ours, plain / torch.tensor(factors, dtype=torch.float64))


def test_gguf_values_that_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key with each of many values: a sentence or a model."""
    write_gguf(tmp_path / "a.gguf", "llama")
    whole = GGUF(tmp_path / "a.gguf").metadata
    for metadata in lies(whole):
        monkeypatch.setattr(checkpoint, "GGUF", lambda path, changed=metadata: _with(GGUF(path), changed))
        with contextlib.suppress(ModelError):
            open_checkpoint(tmp_path / "a.gguf")


def _with(file: GGUF, metadata: dict[str, Any]) -> GGUF:
    file.metadata = metadata
    return file


@pytest.mark.parametrize(
    ("key", "value", "words"), [("split__count", 3, "merge"), ("llama__expert_count", 8, "expert_used_count")]
)
def test_gguf_variants_that_are_refused(tmp_path: Path, key: str, value: int, words: str) -> None:
    write_gguf(tmp_path / "a.gguf", "llama", **{key: value})
    with pytest.raises(ModelError, match=words):
        open_checkpoint(tmp_path / "a.gguf")


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 3, 4, 7, 30, 2000, 0.3, 0.9, -1])
@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_truncated_files(tmp_path: Path, form: str, keep: float) -> None:
    if form == "gguf":
        path = model = tmp_path / "tiny.gguf"
        write_gguf(path, "llama")
    else:
        save_folder(tmp_path)
        model, path = tmp_path, tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=f"{path.name}.*download it again"):
        open_checkpoint(model)


def test_damaged_gguf_never_gives_another_error(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    data, rng = path.read_bytes(), random.Random(0)
    header = data.index(b"blk.2.")
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            open_checkpoint(path)


def resave(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [(None, "no tensor 'layers.1.mlp.up_proj.weight'"), (torch.zeros(3, 5), r"\[3, 5\].*\[64, 32\]")],
)
def test_missing_and_misshapen_tensors(tmp_path: Path, tensor: torch.Tensor | None, words: str) -> None:
    save_folder(tmp_path)
    resave(tmp_path, {"model.layers.1.mlp.up_proj.weight": tensor})
    with pytest.raises(ModelError, match=words):
        open_checkpoint(tmp_path)


def test_missing_shard_and_stray_index(tmp_path: Path) -> None:
    save_folder(tmp_path, shard="30KB")
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    moved = first.rename(tmp_path / "away")
    with pytest.raises(ModelError, match=f"{first.name} is missing"):
        open_checkpoint(tmp_path)
    moved.rename(first)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../secret.safetensors"}}))
    with pytest.raises(ModelError, match="not a file of its own folder"):
        open_checkpoint(tmp_path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    save_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle.*convert them to safetensors"):
        open_checkpoint(tmp_path)


def test_missing_tokenizer(tmp_path: Path) -> None:
    save_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        open_checkpoint(tmp_path)


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    save_folder(tmp_path, vocab_size=100)
    with pytest.raises(ModelError, match="different models"):
        open_checkpoint(tmp_path)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapter"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        open_checkpoint(tmp_path)


def test_folder_with_gguf_inside(tmp_path: Path) -> None:
    write_gguf(tmp_path / "one.gguf", "llama")
    assert open_checkpoint(tmp_path).path == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="several GGUF files"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-4", "no model 'gpt-4'"),
        ("./nowhere", "no file or folder ./nowhere"),
        ("a/b/c", "no file"),
        ("x.gguf", "no file"),
    ],
)
def test_unknown_names(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=f"{words}.*smollm2.*gguf.*owner/name"):
        open_checkpoint(name)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    for name, words in (("a.safetensors", "give the folder"), ("a.txt", "not a model")):
        (tmp_path / name).write_text("hello")
        with pytest.raises(ModelError, match=words):
            open_checkpoint(tmp_path / name)


@pytest.mark.real
def test_the_default_model() -> None:
    opened: Checkpoint = open_checkpoint()
    c = opened.config
    assert (c.layers, c.hidden_size, c.heads, c.kv_heads, c.vocab_size, c.tied) == (30, 576, 9, 3, 49152, True)
    assert opened.tokenizer.vocab_size == 49152
    assert {0, 2} == c.eos_ids
    embedding = opened.weights.get("embed_tokens.weight", torch.float32)
    assert embedding.shape == (49152, 576)
    assert embedding.isfinite().all()
