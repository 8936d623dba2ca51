"""Private files for transactions that are not finished or do not fit in memory. Mirrors worker.c's stream files.

One file per top-level transaction, with the messages as they came over the wire: what is received in one piece is
written and read in one. An aborted subtransaction is remembered and left out when the file is read. The server
truncates instead; leaving out gives the same rows and needs no assumption about the order of aborts.

A logical message in a stream bears the xid of the whole transaction (pgoutput_message). Between the first change of a
subtransaction and its abort the session was inside it, so messages there are left out with it; to know that place,
the Stream Abort message is in the file too.
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
from pgsub.common.errors import InternalError, SpoolFailed
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
    """The spool folder of one worker, removed with the worker.

    :param folder: where spools live (0700), None for the executor's folder for scratch files.
    :param owner: names the worker; what an older attempt of the same owner left behind is removed.
    :raises SpoolFailed: the folder cannot be made.
    :raises SparkUnusable: others could exchange it.
    """

    def __init__(self, folder: str | None, owner: str, limit: int = 0) -> None:
        base = Path(folder or _scratch())
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder:
                refuse_exchangeable(base)
            for leftover in base.glob(f"pgsub-spool-{owner}-*") if folder else ():
                shutil.rmtree(leftover, ignore_errors=True)
            self._folder = Path(tempfile.mkdtemp(prefix=f"pgsub-spool-{owner}-", dir=base))
        except OSError as error:
            raise SpoolFailed(
                f'could not create a spool folder in "{base}": {error.strerror}',
                hint=f"Free space there, or make it writable; apply goes on.\nls -la {shlex.quote(str(base))}",
            ) from None
        self._room = SpoolSpace(self._folder, limit)

    def open(self, xid: int, kind: str = "changes") -> SpooledTransaction:
        """Open a new, empty file for a top-level transaction.

        :param kind: of its content; another transaction of the same xid may be in progress.
        """
        return SpooledTransaction(self._folder / f"{xid}.{kind}", self._room)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _scratch() -> str:
    """Return Spark's folder of this executor (``spark.local.dir``), else that of the system."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or tempfile.gettempdir()


class SpooledTransaction:
    """Messages of one transaction in a file.

    :ivar size: bytes of messages written, aborted ones included.
    :ivar end: bytes of the file that :meth:`segments` may read.
    """

    def __init__(self, path: Path, room: SpoolSpace | None = None) -> None:
        self._path = path
        self._room = room
        self._writer: BinaryIO | None = None
        self._aborted: set[int] = set()
        self._ended: list[Segment] = []  #: Stream Aborts since the last message was written
        self._recent: _Recent | None = None
        self.size = 0
        self.end = 0

    def follow(self) -> None:
        """Keep the newest segments in memory for a reader in another thread that follows the file."""
        self.publish()
        self._recent = _Recent()

    def unfollow(self) -> None:
        """Keep nothing in memory any more: no reader follows the file."""
        if self._recent is not None:
            self._recent = None
            self.publish()

    def append(self, messages: Segment) -> None:
        """Add messages.

        :raises PgsubError: there is no room, or the disk fails; the publisher sends the transaction again.
        """
        if self._room is not None:
            self._room.take(messages.size + sum(segment.size for segment in self._ended))
        with self._writing():
            if self._writer is None:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                self._writer = os.fdopen(descriptor, "ab", buffering=_BUFFER)
            for segment in (*self._ended, messages):
                self._writer.write(segment.wire)
                if self._recent is not None and self._recent.add(self.size, segment):
                    self._writer.flush()
                    self._recent.shrink()
                self.size += segment.size
            self._ended.clear()

    def publish(self) -> None:
        """Let who follows the file read everything so far.

        :raises PgsubError: what was buffered does not fit on the disk.
        """
        if self._writer is not None and self._recent is None:
            with self._writing():
                self._writer.flush()
        self.end = self.size

    def pause(self) -> None:
        """End of a stream block: no descriptor stays open for a transaction that may last for hours.

        :raises PgsubError: what was buffered does not fit on the disk.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._writing():
                writer.close()
        self.end = self.size

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SpoolFailed(
                f'could not write to spool file "{self._path}": {error.strerror}',
                hint="Free space where the spool folder is; apply goes on by itself.",
            ) from None

    def abort(self, subxid: int, message: Segment) -> None:
        """Discard exactly the changes of one subtransaction.

        :param message: the Stream Abort that says so.
        """
        # guard: a rolled-back subtransaction leaves nothing
        self._aborted.add(subxid)
        self._ended.append(message)

    def segments(self, start: int, end: int) -> Iterator[Segment]:
        """Yield the messages as they came, aborted ones included, and Stream Aborts.

        :param start: 0, or the ``end`` of an earlier call.
        :param end: a value that :attr:`end` had.
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
        with open(self._path, "rb", buffering=0) as file:
            file.seek(start)
            wanted = _BUFFER
            while left > 0:
                data = file.read(min(wanted, left))
                left -= len(data)
                if not data:
                    raise InternalError(f'spool file "{self._path}" is shorter than what was written')
                rest += data
                edges = frames.walk(rest, len(rest), len(rest))
                wanted = max(_BUFFER, frames.size_of_first(rest, edges[-1]) - len(rest) + edges[-1])
                if len(edges) > 1:
                    yield Frames(rest[: edges[-1]], edges).all()
                    rest = rest[edges[-1] :]

    def kept(self) -> Iterator[Segment]:
        """Yield the messages in order, without those of aborted subtransactions."""
        self.pause()
        inside: set[int] = set()  # aborted ones that the session was in here
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
        """Delete the file, with anything not written yet."""
        with contextlib.suppress(SpoolFailed):
            self.pause()
        self._path.unlink(missing_ok=True)
        if self._room is not None:
            self._room.give(self.size)
            self._room = None


class _Recent:
    """The newest messages of a file, and where in it they stand; written by one thread and read by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, Segment]] = deque()
        self._size = 0

    def add(self, offset: int, messages: Segment) -> bool:
        """Add one more segment; return whether there are too many now."""
        with self._lock:
            self._kept.append((offset, messages))
            self._size += messages.size
        return self._size > _RECENT

    def shrink(self) -> None:
        """Forget the older half: it can be read from the file."""
        with self._lock:
            while self._size > _RECENT // 2 and len(self._kept) > 1:
                self._size -= self._kept.popleft()[1].size

    def since(self, start: int) -> list[tuple[int, Segment]]:
        """Return the segments in memory from an offset on."""
        with self._lock:
            return [one for one in self._kept if one[0] >= start]


def by_subtransaction(segment: Segment) -> Iterator[tuple[int, Segment]]:
    """Yield RunBounds of messages of one subtransaction each, without Stream Aborts.

    :return: its xid with each; 0 for logical messages, which belong to the subtransaction that they stand in, whatever
        xid they bear.
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
