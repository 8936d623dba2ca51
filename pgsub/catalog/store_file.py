"""The file of the state store: it appears with all its tables, and one process at a time upgrades it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

from pgsub.catalog.locks import Lock
from pgsub.catalog.schema import MIGRATIONS
from pgsub.catalog.state_folder import create_private
from pgsub.common.errors import StateStoreError

#: ``pgsb``: distinguishes a state store from other SQLite files.
APPLICATION_ID = 0x70677362
#: Seconds for which two writers wait for each other.
BUSY_SECONDS = 5.0


def identity(path: Path) -> tuple[int, int]:
    """Return what distinguishes the file from another one of the same name."""
    status = path.stat()
    return status.st_dev, status.st_ino


def in_memory() -> sqlite3.Connection:
    """Open an empty store without a file."""
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


def copy_in_memory(path: Path) -> sqlite3.Connection | None:
    """Copy a state store into memory. Return None if it cannot be read at all.

    Exclusive access needs no shared-memory file. Without a write-ahead log the file is complete.
    """
    quoted, log = urllib.parse.quote(str(path)), path.with_name(f"{path.name}-wal")
    ways = [("rw", "PRAGMA locking_mode = EXCLUSIVE")]
    if not log.exists() or not log.stat().st_size:
        ways.append(("ro&immutable=1", "PRAGMA query_only = ON"))
    for mode, pragma in ways:
        copy = in_memory()
        try:
            with contextlib.closing(sqlite3.connect(f"file:{quoted}?mode={mode}", uri=True, timeout=1)) as file:
                file.execute(pragma)
                file.backup(copy)
            copy.execute("PRAGMA query_only = ON")
            return copy
        except (sqlite3.Error, UnicodeDecodeError):
            copy.close()
    return None


@contextlib.contextmanager
def changing_alone(path: Path, work: str) -> Iterator[None]:
    """Admit one process at a time: the change to WAL does not wait, and the backup must precede the steps."""
    lock = Lock(path.with_name("upgrade.lock"))
    if not lock.acquire(BUSY_SECONDS):
        raise StateStoreError(f'state store "{path}" is being {work} by another process')
    try:
        yield
    finally:
        lock.release()


def create(path: Path) -> None:
    """Create a new file that appears with all its tables, and so is readable as soon as it is visible."""
    if os.path.lexists(path):
        return
    draft = path.with_name(f"{path.name}.new")
    with changing_alone(path, "created"):
        if os.path.lexists(path):
            return
        for suffix in ("", "-wal", "-shm", "-journal"):
            draft.with_name(draft.name + suffix).unlink(missing_ok=True)
        create_private(draft)
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            migrate(connection, draft)
        draft.rename(path)


def migrate(connection: sqlite3.Connection, path: Path, steps: Sequence[tuple[int, str]] = MIGRATIONS) -> None:
    """Upgrade to the newest schema, like ``pg_upgrade``: missing steps in one transaction, after a backup of the file.

    :param connection: in autocommit mode. Nobody else may migrate meanwhile.
    :param path: the file. The backup is ``<name>.v<version>.bak`` beside it.
    """
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    missing = [(number, sql) for number, sql in steps if number > version]
    if not missing:
        return
    if version:
        _back_up(connection, path.with_name(f"{path.name}.v{version}.bak"))
    body = "".join(sql for _, sql in missing)
    pragmas = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {missing[-1][0]};"
    try:
        # executescript first commits an open transaction, so the script contains the transaction.
        connection.executescript(f"BEGIN IMMEDIATE; {body} {pragmas} COMMIT;")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _back_up(connection: sqlite3.Connection, backup: Path) -> None:
    backup.unlink(missing_ok=True)
    create_private(backup)
    with contextlib.closing(sqlite3.connect(backup)) as copy:
        connection.backup(copy)
