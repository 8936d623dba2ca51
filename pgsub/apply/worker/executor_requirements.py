"""Checks that a cluster's executors have and reach what workers need: in a task before any worker, and in each worker.

The launcher has already reached both servers itself. So a fault found here is a difference between its machine and the
executor's: another version, a missing file, a missing route or pg_hba.conf rule. The first task checks only one
executor. If another executor lacks something, the worker that starts there reports it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pgsub
from pgsub.apply.stream.spool import Spool
from pgsub.common.connections import conninfo as ci
from pgsub.common.connections import conninfo_check
from pgsub.common.errors import PgsubError, PublisherUnavailable, SparkUnusable, TargetUnavailable
from pgsub.common.subscription import Subscription
from pgsub.common.worker_heartbeat import Heartbeat, HeartbeatAddress, HeartbeatSender
from pgsub.publisher import connect as publisher
from pgsub.target.session import connect as target
from pgsub.target.session.connect import SessionName

Result = TypeVar("Result")

#: Subscription ID in heartbeats of the check.
NOBODY = 0
#: Several heartbeats, because a datagram may be lost even if the way is open.
_HEARTBEATS = 3


@dataclass(frozen=True, slots=True)
class CheckSpec:
    """Item of the task: the requirements of the workers.

    :ivar number: increases with every check of a launcher; the epoch of its heartbeats.
    """

    number: int
    subscriptions: tuple[Subscription, ...]
    heartbeat: HeartbeatAddress | None
    spool_dir: str | None


@dataclass(slots=True)
class Checked:
    """Result of the task.

    :ivar errors: errors with the names of their subscriptions; the context of each is the executor.
    """

    host: str
    errors: list[tuple[str, PgsubError]] = field(default_factory=list)


@functools.cache
def installed() -> tuple[str, str]:
    """Return the version and build of pgsub here. The build is a hash of its source files, empty if it has none."""
    package = Path(pgsub.__file__).parent
    files = sorted(package.rglob("*.py"), key=Path.as_posix)
    digest = hashlib.sha256()
    for file in files:
        digest.update(b"%s\0%s\0" % (os.fsencode(file.relative_to(package)), file.read_bytes()))
    return pgsub.__version__, digest.hexdigest() if files else ""


def refuse_other(version: str, build: str) -> None:
    """Refuse to work for a launcher with another pgsub, whose messages and ledger may differ.

    Called before the item of a task is unpickled, whose classes may differ in another build.

    :raises SparkUnusable: version or build differs from this executor's.
    """
    here, build_here = installed()
    if version == here and (build == build_here or not (build and build_here)):
        return
    if version == here:
        message = f"the executors have another build of pgsub {here} than this launcher"
    else:
        message = f"the executors have pgsub {here}, but this launcher is {version}"
    hint = "Ship what this launcher runs with.\npython -m pgsub.spark.archive pgsub_env.tar.gz"
    raise SparkUnusable(message, context=_executor(), hint=hint)


def explained(function: Callable[[Any], Result], spec: Any) -> Result:
    """Run a worker on an executor. If it cannot connect, raise an error that names the executor and what it lacks.

    :param spec: must have the attribute ``subscription``.
    """
    try:
        return function(spec)
    except (PublisherUnavailable, TargetUnavailable) as error:
        raise cause(error, spec.subscription) from None


def _executor() -> str:
    return f'executor on "{socket.gethostname()}"'


def run(spec: CheckSpec) -> Checked:
    """Check all requirements, and continue after a fault."""
    found = Checked(socket.gethostname())
    for sub in spec.subscriptions:
        _try(found, sub, partial(_passfile, sub.target, "target"))
        _try(found, sub, partial(_passfile, sub.connection, "publisher"))
        _try(found, sub, partial(_with_files, partial(_target, sub), sub.target, "target"))
        _try(found, sub, partial(_with_files, partial(_publisher, sub), sub.connection, "publisher"))
        _try(found, sub, partial(_spool, sub, spec.spool_dir))
    sender = HeartbeatSender(spec.heartbeat)
    for _ in range(_HEARTBEATS):
        sender.send(Heartbeat(NOBODY, NOBODY, epoch=spec.number), now=True)
    return found


def _try(found: Checked, sub: Subscription, look: Callable[[], None]) -> None:
    try:
        look()
    except PgsubError as error:
        error.context = _executor()
        found.errors.append((sub.name, error))


def _target(sub: Subscription) -> None:
    target.open_session(sub, SessionName(sub.subid, "launcher", 0), replica=False).close()


def _publisher(sub: Subscription) -> None:
    publisher.connect(sub.connection, application_name=sub.name).close()


def _spool(sub: Subscription, folder: str | None) -> None:
    spool = Spool(folder, f"{sub.subid}-check")
    spool.open(0)
    spool.close()


def _passfile(conninfo: str, side: str) -> None:
    """Refuse an unreadable passfile that was given: libpq would ignore it and send no password."""
    file = ci.usable(ci.parse(conninfo, side)).get("passfile")
    if file and not os.access(file, os.R_OK):
        raise _unreadable(file, side)


def _with_files(look: Callable[[], None], conninfo: str, side: str) -> None:
    """Connect; raise the cause if that fails."""
    try:
        look()
    except PgsubError as error:
        raise _explained(error, conninfo, side) from None


def cause(error: PublisherUnavailable | TargetUnavailable, sub: Subscription) -> PgsubError:
    """Return why a worker could not connect: a missing file or its own error, with the executor as context."""
    server = (sub.target, "target") if isinstance(error, TargetUnavailable) else (sub.connection, "publisher")
    found = _explained(error, *server)
    found.context = found.context or _executor()
    return found


def _explained(error: PgsubError, conninfo: str, side: str) -> PgsubError:
    """Return the error of the file if libpq found no service or had no password to send; else the given error."""
    params = ci.usable(ci.parse(conninfo, side))
    if (service := params.get("service")) and conninfo_check.missing_service(error.message):
        return _undefined(service, side)
    file = params.get("passfile") or os.environ.get("PGPASSFILE")
    if not file or "no password supplied" not in error.message:
        return error
    if not os.access(file, os.R_OK):
        return _unreadable(file, side)
    if os.stat(file).st_mode & (stat.S_IRWXG | stat.S_IRWXO):  # passwordFromFile, fe-connect.c
        return SparkUnusable(
            f'the passfile on the executors is open to others: "{file}"',
            detail="libpq ignores a passfile that its group or others may read, as of a secret that Kubernetes"
            " mounts with fsGroup.",
            hint="Let only the user of the executors read it, or write the passwords into a service file, which may"
            f" have any mode.\nchmod 600 {shlex.quote(file)}",
        )
    return error


def _undefined(service: str, side: str) -> SparkUnusable:
    """Return the error for a service that is defined on the launcher's machine but not on an executor."""
    file = os.environ.get("PGSERVICEFILE")
    return SparkUnusable(
        f'service "{service}" of the {side} is not defined on the executors',
        detail="PGSERVICEFILE is not set there." if file is None else f'PGSERVICEFILE is "{file}" there.',
        hint="Put a service file where executors can read it, and set its path for them."
        "\n--conf spark.executorEnv.PGSERVICEFILE=/etc/pgsub/pg_service.conf",
    )


def _unreadable(file: str, side: str) -> SparkUnusable:
    return SparkUnusable(
        f'the passfile of the {side} cannot be read on the executors: "{file}"',
        hint="Put a passfile where executors can read it, and set its path for them."
        "\n--conf spark.executorEnv.PGPASSFILE=/etc/pgsub/pgpass",
    )
