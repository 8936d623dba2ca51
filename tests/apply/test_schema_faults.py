"""Where the target does not fit, apply stops before the commit and names relation, column and the DDL that helps.

Each test pastes the hint into the target and goes on.
"""

from __future__ import annotations

from decimal import Decimal

import pytest
from fix_pair import MakePair, Pair
from thorough import long

from pgsub.apply.conflicts.schema_fault import read_numeric
from pgsub.apply.worker import batch_size
from pgsub.common.errors import ApplyError, SchemaFault
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.subscriptions import RelationState

KINDS = """
CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN short AS varchar(10); CREATE SCHEMA "Odd ""one";
CREATE TYPE "Odd ""one"."Pair" AS (a int, b text);
"""
COLUMNS = (
    "a numeric(12,3), b varchar(7), c timestamp(3) with time zone, d bit varying(9), e mood, f mood[], g short,"
    ' h "Odd ""one"."Pair", i text[], j "char", k int8, l interval day to second(2), m char(4)'
)


def _fault(p: Pair, words: str = ".") -> ApplyError:
    with pytest.raises(ApplyError, match=words) as caught:
        p.catch_up()
    return caught.value


def _ddl(error: ApplyError) -> str:
    return "\n".join(line for line in (error.hint or "").splitlines() if line.endswith(";"))


def _columns(p: Pair, table: str) -> None:
    query = (
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
        f" WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attname"
    )
    mine, theirs = dict(p.subdb.rows(query)), dict(p.pubdb.rows(query))
    assert mine == {**theirs, "g": "character varying"}  # of a domain the publisher tells the base type alone


@pytest.mark.parametrize("identity", ["d", "i", "f"])
def test_a_missing_table_comes_with_its_create_table(pair: MakePair, identity: str) -> None:
    p = pair(f"{KINDS}; CREATE TABLE u (id int)", names=[("public", "u")])
    made = f'CREATE TABLE "Odd ""one"."T t" (id int PRIMARY KEY, {COLUMNS}, "q""uote" uuid NOT NULL UNIQUE)'
    how = {"d": "DEFAULT", "i": 'USING INDEX "T t_q""uote_key"', "f": "FULL"}[identity]
    p.pubdb.execute(f'{made}; ALTER TABLE "Odd ""one"."T t" REPLICA IDENTITY {how}')
    p.pubdb.execute('INSERT INTO "Odd ""one"."T t" (id, a, e, "q""uote") VALUES (1, 1.5, \'sad\', gen_random_uuid())')
    error = _fault(p, "does not exist")
    assert error.relation == 'Odd "one.T t' and error.column is None
    assert (error.hint or "").endswith(f"\npgsub refresh {p.sub.name}")
    p.subdb.execute(_ddl(error))
    _columns(p, '"Odd ""one"."T t"')
    key = 'SELECT array_agg(attname::text) FROM pg_index, pg_attribute WHERE indrelid = \'"Odd ""one"."T t"\'::regclass'
    key += " AND indisprimary AND attrelid = indrelid AND attnum = ANY (indkey)"
    assert p.subdb.value(key) == {"d": ["id"], "i": ['q"uote'], "f": None}[identity]
    p.apply('UPDATE "Odd ""one"."T t" SET a = 2')  # it is there now, and not subscribed: left alone
    assert p.subdb.value('SELECT count(*) FROM "Odd ""one"."T t"') == 0


def test_missing_columns_come_with_their_add_column(pair: MakePair) -> None:
    p = pair(f"{KINDS}; CREATE TABLE t (id int PRIMARY KEY)")
    added = ", ".join(f"ADD {column}" for column in COLUMNS.replace("12,3", "12;3").split(", ")).replace(";", ",")
    p.pubdb.execute(f"ALTER TABLE t {added}; INSERT INTO t (id, b, f) VALUES (1, 'x', '{{sad,happy}}')")
    error = _fault(p, "is missing replicated columns: ")
    assert isinstance(error, SchemaFault) and (error.relation, error.column) == ("public.t", "a") and error.finish_lsn
    assert p.subdb.value("SELECT count(*) FROM t") == 0
    p.subdb.execute(_ddl(error))
    p.apply("INSERT INTO t (id, g, h) VALUES (2, 'g', '(1,x)')")
    p.same("t")
    _columns(p, "t")


def test_a_type_that_the_target_lacks_is_named_as_the_publisher_calls_it(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", pub=KINDS)
    p.pubdb.execute("ALTER TABLE t ADD e mood, ADD f mood[]; INSERT INTO t VALUES (1, 'sad', '{happy}')")
    error = _fault(p, "is missing replicated columns")
    assert 'ADD COLUMN "e" public.mood, ADD COLUMN "f" public.mood[];' in (error.hint or "")
    p.subdb.execute(KINDS + _ddl(error))
    p.apply()
    p.same("t")


def test_what_a_transaction_that_is_sent_again_said_of_types_is_known(pair: MakePair) -> None:
    p = pair(f"{KINDS}; CREATE TABLE t (id int PRIMARY KEY, e mood); CREATE TABLE u (id int)")
    p.apply("INSERT INTO t VALUES (1, 'sad')")
    p.subdb.execute("ALTER TABLE t DROP e")
    p.pubdb.execute("INSERT INTO t VALUES (2, 'sad')")
    assert 'ADD COLUMN "e" public.mood;' in (_fault(p, "is missing").hint or "")
    p.pubdb.execute("UPDATE t SET e = 'happy'")
    assert 'ADD COLUMN "e" public.mood;' in (_fault(p, "is missing").hint or "")


#: Type on the publisher, type on the target, a value that fits and one that does not.
NARROWED = {
    "varchar": ("varchar(8)", "varchar(3)", "ab", "abcd"),
    "spaces": ("text", "char(3)", "ab", "ab  c"),
    "numeric": ("numeric(10,2)", "numeric(4,2)", "99.99", "99.995"),
    "numeric, negative scale": ("numeric", "numeric(2,-3)", "99000", "-99500"),
    "bit": ("bit varying(5)", "bit(3)", "101", "10101"),
    "varbit": ("bit varying", "bit varying(3)", "101", "10101"),
    "integer": ("bigint", "integer", "1", "5000000000"),
    "word": ("text", "integer", "1", "many"),
    "date": ("text", "date", "2026-01-01", "tomorrow or so"),
    "enum": ("text", "mood", "sad", "angry"),
    "domain": ("text", "short", "short", "much too long"),
    "checked": ("int", "positive", "1", "-1"),
    "array": ("text[]", "int[]", "{1}", "{one}"),
}
#: A modifier, a smaller range, a type that reads texts, a constraint.
_OFTEN = ("varchar", "integer", "enum", "checked")
_TYPES = "CREATE TYPE mood AS ENUM ('sad'); CREATE DOMAIN short AS varchar(10);" + (
    "CREATE DOMAIN positive AS int CHECK (value > 0)"
)


@pytest.mark.parametrize("kind", [*_OFTEN, *long(kind for kind in NARROWED if kind not in _OFTEN)])
def test_a_narrower_type_comes_with_its_alter_column(pair: MakePair, kind: str) -> None:
    wide, narrow, fits, refused = NARROWED[kind]
    # other columns with modifiers, and values that look like parameters
    p = pair(
        pub=f'CREATE TABLE t (id int PRIMARY KEY, v text, "v w" {wide}, w varchar(9), n numeric(9), b bit(3))',
        sub=f"{_TYPES}; CREATE TABLE t"
        f' (n numeric(9), b bit(3), "v w" {narrow}, v text, w varchar(9), id int PRIMARY KEY)',
    )
    p.apply(f"INSERT INTO t VALUES (1, '$4', '{fits}', 'w        ', 7, '101')")
    updates = kind in ("varchar", "numeric", "integer")
    if updates:
        p.pubdb.execute(f"UPDATE t SET \"v w\" = '{refused}', v = '$2 = $3'")
    else:
        p.pubdb.execute(f"INSERT INTO t SELECT g, '$1', '{refused}', 'w', 7, '101' FROM generate_series(10, 69) g")
    error = _fault(p)
    assert isinstance(error, SchemaFault) and error.sqlstate and error.finish_lsn
    assert (error.relation, error.column) == ("public.t", "v w")
    message_type = "UPDATE" if updates else "INSERT"
    place = f'message type "{message_type}" for replication target relation "public.t" column "v w" in transaction '
    assert place in (error.context or "")
    full = p.pubdb.value("SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attname = 'v w'")
    assert f"on the publisher {full}" in (error.detail or "")
    assert _ddl(error) == f'ALTER TABLE "public"."t" ALTER COLUMN "v w" TYPE {full};'
    p.subdb.execute(_ddl(error))
    p.apply()
    p.same("t", columns='id, v, "v w", w, n, b')


@pytest.mark.parametrize("kind", ["varchar", "numeric", "varbit"])
def test_a_narrower_type_is_found_among_binary_values(pair: MakePair, kind: str) -> None:
    wide, narrow, fits, refused = NARROWED[kind]
    p = pair(
        pub=f"CREATE TABLE t (id int PRIMARY KEY, v {wide}, w {wide})",
        sub=f"CREATE TABLE t (id int PRIMARY KEY, v {narrow}, w {narrow})",
        binary=True,
    )
    p.apply(f"INSERT INTO t VALUES (1, '{fits}', '{fits}')")
    p.pubdb.execute(f"INSERT INTO t VALUES (2, '{fits}', '{refused}')")
    error = _fault(p)
    assert (error.relation, error.column) == ("public.t", "w")
    p.subdb.execute(_ddl(error))
    p.apply()
    p.same("t")


def test_binary_values_of_another_type_come_with_its_alter_column(pair: MakePair) -> None:
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, v int8)",
        sub="CREATE TABLE t (id int PRIMARY KEY, v int4)",
        binary=True,
    )
    p.pubdb.execute("INSERT INTO t VALUES (1, 2)")
    error = _fault(p, "incorrect binary data format")
    assert error.column == "v"
    p.subdb.execute(_ddl(error))
    p.apply()
    p.same("t")


def test_a_value_that_is_refused_though_the_types_are_equal_gets_no_ddl(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", sub="ALTER TABLE t ADD CHECK (v <> 'bad')")
    p.subdb.execute(
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF new.v = 'worse' THEN EXECUTE 'SELECT $1::int' USING new.v; END IF; RETURN new; END $$;"
        "CREATE TRIGGER f BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f(); ALTER TABLE t ENABLE ALWAYS TRIGGER f"
    )
    p.pubdb.execute("INSERT INTO t VALUES (1, 'worse')")
    error = _fault(p, "invalid input syntax")
    assert not isinstance(error, SchemaFault) and error.column is None and not error.hint
    p.subdb.execute("DROP TRIGGER f ON t")
    p.apply()
    p.pubdb.execute("INSERT INTO t VALUES (2, 'bad')")
    error = _fault(p, "violates check constraint")
    assert not isinstance(error, SchemaFault) and error.column is None and not error.hint


def test_a_null_that_the_target_refuses_comes_with_its_drop_not_null(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", sub="ALTER TABLE t ALTER v SET NOT NULL")
    p.pubdb.execute("INSERT INTO t VALUES (1)")
    error = _fault(p, "violates not-null constraint")
    assert (error.relation, error.column) == ("public.t", "v")
    p.subdb.execute(_ddl(error))
    p.apply()
    p.same("t")


@pytest.mark.parametrize("storage", ["STORED", "VIRTUAL"])
def test_a_generated_column_of_the_target_comes_with_the_ddl_that_makes_it_ordinary(
    pair: MakePair, storage: str
) -> None:
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, g int)",
        sub=f"CREATE TABLE t (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) {storage})",
    )
    p.pubdb.execute("INSERT INTO t VALUES (1, 7)")
    error = _fault(p, 'has incompatible generated column: "g"')
    assert (error.relation, error.column) == ("public.t", "g")
    p.subdb.execute(_ddl(error))
    p.apply()
    p.same("t")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("", "has neither REPLICA IDENTITY index nor PRIMARY KEY"),
        ("; ALTER TABLE t ADD PRIMARY KEY (v)", "publisher did not send replica identity column expected"),
    ],
    ids=["no key", "another key"],
)
def test_a_target_that_cannot_find_its_rows_comes_with_the_publishers_key(
    pair: MakePair, keys: str, words: str
) -> None:
    p = pair(
        pub='CREATE TABLE t (id int, "k 2" int, v text, PRIMARY KEY (id, "k 2"))',
        sub=f'CREATE TABLE t (id int, "k 2" int, v text NOT NULL){keys}',
    )
    p.apply("INSERT INTO t VALUES (1, 1, 'x'), (1, 2, 'y')")
    p.pubdb.execute("UPDATE t SET v = v || '!'")
    error = _fault(p, words)
    assert error.relation == "public.t" and error.finish_lsn
    p.subdb.execute(_ddl(error))
    p.apply('DELETE FROM t WHERE "k 2" = 1')
    p.same("t")


def test_a_subscribed_table_that_was_renamed_comes_with_the_way_back(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", sub="CREATE SCHEMA s")
    p.subdb.execute("ALTER TABLE t RENAME TO elsewhere; ALTER TABLE elsewhere SET SCHEMA s")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    error = _fault(p, "does not exist")
    assert 'is "s.elsewhere" now' in (error.hint or "")
    p.subdb.execute(_ddl(error))
    p.apply()
    p.same("t")


def test_numbers_in_binary_are_read_as_numeric_sends_them(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int)")
    for text in ("0", "0.00", "1", "-1.5", "12345678.000900", "1e20", "-0.0000000001", "NaN", "Infinity", "-Infinity"):
        sent = p.subdb.value("SELECT numeric_send(%s::numeric)", text)
        assert str(read_numeric(sent).compare_total(Decimal(text))) == "0" or read_numeric(sent) == Decimal(text)


def test_a_table_that_is_subscribed_after_its_create_table_gets_what_comes_next(pair: MakePair) -> None:
    p = pair("CREATE TABLE u (id int)", names=[("public", "u")])
    p.pubdb.execute("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'x')")
    p.subdb.execute(_ddl(_fault(p, "does not exist")))
    oid = p.relid("t")
    subscriptions.add_relations(p.session, p.subid, [RelationState(oid, "public", "t", "i")])
    p.apply()
    p.sync("t")
    p.apply("UPDATE t SET v = 'y'")
    p.same("t")


def test_a_table_that_is_missing_after_a_long_run_keeps_nothing_back_that_came_before(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psycopg deallocates every prepared statement of a session in which it sees a ROLLBACK for the first time."""
    monkeypatch.setattr(batch_size, "BATCH_BYTES", 100)
    p = pair("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int)")
    for number in range(21):
        p.pubdb.execute(f"INSERT INTO t VALUES ({number})")
    p.pubdb.execute("INSERT INTO u VALUES (1)")
    p.subdb.execute("DROP TABLE u")
    with pytest.raises(SchemaFault) as caught:
        p.catch_up()
    assert caught.value.relation == "public.u"
    p.same("t")
