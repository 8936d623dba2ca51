"""password_required, if it was given: who may turn it off, and its requirements for a connection string.

Mirrors the checks of CreateSubscription and AlterSubscription (subscriptioncmds.c). The target's role takes the part of
the owner. If the option was not given, nothing is enforced: the server protects the credentials of its operating-system
user from database roles, but here that user runs pgsub.
"""

from __future__ import annotations

from pathlib import Path

import psycopg

from pgsub.commands.sessions import MUST_PROVIDE
from pgsub.common.connections import conninfo as ci
from pgsub.common.errors import PermissionMissing
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.target.session.connect import is_superuser


def check(session: psycopg.Connection, sub: Subscription, *, given: bool | None, holds_password: bool) -> None:
    """Refuse what the server refuses the subscription's owner.

    :param session: a session of the role that the subscription uses on the target.
    :param given: the option in this command, None if not given.
    :param holds_password: whether the publisher's connection string has a password.
    :raises PermissionMissing: only superusers may turn it off.
    :raises StateForbids: a password is missing.
    """
    if (given is not False and not sub.password_enforced) or is_superuser(session):
        return
    if given is False:
        raise PermissionMissing(
            "password_required=false is superuser-only",
            detail="Subscriptions with the password_required option set to false may only be created or modified by the"
            f" superuser; the target's user is {session.info.user}.",
            hint="Leave out --no-password-required: a password is not required by default.",
            sqlstate="42501",
        )
    if not holds_password:
        raise publisher.password_missing(MUST_PROVIDE)


def stored(sub: Subscription, folder: Path) -> bool:
    """Return whether the publisher's password is in a password file of pgsub."""
    passfile = ci.parse(sub.connection, "publisher").get("passfile")
    return passfile is not None and Path(passfile).parent == folder / "passfiles"
