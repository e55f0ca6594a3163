"""The servicer of a replica set's leader."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from batonmq.errors import BatonError, NoQuorum, NotLeader, Unreachable
from batonmq_server.runtime.replication.replica_node import ReplicaNode


class LeaderServicer:
    """Forwards each call to the servicer of the current leadership.

    A response is sent only if the lease is still valid then (protocol section 8). Otherwise the
    outcome of the call is not known: it ends with Unreachable, not with an error which says that
    nothing was changed.

    Args:
        servicer: Returns the servicer of the leadership; raises if there is none or it does not
            serve yet.
    """

    def __init__(self, node: ReplicaNode[Any], servicer: Callable[[], Any]) -> None:
        self._node, self._servicer = node, servicer

    def __getattr__(self, method: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            servicer, leadership = self._servicer(), self._node.leadership
            try:
                answer = await getattr(servicer, method)(request, context)
            except BatonError:
                self._check_still_leads(leadership)
                raise
            self._check_still_leads(leadership)
            return answer

        return call

    def _check_still_leads(self, leadership: Any) -> None:
        try:
            self._node.check_still(leadership)
        except (NoQuorum, NotLeader) as error:
            raise Unreachable(
                "the leadership of this node ended during the call; its outcome is not known",
                retry_after_ms=200,
            ) from error
