"""Errors that show a lack of resources on this machine or by a limit of the process: descriptors, memory, disk space.

They are not bugs, and the failed operation is retried. Mirrors the server's ERRCODE_INSUFFICIENT_RESOURCES.
"""

from __future__ import annotations

import errno
import os
import re

from pgsub.common.errors import OutOfResources
from pgsub.common.machine import process_limits

_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_MEMORY = frozenset({errno.ENOMEM, errno.ENOBUFS})
_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NO_THREAD = "can't start new thread"  #: the interpreter's message, whatever the system's error
#: Messages of Java and of programs that report EAGAIN of fork() or pthread_create().
_NO_THREAD = re.compile(
    "unable to create native thread|pthread_create failed|Cannot create (?:worker )?(?:GC )?thread"
    f"|{re.escape(os.strerror(errno.EAGAIN))}|{NO_THREAD}"
)


def out_of_resources(error: BaseException) -> OutOfResources | None:
    """Return the lack of resources that an exception shows, in the server's words; None for any other exception."""
    if isinstance(error, MemoryError):
        return _memory()
    if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        return _no_thread()
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


def no_thread_in(text: str) -> OutOfResources | None:
    """Return an error if a text of another program says that it could not start a process or thread."""
    return _no_thread() if _NO_THREAD.search(text) else None


def _no_thread() -> OutOfResources:
    return OutOfResources(
        "could not start a thread: too many processes or too little memory",
        detail=process_limits.near(),
        hint="Raise the limit of processes (ulimit -u, LimitNPROC= and TasksMax= of systemd, --pids-limit of a"
        " container), or end what is not needed.",
        sqlstate="53000",
    )


def no_descriptor() -> OutOfResources | None:
    """Return an error if the process has no descriptor left; libpq does not report that for a failed connection."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return out_of_resources(error)
    return None


def _memory() -> OutOfResources:
    return OutOfResources(
        "out of memory", hint="Give the process more memory (ulimit -v, MemoryMax= of systemd).", sqlstate="53200"
    )
