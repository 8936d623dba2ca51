"""password_required where it is given: what the server refuses its owner is refused here, at every connect too."""

from __future__ import annotations

import os

import psycopg
import pytest
from embedded import Server
from fix_program import Cli, nothing_created, one_error
from fix_servers import Database
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgsub.apply.worker import worker
from pgsub.apply.worker.start import WorkerSpec
from pgsub.catalog.store import StateStore
from pgsub.common.errors import StateForbids
from pgsub.target.ledger import worker_takeover
from pgsub.target.session import connect as target

PASSWORD = "geheim"
_COLUMNS = "SELECT subpasswordrequired, pgsub_password_enforced FROM pg_subscription"


@pytest.fixture(scope="module")
def guarded():
    """A publisher that asks for passwords on TCP and for none on its socket."""
    with Server(fast=True, password=PASSWORD) as server:
        yield server


@pytest.fixture
def it(guarded, subdb, make_cli, request):
    """The program as a role of the target that is no superuser; ``asking`` and ``trusting`` lead to the publisher."""
    pubdb = Database(guarded, f"pub{os.getpid()}_{abs(hash(request.node.name))}")
    role = f"plain_{subdb.name}"
    for database in (pubdb, subdb):
        database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    pubdb.execute("INSERT INTO a VALUES (1), (2); CREATE PUBLICATION p FOR TABLE a")
    subdb.execute(f"CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE {subdb.name} TO {role}")
    subdb.execute(f"GRANT ALL ON a TO {role}; GRANT pg_create_subscription TO {role}")
    cli: Cli = make_cli(pubdb.conninfo, subdb.server.conninfo(subdb.name, role))
    cli.asking, cli.role = pubdb.conninfo, role
    without = {key: value for key, value in conninfo_to_dict(pubdb.conninfo).items() if key != "password"}
    cli.trusting = make_conninfo("", **{**without, "host": str(guarded.folder)})
    cli.pubdb, cli.subdb, cli.superuser = pubdb, subdb, subdb.conninfo
    yield cli
    subdb.execute(f"DROP SCHEMA IF EXISTS pgsub CASCADE; DROP OWNED BY {role}; DROP ROLE {role}")
    pubdb.drop()


def _server_says(it, conninfo, options):
    """The error of CREATE SUBSCRIPTION by the same role."""
    with it.subdb.connect(it.role) as session, pytest.raises(psycopg.Error) as raised:
        session.execute(f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p WITH ({options})".encode())
    return raised.value.diag


def _refused(it, conninfo, code, said, *words):
    it.connection = conninfo
    shown = one_error(it.create("s", "--no-wait", *words), code, f"error: {said.message_primary}\n")
    if said.message_detail:
        assert f"DETAIL:  {said.message_detail}" in shown
    nothing_created(it, it.pubdb, it.subdb)


@pytest.mark.long
def test_what_the_server_refuses_its_owner_is_refused_in_its_words(it):
    assert "password=" in it.asking and "password" not in it.trusting
    _refused(it, it.trusting, 11, _server_says(it, it.trusting, "password_required = false"), "--no-password-required")
    missing = _server_says(it, it.trusting, "connect = false")
    assert missing.message_detail == "Non-superusers must provide a password in the connection string."
    for words in ([], ["--dry-run"], ["--no-connect"]):
        _refused(it, it.trusting, 3, missing, "--password-required", *words)
    unasked = make_conninfo(it.trusting, password=PASSWORD)
    said = _server_says(it, unasked, "connect = true")
    assert said.message_detail == "Non-superuser cannot connect if the server does not request a password."
    _refused(it, unasked, 3, said, "--password-required")


@pytest.mark.long
def test_without_the_option_nothing_is_enforced_and_superusers_may_do_without(it):
    it.connection = it.trusting
    assert it.create("s", "--no-wait").returncode == 0
    assert it.sql(_COLUMNS) == [(1, 0)]
    one_error(it("alter", "s", "--password-required"), 3, "password is required")
    one_error(it("alter", "s", "--no-password-required"), 11, "password_required=false is superuser-only")
    assert it("drop", "s", "--yes").returncode == 0
    it.subdb.execute("DROP SCHEMA pgsub CASCADE")
    it.target = it.superuser
    for words, columns in ((["--password-required"], (1, 1)), (["--no-password-required"], (0, 0))):
        ended = it.create("s", "--no-wait", *words)
        assert ended.returncode == 0, ended.stderr
        assert it.sql(_COLUMNS) == [columns]
        assert it("refresh", "s", "--no-wait").returncode == 0
        assert it("drop", "s", "--yes").returncode == 0


@pytest.mark.long
def test_workers_go_on_with_a_password_and_end_where_the_publisher_asks_for_none_any_more(it):
    it.connection = it.asking
    ended = it.create("s", "--password-required")
    assert ended.returncode == 0, ended.stderr
    assert it.subdb.value("SELECT count(*) FROM a") == 2
    assert it.sql(_COLUMNS) == [(1, 1)]
    one_error(it("alter", "s", "--connection", it.trusting), 3, "password is required")
    unasked = make_conninfo(it.trusting, password=PASSWORD)
    one_error(it("alter", "s", "--connection", unasked), 3, "password is required")
    assert it("alter", "s", "--connection", it.asking).returncode == 0
    hba = it.pubdb.server.data / "pg_hba.conf"
    asking = hba.read_text()
    hba.write_text(asking.replace("scram-sha-256", "trust"))
    try:
        it.pubdb.execute("SELECT pg_reload_conf()")
        with target.connect(it.superuser, "test") as session, StateStore.open(it.state) as store:
            sub = store.subscription("s")
            claim = worker_takeover.take_over(session, sub.subid, worker_takeover.APPLY)
            with pytest.raises(StateForbids, match="password is required"):
                worker.run(WorkerSpec(sub, claim, "s", "s"))
        one_error(it("refresh", "s", "--no-wait"), 3, "password is required")
    finally:
        hba.write_text(asking)
        it.pubdb.execute("SELECT pg_reload_conf()")
    assert it("drop", "s", "--yes").returncode == 0


def test_a_role_that_gives_no_password_where_one_is_asked_for_is_told_so(it):
    it.connection, it.target = it.trusting, it.superuser
    assert it.create("s", "--no-wait").returncode == 0
    user = conninfo_to_dict(it.subdb.server.conninfo(it.subdb.name, it.role))
    assert it("alter", "s", "--target", make_conninfo("", **user)).returncode == 0  # OWNER TO: the ledger is shared
    asking = make_conninfo(it.asking, password="")
    said = one_error(it("alter", "s", "--connection", asking), 4, "no password supplied")
    assert "DETAIL:  Non-superusers must provide a password in the connection string." in said
