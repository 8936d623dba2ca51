"""The options of ``alter``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgsub.commands.serve.synchronize import ServiceOptions


@dataclass(frozen=True, slots=True)
class AlterOptions(ServiceOptions):
    """The options of ``alter``. An option that was not given is None or empty.

    :ivar settings: options of SET (…), by field of Subscription.
    """

    name: str
    state_dir: Path
    connection: str | None = None
    target: str | None = None
    rename_to: str | None = None
    set_publication: tuple[str, ...] = ()
    add_publication: tuple[str, ...] = ()
    drop_publication: tuple[str, ...] = ()
    refresh: bool | None = None
    copy_data: bool | None = None
    slot_name: str | None = None  #: ``none`` to remove the slot
    hold: tuple[str, ...] = ()  #: qualified names of tables
    release: tuple[str, ...] = ()
    two_phase: bool | None = None
    publisher_upgraded: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    on_conflict: tuple[str, ...] = ()  #: rules to add; with ``default``, rules to remove
    environment: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False

    @property
    def publications(self) -> bool:
        """Whether the list of publications changes."""
        return bool(self.set_publication or self.add_publication or self.drop_publication)

    @property
    def named(self) -> tuple[str, ...]:
        """The publications to check for: like ``AlterSubscription``, only those that are set or added."""
        return self.set_publication or self.add_publication

    @property
    def holds(self) -> bool:
        """Whether to hold or release tables."""
        return bool(self.hold or self.release)

    @property
    def refreshes(self) -> bool:
        """Whether to change the tables, too: as in the server, unless --no-refresh is given."""
        return self.publications and self.refresh is not False
