"""``pgsub metrics``, and the address of ``run --metrics-listen``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.general_options import current
from pgsub.cli.output.documents import emit
from pgsub.cli.pages import Page
from pgsub.common.errors import PgsubError

if TYPE_CHECKING:
    from pgsub.cli.operate.metrics_server import MetricsServer

LOOPBACK = "127.0.0.1"

PAGE = Page(
    summary="Print metrics of all subscriptions",
    description="""
Prints OpenMetrics text, made from the state store; no server is contacted. pgsub run --metrics-listen serves the same
on /metrics. The folder contrib of the sources has alert rules and a dashboard.

Times are seconds and sizes bytes. What is not known is left out: the lag, for example, while nothing serves the
subscription, and what the publisher says of the slot, if that is older than a minute.
""",
    examples=(
        ("For the textfile collector of node_exporter.", "pgsub metrics > /var/lib/node_exporter/pgsub.prom"),
        ("The lag.", "pgsub metrics | grep pgsub_apply_lag_seconds"),
    ),
)


@command("metrics", PAGE)
def metrics() -> None:
    """Print the metrics."""
    from prometheus_client.exposition import choose_encoder

    from pgsub.commands.status.metrics import registry

    encode, _ = choose_encoder("application/openmetrics-text")
    emit(encode(registry(current.state_dir)).decode().rstrip("\n"))


class Address(NamedTuple):
    """An address for serving metrics."""

    host: str
    port: int


def parse_address(text: str | Address) -> Address:
    """Read ``HOST:PORT``, ``[ADDRESS]:PORT`` or ``PORT``. The default host is the loopback address."""
    if isinstance(text, Address):
        return text
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise typer.BadParameter(f'"{text}" is not an address: expected HOST:PORT or PORT')
    return Address(host.strip("[]") or LOOPBACK, int(port))


def listen(address: Address, folder: Path) -> MetricsServer:
    """Serve the metrics in a thread until the process ends.

    :raises PgsubError: the address cannot be used.
    """
    from pgsub.cli.operate.metrics_server import MetricsServer

    host, port = address
    try:
        return MetricsServer(host, port, folder)
    except OSError as error:
        raise PgsubError(f'could not listen on "{host}:{port}": {error.strerror or error}') from None
