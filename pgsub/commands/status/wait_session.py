"""The session of ``pgsub wait`` on the target, in which it reads the ledger and asks apply to record a position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from pgsub.common.subscription import Subscription

if TYPE_CHECKING:
    import psycopg


@contextmanager
def ledger(sub: Subscription) -> Iterator[psycopg.Connection]:
    """Open a session for the block, which should be short: commands may wait for hours.

    :raises TargetUnavailable: the target cannot be asked.
    :raises PermissionMissing: the ledger's owner is not trusted.
    """
    # Imported late: most waits need no server.
    from psycopg import Error

    from pgsub.target.session import ledger_privileges
    from pgsub.target.session.connect import SessionName, open_session, translate

    try:
        with closing(open_session(sub, SessionName(sub.subid, "wait", 0), replica=False)) as session:
            ledger_privileges.check(session)
            yield session
    except Error as error:
        raise translate(error, "read the ledger") from None
