"""The servicer of OutputService: opens the outputs of owners, and lists what is remembered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import grpc.aio

from baton.storage.v1 import output_service_pb2 as pb
from baton.storage.v1 import output_service_pb2_grpc as pb_grpc
from batonmq._common.aio import in_steps
from batonmq._common.rpc import error_to_pb
from batonmq._core.names import check_broker, check_group
from batonmq._core.outputs import OFFSET_MAX, OutputHead, OutputSource
from batonmq.errors import BatonError, InvalidArgument, PermissionDenied
from batonmq_server.runtime.access.guard import PermissionCheck
from batonmq_server.runtime.access.permissions import join_group
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core.outputs import SourceOutputs, StoredOutput, encode_opened
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.storage.validation import QUEUE_ID_MAX, check_limit

OWNERS_MAX = 1_024
SOURCES_MAX = 1_000
SOURCES_DEFAULT = 100
Context = grpc.aio.ServicerContext[Any, Any]


class OutputServicer(pb_grpc.OutputServiceServicer):
    """Serves OutputService; see the proto.

    Args:
        require: Raises unless the caller has a permission; None if authorization is off.
    """

    def __init__(self, appender: Appender, require: PermissionCheck | None) -> None:
        self._appender, self._require = appender, require
        self._outputs = appender.store.outputs
        metrics = appender.metrics
        metrics.remembered_outputs.set_function(lambda: len(self._outputs))
        metrics.output_sources.set_function(lambda: self._outputs.source_count)

    async def OpenOutputs(
        self, request: pb.OpenOutputsRequest, context: Context
    ) -> pb.OpenOutputsResponse:
        """See the proto."""
        if not request.owners:
            raise InvalidArgument("owners must have at least one", facts={"field": "owners"})
        check_limit("owners", len(request.owners), OWNERS_MAX)
        self._appender.flusher.check()
        owners = [self._checked(owner, context) for owner in request.owners]
        opened = self._open(owners)
        if any(isinstance(one, OutputHead) for one in opened):
            # Also the last batch of an earlier owner is safe then.
            await self._appender.flusher.wait_until_safe(self._appender.store.log.next_position)
        found = [self._remembered(one) for one in opened]  # at one moment: all of it is safe
        return pb.OpenOutputsResponse(outcomes=[await _outcome(one) for one in found])

    async def ListOutputSources(
        self, request: pb.ListOutputSourcesRequest, context: Context
    ) -> pb.ListOutputSourcesResponse:
        """See the proto."""
        check_limit("sources_max", request.sources_max, SOURCES_MAX)
        self._appender.role.rejection()  # raises on a follower
        found: list[pb.OutputSourceState] = []
        permitted: dict[str, bool] = {}
        for source, state in self._outputs.sources():
            if len(found) == (request.sources_max or SOURCES_DEFAULT):
                break
            if request.group and source.group != request.group:
                continue
            if source.group not in permitted:
                permitted[source.group] = (
                    self._require is None or refusal(self._require, context, source.group) is None
                )
            if permitted[source.group]:
                found.append(_state_to_pb(source, state))
        return pb.ListOutputSourcesResponse(
            sources=found,
            source_count=self._outputs.source_count,
            output_count=len(self._outputs),
            forgotten_unix_ms=self._outputs.forgotten_unix_ms,
        )

    def _checked(self, owner: pb.OutputOwner, context: Context) -> OutputHead | BatonError:
        try:
            head = _head_of(owner)
        except BatonError as error:
            return error
        if self._require is not None:
            refused = refusal(self._require, context, head.source.group)
            if refused is not None:
                return refused
        return head

    def _open(self, owners: Sequence[OutputHead | BatonError]) -> list[OutputHead | BatonError]:
        """Store the tokens in one batch; return what became of each.

        A repeated call stores them again. So a leader that was replaced, and does not know it yet,
        never says what is stored.
        """
        results = list(owners)
        valid: dict[OutputHead, None] = {}
        for index, head in enumerate(owners):
            try:
                if isinstance(head, OutputHead):
                    self._outputs.check_head(head)
                    valid[head] = None
            except BatonError as error:
                results[index] = error
        if not valid:
            return results
        (outcome,) = self._appender.append([checked(encode_opened(valid))], SYSTEM_TOPICS)
        if isinstance(outcome, BatonError):
            return [outcome if isinstance(one, OutputHead) else one for one in results]
        return results

    def _remembered(self, opened: OutputHead | BatonError) -> _Remembered | BatonError:
        if isinstance(opened, BatonError):
            return opened
        known = self._outputs.get(opened.source)
        if known is None:  # forgotten since
            return _Remembered((), self._outputs.forgotten_unix_ms)
        try:
            self._outputs.check_head(opened)
        except BatonError as error:
            return error
        return _Remembered(known.stored(), known.forgotten_unix_ms)


class _Remembered(NamedTuple):
    """The outputs of a source; others of before `forgotten_unix_ms` may be forgotten."""

    outputs: Iterable[StoredOutput]
    forgotten_unix_ms: int


async def _outcome(found: _Remembered | BatonError) -> pb.OpenOutputsOutcome:
    if isinstance(found, BatonError):
        return pb.OpenOutputsOutcome(error=error_to_pb(found))
    stored = pb.StoredOutputs(forgotten_unix_ms=found.forgotten_unix_ms)
    async for one in in_steps(found.outputs):
        stored.outputs.add(offset=one.offset, number=one.number, digest=one.digest)
    return pb.OpenOutputsOutcome(stored=stored)


def refusal(require: PermissionCheck, context: Context, group: str) -> PermissionDenied | None:
    """Return why the caller may not store outputs of a group; None if it may."""
    try:
        require(context, join_group(group))
    except PermissionDenied as error:
        return error
    return None


def _head_of(owner: pb.OutputOwner) -> OutputHead:
    """Return the head that a request names.

    Raises:
        InvalidArgument, InvalidName: A field is invalid.
    """
    source = owner.source
    check_group(source.group)
    check_broker(source.broker)
    check_limit("queue_id", source.queue_id, QUEUE_ID_MAX)
    least = {"topic_id": (source.topic_id, 0), "reset_epoch": (owner.reset_epoch, 0),
             "token": (owner.token, 1), "floor": (owner.floor, 0)}  # fmt: skip
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise InvalidArgument(
                f"{name} must be at least {minimum}, got {value}", facts={"field": name}
            )
    check_limit("floor", owner.floor, OFFSET_MAX - 1)
    return OutputHead(
        OutputSource(source.group, source.topic_id, source.broker, source.queue_id),
        owner.reset_epoch,
        owner.token,
        owner.floor,
    )


def _state_to_pb(source: OutputSource, state: SourceOutputs) -> pb.OutputSourceState:
    return pb.OutputSourceState(
        owner=pb.OutputOwner(
            source=pb.OutputSource(
                group=source.group,
                topic_id=source.topic_id,
                broker=source.broker,
                queue_id=source.queue_id,
            ),
            reset_epoch=state.reset_epoch,
            token=state.token,
            floor=state.floor,
        ),
        output_count=len(state),
        used_unix_ms=state.used_unix_ms,
        forgotten_unix_ms=state.forgotten_unix_ms,
    )
