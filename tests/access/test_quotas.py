"""Goal: an identity gets what its quota allows, waits for the rest, and takes nothing of others.

Method: the ledger alone, with a clock that the test sets; then calls behind the real edge, with
quotas in a real etcd.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from random import Random
from typing import cast

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import connect
from batonmq.errors import Throttled
from batonmq_server.runtime.access import throttle_delay
from batonmq_server.runtime.access.authenticator import Caller, Context
from batonmq_server.runtime.access.quotas import (
    CONNECTION_AGE_MS,
    DEFAULT,
    IDENTITIES_MAX,
    WAIT_MS_MAX,
    Quota,
    QuotaLedger,
    TokenBucket,
    Traffic,
    throttled,
)
from batonmq_server.runtime.access.stored_quotas import quota_key, quota_to_pb
from batonmq_server.runtime.access.throttle_delay import (
    DELAY_MS_MAX,
    DELAYED_MAX,
    OFTEN,
    REJECTED_BURST,
    ThrottleDelay,
)
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.testing import run_virtual
from tests.access.edge_scene import METHODS, Scene, request_of, scene
from tests.storage.batches import batch
from tests.support.conditions import until

WRITE, READ = Traffic.PRODUCE, Traffic.CONSUME
APPEND = "/baton.storage.v1.StorageService/Append"
PULL = "/baton.storage.v1.StorageService/Pull"


@pytest.mark.parametrize("seed", range(5))
def test_rate_is_kept_over_any_time_whatever_the_sizes_are(seed: int) -> None:
    random, now_ms, taken = Random(seed), 0, 0
    bucket = TokenBucket(1_000, now_ms)
    for _ in range(2_000):
        if wait_ms := bucket.wait_ms(now_ms):
            now_ms += wait_ms  # the caller obeys
        assert bucket.wait_ms(now_ms) == 0, "the wait is enough"
        tokens = random.choice([1, 10, 900, 5_000])
        bucket.take(tokens)
        taken += tokens
        now_ms += random.randrange(3)
    allowed = 1_000 + now_ms  # a second's worth, and what the time has brought
    assert allowed - 1_000 - 5_000 <= taken <= allowed + 5_000


def begin(
    ledger: QuotaLedger, traffic: Traffic, now_ms: int = 0, size: int = 0, peer: str = "a"
) -> bool:
    return ledger.begin("tenant", traffic, size, peer, now_ms)


def test_bytes_and_calls_are_limited_by_themselves() -> None:
    ledger = QuotaLedger()
    ledger.set_quota("tenant", Quota(produce_bytes_per_s=1_000, consume_calls_per_s=2))
    assert begin(ledger, WRITE, size=3_000), "a batch of any size passes"
    with pytest.raises(Throttled, match="produce_bytes_per_s=1000") as refused:
        begin(ledger, WRITE, size=1)
    assert refused.value.retry_after_ms == pytest.approx(2_000, abs=2)
    assert begin(ledger, READ)
    assert begin(ledger, READ)
    with pytest.raises(Throttled, match="consume_calls_per_s=2"):
        begin(ledger, READ)
    assert begin(ledger, READ, now_ms=1_000)
    assert begin(ledger, WRITE, now_ms=2_002, size=1)
    assert not ledger.begin("other", WRITE, 10**9, "b", 0), "another identity has no limit"


def test_answers_count_once_their_size_is_known() -> None:
    ledger = QuotaLedger()
    ledger.set_quota("tenant", Quota(consume_bytes_per_s=1_000))
    assert begin(ledger, READ)
    ledger.end("tenant", READ, 60_000)
    with pytest.raises(Throttled) as refused:
        begin(ledger, READ)
    assert refused.value.retry_after_ms == WAIT_MS_MAX, "the limit may be raised meanwhile"
    assert ledger.read_rate("tenant") == 1_000


def test_calls_in_flight_and_connections_are_bounded() -> None:
    ledger = QuotaLedger()
    ledger.set_quota("tenant", Quota(in_flight=2, connections=2))
    assert begin(ledger, WRITE, peer="a")
    assert begin(ledger, READ, peer="b")
    with pytest.raises(Throttled, match="in_flight=2"):
        begin(ledger, READ, peer="a")
    ledger.end("tenant", READ, 0)
    with pytest.raises(Throttled, match="connections=2"):
        begin(ledger, READ, peer="c")
    assert begin(ledger, READ, peer="b", now_ms=1)
    ledger.end("tenant", READ, 0)
    assert begin(ledger, READ, peer="c", now_ms=CONNECTION_AGE_MS), "a has not called for a minute"


def test_default_quota_holds_where_an_identity_has_no_limit_of_its_own() -> None:
    refusals: list[tuple[str, str]] = []
    ledger = QuotaLedger(lambda *refusal: refusals.append(refusal))
    ledger.set_quota(DEFAULT, Quota(produce_calls_per_s=1, in_flight=100))
    ledger.set_quota("tenant", Quota(produce_calls_per_s=3))
    assert ledger.quota_of("tenant") == Quota(produce_calls_per_s=3, in_flight=100)
    assert [begin(ledger, WRITE) for _ in range(3)] == [True] * 3
    assert ledger.begin("other", WRITE, 0, "b", 0)
    with pytest.raises(Throttled):
        ledger.begin("other", WRITE, 0, "b", 0)
    assert refusals == [("other", "produce_calls_per_s")]
    assert not ledger.begin("service:storage", WRITE, 0, "c", 0), "services have no quota"
    ledger.set_quota("tenant", None)
    ledger.set_quota(DEFAULT, None)
    assert not begin(ledger, WRITE)


def test_changed_rate_applies_at_once_and_keeps_the_debt() -> None:
    ledger = QuotaLedger()
    ledger.set_quota("tenant", Quota(produce_bytes_per_s=100))
    begin(ledger, WRITE, size=1_100)
    ledger.set_quota("tenant", Quota(produce_bytes_per_s=1_000))
    with pytest.raises(Throttled) as refused:
        begin(ledger, WRITE)
    assert refused.value.retry_after_ms == pytest.approx(1_000, abs=2)


def test_stream_waits_for_the_debt_of_bytes_and_calls() -> None:
    refusals: list[tuple[str, str]] = []
    ledger = QuotaLedger(lambda *refusal: refusals.append(refusal))
    assert ledger.read_wait_ms("tenant", 0) == 0
    ledger.charge_read("tenant", 10**9)
    assert not ledger._uses, "without quotas nothing is kept"
    ledger.set_quota("tenant", Quota(consume_bytes_per_s=1_000, consume_calls_per_s=2))
    assert ledger.read_wait_ms("tenant", 0) == 0
    assert ledger.read_rate("tenant") == 1_000
    ledger.charge_read("tenant", 3_000)
    assert ledger.read_wait_ms("tenant", 0) == pytest.approx(2_000, abs=2)
    with pytest.raises(Throttled, match="consume_bytes_per_s=1000"):
        begin(ledger, READ)
    assert ledger.read_wait_ms("tenant", 2_002) == 0, "the wait is enough"
    for _ in range(4):
        ledger.charge_read("tenant", 0)
    assert ledger.read_wait_ms("tenant", 2_002) == pytest.approx(1_000, abs=2)
    ledger.charge_read("tenant", 10**6)
    assert ledger.read_wait_ms("tenant", 2_002) == WAIT_MS_MAX, "the limit may be raised meanwhile"
    ledger.set_quota("tenant", None)
    assert ledger.read_wait_ms("tenant", 2_002) == 0
    assert ledger.read_rate("tenant") is None
    bytes_, calls = ("tenant", "consume_bytes_per_s"), ("tenant", "consume_calls_per_s")
    assert refusals == [bytes_, bytes_, calls, bytes_]


def test_pulls_and_streams_of_an_identity_share_its_quota() -> None:
    ledger = QuotaLedger()
    ledger.set_quota("tenant", Quota(consume_bytes_per_s=1_000))
    assert begin(ledger, READ)
    ledger.end("tenant", READ, 3_000)
    assert ledger.read_wait_ms("tenant", 0) == pytest.approx(2_000, abs=2)
    assert ledger.read_wait_ms("other", 0) == 0


def test_number_of_known_identities_is_bounded() -> None:
    ledger = QuotaLedger()
    ledger.set_quota(DEFAULT, Quota(produce_calls_per_s=1))
    for number in range(IDENTITIES_MAX + 100):
        assert ledger.begin(str(number), WRITE, 0, "a", 0)
        ledger.end(str(number), WRITE, 0)
    assert len(ledger._uses) == IDENTITIES_MAX


@pytest_asyncio.fixture
async def made(etcd: EtcdSession) -> AsyncIterator[Scene]:
    async with scene(etcd, "Pull") as made, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(made.guard.quota_mirror.run())
        for identity in ("tenant", "other"):
            await made.know(identity, ("admin", "topic:*"), ("consume", "group:*"))
        yield made
        following.cancel()


async def set_quota(made: Scene, etcd: EtcdSession, identity: str, quota: Quota) -> None:
    await etcd.put(quota_key(identity), quota_to_pb(quota).SerializeToString())
    await until(lambda: made.guard.quotas.quota_of(identity) == quota)


async def test_call_beyond_the_quota_is_rejected_with_the_wait_and_others_are_served(
    made: Scene, etcd: EtcdSession
) -> None:
    await set_quota(made, etcd, "tenant", Quota(produce_bytes_per_s=100))
    request = pb.AppendRequest(batches=[batch(bytes(1_000))])
    await made.call(APPEND, request, "tenant")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await made.call(APPEND, request, "tenant")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = from_rpc_error(refused.value)
    assert isinstance(error, Throttled)
    assert error.facts == {"identity": "tenant", "quota": "produce_bytes_per_s", "limit": "100"}
    rest_ms = WAIT_MS_MAX - DELAY_MS_MAX
    assert error.retry_after_ms == rest_ms
    status = rpc_status.from_call(refused.value)  # type: ignore[arg-type]
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToMilliseconds() == rest_ms
    assert made.registry.get_sample_value("baton_throttled_calls_total", {
        "quota": "produce_bytes_per_s"
    }) == 1  # fmt: skip
    assert made.read.count(APPEND) == 1, "the second request is not read"
    for _ in range(3):
        await made.call(APPEND, request, "other")
        await made.call(PULL, request_of(METHODS[PULL]), "tenant")
    await set_quota(made, etcd, "tenant", Quota(produce_bytes_per_s=10**9))
    await until(lambda: _admitted(made, request))


async def test_caller_that_does_not_wait_sends_a_bounded_number_of_rejected_calls(
    made: Scene, etcd: EtcdSession
) -> None:
    """Its answers are delayed, so that its calls in flight bound it."""
    await set_quota(made, etcd, "tenant", Quota(produce_bytes_per_s=100))
    request = pb.AppendRequest(batches=[batch(bytes(100_000))])
    await made.call(APPEND, request, "tenant")
    loop, in_flight, seconds = asyncio.get_running_loop(), 5, 2.5
    end_s, rejected = loop.time() + seconds, 0

    async def hammer() -> None:
        nonlocal rejected
        while loop.time() < end_s:
            with pytest.raises(grpc.aio.AioRpcError):
                await made.call(APPEND, request, "tenant")
            rejected += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(hammer())
    assert 0 < rejected <= in_flight * (seconds + 1), "about one call a second, each"


async def test_connection_of_a_flood_is_paused_and_other_callers_are_served(
    made: Scene, etcd: EtcdSession
) -> None:
    """Calls without a bound of those in flight: without the pause each of them is rejected."""
    await set_quota(made, etcd, "tenant", Quota(produce_calls_per_s=1))
    request = request_of(METHODS[APPEND])
    await made.call(APPEND, request, "tenant")
    outcomes = Counter[grpc.StatusCode]()

    async def flood(channel: grpc.aio.Channel) -> None:
        try:
            await made.call(APPEND, request, "tenant", channel)
        except grpc.aio.AioRpcError as error:
            outcomes[error.code()] += 1

    def rejected() -> float:
        labels = {"quota": "produce_calls_per_s"}
        return made.registry.get_sample_value("baton_throttled_calls_total", labels) or 0

    def paused() -> float:
        return made.registry.get_sample_value("baton_connections_paused_total") or 0

    async with connect(made.address) as channel, asyncio.TaskGroup() as tasks:
        for _ in range(REJECTED_BURST + 100):
            tasks.create_task(flood(channel))
        await until(paused)
        before, more = rejected(), 500
        for _ in range(more):
            tasks.create_task(flood(channel))
        for _ in range(3):
            await made.call(APPEND, request, "other")
    assert outcomes[grpc.StatusCode.UNAVAILABLE] > more / 2, "they end with the connection"
    assert rejected() - before < more / 2
    await made.call(PULL, request_of(METHODS[PULL]), "tenant")


class Deadline:
    """The context of a call with a deadline."""

    def __init__(self, left_s: float | None, peer: str = "ipv4:10.0.0.1:1") -> None:
        self._left_s, self._peer = left_s, peer

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float | None:
        return self._left_s


def throttled_error(identity: str = "tenant", wait_ms: int = WAIT_MS_MAX) -> Throttled:
    return throttled(identity, "produce_bytes_per_s", 1, wait_ms)


@pytest.mark.parametrize(
    ("wait_ms", "left_s", "delay_ms"),
    [(5_000, None, 1_000), (5_000, 30.0, 1_000), (300, 30.0, 300), (5_000, 0.5, 250),
     (5_000, 0.0, 0), (5_000, -1.0, 0)],
)  # fmt: skip
def test_answer_is_delayed_within_the_wait_and_the_deadline(
    wait_ms: int, left_s: float | None, delay_ms: int
) -> None:
    async def delayed() -> tuple[Throttled, float]:
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        context = cast("Context", Deadline(left_s))
        error = await ThrottleDelay(Clock()).delayed(throttled_error(wait_ms=wait_ms), context)
        return error, loop.time() - begin_s

    error, took_s = run_virtual(delayed())
    assert took_s == pytest.approx(delay_ms / 1000, abs=0.002)
    assert error.retry_after_ms == max(1, wait_ms - round(took_s * 1000))
    assert error.facts["quota"] == "produce_bytes_per_s"


def test_number_of_delayed_answers_of_an_identity_is_bounded() -> None:
    async def at_once() -> tuple[int, int]:
        delay, context = ThrottleDelay(Clock()), cast("Context", Deadline(None))
        done = Counter[str]()

        async def answer(identity: str) -> None:
            await delay.delayed(throttled_error(identity), context)
            done[identity] += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(DELAYED_MAX + 50):
                tasks.create_task(answer("tenant"))
            tasks.create_task(answer("other"))
            await asyncio.sleep(0.1)
            return done["tenant"], done["other"]

    assert run_virtual(at_once()) == (50, 0)


def test_caller_that_is_rejected_often_waits_longer_than_its_debt_lasts() -> None:
    async def waits_ms() -> list[int]:
        loop, context = asyncio.get_running_loop(), cast("Context", Deadline(None))
        delay, taken = ThrottleDelay(Clock()), []

        async def rejected() -> None:
            begin_s = loop.time()
            await delay.delayed(throttled_error(wait_ms=50), context)
            taken.append(round((loop.time() - begin_s) * 1000))

        for pause_s in (0, 5.0):
            await asyncio.sleep(pause_s)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(OFTEN + 5):
                    tasks.create_task(rejected())
        return taken

    each = [50] * OFTEN + [DELAY_MS_MAX] * 5
    assert run_virtual(waits_ms()) == pytest.approx([*each, *each], abs=2)


def paused(rejections: list[tuple[int, str]]) -> set[str]:
    """Return the connections that are paused after calls were rejected at these times, in ms."""

    async def run() -> set[str]:
        loop, begin_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        peers = set[str]()
        delay = ThrottleDelay(Clock(), peers.add)

        async def rejected(at_ms: int, peer: str) -> None:
            await asyncio.sleep(begin_s + at_ms / 1000 - loop.time())
            await delay.delayed(throttled_error(), cast("Context", Deadline(30.0, peer)))

        async with asyncio.TaskGroup() as tasks:
            for at_ms, peer in rejections:
                tasks.create_task(rejected(at_ms, peer))
        return peers

    return run_virtual(run())


def test_connection_with_more_rejected_calls_than_waiting_clients_need_is_paused() -> None:
    flood = [(0, "flood") for _ in range(REJECTED_BURST + 1)]
    assert paused(flood) == {"flood"}
    assert paused(flood[:-1]) == set()


def test_waiting_clients_are_never_paused() -> None:
    """A consumer of 1,000 queues; 300 clients that send one call a second, each."""
    consumer = [(at_ms, "consumer") for at_ms in (*[0] * 1_000, *range(1_000, 60_000, 50))]
    assert paused(consumer) == set()
    clients = [(1_000 * second, f"{one}") for second in range(60) for one in range(300)]
    assert paused(clients) == set()


def test_other_clients_of_a_flooding_identity_are_not_paused() -> None:
    flood = [(at_ms, "flood") for at_ms in range(0, 20_000, 2)]
    clients = [(1_000 * second, f"{one}") for second in range(20) for one in range(10)]
    assert paused([*flood, *clients]) == {"flood"}


def test_identities_without_rejected_calls_are_forgotten() -> None:
    async def kept() -> int:
        delay, context = ThrottleDelay(Clock()), cast("Context", Deadline(None))
        for number in range(throttle_delay.IDENTITIES_MAX + 50):
            await delay.delayed(throttled_error(str(number), wait_ms=10), context)
        return len(delay._rejected)

    assert run_virtual(kept()) <= throttle_delay.IDENTITIES_MAX


async def _admitted(made: Scene, request: pb.AppendRequest) -> bool:
    try:
        await made.call(APPEND, request, "tenant")
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_long_poll_is_in_flight_until_it_ends(made: Scene, etcd: EtcdSession) -> None:
    await set_quota(made, etcd, "tenant", Quota(in_flight=1, consume_bytes_per_s=500))
    made.holds.add(PULL)
    request = request_of(METHODS[PULL])
    async with asyncio.TaskGroup() as tasks:
        held = tasks.create_task(made.call(PULL, request, "tenant"))
        await until(lambda: [one for one in made.served if one[0] == PULL])
        assert made.served[-1][1].bytes_max == 500, "an answer is no larger than a second's worth"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await made.call(PULL, request, "tenant")
        assert isinstance(from_rpc_error(refused.value), Throttled)
        held.cancel()
    made.holds.clear()
    await until(lambda: not made.guard.quotas._uses["tenant"].in_flight)
    await made.call(PULL, request, "tenant")


class Unsized:
    """A request that nothing may measure: protobuf encodes a request to find its size."""

    def ByteSize(self) -> int:
        raise AssertionError("the size of a request without a limit was computed")


async def test_size_of_a_request_without_a_limit_is_not_computed(made: Scene) -> None:
    guard, context = made.guard, cast("Context", None)
    assert not guard.begin_call(Caller("writer"), WRITE, Unsized(), context)
    guard.quotas.set_quota("another", Quota(produce_bytes_per_s=1))
    assert not guard.begin_call(Caller("writer"), WRITE, Unsized(), context)
