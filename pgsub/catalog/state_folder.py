"""The state folder: its place, its permissions, and which files in it may be opened.

Mirrors ``checkDataDir`` in ``utils/init/miscinit.c``, and ``initdb``, which corrects the mode of an empty folder.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path

from pgsub.common.errors import StateStoreError
from pgsub.common.machine.path_safety import exchangeable

_MOUNTS = Path("/proc/self/mounts")
#: Prefixes of types of file systems that several machines may share. ``fuse.`` is mount(8)'s prefix for FUSE.
_NETWORKS = (
    *("nfs", "cifs", "smb", "9p", "afs", "ceph", "coda", "glusterfs", "lustre", "beegfs", "gpfs", "ocfs2", "gfs"),
    *("fuse.sshfs", "fuse.ceph", "fuse.gluster", "fuse.s3fs", "fuse.rclone", "fuse.davfs", "fuse.mount.davfs"),
    *("fuse.juicefs", "fuse.gcsfuse", "fuse.blobfuse", "fuse.curlftpfs", "fuse.smbnetfs", "fuse.goofys", "davfs"),
)


def state_dir(option: str | None) -> Path:
    """Return the state folder: the option, ``PGSUB_STATE_DIR``, ``$XDG_STATE_HOME/pgsub``, or one below the home.

    :return: an absolute path with symbolic links, which must be detected.
    """
    chosen = option or os.environ.get("PGSUB_STATE_DIR")
    if chosen:
        return Path(os.path.abspath(Path(chosen).expanduser()))
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "pgsub"


def prepare_folder(folder: Path) -> None:
    """Create the state folder, or refuse one that others could read or exchange.

    :param folder: absolute path.
    :raises StateStoreError: the folder is a symbolic link, has a foreign owner, is accessible or replaceable by group
        or others, or is on a network file system.
    """
    try:
        if not os.path.lexists(folder):
            _create(folder)
        _check_folder(folder)
        problem, hint = exchangeable(folder)
        network = network_file_system(folder.resolve(), _MOUNTS.read_text() if _MOUNTS.exists() else "")
    except OSError as error:
        raise StateStoreError(f'could not open state folder "{folder}": {error.strerror}') from None
    if problem:
        raise StateStoreError(f'state folder "{folder}" could be exchanged by another user', detail=problem, hint=hint)
    if network:
        raise StateStoreError(
            f'state folder "{folder}" is on a network file system ({network})',
            detail="Locks and the write-ahead log of the state store need a local file system.",
            hint="Choose a local folder.\npgsub --state-dir FOLDER status",
        )


def create_private(path: Path) -> None:
    """Create a private file, or check that an existing one is private, without opening it.

    Closing any descriptor of a file releases all POSIX locks of this process on it, including those of SQLite.

    :param path: inside a folder that passed :func:`prepare_folder`.
    :raises StateStoreError: see :func:`open_private`.
    """
    if os.path.lexists(path):
        try:
            _check_file(path, path.lstat())
        except OSError as error:
            raise _unopened(path, error) from None
    else:
        os.close(open_private(path))


def open_private(path: Path) -> int:
    """Open a file of the state folder for reading and writing. Create a missing one with mode 0600.

    :param path: inside a folder that passed :func:`prepare_folder`.
    :return: file descriptor, not inherited by children.
    :raises StateStoreError: symbolic link, hard link, foreign owner, mode wider than 0600, or system error.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise _unopened(path, error) from None
    try:
        _check_file(path, os.fstat(descriptor))
    except StateStoreError:
        os.close(descriptor)
        raise
    return descriptor


def network_file_system(path: Path, mounts: str) -> str | None:
    """Return the type of the network file system of a path.

    :param path: resolved path.
    :param mounts: text of ``/proc/self/mounts``.
    :return: e.g. ``nfs4``, None for any other file system.
    """
    best, kind = -1, ""
    for line in mounts.splitlines():
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[1]))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), words[2]
    return kind if kind.startswith(_NETWORKS) else None


def _create(folder: Path) -> None:
    # mkdir(parents=True) would create parents with the mode of the umask.
    for part in (*reversed(folder.parents), folder):
        if not os.path.lexists(part):
            part.mkdir(mode=0o700, exist_ok=True)


def _check_folder(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        link = "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a folder"
        raise StateStoreError(f'state folder "{folder}" {link}', hint="Name the folder itself.")
    if status.st_uid != os.geteuid():
        raise StateStoreError(
            f'state folder "{folder}" has wrong ownership',
            detail=f"It belongs to user id {status.st_uid}, this process runs as {os.geteuid()}.",
            hint="pgsub must be started by the user that owns the state folder.",
        )
    if status.st_mode & 0o077:
        if any(folder.iterdir()):
            raise StateStoreError(
                f'state folder "{folder}" has invalid permissions',
                detail="Permissions should be u=rwx (0700).",
                hint=f"chmod 700 {shlex.quote(str(folder))}",
            )
        folder.chmod(0o700)


def _unopened(path: Path, error: OSError) -> StateStoreError:
    detail = "It is a symbolic link." if path.is_symlink() else None
    return StateStoreError(f'could not open file "{path}": {error.strerror}', detail=detail)


def _check_file(path: Path, status: os.stat_result) -> None:
    hint = None
    if not stat.S_ISREG(status.st_mode):
        problem = "It is not a regular file."
    elif status.st_uid != os.geteuid():
        problem = f"It belongs to user id {status.st_uid}, this process runs as {os.geteuid()}."
    elif status.st_nlink > 1:
        problem = "It has more than one hard link."
    elif status.st_mode & 0o077:
        problem, hint = "Permissions should be u=rw (0600).", f"chmod 600 {shlex.quote(str(path))}"
    else:
        return
    raise StateStoreError(f'file "{path}" is not private', detail=problem, hint=hint)
