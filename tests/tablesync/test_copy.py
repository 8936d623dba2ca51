"""The initial copy: whole and in chunks, of every kind of table. Mirrors t/004_sync.pl and copy_table's cases."""

from __future__ import annotations

import pytest
from fix_pair import MakePair, Pair

from pgsub.common.errors import ApplyError, PermissionMissing, SchemaFault
from pgsub.tablesync.copy import plan
from pgsub.target.session import ledger_privileges

pytestmark = pytest.mark.publishers("15", long=True)

ROWS = "INSERT INTO t SELECT g, md5(g::text), nullif(g % 7, 0) FROM generate_series(1, 3000) g"
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, n int)"
KINDS = "CREATE TYPE mood AS ENUM ('so-so')"


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of some ten blocks."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 80_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 80_000)


def _mode(p: Pair, table: str = "t") -> str:
    return str(p.subdb.value("SELECT copy_mode FROM pgsub.subscription_rel WHERE relname = %s", table))


def _committed(p: Pair, table: str = "t") -> int:
    """Transactions that wrote the table's rows."""
    return int(p.subdb.value(f"SELECT count(DISTINCT xmin::text) FROM {table}"))


def _synced(p: Pair, *tables: str) -> None:
    for table in tables:
        p.sync(table)
        assert p.state(table) == "s"
    assert p.pubdb.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name ~ '_sync_'") == 0
    assert p.subdb.value("SELECT count(*) FROM pgsub.subscription_rel WHERE sync_slot IS NOT NULL") == 0
    assert p.subdb.value("SELECT count(*) FROM pgsub.copy_chunk") == 0


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_a_small_table_is_copied_in_one_transaction(pair: MakePair, binary: bool) -> None:
    p = pair(TABLE, pub=ROWS, state="i", binary=binary)
    _synced(p, "t")
    p.same("t")
    assert (_mode(p), _committed(p)) == ("atomic", 1)
    p.apply("UPDATE t SET v = 'streamed' WHERE id = 5")
    p.same("t")
    assert p.state("t") == "r"


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_a_large_table_is_copied_in_chunks(pair: MakePair, chunks: None, binary: bool) -> None:
    p = pair(TABLE, pub=ROWS, state="i", binary=binary, copy_workers=3)
    _synced(p, "t")
    p.same("t")
    assert _mode(p) == "chunked" and _committed(p) >= 3


def test_a_bloated_table_with_holes_is_copied_whole(pair: MakePair, chunks: None) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    p.pubdb.execute("UPDATE t SET v = v || 'x' WHERE id % 3 = 0; DELETE FROM t WHERE id BETWEEN 500 AND 2500")
    _synced(p, "t")
    p.same("t")
    assert _mode(p) == "chunked"


@pytest.mark.parametrize(
    ("sub", "options"),
    [
        ("INSERT INTO t VALUES (-1, 'mine', 0)", {}),
        (
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';"
            "CREATE TRIGGER x BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f();"
            "ALTER TABLE t ENABLE ALWAYS TRIGGER x",
            {},
        ),
        ("CREATE RULE x AS ON DELETE TO t DO ALSO NOTHING; ALTER TABLE t ENABLE REPLICA RULE x", {}),
        ("", {"copy_atomic": True}),
    ],
    ids=["not empty", "trigger", "rule", "asked for"],
)
def test_a_large_table_is_copied_whole_where_a_half_copy_could_be_noticed(
    pair: MakePair, chunks: None, sub: str, options: dict[str, bool]
) -> None:
    p = pair(TABLE, pub=ROWS, sub=sub, state="i", **options)
    _synced(p, "t")
    p.same("(SELECT * FROM t WHERE id > 0)")
    assert _mode(p) == "atomic"
    assert p.subdb.value("SELECT count(*) FROM t WHERE id < 0") == ("mine" in sub)


def test_ordinary_triggers_stay_silent_and_do_not_hinder_chunks(pair: MakePair, chunks: None) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    p.subdb.execute(
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'fired'; END $$;"
        "CREATE TRIGGER x BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()"
    )
    _synced(p, "t")
    p.same("t")
    assert _mode(p) == "chunked"


@pytest.mark.since(15)
@pytest.mark.parametrize("large", [False, True], ids=["atomic", "chunked"])
def test_a_copy_obeys_row_filter_and_column_list(pair: MakePair, request: pytest.FixtureRequest, large: bool) -> None:
    if large:
        request.getfixturevalue("chunks")
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int DEFAULT -1)",
        pub=f"{ROWS}; CREATE PUBLICATION p FOR TABLE t (id, v) WHERE (id % 2 = 0 AND id < 2900)",
        state="i",
    )
    _synced(p, "t")
    p.same("(SELECT id, v, -1 AS n FROM t WHERE id % 2 = 0 AND id < 2900)")
    assert p.subdb.rows("SELECT count(*), count(*) FILTER (WHERE n = -1) FROM t") == [(1449, 1449)]


@pytest.mark.since(15)
@pytest.mark.parametrize("large", [False, True], ids=["atomic", "chunked"])
def test_several_publications_of_a_table_add_up(pair: MakePair, request: pytest.FixtureRequest, large: bool) -> None:
    if large:
        request.getfixturevalue("chunks")
    p = pair(
        TABLE,
        pub=f"{ROWS}; CREATE PUBLICATION p FOR TABLE t WHERE (id < 10);"
        "CREATE PUBLICATION q FOR TABLE t WHERE (id > 2990)",
        state="i",
        publications=("p", "q"),
    )
    _synced(p, "t")
    assert p.subdb.rows("SELECT count(*), min(id), max(id) FROM t") == [(19, 1, 3000)]


@pytest.mark.parametrize("large", [False, True], ids=["atomic", "chunked"])
@pytest.mark.parametrize("via_root", [False, True], ids=["leaves", "root"])
def test_partitions_are_copied_once(
    pair: MakePair, request: pytest.FixtureRequest, via_root: bool, large: bool
) -> None:
    if large:
        request.getfixturevalue("chunks")
    p = pair(
        "CREATE TABLE t (id int, v text, n int, PRIMARY KEY (id)) PARTITION BY RANGE (id);"
        "CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (MINVALUE) TO (1500);"
        "CREATE TABLE t_high (n int, v text, gone int, id int NOT NULL); ALTER TABLE t_high DROP gone;"
        "ALTER TABLE t ATTACH PARTITION t_high FOR VALUES FROM (1500) TO (MAXVALUE)",
        pub=f"{ROWS}; CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root = {via_root})",
        state="i",
    )
    tables = ["t"] if via_root else ["t_low", "t_high"]
    _synced(p, *tables)
    p.same("t")
    assert _mode(p, tables[0]) == ("chunked" if large else "atomic")


@pytest.mark.parametrize("large", [False, True], ids=["atomic", "chunked"])
def test_inheritance_children_are_copied_by_themselves(
    pair: MakePair, request: pytest.FixtureRequest, large: bool
) -> None:
    if large:
        request.getfixturevalue("chunks")
    p = pair(
        "CREATE TABLE t (id int, v text, n int); CREATE TABLE child (more int) INHERITS (t)",
        pub=f"{ROWS}; INSERT INTO child SELECT g, md5(g::text), 1, g FROM generate_series(1, 2500) g",
        state="i",
    )
    _synced(p, "child", "t")
    p.same("ONLY t", "child")


def test_columns_pair_by_name_in_a_copy(pair: MakePair, chunks: None) -> None:
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, gone int, v text, n int); ALTER TABLE t DROP gone;" + ROWS,
        sub="CREATE TABLE t (n int, mine text DEFAULT 'm', g int GENERATED ALWAYS AS (n * 2) STORED, v text, id int)",
        state="i",
    )
    _synced(p, "t")
    p.same("t", columns="id, v, n")
    assert p.subdb.value("SELECT count(*) FROM t WHERE mine = 'm' AND g IS NOT DISTINCT FROM n * 2") == 3000


def test_identities_and_generated_columns_in_a_copy(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE t"
        " (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a + 1) STORED)",
        pub="INSERT INTO t (a) SELECT generate_series(1, 50)",
        state="i",
    )
    _synced(p, "t")
    p.same("t")


@pytest.mark.parametrize("large", [False, True], ids=["atomic", "chunked"])
def test_tables_without_columns_are_copied(pair: MakePair, request: pytest.FixtureRequest, large: bool) -> None:
    if large:
        request.getfixturevalue("chunks")
    p = pair("CREATE TABLE t ()", pub="INSERT INTO t SELECT FROM generate_series(1, 5000)", state="i")
    _synced(p, "t")
    assert p.subdb.value("SELECT count(*) FROM t") == 5000
    assert _mode(p) == ("chunked" if large else "atomic")


def test_names_and_values_that_need_quotes_are_copied(pair: MakePair, chunks: None) -> None:
    table = 'CREATE TABLE "50% \'of\' {}" ("a.b" text, "%s" text, "Two Words" int)'
    p = pair(
        table,
        pub="INSERT INTO \"50% 'of' {}\" SELECT e'\\\\N\\t\\n\\\\.' || g, nullif('', 'x'), g"
        " FROM generate_series(1, 3000) g",
        state="i",
    )
    [(relid,)] = p.subdb.rows("SELECT srrelid::bigint FROM pgsub.subscription_rel")
    p.sync_oid(relid)
    p.same("\"50% 'of' {}\"")
    assert p.subdb.value("SELECT srsubstate::text FROM pgsub.subscription_rel") == "s"


def test_an_empty_table_is_synchronized(pair: MakePair) -> None:
    p = pair(TABLE, state="i")
    _synced(p, "t")
    p.apply("INSERT INTO t VALUES (1, 'x', 2)")
    p.same("t")


def test_a_duplicate_key_fails_the_copy_and_leaves_what_was_there(pair: MakePair) -> None:
    p = pair(TABLE, pub=ROWS, sub="INSERT INTO t VALUES (7, 'mine', 0)", state="i")
    with pytest.raises(ApplyError, match="duplicate key") as caught:
        p.sync("t")
    assert caught.value.relation == "public.t" and caught.value.sqlstate == "23505"
    assert 'synchronizing table "public.t"' in (caught.value.context or "") and "line 7" in (caught.value.context or "")
    assert p.subdb.rows("SELECT * FROM t") == [(7, "mine", 0)] and p.state("t") == "d"
    with pytest.raises(ApplyError):
        p.sync("t")
    assert p.pubdb.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name ~ '_sync_'") == 1
    p.subdb.execute("DELETE FROM t")
    _synced(p, "t")
    p.same("t")


def test_a_missing_column_fails_the_copy_and_names_it(pair: MakePair) -> None:
    p = pair(pub=f"{TABLE};{ROWS}", sub="CREATE TABLE t (id int PRIMARY KEY, v text)", state="i")
    with pytest.raises(SchemaFault, match='"n"') as caught:
        p.sync("t")
    assert (caught.value.relation, caught.value.column) == ("public.t", "n")
    p.subdb.execute((caught.value.hint or "").splitlines()[-1])
    _synced(p, "t")
    p.same("t")


@pytest.mark.since(18)
@pytest.mark.parametrize("rows", ["", "INSERT INTO t VALUES (1, 7, DEFAULT)"], ids=["empty", "with a row"])
@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("id int PRIMARY KEY", 'is missing replicated columns: "g", "h"'),
        (
            "id int PRIMARY KEY, g int GENERATED ALWAYS AS (id + 2) STORED, h int GENERATED ALWAYS AS (id + 2) STORED",
            'has incompatible generated columns: "g", "h"',
        ),
        ("id int PRIMARY KEY, g int GENERATED ALWAYS AS (id + 2), h int", 'has incompatible generated column: "g"'),
    ],
    ids=["missing", "stored", "virtual"],
)
def test_columns_that_no_row_could_fill_are_found_when_the_copy_begins(
    pair: MakePair, columns: str, said: str, rows: str
) -> None:
    p = pair(
        pub=f"CREATE TABLE t (id int PRIMARY KEY, g int, h int GENERATED ALWAYS AS (id * 2) STORED); {rows};"
        "CREATE PUBLICATION p FOR TABLE t (id, g, h)",
        sub=f"CREATE TABLE t ({columns})",
        state="i",
    )
    with pytest.raises(SchemaFault) as caught:
        p.sync("t")
    assert caught.value.message == f'logical replication target relation "public.t" {said}'
    assert (caught.value.relation, caught.value.column, caught.value.sqlstate) == ("public.t", "g", "55000")
    p.pubdb.execute("ALTER PUBLICATION p SET TABLE t (id)")
    _synced(p, "t")


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_a_narrower_type_fails_the_copy_and_names_it(pair: MakePair, binary: bool) -> None:
    p = pair(
        pub=f"{KINDS}; CREATE TABLE t (id int PRIMARY KEY, v text, vw mood); INSERT INTO t VALUES (1, 'v', 'so-so')",
        sub="CREATE TABLE t (id int PRIMARY KEY, v varchar(3), vw varchar(3))",
        state="i",
        binary=binary,
    )
    with pytest.raises(ApplyError, match="value too long") as caught:
        p.sync("t")
    assert (caught.value.relation, caught.value.column) == ("public.t", "vw")
    hint = (caught.value.hint or "").splitlines()[-1]
    assert hint == 'ALTER TABLE "public"."t" ALTER COLUMN "vw" TYPE public.mood;'
    p.subdb.execute(f"{KINDS}; {hint.replace('mood;', 'mood USING vw::public.mood;')}")
    _synced(p, "t")
    p.same("t")


def test_a_missing_table_fails_the_copy(pair: MakePair) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    relid = p.relid("t")
    p.pubdb.execute("ALTER TABLE t RENAME TO v")
    with pytest.raises(SchemaFault, match=r'"public\.t" not found on publisher'):
        p.sync_oid(relid)
    p.subdb.execute("ALTER TABLE t RENAME TO u")  # it is looked for by the name that it bears now
    with pytest.raises(SchemaFault, match=r'"public\.u" not found on publisher'):
        p.sync_oid(relid)
    p.subdb.execute("DROP TABLE u")
    with pytest.raises(SchemaFault, match=r'"public\.t" does not exist') as caught:
        p.sync_oid(relid)
    assert caught.value.relation == "public.t"
    assert (caught.value.hint or "").splitlines()[-1] == f"pgsub refresh {p.sub.name}"


def test_a_foreign_partition_of_the_publisher_is_not_asked_and_the_copy_says_so(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE t (id int, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (9)",
        pub="INSERT INTO t VALUES (1, 'here'); CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
        state="i",
    )
    p.pubdb.execute(
        "CREATE EXTENSION file_fdw; CREATE SERVER far FOREIGN DATA WRAPPER file_fdw;"
        "CREATE FOREIGN TABLE t2 PARTITION OF t FOR VALUES FROM (9) TO (99) SERVER far OPTIONS (program 'echo 9')"
    )
    with pytest.raises(SchemaFault, match="a partition of it on the publisher is a foreign table") as caught:
        p.sync("t")
    assert "--no-copy-data" in (caught.value.hint or "")
    p.pubdb.execute("ALTER TABLE t DETACH PARTITION t2")
    _synced(p, "t")
    p.same("t")


def test_row_level_security_is_refused_for_a_role_that_it_would_bind(pair: MakePair) -> None:
    p = pair(TABLE, pub=ROWS, sub="ALTER TABLE t ENABLE ROW LEVEL SECURITY", state="i")
    role = f"writer_{p.subid}"
    p.subdb.execute(f"CREATE ROLE {role} LOGIN; GRANT ALL ON SCHEMA pgsub, public TO {role}")
    p.subdb.execute(
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}; {ledger_privileges.grants(role)}"
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA pgsub TO {role}"
    )
    owner = p.sub.target
    try:
        p.set(target=p.subdb.server.conninfo(p.subdb.name, role))
        with pytest.raises(PermissionMissing, match="row-level security"):
            p.sync("t")
        p.set(target=owner)
        _synced(p, "t")
        p.same("t")
    finally:
        p.subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_role_that_may_only_insert_copies_a_large_table_as_the_servers_subscriber_does(
    pair: MakePair, chunks: None
) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    role = f'"writer {p.subid}"'
    p.subdb.execute(
        f"CREATE ROLE {role} LOGIN; GRANT ALL ON SCHEMA pgsub, public TO {role};"
        f"{ledger_privileges.grants(role)} GRANT ALL ON ALL SEQUENCES IN SCHEMA pgsub TO {role};"
        f"GRANT SET ON PARAMETER session_replication_role TO {role}; GRANT INSERT ON t TO {role}"
    )
    try:
        p.set(target=p.subdb.server.conninfo(p.subdb.name, f"writer {p.subid}"))
        _synced(p, "t")
    finally:
        p.set(target=p.subdb.conninfo)
        p.subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    p.same("t")
    assert _mode(p) == "atomic"


def test_a_right_that_a_trigger_of_a_copy_lacks_is_not_told_as_a_grant_to_run(
    pair: MakePair,
) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    role = f'"writer {p.subid}"'
    p.subdb.execute(
        f"CREATE ROLE {role} LOGIN; GRANT ALL ON SCHEMA pgsub, public TO {role};"
        f"{ledger_privileges.grants(role)} GRANT ALL ON ALL SEQUENCES IN SCHEMA pgsub TO {role};"
        f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON t TO {role};"
        "CREATE TABLE seen (id int); CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN INSERT INTO public.seen VALUES (NEW.id); RETURN NEW; END';"
        "CREATE TRIGGER see BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION see();"
        "ALTER TABLE t ENABLE ALWAYS TRIGGER see"
    )
    try:
        p.set(target=p.subdb.server.conninfo(p.subdb.name, f"writer {p.subid}"))
        with pytest.raises(PermissionMissing) as caught:
            p.sync("t")
        assert "seen" in caught.value.message and ";" not in str(caught.value.hint)
        p.subdb.execute(f"GRANT INSERT ON seen TO {role}")
        p.sync("t")
    finally:
        p.set(target=p.subdb.conninfo)
        p.subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    p.same("t")
