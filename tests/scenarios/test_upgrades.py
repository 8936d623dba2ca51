"""pg_upgrade of either server under a subscription: what the server's own subscriber goes through, and pgsub too.

After PostgreSQL's src/bin/pg_upgrade/t/003_logical_slots.pl and 004_subscription.pl.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from embedded import Server
from fix_clusters import upgraded
from fix_program import ROOT, one_error
from fix_servers import Database
from manual_pages import between, examples
from thorough import only_thorough

TABLES = "CREATE TABLE kept (id int PRIMARY KEY, v text); CREATE TABLE later (id int)"
MANUAL = ROOT / "man" / "pgsub-alter.1"
#: Servers of Debian's packages, which come with all that pg_upgrade needs of the old one.
OLDER = [folder for folder in sorted(Path("/usr/lib/postgresql").glob("1[5-7]/bin")) if (folder / "postgres").exists()]


def subscribed(cli, name, pubdb, subdb, *options):
    """A subscription of ``kept``, which is synchronized; ``later`` is published and not subscribed yet."""
    for database in (pubdb, subdb):
        database.execute(TABLES)
    pubdb.execute(
        "CREATE PUBLICATION p FOR TABLE kept; INSERT INTO kept SELECT g, 'copied' FROM generate_series(1, 9) g"
    )
    cli.connection, cli.target = pubdb.conninfo, subdb.conninfo
    ended = cli.create(name, *options)
    assert ended.returncode == 0, ended.stderr
    pubdb.execute("ALTER PUBLICATION p ADD TABLE later; INSERT INTO later VALUES (1)")


def disabled(cli, name):
    """The subscription is caught up, and disabled."""
    assert cli("wait", name, "--for", "caught-up", "--timeout", "60s").returncode == 0
    assert cli("disable", name).returncode == 0
    assert cli("wait", name, "--for", "disabled", "--timeout", "60s").returncode == 0


def stopped(database):
    """Its server is stopped, with nobody left in it."""
    database.close()
    database.server.stop()


def goes_on(cli, name, pubdb, subdb):
    """What was written meanwhile comes once; a table that is refreshed is copied; then the subscription can go."""
    ended = cli("enable", name)
    assert ended.returncode == 0, ended.stderr
    ended = cli("refresh", name, "--timeout", "60s")
    assert ended.returncode == 0, ended.stderr
    pubdb.execute("UPDATE kept SET v = 'changed' WHERE id = 1; INSERT INTO later VALUES (3)")
    assert cli("wait", name, "--for", "caught-up", "--timeout", "60s").returncode == 0
    for query in ("SELECT * FROM kept ORDER BY id", "SELECT * FROM later ORDER BY id"):
        assert subdb.rows(query) == pubdb.rows(query)
    assert set(cli.states().values()) == {"r"}
    ended = cli("drop", name, "--yes")
    assert ended.returncode == 0, ended.stderr
    assert pubdb.rows("SELECT slot_name FROM pg_replication_slots") == []


@only_thorough
@pytest.mark.parametrize("older", [None, *OLDER], ids=lambda folder: folder.parent.name if folder else "same")
def test_a_target_that_pg_upgrade_renewed_goes_on_where_the_old_one_stopped(launcher, make_server, publisher, older):
    name, old = "renewed_target", make_server(of=Server(fast=True, binaries=older))
    old.init()
    old.start()
    pubdb, subdb = Database(publisher, f"pub_upgraded{(older and older.parent.name) or ''}"), Database(old, "app")
    try:
        subscribed(launcher, name, pubdb, subdb, "--two-phase")
        disabled(launcher, name)
        before = subdb.rows("SELECT remote_lsn, subid FROM pgsub.progress")
        stopped(subdb)
        pubdb.execute("INSERT INTO kept VALUES (10, 'meanwhile'); INSERT INTO later VALUES (2)")
        new = Database(make_server(of=upgraded(old, older)), "app", there=True)
        assert new.rows("SELECT remote_lsn, subid FROM pgsub.progress") == before
        ended = launcher("alter", name, "--target", new.conninfo)
        assert ended.returncode == 0, ended.stderr
        assert launcher.status(name)["subtwophasestate"] == "e"
        # what is refreshed with two_phase cannot be copied, as in the server
        assert launcher("alter", name, "--no-two-phase").returncode == 0
        goes_on(launcher, name, pubdb, new)
    finally:
        launcher("drop", name, "--if-exists", "--keep-slot", "--yes")
        pubdb.drop()


@pytest.mark.long
def test_a_publisher_that_pg_upgrade_renewed_is_gone_over_to_when_the_operator_says_so(launcher, make_server, subdb):
    name, old = "sales", Database(make_server(), "app")
    subscribed(launcher, name, old, subdb, "--two-phase", "--failover")
    disabled(launcher, name)
    stopped(old)
    new = Database(make_server(of=upgraded(old.server)), "app", there=True)
    assert new.rows("SELECT slot_name, two_phase, failover FROM pg_replication_slots") == [(name, True, True)]
    new.execute("INSERT INTO kept VALUES (10, 'meanwhile'); INSERT INTO later VALUES (2)")
    # another system identifier: that it is the same publisher is nothing that pgsub would guess
    one_error(
        launcher("alter", name, "--connection", new.conninfo),
        7,
        "a different database system",
        "--publisher-upgraded",
    )
    assert launcher("alter", name, "--no-two-phase", "--connection", new.conninfo).returncode == 7
    [example] = [words for words in examples(MANUAL) if "--publisher-upgraded" in words]
    ended = launcher(*between(example, new.conninfo, subdb.conninfo))
    assert ended.returncode == 0, ended.stderr
    [(position,)] = new.rows("SELECT confirmed_flush_lsn FROM pg_replication_slots")
    assert ended.stderr == f"NOTICE:  apply continues from {position} of the upgraded publisher\n"
    again = launcher("alter", name, "--connection", new.conninfo, "--publisher-upgraded")
    assert (again.returncode, "the one that the subscription follows" in again.stderr) == (0, True)
    [(shown,)] = launcher.sql("SELECT detail FROM pgsub_journal WHERE action = 'publisher-upgraded'")
    assert position in shown
    assert launcher("alter", name, "--no-two-phase").returncode == 0
    assert launcher("enable", name).returncode == 0
    one_error(launcher("alter", name, "--publisher-upgraded"), 3, "while the subscription is enabled")
    goes_on(launcher, name, new, subdb)
