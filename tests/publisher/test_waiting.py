"""Promises of a slot's creation that waits: it says for whom, and it can be ended without leaving a slot."""

from __future__ import annotations

import itertools
import threading
import time

import patience
import pytest
from embedded import Server
from fix_servers import Database

from pgsub.common.errors import Fenced, TimeoutExpired
from pgsub.publisher import slots
from pgsub.publisher.connect import connect
from pgsub.publisher.slot_creation import SlotWatch, long_transactions

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server():
    """A publisher of this module's own: on a shared one a writing transaction would hold up other tests' slots."""
    with Server(fast=True, settings={"max_prepared_transactions": 5}) as made:
        yield made


@pytest.fixture
def pubdb(server):
    database = Database(server, f"w_{next(_numbers)}")
    database.execute("CREATE TABLE t (a int)")
    yield database
    database.drop()


@pytest.fixture
def replication(pubdb):
    with connect(pubdb.conninfo, application_name="s", replication=True) as connection:
        yield connection


class LogText:
    """Collects reports; :meth:`first` waits for one."""

    def __init__(self):
        self.all = []
        self.some = threading.Event()

    def __call__(self, message, detail, hint):
        self.all.append((message, detail, hint))
        self.some.set()


def _slots(pubdb):
    return [name for (name,) in pubdb.rows("SELECT slot_name FROM pg_replication_slots")]


def _create(pubdb, replication, said, **options):
    with SlotWatch(replication, pubdb.conninfo, "w_slot", said, **{"after": 0.05, **options}):
        return slots.create_slot(replication, "w_slot")


def test_a_writing_transaction_that_is_waited_for_is_named_once_with_all_that_is_known(pubdb, replication):
    said = LogText()
    with pubdb.connect(application_name="accounts") as writer:
        writer.autocommit = False
        writer.execute("INSERT INTO t\n   SELECT 1")
        pid = writer.info.backend_pid

        def commit():
            assert said.some.wait(patience.SECONDS)
            time.sleep(1.5)  # time for another look, which must not say it again
            writer.commit()

        ending = threading.Thread(target=commit)
        ending.start()
        assert _create(pubdb, replication, said) > 0
        ending.join()
    ((message, detail, hint),) = said.all
    assert message == f'creation of replication slot "w_slot" on the publisher waits for the transaction of PID {pid}'
    assert detail.startswith(f'User "postgres", application "accounts", database "{pubdb.name}", open since 20')
    assert detail.endswith(", idle in transaction: INSERT INTO t SELECT 1")
    assert hint.endswith(f"\nSELECT pg_terminate_backend({pid});")
    assert _slots(pubdb) == ["w_slot"]


def test_a_prepared_transaction_that_is_waited_for_is_named_by_its_gid(pubdb, replication):
    pubdb.execute("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'it''s me'")
    said = LogText()

    def finish():
        assert said.some.wait(patience.SECONDS)
        with pubdb.connect() as other:
            other.execute(said.all[0][2].splitlines()[-1])  # as the hint says

    ending = threading.Thread(target=finish)
    ending.start()
    assert _create(pubdb, replication, said) > 0
    ending.join()
    ((message, detail, hint),) = said.all
    assert message.endswith(' waits for prepared transaction "it\'s me"')
    assert detail.startswith(f'User "postgres", database "{pubdb.name}", prepared since 20') and detail.endswith("s).")
    assert hint.splitlines()[1:] == ["COMMIT PREPARED 'it''s me';", "ROLLBACK PREPARED 'it''s me';"]


def test_what_is_waited_for_in_a_database_of_another_encoding_is_named_too(pubdb, replication, server):
    other = Database(server, f"{pubdb.name}_latin1", "LATIN1")
    said = LogText()
    with other.connect(client_encoding="LATIN1") as writer:
        writer.execute("BEGIN; SELECT txid_current(); PREPARE TRANSACTION 'caf\u00e9'")
        writer.execute("BEGIN; SELECT txid_current() -- caf\u00e9")
        found = long_transactions(replication, 0)

        def finish():
            assert said.some.wait(patience.SECONDS)
            writer.execute("COMMIT")
            writer.execute("ROLLBACK PREPARED 'caf\u00e9'")

        ending = threading.Thread(target=finish)
        ending.start()
        assert _create(pubdb, replication, said) > 0
        ending.join()
    other.drop()
    assert {one.gid or one.query for one in found} == {"caf\\xe9", "BEGIN; SELECT txid_current() -- caf\\xe9"}
    assert any(detail.endswith("-- caf\\xe9") for _, detail, _ in said.all)


@pytest.mark.parametrize("after", [0.05, 60], ids=["looked before", "not yet looked"])
def test_a_deadline_ends_the_creation_names_the_culprit_and_leaves_no_slot(pubdb, replication, after):
    with pubdb.connect() as writer:
        writer.autocommit = False
        writer.execute("INSERT INTO t VALUES (1)")
        pid = writer.info.backend_pid
        with pytest.raises(TimeoutExpired, match="timeout while creating replication slot") as raised:
            _create(pubdb, replication, LogText(), after=after, deadline=time.monotonic() + 0.5)
        assert f"It waits for the transaction of PID {pid}. " in raised.value.detail
        assert raised.value.hint.endswith(f"SELECT pg_terminate_backend({pid});")
        assert _slots(pubdb) == []
        writer.rollback()
    assert replication.execute("SELECT 1").fetchone() == (1,), "the session can be used again"


def test_whoever_sets_stop_ends_the_creation_and_leaves_no_slot(pubdb, replication):
    stop = threading.Event()
    with pubdb.connect() as writer:
        writer.autocommit = False
        writer.execute("INSERT INTO t VALUES (1)")
        said = LogText()
        threading.Thread(target=lambda: said.some.wait(patience.SECONDS) and stop.set()).start()
        with pytest.raises(Fenced):
            _create(pubdb, replication, said, stop=stop)
        assert len(said.all) == 1 and _slots(pubdb) == []


def test_a_role_that_may_not_see_others_still_learns_the_pid(pubdb, server):
    role = f"{pubdb.name}_role"
    pubdb.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    conninfo = server.conninfo(pubdb.name, role)
    said = LogText()
    with pubdb.connect(application_name="accounts") as writer:
        writer.autocommit = False
        writer.execute("INSERT INTO t VALUES (1)")
        with (
            connect(conninfo, application_name="s", replication=True) as limited,
            SlotWatch(limited, conninfo, "w_slot", said, after=0.05),
        ):
            threading.Thread(target=lambda: said.some.wait(patience.SECONDS) and writer.rollback()).start()
            slots.create_slot(limited, "w_slot")
        pid = writer.info.backend_pid
    ((message, detail, _),) = said.all
    assert message.endswith(f"PID {pid}") and 'application "accounts"' in detail
    pubdb.execute(f"DROP ROLE {role}")


def test_without_a_second_connection_the_creation_goes_on_and_says_what_is_missing(pubdb, replication):
    said = LogText()
    with pubdb.connect() as writer:
        writer.autocommit = False
        writer.execute("INSERT INTO t VALUES (1)")
        threading.Thread(target=lambda: said.some.wait(patience.SECONDS) and writer.rollback()).start()
        with SlotWatch(replication, "host=127.0.0.1 port=1 dbname=x", "w_slot", said, after=0.05):
            slots.create_slot(replication, "w_slot")
    ((_, detail, _),) = said.all
    assert detail.startswith("Which ones could not be seen: could not connect to the publisher: ")


def test_a_creation_that_does_not_wait_says_nothing_and_opens_no_second_connection(pubdb, replication):
    said = LogText()
    with SlotWatch(replication, "host=127.0.0.1 port=1 dbname=x", "w_slot", said):
        slots.create_slot(replication, "w_slot")
    assert said.all == []


def test_long_transactions_are_those_that_wrote_and_are_old_enough(pubdb):
    pubdb.execute("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'old'")
    with pubdb.connect() as writer, pubdb.connect() as reader, connect(pubdb.conninfo, application_name="x") as asking:
        writer.autocommit = reader.autocommit = False
        writer.execute("INSERT INTO t VALUES (2)")
        reader.execute("SELECT * FROM t")
        found = long_transactions(asking, 0)
        assert [(one.pid, one.gid) for one in found] == [(None, "old"), (writer.info.backend_pid, None)]
        assert long_transactions(asking, 3600) == []
        writer.rollback()
    pubdb.execute("ROLLBACK PREPARED 'old'")
