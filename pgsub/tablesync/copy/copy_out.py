"""A publisher's answer to COPY TO STDOUT, checked message by message. Mirrors getCopyDataMessage (fe-protocol3.c).

Neither the publisher nor an unencrypted connection is trusted. Kinds, lengths and order of messages are checked before
a byte of a row is passed on. Only contents of CopyData are passed on, never a header. Protocol sections
"Simple Query", "COPY Operations" and "Asynchronous Operations".
"""

from __future__ import annotations

import contextlib
import enum
import re

import psycopg

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol import frames
from pgsub.publisher.server_errors import ServerError

_HEADER = frames.HEADER
_COPY_DATA = ord("d")
_NO_LIMIT = 1 << 62
_COUNT = re.compile(rb"COPY [0-9]{1,20}\0")


class Stage(enum.Enum):
    """The last message, as far as it decides which may follow."""

    ASKED = "the query"
    ROWS = "CopyOutResponse"
    DONE = "CopyDone"
    COMPLETE = "CommandComplete"
    FAILED = "ErrorResponse"
    ENDED = "ReadyForQuery"


_NEXT: dict[tuple[Stage, bytes], Stage] = {
    (Stage.ASKED, b"H"): Stage.ROWS,
    (Stage.ROWS, b"d"): Stage.ROWS,
    (Stage.ROWS, b"c"): Stage.DONE,
    (Stage.DONE, b"C"): Stage.COMPLETE,
    (Stage.COMPLETE, b"Z"): Stage.ENDED,
    (Stage.FAILED, b"Z"): Stage.ENDED,
    **{(stage, b"E"): Stage.FAILED for stage in Stage},  # after ReadyForQuery, from a server that ends the session
}


class CopyOut:
    """A parser that finds the rows in the publisher's answer, in whatever pieces its bytes arrive.

    A message of any size passes through a small buffer in parts.

    :ivar stage: the last message.
    :ivar failure: the publisher's first error, as the exception that psycopg would raise.
    """

    def __init__(self) -> None:
        self.stage = Stage.ASKED
        self.failure: psycopg.Error | None = None
        self._left = 0  #: bytes that are missing of a message that has begun
        self._wanted = False  #: that message is CopyData
        self._lines = False  #: rows are in text format

    def cut(self, buffer: bytearray, have: int) -> tuple[list[memoryview], int]:
        """Find the contents of CopyData in a buffer.

        :param buffer: the rest of the previous call, and new bytes.
        :param have: number of bytes in the buffer.
        :return: stretches, valid until the buffer changes, and the number of processed bytes. The rest is the beginning
            of a message.
        :raises ProtocolViolation: the bytes are no answer to COPY TO STDOUT.
        """
        found: list[memoryview] = []
        at, before = 0, -1
        while before < at < have:
            before = at
            if self._left:
                at = self._begun(buffer, at, have, found)
            elif buffer[at] == _COPY_DATA:
                at = self._rows(buffer, at, have, found)
            else:
                at = self._other(buffer, at, have)
        return found, at

    def _begun(self, buffer: bytearray, at: int, have: int, found: list[memoryview]) -> int:
        end = min(have, at + self._left)
        if self._wanted:
            found.append(memoryview(buffer)[at:end])
        self._left -= end - at
        return end

    def _rows(self, buffer: bytearray, at: int, have: int, found: list[memoryview]) -> int:
        """Take the complete messages, and begin the incomplete one."""
        self._step(b"d")
        edges = frames.walk_lines(buffer, have, at) if self._lines else frames.walk(buffer, have, _NO_LIMIT, at)
        found += frames.contents(buffer, edges)
        at = edges[-1]
        if have - at >= _HEADER and buffer[at] == _COPY_DATA:
            self._left, self._wanted = frames.size_of(buffer, at) - _HEADER, True
            at += _HEADER
        return at

    def _other(self, buffer: bytearray, at: int, have: int) -> int:
        """Take one message other than CopyData. For an error that exceeds the buffer, its beginning suffices."""
        if have - at < _HEADER:
            return at
        kind, size = bytes(buffer[at : at + 1]), frames.size_of(buffer, at)
        if kind in frames.ANY_TIME:
            self._left, self._wanted = size - _HEADER, False
            return at + _HEADER
        known = min(size, len(buffer))
        if (self.stage, kind) not in _NEXT or (known < size and kind != b"E"):
            raise self._unexpected(kind)
        if have - at < known:
            return at
        self._message(kind, bytes(buffer[at + _HEADER : at + known]))
        self._step(kind)
        self._left, self._wanted = size - known, False
        return at + known

    def _message(self, kind: bytes, body: bytes) -> None:
        if kind == b"E":
            self.failure = self.failure or reported(body)
        elif kind == b"H":
            formats = (body[:1] + body[3:]).strip(b"\0\1")
            _check(len(body) == 3 + 2 * int.from_bytes(body[1:3], "big") and not formats, "CopyOutResponse")
            self._lines = body[0] == 0
        elif kind == b"c":
            _check(not body, "CopyDone")
        elif kind == b"C":
            _check(_COUNT.fullmatch(body) is not None, "CommandComplete")
        elif self.stage is not Stage.FAILED:  # the transaction that holds the snapshot must go on
            _check(body == b"T", "ReadyForQuery")

    def _step(self, kind: bytes) -> None:
        stage = _NEXT.get((self.stage, kind))
        # guard: a message out of order is not passed on
        if stage is None:
            raise self._unexpected(kind)
        self.stage = stage

    def _unexpected(self, kind: bytes) -> ProtocolViolation:
        return ProtocolViolation(
            f"unexpected message type 0x{kind.hex()} in the publisher's answer to COPY, after {self.stage.value}"
        )


def _check(fits: bool, what: str) -> None:
    if not fits:
        raise ProtocolViolation(f"malformed {what} in the publisher's answer to COPY")


def reported(body: bytes) -> psycopg.Error:
    """Convert an ErrorResponse to the exception that psycopg would raise."""
    said = ServerError.from_response(body)
    kind = psycopg.Error
    with contextlib.suppress(KeyError):
        kind = psycopg.errors.lookup(said.sqlstate or "")
    error = kind("\n".join(filter(None, (said.message, said.detail, said.hint))))
    error.sqlstate = error.sqlstate or said.sqlstate
    return said.carried_by(error)
