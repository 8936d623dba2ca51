"""The release of held tables: what prepared transactions bring, and what is skipped."""

from __future__ import annotations

import pytest
from apply.test_held import TWO, fails, held, hold, kept, release
from fix_failpoints import At
from fix_pair import MakePair, Pair

from pgsub.apply.execute import held_changes
from pgsub.apply.worker import held_release
from pgsub.common.errors import PgsubError, SpoolFailed, StateForbids
from pgsub.target.ledger import skip, subscriptions
from pgsub.target.ledger.subscriptions import RelationState


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


@pytest.fixture
def in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows are a step: a transaction of a hundred is a large one."""
    monkeypatch.setattr(held_changes, "STRETCH_BYTES", 200)
    monkeypatch.setattr(held_release, "STEP_BYTES", 400)


_LARGE = "INSERT INTO a SELECT i, 'x' FROM generate_series(1, 100) i"
_SKIPPED = "SELECT count(*) FROM pgsub.skipped_change WHERE finish_lsn = %s"


@pytest.mark.parametrize("at_fault", [1, 60])
def test_of_a_large_kept_transaction_all_is_skipped_or_nothing(pair: MakePair, in_steps: None, at_fault: int) -> None:
    p = pair(TWO, sub=f"INSERT INTO a VALUES ({at_fault}, 'in the way')")
    hold(p, "a")
    p.apply("INSERT INTO a VALUES (-1, 'before')", _LARGE, "INSERT INTO a VALUES (200, 'behind')")
    release(p, "a")
    error = fails(p)
    assert p.subdb.rows("SELECT id FROM a ORDER BY 1") == [(-1,), (at_fault,)]
    _skip(p, error.finish_lsn)
    p.apply()
    assert p.subdb.rows("SELECT id FROM a ORDER BY 1") == [(-1,), (at_fault,), (200,)]
    assert p.subdb.value(_SKIPPED, error.finish_lsn) == 100
    assert skip.pending(p.session, p.subid) is None
    assert (kept(p), held(p)) == (0, 0)


def test_of_a_large_kept_transaction_only_the_conflicting_rows_are_left_out(pair: MakePair, in_steps: None) -> None:
    p = pair(TWO, sub="INSERT INTO a VALUES (1, 'in the way'), (60, 'too')")
    hold(p, "a")
    p.apply(_LARGE)
    release(p, "a")
    error = fails(p)
    _skip(p, error.finish_lsn, skip.CONFLICTING)
    p.apply()
    assert p.subdb.value("SELECT count(*) FROM a") == 100
    assert p.subdb.value(_SKIPPED, error.finish_lsn) == 2


def test_a_large_kept_transaction_is_seen_whole_or_not_at_all(pair: MakePair, in_steps: None) -> None:
    p = pair(
        TWO,
        sub="CREATE TABLE seen (n bigint); CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
        " INSERT INTO public.seen SELECT count(*) FROM public.a; RETURN NULL; END$$;"
        " CREATE CONSTRAINT TRIGGER look AFTER INSERT ON a DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        " EXECUTE FUNCTION look(); ALTER TABLE a ENABLE ALWAYS TRIGGER look",
    )
    hold(p, "a", "b")
    p.apply(
        "INSERT INTO a VALUES (0, 'small')",
        "DO $$BEGIN FOR i IN 1..40 LOOP INSERT INTO a VALUES (i, 'x'); INSERT INTO b VALUES (i, 'x'); END LOOP; END$$",
        "DELETE FROM a WHERE id = 7",
        "INSERT INTO a VALUES (41, 'small')",
    )
    release(p, "a", "b")
    p.apply()
    p.same("a", "b")
    assert p.subdb.rows("SELECT DISTINCT n FROM seen ORDER BY 1") == [(1,), (41,)]


def test_a_large_kept_transaction_takes_room_of_the_spool_and_not_of_memory(pair: MakePair, in_steps: None) -> None:
    p = pair(TWO)
    hold(p, "a")
    p.apply("INSERT INTO a VALUES (0, 'small')", _LARGE)
    release(p, "a")
    with pytest.raises(SpoolFailed, match="more space than the limit of spool"):
        p.start(until_lsn=p.published(), spool_limit=2000).result()
    assert p.subdb.rows("SELECT id FROM a") == [(0,)]
    p.apply()
    p.same("a")


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


@pytest.mark.parametrize("state", [None, "i"])
def test_what_others_wrote_into_the_ledger_as_kept_is_made_in_no_table_that_takes_no_changes(
    pair: MakePair, state: str | None
) -> None:
    p = pair(TWO, sub="CREATE TABLE payroll (id int PRIMARY KEY, v text)")
    hold(p, "a")
    p.apply("INSERT INTO a VALUES (1, 'one')")
    relid = p.relid("payroll")
    for table in ("held_table", "held_change"):
        p.session.execute(f"UPDATE pgsub.{table} SET srrelid = %s".encode(), (relid,))
    if state is not None:
        subscriptions.add_relations(p.session, p.subid, [RelationState(relid, "public", "payroll", state)])
    release(p, "payroll")
    with pytest.raises(StateForbids, match=r'kept changes of relation "public\.payroll"') as caught:
        p.catch_up()
    assert p.subdb.rows("SELECT * FROM payroll") == [] and kept(p) == 1
    p.subdb.execute((caught.value.hint or "").splitlines()[-1])
    assert p.subdb.value("SELECT count(*) FROM pgsub.held_change") == 0


_SWAP = "ALTER TABLE a RENAME TO c; ALTER TABLE b RENAME TO a; ALTER TABLE c RENAME TO b"
_BOTH = "INSERT INTO a VALUES ({0}, 'a'); INSERT INTO b VALUES ({0}, 'b')"


@pytest.mark.parametrize("stretch", [held_changes.STRETCH_BYTES, 1])
def test_tables_whose_names_the_publisher_swapped_get_what_was_kept_for_each_and_stop_nothing(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch, stretch: int
) -> None:
    monkeypatch.setattr(held_changes, "STRETCH_BYTES", stretch)
    monkeypatch.setattr(held_release, "STEP_BYTES", 2 * stretch)  # with the small one, most transactions are large
    p = pair(f"{TWO}; CREATE TABLE other (id int PRIMARY KEY)")
    hold(p, "a", "b")
    p.apply(
        _BOTH.format(1),
        _SWAP,
        _BOTH.format(2),
        f"BEGIN; {_BOTH.format(3)}; {_SWAP}; {_BOTH.format(4)}; {_SWAP}; {_BOTH.format(5)}; COMMIT",
        "UPDATE a SET v = 'new' WHERE id = 2; DELETE FROM b WHERE id = 3",
    )
    release(p, "a", "b")
    p.apply("INSERT INTO other VALUES (1)")
    p.same("other")
    assert p.subdb.rows("SELECT * FROM a ORDER BY 1") == [(1, "a"), (2, "new"), (3, "a"), (4, "a"), (5, "a")]
    assert p.subdb.rows("SELECT * FROM b ORDER BY 1") == [(1, "b"), (2, "b"), (4, "b"), (5, "b")]
    assert (kept(p), held(p)) == (0, 0)


def test_what_was_kept_for_a_dropped_table_is_not_made_in_the_table_that_took_its_name(pair: MakePair) -> None:
    p = pair(TWO)
    hold(p, "a", "b")
    p.apply("INSERT INTO b VALUES (1, 'b')", "INSERT INTO a VALUES (2, 'a')")
    release(p, "a", "b")
    p.subdb.execute("DROP TABLE a; ALTER TABLE b RENAME TO a")
    assert "was dropped and created again" in fails(p).message
    assert (2, "a") not in p.subdb.rows("SELECT * FROM a")
