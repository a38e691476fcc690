"""The page: plain files that a server hands out as they are, and one self-contained file made of them.

    index(live=True)   index.html as the server sends it; `live` tells the page that live.js has somebody to talk to
    files()            the folder that everything else is served from
    page(lines)        one HTML file with all of it inside, for a browser without a server

The modules use a small part of the language's import and export, which `join` understands; it refuses anything else.
It knows text; what a trace means is known in `trace.py` and, for the page, in `trace.js`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import OutriderError

HERE = Path(__file__).parent
POLICY = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
_IMPORT = re.compile(r'^import (?:\{([^}]*)\}|(\w+)) from "\./([\w/.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) )", re.MULTILINE)
_NAMED = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)
_DEFAULT = re.compile(r"^export \{ (\w+) as default \};$", re.MULTILINE)


def files() -> Path:
    """The folder with the page's files."""
    return HERE


def index(live: bool = False) -> str:
    """The page whose parts are fetched from beside it."""
    told = '<meta name="outrider-live" content="1">' if live else ""
    return _text("index.html").replace("<!-- head -->", told)


def examples() -> list[dict[str, str]]:
    """The bundled runs: title and file of each."""
    listed: list[dict[str, str]] = json.loads(_text("examples/index.json"))
    return listed


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A trace's lines as far as they can be read, with a sentence for a file that is none. It needs no torch."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"The trace {path} cannot be read: {error}.") from error
    lines = []
    for number, text in enumerate(texts):
        try:
            line = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            break  # the run was cut off while writing this line
        if not isinstance(line, dict) or (number == 0 and "outrider_trace" not in line):
            break
        lines.append(line)
    if not lines:
        raise OutriderError(f"{path} is not an Outrider trace: its first line has no 'outrider_trace'.")
    return lines


def page(trace_lines: Iterable[dict[str, Any]] | None = None, live: bool = False, title: str = "This run") -> str:
    """One self-contained file: this trace, if there is one, then the bundled runs. It asks nobody for anything."""
    own: list[dict[str, Any]] = [] if trace_lines is None else [{"title": title, "text": _jsonl(trace_lines)}]
    traces = [*own, *(_bundled(**each) for each in examples())]
    data = _script_safe(json.dumps({"start": "run" if own else "explain", "traces": traces}, ensure_ascii=False))
    style, script = _text("vendor/uPlot.css") + _text("page.css"), join("app.js")
    policy = f"{POLICY}; script-src {_hash(script)}; style-src {_hash(style)}"
    if live:
        policy = policy.replace(_hash(script), f"{_hash(script)} 'self'") + "; connect-src 'self'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    html = index(live).replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{head}')
    html = html.replace('<link rel="stylesheet" href="vendor/uPlot.css">\n', "")
    html = html.replace('<link rel="stylesheet" href="page.css">', f"<style>{style}</style>")
    html = html.replace('<script type="module" src="app.js"></script>\n', "")
    inside = f'<script type="application/json" id="outrider-data">{data}</script>\n'
    return html.replace("<!-- data -->", f'{inside}<script type="module">{script}</script>')


def join(entry: str) -> str:
    """The module and all that it imports as one script: each in a function of its own, in the order of need."""
    done: dict[str, str] = {}
    _add(entry, done, ())
    script = "\n".join(done.values())
    if "</script" in script.lower():
        raise ValueError("A module contains the end of a script: it cannot be put into a page.")
    return script


def _add(name: str, done: dict[str, str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"{name} imports itself by way of {', '.join(above)}.")
    if name in done:
        return
    source, folder = _text(name), Path(name).parent

    def importing(found: re.Match[str]) -> str:
        other = (folder / found[3]).as_posix()
        _add(other, done, (*above, name))
        names = found[1].replace(" as ", ": ") if found[1] else f"default: {found[2]}"
        return f"const {{ {names.strip()} }} = {_name(other)};"

    body = _IMPORT.sub(importing, source)
    exported = [*_NAMED.findall(body), *(f"default: {local}" for local in _DEFAULT.findall(body))]
    body = _DEFAULT.sub("", _EXPORT.sub("", body))
    if left := re.search(r"^(import|export)\b[^(].*$", body, re.MULTILINE):
        raise ValueError(f"{name} has a form of import or export that is not understood: {left[0]}")
    done[name] = f"const {_name(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _name(module: str) -> str:
    return "module_" + re.sub(r"\W", "_", module.removesuffix(".js"))


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _bundled(title: str, file: str) -> dict[str, Any]:
    return {"title": title, "text": _text(f"examples/{file}"), "bundled": True}


def _jsonl(lines: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines if line)


def _script_safe(text: str) -> str:
    """JSON in which no `<` is left: nothing in a trace can end the element it stands in."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
