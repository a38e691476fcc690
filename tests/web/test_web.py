"""The self-contained page: bundled without tools, without network access, shipped with the package."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider import web
from outrider.cli.app import app
from outrider.engine.trace import read, recorded, replay

EVIL = "</script><!--<script>alert(1)</script>\u2028"
TRACES = [web.files() / "examples" / each["file"] for each in web.examples()]


def parts(html: str) -> tuple[str, str, str]:
    """The style, the data and the script inside."""
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    assert style
    return style[1], data, script


def test_the_page_can_fetch_nothing() -> None:
    html = web.page()
    style, _, script = parts(html)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy
    assert policy[1].startswith("default-src 'none'")
    assert "unsafe" not in policy[1]
    for kind, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy[1]
    assert not re.search(r'(src|href)="(?!data:|#)', html)  # nothing is fetched
    assert html == web.page()  # the same file every time


def test_nothing_in_a_trace_ends_the_element_it_stands_in() -> None:
    line = {"outrider_trace": 1, "model": EVIL}
    html = web.page([line], title=EVIL)
    _, data, _ = parts(html)
    assert "<" not in data
    embedded = json.loads(data)
    assert embedded["traces"][0]["title"] == EVIL
    assert json.loads(embedded["traces"][0]["text"]) == line
    assert (embedded["start"], len(embedded["traces"])) == ("run", 1 + len(TRACES))


def test_both_dark_palettes_are_equal() -> None:
    style = (web.files() / "page.css").read_text(encoding="utf-8")
    system = re.search(r':root:not\(\[data-theme="light"\]\) \{(.*?)\}', style, re.DOTALL)
    button = re.search(r':root\[data-theme="dark"\] \{(.*?)\}', style, re.DOTALL)
    assert system
    assert button
    assert system[1].split() == button[1].split()


def test_live_is_announced_only_by_a_server() -> None:
    meta = '<meta name="outrider-live" content="1">'
    assert meta in web.index(live=True)
    assert meta not in web.index()
    assert meta not in web.page()
    assert meta in web.page(live=True)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('import * as all from "./b.js";\n', "not understood"),
        ('import "./b.js";\n', "not understood"),
        ("export default 5;\n", "not understood"),
        ("export let x = 1;\n", "not understood"),
        ('import { a } from "./a.js";\n', "imports itself"),
        ("const end = '</script>';\n", "end of a script"),
    ],
)
def test_what_cannot_be_joined_is_refused(
    source: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.js").write_text(source)
    (tmp_path / "b.js").write_text("export const b = 1;\n")
    monkeypatch.setattr(web, "HERE", tmp_path)
    with pytest.raises(ValueError, match=problem):
        web.join("a.js")


def test_modules_are_joined_once_each_in_the_order_of_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.js").write_text('import two from "./v/c.js";\nimport { b as bee } from "./b.js";\nbee(two);\n')
    (tmp_path / "b.js").write_text('import two from "./v/c.js";\nexport function b() { return two; }\n')
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "c.js").write_text("const two = 2;\nexport { two as default };\n")
    monkeypatch.setattr(web, "HERE", tmp_path)
    script = web.join("a.js")
    assert re.findall(r"^const (module_\w+) =", script, re.MULTILINE) == [
        "module_v_c",
        "module_b",
        "module_a",
    ]
    assert "const { b: bee } = module_b;" in script
    assert "const { default: two } = module_v_c;" in script
    assert "return { default: two };" in script


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_the_bundled_runs_are_whole_traces(path: Path) -> None:
    trace = read(path)
    assert replay(trace) == recorded(trace)
    assert trace.header["level"] == "full"
    assert len(trace.footer["texts"]) == trace.footer["emitted"] == trace.footer["plain"]["tokens"]
    assert len(trace.footer["plain"]["us"]) == trace.footer["emitted"]
    assert trace.footer["plain"]["same"] is True
    assert any("guesses" in line for line in trace.lines)
    assert str(Path.home()) not in path.read_text(encoding="utf-8")


def test_the_bundled_runs_are_small() -> None:
    assert sum(path.stat().st_size for path in TRACES) < 400_000


def test_all_of_it_is_in_the_wheel() -> None:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel: `pip install 'outrider[test]'`")
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(Path(__file__).parents[2]))
    inside = {file.distribution_path for file in builder.recurse_included_files()}
    wanted = [path for path in web.files().rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(wanted) > 20
    for path in wanted:
        assert f"outrider/web/{path.relative_to(web.files()).as_posix()}" in inside


# ---------------------------------------------------------------- the commands


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_a_trace_becomes_a_page(tmp_path: Path) -> None:
    code, output = invoke("trace", "html", TRACES[0], "--out", tmp_path / "deep" / "run.html")
    assert (code, "Wrote" in output) == (0, True)
    _, data, _ = parts((tmp_path / "deep" / "run.html").read_text(encoding="utf-8"))
    first = json.loads(data)["traces"][0]
    assert first["title"] == TRACES[0].name
    assert [json.loads(line) for line in first["text"].splitlines()] == web.read_lines(TRACES[0])


@pytest.mark.parametrize("content", [None, "", "hello\n", "[1]\n", '{"a": 1}\n', b"\xff\xfe"])
def test_other_files_are_an_error_message(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, output = invoke("trace", "html", path)
    assert code == 1
    assert output.startswith("Error: ")
    assert not path.with_suffix(".html").exists()


def test_explain_opens_a_browser_on_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    assert invoke("explain", "--no-open") == (0, f"{tmp_path / 'pages' / 'explain.html'}\n")
    assert not opened
    assert invoke("explain", TRACES[1])[0] == 0
    assert opened == [(tmp_path / "pages" / "edit.html").as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert "No browser could be opened" in invoke("explain")[1]


def test_explain_loads_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from outrider.cli.app import app; app(['explain', '--no-open'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        env={"OUTRIDER_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    )


def test_compare_records_the_plain_run(folder: Path, tmp_path: Path) -> None:
    """What `--compare` measures is in the trace, beside the texts; the page needs nothing else."""
    path, fast = tmp_path / "run.jsonl", ["--dtype", "float32", "--k", "4", "--drafter", "suffix"]
    code, stdout = invoke("generate", "-m", folder, *fast, "-n", 24, "--json", "--compare", "--trace", path, "the cat")
    assert code == 0, stdout
    footer, output = read(path).footer, json.loads(stdout.splitlines()[-1])
    assert footer["plain"].keys() == {"tokens", "seconds", "us", "same"}
    assert footer["plain"]["same"] is True
    assert len(footer["plain"]["us"]) == footer["plain"]["tokens"] == footer["emitted"]
    assert footer["plain"]["seconds"] > 0  # of this one run; the printed speeds are of several
    assert output["plain_same_text"] is True
    assert "".join(footer["texts"]) == output["text"]
    assert all(start >= 0 and lasted > 0 for start, lasted in footer["plain"]["us"])
