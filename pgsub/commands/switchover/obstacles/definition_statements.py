"""Statements to paste that recreate parts of the giving side's tables on the taking side.

Text from the publisher is used only if it is certain to be no more than the part. Otherwise there is no statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pgsub.commands.switchover.obstacles.obstacle import TAKING, paste
from pgsub.common import quoting
from pgsub.common.quoting import fragment
from pgsub.publisher.tables import Name

_READ = "These are the publisher's definitions: read what they call, which runs with your rights."
_UNREAD = "What the publisher says of others is not shown, as it is not plainly one definition. This shows it"
_TRIGGER_STARTS = ("CREATE TRIGGER ", "CREATE CONSTRAINT TRIGGER ")
_POLICY_WORDS = ({"PERMISSIVE", "RESTRICTIVE"}, {"ALL", "SELECT", "INSERT", "UPDATE", "DELETE"})


class Part(NamedTuple):
    """An index, constraint, trigger or default of a table.

    :ivar source: the table's name on the giving side.
    """

    source: Name
    table: Name
    name: str
    compared: str
    definition: str


def hint(written: Sequence[tuple[Name, str | None]]) -> str:
    """Return the statements to paste, and a command that shows definitions that must not be pasted.

    :param written: names of tables on the giving side, each with a statement, or None if there is none.
    """
    statements = [statement for _, statement in written if statement is not None]
    hint = [paste(TAKING, statements, _READ)] if statements else []
    unread = dict.fromkeys(source for source, statement in written if statement is None)
    if unread:
        options = " ".join(f"--table={quoting.word(quoting.name(*source))}" for source in unread)
        hint += [f"{_UNREAD}:", f"pg_dump --schema-only {options} PUBLISHER"]
    return "\n".join(hint)


def index(one: Part) -> str | None:
    """Return CREATE INDEX, None if the definition could contain more than that."""
    body = fragment(one.definition, listed=True)
    kind = "CREATE UNIQUE INDEX" if one.compared.startswith("CREATE UNIQUE ") else "CREATE INDEX"
    return None if body is None else f"{kind} {quoting.name(one.name)} ON {quoting.name(*one.table)} {body};"


def constraint(one: Part) -> str | None:
    """Return ADD CONSTRAINT, None as for :func:`index`."""
    text = fragment(one.definition)
    if text is None:
        return None
    return f"ALTER TABLE {quoting.name(*one.table)} ADD CONSTRAINT {quoting.name(one.name)} {text};"


def trigger(one: Part) -> str | None:
    """Return CREATE TRIGGER, None as for :func:`index`. It is complete, with the giving side's table name."""
    text = fragment(one.definition, listed=True)
    return f"{text};" if text is not None and text.startswith(_TRIGGER_STARTS) else None


def default(one: Part) -> str | None:
    """Return the statement for a column's default or identity, None as for :func:`index`."""
    column = f"ALTER TABLE {quoting.name(*one.table)} ALTER COLUMN {quoting.name(one.name)}"
    if one.definition in ("ALWAYS", "BY DEFAULT"):
        return f"{column} ADD GENERATED {one.definition} AS IDENTITY;"
    text = fragment(one.definition)
    return None if text is None else f"{column} SET DEFAULT {text};"


def policy(table: Name, row: tuple[Any, ...]) -> str | None:
    """Return CREATE POLICY, None as for :func:`index`.

    :param row: a row of ``pg_policies``, preceded by the names of the table.
    """
    name, _, permissive, command, roles, *expressions = row[2:]
    assert isinstance(roles, list)
    if any(word not in known for word, known in zip((permissive, command), _POLICY_WORDS, strict=True)):
        return None
    listed = ", ".join("PUBLIC" if role == "public" else quoting.name(str(role)) for role in roles)
    text = (
        f"CREATE POLICY {quoting.name(str(name))} ON {quoting.name(*table)} AS {permissive} FOR {command} TO {listed}"
    )
    for clause, expression in zip(("USING", "WITH CHECK"), expressions, strict=True):
        if expression is not None:
            checked = fragment(str(expression))
            if checked is None:
                return None
            text += f" {clause} ({checked})"
    return f"{text};"
