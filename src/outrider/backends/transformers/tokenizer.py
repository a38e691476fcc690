"""transformers' tokenizers behind ours: the fast ones lend their core, the others are asked for every text.

Promise: a prompt is encoded exactly as transformers would encode it, special tokens included; what is decoded piece by
piece adds up to what transformers decodes at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ...models.tokenizer import Tokenizer


def folder_tokenizer(folder: Path) -> Any:
    """The tokenizer that lies in a model's folder."""
    import transformers

    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelError(
            f"transformers cannot load the tokenizer of {folder}: {first}. If it is made with sentencepiece: pip "
            "install sentencepiece."
        ) from error
    return adapt(theirs)


def adapt(theirs: Any) -> Any:
    """A transformers tokenizer as one of ours; ours as it is."""
    if isinstance(theirs, Tokenizer | SlowTokenizer):
        return theirs
    core = getattr(theirs, "backend_tokenizer", None) or getattr(theirs, "_tokenizer", None)
    if core is not None:
        try:
            return FastTokenizer(theirs, core)
        except ModelError:
            pass  # its decoder is of a kind that only its makers know
    return SlowTokenizer(theirs)


class FastTokenizer(Tokenizer):
    """Our tokenizer around a copy of the core of theirs."""

    def __init__(self, theirs: Any, core: Any) -> None:
        from tokenizers import Tokenizer as Core

        super().__init__(
            Core.from_str(core.to_str()), theirs.bos_token_id, theirs.eos_token_id, add_bos=_adds_bos(theirs),
            chat_template=_template(theirs),
        )  # fmt: skip
        self.theirs = theirs

    def encode_prompt(self, text: str, special: bool = False) -> list[int]:
        return list(self.theirs(text)["input_ids"])


class SlowTokenizer:
    """What our tokenizer does, by asking theirs."""

    strip = 0

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs
        self.bos_id, self.eos_id = theirs.bos_token_id, theirs.eos_token_id
        self.eos_ids: frozenset[int] = frozenset() if self.eos_id is None else frozenset({self.eos_id})
        self.add_bos, self.chat_template = _adds_bos(theirs), _template(theirs)
        self._special = set(theirs.all_special_ids)

    @property
    def vocab_size(self) -> int:
        return len(self.theirs)

    @property
    def base_size(self) -> int:
        return int(self.theirs.vocab_size)

    @property
    def vocabulary(self) -> dict[str, int]:
        pieces: dict[str, int] = self.theirs.get_vocab()
        return pieces

    def encode(self, text: str, special: bool = False) -> list[int]:
        return list(self.theirs(text, add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str, special: bool = False) -> list[int]:
        return list(self.theirs(text)["input_ids"])

    def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **kwargs), special=True)

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        if self.chat_template is None:
            raise ModelError("The model has no chat template; give it a plain prompt instead of messages.")
        return str(
            self.theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        )

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuing: bool = False) -> str:
        listed = list(ids)
        return str(self.theirs.decode(listed, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def stream(self, skip_special: bool = True, continuing: bool = False) -> SlowStream:
        return SlowStream(self, skip_special)

    def id_to_piece(self, token: int) -> str:
        return self.decode([token], skip_special=False)

    def id_to_bytes(self, token: int) -> bytes:
        return self.id_to_piece(token).encode()

    def token_to_id(self, piece: str) -> int | None:
        found: int | None = self.theirs.get_vocab().get(piece)
        return found

    def is_special(self, token: int) -> bool:
        return token in self._special

    def save(self, folder: Path) -> None:
        self.theirs.save_pretrained(folder)


class SlowStream:
    """Decodes all that was pushed each time, and releases what has become certain."""

    def __init__(self, tokenizer: SlowTokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._ids: list[int] = []
        self._said = ""

    def push(self, ids: Iterable[int]) -> str:
        self._ids += ids
        text = self._text()
        if text.endswith("�") or not text.startswith(self._said):
            return ""  # an unfinished character, or a word that the next piece may still change
        return self._release(text)

    def flush(self) -> str:
        text = self._text()
        return self._release(text) if text.startswith(self._said) else ""

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip)

    def _release(self, text: str) -> str:
        new, self._said = text[len(self._said) :], text
        return new


def _adds_bos(theirs: Any) -> bool:
    return theirs.bos_token_id is not None and list(theirs("")["input_ids"])[:1] == [theirs.bos_token_id]


def _template(theirs: Any) -> str | None:
    template = getattr(theirs, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
