"""Tables of the target as apply sees them. One call reads any number of tables from the catalogs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from pgsub.common import table_lock
from pgsub.common.query import named
from pgsub.target.catalog import relation_queries

LEDGER = "pgsub"  #: schema that is never subscribed
FIRST_NORMAL = 16384  #: FirstNormalObjectId; is_publishable_class (pg_publication.c) has the same limit


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A live column of a target table."""

    name: str
    type_oid: int
    type_name: str
    generated: bool
    identity: str  #: '' none, 'a' ALWAYS, 'd' BY DEFAULT
    equality: str | None  #: schema-qualified operator; None: the type has no equality
    typmod: int = -1
    full_type: str = ""  #: the type with its modifier, as SQL
    virtual: bool = False  #: generated and not stored
    cast_type: str = ""  #: the type as SQL, without an explicit or implied modifier: a cast to it changes no value
    array_oid: int = 0  #: OID of the array type; 0: none
    from_text: bool = False  #: a cast from text to cast_type gives the same value as the input function
    fits: bool = True  #: an assignment enforces the modifier
    deterministic: bool = True  #: the collation is deterministic: values that it finds equal have equal bytes
    quoted: str = ""  #: quoted name, as in the server's messages
    collation: str | None = None  #: as SQL; None: the database's default
    defaulted: bool = False  #: has a default or an identity
    uncut: str | None = None  #: the type without length, as SQL, if a cast to the length would truncate; else None
    operand: str | None = None  #: equality's operand type, as SQL, if outside pg_catalog and not the column's type
    attnum: int = 0  #: stays when the column is renamed

    def collated(self, value: sql.Composable) -> sql.Composed:
        """Compose a value with the column's collation, so that it compares as in constraints and indexes."""
        return sql.Composed([value, sql.SQL(f" COLLATE {self.collation}" if self.collation else "")])

    def equal(self, one: sql.Composable, other: sql.Composable) -> sql.Composed:
        """Compose the comparison of two values of the column by ``equality``."""
        return equal(self.equality or "pg_catalog.=", self.operand, one, other)


def equal(operator: str, operand: str | None, one: sql.Composable, other: sql.Composable) -> sql.Composed:
    """Compose the comparison of two values.

    :param operator: schema-qualified and quoted, from the catalog query.
    :param operand: type to which both values are cast, as SQL; None: no cast. An index can still be used.
    """
    # guard: an operator that somebody made for the values' own type is not taken for that of the server
    if operand:
        one, other = (sql.Composed([sql.SQL("("), value, sql.SQL(f")::{operand}")]) for value in (one, other))
    return sql.Composed([one, sql.SQL(f" OPERATOR({operator}) "), other])


class KeyEquality(NamedTuple):
    """The comparison of a key column by the key's index, where it is not that of the column.

    :ivar collation: the index's collation, as SQL; None: the column's.
    :ivar operator: the equality of its operator class; None: the column's.
    :ivar operand: the operator's type, as SQL, if it is not the column's.
    """

    name: str
    collation: str | None
    operator: str | None
    operand: str | None


class LeafKey(NamedTuple):
    """The key that all partitions of a table have, though the table itself has none.

    :ivar columns: the key.
    :ivar split_by: the other columns of the partition keys. With them, the key has one row in the whole table.
    """

    columns: tuple[str, ...]
    split_by: tuple[str, ...]
    equality: tuple[KeyEquality, ...]


@dataclass(frozen=True, slots=True)
class TargetRelation:
    """A table of the target.

    :ivar fires: a trigger would fire under the current session_replication_role.
    :ivar row_security: a policy applies to the session's role (not to superusers, BYPASSRLS, an owner without FORCE).
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
    deferrable: bool = False  #: the key is deferrable
    user: str = ""  #: the session's role
    owner: str = ""
    #: The user's relation to the owner. own: the same role. set: may SET ROLE to it. refused: a member that may not.
    #: none: no member. trusted: no member, but the owner is a superuser.
    access: str = "own"
    owner_row_security: bool = False  #: a policy applies to the owner
    #: The user may lock the table. Also True without USAGE on its schema: then the error is about the schema.
    user_locks: bool = True
    owner_locks: bool = True  #: the same for the owner
    user_locks_rows: bool = True  #: the user may lock rows: SELECT FOR UPDATE needs UPDATE on any column
    owner_locks_rows: bool = True  #: the same for the owner
    acts_as: str | None = None  #: role that makes the changes; None: the user; see roles.py
    partition: bool = False  #: is a partition
    #: Has an exclusion constraint, a deferrable unique constraint, or a foreign key whose triggers fire.
    checked_late: bool = False
    fires_on_insert: bool = False  #: a trigger on INSERT would fire
    fires_before_delete: bool = False  #: a row trigger BEFORE DELETE would fire; it may keep the row
    foreign_keys_fire: bool = False  #: triggers of a foreign key from or to the table fire
    several_unique: bool = False  #: has more than one unique index
    foreign_partitions: bool = False  #: has a foreign table as partition
    key_equality: tuple[KeyEquality, ...] = ()  #: key columns that the key's index compares in another way
    leaf_key: LeafKey | None = None  #: None: it has a key, or not all of its partitions have the same
    keyed_leaves: bool = False  #: has no key, but a partition of it has one
    #: Types and operators outside pg_catalog that statements name, for table_lock.VERIFY_TYPES; None: none.
    named_types: str | None = None
    #: table_lock.DEFINITION, read before everything else; None: unknown.
    definition: str | None = None
    server_version: int = 180000  #: decides the wording of conflicts
    #: Subscription whose origins mark rows as its own; 0: the origins of rows cannot be seen.
    origins_of: int = 0

    @property
    def replicable(self) -> bool:
        """Whether rows may be replicated into it. They never may be into catalogs and the ledger."""
        return self.relkind in ("r", "p") and self.oid >= FIRST_NORMAL and self.schema != LEDGER

    @property
    def hides_deletes(self) -> bool:
        """Whether a DELETE that waited cannot tell a row that a trigger kept from one that is gone."""
        return self.fires_before_delete and not self.locks_rows

    @property
    def locks_rows(self) -> bool:
        """Whether the role that makes the changes may lock rows."""
        return self.user_locks_rows if self.acts_as is None else self.owner_locks_rows

    def column(self, name: str) -> TargetColumn | None:
        """Return the column of that name (case-sensitive)."""
        return next((c for c in self.columns if c.name == name), None)


def describe(connection: psycopg.Connection, schema: str, name: str, *, replica: bool = True) -> TargetRelation | None:
    """Read a table from the catalogs; return None if it does not exist.

    :param replica: session_replication_role is replica. It decides which triggers and rules would fire.
    """
    return describe_many(connection, [(schema, name)], replica=replica).get((schema, name))


def describe_many(
    connection: psycopg.Connection, names: Iterable[tuple[str, str]], *, replica: bool = True
) -> dict[tuple[str, str], TargetRelation]:
    """Read any number of tables in three round trips; see :func:`describe`.

    :param names: schema and name of each table.
    :return: the tables that exist, by schema and name.
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
    leaves, split_by = ({table["oid"]: table.pop(name) for table in tables} for name in ("leaves", "split_by"))
    columns: dict[int, list[TargetColumn]] = {table["oid"]: [] for table in tables}
    keys: dict[int, list[_KeyColumn]] = {oid: [] for oid in (*columns, *itertools.chain(*leaves.values()))}
    named_types: dict[int, set[tuple[str, int, str]]] = {oid: set() for oid in keys}
    for oid, names_of_type, *column in connection.execute(relation_queries.COLUMNS.encode(), (list(columns),)):
        columns[oid].append(TargetColumn(*column))
        named_types[oid].update(map(tuple, names_of_type or ()))
    for oid, names_of_operator, *key in connection.execute(relation_queries.IDENTITY.encode(), (list(keys),)):
        keys[oid].append(_KeyColumn(*key))
        named_types[oid].update(map(tuple, names_of_operator or ()))
    return {
        (table["schema"], table["name"]): TargetRelation(
            **table,
            columns=tuple(columns[oid]),
            identity=tuple(one.name for one in keys[oid]),
            deferrable=any(not one.immediate for one in keys[oid]),
            named_types=_as_json(named_types[oid].union(*(named_types[leaf] for leaf in leaves[oid]))),
            key_equality=_key_equality(columns[oid], keys[oid]),
            leaf_key=_leaf_key(columns[oid], [keys[leaf] for leaf in leaves[oid]], split_by[oid]),
            keyed_leaves=any(keys[leaf] for leaf in leaves[oid]),
            server_version=version,
        )
        for table in tables
        for oid in (table["oid"],)
    }


def _as_json(types: Collection[tuple[str, int, str]]) -> str | None:
    return json.dumps(sorted(types), ensure_ascii=False) if types else None


class _KeyColumn(NamedTuple):
    name: str
    immediate: bool
    collation: str | None
    operator: str | None
    operand: str | None


def _leaf_key(
    columns: Sequence[TargetColumn], keys: Sequence[Sequence[_KeyColumn]], split_by: Sequence[str]
) -> LeafKey | None:
    # guard: rows are found by the key of the partitions only if all have the same
    if len({frozenset(key) for key in keys}) != 1 or not keys[0] or not all(one.immediate for one in keys[0]):
        return None
    names, equality = tuple(one.name for one in keys[0]), _key_equality(columns, keys[0])
    # the server finds the partition by the column's own equality before it searches by that of the key
    if not {one.name for one in equality}.isdisjoint(split_by):
        return None
    return LeafKey(names, tuple(name for name in split_by if name not in names), equality)


def _key_equality(columns: Sequence[TargetColumn], key: Sequence[_KeyColumn]) -> tuple[KeyEquality, ...]:
    own = {column.name: (column.equality, column.operand) for column in columns}
    found = []
    for name, _, collation, operator, operand in key:
        outside = operator is not None and not operator.startswith("pg_catalog.")
        same = (operator, operand if outside else None) == own.get(name)  # it may have another name since
        found.append(KeyEquality(name, collation, None if same else operator, operand))
    return tuple(one for one in found if one.collation or one.operator)
