"""Changes that the publisher has still to send when the publications of a subscription change.

They are decoded with the publications of the next START_REPLICATION, each as it was when the change was made. A table
that was moved to another publication meanwhile is not in that one then, so its changes would not be sent. The server's
own subscriber loses them. Before 18, the publisher ends with an error at a change from before a publication was
created, and never gets past it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pgsub.catalog.store import StateStore
from pgsub.commands.alter.options import AlterOptions
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve.apply_to_point import served
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.common.errors import StateForbids, TimeoutExpired
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.publisher.publication import missing_publications
from pgsub.target.ledger.subscriptions import RelationState

#: Seconds within which apply must pass the present position.
CONFIRM_SECONDS = 30.0
#: From this version on, the publisher continues without a publication that does not exist yet.
_CONTINUES_SINCE = 180000


class Backlog(NamedTuple):
    """Changes that apply must pass before the publications change.

    :ivar position: the publisher's present position.
    :ivar idle: there is nothing before it that is published.
    :ivar tables: tables that stay and still catch up by slots of their own.
    :ivar missing: the publisher sends nothing, because a publication is missing there.
    """

    position: int
    idle: bool
    tables: frozenset[int] = frozenset()
    missing: bool = False


def find(
    source: publisher.Connection,
    before: Subscription,
    after: Subscription,
    staying: Callable[[], Sequence[RelationState]],
) -> Backlog | None:
    """Return the backlog that matters, None if there is none.

    :param staying: returns the tables that stay subscribed. It is called only if a publication is left.
    """
    removed = set(before.publications) - set(after.publications)
    added = set(after.publications) - set(before.publications)
    refuses = source.info.server_version < _CONTINUES_SINCE
    tables = staying() if removed else ()
    if before.slot_name is None or not (tables or (added and refuses)):
        return None
    state = slots.slot_state(source, before.slot_name)
    behind = frozenset(one.srrelid for one in tables if one.srsubstate in ("d", "f"))
    if state is None or ((state.confirmed_flush_lsn or 0) >= state.current_lsn and not behind):
        return None
    if refuses and missing_publications(source, before.publications):
        return Backlog(state.current_lsn, idle=False, missing=True)
    idle = not (state.active or behind or slots.has_changes(source, state.name, before.publications))
    return Backlog(state.current_lsn, idle, behind)


def apply_first(
    backlog: Backlog, store: StateStore, sub: Subscription, options: AlterOptions, reporter: Reporter
) -> None:
    """Let apply pass the position with the present publications, by a launcher of this process if there is no other.

    :raises StateForbids: it does not in time, and changes would be lost.
    :raises PgsubError: apply is stopped by an error.
    """
    if backlog.missing:
        reporter.warning(
            "the publisher sends nothing since one of the publications is missing there",
            "Changes of tables that were moved to another publication since then may not be sent.",
            f"Compare the tables afterwards:\npgsub verify {word(sub.name)} --repair",
        )
    if backlog.missing or backlog.idle:
        return
    seconds = CONFIRM_SECONDS if options.seconds_left is None else options.seconds_left
    passed = WaitOptions(sub.name, options.state_dir, "lsn", backlog.position, seconds)
    try:
        # guard: publications do not change before their changes are applied
        with served(store, options.state_dir, sub, reporter):
            wait(passed)
            wait(replace(passed, condition="synced", tables=backlog.tables))
    except TimeoutExpired:
        raise StateForbids(
            "changes have still to be applied that the present publications send",
            detail=f"Apply is not known to be past {format_lsn(backlog.position)}. The new publications may not have"
            " been there, or not have had their tables, when the changes were made.",
            hint="Let apply catch up first, by the second command if no pgsub run serves the subscription:\n"
            f"pgsub wait {word(sub.name)} --for caught-up\npgsub run {word(sub.name)} --until-caught-up",
        ) from None
