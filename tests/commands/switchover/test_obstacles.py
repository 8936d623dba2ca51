"""What stands in the way of a switchover is found on both servers, and what is to be pasted removes it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
import pytest
from fix_pair import MakePair, Pair
from fix_servers import Database, Servers

from pgsub.commands.switchover.obstacles.obstacle import Obstacle, Way
from pgsub.commands.switchover.obstacles.search import find
from pgsub.target.ledger import schema
from pgsub.target.session import connect as target

_DDL = """CREATE TABLE t (id int PRIMARY KEY, v text, n int DEFAULT 1 CHECK (n > 0));
    CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
    CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (100);
    CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
    CREATE TABLE s (id serial PRIMARY KEY, o int REFERENCES t)"""
_TABLES = "t, parts, s"
#: Tests connect as a superuser.
_OURS = "superuser"


@dataclass
class Scene:
    """A subscription of some tables, whose way back meets no obstacle."""

    pair: Pair
    way: Way
    roles: list[str] = field(default_factory=list)

    def look(self, giving: str | None = None, taking: str | None = None, **way: Any) -> list[Obstacle]:
        """Look for obstacles.

        :param giving: role of the session on the publisher; ``taking`` of that on the target.
        """
        return self.look_as(self.pair.sub, giving, taking, **way)

    def look_as(self, sub: Any, giving: str | None = None, taking: str | None = None, **way: Any) -> list[Obstacle]:
        """Look for obstacles of another definition."""
        with (
            contextlib.closing(session(self.pair.pubdb, giving)) as there,
            contextlib.closing(session(self.pair.subdb, taking)) as here,
        ):
            found = find(there, here, sub, replace(self.way, **way))
            assert there.info.transaction_status == here.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        return [one for one in found if not one.message.startswith(_OURS)]

    def database(self, server: str) -> Database:
        """The database on a server: giving or taking."""
        return self.pair.pubdb if server == "giving" else self.pair.subdb

    def role(self, name: str, *databases: Database, attributes: str = "LOGIN") -> str:
        """Create a role that is dropped at the end."""
        for database in databases or (self.pair.pubdb, self.pair.subdb):
            database.execute(f"CREATE ROLE {name} {attributes}")
        self.roles.append(name)
        return name


def session(database: Database, role: str | None = None) -> psycopg.Connection:
    """A session as the command opens it."""
    name = "" if role is None else f" user={role}"
    return target.connect(database.conninfo + name, "pgsub switchover", replica=False)


def paste(scene: Scene, one: Obstacle) -> list[str]:
    """Run the statements of a hint where it says."""
    assert one.hint is not None
    database, statements = scene.database(one.server), []
    for line in one.hint.split("\n"):
        if said := re.search(r"[Rr]un (?:this|one of these) on the (publisher|target)", line):
            database = scene.database({"publisher": "giving", "target": "taking"}[said[1]])
        if line.endswith(";"):
            database.execute(line)
            statements.append(line)
    return statements


@pytest.fixture
def scene(pair: MakePair) -> Iterator[Scene]:
    made = pair(
        _DDL,
        pub=f"CREATE PUBLICATION p FOR TABLE {_TABLES} WITH (publish_via_partition_root)",
        sub=f"CREATE PUBLICATION s_back FOR TABLE {_TABLES} WITH (publish_via_partition_root)",
        origin="none",
    )
    found = Scene(made, Way("s_back", ("s_back",), made.subdb.conninfo))
    yield found
    for name in found.roles:
        for database in (made.pubdb, made.subdb):
            if database.value("SELECT true FROM pg_roles WHERE rolname = %s", name):
                database.execute(f"DROP OWNED BY {name} CASCADE")
                database.execute(f"DROP ROLE {name}")


@pytest.mark.publishers("15", "19")
def test_nothing_is_found_where_nothing_stands_in_the_way(scene: Scene) -> None:
    assert scene.look() == []
    assert scene.look(fence="connect") == scene.look(fence="command") == []


@pytest.mark.publishers("15", "19")
def test_nothing_is_changed_by_looking(scene: Scene) -> None:
    before = [database.value("SELECT pg_current_xact_id()::text::bigint") for database in _both(scene)]
    scene.look()
    assert [database.value("SELECT pg_current_xact_id()::text::bigint") for database in _both(scene)] == [
        number + 1 for number in before
    ]


def _both(scene: Scene) -> tuple[Database, Database]:
    return scene.pair.pubdb, scene.pair.subdb


@dataclass(frozen=True)
class Planted:
    """What is planted on the publisher and on the target, what is found, and whether pasting removes it."""

    message: str
    server: str = "taking"
    severity: str = "warning"
    pub: str = ""
    sub: str = ""
    pasted: bool = True


def _in_database(*formats: str) -> str:
    """Write statements about the present database, whose name %I stands for."""
    return "DO $$BEGIN " + "".join(f"EXECUTE format($f${one}$f$, current_database());" for one in formats) + " END$$"


_PLANTED = {
    # the publication of the way back
    "no publication": Planted(
        'publication "s_back" of the way back does not exist on the target',
        severity="error",
        sub="DROP PUBLICATION s_back",
    ),
    "table not published": Planted(
        'table "public.t" is not published by the way back\'s publication',
        severity="error",
        sub="ALTER PUBLICATION s_back DROP TABLE t",
    ),
    "partitions not published": Planted(
        'table "public.parts" is not published by the way back\'s publication',
        severity="error",
        sub="CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (100) TO (200);"
        "ALTER PUBLICATION s_back SET (publish_via_partition_root = false);"
        "ALTER PUBLICATION s_back SET TABLE t, s, parts_1",
    ),
    "other table published": Planted(
        'the way back\'s publication publishes table "public.other", which is not subscribed',
        severity="error",
        sub="CREATE TABLE other (id int PRIMARY KEY); ALTER PUBLICATION s_back ADD TABLE other",
    ),
    "ledger published": Planted(
        "the way back's publication publishes schema pgsub",
        severity="error",
        sub="DROP PUBLICATION s_back; CREATE PUBLICATION s_back FOR ALL TABLES",
    ),
    "row filter": Planted(
        'table "public.t" is published with a row filter or a column list',
        severity="error",
        sub="ALTER PUBLICATION s_back SET TABLE parts, s, t WHERE (id > 5)",
    ),
    "column list": Planted(
        'table "public.t" is published with a row filter or a column list',
        severity="error",
        sub="ALTER PUBLICATION s_back SET TABLE parts, s, t (id, v)",
    ),
    "too few actions": Planted(
        'publication "s_back" on the target does not publish all of insert, update, delete and truncate',
        severity="error",
        sub="ALTER PUBLICATION s_back SET (publish = 'insert, update')",
    ),
    # tables
    "no identity": Planted(
        'table "public.t" on the target has no replica identity',
        severity="error",
        sub="ALTER TABLE t REPLICA IDENTITY NOTHING",
    ),
    "partition without identity": Planted(
        'table "public.parts_1" on the target has no replica identity',
        severity="error",
        sub="ALTER TABLE parts_1 REPLICA IDENTITY NOTHING",
    ),
    "column that the publisher lacks": Planted(
        'logical replication target relation "public.t" is missing replicated column: "more"',
        server="giving",
        severity="error",
        sub="ALTER TABLE t ADD more int",
    ),
    "type that does not fit back": Planted(
        'table "public.t" on the publisher has columns of types that may not fit',
        server="giving",
        sub="ALTER TABLE t ALTER v TYPE jsonb USING v::jsonb",
        pub="ALTER TABLE t ALTER v TYPE int USING v::int",
        pasted=False,
    ),
    "table that the publisher does not have under that name": Planted(
        'relation "public.renamed" does not exist on the publisher',
        server="giving",
        severity="error",
        sub="ALTER TABLE t RENAME TO renamed",
        pasted=False,
    ),
    "required column of the publisher": Planted(
        'table "public.t" on the publisher has NOT NULL columns without a default that are not published',
        server="giving",
        severity="error",
        pub="ALTER TABLE t ADD must int NOT NULL",
        pasted=False,
    ),
    # sequences
    "sequence that differs": Planted(
        'mismatched or renamed sequence on subscriber ("public.s_id_seq")',
        severity="error",
        sub="ALTER SEQUENCE s_id_seq INCREMENT BY 7",
    ),
    "sequence that is missing": Planted(
        'missing sequence on subscriber ("public.s_id_seq")',
        severity="error",
        sub="DROP SEQUENCE s_id_seq CASCADE",
        pasted=False,
    ),
    "sequence that only the target has": Planted(
        'missing sequence on publisher ("public.more")',
        server="giving",
        sub="CREATE SEQUENCE more OWNED BY t.n",
        pasted=False,
    ),
    "sequence that no table uses": Planted(
        'sequence "public.alone" is used by no subscribed table',
        server="giving",
        pub="CREATE SEQUENCE alone",
        pasted=False,
    ),
    # writers
    "prepared": Planted(
        'transaction "it\'s" is prepared on the publisher',
        server="giving",
        pub="BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'it''s'",
    ),
    "subscription of the server": Planted(
        'subscription "Else where" writes to the publisher',
        server="giving",
        severity="error",
        pub="CREATE SUBSCRIPTION \"Else where\" CONNECTION 'dbname=x' PUBLICATION p"
        ' WITH (connect = false); ALTER SUBSCRIPTION "Else where" SET (slot_name = x);'
        'ALTER SUBSCRIPTION "Else where" ENABLE',
    ),
    "jobs": Planted(
        'extension "pg_cron" on the publisher may run jobs that write',
        server="giving",
        pub="CREATE EXTENSION citext; SET allow_system_table_mods = on;"
        "UPDATE pg_extension SET extname = 'pg_cron' WHERE extname = 'citext'",
        pasted=False,
    ),
    # what is left behind
    "table not subscribed": Planted(
        'table "public.more" of the publisher is not subscribed',
        server="giving",
        pub="CREATE TABLE more (id int)",
        pasted=False,
    ),
    "unlogged": Planted(
        'unlogged table "public.quick" of the publisher cannot be replicated',
        server="giving",
        pub="CREATE UNLOGGED TABLE quick (id int)",
    ),
    "materialized view missing": Planted(
        'materialized view "public.m" of the publisher does not exist on the target',
        pub="CREATE MATERIALIZED VIEW m AS SELECT 1 AS one",
        pasted=False,
    ),
    "materialized view": Planted(
        'materialized view "public.m" on the target is as of the last refresh there',
        pub="CREATE MATERIALIZED VIEW m AS SELECT 1 AS one",
        sub="CREATE MATERIALIZED VIEW m AS SELECT 1 AS one",
        pasted=False,
    ),
    "large objects": Planted(
        "the publisher has 1 large object, which are not replicated",
        server="giving",
        pub="SELECT lo_create(0)",
        pasted=False,
    ),
    "slot of others": Planted(
        'replication slot "theirs" of the publisher serves others',
        server="giving",
        pub="SELECT pg_create_logical_replication_slot('theirs', 'pgoutput')",
        pasted=False,
    ),
    "foreign table": Planted(
        'foreign table "public.far" on the publisher is not replicated',
        server="giving",
        pub="CREATE FOREIGN DATA WRAPPER w; CREATE SERVER there FOREIGN DATA WRAPPER w;"
        "CREATE FOREIGN TABLE far (id int) SERVER there",
        pasted=False,
    ),
    "extension": Planted('extension "citext" of the publisher is missing on the target', pub="CREATE EXTENSION citext"),
    "older extension": Planted(
        'extension "hstore" on the target is older than on the publisher',
        pub="CREATE EXTENSION hstore",
        sub="CREATE EXTENSION hstore VERSION '1.4'",
    ),
    # definitions
    "index": Planted(
        'index "public.t.by_v" of the publisher is missing on the target', pub="CREATE INDEX by_v ON t (v)"
    ),
    "partitioned index": Planted(
        'index "public.parts.by_v" of the publisher is missing on the target', pub="CREATE INDEX by_v ON parts (v)"
    ),
    "invalid index": Planted(
        'index "public.t.by_v" of the publisher is missing on the target',
        pub="CREATE INDEX by_v ON t (v)",
        sub='CREATE INDEX "left" ON t (v);'
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid::regclass::text LIKE '%left%'",
    ),
    "constraint": Planted(
        'constraint "public.t.Odd one" of the publisher is missing on the target',
        pub='ALTER TABLE t ADD CONSTRAINT "Odd one" CHECK (n % 2 = 1)',
    ),
    "foreign key": Planted(
        'constraint "public.s.s_o_fkey" of the publisher is missing on the target',
        sub="ALTER TABLE s DROP CONSTRAINT s_o_fkey",
    ),
    "trigger": Planted(
        'trigger "public.t.tr" of the publisher is missing on the target',
        pub="CREATE TRIGGER tr BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()",
    ),
    "default": Planted(
        'default "public.t.n" of the publisher is missing on the target', sub="ALTER TABLE t ALTER n DROP DEFAULT"
    ),
    "disabled trigger": Planted(
        'triggers or foreign keys of table "public.t" are disabled on the target',
        pub="CREATE TRIGGER tr BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()",
        sub="CREATE TRIGGER tr BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f(); ALTER TABLE t DISABLE TRIGGER tr",
    ),
    "disabled foreign keys": Planted(
        'triggers or foreign keys of table "public.s" are disabled on the target',
        sub="ALTER TABLE s DISABLE TRIGGER ALL",
    ),
    "row security": Planted(
        'row security of table "public.t" on the publisher is missing on the target',
        pub="ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY mine ON t AS RESTRICTIVE FOR SELECT USING (id > 0)",
    ),
    # settings
    "setting": Planted(
        'setting "DateStyle" of the database is not the same on the target',
        pub=_in_database("ALTER DATABASE %I SET \"DateStyle\" TO 'German, DMY'"),
    ),
    "settings": Planted(
        "2 settings of the database are not the same on the target",
        pub=_in_database(
            'ALTER DATABASE %I SET search_path TO "$user", public, "a,b"',
            "ALTER DATABASE %I SET app.\"Name\" TO 'it''s'",
        ),
    ),
}


@pytest.mark.parametrize("kind", _PLANTED)
def test_what_is_planted_is_found_and_what_is_to_be_pasted_removes_it(scene: Scene, kind: str) -> None:
    planted = _PLANTED[kind]
    for database, statements in zip(_both(scene), (planted.pub, planted.sub), strict=True):
        for statement in _statements(statements):
            database.execute(statement)
    if "DATABASE" in planted.pub:
        scene.pair.pubdb.close()
    found = scene.look()
    matching = [one for one in found if one.message == planted.message]
    assert len(matching) == 1, [one.message for one in found]
    [one] = matching
    assert (one.server, one.severity) == (planted.server, planted.severity)
    if not planted.pasted:
        return
    assert paste(scene, one)
    assert planted.message not in {one.message for one in scene.look()}


def _statements(text: str) -> list[str]:
    return [text] if "$$" in text else [one.strip() for one in text.split(";") if one.strip()]


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
        schema.install(there)
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


def test_privileges_that_roles_lack_are_found_with_their_grants(scene: Scene) -> None:
    pubdb, subdb = _both(scene)
    role = scene.role("sw_mover")
    for database in _both(scene):
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
    for database in _both(scene):
        database.execute(f"REVOKE SET ON PARAMETER session_replication_role FROM {role}")
        database.execute(f'ALTER DATABASE "{database.name}" OWNER TO postgres')


def test_owners_grants_and_roles_that_the_target_lacks_are_found(scene: Scene) -> None:
    pubdb, subdb = _both(scene)
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


def test_roles_whose_own_setting_goes_before_the_fence_are_found(scene: Scene) -> None:
    name = scene.role("sw_writer")
    for database in _both(scene):
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


def test_room_for_the_way_back_is_looked_for(own_pair: Callable[..., Any]) -> None:
    """The target has no slot left, does not decode, and the publisher has no replication origin left."""
    servers = own_pair(target={"max_replication_slots": 1, "max_wal_senders": 1})
    ddl = "CREATE TABLE t (id int PRIMARY KEY)"
    for database in (servers.pubdb, servers.subdb):
        database.execute(ddl)
    servers.pubdb.execute("CREATE PUBLICATION p FOR TABLE t")
    servers.subdb.execute("CREATE PUBLICATION s_back FOR TABLE t")
    made = Pair(servers.pubdb, servers.subdb, origin="none").subscribe("r", None)
    scene = Scene(made, Way("s_back", ("s_back",), servers.subdb.conninfo))
    assert scene.look() == []
    servers.subdb.execute("SELECT pg_create_physical_replication_slot('one')")
    [full] = scene.look()
    assert (full.server, full.severity) == ("taking", "error")
    assert full.message == "all replication slots of the target are in use"
    servers.subdb.execute("SELECT pg_drop_replication_slot('one')")
    servers.subdb.execute("SELECT pg_create_logical_replication_slot('s_back', 'pgoutput')")
    [there] = scene.look()
    assert there.message.endswith('replication slot "s_back" already exists')
    paste(scene, there)
    assert scene.look() == []
    made.close()
    for database in (servers.pubdb, servers.subdb):
        database.close()
    servers.target.append_conf({"wal_level": "minimal", "max_wal_senders": 0})
    servers.target.restart()
    levels = {one.message: one for one in scene.look() if one.severity == "error"}
    assert {one.server for one in levels.values()} == {"taking"}
    assert 'The target runs with wal_level "minimal".' in {one.detail for one in levels.values()}


def test_many_objects_are_named_in_part(scene: Scene) -> None:
    pubdb = scene.pair.pubdb
    pubdb.execute(
        "DO $$BEGIN FOR n IN 1..120 LOOP EXECUTE format('CREATE INDEX i%s ON t ((id + %s))', n, n); END LOOP; END$$"
    )
    [one] = scene.look()
    assert one.message == "120 indexes of the publisher are missing on the target"
    assert str(one.detail).endswith("and 110 more.")
    assert (
        str(one.hint).startswith("Run this on the target (the first 100 of 120):") and str(one.hint).count(";") == 100
    )


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


@pytest.mark.parametrize(("giving", "taking"), [("15", None), (None, "15"), ("19", "17"), ("17", "19")])
def test_obstacles_are_found_on_every_version(shared_servers: Servers, giving: str | None, taking: str | None) -> None:
    pubdb = Database(shared_servers("publisher", giving), "obstacles_of")
    subdb = Database(shared_servers("target", taking), "obstacles_to")
    try:
        tables = f"FOR TABLE {_TABLES} WITH (publish_via_partition_root)"
        for database, name in ((pubdb, "p"), (subdb, "s_back")):
            database.execute(f"{_DDL}; CREATE PUBLICATION {name} {tables}")
        scene = Scene(Pair(pubdb, subdb, origin="none"), Way("s_back", ("s_back",), subdb.conninfo))
        scene.pair.subscribe("r", None)
        assert scene.look() == []
        pubdb.execute("""CREATE INDEX by_v ON parts (v); CREATE TRIGGER tr BEFORE INSERT ON t FOR EACH ROW
            EXECUTE FUNCTION f(); ALTER TABLE t ADD CONSTRAINT odd CHECK (n < 9); GRANT SELECT ON t TO PUBLIC;
            ALTER TABLE s ENABLE ROW LEVEL SECURITY; CREATE POLICY mine ON s USING (true); CREATE SEQUENCE alone;
            ALTER DATABASE obstacles_of SET work_mem TO '5MB'; CREATE TABLE more (id int)""")
        subdb.execute("""ALTER TABLE t ALTER n DROP DEFAULT; ALTER SEQUENCE s_id_seq CYCLE; DROP PUBLICATION s_back;
            ALTER TABLE t REPLICA IDENTITY NOTHING""")
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
        subdb.close()
        assert {one.server for one in scene.look()} == {"giving"}
    finally:
        scene.pair.close()
        for database in (pubdb, subdb):
            database.drop()


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
