"""Every ``tests/fix_*.py`` is a plugin with fixtures; here they are named, and what all tests share is set."""

import os
import signal
from pathlib import Path

import patience
import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

pytest_plugins = sorted(file.stem for file in Path(__file__).parent.glob("fix_*.py"))

# Tests give programs another HOME; the archive that makes Spark start faster is shared all the same.
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))

# A run in the background may be started with these ignored (SIGHUP by nohup), and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says something of the machine, not of what is tested.
settings.register_profile("pgsub", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pgsub")

#: Folders whose files take longest: they come first, so that no worker is left alone with one of them at the end.
#: ``tests`` are the files beside the folders, with servers of other versions.
_LONG = (
    *("faults", "scenarios", "switchover", "commands", "tests", "models", "demo", "launcher"),
    *("tablesync", "spark", "apply", "guards", "publisher", "target"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order inside a file stays."""
    ranks = {name: rank for rank, name in enumerate(_LONG)}
    items.sort(key=lambda item: ranks.get(item.path.parent.name, len(_LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """A test that hangs fails by itself; one that gets its turn seldom does not hang."""
    stretched = settings._replace(timeout=settings.timeout * patience.stretch())
    return bool(pytest_timeout.pytest_timeout_set_timer(item, stretched))


class _AtOnce:
    """A line for each test that did not pass, as soon as it has ended: a whole run takes long."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write_line("")
            reporter.write_line(f"{report.when}: {report.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    """Where workers run the tests, the process that shows their dots names what failed."""
    if getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(_AtOnce(config))
