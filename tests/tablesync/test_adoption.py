"""A table that is adopted by a worker of this process: what it waits for, and how it goes on."""

from __future__ import annotations

from contextlib import closing

import pytest
from fix_pair import MakePair, repaired_elsewhere

from pgsub.common.errors import PgsubError, TargetUnavailable
from pgsub.tablesync import copy_pool
from pgsub.tablesync.copy import task


def test_an_adoption_waits_for_a_lock_only_so_long_and_goes_on_when_it_is_free(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "ADOPT_PATIENCE", "SET LOCAL lock_timeout = '50ms'")
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        pub="INSERT INTO t VALUES (1, 'a'), (2, 'b')",
        sub="INSERT INTO t VALUES (1, 'x')",
        state="i",
    )
    p.subdb.execute("UPDATE pgsub.subscription_rel SET adopt = true")
    with closing(p.subdb.connect()) as other:
        other.execute("BEGIN")
        other.execute("UPDATE t SET v = 'y' WHERE id = 1")
        with pytest.raises(PgsubError, match="due to lock timeout"):
            p.sync("t")
        assert p.subdb.rows("SELECT * FROM t") == [(1, "x")]
        other.execute("ROLLBACK")
    p.sync("t")
    p.same("t")
    assert p.subdb.value("SELECT adopted FROM pgsub.subscription_rel") == [1, 0, 1]


def test_an_adoption_of_a_table_without_a_key_deletes_rows_whatever_only_the_target_has_in_them(pair: MakePair) -> None:
    p = pair(
        pub="CREATE TABLE t (v int, m varchar(9)); ALTER TABLE t REPLICA IDENTITY FULL;"
        "INSERT INTO t VALUES (1, 'a'), (1, 'a'), (2, 'b'), (3, 'c')",
        # of rows that both sides have, the texts are compared in different forms, because the types are not the same
        sub="CREATE TABLE t (v int, m varchar(5), mine int DEFAULT 7);"
        "INSERT INTO t VALUES (1, 'a'), (1, 'a'), (1, 'a'), (2, 'old'), (9, 'extra')",
        state="i",
    )
    p.subdb.execute("UPDATE pgsub.subscription_rel SET adopt = true")
    p.sync("t")
    p.same("t", columns="v, m")
    assert p.subdb.value("SELECT adopted FROM pgsub.subscription_rel") == [2, 3, 0]
    assert p.subdb.value("SELECT count(*) FROM t WHERE mine = 7") == 4


def test_only_one_session_brings_what_differs(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pool, "TRIES", 1)
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", pub="INSERT INTO t VALUES (1), (2)", state="i")
    p.subdb.execute("INSERT INTO t VALUES (1)")
    p.subdb.execute("UPDATE pgsub.subscription_rel SET adopt = true")
    with repaired_elsewhere(p, "t"):
        with pytest.raises(TargetUnavailable, match="locked by a session"):
            p.sync("t")
        assert p.subdb.rows("SELECT * FROM t") == [(1,)]
    p.sync("t")
    p.same("t")
