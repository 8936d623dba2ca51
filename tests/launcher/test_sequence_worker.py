"""When a launcher looks at sequences, and whose values it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fix_program import Cli
from fix_servers import Database

from pgsub.catalog.store import StateStore
from pgsub.common.errors import UsageError
from pgsub.common.subscription import Subscription
from pgsub.launcher import sequence_worker
from pgsub.launcher.error_reporting import ErrorReporter
from pgsub.launcher.recorder import Recorder
from pgsub.launcher.sequence_worker import SequenceWorker

Make = Callable[..., SequenceWorker]


@pytest.fixture
def make(cli: Cli, tables: tuple[Database, Database]) -> Iterator[Make]:
    """Make the worker of a subscription whose tables have sequences; keywords change its definition."""
    for database in tables:
        database.execute("CREATE SEQUENCE q; ALTER TABLE b ADD q int DEFAULT nextval('q')")
    assert cli.create("s", "--sequences", "--no-wait").returncode == 0
    with StateStore.open(cli.state) as store:
        recorder = Recorder(store, lambda level, text: None)

        def worker(**changes: object) -> SequenceWorker:
            sub: Subscription = replace(store.subscription("s"), **changes)
            errors = ErrorReporter(store, sub, lambda level, text: None, recorder)
            return SequenceWorker(sub, store, errors, recorder.run, lambda: sub)

        yield worker
        recorder.close()


def _attempt(worker: SequenceWorker) -> None:
    """Let one attempt begin and end."""
    worker._next = 0.0
    worker.tick()
    assert worker._thread is not None
    worker._thread.join()
    worker._next = float("inf")
    worker.tick()
    assert worker._thread is None


def test_the_pauses_double_while_nothing_moves_up_to_the_longest_and_are_short_again_when_something_does(
    make: Make, tables: tuple[Database, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    pubdb, subdb = tables
    worker = make()
    pauses = []
    for _ in range(5):
        _attempt(worker)
        pauses.append(worker._pause)
    assert pauses == [4.0, 8.0, 16.0, 30.0, 30.0]
    pubdb.execute("SELECT setval('q', 7)")
    _attempt(worker)
    assert (worker._pause, subdb.rows("SELECT last_value FROM q")) == (sequence_worker.SHORTEST, [(7,)])
    monkeypatch.setenv("PGSUB_SEQUENCE_SECONDS", "0.5")
    worker = make()
    _attempt(worker)
    assert worker._pause == 0.5
    monkeypatch.setenv("PGSUB_SEQUENCE_SECONDS", "never")
    with pytest.raises(UsageError, match='invalid value for PGSUB_SEQUENCE_SECONDS: "never"'):
        make()


def test_without_the_option_no_attempt_begins_and_no_run_waits_for_one(make: Make) -> None:
    worker = make(sequences=False)
    worker.tick()
    assert worker._thread is None and worker.settled()


def test_an_attempt_that_ends_after_the_option_was_taken_away_shows_nothing(make: Make, cli: Cli) -> None:
    worker = make()
    assert cli("alter", "s", "--no-sequences").returncode == 0
    _attempt(worker)
    assert worker._outcomes is not None and cli.sql("SELECT relname FROM pgsub_sequence") == []


def test_a_sequence_that_cannot_follow_disables_the_subscription_only_with_disable_on_error(
    make: Make, tables: tuple[Database, Database], cli: Cli
) -> None:
    tables[1].execute("ALTER SEQUENCE q CYCLE")
    errors = "SELECT subenabled, sync_seq_error_count FROM pg_subscription JOIN pgsub_stats ON oid = subid"
    _attempt(make())
    assert cli.sql(errors) == [(1, 1)]
    assert cli("disable-on-error", "s", "on").returncode == 0
    worker = make()
    worker._errors._recorder.subscriptions()
    _attempt(worker)
    assert cli.sql(errors) == [(0, 2)]


def test_values_of_a_server_that_is_not_the_publisher_are_not_taken(
    make: Make, tables: tuple[Database, Database]
) -> None:
    pubdb, subdb = tables
    subdb.execute("SELECT setval('q', 3)")
    pubdb.execute("SELECT setval('q', 9)")
    other = Database(pubdb.server, f"{pubdb.name}_other")
    try:
        other.execute("CREATE TABLE b (q int); CREATE SEQUENCE q; ALTER TABLE b ALTER q SET DEFAULT nextval('q')")
        other.execute("CREATE TABLE a (); CREATE PUBLICATION p FOR TABLE a, b; SELECT setval('q', 1000)")
        worker = make(connection=other.conninfo)
        _attempt(worker)
        assert worker._outcomes is None
        assert subdb.rows("SELECT last_value FROM q") == [(3,)]
    finally:
        other.drop()
    _attempt(make())
    assert subdb.rows("SELECT last_value FROM q") == [(9,)]
