"""Finds errors in a connection string without a server: values that libpq refuses, and missing services.

libpq checks values only when it connects, where a mistyped port looks like a server that is down.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from psycopg import pq
from psycopg.conninfo import make_conninfo

from pgsub.common.connections import conninfo as ci
from pgsub.common.errors import UsageError
from pgsub.common.subscription import SECRETS

#: parseServiceInfo and parseServiceFile, fe-connect.c
_NO_SERVICE = re.compile(r'definition of service "|service file "[^"]*" not found')
_SECTION = re.compile(r"^\[([^]\n]+)\]", re.MULTILINE)
_NAMED = 10  #: maximum number of services in a message
#: The name of a socket, which is in libpq's message in any language if it tried to connect.
_TRIED = ".s.PGSQL."


def check(params: Mapping[str, str], side: str, *, uri: bool = False) -> None:
    """Refuse values that libpq would refuse for any server. No connection is opened.

    :param params: from :func:`conninfo.parse`; at most the name of a service is checked.
    :param side: ``publisher`` or ``target``, for the error.
    :param uri: they are from a URI, where an unescaped ``/`` makes the rest of a password the port, and an unescaped
        ``@`` makes it the host.
    :raises UsageError: a value is invalid; with ``uri`` the text does not repeat port or host.
    """
    reason = _of_uri(params) if uri else None
    reason = reason or _no_number(params) or _refused(params)
    if reason is not None:
        raise UsageError(f"invalid connection string for the {side}: {reason[0]}", hint=reason[1])


_Reason = tuple[str, str]
#: Secrets are not repeated in an error, and a service is looked up when its server is connected to.
_LEFT_OUT = {*SECRETS, "service", "servicefile"}


def _of_uri(params: Mapping[str, str]) -> _Reason | None:
    hint = 'In a URI write special characters of user and password as %XX: "/" as %2F, ":" as %3A, "@" as %40.'
    if not all(one.isdecimal() and 0 < int(one) < 65536 for one in params.get("port", "").split(",") if one):
        return "its port is not a number from 1 to 65535", hint
    # a path may contain the character, and the name of an abstract socket begins with it
    if any("@" in one[1:] and not one.startswith("/") for one in params.get("host", "").split(",")):
        return 'its host contains "@"', hint
    return None


def _no_number(params: Mapping[str, str]) -> _Reason | None:
    """Find an invalid option that libpq or psycopg reads as a number, libpq only after connecting."""
    for key in ci.KEEPALIVES.keys() & params.keys():
        try:
            int(params[key])
        except ValueError:
            return f'invalid integer value "{params[key]}" for connection option "{key}"', f"Give {key} a number."
    return None


def _refused(params: Mapping[str, str]) -> _Reason | None:
    """Start a connection that leads nowhere: libpq checks all values first (connectOptions2, PQconnectPoll).

    With a service nothing is checked: its values are unknown here, and values are checked against each other.
    """
    if "service" in params:
        return None
    hosts, addresses = (params.get(key, "").split(",") for key in ("host", "hostaddr"))
    differ = params.get("host") and params.get("hostaddr") and len(hosts) != len(addresses)  # then libpq does not start
    many = max(len(hosts), len(addresses))
    where = {} if differ else {"host": ",".join("/" * many), "hostaddr": ""}
    given = {key: value for key, value in params.items() if key not in _LEFT_OUT}
    where["password"] = "-"  # otherwise a passfile is read, with a warning
    if params.get("gssencmode", "require") == "require":  # refused for a socket, which only this attempt uses
        where["gssencmode"] = "disable"
    nowhere = pq.PGconn.connect_start(make_conninfo("", **{**given, **where}).encode())
    try:
        said = nowhere.get_error_message().strip()
    finally:
        nowhere.finish()
    hint = "Correct this value in the connection string, or in the environment."
    return None if _TRIED in said else (said.partition("\n")[0], hint)


def missing_service(message: str) -> str | None:
    """Return where services are searched for, if libpq's error is that a service is not defined.

    :param message: libpq's message.
    :return: whole sentences (``parseServiceInfo``, fe-connect.c); None for any other error.
    """
    if not _NO_SERVICE.search(message):
        return None
    file = os.environ.get("PGSERVICEFILE") or os.path.expanduser("~/.pg_service.conf")
    places = f'Services are looked for in "{file}", and then in pg_service.conf of the folder PGSYSCONFDIR.'
    try:
        found = _SECTION.findall(Path(file).read_text(errors="replace"))
    except OSError as error:
        return f"{places} The first file: {error.strerror}."
    names = ", ".join(f'"{name}"' for name in found[:_NAMED]) + (", …" if len(found) > _NAMED else "")
    return f"{places} The first file defines {names or 'none'}."
