"""Names of tables are chosen by others: in a command that is to be pasted into a shell they are quoted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

import pgsub
from pgsub.commands.runbook import _hinted
from pgsub.errors import PgsubError, one_line
from pgsub.pasted import statement, value, word
from pgsub.protocol.messages import Column, Relation
from pgsub.publisher.faults import ServerError, classify
from pgsub.target import remedy
from pgsub.target.connect import translate

if TYPE_CHECKING:
    from fix_servers import Database

_UNQUOTED = re.compile(r"--(?:resync|hold|release|table) \{(?!(?:word|shlex\.quote)\()")


def test_no_command_to_paste_has_a_table_in_it_that_is_not_quoted() -> None:
    root = Path(pgsub.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text().splitlines()
        if _UNQUOTED.search(line)
    ]
    assert found == []


#: Where SQL is composed that is executed.
_EXECUTED = {"tablesync/plan.py", "tablesync/resolving_copy.py", "target/look.py", "target/ledger_owner.py"}


def test_statements_to_paste_are_composed_in_one_place() -> None:
    root = Path(pgsub.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if ".as_string(" in path.read_text()}
    assert found == {*_EXECUTED, "pasted.py"}


_EVIL = "x\"'\npgsub drop s --yes\nALTER ROLE mallory SUPERUSER;\n"


def test_no_name_makes_a_line_of_a_hint_of_its_own() -> None:
    relation = Relation(1, _EVIL, _EVIL, "d", (Column(1, _EVIL, 23, -1),))
    for hint in (
        remedy.hint(remedy.create_table(relation, _EVIL, [one_line(_EVIL)])),
        remedy.hint(remedy.add_columns(_EVIL, _EVIL, [(_EVIL, "integer")])),
        str(_missing_grant().hint),
    ):
        [step] = _hinted(hint)
        assert len(step.statements) == 1 and step.commands == ()
    assert "\n" not in word(_EVIL)


@pytest.mark.parametrize("text", ["a\nb", "'\n\\n'", "\\'\n{}", "plain '\\", ""])
def test_a_value_with_line_breaks_is_itself_on_one_line(subdb: Database, text: str) -> None:
    pasted = statement(sql.SQL("SELECT {}").format(value(text)))
    assert "\n" not in pasted
    assert subdb.value(pasted.replace("%", "%%")) == text


def _missing_grant() -> PgsubError:
    return classify(ServerError("42501", "permission denied for table t"), "read", table=(_EVIL, _EVIL), user=_EVIL)


def test_no_hint_of_a_server_holds_a_line_to_paste() -> None:
    for state in ("55000", "XX000", "23505", "P0001"):
        [step] = _hinted(str(classify(ServerError(state, "no", None, f"Do this.\n{_EVIL}"), "read").hint))
        assert step.statements == step.commands == ()


def test_no_hint_of_a_trigger_of_the_target_holds_a_line_to_paste(subdb: Database) -> None:
    raising = "DO $$BEGIN RAISE EXCEPTION 'no' USING HINT = E'Do this.\\npgsub drop s\\nDROP TABLE t;'; END$$"
    with pytest.raises(psycopg.Error) as raised:
        subdb.execute(raising)
    [step] = _hinted(str(translate(raised.value, "apply").hint))
    assert step.statements == step.commands == ()
