"""What is wrong with a connection string, said before a server is asked: values that libpq refuses, services it lacks.

libpq checks values when it connects, and there a mistyped port looks like a server that is down.
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
_NAMED = 10  #: services that are listed
#: The name of a socket: libpq says it where it tried to connect, in whatever language.
_TRIED = ".s.PGSQL."


def check(params: Mapping[str, str], side: str, *, uri: bool = False) -> None:
    """Refuse values that libpq would refuse, whatever server they lead to. No connection is opened.

    :param params: as of :func:`conninfo.parse`; of a service only the name is looked at, if at all.
    :param side: ``publisher`` or ``target``, for the error.
    :param uri: whether they stood in a URI, where an unescaped ``/`` makes the rest of a password the port.
    :raises UsageError: without that value then.
    """
    reason = _port_of_uri(params.get("port", "")) if uri else None
    reason = reason or _no_number(params) or _refused(params)
    if reason is not None:
        raise UsageError(f"invalid connection string for the {side}: {reason[0]}", hint=reason[1])


_Reason = tuple[str, str]
#: Secrets are not repeated by whoever refuses them, and a service is looked for when its server is connected to.
_LEFT_OUT = {*SECRETS, "service", "servicefile"}


def _port_of_uri(port: str) -> _Reason | None:
    if all(one.isdecimal() and 0 < int(one) < 65536 for one in port.split(",") if one):
        return None
    return (
        "what stands for its port is not a number from 1 to 65535",
        'In a URI write special characters of user and password as %XX: "/" as %2F, ":" as %3A, "@" as %40.',
    )


def _no_number(params: Mapping[str, str]) -> _Reason | None:
    """Find an option that libpq reads as a number when it has connected, or psycopg before."""
    for key in ci.KEEPALIVES.keys() & params.keys():
        try:
            int(params[key])
        except ValueError:
            return f'invalid integer value "{params[key]}" for connection option "{key}"', f"Give {key} a number."
    return None


def _refused(params: Mapping[str, str]) -> _Reason | None:
    """Let libpq begin to connect to nowhere: it checks all values before (connectOptions2, PQconnectPoll).

    What a service says is not known here, and values are checked against each other: with one, nothing is said.
    """
    if "service" in params:
        return None
    hosts, addresses = (params.get(key, "").split(",") for key in ("host", "hostaddr"))
    differ = params.get("host") and params.get("hostaddr") and len(hosts) != len(addresses)  # it begins nothing then
    many = max(len(hosts), len(addresses))
    where = {} if differ else {"host": ",".join("/" * many), "hostaddr": ""}
    given = {key: value for key, value in params.items() if key not in _LEFT_OUT}
    where["password"] = "-"  # else a passfile is read, and warned of
    if params.get("gssencmode", "require") == "require":  # refused for a socket, which only this attempt has
        where["gssencmode"] = "disable"
    nowhere = pq.PGconn.connect_start(make_conninfo("", **{**given, **where}).encode())
    try:
        said = nowhere.get_error_message().strip()
    finally:
        nowhere.finish()
    hint = "Correct this value in the connection string, or in the environment."
    return None if _TRIED in said else (said.partition("\n")[0], hint)


def missing_service(message: str) -> str | None:
    """Say where services are looked for, where an error of libpq is that there is none of that name.

    :param message: of libpq.
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
