"""A sequence on a server: its definition and its position."""

from __future__ import annotations

from dataclasses import dataclass, fields

from psycopg import sql

from pgsub.common import quoting
from pgsub.target.catalog.relation import FIRST_NORMAL, LEDGER

Name = tuple[str, str]  #: schema and name of a sequence


@dataclass(frozen=True, slots=True)
class Definition:
    """The fields that must agree on both servers. CACHE may differ."""

    type_name: str
    start: int
    increment: int
    minimum: int
    maximum: int
    cycle: bool

    def clauses(self, but: Definition | None = None) -> list[str]:
        """Return the options of CREATE and ALTER SEQUENCE for this definition.

        :param but: a definition whose equal options are left out.
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
        if "type_name" in differing:  # a change of the type changes bounds that are the old type's
            differing |= {"minimum", "maximum"}
        return [text for name, text in texts.items() if name in differing]


@dataclass(frozen=True, slots=True)
class Position:
    """The fields of a sequence's row that setval() writes."""

    last_value: int
    is_called: bool

    def following(self, increment: int) -> int:
        """Return the next value of nextval(). It may lie beyond the bounds."""
        return self.last_value + increment if self.is_called else self.last_value

    def ahead_of(self, other: Position, increment: int) -> int:
        """Return how far this position is ahead, in the direction of the sequence; negative if it is behind."""
        distance = self.following(increment) - other.following(increment)
        return distance if increment > 0 else -distance


@dataclass(frozen=True, slots=True)
class Use:
    """A column that owns a sequence or has it in its default."""

    table: Name
    column: str
    is_identity: bool

    def again(self, key: Name, table: Name) -> str:
        """Return the statement that makes another table use a sequence in the same way."""
        if self.is_identity:
            return f"ALTER SEQUENCE {quoting.name(*key)} OWNED BY {quoting.name(*table, self.column)};"
        value = quoting.literal(quoting.name(*key))
        return f"ALTER TABLE {quoting.name(*table)} ALTER {quoting.name(self.column)} SET DEFAULT nextval({value});"


@dataclass(frozen=True, slots=True)
class LocalSequence:
    """A relation with the name of a sequence. ``definition`` is None if it is not a sequence."""

    oid: int
    schema: str
    name: str
    definition: Definition | None
    cache: int
    user: str  #: the session's role
    owner: str
    #: The user's relation to the owner, as in :attr:`pgsub.target.catalog.relation.TargetRelation.access`.
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
        """Whether its value may come from a publisher. Sequences of catalogs and the ledger are excluded."""
        return self.oid >= FIRST_NORMAL and self.schema != LEDGER

    @property
    def shown(self) -> str:
        """Schema and name, unquoted, as in the server's messages."""
        return f"{self.schema}.{self.name}"

    def alter(self, wanted: Definition, position: Position | None) -> str:
        """Return the ALTER SEQUENCE that gives this sequence another definition.

        :param position: position of this sequence. If it is outside the wanted bounds, the sequence is restarted.
        """
        clauses = wanted.clauses(self.definition)
        if position is not None and not wanted.minimum <= position.last_value <= wanted.maximum:
            clauses.append(f"RESTART WITH {wanted.start}")
        return f"ALTER SEQUENCE {quoting.name(self.schema, self.name)} {' '.join(clauses)};"


def create(key: Name, wanted: Definition) -> str:
    """Return the CREATE SEQUENCE for a missing sequence."""
    return f"CREATE SEQUENCE {quoting.name(*key)} {' '.join(wanted.clauses())};"


def identifier(key: Name) -> sql.Identifier:
    """Return the qualified name as an identifier."""
    return sql.Identifier(*key)
