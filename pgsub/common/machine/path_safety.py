"""Checks whether another user could make a path lead to something else, at any of its levels."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

_MOST_LINKS = 40  #: as many as Linux follows
#: Owner of folders whose owner is unknown in a container; outside it that is root, for example for /home.
_UNKNOWN_USER = 65534


def exchangeable(path: Path) -> tuple[str | None, str | None]:
    """Return how another user could make a path lead elsewhere, and a command against it; None if nobody could.

    :param path: an existing path.
    """
    for name in _names(path):
        problem, hint = _exchangeable(name)
        if problem is not None:
            return problem, hint
    return None, None


def _names(path: Path) -> Iterator[Path]:
    """Yield each symbolic link on a path, and what the last one leads to."""
    name = path.absolute()
    for _ in range(_MOST_LINKS):
        link = next((part for part in reversed((name, *name.parents)) if part.is_symlink()), None)
        if link is None:
            break
        yield link
        name = link.parent / link.readlink() / name.relative_to(link)
    yield name


def _exchangeable(name: Path) -> tuple[str | None, str | None]:
    """Return how another user could make a name lead to another file, and a command against it."""
    link = name.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        return f'Symbolic link "{name}" belongs to user id {link.st_uid}, who could exchange it.', None
    within = name.parent.resolve()
    for folder in (within, *within.parents):
        found = folder.stat()
        trusted = (0, os.geteuid()) if folder == within else (0, os.geteuid(), _UNKNOWN_USER)
        if found.st_uid not in trusted:
            return f'Folder "{folder}" belongs to user id {found.st_uid}, who could exchange what is in it.', None
        if not found.st_mode & stat.S_ISVTX and not os.statvfs(folder).f_flag & os.ST_RDONLY:
            if found.st_mode & 0o002:
                return f'Others may write to folder "{folder}".', f"chmod o-w {shlex.quote(str(folder))}"
            if found.st_mode & 0o020 and not _is_private(found.st_gid):
                return f'Its group may write to folder "{folder}".', f"chmod g-w {shlex.quote(str(folder))}"
    return None, None


def _is_private(gid: int) -> bool:
    """Return whether a group is the user's private group: of the same name and without other members."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
