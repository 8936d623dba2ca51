"""Tables of the target as apply sees them, read from the catalogs for any number of them at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from pgsub.common import table_lock
from pgsub.common.query import named
from pgsub.target.catalog import relation_queries

LEDGER = "pgsub"  #: schema that is never subscribed
FIRST_NORMAL = 16384  #: FirstNormalObjectId; is_publishable_class (pg_publication.c) draws this line on the other side


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A live column of a target table."""

    name: str
    type_oid: int
    type_name: str
    generated: bool
    identity: str  #: '' no, 'a' ALWAYS, 'd' BY DEFAULT
    equality: str | None  #: schema-qualified operator, None for a type without equality
    typmod: int = -1
    full_type: str = ""  #: with the modifier, as SQL
    virtual: bool = False  #: generated, and not stored
    cast_type: str = ""  #: as SQL, for casts that change no value: without a modifier, and none implied
    array_oid: int = 0  #: of the array type, 0 where there is none
    from_text: bool = False  #: a cast of text to cast_type is what the input function does
    fits: bool = True  #: an assignment checks what the modifier demands
    deterministic: bool = True  #: equal values have equal bytes, as far as the collation is concerned
    quoted: str = ""  #: its name as SQL, as messages of the server have it
    collation: str | None = None  #: as SQL, where it is not the database's
    defaulted: bool = False  #: it has a default, or an identity
    uncut: str | None = None  #: as SQL, the type without length whose values it has, where a cast to the length cuts
    operand: str | None = None  #: as SQL, the type of equality's operands, where it is outside pg_catalog and another

    def collated(self, value: sql.Composable) -> sql.Composed:
        """Compose a value that constraints and indexes compare as they compare the column's."""
        return sql.Composed([value, sql.SQL(f" COLLATE {self.collation}" if self.collation else "")])

    def equal(self, one: sql.Composable, other: sql.Composable) -> sql.Composed:
        """Compose whether two values of it are equal, by ``equality``."""
        return equal(self.equality or "pg_catalog.=", self.operand, one, other)


def equal(operator: str, operand: str | None, one: sql.Composable, other: sql.Composable) -> sql.Composed:
    """Compose whether two values are equal.

    :param operator: with its schema, as the catalog query quoted it.
    :param operand: the type that it takes, as SQL, where it is not theirs or need not be; an index serves as before.
    """
    # guard: an operator that somebody made for the values' own type is not taken for that of the server
    if operand:
        one, other = (sql.Composed([sql.SQL("("), value, sql.SQL(f")::{operand}")]) for value in (one, other))
    return sql.Composed([one, sql.SQL(f" OPERATOR({operator}) "), other])


@dataclass(frozen=True, slots=True)
class TargetRelation:
    """A table of the target. ``fires``: a trigger would fire in the present session_replication_role.

    ``row_security``: a policy applies to the session's role (not to superusers, BYPASSRLS, an owner without FORCE).
    """

    oid: int
    schema: str
    name: str
    relkind: str
    fires: bool
    rules: bool
    row_security: bool
    columns: tuple[TargetColumn, ...]
    identity: tuple[str, ...]  #: columns of the replica identity index, else of the primary key, else ()
    deferrable: bool = False  #: that key is not unique before the end of a transaction
    user: str = ""  #: the session's role
    owner: str = ""
    #: what the user is to the owner: own the same, set may SET ROLE to it, refused a member that may not, none no
    #: member, trusted neither, but the owner is a superuser
    access: str = "own"
    owner_row_security: bool = False  #: a policy applies to the owner
    #: the user may lock it, or not use its schema, which is what is said then; ``owner_locks``: of the owner
    user_locks: bool = True
    owner_locks: bool = True
    acts_as: str | None = None  #: role that changes are made as, None: the user; see roles.py
    partition: bool = False  #: of another table
    #: it has an exclusion constraint, a deferrable unique one, or a foreign key whose checks fire
    checked_late: bool = False
    fires_on_insert: bool = False  #: a trigger on INSERT would fire
    foreign_keys_fire: bool = False  #: checks or actions of a foreign key of it or to it fire
    several_unique: bool = False  #: it has more than one unique index
    foreign_partitions: bool = False  #: it has one that is a foreign table
    key_collated: bool = True  #: the key's index compares by the collations of its columns
    #: types and operators outside pg_catalog that statements about it name, for table_lock.VERIFY_TYPES; None: none
    named_types: str | None = None
    server_version: int = 180000  #: decides how conflicts are worded
    #: the subscription whose origins' rows are its own, where it can be seen who wrote a row; else 0
    origins_of: int = 0

    @property
    def replicable(self) -> bool:
        """Whether rows may be replicated into it: not into catalogs, whatever a publisher publishes, nor the ledger."""
        return self.relkind in ("r", "p") and self.oid >= FIRST_NORMAL and self.schema != LEDGER

    def column(self, name: str) -> TargetColumn | None:
        """Return the column of that name, case-sensitive."""
        return next((c for c in self.columns if c.name == name), None)


def describe(connection: psycopg.Connection, schema: str, name: str, *, replica: bool = True) -> TargetRelation | None:
    """Read a table from the catalogs; None where it does not exist.

    :param replica: whether session_replication_role = replica is in effect (which triggers and rules would fire).
    """
    return describe_many(connection, [(schema, name)], replica=replica).get((schema, name))


def describe_many(
    connection: psycopg.Connection, names: Iterable[tuple[str, str]], *, replica: bool = True
) -> dict[tuple[str, str], TargetRelation]:
    """Read any number of tables, as :func:`describe` does, with the same three round trips.

    :param names: schema and name of each.
    :return: by schema and name, without those that do not exist.
    """
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return {}
    version = connection.info.server_version
    params = {
        **named(wanted),
        "firing": ["A", "R"] if replica else ["A", "O"],
        "may_set": "SET" if version >= 160000 else "MEMBER",
        "locking": table_lock.WRITING,
    }
    tables = connection.cursor(row_factory=dict_row).execute(relation_queries.TABLES.encode(), params).fetchall()
    columns: dict[int, list[TargetColumn]] = {table["oid"]: [] for table in tables}
    named_types: dict[int, set[tuple[str, int, str]]] = {oid: set() for oid in columns}
    for oid, names_of_type, *column in connection.execute(relation_queries.COLUMNS.encode(), (list(columns),)):
        columns[oid].append(TargetColumn(*column))
        named_types[oid].update(map(tuple, names_of_type or ()))
    keys: dict[int, list[tuple[str, bool, bool]]] = {oid: [] for oid in columns}
    for oid, *key in connection.execute(relation_queries.IDENTITY.encode(), (list(columns),)):
        keys[oid].append(tuple(key))
    return {
        (table["schema"], table["name"]): TargetRelation(
            **table,
            columns=tuple(columns[table["oid"]]),
            identity=tuple(name for name, _, _ in keys[table["oid"]]),
            deferrable=any(not immediate for _, immediate, _ in keys[table["oid"]]),
            named_types=json.dumps(sorted(types), ensure_ascii=False) if (types := named_types[table["oid"]]) else None,
            key_collated=all(by_column for _, _, by_column in keys[table["oid"]]),
            server_version=version,
        )
        for table in tables
    }
