"""A random workload for minutes with pgsub and the server's own subscriber attached, and every trouble there is.

``make soak ARGS="--minutes 60 --json FILE"``. Servers, processes, lines, locks, origins and the state store are struck
at random, from the seed that is printed. At quiet points and at the end both targets must be equal to each other and to
the publisher. ``pgsub verify``, while all that goes on, gives no false alarm, and finds and repairs what was planted.
At the end every committed transaction is there exactly once, and nothing is left over. Between the troubles some bursts
are left alone: how their lag grows and vanishes is written as a time series, so that one that swings shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from soak_course import Soak
from soak_ground import Ground


def _soak(folder: Path, seed: int, arguments: argparse.Namespace) -> list[str]:
    with Soak(folder, seed, arguments.burst) as soak:
        try:
            soak.work(arguments.minutes)
            wrong = [*soak.wrong, *soak.swings()]
        except Exception as error:
            traceback.print_exc()
            wrong = [*soak.wrong, str(error), soak.ground.site.said()]
        document = soak.document()
        if arguments.json:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")
        if wrong and arguments.keep:
            _keep(soak.ground, arguments.keep)
    faults = document["faults"]
    print(", ".join(f"{name} {count}" for name, count in sorted(faults.items())))
    print(
        f"seed {seed}: {sum(faults.values())} faults, {document['transactions']} transactions audited,"
        f" {document['comparisons']} quiet points, {sum(document['statements'].values())} random statements,"
        " tables compared by verify {tables}, rows planted, found and repaired {planted}".format(**document["verify"])
    )
    return wrong


def _keep(ground: Ground, folder: Path) -> None:
    """What helps to find out why."""
    shutil.copytree(ground.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("scratch", "*.sock"))
    for name, server in (("publisher.log", ground.publisher), ("target.log", ground.target)):
        shutil.copy(server.log, folder / name)


def main() -> int:
    """Run it.

    :return: exit status: 1 if something is lost, behind, left over, or swings.
    """
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run")
    parser.add_argument("--burst", type=int, default=20_000, metavar="N", help="transactions of a burst")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write lag over time, bursts and troubles")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where logs and state go if it fails")
    arguments = parser.parse_args()
    os.environ["PGSUB_TEST_THOROUGH"] = "1"  # every command is a process of its own, and none of them is kept
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the servers end with us
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="pgsub-soak-"))
    try:
        wrong = _soak(folder, seed, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        "\n".join(f"FAILED: {text}" for text in wrong)
        or "both targets are equal to the publisher, nothing is left over"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
