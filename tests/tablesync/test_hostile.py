"""Whatever a publisher sends in answer to COPY, the target sees messages of pgsub's and no others."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hostile
import psycopg
import pytest
from hostile import Judge, Publisher

from pgsub.common.errors import ProtocolViolation
from pgsub.tablesync.copy.below_libpq import SourceError
from pgsub.tablesync.copy.copy_out import CopyOut, Stage

if TYPE_CHECKING:
    from fix_servers import Database

_TRIALS = int(os.environ.get("PGSUB_FUZZ_TRIALS") or (1500 if os.environ.get("PGSUB_TEST_THOROUGH") else 80))


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Publisher]]:
    """A publisher that encrypts nothing and one that does."""
    made: dict[str, Any] = {"raw": Publisher()}
    yield made
    for publisher in made.values():
        publisher.close()


def encrypted(ways: dict[str, Publisher], folder: Path) -> Publisher:
    """Made when it is asked for first: not everybody can make certificates."""
    if "encrypted" not in ways:
        ways["encrypted"] = Publisher(folder)
    return ways["encrypted"]


@pytest.fixture
def judge(subdb: Database) -> Judge:
    """The target."""
    subdb.execute(hostile.CANARY)
    return Judge(subdb)


each_way = pytest.mark.parametrize("way", ["raw", "encrypted", "through libpq"])


@each_way
def test_no_malformed_answer_makes_the_target_see_a_message_that_is_not_pgsubs(
    judge: Judge, ways: dict[str, Publisher], tmp_path: Path, way: str
) -> None:
    publisher, direct = ways["raw"] if way == "raw" else encrypted(ways, tmp_path), way != "through libpq"
    taken = set()
    for name, stream in {**hostile.MALFORMED, **hostile.STRICTER}.items():
        publisher.answer = stream
        if judge.copy(publisher, direct=direct) is None:
            taken.add(name)
        judge.database.execute("TRUNCATE t")
    assert not (taken if direct else taken - set(hostile.STRICTER))


@each_way
def test_an_answer_that_is_well_formed_is_copied(
    judge: Judge, ways: dict[str, Publisher], tmp_path: Path, way: str
) -> None:
    publisher, direct = ways["raw"] if way == "raw" else encrypted(ways, tmp_path), way != "through libpq"
    for answer in (hostile.LEGAL, hostile.NOTICE * 3 + hostile.LEGAL):
        publisher.answer = answer
        assert judge.copy(publisher, direct=direct) is None
    assert judge.database.rows("SELECT * FROM t") == [(1, "x")] * 4


def test_the_judge_sees_a_message_that_was_smuggled_in(judge: Judge) -> None:
    log = judge.database.server.log
    offset = log.stat().st_size
    with judge.session() as session:
        pid = session.info.backend_pid
        session.pgconn.exec_(b"COPY public.t FROM STDIN")
        os.write(session.fileno(), hostile.ROW + hostile.SLED)
        judge.database.wait("SELECT EXISTS (SELECT FROM canary)")
    with pytest.raises(AssertionError):
        judge.look(log.read_bytes()[offset:].decode(), pid)


@pytest.mark.long
def test_random_streams_of_a_publisher_never_move_the_boundary_of_a_message(
    judge: Judge, ways: dict[str, Publisher], tmp_path: Path
) -> None:
    seed = int(os.environ.get("PGSUB_FUZZ_SEED") or random.SystemRandom().getrandbits(32))
    print(f"PGSUB_FUZZ_SEED={seed}")
    both_ways = ways["raw"], encrypted(ways, tmp_path)
    taken = sum(hostile.trial(judge, *both_ways, seed + number)[1] for number in range(_TRIALS))
    assert 0 < taken < _TRIALS


# what needs no server

_ANSWER = hostile.LEGAL.replace(hostile.ROW, hostile.ROW + hostile.frame(b"d", b"l" * 100), 1)


def _read(stream: bytes, size: int, room: int) -> tuple[CopyOut, bytes]:
    """Rows of a stream that comes in pieces of a size."""
    answer, rows = CopyOut(), b""
    buffer, have = bytearray(room), 0
    while stream or have:
        piece = stream[: min(size, room - have)]
        stream = stream[len(piece) :]
        buffer[have : have + len(piece)] = piece
        have += len(piece)
        found, done = answer.cut(buffer, have)
        rows += b"".join(found)
        found.clear()
        buffer[: have - done] = buffer[done:have]
        have -= done
        if not piece and not done:
            break
    return answer, rows


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 64, 1000])
@pytest.mark.parametrize("room", [64, 300])
def test_rows_are_the_same_in_whatever_pieces_they_come(size: int, room: int) -> None:
    answer, rows = _read(_ANSWER, size, room)
    assert (answer.stage, rows) == (Stage.ENDED, b"1\tx\n" + b"l" * 100 + b"1\tx\n")


@pytest.mark.parametrize("end", range(len(_ANSWER)))
def test_an_answer_that_ends_early_anywhere_has_not_ended(end: int) -> None:
    assert _read(_ANSWER[:end], 1000, 300)[0].stage is not Stage.ENDED


_BEFORE = {
    Stage.ASKED: b"",
    Stage.ROWS: hostile.BEGIN,
    Stage.DONE: hostile.BEGIN + hostile.DONE,
    Stage.COMPLETE: hostile.BEGIN + hostile.DONE + hostile.COUNT,
    Stage.FAILED: hostile.BEGIN + hostile.ERROR,
    Stage.ENDED: hostile.LEGAL,
}
_MAY_FOLLOW = {
    Stage.ASKED: b"HE",
    Stage.ROWS: b"dcE",
    Stage.DONE: b"CE",
    Stage.COMPLETE: b"ZE",
    Stage.FAILED: b"ZE",
    Stage.ENDED: b"E",
}


@pytest.mark.parametrize("stage", _BEFORE, ids=lambda stage: stage.name)
def test_a_message_of_any_other_kind_than_may_come_now_is_a_protocol_violation(stage: Stage) -> None:
    for kind in set(range(256)) - set(_MAY_FOLLOW[stage] + b"NSA"):
        with pytest.raises(ProtocolViolation):
            _read(_BEFORE[stage] + hostile.frame(bytes([kind]), b"content"), 1000, 300)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 0x40000004, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
@pytest.mark.parametrize("kind", [b"d", b"E", b"N", b"c"])
def test_an_impossible_length_is_a_protocol_violation_before_anything_of_the_message_comes_out(
    kind: bytes, length: int
) -> None:
    with pytest.raises(ProtocolViolation, match=f"length {length} from the publisher is impossible"):
        _read(hostile.BEGIN + hostile.header(kind, length) + hostile.SLED, 1000, 300)


@each_way
def test_a_publisher_that_ends_the_session_right_behind_its_answer_is_lost_and_no_violation(
    judge: Judge, ways: dict[str, Publisher], tmp_path: Path, way: str
) -> None:
    publisher, direct = ways["raw"] if way == "raw" else encrypted(ways, tmp_path), way != "through libpq"
    publisher.answer = hostile.LEGAL + hostile.frame(b"E", b"SFATAL\0C57P01\0Mterminating\0\0")
    error = judge.copy(publisher, direct=direct)
    if direct:
        assert isinstance(error, SourceError) and isinstance(error.error, psycopg.errors.AdminShutdown)
    else:
        assert error is None  # libpq has the rows, and tells of the end with the next query


def test_an_error_report_larger_than_the_buffer_is_told_as_far_as_it_fits() -> None:
    long = hostile.frame(b"E", b"SERROR\0C22012\0M" + b"no" * 1000 + b"\0\0")
    answer, rows = _read(hostile.BEGIN + hostile.ROW + long + hostile.READY, 50, 300)
    assert answer.stage is Stage.ENDED and answer.failure is not None
    assert answer.failure.sqlstate == "22012" and rows == b"1\tx\n"
