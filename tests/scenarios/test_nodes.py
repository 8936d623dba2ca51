"""More than two databases: several publishers of one table, and a chain.

After multiple_upstreams, tuple_origin and node_origin_cascade of spock and pglogical, and their tests of a
synchronization while others write (t/040_pglogical_sync_during_write.pl, tests/tap/t/006_sync_during_write.pl).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest
from fix_engine import Subscriber
from fix_servers import Database, Servers

from pgsub.common.errors import ApplyError

_numbers = itertools.count(1)
MakeNodes = Callable[[str, str], list[Database]]


@pytest.fixture
def nodes(shared_servers: Servers) -> Iterator[MakeNodes]:
    """Make databases on the shared publisher (``p``) and target (``t``), each with the tables of the test."""
    made: list[Database] = []

    def make(sides: str, tables: str) -> list[Database]:
        for side in sides:
            server = shared_servers("publisher" if side == "p" else "target", None)
            made.append(Database(server, f"node{next(_numbers)}"))
            made[-1].execute(f"{tables}; CREATE PUBLICATION p FOR ALL TABLES")
        return made

    yield make
    for database in made:
        database.drop()


@pytest.fixture
def between() -> Iterator[Callable[..., Subscriber]]:
    """Make a subscription from one node to another; all of a chain are closed before their databases go."""
    made: list[Subscriber] = []

    def make(source: Database, destination: Database, *tables: str, state: str = "i") -> Subscriber:
        made.append(Subscriber(source, destination).register(*tables, state=state))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.long
def test_publishers_of_one_table_come_side_by_side_and_one_that_conflicts_stops_alone(
    nodes: MakeNodes, between: Callable[..., Subscriber]
) -> None:
    first, second, target = nodes("ppt", "CREATE TABLE shared (id int PRIMARY KEY, word text UNIQUE NOT NULL, v text)")
    first.execute("INSERT INTO shared SELECT g, 'first' || g, 'copied' FROM generate_series(1, 3) g")
    second.execute("INSERT INTO shared SELECT g, 'second' || g, 'copied' FROM generate_series(4, 6) g")
    one, other = (between(source, target, "shared") for source in (first, second))
    for subscription in (one, other):
        subscription.sync("shared")
        assert subscription.catch_up().outcome == "reached"
    assert target.value("SELECT count(*) FROM shared WHERE v = 'copied'") == 6
    # the second one's row is in the way of the first: which stops, and the second goes on
    first.execute("INSERT INTO shared VALUES (7, 'second4', 'in the way')")
    second.execute("UPDATE shared SET v = 'changed' WHERE id = 4")
    assert other.catch_up().outcome == "reached"
    with pytest.raises(ApplyError) as raised:
        one.catch_up()
    record = raised.value.record
    assert record is not None and record.conflict_type == "insert_exists"
    [hit] = record.local_conflicts
    assert (hit["key"], hit["origin"]) == ("(word)=(second4)", f"pgsub_{other.subid}")
    second.execute("UPDATE shared SET word = 'moved' WHERE id = 4")
    for subscription in (other, one):
        assert subscription.catch_up().outcome == "reached"
    # a row of the one publisher took the place of the other's: it is changed, and that is told
    first.execute("INSERT INTO shared VALUES (8, 'eight', 'x')")
    assert one.catch_up().outcome == "reached"
    second.execute("INSERT INTO shared VALUES (8, 'acht', 'y')")
    with pytest.raises(ApplyError):
        other.catch_up()
    target.execute("DELETE FROM shared WHERE id = 8")
    assert other.catch_up().outcome == "reached"
    first.execute("UPDATE shared SET v = 'z' WHERE id = 8")
    assert one.catch_up().outcome == "reached"
    [event] = [body for (body,) in target.rows("SELECT body FROM pgsub.event WHERE subid = %s", one.subid)]
    assert (event["conflict_type"], event["local_conflicts"][0]["origin"]) == (
        "update_origin_differs",
        f"pgsub_{other.subid}",
    )
    assert target.rows("SELECT * FROM shared WHERE id > 3 ORDER BY id") == [
        (4, "moved", "changed"),
        (5, "second5", "copied"),
        (6, "second6", "copied"),
        (7, "second4", "in the way"),
        (8, "eight", "z"),
    ]


class Writing(threading.Thread):
    """Rows for a table until :meth:`stop`, each in a transaction of its own."""

    def __init__(self, database: Database) -> None:
        super().__init__(daemon=True)
        self._connection: psycopg.Connection = database.connect()
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.002):
            self._connection.execute("INSERT INTO passed (at) VALUES (clock_timestamp())")

    def stop(self) -> None:
        self._ended.set()
        self.join()
        self._connection.close()


def test_the_end_of_a_chain_is_synchronized_while_the_middle_applies_what_its_beginning_writes(
    nodes: MakeNodes, between: Callable[..., Subscriber]
) -> None:
    first, middle, last = nodes("ptt", "CREATE TABLE passed (id int GENERATED ALWAYS AS IDENTITY, at timestamptz)")
    middle.execute("ALTER TABLE passed ALTER id DROP IDENTITY")
    last.execute("ALTER TABLE passed ALTER id DROP IDENTITY")
    upper = between(first, middle, "passed", state="r")
    applying = upper.start()
    writing = Writing(first)
    middle.wait("SELECT count(*) > 20 FROM passed")
    lower = between(middle, last, "passed")
    lower.sync("passed")
    following = lower.start()
    last.wait("SELECT count(*) > 40 FROM passed")
    writing.stop()
    number = first.value("SELECT max(id) FROM passed")
    for database in (middle, last):
        database.wait("SELECT max(id) FROM passed", value=number)
        assert database.rows("SELECT id FROM passed ORDER BY id") == [(n,) for n in range(1, number + 1)]
    upper.stop(applying)
    lower.stop(following)
