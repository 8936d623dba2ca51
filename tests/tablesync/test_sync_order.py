"""Which tables are synchronized next, and which together."""

from __future__ import annotations

import pytest

from pgsub.tablesync import sync_order
from pgsub.target.ledger.subscriptions import RelationState

MB = 1 << 20


def _rel(number: int, size: int | None = 0, state: str = "i", slot: str | None = None) -> RelationState:
    return RelationState(number, "public", f"t{number}", state, sync_slot=slot, copy_bytes=size)


def _next(*rels: RelationState, free: int = 2, alone: set[int] | None = None) -> list[tuple[int, ...]]:
    return sync_order.next_workers(rels, free, alone=alone or set())


def test_the_largest_table_goes_first() -> None:
    assert _next(_rel(1, 20 * MB), _rel(2, 90 * MB), _rel(3, 50 * MB)) == [(2,), (3,)]


def test_what_is_copied_already_goes_before_everything_else() -> None:
    assert _next(_rel(1, 90 * MB), _rel(2, 1, "f", "slot"), free=1) == [(2,)]
    assert _next(_rel(1, 90 * MB), _rel(2, 1, "s", "slot"), free=1) == [(2,)]


def test_tables_that_were_copied_from_one_slot_catch_up_together_unless_they_failed() -> None:
    copied = [_rel(1, 1, "f", "x"), _rel(2, 1, "f", "y"), _rel(3, 1, "f", "x"), _rel(4, 1, "f", "x")]
    assert _next(*copied) == [(1, 3, 4), (2,)]
    assert _next(*copied, free=3, alone={3}) == [(1, 4), (2,), (3,)]


def test_small_tables_are_spread_evenly_over_the_free_workers() -> None:
    workers = _next(*[_rel(n, n) for n in range(1, 21)])
    assert [len(one) for one in workers] == [10, 10]
    assert workers[0][0] == 20  # the largest of them first
    assert {relid for one in workers for relid in one} == set(range(1, 21))


@pytest.mark.long
def test_no_number_of_tables_takes_the_launcher_time() -> None:
    many = [_rel(n, 90 * MB if n % 2 else 1) for n in range(200_000)]  # a test that never ends where that is squared
    assert len(_next(*many)) == 2


def test_small_tables_wait_while_large_ones_take_all_workers() -> None:
    assert _next(_rel(1, 90 * MB), _rel(2, 1), _rel(3, 1), free=1) == [(1,)]
    assert _next(_rel(1, 90 * MB), _rel(2, 1), _rel(3, 1), free=2) == [(1,), (2, 3)]


def test_a_group_is_bounded_in_tables_and_bytes() -> None:
    [group] = _next(*[_rel(n) for n in range(1, 301)], free=1)
    assert len(group) == sync_order.GROUP_TABLES
    [group] = _next(*[_rel(n, sync_order.SMALL_BYTES) for n in range(1, 50)], free=1)
    assert len(group) == sync_order.GROUP_BYTES // sync_order.SMALL_BYTES


def test_a_table_that_failed_by_itself_is_tried_alone_and_last() -> None:
    assert _next(_rel(1, 90 * MB), _rel(2, 1), _rel(3, 1), free=3, alone={1, 2}) == [(3,), (1,), (2,)]
    assert _next(_rel(1, 90 * MB), _rel(2, 80 * MB), free=1, alone={1}) == [(2,)]


def test_a_table_of_unknown_size_counts_as_large() -> None:
    assert _next(_rel(1, None), _rel(2, 1), _rel(3, 1), free=2) == [(1,), (2, 3)]


def test_small_is_never_more_than_what_is_copied_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_order.plan, "CHUNKED_FROM_BYTES", 1000)
    assert _next(_rel(1, 1001), _rel(2, 1001), _rel(3, 10), _rel(4, 10), free=3) == [(1,), (2,), (3, 4)]


@pytest.mark.parametrize(
    ("state", "slot", "spare", "unfinished"),
    [
        ("i", None, None, True),
        ("d", "x", None, True),
        ("f", "x", "y", True),
        ("s", "x", None, True),
        ("r", None, "y", True),
        ("s", None, None, False),
        ("r", None, None, False),
    ],
)
def test_a_table_is_unfinished_while_the_ledger_names_a_slot_for_it(
    state: str, slot: str | None, spare: str | None, unfinished: bool
) -> None:
    rel = RelationState(1, "public", "t", state, sync_slot=slot, spare_slot=spare)
    assert sync_order.unfinished(rel) is unfinished
