"""What ``create`` says of two servers before anything is created, and that it says nothing where all is well."""

from __future__ import annotations

from contextlib import closing

import pytest
from fix_program import nothing_created, one_error, valid


def _plan(cli, *options, publication="p"):
    """The document of a dry run, and its tables by name."""
    words = [*cli.words("s", "--dry-run", "--json", *options, publication=publication)]
    ended = cli(*words)
    assert ended.returncode == 0, ended.stderr
    document = valid("plan", ended.stdout)
    return document, {table["relname"]: table for table in document["tables"]}


def _about(document, table):
    """The warnings that concern one table: message, detail and hint of each."""
    return [
        (warning["message"], warning["detail"], warning["hint"])
        for warning in document["warnings"]
        if f"public.{table}" in warning["tables"]
    ]


def _pasted(hint):
    return [line for line in hint.splitlines() if line.endswith(";")]


def test_a_dry_run_changes_nothing_and_says_of_each_table_how_it_is_copied(cli, tables):
    pubdb, subdb = tables
    pubdb.execute("ANALYZE a")
    ended = cli.create("s", "--dry-run")
    assert ended.returncode == 0
    head, *rows = [line.split("\t") for line in ended.stdout.splitlines()]
    assert head == ["table", "copy", "chunks", "rows", "size", "target", "reason"]
    assert [(row[0], row[1], row[3], row[5], row[6]) for row in rows] == [
        ("public.a", "one transaction", "100", "empty", "the table is small"),
        ("public.b", "one transaction", "", "empty", "the table is small"),
    ]
    assert ended.stderr.startswith("NOTICE:  2 of 2 tables, about ") and ended.stderr.count("\n") == 1
    document, found = _plan(cli, "--no-copy-data")
    assert [table["copy"] for table in found.values()] == ["none", "none"] and document["warnings"] == []
    nothing_created(cli, pubdb, subdb)
    assert subdb.value("SELECT to_regnamespace('pgsub') IS NULL")


def test_json_belongs_to_a_dry_run(cli):
    ended = cli.create("s", "--json")
    assert ended.returncode == 2 and "--json needs --dry-run" in ended.stderr


@pytest.mark.long
@pytest.mark.publishers("15")
def test_chunked_or_atomic_is_shown_beforehand_with_the_number_of_chunks_or_the_reason(cli, tables):
    pubdb, subdb = tables
    ddl = """CREATE TABLE big (id int PRIMARY KEY, v text); CREATE TABLE filled (id int PRIMARY KEY, v text);
        CREATE TABLE fires (id int PRIMARY KEY, v text);
        CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
        CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (5000);
        CREATE TABLE parts_2 PARTITION OF parts DEFAULT;"""
    for database in tables:
        database.execute(ddl)
    for name in ("big", "filled", "fires", "parts"):
        pubdb.execute(f"INSERT INTO {name} SELECT g, repeat('x', 100) FROM generate_series(1, 9999) g")
    subdb.execute("INSERT INTO filled VALUES (-1, '')")
    subdb.execute("""CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
        CREATE TRIGGER t BEFORE INSERT ON fires FOR EACH ROW EXECUTE FUNCTION f();
        ALTER TABLE fires ENABLE ALWAYS TRIGGER t""")
    pubdb.execute("CREATE PUBLICATION q FOR TABLE big, filled, fires, parts, a WITH (publish_via_partition_root)")
    cli.environment["PGSUB_CHUNK_BYTES"] = "100000"
    document, found = _plan(cli, publication="q")
    assert {name: (table["copy"], table["reason"]) for name, table in found.items()} == {
        "a": ("atomic", "the table is small"),
        "big": ("chunked", None),
        "filled": ("atomic", "the target table is not empty"),
        "fires": ("atomic", "a trigger on the target table would fire"),
        "parts": ("chunked", None),
    }
    size = found["big"]["bytes_estimate"]
    assert size > 1_000_000 and found["big"]["chunks"] == -(-size // 100000) and found["parts"]["chunks"] > 10
    assert {name: table["target_empty"] for name, table in found.items()} == {
        **dict.fromkeys(found, True),
        "filled": False,
    }
    (warning,) = document["warnings"]
    assert warning["message"] == 'table "public.filled" on the target is not empty'
    assert "a key that is there already is an error" in warning["detail"]
    one_error(cli(*cli.words("s", "--strict", "--no-wait", publication="q")), 3, warning["message"])
    _, found = _plan(cli, "--copy-atomic", publication="q")
    assert {table["reason"] for table in found.values()} == {"copy_atomic is set"}


_MISFITS = {
    "fine": ("a int PRIMARY KEY, v varchar(5) NOT NULL", "a bigint PRIMARY KEY, v text, extra int DEFAULT 1", []),
    "lacks": ("a int PRIMARY KEY, b int, c int", "a int PRIMARY KEY", ['is missing replicated columns: "b", "c"']),
    "made": (
        "a int PRIMARY KEY, g int",
        "a int PRIMARY KEY, g int GENERATED ALWAYS AS (1) STORED",
        ['has incompatible generated column: "g"'],
    ),
    "narrow": (
        "a bigint PRIMARY KEY, v text, n numeric(9,2)",
        "a int PRIMARY KEY, v varchar(3), n numeric(8,2)",
        [
            '"a" is bigint on the publisher, integer here: values out of range fail',
            '"v" is text',
            '"n" is numeric(9,2)',
        ],
    ),
    "mood": ("a int PRIMARY KEY, m feeling", "a int PRIMARY KEY, m feeling", ['the target lacks "new"']),
    "strict": (
        "a int PRIMARY KEY, b int",
        "a int PRIMARY KEY, b int NOT NULL",
        ['Rows with NULL in them fail. Columns: "b"'],
    ),
    "unfilled": (
        "a int PRIMARY KEY",
        "a int PRIMARY KEY, b int NOT NULL, c int NOT NULL DEFAULT 1, d int NOT NULL GENERATED ALWAYS AS IDENTITY",
        ['Every row fails. Columns: "b"'],
    ),
    "unpublished": (
        "a int PRIMARY KEY, g int GENERATED ALWAYS AS (1) STORED",
        "a int PRIMARY KEY, g int",
        ['They stay NULL there. Columns: "g"'],
    ),
    "once": (
        "a int PRIMARY KEY, b int, c int, UNIQUE (b)",
        "a int PRIMARY KEY, b int, c int, CONSTRAINT bc UNIQUE (c, b), CONSTRAINT only_c UNIQUE (c)",
        ['Rows that are equal in them fail. Indexes: "only_c"'],
    ),
    "nulls": (
        "a int PRIMARY KEY, b int UNIQUE",
        "a int PRIMARY KEY, b int CONSTRAINT one_null UNIQUE NULLS NOT DISTINCT",
        ['Indexes: "one_null"'],
    ),
    "checked": (
        "a int PRIMARY KEY CHECK (a > 0)",
        "a int PRIMARY KEY CHECK (a > 0) CONSTRAINT even CHECK (a % 2 = 0)",
        ['Rows that violate them fail. Constraints: "even"'],
    ),
    "keyless": ("a int", "a int", ["publishes UPDATE and DELETE without a replica identity"]),
    "other_key": (
        "a int PRIMARY KEY, b int NOT NULL UNIQUE",
        "a int, b int PRIMARY KEY",
        ["publisher did not send replica identity column expected by the logical replication target"],
    ),
    "no_key_here": (
        "a int PRIMARY KEY",
        "a int",
        ["has neither REPLICA IDENTITY index nor PRIMARY KEY"],
    ),
    "gone": ("a int PRIMARY KEY", "a int PRIMARY KEY", ["is unlogged"]),
}
_FULL = {
    "whole": ("a int PRIMARY KEY, b int", "a int, b int", []),
    "shapes": ("a int, p point", "a int, p point", ["could not identify an equality operator for type point"]),
}


@pytest.mark.long
@pytest.mark.publishers("15")
def test_whatever_does_not_fit_is_a_warning_that_names_table_and_columns(cli, tables):
    pubdb, subdb = tables
    pubdb.execute("CREATE TYPE feeling AS ENUM ('ok', 'new')")
    subdb.execute("CREATE TYPE feeling AS ENUM ('ok')")
    for name, (there, here, _) in {**_MISFITS, **_FULL}.items():
        pubdb.execute(f"CREATE TABLE {name} ({there})")
        subdb.execute(f"CREATE {'UNLOGGED' if name == 'gone' else ''} TABLE {name} ({here})")
    for name in _FULL:
        pubdb.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    pubdb.execute(f"CREATE PUBLICATION q FOR TABLE {', '.join([*_MISFITS, *_FULL])}")
    document, _ = _plan(cli, publication="q")
    for name, (_, _, expected) in {**_MISFITS, **_FULL}.items():
        found = _about(document, name)
        text = "\n".join(f"{message}\n{detail}" for message, detail, _ in found)
        assert all(words in text for words in expected), f"{name}: {text}"
        if not expected:
            assert found == []
        if name not in ("unfilled", "other_key", "no_key_here", "once"):  # others have several faces
            assert len(found) == (1 if expected else 0), f"{name}: {text}"
    said = one_error(cli(*cli.words("s", "--strict", publication="q")), 3)
    assert said.count("Also: ") == len(document["warnings"]) - 1
    nothing_created(cli, *tables)


def test_tables_that_publish_only_inserts_need_no_identity(cli, tables):
    for database in tables:
        database.execute("CREATE TABLE keyless (a int, p point)")
    tables[0].execute("CREATE PUBLICATION q FOR TABLE keyless WITH (publish = 'insert')")
    document, _ = _plan(cli, publication="q")
    assert document["warnings"] == []


def test_partitions_have_the_identity_of_their_root_and_a_column_list_must_cover_it(cli, tables):
    pubdb, _ = tables
    for database in tables:
        database.execute("""CREATE TABLE root (a int, b int, PRIMARY KEY (a)) PARTITION BY LIST (a);
            CREATE TABLE leaf PARTITION OF root DEFAULT; CREATE TABLE listed (a int PRIMARY KEY, b int);
            CREATE TABLE bare (a int PRIMARY KEY) PARTITION BY LIST (a);
            CREATE TABLE one (a int); CREATE TABLE two ()""")
    pubdb.execute("CREATE TABLE bare_1 PARTITION OF bare DEFAULT")
    pubdb.execute("CREATE PUBLICATION q FOR TABLE root, listed (b), bare, one, two WITH (publish_via_partition_root)")
    pubdb.execute("CREATE TABLE keyed (a int, b int); ALTER TABLE keyed REPLICA IDENTITY FULL")
    tables[1].execute("""CREATE TABLE keyed (a int, b int) PARTITION BY LIST (b);
        CREATE TABLE keyed_1 PARTITION OF keyed FOR VALUES IN (1); ALTER TABLE keyed_1 ADD PRIMARY KEY (a);
        CREATE TABLE keyed_2 PARTITION OF keyed DEFAULT""")
    pubdb.execute("ALTER PUBLICATION q ADD TABLE keyed")
    document, _ = _plan(cli, publication="q")
    ((message, _, _),) = _about(document, "keyed")
    assert message == 'rows of table "public.keyed" are found by all columns, not by the key of their partition'
    tables[1].execute("ALTER TABLE keyed_2 ADD PRIMARY KEY (a)")
    assert _about(_plan(cli, publication="q")[0], "keyed") == []
    messages = [message for message, _, _ in _about(document, "listed")]
    assert 'the column list of table "public.listed" does not cover its replica identity' in messages
    assert _about(document, "root") == []
    assert [message for message, _, _ in _about(document, "bare")] == [
        'table "public.bare" on the target has no partition'
    ]
    ((message, _, hint),) = _about(document, "one")
    assert message == "2 tables publish UPDATE and DELETE without a replica identity"
    pubdb.execute("\n".join(_pasted(hint)))
    assert _about(_plan(cli, publication="q")[0], "two") == []


@pytest.mark.long
def test_binary_values_fit_only_the_same_types(cli, tables):
    pubdb, subdb = tables
    for database in tables:
        database.execute("CREATE TYPE mood AS ENUM ('ok')")
    pubdb.execute("CREATE TABLE wide (a int PRIMARY KEY, v varchar(3), m mood[])")
    subdb.execute("CREATE TABLE wide (a bigint PRIMARY KEY, v text, m mood[])")
    pubdb.execute("CREATE PUBLICATION q FOR TABLE wide")
    assert _plan(cli, publication="q")[0]["warnings"] == []
    ((_, detail, _),) = _about(_plan(cli, "--binary", publication="q")[0], "wide")
    assert '"a" is integer on the publisher, bigint here: binary values fit only the same type.' in detail
    assert (
        '"m" is public.mood[] on the publisher, public.mood[] here: binary arrays name their element type by its OID'
        in detail
    )
    assert '"v"' not in detail


@pytest.fixture
def role(tables):
    """A role on both servers that may replicate and keep a ledger, and may not touch a single table."""
    name = f"{tables[1].name}_role"
    for database in tables:
        database.execute(f"CREATE ROLE {name} LOGIN REPLICATION")
    tables[1].execute(f"CREATE SCHEMA pgsub AUTHORIZATION {name}")
    return name


@pytest.mark.long
@pytest.mark.publishers("15", long=True)
def test_missing_privileges_are_named_and_the_grants_of_the_hints_are_all_that_is_needed(cli, tables, role):
    pubdb, subdb = tables
    for database in tables:
        database.execute('CREATE SCHEMA "S s"; CREATE TABLE "S s".c (id int PRIMARY KEY)')
    pubdb.execute(
        "CREATE PUBLICATION q FOR TABLE a, \"S s\".c; CREATE PUBLICATION r FOR TABLE b WITH (publish = 'insert')"
    )
    pubdb.execute('INSERT INTO b VALUES (1, 1); INSERT INTO "S s".c VALUES (1)')
    cli.connection = pubdb.server.conninfo(pubdb.name, role)
    cli.target = subdb.server.conninfo(subdb.name, role)
    options = ("--publication", "r")
    document, _ = _plan(cli, *options, publication="q")
    hints = {"publisher": [], "target": []}
    for warning in document["warnings"]:
        for server in hints:
            if warning["message"].endswith(f"on the {server}"):
                hints[server] += _pasted(warning["hint"])
    assert hints["publisher"] == [
        f'GRANT USAGE ON SCHEMA "S s" TO "{role}";',
        f'GRANT SELECT ON TABLE "S s"."c", "public"."a", "public"."b" TO "{role}";',
    ]
    assert (
        f'GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON TABLE "S s"."c", "public"."a" TO "{role}";'
        in hints["target"]
    )
    assert f'GRANT INSERT ON TABLE "public"."b" TO "{role}";' in hints["target"]
    pubdb.execute("\n".join(hints["publisher"]))
    subdb.execute("\n".join(hints["target"]))
    assert _about(_plan(cli, *options, publication="q")[0], "a") == []
    ended = cli(*cli.words("s", *options, publication="q"))
    assert ended.returncode == 0, ended.stderr
    assert subdb.value('SELECT count(*) FROM "S s".c') == 1 and subdb.value("SELECT count(*) FROM b") == 1


@pytest.mark.long
def test_columns_that_a_role_may_select_are_enough_for_a_column_list(cli, tables, role):
    pubdb, _ = tables
    pubdb.execute(f"GRANT SELECT (id) ON a TO {role}; CREATE PUBLICATION q FOR TABLE a (id)")
    cli.connection = pubdb.server.conninfo(pubdb.name, role)
    assert _plan(cli, publication="q")[0]["warnings"] == []
    (message, _, _), *more = _about(_plan(cli)[0], "a")
    assert message == "permission denied for 2 tables on the publisher" and more == []


@pytest.mark.long
def test_policies_that_would_filter_or_refuse_rows_are_named_on_either_side(cli, tables, role):
    pubdb, subdb = tables
    for database in tables:
        database.execute(f"GRANT ALL ON a, b TO {role}; ALTER TABLE a ENABLE ROW LEVEL SECURITY")
    cli.connection = pubdb.server.conninfo(pubdb.name, role)
    cli.target = subdb.server.conninfo(subdb.name, role)
    found = _about(_plan(cli)[0], "a")
    assert [message for message, _, _ in found] == [
        'a row security policy applies to table "public.a" on the publisher',
        'a row security policy of the target applies to table "public.a"',
    ]
    for database, (_, _, hint) in zip(tables, found, strict=True):
        database.execute("\n".join(_pasted(hint)))
    assert _about(_plan(cli)[0], "a") == []


@pytest.mark.long
def test_owners_that_the_role_may_not_act_as_are_named_with_the_grant_and_the_option(cli, tables, role):
    pubdb, subdb = tables
    owners = [f"{subdb.name}_{name}" for name in ("alice", "bob")]
    subdb.execute(
        f"CREATE ROLE {owners[0]}; CREATE ROLE {owners[1]}; GRANT USAGE ON SCHEMA public TO PUBLIC;"
        f"ALTER TABLE a OWNER TO {owners[0]}; ALTER TABLE b OWNER TO {owners[1]}; GRANT ALL ON a, b TO {role};"
        f"GRANT {owners[1]} TO {role} WITH INHERIT TRUE, SET FALSE"
    )
    try:
        cli.target = subdb.server.conninfo(subdb.name, role)
        (stays,) = _about(_plan(cli)[0], "a")
        assert stays[0] == f'changes of table "public.a" on the target are made as role "{role}", not as the owner'
        assert "--run-as-owner" in stays[2]
        (stops,) = _about(_plan(cli)[0], "b")
        assert stops[0] == f'role "{role}" cannot SET ROLE to "{owners[1]}"'
        assert stops[2].splitlines()[-1] == "pgsub alter s --run-as-owner"
        accepted = _plan(cli, "--run-as-owner")[0]
        assert _about(accepted, "a") == _about(accepted, "b") == []
        subdb.execute(_pasted(stays[2])[0] + stops[2].splitlines()[0].partition(": ")[2])
        allowed = _plan(cli)[0]
        assert _about(allowed, "a") == _about(allowed, "b") == []
        # the owners' rights count then, but for TRUNCATE
        subdb.execute(f"REVOKE ALL ON a, b FROM {role}; REVOKE INSERT ON a FROM {owners[0]}")
        subdb.execute(f"GRANT {owners[0]}, {owners[1]} TO {role} WITH INHERIT FALSE")
        hints = {message: hint for message, _, hint in _about(_plan(cli)[0], "a")}
        assert sorted(line for hint in hints.values() for line in _pasted(hint)) == [
            f'GRANT INSERT ON TABLE "public"."a" TO "{owners[0]}";',
            f'GRANT TRUNCATE ON TABLE "public"."a", "public"."b" TO "{role}";',
        ]
        subdb.execute("".join(line for hint in hints.values() for line in _pasted(hint)))
        ended = cli.create()
        assert ended.returncode == 0 and "permission denied" not in ended.stderr, ended.stderr
        assert subdb.value("SELECT count(*) FROM a") == pubdb.value("SELECT count(*) FROM a")
    finally:
        for owner in owners:
            subdb.execute(f"DROP OWNED BY {owner}; DROP ROLE {owner}")


@pytest.mark.long
def test_the_comparison_of_an_adopted_table_needs_the_users_own_select(cli, tables, role):
    subdb = tables[1]
    owner = f"{subdb.name}_owner"
    subdb.execute(f"CREATE ROLE {owner}; GRANT {owner} TO {role} WITH INHERIT FALSE; GRANT TRUNCATE ON a, b TO {role}")
    subdb.execute(f"ALTER TABLE a OWNER TO {owner}; ALTER TABLE b OWNER TO {owner}; INSERT INTO a VALUES (1, 'other')")
    try:
        cli.target = subdb.server.conninfo(subdb.name, role)
        ((message, detail, hint),) = _about(_plan(cli, "--adopt")[0], "a")
        assert message == 'permission denied for table "public.a" on the target'
        assert "compared by the user of --target itself" in detail
        assert _pasted(hint) == [f'GRANT SELECT ON TABLE "public"."a" TO "{role}";']
        subdb.execute(f"GRANT SELECT (id, t) ON a TO {role}")
        assert _about(_plan(cli, "--adopt")[0], "a") == []
        ended = cli.create("s", "--adopt", "--yes")
        assert ended.returncode == 0 and "permission denied" not in ended.stderr, ended.stderr
        assert subdb.rows("SELECT * FROM a ORDER BY id") == tables[0].rows("SELECT * FROM a ORDER BY id")
    finally:
        subdb.execute(f"DROP OWNED BY {owner}; DROP ROLE {owner}")


@pytest.mark.long
def test_rules_that_fire_on_the_target_are_a_warning(cli, tables):
    subdb = tables[1]
    subdb.execute(
        "CREATE RULE off AS ON INSERT TO a DO INSTEAD NOTHING; CREATE RULE silent AS ON UPDATE TO b DO NOTHING"
    )
    assert _plan(cli)[0]["warnings"] == []  # session_replication_role = replica keeps them silent
    subdb.execute("ALTER TABLE a ENABLE ALWAYS RULE off")
    ((message, detail, hint),) = _about(_plan(cli)[0], "a")
    assert message == 'rules of table "public.a" on the target fire' and "INSTEAD of an INSERT" in detail
    assert subdb.rows(hint.splitlines()[-1]) == [("a", "off")]


@pytest.mark.long
def test_room_for_slots_walsenders_and_sessions_is_counted_beforehand(make_cli, own_pair):
    pair = own_pair(
        publisher={"max_replication_slots": 3, "max_wal_senders": 2, "max_connections": 12},
        target={"max_connections": 9},
    )
    for database in (pair.pubdb, pair.subdb):
        database.execute("".join(f"CREATE TABLE t{i} (a int PRIMARY KEY);" for i in range(9)))
        database.execute("CREATE ROLE few LOGIN SUPERUSER")
    pair.pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
    cli = make_cli(pair.pubdb.conninfo, pair.subdb.conninfo)
    assert [w["message"] for w in _plan(cli, "--max-sync-workers", "1")[0]["warnings"]] == []
    found = {w["message"]: w for w in _plan(cli, "--max-sync-workers", "8")[0]["warnings"]}
    assert "take 17;" in found["only 3 replication slots are free on the publisher"]["detail"]
    walsenders = found["only 2 walsenders are free on the publisher"]
    assert "take 9;" in walsenders["detail"] and walsenders["hint"].endswith("SET max_wal_senders = 9;")
    sessions = [message for message in found if "sessions are free for this role" in message]
    assert [message.rpartition(" ")[2] for message in sessions] == ["publisher", "target"]
    assert [w["message"] for w in _plan(cli, "--max-sync-workers", "8", "--no-copy-data")[0]["warnings"]] == []
    pair.pubdb.rows("SELECT pg_create_logical_replication_slot('there', 'pgoutput')")
    there = ("--no-copy-data", "--no-create-slot", "--slot-name", "there", "--apply-workers", "16")
    [applying] = _plan(cli, *there)[0]["warnings"]
    assert "free for this role on the target" in applying["message"] and "take 17 " in applying["detail"]
    assert applying["hint"].startswith("Use a smaller --apply-workers, or raise")
    pair.pubdb.rows("SELECT pg_drop_replication_slot('there')")
    for database in (pair.pubdb, pair.subdb):
        database.execute("INSERT INTO t0 VALUES (1)")
    compared = _plan(cli, "--adopt", "--max-sync-workers", "1", "--copy-workers", "8")[0]["warnings"]
    [sessions] = [w for w in compared if w["message"].endswith("free for this role on the target")]
    assert "take 13 " in sessions["detail"]
    few = _plan(cli, "--adopt", "--max-sync-workers", "1", "--copy-workers", "1")[0]["warnings"]
    assert [w["message"] for w in few if "sessions" in w["message"]] == []


@pytest.mark.long
def test_transactions_that_a_slot_would_wait_for_are_named_with_pid_age_and_query(make_cli, own_pair):
    pair = own_pair(publisher={"max_prepared_transactions": 5})
    for database in (pair.pubdb, pair.subdb):
        database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    pair.pubdb.execute("CREATE PUBLICATION p FOR TABLE a")
    cli = make_cli(pair.pubdb.conninfo, pair.subdb.conninfo)
    pair.pubdb.execute("BEGIN; INSERT INTO a VALUES (1); PREPARE TRANSACTION 'left over'")
    writer, reader = pair.pubdb.connect(application_name="batch"), pair.pubdb.connect()
    with closing(writer), closing(reader):
        for session, statement in ((writer, "INSERT INTO a\n VALUES (2)"), (reader, "SELECT FROM a")):
            session.execute("BEGIN")
            session.execute(statement)
        age = "SELECT min(clock_timestamp() - xact_start) > '5 s' FROM pg_stat_activity WHERE pid IN (%s, %s)"
        pair.pubdb.wait(age, writer.info.backend_pid, reader.info.backend_pid)
        with pair.pubdb.connect() as young:
            young.execute("BEGIN")
            young.execute("INSERT INTO a VALUES (3)")
            prepared, open_, *more = _plan(cli)[0]["warnings"]
            is_old = young.execute("SELECT clock_timestamp() - xact_start >= '5 s' FROM pg_stat_activity"
                                   " WHERE pid = pg_backend_pid()").fetchone() == (True,)  # fmt: skip
            assert is_old or not more  # what is younger is not worth a word
            young.execute("ROLLBACK")
        assert prepared["message"].endswith(' wait for prepared transaction "left over" on the publisher')
        assert open_["message"].endswith(f" wait for the transaction of PID {writer.info.backend_pid} on the publisher")
        assert open_["detail"].startswith('User "postgres", application "batch", database "app", open since ')
        assert open_["detail"].endswith(" s), idle in transaction: INSERT INTO a VALUES (2)")
        pair.pubdb.execute(_pasted(prepared["hint"])[1])
        pair.pubdb.execute(_pasted(open_["hint"])[0])
        assert _plan(cli)[0]["warnings"] == []


@pytest.mark.long
def test_a_target_whose_encoding_lacks_characters_is_a_warning(make_cli, tables):
    pubdb, subdb = tables
    subdb.server.query(f"CREATE DATABASE {subdb.name}_l1 ENCODING LATIN1 LOCALE 'C' TEMPLATE template0")
    with subdb.server.connect(f"{subdb.name}_l1") as session:
        session.execute("CREATE TABLE a (id int PRIMARY KEY, t text); CREATE TABLE b (id int PRIMARY KEY, n numeric)")
    cli = make_cli(pubdb.conninfo, subdb.server.conninfo(f"{subdb.name}_l1"))
    (warning,) = _plan(cli)[0]["warnings"]
    assert warning["message"] == 'the publisher\'s database has encoding "UTF8", the target\'s "LATIN1"'
    subdb.server.query(f"DROP DATABASE {subdb.name}_l1")


@pytest.mark.long
@pytest.mark.parametrize(
    ("encoding", "warned"),
    [
        ("SQL_ASCII", 'the publisher\'s database has encoding "SQL_ASCII", the target\'s "SQL_ASCII"'),
        ("EUC_JP", 'both databases have encoding "EUC_JP", and pgsub sends text as UTF-8'),
        ("LATIN1", None),
    ],
)
def test_text_that_is_no_utf8_is_a_warning_though_the_databases_are_alike(make_cli, tables, encoding, warned):
    pubdb, subdb = tables
    names = [(one, f"{one.name}_{encoding.lower()}") for one in (pubdb, subdb)]
    ddl = "CREATE TABLE a (id int PRIMARY KEY, t text); CREATE PUBLICATION p FOR TABLE a"
    for one, name in names:
        one.server.query(f"CREATE DATABASE {name} ENCODING {encoding} LOCALE 'C' TEMPLATE template0")
        with one.server.connect(name) as session:
            session.execute(ddl)
    cli = make_cli(*(one.server.conninfo(name) for one, name in names))
    warnings = _plan(cli)[0]["warnings"]
    assert [warning["message"] for warning in warnings] == ([] if warned is None else [warned])
    for one, name in names:
        one.server.query(f"DROP DATABASE {name}")


def test_a_target_that_reads_null_in_arrays_as_text_is_a_warning(cli, tables):
    _, subdb = tables
    subdb.execute(f"ALTER DATABASE {subdb.name} SET array_nulls = off")
    document, _ = _plan(cli)
    assert [warning["message"] for warning in document["warnings"]] == ["array_nulls is off on the target"]


def test_a_target_table_that_somebody_locks_does_not_hold_up_the_check(cli, tables):
    _, subdb = tables
    subdb.execute("INSERT INTO b VALUES (1, 1)")
    with subdb.connect() as other:
        other.execute("BEGIN")
        other.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
        _, found = _plan(cli)
    assert {name: table["target_empty"] for name, table in found.items()} == {"a": None, "b": False}


@pytest.mark.long
def test_many_tables_are_checked_in_bulk(cli, tables):
    pubdb, subdb = tables
    for database in tables:
        database.execute("""DO $$BEGIN FOR i IN 1..200 LOOP
            EXECUTE format('CREATE TABLE many_%s (id int PRIMARY KEY, v text, n numeric(9,2) UNIQUE)', i);
            END LOOP; END$$""")
    pubdb.execute("CREATE PUBLICATION q FOR ALL TABLES")
    subdb.execute("INSERT INTO many_7 VALUES (1); ALTER TABLE many_8 ALTER v SET NOT NULL")
    count = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    pubdb.execute("SELECT pg_stat_force_next_flush()")
    before = pubdb.value(count)
    document, found = _plan(cli, publication="q")
    assert len(found) == 202
    assert sorted(name for warning in document["warnings"] for name in warning["tables"]) == [
        "public.many_7",
        "public.many_8",
    ]
    assert pubdb.value(count) - before < 100, "statements on the publisher do not grow with the tables"
