"""Models that Hugging Face transformers runs: their configuration, their tokenizer and a stand-in for their weights.

Promise: whatever transformers cannot do with a folder is a ModelError. A prompt is encoded exactly as transformers
encodes it, special tokens included; text decoded token by token adds up to what transformers decodes at once.
transformers is imported only inside these functions. Nothing here builds the network: `backends.transformers` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Core
from torch import Tensor

from ..errors import ModelError, first_line
from .config import ModelConfig, token_ids
from .tokenizer import Tokenizer, default_template

LOCAL = {"local_files_only": True, "trust_remote_code": False}  # how transformers may open a folder
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_sequence_length", "max_seq_len")
_DEFAULT_LENGTH = 2048  # of a model without a limit on positions


@dataclass(frozen=True)
class ForeignWeights:
    """Takes the place of weights: the folder that transformers loads, or the module that holds them already."""

    folder: Path
    reason: str  # why transformers runs the model
    module: Any = None

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        raise ModelError(f"{self.reason} Its weights cannot be read one by one, which training and export need.")

    def has(self, name: str) -> bool:
        return False


def open_foreign(folder: Path, refusal: str) -> tuple[ModelConfig, ForeignWeights, Any]:
    """Configuration, weights and tokenizer of a folder that the built-in decoder refuses to run."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"{refusal} transformers may support it: pip install -e '.[hf]' in a clone, and it is used for such models."
        ) from error
    try:
        settings = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
        config = foreign_config(settings)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{refusal} transformers cannot read its config.json either: {first_line(error)}.") from error
    tokenizer = open_tokenizer(folder)
    tokenizer.eos_ids = config.eos_ids | frozenset(i for i in tokenizer.eos_ids if i < config.vocab_size)
    reason = f"transformers runs {folder.resolve().name}: the built-in decoder does not know '{settings.model_type}'."
    return replace(config, eos_ids=tokenizer.eos_ids), ForeignWeights(folder, reason), tokenizer


def open_tokenizer(folder: Path) -> Any:
    """A folder's tokenizer, read by transformers."""
    import transformers

    try:
        return adapt_tokenizer(transformers.AutoTokenizer.from_pretrained(folder, **LOCAL))
    except Exception as error:
        raise ModelError(
            f"transformers cannot load the tokenizer of {folder}: {first_line(error)}. If it is made with "
            "sentencepiece: pip install sentencepiece."
        ) from error


def foreign_config(settings: Any) -> ModelConfig:
    """What Outrider needs of a transformers configuration: vocabulary, layers, lengths, end tokens."""
    text = settings.get_text_config(decoder=True)
    # From the whole configuration: in the decoder's part of it these names may have fallen back to their defaults.
    layers = getattr(settings, "decoder_layers", None) or getattr(settings, "num_decoder_layers", None)
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    hidden = int(text.hidden_size)
    length = next((int(n) for name in _LENGTHS if (n := getattr(text, name, None))), _DEFAULT_LENGTH)
    return ModelConfig(
        architecture=str(settings.model_type), vocab_size=int(text.vocab_size), hidden_size=hidden,
        layers=int(layers or text.num_hidden_layers), heads=heads, kv_heads=heads,
        head_dim=max(hidden // heads // 2 * 2, 2),
        intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * hidden),
        norm_eps=1e-6, rope_theta=1e4, context_length=length,
        eos_ids=token_ids(getattr(text, "eos_token_id", None)) | token_ids(getattr(settings, "eos_token_id", None)),
        bos_id=next(iter(token_ids(getattr(text, "bos_token_id", None))), None),
    )  # fmt: skip


def adapt_tokenizer(tokenizer: Any) -> Any:
    """A transformers tokenizer with the interface of `Tokenizer`; one of ours is returned unchanged."""
    if isinstance(tokenizer, Tokenizer | SlowTokenizer):
        return tokenizer
    core = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if core is not None:
        try:
            return FastTokenizer(tokenizer, core)
        except ModelError:
            pass  # a decoder that only transformers itself can run
    return SlowTokenizer(tokenizer)


class FastTokenizer(Tokenizer):
    """Our tokenizer around a copy of a transformers tokenizer's core."""

    def __init__(self, hf: Any, core: Any) -> None:
        ids, template = (hf.bos_token_id, hf.eos_token_id), default_template(getattr(hf, "chat_template", None))
        super().__init__(Core.from_str(core.to_str()), *ids, add_bos=_adds_bos(hf), chat_template=template)
        self.hf = hf

    def encode_prompt(self, text: str, special: bool = False) -> list[int]:
        return list(self.hf(text)["input_ids"])


class SourceTokenizer(Tokenizer):
    """Of an encoder–decoder, without transformers: a source has the special tokens that tokenizer.json adds."""

    def encode_prompt(self, text: str, special: bool = False) -> list[int]:
        with self._lock:
            self._core.encode_special_tokens = not special
            ids: list[int] = self._core.encode(text.encode("utf-8", "replace").decode("utf-8")).ids
        return ids


class SlowTokenizer:
    """The interface of `Tokenizer`; every call goes to the transformers tokenizer."""

    strip = 0

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.bos_id, self.eos_id = hf.bos_token_id, hf.eos_token_id
        self.eos_ids: frozenset[int] = frozenset() if self.eos_id is None else frozenset({self.eos_id})
        self.add_bos, self.chat_template = _adds_bos(hf), default_template(getattr(hf, "chat_template", None))
        self.vocab_size, self.base_size = len(hf), int(hf.vocab_size)
        self._special = set(hf.all_special_ids)

    @property
    def vocabulary(self) -> dict[str, int]:
        return dict(self.hf.get_vocab())

    def encode(self, text: str, special: bool = False) -> list[int]:
        return list(self.hf(text, add_special_tokens=False)["input_ids"])

    def encode_answer(self, text: str) -> list[int]:
        return list(self.hf(text_target=text, add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str, special: bool = False) -> list[int]:
        return list(self.hf(text)["input_ids"])

    def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **kwargs), special=True)

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        if self.chat_template is None:
            raise ModelError("The model has no chat template; give it a plain prompt instead of messages.")
        kwargs |= {"add_generation_prompt": add_generation_prompt, "tokenize": False}
        return str(self.hf.apply_chat_template(messages, **kwargs))

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuing: bool = False) -> str:
        options = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
        return str(self.hf.decode(list(ids), **options))

    def stream(
        self, skip_special: bool = True, continuing: bool = False, shown: frozenset[int] = frozenset()
    ) -> SlowStream:
        return SlowStream(self, frozenset(self._special) - shown if skip_special else frozenset())

    def id_to_piece(self, token: int) -> str:
        return self.decode([token], skip_special=False)

    def id_to_bytes(self, token: int) -> bytes:
        return self.id_to_piece(token).encode()

    def token_to_id(self, piece: str) -> int | None:
        return self.vocabulary.get(piece)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(folder)


class SlowStream:
    """Decodes all ids again at each push, and returns the text that can no longer change."""

    def __init__(self, tokenizer: SlowTokenizer, silent: frozenset[int]) -> None:
        """`silent` are tokens without a text."""
        self._tokenizer, self._silent = tokenizer, silent
        self._ids: list[int] = []
        self._shown = ""

    def push(self, ids: Iterable[int]) -> str:
        self._ids += (i for i in ids if i not in self._silent)
        text = self._tokenizer.decode(self._ids, skip_special=False)
        return "" if text.endswith("�") else self._show(text)  # an unfinished character

    def flush(self) -> str:
        return self._show(self._tokenizer.decode(self._ids, skip_special=False))

    def _show(self, text: str) -> str:
        if not text.startswith(self._shown):
            return ""  # a word that the next token may still change
        new, self._shown = text[len(self._shown) :], text
        return new


def _adds_bos(hf: Any) -> bool:
    return hf.bos_token_id is not None and list(hf("")["input_ids"])[:1] == [hf.bos_token_id]
