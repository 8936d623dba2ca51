"""Text that others chose is quoted in commands and statements to paste."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import sources
from psycopg import sql

from pgsub.apply.worker import missing_partition
from pgsub.cli import app
from pgsub.cli.general_options import current
from pgsub.cli.output import console, documents, render
from pgsub.cli.output.reporting import LogReporter
from pgsub.commands.status.next_steps import _hinted
from pgsub.commands.subscription import ledger_definition
from pgsub.common.errors import PgsubError, ProtocolViolation, StateForbids, one_line
from pgsub.common.quoting import dumping, literal, statement, word
from pgsub.common.server_words import KEPT_OF_SERVER
from pgsub.protocol.messages import Column, Relation
from pgsub.publisher import connect as publisher
from pgsub.publisher import slot_creation
from pgsub.publisher.server_errors import ServerError, classify
from pgsub.publisher.slot_creation import OpenTransaction
from pgsub.target.catalog import ddl_hints
from pgsub.target.session import connect as target
from pgsub.target.session.connect import translate
from pgsub.target.sql import resync_truncate

assert app.app  # whose commands are known then

if TYPE_CHECKING:
    from fix_servers import Database

#: The name of a table or subscription in a command, and anything quoted by hand or not at all in a statement.
_UNQUOTED = re.compile(
    r"--(?:resync|hold|release|table) \{(?!(?:word|shlex\.quote)\()"
    r"|(?:\\n|\b)pgsub [a-z][a-z -]* \{(?:[\w.]+\.|sub)?name\}"
    r"|(?:\\n|\b)(?:ALTER|CREATE|DELETE|DROP|GRANT|REVOKE|SELECT|WHERE) .*"
    r"(?:'\{[^}]*\}'|\"\{[^}]*\}\"|\{\w+(?:\[\d\])+\}).*;"
)
#: A name that is quoted where it is assigned.
_QUOTED = re.compile(r"\bname = (?:quoting\.)?word\(")


def test_foreign_text_in_a_line_to_paste_is_quoted() -> None:
    found = []
    for module, text in sources.modules().items():
        quoted = _QUOTED.search(text) is not None
        for line in text.splitlines():
            if _UNQUOTED.search(line.replace(" {name}", "") if quoted else line):
                found.append(f"{module}: {line.strip()}")
    assert found == []


#: A publisher decides what pg_dump writes.
_UNREAD = re.compile(r"pg_dump[^\n]*(?:\\?\n[^\n]*)?\| *psql|PUBLISHER *\|")


def test_a_dump_of_the_publisher_is_never_piped_into_a_target() -> None:
    root = sources.ROOT
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "man").iterdir()]
    texts = {**sources.modules(), **{str(page): page.read_text() for page in pages}}
    assert [name for name, text in texts.items() if _UNREAD.search(text)] == []
    shown = dumping("--schema-only").splitlines()
    assert shown[-1] == "pg_dump --schema-only --file=dump.sql PUBLISHER" and "read dump.sql" in shown[0]


@pytest.mark.parametrize("kind", ["schema", "function", "sequence", "table"])
def test_a_name_in_a_message_of_the_publisher_is_quoted_in_a_line_to_paste(kind: str) -> None:
    name = 'a TO "mallory"; ALTER ROLE mallory SUPERUSER; --'
    hint = str(classify(ServerError("42501", f"permission denied for {kind} {name}"), "read", user="u").hint)
    quoted = name.replace('"', '""')
    assert hint.endswith(f' ON {kind.upper()} "{quoted}" TO "u";')


def test_the_name_of_a_constraint_or_trigger_is_quoted_in_a_line_to_paste(subdb: Database) -> None:
    name = 'c"; DROP TABLE t; --\n'
    with psycopg.connect(subdb.conninfo) as session:
        session.execute("CREATE TEMP TABLE t (id int PRIMARY KEY)")
        oid = session.execute("SELECT 't'::regclass::oid::bigint").fetchone()[0]  # type: ignore[index]
        function = "pg_catalog.suppress_redundant_updates_trigger()"
        trigger = f"CREATE TRIGGER {{}} BEFORE TRUNCATE ON t EXECUTE FUNCTION {function}"
        session.execute(sql.SQL(trigger).format(sql.Identifier(name)))
        with pytest.raises(StateForbids) as fires:
            resync_truncate.inspect(session, 1, [oid], replica=False, tagged=True)
        session.execute(sql.SQL("CREATE TEMP TABLE f (id int CONSTRAINT {} REFERENCES t)").format(sql.Identifier(name)))
        with pytest.raises(StateForbids) as references:
            resync_truncate.inspect(session, 1, [oid], replica=False, tagged=True)
    quoted = '"c""; DROP TABLE t; --\\n"'
    assert str(fires.value.hint).endswith(f" DISABLE TRIGGER {quoted};")
    assert str(references.value.hint).endswith(f" DROP CONSTRAINT {quoted};")


def test_the_name_of_a_database_adds_no_line_to_paste() -> None:
    waits = OpenTransaction(None, "g", None, None, _EVIL, None, None, None, None)
    assert [line for line in waits.hint().split("\n")[1:] if "PREPARED 'g';" not in line] == []


def test_no_number_of_a_server_is_sql_of_a_line_to_paste(pubdb: Database, subdb: Database) -> None:
    columns = "NULL, 'u', 'a', 'd', '2020-01-01', 5::float8, 'active', 'SELECT 1'"
    with contextlib.closing(publisher.connect(pubdb.conninfo, application_name="test")) as source:
        [seen] = slot_creation._transactions(source, f"SELECT 7, {columns}", {})
        assert seen.hint().endswith("\nSELECT pg_terminate_backend(7);")
        with pytest.raises(ProtocolViolation, match=r"^invalid process ID$"):
            slot_creation._transactions(source, f"SELECT '7) \\! touch x', {columns}", {})
    with contextlib.closing(target.connect(subdb.conninfo, "test")) as session:
        session.execute("DROP SCHEMA IF EXISTS pgsub CASCADE; CREATE SCHEMA pgsub")
        session.execute(
            "CREATE VIEW pgsub.subscription (subid, subname, state_store, slot_name, slot_intent)"
            " AS SELECT '1; \\! touch x', 's', 'store', 'slot', true"
        )
        with pytest.raises(ProtocolViolation, match=r"^invalid number of a subscription$"):
            ledger_definition.find(session, "s")


#: Classes that are made of a server's rows as they come, or of what is none: no number of theirs is in a line to paste.
_AS_THEY_COME = {
    *("Actions", "Chunks", "Column", "Database", "Difference", "FreeSlots", "Grant", "Identifier", "Leaf"),
    *("OtherOrigin", "Outcome", "RemoteColumn", "Renamed", "SkippedRow", "SlotRow"),
    *("TableSync", "Type", "TypeName", "Use"),
}


def test_what_is_made_of_rows_as_they_come_makes_no_line_to_paste() -> None:
    rooms = ("publisher", "commands", "switchover", "reconcile", "tablesync", "launcher")
    texts = [text for module, text in sources.modules().items() if any(f"{room}/" in module for room in rooms)]
    found = set(re.findall(r"\b([A-Z]\w+)\([^()]*\*\w+\)", "\n".join(texts)))
    assert "FreeSlots" in found
    assert found <= _AS_THEY_COME


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """A state folder that was given on the command line."""
    monkeypatch.setattr(current, "state_dir_option", "/srv/my state")
    return "--state-dir '/srv/my state'"


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("HINT:  Enable it first:\npgsub enable s", ["pgsub enable s"]),
        ("it holds once the subscription is enabled: pgsub enable 'a b'", ["pgsub enable 'a b'"]),
        ("pgsub disable s && pgsub run --until-caught-up", ["pgsub disable s", "pgsub run --until-caught-up"]),
        ("Try this:\n  pgsub conflicts replay s 1\nor that", ["pgsub conflicts replay s 1"]),
        ("HINT:  Start pgsub run again: it counts.\npgsub create --help", []),
        ("pgsub enable s && pgsub run & pgsub status s: pgsub status t", ["pgsub enable s", "pgsub status t"]),
        ("pgsub enable s --help && pgsub run", ["pgsub run"]),
        ("pgsub status s --state-dir /x\npgsub --state-dir FOLDER status", []),
    ],
)
def test_a_command_to_paste_names_the_given_state_folder(elsewhere: str, text: str, commands: list[str]) -> None:
    expected = text
    for one in commands:
        expected = expected.replace(one, f"{one} {elsewhere}")
    assert console.pasted(text) == expected
    current.state_dir_option = None
    assert console.pasted(text) == text


def test_every_kind_of_output_completes_commands(
    elsewhere: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    problem = PgsubError("odd", hint="Look:\npgsub status s")
    console.error(problem)
    console.warning("odd", hint="Look:\npgsub status s")
    console.notice("odd: pgsub status s", hint="Look:\npgsub status s")
    documents.emit_error(problem)
    documents.emit_document("status", {"subscriptions": [{"next": "pgsub status s", "errors": [problem.__dict__]}]})
    documents.emit_document("status", {"runbook": [{"commands": ["pgsub status s"], "text": "pgsub status s"}]})
    print(render.rows(["next", "name"], [{"next": "pgsub status s", "name": "pgsub status s"}]))
    LogReporter(tmp_path / "log").log("ERROR", problem.log_text())
    said = "".join(capfd.readouterr()) + (tmp_path / "log").read_text()
    assert said.count(f"pgsub status s {elsewhere}") == said.count("pgsub status s") - 2 == 10


def test_every_record_of_the_log_is_built_by_log_text() -> None:
    """Foreign text could begin a field of a record; errors.log_text() prevents that."""
    found = [
        f"{module}: {line.strip()}"
        for module, text in sources.modules().items()
        for line in text.splitlines()
        if re.search(r"\\n(DETAIL|HINT|CONTEXT):", line)
    ]
    assert found == []


#: Modules that compose SQL to execute it.
_EXECUTED = {
    "tablesync/copy/plan.py",
    "tablesync/copy/row_by_row.py",
    "target/sql/row_lookup.py",
    "target/session/ledger_privileges.py",
    "target/session/ledger_guard.py",
}


def test_statements_to_paste_are_composed_in_one_place() -> None:
    found = {module for module, text in sources.modules().items() if ".as_string(" in text}
    assert found == {*_EXECUTED, "common/quoting.py"}


#: Modules in which text that a server quoted is executed on that server, or compared.
_QUOTED_BY_SERVERS = {
    "commands/switchover/obstacles/table_definitions.py",
    "target/catalog/ddl_hints.py",
    "target/catalog/relation_queries.py",
    "target/catalog/unique_indexes.py",
}


def test_names_to_paste_are_not_quoted_by_servers() -> None:
    """quote_ident() keeps line breaks in a name."""
    found = {module for module, text in sources.modules().items() if re.search(r"quote_ident\b", text)}
    assert found == _QUOTED_BY_SERVERS


_EVIL = "x\"'\npgsub drop s --yes\nALTER ROLE mallory SUPERUSER;\n"


def test_a_name_adds_no_line_to_a_hint() -> None:
    relation = Relation(1, _EVIL, _EVIL, "d", (Column(1, _EVIL, 23, -1),))
    for hint in (
        ddl_hints.hint(ddl_hints.create_table(relation, _EVIL, [one_line(_EVIL)])),
        ddl_hints.hint(ddl_hints.create_partition(relation, _EVIL, _EVIL, "DEFAULT", [_EVIL])),
        ddl_hints.hint(ddl_hints.add_columns(_EVIL, _EVIL, [(_EVIL, "integer")])),
        str(_missing_grant().hint),
    ):
        [step] = _hinted(hint)
        assert len(step.statements) == 1 and step.commands == ()
    assert "\n" not in word(_EVIL)


@pytest.mark.parametrize(
    "bound",
    [
        "DEFAULT; DROP TABLE t",
        "FOR VALUES IN ('x\ny')",
        "FOR VALUES IN ('x\\'); DROP TABLE t --')",
        "FOR VALUES FROM (1) TO (evil())",
        "FOR VALUES WITH (modulus 2, remainder 0) PARTITION BY RANGE (evil())",
    ],
)
def test_a_partition_bound_with_further_sql_is_rejected(bound: str) -> None:
    assert not missing_partition.is_bound(bound)


@pytest.mark.parametrize("text", ["a\nb", "'\n\\n'", "\\'\n{}", "plain '\\", ""])
def test_a_value_with_line_breaks_is_quoted_on_one_line(subdb: Database, text: str) -> None:
    pasted = statement(sql.SQL("SELECT {}").format(sql.Literal(text)))
    assert "\n" not in pasted
    assert subdb.value(pasted.replace("%", "%%")) == text


def _greet(listening: socket.socket, encoding: bytes) -> None:
    """Be a server that lets anybody in, and says which encoding a session has."""
    session = listening.accept()[0]
    said = b"client_encoding\0" + encoding + b"\0"
    ready = b"R" + struct.pack(">II", 8, 0) + b"S" + struct.pack(">I", len(said) + 4) + said + b"Z\0\0\0\5I"
    session.recv(1000)
    session.sendall(ready)
    session.recv(1)  # until the client ends it


def test_no_encoding_that_a_server_reports_hides_a_quote_in_a_line_to_paste() -> None:
    """In GBK the last byte of a letter and the quote behind it are one character."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_greet, args=(listening, b"GBK"), daemon=True).start()
        port = listening.getsockname()[1]
        words = f"host=127.0.0.1 port={port} user=u dbname=d sslmode=disable gssencmode=disable connect_timeout=10"
        with psycopg.connect(words, autocommit=True) as session:
            assert session.pgconn.parameter_status(b"client_encoding") == b"GBK"
    evil = "€'); DROP TABLE secret; -- "
    assert literal(evil) == statement(sql.Literal(evil)) == "'€''); DROP TABLE secret; -- '"
    assert statement(sql.SQL("{} {}").format(sql.Identifier('€"'), sql.Literal(evil))).startswith('"€""" \'€\'\'')


def _missing_grant() -> PgsubError:
    return classify(ServerError("42501", "permission denied for table t"), "read", table=(_EVIL, _EVIL), user=_EVIL)


def test_alternatives_of_a_hint_are_steps_of_their_own() -> None:
    both, rows = _hinted("To go on:\npgsub run s\nTo give it up:\nDELETE FROM t;\npgsub drop s"), ("DELETE FROM t;",)
    assert [(step.text, step.commands, step.statements) for step in both] == [
        ("To go on:", ("pgsub run s",), ()),
        ("To give it up:", (), rows),
        ("After that:", ("pgsub drop s",), ()),
    ]


def test_a_hint_of_a_server_adds_no_line_to_paste() -> None:
    for state in ("55000", "XX000", "23505", "P0001"):
        [step] = _hinted(str(classify(ServerError(state, "no", None, f"Do this.\n{_EVIL}"), "read").hint))
        assert step.statements == step.commands == ()


def test_a_hint_of_a_trigger_of_the_target_adds_no_line_to_paste(subdb: Database) -> None:
    raising = "DO $$BEGIN RAISE EXCEPTION 'no' USING HINT = E'Do this.\\npgsub drop s\\nDROP TABLE t;'; END$$"
    with pytest.raises(psycopg.Error) as raised:
        subdb.execute(raising)
    [step] = _hinted(str(translate(raised.value, "apply").hint))
    assert step.statements == step.commands == ()


_LONG = 2_000_000


@pytest.mark.parametrize(
    "text", [": pgsub a" * (_LONG // 9) + "&", "pgsub run --help" * (_LONG // 16), "&& pgsub " * (_LONG // 9)]
)
def test_a_long_text_is_completed_in_one_pass(elsewhere: str, text: str) -> None:
    assert console.pasted(text) == text


def test_a_long_text_of_a_server_is_shortened(subdb: Database) -> None:
    raising = "DO $$BEGIN RAISE EXCEPTION '%', repeat('m', 99999)"
    raising += " USING DETAIL = repeat('d', 99999), HINT = repeat('h', 99999); END$$"
    with pytest.raises(psycopg.Error) as raised:
        subdb.execute(raising)
    response = b"CXX000\0M" + b"m" * 99_999 + b"\0D" + b"d" * 99_999 + b"\0H" + b"h" * 99_999 + b"\0\0"
    for error in (
        translate(raised.value, "apply"),
        classify(ServerError.from_exception(raised.value), "read"),
        classify(ServerError.from_response(response), "read"),
    ):
        for kept in (error.message, error.detail, error.hint):
            assert kept is not None and KEPT_OF_SERVER < len(kept) < KEPT_OF_SERVER + 50 and kept.endswith("…")
