"""Goal: KEDA gets activity and values of a real group, and an error that says what is wrong where
there is no value.

Method: a stub of the contract calls a scaler over a socket, as KEDA does: without a deadline. The
cluster is the in-memory broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from batonmq import ConsumerSettings
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import QueueDiagnosis
from batonmq_server.runtime import metrics_server
from batonmq_server.scaler import app
from batonmq_server.scaler.config import ScalerSettings
from batonmq_server.testing import MemoryBroker
from keda.externalscaler import externalscaler_pb2 as pb
from keda.externalscaler import externalscaler_pb2_grpc
from tests.support.conditions import until

QUEUES = 4


@dataclass(slots=True)
class Scene:
    """A broker with a scaler, and the calls of KEDA."""

    broker: MemoryBroker
    admin: Admin
    stub: externalscaler_pb2_grpc.ExternalScalerAsyncStub
    registry: Any

    async def active(self, **metadata: str) -> bool:
        return (await self.stub.IsActive(ref(metadata))).result

    async def value(self, metric: str = "lag-messages", **metadata: str) -> float:
        request = pb.GetMetricsRequest(scaledObjectRef=ref(metadata), metricName=metric)
        (value,) = (await self.stub.GetMetrics(request)).metricValues
        assert value.metricName == metric
        assert value.metricValue >= value.metricValueFloat > value.metricValue - 1
        return value.metricValueFloat

    def sample(self, name: str, **labels: str) -> float | None:
        value: float | None = self.registry.get_sample_value(name, labels)
        return value

    async def join_and_leave(self, group: str = "billing") -> None:
        """Make the group, with a subscription and without a member."""
        async with self.broker.consumer(group, {"orders": "*"}):
            pass

    async def consume(self, group: str = "billing") -> None:
        """Handle all messages, and leave."""
        async with self.broker.consumer(group, {"orders": "*"}) as consumer:

            async def handle(_: object) -> None:
                return

            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(consumer.run(handle))
                await self.broker.settled(group)
                running.cancel()

    async def send(self, count: int) -> None:
        async with self.broker.producer() as producer:
            for _ in range(count):
                await producer.send("orders", b"paid")


def ref(metadata: Mapping[str, str]) -> pb.ScaledObjectRef:
    given = {"group": "billing", "lagMessages": "10", **metadata}
    return pb.ScaledObjectRef(name="billing", namespace="shop", scalerMetadata=given)


@asynccontextmanager
async def scene(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Scene]:
    registries: list[Any] = []

    class RecordedServer(metrics_server.MetricsServer):
        def __init__(self, host: str, port: int, registry: Any, connections_max: int) -> None:
            registries.append(registry)
            super().__init__(host, port, registry, connections_max)

    monkeypatch.setattr(app, "MetricsServer", RecordedServer)
    async with MemoryBroker() as broker, broker.admin() as admin:
        values: dict[str, Any] = {
            "nameserver": broker.nameserver,
            "port": 0,
            "age_ms": 100,
            "refresh_ms": 500,
        }
        async with (
            app.serving(ScalerSettings(**values | settings), broker.environment) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            await broker.create_topic("orders", QUEUES)
            stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
            yield Scene(broker, admin, stub, registries[0])


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


async def test_group_with_lag_is_active_with_a_value_in_proportion_and_idle_at_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene(monkeypatch) as s:
        await s.join_and_leave()
        assert not await s.active()
        assert await s.value() == 0
        await s.send(20)
        await until(s.active)
        assert await s.value() == 20
        assert await s.value(lagMessages="2") == QUEUES * 2, "four members at most"
        await until(lambda: at_least(s.value("lag-seconds", lagSeconds="100"), 0.2))
        assert await s.value("lag-seconds", lagSeconds="0.01") == QUEUES * 0.01
        assert not await s.active(activationLagMessages="20")
        assert s.sample("baton_scaler_queues", group="billing") == QUEUES
        assert s.sample("baton_scaler_stuck_queues", group="billing", reason="NO_MEMBER") == 4
        await s.consume()
        await until(lambda: negated(s.active()))
        assert await s.value() == 0
        assert await s.value("lag-seconds", lagSeconds="30") == 0


async def at_least(value: Any, least: float) -> bool:
    return bool(await value >= least)


async def negated(value: Any) -> bool:
    return not await value


async def test_specification_has_the_target_of_one_member(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch) as s:
        answer = await s.stub.GetMetricSpec(ref({"lagSeconds": "2.5"}))
    specs = {one.metricName: (one.targetSize, one.targetSizeFloat) for one in answer.metricSpecs}
    assert specs == {"lag-seconds": (3, 2.5), "lag-messages": (10, 10.0)}


async def test_error_says_what_is_wrong_with_which_value(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch) as s:
        unknown = await status_of(s.active(group="nobody"))
        assert unknown == (grpc.StatusCode.NOT_FOUND, "group nobody does not exist")
        for call in (s.active, s.value, lambda **given: s.stub.GetMetricSpec(ref(given))):
            code, text = await status_of(call(lagMessages="many"))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "lagMessages is 'many'; expected: a number" in text
        code, text = await status_of(s.value("lag-seconds"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "metricName is 'lag-seconds'; expected: lag-messages" in text
        code, text = await status_of(s.active(group="x" * 60_000))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert len(text) < 600
        code, _ = await status_of(s.active(group="x" * 70_000))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than a request may be"


async def test_unknown_lag_is_unavailable_and_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch) as s:
        await s.join_and_leave()
        await s.send(5)
        await until(s.active)
        why_stuck = Admin.why_stuck

        async def without_one_lag(admin: Admin, group: str) -> tuple[QueueDiagnosis, ...]:
            """Return the answer as it is while a broker does not answer the nameserver."""
            first, *others = await why_stuck(admin, group)
            unknown = replace(first, lag=None, lag_ms=None, reason="STORAGE_UNREACHABLE")
            return (*others, unknown)

        monkeypatch.setattr(Admin, "why_stuck", without_one_lag)
        await until(lambda: is_unavailable(s))
        code, text = await status_of(s.value())
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "the lag of group billing is unknown for queue " in text
        assert "/broker-0/0: STORAGE_UNREACHABLE: " in text
        assert s.sample("baton_scaler_queues", group="billing") is None, "no old value is shown"


async def test_broadcasting_group_has_no_lag_in_the_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = ConsumerSettings(model="broadcasting", offsets_file=str(tmp_path / "offsets"))
    async with scene(monkeypatch) as s:
        async with s.broker.consumer("caches", {"orders": "*"}, settings):
            await s.send(5)
            code, text = await status_of(s.active(group="caches"))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "group caches is broadcasting: each member keeps its own progress" in text


async def is_unavailable(s: Scene) -> bool:
    """Return whether the answer is the one of now, not of before."""
    try:
        await s.active()
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def test_paused_group_is_inactive_and_its_reason_is_a_metric_and_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(monkeypatch) as s:
        await s.join_and_leave()
        await s.send(QUEUES * 5)
        await until(s.active)
        await s.admin.pause_group("billing", "ann", "the database is full")
        await until(lambda: negated(s.active()))
        assert s.sample("baton_scaler_stuck_queues", group="billing", reason="PAUSED") == 4
        assert s.sample("baton_scaler_stuck_queues", group="billing", reason="NO_MEMBER") is None
        lines = [one.getMessage() for one in caplog.records if "reason=PAUSED" in one.getMessage()]
        (line,) = lines
        assert "group=billing" in line
        assert "the database is full" in line
        await s.admin.resume_group("billing", "ann")
        await until(s.active)


async def test_stream_sends_the_state_at_once_and_each_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene(monkeypatch, streams_max=1) as s:
        await s.join_and_leave()
        stream = s.stub.StreamIsActive(ref({}))
        states = aiter(stream)
        assert not (await anext(states)).result
        code, text = await status_of(anext(aiter(s.stub.StreamIsActive(ref({})))))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 streams are open; that is the limit" in text
        await s.send(1)
        assert (await anext(states)).result
        await s.consume()
        assert not (await anext(states)).result
        stream.cancel()
        await until(lambda: is_place_free(s))


async def is_place_free(s: Scene) -> bool:
    """Return whether a stream is served: it is refused because of its group only."""
    code, _ = await status_of(anext(aiter(s.stub.StreamIsActive(ref({"group": "nobody"})))))
    return code is grpc.StatusCode.NOT_FOUND


async def test_scaler_that_stops_ends_its_streams_with_unavailable() -> None:
    async with MemoryBroker() as broker, AsyncExitStack() as stack:
        await broker.create_topic("orders")
        async with broker.consumer("billing", {"orders": "*"}):
            pass
        values: dict[str, Any] = {"nameserver": broker.nameserver, "port": 0}
        settings = ScalerSettings(**values)
        address = await stack.enter_async_context(app.serving(settings, broker.environment))
        async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as tasks:
            stub = externalscaler_pb2_grpc.ExternalScalerStub(channel)
            states = aiter(stub.StreamIsActive(ref({})))
            assert not (await anext(states)).result
            ended = tasks.create_task(status_of(anext(states)))
            await stack.aclose()
    assert await ended == (grpc.StatusCode.UNAVAILABLE, "the service is stopping")


async def test_calls_at_the_same_time_share_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch, age_ms=60_000) as s:
        await s.join_and_leave()
        reads: list[str] = []
        why_stuck = Admin.why_stuck

        async def counted(admin: Admin, group: str, **rest: Any) -> Any:
            reads.append(group)
            return await why_stuck(admin, group, **rest)

        monkeypatch.setattr(Admin, "why_stuck", counted)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(50):
                tasks.create_task(s.active())
                tasks.create_task(s.value())
        assert reads == ["billing"]
        async with asyncio.TaskGroup() as tasks:
            refused = [tasks.create_task(status_of(s.active(group="nobody"))) for _ in range(50)]
        assert {task.result()[0] for task in refused} == {grpc.StatusCode.NOT_FOUND}
        assert reads == ["billing", "nobody"], "a refusal answers the calls that wait, too"


async def test_groups_beyond_the_limit_are_forgotten_with_their_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene(monkeypatch, groups_max=2) as s:
        for number in range(3):
            await s.join_and_leave(f"group-{number}")
            assert not await s.active(group=f"group-{number}")
        shown = [s.sample("baton_scaler_queues", group=f"group-{number}") for number in range(3)]
        assert shown == [None, QUEUES, QUEUES]
