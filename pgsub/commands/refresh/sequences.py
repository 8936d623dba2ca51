"""``pgsub refresh --sequences``: ALTER SUBSCRIPTION … REFRESH SEQUENCES, from a publisher of any version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import ledger_session, maintenance, verified_publisher
from pgsub.common.errors import StateForbids, TargetSchemaError, TimeoutExpired, log_text
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher.faults import translating
from pgsub.sequences import writing
from pgsub.sequences.comparison import Compared, Obstacle, Wanted, compare
from pgsub.sequences.definition import Position
from pgsub.target.ledger import subscriptions


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """The options of ``refresh --sequences``."""

    name: str
    state_dir: Path
    allow_backward: bool = False
    dry_run: bool = False


def refresh_sequences(options: SequenceOptions, *, reporter: Reporter) -> None:
    """Set the sequences of a subscription to the publisher's values.

    Those in whose way nothing stands are set whatever becomes of the others, as in the server.

    :raises StateForbids: the subscription is disabled.
    :raises TargetSchemaError: a sequence is missing, is defined otherwise, or may not be read or written.
    :raises TimeoutExpired: others hold a sequence in open transactions.
    """
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        if not sub.enabled:
            raise StateForbids(
                "ALTER SUBSCRIPTION ... REFRESH SEQUENCES is not allowed for disabled subscriptions",
                hint=f"Enable it first:\npgsub enable {word(sub.name)}",
                sqlstate="55000",
            )
        with ledger_session(sub) as session, maintenance(session, store, sub):
            with verified_publisher(session, sub, sub.connection) as source:
                found = _compared(session, source, sub)
            if options.dry_run:
                _report_dry_run(found, reporter)
                busy = []
            else:
                busy = _set(session, sub, found.wanted, options, reporter, store)
    if found.obstacles:
        raise _failed(sub, found.obstacles)
    if busy:
        raise TimeoutExpired(
            "timeout while waiting for sequences that open transactions of the target took values of",
            detail=f"Sequences: {', '.join(busy)}. The others were set.",
            hint=f"Wait until the transactions end, and try again:\npgsub refresh {word(sub.name)} --sequences",
        )


def _compared(session: psycopg.Connection, source: publisher.Connection, sub: Subscription) -> Compared:
    relations = subscriptions.relations(session, sub.subid)
    tables = [one.recorded or (one.schemaname, one.relname) for one in relations]
    with translating(source, "fetch sequence info from publisher"):
        return compare(source, session, tables, sub.publications, run_as_owner=sub.run_as_owner)


def _set(
    session: psycopg.Connection,
    sub: Subscription,
    wanted: Sequence[Wanted],
    options: SequenceOptions,
    reporter: Reporter,
    store: StateStore,
) -> list[str]:
    """Set them one by one; returns the names of those that others hold."""
    changed: list[str] = []
    busy: list[str] = []
    for one in wanted:
        try:
            before, moved = writing.bring_up(
                session, one, run_as_owner=sub.run_as_owner, allow_backward=options.allow_backward
            )
        except psycopg.errors.LockNotAvailable:
            busy.append(f'"{one.local.shown}"')
            reporter.warning(f'sequence "{one.local.shown}" was not set: an open transaction took values of it')
            continue
        if moved:
            changed.append(one.local.shown)
            reporter.log("LOG", log_text(f'sequence "{one.local.shown}" was set to {one.position.last_value}'))
        elif (ahead := _ahead(before, one)) > 0:
            reporter.notice(f'sequence "{one.local.shown}" is ahead of the publisher by {ahead} and was left as it is')
    store.journal("refresh", sub.subid, sub.name, {"sequences": changed})
    reporter.notice(f'subscription "{sub.name}": sequences: {len(changed)} set, {len(wanted) - len(changed)} left')
    return busy


def _ahead(before: Position, one: Wanted) -> int:
    return before.ahead_of(one.position, one.definition.increment)


def _report_dry_run(found: Compared, reporter: Reporter) -> None:
    for one in found.wanted:
        reporter.notice(f'sequence "{one.local.shown}" would be brought to {one.position.last_value} if it is behind')


def _failed(sub: Subscription, obstacles: Sequence[Obstacle]) -> TargetSchemaError:
    hints = []
    for side in ("publisher", "target"):
        statements = [text for one in obstacles if one.side == side for text in one.statements]
        if statements:
            hints += [f"Run this on the {side}:", *statements]
    return TargetSchemaError(
        f'logical replication sequence synchronization failed for subscription "{sub.name}"',
        detail="\n".join(one.message for one in obstacles),
        hint="\n".join([*hints, "Then try again:", f"pgsub refresh {word(sub.name)} --sequences"]),
        sqlstate="55000",
    )
