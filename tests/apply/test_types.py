"""Values of every kind arrive as they were sent, as text and as binary, by single statements and by COPY."""

from __future__ import annotations

import random
import struct

import pytest
from fix_pair import MakePair, Pair

from pgsub.apply.rows import insert_run

TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'it''s', 'a,"b\\c');
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN positives AS positive[];
CREATE TYPE pair AS (a int, "B b" text, c mood);
CREATE TYPE textrange AS RANGE (subtype = text, multirange_type_name = textranges);
CREATE SCHEMA x;
CREATE EXTENSION hstore SCHEMA x;
CREATE EXTENSION citext SCHEMA x;
CREATE EXTENSION ltree SCHEMA x;
CREATE EXTENSION cube SCHEMA x;
"""

VALUES = {
    "smallint": ["-32768", "0", "32767"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "boolean": ["t", "f"],
    "numeric": [
        "NaN",
        "Infinity",
        "-Infinity",
        "0",
        "-0.000",
        "1e131071",
        "1e-16383",
        "123456789012345678901234567890.5",
    ],
    "numeric(6,-2)": ["99999900", "-100"],
    "real": ["NaN", "Infinity", "-0", "1.1754944e-38", "3.4028235e38", "0.1"],
    "double precision": ["NaN", "-Infinity", "-0", "5e-324", "1.7976931348623157e308", "0.1", "0.30000000000000004"],
    "money": ["-92233720368547758.08", "0.01"],
    "text": ["", " ", "\\N", "\\", "\t\r\n\b\f\v", "NULL", '"', "'", "ünïcödé 😀", "\u2028", "a" * 5000],
    "varchar(7)": ["", "  x  ", "\\.", "1234567"],
    "char(5)": ["", "ab", "ab   "],
    '"char"': ["a", "\\303", ""],
    "name": ["x" * 63],
    "bytea": ["", "\\x00ff5c0a090d27", "\\x" + "00" * 3000],
    "date": ["infinity", "-infinity", "4713-01-01 BC", "0001-12-31 BC", "5874897-12-31", "2000-02-29"],
    "time": ["00:00:00", "24:00:00", "23:59:59.999999"],
    "timetz": ["00:00:00+15:59", "24:00:00-15:59", "12:00:00.000001+00"],
    "timestamp": ["infinity", "-infinity", "4713-01-01 00:00:00 BC", "294276-12-31 23:59:59.999999"],
    "timestamptz": ["infinity", "-infinity", "4713-01-01 00:00:00+00 BC", "2021-03-28 02:30:00 Europe/Berlin"],
    "interval": ["infinity", "-infinity", "-1 year 2 mons -3 days 04:05:06.789", "178000000 years", "0"],
    "bit(5)": ["10101", "00000"],
    "bit varying": ["", "1", "1" * 100],
    "uuid": ["00000000-0000-0000-0000-000000000000", "FFFFFFFF-ffff-4fff-bfff-ffffffffffff"],
    "inet": ["::1", "10.0.0.1/8", "fe80::1/64", "255.255.255.255"],
    "cidr": ["10.0.0.0/8", "::/0"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "jsonb": ['{"a": [1, 2.50, null, "x\\ny\\u00e9\\\\"], "": {}}', "null", '"\\""', "1e400"],
    "pg_lsn": ["0/0", "FFFFFFFF/FFFFFFFF"],
    "xid8": ["18446744073709551615"],
    "oid": ["4294967295"],
    "tsvector": ["'a':1A 'fat''s':2,3C", ""],
    "tsquery": ["'a' & !'b' <2> 'c':*A"],
    "int4range": ["empty", "(,)", "[1,5)", "[1,)"],
    "numrange": ["[NaN,NaN]", "(-Infinity,1.50]"],
    "tstzrange": ['["2020-01-01 00:00:00+00",infinity)', '(,"4713-01-01 00:00:00+00 BC"]'],
    "textrange": ['["a b","c,d"]', '["","\\"\\\\")'],
    "int8multirange": ["{}", "{[1,3),[5,7),[9,)}"],
    "textranges": ["{[a,b),[c,d)}"],
    "int[]": ["{}", "{1,NULL,-3}", "[2:3]={7,8}", "[-1:0][5:6]={{1,2},{3,4}}", "{{1,2},{3,4}}"],
    "text[]": ["{}", '{"",NULL,"NULL","a,b","c\\"d","e\\\\f","{"}', '{"line\nbreak"}'],
    "mood": ["sad", "it's", 'a,"b\\c'],
    "mood[]": ['{sad,"a,\\"b\\\\c"}'],
    "positive": ["1", "2147483647"],
    "positives": ["{1,2}", "{}"],
    "pair": ["(1,,)", '(,"a,""b",sad)', '(7,"(x)\\\\","it\'s")'],
    "pair[]": ['{"(1,x,sad)",NULL}'],
    "x.hstore": ['"a"=>"1", "b c"=>NULL, "d\\"e"=>"\\\\"', ""],
    "x.citext": ["MiXed", ""],
    "x.ltree": ["Top.Science", ""],
    "x.cube": ["(1, 2, 3),(4, 5, 6)"],
}
#: Have no equality or no binary form, or lose their key when written twice.
NO_KEY = {
    "json": ['{"b": 1,  "a": "\\u0041\\n", "b": 2}', "[]", '"\\\\"'],
    "point": ["(NaN,Infinity)", "(1e-300,-0)"],
    "line": ["{1,-1,0}"],
    "box": ["(1,1),(0,0)"],
    "path": ["[(0,0),(1,1)]", "((0,0),(1,1),(2,0))"],
    "polygon": ["((0,0),(1,1),(2,0))"],
    "circle": ["<(1,2),3>"],
    "jsonpath": ['$."a"[*]?(@ > 1)'],
    "txid_snapshot": ["10:20:10,14,15"],
    "aclitem": ["postgres=r/postgres"],
    "regclass": ["pg_class"],
    "refcursor": ["c"],
    "json[]": ['{"{\\"a\\": 1}"}'],
}


def _columns(kinds: dict[str, list[str]]) -> str:
    return ", ".join(f"c{number} {kind}" for number, kind in enumerate(kinds))


def _same(p: Pair, kinds: dict[str, list[str]]) -> None:
    """Whichever of the two servers writes zeros into a pg_lsn."""
    columns = [f"c{number} - '0/0'" if kind == "pg_lsn" else f"c{number}" for number, kind in enumerate(kinds)]
    p.same("t", columns=", ".join(["id", *columns]))


def _fill(p: Pair, kinds: dict[str, list[str]], copies: int) -> None:
    """A row for the first value of every type, one for the second and so on, and one of NULLs."""
    columns = ", ".join(f"c{number}" for number in range(len(kinds)))
    casts = ", ".join(f"%s::{kind}" for kind in kinds)
    for row in range(max(map(len, kinds.values())) + 1):
        values = [v[row % len(v)] if row else None for v in kinds.values()]
        p.pubdb.execute(
            f"INSERT INTO t (id, {columns}) SELECT {row * 1000} + g, {casts} FROM generate_series(1, {copies}) g",
            *values,
        )


@pytest.mark.parametrize("copies", [1, insert_run.COPY_FROM], ids=["insert", "copy"])
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_every_value_arrives_as_it_was(pair: MakePair, binary: bool, copies: int) -> None:
    kinds = {**VALUES, **NO_KEY}
    # the same oids on both sides are not a matter of course: the second schema shifts them
    p = pair(sub="CREATE TYPE shift AS (a int)", pub="", names=[], binary=binary)
    p.ddl(f"{TYPES}; CREATE TABLE t (id int PRIMARY KEY, {_columns(kinds)})")
    p.add("t")
    _fill(p, kinds, copies)
    p.apply()
    _same(p, kinds)
    sets = ", ".join(f"c{n} = (SELECT c{n} FROM t WHERE id = 1001)" for n in range(len(kinds)))
    p.apply(f"UPDATE t SET {sets} WHERE id = 2001", "UPDATE t SET id = -id WHERE id = 1001")
    _same(p, kinds)


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_every_value_finds_its_row_again(pair: MakePair, binary: bool) -> None:
    p = pair(
        f"{TYPES}; CREATE TABLE t (id int, {_columns(VALUES)}); ALTER TABLE t REPLICA IDENTITY FULL", binary=binary
    )
    _fill(p, VALUES, 2)
    p.apply("UPDATE t SET id = id + 500 WHERE id % 2 = 0", "DELETE FROM t WHERE id % 4 = 1")
    _same(p, VALUES)
    assert p.events() == []


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_doubles_make_the_round_trip_bit_by_bit(pair: MakePair, binary: bool) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, d float8, r real)", binary=binary)
    chance = random.Random(1)
    for number in range(300):
        d, r = struct.unpack(">df", chance.randbytes(12))
        p.pubdb.execute("INSERT INTO t VALUES (%s, %s::float8, %s::real)", number, repr(d), repr(r))
    p.apply()
    p.same("t", columns="id, float8send(d), float4send(r)")


@pytest.mark.parametrize(
    ("theirs", "ours", "values"),
    [
        ("int", "bigint", ["1", "-5"]),
        ("bigint", "int", ["7"]),
        ("int", "text", ["42"]),
        ("varchar(10)", "text", ["abc"]),
        ("timestamp", "date", ["2024-05-06 00:00:00"]),
        ("numeric", "double precision", ["0.1"]),
        ("text", "jsonb", ['{"a": 1}']),
        ("json", "text", ['{"a": "\\u0041"}']),
        ("uuid", "text", ["00000000-0000-0000-0000-00000000000a"]),
    ],
)
def test_text_is_read_by_the_targets_type(pair: MakePair, theirs: str, ours: str, values: list[str]) -> None:
    p = pair(
        pub=f"CREATE TABLE t (id int PRIMARY KEY, v {theirs})", sub=f"CREATE TABLE t (id text PRIMARY KEY, v {ours})"
    )
    for number, value in enumerate(values):
        p.pubdb.execute(
            f"INSERT INTO t SELECT g, %s::{theirs} FROM generate_series({number * 100}, {number * 100} + 55) g", value
        )
        p.pubdb.execute(f"UPDATE t SET v = %s::{theirs} WHERE id = {number * 100}", value)
    p.apply("DELETE FROM t WHERE id = 1")
    p.same("t", columns=f"id::text, v::text::{ours}")


@pytest.mark.parametrize("copies", [1, 60], ids=["insert", "copy"])
def test_binary_into_another_type_is_a_fault_and_text_is_not(pair: MakePair, copies: int) -> None:
    p = pair(pub="CREATE TABLE t (id int PRIMARY KEY)", sub="CREATE TABLE t (id bigint PRIMARY KEY)", binary=True)
    p.pubdb.execute(f"INSERT INTO t SELECT generate_series(1, {copies})")
    with pytest.raises(Exception, match=r"insufficient data left|incorrect binary data format") as caught:
        p.catch_up()
    assert caught.value.relation == "public.t"  # type: ignore[attr-defined]
    p.set(binary=False)
    p.apply()
    assert p.subdb.value("SELECT count(*) FROM t") == copies


def test_the_publishers_own_settings_do_not_change_values(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, d date, i interval, f float8, b bytea, z timestamptz, a text[])")
    for side in (p.pubdb, p.subdb):
        for name, value in (
            ("datestyle", "SQL, DMY"),
            ("intervalstyle", "sql_standard"),
            ("extra_float_digits", "-5"),
            ("bytea_output", "escape"),
            ("timezone", "Asia/Kathmandu"),
            ("search_path", "nowhere"),
            ("standard_conforming_strings", "on"),
            ("lc_monetary", "C"),
            ("array_nulls", "off"),
            ("xmloption", "document"),
            ("transform_null_equals", "on"),
        ):
            side.execute(f"ALTER DATABASE {side.name} SET {name} = '{value}'")
    p.apply(
        "INSERT INTO public.t SELECT g, '2001-02-03', '-1 year 2 days', 0.1 + 0.2, '\\x0001ff5c27',"
        " '2020-06-07 08:09+01', ARRAY[NULL, 'NULL'] FROM generate_series(1, 3) g",
        "INSERT INTO public.t SELECT g + 100, '2001-02-03', '-1 year 2 days', 0.1 + 0.2, '\\xff', now(), '{}'"
        " FROM generate_series(1, 60) g",
    )
    p.same("public.t", columns="id, d, i, float8send(f), b, z, a")
