"""The power fails: what only memory held is gone, what was synced is there.

The state folder lies on an ext4 file system whose disk is a file, and a copy of that file is what the disk holds at
that moment: pages that nobody synced are not in it. A launcher that is killed loses none of them, so that proves less.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fix_program import Cli
from fix_servers import Database
from thorough import only_thorough

from pgsub.catalog.store import StateStore
from pgsub.common.connections import conninfo, passfile
from pgsub.common.subscription import Subscription

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mkfs.ext4") is None, reason="a file system of its own needs root and e2fsprogs"
)


class Disk:
    """A file system, and what is left of it after each loss of power.

    :ivar place: where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._image = folder / "image"
        self._mounted: list[Path] = []
        with self._image.open("wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", self._image], check=True)
        self.place = self._mount(self._image)

    def _mount(self, image: Path) -> Path:
        place = self._folder / f"mounted{len(self._mounted)}"
        place.mkdir()
        # nothing is written by itself, and a file that replaces another is not synced as ext4 likes to do by itself
        options = "loop,commit=300,noauto_da_alloc"
        done = subprocess.run(["mount", "-o", options, image, place], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"NOT TESTED: no file system can be mounted here: {done.stderr.strip()}")
        self._mounted.append(place)
        return place

    def lose_power(self) -> Path:
        """What the disk holds now, mounted as after the next start of the machine."""
        copy = self._folder / f"image{len(self._mounted)}"
        shutil.copyfile(self._image, copy)
        return self._mount(copy)

    def close(self) -> None:
        """Unmount everything."""
        for place in self._mounted:
            subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with contextlib.closing(Disk(tmp_path)) as made:
        yield made


def test_what_was_written_to_the_state_store_outlives_a_loss_of_power(disk: Disk) -> None:
    with StateStore.open(disk.place / "state") as store:
        public = passfile.store({"host": "p", "password": "secret"}, disk.place / "state" / "passfiles" / "5")
        store.add_subscription(Subscription(5, "orders", conninfo.join(public), "host=t", ("pub",), "orders"))
        for number in range(1, 4):
            store.put_origin(5, number, number)
            place = disk.lose_power()
            with StateStore.open(place / "state") as left:
                origin = left.origin(5)
                assert origin is not None and origin.remote_lsn == number
                assert left.subscription("orders").slot_name == "orders"
                left.put_origin(5, 100, 100)
            assert (place / "state" / "passfiles" / "5").read_text() == "p:*:*:*:secret\n"


@only_thorough
def test_a_launcher_whose_machine_lost_its_power_goes_on_where_the_ledger_stands(
    disk: Disk, cli: Cli, tables: tuple[Database, Database]
) -> None:
    pubdb, subdb = tables
    cli.environment["PGSUB_STATE_DIR"] = str(disk.place / "state")
    cli.state = disk.place / "state"
    assert cli.create("s").returncode == 0
    running = cli.launcher()
    for number in range(1000, 1020):
        pubdb.execute("INSERT INTO a VALUES (%s, 'x')", number)
        pubdb.execute("UPDATE b SET n = n + 1")
    subdb.wait("SELECT count(*) > 105 FROM a")
    place = disk.lose_power()
    running.kill()
    running.wait()
    pubdb.execute("INSERT INTO a VALUES (2000, 'while it was dark')")
    cli.environment["PGSUB_STATE_DIR"] = str(place / "state")
    cli.state = place / "state"
    ended = cli("run", "--until-caught-up", "--timeout", "2m")
    assert ended.returncode == 0, ended.stderr
    for table in ("a", "b"):
        assert subdb.rows(f"SELECT * FROM {table} ORDER BY 1") == pubdb.rows(f"SELECT * FROM {table} ORDER BY 1")
    assert cli("drop", "s", "--yes").returncode == 0
