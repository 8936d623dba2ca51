"""Connections to the target; no other module opens any. Mirrors InitializeLogRepWorker (worker.c)."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import psycopg

from pgsub.common import quoting, server_words
from pgsub.common.connections import conninfo as ci
from pgsub.common.connections import conninfo_check
from pgsub.common.errors import (
    ApplyError,
    InternalError,
    PermissionMissing,
    PgsubError,
    SchemaFault,
    TargetReplaced,
    TargetUnavailable,
)
from pgsub.common.machine.out_of_resources import no_descriptor
from pgsub.common.query import scalar
from pgsub.common.server_words import SAID_BY_CODE, is_transient
from pgsub.common.subscription import Subscription
from pgsub.target.session import ledger_guard

#: In addition to :data:`pgsub.common.connections.conninfo.PINNED`.
_SETTINGS = {
    "xmloption": "content",
    "client_min_messages": "warning",
    "jit": "off",
}
#: For sessions that receive many rows. The kernel also counts a peer as vanished if it receives nothing for this long,
#: and a backend that waits for a lock does not read. Other sessions use
#: :data:`pgsub.common.connections.conninfo.KEEPALIVES`.
_PATIENCE = {"tcp_user_timeout": "300000"}
_DENIED = re.compile(r"^permission denied for (table|schema) (.+)$")
_PASSWORD_STATES = ("28P01", "28000")


@dataclass(frozen=True, slots=True)
class SessionName:
    """The application_name of a target session. A take-over finds the sessions of older epochs by it."""

    subid: int
    role: str  #: launcher, apply, sync:<relid>, copy:<relid>, or table:<relid> (prepares a synchronization)
    epoch: int

    def __str__(self) -> str:
        return f"pgsub {self.subid} {self.role} {self.epoch}"


def open_session(sub: Subscription, name: SessionName | str, **options: Any) -> psycopg.Connection:
    """Open a session in the target database of a subscription.

    :param options: options of :func:`connect`.
    :raises TargetReplaced: another database has its name.
    :raises TargetUnavailable: a standby of the target answers.
    """
    session = connect(sub.target, name, expected=sub, **options)
    # guard: a standby of the target is not taken for the target
    if is_standby(session):
        session.close()
        raise standby_answers()
    return session


def is_standby(session: psycopg.Connection) -> bool:
    """Return whether the server had not been promoted when the session began. Nothing is asked."""
    return session.info.parameter_status("in_hot_standby") == "on"


def standby_answers() -> TargetUnavailable:
    """Make the error for a standby of the target, which may lack what the target has, and cannot be written to."""
    return TargetUnavailable(
        "a standby of the target answers, which has not been promoted",
        hint="Connect to the primary; with several hosts, the connection string needs target_session_attrs=primary.",
    )


def connect(
    conninfo: str,
    name: SessionName | str,
    *,
    synchronous_commit: str = "on",
    replica: bool = True,
    bulk: bool = False,
    views: bool = True,
    expected: Subscription | None = None,
) -> psycopg.Connection:
    """Open a session, in autocommit mode, with all settings that apply relies on.

    :param conninfo: without a password; it may name a passfile.
    :param name: the session's application_name.
    :param synchronous_commit: the session's default for that setting.
    :param replica: whether to try ``session_replication_role = replica``; see :func:`is_replica`.
    :param bulk: rows will be sent: a vanished host is noticed within five minutes instead of one. Settings of the
        conninfo or its service take precedence.
    :param views: False for a session that only reads tables by name: a view in place of a table is refused, and so are
        foreign partitions, and a ledger that is not trusted.
    :param expected: a subscription that the database must belong to; None: no check.
    :raises TargetUnavailable: unreachable, refused, shutting down, wrong password.
    :raises StateForbids: a connection pooler answered.
    :raises TargetReplaced: it is another database.
    """
    given = ci.usable(ci.parse(conninfo, "target"))
    belts = ci.missing_defaults(given, {**ci.KEEPALIVES, **(_PATIENCE if bulk else {})})
    params = {**belts, **given, "application_name": str(name), "client_encoding": "UTF8"}
    try:
        # With prepared statements of its own, psycopg deallocates all after a rollback, those of a pipeline, too.
        # guard: a rollback takes away no prepared statement of a pipeline, without "prepare_threshold=None, "
        connection = psycopg.connect("", autocommit=True, prepare_threshold=None, **params)  # type: ignore[arg-type]
    except psycopg.Error as error:
        raise _refused(error, params) from None
    try:
        restricted = {} if views else ci.only_tables(connection.info.server_version)
        oid = ci.pin(connection, "target", {**_SETTINGS, "synchronous_commit": synchronous_commit, **restricted})
        # guard: nothing of a database is used that took the name of the subscription's
        if expected is not None and expected.dboid not in (0, oid):
            raise _replaced(expected, connection.info.dbname, oid)
        if replica:
            # apply works without it; create and status explain the consequences and name the GRANT
            with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
                connection.execute("SET session_replication_role = replica")
    except BaseException as error:
        connection.close()
        if isinstance(error, psycopg.Error):
            raise translate(error, "prepare the session on the target") from None
        raise
    if not views:
        ledger_guard.guard(connection)
    return connection


def is_replica(connection: psycopg.Connection) -> bool:
    """Return whether ``session_replication_role = replica`` is in effect: ordinary triggers and rules do not fire."""
    return bool(scalar(connection, "SHOW session_replication_role") == "replica")


def tracks_commits(connection: psycopg.Connection) -> bool:
    """Return whether the server tracks time and origin of commits."""
    return bool(scalar(connection, "SHOW track_commit_timestamp") == "on")


def is_superuser(connection: psycopg.Connection) -> bool:
    """Return whether the session's user is a superuser, whatever role it has assumed."""
    return scalar(connection, "SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = session_user") is True


def must_use_password(session: psycopg.Connection, sub: Subscription) -> bool:
    """Return whether the publisher must ask for a password (``must_use_password`` of run_apply_worker, worker.c).

    :param session: a target session of the subscription's role. Superusers are exempt.
    """
    return sub.password_enforced and not is_superuser(session)


def _replaced(sub: Subscription, dbname: str, oid: int) -> TargetReplaced:
    name = quoting.word(sub.name)
    return TargetReplaced(
        f'the target of subscription "{sub.name}" is a different database',
        detail=f'The subscription replicates into the database with OID {sub.dboid}; "{dbname}" has OID {oid}.',
        hint="Check dbname in --target: the database may have been renamed, and another may have its name. Where a copy"
        " has taken its place for good, remove the definition here, which leaves both servers as they are, and make it"
        f" again from the ledger of the copy:\npgsub drop {name} --keep-target --keep-slot --yes\n"
        f"pgsub run {name} --from-target --connection CONNINFO --target CONNINFO",
    )


def _refused(error: psycopg.Error, params: dict[str, str]) -> PgsubError:
    state = error.sqlstate or getattr(getattr(error, "pgconn", None), "sqlstate", None)
    reason, *more = server_words.lines(error) or [type(error).__name__]
    reason = re.sub(
        r"^(connection is bad: |(connection failed: )?(connection to server .* failed: )?)((FATAL|ERROR):\s+)?",
        "",
        reason,
    )
    hint = "Check host, port and that the server accepts connections."
    places = conninfo_check.missing_service(reason)
    if places is not None:
        hint = "Correct service= in --target, or define that service."
    elif state in _PASSWORD_STATES or "password" in reason or "no pg_hba.conf entry" in reason:
        hint = "Check user, password (passfile, service or --target) and the server's pg_hba.conf."
    elif "does not exist" in reason:
        hint = "Check dbname and user in --target."
    elif (lack := no_descriptor()) is not None:
        reason, hint = lack.message, lack.hint or hint
    return TargetUnavailable(
        f"could not connect to the target: {reason}",
        detail=" ".join([f"The target is {ci.endpoint(params)}.", *map(str.strip, more), *filter(None, [places])]),
        hint=hint,
        sqlstate=state,
    )


def translate(error: psycopg.Error, doing: str, *, user: str | None = None) -> PgsubError:
    """Make pgsub's error for a server error in an established target session.

    :param doing: completes "could not …".
    :param user: the session's user, if known, for a complete GRANT in the hint.
    :return: TargetUnavailable if a retry may help, otherwise another error with the server's own words.
    """
    message, detail, said, context = server_words.said(error)
    hint = None if said is None else f"The target's hint: {said}"
    text, state = f"could not {doing}: {message}", error.sqlstate
    if state is None and not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return InternalError(text)  # psycopg itself rejected the statement; no server reported an error
    if is_transient(state, error.diag.source_file):
        return TargetUnavailable(text, detail=detail, hint=hint, sqlstate=state)
    if state == "42501":
        # guard: no owner of a table of the target words a GRANT, without " if context is None else SAID_BY_CODE"
        missing = (hint or _grant_hint(message, user)) if context is None else SAID_BY_CODE
        return PermissionMissing(text, detail=detail, hint=missing, sqlstate=state)
    if state in ("42P01", "42703", "3F000", "42809"):
        return SchemaFault(text, detail=detail, hint=hint, sqlstate=state)
    return ApplyError(text, detail=detail, hint=hint, context=context, sqlstate=state)


def _grant_hint(message: str, user: str | None) -> str:
    denied = _DENIED.search(message)
    if denied is None:
        return "Grant the role of --target the missing right."
    privileges = "USAGE" if denied[1] == "schema" else "SELECT, INSERT, UPDATE, DELETE, TRUNCATE"
    right = f"{privileges} ON {denied[1].upper()} {quoting.name(denied[2])}"
    # a rule or a partition of the owner of a table may name any object
    known = "If this is a table of the subscription or of the ledger, or the schema of one"
    if user is None:
        return f"{known}, grant the role of --target {right}."
    return f"{known}, run this on the target; otherwise grant nothing:\nGRANT {right} TO {quoting.name(user)};"
