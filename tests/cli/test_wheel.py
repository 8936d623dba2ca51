"""What ``pip install`` of the wheel brings into an empty environment."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from installation import copy_sources

import pgsub

ROOT = Path(__file__).parents[2]


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment with the wheel; what it needs is that of this interpreter."""
    source, folder = tmp_path_factory.mktemp("sources") / "checkout", tmp_path_factory.mktemp("installed")
    copy_sources(source)
    built = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", "dist", ".", cwd=source)
    if built.returncode and "setuptools" in built.stderr:
        pytest.skip("NOT TESTED: the wheel: setuptools cannot be had")
    assert built.returncode == 0, built.stderr
    [wheel] = (source / "dist").glob("*.whl")
    venv.create(folder, symlinks=True)
    done = run(
        sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-deps", str(wheel)
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
def test_the_program_runs(installed):
    needs = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    environment = {**os.environ, "PYTHONPATH": needs}
    shown = run(str(installed / "bin" / "pgsub"), "--version", env=environment, cwd=installed)
    assert shown.stdout.split() == ["pgsub", pgsub.__version__], shown.stderr
    where = run(
        str(installed / "bin" / "python"), "-c", "import pgsub; print(pgsub.__file__)", env=environment, cwd="/"
    )
    assert where.stdout.startswith(str(installed))


@pytest.mark.long
def test_manual_pages_and_completions_are_where_they_are_looked_for(installed):
    share = installed / "share"
    assert {path.name for path in share.glob("man/man?/*")} == {path.name for path in (ROOT / "man").iterdir()}
    assert all(path.parent.name[-1] == path.name[-1] for path in share.glob("man/man?/*"))
    for path in (
        "bash-completion/completions/pgsub.bash",
        "zsh/site-functions/_pgsub",
        "fish/vendor_completions.d/pgsub.fish",
    ):
        assert (share / path).read_bytes() == (ROOT / "completions" / Path(path).name).read_bytes()


@pytest.mark.long
def test_every_module_and_schema_is_there(installed):
    [packages] = installed.glob("lib/python*/site-packages")
    here = {path.relative_to(ROOT) for path in (ROOT / "pgsub").rglob("*") if path.suffix in {".py", ".json", ".typed"}}
    assert here <= {path.relative_to(packages) for path in packages.rglob("*")}
