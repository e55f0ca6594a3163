"""Goal: one stream delivers many queues, each frame recorded first, within the credit.

Method: the whole node over gRPC with a real etcd; offsets is a twin that accepts or rejects.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import STEP_ITEMS
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._core.records import check_batch, decode_records
from batonmq.errors import (
    BadExpression,
    BatonError,
    Fenced,
    InvalidArgument,
    NotLeader,
    Overloaded,
    Paused,
    WrongBroker,
)
from batonmq_server.storage import delivery_streams
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.queue_reader import ReadResult, ReadSpec
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.node_role import StandaloneRole
from tests.storage.batches import batch
from tests.storage.running_node import GROUP, TIMEOUT_S, RunningNode, pull_request, running_node
from tests.storage.test_pull_gates import gate_seen
from tests.support.conditions import until


class Stream:
    """A stream of deliveries, and the frames of each that have arrived."""

    def __init__(self, call: Any) -> None:
        self._call, self._numbers = call, dict[int, int]()
        self._arrived: list[pb.DeliveryFrame] = []

    def cancel(self) -> None:
        self._call.cancel()

    async def command(self, *commands: pb.DeliveryCommand) -> None:
        await self._call.write(pb.DeliverRequest(commands=commands))

    async def start(
        self,
        number: int = 1,
        *,
        messages: int = 1_000,
        bytes_limit: int = 1 << 20,
        keeps_last_batch: bool = False,
        progress: offsets_pb.Acks | None = None,
        **fields: Any,
    ) -> None:
        """Begin a delivery of `pull_request(**fields)`."""
        self._numbers[number] = 1
        limits = pb.DeliveryCredit(
            number=1, messages_limit=messages, bytes_limit=bytes_limit, progress=progress
        )
        pull = pull_request(**({"hold_ms": TIMEOUT_S * 1_000} | fields))
        start = pb.DeliveryStart(pull=pull, credit=limits, keeps_last_batch=keeps_last_batch)
        await self.command(pb.DeliveryCommand(delivery_id=number, start=start))

    async def raise_credit(self, number: int = 1, *, messages: int, **fields: Any) -> None:
        """Send the next credit of a delivery."""
        self._numbers[number] += 1
        credit = pb.DeliveryCredit(
            number=self._numbers[number], messages_limit=messages, bytes_limit=1 << 20, **fields
        )
        await self.command(pb.DeliveryCommand(delivery_id=number, credit=credit))

    async def stop(self, number: int = 1) -> None:
        await self.command(pb.DeliveryCommand(delivery_id=number, stop=pb.DeliveryStop()))

    async def frame(self, number: int = 1) -> pb.DeliveryFrame:
        """Return the next frame of a delivery."""
        while not (own := [one for one in self._arrived if one.delivery_id == number]):
            self._arrived += await self.response()
        self._arrived.remove(own[0])
        return own[0]

    async def response(self) -> list[pb.DeliveryFrame]:
        """Return the frames of the next response; raise the BatonError of a status."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if response == grpc.aio.EOF:
            raise from_rpc_error(
                grpc.aio.AioRpcError(
                    await self._call.code(),
                    grpc.aio.Metadata(),
                    await self._call.trailing_metadata(),
                    await self._call.details(),
                )
            )
        return list(response.frames)

    async def bodies(self, number: int = 1) -> list[bytes]:
        """Return the bodies of the messages in the next frame."""
        return [
            body for raw in (await self.frame(number)).messages.batches for body in _bodies(raw)
        ]

    async def error(self, number: int = 1) -> BatonError:
        """Return the error in the next frame."""
        return error_from_pb((await self.frame(number)).error)


def _bodies(raw: bytes) -> list[bytes]:
    header = check_batch(raw, stamped=True)
    return [record.body for record in decode_records(raw, header, range(header.count))]


@asynccontextmanager
async def streaming(node: RunningNode) -> AsyncIterator[Stream]:
    """Open a stream, and cancel it at the end."""
    call = node.stub.Deliver()
    try:
        yield Stream(call)
    finally:
        call.cancel()


async def test_stream_delivers_what_is_there_and_what_arrives(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(batch(b"a", b"b"))
        await stream.start()
        first = await stream.frame()
        assert [check_batch(raw, stamped=True).count for raw in first.messages.batches] == [2]
        assert (first.messages.next_offset, first.messages_sent, first.credit_number) == (2, 2, 1)
        await node.wait_long_polls(1)
        await node.append(batch(b"c"))
        second = await stream.frame()
        assert (second.messages.next_offset, second.messages_sent) == (3, 3)
        assert second.bytes_sent == first.bytes_sent + len(second.messages.batches[0])
        assert node.offsets.recorded == [(GROUP, 0, 0, 2), (GROUP, 0, 2, 3)]


async def test_large_responses_are_those_of_the_contract(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """The stub of the test is generated, as that of a client in another language."""
    bodies = [bytes([number]) * 300_000 for number in range(3)]
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(*(batch(body) for body in bodies))
        await stream.start(bytes_limit=1 << 30)
        frame = await stream.frame()
        sent = [body for raw in frame.messages.batches for body in _bodies(raw)]
        assert sent == bodies
        assert frame.bytes_sent == sum(map(len, frame.messages.batches))
        assert (frame.messages.next_offset, frame.messages.queue_next_offset) == (3, 3)
        assert (frame.messages_sent, frame.credit_number) == (3, 1)


async def test_one_stream_delivers_many_queues(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        for queue_id in range(8):
            await stream.start(queue_id, queue_id=queue_id)
        await node.wait_long_polls(8)
        await node.append(*(batch(b"%d" % queue_id, queue_id=queue_id) for queue_id in range(8)))
        assert [await stream.bodies(queue_id) for queue_id in range(8)] == [
            [b"%d" % queue_id] for queue_id in range(8)
        ]


async def test_node_sends_no_more_than_its_credit(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(batch(*[b"x"] * 10), batch(*[b"x"] * 10))
        await stream.start(messages=15, messages_max=10)
        assert [(await stream.frame()).messages_sent for _ in range(2)] == [10, 15]
        await stream.start(2, queue_id=1)
        await node.append(batch(b"y", queue_id=1))
        assert await stream.bodies(2) == [b"y"]
        assert node.offsets.recorded[-1] == (GROUP, 1, 0, 1), "queue 0 got no further frame"
        await stream.raise_credit(messages=18)
        last = await stream.frame()
        assert (last.messages_sent, last.messages.next_offset, last.credit_number) == (18, 18, 2)


@pytest.mark.parametrize("keeps_last_batch", [True, False])
async def test_batch_is_not_repeated_for_a_caller_that_keeps_it(
    etcd_endpoint: str, tmp_path: Path, keeps_last_batch: bool
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(*(batch(*[b"%d" % number] * 10) for number in range(3)))
        await stream.start(messages_max=4, keeps_last_batch=keeps_last_batch)
        frames = [await stream.frame() for _ in range(8)]
        assert [one.messages.next_offset for one in frames] == [4, 8, 12, 16, 20, 24, 28, 30]
        assert frames[-1].messages_sent == 30
        sent = [[_bodies(raw)[0] for raw in one.messages.batches] for one in frames]
        if keeps_last_batch:
            assert sent == [[b"0"], [], [b"1"], [], [], [b"2"], [], []]
            assert [one.continues_batch for one in frames] == [n not in (0, 5) for n in range(8)]
        else:
            assert sent == [
                [b"0"], [b"0"], [b"0", b"1"], [b"1"], [b"1"], [b"2"], [b"2"], [b"2"],
            ]  # fmt: skip
            assert not any(one.continues_batch for one in frames)
        size = sum(len(raw) for one in frames for raw in one.messages.batches)
        assert frames[-1].bytes_sent == size


async def test_kept_batch_takes_no_room_in_a_frame(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        both = [batch(*[b"x"] * 10) for _ in range(2)]
        await node.append(*both)
        await stream.start(
            messages_max=15, bytes_max=len(both[0]) + 10, messages=4, keeps_last_batch=True
        )
        assert (await stream.frame()).messages.next_offset == 4
        await stream.raise_credit(messages=20)
        rest = await stream.frame()
        assert (rest.messages.next_offset, rest.continues_batch) == (19, True)
        assert len(rest.messages.batches) == 1


async def test_new_delivery_begins_with_a_whole_batch(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(batch(*[b"x"] * 10))
        await stream.start(1, messages=4, keeps_last_batch=True)
        assert (await stream.frame(1)).messages.next_offset == 4
        await stream.start(2, messages=4, keeps_last_batch=True, offset=4)
        frame = await stream.frame(2)
        assert (len(frame.messages.batches), frame.continues_batch) == (1, False)


async def test_frame_is_not_sent_before_it_is_recorded(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(batch(b"a"))
        node.offsets.rejection = Fenced("taken")
        await stream.start()
        assert isinstance(await stream.error(), Fenced)
        node.offsets.rejection = None
        await stream.start(2)
        assert await stream.bodies(2) == [b"a"]


async def test_token_that_is_not_current_ends_its_delivery_only(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await stream.start()
        await stream.start(2, queue_id=1)
        await node.wait_long_polls(2)
        node.offsets.rejection = Fenced("taken")
        await node.append(batch(b"a"))
        assert isinstance(await stream.error(), Fenced)
        node.offsets.rejection = None
        await node.append(batch(b"b", queue_id=1))
        assert await stream.bodies(2) == [b"b"]


async def test_stopped_delivery_sends_nothing(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await stream.start()
        await node.wait_long_polls(1)
        await stream.stop()
        await node.wait_long_polls(0)
        await node.append(batch(b"a"))
        assert node.offsets.recorded == []


async def test_end_of_the_stream_ends_its_deliveries(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        async with streaming(node) as stream:
            await stream.start()
            await node.wait_long_polls(1)
        await node.wait_long_polls(0)


async def test_delivery_without_messages_sends_an_empty_frame(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await stream.start(hold_ms=1)
        frame = await stream.frame()
        assert (len(frame.messages.batches), frame.messages.next_offset) == (0, 0)
        assert node.offsets.recorded == []


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"broker": "broker-b"}, WrongBroker),
        ({"expression": "a || "}, BadExpression),
        ({"token": -1}, InvalidArgument),
    ],
)
async def test_malformed_start_is_refused_alone(
    fields: dict[str, Any], error: type[BatonError], etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(batch(b"a"))
        await stream.start(**fields)
        await stream.start(2)
        assert isinstance(await stream.error(), error)
        assert await stream.bodies(2) == [b"a"]


async def test_credit_with_an_old_number_ends_the_delivery(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await stream.start()
        credit = pb.DeliveryCredit(number=1, messages_limit=5)
        await stream.command(pb.DeliveryCommand(delivery_id=1, credit=credit))
        assert isinstance(await stream.error(), InvalidArgument)
        await node.wait_long_polls(0)


@pytest.mark.parametrize("commands", [[], [pb.DeliveryCommand(delivery_id=1)]])
async def test_request_without_a_command_ends_the_stream(
    commands: list[pb.DeliveryCommand], etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await stream.command(*commands)
        with pytest.raises(InvalidArgument):
            await stream.response()


async def test_delivery_id_that_is_in_use_ends_the_stream(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await stream.start()
        await node.wait_long_polls(1)
        await stream.start()
        with pytest.raises(InvalidArgument):
            await stream.response()


async def test_acks_of_a_credit_are_recorded_once_with_the_next_frame(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(batch(b"a"))
        await stream.start()
        await stream.frame()
        acks = offsets_pb.Acks(committed_offset=1)
        await stream.raise_credit(messages=1_000, progress=acks, received_offset=1)
        await stream.start(2, queue_id=1)  # so that the credit has arrived
        await node.wait_long_polls(2)
        for body in (b"b", b"c"):
            await node.append(batch(body))
            assert await stream.bodies() == [body]
        first, second, third = node.offsets.items
        assert not first.HasField("progress")
        assert (second.progress.committed_offset, second.received_offset) == (1, 1)
        assert not third.HasField("progress")


async def test_delivery_of_a_leader_ends_when_it_can_take_no_more_acks(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(batch(b"a"), batch(b"b"))
        await stream.start(messages=1)
        assert await stream.bodies() == [b"a"]
        monkeypatch.setattr(StandaloneRole, "is_follower", True)
        await stream.raise_credit(messages=2, progress=offsets_pb.Acks(committed_offset=1))
        assert type(await stream.error()) is NotLeader
        assert [item.next_offset for item in node.offsets.items] == [1]


async def test_delivery_of_a_follower_leaves_acks_out(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandaloneRole, "next_read_node", lambda *_: "this node")
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(batch(b"a"), batch(b"b"))
        monkeypatch.setattr(StandaloneRole, "is_follower", True)
        await stream.start(messages=1)
        assert await stream.bodies() == [b"a"]
        await stream.raise_credit(messages=2, progress=offsets_pb.Acks(committed_offset=1))
        assert await stream.bodies() == [b"b"]
        assert not any(item.HasField("progress") for item in node.offsets.items)


async def test_paused_group_ends_its_deliveries(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await stream.start()
        await node.wait_long_polls(1)
        await node.put_gate(
            pause=nameserver_pb.Pause(by="ann", reason="maintenance", since_unix_ms=1)
        )
        assert isinstance(await stream.error(), Paused)


async def test_deliveries_beyond_the_limit_are_refused(etcd_endpoint: str, tmp_path: Path) -> None:
    async with (
        running_node(etcd_endpoint, tmp_path, long_polls_max=2) as node,
        streaming(node) as stream,
    ):
        for number in (1, 2, 3):
            await stream.start(number, queue_id=number)
        assert isinstance(await stream.error(3), Overloaded)
        await stream.stop(1)
        await stream.start(4, queue_id=3)
        await node.append(batch(b"a", queue_id=3))
        assert await stream.bodies(4) == [b"a"]


@pytest.mark.parametrize("kept", [False, True])
async def test_delivery_of_small_frames_lets_others_go_on(
    etcd_endpoint: str, tmp_path: Path, *, kept: bool
) -> None:
    """Without ownership, a delivery waits for nothing while there is credit."""
    count = 2_000 if kept else 1_000
    options: dict[str, Any] = {"messages": count, "messages_max": 1, "keeps_last_batch": kept}
    bodies = [[b""] * count] if kept else [[b""]] * count
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        for queue_id in range(2):
            await node.append(*(batch(*some, queue_id=queue_id) for some in bodies))
        await node.put_gate(ownership=nameserver_pb.OWNERSHIP_OFF)
        await gate_seen(node, None, token=0)
        for queue_id in range(2):
            await stream.start(queue_id, queue_id=queue_id, token=0, **options)
        ends = [0, 0]
        while min(ends) < count:
            for frame in await stream.response():
                ends[frame.delivery_id] = frame.messages.next_offset
                assert min(ends) > 0 or max(ends) < count
        assert ends == [count, count]


async def test_client_that_does_not_read_stops_its_deliveries(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_streams, "UNSENT_BYTES_MAX", 100_000)
    count = 400
    credit: dict[str, Any] = {"messages": 1 << 40, "bytes_limit": 1 << 60, "messages_max": 1}
    async with (
        running_node(etcd_endpoint, tmp_path) as node,
        streaming(node) as unread,
        streaming(node) as read,
    ):
        for _ in range(2):
            await node.append(*(batch(b"x" * 100_000) for _ in range(count // 2)))
        await unread.start(**credit)
        await read.start(group="others", **credit)
        for _ in range(count):
            assert len(await read.bodies()) == 1
        unread_count = sum(group == GROUP for group, *_ in node.offsets.recorded)
        assert unread_count < count / 2, "the windows of HTTP/2 and the limit are full"
        for _ in range(count):
            assert len(await unread.bodies()) == 1


@pytest.mark.parametrize("waits", [False, True])
async def test_deliveries_that_wait_for_their_records_count_what_they_have_read(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    monkeypatch.setattr(delivery_streams, "UNSENT_BYTES_MAX", 200_000)
    original, bytes_read = MessageStore.pull, 0

    def pull(self: MessageStore, key: QueueKey, spec: ReadSpec) -> ReadResult | None:
        nonlocal bytes_read
        if (reading := original(self, key, spec)) is not None:
            bytes_read += sum(map(len, reading.batches))
        return reading

    monkeypatch.setattr(MessageStore, "pull", pull)
    count = 20
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        node.offsets.answering.clear()
        if not waits:
            await node.append(batch(b"x" * 100_000))
        for number in range(count):
            await stream.start(number, group=f"group-{number}")
        if waits:
            await node.wait_long_polls(count)
            await node.append(batch(b"x" * 100_000))
        await until(lambda: node.offsets.calls)
        await node.append(batch(b"", queue_id=1))  # the deliveries had time to read more
        assert 200_000 < bytes_read < 500_000
        node.offsets.answering.set()
        for number in range(count):
            assert await stream.bodies(number) == [b"x" * 100_000]


async def test_delivery_that_is_not_recorded_leaves_room_for_others(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_streams, "UNSENT_BYTES_MAX", 50_000)
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.append(batch(b"x" * 100_000))
        node.offsets.answering.clear()
        for number in range(3):
            await stream.start(number, group=f"group-{number}")
        await until(lambda: node.offsets.calls)
        await stream.stop(0)
        node.offsets.rejection = Fenced("taken")
        node.offsets.answering.set()
        for number in (1, 2):
            assert isinstance(await stream.error(number), Fenced)
        node.offsets.rejection = None
        await stream.start(4)
        assert await stream.bodies(4) == [b"x" * 100_000]


async def test_frames_that_become_ready_during_an_empty_response_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery_streams, "SILENCE_MS_MAX", 1)
    parts = SimpleNamespace(access_of=lambda _: None)
    stream = delivery_streams._DeliveryStream(SimpleNamespace(parts=parts), None)  # type: ignore[arg-type]
    responses = stream.responses()
    silent = await anext(responses)
    assert isinstance(silent, pb.DeliverResponse) and not silent.frames
    stream._put_error(1, Paused("the group is paused"))
    stream.fail(Overloaded("the node is busy"))
    response = await anext(responses)
    assert isinstance(response, pb.DeliverResponse)
    assert [frame.delivery_id for frame in response.frames] == [1]
    with pytest.raises(Overloaded):
        await anext(responses)


async def test_refusals_that_the_client_does_not_take_stop_the_reading_of_its_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery_streams, "UNSENT_BYTES_MAX", 10 * delivery_streams.FRAME_BYTES)
    parts = SimpleNamespace(access_of=lambda _: None, broker="broker-a")
    stream = delivery_streams._DeliveryStream(SimpleNamespace(parts=parts), None)  # type: ignore[arg-type]
    count = 0

    async def requests() -> AsyncIterator[pb.DeliverRequest]:
        nonlocal count
        while count < 1_000:
            count += 1
            start = pb.DeliveryStart(pull=pull_request(broker="broker-b"))
            command = pb.DeliveryCommand(delivery_id=count, start=start)
            yield pb.DeliverRequest(commands=[command])

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(stream.read(requests()))
        for _ in range(100):
            await asyncio.sleep(0)
        assert count < 20
        answered = 0
        async for response in stream.responses():
            assert isinstance(response, pb.DeliverResponse)
            answered += len(response.frames)
        assert answered == count == 1_000
        await reading


async def test_other_calls_go_on_while_many_commands_are_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = SimpleNamespace(access_of=lambda _: None, broker="broker-a")
    stream = delivery_streams._DeliveryStream(SimpleNamespace(parts=parts), None)  # type: ignore[arg-type]
    turn, counts = 0, Counter[int]()
    monkeypatch.setattr(stream, "_carry_out", lambda _: counts.update((turn,)))

    async def requests() -> AsyncIterator[pb.DeliverRequest]:
        yield pb.DeliverRequest(commands=[pb.DeliveryCommand(delivery_id=1)] * 1_000)

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(stream.read(requests()))
        while not reading.done():
            await asyncio.sleep(0)
            turn += 1
    assert counts.total() == 1_000
    assert max(counts.values()) <= STEP_ITEMS
