"""Text to ids and back, whole or as a stream.

Promise: `decode` and `Stream` give the same text however the ids are split, a stream never shows half a character,
and its work per token is bounded: every token is a fixed string of bytes, and only an unfinished character (at most
three bytes) is kept. This file knows text and ids; it knows nothing of models.
"""

from __future__ import annotations

import codecs
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core

from ..errors import ModelError
from . import gguf_tokenizer
from .config import gguf_eos_ids
from .gguf_file import GGUF
from .template import ChatTemplate


class Tokenizer:
    """A model's tokenizer with its chat template."""

    def __init__(
        self,
        core: Core,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core, self._lock = core, threading.Lock()
        self._ends = {"bos_token": bos_id, "eos_token": eos_id}  # as chat templates call them
        self._special = {i for i, token in core.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self._style, self._strip = _decoder(core)
        self._template: ChatTemplate | None = None
        self.bos_id, self.eos_id, self.add_bos = bos_id, eos_id, add_bos and bos_id is not None
        self.eos_ids = eos_ids if eos_id is None else eos_ids | {eos_id}
        self.chat_template = chat_template

    @staticmethod
    def from_folder(folder: Path) -> Tokenizer:
        """From tokenizer.json and what lies beside it."""
        return _from_folder(folder)

    @staticmethod
    def from_gguf(file: GGUF) -> Tokenizer:
        """From a GGUF header."""
        data = file.metadata
        bos, eos = (data.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
        template, add = data.get("tokenizer.chat_template"), gguf_tokenizer.adds_bos(data)
        return Tokenizer(gguf_tokenizer.build(data), bos, eos, gguf_eos_ids(data), add, template)

    def save(self, folder: Path) -> None:
        """Files from which `from_folder`, and transformers, make the same tokenizer."""
        with self._lock:
            self._core.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.add_bos}
        settings |= self._special_texts() | {"chat_template": self.chat_template}
        text = json.dumps({name: value for name, value in settings.items() if value is not None}, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """How many tokens have a text; a model's embedding may have more rows."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    @property
    def base_size(self) -> int:
        """Without the tokens that were added to the vocabulary, which some models have no embedding for."""
        return int(self._core.get_vocab_size(with_added_tokens=False))

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every piece with its id."""
        pieces: dict[str, int] = self._core.get_vocab(with_added_tokens=True)
        return pieces

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text, without BOS. Control tokens in it are plain text unless `special` says to parse them."""
        text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate has no bytes to encode
        with self._lock:  # the switch belongs to the shared core
            self._core.encode_special_tokens = not special
            ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str, special: bool = False) -> list[int]:
        """As `encode`, with BOS in front where this model's texts begin with it."""
        start = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        return start + self.encode(text, special)

    def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer. The template writes its own BOS."""
        return self.encode(self.render_chat(messages, **kwargs), special=True)

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as the text the model was trained on."""
        if self.chat_template is None:
            raise ModelError("The model has no chat template; give it a plain prompt instead of messages.")
        if self._template is None:
            self._template = ChatTemplate(self.chat_template, self._special_texts())
        return self._template.render(messages, add_generation_prompt, **kwargs)

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuing: bool = False) -> str:
        """Text of ids. `continuing`: they follow other text, so a leading space is theirs and stays."""
        stream = Stream(self, skip_special, continuing)
        return stream.push(ids) + stream.flush()

    def stream(self, skip_special: bool = True, continuing: bool = False) -> Stream:
        return Stream(self, skip_special, continuing)

    def id_to_piece(self, token: int) -> str:
        """One token as readable text, special ones too; bytes of an unfinished character become U+FFFD."""
        return self.id_to_bytes(token).decode("utf-8", "replace")

    def id_to_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text; none for an id without a text."""
        known = self._bytes.get(token)
        if known is None:
            piece = self._core.id_to_token(token)
            known = self._bytes[token] = b"" if piece is None else _bytes_of(piece, self._style)
        return known

    def token_to_id(self, piece: str) -> int | None:
        found: int | None = self._core.token_to_id(piece)
        return found

    def is_special(self, token: int) -> bool:
        return token in self._special

    @property
    def strip(self) -> int:
        """How many leading spaces of a whole text are an artefact of the tokenizer."""
        return self._strip

    def _special_texts(self) -> dict[str, str]:
        texts = {name: None if i is None else self._core.id_to_token(i) for name, i in self._ends.items()}
        return {name: text for name, text in texts.items() if text is not None}


class Stream:
    """Turns ids into text as they come; what is pushed and flushed adds up to `decode` of all of them."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continuing: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # keeps the bytes of an unfinished character
        self._strip = 0 if continuing else tokenizer.strip

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        t = self._tokenizer
        kept = [t.id_to_bytes(i) for i in ids if not (self._skip and t.is_special(i))]
        return self._stripped(self._utf8.decode(b"".join(kept)))

    def flush(self) -> str:
        """What was held back: an unfinished character, as U+FFFD."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text, self._strip = text[1:], self._strip - 1
        return text


# --- how a tokenizer spells bytes ---------------------------------------------------------------------------------

_BYTE_LEVEL, _SPACED, _WORDS = "byte level", "spaced", "words"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 upwards."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _decoder(core: Core) -> tuple[str, int]:
    """How pieces become text, and how many leading spaces of the whole are stripped."""
    if core.decoder is None:
        return _WORDS, 1
    state = json.loads(core.decoder.__getstate__())
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    if "ByteLevel" in steps:
        return _BYTE_LEVEL, 0
    if "Metaspace" in steps:
        return _SPACED, int(steps["Metaspace"].get("prepend_scheme", "always") != "never")
    if "Replace" in steps or "ByteFallback" in steps:
        return _SPACED, int(steps.get("Strip", {}).get("start", 0))
    if steps.keys() <= {"Fuse"}:
        return _SPACED, 0
    raise ModelError(f"The tokenizer's decoder ({', '.join(steps)}) is not of a kind that Outrider knows.")


def _bytes_of(piece: str, style: str) -> bytes:
    if style == _BYTE_LEVEL:
        known = [_ALPHABET.get(c) for c in piece]
        return piece.encode() if None in known else bytes(b for b in known if b is not None)
    if style == _WORDS:
        return b" " + piece.encode()
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's byte fallback
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()


# --- Hugging Face folders -----------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        only = " (its tokenizer.model must be converted: save it once with transformers' AutoTokenizer)"
        raise ModelError(
            f"{folder} has no tokenizer.json{only if (folder / 'tokenizer.model').exists() else ''}; "
            "put the model's tokenizer files into it."
        )
    try:
        core = Core.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise ModelError(f"{path} cannot be read ({error}); delete it and download it again.") from error
    settings = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    named = {name: _text(settings.get(f"{name}_token")) for name in ("bos", "eos")}
    ids = {name: None if text is None else core.token_to_id(text) for name, text in named.items()}
    core.add_special_tokens([text for name, text in named.items() if text is not None and ids[name] is not None])
    template, add = _chat_template(folder, settings), _adds_bos(core, settings, ids["bos"])
    return Tokenizer(core, ids["bos"], ids["eos"], add_bos=add, chat_template=template)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); delete it and download it again.") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} does not hold a JSON object; delete it and download it again.")
    return data


def _text(token: Any) -> str | None:
    """Special tokens are written as a string, or as an object with the string in `content`."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def _adds_bos(core: Core, settings: dict[str, Any], bos: int | None) -> bool:
    said = settings.get("add_bos_token")
    if isinstance(said, bool):
        return said
    return bos is not None and core.encode("", add_special_tokens=True).ids[:1] == [bos]


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
