"""Private files for transactions that are not finished or do not fit in memory. Mirrors worker.c's stream files.

One file per top-level transaction; a record is the subtransaction's xid, a length and the message as it came. An
aborted subtransaction is remembered and left out when the file is read. The server truncates instead; leaving out
gives the same rows and needs no assumption about the order of aborts.

A logical message in a stream bears the xid of the whole transaction (pgoutput_message). Between the first change of a
subtransaction and its abort the session was inside it, so messages there are left out with it; to know that place, an
abort is a record too, without a message.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pgsub.errors import Directive, PgsubError

_RECORD = struct.Struct(">II")
_BUFFER = 1 << 20
_MESSAGE = ord("M")


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
    :ivar end: bytes of the file that :meth:`records` may read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: BinaryIO | None = None
        self._written = 0
        self._aborted: set[int] = set()
        self._ended: list[int] = []  #: aborted since the last message was written
        self.size = 0
        self.end = 0

    def append(self, subxid: int, payload: bytes) -> None:
        """Add one message.

        :raises PgsubError: the disk is full or fails; the publisher sends the transaction again.
        """
        try:
            if self._writer is None:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                self._writer = os.fdopen(descriptor, "ab", buffering=_BUFFER)
            if self._ended:
                self._mark(self._writer)
            self._writer.write(_RECORD.pack(subxid, len(payload)))
            self._writer.write(payload)
        except OSError as error:
            raise self._failed(error) from None
        self.size += len(payload)
        self._written += _RECORD.size + len(payload)

    def _mark(self, writer: BinaryIO) -> None:
        for subxid in self._ended:
            writer.write(_RECORD.pack(subxid, 0))
        self._written += _RECORD.size * len(self._ended)
        self._ended.clear()

    def publish(self) -> None:
        """Let who follows the file read everything so far.

        :raises PgsubError: what was buffered does not fit on the disk.
        """
        try:
            if self._writer is not None:
                self._writer.flush()
        except OSError as error:
            raise self._failed(error) from None
        self.end = self._written

    def pause(self) -> None:
        """End of a stream block: no descriptor stays open for a transaction that may last for hours.

        :raises PgsubError: what was buffered does not fit on the disk.
        """
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            raise self._failed(error) from None
        self.end = self._written

    def _failed(self, error: OSError) -> SpoolFailed:
        return SpoolFailed(
            f'could not write to spool file "{self._path}": {error.strerror}',
            hint="Free space where the spool folder is; apply goes on by itself.",
        )

    def abort(self, subxid: int) -> None:
        """Discard exactly the changes of one subtransaction."""
        self._aborted.add(subxid)
        self._ended.append(subxid)

    def records(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Pairs of subtransaction and message as they came, aborted ones included; an abort has an empty message.

        :param start: 0, or the ``end`` of an earlier call.
        :param end: a value that :attr:`end` had.
        """
        left = end - start
        if left <= 0:
            return
        with open(self._path, "rb", buffering=_BUFFER) as file:
            file.seek(start)
            while left > 0:
                subxid, length = _RECORD.unpack(file.read(_RECORD.size))
                left -= _RECORD.size + length
                yield subxid, file.read(length)

    def payloads(self) -> Iterator[bytes]:
        """The messages in order, without those of aborted subtransactions."""
        self.pause()
        aborted = self._aborted
        inside: set[int] = set()  # aborted ones that the session was in here
        for subxid, payload in self.records(0, self.end):
            if not payload:
                inside.discard(subxid)
            elif subxid in aborted:
                inside.add(subxid)
            elif not inside or payload[0] != _MESSAGE:
                yield payload

    def remove(self) -> None:
        """Delete the file; what is not written yet is lost with it."""
        with contextlib.suppress(SpoolFailed):
            self.pause()
        self._path.unlink(missing_ok=True)
