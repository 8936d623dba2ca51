"""Promises of the first answer of a server: whatever it is, the outcome is a session or an error that names it."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import hostile
import pytest
from hostile import frame

from pgsub.common.errors import ProtocolViolation
from pgsub.publisher import connect as publisher
from pgsub.target.session import connect as target

_DONE = frame(b"C", b"SELECT 1\0") + frame(b"Z", b"I")


def _row(*values: bytes) -> bytes:
    """The answer of so many columns of type text, in a row."""
    fields = b"".join(b"c\0" + struct.pack(">IHIhih", 0, 0, 25, -1, -1, 0) for _ in values)
    row = b"".join(struct.pack(">I", len(value)) + value for value in values)
    count = struct.pack(">H", len(values))
    return frame(b"T", count + fields) + frame(b"D", count + row) + _DONE


ANSWERS = {
    "a row without columns": _row(),
    "a row of one column": _row(b"1"),
    "a row of too many columns": _row(*[b"1"] * 99),
    "no rows": _DONE,
    "nothing": frame(b"Z", b"I"),
    "an empty query": frame(b"I", b"") + frame(b"Z", b"I"),
    "a copy": frame(b"H", b"\0\0\0") + frame(b"c", b"") + _DONE,
    "a copy to it": frame(b"G", b"\0\0\0"),
}


@pytest.mark.parametrize("open_session", [publisher.connect, target.connect], ids=["publisher", "target"])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_of_another_shape_is_a_violation_of_the_protocol(
    open_session: Callable[..., Any], answer: bytes
) -> None:
    name = {"application_name": "x"} if open_session is publisher.connect else {"name": "x"}
    with contextlib.closing(hostile.Publisher()) as server:
        server.answer = answer
        with pytest.raises(ProtocolViolation) as caught:
            open_session(server.conninfo, **name)
    assert caught.value.exit_code == 7 and "invalid OID" not in caught.value.message
