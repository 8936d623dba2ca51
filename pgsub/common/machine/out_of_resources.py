"""Errors that say that this machine, or a limit of the process, has no more of something: descriptors, memory, room.

They are no bugs, whoever meets them: what failed is tried again. Mirrors the server's ERRCODE_INSUFFICIENT_RESOURCES.
"""

from __future__ import annotations

import errno
import os

from pgsub.common.errors import OutOfResources

_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_MEMORY = frozenset({errno.ENOMEM, errno.ENOBUFS})
_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NO_THREAD = "can't start new thread"  #: of the interpreter, whatever the system said


def out_of_resources(error: BaseException) -> OutOfResources | None:
    """Return what the machine lacks by an unexpected exception, in the server's words; None for any other one."""
    if isinstance(error, MemoryError):
        return _memory()
    if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        return OutOfResources(
            "could not start a thread: too many processes or too little memory",
            hint="Raise the limit of processes (ulimit -u, TasksMax= of systemd), or end what is not needed.",
            sqlstate="53000",
        )
    if not isinstance(error, OSError):
        return None
    if error.errno in _FILES:
        return OutOfResources(
            f"out of file descriptors: {error.strerror}",
            hint="Raise the limit of open files (ulimit -n, LimitNOFILE= of systemd).",
            sqlstate="53000",
        )
    if error.errno in _ROOM:
        place = f' "{error.filename}"' if error.filename else ""
        return OutOfResources(
            f"could not write file{place}: {error.strerror}", hint="Check free disk space.", sqlstate="53100"
        )
    return _memory() if error.errno in _MEMORY else None


def no_descriptor() -> OutOfResources | None:
    """Return the error of a process that can open nothing more; libpq does not say so of a connection that failed."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return out_of_resources(error)
    return None


def _memory() -> OutOfResources:
    return OutOfResources(
        "out of memory", hint="Give the process more memory (ulimit -v, MemoryMax= of systemd).", sqlstate="53200"
    )
