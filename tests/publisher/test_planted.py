"""Whoever may make a schema on the publisher plants a ledger there: nothing of it is called by pgsub's session."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgsub.publisher.connect import connect
from pgsub.publisher.publication import tables_with_other_origins
from pgsub.target.session import ledger_privileges

if TYPE_CHECKING:
    from fix_servers import Database

pytestmark = pytest.mark.publishers

_MALLORY = f"planter_{os.getpid()}"
_TRAP = "LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'called as %', current_user; END$$"
_PLANTS = {
    "view": f"CREATE FUNCTION pgsub.trap() RETURNS oid {_TRAP};"
    "CREATE VIEW pgsub.subscription_rel AS SELECT pgsub.trap() AS srrelid",
    "cast": f"CREATE TYPE pgsub.odd AS (x int); CREATE FUNCTION pgsub.trap(pgsub.odd) RETURNS oid {_TRAP};"
    "CREATE CAST (pgsub.odd AS oid) WITH FUNCTION pgsub.trap(pgsub.odd) AS IMPLICIT;"
    "CREATE TABLE pgsub.subscription_rel (srrelid pgsub.odd); INSERT INTO pgsub.subscription_rel VALUES (ROW(1))",
}


@pytest.fixture
def mallory(pubdb: Database) -> Iterator[psycopg.Connection]:
    """The session of a role that owns a schema pgsub and nothing else."""
    pubdb.execute(f"CREATE ROLE {_MALLORY} LOGIN; CREATE SCHEMA pgsub AUTHORIZATION {_MALLORY}")
    pubdb.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    with contextlib.closing(pubdb.connect(_MALLORY)) as session:
        session.execute("GRANT USAGE ON SCHEMA pgsub TO PUBLIC")
        yield session
    pubdb.execute(f"DROP OWNED BY {_MALLORY} CASCADE; DROP ROLE {_MALLORY}")


@pytest.mark.parametrize("plant", _PLANTS)
def test_nothing_is_called_that_was_planted_in_a_ledger_of_the_publisher(
    pubdb: Database, mallory: psycopg.Connection, plant: str
) -> None:
    mallory.execute(_PLANTS[plant].encode())
    mallory.execute("GRANT SELECT ON pgsub.subscription_rel TO PUBLIC")
    with contextlib.closing(connect(pubdb.conninfo, application_name="x")) as source:
        assert tables_with_other_origins(source, ["p"], ledger=True) == []


def test_a_ledger_of_the_publisher_is_read_only_where_it_is_trusted(
    pubdb: Database, mallory: psycopg.Connection
) -> None:
    mallory.execute("CREATE TABLE pgsub.subscription_rel (srrelid oid)")
    mallory.execute("INSERT INTO pgsub.subscription_rel VALUES ('public.t'::regclass)")
    mallory.execute("GRANT SELECT ON pgsub.subscription_rel TO PUBLIC")
    with contextlib.closing(connect(pubdb.conninfo, application_name="x")) as source:
        assert not ledger_privileges.trusted(source)
        assert tables_with_other_origins(source, ["p"]) == []
        pubdb.execute("ALTER SCHEMA pgsub OWNER TO postgres; ALTER TABLE pgsub.subscription_rel OWNER TO postgres")
        assert ledger_privileges.trusted(source)
        assert [one.name for one in tables_with_other_origins(source, ["p"], ledger=True)] == ["t"]


def test_an_index_that_calls_something_is_not_planned_with_by_whoever_looks_whether_it_is_trusted(
    pubdb: Database, mallory: psycopg.Connection
) -> None:
    mallory.execute(
        f"CREATE TABLE pgsub.subscription_rel (srrelid oid); CREATE FUNCTION pgsub.trap() RETURNS bool"
        f" IMMUTABLE LANGUAGE plpgsql AS $$BEGIN ASSERT current_user = '{_MALLORY}'; RETURN true; END$$;"
        "CREATE INDEX ON pgsub.subscription_rel (srrelid) WHERE pgsub.trap();"
        "GRANT SELECT ON pgsub.subscription_rel TO PUBLIC"
    )
    with contextlib.closing(connect(pubdb.conninfo, application_name="x")) as source:
        assert not ledger_privileges.trusted(source)
        pubdb.execute("ALTER SCHEMA pgsub OWNER TO postgres; ALTER TABLE pgsub.subscription_rel OWNER TO postgres")
        assert not ledger_privileges.trusted(source)
        with pytest.raises(psycopg.errors.AssertFailure):
            source.execute("SELECT FROM ONLY pgsub.subscription_rel WHERE srrelid = 1")


def test_a_foreign_child_of_a_relation_is_not_asked(pubdb: Database, mallory: psycopg.Connection) -> None:
    pubdb.execute(f"CREATE EXTENSION postgres_fdw; GRANT USAGE ON FOREIGN DATA WRAPPER postgres_fdw TO {_MALLORY}")
    info = pubdb.connection.info
    mallory.execute(
        f"CREATE FUNCTION pgsub.trap() RETURNS oid {_TRAP}; CREATE VIEW pgsub.v AS SELECT pgsub.trap() AS srrelid;"
        "CREATE TABLE pgsub.subscription_rel (srrelid oid);"
        "GRANT SELECT ON pgsub.v, pgsub.subscription_rel TO PUBLIC;"
        "CREATE SERVER lo FOREIGN DATA WRAPPER postgres_fdw"
        f" OPTIONS (host '{info.host}', port '{info.port}', dbname '{pubdb.name}');"
        "CREATE USER MAPPING FOR PUBLIC SERVER lo OPTIONS (user 'postgres');"
        "CREATE FOREIGN TABLE pgsub.child () INHERITS (pgsub.subscription_rel) SERVER lo"
        " OPTIONS (schema_name 'pgsub', table_name 'v')".encode()
    )
    with contextlib.closing(connect(pubdb.conninfo, application_name="x")) as source:
        assert not ledger_privileges.trusted(source)
        assert tables_with_other_origins(source, ["p"], ledger=True) == []
        if source.execute("SELECT 1 FROM pg_settings WHERE name = 'restrict_nonsystem_relation_kind'").fetchone():
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="non-system foreign table"):
                source.execute("SELECT FROM pgsub.subscription_rel")


def test_a_view_that_took_a_tables_place_is_not_evaluated(pubdb: Database, mallory: psycopg.Connection) -> None:
    mallory.execute(_PLANTS["view"].encode())
    mallory.execute("GRANT SELECT ON pgsub.subscription_rel TO PUBLIC")
    with contextlib.closing(connect(pubdb.conninfo, application_name="x")) as source:
        if source.execute("SELECT 1 FROM pg_settings WHERE name = 'restrict_nonsystem_relation_kind'").fetchone():
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="access to non-system view"):
                source.execute("COPY (SELECT * FROM pgsub.subscription_rel) TO STDOUT")
