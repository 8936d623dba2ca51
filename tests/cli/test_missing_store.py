"""A state folder that does not exist, mistyped or another user's: nothing is created in it, and nothing is healthy."""

from __future__ import annotations

import pytest
from fix_program import one_error


@pytest.mark.parametrize(
    "args",
    [
        ("status", "s"),
        ("status", "s", "--check"),
        ("status", "--runbook", "s"),
        ("wait", "s", "--for", "synced"),
        ("skip-lsn", "s", "0/10", "--yes"),
        ("origin-advance", "s", "0/10", "--yes"),
        ("conflicts", "list", "s"),
        ("disable-on-error", "s", "on"),
        ("enable", "s"),
        ("disable", "s"),
        ("refresh", "s"),
        ("alter", "s", "--binary"),
        ("drop", "s", "--yes"),
    ],
    ids=" ".join,
)
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
    one_error(pgsub("run", "--until-caught-up"), 3, f'no subscription exists in state folder "{folder}"')
