"""Whose the ledger is: nobody's code runs with the rights of who writes there, an unmade superuser goes on."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from fix_servers import Database

from pgsub.common.errors import PermissionMissing
from pgsub.target.ledger.schema import installation
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_privileges


class Roles:
    """Roles that may create in the database."""

    def __init__(self, subdb: Database) -> None:
        self.subdb = subdb
        self._made: list[str] = []

    def __call__(self, name: str, options: str = "") -> str:
        role = f"{name} {self.subdb.name}"
        self.subdb.execute(
            f'CREATE ROLE "{role}" LOGIN {options}; GRANT CREATE ON DATABASE {self.subdb.name} TO "{role}"'
        )
        self._made.append(role)
        return role

    def session(self, role: str) -> psycopg.Connection:
        """A session as a worker begins it."""
        opened = target.connect(self.subdb.server.conninfo(self.subdb.name, role), "test")
        try:
            ledger_privileges.check(opened)
        except PermissionMissing:
            opened.close()
            raise
        return opened

    def drop(self) -> None:
        """Remove them with all that they own."""
        for role in self._made:
            self.subdb.execute(f'REASSIGN OWNED BY "{role}" TO postgres; DROP OWNED BY "{role}"; DROP ROLE "{role}"')


@pytest.fixture
def roles(subdb: Database) -> Iterator[Roles]:
    """Makes roles of the target's cluster."""
    made = Roles(subdb)
    yield made
    made.drop()


_OWNERS = """
SELECT DISTINCT o::regrole::text FROM (
SELECT nspowner AS o FROM pg_namespace WHERE nspname = 'pgsub' UNION ALL
SELECT relowner FROM pg_class WHERE relnamespace = 'pgsub'::regnamespace) AS x
"""
_WRITE = "INSERT INTO pgsub.subscription (subid, subname, state_store) VALUES (7, 's', 'test')"


def _pasted(error: PermissionMissing) -> str:
    return "\n".join(line for line in (error.hint or "").splitlines() if line.endswith(";"))


def test_a_ledger_that_a_superuser_made_is_there_when_it_is_none_any_more(roles: Roles) -> None:
    first, second = roles("first", "SUPERUSER"), roles("second", "SUPERUSER")
    for role in (first, second):
        with roles.session(role) as session:
            installation.install(session)
    roles.subdb.execute(f'ALTER ROLE "{first}" NOSUPERUSER; ALTER ROLE "{second}" NOSUPERUSER')
    assert roles.subdb.rows(_OWNERS) == [("postgres",)]
    for role in (first, second):
        with roles.session(role) as session:
            installation.check(session)
            installation.install(session)
            session.execute(_WRITE)
            session.execute("DELETE FROM pgsub.subscription")


def test_a_ledger_of_an_ordinary_role_is_its_own_and_nobody_elses(roles: Roles) -> None:
    owner, other, super_ = roles("owner"), roles("other"), roles("super", "SUPERUSER")
    with roles.session(owner) as session:
        installation.install(session)
    assert roles.subdb.rows(_OWNERS) == [(f'"{owner}"',)]
    roles.subdb.execute(ledger_privileges.grants(f'"{other}"'))
    for role in (other, super_):
        with pytest.raises(PermissionMissing, match=f'the ledger on the target belongs to role "{owner}"') as caught:
            roles.session(role)
        assert (caught.value.sqlstate, caught.value.exit_code) == ("42501", 11)
        assert f'with the rights of "{role}"' in (caught.value.detail or "")
    roles.subdb.execute(_pasted(caught.value))
    assert roles.subdb.rows(_OWNERS) == [("postgres",)]
    for role in (owner, other):  # whoever made it may be anybody, and so may those that he granted it to
        assert not roles.subdb.value("SELECT has_schema_privilege(%s, 'pgsub', 'USAGE')", role)
        assert not roles.subdb.value("SELECT has_table_privilege(%s, 'pgsub.event', 'SELECT, INSERT')", role)
        roles.subdb.execute(ledger_privileges.grants(f'"{role}"'))
    for role in (owner, other, super_):
        with roles.session(role) as session:
            installation.check(session)
            session.execute(_WRITE)
            session.execute("DELETE FROM pgsub.subscription")


@pytest.mark.parametrize("what", ["superuser", "owner of the database"])
def test_a_ledger_of_a_superuser_or_of_the_databases_owner_is_taken(roles: Roles, what: str) -> None:
    owner, other = roles("owner"), roles("other")
    with roles.session(owner) as session:
        installation.install(session)
    if what == "superuser":
        roles.subdb.execute(f'ALTER ROLE "{owner}" SUPERUSER')
    else:
        roles.subdb.execute(f'ALTER DATABASE {roles.subdb.name} OWNER TO "{owner}"')
    roles.session(other).close()


def test_default_privileges_let_nobody_else_use_a_new_ledger(roles: Roles) -> None:
    app, other = roles("app"), roles("other")
    with roles.session(app) as session:
        session.execute(f'ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO "{other}"')
        session.execute(f'ALTER DEFAULT PRIVILEGES GRANT ALL ON SCHEMAS TO "{other}", PUBLIC')
        installation.install(session)
    assert not roles.subdb.value("SELECT has_schema_privilege(%s, 'pgsub', 'USAGE')", other)
    assert not roles.subdb.value("SELECT has_table_privilege(%s, 'pgsub.held_change', 'SELECT, INSERT')", other)


def test_a_schema_without_a_table_is_taken_over_by_a_superuser_and_by_nobody_else(roles: Roles) -> None:
    owner, other = roles("owner"), roles("other")
    roles.subdb.execute(f'CREATE SCHEMA pgsub AUTHORIZATION "{owner}"; GRANT ALL ON SCHEMA pgsub TO "{other}"')
    with roles.session(other) as session:
        with pytest.raises(PermissionMissing, match="must be owner of schema pgsub"):
            installation.install(session)
        assert installation.installed_version(session) == 0
    with roles.session("postgres") as session:
        installation.install(session)
    assert roles.subdb.rows(_OWNERS) == [("postgres",)]
    for role in (owner, other):
        assert roles.subdb.value("SELECT NOT has_schema_privilege(%s, 'pgsub', 'USAGE, CREATE')", role)


def test_one_table_of_the_ledger_in_the_wrong_hands_is_enough(roles: Roles) -> None:
    mallory, app = roles("mallory"), roles("app")
    with roles.session(app) as session:
        installation.install(session)
        roles.subdb.execute(f'ALTER TABLE pgsub.event OWNER TO "{mallory}"')
        with pytest.raises(PermissionMissing, match=f'belongs to role "{mallory}"') as caught:
            ledger_privileges.check(session)
        assert _pasted(caught.value).splitlines()[0] == 'ALTER TABLE "pgsub"."event" OWNER TO "postgres";'


_RUNS = "query_to_xml('SELECT mine.text()', true, true, '')"
#: What an owner attaches, by what it is, and the name of that in the message.
_ATTACHED = {
    "trigger": "CREATE TRIGGER t BEFORE INSERT ON pgsub.subscription FOR EACH ROW EXECUTE FUNCTION mine.trap();"
    "ALTER TABLE pgsub.subscription ENABLE ALWAYS TRIGGER t",
    "rule": "CREATE RULE r AS ON INSERT TO pgsub.subscription DO ALSO DELETE FROM pgsub.event",
    "default": "ALTER TABLE pgsub.subscription ALTER slot_name SET DEFAULT mine.text()",
    "constraint": "ALTER TABLE pgsub.subscription ADD CHECK (mine.text() = 'x')",
    "operator": "ALTER TABLE pgsub.subscription ADD CHECK (subname OPERATOR(mine.===) 'x')",
    "domain": "ALTER TABLE pgsub.subscription ALTER slot_name TYPE mine.checked",
    "cast": "ALTER TABLE pgsub.subscription ALTER slot_name SET DEFAULT 'x'::mine.checked",
    "index": "CREATE INDEX ON pgsub.subscription ((mine.text()))",
    "predicate": "CREATE INDEX ON pgsub.subscription (subid) WHERE subname = mine.text()",
    "policy": "CREATE POLICY p ON pgsub.subscription USING (mine.text() = 'x')",
    "child": "CREATE TABLE mine.kid () INHERITS (pgsub.subscription);"
    "CREATE TRIGGER t BEFORE UPDATE ON mine.kid FOR EACH ROW EXECUTE FUNCTION mine.trap();"
    "ALTER TABLE mine.kid ENABLE ALWAYS TRIGGER t",
    "parent": "CREATE TABLE mine.old (subname text NOT NULL); ALTER TABLE pgsub.subscription INHERIT mine.old",
    "foreign key": "CREATE TABLE mine.ref (a int REFERENCES pgsub.subscription ON DELETE CASCADE);"
    "CREATE CONSTRAINT TRIGGER t AFTER DELETE ON mine.ref DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION mine.trap()",
    "statistics": "CREATE STATISTICS mine.s ON subname, (mine.text()) FROM pgsub.subscription",
    "system's function in a check": f"ALTER TABLE pgsub.subscription ADD CHECK ({_RUNS} IS NOT NULL)",
    "system's function in a default": f"ALTER TABLE pgsub.subscription ALTER slot_name SET DEFAULT ({_RUNS})::text",
    "view": "ALTER TABLE pgsub.subscription RENAME TO was;"
    "CREATE VIEW pgsub.subscription AS SELECT * FROM pgsub.was WHERE mine.text() = 'x'",
}


@pytest.mark.parametrize("what", _ATTACHED)
def test_what_an_earlier_owner_attached_to_the_ledger_is_found(roles: Roles, what: str) -> None:
    mallory = roles("mallory")
    with roles.session(mallory) as session:
        installation.install(session)
        session.execute(
            "CREATE SCHEMA mine; CREATE FUNCTION mine.trap() RETURNS trigger LANGUAGE plpgsql"
            " AS 'BEGIN RETURN new; END';"
            "CREATE FUNCTION mine.text() RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT ''x''';"
            "CREATE FUNCTION mine.equal(text, text) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT $1 = $2';"
            "CREATE OPERATOR mine.=== (FUNCTION = mine.equal, LEFTARG = text, RIGHTARG = text);"
            "CREATE DOMAIN mine.checked AS text CHECK (mine.text() = 'x')"
        )
        session.execute(_ATTACHED[what].encode())
    with pytest.raises(PermissionMissing, match="belongs to role") as caught:
        roles.session("postgres")
    roles.subdb.execute(_pasted(caught.value))  # whose it is now does not make it harmless
    with pytest.raises(PermissionMissing, match=r"pgsub\.subscription\"? is not part of the ledger") as caught:
        roles.session("postgres")
    if pasted := _pasted(caught.value):
        roles.subdb.execute(pasted)
        roles.session("postgres").close()


def test_who_may_act_as_the_ledgers_owner_gives_itself_what_it_lacks(roles: Roles) -> None:
    owner, member, nobody = roles("owner", "SUPERUSER"), roles("member"), roles("nobody")
    with roles.session(owner) as session:
        installation.install(session)
    roles.subdb.execute(
        f'ALTER SCHEMA pgsub OWNER TO "{owner}"; GRANT "{owner}" TO "{member}" WITH INHERIT FALSE, SET TRUE'
    )
    with roles.session(nobody) as session:
        ledger_privileges.give(session)
        with pytest.raises(PermissionMissing, match="permission denied to keep the ledger"):
            installation.check(session)
    with roles.session(member) as session:
        ledger_privileges.give(session)
        assert session.execute("SELECT current_user::text").fetchone() == (member,)
        assert session.execute("SELECT has_schema_privilege('pgsub', 'USAGE')").fetchone() == (True,)


def test_a_role_that_was_granted_all_keeps_what_it_needs_and_can_attach_nothing(roles: Roles) -> None:
    app, other, third = roles("app"), roles("other"), roles("third")
    with roles.session(app) as session:
        installation.install(session)
    roles.subdb.execute(ledger_privileges.grants(f'"{third}"'))
    roles.subdb.execute(f'GRANT USAGE ON SCHEMA pgsub TO "{other}"')
    roles.subdb.execute(f'GRANT ALL ON ALL TABLES IN SCHEMA pgsub TO "{other}"; ALTER SCHEMA pgsub OWNER TO postgres')
    roles.subdb.execute(f'REASSIGN OWNED BY "{app}" TO postgres')
    with pytest.raises(PermissionMissing, match=r"privilege (TRIGGER|REFERENCES) of .* is not part of the ledger"):
        roles.session(third)  # which may not take it away
    roles.session("postgres").close()
    roles.session(third).close()
    with roles.session(other) as session:
        session.execute(_WRITE)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            session.execute(
                "CREATE TRIGGER t BEFORE INSERT ON pgsub.subscription"
                " FOR EACH ROW EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()"
            )
