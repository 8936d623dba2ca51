"""Decides whether a slot of the publisher may be dropped: the server knows no owner of a slot.

Only a slot that the state store names is taken for the subscription's, and only while nothing shows another owner.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psycopg

from pgsub.common.errors import PgsubError, StateForbids
from pgsub.common.query import row
from pgsub.common.quoting import literal, word
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import database, slots
from pgsub.publisher.slots import SlotState
from pgsub.target.ledger.schema import installation

DUPLICATE_OBJECT = "42710"
#: Seconds for which a refused worker may hold the slot.
_BUSY_SECONDS = 5.0
_HOLDER = "SELECT application_name FROM pg_catalog.pg_stat_activity WHERE pid = %s"
_USER = """
SELECT subname, state_store FROM pgsub.subscription
 WHERE slot_name = %s AND system_identifier = %s ORDER BY subid LIMIT 1
"""


def is_foreign(slot: SlotState, dbname: str) -> bool:
    """Return whether a slot cannot belong to a subscription of this database."""
    return slot.plugin != "pgoutput" or slot.database != dbname


def foreign(slot: SlotState, hint: str) -> StateForbids:
    """Return the error for a slot that cannot belong to the subscription."""
    what = "is a physical slot" if slot.plugin is None else f'uses plugin "{slot.plugin}" in "{slot.database}"'
    message = f'replication slot "{slot.name}" is not one of this subscription'
    return StateForbids(message, detail=f"It {what}.", hint=hint, sqlstate="55006")


@contextlib.contextmanager
def naming_user(session: psycopg.Connection, source: publisher.Connection, name: str | None) -> Iterator[None]:
    """Say of a slot that already exists which subscription of the target's ledger uses it.

    :param session: a session on the target.
    """
    try:
        yield
    except StateForbids as error:
        if error.sqlstate == DUPLICATE_OBJECT:
            found = None
            with contextlib.suppress(PgsubError, psycopg.Error):  # who may not read the ledger gets the first error
                if installation.installed_version(session) > 0:
                    found = row(session, _USER, (name, database.database(source).system_identifier))
            # guard: the slot of a subscription that another state store serves is not said to be of no use
            if found is not None:
                error.detail = f'Subscription "{found[0]}" of this target uses it, from state store "{found[1]}".'
                error.hint = (
                    "If that subscription is meant, use its state folder (--state-dir). Otherwise give the new slot"
                    " another name (--slot-name)."
                )
        raise


def is_replaced(replication: publisher.Connection, sub: Subscription, wanted: str, dbname: str) -> bool:
    """Return whether a slot has the name that the new one is to have, and check that it may be dropped.

    The state store names a new slot before it is created. So the slot of an interrupted command is the subscription's.

    :raises StateForbids: it may not be dropped.
    """
    # guard: a slot that only the command names is not dropped
    if wanted != sub.slot_name and slots.slot_state(replication, wanted) is not None:
        raise exists(sub, wanted)
    return check_ours(replication, sub, wanted, dbname)


def exists(sub: Subscription, name: str) -> StateForbids:
    """Return the error for a slot that has the name of the new one, and may belong to anybody."""
    return StateForbids(
        f'could not create replication slot "{name}": replication slot "{name}" already exists',
        hint=f"{_another_name(sub)}\nIf nothing needs it, drop it on the publisher:\n"
        f"SELECT pg_drop_replication_slot({literal(name)});",
        sqlstate=DUPLICATE_OBJECT,
    )


def check_ours(replication: publisher.Connection, sub: Subscription, name: str, dbname: str) -> bool:
    """Check that a slot of this name may be dropped for the new one, and return whether it exists.

    A worker of the subscription that is refused holds the slot only briefly.

    :raises StateForbids: the slot is of another kind or database, or another consumer uses it.
    """
    deadline = time.monotonic() + _BUSY_SECONDS
    while (slot := slots.slot_state(replication, name)) is not None:
        # guard: a slot of another consumer is not dropped
        if is_foreign(slot, dbname):
            raise foreign(slot, _another_name(sub))
        if not slot.active or slot.active_pid is None:
            return True
        holder = replication.execute(_HOLDER, (slot.active_pid,)).fetchone()
        if holder is not None and holder[0] == sub.name:
            return True
        if time.monotonic() > deadline:
            of_whom = f', of "{holder[0]}"' if holder is not None and holder[0] else ""
            raise StateForbids(
                f'replication slot "{name}" is in use',
                detail=f"PID {slot.active_pid}{of_whom} streams from it.",
                hint=_another_name(sub),
                sqlstate="55006",
            )
        time.sleep(0.1)
    return False


def _another_name(sub: Subscription) -> str:
    return (
        "Give the new slot another name, and leave this one to whom it belongs to:\n"
        f"pgsub reconcile {word(sub.name)} --slot-name NAME"
    )
