"""The loop without the host: a round drafts, runs the target's pass, chooses, compares and appends on the device.

A sequence that joins gets one line of device state: its tokens, length, slots, sampling parameters, draft (`Lines`). A
round is recorded once for each shape and replayed with a few numbers from the host: which lines take part, how many
pending tokens each feeds, how many drafted tokens it may verify, new slots, and drafts of host drafters. Everything
else is in the lines, so the next round is started before the host has read this one. Lengths and tokens belong to the
device while a sequence runs; the host's copy is what it has read.

Drafts come from three places: the *late slot*, into which host drafters write tokens from a position on, taken where
the device has emitted their beginning meanwhile; a lookup in the sequence's own text; recorded passes of a draft model.

Promise: the text depends on none of this, because the target's own choices are emitted whatever was drafted. A host
that is late costs acceptance, never time and never text. It knows lines and rows, not why a budget was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence as Listing
from dataclasses import dataclass
from functools import partial
from operator import itemgetter, le
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...engine.cache import Plane, Row
from ...engine.drafter import Call
from ...engine.rounds import RoundResult, is_asked
from ...engine.sampling import adjusts, filters, log_probabilities, token_logprobs
from ...types import Sequence, TokenLogprob, Tree, Turn
from .. import Model, Part
from ..rows import Rows
from .capture import Field, PinnedBuffer, fill_padded
from .graphs import CHEAP_ROWS, MISSES, ROW_SIZES, SAMPLING, WANTED_SIZES, Graphs, padded_size
from .kernels import adjusting, rounds as kernels, sampling
from .kernels.attention import rows_per_block
from .kernels.rounds import DEPTH, DRAFT, REPORT
from .kernels.sampling import Laws
from .lines import Lines, is_adjusted_here
from .state import F32, I32, I64, LANES, lanes_for, seconds

LATE_TOKENS = 64  # of a draft in the late slot
ALONE = 32  # rows up to which one sequence has recordings of its own
FILLED = 1024  # rows of a round without prompts that are recorded beforehand
PROMPT_SIZES = (
    *(rows for rows in ROW_SIZES if rows > ALONE),
    1536,
    2048,
    3072,
    4096,
    6144,
    8192,
)  # of one with prompts
CHAIN = 31  # tokens of chains that are recorded beforehand: the most that pay
TIMED = 16  # tokens of a long draft, which is timed beforehand
EACH = ("lines", "feeds", "budgets", "asks", "late_at", "late_count")  # one number for each sequence
PATCHES = 2048  # table entries that a round can update
TOP = 20  # alternatives that a round reports beside a token: the most that OpenAI's API allows
READINGS = (64, 512)  # rows of a pass with which a draft model's plane catches up


@dataclass(frozen=True)
class RoundShape:
    """Everything that a recorded round depends on. The number of sequences does not: they join and leave."""

    lanes: int  # sequences that there is room for: one, or as many as may run
    rows: int
    wanted: int  # equal to `rows`: all of them
    filtered: bool = False  # whether some row samples with top-k, top-p or min-p
    tree: bool = False  # drafts may have branches
    adjusted: bool = False  # whether some sequence has bias, penalties or bans
    logprobs: bool = False  # whether some sequence wants them

    @property
    def extras(self) -> tuple[bool, ...]:
        """What the round does beyond choosing by noise and temperature from chains."""
        return self.filtered, self.tree, self.adjusted, self.logprobs

    def holds(self, other: RoundShape) -> bool:
        """Whether a round of the other shape can be padded to this one at little cost."""
        fits = other.rows <= self.rows <= (2 * other.rows + 16 if self.rows <= CHEAP_ROWS else 3 * other.rows // 2)
        enough = other.lanes <= self.lanes and (self.wanted == self.rows or other.wanted <= self.wanted)
        return fits and enough and all(map(le, other.extras, self.extras))


class Lookup(NamedTuple):
    """Drafts from a sequence's own text, after its last tokens occurred earlier."""

    least: int  # n-gram sizes
    most: int
    survival: Callable[[int, int], list[float]]  # of so many tokens after so many that match
    source: str  # the drafter's name


class RecordedDrafts(Protocol):
    """Passes that draft at the beginning of a round."""

    source: str  # the drafter's name

    def join(self, seq: Sequence, row: Row) -> int:
        """A sequence joins; returns how many of its leading tokens the drafter's plane holds."""
        ...

    def has_read(self, seq: Sequence, tokens: int) -> None:
        """The device reports that the drafter's plane holds so many leading tokens of a sequence."""
        ...

    def warm(self, lanes: int) -> None:
        """Record what drafts for so many sequences, before requests arrive."""
        ...

    def recorded(self, lanes: int, tokens: int) -> Any:
        """What drafts so many tokens for so many sequences that lack a few rows."""
        ...

    def passes(self, turns: Listing[Turn], rows: list[Row], asks: list[int]) -> list[tuple[str, Any, int]]:
        """What reads and drafts asks[i] tokens for each turn: phase, recording, how often it runs. Those that ask for
        some come first."""
        ...


class RecordedRound:
    """One recorded round: rows, the target's pass, choices, comparison, lookup."""

    def __init__(self, rounds: Rounds, shape: RoundShape) -> None:
        self.rounds, self.shape, state = rounds, shape, rounds.state
        if shape.adjusted:
            rounds.lines.add_adjustments()
        t, r, lanes, device = shape.rows, shape.wanted, shape.lanes, state.device
        blocks = t if shape.tree else min(t, lanes + t // rounds.graphs.rows_per_block)
        self.tail = torch.zeros(blocks, DEPTH, dtype=I32, device=device) if shape.tree else state.no_tail
        self.rows = row_tensors(t, blocks, device) | {"want": torch.zeros(r, dtype=I64, device=device)}
        self.rows |= {name: torch.zeros(r, dtype=dtype, device=device) for name, dtype in SAMPLING.items()}
        self.rows |= {name: torch.zeros(r, dtype=I32, device=device) for name in ("owner", "node")}
        self.rows |= {"tail": self.tail, "plan": torch.zeros(lanes, 8, dtype=I32, device=device)}
        fields: dict[str, Field] = {"report": (I32, (lanes, REPORT))}
        if shape.logprobs:
            top = 1 + min(TOP, rounds.vocabulary)
            fields |= {"ranked": (I32, (r, top)), "logprobs": (F32, (r, top))}
        self.results = PinnedBuffer(state.driver, fields)
        self.inputs = rounds.inputs_for(lanes)
        self.recording = rounds.record(self._work)

    def _work(self) -> None:
        d, rounds, lines, rows = self.inputs, self.rounds, self.rounds.lines, self.rows
        state, results, shape = rounds.state, self.results.device, self.shape
        state.driver.poison([*rows.values(), *results.values()])
        kernels.patch(d["place"], d["slot"], state.table)
        late = {"at": d["late_at"], "count": d["late_count"], "tokens": d["late"]}
        kernels.take_late(lines.numbers, lines.tokens, lines.draft, lines.parents, d["lines"], late)
        kernels.lay_out(
            lines.numbers, lines.tokens, state.table, lines.draft, lines.parents, d, rows,
            state.padding, rounds.graphs.rows_per_block, shape.tree,
        )  # fmt: skip
        model, plane, prompts = rounds.graphs.model, rounds.graphs.plane, shape.wanted < shape.rows
        output = model.forward(rounds.rows(rows, model, prompts=prompts), plane)
        choices, highest = self._choose(output.logits)
        kernels.settle(
            lines.numbers, lines.tokens, lines.draft, lines.parents, lines.survival, state.table, d["lines"],
            rows["plan"], choices, highest, results["report"], shape.tree,
        )  # fmt: skip
        if shape.adjusted:
            adjusting.count(lines.numbers, lines.tokens, d["lines"], rows["plan"], lines.counts)
        if shape.logprobs:
            ids, values = log_probabilities(output.logits, choices, results["ranked"].shape[1] - 1)
            results["ranked"].copy_(ids)
            results["logprobs"].copy_(values)
        if rounds.lookup is not None:
            sizes, sources = rounds.lookup[:2], state.sources
            texts = None if sources is None else (sources.ids, sources.lengths)
            kernels.look_up(lines.numbers, lines.tokens, lines.draft, lines.parents, d["lines"], *sizes, texts)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's choice at each wanted row [R], and its highest logit [R]. logits [R, V]."""
        lines, rows, shape = self.rounds.lines, self.rows, self.shape
        laws = Laws(*(rows[name] for name in SAMPLING))
        if not shape.adjusted:
            return sampling.choose(logits, laws, shape.filtered)[:2]
        changed, state = torch.empty_like(logits), (lines.numbers, lines.draft, lines.parents)
        adjusting.adjust(logits, changed, rows, *state, lines.counts, lines.bias, shape.tree)
        return sampling.choose(changed, laws, shape.filtered)[0], logits.amax(-1)  # a ban is not an unsound logit


class Rounds:
    """Runs the target's rounds over one cache."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.state = graphs, graphs.state
        self.vocabulary = graphs.model.config.vocab_size
        self.lines = Lines(self.state, self.vocabulary)
        self.lookup: Lookup | None = None  # drafts from a sequence's own text
        self.drafts: RecordedDrafts | None = None  # of a model or a head
        self.trees = False  # whether recorded drafts may have branches
        self.calls: list[Call] = []  # of recorded drafts, once these have been timed
        self.capacity = lanes_for(graphs.state.batch)  # sequences in a round
        each = (I32, (self.capacity,))
        fields: dict[str, Field] = dict.fromkeys(EACH, each) | {"late": (I32, (self.capacity, LATE_TOKENS))}
        fields |= {"place": (I64, (PATCHES,)), "slot": (I32, (PATCHES,))}
        self.inputs = PinnedBuffer(self.state.driver, fields)  # what the host sends to a round
        self._recorded: dict[RoundShape, RecordedRound] = {}
        self._missed: Counter[RoundShape] = Counter()  # rounds of a shape that was not recorded
        self._kept: list[Callable[[], None]] = []
        self._owners: dict[int, Row] = {}  # line -> the row that joined it
        self._extras: dict[
            int, tuple[bool, bool, bool]
        ] = {}  # line -> filters, adjusts, wants logprobs; where any does

    def drives(self, seq: Sequence) -> bool:
        """Whether the device alone can continue this sequence: the host need not see logits between two passes."""
        ranked = (seq.params.logprobs or 0) <= min(TOP, self.vocabulary)
        adjusted = not adjusts(seq) or is_adjusted_here(seq, self.vocabulary)
        return seq.rule == "match" and ranked and adjusted and not seq.shows_logits

    def draft_with(self, model: Model, plane: Plane, part: Part, again: int, source: str) -> Tensor:
        """Let a model draft a chain for every sequence that asks for one, at the beginning of a round. Returns where
        unread tokens are.

        again: how many of the last tokens each chain reads once more: 2 in a plane of the model's own, so that a round
        that accepted everything needs no special case; 1 in the target's, where committed K/V must stay as it is.
        """
        self.drafts = DraftChains(self, model, plane, part, again, source)
        return self.state.unread

    def forget_lines(self) -> None:
        """Passes outside of rounds have continued the sequences: they join again."""
        self._owners.clear()

    def warm(self, prompt_rows: int = 0) -> None:
        """Record what requests will need, before they arrive: a recording stalls every sequence.

        prompt_rows: of the largest round.
        """
        sizes = [(1, rows, rows) for rows in ROW_SIZES if rows <= ALONE]
        sizes += [(self.capacity, rows, rows) for rows in ROW_SIZES if rows <= FILLED and self.capacity > 1]
        prompts = [rows for rows in PROMPT_SIZES if rows <= max(padded_size(prompt_rows), 512)]
        sizes += [(self.capacity, rows, self._wanted(rows, 1)) for rows in prompts]
        for lanes, rows, wanted in sizes:
            for tree in {False, self.trees and wanted == rows > 1}:
                shape = RoundShape(lanes, rows, wanted, tree=tree)
                if shape not in self._recorded:
                    self._recorded[shape] = RecordedRound(self, shape)
        if self.state.sources is not None:
            self.state.sources.warm()
        if self.drafts is not None:
            for lanes in (n for n in LANES if n <= self.capacity):
                self.drafts.warm(lanes)

    def time_drafts(self) -> None:
        """Time recorded drafts, on a device with a clock: by powers of two of sequences, for one token and for many."""
        if self.drafts is None or not self.state.driver.captures:
            return
        sizes = [2**i for i in range(self.capacity.bit_length())]
        calls = [(n, k, self.drafts.recorded(lanes_for(n), k)) for n in sizes for k in (1, TIMED)]
        self.calls[:] = [(n, k, min(self._seconds(recording) for _ in range(3))) for n, k, recording in calls]

    def _seconds(self, recording: Any) -> float:
        driver = self.state.driver
        start, end = driver.event(), driver.event()
        start.record(driver.stream)
        recording.replay()
        end.record(driver.stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def start(self, turns: Listing[Turn], late: Listing[Tree]) -> PendingRound:
        """Start a round, without waiting. Slots of every turn are reserved; late[i] follows what the host has read of
        sequence i."""
        order, asks = list(range(len(turns))), [0] * len(turns)
        if self.drafts is not None:
            asks = [turn.budget if is_asked(tree) else 0 for turn, tree in zip(turns, late, strict=True)]
            order.sort(key=lambda i: not asks[i])  # recorded drafts are for the first lanes
            turns, late, asks = [turns[i] for i in order], [late[i] for i in order], [asks[i] for i in order]
        rows = [self.state.cache.rows[turn.seq.id] for turn in turns]
        self.state.read_sources(turn.seq for turn in turns)
        for turn, row in zip(turns, rows, strict=True):
            if self._owners.get(row.line) is not row:
                self._join(turn.seq, row)
        recorded = self._round(self._shape(turns, rows, any(asks)))
        passes = [] if self.drafts is None else self.drafts.passes(turns, rows, asks)
        self._fill(turns, rows, late, asks)
        self.inputs.send()
        for phase, recording, times in passes:
            with self.state.timed(phase):
                for _ in range(times):
                    recording.replay()
        with self.state.timed("verify"):
            recorded.recording.replay()
        return PendingRound(self, recorded, turns, rows, order)

    def _join(self, seq: Sequence, row: Row) -> None:
        self._owners[row.line] = row
        extras = filters(seq), adjusts(seq), seq.params.logprobs is not None
        self._extras.pop(row.line, None)
        if any(extras):
            self._extras[row.line] = extras
        held, read = min(self.graphs.plane.holds(seq.id), len(seq.tokens) - 1), 0
        if self.drafts is not None:
            read = self.drafts.join(seq, row)
        self.lines.join(seq, row.line, held, read)
        self.state.driver.poison([self.state.table[row.line, len(row.slots) + len(row.spare) :]])

    def _is_late(self, tree: Tree) -> bool:
        """Whether a host draft is sent; what a lookup finds in the latest text is better than the same a round ago."""
        known = self.lookup is not None and tree.source == self.lookup.source
        return not is_asked(tree) and tree.is_chain and not known

    def has_read(self, seq: Sequence, row: Row, tokens: int) -> None:
        """The recorded drafter's plane holds so many tokens of a sequence, if that still has this row."""
        if self.drafts is not None and self.state.cache.rows.get(seq.id) is row:
            self.drafts.has_read(seq, min(tokens, len(seq.tokens)))

    def source(self, number: int) -> str:
        """The name of the drafter of a reported draft; of a late one the host knows it."""
        own = self.lookup if number == kernels.LOOKUP else self.drafts
        return own.source if number > kernels.LATE and own is not None else ""

    def claims(self, match: int, tokens: int) -> list[float]:
        """The survival of a draft that was looked up after a match of this length."""
        assert self.lookup is not None
        return self.lookup.survival(match, tokens)

    def _shape(self, turns: Listing[Turn], owners: list[Row], asked: bool) -> RoundShape:
        needed = sum(turn.feed + turn.budget for turn in turns)
        wanted = sum(1 + turn.budget for turn in turns if turn.whole)
        rows = padded_size(needed)
        lanes = 1 if len(turns) == 1 and rows <= ALONE else self.capacity
        fits = rows if wanted == needed else self._wanted(rows, wanted)
        extras = [self._extras[row.line] for row in owners if row.line in self._extras] if self._extras else []
        filtered, adjusted, logprobs = map(any, zip(*extras, strict=True)) if extras else (False, False, False)
        return RoundShape(lanes, rows, fits, filtered, self.trees and asked, adjusted, logprobs)

    @staticmethod
    def _wanted(rows: int, wanted: int) -> int:
        """Rows whose logits a round with prompts computes: all, where that is cheap."""
        fits = next((n for n in WANTED_SIZES if n >= wanted and n >= CHEAP_ROWS), rows)
        return min(fits, rows)

    def _round(self, shape: RoundShape) -> RecordedRound:
        """The round of this shape, or at first a larger one: recording takes as long as dozens of rounds."""
        if shape not in self._recorded:
            self._missed[shape] += 1
            larger = [other for other in self._recorded if other.holds(shape)]
            if larger and self._missed[shape] <= MISSES:
                return self._recorded[
                    min(larger, key=lambda other: (other.rows, other.wanted, sum(other.extras), other.lanes))
                ]
            self._recorded[shape] = RecordedRound(self, shape)
        return self._recorded[shape]

    def inputs_for(self, lanes: int) -> dict[str, Tensor]:
        """What the host has sent, of the first so many sequences."""
        device = self.inputs.device
        return device | {name: device[name][:lanes] for name in (*EACH, "late")}

    def record(self, work: Callable[[], None]) -> Any:
        """Capture a part of rounds. It runs once for that, on padding."""
        empty = self.inputs.next()
        for name, value in (("lines", self.lines.padding), ("late_at", -1), ("place", -1)):
            empty[name].fill(value)
        self.inputs.send()
        self._kept.append(work)  # with the tensors that the recording reads and writes
        return self.state.record(work)

    def _fill(self, turns: Listing[Turn], rows: list[Row], late: Listing[Tree], asks: list[int]) -> None:
        a = self.inputs.next()
        fill_padded(a["lines"], [row.line for row in rows], self.lines.padding)
        fill_padded(a["feeds"], [turn.feed for turn in turns], 0)
        fill_padded(a["budgets"], [turn.budget for turn in turns], 0)
        fill_padded(a["asks"], asks, 0)
        a["late_at"].fill(-1)
        for i, tree in enumerate(late):
            if tree.tokens and self._is_late(tree):
                tokens = tree.tokens[:LATE_TOKENS]
                a["late_at"][i], a["late_count"][i] = len(turns[i].seq.tokens), len(tokens)
                a["late"][i, : len(tokens)] = tokens
        self.state.patch(a)

    def rows(self, made: dict[str, Tensor], model: Model, want: Tensor | None = None, prompts: bool = False) -> Rows:
        """Rows that a kernel lays out, for a model's pass. prompts: some of them may be many rows of one prompt."""
        table, slots = self.state.table, made["slots"]
        blocks = self.state.blocks(made["info"], made.get("tail", self.state.no_tail), model, prompts)
        want = made["want"] if want is None else want
        return Rows(made["tokens"], made["positions"], slots, slots, slots, table, None, want, blocks=blocks)


def row_tensors(rows: int, blocks: int, device: torch.device) -> dict[str, Tensor]:
    """The rows of a pass that a kernel lays out."""
    made = {name: torch.zeros(rows, dtype=I64, device=device) for name in ("tokens", "positions", "slots")}
    return made | {"info": torch.zeros(blocks, 8, dtype=I32, device=device)}


VerifiedDraft = tuple[list[int], str, int | None, list[float] | None, list[int] | None, list[int]]
PLAIN: VerifiedDraft = ([], "", None, None, None, [])  # as in `RoundResult`: drafted … path


class PendingRound:
    """A round that was started, and the copy of its report to the host."""

    def __init__(
        self, rounds: Rounds, recorded: RecordedRound, turns: Listing[Turn], rows: list[Row], order: list[int]
    ) -> None:
        """order[i] is where the engine has turns[i]."""
        self.rounds, self.turns, self.rows, self.order, state = rounds, turns, rows, order, rounds.state
        self.tree, self.ranked = recorded.shape.tree, recorded.shape.logprobs
        self.lengths = [len(turn.seq.tokens) for turn in turns]  # late drafts follow these
        self.results, self.end = state.receive(recorded.results)
        self.report = self.results["report"]
        self.phases = state.take_phases()

    def wait(self) -> list[RoundResult]:
        """One result for each turn, in the engine's order."""
        self.end.synchronize()
        report, results = self.report[: len(self.turns)], list[RoundResult]()
        heads: list[list[int]] = report[:, :8].tolist()
        longest = max((head[2] for head in heads), default=0)
        choices = report[:, 8 : 9 + longest].tolist()
        for i, (turn, row, head, chosen) in enumerate(zip(self.turns, self.rows, heads, choices, strict=True)):
            length, read, drafted, accepted, flags, _, _, root = head
            tokens, draft = chosen[: accepted + 1] if flags & 1 else [], self._draft(i, head) if drafted else PLAIN
            logprobs = self._logprobs(turn.seq, root, drafted) if tokens and self.ranked else None
            results.append(RoundResult(row, length, *draft, tokens, not flags & 2, logprobs))
            if self.rounds.drafts is not None:
                self.rounds.has_read(turn.seq, row, read)
        if self.rounds.drafts is None:
            return results
        return [result for _, result in sorted(zip(self.order, results, strict=True), key=itemgetter(0))]

    def _draft(self, i: int, head: list[int]) -> VerifiedDraft:
        length, _, drafted, accepted, _, source, match, _ = head
        report, parents, path = self.report[i], None, list(range(accepted))
        survival = self.rounds.claims(match, drafted) if source == kernels.LOOKUP else None
        if self.tree:
            nodes = report[9 + 2 * DRAFT :]
            parents, path = nodes[:drafted].tolist(), nodes[DRAFT : DRAFT + accepted].tolist()
            if source == kernels.HEAD:
                survival = nodes[DRAFT + DEPTH : DRAFT + DEPTH + drafted].view("float32").tolist()
        skipped = length - self.lengths[i] if source == kernels.LATE else None
        tokens = report[9 + DRAFT : 9 + DRAFT + drafted].tolist()
        return tokens, self.rounds.source(source), skipped, survival, parents, path

    def _logprobs(self, seq: Sequence, root: int, drafted: int) -> list[TokenLogprob] | None:
        """Those of the choices at a sequence's root and nodes."""
        if seq.params.logprobs is None:
            return None
        ids, values = (self.results[name][root : root + drafted + 1].tolist() for name in ("ranked", "logprobs"))
        return token_logprobs(ids, values, seq.params.logprobs)

    @property
    def seconds(self) -> dict[str, float]:
        """Device seconds by phase; the round must have ended."""
        return seconds(self.phases)


# ------------------------------------------------------------ a draft model in the round


class DraftChains:
    """Chains of a draft model, recorded pass by pass: each feeds the token that the pass before it chose.

    Tokens that the model has not read (a prompt, rounds without its drafts) are read first. How many those are at most
    is all that the host keeps: `_backlog`.
    """

    def __init__(self, rounds: Rounds, model: Model, plane: Plane, part: Part, again: int, source: str) -> None:
        self.source = source
        self.rounds, self.model, self.plane, self.part, self.again = rounds, model, plane, part, again
        self.per_block = rows_per_block(model.config.heads, model.config.kv_heads)
        self._chains: dict[tuple[int, bool], ChainPasses] = {}  # by lanes, and whether some sequence has a filter
        self._readings: dict[int, Any] = {}  # by rows
        self._backlog: dict[int, int] = {}  # line -> at most so many unread tokens

    def join(self, seq: Sequence, row: Row) -> int:
        """A sequence joins; returns how many leading tokens the model has read."""
        read = min(self.plane.holds(seq.id), len(seq.tokens))
        self._backlog[row.line] = max(len(seq.tokens) - self.again - read, 0)
        return read

    def has_read(self, seq: Sequence, tokens: int) -> None:
        if self.again > 1:  # else the plane is the target's
            self.plane.advance(seq.id, tokens)

    def recorded(self, lanes: int, tokens: int) -> Any:
        return self._chain(lanes, False).upto(tokens)

    def warm(self, lanes: int) -> None:
        self.recorded(lanes, CHAIN)
        for rows in READINGS if self.again > 1 else ():
            self._reading(rows)

    def passes(self, turns: Listing[Turn], rows: list[Row], asks: list[int]) -> list[tuple[str, Any, int]]:
        passes: list[tuple[str, Any, int]] = []
        backlog = sum(self._backlog[row.line] for row, asked in zip(rows, asks, strict=True) if asked)
        if backlog and self.again > 1:
            size = next((n for n in READINGS if n >= backlog), READINGS[-1])
            passes.append(("read", self._reading(size), -(-backlog // size)))
        if any(asks):
            filtered = any(filters(turn.seq) for turn in turns)
            lanes = lanes_for(sum(asked > 0 for asked in asks))
            passes += [("draft", self._chain(lanes, filtered).upto(min(max(asks), DRAFT)), 1)]
        for turn, row, asked in zip(turns, rows, asks, strict=True):
            if asked:
                self._backlog[row.line] = 0
            elif turn.whole:
                self._backlog[row.line] += turn.budget + 1
        return passes

    def _chain(self, lanes: int, filtered: bool) -> ChainPasses:
        if (lanes, filtered) not in self._chains:
            self._chains[lanes, filtered] = ChainPasses(self, lanes, filtered)
        return self._chains[lanes, filtered]

    def _reading(self, rows: int) -> Any:
        if rows not in self._readings:
            rounds, device = self.rounds, self.rounds.state.device
            made = row_tensors(rows, min(rows, rounds.capacity + rows // self.per_block), device)
            want, part = torch.zeros(0, dtype=I64, device=device), Part(**{**vars(self.part), "head": False})

            def work() -> None:
                d, lines, state = rounds.inputs.device, rounds.lines, rounds.state
                state.driver.poison(made.values())
                kernels.patch(d["place"], d["slot"], state.table)
                kernels.lay_out_reading(
                    lines.numbers, lines.tokens, state.table, d, made, state.padding, self.per_block
                )
                self.model.forward(rounds.rows(made, self.model, want, rows > CHEAP_ROWS), self.plane, part)

            self._readings[rows] = rounds.record(work)
        return self._readings[rows]


class ChainPasses:
    """The passes for so many sequences, each recorded once for chains of all lengths."""

    def __init__(self, chains: DraftChains, lanes: int, filtered: bool) -> None:
        self.chains, self.filtered = chains, filtered
        rounds, b, again, device = chains.rounds, lanes, chains.again, chains.rounds.state.device
        self.inputs, self.recorded = rounds.inputs_for(b), list[Any]()
        names = ("tokens", "positions", "slots")
        out = {f"first_{name}": torch.zeros(again * b, dtype=I64, device=device) for name in names}
        out |= {name: torch.zeros(DRAFT, b, dtype=I64, device=device) for name in ("positions", "slots", "drafted")}
        out |= {"info": torch.zeros(DRAFT, b, 8, dtype=I32, device=device)}
        out |= {"drafts": torch.zeros(b, dtype=I32, device=device)}
        out |= {name: torch.zeros(b, dtype=dtype, device=device) for name, dtype in SAMPLING.items()}
        out["position"] = torch.zeros(DRAFT, b, dtype=I64, device=device)
        self.out = out
        self.wants = torch.arange(again - 1, again * b, again, device=device), torch.arange(b, device=device)
        self.keep = rounds.record(self._keep)

    def upto(self, length: int) -> ReplayAll:
        """What drafts chains of this length."""
        for j in range(len(self.recorded), length):
            self.recorded.append(self.chains.rounds.record(partial(self._pass, j)))
        return ReplayAll([*self.recorded[:length], self.keep])

    def _pass(self, j: int) -> None:
        chains, out, lines = self.chains, self.out, self.chains.rounds.lines
        rounds, state, d = chains.rounds, chains.rounds.state, self.inputs
        made = {"tokens": out["drafted"][j - 1], "info": out["info"][j]}
        made |= {"positions": out["positions"][j], "slots": out["slots"][j]}
        if j == 0:
            state.driver.poison(out.values())
            kernels.patch(d["place"], d["slot"], state.table)
            kernels.lay_out_chain(lines.numbers, lines.tokens, state.table, d, out, state.padding)
            made |= {name: out[f"first_{name}"] for name in ("tokens", "positions", "slots")}  # [again * B]
        rows = rounds.rows(made, chains.model, self.wants[min(j, 1)])
        logits = chains.model.forward(rows, chains.plane, chains.part).logits  # [B, V]
        laws = Laws(*(out[name][j] if name == "position" else out[name] for name in SAMPLING))
        tokens, _, _ = sampling.choose(logits, laws, self.filtered)  # [B]
        out["drafted"][j].copy_(tokens)

    def _keep(self) -> None:
        lines, out = self.chains.rounds.lines, self.out
        lists = (self.inputs["lines"], out["drafts"], out["drafted"])
        kernels.keep_chain(lines.numbers, lines.draft, *lists, kernels.MODEL)


@dataclass(frozen=True)
class ReplayAll:
    """Recordings that are replayed in order."""

    recordings: list[Any]

    def replay(self) -> None:
        for recording in self.recordings:
            recording.replay()
