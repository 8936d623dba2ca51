"""Sessions with one database of one system, and no other. The identity is checked in the session that is then used.

The server does not check: to it, whatever answers at the address is the publisher. But a name, a list of hosts or a
virtual address may lead to different servers from one connection to the next.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from pgsub.common.errors import WrongSystem
from pgsub.common.query import number, scalar
from pgsub.publisher.connect import Connection, answer, connect
from pgsub.publisher.server_errors import translating

_DATABASE = """
SELECT s.system_identifier::text, d.oid::bigint, d.datname::text
  FROM pg_catalog.pg_control_system() s, pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()
"""
#: The OID of the session's database.
OID = "SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()"


class Database(NamedTuple):
    """A database of a system. Standbys and physical copies have the same one."""

    system_identifier: str
    oid: int
    name: str


def open_session(
    conninfo: str,
    expected: Database | None,
    *,
    application_name: str,
    replication: bool = False,
    must_use_password: bool = False,
) -> Connection:
    """Open a session with the recorded database.

    :param expected: None: no publisher is recorded yet.
    :raises WrongSystem: another server or another database answers.
    """
    with contextlib.ExitStack() as stack:
        connection = connect(
            conninfo, application_name=application_name, replication=replication, must_use_password=must_use_password
        )
        stack.callback(connection.close)
        # guard: a session with the wrong server is not used
        if expected is not None:
            check_database(expected, database(connection, replication=replication))
        stack.pop_all()
    return connection


def database(connection: Connection, *, replication: bool = False) -> Database:
    """Query which database a session is connected to.

    :param replication: it is a replication connection, where the query needs no privilege.
    """
    with translating(connection, "identify the publisher"):
        if replication:
            identifier, _, _, name, *_ = answer(connection, "IDENTIFY_SYSTEM", 4)
            return Database(identifier, number(scalar(connection, OID), "OID of the database"), name)
        row = connection.execute(_DATABASE.encode()).fetchone()
    assert row is not None
    return Database(*row)


def check_database(expected: Database, actual: Database) -> None:
    """Compare a database with the recorded one. Its name may differ.

    :raises WrongSystem: another system or OID.
    """
    if actual.system_identifier != expected.system_identifier:
        raise WrongSystem(
            "the publisher is a different database system",
            detail=f"The subscription was created for system identifier {expected.system_identifier}, "
            f"this server has {actual.system_identifier}.",
            hint="Check host, port and name resolution of the subscription's connection. After a dump and restore of "
            "the publisher create the subscription again, with --adopt; after pg_upgrade, which takes slots along from "
            "17 on:\n"
            "pgsub disable NAME\npgsub alter NAME --publisher-upgraded\npgsub enable NAME",
        )
    if actual.oid != expected.oid:
        raise WrongSystem(
            "the publisher's database is a different one",
            detail=f'The subscription was created for database "{expected.name}" (OID {expected.oid}), '
            f'this is "{actual.name}" (OID {actual.oid}).',
            hint="Check dbname in the subscription's connection. "
            "A database that was dropped and created again has lost its slots: create the subscription again, with "
            "--adopt.",
        )
