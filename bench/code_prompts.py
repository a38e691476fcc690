"""Training prompts about code: functions to write, complete, explain, test, edit and translate; SQL and shell.

    python bench/code_prompts.py --sources DIR [--sources DIR …] --out code_prompts.jsonl

A drafter for a coding model has to know what such a model is asked. Instruction data has a few thousand questions of
the kind "write a function that"; editors ask about code that is already there. Prompts are made from the functions in
Python (.py), Go (.go) and JavaScript (.js) files under the given folders: Python's own library, Go's (Debian's
golang-src) and packages of npm. SQL and shell prompts are combined from lists below. No evaluation set is read.

The same sources and seed give the same prompts.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = (
    "Python",
    "JavaScript",
    "TypeScript",
    "Java",
    "C++",
    "C",
    "Go",
    "Rust",
    "C#",
    "Ruby",
    "PHP",
    "Kotlin",
    "Swift",
)
WRITE = (
    "Write a {language} function that does the following: {what}",
    "Write a {language} function `{name}`. {what}",
    "Implement `{name}` in {language}: {what}",
    "Write a function to {lower}",
    "How would I write this in {language}? {what}",
    "{what}\n\nWrite it in {language}, with an example of how it is used.",
)
COMPLETE = ("{code}", "{code}", "Complete this function.\n\n{block}", "Finish the implementation:\n\n{block}")
EXPLAIN = (
    "Explain what this {language} code does.\n\n{block}",
    "What does this function do, step by step?\n\n{block}",
    "{block}\n\nWhat are the time and space complexity of this code?",
    "I do not understand this code. Can you explain it to a beginner?\n\n{block}",
    "What could go wrong in this function?\n\n{block}",
)
TEST = (
    "Write unit tests for this {language} function.\n\n{block}",
    "Write pytest tests that cover the edge cases of this function:\n\n{block}",
    "Which inputs should be tested here? Write the tests.\n\n{block}",
)
EDIT = (
    "Add a docstring and comments to this code, and change nothing else.\n\n{block}",
    "Rename the variables so that they say what they hold.\n\n{block}",
    "Add type hints to this function.\n\n{block}",
    "Refactor this function so that it is easier to read.\n\n{block}",
    "Add error handling to this code. Return the whole function.\n\n{block}",
    "Add logging to this function and keep its behaviour.\n\n{block}",
    "Make this code faster, if you can, and return the whole function.\n\n{block}",
    "Review this code, then write an improved version.\n\n{block}",
)
TRANSLATE = ("Translate this {language} code to {other}.\n\n{block}", "Rewrite this function in {other}:\n\n{block}")
FIX = ("This function has a bug. Find it and return the corrected function.\n\n{block}", "Fix this code:\n\n{block}")
SLIPS = (
    ("<=", "<"),
    ("<", "<="),
    ("==", "!="),
    (" + 1", ""),
    (" - 1", ""),
    (" and ", " or "),
    ("not ", ""),
    ("[0]", "[1]"),
)

TABLES = {
    "customers": ("id", "name", "city", "country", "email", "created_at"),
    "orders": ("id", "customer_id", "total", "status", "ordered_at"),
    "order_items": ("order_id", "product_id", "quantity", "unit_price"),
    "products": ("id", "name", "category", "price", "stock"),
    "employees": ("id", "name", "department_id", "salary", "hired_on", "manager_id"),
    "departments": ("id", "name", "budget", "location"),
    "students": ("id", "name", "year", "major"),
    "enrolments": ("student_id", "course_id", "grade", "term"),
    "flights": ("id", "origin", "destination", "departure", "arrival", "seats"),
    "payments": ("id", "order_id", "amount", "method", "paid_at"),
    "articles": ("id", "author", "title", "views", "published_at"),
    "sensors": ("id", "room", "reading", "recorded_at"),
}
QUERIES = (
    "List every {noun} whose {column} is above average.",
    "Find the three {noun}s with the highest {column}.",
    "Count the {noun}s by {column}, largest group first.",
    "Delete duplicates in {table} that share the same {column}, keeping the newest.",
    "Add an index that makes a search by {column} and {other} fast, and explain why.",
    "Update {table} so that {column} is never NULL.",
    "For each {column}, show the latest row of {table}.",
    "Show the running total of {column} ordered by {other}.",
    "Write a view that joins {table} with {second} and shows {column} and {far}.",
    "Which {noun}s have no row in {second}?",
    "Pivot {table} so that each {column} becomes a column.",
    "Return the median of {column} in {table}.",
)
DIALECTS = ("PostgreSQL", "MySQL", "SQLite", "SQL Server", "standard SQL")
SHELL_DO = (
    "find all files larger than {size} under {folder}", "delete files older than {days} days in {folder}",
    "count the lines of every {ext} file in {folder}", "rename all .{ext} files in {folder} to lower case",
    "replace '{word}' by '{other}' in every {ext} file of {folder}", "show the ten largest folders in {folder}",
    "back up {folder} to an archive with the date in its name",
    "print the lines of {folder}/app.log that contain '{word}' but not '{other}'",
    "watch {folder} and run a command when a .{ext} file changes", "kill the process that listens on port {port}",
    "retry a command up to {days} times with a pause that doubles",
    "read {folder}/users.csv and print its second column without duplicates",
    "download a list of URLs, {days} at a time",
    "check every minute whether port {port} answers and write to a log if not",
)  # fmt: skip
SHELL_ASK = (
    "Write a bash script to {do}.", "What is the shell command to {do}?", "How do I {do} on Linux?",
    "Write a Makefile target to {do}.", "Write a Python script to {do}.", "Write a one-liner to {do} and explain it.",
)  # fmt: skip
SOURCE_SHARES = {"Python": 70, "Go": 15, "JavaScript": 15}
TASK_SHARES = {"write": 30, "complete": 22, "explain": 14, "edit": 12, "test": 8, "fix": 5, "translate": 9}


@dataclass(frozen=True)
class Function:
    """One function of a source file."""

    language: str
    name: str
    code: str  # the whole function
    start: str  # what stands before its body: the signature, and what documents it
    what: str  # the first sentence of its documentation; empty where there is none

    @property
    def fence(self) -> str:
        return self.language.lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20_000, help="prompts about functions, as far as there are any")
    parser.add_argument("--each", type=int, default=1_500, help="SQL prompts, and shell prompts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rnd = random.Random(options.seed)
    functions = [f for folder in options.sources for path in sorted(folder.rglob("*")) for f in read(path)]
    chosen = draw(list({(f.language, f.name, f.what): f for f in functions}.values()), options.count, rnd)
    made: list[tuple[str, str]] = [prompt for f in chosen if (prompt := about(f, rnd))]
    made += [("sql", sql(rnd)) for _ in range(options.each)] + [("shell", shell(rnd)) for _ in range(options.each)]
    unique = {text: category for category, text in made}
    with open(options.out, "w", encoding="utf-8") as file:
        for text, category in unique.items():
            file.write(json.dumps({"category": category, "turns": [text]}, ensure_ascii=False) + "\n")
    for category in sorted(set(unique.values())):
        print(f"{category}: {sum(each == category for each in unique.values()):,} prompts")


# ---------------------------------------------------------------- functions


def draw(functions: list[Function], count: int, rnd: random.Random) -> list[Function]:
    """At most so many functions, and at most its share of each language."""
    found: list[Function] = []
    for language, share in SOURCE_SHARES.items():
        of_it = [f for f in functions if f.language == language]
        found += rnd.sample(of_it, min(len(of_it), count * share // 100))
    return found


def read(path: Path) -> list[Function]:
    """The functions of 5 to 40 lines in a file."""
    reader = READERS.get(path.suffix)
    if reader is None or "test" in path.name or not path.is_file():
        return []
    text = path.read_text("utf-8", "replace")
    try:
        found = list(reader(text))
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [f for f in found if 5 <= f.code.count("\n") + 1 <= 40 and len(f.code) < 1000]


def python(text: str) -> Iterator[Function]:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        documentation = ast.get_docstring(node) or ""
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        head = node.body[0].end_lineno if documentation else node.body[0].lineno - 1
        start = textwrap.dedent("\n".join(lines[node.lineno - 1 : head]))
        yield Function("Python", node.name, code, start, sentence(documentation))


def go(text: str) -> Iterator[Function]:
    for match in re.finditer(r"(?ms)^((?://[^\n]*\n)*)(func (?:\([^)]*\) )?(\w+)\([^\n]*\{)\n.*?^\}", text):
        comment = " ".join(line.strip("/ ") for line in match[1].splitlines())
        yield Function("Go", match[3], match[0], f"{match[1]}{match[2]}", sentence(comment))


def javascript(text: str) -> Iterator[Function]:
    pattern = r"(?ms)^(/\*\*(?:(?!\*/).)*\*/\n)?((?:export )?(?:default )?(?:async )?function (\w+)\([^\n]*\{)\n.*?^\}"
    for match in re.finditer(pattern, text):
        comment = " ".join(line.strip("/* ") for line in (match[1] or "").splitlines() if "@" not in line)
        yield Function("JavaScript", match[3], match[0], f"{match[1] or ''}{match[2]}", sentence(comment))


READERS: dict[str, Callable[[str], Iterator[Function]]] = {".py": python, ".go": go, ".js": javascript}


def sentence(documentation: str) -> str:
    """The first sentence, if it says something."""
    first = re.split(r"(?<=[.!?])\s|\n\n", documentation.strip(), maxsplit=1)[0]
    first = " ".join(first.split())
    return first if 4 <= len(first.split()) <= 40 else ""


# ---------------------------------------------------------------- prompts


def about(function: Function, rnd: random.Random) -> tuple[str, str] | None:
    """A category and a prompt about a function; None where what was drawn does not suit it."""
    task = rnd.choices(list(TASK_SHARES), weights=list(TASK_SHARES.values()))[0]
    if task in ("write", "complete") and not function.what:
        return None
    text = MAKERS[task](function, rnd)
    return None if text is None else (task, text)


def fenced(function: Function, code: str) -> str:
    return f"```{function.fence}\n{code}\n```"


def write(f: Function, rnd: random.Random) -> str:
    language = f.language if rnd.random() < 0.5 else rnd.choice(LANGUAGES)
    lower = f.what[0].lower() + f.what[1:]
    return rnd.choice(WRITE).format(language=language, name=f.name, what=f.what, lower=lower)


def complete(f: Function, rnd: random.Random) -> str:
    return rnd.choice(COMPLETE).format(code=f.start, block=fenced(f, f.start))


def with_code(forms: tuple[str, ...]) -> Callable[[Function, random.Random], str]:
    def make(f: Function, rnd: random.Random) -> str:
        other = rnd.choice([each for each in LANGUAGES if each != f.language])
        return rnd.choice(forms).format(block=fenced(f, f.code), language=f.language, other=other)

    return make


def fix(f: Function, rnd: random.Random) -> str | None:
    """The function with one slip in its body."""
    body = f.code[len(f.start) :]
    slips = [(old, new) for old, new in SLIPS if old in body]
    if not slips:
        return None
    old, new = rnd.choice(slips)
    at = rnd.choice([m.start() for m in re.finditer(re.escape(old), body)])
    broken = f.code[: len(f.start)] + body[:at] + new + body[at + len(old) :]
    return rnd.choice(FIX).format(block=fenced(f, broken))


MAKERS: dict[str, Callable[[Function, random.Random], str | None]] = {
    "write": write,
    "complete": complete,
    "explain": with_code(EXPLAIN),
    "edit": with_code(EDIT),
    "test": with_code(TEST),
    "fix": fix,
    "translate": with_code(TRANSLATE),
}


def sql(rnd: random.Random) -> str:
    table, second = rnd.sample(sorted(TABLES), 2)
    column, other = rnd.sample(TABLES[table][1:], 2)
    words = {"table": table, "second": second, "noun": table.rstrip("s").replace("_", " "), "column": column}
    ask = rnd.choice(QUERIES).format(**words, other=other, far=rnd.choice(TABLES[second][1:]))
    if rnd.random() < 0.5:
        return f"{ask} Use {rnd.choice(DIALECTS)}; the table {table} has the columns {', '.join(TABLES[table])}."
    schema = "\n".join(f"{name}({', '.join(TABLES[name])})" for name in (table, second))
    return f"Given these tables:\n\n{schema}\n\n{ask}"


def shell(rnd: random.Random) -> str:
    word, other = rnd.sample(("error", "timeout", "user", "debug", "retry", "warning", "admin", "token"), 2)
    words = {"word": word, "other": other, "ext": rnd.choice(("txt", "py", "log", "csv", "json", "md", "jpg"))}
    words |= {"folder": rnd.choice(("/var/log", "~/projects", "./src", "/srv/data", "the current folder", "/tmp"))}
    words |= {"size": rnd.choice(("100 MB", "1 GB", "10 MB")), "days": str(rnd.choice((3, 5, 7, 14, 30)))}
    do = rnd.choice(SHELL_DO).format(**words, port=rnd.choice((80, 443, 5432, 8000, 8080)))
    return rnd.choice(SHELL_ASK).format(do=do)


if __name__ == "__main__":
    main()
