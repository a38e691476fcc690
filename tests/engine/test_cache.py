"""Slots are conserved, whatever happens: random operations, with `check()` after each one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.backends.rows import rows_of
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import AHEAD, Cache
from outrider.types import Sequence


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, grow, draft, commit and go; a second plane lags behind like a draft model's. Some runs have an
    encoder, so that sequences have sources."""

    @initialize(slots=st.integers(20, 60), lines=st.integers(2, 6), source_length=st.sampled_from([0, 4]))
    def begin(self, slots: int, lines: int, source_length: int) -> None:
        self.cache = Cache(slots, lines, length=40, source_length=source_length)
        self.target = self.cache.add_plane(1, 1, 2, torch.float32)
        self.lagging = self.cache.add_plane(1, 1, 2, torch.float32)
        self.live: list[Sequence] = []
        self.next = 0
        self.copy, self.changes = self.cache.table.clone(), {}  # as a device keeps them
        self.cache.changes.append(self.changes)

    def _new(self, tokens: list[int]) -> Sequence:
        self.next += 1
        return Sequence(self.next, tokens)

    @precondition(lambda self: len(self.live) < self.cache.table.shape[0])
    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        source=st.lists(st.integers(0, 1), max_size=4),
        reads=st.booleans(),
    )
    def open(self, tokens: list[int], source: list[int], reads: bool) -> None:
        seq = self._new(tokens)
        seq.source = source
        if self.cache.available < len(source):
            return
        reused = self.cache.open(seq)
        row = self.cache.rows[seq.id]
        assert reused < len(tokens)
        assert row.tokens == tokens[:reused]
        assert row.source_ids == ([] if self.cache.sources is None else source)
        if row.source and reads:
            self.target.keep_source(row.source[0])
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Feed everything pending, draft a few nodes, accept a path, emit one more token."""
        seq = data.draw(st.sampled_from(self.live))
        nodes = data.draw(st.integers(0, 5))
        before = self.cache.available
        row = self.cache.rows[seq.id]
        had = len(row.slots) + len(row.spare)
        pending = max(len(seq.tokens) - len(row.slots), 0)  # they take the first spare slots
        more = max(pending + nodes - len(row.spare), 0)
        held, drafts = list(row.slots), list(row.spare)
        expected = self.cache.next_free(more)
        if not self.cache.reserve(seq, len(seq.tokens), nodes):
            assert len(seq.tokens) + nodes > 40 or len(seq.tokens) + nodes - had > before - 100
            return
        if len(expected) == more:  # nothing was evicted
            after = drafts + expected
            assert row.slots == held + after[:pending]
            assert row.spare[: len(after) - pending] == after[pending:]
            assert len(row.spare) - len(after) + pending in range(AHEAD + 1)
        fed = len(seq.tokens)
        self.target.advance(seq.id, fed)
        self.target.wrote(seq.id, range(nodes))
        if data.draw(st.booleans()):  # the draft model keeps up, but has not fed the last node
            self.lagging.advance(seq.id, fed)
            self.lagging.wrote(seq.id, range(nodes - 1))
        path = sorted(data.draw(st.sets(st.integers(0, nodes - 1)))) if nodes else []
        slots = [self.cache.spare(seq)[node] for node in path]
        seq.tokens += [data.draw(st.integers(0, 2)) for _ in range(len(path) + 1)]
        self.cache.commit(seq, fed, path)
        assert self.cache.rows[seq.id].slots[fed:] == slots
        assert self.cache.sync(seq, self.target) == fed + len(path) == len(seq.tokens) - 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def free(self, data: st.DataObject, keep: bool) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.cache.free(seq, keep)

    @rule()
    def catch_up(self) -> None:
        """A copy of the table on a device equals it whenever it applies the pending changes."""
        for index, slot in self.changes.items():
            self.copy.view(-1)[index] = slot
        self.changes.clear()
        assert torch.equal(self.copy, self.cache.table)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            source_of: dict[int, list[int]] = {}  # K/V depends on the source: no slot of a text serves two
            for row in (*self.cache.rows.values(), *self.cache.retired.values()):
                for slot in row.slots:
                    assert source_of.setdefault(slot, row.source_ids) == row.source_ids

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.catch_up()
            for seq in self.live:
                self.cache.free(seq)
            while self.cache.retired:
                self.cache._evict()
            self.cache.check()
            assert len(self.cache._free) == self.cache.slots


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def filled(cache: Cache, tokens: list[int], name: int) -> Sequence:
    seq = Sequence(name, tokens)
    cache.open(seq)
    assert cache.reserve(seq, len(tokens), 0)
    for plane in cache.planes:
        plane.advance(name, len(tokens))
    return seq


def test_prefix_is_found_among_the_living_and_the_finished() -> None:
    cache = Cache(64, 8, 32)
    cache.add_plane(1, 1, 2, torch.float32)
    first = filled(cache, [1, 2, 3, 4, 5], 1)
    assert cache.open(Sequence(2, [1, 2, 3, 9])) == 3
    cache.free(first, keep=True)
    assert cache.open(Sequence(3, [1, 2, 3, 4, 5])) == 4  # the last token is always fed
    cache.check()


def test_finished_rows_make_room_when_slots_run_short() -> None:
    cache = Cache(10, 8, 10)
    cache.add_plane(1, 1, 2, torch.float32)
    cache.free(filled(cache, [1] * 8, 1), keep=True)
    late = Sequence(2, [2] * 9)
    cache.open(late)
    assert cache.reserve(late, 9, 1)
    assert not cache.retired
    cache.check()


def test_a_rewritten_text_is_compared_as_a_whole() -> None:
    """A list that was compared before is known by its last tokens; another one, or one that was cut, is not."""
    cache = Cache(64, 2, 40)
    plane = cache.add_plane(1, 1, 2, torch.float32)
    seq = Sequence(1, list(range(20)))
    cache.open(seq)
    assert cache.reserve(seq, 20, 0)
    plane.advance(1, 20)
    assert cache.sync(seq, plane) == cache.sync(seq, plane) == 20
    seq.tokens += [7, 7]
    assert cache.sync(seq, plane) == 20
    seq.tokens = [*seq.tokens[:4], 99, *seq.tokens[5:]]  # the last tokens are the same
    assert cache.sync(seq, plane) == 4
    plane.advance(1, 20)
    assert cache.sync(seq, plane) == 4
    del seq.tokens[3:]
    assert cache.sync(seq, plane) == 3


def test_check_notices_a_lost_slot() -> None:
    cache = Cache(16, 2, 16)
    filled(cache, [1, 2, 3], 1)
    cache._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        cache.check()


def test_check_notices_a_table_that_disagrees() -> None:
    cache = Cache(16, 2, 16)
    seq = filled(cache, [1, 2, 3], 1)
    cache.table[cache.rows[seq.id].line, 1] = 15
    with pytest.raises(AssertionError, match="table"):
        cache.check()


def test_rows_of_a_tree_name_their_ancestors() -> None:
    cache = Cache(16, 2, 16)
    plane = cache.add_plane(1, 1, 2, torch.float32)
    seq = filled(cache, [5, 6, 7], 1)
    plane.advance(1, 2)
    cache.reserve(seq, 3, 4)
    spare = cache.spare(seq)
    packed = BatchBuilder(cache)
    packed.pending(seq, 2, 3, want=True)
    packed.nodes(seq, [1, 2, 3, 4], [-1, 0, 0, 2], range(4), range(4))
    rows = rows_of(packed)
    assert rows.tokens.tolist() == [7, 1, 2, 3, 4]
    assert rows.positions.tolist() == [2, 3, 4, 4, 5]
    assert rows.context.tolist() == [3, 3, 3, 3, 3]
    assert rows.want.tolist() == [0, 1, 2, 3, 4]
    assert rows.ancestors is not None
    assert rows.ancestors.tolist() == [
        [-1, -1, -1],
        [spare[0], -1, -1],
        [spare[0], spare[1], -1],
        [spare[0], spare[2], -1],
        [spare[0], spare[2], spare[3]],
    ]


def test_the_next_free_slots_are_told_before_they_are_taken() -> None:
    cache = Cache(12, 4, 12)
    cache.add_plane(1, 1, 2, torch.float32)
    first = filled(cache, [1, 2, 3], 1)
    assert cache.next_free(0) == []
    free = cache.next_free(4)
    assert free == cache.next_free(4)  # reading takes none
    first.tokens += [4, 5]
    assert cache.reserve(first, 5, 2)
    assert cache.rows[1].slots[3:] + cache.rows[1].spare == free
    assert len(cache.next_free(99)) == 12 - 7  # all that there are
    cache.check()


def test_rows_are_tensors_only_when_asked() -> None:
    """The tensors are those that the lists describe."""
    cache = Cache(40, 4, 20)
    cache.add_plane(1, 1, 2, torch.float32)
    one, two = filled(cache, [5, 6, 7], 1), filled(cache, [8, 9], 2)
    assert cache.reserve(one, 3, 3)
    packed = BatchBuilder(cache)
    packed.pending(two, 0, 2, want=True)
    packed.pending(one, 2, 3, want=True)
    packed.nodes(one, [11, 12, 13], [-1, 0, -1], range(3), range(3))
    rows = rows_of(packed)
    a, b = cache.rows[1], cache.rows[2]
    assert rows.count == 6
    assert packed.choosers == [two, one, one, one, one]
    assert rows.batch is packed
    assert rows.blocks is None
    assert not any(isinstance(value, torch.Tensor) for value in vars(rows).values())
    assert rows.tokens.tolist() == [8, 9, 7, 11, 12, 13]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert rows.slots.tolist() == [*b.slots, a.slots[2], *a.spare]
    assert rows.lines.tolist() == [b.line] * 2 + [a.line] * 4
    assert rows.context.tolist() == [1, 2, 3, 3, 3, 3]
    x, y, z = a.spare
    assert rows.ancestors.tolist() == [[-1, -1]] * 3 + [[x, -1], [x, y], [z, -1]]
    assert rows.want.tolist() == [1, 2, 3, 4, 5]
    assert rows.table is cache.table
    kinds = {getattr(rows, name).dtype for name in ("tokens", "positions", "slots", "want")}
    assert kinds == {torch.int64}
    assert {getattr(rows, name).dtype for name in ("lines", "context", "ancestors")} == {torch.int32}
    with pytest.raises(AttributeError):
        _ = rows.nonsense
    alone = BatchBuilder(cache)
    alone.pending(one, 0, 3, want=False)
    plain = rows_of(alone)
    assert plain.ancestors is None
    assert plain.want.tolist() == []
