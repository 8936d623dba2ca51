"""Transactions applied while they arrive, when something goes wrong in the middle: nothing is lost, nobody hangs."""

from __future__ import annotations

import pytest
from fix_parallel import Parallel

from pgsub.errors import ApplyError

_PREPARED = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
_REFUSING = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'not now'; END$$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse();
ALTER TABLE t ENABLE ALWAYS TRIGGER refuse
"""


def test_a_prepare_that_fails_is_reported_and_done_whole_by_the_next_try(parallel: Parallel) -> None:
    p = parallel(sub=_REFUSING, two_phase="p")
    p.apply()
    p.pubdb.execute("BEGIN; INSERT INTO t VALUES (1, 'x'), (2, 'y'); PREPARE TRANSACTION 'x'")
    with pytest.raises(ApplyError, match="not now"):
        p.catch_up()
    assert p.subdb.rows("SELECT gid FROM pgsub.prepared_xact UNION ALL SELECT gid FROM pgsub.prepared_pending") == []
    p.subdb.execute("ALTER TABLE t DISABLE TRIGGER refuse")
    p.apply()
    assert p.subdb.value(_PREPARED) == 1
    p.apply("COMMIT PREPARED 'x'")
    p.same("t")
