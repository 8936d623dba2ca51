"""Records what the program shows on a terminal, between two servers of its own: ``make screenshots``.

The pictures are docs/screenshots/*.svg. Connection strings are names of services, so nothing of the machine is in them.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pexpect
import psycopg
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

from pgsub.demo.servers import Server

FOLDER = Path(__file__).parents[1] / "docs" / "screenshots"
COLUMNS, LINES = 90, 24
_CREATE = "pgsub create sales --connection service=shop --target service=copy --publication sales"
_TABLE = "CREATE TABLE {} (id int PRIMARY KEY, ref text, state text)"
_CODE = re.compile(r"\x1b\[(\?)?([\d;]*)([A-Za-z])|\r\n|[\r\n]")


def screen(written: str) -> list[str]:
    """Return the lines of a terminal on which whole lines are written anew, as Rich does."""
    lines, row, last = [""], 0, 0
    for code in _CODE.finditer(written):
        lines[row] += written[last : code.start()]
        last = code.end()
        private, number, letter = code.groups()
        if code[0] in ("\r\n", "\n"):
            row += 1
        elif letter == "m":
            lines[row] += code[0]
        elif letter == "A":
            row = max(row - int(number or 1), 0)
        elif letter == "K" or code[0] == "\r":
            lines[row] = ""
        elif letter == "H":
            lines, row = [""], 0
        elif private and letter == "l" and number == "1049":  # the screen is left: it is what is recorded
            break
        lines += [""] * (row + 1 - len(lines))
    return lines


class Recorder:
    """Command lines typed on a terminal, in a home of their own.

    :param home: with the services' file.
    """

    def __init__(self, home: Path) -> None:
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        self._environment = {**kept, "HOME": str(home), "TERM": "xterm-256color", "PYTHONPATH": str(FOLDER.parents[1])}

    def start(self, line: str) -> pexpect.spawn:
        """Start a command line."""
        words = ["-m", *shlex.split(line)]
        return pexpect.spawn(
            sys.executable,
            words,
            env=self._environment,
            encoding="utf-8",
            dimensions=(LINES, COLUMNS),
            timeout=120,
            cwd=self._environment["HOME"],
        )

    def run(self, line: str) -> str:
        """Run it to its end, and return what was written."""
        started = self.start(line)
        written = str(started.read())
        started.wait()
        return written

    def save(self, name: str, *shown: tuple[str, str]) -> None:
        """Make the picture of command lines and what each has written."""
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        for line, written in shown:
            console.print(Text(f"$ {line}", style="bold"), soft_wrap=True)
            lines = "\n".join(screen(written)).rstrip("\n ")
            for text in AnsiDecoder().decode(lines):
                console.print(text, no_wrap=True, crop=True)
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.svg").write_text(console.export_svg(title="pgsub", unique_id=f"pgsub-{name}"))


@contextmanager
def _servers(home: Path) -> Iterator[tuple[psycopg.Connection, psycopg.Connection]]:
    with ExitStack() as stack:
        sessions, services = [], []
        for name in "shop", "copy":
            server = Server()
            stack.callback(server.destroy)
            server.init()
            server.start()
            services.append(f"[{name}]\n" + server.conninfo().replace(" ", "\n") + "\n")
            sessions.append(stack.enter_context(psycopg.connect(server.conninfo(), autocommit=True)))
        (home / ".pg_service.conf").write_text("".join(services))
        yield sessions[0], sessions[1]


def main() -> None:
    """Record all pictures."""
    with tempfile.TemporaryDirectory() as name, _servers(Path(name)) as (shop, copy):
        recorder = Recorder(Path(name))
        for table in "orders", "customers":
            for session in shop, copy:
                session.execute(_TABLE.format(table))  # type: ignore[arg-type]
            shop.execute(f"INSERT INTO {table} SELECT n, 'A-' || n, 'open' FROM generate_series(1, 200000) n")  # type: ignore[arg-type]
        shop.execute("CREATE PUBLICATION sales FOR TABLE orders, customers")
        recorder.save("create", (_CREATE, recorder.run(_CREATE)))
        launcher = recorder.start("pgsub run")
        try:
            recorder.run("pgsub wait sales --for caught-up --timeout 2m")
            while "nothing is waiting" not in recorder.run("pgsub status sales"):  # the launcher has only begun
                time.sleep(0.2)
            recorder.save("status", ("pgsub status sales", recorder.run("pgsub status sales")))
            recorder.save("watch", ("pgsub status sales --watch 1", _watch(recorder, shop)))
            copy.execute("INSERT INTO orders VALUES (200001, 'A-200001', 'local')")
            shop.execute("INSERT INTO orders VALUES (200001, 'A-200001', 'open')")
            recorder.run("pgsub wait sales --for error --timeout 1m")
            lines = ("pgsub status sales", "pgsub conflicts show sales 1", "pgsub skip-lsn sales --preview")
            recorder.save("conflict", *((line, recorder.run(line)) for line in lines))
        finally:
            launcher.terminate()
            launcher.wait()


def _watch(recorder: Recorder, shop: psycopg.Connection) -> str:
    watching = recorder.start("pgsub status sales --watch 1")
    until = time.monotonic() + 20
    written = ""
    while time.monotonic() < until:
        shop.execute("UPDATE orders SET state = 'paid' WHERE id %% 200 = %s", [int(until - time.monotonic())])
        try:
            written += watching.read_nonblocking(100_000, timeout=0.5)
        except pexpect.TIMEOUT:
            continue
    watching.sendintr()
    written += watching.read()
    return written


if __name__ == "__main__":
    main()
