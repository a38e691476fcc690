"""What happened, step by step: recorded once, read by tests, terminals and pages.

A trace is JSONL: a header, one line per (step, sequence), a footer with counters. Levels: `off` records nothing,
`summary` the nodes with their fates, `full` also what the target thought of each node: p, its top five, the margin.
The recorder copies what it needs from a step and asks the target for nothing that was not computed anyway. The time it
takes itself is taken out of the clock: a recorded run shows the times of one that nobody records.

    {"step": 17, "seq": 1, "at": 214, "source": "suffix", "budget": 5, "why": "…",
     "us": {"draft": [0, 812], "verify": [812, 9140], "overlap": [900, 20], "judge": [9952, 41]},
     "nodes": [[token, parent, q, p, fate], …], "emitted": [262, 4950],
     "chose": [[token, p, margin, [[token, p], …]], …], "guesses": {"-1": [[token, q], …], …},
     "noise": [{"262": g, …}, …]}
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from ..errors import OutriderError
from ..types import Listener, Step, Tree, Verdict
from .judge import RULES
from .sampling import CHOICE, gumbel, key

VERSION = 1
LEVELS = ("off", "summary", "full")
Line = dict[str, Any]
Guess = Callable[[], list[tuple[int, float]]]


class Recorder(Listener):
    """Listens to an engine. `lines` grows in memory, or each line goes to `file` as it happens."""

    def __init__(self, level: str = "off", file: TextIO | None = None) -> None:
        if level not in LEVELS:
            raise OutriderError(f"There is no trace level '{level}'. Choose one of: {', '.join(LEVELS)}.")
        self.level, self.file = level, file
        self.reads_logits = self.reads_guesses = level == "full"
        self.own = 0.0  # seconds spent here so far
        self.lines: list[Line] = []
        self.counts = {"steps": 0, "drafted": 0, "accepted": 0, "emitted": 0}

    def header(self, **facts: Any) -> None:
        """Once, before the first step: model, drafter, rule, prompts, pieces: whatever readers need."""
        self._put({"outrider_trace": VERSION, "level": self.level, **facts})

    def observe(self, step: Step) -> None:
        if self.level == "off":
            return
        begin = time.perf_counter()
        for i, verdict in enumerate(step.verdicts):
            if verdict is not None:
                self._put(Note(step, i, verdict, full=self.level == "full", own=self.own).line())
                self._count(step.draft.trees[i], verdict)
        self.own += time.perf_counter() - begin

    def footer(self, **facts: Any) -> None:
        self._put({"end": True, **self.counts, **facts})

    def _count(self, tree: Tree, verdict: Verdict) -> None:
        for name, more in zip(self.counts, (1, len(tree.tokens), len(verdict.path), len(verdict.tokens)), strict=True):
            self.counts[name] += more

    def _put(self, line: Line) -> None:
        if self.level == "off":
            return
        if self.file is None:
            self.lines.append(line)
        else:
            self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self.file.flush()  # a run that is cut off leaves a readable trace


class Passes(Recorder):
    """Listens to the plain run beside a recorded one: when each pass began and how long it took, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.us: list[list[int]] = []

    def observe(self, step: Step) -> None:
        if any(verdict is not None for verdict in step.verdicts):
            self.us.append([round(step.starts["verify"] * 1e6), round(step.clock["verify"] * 1e6)])


class Note:
    """One sequence's part of a step: all that its line will say, as long as the step is there to be asked.

    What the target thought takes longest to work out. With `keep` the logits are copied, so that `line()` may be asked
    at any later time, on any thread; without, it has to be asked before the next step. `own` seconds are taken out of
    the clock: whoever listened so far has spent them.
    """

    def __init__(self, step: Step, i: int, verdict: Verdict, full: bool, keep: bool = False, own: float = 0.0) -> None:
        at, self.verdict, self.tree, seq = step.first[i], verdict, step.draft.trees[i], step.turns[i].seq
        self.seed = None if seq.params.greedy or seq.rule != "match" else seq.seed  # None: no noise
        self.logits: Tensor | None = None  # [n+1, V]
        if full:
            logits = step.output.logits[at : at + 1 + len(self.tree.tokens)]
            self.logits = logits.clone().cpu() if keep else logits.cpu()
            if seq.matcher is not None:  # a guide's state belongs to the engine's thread: it is asked here
                asked: dict[int, Guess] = {n: partial(list, guess()) for n, guess in (self.tree.guesses or {}).items()}
                self.tree = self.tree._replace(guesses=asked)
        self._line = _line(step, i, verdict, own)

    @property
    def rows(self) -> int:
        """Of logits that are kept, the target's and the drafter's."""
        return 0 if self.logits is None else self.logits.shape[0] + len(self.tree.guesses or ())

    def line(self) -> Line:
        if self.logits is not None:
            _think(self._line, self.logits, self.verdict)
            if self.tree.guesses:
                guessed = {at: guess() for at, guess in self.tree.guesses.items() if at in self.tree.parents}
                self._line["guesses"] = {
                    str(at): [[token, round(q, 4)] for token, q in likely] for at, likely in guessed.items()
                }
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


def _nodes(tree: Tree, verdict: Verdict) -> list[list[Any]]:
    rows = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        survival = tree.survival[node] if tree.survival else None
        before = tree.survival[parent] if tree.survival and parent >= 0 else 1.0
        q = None if survival is None else round(survival / before if before else 0.0, 4)
        rows.append([token, parent, q, None, verdict.fates[node]])
    return rows


def _think(line: Line, logits: Tensor, verdict: Verdict) -> None:
    """Add what the target thought, from its logits [n+1, V]: each node's p, and for each emitted token its p, the gap
    between the two highest logits, the top five. Only what is told is worked out: a vocabulary is long."""
    logits = logits.float()
    whole = torch.logsumexp(logits, -1)  # [n+1]
    nodes = line["nodes"]
    if nodes:
        where = torch.tensor([[node[1] + 1, node[0]] for node in nodes])  # [n, 2] row and token
        chances = (logits[where[:, 0], where[:, 1]] - whole[where[:, 0]]).exp()
        for node, p in zip(nodes, chances.tolist(), strict=True):
            node[3] = round(p, 4)
    line["chose"] = []
    if not verdict.tokens:
        return
    rows = logits[verdict.rows]  # [emitted, V]
    base = whole[verdict.rows]
    values, ids = rows.topk(min(5, rows.shape[1]))
    own = (rows[range(len(verdict.tokens)), verdict.tokens] - base).exp().tolist()
    margins = (values[:, 0] - values[:, 1]).tolist() if values.shape[1] > 1 else [0.0] * len(own)
    for token, p, margin, tops, shares in zip(
        verdict.tokens, own, margins, ids.tolist(), (values - base[:, None]).exp().tolist(), strict=True
    ):
        top = [[t, round(v, 4)] for t, v in zip(tops, shares, strict=True)]
        line["chose"].append([token, round(p, 4), round(margin, 4), top])


def _noise(line: Line, verdict: Verdict, seed: int) -> list[dict[str, float]]:
    """At each emitted token's place: the noise of what was chosen, of what was drafted, of the target's top five."""
    places = []
    for i, (row, chose) in enumerate(zip(verdict.rows, line["chose"], strict=True)):
        drafted = [node[0] for node in line["nodes"] if node[1] == row - 1]
        tokens = sorted({chose[0], *drafted, *(token for token, _ in chose[3])})
        noise = gumbel(key(seed, line["at"] + i, CHOICE), torch.tensor(tokens))
        places.append({str(token): round(g, 4) for token, g in zip(tokens, noise.tolist(), strict=True)})
    return places


# ---------------------------------------------------------------- reading


@dataclass
class Trace:
    """A whole recording."""

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

    def save(self, path: Path | str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            for line in (self.header, *self.lines, self.footer):
                if line:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read(path: Path | str) -> Trace:
    """Load a JSONL trace; a file cut off in mid-line is read up to there."""
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
                return  # the run was cut off while writing this line
            line = None
        if not isinstance(line, dict):
            raise OutriderError(f"{path} is not an Outrider trace: line {number} is not a JSON object.")
        yield line


def tokens_of(line: Line) -> set[int]:
    """Every token that a step's line mentions: drafted, emitted, or thought likely by anybody."""
    tokens = {*line["emitted"], *(node[0] for node in line["nodes"])}
    tokens |= {token for chose in line.get("chose", ()) for token, _ in chose[3]}
    return tokens | {token for likely in line.get("guesses", {}).values() for token, _ in likely}


# ---------------------------------------------------------------- replaying


class _Recorded:
    """The target's choices and the coins of one line, played back to the judge."""

    def __init__(self, line: Line) -> None:
        self.emitted = line["emitted"]
        flips, draws = line.get("coins", ((), ()))
        self.flips: dict[int, bool] = dict(flips)
        self.draws: dict[int, int] = dict(draws)
        size = 1 + max([*self.emitted, *(node[0] for node in line["nodes"]), 0])
        self.anything = torch.ones(size, dtype=torch.float64)  # the coins are known: chances do not matter

    def choose(self, row: int, emitted: list[int]) -> int:
        # Where the text ended inside an accepted block, the target's further choices were not emitted.
        return self.emitted[len(emitted)] if len(emitted) < len(self.emitted) else -1

    def law(self, row: int, emitted: list[int]) -> Tensor:
        return self.anything

    def flip(self, place: int, chance: float) -> bool:
        return self.flips[place]

    def draw(self, place: int, p: Tensor) -> int:
        return self.draws[place]


def replay(trace: Trace) -> list[Verdict]:
    """Judge every recorded step again, without a model. The result is what was recorded, or the trace is wrong."""
    rule = RULES[trace.header.get("rule", "match")]
    verdicts = []
    for line in trace.lines:
        tree, played = Tree([n[0] for n in line["nodes"]], [n[1] for n in line["nodes"]]), _Recorded(line)
        verdicts.append(rule(tree, played, played).cut(len(line["emitted"]), tree))
    return verdicts


def recorded(trace: Trace) -> list[Verdict]:
    """The verdicts as the lines tell them: accepted nodes in order of depth, and what was emitted."""
    verdicts = []
    for line in trace.lines:
        fates = "".join(node[4] for node in line["nodes"])
        path = [node for node, fate in enumerate(fates) if fate == "a"]
        verdicts.append(Verdict(path, line["emitted"], fates))
    return verdicts
