"""``python -m pgsub.spark.training [FOLDER]``: makes the class-data-sharing archive of this machine's Java and Spark.

A session runs an empty job, and its JVM writes the loaded classes. If several of these processes start, one takes the
lock and the others end. Without a folder, the user waits for the archive. Then the others wait, too, because the first
may make the archive of another installation. The archive appears under its name when it is complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path

from pgsub.common.errors import PgsubError
from pgsub.spark import session
from pgsub.spark.jobs import Submitter
from pgsub.spark.jvm import class_archive
from pgsub.spark.jvm import flags as jvm_flags
from pgsub.spark.jvm import process as jvm_process
from pgsub.spark.jvm.class_archive import Archive
from pgsub.spark.jvm.java import Java, cache_folder, find_java

#: Seconds within which a JVM must write its classes.
_PATIENCE = 300

#: Variables that would make the session differ from one without user settings.
_FOREIGN = ("SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT", "MASTER", "SPARK_SUBMIT_OPTS")


def main(folder: str | None = None) -> int:
    """Make the archive if nobody else does.

    :param folder: the session's private cache folder, None for the user's. Programs are run from it.
    :return: exit code. With a folder it is 0 even if another process makes the archive.
    """
    os.nice(19 if folder else 0)
    for name in _FOREIGN:
        os.environ.pop(name, None)
    cache = Path(folder) if folder else cache_folder(Path(tempfile.mkdtemp(prefix="pgsub-")))
    with (cache / "training.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if folder else 0))
        except BlockingIOError:
            return 0
        for left_over in cache.glob("training-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        class_archive.remove_unused(cache)
        java = find_java(cache)
        wanted = class_archive.find_archive(java, jvm_process.spark_home(), cache)
        return 0 if wanted.file.exists() else _make(java, wanted, cache)


def _make(java: Java, wanted: Archive, cache: Path) -> int:
    folder = Path(tempfile.mkdtemp(prefix="training-", dir=cache))
    draft = folder / "classes.jsa"
    try:
        class_archive.dump_base(java, wanted)
        context = session.open_trained(folder, jvm_flags.training_flags(wanted, draft))
        Submitter(context).submit("training", abs, [0, 1]).result(_PATIENCE)
        session.close_context(context, patience=_PATIENCE, train=False)
        os.replace(draft, wanted.file)
    except (OSError, PgsubError) as error:
        detail = error.detail if isinstance(error, PgsubError) else None
        wanted.refused.write_text(f"{error}\n{detail or ''}\n")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
