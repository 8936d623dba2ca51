"""How long a test waits for a state that must come: long enough for a machine that has other work to do.

Only a test that fails waits so long, and none asserts that anything was faster. Where many processes share the cores,
everything takes as many times longer, and every test is given as many times longer when it begins.
"""

import os

_ALONE = float(os.environ.get("PGSUB_TEST_PATIENCE") or 150)
#: Processes that want to run, for each core, of which the durations above and in pyproject.toml still know.
_USUAL = 2.0

SECONDS = _ALONE  #: for the test that runs


def stretch() -> float:
    """Set :data:`SECONDS` by what the machine has to do now.

    :return: how many times longer than usual.
    """
    global SECONDS
    crowd = os.getloadavg()[0] / (os.cpu_count() or 1) / _USUAL
    SECONDS = _ALONE * max(1.0, crowd)
    return max(1.0, crowd)
