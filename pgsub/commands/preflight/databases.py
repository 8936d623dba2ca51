"""The checks of the two connections: identity of the databases, encryption, encodings."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator, Sequence

import psycopg

from pgsub.commands.preflight.findings import Caution
from pgsub.common.errors import PgsubError, StateForbids
from pgsub.common.plural import some
from pgsub.publisher import connect as publisher
from pgsub.publisher import publication
from pgsub.publisher.stream import transport

# A copy of a cluster has the same system identifier and OIDs, but not the same start time in microseconds.
_DATABASE = """
SELECT d.oid, pg_catalog.pg_postmaster_start_time()
  FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()
"""

#: Encodings of which every text can be converted to UTF-8.
_CONVERTIBLE = frozenset(
    {
        *("UTF8", "LATIN1", "LATIN2", "LATIN4", "LATIN5", "LATIN6", "LATIN7", "LATIN8", "LATIN9", "LATIN10"),
        *("ISO_8859_5", "KOI8R", "KOI8U", "WIN866", "WIN1256"),
    }
)


def same_database(one: psycopg.Connection, other: psycopg.Connection) -> bool:
    """Return whether two sessions are connected to the same database."""
    return one.execute(_DATABASE).fetchone() == other.execute(_DATABASE).fetchone()


def check_other_database(source: psycopg.Connection, session: psycopg.Connection) -> None:
    """Refuse to replicate a database into itself, because each applied change would be published again.

    :raises StateForbids: both sessions are connected to the same database.
    """
    if same_database(source, session):
        raise StateForbids(
            f'publisher and target are the same database "{session.info.dbname}"',
            detail="Every change that is applied would be published and applied again.",
            hint="Name another database with --target or --connection.",
        )


@contextlib.contextmanager
def exchange_named(source: psycopg.Connection, session: psycopg.Connection, names: Sequence[str]) -> Iterator[None]:
    """Add the likely cause to the hint of an error: publisher and target may be exchanged.

    :param names: the publications, which the target has in that case.
    """
    try:
        yield
    except PgsubError as error:
        with contextlib.suppress(PgsubError, psycopg.Error):
            for found in exchanged(source, session, names):
                said = f"{found.detail} {found.hint}"
                error.hint = f"{said} If not: {error.hint}" if error.hint else said
        raise


def exchanged(source: psycopg.Connection, session: psycopg.Connection, names: Sequence[str]) -> Iterator[Caution]:
    """Warn that publisher and target seem to be exchanged: only the target has the publications.

    This is not an error, because a database that forwards changes may have publications of the same names.
    """
    if len(publication.missing_publications(source, names)) < len(names):
        return
    if not publication.missing_publications(session, names):
        yield Caution(
            "--connection and --target seem to be exchanged",
            f"The target's database has publication {some(names)}, the publisher's has not.",
            "Exchange --connection and --target.",
        )


def check_same_database(known: psycopg.Connection, other: psycopg.Connection, what: str, option: str) -> None:
    """Check that two sessions are connected to the same database.

    :param what: the server to which ``known`` is connected: publisher or target.
    :param option: the option that led to ``other``.
    """
    if not same_database(known, other):
        raise StateForbids(
            f"{option} leads to another database than that of the {what}",
            detail=f'It leads to database "{other.info.dbname}" on host "{other.info.host}", port {other.info.port}.',
            hint=f"Name the {what} of the subscription.",
        )


def check_encryption(connection: psycopg.Connection, server: str) -> Iterator[Caution]:
    """Warn of an unencrypted connection to another machine.

    :param server: publisher or target.
    """
    info = connection.info
    if transport.plain(connection) and not is_local(info.hostaddr or info.host):
        yield Caution(
            f"the connection to the {server} is not encrypted",
            f"Anyone who can intercept the connection to {info.host} can change what is applied on the target.",
            f'Add "sslmode=verify-full sslrootcert=…" to the connection string of the {server}.',
        )


def is_local(host: str) -> bool:
    """Return whether a host is this machine: a directory of sockets, or a loopback address."""
    if host.startswith(("/", "@")) or host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_encoding(connection: publisher.Connection, session: psycopg.Connection) -> Iterator[Caution]:
    """Warn of text that cannot be converted to UTF-8, or from it to the target's encoding."""
    there = connection.info.parameter_status("server_encoding")
    here = session.info.parameter_status("server_encoding")
    message = f'the publisher\'s database has encoding "{there}", the target\'s "{here}"'
    if "SQL_ASCII" in (there, here):  # the encoding is unknown, so nothing can be converted
        yield Caution(
            message,
            "pgsub sends text as UTF-8. What is not UTF-8 in a database of SQL_ASCII stops apply and copies, and text"
            " from another encoding is stored in it as UTF-8; the server's subscriber would take the bytes as they"
            " are.",
            "Replicate between databases with an encoding other than SQL_ASCII.",
        )
    elif here not in (there, "UTF8"):
        yield Caution(
            message,
            "Text with characters that have no equivalent in the target's encoding fails.",
            "Replicate into a database of the same encoding, or of UTF8.",
        )
    elif here == there not in _CONVERTIBLE:
        yield Caution(
            f'both databases have encoding "{there}", and pgsub sends text as UTF-8',
            "A character that has no equivalent in UTF-8 stops apply and copies, and skip-lsn cannot skip it; the"
            " server's subscriber would take its bytes as they are.",
            "Let nobody who is not trusted write such characters, or convert both databases to UTF8.",
        )
