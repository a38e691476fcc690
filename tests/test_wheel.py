"""A wheel and an sdist that install and run from an empty directory, without a C compiler: `make wheel-test`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import tiny

ROOT = Path(__file__).parents[1]
PIP = os.environ.get("OUTRIDER_PIP", "").split()  # constraints, and the index of torch's CPU build
pytestmark = pytest.mark.wheel


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return str(done.stdout)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a fresh environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "pip", "install", "--quiet", "--no-compile", *PIP, f"{wheel}[serve]", cwd=ROOT)
    return folder / "bin"


@pytest.fixture(scope="module")
def elsewhere(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """An empty directory, and an environment without a compiler."""
    folder = tmp_path_factory.mktemp("empty")
    home = tmp_path_factory.mktemp("home")
    return {"cwd": folder, "env": {"PATH": str(installed), "HOME": str(home), "OUTRIDER_HOME": str(home / "cache")}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny"))


def test_the_wheel_has_kernels_and_the_page(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "outrider/web/index.html" in names
    assert "outrider/backends/cpu/native/kernels.c" in names
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        assert "outrider/backends/cpu/native/prebuilt/x86_64-avx2.so" in names
        assert wheel.name.endswith("py3-none-linux_x86_64.whl")
    assert not [name for name in names if name.startswith(("tests/", "bench/")) or name.endswith(".pyc")]


def test_the_sdist_builds_the_same_wheel(dist: Path, wheel: Path, tmp_path: Path) -> None:
    """And without a compiler it is one for every system."""
    (sdist,) = dist.glob("*.tar.gz")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path)
    environment = {**os.environ, "PATH": str(tmp_path), "CC": ""}
    run(sys.executable, "-m", "pip", "wheel", *options, sdist, env=environment, cwd=tmp_path)
    (pure,) = tmp_path.glob("*.whl")
    assert pure.name.endswith("py3-none-any.whl")
    own, theirs = (set(zipfile.ZipFile(path).namelist()) for path in (wheel, pure))
    assert {name for name in own if "/prebuilt/" not in name} == theirs


def test_it_generates_with_the_wheels_kernels(installed: Path, elsewhere: dict[str, object], model: Path) -> None:
    outrider = installed / "outrider"
    assert re.fullmatch(r"outrider \d+\.\d+\.\d+\S*", run(outrider, "--version", **elsewhere).strip())
    options = ("--model", model, "--max-tokens", "12", "--plain")
    texts = {run(outrider, "generate", *options, *more, "the fox", **elsewhere) for more in ((), ("--drafter", "off"))}
    assert len(texts) == 1
    code = "from outrider.backends import ops; import outrider; print(ops.backend(), outrider.__file__)"
    backend = run(installed / "python", "-c", code, **elsewhere)
    assert backend.startswith("native ("), backend
    assert str(installed.parent) in backend
    assert not list(Path(str(elsewhere["cwd"])).iterdir())  # nothing is written where it is started


@contextmanager
def serving(outrider: Path, model: Path, options: dict[str, object]) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(outrider), "serve", "--model", str(model), "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    try:
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready")
                break
            except OSError:
                assert server.poll() is None, server.stderr.read()
                assert time.monotonic() < end, "the server does not listen"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        assert server.wait(60) == 0


def test_it_serves(installed: Path, elsewhere: dict[str, object], model: Path) -> None:
    with serving(installed / "outrider", model, elsewhere) as url:
        body = json.dumps({"messages": [{"role": "user", "content": "fox"}], "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
        answer = json.load(urllib.request.urlopen(request))
        assert answer["usage"]["completion_tokens"] == 4
        assert b"Outrider" in urllib.request.urlopen(f"{url}/").read()
        assert b"/v1/responses" in urllib.request.urlopen(f"{url}/docs").read()
