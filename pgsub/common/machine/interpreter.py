"""The environment in which another process of this interpreter imports the same pgsub and nothing else."""

from __future__ import annotations

import os
import site
from pathlib import Path


def importing_environment() -> dict[str, str]:
    """Return the variables with which another process of this interpreter imports the same pgsub.

    PYTHONSAFEPATH prevents imports from the current folder, where others may write.
    """
    package = str(Path(__file__).resolve().parents[3])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if package not in [*site.getsitepackages(), site.getusersitepackages(), *paths]:
        paths.append(package)
    return {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
