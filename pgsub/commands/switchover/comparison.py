"""Checks the comparison of tables for a switchover, and reports differences.

Explained differences count, because clients will permanently see the target's version.
"""

from __future__ import annotations

from collections.abc import Iterable

from pgsub.commands.switchover.parties import SwitchoverOptions
from pgsub.commands.verify.result import EQUAL, TableVerdict, Verification
from pgsub.common.errors import ApplyError
from pgsub.common.plural import counted
from pgsub.common.quoting import word

_NAMED = 10


def check(found: Verification, options: SwitchoverOptions) -> None:
    """Check that all tables were equal. Called before anything is done."""
    unequal = _unequal(found, options)
    if not unequal:
        return
    name = word(found.name)
    hint = f"See which rows, and repair them:\npgsub verify {name} --rows\npgsub verify {name} --repair"
    if any(one.explained for one in unequal):
        hint += (
            "\nA repair leaves explained rows alone. To let clients have what the target has of them:\n"
            f"{options.command} --accept-explained"
        )
    raise ApplyError(
        f'the tables of subscription "{found.name}" differ from the publisher\'s, or could not be compared',
        detail=_listing(unequal),
        hint=hint,
    )


def report(found: Verification | None, back: str, options: SwitchoverOptions) -> str | None:
    """Report the comparison during the pause, None if none was requested."""
    if not options.verify:
        return None
    if found is None:
        return "The tables were not compared at the moment of the switchover, because it was interrupted."
    unequal = _unequal(found, options)
    if unequal:
        way = "" if options.back else " --back"
        raise ApplyError(
            "the writes were moved, but tables were not equal at the moment of the switchover, or not compared",
            detail=f'{_listing(unequal)} Clients write on the target, and subscription "{back}" leads back.',
            hint=f"See which rows differ, with the target as the publisher:\npgsub verify {word(back)} --rows\n"
            f"To move the writes back:\npgsub switchover {word(options.name)}{way}",
        )
    explained = sum(one.explained for one in found.tables)
    but = f", but for {counted(explained, 'explained row')}" if explained else ""
    return f"All tables were equal at the moment of the switchover{but}."


def equal(found: Verification | None, options: SwitchoverOptions) -> bool | None:
    """Return whether all rows were equal, None if they were not compared."""
    if not options.verify or found is None:
        return None
    return not any(one.differing for one in found.tables)


def _unequal(found: Verification, options: SwitchoverOptions) -> list[TableVerdict]:
    """Return the tables that must not be switched over in their state."""
    accepted = options.accept_explained
    # guard: a row with a known difference is not reported as equal, without " or (one.explained and not accepted)"
    return [one for one in found.tables if one.outcome != EQUAL or (one.explained and not accepted)]


def _listing(tables: Iterable[TableVerdict]) -> str:
    found = [_described(one) for one in tables]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"Tables: {', '.join(found[:_NAMED])}{more}."


def _described(one: TableVerdict) -> str:
    if one.result is None:
        return f"{one.name} (not compared)"
    more = f", {one.explained} of them explained" if one.explained else ""
    return f"{one.name} ({counted(one.differing, 'row')}{more})"
