"""``python -m pgsub.spark.archive FILE``: what executors import, as an archive for ``spark.archives``.

The archive is a virtual environment with pgsub and the packages that its tasks import. Spark and Java are left out,
because executors have them. As in any virtual environment the interpreter is a link: the executors need Python of the
same minor version at the path that ``--python`` names.

With ``--launcher`` it has what the launcher imports, too: unpacked on each machine it is the installation that
spark-submit in cluster mode needs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tarfile
from importlib import metadata
from pathlib import Path

from pgsub import __version__
from pgsub.spark.deployment import check_archive_name

#: Distributions whose code runs in tasks.
_NEEDED = ("psycopg", "psycopg-binary", "psycopg-c", "typing_extensions", "numpy")
_LEFT_OUT = ("__pycache__", "tests")
#: Distributions that belong to Spark.
_SPARK = ("pyspark", "py4j")


def write(archive: Path, python: str, *, launcher: bool = False) -> None:
    """Write the archive.

    :param archive: a ``.tar.gz`` file, replaced atomically.
    :param python: path of the interpreter on the executors.
    :param launcher: include all of pgsub's dependencies except Spark.
    :raises SparkUnusable: Spark would not unpack a file of that name.
    """
    check_archive_name(archive)
    site = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    draft = archive.with_name(archive.name + ".new")
    with tarfile.open(draft, "w:gz", compresslevel=1) as tar:
        text = f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\n".encode()
        configuration, link = tarfile.TarInfo("pyvenv.cfg"), tarfile.TarInfo("bin/python")
        configuration.size, configuration.mode = len(text), 0o644
        link.type, link.linkname = tarfile.SYMTYPE, python
        tar.addfile(configuration, io.BytesIO(text))
        tar.addfile(link)
        package = Path(__file__).resolve().parents[1]
        tar.add(package, f"{site}/pgsub", filter=_code)
        for name in dict.fromkeys([*_NEEDED, *(_dependencies("pgsub") if launcher else ())]):
            _add_distribution(tar, name, site)
    draft.replace(archive)


def _dependencies(name: str, seen: tuple[str, ...] = ("pgsub", *_SPARK)) -> list[str]:
    """Return the distributions that a distribution needs, including indirect ones."""
    found: list[str] = []
    with contextlib.suppress(metadata.PackageNotFoundError):  # needed only on other systems
        for text in metadata.requires(name) or []:
            needed = re.split(r"[^\w.-]", text, maxsplit=1)[0]
            if "extra ==" not in text and needed not in (*seen, *found):
                found += [needed, *_dependencies(needed, (*seen, *found, needed))]
    return found


def _add_distribution(tar: tarfile.TarFile, name: str, site: str) -> None:
    """Add the files of an installed distribution. One that is not installed is not needed."""
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        if ".." not in file.parts and not any(part in _LEFT_OUT for part in file.parts):
            tar.add(str(file.locate()), f"{site}/{file.as_posix()}", recursive=False, filter=_code)


def _code(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Make a file readable for everyone, and leave out what Python creates itself."""
    if any(part in _LEFT_OUT for part in Path(info.name).parts):
        return None
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode |= 0o555 if info.isdir() or info.mode & 0o100 else 0o444
    return info


def main() -> None:
    """Write the archive that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m pgsub.spark.archive", description=__doc__)
    parser.add_argument("file", type=Path)
    default = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    parser.add_argument("--python", default=default, help=f"interpreter on the executors (default: {default})")
    parser.add_argument("--launcher", action="store_true", help="add what the launcher imports")
    given = parser.parse_args()
    write(given.file, given.python, launcher=given.launcher)
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    print(f"{given.file}: pgsub {__version__}, for Python {minor} at {given.python}")


if __name__ == "__main__":
    main()
