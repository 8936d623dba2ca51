"""Change sets come to what the same changes do one by one, or say that they do not."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from apply import set_cases
from apply.set_cases import Case, Shape
from protocol.encoding import encode, text_tuple

from pgsub.apply.conflicts.error_context import Place
from pgsub.apply.execute.executor import Executor
from pgsub.apply.rows import relation_cache as relations
from pgsub.apply.rows import set_fallback
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.rows.set_fallback import SetFallback
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.sets import keys as sets_keys
from pgsub.apply.sets import writer
from pgsub.apply.sets.change_set import ChangeSet
from pgsub.apply.sets.compaction import compact
from pgsub.apply.sets.writer import SetWriter
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common.subscription import Subscription
from pgsub.protocol import columnar
from pgsub.protocol.messages import Column, Delete, Insert, Message, Relation, Truncate, Tuple, Update
from pgsub.target.catalog.relation import describe
from pgsub.target.catalog.relation_map import RelationMap, map_relation
from pgsub.target.session import connect as target
from pgsub.target.sql.pipeline import StatementFailed

if TYPE_CHECKING:
    from fix_servers import Database

ROUNDS = 200 * max(1, int(os.environ.get("PGSUB_PROPERTY_SECS", "1")))
Rows = list[tuple[Any, ...]]


class Bench:
    """A target session with both ways to write, on whose tables nothing stays."""

    def __init__(self, session: psycopg.Connection) -> None:
        self.session = session
        self.rows = RowWriter(session, RelationCache(session, Subscription(1, "s", "", "", (), None), replica=True))
        self.sets = SetWriter(self.rows, replica=True)
        self.maps: dict[str, RelationMap] = {}

    def map(self, shape: Shape) -> RelationMap:
        if shape.name not in self.maps:
            table = describe(self.session, "public", shape.name)
            assert table is not None
            self.maps[shape.name] = map_relation(shape.relation, table)
        return self.maps[shape.name]

    def begin(self, case: Case) -> None:
        self.session.execute("BEGIN")
        self.rows.begin()
        for key in sorted(case.before):
            row = case.shape.tuple(key, [0] * len(case.shape.values), case.form)
            self.one_by_one([Insert(case.shape.relation.relid, row)], self.map(case.shape))
        self.session.execute(f"UPDATE public.{case.shape.name} SET local = 99".encode())

    def one_by_one(self, messages: list[Message], relation: RelationMap) -> None:
        transaction = RemoteTransaction(7, 0)
        for message in messages:
            match message:
                case Insert():
                    self.rows.insert(transaction, relation, encode(message))
                case Update():
                    self.rows.update(Place(transaction, "UPDATE", relation, message.new, message.old))
                case Delete():
                    self.rows.delete(Place(transaction, "DELETE", relation, None, message.old))
        self.rows.sync()

    def content(self, case: Case) -> Rows:
        return self.session.execute(f"SELECT t::text FROM public.{case.shape.name} t ORDER BY 1".encode()).fetchall()

    def scans(self, case: Case) -> Rows:
        query = "SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname = %s"
        return self.session.execute(query, (case.shape.name,)).fetchall()

    def serially(self, case: Case) -> tuple[Rows, int] | None:
        """The table afterwards and the number of rows that were missing, None where a row was in the way."""
        self.begin(case)
        try:
            self.one_by_one(case.messages, self.map(case.shape))
            return self.content(case), len(self.rows.conflicts.records)
        except StatementFailed as failure:
            return _in_the_way(failure)
        finally:
            self.session.execute("ROLLBACK")

    def as_sets(self, case: Case) -> tuple[Rows, writer.SetResult] | None:
        """The table afterwards, None where the target was not as it should be."""
        self.begin(case)
        self.sets.begin()
        relation = self.map(case.shape)
        try:
            scans = self.scans(case)
            outcome = self.sets.apply(case.payloads, {case.shape.relation.relid: relation}.__getitem__, in_stream=False)
            self.sets.finish()
            assert self.scans(case) == scans  # whatever the key's type, its index finds the rows
            self.one_by_one([case.messages[at] for at in outcome.left], relation)
            assert not self.rows.conflicts.records or outcome.left
            return self.content(case), outcome
        except SetFallback:
            return None
        except StatementFailed as failure:
            return _in_the_way(failure)
        finally:
            self.session.execute("ROLLBACK")


def _in_the_way(failure: StatementFailed) -> None:
    """Nothing else is expected to fail."""
    if failure.error.sqlstate != "23505":
        raise failure


@pytest.fixture
def bench(subdb: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(writer, "PAYS_FROM", 1)
    monkeypatch.setattr(set_fallback, "AVOID_SECONDS", 0)
    with closing(target.connect(subdb.conninfo, "test")) as session:
        session.execute("SET TimeZone = 'Europe/Vienna'")
        yield Bench(session)


def _traits(made: ChangeSet | str, case: Case) -> Iterator[str]:
    yield "binary" if case.form else "text"
    if isinstance(made, str):
        yield made
        return
    yield from (name for name in ("absent", "deletes", "inserts") if getattr(made, name) is not None)
    if made.effects < made.changes:
        yield "folded"
    if len(made.updates) > 1:
        yield "masks"
    if made.updates and not made.updates[0].columns:
        yield "nothing set"
    if made.inserts is not None and made.deletes is not None:
        yield "replaced, perhaps"


@pytest.mark.long
def test_sets_come_to_what_the_same_changes_do_one_by_one(bench: Bench) -> None:
    chance = random.Random(int(os.environ.get("PGSUB_SEED", "5")))
    shapes = [
        (set_cases.make(bench.session, number, types, full=full), full)
        for number, types in enumerate(set_cases.ALL)
        for full in (False, True)
    ]
    seen: Counter[str] = Counter()
    done: Counter[tuple[str, int]] = Counter()
    for turn in range(ROUNDS):
        shape, full = shapes[turn % len(shapes)]
        case = set_cases.draw(shape, chance, full=full)
        made = compact(bench.map(shape), columnar.decode(case.payloads, in_stream=False)[0])
        one_by_one, as_sets = bench.serially(case), bench.as_sets(case)
        seen.update(_traits(made, case))
        if as_sets is None:
            # it presupposes no more than holds where one by one nothing is missing and nothing in the way
            assert one_by_one is None or one_by_one[1] > 0, (turn, case)
            seen["deviated"] += 1
        else:
            done[shape.name.rstrip("f"), case.form] += not as_sets[1].left
            assert one_by_one is not None, (turn, case)
            assert as_sets[0] == one_by_one[0], (turn, case)
            assert one_by_one[1] == 0 or as_sets[1].left, (turn, case)
            seen["left" if as_sets[1].left else "done"] += 1
    for what in ("folded", "absent", "deletes", "inserts", "masks", "replaced, perhaps", "text", "binary", "deviated"):
        assert seen[what] > 5, seen
    assert set(+done) == {(shape.name.rstrip("f"), form) for shape, _ in shapes for form in (0, 1)}


def _map(session: psycopg.Connection, ddl: str, relid: int = 5, identity: str = "d") -> RelationMap:
    """Make table public.<word after CREATE TABLE> and map a relation with its very columns to it."""
    session.execute(ddl.encode())
    name = ddl.split()[2].removeprefix("public.")
    table = describe(session, "public", name)
    assert table is not None
    keys = table.identity or tuple(c.name for c in table.columns)
    columns = tuple(Column(int(c.name in keys), c.name, c.type_oid, c.typmod) for c in table.columns if not c.generated)
    return map_relation(Relation(relid, "public", name, identity, columns), table)


def _text(*values: str | None) -> Tuple:
    return text_tuple(None if value is None else value.encode() for value in values)


def _apply(bench: Bench, relations: dict[int, RelationMap | None], *messages: Message) -> writer.SetResult:
    """Apply messages inside a transaction that is open already."""
    bench.rows.begin()
    bench.sets.begin()
    outcome = bench.sets.apply([encode(message) for message in messages], relations.__getitem__, in_stream=False)
    bench.sets.finish()
    return outcome


def _rows(bench: Bench, query: str) -> Rows:
    return bench.session.execute(query.encode()).fetchall()


#: Column types; whether updates of them go as sets in text form; values, those behind None are refused.
CASTS: list[tuple[str, bool, list[str | None]]] = [
    ("char(3)", True, ["a", "ab ", "abc   ", None, "abcd"]),
    ("varchar(3)", True, ["a", "abc   ", None, "abcd"]),
    ("bit(3)", True, ["101", None, "10", "1010"]),
    ("varbit(3)", True, ["101", "1", None, "1010"]),
    ("numeric(4,1)", True, ["1.25", "NaN", None, "1234"]),
    ("timestamp(0)", True, ["2000-01-01 00:00:00.6"]),
    ("interval(0)", True, ["1 day 00:00:01.6"]),
    ("varchar(2)[]", True, ['{a,"b ",NULL}', None, "{abc}"]),
    ("public.mood", True, ["glad", None, "gla"]),
    ("public.pair", True, ["(1,x)", "(,)"]),
    ("x.citext", True, ["Ab"]),
    ("jsonb", True, ['{"a": [1, 2]}', None, "{"]),
    ("bytea", True, ["\\x0041", "a\\\\b"]),
    ("money", True, ["$1.50"]),
    ("public.short", False, ["abc", None, "abcd"]),
    ('"char"', False, ["a"]),
    ("name", False, ["a"]),
    ("regclass", False, ["pg_class"]),
]


def test_text_becomes_what_the_input_function_of_a_column_makes_of_it(bench: Bench) -> None:
    bench.session.execute("""
        CREATE SCHEMA x; CREATE EXTENSION citext SCHEMA x; CREATE TYPE public.mood AS ENUM ('glad');
        CREATE TYPE public.pair AS (a int, b text); CREATE DOMAIN public.short AS varchar(3)""")
    for number, (kind, fit, values) in enumerate(CASTS):
        relation = _map(bench.session, f"CREATE TABLE public.c{number} (id int PRIMARY KEY, v {kind})", 100 + number)
        assert relation.columns[1].from_text == fit, kind
        good = values[: values.index(None)] if None in values else values
        for value in values:
            if value is None:
                continue
            change = Update(100 + number, "", None, _text("1", value))
            ends = [_ending(bench, relation, change, as_set=as_set) for as_set in (False, True)]
            assert ends[0] == ends[1], (kind, value)
            assert (ends[0][0] == "") == (value in good), (kind, value, ends)


def _ending(bench: Bench, relation: RelationMap, change: Update, *, as_set: bool) -> tuple[str, Rows]:
    """SQLSTATE of the failure of an update, and what the row is then."""
    bench.session.execute(f"BEGIN; INSERT INTO public.{relation.target.name} VALUES (1)".encode())
    try:
        if as_set and relation.columns[1].from_text:
            outcome = _apply(bench, {change.relid: relation}, change)
            assert not outcome.left and outcome.changes == 1
        else:
            if as_set:
                assert _apply(bench, {change.relid: relation}, change).left == [0]
            bench.rows.begin()
            bench.one_by_one([change], relation)
        return "", _rows(bench, f"SELECT t::text FROM public.{relation.target.name} t")
    except StatementFailed as failure:
        return failure.error.sqlstate or "", []
    finally:
        bench.session.execute("ROLLBACK")


SERIAL = {
    "equality of key": "CREATE TABLE public.s (id numeric PRIMARY KEY, v int)",
    "equality of key column": "CREATE TABLE public.s (id char(3) PRIMARY KEY, v int)",
    "not deterministic": "CREATE TABLE public.s (id text COLLATE public.folding PRIMARY KEY, v int);"
    " UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'folding'",  # not every server has ICU
    "a collation or an operator class of its own": "CREATE TABLE public.s (id text NOT NULL, v int);"
    ' CREATE UNIQUE INDEX one ON public.s (id COLLATE "C"); ALTER TABLE public.s REPLICA IDENTITY USING INDEX one',
    "exclusion": "CREATE TABLE public.s (id int PRIMARY KEY, v int, EXCLUDE USING btree (v WITH =))",
    "deferrable": "CREATE TABLE public.s (id int PRIMARY KEY, v int UNIQUE DEFERRABLE)",
    "foreign key": "CREATE TABLE public.s (id int PRIMARY KEY, v int REFERENCES public.up);"
    " DO $$ BEGIN EXECUTE (SELECT format('ALTER TABLE public.s ENABLE ALWAYS TRIGGER %I', min(tgname)) FROM pg_trigger"
    "  WHERE tgrelid = 'public.s'::regclass); END $$",
    "partitioned": "CREATE TABLE public.s (id int PRIMARY KEY, v int) PARTITION BY HASH (id);"
    " CREATE TABLE public.p PARTITION OF public.s FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
    "neither a replica identity index nor": "CREATE TABLE public.s (id int, v int)",
    "does not send": "CREATE TABLE public.s (id int, v int, PRIMARY KEY (id, v))",
}


def test_what_sets_cannot_do_is_left_but_mere_inserts_are_copied(bench: Bench) -> None:
    bench.session.execute("CREATE TABLE public.up (id int PRIMARY KEY); INSERT INTO public.up VALUES (1), (2)")
    bench.session.execute('CREATE COLLATION public.folding FROM "C"')
    for reason, ddl in SERIAL.items():
        bench.session.execute("BEGIN")
        relation = _map(bench.session, ddl)
        if reason == "does not send":
            columns = tuple(column._replace(flags=int(column.name == "id")) for column in relation.remote.columns)
            relation = map_relation(relation.remote._replace(columns=columns), relation.target)
        inserts = [Insert(5, _text(str(n), str(n))) for n in (1, 2)]
        outcome = _apply(bench, {5: relation}, *inserts)
        assert (outcome.left, outcome.changes, outcome.folded, outcome.serial) == ([], 2, 0, {})
        outcome = _apply(bench, {5: relation}, *inserts, Update(5, "", None, _text("1", "2")))
        assert outcome.left == [0, 1, 2] and reason in outcome.serial[5], reason
        assert _rows(bench, "SELECT id::int, v FROM public.s ORDER BY 1") == [(1, 1), (2, 2)]
        bench.session.execute("ROLLBACK")


def test_a_block_stays_in_its_order_where_relations_see_each_other(bench: Bench) -> None:
    plain = _map(bench.session, "CREATE TABLE public.a (id int PRIMARY KEY)", 1)
    root = _map(bench.session, "CREATE TABLE public.r (id int PRIMARY KEY) PARTITION BY RANGE (id)", 2)
    part = _map(bench.session, "CREATE TABLE public.p PARTITION OF public.r DEFAULT", 3)
    noisy = _map(
        bench.session,
        """CREATE TABLE public.n (id int PRIMARY KEY);
        CREATE FUNCTION public.f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE TRIGGER t AFTER INSERT ON public.n EXECUTE FUNCTION public.f();
        ALTER TABLE public.n ENABLE ALWAYS TRIGGER t""",
        4,
    )
    other = _map(
        bench.session,
        """CREATE TABLE public.o (id int PRIMARY KEY); CREATE RULE u AS ON DELETE TO public.o DO ALSO NOTHING;
        ALTER TABLE public.o ENABLE ALWAYS RULE u""",
        5,
    )
    again = map_relation(plain.remote._replace(relid=6), plain.target)
    relations = {1: plain, 2: root, 3: part, 4: noisy, 5: other, 6: again}
    for relids, reason in (
        ([1, 2], ""),
        ([1, 3], ""),
        ([2, 3], "partition"),
        ([1, 4], "trigger"),
        ([1, 5], "rule"),
        ([1, 6], "are one"),
    ):
        bench.session.execute("BEGIN")
        messages = [Insert(relid, _text("1")) for relid in relids]
        outcome = _apply(bench, {relid: relations[relid] for relid in relids}, *messages)
        assert outcome.left == ([0, 1] if reason else []), relids
        assert all(reason in text for text in outcome.serial.values()) and len(outcome.serial) == (2 if reason else 0)
        bench.session.execute("ROLLBACK")
    bench.session.execute("BEGIN")
    insert = Insert(1, _text("1"))
    assert _apply(bench, {1: plain}, insert, Insert(2, _text("1"))).left == [0, 1]  # nobody knows what 2 is
    assert _apply(bench, {1: plain}, insert, Truncate((1,), False, False)).left == [0, 1]
    assert _apply(bench, {1: plain, 2: None}, Insert(2, _text("1"))) == writer.SetResult()
    bench.sets = SetWriter(bench.rows, replica=False)
    assert "replica" in _apply(bench, {1: plain}, insert).serial[1]
    bench.session.execute("ROLLBACK")


def test_relations_that_are_left_do_not_hold_back_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PAYS_FROM", 2)
    fit = _map(bench.session, "CREATE TABLE public.a (id int PRIMARY KEY, v text)", 1)
    unfit = _map(bench.session, "CREATE TABLE public.b (id numeric PRIMARY KEY, v text)", 2)
    small = _map(bench.session, "CREATE TABLE public.c (id int PRIMARY KEY, v text)", 3)
    bench.session.execute("INSERT INTO public.a VALUES (7, 'old')")
    messages: list[Message] = [
        Insert(3, _text("1", "x")),
        Insert(1, _text("1", "x")),
        Insert(2, _text("1", "x")),
        Update(1, "", None, _text("7", "new")),
        Update(2, "", None, _text("1", "y")),
        Insert(9, _text("1", "x")),
        Update(1, "", None, _text("1", None)),
    ]
    bench.session.execute("BEGIN")
    before = bench.rows.changes
    outcome = _apply(bench, {1: fit, 2: unfit, 3: small, 9: None}, *messages)
    assert outcome.left == [0, 2, 4] and list(outcome.serial) == [2]
    assert (outcome.changes, outcome.folded, bench.rows.changes - before) == (3, 1, 3)
    assert _rows(bench, "SELECT * FROM public.a ORDER BY id") == [(1, None), (7, "new")]
    assert _rows(bench, "SELECT count(*) FROM pg_settings WHERE name LIKE 'enable%' AND setting <> boot_val") == [(0,)]
    assert _rows(bench, "SHOW plan_cache_mode") == [("auto",)]
    bench.session.execute("ROLLBACK")


def test_a_set_that_misses_what_it_presupposes_says_so(bench: Bench) -> None:
    relation = _map(bench.session, "CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    bench.session.execute("INSERT INTO public.t VALUES (7, 'old')")
    there, gone = Update(5, "", None, _text("7", "x")), Delete(5, "K", _text("8", None))
    cases: dict[str, list[Message]] = {
        "update of 2 rows found 1": [there, Update(5, "", None, _text("8", "x"))],
        "delete of 1 rows found 0": [gone],
        "delete of 2 rows found 1": [gone, Insert(5, _text("8", "x")), Delete(5, "K", _text("7", None))],
        "present of 0 rows found 1": [Insert(5, _text("7", "x")), Delete(5, "K", _text("7", None))],
    }
    for found, messages in cases.items():
        bench.session.execute("BEGIN")
        with pytest.raises(SetFallback, match=f"public.t: {found}"):
            _apply(bench, {5: relation}, *messages)
        bench.session.execute("ROLLBACK")
    bench.session.execute("BEGIN")
    assert _apply(bench, {5: relation}, there).changes == 1  # it is judged by itself
    bench.session.execute("ROLLBACK")


def test_a_set_leaves_what_the_session_had_set_for_its_plans(bench: Bench) -> None:
    relation = _map(bench.session, "CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    bench.session.execute("INSERT INTO public.t VALUES (7, 'old'); SET enable_seqscan = off")
    bench.session.execute("BEGIN")
    _apply(bench, {5: relation}, Update(5, "", None, _text("7", "x")))
    assert _rows(bench, "SHOW enable_seqscan") == [("off",)]
    assert _rows(bench, "SHOW enable_hashjoin") == [("on",)]
    bench.session.execute("ROLLBACK")


def test_a_relation_goes_row_by_row_for_a_while_after_its_sets_deviated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _map(bench.session, "CREATE TABLE public.a (id int PRIMARY KEY, v int UNIQUE)", 1)
    two = _map(bench.session, "CREATE TABLE public.b (id int PRIMARY KEY, v int)", 2)
    bench.session.execute("INSERT INTO public.a VALUES (1, 10), (2, 20)")
    places: list[Message] = [Update(1, "", None, _text("1", "20")), Update(1, "", None, _text("2", "10"))]
    taken: list[Message] = [Insert(1, _text("3", "10"))]
    missing: list[Message] = [Delete(1, "K", _text("9", None))]
    for messages in (places, taken, missing):
        bench.sets = SetWriter(bench.rows, replica=True)
        for seconds in (0, 60):
            monkeypatch.setattr(set_fallback, "AVOID_SECONDS", seconds)
            bench.session.execute("BEGIN")
            with pytest.raises((SetFallback, StatementFailed)):
                _apply(bench, {1: one}, *messages)
            bench.session.execute("ROLLBACK")
        bench.session.execute("BEGIN")
        outcome = _apply(bench, {1: one, 2: two}, *messages, Insert(2, _text("1", "1")))
        assert outcome.left == list(range(len(messages))) and "a moment ago" in outcome.serial[1]
        bench.session.execute("ROLLBACK")


def test_keys_with_one_hash_are_told_from_each_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    relation = _map(bench.session, "CREATE TABLE public.t (id text PRIMARY KEY, v text)")
    updates = [Update(5, "", None, _text("x" * 20 + end, "v")) for end in ("a", "b")]
    payloads = [encode(message) for message in updates]
    made = compact(relation, columnar.decode(payloads, in_stream=False)[0])
    assert isinstance(made, ChangeSet) and made.effects == 2
    monkeypatch.setattr(sets_keys, "mix", lambda codes, words: codes)
    assert compact(relation, columnar.decode(payloads, in_stream=False)[0]) == "two keys have one hash"
    made = compact(relation, columnar.decode([payloads[0]] * 2, in_stream=False)[0])
    assert isinstance(made, ChangeSet) and (made.changes, made.effects) == (2, 1)


def test_keys_that_differ_in_their_length_alone_are_different(bench: Bench) -> None:
    relation = _map(bench.session, "CREATE TABLE public.t (a bytea, b bytea, v int, PRIMARY KEY (a, b))")
    for sizes in ([0, 1, 2, 3], [8, 9, 10, 17]):
        rows = [Tuple(b"bbn", (bytes(one), bytes(other), None)) for one in sizes for other in sizes]
        payloads = [encode(Update(5, "", None, row)) for row in rows]
        made = compact(relation, columnar.decode(payloads, in_stream=False)[0])
        assert isinstance(made, ChangeSet) and made.effects == len(rows)


def test_mere_inserts_need_no_key_and_keep_their_order(bench: Bench) -> None:
    relation = _map(bench.session, "CREATE TABLE public.t (v text)")
    bench.session.execute("ALTER TABLE public.t ADD n serial")
    bench.session.execute("BEGIN")
    values = ["b", "a", "c", "a", None]
    assert not _apply(bench, {5: relation}, *(Insert(5, _text(value)) for value in values)).left
    assert [value for (value,) in _rows(bench, "SELECT v FROM public.t ORDER BY n")] == values
    bench.session.execute("ROLLBACK")


def test_inserts_among_other_changes_keep_their_order(bench: Bench) -> None:
    relation = _map(bench.session, "CREATE TABLE public.t (id int PRIMARY KEY, v text)")
    bench.session.execute("ALTER TABLE public.t ADD n serial; INSERT INTO public.t VALUES (1, 'old'), (5, 'old')")
    bench.session.execute("BEGIN")
    messages: list[Message] = [
        Insert(5, _text("3", "x")),
        Delete(5, "K", _text("5", None)),
        Insert(5, _text("2", "x")),
        Insert(5, _text("5", "new")),
        Update(5, "", None, _text("3", "later")),
    ]
    assert not _apply(bench, {5: relation}, *messages).left
    rows = [(1, "old"), (3, "later"), (2, "x"), (5, "new")]
    assert _rows(bench, "SELECT id, v FROM public.t ORDER BY n") == rows
    bench.session.execute("ROLLBACK")


def test_sets_are_made_as_the_role_that_acts(subdb: Database, bench: Bench) -> None:
    role = f"{subdb.name}_owner"
    subdb.execute(f"CREATE ROLE {role}; CREATE TABLE t (id int PRIMARY KEY, v text)")
    subdb.execute(f"ALTER TABLE t ADD who text DEFAULT current_user; ALTER TABLE t OWNER TO {role}")
    table = describe(bench.session, "public", "t")
    assert table is not None
    columns = (Column(1, "id", 23, -1), Column(0, "v", 25, -1))
    relation = map_relation(Relation(5, "public", "t", "d", columns), replace(table, acts_as=role))
    bench.session.execute("BEGIN")
    bench.rows.begin()
    one = [Insert(5, _text("1", "x")), Insert(5, _text("2", "x"))]
    two = [Update(5, "", None, _text("1", "y")), Delete(5, "K", _text("2", None)), Insert(5, _text("3", "x"))]
    for messages in (one, two):
        assert not bench.sets.apply([encode(m) for m in messages], {5: relation}.__getitem__, in_stream=False).left
    bench.sets.finish()
    assert _rows(bench, "SELECT current_user::text") == [("postgres",)]
    assert _rows(bench, "SELECT * FROM public.t ORDER BY 1") == [(1, "y", role), (3, "x", role)]
    bench.session.execute("ROLLBACK")
    subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_what_no_statement_can_express_is_left(bench: Bench) -> None:
    name = _map(bench.session, "CREATE TABLE public.n (id int PRIMARY KEY, v text)", 1)
    arrays = _map(bench.session, "CREATE TABLE public.a (id int PRIMARY KEY, v int[])", 2)
    always = _map(bench.session, "CREATE TABLE public.i (id int PRIMARY KEY, v int GENERATED ALWAYS AS IDENTITY)", 3)
    more = ", ".join(f"c{n} int" for n in range(5))
    wide = _map(bench.session, f"CREATE TABLE public.w (id int PRIMARY KEY, {more})", 4)
    only = _map(bench.session, "CREATE TABLE public.o (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY)", 5)
    binary = b"\0\0\0\1"
    masks = [Tuple(b"t" + bytes(b"nu"[n >> at & 1] for at in range(5)), (b"%d" % n, *[None] * 5)) for n in range(17)]
    bench.session.execute("BEGIN")
    for relation, rows, reason in (
        (name, [_text("1", "x"), Tuple(b"bt", (binary, b"x"))], "text and in binary"),
        (name, [_text("1", "x"), Tuple(b"tb", (b"2", b"x"))], "text and in binary"),
        (name, [_text(None, "x")], "without a value"),
        (name, [Tuple(b"ut", (None, b"x"))], "without a value"),
        (name, [_text("1")], "a different number of columns"),
        (arrays, [Tuple(b"bb", (binary, b"\0" * 12))], "no arrays"),
        (always, [_text("1", "2")], "GENERATED ALWAYS"),
        (wide, masks, "different sets of columns"),
        (only, [_text("1")], "nothing to set"),
    ):
        relid = relation.remote.relid
        outcome = _apply(bench, {relid: relation}, *(Update(relid, "", None, row) for row in rows))
        assert outcome.left == list(range(len(rows))) and reason in outcome.serial[relid], outcome
    for kind in "KO":
        move = Update(1, kind, _text("1", "x"), _text("2", "x"))
        assert "changes a key" in _apply(bench, {1: name}, move, Delete(1, "K", _text("1", None))).serial[1]
    outcome = _apply(bench, {1: name}, Insert(1, _text("1", "x")), Insert(1, Tuple(b"tb", (b"2", b"x"))))
    assert "text and in binary" in outcome.serial[1]
    bench.session.execute("ROLLBACK")


def test_an_update_that_sets_nothing_still_looks_for_its_row(bench: Bench) -> None:
    relation = _map(bench.session, "CREATE TABLE public.o (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY)")
    bench.session.execute("BEGIN; INSERT INTO public.o DEFAULT VALUES")
    bench.rows.begin()
    bench.one_by_one([Update(5, "", None, _text("1"))], relation)
    assert not bench.rows.conflicts.records
    bench.one_by_one([Update(5, "", None, _text("2"))], relation)
    assert len(bench.rows.conflicts.records) == 1
    bench.session.execute("ROLLBACK")


def test_ddl_on_the_target_is_noticed_when_a_transaction_begins(
    subdb: Database, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relations, "CHECK_SECONDS", 0)
    subdb.execute("""CREATE TABLE t (id int PRIMARY KEY, v int, w int NOT NULL UNIQUE); CREATE TABLE o (id int);
        CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE leaf PARTITION OF r DEFAULT;
        CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'""")
    cache = RelationCache(bench.session, Subscription(1, "s", "", "", (), None), replica=True)
    executor = Executor(bench.session, cache)
    oids = {}
    for relid, name in enumerate(("t", "r")):
        table = describe(bench.session, "public", name)
        assert table is not None
        oids[relid] = table.oid
        columns = tuple(Column(int(c.name == "id"), c.name, c.type_oid, -1) for c in table.columns)
        cache.learn(Relation(relid, "public", name, "d", columns))

    def known(relid: int) -> RelationMap | None:
        """The map, if it is still what it was; made anew if not."""
        executor.begin(lambda *_: None)
        before = cache.known(relid)
        cache.make(relid, oids[relid])
        return before

    for relid in (0, 1, 0, 1):
        known(relid)
    assert known(0) is not None and known(1) is not None
    on_other = "CREATE TRIGGER x AFTER INSERT ON o EXECUTE FUNCTION f()"
    for nothing in ("INSERT INTO t VALUES (1, 1, 1)", "VACUUM ANALYZE t", on_other):
        subdb.execute(nothing)
        assert known(0) is not None and known(1) is not None, nothing
    for relid, ddl in (
        (0, "CREATE TRIGGER x AFTER INSERT ON t EXECUTE FUNCTION f()"),
        (0, "ALTER TABLE t ENABLE ALWAYS TRIGGER x"),
        (0, "DROP TRIGGER x ON t"),
        (0, "CREATE RULE x AS ON DELETE TO t DO ALSO NOTHING"),
        (0, "ALTER TABLE t ADD UNIQUE (v) DEFERRABLE"),
        (0, "ALTER TABLE t REPLICA IDENTITY USING INDEX t_w_key"),
        (0, "ALTER TABLE t ALTER v TYPE bigint"),
        (0, "ALTER TABLE t ADD x int"),
        (0, "ALTER TABLE t ENABLE ROW LEVEL SECURITY"),
        (1, "CREATE TRIGGER x AFTER INSERT ON leaf EXECUTE FUNCTION f()"),
        (1, "CREATE TABLE more PARTITION OF r FOR VALUES FROM (1) TO (2)"),
    ):
        subdb.execute(ddl)
        assert known(1 - relid) is not None and known(relid) is None, ddl
    subdb.execute("ALTER TABLE r RENAME TO q; CREATE TABLE r (id int)")
    executor.begin(lambda *_: None)
    assert cache.known(1) is None and cache.oid(1) is None


def test_the_look_for_ddl_takes_no_larger_share_of_the_time_with_more_tables(
    subdb: Database, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looks = [1000.0], list[int]()
    monkeypatch.setattr(relations, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(relations, "CHECKED_TABLES", 2)
    subdb.execute("; ".join(f"CREATE TABLE t{relid} (id int)" for relid in range(6)))
    cache = RelationCache(bench.session, Subscription(1, "s", "", "", (), None), replica=True)

    def looked(seconds: float) -> int:
        """How often it looked, asked ten times a second."""
        before = len(looks)
        for _ in range(round(seconds * 10)):
            clock[0] += 0.1
            cache.notice_ddl()
        return len(looks) - before

    read = relations.ddl_watch.definition_versions

    def counted(connection: psycopg.Connection, oids: Collection[int]) -> dict[int, tuple[int, str]]:
        looks.append(len(oids))
        return read(connection, oids)

    for relid in range(6):
        cache.learn(Relation(relid, "public", f"t{relid}", "d", (Column(0, "id", 23, -1),)))
        cache.make(relid, subdb.value("SELECT %s::regclass::oid::bigint", f"public.t{relid}"))
        if relid == 1:
            with monkeypatch.context() as counting:
                counting.setattr(relations.ddl_watch, "definition_versions", counted)
                assert 10 <= looked(12) <= 12
    monkeypatch.setattr(relations.ddl_watch, "definition_versions", counted)
    assert 3 <= looked(12) <= 4 and looks[-1] == 6
    subdb.execute("ALTER TABLE t3 ADD x int")
    assert looked(3.2) == 1 and cache.known(3) is None and cache.known(4) is not None
