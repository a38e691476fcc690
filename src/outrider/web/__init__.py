"""The page: static files for the server, and one self-contained HTML file made of them.

    index(live=True)   index.html; `live` tells the page that a server answers
    files()            the folder of the static files
    page(lines)        one HTML file with everything inside, for a browser without a server

`join` bundles the JavaScript modules. It understands a small part of `import` and `export` and refuses the rest. What a
trace means is known in `engine/trace.py` and `trace.js`, not here.
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
    """The page that fetches its parts from its own folder."""
    meta = '<meta name="outrider-live" content="1">' if live else ""
    return _text("index.html").replace("<!-- head -->", meta)


def examples() -> list[dict[str, str]]:
    """The bundled traces: title and file of each."""
    entries: list[dict[str, str]] = json.loads(_text("examples/index.json"))
    return entries


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A trace's lines up to the first that cannot be read; an error if there are none. It needs no torch."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"The trace {path} cannot be read: {error}.") from error
    lines = []
    for number, text in enumerate(texts):
        try:
            line = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            break  # the run ended while writing this line
        if not isinstance(line, dict) or (number == 0 and "outrider_trace" not in line):
            break
        lines.append(line)
    if not lines:
        raise OutriderError(f"{path} is not an Outrider trace: its first line has no 'outrider_trace'.")
    return lines


def page(trace_lines: Iterable[dict[str, Any]] | None = None, live: bool = False, title: str = "This run") -> str:
    """One self-contained file: this trace, if any, then the bundled ones. It makes no request unless `live`."""
    traces: list[dict[str, Any]] = [
        {"title": each["title"], "text": _text(f"examples/{each['file']}"), "bundled": True} for each in examples()
    ]
    if trace_lines is not None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in trace_lines if line)
        traces.insert(0, {"title": title, "text": text})
    start = "explain" if trace_lines is None else "run"
    data = _script_safe(json.dumps({"start": start, "traces": traces}, ensure_ascii=False))
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
    """A module and all that it imports as one script: each in its own function, dependencies first."""
    done: dict[str, str] = {}
    _add(entry, done, ())
    script = "\n".join(done.values())
    if "</script" in script.lower():
        raise ValueError("A module contains the end of a script: it cannot be put into a page.")
    return script


def _add(name: str, done: dict[str, str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"{name} imports itself via {', '.join(above)}.")
    if name in done:
        return
    source, folder = _text(name), Path(name).parent

    def to_constants(match: re.Match[str]) -> str:
        other = (folder / match[3]).as_posix()
        _add(other, done, (*above, name))
        names = match[1].replace(" as ", ": ") if match[1] else f"default: {match[2]}"
        return f"const {{ {names.strip()} }} = {_name(other)};"

    body = _IMPORT.sub(to_constants, source)
    exported = [*_NAMED.findall(body), *(f"default: {local}" for local in _DEFAULT.findall(body))]
    body = _DEFAULT.sub("", _EXPORT.sub("", body))
    if left := re.search(r"^(import|export)\b[^(].*$", body, re.MULTILINE):
        raise ValueError(f"{name} has a form of import or export that is not understood: {left[0]}")
    done[name] = f"const {_name(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _name(module: str) -> str:
    return "module_" + re.sub(r"\W", "_", module.removesuffix(".js"))


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _script_safe(text: str) -> str:
    """JSON without `<`, so that nothing in a trace can end the script element that holds it."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
