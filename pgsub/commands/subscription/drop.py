"""``pgsub drop``: DROP SUBSCRIPTION. Mirrors DropSubscription (subscriptioncmds.c)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psycopg

from pgsub.catalog.locks import Lock, lock_held, subscription_lock
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_target, maintenance
from pgsub.commands.subscription import passfiles
from pgsub.commands.subscription.drop_slots import drop_slots, name_kept_slots
from pgsub.commands.target_wait import TargetWait
from pgsub.common import failpoints
from pgsub.common.errors import (
    PermissionMissing,
    SlotLost,
    StateForbids,
    SubscriptionNotFound,
    TargetReplaced,
    TargetUnavailable,
)
from pgsub.common.plural import counted
from pgsub.common.query import scalar
from pgsub.common.quoting import statement, word
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import APPLY
from pgsub.launcher.mirror import held_stats
from pgsub.switchover import journal
from pgsub.target.ledger import (
    definitions,
    prepared_xacts,
    skipped_changes,
    subscriptions,
    two_phase_state,
    worker_takeover,
)
from pgsub.target.ledger.prepared_xacts import Prepared
from pgsub.target.ledger.schema import installation
from pgsub.target.ledger.skipped_changes import Usage
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import held_tables
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_privileges, origins

#: Seconds within which a launcher must release the subscription.
LET_GO_SECONDS = 40.0


def drop(
    folder: Path,
    name: str,
    *,
    if_exists: bool = False,
    keep_slot: bool = False,
    keep_target: bool = False,
    ends_switchover: bool = False,
    reporter: Reporter,
) -> None:
    """End the workers, drop the slots, roll back prepared transactions, forget progress and definition, in this order.

    After a failure, call it again to drop what is left.

    :param keep_slot: whether to keep the replication slots on the publisher.
    :param keep_target: whether to change nothing on the target because it is gone. If it answers, it is only asked
        whether the subscription was moved.
    :param ends_switchover: whether a switchover that is under way needs the subscription no more.
    :raises SubscriptionNotFound: the subscription does not exist, and ``if_exists`` is not set.
    :raises StateForbids: a switchover is under way; or with ``keep_target``, another state store has a newer
        definition, and uses the slots.
    :raises PublisherUnavailable: the slots cannot be dropped. Nothing was removed.
    :raises PermissionMissing: another role prepared transactions for the subscription. Nothing was removed.
    :raises LockHeld: a launcher does not release the subscription.
    """
    with StateStore.open(folder, create=False) as store:
        try:
            sub = store.subscription(name)
        except SubscriptionNotFound as error:
            if not if_exists:
                raise
            reporter.notice(f"{error.message}, skipping")
            return
        with _alone(store, folder, sub) as lock:
            # guard: the lost slot of a table is not taken for the main one, without "row.worker == APPLY and "
            lost = any(row.worker == APPLY and row.class_ == SlotLost.__name__ for row in store.errors(sub.subid))
            if not keep_target:
                _forget(store, sub, reporter, keep_slot=keep_slot, lost=lost)
            else:
                if not ends_switchover:
                    _check_not_moving(store, sub)
                if not keep_slot:
                    _check_newest(store, sub)
                    drop_slots(sub, None, None, reporter, lost=lost)
                reporter.notice(
                    f'the target was not changed: if it still exists, subscription {sub.subid} "{sub.name}" stays in'
                    " its schema pgsub, and what is prepared there keeps its locks"
                )
            store.remove_subscription(sub.subid)
            store.journal("drop", sub.subid, sub.name, {"keep_slot": keep_slot, "keep_target": keep_target})
            passfiles.remove(folder, sub.subid)
            lock.release(unlink=True)


@contextlib.contextmanager
def _alone(store: StateStore, folder: Path, sub: Subscription) -> Iterator[Lock]:
    """Take the subscription's lock, which a launcher releases when the subscription is disabled.

    If the drop fails, the subscription is enabled again.
    """
    lock = subscription_lock(folder, sub.subid)
    try:
        if not lock.acquire():
            store.alter(sub.subid, enabled=False)
            if not lock.acquire(LET_GO_SECONDS):
                raise lock_held(lock, f'subscription "{sub.name}"')
        yield lock
    except BaseException:
        if sub.enabled and store.subscription_by_id(sub.subid) is not None:
            store.alter(sub.subid, enabled=True)
        raise
    finally:
        lock.release()


def _forget(store: StateStore, sub: Subscription, reporter: Reporter, *, keep_slot: bool, lost: bool) -> None:
    """Remove the subscription from both servers. The ledger names the slots until they are dropped."""
    with _target(store, sub) as session, TargetWait(session, sub, reporter, None):
        try:
            with maintenance(session, store, sub):
                _remove(session, store, sub, reporter, keep_slot=keep_slot, lost=lost)
        except psycopg.Error as error:
            raise target.translate(error, "remove the subscription from the ledger") from None


def _check_not_moving(store: StateStore, sub: Subscription) -> None:
    """Refuse a subscription of a switchover as long as both subscriptions of it are there. No server is asked."""
    back = store.way_back_of(sub.subid)
    # guard: a subscription of a switchover that is under way is not dropped because a server is gone
    if back is not None or store.way_there(sub) is not None:
        raise journal.takes_part(sub.name, (back or sub).switchover)


def _check_newest(store: StateStore, sub: Subscription) -> None:
    """Refuse to drop slots that another state store uses. A target that cannot be read counts as gone.

    :raises StateForbids: the target answers, and its ledger has a newer definition.
    """
    # guard: an outdated state store drops no slot of a target that is declared gone
    unread = (TargetUnavailable, TargetReplaced, PermissionMissing, psycopg.Error)
    # a standby of the target is not the target, but tells as much as it has
    name = target.SessionName(sub.subid, "launcher", 0)
    opened = partial(target.connect, sub.target, name, replica=False, expected=sub)
    with contextlib.suppress(*unread), contextlib.closing(opened()) as session:
        ledger_privileges.check(session)
        definitions.check_newest(session, sub, partial(store.subscription_by_id, sub.subid))


def _target(store: StateStore, sub: Subscription) -> contextlib.closing[psycopg.Connection]:
    try:
        return connect_target(sub, replica=False)
    except TargetUnavailable as error:
        _check_not_moving(store, sub)
        error.hint = (
            "The progress of the subscription is kept on the target; drop it when the target is back,"
            f" or if that is gone for good:\npgsub drop {word(sub.name)} --keep-target --yes"
        )
        raise


def _remove(
    session: psycopg.Connection,
    store: StateStore,
    sub: Subscription,
    reporter: Reporter,
    *,
    keep_slot: bool,
    lost: bool,
) -> None:
    ledger_privileges.check(session)
    known = installation.installed_version(session) > 0
    tables: list[RelationState] | None = None
    skipped = Usage(0, 0, 0)
    if known:
        installation.install(session)  # a ledger of an older pgsub may lack what is read below
        outdated = definitions.outdated(session, sub, partial(store.subscription_by_id, sub.subid))
        # guard: an outdated state store drops nothing
        if outdated is not None:
            reporter.notice(f"{outdated.message}: only its definition here is dropped")
            return
        ended = sub.way_back_of is not None and store.way_there(sub) is None
        journal.check_not_needed(session, sub, enabled=sub.enabled if sub.way_back_of is None else ended)
        with contextlib.suppress(StateForbids):  # the ledger has no such subscription
            # if a new slot was being made, there may be none
            lost = subscriptions.identity(session, sub.subid).new_slot is not None or lost
            tables = subscriptions.relations(session, sub.subid)
        _warn_of_kept(session, sub, tables or (), reporter)
        skipped = skipped_changes.usage(session, sub.subid)
        worker_takeover.evict(session, sub.subid)
    found = prepared_xacts.all_prepared(session, sub.subid, ledger=known)
    prepared = [one for one in found if one.genuine]
    two_phase_state.check_finishable(prepared)
    _warn_of_foreign([one for one in found if not one.genuine], reporter)
    if tables is None and sub.slot_name is None:
        tables = []  # a subscription without a slot may have been made without a publisher
    if keep_slot:
        name_kept_slots(sub.subid, tables or (), reporter)
    else:
        drop_slots(sub, tables, session if known else None, reporter, lost=lost)
    failpoints.point("drop.after_slots")
    # Until here the subscription may continue, and the publisher decides the prepared transactions.
    # guard: a dropped subscription leaves nothing prepared
    _roll_back(session, prepared, reporter)
    origins.drop_all(session, sub.subid)
    if known:
        subscriptions.forget(session, sub.subid)
        origins.drop_all(session, sub.subid)
        _report_leftovers(session, sub, skipped, reporter)
    failpoints.point("drop.after_ledger")


def _warn_of_foreign(found: Sequence[Prepared], reporter: Reporter) -> None:
    for one in found:
        reporter.warning(
            f'prepared transaction "{one.gid}" on the target is left as it is',
            f'It is named as those of this subscription, but role "{one.owner}" prepared it, which may not write to the'
            " ledger.",
            "If it is not needed, let that role or a superuser run:\n"
            f"{statement(prepared_xacts.ROLLBACK.format(one.gid))};",
        )


def _roll_back(session: psycopg.Connection, prepared: Sequence[Prepared], reporter: Reporter) -> None:
    for one in prepared:
        two_phase_state.roll_back(session, [one])
        reporter.notice(f'rolled back prepared transaction "{one.gid}" on the target')


def _warn_of_kept(
    session: psycopg.Connection, sub: Subscription, tables: Sequence[RelationState], reporter: Reporter
) -> None:
    for row in held_stats.rows(tables, held_tables.overview(session, sub.subid)):
        if row.kept_changes:
            reporter.warning(
                f'held table "{row.schemaname}.{row.relname}" has {counted(row.kept_changes, "change")} never applied:'
                " dropped with the subscription"
            )


def _writable(session: psycopg.Connection) -> str:
    """Return the statement that allows a session to write on a target that a switchover has fenced off, or ""."""
    query = "SELECT reset_val FROM pg_catalog.pg_settings WHERE name = 'default_transaction_read_only'"
    return "SET default_transaction_read_only = off;\n" if scalar(session, query) == "on" else ""


def _report_leftovers(session: psycopg.Connection, sub: Subscription, skipped: Usage, reporter: Reporter) -> None:
    """Report what is left on the target, with the statement that removes it."""
    kept = counted(skipped.waiting + skipped.replayed, "skipped change")
    if not subscriptions.any_left(session):
        if journal.keeps(session, sub.subid):
            return
        also = f", and {kept} of this one" if skipped.waiting or skipped.replayed else ""
        reporter.notice(
            f"schema pgsub of the target no longer holds a subscription{also}",
            f"To remove the schema and all that it holds:\n{_writable(session)}DROP SCHEMA pgsub CASCADE;",
        )
    elif skipped.waiting or skipped.replayed:
        reporter.notice(
            f"{kept} of the subscription stay in schema pgsub of the target",
            f"To remove them:\nDELETE FROM pgsub.skipped_change WHERE subid = {sub.subid};",
        )
