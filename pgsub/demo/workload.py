"""Writers that change the publisher during and after the copy, like ``pgbench`` in the server's tests.

Every writer has its own tables, so they never wait for each other. The order between them is random on purpose.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg

from pgsub.common.errors import PgsubError
from pgsub.demo.schema import NASTY

#: Minimum seconds between two transactions of a writer. It pauses for as long as it has worked, because otherwise its
#: changes would keep a busy machine busy.
_PAUSE = 0.02
_VERBS = ("INSERT", "UPDATE", "DELETE", "TRUNCATE")

Job = Callable[["Transaction"], None]


class Tally:
    """The counts of all writers: ``transactions``, ``rolled back``, ``large``, and rows or tables by SQL verb."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, counts: Counter[str]) -> None:
        """Add the counts of a transaction."""
        with self._lock:
            self._counts.update(counts)

    def counts(self) -> Counter[str]:
        """Return the sums so far."""
        with self._lock:
            return self._counts.copy()

    def rows(self) -> int:
        """Return the number of rows inserted, updated and deleted."""
        counts = self.counts()
        return sum(counts[verb] for verb in _VERBS[:3])

    def text(self) -> str:
        """Format ``12 transactions, 1 of them large, and 1 rolled back: 90 rows inserted, 30 updated, …``."""
        counts = self.counts()
        inserted, updated, deleted, truncated = (counts[verb] for verb in _VERBS)
        return (
            f"{counts['transactions']:,} transactions, {counts['large']:,} of them large,"
            f" and {counts['rolled back']:,} rolled back: {inserted:,} rows inserted, {updated:,} updated,"
            f" {deleted:,} deleted, {truncated:,} tables truncated"
        )


class Transaction:
    """A transaction of a writer: counted statements with parameters."""

    def __init__(self, connection: psycopg.Connection, chance: random.Random, sizes: Mapping[str, int]) -> None:
        self.connection = connection
        self.chance = chance
        self.sizes = sizes
        self.counts: Counter[str] = Counter()

    def run(self, statement: str, **values: Any) -> None:
        """Run a statement, in which ``%(nasty)s`` is a text of :data:`~pgsub.demo.schema.NASTY`."""
        values = {"nasty": self.chance.choice(NASTY), **values}
        cursor = self.connection.execute(statement.encode(), values)
        verb = (cursor.statusmessage or "").partition(" ")[0]
        if verb in _VERBS:
            self.counts[verb] += statement.count(",") + 1 if verb == "TRUNCATE" else cursor.rowcount

    def number(self, kind: str) -> int:
        """Choose one of the initial rows."""
        return self.chance.randint(1, self.sizes[kind])

    def key(self) -> uuid.UUID:
        """Choose a random key. The next key in the table is a random row."""
        return uuid.UUID(int=self.chance.getrandbits(128))


def _place_orders(do: Transaction) -> None:
    """Run several statements, one of which changes half of the rows that were just written."""
    first = do.number("products")
    do.run(
        """INSERT INTO shop."order"
           SELECT gen_random_uuid(), 1 + (%(any)s + g) %% %(customers)s, p.sku, 'new', g, clock_timestamp(), %(nasty)s
             FROM generate_series(1, 4) g,
                  (SELECT sku FROM shop.product WHERE sku >= %(sku)s ORDER BY sku LIMIT 5) p""",
        sku=f"SKU-{first:08}",
        any=first,
        customers=do.sizes["customers"],
    )
    some = """id IN (SELECT id FROM shop."order" WHERE id >= %(key)s ORDER BY id LIMIT %(count)s)"""
    do.run(f"""UPDATE shop."order" SET state = 'paid', note = NULL WHERE {some}""", key=do.key(), count=10)
    do.run(f"""UPDATE shop."order" SET amount = amount + 1 WHERE {some}""", key=do.key(), count=10)
    do.run(f"""DELETE FROM shop."order" WHERE {some}""", key=do.key(), count=6)


def _rename_products(do: Transaction) -> None:
    """Change keys of products, and so all orders that refer to them. Change prices, and so generated columns."""
    do.run(
        """UPDATE shop.product SET sku = left(sku, 12) || '/' || %(suffix)s
            WHERE sku IN (SELECT sku FROM shop.product WHERE sku >= %(sku)s ORDER BY sku LIMIT 2)""",
        sku=f"SKU-{do.number('products'):08}",
        suffix=do.chance.randrange(10**6),
    )
    do.run(
        """UPDATE shop.product SET price = price + 1, tags = tags || %(nasty)s::text, attributes = attributes - 'none'
            WHERE sku IN (SELECT sku FROM shop.product WHERE sku >= %(sku)s ORDER BY sku LIMIT 5)""",
        sku=f"SKU-{do.number('products'):08}",
    )


def _sign_up(do: Transaction) -> None:
    do.run(
        """INSERT INTO shop.customer (name, mail, vip)
           SELECT %(nasty)s, 'new' || g || '@example.org', NULL FROM generate_series(1, 5) g"""
    )
    do.run("UPDATE shop.customer SET name = %(nasty)s, vip = NOT vip WHERE id = %(id)s", id=do.number("customers"))


def _change_mind(do: Transaction) -> None:
    """Roll everything back. None of it may arrive."""
    do.run("""UPDATE shop."order" SET note = 'never' WHERE id >= %(key)s AND sku < 'SKU-00000005'""", key=do.key())
    do.run("DELETE FROM shop.product WHERE sku = 'never'")
    do.run("""INSERT INTO shop.customer (name) SELECT 'never' FROM generate_series(1, 2000)""")
    raise psycopg.Rollback


def _edit_documents(do: Transaction) -> None:
    """Update rows with and without their TOASTed value, or their key, and insert one."""
    some = "id IN (SELECT id FROM shop.document WHERE id >= %(key)s ORDER BY id LIMIT %(count)s)"
    do.run(f"UPDATE shop.document SET title = %(nasty)s, version = version + 1 WHERE {some}", key=do.key(), count=4)
    do.run(f"UPDATE shop.document SET id = gen_random_uuid(), version = 0 WHERE {some}", key=do.key(), count=1)
    do.run(f"UPDATE shop.document SET body = reverse(body) WHERE {some}", key=do.key(), count=1)
    do.run("INSERT INTO shop.document VALUES (gen_random_uuid(), %(nasty)s, repeat(%(nasty)s || 'x', 400), 1)")
    do.run(f"DELETE FROM shop.document WHERE {some}", key=do.key(), count=1)


def _edit_notes(do: Transaction) -> None:
    """Change rows that only the whole old row identifies, including a TOASTed value."""
    some = "ctid IN (SELECT ctid FROM shop.note WHERE author = %(author)s LIMIT 1)"
    do.run(f"UPDATE shop.note SET written = clock_timestamp() WHERE {some}", author=f"author {do.chance.randrange(20)}")
    do.run(f"UPDATE shop.note SET body = NULL WHERE {some}", author=f"author {do.chance.randrange(20)}")
    do.run("INSERT INTO shop.note VALUES (%(author)s, repeat(%(nasty)s, 400), 'infinity')", author="author 3")


def _measure(do: Transaction) -> None:
    """Change rows without a key, some of them duplicates. One change must affect only one of them."""
    some = "ctid IN (SELECT ctid FROM ops.reading WHERE sensor = %(sensor)s LIMIT %(count)s)"
    sensor = do.number("sensors")
    do.run(
        "INSERT INTO ops.reading SELECT %(sensor)s, 'infinity', 'NaN', %(nasty)s FROM generate_series(1, 8)",
        sensor=sensor,
    )
    do.run(f"UPDATE ops.reading SET value = value + 1 WHERE {some}", sensor=sensor, count=3)
    do.run(f"UPDATE ops.reading SET comment = %(nasty)s WHERE {some}", sensor=do.number("sensors"), count=2)
    do.run(f"DELETE FROM ops.reading WHERE {some}", sensor=sensor, count=3)


def _move_events(do: Transaction) -> None:
    """Move rows to another partition on the publisher only, because the target's partitions differ."""
    do.run("UPDATE ops.event SET moment = moment + interval '400 days' WHERE id = %(id)s", id=do.number("events"))
    do.run("UPDATE ops.event SET kind = %(nasty)s WHERE id BETWEEN %(id)s AND %(id)s + 3", id=do.number("events"))
    do.run("DELETE FROM ops.event WHERE id = %(id)s", id=do.number("events"))
    do.run("INSERT INTO ops.event SELECT -%(id)s, clock_timestamp(), %(nasty)s", id=do.number("events"))


def _edit_samples(do: Transaction) -> None:
    do.run(
        """UPDATE shop.sample SET words = %(nasty)s, list = array_append(list, %(nasty)s), number = - number,
                  document = jsonb_build_object('n', number::text, 'w', words), twice = - twice, grid = NULL
            WHERE id BETWEEN %(id)s AND %(id)s + 4""",
        id=do.number("samples"),
    )


def _append_log(do: Transaction) -> None:
    do.run("INSERT INTO ops.log SELECT clock_timestamp(), NULL, %(nasty)s FROM generate_series(1, 40)")


def _empty_baskets(do: Transaction) -> None:
    """Truncate two tables in one statement, and fill them again in the same transaction."""
    do.run('TRUNCATE shop.basket, shop."odd ""named"" one"')
    do.run("INSERT INTO shop.basket SELECT g, %(nasty)s FROM generate_series(1, 40) g")
    do.run("""INSERT INTO shop."odd ""named"" one" SELECT g, %(nasty)s, g FROM generate_series(1, 40) g""")
    do.run("""UPDATE shop."odd ""named"" one" SET "größe" = - "größe" WHERE "größe" %% 2 = 0""")


def _load(do: Transaction) -> None:
    """Write enough that the publisher streams the transaction before its end, and roll back a part of it."""
    lines = min(max(2000, do.sizes["orders"] // 20), 5000)
    insert = (
        "INSERT INTO ops.log SELECT clock_timestamp(), %(level)s, 'line ' || g FROM generate_series(1, %(lines)s) g"
    )
    do.run(insert, lines=lines, level="KEPT")
    do.run("SAVEPOINT part")
    before = do.counts.copy()
    do.run(insert, lines=lines, level="NEVER")
    do.run("ROLLBACK TO SAVEPOINT part")
    do.counts = before
    do.run(insert, lines=lines // 4, level="KEPT")
    do.counts["large"] += 1


#: One writer per line. Repeated jobs are done more often.
_WRITERS: tuple[Sequence[Job], ...] = (
    (_place_orders, _sign_up, _place_orders, _place_orders, _rename_products, _place_orders, _change_mind),
    (_edit_documents, _measure, _move_events, _edit_samples, _measure, _edit_notes, _move_events, _measure),
    (_append_log, _empty_baskets, _append_log, _load, *[_append_log] * 40),
)


class Workload:
    """All writers, each a session that does its jobs in turn. The context stops them at its end.

    :param sizes: from :func:`pgsub.demo.schema.sizes`.
    """

    def __init__(self, conninfo: str, sizes: Mapping[str, int]) -> None:
        self.tally = Tally()
        self._conninfo = conninfo
        self._sizes = sizes
        self._stop_event = threading.Event()
        self._rounds = [0] * len(_WRITERS)
        self._pool = ThreadPoolExecutor(len(_WRITERS))
        self._writers: list[Future[None]] = []

    def __enter__(self) -> Workload:
        self._writers = [self._pool.submit(self._write, number) for number in range(len(_WRITERS))]
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_event.set()
        self._pool.shutdown()

    def _write(self, number: int) -> None:
        chance = random.Random(number)
        with psycopg.connect(self._conninfo, autocommit=True, application_name=f"writer {number}") as connection:
            while not self._stop_event.is_set():
                for job in _WRITERS[number]:
                    began = time.monotonic()
                    self._do(Transaction(connection, chance, self._sizes), job)
                    if self._stop_event.wait(max(_PAUSE, time.monotonic() - began)):
                        break
                else:
                    self._rounds[number] += 1

    def _do(self, transaction: Transaction, job: Job) -> None:
        done = False
        with transaction.connection.transaction():
            job(transaction)
            done = True
        self.tally.add(transaction.counts + Counter(transactions=1) if done else Counter({"rolled back": 1}))

    def check(self) -> None:
        """Check that no writer has failed.

        :raises PgsubError: a writer has failed. The detail is its error.
        """
        for number, writer in enumerate(self._writers):
            failure = writer.exception() if writer.done() else None
            if failure is not None:
                raise PgsubError(f"writer {number} of the demo failed", detail=str(failure).strip())

    def rounds(self) -> int:
        """Return how often every writer has done all of its jobs."""
        return min(self._rounds)

    def stop(self) -> None:
        """Stop after the open transactions.

        :raises PgsubError: a writer failed.
        """
        self.__exit__()
        self.check()
