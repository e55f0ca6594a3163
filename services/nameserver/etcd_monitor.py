"""Watches the space and the alarms of etcd: operators are told before it is full and when it is."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry

from batonmq.errors import NoQuorum
from batonmq_server.nameserver.metrics import EtcdMetrics
from batonmq_server.runtime.etcd.session import NO_SPACE_REMEDY, EtcdSession, EtcdSpace

log = logging.getLogger(__name__)

ALARMS = ("NOSPACE", "CORRUPT")


class EtcdMonitor:
    """Reads the space of etcd at intervals; while etcd does not answer, the last one holds.

    Attributes:
        space: The space and the alarms, as read last.
    """

    def __init__(self, etcd: EtcdSession, registry: CollectorRegistry, *, interval_ms: int) -> None:
        self._etcd, self._interval_ms = etcd, interval_ms
        self.space = EtcdSpace()
        self._metrics = EtcdMetrics(registry)

    async def run(self) -> None:
        """Read at intervals until cancelled; run it as one task."""
        while True:
            try:
                self._read(await self._etcd.space())
            except NoQuorum as error:
                log.debug("space of etcd not read error=%s", error)
            await asyncio.sleep(self._interval_ms / 1000)

    def _read(self, space: EtcdSpace) -> None:
        before, self.space = self.space, space
        self._metrics.db_bytes.set(space.db_bytes)
        self._metrics.in_use_bytes.set(space.in_use_bytes)
        for alarm in ALARMS:
            self._metrics.alarm.labels(alarm).set(alarm in space.alarms)
        if raised := sorted({*space.alarms} - {*before.alarms}):
            remedy = NO_SPACE_REMEDY if "NOSPACE" in raised else "Replace the damaged member."
            log.error(
                "etcd has raised an alarm alarms=%s db_bytes=%d in_use_bytes=%d remedy=%s",
                ",".join(raised),
                space.db_bytes,
                space.in_use_bytes,
                remedy,
            )
        if ended := sorted({*before.alarms} - {*space.alarms}):
            log.info("alarms of etcd have ended alarms=%s", ",".join(ended))
