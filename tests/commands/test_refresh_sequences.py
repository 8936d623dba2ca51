"""Sequences are brought to the publisher's values by ``refresh --sequences``, from publishers of any version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from fix_program import Cli, one_error
from fix_servers import Database
from psycopg.conninfo import make_conninfo

Tables = tuple[Database, Database]

_DDL = """
CREATE SEQUENCE shared INCREMENT BY 5;
CREATE SEQUENCE down INCREMENT BY -2 MINVALUE -1000 MAXVALUE 10 START 10;
CREATE SEQUENCE round AS smallint MINVALUE 1 MAXVALUE 20 CYCLE;
CREATE SEQUENCE stranger;
CREATE TABLE s (id serial PRIMARY KEY, i int GENERATED ALWAYS AS IDENTITY, n bigint DEFAULT nextval('shared'),
    d int DEFAULT nextval('down'), r int DEFAULT nextval('round'))
"""
_OURS = ("s_id_seq", "s_i_seq", "shared", "down", "round")


def _positions(database: Database, *names: str) -> list[tuple[int, bool]]:
    return [database.rows(f"SELECT last_value, is_called FROM {name}")[0] for name in names]


@pytest.fixture
def subscribed(cli: Cli, tables: Tables) -> Cli:
    """A subscription of a table with a serial, an identity column and standalone sequences in its defaults."""
    for database in tables:
        database.execute(_DDL)
    tables[0].execute("ALTER PUBLICATION p ADD TABLE s")
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
    return cli


def _statements(said: str, *beginnings: str) -> list[str]:
    """Return the lines to paste that begin so."""
    found = [line[line.index(one) :] for line in said.splitlines() for one in beginnings if one in line]
    assert len(found) == len(beginnings), said
    return found


def _set(cli: Cli, *options: str) -> str:
    ended = cli("refresh", "s", "--sequences", *options)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.mark.long
@pytest.mark.publishers("15", long=True)
def test_serial_identity_and_standalone_sequences_come_to_the_publishers_values(
    subscribed: Cli, tables: Tables
) -> None:
    pubdb, subdb = tables
    pubdb.execute(
        "INSERT INTO s SELECT FROM generate_series(1, 17); SELECT nextval('stranger') FROM generate_series(1, 9)"
    )
    said = _set(subscribed)
    assert _positions(subdb, *_OURS) == _positions(pubdb, *_OURS)
    assert _positions(subdb, "s_id_seq", "shared", "down", "round") == [(17, True), (81, True), (-22, True), (17, True)]
    assert _positions(subdb, "stranger") == [(1, False)]
    assert "sequences: 5 set, 0 left as they are" in said
    assert "sequences: 0 set, 5 left as they are" in _set(subscribed)


def test_a_value_that_was_set_and_not_given_yet_is_taken_as_it_is(subscribed: Cli, tables: Tables) -> None:
    tables[0].execute("SELECT setval('shared', 500, false)")
    _set(subscribed)
    assert _positions(tables[1], "shared") == [(500, False)]


def test_a_value_goes_backward_only_where_that_was_asked_for_in_the_direction_of_the_sequence(
    subscribed: Cli, tables: Tables
) -> None:
    pubdb, subdb = tables
    pubdb.execute("SELECT setval('shared', 101); SELECT setval('down', -100); SELECT setval('round', 3)")
    subdb.execute("SELECT setval('shared', 201); SELECT setval('down', -200); SELECT setval('round', 19)")
    said = _set(subscribed)
    assert _positions(subdb, "shared", "down", "round") == [(201, True), (-200, True), (19, True)]
    for name, ahead in (("shared", 100), ("down", 100), ("round", 16)):
        assert f'sequence "public.{name}" is ahead of the publisher by {ahead} and was left as it is' in said
    _set(subscribed, "--allow-backward")
    assert _positions(subdb, "shared", "down", "round") == _positions(pubdb, "shared", "down", "round")


@pytest.mark.long
def test_a_transaction_that_takes_values_keeps_them_and_the_others_are_set(subscribed: Cli, tables: Tables) -> None:
    pubdb, subdb = tables
    pubdb.execute("SELECT setval('shared', 101); SELECT setval('down', -100)")
    with contextlib.closing(subdb.connect()) as session:
        session.execute("BEGIN")
        session.execute("SELECT nextval('shared')")
        ended = subscribed("refresh", "s", "--sequences")
        one_error(ended, 8, "timeout while waiting for sequences", 'Sequences: "public.shared".')
        assert _positions(subdb, "shared", "down") == [(1, True), (-100, True)]
        session.execute("COMMIT")
    _set(subscribed)
    assert _positions(subdb, "shared") == [(101, True)]


@pytest.mark.parametrize("point", ["before_setval", "before_commit"])
def test_a_command_that_is_killed_between_read_and_commit_leaves_the_value_and_is_repeated(
    subscribed: Cli, tables: Tables, point: str, reached: Callable[[str], None]
) -> None:
    pubdb, subdb = tables
    pubdb.execute("SELECT setval('shared', 101)")
    killed = subscribed("refresh", "s", "--sequences", env={"PGSUB_FAILPOINTS": f"sequence.{point}=kill"})
    assert killed.returncode == -9
    reached(f"sequence.{point}")
    subdb.wait("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgsub %%'"
               " AND datname = current_database()", value=0)  # fmt: skip
    assert _positions(subdb, "shared") == [(1, False)]
    _set(subscribed)
    assert _positions(subdb, "shared") == [(101, True)]


@pytest.mark.long
def test_a_definition_that_differs_is_named_with_an_alter_that_mends_it_and_the_others_are_set(
    subscribed: Cli, tables: Tables
) -> None:
    pubdb, subdb = tables
    pubdb.execute("SELECT setval('shared', 101)")
    subdb.execute(
        "ALTER SEQUENCE down INCREMENT BY -3 MAXVALUE 5000 RESTART 4000; ALTER SEQUENCE round AS int NO CYCLE"
    )
    subdb.execute("ALTER SEQUENCE s_i_seq MAXVALUE 99")
    ended = subscribed("refresh", "s", "--sequences")
    for name in ("down", "round", "s_i_seq"):
        assert f'mismatched or renamed sequence on subscriber ("public.{name}")' in ended.stderr
    one_error(ended, 3, 'sequence synchronization failed for subscription "s"', "pgsub refresh s --sequences")
    assert _positions(subdb, "shared") == [(101, True)]
    alters = [line.strip() for line in ended.stderr.splitlines() if "ALTER SEQUENCE" in line]
    assert len(alters) == 3
    for statement in alters:
        subdb.execute(statement[statement.index("ALTER SEQUENCE") :])
    _set(subscribed, "--allow-backward")
    assert _positions(subdb, *_OURS) == _positions(pubdb, *_OURS)


@pytest.mark.long
def test_a_sequence_that_is_missing_is_an_error_with_a_create_that_mends_it(subscribed: Cli, tables: Tables) -> None:
    pubdb, subdb = tables
    pubdb.execute("SELECT setval('down', -100)")
    subdb.execute("ALTER TABLE s ALTER d DROP DEFAULT; DROP SEQUENCE down")
    ended = subscribed("refresh", "s", "--sequences", "--dry-run")
    one_error(ended, 3, 'missing sequence on subscriber ("public.down")')
    create, use = _statements(ended.stderr, "CREATE SEQUENCE", "ALTER TABLE")
    subdb.execute(create)
    subdb.execute(use)
    _set(subscribed)
    assert _positions(subdb, "down") == [(-100, True)]


def test_a_publisher_does_not_move_a_sequence_that_no_subscribed_table_of_the_target_uses(
    subscribed: Cli, tables: Tables
) -> None:
    pubdb, subdb = tables
    pubdb.execute("ALTER TABLE s ALTER d SET DEFAULT nextval('stranger'); SELECT setval('stranger', 9000)")
    pubdb.execute("SELECT setval('shared', 101)")
    subdb.execute("CREATE TABLE unrelated (id int DEFAULT nextval('stranger'))")
    ended = subscribed("refresh", "s", "--sequences")
    one_error(ended, 3, 'no subscribed table on subscriber uses sequence "public.stranger"')
    assert _positions(subdb, "stranger", "shared") == [(1, False), (101, True)]
    [use] = _statements(ended.stderr, "ALTER TABLE")
    subdb.execute(use)
    _set(subscribed)
    assert _positions(subdb, "stranger") == [(9000, True)]


def test_an_identity_column_of_the_publisher_names_the_owner_that_its_sequence_needs(
    subscribed: Cli, tables: Tables
) -> None:
    pubdb, subdb = tables
    subdb.execute("ALTER TABLE s ALTER i DROP IDENTITY")
    pubdb.execute("SELECT setval('s_i_seq', 77)")
    ended = subscribed("refresh", "s", "--sequences")
    one_error(ended, 3, 'missing sequence on subscriber ("public.s_i_seq")')
    for statement in _statements(ended.stderr, "CREATE SEQUENCE", "ALTER SEQUENCE"):
        subdb.execute(statement)
    _set(subscribed)
    assert _positions(subdb, "s_i_seq") == [(77, True)]


def test_a_dry_run_sets_nothing(subscribed: Cli, tables: Tables) -> None:
    tables[0].execute("SELECT setval('shared', 101)")
    assert 'sequence "public.shared" would be set to 101' in _set(subscribed, "--dry-run")
    assert _positions(tables[1], "shared") == [(1, False)]


@pytest.mark.long
def test_options_about_tables_and_a_disabled_subscription_are_refused(subscribed: Cli) -> None:
    one_error(subscribed("refresh", "s", "--sequences", "--resync", "public.a"), 2, "--sequences cannot be used with")
    one_error(subscribed("refresh", "s", "--allow-backward"), 2, "--allow-backward needs --sequences")
    assert subscribed("disable", "s").returncode == 0
    one_error(
        subscribed("refresh", "s", "--sequences"), 3, "REFRESH SEQUENCES is not allowed for disabled subscriptions"
    )


@pytest.mark.long
def test_missing_privileges_on_both_sides_are_named_with_the_grants_that_mend_them(
    subscribed: Cli, tables: Tables
) -> None:
    pubdb, subdb = tables
    role = f"app_{subdb.name}"
    for database in tables:
        database.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    pubdb.execute("SELECT setval('shared', 101); SELECT setval('down', -100)")
    pubdb.execute(f"GRANT SELECT ON ALL SEQUENCES IN SCHEMA public TO {role}; REVOKE SELECT ON down FROM {role}")
    subdb.execute(f"GRANT SELECT, UPDATE ON down, round, s_id_seq, s_i_seq TO {role}")
    subdb.execute(f"GRANT USAGE ON SCHEMA pgsub TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA pgsub TO {role}")
    try:
        words = ("s", "--connection", make_conninfo(pubdb.conninfo, user=role))
        assert subscribed("alter", *words, "--target", make_conninfo(subdb.conninfo, user=role)).returncode == 0
        ended = subscribed("refresh", "s", "--sequences")
        one_error(ended, 3, "sequence synchronization failed")
        assert 'insufficient privileges on publisher sequence ("public.down")' in ended.stderr
        assert 'insufficient privileges on subscriber sequence ("public.shared")' in ended.stderr
        for database, privileges in ((pubdb, "GRANT SELECT ON"), (subdb, "GRANT SELECT, UPDATE ON")):
            [grant] = [line for line in ended.stderr.splitlines() if privileges in line]
            database.execute(grant[grant.index("GRANT") :])
        _set(subscribed)
        assert _positions(subdb, "shared", "down") == [(101, True), (-100, True)]
        back = ("--connection", pubdb.conninfo, "--target", subdb.conninfo)
        assert subscribed("alter", "s", *back).returncode == 0
    finally:
        for database in tables:
            database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_value_is_set_as_the_owner_of_the_sequence(subscribed: Cli, tables: Tables) -> None:
    pubdb, subdb = tables
    owner = f"owner_{subdb.name}"
    subdb.execute(
        f"CREATE ROLE {owner}; GRANT USAGE ON SCHEMA public TO {owner}; ALTER SEQUENCE shared OWNER TO {owner}"
    )
    try:
        subdb.execute(f"REVOKE UPDATE ON shared FROM {owner}")
        pubdb.execute("SELECT setval('shared', 101)")
        one_error(subscribed("refresh", "s", "--sequences"), 11, "permission denied for sequence shared")
        subdb.execute(f"GRANT UPDATE ON shared TO {owner}")
        _set(subscribed)
        assert _positions(subdb, "shared") == [(101, True)]
    finally:
        subdb.execute(f"REASSIGN OWNED BY {owner} TO CURRENT_USER; DROP OWNED BY {owner}; DROP ROLE {owner}")


def test_sequences_of_the_ledger_are_never_set(subscribed: Cli, tables: Tables) -> None:
    pubdb, subdb = tables
    [(name,)] = subdb.rows(
        "SELECT relname FROM pg_class WHERE relkind = 'S' AND relnamespace = 'pgsub'::regnamespace LIMIT 1"
    )
    pubdb.execute(
        f"CREATE SCHEMA pgsub; CREATE SEQUENCE pgsub.{name}; ALTER TABLE s ADD x int DEFAULT nextval('pgsub.{name}')"
    )
    said = f'cannot use relation "pgsub.{name}" as logical replication target'
    ended = subscribed("refresh", "s", "--sequences")
    one_error(ended, 3, "sequence synchronization failed")
    assert said in ended.stderr


@pytest.mark.long
def test_partitions_have_the_sequences_of_their_table(cli: Cli, tables: Tables) -> None:
    pubdb, subdb = tables
    for database in tables:
        database.execute("CREATE TABLE whole (id serial, k int) PARTITION BY LIST (k)")
        database.execute("CREATE TABLE part PARTITION OF whole FOR VALUES IN (1)")
    pubdb.execute("ALTER PUBLICATION p ADD TABLE part; INSERT INTO whole (k) SELECT 1 FROM generate_series(1, 7)")
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
    _set(cli)
    assert _positions(subdb, "whole_id_seq") == [(7, True)]
