"""One decoder for the Llama family: its numbers are those of `transformers`, however a text is cut into passes."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from outrider.backends import WHOLE, Part
from outrider.backends.rows import Rows, rows_of
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache, Plane
from outrider.errors import ModelError
from outrider.models import config as configs
from outrider.models.tokenizer import read_json
from outrider.models.weights import Safetensors, check, find_safetensors
from outrider.types import Sequence

V, LAYERS, LENGTH = 96, 3, 44
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "smollm3": transformers.SmolLM3Config,
}


def rope(kind: str, **values: float) -> dict[str, object]:
    if kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = 32
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **values}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
CASES: dict[str, tuple[str, dict[str, object]]] = {
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


@functools.cache
def pair(case: str) -> tuple[torch.nn.Module, configs.ModelConfig, Safetensors]:
    """A random model of transformers, and what Outrider reads of it from the files that transformers wrote."""
    family, changes = CASES[case]
    torch.manual_seed(len(case))
    config = CLASSES[family](**(SIZES | changes))
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in theirs.named_parameters():
        # Small and all alike, as they come, nothing that is mixed up would show.
        torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.2)
    home = tempfile.TemporaryDirectory(prefix="outrider-tiny-")
    folder = Path(home.name)
    theirs.save_pretrained(folder)
    ours = configs.from_hf(read_json(folder / "config.json"))
    weights = Safetensors(find_safetensors(folder))
    weights.home = home  # goes when they go
    check(weights, ours, folder)
    return theirs, ours, weights


@functools.cache
def ours(case: str, dtype: torch.dtype) -> Transformer:
    _, config, weights = pair(case)
    return Transformer(config, weights, dtype)


@functools.cache
def doubled(case: str) -> torch.nn.Module:
    """transformers in float64, with the two things that it computes in float32 in any model done in float64 too."""
    theirs, config, _ = pair(case)
    theirs = copy.deepcopy(theirs).double()

    def norm(module: torch.nn.Module, x: Tensor) -> Tensor:
        return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)

    def rotary(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * config.inverse_frequencies()  # [1, T, d/2]
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * config.attention_factor, angles.sin() * config.attention_factor

    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(norm, module)
    theirs.model.rotary_emb.forward = rotary
    return theirs


def text(length: int = LENGTH) -> list[int]:
    return [(i * i + 3 * i + 7) % V for i in range(length)]


def their_logits(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]  # [T, V]


class Bench:
    """A model with a cache of its own, fed by hand."""

    def __init__(self, model: Transformer, tokens: list[int], spare: int = 0) -> None:
        self.model, self.cache = model, Cache(128, 4, 96)
        # Slots out of order: nothing may lean on neighbouring positions lying side by side.
        self.cache._free = self.cache._free[::2] + self.cache._free[1::2]
        self.plane: Plane = self.cache.add_plane(*model.plane_shape)
        self.seq = Sequence(1, tokens)
        self.cache.open(self.seq)
        assert self.cache.reserve(self.seq, len(tokens), spare)

    def rows(self, start: int, stop: int) -> Rows:
        packed = BatchBuilder(self.cache)
        packed.pending(self.seq, start, stop, want=False)
        packed.want = list(range(stop - start))
        return rows_of(packed)

    def logits(self, chunk: int = 10**9, part: Part = WHOLE) -> Tensor:
        n = len(self.seq.tokens)
        starts = range(0, n, min(chunk, n))
        return torch.cat([self.model.forward(self.rows(i, min(i + chunk, n)), self.plane, part).logits for i in starts])


@pytest.mark.parametrize("case", CASES)
def test_float32_logits_are_those_of_transformers(case: str) -> None:
    wanted = their_logits(pair(case)[0], text())
    assert wanted.std() > 0.5  # there is something to compare
    for chunk in (LENGTH, 7, 1):
        got = Bench(ours(case, torch.float32), text()).logits(chunk)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        assert torch.equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_float64_logits_are_those_of_transformers(case: str) -> None:
    wanted = their_logits(doubled(case), text())
    assert wanted.dtype == torch.float64
    for chunk in (LENGTH, 7, 1):
        torch.testing.assert_close(Bench(ours(case, torch.float64), text()).logits(chunk), wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_near(case: str) -> None:
    exact = Bench(ours(case, torch.float64), text()).logits()
    rounded = Bench(ours(case, torch.bfloat16), text()).logits()
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_passes_of_any_size_give_the_same_bits(case: str, dtype: torch.dtype) -> None:
    whole = Bench(ours(case, dtype), text()).logits()
    for chunk in (1, 2, 5, 16):
        assert torch.equal(Bench(ours(case, dtype), text()).logits(chunk), whole)


@pytest.mark.parametrize("case", CASES)
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
