"""The house stays as it was drawn: who may import whom, how long a file may be, and that every drafter has a name.

Imports are read from the source, those for type checkers and those inside functions included.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1] / "src" / "outrider"
README = HOME.parents[1] / "README.md"
LINES, FUNCTION_LINES = 400, 60

FLOW = "types errors"  # what flows, and what is said when it cannot
# Part of the house -> what it may see. `models.*` is any module in that folder; a folder's own name is its protocol.
ALLOWED = {
    "": "errors types text llm drafters accelerated",  # the package's front page, loaded lazily
    "errors": "",
    "paths": "",
    "params": "errors",
    "prediction": "",
    "types": "params prediction",
    "formats": "errors",
    "guides": "errors formats",  # grammars and tokens: neither logits nor drafts
    "brought": "types drafters drafters.prediction",
    "verify": "types",
    "sampling": FLOW,
    "cache": "types",
    "costs": "types",
    "prices": "types costs",
    "watch": "",
    "collecting": "",
    "ways": "costs",
    "control": "types costs prices ways",
    "trace": f"{FLOW} sampling verify",
    "scheduler": "types cache",
    "profile": "types cache costs machine paths",
    "engine": f"{FLOW} brought cache control drafters sampling scheduler verify watch",  # protocols: no drafter
    "drafters": f"{FLOW} cache models",
    "drafters.*": f"{FLOW} cache machine profiles sampling skipsearch drafters drafters.* models models.checkpoint "
    "models.exit models.feed models.head models.head8 models.head_feed models.head_file models.heads models.linear "
    "models.load models.ops models.output models.tokenizer models.toy models.weigh ahead.* learn learn.*",
    "drafters._habit": "costs",
    "ahead": "",
    "ahead.*": f"{FLOW} cache machine models models.checkpoint models.feed models.head models.head_feed models.load "
    "models.ops models.weigh runners.state runners.graphs sampling ahead.*",
    "learn": "",
    "learn.*": f"{FLOW} collecting paths learn learn.*",
    "models": "types cache models.config",
    "models.*": f"{FLOW} paths cache machine prompts native cuda.* models models.*",
    "native": "paths errors",
    "native.*": "paths errors native native.*",
    "cuda": "",
    "cuda.*": "cuda cuda.* sampling",
    "runners": "",
    "runners.*": "types cache collecting cuda cuda.* models models.ops runners.* sampling",
    "machine": "paths errors",
    "environment": "machine models.ops",
    "estimate": "",
    "plots": "",
    "money": "errors",
    "profiles": "errors paths",
    "speeds": "estimate types",
    "bench": "drafters environment llm profile prompts speeds types",
    "skipseeds": "",
    "skipsearch": "cache estimate models skipseeds types",
    "tune": "bench control drafters errors llm models profiles runners.laid skipsearch speeds",
    "memory": "cache drafters errors llm models.weigh",
    "doctor": "bench config control environment estimate llm memory paths speeds",
    "report": "plots show speeds types",
    "show_measure": "doctor memory money speeds tune",
    "cli_measure": "bench cli config doctor drafters environment errors llm money options profiles prompts report "
    "show_measure speeds tune",
    "train": "",
    "train.*": f"{FLOW} environment llm machine plots prompts report models.* train.*",
    "cli_train": "cli errors machine train.*",
    "config": "errors drafters verify",
    "aligned": "types control",
    "accelerated": f"{FLOW} llm models models.hf_load models.load",
    "build": "aligned cache config control drafters engine models profile runners.* scheduler",  # where the parts meet
    "testing": f"{FLOW} build config drafters engine models.toy models.transformer",
    "text": "types",
    "llm": f"{FLOW} build config drafters guides learn.drift machine models prediction profile profiles text trace "
    "models.checkpoint models.load",
    "prompts": "errors",
    "lossless": f"{FLOW} drafters llm",
    "show": f"{FLOW} text trace lossless",
    "options": FLOW,
    "answer": "types llm show trace",
    "teaching": "errors learn learn.store llm models.checkpoint",
    "cli_drafter": "cli learn learn.* paths teaching",
    "remote": "errors",
    "load": "remote",
    "web": "errors",
    "cli_page": "cli errors paths web",
    "server": "",
    "server.*": f"{FLOW} llm text trace watch web server.*",  # the library's front door, as a program of its own would
    "export": "",
    "export.*": "costs errors estimate export export.* models.checkpoint models.config models.folder models.gguf_file "
    "models.head_file models.heads models.weights",  # files and words: no model is run
    "cli_export": "cli errors export.* models.checkpoint options profiles",
    "vllm_plugin": "",
    "vllm_plugin.*": "brought drafters errors export.* machine models.checkpoint models.folder models.head_file paths "
    "prediction types vllm_plugin vllm_plugin.*",  # inside another engine: no engine of ours
    "audit": "errors prompts remote",
    "cli_fleet": "audit cli errors export.* models.checkpoint options profiles prompts remote "
    "server.settings vllm_plugin.*",
    "cli_serve": "cli cli_fleet cli_measure errors load options prompts remote server.app server.logs "
    "server.settings teaching",
    "cli": f"{FLOW} answer llm trace lossless prompts show options teaching models.checkpoint cli_drafter cli_export "
    "cli_fleet cli_measure cli_page cli_serve cli_train",
    "__main__": "cli",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(HOME).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for path in sorted(HOME.rglob("*.py"))}
DRAFTERS = [name for name in SOURCES if name.startswith("drafters.") and not name.startswith("drafters._")]


def imports(module: str) -> set[str]:
    """Every module of ours that this one imports, as a path below `outrider`."""
    path, found = SOURCES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = [part for part in package if part]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            where = node.module.split(".") if node.module else []
            if node.level:
                where = package[: len(package) - node.level + 1] + where
            elif where[:1] == ["outrider"]:
                where = where[1:]
            else:
                continue
            names = (".".join([*where, alias.name]) for alias in node.names)
            found |= {name if name in SOURCES else ".".join(where) for name in names}
        elif isinstance(node, ast.Import):
            found |= {a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == "outrider"}
    return found


def rule_for(module: str) -> str:
    folder = module.rpartition(".")[0]
    key = module if module in ALLOWED else f"{folder}.*"
    assert key in ALLOWED, f"Say at the top of this test what the new module '{module}' may import."
    return ALLOWED[key]


def may_see(module: str, other: str) -> bool:
    allowed = rule_for(module).split()
    return other in allowed or f"{other.rpartition('.')[0]}.*" in allowed


@pytest.mark.parametrize("module", SOURCES)
def test_nobody_sees_more_than_they_need(module: str) -> None:
    beyond = sorted(other for other in imports(module) if not may_see(module, other))
    assert not beyond, f"{module} imports {beyond}, but may see only: {rule_for(module) or 'nothing of ours'}"


def test_the_engine_knows_no_drafter_and_no_model() -> None:
    words = SOURCES["engine"].read_text(encoding="utf-8").lower()
    for name in DRAFTERS:
        name = name.partition(".")[2]
        assert name == "model" or not re.search(rf"\b{name}\b", words), f"engine.py mentions {name}"
    assert not any(name.startswith("models") for name in imports("engine"))


def test_the_rule_bites() -> None:
    assert not may_see("types", "cache")
    assert not may_see("engine", "drafters.ngram")
    assert not may_see("engine", "models.transformer")
    assert not may_see("verify", "sampling")
    assert not may_see("guides", "sampling")
    assert not may_see("cli", "engine")
    assert not may_see("drafters.ngram", "engine")
    assert may_see("models.transformer", "models.linear")
    assert imports("engine") >= {"cache", "types", "verify", "drafters"}
    assert imports("models.transformer") >= {"models", "models.ops", "cache"}
    assert imports("drafters.model") >= {"models.checkpoint", "drafters._rollout"}


@pytest.mark.parametrize("module", SOURCES)
def test_files_are_short_and_say_what_they_promise(module: str) -> None:
    source = SOURCES[module].read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert ast.get_docstring(tree), f"{module} has no docstring"
    assert source.count("\n") <= LINES, f"{module} has {source.count(chr(10))} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{module}.{node.name} has {length} lines"


@pytest.mark.parametrize("module", [name for name in SOURCES if name != "cli"])
def test_only_the_command_line_prints(module: str) -> None:
    calls = [n for n in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


@pytest.mark.parametrize("module", DRAFTERS)
def test_every_drafter_registers_a_name(module: str) -> None:
    from outrider import drafters

    text = SOURCES[module].read_text(encoding="utf-8")
    registered = re.findall(r'^@register\("([\w-]+)"\)', text, re.MULTILINE)
    assert registered, f"{module} registers nothing; if it is only a helper, its name should begin with _"
    for name in registered:
        assert name in drafters.names()
        assert drafters.lookup(name).__doc__


@pytest.mark.skipif(not README.exists(), reason="there is no README yet")
@pytest.mark.parametrize("module", DRAFTERS)
def test_the_readme_lists_every_drafter(module: str) -> None:
    names = re.findall(r'^@register\("([\w-]+)"\)', SOURCES[module].read_text(encoding="utf-8"), re.MULTILINE)
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith("|")]
    for name in names:
        assert any(f"`{name}`" in row for row in rows), f"README's table of drafters has no row for `{name}`"
