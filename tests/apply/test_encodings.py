"""Conflicts and dead letters on targets that are not UTF8: jsonb takes no character they lack, nor an escape for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from fix_pair import Pair
from fix_servers import Database

from pgsub.apply.worker import feedback
from pgsub.common.errors import ApplyError
from pgsub.common.text import legible
from pgsub.launcher.mirror import lock_waits
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.ledger import skip
from pgsub.target.sql import jsonb

if TYPE_CHECKING:
    from embedded import Server


@pytest.fixture
def into(pubdb: Database, target: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Pair]]:
    """A subscription from UTF8 to a target of another encoding, of a table with names that are no ASCII."""
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    made: list[Pair] = []

    def make(encoding: str, table: str = "tü", column: str = "ä") -> Pair:
        subdb = Database(target, f"{pubdb.name}_{encoding}".lower(), encoding)
        for database in (pubdb, subdb):
            database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, {column} text)")
        pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
        made.append(Pair(pubdb, subdb).subscribe("r", [("public", table)]))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.subdb.drop()


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "EUC_JP"])
def test_a_missing_row_is_recorded_whatever_its_names_are(into: Callable[[str], Pair], encoding: str) -> None:
    p = into(encoding)
    p.apply("INSERT INTO tü VALUES (1, 'ö')")
    p.subdb.execute("DELETE FROM tü")
    p.apply("UPDATE tü SET ä = 'é'", "INSERT INTO tü VALUES (2, 'Ý')")
    [event] = p.events()
    assert (event["conflict_type"], event["relname"]) == ("update_missing", "tü")
    assert "é" in event["detail"]
    p.apply("DELETE FROM tü WHERE id = 1")
    assert p.subdb.rows("SELECT * FROM tü") == [(2, "Ý")]


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "WIN1252"])
def test_what_is_skipped_is_kept_whatever_its_names_and_values_are(into: Callable[[str], Pair], encoding: str) -> None:
    p = into(encoding)
    p.subdb.execute("INSERT INTO tü VALUES (1, 'here')")
    with pytest.raises(ApplyError) as stopped:
        p.apply("INSERT INTO tü VALUES (1, '日本')")
    assert stopped.value.finish_lsn is not None
    skip.set_pending(p.session, p.subid, skip.of([parse_lsn(stopped.value.finish_lsn)]))
    p.apply("INSERT INTO tü VALUES (2, 'ß')")
    assert p.subdb.rows("SELECT * FROM tü ORDER BY 1") == [(1, "here"), (2, "ß")]
    [(name, body)] = p.subdb.rows("SELECT relname, body FROM pgsub.skipped_change")
    assert (name, body["new"]) == ("tü", {"id": "1", "ä": {"text": "日本".encode().hex()}})


@pytest.fixture
def alike(pubdb: Database, target: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Pair]]:
    """A subscription between databases of the same encoding, of a table in a state."""
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    made: list[Pair] = []

    def make(encoding: str, state: str) -> Pair:
        there, here = (Database(one, f"{pubdb.name}_{n}", encoding) for n, one in enumerate((pubdb.server, target)))
        for database in (there, here):
            database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        there.execute("CREATE PUBLICATION p FOR ALL TABLES")
        made.append(Pair(there, here).subscribe(state, [("public", "t")]))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.subdb.drop()
        one.pubdb.drop()


_LACKING = "INSERT INTO t SELECT 1, pg_catalog.convert_from(%s, %s)"


@pytest.mark.parametrize(("encoding", "value"), [("WIN1252", b"\x81"), ("EUC_JP", b"\x8f\xf5\xa1")])
def test_a_character_that_utf8_lacks_stops_apply_with_what_to_do(
    alike: Callable[[str, str], Pair], encoding: str, value: bytes
) -> None:
    p = alike(encoding, "r")
    p.pubdb.execute(_LACKING, value, encoding)
    with pytest.raises(ApplyError, match="has no equivalent in encoding") as stopped:
        p.catch_up()
    assert stopped.value.hint is not None
    assert stopped.value.hint.splitlines()[-1] == "pgsub reconcile NAME --force"


def test_a_copy_that_a_character_stopped_continues_once_it_is_changed(alike: Callable[[str, str], Pair]) -> None:
    p = alike("WIN1252", "i")
    p.pubdb.execute(_LACKING, b"\x81", "WIN1252")
    with pytest.raises(ApplyError, match="has no equivalent in encoding") as stopped:
        p.sync("t")
    assert stopped.value.hint == "Change the value on the publisher. pgsub tries again by itself."
    p.pubdb.execute("UPDATE t SET v = '€'")
    p.sync("t")
    p.same("t")


@pytest.mark.parametrize(
    ("encoding", "read"),
    [
        ("UTF8", {"ü": ["日 \\u65e5 😀"]}),
        ("SQL_ASCII", {"ü": ["日 \\u65e5 😀"]}),
        ("EUC_JP", {"ü": ["日 \\u65e5 \\U0001f600"]}),
        ("LATIN1", {"ü": ["\\u65e5 \\u65e5 \\U0001f600"]}),
        ("WIN866", {"\\xfc": ["\\u65e5 \\u65e5 \\U0001f600"]}),
        ("EUC_TW", {"\\xfc": ["\\u65e5 \\u65e5 \\U0001f600"]}),
    ],
)
def test_a_document_has_what_its_database_can_have(encoding: str, read: object) -> None:
    assert json.loads(jsonb.text({"ü": ["日 \\u65e5 😀"]}, encoding)) == read


@pytest.mark.parametrize("encoding", ["UTF8", "SQL_ASCII", "LATIN1"])
def test_a_document_has_no_zero_byte_for_no_database_has_it(subdb: Database, encoding: str) -> None:
    text = jsonb.text({"a\0": "\0 \\\0 \\u0000 \\\\u0000"}, encoding)
    assert subdb.value("SELECT %s::jsonb", text) == {"a\\x00": "\\x00 \\\\x00 \\u0000 \\\\u0000"}


def test_who_holds_up_a_worker_is_shown_whatever_bytes_his_statement_has(into: Callable[[str], Pair]) -> None:
    p = into("SQL_ASCII")
    holder = p.subdb.connect(client_encoding="SQL_ASCII")
    with closing(holder), closing(p.subdb.connect(application_name=f"pgsub {p.subid} x 1")) as own:
        holder.execute(b"BEGIN; LOCK TABLE t\xc3\xbc -- caf\xe9")
        waits = threading.Thread(target=lambda: own.execute("BEGIN; LOCK TABLE tü; ROLLBACK"))
        waits.start()
        p.until("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'tü'::regclass", value=1)
        found = lock_waits.locks(p.session, p.subid)
        holder.execute("ROLLBACK")
        waits.join()
    assert found["x"].endswith(": BEGIN; LOCK TABLE t -- caf ")


@pytest.mark.parametrize(("encoding", "byte"), [("WIN1252", b"\x81"), ("EUC_JP", b"\x8f\xf5\xa1")])
def test_who_holds_up_a_worker_is_shown_though_utf8_lacks_a_character_of_his(
    into: Callable[[str], Pair], encoding: str, byte: bytes
) -> None:
    p = into(encoding)
    holder = p.subdb.connect(client_encoding=encoding)
    with closing(holder), closing(p.subdb.connect(application_name=f"pgsub {p.subid} x 1")) as own:
        holder.execute("BEGIN")
        holder.execute("SELECT pg_catalog.pg_advisory_xact_lock(7)")
        holder.execute(b"SELECT 1 -- caf" + byte)
        waits = threading.Thread(target=lambda: own.execute("SELECT pg_catalog.pg_advisory_xact_lock(7)"))
        waits.start()
        p.until("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'", value=1)
        found = lock_waits.locks(p.session, p.subid)
        holder.execute("ROLLBACK")
        waits.join()
    assert found["x"].partition(": ")[2].startswith("SELECT 1 -- caf\\x")
    assert p.session.execute("SELECT 'é'").fetchone() == ("é",)


@pytest.mark.parametrize(
    ("rule", "local", "change", "left"),
    [
        ("", "INSERT INTO tü VALUES (1, 'a')", "UPDATE tü SET ä = 'b'", [("b",)]),
        ("", "INSERT INTO tü VALUES (1, 'a')", "DELETE FROM tü", []),
        ("insert_exists=apply_remote", "", "INSERT INTO tü VALUES (1, 'b')", [("b",)]),
        ("insert_exists=keep_local", "", "INSERT INTO tü VALUES (1, 'b')", None),
        ("update_origin_differs=keep_local", "INSERT INTO tü VALUES (1, 'a')", "UPDATE tü SET ä = 'b'", None),
    ],
)
def test_a_local_row_with_a_character_that_utf8_lacks_is_recorded(
    into: Callable[[str], Pair], rule: str, local: str, change: str, left: list[tuple[str]] | None
) -> None:
    p = into("WIN1252")
    p.set(on_conflict=(rule,) if rule else ())
    if local:
        p.apply(local)
    p.subdb.execute("UPDATE tü SET ä = 'é' || chr(129)" if local else "INSERT INTO tü VALUES (1, 'é' || chr(129))")
    p.apply(change)
    [event] = p.events()
    assert event["local_conflicts"][0]["row"]["ä"] == "é\\x81"
    if left is None:
        assert p.subdb.rows("SELECT length(ä) FROM tü") == [(2,)]
    else:
        assert p.subdb.rows("SELECT ä FROM tü") == left


@pytest.mark.parametrize(
    ("encoding", "value", "shown"),
    [
        ("EUC_JP", b"\xa4\xa2\x8f\xf5\xa1\xa4\xa2", "あ\\x8f\\xf5\\xa1あ"),
        ("EUC_TW", b"a\x8e\xa7\xfe\xfe", "a\\x8e\\xa7\\xfe\\xfe"),
        ("SQL_ASCII", b"\xc3\xa9\xe9", "é\\xe9"),
        ("LATIN1", b'\xe9\x81"', 'é\x81"'),
    ],
)
def test_a_local_row_is_recorded_whatever_its_encoding_is(
    into: Callable[..., Pair], encoding: str, value: bytes, shown: str
) -> None:
    p = into(encoding, "t", "v")
    p.apply("INSERT INTO t VALUES (1, 'a')")
    p.subdb.execute("UPDATE t SET v = pg_catalog.convert_from(%s, %s)", value, encoding)
    p.apply("DELETE FROM t")
    [event] = p.events()
    assert event["local_conflicts"][0]["row"] == {"id": "1", "v": shown}
    assert p.subdb.rows("SELECT v FROM t") == []


def test_a_row_that_conflicts_with_one_that_utf8_cannot_show_is_skipped(into: Callable[..., Pair]) -> None:
    p = into("WIN1252", "t", "v")
    p.subdb.execute("INSERT INTO t VALUES (1, 'é' || chr(129))")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    with pytest.raises(ApplyError) as stopped:
        p.catch_up()
    assert stopped.value.finish_lsn is not None
    skip.set_pending(p.session, p.subid, skip.of([parse_lsn(stopped.value.finish_lsn)], skip.CONFLICTING))
    p.apply("INSERT INTO t VALUES (3, 'c')")
    assert p.subdb.rows("SELECT id, length(v) FROM t ORDER BY id") == [(1, 2), (2, 1), (3, 1)]
    assert p.subdb.rows("SELECT body->'new' FROM pgsub.skipped_change") == [({"id": "1", "v": "a"},)]


@pytest.mark.parametrize("encoding", ["ZLIB", "ROT13", "IDNA", "PUNYCODE", "UNDEFINED", "../UTF8", "NONE_SUCH"])
def test_a_text_is_read_whatever_a_server_calls_its_encoding(encoding: str) -> None:
    assert legible(b"a\x81", encoding) == "a\\x81" and jsonb.text(["ä"], encoding) == '["\\\\xe4"]'


@pytest.mark.parametrize(
    ("encoding", "data", "text"),
    [
        ("WIN1252", b"\x81\xe9", "\\x81é"),
        ("EUC_JP", b"\xad\xfe\x8f\xf5\xa1\xa4\xa2", "\\xad\\xfe\\x8f\\xf5\\xa1あ"),
        ("EUC_KR", b"\xa4\xd4\xb0\xa1", "\\xa4\\xd4가"),
        ("EUC_CN", b"\xfe\xfe\xb0\xa1", "\\xfe\\xfe啊"),
        ("SQL_ASCII", b"\xe9\xc3\xa9", "\\xe9é"),
        ("EUC_TW", b"a\xc4\xe3", "a\\xc4\\xe3"),
    ],
)
def test_what_is_no_character_is_escaped_and_the_rest_is_read_as_by_the_server(
    encoding: str, data: bytes, text: str
) -> None:
    assert legible(data, encoding) == text
