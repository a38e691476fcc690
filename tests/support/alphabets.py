"""Tokenizers of different kinds, trained in milliseconds, and one model under two of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import torch
from tokenizers import AddedToken, Tokenizer as Core, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.models.config import ModelConfig
from outrider.models.tokenizer import Tokenizer

from support import tiny

PROSE = (
    "the quick brown fox jumps over the lazy dog",
    "one two three four five six",
    "über die Brücke, naïve 你好 世界",
)
CODE = (
    "def add(a, b):\n    return a + b\n",
    "for i in range(10):\n        print(i, '你好')\n",
    "if x == 1:\n    pass\n",
)
SPECIALS = ("<s>", "</s>", "<|user|>")


def byte_level(texts: tuple[str, ...] = PROSE, size: int = 300, prefix: bool = False) -> Tokenizer:
    """As in GPT-2: it can encode every text."""
    return Tokenizer(tiny.tokenizer(texts, SPECIALS, size, prefix), 0, 1)


def sentence_piece(texts: tuple[str, ...] = CODE, size: int = 330) -> Tokenizer:
    """As in Llama 2: a space before every text, bytes for what is not in the vocabulary, a BOS in front."""
    core = Core(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # only in training
    names = ["<unk>", "<s>", "</s>", *bytes_]
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False, special_tokens=names))
    state = json.loads(core.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in bytes_]
    state["pre_tokenizer"] = None
    return Tokenizer(Core.from_str(json.dumps(state)), 1, 2, add_bos=True)


def words() -> Tokenizer:
    """Whole words only: it cannot encode most texts."""
    vocabulary = {"<unk>": 0, "the": 1, "quick": 2, "fox": 3, "two": 4, "return": 5, "end": 6}
    core = Core(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("end", special=True)])
    return Tokenizer(core, eos_id=6)


def shuffled(tokenizer: Tokenizer, seed: int = 0) -> tuple[Tokenizer, list[int]]:
    """The same tokenizer with other ids: old id -> new id."""
    state = json.loads(tokenizer._core.to_str())
    order = list(range(tokenizer.vocab_size))
    random.Random(seed).shuffle(order)
    state["model"]["vocab"] = {piece: order[i] for piece, i in state["model"]["vocab"].items()}
    for token in state["added_tokens"]:
        token["id"] = order[token["id"]]
    state["added_tokens"].sort(key=lambda token: token["id"])
    ends = [None if i is None else order[i] for i in (tokenizer.bos_id, tokenizer.eos_id)]
    return Tokenizer(Core.from_str(json.dumps(state)), *ends, add_bos=tokenizer.add_bos), order


class Rearranged:
    """Another model's weights with its tokens in another order; rows beyond them are zeros."""

    def __init__(self, source: RandomWeights, order: list[int], size: int) -> None:
        self.source, self.order, self.size = source, order, size

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self.source.get(name, dtype)
        if not name.startswith(("embed_tokens", "lm_head")):
            return tensor
        rows = torch.zeros(self.size, tensor.shape[1], dtype=dtype)
        rows[self.order] = tensor[: len(self.order)]
        return rows


def model(tokenizer: Tokenizer, seed: int = 1, padding: int = 0, blur: float = 0.0, context: int = 512) -> Transformer:
    """A tiny model over this tokenizer's ids."""
    config = config_of(tokenizer.vocab_size + padding, context)
    return Transformer(config, RandomWeights(config, seed, blur), torch.float32)


def rearranged(
    tokenizer: Tokenizer, order: list[int], seed: int = 1, padding: int = 0, blur: float = 0.0
) -> Transformer:
    """`model(tokenizer)` with its tokens in this order and more rows."""
    config = config_of(tokenizer.vocab_size)
    larger = replace(config, vocab_size=config.vocab_size + padding)
    return Transformer(larger, Rearranged(RandomWeights(config, 1, blur), order, larger.vocab_size), torch.float32)


def config_of(size: int, context: int = 512) -> ModelConfig:
    return toy_config(layers=1, vocabulary=size, context=context)
