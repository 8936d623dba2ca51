"""Private folders of Spark's JVM: for its blocks, its sockets, and the file that exchanges the port of its gateway."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pgsub.common.errors import SparkUnusable

#: Size in bytes of a file that tests whether there is space.
_SMALL = 4096
#: Folders that Spark makes at its start: blocks, its own files, files of its jobs, and a few more.
_FOLDERS = 8
_SOCKET_FOLDER = 103 - 42
#: Name in a scratch folder of a link to the folder of its sockets.
_LINK = "sockets"
#: Seconds after which every started JVM has written the port of its gateway.
_STARTING = 600.0
_locks: dict[Path, int] = {}  #: descriptors of locked files, by the scratch folder


def scratch_folder(run: Path) -> Path:
    """Make a private folder for the blocks and sockets of one JVM, which is locked until it is removed.

    Those of processes that were killed are removed. Others may use the same state folder, from a container, too, where
    a PID says nothing.

    :param run: the one in the state folder. If that has no space, the folder is a temporary one, because apply must
        start nevertheless.
    :raises SparkUnusable: there is no room for that, either.
    """
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(run)
        return _made(run)
    except OSError as error:
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="pgsub-"))
        raise SparkUnusable(
            f'could not make a folder for Spark in "{run}": {error.strerror}',
            hint=f"Free some space.\ndf -h {shlex.quote(str(run))}",
        ) from None


def _made(run: Path) -> Path:
    scratch = Path(tempfile.mkdtemp(prefix="spark.", dir=run.absolute()))
    try:
        # guard: no Spark starts in a folder that another start removes
        while not _is_ours(scratch):
            remove_scratch(scratch)
            scratch = Path(tempfile.mkdtemp(prefix="spark.", dir=run.absolute()))
        with tempfile.TemporaryDirectory(dir=scratch) as probe:  # Spark does not start where it can make none
            for number in range(_FOLDERS):
                (Path(probe) / str(number)).mkdir()
    except OSError:
        remove_scratch(scratch)
        raise
    return scratch


def _is_ours(scratch: Path) -> bool:
    """Lock a new folder; return False if another start took it for one whose process has ended, and removes it."""
    try:
        lock = _locks[scratch] = os.open(scratch / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = (scratch / "lock").stat()
    except (FileNotFoundError, BlockingIOError):
        return False
    return os.path.samestat(os.fstat(lock), there)


def _remove_abandoned(run: Path) -> None:
    """Remove the folders of processes that have ended without that."""
    for scratch in run.glob("spark.*"):
        with _abandoned(scratch) as ended:
            # guard: the folder of a Spark that runs is not removed
            if ended:
                remove_scratch(scratch)
    # A JVM that cannot write its port runs forever. One that can ends with its standard input.
    for place in run.glob("gateway.*"):
        if _is_old(place):
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _abandoned(scratch: Path) -> Iterator[bool]:
    """Yield whether the process of a folder has ended. The folder stays locked, so that no process begins to use it."""
    try:
        lock = os.open(scratch / "lock", os.O_RDWR)
    except FileNotFoundError:  # it may be made at this moment
        yield _is_old(scratch)
        return
    except OSError:
        yield False
        return
    try:
        yield _could_lock(lock)
    finally:
        os.close(lock)


def _could_lock(lock: int) -> bool:
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_old(place: Path) -> bool:
    with suppress(OSError):
        return time.time() - place.stat().st_mtime > _STARTING
    return False


def remove_scratch(scratch: Path) -> None:
    """Remove the folder of a JVM that has ended, with its sockets."""
    with suppress(OSError):
        shutil.rmtree((scratch / _LINK).readlink(), ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)
    if (lock := _locks.pop(scratch, None)) is not None:
        os.close(lock)


def socket_folder(scratch: Path) -> Path | None:
    """Return a folder that other users cannot enter, for the sockets between the JVM and its python processes.

    A socket's address has 103 bytes on every system, of which Spark's name takes 42.

    :param scratch: from :func:`scratch_folder`. If its path is too long, a temporary folder is made, to which it links.
    :return: None if no path is short enough.
    """
    if _is_short(scratch):
        return scratch
    folder = Path(tempfile.mkdtemp(prefix="pgsub-"))
    (scratch / _LINK).symlink_to(folder)
    return folder if _is_short(folder) else None


def _is_short(folder: Path) -> bool:
    return len(os.fsencode(folder)) <= _SOCKET_FOLDER


@contextmanager
def connection_folder(run: Path) -> Iterator[None]:
    """Make pyspark exchange port and secret of the gateway in a file of the state folder.

    The file is removed afterwards. If this process is killed before that, a later start removes it with other scratch
    files. If the state folder has no space, the file is a temporary one, because apply must start nevertheless.
    """
    folder, before = run / f"gateway.{os.getpid()}", tempfile.tempdir
    if _has_room(folder):
        tempfile.tempdir = str(folder.absolute())
    try:
        yield
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(folder: Path) -> bool:
    """Make a folder, and return whether a small file can be written there."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            return probe.write(bytes(_SMALL)) == _SMALL
    except OSError:
        return False
