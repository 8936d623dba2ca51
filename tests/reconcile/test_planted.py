"""Faults that are planted in every kind of published table are found at one point while the publisher is written to,
and repaired once each.
"""

from __future__ import annotations

import random

from fix_pair import MakePair, Pair
from reconcile.planted import (
    KINDS,
    PUBLICATIONS,
    REPLACED,
    TABLES,
    Found,
    Writer,
    by_repair,
    keyed,
    made,
    of_tables,
    plant,
)
from verified import repaired, results

from pgsub.reconcile.comparison import TableResult


def _compared(p: Pair) -> tuple[list[TableResult], dict[str, Found]]:
    """Compare all tables at one point: the results, and kind and key of each row that differs."""
    found: dict[str, Found] = {}
    compared = list(results(p, [("public", name) for name in TABLES]))
    for result in compared:
        assert result.error is None, result.error
        name, both = result.table.target.name, result.table
        assert both.keyed == keyed(name), name
        position = [column.name for column in both.columns].index("id")
        found[name] = {
            (one.kind, str((one.publisher or one.target or ())[position])) for one in result.differences.listed
        }
        assert sum(result.differences.counts.values()) == len(found[name]), name
    return compared, found


def test_planted_faults_are_all_found_and_repaired_once_and_nothing_else_is_by_a_worker_alone(
    pair: MakePair,
) -> None:
    p = pair(pub=made("pub"), sub=made("sub"), publications=PUBLICATIONS)
    task, chance = p.start(), random.Random(1)
    with Writer(p.pubdb, 1) as writer:
        _found_and_repaired(p, chance)
    assert writer.transactions > 20
    p.stop(task)


def _found_and_repaired(p: Pair, chance: random.Random) -> None:
    assert _compared(p)[1] == of_tables({})
    planted = of_tables({name: plant(p.subdb, name, chance, 1) for name in KINDS})
    compared, found = _compared(p)
    assert found == planted
    done = {name: (one.inserted, one.updated, one.deleted) for name, one in repaired(p, compared).items()}
    assert done == {name: by_repair(found) for name, found in planted.items() if found and keyed(name)}
    assert _compared(p)[1] == {name: set() if keyed(name) else found for name, found in planted.items()}
    replaced = {name: updated + deleted for name, (_, updated, deleted) in done.items() if updated + deleted}
    assert dict(p.subdb.rows(REPLACED)) == replaced
