"""What only PostgreSQL 19 has, between two servers of that version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from embedded import Server
from fix_pair import MakePair, Pair
from fix_program import Cli, one_error
from fix_servers import Database, other_servers

from pgsub.apply.worker import feedback
from pgsub.common.errors import StateForbids
from pgsub.publisher.connect import connect
from pgsub.publisher.prerequisites import check_wal_level
from pgsub.publisher.publication import PublishedTable, published_tables

if TYPE_CHECKING:
    from fix_servers import Servers

VERSION = "19"

_TABLES = "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)"
_PARTITIONED = """
CREATE TABLE whole (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE part PARTITION OF whole FOR VALUES FROM (0) TO (1000)
"""


@pytest.fixture(scope="session")
def publisher(shared_servers: Servers) -> Server:
    """Of that version."""
    return shared_servers("publisher", VERSION)


@pytest.fixture(scope="session")
def target(shared_servers: Servers) -> Server:
    """Of that version."""
    return shared_servers("target", VERSION)


@pytest.fixture
def on_demand(publisher: Server) -> Iterator[Server]:
    """A publisher that does not decode before it is asked to."""
    with Server(fast=True, settings={"wal_level": "replica"}, binaries=other_servers()[VERSION]) as server:
        yield server


def _program(make_cli: Callable[[str, str], Cli], *databases: Database) -> Cli:
    return make_cli(*(database.conninfo for database in databases))


def test_tables_that_a_publication_excepts_are_not_subscribed_until_it_has_them(
    make_cli: Callable[[str, str], Cli], pubdb: Database, subdb: Database
) -> None:
    for database in (pubdb, subdb):
        database.execute(_TABLES + ";" + _PARTITIONED)
    pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES EXCEPT (TABLE b, whole)")
    cli = _program(make_cli, pubdb, subdb)
    assert cli.create("s", "--no-wait").returncode == 0
    assert cli.states() == {"a": "i"}
    pubdb.execute("ALTER PUBLICATION p SET ALL TABLES EXCEPT (TABLE a)")
    assert cli("refresh", "s", "--no-wait").returncode == 0
    assert cli.states() == {"b": "i", "part": "i"}
    assert cli("drop", "s", "--yes").returncode == 0


def test_changes_of_tables_that_a_publication_excepts_do_not_come(pair: MakePair) -> None:
    p = pair(_TABLES + ";" + _PARTITIONED, pub="CREATE PUBLICATION p FOR ALL TABLES EXCEPT (TABLE b, whole)")
    p.apply("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1); INSERT INTO whole VALUES (1)", "TRUNCATE b, whole")
    p.apply("INSERT INTO a VALUES (2)", "BEGIN; INSERT INTO b VALUES (3); INSERT INTO a VALUES (3); COMMIT")
    assert [p.subdb.value(f"SELECT count(*) FROM {table}") for table in ("a", "b", "whole")] == [3, 0, 0]


@pytest.mark.parametrize("via_root", ["true", "false"])
def test_a_partitioned_table_that_is_excepted_takes_its_partitions_with_it(pubdb: Database, via_root: str) -> None:
    pubdb.execute(_TABLES + ";" + _PARTITIONED)
    pubdb.execute(
        f"CREATE PUBLICATION p FOR ALL TABLES EXCEPT (TABLE whole, b) WITH (publish_via_partition_root = {via_root})"
    )
    pubdb.execute("CREATE PUBLICATION q FOR TABLE b")
    with connect(pubdb.conninfo, application_name="x", replication=True) as asking:
        a, b = PublishedTable("public", "a", "r", None), PublishedTable("public", "b", "r", None)
        assert published_tables(asking, ["p"]) == [a]
        assert published_tables(asking, ["p", "q"]) == [a, b]


def test_a_publication_of_sequences_is_no_failure_and_what_is_not_done_is_said(
    make_cli: Callable[[str, str], Cli], pubdb: Database, subdb: Database
) -> None:
    for database in (pubdb, subdb):
        database.execute(f"{_TABLES}; CREATE SEQUENCE numbers")
    pubdb.execute("SELECT setval('numbers', 77)")
    pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES, ALL SEQUENCES; CREATE PUBLICATION q FOR ALL SEQUENCES")
    cli = _program(make_cli, pubdb, subdb)
    said = 'publication "p" publishes sequences, which are not synchronized'
    one_error(cli.create("s", "--strict"), 3, said)
    ended = cli.create("s", "--no-wait")
    assert ended.returncode == 0 and f"pgsub: warning: {said}" in ended.stderr, ended.stderr
    assert cli.states() == {"a": "i", "b": "i"}
    ended = cli("alter", "s", "--add-publication", "q", "--no-wait")
    assert ended.returncode == 0 and 'publication "q" publishes sequences' in ended.stderr
    assert '"p" publishes' not in ended.stderr
    ended = cli("refresh", "s", "--sequences")
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows("SELECT last_value, is_called FROM numbers") == [(77, True)]
    assert cli("drop", "s", "--yes").returncode == 0


def test_published_sequences_follow_where_that_is_asked_for(
    make_cli: Callable[[str, str], Cli], pubdb: Database, subdb: Database
) -> None:
    for database in (pubdb, subdb):
        database.execute(f"{_TABLES}; CREATE SEQUENCE numbers")
    pubdb.execute("SELECT setval('numbers', 77); CREATE PUBLICATION p FOR ALL TABLES, ALL SEQUENCES")
    cli = _program(make_cli, pubdb, subdb)
    ended = cli.create("s", "--sequences", "--strict", "--no-wait")
    assert ended.returncode == 0 and "not synchronized" not in ended.stderr, ended.stderr
    assert subdb.rows("SELECT last_value, is_called FROM numbers") == [(77, True)]
    assert [(row["relname"], row["srsubstate"]) for row in cli.status()["sequences"]] == [("numbers", "r")]
    assert cli("drop", "s", "--yes").returncode == 0


def test_a_publisher_with_wal_level_replica_decodes_for_as_long_as_a_subscription_needs_it(
    on_demand: Server, subdb: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    pubdb = Database(on_demand, "app")
    level = "SHOW effective_wal_level"
    assert pubdb.value(level) == "replica"
    with connect(pubdb.conninfo, application_name="x") as asking:
        check_wal_level(asking)
    p = Pair(pubdb, subdb)
    p.ddl(_TABLES)
    pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES; INSERT INTO a VALUES (1)")
    p.subscribe("i", None)
    assert pubdb.value(level) == "logical"
    p.sync("a")
    p.apply("INSERT INTO a VALUES (2); INSERT INTO b VALUES (1)")
    p.same("a")
    p.close()
    pubdb.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    pubdb.wait(level, value="replica")
    pubdb.close()
    # a standby cannot switch it on for itself
    on_demand.stop()
    (on_demand.data / "standby.signal").touch()
    on_demand.start()
    with connect(on_demand.conninfo(), application_name="x") as asking:
        with pytest.raises(StateForbids, match="effective_wal_level") as refused:
            check_wal_level(asking)
    assert "on its primary" in str(refused.value.hint)


def test_wal_level_minimal_is_refused_with_the_setting_to_change(publisher: Server) -> None:
    settings = {"wal_level": "minimal", "max_wal_senders": 0}
    with Server(fast=True, settings=settings, binaries=other_servers()[VERSION]) as server:
        with connect(server.conninfo(), application_name="x") as asking:
            with pytest.raises(StateForbids, match='"wal_level" >= "replica"') as refused:
                check_wal_level(asking)
    assert str(refused.value.hint).endswith("ALTER SYSTEM SET wal_level = logical;")


def test_nobody_is_warned_of_a_publication_on_the_target_that_excepts_the_ledger(
    make_cli: Callable[[str, str], Cli], pubdb: Database, subdb: Database
) -> None:
    for database in (pubdb, subdb):
        database.execute(_TABLES)
    pubdb.execute("CREATE PUBLICATION p FOR TABLE a; CREATE PUBLICATION q FOR TABLE b")
    subdb.execute("CREATE PUBLICATION onward FOR ALL TABLES")
    cli, said = _program(make_cli, pubdb, subdb), 'publication "onward" on the target publishes all tables'
    assert said in cli.create("s", "--no-wait").stderr
    [(ledger,)] = subdb.rows(
        "SELECT string_agg(oid::regclass::text, ', ') FROM pg_class"
        " WHERE relnamespace = 'pgsub'::regnamespace AND relkind = 'r'"
    )
    subdb.execute(f"ALTER PUBLICATION onward SET ALL TABLES EXCEPT (TABLE {ledger})")
    options = ("--connection", cli.connection, "--target", cli.target, "--publication", "q", "--no-wait")
    ended = cli("create", "later", *options)
    assert ended.returncode == 0 and said not in ended.stderr
    for name in ("s", "later"):
        assert cli("drop", name, "--yes").returncode == 0
