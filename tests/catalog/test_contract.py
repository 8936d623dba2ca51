"""state.db as other programs see it: names, columns and forms of values that are relied on."""

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from pgsub.catalog.rows import ConflictRow, CopyRow, ErrorRow, RelationRow, SlotRow, WorkerRow
from pgsub.catalog.store import VIEWS, StateStore
from pgsub.common.errors import UsageError
from pgsub.common.subscription import Subscription

COLUMNS = {
    "pg_subscription": "oid subdbid subskiplsn subname subowner subenabled subbinary substream subtwophasestate "
    "subdisableonerr subpasswordrequired subrunasowner subfailover subretaindeadtuples submaxretention "
    "subretentionactive subserver subconflictlogrelid subconflictlogdest subconninfo subslotname subsynccommit "
    "subwalrcvtimeout subpublications suborigin pgsub_target pgsub_owner_name pgsub_apply_mode pgsub_apply_workers "
    "pgsub_max_parallel_apply_workers pgsub_max_sync_workers pgsub_copy_workers pgsub_copy_atomic pgsub_messages "
    "pgsub_sequences pgsub_on_conflict pgsub_skips pgsub_password_enforced pgsub_unavailable pgsub_moves "
    "pgsub_generation pgsub_unrefreshed pgsub_recorded pgsub_table_set pgsub_way_back_of pgsub_options_changed_at",
    "pg_subscription_rel": "srsubid srrelid srsubstate srsublsn schemaname relname",
    "pgsub_sequence": "subid srrelid srsubstate schemaname relname publisher_value publisher_is_called target_value "
    "target_is_called ahead problem taken_at",
    "pg_replication_origin_status": "local_id external_id remote_lsn local_lsn",
    "pg_stat_subscription": "subid subname worker_type pid leader_pid relid received_lsn last_msg_send_time "
    "last_msg_receipt_time latest_end_lsn latest_end_time",
    "pg_stat_subscription_stats": "subid subname apply_error_count sync_seq_error_count sync_table_error_count "
    "confl_insert_exists confl_update_origin_differs confl_update_exists confl_update_deleted confl_update_missing "
    "confl_delete_origin_differs confl_delete_missing confl_multiple_unique_conflicts stats_reset sync_error_count "
    "changes_in_sets changes_folded serial_relations set_fallbacks",
    "pg_stat_progress_copy": "pid datid datname relid command type bytes_processed bytes_total tuples_processed "
    "tuples_excluded tuples_skipped subid schemaname relname chunks_done chunks_total tuples_total "
    "started_at bytes_per_second",
    "pgsub_conflict": "id subid subname at conflict_type schemaname relname index_name key remote_tuple local_tuple "
    "origin remote_xid finish_lsn remote_commit_ts action attempts message detail identical "
    "last_at context replica_identity local_conflicts worker event skipped_ref replayed_at",
    "pgsub_journal": "id at subid subname action actor detail",
    "pgsub_prepared_pending": "subid gid xid prepare_lsn prepared_at",
    "pgsub_verified": "subid schemaname relname compared lsn ranges",
}
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def read(store: StateStore, sql: str) -> list[dict[str, object]]:
    """What an SQLite tool of somebody else sees while the store is open here."""
    other = sqlite3.connect(f"file:{store.path}?mode=ro", uri=True)
    other.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in other.execute(sql)]
    finally:
        other.close()


@pytest.mark.parametrize("name", COLUMNS)
def test_every_table_exists_with_the_servers_columns_as_soon_as_the_file_does(folder: Path, name: str) -> None:
    with StateStore.open(folder) as store:
        columns, rows = store.view(name)
    assert (list(columns), rows) == (COLUMNS[name].split(), [])


def test_a_new_subscription_has_the_servers_values_and_null_where_a_column_does_not_apply(store: StateStore) -> None:
    row = read(store, "SELECT * FROM pg_subscription WHERE subname = 'bills'")[0]
    assert RFC3339.fullmatch(str(row.pop("pgsub_options_changed_at")))
    assert row == {
        **dict.fromkeys(c for c in COLUMNS["pg_subscription"].split() if c != "pgsub_options_changed_at"),
        "oid": 7,
        "subdbid": 0,
        "subskiplsn": "0/0",
        "subname": "bills",
        "subenabled": 1,
        "subbinary": 0,
        "substream": "p",
        "subtwophasestate": "d",
        "subdisableonerr": 0,
        "subpasswordrequired": 1,
        "subrunasowner": 0,
        "subfailover": 0,
        "subconninfo": "host=p",
        "subsynccommit": "off",
        "subwalrcvtimeout": "-1",
        "subpublications": '["pub"]',
        "suborigin": "any",
        "pgsub_target": "host=t",
        "pgsub_apply_mode": "batched",
        "pgsub_copy_atomic": 0,
        "pgsub_max_sync_workers": 2,
        "pgsub_copy_workers": 2,
        "pgsub_owner_name": "",
        "pgsub_unavailable": "[]",
        "pgsub_password_enforced": 0,
        "pgsub_max_parallel_apply_workers": 2,
        "pgsub_messages": 0,
        "pgsub_skips": "[]",
        "pgsub_on_conflict": "[]",
        "pgsub_sequences": 0,
        "pgsub_moves": 0,
        "pgsub_generation": 0,
        "pgsub_unrefreshed": 0,
        "pgsub_recorded": 0,
        "pgsub_table_set": 0,
        "pgsub_apply_workers": "auto",
    }


@pytest.mark.parametrize(("streaming", "letter"), [("off", "f"), ("on", "t"), ("parallel", "p")])
def test_substream_has_the_servers_letters(folder: Path, streaming: str, letter: str) -> None:
    with StateStore.open(folder) as store:
        store.add_subscription(Subscription(1, "s", "", "", (), None, streaming=streaming))
        assert read(store, "SELECT substream FROM pg_subscription") == [{"substream": letter}]


def test_publications_with_quotes_and_umlauts_are_a_json_array(store: StateStore) -> None:
    names = ('a"b', "täglich", "c,d")
    store.alter(5, publications=names)
    sql = "SELECT j.value FROM pg_subscription s, json_each(s.subpublications) j WHERE s.oid = 5"
    assert tuple(row["value"] for row in read(store, sql)) == names
    assert store.subscription("orders").publications == names


def test_relation_states_name_the_table_and_write_the_lsn_as_text(store: StateStore) -> None:
    store.put_relations(5, [RelationRow(16390, "s", 0x16_B374D848, "public", "t")])
    assert read(store, "SELECT * FROM pg_subscription_rel") == [
        dict(zip(COLUMNS["pg_subscription_rel"].split(), (5, 16390, "s", "16/B374D848", "public", "t"), strict=True))
    ]


def test_the_origin_is_found_by_its_subscription_as_in_the_server(store: StateStore) -> None:
    store.put_origin(5, 0x1A0, None)
    joined = (
        "SELECT remote_lsn FROM pg_replication_origin_status o, pg_subscription s WHERE external_id = 'pg_' || s.oid"
    )
    assert read(store, joined) == [{"remote_lsn": "0/1A0"}]
    assert read(store, "SELECT * FROM pg_replication_origin_status") == [
        {"local_id": 5, "external_id": "pg_5", "remote_lsn": "0/1A0", "local_lsn": None}
    ]


def test_a_subscription_without_a_worker_has_a_row_of_nulls_as_in_the_server(store: StateStore) -> None:
    store.put_workers(5, [WorkerRow("apply", 100), WorkerRow("table synchronization", 101, relid=16390)])
    rows = read(store, "SELECT subname, worker_type, pid, relid FROM pg_stat_subscription ORDER BY subname, pid")
    assert [tuple(row.values()) for row in rows] == [
        ("bills", None, None, None),
        ("orders", "apply", 100, None),
        ("orders", "table synchronization", 101, 16390),
    ]


def test_statistics_start_at_zero_and_were_never_reset(store: StateStore) -> None:
    row = read(store, "SELECT * FROM pg_stat_subscription_stats WHERE subid = 5")[0]
    assert (row.pop("subid"), row.pop("subname"), row.pop("stats_reset")) == (5, "orders", None)
    assert set(row.values()) == {0}


def test_sync_errors_are_found_under_the_old_and_the_new_name(store: StateStore) -> None:
    store.add_stats(5, sync_table_error_count=3)
    names = "sync_error_count, sync_table_error_count"
    rows = read(store, f"SELECT {names} FROM pg_stat_subscription_stats WHERE subid = 5")
    assert rows == [{"sync_error_count": 3, "sync_table_error_count": 3}]


def test_a_renamed_subscription_has_its_new_name_in_every_view(store: StateStore) -> None:
    store.alter(5, name="sales")
    for view in ("pg_subscription", "pg_stat_subscription", "pg_stat_subscription_stats"):
        assert {row["subname"] for row in read(store, f"SELECT subname FROM {view}")} == {"bills", "sales"}


def test_times_that_the_store_sets_are_rfc_3339_in_utc(store: StateStore) -> None:
    store.add_conflict(ConflictRow(5, "orders", "insert_exists", "public", "t", "stopped"))
    store.record_error(5, ErrorRow("apply", "ApplyError", "duplicate key"))
    store.journal("skip-lsn", 5, "orders", {"lsn": "0/1"})
    store.reset_stats(5)
    store.put_server(5, 1, "h")
    for column, table in (
        ("at", "pgsub_conflict"),
        ("at", "pgsub_error"),
        ("at", "pgsub_journal"),
        ("stats_reset", "pg_stat_subscription_stats WHERE subid = 5"),
        ("since", "pgsub_server"),
    ):
        (row,) = read(store, f"SELECT {column} FROM {table}")
        assert RFC3339.fullmatch(str(row[column])), table


def test_every_view_of_status_can_be_read_by_name(store: StateStore) -> None:
    store.put_slot(5, SlotRow("orders", restart_lsn=16, active=True))
    store.put_copy_progress(5, [CopyRow(16390, "public", "t")])
    shown = {name: store.view(name) for name in VIEWS}
    assert all(len(row) == len(columns) for columns, rows in shown.values() for row in rows)
    assert shown["pgsub_slot"][1][0][:2] == (5, "orders")
    assert len(shown["pg_subscription"][1]) == 2


def test_a_view_of_another_name_is_a_usage_error(store: StateStore) -> None:
    with pytest.raises(UsageError, match='view "sqlite_master" does not exist'):
        store.view("sqlite_master")


def test_opening_the_store_loads_no_driver_no_spark_and_no_terminal_library() -> None:
    code = "import sys, pgsub.catalog.store; print(*{name.partition('.')[0] for name in sys.modules})"
    root = Path(__file__).parents[2]
    loaded = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert not {"psycopg", "pyspark", "py4j", "rich", "typer", "numpy"} & set(loaded.split())
