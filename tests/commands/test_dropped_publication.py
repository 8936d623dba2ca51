"""A publication that is dropped under a running subscription: from 18 on the publisher goes on without its changes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from fix_program import Cli, one_error, until
from fix_servers import Database

from pgsub.commands.alter import publication_backlog
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.target.ledger.subscriptions import RelationState


def _error(cli: Cli, name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = cli.status(name)["last_error"]
    return found


def test_a_subscription_without_one_of_its_publications_is_not_caught_up(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    pubdb, subdb = tables
    if pubdb.connection.info.server_version < 180000:
        pytest.skip("the publisher refuses to go on without it, which stops apply")
    pubdb.execute("CREATE PUBLICATION other FOR TABLE a")
    assert cli.create("s", "--publication", "other").returncode == 0
    pubdb.execute("DROP PUBLICATION p")
    pubdb.execute("INSERT INTO a VALUES (101, 'sent'); INSERT INTO b VALUES (7, 7)")
    run, wait = ("run", "s", "--until-caught-up"), ("wait", "s", "--for", "caught-up", "--even-if-stopped")
    one_error(cli(*run, "--timeout", "2m"), 3, 'publication "p" does not exist on the publisher')
    assert subdb.value("SELECT count(*) FROM a WHERE id = 101") == 1
    one_error(cli(*wait, "--timeout", "2m"), 3, 'publication "p" does not exist on the publisher')
    pubdb.execute("CREATE PUBLICATION p FOR TABLE a, b")
    assert cli(*run, "--timeout", "2m").returncode == 0


def test_a_publication_that_is_dropped_and_made_again_before_anybody_looks_is_told(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    """The publisher says it in the stream, and nowhere else."""
    pubdb, subdb = tables
    if pubdb.connection.info.server_version < 180000:
        pytest.skip("the publisher refuses to go on without it, which stops apply")
    assert cli.create("s").returncode == 0
    pubdb.execute(f"ALTER DATABASE {pubdb.name} SET client_min_messages = error")
    pubdb.execute("DROP PUBLICATION p")
    pubdb.execute("INSERT INTO b VALUES (7, 7)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE a, b")
    pubdb.execute("INSERT INTO b VALUES (8, 8)")
    said = cli("run", "s", "--until-caught-up", "--timeout", "2m")
    assert (said.returncode, subdb.rows("SELECT id FROM b")) == (0, [(8,)])
    assert said.stderr.count('decoded changes while a publication of subscription "s" did not exist') == 1, said.stderr
    told = next(line for line in said.stderr.splitlines() if line.lstrip().startswith("pgsub verify s --repair"))
    repaired = cli(*told.split()[1:], "--yes")
    assert subdb.rows("SELECT id FROM b ORDER BY id") == [(7,), (8,)], repaired.stderr


def test_a_publication_that_is_made_and_then_added_is_not_said_to_have_been_missing(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    """The stream begins before it, but its tables are copied as of later."""
    pubdb, subdb = tables
    assert cli.create("s").returncode == 0
    pubdb.execute("INSERT INTO b VALUES (7, 7)")
    for database in tables:
        database.execute("CREATE TABLE c (id int PRIMARY KEY)")
    pubdb.execute("CREATE PUBLICATION other FOR TABLE c; INSERT INTO c VALUES (1)")
    added = cli("alter", "s", "--add-publication", "other")
    said = cli("run", "s", "--until-caught-up", "--timeout", "2m")
    assert (added.returncode, said.returncode) == (0, 0), added.stderr + said.stderr
    assert subdb.rows("SELECT id FROM b") == [(7,)] and subdb.rows("SELECT id FROM c") == [(1,)]
    assert "did not exist" not in added.stderr + said.stderr


def test_a_publication_that_is_gone_for_good_can_be_left_where_the_publisher_sends_nothing_without_it(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    pubdb, subdb = tables
    if pubdb.connection.info.server_version >= 180000:
        pytest.skip("the publisher goes on without it")
    pubdb.execute("CREATE PUBLICATION q FOR TABLE a")
    assert cli.create("s", "--publication", "q").returncode == 0
    pubdb.execute("DROP PUBLICATION q")
    pubdb.execute("INSERT INTO b VALUES (7, 7)")
    run = ("run", "s", "--until-caught-up", "--timeout", "2m")
    one_error(cli(*run), 7, 'publication "q" does not exist')
    left = cli("alter", "s", "--drop-publication", "q")
    assert left.returncode == 0 and "pgsub verify s --repair" in left.stderr, left.stderr
    assert cli(*run).returncode == 0
    assert subdb.rows("SELECT id FROM b") == [(7,)]


def test_a_table_that_moves_to_another_publication_loses_no_change(cli: Cli, tables: tuple[Database, Database]) -> None:
    pubdb, subdb = tables
    pubdb.execute("CREATE PUBLICATION q FOR TABLE a")
    assert cli.create("s", "--publication", "q").returncode == 0
    run, moved = ("run", "s", "--until-caught-up", "--timeout", "2m"), ("alter", "s", "--drop-publication", "p")
    pubdb.execute("INSERT INTO b VALUES (7, 7)")
    pubdb.execute("ALTER PUBLICATION q ADD TABLE b")
    subdb.execute("INSERT INTO b VALUES (7, 0)")
    one_error(cli(*moved), 6, "conflict=insert_exists")
    assert cli.sql("SELECT subpublications FROM pg_subscription") == [('["p", "q"]',)]
    subdb.execute("DELETE FROM b")
    altered = cli(*moved)  # which lets apply catch up itself
    assert altered.returncode == 0, altered.stderr
    pubdb.execute("INSERT INTO b VALUES (8, 8)")
    assert cli(*run).returncode == 0
    assert subdb.rows("SELECT id FROM b ORDER BY id") == [(7,), (8,)]


def test_publications_wait_for_published_changes_and_for_tables_that_catch_up_and_for_nothing_else(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    pubdb = tables[0]
    assert cli.create("s").returncode == 0
    before = Subscription(1, "s", cli.connection, cli.target, ("p",), "s")
    after, ready = replace(before, publications=()), [RelationState(1, "public", "b", "r")]
    with closing(publisher.connect(pubdb.conninfo, application_name="test")) as source:
        pubdb.execute("SELECT pg_logical_emit_message(true, '', 'of no table'), pg_switch_wal()")
        idle = publication_backlog.find(source, before, after, lambda: ready)
        assert idle is not None and idle.idle
        assert publication_backlog.find(source, before, after, list) is None
        behind = publication_backlog.find(source, before, after, lambda: [RelationState(1, "public", "b", "f")])
        assert behind is not None and (behind.idle, behind.tables) == (False, {1})
        pubdb.execute("INSERT INTO b VALUES (7, 7)")
        pending = publication_backlog.find(source, before, after, lambda: ready)
        assert pending is not None and not pending.idle


@pytest.mark.long
def test_changes_that_a_dropped_publication_leaves_out_are_told_and_brought_again(
    served: tuple[Cli, str], tables: tuple[Database, Database]
) -> None:
    (cli, name), (pubdb, subdb) = served, tables
    if pubdb.connection.info.server_version < 180000:
        pytest.skip("the publisher refuses to go on without it, which stops apply")
    pubdb.execute("CREATE PUBLICATION other FOR TABLE a")
    pubdb.execute("DROP PUBLICATION p; INSERT INTO b VALUES (7, 7)")
    until(lambda: (error := _error(cli, name)) is not None and error["class"] == "PublicationMissing")
    checked = cli("status", name, "--check")
    assert checked.returncode == 3
    assert 'publication "p" does not exist on the publisher' in checked.stderr
    steps = cli("status", name, "--runbook").stdout
    assert 'Publications of its database are "other".' in steps
    assert f"pgsub verify {name} --repair\n" in steps
    # apply goes on, and says so: what waits for its position is not held up
    position = pubdb.value("SELECT pg_current_wal_lsn()")
    assert cli("wait", name, "--for", f"lsn={position}", "--timeout", "2m").returncode == 0
    pubdb.execute("CREATE PUBLICATION p FOR TABLE a, b")
    until(lambda: _error(cli, name) is None)
    assert cli("status", name, "--check").returncode == 0
    log = cli.running.log.read_text()  # type: ignore[attr-defined]
    assert log.count('ERROR:  publication "p" does not exist on the publisher') == 1
    assert "What the publisher committed without them was not sent, and will not be." in log
    assert subdb.rows("SELECT id FROM b WHERE id = 7") == []
    repaired = cli("verify", name, "--repair", "--yes")
    assert subdb.rows("SELECT id FROM b WHERE id = 7") == [(7,)], repaired.stderr
