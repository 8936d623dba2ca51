"""pgsub conflicts and pgsub disable-on-error: what they print, refuse and write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgsub.catalog import conflicts
from pgsub.catalog.rows import ConflictRow

STOPPED = ConflictRow(
    *(5, "orders", "insert_exists", "public", "a.b", "stopped"),
    index_name="a_pkey",
    key="(id)=(1)",
    remote_tuple={"id": "1", "v": "theirs\x1b[31m\nx", "w": None},
    remote_xid=743,
    finish_lsn=0x14C0378,
    message='conflict detected on relation "public.a.b": conflict=insert_exists',
    detail='Key already exists in unique index "a_pkey", modified in transaction 9.\nKey (id)=(1).',
    context="processing remote data",
    local_conflicts=[
        {
            **{"index": "a_pkey", "key": "(id)=(1)", "xid": 9, "commit_ts": "2026-01-01 10:00:00+00"},
            **{"origin": "pgsub_7", "identical": False, "row": {"id": "1", "v": "mine", "w": None, "own": "x"}},
        }
    ],
)
MISSING = ConflictRow(
    *(5, "orders", "delete_missing", "public", "t", "skipped"),
    key="(id)=(2)",
    replica_identity={"id": "2"},
    finish_lsn=0x20,
    event=1,
)


@pytest.fixture
def two(store):
    """Ids of a stop that was met twice and of a missing row."""
    store.add_conflict(STOPPED)
    return store.add_conflict(STOPPED), store.add_conflict(MISSING)


def _table(text):
    return [line.split("\t") for line in text.splitlines()]


def test_the_list_has_the_newest_first(pgsub, two):
    head, missing, stopped = _table(pgsub("conflicts", "list", "orders").stdout)
    assert head[0] == "id" and dict(zip(head, stopped, strict=True)) | {"last_at": ""} == {
        **{"id": str(two[0]), "last_at": "", "conflict_type": "insert_exists", "relation": "public.a.b"},
        **{"key": "(id)=(1)", "action": "stopped", "attempts": "2", "identical": "f", "finish_lsn": "0/14C0378"},
    }
    assert missing[0] == str(two[1]) and "skipped" in missing


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--type", "delete_missing"], [1]),
        (["--table", "public.a.b"], [0]),
        (["--table", "public.a"], []),
        (["--since", "1h"], [1, 0]),
        (["--since", "0s"], []),
        (["--limit", "1"], [1]),
    ],
)
def test_the_list_is_chosen_by_type_table_time_and_number(pgsub, two, valid, options, found):
    document = valid("conflicts", pgsub("conflicts", "list", "orders", *options, "--json").stdout)
    assert [one["id"] for one in document["conflicts"]] == [two[n] for n in found]
    assert document["more"] is (options == ["--limit", "1"])


def test_both_versions_are_shown_side_by_side_and_what_differs_is_marked(pgsub, two, valid):
    shown = pgsub("conflicts", "show", "orders", str(two[0])).stdout
    assert 'unique index "a_pkey", key (id)=(1): written by origin "pgsub_7" in transaction 9 at 2026' in shown
    at = shown.index("column\t")
    assert _table(shown[at:])[:5] == [
        ["column", "remote", "local", "differs"],
        ["id", "1", "1", ""],
        ["v", r"theirs\x1b[31m\nx", "mine", "*"],
        ["w", "null", "null", ""],
        ["own", "", "x", ""],
    ]
    assert shown.endswith("CONTEXT:  processing remote data\n") and "\x1b" not in shown
    document = valid("conflicts", pgsub("conflicts", "show", "orders", str(two[0]), "--json").stdout)["conflict"]
    assert document["local_conflicts"][0]["differs"] == ["v"]
    assert document["remote_tuple"]["v"] == "theirs\x1b[31m\nx"


def test_a_missing_row_shows_what_it_was_searched_by(pgsub, two, valid):
    shown = pgsub("conflicts", "show", "orders", str(two[1])).stdout
    assert ["id", "2", "", ""] in _table(shown)
    assert valid("conflicts", pgsub("conflicts", "show", "orders", str(two[1]), "--json").stdout)["conflict"]


def test_what_the_bound_took_is_told(pgsub, store, monkeypatch):
    monkeypatch.setattr(conflicts, "KEEP", 2)
    store.add_conflicts([replace(MISSING, event=number) for number in range(5)])
    ended = pgsub("conflicts", "list", "orders")
    assert len(_table(ended.stdout)) == 3
    assert "3 older conflicts were removed from the record" in ended.stderr and "are shown" not in ended.stderr


@pytest.mark.parametrize(
    ("limit", "told"), [("1", "only the newest conflict is shown"), ("2", "only the newest 2 conflicts are shown")]
)
def test_a_list_that_the_limit_cut_off_is_told_in_the_singular_or_plural(pgsub, store, limit, told):
    store.add_conflicts([replace(MISSING, event=number) for number in range(3)])
    ended = pgsub("conflicts", "list", "orders", "--limit", limit)
    assert ended.stderr.splitlines() == [f"NOTICE:  {told}", "HINT:  Show more with --limit."]
    assert "shown" not in pgsub("conflicts", "list", "orders", "--limit", "3").stderr


def test_of_what_origin_advance_left_out_no_replay_is_offered(pgsub, store):
    number = str(store.add_conflict(replace(STOPPED, worker="apply")))
    store.conflicts_passed(5, "apply", 0x14C0379, conflicts.SKIPPED)
    assert f"pgsub conflicts replay orders {number}\n" in pgsub("conflicts", "show", "orders", number).stdout
    advance = {"from": "0/14C0000", "to": "0/14C0379", "outcome": "done"}
    store.journal("origin-advance", 5, "orders", advance)
    assert "replay" not in pgsub("conflicts", "show", "orders", number).stdout


def test_the_record_outlives_its_subscription(pgsub, store, two):
    store.remove_subscription(5)
    assert len(_table(pgsub("conflicts", "list", "orders").stdout)) == 3
    assert pgsub("conflicts", "show", "orders", str(two[0])).returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["list", "nobody"], 3, 'subscription "nobody" does not exist'),
        (["show", "orders", "99"], 3, 'subscription "orders" has no conflict 99'),
        (["show", "bills", "1"], 3, 'subscription "bills" has no conflict 1'),
        (["show", "orders"], 2, "pgsub conflicts show needs an ID"),
        (["list", "orders", "1"], 2, "pgsub conflicts list takes no ID"),
        (["play", "orders"], 2, '"play" is not an action'),
        (["list", "orders", "--type", "update_deleted"], 2, '"update_deleted" is not a conflict type'),
        (["show", "orders", "1", "--type", "update_missing"], 2, "takes no --type"),
        (["list", "orders", "--limit", "0"], 2, "--limit"),
    ],
)
def test_what_makes_no_sense_is_refused(pgsub, two, words, code, said):
    ended = pgsub("conflicts", *words)
    assert (ended.returncode, ended.stdout) == (code, "") and said in ended.stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["orders"], "pgsub conflicts list orders"),
        (["orders", "7"], "pgsub conflicts show orders 7"),
        (["lst", "orders"], "pgsub conflicts list orders"),
        (["list"], "pgsub conflicts --help"),
        (["list", "orders", "1"], "pgsub conflicts show orders 1"),
    ],
)
def test_a_command_that_lacks_a_word_ends_with_the_one_that_was_meant(pgsub, two, words, meant):
    ended = pgsub("conflicts", *words)
    assert ended.returncode == 2 and ended.stderr.splitlines()[-1] == meant


def test_a_name_that_does_not_exist_leads_to_those_that_do(pgsub, store):
    assert 'HINT:  Did you mean "orders"?\npgsub status\n' in pgsub("skip-lsn", "order", "--yes").stderr
    assert "HINT:  See which exist.\npgsub status\n" in pgsub("conflicts", "list", "nobody").stderr


def test_disable_on_error_is_set_and_journalled_once(pgsub, store):
    for setting, on in (("on", True), ("off", False)):
        assert pgsub("disable-on-error", "orders", setting).stderr == ""
        assert store.subscription("orders").disable_on_error is on
        assert store.journal_rows(5)[0].detail == {"on": on}
    again = pgsub("disable-on-error", "orders", "off")
    assert again.returncode == 0 and 'disable_on_error of subscription "orders" is already off' in again.stderr
    assert len(store.journal_rows(5)) == 2
    assert pgsub("disable-on-error", "orders", "perhaps").returncode == 2
    assert pgsub("disable-on-error", "nobody", "on").returncode == 3
