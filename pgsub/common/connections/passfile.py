"""Password files, to which passwords of connection strings are moved. Mirrors ``passwordFromFile`` (fe-connect.c)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pgsub.common.connections import conninfo
from pgsub.common.errors import StateForbids

_FIELD = re.compile(r"(?:^|:)((?:[^:\\]|\\.)*)")


def store(params: Mapping[str, str], passfile: Path) -> dict[str, str]:
    """Move the password into a 0600 passfile; the returned parameters name the file instead.

    :param passfile: written completely or not at all, even after a crash or power loss; its folder has mode 0700.
    """
    public, secret = conninfo.split_password(params)
    if secret is None:
        return public
    passfile.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = passfile.with_name(passfile.name + ".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.writelines(f"{entry}:{_escaped(secret)}\n" for entry in _servers(public))
        file.flush()
        os.fsync(descriptor)  # the state store, which will name it, survives a power loss
    draft.replace(passfile)
    return {**public, "passfile": str(passfile)}


def password(passfile: Path) -> str:
    """Return the password that :func:`store` wrote.

    :raises StateForbids: the file is missing or was changed.
    """
    try:
        line = passfile.read_text().partition("\n")[0]
    except OSError as error:
        raise StateForbids(f'could not read passfile "{passfile}": {error.strerror}') from None
    parts = _FIELD.findall(line)
    if len(parts) != 5:
        raise StateForbids(f'passfile "{passfile}" was changed since pgsub wrote it')
    return re.sub(r"\\(.)", r"\1", parts[-1])


def _servers(params: Mapping[str, str]) -> list[str]:
    """Return the part before the password for each line of a passfile (``passwordFromFile``, fe-connect.c).

    Files may be merged, for example for executors. With wildcards the first password would be sent to every server.
    """
    hosts = (params.get("host") or params.get("hostaddr") or "").split(",")
    ports = (params.get("port") or "").split(",")
    user = _escaped(params["user"]) if params.get("user") else "*"
    if "service" in params:  # which may define what is missing here
        hosts, ports = ((hosts if hosts != [""] else ["*"]), (ports if ports != [""] else ["*"]))
    elif len(hosts) > 1 and len(ports) == 1:
        ports *= len(hosts)
    found = []
    for number, host in enumerate(hosts):
        port = ports[number] if number < len(ports) else ""
        # libpq looks up its default socket directory as localhost
        names = ["localhost", host] if host.startswith("/") else [host or "localhost"]
        found += [f"{name if name == '*' else _escaped(name)}:{port or '*'}:*:{user}" for name in names]
    return found


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:")
