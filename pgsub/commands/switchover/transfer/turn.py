"""The end of a switchover, after clients may write on the target: clients are redirected and replication is reversed.

The publisher is only needed for the last step: it must still be fenced, and its slot is dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.commands.subscription.drop import drop
from pgsub.commands.subscription.enable_disable import disable, enable
from pgsub.commands.switchover.inner_reporter import InnerReporter
from pgsub.commands.switchover.parties import PUBLISHER, SwitchoverOptions
from pgsub.commands.switchover.transfer import giving_fence, right_to_write, server_gone
from pgsub.common import failpoints
from pgsub.common.errors import PgsubError, PublisherUnavailable
from pgsub.common.subscription import Subscription
from pgsub.switchover import journal
from pgsub.switchover.journal import Entry
from pgsub.target.ledger import worker_takeover
from pgsub.target.session.transactions import durable

#: Seconds within which the subscription's workers must end.
END_SECONDS = 60.0
#: Key in ``saved`` of the taking side: whether sessions from before the lifting of the fence were ended.
_LET_IN = "let_in"


def _nothing() -> None:
    pass


def end_subscription(options: SwitchoverOptions, store: StateStore, name: str, reporter: Reporter) -> None:
    """Disable a subscription, and wait until its workers have ended."""
    if store.subscription(name).enabled:
        disable(options.state_dir, name, reporter=reporter)
    wait(WaitOptions(name, options.state_dir, "disabled", timeout=END_SECONDS))


@dataclass(frozen=True, slots=True)
class Turn:
    """The last steps of a switchover.

    :ivar sub: the ending subscription. ``back`` is the reverse one, None if it is dropped.
    :ivar taking: a session on the target of ``sub``. ``kept`` has the PIDs of the command's other sessions there.
    """

    options: SwitchoverOptions
    store: StateStore
    sub: Subscription
    back: Subscription | None
    taking: psycopg.Connection
    reporter: Reporter
    timing: right_to_write.Timing
    kept: Collection[int] = ()

    def run(
        self, entry: Entry, *, promoted: Callable[[], None] = _nothing, enabled: Callable[[], None] = _nothing
    ) -> None:
        """Redirect clients, end the subscription, and enable the reverse one, or drop that if its target is gone.

        :param promoted: called after clients are redirected. ``enabled`` is called when the reverse one replicates.
        :raises PublisherUnavailable: everything is done except the last step.
        :raises PublisherLagged: so it is, and clients may have written on the publisher.
        """
        here = journal.of(self.taking, entry.id)
        assert here is not None
        if here.phase == journal.TAKEN:
            with self._told_if_interrupted(leads=self.options.promote_command is None):
                self._promote(here)
        with self._told_if_interrupted():
            promoted()
            self._turn(here, enabled)

    @contextlib.contextmanager
    def _told_if_interrupted(self, *, leads: bool = True) -> Iterator[None]:
        """Report what is left if the block is interrupted, because it cannot be undone.

        :param leads: whether no command has still to redirect clients to the target.
        """
        try:
            yield
        except KeyboardInterrupt:
            gone = "" if self.options.gone is None else f" --gone {self.options.gone}"
            self.reporter.warning(
                "the switchover was interrupted and is not finished: clients may write on the target",
                None if leads else "--promote-command has not run to its end, so clients may not be led there.",
                f"Let it finish:\n{self.options.command}{gone}",
            )
            raise

    def _promote(self, here: Entry) -> None:
        """Let clients write, and redirect them to the target."""
        with self.timing.step("promote"):
            self._let_write(here)
            right_to_write.commands(self.options, self.sub, self.back)("promote")
        with durable(self.taking):
            journal.move(self.taking, here.id, (journal.TAKEN,), journal.PROMOTED)
        failpoints.point("switchover.promoted")

    def _turn(self, here: Entry, enabled: Callable[[], None]) -> None:
        """End the subscription, and let the reverse one replicate."""
        with self.timing.step("turn"):
            with contextlib.suppress(PgsubError):  # told in the last step
                self._check_fence(here)
            self._end(fence=here.phase != journal.DONE)
            self._lead_back(enabled=here.phase == journal.DONE)
            enabled()
            if here.phase != journal.DONE:
                with durable(self.taking):
                    journal.move(self.taking, here.id, (journal.PROMOTED,), journal.DONE)
            failpoints.point("switchover.done")
            self._drop(here)

    def _check_fence(self, here: Entry) -> None:
        """Check that the publisher still keeps clients from writing, unless it is gone."""
        if self.options.gone != PUBLISHER:
            assert self.back is not None
            giving_fence.check(self.options, self.store, self.sub, self.back, here)

    def _let_write(self, here: Entry) -> None:
        """End sessions that would stay read-only. Do so once, because later sessions belong to writing clients."""
        saved = dict(here.saved or {})
        if saved.get(_LET_IN):
            return
        right_to_write.let_write(self.taking, here.fence, self.kept)
        with durable(self.taking):
            known = journal.saved({**saved, _LET_IN: True})
            journal.move(self.taking, here.id, (journal.TAKEN,), journal.TAKEN, saved=known)

    def _end(self, *, fence: bool) -> None:
        """End the subscription, because writes of the reverse one must not be sent here again.

        :param fence: whether to fence off a worker that still runs without its launcher.
        """
        end_subscription(self.options, self.store, self.sub.name, self.reporter)
        if fence:
            # guard: no worker of the subscription commits once the way back replicates
            worker_takeover.take_over(self.taking, self.sub.subid, worker_takeover.APPLY)
        failpoints.point("switchover.disabled")

    def _lead_back(self, *, enabled: bool) -> None:
        """Let the reverse subscription replicate, or drop it.

        :param enabled: whether it was enabled before. It then stays disabled if the user has disabled it since.
        """
        if self.options.gone == PUBLISHER:
            server_gone.drop_way_back(self.options, self.back, InnerReporter(self.reporter, backward=True))
            return
        assert self.back is not None
        # guard: a way back that was disabled since is not enabled again, without "not enabled and "
        if not enabled and not self.store.subscription(self.back.name).enabled:
            enable(self.options.state_dir, self.back.name, reporter=self.reporter)
        failpoints.point("switchover.enabled")

    def _drop(self, here: Entry) -> None:
        lost = self.options.gone == PUBLISHER
        try:
            self._check_fence(here)
            drop(self.options.state_dir, self.sub.name, keep_slot=lost, reporter=InnerReporter(self.reporter))
        except PublisherUnavailable as error:
            error.hint = (
                f"The writes were moved. Run this again when the publisher is back:\n{self.options.command}\n"
                f"If it is gone for good, and nothing is to lead back:\n{self.options.command} --gone {PUBLISHER}"
            )
            raise
