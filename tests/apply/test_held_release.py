"""The release of held tables: what prepared transactions bring, and what is skipped."""

from __future__ import annotations

import pytest
from apply.test_held import TWO, fails, held, hold, kept, release
from fix_failpoints import At
from fix_pair import MakePair, Pair

from pgsub.common.errors import PgsubError
from pgsub.target.ledger import skip


def _skip(p: Pair, lsn: str | None, rows: str = skip.WHOLE) -> None:
    """As skip-lsn does."""
    assert lsn is not None
    p.session.execute(
        "UPDATE pgsub.control SET skip_lsn = %s, skip_rows = %s WHERE worker = 0 AND subid = %s", (lsn, rows, p.subid)
    )


def test_a_table_is_not_released_for_good_before_what_was_prepared_meanwhile_is_decided(pair: MakePair, at: At) -> None:
    p = pair(TWO, two_phase="p")
    p.apply()
    hold(p, "a")
    p.apply("BEGIN; INSERT INTO a VALUES (1, 'one'); PREPARE TRANSACTION 'one'")
    release(p, "a")
    p.apply("INSERT INTO b VALUES (1, 'the table was seen to be empty')")
    assert held(p) == 1
    p.pubdb.execute("COMMIT PREPARED 'one'")
    p.pubdb.execute("BEGIN; INSERT INTO a VALUES (2, 'two'); PREPARE TRANSACTION 'two'")
    at("apply.released=error@1")
    with pytest.raises(PgsubError, match="failpoint"):
        p.catch_up()
    at("")
    p.apply("INSERT INTO b VALUES (2, 'the next worker finishes what it finds')")
    p.apply("COMMIT PREPARED 'two'")
    p.same("a", "b")
    assert (kept(p), held(p)) == (0, 0)


def test_the_end_of_a_prepared_transaction_clears_no_skip_of_a_held_one(pair: MakePair) -> None:
    p = pair(TWO, two_phase="p", sub="INSERT INTO a VALUES (1, 'in the way')")
    p.apply()
    hold(p, "a")
    p.apply("INSERT INTO a VALUES (1, 'remote')", "BEGIN; INSERT INTO b VALUES (1, 'x'); PREPARE TRANSACTION 'x'")
    release(p, "a")
    error = fails(p)
    hold(p, "a")
    _skip(p, error.finish_lsn)
    p.apply("COMMIT PREPARED 'x'", "INSERT INTO b VALUES (2, 'y')")
    p.same("b")
    assert skip.pending(p.session, p.subid) is not None
    release(p, "a")
    p.apply()
    assert p.subdb.rows("SELECT v FROM a") == [("in the way",)]
    assert skip.pending(p.session, p.subid) is None
    assert [one for one in p.events() if "cleared" in str(one)] == []
