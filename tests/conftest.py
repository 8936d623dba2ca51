"""Every ``tests/fix_*.py`` is a plugin with fixtures; here they are named, and what all tests share is set."""

import os
import signal
from pathlib import Path

pytest_plugins = sorted(file.stem for file in Path(__file__).parent.glob("fix_*.py"))

# Tests give programs another HOME; the archive that makes Spark start faster is shared all the same.
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))

# A run in the background is started with SIGINT ignored, and every program that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
