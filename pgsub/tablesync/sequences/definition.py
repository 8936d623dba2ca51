"""A sequence as a server has it: its definition, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, fields

from psycopg import sql

from pgsub.common import quoting
from pgsub.target.catalog.relation import FIRST_NORMAL, LEDGER

Name = tuple[str, str]  #: schema and name of a sequence


@dataclass(frozen=True, slots=True)
class Definition:
    """The fields that both servers must have alike; CACHE is each server's own."""

    type_name: str
    start: int
    increment: int
    minimum: int
    maximum: int
    cycle: bool

    def clauses(self, but: Definition | None = None) -> list[str]:
        """Return the options of CREATE and ALTER SEQUENCE that make this definition.

        :param but: leave out what this one has already.
        """
        texts = {
            "type_name": f"AS {self.type_name}",
            "increment": f"INCREMENT BY {self.increment}",
            "minimum": f"MINVALUE {self.minimum}",
            "maximum": f"MAXVALUE {self.maximum}",
            "start": f"START WITH {self.start}",
            "cycle": "CYCLE" if self.cycle else "NO CYCLE",
        }
        differing = {
            one.name for one in fields(self) if but is None or getattr(self, one.name) != getattr(but, one.name)
        }
        if "type_name" in differing:  # another type moves bounds that are those of the old one
            differing |= {"minimum", "maximum"}
        return [text for name, text in texts.items() if name in differing]


@dataclass(frozen=True, slots=True)
class Position:
    """The fields of a sequence's row that setval() writes."""

    last_value: int
    is_called: bool

    def following(self, increment: int) -> int:
        """Return the value that nextval() would give next; it may lie beyond the bounds."""
        return self.last_value + increment if self.is_called else self.last_value

    def ahead_of(self, other: Position, increment: int) -> int:
        """Return by how much this position is ahead, in the direction of the sequence; negative where it is behind."""
        distance = self.following(increment) - other.following(increment)
        return distance if increment > 0 else -distance


@dataclass(frozen=True, slots=True)
class Use:
    """A column that owns a sequence or has it in its default."""

    table: Name
    column: str
    is_identity: bool

    def again(self, key: Name, table: Name) -> str:
        """Return the statement to paste that makes another table use a sequence in this way."""
        if self.is_identity:
            return f"ALTER SEQUENCE {quoting.name(*key)} OWNED BY {quoting.name(*table, self.column)};"
        value = quoting.literal(quoting.name(*key))
        return f"ALTER TABLE {quoting.name(*table)} ALTER {quoting.name(self.column)} SET DEFAULT nextval({value});"


@dataclass(frozen=True, slots=True)
class LocalSequence:
    """A relation of the wanted name. ``definition`` is None where it is no sequence."""

    oid: int
    schema: str
    name: str
    definition: Definition | None
    cache: int
    user: str  #: the session's role
    owner: str
    #: what the user is to the owner, as :attr:`pgsub.target.catalog.relation.TargetRelation.access`
    access: str
    usable: bool  #: the user has USAGE on the schema
    readable: bool
    writable: bool  #: the user has SELECT and UPDATE

    @property
    def key(self) -> Name:
        """Schema and name."""
        return self.schema, self.name

    @property
    def replicable(self) -> bool:
        """Whether its value may come from a publisher: not a catalog's, nor one of the ledger."""
        return self.oid >= FIRST_NORMAL and self.schema != LEDGER

    @property
    def shown(self) -> str:
        """Schema and name, unquoted, as the server's messages have them."""
        return f"{self.schema}.{self.name}"

    def alter(self, wanted: Definition, position: Position | None) -> str:
        """Return the ALTER SEQUENCE to paste that brings this sequence to another definition.

        :param position: of this sequence; where the wanted bounds exclude it, the statement has to restart it.
        """
        clauses = wanted.clauses(self.definition)
        if position is not None and not wanted.minimum <= position.last_value <= wanted.maximum:
            clauses.append(f"RESTART WITH {wanted.start}")
        return f"ALTER SEQUENCE {quoting.name(self.schema, self.name)} {' '.join(clauses)};"


def create(key: Name, wanted: Definition) -> str:
    """Return the CREATE SEQUENCE to paste for a sequence that is missing."""
    return f"CREATE SEQUENCE {quoting.name(*key)} {' '.join(wanted.clauses())};"


def identifier(key: Name) -> sql.Identifier:
    """Return the qualified name for statements."""
    return sql.Identifier(*key)
