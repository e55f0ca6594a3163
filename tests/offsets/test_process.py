"""Goal: every change that the process has answered survives its crash.

Method: `python -m batonmq_server.offsets` with a real etcd, killed in the middle of commits,
restarted and queried.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.health import SERVING, ask_health
from batonmq._connection.channels import connect
from batonmq_server.local.child_process import ChildProcess, Program
from batonmq_server.local.ports import HOST, keep_ports
from batonmq_server.offsets.core.ranges import RangeSet
from tests.offsets.service_calls import TERM, TIMEOUT_S, fence_item, queue, run
from tests.support.cluster import fork_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
QUEUES = 6
DELIVERED = 100_000
READY_S = 30.0


class OffsetsProcess:
    """The process of the service, which is started again and again on one folder.

    Attributes:
        program: The command that starts it.
        address: Where it serves.
    """

    def __init__(self, folder: Path, etcd_endpoint: str) -> None:
        port = keep_ports(folder / "ports.json", ["offsets"])["offsets"]
        self.address = f"{HOST}:{port}"
        env = {
            "CLUSTER": f"offsets-{secrets.token_hex(6)}",
            "ETCD": etcd_endpoint,
            "PORT": str(port),
            "DATA_DIR": str(folder / "data"),
        }
        self.program = Program(
            name="offsets",
            command=[sys.executable, "-m", "batonmq_server.offsets"],
            env={f"BATON_OFFSETS_{name}": value for name, value in env.items()},
            drop=("BATON_",),
            log_path=folder / "offsets.log",
            is_ready=self._is_ready,
        )
        self.child = ChildProcess(self.program, fork_server().start)

    async def _is_ready(self) -> bool:
        async with connect(self.address) as channel:
            return await ask_health(channel) == SERVING

    @asynccontextmanager
    async def serving(
        self, child: ChildProcess | None = None
    ) -> AsyncIterator[pb_grpc.OffsetsServiceAsyncStub]:
        """Run the process, or `child` in its place; kill it at the end if it still runs."""
        child = child or self.child
        child.spawn()
        try:
            await child.ready(READY_S)
            async with connect(self.address) as channel:
                yield pb_grpc.OffsetsServiceStub(channel)
        finally:
            child.kill_now()

    async def kill_during(
        self,
        writers: Sequence[Acker | Mover],
        stub: pb_grpc.OffsetsServiceAsyncStub,
        answer_count: int,
    ) -> None:
        """Kill the process once that many calls of the writers are answered."""
        answers = asyncio.Semaphore(0)
        async with asyncio.TaskGroup() as tasks:
            for writer in writers:
                tasks.create_task(writer.run_until_killed(stub, answers))
            for _ in range(answer_count):
                await answers.acquire()
            self.child.kill_now()


@pytest.fixture
def process(tmp_path: Path, etcd_endpoint: str) -> OffsetsProcess:
    return OffsetsProcess(tmp_path, etcd_endpoint)


async def own_all(stub: pb_grpc.OffsetsServiceAsyncStub) -> None:
    """Give every queue token 1, and deliver far ahead."""
    await stub.Announce(pb.AnnounceRequest(term=TERM), timeout=TIMEOUT_S)
    keys = [queue(queue_id=queue_id) for queue_id in range(QUEUES)]
    fences = [fence_item(queue=key) for key in keys]
    await stub.Fence(pb.FenceRequest(term=TERM, items=fences), timeout=TIMEOUT_S)
    items = [pb.DeliveryItem(queue=key, token=1, next_offset=DELIVERED) for key in keys]
    await stub.RecordDelivered(pb.RecordDeliveredRequest(items=items), timeout=TIMEOUT_S)


class Acker:
    """Commits one queue in small ranges with gaps, and records the answered acks."""

    def __init__(self, queue_id: int) -> None:
        self.queue = queue(queue_id=queue_id)
        self.answered = RangeSet()
        self.at = 0

    async def run_until_killed(
        self, stub: pb_grpc.OffsetsServiceAsyncStub, answers: asyncio.Semaphore
    ) -> None:
        """Commit until the process has ended; release `answers` with each answer."""
        while True:
            hole, end = self.at + 1, self.at + 4
            acked = RangeSet(((self.at, hole), (hole + 1, end)))
            item = pb.CommitItem(
                queue=self.queue, token=1, acked=[run(first, next_) for first, next_ in acked.runs]
            )
            try:
                answer = await stub.Commit(pb.CommitRequest(items=[item]), timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return
            assert answer.outcomes[0].HasField("committed"), answer
            self.answered = self.answered.union(acked)
            self.at = end
            answers.release()


async def acked_of(stub: pb_grpc.OffsetsServiceAsyncStub, attempt: str) -> list[RangeSet]:
    """Fence each queue by force; return its acked offsets, including those below C."""
    request = pb.QueryRequest(queues=[queue(queue_id=queue_id) for queue_id in range(QUEUES)])
    outcomes = (await stub.Query(request, timeout=TIMEOUT_S)).outcomes
    fences = [
        fence_item(
            queue=outcome.progress.queue,
            attempt=attempt,
            expected_token=outcome.progress.token,
            condition=pb.FENCE_CONDITION_FORCED,
            forced_by="test",
            forced_reason="to see what is acked",
            holder=queue_pb2.Incarnation(client_id="auditor", incarnation_id=1),
        )
        for outcome in outcomes
    ]
    request_fence = pb.FenceRequest(term=TERM, items=fences)
    acked = []
    for grant in (await stub.Fence(request_fence, timeout=TIMEOUT_S)).outcomes:
        runs = [(each.first_offset, each.next_offset) for each in grant.fenced.acked]
        acked.append(RangeSet.merged([(0, grant.fenced.committed_offset), *runs]))
    return acked


async def test_every_answered_commit_survives_kill_9(process: OffsetsProcess) -> None:
    ackers = [Acker(queue_id) for queue_id in range(QUEUES)]
    for answer_count in (40, 150, 90):
        async with process.serving() as stub:
            if not ackers[0].answered:
                await own_all(stub)
            await process.kill_during(ackers, stub, answer_count)
    async with process.serving() as stub:
        ranges = await acked_of(stub, "audit")
        announcement = await stub.Announce(pb.AnnounceRequest(term=TERM), timeout=TIMEOUT_S)
    assert announcement.offsets_epoch == 4
    for acker, acked in zip(ackers, ranges, strict=True):
        assert acker.answered.count >= 3
        assert not acker.answered.difference(acked), "an answered ack is gone"
        assert acked.next_offset <= acker.at + 4, "every acked offset was sent"


async def test_answered_close_and_fence_survive_kill_9(process: OffsetsProcess) -> None:
    async with process.serving() as stub:
        await own_all(stub)
        close = pb.CloseItem(
            queue=queue(queue_id=0), token=1, committed_offset=5, unfinished=[run(7, 9)]
        )
        await stub.Close(pb.CloseRequest(items=[close]), timeout=TIMEOUT_S)
        process.child.kill_now()
    repeated = fence_item(queue=queue(queue_id=1))
    following = fence_item(queue=queue(queue_id=0), attempt="next", expected_token=1)
    async with process.serving() as stub:
        request = pb.FenceRequest(term=TERM, items=[repeated, following])
        answer = await stub.Fence(request, timeout=TIMEOUT_S)
        process.child.kill_now()
    async with process.serving() as stub:
        list_request = pb.ListHoldsRequest(queue=queue(queue_id=0))
        holds = (await stub.ListHolds(list_request, timeout=TIMEOUT_S)).holds
    assert [(hold.token, hold.end, hold.delivered_offset) for hold in holds] == [
        (2, pb.HOLD_END_UNSPECIFIED, 5),
        (1, pb.HOLD_END_PASSED, DELIVERED),
    ]
    assert [outcome.fenced for outcome in answer.outcomes] == [
        pb.Fenced(token=1),
        pb.Fenced(token=2, committed_offset=5, maybe_seen=[run(7, 9)]),
    ]


class Mover:
    """Resets one queue to changing offsets, each time with a new operation id."""

    def __init__(self, queue_id: int) -> None:
        self.queue = queue(queue_id=queue_id)
        self.answered: list[pb.ResetStep] = []
        self.sent = 0

    def request(self, number: int) -> pb.ResetRequest:
        item = pb.ResetItem(queue=self.queue, to_offset=number * 7 % 100)
        name = f"op-{self.queue.queue.queue_id}-{number}"
        return pb.ResetRequest(op_id=name, by="test", reason="kill -9", items=[item])

    async def run_until_killed(
        self, stub: pb_grpc.OffsetsServiceAsyncStub, answers: asyncio.Semaphore
    ) -> None:
        """Reset until the process has ended; release `answers` with each answer."""
        while True:
            self.sent = len(self.answered) + 1
            try:
                answer = await stub.Reset(self.request(self.sent), timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return
            self.answered.append(answer.outcomes[0].step)
            answers.release()


async def test_every_answered_reset_survives_kill_9_and_its_op_id_is_known(
    process: OffsetsProcess,
) -> None:
    movers = [Mover(queue_id) for queue_id in range(QUEUES)]
    async with process.serving() as stub:
        await own_all(stub)
    for answer_count in (40, 90):
        async with process.serving() as stub:
            await process.kill_during(movers, stub, answer_count)
    async with process.serving() as stub:
        for mover in movers:
            assert len(mover.answered) >= 5
            earlier = await stub.Query(pb.QueryRequest(queues=[mover.queue]), timeout=TIMEOUT_S)
            before = earlier.outcomes[0].progress
            for number, step in enumerate(mover.answered, 1):
                answer = await stub.Reset(mover.request(number), timeout=TIMEOUT_S)
                assert answer.outcomes[0].step == step, "the same answer, and no other effect"
            after = await stub.Query(pb.QueryRequest(queues=[mover.queue]), timeout=TIMEOUT_S)
            assert after.outcomes[0].progress.token == before.token
            assert before.token in {mover.answered[-1].token, mover.answered[-1].token + 1}
        listed = await stub.ListResets(pb.ListResetsRequest(group="readers"), timeout=TIMEOUT_S)
    answered = {
        f"op-{m.queue.queue.queue_id}-{n + 1}" for m in movers for n in range(len(m.answered))
    }
    sent = {f"op-{m.queue.queue.queue_id}-{m.sent}" for m in movers}
    recorded = [reset.op_id for reset in listed.resets]
    assert answered <= set(recorded) <= answered | sent
    assert len(recorded) == len(set(recorded))


async def test_undo_after_kill_9_restores_the_acked_offsets(process: OffsetsProcess) -> None:
    order: Any = {"by": "test", "reason": "kill -9"}
    async with process.serving() as stub:
        await own_all(stub)
        acks = pb.CommitItem(
            queue=queue(queue_id=0), token=1, committed_offset=5, acked=[run(7, 9)]
        )
        await stub.Commit(pb.CommitRequest(items=[acks]), timeout=TIMEOUT_S)
        items = [pb.ResetItem(queue=queue(queue_id=0), to_offset=0)]
        await stub.Reset(pb.ResetRequest(op_id="op", items=items, **order), timeout=TIMEOUT_S)
        process.child.kill_now()
    async with process.serving() as stub:
        undo = pb.ResetRequest(op_id="undo", undo_group="readers", undo_op_id="op", **order)
        await stub.Reset(undo, timeout=TIMEOUT_S)
        process.child.kill_now()
    async with process.serving() as stub:
        answer = await stub.Query(pb.QueryRequest(queues=[queue(queue_id=0)]), timeout=TIMEOUT_S)
    now = answer.outcomes[0].progress
    assert (now.committed_offset, list(now.acked)) == (5, [run(7, 9)])
    assert (now.reset_epoch, now.token) == (2, 3)


async def test_stopped_process_exits_and_loses_nothing(process: OffsetsProcess) -> None:
    acker = Acker(0)
    async with process.serving() as stub:
        await own_all(stub)
        answers = asyncio.Semaphore(0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(acker.run_until_killed(stub, answers))
            await answers.acquire()
            process.child.send(signal.SIGTERM)
            assert await process.child.ended() == 0
    async with process.serving() as stub:
        acked, *_ = await acked_of(stub, "audit")
    assert not acker.answered.difference(acked)


async def test_second_process_on_the_same_folder_exits_at_once(
    process: OffsetsProcess, tmp_path: Path
) -> None:
    async with process.serving():
        program = replace(
            process.program,
            name="second",
            env={**process.program.env, "BATON_OFFSETS_PORT": "0"},
            log_path=tmp_path / "second.log",
        )
        second = ChildProcess(program, fork_server().start)
        second.spawn()
        try:
            assert await second.ended() == 1
            assert "another process uses" in "\n".join(second.last_lines(40))
        finally:
            second.kill_now()
        assert process.child.pid is not None


async def test_failed_write_ends_the_process_without_an_answer(
    process: OffsetsProcess, tmp_path: Path
) -> None:
    limited = replace(
        process.program,
        name="offsets, files up to 256 KiB",
        command=["/bin/sh", "-c", 'ulimit -f 512; exec "$@"', "sh", *process.program.command],
        log_path=tmp_path / "limited.log",
    )
    child = ChildProcess(limited)
    answered: list[queue_pb2.GroupQueue] = []
    async with process.serving(child) as stub:
        await stub.Announce(pb.AnnounceRequest(term=TERM), timeout=TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError):
            for first in range(0, 60_000, 500):
                keys = [queue(queue_id=queue_id) for queue_id in range(first, first + 500)]
                request = pb.FenceRequest(term=TERM, items=[fence_item(queue=key) for key in keys])
                await stub.Fence(request, timeout=TIMEOUT_S)
                answered += keys
        assert await child.ended() == 1
        assert "lmdb" in "\n".join(child.last_lines(40))
    async with process.serving() as stub:
        queues = (await stub.Announce(pb.AnnounceRequest(term=TERM), timeout=TIMEOUT_S)).queues
    assert answered
    assert {each.queue.queue.queue_id for each in queues} >= {k.queue.queue_id for k in answered}
