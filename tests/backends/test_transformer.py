"""One decoder for the Llama family: its numbers are those of `transformers`, however a text is cut into passes."""

from __future__ import annotations

import copy

import pytest
import torch

from outrider.backends import Part
from outrider.backends.rows import rows_of
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.engine.batch import BatchBuilder
from outrider.errors import ModelError

from support.decoders import CASES, LAYERS, LENGTH, Bench, doubled, ours, pair, text, their_logits


def rope(kind: str, **values: float) -> dict[str, object]:
    if kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = 32
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **values}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
OWN: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama without groups": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama biased": ("llama", {"attention_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 24}),
    "llama linear": ("llama", rope("linear", factor=4.0)),
    "llama3": ("llama", LLAMA3 | {"tie_word_embeddings": True}),
    "llama yarn": ("llama", rope("yarn", factor=4.0)),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", rope("yarn", factor=4.0)),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 9}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
}


CASES |= OWN


@pytest.mark.parametrize("case", OWN)
def test_float32_logits_are_those_of_transformers(case: str) -> None:
    wanted = their_logits(pair(case)[0], text())
    assert wanted.std() > 0.5  # there is something to compare
    for chunk in (LENGTH, 7, 1):
        got = Bench(ours(case, torch.float32), text()).logits(chunk)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        assert torch.equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("case", OWN)
def test_float64_logits_are_those_of_transformers(case: str) -> None:
    wanted = their_logits(doubled(case), text())
    assert wanted.dtype == torch.float64
    for chunk in (LENGTH, 7, 1):
        torch.testing.assert_close(Bench(ours(case, torch.float64), text()).logits(chunk), wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("case", OWN)
def test_bfloat16_is_near(case: str) -> None:
    exact = Bench(ours(case, torch.float64), text()).logits()
    rounded = Bench(ours(case, torch.bfloat16), text()).logits()
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", OWN)
def test_passes_of_any_size_give_the_same_bits(case: str, dtype: torch.dtype) -> None:
    whole = Bench(ours(case, dtype), text()).logits()
    for chunk in (1, 2, 5, 16):
        assert torch.equal(Bench(ours(case, dtype), text()).logits(chunk), whole)


@pytest.mark.parametrize("case", OWN)
def test_taps_are_the_hidden_states_of_transformers(case: str) -> None:
    theirs = pair(case)[0]
    with torch.inference_mode():
        states = theirs.model(torch.tensor([text()]), output_hidden_states=True).hidden_states
    bench = Bench(ours(case, torch.float32), text())
    out = bench.model.forward(bench.rows(0, LENGTH), bench.plane, taps=tuple(range(LAYERS)))
    assert set(out.hidden) == set(range(LAYERS))
    for layer in range(LAYERS - 1):
        torch.testing.assert_close(out.hidden[layer], states[layer + 1][0], atol=1e-4, rtol=1e-4)
    with torch.inference_mode():  # the last of theirs is after the final norm
        torch.testing.assert_close(theirs.model.norm(out.hidden[LAYERS - 1]), states[-1][0], atol=1e-4, rtol=1e-4)
    assert torch.equal(out.logits, Bench(bench.model, text()).logits())  # tapping changes nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", ["llama", "qwen3", "mistral window", "smollm3"])
def test_layer_ranges_add_up_to_the_whole(case: str, dtype: torch.dtype) -> None:
    model = ours(case, dtype)
    whole = Bench(model, text()).logits()
    for cut in range(1, LAYERS):
        bench = Bench(model, text())
        rows = bench.rows(0, LENGTH)
        first = model.forward(rows, bench.plane, Part(stop=cut, head=False), taps=(cut - 1,))
        assert first.logits.numel() == 0
        x = first.hidden[cut - 1]
        kept = x.clone()
        assert torch.equal(model.forward(rows, bench.plane, Part(start=cut), x=x).logits, whole)
        assert torch.equal(x, kept)  # the caller's hidden state is not written to


@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_an_early_exit_is_norm_and_head_of_that_layer(case: str) -> None:
    theirs = pair(case)[0]
    with torch.inference_mode():
        states = theirs.model(torch.tensor([text()]), output_hidden_states=True).hidden_states
        wanted = theirs.lm_head(theirs.model.norm(states[2][0]))
    got = Bench(ours(case, torch.float32), text()).logits(part=Part(stop=2))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "llama biased", "qwen3", "smollm3"])
def test_a_skipped_block_adds_nothing(case: str) -> None:
    theirs = copy.deepcopy(pair(case)[0])
    with torch.no_grad():
        for block in (theirs.model.layers[1].self_attn.o_proj, theirs.model.layers[0].mlp.down_proj):
            for parameter in block.parameters():
                parameter.zero_()
    part = Part(skip_attention=frozenset({1}), skip_mlp=frozenset({0}))
    for chunk in (LENGTH, 1):
        got = Bench(ours(case, torch.float32), text()).logits(chunk, part)
        torch.testing.assert_close(got, their_logits(theirs, text()), atol=1e-4, rtol=1e-4)


def test_everything_can_be_skipped() -> None:
    every = frozenset(range(LAYERS))
    bench = Bench(ours("llama", torch.float32), text())
    out = bench.model.forward(bench.rows(0, LENGTH), bench.plane, Part(0, None, every, every), taps=(0,))
    assert torch.equal(out.hidden[0], bench.model.embedding[torch.tensor(text())])
    assert out.logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "qwen3", "mistral window", "qwen2 window", "smollm3", "llama yarn"])
def test_drafted_rows_are_the_rows_of_plain_decoding(case: str, dtype: torch.dtype) -> None:
    """A tree of 2 branches: each node's logits are the bits that its path would give, committed token by token."""
    model, root = ours(case, dtype), text(23)
    tokens, parents = [5, 6, 5, 7, 8, 9], [-1, -1, 0, 1, 2, 3]
    paths = {0: [5], 1: [6], 2: [5, 5], 3: [6, 7], 4: [5, 5, 8], 5: [6, 7, 9]}
    bench = Bench(model, root, spare=len(tokens))
    packed = BatchBuilder(bench.cache)
    packed.pending(bench.seq, 0, len(root), want=True)
    packed.nodes(bench.seq, tokens, parents, range(6), range(6))
    drafted = model.forward(rows_of(packed), bench.plane).logits
    for node, path in paths.items():
        assert torch.equal(drafted[1 + node], Bench(model, root + path).logits(chunk=1)[-1])


def test_only_wanted_rows_get_logits() -> None:
    bench = Bench(ours("llama", torch.float32), text())
    every = bench.logits()
    packed = BatchBuilder(bench.cache)
    packed.pending(bench.seq, 0, LENGTH, want=True)
    (last,) = bench.model.forward(rows_of(packed), bench.plane).logits
    assert torch.equal(last, every[-1])


def test_half_a_bias_is_refused() -> None:
    class Lopsided(RandomWeights):
        def has(self, name: str) -> bool:
            return super().has(name) or name.endswith("q_proj.bias")

    config = toy_config()
    with pytest.raises(ModelError, match="bias"):
        Transformer(config, Lopsided(config, 1), torch.float32)
