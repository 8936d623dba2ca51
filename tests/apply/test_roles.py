"""As whom changes are made: run_as_owner, what a role may not do, row-level security.

Mirrors t/033_run_as_table_owner.pl and t/027_nosuperuser.pl.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import patience
import pytest
from fix_pair import MakePair, Pair
from fix_servers import Database

from pgsub.apply.worker.committer import Committer
from pgsub.common.errors import ApplyError, Directive, PermissionMissing
from pgsub.protocol.messages import Relation
from pgsub.tablesync.copy import plan

TABLES = "CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY, v text)"
#: What the tables' own code writes down: who runs it.
WHO = """
CREATE TABLE who (tab text, role text, session text);
CREATE FUNCTION who() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
INSERT INTO public.who VALUES (tg_table_name || ' ' || tg_op, current_user, session_user); RETURN new; END $$;
GRANT INSERT ON who TO PUBLIC;
"""


class Roles:
    """Owners of the tables a and b, and a role that applies; none of them a superuser."""

    def __init__(self, subdb: Database) -> None:
        self.subdb = subdb
        self.alice, self.bob, self.app = (f"{name}_{subdb.name}" for name in ("alice", "bob", "app"))
        subdb.execute(
            f"CREATE ROLE {self.alice}; CREATE ROLE {self.bob}; CREATE ROLE {self.app} LOGIN;"
            f"GRANT CREATE ON DATABASE {subdb.name} TO {self.app}; GRANT USAGE ON SCHEMA public TO PUBLIC;"
            f"GRANT SET ON PARAMETER session_replication_role TO {self.app}"
        )

    def own(self) -> None:
        """Give them their tables, with triggers that say who fires them."""
        self.subdb.execute(f"{WHO}; ALTER TABLE a OWNER TO {self.alice}; ALTER TABLE b OWNER TO {self.bob}")
        for table in "ab":
            self.subdb.execute(
                f"CREATE TRIGGER who AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION who();"
                f"CREATE TRIGGER empty AFTER TRUNCATE ON {table} EXECUTE FUNCTION who();"
                f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER who; ALTER TABLE {table} ENABLE ALWAYS TRIGGER empty"
            )

    def who(self) -> set[tuple[str, str]]:
        """Which role did what to which table since the last time."""
        found = self.subdb.rows("SELECT DISTINCT tab, role FROM who")
        self.subdb.execute("TRUNCATE who")
        return {(tab, role) for tab, role in found}

    def drop(self) -> None:
        """Remove the roles with all that they own."""
        for role in (self.app, self.alice, self.bob):
            self.subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.fixture
def roles(subdb: Database) -> Iterator[Roles]:
    """Three roles of the target's cluster."""
    made = Roles(subdb)
    yield made
    made.drop()


def _as_app(p: Pair, roles: Roles) -> None:
    p.subdb.execute(
        f"GRANT USAGE ON SCHEMA pgsub TO {roles.app};"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgsub TO {roles.app};"
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA pgsub TO {roles.app}"
    )
    p.set(target=p.subdb.server.conninfo(p.subdb.name, roles.app))


def _fault(p: Pair, words: str) -> PermissionMissing:
    with pytest.raises(PermissionMissing, match=words) as caught:
        p.catch_up()
    assert caught.value.directive is Directive.FAULT
    return caught.value


CHANGES = (
    "INSERT INTO a VALUES (1, 'x'), (2, 'x'); INSERT INTO b VALUES (1, 'x'); INSERT INTO a VALUES (3, 'x')",
    "INSERT INTO a SELECT g, 'copy' FROM generate_series(10, 99) g; UPDATE b SET v = 'y'; UPDATE a SET v = 'z'",
    "DELETE FROM b; DELETE FROM a WHERE id = 1",
)


@pytest.mark.long
@pytest.mark.parametrize("user", ["superuser", "member"])
def test_changes_are_made_as_the_owner_of_each_table(pair: MakePair, roles: Roles, user: str) -> None:
    p = pair(TABLES)
    roles.own()
    if user == "member":
        p.subdb.execute(f"GRANT {roles.alice}, {roles.bob} TO {roles.app} WITH INHERIT FALSE, SET TRUE")
        _as_app(p, roles)
    p.apply(*CHANGES)
    p.same("a", "b")
    operations = ("INSERT", "UPDATE", "DELETE")
    assert roles.who() == {(f"{t} {op}", o) for t, o in (("a", roles.alice), ("b", roles.bob)) for op in operations}
    # the ledger was written by the session's own role in between, missing rows too
    p.subdb.execute("DELETE FROM a WHERE id = 2")
    p.apply("UPDATE a SET v = 'missing' WHERE id = 2; INSERT INTO b VALUES (7, 'x')")
    assert [event["conflict_type"] for event in p.events()] == ["update_missing"]


@pytest.mark.parametrize("streaming", ["on", "parallel"])
def test_subtransactions_that_were_rolled_back_do_not_confuse_roles(
    pair: MakePair, roles: Roles, streaming: str
) -> None:
    p = pair(TABLES, streaming=streaming)
    roles.own()
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET debug_logical_replication_streaming = immediate")
    task = p.start()
    with p.pubdb.connect() as session:
        session.execute("BEGIN")
        for number in range(3):
            session.execute(f"INSERT INTO a VALUES ({number}, 'x')".encode())
            session.execute("SAVEPOINT s")
            session.execute(f"INSERT INTO b VALUES ({number}, 'y')".encode())
            if number == 1:
                session.execute("ROLLBACK TO s")
            session.execute(f"UPDATE a SET v = 'z' WHERE id = {number}".encode())
        p.pubdb.execute("SELECT pg_logical_emit_message(true, '', '')")  # half a page of WAL waits for a commit
        if streaming == "parallel":  # one session holds what was streamed so far, the other waits
            p.until(
                "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name LIKE %s AND backend_xid IS NOT NULL",
                f"pgsub {p.subid} apply %",
                task=task,
            )
        session.execute("COMMIT")
    p.until("SELECT count(*) = 2 FROM b", task=task)
    p.stop(task)
    p.same("a", "b")
    assert p.pubdb.value("SELECT stream_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = %s", p.sub.slot_name)
    assert roles.who() == {("a INSERT", roles.alice), ("a UPDATE", roles.alice), ("b INSERT", roles.bob)}


def test_run_as_owner_means_the_user_of_the_target(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES, run_as_owner=True)
    roles.own()
    p.apply(*CHANGES, "TRUNCATE a")
    assert {role for _, role in roles.who()} == {"postgres"}
    p.subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON a, b TO {roles.app}")
    p.subdb.execute(f"GRANT {roles.alice}, {roles.bob} TO {roles.app} WITH INHERIT FALSE, SET FALSE")
    _as_app(p, roles)  # a member that may not SET ROLE need not
    p.apply("INSERT INTO a VALUES (500, 'x'); INSERT INTO b VALUES (500, 'x')")
    assert {role for _, role in roles.who()} == {roles.app}
    p.same("a", "b")


def test_truncate_is_the_users_own_and_takes_several_owners_tables_at_once(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES)
    roles.own()
    p.apply(*CHANGES)
    p.subdb.execute(f"GRANT {roles.alice}, {roles.bob} TO {roles.app} WITH INHERIT FALSE, SET TRUE")
    _as_app(p, roles)
    p.pubdb.execute("INSERT INTO a VALUES (600, 'x'); TRUNCATE a, b; INSERT INTO b VALUES (1, 'after')")
    _fault(p, "permission denied for table a")
    p.subdb.execute(f"GRANT TRUNCATE ON a, b TO {roles.app}")
    roles.who()
    p.apply()
    p.same("a", "b")
    assert roles.who() == {("a INSERT", roles.alice), ("b INSERT", roles.bob)} | {
        (f"{table} TRUNCATE", roles.app) for table in "ab"
    }


def test_a_member_that_may_not_set_role_is_refused_in_the_servers_words(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES)
    roles.own()
    p.subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON a, b TO {roles.app}")  # would suffice
    p.subdb.execute(f"GRANT {roles.alice} TO {roles.app} WITH INHERIT TRUE, SET FALSE")
    _as_app(p, roles)
    p.pubdb.execute("INSERT INTO b VALUES (1, 'before')")
    p.pubdb.execute("INSERT INTO a VALUES (1, 'x')")
    error = _fault(p, f'role "{roles.app}" cannot SET ROLE to "{roles.alice}"')
    assert error.sqlstate == "42501" and "finished at" in (error.context or "")
    hint = (error.hint or "").splitlines()
    assert hint[-1] == f"pgsub alter {p.sub.name} --run-as-owner"
    assert p.subdb.value("SELECT count(*) FROM a") == 0
    p.same("b")  # what its user may do by itself went on
    p.subdb.execute(hint[0].partition(": ")[2])
    p.apply()
    p.same("a")
    assert ("a INSERT", roles.alice) in roles.who()


def test_a_role_that_is_no_member_goes_on_as_itself_or_is_told_what_it_lacks(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES)
    roles.own()
    _as_app(p, roles)
    for change, owner, lacks in (
        ("INSERT INTO a VALUES (1, 'x')", roles.alice, 'INSERT on table "public.a"'),
        ("UPDATE a SET v = 'y'", roles.alice, 'SELECT, UPDATE on table "public.a"'),
        ("DELETE FROM a", roles.alice, 'DELETE on table "public.a"'),
        (CHANGES[0], roles.bob, 'INSERT on table "public.b"'),
    ):
        p.pubdb.execute(change)
        error = _fault(p, f'^role "{roles.app}" cannot SET ROLE to "{owner}"$')
        assert error.detail == f"Its own privileges do not suffice: it lacks {lacks}."
        assert error.sqlstate == "42501" and "finished at" in (error.context or "") and error.denied is None
        hint = (error.hint or "").splitlines()
        assert hint[0] == f'Run this on the target: GRANT "{owner}" TO "{roles.app}" WITH SET TRUE;'
        p.subdb.execute(hint[-1])
        p.apply()
    p.same("a", "b")
    assert {role for _, role in roles.who()} == {roles.app}


def test_who_wrote_a_row_is_told_also_if_its_owner_may_delete_but_not_lock_it(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES)
    p.subdb.execute(f"ALTER TABLE a OWNER TO {roles.alice}; REVOKE UPDATE ON a FROM {roles.alice}")
    p.apply("INSERT INTO a VALUES (1, 'x'), (2, 'x')")
    p.subdb.execute("UPDATE a SET v = 'local' WHERE id = 1")
    p.apply("DELETE FROM a")
    assert [event["conflict_type"] for event in p.events()] == ["delete_origin_differs"]
    p.same("a")


_WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


@pytest.mark.parametrize("returned", ["OLD", "NULL"], ids=["lets", "keeps"])
def test_a_role_that_may_delete_but_not_update_rows_deletes_those_that_came_while_it_waited(
    pair: MakePair, roles: Roles, returned: str
) -> None:
    p = pair(TABLES)
    _as_app(p, roles)
    p.subdb.execute(
        f"GRANT SELECT, INSERT, DELETE ON a TO {roles.app}; ALTER TABLE a OWNER TO {roles.alice};"
        f"CREATE TABLE fired (id int); GRANT INSERT ON fired TO {roles.app};"
        "CREATE FUNCTION old() RETURNS trigger LANGUAGE plpgsql AS"
        f" 'BEGIN INSERT INTO public.fired VALUES (OLD.id); RETURN {returned}; END';"
        "CREATE TRIGGER old BEFORE DELETE ON a FOR EACH ROW EXECUTE FUNCTION old();"
        "ALTER TABLE a ENABLE ALWAYS TRIGGER old"
    )
    p.apply("INSERT INTO a SELECT g, 'x' FROM generate_series(1, 4) g")
    with p.subdb.connect() as other:
        other.execute("BEGIN")
        other.execute("UPDATE a SET v = 'local' WHERE id = 1")
        if returned == "OLD":
            other.execute("DELETE FROM a WHERE id = 1; INSERT INTO a VALUES (1, 'local')")
        p.pubdb.execute("DELETE FROM a WHERE id < 3")
        task = p.start()
        p.until(_WAITS, value=1, task=task)
        other.execute("COMMIT")
    p.pubdb.execute("DELETE FROM a WHERE id = 3; INSERT INTO a VALUES (9, 'later')")
    p.until("SELECT count(*) FROM a WHERE id = 9", value=1, task=task)
    p.stop(task)
    kept = [1, 2, 3] if returned == "NULL" else []
    assert p.subdb.rows("SELECT id FROM a ORDER BY id") == [(key,) for key in (*kept, 4, 9)]
    by_others = [(1,)] if returned == "OLD" else []
    assert p.subdb.rows("SELECT id FROM fired ORDER BY id") == [*by_others, (1,), (2,), (3,)]
    assert "delete_missing" not in [event["conflict_type"] for event in p.events()]


def test_a_role_that_may_delete_but_not_update_rows_deletes_those_that_came_while_it_waited_once_more(
    pair: MakePair, roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TABLES)
    _as_app(p, roles)
    p.subdb.execute(
        f"GRANT SELECT, INSERT, DELETE ON a TO {roles.app}; ALTER TABLE a OWNER TO {roles.alice};"
        "CREATE FUNCTION old() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';"
        "CREATE TRIGGER old BEFORE DELETE ON a FOR EACH ROW EXECUTE FUNCTION old();"
        "ALTER TABLE a ENABLE ALWAYS TRIGGER old"
    )
    p.apply("INSERT INTO a VALUES (1, 'x'), (2, 'x')")
    replaces, again, back = (
        "BEGIN; DELETE FROM a WHERE id = 1; INSERT INTO a VALUES (1, 'local')",
        Event(),
        Committer._back_to,
    )
    with p.subdb.connect() as first, p.subdb.connect() as second:

        def replaced_again(committer: Committer, relations: dict[int, Relation]) -> bool:
            ended = back(committer, relations)
            if not again.is_set():
                second.execute(replaces.encode())
                again.set()
            return ended

        monkeypatch.setattr(Committer, "_back_to", replaced_again)
        first.execute(replaces.encode())
        p.pubdb.execute("DELETE FROM a WHERE id = 1")
        task = p.start()
        p.until(_WAITS, value=1, task=task)
        first.execute("COMMIT")
        assert again.wait(patience.SECONDS)
        p.until(_WAITS, value=1, task=task)
        second.execute("COMMIT")
    p.pubdb.execute("DELETE FROM a WHERE id = 2")
    p.until("SELECT count(*) FROM a WHERE id = 2", value=0, task=task)
    p.stop(task)
    assert p.subdb.rows("SELECT * FROM a") == []
    assert "delete_missing" not in [event["conflict_type"] for event in p.events()]


def test_code_of_a_table_that_may_not_do_something_is_not_taken_for_a_missing_membership(
    pair: MakePair, roles: Roles
) -> None:
    p = pair(TABLES)
    roles.own()
    _as_app(p, roles)
    p.subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON a TO {roles.app}; REVOKE INSERT ON who FROM PUBLIC")
    p.pubdb.execute("INSERT INTO a VALUES (1, 'x')")
    assert "permission denied for table who" in _fault(p, "permission denied for table who").message


def test_code_of_a_table_does_not_word_a_statement_to_paste(pair: MakePair) -> None:
    p = pair(TABLES)
    says = "RAISE EXCEPTION 'permission denied for table salary' USING ERRCODE = '42501', HINT = 'GRANT ALL TO me;'"
    p.subdb.execute(
        f"CREATE FUNCTION says() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {says}; END $$;"
        "CREATE TRIGGER says BEFORE INSERT ON a FOR EACH ROW EXECUTE FUNCTION says();"
        "ALTER TABLE a ENABLE ALWAYS TRIGGER says"
    )
    p.pubdb.execute("INSERT INTO a VALUES (1, 'x')")
    hint = _fault(p, "permission denied for table salary").hint or ""
    assert "function of the table's owner" in hint and "GRANT" not in hint and ";" not in hint


def test_a_schema_that_may_not_be_used_is_named(pair: MakePair, roles: Roles) -> None:
    p = pair("CREATE SCHEMA x; CREATE TABLE x.t (id int PRIMARY KEY)")
    p.subdb.execute(f"ALTER TABLE x.t OWNER TO {roles.alice}; GRANT SELECT ON x.t TO {roles.app}")
    _as_app(p, roles)
    p.pubdb.execute("INSERT INTO x.t VALUES (1)")
    error = _fault(p, "cannot SET ROLE")
    assert 'it lacks USAGE on schema "x" and INSERT on table "x.t".' in (error.detail or "")
    p.subdb.execute("\n".join((error.hint or "").splitlines()[-2:]))
    p.apply()
    p.same("x.t")


def test_a_membership_that_is_withdrawn_under_a_running_worker_is_noticed(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES)
    roles.own()
    p.subdb.execute(f"GRANT {roles.alice}, {roles.bob} TO {roles.app} WITH INHERIT FALSE, SET TRUE")
    _as_app(p, roles)
    task = p.start()
    p.pubdb.execute("INSERT INTO a VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM a", task=task)
    p.subdb.execute(f"GRANT {roles.alice} TO {roles.app} WITH SET FALSE")
    p.pubdb.execute("INSERT INTO a VALUES (2, 'x')")
    with pytest.raises(PermissionMissing, match="cannot SET ROLE"):
        task.result()


@pytest.mark.parametrize("run_as_owner", [False, True], ids=["owner", "user"])
def test_row_level_security_is_that_of_the_role_that_acts(pair: MakePair, roles: Roles, run_as_owner: bool) -> None:
    p = pair(TABLES, run_as_owner=run_as_owner)
    roles.own()
    p.subdb.execute(f"GRANT {roles.alice}, {roles.bob} TO {roles.app} WITH INHERIT FALSE, SET TRUE")
    p.subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON a, b TO {roles.app}")
    _as_app(p, roles)
    p.subdb.execute("ALTER TABLE a ENABLE ROW LEVEL SECURITY")  # an owner is exempt
    p.pubdb.execute("INSERT INTO a VALUES (1, 'x')")
    acting = roles.app if run_as_owner else roles.alice
    words = f'user "{acting}" cannot replicate into relation with row-level security enabled: "a"'
    if run_as_owner:
        assert _fault(p, words).sqlstate == "0A000"
    else:
        p.apply()
        p.same("a")
        p.subdb.execute("ALTER TABLE a FORCE ROW LEVEL SECURITY")
        p.pubdb.execute("UPDATE a SET v = 'y'")
        error = _fault(p, words)
        told = (error.hint or "").splitlines()[-1]
        assert told == 'ALTER TABLE "public"."a" NO FORCE ROW LEVEL SECURITY;'  # for this table, and no other
        p.subdb.execute(told)
        p.apply()
        p.subdb.execute("ALTER TABLE a FORCE ROW LEVEL SECURITY")
        p.pubdb.execute("UPDATE a SET v = 'z'")
    p.subdb.execute(f"ALTER ROLE {acting} BYPASSRLS")
    p.apply()
    p.same("a")


def test_forced_row_level_security_under_a_running_worker_never_filters(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES)
    roles.own()
    task = p.start()
    p.pubdb.execute("INSERT INTO a VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM a", task=task)
    p.subdb.execute("ALTER TABLE a ENABLE ROW LEVEL SECURITY; ALTER TABLE a FORCE ROW LEVEL SECURITY")
    p.pubdb.execute("UPDATE a SET v = 'y'")
    with pytest.raises(PermissionMissing, match="cannot replicate into relation with row-level security"):
        task.result()
    assert p.events() == []  # the row was not taken for missing


@pytest.mark.parametrize("mode", ["atomic", "chunked"])
def test_a_copy_is_made_as_the_owner_too(
    pair: MakePair, roles: Roles, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 40_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 40_000 if mode == "chunked" else 1 << 30)
    rows = "INSERT INTO a SELECT g, md5(g::text) FROM generate_series(1, 3000) g; INSERT INTO b VALUES (1, 'x')"
    p = pair(TABLES, pub=rows, state="i")
    roles.own()
    p.subdb.execute(f"GRANT {roles.alice}, {roles.bob} TO {roles.app} WITH INHERIT FALSE, SET TRUE")
    if mode == "chunked":
        p.subdb.execute("DROP TRIGGER who ON a; DROP TRIGGER empty ON a")  # triggers mean one transaction
    _as_app(p, roles)
    p.sync("a")
    p.sync("b")
    assert p.subdb.value("SELECT DISTINCT copy_mode FROM pgsub.subscription_rel WHERE relname = 'a'") == mode
    p.apply("UPDATE a SET v = 'y' WHERE id = 1")
    p.same("a", "b")
    inserted = {("b INSERT", roles.bob)} | ({("a INSERT", roles.alice)} if mode == "atomic" else set())
    assert inserted <= roles.who()


def test_a_copy_is_refused_where_apply_would_be(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES, pub="INSERT INTO a VALUES (1, 'x')", state="i")
    roles.own()
    p.subdb.execute(f"GRANT {roles.alice} TO {roles.app} WITH INHERIT TRUE, SET FALSE")
    _as_app(p, roles)
    with pytest.raises(PermissionMissing, match=f'cannot SET ROLE to "{roles.alice}"'):
        p.sync("a")
    p.subdb.execute(f"GRANT {roles.alice} TO {roles.app} WITH SET TRUE")
    p.subdb.execute("ALTER TABLE a ENABLE ROW LEVEL SECURITY; ALTER TABLE a FORCE ROW LEVEL SECURITY")
    with pytest.raises(PermissionMissing, match=f'user "{roles.alice}" cannot replicate into relation with row-level'):
        p.sync("a")
    p.subdb.execute("ALTER TABLE a NO FORCE ROW LEVEL SECURITY")
    p.sync("a")
    p.same("a")


@pytest.mark.parametrize("rows", ["", "INSERT INTO a VALUES (1, 'x')"], ids=["empty", "with a row"])
def test_a_copy_says_what_a_role_that_is_no_member_lacks(pair: MakePair, roles: Roles, rows: str) -> None:
    p = pair(TABLES, pub=rows, state="i")
    roles.own()
    _as_app(p, roles)
    with pytest.raises(PermissionMissing, match=f'^role "{roles.app}" cannot SET ROLE to "{roles.alice}"$') as caught:
        p.sync("a")
    assert caught.value.detail == 'Its own privileges do not suffice: it lacks INSERT on table "public.a".'
    p.subdb.execute((caught.value.hint or "").splitlines()[-1])
    p.sync("a")
    p.same("a")


def test_a_role_that_may_not_lock_a_table_for_it_has_privileges_on_columns_only_goes_on(
    pair: MakePair, roles: Roles
) -> None:
    p = pair(TABLES)
    _as_app(p, roles)
    p.subdb.execute(
        f"GRANT INSERT (id, v), UPDATE (id, v) ON a TO {roles.app}; GRANT SELECT ON a TO {roles.app};"
        f"GRANT INSERT ON b TO {roles.app}"
    )
    p.apply("INSERT INTO a VALUES (1, 'x')", "UPDATE a SET v = 'y'; INSERT INTO b VALUES (1, 'x')")
    p.same("a", "b")


def test_the_code_of_a_table_runs_with_its_owners_rights(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES)
    roles.own()
    p.subdb.execute(
        "CREATE FUNCTION nosy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN DELETE FROM public.b; RETURN new; END $$;"
        "CREATE TRIGGER nosy BEFORE INSERT ON a FOR EACH ROW EXECUTE FUNCTION nosy();"
        "ALTER TABLE a ENABLE ALWAYS TRIGGER nosy"
    )
    p.pubdb.execute("INSERT INTO b VALUES (1, 'x')")
    p.pubdb.execute("INSERT INTO a VALUES (1, 'x')")
    _fault(p, "permission denied for table b")
    p.same("b")


def test_a_fault_behind_a_change_of_roles_is_named_and_nothing_of_it_stays(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES)
    roles.own()
    p.subdb.execute("INSERT INTO b VALUES (5, 'mine')")
    p.pubdb.execute("INSERT INTO a VALUES (1, 'before')")
    p.pubdb.execute("INSERT INTO a VALUES (2, 'x'); INSERT INTO b VALUES (5, 'theirs'); INSERT INTO a VALUES (3, 'x')")
    with pytest.raises(ApplyError, match="conflict=insert_exists") as caught:
        p.catch_up()
    assert caught.value.relation == "public.b"
    assert p.subdb.rows("SELECT id FROM a") == [(1,)]
    p.subdb.execute("DELETE FROM b")
    p.apply()
    p.same("a", "b")


def test_what_was_prepared_as_the_owners_is_the_users_own_to_finish(pair: MakePair, roles: Roles) -> None:
    p = pair(TABLES, two_phase="p")
    roles.own()
    _as_app(p, roles)
    roles.subdb.execute(f"GRANT {roles.alice}, {roles.bob} TO {roles.app}")
    p.apply("INSERT INTO a VALUES (0, '')")
    p.apply("BEGIN; INSERT INTO a VALUES (1, ''); INSERT INTO b VALUES (1, ''); PREPARE TRANSACTION 'one'")
    owners = "SELECT DISTINCT owner::text FROM pg_prepared_xacts WHERE database = current_database()"
    assert p.subdb.rows(owners) == [(roles.app,)]
    p.apply("COMMIT PREPARED 'one'")
    p.same("a", "b")
    assert roles.who() == {("a INSERT", roles.alice), ("b INSERT", roles.bob)}
