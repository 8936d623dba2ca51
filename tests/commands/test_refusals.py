"""What ``create`` refuses before anything is created: one error, the promised code, a hint, and nothing is left."""

from __future__ import annotations

import pytest
from fix_program import nothing_created, one_error
from psycopg.conninfo import make_conninfo

PUBLISHER = make_conninfo("", host="127.0.0.1", port=1, dbname="app", user="repl")
TARGET = make_conninfo("", host="127.0.0.1", port=1, dbname="app", user="app")


@pytest.fixture
def offline(make_cli):
    """The program between two servers that nobody can reach: what it refuses now it refuses without asking them."""
    return make_cli(PUBLISHER, TARGET)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--no-connect", "--enabled"], "connect = false and enabled = true are mutually exclusive options"),
        (["--no-connect", "--create-slot"], "connect = false and create_slot = true are mutually exclusive options"),
        (["--no-connect", "--copy-data"], "connect = false and copy_data = true are mutually exclusive options"),
        (["--slot-name", "none", "--enabled"], "slot_name = NONE and enabled = true are mutually exclusive options"),
        (
            ["--slot-name", "NONE", "--create-slot", "--no-enabled"],
            "slot_name = NONE and create_slot = true are mutually",
        ),
        (["--slot-name", "none"], "subscription with slot_name = NONE must also set enabled = false"),
        (
            ["--slot-name", "none", "--no-enabled"],
            "subscription with slot_name = NONE must also set create_slot = false",
        ),
        (["--publication", "p"], 'publication name "p" used more than once'),
        (["--slot-name", "Sales"], 'replication slot name "Sales" contains invalid character'),
        (["--slot-name", "s" * 64], "is too long"),
        (["--slot-name", "pg_conflict_detection"], 'replication slot name "pg_conflict_detection" is reserved'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_exclude_each_other_are_a_usage_error_in_the_servers_words(offline, options, said):
    one_error(offline.create("s", *options), 2, said)
    assert not (offline.state / "state.db").exists()


def test_a_name_that_makes_no_slot_name_is_refused_with_the_servers_rule(offline):
    ended = offline.create("My-Subscription")
    one_error(ended, 2, '"My-Subscription" contains invalid character', "only contain lower case letters")


@pytest.mark.parametrize("name", ["", "s" * 64, "a\nb"], ids=["empty", "long", "control character"])
def test_a_name_that_the_server_would_not_take_is_refused(offline, name):
    one_error(offline.create(name), 2, "invalid subscription name")


@pytest.mark.long
def test_a_connection_string_that_libpq_refuses_is_not_repeated(offline):
    for option in ("--connection", "--target"):
        words = offline.words("s", option, "host=h password=S3NT1NEL oops")
        said = one_error(offline(*words), 2, "invalid connection string for the ", "Use keywords and values")
        assert "S3NT1NEL" not in said
        mistyped = offline.words("s", option, "host=h prt=55901 password=S3NT1NEL")
        said = one_error(
            offline(*mistyped), 2, "invalid connection string for the ", 'DETAIL:  It has no option "prt".'
        )
        assert "S3NT1NEL" not in said


@pytest.mark.long
def test_without_connection_or_target_the_command_says_where_they_come_from(offline):
    one_error(
        offline("create", "s", "--target", TARGET, "--publication", "p"),
        *(2, "no connection string for the publisher", "Give --connection or set PGSUB_CONNECTION"),
    )
    one_error(
        offline("create", "s", "--connection", PUBLISHER, "--publication", "p"),
        *(2, "no connection string for the target", "Give --target or set PGSUB_TARGET"),
    )
    one_error(offline("create", "s", "--connection", PUBLISHER, "--target", TARGET), 2, "--publication")


@pytest.mark.parametrize("secret", ["sslpassword", "scram_client_key"])
def test_a_secret_that_no_passfile_can_hold_is_refused_and_not_lost(offline, secret):
    words = ["create", "s", "--target", TARGET, "--publication", "p", "--connection"]
    said = one_error(
        offline(*words, f"{PUBLISHER} {secret}=S3NT1NEL"),
        *(3, f"cannot store {secret} of the publisher's connection string", "service=NAME"),
    )
    assert "S3NT1NEL" not in said


def test_an_unreachable_target_is_code_5_and_an_unreachable_publisher_code_4(cli, tables):
    target, cli.target = cli.target, TARGET
    one_error(cli.create(), 5, "could not connect to the target: ", "The target is host=127.0.0.1 port=1 ")
    cli.target, cli.connection = target, PUBLISHER
    one_error(cli.create(), 4, "could not connect to the publisher: ", "The publisher is host=127.0.0.1 port=1 ")
    nothing_created(cli, *tables)


@pytest.mark.long
def test_libpqs_variables_complete_the_target_and_never_the_publisher(cli, tables, target):
    pubdb, subdb = tables
    variables = {"PGHOST": "127.0.0.1", "PGPORT": str(target.port), "PGDATABASE": subdb.name, "PGUSER": "postgres"}
    words = ["create", "s", "--publication", "p", "--no-wait"]
    ended = cli(*words, "--connection", "dbname=postgres user=postgres port=1", env=variables)
    one_error(ended, 4, "could not connect to the publisher: ", ".s.PGSQL.1")
    one_error(cli(*words, env=variables), 2, "PGHOST and its like never name the publisher")
    ended = cli(*words, "--connection", pubdb.conninfo, env=variables)
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows("SELECT subname FROM pgsub.subscription") == [("s",)]


def test_conninfos_come_from_variables_and_from_a_line_of_standard_input(cli, tables):
    pubdb, subdb = tables
    ended = cli("create", "s", "--publication", "p", "--dry-run", "--target", "-", stdin=f"{subdb.conninfo}\n", env={
        "PGSUB_CONNECTION": pubdb.conninfo})  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "public.a\t" in ended.stdout


@pytest.mark.long
def test_a_subscription_of_that_name_is_refused_unless_if_not_exists(cli, tables):
    assert cli.create("s", "--no-wait").returncode == 0
    one_error(cli.create("s", "--no-wait"), 3, 'subscription "s" already exists', "pgsub status s")
    ended = cli.create("s", "--if-not-exists")
    assert ended.returncode == 0
    assert ended.stderr == 'NOTICE:  subscription "s" already exists, skipping\n'
    assert tables[0].rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == [("s",)]


@pytest.mark.long
def test_commands_for_an_unknown_subscription_end_with_3(cli):
    for words in (
        ["drop", "x", "--yes"],
        ["enable", "x"],
        ["disable", "x"],
        ["run", "x"],
        ["wait", "x", "--for", "synced"],
    ):
        ended = cli(*words)
        assert (ended.returncode, ended.stderr.splitlines()[0]) == (3, 'pgsub: error: subscription "x" does not exist')


@pytest.mark.long
def test_all_missing_tables_are_named_before_anything_is_created(cli, tables):
    pubdb, subdb = tables
    pubdb.execute("CREATE SCHEMA sales; CREATE TABLE sales.c (id int PRIMARY KEY); CREATE TABLE v (id int PRIMARY KEY)")
    pubdb.execute("ALTER PUBLICATION p ADD TABLE sales.c, v")
    subdb.execute("DROP TABLE a; CREATE VIEW v AS SELECT 1 AS id")
    said = one_error(cli.create(), 3, "3 published tables have no target", "pg_dump --schema-only")
    for name in ("public.a", "sales.c"):
        assert f'relation "{name}" does not exist on the target\n' in said
    assert 'cannot use relation "public.v" as logical replication target' in said
    nothing_created(cli, pubdb, subdb)
    assert subdb.value("SELECT to_regnamespace('pgsub') IS NULL")


@pytest.mark.long
def test_a_single_missing_table_is_named_in_the_message(cli, tables):
    tables[1].execute("DROP TABLE b")
    only_that = (
        """pg_dump --schema-only --no-owner --no-privileges --no-publications --no-subscriptions -t '"public"."b"' """
    )
    said = one_error(cli.create(), 3, 'error: relation "public.b" does not exist on the target\n', only_that)
    assert "With -t, pg_dump leaves out the schemas, types and functions" in said
    nothing_created(cli, *tables)


def test_missing_and_generated_columns_are_warnings_that_strict_refuses(cli, tables):
    pubdb, subdb = tables
    subdb.execute("DROP TABLE a, b; CREATE TABLE a (id int PRIMARY KEY)")
    subdb.execute("CREATE TABLE b (id int PRIMARY KEY, n numeric GENERATED ALWAYS AS (id * 2) STORED)")
    relation = "logical replication target relation"
    missing = f'{relation} "public.a" is missing replicated column: "t"'
    generated = f'{relation} "public.b" has incompatible generated column: "n"'
    for more in ((), ("--dry-run",)):
        one_error(cli.create("s", "--strict", *more), 3, missing, generated)
    nothing_created(cli, pubdb, subdb)
    ended = cli.create("s", "--no-wait")
    assert ended.returncode == 0
    assert f"pgsub: warning: {missing}\n" in ended.stderr
    assert f"pgsub: warning: {generated}\n" in ended.stderr


@pytest.mark.long
def test_a_missing_publication_is_the_servers_warning_and_no_error(cli, tables):
    ended = cli(*cli.words("s", "--no-wait", publication="nope"))
    assert ended.returncode == 0
    said = 'pgsub: warning: publication "nope" does not exist on the publisher\n'
    assert f'{said}DETAIL:  Publications of its database are "p".\n' in ended.stderr
    assert cli.states() == {}
    one_error(cli(*cli.words("t", "--strict", "--publication", "nope")), 3, 'publication "nope" does not exist')


def test_several_publications_in_one_option_get_a_hint(cli, tables):
    ended = cli(*cli.words("s", "--dry-run", publication="p,q"))
    said = 'pgsub: warning: publication "p,q" does not exist on the publisher\n'
    assert said in ended.stderr and "HINT:  An option names one publication: repeat it for p and q.\n" in ended.stderr


def test_servers_that_were_exchanged_are_named_before_what_they_lack(cli, tables, target):
    pubdb, subdb = tables
    exchanged = ("create", "s", "--publication", "p", "--connection", subdb.conninfo, "--target", pubdb.conninfo)
    ended = cli(*exchanged, "--dry-run")
    assert ended.stderr.startswith("pgsub: warning: --connection and --target seem to be exchanged"), ended.stderr
    subdb.execute("CREATE ROLE plain LOGIN")
    try:
        ended = cli(*exchanged[:-3], f"{subdb.conninfo} user=plain", *exchanged[-2:])
        hint = one_error(ended, 11, "REPLICATION").partition("HINT:  ")[2]
        assert hint.startswith("The target's database has publication \"p\", the publisher's has not. Exchange --conn")
    finally:
        subdb.execute("DROP ROLE plain")
    nothing_created(cli, pubdb, subdb)


def test_one_server_as_both_is_refused_before_any_privilege_is_asked_for(cli, tables):
    subdb = tables[1]
    subdb.execute("CREATE ROLE plain LOGIN")
    try:
        one = f"{subdb.conninfo} user=plain"
        ended = cli("create", "s", "--publication", "p", "--connection", one, "--target", one)
        said = one_error(ended, 3, "publisher and target are the same database")
        assert "GRANT" not in said
    finally:
        subdb.execute("DROP ROLE plain")


@pytest.mark.long
def test_a_table_with_two_column_lists_is_refused_in_the_servers_words(cli, tables):
    tables[0].execute("CREATE PUBLICATION q FOR TABLE a (id)")
    said = 'cannot use different column lists for table "public.a" in different publications'
    one_error(cli.create("s", "--publication", "q"), 3, said, hint=False)
    nothing_created(cli, *tables)


@pytest.mark.long
def test_a_slot_that_exists_is_refused_and_left_alone(cli, tables):
    pubdb, subdb = tables
    pubdb.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    one_error(
        cli.create(),
        *(3, 'could not create replication slot "s": replication slot "s" already exists'),
        *("--no-create-slot", "SELECT pg_drop_replication_slot('s');"),
    )
    assert pubdb.rows("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == [("s",)]
    assert cli.create("s", "--no-create-slot", "--no-wait").returncode == 0
    confirmed = pubdb.value("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 's'")
    assert subdb.rows("SELECT consistent_point, slot_intent FROM pgsub.subscription") == [(confirmed, False)]
