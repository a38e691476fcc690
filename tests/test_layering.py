"""Which folder may reach which, directly or through others, and that no import goes in a circle.

Imports are read from the source, those for type checkers and those inside functions included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HOME = Path(__file__).parents[1] / "src" / "outrider"
BASE = "types params errors"
CORE = f"{BASE} engine control models backends drafters config llm testing"
REACH = {  # a folder, or a module of the front door -> what it may reach
    "errors": "", "params": "errors", "types": "params errors",
    "engine": f"{BASE} control", "control": f"{BASE} engine",
    "models": BASE, "backends": f"{BASE} engine control models", "drafters": f"{BASE} engine control models backends",
    "config": f"{BASE} engine control models backends drafters",
    "llm": f"{BASE} engine control models backends drafters config", "testing": CORE, "web": BASE,
    "measure": CORE, "train": f"{CORE} measure", "server": f"{CORE} web", "export": CORE,
    "cli": f"{CORE} measure train server export web", "__main__": f"{CORE} measure train server export web cli",
    "": f"{CORE} export server web",  # the package's front page imports lazily what users ask for
}  # fmt: skip
FEW = {  # what of another folder these may reach, and nothing else of it
    "control": {"engine": "engine.drafter"}, "engine": {"control": "control"},
}  # fmt: skip
PAIRS = {  # a drafter that stands on another one; every other method stands alone
    "ahead": "model head translate cascade", "online": "head", "model": "translate", "auto": "cascade",
}  # fmt: skip
USERS = {"measure.tune": "layerskip", "export.plan": "head", "cli": "online"}  # a method's tuner, exporter, commands


def name_of(path: Path) -> str:
    parts = path.relative_to(HOME).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path for path in sorted(HOME.rglob("*.py"))}


def imports(module: str) -> Iterator[str]:
    """Every module of ours that this one imports, as a path below `outrider`."""
    package = [part for part in module.split(".") if part]
    package = package if SOURCES[module].name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            where = node.module.split(".") if node.module else []
            if node.level:
                where = package[: len(package) - node.level + 1] + where
            elif where[:1] == ["outrider"]:
                where = where[1:]
            else:
                continue
            for alias in [alias for alias in node.names if alias.name != "__version__"]:
                name = ".".join([*where, alias.name])
                yield name if name in SOURCES else ".".join(where)
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == "outrider")


@cache
def edges(module: str) -> set[str]:
    """What it imports. A method's folder may be deleted: those who try to import it do without it."""
    return {name for name in imports(module) if name != module and name in SOURCES}


def room(module: str) -> str:
    return module.split(".")[0]


def reached(module: str) -> dict[str, str]:
    """Every module that this one imports, directly or not -> the one that it is imported by."""
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        here = waiting.pop()
        for other in edges(here) - found.keys():
            found[other] = here
            waiting.append(other)
    return found


def method(module: str) -> str:
    """The drafter that a module belongs to, if it belongs to one; names with an underscore are shared."""
    parts = module.split(".")
    return parts[1] if parts[0] == "drafters" and len(parts) > 1 and not parts[1].startswith("_") else ""


def violations() -> Iterator[str]:
    for module in SOURCES:
        own, few = room(module), FEW.get(room(module), {})
        for other, by in reached(module).items():
            there = room(other)
            if there != own and there not in REACH[own].split():
                yield f"{module} reaches {other} (through {by}), but {own} may reach only: {REACH[own]}"
            if there in few and by in (module, "") and other not in few[there].split():
                yield f"{module} imports {other}, but of {there} it may use only {few[there]}"
        for other in edges(module):
            ours, theirs = method(module), method(other)
            users = USERS.get(module) or USERS.get(own, "")
            if theirs and theirs != ours and theirs not in (PAIRS.get(ours, "") if ours else users).split():
                yield f"{module} imports {other}: a method is imported by the registry, and by those in PAIRS and USERS"


def circles() -> Iterator[list[str]]:
    """Import cycles, each found from its first module by name."""
    for module in SOURCES:
        back = reached(module)
        if module in back:
            path = [module]
            while path[-1] != module or len(path) == 1:
                path.append(back[path[-1]])
            if module == min(path):
                yield path[::-1]


def test_folders_reach_what_they_may() -> None:
    assert not [*violations()]


def test_no_import_goes_in_a_circle() -> None:
    assert not [*circles()]


def test_the_front_door_is_small() -> None:
    assert len([*HOME.glob("*.py")]) <= 8
    assert len([path for path in HOME.iterdir() if path.is_dir() and path.name != "__pycache__"]) <= 15


def test_the_rules_bite() -> None:
    assert "drafters" not in REACH["engine"]
    assert "cli" not in "".join(REACH[name] for name in REACH if name != "__main__")
    assert {"engine.judge", "types"} <= reached("engine.step").keys()
    assert method("drafters.head.network") == "head"
    assert not method("drafters._rollout")


def test_every_module_says_what_it_promises() -> None:
    missing = [name for name, path in SOURCES.items() if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]
    assert not missing


def test_only_the_command_line_prints() -> None:
    for name, path in SOURCES.items():
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        prints = any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)
        assert not prints or room(name) == "cli", f"{name} prints"


def test_the_engine_the_controller_and_the_backends_name_no_method() -> None:
    from outrider import drafters

    methods = {"ahead", "exit", "layerskip", "ngram", "online", "suffix", "translate", "eagle"} & {
        *drafters.names(),
        "eagle",
    }
    for name, path in SOURCES.items():
        if room(name) in ("engine", "control", "backends"):
            tree = ast.parse(path.read_text("utf-8"))
            named = {
                node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            assert not named & methods, f"{name} names a drafting method: {named & methods}"


def test_every_drafter_registers_and_describes_itself() -> None:
    from outrider import drafters

    for module in SOURCES:
        own = method(module)
        if own and module == f"drafters.{own}":
            source = "".join(p.read_text("utf-8") for n, p in SOURCES.items() if method(n) == own)
            if f'@register("{own}")' in source:
                assert drafters.about(own).endswith((".", "?", ")", ":")) or drafters.about(own), own
                assert drafters.lookup(own).__doc__
