"""Messages inside a transaction: all of them are applied, and all places agree which they are."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import get_args

import sources

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
    found = [
        f"{module}: {literal}"
        for module, text in sources.modules().items()
        for literal in re.findall(r'b"\[?\^?[IUDRYTM]{4,}\]?', text)
    ]
    assert not found
