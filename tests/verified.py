"""The comparison of ``pgsub verify`` at one point, for subscriptions that no state store knows: see :mod:`fix_pair`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import patience
import psycopg
from fix_pair import Pair
from fix_servers import Database
from psycopg import sql

from pgsub.commands.verify.table_comparisons import publisher_side
from pgsub.common.connections.exported_snapshot import ExportedSnapshot
from pgsub.publisher import connect as publisher
from pgsub.publisher.server_errors import translate
from pgsub.publisher.tables import describe_tables
from pgsub.reconcile.comparison import Comparison, TableResult, sources
from pgsub.reconcile.expressions import compared
from pgsub.reconcile.key_ranges import RangeComparison
from pgsub.reconcile.point import one_point, while_standing
from pgsub.reconcile.point_attempt import Point, Standing
from pgsub.reconcile.reading.side import Side, date_order
from pgsub.reconcile.repair import Repair, RepairedRows, unfit
from pgsub.reconcile.rows import EXTRA
from pgsub.target.catalog.relation import describe
from pgsub.target.session import connect as target


@contextlib.contextmanager
def point_of(p: Pair, seconds: float = 10.0, timeout: float = 60.0) -> Iterator[Point]:
    """A point, while a worker runs."""
    with (
        contextlib.closing(target.connect(p.subdb.conninfo, "verify")) as session,
        contextlib.closing(target.connect(p.subdb.conninfo, "verify")) as holder,
        one_point(session, holder, p.sub, deadline=time.monotonic() + timeout, seconds=seconds) as point,
    ):
        yield point


def results(p: Pair, names: Sequence[tuple[str, str]]) -> Iterator[TableResult]:
    """Compare tables at one point, while a worker runs.

    :param names: schema and name of each.
    """
    in_utf8 = p.pubdb.value("SHOW server_encoding") != p.subdb.value("SHOW server_encoding")
    with point_of(p) as point:
        order = date_order(p.session)
        sides = (
            Side(
                "publisher",
                lambda: publisher.connect(p.pubdb.conninfo, application_name="verify"),
                point.publisher,
                translate,
                order,
            ),
            Side("target", lambda: target.connect(p.subdb.conninfo, "verify"), point.target, target.translate, order),
        )
        with Comparison(sides, jobs=2) as comparison:
            for name in names:
                described = comparison.on(sides[0], lambda c, n=name: describe_tables(c, [n], p.sub.publications))
                local = comparison.on(sides[1], lambda c, n=name: describe(c, *n))
                assert local is not None
                both = compared(described.tables[name], local)
                yield comparison.compare(both, sources(both, in_utf8=in_utf8))


def repaired(p: Pair, found: Sequence[TableResult]) -> dict[str, RepairedRows]:
    """Repair what differs in tables that were compared, while a worker runs.

    :return: what was done, by table; those that cannot be repaired row by row are left out.
    """
    done = {}
    with contextlib.closing(target.connect(p.subdb.conninfo, "verify")) as session:
        for result in found:
            both, listed = result.table, result.differences.listed
            if unfit(both) is not None or not listed:
                continue
            rows = [one.publisher or one.target or () for one in listed]
            keys = [tuple(row[position] for position in both.key) for row in rows]
            extra = frozenset(key for key, one in zip(keys, listed, strict=True) if one.kind == EXTRA)
            repair = Repair(p.sub, both, sources(both, in_utf8=False), list(dict.fromkeys(keys)), extra)

            def work(standing: Standing, repair: Repair = repair) -> RepairedRows | None:
                return repair.run(standing, publisher_side(session, p.sub, standing.publisher))

            done[both.target.name] = while_standing(session, p.sub, work, deadline=time.monotonic() + patience.SECONDS)
    return done


def exported(database: Database, stack: contextlib.ExitStack) -> ExportedSnapshot:
    """Export a snapshot of a database as it is now."""
    holder = stack.enter_context(contextlib.closing(database.connect()))
    holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    return ExportedSnapshot.of(holder)


def _as(connection: psycopg.Connection, role: str | None) -> psycopg.Connection:
    if role is not None:
        connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
    return connection


def compare(pubdb: Database, subdb: Database, table: str = "t", **options: Any) -> TableResult:
    """Compare a table of schema public as it is now.

    :param options: of :meth:`Comparison.compare`, and ``ranges`` to compare it by those.
    """
    meanwhile = options.pop("meanwhile", lambda: None)
    becoming: dict[str, str] = options.pop("becoming", {})  # by side, who reads
    in_utf8 = pubdb.value("SHOW server_encoding") != subdb.value("SHOW server_encoding")
    with contextlib.ExitStack() as stack:
        sides = (
            Side(
                "publisher",
                lambda: _as(publisher.connect(pubdb.conninfo, application_name="verify"), becoming.get("publisher")),
                exported(pubdb, stack),
                translate,
            ),
            Side(
                "target",
                lambda: _as(target.connect(subdb.conninfo, "verify"), becoming.get("target")),
                exported(subdb, stack),
                target.translate,
            ),
        )
        meanwhile()
        with contextlib.closing(sides[0].connect()) as session:
            remote = describe_tables(session, [("public", table)], ["p"]).tables["public", table]
        with contextlib.closing(sides[1].connect()) as session:
            local = describe(session, "public", table)
        assert local is not None
        both = compared(remote, local)
        with Comparison(sides, jobs=2, sample=options.pop("sample", None)) as comparison:
            of_both, ranges = sources(both, in_utf8=in_utf8), options.pop("ranges", None)
            if ranges is None:
                result = comparison.compare(both, of_both, **options)
            else:
                told = options.pop("progress", lambda done, total: None)
                result = RangeComparison(comparison, both, of_both, ranges, lambda key, kind, row: None).run(told)
    if result.error is not None:
        raise result.error
    return result
