"""What a subscription is made of, from every publisher into every target: copy, apply, conflicts, two-phase, hand-over.

``make test`` runs some of the pairs, ``make thorough`` all of them; docs/versions.md lists what is behind each.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
from fix_failpoints import At
from fix_pair import MakePair, Pair
from fix_servers import embedded_version
from thorough import thorough

from pgsub.common.errors import ApplyError, TargetUnavailable

if TYPE_CHECKING:
    from embedded import Server

PUBLISHERS = ("14", "15", "16", "17", "18", "19")
TARGETS = PUBLISHERS[1:]
#: 19 on either side, and the oldest target; tests marked publishers go from 15 and 19 into the embedded one.
ALWAYS = [("18", "19"), ("19", "18"), ("19", "15")]
PAIRS = ALWAYS + thorough(pair for pair in product(PUBLISHERS, TARGETS) if pair not in ALWAYS)

TABLES = """
CREATE TABLE t (id int PRIMARY KEY, v text, at timestamptz DEFAULT now(), n numeric, tags text[]);
CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE p_low PARTITION OF p FOR VALUES FROM (MINVALUE) TO (500);
CREATE TABLE p_high PARTITION OF p FOR VALUES FROM (500) TO (MAXVALUE);
CREATE TABLE unlike (id int, v jsonb);
ALTER TABLE unlike REPLICA IDENTITY FULL;
ALTER TABLE t ALTER v SET STORAGE EXTERNAL
"""
ROWS = """
INSERT INTO t (id, v, n, tags) SELECT g, md5(g::text), g / 7.0, ARRAY['a', NULL, g::text]
    FROM generate_series(1, 1000) g;
INSERT INTO t (id, v) VALUES (0, repeat('long', 5000)), (-1, NULL), (-2, E'tab\\t, line\\n, \\\\');
INSERT INTO p SELECT g, 'row' FROM generate_series(1, 1000) g;
INSERT INTO unlike SELECT g, pg_catalog.to_jsonb(g) FROM generate_series(1, 50) g
"""
CHANGES = (
    "INSERT INTO t (id, v, n) SELECT g, 'new', 'NaN' FROM generate_series(2001, 2400) g",
    "UPDATE t SET tags = ARRAY['moved'] WHERE id IN (0, 5)",
    "UPDATE t SET id = id + 10000 WHERE id BETWEEN 10 AND 20",
    "DELETE FROM t WHERE id BETWEEN 30 AND 400",
    "UPDATE p SET id = id + 600 WHERE id BETWEEN 401 AND 499",
    "UPDATE unlike SET v = '{\"a\": 1}' WHERE id = 7; DELETE FROM unlike WHERE id = 8",
    "BEGIN; INSERT INTO t (id) VALUES (-8); ROLLBACK",
    "BEGIN; INSERT INTO t (id) VALUES (-9); SAVEPOINT a; DELETE FROM t; ROLLBACK TO a; COMMIT",
)
ALL = ("t", "p", "unlike")


def _server(version: str) -> str | None:
    """As the fixtures name it: the embedded one has no version."""
    return None if version == embedded_version() else version


pytestmark = pytest.mark.parametrize(
    ("publisher", "target"),
    [pytest.param(_server(one), _server(other), id=f"from{one}into{other}") for one, other in sorted(PAIRS)],
    indirect=True,
    scope="session",
)


def _conflicts(p: Pair) -> list[tuple[str, str]]:
    return [(event["conflict_type"], event["action"]) for event in p.events()]


def test_rows_are_copied_and_changes_applied(pair: MakePair) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    for table in ("t", "p_low", "p_high", "unlike"):
        p.sync(table)
    p.same(*ALL)
    p.apply(*CHANGES)
    p.same(*ALL)
    p.apply("TRUNCATE p_low, p_high", "INSERT INTO p VALUES (3, 'after')")
    p.same(*ALL)
    assert p.events() == []


def test_a_transaction_in_progress_is_streamed(pair: MakePair) -> None:
    p = pair(TABLES, streaming="parallel")
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET logical_decoding_work_mem = '64kB'")
    p.apply(
        "BEGIN; INSERT INTO t (id, v) SELECT g, repeat('x', 1000) FROM generate_series(1, 300) g; SAVEPOINT a;"
        " DELETE FROM t; ROLLBACK TO a; UPDATE t SET v = 'y' WHERE id % 3 = 0; COMMIT"
    )
    p.same("t")
    assert p.pubdb.value("SELECT stream_count > 0 FROM pg_stat_replication_slots WHERE slot_name = %s", p.sub.slot_name)


def test_rows_carry_time_and_origin_of_their_transaction(pair: MakePair) -> None:
    # whatever the planner of the target makes of the statement that says so
    p = pair(TABLES)
    for number in range(2):
        p.apply(f"INSERT INTO t (id) VALUES ({number})")
        [(at, origin)] = p.subdb.rows("SELECT (pg_xact_commit_timestamp_origin(xmin)).* FROM t WHERE id = %s", number)
        assert p.subdb.value("SELECT remote_commit_ts FROM pgsub.progress WHERE worker = 0") == at
        assert p.subdb.value("SELECT roname FROM pg_replication_origin WHERE roident = %s", origin) == (
            f"pgsub_{p.subid}"
        )


def test_conflicts_are_met_told_and_resolved(pair: MakePair) -> None:
    p = pair(TABLES, on_conflict=("public.t:update_origin_differs=last_update_wins",))
    p.apply("INSERT INTO t (id, v) VALUES (1, 'a'), (2, 'a'), (3, 'a'), (4, 'a')")
    p.pubdb.execute("UPDATE t SET v = 'sooner' WHERE id = 1")
    p.subdb.execute("UPDATE t SET v = 'mine' WHERE id IN (1, 2)")
    p.subdb.execute("DELETE FROM t WHERE id > 2")
    p.apply(
        "UPDATE t SET v = 'later' WHERE id = 2", "UPDATE t SET v = 'lost' WHERE id = 3", "DELETE FROM t WHERE id = 4"
    )
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(1, "mine"), (2, "later")]
    assert _conflicts(p) == [
        ("update_origin_differs", "kept"),
        ("update_origin_differs", "applied"),
        ("update_missing", ""),
        ("delete_missing", ""),
    ]
    p.subdb.execute("INSERT INTO t (id, v) VALUES (9, 'mine')")
    with pytest.raises(ApplyError) as stopped:
        p.apply("INSERT INTO t (id, v) VALUES (9, 'theirs')")
    assert stopped.value.conflict == "insert_exists" and "(id)=(9)" in stopped.value.lines()[0]
    p.subdb.execute("DELETE FROM t WHERE id = 9")
    p.apply()
    assert p.subdb.value("SELECT v FROM t WHERE id = 9") == "theirs"


def test_what_is_prepared_is_prepared_there(pair: MakePair, publisher: Server) -> None:
    if publisher.version < 15:
        pytest.skip("two_phase needs a publisher of version 15 or newer")
    p = pair(TABLES, two_phase="p")
    begin = "BEGIN; INSERT INTO t (id, v) VALUES ({}, 'x'); PREPARE TRANSACTION '{}'"
    p.apply(begin.format(1, "kept"), begin.format(2, "gone"), "INSERT INTO t (id) VALUES (3)")
    prepared = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
    assert (p.subdb.value(prepared), p.subdb.rows("SELECT id FROM t")) == (2, [(3,)])
    p.apply("ROLLBACK PREPARED 'gone'", "COMMIT PREPARED 'kept'")
    p.same("t")
    assert p.subdb.value(prepared) == 0
    times = "pg_xact_commit_timestamp(t.xmin) = remote_commit_ts"
    assert p.subdb.value(f"SELECT {times} FROM t, pgsub.progress WHERE id = 1 AND worker = 0")


def test_a_table_that_apply_is_ahead_of_changes_hands_without_loss(pair: MakePair, at: At) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    p.sync("unlike")
    at("sync.after_f=error")
    with pytest.raises(TargetUnavailable):
        p.sync("t")
    p.apply(*[f"INSERT INTO t (id) VALUES ({n}); INSERT INTO unlike VALUES ({n}, '1')" for n in range(5000, 5010)])
    p.same("unlike")
    assert p.subdb.value("SELECT count(*) FROM t") == 1003
    p.sync("t")
    p.same("t")
    assert p.state("t") == "s"
    p.apply("UPDATE t SET v = 'streamed' WHERE id = 5001")
    p.same("t", "unlike")
    assert p.state("t") == "r" and p.events() == []
