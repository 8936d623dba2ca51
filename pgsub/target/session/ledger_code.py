"""Code that somebody attached to the ledger. It would run with the rights of every role that writes there.

The ledger's tables have a known form (:mod:`~pgsub.target.ledger.schema.versions`): columns of built-in types, keys
among themselves, defaults that are constants or the time, checks that list constants. Anything else is no part of the
ledger, whoever owns it. Built-in functions are not harmless either: ``query_to_xml`` runs the query that it is given.
"""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

import psycopg

from pgsub.common import quoting
from pgsub.common.errors import PermissionMissing, one_line

#: CTE with the roles that are trusted with the ledger.
TRUSTED = """
trusted AS (
     SELECT r.oid FROM pg_catalog.pg_roles r
      WHERE r.rolsuper OR r.rolname = current_user
         OR r.oid = (SELECT d.datdba FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()))
"""

# search_path is empty, so the server writes a name without its schema only if it is built in.
_CONSTANT = r"(?:'(?:[^'\\]|'')*'(?:::(?:[a-z_0-9 ]+|\"char\"))?|-?[0-9.]+|true|false)"
_FORMS = {
    "default": re.compile(rf"{_CONSTANT}|(?:now|clock_timestamp)\(\)"),
    "constraint": re.compile(rf"CHECK \(\([a-z_]+ = ANY \(ARRAY\[{_CONSTANT}(?:, {_CONSTANT})*\]\)\)\)"),
}

_LEDGER = """
ledger AS MATERIALIZED (
     SELECT c.oid, c.relname, c.relkind, c.relacl
       FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
      WHERE n.nspname = 'pgsub' AND c.relkind IN ('r', 'p', 'v', 'm', 'f'))
"""
# Columns: kind, table of the ledger, name of the part, schema and name of another relation, text.
_WRITTEN = f"""
WITH {_LEDGER}
SELECT 'default', l.relname::text, a.attname::text, NULL::text, NULL::text, pg_catalog.pg_get_expr(e.adbin, e.adrelid)
  FROM ledger l JOIN pg_catalog.pg_attrdef e ON e.adrelid = l.oid
  JOIN pg_catalog.pg_attribute a ON a.attrelid = l.oid AND a.attnum = e.adnum
 UNION ALL
SELECT 'constraint', l.relname::text, k.conname::text, NULL, NULL, pg_catalog.pg_get_constraintdef(k.oid)
  FROM ledger l JOIN pg_catalog.pg_constraint k ON k.conrelid = l.oid WHERE k.contype = 'c'
 ORDER BY 1, 2, 3
"""
# A foreign key acts at both of its tables, and triggers of the other one can be deferred to the commit. pg_depend has
# no entries for built-in objects: they are pinned. A role with TRIGGER or REFERENCES could attach code later.
_ATTACHED = f"""
WITH {TRUSTED}, {_LEDGER},
part AS (
     SELECT 'default' AS kind, l.relname, a.attname AS name, 'pg_catalog.pg_attrdef'::regclass AS catalog, e.oid,
            0 AS number
       FROM ledger l JOIN pg_catalog.pg_attrdef e ON e.adrelid = l.oid
       JOIN pg_catalog.pg_attribute a ON a.attrelid = l.oid AND a.attnum = e.adnum
      UNION ALL
     SELECT 'constraint', l.relname, k.conname, 'pg_catalog.pg_constraint'::regclass, k.oid, 0
       FROM ledger l JOIN pg_catalog.pg_constraint k ON k.conrelid = l.oid
      UNION ALL
     SELECT 'index', l.relname, i.relname, 'pg_catalog.pg_class'::regclass, i.oid, 0
       FROM ledger l JOIN pg_catalog.pg_index x ON x.indrelid = l.oid
       JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
      UNION ALL
     SELECT 'column', l.relname, a.attname, 'pg_catalog.pg_class'::regclass, l.oid, a.attnum
       FROM ledger l JOIN pg_catalog.pg_attribute a ON a.attrelid = l.oid),
granted AS (
     SELECT l.relname, x.privilege_type, x.grantee FROM ledger l, pg_catalog.aclexplode(l.relacl) x
      UNION ALL
     SELECT l.relname, x.privilege_type, x.grantee
       FROM ledger l JOIN pg_catalog.pg_attribute a ON a.attrelid = l.oid, pg_catalog.aclexplode(a.attacl) x),
found (kind, relname, name, schema, relation) AS (
     SELECT 'trigger', l.relname, t.tgname, NULL::name, NULL::name
       FROM ledger l JOIN pg_catalog.pg_trigger t ON t.tgrelid = l.oid WHERE NOT t.tgisinternal
      UNION ALL
     SELECT 'policy', l.relname, p.polname, NULL, NULL FROM ledger l JOIN pg_catalog.pg_policy p ON p.polrelid = l.oid
      UNION ALL
     SELECT 'rule', l.relname, r.rulename, NULL, NULL
       FROM ledger l JOIN pg_catalog.pg_rewrite r ON r.ev_class = l.oid WHERE l.relkind IN ('r', 'p')
      UNION ALL
     SELECT 'kind', l.relname, NULL, NULL, NULL FROM ledger l WHERE l.relkind <> 'r'
      UNION ALL
     SELECT 'index', l.relname, i.relname, NULL, NULL
       FROM ledger l JOIN pg_catalog.pg_index x ON x.indrelid = l.oid
       JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
      WHERE x.indexprs IS NOT NULL OR x.indpred IS NOT NULL
      UNION ALL
     SELECT 'statistics object', l.relname, s.stxname, n.nspname, s.stxname
       FROM ledger l JOIN pg_catalog.pg_statistic_ext s ON s.stxrelid = l.oid
       JOIN pg_catalog.pg_namespace n ON n.oid = s.stxnamespace
      UNION ALL
     SELECT DISTINCT p.kind, p.relname, p.name, NULL::name, NULL::name
       FROM part p JOIN pg_catalog.pg_depend d
         ON d.classid = p.catalog AND d.objid = p.oid AND d.objsubid = p.number
      WHERE d.refclassid IN (
            'pg_catalog.pg_proc'::regclass, 'pg_catalog.pg_operator'::regclass, 'pg_catalog.pg_type'::regclass,
            'pg_catalog.pg_opclass'::regclass, 'pg_catalog.pg_opfamily'::regclass,
            'pg_catalog.pg_collation'::regclass)
      UNION ALL
     SELECT 'foreign key', l.relname, k.conname, n.nspname, c.relname
       FROM pg_catalog.pg_constraint k JOIN ledger l ON l.oid IN (k.conrelid, k.confrelid)
       JOIN pg_catalog.pg_class c ON c.oid = k.conrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
      WHERE k.contype = 'f'
        AND NOT (k.conrelid IN (SELECT oid FROM ledger) AND k.confrelid IN (SELECT oid FROM ledger))
      UNION ALL
     SELECT 'child', l.relname, NULL, n.nspname, c.relname
       FROM ledger l JOIN pg_catalog.pg_inherits i ON i.inhparent = l.oid
       JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
      UNION ALL
     SELECT 'parent', l.relname, NULL, n.nspname, c.relname
       FROM ledger l JOIN pg_catalog.pg_inherits i ON i.inhrelid = l.oid
       JOIN pg_catalog.pg_class c ON c.oid = i.inhparent JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
      UNION ALL
     SELECT DISTINCT 'privilege ' || g.privilege_type, g.relname, r.rolname, NULL::name, NULL::name
       FROM granted g LEFT JOIN pg_catalog.pg_roles r ON r.oid = g.grantee
      WHERE g.privilege_type IN ('TRIGGER', 'REFERENCES') AND g.grantee NOT IN (SELECT oid FROM trusted))
SELECT kind, relname::text, name::text, schema::text, relation::text, NULL::text FROM found ORDER BY 1, 2, 3, 4, 5
"""


class _Part(NamedTuple):
    """A part that is attached to the ledger.

    :ivar name: for a privilege, the grantee; None: PUBLIC.
    :ivar relation: another relation that takes part, such as a child.
    """

    kind: str
    table: str
    name: str | None
    schema: str | None
    relation: str | None
    text: str | None

    @property
    def strange(self) -> bool:
        """Whether the ledger has no such part."""
        return self.text is None or _FORMS[self.kind].fullmatch(self.text) is None

    @property
    def shown(self) -> str:
        """The name of the part in a message."""
        of = f'of "pgsub.{self.table}"'
        if self.kind == "kind":
            return f'relation "pgsub.{self.table}"'
        if self.kind.startswith("privilege "):
            return f"{self.kind} of {'PUBLIC' if self.name is None else quoting.name(self.name)} on pgsub.{self.table}"
        what = self.kind if self.name is None else f'{self.kind} "{self.name}"'
        other = "" if self.relation is None or self.kind == "statistics object" else f' "{self.schema}.{self.relation}"'
        return f"{what}{other} {of}"

    @property
    def removal(self) -> str | None:
        """The statement that removes it; None if somebody has to look at the table first."""
        table, name = quoting.name("pgsub", self.table), quoting.name(self.name or "")
        other = quoting.name(self.schema or "", self.relation or "")
        match self.kind:
            case "trigger" | "policy" | "rule":
                return f"DROP {self.kind.upper()} {name} ON {table};"
            case "statistics object":
                return f"DROP STATISTICS {other};"
            case "foreign key":
                return f"ALTER TABLE {other} DROP CONSTRAINT {name};"
            case "child":
                return f"ALTER TABLE {other} NO INHERIT {table};"
            case "parent":
                return f"ALTER TABLE {table} NO INHERIT {other};"
            case "privilege TRIGGER" | "privilege REFERENCES":
                return f"REVOKE {self.kind.split()[1]} ON {table} FROM {'PUBLIC' if self.name is None else name};"
        return None


def check(connection: psycopg.Connection) -> None:
    """Check that the ledger has its own form. The session's search_path must be empty.

    :raises PermissionMissing: something is attached; the hint removes it.
    """
    attached = _attached(connection)
    if attached and all(part.kind.startswith("privilege ") for part in attached):
        _revoke(connection, attached)
        attached = _attached(connection)
    # guard: a ledger with foreign code is rejected
    if attached:
        raise _refused(attached)


def runs_code(connection: psycopg.Connection) -> bool:
    """Return whether the ledger has another form than its own. Privileges to attach code do not count."""
    return any(not part.kind.startswith("privilege ") for part in _attached(connection))


def _attached(connection: psycopg.Connection) -> list[_Part]:
    rows = [row for query in (_ATTACHED, _WRITTEN) for row in connection.execute(query.encode()).fetchall()]
    return [part for part in map(_Part._make, rows) if part.strange]


def _revoke(connection: psycopg.Connection, privileges: list[_Part]) -> None:
    """Revoke privileges that GRANT ALL gave and that a role does not need to use the ledger, if this session may."""
    with contextlib.suppress(psycopg.Error), connection.transaction():
        for part in privileges:
            connection.execute(str(part.removal).encode())


def _refused(attached: list[_Part]) -> PermissionMissing:
    first = attached[0]
    removals = list(dict.fromkeys(part.removal for part in attached if part.removal is not None))
    look = "psql -c " + quoting.word(f"\\d+ {quoting.name('pgsub', first.table)}")
    return PermissionMissing(
        f"{one_line(first.shown)} is not part of the ledger on the target",
        detail="Code that is attached to the tables of schema pgsub runs with the rights of the user of --target.",
        hint="Find out what it does and where it came from, then remove it:\n" + ("\n".join(removals) or look),
        sqlstate="42501",
    )
