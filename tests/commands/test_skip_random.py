"""What a preview says of a random transaction is what becomes of it when its conflicting rows are skipped."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fix_program import valid
from fix_stuck import MakeStuck, Stuck
from thorough import thorough

from pgsub.common.conflict_rules import ALLOWED

_DDL = "CREATE TABLE r (id int PRIMARY KEY, u {} UNIQUE, v text)"
_NUMBERS = [str(n) for n in range(12)]
_WORDS = ["", "a", "A", "b", "B", "ba", "bA", "Ba", "c", "C", "d", "e"]  #: of which the target takes some for equal
#: What makes values unique on the target only.
_FOLDING = {
    "numbers": "",
    "expression": "CREATE UNIQUE INDEX ON r (lower(u))",
    "collation": "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"
    "CREATE UNIQUE INDEX ON r (u COLLATE ci)",
    "column": "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false);"
    "ALTER TABLE r ALTER u TYPE text COLLATE ci, ADD CHECK (u <> 'E' OR u IS NULL)",
}
_CONFLICTING = ("skip-lsn", "s", "--rows", "conflicting")


def changes(rng: random.Random, rows: dict[int, int], values: list[str]) -> list[str]:
    """A transaction that the publisher takes, over few keys so that its changes meet each other.

    :param rows: unique values of the publisher's rows by id, as positions in ``values``.
    """
    said = []
    for _ in range(rng.randint(3, 20)):
        key, other = rng.randint(1, 8), rng.randint(1, 8)
        free = [u for u in range(1, 12) if u not in rows.values()]
        if key not in rows and free:
            rows[key] = rng.choice(free)
            said.append(f"INSERT INTO r VALUES ({key}, '{values[rows[key]]}', '{rng.choice('abc')}')")
        elif key in rows and rng.random() < 0.3:
            del rows[key]
            said.append(f"DELETE FROM r WHERE id = {key}")
        elif key in rows and other not in rows and rng.random() < 0.4:
            rows[other] = rows.pop(key)
            said.append(f"UPDATE r SET id = {other} WHERE id = {key}")
        elif key in rows and free and rng.random() < 0.4:
            rows[key] = rng.choice(free)
            said.append(f"UPDATE r SET u = '{values[rows[key]]}' WHERE id = {key}")
        elif key in rows:
            said.append(f"UPDATE r SET v = '{rng.choice('abcd')}' WHERE id = {key}")
    return said


def one(it: Stuck, rng: random.Random, values: list[str], *, ruled: bool) -> bool:
    """One transaction that stops apply; False if none did."""
    # the target has other rows than the publisher, as far as its own constraints let it
    there = {}
    for key in rng.sample(range(1, 9), rng.randint(1, 6)):
        value = rng.choice([u for u in range(1, 11) if u not in there.values()])
        there[key] = value
    it.subdb.execute("TRUNCATE r; DELETE FROM pgsub.skipped_change")
    if ruled:
        _rules(it, rng)
    for key, value in there.items():
        it.subdb.execute(
            "INSERT INTO r VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", key, values[value], rng.choice("abc")
        )
    rows = {key: values.index(str(u)) for key, u in it.pubdb.rows("SELECT id, u FROM r")}
    said = changes(rng, rows, values)
    before = _target(it)
    error = it.apply(f"BEGIN; {'; '.join(said)}; COMMIT")
    if error is None:
        return False
    found = valid("skip-lsn", it.run(*_CONFLICTING, "--preview", "--json").stdout)
    it.ok(*_CONFLICTING, "--yes")
    assert it.apply() is None, said
    letters = [body for (body,) in it.subdb.rows("SELECT body FROM pgsub.skipped_change ORDER BY id")]
    kept = [(body["operation"], (body.get("new") or body["old"])["id"]) for body in letters]
    left = [r for r in found["rows"] if r["outcome"] in ("conflict", "dependent", "error", "skipped")]
    # what rules put aside is written by itself
    if sorted(kept) != sorted((r["operation"], (r["remote"] or r["key"])["id"]) for r in left):
        told = [(r["operation"], r["outcome"], r["rule"], r["key"], r["remote"]) for r in found["rows"]]
        print(there, *said, *told, *letters, sep="\n")
        raise AssertionError
    assert found["lost"] == len([r for r in left if r["outcome"] != "skipped"])
    assert _target(it) == _predicted(found["rows"], before), (there, *said)
    return True


def _target(it: Stuck) -> dict[str, dict[str, str]]:
    rows = it.subdb.rows("SELECT id::text, jsonb_build_object('id', id::text, 'u', u::text, 'v', v) FROM r")
    return dict(rows)


def _predicted(rows: list[dict[str, Any]], before: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The target after those changes that a preview says would be applied."""
    there = dict(before)
    for one in rows:
        if one["outcome"] == "would_apply":
            for gone in [*(other["row"] for other in one["existing"]), *filter(None, [one["local"]])]:
                there.pop(gone["id"], None)
            if one["remote"] is not None:
                there[one["remote"]["id"]] = one["remote"]
    return there


def _rules(it: Stuck, rng: random.Random) -> None:
    """Rules for some types of conflict; the others are dealt with as by the server."""
    words = [f"--on-conflict={kind}={rng.choice((*allowed, *['default'] * 4))}" for kind, allowed in ALLOWED.items()]
    it.ok("alter", "s", *words)


#: The embedded server is built without ICU.
_SEEDS = [
    (2, True, "expression", None), (4, True, "collation", "17"),
    *thorough([
        (0, False, "numbers", None), (1, True, "numbers", None),
        (3, False, "collation", "17"), (5, False, "column", "17"),
    ]),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("seed", "ruled", "folding", "target"), _SEEDS, indirect=["target"])
def test_what_a_preview_says_is_what_happens(stuck: MakeStuck, seed: int, ruled: bool, folding: str) -> None:
    it = stuck()
    for database in (it.pubdb, it.subdb):
        database.execute(_DDL.format("numeric" if folding == "numbers" else "text"))
    it.subdb.execute(_FOLDING[folding])
    it.pubdb.execute("ALTER PUBLICATION p ADD TABLE r")
    it.ok("enable", "s")
    it.ok("refresh", "s", "--no-copy-data", "--no-wait")
    it.ok("disable", "s")
    rng, values = random.Random(seed), _NUMBERS if folding == "numbers" else _WORDS
    assert sum(one(it, rng, values, ruled=ruled) for _ in range(12)) > 3
