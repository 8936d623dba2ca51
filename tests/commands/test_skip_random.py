"""What a preview says of a random transaction is what becomes of it when its conflicting rows are skipped."""

from __future__ import annotations

import random

import pytest
from fix_program import valid
from fix_stuck import MakeStuck, Stuck

_DDL = "CREATE TABLE r (id int PRIMARY KEY, u numeric UNIQUE, v text)"
_CONFLICTING = ("skip-lsn", "s", "--rows", "conflicting")


def changes(rng: random.Random, rows: dict[int, int]) -> list[str]:
    """A transaction that the publisher takes, over few keys so that its changes meet each other.

    :param rows: unique values of the publisher's rows by id.
    """
    said = []
    for _ in range(rng.randint(3, 20)):
        key, other = rng.randint(1, 8), rng.randint(1, 8)
        free = [u for u in range(1, 12) if u not in rows.values()]
        if key not in rows and free:
            rows[key] = rng.choice(free)
            said.append(f"INSERT INTO r VALUES ({key}, {rows[key]}, '{rng.choice('abc')}')")
        elif key in rows and rng.random() < 0.3:
            del rows[key]
            said.append(f"DELETE FROM r WHERE id = {key}")
        elif key in rows and other not in rows and rng.random() < 0.4:
            rows[other] = rows.pop(key)
            said.append(f"UPDATE r SET id = {other} WHERE id = {key}")
        elif key in rows and free and rng.random() < 0.4:
            rows[key] = rng.choice(free)
            said.append(f"UPDATE r SET u = {rows[key]} WHERE id = {key}")
        elif key in rows:
            said.append(f"UPDATE r SET v = '{rng.choice('abcd')}' WHERE id = {key}")
    return said


def one(it: Stuck, rng: random.Random) -> bool:
    """One transaction that stops apply; False if none did."""
    # the target has other rows than the publisher, as far as its own constraints let it
    there = {}
    for key in rng.sample(range(1, 9), rng.randint(1, 6)):
        value = rng.choice([u for u in range(1, 12) if u not in there.values()])
        there[key] = value
    it.subdb.execute("TRUNCATE r; DELETE FROM pgsub.skipped_change")
    for key, value in there.items():
        it.subdb.execute("INSERT INTO r VALUES (%s, %s, %s)", key, value, rng.choice("abc"))
    rows = {key: int(u) for key, u in it.pubdb.rows("SELECT id, u FROM r")}
    said = changes(rng, rows)
    error = it.apply(f"BEGIN; {'; '.join(said)}; COMMIT")
    if error is None:
        return False
    found = valid("skip-lsn", it.run(*_CONFLICTING, "--preview", "--json").stdout)
    it.ok(*_CONFLICTING, "--yes")
    assert it.apply() is None, said
    kept = it.subdb.rows("SELECT body ->> 'operation', body FROM pgsub.skipped_change ORDER BY id")
    expected = [r["operation"] for r in found["rows"] if r["outcome"] in ("conflict", "dependent", "error")]
    if [operation for operation, _ in kept] != expected:
        told = [(r["operation"], r["outcome"], r["key"], r["remote"]) for r in found["rows"]]
        print(there, *said, *told, *kept, sep="\n")
        raise AssertionError
    assert found["lost"] == len(kept)
    return True


@pytest.mark.parametrize("seed", range(2))
def test_what_a_preview_says_is_what_happens(stuck: MakeStuck, seed: int) -> None:
    it = stuck()
    for database in (it.pubdb, it.subdb):
        database.execute(_DDL)
    it.pubdb.execute("ALTER PUBLICATION p ADD TABLE r")
    it.ok("enable", "s")
    it.ok("refresh", "s", "--no-copy-data", "--no-wait")
    it.ok("disable", "s")
    rng = random.Random(seed)
    assert sum(one(it, rng) for _ in range(12)) > 3
