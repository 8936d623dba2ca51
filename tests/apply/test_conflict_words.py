"""Conflicts are told word for word as the target's own subscriber tells them, and recorded with both rows.

Mirrors t/035_conflicts.pl. Both subscribers meet the same transactions of one publisher.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fix_pair import MakePair, Pair
from fix_servers import Database

from pgsub.apply.conflicts import conflict_text
from pgsub.common.errors import ApplyError
from pgsub.protocol.messages import Tuple
from pgsub.protocol.reader import BINARY

if TYPE_CHECKING:
    from embedded import Server

LONG = "x" * 100
TABLES = """
CREATE TABLE one (id int PRIMARY KEY, v text);
CREATE TABLE several (a int PRIMARY KEY, "B b" int UNIQUE, c text);
CREATE UNIQUE INDEX several_c ON several (lower(c)) WHERE c <> 'free';
CREATE TABLE whole (a int, b text, UNIQUE (a)); ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE parts (id int, r int, v text, PRIMARY KEY (id, r)) PARTITION BY RANGE (r);
CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100);
CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (100) TO (200);
CREATE TABLE turned (id int PRIMARY KEY, b text, v text) PARTITION BY RANGE (id);
CREATE TABLE turned_low (v text, b text, id int NOT NULL);
ALTER TABLE turned ATTACH PARTITION turned_low FOR VALUES FROM (0) TO (100);
CREATE TABLE around (id int, v text) PARTITION BY RANGE (id); ALTER TABLE around REPLICA IDENTITY FULL;
CREATE TABLE around_low (v text, gone int, id int); ALTER TABLE around_low DROP gone;
ALTER TABLE around_low REPLICA IDENTITY FULL;
ALTER TABLE around ATTACH PARTITION around_low FOR VALUES FROM (0) TO (100);
CREATE TABLE below (id int, r int, v text) PARTITION BY RANGE (r); ALTER TABLE below REPLICA IDENTITY FULL;
CREATE TABLE below_low (v text, id int PRIMARY KEY, r int); ALTER TABLE below_low REPLICA IDENTITY FULL;
ALTER TABLE below ATTACH PARTITION below_low FOR VALUES FROM (0) TO (100);
CREATE TABLE below_high PARTITION OF below FOR VALUES FROM (100) TO (200);
ALTER TABLE below_high ADD PRIMARY KEY (id), REPLICA IDENTITY FULL;
CREATE TABLE sums (id int PRIMARY KEY, n numeric(8, 2), at timestamptz, flag bool, code char(4), d text, mark "char")
"""
PUBLICATION = "CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root)"
#: what only the target has
TARGET = """
CREATE UNIQUE INDEX parts_low_v ON parts_low (v);
ALTER TABLE sums ADD s text GENERATED ALWAYS AS (id::text || code) STORED, ADD l int;
CREATE UNIQUE INDEX sums_s ON sums (s);
ALTER TABLE below ADD mine int DEFAULT 7
"""


class Both:
    """One publisher, the server's own subscription and one of pgsub, and what each says of a conflict."""

    def __init__(self, pair: Pair, native: Database) -> None:
        self.pair, self.native = pair, native
        self.offset = 0

    def local(self, statements: str) -> None:
        """Run on both targets."""
        self.native.execute(statements)
        self.pair.subdb.execute(statements)

    def stopped(self, change: str, remedy: str) -> ApplyError:
        """The error that a change of the publisher stops both with, word for word; then the remedy lets both go on."""
        self._mark()
        self.pair.pubdb.execute(change)
        with pytest.raises(ApplyError) as caught:
            self.pair.catch_up()
        error = caught.value
        self.native.wait("SELECT NOT subenabled FROM pg_subscription WHERE subname = 'native'")
        assert [self._plain(f"{error.message}\n{error.detail}\n{error.context}")] == self._told()
        self.local(remedy)
        self.native.execute("ALTER SUBSCRIPTION native ENABLE")
        self.pair.apply()
        return error

    def skipped(self, change: str) -> list[dict[str, Any]]:
        """The conflicts that a change is skipped for, word for word."""
        self._mark()
        self.pair.subdb.execute("DELETE FROM pgsub.event")
        self.pair.apply(change)
        self.settled()
        events = self.pair.events()
        assert [self._plain(f"{e['message']}\n{e['detail']}\n{e['context']}") for e in events] == self._told()
        return events

    def settled(self) -> None:
        """Wait until the server's own subscriber has applied everything."""
        self.pair.pubdb.wait(
            "SELECT confirmed_flush_lsn >= pg_current_wal_flush_lsn() FROM pg_replication_slots WHERE slot_name = %s",
            self.native.name,
        )

    def _mark(self) -> None:
        self.offset = self.native.server.log.stat().st_size

    def _told(self) -> list[str]:
        """The server's own records since the mark, without prefixes."""
        text = self.native.server.log.read_bytes()[self.offset :].decode()
        found = re.findall(
            r"(?:ERROR|LOG):  (conflict detected .*)\n.*DETAIL:  (.*(?:\n\t.*)*)\n.*CONTEXT:  (.*)\n", text
        )
        return [self._plain("\n".join(parts).replace("\n\t", "\n")) for parts in found]

    @staticmethod
    def _plain(text: str) -> str:
        """What differs between two targets: names of origins, transactions of their own, times."""
        text = re.sub(r"transaction \d+ at \S+ \S+?([.:]\s)", r"transaction N at T\1", text)
        text = re.sub(r"modified in transaction \d+", "modified in transaction N", text)
        return re.sub(r'origin "\w+"', 'origin "O"', text)


@pytest.fixture
def both(pair: MakePair, target: Server, subdb: Database) -> Iterator[Callable[..., Both]]:
    """``both(**options of pgsub's subscription)``."""
    native = Database(target, f"{subdb.name}_native")

    def make(**options: Any) -> Both:
        # the server tells values by the DateStyle of the target's database, pgsub always by ISO
        native.execute(f"ALTER DATABASE {native.name} SET datestyle = 'ISO'")
        native.execute(f"{TABLES};{TARGET}")
        it = Both(pair(TABLES, pub=PUBLICATION, sub=TARGET, **options), native)
        native.execute(
            f"CREATE SUBSCRIPTION native CONNECTION '{it.pair.pubdb.conninfo}' PUBLICATION p"
            f" WITH (slot_name = {native.name}, copy_data = false, disable_on_error = true)"
        )
        return it

    yield make
    native.drop()


@pytest.mark.long
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_every_conflict_is_told_as_the_server_tells_it(both: Callable[..., Both], binary: bool) -> None:
    it = both(binary=binary)
    it.pair.apply("INSERT INTO one VALUES (1, 'a'), (2, 'b'); INSERT INTO parts VALUES (1, 1, 'a'), (2, 150, 'b')")
    it.local(f"INSERT INTO one VALUES (5, '{LONG}')")

    error = it.stopped("INSERT INTO one VALUES (5, 'theirs')", "DELETE FROM one WHERE id = 5")
    assert error.conflict == "insert_exists"
    [there] = error.record.local_conflicts
    assert (there["index"], there["key"], there["row"]) == ("one_pkey", "(id)=(5)", {"id": "5", "v": LONG})
    assert (there["origin"], there["identical"]) == (None, False) and there["commit_ts"]
    assert (error.record.remote_tuple, error.record.key) == ({"id": "5", "v": "theirs"}, "(id)=(5)")

    it.pair.pubdb.execute("INSERT INTO one VALUES (6, 'x')")
    it.pair.apply()
    it.local("INSERT INTO one VALUES (7, 'mine')")
    error = it.stopped("UPDATE one SET id = 7 WHERE id = 6", "DELETE FROM one WHERE id = 7")
    assert (error.conflict, error.record.replica_identity) == ("update_exists", {"id": "6"})
    assert error.record.local_conflicts[0]["row"] == {"id": "7", "v": "mine"}

    it.local("INSERT INTO several VALUES (1, 10, NULL), (2, 20, NULL), (3, 30, 'Same'), (4, 40, 'free')")
    error = it.stopped("INSERT INTO several VALUES (1, 20, 'sAME')", "DELETE FROM several WHERE a < 4")
    assert error.conflict == "multiple_unique_conflicts"
    names = ["several_pkey", "several_B b_key", "several_c"]
    assert [one["index"] for one in error.record.local_conflicts] == names
    it.local("INSERT INTO several VALUES (5, 50, 'five')")
    error = it.stopped(
        "UPDATE several SET a = 4, \"B b\" = 50, c = 'free' WHERE a = 1", "DELETE FROM several WHERE a > 3"
    )
    assert error.conflict == "multiple_unique_conflicts" and error.record.index_name == "several_pkey, several_B b_key"

    it.local("INSERT INTO parts VALUES (9, 9, 'low'), (3, 160, 'high')")
    error = it.stopped("INSERT INTO parts VALUES (8, 8, 'low')", "DELETE FROM parts WHERE id = 9")
    assert (error.record.relname, error.relation, error.conflict) == ("parts_low", "public.parts", "insert_exists")
    error = it.stopped("UPDATE parts SET id = 3, r = 160 WHERE id = 1", "DELETE FROM parts WHERE id = 3")
    assert (error.record.relname, error.conflict) == ("parts_high", "insert_exists")

    it.local("INSERT INTO sums (id, code) OVERRIDING SYSTEM VALUE VALUES (12, '3')")
    error = it.stopped("INSERT INTO sums VALUES (1, 1.5, '2026-01-01 12:00:00+00', true, '23')", "DELETE FROM sums")
    assert error.record.index_name == "sums_s"


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_missing_rows_are_told_as_the_server_tells_them(both: Callable[..., Both], binary: bool) -> None:
    it = both(binary=binary)
    it.pair.apply(
        "INSERT INTO one VALUES (1, 'a'), (2, 'b'); INSERT INTO whole VALUES (1, 'a'), (2, NULL);"
        "INSERT INTO sums VALUES (1, 1.5, NULL, true, 'x', '', '');"  # a missing row has the publisher's texts
        "INSERT INTO parts VALUES (1, 1, 'a'), (2, 150, 'b')"
    )
    it.settled()
    it.local("TRUNCATE one, whole, sums, parts")
    update, moved, delete, *rest = it.skipped(
        f"UPDATE one SET v = '{LONG}' WHERE id = 1; UPDATE one SET id = 3 WHERE id = 1; DELETE FROM one WHERE id = 2;"
        "UPDATE whole SET b = 'new' WHERE a = 1; DELETE FROM whole WHERE a = 2; UPDATE sums SET n = 2;"
        "UPDATE parts SET v = 'x'; DELETE FROM parts WHERE id = 1"
    )
    assert [e["conflict_type"] for e in (update, moved, delete)] == [
        "update_missing",
        "update_missing",
        "delete_missing",
    ]
    assert (update["remote_tuple"], update["replica_identity"]) == ({"id": "1", "v": LONG}, {"id": "1"})
    assert (moved["remote_tuple"], moved["replica_identity"], moved["key"]) == (
        {"id": "3", "v": LONG},
        {"id": "1"},
        "(id)=(1)",
    )
    assert (delete["remote_tuple"], delete["replica_identity"]) == (None, {"id": "2"})
    assert rest[0]["replica_identity"] == {"a": "1", "b": "a"}
    assert [e["relname"] for e in rest[-3:]] == ["parts_low", "parts_high", "parts_low"]


def test_a_long_text_in_binary_form_is_shown_as_text_wherever_it_is_cut() -> None:
    text = "a" + "\u65e5" * (conflict_text.KEPT + 2000)  # a cut after so many bytes goes through a character
    sent, column = Tuple(bytes([BINARY]), (text.encode(),)), SimpleNamespace(type_oid=25)
    assert conflict_text.kept(conflict_text.value(sent, 0, column)) == text[: conflict_text.KEPT] + "..."


def test_rows_of_a_partition_are_told_in_the_order_of_its_own_columns(both: Callable[..., Both]) -> None:
    it = both()
    it.pair.apply(
        "INSERT INTO turned VALUES (1, 'b', 'v'), (2, 'b', 'v')", "INSERT INTO around VALUES (1, 'a'), (2, 'b')"
    )
    it.settled()
    it.local("UPDATE turned SET v = 'mine'; UPDATE around SET id = id")
    changes = (
        "UPDATE turned SET b = 'theirs' WHERE id = 1; DELETE FROM turned WHERE id = 2;"
        "UPDATE around SET v = 'theirs' WHERE id = 1; DELETE FROM around WHERE id = 2"
    )
    told = it.skipped(changes)
    assert [e["conflict_type"].partition("_")[2] for e in told] == ["origin_differs"] * 4
    it.pair.pubdb.execute("INSERT INTO turned VALUES (2, 'b', 'v'); INSERT INTO around VALUES (2, 'b')")
    it.pair.apply()
    it.settled()
    it.local("TRUNCATE turned, around")
    told = it.skipped(changes)
    assert [e["conflict_type"].partition("_")[2] for e in told] == ["missing"] * 4
    assert told[0]["remote_tuple"] == {"id": "1", "b": "theirs", "v": "v"}


def test_rows_that_are_found_by_the_key_of_their_partition_are_told_as_the_server_tells_them(
    both: Callable[..., Both],
) -> None:
    it = both()
    it.pair.apply("INSERT INTO below SELECT g % 34, g * 3, 'v' FROM generate_series(1, 60) g")
    it.settled()
    it.local("UPDATE below SET v = 'mine' WHERE id = 3 AND r > 100 OR id = 4; DELETE FROM below WHERE id = 5")
    told = it.skipped(
        "UPDATE below SET v = 'theirs' WHERE id = 3; UPDATE below SET r = 150, id = 40 WHERE r = 12;"
        "DELETE FROM below WHERE id = 4; UPDATE below SET v = 'x' WHERE id = 5 AND r > 100;"
        "DELETE FROM below WHERE id = 5"
    )
    found = [(e["conflict_type"], e["relname"], e["key"]) for e in told]
    assert found == [
        ("update_origin_differs", "below_high", "(id)=(3)"),
        ("delete_origin_differs", "below_low", "(id)=(4)"),  # the row moves
        ("delete_origin_differs", "below_high", "(id)=(4)"),
        ("update_missing", "below_high", "(id)=(5)"),
        ("delete_missing", "below_low", "(id)=(5)"),
        ("delete_missing", "below_high", "(id)=(5)"),
    ]
    it.pair.same("below", columns="id, r, v")
    query = "SELECT below::text FROM below ORDER BY 1"
    assert it.pair.subdb.rows(query) == it.native.rows(query)


@pytest.mark.parametrize("rows", [1, 60], ids=["rows", "sets"])
def test_rows_that_somebody_else_wrote_are_told_as_the_server_tells_them_and_changed(
    both: Callable[..., Both], rows: int
) -> None:
    it = both()
    it.pair.apply(
        f"INSERT INTO one SELECT g, 'a' FROM generate_series(1, {rows + 2}) g; INSERT INTO whole VALUES (1, 'a');"
        "INSERT INTO parts VALUES (1, 1, 'a'), (2, 150, 'b')"
    )
    it.settled()
    it.local(f"UPDATE one SET v = '{LONG}' WHERE id < 3; UPDATE whole SET a = 1; UPDATE parts SET v = 'mine'")
    update, delete, *rest = it.skipped(
        "UPDATE one SET v = 'theirs' WHERE id <> 2; DELETE FROM one WHERE id = 2; UPDATE whole SET b = 'new';"
        "UPDATE parts SET v = 'theirs' WHERE id = 1; DELETE FROM parts WHERE id = 2"
    )
    kinds = [e["conflict_type"].removesuffix("_origin_differs") for e in (update, delete, *rest)]
    assert kinds == ["update", "delete", "update", "update", "delete"]
    assert [e["relname"] for e in rest] == ["whole", "parts_low", "parts_high"]
    [there] = update["local_conflicts"]
    assert there["row"] == {"id": "1", "v": LONG} and there["origin"] is None and there["commit_ts"]
    it.pair.same("one", "whole", "parts")
    assert it.skipped("UPDATE one SET v = 'again'; UPDATE parts SET v = 'again'") == []  # ours now
