"""A SQLite connection to ``state.db``: opening, transactions, threads, and pgsub's errors.

Takes the place of the server's catalog access (``access/table/table.c``, ``xact.c``). Writes are short BEGIN IMMEDIATE
transactions, so that two writers wait for each other (up to 5 s) instead of failing halfway.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pgsub.catalog import store_file
from pgsub.catalog.schema import MIGRATIONS
from pgsub.catalog.state_folder import create_private
from pgsub.common.errors import InternalError, PgsubError, StateStoreError

_PRAGMAS = ("PRAGMA trusted_schema = OFF", "PRAGMA foreign_keys = ON", "PRAGMA synchronous = FULL")
_NEWEST = MIGRATIONS[-1][0]
# The history may have 10,000 wide rows. Opening the store does not wait for reading them.
_CHECK_STATE = """
    SELECT quick_check FROM sqlite_master JOIN pragma_quick_check(name)
     WHERE type = 'table' AND name NOT IN ('pgsub_conflict', 'pgsub_journal')
"""
_OUTER = ("BEGIN IMMEDIATE", "COMMIT", ("ROLLBACK",))
_INNER = ("SAVEPOINT inner_write", "RELEASE inner_write", ("ROLLBACK TO inner_write", "RELEASE inner_write"))


class Database:
    """A connection that the threads of one process share. Every call holds its lock.

    :param path: the file, in a folder that passed :func:`~pgsub.catalog.state_folder.prepare_folder`.
    :param create: create a missing file. Otherwise an empty store in memory takes its place.
    :param readable: accept a read-only copy in memory if there is no space or no privilege for the files that sharing a
        write-ahead log requires.
    :ivar copied: why it is such a copy, None if it is the file.
    :raises StateStoreError: the file is not private, damaged, not a state store, or written by a newer pgsub.
    """

    def __init__(self, path: Path, *, create: bool = True, readable: bool = False) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._depth = 0
        self.copied: PgsubError | None = None
        self._file = (0, 0)
        if not create and not os.path.lexists(path):
            self._connection = store_file.in_memory()
            store_file.migrate(self._connection, path)
            return
        try:
            self._connection = self._opened()
        except PgsubError as error:
            usable = readable and isinstance(error, StateStoreError)
            copy = store_file.copy_in_memory(path) if usable else None
            if copy is None:
                raise
            self._connection, self.copied = copy, error
            if not self._check_version():  # there is nothing to read
                copy.close()
                raise

    def _opened(self) -> sqlite3.Connection:
        with self._errors():
            store_file.create(self.path)
        create_private(self.path)
        with self._errors():
            self._connection = sqlite3.connect(
                self.path, timeout=store_file.BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        try:
            self._file = store_file.identity(self.path)
            self._prepare()
        except BaseException:
            self._connection.close()
            raise
        return self._connection

    def reopen(self) -> None:
        """Reopen the file after a failure. Create a new one if it was removed.

        :raises StateStoreError: like the constructor.
        """
        with self._lock:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._depth = 0
            self._connection = self._opened()
            self.copied = None

    def replaced(self) -> bool:
        """Return whether the name no longer leads to the open file, so that writes to it would be lost."""
        try:
            return self.copied is None and store_file.identity(self.path) != self._file
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection. A repetition does nothing."""
        with self._lock, self._errors():
            self._connection.close()

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._lock, self._errors():
            return self._connection.execute(sql, parameters).fetchall()

    def described(self, sql: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Return column names and all rows of a query without parameters."""
        with self._lock, self._errors():
            cursor = self._connection.execute(sql)
            return tuple(column[0] for column in cursor.description), cursor.fetchall()

    def run(self, sql: str, *parameters: Any) -> int:
        """Run a statement that changes one row. Call it inside :meth:`transaction`.

        :return: the row ID of the last INSERT.
        """
        with self._lock, self._errors():
            return self._connection.execute(sql, parameters).lastrowid or 0

    def run_many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement once for each row of parameters. Call it inside :meth:`transaction`."""
        with self._lock, self._errors():
            self._connection.executemany(sql, parameters)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything inside the block atomically. A nested transaction is a savepoint.

        :raises StateStoreError: the file is locked for more than 5 s or not writable, or the disk is full.
        """
        with self._lock:
            begin, commit, undo = _INNER if self._depth else _OUTER
            self.rows(begin)
            self._depth += 1
            try:
                yield
                self.rows(commit)
            except BaseException:
                # If the disk is full, SQLite itself rolls back.
                if self._connection.in_transaction:
                    for statement in undo:
                        self.rows(statement)
                raise
            finally:
                self._depth -= 1

    def try_write(self) -> None:
        """Write what the file has already, to find out whether it can be written. A read does not show that.

        :raises StateStoreError: as for :meth:`transaction`.
        """
        with self.transaction():
            self.rows(f"PRAGMA user_version = {_NEWEST}")

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read one state of the file inside the block, which must not write."""
        with self._lock:
            inside = self._connection.in_transaction
            if not inside:
                self.rows("BEGIN")
            try:
                yield
            finally:
                if not inside and self._connection.in_transaction:
                    self.rows("ROLLBACK")

    def check(self, sql: str = "PRAGMA quick_check(1)") -> None:
        """Look for damage, in the whole file unless a narrower query is given.

        :param sql: returns ``ok`` or the problems.
        :raises StateStoreError: the first problem.
        """
        for (found,) in self.rows(sql):
            if found != "ok":
                raise _damaged(self.path, str(found))

    def _prepare(self) -> None:
        for pragma in _PRAGMAS:
            self.rows(pragma)
        version = self._check_version()
        # guard: an emptied state store is not mistaken for a new one
        if not version:  # new files appear with their tables
            raise _damaged(self.path, "file is empty")
        if version < _NEWEST:
            with store_file.changing_alone(self.path, "upgraded"):
                if self._check_version() < _NEWEST:
                    self.rows("PRAGMA journal_mode = WAL")
                    with self._errors():
                        store_file.migrate(self._connection, self.path)
        self.check(_CHECK_STATE)

    def _check_version(self) -> int:
        version = int(self.rows("PRAGMA user_version")[0][0])
        application = int(self.rows("PRAGMA application_id")[0][0])
        if application != store_file.APPLICATION_ID and self.rows("SELECT 1 FROM sqlite_master LIMIT 1"):
            raise StateStoreError(
                f'file "{self.path}" is not a pgsub state store',
                detail="It is an SQLite database of another application.",
                hint="Choose another state folder.\npgsub --state-dir FOLDER status",
            )
        if version > _NEWEST:
            raise StateStoreError(
                f'state store "{self.path}" has schema version {version}, this pgsub knows versions up to {_NEWEST}',
                detail="It was written by a newer pgsub.",
                hint="Upgrade pgsub.\npgsub version",
            )
        return version

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _translated(self.path, error) from None
        except UnicodeDecodeError:  # Python cannot decode SQLite's message about a damaged schema
            raise _damaged(self.path, "malformed database schema") from None
        except OverflowError:
            raise InternalError("number is out of range for the state store") from None


def _translated(path: Path, error: sqlite3.Error) -> PgsubError:
    name = getattr(error, "sqlite_errorname", "") or ""
    file, folder = shlex.quote(str(path)), shlex.quote(str(path.parent))
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or "decode" in str(error):
        return _damaged(path, str(error))
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StateStoreError(
            f'state store "{path}" is locked',
            detail=f"Another process has held the lock for more than {store_file.BUSY_SECONDS:.0f} s.",
            hint=f"Find the process.\nfuser -v {file}",
        )
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.IntegrityError)):
        return InternalError(f"invalid use of the state store: {error}")
    hint = None
    if name.startswith("SQLITE_FULL"):
        hint = f"Free some space.\ndf -h {folder}"
    elif name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        hint = f"The file, its -wal and -shm files and the folder must be writable.\nls -la {folder}"
    elif name.startswith("SQLITE_IOERR"):
        hint = f"Check the disk and its free space.\ndf -h {folder}"
    return StateStoreError(f'could not use state store "{path}": {error}', hint=hint)


def _damaged(path: Path, found: str) -> StateStoreError:
    file, recovered = shlex.quote(str(path)), shlex.quote(f"{path}.recovered")
    return StateStoreError(
        f'state store "{path}" is damaged',
        detail=f"SQLite says: {found}. The file is left as it is; replicated data and progress are in the target.",
        hint="Restore the state folder from a backup, or recover what can be read. Where nothing can be, move the file"
        " away: pgsub run NAME --from-target makes another one of what the target knows.\n"
        f"sqlite3 {file} .recover | sqlite3 {recovered}",
    )
