"""Who asks a replica for what only its leader may say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from batonmq.errors import BatonError, NoQuorum, NotLeader, Unreachable
from batonmq_server.runtime.replication.replica_node import ReplicaNode

Leadership = TypeVar("Leadership")


class Role(Generic[Leadership]):
    """A node's part in its replica set, as those see it who call the node.

    Args:
        member: The node in its set.
    """

    def __init__(self, member: ReplicaNode) -> None:
        self.member = member
        self._leadership: Leadership | None = None

    def check(self) -> None:
        """Refuse to answer once the lease may be over.

        Raises:
            NoQuorum, NotLeader: it may be; or another node is the leader.
        """
        self.member.check()

    @property
    def leadership(self) -> Leadership:
        """What followers ask.

        Raises:
            NoQuorum, NotLeader: as `check`.
        """
        self.check()
        if self._leadership is None:
            raise self.member.not_leader()
        return self._leadership

    def check_still(self, leadership: Leadership) -> None:
        """Refuse to answer for a leadership that is over, whoever is the leader now.

        Raises:
            NoQuorum, NotLeader: it is.
        """
        if self.leadership is not leadership:
            raise self.member.not_leader()


class LeaderServicer:
    """Stands where a servicer is expected: each call goes to the one of the leadership.

    An answer leaves only if the lease is still good then (protocol section 8). Otherwise nobody
    knows what has become of the call: that is no refusal, after which nothing would have changed.

    Args:
        servicer: That of the leadership; raises if there is none, or it does not serve yet.
    """

    def __init__(self, role: Role[Any], servicer: Callable[[], Any]) -> None:
        self._role, self._servicer = role, servicer

    def __getattr__(self, method: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            servicer, leadership = self._servicer(), self._role.leadership
            try:
                answer = await getattr(servicer, method)(request, context)
            except BatonError:
                self._check_over(leadership)
                raise
            self._check_over(leadership)
            return answer

        return call

    def _check_over(self, leadership: Any) -> None:
        try:
            self._role.check_still(leadership)
        except (NoQuorum, NotLeader) as error:
            raise Unreachable(
                "this node was leader, and it is not known what has become of the call",
                retry_after_ms=200,
            ) from error
