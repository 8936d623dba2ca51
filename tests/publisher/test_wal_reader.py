"""Promises of reading the publisher's WAL: every transaction that it ended is found, whatever its segments are."""

from __future__ import annotations

import struct
from contextlib import closing

import pytest
from fix_clusters import program
from fix_servers import Database

from pgsub.protocol.wal_records import Unreadable
from pgsub.publisher import wal_reader
from pgsub.publisher.connect import connect
from pgsub.publisher.wal_reader import has_transaction, same_server

_SLOT = "SELECT pg_create_logical_replication_slot('s', 'pgoutput')"
_SENT = """
SELECT data FROM pg_logical_slot_peek_binary_changes('s', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')
 WHERE get_byte(data, 0) = ascii('C')
"""


@pytest.mark.long
@pytest.mark.parametrize("megabytes", [1, 8])
def test_transactions_across_the_borders_of_segments_of_any_size_are_found(make_server, megabytes):
    server = make_server()
    server.stop()
    program("pg_resetwal", "-D", str(server.data), "--wal-segsize", str(megabytes))
    server.append_conf({"min_wal_size": f"{2 * megabytes}MB", "max_wal_size": f"{16 * megabytes}MB"})
    server.start()
    database = Database(server, "app")
    database.execute("CREATE TABLE t (v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    database.execute(_SLOT)
    for number in range(250):
        database.execute("INSERT INTO t VALUES (repeat('x', %s))", 97 * number)
        if number % 60 == 0:
            database.execute("SELECT pg_switch_wal()")
    ends = [struct.unpack(">QQq", data[2:26])[1:] for (data,) in database.rows(_SENT)]
    assert len(ends) == 250
    segments = {lsn // (megabytes << 20) for lsn, _ in ends}
    near = [i for i, (lsn, _) in enumerate(ends) if lsn % (megabytes << 20) < 30_000 or i % 25 == 0]
    assert len(segments) > 4 and len(near) > 12
    for lsn, time in (ends[i] for i in near):
        with closing(connect(database.conninfo, application_name="x", replication=True)) as one:
            assert has_transaction(one, lsn, time, 0)
        with closing(connect(database.conninfo, application_name="x", replication=True)) as one:
            assert not has_transaction(one, lsn, time + 1, lsn)
    database.close()


@pytest.mark.parametrize(
    "said",
    [None, (), ("8192",), (8192, None), ("8192", "9" * 5000), ("1048576", "16777216"), ("8191", "16777216"), ({}, [])],
)
def test_a_server_that_does_not_say_how_its_wal_is_divided_is_not_read(monkeypatch, said):
    monkeypatch.setattr(wal_reader, "row", lambda *_: said)
    with pytest.raises(Unreadable, match="how its WAL is divided"):
        has_transaction(None, 1 << 40, 0, 0)


def test_a_server_that_was_restarted_is_not_the_same(make_server):
    server = make_server()
    with closing(connect(server.conninfo(), application_name="x")) as before:
        with closing(connect(server.conninfo(), application_name="x", replication=True)) as other:
            assert same_server(before, other)
        started = before.execute("SELECT pg_postmaster_start_time()").fetchone()
    server.restart()
    with closing(connect(server.conninfo(), application_name="x")) as after:
        assert after.execute("SELECT pg_postmaster_start_time()").fetchone() != started
