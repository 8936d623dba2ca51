"""Metrics as a scraper reads them."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed


def values(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Return sample values by name and labels but the subscription, of one subscription and of the program."""
    found = {}
    for family in parsed(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("subscription", name) == name:
                found[sample.name, *sorted(labels.values())] = sample.value
    return found
