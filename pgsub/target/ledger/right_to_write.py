"""The right of a subscription to write to its target, according to the journal of switchovers there.

:mod:`pgsub.switchover.journal` writes the journal and explains its phases.
"""

from __future__ import annotations

import psycopg

from pgsub.common.errors import StateForbids
from pgsub.common.query import row
from pgsub.common.quoting import word

_NEWEST = "SELECT side, phase, subname FROM pgsub.switchover WHERE subid = %s ORDER BY changed_at DESC LIMIT 1"
_ENDED = """
SELECT back_name FROM pgsub.switchover WHERE subid = %s AND side = 'taking' AND phase = 'done'
 ORDER BY changed_at DESC LIMIT 1
"""
_CLIENTS_WRITE = ("taken", "promoted", "done")


def way_back(connection: psycopg.Connection, subid: int) -> str | None:
    """Return the name of the subscription that leads back, if a switchover has ended a subscription, otherwise None."""
    found = row(connection, _ENDED, (subid,))
    return None if found is None else str(found[0])


def check(connection: psycopg.Connection, subid: int, name: str) -> None:
    """Check that apply may write: clients have stopped writing on the target and have not started again.

    :raises StateForbids: it may not.
    """
    found = row(connection, _NEWEST, (subid,))
    if found is None:
        return
    side, phase, ending = found
    # guard: apply does not start where clients write since a switchover
    if side == "taking" and phase in _CLIENTS_WRITE:
        raise StateForbids(
            f'subscription "{name}" was switched over: clients may write on its target',
            hint=f"Let the switchover finish. To see its state:\npgsub switchover {word(name)} --status",
        )
    # guard: the way back does not start before clients have stopped writing
    if side == "giving" and phase != "given":
        raise StateForbids(
            f'subscription "{name}" leads back from a switchover that has not moved the writes',
            hint=f"Let it finish, or abort it. To see its state:\npgsub switchover {word(ending)} --status",
        )
