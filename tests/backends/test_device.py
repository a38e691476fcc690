"""Where things run: what `auto` means, what is refused in a sentence, and what the doctor says about a GPU.

There is no GPU in most places where this runs: torch is made to tell of some.
"""

from __future__ import annotations

import importlib.util
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from outrider import LLM, ConfigError, SamplingParams
from outrider.backends import with_index
from outrider.backends.load import load_model
from outrider.backends.machine import choose_device, device_name, why_no_gpu
from outrider.cli import show
from outrider.cli.app import app
from outrider.config import Config, config_from, from_hugging_face
from outrider.measure import environment
from outrider.measure.doctor import HINT, CategoryResult, Facts, advise
from outrider.models.checkpoint import open_checkpoint

from support import tiny

CARDS = {"NVIDIA H200": (9, 0), "NVIDIA L4": (8, 9)}
Plug = Callable[..., None]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Plug:
    """torch tells of these cards; none at all without any."""

    def tell(cards: dict[str, tuple[int, int]], triton: bool = True, compiler: str | None = "gcc") -> None:
        names, abilities = list(cards), list(cards.values())

        def number(device: Any = None) -> int:
            return device.index or 0 if isinstance(device, torch.device) else device or 0

        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: names[number(device)])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: abilities[number(device)])
        properties = SimpleNamespace(total_memory=141e9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        found = object() if triton else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: compiler)

    return tell


# ---------------------------------------------------------------- which device is meant


def test_auto_without_a_gpu_is_the_cpu(plug: Plug) -> None:
    plug({})
    assert choose_device("auto") == choose_device("cpu") == choose_device("cpu:3") == torch.device("cpu")
    assert "torch sees no GPU" in why_no_gpu()
    for wish in ("cuda", "cuda:0", "cuda:7"):
        with pytest.raises(ConfigError, match=rf"'{wish}' cannot be used: torch sees no GPU .* or choose cpu\.$"):
            choose_device(wish)


def test_auto_with_gpus_is_the_first_one(plug: Plug) -> None:
    plug(CARDS)
    assert why_no_gpu() == ""
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:0")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cpu") == torch.device("cpu")
    assert device_name(torch.device("cuda:1")) == "NVIDIA L4"
    with pytest.raises(ConfigError, match=r"no device 'cuda:2': this machine has 2 GPU\(s\), from cuda:0\.$"):
        choose_device("cuda:2")


@pytest.mark.parametrize("wish", ["", "gpu", "cuda:x", "cuda:-1", "tpu:0", "Auto", None])
def test_names_that_mean_nothing(wish: Any) -> None:
    with pytest.raises(ConfigError, match=r"no device '.*'; choose auto, cpu, cuda, or cuda:1 and so on\.$"):
        choose_device(wish)


@pytest.mark.parametrize("wish", ["meta", "mps", "xpu:1"])
def test_devices_that_we_do_not_run_on(wish: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not run on '{wish.split(':')[0]}' devices"):
        choose_device(wish)


def test_a_gpu_that_is_too_old(plug: Plug) -> None:
    plug({"Tesla T4": (7, 5), "NVIDIA L4": (8, 9)})
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="Tesla T4 is older than what our kernels need"):
        choose_device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")  # the other one will do
    assert why_no_gpu(1) == ""


def test_a_gpu_without_triton_or_what_it_needs(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    plug(CARDS, triton=False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        choose_device("cuda")
    plug(CARDS, compiler=None)
    assert "needs a C compiler" in why_no_gpu()
    monkeypatch.setenv("CC", "/opt/bin/cc")
    assert why_no_gpu() == ""


def test_device_map_is_hugging_faces_word_for_it() -> None:
    assert from_hugging_face({"device_map": "cuda:1"}) == {"device": "cuda:1"}
    assert from_hugging_face({"device_map": {"target": "cuda:0", "drafter": 1}}) == {
        "device": "cuda:0",
        "draft_device": "1",
    }
    assert from_hugging_face({"device_map": {"": "cpu"}}) == {"device": "cpu"}
    assert from_hugging_face({"device_map": {"drafter": "cpu"}}) == {"device": "auto", "draft_device": "cpu"}
    assert from_hugging_face({"device_map": None, "k": 3}) == {"k": 3}
    with pytest.raises(ConfigError, match=r"device_map names 'lm_head', but only 'target' and 'drafter'"):
        from_hugging_face({"device_map": {"target": "cpu", "lm_head": "cpu"}})
    config = config_from(from_hugging_face({"drafter": "model", "device_map": {"target": "cpu", "drafter": "cuda:1"}}))
    assert (config.device, config.options) == ("cpu", {"draft_device": "cuda:1"})
    assert Config().device == "auto"


def test_float64_stays_on_the_cpu(folder: Path) -> None:
    with pytest.raises(ConfigError, match="float64 runs on the CPU only"):
        load_model(open_checkpoint(folder), "float64", 8, device="cuda")


# ---------------------------------------------------------------- models in their places


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("device") / "tiny")


def test_the_llm_says_where_it_is(folder: Path) -> None:
    for said in ({"device": "cpu"}, {"device_map": "cpu"}, {"device_map": {"target": "cpu", "drafter": "cpu"}}):
        assert LLM(folder, dtype="float32", k=2, **said).device == "cpu"
    with pytest.raises(ConfigError, match="no device 'gpu'"):
        LLM("/no/such/model", device="gpu")  # before anything is opened or fetched


@pytest.mark.parametrize("draft_dtype", [None, "int8", "float32"])
def test_a_draft_model_beside_an_int8_target(
    folder: Path, draft_dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It inherits eight bits, which used to be none of the dtypes that it could be asked for."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    own = {} if draft_dtype is None else {"draft_dtype": draft_dtype}
    llm = LLM(folder, dtype="int8", device="cpu", drafter="model", draft_model=str(folder), k=3, **own)
    assert llm.dtype == "int8"
    assert str(llm.engine.drafter.model.dtype).removeprefix("torch.") == (draft_dtype or "int8")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16)
    fast, plain = (llm.generate("the quick brown fox", params, speculate=s)[0] for s in (True, False))
    assert fast.token_ids == plain.token_ids
    assert fast.stats.drafted > 0


@no_gpu
def test_a_draft_device_reaches_the_drafter(folder: Path) -> None:
    said = {"dtype": "float32", "drafter": "model", "draft_model": str(folder), "k": 2}
    assert LLM(folder, draft_device="cpu", **said).engine.drafter.model.device == torch.device("cpu")
    for where in ({"draft_device": "cuda:1"}, {"device_map": {"target": "cpu", "drafter": "cuda:1"}}):
        with pytest.raises(ConfigError, match="'cuda:1' cannot be used"):
            LLM(folder, **said, **where)


# ---------------------------------------------------------------- the command line


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, [str(a) for a in arguments], input="hi\n")


COMMANDS = [("generate", "hi"), ("chat",), ("verify",), ("bench",), ("doctor",), ("cost", "--price-per-hour", 1)]
COMMANDS += [("tune",)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_takes_a_device(folder: Path, command: tuple[object, ...]) -> None:
    done = invoke(*command, "-m", folder, "--device", "gpu")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "Error: There is no device 'gpu'; choose auto, cpu, cuda, or cuda:1 and so on.\n"
    if not torch.cuda.is_available():
        done = invoke(*command, "-m", folder, "--device", "cuda")
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith("Error: The device 'cuda' cannot be used: torch sees no GPU")
        assert done.stderr.endswith("Leave --device out, or choose cpu.\n")


@no_gpu
def test_draft_device_on_the_command_line(folder: Path) -> None:
    model = ("-m", folder, "--dtype", "float32", "--k", 2)
    drafts = (*model, "--drafter", "model", "--draft-model", folder, "--draft-device")
    done = invoke("generate", "hi", *drafts, "cuda:1")
    assert done.exit_code == 1
    assert "The device 'cuda:1' cannot be used" in done.stderr
    done = invoke("generate", "hi", *drafts, "cpu", "--device", "cpu", "-n", 4, "--json")
    assert done.exit_code == 0, done.stderr
    assert '"device": "cpu"' in done.stdout
    done = invoke("verify", *model, "-d", "suffix", "--draft-device", "cpu", "--limit", 1, "-n", 4)
    assert "tiny, float32, cpu, rule match" in done.stdout


# ---------------------------------------------------------------- what is reported


def test_the_environment_tells_of_gpus(plug: Plug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: gcc 13\n"
    )
    monkeypatch.setattr(environment, "_DRIVER", version)
    plug(CARDS)
    facts = environment.environment()
    assert facts["gpus"][0] == {"name": "NVIDIA H200", "memory_gb": 141.0, "capability": "9.0"}
    assert (facts["driver"], facts["auto_device"], facts["no_gpu"]) == ("580.65.06", "cuda:0", "")
    assert "triton" in facts["versions"]
    plug({})
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "none")
    facts = environment.environment()
    assert (facts["gpus"], facts["driver"], facts["auto_device"]) == ([], None, "cpu")
    assert "torch sees no GPU" in facts["no_gpu"]


CPU = {"cpu": "AMD EPYC", "kernels": "torch (no compiler was found)", "threads": 1, "cores": 16, "load": 0.5}
CPU |= {"amx": True, "isa_cap": "AVX512_CORE_BF16", "omp": {}, "gpus": [], "no_gpu": "torch sees no GPU"}
CARD = {"name": "NVIDIA H200", "memory_gb": 141.0, "capability": "9.0"}
GPU = CPU | {"gpus": [CARD], "no_gpu": "", "auto_device": "cuda:0", "driver": "580.65.06", "cuda": "13.0"}
GPU |= {"versions": {"triton": "3.6.0"}}
KIND = CategoryResult("all", 0.8, 1.5)
COSTS = {1: 0.004, 2: 0.004, 5: 0.0041, 9: 0.0042}
FACTS = Facts("m", "bfloat16", ("bfloat16", "int8"), True, "suffix", COSTS, [], KIND, GPU, Path("/tmp"))
ON_GPU = replace(FACTS, device="cuda:0", runner="captured graphs")


def hints(facts: Facts) -> str:
    return "\n".join(finding.text for finding in advise(facts) if finding.level == HINT)


def shown(facts: Facts) -> str:
    file = io.StringIO()
    show.doctor(Console(width=200, no_color=True, file=file), facts, advise(facts))
    return file.getvalue()


def test_on_a_gpu_the_doctor_leaves_the_processor_alone() -> None:
    for words in ("native kernels", "thread", "AMX"):
        assert words not in hints(ON_GPU)
        assert words in hints(replace(FACTS, environment=CPU))
    assert "rounded weights" in hints(ON_GPU)
    text = shown(ON_GPU)
    line = "m, bfloat16, NVIDIA H200 (cuda:0, 141 GB), captured graphs, driver 580.65.06, CUDA 13.0, triton 3.6.0"
    assert line in text
    assert "--device auto means cuda:0 here" in text
    assert "AMD EPYC" not in text


def test_the_doctor_asks_why_a_gpu_is_not_used() -> None:
    assert "there is a GPU (NVIDIA H200): leave --device out" in hints(FACTS)
    old = replace(FACTS, environment=GPU | {"no_gpu": "the package triton is not installed", "auto_device": "cpu"})
    assert "The GPU is not used: the package triton is not installed." in hints(old)
    assert "--device auto means cpu here: the package triton is not installed." in shown(old)
    blind = replace(FACTS, environment=CPU | {"driver": "580.65.06"})
    assert "There is a driver for NVIDIA GPUs, but no GPU is used: torch sees no GPU" in hints(blind)
    plain = replace(FACTS, environment=CPU)
    assert "GPU" not in hints(plain)
    assert "AMD EPYC, torch (no compiler was found)" in shown(plain)


def test_a_gpu_has_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that was given on `cuda:0` was refused beside a target on `cuda`."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert with_index("cuda") == torch.device("cuda:1") == with_index(torch.device("cuda"))
    assert with_index("cuda:0") == torch.device("cuda:0")
    assert with_index("cpu") == torch.device("cpu")
