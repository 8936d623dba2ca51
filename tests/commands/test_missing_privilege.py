"""A privilege that apply's role has lost: shown as what blocks the subscription, until it is granted."""

from __future__ import annotations

import pytest
from fix_program import one_error, until


@pytest.fixture
def restricted(launcher, tables):
    """The launcher's program, and a role for a subscription ``few`` that owns nothing, caught up."""
    pubdb, subdb = tables
    role = f"few_{subdb.name}"
    subdb.execute(f"CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE {subdb.name} TO {role}")
    subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON a, b TO {role}")
    launcher.connection, launcher.target = pubdb.conninfo, subdb.server.conninfo(subdb.name, role)
    ended = launcher.create("few", "--no-wait", "--no-copy-data")
    assert ended.returncode == 0, ended.stderr
    assert launcher("wait", "few", "--for", "caught-up", "--timeout", "2m").returncode == 0
    yield launcher, role
    assert launcher("drop", "few", "--yes").returncode == 0
    subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.long
def test_a_missing_privilege_blocks_under_its_name_until_it_is_granted(restricted, tables):
    cli, role = restricted
    pubdb, subdb = tables
    subdb.execute(f"REVOKE INSERT, UPDATE ON a FROM {role}")
    before = cli.status("few")["last_error"]
    pubdb.execute("INSERT INTO a VALUES (1001, 'new')")
    until(lambda: cli.status("few")["state"] == "blocked")
    first = cli.status("few")
    seen = [first["last_error"]]

    def three_more():
        found = cli.status("few")
        assert (found["state"], found["blocked"]["since"]) == ("blocked", first["blocked"]["since"])
        seen.append(found["last_error"])
        return seen[-1]["attempts"] >= seen[0]["attempts"] + 3

    until(three_more)
    assert before is None and seen[0]["class"] == "PermissionMissing"
    assert {(one["relation"], one["finish_lsn"], one["xid"]) for one in seen} == {
        ("public.a", seen[0]["finish_lsn"], seen[0]["xid"])
    }
    lacks = f'role "{role}" cannot SET ROLE to "postgres" (its own privileges do not suffice: it lacks INSERT on'
    lacks += ' table "public.a")'
    assert seen[0]["message"] == lacks.partition(" (")[0]
    checked = cli("status", "few", "--check")
    assert checked.returncode == 6 and lacks in checked.stderr
    assert lacks in cli("status").stdout and lacks in first["blocked"]["reason"]
    one_error(cli("wait", "few", "--for", "caught-up", "--timeout", "1m"), 11, "cannot SET ROLE")
    log = cli.running.log.read_text()
    assert log.count("DETAIL:  Its own privileges do not suffice") == 1
    assert "DETAIL:  This is attempt 3 with the same error." in log
    steps = cli("status", "few", "--runbook").stdout
    assert "skip-lsn" not in steps and "pgsub alter few --hold public.a" in steps
    assert "pgsub refresh few --dry-run" in steps
    assert "What the publications publish needs INSERT, UPDATE, TRUNCATE." in cli("refresh", "few", "--dry-run").stderr
    [grant] = [line.strip() for line in steps.splitlines() if " ON TABLE " in line]
    subdb.execute(grant)
    ended = cli("wait", "few", "--for", "caught-up", "--timeout", "2m")
    assert ended.returncode == 0, ended.stderr
    assert cli.status("few")["state"] == "running"
    assert subdb.value("SELECT count(*) FROM a WHERE id = 1001") == 1
