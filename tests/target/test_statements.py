"""Tables as apply sees them, statements in a pipeline, and runs of inserts as COPY."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol.encoding import encode, text_tuple
from psycopg import sql

from pgsub.common.errors import TargetUnavailable
from pgsub.protocol import columnar, columnar_copy
from pgsub.protocol.messages import Column, Insert, Relation
from pgsub.tablesync.sequences import reading
from pgsub.target.catalog.relation import describe
from pgsub.target.session import connect as target
from pgsub.target.sql import copy_from, prepared_statements
from pgsub.target.sql.pipeline import WINDOW, Pipeline, StatementFailed
from pgsub.target.sql.statement_builder import Statement

if TYPE_CHECKING:
    from fix_servers import Database

Connect = Callable[..., psycopg.Connection]
INSERT = Statement(sql.SQL("INSERT INTO public.t VALUES ($1, $2)").format(), (23, 25), ())
UPDATE = Statement(sql.SQL("UPDATE public.t SET v = $2 WHERE id >= $1").format(), (23, 25), ())


def _table(connect: Connect) -> psycopg.Connection:
    session = connect()
    session.execute("CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    return session


def _rows(session: psycopg.Connection) -> int:
    row = session.execute("SELECT count(*) FROM public.t").fetchone()
    assert row is not None
    return int(row[0])


def test_every_statement_gets_its_own_row_count(connect: Connect) -> None:
    session = _table(connect)
    pipeline, counts = Pipeline(session), []
    for number in range(5):
        pipeline.send(INSERT, (b"%d" % number, None), (0, 0), number, lambda n, at=number: counts.append((at, n)))
    for number in (3, 9, 0):
        pipeline.send(UPDATE, (b"%d" % number, b"x"), (0, 0), number, lambda n, at=number: counts.append((at, n)))
    pipeline.sync()
    assert counts == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (9, 0), (0, 5)]
    pipeline.sync()  # nothing to wait for


def test_the_session_keeps_no_more_prepared_statements_than_it_may(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_statements, "PREPARED", 100)
    session = _table(connect)
    shapes = [
        Statement(sql.SQL("INSERT INTO public.t VALUES ($1, {})").format(sql.Literal(f"v{n}")), (23,), ())
        for n in range(40)
    ]
    pipeline, counts = Pipeline(session), []
    for number in range(400):
        pipeline.send(shapes[number % 40], (b"%d" % number,), (0,), number, counts.append)
    pipeline.sync()
    assert counts == [1] * 400
    kept = session.execute("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'pgsub%'").fetchone()
    assert kept is not None and 5 < kept[0] <= 100 // 9
    wide = Statement(sql.SQL("SELECT $1::text").format(), (25,) * 1000, ())
    pipeline.send(wide, (b"x",) * 1000, (0,) * 1000, None)  # alone it costs more
    pipeline.send(INSERT, (b"1000", None), (0, 0), None, counts.append)
    pipeline.sync()
    assert len(counts) == 401
    assert session.execute("SELECT v FROM public.t WHERE id = 39").fetchone() == ("v39",)


@pytest.mark.parametrize("size", [10, 200_000])
def test_more_than_the_sockets_hold_goes_through(connect: Connect, size: int) -> None:
    session = _table(connect)
    pipeline, counted = Pipeline(session), []
    total = WINDOW * 3 + 7 if size < 1000 else 60
    for number in range(total):
        pipeline.send(INSERT, (b"%d" % number, b"x" * size), (0, 0), number, counted.append)
    pipeline.sync()
    assert counted == [1] * total and _rows(session) == total


@pytest.mark.parametrize("bad", [0, 100, WINDOW - 1, WINDOW, WINDOW * 2 + 5])
def test_a_failure_names_its_statement_and_the_session_goes_on(connect: Connect, bad: int) -> None:
    session = _table(connect)
    pipeline = Pipeline(session)
    session.execute("BEGIN")
    for number in range(WINDOW * 3):
        value = b"%d" % (number if number != bad else 10**10)
        pipeline.send(INSERT, (value, b"x"), (0, 0), f"statement {number}")
    with pytest.raises(StatementFailed) as caught:
        pipeline.sync()
    assert caught.value.tag == f"statement {bad}"
    assert isinstance(caught.value.error, psycopg.errors.NumericValueOutOfRange)
    session.execute("ROLLBACK")
    assert _rows(session) == 0
    pipeline.send(INSERT, (b"1", b"x"), (0, 0), None)
    pipeline.sync()
    assert _rows(session) == 1


def test_failures_leave_alone_what_psycopg_prepared_in_the_session(connect: Connect) -> None:
    session = _table(connect)
    session.prepare_threshold = 5  # psycopg's default, which sessions on the target switch off
    pipeline = Pipeline(session)
    for _ in range(4):
        for _ in range(10):
            assert _rows(session) == 0  # psycopg prepares what it is asked often
        for number in (1, 2, 1):
            pipeline.send(INSERT, (b"%d" % number, None), (0, 0), number)
        with pytest.raises(StatementFailed, match="duplicate key"):
            pipeline.sync()
        names = {name for (name,) in session.execute("SELECT name FROM pg_prepared_statements").fetchall()}
        assert names and not any(name.startswith("pgsub_") for name in names)


def test_a_statement_that_cannot_be_prepared_is_named(connect: Connect) -> None:
    session = _table(connect)
    pipeline = Pipeline(session)
    pipeline.send(INSERT, (b"1", b"x"), (0, 0), "good")
    pipeline.send(Statement(sql.SQL("INSERT INTO public.nowhere VALUES (1)").format(), (), ()), (), (), "bad")
    with pytest.raises(StatementFailed) as caught:
        pipeline.sync()
    assert caught.value.tag == "bad" and isinstance(caught.value.error, psycopg.errors.UndefinedTable)


def test_a_lost_session_is_the_targets_absence(connect: Connect) -> None:
    session, killer = _table(connect), connect()
    pipeline = Pipeline(session)
    pipeline.send(INSERT, (b"1", b"x"), (0, 0), None)
    pipeline.sync()
    killer.execute("SELECT pg_terminate_backend(%s, 5000)", (session.info.backend_pid,))

    def work() -> None:
        for number in range(2, WINDOW * 2):
            pipeline.send(INSERT, (b"%d" % number, b"x"), (0, 0), None)
        pipeline.sync()

    with pytest.raises((TargetUnavailable, psycopg.OperationalError)):
        work()


@settings(
    deadline=None, max_examples=int(os.environ.get("PGSUB_EXAMPLES", "30")), suppress_health_check=list(HealthCheck)
)
@given(
    st.lists(
        st.tuples(*[st.one_of(st.none(), st.text(st.characters(codec="utf-8", exclude_characters="\0")))] * 3),
        min_size=1,
        max_size=40,
    )
)
def test_copied_text_is_the_same_text(connect: Connect, rows: list[tuple[str | None, ...]]) -> None:
    session = connect()
    session.execute("CREATE TEMP TABLE c (a text, b text, c text)")
    relation = Relation(1, "public", "c", "d", tuple(Column(0, name, 25, -1) for name in "abc"))
    tuples = [text_tuple([None if v is None else v.encode() for v in row]) for row in rows]
    [changes], _ = columnar.decode([encode(Insert(relation.relid, one)) for one in tuples], False)
    for binary in (False, True):
        copy_from.run(session, _copy(binary), columnar_copy.copy_stream(changes, binary=binary))
    found = session.execute("SELECT a, b, c FROM c ORDER BY ctid").fetchall()
    session.execute("DROP TABLE c")
    assert found == rows + rows


def _copy(binary: bool) -> sql.Composed:
    return sql.SQL("COPY pg_temp.c FROM STDIN{}").format(sql.SQL(" WITH (FORMAT binary)" if binary else ""))


def test_sessions_are_what_apply_relies_on(subdb: Database) -> None:
    for name, value in (("datestyle", "SQL, DMY"), ("search_path", "nowhere"), ("statement_timeout", "200ms")):
        subdb.execute(f"ALTER DATABASE {subdb.name} SET {name} = '{value}'")
    subdb.execute(f"ALTER DATABASE {subdb.name} SET default_transaction_isolation = 'serializable'")
    subdb.execute(f"ALTER DATABASE {subdb.name} SET default_transaction_read_only = on")
    with target.connect(subdb.conninfo, target.SessionName(5, "apply", 3), synchronous_commit="off") as session:

        def show(name: str) -> str:
            return str(session.execute(f"SHOW {name}".encode()).fetchone()[0])  # type: ignore[index]

        assert target.is_replica(session) and show("search_path") == ""
        assert show("datestyle") == "ISO, DMY" and show("statement_timeout") == "0"
        assert show("transaction_isolation") == "read committed" and show("transaction_read_only") == "off"
        assert show("application_name") == "pgsub 5 apply 3" and show("synchronous_commit") == "off"
    subdb.execute(f"ALTER DATABASE {subdb.name} RESET ALL")


@pytest.mark.parametrize("place", ["a session without views", "a session that looks at sequences"])
def test_a_view_that_took_the_place_of_a_relation_is_not_evaluated(connect: Connect, place: str) -> None:
    connect().execute("CREATE VIEW public.v AS SELECT 1::bigint AS last_value, true AS is_called")
    session = connect(views=place != "a session without views")
    if session.execute("SELECT 1 FROM pg_settings WHERE name = 'restrict_nonsystem_relation_kind'").fetchone():
        if place == "a session that looks at sequences":
            reading.prepare(session)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="access to non-system view"):
            reading.positions(session, [("public", "v")])


@pytest.mark.parametrize(
    ("ddl", "identity", "deferrable"),
    [
        ("CREATE TABLE public.t (a int, b int)", (), False),
        ("CREATE TABLE public.t (a int, b int, PRIMARY KEY (b, a))", ("b", "a"), False),
        ("CREATE TABLE public.t (a int, b int, PRIMARY KEY (a) INCLUDE (b))", ("a",), False),
        ("CREATE TABLE public.t (a int PRIMARY KEY DEFERRABLE, b int)", ("a",), True),
        (
            "CREATE TABLE public.t (a int PRIMARY KEY, b int NOT NULL); CREATE UNIQUE INDEX i ON public.t (b);"
            "ALTER TABLE public.t REPLICA IDENTITY USING INDEX i",
            ("b",),
            False,
        ),
        ("CREATE TABLE public.t (a int PRIMARY KEY, b int); ALTER TABLE public.t REPLICA IDENTITY FULL", ("a",), False),
        ("CREATE TABLE public.t (a int PRIMARY KEY); ALTER TABLE public.t REPLICA IDENTITY NOTHING", ("a",), False),
        ("CREATE TABLE public.t (a int UNIQUE NOT NULL, b int)", (), False),
        ("CREATE TABLE public.t (a int, b int, PRIMARY KEY (a, b)) PARTITION BY HASH (b)", ("a", "b"), False),
    ],
)
def test_rows_are_found_by_the_identity_index_else_the_primary_key(
    connect: Connect, ddl: str, identity: tuple[str, ...], deferrable: bool
) -> None:
    session = connect()
    session.execute(ddl.encode())
    found = describe(session, "public", "t")
    assert found is not None and (found.identity, found.deferrable) == (identity, deferrable)


@pytest.mark.parametrize(
    ("kind", "operator"),
    [
        *[(kind, "pg_catalog.=") for kind in ("int", "text", "varchar(5)", "char(3)", "name", '"char"', "numeric")],
        *[(kind, "pg_catalog.=") for kind in ("int[]", "public.mood", "int4range", "int4multirange", "public.pair")],
        *[(kind, "pg_catalog.=") for kind in ("jsonb", "bytea", "cidr", "money", "regclass", "public.word", "bit(3)")],
        *[(kind, None) for kind in ("json", "point", "box", "circle", "polygon", "path", "line", "jsonpath")],
        ("x.citext", "x.="),
        ("public.loud", "x.="),
        ("x.citext[]", "pg_catalog.="),
        ("lseg", None),
        ("xid", "pg_catalog.="),
        ("tsvector", "pg_catalog.="),
    ],
)
def test_equality_is_that_of_the_default_operator_class(connect: Connect, kind: str, operator: str | None) -> None:
    session = connect()
    session.execute(
        "CREATE SCHEMA x; CREATE EXTENSION citext SCHEMA x; CREATE TYPE public.mood AS ENUM ('a');"
        "CREATE TYPE public.pair AS (a int); CREATE DOMAIN public.word AS varchar(9);"
        "CREATE DOMAIN public.quiet AS x.citext; CREATE DOMAIN public.loud AS public.quiet"
    )
    session.execute(f"CREATE TABLE public.t (v {kind})".encode())
    found = describe(session, "public", "t")
    assert found is not None and found.columns[0].equality == operator


def test_what_fires_depends_on_the_sessions_role_and_on_partitions(connect: Connect) -> None:
    session = connect()
    session.execute(
        "CREATE FUNCTION public.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';"
        "CREATE TABLE public.t (a int) PARTITION BY LIST (a); CREATE TABLE public.t1 PARTITION OF public.t DEFAULT;"
        "CREATE TRIGGER x BEFORE INSERT ON public.t1 FOR EACH ROW EXECUTE FUNCTION public.f()"
    )

    def fires(replica: bool) -> bool:
        found = describe(session, "public", "t", replica=replica)
        assert found is not None
        return found.fires

    assert (fires(True), fires(False)) == (False, True)
    session.execute("ALTER TABLE public.t1 ENABLE REPLICA TRIGGER x")
    assert (fires(True), fires(False)) == (True, False)
    session.execute("ALTER TABLE public.t1 ENABLE ALWAYS TRIGGER x")
    assert (fires(True), fires(False)) == (True, True)
    session.execute("ALTER TABLE public.t1 DISABLE TRIGGER x")
    assert (fires(True), fires(False)) == (False, False)


@pytest.mark.parametrize(
    ("when", "keeps"),
    [("BEFORE DELETE", True), ("BEFORE UPDATE OR DELETE", True), ("AFTER DELETE", False), ("BEFORE UPDATE", False)],
)
def test_only_a_row_trigger_before_a_delete_may_keep_the_row(connect: Connect, when: str, keeps: bool) -> None:
    session = connect()
    session.execute(
        "CREATE FUNCTION public.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TABLE public.t (a int) PARTITION BY LIST (a); CREATE TABLE public.t1 PARTITION OF public.t DEFAULT;"
    )
    session.execute(f"CREATE TRIGGER x {when} ON public.t1 FOR EACH ROW EXECUTE FUNCTION public.f()".encode())
    session.execute("CREATE TRIGGER y BEFORE DELETE ON public.t1 FOR EACH STATEMENT EXECUTE FUNCTION public.f()")
    found = describe(session, "public", "t", replica=False)
    assert found is not None and (found.fires, found.fires_before_delete) == (True, keeps)


def test_a_table_that_is_locked_can_be_described(connect: Connect) -> None:
    session, other = _table(connect), connect()
    other.execute("BEGIN")
    other.execute("LOCK TABLE public.t IN ACCESS EXCLUSIVE MODE")
    session.execute("SET lock_timeout = '2s'")
    assert describe(session, "public", "t") is not None
    assert describe(session, "public", "nowhere") is None
