"""Training: the networks compute what drafting computes, a resumed run ends with the same weights, drafters improve."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import outrider.train.objectives as objectives_module
from outrider import LLM, OutriderError
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.cli import train as cli_train
from outrider.cli.app import app
from outrider.engine.cache import Cache
from outrider.errors import ModelError
from outrider.models.blocks import BlockTensor
from outrider.models.checkpoint import open_checkpoint
from outrider.models.config import RopeScaling, from_hf
from outrider.models.speculators import decoded, random_head, read_head, target_ids, write_head
from outrider.models.weights import cut_config, hf_config
from outrider.train.answers import Answer, AnswerStore, GenerationOptions, TrainingPrompt, answer_requests
from outrider.train.batches import Batches, choose_vocabulary, collate
from outrider.train.decoder import TargetNet, cut_target, default_taps
from outrider.train.encoding import EncodingOptions, encode_folder
from outrider.train.generation import AnswerGenerator, GenerationJob, Stopped, generate_in_pool, generate_missing
from outrider.train.loop import Acceptance, Schedule
from outrider.train.networks import HeadNet, load_start
from outrider.train.objectives import (
    BlockObjective,
    EagleObjective,
    ModelObjective,
    divergence,
    hard_labels,
    soft_labels,
)
from outrider.train.prompts import Invention, invent, read_file, read_prompts, user_turn_prefix
from outrider.train.report import thinned
from outrider.train.run import train
from outrider.types import Sequence

from support import tiny
from support.training import WORDS, head_net, invoke, packed, recipe, speaks, weights

# ---------------------------------------------------------------- the target as a module


@pytest.mark.parametrize("variant", ["plain", "everything"])
def test_the_module_computes_what_the_target_computes(variant: str) -> None:
    config = toy_config(4)
    if variant == "everything":
        some = {"sliding_window": 5, "window_layers": frozenset({1}), "no_rope_layers": frozenset({2}), "rotary_dim": 4}
        config = replace(config, rope_scaling=RopeScaling("linear", 2.0), tied=True, **some)
    source = RandomWeights(config, 1)
    target, net = Transformer(config, source, torch.float64), TargetNet.load(config, source, torch.float64)
    seq = Sequence(1, torch.randint(config.vocab_size, (30,)).tolist())
    cache = Cache(64, 2, 64)
    plane = cache.add_plane(*target.plane_shape)
    out = target.forward(packed(cache, seq), plane, taps=(0, 2))
    taps, last = net(torch.tensor([seq.tokens]), (0, 2))
    torch.testing.assert_close(taps[0], torch.cat([out.hidden[0], out.hidden[2]], 1), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(net.logits(last)[0, -1], out.logits[-1], atol=1e-9, rtol=1e-9)
    assert default_taps(30) == (1, 14, 26)
    assert default_taps(2) == (0, 1)


# ---------------------------------------------------------------- the head as a module


def inputs(length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, length, width, generator=generator).double() for width in (32, 96))  # type: ignore[return-value]


class Slow:
    """One row at a time, as drafting goes: keys and values of each layer in a list."""

    def __init__(self, net: HeadNet) -> None:
        self.net = net
        self.kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(net.config.layers)]

    def row(self, e: Tensor, f: Tensor, p: int) -> Tensor:
        """e, f [H] -> output [H]"""
        net = self.net
        rope = net._rope(torch.tensor([[p]]), torch.float64)
        x = net.midlayer.finish(f[None, None], self._mix(0, net.midlayer.split(e[None, None], f[None, None], rope)))
        for i, layer in enumerate(net.layers.values(), 1):
            x = x + layer.self_attn.join(self._mix(i, layer.self_attn.split(layer.input_layernorm(x), rope)))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x[0, 0]

    def _mix(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        q, k, v = qkv
        self.kept[layer].append((k, v))
        keys, values = (torch.cat([pair[i] for pair in self.kept[layer]], 2) for i in (0, 1))
        return (q @ keys.transpose(2, 3) * q.shape[3] ** -0.5).softmax(-1) @ values


def test_the_unrolled_steps_are_those_of_drafting() -> None:
    net, _, _ = head_net("eagle3", 1)
    e, taps = inputs()
    steps = list(net.unroll(e, taps, 4))
    features = net.fuse(taps)
    for root in range(9):
        slow = Slow(net)
        for p in range(root + 1):
            a = slow.row(e[1, p], features[1, p], p)
        for i in range(min(4, 9 - root)):
            torch.testing.assert_close(steps[i][1, root + i], a, atol=1e-10, rtol=1e-10)
            if root + i + 1 < 9:
                a = slow.row(e[1, root + i + 1], a, root + i + 1)


@pytest.mark.parametrize("layers", [1, 3])
def test_anchored_blocks_are_those_of_drafting(layers: int) -> None:
    net, config, _ = head_net("block", layers)
    e, taps = inputs()
    anchors = torch.tensor([[0, 3, 8], [2, 2, 5]])
    true, masked = net.anchored(e, taps, anchors)
    features = net.fuse(taps)
    for b in range(2):
        for i, root in enumerate(anchors[b].tolist()):
            slow = Slow(net)
            for p in range(root + 1):
                a = slow.row(e[b, p], features[b, p], p)
            torch.testing.assert_close(true[b, root], a, atol=1e-10, rtol=1e-10)
            for j in range(1, config.block):
                a = slow.row(net.mask_embedding, net.mask_hidden, root + j)
                torch.testing.assert_close(masked[b, i, j - 1], a, atol=1e-10, rtol=1e-10)


def test_a_head_starts_from_the_target() -> None:
    config = toy_config()
    target = TargetNet.load(config, RandomWeights(config, 1), torch.float32)
    shape, _ = random_head(config, "block", layers=2)
    ids = torch.arange(shape.draft_vocab_size)
    net, same = (HeadNet.from_target(target, shape, ids, seed=5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), same.parameters(), strict=True))
    assert torch.equal(net.lm_head.weight, target.lm_head.weight[ids])  # type: ignore[union-attr]
    layer: Any = target.layers[1]
    assert torch.equal(net.midlayer.self_attn.q_proj.weight[:, 32:], layer.self_attn.q_proj.weight)
    assert torch.equal(net.midlayer.mlp.gate_proj.weight[:48], layer.mlp.gate_proj.weight)


# ---------------------------------------------------------------- losses and hits


def a_batch(anchors: int = 3) -> Any:
    rng = random.Random(0)
    texts = [([rng.randrange(48) for _ in range(5)], [rng.randrange(48) for _ in range(n)]) for n in (9, 14)]
    items = [Answer(i, "x", False, prompt, answer, 0.0, 0) for i, (prompt, answer) in enumerate(texts)]
    return collate(items, anchors, rng), items


def toy_objective(kind: str, soft: bool = True) -> EagleObjective | BlockObjective:
    config = toy_config()
    target = TargetNet.load(config, RandomWeights(config, 1), torch.float32)
    shape, tensors = random_head(config, kind)
    net = HeadNet.from_target(target, replace(shape, block=4), tensors["d2t"] + torch.arange(shape.draft_vocab_size))
    return (EagleObjective if kind == "eagle3" else BlockObjective)(net, target, 4, soft)


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_losses_look_at_the_answer_only(kind: str, soft: bool) -> None:
    objective = toy_objective(kind, soft)
    batch, items = a_batch()
    rows = [(b, p) for b, a in enumerate(items) for p in range(4, len(a.tokens) - 2)]
    assert [divmod(i, batch.tokens.shape[1] - 1) for i in batch.rows.tolist()] == rows
    losses = objective.losses(batch)
    assert len(losses) == 4
    assert all(bool((d >= -1e-4).all()) for d, _ in losses)
    if kind == "eagle3":
        assert [int(w.sum()) for _, w in losses] == [len(rows) - 2 * i for i in range(4)]
    padded = replace(batch, tokens=batch.tokens.clone())
    for b, a in enumerate(items):
        padded.tokens[b, len(a.tokens) :] = 7  # what padding holds must not matter
    torch.testing.assert_close(objective.loss(padded), objective.loss(batch))
    objective.loss(batch).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in objective.net.parameters())


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_hits_are_those_of_greedy_chains(kind: str) -> None:
    objective = toy_objective(kind)
    batch, items = a_batch()
    net, target = objective.net, objective.target
    hits = objective.hits(batch)
    taps, _ = target(batch.tokens, net.config.taps)
    features, embed = net.fuse(taps), target.embed(batch.tokens)
    for b, a in enumerate(items):
        for root in range(batch.tokens.shape[1] - 1):
            inside = [root >= 4 and root + i <= len(a.tokens) - 3 for i in range(4)]
            assert [h >= 0 for h in hits[b, root].tolist()] == inside
            if inside[0]:
                assert hits[b, root, : sum(inside)].tolist() == _slow_hits(net, embed[b], features[b], a, root)


def _slow_hits(net: HeadNet, embed: Tensor, features: Tensor, a: Answer, root: int) -> list[int]:
    slow, found = Slow(net), []
    for p in range(root + 1):
        out = slow.row(embed[p + 1], features[p], p)
    for p in range(root, min(root + 4, len(a.tokens) - 2)):
        found.append(int(net.ids[net.logits(out).argmax()] == a.tokens[p + 2]))
        if net.config.kind == "eagle3":
            out = slow.row(embed[p + 2], out, p + 1)
        else:
            out = slow.row(net.mask_embedding, net.mask_hidden, p + 1)
    return found


@pytest.mark.parametrize("kind", ["eagle3", "block", "model"])
def test_a_step_in_mixed_precision_is_about_the_same_step(kind: str) -> None:
    """As on a GPU: the target in bfloat16, the objective in float32 under autocast."""
    config, (batch, _) = toy_config(), a_batch()
    half = TargetNet.load(config, RandomWeights(config, 1), torch.bfloat16)
    objective: Any
    if kind == "model":
        source = RandomWeights(config, 1)
        objective = ModelObjective(
            cut_target(config, source, 1, False, "cpu"), TargetNet.load(config, source, torch.float32), 4
        )
    else:
        objective = toy_objective(kind)
    exact = objective.loss(batch)
    objective.target = half
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = objective.loss(batch)
        hits = objective.hits(batch)
    torch.testing.assert_close(loss, exact, rtol=0.1, atol=0)
    assert hits.shape == (2, batch.tokens.shape[1] - 1, 4)
    loss.backward()
    assert all(p.grad.dtype is torch.float32 for p in objective.net.parameters() if p.requires_grad)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", pytest.param("block", marks=pytest.mark.slow)])
def test_a_step_compiles_to_one_graph(kind: str) -> None:
    objective, (batch, _) = toy_objective(kind), a_batch()
    compiled = torch.compile(objective.loss, backend="eager", dynamic=True, fullgraph=True)
    torch.testing.assert_close(compiled(batch), objective.loss(batch))
    torch._dynamo.reset()


@pytest.mark.parametrize("piece", [1, 2**27])
def test_divergence_is_kl_times_mass(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(objectives_module, "_CHUNK_NUMBERS", piece)
    logits, ids = torch.randn(3, 10).double(), torch.tensor([1, 4, 7])
    labels = soft_labels(logits, ids)
    p = torch.zeros(3, 3).double().scatter(1, labels.tokens, labels.probabilities)
    torch.testing.assert_close(p, logits.softmax(-1)[:, ids])
    own = torch.randn(3, 3).double().requires_grad_()
    mass = p.sum(-1)
    kl = ((p / mass[:, None]) * ((p / mass[:, None]).log() - own.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(divergence(labels, own), mass * kl)
    torch.testing.assert_close(divergence(labels, p.log()), torch.zeros(3).double(), atol=1e-6, rtol=0)
    weights = torch.randn(3).double()
    (expected,) = torch.autograd.grad((mass * kl * weights).sum(), own)
    (found,) = torch.autograd.grad((divergence(labels, own) * weights).sum(), own)
    torch.testing.assert_close(found, expected)


def test_labels_are_the_most_likely_tokens() -> None:
    logits, ids = torch.randn(5, 40), torch.arange(0, 40, 2)
    few = soft_labels(logits, ids, top=3)
    best = logits[:, ids].topk(3)
    assert torch.equal(few.tokens, best.indices)
    torch.testing.assert_close(few.probabilities, logits.softmax(-1)[:, ids].gather(1, best.indices))
    tokens = torch.tensor([4, 5, 39])
    hard = hard_labels(tokens, ids)
    assert hard.tokens[0].item() == 2
    assert hard.probabilities.flatten().tolist() == [1.0, 0.0, 0.0]
    assert hard_labels(tokens).tokens.flatten().tolist() == [4, 5, 39]
    assert torch.equal(few.at(torch.tensor([1, 1])).tokens, few.tokens[[1, 1]])


def test_acceptance_counts_chains_and_walks() -> None:
    found = Acceptance()
    found.count(torch.tensor([[-1, -1], [1, 1], [1, 0], [0, 1], [1, -1], [-1, -1]]))
    assert (found.reached, found.accepted) == ([4, 2], [3, 1])
    assert (found.steps, found.emitted) == (2, 4)  # rows 1 to 3 in one pass, then row 4
    assert found.tau == 2.0


# ---------------------------------------------------------------- data


def test_prompts_are_read_in_all_their_formats(tmp_path: Path) -> None:
    records = [
        {"turns": ["a", "later"], "category": "writing"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]},
        {"instruction": "c", "input": "x", "output": "y"},
        {"instruction": "d", "instances": [{"input": "z", "output": "w"}]},
        {"question": "e", "answer": "1"},
        {"text": "f", "task_id": 600, "test_list": []},
        {"text": "kept for testing", "task_id": 11, "test_list": []},
    ]
    path = tmp_path / "some.json"
    path.write_text(json.dumps(records))
    read = read_file(path)
    assert [p.text for p in read] == ["a", "b", "c\n\nx", "d\n\nz", "e", "f"]
    assert [p.category for p in read][:2] == ["writing", "some"]
    path.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, records)))
    assert read_file(path.with_suffix(".jsonl")) == read
    banned = tmp_path / "banned.jsonl"
    banned.write_text('{"prompt": "A"}\n{"prompt": "E "}')
    prompts = read_prompts([path, path], [banned])
    assert sorted(p.text for p in prompts) == ["b", "c\n\nx", "d\n\nz", "f"]
    assert [p.held for p in prompts] == [True, False, False, False]
    path.write_text('[{"strange": 1}]')
    with pytest.raises(OutriderError, match="is not a prompt"):
        read_file(path)


def test_the_draft_vocabulary_is_the_most_frequent_ids() -> None:
    answers = [Answer(0, "x", False, [9, 9], [5, 5, 3], 0.0, 0), Answer(1, "x", True, [1], [5, 7], 0.0, 0)]
    found = choose_vocabulary(answers, 12, 4, always=[11])
    assert found.ids.tolist() == [3, 5, 9, 11]
    assert (found.coverage, found.held_coverage) == (1.0, 0.5)
    assert len(choose_vocabulary(answers, 12, 0).ids) == 12


def test_batches_are_the_same_after_an_interruption() -> None:
    rng = random.Random(4)
    items = [Answer(i, "x", False, [1] * 3, [2] * rng.randrange(2, 40), 0.0, 0) for i in range(50)]
    batches = Batches(items, 96, 64, seed=7, anchors=2)
    whole = [batch for batch, _ in zip(batches.after(0), range(60), strict=False)]
    resumed = [batch for batch, _ in zip(batches.after(41), range(19), strict=False)]
    for one, other in zip(whole[41:], resumed, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.anchors, other.anchors)
    assert all(batch.tokens.numel() <= 96 for batch in whole)


def test_answers_are_the_same_after_a_kill(home: Path, tmp_path: Path) -> None:
    llm = LLM(home / "tiny", drafter="off", dtype="float32", max_batch=4)
    prompts = [TrainingPrompt(" ".join(WORDS[i : i + 3]), "x", i == 0) for i in range(7)]
    options, header = GenerationOptions(10, 12, seed=3, batch=4), {"target": "t"}
    store = AnswerStore(tmp_path / "whole.jsonl", header)
    requests = answer_requests(prompts, options)
    AnswerGenerator(llm, options, store, lambda answers, tokens: None).run(requests, lambda: False)
    whole = store.read()
    assert [a.number for a in whole] == list(range(10))
    assert whole[0].temperature == 0.0
    assert any(a.temperature for a in whole)
    assert all(a.temperature >= 0.7 for a in whole[7:])  # the same prompts again
    steps = iter(range(14))
    cut = tmp_path / "cut.jsonl"
    generator = AnswerGenerator(llm, options, AnswerStore(cut, header), lambda answers, tokens: None)
    generator.run(requests, lambda: next(steps, None) is None)
    assert 0 < len(AnswerStore(cut, header).read()) < 10
    cut.write_text(cut.read_text() + '{"number":9,"ki')  # killed in mid-line
    lines: list[str] = []
    store = AnswerStore(cut, header)
    job = GenerationJob(str(home / "tiny"), "float32", "cpu", options, requests)
    assert generate_missing(job, store, lambda text, done: lines.append(text), lambda: False) == whole
    assert store.read() == whole
    assert store.numbers() == set(range(10))
    assert "10/10" in lines[-1]
    assert "tok/s" in lines[-1]
    with pytest.raises(OutriderError, match="another run: target differ"):
        AnswerStore(cut, {"target": "u"})


def test_a_generation_pool_gives_the_answers_of_one_process(home: Path, tmp_path: Path) -> None:
    """Two processes, and what an interrupted one had left; then one that fails."""
    prompts = [TrainingPrompt(" ".join(WORDS[i : i + 3]), "x", i == 0) for i in range(7)]
    options, header = GenerationOptions(9, 12, seed=3, batch=4), {"target": "t"}
    requests = answer_requests(prompts, options)
    job = GenerationJob(str(home / "tiny"), "float32", "cpu", options, requests, workers=2)
    alone, store = AnswerStore(tmp_path / "alone.jsonl", header), AnswerStore(tmp_path / "pool.jsonl", header)
    job.run(requests, alone, lambda answers, tokens: None, lambda: False)
    whole = alone.read()
    store.part(5).append(whole[:2])
    store.absorb_parts()
    assert store.numbers() == {0, 1}
    counts: list[tuple[int, int]] = []
    generate_in_pool(replace(job, requests=requests[2:]), store, lambda *both: counts.append(both), lambda: False)
    assert store.read() == whole
    assert counts[-1] == (7, sum(len(a.answer) for a in whole[2:]))
    assert [path.name for path in tmp_path.glob("pool*")] == ["pool.jsonl"]
    broken = replace(job, target=str(tmp_path / "nothing"), workers=1)
    with pytest.raises(OutriderError, match="1 of 1 processes that generate answers ended early"):
        generate_in_pool(broken, store, lambda *both: None, lambda: False)


def test_a_target_invents_prompts(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Continuing a chat template where a user's turn begins; stopped and resumed, it invents the same."""
    model = str(tiny.save(tmp_path_factory.mktemp("talkative")))
    tokenizer = open_checkpoint(model).tokenizer
    chat = tokenizer.encode_chat([{"role": "user", "content": WORDS[0]}])
    prefix = user_turn_prefix(tokenizer)
    assert prefix == chat[: len(prefix)]
    assert WORDS[0] not in tokenizer.decode(prefix)
    assert WORDS[0] in tokenizer.decode(chat[len(prefix) :])
    options = Invention(tmp_path / "whole.jsonl", 12, model, dtype="float32", max_tokens=60, batch=4)
    count = invent(options)
    prompts = read_file(options.out)
    assert len(prompts) == count > 0
    assert {p.category for p in prompts} == {"invented"}
    assert len({p.text for p in prompts}) == count
    steps = iter(range(30))
    stopped = replace(options, out=tmp_path / "cut.jsonl")
    with pytest.raises(Stopped):
        invent(stopped, stop=lambda: next(steps, None) is None)
    assert not stopped.out.exists()
    assert invent(stopped) == count
    assert stopped.out.read_text() == options.out.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.jsonl", "whole.jsonl"]
    done = CliRunner().invoke(app, ["invent", "--model", model, "--count", "12", "--device", "cpu",
                                    "--out", str(tmp_path / "typed.jsonl"), "--max-tokens", "60"])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "prompts in" in done.stdout


# ---------------------------------------------------------------- the loop


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["eagle3", "block", "model"])
def test_kill_and_resume_give_the_same_weights(home: Path, tmp_path: Path, kind: str) -> None:
    more = {"kind": kind, "steps": 18, "layers": 1}
    train(recipe(home, tmp_path / "whole", **more))
    killed = recipe(home, tmp_path / "killed", **more)

    def kill(what: str, done: float) -> None:
        if "step 10/" in what:
            raise KeyboardInterrupt  # at once, as a signal would: what was not saved is lost

    with pytest.raises(KeyboardInterrupt):
        train(killed, kill)
    assert not (killed.out / "config.json").exists()
    with pytest.raises(OutriderError, match="already holds a training run"):
        train(killed)
    with pytest.raises(OutriderError, match="started with another lr"):
        train(replace(killed, resume=True, lr=1.0))
    calls = iter(range(3))
    with pytest.raises(Stopped, match="of 18 steps"):  # `stop` is called once after the answers, then at each step
        train(replace(killed, resume=True), stop=lambda: next(calls, None) is None)
    result = train(replace(killed, resume=True))
    whole, resumed = weights(tmp_path / "whole"), weights(killed.out)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert [e["step"] for e in result["evaluations"]] == [0, 18]
    assert [e["step"] for e in result["losses"]] == [10, 18]


def test_the_rate_rises_and_falls() -> None:
    schedule = Schedule(100, lr=1.0, warmup=0.1)
    rates = [schedule.rate(i) for i in range(100)]
    assert max(rates) == rates[9] == 1.0
    assert rates[0] == 0.1
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert 0.02 <= rates[-1] < 0.03


# ---------------------------------------------------------------- the whole command


def test_a_training_can_begin_with_another_head(home: Path, tmp_path: Path) -> None:
    first = train(recipe(home, tmp_path / "first", steps=40))
    again = recipe(home, tmp_path / "again", steps=2, start_from=tmp_path / "first", answers=-1)
    second = train(again)
    assert second["answers"] == first["answers"]
    assert second["evaluations"][0]["kinds"] == first["evaluations"][-1]["kinds"]  # it starts where that one ended
    assert "--start-from first" in second["recipe"]["command"]
    with pytest.raises(OutriderError, match="another shape: intermediate_size differ"):
        train(replace(again, out=tmp_path / "other", intermediate=16))


def test_one_command_makes_a_small_model(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    done = invoke(home, out, "--kind", "model", "--layers", 1, "--steps", 120, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["kinds"]["all"]["tau"] > found["before"]["tau"] + 0.5
    small, whole = open_checkpoint(out), open_checkpoint(home / "tiny")
    assert small.config.layers == 1
    assert small.tokenizer.vocabulary == whole.tokenizer.vocabulary
    assert small.tokenizer.chat_template == whole.tokenizer.chat_template
    assert small.config.eos_ids == whole.config.eos_ids
    assert torch.equal(*(c.weights.get("embed_tokens.weight", torch.float32) for c in (small, whole)))  # frozen
    tau, texts = speaks(home, drafter="model", draft_model=str(out), k=4)
    assert texts == speaks(home, drafter="off")[1]
    assert tau > 1.5


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("block", marks=pytest.mark.slow)])
def test_one_command_makes_a_head_with_card_and_report(home: Path, tmp_path: Path, kind: str) -> None:
    out, page = tmp_path / "head", tmp_path / "page.html"
    done = invoke(home, out, "--kind", kind, "--steps", 160, "--html", page)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    losses = json.loads((out / "training" / "result.json").read_text())["losses"]
    assert losses[-1]["loss"] < 0.3 * losses[0]["loss"]
    assert result["kinds"]["all"]["tau"] > result["before"]["tau"] + 0.5
    config, tensors = read_head(out)
    assert (config.kind, config.block, config.target_name) == (kind, 4, "tiny")
    assert tensors["lm_head.weight"].dtype is torch.float32
    card, html = (out / "README.md").read_text(), page.read_text()
    assert "| all |" in card
    assert config.target_hash in card
    assert str(home) not in card
    assert html.startswith("<!DOCTYPE html>")
    assert "Acceptance by position" in html
    assert "τ was" in done.stdout


def test_frozen_output_rows_are_the_targets_and_not_stored(home: Path, tmp_path: Path) -> None:
    """The head drafts what a head with those rows in its file drafts."""
    pytest.importorskip("outrider.drafters.head")
    out, whole = tmp_path / "head", tmp_path / "whole"
    done = invoke(home, out, "--steps", 80, "--freeze-output", "--draft-vocab", 40)
    assert done.exit_code == 0, done.output
    config, tensors = read_head(out)
    assert not config.own_output
    assert "lm_head.weight" not in tensors
    checkpoint = open_checkpoint(home / "tiny")
    table = checkpoint.weights.get("embed_tokens.weight" if checkpoint.config.tied else "lm_head.weight", torch.float32)
    rows = {"lm_head.weight": table[target_ids(tensors["d2t"])]}
    write_head(whole, replace(config, own_output=True), tensors | rows)
    tau, texts = speaks(home, drafter="head", head=str(out), k=4)
    assert (tau, texts) == speaks(home, drafter="head", head=str(whole), k=4)
    assert texts == speaks(home, drafter="off")[1]
    assert tau > 1.2
    again = invoke(home, tmp_path / "again", "--steps", 2, "--freeze-output", "--draft-vocab", 40, "--start-from", out)
    assert again.exit_code == 0, again.output


def test_a_cut_configuration_is_read_back(home: Path) -> None:
    for family in ("llama", "mistral", "qwen2", "qwen3", "smollm3"):
        more: dict[str, Any] = {"qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
        if family == "smollm3":
            more |= {"no_rope_layers": frozenset({3, 7}), "tied": True}
        if family == "mistral":
            more |= {"sliding_window": 8, "window_layers": frozenset(range(8))}
        if family == "qwen2":
            more |= {"sliding_window": 8, "window_layers": frozenset({5, 6, 7})}
        config = replace(toy_config(8), architecture=family, rope_scaling=RopeScaling("linear", 2.0), **more)
        small = cut_config(config, [0, 3, 7])
        assert from_hf(hf_config(small)) == small


def test_ctrl_c_prints_how_to_resume(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(6))

    @contextmanager
    def stops(seconds: float) -> Iterator[Callable[[], bool]]:
        yield lambda: next(calls, None) is None

    with monkeypatch.context() as patched:
        patched.setattr(cli_train, "_stop_request", stops)
        patched.setattr("sys.argv", ["outrider", "train", "--steps", "12"])
        done = invoke(home, tmp_path / "out", "--steps", 12)
    assert done.exit_code == 130
    assert "outrider train --steps 12 --resume" in done.stderr
    late = invoke(home, tmp_path / "out", "--steps", 12, "--resume", "--stop-after", 1e-9)
    assert late.exit_code == 130
    assert "Stopped" in late.stderr
    assert invoke(home, tmp_path / "out", "--steps", 12, "--resume").exit_code == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--kind", "other"), "no kind 'other'"),
        (("--kind", "eagle3", "--layers", 2), "has one layer"),
        (("--tap", 5), "does not have"),
        (("--kind", "model", "--layers", 9), "the target has 2"),
        (("--store", "int3"), "no --store 'int3'"),
    ],
)
def test_wrong_options_are_refused(home: Path, tmp_path: Path, more: tuple[object, ...], message: str) -> None:
    done = invoke(home, tmp_path / "out", "--steps", 1, *more)
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())


def test_long_curves_are_thinned() -> None:
    points = thinned([(float(i), 1.0 * i) for i in range(100)])
    assert len(points) == 16
    assert points[-1].x == 99


def test_a_head_starts_from_one_with_another_vocabulary(home: Path, tmp_path: Path) -> None:
    """Ids that both have keep their output rows; a new id starts with the target's."""
    config, tensors = read_head(train_once(home, tmp_path / "first"))
    ids = target_ids(tensors["d2t"])
    absent = next(i for i in range(config.vocab_size) if i not in ids.tolist())
    others = torch.cat([ids[1:], torch.tensor([absent])]).sort().values
    net = HeadNet(config, others)
    own = net.lm_head.weight.detach().clone()
    load_start(net, config, config, tensors)
    for row, i in enumerate(others.tolist()):
        expected = own[row] if i == absent else tensors["lm_head.weight"][ids.tolist().index(i)].float()
        assert torch.equal(net.lm_head.weight[row], expected)
    assert torch.equal(net.ids, others)
    assert torch.equal(net.fc.weight, tensors["fc.weight"].float())


def train_once(home: Path, out: Path) -> Path:
    train(recipe(home, out, steps=2, draft_vocab=20))
    return out


def test_a_head_is_stored_in_blocks_and_encoded_again(home: Path, tmp_path: Path) -> None:
    """The card and the configuration have the acceptance of what is stored."""
    out, again = tmp_path / "blocks", tmp_path / "again"
    made = recipe(home, out, steps=2, draft_vocab=20, store="q4_1")
    result = train(made)
    config, tensors = read_head(out)
    assert all(isinstance(tensors[name], BlockTensor) for name in ("fc.weight", "lm_head.weight"))
    last = result["evaluations"][-1]["kinds"]["all"]["alpha_by_position"]
    assert config.acceptance == tuple(round(a, 3) for a in last)
    assert "stored in q4_1" in (out / "README.md").read_text()
    answers = made.answers_file or out / "training" / "answers.jsonl"
    facts = encode_folder(EncodingOptions(out, again, "q8_0", answers, made.target))
    assert facts["before"].keys() == facts["after"].keys()
    assert "## Stored in q8_0" in (again / "README.md").read_text()
    first, second = (decoded(read_head(folder)[1], torch.float32)["fc.weight"] for folder in (out, again))
    assert (first - second).norm() < 0.02 * first.norm()
    with pytest.raises(ModelError, match=r"give its answers\.jsonl"):
        encode_folder(EncodingOptions(out, again, "q8_0", out / "README.md", made.target))
