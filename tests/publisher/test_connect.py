"""Promises of sessions on the publisher: what is pinned, and what a refused connection says."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import socket
import time

import psycopg
import pytest
from embedded import Server
from fix_servers import Database
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgsub.common.errors import (
    ApplyError,
    PermissionMissing,
    PublisherUnavailable,
    ReplicationBroken,
    SlotLost,
    StateForbids,
    UsageError,
)
from pgsub.common.query import scalar
from pgsub.publisher.connect import connect, is_replication, refused
from pgsub.publisher.server_errors import ServerError, classify, translate
from pgsub.tablesync.copy.copy_out import reported
from pgsub.target.session import connect as target

SECRET = "S3NT1NEL"


@pytest.fixture(scope="module")
def pubdb(publisher):
    """One database for all tests here: none of them looks at its contents."""
    database = Database(publisher, f"connect_{os.getpid()}")
    yield database
    database.drop()


def everything(error):
    return "\n".join([error.message, *error.lines(), repr(error)])


def test_the_subscription_name_is_the_application_name_unless_the_conninfo_has_one(pubdb):
    with connect(pubdb.conninfo, application_name="orders") as session:
        assert scalar(session, "SHOW application_name") == "orders"
    with connect(pubdb.conninfo + " application_name=mine", application_name="orders") as session:
        assert scalar(session, "SHOW application_name") == "mine"


@pytest.mark.parametrize("replication", [False, True])
def test_a_session_pins_what_text_values_and_long_waits_rely_on_and_keeps_the_users_options(pubdb, replication):
    for setting in ("statement_timeout = '5s'", "datestyle = 'German'", "idle_in_transaction_session_timeout = '5s'"):
        pubdb.execute(f"ALTER DATABASE {pubdb.name} SET {setting}")
    conninfo = pubdb.conninfo + " options='-c work_mem=7MB -c intervalstyle=iso_8601'"
    with connect(conninfo, application_name="x", replication=replication) as session:
        shown = {
            name: scalar(session, f"SHOW {name}")
            for name in (
                *("datestyle", "intervalstyle", "extra_float_digits", "row_security", "statement_timeout"),
                *("lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"),
                *("search_path", "work_mem", "client_encoding"),
            )
        }
        assert is_replication(session) is replication
        assert session.autocommit
    assert shown["datestyle"].startswith("ISO")
    assert shown["work_mem"] == "7MB" and shown["search_path"] in ("", '""')
    assert (shown["intervalstyle"], shown["extra_float_digits"], shown["row_security"]) == ("postgres", "3", "off")
    assert {shown[name] for name in shown if name.endswith("timeout")} == {"0"}
    assert shown["client_encoding"] == "UTF8"


def test_a_transaction_timeout_of_the_publisher_does_not_end_a_snapshot(pubdb):
    if pubdb.server.version < 17:
        pytest.skip("the setting exists since 17")
    pubdb.execute(f"ALTER DATABASE {pubdb.name} SET transaction_timeout = '1s'")
    with connect(pubdb.conninfo, application_name="x", replication=True) as session:
        assert scalar(session, "SHOW transaction_timeout") == "0"


def test_a_walsender_takes_many_parameterized_queries(pubdb):
    with connect(pubdb.conninfo, application_name="x", replication=True) as session:
        values = [session.execute("SELECT %s", ("it's",)).fetchone() for _ in range(10)]
    assert values == [("it's",)] * 10


def test_a_service_gives_address_and_options_and_the_settings_are_pinned_all_the_same(pubdb, tmp_path, monkeypatch):
    server = pubdb.server
    lines = ["[src]", "host=127.0.0.1", f"port={server.port}", f"dbname={pubdb.name}", "user=postgres"]
    (tmp_path / "services").write_text("\n".join([*lines, "options=-c work_mem=7MB -c datestyle=German", ""]))
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    with connect("service=src", application_name="orders", replication=True) as session:
        shown = [scalar(session, f"SHOW {name}") for name in ("work_mem", "application_name", "row_security")]
        assert shown == ["7MB", "orders", "off"]
        assert str(scalar(session, "SHOW datestyle")).startswith("ISO")


@pytest.mark.parametrize("said_by", ["conninfo", "service", "environment"])
def test_a_server_that_is_read_only_for_clients_is_written_to_though_read_write_is_asked_for(
    pubdb, tmp_path, monkeypatch, said_by
):
    """As a server is that a switchover fences, and a target that its owner keeps clients from."""
    conninfo = make_conninfo(pubdb.conninfo, options="-c default_transaction_read_only=on")
    wanted = {"target_session_attrs": "read-write"}
    if said_by == "conninfo":
        conninfo = make_conninfo(conninfo, **wanted)
    elif said_by == "environment":
        monkeypatch.setenv("PGTARGETSESSIONATTRS", "read-write")
    else:
        lines = [f"{key}={value}" for key, value in {**conninfo_to_dict(conninfo), **wanted}.items()]
        (tmp_path / "services").write_text("\n".join(["[ha]", *lines, ""]))
        monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
        conninfo = "service=ha"
    openers = (
        functools.partial(connect, application_name="x"),
        functools.partial(connect, application_name="x", replication=True),
        functools.partial(target.connect, name="x"),
    )
    for opened in openers:
        with contextlib.closing(opened(conninfo)) as session:
            assert scalar(session, "SHOW transaction_read_only") == "off"


def test_a_reload_of_the_publisher_gives_no_value_another_text_in_a_session_that_is_open(pubdb):
    server = pubdb.server
    value = "SELECT '2000-01-01 12:00+00'::timestamptz, '\\x6162'::bytea"
    with connect(pubdb.conninfo, application_name="orders", replication=True) as session:
        before = session.pgconn.exec_(value.encode())
        texts = [before.get_value(0, 0), before.get_value(0, 1)]
        settings = {"timezone": "Asia/Tokyo", "bytea_output": "escape", "work_mem": "7MB"}
        try:
            for name, setting in settings.items():
                server.query(f"ALTER SYSTEM SET {name} = '{setting}'")
            server.reload()
            while scalar(session, "SHOW work_mem") != "7MB":  # the session has read the configuration
                time.sleep(0.01)
            after = session.pgconn.exec_(value.encode())
        finally:
            for name in settings:
                server.query(f"ALTER SYSTEM RESET {name}")
            server.reload()
        assert [after.get_value(0, 0), after.get_value(0, 1)] == texts


def test_a_vanished_peer_is_noticed_in_time_and_the_words_of_conninfo_and_service_go_before(
    pubdb, tmp_path, monkeypatch
):
    """Both sides alike; only what many rows are sent to has more patience."""
    address = f"host=127.0.0.1 port={pubdb.server.port} dbname={pubdb.name} user=postgres"
    (tmp_path / "services").write_text("\n".join(["[src]", *address.split(), "tcp_user_timeout=7000", ""]))
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))

    def timeouts(conninfo, side, **more):
        with contextlib.closing(side(conninfo, **more)) as session:
            with socket.socket(fileno=os.dup(session.fileno())) as line:
                options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPCNT)
                return [line.getsockopt(socket.IPPROTO_TCP, option) for option in options]

    publisher, subscriber = (
        functools.partial(connect, application_name="x"),
        functools.partial(target.connect, name="x"),
    )
    for side in (publisher, subscriber):
        assert timeouts(address, side) == [60_000, 30, 3]
        assert timeouts(f"{address} tcp_user_timeout=5000 keepalives_idle=9", side) == [5000, 9, 3]
        assert timeouts("service=src", side) == [7000, 30, 3]
    assert timeouts(address, subscriber, bulk=True) == [300_000, 30, 3]
    assert timeouts("service=src", subscriber, bulk=True) == [7000, 30, 3]


@pytest.mark.parametrize("opened", ["a walsender", "a session on the publisher", "a session on the target"])
def test_a_server_notices_a_launcher_that_vanished(pubdb, opened):
    """By default it would take more than two hours, in which locks, a snapshot or a temporary slot stay."""
    address = f"host=127.0.0.1 port={pubdb.server.port} dbname={pubdb.name} user=postgres"
    if opened == "a session on the target":
        session = target.connect(address, "x")
    else:
        session = connect(address, application_name="x", replication=opened == "a walsender")
    with contextlib.closing(session):
        names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
        assert [scalar(session, f"SHOW {name}") for name in names] == ["30", "10", "3"]


def test_the_word_replication_in_a_conninfo_does_not_make_every_session_a_walsender(pubdb):
    with connect(pubdb.conninfo + " replication=database", application_name="x") as session:
        assert not is_replication(session)
        with pytest.raises(psycopg.errors.SyntaxError):
            session.execute("IDENTIFY_SYSTEM")


def test_client_encoding_is_the_targets(pubdb):
    with connect(pubdb.conninfo, application_name="x", encoding="LATIN1") as session:
        assert scalar(session, "SHOW client_encoding") == "LATIN1"


@pytest.fixture(scope="module")
def guarded():
    with Server(fast=True, password="right") as server:
        yield server


def test_a_wrong_password_is_named_and_never_shown(guarded):
    conninfo = guarded.conninfo(password=SECRET)
    with pytest.raises(PublisherUnavailable, match="password authentication failed") as raised:
        connect(conninfo, application_name="x")
    assert "passfile" in raised.value.hint and SECRET not in everything(raised.value)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    with pytest.raises(PublisherUnavailable, match="no password supplied") as raised:
        connect(conninfo.replace(f"password={SECRET}", "passfile=/nonexistent"), application_name="x")
    assert "passfile" in raised.value.hint


@pytest.mark.parametrize(
    ("change", "reason", "hint"),
    [
        ({"dbname": "nowhere"}, 'database "nowhere" does not exist', "dbname"),
        ({"user": "nobody_at_all"}, 'role "nobody_at_all" does not exist', "user"),
        ({"port": "1"}, "refused", "port"),
        ({"host": "no-such-host.invalid"}, "no-such-host.invalid", "host name"),
        ({"host": "/nonexistent"}, "No such file", "host and port"),
        ({"sslmode": "require"}, "server does not support SSL", "sslmode"),
    ],
)
def test_an_unreachable_publisher_is_one_class_with_a_hint_for_each_case(pubdb, change, reason, hint):
    with pytest.raises(PublisherUnavailable) as raised:
        connect(psycopg.conninfo.make_conninfo(pubdb.conninfo, password=SECRET, **change), application_name="x")
    error = raised.value
    assert reason in error.message and hint in error.hint
    assert error.message.startswith("could not connect to the publisher: ") and "\n" not in error.message
    assert SECRET not in everything(error)
    assert pickle.loads(pickle.dumps(error)).hint == error.hint


def test_a_conninfo_that_libpq_refuses_is_not_repeated():
    with pytest.raises(UsageError) as raised:
        connect(f"host=x {SECRET}", application_name="x")
    assert SECRET not in everything(raised.value)


def test_a_role_without_replication_is_a_missing_permission_with_the_statement_that_gives_it(pubdb):
    pubdb.execute(f'CREATE ROLE "plain {pubdb.name}" LOGIN')
    try:
        conninfo = psycopg.conninfo.make_conninfo(pubdb.conninfo, user=f"plain {pubdb.name}")
        with connect(conninfo, application_name="x"):
            pass
        with pytest.raises(PermissionMissing) as raised:
            connect(conninfo, application_name="x", replication=True)
    finally:
        pubdb.execute(f'DROP ROLE "plain {pubdb.name}"')
    assert raised.value.hint.splitlines()[-1] == f'ALTER ROLE "plain {pubdb.name}" REPLICATION;'


def test_a_publisher_that_crashed_is_unavailable_to_old_and_new_sessions(guarded):
    session = connect(guarded.conninfo(), application_name="x")
    guarded.kill9()
    for _ in range(2):
        with pytest.raises(psycopg.OperationalError) as raised:
            session.execute("SELECT 1")
        assert isinstance(translate(raised.value, "read"), PublisherUnavailable)
    with pytest.raises(PublisherUnavailable):
        connect(guarded.conninfo(), application_name="x")
    guarded.start()
    session.close()


def test_the_words_of_an_old_pooler_lead_to_the_servers_own_address():
    error = refused(
        psycopg.OperationalError("connection failed: FATAL:  unsupported startup parameter: replication"), ""
    )
    assert isinstance(error, StateForbids) and "pooler" in error.hint


@pytest.mark.parametrize(
    ("sqlstate", "message", "expected"),
    [
        (None, "server closed the connection unexpectedly", PublisherUnavailable),
        ("57P01", "terminating connection due to administrator command", PublisherUnavailable),
        ("57P04", "terminating connection due to conflict with recovery", PublisherUnavailable),
        ("25P04", "terminating connection due to transaction timeout", PublisherUnavailable),
        ("57014", "canceling statement due to user request", PublisherUnavailable),
        ("55006", 'replication slot "s" is active for PID 7', PublisherUnavailable),
        ("53300", "sorry, too many clients already", PublisherUnavailable),
        ("53400", "all replication slots are in use", PublisherUnavailable),
        ("58030", "could not read file", PublisherUnavailable),
        ("42704", 'replication slot "s" does not exist', SlotLost),
        ("42704", "Replikations-Slot »s« existiert nicht", SlotLost),
        ("55000", 'can no longer get changes from replication slot "s"', SlotLost),
        ("55000", 'can no longer access replication slot "s"', SlotLost),
        ("58P01", "requested WAL segment 000000010000000000000001 has already been removed", SlotLost),
        ("55000", 'logical decoding requires "wal_level" >= "logical"', StateForbids),
        ("42710", 'replication slot "s" already exists', StateForbids),
        ("42704", 'publication "p" does not exist', ReplicationBroken),
        ("42704", 'publication "timeslots" does not exist', ReplicationBroken),
        ("42704", "Publikation »timeslots« existiert nicht", ReplicationBroken),
        ("08P01", "invalid message", ReplicationBroken),
        ("0A000", "client sent proto_version=9 but server only supports protocol 4 or lower", ReplicationBroken),
        ("XX000", "something odd", ReplicationBroken),
        ("22012", "division by zero", ApplyError),
        ("54000", "string buffer exceeds maximum allowed length (1073741823 bytes)", ApplyError),
        ("54001", "stack depth limit exceeded", ApplyError),
        ("42P01", 'relation "t" does not exist', ApplyError),
    ],
)
def test_the_sqlstate_decides_what_an_error_means(sqlstate, message, expected):
    error = classify(ServerError(sqlstate, message, "Facts.", None), "do it")
    assert type(error) is expected
    assert (error.message, error.detail, error.sqlstate) == (f"could not do it: {message}", "Facts.", sqlstate)


@pytest.mark.parametrize(
    ("message", "grant"),
    [
        ("permission denied for table t", 'GRANT SELECT ON TABLE "s"."t" TO "u";'),
        ("permission denied for schema s", 'GRANT USAGE ON SCHEMA "s" TO "u";'),
        ("permission denied for function f", 'GRANT EXECUTE ON FUNCTION "f" TO "u";'),
        ("permission denied to use replication slots", 'ALTER ROLE "u" REPLICATION;'),
        ("must be superuser or replication role to use replication slots", 'ALTER ROLE "u" REPLICATION;'),
        ('query would be affected by row-level security policy for table "t"', 'ALTER ROLE "u" BYPASSRLS;'),
    ],
)
def test_a_missing_privilege_names_the_statement_to_paste(message, grant):
    error = classify(ServerError("42501", message), "copy", table=("s", "t"), user="u")
    assert isinstance(error, PermissionMissing) and error.hint.splitlines()[-1] == grant
    said = ServerError("42501", message, context="PL/pgSQL function f() line 3 at RAISE")
    error = classify(said, "copy", table=("s", "t"), user="u")
    assert isinstance(error, PermissionMissing) and ";" not in error.hint
    fields = (b"C42501", b"M" + message.encode(), b"WPL/pgSQL function f() line 3", b"HALTER ROLE me SUPERUSER;", b"\0")
    error = translate(reported(b"\0".join(fields)), "copy", table=("s", "t"), user="u")
    assert isinstance(error, PermissionMissing) and ";" not in f"{error.detail}{error.hint}"
