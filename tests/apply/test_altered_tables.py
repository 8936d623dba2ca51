"""A table that is altered on the target after apply has described it, and before apply has locked it.

As in logicalrep_rel_open (relation.c), the definition counts that the table has once it is locked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
from fix_pair import MakePair, Pair
from fix_parallel import publishing, wait_open

from pgsub.apply.rows import relation_cache
from pgsub.common.errors import ApplyError

ROWS = 60  #: enough for a set
OTHER = "CREATE TABLE other (id int PRIMARY KEY, v text)"
PUB = "CREATE TABLE t (id int, tenant int, v double precision, PRIMARY KEY (id, tenant))"
SUB = "CREATE TABLE t (id int PRIMARY KEY, tenant int NOT NULL, v real)"
#: The publisher's change of ``t``, and what the owner of the table does before the change gets the lock.
CASES = {
    "key": (
        "DELETE FROM t WHERE id <= {}",
        f"""ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, tenant);
            INSERT INTO t SELECT g, 2, 0 FROM generate_series(1, {ROWS}) g""",
    ),
    "type": (
        "UPDATE t SET v = id + 0.123456789012345 WHERE id <= {}",
        "ALTER TABLE t ALTER v TYPE double precision",
    ),
}
WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"

each_case = pytest.mark.parametrize("case", CASES)
each_size = pytest.mark.parametrize("rows", [1, ROWS], ids=["row", "set"])


@pytest.fixture(autouse=True)
def _nobody_looks_before_the_table_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relation_cache, "CHECK_SECONDS", 1e9)


def _filled(make: Callable[..., Pair]) -> Pair:
    return make(OTHER, pub=PUB, sub=SUB)


def _fill(p: Pair) -> None:
    """Write all tables, so that a running worker knows them."""
    p.pubdb.execute(
        f"INSERT INTO other VALUES (1, 'x'); INSERT INTO t SELECT g, 1, g FROM generate_series(1, {ROWS}) g"
    )
    p.pubdb.execute("UPDATE t SET v = v + 1; UPDATE t SET v = v + 1 WHERE id = 1")


def _is_right(p: Pair, case: str) -> None:
    p.same("(SELECT * FROM t WHERE tenant = 1)")
    assert p.subdb.value("SELECT count(*) FROM t WHERE tenant = 2") == (ROWS if case == "key" else 0)
    # a row that ALTER TABLE rewrote has no origin
    assert not [one for one in p.events() if one["conflict_type"] != "update_origin_differs"]


@each_size
@each_case
def test_a_change_that_waits_for_an_alter_table_is_made_by_the_new_definition(
    pair: MakePair, case: str, rows: int
) -> None:
    p, (change, altering) = _filled(pair), CASES[case]
    task = p.start()
    _fill(p)
    p.until("SELECT v = 3 FROM t WHERE id = 1", task=task)
    with closing(p.subdb.connect()) as owner:
        owner.execute("BEGIN")
        owner.execute(altering.encode())
        p.pubdb.execute(change.format(rows))
        p.until(WAITS, value=1, task=task)
        owner.execute("COMMIT")
    p.pubdb.execute("INSERT INTO other VALUES (2, 'later')")
    p.until("SELECT count(*) = 2 FROM other", task=task)
    p.stop(task)
    _is_right(p, case)


@each_case
def test_a_table_that_is_altered_during_a_transaction_is_changed_by_its_new_definition(
    pair: MakePair, case: str
) -> None:
    p, (change, altering) = _filled(pair), CASES[case]
    task = p.start()
    _fill(p)
    p.until("SELECT v = 3 FROM t WHERE id = 1", task=task)
    with closing(p.subdb.connect()) as other:
        other.execute("BEGIN; UPDATE other SET v = 'local'")
        p.pubdb.execute(f"BEGIN; UPDATE other SET v = 'y'; {change.format(1)}; COMMIT")
        p.until(WAITS, value=1, task=task)
        p.subdb.execute(altering)
        other.execute("ROLLBACK")
    p.pubdb.execute("INSERT INTO other VALUES (2, 'later')")
    p.until("SELECT count(*) = 2 FROM other", task=task)
    p.stop(task)
    _is_right(p, case)


@each_case
def test_a_table_whose_lock_a_subtransaction_gave_back_is_changed_by_its_new_definition(
    parallel: Callable[..., Pair], case: str
) -> None:
    p, (change, altering) = _filled(parallel), CASES[case]
    task = p.start()
    _fill(p)
    p.until("SELECT v = 3 FROM t WHERE id = 1", task=task)
    with publishing(p, "INSERT INTO other VALUES (3, 'x')") as session:
        session.execute("SAVEPOINT a")
        session.execute(change.format(1).encode())
        wait_open(p, task)
        p.until("SELECT count(*) > 0 FROM pg_locks WHERE relation = 't'::regclass AND mode = 'RowExclusiveLock'")
        session.execute("ROLLBACK TO a")
        p.subdb.execute(altering)  # waits until the lock is gone
        session.execute(change.format(1).encode())
        session.execute("COMMIT")
    p.until("SELECT count(*) = 2 FROM other", task=task)
    p.stop(task)
    _is_right(p, case)


def test_a_table_that_a_trigger_of_the_transaction_itself_alters_stops_nothing(pair: MakePair) -> None:
    p = pair(
        f"{OTHER}; CREATE TABLE t (id int PRIMARY KEY, v text)",
        sub="""CREATE FUNCTION alters() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN EXECUTE format('CREATE INDEX ON public.t (v) WHERE id > %s', NEW.id); RETURN NEW; END $$;
               CREATE TRIGGER alters AFTER INSERT ON other FOR EACH ROW EXECUTE FUNCTION alters();
               ALTER TABLE other ENABLE ALWAYS TRIGGER alters""",
    )
    p.apply("BEGIN; INSERT INTO t VALUES (1, 'a'); INSERT INTO other VALUES (1, 'x'); UPDATE t SET v = 'b'; COMMIT")
    p.same("t")
    assert p.subdb.value("SELECT count(*) FROM pg_index WHERE indrelid = 't'::regclass") == 2


def test_a_key_that_several_rows_have_stops_apply(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)")
    p.apply("INSERT INTO t VALUES (1, 'x')")
    unique = "UPDATE pg_index SET indisunique = {} WHERE indexrelid = 't_pkey'::regclass"
    p.subdb.execute(unique.format("false"))
    p.subdb.execute("INSERT INTO t VALUES (1, 'local')")
    p.subdb.execute(unique.format("true"))
    p.pubdb.execute("DELETE FROM t")
    with pytest.raises(ApplyError, match=r"several rows of .* have the key of one change"):
        p.catch_up()
    assert p.subdb.value("SELECT count(*) FROM t") == 2
