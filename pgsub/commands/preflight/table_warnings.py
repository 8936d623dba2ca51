"""Warnings of tables that fit their targets: some rows may not arrive, not stay, or have side effects."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import psycopg

from pgsub.commands.preflight import adoption
from pgsub.commands.preflight.findings import Caution, Table, concerning
from pgsub.common import conflict_rules, quoting
from pgsub.common.plural import some
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import publication
from pgsub.publisher.server_errors import translating
from pgsub.publisher.tables import Name, RemoteTable
from pgsub.target.session import ledger_guard
from pgsub.target.sql.statement_builder import table_name

#: Maximum number of statements, or of tables in a command, in a hint.
_STATEMENTS = 5


def rules_that_fire(tables: Sequence[Table]) -> Iterator[Caution]:
    """Warn of rules that fire here. They do not in the server's apply worker, which executes no statements."""
    ruled = [table for table in tables if table.target.rules]
    names = [quoting.literal(quoting.statement(table_name(table.target))) for table in ruled]
    listed = ", ".join(f"{name}::regclass" for name in names)
    yield from concerning(
        [table.name for table in ruled],
        "rules of {} on the target fire",
        "They do not in the server's subscriber. If a rule does something INSTEAD of an INSERT, the row is not"
        " inserted, and no conflict is reported.",
        "Disable those that are not meant for replicated changes (ALTER TABLE ... DISABLE RULE); this lists them on the"
        f" target:\nSELECT ev_class::regclass, rulename FROM pg_rewrite WHERE ev_class IN ({listed});",
    )


def values_left_out(tables: Sequence[RemoteTable], rules: Sequence[str]) -> Iterator[Caution]:
    """Warn of rules by which an update wins that may leave out large values, so that those of the loser stay.

    Replica identity FULL sends them in the old row, where apply finds them only if last_update_wins decides.
    """
    for rule in map(conflict_rules.parse, rules):
        if not rule.lets_updates_win:
            continue
        timed = rule.resolution in conflict_rules.BY_TIME
        found = {
            f"{table.schema}.{table.name}": leaves
            for table in tables
            if rule.table in ("", f"{table.schema}.{table.name}")
            and (leaves := [leaf for leaf in table.leaving_out if not timed or leaf.replica_identity != "f"])
        }
        some_leaves = [leaf for leaves in found.values() for leaf in leaves][:_STATEMENTS]
        names = [quoting.name(leaf.schema, leaf.name) for leaf in some_leaves]
        altered = "".join(f"\nALTER TABLE {name} REPLICA IDENTITY FULL;" for name in names)
        yield from concerning(
            list(found),
            "updates of {} on the publisher leave out large values that they do not change",
            f'If such an update wins by the rule "{rule}", the target keeps its own values in these columns. Two'
            " databases that subscribe to each other may stay different.",
            "Compare them with pgsub verify" + (f", or run this on the publisher:{altered}" if timed else "."),
            most=5,
        )


_LEAVES = """
SELECT k.oid::bigint,
       CASE WHEN k.relkind = 'p' THEN coalesce(l.unlogged, false) ELSE k.relkind = 'r' AND k.relpersistence = 'u' END,
       k.relkind = 'p' AND l.oid IS NULL
  FROM pg_catalog.pg_class k LEFT JOIN (
       SELECT p.oid, pg_catalog.bool_or(c.relpersistence = 'u' AND c.relkind = 'r') AS unlogged
         FROM pg_catalog.pg_class p CROSS JOIN pg_catalog.pg_partition_tree(p.oid) t
         JOIN pg_catalog.pg_class c ON c.oid = t.relid AND c.relkind <> 'p'
        WHERE p.relkind = 'p' AND p.oid = ANY (%(oids)s) GROUP BY p.oid) AS l ON l.oid = k.oid
 WHERE k.oid = ANY (%(oids)s)
"""


def where_rows_go(session: psycopg.Connection, tables: Sequence[Table]) -> Iterator[Caution]:
    """Warn of unlogged tables, and of partitioned tables without a partition."""
    rows = session.execute(_LEAVES, {"oids": [table.target.oid for table in tables]}).fetchall() if tables else []
    found = {oid: answers for oid, *answers in rows}
    unlogged = [table for table in tables if found.get(table.target.oid, (False,))[0]]
    logged = [f"ALTER TABLE {quoting.statement(table_name(t.target))} SET LOGGED;" for t in unlogged[:1]]
    yield from concerning(
        [table.name for table in unlogged],
        "{} on the target [is|are] unlogged",
        "A crash of the target empties unlogged tables, and their rows do not come again.",
        "\n".join(["Run this on the target:", *logged]),
    )
    yield from concerning(
        [table.name for table in tables if found.get(table.target.oid, (False, False))[1]],
        "{} on the target [has|have] no partition",
        "Every row fails.",
        "Create the partitions on the target.",
    )


def not_empty(tables: Sequence[Table], sub: Subscription) -> Iterator[Caution]:
    """Warn of tables that keep their own rows beside the copied ones.

    Once they are subscribed, an ``--adopt`` that does not name them has no effect on them.
    """
    names = [table.name for table in tables if table.empty is False and table.mode != adoption.MODE]
    listed = names if len(names) <= _STATEMENTS else ["TABLE"]
    resync = " ".join(f"--resync {word(name)}" for name in listed)
    return concerning(
        names,
        "{} on the target [is|are] not empty",
        "The publisher's rows are added to those that are there; a key that is there already is an error of the"
        " table's synchronization.",
        "Empty the tables. Where they have the publisher's rows already, add --adopt: what differs is brought, and what"
        " the publisher does not have is deleted. For tables that are subscribed by then, the command is:\n"
        f"pgsub refresh {word(sub.name)} {resync} --adopt",
        most=len(tables),
    )


def foreign_partitions(tables: Sequence[Table]) -> Iterator[Caution]:
    """Warn of tables that COPY cannot read completely."""
    return concerning(
        [table.name for table in tables if table.remote.foreign_partitions],
        "{} on the publisher [has|have] a foreign table as a partition, and cannot be copied",
        "Rows of another server are neither read nor replicated.",
        "Detach the partition, or create the subscription with --no-copy-data.",
    )


def rows_of_other_origins(
    connection: publisher.Connection, sub: Subscription, known: Collection[Name]
) -> Iterator[Caution]:
    """Warn, like the server, of tables that the publisher itself receives from other publishers."""
    # Planning a query of a table evaluates its index expressions, so an untrusted ledger is not read.
    with translating(connection, "look at the ledger of the publisher"):
        ledger = ledger_guard.trusted(connection, foreign=True)
    if ledger is False:
        yield Caution(
            "schema pgsub of the publisher is not read: its owner is not trusted, or it has code of others",
            "Which tables subscriptions of pgsub write there is not known.",
            "If it is a ledger, look there which tables its subscriptions have. If nobody knows it, drop it.",
        )
    others = publication.tables_with_other_origins(connection, sub.publications, known, ledger=ledger is True)
    names = sorted({f"{one.schema}.{one.name}" for one in others})
    if names:
        yield Caution(
            f'subscription "{sub.name}" requested copy_data with origin = NONE but might copy data that had a different'
            " origin",
            f"The publisher subscribes to other publishers for: {some(names, len(names))}.",
            "Verify that initial data copied from the publisher tables did not come from other origins.",
            tables=tuple(names),
        )
