"""What the logs of both servers say of a subscription in which nothing goes wrong: nothing that wakes somebody up."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fix_program import Cli
from fix_servers import Database

#: A line that a server writes for a failure, and that an alert may be looking for.
FAILURE = re.compile(r"^\S+ \S+ \S+ \[\d+\].* (WARNING|ERROR|FATAL|PANIC):  ")
Tables = tuple[Database, Database]


@pytest.fixture
def failures(tables: Tables) -> Callable[[], list[str]]:
    """Lines of failures in both servers' logs since the test began."""
    before = [database.server.log.stat().st_size for database in tables]

    def read() -> list[str]:
        logs = [database.server.log.read_bytes()[size:] for database, size in zip(tables, before, strict=True)]
        return [line for log in logs for line in log.decode().splitlines() if FAILURE.match(line)]

    return read


@pytest.mark.long
def test_the_servers_logs_hold_no_failure_of_a_subscription_that_goes_well(
    cli: Cli, tables: Tables, failures: Callable[[], list[str]]
) -> None:
    pubdb = tables[0]

    def well(*words: str) -> None:
        ended = cli(*words)
        assert ended.returncode == 0, (words, ended.stdout, ended.stderr)

    for database in tables:
        database.execute("CREATE TABLE large (id int PRIMARY KEY, v text)")
    pubdb.execute("INSERT INTO large SELECT g, repeat('x', 100) FROM generate_series(1, 20000) g")
    pubdb.execute("ALTER PUBLICATION p ADD TABLE large")
    assert cli.create("s", "--streaming", "parallel", "--apply-workers", "4", "--no-wait").returncode == 0
    running = cli.launcher()
    well("wait", "s", "--for", "caught-up", "--timeout", "2m")
    pubdb.execute("UPDATE large SET v = 'y'; DELETE FROM a; INSERT INTO a SELECT g, 'z' FROM generate_series(1, 50) g")
    for number in range(200):
        pubdb.execute(f"INSERT INTO b VALUES ({number})")
    well("wait", "s", "--for", "caught-up", "--timeout", "2m")
    for database in tables:
        database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    pubdb.execute("INSERT INTO later VALUES (1); ALTER PUBLICATION p ADD TABLE later")
    well("refresh", "s")
    well("wait", "s", "--for", "caught-up", "--timeout", "2m")
    well("verify", "s")
    well("status", "s")
    well("disable", "s")
    well("enable", "s")
    well("wait", "s", "--for", "caught-up", "--timeout", "2m")
    assert cli.stop(running) == 0
    well("run", "s", "--until-caught-up")
    well("drop", "s", "--yes")
    assert failures() == []
