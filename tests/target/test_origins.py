"""Replication origins under roles that may use only a part of their functions."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest
from fix_pair import MakePair

from pgsub.common.errors import Fenced
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


def test_each_session_finds_a_free_origin_without_an_error_in_the_servers_log(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    with ExitStack() as stack:
        sessions = [stack.enter_context(closing(p.subdb.connect())) for _ in range(3)]
        before = p.subdb.server.log.stat().st_size
        names = [origins.attach(session, p.sub) for session in sessions]
        sessions[1].close()
        p.subdb.wait("SELECT count(*) = 2 FROM pg_locks WHERE locktype = 'advisory' AND objid = %s::bigint", p.subid)
        names.append(origins.attach(stack.enter_context(closing(p.subdb.connect())), p.sub))
        assert names == [f"pgsub_{p.subid}", f"pgsub_{p.subid}_1", f"pgsub_{p.subid}_2", f"pgsub_{p.subid}_1"]
        assert not p.subdb.server.log_contains("ERROR", before)


def test_a_session_that_comes_after_the_drop_of_its_subscription_leaves_no_origin_behind(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    p.subdb.execute("DELETE FROM pgsub.subscription WHERE subid = %s", p.subid)
    with closing(p.subdb.connect()) as session, pytest.raises(Fenced, match="was removed from the ledger"):
        origins.attach(session, p.sub)
    assert p.subdb.rows("SELECT roname FROM pg_replication_origin WHERE roname ~ %s", f"^pgsub_{p.subid}") == []


def test_a_stranger_who_holds_the_locks_of_all_origins_keeps_no_session_from_one(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    with closing(p.subdb.connect()) as stranger, closing(p.subdb.connect()) as session:
        for number in range(origins.POOL):
            stranger.execute("SELECT pg_advisory_lock(%s, %s)", (origins._IN_USE + number, p.subid))
        assert origins.attach(session, p.sub) == f"pgsub_{p.subid}"
