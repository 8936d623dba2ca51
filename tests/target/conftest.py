"""A ledger with one subscription, and sessions on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.schema import installation
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.session import connect as target

if TYPE_CHECKING:
    from fix_servers import Database

SUBID = 7


@pytest.fixture
def connect(subdb: Database) -> Iterator[Callable[..., psycopg.Connection]]:
    """Opens sessions as workers do; the test need not close them."""
    with ExitStack() as stack:

        def open_(name: str = "test", **options: bool) -> psycopg.Connection:
            return stack.enter_context(closing(target.connect(subdb.conninfo, name, **options)))

        yield open_


@pytest.fixture
def session(connect: Callable[..., psycopg.Connection]) -> psycopg.Connection:
    """A worker's session on a database with a ledger and subscription 7, which has tables a and b in ``i``."""
    opened = connect()
    installation.install(opened)
    opened.execute("CREATE TABLE public.a (id int PRIMARY KEY, v text)")
    opened.execute("CREATE TABLE public.b (id int PRIMARY KEY, v text)")
    rows = opened.execute("SELECT oid::bigint, relname FROM pg_class WHERE relname IN ('a', 'b') ORDER BY relname")
    relations = [RelationState(oid, "public", name, "i") for oid, name in rows]
    subscriptions.register(opened, SUBID, "s", "test", "slot", relations, slot_intent=True)
    return opened
