"""Snapshots that one session exports and others import. Mirrors ExportSnapshot and ImportSnapshot (snapmgr.c).

NOTES
The server names a snapshot after the holder's place among the server processes and a counter of that place. As long as
the holder lives, no other session has its name. But the counters begin again after a restart, for which the crash of
any server process is enough, and then another session's snapshot may have the name. So an import is checked: it is the
holder's snapshot if the holder is still there afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg
from psycopg import sql

_EXPORT = """
SELECT pg_catalog.pg_export_snapshot(), a.pid, pg_catalog.date_part('epoch', a.backend_start)::text
  FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a
"""
# It fails by a division by zero if the holder is gone: one round trip for both statements. A role without privileges of
# the holder's does not see when the process began. The PID has to do then, which is hardly used again so soon.
# guard: a snapshot is read only if the session that made it is still there, without "1 / "
_IMPORT = """
SET TRANSACTION SNAPSHOT {};
SELECT 1 / pg_catalog.count(*) FROM pg_catalog.pg_stat_get_activity({}) a
 WHERE nullif(pg_catalog.date_part('epoch', a.backend_start)::text, {}) IS NULL
"""
#: What an import raises if the holder has ended.
HolderGone = (
    psycopg.errors.UndefinedObject,
    psycopg.errors.InvalidParameterValue,
    psycopg.errors.DivisionByZero,
)


class ExportedSnapshot(NamedTuple):
    """The name of a snapshot, and the server process that holds it.

    :ivar since: when the process began, as text that is only compared.
    """

    name: str
    pid: int
    since: str

    @classmethod
    def of(cls, connection: psycopg.Connection[Any]) -> ExportedSnapshot:
        """Export the snapshot of a session's transaction. It can be imported until that ends."""
        found = connection.execute(_EXPORT.encode()).fetchone()
        assert found is not None
        name, pid, since = found
        return cls(str(name), int(pid), str(since))

    def importing(self) -> sql.Composed:
        """Return the statements that import it, for the start of a transaction; they may raise :data:`HolderGone`.

        There are several, so they cannot be prepared.
        """
        return sql.SQL(_IMPORT).format(*map(sql.Literal, self))
