"""List 100,000 locks over gRPC and print their count and the memory used. See test_list_pages.

A process of its own, because the peak of its memory can be measured only from its start.
"""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any, cast

import grpc.aio

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._connection.channels import connect
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq_server.lockmgr.candidate import Candidate
from batonmq_server.lockmgr.core.lock_entry import LockPolicy, LockRecord
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.lockmgr.server import LockmgrServicer

LOCKS = 100_000
QUEUES_PER_TOPIC = 100


class TableLeader:
    """A candidate that is its own leader and has only a lock table."""

    term, silence_ms = 7, 30_000

    def __init__(self) -> None:
        table = LockTable(LockPolicy())
        owner = Incarnation("client-with-an-id-of-usual-length", 1)
        for number in range(LOCKS):
            topic, queue_id = divmod(number, QUEUES_PER_TOPIC)
            key = GroupQueue("group", f"topic-{topic:04}", "broker-a", queue_id)
            table.load(key, LockRecord(owner=owner, token=number + 1), number + 1, 0)
            table.confirm(key, number + 1, 0)
        self.entries = table.entries

    def leader(self) -> TableLeader:
        return self


async def measure() -> dict[str, int]:
    """Return the locks and pages that were listed, and the growth of the peak memory in KiB."""
    leader = TableLeader()
    server = grpc.aio.server()
    servicer = LockmgrServicer(cast("Candidate", leader), Clock(), hold_ms_max=0)
    pb_grpc.add_LockmgrServiceServicer_to_server(servicer, cast("Any", server))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    listed, page_count, request = 0, 0, pb.ListRequest()
    async with connect(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.LockmgrServiceStub(channel)
        while True:
            answer = await stub.List(request, timeout=20)
            listed, page_count = listed + len(answer.entries), page_count + 1
            request.page_token = answer.next_page_token
            if not request.page_token:
                break
    growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    await server.stop(None)
    return {"listed": listed, "pages": page_count, "growth_kib": growth_kib}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure())))
