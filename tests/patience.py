"""How long a test waits for a state that must come: long enough for a machine that has other work to do.

Only a test that fails waits so long, and none asserts that anything was faster.
"""

import os

SECONDS = float(os.environ.get("PGSUB_TEST_PATIENCE") or 150)
