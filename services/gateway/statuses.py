"""Outcomes of calls as statuses of the RocketMQ 5 contract."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import Message

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq import errors

OK = pb.Status(code=pb.OK, message="OK")
_CODES: Mapping[type[errors.BatonError], pb.Code.ValueType] = {
    errors.TopicNotFound: pb.TOPIC_NOT_FOUND,
    errors.GroupNotFound: pb.CONSUMER_GROUP_NOT_FOUND,
    errors.InvalidName: pb.ILLEGAL_TOPIC,
    errors.BadExpression: pb.ILLEGAL_FILTER_EXPRESSION,
    errors.SubscriptionConflict: pb.ILLEGAL_CONSUMER_GROUP,
    errors.Throttled: pb.TOO_MANY_REQUESTS,
    errors.Overloaded: pb.TOO_MANY_REQUESTS,
    errors.PermissionDenied: pb.FORBIDDEN,
    errors.Unauthenticated: pb.UNAUTHORIZED,
    errors.LimitExceeded: pb.PAYLOAD_TOO_LARGE,
    errors.NotWritable: pb.FORBIDDEN,
    errors.NotReadable: pb.FORBIDDEN,
    errors.ModeChanged: pb.PRECONDITION_FAILED,
    errors.OffsetAheadOfLog: pb.ILLEGAL_OFFSET,
    errors.OffsetOutOfRange: pb.ILLEGAL_OFFSET,
}
_BY_KIND: Mapping[str, pb.Code.ValueType] = {
    "INVALID_ARGUMENT": pb.BAD_REQUEST,
    "NOT_FOUND": pb.NOT_FOUND,
    "ALREADY_EXISTS": pb.PRECONDITION_FAILED,
    "RESOURCE_EXHAUSTED": pb.TOO_MANY_REQUESTS,
    "FAILED_PRECONDITION": pb.HA_NOT_AVAILABLE,
    "ABORTED": pb.HA_NOT_AVAILABLE,
    "UNAVAILABLE": pb.HA_NOT_AVAILABLE,
}


class Refused(Exception):
    """A call, or one item of it, is refused, and changes nothing.

    Args:
        message: One or two sentences: what was wrong with which value, and what to do.
    """

    def __init__(self, code: pb.Code.ValueType, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class NotHeld(Refused):
    """The client does not hold the message by its handle, or not any more."""

    def __init__(self, message: str) -> None:
        super().__init__(pb.INVALID_RECEIPT_HANDLE, message)


def check_size(message: Message, bytes_max: int) -> None:
    """Return if a part of a request, with fields that are not known, has at most `bytes_max`.

    Raises:
        Refused: It is larger.
    """
    size = message.ByteSize()
    if size > bytes_max:
        raise Refused(
            pb.PAYLOAD_TOO_LARGE,
            f"{message.DESCRIPTOR.name} has {size} bytes; the limit is {bytes_max}",
        )


def status_of(error: Exception) -> pb.Status:
    """Return the status of a failure; of an unexpected one without its text."""
    match error:
        case Refused():
            return pb.Status(code=error.code, message=error.message)
        case errors.BatonError():
            known = next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
            code = known or _BY_KIND.get(error.kind, pb.INTERNAL_SERVER_ERROR)
            text = f"{error.reason}: {error.message}"
            return pb.Status(code=code, message=f"{text}. {error.remedy}" if error.remedy else text)
    return pb.Status(
        code=pb.INTERNAL_SERVER_ERROR, message="unexpected error; see the log of the gateway"
    )
