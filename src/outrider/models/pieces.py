"""Tokenizers that cut a text into its likeliest pieces (SentencePiece's unigram models), from its files or in GGUF.

Promise: the ids are those of the package sentencepiece, which is not needed; only which of two equally likely cuts is
taken may differ. Control tokens in a text are text unless they are asked for. What is damaged is a sentence. It knows
pieces and files, not models.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer as Core, decoders, models, normalizers, pre_tokenizers

from ..errors import MISREAD, ModelError, first_line
from .gguf_file import gguf_eos_ids
from .tokenizer import Tokenizer

_UNMATCHED = "\0"  # stands for unknown pieces where texts are cut, so that a text with "<unk>" has no such piece
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # kinds of pieces
_UNIGRAM = 1  # kind of model


class PieceTokenizer(Tokenizer):
    """Ids of a vocabulary for texts that `core` cuts into pieces."""

    def __init__(
        self, vocabulary: dict[str, int], core: Core, unknown: str, end: str, control: Sequence[str],
        own: Sequence[str] = (), silent: Sequence[str] = (), spaced: bool = True,
    ) -> None:  # fmt: skip
        """control: tokens that are no text, `unknown` and `end` among them; silent: others that no text has either.
        own: tokens wherever a text has them. spaced: a text begins with a space that is not its own."""
        names = Core(models.WordLevel(vocabulary, unk_token=unknown))
        names.decoder = decoders.Metaspace(prepend_scheme="always" if spaced else "never")
        names.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*control, *silent)])
        super().__init__(names, eos_id=vocabulary[end])
        self.source, self.unknown, self.end = core, vocabulary[unknown], vocabulary[end]
        self.names = {name: vocabulary[name] for name in (*control, *own)}
        self.ids = {token: i for token, i in vocabulary.items() if token not in self.names.keys() | set(silent)}
        self.control, self.own = tuple(control), tuple(own)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text without its end."""
        return self._cut(self.source, text, special)

    def encode_prompt(self, text: str, special: bool = False) -> list[int]:
        return [*self.encode(text, special), self.end]

    def save(self, folder: Path) -> None:
        raise ModelError(
            "The tokenizer of a GGUF file of this kind cannot be written; give the model's folder instead."
        )

    def _cut(self, core: Core, text: str, special: bool) -> list[int]:
        """Neighbours without a piece of their own are one unknown piece, which the vocabulary may have all the same."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        names = [name for name in (*self.own, *(self.control if special else ())) if name in text]
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        found: list[int] = []
        for part in parts:
            if part in names:
                found.append(self.names[part])
            else:
                pieces = core.encode(part, add_special_tokens=False).tokens
                found += [self.ids.get(piece, self.unknown) for piece in pieces]
        return found


def gguf_pieces(metadata: Mapping[str, Any]) -> PieceTokenizer:
    """The tokenizer of a T5 in a GGUF file."""
    data = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    if data.get("model") != "t5" or not data.get("tokens"):
        raise ModelError(f"The GGUF file's tokenizer is of the kind '{data.get('model')}', where T5 has its own.")
    tokens, kinds = data["tokens"], data.get("token_type") or [_NORMAL] * len(data["tokens"])
    if _BYTE in kinds:
        raise ModelError("The GGUF file's tokenizer has pieces of single bytes, which are not supported beside T5's.")
    typed = list(zip(tokens, data["scores"], kinds, strict=True))
    found = Pieces(
        {token: score for token, score, kind in typed if kind == _NORMAL},
        rules=bytes(value & 255 for value in data.get("precompiled_charsmap") or ()),
        spaced=bool(data.get("add_space_prefix", True)), squeezed=bool(data.get("remove_extra_whitespaces", True)),
    )  # fmt: skip
    unknown = next((token for token, _, kind in typed if kind == _UNKNOWN), tokens[data.get("unknown_token_id", 2)])
    control, own, silent = (
        [token for token, _, kind in typed if kind in some]
        for some in ((_UNKNOWN, _CONTROL), (_USER_DEFINED,), (_UNUSED,))
    )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        core = found.core()
    except Exception as error:  # `tokenizers` raises bare Exceptions for rules that it cannot read
        raise ModelError(
            f"The GGUF file's tokenizer is damaged ({first_line(error)}); download the file again."
        ) from error
    end = tokens[data["eos_token_id"]]
    tokenizer = PieceTokenizer(vocabulary, core, unknown, end, control, own, silent, found.spaced)
    tokenizer.eos_ids |= gguf_eos_ids(metadata)
    return tokenizer


# ------------------------------------------------------------ SentencePiece's files


@dataclass
class Pieces:
    """What a SentencePiece model says: pieces with their log-probabilities, and how a text is prepared."""

    scores: dict[str, float] = field(default_factory=dict)  # of normal pieces
    plain: bool = True  # a unigram model without pieces of other kinds, on texts that begin with a space
    rules: bytes = b""  # how characters are normalised, compiled
    spaced: bool = True  # a text begins with a space
    squeezed: bool = True  # spaces around it are dropped, repeated ones are one

    def core(self) -> Core:
        """Cuts a text into the likeliest pieces; characters without one stay together as an unknown piece."""
        core = Core(models.Unigram([(_UNMATCHED, 0.0), *self.scores.items()], 0, False))
        ready = [normalizers.Precompiled(self.rules)] if self.rules else []
        squeeze = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")] if self.squeezed else []
        core.normalizer = normalizers.Sequence([*ready, *squeeze])
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if self.spaced else "never")
        return core


def read_pieces(path: Path) -> Pieces:
    """From a SentencePiece model, which is a protobuf message."""
    try:
        return _pieces(path.read_bytes())
    except (OSError, struct.error, *MISREAD) as error:
        raise ModelError(f"{path} is not a SentencePiece model ({error}); download it again.") from error


def _pieces(data: bytes) -> Pieces:
    found = Pieces()
    for number, value in _fields(data):
        if number == 1:  # a piece: its text, log-probability and kind
            piece = dict(_fields(value))
            kind = piece.get(3, _NORMAL)
            found.plain &= kind not in (_USER_DEFINED, _BYTE)
            if kind == _NORMAL:
                found.scores[piece[1].decode()] = struct.unpack("<f", piece[2])[0]
        elif number == 2:  # training: the kind of model
            found.plain &= dict(_fields(value)).get(3, _UNIGRAM) == _UNIGRAM
        elif number == 3:  # normalisation: its rules; spaces at the start, repeated ones, and as "▁"
            settings = dict(_fields(value))
            found.rules = settings.get(2, b"")
            found.plain &= all(settings.get(switch, 1) for switch in (3, 4, 5))
    if not found.scores:
        raise ValueError("it has no pieces")
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: numbers as integers, others as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        length = {1: 8, 5: 4}.get(tag & 7)
        if length is None:
            if tag & 7 != 2:
                raise ValueError(f"byte {at} is no field")
            length, at = _varint(data, at)
        if at + length > len(data):
            raise ValueError("it is cut off")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    value = shift = 0
    while data[at] & 128:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1
