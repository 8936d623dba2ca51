"""The user's Spark settings and what follows from them: where tasks run, and how they reach the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from pgsub.spark import session, settings
from pgsub.spark.jvm import process as jvm_process


class SparkSettings:
    """The settings of one run.

    :param master: a Spark master, None for a local one.
    :param conf: the user's settings, which override pgsub's own.
    :ivar submitted: both, as Spark's settings.
    """

    def __init__(self, master: str | None, conf: Mapping[str, str]) -> None:
        self.submitted = {**conf, **({"spark.master": master} if master else {})}

    @cached_property
    def chosen(self) -> Mapping[str, str]:
        """The settings before Spark ran. Afterwards they include pgsub's own."""
        given = session.given_settings()
        return settings.user_settings(self.submitted, jvm_process.spark_home()) if given is None else given

    @property
    def names_master(self) -> bool:
        """Whether the user chose a master."""
        return "spark.master" in self.chosen

    @property
    def local(self) -> bool:
        """Whether tasks run on this machine, as this user."""
        return settings.is_local(self.chosen.get("spark.master", "local"))

    def heartbeat_place(self) -> tuple[str, str, int]:
        """Return the address that workers send to, the address to bind, and the UDP port (0 for any).

        A local Spark uses loopback. Otherwise the addresses are those of Spark's driver: spark.driver.host and
        spark.driver.bindAddress, or this machine's address on the route to the master.
        """
        port = settings.heartbeat_port(self.chosen.get("spark.pgsub.heartbeat.port", "0"))
        if self.local:
            return "127.0.0.1", "127.0.0.1", port
        host = self.chosen.get("spark.driver.host") or settings.own_address(self.chosen.get("spark.master", ""))
        return host, self.chosen.get("spark.driver.bindAddress") or host, port

    def spool_dir(self, own: Path) -> str | None:
        """Return the folder in which workers keep transactions in progress, None for the executors' scratch folder.

        :param own: the folder on this machine.
        """
        return self.chosen.get("spark.pgsub.spool.dir") or (str(own) if self.local else None)
