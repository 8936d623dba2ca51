"""A server that answers with rows of another shape than it was asked for is an error that says so, and no bug."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable
from typing import Any

import hostile
import psycopg
import pytest
from hostile import frame

from pgsub.common.errors import ProtocolViolation
from pgsub.common.query import scalar
from pgsub.publisher import connect as publisher
from pgsub.publisher import database, identity, slots
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


@pytest.mark.parametrize("answer", [_row(), _row(b"1")], ids=["a row without columns", "a row of one column"])
@pytest.mark.parametrize(
    "ask",
    [
        identity.identify,
        lambda connection: database.database(connection, replication=True),
        lambda connection: identity.timeline_history(connection, 2),
        lambda connection: slots.create_slot(connection, "s"),
    ],
    ids=["identify", "database", "timeline history", "slot"],
)
def test_too_few_columns_for_a_replication_command_are_a_violation_of_the_protocol(
    ask: Callable[[psycopg.Connection], object], answer: bytes
) -> None:
    with contextlib.closing(hostile.Publisher()) as server:
        server.answer = answer
        opened = psycopg.connect(server.conninfo, autocommit=True, cursor_factory=psycopg.ClientCursor)
        with contextlib.closing(opened) as connection, pytest.raises(ProtocolViolation, match="invalid resp") as caught:
            ask(connection)
    assert re.search(r"gave 1 row of [01] fields?, expected 1 row of [24] or more fields", str(caught.value.detail))


def test_a_row_without_the_one_value_that_was_asked_for_is_a_violation_of_the_protocol() -> None:
    with contextlib.closing(hostile.Publisher()) as server:
        server.answer = ANSWERS["a row without columns"]
        with contextlib.closing(psycopg.connect(server.conninfo, autocommit=True)) as connection:
            with pytest.raises(ProtocolViolation, match="has no column"):
                scalar(connection, psycopg.sql.SQL("SELECT 1"))
