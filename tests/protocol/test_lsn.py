"""LSNs: text form and the predicate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgsub.protocol.lsn import covered, format_lsn, parse_lsn


@pytest.mark.parametrize(
    ("text", "lsn"),
    [("0/0", 0), ("0/1", 1), ("16/B374D848", 0x16B374D848), ("ffffffff/FFFFFFFF", 2**64 - 1), ("00000001/0", 2**32)],
)
def test_an_lsn_reads_as_the_server_reads_it(text: str, lsn: int) -> None:
    assert parse_lsn(text) == lsn


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "0",
        "0/",
        "/0",
        " 0/0",
        "0/0 ",
        "0/0\n",
        "0x1/0",
        "-1/0",
        "g/0",
        "1/2/3",
        "123456789/0",
        "0/123456789",
        "+1/0",
        "1_0/0",
        "\u0661/0",
        "\uff11/0",
        "0//0",
        "NULL",
    ],
)
def test_anything_but_an_lsn_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="invalid LSN") as caught:
        parse_lsn(text)
    assert f'"{text}"' in str(caught.value)


@given(st.integers(0, 2**64 - 1))
def test_an_lsn_survives_being_written_and_read(lsn: int) -> None:
    assert parse_lsn(format_lsn(lsn)) == lsn


def test_an_lsn_is_written_without_padding_in_upper_case() -> None:
    assert format_lsn(0x1600000ABC) == "16/ABC"


def test_a_position_covers_a_transaction_only_if_it_lies_beyond_the_finish_lsn() -> None:
    assert covered(99, 100)
    assert not covered(100, 100)
    assert not covered(101, 100)
