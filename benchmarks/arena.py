"""Two embedded servers: a publisher with one source database, a target with one database for each subscriber."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import psycopg
from psycopg import sql

from benchmarks.link import Link
from pgsub.demo.binaries import environment, find_binaries
from pgsub.demo.servers import Server, Setting

SOURCE = "source"
PUBLICATION = "bench"

#: Checkpoints and autovacuum run between the measurements, not during them; the rest is the server's default.
_SETTINGS: dict[str, Setting] = {
    "shared_buffers": "512MB",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "autovacuum": False,
}


class BenchmarkFailed(Exception):
    """A measurement that cannot be finished; the run goes on with the next one."""


class Database:
    """One database and a session on it in autocommit mode.

    :param server: where it is.
    :param name: of an existing database.
    """

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name
        self.conninfo = server.conninfo(name)
        self.connection = server.connect(name, application_name="benchmark")

    def execute(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        for statement in statements:
            self.connection.execute(statement.encode())

    def value(self, query: str) -> object:
        """First column of the first row, None without a row."""
        row = self.connection.execute(query.encode()).fetchone()
        return row[0] if row else None

    def pgbench(self, *arguments: str) -> None:
        """Run pgbench on it, with commits that do not wait for the disk."""
        where = ["-h", "127.0.0.1", "-p", str(self.server.port), "-U", "postgres"]
        done = subprocess.run(
            [str(find_binaries() / "pgbench"), *where, *arguments, self.name],
            env={**environment(), "PGOPTIONS": "-c synchronous_commit=off"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BenchmarkFailed(f"pgbench failed: {done.stderr.strip()[-500:]}")

    def digest(self, tables: Sequence[str]) -> dict[str, tuple[object, object]]:
        """Number of rows and a sum of row hashes for each table: equal contents, whatever their order."""
        found: dict[str, tuple[object, object]] = {}
        for table in tables:
            query = sql.SQL("SELECT count(*), sum(hashtextextended(t::text, 0)) FROM {} t")
            row = self.connection.execute(query.format(sql.Identifier(table))).fetchone()
            assert row is not None
            found[table] = (row[0], row[1])
        return found


class Arena:
    """Starts both servers; :meth:`fresh` gives every case empty databases.

    :param tls: they encrypt every connection; their programs must have been built with TLS.
    """

    def __init__(self, *, tls: bool = False) -> None:
        self._tls = tls
        self.publisher = Server(settings=_SETTINGS)
        self.target = Server(settings=_SETTINGS)
        self._open: list[Database] = []
        self._link: Link | None = None

    def __enter__(self) -> Arena:
        try:
            for server in (self.publisher, self.target):
                server.init()
                if self._tls:
                    _encrypt(server)
                server.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_sessions()
        self._close_link()
        self.target.destroy()
        self.publisher.destroy()

    def fresh(self, targets: Sequence[str]) -> tuple[Database, dict[str, Database]]:
        """Empty databases: the source and one target for each name; what an earlier case left is removed.

        :return: the source, and the targets by name.
        """
        self._close_sessions()
        with self.target.connect() as connection:
            existing = {name for (name,) in connection.execute("SELECT datname FROM pg_database")}
            for name in targets:
                if name in existing:
                    self._drop_subscriptions(name)
                _recreate(connection, name)
        self._close_link()
        with self.publisher.connect() as connection:
            _drop_slots(connection)
            _recreate(connection, SOURCE)
        source = Database(self.publisher, SOURCE)
        self._open = [source, *(Database(self.target, name) for name in targets)]
        return source, {database.name: database for database in self._open[1:]}

    def address(self, source: Database, rate: int | None) -> str:
        """The conninfo by which both subscribers reach the source until the next :meth:`fresh`.

        :param rate: bytes a second that each of their connections gets, None for the server itself.
        """
        if rate is None:
            return source.conninfo
        self._link = self._link or Link(self.publisher.port, rate)
        return self._link.through(source.conninfo)

    @property
    def link_pid(self) -> int | None:
        """Process id of the link, if there is one now."""
        return self._link.pid if self._link else None

    def checkpoint(self) -> None:
        """Both sides of a case start right after a checkpoint: the same full-page images for both."""
        for server in (self.target, self.publisher):
            server.query("CHECKPOINT")

    @contextlib.contextmanager
    def target_settings(self, settings: Mapping[str, str]) -> Iterator[None]:
        """Let the target have some settings for a while; such as need no restart."""
        try:
            for name, value in settings.items():
                self.target.query(f"ALTER SYSTEM SET {name} = {value}")
            self.target.query("SELECT pg_reload_conf()")
            yield
        finally:
            for name in settings:
                self.target.query(f"ALTER SYSTEM RESET {name}")
            self.target.query("SELECT pg_reload_conf()")

    def own_backends(self) -> set[int]:
        """Process ids of the benchmark's own sessions, which are nobody's cost."""
        return {database.connection.info.backend_pid for database in self._open}

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _close_sessions(self) -> None:
        for database in self._open:
            database.connection.close()
        self._open = []

    def _drop_subscriptions(self, name: str) -> None:
        with self.target.connect(name) as connection:
            query = "SELECT subname FROM pg_subscription JOIN pg_database d ON d.oid = subdbid WHERE datname = %s"
            for (subscription,) in connection.execute(query, (name,)).fetchall():
                for statement in (
                    "ALTER SUBSCRIPTION {} DISABLE",
                    "ALTER SUBSCRIPTION {} SET (slot_name = NONE)",
                    "DROP SUBSCRIPTION {}",
                ):
                    connection.execute(sql.SQL(statement).format(sql.Identifier(subscription)))


def _encrypt(server: Server) -> None:
    """Let a server take encrypted connections only, with a certificate of its own making."""
    command = "openssl req -new -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -subj /CN=localhost"
    files = [server.data / name for name in ("server.key", "server.crt")]
    subprocess.run([*command.split(), "-keyout", files[0], "-out", files[1]], check=True, capture_output=True)
    for file in files:
        shutil.chown(file, server.data.stat().st_uid)
        file.chmod(0o600)
    server.append_conf({"ssl": True})
    rules = [f"hostssl {database} all 127.0.0.1/32 trust" for database in ("all", "replication")]
    (server.data / "pg_hba.conf").write_text("\n".join(["local all all trust", *rules, ""]))


def _recreate(connection: psycopg.Connection, name: str) -> None:
    connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))


def _drop_slots(connection: psycopg.Connection) -> None:
    query = "SELECT slot_name, active_pid FROM pg_replication_slots"
    deadline = time.monotonic() + 30
    while slots := connection.execute(query).fetchall():
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"slots still held: {slots}")
        for name, pid in slots:
            try:
                connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
                connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
            except (psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
                time.sleep(0.02)
