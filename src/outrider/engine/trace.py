"""Traces: what happened in each step, recorded to JSONL, read back and replayed.

A trace is a header, one line per (step, sequence), and a footer with counters. Levels: `off` records nothing, `summary`
the nodes with their fates, `full` also the target's view of each node: p, its top five, the margin. The recorder copies
what it needs from a step and causes no further passes. Its own time is subtracted from the recorded times, so that they
are those of a run without a recorder.

    {"step": 17, "seq": 1, "at": 214, "source": "suffix", "budget": 5, "why": "…",
     "us": {"draft": [0, 812], "verify": [812, 9140], "overlap": [900, 20], "judge": [9952, 41]},
     "nodes": [[token, parent, q, p, fate], …], "emitted": [262, 4950],
     "chose": [[token, p, margin, [[token, p], …]], …], "guesses": {"-1": [[token, q], …], …},
     "noise": [{"262": g, …}, …]}
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from ..errors import OutriderError
from ..types import ACCEPTED, Listener, Step, Tree, Verdict
from .judge import RULES
from .sampling import CHOICE, gumbel, key

log = logging.getLogger("outrider.engine")
VERSION = 1
LEVELS = ("off", "summary", "full")
Line = dict[str, Any]
Guess = Callable[[], list[tuple[int, float]]]


class Recorder(Listener):
    """An engine's listener that records. `lines` grows in memory, or each line is written to `file` at once."""

    def __init__(self, level: str = "off", file: TextIO | None = None) -> None:
        if level not in LEVELS:
            raise OutriderError(f"There is no trace level '{level}'. Choose one of: {', '.join(LEVELS)}.")
        self.level, self.file = level, file
        self.reads_logits = self.reads_guesses = level == "full"
        self.own = 0.0  # seconds spent here so far
        self.lines: list[Line] = []
        self.counts = {"steps": 0, "drafted": 0, "accepted": 0, "emitted": 0}

    def header(self, **facts: Any) -> None:
        """Once, before the first step: model, drafter, rule, prompts, pieces and other facts for readers."""
        self._put({"outrider_trace": VERSION, "level": self.level, **facts})

    def observe(self, step: Step) -> None:
        if self.level == "off":
            return
        begin = time.perf_counter()
        for i, verdict in enumerate(step.verdicts):
            if verdict is not None:
                self._put(Note(step, i, verdict, full=self.level == "full", own=self.own).line())
                counts = 1, len(step.draft.trees[i].tokens), len(verdict.path), len(verdict.tokens)
                self.counts = {name: n + more for (name, n), more in zip(self.counts.items(), counts, strict=True)}
        self.own += time.perf_counter() - begin

    def footer(self, **facts: Any) -> None:
        self._put({"end": True, **self.counts, **facts})

    def _put(self, line: Line) -> None:
        if self.level == "off":
            return
        if self.file is None:
            self.lines.append(line)
            return
        try:
            self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self.file.flush()  # an interrupted run leaves a readable trace
        except OSError as error:  # a full disk costs the trace, not the answer
            self.level = "off"
            log.warning("The trace ends here, generation goes on: %s: %s.", self.file.name, error.strerror or error)


class Passes(Recorder):
    """Records only when each pass began and how long it took: for the plain run beside a recorded one."""

    def __init__(self) -> None:
        super().__init__()
        self.us: list[list[int]] = []

    def observe(self, step: Step) -> None:
        if any(verdict is not None for verdict in step.verdicts):
            self.us.append([round(step.starts["verify"] * 1e6), round(step.clock["verify"] * 1e6)])


class Note:
    """One sequence's part of a step, from which its line is computed.

    With `keep` the logits are copied, and `line()` may be called later, on any thread; without, it must be called
    before the next step. `own` are the recorder's own seconds so far, which are subtracted from the times.
    """

    def __init__(self, step: Step, i: int, verdict: Verdict, full: bool, keep: bool = False, own: float = 0.0) -> None:
        at, self.verdict, self.tree, seq = step.first[i], verdict, step.draft.trees[i], step.turns[i].seq
        self.seed = None if seq.params.greedy or seq.rule != "match" else seq.seed  # None: no noise
        self.logits: Tensor | None = None  # [n+1, V]
        if full:
            logits = step.output.logits[at : at + 1 + len(self.tree.tokens)]
            self.logits = logits.clone().cpu() if keep else logits.cpu()
            if seq.matcher is not None:  # guesses read the guide's state, which belongs to the engine's thread
                read: dict[int, Guess] = {n: partial(list, guess()) for n, guess in (self.tree.guesses or {}).items()}
                self.tree = self.tree._replace(guesses=read)
        self._line = _line(step, i, verdict, own)

    @property
    def rows(self) -> int:
        """Rows of logits that are kept, the target's and the drafter's."""
        return 0 if self.logits is None else self.logits.shape[0] + len(self.tree.guesses or ())

    def line(self) -> Line:
        if self.logits is not None:
            _add_target_view(self._line, self.logits, self.verdict)
            if self.tree.guesses:
                guesses = {at: guess() for at, guess in self.tree.guesses.items() if at in self.tree.parents}
                self._line["guesses"] = {str(at): _rounded(pairs) for at, pairs in guesses.items()}
            if self.seed is not None:
                self._line["noise"] = _noise(self._line, self.verdict, self.seed)
            self.logits = None
        return self._line


def _line(step: Step, i: int, verdict: Verdict, own: float) -> Line:
    turn, tree = step.turns[i], step.draft.trees[i]
    coins: Any = step.coins[i]
    line: Line = {
        "step": step.index,
        "seq": turn.seq.id,
        "at": len(turn.seq.tokens) - len(verdict.tokens),
        "source": tree.source,
        "budget": turn.budget,
        "why": step.why,
        "us": {k: [round((step.starts[k] - own) * 1e6), round(v * 1e6)] for k, v in step.clock.items()},
        "nodes": _nodes(tree, verdict),
        "emitted": verdict.tokens,
    }
    if turn.seq.rule != "match":
        line["coins"] = [sorted(coins.flips.items()), sorted(coins.draws.items())]
    if step.failure:
        line["failure"] = step.failure
    if turn.seq.finish:
        line["finish"] = turn.seq.finish
    return line


def cut_line(line: Line, n: int) -> Line:
    """The line as if the text had ended after n emitted tokens; a copy."""
    fates, emitted = "".join(node[4] for node in line["nodes"]), line["emitted"]
    if n < len(emitted):
        tree = Tree([node[0] for node in line["nodes"]], [node[1] for node in line["nodes"]])
        path = [node for node, fate in enumerate(fates) if fate == ACCEPTED]
        fates = Verdict(path, emitted, fates).cut(n, tree).fates
    nodes = [[*node[:4], fate] for node, fate in zip(line["nodes"], fates, strict=True)]
    columns = {name: line[name][:n] for name in ("emitted", "chose", "noise") if name in line}
    return line | {"nodes": nodes} | columns


def _rounded(pairs: Iterable[tuple[int, float]]) -> list[list[Any]]:
    return [[token, round(p, 4)] for token, p in pairs]


def _nodes(tree: Tree, verdict: Verdict) -> list[list[Any]]:
    rows = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        survival = tree.survival[node] if tree.survival else None
        before = tree.survival[parent] if tree.survival and parent >= 0 else 1.0
        q = None if survival is None else round(survival / before if before else 0.0, 4)
        rows.append([token, parent, q, None, verdict.fates[node]])
    return rows


def _add_target_view(line: Line, logits: Tensor, verdict: Verdict) -> None:
    """Add p of each node, and for each emitted token its p, the margin between the two highest logits and the top five.

    logits [n+1, V]. Only these probabilities are computed, not the whole softmax.
    """
    logits = logits.float()
    total = torch.logsumexp(logits, -1)  # [n+1]
    parent_rows, drafted = [node[1] + 1 for node in line["nodes"]], [node[0] for node in line["nodes"]]
    for node, p in zip(line["nodes"], (logits[parent_rows, drafted] - total[parent_rows]).exp().tolist(), strict=True):
        node[3] = round(p, 4)
    rows, base = logits[verdict.rows], total[verdict.rows]  # [E, V], [E] for E emitted tokens
    values, ids = rows.topk(min(5, rows.shape[1]))  # [E, 5]
    own = (rows[range(len(rows)), verdict.tokens] - base).exp().tolist()
    margins = (values[:, 0] - values[:, 1]).tolist() if values.shape[1] > 1 else [0.0] * len(own)
    tops = map(zip, ids.tolist(), (values - base[:, None]).exp().tolist())
    line["chose"] = [
        [token, round(p, 4), round(margin, 4), _rounded(top)]
        for token, p, margin, top in zip(verdict.tokens, own, margins, tops, strict=True)
    ]


def _noise(line: Line, verdict: Verdict, seed: int) -> list[dict[str, float]]:
    """For each emitted token: the noise of the chosen token, of the drafted ones, of the target's top five."""
    noises = []
    for i, (row, chose) in enumerate(zip(verdict.rows, line["chose"], strict=True)):
        drafted = [node[0] for node in line["nodes"] if node[1] == row - 1]
        tokens = sorted({chose[0], *drafted, *(token for token, _ in chose[3])})
        noise = gumbel(key(seed, line["at"] + i, CHOICE), torch.tensor(tokens))
        noises.append({str(token): round(g, 4) for token, g in zip(tokens, noise.tolist(), strict=True)})
    return noises


# ---------------------------------------------------------------- reading


@dataclass
class Trace:
    """A whole trace, in memory."""

    header: Line = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    footer: Line = field(default_factory=dict)

    @staticmethod
    def of(lines: Iterable[Line]) -> Trace:
        trace = Trace()
        for line in lines:
            if "outrider_trace" in line:
                trace.header = line
            elif line.get("end"):
                trace.footer = line
            else:
                trace.lines.append(line)
        return trace


def read(path: Path | str) -> Trace:
    """Load a JSONL trace; a truncated last line is ignored."""
    try:
        with open(path, encoding="utf-8") as file:
            trace = Trace.of(_parse(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"The trace {path} cannot be read: {error}.") from error
    if not trace.header:
        raise OutriderError(f"{path} is not an Outrider trace: its first line has no 'outrider_trace'.")
    if trace.header["outrider_trace"] > VERSION:
        raise OutriderError(f"{path} was written by a newer Outrider (trace version {trace.header['outrider_trace']}).")
    return trace


def _parse(file: TextIO, path: Path | str) -> Iterator[Line]:
    for number, text in enumerate(file, start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            if number > 1:
                return  # the run was interrupted while writing this line
            line = None
        if not isinstance(line, dict):
            raise OutriderError(f"{path} is not an Outrider trace: line {number} is not a JSON object.")
        yield line


def tokens_of(line: Line) -> set[int]:
    """Every token that a step's line mentions: drafted, emitted, or among the likeliest."""
    tokens = {*line["emitted"], *(node[0] for node in line["nodes"])}
    tokens |= {token for chose in line.get("chose", ()) for token, _ in chose[3]}
    return tokens | {token for likely in line.get("guesses", {}).values() for token, _ in likely}


# ---------------------------------------------------------------- replaying


class _RecordedStep:
    """The target's choices and the randomness of one line, for the judge."""

    def __init__(self, line: Line) -> None:
        self.emitted = line["emitted"]
        flips, draws = line.get("coins", ((), ()))
        self.flips: dict[int, bool] = dict(flips)
        self.draws: dict[int, int] = dict(draws)
        size = 1 + max([*self.emitted, *(node[0] for node in line["nodes"]), 0])
        self.ones = torch.ones(size, dtype=torch.float64)

    def choose(self, row: int, emitted: list[int]) -> int:
        # Where the text ended inside an accepted block, the target's further choices were not emitted.
        return self.emitted[len(emitted)] if len(emitted) < len(self.emitted) else -1

    def distribution(self, row: int, emitted: list[int]) -> Tensor:
        return self.ones  # any distribution will do: flips and draws are recorded

    def flip(self, depth: int, chance: float) -> bool:
        return self.flips[depth]

    def draw(self, depth: int, p: Tensor) -> int:
        return self.draws[depth]


def replay(trace: Trace) -> list[Verdict]:
    """Judge every recorded step again, without a model. A valid trace gives `recorded(trace)`."""
    rule = RULES[trace.header.get("rule", "match")]
    verdicts = []
    for line in trace.lines:
        tree, step = Tree([n[0] for n in line["nodes"]], [n[1] for n in line["nodes"]]), _RecordedStep(line)
        verdicts.append(rule(tree, step, step).cut(len(line["emitted"]), tree))
    return verdicts


def recorded(trace: Trace) -> list[Verdict]:
    """The recorded verdicts."""
    verdicts = []
    for line in trace.lines:
        fates = "".join(node[4] for node in line["nodes"])
        path = [node for node, fate in enumerate(fates) if fate == "a"]
        verdicts.append(Verdict(path, line["emitted"], fates))
    return verdicts
