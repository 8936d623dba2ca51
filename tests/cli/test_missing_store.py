"""A state folder that does not exist, mistyped or another user's: nothing is created in it, and nothing is healthy."""

from __future__ import annotations

import pytest
from fix_program import one_error

from pgsub.cli.app import program
from pgsub.cli.command_tree.tree import describe

#: Commands that need the subscription that they name.
_OF_ONE = (
    ("status", "s"),
    ("status", "s", "--check"),
    ("status", "--runbook", "s"),
    ("status", "s", "--view", "pg_subscription_rel"),
    ("status", "s", "--view", "pg_replication_slots"),
    ("wait", "s", "--for", "synced"),
    ("run", "s"),
    ("run", "s", "--until-caught-up"),
    ("verify", "s"),
    ("verify", "s", "--repair", "--yes"),
    ("reconcile", "s", "--yes"),
    ("switchover", "s", "--dry-run"),
    ("switchover", "s", "--status"),
    ("switchover", "s", "--yes"),
    ("skip-lsn", "s", "--preview"),
    ("skip-lsn", "s", "--conflict", "delete_missing", "--table", "a.b", "--limit", "5", "--yes"),
    ("skip-lsn", "s", "0/10", "--yes"),
    ("origin-advance", "s", "0/10", "--yes"),
    ("conflicts", "list", "s"),
    ("conflicts", "show", "s", "1"),
    ("conflicts", "replay", "s", "1"),
    ("conflicts", "prune", "s", "--replayed", "--yes"),
    ("disable-on-error", "s", "on"),
    ("enable", "s"),
    ("disable", "s"),
    ("refresh", "s"),
    ("refresh", "s", "--dry-run"),
    ("refresh", "s", "--sequences"),
    ("alter", "s", "--binary"),
    ("drop", "s", "--yes"),
)
#: Commands that say something without a subscription, and how they are called.
_OF_NONE = {"metrics": (), "config": (), "version": (), "completion": ("bash",)}


@pytest.mark.parametrize("args", _OF_ONE, ids=" ".join)
def test_a_command_about_a_subscription_names_the_folder_and_creates_nothing(pgsub, folder, args):
    said = one_error(pgsub(*args), 3, 'subscription "s" does not exist')
    assert str(folder) in said
    assert not folder.exists()


def test_status_without_a_subscription_says_where_it_looked_and_creates_nothing(pgsub, folder, valid):
    shown = pgsub("status")
    assert shown.returncode == 0
    assert f'no subscription exists in state folder "{folder}"' in shown.stderr
    assert valid("status", pgsub("status", "--json").stdout)["subscriptions"] == []
    assert pgsub("status", "--reset-stats").returncode == 0
    assert pgsub("status", "--view", "pg_subscription").returncode == 0
    assert not folder.exists()


@pytest.mark.parametrize("more", [(), ("--view", "pg_subscription"), ("--expanded",)], ids=" ".join)
def test_watching_an_empty_state_folder_ends_at_once(pgsub, folder, more):
    assert str(folder) in one_error(pgsub("status", "--watch", *more), 3, "no subscription exists in state folder")
    assert not folder.exists()


def test_a_check_without_a_subscription_is_never_healthy(pgsub, folder):
    checked = pgsub("status", "--check")
    assert checked.returncode == 3
    assert "pgsub: warning: no subscription exists\n" in checked.stderr
    assert not folder.exists()


def test_a_check_of_a_store_whose_last_subscription_was_dropped_is_not_healthy_either(pgsub, store):
    for name in ("orders", "bills"):
        store.remove_subscription(store.subscription(name).subid)
    assert pgsub("status", "--check").returncode == 3


def test_a_bounded_run_without_a_subscription_ends_with_3(pgsub, folder):
    for bound in (("--until-caught-up",), ("--until-lsn", "0/10")):
        one_error(pgsub("run", *bound), 3, f'no subscription exists in state folder "{folder}"')
        assert not folder.exists()


def test_a_bounded_run_whose_subscriptions_are_all_disabled_ends_with_3_and_says_how_to_enable_them(pgsub, store):
    store.alter(5, enabled=False)
    for bound in (("--until-caught-up",), ("--until-lsn", "0/10")):
        said = one_error(pgsub("run", *bound), 3, 'subscriptions "bills", "orders" are disabled')
        assert said.splitlines()[-2:] == ["pgsub enable bills", "pgsub enable orders"]


def test_every_command_of_the_program_is_tried_here_or_makes_what_it_needs(pgsub, folder):
    """A command that is added to the program is added here, too."""
    tried = {args[0] for args in _OF_ONE}
    assert {one.name for one in describe(program()).commands} == {*tried, *_OF_NONE, "create", "demo"}


@pytest.mark.parametrize("args", [(name, *more) for name, more in _OF_NONE.items()], ids=" ".join)
def test_a_command_about_no_subscription_creates_nothing(pgsub, folder, args):
    shown = pgsub(*args)
    assert shown.returncode == 0
    assert "pgsub_subscription_state{" not in shown.stdout  # which the alert PgsubNoSubscription notices
    assert not folder.exists()
