"""A table, type or operator that takes the name of another: its code says in the server's log where it is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fix_servers import Database

#: For code of the other one to call.
CODE = """
CREATE FUNCTION said() RETURNS bool LANGUAGE plpgsql IMMUTABLE AS $$
    BEGIN RAISE LOG 'code of the other one ran in %', current_database(); RETURN true; END $$;
CREATE FUNCTION planned(int) RETURNS bool LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN public.said(); END $$;
CREATE FUNCTION fired() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM public.said(); RETURN NULL; END $$;
"""
_SWAP = """
BEGIN;
ALTER TABLE {0} RENAME TO old;
CREATE TABLE {0} (LIKE old INCLUDING ALL);
CREATE INDEX ON {0} (id) WHERE planned(1);
CREATE TRIGGER fired BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {0} EXECUTE FUNCTION fired();
ALTER TABLE {0} ENABLE ALWAYS TRIGGER fired;
COMMIT
"""


class Ran:
    """Tells whether code ran from now on."""

    def __init__(self, db: Database) -> None:
        self._db, self._log = db, db.server.log
        self._offset = self._log.stat().st_size

    @property
    def ran(self) -> bool:
        """Whether any code of the other one ran since."""
        with self._log.open("rb") as log:
            log.seek(self._offset)
            return f"code of the other one ran in {self._db.name}".encode() in log.read()


class Swapped(Ran):
    """A table that was exchanged for another."""

    def __init__(self, db: Database, table: str = "t") -> None:
        db.execute(CODE)
        db.execute(_SWAP.format(table))
        super().__init__(db)
