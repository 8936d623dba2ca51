"""Fixtures: one embedded publisher and target for each test process, fresh databases for each test.

``pubdb`` and ``subdb`` are what most tests need. A test that stops, kills or reconfigures a server takes a pair of its
own from ``own_pair``. Tests marked ``publishers`` run once for each publisher of ``PGSUB_TEST_BINDIRS`` too, and
``PGSUB_TEST_PUBLISHER=19``, ``PGSUB_TEST_TARGET=19`` have all tests use that one instead of the embedded server; what
starts servers of its own takes ``PGSUB_PG_BIN``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import patience
import psycopg
import pytest
import servers
from embedded import Server
from psycopg import sql
from psycopg.types.string import TextLoader
from spare import forget, keep, outside, take
from thorough import thorough

from pgsub.common.errors import PgsubError
from pgsub.demo.binaries import find_binaries
from pgsub.demo.servers import Setting
from pgsub.protocol.lsn import format_lsn, parse_lsn

_numbers = itertools.count(1)
#: Settings of the tests' own sessions, which compare texts of both servers.
_PINNED = "-c timezone=UTC -c intervalstyle=postgres -c bytea_output=hex -c datestyle=ISO"


class _LsnLoader(TextLoader):
    """An LSN as pgsub writes it: 19 pads it with zeros, and tests compare it as text."""

    def load(self, data: Any) -> str:
        """:param data: what the server sent."""
        return format_lsn(parse_lsn(str(super().load(data))))


class Database:
    """A database of its own on a running server.

    :param server: where it is made.
    :param name: its name; unique in the cluster.
    :param encoding: of the server.
    :param spare: it may be one that was used before, and may be used again (:mod:`spare`).
    :param ledger: of such a one, with the ledger installed in it if possible.
    :param there: it is there already: on a standby, or after an upgrade.
    """

    def __init__(
        self,
        server: Server,
        name: str,
        encoding: str = "UTF8",
        *,
        spare: bool = False,
        ledger: bool = False,
        there: bool = False,
    ) -> None:
        self.server = server
        self.name = name
        self.conninfo = server.conninfo(name)
        self._connection: psycopg.Connection | None = None
        self._postmaster = server.pid
        self._dropped = False
        self._spare = spare
        self._ledger = ledger
        taken = spare and take(server, name, ledger=ledger)
        with self._outside() as connection:
            if not taken and not there:
                text = "CREATE DATABASE {} ENCODING {} TEMPLATE template0"
                create = sql.SQL(text if encoding == "UTF8" else f"{text} LOCALE 'C'")
                connection.execute(create.format(sql.Identifier(name), sql.Literal(encoding)))
            self._origins = _origins(connection)

    def connect(self, user: str = "postgres", **more: str) -> psycopg.Connection:
        """A new session in autocommit mode; the test closes it."""
        connection = self.server.connect(self.name, user, **{"client_encoding": "UTF8", "options": _PINNED, **more})
        connection.adapters.register_loader("pg_lsn", _LsnLoader)
        return connection

    @property
    def connection(self) -> psycopg.Connection:
        """The session that the verbs use; a new one after the server was away."""
        if self._connection is None or self._connection.closed or self._postmaster != self.server.pid:
            self.close()
            self._connection = self.connect()
            self._postmaster = self.server.pid
        return self._connection

    def execute(self, statements: str, *params: Any) -> None:
        """Run a statement with parameters, or several without."""
        self.connection.execute(statements.encode(), params or None)

    def rows(self, query: str, *params: Any) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self.connection.execute(query.encode(), params or None).fetchall()

    def value(self, query: str, *params: Any) -> Any:
        """First column of the first row, None without a row."""
        row = self.connection.execute(query.encode(), params or None).fetchone()
        return row[0] if row else None

    def wait(self, query: str, *params: Any, value: Any = True, seconds: float | None = None) -> None:
        """Poll a query until its value is the wanted one, as Cluster.pm's poll_query_until."""
        began = time.monotonic()
        while (seen := self.value(query, *params)) != value:
            waited = time.monotonic() - began
            assert waited < (seconds or patience.SECONDS), f"{query}: still {seen!r}, not {value!r}"
            time.sleep(min(max(waited / 20, 0.01), 0.1))

    def close(self) -> None:
        """End the session of the verbs."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _outside(self) -> contextlib.AbstractContextManager[psycopg.Connection]:
        """A session of the server in another database."""
        return outside(self.server) if self._spare else self.server.connect()

    def drop(self) -> None:
        """Remove the database with all that would hold it: sessions, slots, prepared transactions, subscriptions."""
        self.close()
        if self._dropped or not self.server.running:
            return
        self._dropped = True
        with self._outside() as connection:
            if connection.execute(_HELD, {"name": self.name}).fetchone() == (True,):
                with self.connect() as inside:
                    _drop_subscriptions(inside)
                    _roll_back_prepared(inside)
            _drop_slots(connection, self.name)
            if self._spare:
                keep(self.server, self.name, ledger=self._ledger)
            else:
                connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(self.name)))
            for origin in _origins(connection) - self._origins:
                connection.execute("SELECT pg_replication_origin_drop(%s)", (origin,))


#: Whether something is there that has to be removed from inside.
_HELD = """
SELECT EXISTS (SELECT FROM pg_prepared_xacts WHERE database = %(name)s)
    OR EXISTS (SELECT FROM pg_subscription s, pg_database d WHERE d.oid = subdbid AND datname = %(name)s)
"""


def _origins(connection: psycopg.Connection) -> set[str]:
    """All origins but those of native subscriptions, of any database: dropping a subscription drops its own."""
    query = (
        "SELECT roname FROM pg_replication_origin"
        " WHERE NOT EXISTS (SELECT FROM pg_subscription WHERE roname ~ ('^pg_' || oid || '(_|$)'))"
    )
    return {name for (name,) in connection.execute(query)}


def _drop_subscriptions(connection: psycopg.Connection) -> None:
    """Native subscriptions of this database, without asking their publisher."""
    query = (
        "SELECT subname FROM pg_subscription s, pg_database d WHERE d.oid = subdbid AND datname = current_database()"
    )
    for (name,) in connection.execute(query).fetchall():
        for action in ("ALTER SUBSCRIPTION {} DISABLE", "ALTER SUBSCRIPTION {} SET (slot_name = NONE)"):
            connection.execute(sql.SQL(action).format(sql.Identifier(name)))
        connection.execute(sql.SQL("DROP SUBSCRIPTION {}").format(sql.Identifier(name)))


def _roll_back_prepared(connection: psycopg.Connection) -> None:
    query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    for (gid,) in connection.execute(query).fetchall():
        connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))


def _drop_slots(connection: psycopg.Connection, database: str) -> None:
    query = "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = %s"
    deadline = time.monotonic() + patience.SECONDS
    while slots := connection.execute(query, (database,)).fetchall():
        assert time.monotonic() < deadline, f"slots still held: {slots}"
        for name, pid in slots:
            try:
                connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
                connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
            except (psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
                time.sleep(0.02)  # somebody connects again and again, or dropped it himself


def _start(session: pytest.Session, side: str, version: str | None = None, **arguments: Any) -> Server:
    """Without servers nothing here means anything: the whole run ends, in an xdist worker too.

    :param version: major version, None for the one that this run is with.
    """
    version = version or os.environ.get(f"PGSUB_TEST_{side.upper()}")
    if version is not None and version not in other_servers():
        pytest.skip(f"PostgreSQL {version} is not tested: it is not among PGSUB_TEST_BINDIRS")
    server = Server(binaries=other_servers()[version] if version else None, **arguments)
    try:
        server.init()
        server.start()
    except PgsubError as error:
        server.destroy()
        text = "\n".join([f"the embedded {side} cannot be started: {error.message}", *error.lines()])
        session.shouldstop = text
        pytest.fail(text, pytrace=False)
    return server


@cache
def other_servers() -> dict[str, Path]:
    """Program folders of the servers in ``PGSUB_TEST_BINDIRS``, by major version."""
    folders = [Path(name) for name in os.environ.get("PGSUB_TEST_BINDIRS", "").split(os.pathsep) if name]
    return {_major(folder): folder for folder in folders}


@cache
def embedded_version() -> str:
    """The major version that tests use where nothing else is said."""
    return _major(find_binaries())


def needs_wal_level_logical() -> pytest.MarkDecorator:
    """For a test whose own publisher does not decode with ``wal_level = replica``."""
    reason = "from 19 on wal_level = replica suffices: test_postgres_19.py"
    return pytest.mark.skipif(int(embedded_version()) >= 19, reason=reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Nobody has to look for what was left out."""
    if missing := set(servers.wanted()) - set(other_servers()) - {embedded_version()}:
        terminalreporter.write_line(f"NOT TESTED: PostgreSQL {', '.join(sorted(missing))}", red=True)


def _major(folder: Path) -> str:
    said = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\) (\d+)", said)
    assert found is not None, said
    return found[1]


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known."""
    config.addinivalue_line("markers", "publishers(version, long=True): also against publishers of PGSUB_TEST_BINDIRS")
    config.addinivalue_line("markers", "since(version): what is tested exists on publishers from this version on")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked ``publishers`` runs once for each of them; test_versions.py says which are not there.

    Where the mark names versions, the others are left to ``make thorough``; with ``long=True`` those that it names are
    long tests.
    """
    mark = metafunc.definition.get_closest_marker("publishers")
    if mark is None or "publisher" not in metafunc.fixturenames:
        return
    since = metafunc.definition.get_closest_marker("since")
    others = [v for v in sorted(other_servers(), key=int) if since is None or int(v) >= since.args[0]]
    often = mark.args or [v for v in others if v != "17"]  # nearly what the embedded one is
    others = [v for v in others if v in often or thorough([v])]
    marks = [pytest.mark.long] if mark.kwargs.get("long") else []
    versions = [pytest.param(None, id="embedded"), *(pytest.param(v, id=f"from{v}", marks=marks) for v in others)]
    metafunc.parametrize("publisher", versions, indirect=True, scope="session")


#: pg_commit_ts lets conflicts with other origins be seen. The other settings give values other texts than on the
#: publisher, so that whatever takes a text of one server for one of the other fails.
_TARGET: Mapping[str, Setting] = {
    "track_commit_timestamp": True,
    "timezone": "Asia/Kathmandu",
    "intervalstyle": "sql_standard",
    "bytea_output": "escape",
    "datestyle": "SQL, DMY",
}

#: A server by side and major version (None: the embedded one), started when it is asked for first.
Servers = Callable[[str, str | None], Server]


@pytest.fixture(scope="session")
def shared_servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """The servers that this test process shares; never stopped or reconfigured."""
    running: dict[tuple[str, str | None], Server] = {}

    def get(side: str, version: str | None) -> Server:
        if (side, version) not in running:
            settings = _TARGET if side == "target" else None
            running[side, version] = _start(request.session, side, version, fast=True, settings=settings)
        return running[side, version]

    yield get
    for server in running.values():
        forget(server)
        server.destroy()


@pytest.fixture(scope="session")
def publisher(request: pytest.FixtureRequest, shared_servers: Servers) -> Server:
    """The publisher that this test process shares; never stopped or reconfigured."""
    return shared_servers("publisher", getattr(request, "param", None))


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest, shared_servers: Servers) -> Server:
    """The target that this test process shares; never stopped or reconfigured."""
    return shared_servers("target", getattr(request, "param", None))


@pytest.fixture
def pubdb(publisher: Server) -> Iterator[Database]:
    """A fresh database on the shared publisher."""
    database = Database(publisher, f"pub_{os.getpid()}_{next(_numbers)}", spare=True)
    yield database
    database.drop()


#: Fixtures that install the ledger on the target.
_INSTALLING = {"pair", "subscriber"}


@pytest.fixture
def subdb(request: pytest.FixtureRequest, target: Server) -> Iterator[Database]:
    """A fresh database on the shared target."""
    ledger = not _INSTALLING.isdisjoint(request.fixturenames)
    database = Database(target, f"sub_{os.getpid()}_{next(_numbers)}", spare=True, ledger=ledger)
    yield database
    database.drop()


@dataclass
class Pair:
    """Two private servers and a database on each."""

    publisher: Server
    target: Server
    pubdb: Database
    subdb: Database


@pytest.fixture
def own_pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    """Make a pair that the test may stop and kill: ``own_pair(publisher={...}, target={...}, password=...)``.

    The dictionaries are settings of the two servers; a password turns on ``scram-sha-256``.
    """
    servers: list[Server] = []

    def make(
        publisher: Mapping[str, Setting] | None = None,
        target: Mapping[str, Setting] | None = None,
        password: str | None = None,
    ) -> Pair:
        for side, settings in (("publisher", publisher or {}), ("target", {**_TARGET, **(target or {})})):
            servers.append(_start(request.session, side, fast=True, settings=settings, password=password))
        first, second = servers[-2:]
        return Pair(first, second, Database(first, "app"), Database(second, "app"))

    yield make
    for server in servers:
        server.destroy()


@pytest.fixture(scope="module")
def crash_servers(request: pytest.FixtureRequest) -> Iterator[Callable[[], Pair]]:
    """A pair of servers, started when asked for first, that the tests of one module may crash and start again."""
    made: list[Pair] = []

    def get() -> Pair:
        if not made:
            first = _start(request.session, "publisher", fast=True)
            second = _start(request.session, "target", fast=True, settings={**_TARGET, "wal_writer_delay": "10s"})
            made.append(Pair(first, second, Database(first, "app"), Database(second, "app")))
        return made[0]

    yield get
    for pair in made:
        pair.publisher.destroy()
        pair.target.destroy()


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """An empty private folder for a state store."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder
