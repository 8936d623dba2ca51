"""Users of the target without any privilege of the ledger cannot hold up workers by the names of their sessions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from pgsub.target.ledger import workers

if TYPE_CHECKING:
    from fix_pair import MakePair
    from fix_servers import Database

_STRANGER = f"stranger_{os.getpid()}"


@pytest.fixture
def stranger(subdb: Database) -> Iterator[str]:
    """A role that may connect, and no more."""
    subdb.execute(f"CREATE ROLE {_STRANGER} LOGIN")
    yield _STRANGER
    subdb.execute(f"DROP OWNED BY {_STRANGER}; DROP ROLE {_STRANGER}")


@pytest.mark.parametrize("name", ["apply x 1", "apply 99999999999999999999", "apply 0", "sync:1 99999999999999999999"])
def test_a_session_that_only_bears_a_workers_name_is_no_worker(pair: MakePair, stranger: str, name: str) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    with contextlib.closing(p.subdb.connect(stranger, application_name=f"pgsub {p.subid} {name}")) as session:
        workers.take_over_many(p.session, p.subid, [workers.APPLY, 1])
        workers.evict_all(p.session, p.subid)
        assert session.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("name", ["apply 0", "sync:1 0"])
def test_a_role_that_may_not_end_a_strangers_session_need_not(
    pair: MakePair, subdb: Database, stranger: str, name: str
) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    plain = sql.Identifier(f"plain_{os.getpid()}")
    subdb.connection.execute(sql.SQL("CREATE ROLE {}").format(plain))
    try:
        subdb.connection.execute(
            sql.SQL(
                "GRANT USAGE ON SCHEMA pgsub TO {0}; GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA pgsub TO {0}"
            ).format(plain)
        )
        with contextlib.closing(subdb.connect(stranger, application_name=f"pgsub {p.subid} {name}")):
            p.session.execute(sql.SQL("SET ROLE {}").format(plain))
            workers.take_over_many(p.session, p.subid, [workers.APPLY, 1])
            workers.evict_all(p.session, p.subid)
    finally:
        p.session.execute("RESET ROLE")
        subdb.connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(plain))
