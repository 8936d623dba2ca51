"""Replication origins as tags that distinguish pgsub's writes from local writes. Mirrors origin.c's session API.

A peer that subscribes to the target with ``origin = none`` must not receive changes that came from elsewhere. An origin
serves one session at a time, so each writing session takes a free one of the pool ``pgsub_<subid>[_n]``. The origins do
not keep the progress: the ledger does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg

from pgsub.common import server_words
from pgsub.common.errors import Fenced, TargetUnavailable
from pgsub.common.query import current_role, scalar
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn
from pgsub.target.session import advisory_locks

#: Maximum number of sessions of one subscription that write at once: apply, sync workers, chunks.
POOL = 32
#: Number of origins that an optional session leaves free on the server, because the first session of another
#: subscription cannot do without one.
LEFT_TO_OTHERS = 4
_COUNTING = 0x70677375626F  #: "pgsubo", an advisory lock
_IN_USE = 0x70676F00  #: "pgo" plus an origin's number; with a subid, the advisory lock of the session that uses it
FEATURE = "replication origins"  #: name of the missing feature in ``status``
EXHAUSTED = "53400"  #: configuration_limit_exceeded, from replorigin_session_setup if no origin is free
SHORT_HINT = "Raise max_active_replication_origins (max_replication_slots before 18) and restart the target."

#: The first version with another argument: the PID of a session that has the origin already.
_SETUP_WITH_PID = 190000


def _functions(connection: psycopg.Connection) -> list[str]:
    """Return the functions that this module calls, as this server's signatures."""
    pid = ", integer" if connection.info.server_version >= _SETUP_WITH_PID else ""
    return [
        "pg_replication_origin_oid(text)",
        "pg_replication_origin_create(text)",
        "pg_replication_origin_drop(text)",
        f"pg_replication_origin_session_setup(text{pid})",
        "pg_replication_origin_xact_setup(pg_lsn, timestamptz)",
    ]


def allowed(connection: psycopg.Connection) -> bool:
    """Return whether the role may use origins. Superusers may; other roles need EXECUTE on the functions."""
    query = """
        SELECT bool_and(pg_catalog.has_function_privilege('pg_catalog.' || f, 'EXECUTE'))
          FROM pg_catalog.unnest(%s::text[]) AS f"""
    return scalar(connection, query, (_functions(connection),)) is True


def grant_hint(connection: psycopg.Connection) -> str:
    """Return the statements that allow the session's role to use origins on this server."""
    role = current_role(connection)
    return "\n".join(f"GRANT EXECUTE ON FUNCTION {f} TO {role};" for f in _functions(connection))


def attach(connection: psycopg.Connection, sub: Subscription, *, must: bool = False, spare: bool = False) -> str | None:
    """Tag everything that this session commits from now on.

    :param connection: in autocommit mode, outside a transaction.
    :param must: another session of the subscription is tagged, so this one may not go on untagged.
    :param spare: the session is optional: it takes no origin that others may need more.
    :return: the origin's name. None if the role may not use origins, or if none is free and no peer could see the
        difference (see :func:`needed`).
    :raises TargetUnavailable: none is free (max_active_replication_origins). The server's subscriber does not go on
        untagged either.
    """
    if not allowed(connection):
        return None
    try:
        # Two sessions that count at once would take one too many. Anyone may hold the lock, so the wait is short.
        with advisory_locks.holding(connection, (_COUNTING,)):
            return _attached(connection, sub.subid, spare=spare)
    except TargetUnavailable:
        # guard: nothing is written without an origin where others rely on it, without " or needed(connection, sub)"
        if must or spare or needed(connection, sub):
            raise
        return None


def needed(connection: psycopg.Connection, sub: Subscription) -> bool:
    """Return whether a peer distinguishes the subscription's writes from local ones by their origin.

    If this subscription has ``origin = none``, its peers are assumed to have it too. Any subscriber to its tables on
    the target may have it.
    """
    return sub.origin == "none" or bool(scalar(connection, _PUBLISHED, (sub.subid,)))


_PUBLISHED = """
SELECT EXISTS (
       SELECT FROM pg_catalog.pg_publication p, LATERAL pg_catalog.pg_get_publication_tables(p.pubname::text) AS g
        WHERE coalesce(pg_catalog.pg_partition_root(g.relid), g.relid) IN (
              SELECT coalesce(pg_catalog.pg_partition_root(r.srrelid), r.srrelid) FROM pgsub.subscription_rel r
               WHERE r.subid = %s))
"""


def _attached(connection: psycopg.Connection, subid: int, *, spare: bool) -> str | None:
    for number in _numbers(connection, subid):
        name = f"pgsub_{subid}" + (f"_{number}" if number else "")
        try:
            if scalar(connection, "SELECT pg_catalog.pg_replication_origin_oid(%s)", (name,)) is None:
                # before the first origin exists, a session that needs one is still to come
                others = LEFT_TO_OTHERS + (number == 0)
                if spare and (left := free(connection)) is not None and left <= others:
                    break
                # another session of this subscription may create it first
                with contextlib.suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateObject):
                    _create(connection, name, subid)
            connection.execute("SELECT pg_catalog.pg_replication_origin_session_setup(%s)", (name,))
        except psycopg.errors.ObjectInUse:
            continue
        except psycopg.errors.InsufficientPrivilege:
            return None
        except (psycopg.errors.ConfigurationLimitExceeded, psycopg.errors.ObjectNotInPrerequisiteState) as error:
            raise TargetUnavailable(server_words.said(error).message, hint=SHORT_HINT, sqlstate=EXHAUSTED) from None
        return name
    raise TargetUnavailable(
        "no replication origin is free on the target for a further session", hint=SHORT_HINT, sqlstate=EXHAUSTED
    )


def _create(connection: psycopg.Connection, name: str, subid: int) -> None:
    """Create an origin, unless the subscription was dropped meanwhile: nobody would drop the origin.

    :raises Fenced: it was.
    """
    query = "SELECT pg_catalog.pg_replication_origin_create(%s) FROM pgsub.subscription WHERE subid = %s"
    if scalar(connection, query, (name, subid)) is None:
        raise Fenced("the subscription was removed from the ledger")


def _numbers(connection: psycopg.Connection, subid: int) -> Iterator[int]:
    """Yield the numbers of the pool in order; last come those that another session seems to use.

    The server logs an error for each attempt to use an origin that is in use. The lock is only a hint, because anyone
    can hold it. The session keeps the lock of its origin until it ends.
    """
    later = []
    for number in range(POOL):
        key = (_IN_USE + number, subid)
        if advisory_locks.take(connection, key, seconds=0):
            yield number
            advisory_locks.release(connection, key)
        else:
            later.append(number)
    yield from later


def free(connection: psycopg.Connection, subid: int = 0) -> int | None:
    """Count the replication origins that are left on this server for sessions with new names.

    An origin that a session has used once counts as taken until it is dropped (replorigin_session_setup).

    :param subid: subscription whose own origins do not count as taken; 0: none.
    :return: None if the role may not see it.
    """
    function = "'pg_catalog.pg_show_replication_origin_status()'"
    if not scalar(connection, f"SELECT pg_catalog.has_function_privilege({function}, 'EXECUTE')"):
        return None
    query = """
        SELECT s.setting::int - (SELECT pg_catalog.count(*) FROM pg_catalog.pg_show_replication_origin_status() o
                                  WHERE o.external_id IS NULL OR o.external_id !~ %s)
          FROM pg_catalog.pg_settings s WHERE s.name IN ('max_active_replication_origins', 'max_replication_slots')
         ORDER BY s.name LIMIT 1"""
    return max(int(scalar(connection, query, (_names(subid),))), 0)


def spare(connection: psycopg.Connection, subid: int) -> int | None:
    """Count the origins that sessions of a subscription may use without taking those that others may need.

    :return: the number, including those that it has already; None if the role may not see it.
    """
    others, left = free(connection, subid), free(connection)
    if others is None or left is None:
        return None
    return others - left + max(left - LEFT_TO_OTHERS, 0)


def _names(subid: int) -> str:
    """Return a regular expression for the names of a subscription's origins."""
    return f"^pgsub_{subid}(_[0-9]+)?$"


def drop_all(connection: psycopg.Connection, subid: int) -> None:
    """Drop the subscription's origins. Its writing sessions must have ended."""
    if allowed(connection):
        connection.execute(
            "SELECT pg_catalog.pg_replication_origin_drop(roname) FROM pg_catalog.pg_replication_origin"
            " WHERE roname ~ %s",
            (_names(subid),),
        )


def advance(connection: psycopg.Connection, subid: int, position: int) -> None:
    """Advance the subscription's origin to a position that no commit carried. The ledger has it already.

    Without the privilege, or while a session of the subscription holds the origin, the next commit advances it.
    """
    function = "'pg_catalog.pg_replication_origin_advance(text, pg_lsn)'"
    # checked first: the server rejects a statement with the function even if its WHERE would not call it
    if not scalar(connection, f"SELECT pg_catalog.has_function_privilege({function}, 'EXECUTE')"):
        return
    with contextlib.suppress(psycopg.errors.ObjectInUse):
        connection.execute(
            "SELECT pg_catalog.pg_replication_origin_advance(roname, %s::pg_lsn) FROM pg_catalog.pg_replication_origin"
            " WHERE roname = %s",
            (format_lsn(position), f"pgsub_{subid}"),
        )
