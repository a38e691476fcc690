"""Trained heads: the drafter changes no text, its plane holds what one pass over the whole text would have given, and
its folders are read back or refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import drafters
from outrider.backends.rows import rows_of
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.config import Config, config_from, from_speculative_config
from outrider.drafters import DraftRequest, Workspace, lookup, make
from outrider.drafters.head import drafter as heads
from outrider.drafters.head.drafter import TrainedHead
from outrider.drafters.head.features import HeadBatch
from outrider.drafters.head.network import Head, HeadConfig, read_head, target_hash, write_head
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.errors import ConfigError, ModelError
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.testing import SCENARIOS, Scenario, check_drafter, decode
from outrider.types import Draft, SamplingParams, Sequence, Tree, chain

from support.toys import reference, toy

TARGET = toy()
EXACT = toy(dtype=torch.float32)  # products whose rows do not depend on their neighbours
KINDS = [("eagle3", 1), ("block", 1), ("block", 3)]
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 9, 3, 4, 5, 6, 9]


def head_for(target: Transformer, kind: str = "eagle3", layers: int = 1, **more: Any) -> Head:
    return Head(*random_head(target.config, kind, layers=layers, **more), target.embedding, target.compute)


def drafter_of(head: Head, target: Transformer = TARGET, **options: Any) -> tuple[Any, Any]:
    engine = build_engine(target, Config(drafter="head", k=5, options={"head": head} | options))
    return engine, engine.drafter


# ------------------------------------------------------------ the text


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        (("eagle3", 1), True),  # its chains are in test_lossless
        (("block", 3), False),
        pytest.param(("block", 1), False, marks=pytest.mark.slow),
        pytest.param(("block", 1), True, marks=pytest.mark.slow),
        pytest.param(("block", 3), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_head_changes_the_text(kind: tuple[str, int], tree: bool) -> None:
    assert check_drafter("head", {"head": head_for(TARGET, *kind), "tree": tree}, TARGET, tokens=20)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
@pytest.mark.parametrize("rule", ["reject", "block"])
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_rules_that_read_q_get_it(kind: str, rule: str, scenario: Scenario) -> None:
    options = {"head": head_for(TARGET, kind), "tree": True}  # only `match` takes trees
    engine = build_engine(TARGET, Config(drafter="head", k=4, rule=rule, options=options, **scenario.config))
    heard: list[str] = []
    engine.listeners = (Listener(heard),)
    decode(engine, scenario, SamplingParams(temperature=0.9, max_tokens=20), rule)
    assert not engine.failures
    assert not any(heard)
    assert decode_greedy(engine.drafter.rollout.head, rule) == reference(
        TARGET, SCENARIOS[0], SamplingParams(max_tokens=20)
    )


class Listener:
    def __init__(self, failures: list[str]) -> None:
        self.failures = failures

    def observe(self, step: Any) -> None:
        self.failures.append(step.failure)
        for turn, tree in zip(step.turns, step.draft.trees, strict=True):
            assert turn.seq.rule == "match" or not tree.tokens or (tree.is_chain and tree.q is not None)


def decode_greedy(head: Head, rule: str) -> list[list[int]]:
    engine = build_engine(TARGET, Config(drafter="head", k=4, rule=rule, options={"head": head}))
    return decode(engine, SCENARIOS[0], SamplingParams(max_tokens=20), rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_other_dtypes_run_without_a_failure(kind: tuple[str, int], dtype: torch.dtype) -> None:
    target = toy(dtype=dtype)
    engine, _ = drafter_of(head_for(target, *kind), target)
    params = SamplingParams(max_tokens=30)
    assert decode(engine, SCENARIOS[1], params) == reference(target, SCENARIOS[1], params)
    assert not engine.failures


@pytest.mark.parametrize("name", ["auto", "cascade"])
def test_others_can_lean_on_a_head(name: str) -> None:
    options: dict[str, Any] = {"head": head_for(TARGET)}
    options |= {"cascade": "ngram,head"} if name == "cascade" else {}
    assert config_from({"drafter": name} | options).options == options
    engine = build_engine(TARGET, Config(drafter=name, k=4, options=options))
    assert [drafter.name for drafter in engine.drafter.drafters][-1] == "head"
    assert engine.drafter.traits.taps == (0, 1, 2)
    sources: set[str] = set()
    engine.listeners = (
        type("Ear", (), {"observe": lambda self, step: sources.update(t.source for t in step.draft.trees)})(),
    )
    params = SamplingParams(max_tokens=30)
    assert decode(engine, SCENARIOS[1], params) == reference(TARGET, SCENARIOS[1], params)
    assert "head" in sources


# ------------------------------------------------------------ what the plane holds


class Oracle(TrainedHead):
    """Lets the head do its work, and then says what the text will be, with a mistake now and then."""

    def draft(self, request: DraftRequest) -> Draft:
        seqs = request.seqs
        drawn = super().draft(request)
        text, trees = self.space.options["text"], []
        for seq, tree in zip(seqs, drawn.trees, strict=True):
            n, k = len(seq.tokens), len(tree.tokens)
            right = text[n : n + k]
            wrong = [(right[0] + 1) % 48] if right else []
            if n % 3 == 0:  # a fork: the accepted rows are not side by side
                trees.append(Tree([*wrong, *right][:k], [-1, *range(-1, k - 1)][:k] if not wrong else fork(k)))
            else:
                trees.append(chain(right if n % 3 == 1 else [*right[:2], *wrong, *right[3:]][:k]))
        return Draft.pack(trees)


def fork(k: int) -> list[int]:
    """A wrong node 0 beside the right ones 1, 2, …, which hang from the root."""
    return [-1, -1, *range(1, k - 1)][:k]


def whole(head: Head, tokens: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """A fresh head fed with all true rows of a text in one pass: logits [n-1, V], and K and V of each layer."""
    cache, n = Cache(64 + len(tokens), 2, 512), len(tokens)
    seq = Sequence(1, tokens)
    plane, target_plane = cache.add_plane(*head.plane_shape), cache.add_plane(*EXACT.plane_shape)
    cache.open(seq)
    cache.reserve(seq, n, 0)
    packed = BatchBuilder(cache)
    packed.pending(seq, 0, n, want=True)
    taps = head.config.taps
    hidden = EXACT.forward(rows_of(packed), target_plane, taps=taps).hidden
    rows = HeadBatch(cache)
    rows.committed(seq, 0, n - 1, want=False)
    rows.want = list(range(n - 1))
    logits, _ = head.forward(rows_of(rows), plane, head.fuse([hidden[tap][:-1] for tap in taps]))
    slots = cache.rows[seq.id].slots[: n - 1]
    return logits, [(k[slots], v[slots]) for k, v in zip(plane.k, plane.v, strict=True)]


@pytest.mark.skipif(not EXACT.exact, reason="without oneDNN no product is exact by row")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("config", [{}, {"max_rows": 7}], ids=["whole", "chunked"])
def test_step_by_step_is_the_same_as_all_at_once(kind: tuple[str, int], config: dict[str, Any]) -> None:
    """Bit for bit, whatever was drafted, masked, accepted and refused in between."""
    head = head_for(EXACT, *kind)
    plain = Sequence(1, PROMPT, SamplingParams(max_tokens=60))
    off = build_engine(EXACT, Config(drafter="off"))
    off.add(plain)
    while off.busy:
        off.step()
    engine = build_engine(EXACT, Config(drafter=Oracle, k=5, options={"head": head, "text": plain.tokens}, **config))
    seq, compared = Sequence(1, PROMPT, SamplingParams(max_tokens=60)), 0
    engine.add(seq)
    rollout = engine.drafter.rollout
    first: list[tuple[int, Tensor]] = []
    inner = rollout._forward_committed

    def listening(seqs: list[Sequence], masks: list[int]) -> tuple[Tensor, Tensor]:
        scores, outputs = inner(seqs, masks)
        first.append((len(seqs[0].tokens), scores[0].clone()))
        return scores, outputs

    rollout._forward_committed = listening
    while engine.busy:
        engine.step()
        held = rollout.plane.holds(seq.id)
        if held and not seq.done:
            slots = engine.cache.rows[seq.id].slots[:held]
            _, kv = whole(head, seq.tokens[: held + 1])
            for i, (k, v) in enumerate(kv):
                assert torch.equal(rollout.plane.k[i][slots], k)
                assert torch.equal(rollout.plane.v[i][slots], v)
                compared += 1
    logits, _ = whole(head, seq.tokens)
    for n, scores in first:
        assert torch.equal(head.spread(scores), logits[n - 2])
    assert compared > 8
    assert len(first) > 8
    assert not engine.failures
    assert seq.tokens == plain.tokens
    assert seq.stats.accepted > 10
    assert seq.stats.steps > 10


@pytest.mark.skipif(not EXACT.exact, reason="without oneDNN no product is exact by row")
def test_masks_leave_no_trace() -> None:
    """A block of masks, then true rows where they stood: the same bits as if there had been none."""
    head = head_for(EXACT, "block", 2)
    cache, seq = Cache(64, 2, 64), Sequence(1, PROMPT)
    plane = cache.add_plane(*head.plane_shape)
    cache.open(seq)
    cache.reserve(seq, len(PROMPT), 5)
    features = torch.randn(len(PROMPT) - 1, 32, dtype=torch.float32)
    packed = HeadBatch(cache)
    packed.committed(seq, 0, 9, want=True)
    bare, _ = head.forward(rows_of(packed), plane, features[:9])
    short = Sequence(1, PROMPT[:10])
    packed.masks(short, 4)
    masked = torch.tensor(packed.masked)
    padded = torch.cat([features[:9], torch.full((4, 32), torch.nan, dtype=torch.float32)])
    logits, _ = head.forward(rows_of(packed), plane, padded, masked)
    assert torch.equal(logits[0], bare[0])
    assert logits.shape == (5, 48)
    assert all(not torch.equal(a, b) for a, b in zip(logits[1:], logits[:-1], strict=True))
    rest = HeadBatch(cache)
    rest.committed(seq, 9, len(PROMPT) - 1, want=True)
    later, _ = head.forward(rows_of(rest), plane, features[9:])
    once = HeadBatch(cache)
    once.committed(seq, 0, len(PROMPT) - 1, want=True)
    assert torch.equal(later, head.forward(rows_of(once), plane, features)[0])


def test_what_was_not_observed_costs_no_text() -> None:
    class Forgetful(TrainedHead):
        def observe(self, step: Any) -> None:
            if step.index % 3:
                super().observe(step)

    engine = build_engine(TARGET, Config(drafter=Forgetful, k=4, options={"head": head_for(TARGET)}))
    params = SamplingParams(max_tokens=30)
    assert decode(engine, SCENARIOS[1], params) == reference(TARGET, SCENARIOS[1], params)
    assert not engine.failures


def test_a_second_request_finds_the_rows_of_the_first() -> None:
    engine, drafter = drafter_of(head_for(TARGET))
    for number in (1, 2):
        seq = Sequence(number, PROMPT, SamplingParams(max_tokens=12))
        engine.add(seq)
        engine.step()
        held = drafter.rollout.plane.holds(number)
        assert held == (0 if number == 1 else len(PROMPT) - 1)
        while engine.busy:
            engine.step()
    assert not drafter.features.pieces  # nothing is kept of what is over


# ------------------------------------------------------------ shapes of drafts


def grown(kind: str, budget: list[int], temperature: float = 0.0, **options: Any) -> list[Tree]:
    engine, drafter = drafter_of(head_for(TARGET, kind), **options)
    params = SamplingParams(max_tokens=30, temperature=temperature)
    seqs = [Sequence(i, [*PROMPT, 10 + i], params, seed=i) for i in range(len(budget))]
    for seq in seqs:
        seq.speculate = True
        engine.add(seq)
    drafter.draft, kept = (lambda request: Draft.empty(len(request.seqs))), drafter.draft
    engine.step()
    for seq in seqs:
        engine.cache.reserve(seq, len(seq.tokens), 16)
    return list(kept(DraftRequest(seqs, budget)).trees)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_budgets_are_each_sequences_own(kind: str, temperature: float) -> None:
    trees = grown(kind, [3, 0, 1, 5], temperature)
    assert [len(tree.tokens) for tree in trees] == [3, 0, 1, 5]
    ids = set(head_for(TARGET).ids.tolist())
    for tree in trees:
        assert tree.is_chain
        assert set(tree.tokens) <= ids
        assert len(ids) == 36
        assert tree.survival == (sorted(tree.survival, reverse=True) if tree.survival else None)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_blocks_tree_is_the_likeliest_paths(temperature: float) -> None:
    (tree,) = grown("block", [12], temperature, tree=True, tree_width=4, tree_depth=3)
    assert len(tree.tokens) == 12
    assert tree.survival is not None
    assert tree.survival == sorted(tree.survival, reverse=True)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert not tree.is_chain
    depth = {-1: 0}
    for node, parent in enumerate(tree.parents):
        depth[node] = depth[parent] + 1
    assert max(depth.values()) <= 3
    paths = set(zip(tree.parents, tree.tokens, strict=True))
    assert len(paths) == 12  # no child twice
    for level in (1, 2, 3):  # children of every parent come from the same ranking, best first
        by_parent = [
            [t for n, (t, p) in enumerate(zip(tree.tokens, tree.parents, strict=True)) if p == q and depth[n] == level]
            for q in depth
        ]
        longest = max(by_parent, key=len)
        assert all(some == longest[: len(some)] for some in by_parent)


def test_a_tree_begins_with_the_chain() -> None:
    (tree,), (line,) = grown("block", [9], tree=True), grown("block", [5])
    at, path = -1, []
    while at in tree.parents:
        at = tree.parents.index(at)
        path.append(tree.tokens[at])
    assert path
    assert path == line.tokens[: len(path)]


def test_a_block_is_never_longer_than_it_was_trained() -> None:
    (tree,) = grown("block", [12])
    assert len(tree.tokens) == 6


def test_draft_ids_lead_to_the_targets() -> None:
    head = head_for(TARGET, vocabulary=5)
    logits = head.spread(torch.arange(5.0))
    assert logits.shape == (48,)
    assert logits.isfinite().sum() == 5
    assert logits[head.ids].tolist() == [0, 1, 2, 3, 4]
    assert head.ids.tolist() == [0, 9, 19, 28, 38]


# ------------------------------------------------------------ folders


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_written_is_read(kind: tuple[str, int], tmp_path: Path) -> None:
    config, tensors = random_head(TARGET.config, kind[0], layers=kind[1], hash="0123456789abcdef")
    write_head(tmp_path / "head", config, tensors, card="# A head\n")
    again, same = read_head(tmp_path / "head")
    assert again == config
    assert same.keys() == tensors.keys()
    assert all(torch.equal(same[name], tensors[name]) for name in same)
    data = json.loads((tmp_path / "head" / "config.json").read_text())
    assert data["eagle_aux_hidden_state_layer_ids"] == [tap + 1 for tap in config.taps]
    assert data["speculators_model_type"] == ("eagle3" if kind[0] == "eagle3" else "peagle")
    assert (tmp_path / "head" / "README.md").read_text() == "# A head\n"
    assert not list((tmp_path / "head").glob("*.new"))
    loaded = make("head", space(head=str(tmp_path / "head")))
    assert loaded.traits.taps == config.taps


def space(target: Any = TARGET, **options: Any) -> Workspace:
    cache = Cache(600, 2, 64)
    return Workspace(target, cache, cache.add_plane(*target.plane_shape), options)


def spoilt(tmp_path: Path, what: str) -> Path:
    config, tensors = random_head(TARGET.config)
    write_head(tmp_path, config, tensors)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    if what == "format":
        data["outrider"]["format"] = 2
    elif what == "kind":
        data["outrider"]["kind"] = "medusa"
    elif what == "other":
        del data["outrider"]
    elif what == "sizes":
        data["transformer_layer_config"]["intermediate_size"] = 99
    elif what == "lost":
        del data["transformer_layer_config"]["hidden_size"]
    elif what == "more layers":
        data["outrider"]["kind"] = "block"
    path.write_text("{" if what == "json" else json.dumps(data))
    if what == "weights":
        (tmp_path / "model.safetensors").write_bytes(b"nothing")
    return tmp_path


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("format", "format 1"),
        ("kind", "medusa"),
        ("other", "not a trained head"),
        ("json", "not a trained head"),
        ("sizes", "gate_proj"),
        ("lost", "hidden_size"),
        ("more layers", "mask_embedding"),
        ("weights", "model.safetensors"),
    ],
)
def test_what_is_no_head_is_refused(what: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says):
        read_head(spoilt(tmp_path, what))


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="no folder"):
        read_head("/nowhere/at/all")


def test_damaged_vocabularies_are_refused(tmp_path: Path) -> None:
    config, tensors = random_head(TARGET.config)
    for d2t in (tensors["d2t"] + 40, torch.zeros_like(tensors["d2t"]).index_fill(0, torch.tensor([0]), 1)):
        with pytest.raises(ModelError, match="d2t"):
            write_head(tmp_path, config, tensors | {"d2t": d2t})


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    target = toy()
    weights = RandomWeights(target.config, 1)
    hash = target_hash(target.config, weights)
    target.identity = lambda: hash  # type: ignore[attr-defined]
    write_head(tmp_path / "mine", *random_head(target.config, hash=hash))
    write_head(tmp_path / "other", *random_head(target.config, hash="f" * 16))
    write_head(tmp_path / "nobodys", *random_head(target.config))
    write_head(tmp_path / "deep", *random_head(toy_config(layers=9)))
    write_head(tmp_path / "wide", *random_head(toy_config(vocabulary=64)))
    for name in ("mine", "nobodys"):
        assert make("head", space(target, head=tmp_path / name)).name == "head"
    for name, says in (("other", "hash is ffff"), ("deep", "layer 8"), ("wide", "vocabulary of 64")):
        with pytest.raises(ConfigError, match=f"another target.*{says}"):
            make("head", space(target, head=tmp_path / name))
    with pytest.raises(ConfigError, match="needs a trained head"):
        make("head", space())
    with pytest.raises(ConfigError, match="folder or a Head"):
        make("head", space(head=7))
    with pytest.raises(ConfigError, match="draft_dtype"):
        make("head", space(target, head=tmp_path / "mine", draft_dtype="int3"))


def test_a_targets_hash_is_its_own_and_stays() -> None:
    config = toy_config()
    hashes = {target_hash(config, RandomWeights(config, seed)) for seed in (1, 2, 1)}
    assert len(hashes) == 2
    assert all(len(h) == 16 for h in hashes)
    assert target_hash(toy_config(layers=4), RandomWeights(toy_config(layers=4), 1)) not in hashes

    class Rounded(RandomWeights):
        """As a file in eight bits: everything but the norms is a little off."""

        def get(self, name: str, dtype: torch.dtype) -> Tensor:
            tensor = super().get(name, dtype)
            return torch.linspace(0.5, 2, 32).to(dtype) if "norm" in name else (tensor * 50).round() / 50 * self.blur

    assert target_hash(config, Rounded(config, 1, blur=1.0)) == target_hash(config, Rounded(config, 1, blur=0.9))


def test_impossible_shapes_are_refused() -> None:
    config, _ = random_head(TARGET.config)
    fields = {name: getattr(config, name) for name in HeadConfig.__dataclass_fields__}
    for change in (
        {"layers": 17},
        {"windows": (4, 0)},
        {"taps": ()},
        {"taps": (1, 1)},
        {"draft_vocab_size": 99},
        {"kv_heads": 3},
        {"block": 0},
    ):
        with pytest.raises(ModelError):
            HeadConfig(**(fields | change))


def test_the_registry_knows_it() -> None:
    assert "head" in drafters.names()
    assert lookup("head") is TrainedHead


def test_vllms_words_lead_here() -> None:
    given = {"method": "eagle3", "model": "some/folder", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 1}
    assert from_speculative_config(given) == {"drafter": "head", "head": "some/folder", "k": 4}


def test_a_head_is_found_by_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its folder is called; the user's own first; what cannot be read is not there."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    target, other = SimpleNamespace(identity=lambda: "abc"), SimpleNamespace(identity=lambda: "def")
    assert heads.head_for(target) is None
    assert heads.head_for(SimpleNamespace(identity=lambda: None)) is None
    config, tensors = random_head(toy_config(), hash="abc")
    write_head(tmp_path / "heads" / "mine", config, tensors)
    (tmp_path / "heads" / "broken").mkdir()
    (tmp_path / "heads" / "broken" / "config.json").write_text("{")
    assert heads.head_for(target) == tmp_path / "heads" / "mine"
    assert heads.head_for(other) is None


def test_the_heads_that_come_along_are_whole() -> None:
    """Their weights fit their configurations, and a card tells how they were made."""
    folders = sorted(path for path in heads.SHIPPED.iterdir() if path.is_dir())
    assert folders
    for folder in folders:
        config, tensors = read_head(folder)
        assert config.target_hash
        assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in tensors.values())
        assert config.target_hash in (folder / "README.md").read_text(encoding="utf-8")
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    assert size < 31e6  # they travel with every installation
