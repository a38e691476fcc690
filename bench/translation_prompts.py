"""Passages to train a translator's drafter on: a few sentences each, from instruction data.

    python bench/translation_prompts.py alpaca.json gsm8k_train.jsonl … --out passages.jsonl
    python bench/translation_prompts.py --through EN_FR --answers DRAFTER/training/answers.jsonl --out french.jsonl

FILES are JSON lists or JSONL; every text of a record is used (questions and answers), but no code: a paragraph with
few letters or with code's brackets is left out. A passage is 1 to 4 sentences and at most `--longest` characters. The
second form makes sources of the other direction: the answers of `outrider train` for the model EN_FR, which are its
plain translations. The same files and seed give the same passages. Evaluation sets must not be among the files;
`outrider train --exclude` leaves their prompts out too.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIELDS = ("instruction", "input", "output", "response", "question", "answer", "prompt", "text", "content")
LETTERS = 0.7  # share of letters and spaces in a paragraph of prose


def texts(value: Any) -> Iterator[str]:
    """The strings of a record, in its own order."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, str):
                if name in FIELDS:
                    yield inner
            else:
                yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)


def paragraphs(text: str) -> Iterator[str]:
    text = re.sub(r"```.*?(```|$)", "\n", text, flags=re.S)  # code
    text = re.sub(r"<<.*?>>", "", text)  # GSM8K's calculator
    for line in text.split("\n"):
        line = " ".join(line.split())
        prose = sum(c.isalpha() or c.isspace() for c in line)
        if line.count(" ") >= 3 and prose >= LETTERS * len(line) and not re.search(r"[{}<>;=_]|\w\(\w*\)", line):
            yield line


def passages(text: str, longest: int, rng: random.Random) -> Iterator[str]:
    """Runs of sentences, of 1 to 4 as drawn."""
    for paragraph in paragraphs(text):
        held, room = "", rng.randint(1, 4)
        for sentence in re.split(r"(?<=[.!?])\s+", paragraph):
            if held and (not room or len(held) + len(sentence) >= longest):
                yield held
                held, room = "", rng.randint(1, 4)
            held, room = f"{held} {sentence}".strip(), room - 1
        if held:
            yield held


def read_records(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        records: list[Any] = json.loads(text)
        return records
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def made(files: list[Path], longest: int, seed: int) -> list[tuple[str, str]]:
    """(category, passage), shuffled, each once."""
    rng, found = random.Random(seed), dict[str, str]()
    for path in files:
        for record in read_records(path):
            for text in texts(record):
                for passage in passages(text, longest, rng):
                    if len(passage) <= longest:
                        found.setdefault(passage, path.stem)
    pairs = [(kind, passage) for passage, kind in found.items()]
    rng.shuffle(pairs)
    return pairs


def answered(folder: Path, answers: Path) -> Iterator[tuple[str, str]]:
    """The texts of a model's answers, which `outrider train` has written; unfinished ones are left out."""
    from outrider.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder)
    for answer in read_records(answers)[1:]:  # the first line is a header
        if answer["answer"] and answer["answer"][-1] in checkpoint.config.eos_ids:
            yield answer["kind"], checkpoint.tokenizer.decode(answer["answer"][:-1]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="instruction data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--longest", type=int, default=400, help="characters of a passage")
    parser.add_argument("--limit", type=int, default=0, help="passages; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--through", type=Path, help="a model that has translated passages")
    parser.add_argument("--answers", type=Path, help="its answers, as `outrider train` writes them")
    given = parser.parse_args()
    if given.through:
        found = list(answered(given.through, given.answers))
    else:
        found = made(given.files, given.longest, given.seed)
    pairs = [(kind, passage) for kind, passage in found[: given.limit or None] if passage]
    with open(given.out, "w", encoding="utf-8") as file:
        for kind, passage in pairs:
            file.write(json.dumps({"category": kind, "turns": [passage]}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
