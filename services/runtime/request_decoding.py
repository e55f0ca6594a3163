"""Requests that can't be decoded are errors of their callers, sent as INVALID_ARGUMENT.

gRPC decodes a request before any handler runs. It answers bytes that are no message with UNKNOWN,
and logs a traceback for each. So the decoder returns the failure as a value, and the handler's
wrapper raises it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from batonmq._common.rpc import abort
from batonmq.errors import BatonError, InvalidArgument
from batonmq_server.runtime.response_stream import write_responses

Context = grpc.aio.ServicerContext[Any, Any]
Decode = Callable[[bytes], Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """What a decoder returns for bytes that are no message of its type."""

    size: int


def decoder_of(handler: grpc.RpcMethodHandler[Any, Any]) -> Decode | None:
    """Return the decoder of a handler; for bytes that are no message it returns a marker.

    Pass what it returns to `decoded`.
    """
    decode: Decode | None = handler.request_deserializer
    if decode is None:
        return None
    known = decode

    def decode_or_mark(sent: bytes) -> Any:
        try:
            return known(sent)
        except (DecodeError, UnicodeDecodeError):
            return _Undecodable(len(sent))

    return decode_or_mark


def decoded(request: T) -> T:
    """Return a request that was decoded.

    Raises:
        InvalidArgument: it could not be decoded.
    """
    if isinstance(request, _Undecodable):
        raise InvalidArgument(
            f"the request of {request.size} bytes is not a message of this method",
            remedy="Encode it with the contract of this version; strings must be UTF-8.",
            facts={"field": "request"},
        )
    return request


async def decoded_stream(requests: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield the requests of a stream; raises as `decoded`."""
    async for request in requests:
        yield decoded(request)


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Sends BatonError as its status, for servers without an edge: those of health checks."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wrap the handler chosen for this call."""
        handler = await continuation(handler_call_details)
        return None if handler is None else with_decoding(handler)


def with_decoding(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a third-party service that sends BatonError as its status."""
    codec = (decoder_of(handler), handler.response_serializer)
    if handler.unary_unary is not None:
        call = _unary(handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(call, *codec)
    if handler.unary_stream is not None:
        stream = _stream(handler.unary_stream, decoded)
        return grpc.unary_stream_rpc_method_handler(stream, *codec)
    assert handler.stream_stream is not None, "no service has other kinds of calls"
    stream = _stream(handler.stream_stream, decoded_stream)
    return grpc.stream_stream_rpc_method_handler(stream, *codec)


def _unary(call: Any) -> Any:
    async def wrapped(request: Any, context: Context) -> Any:
        try:
            return await call(decoded(request), context)
        except BatonError as error:
            await abort(context, error)

    return wrapped


def _stream(call: Any, check: Callable[[Any], Any]) -> Any:
    async def wrapped(request: Any, context: Context) -> None:
        try:
            await write_responses(call(check(request), context), context)
        except BatonError as error:
            await abort(context, error)

    return wrapped
