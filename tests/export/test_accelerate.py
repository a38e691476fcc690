"""`outrider.accelerate`: a transformers model in memory, used through its own `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import outrider
from outrider import ConfigError
from outrider.backends.transformer import Transformer

from support import foreign

TEXTS = ["the quick brown fox", "one two"]


def inputs(texts: list[str]) -> Any:
    batch = foreign.tokenizer()(texts, return_tensors="pt", padding=True)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@pytest.fixture(scope="module")
def model() -> Any:
    return foreign.module("gpt2", dtype=torch.float64)


@pytest.fixture(scope="module")
def fast(model: Any) -> outrider.Accelerated:
    return outrider.accelerate(model, foreign.tokenizer(), drafter="suffix", k=4)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}, {"min_new_tokens": 12}, {"max_length": 20}])
def test_greedy_ids_are_the_models_own(model: Any, fast: outrider.Accelerated, settings: dict[str, Any]) -> None:
    """Padding on the left, prompts in front, ends and padding behind: the same tensor."""
    settings = settings if "max_length" in settings else settings | {"max_new_tokens": 16}
    batch = inputs(
        TEXTS if "max_length" not in settings else TEXTS[:1]
    )  # the model counts the padding, Outrider the tokens
    expected, ids = (one.generate(**batch, do_sample=False, **settings) for one in (model, fast))
    assert torch.equal(ids, expected)


def test_sampled_ids_depend_on_the_seed_and_on_no_drafter(model: Any, fast: outrider.Accelerated) -> None:
    settings = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 5}
    batch = inputs(TEXTS)
    plain = fast.generate(**batch, **settings, speculate=False)
    small = foreign.module("gpt2", blur=0.05, dtype=torch.float64)
    drafters: list[dict[str, Any]] = [
        {}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": small}, {"assistant_early_exit": 2},
    ]  # fmt: skip
    for drafter in drafters:
        assert torch.equal(fast.generate(**batch, **settings, **drafter), plain), drafter
    assert not torch.equal(fast.generate(**batch, **settings | {"seed": 6}), plain)
    fast.generate(**batch, **settings, assistant_model=small)
    assert sum(result.stats.accepted for result in fast.results) > 0
    assert len(fast._llm_by_drafter) == 3, "a drafter is made once"


def test_several_answers_and_a_streamer(model: Any, fast: outrider.Accelerated) -> None:
    one = inputs(TEXTS[:1])
    many = fast.generate(**one, max_new_tokens=6, do_sample=True, seed=1, num_return_sequences=3)
    assert many.shape[0] == 3
    streamed: list[int] = []

    class Streamer:
        def put(self, ids: torch.Tensor) -> None:
            streamed.extend(ids.flatten().tolist())

        def end(self) -> None:
            streamed.append(-1)

    ids = fast.generate(one["input_ids"], max_new_tokens=6, streamer=Streamer())
    assert streamed == [*ids[0].tolist(), -1]
    assert torch.equal(ids, model.generate(**one, max_new_tokens=6, do_sample=False))


def test_everything_else_is_the_model(model: Any, fast: outrider.Accelerated) -> None:
    one = inputs(TEXTS[:1])
    assert fast.config is model.config
    assert torch.equal(fast(**one).logits, model(**one).logits)
    assert fast.llm.target.module is model, "weights are shared"
    assert "the built-in decoder does not know 'gpt2'" in fast.backend_reason


def test_a_built_in_architecture_runs_in_the_built_in_decoder() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = transformers.LlamaConfig(vocab_size=300, max_position_embeddings=128, **sizes, **ends)
    model = transformers.LlamaForCausalLM(config).double().eval()
    batch, plain = inputs(TEXTS), {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**batch, **plain)
    for backend in ("auto", "transformers"):
        fast = outrider.accelerate(model, foreign.tokenizer(), backend=backend, drafter="ngram", k=3)
        assert torch.equal(fast.generate(**batch, **plain), expected)
        assert isinstance(fast.llm.target, Transformer) == (backend == "auto")
        assert ("packed weights of its own" in fast.backend_reason) == (backend == "auto")
    with pytest.raises(ConfigError, match="no backend"):
        outrider.accelerate(model, foreign.tokenizer(), backend="gpu")


@pytest.mark.parametrize("kind", foreign.TWO_SIDED)
def test_an_encoder_decoder_returns_its_decoders_ids(kind: str) -> None:
    model = foreign.module(kind, dtype=torch.float64)
    small = foreign.module(kind, blur=0.05, dtype=torch.float64)
    fast = outrider.accelerate(model, foreign.tokenizer(), drafter="suffix", k=4)
    one = inputs(TEXTS[:1])
    expected = model.generate(**one, max_new_tokens=12, do_sample=False, num_beams=1)
    for drafter in ({}, {"assistant_model": small}, {"assistant_early_exit": 1}):
        assert torch.equal(fast.generate(**one, max_new_tokens=12, **drafter), expected)
    model.generation_config.num_beams = 4
    with pytest.warns(UserWarning, match="asks for beams"):
        assert torch.equal(fast.generate(**one, max_new_tokens=12), expected)


def test_unsupported_settings_are_refused(fast: outrider.Accelerated) -> None:
    one = inputs(TEXTS[:1])
    with pytest.raises(ConfigError, match="Beam search is not supported"):
        fast.generate(**one, num_beams=3)
    with pytest.raises(ConfigError, match="does not support 'penalty_alpha'"):
        fast.generate(**one, penalty_alpha=0.6)
    with pytest.raises(ConfigError, match="shape"):
        fast.generate(torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="no room for an answer"):
        fast.generate(**one, max_length=2)
    with pytest.raises(ConfigError, match="takes one text"):
        fast.generate(**inputs(TEXTS), streamer=object())
