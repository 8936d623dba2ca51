"""One module reads the texts of a server's errors and shortens them, before they reach an error, log or state store."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
import sources

from pgsub.apply.conflicts import conflict_record
from pgsub.common import server_words
from pgsub.common.errors import PgsubError
from pgsub.common.server_words import KEPT_OF_SERVER
from pgsub.launcher.error_rows import internal_error
from pgsub.publisher.server_errors import ServerError, classify
from pgsub.tablesync.copy.below_libpq import SourceError
from pgsub.target.session.connect import translate
from pgsub.target.sql.pipeline import StatementFailed

if TYPE_CHECKING:
    from fix_servers import Database

_PLACE = "common/server_words.py"
_ERROR = "psycopg.Error"
_FIELDS = {"message_primary", "message_detail", "message_hint"}


def _caught(handler: ast.ExceptHandler) -> Iterator[ast.AST]:
    """Yield where a handler uses the whole text of an error of psycopg."""
    if handler.type is None or handler.name is None or "psycopg" not in ast.unparse(handler.type):
        return
    for node in ast.walk(handler):
        whole = node.args[:1] if isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "repr") else []
        whole += [node.value] if isinstance(node, ast.FormattedValue) else []
        if any(isinstance(one, ast.Name) and one.id == handler.name for one in whole):
            yield node


def _taken(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            context = node.attr == "context" and ast.unparse(node.value).rpartition(".")[2] == "diag"
            if context or node.attr in _FIELDS:
                yield node
        elif isinstance(node, ast.ExceptHandler):
            yield from _caught(node)
        elif isinstance(node, ast.FunctionDef):
            named = {one.arg for one in node.args.args if one.annotation and ast.unparse(one.annotation) == _ERROR}
            for call in ast.walk(node) if named else ():
                if (
                    isinstance(call, ast.Call)
                    and ast.unparse(call.func) == "str"
                    and ast.unparse(call.args[0]) in named
                ):
                    yield call


def test_only_one_module_reads_texts_of_a_servers_error() -> None:
    found = [
        f"{name}:{node.lineno}"  # type: ignore[attr-defined]
        for name, tree in sources.trees("|".join([r"\bdiag\b|except[^:]*psycopg", f": {_ERROR}", *_FIELDS]))
        if name != _PLACE
        for node in _taken(tree)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "error.diag.message_primary",
        "diag.message_detail",
        "error.diag.context",
        "try: f()\nexcept psycopg.Error as e: g(str(e))",
        "try: f()\nexcept (OSError, psycopg.Error) as e: g(f'{e}')",
        "def f(error: psycopg.Error): return str(error)",
    ],
)
def test_reading_a_text_of_a_servers_error_is_found(text: str) -> None:
    assert list(_taken(ast.parse(text)))


def test_an_endless_text_of_a_server_is_shortened(subdb: Database) -> None:
    raised = (
        "DO $$ BEGIN RAISE unique_violation USING MESSAGE = repeat('m', 1000000), HINT = repeat('h', 1000000),"
        " DETAIL = 'Key (a)=(' || repeat('d', 1000000) || ') already exists.'; END $$"
    )
    with pytest.raises(psycopg.Error) as caught:
        subdb.execute(raised)
    error = caught.value
    assert len(str(error)) > 1_000_000
    made: list[PgsubError] = [
        translate(error, "do it"),
        classify(ServerError.from_exception(error), "do it"),
        internal_error(RuntimeError(str(error))),
    ]
    texts = [text for one in made for text in (one.message, one.detail, one.hint, one.context) if text]
    texts += [str(StatementFailed(None, error, None)), str(SourceError(error)), server_words.said(error).message]
    texts += [conflict_record.first_detail(error.diag), conflict_record.violated_key(error.diag) or ""]
    assert max(map(len, texts)) < KEPT_OF_SERVER + 200


def test_an_endless_text_of_libpq_is_shortened() -> None:
    error = psycopg.OperationalError("x" * 1_000_000 + "\nmore")
    assert len(server_words.said(error).message) == KEPT_OF_SERVER + 1
    assert server_words.said(psycopg.OperationalError("")).message == "OperationalError"
