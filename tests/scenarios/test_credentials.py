"""TLS with certificates on both sides, and credentials that stop being good while a subscription runs.

After PostgreSQL's src/test/ssl/t/001_ssltests.pl and src/test/authentication/t/001_password.pl.
"""

from __future__ import annotations

import pytest
from fix_program import until
from fix_servers import Database
from fix_tls import encrypting, installed, with_tls
from psycopg.conninfo import make_conninfo

_HBA = """
local all all trust
hostssl all certified 127.0.0.1/32 cert
hostssl all secretive 127.0.0.1/32 scram-sha-256
host all postgres 127.0.0.1/32 trust
"""


@pytest.fixture(scope="module")
def guarded(make_server, certificates):
    """A publisher's database that is reached over TLS only."""
    server = make_server(binaries=with_tls())
    database = Database(server, "app")
    database.execute("CREATE TABLE t (v text)")
    database.execute("CREATE ROLE certified LOGIN REPLICATION; CREATE ROLE secretive LOGIN REPLICATION PASSWORD 'old'")
    database.execute("GRANT SELECT ON t TO certified, secretive; CREATE PUBLICATION p FOR TABLE t")
    encrypting(server, certificates)
    (server.data / "pg_hba.conf").write_text(_HBA)
    server.reload()
    return database


def created(launcher, guarded, subdb, certificates, name, **more):
    """A running subscription over verified TLS."""
    subdb.execute("CREATE TABLE t (v text)")
    conninfo = make_conninfo(guarded.conninfo, host="localhost", hostaddr="127.0.0.1", sslmode="verify-full", **more)
    conninfo = make_conninfo(conninfo, sslrootcert=str(certificates / "ca.crt"))
    words = ["--connection", conninfo, "--target", subdb.conninfo, "--publication", "p", "--timeout", "100s"]
    ended = launcher("create", name, *words)
    assert ended.returncode == 0, ended.stderr
    written(guarded, subdb, f"{name} first")
    encrypted = "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = %s"
    assert guarded.value(encrypted, more["user"]) is True
    return conninfo


def written(guarded, subdb, word):
    """Write a row and wait until it has arrived."""
    guarded.execute("INSERT INTO t VALUES (%s)", word)
    subdb.wait("SELECT count(*) = 1 FROM t WHERE v = %s", word)


def cut(guarded, user):
    """End the sessions of a role: it has to log in again."""
    guarded.rows("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", user)


def refused(launcher, name, words):
    """The publisher does not let the subscription in: an error that is retried, and says why."""

    def shown():
        found = launcher.status(name)["last_error"]
        return found if found and words in found["message"] else None

    assert until(shown)["class"] == "PublisherUnavailable"
    assert launcher.status(name)["subenabled"]


@pytest.mark.long
def test_a_certificate_that_expires_keeps_the_subscription_out_until_it_is_renewed(
    launcher, guarded, subdb, certificates
):
    client = {"sslcert": str(certificates / "client.crt"), "sslkey": str(certificates / "client.key")}
    created(launcher, guarded, subdb, certificates, "certified", user="certified", **client)
    installed(guarded.server, certificates, "expired", into="good")
    guarded.server.reload()
    cut(guarded, "certified")
    refused(launcher, "certified", "certificate")
    guarded.execute("INSERT INTO t VALUES ('certified meanwhile')")
    installed(guarded.server, certificates, "good")
    guarded.server.reload()
    subdb.wait("SELECT count(*) = 1 FROM t WHERE v = 'certified meanwhile'")
    until(lambda: launcher.status("certified")["last_error"] is None)
    assert launcher("drop", "certified", "--yes").returncode == 0


@pytest.mark.long
def test_a_password_that_is_changed_keeps_the_subscription_out_until_it_is_told(launcher, guarded, subdb, certificates):
    conninfo = created(launcher, guarded, subdb, certificates, "secretive", user="secretive", password="old")
    guarded.execute("ALTER ROLE secretive PASSWORD 'new'")
    cut(guarded, "secretive")
    refused(launcher, "secretive", "password authentication failed")
    guarded.execute("INSERT INTO t VALUES ('secretive meanwhile')")
    ended = launcher("alter", "secretive", "--connection", make_conninfo(conninfo, password="new"))
    assert ended.returncode == 0, ended.stderr
    subdb.wait("SELECT count(*) = 1 FROM t WHERE v = 'secretive meanwhile'")
    assert launcher("drop", "secretive", "--yes").returncode == 0
