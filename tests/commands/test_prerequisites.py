"""What both servers must allow: each thing that is missing is one error that ends with the statement to paste."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import psycopg
import pytest
from embedded import Server
from fix_program import nothing_created, one_error, until
from fix_servers import needs_wal_level_logical

_SSL, _GSS = 80877103, 80877104


class Pooler:
    """Stands before a server as a connection pooler does.

    :param refuses: startup parameter that it does not know, as pgbouncer before 1.23 with ``replication``; without
        one it lets everything pass but hands out cancel keys of its own.
    :ivar away: nothing but a line to the server, for now.
    """

    away = False

    def __init__(self, port: int, refuses: str | None = None) -> None:
        self._port = port
        self._refuses = refuses
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._port)) as server:
            reader = client.makefile("rb")
            startup = self._startup(client, reader)
            if self._refuses is not None and f"\0{self._refuses}\0".encode() in startup:
                text = f"SFATAL\0C08P01\0Munsupported startup parameter: {self._refuses}\0\0".encode()
                client.sendall(b"E" + struct.pack("!i", len(text) + 4) + text)
                return
            server.sendall(startup)
            threading.Thread(target=_pump, args=(reader, server), daemon=True).start()
            self._answer(server.makefile("rb"), client)

    def _startup(self, client, reader) -> bytes:
        while True:
            head = reader.read(8)
            size, code = struct.unpack("!ii", head)
            packet = head + reader.read(size - 8)
            if code not in (_SSL, _GSS):
                return packet
            client.sendall(b"N")

    def _answer(self, reader, client: socket.socket) -> None:
        kind = b""
        while kind != b"Z":
            head = reader.read(5)
            kind, size = head[:1], struct.unpack("!i", head[1:])[0]
            body = reader.read(size - 4)
            if kind == b"K" and self._refuses is None and not self.away:
                body = struct.pack("!i", 4711) + body[4:]
            client.sendall(head + body)
        _pump(reader, client)


def _pump(reader, writer: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        while data := reader.read1(65536):
            writer.sendall(data)
        writer.shutdown(socket.SHUT_WR)


@pytest.fixture
def pooler():
    """Make a :class:`Pooler`."""
    made = []

    def make(server: Server, refuses: str | None = None) -> Pooler:
        made.append(Pooler(server.port, refuses))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def role(tables):
    """A role without any privilege on either server, unique in both clusters, trusted like every other."""
    name = f"{tables[1].name}_role"
    for database in tables:
        database.execute(f"CREATE ROLE {name} LOGIN")
    return name


def _pasted(said: str) -> list[str]:
    """The statements of a hint."""
    return [line for line in said.splitlines() if line.endswith(";")]


@needs_wal_level_logical()
def test_a_publisher_that_does_not_decode_is_refused_with_the_setting_to_change(make_cli, subdb):
    with Server(fast=True, settings={"wal_level": "replica"}) as publisher:
        cli = make_cli(publisher.conninfo(), subdb.conninfo)
        said = one_error(cli.create(), 3, 'logical decoding requires "wal_level" >= "logical"')
        assert said.endswith("ALTER SYSTEM SET wal_level = logical;\n")
        assert subdb.value("SELECT to_regnamespace('pgsub') IS NULL")


def test_a_publisher_without_a_free_slot_or_walsender_is_refused_with_the_setting_to_raise(make_cli, subdb):
    with Server(fast=True, settings={"max_replication_slots": 1, "max_wal_senders": 1}) as publisher:
        cli = make_cli(publisher.conninfo(), subdb.conninfo)
        publisher.query("SELECT pg_create_logical_replication_slot('taken', 'pgoutput')")
        said = one_error(cli.create(), 3, "all replication slots of the publisher are in use", "is 1;")
        assert said.endswith("ALTER SYSTEM SET max_replication_slots = 20;\n")
        publisher.query("SELECT pg_drop_replication_slot('taken')")
        with psycopg.connect(publisher.conninfo(replication="database")):
            said = one_error(cli.create(), 3, "all walsenders of the publisher are in use")
            assert said.endswith("ALTER SYSTEM SET max_wal_senders = 20;\n")
        assert publisher.query("SELECT slot_name FROM pg_replication_slots") == []
        assert subdb.value("SELECT to_regnamespace('pgsub') IS NULL")


def test_a_role_without_replication_is_code_11_and_the_hint_gives_it(cli, tables, role):
    pubdb, subdb = tables
    cli.connection = pubdb.server.conninfo(pubdb.name, role)
    said = one_error(cli.create(), 11, "permission denied to use replication slots")
    nothing_created(cli, pubdb, subdb)
    for statement in _pasted(said):
        pubdb.execute(statement)
    ended = cli.create("s", "--no-wait")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
def test_a_pooler_on_either_side_is_seen_by_the_cancel_keys_it_hands_out(cli, tables, pooler):
    pubdb, subdb = tables
    cli.target = f"{subdb.conninfo} port={pooler(subdb.server).port}"
    one_error(cli.create(), 3, "the target's connection goes through a connection pooler", "port of the server itself")
    cli.target = subdb.conninfo
    cli.connection = f"{pubdb.conninfo} port={pooler(pubdb.server).port}"
    one_error(
        cli.create(), 3, "the publisher's connection goes through a connection pooler", "port of the server itself"
    )
    nothing_created(cli, pubdb, subdb)


@pytest.mark.long
def test_a_pooler_that_comes_to_stand_between_is_refused_by_the_workers_that_begin_from_then_on(cli, tables, pooler):
    pubdb, subdb = tables
    poolers = {"publisher": pooler(pubdb.server), "target": pooler(subdb.server)}
    direct = {"publisher": cli.connection, "target": cli.target}
    for side, one in poolers.items():
        one.away = True
        ends = {**direct, side: f"{direct[side]} port={one.port}"}
        cli.connection, cli.target = ends["publisher"], ends["target"]
        assert cli.create(f"{pubdb.name}_{side}", "--no-wait", "--no-copy-data").returncode == 0
    running = cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"})
    for side in poolers:
        name = f"{pubdb.name}_{side}"
        assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    ending = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name ~ %s"
    for side, one in poolers.items():
        one.away = False
        subdb.rows(ending, f"^pgsub {cli.status(f'{pubdb.name}_{side}')['oid']} apply ")
    for side in poolers:
        text = f"the {side}'s connection goes through a connection pooler"
        until(lambda n=f"{pubdb.name}_{side}", t=text: t in str(cli.status(n)["last_error"]))
    assert cli.stop(running) == 0


def test_a_pooler_that_refuses_replication_is_named_as_the_cause(cli, tables, pooler):
    pubdb, subdb = tables
    cli.connection = f"{pubdb.conninfo} port={pooler(pubdb.server, 'replication').port}"
    said = "could not connect to the publisher: unsupported startup parameter: replication"
    one_error(cli.create(), 3, said, "A connection pooler seems to answer")
    nothing_created(cli, pubdb, subdb)


@pytest.mark.parametrize("pasted", [0, 1], ids=["GRANT CREATE", "CREATE SCHEMA"])
def test_without_create_on_the_target_either_statement_of_the_hint_lets_the_ledger_in(cli, tables, role, pasted):
    pubdb, subdb = tables
    cli.target = subdb.server.conninfo(subdb.name, role)
    said = one_error(cli.create(), 11, "permission denied to keep the ledger on the target")
    nothing_created(cli, pubdb, subdb)
    assert subdb.value("SELECT to_regnamespace('pgsub') IS NULL")
    subdb.execute(_pasted(said)[pasted])
    ended = cli.create("s", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    owner = "SELECT tableowner FROM pg_tables WHERE schemaname = 'pgsub' GROUP BY 1"
    assert subdb.rows(owner) == [(role,)]


def test_a_ledger_of_another_role_is_code_11_and_the_grants_of_the_hint_open_it(cli, tables, role):
    _, subdb = tables
    assert cli.create("first", "--no-wait").returncode == 0
    cli.target = subdb.server.conninfo(subdb.name, role)
    said = one_error(cli.create("second", "--no-wait"), 11, "permission denied to keep the ledger on the target")
    assert cli.sql("SELECT subname FROM pg_subscription") == [("first",)]
    for statement in _pasted(said):
        subdb.execute(statement)
    ended = cli.create("second", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows("SELECT subname FROM pgsub.subscription ORDER BY 1") == [("first",), ("second",)]


@pytest.mark.long
def test_what_a_role_may_not_set_on_the_target_is_a_warning_with_the_grant(cli, tables, role):
    _, subdb = tables
    subdb.execute(f"CREATE SCHEMA pgsub AUTHORIZATION {role}")
    cli.target = subdb.server.conninfo(subdb.name, role)
    said = cli.create("s", "--dry-run").stderr
    assert "pgsub: warning: cannot set session_replication_role on the target\n" in said
    assert f'GRANT SET ON PARAMETER session_replication_role TO "{role}";' in said
    subdb.execute(f"GRANT SET ON PARAMETER session_replication_role TO {role}")
    assert "session_replication_role" not in cli.create("s", "--dry-run").stderr
    subdb.execute(f"REVOKE SET ON PARAMETER session_replication_role FROM {role}")


def test_a_publication_of_all_tables_on_the_target_is_a_warning(cli, tables):
    tables[1].execute("CREATE PUBLICATION everything FOR ALL TABLES")
    said = cli.create("s", "--dry-run").stderr
    assert (
        'pgsub: warning: publication "everything" on the target publishes all tables, schema pgsub included\n' in said
    )


def test_a_database_is_not_replicated_into_itself(make_cli, tables):
    pubdb, _ = tables
    cli = make_cli(pubdb.conninfo, pubdb.conninfo)
    one_error(cli.create("s", "--no-wait"), 3, f'publisher and target are the same database "{pubdb.name}"')
    nothing_created(cli, pubdb, pubdb)
