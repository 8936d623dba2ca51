"""The local state store: a SQLite file that the CLI and the launcher share. Executors never open it.

It takes the part of the server's subscription catalogs and statistics views. The ledger in the target database is the
authority on progress. Any SQLite tool may read the file while workers run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pgsub.catalog.codec import Table
from pgsub.catalog.database import Database
from pgsub.catalog.journal import JournalCatalog
from pgsub.catalog.rows import VerifiedRow
from pgsub.catalog.state_folder import prepare_folder
from pgsub.common.errors import PgsubError, UsageError

FILE_NAME = "state.db"

#: Tables and views that users may read, with the column of the subscription's ID if it is not subid.
_OWNERS = {"pg_subscription": "oid", "pg_subscription_rel": "srsubid", "pg_replication_origin_status": "local_id"}
VIEWS = (
    *_OWNERS,
    *("pg_stat_subscription", "pg_stat_subscription_stats", "pg_stat_progress_copy", "pgsub_conflict", "pgsub_journal"),
    *("pgsub_error", "pgsub_slot", "pgsub_prepared_pending", "pgsub_held_table", "pgsub_skipped", "pgsub_server"),
    *("pgsub_task", "pgsub_sequence", "pgsub_verified"),
)
_VERIFIED = Table("pgsub_verified", VerifiedRow, "subid")
_OF_TABLE = "DELETE FROM pgsub_verified WHERE subid = ? AND schemaname = ? AND relname = ?"


class StateStore(JournalCatalog, AbstractContextManager["StateStore"]):
    """An open state store. Several threads of a process may share it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.path = database.path  #: the SQLite file
        self.replaced = database.replaced
        self.reopen = database.reopen  #: does not recreate the folder
        self.close = database.close
        self.try_write = database.try_write
        #: Write in one transaction. Keep it short, because other threads and processes wait.
        self.batch = database.transaction
        self.snapshot = database.snapshot
        #: Look for damage in the whole file. :meth:`open` leaves out the history, which may be large.
        self.check = database.check

    @classmethod
    def open(cls, folder: Path, *, create: bool = True, readable: bool = False) -> StateStore:
        """Open the store of a state folder.

        :param create: create missing folder, file and tables. Otherwise a missing store is an empty one in memory, and
            nothing is created, so that a mistyped folder leaves no trace.
        :param readable: accept a read-only copy if the file cannot be written. See :attr:`copied`.
        :raises StateStoreError: the store is not private, damaged, written by a newer pgsub, or not writable.
        """
        if create or os.path.lexists(folder):
            prepare_folder(folder)
        return cls(Database(folder / FILE_NAME, create=create, readable=readable))

    @property
    def copied(self) -> PgsubError | None:
        """Why this is a copy in memory: the file cannot be written. None if this is the file itself."""
        return self._database.copied

    def __exit__(self, *exception: object) -> None:
        self.close()

    def view(self, name: str, subid: int | None = None) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Return columns and rows of a table or view as stored.

        :param name: one of :data:`VIEWS`.
        :param subid: only rows of this subscription, None for all.
        :raises UsageError: for any other name.
        """
        if name not in VIEWS:
            raise UsageError(f'view "{name}" does not exist', hint=f"Choose one of {', '.join(VIEWS)}.")
        where = "" if subid is None else f' WHERE "{_OWNERS.get(name, "subid")}" = {subid:d}'
        return self._database.described(f'SELECT * FROM "{name}"{where}')

    def verified(self, subid: int) -> list[VerifiedRow]:
        """Return what an interrupted ``verify`` had found equal in a subscription's tables."""
        return [_VERIFIED.decode(values) for values in self._database.rows(_VERIFIED.select, (subid,))]

    def put_verified(self, subid: int, rows: Sequence[VerifiedRow]) -> None:
        """Set what is known to be equal in some tables.

        :raises SubscriptionNotFound: the subscription was dropped.
        """
        with self._database.transaction():
            self.require(subid)
            self._database.run_many(_VERIFIED.insert, [(subid, *_VERIFIED.encode(row)) for row in rows])

    def forget_verified(self, subid: int, names: Sequence[tuple[str, str]]) -> None:
        """Forget what is known to be equal in some tables.

        :param names: schema and name of each.
        """
        with self._database.transaction():
            self._database.run_many(_OF_TABLE, [(subid, *name) for name in names])
