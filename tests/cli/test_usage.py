"""The command line itself: help, wrong options, values, and where options may stand."""

import json

import pytest

from pgsub import __version__
from pgsub.cli.app import program
from pgsub.cli.command_tree.tree import describe

COMMANDS = [
    "create",
    "run",
    "refresh",
    "alter",
    "status",
    "wait",
    "enable",
    "disable",
    "disable-on-error",
    "conflicts",
    "skip-lsn",
    "origin-advance",
    "verify",
    "reconcile",
    "switchover",
    "drop",
    "metrics",
    "config",
    "demo",
    "version",
    "completion",
]


def test_the_commands_are_those_that_the_program_promises():
    assert [command.name for command in describe(program()).commands] == COMMANDS


@pytest.mark.parametrize("command", describe(program()).commands, ids=lambda command: command.name)
def test_every_command_has_a_line_a_description_and_examples_that_start_with_pgsub(command):
    assert command.page.summary and not command.page.summary.endswith(".")
    assert command.page.paragraphs()
    assert len(command.page.examples) >= 2
    assert all(example.startswith(("pgsub ", "source <(pgsub ")) for _, example in command.page.examples)
    assert all(option.help.endswith(".") for option in command.options)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_goes_to_stdout_and_ends_with_0(pgsub, command):
    ended = pgsub(command, "-h")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"Usage: pgsub {command} [OPTION]...")
    assert "Examples:\n" in ended.stdout and "General options:\n" in ended.stdout


def test_options_of_create_are_those_of_create_subscription():
    create = next(command for command in describe(program()).commands if command.name == "create")
    options = {option.names[0]: option for option in create.options}
    switches = (
        "connect create-slot enabled copy-data binary two-phase disable-on-error password-required failover"
        " run-as-owner messages sequences copy-atomic wait"
    )
    assert {name: option.opposite for name, option in options.items() if option.opposite} == {
        f"--{name}": f"--no-{name}" for name in switches.split()
    }
    assert options["--streaming"].words == ("off", "on", "parallel")
    assert options["--origin"].words == ("any", "none")
    assert options["--apply-mode"].words == ("batched", "transactional")
    assert options["--publication"].required and options["--publication"].repeatable
    assert options["--connection"].variable == "PGSUB_CONNECTION" and options["--target"].variable == "PGSUB_TARGET"


def test_without_a_command_the_help_goes_to_stderr_and_the_code_is_2(pgsub):
    ended = pgsub()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Usage: pgsub ")


def test_version_is_one_line(pgsub):
    assert pgsub("--version").stdout == f"pgsub {__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["create", "s", "--publication", "p", "--timeout", "5x"],
            "invalid value for '--timeout': \"5x\" is not a duration",
        ),
        (
            ["create", "s", "--publication", "p", "--timeout", "5"],
            "invalid value for '--timeout': \"5\" is not a duration",
        ),
        (["create", "s", "--publication", "p", "--streaming", "maybe"], "invalid value for '--streaming'"),
        (
            ["create", "s", "--publication", "p", "--max-sync-workers", "0"],
            "invalid value for '--max-sync-workers': must be at least",
        ),
        (
            ["create", "s"],
            "missing option '--publication', option '--connection' (env var: 'PGSUB_CONNECTION')"
            " and option '--target' (env var: 'PGSUB_TARGET')",
        ),
        (["create", "--target", "port=1"], "missing argument 'NAME', option '--publication' and option '--connection'"),
        (["create", "s", "--connection", "port=1", "--target", "port=1"], "missing option '--publication'"),
        (["create", "s", "--publication", "p"], "no connection string for the publisher, and none for the target"),
        (["conflicts"], "missing argument"),
        (["create", "s", "--publication", "p", "--conf", "k"], '"k" is not a setting: expected key=value'),
        (["create", "s", "--publication", "p", "--connection", "-"], "no connection string on standard input"),
        (["run", "--until-lsn", "123"], "invalid value for '--until-lsn': invalid LSN \"123\""),
        (["run", "--until-lsn", "0/1", "--until-caught-up"], "cannot be used together"),
        (["wait", "s", "--for", "lsn=zz"], "invalid value for '--for': invalid LSN \"zz\""),
        (["wait", "s", "--for", "ready"], "invalid value for '--for': \"ready\" is not a condition"),
        (["wait", "s"], "missing option '--for'"),
        (["status", "--check", "--max-lag", "-1s"], "invalid value for '--max-lag'"),
        (["status", "--max-lag", "1s"], "--max-lag needs --check"),
        (["status", "--watch", "--check"], "--watch cannot be used together"),
        (["status", "--view", "sqlite_master"], 'view "sqlite_master" does not exist'),
        (["stauts"], "Did you mean 'status'"),
        (["enable", "s", "--colour"], "no such option: --colour (did you mean --color?)"),
        (["completion", "tcsh"], "invalid value for 'bash|zsh|fish'"),
        (["--color", "sometimes", "status"], "invalid value for '--color'"),
        (["drop", "orders"], 'dropping subscription "orders" needs --yes'),
        (["refresh", "orders", "--resync", "public.a"], "emptying a table needs --yes"),
        (["alter", "orders"], "nothing to alter"),
        (["alter", "orders", "--refresh"], "--refresh needs a change of publications"),
        (["alter", "orders", "--no-copy-data"], "--no-copy-data needs a change of publications"),
        (
            ["alter", "orders", "--add-publication", "x", "--drop-publication", "y"],
            "--add-publication and --drop-publication cannot be used together",
        ),
        (["alter", "orders", "--streaming", "maybe"], "invalid value for '--streaming': \"maybe\" is not one of"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_an_error_in_our_form(pgsub, store, args, message):
    ended = pgsub(*args)
    assert (ended.returncode, ended.stdout) == (2, "")
    first = ended.stderr.splitlines()[0]
    assert first.startswith("pgsub: error: ") and message in first
    assert not first.endswith(".")


def test_an_option_that_resembles_none_is_not_taken_for_another(pgsub):
    assert pgsub("enable", "s", "--foo").stderr.splitlines()[0] == "pgsub: error: no such option: --foo"


def test_a_target_that_the_environment_names_is_not_missing(pgsub, monkeypatch):
    monkeypatch.setenv("PGHOST", "127.0.0.1")
    first = pgsub("create", "s").stderr.splitlines()[0]
    assert "'--publication' and option '--connection'" in first and "--target" not in first


#: A command line of each command that asks; what it would do is given as well.
ASKING = {
    "drop": ["drop", "nosuch"],
    "refresh": ["refresh", "nosuch", "--resync", "public.a"],
    "verify": ["verify", "nosuch", "--repair"],
    "reconcile": ["reconcile", "nosuch"],
    "switchover": ["switchover", "nosuch"],
    "skip-lsn": ["skip-lsn", "nosuch", "0/10"],
    "origin-advance": ["origin-advance", "nosuch", "0/10"],
    "conflicts": ["conflicts", "replay", "nosuch", "1"],
}
MORE_ASKING = [
    ["refresh", "nosuch", "--adopt"],
    ["switchover", "nosuch", "--back"],
    ["switchover", "nosuch", "--abort", "--gone", "target"],
    ["skip-lsn", "nosuch", "--conflict", "update_missing", "--table", "public.a", "--limit", "1"],
    ["conflicts", "prune", "nosuch", "--replayed"],
]


def test_every_command_that_asks_is_known_here():
    asking = {command.name for command in describe(program()).commands if _names(command).intersection({"--yes"})}
    assert asking == ASKING.keys() | {"create"}


def _names(command):
    return {name for option in command.options for name in option.names}


@pytest.mark.parametrize("args", [*ASKING.values(), *MORE_ASKING], ids=" ".join)
def test_nobody_is_asked_about_a_subscription_that_does_not_exist(pgsub, store, args):
    ended = pgsub(*args)
    assert ended.returncode == 3
    assert "does not exist" in ended.stderr.splitlines()[0] and "nosuch" in ended.stderr.splitlines()[0]
    assert "--yes" not in ended.stderr


def test_a_subscription_that_exists_is_asked_about(pgsub, store):
    for words in (*ASKING.values(), *MORE_ASKING):
        ended = pgsub(*("orders" if word == "nosuch" else word for word in words))
        assert (ended.returncode, "--yes" in ended.stderr) == (2, True), ended.stderr


def test_dropping_what_is_not_there_needs_no_answer_where_that_is_no_error(pgsub, store):
    ended = pgsub("drop", "nosuch", "--if-exists")
    assert (ended.returncode, "--yes" in ended.stderr) == (0, False)


def test_several_publications_in_one_option_are_told_apart(pgsub, store):
    ended = pgsub("alter", "orders", "--drop-publication", "pub, other")
    assert ended.returncode == 3
    assert ended.stderr.splitlines()[-1] == "HINT:  An option names one publication: repeat it for pub and other."


def test_a_usage_error_names_the_help_of_the_command_as_its_last_line(pgsub):
    assert pgsub("wait", "s", "--for", "ready").stderr.splitlines()[-1] == "pgsub wait --help"


def test_a_usage_error_shows_no_password_of_a_forgotten_quote(pgsub):
    ended = pgsub(
        "create", "s", "--publication", "p", "--connection", "host=a", "password=geheim", "postgresql://u:wort@h"
    )
    assert ended.returncode == 2
    assert "geheim" not in ended.stderr and "wort" not in ended.stderr


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30.0), ("5m", 300.0), ("2h", 7200.0), ("1.5s", 1.5), ("1d", 86400.0)]
)
def test_durations_have_units(text, seconds):
    from pgsub.cli.command_tree.option_values import parse_duration

    assert parse_duration(text) == pytest.approx(seconds)


def test_general_options_stand_before_or_behind_the_command(pgsub, store, tmp_path):
    other = str(tmp_path / "other")
    for args in (["--state-dir", other, "status", "--json"], ["status", "--json", "--state-dir", other]):
        assert json.loads(pgsub(*args).stdout)["subscriptions"] == []
    assert len(json.loads(pgsub("status", "--json").stdout)["subscriptions"]) == 2


def test_the_version_document_follows_its_schema_and_nothing_heavy_is_needed_for_it(pgsub, valid):
    ended = pgsub("version", "--json")
    document = valid("version", ended.stdout)
    assert document["pgsub"] == __version__
    assert document["protocol"] == [1, 2, 3, 4]
    lines = dict(
        line.rsplit(" ", 1) for line in pgsub("version").stdout.splitlines() if not line.startswith("protocol")
    )
    assert lines["psycopg"] == document["psycopg"] and lines["libpq"] == document["libpq"]
