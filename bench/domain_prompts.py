"""Prompts of four kinds of text that no shipped head was trained on: German, legal text, SQL dialects, a code base.

    python bench/domain_prompts.py --texts TEXTS --code src/outrider --out FOLDER [--count 600]

TEXTS is the folder of `training_prompts.py` (German); legal text is that of the licences that Debian installs; SQL is
that of PostgreSQL's catalogue and extensions (Debian's postgresql), asked for in other dialects; the code base is this
project's own. Each FOLDER/NAME.jsonl is in random order, so that its end is held out from its beginning.
The same texts and seed give the same prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

from code_prompts import about, read
from training_prompts import german_sentences

LICENCES, STATEMENTS = Path("/usr/share/common-licenses"), Path("/usr/share/postgresql")
GERMAN = (
    "Erkläre den folgenden Satz in einfachen Worten: {}",
    "Formuliere den Satz höflicher: {}",
    "Schreibe einen kurzen Absatz, der mit diesem Satz beginnt: {}",
    "Was meint jemand, der sagt: „{}“?",
    "Schreibe eine kurze E-Mail auf Deutsch, in der dieser Gedanke vorkommt: {}",
    "Nenne drei Fragen, die sich aus diesem Satz ergeben: {}",
)
LEGAL = (
    "Explain this clause to someone without legal training:\n\n{}",
    "List the obligations that this clause creates:\n\n{}",
    "Rewrite this clause for a contract between a supplier and a customer:\n\n{}",
    "Which risks does this clause carry for the licensee?\n\n{}",
    "Draft a shorter clause with the same effect:\n\n{}",
)
SQL = (
    "Rewrite this PostgreSQL statement in Oracle's dialect (PL/SQL):\n\n{}",
    "Rewrite this PostgreSQL statement in Transact-SQL for SQL Server:\n\n{}",
    "Rewrite this PostgreSQL statement for MySQL 8:\n\n{}",
    "Write an Oracle package specification that offers what this PostgreSQL statement defines:\n\n{}",
    "Write a T-SQL stored procedure that uses what this statement defines:\n\n{}",
    "Explain this PostgreSQL statement, clause by clause:\n\n{}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rnd = random.Random(options.seed)
    sentences = sorted(set(german_sentences(options.texts)))
    functions = [f for path in sorted(options.code.rglob("*.py")) for f in read(path)]
    made = {
        "german": [rnd.choice(GERMAN).format(s) for s in sentences],
        "legal": [rnd.choice(LEGAL).format(c) for c in clauses() for _ in range(2)],
        "sql": [rnd.choice(SQL).format(statement) for statement in statements() for _ in range(2)],
        "codebase": [prompt[1] for f in functions for _ in range(2) if (prompt := about(f, rnd))],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in made.items():
        unique = sorted(set(prompts))
        chosen = rnd.sample(unique, min(len(unique), options.count))
        lines = [json.dumps({"category": name, "turns": [prompt]}, ensure_ascii=False) for prompt in chosen]
        (options.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(chosen):,} of {len(unique):,} prompts")


def clauses() -> list[str]:
    """Paragraphs of 30 to 160 words."""
    texts = sorted({path.read_text("utf-8", "replace") for path in LICENCES.iterdir()})
    found = {" ".join(p.split()) for text in texts for p in re.split(r"\n\s*\n", text)}
    return sorted(p for p in found if 30 <= len(p.split()) <= 160)


def statements() -> list[str]:
    """SQL statements of 60 to 600 characters, without comments."""
    found = set[str]()
    for path in STATEMENTS.rglob("*.sql"):
        text = re.sub(r"(?m)^\\.*$|--.*$|(?s:/\*.*?\*/)", "", path.read_text("utf-8", "replace"))
        found |= {each.strip() + ";" for each in re.split(r";\s*\n", text)}
    return sorted(each for each in found if 60 <= len(each) <= 600)


if __name__ == "__main__":
    main()
