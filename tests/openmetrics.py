"""Metrics as a scraper reads them."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Callable

from fix_program import until
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed

Samples = dict[tuple[str, ...], float]
STATE = "pgsub_subscription_state"
_ACCEPT = "application/openmetrics-text; version=1.0.0"  #: of Prometheus


def values(text: str, name: str) -> Samples:
    """Return sample values by name and labels but the subscription, of one subscription and of the program."""
    found = {}
    for family in parsed(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("subscription", name) == name:
                found[sample.name, *sorted(labels.values())] = sample.value
    return found


class Scraper:
    """A scraper of a launcher that watches one subscription.

    :ivar moved: families that were not the same all the time that the subscription was there.
    """

    def __init__(self, address: str, name: str) -> None:
        self._address, self._name = address, name
        self._before: Samples | None = None
        self.moved: set[str] = set()

    def __call__(self) -> Samples:
        """Scrape once."""
        asked = urllib.request.Request(f"http://{self._address}/metrics", headers={"Accept": _ACCEPT})
        with urllib.request.urlopen(asked) as answer:
            seen = values(answer.read().decode(), self._name)
        if (STATE, "running") in seen:
            self.moved |= {key[0] for key, _ in seen.items() ^ (self._before or seen).items()}
            self._before = seen
        return seen

    def shows(self, condition: Callable[[Samples], bool]) -> Samples:
        """Scrape until a condition holds; samples that it asks for may come later."""

        def look() -> Samples | None:
            seen = self()
            with contextlib.suppress(KeyError):
                return seen if condition(seen) else None
            return None

        return until(look)
