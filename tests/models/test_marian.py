"""Marian's tokenizer from its own files: the likeliest pieces, sources and answers apart, files that are refused."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from outrider.errors import ModelError
from outrider.models import pieces
from outrider.models.marian import MarianTokenizer, open_marian

from support.examples import examples

ENGLISH = {"▁": -4.0, "▁the": -1.5, "▁t": -3.0, "he": -3.2, "▁cat": -2.5, "▁c": -4.0, "at": -3.5, "s": -3.0}
ENGLISH |= {c: -6.0 - i / 8 for i, c in enumerate("theca.")}
FRENCH = {"▁": -4.0, "▁le": -1.5, "▁chat": -2.5, "▁ch": -4.1, "at": -3.6, "s": -2.0, "é": -5.0}
FRENCH |= {c: -6.0 - i / 8 for i, c in enumerate("lechat.")}
IDS = {piece: i for i, piece in enumerate(["</s>", "<unk>", *dict.fromkeys([*ENGLISH, *FRENCH]), ">>fr<<", "<pad>"])}


def varint(value: int) -> bytes:
    low = value & 127
    return bytes([low]) if value < 128 else bytes([low | 128]) + varint(value >> 7)


def message(*fields: tuple[int, int | float | bytes]) -> bytes:
    made = b""
    for number, value in fields:
        if isinstance(value, bytes):
            made += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, float):
            made += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            made += varint(number << 3) + varint(value)
    return made


def model(scores: dict[str, float], kind: int = 1, others: dict[str, int] | None = None, prefix: int = 1) -> bytes:
    """A SentencePiece model: control pieces, pieces, how it was trained, how texts are prepared."""
    pieces = [message((1, b"<unk>"), (2, 0.0), (3, 2)), message((1, b"</s>"), (2, 0.0), (3, 3))]
    pieces += [message((1, piece.encode()), (2, score)) for piece, score in scores.items()]
    pieces += [message((1, piece.encode()), (2, 0.0), (3, kind)) for piece, kind in (others or {}).items()]
    settings = message((1, b"identity"), (3, prefix))
    return message(*((1, piece) for piece in pieces), (2, message((3, kind), (4, 600))), (3, settings))


def folder(at: Path, source: bytes | None = None, **settings: Any) -> Path:
    at.mkdir(exist_ok=True)
    (at / "source.spm").write_bytes(model(ENGLISH) if source is None else source)
    (at / "target.spm").write_bytes(model(FRENCH))
    (at / "vocab.json").write_text(json.dumps(IDS), encoding="utf-8")
    (at / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en"} | settings), encoding="utf-8")
    return at


@pytest.fixture
def tokenizer(tmp_path: Path) -> MarianTokenizer:
    found = open_marian(folder(tmp_path / "opus"))
    assert found is not None
    return found


def likeliest(text: str, scores: dict[str, float]) -> list[str]:
    """Every way to cut a text, by hand; neighbours without a piece are one unknown piece."""
    text = "▁" + "▁".join(text.split()) if text.split() else ""
    unknown = min(scores.values()) - 10

    @cache
    def best(at: int) -> tuple[float, tuple[str, ...]]:
        if at == len(text):
            return 0.0, ()
        ways = [
            (scores[text[at:end]], text[at:end], end) for end in range(at + 1, len(text) + 1) if text[at:end] in scores
        ]
        ways += [] if any(end == at + 1 for *_, end in ways) else [(unknown, text[at], at + 1)]
        return max((score + best(end)[0], (piece, *best(end)[1])) for score, piece, end in ways)

    pieces: list[str] = []
    for piece in best(0)[1]:
        if pieces and piece not in scores and pieces[-1][-1] not in scores and piece != "▁":
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces


@given(st.text(alphabet="thecats. éx", max_size=24))
@examples(60)
def test_a_text_is_cut_into_its_likeliest_pieces(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    at = tmp_path_factory.getbasetemp() / "marian"
    tokenizer = open_marian(at if at.is_dir() else folder(at))
    assert tokenizer is not None
    wanted = [IDS.get(piece, IDS["<unk>"]) for piece in likeliest(text, ENGLISH)]
    assert tokenizer.encode(text) == wanted
    assert tokenizer.encode_prompt(text) == [*wanted, IDS["</s>"]]
    assert tokenizer.encode_answer(text) == [IDS.get(piece, IDS["<unk>"]) for piece in likeliest(text, FRENCH)]


def test_sources_answers_and_languages(tokenizer: MarianTokenizer) -> None:
    assert tokenizer.encode("the cats") == [IDS[piece] for piece in ("▁the", "▁cat", "s")]
    assert tokenizer.encode_answer("le chats") == [IDS[piece] for piece in ("▁le", "▁chat", "s")]
    assert tokenizer.encode_prompt(">>fr<< the cat") == [IDS[p] for p in (">>fr<<", "▁the", "▁cat", "</s>")]
    assert tokenizer.encode("é") == [IDS["▁"], IDS["é"]]  # a piece of the answer's language only
    assert tokenizer.encode("x") == [IDS["▁"], IDS["<unk>"]]
    assert tokenizer.decode(tokenizer.encode_answer("le chats.")) == "le chats."
    assert tokenizer.decode([IDS["▁le"], IDS["<pad>"], IDS["</s>"]]) == "le"
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.add_bos) == (0, None, False)


def test_control_tokens_in_a_text_are_text(tokenizer: MarianTokenizer) -> None:
    assert IDS["</s>"] not in tokenizer.encode("the</s>cat <unk>")
    assert tokenizer.encode("the</s>", special=True) == [IDS["▁the"], IDS["</s>"]]


def test_a_copy_is_the_same(tokenizer: MarianTokenizer, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    tokenizer.save(tmp_path / "copy")
    copy = open_marian(tmp_path / "copy")
    assert copy is not None
    assert copy.encode_prompt("the cats.") == tokenizer.encode_prompt("the cats.")
    assert copy.vocabulary == tokenizer.vocabulary == IDS


OTHERS: dict[str, dict[str, Any]] = {
    "merges": {"source": model(ENGLISH, kind=2)},
    "bytes": {"source": model(ENGLISH, others={"<0x41>": 6})},
    "own pieces": {"source": model(ENGLISH, others={"@@": 4})},
    "no space in front": {"source": model(ENGLISH, prefix=0)},
    "two vocabularies": {"separate_vocabs": True},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_forms_are_left_to_transformers(case: str, tmp_path: Path) -> None:
    assert open_marian(folder(tmp_path / "opus", **OTHERS[case])) is None


def test_a_folder_without_these_files_or_with_holes_in_its_ids(tmp_path: Path) -> None:
    assert open_marian(tmp_path) is None
    made = folder(tmp_path / "opus")
    (made / "vocab.json").write_text(json.dumps(IDS | {"<pad>": 999}), encoding="utf-8")
    assert open_marian(made) is None


@pytest.mark.parametrize("data", [b"", b"nonsense", model(ENGLISH)[:-3], message((1, message((2, 1.0))))])
def test_damaged_files_are_named(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"source\.spm is not a SentencePiece model \(.*\); download it again\."):
        open_marian(folder(tmp_path / "opus", data))


def test_numbers_of_any_length() -> None:
    for value in (0, 127, 128, 300, 2**40):
        assert pieces._varint(varint(value) + b"\x05", 0) == (value, len(varint(value)))
