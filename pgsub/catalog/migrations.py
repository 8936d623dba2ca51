"""Upgrades of ``state.db`` to the newest schema: all missing versions in one transaction, after a backup.

The counterpart of ``pg_upgrade`` for the server's catalogs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from pgsub.catalog.schema import MIGRATIONS
from pgsub.catalog.state_folder import create_private

#: ``pgsb``: distinguishes a state store from other SQLite files.
APPLICATION_ID = 0x70677362


def migrate(connection: sqlite3.Connection, path: Path, steps: Sequence[tuple[int, str]] = MIGRATIONS) -> None:
    """Apply missing steps in one transaction. An existing schema is first copied to a backup file.

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
    copy = sqlite3.connect(backup)
    try:
        connection.backup(copy)
    finally:
        copy.close()
