"""Changes a definition in the state store, and the ledger's copy of it.

A launcher that serves the subscription copies the definition at once. Without one, the command does so if the target
answers. Otherwise a state store that is lost before the next ``run`` would be rebuilt with the old options.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pgsub.catalog.locks import subscription_lock
from pgsub.catalog.store import StateStore
from pgsub.catalog.subscriptions import options
from pgsub.commands.reporter import Reporter
from pgsub.common.errors import PermissionMissing, PgsubError, StateForbids, StateStoreError, TargetReplaced
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription

if TYPE_CHECKING:
    import psycopg


def change(store: StateStore, sub: Subscription, write: Callable[[], None], *, reporter: Reporter) -> None:
    """Change a definition.

    :param sub: the definition before the change.
    :raises StateForbids: the ledger has a newer definition.
    """
    connected = sub.dboid != 0
    if not connected or subscription_lock(store.path.parent, sub.subid).holder() is not None:
        write()
        return
    with contextlib.ExitStack() as stack:
        session, failed = _session(stack, store, sub, reporter)
        write()
        if session is not None:
            failed = _recorded(session, store, sub.subid)
    if failed is not None and not isinstance(failed, PermissionMissing):  # status reports a missing permission
        reporter.warning(
            "the target's ledger has the definition as it was before",
            f"{failed.message}.",
            "The next pgsub run brings it up to date. Until then do not rebuild the state store from the ledger:\n"
            f"pgsub run {word(sub.name)}",
        )


# Loaded only here, because nothing needs the driver if there is a launcher.


def _session(
    stack: contextlib.ExitStack, store: StateStore, sub: Subscription, reporter: Reporter
) -> tuple[psycopg.Connection | None, PgsubError | None]:
    """Open a session on the target. Return it, or the error that prevented it.

    :raises StateForbids: the ledger has a newer definition.
    """
    import psycopg

    from pgsub.commands.sessions import connect_target
    from pgsub.commands.target_wait import TargetWait
    from pgsub.target.ledger import definitions
    from pgsub.target.session import ledger_privileges

    try:
        session = stack.enter_context(connect_target(sub, replica=False))
        stack.enter_context(TargetWait(session, sub, reporter, None))
        ledger_privileges.check(session)
        definitions.check_newest(session, sub, partial(store.subscription_by_id, sub.subid))
    except TargetReplaced as error:  # disabling, for example, needs no target
        return None, error
    except StateForbids:
        raise
    except PgsubError as error:
        return None, error
    except psycopg.Error as error:
        return None, _failed(session, error)
    return session, None


def record(session: psycopg.Connection, store: StateStore, subid: int) -> None:
    """Write the definition of the state store to the ledger."""
    from pgsub.target.ledger import definitions

    now = store.subscription_by_id(subid)
    if now is not None:
        definitions.record(session, now, options(now), partial(store.note_recorded, subid))


def _recorded(session: psycopg.Connection, store: StateStore, subid: int) -> PgsubError | None:
    """Write the definition to the ledger. Return the error that prevented it, None if it is written."""
    import psycopg

    try:
        record(session, store, subid)
    except StateStoreError as error:
        return error
    except psycopg.Error as error:
        return _failed(session, error)
    return None


def _failed(session: psycopg.Connection, error: psycopg.Error) -> PgsubError:
    from pgsub.target.session.connect import translate

    return translate(error, "change the definition in the ledger", user=session.info.user)
