"""What the two roles lack on the tables of a subscription, each kind of privilege as one warning with its GRANT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from psycopg import sql

from pgsub.commands.preflight.findings import Warned, counted, grant, listing
from pgsub.commands.preflight.fit import Pair


def publisher(pairs: Sequence[Pair], role: str) -> Iterator[Warned]:
    """What the copy needs on the publisher; streaming needs no privilege on tables.

    :param role: user of the connection.
    """
    copied = [pair for pair in pairs if pair.table.mode != "none"]
    yield from _schemas([p for p in copied if not p.source.usage], "publisher", role, "Their rows cannot be copied.")
    closed = [pair for pair in copied if not _readable(pair)]
    if closed:
        names = [pair.table.name for pair in closed]
        yield Warned(
            f"permission denied for {counted(names)} on the publisher",
            f"Their rows cannot be copied.{listing(names)}",
            "Run this on the publisher:\n"
            + grant("SELECT", "TABLE", [(p.table.remote.schema, p.table.remote.name) for p in closed], role),
            tables=tuple(names),
        )
    filtered = [p.table.name for p in copied if p.source.row_security]
    if filtered:
        yield Warned(
            f"a row security policy applies to {counted(filtered)} on the publisher",
            f"It would filter the copy, which therefore fails.{listing(filtered)}",
            "Run this on the publisher, or take the tables out of the publication:\n"
            f"ALTER ROLE {sql.Identifier(role).as_string()} BYPASSRLS;",
            tables=tuple(filtered),
        )


def _readable(pair: Pair) -> bool:
    """As COPY asks; of a partitioned table its own privileges suffice: without its partitions' it is read whole."""
    wanted = {column.attnum for column in pair.table.remote.columns}
    return "SELECT" in pair.source.privileges or (bool(wanted) and wanted <= pair.source.readable)


def target(pairs: Sequence[Pair], role: str) -> Iterator[Warned]:
    """What copy and apply need on the target.

    :param role: user of the session.
    """
    unusable = [pair for pair in pairs if not pair.target.usage]
    yield from _schemas(unusable, "target", role, "Nothing can be written to them.")
    lacking: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        missing = tuple(word for word in _needed(pair) if word not in pair.target.privileges)
        if missing:
            lacking.setdefault(missing, []).append(pair)
    for privileges, concerned in lacking.items():
        names = [pair.table.name for pair in concerned]
        words = ", ".join(privileges)
        yield Warned(
            f"permission denied for {counted(names)} on the target",
            f"What the publications publish needs {words}.{listing(names)}",
            "Run this on the target:\n"
            + grant(words, "TABLE", [(p.table.target.schema, p.table.target.name) for p in concerned], role),
            tables=tuple(names),
        )
    guarded = [pair.table.name for pair in pairs if pair.target.row_security]
    if guarded:
        yield Warned(
            f"a row security policy of the target applies to {counted(guarded)}",
            f"A role cannot replicate into relations with row-level security enabled.{listing(guarded)}",
            f"Run this on the target:\nALTER ROLE {sql.Identifier(role).as_string()} BYPASSRLS;",
            tables=tuple(guarded),
        )


def _needed(pair: Pair) -> list[str]:
    """Privileges on the target's table, in the order of a GRANT."""
    finds = pair.actions.updates or pair.actions.deletes
    chunked = pair.table.mode == "chunked"  # looks for rows, locks the table, removes what a failed attempt left
    needed = (
        ("SELECT", finds or chunked),
        ("INSERT", True),
        ("UPDATE", pair.actions.updates),
        ("DELETE", pair.actions.deletes or chunked),
        ("TRUNCATE", pair.actions.truncates),
    )
    return [word for word, need in needed if need]


def _schemas(pairs: Sequence[Pair], server: str, role: str, consequence: str) -> Iterator[Warned]:
    schemas = sorted({pair.table.remote.schema for pair in pairs})
    if schemas:
        yield Warned(
            f"permission denied for {counted(schemas, 'schema')} on the {server}",
            f"Published tables are in it. {consequence}{listing(schemas, 'Schemas')}",
            f"Run this on the {server}:\n{grant('USAGE', 'SCHEMA', schemas, role)}",
            tables=tuple(pair.table.name for pair in pairs),
        )
