"""A session has the role of its user, or one that the user wishes: never one that the owner of the database wishes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import psycopg
import pytest
from fix_servers import Database
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgsub.common.connections import session_role
from pgsub.publisher import connect as publisher
from pgsub.target.ledger.schema import installation
from pgsub.target.session import connect as target
from pgsub.target.session import roles

_WHO = "SELECT current_user::text, session_user::text"
Open = Callable[..., psycopg.Connection]


@pytest.fixture
def names(subdb: Database) -> Iterator[list[str]]:
    """The owner of the database, a user, and a role: the user is a member of the others."""
    made = [f"{name}_{subdb.name}" for name in ("mallory", "app", "wished")]
    mallory, app, wished = made
    subdb.execute(f"CREATE ROLE {mallory}; CREATE ROLE {app} LOGIN REPLICATION; CREATE ROLE {wished} REPLICATION")
    subdb.execute(f"GRANT {mallory}, {wished} TO {app}; ALTER DATABASE {subdb.name} OWNER TO {mallory}")
    yield made
    subdb.execute(f"ALTER DATABASE {subdb.name} OWNER TO postgres")
    for name in made:
        subdb.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


def _target(conninfo: str) -> psycopg.Connection:
    return target.connect(conninfo, "test")


def _publisher(conninfo: str) -> psycopg.Connection:
    return publisher.connect(conninfo, application_name="test")


def _walsender(conninfo: str) -> psycopg.Connection:
    return publisher.connect(conninfo, application_name="test", replication=True)


@pytest.fixture(params=[_target, _publisher, _walsender], ids=["target", "publisher", "walsender"])
def connect(request: pytest.FixtureRequest, subdb: Database) -> Iterator[Open]:
    """Opens a session as a user with more keywords of a conninfo."""
    with contextlib.ExitStack() as stack:

        def open_(user: str, **more: str) -> psycopg.Connection:
            conninfo = make_conninfo(subdb.conninfo, user=user, **more)
            return stack.enter_context(contextlib.closing(request.param(conninfo)))

        yield open_


def _roles(session: psycopg.Connection, other: str) -> set[str]:
    """Which roles the session has, before and after it acted as another, in a transaction and after it."""
    found = []
    session.execute("BEGIN")
    found.append(session.execute(_WHO).fetchone())
    session.execute(session_role.set_role(other))
    assert (session.execute(_WHO).fetchone() or ())[0] == other
    session.execute(session_role.set_role(None))
    found.append(session.execute(_WHO).fetchone())
    session.execute("COMMIT")
    found.append(session.execute(_WHO).fetchone())
    return {row[0] for row in found if row is not None}


def test_a_role_that_the_database_gives_its_sessions_is_left(subdb: Database, names: list[str], connect: Open) -> None:
    mallory, app, wished = names
    subdb.execute(f"ALTER DATABASE {subdb.name} SET role = {mallory}")
    with contextlib.closing(subdb.connect(app)) as planted:
        assert planted.execute(_WHO).fetchone() == (mallory, app)
    assert _roles(connect(app), wished) == {app}
    assert _roles(connect("postgres"), wished) == {"postgres"}


def test_a_role_that_the_conninfo_names_is_meant(subdb: Database, names: list[str], connect: Open) -> None:
    mallory, app, wished = names
    for planted in (mallory, wished):
        subdb.execute(f"ALTER DATABASE {subdb.name} SET role = {planted}")
        assert _roles(connect(app, options=f"-c jit=off -c role={wished}"), mallory) == {wished}
    assert _roles(connect(app, options="-c role=none"), wished) == {app}


def test_a_role_that_the_users_own_settings_name_is_meant(subdb: Database, names: list[str], connect: Open) -> None:
    mallory, app, wished = names
    for planted in (mallory, wished):
        subdb.execute(f"ALTER DATABASE {subdb.name} SET role = {planted}")
        for where in ("", f" IN DATABASE {subdb.name}"):
            subdb.execute(f"ALTER ROLE {app}{where} SET role = {wished}")
            assert _roles(connect(app), mallory) == {wished}
            subdb.execute(f"ALTER ROLE {app}{where} RESET role")


def test_where_the_users_role_cannot_be_set_the_databases_does_not_take_its_place(
    subdb: Database, names: list[str], connect: Open
) -> None:
    mallory, app, wished = names
    subdb.execute(f"ALTER DATABASE {subdb.name} SET role = {mallory}; ALTER ROLE {app} SET role = {wished}")
    subdb.execute(f"REVOKE {wished} FROM {app}")
    with contextlib.closing(subdb.connect(app)) as planted:
        assert planted.execute(_WHO).fetchone() == (mallory, app)
    assert _roles(connect(app), mallory) == {app}


def test_no_setting_of_a_database_decides_what_money_is_written_as_or_lets_an_index_leave_out_rows(
    subdb: Database, names: list[str], connect: Open
) -> None:
    for name, value in {"lc_monetary": "POSIX", "gin_fuzzy_search_limit": "1"}.items():
        subdb.execute(f"ALTER DATABASE {subdb.name} SET {name} = '{value}'")
    session = connect("postgres")
    for name, value in {"lc_monetary": "C", "gin_fuzzy_search_limit": "0"}.items():
        assert session.execute(f"SHOW {name}".encode()).fetchone() == (value,)


def test_the_ledger_does_not_belong_to_the_role_that_the_database_names(subdb: Database, names: list[str]) -> None:
    mallory, _, wished = names
    subdb.execute(f"DROP SCHEMA IF EXISTS pgsub CASCADE; ALTER DATABASE {subdb.name} SET role = {mallory}")
    with contextlib.closing(_target(subdb.conninfo)) as session:
        installation.install(session)
        with session.transaction(), roles.acting(session, wished):
            pass
        session.execute("CREATE TABLE pgsub.mine ()")
    query = "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relnamespace = 'pgsub'::regnamespace"
    assert subdb.rows(query) == [("postgres",)]


@pytest.mark.parametrize(
    ("options", "role"),
    [
        ("", None),
        ("-c jit=off", None),
        ("-c role=x", "x"),
        ("-crole=x", "x"),
        ("--role=x", "x"),
        ("  -c   ROLE=none  -c role=y ", "y"),
        ("-c application_name=-c\\ role=x", None),
        ("-c application_name=role=x", None),
        (r"-c role=a\ b\\c", r"a b\c"),
        (r"-c application_name=a\\ -c role=x", "x"),
    ],
)
def test_options_are_read_as_the_server_reads_them(
    subdb: Database, names: list[str], options: str, role: str | None
) -> None:
    assert session_role.named(options) == role
    if role is not None:
        subdb.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)).as_string())
    try:
        with contextlib.closing(subdb.connect(options=options)) as session:
            assert session.execute("SHOW role").fetchone() == (role or "none",)
    finally:
        if role is not None:
            subdb.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)).as_string())
