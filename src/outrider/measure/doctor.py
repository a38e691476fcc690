"""Does speculation pay on this machine for this model, and why? Plain words from measured numbers.

`advise` is a pure function of `Facts`: the same numbers always give the same words. It knows what usually goes wrong;
it does not repair anything.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from ..config import DTYPES
from ..control.adaptive import Costs
from ..llm import LLM
from ..models.paths import cache_folder
from .bench import Plan, Progress, Question, measure, pass_costs, setup
from .environment import environment, installed
from .memory import Addition, additions, target_memory
from .speeds import ALL, Row
from .statistics import break_even

KS = (1, 4, 8)
GOOD, HINT, WRONG = "good", "hint", "wrong"
_APART = 0.3  # costs by rows that differ more than this were not measured under like conditions
_RUNNERS = {"Graphs": "captured graphs", "Eager": "eager"}  # by class
_LEAST_DISK = 2.0  # GB: less than a small model and its packed copy


@dataclass(frozen=True)
class Finding:
    level: str  # good, hint (something to change), wrong (something is broken)
    text: str


@dataclass(frozen=True)
class Kind:
    """What was measured on one kind of text."""

    category: str
    alpha: float | None
    speedup: float | None


@dataclass(frozen=True)
class Facts:
    """All that the words are made of."""

    model: str
    dtype: str
    dtypes: tuple[str, ...]  # that this Outrider offers
    exact: bool
    drafter: str
    costs: dict[int, float]  # seconds of a pass by rows
    kinds: list[Kind]
    overall: Kind
    environment: dict[str, Any]
    folder: Path  # where things are cached
    folder_trouble: str | None = None
    disk_gb: float | None = None
    versions_trouble: list[str] = field(default_factory=list)
    kept: dict[int, float] = field(default_factory=dict)  # the costs that the controller reckons with
    kept_in: Path | None = None
    device: str = "cpu"  # where the target runs
    runner: str = ""  # how its passes run
    memory: list[Addition] = field(default_factory=list)  # the target's, then what each drafter adds
    backend: str = ""  # who runs the target, where that is not the built-in decoder
    drift: tuple[str, ...] = ()  # drafters that have gone stale, a sentence each
    ahead: dict[str, Any] | None = None  # what drafting ahead tells of itself, where that was asked for

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def gpu(self) -> dict[str, Any] | None:
        """The GPU that the target runs on."""
        seen: list[dict[str, Any]] = self.environment.get("gpus", [])
        number = int(self.device.partition(":")[2] or 0)
        return seen[number] if self.on_gpu and number < len(seen) else None

    def break_even(self, k: int) -> float | None:
        return break_even(Costs(self.costs), k)

    def ratio(self, rows: int) -> float:
        """What a pass over this many rows costs, in passes over one."""
        return Costs(self.costs)(rows) / self.costs[1]


def examine(llm: LLM, questions: list[Question], plan: Plan, progress: Progress) -> Facts:
    """Measure everything that `advise` wants to know, with the model's own drafter and K."""
    before = environment()  # the load of the others, before ours
    bench = measure(llm, questions, [setup(llm, llm.config.drafter_name, llm.config.k)], plan, progress)
    rows = bench.rows()
    trouble, disk = folder_state(cache_folder())
    return Facts(
        llm.name,
        llm.dtype,
        tuple(DTYPES),
        bool(getattr(llm.target, "exact", False)),
        llm.config.drafter_name,
        pass_costs(llm),
        [_kind(r) for r in rows if r.category != ALL],
        next(_kind(r) for r in rows if r.category == ALL),
        before,
        cache_folder(),
        trouble,
        disk,
        versions_trouble(),
        bench.costs,
        llm.costs.path,
        llm.device,
        _RUNNERS.get(type(llm.engine.target).__name__, type(llm.engine.target).__name__),
        [target_memory(llm), *additions(llm)],
        llm.backend,
        tuple(llm.drift.sentences()),
        _ahead_facts(llm, questions, plan) if llm.config.drafter_name == "ahead" else None,
    )


def _ahead_facts(llm: LLM, questions: list[Question], plan: Plan) -> dict[str, Any]:
    """One engine answers everything: hit rates want more outcomes than one answer has."""
    llm = llm.using(max_batch=1)
    for number, question in enumerate(questions):
        llm.generate([question.ids], plan.params(number))
    told: dict[str, Any] = llm.drafting["ahead"]
    return told | {"controller": llm.engine.controller.why}


def _kind(row: Row) -> Kind:
    return Kind(row.category, row.alpha, row.speedup)


def advise(facts: Facts) -> list[Finding]:
    """The verdict first, then why, then what to change, then what is broken."""
    return [verdict(facts), why(facts), *_ahead(facts), *_changes(facts), *_installation(facts)]


def verdict(facts: Facts) -> Finding:
    speed = facts.overall.speedup
    if speed is None:
        return Finding(HINT, "Nothing could be timed: the answers were too short.")
    best, worst = _extremes(facts.kinds)
    span = f" ({best.category} {best.speedup:.2f} ×, {worst.category} {worst.speedup:.2f} ×)" if best and worst else ""
    if speed >= 1.03:
        return Finding(GOOD, f"Speculation pays here: {speed:.2f} × plain decoding with {facts.drafter}{span}.")
    if speed >= 0.97:
        tail = f" It pays on {best.category}: {best.speedup:.2f} ×." if best and (best.speedup or 0) >= 1.05 else ""
        return Finding(
            HINT, f"Speculation makes no difference over all here: {speed:.2f} × with {facts.drafter}.{tail}"
        )
    return Finding(WRONG, f"Speculation loses here: {speed:.2f} × plain decoding with {facts.drafter}{span}.")


def why(facts: Facts) -> Finding:
    """Costs against acceptance, in one sentence or two."""
    need, ratio = facts.break_even(4), facts.ratio(5)
    text = f"A pass over 5 rows costs {ratio:.2f} × a pass over one"
    if need is None:
        return Finding(WRONG, text + ", so drafting 4 tokens cannot pay even if all of them are accepted.")
    text += f", so drafting 4 tokens pays from α = {need:.0%} on"
    alpha = facts.overall.alpha
    if alpha is None:
        return Finding(HINT, f"{text}; {facts.drafter} found nothing to draft in this text.")
    if alpha >= need:
        return Finding(GOOD, f"{text}; {facts.drafter} reaches {alpha:.0%}.")
    return Finding(HINT, f"{text}; {facts.drafter} reaches only {alpha:.0%}.")


def _extremes(kinds: list[Kind]) -> tuple[Kind | None, Kind | None]:
    timed = sorted((k for k in kinds if k.speedup is not None), key=lambda k: k.speedup or 0)
    return (timed[-1], timed[0]) if len(timed) > 1 else (None, None)


def _ahead(facts: Facts) -> list[Finding]:
    """What drafting ahead prepared, what that hid, the fitted curves, and whether it is kept."""
    told = facts.ahead
    if told is None:
        return []
    if told["hit_rate"] is None:
        return [Finding(HINT, f"Nothing was drafted ahead: {told['controller'] or told['why']}.")]
    laws = " and ".join(f"{law['c']:.2f} F^-{law['r']:.2f} ({place})" for place, law in told["miss"].items())
    text = f"Drafting ahead in a {told['place']}: {told['hit_rate']:.0%} of outcomes were prepared for"
    text += (
        f"; F forks miss {laws}; {told['hidden_seconds']:.2f} s of drafting hidden, {told['exposed_seconds']:.2f} s not"
    )
    text += f"; {told['why']}."
    return [Finding(GOOD if told["pays"] else HINT, text)]


# ---------------------------------------------------------------- what to change


def _changes(facts: Facts) -> list[Finding]:
    ours = [] if facts.on_gpu else [_kernels(facts), _threads(facts), _amx(facts)]  # a GPU's passes need none of it
    found = [_device(facts), *ours, _busy(facts), _dtype(facts), _stale(facts), _drafter(facts)]
    return [*(each for each in found if each is not None), *(Finding(HINT, text) for text in facts.drift)]


def _device(facts: Facts) -> Finding | None:
    """A GPU that is here and not used, and why."""
    reason, gpus = facts.environment.get("no_gpu"), facts.environment.get("gpus", [])
    if facts.on_gpu:
        return None
    if gpus and reason:
        return Finding(HINT, f"The GPU is not used: {reason}.")
    if gpus:
        return Finding(HINT, f"The model runs on the CPU, but there is a GPU ({gpus[0]['name']}): leave --device out.")
    if facts.environment.get("driver"):
        return Finding(HINT, f"There is a driver for NVIDIA GPUs, but no GPU is used: {reason}.")
    return None


def _kernels(facts: Facts) -> Finding | None:
    kernels = str(facts.environment.get("kernels", ""))
    if not kernels.startswith("torch"):
        return None
    reason = kernels.partition("(")[2].rstrip(")") or "reason unknown"
    return Finding(
        HINT, f"The native kernels are not in use ({reason}), so passes are slow: install a C compiler (gcc or clang)."
    )


def _threads(facts: Facts) -> Finding | None:
    threads, cores = facts.environment.get("threads", 1), facts.environment.get("cores", 1)
    omp: dict[str, str] = facts.environment.get("omp", {})
    if threads > cores:
        return Finding(
            HINT, f"{threads} threads share {cores} cores and wait for each other: set OMP_NUM_THREADS={cores}."
        )
    if threads == 1 and cores > 1:
        why = " because OMP_NUM_THREADS is 1" if omp.get("OMP_NUM_THREADS") == "1" else ""
        return Finding(HINT, f"Only one thread works on a machine with {cores} cores{why}: allow more threads.")
    if omp.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return Finding(HINT, "OMP_WAIT_POLICY=passive makes threads sleep between small operations: unset it.")
    return None


def _busy(facts: Facts) -> Finding | None:
    load, cores = facts.environment.get("load"), facts.environment.get("cores", 1)
    if load is None or load <= cores + 0.5:
        return None
    return Finding(
        HINT, f"The machine is busy (load {load:g} on {cores} cores): these timings are rough, run it again later."
    )


def _dtype(facts: Facts) -> Finding | None:
    if facts.dtype.startswith(("float32", "float64")):
        return Finding(
            HINT, f"The model runs in {facts.dtype}: dtype bfloat16 or auto reads half as many bytes per pass."
        )
    if "int8" in facts.dtypes and "int8" not in facts.dtype:
        price = ", at the price of rounded weights" if facts.on_gpu else ""
        return Finding(
            HINT, f"The model runs in {facts.dtype}: try --dtype int8, which reads half as many bytes per pass{price}."
        )
    return None


def _amx(facts: Facts) -> Finding | None:
    if not (facts.environment.get("amx") and facts.environment.get("isa_cap")):
        return None
    cap = facts.environment["isa_cap"]
    return Finding(
        HINT, f"The processor advertises AMX, but oneDNN is held to {cap} (AMX faults on some virtual machines)."
    )


def _stale(facts: Facts) -> Finding | None:
    """The controller's table against what is measured now: was it made while the machine was busy?"""
    if not facts.kept or facts.kept_in is None:
        return None
    kept, now = Costs(facts.kept), Costs(facts.costs)
    apart = max(abs((kept(n) / kept(1)) / (now(n) / now(1)) - 1) for n in (2, 5, 9))
    if apart <= _APART:
        return None
    return Finding(
        HINT,
        f"The costs that K auto reckons with differ by {apart:.0%} from those measured now; on a quiet machine, delete "
        f"{facts.kept_in} and they are measured again.",
    )


def _drafter(facts: Facts) -> Finding | None:
    need = facts.break_even(4)
    if need is None or facts.overall.alpha is None or facts.overall.alpha >= need:
        return None
    return Finding(
        HINT, "A better drafter would help most: `outrider tune` compares those that are here on your own prompts."
    )


# ---------------------------------------------------------------- what is broken


def _installation(facts: Facts) -> list[Finding]:
    found = [Finding(WRONG, text) for text in facts.versions_trouble]
    if facts.folder_trouble:
        found.append(
            Finding(
                WRONG,
                f"{facts.folder} cannot be written ({facts.folder_trouble}): set OUTRIDER_HOME to a folder that can.",
            )
        )
    if facts.disk_gb is not None and facts.disk_gb < _LEAST_DISK:
        found.append(Finding(WRONG, f"Only {facts.disk_gb:.1f} GB are free at {facts.folder}: models may not fit."))
    if not facts.exact:
        found.append(
            Finding(
                WRONG,
                "Passes are not row-invariant with this dtype on this machine: near-ties may fall differently with "
                "speculation. `outrider verify` says how often.",
            )
        )
    if not found:
        found.append(
            Finding(GOOD, "The installation is in order, and speculative text is bit-identical to plain text.")
        )
    return found


def folder_state(folder: Path) -> tuple[str | None, float | None]:
    """What keeps us from writing there (None: nothing), and how many GB are free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / ".doctor"
        trial.write_text("")
        trial.unlink()
        return None, shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        return error.strerror or str(error), None


def versions_trouble() -> list[str]:
    """Installed packages that are older than Outrider asks for, one sentence each."""
    try:
        asked = requires("outrider") or []
    except PackageNotFoundError:
        return []  # run from its source: nothing was promised
    found = []
    for line in asked:
        match = re.match(r"([\w.-]+)\s*>=\s*([\d.]+)\s*$", line)  # without extras' conditions
        have = installed(match[1]) if match else None
        if match and have is None:
            found.append(f"{match[1]} is not installed, but Outrider needs at least {match[2]}.")
        elif match and have and _numbers(have) < _numbers(match[2]):
            found.append(f"{match[1]} is {have}, but Outrider needs at least {match[2]}: upgrade it.")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
