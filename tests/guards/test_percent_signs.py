"""Names may contain a percent sign, which psycopg reads as a placeholder where a statement has parameters.

Therefore statements with foreign names use parameters of the server (``$1``). Beside ``%s`` or ``%(name)s`` of psycopg
stands only text of pgsub.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import sources

_PLACEHOLDER = re.compile(r"(?<!%)(?:%%)*%(?:[sbt](?!')|\()")
_LEDGER = "sql.Identifier('pgsub', table)"
#: Allowed beside placeholders, by module: columns and tables of the ledger, conditions that the module writes.
OWN = {
    "target/ledger/subscriptions.py": {"sql.Identifier(name)", "assignments", _LEDGER},
    "target/ledger/prepared_xacts.py": {_LEDGER},
    "switchover/journal.py": {"sql.Identifier(name)", "assignments"},
    "publisher/publication.py": {"condition", "sql.SQL(subscribed)", "published(connection)"},
    "publisher/tables.py": {"published(connection)"},
}


def _composed(tree: ast.Module) -> Iterator[tuple[int, str, list[str]]]:
    """Yield line, text and parts of each call of ``format``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            texts = [
                n.value for n in ast.walk(node.func.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            parts = [ast.unparse(one) for one in (*node.args, *(word.value for word in node.keywords))]
            yield node.lineno, "".join(texts), parts


def _strange(name: str, text: str) -> list[str]:
    """Return the parts that stand beside placeholders of psycopg and are not pgsub's own."""
    if "sql" not in text or not re.search(r"%[sbt(]", text):
        return []
    own = OWN.get(name, set())
    found = _composed(ast.parse(text))
    return [
        f"{name}:{line}: {part}"
        for line, template, parts in found
        if _PLACEHOLDER.search(template)
        for part in parts
        if part not in own
    ]


def test_no_statement_mixes_relation_names_with_placeholders_of_psycopg() -> None:
    assert OWN.keys() <= sources.modules().keys()
    assert [one for name, text in sources.modules().items() for one in _strange(name, text)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sql.SQL('DELETE FROM {} WHERE ctid = %s::tid').format(table)", ["x.py:1: table"]),
        ("sql.SQL('SELECT {a}' ' WHERE n = %(n)s').format(a=name)", ["x.py:1: name"]),
        ("sql.SQL('SELECT {} % 2 = $1').format(table)", []),
        ("sql.SQL(\"SELECT format('%s', {})\").format(table)", []),
        ("sql.SQL('SELECT %s')", []),
    ],
)
def test_a_name_beside_a_placeholder_is_found(text: str, found: list[str]) -> None:
    assert _strange("x.py", text) == found
