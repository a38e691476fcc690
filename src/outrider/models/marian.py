"""Marian's tokenizer (opus-mt) from its own files: two SentencePiece models and one vocabulary of both.

A source is cut into pieces by `source.spm`, an answer by `target.spm`; `vocab.json` has the ids of all pieces.
Promise: the ids are those of transformers' MarianTokenizer, which needs the package sentencepiece; only which of two
equally likely cuts is taken may differ. `open_marian` returns None for a folder in another form, and raises a sentence
for a damaged file. It knows files and pieces, not models.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tokenizers import Tokenizer as Core

from .pieces import PieceTokenizer, read_pieces
from .tokenizer import read_json

SOURCE, TARGET, VOCABULARY = "source.spm", "target.spm", "vocab.json"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_UNKNOWN, _END, _PADDING = "<unk>", "</s>", "<pad>"
_LANGUAGE = re.compile(">>.+<<")  # of the answer, before the source, where a model knows several


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


class MarianTokenizer(PieceTokenizer):
    """Ids of sources and of answers, which are cut into pieces in different ways."""

    def __init__(self, folder: Path, vocabulary: dict[str, int], source: Core, target: Core) -> None:
        control = [name for name in (_END, _PADDING, _UNKNOWN) if name in vocabulary]
        super().__init__(vocabulary, source, _UNKNOWN, _END, control)
        self.folder, self.target = folder, target

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a source without its end: the answer's language, if the text begins with one, and the pieces."""
        language = _LANGUAGE.match(text)
        first = [self.ids.get(language[0], self.unknown)] if language else []
        return first + super().encode(_LANGUAGE.sub("", text), special)

    def encode_answer(self, text: str) -> list[int]:
        return self._cut(self.target, text, special=False)

    def save(self, folder: Path) -> None:
        """Copy the files that `open_marian`, and transformers, read."""
        for name in (SOURCE, TARGET, VOCABULARY, *_SETTINGS):
            if (self.folder / name).is_file() and self.folder.resolve() != folder.resolve():
                shutil.copyfile(self.folder / name, folder / name)
