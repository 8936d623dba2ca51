"""Limits the space that spool files take."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from pgsub.common.errors import SparkUnusable, SpoolFailed, UsageError
from pgsub.common.machine.path_safety import exchangeable
from pgsub.common.size import parse_size

#: Space left free on the file system of the spool: SPARE bytes, or 1/SPARE_PART of a small one. It is checked again
#: after every _CHECK bytes written.
SPARE, SPARE_PART, _CHECK = 1 << 30, 20, 1 << 20


def limit() -> int:
    """Return PGSUB_SPOOL_LIMIT, the limit in bytes for the spool of one worker; 0 if it is not set.

    :raises UsageError: the value is not a size.
    """
    text = os.environ.get("PGSUB_SPOOL_LIMIT", "0")
    found = parse_size(text)
    if found is None:
        raise UsageError(
            f'"{text}" is not a valid size',
            detail="PGSUB_SPOOL_LIMIT is a number of bytes, or with a unit: kB, MB, GB, TB.",
        )
    return found


def refuse_exchangeable(folder: Path) -> None:
    """Refuse a spool folder that another user could exchange, by the rules for the state folder.

    :raises SparkUnusable: it is a symbolic link, another user owns it or may write to it, or its path could be made to
        lead elsewhere.
    """
    path = shlex.quote(str(folder))
    if folder.is_symlink():
        raise SparkUnusable(
            f'spool folder "{folder}" is a symbolic link', hint="Name the folder itself in spark.pgsub.spool.dir."
        )
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise SparkUnusable(
            f'spool folder "{folder}" has wrong ownership',
            detail=f"It belongs to user id {status.st_uid}, this process runs as {os.geteuid()}.",
            hint=f"Name a folder of your own in spark.pgsub.spool.dir.\nls -la {path}",
        )
    problem, hint = exchangeable(folder)
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        problem, hint = f'Others may write to folder "{folder}".', f"chmod go-w {path}"
    if problem is not None:
        raise SparkUnusable(
            f'spool folder "{folder}" can be exchanged by others',
            detail=problem,
            hint=hint or "Name a folder of your own in spark.pgsub.spool.dir.",
        )


class SpoolSpace:
    """The space for the spool of one worker, bounded by its limit and by the space reserved for others.

    :param limit: bytes, 0 for no limit.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._taken = self._seen = 0

    def take(self, size: int) -> None:
        """Reserve space before writing.

        :raises SpoolFailed: not enough space is left.
        """
        if self._limit and self._taken + size > self._limit:
            raise SpoolFailed(
                f'transactions in progress need more space than the limit of spool "{self._folder}" may have',
                detail=f"The limit is {self._limit} bytes.",
                hint="Set PGSUB_SPOOL_LIMIT to a larger value for pgsub run; apply tries again by itself.",
            )
        if self._taken + size - self._seen >= _CHECK or not self._seen:
            self._check_free(size)
            self._seen = self._taken + size
        self._taken += size

    def _check_free(self, size: int) -> None:
        """Check the free space: the spool must not make other writers fail, above all the state store."""
        found = os.statvfs(self._folder)
        free, spare = found.f_bavail * found.f_frsize, min(SPARE, found.f_blocks * found.f_frsize // SPARE_PART)
        if free < spare + size + _CHECK // 2:
            raise SpoolFailed(
                f'too little free space is left for spool "{self._folder}"',
                detail=f"{free} bytes are free, {spare} of them are left to others.",
                hint=f"Free some space; apply tries again by itself.\ndf -h {shlex.quote(str(self._folder.parent))}",
            )

    def give(self, size: int) -> None:
        """Give back the space of removed bytes."""
        self._taken -= size
        self._seen = min(self._seen, self._taken)
