"""Private files for transactions that are not finished or do not fit in memory. Mirrors worker.c's stream files.

One file per top-level transaction; a record is the subtransaction's xid, a length and the message as it came. An
aborted subtransaction is remembered and left out when the file is read. The server truncates instead; leaving out
gives the same rows and needs no assumption about the order of aborts.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pgsub.errors import Directive, PgsubError

_RECORD = struct.Struct(">II")
_READ = 1 << 20


class SpoolFailed(PgsubError):
    """A transaction could not be kept until its commit."""

    directive = Directive.RETRY


class Spool:
    """The spool folder of one worker, removed with the worker.

    :param folder: where spools live (0700), None for the system's temporary folder.
    :param owner: names the worker; what an older attempt of the same owner left behind is removed.
    """

    def __init__(self, folder: str | None, owner: str) -> None:
        base = Path(folder or tempfile.gettempdir())
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in base.glob(f"pgsub-spool-{owner}-*") if folder else ():
            shutil.rmtree(leftover, ignore_errors=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"pgsub-spool-{owner}-", dir=base))

    def open(self, xid: int) -> SpooledTransaction:
        """A new, empty file for a top-level transaction."""
        return SpooledTransaction(self._folder / f"{xid}.changes")

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._folder, ignore_errors=True)


class SpooledTransaction:
    """Messages of one transaction in a file.

    :ivar size: bytes of messages written, aborted ones included.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: BinaryIO | None = None
        self._aborted: set[int] = set()
        self.size = 0

    def append(self, subxid: int, payload: bytes) -> None:
        """Add one message.

        :raises PgsubError: the disk is full or fails; the publisher sends the transaction again.
        """
        try:
            self._append(subxid, payload)
        except OSError as error:
            raise self._failed(error) from None

    def _append(self, subxid: int, payload: bytes) -> None:
        if self._writer is None:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._writer = os.fdopen(descriptor, "ab", buffering=_READ)
        self._writer.write(_RECORD.pack(subxid, len(payload)))
        self._writer.write(payload)
        self.size += len(payload)

    def pause(self) -> None:
        """End of a stream block: no descriptor stays open for a transaction that may last for hours.

        :raises PgsubError: what was buffered does not fit on the disk.
        """
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            writer.close()
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> SpoolFailed:
        return SpoolFailed(
            f'could not write to spool file "{self._path}": {error.strerror}',
            hint="Free space where the spool folder is; apply goes on by itself.",
        )

    def abort(self, subxid: int) -> None:
        """Discard exactly the changes of one subtransaction."""
        self._aborted.add(subxid)

    def payloads(self) -> Iterator[bytes]:
        """The messages in order, without those of aborted subtransactions."""
        self.pause()
        if not self._path.exists():
            return
        with open(self._path, "rb", buffering=_READ) as file:
            while header := file.read(_RECORD.size):
                subxid, length = _RECORD.unpack(header)
                payload = file.read(length)
                if subxid not in self._aborted:
                    yield payload

    def remove(self) -> None:
        """Delete the file."""
        self.pause()
        self._path.unlink(missing_ok=True)
