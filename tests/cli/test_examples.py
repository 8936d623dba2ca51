"""Examples and Dockerfile: well formed, of this version, and with command lines that the program understands."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv

import pytest
from command_lines import understood
from fix_program import ROOT
from installation import SOURCES, copy_sources, run_lines

import pgsub

yaml = pytest.importorskip("yaml", reason="NOT TESTED: the YAML of examples: pyyaml is not installed")
EXAMPLES = ROOT / "examples"
COMPOSE = yaml.safe_load((EXAMPLES / "compose.yml").read_text())
CLAIM, DEPLOYMENT = yaml.safe_load_all((EXAMPLES / "kubernetes.yml").read_text())
POD = DEPLOYMENT["spec"]["template"]
UNIT = (EXAMPLES / "pgsub.service").read_text()
#: Steps of RUN that change the users of the image.
_OF_AN_IMAGE = ("useradd ", "install -d ")


def _dockerfile():
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def _last(instruction):
    return [rest for word, rest in _dockerfile() if word == instruction][-1]


def test_the_images_of_the_examples_are_of_this_version():
    names = [service["image"] for service in COMPOSE["services"].values() if "postgres" not in service["image"]]
    names += [container["image"] for container in POD["spec"]["containers"]]
    assert set(names) == {f"pgsub:{pgsub.__version__}"}
    assert f"docker build -t pgsub:{pgsub.__version__} ." in (ROOT / "Dockerfile").read_text()


def test_the_compose_file_names_only_what_it_declares_and_runs_what_the_program_understands():
    services = COMPOSE["services"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        assert {one["source"] for one in service.get("configs", [])} <= set(COMPOSE["configs"])
        assert {one.partition(":")[0] for one in service.get("volumes", [])} <= set(COMPOSE["volumes"])
        for needed, condition in service.get("depends_on", {}).items():
            assert condition["condition"] != "service_healthy" or "healthcheck" in services[needed]
    for name in "create", "pgsub":
        understood(*services[name]["command"])


def test_the_deployment_has_probes_that_the_program_understands_and_mounts_what_it_declares():
    [container] = POD["spec"]["containers"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= POD["metadata"]["labels"].items()
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in POD["spec"]["volumes"]}
    claims = [one["persistentVolumeClaim"]["claimName"] for one in POD["spec"]["volumes"] if "secret" not in one]
    assert claims == [CLAIM["metadata"]["name"]]
    understood(*container["args"])
    program, *words = container["readinessProbe"]["exec"]["command"]
    assert program == "pgsub"
    understood(*words)


def test_a_restart_of_the_pod_does_not_let_its_group_read_the_state_folder_and_damaged_state_does_not_restart_it():
    [container] = POD["spec"]["containers"]
    context = POD["spec"]["securityContext"]
    assert "fsGroup" not in context or context["fsGroupChangePolicy"] == "OnRootMismatch"
    assert "livenessProbe" not in container


def test_the_unit_starts_what_the_program_understands():
    understood(*shlex.split(re.findall(r"^ExecStart=\S+ (.*)$", UNIT, re.MULTILINE)[0]))


def test_the_dockerfile_runs_the_program_as_a_user_of_its_own_with_its_state_on_a_volume():
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL"}
    assert {word for word, _ in _dockerfile()} <= known | {"HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert json.loads(_last("ENTRYPOINT")) == ["pgsub"]
    understood(*json.loads(_last("CMD")))
    understood(*json.loads(_last("HEALTHCHECK").partition("CMD")[2])[1:])
    assert _last("USER") == "pgsub" and _last("ENV") == f"PGSUB_STATE_DIR={_last('VOLUME')}"
    for word, rest in _dockerfile():
        if word == "RUN":
            script = re.sub(r"^--mount=\S+ ", "", rest.strip())
            assert subprocess.run(["sh", "-n", "-c", script], capture_output=True).stderr == b""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\.whl\)\[(\w+)\]", (ROOT / "Dockerfile").read_text())) <= set(extras)


def _stages():
    """The instructions of each stage, and the name that later ones know it by."""
    stages = []
    for word, rest in _dockerfile():
        if word == "FROM":
            stages.append((rest.partition(" AS ")[2], []))
        else:
            stages[-1][1].append((word, rest))
    return stages


def test_what_the_dockerfile_copies_and_mounts_is_there():
    known = set()
    for name, instructions in _stages():
        made = "".join(rest for word, rest in instructions if word == "RUN")
        for word, rest in instructions:
            if word == "COPY":
                assert all((ROOT / source).exists() for source in rest.split()[:-1])
            for mount in re.findall(r"--mount=(\S+)", rest if word == "RUN" else ""):
                options = dict(one.split("=") for one in mount.split(","))
                assert options["from"] in known and options["source"] in known
        known |= {name, *re.findall(r"--outdir (\S+)", made)}
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "build", "dist"} <= set(ignored)
    assert not set(SOURCES) & set(ignored)


@pytest.mark.long
def test_the_lines_of_the_dockerfile_build_and_install_the_program_in_empty_environments(tmp_path):
    """No container engine is needed: each stage gets an empty environment, and its paths are below a folder."""
    source, image = tmp_path / "src", tmp_path / "image"
    copy_sources(source)
    (image / "etc").mkdir(parents=True)
    for file in "passwd", "group", "shadow", "gshadow":
        (image / "etc" / file).touch()
    for name, instructions in _stages():
        environment = tmp_path / f"stage-{name}"
        venv.create(environment, symlinks=True, with_pip=True)
        path = f"{environment / 'bin'}:{os.environ['PATH']}"
        for step in _steps(instructions):
            run_lines(_below(step, tmp_path, image), source, needs=step.endswith(" build"), PATH=path)
    [program] = json.loads(_last("ENTRYPOINT"))
    assert (environment / "bin" / program).exists()
    if os.geteuid() == 0:
        assert (image / "home" / _last("USER")).is_dir()
        state = (image / _last("VOLUME").lstrip("/")).stat()
        assert (state.st_uid, state.st_gid, state.st_mode & 0o777) == (1000, 1000, 0o700)
        user = POD["spec"]["securityContext"]
        assert (user["runAsUser"], user["runAsGroup"]) == (1000, 1000)


def _steps(instructions):
    """The commands of the lines that are run."""
    for word, rest in instructions:
        if word == "RUN":
            yield from (one.strip() for one in re.sub(r"^--mount=\S+ ", "", rest.strip()).split("&&"))


def _below(step, folder, image):
    """A command with its paths below a folder; only root may make users, in files that are not the system's."""
    if step.startswith(_OF_AN_IMAGE) and os.geteuid() != 0:
        return ":"
    step = step.replace("useradd", f"useradd --prefix {image}").replace("-o pgsub -g pgsub", "-o 1000 -g 1000")
    return step.replace("/dist", str(folder / "dist")).replace("/var/lib", str(image / "var" / "lib"))


def test_what_spark_submit_starts_is_the_program():
    assert subprocess.run(["sh", "-n", EXAMPLES / "spark-submit.sh"], capture_output=True).stderr == b""
    words = [sys.executable, str(EXAMPLES / "submit.py"), "--version"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == f"pgsub {pgsub.__version__}\n"


def test_the_dag_is_loaded_by_airflow():
    models = pytest.importorskip("airflow.models", reason="NOT TESTED: the DAG in Airflow: it is not installed")
    loaded = models.DagBag(str(EXAMPLES), include_examples=False)
    assert loaded.import_errors == {} and set(loaded.dags) == {"pgsub_sales"}


@pytest.mark.long
def test_the_functions_of_the_dag_catch_up_and_report(cli, tables):
    assert cli.create("sales", "--no-copy-data", "--no-wait").returncode == 0
    publisher, target = tables
    publisher.execute("INSERT INTO b VALUES (1, 1.5), (2, 2.5)")
    caught_up = _scheduled(cli, "scheduled.catch_up('sales', folder); print(scheduled.report('sales', folder))")
    assert "'errors': []" in caught_up.stdout, caught_up.stderr
    assert target.rows("SELECT id FROM b ORDER BY 1") == [(1,), (2,)]
    target.execute("INSERT INTO b VALUES (3, 3.5)")
    publisher.execute("INSERT INTO b VALUES (3, 3)")
    stopped = _scheduled(
        cli,
        "import pgsub.common.errors as errors\n"
        "try: scheduled.catch_up('sales', folder)\n"
        "except scheduled.RETRIED: print('again')\n"
        "except errors.PgsubError as error: print(error.exit_code, *scheduled.report('sales', folder)['errors'])",
    )
    assert stopped.stdout.splitlines()[-1].startswith("6 conflict detected on relation"), stopped.stdout
    assert cli("drop", "sales", "--yes").returncode == 0


def _scheduled(cli, code):
    """Run a program beside examples/scheduled.py, as a scheduler's worker does."""
    begin = f"import pathlib, scheduled\nfolder = pathlib.Path({str(cli.state)!r})\n"
    path = {"PYTHONPATH": f"{EXAMPLES}:{ROOT}"}
    command = [sys.executable, "-c", begin + code]
    return subprocess.run(command, env={**cli.environment, **path}, capture_output=True, text=True, timeout=300)
