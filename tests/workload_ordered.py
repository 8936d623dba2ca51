"""Random transactions whose order of commits is known, with the state that the publisher had after each of them.

Foreign keys, several unique indexes, keyless tables, TRUNCATE, DDL, streamed and prepared transactions: what several
writers have to keep in order. A reader of the target that looks at :data:`STATE` at any moment must find one of these
states, and none that is older than what it has seen. See ``tests/apply/test_writers_random.py``.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg
from fix_servers import Database
from psycopg import sql

#: On both sides. Each transaction writes its number first into ``first`` and last into ``last``.
TABLES = """
CREATE TABLE first (n int PRIMARY KEY, what text);
CREATE TABLE person (id int PRIMARY KEY, email text UNIQUE, nick text, badge int, big text, UNIQUE (nick, badge));
CREATE UNIQUE INDEX ON person (lower(nick)) WHERE badge > 10;
ALTER TABLE person ALTER big SET STORAGE EXTERNAL;
CREATE TABLE orders (person int REFERENCES person ON DELETE CASCADE ON UPDATE CASCADE, part int, code text UNIQUE,
    total int, PRIMARY KEY (person, part));
CREATE TABLE item (id int PRIMARY KEY, person int, part int, n int UNIQUE, at timestamptz,
    FOREIGN KEY (person, part) REFERENCES orders ON DELETE SET NULL ON UPDATE CASCADE);
CREATE TABLE whole (id int PRIMARY KEY, a text UNIQUE, b int);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE indexed (id int NOT NULL, other int NOT NULL, v text, UNIQUE (other));
CREATE UNIQUE INDEX indexed_id ON indexed (id);
ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_id;
CREATE TABLE swept (id int PRIMARY KEY, v text);
CREATE TABLE keyless (v int, t text);
ALTER TABLE keyless REPLICA IDENTITY FULL;
CREATE TABLE last (n int PRIMARY KEY REFERENCES first);
"""
_COLUMNS = {
    "first": "n, what",
    "person": "id, email, nick, badge, md5(big)",
    "orders": "person, part, code, total",
    "item": "id, person, part, n, at",
    "whole": "id, a, b",
    "indexed": "id, other, v",
    "swept": "id, v",
    "keyless": "v, t",
    "last": "n",
}
NAMES = tuple(_COLUMNS)
#: One statement, so that its snapshot is taken with the locks held: TRUNCATE is not seen by older ones as they should.
STATE = "SELECT " + ", ".join(
    f"(SELECT count(*) || ' ' || md5(coalesce(string_agg(r::text, ' ' ORDER BY r::text COLLATE \"C\"), ''))"
    f" FROM (SELECT {columns} FROM {name}) r)"
    for name, columns in _COLUMNS.items()
)
_PERSONS, _WORDS = 120, 60
#: How likely each is among the statements.
_STATEMENTS = {
    "INSERT INTO person VALUES (%(p)s, %(word)s, %(name)s, %(few)s, %(big)s)": 6,
    "INSERT INTO person SELECT g, 'mail' || g, 'n' || g, g %% 30, %(big)s FROM generate_series(%(p)s, %(p)s + 5) g"
    " ON CONFLICT DO NOTHING": 2,
    "UPDATE person SET email = %(word)s WHERE id = %(p)s": 4,
    "UPDATE person SET email = NULL WHERE email = %(word)s": 4,
    "UPDATE person SET badge = badge + 1 WHERE id BETWEEN %(p)s AND %(p)s + 3": 3,
    "UPDATE person SET nick = %(name)s, badge = %(few)s WHERE id = %(p)s": 4,
    "UPDATE person SET id = id + 500 WHERE id = %(p)s": 1,
    "UPDATE person SET id = id - 500 WHERE id > 500 AND id %% 7 = %(few)s %% 7": 1,
    "DELETE FROM person WHERE id = %(p)s": 4,
    "INSERT INTO orders SELECT id, %(few)s, %(word)s, 1 FROM person WHERE id BETWEEN %(p)s AND %(p)s + 9 LIMIT 1": 6,
    "INSERT INTO orders SELECT id, g, NULL, g FROM person, generate_series(1, 4) g WHERE id = %(p)s"
    " ON CONFLICT DO NOTHING": 3,
    "UPDATE orders SET total = total + 1, code = %(word)s WHERE person = %(p)s AND part = %(few)s": 3,
    "UPDATE orders SET total = total + 1 WHERE person BETWEEN %(p)s AND %(p)s + 20": 3,
    "UPDATE orders SET part = part + 100 WHERE person = %(p)s": 1,
    "DELETE FROM orders WHERE person = %(p)s OR code = %(word)s": 3,
    "INSERT INTO item SELECT %(x)s, person, part, %(y)s, now() FROM orders WHERE person > %(p)s LIMIT 1": 6,
    "UPDATE item SET n = NULL WHERE n BETWEEN %(y)s AND %(y)s + 20": 3,
    "UPDATE item SET n = %(y)s WHERE id = %(x)s": 3,
    "DELETE FROM item WHERE id BETWEEN %(x)s AND %(x)s + 9": 3,
    "INSERT INTO whole VALUES (%(p)s, %(word)s, %(y)s)": 3,
    "UPDATE whole SET b = b + 1 WHERE id < %(p)s": 2,
    "UPDATE whole SET a = %(word)s WHERE id = %(p)s": 2,
    "DELETE FROM whole WHERE id = %(p)s OR a = %(word)s": 3,
    "INSERT INTO indexed VALUES (%(p)s, %(y)s, %(word)s)": 3,
    "UPDATE indexed SET other = %(y)s WHERE id = %(p)s": 3,
    "DELETE FROM indexed WHERE other %% 50 = %(y)s %% 50": 2,
    "INSERT INTO swept VALUES (%(x)s, %(word)s) ON CONFLICT (id) DO UPDATE SET v = swept.v || '+'": 3,
}
#: What one session has to apply: rarely, or nothing else would be left.
_APART = {
    "TRUNCATE swept": 3,
    "TRUNCATE orders, item": 1,
    "INSERT INTO keyless VALUES (%(few)s, %(word)s)": 2,
    "DELETE FROM keyless WHERE v = %(few)s": 2,
    "UPDATE keyless SET t = %(word)s WHERE v = %(few)s": 1,
    "SELECT pg_logical_emit_message(true, 'test', %(word)s)": 1,
    "INSERT INTO person SELECT g, NULL, NULL, NULL, repeat('x', 2500) FROM generate_series(2000, 2080) g"
    " ON CONFLICT (id) DO UPDATE SET badge = 1, big = repeat('y', 2500)": 2,
}
_REFUSED = (
    psycopg.errors.IntegrityError,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.CardinalityViolation,
    psycopg.errors.DeadlockDetected,
)
#: On the targets, and on the publisher where that has it too; columns that nobody looks at.
_DDL: tuple[tuple[str, str], ...] = (
    ("ALTER TABLE person ADD extra{n} int DEFAULT 7", ""),
    ("ALTER TABLE orders ADD extra{n} text", "ALTER TABLE orders ADD extra{n} text DEFAULT 'x'"),
    ("ALTER TABLE whole ALTER a TYPE varchar(40)", ""),
    ("CREATE UNIQUE INDEX again{n} ON person (email)", ""),
    ("CREATE INDEX more{n} ON orders (total)", ""),
    ("CREATE OR REPLACE TRIGGER watched AFTER UPDATE ON whole FOR EACH ROW EXECUTE FUNCTION nothing();"
     "ALTER TABLE whole ENABLE ALWAYS TRIGGER watched", ""),
    ("DROP TRIGGER IF EXISTS watched ON whole", ""),
    ("ALTER TABLE swept REPLICA IDENTITY FULL", "ALTER TABLE swept REPLICA IDENTITY FULL"),
    ("ALTER TABLE swept REPLICA IDENTITY DEFAULT", "ALTER TABLE swept REPLICA IDENTITY DEFAULT"),
)  # fmt: skip
TARGET = "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"


@dataclass
class Ordered:
    """A publisher's transactions in interleaved sessions, and its states in the order of the commits.

    :param apart: how likely a transaction has something in it that one session has to apply.
    :ivar states: what :data:`STATE` found, and its place.
    """

    pubdb: Database
    targets: Sequence[Database]
    chance: random.Random
    apart: float
    two_phase: bool
    states: dict[tuple[str, ...], int] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    _numbers: int = 0
    _held: list[str] = field(default_factory=list)

    def note(self) -> None:
        """Remember the state that there is now."""
        self.states.setdefault(look(self.pubdb.connection), len(self.states))

    def work(self, sessions: Sequence[psycopg.Connection], count: int, between: Callable[[], None]) -> None:
        """So many transactions; ``between`` is called now and then, whatever is under way."""
        active: deque[tuple[psycopg.Connection, Iterator[None]]] = deque()
        free = list(sessions)
        while count or active:
            if count and free and self.chance.random() < 0.5:
                count -= 1
                session = free.pop()
                active.append((session, self._transaction(session)))
            elif active:
                active.rotate(self.chance.randrange(len(active)))
                session, running = active.popleft()
                if next(running, self) is None:
                    active.append((session, running))
                else:
                    free.append(session)
            if self._held and self.chance.random() < 0.05:
                self._decide()
            if self.chance.random() < 0.03:
                between()

    def finish(self) -> None:
        """Decide what is prepared."""
        while self._held:
            self._decide()

    def _decide(self) -> None:
        gid = self._held.pop(self.chance.randrange(len(self._held)))
        word = "COMMIT" if self.chance.random() < 0.7 else "ROLLBACK"
        self.pubdb.connection.execute(sql.SQL("{} PREPARED {}").format(sql.SQL(word), sql.Literal(gid)))
        self.done[f"{word} PREPARED"] += 1
        self.note()

    def _transaction(self, session: psycopg.Connection) -> Iterator[None]:
        chance = self.chance
        self._numbers += 1
        number = self._numbers
        apart = chance.random() < self.apart
        session.execute("BEGIN")
        session.execute("INSERT INTO first VALUES (%s, 'begun')", (number,))
        cleared = False  # who looks at the state would wait for such a transaction
        for _ in range(chance.choice([1, 1, 2, 5, 12])):
            cleared = self._statement(session, apart) or cleared
            if chance.random() < 0.2 and not cleared:
                yield
        session.execute("INSERT INTO last VALUES (%s)", (number,))
        ends = ["COMMIT", "ROLLBACK"] + ["PREPARE"] * (self.two_phase and apart and not cleared)
        end = chance.choices(ends, [20, 1, 20][: len(ends)])[0]
        if end == "PREPARE":
            session.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(f"ordered {number}")))
            self._held.append(f"ordered {number}")
        else:
            session.execute(end.encode())
            self.done[end] += 1
        if end == "COMMIT":
            self.note()

    def _statement(self, session: psycopg.Connection, apart: bool) -> bool:
        """Run one; return whether it was TRUNCATE."""
        chance = self.chance
        some = _APART if apart and chance.random() < 0.5 else _STATEMENTS
        text = chance.choices(list(some), list(some.values()))[0]
        values = {
            "p": chance.randrange(_PERSONS),
            "x": chance.randrange(400),
            "y": chance.randrange(400),
            "few": chance.randrange(20),
            "word": f"w{chance.randrange(_WORDS)}",
            "name": chance.choice(["Ann", "ann", "Bob", "BOB", "Eve", None]),
            "big": chance.choice([None, "short", "".join(chance.choices("abcdefgh", k=2500))]),
        }
        session.execute("SAVEPOINT s")
        try:
            found = session.execute(text.encode(), {k: v for k, v in values.items() if f"%({k})s" in text})
            self.done[text.partition(" ")[0]] += found.rowcount != 0
        except _REFUSED:
            session.execute("ROLLBACK TO s")
        session.execute("RELEASE s")
        return text.startswith("TRUNCATE")

    def mark(self) -> int:
        """A last transaction, to be waited for: a row of ``first``."""
        self._numbers += 1
        self.pubdb.execute("INSERT INTO first VALUES (%s, 'mark')", self._numbers)
        self.note()
        return self._numbers

    def alter(self) -> str:
        """Alter a table on the targets and perhaps on the publisher, whatever is under way.

        Not where something else holds a lock for long: a transaction that is prepared, for one.
        """
        if self._held:
            return "refused"
        self._numbers += 1
        texts = [text.format(n=self._numbers) for text in self.chance.choice(_DDL)]
        for database in (*self.targets, self.pubdb):
            text = texts[database is self.pubdb]
            if text and not self._altered(database, text) and database is self.targets[0]:
                return "refused"
        self.done["DDL"] += 1
        return texts[0]

    def _altered(self, database: Database, text: str) -> bool:
        """Alter a table. Of the targets the first may refuse; the other then follows."""
        tries = 3 if database is self.targets[0] else 60 if database in self.targets else 1
        with database.connect() as session:
            session.execute("SET lock_timeout = '500ms'")
            for _ in range(tries):
                with suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                    session.execute(text.encode())
                    return True
        return False

    def stray(self) -> None:
        """Rows go from the targets, so that changes of the publisher miss them; nothing may be under way."""
        rest = self.chance.randrange(5)
        for database in self.targets:
            database.execute(
                f"DELETE FROM item WHERE id % 5 = {rest}; DELETE FROM whole WHERE id % 5 = {rest};"
                f"DELETE FROM orders WHERE (person + part) % 5 = {rest}; DELETE FROM person WHERE id % 5 = {rest}"
            )
        self.done["stray"] += 1


def look(session: psycopg.Connection) -> tuple[str, ...]:
    """The state of all tables."""
    row = session.execute(STATE.encode()).fetchone()
    assert row is not None
    return tuple(row)


def number(state: tuple[str, ...]) -> str:
    """How many rows each table has, for whoever reads a failure."""
    return " ".join(f"{name}={re.split(' ', one)[0]}" for name, one in zip(NAMES, state, strict=True))
