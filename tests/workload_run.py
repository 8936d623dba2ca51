"""Writes the transactions of a workload on its publisher: see :mod:`workload`."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import psycopg
from psycopg import sql
from psycopg.sql import Composable, Composed, Identifier, Literal
from workload import REFUSED, Table

_SQL = sql.SQL


def _join(parts: Sequence[Composable]) -> Composed:
    return _SQL(", ").join(parts)


class Writer:
    """Statements of one transaction.

    :param held: the transaction is to be prepared.
    """

    def __init__(self, chance: random.Random, tables: Sequence[Table], held: bool) -> None:
        self._chance, self._tables, self._held = chance, tables, held

    def statement(self) -> tuple[str, Composable]:
        """What it does in one word, and its text."""
        chance = self._chance
        table = chance.choice(self._tables)
        if chance.random() < 0.03:
            return "truncate", self._truncate()
        if chance.random() < 0.02:
            flag = Literal(chance.random() < 0.5)
            return "message", _SQL("SELECT pg_logical_emit_message({}, 'test', 'x')").format(flag)
        inserts = [self._insert, self._insert, self._insert_some]
        changes = [self._update, self._update, self._update, self._move, self._delete]
        frozen = table.identity == "nothing" or (self._held and table.searched)
        return chance.choice(inserts if frozen else inserts + changes)(table)

    def fill(self, table: Table) -> Composed:
        """Rows to begin with, or an empty text."""
        rows = [_join([Literal(k), *self._row(table)]) for k in range(self._chance.choice([0, 12, 30]))]
        values = _join([_SQL("({})").format(row) for row in rows])
        return _SQL("INSERT INTO {} ({}) VALUES {}").format(table.name, self._into(table), values) if rows else values

    def _row(self, table: Table) -> list[Composable]:
        return [column.value(self._chance) for column in (*table.key[1:], *table.columns)]

    def _into(self, table: Table) -> Composed:
        return _join([Identifier(column.name) for column in (*table.key, *table.columns)])

    def _apart(self, table: Table) -> int:
        """What keeps a row that is to be prepared from being equal to one that others look for."""
        return self._chance.randrange(10**6, 5 * 10**8) if self._held and table.searched else 0

    def _insert(self, table: Table) -> tuple[str, Composable]:
        row = _join([Literal(self._chance.randrange(40) + self._apart(table)), *self._row(table)])
        return "insert", _SQL("INSERT INTO {} ({}) VALUES ({})").format(table.name, self._into(table), row)

    def _insert_some(self, table: Table) -> tuple[str, Composable]:
        chance = self._chance
        first, many = 100 + 100 * chance.randrange(8) + self._apart(table), chance.choice([3, 10, 60, 90])
        return "insert", _SQL("INSERT INTO {} ({}) SELECT {} FROM generate_series({}, {}) g {}").format(
            table.name,
            self._into(table),
            _join([_SQL("g"), *self._row(table)]),
            Literal(first),
            Literal(first + many),
            _SQL("ON CONFLICT DO NOTHING" if chance.random() < 0.7 else ""),
        )

    def _where(self) -> Composed:
        chance = self._chance
        low = chance.choice([chance.randrange(40), chance.randrange(40), 100 + 100 * chance.randrange(8)])
        return _SQL("k BETWEEN {} AND {}").format(Literal(low), Literal(low + chance.choice([0, 1, 3, 10, 30])))

    def _update(self, table: Table) -> tuple[str, Composable]:
        chance = self._chance
        columns = chance.sample(table.columns, k=min(len(table.columns), chance.choice([1, 1, 2, 5])))
        assigned = [_SQL("{} = {}").format(Identifier(c.name), c.value(chance)) for c in columns]
        if table.serial and chance.random() < 0.3:
            assigned.append(_SQL("n = DEFAULT").format())
        assigned = assigned or [_SQL("k = k").format()]
        return "update", _SQL("UPDATE {} SET {} WHERE {}").format(table.name, _join(assigned), self._where())

    def _move(self, table: Table) -> tuple[str, Composable]:
        chance = self._chance
        step = Literal(chance.choice([1, -1, 17, 1000]))
        assigned = [_SQL("k = k + {}").format(step)]
        if len(table.key) > 1 and chance.random() < 0.5:
            column = table.key[1]
            assigned = [_SQL("{} = {}").format(Identifier(column.name), column.value(chance))]
        return "move", _SQL("UPDATE {} SET {} WHERE {}").format(table.name, _join(assigned), self._where())

    def _delete(self, table: Table) -> tuple[str, Composable]:
        return "delete", _SQL("DELETE FROM {} WHERE {}").format(table.name, self._where())

    def _truncate(self) -> Composed:
        chance = self._chance
        some = chance.sample(self._tables, k=min(len(self._tables), chance.choice([1, 1, 2, 3])))
        more = chance.choice(["", " RESTART IDENTITY", " RESTART IDENTITY CASCADE"])
        return _SQL("TRUNCATE {}{}").format(_join([table.name for table in some]), _SQL(more))


@dataclass
class Run:
    """Writes a workload's transactions in interleaved sessions of one publisher.

    :ivar held: prepared and neither committed nor rolled back.
    :ivar done: how often each kind of statement did something.
    :ivar mark: the first statement of every transaction, if any.
    :ivar decoded: whether what is prepared was decoded; it is committed if not.
    """

    sessions: Sequence[psycopg.Connection]
    control: psycopg.Connection
    tables: Sequence[Table]
    name: str
    chance: random.Random
    held: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    mark: bytes | None = None
    decoded: Callable[[], bool] = lambda: True
    _gids: int = 0

    def fill(self) -> None:
        """Rows to begin with."""
        with self.control.transaction():
            for table in self.tables:
                text = Writer(self.chance, self.tables, False).fill(table)
                if text.as_string():
                    self.control.execute(_SQL("SAVEPOINT fill; {}; RELEASE fill").format(text))

    def phase(self, seeds: Sequence[int], between: Callable[[], None]) -> None:
        """All of these transactions; ``between`` is called between two statements now and then."""
        waiting = deque(seeds)
        active: list[Iterator[None] | None] = [None] * len(self.sessions)
        while waiting or any(active):
            place = self.chance.choice([p for p, one in enumerate(active) if one is not None or waiting])
            running = active[place] or self._transaction(self.sessions[place], waiting.popleft())
            active[place] = running if next(running, self) is None else None
            if self.held and self.chance.random() < 0.05:
                self.finish_one()
            if self.chance.random() < 0.02:
                between()

    def finish_one(self) -> None:
        """Decide one of the prepared transactions."""
        gid = self.held.pop(self.chance.randrange(len(self.held)))
        decision = self.chance.choice(["COMMIT", "COMMIT", "ROLLBACK"])
        if decision == "ROLLBACK" and not self.decoded():
            decision = "COMMIT"
        self.control.execute(_SQL("{} PREPARED {}").format(_SQL(decision), Literal(gid)))

    def finish(self) -> None:
        """Decide all of them."""
        while self.held:
            self.finish_one()

    def _transaction(self, session: psycopg.Connection, seed: int) -> Iterator[None]:
        chance = random.Random(f"transaction {seed}")
        end = chance.choices(["COMMIT", "ROLLBACK", "PREPARE"], [6, 2, 3])[0]
        writer = Writer(chance, self.tables, end == "PREPARE")
        session.execute("BEGIN")
        if self.mark is not None:
            session.execute(self.mark)
        saved: list[str] = []
        for _ in range(chance.choice([1, 1, 2, 5, 12])):
            self._savepoints(session, chance, saved)
            self._statement(session, *writer.statement())
            yield
        if end != "PREPARE":
            session.execute(end.encode())
            return
        self._gids += 1
        gid = f"{self.name} it's {self._gids}"
        session.execute(_SQL("PREPARE TRANSACTION {}").format(Literal(gid)))
        self.held.append(gid)

    def _savepoints(self, session: psycopg.Connection, chance: random.Random, saved: list[str]) -> None:
        for _ in range(chance.choice([0, 0, 1, 2])):
            action = chance.choice(["SAVEPOINT", "SAVEPOINT", "RELEASE", "ROLLBACK TO"])
            if action == "SAVEPOINT":
                saved.append(f"s{len(saved)}")
                session.execute(_SQL("SAVEPOINT {}").format(Identifier(saved[-1])))
            elif saved:
                place = chance.randrange(len(saved))
                session.execute(_SQL("{} {}").format(_SQL(action), Identifier(saved[place])))
                del saved[place + (action == "ROLLBACK TO") :]

    def _statement(self, session: psycopg.Connection, kind: str, text: Composable) -> None:
        try:
            cursor = session.execute(_SQL("SAVEPOINT w; {}; RELEASE w").format(text))
        except REFUSED:
            session.execute("ROLLBACK TO w")
            return
        cursor.nextset()
        self.done[kind] += cursor.rowcount != 0
