"""What the server asks of a subscription's owner: here the role of the target's session.

Mirrors ``must_use_password`` of run_apply_worker (worker.c) and its like: password_required binds no superuser.
"""

from __future__ import annotations

import psycopg

from pgsub.common.subscription import Subscription
from pgsub.target.session.connect import is_superuser


def must_use_password(session: psycopg.Connection, sub: Subscription) -> bool:
    """Whether the publisher must be one that asks for a password.

    :param session: a session of the role that the subscription works as on the target.
    """
    return sub.password_enforced and not is_superuser(session)
