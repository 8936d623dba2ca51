"""When a launcher looks at sequences, and whose values it takes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fix_program import Cli
from fix_servers import Database

from pgsub.catalog.store import StateStore
from pgsub.common.errors import PublisherUnavailable, SchemaFault, TargetUnavailable, UsageError
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import ErrorReporter
from pgsub.launcher.recorder import Recorder
from pgsub.launcher.workers import sequence_worker
from pgsub.launcher.workers.sequence_worker import SequenceWorker

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
            return SequenceWorker(sub, store, errors, recorder.run, lambda: sub, threading.Event())

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
    assert worker._thread is None and worker.settled(well=True)


@pytest.mark.long
def test_an_attempt_that_ends_after_the_option_was_taken_away_shows_nothing(make: Make, cli: Cli) -> None:
    worker = make()
    assert cli("alter", "s", "--no-sequences").returncode == 0
    _attempt(worker)
    assert worker._outcomes is not None and cli.sql("SELECT relname FROM pgsub_sequence") == []


@pytest.mark.long
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


_SHOWN = "SELECT class FROM pgsub_error WHERE worker = 'sequence synchronization'"


def test_a_bounded_run_waits_until_no_open_transaction_keeps_a_sequence_and_sees_an_error_that_stands(
    make: Make, tables: tuple[Database, Database]
) -> None:
    pubdb, subdb = tables
    pubdb.execute("SELECT setval('q', 9)")
    worker = make()
    assert not worker.settled(well=False) and not worker.settled(well=True)
    with contextlib.closing(subdb.connect()) as session:
        session.execute("BEGIN")
        session.execute("SELECT nextval('q')")
        _attempt(worker)
        assert worker.settled(well=False) and not worker.settled(well=True)
        session.execute("COMMIT")
    _attempt(worker)
    assert worker.settled(well=True) and worker.error is None
    assert subdb.rows("SELECT last_value FROM q") == [(9,)]
    subdb.execute("ALTER SEQUENCE q CYCLE")
    _attempt(worker)
    assert worker.settled(well=True) and isinstance(worker.error, SchemaFault)


@pytest.mark.long
def test_what_may_pass_is_shown_once_it_lasts_and_until_it_has_passed(
    make: Make, tables: tuple[Database, Database], cli: Cli
) -> None:
    pubdb, subdb = tables
    pubdb.execute("SELECT setval('q', 9)")
    worker = make()
    with contextlib.closing(subdb.connect()) as session:
        session.execute("BEGIN")
        session.execute("SELECT nextval('q')")
        for _ in range(sequence_worker.LASTING_ATTEMPTS - 1):
            _attempt(worker)
        assert cli.sql(_SHOWN) == []
        _attempt(worker)
        assert cli.sql(_SHOWN) == [(TargetUnavailable.__name__,)]
        found = cli.status()
        assert found["last_error"]["detail"] == 'Sequences: "public.q".'
        assert found["stats"]["sync_seq_error_count"] == 0
        session.execute("COMMIT")
    _attempt(worker)
    assert cli.sql(_SHOWN) == []
    worker = make(connection="host=127.0.0.1 port=1")
    for _ in range(sequence_worker.LASTING_ATTEMPTS):
        assert cli.sql(_SHOWN) == [] and not worker.settled(well=True)
        _attempt(worker)
    assert cli.sql(_SHOWN) == [(PublisherUnavailable.__name__,)]


def test_what_lasts_is_shown_after_a_time_however_few_attempts_it_took(
    make: Make, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_worker, "LASTING_SECONDS", 0.0)
    _attempt(make(connection="host=127.0.0.1 port=1"))
    assert cli.sql(_SHOWN) == [(PublisherUnavailable.__name__,)]


@pytest.mark.long
@pytest.mark.parametrize("side", ["publisher", "target"])
def test_an_attempt_ends_while_a_transaction_keeps_the_sequences_of_a_table_that_it_truncated(
    make: Make, tables: tuple[Database, Database], side: str
) -> None:
    pubdb, subdb = tables
    for database in tables:
        database.execute("CREATE SEQUENCE r; ALTER TABLE b ADD r int DEFAULT nextval('r')")
        database.execute("ALTER SEQUENCE q OWNED BY b.q")
    pubdb.execute("SELECT setval('q', 9), setval('r', 9)")
    worker = make()
    with contextlib.closing((pubdb if side == "publisher" else subdb).connect()) as session:
        session.execute("BEGIN")
        session.execute("TRUNCATE b RESTART IDENTITY")
        _attempt(worker)
        if side == "publisher":
            assert isinstance(worker.error, PublisherUnavailable)
        else:
            assert isinstance(worker.error, TargetUnavailable)
            assert subdb.rows("SELECT last_value FROM r") == [(9,)]
        session.execute("ROLLBACK")
    _attempt(worker)
    assert worker.error is None
    assert subdb.rows("SELECT q.last_value, r.last_value FROM q, r") == [(9, 9)]


@pytest.mark.long
def test_a_sequence_that_a_command_sets_back_meanwhile_is_not_set_to_what_was_read_before(
    make: Make, tables: tuple[Database, Database], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    pubdb, subdb = tables
    pubdb.execute("SELECT setval('q', 600)")
    subdb.execute("SELECT setval('q', 500)")
    worker = make()
    bring = sequence_worker.bring

    def later(*args: Any, **options: Any) -> Any:
        pubdb.execute("SELECT setval('q', 100)")
        assert cli("refresh", "s", "--sequences", "--allow-backward").returncode == 0
        return bring(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(sequence_worker, "bring", later)
        _attempt(worker)
    assert subdb.rows("SELECT last_value FROM q") == [(100,)]
    assert not worker.settled(well=True)
    pubdb.execute("SELECT setval('q', 101)")
    _attempt(worker)
    assert subdb.rows("SELECT last_value FROM q") == [(101,)] and worker.error is None


def test_nothing_is_set_once_the_launcher_stops(make: Make, tables: tuple[Database, Database]) -> None:
    pubdb, subdb = tables
    pubdb.execute("SELECT setval('q', 9)")
    worker = make()
    worker._stopping.set()
    _attempt(worker)
    assert subdb.rows("SELECT last_value, is_called FROM q") == [(1, False)]
