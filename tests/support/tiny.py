"""A tiny model in a folder: random weights, a byte-level tokenizer, a chat template. It takes milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.backends.toy import RandomWeights
from outrider.models.config import from_hf
from outrider.models.weights import expected, stored_name

TEXTS = ("the quick brown fox jumps over the lazy dog", "def add(a, b):\n    return a + b\n", "one two three four five")
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(
    texts: Sequence[str] = TEXTS, specials: tuple[str, ...] = SPECIALS, size: int = 300, prefix: bool = False
) -> Tokenizer:
    """Byte-level BPE, as in GPT-2: it can encode every text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, special_tokens=list(specials), initial_alphabet=alphabet
    )
    core.train_from_iterator(texts, trainer)
    return core


def save(
    folder: Path, texts: tuple[str, ...] = TEXTS, seed: int = 1, context: int = 256, poison: str | None = None,
    controls: tuple[str, ...] = (), added: tuple[str, ...] = (), layers: int = 2,
) -> Path:  # fmt: skip
    """Write a Llama model. `poison` names a tensor that gets a NaN.

    `controls` are further special tokens, `added` are texts that are one token each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    core = tokenizer(texts, SPECIALS + controls, 300 + len(controls))
    core.add_tokens(list(added))
    core.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    data = {
        "model_type": "llama",
        "vocab_size": core.get_vocab_size(),
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": context,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(data))
    config = from_hf(data)
    source = RandomWeights(config, seed)
    weights = {stored_name(name): source.get(name, torch.float32) for name in expected(config)}
    for piece, i in core.get_vocab().items():
        if i >= len(SPECIALS + controls) and not (piece.isascii() or piece.strip("ĠĊ").isascii()):
            weights["lm_head.weight"][i] = 0  # so that greedy text has no half characters
    if poison is not None:
        weights[poison].view(-1)[0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
