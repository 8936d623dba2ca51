"""Where CopyData messages lie in a buffer."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pgsub.common.errors import ProtocolViolation
from pgsub.protocol import frames

#: Rows as COPY in text format sends them, some whose header contains a newline, and what is no such row.
_ROWS = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([b"", b"\n", b"two\nlines\n", b"no end"]),
    st.sampled_from([0, 1, 5, 6, 7, 2555, 2556, 2811, 2812]).map(lambda size: b"x" * size + b"\n"),
)


def _messages(rows: list[bytes]) -> bytes:
    return b"".join(struct.pack(">cI", b"d", len(row) + 4) + row for row in rows)


def _outcome(walk: Callable[[], array[int]]) -> array[int] | str:
    try:
        return walk()
    except ProtocolViolation as violation:
        return str(violation)


@given(st.lists(_ROWS, min_size=1, max_size=8).map(_messages), st.data())
def test_rows_of_a_text_copy_are_found_where_a_look_at_each_header_finds_them(sent: bytes, data: st.DataObject) -> None:
    """Whatever their lengths, wherever the buffer ends, and whichever byte is another one."""
    buffer, end = bytearray(sent), data.draw(st.integers(0, len(sent)))
    buffer[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.sampled_from(b"d\n\0\xff"))
    assert _outcome(lambda: frames.walk_lines(buffer, end, 0)) == _outcome(
        lambda: frames.walk(buffer, end, len(buffer))
    )


@given(st.lists(_ROWS, max_size=8))
def test_the_contents_of_messages_are_those_that_were_sent(rows: list[bytes]) -> None:
    buffer = bytearray(_messages(rows))
    found = frames.contents(buffer, frames.walk(buffer, len(buffer), len(buffer)))
    assert b"".join(found) == b"".join(rows)
