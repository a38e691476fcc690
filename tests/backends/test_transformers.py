"""Models that transformers runs: their text does not depend on drafts, drafter, K or batch."""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, ConfigError, ModelError, SamplingParams
from outrider.backends.transformers.model import PROMPT, HFModel, load_foreign
from outrider.backends.transformers.prefix_cache import PrefixCache
from outrider.config import Config
from outrider.control.adaptive import Fixed
from outrider.drafters import Drafter, DraftRequest, Traits, Workspace, lookup
from outrider.llm import build_engine
from outrider.models.checkpoint import open_checkpoint
from outrider.models.foreign import ForeignWeights, foreign_config
from outrider.types import Draft, Sequence, Tree, Turn, chain

from support import foreign

PROMPTS = [[5, 6, 7, 8, 9, 10, 5, 6, 7, 8, 9, 40 + i, 7, 8, 9, 10, 40 + i] for i in range(3)]
EVERY = (*foreign.CAUSAL, *foreign.TWO_SIDED)
QUICK = ("gpt2", "mixtral", "t5")  # in bfloat16 too; the others in bfloat16 are in `make test-all`
CASES = [(kind, torch.float32) for kind in EVERY] + [
    pytest.param(kind, torch.bfloat16, marks=() if kind in QUICK else pytest.mark.slow) for kind in EVERY
]


def loaded(module: Any) -> HFModel:
    return load_foreign(ForeignWeights(Path(), "", module), foreign_config(module.config), "auto", torch.device("cpu"))


def hosted(kind: str, dtype: torch.dtype = torch.float32, blur: float = 0.0) -> HFModel:
    return loaded(foreign.module(kind, blur=blur, dtype=dtype))


def decode(model: HFModel, drafter: Any, temperature: float, k: int = 5, tokens: int = 16, **settings: Any) -> Any:
    """The generated tokens of all prompts, and their sequences."""
    options = settings.pop("options", {})
    engine = build_engine(model, Config(drafter=drafter, k=k, options=options, **settings))
    seqs = []
    for i, prompt in enumerate(PROMPTS):
        start = model.opening(prompt)
        params = SamplingParams(temperature=temperature, max_tokens=tokens)
        seqs.append(Sequence(i, start.tokens, params, 100 + i, frozenset({1}), source=start.source))
        engine.add(seqs[-1])
    while engine.busy:
        step = engine.step()
        assert not step.failure, step.failure
        engine.cache.check()
    return [seq.generated for seq in seqs], seqs


class Adversary(Drafter):
    """Random chains and trees."""

    name = "adversary"

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.dice = random.Random(3)

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budget = request.seqs, request.budgets
        return Draft.pack(self._tree(room, seq) for seq, room in zip(seqs, budget, strict=True))

    def _tree(self, room: int, seq: Sequence) -> Tree:
        room = self.dice.randint(0, room)
        if self.dice.random() < 0.5:
            return chain(self.dice.choices(range(300), k=room))
        tokens = self.dice.choices([1, 7, 8, 9, seq.tokens[-1]], k=room)  # siblings may be equal
        return Tree(tokens, [self.dice.randint(-1, i - 1) for i in range(room)])


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_text_does_not_depend_on_drafts(kind: str, dtype: torch.dtype) -> None:
    """Every drafter that runs everywhere, and a random one, at a temperature at which texts vary."""
    model, small = hosted(kind, dtype), hosted(kind, dtype, blur=0.1).as_drafter()
    temperature = 4.0 if kind in foreign.TWO_SIDED else 0.9
    tokens = 9 if kind == "mamba" else 12  # its reference kernels are slow
    expected, _ = decode(model, "off", temperature, 0, tokens)
    assert len({token for text in expected for token in text}) > 20, "a text that repeats itself proves little"
    contenders: list[tuple[Any, dict[str, Any]]] = [
        (Adversary, {}),
        ("suffix", {"tree": True}),
        ("model", {"draft_model": small}),
        ("layerskip", {"skip_layers": [1]}),
    ]
    for drafter, options in contenders:
        texts, seqs = decode(model, drafter, temperature, 6, tokens, options=options)
        assert texts == expected, f"{drafter} changed the text of {kind} in {dtype}"
        if drafter == "model":
            assert sum(seq.stats.accepted for seq in seqs) > 3, "nothing was accepted: nothing was tested"


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_greedy_text_is_that_of_every_k_batch_and_chunk(kind: str) -> None:
    model = hosted(kind)
    expected, _ = decode(model, "off", 0.0, 0, 24)
    small = {"draft_model": hosted(kind, blur=0.05).as_drafter()}
    for settings in ({"k": 1}, {"k": 13}, {"max_batch": 1}, {"max_rows": 5}, {"cache_tokens": 60, "max_length": 48}):
        texts, _ = decode(model, "model", 0.0, **{"k": 4, "tokens": 24, "options": small} | settings)
        assert texts == expected, settings


@pytest.mark.parametrize("kind", EVERY)
def test_text_is_that_of_transformers(kind: str) -> None:
    """Greedy, in double precision, so that near ties cannot differ."""
    model = hosted(kind, torch.float64)
    prompt, start = PROMPTS[0], model.opening(PROMPTS[0])
    seq = Sequence(1, start.tokens, SamplingParams(max_tokens=20), source=start.source, ends=frozenset({1}))
    engine = build_engine(model, Config(drafter="ngram", k=3))
    engine.add(seq)
    while engine.busy:
        engine.step()
    settings = {"max_new_tokens": 20, "do_sample": False, "num_beams": 1}
    reference = model.module.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
    assert seq.generated == reference[0, len(start.tokens) :].tolist()


def test_probing_of_caches_and_blocks() -> None:
    cached = {kind: hosted(kind).cached for kind in foreign.CAUSAL}
    assert cached == dict.fromkeys(foreign.CAUSAL, True) | {"mamba": False}
    assert hosted("gpt2").block == 8
    banned = foreign.module("marian")
    banned.generation_config.bad_words_ids = [[2]]
    model = loaded(banned)
    assert model.cached, "banned tokens must not look like a broken cache"
    assert model._call([2, 5], (), None)[0][:, 2].max() == -torch.inf


@pytest.mark.parametrize("kind", EVERY)
def test_layers_are_found_skipped_and_restored(kind: str) -> None:
    model = hosted(kind)
    assert model.layers is not None
    assert len(model.layers) == model.config.layers
    whole, less, again = (model._call([5, 6, 7], (9, 8), None, frozenset(skipped))[0] for skipped in ((), (1,), ()))
    assert (whole - less).abs().max() > 0.1
    assert torch.equal(whole, again)


def test_a_model_whose_rows_depend_on_later_rows_runs_one_token_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    module = foreign.module("gpt2")
    causal = module.forward

    def acausal(*args: Any, **kwargs: Any) -> Any:
        out = causal(*args, **kwargs)
        out.logits = out.logits + 1e-3 * out.logits.mean(dim=1, keepdim=True)
        return out

    monkeypatch.setattr(module, "forward", acausal)
    model = loaded(module)
    assert model.block == 1
    assert "drafts save nothing" in model.description
    assert decode(model, "ngram", 0.0, 4, 16)[0] == decode(model, "off", 0.0, 0, 16)[0]


def test_experts_share_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default form sorts rows by expert, so that shapes, and bits, depend on all rows."""
    monkeypatch.setattr(HFModel, "_separate_experts", lambda self: None)
    model = hosted("mixtral")
    first = list(range(8))
    differ = 0
    for seed in range(40):
        dice = random.Random(seed)
        other = first[:4] + dice.choices(range(300), k=4)
        differ += not torch.equal(model._call(first, (), None)[0][:4], model._call(other, (), None)[0][:4])
    assert differ or model.block == 1, "the default form is row-invariant now: batched_mm is not needed any more"


def test_long_prompts_run_in_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hosted("gpt2")
    shapes: list[int] = []
    call = model._call
    monkeypatch.setattr(model, "_call", lambda tokens, *rest: (shapes.append(len(tokens)), call(tokens, *rest))[1])
    prompt = [3 + i % 200 for i in range(PROMPT + 20)]
    texts = []
    for drafter, k in (("off", 0), ("ngram", 5)):
        engine = build_engine(model, Config(drafter=drafter, k=k, max_rows=50))
        seq = Sequence(1, prompt, SamplingParams(max_tokens=30, temperature=0.9), 5)
        engine.add(seq)
        while engine.busy:
            engine.step()
        texts.append(seq.generated)
        model.prefixes = PrefixCache()  # nothing of the first run
    assert texts[0] == texts[1]
    assert set(shapes) == {PROMPT, model.block}
    assert shapes.count(PROMPT) == 2


def test_states_are_found_by_their_tokens_and_bounded() -> None:
    states = PrefixCache()
    grid: Callable[[int], int] = lambda at: at + 4  # noqa: E731
    for n in range(1, 30):
        states.put((), [n] * 8, f"{n}", 40, grid)
        states.put((7,), [n] * 4, f"other {n}", 40, grid)
    assert states.tokens <= 40
    assert states.longest((), [29] * 12, 12, grid) == (8, "29")
    assert states.longest((), [29] * 12, 7, grid) == (0, None)
    assert states.longest((7,), [29] * 12, 12, grid) == (4, "other 29")
    assert states.longest((), [1] * 12, 12, grid) == (0, None)
    assert len(states._roots[()].children) < 10, "dropped states leave no nodes"


def test_budgets_end_with_the_block() -> None:
    params = SamplingParams(max_tokens=99)
    turns = [Turn(Sequence(length, [1] * length, params), 1, True) for length in (1, 7, 8, 9)]
    assert [turn.budget for turn in Fixed(5, block=8).budget(turns, Traits())] == [5, 1, 0, 5]


def test_taps_are_the_outputs_of_layers() -> None:
    pytest.importorskip("outrider.drafters.head")
    model = hosted("gpt2")
    texts, _ = decode(model, "head", 0.9, 4, options=lookup("head").traits.trial(model))
    assert texts == decode(model, "off", 0.9, 0)[0]


# ------------------------------------------------------------ through the front door


def test_a_folder_works_and_the_backend_is_named(tmp_path: Path) -> None:
    folder, small = foreign.save(tmp_path / "big", "gpt2"), foreign.save(tmp_path / "small", "gpt2", blur=0.1)
    llm = LLM(folder, drafter="model", draft_model=small, k=4)
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=24)
    fast, plain = (llm.generate("the quick brown", params, speculate=s)[0] for s in (True, False))
    assert fast.token_ids == plain.token_ids
    assert fast.stats.accepted > 0
    assert llm.backend.startswith("transformers runs big: the built-in decoder does not know 'gpt2'.")
    assert llm.engine.drafter.model.loose, "a drafter need not run in blocks"
    with pytest.raises(ConfigError, match="transformers runs this target as a whole"):
        llm.using(drafter="exit", exit_layer=1)
    with pytest.raises(ConfigError, match="choose dtype float32 or bfloat16"):
        LLM(folder, dtype="int8")


def test_an_encoder_decoder_answers_its_source(tmp_path: Path) -> None:
    llm = LLM(foreign.save(tmp_path / "pair", "bart"), drafter="suffix", k=5)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20)
    fast, plain = (llm.generate("one two three four", params, speculate=s)[0] for s in (True, False))
    other = llm.generate("def add(a, b):", params)[0]
    assert fast.token_ids == plain.token_ids != other.token_ids
    assert len(fast.token_ids) <= 20
    with pytest.raises(ConfigError, match="this model's encoder reads at most 256"):
        llm.generate(" fox" * 300, params)


def test_lookup_searches_the_source() -> None:
    from outrider.drafters.ngram import NGram
    from outrider.drafters.suffix import Suffix

    space: Any = Workspace(None, None, None)  # type: ignore[arg-type]
    seq = Sequence(1, [0, 50, 51], source=[9, 8, 50, 51, 52, 53])
    for kind in (NGram, Suffix):
        assert kind(space).draft(DraftRequest([seq], [4])).trees[0].tokens == [52, 53]
        assert kind(space).draft(DraftRequest([Sequence(1, [0, 50, 51])], [4])).trees[0].tokens == []


def test_error_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = foreign.save(tmp_path / "gpt2", "gpt2")
    real = builtins.__import__

    def missing(name: str, *rest: Any, **named: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModelError, match=r"pip install -e '\.\[hf\]' in a clone"):
        open_checkpoint(folder)


def test_error_of_a_broken_folder(tmp_path: Path) -> None:
    folder = foreign.save(tmp_path / "gpt2", "gpt2")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="transformers cannot load"):
        LLM(folder)
    (folder / "config.json").write_text('{"model_type": "no_such_thing"}')
    with pytest.raises(ModelError, match=r"cannot read its config\.json either"):
        LLM(folder)
