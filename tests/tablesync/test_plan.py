"""Which chunks a copy has, and which states may follow which: properties, without a server."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgsub.common.subscription import Subscription
from pgsub.publisher.tables import Leaf, RemoteColumn, RemoteTable
from pgsub.tablesync.copy import plan
from pgsub.target.catalog.relation import TargetColumn, TargetRelation

SUB = Subscription(1, "s", "", "", ("p",), "s")


def _column(name: str, oid: int = 23) -> RemoteColumn:
    return RemoteColumn(1, name, oid, "pg_catalog", "int4", -1, False, False)


def _remote(leaves: tuple[Leaf, ...], *columns: RemoteColumn, row_filter: str | None = None) -> RemoteTable:
    size = sum(leaf.bytes for leaf in leaves)
    return RemoteTable(1, "public", "t", "r", "d", columns or (_column("a"),), row_filter, leaves, size, -1)


def _target(*columns: TargetColumn, fires: bool = False, rules: bool = False) -> TargetRelation:
    columns = columns or (TargetColumn("a", 23, "integer", False, "", None),)
    return TargetRelation(1, "public", "t", "r", fires, rules, False, columns, ())


LEAVES = st.builds(
    lambda pages, toast, number: Leaf(number, "public", f"leaf{number}", pages, pages * 8192 + toast, -1.0),
    st.integers(0, 5000),
    st.integers(0, 1 << 30),
    st.integers(1, 10**6),
)


@settings(deadline=None)
@given(LEAVES, st.integers(8192, 1 << 28))
def test_ranges_cover_every_block_once_and_what_is_added_later(leaf: Leaf, size: int) -> None:
    ranges = plan.ranges(leaf, size)
    assert ranges[0][0] == 0 and ranges[-1][1] is None
    for (start, stop), (following, _) in itertools.pairwise(ranges):
        assert stop == following > start
    assert all(start < max(leaf.pages, 1) for start, _ in ranges)


@settings(deadline=None)
@given(LEAVES, st.integers(8192, 1 << 28))
def test_a_chunk_is_about_as_large_as_wanted(leaf: Leaf, size: int) -> None:
    count = len(plan.ranges(leaf, size))
    assert count == 1 or leaf.bytes / (count - 1) >= size
    assert leaf.bytes / count <= size or count == max(leaf.pages, 1)  # a block is not divided


@settings(deadline=None, max_examples=30)
@given(st.lists(LEAVES, min_size=1, max_size=3, unique_by=lambda leaf: leaf.oid))
def test_chunks_are_numbered_and_weigh_what_the_table_weighs(leaves: list[Leaf]) -> None:
    _, made = plan.make(SUB, _remote(tuple(leaves)), _target(), atomic=False, publisher_version=180000)
    assert [chunk.number for chunk in made] == list(range(len(made)))
    assert len({chunk.copy_out for chunk in made}) == len(made)
    weighed = [leaf for leaf in leaves if leaf.pages]
    assert abs(sum(chunk.bytes for chunk in made) - sum(leaf.bytes for leaf in weighed)) <= len(made) + sum(
        leaf.bytes for leaf in leaves if not leaf.pages
    )


def test_a_chunk_reads_one_leaf_from_block_to_block_under_the_row_filter() -> None:
    leaf = Leaf(7, "public", "leaf", 20_000, 3 * plan.CHUNK_BYTES, -1.0)
    remote = _remote((leaf,), row_filter="(a > 5)")
    _, made = plan.make(SUB, remote, _target(), atomic=False, publisher_version=180000)
    first, middle, *_, last = made
    assert "ctid <" in first.copy_out and "ctid >=" not in first.copy_out
    assert "ctid >=" in middle.copy_out and "ctid <" in middle.copy_out
    assert "ctid >=" in last.copy_out and "ctid <" not in last.copy_out
    for chunk in (first, middle, last):
        assert 'FROM ONLY "public"."leaf"' in chunk.copy_out and "(a > 5)" in chunk.copy_out
        assert chunk.copy_out.startswith("COPY (") and chunk.copy_out.endswith("TO STDOUT")


@pytest.mark.parametrize(("workers", "chunks"), [(1, 4), (2, 8), (8, 32), (100, 32)])
def test_every_task_has_some_chunks_to_do_but_no_chunk_is_tiny(workers: int, chunks: int) -> None:
    remote = _remote((Leaf(7, "public", "t", 1_000_000, 4 * plan.CHUNK_BYTES, -1.0),))
    sub = Subscription(1, "s", "", "", ("p",), "s", copy_workers=workers)
    assert len(plan.chunk_ranges(sub, remote)) == chunks


@pytest.mark.parametrize(
    ("target", "sub", "replica", "reason"),
    [
        (_target(), SUB, True, None),
        (_target(fires=True), SUB, True, "a trigger on the target table would fire"),
        (_target(rules=True), SUB, True, "a rule on the target table would apply"),
        (_target(), SUB, False, "session_replication_role cannot be set"),
        (_target(), Subscription(1, "s", "", "", ("p",), "s", copy_atomic=True), True, "copy_atomic is set"),
        (
            _target(),
            replace(SUB, on_conflict=("insert_exists=skip",)),
            True,
            "rules decide about conflicts of its rows",
        ),
        (_target(), replace(SUB, on_conflict=("update_missing=skip",)), True, None),
    ],
)
def test_a_large_table_is_copied_in_chunks_only_where_nothing_would_notice(
    target: TargetRelation, sub: Subscription, replica: bool, reason: str | None
) -> None:
    large = _remote((Leaf(1, "public", "t", 100_000, plan.CHUNKED_FROM_BYTES, -1.0),))
    assert plan.atomic_reason(sub, large, target, replica=replica) == reason
    small = _remote((Leaf(1, "public", "t", 1, plan.CHUNKED_FROM_BYTES - 1, -1.0),))
    assert plan.atomic_reason(SUB, small, _target(), replica=True) == "the table is small"


@pytest.mark.parametrize(
    ("theirs", "ours", "binary", "version", "wanted"),
    [
        (23, 23, True, 180000, True),
        (23, 23, True, 150000, False),  # the server's own COPY is binary from 16 on
        (23, 23, False, 180000, False),
        (23, 20, True, 180000, False),
        (16400, 16400, True, 180000, False),  # the same number means another type elsewhere
    ],
)
def test_a_binary_copy_needs_the_same_built_in_types(
    theirs: int, ours: int, binary: bool, version: int, wanted: bool
) -> None:
    sub = Subscription(1, "s", "", "", ("p",), "s", binary=binary)
    target = _target(TargetColumn("a", ours, "x", False, "", None))
    assert plan.binary_copy(sub, _remote((), _column("a", theirs)), target, version) == wanted
