"""Families beyond Llama's: the numbers of `transformers`, from folders and GGUF files, in every precision, in passes of
any size, with drafts, and on a GPU's kernels."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.backends import Part, ops
from outrider.backends.cpu import blocks, native, quantise as quant
from outrider.backends.cpu.int8 import Int8Decoder, Int8Linear, NativeProduct, int8_product
from outrider.backends.experts import Routing, added, choose
from outrider.backends.pass_costs import _tokens
from outrider.backends.rows import rows_of
from outrider.backends.transformer import Transformer
from outrider.engine.batch import BatchBuilder
from outrider.errors import ModelError, OutriderError
from outrider.models.checkpoint import open_checkpoint
from outrider.models.encoder_decoder import model_config
from outrider.models.weights import Safetensors, adapted, check, mxfp4
from outrider.testing import check_drafter

from support import pairs
from support.decoders import CASES, LAYERS, LENGTH, Bench, device_logits, doubled, ours, pair, text, their_logits
from support.gguf_files import add_vocabulary, finish, permuted, tiny_tokenizer
from support.kernels import DEVICE, GPU, _rows_are_independent
from support.lies import lies
from support.native_builds import COMPILER, Use

WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24} | WINDOWS
GEMMA2 = GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}
GRANITE = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5,
}  # fmt: skip
QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 8}
OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8} | WINDOWS
GLM = {"head_dim": 8, "partial_rotary_factor": 0.5}
GLM45 = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 8,
    "routed_scaling_factor": 1.5, "use_qk_norm": True,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "gemma2": ("gemma2", GEMMA2),
    "gemma2 without caps": ("gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 untied": ("gemma2", GEMMA2 | {"tie_word_embeddings": False, "layer_types": ["full_attention"] * 3}),
    "gemma3": ("gemma3", GEMMA),
    "gemma3 scaled": (
        "gemma3",
        GEMMA
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "gemma3 all full": ("gemma3", GEMMA | {"layer_types": ["full_attention"] * 3}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3 window": ("phi3", {"sliding_window": 9, "tie_word_embeddings": True}),
    "phi3 partial": ("phi3", {"sliding_window": None, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi3 short": ("phi3", {"sliding_window": None, "original_max_position_embeddings": 64, "rope_parameters": LONG}),
    "phi3 long": ("phi3", {"sliding_window": None, "original_max_position_embeddings": 32, "rope_parameters": LONG}),
    "granite": ("granite", GRANITE),
    "granite tied, biased": ("granite", GRANITE | {"tie_word_embeddings": True, "attention_bias": True}),
    "granite plain": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "olmo2 without groups": ("olmo2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "olmo2 biased": ("olmo2", {"attention_bias": True}),
    "glm4": ("glm4", GLM),
    "glm4 biased": ("glm4", GLM | {"attention_bias": True, "tie_word_embeddings": True}),
    "glm4 whole": ("glm4", GLM | {"partial_rotary_factor": 1.0}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 9}),
    "mixtral one": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", QWEN),
    "qwen3_moe normalised": ("qwen3_moe", QWEN | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe sparse": ("qwen3_moe", QWEN | {"decoder_sparse_step": 2, "head_dim": 16, "attention_bias": True}),
    "glm4_moe": ("glm4_moe", GLM45),
    "glm4_moe biased": ("glm4_moe", GLM45 | {"attention_bias": True, "use_qk_norm": False, "n_shared_experts": 2}),
    "glm4_moe free": ("glm4_moe", GLM45 | {"norm_topk_prob": False, "first_k_dense_replace": 2}),
    "gpt_oss": ("gpt_oss", OSS),
    "gpt_oss scaled": ("gpt_oss", OSS | {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}}),
    "gpt_oss all full": ("gpt_oss", OSS | {"layer_types": ["full_attention"] * 3, "attention_bias": False}),
}  # fmt: skip
CASES |= FAMILIES
ROWS_ALONE = GPU or _rows_are_independent()  # whether triton's interpreter can show that rows are
LONGEST = {"phi3 short": LENGTH, "phi3 long": LENGTH}  # rope depends on the longest sequence


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", FAMILIES)
def test_float32_logits_are_those_of_transformers(case: str) -> None:
    wanted = their_logits(pair(case)[0], text())
    assert wanted.std() > 0.3  # there is something to compare
    for chunk in (LENGTH, 7, 1):
        got = Bench(ours(case, torch.float32, LONGEST.get(case)), text()).logits(chunk)
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)
        assert torch.equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("case", FAMILIES)
def test_float64_logits_are_those_of_transformers(case: str) -> None:
    if pair(case)[1].experts:
        pytest.skip("transformers multiplies with experts in 32 bits at most")
    wanted = their_logits(doubled(case), text())
    assert wanted.dtype == torch.float64
    got = Bench(ours(case, torch.float64, LONGEST.get(case)), text()).logits(7)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)  # some of theirs is float32 in any model


@pytest.mark.one_in(7)
@pytest.mark.parametrize("case", FAMILIES)
def test_bfloat16_is_near(case: str) -> None:
    exact = Bench(ours(case, torch.float64), text()).logits()
    rounded = Bench(ours(case, torch.bfloat16), text()).logits()
    assert rounded.dtype == torch.float32
    errors = (rounded - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.median() < 0.06  # where a router's choice is close, rounding decides
    assert (rounded - exact).norm() / exact.norm() < 0.06 or pair(case)[1].experts


@pytest.mark.one_in(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FAMILIES)
def test_passes_of_any_size_and_drafts_give_the_same_bits(case: str, dtype: torch.dtype) -> None:
    """Chunks of every size; and a tree of two branches behind a window's edge."""
    model = ours(case, dtype)
    whole = Bench(model, text()).logits()
    for chunk in (1, 5, 16):
        assert torch.equal(Bench(model, text()).logits(chunk), whole)
    root, tokens, parents = text(23), [5, 6, 5, 7, 8, 9], [-1, -1, 0, 1, 2, 3]
    bench = Bench(model, root, spare=len(tokens))
    packed = BatchBuilder(bench.cache)
    packed.pending(bench.seq, 0, len(root), want=True)
    packed.nodes(bench.seq, tokens, parents, range(6), range(6))
    drafted = model.forward(rows_of(packed), bench.plane).logits
    for node, path in {4: [5, 5, 8], 5: [6, 7, 9]}.items():
        assert torch.equal(drafted[1 + node], Bench(model, root + path).logits(chunk=1)[-1])


@pytest.mark.one_in(7)
@pytest.mark.parametrize("case", FAMILIES)
def test_taps_and_ranges_of_layers(case: str) -> None:
    theirs, model = pair(case)[0], ours(case, torch.float32, LONGEST.get(case))
    with torch.inference_mode():
        states = theirs.model(torch.tensor([text()]), output_hidden_states=True).hidden_states
    bench = Bench(model, text())
    rows = bench.rows(0, LENGTH)
    out = model.forward(rows, bench.plane, taps=tuple(range(LAYERS)))
    for layer in range(LAYERS - 1):
        torch.testing.assert_close(out.hidden[layer], states[layer + 1][0], atol=2e-4, rtol=2e-4)
    for cut in range(1, LAYERS):
        first = model.forward(rows, bench.plane, Part(stop=cut, head=False), taps=(cut - 1,))
        again = model.forward(rows, bench.plane, Part(start=cut), x=first.hidden[cut - 1])
        assert torch.equal(again.logits, out.logits)


# ------------------------------------------------------------ int8 on a CPU


@functools.cache
def rounded(case: str) -> Int8Decoder:
    _, config, weights = pair(case)
    odd = replace(config, logit_scale=1.0000001) if config.llama_like else config  # whatever its family
    return Int8Decoder(odd, quant.calibrated(odd, weights, text()))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("case", FAMILIES)
def test_int8_is_near_and_a_row_ignores_its_neighbours(case: str) -> None:
    exact, model = Bench(ours(case, torch.float64), text()).logits(), rounded(case)
    whole = Bench(model, text()).logits()
    likeness = torch.nn.functional.cosine_similarity(whole.double(), exact, dim=1)
    assert likeness.median() > 0.99
    assert likeness.min() > 0.97 or pair(case)[1].experts
    for chunk in (1, 5):
        assert torch.equal(Bench(model, text()).logits(chunk), whole)


@pytest.mark.skipif(native.load().kernels is None, reason="there is no compiler")
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 36), (7, 300, 100), (33, 32, 132)])
def test_a_native_product_is_torchs(rows: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((outputs, inputs), (outputs,), (rows, inputs))
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in shapes)
    packed = quant.quantise(weight, bias, x.abs().amax(0), 8)
    product = int8_product(packed)
    assert isinstance(product, NativeProduct)
    quick, slow = product(x), Int8Linear(packed, outputs)(x)
    torch.testing.assert_close(quick, slow, rtol=1e-5, atol=1e-4)
    for n in range(1, rows):
        assert torch.equal(product(x[:n]), quick[:n])


def test_experts_are_chosen_and_added_as_they_should_be() -> None:
    """Ties go to the lower number; shares add up to one or not; slots are added in order."""
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    chosen, shares = choose(scores, Routing(2, True, "silu"))
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert shares.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    _, shares = choose(scores, Routing(2, False, "silu"))
    torch.testing.assert_close(shares, torch.softmax(scores, -1)[:, [1, 2]])
    outputs = torch.tensor([[[1e8], [1.0], [-1e8]]])
    assert added(outputs, torch.ones(1, 3)).tolist() == [[0.0]]


def test_four_bit_floats_are_read(tmp_path: Path) -> None:
    """gpt-oss as it is published: every value of the format, a negative exponent, gates and ups in turn."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)  # [E, N, K / 32, 16]
    scales = torch.tensor([[[127, 128, 120, 127, 127, 127, 127, 130]] * 2], dtype=torch.uint8)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-value for value in values]
    wanted = []
    for n in range(2):
        for block in range(8):
            exponent = 2.0 ** (int(scales[0, n, block]) - 127)
            for byte in blocks[0, n, block].tolist():
                wanted += [values[byte % 16] * exponent, values[byte // 16] * exponent]
    assert mxfp4(blocks, scales, torch.float32).flatten().tolist() == wanted
    config = replace(pair("gpt_oss")[1], layers=1, hidden_size=256, experts=1, experts_used=1, expert_size=1)
    save_file(
        {
            "model.layers.0.mlp.experts.gate_up_proj_blocks": blocks,
            "model.layers.0.mlp.experts.gate_up_proj_scales": scales,
        },
        tmp_path / "model.safetensors",
    )
    weights = adapted(Safetensors([tmp_path / "model.safetensors"]), config)
    for at, name in enumerate(("gate_proj", "up_proj")):
        full = f"layers.0.mlp.experts.{name}.weight"
        assert weights.shape(full) == (1, 1, 256)
        assert weights.get(full, torch.float32).flatten().tolist() == wanted[256 * at : 256 * (at + 1)]


def test_a_pass_over_experts_is_timed_with_different_tokens() -> None:
    """Equal tokens would all read the same experts, and several rows would seem to cost what one does."""
    mixture, dense = (SimpleNamespace(model=ours(case, torch.float32)) for case in ("mixtral", "olmo2"))
    assert len(set(_tokens(mixture, 0, 40))) > 30
    assert set(_tokens(dense, 0, 40)) == {1}


# ------------------------------------------------------------ a GPU's kernels


@pytest.mark.slow  # in the interpreter
@pytest.mark.parametrize("case", FAMILIES)
def test_a_gpus_kernels_agree(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Bench(ours(case, torch.float32), text(9)).logits()
    _, config, weights = pair(case)
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    model = Transformer(config, weights, torch.float32, DEVICE)
    whole = device_logits(model, text(9), 0, 9)
    torch.testing.assert_close(whole, wanted, rtol=2e-4, atol=2e-4)
    pieces = device_logits(model, text(9), 0, 1, 9)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(pieces, whole) or not ROWS_ALONE


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", [*FAMILIES, *pairs.CASES])
def test_a_configuration_that_lies_is_a_sentence_or_a_model(case: str) -> None:
    """Sizes that are wrong but possible are found by the tensors."""
    theirs, _, weights = pair(case) if case in FAMILIES else pairs.pair(case)
    refused = list[str]()
    for data in lies(theirs.config.to_dict()):
        try:
            config = model_config(data)
            if max(config.vocab_size, config.layers, config.context_length, config.experts) < 1 << 20:
                check(weights, config, Path("model"))
        except ModelError as error:
            refused.append(str(error))
    assert refused
    assert not [message for message in refused if "\n" in message or not message.endswith(".")]


# ------------------------------------------------------------ GGUF


def written(path: Path, case: str, kind: Kind = Kind.F32) -> Any:
    """A case as llama.cpp's converter would write it, matrices in this type; returns the model of transformers."""
    theirs, c, _ = pair(case)
    data, family = theirs.config, c.architecture
    renamed = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe"}
    named = renamed.get(family, family)
    writer = gguf.GGUFWriter(str(path), named)
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == named)
    names = gguf.get_tensor_name_map(arch, LAYERS)
    more = 1 if family == "glm4_moe" else 0  # its files have a layer that predicts further tokens
    writer.add_block_count(LAYERS + more)
    writer.add_context_length(128)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_rope_dimension_count(c.rotary_dim)
    if family == "granite":
        writer.add_attention_scale(data.attention_multiplier)
        writer.add_embedding_scale(data.embedding_multiplier)
        writer.add_residual_scale(data.residual_multiplier)
        writer.add_logit_scale(data.logits_scaling)
    if family in ("gemma2", "gemma3", "gpt_oss"):
        writer.add_sliding_window(data.sliding_window)
    if family.startswith("gemma") and data.attn_logit_softcapping:
        writer.add_attn_logit_softcapping(data.attn_logit_softcapping)
        writer.add_final_logit_softcapping(data.final_logit_softcapping)
    if c.experts:
        writer.add_expert_count(c.experts)
        writer.add_expert_used_count(c.experts_used)
        writer.add_expert_feed_forward_length(c.expert_size)
    if family == "glm4_moe":
        writer.add_nextn_predict_layers(more)
        writer.add_leading_dense_block_count(len(c.dense_layers))
        writer.add_expert_shared_count(c.shared_size // c.expert_size)
        writer.add_expert_weights_scale(c.expert_scale)
        writer.add_expert_weights_norm(c.normalise_experts)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_tensor(f"blk.{LAYERS}.attn_norm.weight", np.ones(c.hidden_size, dtype=np.float32))
    if family == "gpt_oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(c.rope_scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(c.rope_scaling.original_context)
    elif c.rope_scaling is not None:
        writer.add_rope_scaling_orig_ctx_len(c.rope_scaling.original_context)
        writer.add_rope_scaling_attn_factors(c.rope_scaling.attention_factor)
        for name, factors in (("long", c.rope_scaling.long_factors), ("short", c.rope_scaling.factors)):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, dtype=np.float32))
    add_vocabulary(writer)
    for name, tensor in separate_experts(theirs.state_dict(), c).items():
        if name == "lm_head.weight" and c.tied:
            continue
        array = tensor.numpy()
        if family in ("granite", "mixtral") and ("q_proj" in name or "k_proj" in name):
            array = permuted(array, c.heads if "q_proj" in name else c.kv_heads)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        stored = kind if array.ndim > 1 else Kind.F32
        writer.add_tensor(target, gguf.quants.quantize(array, stored), raw_dtype=stored)
    finish(writer)
    return theirs


def separate_experts(state: dict[str, Tensor], c: Any) -> dict[str, Tensor]:
    """Gates, ups and downs of all experts apart, as the converter stacks them."""
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        stem, _, end = name.partition("experts.")
        if c.architecture == "gpt_oss" and end:  # [E, H, 2I], gates and ups in turn
            kind = "bias" if end.endswith("bias") else "weight"
            tensor = tensor.transpose(1, 2).contiguous() if kind == "weight" else tensor
            if end.startswith("down"):
                named[f"{stem}experts.down_proj.{kind}"] = tensor
                continue
            named[f"{stem}experts.gate_proj.{kind}"] = tensor[:, ::2].contiguous()
            named[f"{stem}experts.up_proj.{kind}"] = tensor[:, 1::2].contiguous()
        elif name.endswith("sinks"):
            named[f"{name}.weight"] = tensor
        elif name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            named |= {f"{stem}gate_proj.weight": tensor[:, : c.expert_size].contiguous()}
            named |= {f"{stem}up_proj.weight": tensor[:, c.expert_size :].contiguous()}
        else:
            named[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    return named


SIZE = len(tiny_tokenizer().get_vocab())
ALL_LOCAL = {"layer_types": ["sliding_attention"] * 3, "query_pre_attn_scalar": 16, "vocab_size": SIZE}
FILES: dict[str, tuple[str, dict[str, object]]] = {
    "gguf gemma2": ("gemma2", GEMMA2 | {"query_pre_attn_scalar": 16}),
    "gguf gemma3": ("gemma3", GEMMA | ALL_LOCAL),
    "gguf phi3": ("phi3", {"sliding_window": None}),
    "gguf phi3 long": FAMILIES["phi3 long"],
    "gguf granite": ("granite", GRANITE),
    "gguf olmo2": ("olmo2", {}),
    "gguf glm4": ("glm4", GLM | {"attention_bias": True}),
    "gguf mixtral": FAMILIES["mixtral"],
    "gguf gpt_oss": FAMILIES["gpt_oss scaled"],
    "gguf qwen3_moe": ("qwen3_moe", QWEN | {"norm_topk_prob": True}),
    "gguf glm4_moe": ("glm4_moe", GLM45 | {"attention_bias": True, "n_shared_experts": 2}),
}
CASES |= {name: (family, changes | {"vocab_size": SIZE}) for name, (family, changes) in FILES.items()}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", FILES)
def test_a_gguf_file_is_the_same_model(case: str, tmp_path: Path) -> None:
    theirs = written(tmp_path / "model.gguf", case)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    model = Transformer(checkpoint.config, checkpoint.weights, torch.float32, length=LENGTH)
    whole = their_logits(theirs, text())
    torch.testing.assert_close(Bench(model, text()).logits(7), whole, rtol=2e-4, atol=2e-4)
    odd = replace(checkpoint.config, logit_scale=checkpoint.config.logit_scale * 1.0000001)  # no family is a Llama
    eight = Int8Decoder(odd, quant.calibrated(odd, checkpoint.weights, text()))
    for other in (Transformer(checkpoint.config, checkpoint.weights, torch.bfloat16, length=LENGTH), eight):
        near = torch.nn.functional.cosine_similarity(Bench(other, text()).logits(7), whole, dim=1)
        assert near.median() > 0.99
    read, wanted = checkpoint.config, pair(case)[1]
    assert replace(read, eos_ids=wanted.eos_ids, bos_id=wanted.bos_id, rope_scaling=None) == replace(
        wanted, rope_scaling=None, norm_eps=read.norm_eps, score_scale=read.score_scale,
        embedding_scale=read.embedding_scale, residual_scale=read.residual_scale, logit_scale=read.logit_scale,
        score_cap=read.score_cap, logit_cap=read.logit_cap, expert_scale=read.expert_scale,
    )  # fmt: skip  # numbers are float32 in these files
    for name in ("attention_scale", "embedding_scale", "residual_scale", "logit_scale", "score_cap", "logit_cap"):
        assert getattr(read, name) == pytest.approx(getattr(wanted, name), rel=1e-6)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_half_of_a_model_that_reads_pictures(prefix: str, tmp_path: Path) -> None:
    theirs = pair("gguf gemma3")[0]
    state = {name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()}
    named = {f"{prefix}{name}": tensor.clone() for name, tensor in state.items() if name != "lm_head.weight"}
    save_file(named | {"vision_tower.embeddings.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    data = {"model_type": "gemma3", "eos_token_id": [1, 106], "vision_config": {}}
    data["text_config"] = theirs.config.to_dict() | {"eos_token_id": None, "bos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(data))
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    checkpoint = open_checkpoint(tmp_path)
    model = Transformer(checkpoint.config, checkpoint.weights, torch.float32, length=LENGTH)
    torch.testing.assert_close(Bench(model, text()).logits(), their_logits(theirs, text()), rtol=2e-4, atol=2e-4)
    assert checkpoint.config.eos_ids == {1, 106}


BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": SIZE}  # heads of 16 values
FOUR_TIMES_32 = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32, "vocab_size": SIZE}
OWN_BLOCKS: dict[str, tuple[str, dict[str, object]]] = {
    "blocks phi3": ("phi3", BLOCKS | {"sliding_window": None}),
    "blocks granite": ("granite", BLOCKS | GRANITE),
    "blocks gemma2": ("gemma2", FOUR_TIMES_32 | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": None}),
    "blocks olmo2": ("olmo2", BLOCKS),
    "blocks glm4": ("glm4", FOUR_TIMES_32),
    "blocks mixtral": ("mixtral", BLOCKS | {"num_local_experts": 3, "sliding_window": None}),
}
CASES |= OWN_BLOCKS


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("case", OWN_BLOCKS)
def test_a_familys_own_blocks_run_or_are_refused(case: str, tmp_path: Path, use_backend: Use) -> None:
    """Phi's layers are Llama's with joined matrices; the others' are not, and `auto` takes another dtype."""
    use_backend("tuned")
    theirs = written(tmp_path / "model.gguf", case, Kind.Q8_0)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.weights.quantised
    if not checkpoint.config.llama_like:
        assert not blocks.runs(checkpoint.weights, checkpoint.config)
        with pytest.raises(OutriderError, match=r"differ from Llama's; choose --dtype int8"):
            blocks.BlockTransformer.open(checkpoint, LENGTH, tmp_path)
        return
    model = blocks.BlockTransformer.open(checkpoint, LENGTH, tmp_path)
    likeness = torch.cosine_similarity(Bench(model, text()).logits(7), their_logits(theirs, text()), dim=1)
    assert likeness.median() > 0.995
    assert likeness.min() > 0.9


# ------------------------------------------------------------ whole texts


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_no_drafter_changes_a_familys_text(case: str) -> None:
    """Batches, prefix reuse and preemption with a drafter that runs layers; windows and both ropes on the way."""
    assert check_drafter("layerskip", {"skip_mlp": [1]}, ours(case, torch.float32), tokens=16)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", ["gguf gemma2", "gguf phi3", "gguf olmo2", "gguf mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_file_answers(case: str, dtype: str, tmp_path: Path) -> None:
    written(tmp_path / "model.gguf", case)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    llm = LLM(tmp_path / "model.gguf", dtype=dtype, device="cpu", drafter="suffix", k=4)
    assert not llm.backend
    texts = ["the quick brown fox the quick", "def f(x):"]
    assert [r.token_ids for r in llm.generate(texts, params)] == [
        r.token_ids for r in llm.using(drafter="off").generate(texts, params)
    ]


def test_what_cannot_be_written_or_trained_says_so(tmp_path: Path) -> None:
    from outrider.models.config import hf_config
    from outrider.train.decoder import TargetNet

    config = pair("olmo2")[1]
    with pytest.raises(OutriderError, match="olmo2 cannot be written"):
        hf_config(config)
    with pytest.raises(OutriderError, match="olmo2 cannot be trained"):
        TargetNet(config)
