"""What callers of the state store rely on."""

import contextlib
import json
import sqlite3
import threading
from dataclasses import asdict, fields, replace

import pytest

from pgsub.catalog.rows import ConflictRow, CopyRow, ErrorRow, OriginRow, RelationRow, SlotRow, WorkerRow
from pgsub.catalog.store import StateStore
from pgsub.catalog.subscriptions import options, restored
from pgsub.catalog.times import wire_time
from pgsub.common.errors import (
    InternalError,
    StateStoreError,
    SubscriptionExists,
    SubscriptionNotFound,
)
from pgsub.common.subscription import Subscription

OTHER = Subscription(
    subid=2**31 - 1,
    name='q"\u00e4',
    connection="host=p user=repl",
    target="host=t user=app",
    publications=("a", "b"),
    slot_name="slot",
    enabled=False,
    binary=True,
    streaming="on",
    synchronous_commit="remote_apply",
    wal_receiver_timeout="5min",
    two_phase="p",
    disable_on_error=True,
    password_required=False,
    password_enforced=True,
    max_parallel_apply_workers=5,
    apply_workers=4,
    run_as_owner=True,
    origin="none",
    failover=True,
    messages=True,
    apply_mode="transactional",
    copy_atomic=True,
    skip_lsn=2**64 - 1,
    owner="app",
    dboid=16384,
    max_sync_workers=5,
    copy_workers=7,
    unavailable=("replication origins",),
    skips=("FFFFFFFF/FFFFFFFF whole",),
    on_conflict=("insert_exists=skip",),
    sequences=True,
    moves=3,
    generation=2,
    unrefreshed=True,
    recorded=6,
    table_set=7,
    way_back_of=4,
)


def test_every_field_of_a_subscription_comes_back_as_it_was_stored(store: StateStore) -> None:
    defaults = Subscription(1, "d", "", "", (), None)
    compared = [field.name for field in fields(Subscription) if field.compare]
    assert all(getattr(OTHER, name) != getattr(defaults, name) for name in compared)
    store.add_subscription(OTHER)
    assert store.subscription(OTHER.name) == OTHER
    assert store.subscription_by_id(OTHER.subid) == OTHER


def test_options_come_back_from_json_and_an_invalid_one_is_refused() -> None:
    given = json.loads(json.dumps(options(OTHER)))
    assert restored(given) == options(OTHER) and not {"connection", "target"} & given.keys()
    wrong = {"enabled": "yes", "streaming": "maybe", "publications": [], "copy_workers": "2", "on_conflict": [1]}
    for field, value in wrong.items():
        with pytest.raises(ValueError, match=field):
            restored({**given, field: value})


def test_every_field_but_the_id_can_be_altered(store: StateStore) -> None:
    changes = asdict(OTHER)
    del changes["subid"], changes["known_since"]
    store.alter(5, **changes)
    assert store.subscription_by_id(5) == replace(OTHER, subid=5)


def test_subscriptions_are_listed_by_name(store: StateStore) -> None:
    assert [subscription.name for subscription in store.subscriptions()] == ["bills", "orders"]


def test_a_missing_subscription_is_reported_in_the_servers_words(store: StateStore) -> None:
    with pytest.raises(SubscriptionNotFound, match=r'^subscription "x" does not exist$') as error:
        store.subscription("x")
    assert error.value.exit_code == 3
    assert store.subscription_by_id(99) is None
    with pytest.raises(SubscriptionNotFound):
        store.subscription("undecodable \udcff")


def test_a_name_is_taken_once(store: StateStore) -> None:
    with pytest.raises(SubscriptionExists, match=r'^subscription "orders" already exists$'):
        store.add_subscription(replace(OTHER, name="orders"))
    with pytest.raises(SubscriptionExists):
        store.alter(7, name="orders")
    assert [subscription.subid for subscription in store.subscriptions()] == [7, 5]


@pytest.mark.parametrize("field", ["oid", "colour"])
def test_altering_what_is_no_option_is_a_bug(store: StateStore, field: str) -> None:
    with pytest.raises(InternalError):
        store.alter(5, **{field: 1})


def test_only_changed_options_move_the_time_of_the_last_change(store: StateStore) -> None:
    def stamp() -> object:
        columns, rows = store.view("pg_subscription")
        return next(row[columns.index("pgsub_options_changed_at")] for row in rows if row[0] == 5)

    created = stamp()
    store.alter(5, enabled=False)
    store.alter(5, skip_lsn=0x10, two_phase="p", binary=False)
    assert (stamp(), store.subscription("orders").enabled) == (created, False)
    store.alter(5, binary=True)
    assert stamp() != created


@pytest.mark.parametrize(
    "conninfo",
    [
        "host=h password=secret",
        "host=h password = 'sec ret'",
        "sslpassword=x",
        "host=p scram_client_key=x",
        r"user='it\'s' password=x",
        "postgresql://u:secret@h/db",
        "postgres://u@h/db?password=secret",
    ],
)
def test_a_password_is_never_stored(store: StateStore, conninfo: str) -> None:
    with pytest.raises(InternalError, match="must not hold a password") as error:
        store.alter(5, target=conninfo)
    assert "sec" not in str(error.value)
    with pytest.raises(InternalError):
        store.add_subscription(replace(OTHER, connection=conninfo))


@pytest.mark.parametrize(
    "conninfo",
    ["host=h passfile=/x/password", "options='-c a.password=b'", "postgresql://u@[::1]:5432/db", "postgresql://h:1/d"],
)
def test_a_connection_string_without_a_password_is_stored(store: StateStore, conninfo: str) -> None:
    store.alter(5, target=conninfo)
    assert store.subscription("orders").target == conninfo


def test_relations_are_replaced_as_a_whole_and_read_by_name(store: StateStore) -> None:
    first = [RelationRow(2, "i", None, "b", "x"), RelationRow(1, "d", None, "a", "y")]
    store.put_relations(5, first)
    store.put_relations(7, first[:1])
    store.put_relations(5, [RelationRow(2, "r", 0x20, "b", "x"), RelationRow(3, "i", None, "a", "z")])
    assert store.relations(5) == [RelationRow(3, "i", None, "a", "z"), RelationRow(2, "r", 0x20, "b", "x")]
    assert store.relations(7) == first[:1]


@pytest.mark.parametrize("state", ["w", "c", "", "ready"])
def test_a_state_that_the_server_never_stores_is_refused(store: StateStore, state: str) -> None:
    with pytest.raises(InternalError):
        store.put_relations(5, [RelationRow(1, state, None, "a", "b")])


def test_what_the_launcher_puts_comes_back(store: StateStore) -> None:
    worker = WorkerRow("apply", 9, None, None, 1, "2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z", 2, "2026")
    copy = CopyRow(1, "a", "b", 9, 10, "db", bytes_processed=11, tuples_processed=12, chunks_done=1, chunks_total=4)
    slot = SlotRow("s", "pgoutput", "logical", "db", False, True, 9, 1, 2, "lost", -5, True, None, False, "wal_removed")
    store.put_server(5, 9, "db1")
    store.put_workers(5, [worker])
    store.put_copy_progress(5, [copy])
    store.put_slot(5, slot)
    store.put_origin(5, 3, 4)
    assert (store.workers(5), store.copy_progress(5), store.slot(5)) == ([worker], [copy], slot)
    assert store.origin(5) == OriginRow(3, 4)
    server = store.server(5)
    assert server is not None and (server.pid, server.host) == (9, "db1")
    store.put_workers(5, [])
    store.put_copy_progress(5, [])
    store.put_slot(5, None)
    store.clear_server(5)
    assert (store.workers(5), store.copy_progress(5), store.slot(5), store.server(5)) == ([], [], None, None)


def test_putting_what_is_there_already_writes_nothing(store: StateStore) -> None:
    rows = [RelationRow(1, "r", 0x20, "a", "b")]
    with contextlib.closing(sqlite3.connect(store.path)) as other:
        written = [other.execute("PRAGMA data_version").fetchone()]
        for _ in range(2):
            store.put_relations(5, rows)
            store.put_origin(5, 1, None)
            store.alter(5, enabled=True)
            written.append(other.execute("PRAGMA data_version").fetchone())
    assert written[0] != written[1] == written[2]


def test_a_batch_is_written_whole_or_not_at_all(store: StateStore) -> None:
    def half_of_it() -> None:
        with store.batch():
            store.put_origin(5, 1, None)
            store.put_origin(99, 1, None)

    with pytest.raises(SubscriptionNotFound, match=r"^subscription with OID 99 does not exist$"):
        half_of_it()
    assert store.origin(5) is None


def test_a_failed_part_of_a_batch_leaves_nothing_behind_when_the_batch_goes_on(store: StateStore) -> None:
    rows = [RelationRow(1, "i", None, "a", "b"), RelationRow(2, "x", None, "a", "c")]
    with store.batch():
        store.put_origin(5, 1, None)
        with store.batch():
            with pytest.raises(InternalError):
                store.put_relations(5, rows)
            store.put_origin(7, 2, None)
    assert (store.relations(5), store.origin(5), store.origin(7)) == ([], OriginRow(1, None), OriginRow(2, None))


def test_a_snapshot_shows_one_state_while_others_write(store: StateStore) -> None:
    with StateStore.open(store.path.parent) as reader:
        with reader.snapshot():
            before = reader.origin(5)
            store.put_origin(5, 1, None)
            assert reader.origin(5) == before is None
        assert reader.origin(5) == OriginRow(1, None)


def test_threads_of_one_process_share_a_store(store: StateStore) -> None:
    def count() -> None:
        for _ in range(50):
            with store.batch():
                store.add_stats(5, apply_error_count=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.stats(5).apply_error_count == 200


def test_a_dropped_subscription_takes_everything_with_it_but_conflicts_and_journal(store: StateStore) -> None:
    store.put_relations(5, [RelationRow(1, "i", None, "a", "b")])
    store.put_server(5, 1, "h")
    store.put_workers(5, [WorkerRow("apply", 1)])
    store.put_copy_progress(5, [CopyRow(1, "a", "b")])
    store.put_origin(5, 1, None)
    store.put_slot(5, SlotRow("s"))
    store.record_error(5, ErrorRow("apply", "A", "m"))
    store.add_conflict(ConflictRow(5, "orders", "insert_exists", "public", "t", "stopped"))
    store.journal("drop", 5, "orders", {})
    store.remove_subscription(5)
    store.remove_subscription(5)
    left = sqlite3.connect(store.path)
    names = [name for (name,) in left.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for name in set(names) - {"pg_subscription", "sqlite_sequence", "pgsub_stats"}:
        expected = 1 if name in ("pgsub_conflict", "pgsub_journal") else 0
        assert left.execute(f"SELECT count(*) FROM {name}").fetchone() == (expected,), name
    assert left.execute("SELECT subid FROM pgsub_stats").fetchall() == [(7,)]
    left.close()
    assert (len(store.conflicts(5)), len(store.journal_rows(5))) == (1, 1)


def test_writing_for_a_dropped_subscription_says_so(store: StateStore) -> None:
    store.remove_subscription(5)
    for write in (
        lambda: store.put_relations(5, []),
        lambda: store.put_server(5, 1, "h"),
        lambda: store.add_stats(5, apply_error_count=1),
        lambda: store.reset_stats(5),
        lambda: store.record_error(5, ErrorRow("apply", "A", "m")),
        lambda: store.alter(5, enabled=False),
    ):
        with pytest.raises(SubscriptionNotFound, match="subscription with OID 5 does not exist"):
            write()
    store.clear_error(5)
    store.clear_server(5)


@pytest.mark.parametrize(
    ("table", "assignment"),
    [
        ("pg_subscription", "subskiplsn = 'x'"),
        ("pg_subscription", "substream = 'z'"),
        ("pg_subscription", "subpublications = '[1]'"),
        ("pg_subscription", "subpublications = '{'"),
        ("pg_subscription", "subname = x'00'"),
        ("pg_subscription", "subenabled = 7"),
        ("pg_subscription_rel", "srsublsn = '0/0/0'"),
        ("pgsub_journal", "detail = '[]'"),
    ],
)
def test_a_value_edited_by_hand_is_reported_and_never_used(store: StateStore, table: str, assignment: str) -> None:
    store.put_relations(5, [RelationRow(1, "s", 1, "a", "b")])
    store.journal("create", 5, "orders", {})
    editor = sqlite3.connect(store.path)
    editor.execute("PRAGMA ignore_check_constraints = ON")
    with editor:
        editor.execute(f"UPDATE {table} SET {assignment} WHERE rowid IN (1, 5)")
    editor.close()
    with pytest.raises(StateStoreError, match="invalid value") as error:
        (store.subscriptions(), store.relations(5), store.journal_rows())
    assert table in str(error.value.detail)


def test_a_closed_store_refuses_work_and_closes_again(store: StateStore) -> None:
    store.close()
    store.close()
    with pytest.raises(InternalError):
        store.subscriptions()


def test_times_of_the_wire_become_text() -> None:
    assert wire_time(0) is None
    assert wire_time(1) == "2000-01-01T00:00:00.000001Z"
    assert wire_time(820_540_800_000_000) == "2026-01-01T00:00:00.000000Z"
    assert wire_time(2**63 - 1) is None
    assert wire_time(-(2**63)) is None
