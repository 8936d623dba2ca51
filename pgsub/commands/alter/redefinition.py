"""The definition of a subscription: one write, first to the ledger and then to the state store.

A launcher notices the write of the state store at once, and ends the workers of the old definition.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg

from pgsub.catalog.locks import lock_held, subscription_lock
from pgsub.catalog.rows import ServerRow
from pgsub.catalog.store import StateStore
from pgsub.commands.alter.connections import NewConnections
from pgsub.commands.sessions import check_unchanged
from pgsub.commands.subscription import definition, definition_change, passfiles
from pgsub.common import failpoints
from pgsub.common.connections import passfile
from pgsub.common.errors import PgsubError, StateStoreError
from pgsub.common.subscription import Subscription
from pgsub.target.ledger import subscriptions

#: Fields that the journal does not show.
_NOT_SHOWN = ("connection", "target", "generation", "unrefreshed")
#: Seconds within which a launcher must end the workers of the old definition.
LET_GO_SECONDS = 45.0
#: Seconds after which even a launcher that is starting its workers has noticed a change.
NOTICE_SECONDS = 1.0


def write(store: StateStore, sub: Subscription, fields: Mapping[str, Any]) -> None:
    """Write changed fields to the state store, and to its journal.

    :raises PgsubError: the subscription is not the one that was read.
    """
    shown = {name: value for name, value in fields.items() if name not in _NOT_SHOWN}
    shown |= dict.fromkeys(fields.keys() & {"connection", "target"}, "changed")
    with store.batch():
        check_unchanged(store, sub)
        store.alter(sub.subid, **fields)
        if fields.get("slot_name", "") is None:
            store.put_slot(sub.subid, None)
        if fields.get("sequences") is False:
            store.put_sequences(sub.subid, [])
        store.journal("alter", sub.subid, fields.get("name", sub.name), shown)


@contextlib.contextmanager
def redefined(
    session: psycopg.Connection, store: StateStore, sub: Subscription, fields: dict[str, Any], conns: NewConnections
) -> Iterator[None]:
    """Write the definition, first to the ledger. Undo this if a later step is refused."""
    present = sub
    try:
        for side, params in conns.params.items():
            if side in conns.files:
                passfile.store(params, conns.files[side])
            name = "connection" if side == "publisher" else "target"
            fields[name] = definition.public(params, conns.files.get(side, Path()))
        _follow(session, sub, replace(sub, **fields))
        failpoints.point("alter.after_ledger")
        write(store, sub, fields)
        present = replace(sub, **fields)
        with contextlib.suppress(psycopg.Error, StateStoreError):  # the launcher does this, too
            definition_change.record(session, store, sub.subid)
        failpoints.point("alter.after_definition")
        yield
    except PgsubError:  # other errors may come after a change, so the new definition stays
        with contextlib.suppress(PgsubError, psycopg.Error):  # the user must see the original error
            if present is not sub:
                store.alter(sub.subid, **{name: getattr(sub, name) for name in fields})
                present = sub
                definition_change.record(session, store, sub.subid)
            _follow(session, replace(sub, **fields), sub)
        raise
    finally:
        passfiles.remove(store.path.parent, sub.subid, present.connection, present.target)


def _follow(session: psycopg.Connection, before: Subscription, after: Subscription) -> None:
    if (before.name, before.slot_name) != (after.name, after.slot_name):
        subscriptions.redefine(session, after.subid, after.name, after.slot_name)


def await_old_workers(store: StateStore, folder: Path, sub: Subscription, before: ServerRow | None) -> None:
    """Wait until the launcher has ended the workers of the old definition, or nobody serves the subscription.

    :param before: the server's row from before the change. The launcher rewrites it when it restarts the workers.
    """
    lock = subscription_lock(folder, sub.subid)
    began = time.monotonic()
    while lock.holder() is not None:
        now, waited = store.server(sub.subid), time.monotonic() - began
        if now != before and (before is not None or waited > NOTICE_SECONDS):
            return
        if now is None and waited > NOTICE_SECONDS:
            return
        if waited > LET_GO_SECONDS:
            raise lock_held(lock, f'subscription "{sub.name}"')
        time.sleep(0.05)
