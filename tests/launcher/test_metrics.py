"""What a scraper sees of a launcher that runs: each family of metrics changes in one scene at least."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from embedded import Server
from fix_program import Cli, until
from fix_served import lose, serving
from fix_servers import Database
from fix_stuck import in_process
from openmetrics import STATE, Samples, Scraper

from pgsub import __version__
from pgsub.commands.status.metrics import families
from pgsub.demo.servers import free_port

Tables = tuple[Database, Database]

_TABLE_A, _TABLE_B = ("a", "public"), ("b", "public")
#: The last row of a copy waits for a lock.
_WAITS = """
CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
    PERFORM pg_catalog.pg_advisory_xact_lock_shared(4711); RETURN NEW; END$$;
CREATE TRIGGER held BEFORE INSERT ON a FOR EACH ROW WHEN (NEW.id = 100) EXECUTE FUNCTION held();
ALTER TABLE a ENABLE ALWAYS TRIGGER held
"""
_WAL = "SELECT pg_logical_emit_message(false, '', repeat('x', 20000))"
_names = iter(range(1, 100))


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A program whose ``run`` serves metrics beside the subscriptions of all scenes."""
    base, address = tmp_path_factory.mktemp("launcher"), f"127.0.0.1:{free_port()}"
    log = base / "log"
    with serving(base, "--metrics-listen", address, "--log-file", str(log), PGSUB_SEQUENCE_SECONDS="0.2") as cli:
        cli.address, cli.log = address, log  # type: ignore[attr-defined]
        yield cli


class Watched(Scraper):
    """A subscription of the launcher with a scraper that watches it."""

    def __init__(self, cli: Cli) -> None:
        self.cli, self.name = cli, f"m{next(_names)}"
        super().__init__(cli.address, self.name)  # type: ignore[attr-defined]

    def ok(self, *words: str) -> None:
        """Run a command line that ends well."""
        ended = in_process(self.cli.state, *words)
        assert ended.returncode == 0, ended.stderr

    def create(self, *options: str) -> None:
        """Leave all work to the launcher."""
        self.ok(*self.cli.words(self.name, "--no-wait", *options))

    def running(self) -> Samples:
        """What is seen once all tables are synchronized, nothing waits, and somebody has looked at the slot."""
        return self.shows(
            lambda seen: (
                (seen["pgsub_tables", "r"], seen[STATE, "running"], seen["pgsub_slot_active",]) == (2, 1, 1)
                and seen["pgsub_apply_lag_seconds",] == 0
            )
        )


@pytest.fixture
def watched(joined: Cli, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A subscription that is not created yet; all that the scene says to follow must have changed at its end."""
    found = Watched(joined)
    yield found
    followed = {name for mark in request.node.iter_markers("follows") for name in mark.args}
    assert {name for name in followed if not name.endswith("_info")} - found.moved == set()


def test_every_family_is_followed_by_a_scene() -> None:
    exposed = {f"{one.name}_total" if one.type == "counter" else one.name for one in families([])}
    marks = [mark for scene in globals().values() for mark in getattr(scene, "pytestmark", ())]
    assert {name for mark in marks if mark.name == "follows" for name in mark.args} == exposed


@contextmanager
def _locked(database: Database, statement: str) -> Iterator[None]:
    with closing(database.connect()) as holder, holder.transaction():
        holder.execute(statement.encode())
        yield


@pytest.mark.follows("pgsub_tables", "pgsub_copy_bytes", "pgsub_copy_size_bytes", "pgsub_applied_lsn_bytes")
@pytest.mark.follows("pgsub_conflicts_total", "pgsub_errors_total", "pgsub_set_fallbacks_total", "pgsub_worker_errors")
@pytest.mark.follows("pgsub_held_changes", "pgsub_held_bytes", "pgsub_table_waiting_seconds")
@pytest.mark.follows("pgsub_subscription_state", "pgsub_subscription_served", "pgsub_build_info")
def test_a_copy_a_conflict_a_held_table_and_an_end(watched: Watched, tables: Tables) -> None:
    pubdb, subdb = tables
    subdb.execute(_WAITS)
    with _locked(subdb, "SELECT pg_advisory_xact_lock(4711)"):
        watched.create()
        copying = watched.shows(lambda seen: seen["pgsub_copy_bytes", *_TABLE_A] > 0)
        assert copying["pgsub_tables", "r"] < 2 and copying["pgsub_tables", "d"] > 0
        watched.shows(lambda seen: seen["pgsub_table_waiting_seconds", *_TABLE_A] > 0)
        assert copying["pgsub_copy_size_bytes", *_TABLE_A] >= copying["pgsub_copy_bytes", *_TABLE_A]
    quiet = watched.shows(lambda seen: seen["pgsub_tables", "r"] == 2 and seen[STATE, "running"] == 1)
    assert ("pgsub_copy_bytes", *_TABLE_A) not in quiet and quiet["pgsub_build_info", __version__] == 1
    assert (quiet["pgsub_subscription_served",], quiet["pgsub_worker_errors",]) == (1, 0)
    assert quiet["pgsub_applied_lsn_bytes",] > 0  # though nothing was applied yet

    subdb.execute("INSERT INTO b VALUES (1, 1.5)")
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    stuck = watched.shows(
        lambda seen: seen["pgsub_conflicts_total", "insert_exists"] > 0 and seen["pgsub_set_fallbacks_total",] > 0
    )
    assert (stuck["pgsub_worker_errors",], stuck[STATE, "running"]) == (1, 0)
    assert stuck["pgsub_errors_total", "apply"] >= 1

    watched.ok("alter", watched.name, "--hold", "public.b")
    held = watched.shows(lambda seen: seen["pgsub_held_changes", *_TABLE_B] == 1 and seen[STATE, "running"] == 1)
    assert held["pgsub_held_bytes", *_TABLE_B] > 0 and held["pgsub_worker_errors",] == 0
    assert held["pgsub_applied_lsn_bytes",] > quiet["pgsub_applied_lsn_bytes",]

    watched.ok("disable", watched.name)
    ended = watched.shows(lambda seen: seen["pgsub_subscription_served",] == 0)
    assert (ended[STATE, "disabled"], ended[STATE, "running"]) == (1, 0)
    assert not {("pgsub_slot_active",), ("pgsub_apply_lag_seconds",), ("pgsub_apply_lag_bytes",)} & ended.keys()


@pytest.mark.long
@pytest.mark.follows("pgsub_apply_lag_seconds", "pgsub_apply_lag_bytes", "pgsub_apply_silent_seconds")
@pytest.mark.follows("pgsub_received_lsn_bytes", "pgsub_applied_lsn_bytes", "pgsub_slot_retained_bytes")
def test_a_backlog_behind_a_lock_of_the_target(watched: Watched, tables: Tables) -> None:
    pubdb, subdb = tables
    watched.create()
    quiet = watched.running()
    with _locked(subdb, "LOCK TABLE a"):
        pubdb.execute("INSERT INTO a SELECT g, repeat('x', 1000) FROM generate_series(101, 2100) g")
        watched.shows(
            lambda seen: (
                min(seen["pgsub_apply_lag_seconds",], seen["pgsub_apply_silent_seconds",]) > 0
                and min(seen["pgsub_apply_lag_bytes",], seen["pgsub_slot_retained_bytes",]) > 1_000_000
            )
        )
    done = watched.shows(
        lambda seen: seen["pgsub_apply_lag_seconds",] == 0 and seen["pgsub_apply_lag_bytes",] < 1_000_000
    )
    assert done["pgsub_apply_silent_seconds",] == 0
    for position in ("pgsub_received_lsn_bytes",), ("pgsub_applied_lsn_bytes",):
        assert done[position] > quiet[position] + 1_000_000


@pytest.mark.long
@pytest.mark.follows("pgsub_waiting_transactions", "pgsub_slot_active", "pgsub_skipped_changes", "pgsub_errors_total")
@pytest.mark.follows("pgsub_slot_lost", "pgsub_subscription_state")
def test_what_waits_behind_a_conflict_its_skip_the_replay_and_a_lost_slot(watched: Watched, tables: Tables) -> None:
    pubdb, subdb = tables
    subdb.execute("INSERT INTO a VALUES (1, 'mine')")
    watched.create()
    copying = watched.shows(lambda seen: seen["pgsub_errors_total", "table synchronization"] > 0)
    assert (copying["pgsub_errors_total", "apply"], copying["pgsub_worker_errors",]) == (0, 1)
    subdb.execute("DELETE FROM a")
    watched.running()

    subdb.execute("INSERT INTO b VALUES (1, 1.5)")
    for number in 1, 2, 3:
        pubdb.execute(f"INSERT INTO b VALUES ({number}, 1)")
    watched.shows(lambda seen: seen["pgsub_waiting_transactions",] == 2 and seen[STATE, "blocked"] == 1)
    watched.shows(lambda seen: seen["pgsub_slot_active",] == 0)

    watched.ok("skip-lsn", watched.name, "--rows", "conflicting", "--yes")
    skipped = watched.shows(lambda seen: seen["pgsub_skipped_changes", "waiting"] == 1 and seen[STATE, "running"] == 1)
    assert skipped["pgsub_skipped_changes", "replayed"] == skipped["pgsub_worker_errors",] == 0
    watched.shows(lambda seen: ("pgsub_waiting_transactions",) not in seen and seen["pgsub_slot_active",] == 1)
    subdb.execute("DELETE FROM b WHERE id = 1")
    skips = "SELECT max(id) FROM pgsub_conflict WHERE action = 'skipped'"
    conflict = until(lambda: watched.cli.sql(skips)[0][0])
    watched.ok("conflicts", "replay", watched.name, str(conflict), "--yes")
    replayed = watched.shows(lambda seen: seen["pgsub_skipped_changes", "replayed"] == 1)
    assert replayed["pgsub_skipped_changes", "waiting"] == 0

    lose(pubdb, watched.name)
    watched.shows(lambda seen: seen["pgsub_slot_lost",] == 1 and seen[STATE, "running"] == 0)
    watched.ok("drop", watched.name, "--yes")
    watched.shows(lambda seen: (STATE, "running") not in seen and seen["pgsub_not_written",] == 0)


@pytest.mark.long
@pytest.mark.follows("pgsub_prepared_transactions", "pgsub_sequence_ahead", "pgsub_errors_total")
def test_a_prepared_transaction_and_a_sequence_that_cannot_follow(watched: Watched, tables: Tables) -> None:
    pubdb, subdb = tables
    for database in tables:
        database.execute("CREATE SEQUENCE q; CREATE TABLE s (id bigint PRIMARY KEY DEFAULT nextval('q'))")
    pubdb.execute("ALTER PUBLICATION p ADD TABLE s")
    watched.create("--two-phase", "--no-copy-data", "--sequences")
    sequence = ("pgsub_sequence_ahead", "public", "q")
    watched.shows(lambda seen: seen[sequence] == seen["pgsub_prepared_transactions",] == 0)

    pubdb.execute(f"BEGIN; INSERT INTO a VALUES (1000, 'x'); PREPARE TRANSACTION '{watched.name}'")
    watched.shows(lambda seen: seen["pgsub_prepared_transactions",] == 1)
    pubdb.execute(f"COMMIT PREPARED '{watched.name}'")
    watched.shows(lambda seen: seen["pgsub_prepared_transactions",] == 0)

    with _locked(subdb, "SELECT nextval('q')"):
        pubdb.execute("SELECT setval('q', 101)")
        watched.shows(lambda seen: seen[sequence] == -100)
    watched.shows(lambda seen: seen[sequence] == 0)
    subdb.execute("SELECT setval('q', 201)")
    watched.shows(lambda seen: seen[sequence] == 100)
    subdb.execute("ALTER SEQUENCE q INCREMENT BY 3")
    watched.shows(lambda seen: seen["pgsub_errors_total", "sequence synchronization"] > 0)


@pytest.mark.long
@pytest.mark.follows("pgsub_not_written")
def test_a_log_and_a_state_store_that_cannot_be_written(watched: Watched, tables: Tables) -> None:
    watched.create("--no-copy-data")
    watched.running()
    log: Path = watched.cli.log  # type: ignore[attr-defined]
    log.rename(log.with_suffix(".moved"))
    log.mkdir()
    watched.ok("disable", watched.name)
    watched.shows(lambda seen: seen["pgsub_not_written",] == 1)
    log.rmdir()
    watched.ok("enable", watched.name)
    watched.shows(lambda seen: seen["pgsub_not_written",] == 0 and seen[STATE, "running"] == 1)
    with closing(sqlite3.connect(watched.cli.state / "state.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        tables[0].execute("INSERT INTO a VALUES (1000, 'x')")
        watched.shows(lambda seen: seen["pgsub_not_written",] == 1)
    watched.shows(lambda seen: seen["pgsub_not_written",] == 0)


@pytest.mark.long
@pytest.mark.follows("pgsub_slot_safe_wal_bytes", "pgsub_slot_lost_in_seconds", "pgsub_slot_lost")
def test_a_slot_that_a_publisher_with_little_room_removes(
    watched: Watched, subdb: Database, make_server: Callable[..., Server]
) -> None:
    source = Database(make_server(max_slot_wal_keep_size="64MB", autovacuum=False), "app")
    source.execute("CREATE TABLE a (id int PRIMARY KEY, t text); CREATE PUBLICATION p FOR TABLE a")
    watched.cli.connection = source.conninfo
    watched.create()
    quiet = watched.shows(lambda seen: seen["pgsub_slot_safe_wal_bytes",] > 0)
    assert ("pgsub_slot_lost_in_seconds",) not in quiet and quiet["pgsub_slot_lost",] == 0
    with _locked(subdb, "LOCK TABLE a"):
        source.execute("INSERT INTO a SELECT g, repeat('x', 1000) FROM generate_series(1, 1000) g")

        def goes_on(seen: Samples) -> bool:
            source.execute(_WAL)
            return seen["pgsub_slot_lost_in_seconds",] > 0

        behind = watched.shows(goes_on)
        assert behind["pgsub_slot_safe_wal_bytes",] < quiet["pgsub_slot_safe_wal_bytes",]
        source.server.query("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
        source.server.reload()

        def is_removed(seen: Samples) -> bool:
            source.execute(f"{_WAL}; SELECT pg_switch_wal(); CHECKPOINT")
            return seen["pgsub_slot_lost",] == 1

        watched.shows(is_removed)
    watched.ok("drop", watched.name, "--yes")
