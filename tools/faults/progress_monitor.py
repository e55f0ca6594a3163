"""Samples the committed offsets of the group and requests the diagnosis of stalled queues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from batonmq._consumer.puller import Puller
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import QueueProgress
from batonmq.errors import BatonError
from tests.support.member import now_us
from tools.faults.history import LoggedMessage, ProgressSample, Queue, StuckReport
from tools.faults.member import GROUP, TOPIC

UNMOVED_MS = 15_000
"""A queue with a backlog that does not move for this long is diagnosed."""
_SAMPLE_S, _LOOK_S = 0.25, 2.0


@dataclass(slots=True)
class ProgressMonitor:
    """The samples and the reports about stuck queues."""

    nameserver: str
    samples: list[ProgressSample] = field(default_factory=list)
    stuck_reports: list[StuckReport] = field(default_factory=list)
    _moved: dict[Queue, tuple[int, int]] = field(default_factory=dict)

    async def sample_progress(self) -> None:
        """Sample the committed offsets until cancelled; failed calls give no sample."""
        async with Admin(self.nameserver, timeout_s=1.0) as admin:
            while True:
                begin_us = now_us()
                try:
                    found = await admin.progress(GROUP)
                except BatonError:
                    found = ()
                committed = {
                    (one.queue.queue.broker, one.queue.queue.queue_id): one.committed_offset
                    for one in found
                    if one.queue.queue.topic == TOPIC
                }
                if committed:
                    self.samples.append(ProgressSample(begin_us, now_us(), committed))
                await asyncio.sleep(_SAMPLE_S)

    async def find_stuck_queues(self) -> None:
        """Diagnose queues that do not move, until cancelled."""
        async with Admin(self.nameserver, timeout_s=2.0) as admin:
            while True:
                await asyncio.sleep(_LOOK_S)
                try:
                    found = (await admin.group_progress(GROUP)).queues
                except BatonError:
                    continue
                stuck = self._stuck(found)
                if stuck:
                    await self._ask(admin, stuck)

    def _stuck(self, found: Iterable[QueueProgress]) -> dict[Queue, int]:
        """Return the committed offsets of queues that have not moved for `UNMOVED_MS`."""
        at_us, stuck = now_us(), dict[Queue, int]()
        for one in found:
            queue, committed = (one.broker, one.queue_id), one.committed_offset or 0
            if one.lag is None:  # the backlog is unknown
                continue
            before, since_us = self._moved.get(queue, (-1, at_us))
            if committed != before or not one.lag:
                self._moved[queue] = committed, at_us
            elif at_us - since_us > 1_000 * UNMOVED_MS:
                stuck[queue] = committed
        return stuck

    async def _ask(self, admin: Admin, stuck: dict[Queue, int]) -> None:
        try:
            answers = {
                (one.broker, one.queue_id): one for one in await admin.why_stuck(GROUP, TOPIC)
            }
        except BatonError as error:
            for queue, committed in stuck.items():
                self._note(queue, committed, error.reason)
            return
        for queue, committed in stuck.items():
            diagnosis = answers.get(queue)
            if diagnosis is None:
                self._note(queue, committed, "")
            elif diagnosis.stuck or diagnosis.committed_offset == committed:
                self._note(queue, committed, diagnosis.reason)

    def _note(self, queue: Queue, committed: int, reason: str) -> None:
        unmoved_ms = (now_us() - self._moved[queue][1]) // 1000
        self.stuck_reports.append(StuckReport(queue, committed, now_us(), unmoved_ms, reason))


async def read_all(nameserver: str) -> list[LoggedMessage]:
    """Return every message of the topic in the order of its queue."""
    found: list[LoggedMessage] = []
    async with Puller(nameserver) as puller:
        queues = await puller.queues(TOPIC)
        await puller.assign(queues)
        missing = sum([await puller.seek(queue, "end") for queue in queues])
        for queue in queues:
            missing -= await puller.seek(queue, "begin")
        while missing > 0:
            for messages in (await puller.poll(5_000)).values():
                found += (
                    LoggedMessage((one.broker, one.queue_id), one.offset, int(one.body))
                    for one in messages
                )
                missing -= len(messages)
    return found


def difference(copies: Iterable[Path]) -> str:
    """Return the first difference of the logs of the nodes of a broker; empty without one.

    A node that was stopped earlier may lack the end.
    """
    (one, one_begin, one_log), *others = map(_log, copies)
    for two, two_begin, two_log in others:
        begin = max(one_begin, two_begin)
        mine, other = one_log[begin - one_begin :], two_log[begin - two_begin :]
        for at, (left, right) in enumerate(zip(mine, other, strict=False)):
            if left != right:
                return f"{one} and {two} differ at position {begin + at}"
    return ""


def _log(folder: Path) -> tuple[str, int, bytes]:
    """Return the name, the first position and the written bytes without the unused end."""
    segments = sorted((folder / "log").iterdir())
    content = b"".join(one.read_bytes() for one in segments)
    return folder.name, int(segments[0].name), content.rstrip(b"\0")
