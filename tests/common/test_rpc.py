"""Goal: a failed call is converted to an error that its caller can act upon.

Method: errors as gRPC makes them.
"""

from __future__ import annotations

import subprocess
import sys

import grpc
import grpc.aio
import pytest

from batonmq._common.rpc import STATUS_TRAILER, from_rpc_error, status_of
from batonmq.errors import Retry, WrongBroker


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "UNREACHABLE"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "UNREACHABLE"),
        (grpc.StatusCode.CANCELLED, "UNREACHABLE"),
        (grpc.StatusCode.INTERNAL, "INTERNAL"),
        (grpc.StatusCode.UNKNOWN, "INTERNAL"),
    ],
)
def test_status_without_details_is_retried_only_if_transient(
    code: grpc.StatusCode, reason: str
) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="gone")
    converted = from_rpc_error(error)
    assert converted.reason == reason
    assert (converted.retry is Retry.SAME_CALL) == (reason == "UNREACHABLE")
    assert converted.message == f"{code.name}: gone"


@pytest.mark.parametrize("trailer", [b"\xff", "no bytes"])
def test_malformed_status_trailer_is_ignored(trailer: bytes | str) -> None:
    trailers = grpc.aio.Metadata((STATUS_TRAILER, trailer))
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, details="gone"
    )
    assert from_rpc_error(error).reason == "UNREACHABLE"


def test_server_that_does_not_know_the_call_is_another_service() -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNIMPLEMENTED, nothing, nothing, details="Method not found!"
    )
    converted = from_rpc_error(error)
    assert (converted.reason, converted.retry) == ("INTERNAL", Retry.NEVER)
    assert "Method not found!" in converted.message
    assert converted.remedy.startswith("Check the address")


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\U0001f600"])
def test_status_that_quotes_a_long_name_fits_into_a_trailer(letter: str) -> None:
    name = letter * 70_000
    status = status_of(WrongBroker(f"broker {name}", facts={"asked": name, "actual": "a"}))
    assert status.ByteSize() < 5_000  # gRPC's default limit of all trailers is 8 KiB, in base64
    assert status.message.startswith(f"broker {letter}")
    assert status.message.endswith("...")


def test_reason_means_the_same_error_whatever_was_imported_first() -> None:
    program = """
import batonmq._producer.receipts
from batonmq._common.rpc import ERROR_OF
print(ERROR_OF["UNREACHABLE"].__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "Unreachable"
