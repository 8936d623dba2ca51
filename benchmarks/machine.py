"""What the figures were measured on: they mean nothing without it."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pgsub import __version__
from pgsub.demo.binaries import environment, find_binaries


def facts() -> dict[str, str | int | float]:
    """Machine, versions and time."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "postgresql": _postgresql(),
        "python": platform.python_version(),
        "psycopg": version("psycopg"),
        "pyspark": version("pyspark"),
        "pgsub": __version__,
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _postgresql() -> str:
    command = [str(find_binaries() / "postgres"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return done.stdout.strip().rpartition(" ")[2]
