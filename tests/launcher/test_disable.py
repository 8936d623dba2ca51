"""disable_on_error: which errors disable a subscription, and that they are recorded before it is disabled."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fix_pair import MakePair, Pair

from pgsub.catalog.store import StateStore
from pgsub.common.errors import PgsubError, PublisherUnavailable
from pgsub.launcher.error_handling import APPLY, ErrorReporter, sync_name
from pgsub.launcher.recorder import Recorder

#: The target refuses every row with the SQLSTATE that is set for the database.
REFUSING = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'refused' USING ERRCODE = (SELECT state FROM public.refused);
END $$;
CREATE TABLE refused (state text);
CREATE TRIGGER refuse BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION refuse();
ALTER TABLE t ENABLE ALWAYS TRIGGER refuse
"""


class Watched:
    """A pair whose errors a launcher hears of, with a log that looks into the state store as others see it."""

    def __init__(self, pair: Pair, store: StateStore) -> None:
        self.pair, self.store = pair, store
        self.log: list[str] = []
        self.seen: list[tuple[Any, ...]] = []  #: errors, conflicts and faults counted when it was disabled
        store.add_subscription(pair.sub)
        self.trouble = ErrorReporter(store, pair.sub, self._log, Recorder(store, self._log))

    def _log(self, level: str, text: str) -> None:
        self.log.append(f"{level}:  {text}")
        if "has been disabled" in text:
            with contextlib.closing(sqlite3.connect(self.store.path)) as other:
                self.seen += other.execute(
                    "SELECT subenabled, (SELECT count(*) FROM pgsub_error), (SELECT count(*) FROM pgsub_conflict),"
                    " apply_error_count FROM pg_subscription, pgsub_stats"
                ).fetchall()

    def fails(self) -> PgsubError:
        """Apply ends with an error, of which the launcher hears."""
        with pytest.raises(PgsubError) as caught:
            self.pair.catch_up()
        self.trouble.report(APPLY, caught.value, "apply_error_count")
        return caught.value

    @property
    def enabled(self) -> bool:
        """subenabled."""
        return self.store.subscription(self.pair.sub.name).enabled


@pytest.fixture
def watched(pair: MakePair, state_dir: Path) -> Iterator[Watched]:
    """A table that refuses rows on the target, and a subscription with disable_on_error."""
    it = pair("CREATE TABLE t (id int PRIMARY KEY)", sub=REFUSING, disable_on_error=True)
    with StateStore.open(state_dir) as store:
        yield Watched(it, store)


def _refuse(it: Watched, state: str) -> None:
    it.pair.subdb.execute("TRUNCATE refused")
    it.pair.subdb.execute("INSERT INTO refused VALUES (%s)", state)


@pytest.mark.long
def test_what_a_retry_mends_never_disables_and_is_not_counted(watched: Watched) -> None:
    watched.pair.pubdb.execute("INSERT INTO t VALUES (1)")
    ended = ("57P01", "57P03", "57P04", "57P05", "25P03", "25P04")
    for state in ("40P01", "40001", "55P03", "53100", "53200", "53300", *ended, "08006", "25006"):
        _refuse(watched, state)
        assert watched.fails().sqlstate == state
        assert watched.enabled, state
    assert watched.store.stats(watched.pair.subid).apply_error_count == 0
    watched.trouble.report(APPLY, PublisherUnavailable("terminating walreceiver due to timeout"), "apply_error_count")
    assert watched.enabled and watched.trouble.disabled_by is None


def test_a_session_that_is_ended_in_the_middle_never_disables(watched: Watched) -> None:
    it = watched.pair
    it.subdb.execute("ALTER TABLE t DISABLE TRIGGER refuse; BEGIN; LOCK TABLE t")
    task = it.start()
    it.pubdb.execute("INSERT INTO t VALUES (1)")
    with contextlib.closing(it.subdb.connect()) as session:
        query = (
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE wait_event_type = 'Lock' AND application_name LIKE %s"
        )
        while not session.execute(query, (f"pgsub {it.subid} apply %",)).fetchall():
            time.sleep(0.01)
    it.subdb.execute("ROLLBACK")
    with pytest.raises(PgsubError) as caught:
        task.result()
    watched.trouble.report(APPLY, caught.value, "apply_error_count")
    assert watched.enabled


@pytest.mark.parametrize("state", ["23514", "22003", "42501", "P0001", "54000", "54001"])
def test_a_fault_disables_once_it_is_recorded_and_counted(watched: Watched, state: str) -> None:
    watched.pair.pubdb.execute("INSERT INTO t VALUES (1)")
    _refuse(watched, state)
    assert watched.fails().sqlstate == state
    assert not watched.enabled
    assert watched.seen == [(1, 1, 0, 1)]
    assert watched.trouble.disabled_by is not None
    assert watched.store.journal_rows()[0].action == "disable"


def test_a_conflict_disables_once_it_is_in_the_record_and_only_with_the_option_of_that_moment(watched: Watched) -> None:
    it = watched.pair
    it.subdb.execute("ALTER TABLE t DISABLE TRIGGER refuse; INSERT INTO t VALUES (1)")
    it.pubdb.execute("INSERT INTO t VALUES (1)")
    watched.store.alter(it.subid, disable_on_error=False)
    watched.fails()
    assert watched.enabled and watched.seen == []
    watched.store.alter(it.subid, disable_on_error=True)
    watched.fails()
    assert not watched.enabled
    assert watched.seen == [(1, 1, 1, 2)]
    [row] = watched.store.conflicts(it.subid)
    assert (row.attempts, row.action, row.identical, row.local_tuple) == (2, "stopped", True, {"id": "1"})
    stats = watched.store.stats(it.subid)
    assert (stats.confl_insert_exists, stats.apply_error_count) == (2, 2)
    assert watched.log[-1] == f'LOG:  subscription "{it.sub.name}" has been disabled because of an error'


def test_a_conflict_that_stopped_a_table_is_applied_once_the_table_is_done(watched: Watched) -> None:
    it, store = watched.pair, watched.store
    store.alter(it.subid, disable_on_error=False)
    it.subdb.execute("ALTER TABLE t DISABLE TRIGGER refuse; INSERT INTO t VALUES (1)")
    it.pubdb.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(PgsubError) as caught:
        it.catch_up()
    watched.trouble.report(sync_name(9), caught.value, "sync_table_error_count")
    watched.trouble.report(APPLY, caught.value, "apply_error_count")
    assert [row.worker for row in store.conflicts(it.subid)] == [APPLY, sync_name(9)]
    watched.trouble.keep_only([APPLY])
    assert [row.action for row in store.conflicts(it.subid)] == ["stopped", "applied"]
    watched.trouble.clear(APPLY, 1)
    assert [row.action for row in store.conflicts(it.subid)] == ["stopped", "applied"]
