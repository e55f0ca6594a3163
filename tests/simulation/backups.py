"""A run of backups and a restore with faults drawn from a seed, and its checks.

Producers send numbers: some at once, some for later, some in a transaction; a few of those for
later are cancelled. Two groups handle them, send some back, and give some up. An operator adds
topics and queues, removes queues, deletes a topic and creates it again, and takes one snapshot
after the other; the process that takes it is killed, frozen and cut off, and started again. Members
and services are killed, the network loses and delays calls, the store of the backup fails. In some
runs retention removes messages. Then the cluster is lost, and one of its snapshots is restored to
another one: see `backup_restores`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest

from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin import backup_restorer, backup_writer
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin
from batonmq.admin.backup_manifest import BackupManifest
from batonmq.admin.backup_restorer import verify_backup
from batonmq.admin.backup_writer import BackupWriter, list_snapshots, read_backup_manifest
from batonmq.admin.quotas import QuotaLimits, Quotas
from batonmq.errors import BatonError
from batonmq_server.storage import checkpointer, schedule_server, topic_trimmer
from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_network import Faults
from tests.simulation.backup_ledger import (
    LOGS,
    ORDERS,
    TEMPORARY,
    BackupRun,
    ClusterView,
    Sending,
    SnapshotRecord,
)
from tests.simulation.backup_members import members_of
from tests.simulation.backup_processes import (
    LOST_CALL,
    Attempts,
    FailingStore,
    Killed,
    calls_without_threads,
)
from tests.simulation.backup_restores import play_restore
from tests.simulation.broker_set import BrokerSet
from tests.simulation.cluster_views import (
    access_of,
    extents_of,
    progress_of,
    repeated,
    settings_of_groups,
    settings_of_topics,
    user_topics,
)
from tests.simulation.member_processes import MemberProcesses
from tests.simulation.other_tasks import cancel_other_tasks
from tests.support.conditions import until

GROUPS, SHOP, PAUSED = ("workers", "auditors"), "shop", "reports"
BROKERS, KEYS, QUEUES = 2, 9, 4
FAULTS_S, KNOWN_S, LOG_BYTES = 25, 60, 2_000
WITH_RETENTION, RETENTION_MS = 0.3, 10_000
PRODUCER = ProducerSettings(request_timeout_ms=7_000)
FAULTS = Faults(loss=0.004, slow=0.01, slow_ms_max=6_000)
"""No call arrives after its producer has given it up: see the limits of decision 0056."""
STORAGE: Mapping[str, object] = {
    "segment_bytes": 8_192,
    "transaction_check_first_ms": 1_000,
    "transaction_check_interval_ms": 2_000,
    "disk_interval_ms": 2_000,
    "retention_hours": "any",
}


class Refused(Exception):
    """The transaction is rolled back."""


def play_backups(seed: str, *, replicated: bool = False) -> BackupRun:
    """Play the run of a seed, with two brokers or with a replica set as the first cluster."""
    run, random = BackupRun(seed), Random(seed)
    run.trimmed, run.retention = frozenset({LOGS}), random.random() < WITH_RETENTION
    storage = {**STORAGE, "retention_ms": RETENTION_MS if run.retention else 0}
    broker = (
        BrokerSet(seed, random, storage)
        if replicated
        else MemoryBroker(
            broker_count=BROKERS,
            seed=seed,
            faults=FAULTS,
            settings={"storage": storage, "nameserver": {"shrink_interval_ms": 300}},
        )
    )
    with calls_without_threads(Random(f"{seed}/calls")), _small_steps(random):
        run_virtual(_play(run, random, broker))
    return run


@contextmanager
def _small_steps(random: Random) -> Iterator[None]:
    """Let pages, files and requests be small, and retention frequent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backup_writer, "READ_BYTES", random.choice((1_000, 8_000, 4 * 1024 * 1024)))
        patch.setattr(backup_writer, "CHUNK_BYTES", random.choice((500, 8_000, 16 * 1024 * 1024)))
        patch.setattr(backup_restorer, "APPEND_BATCHES", random.choice((2, 10, 512)))
        patch.setattr(backup_restorer, "COMMIT_QUEUES", random.choice((1, 1_000)))
        patch.setattr(schedule_server, "LISTED_MAX", random.choice((1, 5, 1_000)))
        patch.setattr(topic_trimmer, "INTERVAL_S", 0.5)
        patch.setattr(checkpointer, "INTERVAL_S", random.choice((1, 8)))
        yield


async def _play(run: BackupRun, random: Random, brokers: MemoryBroker) -> None:
    store = FailingStore(run)
    async with brokers as broker, broker.admin() as admin:
        await _FirstCluster(run, random, broker, admin, store).play()
        if isinstance(broker, BrokerSet):
            run.counts["takeovers"] += broker.takeovers
        access = await access_of(admin)
    if run.snapshots:
        await play_restore(run, random, store, access)
    for host in broker._environment.hosts:
        host.thaw()  # killed processes: their tasks can end
    await cancel_other_tasks()


class _FirstCluster:
    """The cluster that is backed up, until it is lost."""

    def __init__(
        self,
        run: BackupRun,
        random: Random,
        broker: MemoryBroker,
        admin: Admin,
        store: FailingStore,
    ) -> None:
        self._run, self._random, self._broker = run, random, broker
        self._admin, self._store = admin, store
        self._topics = {ORDERS: QUEUES, LOGS: 2, TEMPORARY: 2}
        self._members = [members_of(run, broker, group, again=False) for group in GROUPS]
        self._extra = [ORDERS]
        self._end_s = 0.0

    async def play(self) -> None:
        """Execute the run up to the loss of the cluster."""
        await self._prepare()
        self._end_s = _time_s() + FAULTS_S
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._produce())
            tasks.create_task(self._change())
            tasks.create_task(self._disturb_services())
            tasks.create_task(self._back_up())
            for number, members in enumerate(self._members):
                draws = Random(f"{self._run.seed}/members/{number}")
                tasks.create_task(self._disturb_members(members, draws))
        self._broker._environment.network.faults = self._broker._quiet
        for members in self._members:
            members.settle()
            await members.end()
        await self._read_all()

    async def _prepare(self) -> None:
        admin = self._admin
        for name, count in self._topics.items():
            await repeated(partial(admin.create_topic, name, count))
        await repeated(lambda: admin.update_topic(LOGS, retention_bytes=LOG_BYTES))
        await repeated(lambda: admin.update_group(PAUSED, policy="staged"))
        await repeated(lambda: admin.pause_group(PAUSED, "ann", "end of the month"))
        await repeated(lambda: admin.update_group(GROUPS[0], strategy="average"))
        access = AccessControl(admin)
        await repeated(lambda: access.grant("app", RoleGrant(Role.CONSUME, f"topic:{ORDERS}")))
        await repeated(lambda: access.block("identity:bob", "left"))
        await repeated(lambda: Quotas(admin).set("app", QuotaLimits(produce_bytes_per_s=9_999)))
        for members in self._members:
            members.start()
        await until(self._all_known, timeout_s=KNOWN_S)

    async def _all_known(self) -> bool:
        """Return whether each group has progress on each queue, so that it counts as a reader."""
        known = await progress_of(self._admin, list(GROUPS))
        return all(len(known.get(group, ())) >= QUEUES for group in GROUPS)

    # ---- producers

    async def _produce(self) -> None:
        draws = Random(f"{self._run.seed}/producer")
        producing = self._broker.producer(
            PRODUCER, group=SHOP, transaction_checker=self._run.state_of
        )
        async with producing as producer, asyncio.TaskGroup() as tasks:
            while _time_s() < self._end_s:
                tasks.create_task(self._send(producer, draws))
                await asyncio.sleep(draws.choice((0, 0.02, 0.2)))

    async def _send(self, producer: Producer, draws: Random) -> None:
        run, kind = self._run, draws.random()
        number, topic = run.next_number(), _drawn_topic(draws, self._topics)
        body = b"%d" % number
        properties = {"text": f"p{number % 5}"}
        message = Message(body, draws.choice(("", "a", "b")), (f"k{number % 7}",), properties)
        run.sent[number] = sending = Sending(topic, message)
        parts: dict[str, Any] = {
            "tag": message.tag,
            "keys": message.keys,
            "properties": message.properties,
        }
        try:
            if kind < 0.3:
                await self._schedule(producer, draws, sending, parts)
            elif kind < 0.4:
                sending.doubtful = True
                async with producer.transaction(topic, body, **parts) as tx:
                    await asyncio.sleep(draws.choice((0, 0.01, 1)))
                    if draws.random() < 0.2:
                        sending.unwanted = True
                        raise Refused
                    run.to_commit.add(number)
                    sending.doubtful = False
                assert tx.receipt is not None
                sending.stored(tx.receipt.queue, tx.receipt.offset)
                run.counts["transactions"] += 1
            else:
                key = f"key-{draws.randrange(KEYS)}" if kind < 0.6 else None
                receipt = await producer.send(topic, body, ordering_key=key, **parts)
                sending.stored(receipt.queue, receipt.offset)
        except Refused:
            run.counts["refused"] += 1
        except BatonError:
            run.counts["send errors"] += 1

    async def _schedule(
        self, producer: Producer, draws: Random, sending: Sending, parts: Mapping[str, Any]
    ) -> None:
        delay_ms = draws.choice((500, 8_000, 40_000, 120_000))
        sending.deliver_unix_ms = 1
        receipt = await producer.send(
            sending.topic,
            sending.message.body,
            delay_ms=draws.randrange(1, delay_ms),
            **parts,
        )
        sending.deliver_unix_ms, sending.queue = receipt.deliver_unix_ms, receipt.queue
        sending.confirmed = True
        sending.scheduled_unix_ms = self._broker.clock.unix_ms()
        self._run.counts["scheduled"] += 1
        if draws.random() < 0.1:
            await asyncio.sleep(draws.uniform(0, 3))
            sending.doubtful = True
            await producer.cancel(receipt.schedule_id)
            sending.unwanted = True
            self._run.counts["cancelled"] += 1

    # ---- changes and faults

    async def _change(self) -> None:
        """Add topics and queues, remove queues, and delete a topic and make it again."""
        draws = Random(f"{self._run.seed}/operator")
        while _time_s() < self._end_s:
            await asyncio.sleep(draws.uniform(0.5, 5))
            kind = draws.random()
            try:
                if kind < 0.3:
                    name = f"extra-{len(self._topics)}"
                    await self._add_topic(name, draws.randrange(2, 5))
                elif kind < 0.6:
                    name = draws.choice([ORDERS, LOGS, *self._extra])
                    await self._change_queues(name, draws.randrange(2, 2 * QUEUES))
                elif kind < 0.8:
                    await self._renew_temporary()
            except BatonError:
                self._run.counts["changes that failed"] += 1

    async def _add_topic(self, name: str, count: int) -> None:
        await repeated(lambda: self._admin.create_topic(name, count))
        self._topics[name] = count
        self._extra.append(name)
        self._run.counts["added topics"] += 1

    async def _change_queues(self, name: str, count: int) -> None:
        self._run.topic_changes[name] += 1
        await repeated(lambda: self._admin.update_topic(name, queue_count=count))
        self._run.topic_changes[name] += 1
        self._run.counts["changed queues"] += 1

    async def _renew_temporary(self) -> None:
        run, admin = self._run, self._admin
        run.topic_changes[TEMPORARY] += 1
        run.deletions.append(self._broker.clock.unix_ms())
        await repeated(lambda: admin.delete_topic(TEMPORARY))
        await repeated(lambda: admin.create_topic(TEMPORARY, 2))
        run.topic_changes[TEMPORARY] += 1
        run.counts["deleted topics"] += 1

    async def _disturb_members(self, members: MemberProcesses, random: Random) -> None:
        while _time_s() < self._end_s:
            await asyncio.sleep(random.uniform(0.5, 8))
            self._run.counts[f"member {await members.disturb(random)}"] += 1

    async def _disturb_services(self) -> None:
        random, counts = self._random, self._run.counts
        while _time_s() < self._end_s:
            await asyncio.sleep(random.uniform(1, 8))
            self._store.rate = random.choice((0.0, 0.0, 0.02, 0.1))
            kind = random.choice(("offsets", "nameserver", "broker", "broker", "broker"))
            if kind == "broker" and isinstance(self._broker, BrokerSet):
                counts[await self._broker.fail()] += 1
                continue
            name = f"broker-{random.randrange(BROKERS)}" if kind == "broker" else kind
            if random.random() < 0.4:
                await self._broker.restart(name)
                counts[f"{kind} restarts"] += 1
            else:
                await self._broker.kill(name)
                counts[f"{kind} kills"] += 1

    # ---- snapshots

    async def _back_up(self) -> None:
        """Take one snapshot after the other."""
        draws = Random(f"{self._run.seed}/backup")
        writers: Attempts[BackupManifest] = Attempts(self._run, self._broker, "writer", draws)
        while _time_s() < self._end_s:
            await asyncio.sleep(draws.uniform(0.2, 4))
            await self._snapshot(writers)
        self._store.rate = 0

    async def _snapshot(self, writers: Attempts[BackupManifest]) -> None:
        """Take a snapshot; start the process again until it is complete."""
        run, failures = self._run, 0
        while True:
            before = await self._view()
            try:
                manifest = await writers.once(lambda admin: BackupWriter(admin, self._store).run())
                break
            except Killed:
                failures += 1
            except LOST_CALL:
                run.counts["snapshots that failed"] += 1
            except Exception as error:  # noqa: BLE001  no other one is documented
                run.fail("error", f"a snapshot: {error!r}")
                run.counts["snapshots that failed"] += 1
                await asyncio.sleep(1)
            if _time_s() > self._end_s:
                self._broker._environment.network.faults = self._broker._quiet
                self._store.rate = 0
            if _time_s() > self._end_s + 120:
                run.fail("settled", "no snapshot is complete 2 minutes after the faults")
                return
        one = SnapshotRecord(manifest, before, await self._view())
        run.counts["snapshots"] += 1
        run.counts["snapshots after a kill"] += bool(failures)
        sent_meanwhile = len(one.after.confirmed - one.before.confirmed)
        run.counts["sent during a snapshot"] += sent_meanwhile
        run.judge_snapshot(one)
        run.snapshots.append(one)
        await self._check_store(one)

    async def _check_store(self, one: SnapshotRecord) -> None:
        """A complete snapshot, and each one before, can be read back."""
        store = self._store.sound()
        numbers = await list_snapshots(store)
        if missing := {each.manifest.number for each in self._run.snapshots} - set(numbers):
            self._run.fail("exists", f"the backup lacks the snapshots {missing}")
        for number in numbers:
            manifest = await read_backup_manifest(store, number)
            for problem in (await verify_backup(store, manifest)).problems:
                self._run.fail("verify", f"snapshot {number}: {problem}")
        if (await read_backup_manifest(store, one.manifest.number)) != one.manifest:
            self._run.fail("exists", f"snapshot {one.manifest.number} is another one")

    async def _view(self) -> ClusterView:
        """Return what is known now; what is read later is not older."""
        run, admin, unix_ms = self._run, self._admin, self._broker.clock.unix_ms()
        sent = run.sent.items()
        confirmed = frozenset(number for number, one in sent if one.confirmed)
        unwanted = frozenset(number for number, one in sent if one.unwanted)
        handled = {name: frozenset(numbers) for name, numbers in run.handled.items()}
        changes = dict(run.topic_changes)
        topics = await user_topics(admin)
        groups = await settings_of_groups(admin)
        extents = await extents_of(admin, topics)
        progress = await progress_of(admin, sorted(groups))
        return ClusterView(
            unix_ms=unix_ms,
            confirmed=confirmed,
            unwanted=unwanted,
            doubtful=frozenset(number for number, one in sent if one.doubtful),
            handled=handled,
            topics=settings_of_topics(topics),
            groups=groups,
            extents=extents,
            progress=progress,
            changes_before=changes,
            changes_after=dict(run.topic_changes),
        )

    async def _read_all(self) -> None:
        """Note the messages that the cluster has in the end."""
        for topic in await user_topics(self._admin):
            for one in await self._broker.messages(topic.name):
                self._run.source[one.queue, one.offset] = one


def _drawn_topic(draws: Random, topics: Mapping[str, int]) -> str:
    return ORDERS if draws.random() < 0.5 else draws.choice(list(topics))


def _time_s() -> float:
    return asyncio.get_running_loop().time()
