"""The second part of a run of backups: a snapshot is restored to an empty cluster, with faults.

The process that restores is killed, frozen and cut off, and started again, until the restore is
complete. Before that a damaged file, and after that a repeated restore, must be refused. Then the
groups of the first cluster work here until all is handled.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from random import Random

from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq._core.records import check_batch, decode_records
from batonmq._core.retries import dead_letter_topic
from batonmq.admin._backup_batches import decode_waiting
from batonmq.admin.admin import Admin
from batonmq.admin.backup_manifest import manifest_name
from batonmq.admin.backup_restorer import BackupRestorer, verify_backup
from batonmq.admin.backup_writer import read_backup_manifest
from batonmq.admin.operation import Operation
from batonmq.errors import (
    BatonError,
    DataLoss,
    InvalidArgument,
    TopicExists,
    TopicNotFound,
)
from batonmq_server.testing import MemoryBroker
from batonmq_server.testing.memory_network import Faults
from batonmq_server.testing.memory_objects import MemoryObjects
from tests.simulation.backup_ledger import BackupRun, SnapshotRecord
from tests.simulation.backup_members import members_of
from tests.simulation.backup_processes import LOST_CALL, Attempts, FailingStore, Killed
from tests.simulation.cluster_views import (
    access_of,
    settings_of_groups,
    settings_of_topics,
    user_topics,
)
from tests.support.conditions import until

FAULTS = Faults(loss=0.003, duplicate=0.03, slow=0.01, slow_ms_max=4_000)
RESTORE_S, FAULTS_S, SETTLE_S = 300, 60, 1_200
Mapped = Mapping[QueueRef, QueueRef]


async def play_restore(run: BackupRun, random: Random, store: FailingStore, access: object) -> None:
    """Restore one of the snapshots, mostly the newest, and judge the cluster."""
    one = run.snapshots[-1] if random.random() < 0.7 else random.choice(run.snapshots)
    await _check_damage(run, random, store.sound(), one)
    brokers = MemoryBroker(broker_count=random.randrange(1, 4), seed=f"{run.seed}/2", faults=FAULTS)
    async with brokers as broker, broker.admin() as admin:
        await _SecondCluster(run, random, broker, admin, store, one).play(access)
    for host in broker._environment.hosts:
        host.thaw()  # killed processes: their tasks can end


async def _check_damage(
    run: BackupRun, random: Random, store: MemoryObjects, one: SnapshotRecord
) -> None:
    """A damaged or missing file is found, and named."""
    names = [file.name for file in one.manifest.files] or [""]
    name = random.choice((random.choice(names), manifest_name(one.manifest.number)))
    content = store.files.get(name)
    if not content:
        return
    at, kind = random.randrange(len(content)), random.choice(("flip", "cut", "remove"))
    if kind == "flip":
        store.files[name] = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    elif kind == "cut":
        store.files[name] = content[:at]
    else:
        del store.files[name]
    run.counts[f"damaged files, {kind}"] += 1
    try:
        manifest = await read_backup_manifest(store, one.manifest.number)
        found = (await verify_backup(store, manifest)).problems
        if manifest != one.manifest or (name in store.files and not found):
            run.fail("damage", f"{kind} of {name} at {at} is not found")
        elif not any(name in problem for problem in found):
            run.fail("damage", f"{kind} of {name} at {at}: {found}")
    except (DataLoss, InvalidArgument) as error:
        if name != manifest_name(one.manifest.number):
            run.fail("damage", f"{kind} of {name} at {at}: {error!r}")
    store.files[name] = content


class _SecondCluster:
    """The empty cluster to which a snapshot is restored."""

    def __init__(
        self,
        run: BackupRun,
        random: Random,
        broker: MemoryBroker,
        admin: Admin,
        store: FailingStore,
        one: SnapshotRecord,
    ) -> None:
        self._run, self._random, self._broker = run, random, broker
        self._admin, self._store, self._one = admin, store, one
        self._calm_s = _time_s() + FAULTS_S
        self._attempts: Attempts[Mapped] = Attempts(
            run, broker, "restorer", Random(f"{run.seed}/restorer")
        )

    async def play(self, access: object) -> None:
        """Restore, and judge what the cluster has."""
        run, groups = self._run, sorted(self._run.handled)
        async with asyncio.TaskGroup() as tasks:
            disturbing = tasks.create_task(self._disturb())
            mapping = await self._restore()
            disturbing.cancel()
        self._broker._environment.network.faults = self._broker._quiet
        self._store.rate = 0
        if mapping is None:
            return
        await self._check_refused()
        await self._check_settings(access)
        await until(self._all_due, timeout_s=SETTLE_S)
        restored = await self._messages()
        run.judge_restored(self._one, mapping, restored, await self._waiting())
        await self._settle(groups)
        dead = {
            name: {int(each.body) for each in messages}
            for name in groups
            if (messages := await self._messages_of(dead_letter_topic(name)))
        }
        run.judge_handled(self._one, mapping, restored, dead)
        run.counts["runs to the end"] += 1

    # ---- the restore

    async def _restore(self) -> Mapped | None:
        """Restore; start the process again until the restore is complete."""
        run, deadline_s, proceed, kills = self._run, _time_s() + RESTORE_S, False, 0
        while _time_s() < deadline_s:
            try:
                mapping = await self._attempts.once(partial(self._run_once, proceed))
            except Killed:
                kills += 1
            except LOST_CALL:
                run.counts["restores that failed"] += 1
            except TopicExists as error:
                if proceed:
                    run.fail("continue", f"{error!r}")
                    return None
                run.counts["refused without --continue"] += 1
                proceed = True
                continue
            except Exception as error:  # noqa: BLE001  no other one is documented
                run.fail("error", f"a restore: {error!r}")
                await asyncio.sleep(1)
            else:
                run.counts["restores"] += 1
                run.counts["restores after a kill"] += bool(kills)
                return mapping
            # Without it, an earlier attempt has changed nothing, or this one is refused.
            proceed = proceed or self._random.random() < 0.7
        run.fail("settled", f"the restore is not complete after {RESTORE_S} s")
        return None

    async def _run_once(self, proceed: bool, admin: Admin) -> Mapped:
        manifest = await read_backup_manifest(self._store, self._one.manifest.number)
        operation = Operation("ann", f"restore of snapshot {manifest.number}")
        restorer = BackupRestorer(admin, self._store, manifest, operation)
        return await restorer.run(proceed=proceed)

    async def _disturb(self) -> None:
        """Let services and the store fail for some time."""
        random = self._random
        while _time_s() < self._calm_s:
            await asyncio.sleep(random.uniform(0.2, 6))
            self._store.rate = random.choice((0.0, 0.0, 0.02, 0.1))
            kind = random.choice(("offsets", "nameserver", "storage", "storage"))
            await self._broker.kill(kind)
            self._run.counts[f"{kind} kills during a restore"] += 1
        self._broker._environment.network.faults = self._broker._quiet
        self._store.rate = 0

    # ---- the checks

    async def _check_refused(self) -> None:
        """A complete restore may be continued, and may not begin anew."""
        attempt = Attempts[Mapped](self._run, self._broker, "second", Random(self._run.seed))
        try:
            await attempt.once(partial(self._run_once, False), calm=True)
        except TopicExists:
            self._run.counts["refused restores"] += 1
        except BatonError as error:
            self._run.fail("refused", f"a second restore: {error!r}")
        else:
            if self._one.manifest.message_count:
                self._run.fail("refused", "a second restore is not refused")
        try:
            await attempt.once(partial(self._run_once, True), calm=True)
        except BatonError as error:
            self._run.fail("continue", f"after the restore: {error!r}")

    async def _check_settings(self, access: object) -> None:
        one, run = self._one, self._run
        found = await user_topics(self._admin)
        counts = {each.name: each.queue_count for each in found}
        for each in one.manifest.topics:
            if counts.get(each.name) != each.queue_count:
                run.fail("settings", f"{each.name} has {counts.get(each.name)} queues")
        topics = settings_of_topics(found)
        for name, settings in one.before.topics.items():
            if name in one.stable and topics.get(name) != settings:
                run.fail("settings", f"{name} has {topics.get(name)}, not {settings}")
        groups = await settings_of_groups(self._admin)
        for name, settings in one.before.groups.items():
            if groups.get(name) != settings:
                run.fail("settings", f"{name} has {groups.get(name)}, not {settings}")
        if (restored := await access_of(self._admin)) != access:
            run.fail("access", f"{restored}, not {access}")

    async def _all_due(self) -> bool:
        """Return whether all scheduled messages are delivered."""
        nodes = self._broker._environment.nodes.values()
        return not any(len(node.store.schedule.waiting) for node in nodes)

    async def _messages(self) -> dict[QueueRef, list[ReceivedMessage]]:
        found: defaultdict[QueueRef, list[ReceivedMessage]] = defaultdict(list)
        for topic in await user_topics(self._admin):
            for message in await self._broker.messages(topic.name):
                found[message.queue].append(message)
        for messages in found.values():
            messages.sort(key=lambda message: message.offset)
        return dict(found)

    async def _messages_of(self, topic: str) -> list[ReceivedMessage]:
        try:
            return await self._broker.messages(topic)
        except TopicNotFound:
            return []

    async def _waiting(self) -> list[tuple[str, bytes]]:
        """Return topic and body of the messages that the snapshot has as scheduled."""
        found: list[tuple[str, bytes]] = []
        for file in self._one.manifest.scheduled.values():
            for _, _, batch in decode_waiting(self._store.files[file.name]):
                header = check_batch(batch, stamped=False)
                records = decode_records(batch, header, range(header.count))
                found += [(header.topic, record.body) for record in records]
        return found

    async def _settle(self, groups: list[str]) -> None:
        """Let the groups handle all that is left."""
        members = [members_of(self._run, self._broker, name, again=True) for name in groups]
        for each in members:
            each.start()
        for name in groups:
            try:
                await self._broker.settled(name, timeout_s=SETTLE_S)
            except TimeoutError as error:
                self._run.fail("settled", str(error))
        for each in members:
            await each.end()


def _time_s() -> float:
    return asyncio.get_running_loop().time()
