"""Errors of the publisher in an established session: psycopg errors and failed results become pgsub's own.

Mirrors the ``ereport`` calls of ``libpqwalreceiver.c``: the server's error is embedded as ``could not …: %s``.
Decisions depend on SQLSTATEs. Message texts, which a server may translate, only choose between hints if several errors
share an SQLSTATE.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
from psycopg import pq

from pgsub.common import quoting, server_words
from pgsub.common.errors import (
    ApplyError,
    PermissionMissing,
    PgsubError,
    PublisherUnavailable,
    ReplicationBroken,
    SlotLost,
    StateForbids,
)
from pgsub.common.server_words import is_transient, server_hint, shortened

REPLICATION_ROLE = re.compile(
    r"permission denied to start WAL sender|must be superuser or replication role|permission denied to use replication"
)
_DENIED = re.compile(r"permission denied for (table|schema|sequence|function|view|relation) (.+)")

#: A quoted name in a message, in the languages of the server.
_QUOTED = re.compile(r"\"[^\"]*\"|«[^»]*»|»[^«]*«|„[^“]*“|“[^”]*”")

#: Attribute of an exception that carries the fields of a report.
_REPORT = "pgsub_report"


@dataclass(frozen=True, slots=True)
class ServerError:
    """An error report of the server: its relevant fields, whatever object carried it."""

    sqlstate: str | None
    message: str
    detail: str | None = None
    hint: str | None = None
    file: str | None = None  #: source file of the server that reported the error
    context: str | None = None  #: code of a function that reported it

    def carried_by(self, error: psycopg.Error) -> psycopg.Error:
        """Let an exception carry the fields, which psycopg has not seen. Return it."""
        setattr(error, _REPORT, self)
        return error

    @classmethod
    def from_exception(cls, error: psycopg.Error) -> ServerError:
        """Take the fields of a psycopg error. An error of libpq itself has only a text."""
        carried = getattr(error, _REPORT, None)
        if isinstance(carried, ServerError):
            return carried
        words = server_words.fields(error.diag)
        if words.message:
            return cls(error.sqlstate, words.message, words.detail, words.hint, error.diag.source_file, words.context)
        first, *rest = server_words.lines(error) or [type(error).__name__]
        return cls(error.sqlstate, first, " ".join(rest) or None)

    @classmethod
    def from_result(cls, result: pq.abc.PGresult, encoding: str) -> ServerError:
        """Take the fields of a failed result.

        :param encoding: Python's name of the connection's client encoding.
        """
        return cls.from_exception(psycopg.errors.error_from_result(result, encoding))

    @classmethod
    def from_response(cls, body: bytes, encoding: str = "utf-8") -> ServerError:
        """Take the fields of an ErrorResponse message."""
        fields = {field[:1]: shortened(field[1:].decode(encoding, "replace")) for field in body.split(b"\0") if field}
        message, context = fields.get(b"M", "no error text"), fields.get(b"W")
        return cls(fields.get(b"C"), message, fields.get(b"D"), fields.get(b"H"), context=context)


def translate(
    error: psycopg.Error, doing: str, *, table: tuple[str, str] | None = None, user: str | None = None
) -> PgsubError:
    """Make pgsub's error for an error in an established session with the publisher.

    :param doing: completes "could not …".
    :param table: schema and name of the table concerned, for a GRANT in the hint.
    :param user: role on the publisher, for a GRANT in the hint.
    """
    return classify(ServerError.from_exception(error), doing, table=table, user=user)


@contextlib.contextmanager
def translating(connection: psycopg.Connection, doing: str, *, table: tuple[str, str] | None = None) -> Iterator[None]:
    """Raise psycopg's errors in the block as translated by :func:`translate`, which explains the parameters."""
    user = connection.info.user
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, doing, table=table, user=user) from None


def classify(
    said: ServerError, doing: str, *, table: tuple[str, str] | None = None, user: str | None = None
) -> PgsubError:
    """Make pgsub's error from a server error's fields; see :func:`translate` for the parameters."""
    message, state = f"could not {doing}: {said.message}", said.sqlstate
    if state == "42501":
        hint = _grant_hint(said, table, user)
        return PermissionMissing(message, detail=said.detail, hint=hint, sqlstate=state)
    cls, ours = _meaning(said)
    if state in _NO_UTF8:
        ours = CHANGE_VALUE_HINT if table is not None else PASS_VALUE_HINT
    if doing == RECEIVE and (cls is ApplyError or cls is ReplicationBroken) and ours is None:
        ours = PASS_CHANGE_HINT
    words = server_hint(said.hint)
    theirs = None if words is None else f"The publisher's hint: {words}"
    error = cls(message, detail=said.detail, hint=ours or theirs, sqlstate=state)
    if isinstance(error, ApplyError) and table is not None:
        error.relation = ".".join(table)
    return error


def _meaning(said: ServerError) -> tuple[type[PgsubError], str | None]:
    state, text = said.sqlstate, said.message
    if state == "55006":
        return PublisherUnavailable, "The slot is free once its walsender ends, after wal_sender_timeout at the latest."
    if state is None or is_transient(state, said.file) or state in ("57014", "58000", "58030"):
        full = "replication slots are in use" in text
        return PublisherUnavailable, _FULL_HINT if full else None
    if state == "55000" and "synchronized from the primary" in (said.detail or ""):
        return PublisherUnavailable, PROMOTE_HINT
    own = _QUOTED.sub("", text)  # a publication or another object may have "slot" in its name
    if state in ("42704", "55000", "58P01") and ("slot" in own.lower() or "WAL segment" in own):
        return SlotLost, RECREATE_HINT
    return _of_settings(state, text)


def _of_settings(state: str, text: str) -> tuple[type[PgsubError], str | None]:
    """Classify the errors of a publisher that can be reached and has the slot."""
    if state == "42704" and "publication" in text:
        return ReplicationBroken, (
            "Up to PostgreSQL 17 a publication must be older than the position that the slot decodes. If it was made"
            " later, or again, make another slot; every table is compared with the publisher's, and only what differs"
            " is brought. If it is gone for good, first take it out of the subscription (pgsub alter"
            " --drop-publication):\npgsub reconcile NAME --force"
        )
    if state == "55000" and "wal_level" in text:
        return StateForbids, WAL_LEVEL_HINT
    if state == "42710":
        return StateForbids, None
    if state[:2] in ("22", "23", "54") or state in ("42P01", "42703", "42883", "3F000"):
        return ApplyError, None
    return ReplicationBroken, None


#: untranslatable_character, character_not_in_repertoire: the server cannot send a value as UTF-8.
_NO_UTF8 = ("22P05", "22021")
CHANGE_VALUE_HINT = "Change the value on the publisher. pgsub tries again by itself."
# the WAL keeps the value: the slot cannot get past it, and no finish LSN arrives for skip-lsn
PASS_VALUE_HINT = (
    "pgsub reads text as UTF-8, and the publisher cannot convert this value. Change it there. Then make another slot; "
    "every table is compared with the publisher's, and only what differs is brought:\npgsub reconcile NAME --force"
)

#: Completes "could not …" where a stream ends, perhaps because the publisher fails to decode a change.
RECEIVE = "receive data from WAL stream"
PASS_CHANGE_HINT = (
    "The publisher cannot send a change. Correct there what makes it fail, such as a row filter or a column list of a "
    "publication. Changes that were made before still fail, so make another slot then; every table is compared with "
    "the publisher's, and only what differs is brought:\npgsub reconcile NAME --force"
)

RECREATE_HINT = (
    "The changes that the slot kept are lost. Create another slot; every table is then compared with the publisher's, "
    "and only rows that differ are sent:\npgsub reconcile NAME"
)

PROMOTE_HINT = (
    "Promote the standby, and the subscription continues by itself; or give the primary's address in --connection."
)

PRIMARY_HINT = "Connect to the primary; with several hosts, the connection string needs target_session_attrs=primary."


def standby_lacks_slot(name: str) -> PublisherUnavailable:
    """Make the error for a standby that lacks a slot. This does not show that the slot is lost."""
    error = PublisherUnavailable(
        f'replication slot "{name}" does not exist on the standby that answers as the publisher',
        detail="The standby has not been promoted, and has not synchronized the slot. The slot may be on its primary.",
        hint=f"{PRIMARY_HINT} If the slot was made on this standby, or the primary is gone for good and the standby is "
        "promoted, create another slot:\npgsub reconcile NAME",
        sqlstate="42704",
    )
    error.standby = True
    return error


def standby_lags(message: str, detail: str) -> PublisherUnavailable:
    """Make the error for a standby that lacks WAL of its primary, which it may still receive."""
    hint = f"{PRIMARY_HINT}\nIf the primary is gone for good, promote the standby first."
    error = PublisherUnavailable(message, detail=detail, hint=hint, sqlstate="55000")
    error.standby = True
    return error


_FULL_HINT = "Drop a slot that nobody needs, or raise max_replication_slots on the publisher."

WAL_LEVEL_HINT = "Run this on the publisher and restart it:\nALTER SYSTEM SET wal_level = logical;"


def _grant_hint(said: ServerError, table: tuple[str, str] | None, user: str | None) -> str:
    role = _role(user)
    # guard: no owner of a table words the GRANT that somebody is told to run
    if said.context is not None:
        return server_words.SAID_BY_CODE
    if REPLICATION_ROLE.search(said.message):
        return replication_hint(user)
    if "row-level security" in said.message:
        return (
            "A row security policy would filter the copy. Run this on the publisher, or take the table out of the "
            f"publication:\nALTER ROLE {role} BYPASSRLS;"
        )
    denied = _DENIED.search(said.message)
    if denied and denied[1] in ("schema", "function", "sequence"):
        kind, privilege = denied[1].upper(), {"schema": "USAGE", "function": "EXECUTE", "sequence": "SELECT"}[denied[1]]
        return f"Run this on the publisher:\nGRANT {privilege} ON {kind} {quoting.name(denied[2])} TO {role};"
    name = ".".join(map(quoting.name, table)) if table else quoting.name(denied[2]) if denied else None
    if name is None:
        return f"The role {role} lacks a privilege on the publisher."
    return f"Run this on the publisher:\nGRANT SELECT ON TABLE {name} TO {role};"


def replication_hint(user: str | None) -> str:
    return f"Run this on the publisher as a superuser:\nALTER ROLE {_role(user)} REPLICATION;"


def _role(user: str | None) -> str:
    return quoting.name(user) if user else "<user of --connection>"
