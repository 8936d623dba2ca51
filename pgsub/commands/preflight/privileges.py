"""Missing privileges of the two roles on the tables of a subscription: one warning with its GRANT for each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pgsub.commands.preflight.compatibility import Pair
from pgsub.commands.preflight.findings import Caution, Table, concerning, grant
from pgsub.common import quoting
from pgsub.common.errors import PermissionMissing
from pgsub.common.plural import some
from pgsub.common.subscription import Subscription
from pgsub.target.session import roles


def publisher(pairs: Sequence[Pair], role: str) -> Iterator[Caution]:
    """Yield the missing privileges of the copy on the publisher. Streaming needs no privileges on tables.

    :param role: the user of the connection.
    """
    copied = [pair for pair in pairs if pair.table.mode != "none"]
    yield from _schemas([p for p in copied if not p.source.usage], "publisher", role, "Their rows cannot be copied.")
    closed = [pair.table for pair in copied if not _readable(pair)]
    yield from concerning(
        [table.name for table in closed],
        "permission denied for {} on the publisher",
        "Their rows cannot be copied.",
        "Run this on the publisher:\n"
        + grant("SELECT", "TABLE", [(one.remote.schema, one.remote.name) for one in closed], role),
    )
    yield from concerning(
        [pair.table.name for pair in copied if pair.source.row_security],
        "a row security policy applies to {} on the publisher",
        "It would filter the copy, which therefore fails.",
        "Run this on the publisher, or take the tables out of the publication:\n"
        f"ALTER ROLE {quoting.name(role)} BYPASSRLS;",
    )


def _readable(pair: Pair) -> bool:
    """Return whether COPY may read the table. For a partitioned table, its own privileges suffice."""
    wanted = {column.attnum for column in pair.table.remote.columns}
    return "SELECT" in pair.source.privileges or (bool(wanted) and wanted <= pair.source.readable)


def target(pairs: Sequence[Pair], role: str) -> Iterator[Caution]:
    """Yield the missing privileges of copy and apply on the target.

    :param role: the user of the session.
    """
    unusable: dict[str, list[Pair]] = {}
    lacking: dict[tuple[str, tuple[str, ...]], list[Pair]] = {}
    for pair in pairs:
        acting = pair.table.target.acts_as or role
        if not pair.target.usage:
            unusable.setdefault(acting, []).append(pair)
        missing: dict[str, list[str]] = {}
        for word in _needed(pair):
            if word not in pair.target.privileges:  # TRUNCATE is done as the user
                missing.setdefault(role if word == "TRUNCATE" else acting, []).append(word)
        for grantee, words in missing.items():
            lacking.setdefault((grantee, tuple(words)), []).append(pair)
    yield from _compared(pairs, role)
    for acting, concerned in unusable.items():
        yield from _schemas(concerned, "target", acting, "Nothing can be written to them.")
    for (grantee, privileges), concerned in lacking.items():
        listed = ", ".join(privileges)
        yield from concerning(
            [pair.table.name for pair in concerned],
            "permission denied for {} on the target",
            f"What the publications publish needs {listed}.",
            "Run this on the target:\n"
            + grant(listed, "TABLE", [(p.table.target.schema, p.table.target.name) for p in concerned], grantee),
            stops=True,
        )


def _compared(pairs: Sequence[Pair], role: str) -> Iterator[Caution]:
    """Yield the missing privileges to compare adopted tables, which the user reads even if the owner changes them."""
    adopted = [pair for pair in pairs if pair.table.mode == "adopt" and pair.table.target.acts_as is not None]
    yield from _schemas(
        [p for p in adopted if not p.target.own_usage], "target", role, "Their rows cannot be compared."
    )
    closed = [pair for pair in adopted if not (pair.target.own_select or _sent(pair) <= pair.target.readable)]
    yield from concerning(
        [pair.table.name for pair in closed],
        "permission denied for {} on the target",
        "Their rows are compared by the user of --target itself, which needs SELECT.",
        "Run this on the target:\n"
        + grant("SELECT", "TABLE", [(p.table.target.schema, p.table.target.name) for p in closed], role),
    )


def _sent(pair: Pair) -> set[int]:
    """Return the target's columns that are compared."""
    names = set(pair.sent)
    return {column.attnum for column in pair.target.columns.values() if column.name in names}


def owners(tables: Sequence[Table], sub: Subscription) -> Iterator[Caution]:
    """Yield owners whose role pgsub cannot assume, and differences from the server that follow.

    Each writable table gets the role that will write it.
    """
    refused: dict[str, tuple[PermissionMissing, list[str]]] = {}
    strange: list[Table] = []
    for table in tables:
        try:
            table.target = roles.with_role(table.target, sub)
        except PermissionMissing as error:
            text = error.message
            if error.sqlstate == roles.FILTERED:
                text = "a row security policy of the target applies to {}"
            refused.setdefault(text, (error, []))[1].append(table.name)
            continue
        if table.target.access == "none" and not sub.run_as_owner:
            strange.append(table)
    for text, (first, names) in refused.items():
        detail = f"Copy and apply stop at {'this table' if len(names) == 1 else 'these tables'}."
        if first.sqlstate == roles.FILTERED:
            detail = "A role cannot replicate into relations with row-level security enabled."
        yield from concerning(names, text, detail, first.hint, stops=True)
    if strange:
        user = strange[0].target.user
        listed = sorted({table.target.owner for table in strange})
        quoted = ", ".join(quoting.name(owner) for owner in listed)
        yield from concerning(
            [table.name for table in strange],
            f'changes of {{}} on the target are made as role "{user}", not as the owner',
            f"The role is not a member of {some(listed)}: code of the tables (triggers, rules, expressions) runs"
            " with its rights.",
            f"Allow it to act as the owner, or accept it with --run-as-owner:\nGRANT {quoted} TO {quoting.name(user)};",
        )


def _needed(pair: Pair) -> list[str]:
    """Return the privileges needed on the target's table, in the order of a GRANT."""
    finds = pair.actions.updates or pair.actions.deletes
    chunked = pair.table.mode == "chunked"  # finds rows, locks the table, and removes rows of failed attempts
    adopted = pair.table.mode == "adopt"
    needed = (
        ("SELECT", finds or chunked or adopted),
        ("INSERT", True),
        ("UPDATE", pair.actions.updates or adopted),
        ("DELETE", pair.actions.deletes or chunked or adopted),
        ("TRUNCATE", pair.actions.truncates),
    )
    return [word for word, need in needed if need]


def _schemas(pairs: Sequence[Pair], server: str, role: str, consequence: str) -> Iterator[Caution]:
    schemas = sorted({pair.table.remote.schema for pair in pairs})
    yield from concerning(
        [pair.table.name for pair in pairs],
        f"permission denied for {{}} on the {server}",
        f"Published tables are in it. {consequence}",
        f"Run this on the {server}:\n{grant('USAGE', 'SCHEMA', schemas, role)}",
        schemas=schemas,
        stops=True,
    )
