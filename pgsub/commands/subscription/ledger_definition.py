"""A subscription's definition in the ledger: slot, options and skips, but no connection strings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psycopg

from pgsub.catalog import subscriptions as catalog
from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import target_facts
from pgsub.common.errors import StateForbids, SubscriptionNotFound, UsageError
from pgsub.common.query import number
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.target.ledger import definitions, skip, two_phase_state

_OF_NAME = """
SELECT subid, state_store, slot_name, slot_intent FROM pgsub.subscription WHERE subname = %s ORDER BY subid
"""


def find(session: psycopg.Connection, name: str) -> tuple[int, str | None]:
    """Return number and slot of the ledger's subscription with this name.

    :raises StateForbids: there are none, several, or one that is incomplete.
    """
    found = session.execute(_OF_NAME.encode(), (name,)).fetchall()
    if not found:
        known = session.execute("SELECT DISTINCT subname FROM pgsub.subscription ORDER BY 1").fetchall()
        raise not_found(name, [one for (one,) in known])
    if len(found) > 1:
        listed = "\n".join(
            f'number {subid}, slot {slot or "none"}, state store "{place}"' for subid, place, slot, _ in found
        )
        raise StateForbids(
            f'the target\'s ledger has {len(found)} subscriptions "{name}"',
            detail=listed,
            hint=f"Rename the others where they are served:\npgsub alter {word(name)} --rename-to NEW",
        )
    [(sent, place, slot_name, half)] = found
    subid = number(sent, "number of a subscription")
    if half:
        raise StateForbids(
            f'subscription "{name}" is being created or dropped',
            detail=f'A command of state store "{place}" has not ended, or was interrupted.',
            hint="Repeat that command there. Where its state store is lost, drop the slot on the publisher, if there is"
            f" one, then the subscription's rows on the target:\nDELETE FROM pgsub.subscription WHERE subid = {subid};",
        )
    return subid, slot_name


def not_found(name: str, known: list[str]) -> SubscriptionNotFound:
    """Return the error for a database without a subscription of this name.

    :param known: names of its subscriptions.
    """
    listed = ", ".join(f'"{one}"' for one in known)
    return SubscriptionNotFound(
        f'the target\'s ledger has no subscription "{name}"',
        detail=f"Subscriptions of this database are {listed}." if known else "No subscription replicates into it.",
        hint="Check dbname in --target, and the name.",
    )


def read(session: psycopg.Connection, given: Subscription, store: StateStore) -> Subscription:
    """Return the definition from the ledger, with the given connection strings.

    :raises StateForbids: the ledger lacks its options, or the state store has it with another name.
    """
    there = store.subscription_by_id(given.subid)
    if there is not None:
        raise StateForbids(
            f'the state store has subscription "{given.name}" by the name "{there.name}"',
            hint=f"Serve it by that name:\npgsub run {word(there.name)}",
        )
    pending, rules = skip.pending(session, given.subid), skip.pending_rules(session, given.subid)
    recorded = definitions.recorded(session, given.subid)
    return replace(
        given,
        **_options(recorded, given),
        **target_facts(session),
        recorded=definitions.number_of(recorded),
        table_set=definitions.table_set_of(recorded),
        two_phase=two_phase_state.state(session, given.subid),
        skip_lsn=pending.lsn if pending is not None else 0,
        skips=skip.shown(pending, rules),
    )


def _options(recorded: Mapping[str, Any] | None, given: Subscription) -> dict[str, Any]:
    """Return the ledger's options. If it has none but publications were given, return defaults for a disabled one."""
    if recorded is None and given.publications:
        return {"enabled": False}
    if recorded is None:
        raise StateForbids(
            f'the target\'s ledger does not have the options of subscription "{given.name}"',
            detail="Its creation was interrupted, and no pgsub run has served it since.",
            hint="Name its publications. It will be disabled, with default options: alter them, then enable it.\n"
            f"pgsub run {word(given.name)} --from-target --connection CONNINFO --target CONNINFO --publication PUB",
        )
    if given.publications:
        raise UsageError(
            f'the target\'s ledger has the publications of "{given.name}"',
            hint="Leave out --publication. Change them afterwards:\n"
            f"pgsub alter {word(given.name)} --set-publication PUB",
        )
    try:
        return catalog.restored(recorded)
    except ValueError as error:
        raise StateForbids("the target's ledger holds an invalid option", detail=f"{error}.") from None
