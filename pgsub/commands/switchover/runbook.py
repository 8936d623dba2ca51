"""The runbook of a running switchover: possible next steps in its present phase, and their effects."""

from __future__ import annotations

from pgsub.commands.switchover.outcome import Choice
from pgsub.commands.switchover.parties import PUBLISHER, TARGET, TIMEOUT, SwitchoverOptions
from pgsub.commands.switchover.under_way import promotes
from pgsub.switchover import fence, journal
from pgsub.switchover.journal import Entry

#: Seconds that a longer pause adds to the elapsed time.
_MORE = 60


def choices(
    options: SwitchoverOptions, entry: Entry, here: Entry | None, there: Entry | None, away: tuple[str, ...]
) -> list[Choice]:
    """Return the possible next steps, the usual one first.

    :param entry: a row that is known. ``here`` is the taking side's row, ``there`` the giving side's, None if unknown.
    :param away: sides that cannot be reached.
    """
    go_on, abort = _commands(options, entry)
    if here is not None and here.phase in journal.HAS_TAKEN:
        end = Choice("finish it", go_on)
        lost = Choice("end it without the publisher, to which nothing leads back then", f"{go_on} --gone {PUBLISHER}")
        return [end, lost] if away else [end]
    undone = (here is not None and here.phase == journal.DECLINED) or (
        there is not None and there.phase == journal.RELEASING
    )
    if undone:
        found = [Choice("leave everything as it was", abort)]
    elif journal.TAKING in away:
        found = _without_target(entry, go_on, abort)
    elif there is not None and _is_over(options, there):
        longer = f"{go_on} --timeout {int(there.fenced_for or 0) + _MORE}s"
        found = [
            Choice("leave everything as it was, as the next run does because the time of the pause is over", abort),
            Choice("let it continue with a longer pause", longer),
        ]
    else:
        found = [Choice("let it continue", go_on), Choice("leave everything as it was", abort)]
    if journal.GIVING in away:
        found.append(
            Choice("leave the target as it was, if the publisher is gone for good", f"{abort} --gone {PUBLISHER}")
        )
    if journal.TAKING in away:
        lost_writes = " and what was written there is lost" if entry.phase == journal.GIVEN else ""
        what = f"let clients write on the publisher, if the target is gone for good{lost_writes}"
        found.append(Choice(what, f"{abort} --gone {TARGET}"))
    return found


def _is_over(options: SwitchoverOptions, there: Entry) -> bool:
    """Return whether the next run can only undo the switchover, because the pause has lasted too long."""
    limit = TIMEOUT if options.timeout is None else options.timeout
    return there.phase == journal.FENCED and (there.fenced_for or 0.0) > limit


def _without_target(entry: Entry, go_on: str, abort: str) -> list[Choice]:
    if entry.phase == journal.GIVEN:
        return [Choice("let it continue, once the target is back", go_on)]
    return [Choice("let clients write on the publisher again", abort)]


def _commands(options: SwitchoverOptions, entry: Entry) -> tuple[str, str]:
    """Return the commands that continue and that undo the switchover, with the options that they need."""
    fenced = entry.fence == fence.COMMAND and options.fence_command is None
    told = promotes(entry) and options.promote_command is None
    more = " --fence-command COMMAND" if fenced else ""
    return (
        f"{options.command}{more}{' --promote-command COMMAND' if told else ''}",
        f"{options.command}{more} --abort",
    )
