"""A server without transaction IDs, which it reports with the SQLSTATE of a row that is too large."""

from __future__ import annotations

import os

import psycopg
import pytest
from fix_clusters import MakeServer, program
from fix_servers import Database

from pgsub.common.errors import ApplyError, Directive, PublisherUnavailable, TargetUnavailable
from pgsub.publisher.server_errors import ServerError, classify
from pgsub.target.session.connect import translate

#: Transaction IDs in a segment of pg_xact, and its bytes.
_SEGMENT, _BYTES = 1 << 20, 256 << 10


def _refused(database: Database, statement: str) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught:
        database.execute(statement)
    assert caught.value.sqlstate == "54000"
    return caught.value


def _without_transaction_ids(make_server: MakeServer) -> Database:
    """A database of a server whose next transaction ID is a million before those in use."""
    server = make_server(autovacuum=False)
    database = Database(server, "app")
    database.execute("CREATE TABLE t (v text)")
    oldest = int(database.value("SELECT min(datfrozenxid::text::bigint) FROM pg_database"))
    database.close()
    server.stop()
    following = oldest + (1 << 31) - 1_000_000
    segment = server.data / "pg_xact" / f"{following // _SEGMENT:04X}"
    segment.write_bytes(bytes(_BYTES))
    os.chown(segment, server.data.stat().st_uid, server.data.stat().st_gid)
    program("pg_resetwal", "-x", str(following), "-D", str(server.data))
    server.start()
    return database


@pytest.mark.long
def test_a_server_without_transaction_ids_is_tried_again_until_a_vacuum_has_made_room(make_server: MakeServer) -> None:
    database = _without_transaction_ids(make_server)
    with database.connect() as session, session.transaction():
        session.execute("LOCK TABLE t IN SHARE UPDATE EXCLUSIVE MODE")  # the server begins a vacuum by itself
        error = _refused(database, "INSERT INTO t VALUES ('x')")
    for made, cls in (
        (translate(error, "write"), TargetUnavailable),
        (classify(ServerError.from_exception(error), "write"), PublisherUnavailable),
    ):
        assert type(made) is cls and made.directive is Directive.RETRY


def test_a_row_that_no_index_takes_is_a_fault_of_the_row(subdb: Database) -> None:
    subdb.execute("CREATE TABLE t (v bytea UNIQUE)")
    error = _refused(
        subdb, "INSERT INTO t SELECT string_agg(sha256(g::text::bytea), '') FROM generate_series(1, 200) g"
    )
    for made in (translate(error, "write"), classify(ServerError.from_exception(error), "write")):
        assert type(made) is ApplyError and made.directive is Directive.FAULT
