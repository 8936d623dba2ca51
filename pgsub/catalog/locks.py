"""Locks of the state folder: one launcher per folder, one applying process per subscription.

Mirrors ``CreateLockFile`` in ``utils/init/miscinit.c``, but uses ``flock``: the kernel releases it when the holder
dies, for whatever reason. The contents of the file are only for messages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from pathlib import Path

from pgsub.catalog.state_folder import open_private, prepare_folder
from pgsub.catalog.times import readable, utc_now
from pgsub.common.errors import LockHeld, StateStoreError

_RETRY_SECONDS = 0.01
_MAX_TEXT = 400
_HOLDER = re.compile(r"pid (\d+) on host (\S+) ")


class Lock:
    """An exclusive lock on a file.

    :param path: the lock file in a state folder. Taking the lock creates the folder. Checking it does not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, timeout: float = 0.05) -> bool:
        """Take the lock if nobody has it.

        :param timeout: seconds to keep trying. The default is longer than a call of :meth:`holder`.
        :return: whether this object has the lock.
        :raises StateStoreError: the folder or the file is not private or cannot be opened.
        """
        prepare_folder(self.path.parent)
        deadline = time.monotonic() + timeout
        while self._descriptor is None:
            descriptor = open_private(self.path)
            if _flock(descriptor, fcntl.LOCK_EX) and self._is_current(descriptor):
                self._descriptor = descriptor
                self._sign(descriptor)
                break
            os.close(descriptor)
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY_SECONDS)
        return True

    def release(self, *, unlink: bool = False) -> None:
        """Release the lock. Does nothing if it is not held.

        :param unlink: also remove the file, for a lock that is never needed again.
        """
        if self._descriptor is None:
            return
        if unlink:
            self.path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError):  # keeps the space, which a full disk would not give again
                os.pwrite(self._descriptor, b" " * os.fstat(self._descriptor).st_size, 0)
        os.close(self._descriptor)
        self._descriptor = None

    def holder(self) -> str | None:
        """Return the holder, e.g. ``pid 4711 on host db1 since 2026-01-01T00:00:00.000000Z``, None without one.

        Never creates the file, and never takes the lock from anybody.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateStoreError(f'could not open lock file "{self.path}": {error.strerror}') from None
        try:
            if _flock(descriptor, fcntl.LOCK_SH):
                return None
            text = os.pread(descriptor, _MAX_TEXT, 0).decode("utf-8", "replace").partition("\n")[0]
        finally:
            os.close(descriptor)
        return "".join(character for character in text if character.isprintable()) or "an unknown process"

    def touch(self) -> None:
        """Give a sign of life that :meth:`silence` reports. Does nothing if the lock is not held.

        A file that was moved away with its folder gets none, because what the holder records is not there.
        """
        held, now = self._descriptor, time.time_ns()  # the clock that :meth:`silence` reads, not a file server's
        with contextlib.suppress(OSError):
            # guard: a state folder that was moved away gets no sign of life, without " and self._is_current(held)"
            if held is not None and self._is_current(held):
                os.utime(held, ns=(now, now))

    def silence(self) -> float:
        """Return the seconds since the holder's last sign of life, or its start; 0 without a file."""
        try:
            return max(time.time() - self.path.stat().st_mtime, 0.0)
        except OSError:
            return 0.0

    def _is_current(self, descriptor: int) -> bool:
        # The last holder may have removed the file between open and flock.
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def _sign(self, descriptor: int) -> None:
        # Overwritten in place: a full disk has only the space that the file already uses.
        text = f"pid {os.getpid()} on host {socket.gethostname()} since {utc_now()}\n".encode()
        try:
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
        except OSError:
            return  # the contents are only for messages


class TroubleFlag:
    """A flag that tells other processes about a failure to write. It is a lock, which works on a full disk.

    :param path: the file. Its folder passed :func:`~pgsub.catalog.state_folder.prepare_folder`. Space for the reason is
        allocated at once.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = open_private(path)
        with contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_size < _MAX_TEXT:
                os.pwrite(self._descriptor, b" " * _MAX_TEXT, 0)

    def set(self, text: str) -> None:
        """Raise the flag."""
        with contextlib.suppress(OSError):  # another process has already raised it
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._descriptor, text.replace("\n", " ").encode()[:_MAX_TEXT].ljust(_MAX_TEXT), 0)

    def clear(self) -> None:
        """Lower the flag."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Lower the flag permanently."""
        os.close(self._descriptor)


#: Flags of a launcher that cannot write to the state store, or to its log.
UNRECORDED, UNLOGGED = "unrecorded.lock", "unlogged.lock"
#: What they mean where the reason could not be written either.
_MEANS = {UNRECORDED: "the state store cannot be written", UNLOGGED: "the log cannot be written"}


def troubles(folder: Path) -> list[str]:
    """Return what launchers of a state folder currently cannot write, with the reason if known."""
    said = {name: Lock(folder / name).holder() for name in (UNRECORDED, UNLOGGED)}
    return [text.strip() or _MEANS[name] for name, text in said.items() if text is not None]


def launcher_lock(folder: Path) -> Lock:
    """Return the lock of the launcher that serves a whole state folder."""
    return Lock(folder / "launcher.lock")


def subscription_lock(folder: Path, subid: int) -> Lock:
    """Return the lock of the process that applies or maintains one subscription."""
    return Lock(folder / f"subscription-{subid}.lock")


def lock_held(lock: Lock, what: str) -> LockHeld:
    """Return the error for a lock that another process has.

    :param what: what it protects, e.g. ``subscription "s"``.
    """
    holder = lock.holder()
    return LockHeld(
        f"{what} is in use by another process",
        detail=f"The lock is held by {readable(holder)}." if holder else "The lock was freed in the meantime.",
        hint=_ending(holder) if holder else "Try again.",
    )


def _ending(holder: str) -> str:
    """Return what to do about the holder. No command to paste ends it, because it may be the service itself."""
    match = _HOLDER.match(holder)
    if match is None or match[2] != socket.gethostname():
        return "Wait until it ends, or stop it where it runs."
    return "Wait until it ends. See what a pgsub run serves before you end it (SIGTERM):\npgsub status"


def _flock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
