"""Private files for transactions that are unfinished or do not fit in memory. Mirrors worker.c's stream files.

Each top-level transaction has one file, with the messages as they were received. Messages that were received in one
piece are written and read in one piece. Changes of an aborted subtransaction are left out when the file is read. The
server truncates the file instead. Leaving them out gives the same rows, whatever the order of the aborts.

A logical message in a stream has the xid of the whole transaction (pgoutput_message). From the first change of a
subtransaction until its abort the session was inside it, so messages in between are left out too. The file contains the
Stream Abort messages to mark these ends.

Somebody may remove or empty a file to free space. What is appended to a new file of that name has other offsets, so the
reader would get rows twice and miss others. Therefore each use checks that it is the same file with its length.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pgsub.apply.stream.spool_space import SpoolSpace, refuse_exchangeable
from pgsub.common.errors import SpoolFailed
from pgsub.protocol import frames
from pgsub.protocol.frames import Frames, Segment
from pgsub.protocol.reader import INT32

_BUFFER = 1 << 20
#: Bytes of a followed file that are kept in memory.
_RECENT = 16 << 20
_MESSAGE, _ABORT = b"MA"
_XID = frames.ENVELOPE + 1
_SUBXID = frames.ENVELOPE + 5
_unpack = INT32.unpack_from


class Spool:
    """The spool folder of one worker, created with the first file and removed with the worker.

    Most transactions need none, and then a disk that is full, or that hangs, does not matter.

    :param folder: parent of spool folders (0700); None for the executor's scratch folder.
    :param owner: name of the worker; files left behind by an earlier attempt of the same owner are removed.
    :raises SparkUnusable: another user could exchange the folder.
    """

    def __init__(self, folder: str | None, owner: str, limit: int = 0) -> None:
        scratch = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]  # Spark's folder of this executor
        self._parent = Path(folder or scratch or tempfile.gettempdir())
        self._prefix = f"pgsub-spool-{owner}-"
        self._limit = limit
        self._made: tuple[Path, SpoolSpace] | None = None
        self._private = bool(folder)
        if self._private and os.path.lexists(self._parent):
            refuse_exchangeable(self._parent)
            for leftover in self._parent.glob(f"{self._prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _make(self) -> tuple[Path, SpoolSpace]:
        """Create the folder and its parents unless they are there.

        :raises OSError: it cannot be created.
        :raises SparkUnusable: see the class.
        """
        if self._made is None:
            self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._private:
                refuse_exchangeable(self._parent)
            made = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
            self._made = made, SpoolSpace(made, self._limit)
        return self._made

    def _unmade(self, error: OSError) -> SpoolFailed:
        place = shlex.quote(str(self._parent))
        return SpoolFailed(
            f'could not create a spool folder in "{self._parent}": {error.strerror}',
            hint=f"Free space there, or make it writable; apply then continues.\nls -la {place}",
        )

    def open(self, xid: int, kind: str = "changes") -> SpooledTransaction:
        """Create an empty file for a top-level transaction.

        :param kind: suffix of the file name, because the stream may have another transaction with the same xid.
        :raises SpoolFailed: the folder cannot be created.
        """
        try:
            folder, room = self._make()
        except OSError as error:
            raise self._unmade(error) from None
        return SpooledTransaction(folder / f"{xid}.{kind}", room)

    def close(self) -> None:
        """Remove the folder."""
        if self._made is not None:
            shutil.rmtree(self._made[0], ignore_errors=True)


class SpooledTransaction:
    """Messages of one transaction in a file.

    :ivar size: bytes written, including aborted messages.
    :ivar end: number of bytes that :meth:`segments` may read.
    """

    def __init__(self, path: Path, room: SpoolSpace | None = None) -> None:
        self._path = path
        self._room = room
        self._identity: tuple[int, int] | None = None  #: device and inode, once the file is created
        self._writer: BinaryIO | None = None
        self._aborted: set[int] = set()
        self._ended: list[Segment] = []  #: Stream Aborts since the last message was written
        self._recent: _Recent | None = None
        self.size = 0
        self.end = 0

    def follow(self) -> None:
        """Keep the newest segments in memory for a reader that follows the file in another thread."""
        self.publish()
        self._recent = _Recent()

    def unfollow(self) -> None:
        """Stop keeping segments in memory, because no reader follows the file any more."""
        if self._recent is not None:
            self._recent = None
            self.publish()

    def append(self, messages: Segment) -> None:
        """Append messages.

        :raises SpoolFailed: no space is left, the disk fails, or the file was removed or changed; the publisher will
            send the transaction again.
        """
        with self._accessing("write to"):
            if self._room is not None:
                self._room.take(messages.size + sum(segment.size for segment in self._ended))
            if self._writer is None:
                new = 0 if self._identity else os.O_CREAT | os.O_TRUNC  # an earlier attempt may have left it
                self._writer = os.fdopen(self._open(os.O_WRONLY | os.O_APPEND | new), "ab", buffering=_BUFFER)
                self._check_size(self._writer)
            for segment in (*self._ended, messages):
                self._writer.write(segment.wire)
                if self._recent is not None and self._recent.add(self.size, segment):
                    self._writer.flush()
                    self._recent.shrink()
                self.size += segment.size
            self._ended.clear()

    def publish(self) -> None:
        """Make everything written so far visible to a reader that follows the file.

        :raises SpoolFailed: the buffered bytes do not fit on the disk.
        """
        if self._writer is not None and self._recent is None:
            with self._accessing("write to"):
                self._writer.flush()
        self.end = self.size

    def pause(self) -> None:
        """Close the descriptor at the end of a stream block; the transaction may last for hours.

        :raises SpoolFailed: the buffered bytes do not fit on the disk, or the file was emptied.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._accessing("write to"), writer:
                writer.flush()
                self._check_size(writer)
        self.end = self.size

    @contextlib.contextmanager
    def _accessing(self, action: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise self._changed("It is no longer there.") from None
        except OSError as error:
            raise SpoolFailed(
                f'could not {action} spool file "{self._path}": {error.strerror}',
                hint="Check the disk of the spool folder, and free space there; apply continues by itself.",
            ) from None

    def _changed(self, detail: str) -> SpoolFailed:
        return SpoolFailed(
            f'spool file "{self._path}" was removed or changed while its transaction was in progress',
            detail=detail,
            hint="Leave the files of the spool in place, and limit their size with PGSUB_SPOOL_LIMIT; apply gets the"
            " transaction from the publisher again by itself.",
        )

    def _open(self, flags: int) -> int:
        """Open the file; return its descriptor.

        :raises SpoolFailed: another file has its name.
        """
        descriptor = os.open(self._path, flags, 0o600)
        found = os.fstat(descriptor)
        identity = found.st_dev, found.st_ino
        self._identity = self._identity or identity
        # guard: a spool file that was removed or changed is not read
        if identity != self._identity:
            os.close(descriptor)
            raise self._changed("Another file has its name.")
        return descriptor

    def _check_size(self, file: BinaryIO) -> None:
        """Check that the file has what was written to it, after the buffered bytes are written.

        :raises SpoolFailed: it has another length.
        """
        found = os.fstat(file.fileno()).st_size
        # guard: a spool file that was removed or changed is not read
        if found != self.size:
            raise self._changed(f"It has {found} bytes, {self.size} were written.")

    def abort(self, subxid: int, message: Segment) -> None:
        """Discard exactly the changes of one subtransaction.

        :param message: its Stream Abort message.
        """
        # guard: a rolled-back subtransaction leaves nothing
        self._aborted.add(subxid)
        self._ended.append(message)

    def segments(self, start: int, end: int) -> Iterator[Segment]:
        """Yield the messages as received, including aborted ones and Stream Aborts.

        :param start: 0, or the ``end`` of an earlier call.
        :param end: a value that :attr:`end` had.
        :raises SpoolFailed: the file cannot be read, or was removed or changed.
        """
        followed = self._recent  # by another thread
        recent = followed.since(start) if followed is not None else []
        yield from self._from_file(start, min(end, recent[0][0] if recent else end))
        for offset, segment in recent:
            if offset < end:
                yield segment

    def _from_file(self, start: int, end: int) -> Iterator[Segment]:
        left, rest = end - start, b""
        if left <= 0:
            return
        with self._accessing("read"), os.fdopen(self._open(os.O_RDONLY), "rb", buffering=0) as file:
            file.seek(start)
            wanted = _BUFFER
            while left > 0:
                data = file.read(min(wanted, left))
                left -= len(data)
                if not data:
                    raise self._changed("It is shorter than what was written.")
                rest += data
                edges = frames.walk(rest, len(rest), len(rest))
                wanted = max(_BUFFER, frames.size_of_first(rest, edges[-1]) - len(rest) + edges[-1])
                if len(edges) > 1:
                    yield Frames(rest[: edges[-1]], edges).all()
                    rest = rest[edges[-1] :]
        if rest:
            raise self._changed("It contains other bytes than were written.")

    def kept(self) -> Iterator[Segment]:
        """Yield the messages in order, without those of aborted subtransactions."""
        self.pause()
        inside: set[int] = set()  # aborted subtransactions that are open at this place
        for segment in self.segments(0, self.end):
            if self._aborted:
                yield from self._without_aborted(segment, inside)
            else:
                yield segment

    def _without_aborted(self, segment: Segment, inside: set[int]) -> Iterator[Segment]:
        found, edges, begin = segment.frames, segment.frames.edges, segment.start
        for number, code in segment.numbered():
            if code == _ABORT:
                inside.discard(_unpack(found.buffer, edges[number] + _SUBXID)[0])
            else:
                subxid = _unpack(found.buffer, edges[number] + _XID)[0]
                if subxid in self._aborted:
                    inside.add(subxid)
                elif not inside or code != _MESSAGE:
                    continue
            if begin < number:
                yield found.range(begin, number)
            begin = number + 1
        if begin < segment.end:
            yield found.range(begin, segment.end)

    def remove(self) -> None:
        """Delete the file, with everything that is not yet written."""
        with contextlib.suppress(SpoolFailed):
            self.pause()
        self._path.unlink(missing_ok=True)
        if self._room is not None:
            self._room.give(self.size)
            self._room = None


class _Recent:
    """The newest messages of a file with their offsets; one thread adds them and another reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, Segment]] = deque()
        self._size = 0

    def add(self, offset: int, messages: Segment) -> bool:
        """Add a segment; return whether the limit is exceeded."""
        with self._lock:
            self._kept.append((offset, messages))
            self._size += messages.size
        return self._size > _RECENT

    def shrink(self) -> None:
        """Drop the older half, which can be read from the file."""
        with self._lock:
            while self._size > _RECENT // 2 and len(self._kept) > 1:
                self._size -= self._kept.popleft()[1].size

    def since(self, start: int) -> list[tuple[int, Segment]]:
        """Return the segments in memory that start at an offset or later."""
        with self._lock:
            return [one for one in self._kept if one[0] >= start]


def by_subtransaction(segment: Segment) -> Iterator[tuple[int, Segment]]:
    """Yield stretches of messages of one subtransaction each with its xid, without Stream Aborts.

    The xid is 0 for logical messages: they belong to the subtransaction around them, whatever xid they have.
    """
    found = segment.frames
    codes = np.frombuffer(segment.codes, np.uint8)
    starts = found.places[segment.start : segment.end]
    xids = np.ndarray((len(found.buffer) - 3,), ">u4", found.buffer, strides=(1,))[starts + _XID].astype(np.int64)
    xids[codes == _MESSAGE] = 0
    xids[codes == _ABORT] = -1
    bounds = [0, *(np.flatnonzero(np.diff(xids)) + 1).tolist(), len(xids)]
    for begin, end in pairwise(bounds):
        subxid = int(xids[begin])
        if subxid >= 0:
            yield subxid, found.range(segment.start + begin, segment.start + end)
