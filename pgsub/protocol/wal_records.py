"""Records of the write-ahead log: finds the one that ends at a position, and whether a transaction ended with it.

Mirrors the reading half of ``xlogreader.c``. ``xlog_internal.h`` defines page headers, ``xlogrecord.h`` record headers.
The bytes are as in the publisher's memory, in the byte order of its machine.

NOTES: A record has its length and the start of the previous record. So a stretch of WAL is read forward, from the first
record that begins in it, and each record confirms the previous one. That, and the address on each page, distinguishes
WAL from anything else. Bytes that do not fit together are :class:`Unreadable` and prove nothing.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

#: xlp_info: the page begins with the rest of a record; it has the long header; it replaces the rest of a record.
_CONTINUED, _LONG, _OVERWRITTEN = 0x0001, 0x0002, 0x0008
_MAGIC = 0xD1  #: upper byte of XLOG_PAGE_MAGIC in every version
_PAGE = "HHIQI"  #: xlp_magic, xlp_info, xlp_tli, xlp_pageaddr, xlp_rem_len
_SHORT_SIZE, _LONG_SIZE = 24, 40
_RECORD = "IIQBB"  #: xl_tot_len, xl_xid, xl_prev, xl_info, xl_rmid
_RECORD_SIZE = 24
_LARGEST = 1020 << 20  #: XLogRecordMaxSize
_TRANSACTIONS = 1  #: RM_XACT_ID


class Unreadable(Exception):
    """A fault of the WAL: another format, or too little of it."""


class Unused(Unreadable):
    """Zeros at the position, which may be the rest of a segment after XLOG_SWITCH.

    The first record of the next segment tells: see :meth:`Wal.last_record_before`.
    """


class Record(NamedTuple):
    """A record, without the page headers inside it.

    :ivar confirmed: its link to the previous record is correct.
    """

    start: int
    end: int
    resource_manager: int
    content: bytes
    confirmed: bool


class _Page(NamedTuple):
    flags: int
    size: int  #: size of its header
    rest: int  #: remaining bytes of a record that began before the page


class _Head(NamedTuple):
    start: int
    size: int
    before: int  #: start of the previous record
    resource_manager: int


class Wal:
    """A stretch of WAL.

    :param begin: position of its first byte, at the start of a page.
    :param page_size: ``wal_block_size`` of the server.
    """

    def __init__(self, begin: int, content: bytes, page_size: int) -> None:
        self.begin, self._content, self._page_size = begin, content, page_size
        self._order = ">" if content[:1] == bytes([_MAGIC]) else "<"
        self._page_header = struct.Struct(self._order + _PAGE)
        self._record_header = struct.Struct(self._order + _RECORD)

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.begin + len(self._content)

    def ended_transaction(self, lsn: int, time: int) -> bool:
        """Return whether a transaction that ended at the given time ends at the given LSN.

        Its record may be of any kind (COMMIT, PREPARE, the end of a prepared one). The time is its own, or the origin's
        if the transaction came from elsewhere. So the whole record is searched for the time.

        :param lsn: end of the record, as reported by logical decoding.
        :param time: microseconds since 2000-01-01 UTC, as reported by logical decoding.
        :raises Unreadable: this cannot be determined.
        """
        record = self.record_before(lsn)
        if record is None:
            return False
        if record.resource_manager == _TRANSACTIONS and struct.pack(f"{self._order}q", time) in record.content:
            return True
        if not record.confirmed:
            self._check_confirmed(record.start, record.end)
        return False

    def last_record_before(self) -> int:
        """Return the start of the last record that ends before this stretch, as linked from the first record in it.

        :raises Unreadable: it continues in this stretch, or this cannot be determined.
        """
        page = self._page(self.begin)
        before = self._head(self.begin + page.size).before
        if page.flags & _CONTINUED or not before < self.begin:
            raise Unreadable(f"no record begins at {self.begin + page.size:X}")
        return before

    def record_before(self, lsn: int) -> Record | None:
        """Return the record that ends at a position; None if certainly none does.

        :raises Unreadable: this cannot be determined.
        """
        if not self.begin < lsn <= self.end:
            raise Unreadable("the position was not read")
        end = self._first_boundary(lsn)
        previous: int | None = None
        while end < lsn:
            if (used := self._beyond_unused(end, lsn)) != end:
                end = used
                continue
            head = self._head(self._beyond_header(end))
            confirmed = self._is_confirmed(head, previous)
            end, completed = self._end(head, lsn, confirmed)
            if completed and end == lsn:
                return Record(head.start, end, head.resource_manager, self._read(head.start, head.size), confirmed)
            if end > lsn and not confirmed:
                self._check_confirmed(head.start, end)
            previous = head.start if completed else None
        if end == lsn:
            raise Unreadable("the record begins before what was read")
        return None

    def _first_boundary(self, lsn: int) -> int:
        """Return the start of the first record, or the end of the one that began before.

        If that is after the page of ``lsn``, return a position after ``lsn`` instead.
        """
        at, expected = self._beyond_unused(self.begin, lsn), None
        while True:
            page = self._page(at)
            room = self._page_size - page.size
            if not page.flags & _CONTINUED:
                if expected is not None and not page.flags & _OVERWRITTEN:
                    raise Unreadable(f"page {at:X} does not continue what was begun")
                return at + page.size
            if not 0 < page.rest <= _LARGEST or expected not in (None, page.rest):
                raise Unreadable(f"page {at:X} does not continue what was begun")
            if page.rest <= room:
                return at + page.size + _aligned(page.rest)
            if at + self._page_size >= lsn:
                return lsn + 1
            at, expected = at + self._page_size, page.rest - room

    def _beyond_header(self, position: int) -> int:
        """Return where a record begins or continues if the previous bytes end here."""
        return position if position % self._page_size else position + self._page(position).size

    def _page_end(self, position: int) -> int:
        return position - position % self._page_size + self._page_size

    def _head(self, start: int) -> _Head:
        header = self._read(start, self._record_header.size)
        size, _, before, _, manager = self._record_header.unpack(header)
        return _Head(start, size, before, manager)

    def _is_confirmed(self, head: _Head, previous: int | None) -> bool:
        """Return whether a record links to the previous one; False if that was not read.

        :raises Unreadable: it is not a record.
        """
        if (
            not _RECORD_SIZE <= head.size <= _LARGEST
            or head.before >= head.start
            or previous not in (None, head.before)
        ):
            raise Unreadable(f"no record begins at {head.start:X}")
        return previous is not None

    def _end(self, head: _Head, lsn: int, confirmed: bool) -> tuple[int, bool]:
        """Return the end of a record, and whether it was completed.

        For a confirmed record that continues after the page of ``lsn``, the end is any position after ``lsn``.
        """
        page_end = self._page_end(head.start)
        rest = head.size - (page_end - head.start)
        if rest <= 0:
            return head.start + _aligned(head.size), True
        while not (confirmed and page_end >= lsn):
            page = self._page(page_end)
            if page.flags & _OVERWRITTEN:
                return page_end, False
            if not page.flags & _CONTINUED or page.rest != rest:
                raise Unreadable(f"page {page_end:X} does not continue the record at {head.start:X}")
            if rest <= self._page_size - page.size:
                return page_end + page.size + _aligned(rest), True
            rest -= self._page_size - page.size
            page_end += self._page_size
        return lsn + 1, True

    def _beyond_unused(self, position: int, lsn: int) -> int:
        """Return the start of the first used page if there are only zeros before it, else the given position.

        :raises Unused: nothing is used up to ``lsn``.
        """
        end = self._page_end(position)
        if any(self._bytes(position, min(8, end - position))):
            return position
        while not any(self._bytes(position, min(end, lsn) - position)):
            if end >= lsn:
                raise Unused(f"nothing is written from {position:X} on")
            position, end = end, end + self._page_size
        if position % self._page_size:
            raise Unreadable(f"no record begins at {position:X}")
        return position

    def _check_confirmed(self, start: int, end: int) -> None:
        """Check that the next record links to this one."""
        if self._head(self._beyond_header(end)).before != start:
            raise Unreadable(f"nothing confirms the record at {start:X}")

    def _page(self, at: int) -> _Page:
        header = self._bytes(at, self._page_header.size)
        magic, flags, _, address, rest = self._page_header.unpack(header)
        if magic >> 8 != _MAGIC or address != at:
            raise Unreadable(f"no page begins at {at:X}")
        return _Page(flags, _LONG_SIZE if flags & _LONG else _SHORT_SIZE, rest)

    def _read(self, start: int, size: int) -> bytes:
        """Return bytes of a record, which may continue on further pages."""
        parts = []
        while size:
            parts.append(self._bytes(start, min(size, self._page_end(start) - start)))
            size -= len(parts[-1])
            start += len(parts[-1])
            if size:
                start = self._beyond_header(start)
        return b"".join(parts)

    def _bytes(self, start: int, size: int) -> bytes:
        offset = start - self.begin
        found = self._content[offset : offset + size]
        if len(found) < size:
            raise Unreadable(f"WAL was read up to {self.end:X} only")
        return found


def _aligned(size: int) -> int:
    """Round up like MAXALIGN."""
    return (size + 7) & ~7
