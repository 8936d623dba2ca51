"""The pause of a switchover with a hundred tables and sequences, under load and across versions.

The figures are printed; what is asserted is that nothing is lost.
"""

from __future__ import annotations

import statistics
import time

import pytest
from fix_program import until
from fix_switchover import Mover
from switching_clients import Clients
from thorough import thorough

pytestmark = pytest.mark.long

_TABLES = 100
#: Switchovers in a row, there and back.
ROUNDS = dict([("once and back", 2), *thorough([("ten times and back", 20)])])


@pytest.mark.publishers("15")
@pytest.mark.parametrize("rounds", ROUNDS.values(), ids=ROUNDS.keys())
def test_a_hundred_tables_and_sequences_move_under_load_across_versions(mover: Mover, rounds: int) -> None:
    names = [f"t{number}" for number in range(_TABLES)]
    tables = ", ".join(names)
    for side, publication in ((0, "p"), (1, "moved_back")):
        ddl = ";".join(f"CREATE TABLE {name} (id serial PRIMARY KEY, n int)" for name in names)
        with mover.databases[side].connect() as session:
            session.execute("SET default_transaction_read_only = off")
            session.execute(f"{ddl}; ALTER PUBLICATION {publication} ADD TABLE {tables}".encode())
    assert mover.cli("refresh", "moved").returncode == 0
    pauses, gaps = [], []
    with Clients(mover.conninfos, count=11, pause=0.007) as clients:
        for number in range(rounds):
            for name in names:
                mover.rows(mover.side, f"INSERT INTO {name} (n) VALUES ({number}) RETURNING id")
            since, to = time.monotonic(), 1 - mover.side
            mover.caught_up()
            found = mover("--no-verify", "--timeout", "1m")
            mover.side = to
            until(lambda to=to, since=since: clients.wrote_on(to, since) or clients.faults)
            pauses.append(found["pause"])
            gaps.append(clients.longest_gap(since))
            assert clients.both_wrote(since, to) == []
        writes, began = len(clients.acknowledged), min(one.began for one in clients.acknowledged)
        rate = writes / (time.monotonic() - began)
    mover.audit(clients)
    for side in (0, 1):
        query = " UNION ALL ".join(f"SELECT id, n FROM {name}" for name in names)
        assert sorted(mover.rows(side, query)) == sorted((n + 1, n) for n in range(rounds) for _ in names)
    print(
        f"pause: {statistics.median(pauses):.2f} s (most {max(pauses):.2f}), clients: {statistics.median(gaps):.2f} s"
    )
    print(f"(most {max(gaps):.2f}), {rate:.0f} transactions a second, steps of the last: {found['steps']}")
