"""``pgsub verify`` in a soak: it gives no false alarm, and faults that are planted are found, and repaired once each.

They are planted in databases of their own on both servers (:mod:`reconcile.planted`), whose subscription the same
launcher serves: what is struck is the same.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import soak_audit as audit
from fix_faults import until
from fix_servers import Database
from reconcile import planted
from soak_ground import COMMON, LIMIT, NAME, Ground
from workload_compare import members

PLANTED = "planted"  #: the subscription, and both databases
#: Without a key: such a table is not repaired row by row.
_KEYLESS = [name for name in planted.TABLES if not planted.keyed(name)]


class Verify:
    """The command, killed and repeated until it has an answer.

    :ivar compared: tables that were compared.
    :ivar again: commands without an answer: they were killed, or something was struck that they need.
    """

    def __init__(self, ground: Ground, chance: random.Random) -> None:
        self._ground, self._chance = ground, chance
        self.compared = self.again = 0

    def false_alarms(self) -> Iterator[str]:
        """Compare the tables of the random workload: what is said to differ and is meant to be equal."""
        ground = self._ground
        alike = [table.name.as_string() for table in ground.tables if table.alike] + [*COMMON, "holes"]
        names = members(ground.pubdb, alike)
        for table in self.run(NAME):
            if table["outcome"] == "different" and (table["schemaname"], table["relname"]) in names:
                yield f"false alarm: {table}"

    def run(self, name: str, *words: str) -> list[dict[str, Any]]:
        """Compare the tables of a subscription; those that were compared.

        :param words: further options.
        """
        deadline = time.monotonic() + LIMIT
        while (found := self._once(name, *words)) is None:
            assert time.monotonic() < deadline, f"no answer of verify\n{self._ground.site.said()}"
            self.again += 1
        self.compared += len(found)
        return found

    def _once(self, name: str, *words: str) -> list[dict[str, Any]] | None:
        printed = self._ground.folder / "verify.json"
        command = self._ground.start("verify", name, "--json", "--timeout", "150s", *words, printed=printed)
        if self._chance.random() < 0.25:
            time.sleep(self._chance.choice([0.5, 1.0, 2.0, 4.0]))
            command.kill()
        code = command.wait(LIMIT)
        return _compared(printed) if code in (0, 6) else None


def _compared(printed: Path) -> list[dict[str, Any]]:
    document: dict[str, Any] = json.loads(printed.read_text())
    return [table for table in document["tables"] if table["publisher_rows"] is not None]


class Planted:
    """The subscription with every kind of published table.

    :ivar rows: those that were made wrong, all of which were found.
    """

    def __init__(self, ground: Ground, verify: Verify, chance: random.Random) -> None:
        self._ground, self._verify, self._chance = ground, verify, chance
        self._times = self.rows = 0
        self._replaced: Counter[str] = Counter()
        self.pubdb, self.subdb = Database(ground.publisher, PLANTED), Database(ground.target, PLANTED)
        for database, side in ((self.pubdb, "pub"), (self.subdb, "sub")):
            database.execute(planted.made(side))
        first, *others = planted.PUBLICATIONS
        more = [word for name in others for word in ("--publication", name)]
        ground.create(PLANTED, first, "--no-copy-data", *more, database=PLANTED)

    def written(self) -> planted.Writer:
        """Changes of rows beside those that are planted, as long as the block lasts."""
        return planted.Writer(self.pubdb, self._chance.randrange(2**24), pause=0.02)

    def plant(self) -> dict[str, planted.Found]:
        """Make rows wrong, while no server is away."""
        self._times += 1
        found = planted.of_tables(
            {name: planted.plant(self.subdb, name, self._chance, self._times) for name in planted.KINDS}
        )
        self.rows += sum(map(len, found.values()))
        return found

    def found(self, wrong: dict[str, planted.Found]) -> Iterator[str]:
        """Compare: what differs is what was planted."""
        yield from _unlike(wrong, self._differences(), "planted, and found")

    def repaired(self, wrong: dict[str, planted.Found]) -> Iterator[str]:
        """Repair it: every row is written once, and none is wrong behind it but those without a key."""
        self._verify.run(PLANTED, "--repair", "--yes")
        left = {name: wrong[name] if name in _KEYLESS else set() for name in planted.TABLES}
        yield from _unlike(left, self._differences(), "left to a repair, and found behind it")
        for name in set(planted.TABLES) - set(_KEYLESS):
            _, updated, deleted = planted.by_repair(wrong[name])
            self._replaced[name] += updated + deleted
        if (found := Counter(dict(self.subdb.rows(planted.REPLACED)))) != self._replaced:
            yield f"replaced by repairs: {found}, not {self._replaced}"

    def copied(self) -> Iterator[str]:
        """Copy the tables without a key again: nothing is wrong then."""
        words = [word for name in _KEYLESS for word in ("--resync", f"public.{name}")]
        self._ground.ok("refresh", PLANTED, *words, "--yes")
        states = "SELECT array_agg(DISTINCT srsubstate::text) FROM pgsub.subscription_rel"
        until(lambda: self._served(states) == ["r"], lambda: f"not ready\n{self._ground.site.said()}", LIMIT)
        yield from _unlike(planted.of_tables({}), self._differences(), "wrong after a copy, and found")

    def _served(self, query: str) -> Any:
        self._ground.alive()
        return self.subdb.value(query)

    def _differences(self) -> dict[str, planted.Found]:
        return {
            table["relname"]: {(one["kind"], _key(one)) for one in table["differences"]}
            for table in self._verify.run(PLANTED)
        }

    def drop(self) -> Iterator[str]:
        """Remove the subscription; what is left over."""
        self._ground.alive()
        self._ground.ok("drop", PLANTED, "--yes")
        yield from audit.dropped(self.subdb)


def _key(difference: dict[str, Any]) -> str:
    """The integer, as a column of any type has it."""
    values = difference["key"] or difference.get("publisher") or difference.get("target")
    return str(int(float(values["id"])))


def _unlike(expected: dict[str, planted.Found], found: dict[str, planted.Found], what: str) -> Sequence[str]:
    return [
        f"{what}: {name}: {sorted(expected[name])}, and {sorted(found.get(name, set()))}"
        for name in planted.TABLES
        if found.get(name) != expected[name]
    ]
