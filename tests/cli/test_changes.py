"""pgsub enable, disable and drop: what they write, say and ask."""

import pexpect
import pytest
from terminal import terminal


def test_disable_and_enable_change_the_subscription_and_write_the_journal(pgsub, store):
    assert pgsub("disable", "orders").returncode == 0
    assert not store.subscription("orders").enabled
    assert pgsub("enable", "orders").returncode == 0
    assert store.subscription("orders").enabled
    assert [row.action for row in store.journal_rows(5)] == ["enable", "disable"]


@pytest.mark.parametrize(("command", "name"), [("enable", "orders"), ("disable", "bills")])
def test_what_is_so_already_is_a_notice_and_0_and_no_row_in_the_journal(pgsub, store, command, name):
    ended = pgsub(command, name)
    assert ended.returncode == 0
    assert ended.stderr == f'NOTICE:  subscription "{name}" is already {command}d\n'
    assert store.journal_rows() == []


def test_enabling_without_a_slot_name_is_refused_in_the_servers_words(pgsub, store):
    ended = pgsub("enable", "bills")
    assert ended.returncode == 3
    assert ended.stderr == "pgsub: error: cannot enable subscription that does not have a slot name\n"


def test_enabling_what_nobody_serves_says_so(pgsub, store):
    store.alter(5, enabled=False)
    assert "no pgsub run serves it" in pgsub("enable", "orders").stderr
    store.alter(5, enabled=False)
    assert pgsub("-q", "enable", "orders").stderr == ""


def test_enabling_what_is_served_says_nothing(pgsub, store, served):
    store.alter(5, enabled=False)
    assert pgsub("enable", "orders").stderr == ""


@pytest.mark.parametrize("command", ["enable", "disable"])
def test_an_unknown_name_is_code_3(pgsub, store, command):
    assert pgsub(command, "nobody").returncode == 3


def test_drop_without_a_terminal_needs_yes_and_gives_the_line_to_paste(pgsub, store):
    ended = pgsub("drop", "orders", "--keep-slot")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == "pgsub drop orders --keep-slot --yes"
    assert store.subscription("orders").enabled


def test_drop_on_a_terminal_asks_for_the_name_and_anything_else_cancels(environment, store):
    child = terminal(["-m", "pgsub", "drop", "orders"], environment)
    child.expect('replication slot on the publisher "orders" is dropped')
    child.expect("Type the name of the subscription to continue: ")
    child.sendline("yes")
    child.expect("canceled")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 1
    assert store.subscription("orders").enabled


def test_the_end_of_input_at_the_question_cancels(environment, store):
    child = terminal(["-m", "pgsub", "drop", "orders"], environment)
    child.expect("to continue: ")
    child.sendeof()
    child.expect("canceled")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 1


def test_on_the_way_back_it_is_said_which_server_is_called_the_publisher(pgsub, store):
    store.alter(5, name="orders_back", connection="host=127.0.0.1 port=1 dbname=new", target="host=127.0.0.1 port=2")
    said = pgsub("switchover", "orders", "--back", "--status").stderr.splitlines()
    servers = 'the publisher is "host=127.0.0.1 port=1 dbname=new", and the target "host=127.0.0.1 port=2"'
    assert said[0] == f"NOTICE:  in this direction {servers}"
    assert "in this direction" not in pgsub("switchover", "orders_back", "--status").stderr


def test_drop_if_exists_of_nothing_is_a_notice(pgsub, store):
    ended = pgsub("drop", "nobody", "--if-exists", "--yes")
    assert ended.returncode == 0
    assert ended.stderr == 'NOTICE:  subscription "nobody" does not exist, skipping\n'
