"""Random changes on both sides under random rules: the target and the record are what a simple model says."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from fix_pair import MakePair, Pair
from fix_servers import Database

from pgsub.apply.worker import feedback
from pgsub.common.conflict_rules import ALLOWED, ERROR, IDENTICAL

TABLE = "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text)"
ACTIONS = {"skip": "skipped", "keep_local": "kept", "apply_remote": "applied", "last_update_wins": ""}
ROUNDS, CHANGES, KEYS = 5, 60, 25


@dataclass(frozen=True)
class Row:
    id: int
    u: int | None
    v: str


@dataclass
class There:
    """A row of the target: when a local client wrote it last, None if the subscription did."""

    row: Row
    at: int | None


class Target:
    """What the rules say, row by row."""

    def __init__(self, rules: dict[str, str]) -> None:
        self.rules = rules
        self.rows: dict[int, There] = {}
        self.met: Counter[tuple[str, str]] = Counter()
        self.letters = 0

    def in_the_way(self, new: Row, own: int | None = None) -> list[There]:
        """One an index."""
        others = [there for there in self.rows.values() if there.row.id != own]
        by_key = [there for there in others if there.row.id == new.id]
        return by_key + [there for there in others if new.u is not None and there.row.u == new.u]

    def made(self, kind: str, at: int, local: list[There], how: str | None = None) -> bool:
        """Whether the rule has the change made; what it did is counted."""
        how = how or self.rules.get(kind, ALLOWED[kind][0])
        newest = max((there.at for there in local if there.at is not None), default=-1)
        action = ACTIONS[how] or ("applied" if newest < at else "kept")
        default = how == ALLOWED[kind][0]
        self.met[kind, "" if default else action] += 1
        self.letters += action == "skipped" and not default
        return action == "applied"

    def insert(self, new: Row, at: int) -> bool:
        hits = self.in_the_way(new)
        if hits:
            kind = "insert_exists" if len(hits) == 1 else "multiple_unique_conflicts"
            identical = all(there is hits[0] and there.row == new for there in hits)
            if not self.made(kind, at, hits, self.rules.get(IDENTICAL) if identical else None):
                return False
        self.put(new, hits)
        return True

    def put(self, new: Row, hits: list[There]) -> None:
        for there in hits:
            self.rows.pop(there.row.id, None)
        self.rows[new.id] = There(new, None)

    def update(self, searched: int, new: Row, at: int) -> None:
        there = self.rows.get(searched)
        if there is None:
            if self.rules.get("update_missing") == "apply_remote":
                self.met["update_missing", "applied" if self.insert(new, at) else "kept"] += 1
            else:
                self.made("update_missing", at, [])
            return
        if there.at is not None and not self.made("update_origin_differs", at, [there]):
            return
        hits = self.in_the_way(new, searched)
        kind = "update_exists" if len(hits) == 1 else "multiple_unique_conflicts"
        if not hits or self.made(kind, at, hits):
            self.put(new, [there, *hits])

    def delete(self, searched: int, at: int) -> None:
        there = self.rows.get(searched)
        if there is None:
            self.made("delete_missing", at, [])
        elif there.at is None or self.made("delete_origin_differs", at, [there]):
            del self.rows[searched]


class World:
    """Both databases, what was changed there in which order, and the model."""

    def __init__(self, seed: int, pair: Pair, rules: dict[str, str]) -> None:
        self.random = random.Random(seed)
        self.pair = pair
        self.target = Target(rules)
        self.remote: dict[int, Row] = {}
        self.pending: list[tuple[str, int, Row | None, int]] = []
        self.clock = 0

    def any_row(self) -> Row:
        return Row(
            self.random.randrange(KEYS),
            self.random.choice([None, *range(KEYS)]),
            self.random.choice(["a", "b"]),
        )

    def fits(self, rows: dict[int, Row], new: Row, own: int | None = None) -> bool:
        others = [row for row in rows.values() if row.id != own]
        return all(row.id != new.id and (new.u is None or row.u != new.u) for row in others)

    def change(self, rows: dict[int, Row]) -> tuple[str, int, Row | None] | None:
        """A change that the constraints of a side let pass."""
        new, verb = self.any_row(), self.random.choice(["INSERT", "INSERT", "UPDATE", "UPDATE", "DELETE"])
        if verb == "INSERT":
            return (verb, new.id, new) if self.fits(rows, new) else None
        if not rows:
            return None
        key = self.random.choice(sorted(rows))
        if verb == "DELETE":
            return verb, key, None
        return (verb, key, new) if self.fits(rows, new, key) else None

    def remote_transaction(self) -> None:
        self.clock += 1
        statements = []
        for _ in range(self.random.choice([1, 1, 3, 80])):
            found = self.change(self.remote)
            if found is not None:
                _, key, new = found
                self.remote.pop(key, None)
                if new is not None:
                    self.remote[new.id] = new
                statements.append(statement(*found))
                self.pending.append((*found, self.clock))
        if statements:
            self.pair.pubdb.execute("; ".join(["BEGIN", *statements, "COMMIT"]))

    def local_change(self) -> None:
        self.clock += 1
        now = self.pair.subdb.rows("SELECT id, u, v FROM t")
        found = self.change({row[0]: Row(*row) for row in now})
        if found is not None:
            self.pair.subdb.execute(statement(*found))
            _, key, new = found
            self.target.rows.pop(key, None)
            if new is not None:
                self.target.rows[new.id] = There(new, self.clock)

    def apply(self) -> None:
        self.pair.apply()
        for verb, key, new, at in self.pending:
            if verb == "INSERT":
                assert new is not None
                self.target.insert(new, at)
            elif verb == "UPDATE":
                assert new is not None
                self.target.update(key, new, at)
            else:
                self.target.delete(key, at)
        self.pending = []


def statement(verb: str, key: int, new: Row | None) -> str:
    if new is None:
        return f"DELETE FROM t WHERE id = {key}"
    u = "NULL" if new.u is None else new.u
    if verb == "INSERT":
        return f"INSERT INTO t VALUES ({new.id}, {u}, '{new.v}')"
    return f"UPDATE t SET id = {new.id}, u = {u}, v = '{new.v}' WHERE id = {key}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_random_changes_end_as_the_rules_say(pair: MakePair, seed: int) -> None:
    choice = random.Random(seed)
    rules = {kind: choice.choice([how for how in allowed if how != ERROR]) for kind, allowed in ALLOWED.items()}
    options = {"streaming": choice.choice(["off", "parallel"]), "apply_mode": "batched"}
    p = pair(TABLE, on_conflict=tuple(f"{kind}={how}" for kind, how in rules.items()), **options)
    world = World(seed, p, rules)
    for _ in range(ROUNDS):
        # local changes are made of what is there before the remote ones come: both sides act at once
        for _ in range(CHANGES // 4):
            choice.choice([world.remote_transaction, world.local_change])()
        world.apply()
        found = {row[0]: Row(*row) for row in p.subdb.rows("SELECT id, u, v FROM t")}
        assert found == {key: there.row for key, there in world.target.rows.items()}, rules
    met = Counter((body["conflict_type"], body["action"]) for body in p.events() if body["kind"] == "conflict")
    assert met == world.target.met, rules
    assert p.subdb.value("SELECT count(*) FROM pgsub.skipped_change") == world.target.letters
    assert sum(met.values()) > 10


@pytest.mark.long
def test_two_databases_that_subscribe_to_each_other_become_alike(
    subdb: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    choice = random.Random(7)
    kinds = ("insert_exists", "update_origin_differs")
    options = {"origin": "none", "on_conflict": tuple(f"{kind}=last_update_wins" for kind in kinds)}
    with contextlib.ExitStack() as stack:
        other = Database(subdb.server, f"{subdb.name}_other")
        stack.callback(other.drop)
        sides = (subdb, other)
        for side in sides:
            side.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION p FOR TABLE t")
        pairs = [stack.enter_context(contextlib.closing(Pair(a, b, **options))) for a, b in (sides, sides[::-1])]
        for pair in pairs:
            pair.subscribe("r", [("public", "t")])
        for turn in range(4):
            for number in range(40):
                key, value = choice.randrange(10), f"{turn}.{number}"
                choice.choice(sides).execute(
                    f"INSERT INTO t VALUES ({key}, '{value}') ON CONFLICT (id) DO UPDATE SET v = EXCLUDED.v"
                )
            for pair in choice.sample(pairs, 2):
                pair.catch_up()
            pairs[0].same("t")
        met = [event["conflict_type"] for pair in pairs for event in pair.events()]
        assert set(met) == set(kinds)
