"""What is under way: the row of the taking side, and the subscription that was made to lead back."""

from __future__ import annotations

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.switchover.parties import SwitchoverOptions
from pgsub.common.errors import UsageError
from pgsub.common.subscription import Subscription
from pgsub.switchover import fence, journal
from pgsub.switchover.journal import Entry

#: In what the fence of the taking side replaced: whether there is a command that leads clients there.
PROMOTES = "promotes"


def way_back_of(store: StateStore, entry: Entry) -> Subscription | None:
    """Return the subscription that was made to lead back, whatever it is called; None where there is none.

    :param entry: of the taking side. It could name any subscription; which one was made for it the state store knows.
    """
    return next((one for one in store.subscriptions() if one.way_back_of == entry.subid), None)


def under_way(taking: psycopg.Connection, sub: Subscription, store: StateStore) -> Entry | None:
    """Return the row of a switchover of this very subscription that is not over, None where there is none."""
    entry = journal.of_subscription(taking, journal.TAKING, sub.subid)
    if entry is None:
        return None
    # only the way back that was made for it is removed
    if entry.phase == journal.DECLINED and way_back_of(store, entry) is None:
        return None
    return entry


def check_command(entry: Entry, options: SwitchoverOptions) -> None:
    """Check that a switchover whose fence is a command has one."""
    # guard: a fence command is not skipped
    if entry.fence == fence.COMMAND and options.fence_command is None:
        raise UsageError(
            "the switchover that is under way was begun with --fence-command",
            hint=f"Give the same command again:\n{options.command} --fence-command COMMAND",
        )


def promotes(entry: Entry) -> bool:
    """Return whether a command has still to lead clients to the taking side, by that side's row."""
    return entry.phase in (journal.PREPARED, journal.TAKEN) and bool((entry.saved or {}).get(PROMOTES))


def check_promote_command(entry: Entry, options: SwitchoverOptions) -> None:
    """Check that clients will be told where to go, if that was asked for when the switchover was begun."""
    # guard: a promote command is not skipped
    if promotes(entry) and options.promote_command is None:
        raise UsageError(
            "the switchover that is under way was begun with --promote-command",
            hint=f"Give the same command again, or true where clients are told already:\n{options.command}"
            " --promote-command COMMAND",
        )
