"""Conflicts that have a rule are resolved by it, whatever way apply took at first; all others are the server's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from fix_pair import Pair
from fix_program import until
from fix_transaction_kinds import KINDS, TABLE

from pgsub.common import failpoints
from pgsub.common.errors import ApplyError, TargetUnavailable

HOWS = ("skip", "keep_local", "apply_remote", "last_update_wins")
ACTIONS = {"skip": "skipped", "keep_local": "kept", "apply_remote": "applied", "last_update_wins": "applied", "": ""}
_WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
_LETTERS = "SELECT relname, body FROM pgsub.skipped_change ORDER BY id"


@pytest.fixture
def make(pair_of_kind: Callable[..., Pair]) -> Callable[..., Pair]:
    """The same with rules."""

    def build(*rules: str, **options: Any) -> Pair:
        return pair_of_kind(on_conflict=rules, **options)

    return build


def transaction(kind: str, *statements: str) -> str:
    end = "PREPARE TRANSACTION 'x'" if "prepared" in kind else "COMMIT"
    return "; ".join(["BEGIN", *statements, end])


def conflicts(p: Pair) -> list[tuple[str, str]]:
    """Type and action of what waits for the launcher."""
    return [(body["conflict_type"], body["action"]) for body in p.events() if body["kind"] == "conflict"]


def letters(p: Pair) -> list[dict[str, Any]]:
    return [body for _, body in p.subdb.rows(_LETTERS)]


def rows(p: Pair, columns: str = "*", table: str = "t") -> list[tuple[Any, ...]]:
    return p.subdb.rows(f"SELECT {columns} FROM {table} ORDER BY 1")


def fails(p: Pair, *statements: str) -> ApplyError:
    with pytest.raises(ApplyError) as met:
        p.apply(*statements)
    return met.value


@pytest.mark.parametrize("beside", [0, 1, 300])
def test_a_row_that_a_rule_leaves_out_may_be_one_that_no_table_takes_however_many_come_with_it(make, beside):
    p = make("insert_exists=keep_local")
    p.subdb.execute("ALTER TABLE t ALTER v SET NOT NULL; INSERT INTO t VALUES (1, 10, 'mine')")
    others = f"INSERT INTO t SELECT i, i, 'theirs' FROM generate_series(100, {99 + beside}) i"
    p.apply(transaction("plain", others, "INSERT INTO t VALUES (1, 11, NULL)"))
    assert conflicts(p) == [("insert_exists", "kept")]
    assert (len(rows(p)), rows(p)[0]) == (beside + 1, (1, 10, "mine"))
    error = fails(
        p, transaction("plain", others.replace("i, i,", "i + 1000, i + 1000,"), "INSERT INTO t VALUES (2, 2, NULL)")
    )
    assert error.sqlstate == "23502" and len(rows(p)) == beside + 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_holds_in_every_kind_of_transaction(make, kind):
    p = make("insert_exists=apply_remote", "update_missing=skip", kind=kind)
    p.subdb.execute("INSERT INTO t VALUES (1, 10, 'mine')")
    statement = transaction(
        kind,
        "INSERT INTO t SELECT i, i, 'bulk' FROM generate_series(100, 260) i",
        "INSERT INTO t VALUES (1, 11, 'theirs')",
        "SAVEPOINT s",
        "INSERT INTO t VALUES (2, 2, 'two')",
        "RELEASE s",
        "UPDATE t SET v = 'again' WHERE id = 2",
    )
    p.apply(statement)
    if "prepared" in kind:
        assert rows(p) == [(1, 10, "mine")]
        p.apply("COMMIT PREPARED 'x'")
    p.same("t")
    assert conflicts(p) == [("insert_exists", "applied")]


def tables(kind: str, hows: Iterable[str]) -> tuple[str, list[str]]:
    """A table for each resolution, called by it, and the rules that say so."""
    ddl = "; ".join(TABLE.replace("TABLE t", f"TABLE {how}") for how in hows)
    return ddl, [f"public.{how}:{kind}={how}" for how in hows]


def told(p: Pair) -> dict[str, tuple[str, str]]:
    """Type and action by table."""
    return {body["relname"]: (body["conflict_type"], body["action"]) for body in p.events()}


def kept_of(p: Pair) -> list[str]:
    """Tables of which something is kept."""
    return [name for name, _ in p.subdb.rows(_LETTERS)]


def test_insert_exists_by_each_rule(make):
    ddl, rules = tables("insert_exists", HOWS)
    p = make(*rules, ddl=ddl)
    for how in HOWS:
        p.subdb.execute(f"INSERT INTO {how} VALUES (1, 1, 'mine')")
    p.apply(*(f"INSERT INTO {how} VALUES (1, 7, 'theirs'), (2, 2, 'other')" for how in HOWS))
    for how in HOWS:
        applied = ACTIONS[how] == "applied"
        assert rows(p, table=how) == [(1, 7, "theirs") if applied else (1, 1, "mine"), (2, 2, "other")], how
    assert told(p) == {how: ("insert_exists", ACTIONS[how]) for how in HOWS}
    for record in p.events():
        assert record["key"] == "(id)=(1)"
        assert record["local_conflicts"][0]["row"] == {"id": "1", "u": "1", "v": "mine"}
        assert record["detail"].endswith(f"by the rule insert_exists={record['relname']}.")
    assert kept_of(p) == ["skip"]
    assert letters(p)[0]["new"] == {"id": "1", "u": "7", "v": "theirs"}


def test_without_a_rule_for_its_type_a_conflict_stops_apply_as_ever(make):
    p = make("update_exists=keep_local")
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'mine')")
    error = fails(p, "INSERT INTO t VALUES (1, 7, 'theirs')")
    assert error.conflict == "insert_exists"
    assert rows(p) == [(1, 1, "mine")]


def test_a_rule_of_a_table_goes_before_that_of_the_subscription(make):
    p = make(
        "insert_exists=keep_local",
        "public.o:insert_exists=apply_remote",
        "public.e:insert_exists=error",
        ddl="; ".join(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)" for name in "toe"),
    )
    for name in "toe":
        p.subdb.execute(f"INSERT INTO {name} VALUES (1, 'mine')")
    p.apply("INSERT INTO t VALUES (1, 'theirs')", "INSERT INTO o VALUES (1, 'theirs')")
    assert (rows(p), rows(p, table="o")) == ([(1, "mine")], [(1, "theirs")])
    assert fails(p, "INSERT INTO e VALUES (1, 'theirs')").relation == "public.e"


def test_an_identical_row_passes_by_its_own_rule_and_another_one_does_not(make):
    p = make("identical=keep_local")
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'same'), (2, 2, 'mine')")
    p.apply("INSERT INTO t VALUES (1, 1, 'same')")
    [record] = p.events()
    assert (record["conflict_type"], record["action"]) == ("multiple_unique_conflicts", "kept")
    assert record["identical"] is True
    assert fails(p, "INSERT INTO t VALUES (2, 2, 'theirs')").conflict == "multiple_unique_conflicts"


def test_an_identical_row_can_stop_apply_where_others_give_way(make):
    p = make("insert_exists=apply_remote", "identical=error", ddl="CREATE TABLE t (id int PRIMARY KEY, v text)")
    p.subdb.execute("INSERT INTO t VALUES (1, 'same'), (2, 'mine')")
    p.apply("INSERT INTO t VALUES (2, 'theirs')")
    assert rows(p) == [(1, "same"), (2, "theirs")]
    assert fails(p, "INSERT INTO t VALUES (1, 'same')").conflict == "insert_exists"


def test_a_row_that_becomes_the_remote_one_keeps_what_only_the_target_has(make):
    p = make("insert_exists=apply_remote", ddl=TABLE, sub="ALTER TABLE t ADD note text DEFAULT 'default'")
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'mine', 'precious')")
    p.apply("INSERT INTO t VALUES (1, 2, 'theirs')")
    assert rows(p) == [(1, 2, "theirs", "precious")]


@pytest.mark.parametrize(("column", "mine", "theirs"), [("numeric", "1.0", "1.00"), ("float8", "0", "-0")])
def test_a_row_whose_key_has_another_text_becomes_the_remote_one(make, column, mine, theirs):
    p = make(
        "insert_exists=apply_remote",
        ddl=f"CREATE TABLE t (k {column} PRIMARY KEY, v text)",
        sub="ALTER TABLE t ADD note text",
    )
    p.subdb.execute(f"INSERT INTO t VALUES ('{mine}', 'mine', 'precious')")
    p.apply(f"INSERT INTO t VALUES ('{theirs}', 'theirs')")
    assert p.subdb.rows("SELECT k::text, v, note FROM t") == [(theirs, "theirs", "precious")]


def test_all_rows_in_the_way_give_way_to_the_remote_one(make):
    p = make("multiple_unique_conflicts=apply_remote")
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'key'), (2, 2, 'other')")
    p.apply("INSERT INTO t VALUES (1, 2, 'theirs')")
    assert rows(p) == [(1, 2, "theirs")]
    [record] = p.events()
    assert (record["conflict_type"], record["action"]) == ("multiple_unique_conflicts", "applied")
    assert [one["row"]["v"] for one in record["local_conflicts"]] == ["key", "other"]


def test_a_row_of_another_key_goes_where_an_insert_meets_it(make):
    p = make("insert_exists=apply_remote")
    p.subdb.execute("INSERT INTO t VALUES (7, 2, 'mine')")
    p.apply("INSERT INTO t VALUES (1, 2, 'theirs')")
    assert rows(p) == [(1, 2, "theirs")]


def test_update_exists_by_each_rule(make):
    ddl, rules = tables("update_exists", HOWS)
    p = make(*rules, ddl=ddl)
    p.apply(*(f"INSERT INTO {how} VALUES (1, 1, 'first')" for how in HOWS))
    for how in HOWS:
        p.subdb.execute(f"INSERT INTO {how} VALUES (2, 2, 'mine')")
    p.apply(*(f"UPDATE {how} SET u = 2, v = 'theirs' WHERE id = 1" for how in HOWS))
    for how in HOWS:
        as_it_was = [(1, 1, "first"), (2, 2, "mine")]
        assert rows(p, table=how) == ([(1, 2, "theirs")] if ACTIONS[how] == "applied" else as_it_was), how
    assert told(p) == {how: ("update_exists", ACTIONS[how]) for how in HOWS}
    assert kept_of(p) == ["skip"]


def test_update_missing_and_delete_missing_by_each_rule(make):
    hows = ("error", "skip", "apply_remote")
    ddl, rules = tables("update_missing", hows)
    p = make(*rules, "public.skip:delete_missing=skip", "public.error:delete_missing=error", ddl=ddl)
    p.apply(*(f"INSERT INTO {how} VALUES (1, 1, 'first'), (2, 2, 'there')" for how in hows))
    for how in hows:
        p.subdb.execute(f"DELETE FROM {how} WHERE id = 1")
    p.apply(*(f"UPDATE {how} SET v = 'new'" for how in ("skip", "apply_remote")))
    assert rows(p, table="skip") == [(2, 2, "new")]
    p.same("apply_remote")
    p.apply("DELETE FROM skip")
    assert [(one["operation"], one["conflict"]) for one in letters(p)] == [
        ("UPDATE", "update_missing"),
        ("DELETE", "delete_missing"),
    ]
    for statement, kind in (("UPDATE error SET v = 'x'", "update_missing"), ("DELETE FROM error", "delete_missing")):
        error = fails(p, statement)
        assert (error.conflict, error.relation) == (kind, "public.error")
        assert error.context is not None and "in transaction" in error.context
        assert rows(p, table="error")[0][0] == 2
        p.set(on_conflict=("public.error:delete_missing=error",))
    assert conflicts(p) == [
        ("update_missing", "skipped"),
        ("update_missing", "applied"),
        ("delete_missing", "skipped"),
        ("update_missing", ""),
    ]


def test_an_update_whose_large_value_was_not_sent_is_not_inserted_by_halves(make):
    p = make("update_missing=apply_remote", ddl="CREATE TABLE t (id int PRIMARY KEY, n int, v text)")
    p.ddl("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    p.apply("INSERT INTO t VALUES (1, 1, repeat('x', 5000))")
    p.subdb.execute("DELETE FROM t")
    error = fails(p, "UPDATE t SET n = 2")
    assert error.conflict == "update_missing"
    assert "unchanged large values of v" in (error.detail or "")
    assert rows(p) == []


def test_an_insert_of_a_missing_row_obeys_the_rules_of_inserts(make):
    p = make("update_missing=apply_remote", "insert_exists=keep_local")
    p.apply("INSERT INTO t VALUES (1, 1, 'first')")
    p.subdb.execute("DELETE FROM t; INSERT INTO t VALUES (9, 1, 'mine')")
    p.apply("UPDATE t SET v = 'x'")
    assert rows(p) == [(9, 1, "mine")]
    assert conflicts(p) == [("insert_exists", "kept"), ("update_missing", "kept")]


@pytest.mark.parametrize("verb", ["update", "delete"])
def test_what_somebody_else_wrote_by_each_rule(make, verb):
    hows = ("skip", "keep_local", "last_update_wins", "error")
    ddl, rules = tables(f"{verb}_origin_differs", hows)
    p = make(*rules, ddl=ddl)
    p.apply(*(f"INSERT INTO {how} VALUES (1, 1, 'first')" for how in hows))
    for how in hows:
        p.subdb.execute(f"UPDATE {how} SET v = 'mine'")
    change = "UPDATE {} SET v = 'theirs'" if verb == "update" else "DELETE FROM {}"
    p.apply(*(change.format(how) for how in hows[:3]))
    p.same("last_update_wins")
    assert rows(p, table="skip") == rows(p, table="keep_local") == [(1, 1, "mine")]
    assert told(p) == {how: (f"{verb}_origin_differs", ACTIONS[how]) for how in hows[:3]}
    assert kept_of(p) == ["skip"]
    assert fails(p, change.format("error")).conflict == f"{verb}_origin_differs"
    assert rows(p, table="error") == [(1, 1, "mine")]


def test_the_newer_of_two_changes_wins_on_the_target_too(make):
    p = make("update_origin_differs=last_update_wins", "insert_exists=last_update_wins")
    p.apply("INSERT INTO t VALUES (1, 1, 'first'), (2, 2, 'first')")
    p.pubdb.execute("UPDATE t SET v = 'older'")
    p.pubdb.execute("INSERT INTO t VALUES (3, 3, 'older')")
    p.subdb.execute("UPDATE t SET v = 'newer' WHERE id = 1; INSERT INTO t VALUES (3, 30, 'newer')")
    p.apply()
    assert rows(p) == [(1, 1, "newer"), (2, 2, "older"), (3, 30, "newer")]
    assert sorted(conflicts(p)) == [("insert_exists", "kept"), ("update_origin_differs", "kept")]


def test_rules_hold_in_a_batch_that_went_as_sets_at_first(make):
    p = make("insert_exists=apply_remote", "delete_missing=skip", "update_missing=apply_remote")
    p.apply("INSERT INTO t SELECT i, i, 'old' FROM generate_series(1, 600) i")
    p.subdb.execute("DELETE FROM t WHERE id % 100 = 0; INSERT INTO t VALUES (1001, -1, 'mine')")
    p.apply(
        "UPDATE t SET v = 'new' WHERE id > 250",
        "DELETE FROM t WHERE id <= 250",
        "INSERT INTO t SELECT i, i, 'more' FROM generate_series(1000, 1400) i",
    )
    p.same("t")
    assert sorted(conflicts(p)) == [
        ("delete_missing", "skipped"),
        ("delete_missing", "skipped"),
        ("insert_exists", "applied"),
        *[("update_missing", "applied")] * 4,
    ]


def test_a_collision_that_the_same_batch_takes_back_meets_its_rule_however_many_changes_wait(make):
    p = make("insert_exists=apply_remote")
    p.subdb.execute("INSERT INTO t VALUES (7, 2, 'mine')")
    p.apply(
        "INSERT INTO t SELECT i, i, 'bulk' FROM generate_series(100, 200) i",
        "INSERT INTO t VALUES (1, 2, 'theirs')",
        "UPDATE t SET u = 3 WHERE id = 1",
    )
    p.same("t")
    assert conflicts(p) == [("insert_exists", "applied")]


def test_a_partitioned_table_obeys_its_rules_in_its_partitions(make):
    ddl = (
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        " CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10);"
        " CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)"
    )
    p = make(
        "insert_exists=apply_remote",
        "update_missing=apply_remote",
        ddl=ddl,
        pub="CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
    )
    p.subdb.execute("INSERT INTO t VALUES (1, 'mine'), (11, 'mine')")
    p.apply("INSERT INTO t VALUES (1, 'theirs'), (2, 'x')", "INSERT INTO t VALUES (11, 'theirs')")
    p.subdb.execute("DELETE FROM t WHERE id = 2")
    p.apply("UPDATE t SET v = 'again'")
    p.same("t")
    events = [(one["conflict_type"], one["relname"]) for one in p.events()]
    assert events == [("insert_exists", "t1"), ("insert_exists", "t2"), ("update_missing", "t1")]


def test_what_is_no_conflict_stops_apply_in_spite_of_every_rule(make):
    p = make(
        "insert_exists=keep_local", "multiple_unique_conflicts=keep_local", sub="ALTER TABLE t ADD CHECK (u < 100)"
    )
    error = fails(p, "INSERT INTO t VALUES (1, 1, 'x'), (2, 200, 'x')")
    assert (error.conflict, error.sqlstate) == (None, "23514")
    assert rows(p) == []


@pytest.mark.usefixtures("untracked")
def test_a_rule_that_needs_times_says_so_where_the_target_does_not_know_them(make):
    p = make("update_origin_differs=last_update_wins")
    error = fails(p, "INSERT INTO t VALUES (1, 1, 'x')")
    assert "needs track_commit_timestamp" in error.message
    assert rows(p) == []


def test_a_tie_is_decided_by_what_the_databases_are_called(make, monkeypatch):
    from pgsub.apply.resolve import winner

    asked: list[tuple[tuple[str, str], tuple[str, str]]] = []

    def same_time(how: str, at: int, local: Any, subid: int, tie: Callable[[], winner.Action]) -> Any:
        return tie()

    def tied(remote: tuple[str, str], local: tuple[str, str]) -> winner.Action:
        asked.append((remote, local))
        return winner.Action.KEEP

    monkeypatch.setattr(winner, "evaluate", same_time)
    monkeypatch.setattr(winner, "tied", tied)
    p = make("insert_exists=last_update_wins")
    p.subdb.execute("INSERT INTO t VALUES (1, 10, 'mine')")
    p.apply("INSERT INTO t VALUES (1, 11, 'theirs')")
    system = "SELECT system_identifier::text, current_database()::text FROM pg_control_system()"
    assert asked == [(p.pubdb.rows(system)[0], p.subdb.rows(system)[0])]
    assert rows(p) == [(1, 10, "mine")]


def test_an_exclusion_constraint_which_is_no_conflict_of_the_servers_stops_apply_in_spite_of_rules(make):
    ddl = "CREATE TABLE t (id int PRIMARY KEY, u int, v text)"
    p = make("insert_exists=apply_remote", ddl=ddl, sub="ALTER TABLE t ADD EXCLUDE USING btree (u WITH =)")
    p.subdb.execute("INSERT INTO t VALUES (1, 1, 'mine')")
    error = fails(p, "INSERT INTO t VALUES (2, 1, 'theirs')")
    assert (error.conflict, error.sqlstate) == (None, "23P01")
    assert rows(p) == [(1, 1, "mine")]


def test_a_row_that_a_trigger_writes_elsewhere_is_no_conflict_of_the_table_with_the_rule(make):
    p = make(
        "public.t:insert_exists=apply_remote",
        sub="CREATE TABLE log (id int PRIMARY KEY); INSERT INTO log VALUES (1);"
        " CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN INSERT INTO public.log VALUES (NEW.id); RETURN NEW; END';"
        " CREATE TRIGGER g AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION f(); ALTER TABLE t ENABLE ALWAYS TRIGGER g",
        pub="CREATE PUBLICATION p FOR TABLE t",
    )
    error = fails(p, "INSERT INTO t VALUES (1, 1, 'theirs')")
    assert error.sqlstate == "23505"
    assert p.subdb.rows("SELECT * FROM log") == [(1,)]


def test_what_a_rule_skipped_can_be_replayed_once_nothing_is_in_its_way(make):
    from pgsub.apply.skip.replay import ReplayRequest, replay
    from pgsub.target.ledger import skipped_changes

    p = make("insert_exists=skip")
    p.subdb.execute("INSERT INTO t VALUES (1, 10, 'mine')")
    p.apply("INSERT INTO t VALUES (1, 11, 'theirs')")
    [record] = p.events()
    lsn = p.subdb.value("SELECT finish_lsn - '0/0'::pg_lsn FROM pgsub.skipped_change")
    ids = skipped_changes.by_ref(p.session, p.subid, int(lsn), record["skipped_ref"])
    kept = skipped_changes.of_transaction(p.session, p.subid, int(lsn), ids=ids)
    assert kept is not None and kept.ids == ids
    order = ReplayRequest(int(lsn), kept, {})
    with pytest.raises(ApplyError):
        replay(p.sub, order)  # a rule would skip it again, and nobody would know
    assert len(letters(p)) == 1
    p.subdb.execute("DELETE FROM t")
    replay(p.sub, order)
    p.same("t")


def test_a_row_that_others_change_between_the_look_and_the_lock_is_looked_at_again(make, monkeypatch):
    from pgsub.apply.resolve.conflicting_rows import ConflictingRows

    p = make("insert_exists=apply_remote")
    p.subdb.execute("INSERT INTO t VALUES (1, 10, 'mine')")
    cleared, meanwhile = ConflictingRows.cleared, ["UPDATE t SET v = 'newer'", "UPDATE t SET u = 20"]

    def interrupted(self: ConflictingRows, *arguments: Any) -> bool:
        if meanwhile:
            p.subdb.execute(meanwhile.pop(0))
        return cleared(self, *arguments)

    monkeypatch.setattr(ConflictingRows, "cleared", interrupted)
    p.apply("INSERT INTO t VALUES (1, 11, 'theirs')")
    assert meanwhile == []
    assert rows(p) == [(1, 11, "theirs")]
    [record] = p.events()
    assert record["local_conflicts"][0]["row"] == {"id": "1", "u": "20", "v": "newer"}


def test_a_row_that_stays_may_be_deleted_by_a_local_transaction_which_counts_as_the_later_one(make):
    p = make("insert_exists=keep_local")
    p.subdb.execute("INSERT INTO t VALUES (1, 10, 'mine'), (2, 20, 'mine')")
    with p.subdb.connect() as other:
        other.execute("BEGIN; DELETE FROM t WHERE id = 2")
        p.apply("INSERT INTO t VALUES (1, 11, 'theirs'), (2, 21, 'theirs'), (3, 3, 'theirs')")
        other.execute("COMMIT")
    assert rows(p) == [(1, 10, "mine"), (3, 3, "theirs")]
    assert conflicts(p) == [("insert_exists", "kept")] * 2


def test_rows_that_others_change_again_and_again_are_a_reason_to_try_again_and_no_conflict(make, monkeypatch):
    from pgsub.apply.resolve.conflicting_rows import ConflictingRows

    parts = (
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); CREATE TABLE t1 PARTITION OF t DEFAULT"
    )
    p = make("insert_exists=apply_remote", ddl="", pub="CREATE TABLE t (id int PRIMARY KEY, v text)", sub=parts)
    p.subdb.execute("INSERT INTO t VALUES (1, 'mine')")
    cleared = ConflictingRows.cleared

    def interrupted(self: ConflictingRows, *arguments: Any) -> bool:
        p.subdb.execute("UPDATE t SET v = v || '.'")
        return cleared(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ConflictingRows, "cleared", interrupted)
        with pytest.raises(TargetUnavailable, match="changed by others again and again"):
            p.apply("INSERT INTO t VALUES (1, 'theirs')")
    p.apply()
    p.same("t")


@pytest.mark.parametrize("waits", [False, True], ids=["committed", "waited for"])
def test_a_row_that_a_local_transaction_changes_after_its_conflict_was_decided_is_decided_again(
    make, at, tmp_path, waits
):
    p, gate = make("multiple_unique_conflicts=last_update_wins"), tmp_path / "gate"
    p.apply("INSERT INTO t VALUES (5, 5, 'both')")
    p.subdb.execute("INSERT INTO t VALUES (1, 10, 'mine'), (2, 11, 'mine')")
    at(f"apply.conflict_decided=pause:{gate}")
    p.pubdb.execute("UPDATE t SET id = 1, u = 11")  # later than the rows, and earlier than the update of one of them
    with p.subdb.connect() as other:
        task = p.start()
        until(lambda: failpoints._counts.get("apply.conflict_decided"))
        other.execute("BEGIN; UPDATE t SET v = 'newer' WHERE id = 2")
        if waits:
            gate.touch()
            p.until(_WAITS, value=1, task=task)
        other.execute("COMMIT")
    gate.touch()
    p.pubdb.execute("INSERT INTO t VALUES (99, 99, 'later')")
    p.until("SELECT count(*) FROM t WHERE id = 99", value=1, task=task)
    p.stop(task)
    assert rows(p) == [(1, 10, "mine"), (2, 11, "newer"), (5, 5, "both"), (99, 99, "later")]
    [record] = p.events()
    assert (record["action"], {one["row"]["v"] for one in record["local_conflicts"]}) == ("kept", {"mine", "newer"})


def test_the_rules_of_a_row_hold_whatever_surrounds_it_in_its_transaction(make):
    p = make("insert_exists=keep_local", "delete_missing=skip")
    p.subdb.execute("INSERT INTO t VALUES (1, 10, 'mine')")
    p.apply(
        "BEGIN; INSERT INTO t VALUES (2, 2, 'x'); INSERT INTO t VALUES (1, 1, 'theirs'); TRUNCATE t;"
        " INSERT INTO t VALUES (1, 5, 'after'); UPDATE t SET id = 3; DELETE FROM t; INSERT INTO t VALUES (9, 9, 'end');"
        " COMMIT"
    )
    p.same("t")
    assert conflicts(p) == [("insert_exists", "kept")]


def test_a_percent_sign_in_a_name_is_no_placeholder_and_leads_to_no_other_table(make):
    ddl = "; ".join(f'CREATE TABLE "{name}" (id int PRIMARY KEY, u int UNIQUE)' for name in ("t%x", "t%s", "t%", "t%%"))
    p = make("insert_exists=apply_remote", "update_exists=apply_remote", ddl=ddl)
    p.pubdb.execute('INSERT INTO "t%x" VALUES (9, 9)')
    for name in ("t%x", "t%s", "t%", "t%%"):
        p.subdb.execute(f'INSERT INTO "{name}" VALUES (1, 7), (2, 8), (3, 6)')
    for name in ("t%x", "t%s", "t%%"):
        # the row in the way has another key, the same key, and the value that an update brings
        p.apply(f'INSERT INTO "{name}" VALUES (4, 7), (2, 5)', f'UPDATE "{name}" SET u = 6 WHERE id = 4')
        p.same(f'"{name}"')
    assert rows(p, table='"t%"') == [(1, 7), (2, 8), (3, 6)]
