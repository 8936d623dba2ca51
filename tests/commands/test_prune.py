"""conflicts prune through the program: what was skipped is removed for good, only when and where that is asked for."""

from __future__ import annotations

import pytest
from fix_program import one_error, valid
from fix_stuck import MakeStuck, Stuck

_SKIP = "BEGIN; INSERT INTO b VALUES ({0}, 1); INSERT INTO b VALUES ({1}, 2); COMMIT"


def _pruned(it: Stuck, *words: str) -> dict[str, object]:
    return dict(valid("conflicts", it.ok("conflicts", "prune", "s", *words, "--json").stdout)["prune"])


def _skipped(it: Stuck) -> dict[str, int] | None:
    return it.cli.status()["skipped"]


def _stuck_twice(stuck: MakeStuck) -> Stuck:
    """Two transactions are skipped whole; the first one is replayed."""
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 0), (3, 0)")
    for first in (1, 3):
        error = it.apply(_SKIP.format(first, first + 1))
        assert error is not None
        it.ok("skip-lsn", "s", error.finish_lsn, "--yes")
        assert it.apply() is None
        if first == 1:
            it.subdb.execute("DELETE FROM b WHERE id = 1")
            it.ok("conflicts", "replay", "s", "--lsn", error.finish_lsn, "--yes")
    return it


@pytest.mark.long
def test_what_was_replayed_is_pruned_and_what_waits_stays_until_it_is_named(stuck: MakeStuck) -> None:
    it = _stuck_twice(stuck)
    left = "SELECT count(*) FILTER (WHERE replayed_at IS NULL), count(replayed_at) FROM pgsub.skipped_change"
    one_error(it.run("conflicts", "prune", "s", "--yes"), 2, "needs --replayed, --older-than or both")
    one_error(it.run("conflicts", "prune", "s", "--replayed"), 2, "needs --yes")
    one_error(it.run("conflicts", "list", "s", "--replayed"), 2, "takes no --replayed")

    dry = _pruned(it, "--replayed", "--dry-run")
    assert (dry["dry_run"], dry["waiting"], dry["replayed"]) == (True, 0, 2)
    assert it.subdb.rows(left) == [(2, 2)]
    assert _pruned(it, "--older-than", "1h", "--yes")["waiting"] == 0  # none is so old
    assert it.subdb.rows(left) == [(2, 2)]

    assert _pruned(it, "--replayed", "--yes")["replayed"] == 2
    assert it.subdb.rows(left) == [(2, 0)]
    kept = _skipped(it)
    assert kept is not None and (kept["waiting_changes"], kept["replayed_changes"]) == (2, 0) and kept["bytes"] > 0

    it.subdb.execute("UPDATE pgsub.skipped_change SET skipped_at = skipped_at - interval '2 hours'")
    assert _pruned(it, "--older-than", "1h", "--yes")["waiting"] == 2
    assert it.subdb.rows(left) == [(0, 0)] and _skipped(it) is None
    actions = it.cli.sql("SELECT detail FROM pgsub_journal WHERE action = 'prune' ORDER BY id")
    assert len(actions) == 2


def test_a_drop_names_the_skipped_changes_that_stay(stuck: MakeStuck) -> None:
    it = _stuck_twice(stuck)
    said = it.ok("drop", "s", "--yes").stderr
    assert "and 4 skipped changes of this one" in said and said.endswith("\nDROP SCHEMA pgsub CASCADE;\n")
