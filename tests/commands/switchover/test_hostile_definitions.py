"""A publisher chooses what it says of its definitions: no line to paste holds a statement of its own."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from fix_switchover_obstacles import Scene

from pgsub.commands.preflight import catalog_facts
from pgsub.commands.switchover.obstacles import access, forward_publications, table_definitions

_EVIL = "'0; ALTER ROLE mallory SUPERUSER; --'::text"
_LOW = "pg_catalog.format_type(a.atttypid, a.atttypmod)"
#: Where a query reads what becomes SQL: the publisher answers something else there.
_ANSWERS: list[tuple[ModuleType, str, str, str]] = [
    (table_definitions, "_INDEXES", "s.kind || d.body, d.body", f"s.kind || d.body, {_EVIL}"),
    (table_definitions, "_CONSTRAINTS", "d.def, d.def", f"d.def, {_EVIL}"),
    (table_definitions, "_TRIGGERS", "d.def, d.def", f"d.def, {_EVIL}"),
    (table_definitions, "_DEFAULTS", "e.def, e.def", f"e.def, {_EVIL}"),
    (table_definitions, "_POLICIES", "p.permissive", _EVIL),
    (table_definitions, "_POLICIES", "p.cmd", _EVIL),
    (table_definitions, "_POLICIES", "p.qual", _EVIL),
    (table_definitions, "_POLICIES", "p.with_check", _EVIL),
    (access, "_GRANTS", "x.privilege_type", f"CASE WHEN a.rel = 't' THEN {_EVIL} ELSE x.privilege_type END"),
    (access, "_GRANTS", "SELECT a.kind", f"SELECT CASE WHEN a.rel = 't' THEN {_EVIL} ELSE a.kind END"),
    (
        forward_publications,
        "_COLUMNS",
        "y.typname::text",
        f"CASE a.attname WHEN 'late' THEN {_EVIL} ELSE y.typname::text END",
    ),
    (catalog_facts, "_COLUMNS", _LOW, _EVIL),
]
_QUOTED = re.compile(r"\"(?:[^\"]|\"\")*\"|'(?:[^']|'')*'")


def test_what_a_publisher_says_of_a_definition_is_no_statement_to_paste(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.pair.pubdb.execute(
        "CREATE INDEX by_v ON t (v); ALTER TABLE t ADD CONSTRAINT odd CHECK (n % 2 = 1);"
        "CREATE TRIGGER tr BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f(); ALTER TABLE t ALTER v SET DEFAULT 'x';"
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY mine ON t USING (id > 0) WITH CHECK (id > 0);"
        "GRANT SELECT ON t TO PUBLIC; CREATE TYPE mood AS ENUM ('sad'); ALTER TABLE t ADD late mood"
    )
    for module, query, asked, answer in _ANSWERS:
        with monkeypatch.context() as patch:
            _answer(patch, module, query, asked, answer)
            hints = [one.hint or "" for one in scene.look()]
        pasted = [line for hint in hints for line in hint.split("\n") if line.endswith(";")]
        assert len(pasted) > 5
        assert [line for line in pasted if _QUOTED.sub("", line).count(";") != 1] == [], (query, asked)
        if module is table_definitions:
            dump = 'pg_dump --schema-only --table=\'"public"."t"\' PUBLISHER'
            assert any(dump in hint.split("\n") for hint in hints), (query, asked)


def _answer(patch: pytest.MonkeyPatch, module: ModuleType, query: str, asked: str, answer: str) -> None:
    text = getattr(module, query)
    assert text.count(asked) == 1
    hostile = text.replace(asked, answer)
    patch.setattr(module, query, hostile)
    if module is table_definitions:
        kinds = [(hostile if one[0] is text else one[0], *one[1:]) for one in table_definitions._KINDS]
        patch.setattr(module, "_KINDS", tuple(kinds))
