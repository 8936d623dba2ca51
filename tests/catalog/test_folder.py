"""Where the state folder is and who may look into it."""

import os
import stat
from pathlib import Path

import pytest

from pgsub.catalog.locks import launcher_lock, subscription_lock
from pgsub.catalog.state_folder import network_file_system, state_dir
from pgsub.catalog.store import StateStore
from pgsub.common.errors import StateStoreError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def wide_umask() -> object:
    before = os.umask(0)
    yield None
    os.umask(before)


def test_the_folder_is_found_by_option_then_variable_then_xdg_then_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGSUB_STATE_DIR", "/from/variable")
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/a")
    monkeypatch.chdir(tmp_path)
    assert state_dir("sub/../option") == tmp_path / "option"
    assert state_dir("~/option") == Path("/home/a/option")
    assert state_dir(None) == Path("/from/variable")
    monkeypatch.setenv("PGSUB_STATE_DIR", "")
    assert state_dir(None) == Path("/xdg/pgsub")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_dir(None) == Path("/home/a/.local/state/pgsub")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_dir(None) == Path("/home/a/.local/state/pgsub")


@pytest.mark.usefixtures("wide_umask")
def test_everything_created_is_private_whatever_the_umask_is(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "state"
    with StateStore.open(folder) as store:
        store.journal("create", None, None, {})
        assert launcher_lock(folder).acquire()
        files = {path.name: mode(path) for path in folder.iterdir()}
    assert {mode(part) for part in (folder, folder.parent, folder.parent.parent)} == {0o700}
    assert {"state.db", "state.db-wal", "state.db-shm", "launcher.lock"} <= files.keys()
    assert set(files.values()) == {0o600}


def test_an_empty_folder_is_made_private(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    StateStore.open(folder).close()
    assert mode(folder) == 0o700


@pytest.mark.parametrize("bits", [0o750, 0o701, 0o770])
def test_a_used_folder_that_others_may_enter_is_refused_with_the_command_that_closes_it(
    folder: Path, bits: int
) -> None:
    StateStore.open(folder).close()
    folder.chmod(bits)
    with pytest.raises(StateStoreError, match="invalid permissions") as error:
        StateStore.open(folder)
    assert error.value.exit_code == 10
    assert error.value.hint == f"chmod 700 {folder}"
    assert mode(folder) == bits


def test_a_symbolic_link_in_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(StateStoreError, match="is a symbolic link"):
        StateStore.open(folder)
    with pytest.raises(StateStoreError, match="is a symbolic link"):
        launcher_lock(folder).acquire()


def test_a_file_in_place_of_the_folder_is_refused(folder: Path) -> None:
    folder.touch(mode=0o600)
    with pytest.raises(StateStoreError, match="is not a folder"):
        StateStore.open(folder)


@pytest.mark.parametrize("above", ["", "between", "further/between"])
def test_a_folder_that_others_could_exchange_is_refused_unless_they_write_to_a_sticky_one(
    tmp_path: Path, above: str
) -> None:
    shared = tmp_path / "open"
    folder = shared / above / "state"
    folder.parent.mkdir(parents=True)
    shared.chmod(0o707)
    with pytest.raises(StateStoreError, match="could be exchanged by another user") as error:
        StateStore.open(folder)
    assert error.value.hint == f"chmod o-w {shared}"
    assert error.value.detail == f'Others may write to folder "{shared}".'
    shared.chmod(0o1777)
    StateStore.open(folder).close()


@needs_root
def test_a_folder_below_a_group_that_others_are_in_is_refused_and_below_the_users_own_is_not(tmp_path: Path) -> None:
    shared = tmp_path / "open"
    (shared / "between").mkdir(parents=True)
    shared.chmod(0o775)
    StateStore.open(shared / "between" / "state").close()
    os.chown(shared, -1, 12345)
    shared.chmod(0o775)
    with pytest.raises(StateStoreError, match="could be exchanged by another user") as error:
        StateStore.open(shared / "between" / "state")
    assert error.value.hint == f"chmod g-w {shared}"


@needs_root
def test_a_link_of_somebody_else_on_the_way_to_the_folder_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "own").mkdir()
    (shared / "link").symlink_to(tmp_path / "own")
    StateStore.open(shared / "link" / "state").close()
    os.chown(shared / "link", 12345, -1, follow_symlinks=False)
    with pytest.raises(StateStoreError, match="could be exchanged by another user"):
        StateStore.open(shared / "link" / "state")


@needs_root
def test_a_folder_file_or_parent_of_somebody_else_is_refused_even_to_root(folder: Path) -> None:
    StateStore.open(folder).close()
    for path in (folder, folder / "state.db", folder.parent):
        os.chown(path, 65534, -1)
        with pytest.raises(StateStoreError, match=r"wrong ownership|is not private|could be exchanged"):
            StateStore.open(folder)
        os.chown(path, 0, -1)
    StateStore.open(folder).close()


def test_a_file_that_is_a_link_or_too_open_is_refused(folder: Path, tmp_path: Path) -> None:
    StateStore.open(folder).close()
    file = folder / "state.db"
    file.chmod(0o640)
    with pytest.raises(StateStoreError, match="is not private") as error:
        StateStore.open(folder)
    assert error.value.hint == f"chmod 600 {file}"
    file.chmod(0o600)
    os.link(file, tmp_path / "second name")
    with pytest.raises(StateStoreError) as error:
        StateStore.open(folder)
    assert error.value.detail == "It has more than one hard link."
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateStoreError, match=r"state\.db"):
        StateStore.open(folder)


def test_a_lock_file_that_is_a_link_is_refused_and_its_aim_is_not_touched(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    folder.mkdir(mode=0o700)
    lock = launcher_lock(folder)
    lock.path.symlink_to(victim)
    with pytest.raises(StateStoreError):
        lock.acquire()
    with pytest.raises(StateStoreError):
        lock.holder()
    lock.path.unlink()
    victim.chmod(0o600)
    os.link(victim, lock.path)
    with pytest.raises(StateStoreError, match="is not private"):
        lock.acquire()
    assert victim.read_text() == "kept"


def test_a_network_file_system_is_recognised_by_the_longest_mount_point() -> None:
    mounts = "\n".join(
        [
            "/dev/sda / ext4 rw 0 0",
            "srv:/home /home nfs4 rw 0 0",
            "/dev/sdb /home/local xfs rw 0 0",
            "srv:/my /mnt/my\\040files nfs rw 0 0",
            "me@srv:/ /mnt/sshfs fuse.sshfs rw 0 0",
            "//srv/share /mnt/cifs cifs rw 0 0",
            "C: /mnt/c 9p rw 0 0",
            "/dev/sdc /mnt/usb fuseblk rw 0 0",
            "bad",
        ]
    )
    for kind in ("cifs", "fuse.sshfs"):
        assert network_file_system(Path(f"/mnt/{kind.rpartition('.')[2]}/state"), mounts) == kind
    assert network_file_system(Path("/mnt/c/state"), mounts) == "9p"
    assert network_file_system(Path("/mnt/usb/state"), mounts) is None
    assert network_file_system(Path("/home/a/state"), mounts) == "nfs4"
    assert network_file_system(Path("/mnt/my files/state"), mounts) == "nfs"
    assert network_file_system(Path("/home/local/state"), mounts) is None
    assert network_file_system(Path("/homeless"), mounts) is None
    assert network_file_system(Path("/x"), "") is None


def test_who_only_looks_for_a_launcher_creates_no_folder(folder: Path) -> None:
    assert launcher_lock(folder).holder() is None
    assert subscription_lock(folder, 5).holder() is None
    assert not folder.exists()
