"""A subscription that a conflict stops, from the first look to the end, through the program alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fix_program import Cli, until, valid

if TYPE_CHECKING:
    from fix_servers import Database

RETRY = {"PGSUB_RETRY_SECONDS": "0.3"}


def _runbook(cli: Cli) -> list[dict[str, Any]]:
    return valid("status", cli("status", "s", "--runbook", "--json").stdout)["runbook"]


def test_a_conflict_is_seen_compared_and_cured_by_what_the_program_says(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    pubdb, subdb = tables
    assert cli.create("s", "--no-wait").returncode == 0
    launcher = cli.launcher(env=RETRY)
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "60s").returncode == 0
    subdb.execute("INSERT INTO a VALUES (500, 'mine'); DELETE FROM a WHERE id = 1")
    pubdb.execute("UPDATE a SET t = 'changed' WHERE id = 1; INSERT INTO a VALUES (500, 'theirs')")

    assert cli("wait", "s", "--for", "error", "--timeout", "30s").returncode == 0
    until(lambda: cli.status()["state"] == "blocked")
    shown = cli.status()
    assert shown["blocked"]["finish_lsn"] == shown["last_error"]["finish_lsn"]
    assert shown["blocked"]["restarts"] >= 2
    listed = valid("conflicts", cli("conflicts", "list", "s", "--json").stdout)["conflicts"]
    assert [(one["conflict_type"], one["action"]) for one in listed] == [("insert_exists", "stopped")]
    assert shown["blocked"]["next"] == f"pgsub conflicts show s {listed[0]['id']}"
    compared = cli(*shown["blocked"]["next"].split()[1:]).stdout
    assert "t\ttheirs\tmine\t*\n" in compared

    assert cli("disable-on-error", "s", "on").returncode == 0
    assert cli("wait", "s", "--for", "disabled", "--timeout", "30s").returncode == 0
    steps = _runbook(cli)
    [statement] = [line for step in steps for line in step["statements"]]
    subdb.execute(statement)
    assert ["pgsub enable s"] in [step["commands"] for step in steps]
    assert cli("enable", "s").returncode == 0
    until(lambda: subdb.value("SELECT t FROM a WHERE id = 500") == "theirs")
    until(lambda: cli.status()["last_error"] is None)

    missing, cured = valid("conflicts", cli("conflicts", "list", "s", "--json").stdout)["conflicts"]
    assert (cured["id"], cured["action"]) == (listed[0]["id"], "applied") and cured["attempts"] >= 3
    assert (missing["conflict_type"], missing["action"], missing["key"]) == ("update_missing", "skipped", "(id)=(1)")
    stats = cli.status()["stats"]
    assert stats["confl_insert_exists"] == stats["apply_error_count"] == cured["attempts"]
    assert (stats["confl_update_missing"], stats["confl_update_deleted"], stats["stats_reset"]) == (1, 0, None)
    assert cli("status", "s", "--reset-stats").returncode == 0
    stats = cli.status()["stats"]
    assert {name: n for name, n in stats.items() if n} == {
        name: stats[name] for name in ("subid", "subname", "stats_reset")
    }
    assert _runbook(cli) == []
    log = launcher.log.read_text()  # type: ignore[attr-defined]
    assert f"ERROR:  {cured['message']}\n" in log and "DETAIL:  Key already exists in unique index" in log
    assert cli.stop(launcher) == 0
