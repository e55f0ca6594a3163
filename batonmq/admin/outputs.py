"""Lists what storage remembers of transformers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.storage.v1 import output_service_pb2 as pb
from batonmq.admin._broker_names import broker_names
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError

SOURCES_MAX = 1_000


@dataclass(frozen=True, slots=True)
class RememberedOutputs:
    """What one broker remembers of the outputs of one input queue.

    Attributes:
        broker: The broker that remembers them.
        group: Group of the transformers.
        topic_id: Id of the topic of the inputs.
        input_broker: Broker of the input queue.
        queue_id: Id of the input queue.
        token: Newest fencing token under which outputs were stored or opened.
        reset_epoch: Reset epoch of the input queue, as far as it is known here.
        floor: Outputs of inputs below this offset are forgotten, and refused.
        output_count: Remembered outputs, of inputs that are not committed.
        used_unix_ms: Store time of the last batch, by the clock of the broker.
        forgotten_unix_ms: Outputs that were stored at or before this time may be forgotten; 0 if
            none are.
    """

    broker: str
    group: str
    topic_id: int
    input_broker: str
    queue_id: int
    token: int
    reset_epoch: int
    floor: int
    output_count: int
    used_unix_ms: int
    forgotten_unix_ms: int


async def remembered_outputs(
    admin: Admin, group: str = ""
) -> tuple[tuple[RememberedOutputs, ...], tuple[str, ...]]:
    """Return what each broker remembers, and the errors of brokers that failed.

    Args:
        group: Only of this group; empty for all. At most 1,000 input queues of each broker.

    Raises:
        Unreachable: No nameserver responds.
    """
    brokers = await broker_names(admin)
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(_of_broker(admin, broker, group)) for broker in brokers]
    found = [one for call in calls for one in call.result()[0]]
    found.sort(key=lambda one: (one.group, one.topic_id, one.input_broker, one.queue_id))
    return tuple(found), tuple(call.result()[1] for call in calls if call.result()[1])


async def _of_broker(admin: Admin, broker: str, group: str) -> tuple[list[RememberedOutputs], str]:
    request = pb.ListOutputSourcesRequest(group=group, sources_max=SOURCES_MAX)

    async def ask(limit_s: float) -> pb.ListOutputSourcesResponse:
        stub = await admin.directory.outputs(broker)
        return await stub.ListOutputSources(request, timeout=limit_s)

    try:
        answer = await admin.ask(ask)
    except BatonError as error:
        return [], f"{broker}: {error.reason}: {error.message}"
    return [_from_pb(broker, one) for one in answer.sources], ""


def _from_pb(broker: str, state: pb.OutputSourceState) -> RememberedOutputs:
    owner, source = state.owner, state.owner.source
    return RememberedOutputs(
        broker,
        source.group,
        source.topic_id,
        source.broker,
        source.queue_id,
        owner.token,
        owner.reset_epoch,
        owner.floor,
        state.output_count,
        state.used_unix_ms,
        state.forgotten_unix_ms,
    )
