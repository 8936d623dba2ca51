"""How a ``state.db`` is brought to the newest schema: numbered steps, in one transaction, after a backup.

Mirrors what ``pg_upgrade`` is to the server's catalogs. A released step is never edited: a change is a new step.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from pgsub.catalog import schema
from pgsub.catalog.folder import create_private

#: ``pgsb``: tells a state store from any other SQLite file.
APPLICATION_ID = 0x70677362

#: (schema version, SQL that leads to it); kept in ``user_version`` of the file.
MIGRATIONS: tuple[tuple[int, str], ...] = (
    (1, schema.VERSION_1),
    (2, schema.VERSION_2),
    (3, schema.VERSION_3),
    (4, schema.VERSION_4),
    (5, schema.VERSION_5),
    (6, schema.VERSION_6),
    (7, schema.VERSION_7),
    (8, schema.VERSION_8),
    (9, schema.VERSION_9),
    (10, schema.VERSION_10),
    (11, schema.VERSION_11),
    (12, schema.VERSION_12),
    (13, schema.VERSION_13),
)


def migrate(connection: sqlite3.Connection, path: Path, steps: Sequence[tuple[int, str]] = MIGRATIONS) -> None:
    """Apply the steps a file lacks, all in one transaction; an existing schema is copied to a backup file before.

    :param connection: in autocommit mode; nobody else migrates meanwhile.
    :param path: of the file; the backup is ``<name>.v<version>.bak`` beside it.
    :param steps: the migrations.
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
        # executescript commits first what is open, so the transaction has to be part of the script
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
