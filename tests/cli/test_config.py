"""pgsub config and config.toml: every setting has a value and an origin, and no password is shown."""

import grp
import json
import os
import tomllib
from pathlib import Path

import pytest
from fix_program import ROOT, one_error
from manual_pages import example_lines

_FILE = """
connection = "host=p password=hidden"
retry_seconds = 2
spool_limit = "1GB"

[status]
max-lag = "5s"
check = true

[run]
conf = ["spark.a=b", "spark.c=d"]
"""


@pytest.fixture
def file(tmp_path, monkeypatch, environment):
    """Write the configuration file."""
    before = dict(os.environ)
    environment["PGSUB_CONFIG"] = str(tmp_path / "config.toml")

    def write(text):
        (tmp_path / "config.toml").write_text(text)
        return str(tmp_path / "config.toml")

    yield write
    os.environ.clear()
    os.environ.update(before)


def _settings(pgsub, valid, *args):
    document = valid("config", pgsub("config", "--json", *args).stdout)
    return {one["setting"]: (one["value"], one["origin"]) for one in document["settings"]}


def test_every_setting_is_shown_with_its_origin_and_without_passwords(file, environment, pgsub, valid, folder):
    path = file(_FILE)
    environment["PGSUB_SPOOL_LIMIT"] = "3GB"
    os.environ["PGSUB_SPOOL_LIMIT"] = "3GB"
    os.environ["PGSUB_CONFIG"] = path
    found = _settings(pgsub, valid, "--color", "never")
    assert found["connection"] == ("host=p password=****", path)
    assert found["retry_seconds"] == ("2", path)
    assert found["spool_limit"] == ("3GB", "environment PGSUB_SPOOL_LIMIT")
    assert found["color"] == ("never", "flag --color")
    assert found["set_based"] == ("on", "default")
    assert found["state_dir"] == (str(folder), "environment PGSUB_STATE_DIR")
    assert found["run.conf"] == ("spark.a=b, spark.c=d", path)
    assert _settings(pgsub, valid, "--state-dir", "/else")["state_dir"] == ("/else", "flag --state-dir")


def test_options_of_a_command_have_the_defaults_of_the_file(file, pgsub, store):
    os.environ["PGSUB_CONFIG"] = file(_FILE)
    assert pgsub("status", "orders").returncode == 3  # --check: nothing serves it
    os.environ["PGSUB_CONFIG"] = file("")
    assert pgsub("status", "orders").returncode == 0


def test_the_example_of_the_manual_page_is_a_configuration(file, pgsub, valid):
    text = "\n".join(example_lines(ROOT / "man" / "pgsub.toml.5"))
    os.environ["PGSUB_CONFIG"] = path = file(text)
    found = _settings(pgsub, valid)
    values = {value for value, origin in found.values() if origin == path}
    wanted = tomllib.loads(text)
    assert values == {str(wanted["retry_seconds"]), *wanted["run"]["conf"], wanted["run"]["master"],
                      wanted["run"]["log-file"], wanted["status"]["max-lag"]}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('conection = "host=p password=hidden"', 'there is no setting "conection"'),
        ("[runs]\nmaster = 1", 'there is no command "runs"'),
        ("[run]\nmasters = 1", 'command "run" has no option "masters"'),
        ('connection = "password=hidden', "at end of document"),
        ('connection = "\\u0000"', '"connection" contains a null character'),
        ('[run]\nconf = ["a=\\u0000"]', '"run" contains a null character'),
        ("conf = " + "[" * 100_000, "nested too deeply"),
        ("run" + ".a" * 10_000 + " = 1", "nested too deeply"),
    ],
)
def test_an_unknown_key_ends_every_command(file, pgsub, text, said):
    os.environ["PGSUB_CONFIG"] = file(text)
    assert "hidden" not in one_error(pgsub("status"), 3, said)


def test_a_file_that_is_named_and_not_there_is_an_error(pgsub, tmp_path, monkeypatch):
    monkeypatch.setenv("PGSUB_CONFIG", str(tmp_path / "none.toml"))
    one_error(pgsub("status"), 3, "could not open configuration file", hint=False)


def test_a_file_that_another_user_wrote_or_could_write_is_refused(file, pgsub, tmp_path):
    path = file("")
    os.environ["PGSUB_CONFIG"] = path
    for mode in 0o620, 0o602:
        os.chmod(path, mode)
        assert "may write to it" in one_error(pgsub("status"), 3, "is not safe")
    os.chmod(path, 0o644)
    tmp_path.chmod(0o707)
    assert "Others may write to folder" in one_error(pgsub("status"), 3, "is not safe")
    tmp_path.chmod(0o1777)
    assert pgsub("status").returncode == 0


def test_a_folder_above_counts_as_the_folder_itself(pgsub, tmp_path, monkeypatch):
    folder = tmp_path / "above" / "between" / "folder"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    monkeypatch.setenv("PGSUB_CONFIG", str(folder / "config.toml"))
    assert pgsub("status").returncode == 0
    for one in folder, *folder.parents[:2]:
        one.chmod(0o707)
        assert f'Others may write to folder "{one}"' in one_error(pgsub("status"), 3, "is not safe", "chmod o-w")
        one.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another group")
def test_a_folder_that_its_group_may_write_is_refused_unless_the_group_is_the_users_own(file, pgsub, tmp_path):
    os.environ["PGSUB_CONFIG"] = file("")
    tmp_path.chmod(0o775)
    assert pgsub("status").returncode == 0  # root is alone in its group
    for group in 12345, grp.getgrnam("daemon").gr_gid:
        os.chown(tmp_path, -1, group)
        tmp_path.chmod(0o775)
        assert "Its group may write to folder" in one_error(pgsub("status"), 3, "is not safe", "chmod g-w")
        tmp_path.chmod(0o755)
        assert pgsub("status").returncode == 0


def test_a_link_is_refused_where_others_could_have_it_lead_elsewhere(file, pgsub, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "closed").mkdir(mode=0o755)
    first, second = tmp_path / "closed" / "first.toml", tmp_path / "open" / "second.toml"
    first.symlink_to(second)
    second.symlink_to(file(""))
    for named in second, first:  # by itself, and on the way
        os.environ["PGSUB_CONFIG"] = str(named)
        (tmp_path / "open").chmod(0o707)
        assert "Others may write to folder" in one_error(pgsub("status"), 3, "is not safe")
        (tmp_path / "open").chmod(0o755)
        assert pgsub("status").returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_link_of_another_user_is_refused_in_a_folder_that_keeps_files_apart(file, pgsub, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    own = Path(file(""))
    for link, leads_to, path in (("link.toml", own, "link.toml"), ("folder", own.parent, f"folder/{own.name}")):
        (shared / link).symlink_to(leads_to)
        os.environ["PGSUB_CONFIG"] = str(shared / path)
        assert pgsub("status").returncode == 0
        os.chown(shared / link, 12345, -1, follow_symlinks=False)
        assert "belongs to user id 12345" in one_error(pgsub("status"), 3, "is not safe", hint=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_file_or_folder_of_another_user_is_refused(file, pgsub, tmp_path):
    path = file("")
    os.environ["PGSUB_CONFIG"] = path
    for other in path, tmp_path:
        os.chown(other, 12345, -1)
        assert "belongs to user id 12345" in one_error(pgsub("status"), 3, "is not safe", hint=False)
        os.chown(other, 0, -1)


def test_an_empty_device_stands_for_no_configuration(file, pgsub):
    os.environ["PGSUB_CONFIG"] = "/dev/null"
    assert pgsub("status").returncode == 0


@pytest.mark.parametrize(
    "secret",
    [
        "host=p password=a&hidden",
        "host=p password=a\\ hidden user=u",
        "password = 'a hidden\\' hidden' host=p",
        "postgresql://u:a hidden@p/db",
        "postgresql://p/db?pass%77ord=hidden&user=u",
        "postgresql://p/db?user=u&%70assword=hidden",
        "host=p oauth_client_secret=hidden",
        "host=p oauth_client_secret=a\\ hidden nonsense=1",
        "host=p scram_client_key=hidden",
        "spark.authenticate.secret=hidden",
        "spark.authenticate.secret=a hidden",
        "spark.hadoop.fs.s3a.secret.key=hidden",
        "spark.hadoop.fs.s3a.access.key=hidden",
        "spark.hadoop.x.PASSWORD=hidden",
    ],
)
def test_no_part_of_a_secret_is_shown(file, pgsub, valid, secret):
    os.environ["PGSUB_CONFIG"] = file(f"connection = {json.dumps(secret)}\n[run]\nconf = [{json.dumps(secret)}]\n")
    found = _settings(pgsub, valid)
    for shown in found["connection"][0], found["run.conf"][0]:
        assert "hidden" not in shown
        assert "****" in shown
