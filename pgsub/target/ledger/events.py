"""Rows of pgsub.event: facts that the launcher must record in its log and state store before feedback passes them."""

from __future__ import annotations

from typing import Any

import psycopg

from pgsub.common.errors import LogText
from pgsub.target.sql.jsonb import jsonb


def log_entry(level: str, text: LogText) -> dict[str, Any]:
    """Make the body of an event for the launcher's log."""
    return {"kind": "log", "level": level, "text": text}


def add(connection: psycopg.Connection, subid: int, *bodies: dict[str, Any]) -> None:
    """Record events in their order, in the open transaction if there is one."""
    with connection.cursor() as cursor:
        rows = [(subid, jsonb(connection, body)) for body in bodies]
        cursor.executemany("INSERT INTO pgsub.event (subid, body) VALUES (%s, %s)", rows)
