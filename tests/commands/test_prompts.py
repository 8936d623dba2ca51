"""What is asked on a terminal before something is lost, and what each answer does: Ctrl-C and a wrong one: nothing."""

from __future__ import annotations

import pexpect
import pytest
from fix_stuck import MakeStuck, Stuck
from terminal import terminal

CTRL_C = "\x03"
_SLOTS = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"


@pytest.fixture
def it(stuck: MakeStuck) -> Stuck:
    """A subscription that a conflict stopped."""
    one = stuck()
    one.subdb.execute("INSERT INTO b VALUES (1, 0)")
    assert one.apply("INSERT INTO b VALUES (1, 1), (2, 2)") is not None
    return one


def _answered(it: Stuck, question: str, answer: str, *words: str) -> tuple[int, str]:
    """Exit code of a command on a terminal that is given an answer, and all that the terminal showed."""
    environment = {**it.cli.environment, "NO_COLOR": "1", "COLUMNS": "200"}
    child = terminal(["-m", "pgsub", *words], environment, 200, lines=50)
    child.expect_exact(question)
    before = str(child.before)
    child.send(answer) if answer == CTRL_C else child.sendline(answer)
    child.expect(pexpect.EOF)
    after = str(child.before)
    child.close()
    return int(child.exitstatus), (before + question + after).replace("\r", "")


def _refused(said: tuple[int, str], detail: str = "Nothing was changed.") -> None:
    """Canceled, told on lines of its own, without a traceback."""
    code, text = said
    assert code == 1 and text.endswith(f"\npgsub: error: canceled\nDETAIL:  {detail}\n"), text


@pytest.mark.long
def test_skip_lsn_says_what_will_not_be_applied_and_skips_it_once_that_is_agreed(it: Stuck) -> None:
    def answered(answer: str) -> tuple[int, str]:
        return _answered(it, "Skip it? [y/N]:", answer, "skip-lsn", "s", "--rows", "conflicting")

    _refused(answered(CTRL_C))
    _refused(answered("n"))
    _refused(answered(""))
    assert it.journal("skip-lsn") == [] and it.cli.sql("SELECT subskiplsn FROM pg_subscription") == [("0/0",)]
    code, text = answered("y")
    [done] = it.journal("skip-lsn")
    assert code == 0 and f"will apply only what it can of the transaction finished at {done['lsn']}; the rest" in text
    assert it.apply() is None and it.subdb.rows("SELECT id, n::int FROM b ORDER BY id") == [(1, 0), (2, 2)]


@pytest.mark.long
def test_origin_advance_counts_what_vanishes_and_moves_once_that_is_agreed(it: Stuck) -> None:
    before, to = it.position(), str(it.pubdb.value("SELECT pg_current_wal_flush_lsn()"))

    def answered(answer: str) -> tuple[int, str]:
        return _answered(it, "Advance past it? [y/N]:", answer, "origin-advance", "s", to)

    _refused(answered(CTRL_C))
    _refused(answered("n"))
    assert it.position() == before and it.journal("origin-advance") == []
    code, text = answered("y")
    assert code == 0 and "lies 1 transaction with 2 changes" in text and "it will not be applied" in text
    assert it.position() == to and it.apply() is None and it.subdb.value("SELECT count(*) FROM b") == 1


@pytest.mark.long
def test_drop_wants_the_name_typed(it: Stuck) -> None:
    def answered(answer: str) -> tuple[int, str]:
        return _answered(it, "Type the name of the subscription to continue:", answer, "drop", "s")

    _refused(answered(CTRL_C))
    _refused(answered("y"), "Nothing was dropped.")
    assert it.pubdb.value(_SLOTS) == 1
    code, text = answered("s")
    assert code == 0 and 'its replication slot on the publisher "s" is dropped' in text
    assert it.pubdb.value(_SLOTS) == 0 and it.cli.sql("SELECT * FROM pg_subscription") == []
