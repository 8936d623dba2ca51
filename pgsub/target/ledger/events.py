"""Rows of pgsub.event: facts that the launcher must record in its log and state store before feedback passes them."""

from __future__ import annotations

from typing import Any

import psycopg

from pgsub.common.errors import LogText
from pgsub.common.query import scalar
from pgsub.target.sql.jsonb import jsonb


def log_entry(level: str, text: LogText) -> dict[str, Any]:
    """Make the body of an event for the launcher's log."""
    return {"kind": "log", "level": level, "text": text}


def add(connection: psycopg.Connection, subid: int, *bodies: dict[str, Any]) -> None:
    """Record events in their order, in the open transaction if there is one."""
    with connection.cursor() as cursor:
        rows = [(subid, jsonb(connection, body)) for body in bodies]
        cursor.executemany("INSERT INTO pgsub.event (subid, body) VALUES (%s, %s)", rows)


def number(connection: psycopg.Connection, subid: int) -> int:
    """Return the number of an event that does not exist. All events so far have lower numbers, later ones higher ones.

    The last number of the table itself could be read only with a privilege on its sequence.
    """
    query = "INSERT INTO pgsub.event (subid, body) VALUES (%s, '{}') RETURNING id"
    found = int(scalar(connection, query, (subid,)) or 0)
    connection.execute("DELETE FROM pgsub.event WHERE id = %s", (found,))
    return found
