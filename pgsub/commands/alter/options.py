"""What ``alter`` is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgsub.commands.serve.synchronize import ServiceOptions


@dataclass(frozen=True, slots=True)
class AlterOptions(ServiceOptions):
    """The options of ``alter``; None, or empty, where one was not given.

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
    slot_name: str | None = None  #: ``none`` for no slot
    hold: tuple[str, ...] = ()  #: qualified names of tables
    release: tuple[str, ...] = ()
    two_phase: bool | None = None
    publisher_upgraded: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    on_conflict: tuple[str, ...] = ()  #: rules to add, or with ``default`` to take back
    environment: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False

    @property
    def publications(self) -> bool:
        """Whether the list of publications is changed."""
        return bool(self.set_publication or self.add_publication or self.drop_publication)

    @property
    def named(self) -> tuple[str, ...]:
        """Publications that the publisher should have: AlterSubscription checks what is set or added, and no others."""
        return self.set_publication or self.add_publication

    @property
    def holds(self) -> bool:
        """Whether tables are to be held or released."""
        return bool(self.hold or self.release)

    @property
    def refreshes(self) -> bool:
        """Whether the tables follow: as in the server, unless --no-refresh is given."""
        return self.publications and self.refresh is not False
