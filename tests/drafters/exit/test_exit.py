"""Early exit: each layer runs once for each token, nothing of it shows in the text, and an adapter can be trained."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from outrider import LLM, ConfigError, Draft, Drafter, SamplingParams, chain, drafters
from outrider.backends import WHOLE, Part
from outrider.backends.cpu import quantise as quant
from outrider.backends.cpu.eager import Eager
from outrider.backends.cpu.int8 import Int8Transformer
from outrider.backends.toy import VOCABULARY, RandomWeights
from outrider.config import Config, config_from, from_hugging_face
from outrider.drafters import DraftRequest, Workspace, make
from outrider.drafters.exit.drafter import Exit
from outrider.engine.step import Engine
from outrider.llm import build_engine
from outrider.models.speculators import random_head, read_head, shapes, write_head
from outrider.testing import SCENARIOS, check_drafter, decode
from outrider.train.decoder import TargetNet
from outrider.train.networks import ExitNet
from outrider.types import Output, Sequence

from support.toys import reference, toy
from support.training import home, invoke, speaks  # noqa: F401  (`home` is a fixture)

TARGET = toy(layers=4)
LONG = SamplingParams(max_tokens=40)


def engine(drafter: str | type[Drafter] = "exit", k: int = 4, target: Any = TARGET, **options: Any) -> Engine:
    return build_engine(target, Config(drafter=drafter, k=k, options=options))


def say(one: Engine, prompt: list[int], params: SamplingParams = LONG) -> list[int]:
    seq = Sequence(1, prompt, params, seed=7, ends=frozenset({0}))
    one.add(seq)
    while one.busy:
        one.step()
    return seq.generated


class Counting:
    """A target that counts how often each layer runs for each (position, token)."""

    def __init__(self, model: Any) -> None:
        self.model, self.runs = model, Counter[tuple[int, int, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(
        self, rows: Any, plane: Any, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        for position, token in zip(rows.positions.tolist(), rows.tokens.tolist(), strict=True):
            for layer in range(part.start, self.config.layers if part.stop is None else part.stop):
                self.runs[layer, position, token] += 1
        return self.model.forward(rows, plane, part, x, taps)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- every layer once


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_each_layer_runs_once_for_each_row_of_a_step(exit_layer: int) -> None:
    counting = Counting(TARGET)
    one = engine(target=counting, exit_layer=exit_layer)
    seq = Sequence(1, [1, 2, 3, 4, 5], LONG, seed=7)
    one.add(seq)
    one.step()  # the prompt
    while one.busy:
        counting.runs.clear()
        step = one.step()
        expected = Counter(
            (layer, position, token)
            for layer in range(TARGET.config.layers)
            for position, token in zip(step.batch.positions, step.batch.tokens, strict=True)
        )
        assert counting.runs == expected
    assert isinstance(one.target, Eager)
    assert one.target.first_layers is not None
    assert one.target.first_layers.saved > 20


def test_a_runner_that_insists_on_whole_passes_computes_them_again() -> None:
    counting = Counting(TARGET)
    one = engine(target=counting, exit_layer=2, exit_reuse=False)
    assert say(one, [1, 2, 3]) == say(engine("off", 0), [1, 2, 3])
    assert max(counting.runs.values()) > 1
    assert one.target.first_layers.saved == 0  # type: ignore[attr-defined]


def in_dtype(dtype: torch.dtype) -> Any:
    if dtype is not torch.int8:
        return toy(layers=4, dtype=dtype)
    tensors = quant.calibrated(TARGET.config, RandomWeights(TARGET.config, 1), list(range(32)))
    return Int8Transformer(TARGET.config, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_text_and_cache_are_those_of_plain_decoding_to_the_last_bit(dtype: torch.dtype) -> None:
    target = in_dtype(dtype)
    if not target.exact:
        pytest.skip("this machine has no row-invariant products in this dtype")
    plain, guided = engine("off", 0, target), engine(target=target, exit_layer=2)
    prompt = [1, 2, 3, 4, 5, 6]
    assert say(plain, prompt) == say(guided, prompt)
    held = []
    for one in (plain, guided):
        (name, row), plane = next(iter(one.cache.retired.items())), one.target.plane
        slots = row.slots[: plane.holds(name)]
        held.append([plane.k[i][slots] for i in range(4)] + [plane.v[i][slots] for i in range(4)])
    for a, b in zip(*held, strict=True):
        n = min(len(a), len(b))
        assert n > 30
        assert torch.equal(a[:n], b[:n])


# ---------------------------------------------------------------- the text


@pytest.mark.parametrize("options", [{"exit_layer": 2}, {"exit_layer": 1, "exit_reuse": False}])
def test_the_text_stays(options: dict[str, Any]) -> None:
    """An exit after the first layer is in test_lossless."""
    assert check_drafter("exit", options, toy(), tokens=20)


class Both(Drafter):
    """Drafts by an exit, and lets a drafter with scratch K/V write over the same places."""

    name = "both"
    first = True  # the exit first: then what it began is worth nothing

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.exit, self.skipper = make("exit", space), make("layerskip", space)

    def draft(self, request: DraftRequest) -> Draft:
        order = (self.exit, self.skipper) if self.first else (self.skipper, self.exit)
        drafts = {drafter: drafter.draft(request) for drafter in order}
        return drafts[self.exit]


class Reversed(Both):
    name, first = "reversed", False


@pytest.mark.parametrize("drafter", [Both, Reversed])
def test_others_may_write_scratch_into_the_same_places(drafter: type[Both]) -> None:
    options, params = {"exit_layer": 2, "skip_mlp": [0]}, SamplingParams(max_tokens=40)
    for scenario in SCENARIOS:
        one = build_engine(TARGET, Config(drafter=drafter, k=5, options=options, **scenario.config))
        assert decode(one, scenario, params) == reference(TARGET, scenario, params)
        assert isinstance(one.target, Eager)
        assert one.target.first_layers is not None
        assert bool(one.target.first_layers.saved) is not drafter.first


class Fickle(Drafter):
    """Proposes what the target will say; begins chains of it with mistakes, twice, and lets others write there."""

    name = "fickle"
    texts: ClassVar[list[list[int]]] = []  # the target's, by request

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.dice = random.Random(3)

    def truth(self, seq: Sequence, k: int) -> list[int]:
        at = len(seq.tokens) - seq.prompt_len
        return self.texts[seq.id][at : at + k]

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budget = request.seqs, request.budgets
        ready = [seq for seq in seqs if self.space.plane.holds(seq.id) == len(seq.tokens) - 1]
        for _ in range(self.dice.randrange(3)):
            self.begin_some([seq for seq in ready if self.dice.random() < 0.8], min(budget))
        return Draft.pack(chain(self.truth(seq, k)) for seq, k in zip(seqs, budget, strict=True))

    def begin_some(self, seqs: list[Sequence], k: int) -> None:
        begun, plane, dice = self.space.first_layers, self.space.plane, self.dice
        assert begun is not None
        if not seqs:
            return
        begun.roots(seqs, dice.choice((1, 2)))
        for depth in range(dice.randrange(k + 1)):
            wrong, truths = dice.random() < 0.3, [self.truth(seq, k) for seq in seqs]
            right = [said[depth] if depth < len(said) else 0 for said in truths]
            begun.nodes(seqs, [dice.randrange(VOCABULARY) if wrong else token for token in right])
            if dice.random() < 0.1:  # scratch, as a drafter with some of the layers leaves it
                plane.k[0][self.space.cache.rows[seqs[0].id].spare[0]] = 9.0
                plane.count_pass()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_nothing_that_was_begun_in_vain_shows(scenario: Any) -> None:
    target, params = toy(layers=3), SamplingParams(temperature=0.8, max_tokens=40)
    Fickle.texts = reference(target, scenario, params)
    one = build_engine(target, Config(drafter=Fickle, k=5, **scenario.config))
    assert decode(one, scenario, params) == Fickle.texts
    assert not one.failures
    assert isinstance(one.target, Eager)
    assert one.target.first_layers is not None
    assert one.target.first_layers.saved > 0


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_chains_under_the_rules_that_draw(rule: str) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=20)
    texts = [decode(engine(exit_layer=3, exit_reuse=reuse), SCENARIOS[1], params, rule) for reuse in (True, False)]
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- the adapter


def adapter(folder: Path, vocabulary: int = 0, layers: int = 1) -> Path:
    config, tensors = random_head(TARGET.config, "exit", layers=layers, vocabulary=vocabulary)
    write_head(folder, config, tensors)
    return folder


@pytest.mark.parametrize(("vocabulary", "layers"), [(30, 1), pytest.param(VOCABULARY, 2, marks=pytest.mark.slow)])
def test_an_adapter_is_read_back_and_changes_no_text(tmp_path: Path, vocabulary: int, layers: int) -> None:
    folder = adapter(tmp_path / "adapter", vocabulary, layers)
    config, tensors = read_head(folder)
    assert (config.kind, config.taps, config.layers) == ("exit", (1,), layers)
    assert set(tensors) == set(shapes(config))
    assert ("lm_head.weight" in tensors) == (vocabulary < VOCABULARY)
    assert check_drafter("exit", {"adapter": str(folder)}, target=toy(layers=4), tokens=16)


def net_of_target() -> TargetNet:
    return TargetNet.load(TARGET.config, RandomWeights(TARGET.config, 1), torch.float64)


def test_the_net_says_what_drafts_with_it() -> None:
    for vocabulary in (30, VOCABULARY):
        config, tensors = random_head(TARGET.config, "exit", vocabulary=vocabulary)
        ids = torch.arange(config.draft_vocab_size) * VOCABULARY // config.draft_vocab_size
        net = ExitNet(config, ids, net_of_target()).double()
        x = torch.randn(5, config.hidden_size, dtype=torch.float64)
        net.load_state_dict({name: t.double() if t.is_floating_point() else t for name, t in tensors.items()})
        exit = Exit(2, toy(layers=4, dtype=torch.float64), (config, tensors), torch.float64)
        assert torch.allclose(net.logits(x), exit.scores(x), atol=1e-9)
        assert torch.equal(net.ids, exit.ids)
        assert torch.equal(exit.spread(exit.scores(x))[:, net.ids], exit.scores(x))


def test_a_net_begins_as_the_targets_own_head() -> None:
    config, _ = random_head(TARGET.config, "exit", vocabulary=VOCABULARY)
    net = ExitNet(config, torch.arange(VOCABULARY), net_of_target()).double()
    x = torch.randn(5, config.hidden_size, dtype=torch.float64)
    same = Exit(2, toy(layers=4, dtype=torch.float64), None, torch.float64)
    assert torch.allclose(net.logits(x), same.scores(x), atol=1e-9)


@pytest.mark.parametrize("vocabulary", [0, 200])
def test_one_command_makes_an_exit(home: Path, tmp_path: Path, vocabulary: int) -> None:  # noqa: F811
    out = tmp_path / "exit"
    more = ("--kind", "exit", "--exit-layer", 1, "--steps", 120, "--draft-vocab", vocabulary, "--json")
    done = invoke(home, out, *more)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["kinds"]["all"]["tau"] > found["before"]["tau"] + 0.5
    assert "--drafter exit --set adapter=" in (out / "README.md").read_text()
    tau, texts = speaks(home, drafter="exit", adapter=str(out), k=4)
    assert texts == speaks(home, drafter="off")[1]
    walked, held, after = found["kinds"]["all"]["tokens"], found["held_answers"], found["kinds"]["all"]["tau"]
    assert tau == pytest.approx((walked + held) / (walked / after + held))  # what was estimated, and the first passes
    assert speaks(home, drafter="auto", adapter=str(out))[1] == texts
    if "head" in drafters.names():
        with pytest.raises(ConfigError, match="--drafter exit"):
            LLM(home / "tiny", dtype="float32", drafter="head", head=str(out))
    with pytest.raises(ConfigError, match="exits after 1 layers, not after 3"):
        LLM(home / "tiny", dtype="float32", drafter="exit", adapter=str(out), exit_layer=3)


# ---------------------------------------------------------------- names and mistakes


def test_hugging_faces_name_is_understood() -> None:
    given = from_hugging_face({"assistant_early_exit": 4})
    assert given == {"drafter": "exit", "exit_layer": 4}
    assert config_from(given).drafter_name == "exit"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs a trained adapter"),
        ({"exit_layer": 4}, "from 1 to 3"),
        ({"exit_layer": 0}, "from 1 to 3"),
        ({"exit_layer": "two"}, "from 1 to 3"),
        ({"adapter": 7}, "must be the folder"),
        ({"adapter": "/nowhere"}, "There is no folder"),
        ({"exit_layer": 1, "draft_dtype": "int3"}, "no draft_dtype 'int3'"),
    ],
)
def test_mistakes_are_sentences(options: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        engine(**options)


def test_a_head_is_not_an_adapter(tmp_path: Path) -> None:
    write_head(tmp_path, *random_head(TARGET.config))
    with pytest.raises(ConfigError, match="--drafter head"):
        engine(adapter=str(tmp_path))


# ---------------------------------------------------------------- memory


def test_what_each_drafter_adds_is_counted(tmp_path: Path, home: Path) -> None:  # noqa: F811
    from outrider.measure.doctor import memory_use

    llm = LLM(home / "tiny", dtype="float32", device="cpu", cache_tokens=512)
    config, tensors = random_head(llm.target.config, "exit", vocabulary=100)
    write_head(tmp_path, config, tensors)
    given = llm.using(drafter="auto", adapter=str(tmp_path), draft_dtype="float32", draft_model=llm.target)
    mine, *listed = memory_use(llm)
    found = {each.name: each for each in listed}
    assert {name: each.weights + each.kv for name, each in found.items()} == dict.fromkeys(found, 0)
    assert {"layerskip", "suffix", "auto", "off"} <= found.keys()
    assert not {"model", "head", "exit"} & found.keys()  # they were given nothing
    more = {each.name: each for each in memory_use(given)}
    stored = sum(t.numel() * 4 for name, t in tensors.items() if name not in ("d2t", "t2d"))
    assert more["exit"].kv == 0
    assert stored <= more["exit"].weights <= stored + 4096  # products have whole blocks of outputs, aligned
    assert (more["model"].weights, more["model"].kv) == (0, mine.kv)  # it is the target itself, with a plane of its own
    assert (more["auto"].weights, more["auto"].kv) == (more["exit"].weights, mine.kv)
    assert mine.kv == llm.engine.target.plane.bytes
    assert mine.weights > 4 * llm.target.config.vocab_size * llm.target.config.hidden_size
