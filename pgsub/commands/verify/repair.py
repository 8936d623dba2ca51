"""``pgsub verify --repair``: changes rows that differ without a known reason to the publisher's state.

Each round compares, and repairs the listed rows. The last comparison, after which nothing can be repaired, is the
result. :mod:`pgsub.reconcile.repair` changes the rows in atomic transactions of the target.

Rows of others are not lost: rows of another subscription have a known reason, and no row of its tables is replaced. If
both servers publish the table, a change may not have reached the publisher yet, so the user must say whose rows are
right.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pgsub.catalog.store import StateStore
from pgsub.commands.preflight.findings import Caution, concerning
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve.apply_to_point import catch_up, served
from pgsub.commands.sessions import check_no_switchover, ledger_session
from pgsub.commands.subscription import lost_switchover
from pgsub.commands.verify.result import EQUAL, UNEQUAL, TableVerdict, Verification, told_apart
from pgsub.commands.verify.result import document as verification_document
from pgsub.commands.verify.table_comparisons import publisher_side
from pgsub.commands.verify.verify import VerifyOptions, verify
from pgsub.common import failpoints
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.reconcile.comparison import TableResult, sources
from pgsub.reconcile.point import while_standing
from pgsub.reconcile.point_attempt import Standing
from pgsub.reconcile.repair import AT_ONCE, Key, Repair, RepairedRows, unfit
from pgsub.reconcile.rows import EXTRA, MISSING, Difference
from pgsub.target.ledger.tables import subscription_tables
from pgsub.target.session.publications import publication_of

Name = tuple[str, str]  #: schema and name of a table
#: Tables with the keys of rows to repair, by name.
Wanted = dict[Name, tuple[TableVerdict, list[Key]]]


@dataclass(slots=True)
class Reparation:
    """The result of ``verify --repair``.

    :ivar before: the first comparison. ``after`` is the last one, the same object if nothing was done.
    :ivar dry_run: whether nothing was changed.
    :ivar rows: the repaired rows, by table.
    """

    before: Verification
    after: Verification
    dry_run: bool
    rows: dict[Name, RepairedRows] = field(default_factory=dict)

    @property
    def refused(self) -> list[tuple[str, str]]:
        """Tables that still differ and whose rows cannot be repaired one by one, with the reason."""
        return [(one.name, why) for one in self.after.tables if one.outcome == UNEQUAL and (why := _unfit(one))]


def repair(
    options: VerifyOptions,
    *,
    reporter: Reporter,
    confirm: Callable[[Verification], None],
    dry_run: bool = False,
    publisher_is_right: bool = False,
) -> Reparation:
    """Compare the tables, and repair differences without a known reason.

    :param confirm: called before anything is changed, and again before a table is changed that could not be compared at
        first. It may raise an exception to refuse.
    :param publisher_is_right: repair tables that the target publishes, too.
    :raises StateForbids: the target publishes a table that differs.
    :raises PgsubError: see :func:`pgsub.commands.verify.verify.verify`. Earlier repairs remain.
    """
    before = verify(options, reporter=reporter)
    found = Reparation(before, before, dry_run)
    repaired: dict[Name, int] = {}  #: how many rows differed before, by table
    with told_apart():
        while wanted := _wanted(found, repaired):
            # A table that could not be compared at first is new in a later round.
            if new := [table for name, (table, _) in wanted.items() if name not in repaired]:
                if not dry_run:
                    _check_source(options)
                _check_published_here(options, new, reporter, allowed=dry_run or publisher_is_right)
            if dry_run:
                break
            if new:
                confirm(found.after)
            repaired |= {name: _unexplained(table) for name, (table, _) in wanted.items()}
            _round(options, found, wanted, reporter)
            found.after = verify(options, reporter=reporter)
    return found


def _check_source(options: VerifyOptions) -> None:
    """Check that the publisher has not lost what clients wrote there since a switchover."""
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        if sub.way_back_of is not None:
            with ledger_session(store, sub) as session:
                lost_switchover.check(session, store, sub)


def _check_published_here(
    options: VerifyOptions, tables: Sequence[TableVerdict], reporter: Reporter, *, allowed: bool
) -> None:
    """Check that the target does not publish a differing table, or warn of it if it is to be repaired anyway.

    :raises StateForbids: it does, and that is not allowed.
    """
    for caution in _published_here(options, tables):
        # guard: a row on its way to the publisher is not reported as a difference
        if not allowed:
            raise StateForbids(caution.message, detail=caution.detail, hint=caution.hint)
        reporter.warning(caution.message, caution.detail, caution.hint)


def _published_here(options: VerifyOptions, tables: Sequence[TableVerdict]) -> list[Caution]:
    """Warn of differing tables that the target publishes, because clients' writes there may still be on their way."""
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        if sub.origin != "none":
            return []
        with ledger_session(store, sub) as session:
            here = [one.name for one in tables if one.result and publication_of(session, one.result.table.target.oid)]
    words = ["pgsub", "verify", sub.name, *(part for one in options.tables for part in ("--table", one)), "--repair"]
    return list(
        concerning(
            here,
            "the target publishes {}, and what it has is replaced by what the publisher has",
            "What was written on the target and has not reached the publisher yet would be lost on the target only.",
            "Write nothing on the target until the publisher has received all of it, then say whose rows are right:\n"
            + " ".join(word(one) for one in [*words, "--from", "publisher"]),
        )
    )


def _unfit(table: TableVerdict) -> str | None:
    """Return why some differing rows of a table cannot be repaired, None if all can."""
    reason = None if table.result is None else unfit(table.result.table)
    if reason is None and table.written_by is not None:
        return f'subscription "{table.written_by}" writes it, too, so only missing rows are inserted'
    return reason


def _unexplained(table: TableVerdict) -> int:
    """Return how many rows of a table differ for no known reason."""
    return 0 if table.result is None else table.result.differences.unexplained


def _keys(table: TableVerdict) -> list[Key]:
    """Return the keys of the rows to repair in a table."""
    result = table.result
    if table.outcome != UNEQUAL or result is None or unfit(result.table):
        return []
    listed = [one for one in result.differences.listed if one.explained is None]
    # guard: rows that another subscription may have written are neither reported nor replaced
    if table.written_by is not None:
        listed = [one for one in listed if one.kind == MISSING]
    return list(dict.fromkeys(_key(result, one) for one in listed))


def _key(result: TableResult, one: Difference) -> Key:
    values = one.publisher if one.publisher is not None else one.target
    assert values is not None
    return tuple(values[position] for position in result.table.key)


def _wanted(found: Reparation, repaired: Mapping[Name, int]) -> Wanted:
    """Return what to repair next.

    :param repaired: how many rows differed before the repair of a table. Something undoes it if they are not fewer.
    """
    differing = {(one.schemaname, one.relname): (one, keys) for one in found.after.tables if (keys := _keys(one))}
    equal = {(one.schemaname, one.relname) for one in found.before.tables if one.outcome == EQUAL}
    # guard: what differs only later may be on its way to the publisher, without "name not in equal and "
    return {
        name: (one, keys)
        for name, (one, keys) in differing.items()
        if name not in equal and _unexplained(one) < repaired.get(name, sys.maxsize)
    }


def _round(options: VerifyOptions, found: Reparation, wanted: Wanted, reporter: Reporter) -> None:
    """Repair what the last comparison lists."""
    deadline = options.deadline()
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(StateStore.open(options.state_dir, create=False))
        sub = store.subscription(options.name)
        session = stack.enter_context(ledger_session(store, sub, reporter))
        stack.enter_context(subscription_tables.maintenance(session, sub.subid, sub.name))
        check_no_switchover(session, store, sub)
        detail = {"rows": {".".join(name): len(keys) for name, (_, keys) in wanted.items()}}
        attempt = stack.enter_context(store.journal_attempt("verify --repair", sub, detail))
        failpoints.point("repair.journalled")
        check = stack.enter_context(served(store, options.state_dir, sub, reporter))
        catch_up(session, sub, options.state_dir, deadline)

        def bring(work: Repair, standing: Standing) -> RepairedRows | None:
            return work.run(standing, publisher_side(session, sub, standing.publisher))

        for name, (table, keys) in wanted.items():
            assert table.result is not None
            compared, listed = table.result.table, table.result.differences.listed
            both = sources(compared, in_utf8=False)
            extra = frozenset(_key(table.result, one) for one in listed if one.kind == EXTRA)
            for some in _pieces(keys):
                work = partial(bring, Repair(sub, compared, both, some, extra))
                brought = while_standing(session, sub, work, deadline=deadline, report=reporter.warning, check=check)
                found.rows[name] = found.rows.get(name, RepairedRows()) + brought
        store.journal_done(attempt)


def _pieces(keys: list[Key]) -> Iterator[list[Key]]:
    for at in range(0, len(keys), AT_ONCE):
        yield keys[at : at + AT_ONCE]


def document(found: Reparation, *, rows: bool = False) -> dict[str, Any]:
    """Return the result as JSON: the last comparison, and the repairs before it.

    :param rows: see :func:`pgsub.commands.verify.result.document`.
    """
    return {
        **verification_document(found.after, rows=rows),
        "repair": {
            "dry_run": found.dry_run,
            "tables": [
                {"table": ".".join(name), "inserted": done.inserted, "updated": done.updated, "deleted": done.deleted}
                for name, done in found.rows.items()
            ],
            "refused": [{"table": name, "reason": reason} for name, reason in found.refused],
        },
    }
