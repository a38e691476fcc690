"""The README's picture: how many times as fast as plain decoding, by kind of text, from files in bench/results.

    python bench/chart.py --out docs/images/speed.svg "NAME=FILE.json:CONTENDER" …

It reads what `claims.py`, `heads.py` and `gpu.py` write and measures nothing. Kinds stand in the order of the files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outrider.measure.plots import Axes, Point, Series, bars

STYLE = (
    "<style>.bar.s0{fill:#2f6fd0}.bar.s1{fill:#7fb0ee}.bar.s2{fill:#e0913a}.grid{stroke:#8884;stroke-width:1}"
    ".level{stroke:#777;stroke-width:1.5;stroke-dasharray:4}.label{font:12px sans-serif;fill:#444}"
    ".value{font:10px sans-serif;fill:#666}"
    "@media(prefers-color-scheme:dark){.label{fill:#ccc}.value{fill:#aaa}}</style>"
)


NAMES = {
    "humaneval": "HumanEval", "mbpp": "MBPP", "math": "maths", "math_reasoning": "word problems", "qa": "questions",
    "summarization": "summaries", "stem": "STEM", "rag": "retrieval",
}  # fmt: skip


def by_kind(path: Path, contender: str) -> dict[str, float]:
    """× plain of a contender by kind of text, from any of the three forms."""
    result = json.loads(path.read_text())
    if "rows" in result:
        row = next(row for row in result["rows"] if row["contender"] == contender)
        found: dict[str, Any] = row["speedup"]
    elif "contenders" in result:
        found = result["contenders"][contender]["by_category"]
    else:
        kinds = result["sections"]["spec"]["contenders"][contender]["by_kind"]
        found = {kind: figures["ratio"] for kind, figures in kinds.items()}
    plain = {kind.lower().removeprefix("sb-"): ratio for kind, ratio in found.items() if kind != "all"}
    return {NAMES.get(kind, kind): ratio for kind, ratio in plain.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", nargs="+", metavar="NAME=FILE:CONTENDER")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    speeds = dict[str, dict[str, float]]()
    for given in options.series:
        name, _, source = given.partition("=")
        file, _, contender = source.rpartition(":")
        speeds[name] = by_kind(Path(file), contender)
    kinds = list(dict.fromkeys(kind for found in speeds.values() for kind in found))
    series = [
        Series(name, [Point(kinds.index(kind), ratio) for kind, ratio in found.items()])
        for name, found in speeds.items()
    ]
    axes = Axes("Speed relative to plain decoding, by kind of text", "times plain decoding", "", level=1.0)
    picture = bars(axes, kinds, series).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, rest = picture.split("\n", 1)
    options.out.write_text(f"{head}\n{STYLE}\n{rest}\n")


if __name__ == "__main__":
    main()
