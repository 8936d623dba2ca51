"""``pgsub alter --apply-workers``: checks for free sessions on the target, like ``create``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psycopg

from pgsub.commands.preflight import findings, server_limits
from pgsub.commands.preflight.findings import Caution
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_target
from pgsub.common import server_words
from pgsub.common.errors import PgsubError
from pgsub.common.subscription import Subscription


def check_free_sessions(
    sub: Subscription,
    fields: Mapping[str, Any],
    reporter: Reporter,
    *,
    strict: bool,
    session: psycopg.Connection | None = None,
) -> None:
    """Warn if the target has too few free sessions, or if it cannot be asked.

    :param fields: the changed fields.
    :param session: a session on the target, None to open one. A subscription that was never connected is not checked.
    :raises TargetSchemaError: there is a warning and ``strict`` is set.
    """
    new = replace(sub, **fields)
    if new.apply_workers <= max(sub.apply_workers, 1) or not sub.dboid:
        return
    try:
        if session is not None:
            found = list(server_limits.check_apply_workers(session, new))
        else:
            with connect_target(new, replica=False) as opened:
                found = list(server_limits.check_apply_workers(opened, new))
    except (PgsubError, psycopg.Error) as error:
        why = error.message if isinstance(error, PgsubError) else server_words.said(error).message
        hint = "What finds no session is tried again, and fewer apply meanwhile."
        found = [Caution("could not check whether the target has room for more sessions", f"{why}.", hint)]
    findings.report(found, reporter, strict=strict)
