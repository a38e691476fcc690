"""Marian's tokenizer (opus-mt) from its own files: two SentencePiece models and one vocabulary of both.

A source is cut into pieces by `source.spm`, an answer by `target.spm`; `vocab.json` has the ids of all pieces.
Promise: the ids are those of transformers' MarianTokenizer, which needs the package sentencepiece; only which of two
equally likely cuts is taken may differ. `open_marian` returns None for a folder in another form, and raises a sentence
for a damaged file. It knows files and pieces, not models.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer as Core, decoders, models, normalizers, pre_tokenizers

from ..errors import ModelError
from .tokenizer import Tokenizer, read_json

SOURCE, TARGET, VOCABULARY = "source.spm", "target.spm", "vocab.json"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_UNKNOWN, _END, _PADDING = "<unk>", "</s>", "<pad>"
_UNMATCHED = "\0"  # stands for unknown pieces where texts are cut, so that a text with "<unk>" has no such piece
_LANGUAGE = re.compile(">>.+<<")  # of the answer, before the source, where a model knows several
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6  # kinds of pieces
_UNIGRAM = 1  # kind of model


def open_marian(folder: Path) -> MarianTokenizer | None:
    """The tokenizer of a folder; None: its files are of another form, which transformers may read."""
    paths = [folder / name for name in (SOURCE, TARGET, VOCABULARY)]
    if not all(path.is_file() for path in paths) or read_json(folder / _SETTINGS[0]).get("separate_vocabs"):
        return None
    vocabulary = read_json(folder / VOCABULARY)
    if sorted(vocabulary.values()) != list(range(len(vocabulary))) or not {_UNKNOWN, _END} <= vocabulary.keys():
        return None
    pieces = [read_pieces(path) for path in paths[:2]]
    if not all(each.plain for each in pieces):
        return None
    return MarianTokenizer(folder, vocabulary, *(each.core() for each in pieces))


class MarianTokenizer(Tokenizer):
    """Ids of sources and of answers, which are cut into pieces in different ways."""

    def __init__(self, folder: Path, vocabulary: dict[str, int], source: Core, target: Core) -> None:
        names = Core(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
        names.decoder = decoders.Metaspace()
        special = [name for name in (_UNKNOWN, _END, _PADDING) if name in vocabulary]
        names.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
        super().__init__(names, eos_id=vocabulary[_END])
        self.folder, self.ids, self.source, self.target = folder, vocabulary, source, target
        self.unknown = vocabulary[_UNKNOWN]

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a source without its end: the answer's language, if the text begins with one, and the pieces."""
        language = _LANGUAGE.match(text)
        first = [self.ids.get(language[0], self.unknown)] if language else []
        return first + self._cut(self.source, _LANGUAGE.sub("", text), special)

    def encode_answer(self, text: str) -> list[int]:
        return self._cut(self.target, text, special=False)

    def encode_prompt(self, text: str, special: bool = False) -> list[int]:
        return [*self.encode(text, special), self.ids[_END]]

    def _cut(self, core: Core, text: str, special: bool) -> list[int]:
        """An unknown piece may be one of the other language's, which the vocabulary has too."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        names = [name for name in (_END, _PADDING, _UNKNOWN) if special and name in text]
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        found: list[int] = []
        for part in parts:
            pieces = [part] if part in names else core.encode(part, add_special_tokens=False).tokens
            found += [self.ids.get(piece, self.unknown) for piece in pieces]
        return found

    def save(self, folder: Path) -> None:
        """Copy the files that `open_marian`, and transformers, read."""
        for name in (SOURCE, TARGET, VOCABULARY, *_SETTINGS):
            if (self.folder / name).is_file() and self.folder.resolve() != folder.resolve():
                shutil.copyfile(self.folder / name, folder / name)


# ------------------------------------------------------------ SentencePiece's files


@dataclass
class Pieces:
    """What a SentencePiece model says: pieces with their log-probabilities, and how a text is prepared."""

    scores: dict[str, float] = field(default_factory=dict)  # of normal pieces
    plain: bool = True  # a unigram model without pieces of other kinds, on texts that begin with a space
    rules: bytes = b""  # how characters are normalised, compiled

    def core(self) -> Core:
        """Cuts a text into the likeliest pieces; characters without one stay together as an unknown piece."""
        core = Core(models.Unigram([(_UNMATCHED, 0.0), *self.scores.items()], 0, False))
        ready = [normalizers.Precompiled(self.rules)] if self.rules else []
        core.normalizer = normalizers.Sequence([*ready, normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")])
        core.pre_tokenizer = pre_tokenizers.Metaspace()
        return core


def read_pieces(path: Path) -> Pieces:
    """From a SentencePiece model, which is a protobuf message."""
    try:
        return _pieces(path.read_bytes())
    except (OSError, ValueError, LookupError, struct.error, TypeError, AttributeError) as error:
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
