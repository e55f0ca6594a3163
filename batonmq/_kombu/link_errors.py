"""Errors between a program with Kombu and its client process."""

from __future__ import annotations

from baton.common.v1 import error_pb2
from batonmq._common.rpc import error_from_pb, error_to_pb
from batonmq.errors import BatonError


def error_text(error: BatonError) -> str:
    """Return an error as text for a frame."""
    return error_to_pb(error).SerializeToString().hex()


def error_of_text(text: str) -> BatonError:
    """Return the error that a frame contains."""
    return error_from_pb(error_pb2.Error.FromString(bytes.fromhex(text)))
