"""gRPC edges: deliberate errors to statuses and items, and back into the same class."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from dataclasses import fields
from typing import NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from baton.common.v1 import error_pb2
from batonmq._common.handshakes import refusal
from batonmq.errors import (
    BatonError,
    DataLossDetail,
    Detail,
    Difference,
    FenceCause,
    FencedDetail,
    GroupMovedDetail,
    Internal,
    OffsetOutOfRangeDetail,
    OldEpochDetail,
    TokenMismatchDetail,
    TopicNotFoundDetail,
    UnknownQueueDetail,
    Unreachable,
)

ERROR_OF: dict[str, type[BatonError]] = {e.reason: e for e in BatonError.__subclasses__()}
"""Every error class by its reason; finer ones that a module derives for itself are not among it."""

_DETAIL_FIELD: dict[type[Detail], str] = {
    FencedDetail: "fenced",
    TokenMismatchDetail: "token_mismatch",
    GroupMovedDetail: "group_moved",
    OldEpochDetail: "old_epoch",
    UnknownQueueDetail: "unknown_queue",
    TopicNotFoundDetail: "topic_not_found",
    OffsetOutOfRangeDetail: "offset_out_of_range",
    DataLossDetail: "data_loss",
}

T = TypeVar("T")

_ADDRESS = re.compile(r"ipv[46]:(\S+:\d+)")
_TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # by the peer: a server that stops drops so what it has not begun
)


def error_to_pb(error: BatonError) -> error_pb2.Error:
    """The error as an item of a batched answer, or as the detail of a status."""
    packed = error_pb2.Error(
        reason=error_pb2.Reason.Value(f"REASON_{error.reason}"),
        message=error.message,
        remedy=error.remedy,
        retry=error_pb2.Retry.Value(f"RETRY_{error.retry.value}"),
        retry_after_ms=error.retry_after_ms,
        facts=error.facts,
        differences=differences_to_pb(error.differences),
    )
    if error.detail is not None and error.detail != type(error.detail)():
        _pack_detail(error.detail, getattr(packed, _DETAIL_FIELD[type(error.detail)]))
    return packed


def error_from_pb(error: error_pb2.Error) -> BatonError:
    """Inverse of `error_to_pb`; a reason this version does not know becomes `Internal`."""
    try:
        name = error_pb2.Reason.Name(error.reason).removeprefix("REASON_")
    except ValueError:
        name = "UNKNOWN"
    kind = ERROR_OF.get(name, Internal)
    return kind(
        error.message,
        remedy=error.remedy,
        retry_after_ms=error.retry_after_ms,
        facts=dict(error.facts),
        detail=_unpack_detail(error, kind.detail_type),
        differences=differences_from_pb(error.differences),
    )


def _pack_detail(detail: Detail, packed: Message) -> None:
    """Fill the message of a detail, whose fields have the names of the dataclass's fields."""
    packed.SetInParent()
    for field in fields(detail):
        value = getattr(detail, field.name)
        if isinstance(value, FenceCause):
            value = error_pb2.FenceCause.Value(f"FENCE_CAUSE_{value.value}")
        if value is not None:
            setattr(packed, field.name, value)


def _unpack_detail(error: error_pb2.Error, kind: type[Detail] | None) -> Detail | None:
    """Inverse of `_pack_detail`; None if the detail is absent or of another kind."""
    if kind is None or error.WhichOneof("detail") != _DETAIL_FIELD[kind]:
        return None
    packed = getattr(error, _DETAIL_FIELD[kind])
    values = {}
    for field in packed.DESCRIPTOR.fields:
        if field.has_presence and not packed.HasField(field.name):
            continue
        value = getattr(packed, field.name)
        values[field.name] = _fence_cause(value) if field.enum_type is not None else value
    return kind(**values)


def _fence_cause(value: error_pb2.FenceCause.ValueType) -> FenceCause:
    try:
        return FenceCause(error_pb2.FenceCause.Name(value).removeprefix("FENCE_CAUSE_"))
    except ValueError:
        return FenceCause.UNSPECIFIED  # of a later version


def differences_to_pb(
    differences: Iterable[Difference],
) -> list[error_pb2.SubscriptionDifference]:
    """Inverse of `differences_from_pb`."""
    return [
        error_pb2.SubscriptionDifference(
            topic=d.topic,
            setting=d.setting,
            newcomer_client_id=d.newcomer_client_id,
            newcomer_value=d.newcomer_value,
            member_client_id=d.member_client_id,
            member_value=d.member_value,
        )
        for d in differences
    ]


def differences_from_pb(
    differences: Iterable[error_pb2.SubscriptionDifference],
) -> tuple[Difference, ...]:
    """On what two members of a group disagree."""
    return tuple(
        Difference(
            d.topic,
            d.setting,
            d.newcomer_client_id,
            d.newcomer_value,
            d.member_client_id,
            d.member_value,
        )
        for d in differences
    )


def status_of(error: BatonError) -> status_pb2.Status:
    """The `google.rpc.Status` of a call that fails with `error`."""
    detail = Any()
    detail.Pack(error_to_pb(error))
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.kind), message=error.message, details=[detail]
    )


async def abort(context: grpc.aio.ServicerContext, error: BatonError) -> NoReturn:  # type: ignore[type-arg]
    """End the call with `error`'s status, message and details."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError) -> BatonError:
    """The deliberate error behind a failed call.

    Without one (the peer is away or stops, the deadline passed) it is `Unreachable`; for a write
    that means that the outcome is not known.
    """
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:
        status = None
    for detail in status.details if status is not None else ():
        packed = error_pb2.Error()
        if detail.Unpack(packed):
            return error_from_pb(packed)
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Internal(
            f"who answers does not know this call ({error.code().name}: {details})",
            remedy="Check the address: another service answers there, or one of another version.",
        )
    if error.code() not in _TRANSIENT:
        return Internal(f"{error.code().name}: {details}")
    refused = refusal(details) if error.code() is grpc.StatusCode.UNAVAILABLE else None
    if refused is None:
        return Unreachable(f"{error.code().name}: {details}")
    where = _ADDRESS.search(details)
    server = where[1] if where else "the server"
    return Unreachable(f"{server}: {refused.reason}", remedy=refused.remedy)


async def answered(call: Awaitable[T]) -> T:
    """The answer to a call.

    Raises:
        BatonError: the deliberate error behind its failure, as `from_rpc_error` finds it.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
