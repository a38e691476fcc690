"""A home folder and a command line for tests that train a drafter."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.backends.rows import rows_of
from outrider.backends.toy import toy_config
from outrider.cli.app import app
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.models.speculators import random_head
from outrider.train.networks import HeadNet
from outrider.train.prompts import read_prompts
from outrider.train.recipe import Recipe
from outrider.types import Sequence

from support import tiny

WORDS = (*tiny.TEXTS[0].split(), *tiny.TEXTS[2].split(), "add", "return", "a", "b")


QUICK: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_tokens": 32, "batch_tokens": 512, "lr": 3e-3, "draft_vocab": 0,
    "unroll": 4, "block": 4, "anchors": 8, "store": "float32", "save_every": 5, "evaluate_every": 40,
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose text depends mostly on its last token, so that there is something to learn; and prompts."""
    home = tmp_path_factory.mktemp("train")
    file = tiny.save(home / "tiny") / "model.safetensors"
    weights = load_file(file)
    save_file({n: 0.15 * w if "o_proj" in n else w for n, w in weights.items()}, file, metadata={"format": "pt"})
    rng = random.Random(1)
    lines = [{"prompt": " ".join(rng.choices(WORDS, k=4)), "category": "ab"[i % 2]} for i in range(60)]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return home


def recipe(home: Path, out: Path, **more: Any) -> Recipe:
    files = {"prompts": (home / "prompts.jsonl",), "answers_file": home / "answers.jsonl"}
    return Recipe(**{"target": str(home / "tiny"), "out": out} | files | QUICK | more)


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model.safetensors")


def invoke(home: Path, out: Path, *more: object) -> Result:
    options = {name.replace("_", "-"): value for name, value in QUICK.items()}
    arguments = [str(w) for name, value in options.items() for w in (f"--{name}", value)]
    arguments += ["--model", str(home / "tiny"), "--prompts", str(home / "prompts.jsonl"), "--out", str(out)]
    arguments += ["--answers-file", str(home / "answers.jsonl"), *map(str, more)]
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "120"}).invoke(app, ["train", *arguments])


def speaks(home: Path, **drafter: Any) -> tuple[float, list[list[int]]]:
    """τ of real decoding on the held-out prompts, and its token ids."""
    llm = LLM(home / "tiny", dtype="float32", **drafter)
    held = [q.text for q in read_prompts([home / "prompts.jsonl"]) if q.held]
    results = llm.chat([[{"role": "user", "content": t}] for t in held], SamplingParams(max_tokens=32))
    assert not llm.engine.failures
    stats = [r.stats for r in results]
    return sum(s.emitted for s in stats) / sum(s.steps for s in stats), [r.token_ids for r in results]


def packed(cache: Cache, seq: Sequence) -> Any:
    cache.open(seq)
    cache.reserve(seq, len(seq.tokens), 0)
    packing = BatchBuilder(cache)
    for p in range(len(seq.tokens)):
        packing.pending(seq, p, p + 1, want=True)
    return rows_of(packing)


def head_net(kind: str, layers: int) -> tuple[HeadNet, Any, dict[str, Tensor]]:
    config, tensors = random_head(toy_config(), kind, layers=layers)
    config = replace(config, block=4)
    net = HeadNet(config, tensors["d2t"] + torch.arange(len(tensors["d2t"]))).double()
    net.load_state_dict(tensors)
    return net, config, tensors
