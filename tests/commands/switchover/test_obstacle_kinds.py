"""Obstacles of a switchover that take more to plant: roles, sessions, other servers and versions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from fix_pair import MakePair, Pair
from fix_servers import Database, Servers, embedded_version
from fix_switchover_obstacles import Scene, between, both, paste, session

from pgsub.commands.switchover.obstacles.given_power import is_harmless
from pgsub.commands.switchover.obstacles.obstacle import Obstacle, Way, in_their_words
from pgsub.commands.switchover.obstacles.search import find
from pgsub.publisher.connect import connect
from pgsub.target.ledger.schema import installation


@pytest.mark.parametrize("name", ["target", "publisher", "subscriber", "'my target'"])
def test_a_command_to_paste_names_the_subscription_whatever_its_name_is(name: str) -> None:
    told = (
        f"the target stays as it is: pgsub enable {name}",
        "pgsub needs more of the target.",
        f"Run this on the target:\npgsub alter {name} --target CONNINFO && pgsub run {name}\n  psql -c {name}",
    )
    assert in_their_words(*told) == (
        f"the publisher stays as it is: pgsub enable {name}",
        "pgsub needs more of the publisher.",
        f"Run this on the publisher:\npgsub alter {name} --target CONNINFO && pgsub run {name}\n  psql -c {name}",
    )


def test_the_subscription_is_enabled_and_all_of_it_synchronized(scene: Scene) -> None:
    pair, name = scene.pair, scene.pair.sub.name
    pair.subdb.execute("UPDATE pgsub.subscription_rel SET srsubstate = 'd' WHERE relname = 't'")
    pair.subdb.execute(
        "INSERT INTO pgsub.held_table (subid, srrelid) SELECT subid, srrelid FROM pgsub.subscription_rel"
        " WHERE relname = 's'"
    )
    found = scene.look_as(replace(pair.sub, enabled=False))
    assert [(one.severity, one.message, str(one.hint).split("\n")[-1]) for one in found] == [
        ("error", f'subscription "{name}" is disabled', f"pgsub enable {name}"),
        ("error", 'table "public.t" is not synchronized yet', f"pgsub wait {name} --for synced"),
        ("error", 'changes of table "public.s" are held', f"pgsub alter {name} --release public.s"),
    ]
    pair.subdb.execute("DELETE FROM pgsub.subscription_rel")
    assert f'subscription "{name}" has no tables' in {one.message for one in scene.look()}


def test_another_subscription_of_pgsub_that_writes_to_the_publisher_is_found(scene: Scene) -> None:
    pubdb = scene.pair.pubdb
    with contextlib.closing(session(pubdb)) as there:
        installation.install(there)
    pubdb.execute("CREATE PUBLICATION own FOR ALL TABLES")
    pubdb.execute(
        "INSERT INTO pgsub.subscription (subid, subname, state_store) VALUES (7, 'from else', ''), (8, 's_back', ''),"
        " (9, 'resting', '')"
    )
    pubdb.execute("""INSERT INTO pgsub.definition (subid, options) VALUES (9, '{"enabled": false}')""")
    found = scene.look()
    assert [(one.server, one.severity, one.message) for one in found] == [
        ("giving", "error", 'subscription of pgsub "from else" writes to the publisher'),
        ("giving", "warning", 'publication "own" on the publisher publishes all tables, schema pgsub included'),
    ]
    assert found[0].hint == "Run this where pgsub serves them:\npgsub disable 'from else'"


@pytest.mark.long
def test_privileges_that_roles_lack_are_found_with_their_grants(scene: Scene) -> None:
    pubdb, subdb = both(scene)
    role = scene.role("sw_mover")
    for database in both(scene):
        database.execute("GRANT USAGE ON SCHEMA public TO sw_mover")
        database.execute("GRANT pg_read_all_data TO sw_mover")
    subdb.execute("GRANT USAGE ON SCHEMA pgsub TO sw_mover")
    subdb.execute("GRANT ALL ON ALL TABLES IN SCHEMA pgsub TO sw_mover")
    back = scene.way.connection + f" user={role}"
    sub = replace(scene.pair.sub, run_as_owner=True)

    def looked() -> dict[str, Obstacle]:
        found = scene.look_as(sub, role, role, connection=back, run_as_owner=True)
        return {one.message: one for one in found if one.hint}

    wanted = {
        ("taking", "permission denied to use replication slots"),
        ("giving", "permission denied to keep the ledger on the publisher"),
        ("giving", f'role "{role}" may not end sessions on the publisher'),
        ("taking", f'role "{role}" may not end sessions on the target'),
        ("giving", f'role "{role}" must be owner of database "{pubdb.name}" on the publisher'),
        ("taking", f'role "{role}" must be owner of database "{subdb.name}" on the target'),
        ("giving", "permission denied for 3 tables on the publisher"),
    }
    first = looked()
    assert wanted <= {(one.server, one.message) for one in first.values() if one.severity == "error"}
    warned = {
        "cannot set session_replication_role on the publisher",
        "cannot use replication origins on the publisher",
        'insufficient privileges on publisher sequence ("public.s_id_seq")',
    }
    assert warned <= {one.message for one in first.values()}
    for message in sorted({message for _, message in wanted} | warned):
        hint = str(first[message].hint).replace("CREATE SCHEMA", "-- CREATE SCHEMA")
        paste(
            scene,
            replace(first[message], hint="\n".join(line for line in hint.split("\n") if not line.startswith("--"))),
        )
    assert not ({message for _, message in wanted} | warned) & looked().keys()
    for database in both(scene):
        database.execute(f"REVOKE SET ON PARAMETER session_replication_role FROM {role}")
        database.execute(f'ALTER DATABASE "{database.name}" OWNER TO postgres')


@pytest.mark.long
def test_owners_grants_and_roles_that_the_target_lacks_are_found(scene: Scene) -> None:
    pubdb, subdb = both(scene)
    scene.role("sw_team", pubdb, subdb, attributes="NOLOGIN")
    scene.role("sw_app", pubdb)
    scene.role("sw_old", pubdb)
    subdb.execute("CREATE ROLE sw_old NOLOGIN")
    pubdb.execute("GRANT sw_team TO sw_app")
    pubdb.execute("GRANT SELECT, INSERT ON t, parts TO sw_app")
    pubdb.execute("GRANT UPDATE (v) ON t TO sw_old WITH GRANT OPTION")
    pubdb.execute("GRANT USAGE ON SEQUENCE s_id_seq TO sw_app")
    pubdb.execute("GRANT CREATE ON SCHEMA public TO sw_team")
    pubdb.execute("GRANT SELECT ON s TO PUBLIC")
    pubdb.execute("ALTER TABLE parts OWNER TO sw_team")
    found = {one.message: one for one in scene.look()}
    order = [
        'role "sw_app" of the publisher is missing on the target',
        'role "sw_old" cannot log in on the target',
        'role "sw_app" is no member of the same roles on the target',
        "privileges on 5 relations and schemas were granted on the publisher, but not on the target",
        'table "public.parts" has another owner on the target',
    ]
    assert list(found) == order and {one.server for one in found.values()} == {"taking"}
    pasted = [statement for message in order for statement in paste(scene, found[message])]
    assert 'GRANT INSERT, SELECT ON TABLE "public"."parts", "public"."t" TO "sw_app";' in pasted
    assert 'GRANT UPDATE ("v") ON TABLE "public"."t" TO "sw_old" WITH GRANT OPTION;' in pasted
    assert 'GRANT SELECT ON TABLE "public"."s" TO PUBLIC;' in pasted
    assert scene.look() == []


def test_what_gives_power_over_the_server_is_named_and_is_no_statement_to_paste(scene: Scene) -> None:
    pubdb, subdb = both(scene)
    scene.role("sw_app", pubdb, subdb)
    scene.role("sw_boss", pubdb, subdb, attributes="SUPERUSER")
    scene.role("sw_deputy", pubdb, subdb, attributes="NOLOGIN")
    scene.role("sw_team", pubdb, subdb, attributes="NOLOGIN")
    for database in (pubdb, subdb):
        database.execute("GRANT pg_execute_server_program TO sw_deputy")
    for group in ("pg_execute_server_program", "sw_boss", "sw_deputy", "sw_team"):
        pubdb.execute(f"GRANT {group} TO sw_app")
    pubdb.execute("GRANT SELECT ON t TO sw_app; ALTER TABLE parts OWNER TO sw_deputy; ALTER ROLE sw_deputy LOGIN")
    powerful = {
        "session_preload_libraries": "auto_explain",
        "dynamic_library_path": "$libdir",
        "log_statement": "none",
        "plperl.on_init": "x",
    }
    for name, value in {**powerful, "work_mem": "9MB", "app.name": "x"}.items():
        pubdb.execute(f"ALTER DATABASE {pubdb.name} SET {name} TO '{value}'")
    pubdb.execute(f"ALTER ROLE sw_boss IN DATABASE {pubdb.name} SET work_mem TO '7MB'")
    found = [one.hint or "" for one in scene.look()]
    pasted = [line for hint in found for line in hint.split("\n") if line.endswith(";")]
    assert pasted == [
        'GRANT "sw_team" TO "sw_app";',
        'GRANT SELECT ON TABLE "public"."t" TO "sw_app";',
        f'ALTER DATABASE "{subdb.name}" SET "app"."name" TO \'x\';',
        f'ALTER DATABASE "{subdb.name}" SET "work_mem" TO \'9MB\';',
    ]
    with_statements = [hint for hint in found if hint.endswith(";")]
    assert len(with_statements) == 3 and all("come from the publisher: read them" in hint for hint in with_statements)
    named = "\n".join(hint.split("\n")[0] for hint in found)
    for what in ("pg_execute_server_program", "sw_boss", "sw_deputy", "plperl", *powerful):
        assert what.split(".")[0] in named, what
    assert not is_harmless("LOCAL_preload_libraries", {"local_preload_libraries"})


@pytest.mark.long
def test_roles_whose_own_setting_goes_before_the_fence_are_found(scene: Scene) -> None:
    name = scene.role("sw_writer")
    for database in both(scene):
        database.execute(f"ALTER ROLE {name} SET default_transaction_read_only = off")
        database.execute(f'ALTER ROLE {name} IN DATABASE "{database.name}" SET default_transaction_read_only = 0')
    found = scene.look()
    overrides = [one for one in found if one.severity == "error"]
    assert [(one.server, one.message) for one in overrides] == [
        ("giving", f'default_transaction_read_only is off for role "{name}" on the publisher'),
        ("taking", f'default_transaction_read_only is off for role "{name}" on the target'),
    ]
    assert all(one.severity == "warning" for one in scene.look(fence="connect"))
    for one in overrides:
        paste(scene, one)
    assert scene.look() == []


def test_sessions_of_superusers_are_told(scene: Scene) -> None:
    pubdb = scene.pair.pubdb
    with (
        contextlib.closing(pubdb.connect()),
        contextlib.closing(session(pubdb)) as there,
        contextlib.closing(session(scene.pair.subdb)) as here,
    ):
        found = find(there, here, scene.pair.sub, scene.way)
        assert [(one.server, one.severity, one.message) for one in found] == [
            ("giving", "warning", 'superuser "postgres" has sessions on the publisher')
        ]


@pytest.mark.long
def test_sessions_of_replication_that_no_fence_ends_are_told(scene: Scene) -> None:
    pubdb = scene.pair.pubdb
    with contextlib.closing(connect(pubdb.conninfo, application_name="other", replication=True)):
        found = scene.look()
    assert [(one.server, one.severity, one.message) for one in found] == [
        ("giving", "warning", 'role "postgres" has sessions of replication on the publisher')
    ]
    assert scene.look() == []


@pytest.mark.long
def test_the_way_back_leads_to_the_same_two_databases(scene: Scene, subdb: Database, pubdb: Database) -> None:
    found = scene.look(connection=pubdb.conninfo)
    assert [(one.server, one.message) for one in found if one.severity == "error"] == [
        ("taking", "the way back would read another database than the target")
    ]
    with contextlib.closing(session(subdb)) as here, contextlib.closing(session(subdb)) as wrong:
        found = find(wrong, here, scene.pair.sub, scene.way)
        assert "the way back would write to another database than the publisher" in {one.message for one in found}
    [refused] = scene.look(connection="host=/nowhere dbname=x user=x")
    assert refused.severity == "error" and refused.server == "taking"


@pytest.mark.long
def test_room_for_the_way_back_is_looked_for(own_pair: Callable[..., Any]) -> None:
    """The target has no slot left, does not decode, and the publisher has no replication origin left."""
    none = {"max_active_replication_origins": 0} if int(embedded_version()) >= 18 else {}
    servers = own_pair(publisher=none, target={"max_replication_slots": 1, "max_wal_senders": 1})
    ddl = "CREATE TABLE t (id int PRIMARY KEY)"
    for database in (servers.pubdb, servers.subdb):
        database.execute(ddl)
    servers.pubdb.execute("CREATE PUBLICATION p FOR TABLE t")
    servers.subdb.execute("CREATE PUBLICATION s_back FOR TABLE t")
    made = Pair(servers.pubdb, servers.subdb, origin="none").subscribe("r", None)
    scene = Scene(made, Way("s_back", ("s_back",), servers.subdb.conninfo))
    short = scene.look()
    said = ("giving", "warning", "only 0 replication origins are free on the publisher")
    assert [(one.server, one.severity, one.message) for one in short] == ([said] if none else [])
    servers.subdb.execute("SELECT pg_create_physical_replication_slot('one')")
    full = scene.look()[0]
    assert (full.server, full.severity) == ("taking", "error")
    assert full.message == "all replication slots of the target are in use"
    servers.subdb.execute("SELECT pg_drop_replication_slot('one')")
    servers.subdb.execute("SELECT pg_create_logical_replication_slot('s_back', 'pgoutput')")
    there = scene.look()[0]
    assert there.message.endswith('replication slot "s_back" already exists')
    paste(scene, there)
    assert scene.look() == short
    made.close()
    for database in (servers.pubdb, servers.subdb):
        database.close()
    servers.target.append_conf({"wal_level": "minimal", "max_wal_senders": 0})
    servers.target.restart()
    levels = {one.message: one for one in scene.look() if one.severity == "error"}
    assert {one.server for one in levels.values()} == {"taking"}
    assert 'The target runs with wal_level "minimal".' in {one.detail for one in levels.values()}
    (servers.publisher.data / "standby.signal").touch()
    servers.publisher.restart()
    assert ("giving", "error", "the publisher is a standby") in {
        (one.server, one.severity, one.message) for one in scene.look()
    }


def test_many_objects_are_named_in_part(scene: Scene) -> None:
    pubdb = scene.pair.pubdb
    pubdb.execute(
        "DO $$BEGIN FOR n IN 1..120 LOOP EXECUTE format('CREATE INDEX i%s ON t ((id + %s))', n, n); END LOOP; END$$"
    )
    [one] = scene.look()
    assert one.message == "120 indexes of the publisher are missing on the target"
    assert str(one.detail).endswith("and 110 more.")
    assert "Run this on the target (the first 100 of 120):\n" in str(one.hint) and str(one.hint).count(";") == 100


@pytest.mark.long
def test_names_of_others_are_quoted_in_what_is_to_be_pasted(pair: MakePair) -> None:
    name = 'x"; DROP TABLE t; --'
    quoted = '"x""; DROP TABLE t; --"'
    ddl, pub = f"CREATE TABLE {quoted} (id int PRIMARY KEY, {quoted} int)", f"CREATE PUBLICATION p FOR TABLE {quoted}"
    made = pair(ddl, pub=pub, names=[("public", name)])
    scene = Scene(made, Way("s_back", (name,), made.subdb.conninfo))
    made.pubdb.execute(f'CREATE INDEX " USING x; DROP" ON {quoted} ({quoted})')
    found = scene.look()
    assert len(found) == 2
    for one in found:
        assert len(paste(scene, one)) == len(str(one.hint).split("\n")) - 1
    assert scene.look() == []


@pytest.mark.long
@pytest.mark.parametrize(("giving", "taking"), [("15", None), (None, "15"), ("19", "17"), ("17", "19")])
def test_obstacles_are_found_on_every_version(shared_servers: Servers, giving: str | None, taking: str | None) -> None:
    with between(shared_servers, giving, taking) as scene:
        assert scene.look() == []
        scene.pair.pubdb.execute("""CREATE INDEX by_v ON parts (v); CREATE TRIGGER tr BEFORE INSERT ON t FOR EACH ROW
            EXECUTE FUNCTION f(); ALTER TABLE t ADD CONSTRAINT odd CHECK (n < 9); GRANT SELECT ON t TO PUBLIC;
            ALTER TABLE s ENABLE ROW LEVEL SECURITY; CREATE POLICY mine ON s USING (true); CREATE SEQUENCE alone;
            ALTER DATABASE obstacles_of SET work_mem TO '5MB'; CREATE TABLE more (id int)""")
        scene.pair.subdb.execute("""ALTER TABLE t ALTER n DROP DEFAULT; ALTER SEQUENCE s_id_seq CYCLE;
            DROP PUBLICATION s_back; ALTER TABLE t REPLICA IDENTITY NOTHING""")
        found = scene.look()
        words = [
            ("publication", "does not exist"),
            ("table", "no replica identity"),
            ("mismatched", "s_id_seq"),
            ("sequence", "used by no subscribed table"),
            ("privileges on relation", "not on the target"),
            ("setting", "is not the same"),
            *((kind, "is missing on the target") for kind in ("index", "constraint", "trigger", "default")),
            ("row security", "missing"),
            ("table", "is not subscribed"),
            ("table", "has constraints that the target's table lacks"),
        ]
        for begin, text in words:
            assert any(one.message.startswith(begin) and text in one.message for one in found), (begin, text)
        assert len(found) == len(words), [one.message for one in found]
        for one in found:
            if one.server == "taking":
                paste(scene, one)
        scene.pair.subdb.close()
        assert {one.server for one in scene.look()} == {"giving"}


@pytest.mark.long
def test_a_collation_that_the_system_orders_otherwise_by_now_is_found(shared_servers: Servers) -> None:
    with between(shared_servers, "17", "15") as scene:  # which are built with ICU
        for database, version in zip(both(scene), ("", ", version = '0'"), strict=True):
            database.execute(f"""CREATE COLLATION old (provider = icu, locale = 'de'{version});
                ALTER TABLE t ALTER v TYPE text COLLATE old""")
        [one] = scene.look()
        said = 'the version of collation "public.old" on the target is not that with which its objects were made'
        assert (one.message, one.server, one.severity) == (said, "taking", "warning")
        assert [line.split(" ")[0] for line in paste(scene, one)] == ["REINDEX", "ALTER"]
        assert scene.look() == []


@pytest.mark.long
def test_databases_of_different_locales_are_found(shared_servers: Servers) -> None:
    with between(shared_servers, None, None, "LATIN1") as scene:
        [one] = [one for one in scene.look() if one.message == "the databases differ in their locales"]
        assert (one.server, one.severity) == ("both", "warning")
        assert "encoding is UTF8 on the publisher, LATIN1 on the target" in str(one.detail)


@pytest.mark.long
def test_several_publications_of_the_way_back_become_one(scene: Scene) -> None:
    scene.pair.subdb.execute("ALTER PUBLICATION s_back SET TABLE t; CREATE PUBLICATION more FOR TABLE parts")
    publications = ("more", "s_back")
    [one] = scene.look(publications=publications)
    assert one.message == 'table "public.s" is not published by the way back\'s publication'
    assert str(one.hint).startswith("Let --back-publication name more alone. Run this on the target:\n")
    paste(scene, one)
    assert scene.look(publications=publications) == scene.look(publications=("more",)) == []


@pytest.mark.long
def test_many_tables_take_no_more_statements(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"m{number}" for number in range(60)]
    ddl = ";".join(f"CREATE TABLE {name} (id serial PRIMARY KEY, v text); CREATE INDEX ON {name} (v)" for name in names)
    made = pair(ddl, pub=f"CREATE PUBLICATION p FOR TABLE {', '.join(names)}", origin="none")
    made.subdb.execute(f"CREATE PUBLICATION s_back FOR TABLE {', '.join(names)}")
    scene = Scene(made, Way("s_back", ("s_back",), made.subdb.conninfo))
    statements: list[object] = []
    execute = psycopg.Connection.execute
    monkeypatch.setattr(
        psycopg.Connection, "execute", lambda *words, **more: statements.append(words[1]) or execute(*words, **more)
    )
    assert scene.look() == []
    with_sixty = len(statements)
    made.subdb.execute("DELETE FROM pgsub.subscription_rel WHERE relname <> 'm0'")
    made.subdb.execute("ALTER PUBLICATION s_back SET TABLE m0")
    statements.clear()
    assert [one.message for one in scene.look()] == ["59 tables of the publisher are not subscribed"]
    assert with_sixty <= len(statements)
