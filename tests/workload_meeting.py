"""What happens on all sides of a workload between two phases, while nothing is under way: see :mod:`workload`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fix_servers import Database
from psycopg import sql
from psycopg.sql import Composable, Identifier, Literal
from workload import ALL, EXACT, Column, Table, Workload

_SQL = sql.SQL
#: What a column's type may become, on all sides.
RETYPED = {"varchar(7)": "text", "mood": "text", "inet": "text", "real": "double precision", "date": "timestamp"}


@dataclass
class Sides:
    """A publisher, targets that must stay alike, and the tables of the workload."""

    publisher: Database
    targets: Sequence[Database]
    tables: Sequence[Table]
    workload: Workload
    numbers: Iterator[int] = field(default_factory=itertools.count)  #: for names

    def on_targets(self, text: Composable) -> None:
        """Run on every target."""
        for database in self.targets:
            database.connection.execute(text)

    def everywhere(self, text: Composable) -> None:
        """Run on the publisher, then on every target."""
        self.publisher.connection.execute(text)
        self.on_targets(text)


def stray(sides: Sides, chance: random.Random) -> str:
    """Rows of the targets change or go, so that changes of the publisher miss them."""
    for table in sides.tables:
        table.alike = False
        column = chance.choice([*table.free, None])
        rest = Literal(chance.randrange(5))
        if column is not None and table.identity != "nothing":
            value = column.value(chance)
            text = _SQL("UPDATE {} SET {} = {} WHERE k % 5 = {}")
            sides.on_targets(text.format(table.name, Identifier(column.name), value, rest))
        sides.on_targets(_SQL("DELETE FROM {} WHERE (k + 1) % 5 = {}").format(table.name, rest))
        if table.serial:
            name = Literal(table.name.as_string())
            sides.on_targets(_SQL("SELECT nextval(pg_get_serial_sequence({}, 'n'))").format(name))
    return "rows are changed on the targets"


def add_column(sides: Sides, chance: random.Random) -> str:
    """A column is added, on the targets first."""
    table = chance.choice([*sides.tables])
    kind = chance.choice(sorted(EXACT if table.searched else ALL))
    column = Column(f"added {next(sides.numbers)}", kind, sides.workload.fitting(kind), kind)
    default = _SQL(" DEFAULT {}").format(column.value(chance)) if chance.random() < 0.5 else _SQL("")
    text = _SQL("ALTER TABLE {} ADD COLUMN {} {}{}").format(table.name, Identifier(column.name), _SQL(kind), default)
    sides.on_targets(text)
    sides.publisher.connection.execute(text)
    if not table.listed:
        table.columns.append(column)
    return "a column is added"


def _some_column(sides: Sides, chance: random.Random) -> tuple[Table, Column] | None:
    found = [(table, column) for table in sides.tables if not table.listed for column in table.free]
    return chance.choice(found) if found else None


def drop_column(sides: Sides, chance: random.Random) -> str:
    """A column is dropped on the publisher; the targets keep it or not."""
    found = _some_column(sides, chance)
    if found is not None:
        table, column = found
        text = _SQL("ALTER TABLE {} DROP COLUMN {}").format(table.name, Identifier(column.name))
        if table.searched or chance.random() < 0.5:
            sides.everywhere(text)
        else:
            sides.publisher.connection.execute(text)
        table.columns.remove(column)
    return "a column is dropped"


def rename_column(sides: Sides, chance: random.Random) -> str:
    """A column is renamed."""
    found = _some_column(sides, chance)
    if found is not None:
        table, column = found
        name = f"renamed {next(sides.numbers)}"
        text = _SQL("ALTER TABLE {} RENAME COLUMN {} TO {}")
        sides.everywhere(text.format(table.name, Identifier(column.name), Identifier(name)))
        column.name = name
    return "a column is renamed"


def retype_column(sides: Sides, chance: random.Random) -> str:
    """A column gets another type."""
    found = _some_column(sides, chance)
    if found is not None and found[1].kind in RETYPED:
        table, column = found
        kind = RETYPED[column.kind]
        table.alike = table.alike and column.wide == column.kind  # 0.1 of another width is another number
        text = _SQL("ALTER TABLE {} ALTER COLUMN {} TYPE {} USING {}::{}")
        name = Identifier(column.name)
        sides.everywhere(text.format(table.name, name, _SQL(kind), name, _SQL(kind)))
        column.kind = column.wide = kind
        column.values = EXACT["timestamp"] if kind == "timestamp" else column.values
    return "a column gets another type"


def flip_identity(sides: Sides, chance: random.Random) -> str:
    """A replica identity becomes all columns, or the primary key again."""
    some = [t for t in sides.tables if t.identity in ("default", "full") and not (t.listed or t.parted or t.split_by)]
    if some:
        table = chance.choice(some)
        table.identity = "full" if table.identity == "default" else "default"
        which = _SQL("FULL" if table.identity == "full" else "DEFAULT")
        sides.publisher.connection.execute(_SQL("ALTER TABLE {} REPLICA IDENTITY {}").format(table.name, which))
    return "a replica identity changes"


#: What may happen; stray rows twice.
ACTIONS = (stray, stray, add_column, drop_column, rename_column, retype_column, flip_identity)
