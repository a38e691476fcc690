"""Whether speculation pays on this machine for this model, and why: sentences from measured numbers.

`advise` is a pure function of `Facts`: the same numbers always give the same findings. It reports problems; it repairs
nothing.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import torch

from ..backends.loaded_weights import pass_bytes, weight_bytes
from ..backends.machine import free_memory
from ..control.costs import PassCosts
from ..drafters import Workspace, make, names
from ..drafters._expectation import break_even
from ..engine.cache import Cache
from ..errors import OutriderError
from ..llm import LLM
from ..models.paths import cache_folder
from ..models.precision import INT8, NAMES, OWN
from .bench import BenchPlan, EncodedPrompt, Progress, make_setup, measure, pass_costs
from .environment import environment, installed

KS = (1, 4, 8)
GOOD, HINT, WRONG = "good", "hint", "wrong"
_STALE = 0.3  # relative difference from which stored pass costs count as measured under other conditions
_RUNNERS = {"Graphs": "captured graphs", "Eager": "eager"}  # by class
LOSS = 0.97  # of the plain speed: below it a kind of text counts as lost, above it as noise
NOT_EXACT = (
    "Passes are not row-invariant with this dtype on this machine: near-ties may fall differently with speculation. "
    "`outrider verify` counts how often."
)
_MIN_DISK_GB = 2.0  # less than a small model and its packed copy
_TRIAL_SLOTS = 64  # of the cache in which a drafter's memory is measured


@dataclass(frozen=True)
class Finding:
    level: str  # good, hint (something to change), wrong (something is broken)
    text: str


@dataclass(frozen=True)
class CategoryResult:
    """Acceptance and speedup on one category of text."""

    category: str
    alpha: float | None
    speedup: float | None  # of decoding
    request: float | None = None  # of the whole request


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the target, or those that a drafter adds."""

    name: str
    weights: int
    kv: int  # for as many slots as the engine has


@dataclass(frozen=True)
class Facts:
    """Everything that findings are made of. `outrider doctor --json` prints these names."""

    model: str
    dtype: str
    dtypes: tuple[str, ...]  # that this version offers
    exact: bool  # passes are row-invariant
    drafter: str
    costs: dict[int, float]  # seconds of a pass by rows, measured now
    kinds: list[CategoryResult]
    overall: CategoryResult
    environment: dict[str, Any]
    folder: Path  # of caches
    folder_trouble: str | None = None
    disk_gb: float | None = None
    versions_trouble: list[str] = field(default_factory=list)
    kept: dict[int, float] = field(default_factory=dict)  # the stored pass costs, which the controller uses
    kept_in: Path | None = None
    device: str = "cpu"  # of the target
    runner: str = ""  # how its passes run
    memory: list[MemoryUse] = field(default_factory=list)  # the target, then each drafter
    backend: str = ""  # what runs the target, where that is not the built-in decoder
    drift: tuple[str, ...] = ()  # a sentence for each drafter that has gone stale
    failures: int = 0  # steps in which the drafter failed
    failure: str = ""  # how, if its last call did
    ahead: dict[str, Any] | None = None  # the report of the `ahead` drafter, where that is the one examined
    head: dict[str, Any] | None = None  # what the head's folder is, where the drafter `head` is examined
    pass_bytes: int = 0  # of weights that a pass over one row reads
    memory_speed: float = 0.0  # bytes a second of a copy, read and written
    context: int = 0  # tokens of the model's longest sequence
    length: int = 0  # of the engine's
    slots: int = 0  # tokens whose K and V there is memory for
    gpu_free: int | None = None  # bytes of the GPU that are left beside all that

    @property
    def floor(self) -> float | None:
        """Seconds of reading a pass's weights once."""
        return self.pass_bytes / self.memory_speed if self.memory_speed else None

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def gpu(self) -> dict[str, Any] | None:
        """The GPU that the target runs on."""
        gpus: list[dict[str, Any]] = self.environment.get("gpus", [])
        index = int(self.device.partition(":")[2] or 0)
        return gpus[index] if self.on_gpu and index < len(gpus) else None

    def break_even(self, k: int) -> float | None:
        return break_even(PassCosts(self.costs), k)


# ---------------------------------------------------------------- measuring


def examine(llm: LLM, prompts: list[EncodedPrompt], plan: BenchPlan, progress: Progress) -> Facts:
    """Measure everything that `advise` needs, with the drafter and K that the model is configured with."""
    before = environment()  # the load average without this benchmark
    bench = measure(llm, prompts, [make_setup(llm, llm.config.drafter_name, llm.config.k)], plan, progress)
    rows = bench.rows()
    *kinds, overall = [CategoryResult(row.category, row.alpha, row.speedup, row.speedup_total) for row in rows]
    folder_trouble, disk_gb = folder_state(cache_folder())
    runner = type(llm.engine.target).__name__
    return Facts(
        llm.name, llm.dtype, NAMES, llm.exact, llm.config.drafter_name,
        pass_costs(llm), kinds, overall, before, cache_folder(), folder_trouble, disk_gb, versions_trouble(),
        kept=bench.pass_costs, kept_in=llm.costs.path,
        device=llm.device, runner=_RUNNERS.get(runner, runner), memory=memory_use(llm),
        backend=llm.backend, drift=tuple(llm.drift.sentences()), failures=rows[-1].failures, failure=rows[-1].why,
        ahead=_ahead_facts(llm, prompts, plan) if llm.config.drafter_name == "ahead" else None,
        head=llm.drafting.get("head"), pass_bytes=pass_bytes(llm.target), memory_speed=memory_speed(llm.target.device),
        context=llm.target.config.context_length, length=llm.engine.cache.length, slots=llm.engine.cache.slots,
        gpu_free=free_memory(llm.target.device) if llm.target.device.type == "cuda" else None,
    )  # fmt: skip


def memory_speed(device: torch.device) -> float:
    """Bytes per second of a large copy on this device, reads and writes together; the best of several."""
    gpu = device.type == "cuda"
    source = torch.ones((1 << 30) if gpu else (1 << 27), dtype=torch.uint8, device=device)
    target, taken = torch.empty_like(source), []
    for _ in range(6):
        start = time.perf_counter()
        target.copy_(source)
        if gpu:
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return 2 * source.numel() / min(taken)


def _ahead_facts(llm: LLM, prompts: list[EncodedPrompt], plan: BenchPlan) -> dict[str, Any]:
    """The `ahead` drafter's own report after all prompts in one engine: hit rates need many outcomes."""
    llm = llm.using(max_batch=1)
    for index, prompt in enumerate(prompts):
        llm.generate([prompt.ids], plan.params(index))
    report: dict[str, Any] = llm.drafting["ahead"]
    return report | {"controller": llm.engine.controller.why}


def memory_use(llm: LLM) -> list[MemoryUse]:
    """The target's memory, then what each drafter adds that can be made with the configured options.

    Drafters are made beside a small cache and dropped: nothing runs, and the engine stays as it is.
    """
    uses = [MemoryUse("target", weight_bytes(llm.target), llm.engine.target.plane.bytes)]
    for name in names():
        cache = Cache(_TRIAL_SLOTS, 1, llm.engine.cache.length, llm.engine.cache.device)
        plane = cache.add_plane(*llm.target.plane_shape)
        try:
            drafter = make(name, Workspace(llm.target, cache, plane, llm.config.options, llm.tokenizer))
        except OutriderError:
            continue
        memory = drafter.traits.memory()
        uses.append(MemoryUse(name, memory.weights, memory.kv * llm.engine.cache.slots // _TRIAL_SLOTS))
    return uses


def folder_state(folder: Path) -> tuple[str | None, float | None]:
    """Why the folder cannot be written (None: it can), and how many GB are free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / ".doctor"
        trial.write_text("")
        trial.unlink()
        return None, shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        return error.strerror or str(error), None


def versions_trouble() -> list[str]:
    """Installed packages that are older than Outrider requires, one sentence each."""
    try:
        requirements = requires("outrider") or []
    except PackageNotFoundError:
        return []  # run from a source tree
    problems = []
    # Requirements of extras have a condition at the end and do not match.
    for name, least in re.findall(r"^([\w.-]+)\s*>=\s*([\d.]+)\s*$", "\n".join(requirements), re.MULTILINE):
        version = installed(name)
        if version is None:
            problems.append(f"{name} is not installed, but Outrider needs at least {least}.")
        elif _version(version) < _version(least):
            problems.append(f"{name} is {version}, but Outrider needs at least {least}: upgrade it.")
    return problems


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


# ---------------------------------------------------------------- findings


def advise(facts: Facts) -> list[Finding]:
    """The verdict first, then why, then what to change, then what is broken."""
    hints = [Finding(HINT, text) for text in (*_hardware_hints(facts), *_model_hints(facts), *facts.drift)]
    return [verdict(facts), why(facts), *_head(facts), *_ahead(facts), *hints, *_installation(facts)]


def reading(facts: Facts) -> str:
    """What a pass reads, and the time that this takes at least; empty where it is not known."""
    if facts.floor is None:
        return ""
    size, speed = f"{facts.pass_bytes / 1e9:.2f} GB", f"{facts.memory_speed / 1e9:,.0f} GB/s"
    return (
        f"A pass reads {size} of weights in {facts.dtype}: at least {1e3 * facts.floor:.2f} ms at the {speed} of a "
        f"copy here; one row takes {1e3 * facts.costs[1]:.2f} ms."
    )


def room(facts: Facts) -> str:
    """How long a sequence may be, and what K and V take; empty where it is not known."""
    if not (facts.slots and facts.memory):
        return ""
    whole = "the model's whole context" if facts.length >= facts.context else f"of the model's {facts.context:,}"
    left = "" if facts.gpu_free is None else f" {facts.gpu_free / 1e9:.1f} GB of the GPU are free beside them."
    return (
        f"A sequence may have {facts.length:,} tokens, {whole}; K and V of {facts.slots:,} tokens, those of all "
        f"sequences together, take {facts.memory[0].kv / 1e9:.2f} GB.{left}"
    )


def verdict(facts: Facts) -> Finding:
    speed = facts.overall.speedup
    if speed is None:
        return Finding(HINT, "Nothing could be timed: the answers were too short.")
    best, worst = _extremes(facts.kinds)
    span = f" ({best.category} {best.speedup:.2f} ×, {worst.category} {worst.speedup:.2f} ×)" if best and worst else ""
    if speed >= 1.03:
        lost = [f"{kind.category} {kind.speedup:.2f} ×" for kind in facts.kinds if (kind.speedup or 1.0) < LOSS]
        text = f"Speculation pays here: {speed:.2f} × plain decoding with {facts.drafter}{span}."
        return Finding(HINT, f"{text} But it lost on {', '.join(lost)}.") if lost else Finding(GOOD, text)
    if speed >= LOSS:
        tail = f" It pays on {best.category}: {best.speedup:.2f} ×." if best and (best.speedup or 0) >= 1.05 else ""
        return Finding(HINT, f"Speculation makes no difference overall: {speed:.2f} × with {facts.drafter}.{tail}")
    return Finding(WRONG, f"Speculation loses here: {speed:.2f} × plain decoding with {facts.drafter}{span}.")


def why(facts: Facts) -> Finding:
    """Pass costs against acceptance."""
    need, ratio = facts.break_even(4), PassCosts(facts.costs)(5) / facts.costs[1]
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


def _extremes(kinds: list[CategoryResult]) -> tuple[CategoryResult | None, CategoryResult | None]:
    timed = sorted((k for k in kinds if k.speedup is not None), key=lambda k: k.speedup or 0)
    return (timed[-1], timed[0]) if len(timed) > 1 else (None, None)


def _head(facts: Facts) -> list[Finding]:
    """The head's format, its origin, and which conventions were assumed where its file does not say."""
    head = facts.head
    if head is None:
        return []
    origin = f", trained for {head['trained_for']}" if head["trained_for"] else ""
    text = f"The drafter is {head['format']}{origin}; it fits this target."
    return [Finding(GOOD, f"{text} {head['reading']}".strip())]


def _ahead(facts: Facts) -> list[Finding]:
    """Drafting ahead: hit rate, fitted miss curves, hidden time, and whether it is kept."""
    report = facts.ahead
    if report is None:
        return []
    if report["hit_rate"] is None:
        return [Finding(HINT, f"Nothing was drafted ahead: {report['controller'] or report['why']}.")]
    curves = " and ".join(f"{law['c']:.2f} F^-{law['r']:.2f} ({end})" for end, law in report["miss"].items())
    text = (
        f"Drafting ahead in a {report['place']}: {report['hit_rate']:.0%} of outcomes were prepared; F forks miss "
        f"{curves}; {report['hidden_seconds']:.2f} s of drafting hidden, {report['exposed_seconds']:.2f} s not; "
        f"{report['why']}."
    )
    return [Finding(GOOD if report["pays"] else HINT, text)]


def _hardware_hints(facts: Facts) -> Iterator[str]:
    """A GPU that is present but unused; then, as GPU passes need none of it, the CPU's kernels and threads."""
    env = facts.environment
    reason, gpus, cap = env.get("no_gpu"), env.get("gpus", []), env.get("isa_cap")
    threads, cores, load = env.get("threads", 1), env.get("cores", 1), env.get("load")
    kernels, omp = str(env.get("kernels", "")), env.get("omp", {})
    if not facts.on_gpu:
        if gpus and reason:
            yield f"The GPU is not used: {reason}."
        elif gpus:
            yield f"The model runs on the CPU, but there is a GPU ({gpus[0]['name']}): leave --device out."
        elif env.get("driver"):
            yield f"There is a driver for NVIDIA GPUs, but no GPU is used: {reason}."
        if kernels.startswith("torch"):
            missing = kernels.partition("(")[2].rstrip(")") or "reason unknown"
            yield f"The native kernels are not used ({missing}), so passes are slow: install a C compiler (gcc, clang)."
        if threads > cores:
            yield f"{threads} threads share {cores} cores and wait for each other: set OMP_NUM_THREADS={cores}."
        elif threads == 1 and cores > 1:
            because = " because OMP_NUM_THREADS is 1" if omp.get("OMP_NUM_THREADS") == "1" else ""
            yield f"Only one thread is used on a machine with {cores} cores{because}: allow more threads."
        elif omp.get("OMP_WAIT_POLICY", "").lower() == "passive":
            yield "OMP_WAIT_POLICY=passive makes threads sleep between small operations: unset it."
        if env.get("amx") and cap:
            yield f"oneDNN is kept to {cap}: with AMX a row's bits depend on its neighbours."
    if load is not None and load > cores + 0.5:
        yield f"The machine is busy (load {load:g} on {cores} cores): these timings are rough, run it again later."


def _model_hints(facts: Facts) -> Iterator[str]:
    """Hints about the dtype, stored pass costs that differ from those measured now, and the drafter."""
    if facts.dtype.startswith(("float32", "float64")):
        yield f"The model runs in {facts.dtype}: dtype bfloat16 or auto reads half as many bytes per pass."
    elif "int8" in facts.dtypes and facts.dtype not in (INT8, *OWN):
        rounded = ", with rounded weights" if facts.on_gpu else ""
        yield f"The model runs in {facts.dtype}: try --dtype int8, which reads half as many bytes per pass{rounded}."
    if facts.kept and facts.kept_in is not None:
        stored, now = PassCosts(facts.kept), PassCosts(facts.costs)
        difference = max(abs((stored(n) / stored(1)) / (now(n) / now(1)) - 1) for n in (2, 5, 9))
        if difference > _STALE:
            yield (
                f"The pass costs that K auto uses differ by {difference:.0%} from those measured now; on a quiet "
                f"machine, delete {facts.kept_in} to have them measured again."
            )
    need, alpha = facts.break_even(4), facts.overall.alpha
    if need is not None and alpha is not None and alpha < need:
        yield "A better drafter would help most: `outrider tune` compares the available ones on your own prompts."


def _installation(facts: Facts) -> list[Finding]:
    problems = list(facts.versions_trouble)
    if facts.failures:
        how = f": {facts.failure}" if "failed" in facts.failure else "; its first error is in the log above"
        problems.append(f"The drafter {facts.drafter} failed in {facts.failures} steps{how}.")
    if facts.folder_trouble:
        problems.append(
            f"{facts.folder} cannot be written ({facts.folder_trouble}): set OUTRIDER_HOME to a writable folder."
        )
    if facts.disk_gb is not None and facts.disk_gb < _MIN_DISK_GB:
        problems.append(f"Only {facts.disk_gb:.1f} GB are free at {facts.folder}: models may not fit.")
    if not facts.exact:
        problems.append(NOT_EXACT)
    if problems:
        return [Finding(WRONG, text) for text in problems]
    return [Finding(GOOD, "The installation is in order, and speculative text is bit-identical to plain text.")]
