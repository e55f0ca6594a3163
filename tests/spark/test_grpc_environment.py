"""Goal: programs with Spark, too, set what gRPC reads before they import it.

Method: a program of its own, as in the test of the client library.
"""

from __future__ import annotations

from batonmq._connection import grpc_environment
from tests.client.test_grpc_environment import IMPORT, run


def test_variables_are_set_before_grpc_is_imported() -> None:
    printed, _ = run(IMPORT.format(module="batonspark.cluster"))
    assert printed == f"{grpc_environment.POLLING_THREAD_READS} 0"
