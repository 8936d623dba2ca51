"""No change is passed over where publications change: nobody streams by those that the tables do not follow yet."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from fix_program import Cli, Started, one_error, until
from fix_servers import Database

Tables = tuple[Database, Database]
_BEHIND = "still those of its publications before"


@pytest.fixture
def tables(tables: Tables) -> Tables:
    """Table a is published by p, and table b by p2."""
    tables[0].execute("DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLE a; CREATE PUBLICATION p2 FOR TABLE b")
    return tables


def _served(cli: Cli, *publications: str) -> Started:
    words = [word for name in publications for word in ("--publication", name)]
    created = cli("create", "s", "--connection", cli.connection, "--target", cli.target, *words)
    assert created.returncode == 0, created.stderr
    launcher = cli.launcher()
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "1m").returncode == 0
    return launcher


def _written_while(cli: Cli, tables: Tables, said: str) -> None:
    """Write rows while it is told that nothing is applied."""
    until(lambda: said in str(cli.status("s")["last_error"]))
    tables[0].execute("INSERT INTO b VALUES (1, 1); INSERT INTO a VALUES (1001, 'behind it')")


def _all_there(cli: Cli, tables: Tables) -> None:
    tables[0].execute("INSERT INTO b VALUES (2, 2)")
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "1m").returncode == 0
    for query in ("SELECT * FROM a ORDER BY 1", "SELECT * FROM b ORDER BY 1"):
        assert tables[0].rows(query) == tables[1].rows(query)


@pytest.mark.long
@pytest.mark.parametrize("ending", ["refresh", "taken back"])
def test_an_alter_that_was_killed_between_definition_and_tables_lets_nothing_pass(
    cli: Cli, tables: Tables, ending: str
) -> None:
    launcher = _served(cli, "p", "p2")
    cli("alter", "s", "--drop-publication", "p2", env={"PGSUB_FAILPOINTS": "alter.after_definition=kill"})
    _written_while(cli, tables, _BEHIND)
    assert cli("status", "s", "--check").returncode == 6
    assert "pgsub refresh s" in cli("status", "s", "--runbook").stdout
    assert tables[1].value("SELECT count(*) FROM a WHERE id = 1001") == 0
    words = ("refresh", "s") if ending == "refresh" else ("alter", "s", "--add-publication", "p2")
    ended = cli(*words)
    assert ended.returncode == 0, ended.stderr
    if ending == "refresh":
        assert cli("wait", "s", "--for", "caught-up", "--timeout", "1m").returncode == 0
        assert tables[1].rows("SELECT * FROM b") == []
        assert cli("alter", "s", "--add-publication", "p2").returncode == 0
    _all_there(cli, tables)
    assert cli.stop(launcher) == 0


@pytest.mark.long
def test_an_alter_that_fails_and_is_taken_back_lets_nothing_pass(cli: Cli, tables: Tables, tmp_path: Path) -> None:
    launcher = _served(cli, "p", "p2")
    points = f"refresh.after_fence=pause:{tmp_path / 'go'};refresh.after_release=error"
    alter = cli.start("alter", "s", "--drop-publication", "p2", env={"PGSUB_FAILPOINTS": points})
    until(lambda: "p2" not in cli.sql("SELECT subpublications FROM pg_subscription")[0][0])
    _written_while(cli, tables, _BEHIND)
    (tmp_path / "go").touch()
    until(lambda: alter.poll() is not None)
    assert alter.poll() != 0
    assert cli.sql("SELECT subpublications, pgsub_generation, pgsub_unrefreshed FROM pg_subscription") == [
        ('["p", "p2"]', 0, 0)
    ]
    _all_there(cli, tables)
    assert cli.stop(launcher) == 0


@pytest.mark.long
@pytest.mark.parametrize("served", [False, True], ids=["before a run", "under a run"])
def test_a_state_store_from_an_older_backup_is_refused_and_made_anew_from_the_ledger(
    cli: Cli, tables: Tables, tmp_path: Path, served: bool
) -> None:
    launcher = _served(cli, "p")
    shutil.copytree(cli.state, tmp_path / "backup")
    assert cli("alter", "s", "--add-publication", "p2").returncode == 0
    if not served:
        cli.stop(launcher)
    for suffix in ("-wal", "-shm"):
        (cli.state / f"state.db{suffix}").unlink(missing_ok=True)
    shutil.copy2(tmp_path / "backup" / "state.db", cli.state / "restored")
    os.replace(cli.state / "restored", cli.state / "state.db")
    if not served:
        launcher = cli.launcher()
    _written_while(cli, tables, "older than the ledger")
    assert tables[1].value("SELECT count(*) FROM a WHERE id = 1001") == 0
    one_error(cli("alter", "s", "--add-publication", "p2"), 3, "older than the ledger", "pgsub drop s --yes")
    cli.stop(launcher)
    assert cli("drop", "s", "--yes").returncode == 0
    servers = ("--connection", cli.connection, "--target", cli.target)
    ended = cli("run", "s", "--from-target", *servers, "--until-caught-up", "--timeout", "2m")
    assert ended.returncode == 0, ended.stderr
    assert cli.sql("SELECT pgsub_table_set FROM pg_subscription") == [(1,)]
    launcher = cli.launcher()
    _all_there(cli, tables)
    assert cli.stop(launcher) == 0


_DEFINITION = "SELECT options::text FROM pgsub.definition"
_ADD, _REMOVE = ("alter", "s", "--add-publication", "p2"), ("alter", "s", "--drop-publication", "p2")


def _go_back(tables: Tables, definition: str) -> None:
    """Bring the ledger back to before table b was added, as a restored backup does."""
    tables[1].execute("DELETE FROM pgsub.subscription_rel WHERE srrelid = 'b'::regclass")
    tables[1].execute("UPDATE pgsub.definition SET options = %s::json", definition)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ([_ADD, _REMOVE, _ADD], ("refresh", "s")),
        ([_ADD], ("alter", "s", "--set-publication", "p2", "--set-publication", "p")),
        ([("refresh", "s")], ("reconcile", "s", "--force", "--yes")),
    ],
    ids=["altered", "altered again", "refreshed"],
)
def test_a_target_that_lost_a_change_of_its_tables_gets_nothing_until_they_follow_again(
    cli: Cli, tables: Tables, changes: list[tuple[str, ...]], ending: tuple[str, ...]
) -> None:
    launcher = _served(cli, "p")
    before = tables[1].value(_DEFINITION)
    if _ADD not in changes:
        tables[0].execute("ALTER PUBLICATION p ADD TABLE b")
    for change in changes:
        assert cli(*change).returncode == 0
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "1m").returncode == 0
    cli.stop(launcher)
    _go_back(tables, before)
    assert cli("alter", "s", "--binary").returncode == 0
    assert '"binary": true, ' in tables[1].value(_DEFINITION)
    assert "p2" not in tables[1].value(_DEFINITION)
    launcher = cli.launcher()
    _written_while(cli, tables, _BEHIND)
    assert cli("status", "s", "--check").returncode == 6
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "1s").returncode != 0
    assert tables[1].value("SELECT count(*) FROM a WHERE id = 1001") == 0
    ended = cli(*ending)
    assert ended.returncode == 0, ended.stderr
    _all_there(cli, tables)
    assert cli.stop(launcher) == 0


@pytest.mark.long
def test_a_target_that_lost_changes_of_no_table_is_served_at_once(cli: Cli, tables: Tables) -> None:
    tables[0].execute("CREATE PUBLICATION none")
    launcher = _served(cli, "p")
    cli.stop(launcher)
    before = tables[1].value(_DEFINITION)
    for words in (
        ("--add-publication", "none"),
        ("--add-publication", "p2", "--no-refresh"),
        ("--binary",),
        ("--rename-to", "t"),
    ):
        assert cli("alter", "s", *words).returncode == 0
    assert tables[1].value(_DEFINITION) != before
    tables[1].execute("UPDATE pgsub.definition SET options = %s::json", before)
    tables[0].execute("INSERT INTO a VALUES (1001, 'after it')")
    launcher = cli.launcher()
    assert cli("wait", "t", "--for", "caught-up", "--timeout", "1m").returncode == 0
    assert cli.status("t")["last_error"] is None
    assert tables[1].value("SELECT count(*) FROM a WHERE id = 1001") == 1
    assert cli.stop(launcher) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "point", "known"),
    [("refresh", "before_commit", 0), ("refresh", "after_commit", 1), ("alter", "after_commit", 1)],
)
def test_a_change_of_tables_that_was_killed_at_its_commit_does_not_count_as_lost(
    cli: Cli, tables: Tables, command: str, point: str, known: int
) -> None:
    launcher = _served(cli, "p")
    if command == "refresh":
        tables[0].execute("ALTER PUBLICATION p ADD TABLE b")
    words = _ADD if command == "alter" else ("refresh", "s")
    cli(*words, env={"PGSUB_FAILPOINTS": f"refresh.{point}=kill"})
    assert cli.sql("SELECT pgsub_table_set FROM pg_subscription")[0][0] <= known
    cli.stop(launcher)
    launcher = cli.launcher()
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "1m").returncode == 0
    # the launcher notes what the command did not, so its loss would be seen
    until(lambda: cli.sql("SELECT pgsub_table_set FROM pg_subscription") == [(known,)])
    assert cli("refresh", "s").returncode == 0
    assert cli.sql("SELECT pgsub_table_set FROM pg_subscription") == [(1,)]
    _all_there(cli, tables)
    assert cli.stop(launcher) == 0
