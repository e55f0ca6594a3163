"""What an answer to an arbitrary request may be.

Every failure is one of the contract: it has a reason of the catalogue other than INTERNAL. The
caller's own deadline is no failure of the service.
"""

from __future__ import annotations

import grpc

from batonmq._common.rpc import from_rpc_error
from batonmq.errors import Internal, Unreachable

OK = "OK"
TIMED_OUT = "DEADLINE_EXCEEDED"


def outcome_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Return the name of a failed call's outcome, and why it breaks the contract.

    Returns:
        The reason of the error, or the name of the status; and a problem, empty if there is none.
    """
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TIMED_OUT, ""
    failure = from_rpc_error(error)
    if isinstance(failure, Internal | Unreachable):
        return error.code().name, f"{error.code().name}: {error.details()}"
    return failure.reason, ""
