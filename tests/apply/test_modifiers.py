"""Values come to a column's modifier as the server's input function brings them: to be stored, and to find a row."""

from __future__ import annotations

import pytest
from fix_pair import MakePair, Pair

from pgsub.apply.sets import writer
from pgsub.common.errors import PgsubError

#: By the publisher's type and the target's: two values that are others here.
NARROWER = {
    ("numeric", "numeric(10,2)"): ("1.234", "5.678"),
    ("numeric(6,3)", "numeric(6,1)"): ("1.250", "2.249"),
    ("text", "numeric(3,-2)"): ("12345", "23456"),
    ("timestamp", "timestamp(3)"): ("2024-01-01 00:00:00.123456", "2024-01-01 00:00:00.2236"),
    ("timestamptz", "timestamptz(0)"): ("2024-01-01 00:00:00.4+00", "2024-01-01 00:00:01.5+00"),
    ("time(4)", "time(1)"): ("23:59:59.1234", "01:02:03.45"),
    ("timetz", "timetz(2)"): ("01:02:03.255+03", "01:02:04.255+03"),
    ("interval", "interval(0)"): ("1.4 s", "2.4 s"),
    ("interval", "interval day to minute"): ("1 day 02:03:04", "2 days 02:03:04"),
    ("text", "interval hour"): ("5", "7"),
    ("char(10)", "varchar(5)"): ("abc", "def"),
    ("varchar(10)", "varchar(3)"): ("abc  ", "def  "),
    ("text", "char(6)"): ("abc", "def"),
    ("text", "bit(3)"): ("101", "111"),
    ("varbit", "varbit(4)"): ("1010", "1"),
    ("numeric[]", "numeric(10,1)[]"): ("{1.25,NULL}", "{{2.25},{3.14}}"),
    ("varchar[]", "varchar(3)[]"): ('{"abc   "}', '{"a,\\"  ",b}'),
    ("text", "interval year to month[]"): ("{7,1-2}", "{8}"),
    ("numeric", "money_like"): ("1.234", "5.678"),
    ("numeric[]", "amounts"): ("{1.25}", "{2.25}"),
    ("text", "pair"): ("(1,1.005)", "(2,7.777)"),
}
DOMAINS = """
CREATE DOMAIN money_like AS numeric(10,2);
CREATE DOMAIN amounts AS numeric(6,1)[];
CREATE TYPE pair AS (a int, b numeric(6,2));
"""


def _tables(side: int, key: str) -> str:
    made = [f"CREATE TABLE t{n} (id int, v {types[side]}, {key})" for n, types in enumerate(NARROWER)]
    return "; ".join(made)


def _ids(p: Pair, side: str) -> list[list[int]]:
    database = getattr(p, side)
    return [[i for (i,) in database.rows(f"SELECT id FROM t{n} ORDER BY 1")] for n in range(len(NARROWER))]


@pytest.mark.long
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
@pytest.mark.parametrize("key", ["PRIMARY KEY (v)", "CHECK (id > 0)"], ids=["key", "full"])
def test_a_row_is_found_by_a_value_that_is_brought_to_the_modifier_of_its_column(
    pair: MakePair, key: str, binary: bool
) -> None:
    full = [f"ALTER TABLE t{n} REPLICA IDENTITY FULL" for n in range(len(NARROWER)) if key.startswith("CHECK")]
    p = pair(pub="; ".join([_tables(0, key), *full]), sub=DOMAINS + _tables(1, key), binary=False)
    for number, values in enumerate(NARROWER.values()):
        p.pubdb.execute(f"INSERT INTO t{number} VALUES (1, %s), (2, %s)", *values)
    p.apply()
    # what is sent in binary form must be of the same type
    alike = [n for n, (ours, theirs) in enumerate(NARROWER) if ours.partition("(")[0] == theirs.partition("(")[0]]
    p.set(binary=binary)
    numbers = alike if binary else range(len(NARROWER))
    p.apply(*(f"UPDATE t{number} SET id = 10 WHERE id = 1" for number in numbers))  # not with what inserted them
    p.apply(*(f"DELETE FROM t{number} WHERE id = 2" for number in numbers))
    assert p.events() == []
    assert _ids(p, "subdb") == _ids(p, "pubdb")


def test_keys_that_the_modifier_makes_one_of_are_not_folded_as_two(pair: MakePair) -> None:
    p = pair(
        pub="CREATE TABLE t (v timestamp PRIMARY KEY, a int)",
        sub="CREATE TABLE t (v timestamp(0) PRIMARY KEY, a int)",
    )
    rows = writer.PAYS_FROM * 2
    moment = "timestamp '2024-01-01' + g * interval '1 s'"
    p.apply(f"INSERT INTO t SELECT {moment}, g FROM generate_series(1, {rows}) g")
    p.apply(
        # the same rows here, by other bytes: each of them is deleted and comes back
        "BEGIN; DELETE FROM t; INSERT INTO t SELECT v + interval '0.3 s', 0 FROM"
        f" (SELECT {moment} AS v FROM generate_series(1, {rows}) g); UPDATE t SET a = 7; COMMIT"
    )
    assert p.events() == []
    assert p.subdb.rows("SELECT count(*), min(a), max(a) FROM t") == [(rows, 7, 7)]


def test_a_key_that_is_too_long_is_not_cut_until_it_finds_another_row(pair: MakePair) -> None:
    p = pair(
        pub="CREATE TABLE t (v text PRIMARY KEY, a int); INSERT INTO t VALUES ('abcd', 1)",
        sub="CREATE TABLE t (v varchar(3) PRIMARY KEY, a int); INSERT INTO t VALUES ('abc', 1)",
    )
    p.pubdb.execute("DELETE FROM t")
    with pytest.raises(PgsubError, match=r"value too long for type character varying\(3\)"):
        p.catch_up()
    assert p.subdb.value("SELECT v FROM t") == "abc"


@pytest.mark.parametrize("rows", [1, writer.PAYS_FROM * 2], ids=["single", "many"])
def test_text_is_read_into_the_fields_of_an_interval_by_its_input_function(pair: MakePair, rows: int) -> None:
    """5 hours, by every way in; a cast would read 5 seconds, which are no hours."""
    kinds = {"hour": "05:00:00", "day to minute": "00:05:00", "year to month": "5 mons", "minute to second": "00:00:05"}
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, a text, b text, c text, d text, e text)",
        sub="CREATE TABLE t (id int PRIMARY KEY, "
        + ", ".join(f"{name} interval {kind}" for name, kind in zip("abcd", kinds, strict=True))
        + ", e interval hour[])",
    )
    expected = [(rows, *kinds.values(), "{05:00:00}")]
    query = "SELECT count(*), max(a)::text, max(b)::text, max(c)::text, max(d)::text, max(e)::text FROM t"
    p.apply(f"INSERT INTO t SELECT g, 5, 5, 5, 5, '{{5}}' FROM generate_series(1, {rows}) g")
    assert p.subdb.rows(query) == expected
    p.apply("UPDATE t SET a = 6, b = 6, c = 6, d = 6, e = NULL", "UPDATE t SET a = 5, b = 5, c = 5, d = 5, e = '{5}'")
    assert p.subdb.rows(query) == expected


def test_text_is_read_by_the_targets_own_settings(pair: MakePair) -> None:
    """As the server's apply worker reads it; the publisher's dates and intervals are read whatever they are."""
    p = pair(
        pub="CREATE TABLE t (id int PRIMARY KEY, d text, i text, same date, span interval)",
        sub="CREATE TABLE t (id int PRIMARY KEY, d date, i interval, same date, span interval)",
    )
    for name, value in (("datestyle", "SQL, DMY"), ("intervalstyle", "sql_standard")):
        p.subdb.execute(f"ALTER DATABASE {p.subdb.name} SET {name} = '{value}'")
    p.apply("INSERT INTO t VALUES (1, '01/02/2024', '-1 2:03:04', '2024-01-02', '-1 day 2:03:04')")
    p.same("t", columns="id, same, span")
    assert p.subdb.value("SELECT ROW(d, i)::text FROM t") == '(2024-02-01,"-1 days -02:03:04")'
