"""Training prompts that instruction data lacks: translation, summaries, prose, questions with and without passages.

    python bench/training_prompts.py --texts TEXTS --out made_prompts.jsonl

A drafter is only as good as the kinds of text it was trained on, and public instruction data has little of these five.
They are made from text that no evaluation set contains. TEXTS is a folder with the unpacked contents of (Debian
packages by `dpkg-deb -x`, a wheel by unzipping it):

- German: fortunes-de, debian-handbook, installation-guide-amd64, developers-reference-de
- English: gensim's wheel (300 news items, `lee_background.cor`, and a hundred articles of an encyclopedia,
  `enwiki-…-shortened.bz2`), anarchism

The same texts and seed give the same prompts.
"""

from __future__ import annotations

import argparse
import bz2
import html
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

TRANSLATE = (
    "Translate German to English: {}",
    "Translate German to English: {}",
    "Translate the following German sentence into English: {}",
    "Translate this to English:\n{}",
    'What does "{}" mean in English?',
)
SUMMARISE = (
    "Summarize: {}",
    "Summarize: {}",
    "Summarize the following text:\n{}",
    "Give a short summary of this article.\n\n{}",
    "{}\n\nSummarize the text above in a few sentences.",
)
QUESTIONS = (
    "Who is {}?",
    "What is {}?",
    "What is {} known for?",
    "When did {} begin?",
    "Where does {} come from?",
    "What is the meaning of {}?",
    "Who came up with {}?",
    "How many people know {}?",
    "what is the origin of {}",
    "when was {} first mentioned",
    "where is {} located",
    "who was the first to write about {}",
    "Why is {} important?",
    "What does {} have to do with {}?",
    "what is the difference between {} and {}",
)
PROSE = (
    "Write a short essay about {}.",
    "Explain {} to a child of ten.",
    "Compare {} and {}. What do they have in common?",
    "Write an email to a colleague in which you propose a talk about {}.",
    "Write a short story in which {} matters.",
    "Give arguments for and against {}.",
    "Make a list of five facts about {} and explain each in a sentence.",
    "Write the introduction of a blog post about {} and {}.",
    "You are a teacher. How would you begin a lesson on {}?",
    "Write a dialogue between two friends who disagree about {}.",
    "What would the world look like without {}?",
    "Describe the history of {} in three paragraphs.",
    "Imagine you are {}. Introduce yourself.",
    "What should a traveller know about {}?",
    "Write a poem about {}.",
    "Plan a week of learning about {}, day by day.",
    "What are common misconceptions about {}?",
    "Write a product description for a book about {}.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=3500, help="prompts of each kind, as far as there is text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rnd = random.Random(options.seed)
    german = sorted(set(german_sentences(options.texts)))
    articles = encyclopedia(options.texts)
    passages = [p for text in articles.values() for p in cut(text, 40, 220, rnd)]
    long = [p for text in essays(options.texts) for p in cut(text, 40, 220, rnd)]
    passages += news(options.texts) + some(long, len(passages) // 2, rnd)
    names = sorted({name for text in articles.values() for name in links(text)})
    made = {
        "translation": [rnd.choice(TRANSLATE).format(s) for s in some(german, options.each, rnd)],
        "summarization": [rnd.choice(SUMMARISE).format(p) for p in some(passages, options.each, rnd)],
        "qa": [question(rnd.choice(names), names, rnd) for _ in range(options.each)],
        "prose": [question(rnd.choice(names), names, rnd, PROSE) for _ in range(options.each)],
        "rag": [with_passages(articles, names, rnd) for _ in range(options.each)],
    }
    with open(options.out, "w", encoding="utf-8") as file:
        for category, prompts in made.items():
            for prompt in dict.fromkeys(prompts):
                file.write(json.dumps({"category": category, "turns": [prompt]}, ensure_ascii=False) + "\n")
            print(f"{category}: {len(set(prompts)):,} prompts")


def some(items: list[str], count: int, rnd: random.Random) -> list[str]:
    return rnd.sample(items, min(count, len(items)))


# ---------------------------------------------------------------- texts


def german_sentences(texts: Path) -> Iterator[str]:
    """Sentences of 4 to 45 words."""
    found = [p.read_text("utf-8", "replace") for p in sorted(texts.rglob("fortunes/de/*.u8"))]
    found += [without_tags(p) for p in sorted(texts.rglob("*.html")) if re.search(r"/(de|de-DE)/", str(p))]
    for text in found:
        for sentence in re.split(r"(?<=[.!?])\s+|\n%\n|\n\n", text):
            line = " ".join(sentence.split())
            letters = sum(c.isalpha() or c == " " for c in line)
            if 4 <= len(line.split()) <= 45 and letters > 0.85 * len(line) and line[0].isupper():
                yield line


def without_tags(path: Path) -> str:
    body = re.sub(r"(?s)<(script|style|pre).*?</\1>", " ", path.read_text("utf-8", "replace"))
    return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"</(p|li|h\d|td|dd|dt)>", "\n\n", body)))


def news(texts: Path) -> list[str]:
    return [line.strip() for p in sorted(texts.rglob("lee_background.cor")) for line in p.open(encoding="utf-8")]


def essays(texts: Path) -> list[str]:
    return [without_tags(p) for p in sorted(texts.rglob("anarchism/html/*.html"))]


def encyclopedia(texts: Path) -> dict[str, str]:
    """Title -> text; links stay marked, as [[name]]."""
    found: dict[str, str] = {}
    for path in sorted(texts.rglob("enwiki*shortened.bz2")):
        with bz2.open(path, "rt", encoding="utf-8") as file:
            pages = re.findall(r"(?s)<title>([^<]+)</title>.*?<text[^>]*>(.*?)</text>", file.read())
        found |= {title: plain(text) for title, text in pages if len(text) > 3000}
    return found


def plain(text: str) -> str:
    """An article without tables, notes and markup."""
    text = html.unescape(text)
    text = re.sub(r"(?s)<ref.*?(</ref>|/>)|<!--.*?-->|\{\|.*?\|\}", "", text)
    for _ in range(4):
        text = re.sub(r"\{\{[^{}]*\}\}", "", text)
    text = re.sub(r"\[\[(?:File|Image|Category)[^\]]*(?:\[\[[^\]]*\]\][^\]]*)*\]\]", "", text)
    text = re.sub(r"\[\[[^\]|]*\|([^\]]*)\]\]", r"[[\1]]", text)
    return re.sub(r"(?m)'{2,}|^[=*#:;|!].*$|<[^>]+>", "", text)


def links(text: str) -> list[str]:
    return [name for name in re.findall(r"\[\[([^\[\]\n]{3,40})\]\]", text) if name[0].isalpha()]


def cut(text: str, least: int, most: int, rnd: random.Random) -> list[str]:
    """Groups of whole paragraphs, each up to a random length in words."""
    found, so_far, limit = [], [], rnd.randint(least, most)
    for paragraph in text.replace("[[", "").replace("]]", "").split("\n\n"):
        words = paragraph.split()
        if len(words) < 12:
            continue
        so_far += words[:most]
        if len(so_far) >= limit:
            found.append(" ".join(so_far[:most]))
            so_far, limit = [], rnd.randint(least, most)
    return found


# ---------------------------------------------------------------- prompts


def question(name: str, names: list[str], rnd: random.Random, forms: tuple[str, ...] = QUESTIONS) -> str:
    form = rnd.choice(forms)
    return form.format(*(name, rnd.choice(names))[: form.count("{}")])


def with_passages(articles: dict[str, str], names: list[str], rnd: random.Random) -> str:
    """One to four passages, most of them on one subject, and a question about a name in one of them."""
    title = rnd.choice(sorted(articles))
    pieces = [(title, p) for p in cut(articles[title], 40, 90, rnd)] or [(title, title)]
    other = rnd.choice(sorted(articles))
    pieces = rnd.sample(pieces, min(len(pieces), rnd.randint(1, 3)))
    pieces += [(other, p) for p in cut(articles[other], 40, 90, rnd)[:1] if rnd.random() < 0.5]
    text = "\n".join(f"{name} {piece}" for name, piece in pieces)
    linked = [name for name in links(articles[title]) if name in text] or [title]
    return f"{text}\n{question(rnd.choice(linked), names, rnd)}"


if __name__ == "__main__":
    main()
