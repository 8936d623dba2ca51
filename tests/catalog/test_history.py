"""Counters, conflicts, errors and the journal."""

from dataclasses import replace
from pathlib import Path

import pytest

from pgsub.catalog import conflicts, journal
from pgsub.catalog.rows import ConflictRow, ErrorRow, StatsRow
from pgsub.catalog.store import StateStore
from pgsub.common.errors import ApplyError, InternalError, TargetUnavailable

CONFLICT = ConflictRow(
    *(5, "orders", "insert_exists", "public", "t", "stopped", "t_pkey", "(a)=(1)", {"a": "1"}, {"a": None}),
    finish_lsn=0x100,
    worker="apply",
)


def test_counters_add_up_and_are_reset_one_subscription_at_a_time(store: StateStore) -> None:
    store.add_stats(5, apply_error_count=1, confl_insert_exists=2)
    store.add_stats(5, apply_error_count=1)
    store.add_stats(7, confl_update_missing=1)
    assert store.stats(5) == StatsRow(apply_error_count=2, confl_insert_exists=2)
    store.reset_stats(5)
    assert store.stats(5).stats_reset is not None
    assert replace(store.stats(5), stats_reset=None) == StatsRow()
    assert store.stats(7) == StatsRow(confl_update_missing=1)
    store.reset_stats(None)
    assert store.stats(7).confl_update_missing == 0


@pytest.mark.parametrize("counter", ["stats_reset", "oid", 'x" = 1 --'])
def test_counting_what_is_no_counter_is_a_bug(store: StateStore, counter: str) -> None:
    with pytest.raises(InternalError):
        store.add_stats(5, **{counter: 1})


def test_a_stop_that_is_met_again_is_one_row_with_its_attempts_and_newest_diagnosis(store: StateStore) -> None:
    first = store.add_conflict(CONFLICT)
    again = store.add_conflict(replace(CONFLICT, conflict_type="multiple_unique_conflicts", index_name="t_pkey, u"))
    other = store.add_conflict(replace(CONFLICT, key="(2)"))
    assert again == first < other
    met = store.conflict(first)
    assert met is not None and (met.attempts, met.finish_lsn) == (2, 0x100)
    assert (met.conflict_type, met.index_name) == ("multiple_unique_conflicts", "t_pkey, u")
    assert met.at is not None and met.last_at is not None and met.at < met.last_at
    assert [row.id for row in store.conflicts(5)] == [other, first]
    assert [row.id for row in store.conflicts(5, limit=1)] == [other]
    assert (store.conflicts(7), store.conflict(2**80)) == ([], None)


def test_what_stopped_apply_is_applied_once_apply_is_past_it_and_a_later_stop_is_another_one(store: StateStore) -> None:
    first = store.add_conflict(CONFLICT)
    beyond = store.add_conflict(replace(CONFLICT, finish_lsn=0x200))
    assert store.conflicts_passed(5, "table synchronization 9", 2**64 - 1) == 0
    assert store.conflicts_passed(5, "apply", 0x100) == 0  # a position may be the start of the commit itself
    assert store.conflicts_passed(5, "apply", 0x101) == 1
    assert [(row.id, row.action) for row in store.conflicts(5)] == [(beyond, "stopped"), (first, "applied")]
    assert store.add_conflict(CONFLICT) not in (first, beyond)


def test_what_stopped_apply_and_was_left_out_is_skipped_even_where_apply_was_seen_past_it(store: StateStore) -> None:
    stopped = store.add_conflict(CONFLICT)
    event = store.add_conflict(
        replace(CONFLICT, conflict_type="update_missing", action="applied", event=9, worker=None)
    )
    store.conflicts_passed(5, "apply", 0x101)
    store.conflicts_skipped(5, 0x100)
    assert {row.id: row.action for row in store.conflicts(5)} == {stopped: "skipped", event: "applied"}


def test_a_conflict_that_stopped_apply_and_that_a_rule_then_decides_stays_one_row(store: StateStore) -> None:
    stopped = store.add_conflict(CONFLICT)
    kept = replace(CONFLICT, action="kept", event=9, worker=None)
    beside = replace(kept, conflict_type="update_origin_differs", action="applied", event=10)
    assert [one.new for one in store.add_conflicts([kept, beside, kept])] == [False, True, False]
    assert store.conflicts_passed(5, "apply", 0x101) == 0
    other, row = store.conflicts(5)
    assert (row.id, row.action, row.worker, row.event, row.attempts) == (stopped, "kept", "apply", 9, 1)
    assert (other.conflict_type, other.action) == ("update_origin_differs", "applied")


def test_an_event_whose_number_the_target_gives_again_after_a_crash_is_recorded(store: StateStore) -> None:
    event = replace(CONFLICT, conflict_type="update_missing", action="skipped", event=10)
    others = [
        replace(event, finish_lsn=0x200),
        replace(event, conflict_type="delete_missing"),
        replace(event, relname="u"),
        replace(event, key="(a)=(2)"),
        replace(event, key=None),
    ]
    first, *added = store.add_conflicts([event, *others])
    assert first.new and all(one.new for one in added)
    assert [one.new for one in store.add_conflicts([event, *others])] == [False] * 6


def test_an_event_of_the_ledger_is_recorded_once_and_events_that_look_alike_are_several(store: StateStore) -> None:
    event = replace(CONFLICT, conflict_type="update_missing", action="skipped", event=10)
    first, same, other = store.add_conflicts([event, event, replace(event, event=11)])
    assert (first.new, same.new, other.new) == (True, False, True)
    assert first.id == same.id != other.id
    assert [row.attempts for row in store.conflicts(5)] == [1, 1]


def test_conflicts_are_found_by_type_table_time_and_action(store: StateStore) -> None:
    old = store.add_conflict(replace(CONFLICT, relname="a.b", at="2026-01-01T00:00:00.000000Z"))
    new = store.add_conflict(replace(CONFLICT, conflict_type="update_missing", action="skipped", event=1))
    of_all = store.add_conflict(replace(CONFLICT, subid=7))

    def found(**wanted: object) -> list[int]:
        return [row.id for row in store.conflicts(**wanted)]  # type: ignore[arg-type]

    assert found() == [of_all, new, old]
    assert found(subid=5, conflict_type="update_missing") == found(subid=5, action="skipped") == [new]
    assert found(table="public.a.b") == [old]
    assert found(subid=5, since="2026-01-01T00:00:00.000001Z") == [new]


def test_tuples_with_any_characters_are_kept(store: StateStore) -> None:
    odd = {"a": "a\n'\x00\udc80\U0001f418", "b": None}
    row = replace(
        CONFLICT, key="'\x00\udc80\U0001f418", remote_tuple=odd, local_conflicts=[{"row": odd}], identical=True
    )
    stored = store.conflict(store.add_conflict(row))
    assert stored is not None
    assert (stored.key, stored.remote_tuple, stored.identical) == ("'\x00\\udc80\U0001f418", odd, True)
    assert stored.local_conflicts == [{"row": odd}]


@pytest.mark.long
def test_the_journal_is_bounded_and_its_ids_rise(store: StateStore) -> None:
    with store.batch():
        for number in range(journal.KEEP + 5):
            store.journal("skip-lsn", 5, "orders", {"lsn": number})
    ids = [row.id for row in store.journal_rows(5, 20_000)]
    assert (len(ids), ids[-1], ids[0]) == (journal.KEEP, 6, journal.KEEP + 5)


def test_the_bound_takes_the_oldest_of_each_subscription_but_what_still_stops_apply_and_counts_them(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conflicts, "KEEP", 3)
    stopped = store.add_conflict(CONFLICT)
    quiet = store.add_conflict(replace(CONFLICT, subid=7, action="skipped"))
    skipped = [replace(CONFLICT, key="(a)=(2)", action="skipped", event=number) for number in range(8)]
    ids = [one.id for part in (skipped[:6], skipped[6:]) for one in store.add_conflicts(part)]
    assert [row.id for row in store.conflicts(5)] == [*reversed(ids[-3:]), stopped]
    assert [row.id for row in store.conflicts(7)] == [quiet]
    assert (store.conflicts_dropped(5), store.conflicts_dropped(7)) == (5, 0)
    store.add_conflicts([replace(CONFLICT, subid=number, action="skipped") for number in range(90, 99)])
    assert len(store.conflicts(None, 100)) == 3 + 1 + 1 + 3  # those of subscriptions that are gone have one bound


def test_an_error_at_the_same_place_counts_attempts_and_another_one_starts_anew(store: StateStore) -> None:
    row = ErrorRow("apply", "ApplyError", "duplicate key", finish_lsn=0x10)
    first = store.record_error(5, row)
    second = store.record_error(5, row)
    assert (second.attempts, second.first_at) == (2, first.at)
    moved = store.record_error(5, replace(row, finish_lsn=0x20))
    assert (moved.attempts, moved.first_at) == (1, moved.at)
    assert store.errors(5) == [moved]


def test_the_last_error_is_the_newest_of_all_workers_until_its_own_worker_clears_it(store: StateStore) -> None:
    old = store.record_error(5, ErrorRow("apply", "A", "first"))
    new = store.record_error(5, ErrorRow("table synchronization 9", "B", "second"))
    assert store.errors(5) == [new, old]
    store.clear_error(5, "table synchronization 9")
    assert store.errors(5) == [old]
    store.clear_error(5)
    assert store.errors(5) == []


def test_an_exception_becomes_a_row_with_its_place(store: StateStore) -> None:
    error = ApplyError("duplicate key", detail="Key (1) exists.", hint="Skip it.", context="in", sqlstate="23505")
    error.relation, error.finish_lsn, error.xid, error.conflict = "public.t", "0/1F", 740, "insert_exists"
    store.record_error(5, ErrorRow.of(error, "apply"))
    [row] = store.errors(5)
    assert (row.class_, row.sqlstate, row.relation, row.conflict) == (
        "ApplyError",
        "23505",
        "public.t",
        "insert_exists",
    )
    assert (row.detail, row.hint, row.context) == ("Key (1) exists.", "Skip it.", "in")
    assert (row.relation, row.finish_lsn, row.xid) == ("public.t", 0x1F, 740)
    assert ErrorRow.of(TargetUnavailable("gone"), "apply").finish_lsn is None


def test_the_journal_names_action_actor_and_detail(store: StateStore) -> None:
    store.journal("create", 5, "orders", {"publications": ["pub"], "folder": Path("/a")})
    store.journal("drop", None, None, {})
    newest, oldest = store.journal_rows()
    assert (newest.action, newest.subid, newest.detail) == ("drop", None, {})
    assert (oldest.subname, oldest.detail) == ("orders", {"publications": ["pub"], "folder": "/a"})
    assert oldest.actor
    assert store.journal_rows(5) == [oldest]
