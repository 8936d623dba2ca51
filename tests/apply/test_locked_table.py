"""What looks at the target's tables takes no lock on them: apply would wait for what it is itself to end."""

from __future__ import annotations

import time

from fix_pair import MakePair

_U = "CREATE TABLE u (id int PRIMARY KEY)"
_PARTED = (
    f"{_U} PARTITION BY RANGE (id);"
    "CREATE TABLE u1 PARTITION OF u FOR VALUES FROM (0) TO (10);"
    "CREATE TABLE u2 PARTITION OF u FOR VALUES FROM (10) TO (20)"
)


def test_a_table_that_somebody_has_locked_keeps_no_change_of_another_waiting(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", pub=_U, sub=_PARTED)
    task = p.start()
    p.pubdb.execute("INSERT INTO u VALUES (1), (11); INSERT INTO t VALUES (1)")
    p.until("SELECT count(*) FROM t", value=1, task=task)
    with p.subdb.connect() as other:
        other.execute("BEGIN")
        other.execute("LOCK TABLE u1 IN ACCESS EXCLUSIVE MODE")  # as a TRUNCATE that is prepared
        for number in range(2, 6):
            p.pubdb.execute("INSERT INTO t VALUES (%s)", number)
            p.until("SELECT count(*) FROM t", value=number, task=task)
            time.sleep(0.4)  # definitions are looked at once a second
        other.execute("ROLLBACK")
    p.stop(task)
