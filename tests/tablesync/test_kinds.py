"""Every kind of published table arrives by ``pgsub create --follow`` and follows the publisher from then on.

All kinds go through one ``create`` for each way to copy and each pair of servers: text and binary, whole and in chunks,
LATIN1 on either side, publishers and a target of other versions.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fix_program import Cli, until, valid
from fix_servers import Database, Servers, other_servers
from psycopg import sql
from published_kinds import KINDS, Kind
from thorough import thorough

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Way:
    """One run of all kinds.

    :ivar publisher: major version, None for the embedded server; ``target`` likewise.
    :ivar options: of ``create``.
    :ivar chunked: in chunks of a few blocks, else each table whole.
    """

    name: str
    publisher: str | None = None
    target: str | None = None
    encodings: tuple[str, str] = ("UTF8", "UTF8")
    options: tuple[str, ...] = ()
    chunked: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Each way takes as long as all other tests of copies together; one is always run."""
        return [] if self.name == "whole" else [pytest.mark.long]

    @property
    def rows(self) -> int:
        """Rows to begin with: several blocks where they are to make chunks."""
        return 500

    def has(self, kind: Kind) -> bool:
        """Whether the kind can be made here."""
        return (
            kind.since <= int(self.publisher or 18)
            and not (kind.text_only and "--binary" in self.options)
            and not (kind.utf8_only and "LATIN1" in self.encodings)
        )


def _ways() -> Iterator[Way]:
    yield Way("whole")
    yield Way("binary-chunks-to-latin1", encodings=("UTF8", "LATIN1"), options=("--binary",), chunked=True)
    often = {"19"} & set(other_servers())
    for version in (*often, *thorough(set(other_servers()) - often)):
        latin, binary = version in ("14", "15", "19"), version in ("16", "17")
        yield Way(
            f"from{version}",
            version,
            encodings=("LATIN1" if latin else "UTF8", "UTF8"),
            options=("--binary",) if binary else (),
            chunked=version in ("15", "16", "19"),
        )
    for _ in thorough({"15"} & set(other_servers())):
        yield Way("to15", target="15", chunked=True)


WAYS = tuple(_ways())


@dataclass(frozen=True)
class Planted:
    """How many rows of a table are missing on the target, were added there, and changed."""

    missing: int
    extra: int
    different: int


@dataclass
class Ran:
    """What a way left behind: by kind, the differences after the copy and after the changes."""

    way: Way
    said: str = ""
    codes: tuple[int, ...] = ()
    relations: dict[str, list[str]] = field(default_factory=dict)
    modes: dict[str, set[str]] = field(default_factory=dict)
    after_copy: dict[str, list[str]] = field(default_factory=dict)
    after_changes: dict[str, list[str]] = field(default_factory=dict)
    left_over: list[Any] = field(default_factory=list)
    verified: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  #: by schema and table
    found: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  #: with a row less in each table
    planted: dict[tuple[str, str], Planted] = field(default_factory=dict)  #: what is to be found so
    adopted: tuple[int, str] = (0, "")  #: how the comparison of all tables ended
    mended: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  #: and what it left


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each way with the kinds that it has."""
    if "kind" in metafunc.fixturenames:
        pairs = [(way, kind) for way in WAYS for kind in KINDS if way.has(kind)]
        params = [pytest.param(way, kind, id=f"{way}-{kind}", marks=way.marks) for way, kind in pairs]
        metafunc.parametrize(("ran", "kind"), params, indirect=["ran"])
    elif "ran" in metafunc.fixturenames:
        metafunc.parametrize("ran", [pytest.param(w, id=str(w), marks=w.marks) for w in WAYS], indirect=True)


#: By way, so that each runs once in whatever order the tests come.
_done: dict[Way, Ran] = {}


@pytest.fixture
def ran(request: pytest.FixtureRequest, shared_servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One create that follows: the copy, then changes until they are caught up."""
    way: Way = request.param
    if way not in _done:
        _done[way] = Ran(way)  # a failure to run at all is told once
        _done[way] = _run_way(way, shared_servers, tmp_path_factory.mktemp("kinds"))
    return _done[way]


def _run_way(way: Way, shared_servers: Servers, folder: Path) -> Ran:
    kinds = [kind for kind in KINDS if way.has(kind)]
    number = f"{os.getpid()}_{next(_numbers)}"
    pubdb = Database(shared_servers("publisher", way.publisher), f"kinds_pub_{number}", way.encodings[0])
    subdb = Database(shared_servers("target", way.target), f"kinds_sub_{number}", way.encodings[1])
    cli = Cli(folder / "state", folder, pubdb.conninfo, subdb.conninfo)
    try:
        return _run(way, kinds, pubdb, subdb, cli)
    finally:
        cli.close()
        pubdb.drop()
        subdb.drop()


def _run(way: Way, kinds: list[Kind], pubdb: Database, subdb: Database, cli: Cli) -> Ran:
    ran = Ran(way)
    for kind in kinds:
        _in_schema(pubdb, kind, kind.pub.replace("{rows}", str(way.rows)), create=True)
        _in_schema(subdb, kind, kind.sub, create=True)
    pubdb.execute("ANALYZE")
    names = [name for kind in kinds for name in kind.subscribed]
    words = [word for name in names for word in ("--publication", name)]
    size = {"PGSUB_CHUNK_BYTES": str(32768 if way.chunked else 1 << 30)}
    options = ("--max-sync-workers", "4", "--follow", *way.options, *words)
    following = cli.start(*cli.words("kinds", *options, publication=None), env=size)
    until(lambda: following.poll() is not None or _all_ready(subdb), seconds=120)
    ran.after_copy = {kind.name: _differences(kind, pubdb, subdb) for kind in kinds}
    ran.relations = {kind.name: _column(subdb, kind, 'relname ORDER BY relname COLLATE "C"') for kind in kinds}
    ran.modes = {kind.name: set(_column(subdb, kind, "copy_mode")) for kind in kinds}
    for kind in kinds:
        for transaction in kind.writes:
            _in_schema(pubdb, kind, transaction)
    waited = cli("wait", "kinds", "--for", "caught-up", "--timeout", "60s")
    ran.after_changes = {kind.name: _differences(kind, pubdb, subdb) for kind in kinds}
    ran.verified = _verify(cli)
    _take_a_row_of_each(subdb)
    ran.planted = _plant(subdb)
    ran.found = _verify(cli)
    words = [word for name in ran.found if name[0] != "without_columns" for word in ("--resync", ".".join(name))]
    adopted = cli("refresh", "kinds", *words, "--adopt", "--yes")
    ran.adopted = adopted.returncode, adopted.stderr
    cli("wait", "kinds", "--for", "caught-up", "--timeout", "60s")
    ran.mended = _verify(cli)
    ran.codes, ran.said = (waited.returncode, cli.stop(following)), waited.stderr + following.log.read_text()
    ran.left_over = pubdb.rows(
        "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() AND slot_name <> 'kinds'"
    )
    return ran


def _verify(cli: Cli) -> dict[tuple[str, str], dict[str, Any]]:
    ended = cli("verify", "kinds", "--json")
    assert ended.returncode in (0, 6), ended.stdout + ended.stderr
    return {(one["schemaname"], one["relname"]): one for one in valid("verify", ended.stdout)["tables"]}


def _subscribed(subdb: Database) -> Iterator[tuple[str, str, sql.Composed]]:
    """Schema, name, and what a statement on the table alone calls it."""
    query = """SELECT s.schemaname, s.relname, c.relkind = 'p' FROM pgsub.subscription_rel s
        JOIN pg_class c ON c.oid = s.srrelid"""
    for schema, name, partitioned in subdb.rows(query):
        yield (
            schema,
            name,
            sql.SQL("{}{}").format(sql.SQL("" if partitioned else "ONLY "), sql.Identifier(schema, name)),
        )


def _take_a_row_of_each(subdb: Database) -> None:
    subdb.execute("SET session_replication_role = replica")
    for schema, name, table in _subscribed(subdb):
        taken = subdb.connection.execute(
            sql.SQL(
                "DELETE FROM {0} WHERE (tableoid, ctid) = (SELECT tableoid, ctid FROM {0} LIMIT 1) RETURNING true"
            ).format(table)
        )
        assert taken.rowcount == 1, f"{schema}.{name} is empty"


def _plant(subdb: Database) -> dict[tuple[str, str], Planted]:
    """Change a row and add one where the table has such columns; what then differs."""
    found = {}
    for schema, name, table in _subscribed(subdb):
        change = "UPDATE {} SET v = 'planted' WHERE id = (SELECT max(id) FROM {})"
        different = _changed(subdb, change, table, table)
        insert = "INSERT INTO {} (id, v) SELECT max(id) + 1, 'extra' FROM {}"
        extra = _changed(subdb, insert, sql.Identifier(schema, name), table)
        if (schema, name) == ("identity_index", "t"):  # it is the key that changed
            found[schema, name] = Planted(1 + different, extra + different, 0)
        else:
            found[schema, name] = Planted(1, extra, different)
    return found


def _changed(subdb: Database, statement: str, *tables: sql.Composable) -> int:
    try:
        return int(subdb.connection.execute(sql.SQL(statement).format(*tables)).rowcount)  # type: ignore[arg-type]
    except psycopg.Error:  # no such columns, or no such row may be in this partition
        return 0


def _all_ready(subdb: Database) -> bool:
    if not subdb.value("SELECT to_regclass('pgsub.subscription_rel') IS NOT NULL"):
        return False
    return subdb.value("SELECT bool_and(srsubstate = 'r') FROM pgsub.subscription_rel") is True


def _in_schema(database: Database, kind: Kind, statements: str, create: bool = False) -> None:
    schema = sql.Identifier(kind.name)
    if create:
        database.connection.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
    database.connection.execute(sql.SQL("SET search_path = {}").format(schema))
    database.execute(statements)


def _column(subdb: Database, kind: Kind, column: str) -> list[str]:
    where, order, by = column.partition(" ORDER BY ")
    rows = subdb.rows(f"SELECT {where} FROM pgsub.subscription_rel WHERE schemaname = %s{order}{by}", kind.name)
    return [value for (value,) in rows]


def _differences(kind: Kind, pubdb: Database, subdb: Database) -> list[str]:
    """Per query, how many rows are on one side only, with the first of each; nothing where the sides are equal."""
    found = []
    for query in kind.same:
        there, here = query if isinstance(query, tuple) else (query, query)
        wanted, got = _sorted(pubdb, kind, there), _sorted(subdb, kind, here)
        assert len(wanted) > 0, f"{there}: nothing is compared"
        if wanted != got:
            missing, extra = set(wanted) - set(got), set(got) - set(wanted)
            found.append(
                f"{here}: {len(wanted)} rows on the publisher, {len(got)} on the target;"
                f" missing {sorted(missing)[:2]}, extra {sorted(extra)[:2]}"
            )
    return found


def _sorted(database: Database, kind: Kind, query: str) -> list[str]:
    _in_schema(database, kind, "SET extra_float_digits = 3")
    # not prepared: the text is the same in many schemas
    return sorted(map(str, database.connection.execute(query.encode(), prepare=False)))


def test_create_goes_on_and_ends_well_with_every_kind_of_table(ran: Ran) -> None:
    assert ran.codes == (0, 0), ran.said
    assert ran.left_over == []
    assert "error" not in ran.said.lower(), ran.said


def test_a_published_table_arrives_and_follows(ran: Ran, kind: Kind) -> None:
    assert ran.relations[kind.name] == sorted(kind.relations)
    assert ran.after_copy[kind.name] == [], ran.said
    assert ran.after_changes[kind.name] == [], ran.said


def test_verify_finds_it_equal_and_then_every_row_that_was_taken_added_or_changed(ran: Ran, kind: Kind) -> None:
    for table in ran.relations[kind.name]:
        before, after = ran.verified[kind.name, table], ran.found[kind.name, table]
        assert (before["outcome"], before["reason"]) == ("equal", None), before
        assert before["publisher_rows"] == before["target_rows"] > 0
        planted = ran.planted[kind.name, table]
        assert Planted(after["missing"], after["extra"], after["different"]) == planted, after
    assert sum(one.extra for one in ran.planted.values()) > 15 < sum(one.different for one in ran.planted.values())


def test_adoption_makes_it_equal_again(ran: Ran, kind: Kind) -> None:
    assert ran.adopted[0] == 0, ran.adopted[1]
    for table in ran.relations[kind.name]:
        after = ran.mended[kind.name, table]
        assert after["outcome"] == ("equal" if kind.name != "without_columns" else "different"), after


def test_the_way_to_copy_was_the_one_meant(ran: Ran) -> None:
    modes = [mode for modes in ran.modes.values() for mode in modes]
    assert set(modes) <= ({"chunked", "atomic"} if ran.way.chunked else {"atomic"})
    assert not ran.way.chunked or modes.count("chunked") > len(modes) / 2
