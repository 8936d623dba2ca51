"""Creates the reverse subscription from the ending one. It stays disabled until the right has moved.

What an interrupted creation left is removed by the next one, or by an abort.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import psycopg

from pgsub.catalog import subscriptions as catalog
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_publisher
from pgsub.commands.subscription import registration
from pgsub.commands.subscription.create import create
from pgsub.commands.subscription.definition import CreateOptions
from pgsub.commands.switchover.obstacles import search
from pgsub.commands.switchover.obstacles.obstacle import ERROR, Obstacle, Way
from pgsub.commands.switchover.parties import SwitchoverOptions, giving_session
from pgsub.common import failpoints, quoting, server_words
from pgsub.common.errors import PgsubError, StateForbids
from pgsub.common.plural import counted
from pgsub.common.subscription import Subscription
from pgsub.publisher import slots
from pgsub.switchover import journal
from pgsub.switchover.journal import Entry
from pgsub.target.ledger import two_phase_state
from pgsub.target.ledger.schema import installation

#: The first version of publishers that can leave out changes with an origin.
_ORIGIN_VERSION = 160000
_OWN = {"publications", "enabled", "password_required", "password_enforced", "on_conflict", "way_back_of"}
_SETTINGS = {one.name for one in fields(Subscription)} - _OWN


def way_back(
    options: SwitchoverOptions,
    sub: Subscription,
    giving: psycopg.Connection,
    taking: psycopg.Connection,
    subid: int | None = None,
) -> CreateOptions:
    """Return the options of the reverse subscription.

    They are those of the subscription that ended with the previous switchover in the other direction. Without one, they
    are those of the subscription that ends now, with a publication named like the reverse one.

    :param giving: a session on the giving side, its target.
    :param subid: its number, None for a new one.
    """
    _, back = options.names
    before = _before(giving, back)
    chosen = catalog.restored(catalog.options(sub) if before is None else before)
    if before is None:
        chosen["publications"] = (back,)
        chosen["origin"] = "none" if taking.info.server_version >= _ORIGIN_VERSION else "any"
    return CreateOptions(
        name=back,
        connection=options.to_taking(sub),
        target=options.to_giving(sub),
        publications=options.back_publications or chosen["publications"],
        state_dir=options.state_dir,
        connect=True,
        create_slot=True,
        slot_name=journal.slot_name(back),
        enabled=False,
        copy_data=False,
        two_phase=sub.two_phase != two_phase_state.DISABLED,
        password_required=_password_required(chosen),
        on_conflict=chosen.get("on_conflict", ()),
        settings={**{name: value for name, value in chosen.items() if name in _SETTINGS}, "way_back_of": sub.subid},
        subid=subid,
    )


def _password_required(chosen: dict[str, Any]) -> bool | None:
    """Return the option as it was given."""
    if chosen.get("password_enforced"):
        return True
    return None if chosen.get("password_required", True) else False


def _before(giving: psycopg.Connection, name: str) -> Any:
    """Return the definition of a subscription that ended with a switchover on this server, None if there is none."""
    if installation.installed_version(giving) < installation.VERSION:
        return None
    entry = journal.latest(giving, journal.TAKING, name)
    return None if entry is None or entry.phase != journal.DONE else entry.definition


def obstacles(
    options: SwitchoverOptions, sub: Subscription, taking: psycopg.Connection, back: Subscription | None = None
) -> list[Obstacle]:
    """Search for obstacles on both servers, errors first.

    :param back: the reverse subscription if it exists. Then only obstacles that may be new are searched for. Its own
        publications are used, because the giving side's answers may have changed since.
    """
    with giving_session(options, sub) as giving:
        if back is not None:
            way = Way(back.name, back.publications, back.connection, options.way, back.run_as_owner, back.origin)
            return search.find(giving, taking, sub, way, again=True)
        made = way_back(options, sub, giving, taking)
        origin, as_owner = made.settings.get("origin", "any"), made.settings.get("run_as_owner", False)
        way = Way(made.name, made.publications, made.connection or "", options.way, as_owner, origin)
        return search.find(giving, taking, sub, way)


def check(seen: Iterable[Obstacle], options: SwitchoverOptions) -> None:
    """Raise an error if there are obstacles."""
    errors = [one for one in seen if one.severity == ERROR]
    if errors:
        hints = [one.hint for one in errors if one.hint]
        raise StateForbids(
            f"{counted(len(errors), 'thing')} must be corrected before the switchover",
            detail="\n".join(one.message for one in errors),
            hint="\n".join([*hints, f"To see all, and what to know before:\n{options.command} --dry-run"]),
        )


def created(made: CreateOptions, store: StateStore, reporter: Reporter) -> Subscription:
    """Create the reverse subscription, with its slot on the taking side."""
    create(made, reporter=reporter)
    failpoints.point("switchover.created")
    return store.subscription(made.name)


def remove_interrupted(
    options: SwitchoverOptions, store: StateStore, sub: Subscription, entry: Entry, reporter: Reporter
) -> None:
    """Remove what an interrupted creation of the reverse subscription left on both servers.

    :param entry: the row of the taking side. It says whether a creation had begun.
    """
    name = entry.back_name
    if entry.back_subid is None:
        return
    slot, why = entry.back_slot, ""
    try:
        with giving_session(options, sub) as giving, connect_publisher(sub, options.to_taking(sub)) as source:
            registration.undo_interrupted(giving, source, name, store)
            if slots.slot_state(source, slot) is None:
                return
    except (PgsubError, psycopg.Error) as error:
        said = error if isinstance(error, PgsubError) else server_words.said(error)
        why = f": {said.message}"
    reporter.warning(
        f'what was made for subscription "{name}" may be left{why}',
        f'Replication slot "{slot}" retains WAL on the target.',
        f"If nothing else uses it, run this on the target:\nSELECT pg_drop_replication_slot({quoting.literal(slot)});",
    )
