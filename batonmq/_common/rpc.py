"""Conversion of `BatonError` to gRPC statuses and Protobuf messages, and back.

A failed call carries a `google.rpc.Status` in the trailer `grpc-status-details-bin`. Its details
are a `baton.common.v1.Error`, which clients of BatonMQ read, and beside it `google.rpc.ErrorInfo`
and `google.rpc.RetryInfo`, which generic clients understand.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from baton.common.v1 import error_pb2
from batonmq._common.tls_failure import explain_tls_failure
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

ERROR_OF: dict[str, type[BatonError]] = {
    each.reason: each
    for each in BatonError.__subclasses__()
    if each.__module__ == BatonError.__module__
}
"""Error class of each reason. Classes of other modules share reasons with these and are left out:
which of them exist depends on what was imported first."""
STATUS_TRAILER = "grpc-status-details-bin"
"""Trailing metadata with the serialized `google.rpc.Status` of a failed call."""
ERROR_DOMAIN = "batonmq"
"""`domain` of every `google.rpc.ErrorInfo`."""
ERROR_INFO_BYTES_MAX = 1024
"""Bound of the facts in an `ErrorInfo`. Trailers of more than 8 KiB may not arrive, and BatonMQ's
own detail in the same trailer has every fact."""
MESSAGE_BYTES_MAX, FACT_BYTES_MAX = 512, 1024
"""Bounds of a status's message and of each of its facts, which may quote a name of any length."""

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
_LOST_STATUS, _TWO_WRITERS = "Internal error from Core", "TOO_MANY_OPERATIONS"
"""What gRPC reports, with INTERNAL, for a write to a stream that has just ended, in place of the
status that the server has sent (https://github.com/grpc/grpc/issues/36066); and for the second of
two writes at the same time, which is an error in the program."""
_TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # A server that stops cancels the calls that it has not started.
    grpc.StatusCode.CANCELLED,
)


def error_to_pb(error: BatonError) -> error_pb2.Error:
    """Return the error as a message: an item of a batched response, or the detail of a status."""
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
    """Inverse of `error_to_pb`; an unknown reason, of a later version, becomes `Internal`."""
    try:
        name = error_pb2.Reason.Name(error.reason).removeprefix("REASON_")
    except ValueError:
        name = "UNKNOWN"
    kind = ERROR_OF.get(name, Internal)
    exception = kind(
        error.message,
        remedy=error.remedy,
        retry_after_ms=error.retry_after_ms,
        detail=_unpack_detail(error, kind.detail_type),
        differences=differences_from_pb(error.differences),
    )
    exception.facts = dict(error.facts)  # as sent: the sender has added those of the detail
    return exception


def _pack_detail(detail: Detail, packed: Message) -> None:
    """Fill the message of a detail; its fields have the names of the dataclass's fields."""
    packed.SetInParent()
    for field in fields(detail):
        value = getattr(detail, field.name)
        if isinstance(value, FenceCause):
            value = error_pb2.FenceCause.Value(f"FENCE_CAUSE_{value.value}")
        if value is not None:
            setattr(packed, field.name, value)


def _unpack_detail(error: error_pb2.Error, kind: type[Detail] | None) -> Detail | None:
    """Inverse of `_pack_detail`; None if the class of the error has no detail."""
    if kind is None:
        return None
    if error.WhichOneof("detail") != _DETAIL_FIELD[kind]:
        return _detail_of_facts(error.facts, kind)
    packed = getattr(error, _DETAIL_FIELD[kind])
    values = {}
    for field in packed.DESCRIPTOR.fields:
        if field.has_presence and not packed.HasField(field.name):
            continue
        value = getattr(packed, field.name)
        values[field.name] = _fence_cause(value) if field.enum_type is not None else value
    return kind(**values)


def _detail_of_facts(facts: Mapping[str, str], kind: type[Detail]) -> Detail:
    """Return the detail of an error from a peer that sends the values as facts only.

    Peers of versions without typed details do. Facts that are no values of their field are left
    out.
    """
    values: dict[str, str | int | FenceCause] = {}
    for field in fields(kind):
        if (text := facts.get(field.name)) is None:
            continue
        parse = type(field.default) if isinstance(field.default, str | FenceCause) else int
        with suppress(ValueError):
            values[field.name] = parse(text)
    return kind(**values)


def _fence_cause(value: error_pb2.FenceCause.ValueType) -> FenceCause:
    try:
        return FenceCause(error_pb2.FenceCause.Name(value).removeprefix("FENCE_CAUSE_"))
    except ValueError:
        return FenceCause.UNSPECIFIED  # a cause of a later version


def differences_to_pb(
    differences: Iterable[Difference],
) -> list[error_pb2.SubscriptionDifference]:
    """Return the differences between two subscriptions as messages."""
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
    """Inverse of `differences_to_pb`."""
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
    """Return the `google.rpc.Status` of a call that fails with `error`."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=ERROR_DOMAIN,
        metadata=_limit_facts(error.facts),
    )
    details: list[Message] = [_shorten_texts(error_to_pb(error)), info]
    if error.retry_after_ms > 0:
        delay = Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    message = _shorten(error.message, MESSAGE_BYTES_MAX)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.kind), message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _shorten(text: str, bytes_max: int) -> str:
    encoded = text.encode()
    if len(encoded) <= bytes_max:
        return text
    return f"{encoded[: bytes_max - 3].decode(errors='ignore')}..."


def _shorten_texts(packed: error_pb2.Error) -> error_pb2.Error:
    """Shorten the texts that may quote a request."""
    packed.message = _shorten(packed.message, MESSAGE_BYTES_MAX)
    for name, value in packed.facts.items():
        packed.facts[name] = _shorten(value, FACT_BYTES_MAX)
    return packed


def _limit_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the first facts that fit into `ERROR_INFO_BYTES_MAX`."""
    left, kept = ERROR_INFO_BYTES_MAX, {}
    for name, value in facts.items():
        left -= len(name.encode()) + len(value.encode())
        if left < 0:
            break
        kept[name] = value
    return kept


async def abort(context: grpc.aio.ServicerContext, error: BatonError) -> NoReturn:  # type: ignore[type-arg]
    """End the call with the status, the message and the details of `error`."""
    status = status_of(error)
    trailer = ((STATUS_TRAILER, status.SerializeToString()),)
    await context.abort(grpc.StatusCode[error.kind], status.message, trailer)
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError) -> BatonError:
    """Return the `BatonError` of a failed call.

    A call that failed without one, because the server is away or stops or the deadline passed, is
    `Unreachable`. It is not known whether a write of that kind was stored. So is a stream that
    ended while a request was written to it: gRPC loses its status; the next call finds the reason.
    """
    for detail in _status_details(error):
        packed = error_pb2.Error()
        if detail.Unpack(packed):
            return error_from_pb(packed)
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Internal(
            f"the server does not know this call ({error.code().name}: {details})",
            remedy="Check the address: it belongs to another service, or to another version.",
        )
    if _is_lost_status(error, details):
        return Unreachable("the stream ended while a request was written, for an unknown reason")
    if error.code() not in _TRANSIENT:
        return Internal(f"{error.code().name}: {details}")
    failure = explain_tls_failure(details) if error.code() is grpc.StatusCode.UNAVAILABLE else None
    if failure is None:
        return Unreachable(f"{error.code().name}: {details}")
    address = _ADDRESS.search(details)
    server = address[1] if address else "the server"
    return Unreachable(f"{server}: {failure.reason}", remedy=failure.remedy)


def _is_lost_status(error: grpc.aio.AioRpcError, details: str) -> bool:
    if error.code() is not grpc.StatusCode.INTERNAL or details != _LOST_STATUS:
        return False
    return _TWO_WRITERS not in (error.debug_error_string() or "")


def _status_details(error: grpc.aio.AioRpcError) -> Sequence[Any]:
    """Return the details of the status in the trailer; none if it is missing or malformed."""
    for name, value in error.trailing_metadata() or ():
        if name == STATUS_TRAILER and isinstance(value, bytes):
            try:
                return tuple(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return ()
    return ()


async def answered(call: Awaitable[T]) -> T:
    """Return the response of a call.

    Raises:
        BatonError: The call failed; see `from_rpc_error`.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
