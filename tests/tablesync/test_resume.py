"""A copy that broke off goes on: what it had brought is compared at the new snapshot, and only the rest comes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fix_failpoints import At
from fix_pair import MakePair, Pair, repaired_elsewhere
from fix_program import until
from fix_proxy import Proxy

from pgsub.common import failpoints
from pgsub.common.errors import ApplyError, TableRewritten, TargetUnavailable
from pgsub.reconcile import copied_parts
from pgsub.tablesync import copy_pool
from pgsub.tablesync.copy import cleanup, plan
from pgsub.target.catalog.relation import describe
from pgsub.target.session import ledger_privileges
from pgsub.target.session.connect import SessionName, connect

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
ROWS = "INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, 3000) g"
KEEPS = "SELECT array_agg(x::text ORDER BY x) FROM (SELECT DISTINCT xmin::text AS x FROM t) AS s"


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks, one at a time, so that it is known which of them a failpoint meets."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 50_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 50_000)
    monkeypatch.setattr(copy_pool, "TRIES", 1)


@pytest.fixture
def broken(pair: MakePair, at: At) -> Callable[..., Pair]:
    """``broken(table, rows, chunks=3)`` gives a copy that broke off in a chunk."""

    def make(table: str = TABLE, rows: str = ROWS, chunk: int = 3, **options: object) -> Pair:
        p = pair(table, pub=rows, state="i", **{"copy_workers": 1, **options})
        at(f"copy.before_commit=error@{chunk}")
        with pytest.raises(TargetUnavailable):
            p.sync("t")
        at("")
        assert 0 < p.subdb.value("SELECT count(*) FROM t") < p.pubdb.value("SELECT count(*) FROM t")
        return p

    return make


def _said(p: Pair) -> str:
    """What the log will say of how the copy went on."""
    [(text,)] = p.subdb.rows("SELECT body ->> 'text' FROM pgsub.event WHERE body ->> 'kind' = 'log' ORDER BY id")
    p.subdb.execute("DELETE FROM pgsub.event")
    assert "continues where it was interrupted" in text
    return str(text)


def _kept(p: Pair) -> set[str]:
    return {xid for (xid,) in p.subdb.rows("SELECT DISTINCT xmin::text FROM t")}


def _ends_well(p: Pair, columns: str = "*") -> str:
    p.sync("t")
    said = _said(p)
    assert p.state("t") == "s" and p.subdb.value("SELECT count(*) FROM pgsub.copy_chunk") == 0
    assert p.subdb.rows("SELECT copy_mode, attempt > 1 FROM pgsub.subscription_rel") == [("chunked", True)]
    p.apply()
    p.same("t", columns=columns)
    return said


def test_what_was_brought_stays_where_nothing_has_changed(broken: Callable[..., Pair]) -> None:
    p = broken()
    before = dict(p.subdb.rows("SELECT id, xmin::text || ctid::text FROM t"))
    said = _ends_well(p)
    assert "2 parts of 2 as they were, 0 rows removed, 0 added" in said
    after = dict(p.subdb.rows("SELECT id, xmin::text || ctid::text FROM t"))
    assert {key: after[key] for key in before} == before


_KEYLESS = "CREATE TABLE t (id int, v text); ALTER TABLE t REPLICA IDENTITY FULL"


@pytest.mark.parametrize("table", [TABLE, _KEYLESS])
def test_rows_that_changed_moved_came_or_went_meanwhile_are_as_the_publisher_has_them(
    broken: Callable[..., Pair], table: str
) -> None:
    p = broken(table)
    p.pubdb.execute("UPDATE t SET v = 'moved' WHERE id IN (1, 5, 9); DELETE FROM t WHERE id IN (2, 700)")
    p.pubdb.execute("VACUUM t")
    p.pubdb.execute("INSERT INTO t VALUES (9001, 'new'), (9002, 'new'), (2, 'again')")
    kept = _kept(p)
    said = _ends_well(p)
    assert kept < _kept(p)
    found = re.search(r"0 parts of 2 as they were, (\d+) rows removed, (\d+) added|1 part of 2 .*, (\d+) rows", said)
    assert found and 5 <= int(found[1] or found[3]) < 10


def test_values_change_places_in_a_unique_column(broken: Callable[..., Pair]) -> None:
    p = broken("CREATE TABLE t (id int PRIMARY KEY, v text UNIQUE)")
    for key, value in ((1, "'x'"), (900, "md5('1')"), (1, "md5('900')"), (2500, "md5('2')"), (2, "md5('2500')")):
        p.pubdb.execute(f"UPDATE t SET v = v || '-' WHERE v = {value}; UPDATE t SET v = {value} WHERE id = {key}")
    assert "0 parts of 2 as they were, 3 rows removed, 1 added" in _ends_well(p)


def test_a_row_that_moved_to_what_is_still_to_copy_is_gone_before_it_comes(broken: Callable[..., Pair]) -> None:
    p = broken()
    p.pubdb.execute("UPDATE t SET v = 'at the end' WHERE id <= 20")
    assert "1 part of 2 as they were, 20 rows removed, 0 added" in _ends_well(p)


@pytest.mark.parametrize("change", ["UPDATE t SET v = v || 'x'", "DELETE FROM t WHERE id < 1400"])
def test_a_part_that_is_not_worth_it_is_copied_again(broken: Callable[..., Pair], change: str) -> None:
    p = broken()
    p.pubdb.execute(change)
    p.pubdb.execute("VACUUM t")
    said = _ends_well(p)
    assert "0 parts of 2 as they were" in said and ", 0 added" in said


def test_many_rows_of_a_part_that_differ_are_not_listed(
    broken: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copied_parts, "MOST_ROWS", 5)
    p = broken(rows=ROWS.replace("md5(g::text)", "repeat(md5(g::text), 4)"))
    p.pubdb.execute("DELETE FROM t WHERE id BETWEEN 50 AND 55")
    assert "1 part of 2 as they were" in _ends_well(p)


#: Of both rows that go and rows that come.
_CHANGES = "UPDATE t SET v = 'moved' WHERE id IN (1, 300, 450); DELETE FROM t WHERE id IN (2, 700)"


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "resume.compared",
        "resume.before_commit",
        "resume.after_commit",
        "resume.removed",
        "resume.before_commit@3",
        "resume.after_commit@3",
        "copy.before_commit",
        "copy.before_commit@2",
    ],
)
def test_a_resumption_that_broke_off_is_resumed(broken: Callable[..., Pair], at: At, point: str) -> None:
    p = broken()
    p.subdb.execute("INSERT INTO t SELECT -g, 'mine' FROM generate_series(1, 50) g")
    p.pubdb.execute(_CHANGES)
    p.pubdb.execute("VACUUM t")
    p.pubdb.execute("INSERT INTO t SELECT g, 'new' FROM generate_series(5001, 5003) g")
    name, _, number = point.partition("@")
    at(f"{name}=error" + (f"@{number}" if number else ""))
    with pytest.raises(TargetUnavailable):
        p.sync("t")
    at("")
    p.subdb.execute("DELETE FROM pgsub.event")
    p.pubdb.execute("UPDATE t SET v = 'later' WHERE id IN (3, 300, 5002); DELETE FROM t WHERE id = 450")
    p.sync("t")
    assert p.state("t") == "s" and "continues where" in _said(p)
    p.apply()
    p.same("(SELECT * FROM t WHERE id > 0)")
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = 'mine'") == 50


def test_rows_that_were_changed_here_are_not_thrown_away(broken: Callable[..., Pair]) -> None:
    p = broken()
    before = p.subdb.value("SELECT count(*) FROM t")
    p.subdb.execute("UPDATE t SET v = 'changed here' WHERE id = 1; DELETE FROM t WHERE id = 2")
    p.pubdb.execute("DELETE FROM t WHERE id = 3")
    for _ in range(2):
        with pytest.raises(ApplyError, match="could not continue the interrupted copy of") as caught:
            p.sync("t")
        assert f"{before} rows were copied, {before - 2} are unchanged" in (caught.value.detail or "")
        assert (caught.value.hint or "").endswith(f"pgsub refresh {p.sub.name} --resync public.t --adopt")
        assert p.subdb.value("SELECT count(*) FROM t") == before - 1 and p.state("t") == "d"
    p.subdb.execute("TRUNCATE t")
    p.sync("t")
    p.apply()
    p.same("t")


def test_a_row_that_is_changed_here_while_the_copy_goes_on_is_not_deleted(
    broken: Callable[..., Pair], at: At, tmp_path: Path
) -> None:
    p = broken()
    p.pubdb.execute("DELETE FROM t WHERE id IN (4, 6)")
    at(f"resume.compared=pause:{tmp_path / 'go on'}")
    syncing = p.submit("sync", lambda name: p.sync(name), ["t"])
    until(lambda: syncing.done() or failpoints._counts.get("resume.compared", 0) > 0)
    p.subdb.execute("UPDATE t SET v = 'mine' WHERE id = 4")
    (tmp_path / "go on").touch()
    with pytest.raises(ApplyError, match="could not continue"):
        syncing.result()
    assert p.subdb.rows("SELECT id, v = 'mine' FROM t WHERE id IN (4, 6) ORDER BY id") == [(4, True), (6, False)]


def test_addresses_of_a_table_that_was_rewritten_meanwhile_are_not_used(
    broken: Callable[..., Pair], at: At, tmp_path: Path
) -> None:
    p = broken()
    p.pubdb.execute("DELETE FROM t WHERE id IN (4, 6)")
    p.subdb.execute("INSERT INTO t VALUES (-1, 'mine'); DELETE FROM t WHERE id = -1")
    at(f"resume.compared=pause:{tmp_path / 'go on'}")
    syncing = p.submit("sync", lambda name: p.sync(name), ["t"])
    until(lambda: syncing.done() or failpoints._counts.get("resume.compared", 0) > 0)
    p.subdb.execute("CLUSTER t USING t_pkey")
    (tmp_path / "go on").touch()
    with pytest.raises(TableRewritten):
        syncing.result()
    at("")
    _ends_well(p)


def test_only_one_session_mends_what_a_copy_has_brought(broken: Callable[..., Pair]) -> None:
    p = broken()
    p.pubdb.execute("DELETE FROM t WHERE id = 4")
    with repaired_elsewhere(p, "t"):
        with pytest.raises(TargetUnavailable, match="locked by a session"):
            p.sync("t")
        assert p.subdb.value("SELECT count(*) FROM t WHERE id = 4") == 1
    _ends_well(p)


_PARTS = "PARTITION OF t FOR VALUES WITH (MODULUS 3, REMAINDER"
_ROOT = (
    "CREATE TABLE t (id int, v text, PRIMARY KEY (id)) PARTITION BY HASH (id);"
    f"CREATE TABLE t0 {_PARTS} 0); CREATE TABLE t1 {_PARTS} 1); CREATE TABLE t2 {_PARTS} 2)"
)
_VIA_ROOT = "; CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)"


@pytest.mark.parametrize("mine", [_ROOT, TABLE])
def test_partitions_that_changed_or_are_gone_are_no_longer_here(broken: Callable[..., Pair], pair: MakePair,
                                                                at: At, mine: str) -> None:  # fmt: skip
    p = pair(pub=f"{_ROOT}; {ROWS.replace('3000', '9000')}{_VIA_ROOT}", sub=mine, state="i", copy_workers=1)
    at("copy.before_commit=error@6")
    with pytest.raises(TargetUnavailable):
        p.sync("t")
    at("")
    p.pubdb.execute("ALTER TABLE t DETACH PARTITION t0; UPDATE t SET v = 'x' WHERE id < 5")
    p.pubdb.execute("ALTER TABLE t1 RENAME TO t1_; INSERT INTO t2 SELECT id, v || 'x' FROM t2 WHERE false")
    p.sync("t")
    assert "continues where" in _said(p)
    p.apply()
    p.same("t")


def test_a_row_filter_or_a_column_list_that_changed_counts(broken: Callable[..., Pair]) -> None:
    p = broken()
    p.pubdb.execute("DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLE t WHERE (id % 2 = 0)")
    p.sync("t")
    assert "0 parts of 2 as they were" in _said(p)
    p.same("(SELECT * FROM t WHERE id % 2 = 0)")
    assert p.subdb.value("SELECT count(*) FROM t WHERE id % 2 = 1") == 0


def test_rows_that_were_copied_with_other_columns_are_copied_again(broken: Callable[..., Pair]) -> None:
    p = broken("CREATE TABLE t (id int PRIMARY KEY, v text, w int DEFAULT 5)", "INSERT INTO t SELECT g, md5(g::text)"
               " FROM generate_series(1, 3000) g")  # fmt: skip
    kept = _kept(p)
    p.pubdb.execute("ALTER TABLE t DROP COLUMN w")
    p.sync("t")
    assert p.state("t") == "s" and not kept & _kept(p) and p.events() == []
    p.same("t", columns="id, v")


def test_what_may_not_be_read_is_removed_and_copied_again(broken: Callable[..., Pair]) -> None:
    p = broken()
    role, owner = f"writer_{p.subid}", p.sub.target
    p.subdb.execute(
        f"CREATE ROLE {role} LOGIN; GRANT ALL ON SCHEMA pgsub, public TO {role};"
        f"{ledger_privileges.grants(role)} GRANT ALL ON ALL SEQUENCES IN SCHEMA pgsub TO {role};"
        f"GRANT INSERT, DELETE ON t TO {role}; GRANT SELECT (v) ON t TO {role}"
    )
    try:
        claim, relation = p.take_over("t"), describe(p.session, "public", "t")
        assert relation is not None and cleanup.may_go_on(p.session, p.sub, claim, relation)
        with closing(connect(p.subdb.server.conninfo(p.subdb.name, role), SessionName(p.subid, "x", 1))) as session:
            assert not cleanup.may_go_on(session, p.sub, claim, relation)
    finally:
        p.set(target=owner)
        p.subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_rows_of_rules_or_of_before_parts_were_recorded_are_not_compared(broken: Callable[..., Pair]) -> None:
    p = broken()
    claim, relation = p.take_over("t"), describe(p.session, "public", "t")
    assert relation is not None and cleanup.may_go_on(p.session, p.sub, claim, relation)
    ruled = replace(p.sub, on_conflict=("insert_exists=keep_local",))
    assert not cleanup.may_go_on(p.session, ruled, claim, relation)
    p.subdb.execute("UPDATE pgsub.copy_chunk SET part = NULL WHERE chunk = 0")
    kept = _kept(p)
    p.sync("t")
    p.same("t")
    assert not kept & _kept(p)


def test_a_small_part_of_the_bytes_crosses_the_line_again(
    broken: Callable[..., Pair], proxy: Callable[[str], Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 400_000)
    p = broken(rows="INSERT INTO t SELECT g, md5(g::text) || md5(g::text) FROM generate_series(1, 60000) g", chunk=15)
    size = p.pubdb.value("SELECT sum(length(t::text)) FROM t")
    done = p.subdb.value("SELECT count(*) FROM t") / 60000
    assert done > 0.85
    p.pubdb.execute("UPDATE t SET v = 'x' WHERE id % 20000 = 3")
    line = proxy(p.sub.connection)
    allowed = line.allowance = 1 << 40
    p.set(connection=line.conninfo)
    p.sync("t")
    assert line.allowance is not None and (allowed - line.allowance) / size < 1 - done + 0.05
    assert "11 parts of 14 as they were, 3 rows removed" in _said(p)
    p.apply()
    p.same("t")


def test_a_row_of_the_publisher_is_never_taken_for_one_of_the_target_whatever_columns_it_sends() -> None:
    found = copied_parts.PartResult(copied_parts.Part(None, 0, 1, (), 1, 1))
    there, here = iter([("1", "(0,1)", "16384", "(0,2)")]), iter([("2", "7", "16384", "(0,3)")])
    copied_parts._take(found, copied_parts._alone(there, here))
    assert (found.missing, found.surplus) == (["(0,1)"], [(7, 16384, "(0,3)")])


def test_the_children_of_a_table_whose_interrupted_copy_is_removed_keep_their_rows(pair: MakePair, at: At) -> None:
    table = f"{TABLE}; CREATE TABLE c (PRIMARY KEY (id)) INHERITS (t)"
    p = pair(table, pub=f"{ROWS}; INSERT INTO c VALUES (10001, 'child')", state="i", copy_workers=1)
    at("copy.before_commit=error@3")
    with pytest.raises(TargetUnavailable):
        p.sync("t")
    p.set(copy_atomic=True)
    p.sync("c")
    p.subdb.execute("UPDATE ONLY t SET v = 'changed here' WHERE id IN (1, 2)")
    with pytest.raises(ApplyError, match="could not remove the rows") as caught:
        p.sync("t")
    p.subdb.execute(str(caught.value.hint).splitlines()[-1])
    p.sync("t")
    p.apply()
    assert p.subdb.value("SELECT count(*) FROM ONLY t") == 3000
    assert p.subdb.rows("SELECT * FROM ONLY c") == [(10001, "child")]
