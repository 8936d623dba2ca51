"""What is looked at on both servers before anything is created. Mirrors the checks of CreateSubscription and more.

What the server refuses is refused here; what it only meets later (a missing column) is a warning, or an error with
``--strict``. Everything is read in bulk: a thousand tables cost a handful of round trips.
"""

from pgsub.commands.preflight.findings import Caution, Preflight, Table, report
from pgsub.commands.preflight.servers import (
    check_conflict_rules,
    check_given_slot,
    check_other_database,
    check_publisher,
    check_target,
    check_two_phase,
    tables_of_rules,
)
from pgsub.commands.preflight.tables import check_tables

__all__ = [
    "Caution",
    "Preflight",
    "Table",
    "check_conflict_rules",
    "check_given_slot",
    "check_other_database",
    "check_publisher",
    "check_tables",
    "check_target",
    "check_two_phase",
    "report",
    "tables_of_rules",
]
