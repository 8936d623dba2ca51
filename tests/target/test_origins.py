"""Replication origins under roles that may use only a part of their functions."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from pgsub.target.session import origins

if TYPE_CHECKING:
    from fix_servers import Database

_AT = "SELECT remote_lsn FROM pg_replication_origin_status WHERE external_id = %s"


def test_a_role_that_may_not_advance_an_origin_leaves_it_to_the_next_commit(subdb: Database) -> None:
    role = f"few_{subdb.name}"
    subid = subdb.value("SELECT oid::bigint FROM pg_database WHERE datname = current_database()")
    name = f"pgsub_{subid}"
    subdb.execute(f"CREATE ROLE {role} LOGIN")
    subdb.execute(f"SELECT pg_replication_origin_create('{name}')")
    try:
        with closing(subdb.connect(role)) as session:
            origins.advance(session, subid, 0x20)
            assert subdb.rows(_AT, name) == []
            subdb.execute(f"GRANT EXECUTE ON FUNCTION pg_replication_origin_advance(text, pg_lsn) TO {role}")
            origins.advance(session, subid, 0x20)
        assert subdb.rows(_AT, name) == [("0/20",)]
    finally:
        subdb.execute(f"SELECT pg_replication_origin_drop('{name}')")
        subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
