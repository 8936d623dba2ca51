"""The release of held tables: what prepared transactions bring, and what is skipped."""

from __future__ import annotations

from apply.test_held import TWO, fails, hold, release
from fix_pair import MakePair, Pair

from pgsub.target.ledger import skip


def _skip(p: Pair, lsn: str | None, rows: str = skip.WHOLE) -> None:
    """As skip-lsn does."""
    assert lsn is not None
    p.session.execute(
        "UPDATE pgsub.control SET skip_lsn = %s, skip_rows = %s WHERE worker = 0 AND subid = %s", (lsn, rows, p.subid)
    )


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
