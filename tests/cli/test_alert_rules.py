"""What Prometheus makes of contrib's alert rules and of the metrics: its own tool says it."""

import json
import re
import shutil
import subprocess

import pytest
import servers
from fix_program import ROOT
from servers_debian import NotAvailable, fetch_program

from pgsub.commands.status.metrics import STATES

RULES = ROOT / "contrib" / "pgsub-alerts.yml"
HEALTHY = {
    "pgsub_slot_lost": "0+0x120",
    "pgsub_slot_lost_in_seconds": "864000+0x120",
    'pgsub_subscription_state{state="running"}': "1+0x120",
    'pgsub_subscription_state{state="blocked"}': "0+0x120",
    'pgsub_subscription_state{state="stopped"}': "0+0x120",
    'pgsub_subscription_state{state="waiting"}': "0+0x120",
    'pgsub_subscription_state{state="disabled"}': "0+0x120",
    'pgsub_tables{state="r"}': "3+0x120",
    'pgsub_tables{state="i"}': "0+0x120",
    "pgsub_worker_errors": "0+0x120",
    "pgsub_apply_lag_seconds": "1+0x120",
    "pgsub_apply_silent_seconds": "0+0x120",
    'pgsub_table_waiting_seconds{schema="public",relation="a"}': "9+0x120",
    'pgsub_conflicts_total{type="insert_exists"}': "7+0x120",
    'pgsub_held_bytes{schema="public",relation="a"}': "70+0x120",
    'pgsub_sequence_ahead{schema="public",relation="q"}': "0+0x120",
    "pgsub_prepared_transactions": "0+0x120",
    "pgsub_not_written": "0+0x120",
    'pgsub_build_info{version="1"}': "1+0x120",
    "up": "1+0x120",
}
#: What is different when each alert fires; None: nobody says it.
TROUBLES = {
    "PgsubSlotLost": {"pgsub_slot_lost": "1+0x120"},
    "PgsubSlotLostSoon": {"pgsub_slot_lost_in_seconds": "3600+0x120"},
    "PgsubBlocked": {'pgsub_subscription_state{state="blocked"}': "1+0x120"},
    "PgsubTableFails": {"pgsub_worker_errors": "1+0x120"},
    "PgsubNotServed": {'pgsub_subscription_state{state="stopped"}': "1+0x120"},
    "PgsubWaiting": {'pgsub_subscription_state{state="waiting"}': "1+0x120"},
    "PgsubNoTables": {'pgsub_tables{state="r"}': "0+0x120"},
    "PgsubDisabled": {'pgsub_subscription_state{state="disabled"}': "1+0x120"},
    "PgsubLag": {"pgsub_apply_lag_seconds": "301+0x120"},
    "PgsubSilent": {"pgsub_apply_silent_seconds": "90+0x120"},
    "PgsubTableWaits": {'pgsub_table_waiting_seconds{schema="public",relation="a"}': "90+0x120"},
    "PgsubConflicts": {'pgsub_conflicts_total{type="insert_exists"}': "7+1x120"},
    "PgsubHeldTable": {'pgsub_held_bytes{schema="public",relation="a"}': "2000000000+0x120"},
    "PgsubSequenceBehind": {'pgsub_sequence_ahead{schema="public",relation="q"}': "-5+0x120"},
    "PgsubPreparedPending": {"pgsub_prepared_transactions": "1+0x120"},
    "PgsubNotWritten": {"pgsub_not_written": "1+0x120"},
    "PgsubNoSubscription": dict.fromkeys(name for name in HEALTHY if name.startswith("pgsub_subscription_state")),
    "PgsubAbsent": {'pgsub_build_info{version="1"}': None},
    "PgsubDown": {'pgsub_build_info{instance="b"}': "1+0x60 stale", 'up{instance="b"}': "1+0x60 0+0x60"},
}


def test_each_state_that_is_not_running_has_an_alert():
    rules = RULES.read_text()
    states = set(STATES) - {"running"}
    covered = {
        word
        for found in re.findall(r'expr: pgsub_subscription_state\{state=~?"([a-z|]+)"\} == 1$', rules, re.M)
        for word in found.split("|")
    }
    assert covered == states


@pytest.fixture(scope="module")
def promtool():
    """Run the tool; what it objects to fails the test."""
    program = shutil.which("promtool")
    if program is None and not servers.may_fetch_more():
        pytest.skip("NOT TESTED: there is no promtool (package prometheus); make thorough fetches it on Debian")
    if program is None:
        try:
            program = str(fetch_program("prometheus", servers.FOLDER, "prometheus$") / "usr" / "bin" / "promtool")
        except NotAvailable as error:
            pytest.skip(f"NOT TESTED: there is no promtool: {error}")

    def check(*words, **options):
        ended = subprocess.run([program, *words], capture_output=True, text=True, **options)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return check


def test_the_rules_are_accepted(promtool):
    assert f"SUCCESS: {len(TROUBLES)} rules found" in promtool("check", "rules", str(RULES))


@pytest.mark.parametrize("alert", [None, *TROUBLES])
def test_an_alert_fires_in_its_trouble_and_no_other_does(promtool, tmp_path, alert):
    series = {**HEALTHY, **TROUBLES.get(alert, {})}
    firing = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    expected = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "110m"}
    test = {
        "interval": "1m",
        "input_series": [{"series": _of_sales(name), "values": values} for name, values in series.items() if values],
        "promql_expr_test": [{**expected, "exp_samples": firing}],
    }
    file = tmp_path / "test.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", str(file))


def _of_sales(series):
    name, _, labels = series.partition("{")
    return f'{name}{{subscription="sales",{labels}' if labels else f'{name}{{subscription="sales"}}'
