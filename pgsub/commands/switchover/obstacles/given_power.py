"""Statements about roles and settings of the publisher to paste, limited to those that give no power over the server.

A publisher may send anything, and whoever pastes the statements may be a superuser. Others are only named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from pgsub.commands.switchover.obstacles.obstacle import TAKING, Sides, paste, rows
from pgsub.common import quoting

# Roles of the target that may do more, directly or through other roles, than privileges on objects allow.
_POWERFUL = """
SELECT r.rolname::text FROM pg_catalog.pg_roles r WHERE EXISTS (
       SELECT FROM pg_catalog.pg_roles p
        WHERE (p.rolsuper OR p.rolcreaterole OR p.rolreplication OR p.rolbypassrls OR p.rolname ~ '^pg_')
          AND p.rolname <> 'pg_database_owner' AND pg_catalog.pg_has_role(r.oid, p.oid, 'MEMBER'))
"""
# Settings that every role may change for itself.
_HARMLESS = "SELECT pg_catalog.lower(name) FROM pg_catalog.pg_settings WHERE context IN ('user', 'backend')"
#: Settings that refer to code: libraries, and functions called when a procedural language starts.
_CODE = re.compile(r".*_preload_libraries|dynamic_library_path|extension_control_path|pl\w*\..*", re.IGNORECASE)
SAID = "These statements come from the publisher: read them before you run them."


def powerful_roles(sides: Sides) -> set[str]:
    """Return the target's roles that have power over the server, or can get it."""
    return {name for (name,) in rows(sides.taking, _POWERFUL)}


def shown(statements: Sequence[tuple[str, str]], powerful: Collection[str]) -> str:
    """Return a hint with the statements that give no power over the server, and the roles of the others.

    :param statements: the statement, and the role of the target that it concerns.
    """
    # guard: no statement to paste grants a role that has power over the server, without "role in powerful or "
    left = [role for _, role in statements if role in powerful or role.startswith("pg_")]
    return hint([text for text, role in statements if role not in left], [quoting.name(role) for role in left])


def hint(statements: Sequence[str], left: Sequence[str]) -> str:
    """Return a hint with the statements, and the subjects that have none."""
    listed = list(dict.fromkeys(left))
    why = f"{', '.join(listed)}: no statement is shown, because that gives power over the server." if left else ""
    return paste(TAKING, statements, f"{why} {SAID}".strip()) if statements else why


def harmless_settings(sides: Sides) -> set[str]:
    """Return the settings that every role of the target may change for itself."""
    return {name for (name,) in rows(sides.taking, _HARMLESS)}


def is_harmless(name: str, harmless: Collection[str]) -> bool:
    """Return whether a setting loads no code and is not restricted to superusers. Custom names are harmless."""
    return not _CODE.fullmatch(name) and (name.lower() in harmless or "." in name)
