"""``switchover --gone``: does what the remaining server needs when the other is lost permanently.

NOTES

Only the user can know that a target which was given the right to write has not taken it. Therefore a server that gives
any answer, even a refusal, is not accepted as gone. Apart from that, the rules of the journal apply: a target that has
declined never takes the right, and a publisher does not give a right that it has released.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.subscription.drop import drop
from pgsub.commands.switchover.parties import TARGET, SwitchoverOptions, giving_session
from pgsub.commands.switchover.transfer import right_to_write
from pgsub.commands.switchover.under_way import check_command
from pgsub.common import failpoints
from pgsub.common.connections import conninfo as ci
from pgsub.common.connections.ping import ping
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.switchover import fence, journal
from pgsub.switchover.journal import Entry
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.schema import installation
from pgsub.target.session.transactions import durable

_PLAIN = {"sslmode": "disable", "gssencmode": "disable", "sslnegotiation": "postgres"}


def check_gone(options: SwitchoverOptions, sub: Subscription | None, back: Subscription | None) -> None:
    """Check that nothing answers (PQping) at any connection string of the server that is declared gone.

    :param sub: the ending subscription. ``back`` is the reverse one. One that is dropped is None.
    """
    ways = [] if sub is None else [(sub.connection, sub.target)]
    ways += [] if back is None else [(back.target, back.connection)]
    for publisher, target in ways:
        params = ci.usable(ci.parse(target if options.gone == TARGET else publisher, options.gone or ""))
        # guard: a server that answers is not reported as gone
        if _answers(params):
            raise StateForbids(
                f"the {options.gone} is not gone: it answers",
                detail=f"It is {ci.endpoint(params)}.",
                hint=f"See where the switchover stands:\n{options.command} --status",
            )


def _answers(given: Mapping[str, str]) -> bool:
    """Return whether any server answers, also without encryption, since its certificate may have expired.

    No password is sent.
    """
    given = {**given, "require_auth": "none", "target_session_attrs": "any"}  # fenced servers are read-only
    params = {**ci.missing_defaults(given, ci.KEEPALIVES), **given}
    return any(ping(make_conninfo("", **{**params, **way})) != pq.Ping.NO_RESPONSE for way in ({}, _PLAIN))


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
    check_gone(options, sub, back)
    right_to_write.decline(taking, entry)
    failpoints.point("switchover.declined")
    if entry.fence == fence.COMMAND:
        right_to_write.commands(options, sub, back)("release")
    drop_way_back(options, back, reporter)
    reporter.warning(
        "the publisher was not changed, which may still keep clients from writing",
        f'Subscription "{sub.name}" remains, and cannot continue.',
        f"Before clients write on the target, drop it:\npgsub drop {word(sub.name)} --keep-slot --yes\n"
        f"If the publisher comes back before that, this lets clients write there again:\n{options.command} --abort",
    )


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
        installed = installation.installed_version(giving) >= installation.VERSION
        there = journal.of(giving, entry.id) if installed else None
        if there is not None and not _is_left(there, sub, store):
            there = None
        yield None if there is None else (there, giving)


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
        drop(options.state_dir, back.name, if_exists=True, keep_target=True, reporter=reporter)
        failpoints.point("switchover.back_dropped")


def drop_without_target(options: SwitchoverOptions, sub: Subscription, back: Subscription, reporter: Reporter) -> None:
    """Drop the reverse subscription from the lost target."""
    drop(options.state_dir, back.name, if_exists=True, keep_slot=True, reporter=reporter)
    reporter.warning(
        f'subscription "{sub.name}" remains, and its slot keeps WAL on the publisher',
        hint=f"To drop both:\npgsub drop {word(sub.name)} --keep-target --yes",
    )
