"""``pgsub skip-lsn --conflict``: a conflict rule with a limit, for large numbers of conflicts.

The rule skips and keeps the next changes of a table with that conflict, up to the limit. The rest of their transactions
is applied. Then the rule expires. It is stored in the ledger, where apply reads it at its next transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import ledger_session
from pgsub.commands.status.conflicts import check_type
from pgsub.common.conflict_rules import Rule
from pgsub.common.errors import StateForbids
from pgsub.common.plural import counted
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.target.ledger import skip, subscriptions
from pgsub.target.ledger.tables import subscription_tables
from pgsub.target.session import connect as target
from pgsub.target.session import origins


def skip_conflicts(
    folder: Path, name: str, rule: Rule, *, reporter: Reporter, confirm: Callable[[str, Rule], None]
) -> tuple[Rule, ...]:
    """Set a rule. It replaces a rule for the same table and type.

    :param rule: a rule with a limit.
    :param confirm: called with the subscription's name before the rule is set. It may raise an exception to refuse.
    :return: all rules that are now set.
    :raises UsageError: the type does not exist.
    :raises StateForbids: the table is not subscribed, or the target cannot detect the type.
    """
    check_type(rule.conflict)
    with StateStore.open(folder, create=False) as store:
        sub = store.subscription(name)
        with ledger_session(store, sub, reporter) as session:
            _check(session, sub, rule)
            confirm(sub.name, rule)
            with subscription_tables.maintenance(session, sub.subid, sub.name):
                rules = _set(session, store, sub, rule)
    changes = counted(rule.limit or 0, "change")
    reporter.notice(f'subscription "{sub.name}" skips the next {changes} of table "{rule.table}" with {rule.conflict}')
    if not sub.enabled:
        reporter.notice(f"it holds once the subscription is enabled: pgsub enable {word(sub.name)}")
    return rules


def _check(session: psycopg.Connection, sub: Subscription, rule: Rule) -> None:
    tables = {f"{one.schemaname}.{one.relname}" for one in subscriptions.relations(session, sub.subid)}
    if rule.table not in tables:
        raise StateForbids(
            f'table "{rule.table}" is not subscribed by "{sub.name}"',
            hint=f"See which are:\npgsub status {word(sub.name)}",
            sqlstate="42704",
        )
    seen = origins.allowed(session) and target.tracks_commits(session)
    if rule.conflict.endswith("_origin_differs") and not seen:
        raise StateForbids(
            f"{rule.conflict} cannot be detected on this target",
            detail="Its detection requires track_commit_timestamp and the privilege to use replication origins.",
            hint="Set it on the target, and restart the target:\nALTER SYSTEM SET track_commit_timestamp = on;",
            sqlstate="55000",
        )


def _set(session: psycopg.Connection, store: StateStore, sub: Subscription, rule: Rule) -> tuple[Rule, ...]:
    """Set the rule. The journal gets an entry first."""
    before = skip.pending_rules(session, sub.subid)
    rules = (*(one for one in before if one.place != rule.place), rule)
    detail = {"conflict": rule.conflict, "table": rule.table, "limit": rule.limit, "previous": skip.shown(None, before)}
    with store.journal_attempt("skip-lsn", sub, detail) as attempt:
        skip.set_rules(session, sub.subid, rules)
    with store.batch():
        store.alter(sub.subid, skips=skip.shown(skip.pending(session, sub.subid), rules))
        store.journal_done(attempt)
    return rules
