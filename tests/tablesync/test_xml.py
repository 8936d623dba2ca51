"""Columns of type xml, copied and applied: the embedded server is built without, so both sides are another version."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from embedded import Server
from fix_pair import MakePair
from fix_servers import Database, Servers, other_servers

from pgsub.apply.rows import insert_run
from pgsub.common.errors import SchemaFault

#: Content, documents, what a declaration says, and a value that an UPDATE of another column does not send.
VALUES = (
    None,
    "",
    "text <b>only</b>",
    "<a x='1'>\n\t\\N &lt;&amp;</a>",
    '<?xml version="1.0" standalone="yes"?><a>é</a>',
    '<?xml version="1.1"?><a/>',
    "<!DOCTYPE a [<!ENTITY e 'x'>]><a>&e;</a>",
    f"<a>{'long ' * 9000}</a>",
)
_T = "CREATE TABLE t (id int PRIMARY KEY, n int, x xml, several xml[]); ALTER TABLE t ALTER x SET STORAGE EXTERNAL"


@pytest.fixture
def publisher(shared_servers: Servers) -> Server:
    if not other_servers():
        pytest.skip("no server with xml: see test_versions.py")
    return shared_servers("publisher", min(other_servers()))


@pytest.fixture
def subdb(request: pytest.FixtureRequest, publisher: Server) -> Iterator[Database]:
    database = Database(publisher, f"xml_{os.getpid()}", getattr(request, "param", "UTF8"))
    yield database
    database.drop()


@pytest.mark.long
@pytest.mark.parametrize(
    ("binary", "subdb"), [(False, "UTF8"), (True, "LATIN1")], indirect=["subdb"], ids=["text", "binary"]
)
def test_xml_arrives_as_it_was_and_follows(pair: MakePair, binary: bool) -> None:
    p = pair(_T, state="i", binary=binary)
    columns = "id, n, x::text, several::text"
    insert = "INSERT INTO t SELECT %s + g, 0, %s::xml, ARRAY[%s, NULL]::xml[] FROM generate_series(1, %s) g"
    for first, copies in ((0, 1), (10_000, 1), (20_000, insert_run.COPY_FROM)):
        for number, value in enumerate(VALUES):
            p.pubdb.execute(insert, first + 100 * number, value, value, copies)
        if first == 0:
            p.sync("t")
            p.same("t", columns=columns)
    p.apply()
    p.same("t", columns=columns)
    p.apply(
        "UPDATE t SET n = n + 1",
        "UPDATE t SET x = (SELECT x FROM t WHERE id = 701) WHERE id % 7 = 4",
        "UPDATE t SET id = -id WHERE id % 100 = 1",
        "DELETE FROM t WHERE id % 5 = 3",
    )
    p.same("t", columns=columns)
    assert p.subdb.value("SELECT count(*) > 100 FROM t") and p.events() == []


def test_xml_beside_a_key_does_no_harm_and_without_one_is_refused_as_by_the_server(pair: MakePair) -> None:
    p = pair("CREATE TABLE k (id int PRIMARY KEY, x xml); CREATE TABLE t (n int, x xml)")
    p.pubdb.execute("ALTER TABLE k REPLICA IDENTITY FULL; ALTER TABLE t REPLICA IDENTITY FULL")
    p.apply(
        "INSERT INTO t VALUES (1, '<a/>'), (2, '<b/>'), (3, NULL); INSERT INTO k SELECT * FROM t",
        "UPDATE t SET n = 30 WHERE n = 3",
        "UPDATE k SET x = '<c/>' WHERE id = 1; UPDATE k SET id = -id; DELETE FROM k WHERE id = -2",
    )
    p.same("t", columns="n, x::text")
    p.same("k", columns="id, x::text")
    p.pubdb.execute("UPDATE t SET n = 10 WHERE n = 1")
    with pytest.raises(SchemaFault, match="could not identify an equality operator for type xml") as caught:
        p.catch_up()
    assert (caught.value.relation, caught.value.sqlstate) == ("public.t", "42883")
    assert p.subdb.value("SELECT count(*) FROM t WHERE n = 1") == 1
    p.subdb.execute("DELETE FROM t")  # the server would have no row to compare now, and record update_missing
    with pytest.raises(SchemaFault, match="could not identify an equality operator for type xml"):
        p.catch_up()
