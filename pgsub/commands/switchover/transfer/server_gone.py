"""``switchover --gone``: does what the remaining server needs when the other is lost permanently.

NOTES

Only the user can know that a target which was given the right to write has not taken it. Therefore a server that gives
any answer, even a refusal, is not accepted as gone, unless it is proven to be another one. Each host of a connection
string is asked by itself: libpq goes on to the next one where a server only starts up, and forgets that it answered.
Apart from that, the rules of the journal apply: a target that has declined never takes the right, and a publisher does
not give a right that it has released.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from pgsub.apply.verified_publisher import recorded_database
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.subscription.drop import drop
from pgsub.commands.switchover.inner_reporter import InnerReporter
from pgsub.commands.switchover.parties import PUBLISHER, TARGET, SwitchoverOptions, giving_session
from pgsub.commands.switchover.transfer import right_to_write
from pgsub.commands.switchover.under_way import check_command
from pgsub.common import failpoints
from pgsub.common.connections import conninfo as ci
from pgsub.common.connections.ping import ping
from pgsub.common.errors import PgsubError, StateForbids
from pgsub.common.query import scalar
from pgsub.common.quoting import literal, word
from pgsub.common.subscription import Subscription
from pgsub.publisher import database
from pgsub.publisher.database import Database
from pgsub.switchover import fence, journal, lost_side
from pgsub.switchover.journal import Entry
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.schema import installation
from pgsub.target.session.connect import connect
from pgsub.target.session.transactions import durable

_PLAIN = {"sslmode": "disable", "gssencmode": "disable", "sslnegotiation": "postgres"}
#: What answers in place of a database that is lost: another one, or one with a copy of the journal.
_ANOTHER, _COPY = "another", "copy"
#: Databases that nearly every server has.
_ALWAYS_THERE = ("postgres", "template1")
_HAS = "SELECT EXISTS (SELECT FROM pg_catalog.pg_database WHERE oid = %s)"
_NAMED = "SELECT EXISTS (SELECT FROM pg_catalog.pg_database WHERE datname = %s)"


class Lost(NamedTuple):
    """The database that the server which is declared gone had.

    :ivar database: None if no ledger tells it.
    :ivar switchover: ID of the switchover, which a copy of the database has in its journal.
    """

    database: Database | None
    switchover: str


def check_gone(
    options: SwitchoverOptions,
    sub: Subscription | None,
    back: Subscription | None,
    lost: Lost | None,
    reporter: Reporter,
) -> None:
    """Check that nothing, or only another database, answers at any connection string of the server declared gone.

    :param sub: the ending subscription. ``back`` is the reverse one. One that is dropped is None.
    """
    ways = [] if sub is None else [(sub.connection, sub.target)]
    ways += [] if back is None else [(back.target, back.connection)]
    others = []
    for publisher, target in ways:
        given = ci.usable(ci.parse(target if options.gone == TARGET else publisher, options.gone or ""))
        for params in filter(_answers, ci.by_host(given)):
            found = _identified(params, lost)
            # guard: a server that answers is not reported as gone
            if found != _ANOTHER:
                raise _not_gone(options, params, lost if found == _COPY else None)
            others.append(ci.endpoint(params))
    for place in dict.fromkeys(others):
        reporter.warning(
            f"another database answers in place of the {options.gone}, and was not changed",
            f"It is {place}.",
            "Keep clients from writing there.",
        )


def _answers(given: Mapping[str, str]) -> bool:
    """Return whether a host answers (PQping), also without encryption, since its certificate may have expired.

    No password is sent.
    """
    given = {**given, "require_auth": "none", "target_session_attrs": "any"}  # fenced servers are read-only
    params = {**ci.missing_defaults(given, ci.KEEPALIVES), **given}
    return any(ping(make_conninfo("", **{**params, **way})) != pq.Ping.NO_RESPONSE for way in ({}, _PLAIN))


def _identified(params: Mapping[str, str], lost: Lost | None) -> str | None:
    """Return what answers in place of a database that is lost, None if that may be the database itself."""
    if lost is None or lost.database is None:
        return None
    name = ci.resolved(params).get("dbname", "")
    for dbname in (name, *_ALWAYS_THERE):
        way = {**params, "target_session_attrs": "any", "dbname": dbname}
        try:
            session = connect(make_conninfo("", **way), "pgsub switchover", replica=False, views=False)
        except PgsubError:
            continue  # the next one tells a database that does not exist from a server that refuses
        with contextlib.closing(session), contextlib.suppress(PgsubError, psycopg.Error):
            return _compared(session, lost.database, lost.switchover, name)
        return None
    return None


def _compared(session: psycopg.Connection, known: Database, switchover: str, name: str) -> str | None:
    there = database.database(session)
    if there.name != name and scalar(session, _NAMED, (name,)):
        return None
    # guard: a server that has the database under another name is not taken for another one
    if there.system_identifier == known.system_identifier and scalar(session, _HAS, (known.oid,)):
        return None
    # guard: a copy of a server that may have taken the right, as pg_upgrade makes one, is not taken for another one
    if lost_side.has_journal(session) and journal.of(session, switchover) is not None:
        return _COPY
    return _ANOTHER


def _not_gone(options: SwitchoverOptions, params: Mapping[str, str], copy: Lost | None) -> StateForbids:
    """Return the error for a server that answers.

    :param copy: the database whose copy that server has, None if it may be the database itself.
    """
    message, place = f"the {options.gone} is not gone: it answers", f"It is {ci.endpoint(params)}."
    status = f"See where the switchover stands:\n{options.command} --status"
    if copy is None:
        detail = f"{place} Another server in its place is told apart only if pgsub can connect to it."
        return StateForbids(message, detail=detail, hint=status)
    return StateForbids(
        message,
        detail=f"{place} It is another database with a copy of the switchover's journal, and may have the right to"
        " write.",
        hint=f"{status}\nIf it is only a copy, keep clients from writing there, run this there, and try again:\n"
        f"BEGIN READ WRITE; DELETE FROM pgsub.switchover WHERE id = {literal(copy.switchover)}; COMMIT;",
    )


def decline(
    options: SwitchoverOptions,
    store: StateStore,
    sub: Subscription,
    entry: Entry,
    taking: psycopg.Connection,
    reporter: Reporter,
) -> None:
    """Decline the right on the taking side forever, and remove the reverse subscription."""
    back = store.way_back_of(entry.subid)
    check_gone(options, sub, back, Lost(recorded_database(taking, sub.subid), entry.id), reporter)
    _give_up(options, sub, back, entry, taking, reporter)
    if sub.way_back_of is not None and journal.given_away(taking, entry.id) is not None:
        then = f"Let clients write on the target again:\n{sub.switchover} --abort --gone {TARGET}"
    else:
        then = f"Before clients write on the target, drop it:\npgsub drop {word(sub.name)} --keep-slot --yes"
    reporter.warning(
        "the publisher was not changed, which may still keep clients from writing",
        f'Subscription "{sub.name}" remains, and cannot continue.',
        f"{then}\nIf the publisher comes back before that, this lets clients write there again:\n{options.command}"
        " --abort",
    )


def give_up_publisher(
    options: SwitchoverOptions,
    sub: Subscription,
    back: Subscription,
    entry: Entry,
    taking: psycopg.Connection,
    reporter: Reporter,
) -> None:
    """Decline the right on the taking side although the publisher has lost the ledger of the reverse subscription.

    It may be any server, so nothing is changed there.
    """
    database = ci.resolved(ci.parse(back.target, PUBLISHER)).get("dbname", "")
    reporter.warning(
        "the publisher was not changed, because it has lost what was made there for the way back",
        "It was restored, or its schema pgsub was dropped.",
        f"If clients cannot write there, run this there:\n{fence.reopening(database)}"
        if entry.fence == fence.READ_ONLY
        else "See that clients can write there.",
    )
    _give_up(options, sub, back, entry, taking, InnerReporter(reporter, backward=True))


def _give_up(
    options: SwitchoverOptions,
    sub: Subscription,
    back: Subscription | None,
    entry: Entry,
    taking: psycopg.Connection,
    reporter: Reporter,
) -> None:
    right_to_write.decline(taking, entry)
    failpoints.point("switchover.declined")
    if entry.fence == fence.COMMAND:
        right_to_write.commands(options, sub, back)("release")
    drop_way_back(options, back, reporter)


@contextlib.contextmanager
def returned(
    options: SwitchoverOptions, store: StateStore, sub: Subscription, taking: psycopg.Connection
) -> Iterator[tuple[Entry, psycopg.Connection] | None]:
    """Open a session on a giving side that was declared gone and is back, still fenced.

    :return: the row of the giving side and the session, None if there is no such server.
    :raises TargetUnavailable: the giving side cannot be reached.
    """
    entry = journal.of_subscription(taking, journal.TAKING, sub.subid)
    if entry is None or entry.phase != journal.DECLINED:
        yield None
        return
    with giving_session(options, sub) as giving:
        there = left(giving, entry, sub, store)
        yield None if there is None else (there, giving)


def left(giving: psycopg.Connection, entry: Entry, sub: Subscription, store: StateStore) -> Entry | None:
    """Return the row of a giving side whose reverse subscription this state store does not have, None if it has none.

    :param entry: the row of the taking side.
    """
    installed = installation.installed_version(giving) >= installation.VERSION
    there = journal.of(giving, entry.id) if installed else None
    return there if there is not None and _is_left(there, sub, store) else None


def _is_left(there: Entry, sub: Subscription, store: StateStore) -> bool:
    """Return whether a row of the giving side is left over from the subscription's switchover.

    Its ID comes from the taking side, which could name a row whose reverse subscription is in use.
    """
    # guard: a target does not release a publisher that gave the right to write to another target
    if there.subname != sub.name or store.subscription_by_id(there.subid) is not None:
        return False
    return there.side == journal.GIVING and there.phase != journal.RELEASED


def reopen(
    options: SwitchoverOptions, sub: Subscription, there: Entry, giving: psycopg.Connection, taking: psycopg.Connection
) -> None:
    """Let clients write on a giving side that is back. The taking side has declined, and never takes the right.

    :param there: the row of the giving side. It names the subscription to forget, because the other row could name any.
    """
    check_command(there, options, abort=True)
    right_to_write.release(there, giving, taking, right_to_write.commands(options, sub, None))
    with durable(giving):
        subscriptions.forget(giving, there.subid)
        journal.move(giving, there.id, (journal.RELEASING, journal.RELEASED), journal.RELEASED)


def drop_way_back(options: SwitchoverOptions, back: Subscription | None, reporter: Reporter) -> None:
    """Drop the reverse subscription to the lost publisher, with its slot on the target."""
    if back is not None:
        drop(options.state_dir, back.name, if_exists=True, keep_target=True, ends_switchover=True, reporter=reporter)
        failpoints.point("switchover.back_dropped")
