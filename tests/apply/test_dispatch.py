"""Messages inside a transaction: all of them are applied, and all places agree which they are."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import get_args

import pgsub
from pgsub.apply.execute.dispatch import Dispatch
from pgsub.protocol.messages import Change


def test_every_message_of_a_transaction_is_applied_in_a_way_of_its_own() -> None:
    source = ast.parse(textwrap.dedent(inspect.getsource(Dispatch.message)))
    cases = {
        node.cls.id for node in ast.walk(source) if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name)
    }
    inserts = {"Insert"}  # are not decoded one by one
    assert cases | inserts == {one.__name__ for one in get_args(Change)}


def test_the_types_of_messages_in_a_transaction_are_listed_in_one_place() -> None:
    root = Path(pgsub.__file__).parent
    found = [
        f"{path.relative_to(root)}: {literal}"
        for path in root.rglob("*.py")
        for literal in re.findall(r'b"\[?\^?[IUDRYTM]{4,}\]?', path.read_text())
    ]
    assert not found
