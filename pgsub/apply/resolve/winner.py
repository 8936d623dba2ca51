"""Decides by a rule which side of a conflict wins. The server's conflict.c only reports conflicts."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import psycopg

from pgsub.common import conflict_rules as rules
from pgsub.common.conflict_rules import Rule
from pgsub.target.ledger import subscriptions
from pgsub.target.sql.conflict_search import ConflictingRow


class Action(enum.Enum):
    """The outcome for the remote change; the value is the word in the conflict's record."""

    STOP = "stopped"
    APPLY = "applied"
    KEEP = "kept"
    SKIP = "skipped"


_FIXED = {
    rules.ERROR: Action.STOP,
    rules.SKIP: Action.SKIP,
    rules.APPLY_REMOTE: Action.APPLY,
    rules.KEEP_LOCAL: Action.KEEP,
}


def decide(
    connection: psycopg.Connection, subid: int, rule: Rule | None, commit_ts: int, local: Sequence[ConflictingRow]
) -> Action:
    """Decide by a rule whether to apply a remote change; without a rule it is applied.

    :param connection: a target session; the caller opens and ends transactions.
    :param commit_ts: commit time of the remote transaction, in microseconds since 2000.
    :param local: the existing rows in conflict.
    """
    if rule is None:
        return Action.APPLY
    return evaluate(rule.resolution, commit_ts, local, subid, lambda: tie(connection, subid))


def evaluate(
    resolution: str, remote_at: int, local: Sequence[ConflictingRow], subid: int, tie: Callable[[], Action]
) -> Action:
    """Evaluate a resolution.

    With last_update_wins the remote change must be newer than every conflicting row. A row without a commit time is
    older: it was written before commit times were tracked, or by this transaction. A row that the subscription itself
    wrote is older too, because it came before on the same stream.

    :param remote_at: commit time of the remote transaction, in microseconds since 2000.
    :param local: the existing rows in conflict.
    :param tie: called if the newest row has the same commit time as the remote change, to the microsecond.
    """
    if resolution != rules.LAST_UPDATE_WINS:
        return _FIXED[resolution]
    newest = max((hit.at for hit in local if hit.at is not None and not own(hit, subid)), default=None)
    if newest is None or newest < remote_at:
        return Action.APPLY
    return tie() if newest == remote_at else Action.KEEP


def own(hit: ConflictingRow, subid: int) -> bool:
    """Return whether the subscription itself wrote a row, by its replication origin."""
    name = f"pgsub_{subid}"
    return hit.origin is not None and (hit.origin == name or hit.origin.startswith(f"{name}_"))


def tie(connection: psycopg.Connection, subid: int) -> Action:
    """Decide a tie by the identities of both databases: see :func:`tied`."""
    known = subscriptions.identity(connection, subid)
    row = connection.execute(
        "SELECT system_identifier::text, pg_catalog.current_database()::text FROM pg_catalog.pg_control_system()"
    ).fetchone()
    assert row is not None
    return tied((known.system_identifier or "0", known.publisher_dbname or ""), (row[0], row[1]))


def tied(remote: tuple[str, str], local: tuple[str, str]) -> Action:
    """Decide between two changes with the same time: on both sides, the database with the greater identity wins.

    :param remote: system identifier and name of the publisher's database; ``local`` are those of the target's.
    """
    if remote == local:
        return Action.STOP  # copies of one cluster: neither side knows which of them it is
    first, second = ((int(system), name) for system, name in (remote, local))
    return Action.APPLY if first > second else Action.KEEP
