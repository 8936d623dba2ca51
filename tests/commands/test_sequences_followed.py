"""Sequences that follow the publisher: ``create --sequences``, and what a running launcher makes of it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from fix_program import Cli, nothing_created, one_error, until
from fix_servers import Database

Tables = tuple[Database, Database]

_DDL = """
CREATE SEQUENCE shared INCREMENT BY 5;
CREATE SEQUENCE down INCREMENT BY -2 MINVALUE -1000 MAXVALUE 10 START 10;
CREATE TABLE s (id serial PRIMARY KEY, n bigint DEFAULT nextval('shared'), d int DEFAULT nextval('down'))
"""
_OURS = ("down", "s_id_seq", "shared")
_OFTEN = {"PGSUB_SEQUENCE_SECONDS": "0.2"}


@pytest.fixture
def sequences(tables: Tables) -> Tables:
    """A published table with a serial column and standalone sequences in its defaults."""
    for database in tables:
        database.execute(_DDL)
    tables[0].execute("ALTER PUBLICATION p ADD TABLE s")
    return tables


def _positions(database: Database, *names: str) -> list[tuple[int, bool]]:
    return [database.rows(f"SELECT last_value, is_called FROM {name}")[0] for name in names]


def _shown(cli: Cli, name: str) -> dict[str, Any]:
    return next(row for row in cli.status()["sequences"] if row["relname"] == name)


def _ahead(cli: Cli, name: str) -> tuple[str, int | None]:
    row = _shown(cli, name)
    return row["srsubstate"], row["ahead"]


@pytest.mark.long
@pytest.mark.publishers("15", "19", long=True)
def test_sequences_are_at_the_publishers_values_when_create_returns_and_status_says_so(
    cli: Cli, sequences: Tables
) -> None:
    pubdb, subdb = sequences
    pubdb.execute("INSERT INTO s SELECT FROM generate_series(1, 17)")
    subdb.execute("SELECT setval('down', -100)")
    ended = cli.create("s", "--sequences", "--no-wait")
    assert ended.returncode == 0 and "sequences: 2 set, 1 left as they are" in ended.stderr, ended.stderr
    assert _positions(subdb, *_OURS) == [(-100, True), (17, True), (81, True)]
    assert cli.status()["pgsub_sequences"] is True
    assert {name: _ahead(cli, name) for name in _OURS} == {"down": ("r", 78), "s_id_seq": ("r", 0), "shared": ("r", 0)}
    [line] = [line.split("\t") for line in cli("status", "s").stdout.splitlines() if line.startswith("public.down\t")]
    assert line[:5] == ["public.down", "r", "-22", "-100", "78"]


@pytest.mark.long
@pytest.mark.publishers("15", "19")
def test_a_running_launcher_keeps_sequences_close_and_never_takes_one_backward(cli: Cli, sequences: Tables) -> None:
    pubdb, subdb = sequences
    assert cli.create("s", "--sequences", "--no-wait").returncode == 0
    running = cli.launcher(env=_OFTEN)
    pubdb.execute("SELECT setval('shared', 101)")
    until(lambda: _positions(subdb, "shared") == [(101, True)])
    with contextlib.closing(subdb.connect()) as session:
        session.execute("BEGIN")
        session.execute("SELECT nextval('shared')")
        pubdb.execute("SELECT setval('shared', 201); SELECT setval('down', -100)")
        until(lambda: _ahead(cli, "shared") == ("i", -95))
        assert _shown(cli, "shared")["problem"] == "open transactions of the target took values of it"
        until(lambda: _ahead(cli, "down") == ("r", 0))
        session.execute("COMMIT")
    until(lambda: _ahead(cli, "shared") == ("r", 0))
    assert _positions(subdb, "shared") == [(201, True)]
    subdb.execute("SELECT setval('shared', 1001)")
    pubdb.execute("SELECT setval('shared', 301); SELECT setval('down', -200)")
    until(lambda: (_ahead(cli, "shared"), _ahead(cli, "down")) == (("r", 700), ("r", 0)))
    assert _positions(subdb, "shared", "down") == [(1001, True), (-200, True)]
    assert cli.status()["stats"]["sync_seq_error_count"] == 0
    assert cli("alter", "s", "--no-sequences").returncode == 0
    until(lambda: cli.status()["sequences"] == [])
    assert cli.stop(running) == 0


@pytest.mark.long
def test_a_definition_that_differs_is_named_once_with_an_alter_that_mends_it_and_apply_goes_on(
    cli: Cli, sequences: Tables
) -> None:
    pubdb, subdb = sequences
    assert cli.create("s", "--sequences", "--no-wait").returncode == 0
    subdb.execute("ALTER SEQUENCE down INCREMENT BY -3 MAXVALUE 5000")
    running = cli.launcher(env=_OFTEN)
    until(lambda: cli.status()["stats"]["sync_seq_error_count"] > 2)
    pubdb.execute("INSERT INTO a VALUES (1000, 'later'); SELECT setval('shared', 501)")
    until(lambda: subdb.rows("SELECT t FROM a WHERE id = 1000") == [("later",)])
    until(lambda: _positions(subdb, "shared") == [(501, True)])
    found = cli.status()
    named = 'mismatched or renamed sequence on subscriber ("public.down")'
    assert found["state"] == "running" and found["last_error"]["detail"] == named
    assert (_ahead(cli, "down"), _shown(cli, "down")["problem"]) == (("i", None), named)
    one_error(cli("wait", "s", "--for", "caught-up", "--timeout", "1m"), 6, named)
    assert cli("wait", "s", "--for", "synced", "--timeout", "1m").returncode == 0
    [log] = [path.read_text() for path in cli.state.parent.glob("stderr.*")]
    assert log.count("sequence synchronization failed") == 1, log
    alters = [line for line in cli("status", "s", "--runbook").stdout.splitlines() if "ALTER SEQUENCE" in line]
    assert len(alters) == 1
    subdb.execute(alters[0])
    until(lambda: cli.status()["last_error"] is None and _ahead(cli, "down")[0] == "r")
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "1m").returncode == 0
    assert cli.stop(running) == 0


@pytest.mark.long
def test_what_keeps_a_sequence_from_following_is_a_warning_of_create_with_what_to_paste(
    cli: Cli, sequences: Tables
) -> None:
    pubdb, subdb = sequences
    subdb.execute("ALTER SEQUENCE down MAXVALUE 5000")
    named = 'mismatched or renamed sequence on subscriber ("public.down")'
    one_error(cli.create("s", "--sequences", "--strict"), 3, named, 'ALTER SEQUENCE "public"."down" MAXVALUE 10;')
    nothing_created(cli, pubdb, subdb)
    pubdb.execute("SELECT setval('shared', 101)")
    ended = cli.create("s", "--sequences", "--no-wait")
    assert ended.returncode == 0 and f"warning: {named}" in ended.stderr, ended.stderr
    assert _positions(subdb, "shared") == [(101, True)]
    assert _ahead(cli, "down") == ("i", None)


@pytest.mark.long
def test_a_run_to_the_publishers_position_takes_the_sequences_along(cli: Cli, sequences: Tables) -> None:
    pubdb, subdb = sequences
    assert cli.create("s", "--no-wait").returncode == 0
    assert cli("alter", "s", "--sequences").returncode == 0
    pubdb.execute("INSERT INTO s SELECT FROM generate_series(1, 17)")
    ended = cli("run", "s", "--until-caught-up", "--timeout", "2m")
    assert ended.returncode == 0, ended.stderr
    assert subdb.value("SELECT count(*) FROM s") == 17
    assert _positions(subdb, *_OURS) == _positions(pubdb, *_OURS)


@pytest.mark.long
def test_a_run_to_the_publishers_position_ends_well_only_if_its_sequences_follow(cli: Cli, sequences: Tables) -> None:
    pubdb, subdb = sequences
    assert cli.create("s", "--sequences", "--no-wait").returncode == 0
    pubdb.execute("SELECT setval('shared', 101)")
    with contextlib.closing(subdb.connect()) as session:
        session.execute("BEGIN")
        session.execute("SELECT nextval('shared')")
        ended = cli("run", "s", "--until-caught-up", "--timeout", "25s")
        one_error(ended, 8, "the subscription did not reach its goal in time", hint=False)
        session.execute("COMMIT")
    subdb.execute("ALTER SEQUENCE down MAXVALUE 5000")
    ended = cli("run", "s", "--until-caught-up", "--timeout", "2m")
    assert ended.returncode == 6, ended.stderr
    assert 'ALTER SEQUENCE "public"."down" MAXVALUE 10;' in ended.stderr
    assert _positions(subdb, "shared") == [(101, True)]
