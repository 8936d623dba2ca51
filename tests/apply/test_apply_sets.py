"""Change sets come to what the same changes do one by one, or say that they do not."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from apply import set_cases
from apply.set_cases import Case, Shape

from pgsub.apply import set_writer
from pgsub.apply.change_set import ChangeSet, fold
from pgsub.apply.conflict import Place
from pgsub.apply.relations import RelationCache
from pgsub.apply.rows import RowWriter
from pgsub.apply.set_writer import Deviation, SetWriter
from pgsub.apply.transactions import RemoteTransaction
from pgsub.protocol import columnar
from pgsub.protocol.messages import Delete, Insert, Message, Update
from pgsub.subscription import Subscription
from pgsub.target import connect as target
from pgsub.target.mapping import RelationMap, map_relation
from pgsub.target.pipeline import StatementFailed
from pgsub.target.relation import describe

if TYPE_CHECKING:
    from fix_servers import Database

ROUNDS = 400 * max(1, int(os.environ.get("PGSUB_PROPERTY_SECS", "1")))
Rows = list[tuple[Any, ...]]


class Bench:
    """A target session with both ways to write, on whose tables nothing stays."""

    def __init__(self, session: psycopg.Connection) -> None:
        self.session = session
        self.rows = RowWriter(session, RelationCache(session, Subscription(1, "s", "", "", (), None), replica=True))
        self.sets = SetWriter(self.rows, replica=True)
        self.maps: dict[str, RelationMap] = {}

    def map(self, shape: Shape) -> RelationMap:
        if shape.name not in self.maps:
            table = describe(self.session, "public", shape.name)
            assert table is not None
            self.maps[shape.name] = map_relation(shape.relation, table)
        return self.maps[shape.name]

    def begin(self, case: Case) -> None:
        self.session.execute("BEGIN")
        self.rows.begin()
        for key in sorted(case.before):
            row = case.shape.tuple(key, [0] * len(case.shape.values), case.form)
            self.one_by_one([Insert(case.shape.relation.relid, row)], self.map(case.shape))
        self.session.execute(f"UPDATE public.{case.shape.name} SET local = 99".encode())

    def one_by_one(self, messages: list[Message], relation: RelationMap) -> None:
        transaction = RemoteTransaction(7, 0)
        for message in messages:
            match message:
                case Insert():
                    self.rows.insert(transaction, relation, set_cases.encode(message))
                case Update():
                    self.rows.update(Place(transaction, "UPDATE", relation, message.new, message.old))
                case Delete():
                    self.rows.delete(Place(transaction, "DELETE", relation, None, message.old))
        self.rows.sync()

    def content(self, case: Case) -> Rows:
        return self.session.execute(f"SELECT t::text FROM public.{case.shape.name} t ORDER BY 1".encode()).fetchall()

    def serially(self, case: Case) -> tuple[Rows, int] | None:
        """The table afterwards and the number of rows that were missing, None where a row was in the way."""
        self.begin(case)
        try:
            self.one_by_one(case.messages, self.map(case.shape))
            return self.content(case), len(self.rows.records)
        except StatementFailed as failure:
            return _in_the_way(failure)
        finally:
            self.session.execute("ROLLBACK")

    def as_sets(self, case: Case) -> tuple[Rows, set_writer.Outcome] | None:
        """The table afterwards, None where the target was not as it should be."""
        self.begin(case)
        self.sets.begin()
        relation = self.map(case.shape)
        try:
            outcome = self.sets.apply(case.payloads, {case.shape.relation.relid: relation}, in_stream=False)
            self.sets.finish()
            self.one_by_one([case.messages[at] for at in outcome.left], relation)
            assert not self.rows.records or outcome.left
            return self.content(case), outcome
        except Deviation:
            return None
        except StatementFailed as failure:
            return _in_the_way(failure)
        finally:
            self.session.execute("ROLLBACK")


def _in_the_way(failure: StatementFailed) -> None:
    """Nothing else is expected to fail."""
    if failure.error.sqlstate != "23505":
        raise failure


@pytest.fixture
def bench(subdb: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(set_writer, "PAYS_FROM", 1)
    with closing(target.connect(subdb.conninfo, "test")) as session:
        session.prepare_threshold = None  # its ROLLBACK would take away what the pipeline prepared
        session.execute("SET TimeZone = 'Europe/Vienna'")
        yield Bench(session)


def _traits(made: ChangeSet | str, case: Case) -> Iterator[str]:
    yield "binary" if case.form else "text"
    if isinstance(made, str):
        yield made
        return
    yield from (name for name in ("absent", "deletes", "inserts") if getattr(made, name) is not None)
    if made.effects < made.changes:
        yield "folded"
    if len(made.updates) > 1:
        yield "masks"
    if made.updates and not made.updates[0].columns:
        yield "nothing set"
    if made.inserts is not None and made.deletes is not None:
        yield "replaced, perhaps"


def test_sets_come_to_what_the_same_changes_do_one_by_one(bench: Bench) -> None:
    chance = random.Random(int(os.environ.get("PGSUB_SEED", "5")))
    shapes = [
        (set_cases.make(bench.session, number, types, full=full), full)
        for number, types in enumerate(set_cases.ALL)
        for full in (False, True)
    ]
    seen: Counter[str] = Counter()
    for turn in range(ROUNDS):
        shape, full = shapes[turn % len(shapes)]
        case = set_cases.draw(shape, chance, full=full)
        made = fold(bench.map(shape), columnar.decode(case.payloads, in_stream=False)[0])
        one_by_one, as_sets = bench.serially(case), bench.as_sets(case)
        seen.update(_traits(made, case))
        if as_sets is None:
            # it presupposes no more than holds where one by one nothing is missing and nothing in the way
            assert one_by_one is None or one_by_one[1] > 0, (turn, case)
            seen["deviated"] += 1
        else:
            assert one_by_one is not None, (turn, case)
            assert as_sets[0] == one_by_one[0], (turn, case)
            assert one_by_one[1] == 0 or as_sets[1].left, (turn, case)
            seen["left" if as_sets[1].left else "done"] += 1
    for what in ("folded", "absent", "deletes", "inserts", "masks", "replaced, perhaps", "text", "binary", "deviated"):
        assert seen[what] > 10, seen
