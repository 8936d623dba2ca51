"""``create --adopt``, ``refresh --resync --adopt``: rows that are there are compared, and only what differs comes."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fix_program import Cli, nothing_created, one_error, until, valid
from fix_proxy import Proxy
from fix_served import lose, writing
from fix_servers import Database
from psycopg.conninfo import make_conninfo

pytestmark = pytest.mark.unserved_first

Tables = tuple[Database, Database]
_names = (f"adopt{number}" for number in itertools.count(1))

_FILL = "INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 100) g"
_ORIGINAL = "SELECT id, xmin::text, ctid::text FROM {} ORDER BY 1"


@pytest.fixture
def adopting(joined: Cli) -> Callable[..., str]:
    """``adopting(*options)`` creates a subscription with ``--adopt`` and waits for it; gives what was said."""

    def create(*options: str) -> str:
        ended = joined.create(next(_names), "--adopt", "--yes", *options)
        assert ended.returncode == 0, ended.stderr
        return ended.stderr

    return create


@pytest.fixture
def plain_role(joined: Cli, tables: Tables) -> Iterator[str]:
    """A role that may write the tables a and b, and is the one that adopts."""
    role = f"plain_{tables[1].name}"
    tables[1].execute(f"CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE {tables[1].name} TO {role}")
    tables[1].execute(f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON a, b TO {role}")
    joined.target = make_conninfo(tables[1].conninfo, user=role)
    yield role
    for (subname,) in joined.sql("SELECT subname FROM pg_subscription"):
        assert joined("drop", subname, "--yes").returncode == 0
    tables[1].execute(f"DROP SCHEMA IF EXISTS pgsub CASCADE; DROP OWNED BY {role}; DROP ROLE {role}")


def _the_only(cli: Cli) -> str:
    """Name of the one subscription there is."""
    [(name,)] = cli.sql("SELECT subname FROM pg_subscription")
    return str(name)


def _fails(cli: Cli, *texts: str) -> None:
    """Wait until a table cannot be adopted, with an error that has these texts."""

    def said() -> bool:
        rows = cli.sql("SELECT message || coalesce(detail, '') || coalesce(hint, '') FROM pgsub_error")
        return any(all(text in row for text in texts) for (row,) in rows)

    until(said)


def _ends(cli: Cli, tables: Tables, *names: str) -> None:
    """Wait until everything is there, and compare these tables."""
    assert cli("wait", _the_only(cli), "--for", "caught-up", "--timeout", "2m").returncode == 0
    _same(tables, *names)


def _same(tables: Tables, *names: str) -> None:
    for name in names:
        query = f"SELECT x::text FROM {name} AS x ORDER BY 1"
        assert tables[0].rows(query) == tables[1].rows(query), name


def _add(tables: Tables, name: str, columns: str, pub: str, sub: str) -> None:
    for database, rows in zip(tables, (pub, sub), strict=True):
        database.execute(f"CREATE TABLE {name} ({columns}); {rows}")
    tables[0].execute(f"ALTER PUBLICATION p ADD TABLE {name}")


def test_a_table_that_is_equal_is_not_written_and_is_replicated_from_then_on(
    adopting: Callable[..., str], tables: Tables
) -> None:
    tables[1].execute(_FILL)
    before = tables[1].rows(_ORIGINAL.format("a"))
    said = adopting()
    assert tables[1].rows(_ORIGINAL.format("a")) == before
    assert 'table "public.a" was adopted: 0 rows missing, 0 extra, 0 different' in said and '"public.b"' not in said
    tables[0].execute("UPDATE a SET t = 'later' WHERE id = 1; INSERT INTO b VALUES (1, 1)")
    tables[1].wait("SELECT t FROM a WHERE id = 1", value="later")
    tables[1].wait("SELECT count(*) FROM b", value=1)


def test_rows_that_are_missing_extra_or_different_are_brought_and_no_others_are_written(
    adopting: Callable[..., str], tables: Tables
) -> None:
    tables[0].execute(
        "INSERT INTO b SELECT g, g / 8.0 FROM generate_series(1, 50) g; UPDATE b SET n = NULL WHERE id = 9"
    )
    tables[1].execute(f"{_FILL}; DELETE FROM a WHERE id IN (1, 2, 3); UPDATE a SET t = NULL WHERE id IN (50, 51)")
    tables[1].execute(
        "INSERT INTO a VALUES (-7, 'extra'); INSERT INTO b SELECT g, g / 8.0 FROM generate_series(1, 50) g"
    )
    before = {row for row in tables[1].rows(_ORIGINAL.format("a")) if row[0] not in (50, 51, -7)}
    said = adopting()
    _same(tables, "a", "b")
    assert before <= set(tables[1].rows(_ORIGINAL.format("a")))
    assert 'table "public.a" was adopted: 3 rows missing, 1 extra, 2 different' in said
    assert 'table "public.b" was adopted: 0 rows missing, 0 extra, 1 different' in said


@pytest.mark.long
def test_what_is_replaced_is_kept_as_it_was_up_to_the_number_that_is_wanted(
    adopting: Callable[..., str], tables: Tables
) -> None:
    _add(tables, "k", "id int PRIMARY KEY, n numeric, f float8",
         "INSERT INTO k SELECT g, g, g FROM generate_series(1, 20) g",
         "INSERT INTO k SELECT g, g + 0.500, '-0' FROM generate_series(11, 30) g")  # fmt: skip
    _add(tables, "heap", "v int, n numeric", "INSERT INTO heap VALUES (1, 1); ALTER TABLE heap REPLICA IDENTITY FULL",
         "INSERT INTO heap VALUES (1, 1.0), (2, 2.50), (2, 2.50)")  # fmt: skip
    said = adopting("--keep-replaced", "15")
    assert 'table "public.k" was adopted: 10 rows missing, 10 extra, 10 different' in said
    kept = tables[1].rows("SELECT relname, body->>'operation', body->'old', body->'new' FROM pgsub.skipped_change")
    of_k = [row for row in kept if row[0] == "k"]
    assert (
        len(of_k) == 15 and sorted(row[2:] for row in kept if row[0] == "heap") == [({"v": "2", "n": "2.50"}, None)] * 2
    )
    for _, operation, old, new in of_k:
        number = int(old["id"])
        assert old == {"id": str(number), "n": f"{number}.500", "f": "-0"}
        assert (new is None) == (number > 20) == (operation == "DELETE")
        assert new is None or new == {"id": str(number), "n": str(number), "f": str(number)}
    _same(tables, "k")
    assert tables[1].value("SELECT count(*) FROM pgsub.skipped_change WHERE replayed_at IS NULL") == 0


@pytest.mark.long
def test_nothing_is_kept_where_that_is_not_wanted(adopting: Callable[..., str], tables: Tables) -> None:
    tables[1].execute(f"{_FILL}; UPDATE a SET t = 'x' WHERE id < 9")
    assert 'table "public.a" was adopted: 0 rows missing, 0 extra, 8 different' in adopting("--keep-replaced", "0")
    assert tables[1].value("SELECT count(*) FROM pgsub.skipped_change") == 0


_KINDS = """
 id int PRIMARY KEY, n numeric, f float8, c char(5), b bytea, j jsonb, d date, i interval, m money, a text[],
 g int GENERATED ALWAYS AS (id * 2) STORED, s text COLLATE "C"
"""
_VALUES = """
INSERT INTO kinds (id, n, f, c, b, j, d, i, m, a, s)
 SELECT g, g * 1.500, g / 3.0, 'x', decode(md5(g::text), 'hex'), jsonb_build_object('n', g * 1.10),
 date '2024-02-03' + g, g * interval '1 h', g::money, ARRAY['a\\b', NULL, g::text], E'a\\tb\\\\n' || g
 FROM generate_series({}) g
"""


@pytest.mark.long
def test_values_of_every_kind_come_as_the_publisher_has_them(adopting: Callable[..., str], tables: Tables) -> None:
    changed = (
        "UPDATE kinds SET n = 1.5, f = '-0', j = '{}', i = '30 d' WHERE id < 5; UPDATE kinds SET n = 1.500 WHERE id = 1"
    )
    _add(
        tables,
        "kinds",
        _KINDS,
        _VALUES.format("1, 60"),
        f"{_VALUES.format('20, 70')}; {_VALUES.format('1, 5')}; {changed}",
    )
    said = adopting()
    assert 'table "public.kinds" was adopted: 14 rows missing, 10 extra, 4 different' in said
    _same(tables, "kinds")


@pytest.mark.long
def test_values_change_places_in_a_unique_column(adopting: Callable[..., str], tables: Tables) -> None:
    _add(tables, "u", "id int PRIMARY KEY, v text UNIQUE",
         "INSERT INTO u VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, 'd')",
         "INSERT INTO u VALUES (1, 'b'), (2, 'a'), (3, 'd'), (9, 'c')")  # fmt: skip
    assert "1 row missing, 1 extra, 3 different" in adopting()
    _same(tables, "u")


@pytest.mark.long
def test_columns_that_only_the_target_has_keep_their_values_and_foreign_keys_hold(
    adopting: Callable[..., str], tables: Tables
) -> None:
    for database in tables:
        database.execute("CREATE TABLE child (id int PRIMARY KEY, a int REFERENCES a)")
    tables[0].execute("ALTER PUBLICATION p ADD TABLE child; INSERT INTO child VALUES (1, 1), (2, 100)")
    tables[1].execute(f"ALTER TABLE a ADD own text; {_FILL}; UPDATE a SET own = 'kept'")
    tables[1].execute("UPDATE a SET t = '?' WHERE id < 9; DELETE FROM a WHERE id = 100")
    tables[1].execute("INSERT INTO child VALUES (1, 1), (3, 3)")
    adopting()
    _same(tables, "child")
    assert tables[1].rows("SELECT id, t FROM a ORDER BY 1") == tables[0].rows("SELECT id, t FROM a ORDER BY 1")
    assert tables[1].value("SELECT count(*) FROM a WHERE own = 'kept'") == 99


@pytest.mark.long
def test_a_table_without_a_key_is_compared_as_a_multiset(adopting: Callable[..., str], tables: Tables) -> None:
    tables[0].execute("INSERT INTO a VALUES (101, 'x')")
    _add(tables, "heap", "v int, t text",
         "INSERT INTO heap VALUES (1, NULL), (1, NULL), (1, NULL), (2, 'x'); ALTER TABLE heap REPLICA IDENTITY FULL",
         "INSERT INTO heap VALUES (1, NULL), (3, 'y'), (3, 'y'), (2, 'x')")  # fmt: skip
    assert 'table "public.heap" was adopted: 2 rows missing, 2 extra, 0 different' in adopting()
    _same(tables, "heap")


@pytest.mark.long
def test_what_cannot_be_adopted_is_refused_before_anything_is_there(cli: Cli, tables: Tables) -> None:
    one_error(cli.create("s", "--adopt"), 2, "deleting rows (--adopt) needs --yes", "--dry-run")
    ended = cli.create("s", "--adopt", "--yes", "--no-copy-data")
    one_error(ended, 2, "copy_data = false and adopt = true are mutually exclusive options")
    _add(tables, "notes", "j json", "ALTER TABLE notes REPLICA IDENTITY FULL", "INSERT INTO notes VALUES ('{}')")
    one_error(cli.create("s", "--adopt", "--yes"), 3, 'table "public.notes" cannot be adopted', "no equality operator")
    nothing_created(cli, *tables)
    tables[1].execute("TRUNCATE notes")
    planned = valid("plan", cli.create("s", "--adopt", "--dry-run", "--json").stdout)
    assert {one["relname"]: one["copy"] for one in planned["tables"]} == dict.fromkeys(("a", "b", "notes"), "atomic")


def test_a_table_that_another_subscription_writes_is_not_adopted(served: tuple[Cli, str], tables: Tables) -> None:
    cli, name = served
    one_error(
        cli.create("other", "--adopt", "--yes"),
        3,
        "has rows of another subscription",
        f'Subscription "{name}" writes it',
    )


def test_a_partition_of_a_table_that_another_subscription_writes_is_not_adopted(cli: Cli, tables: Tables) -> None:
    tables[0].execute("CREATE TABLE r (id int PRIMARY KEY); CREATE TABLE p1 (LIKE r INCLUDING ALL)")
    tables[0].execute("CREATE PUBLICATION q FOR TABLE r; CREATE PUBLICATION q1 FOR TABLE p1; INSERT INTO p1 VALUES (1)")
    tables[1].execute("CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    tables[1].execute("CREATE TABLE p1 PARTITION OF r FOR VALUES FROM (0) TO (9); INSERT INTO r VALUES (2)")
    assert cli(*cli.words("root", "--no-copy-data", "--no-wait", publication="q")).returncode == 0
    ended = cli(*cli.words("leaf", "--adopt", "--yes", publication="q1"))
    one_error(ended, 3, "has rows of another subscription", 'Subscription "root" writes it')
    assert cli("drop", "root", "--yes").returncode == 0


@pytest.mark.long
def test_a_subscription_that_came_meanwhile_keeps_its_rows(cli: Cli, tables: Tables) -> None:
    assert cli.create("one", "--adopt", "--yes", "--no-wait").returncode == 0  # the tables are empty as yet
    assert cli.create("two", "--no-copy-data", "--no-wait").returncode == 0
    tables[1].execute("INSERT INTO a VALUES (-1, 'of the other')")
    ended = cli("run", "one", "--until-caught-up", "--timeout", "2m")
    assert ended.returncode != 0 and 'Subscription "two" writes it' in ended.stderr
    assert tables[1].rows("SELECT * FROM a") == [(-1, "of the other")]
    for name in ("one", "two"):
        assert cli("drop", name, "--yes").returncode == 0


@pytest.mark.parametrize("without", ["rows", "published rows", "rows of its own"])
def test_a_publisher_without_rows_does_not_empty_the_target(cli: Cli, tables: Tables, without: str) -> None:
    tables[1].execute(_FILL)
    tables[0].execute("TRUNCATE a")
    if without == "published rows":
        tables[0].execute("INSERT INTO a VALUES (5000, 'x'); ALTER PUBLICATION p SET TABLE a WHERE (id < 0), b")
    if without == "rows of its own":
        for one in tables:
            one.execute("CREATE TABLE child (PRIMARY KEY (id)) INHERITS (a)")
        tables[0].execute("INSERT INTO child VALUES (5000, 'x'); ALTER PUBLICATION p ADD TABLE child")
    one_error(
        cli.create("s", "--adopt", "--yes"), 3, 'table "public.a" cannot be adopted: the publisher publishes no row'
    )
    nothing_created(cli, *tables)
    assert tables[1].value("SELECT count(*) FROM ONLY a") == 100


def test_the_rows_of_an_inheritance_child_are_not_those_of_its_empty_parent(cli: Cli, tables: Tables) -> None:
    for one in tables:
        one.execute(
            "TRUNCATE a; CREATE TABLE child (PRIMARY KEY (id)) INHERITS (a); INSERT INTO child VALUES (5000, 'x')"
        )
    tables[0].execute("ALTER PUBLICATION p ADD TABLE child")
    ended = cli.create("s", "--adopt", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert cli("drop", "s", "--yes").returncode == 0
    assert tables[1].rows("SELECT * FROM child") == [(5000, "x")]


@pytest.mark.long
def test_a_table_that_is_empty_on_both_sides_is_adopted_again(served: tuple[Cli, str], tables: Tables) -> None:
    cli, name = served
    words = ("refresh", name, "--resync", "public.a", "--adopt", "--yes")
    tables[0].execute("ALTER TABLE a RENAME TO old; CREATE TABLE a (LIKE old INCLUDING ALL); DROP TABLE old")
    tables[0].execute("ALTER PUBLICATION p ADD TABLE a")
    one_error(cli(*words), 3, "the publisher publishes no row of it")
    tables[1].execute("TRUNCATE a")
    ended = cli(*words)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
def test_without_an_origin_what_the_target_publishes_is_not_adopted(
    joined: Cli, adopting: Callable[..., str], tables: Tables, plain_role: str
) -> None:
    tables[1].execute(f"{_FILL}; DELETE FROM a WHERE id > 9; CREATE PUBLICATION onward FOR TABLE a")
    planned = joined.create("s", "--adopt", "--origin", "none", "--dry-run")
    assert 'the target publishes table "public.a", and rows that only it has are deleted' in planned.stderr
    adopting("--no-wait")
    _fails(joined, 'would be replicated by publication "onward" of the target')
    assert tables[1].value("SELECT count(*) FROM a") == 9


@pytest.mark.long
def test_no_value_is_cut_to_fit_a_narrower_column(joined: Cli, adopting: Callable[..., str], tables: Tables) -> None:
    for database, length in zip(tables, (10, 4), strict=True):
        database.execute(f"CREATE TABLE cut (id int PRIMARY KEY, v varchar({length}), c char({length}))")
    tables[0].execute("INSERT INTO cut VALUES (1, 'ab      ', 'ab'), (2, 'abcdefgh', 'x')")
    tables[1].execute("INSERT INTO cut VALUES (1, 'ab      ', 'ab'), (2, 'abcd', 'x')")
    tables[0].execute("ALTER PUBLICATION p SET TABLE cut")
    before = tables[1].rows(_ORIGINAL.format("cut"))
    adopting("--no-wait")
    _fails(joined, "value too long for type character varying(4)")
    tables[0].execute("UPDATE cut SET v = 'abcd' WHERE id = 2")
    _ends(joined, tables)
    assert tables[1].rows(_ORIGINAL.format("cut")) == before


@pytest.mark.long
def test_where_foreign_keys_fire_no_row_is_deleted_to_come_again(
    joined: Cli, adopting: Callable[..., str], tables: Tables, plain_role: str
) -> None:
    for database, values in zip(tables, ("(1, 'a'), (2, 'b')", "(1, 'b'), (2, 'a')"), strict=True):
        database.execute(f"CREATE TABLE u (id int PRIMARY KEY, v text UNIQUE); INSERT INTO u VALUES {values}")
    tables[0].execute("ALTER PUBLICATION p SET TABLE u")
    tables[1].execute("CREATE TABLE child (u int REFERENCES u ON DELETE CASCADE); INSERT INTO child VALUES (1), (2)")
    tables[1].execute(f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON u TO {plain_role}")
    adopting("--no-wait")
    _fails(joined, 'unique index "u_v_key"')
    assert tables[1].value("SELECT count(*) FROM child") == 2


@pytest.mark.long
def test_a_table_whose_rows_refer_to_each_other_is_not_begun_where_that_is_checked(
    joined: Cli, adopting: Callable[..., str], tables: Tables, plain_role: str
) -> None:
    for database, values in zip(tables, ("(1, 3), (2, 3), (3, 3)", "(1, 1), (9, 1)"), strict=True):
        database.execute(
            f"CREATE TABLE tree (id int PRIMARY KEY, up int REFERENCES tree); INSERT INTO tree VALUES {values}"
        )
    tables[0].execute("ALTER PUBLICATION p SET TABLE tree")
    tables[1].execute(f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON tree TO {plain_role}")
    refused = 'table "public.tree" cannot be adopted: its rows refer'
    said = one_error(joined.create("s", "--adopt", "--yes"), 3, refused)
    assert f'GRANT SET ON PARAMETER session_replication_role TO "{plain_role}";' in said
    assert joined.sql("SELECT subname FROM pg_subscription") == []
    tables[1].execute(f"GRANT SET ON PARAMETER session_replication_role TO {plain_role}")
    adopting()
    _same(tables, "tree")


@pytest.mark.long
def test_rows_that_are_not_published_to_be_deleted_or_updated_stay(
    adopting: Callable[..., str], tables: Tables
) -> None:
    tables[0].execute("DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLE a WITH (publish = 'insert, update')")
    tables[1].execute(
        f"{_FILL}; INSERT INTO a VALUES (-1, 'archived'); DELETE FROM a WHERE id = 7; UPDATE a SET t = 'x' WHERE id = 8"
    )
    assert "1 row missing, 0 extra, 1 different" in adopting()
    assert tables[1].rows("SELECT t FROM a WHERE id IN (-1, 7, 8) ORDER BY id") == [
        ("archived",),
        ("row 7",),
        ("row 8",),
    ]


@pytest.mark.long
def test_a_table_is_brought_again_by_comparison_while_both_its_rows_and_others_change(
    served: tuple[Cli, str], tables: Tables
) -> None:
    cli, name = served
    tables[0].execute("INSERT INTO b VALUES (1, 1)")
    tables[1].wait("SELECT count(*) FROM b", value=1)
    one_error(cli("refresh", name, "--resync", "public.a", "--adopt"), 2, "replacing rows needs --yes")
    shown = valid("plan", cli("refresh", name, "--resync", "public.a", "--adopt", "--dry-run", "--json").stdout)
    assert shown["adopted"] == [{"schemaname": "public", "relname": "a"}] and shown["emptied"] == []
    changes = ("UPDATE a SET t = 'newer {}' WHERE id = 1 + {} % 90", "INSERT INTO a VALUES (1000 + {}, 'new')",
               "DELETE FROM a WHERE id = 1000 + {} - 3", "INSERT INTO b VALUES (10 + {}, {})")  # fmt: skip
    with writing(tables[0], *changes) as done:
        for _ in range(3):
            tables[1].execute(
                "UPDATE a SET t = 'wrong' WHERE id % 3 = 0; DELETE FROM a WHERE id % 7 = 0;"
                "INSERT INTO a SELECT g, 'extra' FROM generate_series(-9, -1) g ON CONFLICT DO NOTHING"
            )
            before = done[0]
            ended = cli("refresh", name, "--resync", "public.a", "--adopt", "--yes")
            assert ended.returncode == 0, ended.stderr
            assert "tables: 1 to be compared\n" in ended.stderr
            found = re.search(r'"public.a" was adopted: (\d+) rows missing, (\d+) extra, (\d+) different', ended.stderr)
            assert found is not None and min(map(int, found.groups())) >= 9, ended.stderr
            until(lambda before=before: done[0] > before)
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    _same(tables, "a", "b")


_ROWS = "INSERT INTO a SELECT g, repeat(md5(g::text), 8) FROM generate_series(101, {}) g"
_LARGE = _ROWS.format(12_000)
_KILLED = ("adopt.compared", "adopt.before_commit", "adopt.after_commit")


@pytest.mark.long
def test_an_adoption_that_is_killed_at_any_step_is_gone_on_with_and_counts_each_row_once(
    cli: Cli, tables: Tables, tmp_path: Path, reached: Callable[[str], None]
) -> None:
    for database in tables:
        database.execute(_LARGE)
    tables[1].execute(f"{_FILL}; DELETE FROM a WHERE id % 3 = 0; UPDATE a SET t = 'x' WHERE id % 3 = 1 AND id > 100")
    tables[1].execute("INSERT INTO a SELECT g, 'extra' FROM generate_series(-500, -1) g")
    points = {"PGSUB_FAILPOINTS_DIR": str(tmp_path), "PGSUB_RETRY_SECONDS": "0.5"}
    points["PGSUB_FAILPOINTS"] = ";".join(f"{step}=kill" for step in _KILLED)  # each once
    ended, times = cli.create("s", "--adopt", "--yes", env=points), 0
    while ended.returncode != 0 and (times := times + 1) < 5:  # a task that was killed may end the command
        ended = cli("run", "--until-caught-up", env=points)
    assert ended.returncode == 0, ended.stderr
    for step in _KILLED:
        assert (tmp_path / step).exists(), step
        reached(step)
    _same(tables, "a", "b")
    query = "SELECT adopted::text FROM pgsub.subscription_rel WHERE relname = 'a'"
    assert tables[1].value(query) == "{4000,500,3966}"
    assert cli("drop", "s", "--yes").returncode == 0


@pytest.mark.long
def test_a_copy_that_broke_off_is_gone_on_with_by_comparison(cli: Cli, tables: Tables, tmp_path: Path) -> None:
    tables[0].execute(_LARGE)
    go_on = tmp_path / "go on"
    points = {
        "PGSUB_FAILPOINTS": f"copy.after_commit=pause:{go_on}@5",
        "PGSUB_FAILPOINTS_DIR": str(tmp_path),
        "PGSUB_CHUNK_BYTES": str(256 << 10),
        "PGSUB_GROUP_TABLES": "1",
    }
    creating = cli.start(
        *cli.words("s", "--adopt", "--yes", "--copy-workers", "1", "--max-sync-workers", "1"), env=points
    )
    until((tmp_path / "copy.after_commit").exists)
    creating.kill()
    creating.wait()
    there = tables[1].value("SELECT count(*) FROM a")
    assert 0 < there < 12000
    assert cli("run", "--until-caught-up").returncode == 0
    go_on.touch()
    _same(tables, "a", "b")
    query = "SELECT adopted[1], adopted[2], adopted[3] FROM pgsub.subscription_rel WHERE relname = 'a'"
    assert tables[1].rows(query) == [(12000 - there, 0, 0)]  # the chunks that were done did not come again
    assert cli("drop", "s", "--yes").returncode == 0


@pytest.mark.long
def test_the_log_tells_what_was_brought(joined: Cli, adopting: Callable[..., str], tables: Tables) -> None:
    tables[1].execute(f"{_FILL}; DELETE FROM a WHERE id = 5")
    adopting("--no-wait")
    name = _the_only(joined)
    text = f'table "public.a" of subscription "{name}" was adopted: 1 row missing, 0 extra, 0 different'
    until(lambda: any(text in log.read_text() for log in joined.state.parent.glob("stderr.*")))


@pytest.mark.long
def test_no_value_of_a_row_that_is_equal_crosses_the_line(
    joined: Cli, tables: Tables, proxy: Callable[[str], Proxy]
) -> None:
    for database in tables:
        database.execute(_ROWS.format(30_000))
    tables[1].execute(f"{_FILL}; UPDATE a SET t = 'x' WHERE id % 1000 = 0")
    size = tables[0].value("SELECT sum(length(a::text)) FROM a")
    line = proxy(tables[0].conninfo)
    allowed = line.allowance = 1 << 40
    joined.connection = line.conninfo
    name = next(_names)
    assert joined.create(name, "--adopt", "--yes").returncode == 0
    assert line.allowance is not None and allowed - line.allowance < size / 8
    _same(tables, "a")
    assert joined("drop", name, "--yes").returncode == 0  # before the line is gone


@pytest.mark.long
def test_a_stranger_that_holds_the_lock_of_an_adoption_is_named(
    joined: Cli, adopting: Callable[..., str], tables: Tables
) -> None:
    tables[1].execute("INSERT INTO a VALUES (1, 'x')")
    with contextlib.closing(tables[1].connect(application_name="curious")) as session:
        session.execute("SELECT pg_advisory_lock(%s, 'a'::regclass::oid::int)", (0x70677361,))
        adopting("--no-wait")
        error = until(lambda: joined.sql("SELECT message, detail, hint FROM pgsub_error WHERE class = 'LockHeld'"))[0]
        assert error[0] == "could not obtain the lock for the adoption of a table"
        assert f"PID {session.info.backend_pid} of the target" in error[1] and '"curious", holds' in error[1]
        tables[1].wait("SELECT attempt > 1 FROM pgsub.subscription_rel WHERE relname = 'a'")
        assert tables[1].rows("SELECT * FROM a") == [(1, "x")]
        tables[1].execute(error[2].splitlines()[-1])  # the statement of the hint
    _ends(joined, tables, "a")


@pytest.mark.long
def test_a_subscription_whose_slot_is_gone_is_made_again_and_gets_only_what_it_lacks(
    served: tuple[Cli, str], adopting: Callable[..., str], tables: Tables
) -> None:
    cli, name = served
    lose(tables[0], cli.status(name)["subslotname"])
    tables[0].execute(
        "INSERT INTO a VALUES (200, 'lost'); DELETE FROM a WHERE id = 1; UPDATE a SET t = '' WHERE id = 2"
    )
    before = {row for row in tables[1].rows(_ORIGINAL.format("a")) if row[0] > 2}
    _fails(cli, "does not exist")
    assert cli("drop", name, "--yes").returncode == 0
    assert 'table "public.a" was adopted: 1 row missing, 1 extra, 1 different' in adopting()
    assert before <= set(tables[1].rows(_ORIGINAL.format("a")))
    _same(tables, "a", "b")
