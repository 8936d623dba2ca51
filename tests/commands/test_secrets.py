"""A password is in its passfile and nowhere else: not in the state store, a log, an error, a command line, a child."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest
from embedded import Server
from fix_program import nothing_created, one_error, until
from fix_servers import Database
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgsub.commands.preflight.databases import is_local

pytestmark = pytest.mark.own_spark

SENTINEL = "S3NT1NEL"
PASSWORD = SENTINEL + r":it's \ 100% «geheim»"


@pytest.fixture(scope="module")
def servers():
    """A publisher and a target that ask for passwords."""
    with Server(fast=True, password=PASSWORD) as publisher, Server(fast=True, password=PASSWORD) as target:
        yield publisher, target


@pytest.fixture
def guarded(servers, make_cli, request):
    """The program between two databases as roles that have no more than they need."""
    pubdb, subdb = (Database(server, f"app{len(request.node.name)}_{os.getpid()}") for server in servers)
    for database, attributes in ((pubdb, "REPLICATION"), (subdb, "")):
        database.execute("CREATE TABLE a (id int PRIMARY KEY, t text)")
        database.execute(f"DROP ROLE IF EXISTS app; CREATE ROLE app LOGIN {attributes}")
        database.connection.execute(sql.SQL("ALTER ROLE app PASSWORD {}").format(sql.Literal(PASSWORD)))
    pubdb.execute("INSERT INTO a SELECT g, 'row' FROM generate_series(1, 100) g; CREATE PUBLICATION p FOR TABLE a")
    pubdb.execute("GRANT SELECT ON a TO app")
    subdb.execute("GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON a TO app")
    subdb.execute(f"GRANT CREATE ON DATABASE {subdb.name} TO app")
    yield make_cli(*(make_conninfo(db.conninfo, user="app") for db in (pubdb, subdb))), pubdb, subdb
    subdb.execute("DROP SCHEMA IF EXISTS pgsub CASCADE")
    for database in (pubdb, subdb):
        database.drop()


def _from_environment(cli):
    """Words of ``create`` without conninfos, and the variables that hold them."""
    return ["create", "s", "--publication", "p"], {"PGSUB_CONNECTION": cli.connection, "PGSUB_TARGET": cli.target}


def _leaks(folder: Path) -> list[str]:
    """Files below the folder that hold the sentinel, but for passfiles."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "passfiles"]
    return [str(path) for path in files if SENTINEL.encode() in path.read_bytes()]


def _descendants(pid: int) -> set[int]:
    pairs = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            pairs.append((int(stat.parent.name), int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])))
    found = {pid}
    while more := {child for child, parent in pairs if parent in found} - found:
        found |= more
    return found - {pid}


def _told_by_children(pid: int) -> list[str]:
    """Command lines and environments of the processes that a command started, where they hold the sentinel."""
    found = []
    for child in _descendants(pid):
        for name in ("cmdline", "environ"):
            try:
                text = Path(f"/proc/{child}/{name}").read_bytes()
            except OSError:
                continue
            if SENTINEL.encode() in text:
                found.append(f"{name} of {child}")
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to look into other processes")
def test_a_whole_life_of_a_subscription_shows_its_passwords_nowhere(guarded):
    cli, pubdb, subdb = guarded
    words, variables = _from_environment(cli)
    running = cli.start(*words, "--follow", "-vv", env=variables)
    until(lambda: (cli.state / "state.db").exists() and list(cli.states().values()) == ["r"], 120)
    jvm = int((cli.state / "run" / "jvm.pid").read_text())
    assert jvm in _descendants(running.pid) and _descendants(jvm)
    assert _told_by_children(running.pid) == []
    assert _leaks(cli.state) == []

    subdb.execute("INSERT INTO a VALUES (1000, 'local')")
    pubdb.execute("INSERT INTO a VALUES (1000, 'remote')")
    until(lambda: cli.sql("SELECT message FROM pgsub_error"))
    shown = [cli(*query) for query in (
        ["status", "--json"],
        ["status", "s", "-x"],
        ["status", "--view", "pg_subscription", "--json"],
        ["status", "--view", "pgsub_journal"],
        ["version", "--json"],
    )]  # fmt: skip
    for ended in shown:
        assert ended.returncode == 0 and SENTINEL not in ended.stdout + ended.stderr
    assert cli.stop(running) == 0
    assert SENTINEL not in running.log.read_text()
    assert _leaks(cli.state.parent) == []

    files = sorted((cli.state / "passfiles").iterdir())
    assert [path.suffix for path in files] == [".publisher", ".target"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert cli("drop", "s", "--yes").returncode == 0
    nothing_created(cli, pubdb, subdb)


@pytest.mark.long
def test_a_rebuilt_state_store_has_its_passwords_in_passfiles_and_the_ledger_has_none(guarded):
    cli, pubdb, subdb = guarded
    words, variables = _from_environment(cli)
    assert cli(*words, "--no-wait", env=variables).returncode == 0
    files = sorted(path.name for path in (cli.state / "passfiles").iterdir())
    shutil.rmtree(cli.state)
    running = cli.start("run", "s", "--from-target", "-vv", env=variables)
    until(lambda: (cli.state / "state.db").exists() and list(cli.states().values()) == ["r"])
    assert _told_by_children(running.pid) == []
    assert cli.stop(running) == 0
    assert SENTINEL not in running.log.read_text() and _leaks(cli.state.parent) == []
    assert sorted(path.name for path in (cli.state / "passfiles").iterdir()) == files
    assert {path.stat().st_mode & 0o777 for path in (cli.state / "passfiles").iterdir()} == {0o600}
    kept = "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'pgsub'::regnamespace AND relkind = 'r'"
    ledger = str([subdb.rows(f"SELECT * FROM {table}") for (table,) in subdb.rows(kept)])
    assert "publications" in ledger and SENTINEL not in ledger
    assert cli("drop", "s", "--yes").returncode == 0
    nothing_created(cli, pubdb, subdb)


def test_a_wrong_password_is_code_4_for_the_publisher_and_5_for_the_target(guarded):
    cli, pubdb, subdb = guarded
    wrong = f"{SENTINEL} is wrong"
    words = ["create", "s", "--publication", "p", "--connection", cli.connection, "--target"]
    ended = cli(*words, make_conninfo(cli.target, password=wrong))
    said = one_error(ended, 5, 'could not connect to the target: password authentication failed for user "app"')
    assert SENTINEL not in said
    words = ["create", "s", "--publication", "p", "--target", cli.target, "--connection"]
    ended = cli(*words, make_conninfo(cli.connection, password=wrong))
    said = one_error(ended, 4, 'could not connect to the publisher: password authentication failed for user "app"')
    assert SENTINEL not in said
    nothing_created(cli, pubdb, subdb)


@pytest.mark.long
def test_a_password_comes_from_a_uri_or_standard_input_as_well(guarded):
    cli, pubdb, subdb = guarded
    port = pubdb.server.port
    uri = f"postgresql://app:{quote(PASSWORD)}@127.0.0.1:{port}/{pubdb.name}"
    ended = cli(
        *("create", "s", "--publication", "p", "--no-wait", "--connection", uri, "--target", "-"),
        stdin=f"{cli.target}\n",
    )
    assert ended.returncode == 0, ended.stderr
    assert SENTINEL not in ended.stderr
    (stored,) = cli.sql("SELECT subconninfo, pgsub_target FROM pg_subscription")
    assert all("passfile=" in text and "password=" not in text for text in stored)
    assert cli("drop", "s", "--yes").returncode == 0
    nothing_created(cli, pubdb, subdb)


@pytest.mark.long
def test_pgpassword_is_the_targets_and_never_sent_to_the_publisher(guarded):
    cli, pubdb, subdb = guarded
    connection, target = ({**conninfo_to_dict(text), "password": ""} for text in (cli.connection, cli.target))
    words = ["create", "s", "--publication", "p", "--no-wait", "--target", _joined(target)]
    ended = cli(*words, "--connection", _joined(connection), env={"PGPASSWORD": PASSWORD})
    one_error(ended, 4, "no password supplied")
    ended = cli(*words, "--connection", cli.connection, env={"PGPASSWORD": PASSWORD})
    assert ended.returncode == 0, ended.stderr
    assert cli("drop", "s", "--yes").returncode == 0
    nothing_created(cli, pubdb, subdb)


def test_words_of_a_wrong_command_line_are_shown_without_their_password(guarded):
    cli, _, _ = guarded
    for words in (
        ["create", "s", "--connection", cli.connection, f"--oops=password={SENTINEL}"],
        ["create", "s", "--connection", cli.connection, "--target", cli.target, "--timeout", f"password={SENTINEL}"],
        ["create", "s", cli.connection],
    ):
        ended = cli(*words)
        assert ended.returncode == 2
        assert SENTINEL not in ended.stdout + ended.stderr


def _joined(params):
    return make_conninfo("", **{key: value for key, value in params.items() if value})


def test_a_password_on_the_command_line_is_warned_of(cli, tables):
    words = cli.words("s", "--no-wait")
    given = words.index("--connection") + 1
    words[given] += " password=S3NT1NEL"
    ended = cli(*words)
    assert ended.returncode == 0
    assert "pgsub: warning: the password in --connection can be read by other users of this machine" in ended.stderr
    assert "S3NT1NEL" not in ended.stderr + ended.stdout


def test_passwords_of_both_servers_are_warned_of_once(cli, tables):
    words = cli.words("s", "--dry-run")
    for option in ("--connection", "--target"):
        words[words.index(option) + 1] += " password=S3NT1NEL"
    ended = cli(*words)
    assert ended.returncode == 0 and "S3NT1NEL" not in ended.stderr + ended.stdout
    assert "the passwords in --connection and --target can be read by other users" in ended.stderr
    assert ended.stderr.count("can be read by other users") == 1


def test_a_password_from_elsewhere_is_not_warned_of(cli, tables):
    words = cli.words("s", "--no-wait")
    del words[words.index("--connection") : words.index("--connection") + 2]
    ended = cli(*words, env={"PGSUB_CONNECTION": cli.connection + " password=S3NT1NEL"})
    assert ended.returncode == 0 and "can be read" not in ended.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "/run/postgresql", "localhost", ""])
def test_a_line_within_the_machine_is_local(host):
    assert is_local(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "192.0.2.1", "2001:db8::1", "db1"])
def test_a_line_to_another_machine_is_not(host):
    assert not is_local(host)
