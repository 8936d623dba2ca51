"""Finds the subscribed table that a user names: refresh --resync, alter --hold and --release, verify --table."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from pgsub.common.errors import StateForbids, UsageError
from pgsub.common.plural import some
from pgsub.target.ledger.subscriptions import RelationState


def named(session: psycopg.Connection, text: str, relations: Sequence[RelationState]) -> RelationState:
    """Find the table of that name. The text is matched literally first, then as an SQL name."""
    matching = [r for r in relations if f"{r.schemaname}.{r.relname}" == text]
    if not matching:
        try:
            row = session.execute("SELECT pg_catalog.parse_ident(%s)", (text,)).fetchone()
        except psycopg.errors.InvalidParameterValue:
            row = None
        parts = list(row[0]) if row else []
        if len(parts) != 2:
            meant = [f"{one.schemaname}.{one.relname}" for one in relations if one.relname == text]
            example = meant[0] if len(meant) == 1 else "public.orders"
            raise UsageError(f'"{text}" is not a qualified table name', hint=f"Name schema and table, as in {example}.")
        matching = [r for r in relations if [r.schemaname, r.relname] == parts]
    if not matching:
        raise StateForbids(
            f'table "{text}" is not part of the subscription',
            detail=f"It has {some([f'{one.schemaname}.{one.relname}' for one in relations]) or 'no table'}.",
            hint="Name one of them, or subscribe to it first: add it to a publication, and refresh the subscription.",
            sqlstate="42704",
        )
    if len(matching) > 1:
        raise UsageError(f'table name "{text}" is ambiguous', hint='Quote its parts, as in public."a.b".')
    return matching[0]
