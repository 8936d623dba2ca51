"""What ``status --runbook`` says is typed word for word, and apply goes on: for each failure that it knows.

Conflicts and copies are in test_conflict_scenes.py.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from fix_program import valid
from fix_stuck import MakeStuck, Stuck

#: What this test's workers, which have no launcher, do in another way.
_OF_A_LAUNCHER = ("enable", "run", "wait")
#: What is wrong on the target, the change that fails there, and what the steps must name.
FAULTS = {
    "column": ("ALTER TABLE b DROP COLUMN n", "INSERT INTO b VALUES (1, 1.5)", 'ADD COLUMN "n" numeric;'),
    "type": ("ALTER TABLE b ALTER n TYPE int", "INSERT INTO b VALUES (1, 1.5)", 'ALTER COLUMN "n" TYPE numeric;'),
    "key": ("ALTER TABLE a DROP CONSTRAINT a_pkey", "UPDATE a SET t = 'u' WHERE id = 1", 'ADD PRIMARY KEY ("id");'),
    "null": ("ALTER TABLE b ALTER n SET NOT NULL", "INSERT INTO b VALUES (1, NULL)", "DROP NOT NULL;"),
}


def _steps(it: Stuck) -> list[dict[str, Any]]:
    return list(valid("status", it.ok("status", "s", "--runbook", "--json").stdout)["runbook"])


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_schema_that_does_not_fit_is_mended_by_the_statements_of_the_runbook(stuck: MakeStuck, fault: str) -> None:
    wrong, change, named = FAULTS[fault]
    it = stuck()
    it.subdb.execute("INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 100) g")
    it.subdb.execute(wrong)
    assert it.apply(change) is not None
    steps = _steps(it)
    statements = [line for step in steps for line in step["statements"]]
    copies_again = [line for step in steps for line in step["commands"] if "--resync" in line]
    assert copies_again == (["pgsub refresh s --resync public.b"] if fault == "column" else [])
    assert any(line.endswith(named) for line in statements), steps
    for line in statements:
        it.subdb.execute(line)
    assert it.apply() is None
    for table in ("a", "b"):
        assert it.subdb.rows(f"SELECT * FROM {table} ORDER BY 1") == it.pubdb.rows(f"SELECT * FROM {table} ORDER BY 1")


def test_a_row_that_a_constraint_refuses_is_named_and_the_rest_of_its_transaction_is_kept(stuck: MakeStuck) -> None:
    it = stuck()
    it.subdb.execute("ALTER TABLE b ADD CHECK (n < 100)")
    assert it.apply("INSERT INTO b VALUES (1, 100); INSERT INTO b VALUES (2, 2)") is not None
    told, remove, preview, skip, hold, *rest = _steps(it)
    assert hold["commands"] == ["pgsub alter s --hold public.b"]
    assert "Failing row contains (1, 100)" in told["text"] and "a constraint" in remove["text"]
    assert {step["commands"][0].split()[1] for step in rest} == set(_OF_A_LAUNCHER)
    it.preview(*shlex.split(preview["commands"][0])[3:-1], code=6)
    it.ok(*shlex.split(skip["commands"][0])[1:], "--yes")
    assert it.apply() is None and it.subdb.rows("SELECT id FROM b") == [(2,)]


@pytest.mark.long
def test_after_a_lost_slot_the_runbook_leads_to_another_slot_and_tables_that_are_compared(stuck: MakeStuck) -> None:
    it = stuck()
    it.apply("INSERT INTO b VALUES (1, 1)")
    it.pubdb.execute("SELECT pg_drop_replication_slot('s')")
    assert it.apply() is not None
    for step in _steps(it):
        for line in step["commands"]:
            it.ok(*shlex.split(line)[1:], "--yes")
        for line in step["statements"]:
            it.subdb.execute(line)
    assert it.subdb.rows("SELECT id FROM b") == [(1,)]
    assert it.pubdb.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 's'") == 1
    assert it.cli.states() == {"a": "i", "b": "i"}


def test_a_table_that_was_made_again_with_its_rows_is_not_copied_onto_them(stuck: MakeStuck) -> None:
    it = stuck()
    it.apply("INSERT INTO b VALUES (1, 1)")
    it.subdb.execute("CREATE TABLE other AS TABLE b; DROP TABLE b; ALTER TABLE other RENAME TO b")
    assert it.apply("INSERT INTO b VALUES (2, 2)") is not None
    commands = [line for step in _steps(it) for line in step["commands"] if line.startswith("pgsub refresh ")]
    assert commands == ["pgsub refresh s --adopt"]  # it copies an empty table, too
