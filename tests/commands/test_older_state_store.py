"""A state folder that comes back from a backup is not taken for the newest: the ledger's definition and slots stay."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from fix_program import Cli, one_error, until
from fix_servers import Database

Tables = tuple[Database, Database]

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
_OPTION = "SELECT options ->> 'disable_on_error' FROM pgsub.definition"
_OLDER = "the state store is older than the ledger"


@pytest.fixture
def put_back(cli: Cli, tables: Tables, tmp_path: Path) -> Callable[[], None]:
    """Subscription s, and a function that brings back the state folder that it has now."""
    assert cli.create("s").returncode == 0
    shutil.copytree(cli.state, tmp_path / "backup")

    def bring() -> None:
        shutil.rmtree(cli.state)
        shutil.copytree(tmp_path / "backup", cli.state)

    return bring


def _goes_on(cli: Cli, tables: Tables) -> None:
    """Follow the hint: the definition is removed here and nowhere else, and recreated from the ledger."""
    slots, rows = tables[0].rows(_SLOTS), tables[1].rows("SELECT subid, slot_name FROM pgsub.subscription")
    ended = cli("drop", "s", "--yes")
    assert ended.returncode == 0 and "only its definition here is dropped" in ended.stderr, ended.stderr
    assert tables[0].rows(_SLOTS) == slots
    assert tables[1].rows("SELECT subid, slot_name FROM pgsub.subscription") == rows
    servers = ("--connection", cli.connection, "--target", cli.target)
    tables[0].execute("INSERT INTO b VALUES (1, 1)")
    ended = cli("run", "s", "--from-target", *servers, "--until-caught-up", "--timeout", "2m")
    assert ended.returncode == 0, ended.stderr
    assert tables[1].value("SELECT count(*) FROM b") == 1
    assert tables[0].rows(_SLOTS) == slots


def test_a_state_store_from_before_a_change_is_refused_and_brings_no_option_back(
    cli: Cli, tables: Tables, put_back: Callable[[], None]
) -> None:
    assert cli("alter", "s", "--on-conflict", "insert_exists=keep_local").returncode == 0
    assert cli("disable-on-error", "s", "on").returncode == 0
    assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
    put_back()
    for words in (
        ("run", "s", "--until-caught-up", "--timeout", "2m"),
        ("disable-on-error", "s", "on"),
        ("alter", "s", "--binary"),
        ("alter", "s", "--rename-to", "t"),
        ("refresh", "s"),
        ("verify", "s"),
        ("drop", "s", "--keep-target", "--yes"),
    ):
        said = one_error(cli(*words), 3, f'{_OLDER} of subscription "s"')
        assert "pgsub drop s --yes" in said and "pgsub run s --from-target" in said
    assert tables[1].value(_OPTION) == "true" and tables[0].rows(_SLOTS) == [("s",)]
    _goes_on(cli, tables)
    assert cli.sql("SELECT pgsub_on_conflict, subdisableonerr FROM pg_subscription") == [
        ('["insert_exists=keep_local"]', 1)
    ]


@pytest.mark.long
def test_changes_of_an_older_state_store_do_not_make_it_the_newest(
    cli: Cli, tables: Tables, put_back: Callable[[], None]
) -> None:
    assert cli("disable-on-error", "s", "on").returncode == 0
    put_back()
    launcher = cli.launcher()
    until(lambda: _OLDER in str(cli.status("s")["last_error"]))
    for words in (("alter", "s", "--binary"), ("alter", "s", "--no-binary"), ("disable-on-error", "s", "off")):
        assert cli(*words).returncode == 0
    assert cli.stop(launcher) == 0
    one_error(cli("run", "s", "--until-caught-up", "--timeout", "2m"), 3, _OLDER)
    assert tables[1].value(_OPTION) == "true"
    launcher = cli.launcher()
    until(lambda: _OLDER in str(cli.status("s")["last_error"]))
    _goes_on(cli, tables)
    assert cli.stop(launcher) == 0


@pytest.mark.long
def test_a_state_store_that_is_put_back_under_a_launcher_brings_no_option_back(
    cli: Cli, tables: Tables, tmp_path: Path, put_back: Callable[[], None]
) -> None:
    launcher = cli.launcher()
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "1m").returncode == 0
    assert cli("disable-on-error", "s", "on").returncode == 0
    tables[1].wait(_OPTION, value="true")
    for suffix in ("-wal", "-shm"):
        (cli.state / f"state.db{suffix}").unlink(missing_ok=True)
    shutil.copy2(tmp_path / "backup" / "state.db", cli.state / "restored")
    os.replace(cli.state / "restored", cli.state / "state.db")
    until(lambda: _OLDER in str(cli.status("s")["last_error"]))
    assert cli.stop(launcher) == 0
    assert tables[1].value(_OPTION) == "true"
    _goes_on(cli, tables)


def test_a_state_store_from_before_another_slot_leads_to_the_loss_of_none(
    cli: Cli, tables: Tables, put_back: Callable[[], None]
) -> None:
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    assert cli("reconcile", "s", "--slot-name", "s2", "--yes").returncode == 0
    put_back()
    one_error(cli("run", "s", "--until-caught-up", "--timeout", "2m"), 3, f'{_OLDER} of subscription "s"')
    one_error(cli("reconcile", "s", "--yes"), 3, f'{_OLDER} of subscription "s"')
    assert tables[0].rows(_SLOTS) == [("s2",)]
    _goes_on(cli, tables)
    assert cli("drop", "s", "--yes").returncode == 0
    assert tables[0].rows(_SLOTS) == []


def test_a_state_store_that_is_older_than_its_subscription_drops_no_slot_of_the_present_one(
    cli: Cli, tables: Tables, put_back: Callable[[], None]
) -> None:
    assert cli("drop", "s", "--yes").returncode == 0
    tables[1].execute("TRUNCATE a, b")
    assert cli.create("s").returncode == 0
    put_back()
    launcher = cli.launcher()
    cli("disable-on-error", "s", "on")  # which makes it no newer
    assert cli.stop(launcher) == 0
    number = tables[1].value("SELECT subid FROM pgsub.subscription")
    for words in (("run", "s", "--until-caught-up", "--timeout", "2m"), ("refresh", "s"), ("verify", "s")):
        said = one_error(cli(*words), 3, f'{_OLDER}, where slot "s" belongs to another subscription')
        assert f'has "s", number {number}.' in said and "pgsub run s --from-target" in said
    assert "pgsub run s --from-target" in cli("status", "s", "--runbook").stdout
    _goes_on(cli, tables)
    assert tables[1].value("SELECT count(*) FROM a") == 100


def test_a_target_that_is_older_than_the_state_store_is_not_taken_for_a_newer_one(cli: Cli, tables: Tables) -> None:
    """It was restored to before the subscription was dropped and created again, with the same slot name."""
    assert cli.create("s").returncode == 0
    with psycopg.connect(tables[1].conninfo, autocommit=True) as session:
        session.execute("SET session_replication_role = replica")
        session.execute("UPDATE pgsub.subscription SET subid = subid + 1, created_at = created_at - interval '1 day'")
    for words in (("run", "s", "--until-caught-up", "--timeout", "2m"), ("refresh", "s"), ("verify", "s")):
        said = one_error(cli(*words), 3, "the target's ledger does not know this subscription")
        assert "--from-target" not in said
    dropped = cli("drop", "s", "--yes")  # nor is it known to be the newer one
    assert dropped.returncode == 0 and "as that of another subscription" in dropped.stderr, dropped.stderr
    assert tables[0].rows(_SLOTS) == [("s",)]
