"""Two commands that change one subscription at once: neither undoes what the other has done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fix_faults import Site

#: Whether a command waits for the other's lock.
_WAITS = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query ~ '^SELECT pg_catalog.pg_try_advisory' AND state = 'idle')"
)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("refresh", "--no-copy-data", "--no-wait"),
        ("alter", "--add-publication", "third", "--no-copy-data", "--no-wait"),
        ("alter", "--add-publication", "third", "--no-refresh"),
    ],
    ids=lambda words: "_".join(words[:1] + words[-1:]),
)
def test_a_command_that_read_the_definition_before_another_changed_it_is_refused(
    site: Callable[..., Site], words: tuple[str, ...]
) -> None:
    it = site()
    for database in (it.pubdb, it.subdb):
        database.execute("CREATE TABLE a (id int); CREATE TABLE b (id int)")
    it.pubdb.execute(
        "CREATE PUBLICATION p FOR TABLE a; CREATE PUBLICATION second FOR TABLE b; CREATE PUBLICATION third"
    )
    it.end(it.create("--no-wait", "--no-copy-data"))
    goes_on = it.points / "goes_on"
    options = ("--add-publication", "second", "--no-copy-data", "--no-wait")
    first = it.start("alter", it.name, *options, points={"alter.after_ledger": f"pause:{goes_on}"})
    it.wait_fired("alter.after_ledger")
    second = it.start(words[0], it.name, *words[1:])
    if words[-1] == "--no-refresh":  # waits for nobody: the first one finds the definition changed
        it.end(second)
    else:
        it.subdb.wait(_WAITS)
    goes_on.touch()
    it.end(first, 9 if words[-1] == "--no-refresh" else 0)
    it.end(second, 0 if words[-1] == "--no-refresh" else 9)
    assert it.said().count(f'subscription "{it.name}" was concurrently changed by another command') == 1
    added = "third" if words[-1] == "--no-refresh" else "second"
    assert it.sqlite("SELECT subpublications FROM pg_subscription") == [(f'["p", "{added}"]',)]
    tables = [("a",)] if added == "third" else [("a",), ("b",)]
    assert it.subdb.rows("SELECT relname FROM pgsub.subscription_rel ORDER BY 1") == tables
