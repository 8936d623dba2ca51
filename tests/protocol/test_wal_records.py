"""Promises of reading WAL: the record that ends at a position is found, and nothing is proved by what is none."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

import pytest

from pgsub.protocol.wal_records import Unreadable, Unused, Wal

PAGE, SEGMENT = 256, 1024  #: small ones, so that records cross many
BEGIN = 7 * SEGMENT
TRANSACTION, OTHER = 1, 10  #: resource managers
TIME = 800_000_000_000_001


@dataclass
class Written:
    """A record that was written."""

    start: int
    end: int
    manager: int
    content: bytes


class Writer:
    """Writes WAL as a server does."""

    def __init__(self, order: str = "<") -> None:
        self.order = order
        self.content = bytearray()
        self.records: list[Written] = []
        self.previous = BEGIN - 64

    @property
    def at(self) -> int:
        """Where the WAL ends."""
        return BEGIN + len(self.content)

    def page(self, flags: int = 0, rest: int = 0) -> None:
        """Begin a page."""
        long = self.at % SEGMENT == 0
        fields = (0xD118, flags | (2 if long else 0), 1, self.at, rest)
        self.content += struct.pack(f"{self.order}HHIQI", *fields).ljust(40 if long else 24, b"\0")

    def record(self, manager: int, data: bytes = b"", *, cut: bool = False) -> Written:
        """Write a record; ``cut``: the server crashed before its end, but behind its first page."""
        if self.at % PAGE == 0:
            self.page()
        start, size = self.at, 24 + len(data)
        head = struct.pack(f"{self.order}IIQBBxxI", size, 5, self.previous, 0, manager, 0xC0C0C0C0)
        left = head + data
        while len(left) > (room := PAGE - self.at % PAGE):
            self.content += left[:room]
            if cut:
                self.page(flags=8)
                return Written(start, 0, manager, head + data)
            left = left[room:]
            self.page(flags=1, rest=len(left))
        self.content += left + bytes(-len(left) % 8)
        self.previous = start
        self.records.append(Written(start, self.at, manager, head + data))
        return self.records[-1]

    def transaction(self, time: int = TIME, more: int = 0) -> Written:
        """Write the end of a transaction."""
        return self.record(TRANSACTION, struct.pack(f"{self.order}q", time) + bytes([7]) * more)

    def switch(self) -> None:
        """Leave the rest of the segment unused."""
        self.record(0)
        self.content += bytes(-self.at % SEGMENT)

    def read(self, pages: int = 0) -> Wal:
        """What a reader has who begins some pages later."""
        return Wal(BEGIN + pages * PAGE, bytes(self.content[pages * PAGE :]), PAGE)


def filled(seed: int, order: str = "<", count: int = 60) -> Writer:
    """Records of random sizes, some longer than a page and some longer than a segment."""
    dice = random.Random(seed)
    writer = Writer(order)
    for _ in range(count):
        longest = dice.choice((8, 40, 300, 1500))
        if dice.random() < 0.4:
            writer.transaction(TIME + len(writer.records), dice.randrange(longest))
        else:
            writer.record(OTHER, dice.randbytes(dice.randrange(longest)))
    return writer


@pytest.mark.parametrize("order", ["<", ">"], ids=["little-endian", "big-endian"])
@pytest.mark.parametrize("seed", range(5))
def test_the_record_that_ends_at_a_position_is_found_across_pages_and_segments(order: str, seed: int) -> None:
    writer = filled(seed, order)
    wal = writer.read()
    assert sum(one.start // PAGE != one.end // PAGE for one in writer.records) > 10
    for one in writer.records:
        found = wal.record_before(one.end)
        assert found is not None
        assert (found.start, found.resource_manager, found.content) == (one.start, one.manager, one.content)


@pytest.mark.parametrize("seed", range(5))
def test_wherever_reading_begins_the_answer_is_the_same_or_none(seed: int) -> None:
    dice, writer = random.Random(seed), filled(seed)
    ends = {one.end: one for one in writer.records}
    found = 0
    for pages in range(len(writer.content) // PAGE):
        wal = writer.read(pages)
        for lsn in [*range(wal.begin + 8, min(wal.begin + 2 * PAGE, wal.end), 8), dice.choice(writer.records).end]:
            try:
                record = wal.record_before(lsn)
            except Unreadable:
                continue
            assert (record.start if record else None) == (ends[lsn].start if lsn in ends else None)
            found += 1
    assert found > 1000


def test_a_transaction_is_known_by_its_end_and_its_time() -> None:
    writer = Writer()
    writer.record(OTHER, b"before")
    one, other = writer.transaction(TIME), writer.transaction(TIME + 1)
    same_time = writer.record(OTHER, struct.pack("<q", TIME))
    wal = writer.read()
    assert wal.ended_transaction(one.end, TIME) and wal.ended_transaction(other.end, TIME + 1)
    assert not wal.ended_transaction(one.end, TIME + 1)
    assert not wal.ended_transaction(other.end - 8, TIME)
    assert not wal.ended_transaction(same_time.end, TIME)


def test_a_transaction_that_came_from_elsewhere_is_known_by_the_time_of_its_origin() -> None:
    writer = Writer()
    writer.record(OTHER)
    one = writer.record(TRANSACTION, struct.pack("<qI", TIME + 9, 32) + struct.pack("<Qq", 77, TIME))
    assert writer.read().ended_transaction(one.end, TIME)


def test_the_last_record_of_the_wal_needs_nothing_behind_it() -> None:
    writer = Writer()
    one = writer.transaction()
    assert writer.read().ended_transaction(one.end, TIME)
    with pytest.raises(Unreadable, match="was read up to"):  # what says that another ends there is not confirmed
        writer.read().ended_transaction(one.end, TIME + 1)


def test_a_record_that_covers_the_position_and_much_more_is_proof_enough() -> None:
    writer = Writer()
    writer.record(OTHER)
    long = writer.record(OTHER, bytes(20 * PAGE))
    wal = writer.read()
    for lsn in range(long.start + 8, long.end, 8):
        assert wal.record_before(lsn) is None
    inside = writer.read(5)
    assert inside.record_before(inside.begin + 3 * PAGE) is None
    with pytest.raises(Unreadable, match="begins before"):
        inside.record_before(long.end)


def test_what_a_switch_left_unused_is_passed_over_and_known_by_what_follows() -> None:
    writer = Writer()
    end = writer.transaction().end
    writer.switch()
    border = writer.at
    writer.transaction()
    beyond = writer.transaction(TIME + 1).end
    wal = writer.read()
    assert wal.ended_transaction(end, TIME) and wal.ended_transaction(beyond, TIME + 1)
    assert wal.record_before(end + 8) is None
    for lsn in range(end + 32, border + 1, 8):
        with pytest.raises(Unused):
            wal.record_before(lsn)
    assert writer.read(2).ended_transaction(beyond, TIME + 1)
    with pytest.raises(Unused):
        writer.read(2).record_before(border - 8)
    assert writer.read((border - BEGIN) // PAGE).last_record_before() == end  # where XLOG_SWITCH began


def test_a_record_that_a_crash_cut_off_is_passed_over() -> None:
    writer = Writer()
    before = writer.transaction(TIME)
    writer.record(OTHER, bytes(PAGE), cut=True)
    after = [writer.record(0, b"XLOG_OVERWRITE_CONTRECORD"), writer.transaction(TIME + 1), writer.transaction(TIME + 2)]
    wal = writer.read()
    assert wal.ended_transaction(before.end, TIME)
    assert wal.ended_transaction(after[1].end, TIME + 1)
    assert not wal.ended_transaction(after[1].end, TIME)


@pytest.mark.parametrize("lsn", [BEGIN, BEGIN + 100 * PAGE])
def test_a_position_that_was_not_read_is_unknown(lsn: int) -> None:
    writer = Writer()
    writer.transaction()
    with pytest.raises(Unreadable, match="was not read"):
        writer.read().record_before(lsn)


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_prove_nothing(seed: int) -> None:
    dice = random.Random(seed)
    for content in (dice.randbytes(8 * PAGE), bytes(8 * PAGE), b"\xff" * 8 * PAGE):
        for lsn in range(BEGIN + 8, BEGIN + 8 * PAGE, 40):
            with pytest.raises(Unreadable):
                Wal(BEGIN, content, PAGE).ended_transaction(lsn, TIME)


@pytest.mark.parametrize("seed", range(8))
def test_wal_of_another_place_format_or_server_proves_nothing(seed: int) -> None:
    dice = random.Random(seed)
    writer = filled(seed)
    ends = [one.end for one in writer.records if one.manager == TRANSACTION and one.start > BEGIN + PAGE]
    content = bytes(writer.content)
    moved = Wal(BEGIN - SEGMENT, content + bytes(SEGMENT), PAGE)  # a segment that was used again
    larger = Wal(BEGIN, content, 2 * PAGE)
    noise = bytearray(content)  # right addresses, and nothing between them that fits together
    for at in range(0, len(noise), PAGE):
        noise[at + 20 : at + PAGE] = dice.randbytes(len(noise[at + 20 : at + PAGE]))
    for wal in (moved, larger, Wal(BEGIN, bytes(noise), PAGE)):
        for lsn in ends:
            with pytest.raises(Unreadable):
                wal.ended_transaction(lsn, TIME - 1)
