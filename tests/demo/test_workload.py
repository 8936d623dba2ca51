"""Promises of the demo's writers: every kind of change is made, counted, and nothing of what they take back stays."""

from __future__ import annotations

import time

import patience
import pytest

from pgsub.common.errors import PgsubError
from pgsub.demo import schema
from pgsub.demo.workload import Workload


@pytest.fixture
def sizes(pubdb, subdb):
    chosen = schema.sizes(1000)
    schema.create(pubdb.connection, subdb.connection)
    rows = schema.fill(pubdb.connection, chosen)
    assert rows > chosen["orders"]
    return chosen


def _await(condition):
    deadline = time.monotonic() + patience.SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_kind_of_change_is_made_and_counted(pubdb, sizes):
    lines = pubdb.value("SELECT count(*) FROM ops.log")
    with Workload(pubdb.conninfo, sizes) as writers:
        _await(lambda: writers.rounds() >= 1)
        writers.stop()
    counts = writers.tally.counts()
    assert all(counts[kind] for kind in ("INSERT", "UPDATE", "DELETE", "TRUNCATE", "rolled back", "large")), counts
    assert pubdb.value("SELECT count(*) FROM ops.log WHERE level = 'KEPT'") == counts["large"] * 2500
    assert lines + counts["large"] * 2500 < pubdb.value("SELECT count(*) FROM ops.log") <= lines + counts["INSERT"]
    assert pubdb.value("SELECT count(*) FROM ops.log WHERE level = 'NEVER'") == 0
    assert pubdb.value("SELECT count(*) FROM shop.customer WHERE name = 'never'") == 0
    assert pubdb.value("SELECT count(*) FROM shop.product WHERE sku LIKE '%/%'") > 0
    assert pubdb.value("SELECT count(*) FROM ops.event_2025") > 0, "no row was moved to another partition"
    if pubdb.server.version >= 17:
        assert pubdb.value("SELECT bool_or(pg_column_toast_chunk_id(body) IS NOT NULL) FROM shop.document")


def test_a_writer_that_fails_is_reported_with_the_servers_words(pubdb, sizes):
    with Workload(pubdb.conninfo, sizes) as writers:
        pubdb.execute("DROP TABLE ops.log")
        _await(lambda: any(writer.done() for writer in writers._writers))
        with pytest.raises(PgsubError, match="writer 2 of the demo failed") as raised:
            writers.stop()
    assert 'relation "ops.log" does not exist' in raised.value.detail
