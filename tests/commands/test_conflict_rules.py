"""``--on-conflict``: what is a rule and what is none, where rules are shown, and who heeds them, from when on."""

from __future__ import annotations

import contextlib
import json

import pytest
from fix_program import one_error

from pgsub.commands.preflight.servers import times_of_prepared
from pgsub.commands.preflight.table_warnings import values_left_out
from pgsub.common.conflict_rules import ALLOWED, RESOLUTIONS, merged, of_table, parse
from pgsub.common.errors import UsageError
from pgsub.publisher import connect as publisher
from pgsub.publisher.tables import describe_tables


@pytest.mark.parametrize("conflict", ALLOWED)
@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_a_rule_is_taken_or_refused_with_the_reason_and_what_there_is(conflict, resolution):
    text = f"{conflict}={resolution}"
    if resolution in ALLOWED[conflict]:
        assert str(parse(text)) == text
        return
    with pytest.raises(UsageError) as met:
        parse(text)
    assert met.value.detail and ", ".join(ALLOWED[conflict]) in (met.value.hint or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("insert_exists", "invalid conflict rule"),
        ("t:insert_exists=skip", "invalid conflict rule"),
        (":insert_exists=skip", "invalid conflict rule"),
        ("=skip", "invalid conflict rule"),
        ("insert_exist=skip", 'unknown conflict type "insert_exist"'),
        ("insert_exists=ignore", 'unknown resolution "ignore"'),
        ("update_deleted=skip", 'conflict type "update_deleted" cannot be resolved'),
    ],
)
def test_what_is_no_rule_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse(text)


def test_a_table_without_its_schema_is_told_with_it():
    with pytest.raises(UsageError) as met:
        parse("orders:insert_exists=skip")
    assert met.value.detail == 'Table "orders" needs its schema, as in public.orders.'


def test_a_rule_replaces_the_one_of_its_type_and_table_and_default_takes_it_back():
    rules = merged((), ["insert_exists=skip", 'a:b.c=d"e:insert_exists=error', "public.t:identical=keep_local"])
    assert of_table(rules, "public", "t") == (("insert_exists", "skip"), ("identical", "keep_local"))
    assert of_table(rules, "a:b", 'c=d"e') == ()  # error is what the server does
    changed = merged(rules, ["insert_exists=default", "public.t:insert_exists=apply_remote"])
    assert of_table(changed, "public", "o") == ()
    assert dict(of_table(changed, "public", "t")) == {"insert_exists": "apply_remote", "identical": "keep_local"}
    with pytest.raises(UsageError, match="more than once"):
        merged((), ["insert_exists=skip", "insert_exists=error"])


@pytest.mark.long
def test_rules_are_stored_shown_and_altered_and_what_has_no_sense_changes_nothing(cli, make_cli, tables):
    given = ("--on-conflict", "insert_exists=keep_local", "--on-conflict", "public.nowhere:update_missing=skip")
    one_error(cli.create("s", "--no-wait", "--on-conflict", "delete_missing=apply_remote"), 2, "cannot be resolved by")
    ended = cli.create("s", "--no-wait", "--no-copy-data", *given)
    assert ended.returncode == 0, ended.stderr
    assert 'conflict rules name table "public.nowhere", which is not part of the subscription' in ended.stderr
    assert cli.status("s")["pgsub_on_conflict"] == ["insert_exists=keep_local", "public.nowhere:update_missing=skip"]
    ended = cli("alter", "s", "--on-conflict", "insert_exists=default", "--on-conflict", "public.a:insert_exists=error")
    assert (ended.returncode, ended.stderr) == (0, "")
    taken_back = cli("alter", "s", "--on-conflict", "public.nowhere:update_missing=default")
    assert (taken_back.returncode, taken_back.stderr) == (0, "")
    one_error(cli("alter", "s", "--on-conflict", "identical=last_update_wins"), 2, "cannot be resolved by")
    assert cli.status("s")["pgsub_on_conflict"] == ["public.a:insert_exists=error"]
    assert "public.a:insert_exists=error" in cli("status", "s", "-x").stdout
    [detail] = cli.sql("SELECT detail FROM pgsub_journal ORDER BY id DESC LIMIT 1")[0]
    assert json.loads(detail) == {"on_conflict": ["public.a:insert_exists=error"]}
    timed = ("--on-conflict", "update_origin_differs=last_update_wins")
    assert cli("alter", "s", *timed).returncode == 0
    # the other server does not track commit times
    other = make_cli(tables[1].conninfo, tables[0].conninfo)
    one_error(other.create("o", "--no-wait", *timed), 3, "needs track_commit_timestamp on the target")


def test_a_rule_that_compares_times_is_warned_of_with_two_phase():
    timed, others = "public.t:update_origin_differs=last_update_wins", "insert_exists=apply_remote"
    [found] = times_of_prepared((others, timed), enabled=True)
    assert found.message == f'conflict rule "{timed}" compares the time of PREPARE for a prepared transaction'
    assert times_of_prepared((others, timed), enabled=False) == times_of_prepared((others,), enabled=True) == []


@pytest.mark.long
def test_create_and_alter_warn_of_rules_that_compare_times_with_two_phase(cli, tables):
    timed = ("--on-conflict", "insert_exists=last_update_wins")
    ended = cli.create("s", "--no-wait", "--no-copy-data", "--two-phase", *timed)
    assert (ended.returncode, "compares the time of PREPARE" in ended.stderr) == (0, True), ended.stderr
    more = ("alter", "s", "--on-conflict", "identical=keep_local", "--on-conflict")
    assert "PREPARE" not in cli(*more, "update_missing=skip").stderr
    assert "compares the time of PREPARE" in cli(*more, "update_exists=last_update_wins").stderr
    assert cli(*more, "multiple_unique_conflicts=last_update_wins", "--strict").returncode == 3
    assert len(cli.status("s")["pgsub_on_conflict"]) == 4


@pytest.mark.long
def test_a_rule_lets_a_running_subscription_pass_what_stops_it(served, tables):
    cli, name = served
    pubdb, subdb = tables
    subdb.execute("INSERT INTO b VALUES (1, 10)")
    pubdb.execute("INSERT INTO b VALUES (1, 11)")
    assert cli("wait", name, "--for", "error", "--timeout", "1m").returncode == 0
    assert cli("alter", name, "--on-conflict", "public.b:insert_exists=apply_remote").returncode == 0
    subdb.wait("SELECT n::int FROM b", value=11)
    assert cli("wait", name, "--for", "caught-up", "--timeout", "1m").returncode == 0
    listed = json.loads(cli("conflicts", "list", name, "--json").stdout)["conflicts"]
    assert [(one["conflict_type"], one["action"]) for one in listed] == [("insert_exists", "applied")]


_LARGE = """
CREATE TABLE plain (id int PRIMARY KEY, t text); CREATE TABLE whole (id int PRIMARY KEY, t text);
CREATE TABLE small (id int PRIMARY KEY, c varchar(9)); CREATE TABLE numbers (id int PRIMARY KEY, n numeric);
CREATE TABLE keyed (t text PRIMARY KEY, n int);
CREATE TABLE parts (id int PRIMARY KEY, t jsonb) PARTITION BY RANGE (id);
CREATE TABLE part1 PARTITION OF parts FOR VALUES FROM (0) TO (9); CREATE TABLE part2 PARTITION OF parts DEFAULT;
ALTER TABLE whole REPLICA IDENTITY FULL; ALTER TABLE part1 REPLICA IDENTITY FULL;
CREATE PUBLICATION p FOR TABLE plain, whole, small, numbers, keyed, parts WITH (publish_via_partition_root);
CREATE PUBLICATION q FOR TABLE plain (id)
"""


def test_tables_are_named_whose_updates_may_win_by_a_rule_and_leave_out_large_values(pubdb):
    pubdb.execute(_LARGE)
    names = [("public", name) for name in ("plain", "whole", "small", "numbers", "keyed", "parts")]
    with contextlib.closing(publisher.connect(pubdb.conninfo, application_name="t")) as session:
        tables, part = (list(describe_tables(session, names, [one]).tables.values()) for one in ("p", "q"))

    def named(rule, among=tables):
        return [name for found in values_left_out(among, (rule,)) for name in found.tables]

    [found] = values_left_out(tables, ("insert_exists=last_update_wins", "update_origin_differs=last_update_wins"))
    assert found.tables == ("public.plain", "public.parts")
    assert (found.hint or "").splitlines()[1:] == [
        'ALTER TABLE "public"."plain" REPLICA IDENTITY FULL;',
        'ALTER TABLE "public"."part2" REPLICA IDENTITY FULL;',
    ]
    # only last_update_wins takes the value from the old row
    assert named("update_origin_differs=apply_remote") == ["public.plain", "public.whole", "public.parts"]
    assert named("public.parts:update_origin_differs=last_update_wins") == ["public.parts"]
    assert named("public.whole:update_origin_differs=last_update_wins") == []
    assert named("update_origin_differs=keep_local") == named("update_origin_differs=apply_remote", part) == []


@pytest.mark.long
def test_create_and_alter_warn_of_rules_by_which_updates_win_that_leave_out_large_values(cli, tables):
    rule, said = (
        ("--on-conflict", "update_origin_differs=last_update_wins"),
        'updates of table "public.a" on the publisher',
    )
    assert cli.create("s", "--no-wait", *rule, "--strict").returncode == 3
    ended = cli.create("s", "--no-wait", *rule)
    assert (ended.returncode, said in ended.stderr) == (0, True), ended.stderr
    assert said not in cli("alter", "s", *rule).stderr
    refused = cli("alter", "s", "--on-conflict", "update_origin_differs=apply_remote", "--strict")
    assert (refused.returncode, said in refused.stderr) == (3, True), refused.stderr
    assert said in cli("alter", "s", "--on-conflict", "update_origin_differs=apply_remote").stderr
    assert cli.status("s")["pgsub_on_conflict"] == ["update_origin_differs=apply_remote"]
