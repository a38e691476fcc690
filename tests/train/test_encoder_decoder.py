"""Training for an encoder–decoder: the module computes what the target computes, and one command makes a smaller
decoder that drafts for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider import LLM, OutriderError, SamplingParams
from outrider.errors import ModelError
from outrider.models.checkpoint import open_checkpoint
from outrider.models.encoder_decoder import DraftFacts, write_encoder_decoder
from outrider.models.weights import LayerSubset, cut_config
from outrider.testing import check_drafter
from outrider.train.answers import Answer
from outrider.train.batches import collate
from outrider.train.encoder_decoder import EncoderDecoderNet, EncoderDecoderObjective
from outrider.train.run import train

from support import foreign
from support.pairs import CASES, pair, source, text, their_logits
from support.training import QUICK, WORDS, Recipe


@pytest.mark.one_in(5, 1)
@pytest.mark.parametrize("case", CASES)
def test_the_module_computes_what_the_target_computes(case: str) -> None:
    """Texts and sources of two lengths in one batch, padded."""
    theirs, config, weights = pair(case)
    net = EncoderDecoderNet(config, weights, torch.float32, "cpu")
    pairs = [(source(30), text(20)), (source(9, salt=5), text(13))]
    sources, tokens = torch.zeros(2, 32, dtype=torch.long), torch.zeros(2, 24, dtype=torch.long)
    for i, (read, said) in enumerate(pairs):
        sources[i, : len(read)], tokens[i, : len(said)] = torch.tensor(read), torch.tensor(said)
    lengths = torch.tensor([len(read) for read, _ in pairs])
    got = net.logits(net(tokens, net.states(sources, lengths), lengths))
    open_ = [i for i in range(config.vocab_size) if i not in config.banned]
    for i, (read, said) in enumerate(pairs):
        wanted = their_logits(theirs, read, said)[:, open_]
        torch.testing.assert_close(got[i, : len(said)][:, open_], wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", foreign.TWO_SIDED)
def test_a_written_folder_is_the_cut_model(kind: str, tmp_path: Path) -> None:
    """Under the names of its family: what we read again, and what transformers reads, are the same numbers."""
    whole = open_checkpoint(foreign.save(tmp_path / "whole", kind))
    some = LayerSubset(whole.weights, [0, 2])
    config = cut_config(whole.config, [0, 2])
    write_encoder_decoder(tmp_path / "cut", whole.path, config, some, whole.tokenizer, torch.float32)
    cut = open_checkpoint(tmp_path / "cut")
    assert cut.config.layers == 2
    assert cut.config.eos_ids == whole.config.eos_ids
    for name in cut.weights.names():
        assert torch.equal(cut.weights.get(name, torch.float32), some.get(name, torch.float32)), name
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "cut")
    net = EncoderDecoderNet(cut.config, cut.weights, torch.float32, "cpu")
    length = torch.tensor([9])
    got = net.logits(net(torch.tensor([text(7)]), net.states(torch.tensor([source(9)]), length), length))[0]
    torch.testing.assert_close(got, their_logits(theirs, source(9), text(7)), atol=3e-4, rtol=3e-4)


def test_rows_of_a_batch_predict_every_token_of_an_answer() -> None:
    """The first one too, which other drafters get from the target's pass over the prompt."""
    _, config, weights = pair("marian")
    net = EncoderDecoderNet(config, weights, torch.float32, "cpu")
    answers = [Answer(0, "x", False, [2], text(9), 0.0, 0, source(7)), Answer(1, "x", False, [2], text(4), 0.0, 0, [5])]
    batch = collate(answers, 0, random.Random(0))
    assert batch.next_tokens.tolist() == text(9) + text(4)
    objective: Any = EncoderDecoderObjective
    got = objective(net, net, 4)._scores(net, batch)
    for answer, logits in zip(answers, got.split([9, 4]), strict=True):
        length = torch.tensor([len(answer.source)])
        last = net(torch.tensor([answer.tokens]), net.states(torch.tensor([answer.source]), length), length)[0]
        torch.testing.assert_close(logits, net.logits(last)[:-1], atol=1e-4, rtol=1e-4)


def test_one_command_makes_a_smaller_decoder(tmp_path: Path) -> None:
    """It drafts more of the target's text than the layer that it starts from, and changes none of it."""
    target, rng = foreign.save(tmp_path / "target", "marian"), random.Random(1)
    lines = [{"prompt": " ".join(rng.choices(WORDS, k=4)), "category": "a"} for _ in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    given: dict[str, Any] = QUICK | {"prompts": (tmp_path / "prompts.jsonl",), "target": str(target), "max_tokens": 16}
    with pytest.raises(OutriderError, match="choose --kind model"):
        train(Recipe(**given | {"out": tmp_path / "head", "kind": "eagle3"}))
    done = train(Recipe(**given | {"out": tmp_path / "small", "kind": "model", "steps": 40}))
    before, after = (done["evaluations"][i]["kinds"]["all"]["tau"] for i in (0, -1))
    assert after > before + 0.1
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    llm = LLM(target, drafter="model", draft_model=str(tmp_path / "small"), k=3, dtype="float32", device="cpu")
    out = llm.generate(lines[0]["prompt"], params)[0]
    assert out.token_ids == llm.using(drafter="off").generate(lines[0]["prompt"], params)[0].token_ids
    assert out.stats.drafted > 0


def test_its_short_list_and_the_targets_encoder_are_used_in_int8(tmp_path: Path) -> None:
    target, rng = foreign.save(tmp_path / "target", "marian"), random.Random(1)
    lines = [{"prompt": " ".join(rng.choices(WORDS, k=4)), "category": "a"} for _ in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    given: dict[str, Any] = QUICK | {"prompts": (tmp_path / "prompts.jsonl",), "target": str(target), "max_tokens": 16}
    done = train(Recipe(**given | {"out": tmp_path / "small", "kind": "model", "steps": 20, "draft_vocab": 100}))
    assert done["vocabulary"]["size"] == 100
    answers = (tmp_path / "small" / "training" / "answers.jsonl").read_text().splitlines()
    assert all(json.loads(line)["temperature"] == 0 for line in answers[1:])
    facts = DraftFacts.of(tmp_path / "small", 300)
    assert len(facts.draft_ids) == 100
    assert facts.acceptance == tuple(done["evaluations"][-1]["kinds"]["all"]["alpha_by_position"])
    llm = LLM(target, drafter="model", draft_model=str(tmp_path / "small"), k=3, dtype="int8", device="cpu")
    small: Any = llm.engine.drafter
    assert small.model.precision == "int8"
    assert small.model.draft_ids.tolist() == list(facts.draft_ids)
    assert small.model.reader.network is llm.target.reader.network
    if small.model.drafts_chains:
        assert len(small.traits.forecast.calls) == 2
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=3)
        out = llm.generate(lines[0]["prompt"], params)[0]
        assert out.token_ids == llm.using(drafter="off").generate(lines[0]["prompt"], params)[0].token_ids
        assert out.stats.drafted > 0
    assert check_drafter(
        "model", {"draft_model": str(tmp_path / "small")}, llm.target, tokens=8, tokenizer=llm.tokenizer
    )


def test_a_short_list_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    assert DraftFacts.of(tmp_path, 10) == DraftFacts()
    for ids in ([5, 3], [3, 3], [10], ["a"], [-1]):
        (tmp_path / "draft.json").write_text(json.dumps({"draft_ids": ids}))
        with pytest.raises(ModelError, match=r"draft\.json does not fit the model"):
            DraftFacts.of(tmp_path, 10)
