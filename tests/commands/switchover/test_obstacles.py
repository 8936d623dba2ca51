"""What is planted on one of two servers stands in the way of a switchover; what is to be pasted removes it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import pytest
from fix_servers import Database
from fix_switchover_obstacles import Scene, both, paste
from psycopg import sql
from thorough import long


@pytest.mark.long
@pytest.mark.publishers("15", "19", long=True)
def test_nothing_is_found_where_nothing_stands_in_the_way(scene: Scene) -> None:
    assert scene.look() == []
    assert scene.look(fence="connect") == scene.look(fence="command") == []


@pytest.mark.publishers("15", "19", long=True)
def test_nothing_is_changed_by_looking(scene: Scene) -> None:
    def changes_nothing() -> bool:
        before = [database.value("SELECT pg_current_xact_id()::text::bigint") for database in both(scene)]
        scene.look()
        after = [database.value("SELECT pg_current_xact_id()::text::bigint") for database in both(scene)]
        return after == [number + 1 for number in before]

    # autovacuum, and tests that make databases ready meanwhile, take transaction IDs of the same servers
    assert any(changes_nothing() for _ in range(20))


def test_settings_that_a_role_made_in_a_database_of_another_encoding_are_shown(scene: Scene) -> None:
    role, pubdb = scene.role("joe"), scene.pair.pubdb
    other = Database(pubdb.server, f"{pubdb.name}_latin1", "LATIN1")
    try:
        with closing(other.connect(role, client_encoding="LATIN1")) as session:
            text = "ALTER ROLE {} IN DATABASE {} SET search_path = 'caf\u00e9'"
            session.execute(sql.SQL(text).format(sql.Identifier(role), sql.Identifier(pubdb.name)))
        [found] = scene.look()
    finally:
        other.drop()
    assert found.message == 'setting "search_path" of the database is not the same on the target'
    assert str(found.hint).endswith(""" SET "search_path" TO E'caf\\\\xe9';""")


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
    # the state of the subscription
    "skipped change": Planted(
        "1 skipped change was not replayed",
        severity="error",
        sub="INSERT INTO pgsub.skipped_change (subid, finish_lsn, xid, schemaname, relname, body)"
        " SELECT subid, '0/1', 1, 'public', 't', '{}' FROM pgsub.subscription",
        pasted=False,
    ),
    # what of the publisher's tables comes to the target
    "forward row filter": Planted(
        'the publisher publishes table "public.t" with a row filter',
        server="giving",
        severity="error",
        pub="ALTER PUBLICATION p SET TABLE parts, s, t WHERE (id > 5)",
    ),
    "forward column list": Planted(
        'column "public.t.n" of the publisher is not published',
        server="giving",
        severity="error",
        pub="ALTER PUBLICATION p SET TABLE parts, s, t (id, v)",
    ),
    "table that is not published any more": Planted(
        'the publisher does not publish table "public.t" any more',
        server="giving",
        severity="error",
        pub="ALTER PUBLICATION p DROP TABLE t",
    ),
    "partitions that are published one by one": Planted(
        'the publisher does not publish table "public.parts" any more',
        server="giving",
        severity="error",
        pub="ALTER PUBLICATION p SET (publish_via_partition_root = false)",
        pasted=False,
    ),
    "too few actions of the publisher": Planted(
        "the publisher does not publish all of insert, update, delete and truncate of 3 tables",
        server="giving",
        severity="error",
        pub="ALTER PUBLICATION p SET (publish = 'insert, update')",
    ),
    "column that the target lacks": Planted(
        'column "public.t.Late one" of the publisher does not exist on the target',
        severity="error",
        pub='ALTER TABLE t ADD "Late one" varchar(7)',
    ),
    "generated column that the target lacks": Planted(
        'generated column "public.t.twice" of the publisher does not exist on the target',
        pub="ALTER TABLE t ADD twice int GENERATED ALWAYS AS (n * 2) STORED",
        pasted=False,
    ),
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
    "no identity on either side": Planted(
        'table "public.t" on the target has no replica identity',
        pub="ALTER TABLE t REPLICA IDENTITY NOTHING",
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


_ERRORS = [kind for kind, planted in _PLANTED.items() if planted.severity == "error"]


@pytest.mark.parametrize("kind", [*_ERRORS, *long(kind for kind in _PLANTED if kind not in _ERRORS)])
def test_what_is_planted_is_found_and_what_is_to_be_pasted_removes_it(scene: Scene, kind: str) -> None:
    planted = _PLANTED[kind]
    for database, statements in zip(both(scene), (planted.pub, planted.sub), strict=True):
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


@pytest.mark.long
def test_what_several_publications_publish_comes_together(scene: Scene) -> None:
    pubdb = scene.pair.pubdb
    pubdb.execute("ALTER PUBLICATION p SET TABLE parts, s, t WHERE (id > 5)")
    pubdb.execute("ALTER PUBLICATION p SET (publish = 'insert, update')")
    pubdb.execute("CREATE PUBLICATION rest FOR ALL TABLES WITH (publish_via_partition_root)")
    assert scene.look_as(replace(scene.pair.sub, publications=("p", "rest"))) == scene.look_as(
        replace(scene.pair.sub, publications=("rest",))
    )
    assert not [
        one for one in scene.look_as(replace(scene.pair.sub, publications=("rest",))) if one.severity == "error"
    ]


def _statements(text: str) -> list[str]:
    return [text] if "$$" in text else [one.strip() for one in text.split(";") if one.strip()]
